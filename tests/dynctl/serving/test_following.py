"""What a client that polls once a second reads: the load of the fleet, and new decisions."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import SLICE, Result
from dynctl.documents.codec import decode
from dynctl.documents.fleet_load import FleetLoad, joined_rows
from dynctl.documents.workers import decode_worker_rows
from dynctl.serving.http.fleet_endpoints import FleetFeed
from dynctl.serving.records.decision_memory import MAX_WAITING, DecisionMemory
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import LoadReported
from tests.dynctl.serving.fleets import Site, site, until, zone
from tests.dynctl.serving.routed import request, worker
from tests.dynctl.serving.test_admin import decide, serving
from tests.waiting import patience

ENGINES: list[dict[str, Any]] = [
    {"name": "prefill-a0", "role": "prefill", **zone("zone-a")},
    {"name": "decode-a0", "role": "decode", **zone("zone-a")},
]


def preferring(worker_id: int, home: str):
    policy = {
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "preferred",
        "kv_transfer_preferred_weight": 0.85,
    }
    return worker(worker_id, "prefill", zone=home, policy=policy)


def _published(fleet: Site) -> int:
    """Batches of KV events that the engines have published."""
    engines = [one.engine for one in fleet.engines.values()]
    return sum(publisher.next_seq for engine in engines for publisher in engine._publishers)


def _applied(fleet: Site) -> int:
    index = fleet.frontend.fleet.index
    received = (state.last_seq for state in index.all_states().values())
    return -1 if index.waiting else sum(seq + 1 for seq in received if seq is not None)


async def test_rows_are_those_of_the_list_of_workers():
    async with site([{"name": "a0"}, {"name": "a1"}]) as fleet:
        assert (await fleet.chat())[0] == 200
        await fleet.idle()
        await until(lambda: _published(fleet) == _applied(fleet))
        async with fleet.client.get(fleet.url("/v1/fleet")) as answer:
            read = decode(await answer.read(), FleetLoad)
        async with fleet.client.get(fleet.url("/v1/workers")) as answer:
            listed = decode_worker_rows(await answer.read())
        assert read.workers is not None
        found = {row.name: row for row in joined_rows(read.workers, read.loads)}
        assert found.keys() == {"a0", "a1"}
        for row in listed:
            other = found[row.name]
            assert (row.runtime_config, row.domains) == (other.runtime_config, other.domains)
            assert [rank.cached_blocks for rank in row.ranks] == [
                rank.cached_blocks for rank in other.ranks
            ]
            assert other.ranks[0].reported.waiting_requests == 0
        assert (read.recorded, read.in_flight) == (1, 0)
        assert read.thresholds["demo"]["active_decode_blocks_threshold"] is None


async def test_cards_travel_once_and_again_when_they_change():
    async with serving(worker(1), worker(2)) as (_, service):
        feed = FleetFeed(service, DecisionMemory())
        first = feed.read()
        assert [row.name for row in first.workers or ()] == ["aggregated-1", "aggregated-2"]
        service.apply(LoadReported(1, 0, kv_used_blocks=7))
        second = feed.read(first.cards)
        assert second.workers is None
        rows = joined_rows(first.workers or (), second.loads)
        assert rows[0].ranks[0].reported.kv_used_blocks == 7
        service.membership.upsert(worker(2, zone="zone-b"))
        third = feed.read(first.cards)
        assert [row.domains for row in third.workers or ()] == [{}, {"zone": "zone-b"}]
        assert FleetFeed(service, DecisionMemory()).read(third.cards).workers is not None


def steps_and_result(steps: Generator[None, None, Result], between: Callable[[], object]):
    """How many steps there were, and the result, where ``between`` runs after the first."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1
        if count == 1:
            between()


async def test_a_large_fleet_is_listed_in_steps_of_one_moment():
    service = RoutingService(clock=lambda: 100.0, wall=lambda: 1000.0)
    for number in range(1, 1001):
        assert service.membership.upsert(worker(number)).ok
    feed = FleetFeed(service, DecisionMemory())
    whole = feed.read()
    steps, listed = steps_and_result(feed.steps(), lambda: service.membership.remove(1000))
    assert steps > 1000 // SLICE
    assert listed == whole
    steps, loads = steps_and_result(
        feed.steps(feed.read().cards), lambda: service.membership.remove(1)
    )
    assert (steps, len(loads.loads), loads.workers) == (1, 999, None)


async def test_the_engines_of_a_fleet_are_listed_in_steps_of_one_moment(monkeypatch):
    monkeypatch.setattr("dynctl.serving.engines.fleet.SLICE", 1)
    async with site(ENGINES, api_token="t0k") as fleet:
        members, service = fleet.frontend.fleet, fleet.frontend.service

        def lose() -> None:
            assert service.membership.set_available(
                next(iter(service.router.registry)).worker_id, "lost"
            ).ok

        steps, listed = steps_and_result(members.row_steps(), lose)
        assert steps == len(ENGINES) + 1
        assert [row.status for row in listed] == ["ready"] * len(ENGINES)
        assert any(row.reason == "lost" for row in members.rows())


async def test_an_engine_that_never_answered_is_listed_with_the_reason():
    async with site([], api_token="t0k") as fleet:
        fleet.client.headers["authorization"] = "Bearer t0k"
        await fleet.post("/v1/workers", {"url": "http://127.0.0.1:1", "name": "lost"})
        read = decode(await _bytes(fleet, "/v1/fleet"), FleetLoad)
        (row,) = joined_rows(read.workers or (), read.loads)
        assert (row.name, row.status) == ("lost", "unknown")
        assert row.reason
        assert [one.code for one in read.conditions] == ["WORKER_UNREACHABLE"]


async def test_transfers_are_counted_where_they_began():
    async with site(ENGINES) as fleet:
        assert (await fleet.chat())[0] == 200
        read = decode(await _bytes(fleet, "/v1/fleet"), FleetLoad)
        counts = [(one.domain, one.value, one.local, one.crossing) for one in read.transfers]
        assert counts == [("zone", "zone-a", 1, 0)]


async def test_waiting_requests_go_when_the_engine_does():
    async with site([{"name": "a0"}]) as fleet:
        assert fleet.frontend.fleet.waiting() != {}
        await fleet.engines["a0"].close()
        await until(lambda: fleet.frontend.fleet.waiting() == {})


def test_loads_of_other_workers_are_refused():
    service = RoutingService()
    service.membership.upsert(worker(1))
    first = FleetFeed(service, DecisionMemory()).read()
    service.membership.upsert(worker(2))
    second = FleetFeed(service, DecisionMemory()).read()
    with pytest.raises(WireError, match="2 loads for 1 workers"):
        joined_rows(first.workers or (), second.loads)
    with pytest.raises(WireError, match="was expected"):
        joined_rows((second.workers or [])[::-1], second.loads)
    with pytest.raises(WireError, match="FleetLoad"):
        decode(b'{"kind": "FleetLoad"}', FleetLoad)


async def test_reading_goes_on_from_the_cursor():
    async with serving() as (client, service):
        for number in range(5):
            decide(service, f"r{number}")
        first = await (await client.get("/v1/decisions?limit=2")).json()
        assert [row["id"] for row in first["decisions"]] == ["r4", "r3"]
        assert (first["cursor"], first["skipped"]) == (5, 3)
        nothing = await (await client.get("/v1/decisions?since=5")).json()
        assert (nothing["decisions"], nothing["cursor"], nothing["skipped"]) == ([], 5, 0)
        decide(service, "r5")
        more = await (await client.get("/v1/decisions?since=5")).json()
        assert [row["id"] for row in more["decisions"]] == ["r5"]


async def test_a_cursor_of_another_process_reads_from_the_start():
    async with serving() as (client, service):
        decide(service, "r0")
        got = await (await client.get("/v1/decisions?since=900")).json()
        assert ([row["id"] for row in got["decisions"]], got["cursor"]) == (["r0"], 1)


async def test_an_answer_waits_for_the_next_decision():
    async with serving() as (client, service):
        waiting = asyncio.create_task(client.get("/v1/decisions?since=0&wait=20"))
        while not next(iter(service.observers))._waiting:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        decide(service, "late")
        got = await (await waiting).json()
        assert [row["id"] for row in got["decisions"]] == ["late"]
        assert next(iter(service.observers))._waiting == []  # type: ignore[attr-defined]


async def test_only_so_many_wait():
    memory = DecisionMemory()
    tasks = [asyncio.create_task(memory.next_recorded()) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    async with asyncio.timeout(patience(5)):
        await memory.next_recorded()
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert memory._waiting == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("since=-1", "since: expected 0 to 9007199254740992, got '-1'"),
        ("wait=31", "wait: expected 0 to 30, got '31'"),
        ("preferences=yes", "preferences: expected 0 to 1, got 'yes'"),
    ],
)
async def test_bad_cursors_are_named(query, message):
    async with serving() as (client, _):
        got = await client.get(f"/v1/decisions?{query}")
        assert got.status == 400
        assert (await got.json())["error"]["message"] == message


async def test_the_preference_of_the_newest_plan_of_each_domain():
    workers = [
        preferring(1, "zone-a"),
        worker(2, "decode", zone="zone-a"),
        worker(3, "decode", zone="zone-b"),
    ]
    async with serving(*workers) as (client, service):
        next(iter(service.observers))._small_fleet = 64  # type: ignore[attr-defined]
        for number in range(3):
            wanted = request(request_id=f"r{number}")
            record = RequestRecord(wanted.id, "q", "chat_completions", 0.0, 1.0, model="tiny")
            service.decided(service.plan(wanted), wanted, record)
        rows = (await (await client.get("/v1/decisions?preferences=1")).json())["decisions"]
        assert [row["preference"] is not None for row in rows] == [True, False, False]
        preference = rows[0]["preference"]
        assert preference["taint"] == "dynamo.topology/zone=zone-a"
        assert round(preference["crossover"], 3) == 1.996
        plain = (await (await client.get("/v1/decisions")).json())["decisions"]
        assert all(row["preference"] is None for row in plain)


async def _bytes(fleet, path: str) -> bytes:
    async with fleet.client.get(fleet.url(path)) as answer:
        assert answer.status == 200
        data: bytes = await answer.read()
        return data
