"""The accounts of docs/deploy/kubernetes in a real cluster, and their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml
from kubernetes import config

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


def api_of(kubeconfig: Path, token: str | None = None) -> Api:
    """As the user of a kubeconfig, or as the user of a token at the same API server."""
    with config.new_client_from_config(config_file=str(kubeconfig)) as connection:
        given = connection.configuration
        authority = Path(given.ssl_ca_cert) if given.ssl_ca_cert else None
        if token is not None:
            return Api(given.host, token, authority)
        shown = [setting["value"] or "" for setting in given.auth_settings().values()]
        own = shown[0].removeprefix("Bearer ") if shown else None
        keys = (given.cert_file, given.key_file) if given.cert_file else None
        return Api(given.host, own, authority, keys=keys)
