"""Situations of a fleet, made in one process without a network: scripted engines, a set clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from dynctl.adapters.ports import IndexRead, StreamCode, StreamCondition
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.tokenizer_check import TokenizerCheck
from dynctl.serving.engines.worker_spec import parse_worker_spec
from dynctl.serving.engines.workers_file import WorkersFile
from dynctl.serving.http import core
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig, HealthConfig
from dynctl.serving.routing.prompts import PromptTokenizers
from dynctl.serving.routing.service import RoutingService
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import RouterConfig, ThresholdsSet
from tests.dynctl.serving.fleets import until

PREFILL_TOKENS = "active_prefill_tokens_threshold"
#: No process publishes there; streams report only what a situation injects.
EVENTS = "kv-events=tcp://127.0.0.1:9"
_NEVER_S = 86_400.0


@dataclass
class Engine:
    """A scripted engine. ``load`` None: it reports none. ``tokens``: what its tokenizer returns."""

    info: dict[str, Any]
    status: int = 200
    load: int | None = 0
    tokens: list[int] | None = None
    up: bool = True


class Engines:
    """The engines' side of a frontend: answers its control requests by URL."""

    def __init__(self) -> None:
        self.by_host: dict[str, Engine] = {}

    def authorize(self, url: str, key: str | None) -> None:
        """These engines need no key."""

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        engine, path = self._reached(url)
        if path == "/health":
            return engine.status, b""
        if path == "/engine/info":
            return 200, msgspec.json.encode(engine.info)
        if path == "/load" and engine.load is not None:
            row = {"dp_rank": 0, "active_prefill_tokens": engine.load, "waiting": 0}
            return 200, msgspec.json.encode({"ranks": [row]})
        return 404, b""

    async def post(self, url: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        engine, _ = self._reached(url)
        if engine.tokens is None:
            return 404, b""
        return 200, msgspec.json.encode({"tokens": engine.tokens})

    async def close(self) -> None:
        pass

    def _reached(self, url: str) -> tuple[Engine, str]:
        host, slash, path = url.removeprefix("http://").partition("/")
        engine = self.by_host.get(host)
        if engine is None or not engine.up:
            raise UpstreamFailure("refused", f"{host} refused the connection")
        return engine, slash + path


@dataclass
class Rig:
    """A frontend that does not listen, and its engines. ``now``: seconds of both its clocks."""

    frontend: ServingProcess
    engines: Engines
    folder: Path
    now: float = 1000.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def service(self) -> RoutingService:
        return self.frontend.service

    async def add(
        self, name: str, role: str = "aggregated", spec: str = "", **changed: Any
    ) -> None:
        """Start an engine and add it to the fleet. ``spec``: appended to its worker spec."""
        await self.join(name, self.start(name, role, **changed), spec)

    def start(self, name: str, role: str = "aggregated", **changed: Any) -> str:
        """Start an engine; its host."""
        host = f"{name}.test:80"
        info = {
            "simulated": True, "engine_id": name, "model": "demo", "role": role, "block_size": 16,
            "can_prefill": role != "decode", **changed,
        }  # fmt: skip
        self.engines.by_host[host] = Engine(info)
        return host

    async def join(self, name: str, host: str, spec: str = "") -> None:
        text = ",".join(filter(None, (f"http://{host}", f"name={name}", spec)))
        await self.frontend.fleet.add(parse_worker_spec(text), "api")
        if spec.startswith(EVENTS):
            await self.stream(name, StreamCode.STREAM_CONNECTED)
            await self.read_index(name)

    def engine(self, name: str) -> Engine:
        return self.engines.by_host[f"{name}.test:80"]

    async def probe(self, *names: str) -> None:
        """Probe engines as the frontend does at every interval."""
        for name in names:
            member = self.frontend.fleet.get(name)
            assert member is not None
            await self.frontend.fleet._probe(member)

    async def kill(self, *names: str) -> None:
        for name in names:
            self.engine(name).up = False
        await self.probe(*names)

    async def revive(self, *names: str) -> None:
        for name in names:
            self.engine(name).up = True
        await self.probe(*names)

    async def stream(self, name: str, code: str, message: str = "", **more: Any) -> None:
        """What the worker's event stream reports."""
        member = self.frontend.fleet.get(name)
        assert member is not None
        index = self.frontend.fleet.index
        index.take(StreamCondition(member.spec.worker_id, code, message, (0,), **more))
        await index.drained()
        await self.probe(name)

    async def read_index(self, name: str) -> None:
        """All that the worker cached before is read."""
        member = self.frontend.fleet.get(name)
        assert member is not None
        index = self.frontend.fleet.index
        index.take(IndexRead(member.spec.worker_id, (0,), True))
        await index.drained()

    async def load(self, name: str, tokens: int) -> None:
        self.engine(name).load = tokens
        await self.probe(name)

    def threshold(self, tokens: int) -> None:
        assert self.service.apply(ThresholdsSet("demo", {PREFILL_TOKENS: tokens})).ok

    async def task(self) -> None:
        """A background task that failed and runs again until ``gate`` is set."""

        async def work() -> None:
            self.service.tasks.report("sweep", RuntimeError("boom"))
            await self.gate.wait()

        self.tasks.append(self.service.tasks.start("sweep", work))
        await asyncio.sleep(0)

    async def recovered(self) -> None:
        self.gate.set()
        await asyncio.gather(*self.tasks)

    async def check_tokenizers(self) -> None:
        await TokenizerCheck(self.service, self.frontend.fleet).run()


@asynccontextmanager
async def rig(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A frontend with these router settings and without workers."""
    made: list[Rig] = []

    def clock() -> float:
        return made[0].now if made else 0.0

    config = FrontendConfig(
        port=0,
        model_path=DEMO_MODEL_DIR,
        health=HealthConfig(interval_s=_NEVER_S, timeout_s=1.0),
        router=RouterConfig().with_values(settings),
    )
    with patch.object(core, "RoutingService", partial(RoutingService, clock=clock, wall=clock)):
        frontend = build_frontend(config)
    engines: Any = Engines()
    frontend.fleet._upstream = frontend.fleet._engines._upstream = engines
    frontend.service.read_fleet(probe_s=lambda: 1.0)
    frontend.fleet.index.start()
    made.append(Rig(frontend, engines, folder))
    try:
        yield made[0]
    finally:
        made[0].gate.set()
        await frontend.close()


# -- fleets ----------------------------------------------------------------------------------------


def zone(name: str, enforcement: str | None = "required", **more: Any) -> dict[str, Any]:
    """The card of a worker in a zone."""
    policy = {} if enforcement is None else {
        "kv_transfer_domain": "zone", "kv_transfer_enforcement": enforcement,
    }  # fmt: skip
    return {"runtime_config": {"topology_domains": {"zone": name}, **policy, **more}}


async def two(rig: Rig) -> None:
    """Two aggregated workers with KV events, in two zones."""
    for name in ("a", "b"):
        await rig.add(name, spec=EVENTS, **zone(f"zone-{name}", None))


async def split(rig: Rig, decode: int = 2) -> None:
    """Two zones with enforcement required, each with a prefill and ``decode`` decode workers."""
    for place in ("a", "b"):
        await rig.add(f"p-{place}", "prefill", **zone(f"zone-{place}"))
        for number in range(decode):
            await rig.add(f"d-{place}{number}", "decode", **zone(f"zone-{place}"))


# -- situations ------------------------------------------------------------------------------------

Make = Callable[[Rig], Awaitable[None]]
Keys = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Situation:
    """``make`` brings about the situation. ``expected``: (code, subject) of its conditions."""

    name: str
    make: Make
    status: str
    expected: Keys = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)


SITUATIONS: list[Situation] = []


def situation(name: str, status: str, *expected: tuple[str, str], **settings: Any) -> Any:
    def add(make: Make) -> Make:
        SITUATIONS.append(Situation(name, make, status, frozenset(expected), settings))
        return make

    return add


def unreachable(*names: str) -> list[tuple[str, str]]:
    return [("WORKER_UNREACHABLE", name) for name in names]


@situation("healthy aggregated", "healthy")
async def _healthy(rig: Rig) -> None:
    await two(rig)


@situation("healthy disaggregated", "healthy")
async def _healthy_split(rig: Rig) -> None:
    await split(rig)


@situation("no workers", "unhealthy", ("NO_WORKERS", "fleet"))
async def _no_workers(rig: Rig) -> None:
    pass


NOT_SERVED = ("MODEL_NOT_SERVED", "demo")


@situation("all engines dead, aggregated", "unhealthy", NOT_SERVED, *unreachable("a", "b"))
async def _all_dead(rig: Rig) -> None:
    await two(rig)
    await rig.kill("a", "b")


@situation(
    "all engines dead, disaggregated",
    "unhealthy",
    NOT_SERVED,
    *unreachable("p-a", "d-a0", "p-b", "d-b0"),
)
async def _all_dead_split(rig: Rig) -> None:
    await split(rig, decode=1)
    await rig.kill("p-a", "d-a0", "p-b", "d-b0")


@situation("engines that died come back", "healthy")
async def _back(rig: Rig) -> None:
    await _all_dead(rig)
    await rig.revive("a", "b")
    for name in ("a", "b"):
        await rig.stream(name, StreamCode.STREAM_CONNECTED)
        await rig.read_index(name)


@situation("engines that never answered", "unhealthy", *unreachable("a", "b"))
async def _never_answered(rig: Rig) -> None:
    for name in ("a", "b"):
        host = rig.start(name)
        rig.engine(name).up = False
        await rig.join(name, host)


@situation("one of two dead", "degraded", *unreachable("b"))
async def _one_dead(rig: Rig) -> None:
    await two(rig)
    await rig.kill("b")


@situation("an engine whose health probe fails", "degraded", *unreachable("b"))
async def _sick(rig: Rig) -> None:
    await two(rig)
    rig.engine("b").status = 503
    await rig.probe("b", "b")


@situation(
    "a zone whose only engine of each role is dead", "degraded", *unreachable("p-b", "d-b0"),
    ("DYT0902", "zone=zone-a"),
)  # fmt: skip
async def _zone_dead(rig: Rig) -> None:
    await split(rig, decode=1)
    await rig.kill("p-b", "d-b0")


@situation("no decode worker is registered", "unhealthy", NOT_SERVED)
async def _no_decode(rig: Rig) -> None:
    await rig.add("p-a", "prefill", **zone("zone-a"))


@situation("all decode workers dead", "unhealthy", NOT_SERVED, *unreachable("d-a0", "d-b0"))
async def _decode_dead(rig: Rig) -> None:
    await split(rig, decode=1)
    await rig.kill("d-a0", "d-b0")


@situation("all prefill workers dead", "unhealthy", NOT_SERVED, *unreachable("p-a", "p-b"))
async def _prefill_dead(rig: Rig) -> None:
    await split(rig)
    await rig.kill("p-a", "p-b")


@situation("a decode worker that can prefill is alone", "healthy")
async def _decode_alone(rig: Rig) -> None:
    await rig.add("d", "decode", can_prefill=True)


@situation("a stranded zone", "degraded", ("DYT0901", "zone=zone-b"), *unreachable("d-b0", "d-b1"))
async def _stranded(rig: Rig) -> None:
    await split(rig)
    await rig.kill("d-b0", "d-b1")


@situation(
    "one decode worker in each required zone", "degraded",
    ("DYT0902", "zone=zone-a"), ("DYT0902", "zone=zone-b"),
)  # fmt: skip
async def _single_decode(rig: Rig) -> None:
    await split(rig, decode=1)


@situation("one decode worker in a preferred zone", "healthy")
async def _preferred(rig: Rig) -> None:
    card = zone("zone-a", "preferred", kv_transfer_preferred_weight=0.85)
    await rig.add("p", "prefill", **card)
    await rig.add("d", "decode", **card)


@situation("one decode worker is left in a zone", "degraded", ("DYT0902", "zone=zone-b"),
           *unreachable("d-b1"))  # fmt: skip
async def _last_decode(rig: Rig) -> None:
    await split(rig)
    await rig.kill("d-b1")


@situation("stream down", "degraded", ("STREAM_DISCONNECTED", "b"))
async def _stream_down(rig: Rig) -> None:
    await two(rig)
    await rig.stream("b", StreamCode.STREAM_DISCONNECTED, "lost tcp://127.0.0.1:9")
    rig.now += 90.0
    await rig.probe("a", "b")


@situation("stream back", "healthy")
async def _stream_back(rig: Rig) -> None:
    await _stream_down(rig)
    await rig.stream("b", StreamCode.STREAM_CONNECTED)


@situation("an event endpoint that never connected", "degraded", ("STREAM_DISCONNECTED", "c"))
async def _never_connected(rig: Rig) -> None:
    await two(rig)
    await rig.join("c", rig.start("c"), "zone=zone-c," + EVENTS)


LOST = {"missing": 3}


@situation("events lost", "degraded", ("EVENTS_LOST", "b"))
async def _lost(rig: Rig) -> None:
    await two(rig)
    await rig.stream("b", StreamCode.EVENTS_LOST, "3 batches from 118 on are lost", **LOST)


@situation("events lost, then the engine cleared its cache", "healthy")
async def _lost_cleared(rig: Rig) -> None:
    await _lost(rig)
    await rig.stream("b", StreamCode.INDEX_CURRENT, "complete again", missing=0)


@situation("events lost, then the engine restarted empty", "healthy")
async def _lost_restarted(rig: Rig) -> None:
    await _lost(rig)
    await rig.kill("b")
    await rig.revive("b")
    await rig.stream("b", StreamCode.STREAM_CONNECTED)
    await rig.read_index("b")


@situation("events lost, then the stream noticed a restart", "degraded", ("ENGINE_RESTARTED", "b"))
async def _lost_noticed(rig: Rig) -> None:
    await _lost(rig)
    await rig.stream(
        "b", StreamCode.ENGINE_RESTARTED, "the engine restarted", clears=True, missing=0
    )


@situation("a restart of ten minutes ago", "healthy")
async def _restart_over(rig: Rig) -> None:
    await _lost_noticed(rig)
    rig.now += 601.0
    await rig.probe("a", "b")


@situation("events lost, then the worker died", "degraded", *unreachable("b"))
async def _lost_dead(rig: Rig) -> None:
    await _lost(rig)
    await rig.kill("b")


@situation("replay unavailable", "degraded", ("REPLAY_UNAVAILABLE", "b"))
async def _no_replay(rig: Rig) -> None:
    await two(rig)
    await rig.stream("b", StreamCode.REPLAY_UNAVAILABLE, "replay failed: no answer within 2 s")


@situation("replay available again", "healthy")
async def _replay_back(rig: Rig) -> None:
    await _no_replay(rig)
    await rig.stream("b", StreamCode.REPLAY_AVAILABLE)


@situation("load overdue", "degraded", ("LOAD_OVERDUE", "b"))
async def _overdue(rig: Rig) -> None:
    await two(rig)
    rig.engine("b").load = None
    rig.now += 60.0
    await rig.probe("a", "b")


@situation("load reported again", "healthy")
async def _load_back(rig: Rig) -> None:
    await _overdue(rig)
    await rig.load("b", 0)


@situation("one busy", "healthy")
async def _one_busy(rig: Rig) -> None:
    await two(rig)
    rig.threshold(100)
    await rig.load("b", 500)


@situation("all busy", "degraded", ("WORKERS_BUSY", "demo aggregated"))
async def _all_busy(rig: Rig) -> None:
    await _one_busy(rig)
    await rig.load("a", 500)


@situation("one busy, the other dead", "degraded", ("WORKERS_BUSY", "demo aggregated"),
           *unreachable("a"))  # fmt: skip
async def _busy_and_dead(rig: Rig) -> None:
    await _one_busy(rig)
    await rig.kill("a")


@situation("task failed", "degraded", ("BACKGROUND_TASK_FAILED", "sweep"))
async def _task_failed(rig: Rig) -> None:
    await two(rig)
    await rig.task()


@situation("task failed and recovered", "healthy")
async def _task_recovered(rig: Rig) -> None:
    await _task_failed(rig)
    await rig.recovered()


async def _write(rig: Rig, text: str) -> WorkersFile:
    path = rig.folder / "workers.yaml"
    path.write_text(text)
    return WorkersFile(path, rig.frontend.fleet, rig.service, 0.0)


def _file_condition(rig: Rig) -> bool:
    return any(one.code == "WORKERS_FILE_INVALID" for one in rig.service.conditions)


@situation("workers file invalid", "degraded", ("WORKERS_FILE_INVALID", "workers.yaml"))
async def _bad_file(rig: Rig) -> None:
    await two(rig)
    file = await _write(rig, "workers: 7")
    running = asyncio.create_task(file.run())
    await until(lambda: _file_condition(rig))
    running.cancel()


@situation("workers file corrected", "healthy")
async def _good_file(rig: Rig) -> None:
    await _bad_file(rig)
    file = await _write(rig, "workers: []")
    running = asyncio.create_task(file.run())
    await until(lambda: not _file_condition(rig))
    running.cancel()


@situation("block sizes differ", "degraded", ("BLOCK_SIZE_MISMATCH", "b"))
async def _block_sizes(rig: Rig) -> None:
    await rig.add("a")
    await rig.add("b", block_size=32)


@situation("block size of the events differs", "degraded", ("BLOCK_SIZE_MISMATCH", "b"))
async def _block_size_of_events(rig: Rig) -> None:
    await two(rig)
    await rig.stream("b", "BLOCK_SIZE_MISMATCH", "the engine publishes blocks of 32 tokens")


@situation("policy conflict", "degraded", ("POLICY_CONFLICT", "p"), ("DYT0902", "zone=zone-a"),
           kv_transfer_domain="zone", kv_transfer_enforcement="preferred",
           kv_transfer_preferred_weight=0.5)  # fmt: skip
async def _policies(rig: Rig) -> None:
    await rig.add("p", "prefill", **zone("zone-a"))
    await rig.add("d", "decode", **zone("zone-a", None))


@situation("tokenizer differs", "degraded", ("TOKENIZER_DIFFERS", "demo"))
async def _tokenizer(rig: Rig) -> None:
    await two(rig)
    rig.engine("a").tokens = [1, 2, 3]
    await rig.check_tokenizers()


@situation("the model with another tokenizer left", "healthy")
async def _tokenizer_left(rig: Rig) -> None:
    await rig.add("old", model="other")
    rig.engine("old").tokens = [1, 2, 3]
    await rig.check_tokenizers()
    await two(rig)
    await rig.frontend.fleet.remove("old")


def forget_tokenizers(rig: Rig) -> None:
    """As a start without a model's files: what was loaded for the rig is gone."""
    rig.service.preparation.tokenizers = PromptTokenizers()


@situation("no tokenizer", "degraded", ("NO_TOKENIZER", "demo"))
async def _no_tokenizer(rig: Rig) -> None:
    await two(rig)
    forget_tokenizers(rig)
    rig.service.preparation.tokenizers.ask_engines(rig.frontend.fleet.tokenize)
    await rig.check_tokenizers()


@situation("no tokenizer, then an engine with one joined", "healthy")
async def _engine_tokenizes(rig: Rig) -> None:
    await _no_tokenizer(rig)
    host = rig.start("c")
    rig.engine("c").tokens = [1, 2, 3]
    await rig.join("c", host)
    await rig.check_tokenizers()


@situation("engines tokenize differently", "degraded", ("ENGINE_TOKENIZERS_DIFFER", "demo"))
async def _engines_differ(rig: Rig) -> None:
    await two(rig)
    forget_tokenizers(rig)
    rig.service.preparation.tokenizers.ask_engines(rig.frontend.fleet.tokenize)
    rig.engine("a").tokens, rig.engine("b").tokens = [1, 2, 3], [1, 2, 4]
    await rig.check_tokenizers()


@situation("engines tokenized differently, then alike", "healthy")
async def _engines_agree(rig: Rig) -> None:
    await _engines_differ(rig)
    rig.engine("b").tokens = [1, 2, 3]
    await rig.check_tokenizers()


@situation("the tokenizer was another one, then the engine's", "healthy")
async def _tokenizer_mended(rig: Rig) -> None:
    await _tokenizer(rig)
    forget_tokenizers(rig)
    rig.service.preparation.tokenizers.ask_engines(rig.frontend.fleet.tokenize)
    await rig.check_tokenizers()


@situation("worker rejected", "degraded", ("WORKER_REJECTED", "b"))
async def _rejected(rig: Rig) -> None:
    await rig.add("a")
    await rig.add("b", runtime_config={"kv_transfer_domain": "rack"})


@situation("rejected worker died", "degraded", *unreachable("b"))
async def _rejected_dead(rig: Rig) -> None:
    await _rejected(rig)
    await rig.kill("b")


@situation("worker rejected after it died", "degraded", ("WORKER_REJECTED", "b"))
async def _dead_rejected(rig: Rig) -> None:
    await _one_dead(rig)
    rig.engine("b").info["runtime_config"] = {"kv_transfer_domain": "rack"}
    await rig.revive("b")


@situation("draining", "draining")
async def _draining(rig: Rig) -> None:
    await two(rig)
    rig.service.drain()


@situation("dead worker removed", "healthy")
async def _removed(rig: Rig) -> None:
    await _lost(rig)
    await rig.kill("b")
    assert await rig.frontend.fleet.remove("b")


@situation("one of two models dead", "degraded", ("MODEL_NOT_SERVED", "other"),
           *unreachable("c"))  # fmt: skip
async def _other_model(rig: Rig) -> None:
    await two(rig)
    await rig.add("c", model="other")
    await rig.kill("c")


@situation("transfers crossed a domain", "degraded", ("TRANSFER_CROSSED", "demo"))
async def _crossed(rig: Rig) -> None:
    await two(rig)
    rig.service.set_condition("TRANSFER_CROSSED", "demo", "KV caches cross the domain")
