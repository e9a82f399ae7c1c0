"""exec, logs and port-forward where a node's kubelet hangs or is dead."""

from __future__ import annotations

from tests.kube.command_line import Ran, Run
from tests.kubernetes.graph import Graph
from tests.kubernetes.test_verify import SECOND, verify


def unread(ran: Ran) -> dict[str, str]:
    """Code -> message of the checks that could not read what they check."""
    return {code: check["message"] for code, check in ran.checks.items() if check.get("unread")}


def names_on(graph: Graph, node: str) -> list[str]:
    pods = graph.pods()
    return sorted(name for name in pods if pods[name]["spec"]["nodeName"] == node)


def test_a_hanging_kubelet_is_named_and_not_the_api_server(graph: Graph, dynctl: Run) -> None:
    with graph.nodes[SECOND].frozen_kubelet():
        ran = verify(graph, dynctl, "--timeout", "3")
    messages = unread(ran)
    assert messages, ran.out
    for message in messages.values():
        assert f"node {SECOND} does not respond to " in message
        assert "no response within 3 s; the API server responds" in message
        assert all(name in message for name in names_on(graph, SECOND))
    rows = {row["worker"]: row for row in ran.json["chain"]}
    others = names_on(graph, "node-a")
    assert {rows[name]["file"]["state"] for name in others if name in rows} == {"same"}


def test_a_dead_kubelet_is_named(graph: Graph, dynctl: Run) -> None:
    node = graph.nodes[SECOND]
    node.kill_kubelet()
    try:
        ran = verify(graph, dynctl)
    finally:
        node.start_kubelet()
        graph.plane.wait(node.is_ready, "the node to be Ready again", 60)
        graph.wait_ready()
    messages = unread(ran)
    assert messages, ran.out
    assert all(f"node {SECOND} does not respond to " in one for one in messages.values())
