"""Two frontends before the same engines, with replica sync over ZMQ and NATS, and without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import nats
import pytest
from nats.aio.msg import Msg

from dynctl.base.errors import UsageProblem
from dynctl.serving.http.parts import LoadSharingPart
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing import replicas
from dynctl.serving.routing.config import FrontendConfig, Limits, ReplicaConfig
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from dynctl.sources.frontend.live import LiveFrontends
from dynctl.sources.frontend.source import FrontendSource
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import RouterConfig
from tests.contract.nats_server import NatsServer
from tests.dynctl.serving.fleets import QUICK_HEALTH, TOKENIZER, Site, chat_body
from tests.fuzz.mutator import Mutator
from tests.waiting import until

#: Long answers: a request runs until the test ends it.
SLOW: dict[str, Any] = {"speedup_ratio": 0.05, "default_output_tokens": 64}


@asynccontextmanager
async def pair(
    plane: str, tmp_path: Path, servers: list[NatsServer] | None = None, **settings: Any
) -> AsyncIterator[tuple[Site, Site]]:
    """Two frontends of the same two engines. ``plane``: zmq, nats or none; ``servers`` gets the
    NATS server."""
    async with AsyncExitStack() as stack:
        engines = {}
        for name in ("w0", "w1"):
            engines[name] = await start_engine(EngineConfig(name=name, **SLOW), TOKENIZER)
            stack.push_async_callback(engines[name].close)
        workers = tuple(f"{engine.url},name={name}" for name, engine in engines.items())
        nats = None
        if plane == "nats":
            nats = NatsServer(tmp_path)
            stack.push_async_callback(nats.kill)
            await nats.start()
            if servers is not None:
                servers.append(nats)
        sites: list[Site] = []
        addresses = [f"ipc://{tmp_path}/{name}" for name in "ab"]
        for at in range(2):
            others = {
                "zmq": ReplicaConfig(addresses[at], (addresses[1 - at],)),
                "nats": ReplicaConfig(nats=f"nats://{nats.address}" if nats else None, group="t"),
                "none": None,
            }[plane]
            values: dict[str, Any] = {
                "port": 0,
                "workers": workers,
                "model_path": DEMO_MODEL_DIR,
                "health": QUICK_HEALTH,
                "limits": Limits(drain_s=0.1),
                "router": RouterConfig(router_replica_sync=others is not None),
                "replicas": others,
                **settings,
            }
            frontend = build_frontend(FrontendConfig(**values))
            await frontend.start()
            stack.push_async_callback(frontend.close)
            client = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
            )
            sites.append(Site(frontend, client))
        if plane != "none":
            await until(lambda: all(in_step(site) for site in sites))
        yield sites[0], sites[1]


def in_step(site: Site) -> bool:
    sync = site.frontend.part(LoadSharingPart).sync
    return sync is not None and [row.state for row in sync.rows()] == ["in step"]


@asynccontextmanager
async def running(site: Site, text: str) -> AsyncIterator[None]:
    """A request that runs meanwhile."""
    body = chat_body(text, stream=True)
    async with site.client.post(site.url("/v1/chat/completions"), json=body) as answer:
        assert answer.status == 200
        yield


async def chosen(site: Site, text: str) -> str:
    status, found, _ = await site.post("/v1/route", chat_body(text))
    assert status == 200, found
    return str(found["decode"]["winner"]["worker"])


def busy(site: Site) -> set[str]:
    return {name for name, (requests, _, _) in site.load().items() if requests}


@pytest.mark.parametrize("plane", ["zmq", "nats"])
@pytest.mark.seed("dynamo-1.6: replica sync: the second router avoids the loaded worker")
@pytest.mark.seed("smart-routing-guide-0.9: replicas: --router-replica-sync")
@pytest.mark.seed("smart-routing-guide-0.9: replicas: exchange of routing decisions")
async def test_the_second_frontend_avoids_what_the_first_loaded(plane: str, tmp_path: Path) -> None:
    async with pair(plane, tmp_path) as (a, b):
        async with running(a, "a long prompt of the first frontend " * 40):
            await until(lambda: b.load() == a.load() and busy(b))
            (loaded,) = busy(b)
            assert loaded not in {await chosen(b, f"prompt {n} of the second") for n in range(8)}
        await until(lambda: not busy(b) and not busy(a))


async def test_hostile_messages_on_nats_leave_the_routers_in_step(tmp_path: Path) -> None:
    servers: list[NatsServer] = []
    async with pair("nats", tmp_path, servers) as (a, b):
        attacker = await nats.connect(f"nats://{servers[0].address}")
        try:
            heard: list[Msg] = []
            await attacker.subscribe("dynctl.replicas.>", cb=_into(heard))
            async with running(a, "a long prompt of the first frontend " * 40):
                await until(lambda: len(heard) > 4 and busy(b))
            seen = list(heard)
            mutants = Mutator([(message.data,) for message in seen], 1)
            random = Random(1)
            for number in range(3_000):
                data = (random.randbytes(40), random.choice(seen).data, *next(mutants))
                await attacker.publish(seen[number % len(seen)].subject, data[number % len(data)])
            await attacker.flush()
            status, _, _ = await b.post(
                "/v1/chat/completions", {**chat_body("hi"), "max_tokens": 1}
            )
            assert status == 200
            before = b.load()
            async with running(a, "another long prompt of the first frontend " * 40):
                await until(lambda: b.load() != before)
        finally:
            await attacker.close()


def _into(heard: list[Msg]) -> Callable[[Msg], Awaitable[None]]:
    async def keep(message: Msg) -> None:
        heard.append(message)

    return keep


async def test_without_sync_it_does_not_know(tmp_path: Path) -> None:
    async with pair("none", tmp_path) as (a, b), running(a, "a long prompt " * 40):
        await until(lambda: busy(a))
        assert not busy(b)
        assert {await chosen(b, f"prompt {n} of the second") for n in range(24)} == {"w0", "w1"}
        assert (await b.get("/v1/fleet"))[1].get("replicas") is None


@pytest.mark.parametrize("plane", ["zmq", "nats"])
async def test_a_frontend_that_ends_takes_its_load_with_it(plane: str, tmp_path: Path) -> None:
    async with pair(plane, tmp_path) as (a, b), running(a, "a long prompt " * 40):
        await until(lambda: busy(b))
        await a.frontend.close()
        await until(lambda: not busy(b))


async def test_peers_are_in_the_fleet_and_the_metrics(tmp_path: Path) -> None:
    async with pair("zmq", tmp_path) as (a, b), running(a, "a long prompt " * 40):
        await until(lambda: busy(b))
        (row,) = (await b.get("/v1/fleet"))[1]["replicas"]
        assert (row["name"], row["state"], row["requests"]) == (a.frontend.url, "in step", 1)
        assert row["router_id"] == f"{a.frontend.core.routing.router_id:016x}"
        text = b.frontend.administration.metrics.render()
        assert f'dynctl_replica_up{{replica="{a.frontend.url}"}} 1' in text
        assert f'dynctl_replica_requests{{replica="{a.frontend.url}"}} 1' in text
        assert 'dynctl_replica_events_total{direction="received",event="add"} 1' in text


async def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    config = FrontendConfig(port=0, replicas=ReplicaConfig(f"ipc://{tmp_path}/no/such/folder"))
    with pytest.raises(
        UsageProblem, match=r"--router-replica-bind ipc:.*: its file or directory does not"
    ):
        await build_frontend(config).start()


async def test_commands_show_the_other_router_and_count_no_request_twice(tmp_path: Path) -> None:
    async with pair("zmq", tmp_path) as (a, b), running(a, "a long prompt " * 40):
        await until(lambda: busy(b))
        urls = [a.frontend.url, b.frontend.url]
        source = FrontendSource(urls)
        rows = await asyncio.to_thread(source.workers)
        assert sum(rank.active_requests for row in rows for rank in row.ranks) == 1
        assert source.other_routers is not None
        assert [one.name for one in source.other_routers] == [b.frontend.url]
        async with LiveFrontends(urls) as live:
            shown = await live.snapshot()
            assert sum(rank.active_requests for row in shown.workers for rank in row.ranks) == 1


@pytest.mark.seed("dynamo-1.6: replica sync: convergence after a partition")
async def test_both_count_the_same_again_after_nats_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SILENT_S", 2.0)
    servers: list[NatsServer] = []
    async with pair("nats", tmp_path, servers) as (a, b):
        async with AsyncExitStack() as requests:
            async with running(a, "ends while they are apart " * 40):
                await until(lambda: busy(b))
                await servers[0].kill()
                await until(lambda: silent(a) and silent(b), 20.0)
            await until(lambda: not busy(a))
            await requests.enter_async_context(running(b, "begins while they are apart " * 40))
            await until(lambda: bool(busy(b)))
            assert a.load() != b.load()
            await servers[0].start()
            await until(lambda: in_step(a) and in_step(b), 30.0)
            await until(lambda: a.load() == b.load() and len(busy(a)) == 1)
            await until(lambda: not silent(a) and not silent(b))
        await until(lambda: not busy(a) and not busy(b))


def silent(site: Site) -> bool:
    return any(one.code == "REPLICA_SILENT" for one in site.service.conditions)
