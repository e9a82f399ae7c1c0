"""The accounts of docs/deploy/kubernetes in a real cluster, and their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml

from tests.kube.client import Api
from tests.kubernetes.objects import create, namespace_of, path_of

HOME: Final = "dynctl"
"""The namespace of the manifests."""
_MANIFESTS: Final = Path(__file__).parents[2] / "docs" / "deploy" / "kubernetes"
_KINDS: Final = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def apply_accounts(api: Api, namespace: str = HOME) -> None:
    """Accounts and their rights, of all manifests; what is of no namespace only with that of the
    manifests."""
    create(api, namespace_of(namespace))
    for path in sorted(_MANIFESTS.glob("*.yaml")):
        for body in yaml.safe_load_all(path.read_text()):
            wide = body["kind"].startswith("Cluster")
            if body["kind"] not in _KINDS or (wide and namespace != HOME):
                continue
            if not wide:
                body["metadata"]["namespace"] = namespace
            for subject in body.get("subjects", ()):
                subject["namespace"] = namespace
            create(api, body)


def account_token(api: Api, account: str, namespace: str = HOME) -> str:
    """A token of a service account, as its pods get it."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    path = f"{path_of('ServiceAccount', namespace, account)}/token"
    return str(api.create(path, body)["status"]["token"])
