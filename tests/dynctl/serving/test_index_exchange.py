"""A frontend that starts takes the index of another one, and follows the engines from there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from dynctl.documents.index_dump import decode_snapshot
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from tests.dynctl.serving.fleets import Site, site
from tests.http_servers import served
from tests.waiting import until

ENGINES = [{"name": "w0"}, {"name": "w1"}]


@asynccontextmanager
async def second(first: Site, **settings: Any) -> AsyncIterator[ServingProcess]:
    """Another frontend of the same engines."""
    values: dict[str, Any] = {
        "port": 0,
        "workers": first.frontend.config.workers,
        "model_path": first.frontend.config.model_path,
        "health": first.frontend.config.health,
        **settings,
    }
    frontend = build_frontend(FrontendConfig(**values))
    await frontend.start()
    try:
        yield frontend
    finally:
        await frontend.close()


def blocks(frontend: ServingProcess) -> dict[str, tuple[int, str]]:
    """Worker -> cached blocks, state of the index."""
    router = frontend.service.router
    found = {}
    for worker in router.registry:
        (slot,) = router.registry.slots(worker.worker_id)
        found[worker.name] = (router.cached_blocks(slot), router.freshness[slot].state)
    return found


def states(frontend: ServingProcess) -> set[str]:
    """The states of all indexes."""
    return {state for _, state in blocks(frontend).values()}


async def ends_as(fleet: Site, other: ServingProcess, expected: set[str]) -> None:
    """Wait until everything is applied and the indexes have these states."""
    try:
        await until(lambda: settled(fleet, other) and states(other) == expected)
    except TimeoutError:
        found = other.fleet.index.all_states()
        raise AssertionError(f"{blocks(other)}, {blocks(fleet.frontend)}, {found}") from None


def forget(fleet: Site) -> None:
    """Leave the last four batches in the replay sockets: what was cached before is lost there."""
    for engine in fleet.engines.values():
        for publisher in engine.engine._publishers:
            kept = publisher.buffer.since(publisher.next_seq - 4)
            publisher.buffer.clear()
            for sequence, payload in kept:
                publisher.buffer.append(sequence, payload)


async def filled(fleet: Site) -> None:
    """Every worker caches prompts."""
    await fleet.connected()
    for number in range(24):
        assert (await fleet.chat(f"{number} " + "some words of a long prompt " * 8))[0] == 200
    await fleet.idle()
    await until(lambda: settled(fleet, fleet.frontend) and states(fleet.frontend) == {"current"})
    assert all(count > 0 for count, _ in blocks(fleet.frontend).values())


def settled(fleet: Site, frontend: ServingProcess) -> bool:
    """Everything that the engines published is applied."""
    states = frontend.fleet.index.all_states()
    sent = published(fleet)
    seen = sum(-1 if one.last_seq is None else one.last_seq for one in states.values())
    return sent == seen + len(states) and not frontend.fleet.index.waiting


def published(fleet: Site) -> int:
    """Batches of the engines."""
    engines = [one.engine for one in fleet.engines.values()]
    return sum(publisher.next_seq for one in engines for publisher in one._publishers)


def read(frontend: ServingProcess) -> int:
    """Batches that came from the engines."""
    return sum(one.batches for one in frontend.fleet.index.all_states().values())


@pytest.mark.seed("smart-routing-guide-0.9: replicas: persistent state")
@pytest.mark.seed("dynamo-1.6: replica sync: index exchange")
async def test_it_begins_with_the_index_of_the_peer_and_goes_on_with_the_events() -> None:
    async with site(ENGINES) as fleet:
        await filled(fleet)
        forget(fleet)
        async with second(fleet, index_peers=(fleet.frontend.url,)) as other:
            await until(lambda: blocks(other) == blocks(fleet.frontend))
            assert read(other) == 0
            assert other.fleet.index.seeded == 2
            for number in range(4):
                await fleet.chat(f"new {number} " + "other words entirely " * 9)
            await fleet.idle()
            await until(lambda: settled(fleet, other) and settled(fleet, fleet.frontend))
            await until(lambda: blocks(other) == blocks(fleet.frontend))
            assert all(not one.lost for one in other.fleet.index.all_states().values())


async def test_without_a_peer_the_engines_no_longer_have_everything() -> None:
    async with site(ENGINES) as fleet:
        await filled(fleet)
        forget(fleet)
        async with second(fleet) as other:
            await ends_as(fleet, other, {"gapped"})
            assert read(other) > 0


async def test_what_happens_between_the_dump_and_the_stream_is_read_from_the_engine() -> None:
    """The dump is of a moment; the batches after it come from the replay socket."""
    async with site(ENGINES) as fleet:
        await filled(fleet)
        dump = await fetched(fleet)
        before = published(fleet)
        for number in range(2):
            await fleet.chat(f"later {number} " + "other words entirely " * 9)
        await fleet.idle()
        await until(lambda: settled(fleet, fleet.frontend))
        async with peer(dump) as url, second(fleet, index_peers=(url,)) as other:
            await until(lambda: settled(fleet, other) and blocks(other) == blocks(fleet.frontend))
            assert read(other) == published(fleet) - before > 0


async def test_events_that_neither_has_are_a_gap() -> None:
    async with site(ENGINES) as fleet:
        await filled(fleet)
        dump = await fetched(fleet)
        for number in range(24):
            await fleet.chat(f"{number} later " + "other words entirely " * 9)
        await fleet.idle()
        await until(lambda: settled(fleet, fleet.frontend))
        forget(fleet)
        async with peer(dump) as url, second(fleet, index_peers=(url,)) as other:
            # The batch of the dump is no longer there, so the engine may be another process.
            await ends_as(fleet, other, {"gapped"})


async def test_an_engine_that_restarted_since_is_read_from_its_start() -> None:
    async with site(ENGINES) as fleet:
        await filled(fleet)
        dump = await fetched(fleet)
        for engine in fleet.engines.values():
            await engine.engine.restart_silently()
        async with peer(dump) as url, second(fleet, index_peers=(url,)) as other:
            await until(lambda: blocks(other) == {"w0": (0, "current"), "w1": (0, "current")})
            assert (await fleet.chat("hello"))[0] == 200


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "it ends in the middle"),
        (bytes(3), "it ends in the middle"),
        (bytes(100), "a checksum does not match"),
        (404, "status 404; expected 200"),
        (None, "its router refused the connection"),
    ],
)
async def test_a_peer_without_an_index_is_named_and_the_engines_are_read(
    answer: bytes | int | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with site([{"name": "w0"}]) as fleet:
        await fleet.connected()
        await fleet.chat("a prompt of some words " * 8)
        await fleet.idle()
        await until(lambda: settled(fleet, fleet.frontend))
        async with peer(answer) as url, second(fleet, index_peers=(url,)) as other:
            await until(lambda: blocks(other) == blocks(fleet.frontend))
            assert read(other) > 0
        assert any(url in line and why in line for line in caplog.messages), caplog.messages


async def test_the_index_needs_the_token_and_the_second_peer_is_tried() -> None:
    async with site([{"name": "w0"}], api_token="t") as fleet:
        await fleet.connected()
        await fleet.chat("a prompt of some words " * 8)
        await fleet.idle()
        await until(lambda: settled(fleet, fleet.frontend))
        assert (await fleet.get("/v1/index"))[0] == 401
        urls = ("http://127.0.0.1:1", fleet.frontend.url)
        async with second(fleet, index_peers=urls, api_token="t") as other:
            await until(lambda: blocks(other) == blocks(fleet.frontend))
            assert other.fleet.index.seeded == 1


async def test_ranks_of_a_dump_that_is_cut_are_used_and_the_others_read() -> None:
    async with site(ENGINES) as fleet:
        await filled(fleet)
        forget(fleet)
        dump = await fetched(fleet)
        async with peer(dump[:-40]) as url, second(fleet, index_peers=(url,)) as other:
            await ends_as(fleet, other, {"current", "gapped"})
            assert other.fleet.index.seeded == 1


async def fetched(fleet: Site) -> bytes:
    async with fleet.client.get(fleet.url("/v1/index")) as answer:
        assert answer.status == 200
        data = await answer.read()
    assert len(decode_snapshot(data)[1]) == len(fleet.engines)
    return data


@asynccontextmanager
async def peer(answer: bytes | int | None) -> AsyncIterator[str]:
    """A router with this index, this status, or none at its address."""

    async def handle(_: web.Request) -> web.Response:
        if isinstance(answer, int):
            return web.Response(status=answer)
        return web.Response(body=answer)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/index", handle)
    async with served(app) as url:
        if answer is not None:
            yield url
            return
    yield url
