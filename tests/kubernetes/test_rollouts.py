"""`serve frontend --discovery kubernetes` while workers are replaced, drained and lost, and while
the API server is away."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.dynamo.kube_pods import MODEL
from tests.dynamo.ours import OurFrontend, frontend_of, wait
from tests.kubernetes.chats import Chats
from tests.kubernetes.control_plane import ADDRESS
from tests.kubernetes.graph import GRAPH, NAMESPACE, Graph
from tests.kubernetes.manifests import account_token, apply_accounts
from tests.kubernetes.objects import path_of


@pytest.fixture(scope="module")
def ours(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OurFrontend]:
    """Our frontend with the account of its manifest, and no other rights."""
    with graph.plane.api() as api:
        apply_accounts(api, NAMESPACE)
        token = account_token(api, "dynctl-frontend", NAMESPACE)
    variables = {
        "KUBECONFIG": str(graph.plane.kubeconfig(token, NAMESPACE)),
        "DYN_TCP_RESPONSE_STREAM_HOST": ADDRESS,
    }
    folder = tmp_path_factory.mktemp("ours")
    words = ("--discovery", "kubernetes", "--namespace", NAMESPACE)
    with frontend_of(folder, MODEL, worker_ids(graph), words, variables) as frontend:
        yield frontend


def worker_ids(graph: Graph) -> set[int]:
    return set(map(instance_id, worker_names(graph)))


def worker_names(graph: Graph) -> set[str]:
    return {name for name in graph.pods() if "frontend" not in name}


def follows(graph: Graph, ours: OurFrontend) -> None:
    """Wait until the frontend uses the workers that are Ready, and no others."""
    wait(ours, lambda: set(ours.ready()) == worker_ids(graph), "the workers of the graph", 60)


def test_no_request_is_lost_while_all_workers_are_replaced(graph: Graph, ours: OurFrontend) -> None:
    before = worker_names(graph)
    chats = Chats(ours)
    with chats, graph.plane.api() as api:
        changed = {"metadata": {"annotations": {"example.com/rollout": "1"}}}
        for component in graph.components:
            if component.is_worker:
                path = path_of("Deployment", NAMESPACE, f"{GRAPH}-{component.name}")
                api.patch(path, {"spec": {"template": changed}})
        graph.plane.wait(lambda: not before & worker_names(graph), "the new pods", 120)
        graph.wait_ready()
        follows(graph, ours)
    assert len(chats.statuses) > 10
    assert set(chats.statuses) == {200}


def test_no_request_is_lost_while_a_node_is_drained(graph: Graph, ours: OurFrontend) -> None:
    name, node = list(graph.nodes.items())[1]
    chats = Chats(ours)
    with graph.plane.api() as api, node.cordoned(), chats:
        for pod_name, pod in graph.pods().items():
            if pod["spec"]["nodeName"] == name:
                metadata = {"name": pod_name}
                body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
                api.create(f"{path_of('Pod', NAMESPACE, pod_name)}/eviction", body)
        assert name not in {pod["spec"].get("nodeName") for pod in graph.pods().values()}
        wait(ours, lambda: len(ours.ready()) == 3, "the workers of the other node", 60)
        seen = len(chats.statuses)
        wait(ours, lambda: len(chats.statuses) > seen + 10, "requests without the node", 60)
    assert set(chats.statuses) == {200}
    graph.wait_ready()
    follows(graph, ours)


def test_a_lost_node_is_left_and_taken_again(graph: Graph, ours: OurFrontend) -> None:
    """Its kubelet ends and its network is cut: nothing there answers, and nothing says so."""
    name, node = list(graph.nodes.items())[1]
    chats = Chats(ours)
    with chats:
        node.kill_kubelet()
        cut(name, "down")
        try:
            graph.plane.wait(lambda: not node.is_ready(), "the node to be NotReady", 60)
            wait(ours, lambda: len(ours.ready()) == 3, "the workers of the other node", 60)
            seen = len(chats.statuses)
            wait(ours, lambda: len(chats.statuses) > seen + 10, "requests without the node", 60)
        finally:
            cut(name, "up")
            node.start_kubelet()
        graph.plane.wait(node.is_ready, "the node to be Ready", 60)
        graph.wait_ready()
        follows(graph, ours)
    assert set(chats.statuses) == {200}


def cut(bridge: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", bridge, state], check=True)


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
    follows(graph, ours)
