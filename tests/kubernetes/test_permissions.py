"""The accounts of the manifests under Kubernetes' own authorizer: what each may do, and no more."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kubernetes.conftest import FOREIGN
from tests.kubernetes.manifests import HOME, account_token, api_of, apply_accounts
from tests.kubernetes.objects import create, path_of

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
def home(kubeconfig: Path) -> Iterator[str]:
    """A namespace with the accounts of the manifests, and one without rights of its own. In a
    cluster that is not the suite's nothing outside of it is made."""
    name = f"dynctl-rights-{uuid.uuid4().hex[:8]}" if FOREIGN else HOME
    with api_of(kubeconfig) as api:
        apply_accounts(api, name)
        about = {"namespace": name, "name": "plain"}
        create(api, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about})
        yield name
        if FOREIGN:
            api.delete(path_of("Namespace", "", name))


def rights_of(kubeconfig: Path, account: str, home: str, namespace: str) -> Rights:
    """What the authorizer lets an account of ``home`` do in a namespace."""
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    with api_of(kubeconfig) as api:
        token = account_token(api, account, home)
    with api_of(kubeconfig, token) as own:
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
    name: str, home: str, kubeconfig: Path
) -> None:
    inside, everywhere = EXPECTED[name]
    if FOREIGN:
        everywhere = set()
    any_account = rights_of(kubeconfig, "plain", home, home)
    at_home = rights_of(kubeconfig, f"dynctl-{name}", home, home)
    elsewhere = rights_of(kubeconfig, f"dynctl-{name}", home, "default")
    assert at_home - any_account == inside | everywhere
    assert elsewhere - any_account == everywhere
