"""Requests leave no reference cycles, and hold little while they wait.

What is in a cycle stays until a full garbage collection, and those are rare in a process that
serves: a cycle that refers to a request keeps its body, its plan and its record for hours.
"""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dynctl.serving.routing.preparation import Preparation
from tests.dynctl.adapters.dynamo_endpoint import Fault
from tests.dynctl.serving.fleets import WORDS, chat_body, site, until, zone
from tests.dynctl.serving.gateways import gateway
from tests.dynctl.serving.test_dynamo_fleet import site as dynamo_site

ROUNDS = 4


def fleets():
    pair = [
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    ]
    return {"aggregated": [{"name": "one"}, {"name": "two"}], "disaggregated": pair}


async def answered(fleet):
    status, _, _ = await fleet.chat(WORDS * 4, max_tokens=5)
    assert status == 200


async def streamed(fleet):
    status, events, _ = await fleet.stream(WORDS * 4, max_tokens=5)
    assert (status, events[-1]) == (200, "[DONE]")


async def refused(fleet):
    status, _, _ = await fleet.chat(WORDS, nvext={"routing_constraints": {"required": ["gpu=no"]}})
    assert status >= 400


async def invalid(fleet):
    status, _, _ = await fleet.post("/v1/chat/completions", {"model": "demo", "messages": 3})
    assert status == 400


async def other_apis(fleet):
    for path, body in (
        ("/v1/responses", {"model": "demo", "input": WORDS, "max_output_tokens": 4}),
        ("/v1/messages", {**chat_body(WORDS), "max_tokens": 4}),
        ("/v1/completions", {"model": "demo", "prompt": WORDS, "max_tokens": 4}),
    ):
        status, found, _ = await fleet.post(path, body)
        assert status == 200, found


async def left(fleet):
    """The client leaves in the middle of its stream."""
    body = chat_body(WORDS, stream=True, max_tokens=64)
    async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
        await answer.content.readany()
        answer.close()


async def cut(fleet):
    """The engine dies in the middle of its stream."""
    engines = [running.engine for running in fleet.engines.values()]
    for engine in engines:
        engine.faults.update({"die_mid_stream_after": 2})
    await fleet.stream(WORDS * 4, max_tokens=8)
    for engine in engines:
        engine.faults.update({"die_mid_stream_after": 0})


@contextmanager
def cycles() -> Iterator[Counter[str]]:
    """How many objects of each of our types were in cycles, known at the end of the block."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def left_by_each(found: Counter[str]) -> list[str]:
    ours = ((name, n) for name, n in found.items() if name.startswith(("dynctl", "router_core")))
    return [name for name, count in ours if count >= ROUNDS]


@pytest.mark.parametrize("kind", fleets())
@pytest.mark.parametrize(
    "request_of", [answered, streamed, refused, invalid, other_apis, left, cut]
)
async def test_requests_leave_no_cycles(kind, request_of):
    async with site(fleets()[kind]) as fleet:
        await request_of(fleet)  # the first of a kind makes what all others use
        await fleet.idle()
        # A frontend of an earlier test can be freed meanwhile, but only once.
        windows = []
        for _ in range(2):
            with cycles() as found:
                for _ in range(ROUNDS):
                    await request_of(fleet)
                await fleet.idle()
            windows.append(found)
            if not left_by_each(found):
                break
    assert not left_by_each(windows[-1]), windows


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.CLOSES_IN_THE_MIDDLE])
async def test_requests_of_dynamos_workers_leave_none(tmp_path: Path, fault: Fault, stream: bool):
    """Also those that go on with another worker."""
    (tmp_path / "v1").mkdir()
    async with dynamo_site(tmp_path, fault, Fault.NONE, migration_limit=1) as made:

        def idle() -> bool:
            return not list(made.frontend.service.router.load)

        await made.ask(stream=stream)
        with cycles() as found:
            for _ in range(ROUNDS):
                for _ in range(2):  # one for each worker
                    assert (await made.ask(stream=stream))[0] == 200
            await until(idle)
    assert not left_by_each(found), found


async def test_engines_that_come_and_go_leave_none():
    """The ends of their tasks, of which each keeps its error: their streams of KV events."""
    async with site([{"name": "one"}, {"name": "two"}]) as fleet:
        await fleet.connected()
        engines = fleet.frontend.fleet
        spec = next(member.spec for member in engines if member.spec.name == "one")
        with cycles() as found:
            for _ in range(ROUNDS):
                assert await engines.remove("one")
                await engines.add(spec, "flags")
                await fleet.connected()
            await asyncio.sleep(0.1)
    assert not left_by_each(found), found


async def test_requests_through_a_gateway_leave_none():
    async with gateway(({"name": "a"}, {"name": "b"})) as found:

        async def one() -> None:
            stream = found.request()
            await stream.ask(chat_body(WORDS))
            stream.call.cancel()
            await found.idle()
            await until(lambda: not found.frontend.core.inference.in_flight)

        await one()
        with cycles() as counted:
            for _ in range(ROUNDS):
                await one()
    assert not left_by_each(counted), counted


class Ids(list[int]):
    """A list that can be referred to weakly."""


async def test_a_request_that_waits_for_its_engine_holds_no_token_ids(monkeypatch):
    made: list[weakref.ref[Ids]] = []
    prepare = Preparation.prepare

    async def prepare_with_ids(self, *prompt, **options):
        prepared = await prepare(self, *prompt, **options)
        ids = Ids(prepared.tokens.ids or ())
        made.append(weakref.ref(ids))
        return replace(prepared, tokens=replace(prepared.tokens, ids=ids))

    monkeypatch.setattr(Preparation, "prepare", prepare_with_ids)
    async with site([{"name": "one", "prefill_tokens_per_s": 20.0, "speedup_ratio": 1.0}]) as fleet:
        waiting = asyncio.create_task(fleet.chat(WORDS * 4, max_tokens=1))
        await until(lambda: fleet.engines["one"].engine.active_requests == 1)
        assert [ids() for ids in made] == [None]
        assert not waiting.done()
        waiting.cancel()
