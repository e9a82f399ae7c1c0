"""Each fault of `faults.FAULTS` under load: every client gets an answer, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.faults import FAULTS, Fault, heal
from tests.chaos.rig import Outcomes, Rig, Usage, rig
from tests.waiting import slowdown, until

pytestmark = pytest.mark.chaos

_CLIENTS = 8
_REQUESTS = 48
_SLACK = 6  # descriptors and tasks that a pool or a timer may hold for a moment


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
async def test_fault_under_load(fault: Fault) -> None:
    async with rig(fault.settings) as fleet:
        async with fleet.others() as others_quiet:
            quiet = await fleet.load(_CLIENTS, _REQUESTS)
        assert quiet.answered == _REQUESTS, (quiet.lost, quiet.refused)
        await fleet.settled()
        before = Usage.now()

        async with asyncio.TaskGroup() as group:
            busy = group.create_task(fleet.load(_CLIENTS, _REQUESTS))
            group.create_task(fault.begin(fleet.broken))
        outcomes = busy.result()
        if fault.shows:
            await until(lambda: fleet.conditions() & set(fault.shows), 30)
        # The clients of another engine do not notice. Their slowest request is compared, with a
        # floor for what a busy machine does by itself. What the fault causes is still there when
        # the load comes again.
        others, during = await _load_beside(fleet)
        longest = max(2 * max(others_quiet), slowdown())
        for _ in range(2):
            if max(others) > longest:
                others, during = await _load_beside(fleet)
        assert max(others) <= longest

        assert not outcomes.lost + during.lost
        assert outcomes.all == during.all == _REQUESTS
        # Two of three engines work: what failed before its first byte was answered by them.
        if fault.retried:
            assert not during.refused
            assert not during.error_events
        assert during.answered > 0

        await heal(fleet.broken)
        await fleet.settled()
        healed = await fleet.load(_CLIENTS, _REQUESTS)
        assert healed.answered == _REQUESTS, (healed.lost, healed.refused)
        await fleet.settled()
        assert all(row == (0, 0, 0) for row in fleet.site.load().values())
        await until(lambda: _no_more_than(before), 30)


async def _load_beside(fleet: Rig) -> tuple[list[float], Outcomes]:
    async with fleet.others() as others:
        return others, await fleet.load(_CLIENTS, _REQUESTS)


def _no_more_than(before: Usage) -> bool:
    now = Usage.now()
    return now.descriptors <= before.descriptors + _SLACK and now.tasks <= before.tasks + _SLACK
