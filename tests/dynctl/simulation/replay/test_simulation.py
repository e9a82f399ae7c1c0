"""Replays in virtual time: results that can be computed by hand, and laws that hold for all."""

import pytest

from dynctl.documents.recording import Finished
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import (
    Policy,
    SimulatedFleet,
    SimulatedWorker,
)
from dynctl.simulation.replay.simulation import simulate
from dynctl.wire.traces import TraceRequest
from router_core import RouterConfig

ENGINE = EngineConfig(
    block_size=4,
    total_blocks=64,
    prefill_tokens_per_s=1000.0,
    decode_itl_ms=10.0,
    max_num_batched_tokens=64,
    kv_transfer_ms_per_block=2.0,
)
ROUND_ROBIN = Policy("round-robin", RouterConfig(router_mode="round-robin"))
KV = Policy("kv", RouterConfig(router_mode="kv"))


def asked(at, number, tokens, output, *ids, **more):
    return TraceRequest(at, f"r{number}", tokens, output, ids, 4, **more)


def fleet(count=2, engine=ENGINE, **more):
    return SimulatedFleet(tuple(SimulatedWorker(n) for n in range(1, count + 1)), engine, **more)


def test_a_small_trace_has_the_hits_and_times_that_are_computed_by_hand():
    """Two workers in turn; a prompt token takes 1 ms, a decode step 10 ms, a block has 4 tokens.

    r0 at 0 on worker 1: 8 tokens, nothing cached: 8 ms to the first token, then 2 steps of 10 ms,
    so it ends at 28 ms. r1 at 1 ms on worker 2: the same prompt, nothing cached there: 8 ms, and
    its only token is the first. r2 at 1 s on worker 1: 9 tokens, of which the blocks (1, 2) are
    cached: 9 - 8 = 1 token, 1 ms. r3 at 1 s on worker 2: 8 tokens, both blocks cached, but the last
    token is always computed, so only (8 - 1) // 4 = 1 block counts: 4 tokens, 4 ms.

    Hits: 8 + 4 = 12 of 8 + 8 + 9 + 8 = 33 tokens. One cache for both would also have given r1 one
    block: 16 of 33. The first tokens come after 8, 8, 1 and 4 ms; the last end is at 1,004 ms.
    """
    trace = [
        asked(0.0, 0, 8, 3, 1, 2),
        asked(0.001, 1, 8, 1, 1, 2),
        asked(1.0, 2, 9, 1, 1, 2, 3),
        asked(1.0, 3, 8, 1, 1, 2),
    ]
    ended = {}

    def note(record):
        if isinstance(record, Finished):
            ended[record.id] = (record.ttft_s, record.itl_s, record.cached_tokens, record.at)

    result = simulate(trace, fleet(), ROUND_ROBIN, records=note)
    assert ended == {
        "r0": (0.008, 0.01, 0, 0.028),
        "r1": (0.008, None, 0, 0.009),
        "r2": (0.001, None, 8, 1.001),
        "r3": (0.004, None, 4, 1.004),
    }
    assert result.cache.cached_tokens == 12
    assert result.cache.prompt_tokens == 33
    assert result.cache.ceiling == 16 / 33
    assert result.cache.of_ceiling == pytest.approx(12 / 16)
    assert result.seconds == 1.004
    assert result.counts.finished == 4
    assert [row.requests for row in result.workers] == [2, 2]
    assert [row.busy_s for row in result.workers] == [0.008 + 0.02 + 0.001, 0.008 + 0.004]


def test_the_cache_of_a_worker_draws_requests_in_mode_kv():
    """The first of two prompts goes anywhere; the same prompt later goes where it is cached."""
    trace = [asked(float(n), n, 41, 1, *range(1, 11)) for n in range(4)]
    result = simulate(trace, fleet(), KV)
    assert sorted(row.requests for row in result.workers) == [0, 4]
    assert result.cache.cached_tokens == 3 * 40
    assert result.cache.expected_rate == result.cache.hit_rate
    assert result.cache.of_ceiling == 1.0
