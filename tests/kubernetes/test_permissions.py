"""The accounts of the manifests under Kubernetes' own authorizer: what each may do, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.kube.client import Api
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.manifests import HOME, account_token, apply_accounts
from tests.kubernetes.objects import create

Rights = set[tuple[str, str]]
"""(verb, resource)."""


def rights(verbs: str, *resources: str) -> Rights:
    return {(verb, resource) for verb in verbs.split() for resource in resources}


_METADATA, _SLICES = "dynamoworkermetadatas.nvidia.com", "endpointslices.discovery.k8s.io"
_POOLS, _FOLLOW = "inferencepools.inference.networking.k8s.io", "get list watch"
EXPECTED: Final[dict[str, tuple[Rights, Rights]]] = {
    "frontend": (rights(_FOLLOW, _METADATA, _SLICES), set()),
    "epp": (rights(_FOLLOW, _POOLS, "pods"), set()),
    "attach": (rights("list create patch delete", _METADATA) | rights("list", _SLICES), set()),
    "topology-sync": (
        rights("create get update", "leases.coordination.k8s.io"),
        rights("list watch", "nodes", "pods")
        | rights("list", "clustertopologies.grove.io", "clustertopologybindings.grove.io")
        | rights("patch", "pods", "events")
        | rights("create", "events"),
    ),
}
"""Account -> its rights in its own namespace, and those in all namespaces."""


@pytest.fixture(scope="module")
def admin(control_plane: ControlPlane) -> Iterator[Api]:
    """Of a cluster with the accounts of the manifests, and one without rights of its own."""
    with control_plane.api() as api:
        apply_accounts(api)
        about = {"namespace": HOME, "name": "plain"}
        create(api, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about})
        yield api


def rights_of(api: Api, plane: ControlPlane, account: str, namespace: str) -> Rights:
    """What the authorizer lets an account do in a namespace."""
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    with plane.api(account_token(api, account)) as own:
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        rules = own.create(path, body)["status"]["resourceRules"]
    return {
        (verb, f"{resource}.{group}" if group else resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_an_account_may_do_what_its_process_needs_and_no_more(
    name: str, admin: Api, control_plane: ControlPlane
) -> None:
    any_account = rights_of(admin, control_plane, "plain", HOME)
    inside, everywhere = EXPECTED[name]
    at_home = rights_of(admin, control_plane, f"dynctl-{name}", HOME)
    elsewhere = rights_of(admin, control_plane, f"dynctl-{name}", "default")
    assert at_home - any_account == inside | everywhere
    assert elsewhere - any_account == everywhere
