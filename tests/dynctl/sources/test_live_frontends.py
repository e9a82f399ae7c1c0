"""Dynctl frontends, followed over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.web_protocol import RequestHandler

from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.documents.snapshot import Snapshot
from dynctl.sources.client import AmbiguousDecision, FrontendClient
from dynctl.sources.domains import DomainBoard
from dynctl.sources.frontend import live as frontend_module
from dynctl.sources.frontend.live import LiveFrontends
from dynctl.sources.frontend.source import FrontendSource
from dynctl.sources.query import DecisionQuery
from dynctl.top.header import numbers
from router_core import Booked, Freed, RouterConfig
from tests.dynctl.serving.fleets import WORDS, chat_body, site, until, zone
from tests.waiting import patience

ENGINES: list[dict[str, Any]] = [
    {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
    for z in "ab"
    for role in ("prefill", "decode")
]
PREFERRED: list[dict[str, Any]] = [
    {**one, "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.85}
    for one in ENGINES
]


async def seen(
    source: LiveFrontends, wanted: Callable[[Snapshot], Any], seconds: float = 10.0
) -> Snapshot:
    """The first snapshot that fulfils a condition."""
    async with asyncio.timeout(patience(seconds)):
        while True:
            shown = await source.snapshot()
            if wanted(shown):
                return shown
            await asyncio.sleep(0.02)


async def in_thread(ask: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(ask)


def loads(rows):
    return [(row.ranks[0].reported, row.ranks[0].cached_blocks) for row in rows]


async def test_workers_are_the_same_as_in_workers_list():
    async with site(ENGINES) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        assert (await fleet.chat(WORDS * 8))[0] == 200
        await fleet.idle()
        # Reports and KV events may come between the two readings.
        async with asyncio.timeout(patience(10)):
            while True:
                shown = await seen(
                    source, lambda s: any(r.ranks[0].cached_blocks for r in s.workers)
                )
                listed = await in_thread(FrontendClient(fleet.frontend.url).workers)
                if loads(shown.workers) == loads(listed):
                    break
        assert [(row.name, row.domains, row.runtime_config) for row in shown.workers] == [
            (row.name, row.domains, row.runtime_config) for row in listed
        ]
        assert shown.header.models == ("demo",)
        assert (shown.header.mode, shown.header.frontends) == ("kv", (1, 1))
        assert shown.unknown("decisions") is None
        assert "has no queue" in shown.parts["queue"].unknown
        assert shown.load_every_s == 0.1


async def test_what_waits_in_the_queues_of_all_frontends_is_added_up():
    settings = RouterConfig(router_queue_threshold=0.0)
    async with (
        site([{"name": "a"}], router=settings) as one,
        site([{"name": "a"}], router=settings) as two,
        LiveFrontends([one.frontend.url, two.frontend.url]) as source,
    ):
        sent = []
        for fleet, count in ((one, 1), (two, 2)):
            (worker,) = fleet.service.router.registry
            load = Booked("load", "aggregated", worker.worker_id, 0, prefill_tokens=9)
            assert fleet.service.apply(load).ok
            sent += [asyncio.create_task(fleet.chat(f"{n}")) for n in range(count)]
        shown = await seen(source, lambda s: s.header.queue == 3)
        assert shown.unknown("queue") is None
        assert "router queue 3" in numbers(shown)
        for fleet in (one, two):
            fleet.service.apply(Freed("load"))
        assert {status for status, *_ in await asyncio.gather(*sent)} == {200}
        await seen(source, lambda s: s.header.queue == 0)


async def test_decisions_arrive_and_are_explained():
    async with site(ENGINES) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        assert (await source.snapshot()).decisions == ()
        _, _, headers = await fleet.chat(WORDS * 8)
        shown = await seen(source, lambda s: s.decisions)
        (line,) = shown.decisions
        assert line.id == headers["x-dynctl-decision"]
        assert (line.complete, line.refused, line.blocks) == (True, False, line.blocks)
        assert line.prefill_domains == line.domains
        result = await source.decision(line)
        assert result.winner.decode == line.decode
        (transfer,) = [one for one in shown.transfers if one.local]
        assert transfer.value == line.domains["zone"]


async def test_the_line_of_a_running_request_gets_its_end():
    slow = {"name": "a0", "speedup_ratio": 1.0, "decode_itl_ms": 20.0}
    async with site([slow]) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        body = chat_body("hi", stream=True, max_tokens=40)
        async with fleet.client.post(fleet.url("/v1/chat/completions"), json=body) as answer:
            await answer.content.readany()
            shown = await seen(source, lambda s: s.decisions)
            assert [line.response.state for line in shown.decisions] == ["running"]
            await answer.read()
        shown = await seen(source, lambda s: s.decisions[0].response.state != "running")
        (line,) = shown.decisions
        assert (line.response.state, line.response.status) == ("complete", 200)


@pytest.mark.parametrize("response", [None, "cut"])
async def test_a_follower_sees_a_request_again_that_was_cut(response: str | None):
    slow = {"name": "a0", "speedup_ratio": 1.0, "decode_itl_ms": 20.0}
    async with site([slow]) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        fleet.engines["a0"].engine.faults.update({"die_mid_stream_after": 10})
        query = DecisionQuery(10, response=response)
        async with aclosing(source.follow_decisions(query)) as pages:
            assert (await anext(pages)).decisions == []
            running = asyncio.create_task(fleet.stream("hi", max_tokens=40))
            states: list[str] = []
            async with asyncio.timeout(patience(20)):
                while "cut" not in states:
                    states += [one.response.state for one in (await anext(pages)).decisions]
            await running
        assert states == (["running", "cut"] if response is None else ["cut"])


async def test_a_killed_engine_strands_its_domain_and_requests_that_require_it_fail():
    async with site(ENGINES) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        board = DomainBoard()
        first = board.view(await source.snapshot()).rows[0].capacity
        assert (first.value, first.state) == ("zone-a", "ok")
        await fleet.engines["decode-a0"].close()
        shown = await seen(
            source, lambda s: board.view(s).rows[0].capacity.state == "stranded", seconds=2.0
        )
        assert "WORKER_UNREACHABLE" in {alert.code for alert in shown.alerts}
        bound = {"routing_constraints": {"required_taints": ["dynamo.topology/zone=zone-a"]}}
        status, _, _ = await fleet.chat(nvext=bound)
        assert status == 503
        moved = await fleet.chat()
        assert moved[0] == 200
        shown = await seen(source, lambda s: len(s.decisions) == 2)
        newest, refused = shown.decisions
        assert (refused.refused, newest.domains) == (True, {"zone": "zone-b"})
        result = await source.decision(refused)
        assert not result.ok


async def test_the_newest_decision_is_first_where_the_wall_clock_was_set_back():
    """An hour back and one forward: times contradict the order, ids and answers do not."""
    async with site(ENGINES) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        wall, ids = fleet.service.wall, []
        for hours in (0, -1, 1, 0):
            fleet.service.wall = lambda offset=3600.0 * hours: wall() + offset
            ids.append((await fleet.chat(WORDS * 8))[2]["x-dynctl-decision"])
        newest = ids[::-1]
        shown = await seen(source, lambda s: len(s.decisions) == len(ids))
        assert [line.id for line in shown.decisions] == newest
        url = fleet.frontend.url
        assert (await in_thread(lambda: FrontendSource([url]).decision(None))).id == newest[0]
        async with aclosing(source.follow_decisions(DecisionQuery(10))) as pages:
            assert [line.id for line in (await anext(pages)).decisions] == newest
            following = asyncio.create_task(anext(pages))
            fleet.service.wall = lambda: wall() - 7200
            later = (await fleet.chat(WORDS * 8))[2]["x-dynctl-decision"]
            assert [line.id for line in (await following).decisions] == [later]


async def test_a_threshold_acts_at_once():
    async with site(ENGINES) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        name = "active_prefill_tokens_threshold"
        await source.snapshot()
        judged = await source.judged("demo", {name: 1})
        assert not any(row.busy for row in judged)
        after = await source.set_thresholds("demo", {name: 4_000})
        assert after[name] == 4_000
        shown = await source.snapshot()
        assert shown.thresholds["demo"][name] == 4_000
        assert fleet.service.router.busy.thresholds("demo").active_prefill_tokens_threshold == 4_000
        with pytest.raises(UsageProblem, match="must be between"):
            await source.set_thresholds("demo", {"active_decode_blocks_threshold": 9.0})


async def test_the_preference_meter_is_of_the_last_decision():
    async with site(PREFERRED) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        assert (await fleet.chat(WORDS))[0] == 200
        shown = await seen(source, lambda s: s.meters)
        (meter,) = shown.meters
        assert (meter.domain, meter.value) == ("zone", shown.decisions[0].prefill_domains["zone"])
        assert round(meter.preference.crossover, 3) == 1.996
        assert meter.decision == shown.decisions[0].id


async def test_a_frontend_that_stops_leaves_its_last_snapshot_and_a_problem(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(frontend_module, "RETRY_S", 0.05)
    async with site(ENGINES) as fleet, LiveFrontends([fleet.frontend.url]) as source:
        before = await source.snapshot()
        await fleet.frontend.close()
        shown = await seen(source, lambda s: s.problem)
        assert [row.name for row in shown.workers] == [row.name for row in before.workers]
        assert fleet.frontend.url in shown.problem
        assert shown.header.frontends == (0, 1)
        assert shown.parts["load"].at == before.parts["load"].at or shown.parts["load"].at


async def test_two_frontends_add_up():
    async with site(ENGINES[:2]) as one, site(ENGINES[:2]) as other:
        urls = [one.frontend.url, other.frontend.url]
        async with LiveFrontends(urls) as source:
            for fleet in (one, other):
                assert (await fleet.chat(WORDS))[0] == 200
                await fleet.idle()
            shown = await seen(source, lambda s: len(s.decisions) == 2)
            assert {line.source for line in shown.decisions} == set(urls)
            assert (shown.header.recorded, shown.header.frontends) == (2, (2, 2))
            for line in shown.decisions:
                assert (await source.decision(line)).id == line.id
            booked = other.service.router.load
            booked.requests[0] += 3
            shown = await source.snapshot()
            assert sum(rank.active_requests for row in shown.workers for rank in row.ranks) == 3
            booked.requests[0] -= 3
            await one.frontend.close()
            shown = await source.snapshot()
            assert (shown.problem, shown.header.frontends) == ("", (1, 2))


async def test_without_the_token_nothing_is_shown_and_the_error_names_it():
    async with site(ENGINES[:2], api_token="secret") as fleet:
        for token, problem, hint in (
            (None, "/v1/fleet needs a token", "set DYNCTL_TOKEN"),
            ("wrong", "/v1/fleet refuses the token", "set the --admin-token"),
        ):
            with pytest.raises(UsageProblem, match=problem) as caught:
                async with LiveFrontends([fleet.frontend.url], token):
                    pass
            assert caught.value.hint.startswith(hint)
        async with LiveFrontends([fleet.frontend.url], "secret") as source:
            assert (await source.snapshot()).unknown("decisions") is None


async def test_a_frontend_that_keeps_no_decisions_says_how_to_keep_some():
    async with (
        site(ENGINES[:2], decision_memory_bytes=0) as fleet,
        LiveFrontends([fleet.frontend.url]) as source,
    ):
        unknown = (await source.snapshot()).unknown("decisions")
        assert unknown is not None
        assert "--decision-memory" in unknown.provide


async def test_no_response_is_an_error_at_the_start():
    with pytest.raises(Unreachable, match=r"no frontend reports its fleet: http://127\.0\.0\.1:1"):
        async with LiveFrontends(["http://127.0.0.1:1"]):
            pass


@pytest.mark.parametrize("body", [b"{}", b"not json", b'{"kind":"FleetLoad"}', b"\xff"])
async def test_another_server_is_an_error_at_the_start(body: bytes):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Unreachable, match="not as a dynctl frontend of this version"):
            async with LiveFrontends([url]):
                pass


def serves_an_engine(task: asyncio.Task, frontend: str) -> bool:
    """Whether a task is an engine's side of a connection, which the frontend opens at any time."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    handler = frame.f_locals.get("self") if frame else None
    if not isinstance(handler, RequestHandler) or handler.transport is None:
        return False
    port = handler.transport.get_extra_info("sockname")[1]
    return not frontend.endswith(f":{port}")


async def test_nothing_is_left_behind():
    async with site(ENGINES[:2]) as fleet:
        url = fleet.frontend.url
        before = asyncio.all_tasks()

        def left() -> set[asyncio.Task]:
            new = asyncio.all_tasks() - before - {asyncio.current_task()}
            return {task for task in new if not serves_an_engine(task, url)}

        async with LiveFrontends([url]) as source:
            await source.snapshot()
            assert left()
        await until(lambda: not left())


def test_an_id_that_is_ambiguous_at_one_replica_is_ambiguous(monkeypatch: pytest.MonkeyPatch):
    """The decision of another replica is one of several with that end."""

    def decision(client: FrontendClient, decision_id: str) -> SimpleNamespace:
        if client.url.endswith("1"):
            raise AmbiguousDecision(f"{decision_id!r} matches several decisions: a1, b1")
        return SimpleNamespace(id="c1" if decision_id == "1" else decision_id)

    monkeypatch.setattr(FrontendClient, "decision", decision)
    source = FrontendSource(["http://10.0.0.1:1", "http://10.0.0.1:2"])
    with pytest.raises(AmbiguousDecision, match="a1, b1"):
        source.decision("1")
    assert source.decision("c1").id == "c1"
