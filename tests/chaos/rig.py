"""A frontend before three engines, one of them behind proxies, and clients that load it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig, HealthConfig, Limits
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import RunningEngine, start_engine
from dynctl.tokenization import DEMO_MODEL_DIR
from tests.chaos.faults import Broken
from tests.chaos.proxies import AnswerProxy, TcpProxy
from tests.dynctl.serving.fleets import TOKENIZER, WORDS, Site, chat_body
from tests.waiting import patience, slowdown, until

BROKEN = "broken"
OTHER_MODEL = "other"
_ENGINE: Mapping[str, Any] = {"speedup_ratio": 50.0, "default_output_tokens": 8}
_TICK_S = 0.02
_LONGEST_S = 60.0  # a client waits at most this long for the end of an answer (idle machine)


@dataclass
class Outcomes:
    """How the requests of the clients ended."""

    answered: int = 0
    refused: list[str] = field(default_factory=list)
    error_events: int = 0
    lost: list[str] = field(default_factory=list)
    first_bytes_s: list[float] = field(default_factory=list)

    @property
    def all(self) -> int:
        return self.answered + len(self.refused) + self.error_events + len(self.lost)


@dataclass
class Usage:
    """What the process holds."""

    descriptors: int
    tasks: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        return cls(len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()))


class HeldUp:
    """``seconds``: how long no thread of this process ran, while the context is open.

    The host gave its CPU to others. A loop that is blocked, or works, is not held up: then this
    thread runs, or the process uses CPU.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        wall, used = time.monotonic(), time.process_time()
        while not self._over.wait(_TICK_S):
            now, cpu = time.monotonic(), time.process_time()
            late = now - wall - _TICK_S - (cpu - used)
            if late > _TICK_S:
                self.seconds += late
            wall, used = now, cpu


class Rig:
    """The fleet of one fault."""

    def __init__(self, site: Site, broken: Broken) -> None:
        self.site = site
        self.broken = broken

    @asynccontextmanager
    async def others(self) -> AsyncIterator[list[float]]:
        """A client of another model, served by an engine that works: its times to the first byte,
        in seconds, while the context is open; without those in which this process was held up."""
        times: list[float] = []

        async def ask(held_up: HeldUp) -> None:
            body = chat_body(WORDS, model=OTHER_MODEL, stream=True, max_tokens=2)
            while True:
                started, before = time.monotonic(), held_up.seconds
                url = self.site.url("/v1/chat/completions")
                async with self.site.client.post(url, json=body) as answer:
                    await answer.content.readany()
                    waited = time.monotonic() - started
                    assert answer.status == 200
                    await answer.read()
                await asyncio.sleep(0.05)
                times.append(waited - (held_up.seconds - before))

        with HeldUp() as held_up:
            client = asyncio.create_task(ask(held_up))
            try:
                # One answer at least, of however short a time.
                yield times
                await until(lambda: times or client.done())
                if client.done():
                    client.result()
            finally:
                client.cancel()
                await asyncio.gather(client, return_exceptions=True)

    def reason(self) -> str | None:
        """Why the broken engine is unavailable; None while it is available."""
        registry = self.site.service.router.registry
        worker = registry.by_name(BROKEN)
        assert worker is not None
        reason: str | None = registry.unavailable_reason(worker.worker_id)
        return reason

    def conditions(self) -> set[str]:
        """The codes of the conditions in force."""
        self.site.service.health()
        return {one.code for one in self.site.service.conditions}

    async def load(self, clients: int, requests: int) -> Outcomes:
        """``requests`` by ``clients`` at the same time, streams and plain answers mixed."""
        outcomes = Outcomes()
        left = iter(range(requests))

        async def client() -> None:
            for number in left:
                await self._one(number, outcomes)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return outcomes

    async def _one(self, number: int, outcomes: Outcomes) -> None:
        stream = number % 4 != 0
        body = chat_body(f"{number % 7} " + WORDS * (1 + number % 3), stream=stream, max_tokens=8)
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(patience(_LONGEST_S)),
                self.site.client.post(self.site.url("/v1/chat/completions"), json=body) as answer,
            ):
                first = await answer.content.readany()
                outcomes.first_bytes_s.append(time.monotonic() - started)
                raw = first + await answer.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            outcomes.lost.append(f"request {number}: {type(error).__name__}: {error}")
            return
        self._judge(number, answer.status, stream, raw, outcomes)

    def _judge(
        self, number: int, status: int, stream: bool, raw: bytes, outcomes: Outcomes
    ) -> None:
        if status != 200:
            try:
                problem = json.loads(raw)["error"]["message"]
                outcomes.refused.append(f"{status}: {problem}")
            except (ValueError, KeyError, TypeError):
                outcomes.lost.append(f"request {number}: {status} without an error: {raw[:200]!r}")
        elif not stream:
            try:
                json.loads(raw)["choices"][0]["message"]
                outcomes.answered += 1
            except (ValueError, KeyError, IndexError, TypeError):
                outcomes.lost.append(f"request {number}: 200 without an answer: {raw[:200]!r}")
        elif b'"error"' in raw:
            outcomes.error_events += 1
        elif raw.rstrip().endswith(b"data: [DONE]") and raw.count(b"\n\ndata: ") > 1:
            outcomes.answered += 1
        else:
            outcomes.lost.append(f"request {number}: stream without an end: {raw[-200:]!r}")

    async def settled(self) -> None:
        """Until the broken engine is available, its events arrive and no load is booked."""
        await self.site.idle()
        await until(lambda: self.reason() is None, 30)
        await until(lambda: self._connected(), 30)

    def _connected(self) -> bool:
        states = self.site.frontend.fleet.index.all_states()
        return all(state.connected for state in states.values())


@asynccontextmanager
async def rig(settings: Mapping[str, Any]) -> AsyncIterator[Rig]:
    """Start everything; all of it is gone afterwards."""
    async with AsyncExitStack() as stack:
        engines: dict[str, RunningEngine] = {}

        async def start(name: str, **more: Any) -> RunningEngine:
            events = {"name": name, "kv_events": "tcp://127.0.0.1:0"}
            config = EngineConfig(**{**_ENGINE, **events, **more})
            engines[name] = await start_engine(config, TOKENIZER)
            return engines[name]

        async def close_engines() -> None:
            for engine in engines.values():
                await engine.close()

        stack.push_async_callback(close_engines)
        for name in (BROKEN, "b", "c"):
            await start(name)
        await start(OTHER_MODEL, model=OTHER_MODEL)
        broken = await _broken(stack, engines, start)
        port = broken.http.port
        spec = (
            f"http://127.0.0.1:{port},name={BROKEN},kv-events=tcp://127.0.0.1:{broken.events.port},"
            f"replay=tcp://127.0.0.1:{broken.replay.port}"
        )
        others = tuple(f"{engines[name].url},name={name}" for name in ("b", "c", OTHER_MODEL))
        values: dict[str, Any] = {
            # A fault lasts as long as these; what works must not reach them on a busy machine.
            "limits": Limits(
                first_byte_s=3 * slowdown(),
                idle_s=3 * slowdown(),
                connect_s=3 * slowdown(),
                drain_s=2.0,
            ),
            "health": HealthConfig(interval_s=0.2, timeout_s=slowdown()),
            **settings,
        }
        frontend = build_frontend(
            FrontendConfig(port=0, workers=(spec, *others), model_path=DEMO_MODEL_DIR, **values)
        )
        await frontend.start()
        stack.push_async_callback(frontend.close)
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        site = Site(frontend, client)
        site.engines = engines
        made = Rig(site, broken)
        await made.settled()
        yield made


async def _broken(stack: AsyncExitStack, engines: dict[str, RunningEngine], start: Any) -> Broken:
    record = engines[BROKEN].ready_record()
    answers = AnswerProxy(record["url"])
    await stack.enter_async_context(answers.running())
    proxies = []
    for port in (answers.port, _port(record["kv_events"]), _port(record["replay"])):
        proxy = TcpProxy(port)
        await proxy.open()
        stack.push_async_callback(proxy.close)
        proxies.append(proxy)
    http, events, replay = proxies

    async def restart() -> None:
        await engines[BROKEN].close()
        again = (await start(BROKEN)).ready_record()
        answers.target(again["url"])
        events.target(_port(again["kv_events"]))
        replay.target(_port(again["replay"]))

    def set_faults(changes: Mapping[str, Any]) -> None:
        engines[BROKEN].engine.faults.update(changes)

    return Broken(http, events, replay, answers, set_faults, restart)


def _port(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])
