"""The virtual rank does what the real-time scheduler does, on a clock that runs by itself."""

import asyncio
import selectors
from dataclasses import replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from dynctl.simulation.engine.cache_events import CacheEvent
from dynctl.simulation.engine.config import EngineConfig, Faults
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.model import RankBusy
from dynctl.simulation.engine.prefix_cache import extend_hashes
from dynctl.simulation.engine.scheduler import RankScheduler, ScheduledRequest, StepTimer
from dynctl.simulation.replay.rank import NS, VirtualRank, VirtualRequest

ENGINE = EngineConfig(
    block_size=4, total_blocks=64, prefill_tokens_per_s=1000.0, decode_itl_ms=10.0
)


class _Selector(selectors.SelectSelector):
    """Does not wait: the clock jumps to the time at which the wait would end."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self):
        return self._clock.now


class _Plan:
    """Tokens that no other request has."""

    def __init__(self, number):
        self._number = number

    def token(self, position):
        return 1_000_000 + self._number * 1000 + position


def shown(events):
    """Events without the names of generated blocks, which differ."""
    return [
        (type(one).__name__, one.tier, len(one.hashes), getattr(one, "parent", None) is None)
        for one in events
    ]


def really(config, workload):
    """(first token, end, cached tokens) of each request, events, preemptions."""
    events: list[CacheEvent] = []

    async def one(scheduler, request, at, times):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at - loop.time())
        try:
            scheduler.submit(request)
        except RankBusy:
            return
        first = None
        while not request.ended:
            await request.news()
            first = loop.time() if first is None else first
        times[int(request.id)] = (first, loop.time(), request.cached_tokens)

    async def run():
        timer = StepTimer(config, FaultState(Faults()))
        scheduler = RankScheduler(config, timer, events.extend)
        running = asyncio.ensure_future(scheduler.run())
        times: dict[int, tuple[float, float, int]] = {}
        jobs = []
        for number, (at, tokens, output) in enumerate(workload):
            request = ScheduledRequest(
                id=str(number),
                tokens=list(tokens),
                max_tokens=output,
                finish_as="length",
                plan=cast(Any, _Plan(number)),
            )
            jobs.append(one(scheduler, request, at, times))
        await asyncio.gather(*jobs)
        await asyncio.sleep(0)
        running.cancel()
        return times, scheduler

    loop = _JumpingLoop()
    try:
        times, scheduler = loop.run_until_complete(run())
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    return times, shown(events), scheduler.preemptions, scheduler.cache.cached_blocks


def virtually(config, workload):
    rank = VirtualRank(config)
    events: list[CacheEvent] = []
    times: dict[int, tuple[float, float, int | None]] = {}
    firsts: dict[int, int] = {}
    now = 0

    class Request(VirtualRequest):
        def token_produced(self):
            if self.produced == 1:
                firsts[self.number] = now
            if self.ended:
                times[self.number] = (firsts[self.number] / NS, now / NS, self.cached_tokens)

    loads: list[tuple[int, VirtualRequest]] = []

    def start_step():
        for load in rank.start_step(now):
            loads.append((rank.restore_ends(now, load), load.request))
        if rank.due < 0:
            events.extend(rank.cache.take_events())

    def end_steps(until):
        nonlocal now
        while rank.due >= 0 or loads:
            ends = loads[0][0] if loads else None
            restores = ends is not None and (rank.due < 0 or ends < rank.due)
            when = ends if restores and ends is not None else rank.due
            if until is not None and when > until:
                return
            now = when
            if restores:
                rank.take_restored(loads.pop(0)[1])
                if rank.due >= 0:
                    rank.touch(now)
                    continue
            else:
                rank.finish_step()
                events.extend(rank.cache.take_events())
            start_step()

    for number, (at, tokens, output) in enumerate(workload):
        arrival = round(at * NS)
        end_steps(arrival)
        now = arrival
        hashes = extend_hashes([], tokens, config.block_size)
        request = Request(
            max_tokens=output,
            prompt_tokens=len(tokens),
            hashes=hashes,
            local=list(hashes),
            number=number,
        )
        try:
            rank.submit(request)
        except RankBusy:
            continue
        if rank.due < 0:
            start_step()
        else:
            rank.touch(now)
    end_steps(None)
    return times, shown(events), rank.preemptions, rank.cache.cached_blocks


@st.composite
def workloads(draw):
    requests, at = [], 0.0
    for number in range(draw(st.integers(1, 8))):
        # No request arrives at the end of a step, where the real scheduler's order is a race.
        at += draw(st.integers(0, 60)) / 1000
        length, shared = draw(st.integers(1, 30)), draw(st.integers(0, 30))
        tokens = [p if p < shared else 1000 * (number + 1) + p for p in range(length)]
        requests.append((at + (number + 1) * 7e-6, tokens, draw(st.integers(1, 25))))
    config = replace(
        ENGINE,
        total_blocks=draw(st.sampled_from([14, 20, 64])),
        max_num_seqs=draw(st.sampled_from([1, 2, 8])),
        max_num_batched_tokens=draw(st.sampled_from([3, 8, 64])),
        max_waiting=draw(st.sampled_from([1, 100])),
        host_blocks=draw(st.sampled_from([0, 4, 100])),
        disk_blocks=draw(st.sampled_from([0, 6])),
        # No load ends at the end of a step.
        kv_bytes_per_token=1.0131e6,
    )
    return config, requests


@given(workloads())
def test_the_virtual_rank_gives_the_tokens_events_and_times_of_the_real_scheduler(given_):
    config, requests = given_
    times, events, preemptions, cached = really(config, requests)
    virtual, seen, evictions, left = virtually(config, requests)
    assert seen == events
    assert (evictions, left) == (preemptions, cached)
    assert virtual.keys() == times.keys()
    for number, (first, end, reused) in times.items():
        assert virtual[number][2] == reused
        assert abs(virtual[number][0] - first) < 1e-6
        assert abs(virtual[number][1] - end) < 1e-6


def test_a_long_generation_takes_one_step_for_each_block():
    """100 tokens in blocks of 4: the first with the prompt, then at most 4 in a leap."""
    rank = VirtualRank(ENGINE)
    request = VirtualRequest(max_tokens=100, prompt_tokens=4, hashes=[1], local=[1])
    rank.submit(request)
    rank.start_step(0)
    turns = now = 0
    while rank.due >= 0:
        turns += 1
        now = rank.due
        rank.finish_step()
        rank.start_step(now)
    assert now == 4_000_000 + 99 * 10_000_000
    assert rank.steps == 100
    assert turns <= 27
