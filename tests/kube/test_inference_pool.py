"""`serve epp --pool`: the ready pods of an InferencePool are the workers, as they change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.serving.engines.worker_spec import WorkerSpecError
from dynctl.serving.epp.pool import pod_specs
from dynctl.serving.routing.config import PickerConfig, PoolConfig
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from dynctl.wire.kubernetes.inference_pool import InferencePool, inference_pool
from dynctl.wire.kubernetes.objects import Pod
from dynctl.wire.kubernetes.worker_metadata import instance_id
from router_core import Role
from tests.dynctl.serving.fleets import QUICK_ENGINE, TOKENIZER, chat_body
from tests.dynctl.serving.gateways import Gateway, gateway, set_headers
from tests.kube.api_server import ApiServer
from tests.kube.crds import _ANYTHING, _definition
from tests.kube.objects import Json, small
from tests.waiting import until

NAMESPACE = "inference"
DOMAINS = {"zone": "topology.kubernetes.io/zone"}


def pool(ports: list[int], selector: Json | None = None, **spec: Any) -> Json:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "llama", "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": selector or {"app": "llama"}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
            **spec,
        },
    }


def pod(name: str, labels: dict[str, str] | None = None, *, ready: bool = True) -> Json:
    body = small.pod(name, NAMESPACE, "n", **{"app": "llama", **(labels or {})})
    return small.running(body, ready=ready, ip="127.0.0.1")


@pytest.fixture
def cluster() -> Iterator[ApiServer]:
    with ApiServer() as server:
        version = {
            "name": "v1",
            "served": True,
            "storage": True,
            "schema": {
                "openAPIV3Schema": {
                    "type": "object",
                    "properties": {"spec": _ANYTHING, "status": _ANYTHING},
                }
            },
        }
        group = "inference.networking.k8s.io"
        server.store.create(_definition(group, "InferencePool", "inferencepools", [version]))
        yield server


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[int]]:
    """Ports of engines on 127.0.0.1."""
    started = [
        await start_engine(EngineConfig(**{**QUICK_ENGINE, "name": f"e{n}"}), TOKENIZER)
        for n in range(count)
    ]
    try:
        yield [int(one.url.rpartition(":")[2]) for one in started]
    finally:
        for one in started:
            await one.close()


@asynccontextmanager
async def picker(cluster: ApiServer, tmp_path: Path) -> AsyncIterator[Gateway]:
    options = GlobalOptions(
        kubeconfig=cluster.kubeconfig(tmp_path / "kubeconfig"), namespace=NAMESPACE
    )
    config = PoolConfig(options, "llama", domains=DOMAINS)
    given = PickerConfig(port=0, health_port=0, tls=False, pool=config)
    async with gateway([], picker=given) as site:
        yield site


def names(site: Gateway) -> set[str]:
    return {worker.name for worker in site.service.router.registry}


async def test_ready_pods_are_workers_as_they_come_and_go(
    cluster: ApiServer, tmp_path: Path
) -> None:
    store = cluster.store
    async with engines(2) as ports:
        store.create(pool(ports[:1]))
        store.create(pod("vllm-0", {"topology.kubernetes.io/zone": "a"}))
        store.create(pod("other-0", {"app": "other"}))
        async with picker(cluster, tmp_path) as site:
            # It waits for the first reading.
            assert names(site) == {"vllm-0"}
            worker = site.service.router.registry.by_name("vllm-0")
            assert dict(worker.domains) == {"zone": "a"}
            answer = await site.request().ask(chat_body("hello"))
            assert set_headers(answer)["x-gateway-destination-endpoint"] == f"127.0.0.1:{ports[0]}"
            # A second rank of each pod.
            store.update(pool(ports))
            await until(lambda: names(site) == {"vllm-0-rank-0", "vllm-0-rank-1"})
            store.create(pod("vllm-1", ready=False))
            store.update(pool(ports[:1]))
            await until(lambda: names(site) == {"vllm-0"})
            store.update(pod("vllm-1"))
            store.patch_merge(
                "Pod",
                "vllm-0",
                {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
                NAMESPACE,
            )
            await until(lambda: names(site) == {"vllm-1"})
            store.update(pool(ports[:1], {"app": "nothing"}))
            await until(lambda: names(site) == set())
            status, _ = await site.request().refused(chat_body("hello"))
            assert status == 503


async def test_a_pool_that_is_not_there_is_a_condition_until_it_is(
    cluster: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynctl.serving.epp.pool._FIRST_S", 0.5)
    async with engines(1) as ports:
        cluster.store.create(pod("vllm-0"))
        async with picker(cluster, tmp_path) as site:

            def problems() -> list[str]:
                return [
                    one.message
                    for one in site.service.conditions
                    if one.code == "DISCOVERY_INTERRUPTED"
                ]

            await until(lambda: problems())
            assert f"the cluster has no InferencePool {NAMESPACE}/llama" in problems()[0]
            cluster.store.create(pool([]))
            await until(lambda: problems() and "targetPorts has 0 ports" in problems()[0])
            cluster.store.update(pool(ports))
            await until(lambda: names(site) == {"vllm-0"})
            await until(lambda: not problems())


async def test_without_the_api_server_the_last_workers_stay(
    cluster: ApiServer, tmp_path: Path
) -> None:
    async with engines(1) as ports:
        cluster.store.create(pool(ports))
        cluster.store.create(pod("vllm-0"))
        async with picker(cluster, tmp_path) as site:
            cluster.faults.answer("/", status=500, times=None)
            cluster.faults.cut_watches()
            await until(
                lambda: any(one.code == "DISCOVERY_INTERRUPTED" for one in site.service.conditions)
            )
            assert names(site) == {"vllm-0"}
            cluster.faults.clear()
            await until(
                lambda: (
                    not any(one.code == "DISCOVERY_INTERRUPTED" for one in site.service.conditions)
                ),
                30,
            )


def ready(**given: Any) -> Pod:
    values: dict[str, Any] = {"labels": {}, "annotations": {}, "ip": "10.0.0.1", "ready": True}
    return Pod(NAMESPACE, "vllm-0", "u", **{**values, **given})


POOL = InferencePool(NAMESPACE, "llama", {"app": "llama"}, (8000, 8001))


def specs(one: Pod, found: InferencePool = POOL, **config: Any) -> list[Any]:
    return list(pod_specs(one, found, PoolConfig(GlobalOptions(), "llama", **config)))


def test_each_target_port_is_a_worker_with_ports_of_its_own() -> None:
    first, second = specs(ready(), events_port=5557, replay_port=5657)
    assert (first.name, first.url) == ("vllm-0-rank-0", "http://10.0.0.1:8000")
    assert (first.kv_events, first.replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")
    assert (second.name, second.url) == ("vllm-0-rank-1", "http://10.0.0.1:8001")
    assert (second.kv_events, second.replay) == ("tcp://10.0.0.1:5558", "tcp://10.0.0.1:5658")
    assert specs(ready(ip="fd00::1"))[0].url == "http://[fd00::1]:8000"


@pytest.mark.parametrize(
    ("value", "role"), [("prefill", Role.PREFILL), ("decode", Role.DECODE), ("both", None)]
)
def test_roles_are_labels(value: str, role: Role | None) -> None:
    assert specs(ready(labels={"llm-d.ai/role": value}))[0].role == role


def test_pods_of_dynamo_have_the_id_of_their_registration() -> None:
    labels = {"nvidia.com/dynamo-discovery-enabled": "true"}
    one = InferencePool(NAMESPACE, "llama", {"a": "b"}, (8000,))
    assert specs(ready(labels=labels), one)[0].worker_id == instance_id("vllm-0")


@pytest.mark.parametrize("given", [{"ready": False}, {"deleting": True}, {"ip": ""}])
def test_pods_that_cannot_serve_are_left_out(given: Json) -> None:
    assert specs(ready(**given)) == []


def test_a_value_that_is_not_one_is_named() -> None:
    with pytest.raises(WorkerSpecError, match="pod inference/vllm-0: domain zone"):
        specs(ready(labels={DOMAINS["zone"]: "a=b"}), domains=DOMAINS)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "spec.selector.matchLabels is empty"),
        (pool([0, 70_000]), "spec.targetPorts has 0 ports; expected 1 to 8"),
        (pool(list(range(1, 10))), "spec.targetPorts has 9 ports; expected 1 to 8"),
        (pool([8000]), ""),
    ],
)
def test_pools_that_cannot_be_followed(body: Json, problem: str) -> None:
    assert inference_pool(body).problem == problem


def test_a_pool_is_read() -> None:
    found = inference_pool(pool([8000], {"b": "2", "a": "1"}))
    assert (found.label_selector, found.failure_mode, found.picker) == (
        "a=1,b=2",
        "FailClose",
        "epp",
    )
