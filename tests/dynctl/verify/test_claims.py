"""Which registration belongs to which pod, where names, addresses and ids are not unique."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from dynctl.documents.verify import CustodyRow, VerifyReport
from dynctl.findings.report import CheckResult, State
from dynctl.verify.checks.all import verify
from dynctl.verify.cluster_facts import Registry
from tests.dynctl.verify.scene import DECODE, PREFILL, A, B
from tests.kube import deployment
from tests.kube.facts import facts_of, registry_of, router_views
from tests.kube.objects import Json

HOSTS = {"gpu-a-0": "10.1.0.1", "gpu-a-1": "10.1.0.2", "gpu-b-0": "10.1.0.3", "gpu-b-1": "10.1.0.4"}


def made(**wanted: Any) -> list[Json]:
    return copy.deepcopy(deployment.healthy(**wanted))


def two_namespaces() -> list[Json]:
    """One graph in two namespaces, with pods of the same names, so with the same ids."""
    other = made(namespace="staging")
    return [*made(), *(one for one in other if one["metadata"].get("namespace") == "staging")]


def named(bodies: Iterable[Json], kind: str, name: str, namespace: str = "prod") -> Json:
    about = {"kind": kind, "name": name, "namespace": namespace}
    return next(
        one
        for one in bodies
        if {"kind": one["kind"], **{k: one["metadata"].get(k) for k in ("name", "namespace")}}
        == about
    )


def card(bodies: Iterable[Json], name: str, namespace: str = "prod") -> Json:
    return deployment.card_config(named(bodies, "DynamoWorkerMetadata", name, namespace))


def move(config: Json, zone: str) -> None:
    config["topology_domains"] = {"zone": zone}
    config["taints"] = [f"dynamo.topology/zone={zone}"]


def on_hosts(bodies: list[Json]) -> list[Json]:
    """All pods on the network of their node: an address has a prefill and two decode workers."""
    for pod in [one for one in bodies if one["kind"] == "Pod" and one["spec"].get("nodeName")]:
        pod["spec"]["hostNetwork"] = True
        pod["status"]["podIP"] = HOSTS[pod["spec"]["nodeName"]]
    return bodies


def registered(bodies: Iterable[Json], *, but: str = "", form: str = "{}") -> Registry:
    """What the workers register elsewhere; ``form`` of the host in their addresses."""
    changed = copy.deepcopy([one for one in bodies if one["metadata"]["name"] != but])
    for one in changed:
        if one["kind"] == "Pod" and "podIP" in one["status"]:
            one["status"]["podIP"] = form.format(one["status"]["podIP"])
    return registry_of(changed)


def report(bodies: list[Json], **wanted: Any) -> VerifyReport:
    return verify(facts_of(bodies, **wanted))


def check(of: VerifyReport, code: str) -> CheckResult:
    return next(one for one in of.checks if one.code == code)


def wrong(of: VerifyReport) -> dict[str, list[str]]:
    return {
        one.code: [item.subject for item in one.findings]
        for one in of.checks
        if one.state in (State.FAIL, State.WARN)
    }


def row(of: VerifyReport, worker: str) -> CustodyRow:
    return next(one for one in of.chain if one.worker == worker)


# -- Kubernetes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["prod", "staging"])
def test_a_card_belongs_to_the_pod_of_its_own_namespace(namespace: str):
    bodies = two_namespaces()
    move(card(bodies, DECODE, namespace), B)
    found = report(bodies, routers=router_views(bodies), logs={})
    assert wrong(found)["DYT0802"] == [f"Pod {DECODE}.{namespace}"]
    broken = [(one.worker, one.namespace) for one in found.chain if one.first_break]
    assert broken == [(DECODE, namespace)]


def test_one_dynamo_namespace_in_two_namespaces_of_kubernetes():
    """Then the keys of their registrations are the same, too."""
    bodies = two_namespaces()
    for body in [one for one in bodies if one["kind"] == "Pod"]:
        body["metadata"]["labels"]["nvidia.com/dynamo-namespace"] = "dynamo"
    for body in [one for one in bodies if one["kind"] == "DynamoWorkerMetadata"]:
        pod = named(bodies, "Pod", body["metadata"]["name"], body["metadata"]["namespace"])
        bodies[bodies.index(body)] = deployment.registration(pod)
    assert wrong(report(bodies, routers=router_views(bodies))) == {}
    move(card(bodies, DECODE, "prod"), B)
    found = report(bodies, routers=router_views(bodies), logs={})
    assert wrong(found)["DYT0802"] == [f"Pod {DECODE}.prod"]


def test_a_pod_on_the_hosts_network_does_not_get_its_neighbours_card():
    bodies = on_hosts(made())
    for body in [one for one in bodies if one["kind"] == "DynamoWorkerMetadata"]:
        pod = named(bodies, "Pod", body["metadata"]["name"])
        bodies[bodies.index(body)] = deployment.registration(pod)
    bodies.remove(named(bodies, "DynamoWorkerMetadata", DECODE))
    found = report(bodies)
    assert wrong(found)["DYT0704"] == [f"Pod {DECODE}.prod"]
    assert (row(found, DECODE).role, row(found, DECODE).first_break) == ("decode", "card")


def test_a_rank_that_registers_is_a_worker():
    """Engines with data parallelism over nodes may register each rank."""
    bodies = made()
    name = "my-llm-decode-a-1"
    named(bodies, "Pod", name)["metadata"]["labels"] |= {
        "leaderworkerset.sigs.k8s.io/name": "my-llm-decode-a",
        "leaderworkerset.sigs.k8s.io/group-index": "0",
        "leaderworkerset.sigs.k8s.io/worker-index": "1",
    }
    assert wrong(report(bodies)) == {}
    move(card(bodies, name), B)
    found = report(bodies, logs={})
    assert wrong(found)["DYT0802"] == [f"Pod {name}.prod"]
    assert row(found, name).first_break == "card"


def test_the_card_of_an_adapter_has_the_workers_id():
    bodies = made()
    cards = named(bodies, "DynamoWorkerMetadata", DECODE)["spec"]["data"]["model_cards"]
    [(key, base)] = cards.items()
    adapter = copy.deepcopy(base)
    adapter["card_json"] |= {"display_name": "my-lora", "lora": {"name": "my-lora"}}
    cards[f"{key}/my-lora"] = adapter
    assert wrong(report(bodies)) == {}


def test_what_an_earlier_pod_left_is_neither_a_fault_nor_a_card_of_a_pod_that_has_not_started():
    bodies = made()
    pod = named(bodies, "Pod", DECODE)
    pod["metadata"]["uid"] = "another"
    del pod["spec"]["nodeName"], pod["metadata"]["labels"]["topology.kubernetes.io/zone"]
    pod["status"] = {"phase": "Pending"}
    found = report(bodies)
    assert wrong(found).keys() == {"DYT0410", "DYT0908"}
    assert row(found, DECODE).card.why == "registered by an earlier pod of this name"


def test_pods_that_were_evicted_are_no_rows():
    bodies = made()
    pod = copy.deepcopy(named(bodies, "Pod", DECODE))
    pod["metadata"] |= {"name": "my-llm-decode-a-9", "uid": "evicted"}
    pod["status"] = {"phase": "Failed", "reason": "Evicted", "podIP": "10.0.0.9"}
    found = report([*bodies, pod])
    assert wrong(found) == {}
    assert len(found.chain) == 12


# -- other backends --------------------------------------------------------------------------------


def test_pods_that_share_an_address_are_told_apart_by_their_roles():
    bodies = on_hosts(made(discovery="etcd"))
    found = report(bodies, registry=registered(bodies))
    assert wrong(found) == {}
    assert check(found, "DYT0707").state is State.PASS
    assert {one.role for one in found.chain if "decode" in one.worker} == {"decode"}
    found = report(bodies, registry=registered(bodies, but=PREFILL))
    assert wrong(found)["DYT0707"] == [f"Pod {PREFILL}.prod"]


@pytest.mark.parametrize("moved", [False, True], ids=["one is missing", "one differs"])
def test_pods_that_nothing_distinguishes_are_unknown(moved: bool):
    bodies = on_hosts(made(discovery="etcd"))
    registry = registered(bodies, but="" if moved else DECODE)
    if moved:
        registry = _with_a_moved_worker(registry)
    found = report(bodies, registry=registry)
    assert "DYT0707" not in wrong(found)
    assert check(found, "DYT0707").state is State.SKIP
    assert "2 pods share the address 10.1.0.1" in check(found, "DYT0707").message
    assert check(found, "DYT0901").state is State.SKIP
    assert "share the address" in row(found, DECODE).card.why
    assert all(one.namespace for one in found.chain)


def _with_a_moved_worker(registry: Registry) -> Registry:
    """The first decode worker of host 10.1.0.1 has another zone."""
    result: Any = registry.deployment
    place = next(
        place
        for place, one in enumerate(result.workers)
        if one.worker.role == "decode" and one.instance.address.startswith("10.1.0.1:")
    )
    one = result.workers[place]
    config = {**one.card.runtime_config, "topology_domains": {"zone": B}}
    moved = replace(one, card=replace(one.card, runtime_config=config))
    workers = (*result.workers[:place], moved, *result.workers[place + 1 :])
    return replace(registry, deployment=replace(result, workers=workers))


def test_a_lone_pod_on_a_host_gets_no_worker_of_another_deployment():
    """Of the pods of other namespaces only the registrations are known."""
    bodies = on_hosts(made(discovery="etcd", prefill=1, decode=1, nodes_per_zone=3))
    other = on_hosts(made(discovery="etcd", namespace="staging"))
    for pod in [one for one in other if one["kind"] == "Pod"]:
        pod["metadata"]["labels"]["nvidia.com/dynamo-namespace"] = "staging-my-llm"
    result = registered([*bodies, *other])
    found = report(bodies, registry=result, namespace="prod")
    assert wrong(found).keys() <= {"DYT0902"}
    assert check(found, "DYT0707").state is State.PASS


def test_addresses_of_ipv6():
    bodies = made(discovery="etcd")
    for number, pod in enumerate(one for one in bodies if one["kind"] == "Pod"):
        if "podIP" in pod["status"]:
            pod["status"]["podIP"] = f"fd00::{number:x}"
    found = report(bodies, registry=registered(bodies, form="[{}]"))
    assert wrong(found) == {}
    assert check(found, "DYT0707").state is State.PASS


def test_over_nats_a_registration_has_no_address():
    bodies = made(discovery="etcd")
    result: Any = registered(bodies).deployment
    workers = tuple(
        replace(
            one,
            instance=replace(one.instance, transport="nats_tcp", address="dynamo.backend.generate"),
        )
        for one in result.workers
    )
    registry = Registry("etcd 127.0.0.1:2379", replace(result, workers=workers))
    found = report(bodies, registry=registry)
    assert wrong(found) == {}
    for code in ("DYT0707", "DYT0801", "DYT0901"):
        assert check(found, code).state is State.SKIP
        assert "registered over NATS" in check(found, code).message
    assert A in {one.card.value for one in found.chain}
