"""The running demo fleet: the fleet of every `--demo`, the same for the same seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.documents.codec import encode
from dynctl.documents.snapshot import Snapshot
from dynctl.sources.demo.fleet import DemoSource
from dynctl.sources.demo.live import LiveDemo
from dynctl.sources.demo.traffic import CRASH, CRASHING, CYCLE_S, PEAK
from dynctl.sources.domains import DomainBoard
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import open_view_bytes


class Demo:
    """The fleet with a clock of the test. ``to`` moves to a second of its next cycle."""

    def __init__(self) -> None:
        self.time = 1_000.0
        self.lived = 20.0
        self.source = LiveDemo(lambda: self.time, lambda: 2e9 + self.time, self.lived)
        self._passed = self.lived

    async def look(self, seconds: float = 0.0) -> Snapshot:
        self.time += seconds
        self._passed += seconds
        return await self.source.snapshot()

    async def to(self, second: float) -> Snapshot:
        while self._passed % CYCLE_S > second:
            await self.look(5.0)
        return await self.look(second - self._passed % CYCLE_S)


@pytest.fixture
async def demo() -> AsyncIterator[Demo]:
    made = Demo()
    async with made.source:
        yield made


async def test_the_first_snapshot_has_traffic(demo: Demo):
    shown = await demo.look()
    assert len(shown.workers) == 6
    assert {row.name for row in shown.workers} == {
        "prefill-a0", "prefill-b0", "prefill-b1", "decode-a0", "decode-b0", "decode-b1",
    }  # fmt: skip
    assert shown.problem == ""
    assert (
        shown.header.recorded == len(shown.decisions) + shown.missed or len(shown.decisions) == 50
    )
    assert all(line.complete for line in shown.decisions)
    assert shown.meters == (), "every policy of the demo fleet is required"
    later = await demo.look(1.0)
    assert (later.header.recorded or 0) > (shown.header.recorded or 0)


async def test_the_same_seconds_give_the_same_fleet():
    found = []
    for _ in range(2):
        demo = Demo()
        async with demo.source:
            shown = await demo.look(7.0)
            found.append((shown.workers, [line.id for line in shown.decisions], shown.transfers))
    assert found[0] == found[1]


async def test_a_crash_strands_its_zone_and_refuses_requests_that_require_it(demo: Demo):
    before = await demo.to(CRASH[0] - 1)
    assert DomainBoard().view(before).rows[0].capacity.stranded == []
    down = await demo.to(CRASH[0] + 20)
    row = next(row for row in down.workers if row.name == CRASHING)
    assert (row.status, row.busy) == ("unavailable", False)
    assert DomainBoard().view(down).rows[0].capacity.state == "stranded"
    assert [alert.code for alert in down.alerts] == ["WORKER_UNREACHABLE", "DYT0901"]
    refused = [line for line in down.decisions if line.refused]
    assert refused
    result = await demo.source.decision(refused[0])
    assert not result.ok
    moved = [line for line in down.decisions if not line.refused and line.at > refused[-1].at]
    assert all(line.prefill and line.prefill.worker != "prefill-a0" for line in moved)
    up = await demo.to(CRASH[1] + 5)
    assert all(row.status == "ready" for row in up.workers)
    assert up.alerts[0].code == "DYT0902"  # its zone has one decode worker


async def test_a_load_peak_fills_the_fleet_and_thresholds_can_be_set(demo: Demo):
    rush = await demo.to(PEAK[1] - 1)
    assert any(row.ranks[0].reported.waiting_requests for row in rush.workers)
    name = "active_decode_blocks_threshold"
    judged = await demo.source.judged("demo", {name: 0.01})
    assert any(row.busy for row in judged)
    assert not all(row.busy for row in (await demo.look()).workers)
    after = await demo.source.set_thresholds("demo", {name: 0.01})
    assert after[name] == 0.01
    shown = await demo.look(0.5)
    assert shown.thresholds["demo"][name] == 0.01
    assert sum(row.busy for row in shown.workers) >= 2
    await demo.source.set_thresholds("demo", {name: None})
    assert not any(row.busy and row.role == "decode" for row in (await demo.look(2.0)).workers)
    with pytest.raises(UsageProblem):
        await demo.source.set_thresholds("demo", {name: 7.0})


async def test_its_view_is_deterministic(demo: Demo):
    await demo.look(3.0)
    data = await demo.source.save()
    tokens = list(range(500))
    one, other = (open_view_bytes(data, "x", "x") for _ in range(2))
    query = RouteQuery(token_ids=tokens)
    assert encode(one.route(query)) == encode(other.route(query))
    assert len(one.workers()) == 6


async def test_only_a_part_of_a_long_pause_is_simulated(demo: Demo):
    before = await demo.look()
    after = await demo.look(3_600.0)
    more = (after.header.recorded or 0) - (before.header.recorded or 0)
    assert 0 < more < 1_000
    assert after.decisions[0].at <= 2e9 + demo.time


async def test_an_evicted_decision_is_an_error(demo: Demo):
    shown = await demo.look()
    demo.source._memory.max_bytes = 1
    await demo.look(2.0)
    with pytest.raises(UsageProblem, match="memory is full"):
        await demo.source.decision(shown.decisions[0])


async def test_it_is_the_fleet_of_the_commands(demo: Demo):
    rest = DemoSource()
    shown = await demo.look()
    assert [(row.name, row.worker_id, row.runtime_config) for row in shown.workers] == [
        (row.name, row.worker_id, row.runtime_config) for row in rest.workers()
    ]
    assert shown.thresholds == rest.thresholds()
    assert shown.settings == rest.config().values
    cached = {row.name for row in shown.workers if row.ranks[0].cached_blocks}
    assert "prefill-a0" in cached
