"""Lower tiers of the engines' caches: what is found there, what loading takes, what routers see."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.documents.codec import encode
from dynctl.documents.recording import Finished, Record
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.model import Load
from dynctl.simulation.replay.fleet import ReplayPolicy, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.metrics import Ceiling
from dynctl.simulation.replay.rank import VirtualRank, VirtualRequest
from dynctl.simulation.replay.requests import local_hashes
from dynctl.simulation.replay.simulation import simulate
from dynctl.wire.traces import TraceRequest
from router_core import RouterConfig, sequence_hashes
from tests.dynctl.simulation.replay.test_simulation import asked, fleet, workloads

#: A prompt token takes 1 ms to compute; a block of 4 tokens loads in 1 ms from host memory and in
#: 2 ms from disk.
ENGINE = EngineConfig(
    block_size=4,
    total_blocks=4,
    host_blocks=2,
    disk_blocks=8,
    prefill_tokens_per_s=1000.0,
    decode_itl_ms=10.0,
    kv_bytes_per_token=1e6,
    host_gb_per_s=4.0,
    disk_gb_per_s=2.0,
)
ROUND_ROBIN = ReplayPolicy("round-robin", RouterConfig(router_mode="round-robin"))
KV = ReplayPolicy("kv", RouterConfig(host_cache_hit_weight=1.0, disk_cache_hit_weight=1.0))


def finished(
    trace: list[TraceRequest], engine: EngineConfig, policy: ReplayPolicy = ROUND_ROBIN
) -> Any:
    """(result, id -> its record)."""
    ends: dict[str, Finished] = {}

    def note(record: Record) -> None:
        if isinstance(record, Finished):
            ends[record.id] = record

    return simulate(trace, fleet(1, engine), policy, records=note), ends


@pytest.mark.seed("dynamo-1.6: operation: replay")
def test_what_was_evicted_is_loaded_in_the_time_that_is_computed_by_hand():
    """r0 caches the blocks 1, 2, 3 in 12 ms. r1 needs all four blocks of the device: one is empty,
    and 3, 2, 1 are evicted in this order. Host memory has room for two, so 3 goes on to disk.
    r2 finds 1 and 2 in host memory (2 ms) and 3 on disk (2 ms), and computes one token (1 ms).

    Without tiers r2 computes 13 tokens. With host memory alone, for two blocks: 2 ms, and 5 tokens.
    """
    trace = [
        asked(0.0, 0, 12, 1, 1, 2, 3),
        asked(1.0, 1, 15, 1, 4, 5, 6, 7),
        asked(2.0, 2, 13, 1, 1, 2, 3),
    ]
    result, ends = finished(trace, ENGINE)
    assert [ends[name].ttft_s for name in ("r0", "r1", "r2")] == [0.012, 0.015, 0.005]
    assert ends["r2"].cached_tokens == 12
    cache = result.cache
    assert (cache.cached_tokens, cache.host_tokens, cache.disk_tokens) == (12, 8, 4)
    assert (result.workers[0].host_tokens, result.workers[0].disk_tokens) == (8, 4)
    assert cache.of_ceiling == 1.0

    def last(**changes: Any) -> tuple[float | None, int | None]:
        record = finished(trace, replace(ENGINE, **changes))[1]["r2"]
        return record.ttft_s, record.cached_tokens

    assert last(host_blocks=0, disk_blocks=0) == (0.013, 0)
    assert last(disk_blocks=0) == (0.007, 8)
    assert last(host_blocks=0) == (0.007, 12)  # three blocks from disk, one token


def test_loads_of_a_rank_run_one_after_the_other():
    rank = VirtualRank(ENGINE)
    request = VirtualRequest(max_tokens=1)
    assert rank.restore_ends(1_000_000, Load(request, 0, host=2, disk=1)) == 5_000_000
    assert rank.restore_ends(2_000_000, Load(request, 0, host=1)) == 6_000_000
    assert rank.restore_ends(9_000_000, Load(request, 0, host=1)) == 10_000_000


def test_other_requests_run_while_a_prefix_loads():
    """r2 loads 3 blocks from 2.000 s on, each in 100 ms; r3 has its answer meanwhile."""
    engine = replace(ENGINE, total_blocks=6, host_blocks=8, host_gb_per_s=0.04)
    trace = [
        asked(0.0, 0, 12, 1, 1, 2, 3),
        asked(1.0, 1, 23, 1, 4, 5, 6, 7, 8, 9),
        asked(2.0, 2, 13, 1, 1, 2, 3),
        asked(2.0, 3, 4, 2, 20),
    ]
    _, ends = finished(trace, engine)
    assert ends["r3"].ttft_s == 0.004
    assert ends["r2"].ttft_s == 0.301


def test_a_router_that_sees_the_tiers_sends_requests_to_them():
    """The prefix is in the host memory of one of two workers: a router that gives it no credit
    chooses by load alone."""
    engine = replace(ENGINE, total_blocks=64, host_blocks=1000)
    first = [asked(0.0, 0, 161, 1, *range(1, 41))]
    others = [asked(1.0 + n, 1 + n, 240, 1, *range(100 * n, 100 * n + 60)) for n in range(1, 5)]
    again = [asked(10.0 + n, 10 + n, 161, 1, *range(1, 41)) for n in range(4)]
    blind = ReplayPolicy(
        "blind", RouterConfig(host_cache_hit_weight=0.0, disk_cache_hit_weight=0.0)
    )
    found = simulate([*first, *others, *again], fleet(2, engine), KV, 3)
    alone = simulate([*first, *others, *again[:1]], fleet(2, engine), KV, 3)
    ignored = [
        simulate([*first, *others, *again[:1]], fleet(2, engine), blind, seed) for seed in range(9)
    ]
    assert alone.cache.host_tokens == 160
    assert found.cache.cached_tokens == 4 * 160
    assert {one.cache.host_tokens for one in ignored} == {0, 160}


# -- laws ------------------------------------------------------------------------------------------


@given(workloads(), st.sampled_from(["kv", "round-robin"]), st.integers(1, 3))
def test_tiers_change_nothing_where_nothing_is_evicted(workload, mode, workers):
    trace, engine = workload
    engine = replace(engine, total_blocks=4000)
    policy = ReplayPolicy("p", RouterConfig(router_mode=mode))
    plain = simulate(trace, fleet(workers, engine), policy, 1)
    tiered = replace(engine, host_blocks=100, disk_blocks=100)
    result = simulate(trace, fleet(workers, tiered), policy, 1)
    assert result.engine["host_blocks"] == 100
    for one in (plain, result):
        one.engine.clear()
    assert encode(result) == encode(plain)


def spaced(trace: list[TraceRequest]) -> list[TraceRequest]:
    """The same requests, each after the one before it has ended."""
    return [
        TraceRequest(100.0 * n, *(one.id, one.input_tokens, one.output_tokens, one.hash_ids, 4))
        for n, one in enumerate(trace)
    ]


@given(workloads(), st.integers(1, 3))
def test_host_memory_without_limit_gives_each_worker_the_ceiling_of_its_requests(workload, workers):
    trace, engine = workload
    trace = spaced(trace)
    engine = replace(engine, host_blocks=100_000, disk_blocks=0)
    result = simulate(trace, fleet(workers, engine), ROUND_ROBIN, 1)
    for index, row in enumerate(result.workers):
        ceiling, reachable = Ceiling(), 0
        for one in trace[index::workers]:
            hashes = sequence_hashes(local_hashes(one, 4))
            reachable += 4 * ceiling.see(hashes, (one.input_tokens - 1) // 4)
        assert row.cached_tokens == reachable


@given(workloads(), st.sampled_from([0, 3, 20]), st.sampled_from([0, 5, 50]))
def test_routers_expect_what_engines_find_in_their_tiers(workload, host, disk):
    trace, engine = workload
    engine = replace(engine, host_blocks=host, disk_blocks=disk)
    where = SimulatedFleet((SimulatedWorker(1), SimulatedWorker(2)), engine)
    result = simulate(spaced(trace), where, KV, 1)
    assert result.cache.expected_rate == result.cache.hit_rate


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"host_cache_hit_weight": 0.0},
        {"router_temperature": 0.5, "disk_cache_hit_weight": 1.0},
        {"overlap_score_credit_decay": 0.5, "router_track_active_blocks": False},
        {"overlap_score_credit": 0.0},
        {"router_mode": "round-robin"},
        {"router_mode": "power-of-two"},
    ],
)
def test_lean_routers_see_the_tiers_as_whole_routers_do(values):
    """Conversations in turn, of which each worker's device holds two."""
    engine = replace(
        ENGINE, total_blocks=18, host_blocks=20, disk_blocks=60, kv_bytes_per_token=1.3e6
    )
    trace = [
        asked(0.02 * n, n, 30 + n % 3, 3, *(100 * (n * n % 13) + block for block in range(8)))
        for n in range(150)
    ]
    policy = ReplayPolicy("p", RouterConfig().with_values(values))
    found = simulate(trace, fleet(3, engine), policy, 1)
    assert found.cache.host_tokens + found.cache.disk_tokens > 50
    assert encode(found) == encode(simulate(trace, fleet(3, engine), policy, 1, lean=False))
