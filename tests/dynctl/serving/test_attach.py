"""`serve attach` before a simulated engine, registered in memory: one process, real sockets."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynctl.adapters.dynamo.model_files import fetch_model_files
from dynctl.adapters.dynamo.planes import expect_registrar, open_registrar
from dynctl.adapters.dynamo.request_plane import RequestLimits, TcpRequestPlane
from dynctl.adapters.kubernetes.discovery import KubernetesDiscovery
from dynctl.adapters.memory import MemoryDiscovery
from dynctl.adapters.nats.requests import NatsMessenger
from dynctl.adapters.ports import ChannelMessage, RequestPlaneError
from dynctl.adapters.zmq.dynamo_events import ZmqEventPlane
from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.base.tasks import end_tasks
from dynctl.base.worker_environment import TopologyConfig
from dynctl.serving.attach import system_server
from dynctl.serving.attach.card import CardOptions, read_model_files
from dynctl.serving.attach.sidecar import AttachConfig, AttachedTwice, Sidecar, engine_identity
from dynctl.serving.engines.worker_spec import parse_worker_spec
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import RunningEngine, start_engine
from dynctl.tokenization import DEMO_MODEL_DIR
from dynctl.wire.dynamo.discovery import (
    EndpointId,
    EventChannel,
    EventSource,
    Instance,
    ModelCard,
    encode_entry,
    instance_of,
    nats_instance_of,
    parse_entry,
)
from dynctl.wire.dynamo.events import decode_kv_metrics, decode_router_events
from dynctl.wire.dynamo.recovery import TreeDump, parse_recovery, recovery_query
from router_core import BlocksStored
from tests.contract.nats_server import nats_server
from tests.dynctl.adapters.kube_lab import NAMESPACE as POD_NAMESPACE
from tests.dynctl.adapters.kube_pods import PodLab, serving_cluster
from tests.dynctl.serving.fleets import TOKENIZER
from tests.memory_planes import MemoryRegistrar
from tests.ports import free_port
from tests.waiting import patience, until

AT = EndpointId("dynamo", "backend", "generate")
QUICK: dict[str, Any] = {
    "speedup_ratio": 50.0,
    "model": "tiny",
    "kv_events": "tcp://127.0.0.1:0",
    "replay": "tcp://127.0.0.1:0",
}


class Lab:
    """A discovery in memory, and clients of what is registered there."""

    def __init__(self) -> None:
        self.discovery = MemoryDiscovery()
        self.nats = ""
        patient = RequestLimits(connect_s=patience(20), handshake_s=patience(20))
        self.plane = TcpRequestPlane(limits=patient, nats=lambda: NatsMessenger(self.nats))
        self.events = ZmqEventPlane()

    def entries(self, kind: type) -> list[Any]:
        found = [parse_entry(key, value) for key, value in self.discovery._entries.items()]
        return [entry for entry in found if type(entry) is kind]

    @property
    def instance(self) -> Instance | None:
        found = [one for one in self.entries(Instance) if one.endpoint.name == "generate"]
        return found[0] if found else None

    async def generate(self, prompt: list[int], max_tokens: int = 4) -> list[Any]:
        assert self.instance is not None
        body = {
            "model": "tiny",
            "token_ids": prompt,
            "stop_conditions": {"max_tokens": max_tokens},
            "sampling_options": {},
            "output_options": {},
            "eos_token_ids": [],
            "annotations": [],
        }
        asked = self.plane.ask(self.instance, body, timeout=patience(20), max_bytes=10_000_000)
        return [item async for item in asked]

    async def close(self) -> None:
        await self.plane.close()
        await self.events.close()


def config(engine: str, files: Path = DEMO_MODEL_DIR, **fields: Any) -> AttachConfig:
    spec = parse_worker_spec(engine, "--engine")
    values = {"drain_s": patience(20), **fields}
    return AttachConfig(spec, values.pop("endpoint", AT), read_model_files(files), **values)


@asynccontextmanager
async def attached(
    lab: Lab, made: AttachConfig, registrar: MemoryRegistrar | None = None
) -> AsyncIterator[tuple[Sidecar, "asyncio.Task[None]"]]:
    registrar = registrar or MemoryRegistrar(lab.discovery)
    sidecar = Sidecar(made, lab.discovery, registrar, TOKENIZER)
    await sidecar.start()
    running = asyncio.create_task(sidecar.run())
    try:
        yield sidecar, running
    finally:
        await end_tasks([running])
        await sidecar.close()


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    made = Lab()
    yield made
    await made.close()


@pytest.fixture
async def engine() -> AsyncIterator[RunningEngine]:
    made = await start_engine(EngineConfig(name="e", **QUICK), TOKENIZER)
    yield made
    await made.close()


def held(sidecar: Sidecar) -> dict[str, str]:
    return {one.code: one.message for one in sidecar.conditions}


def registered(lab: Lab) -> Callable[[], bool]:
    return lambda: lab.instance is not None


@pytest.mark.seed("router-topology: backend support: vLLM and SGLang")
async def test_an_engine_is_registered_and_answers_with_its_own_tokens(
    lab: Lab, engine: RunningEngine, tmp_path: Path
):
    topology = TopologyConfig({"zone": "a"}, "zone", "preferred", 0.5)
    options = CardOptions(max_num_seqs=7, taints=("spot",))
    made = config(engine.url, topology=topology, options=options)
    prompt = list(range(5, 45))
    async with attached(lab, made) as (sidecar, _), aiohttp.ClientSession() as http:
        await until(registered(lab))
        assert held(sidecar) == {}
        *items, last = await lab.generate(prompt, 6)
        ids = [token for item in items for token in item["data"]["token_ids"]]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "return_token_ids": True}
        async with http.post(f"{engine.url}/v1/completions", json=body) as answer:
            assert (await answer.json())["choices"][0]["token_ids"] == ids
        assert len(ids) == 6
        assert last["data"]["finish_reason"] == "length"
        assert last["data"]["completion_usage"]["prompt_tokens"] == 40

        [card] = lab.entries(ModelCard)
        assert (card.name, card.block_size, card.worker_type) == ("tiny", 16, "aggregated")
        runtime = card.runtime_config
        assert runtime["total_kv_blocks"] == engine.engine.config.total_blocks
        assert (runtime["max_num_seqs"], runtime["enable_local_indexer"]) == (7, True)
        assert sorted(runtime["taints"]) == ["dynamo.topology/zone=a", "spot"]
        assert runtime["kv_transfer_preferred_weight"] == 0.5
        fetched = await fetch_model_files(card, "127.0.0.1", tmp_path / "private")
        names = {path.name for path in fetched.directory.iterdir()}
        assert "tokenizer.json" in names
        assert fetched.requests > 0

        async with http.get(f"http://127.0.0.1:{sidecar.system.port}/health") as answer:
            assert answer.status == 200
        async with http.get(f"http://127.0.0.1:{sidecar.system.port}/metrics") as answer:
            assert "dynctl_attach_requests_total" in await answer.text()
    assert lab.entries(Instance) == lab.entries(ModelCard) == lab.entries(EventChannel) == []


@pytest.mark.seed("smart-routing-guide-0.9: verification: bridge of KV events")
async def test_kv_events_arrive_and_late_readers_recover_them(lab: Lab, engine: RunningEngine):
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        channels = {channel.topic: channel for channel in lab.entries(EventChannel)}
        seen: dict[str, list[bytes]] = {"kv-events": [], "kv_metrics": []}

        def take(value: Any) -> None:
            if isinstance(value, ChannelMessage):
                seen[value.topic].append(value.payload)

        followers = [lab.events.follow(channel, take) for channel in channels.values()]
        tasks = [asyncio.create_task(follower.run()) for follower in followers]
        await until(lambda: all(follower.connected for follower in followers))
        await lab.generate(list(range(5, 45)))
        await until(lambda: seen["kv-events"] and seen["kv_metrics"])
        [event, *_] = decode_router_events(seen["kv-events"][0])
        assert lab.instance is not None
        assert event.worker_id == lab.instance.instance_id
        assert isinstance(event.event, BlocksStored)
        assert len(event.event.block_hashes) == 2
        assert decode_kv_metrics(seen["kv_metrics"][0]).worker_id == event.worker_id
        [source] = lab.entries(EventSource)
        assert source.recovery is not None
        query = recovery_query(event.worker_id, 0)
        asked = lab.plane.ask_raw(source.recovery, query, timeout=patience(20), max_bytes=1_000_000)
        [raw] = [item async for item in asked]
        dump = parse_recovery(raw)
        assert isinstance(dump, TreeDump)
        recovered = [one.event for part in dump.events.slices() for one in part]
        names = [name for one in recovered for name in one.block_hashes]  # type: ignore[union-attr]
        assert list(event.event.block_hashes) == names[:2]
        await end_tasks(tasks)


async def test_nothing_is_registered_before_the_engine_answers_and_after_it_died(
    lab: Lab, engine: RunningEngine
):
    port = engine.engine.port
    engine.engine.faults.update({"refuse": 503})
    async with attached(lab, config(engine.url)) as (sidecar, _):
        await until(lambda: "ENGINE_NOT_READY" in held(sidecar))
        assert "returned status 503" in held(sidecar)["ENGINE_NOT_READY"]
        assert lab.entries(Instance) == []
        engine.engine.faults.update({"refuse": 0})
        await until(registered(lab))
        assert held(sidecar) == {}
        first = lab.instance
        await engine.close()
        await until(lambda: lab.entries(Instance) == [], 20)
        assert "refused the connection" in held(sidecar)["ENGINE_NOT_READY"]
        again = await start_engine(EngineConfig(name="e", port=port, **QUICK), TOKENIZER)
        await until(registered(lab), 20)
        assert lab.instance is not None
        assert first is not None
        assert lab.instance.instance_id != first.instance_id
        assert len(await lab.generate([5, 6, 7])) > 1
        await again.close()


async def test_a_stream_that_the_engine_cuts_is_lost_and_not_ended(lab: Lab, engine: RunningEngine):
    """So that a frontend can continue it on another worker."""
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        engine.engine.faults.update({"die_mid_stream_after": 3})
        with pytest.raises(RequestPlaneError, match=r"ended its response|lost the connection"):
            await lab.generate(list(range(5, 25)), 20)


async def test_what_the_engine_refuses_is_an_error_item_with_its_reason(
    lab: Lab, engine: RunningEngine
):
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        [item] = await lab.generate([5] * 9000)
        assert item["event"] == "error"
        assert item["error"]["error_type"] == {"Backend": "InvalidArgument"}
        assert "maximum context length" in item["error"]["message"]


async def test_a_requester_that_leaves_frees_the_engine(lab: Lab):
    slow = QUICK | {"speedup_ratio": 0.5}
    engine = await start_engine(EngineConfig(name="e", **slow), TOKENIZER)
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        asking = asyncio.create_task(lab.generate([5, 6, 7], 1000))
        await until(lambda: engine.engine.active_requests == 1)
        await end_tasks([asking])
        await until(lambda: engine.engine.active_requests == 0)
    await engine.close()


async def test_accepted_requests_are_finished_after_the_deregistration(lab: Lab):
    slow = QUICK | {"speedup_ratio": 1.0}
    engine = await start_engine(EngineConfig(name="e", **slow), TOKENIZER)
    async with attached(lab, config(engine.url)) as (sidecar, running):
        await until(registered(lab))
        asking = asyncio.create_task(lab.generate([5, 6, 7], 40))
        await until(lambda: engine.engine.active_requests == 1)
        stopping = asyncio.create_task(sidecar.stop(running))
        await until(lambda: lab.entries(Instance) == [])
        *_, last = await asking
        assert last["data"]["finish_reason"] == "length"
        await stopping
    await engine.close()


async def test_a_second_sidecar_of_an_engine_is_refused_by_name(lab: Lab, engine: RunningEngine):
    other_name = engine.url.replace("127.0.0.1", "localhost")
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        async with attached(lab, config(other_name)) as (second, running):
            with pytest.raises(AttachedTwice, match="ENGINE_ALREADY_ATTACHED: http://localhost:"):
                async with asyncio.timeout(patience(10)):
                    await running
            assert second.registration.instance_id is None
        assert len(lab.entries(ModelCard)) == 1
        assert lab.instance is not None


async def test_a_second_sidecar_with_another_component_is_refused_too(
    lab: Lab, engine: RunningEngine
):
    """Frontends would count one engine as two workers."""
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        other = config(engine.url, endpoint=EndpointId("dynamo", "other", "generate"))
        async with attached(lab, other) as (_, running):
            with pytest.raises(AttachedTwice, match=r"of dynamo\.backend\)"):
                async with asyncio.timeout(patience(10)):
                    await running
        assert len(lab.entries(ModelCard)) == 1


@pytest.mark.parametrize("components", [("backend", "backend"), ("backend", "other")])
async def test_of_two_sidecars_that_start_together_one_registers(
    lab: Lab, engine: RunningEngine, components: tuple[str, str]
):
    one, other = (
        config(engine.url, endpoint=EndpointId("dynamo", name, "generate")) for name in components
    )
    registrar = MemoryRegistrar(lab.discovery)
    async with (
        attached(lab, one, registrar) as (_, first),
        attached(lab, other, registrar) as (_, second),
    ):
        done, left = await asyncio.wait(
            [first, second], timeout=patience(20), return_when=asyncio.FIRST_COMPLETED
        )
        assert (len(done), len(left)) == (1, 1)
        with pytest.raises(AttachedTwice):
            await done.pop()
        await until(registered(lab))
        served = [one for one in lab.entries(Instance) if one.endpoint.name == "generate"]
        assert len(served) == len(lab.entries(ModelCard)) == 1


async def test_an_entry_of_a_killed_sidecar_does_not_block_the_next(
    lab: Lab, engine: RunningEngine
):
    """Its lease has not ended yet, but nothing listens there."""
    at = EndpointId("dynamo", "backend", f"dynctl_attach_{engine_identity(engine.url)}")
    lab.discovery.put(*encode_entry(instance_of(at, 1, "127.0.0.1:1")))
    async with attached(lab, config(engine.url)):
        await until(registered(lab))


def other_tokenizer(tmp_path: Path) -> Path:
    """A copy of the model with another tokenizer.json of the same content for humans."""
    copied = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, copied)
    tokenizer = copied / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    return copied


async def test_a_tokenizer_with_another_checksum_is_not_registered(
    lab: Lab, engine: RunningEngine, tmp_path: Path
):
    more = await start_engine(EngineConfig(name="more", **QUICK), TOKENIZER)
    async with attached(lab, config(engine.url)):
        await until(registered(lab))
        made = config(more.url, other_tokenizer(tmp_path))
        async with attached(lab, made) as (second, _):
            await until(lambda: "MODEL_FILES_DIFFER" in held(second))
            message = held(second)["MODEL_FILES_DIFFER"]
            assert message.count("blake3:") == 2
            assert len(lab.entries(ModelCard)) == 1
    await more.close()


async def test_a_lost_lease_is_reported_and_running_requests_go_on(lab: Lab, engine: RunningEngine):
    async with attached(lab, config(engine.url)) as (sidecar, _):
        await until(registered(lab))
        before = lab.instance
        assert before is not None
        lease: Any = sidecar.registration._lease
        lease.expire()
        await until(lambda: sidecar.registration.losses == 1 and lab.instance is not None)
        assert lab.instance is not None
        assert lab.instance.instance_id == before.instance_id
        assert len(await lab.generate([5, 6, 7])) > 1
        [source] = lab.entries(EventSource)
        assert source.worker_id == lab.instance.instance_id


async def test_taints_can_be_replaced_while_it_runs(lab: Lab, engine: RunningEngine):
    topology = TopologyConfig({"zone": "a"}, "zone", "required", None)
    made = config(engine.url, topology=topology)
    async with attached(lab, made) as (sidecar, _), aiohttp.ClientSession() as http:
        await until(registered(lab))
        url = f"http://127.0.0.1:{sidecar.system.port}/engine/update/model_taints"
        async with http.post(url, json={"taints": ["a", "b"]}) as answer:
            assert await answer.json() == {"status": "ok", "taints": ["a", "b"]}

        def taints() -> list[str]:
            [card] = lab.entries(ModelCard)
            return sorted(card.runtime_config["taints"])

        await until(lambda: taints() == ["a", "b", "dynamo.topology/zone=a"])
        reserved = {"taints": ["dynamo.topology/zone=b"]}
        bodies: list[Any] = [reserved, {"taints": 3}, {"taints": [""]}, [], {"taints": ["x"] * 300}]
        for body in bodies:
            async with http.post(url, json=body) as answer:
                assert answer.status == 500
                assert "message" in await answer.json()
        for path in ("../tokenizer.json", "secret", "%2e%2e%2fconfig.json"):
            base = f"http://127.0.0.1:{sidecar.system.port}/v1/metadata/d/b/g/tiny/_base/"
            async with http.get(base + path) as answer:
                assert answer.status == 404


async def test_requests_over_nats_are_answered_as_over_tcp(
    lab: Lab, engine: RunningEngine, tmp_path: Path
):
    """Requests, recovery and the claim of the engine; NATS is gone for a while."""
    async with nats_server(tmp_path) as server:
        lab.nats = f"nats://{server.address}"
        made = config(engine.url, request_plane="nats", nats_servers=lab.nats)
        async with attached(lab, made) as (sidecar, running):
            await until(registered(lab))
            assert {one.transport for one in lab.entries(Instance)} == {"nats_tcp"}
            *items, last = await lab.generate(list(range(5, 45)), 6)
            assert sum(len(item["data"]["token_ids"]) for item in items) == 6
            assert last["data"]["finish_reason"] == "length"
            [item] = await lab.generate([5] * 9000)
            assert item["error"]["error_type"] == {"Backend": "InvalidArgument"}
            [source] = lab.entries(EventSource)
            query = recovery_query(source.worker_id, 0)
            asked = lab.plane.ask_raw(
                source.recovery, query, timeout=patience(20), max_bytes=1_000_000
            )
            assert [type(parse_recovery(item)) async for item in asked] == [TreeDump]
            async with attached(lab, made) as (_, second):
                with pytest.raises(AttachedTwice):
                    async with asyncio.timeout(patience(10)):
                        await second

            await server.kill()
            await until(lambda: "REQUEST_PLANE_LOST" in held(sidecar))
            assert registered(lab)()  # as a worker of Dynamo; its lease is alive
            await server.start()
            await until(lambda: held(sidecar) == {})
            assert len(await lab.generate([5, 6, 7])) > 1
            stopping = asyncio.create_task(sidecar.stop(running))
            await until(lambda: lab.entries(Instance) == [])
            await stopping


async def test_nothing_is_registered_before_nats_is_reachable(
    lab: Lab, engine: RunningEngine, tmp_path: Path
):
    async with nats_server(tmp_path) as server:
        await server.kill()
        lab.nats = f"nats://{server.address}"
        made = config(engine.url, request_plane="nats", nats_servers=lab.nats)
        async with attached(lab, made) as (sidecar, _):
            await until(lambda: "REQUEST_PLANE_LOST" in held(sidecar))
            assert lab.entries(Instance) == lab.entries(ModelCard) == []
            await server.start()
            await until(registered(lab))
            assert len(await lab.generate([5, 6, 7])) > 1
            await until(lambda: held(sidecar) == {})


async def test_with_a_fixed_port_what_the_process_before_has_left_is_not_another_one(
    lab: Lab, engine: RunningEngine
):
    port = free_port()
    at = EndpointId("dynamo", "backend", f"dynctl_attach_{engine_identity(engine.url)}")
    lab.discovery.put(*encode_entry(instance_of(at, 1, f"127.0.0.1:{port}")))
    async with attached(lab, config(engine.url, port=port)):
        await until(registered(lab))


async def test_a_subject_of_a_killed_sidecar_does_not_block_the_next(
    lab: Lab, engine: RunningEngine, tmp_path: Path
):
    at = EndpointId("dynamo", "backend", f"dynctl_attach_{engine_identity(engine.url)}")
    lab.discovery.put(*encode_entry(nats_instance_of(at, 1)))
    async with nats_server(tmp_path) as server:
        lab.nats = f"nats://{server.address}"
        made = config(engine.url, request_plane="nats", nats_servers=lab.nats)
        async with attached(lab, made):
            await until(registered(lab))


async def test_slow_clients_of_the_system_port_keep_no_probe_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system_server, "_CONNECTIONS", 6)
    monkeypatch.setattr(system_server, "_BODY_S", 0.2)
    server = system_server.SystemServer(
        ready=lambda: True, conditions=tuple, metrics=dict, set_taints=lambda taints: None
    )
    await server.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/live"
    head = b"POST /engine/update/model_taints HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        for said in (b"", b"GET /live HT") * 20:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            writer.write(said)
        async with http.get(url) as answer:
            assert answer.status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stack.callback(writer.close)
        writer.write(head)
        async with asyncio.timeout(patience(10)):
            found = await reader.read()
        assert found.startswith(b"HTTP/1.1 408 ")
        async with http.get(url) as answer:
            assert answer.status == 200
    await server.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PodLab]:
    with serving_cluster() as server:
        made = PodLab(server, tmp_path)
        yield made
        made.close()


async def test_a_sidecar_registers_its_pod_and_leaves_nothing(
    cluster: PodLab, engine: RunningEngine, lab: Lab
):
    """With the permissions of the manifest; frontends read it while the pod is ready."""
    made = config(engine.url)

    def sidecar_of_pod() -> Sidecar:
        discovery = KubernetesDiscovery(cluster.cluster(), POD_NAMESPACE)
        return Sidecar(made, discovery, cluster.registrar(), TOKENIZER)

    def endpoints() -> list[str]:
        return [key for body in cluster.objects() for key in body["spec"]["data"]["endpoints"]]

    served = f"dynamo/backend/generate/{cluster.id:x}"
    sidecar = sidecar_of_pod()
    await sidecar.start()
    running = asyncio.create_task(sidecar.run())
    try:
        await until(lambda: served in endpoints())
        assert await cluster.keys() == []
        cluster.ready()
        read = {entry.key: entry.value for entry in await cluster.entries()}
        kinds = {key.split("/")[1] for key in read}
        assert kinds == {"instances", "mdc", "event_channels", "event_sources"}
        for key, value in read.items():
            lab.discovery.put(key, value)
        assert lab.instance is not None
        assert lab.instance.instance_id == cluster.id
        assert len(await lab.generate([5, 6, 7])) > 1

        second = sidecar_of_pod()
        await second.start()
        with pytest.raises(AttachedTwice):
            async with asyncio.timeout(patience(20)):
                await second.run()
        await second.close()
        assert served in endpoints()
        stopping = asyncio.create_task(sidecar.stop(running))
        await until(lambda: cluster.objects() == [])
        await stopping
    finally:
        await end_tasks([running])
        await sidecar.close()
    assert cluster.objects() == []


def test_a_backend_without_registration_is_refused() -> None:
    """A worker registers in Kubernetes, a router does not."""
    with pytest.raises(UsageProblem, match="does not register workers"):
        open_registrar(GlobalOptions(discovery="kubernetes"), MemoryDiscovery())
    expect_registrar(GlobalOptions(discovery="file"))
