"""`topology verify` on a real cluster: healthy, and with the faults that objects can express."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from dynctl.wire.kubernetes.names import TOPOLOGY_VOLUME
from tests.kube.client import Api
from tests.kube.command_line import Ran, Run
from tests.kube.objects import ZONE, Json
from tests.kube.objects.accounts import OPERATOR_NAME, OPERATOR_NAMESPACE
from tests.kube.test_verify_live import Meanwhile
from tests.kubernetes.control_plane import VIEWER
from tests.kubernetes.graph import GRAPH, NAMESPACE, Graph
from tests.kubernetes.objects import create, path_of
from tests.waiting import patience

UNEVEN: Final = {"DYT0902", "DYT0908"}
"""Warnings that this graph deserves: of its three decode workers one is alone in its zone."""
SECOND: Final = "node-b"
"""The node of the second zone, to which all faults happen."""


def verify(graph: Graph, dynctl: Run, *words: str) -> Ran:
    config = graph.plane.kubeconfig(VIEWER, NAMESPACE)
    return dynctl("topology", "verify", "-o", "json", *words, "--kubeconfig", config)


def findings_of(ran: Ran) -> str:
    """What it reports, for messages."""
    lines = [
        f"{code} {subject}: {value}"
        for code in sorted(ran.reported)
        for subject, value in ran.values(code).items()
    ]
    return "\n".join([ran.err, *lines])


def test_a_healthy_graph_has_whole_chains_of_custody(graph: Graph, dynctl: Run) -> None:
    ran = verify(graph, dynctl)
    assert (ran.code, ran.reported) == (0, UNEVEN), findings_of(ran)
    zones = dict(zip(graph.nodes, graph.zones, strict=True))
    links = ("node", "label", "file", "card", "taint", "router")
    assert len(ran.json["chain"]) == 5
    for row in ran.json["chain"]:
        zone = zones[graph.pods()[row["worker"]]["spec"]["nodeName"]]
        assert {(row[link]["state"], row[link]["value"]) for link in links} == {("same", zone)}
    assert not [code for code, check in ran.checks.items() if check.get("unread")]


def test_live_requests_stay_in_their_zone(graph: Graph, dynctl: Run) -> None:
    ran = verify(graph, dynctl, "--probe", "4")
    assert (ran.code, ran.checks["DYT0905"]["message"]) == (0, "4 requests")


Injection = Callable[[Graph, Api], Any]


@dataclass(frozen=True)
class Fault:
    """``codes``: what verify reports of it, beside the warnings that the graph deserves."""

    name: str
    codes: set[str]
    inject: Callable[[Graph, Api], Any]


@contextmanager
def changed(api: Api, path: str, patch: Json, undo: Json, kind: str = "merge") -> Iterator[None]:
    api.patch(path, patch, kind, fieldManager="kubectl-patch")
    try:
        yield
    finally:
        api.patch(path, undo, kind, fieldManager="kubectl-patch")


def label_patch(value: str) -> Json:
    return {"metadata": {"labels": {ZONE: value}}}


@contextmanager
def relabelled_node(graph: Graph, api: Api) -> Iterator[None]:
    path, zone = path_of("Node", "", SECOND), graph.zones[1]
    with changed(api, path, label_patch("us-east-1c"), label_patch(zone)):
        yield


@contextmanager
def relabelled_pod(graph: Graph, api: Api) -> Iterator[None]:
    [name] = graph.pods("decode-b")
    path = path_of("Pod", NAMESPACE, name)
    with changed(api, path, label_patch(graph.zones[0]), label_patch(graph.zones[1])):
        yield


def template(**spec: Any) -> Injection:
    """Another template of the Deployment of decode-b; its old pod stays until the new one is
    Ready."""

    @contextmanager
    def inject(graph: Graph, api: Api) -> Iterator[None]:
        path = path_of("Deployment", NAMESPACE, f"{GRAPH}-decode-b")
        before = api.get(path)["spec"]["template"]
        api.patch(path, {"spec": {"template": {"spec": spec}}}, "strategic")
        try:
            yield
        finally:
            undo = [{"op": "replace", "path": "/spec/template", "value": before}]
            api.patch(path, undo, "json")

    return inject


def main(**fields: Any) -> Injection:
    return template(containers=[{"name": "main", **fields}])


@contextmanager
def other_field(graph: Graph, api: Api) -> Iterator[None]:
    item = {"path": "zone", "fieldRef": {"fieldPath": "metadata.labels['nvidia.com/selector']"}}
    volume = {"name": TOPOLOGY_VOLUME, "downwardAPI": {"items": [item]}}
    with template(volumes=[volume])(graph, api):
        yield


@contextmanager
def deleted(graph: Graph, api: Api, *paths: str) -> Iterator[None]:
    bodies = [api.get(path) for path in paths]
    for path in paths:
        api.delete(path)
    try:
        yield
    finally:
        for body in bodies:
            for key in ("resourceVersion", "uid", "creationTimestamp", "managedFields"):
                body["metadata"].pop(key, None)
            create(api, body)


def unbound(graph: Graph, api: Api) -> Any:
    return deleted(
        graph, api, path_of("RoleBinding", NAMESPACE, f"{GRAPH}-k8s-service-discovery-rolebinding")
    )


def no_service(graph: Graph, api: Api) -> Any:
    return deleted(graph, api, path_of("Service", NAMESPACE, f"{GRAPH}-decode-b"))


def dead_operator(graph: Graph, api: Api) -> Any:
    path = path_of("Deployment", OPERATOR_NAMESPACE, OPERATOR_NAME)
    return changed(api, path, {"spec": {"replicas": 0}}, {"spec": {"replicas": 1}})


@contextmanager
def quota(graph: Graph, api: Api) -> Iterator[None]:
    metadata = {"namespace": NAMESPACE, "name": "few"}
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": metadata,
        "spec": {"hard": {"pods": "5"}},
    }
    create(api, body)
    path = path_of("ResourceQuota", NAMESPACE, "few")
    graph.plane.wait(lambda: api.get(path).get("status", {}).get("used"), "the quota to be counted")
    [name] = graph.pods("decode-b")
    api.delete(path_of("Pod", NAMESPACE, name), gracePeriodSeconds=0)
    try:
        yield
    finally:
        api.delete(path)


FAULTS = (
    Fault("relabelled-node", {"DYT0404"}, relabelled_node),
    Fault("relabelled-pod", {"DYT0404", "DYT0802"}, relabelled_pod),
    Fault("crash-loop", {"DYT0410"}, main(args=["python3", "-c", "exit(3)"])),
    Fault("missing-image", {"DYT0410"}, main(image="dynctl.test/nothing:1")),
    Fault("no-room", {"DYT0410"}, main(resources={"requests": {"cpu": "1000"}})),
    Fault("wrong-field", {"DYT0502", "DYT0901", "DYT0907"}, other_field),
    Fault("dead-operator", {"DYT0301"}, dead_operator),
    Fault("no-service", {"DYT0702", "DYT0901"}, no_service),
    Fault("quota", {"DYT0409", "DYT0901"}, quota),
    Fault("deleted-role", {"DYT0703"}, unbound),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_code_and_no_other(fault: Fault, graph: Graph, dynctl: Run) -> None:
    with graph.plane.api() as api:
        with fault.inject(graph, api):
            deadline = time.monotonic() + patience(12)
            while True:
                ran = verify(graph, dynctl)
                if ran.reported - UNEVEN == fault.codes or time.monotonic() > deadline:
                    break
                time.sleep(1)
        graph.wait_ready()
    assert ran.reported - UNEVEN == fault.codes, findings_of(ran)


def test_it_waits_until_a_node_is_right_again(
    graph: Graph, dynctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with graph.plane.api() as api, ExitStack() as fault:
        fault.enter_context(relabelled_node(graph, api))
        with Meanwhile(monkeypatch, fault.close):
            ran = verify(graph, dynctl, "--wait", "120s")
    assert ran.err.startswith("1 failed (DYT0404)"), ran.err
    assert (ran.code, ran.reported) == (0, UNEVEN)
