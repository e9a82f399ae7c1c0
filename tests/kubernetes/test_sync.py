"""`topology sync` in two replicas under a real API server, with the account of its manifest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from dynctl.wire.kubernetes.names import LABEL_KEY_ANNOTATION
from tests.dynamo.processes import ProcessGroup
from tests.kube.client import Api
from tests.kube.objects import Json
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.manifests import HOME, account_token, apply_accounts
from tests.kubernetes.objects import create, namespace_of, path_of

KEY: Final = "example.com/rack"
"""Not a label that Kubernetes 1.35 copies itself."""
NAMESPACE: Final = "synced"


@pytest.fixture
def admin(control_plane: ControlPlane) -> Iterator[Api]:
    """Of a cluster with a node that no kubelet serves, and with the accounts of the manifests."""
    with control_plane.api() as api:
        apply_accounts(api)
        create(api, namespace_of(NAMESPACE))
        accounts = path_of("ServiceAccount", NAMESPACE)
        control_plane.wait(lambda: api.list(accounts), "the account that pods have by default")
        labels = {KEY: "rack-7"}
        create(
            api,
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "bare", "labels": labels}},
        )
        yield api
        api.delete(path_of("Node", "", "bare"))
        api.delete(path_of("Namespace", "", NAMESPACE))


def pod_of(name: str) -> Json:
    """A pod on that node that waits for its label."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "annotations": {LABEL_KEY_ANNOTATION: KEY},
        },
        "spec": {
            "nodeName": "bare",
            "tolerations": [{"operator": "Exists"}],
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "none"}],
        },
    }


def label_of(api: Api, pod: str) -> str:
    labels: dict[str, str] = api.get(path_of("Pod", NAMESPACE, pod))["metadata"].get("labels", {})
    return labels.get(KEY, "")


def holder(api: Api) -> str:
    lease = api.get(path_of("Lease", HOME, "dynctl-topology-sync"))
    return str(lease["spec"]["holderIdentity"])


def test_a_second_replica_goes_on_where_the_leader_was_killed(
    admin: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    group = ProcessGroup(tmp_path)
    config = control_plane.kubeconfig(account_token(admin, "dynctl-topology-sync"), HOME)
    words = ["topology", "sync", "-n", NAMESPACE, "--lease-namespace", HOME, "--system-port", "0"]
    command = [sys.executable, "-m", "dynctl", *words, "--kubeconfig", str(config)]
    try:
        replicas = [
            group.start(f"sync-{number}", command, {"HOME": str(tmp_path)}) for number in range(2)
        ]
        create(admin, pod_of("first"))
        control_plane.wait(lambda: label_of(admin, "first") == "rack-7", "the first label")
        leader = next(one for one in replicas if f"_{one.pid}_" in holder(admin))
        leader.kill()
        create(admin, pod_of("second"))
        control_plane.wait(lambda: label_of(admin, "second") == "rack-7", "the second label", 30)
        [other] = [one for one in replicas if one is not leader]
        assert f"_{other.pid}_" in holder(admin)
    finally:
        group.close()
