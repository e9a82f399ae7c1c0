"""`serve frontend --discovery kubernetes` while the API server is away, and after it forgot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.dynamo.kube_pods import MODEL
from tests.dynamo.ours import OurFrontend, frontend_of, wait
from tests.kubernetes.chats import Chats
from tests.kubernetes.control_plane import ADDRESS
from tests.kubernetes.graph import NAMESPACE, Graph
from tests.kubernetes.manifests import account_token, apply_accounts
from tests.kubernetes.objects import path_of


def worker_ids(graph: Graph) -> set[int]:
    return {instance_id(name) for name in graph.pods() if "frontend" not in name}


@pytest.fixture
def ours(graph: Graph, tmp_path: Path) -> Iterator[OurFrontend]:
    """Our frontend with the account of the manifest, and no other rights."""
    with graph.plane.api() as api:
        apply_accounts(api, NAMESPACE)
        token = account_token(api, "dynctl-frontend", NAMESPACE)
    variables = {
        "KUBECONFIG": str(graph.plane.kubeconfig(token, NAMESPACE)),
        "DYN_TCP_RESPONSE_STREAM_HOST": ADDRESS,
    }
    words = ("--discovery", "kubernetes", "--namespace", NAMESPACE)
    with frontend_of(tmp_path, MODEL, worker_ids(graph), words, variables) as frontend:
        yield frontend


def test_no_request_is_lost_while_the_api_server_restarts(graph: Graph, ours: OurFrontend) -> None:
    plane = graph.plane
    chats = Chats(ours)

    def is_interrupted() -> bool:
        return any(code == "DISCOVERY_INTERRUPTED" for code, _ in ours.conditions())

    with chats:
        plane.kill_api_server()
        try:
            wait(ours, is_interrupted, "the condition")
            # What the watches saw last is forgotten: they are refused with 410 later.
            plane.compact_etcd()
        finally:
            plane.start_api_server()
        wait(ours, lambda: not is_interrupted(), "the cluster to be read again")
    assert set(chats.statuses) == {200}
    assert len(chats.statuses) > 10

    # It follows the cluster again: a new pod gets requests, the old one is forgotten.
    [name] = graph.pods("decode-b")
    with plane.api() as api:
        api.delete(path_of("Pod", NAMESPACE, name))
    graph.wait_ready()
    wait(ours, lambda: set(ours.ready()) == worker_ids(graph), "the new worker", 60)
