"""Replays in virtual time: results that can be computed by hand, and laws that hold for all."""

from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.documents.codec import decode, encode
from dynctl.documents.recording import Arrived, Changed, Decided, Finished, Record, Start
from dynctl.documents.replay import ReplayResult
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay import simulation
from dynctl.simulation.replay.fleet import (
    FleetChange,
    FleetLoss,
    Objective,
    ReplayPolicy,
    SimulatedFleet,
    SimulatedSync,
    SimulatedWorker,
)
from dynctl.simulation.replay.routers import ReplayRouters
from dynctl.simulation.replay.simulation import ReplayError, simulate
from dynctl.wire.traces import TraceRequest
from router_core import Booked, Role, Router, RouterConfig

ENGINE = EngineConfig(
    block_size=4,
    total_blocks=64,
    prefill_tokens_per_s=1000.0,
    decode_itl_ms=10.0,
    max_num_batched_tokens=64,
    kv_transfer_ms_per_block=2.0,
)
ROUND_ROBIN = ReplayPolicy("round-robin", RouterConfig(router_mode="round-robin"))
KV = ReplayPolicy("kv", RouterConfig(router_mode="kv"))


def asked(at, number, tokens, output, *ids, **more):
    return TraceRequest(at, f"r{number}", tokens, output, ids, 4, **more)


def fleet(count=2, engine=ENGINE, **more):
    return SimulatedFleet(tuple(SimulatedWorker(n) for n in range(1, count + 1)), engine, **more)


@pytest.mark.seed("dynamo-1.6: operation: replay")
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


def test_refused_requests_have_no_part_in_the_share_of_the_ceiling():
    """A refused prompt of 1,000,000 tokens lowers the ceiling, and not what the others had."""
    trace = [asked(0.0, 0, 1_000_000, 1), asked(0.0, 1, 9, 1, 1, 2), asked(1.0, 2, 9, 1, 1, 2)]
    result = simulate(trace, fleet(), KV)
    assert (result.counts.refused, result.cache.hit_rate) == (1, 8 / 18)
    assert result.cache.ceiling == 8 / 1_000_018
    assert result.cache.of_ceiling == 1.0


def test_the_cache_of_a_worker_draws_requests_in_mode_kv():
    """The first of two prompts goes anywhere; the same prompt later goes where it is cached."""
    trace = [asked(float(n), n, 41, 1, *range(1, 11)) for n in range(4)]
    result = simulate(trace, fleet(), KV)
    assert sorted(row.requests for row in result.workers) == [0, 4]
    assert result.cache.cached_tokens == 3 * 40
    assert result.cache.expected_rate == result.cache.hit_rate
    assert result.cache.of_ceiling == 1.0


# -- laws ------------------------------------------------------------------------------------


@st.composite
def workloads(draw):
    """A short trace with shared prefixes, and an engine that is often too small for it; some have
    lower tiers."""
    trace, at = [], 0.0
    for number in range(draw(st.integers(1, 14))):
        at += draw(st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.3]))
        tokens = draw(st.integers(1, 40))
        branch = draw(st.integers(0, 3))
        shared = draw(st.integers(0, 10))
        ids = [
            block * 10 + branch if block < shared else 1000 * (number + 1) + block
            for block in range(-(-tokens // 4))
        ]
        trace.append(asked(at, number, tokens, draw(st.integers(1, 30)), *ids))
    engine = replace(
        ENGINE,
        total_blocks=draw(st.sampled_from([18, 24, 64])),
        max_num_seqs=draw(st.sampled_from([1, 2, 8])),
        max_num_batched_tokens=draw(st.sampled_from([3, 8, 64])),
        max_waiting=draw(st.sampled_from([2, 100])),
        host_blocks=draw(st.sampled_from([0, 0, 5, 200])),
        disk_blocks=draw(st.sampled_from([0, 0, 30])),
        kv_bytes_per_token=draw(st.sampled_from([1.0, 1e6])),
    )
    return trace, engine


@st.composite
def fleets(draw, engine):
    """Aggregated, or prefill and decode in two zones; events may be late, workers may fail."""
    zones = ("a", "b")
    if draw(st.booleans()):
        workers = [SimulatedWorker(n, ranks=draw(st.integers(1, 2))) for n in (1, 2)]
    else:
        pairs = draw(st.sets(st.sampled_from([1, 2])))
        workers = [
            SimulatedWorker(
                n,
                Role.PREFILL if n <= 2 else Role.DECODE,
                {"zone": zones[n % 2]},
                bootstrap=n in pairs,
            )
            for n in (1, 2, 3, 4)
        ]
        engine = replace(
            engine,
            kv_hold_timeout_s=draw(st.sampled_from([0.01, 30.0])),
            kv_load_failure_policy=draw(st.sampled_from(["recompute", "fail"])),
        )
    losses: tuple[FleetLoss, ...] = ()
    if draw(st.booleans()):
        losses = (FleetLoss(0.02, worker_id=1, until=draw(st.sampled_from([None, 0.05]))),)
    changes: list[FleetChange] = []
    states = {worker.worker_id: draw(st.booleans()) for worker in workers}
    times = st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.3]), max_size=5)
    for at in sorted(draw(times)):
        worker_id = draw(st.sampled_from([worker.worker_id for worker in workers]))
        if draw(st.booleans()):
            what = draw(st.sampled_from(["available", "unavailable"]))
        else:
            what = "leaves" if states[worker_id] else "joins"
            states[worker_id] = not states[worker_id]
        changes.append(FleetChange(at, worker_id, what, "cordoned"))
    return SimulatedFleet(
        tuple(workers),
        engine,
        changes=tuple(changes),
        events_delay_s=draw(st.sampled_from([0.0, 0.003])),
        events_loss=draw(st.sampled_from([0.0, 0.3])),
        link_domain="zone",
        losses=losses,
        migration_limit=draw(st.sampled_from([0, 0, 1, 3])),
    )


@st.composite
def replays(draw):
    trace, engine = draw(workloads())
    values = draw(
        st.sampled_from(
            [
                {"router_mode": "kv"},
                {"router_mode": "round-robin"},
                {"router_mode": "power-of-two"},
                {"router_mode": "kv", "use_kv_events": False},
                {"router_mode": "kv", "router_queue_threshold": 0.5},
                {"router_mode": "kv", "active_prefill_tokens_threshold": 20},
                {"router_mode": "kv", "router_track_output_blocks": True},
                {"router_mode": "kv", "router_temperature": 0.5},
                {"router_mode": "kv", "router_prefill_load_model": "measured"},
            ]
        )
    )
    more = {
        "routers": draw(st.sampled_from([1, 3])),
        "sync": SimulatedSync(draw(st.sampled_from(["none", "delayed"]))),
    }
    return trace, draw(fleets(engine)), ReplayPolicy("p", RouterConfig().with_values(values)), more


def replayed(replay, seed=1, **more):
    trace, where, policy, options = replay
    records: list[Record] = []
    result = simulate(trace, where, policy, seed, records=records.append, **options, **more)
    return result, records


def first_difference(found, expected):
    for one, other in zip_longest(found, expected):
        if one != other:
            return one, other
    return None


@given(replays())
def test_a_leap_over_steps_gives_what_the_single_steps_give(replay):
    result, records = replayed(replay)
    stepped, expected = replayed(replay, leaps=False)
    assert first_difference(records, expected) is None
    assert encode(result) == encode(stepped)


@st.composite
def plain_replays(draw):
    """Aggregated workers without faults: what lean routers decide."""
    trace, engine = draw(workloads())
    ranks = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    workers = tuple(SimulatedWorker(9 - n, ranks=count) for n, count in enumerate(ranks))
    delay = draw(st.sampled_from([0.0, 0.003]))
    values = {
        "router_mode": draw(st.sampled_from(["kv", "round-robin", "random", "power-of-two"])),
        "prefill_load_scale": draw(st.sampled_from([1.0, 2.0])),
        "router_temperature": draw(st.sampled_from([0.0, 0.5])),
    }
    policy = ReplayPolicy("p", RouterConfig().with_values(values))
    more = {"routers": draw(st.sampled_from([1, 3]))}
    return trace, SimulatedFleet(workers, engine, events_delay_s=delay), policy, more


@given(plain_replays() | replays())
def test_lean_routers_give_the_result_of_whole_routers_and_so_do_recorded_ones(replay):
    trace, where, policy, options = replay
    found = simulate(trace, where, policy, 1, **options)
    assert encode(found) == encode(simulate(trace, where, policy, 1, lean=False, **options))
    assert encode(found) == encode(replayed(replay)[0])


def test_lean_routers_draw_as_whole_ones_where_no_worker_is_left():
    trace = [
        TraceRequest(0.001 * (n // 9), f"r{n}", 1, 1, (n + 1,), block_size=4) for n in range(10)
    ]
    engine = EngineConfig(
        name="engine",
        block_size=4,
        total_blocks=18,
        max_num_seqs=1,
        max_waiting=2,
        max_num_batched_tokens=3,
        prefill_tokens_per_s=1000.0,
    )
    where = SimulatedFleet((SimulatedWorker(9, ranks=2),), engine)
    policy = ReplayPolicy("p", RouterConfig().with_values({"router_mode": "kv"}))
    found = simulate(trace, where, policy, 1)
    assert found.counts.refused > 0
    assert encode(found) == encode(simulate(trace, where, policy, 1, lean=False))


@given(replays())
def test_the_same_seed_gives_the_same_bytes_and_every_request_ends_once(replay):
    result, records = replayed(replay)
    again, same = replayed(replay)
    assert encode(result) == encode(again)
    assert records == same
    assert decode(encode(result), ReplayResult) == result
    trace = replay[0]
    ended = [record.id for record in records if isinstance(record, Finished)]
    assert sorted(ended) == sorted(one.id for one in trace)
    counts = result.counts
    assert counts.finished + counts.refused + counts.failed == counts.requests == len(trace)
    times = [record.at for record in records]
    assert times == sorted(times)
    cache = result.cache
    assert cache.cached_tokens <= cache.prompt_tokens
    if not counts.refused and not counts.failed and not counts.retried:
        assert cache.hit_rate <= cache.ceiling + 1e-12
    if not counts.failed and not counts.retried and cache.of_ceiling is not None:
        assert cache.of_ceiling <= 1 + 1e-12


@given(replays())
@pytest.mark.seed("dynamo-1.6: operation: replay")
def test_a_recording_of_one_router_replays_to_the_same_bookings(replay):
    """The changes of a recording make the router that chose: each booking fits its decision."""
    trace, where, policy, _ = replay
    records: list[Record] = []
    moves = simulate(trace, where, policy, 3, records=records.append).counts.moves
    start = records[0]
    assert isinstance(start, Start)
    router = Router(
        RouterConfig().with_values(start.settings), exact_reuse=start.exact_reuse, learns=True
    )
    for record in records:
        if isinstance(record, Changed):
            router.apply(record.change, record.at)
    assert len(router.load) == 0
    arrived = {record.id: record for record in records if isinstance(record, Arrived)}
    assert len(arrived) == len(trace)
    for record in records:
        if isinstance(record, Decided) and record.cached_blocks is not None:
            assert record.best_cached_blocks is not None
            assert 0 <= record.cached_blocks <= record.best_cached_blocks
            longest = len(arrived[record.id].hashes) + (8 if moves else 0)  # 30 tokens of output
            assert record.cached_blocks <= longest


# -- what a fleet does -----------------------------------------------------------------------


def test_a_hand_off_takes_the_time_of_its_blocks_and_longer_across_a_domain():
    """Prefill in zone a, decode in zone b; a block takes 2 ms, 5 times as long across zones.

    9 tokens: prefill 9 ms, and its own first token is not sent. 3 blocks of 4 tokens are pulled:
    3 * 2 * 5 = 30 ms. The decode engine computes the last prompt token: 1 ms. So the first token
    comes after 9 + 30 + 1 = 40 ms, and the second after 10 more.
    """
    engine = replace(ENGINE, kv_transfer_cross_domain_factor=5.0)
    workers = (
        SimulatedWorker(1, Role.PREFILL, {"zone": "a"}),
        SimulatedWorker(2, Role.DECODE, {"zone": "b"}),
    )
    where = SimulatedFleet(workers, engine, link_domain="zone", block_bytes=100)
    result = simulate([asked(0.0, 0, 9, 2, 1, 2, 3)], where, KV)
    assert result.ttft_s.max == 0.04
    assert result.seconds == 0.05
    assert result.transfers.blocks == result.transfers.cross_domain_blocks == 3
    assert result.transfers.cross_domain_bytes == 300
    assert result.itl_s.max == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("enforcement", "weight", "crossing"),
    [("required", None, 0), ("preferred", 1.0, 0), (None, None, None)],
)
def test_a_topology_policy_keeps_hand_offs_in_their_zone(enforcement, weight, crossing):
    workers = tuple(
        SimulatedWorker(n, Role.PREFILL if n <= 3 else Role.DECODE, {"zone": "abc"[n % 3]})
        for n in range(1, 7)
    )
    values = {}
    if enforcement:
        values = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": enforcement}
    if weight is not None:
        values["kv_transfer_preferred_weight"] = weight
    trace = [asked(n / 2, n, 9, 2, n * 10, n * 10 + 1) for n in range(30)]
    where = SimulatedFleet(workers, ENGINE, link_domain="zone")
    result = simulate(trace, where, ReplayPolicy("topology", RouterConfig().with_values(values)), 5)
    assert result.counts.finished == 30
    if crossing is None:
        assert result.transfers.cross_domain_transfers > 5
    else:
        assert result.transfers.cross_domain_transfers == crossing


@pytest.mark.parametrize("returns", [False, True])
def test_blocks_of_a_lost_prefill_worker_cannot_be_pulled(returns):
    """9 tokens: prefill until 9 ms, then 3 blocks of 2 ms each are pulled until 15 ms. The prefill
    worker is lost at 12 ms, so the decode worker computes the prompt itself, from 15 to 24 ms."""
    workers = (SimulatedWorker(1, Role.PREFILL), SimulatedWorker(2, Role.DECODE))
    changes = [FleetChange(0.012, 1, "leaves")]
    changes += [FleetChange(0.013, 1, "joins")] * returns
    engine = replace(ENGINE, can_prefill=True)
    where = SimulatedFleet(workers, engine, changes=tuple(changes))
    assert simulate([asked(0.0, 0, 9, 1, 1, 2, 3)], where, KV).ttft_s.max == 0.024
    whole = SimulatedFleet(workers, engine)
    assert simulate([asked(0.0, 0, 9, 1, 1, 2, 3)], whole, KV).ttft_s.max == 0.016


def first_tokens(trace, where, policy=KV):
    """Request -> milliseconds to its first token, and the result."""
    found = {}

    def note(record):
        if isinstance(record, Finished) and record.ttft_s is not None:
            found[record.id] = round(record.ttft_s * 1e3, 6)

    return found, simulate(trace, where, policy, records=note)


def prefill_and_decode(prefill, decode, engine=ENGINE, bootstrap=True, **more):
    workers = [SimulatedWorker(n, Role.PREFILL, bootstrap=bootstrap) for n in prefill]
    workers += [SimulatedWorker(n, Role.DECODE) for n in decode]
    return SimulatedFleet(tuple(workers), engine, **more)


@pytest.mark.parametrize("little", [{"max_num_seqs": 1}, {"total_blocks": 7}])
@pytest.mark.seed("dynamo-1.6: operation: replay")
def test_the_decode_worker_of_a_pair_keeps_its_place_from_the_start(little):
    """r0 has 20 tokens and r1 has 9, each on a prefill worker of its own, from 0 to 20 and to 9 ms.
    The decode worker has room for one of them.

    In turn, r1 comes first: it pulls 3 blocks until 15 ms and computes a token until 16 ms. r0
    pulls 5 blocks from 20 to 30 ms and has its first token at 31 ms. As pairs, r0 is there from the
    start and has its first token at 31 ms too; then r1 pulls until 37 ms and has its own at 38 ms.
    """
    trace = [asked(0.0, 0, 20, 1, 1, 2, 3, 4, 5), asked(0.0, 1, 9, 1, 6, 7, 8)]
    engine = replace(ENGINE, **little)
    in_turn, apart = first_tokens(trace, prefill_and_decode([1, 2], [3], engine, bootstrap=False))
    pairs, result = first_tokens(trace, prefill_and_decode([1, 2], [3], engine))
    assert in_turn == {"r0": 31.0, "r1": 16.0}
    assert pairs == {"r0": 31.0, "r1": 38.0}
    assert any(note.startswith("pairs:") for note in result.notes)
    assert not apart.notes
    assert result.transfers == apart.transfers


@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_decode_worker_of_a_pair_is_chosen_with_its_prefill_worker(bootstrap):
    """9 tokens take 9 ms of prefill. Decode worker 2 leaves at 4 ms and 3 joins at 3 ms.

    In turn, the decode worker is chosen at 9 ms: worker 3, which pulls 3 blocks until 15 ms and has
    the first token at 16 ms. As a pair, it is worker 2, from the start, and the request starts
    again at 4 ms, after the step that the prefill worker runs for nothing until 9 ms: 9 + 16 ms.
    """
    changes = (FleetChange(0.003, 3, "joins"), FleetChange(0.004, 2, "leaves"))
    where = prefill_and_decode([1], [2, 3], bootstrap=bootstrap, changes=changes)
    found, result = first_tokens([asked(0.0, 0, 9, 1, 1, 2, 3)], where)
    assert found == {"r0": 25.0 if bootstrap else 16.0}
    assert result.counts.retried == int(bootstrap)


@pytest.mark.parametrize(
    ("prefill", "decode", "joins", "leaves", "first"),
    [([1, 2], [3], 2, 1, 28.0), ([1], [2, 3], 3, 2, 20.0)],
)
def test_a_pair_that_loses_a_worker_during_the_transfer_starts_again(
    prefill, decode, joins, leaves, first
):
    """9 tokens: prefill until 9 ms, transfer of 3 blocks until 15 ms, and a worker is lost at 12.

    Without its prefill worker it starts again on the other one: 9 ms of prefill, 6 ms of transfer
    and 1 ms for the last token. Without its decode worker, its prefill worker has 2 of the 3 blocks
    cached: 1 ms of prefill, 6 ms of transfer to the other one and 1 ms.
    """
    changes = (FleetChange(0.011, joins, "joins"), FleetChange(0.012, leaves, "leaves"))
    where = prefill_and_decode(prefill, decode, changes=changes)
    found, result = first_tokens([asked(0.0, 0, 9, 1, 1, 2, 3)], where)
    assert found == {"r0": first}
    assert (result.counts.retried, result.counts.failed) == (1, 0)
    assert result.seconds == first / 1e3


def test_the_decode_worker_of_a_pair_waits_for_the_prefill_as_long_as_blocks_are_held():
    """30 tokens take 30 ms of prefill. The decode worker waits 10 ms, then computes them until
    40 ms. The prefill worker holds its blocks for 10 ms too, until it gives up at 40 ms."""
    where = prefill_and_decode([1], [2], replace(ENGINE, kv_hold_timeout_s=0.01))
    found, result = first_tokens([asked(0.0, 0, 30, 2, *range(1, 9))], where)
    assert found == {"r0": 40.0}
    assert (result.counts.finished, result.counts.retried) == (1, 0)
    assert result.transfers.transfers == 0


@pytest.mark.parametrize("mode", ["least-loaded", "power-of-two"])
def test_modes_that_count_requests_start_no_pairs(mode):
    trace = [asked(n * 0.003, n, 9, 3, n, n + 1) for n in range(20)]
    policy = ReplayPolicy(mode, RouterConfig(router_mode=mode))
    pairs = simulate(trace, prefill_and_decode([1, 2], [3, 4]), policy)
    in_turn = simulate(trace, prefill_and_decode([1, 2], [3, 4], bootstrap=False), policy)
    assert replace_fleet(pairs) == replace_fleet(in_turn)


def replace_fleet(result):
    return encode(result).replace(b'"bootstrap":2', b'"bootstrap":0')


def test_a_worker_that_is_lost_twice_returns_when_nothing_keeps_it_away():
    """Worker 1 joins at 2 s, its zone is lost from 1 to 3 s, and it is cordoned from 2.5 to 5 s."""
    workers = (SimulatedWorker(1, domains={"zone": "a"}), SimulatedWorker(2))
    where = SimulatedFleet(
        workers,
        ENGINE,
        losses=(FleetLoss(1.0, domain="zone", value="a", until=3.0),),
        changes=(
            FleetChange(2.0, 1, "joins"),
            FleetChange(2.5, 1, "unavailable", "cordoned"),
            FleetChange(5.0, 1, "available"),
        ),
    )
    sent = []

    def note(record):
        if isinstance(record, Decided) and record.decode is not None:
            sent.append(record.decode[0])

    trace = [asked(0.5 + n, n, 8, 1) for n in range(7)]
    simulate(trace, where, ROUND_ROBIN, records=note)
    assert sent[:5] == [2] * 5
    assert sorted(sent[5:]) == [1, 2]


def test_a_lost_zone_loses_its_caches_and_its_requests_start_again_elsewhere():
    workers = tuple(SimulatedWorker(n, domains={"zone": "ab"[n % 2]}) for n in (1, 2, 3, 4))
    trace = [asked(n * 0.01, n, 40, 20, *range(n % 4 * 10, n % 4 * 10 + 10)) for n in range(100)]
    loss = FleetLoss(0.5, domain="zone", value="a", until=0.7)
    result = simulate(trace, SimulatedFleet(workers, ENGINE, losses=(loss,)), KV, 2)
    whole = simulate(trace, SimulatedFleet(workers, ENGINE), KV, 2)
    assert result.counts.finished + result.counts.failed == 100
    assert result.counts.retried + result.counts.failed > 0
    assert sum(row.lost_requests for row in result.workers if row.domains["zone"] == "a") > 0
    assert result.cache.cached_tokens < whole.cache.cached_tokens
    assert whole.counts.retried == whole.counts.failed == 0


@pytest.mark.parametrize(("lost_at", "noted"), [(0.004, False), (0.02, True), (1.0, False)])
def test_a_request_that_loses_its_worker_after_its_first_token_is_noted(lost_at, noted):
    """8 tokens take 8 ms, then 3 steps of 10 ms: at 4 ms it has no output and starts again, at 20
    ms it has and fails, after 38 ms it has ended."""
    where = fleet(2, losses=(FleetLoss(lost_at, worker_id=1),))
    trace = [asked(0.0, 0, 8, 4, 1, 2), asked(2.0, 1, 8, 1, 3, 4)]
    found = simulate(trace, where, ROUND_ROBIN)
    assert found.counts.failed == int(noted)
    assert any("migration limit" in note for note in found.notes) == noted


@pytest.mark.parametrize(
    ("limit", "longest", "ended", "moves"),
    [(0, None, None, 0), (1, None, None, 1), (2, None, 46.0, 2), (2, 7, None, 0), (2, 8, 46.0, 2)],
)
@pytest.mark.seed("dynamo-1.6: operation: replay")
def test_a_request_whose_worker_is_lost_goes_on_elsewhere_up_to_the_limit(
    limit, longest, ended, moves
):
    """A prompt of 8 tokens has its 4 tokens of output at 8, 18, 28 and 38 ms. Its worker is lost at
    20 ms, after 2 of them: the next worker computes 10 tokens until 30 ms, when the third is there.
    That worker is lost at 35 ms: the next one computes 11 tokens until 46 ms, when the last is.
    """
    workers = tuple(SimulatedWorker(n) for n in (1, 2, 3))
    changes = (
        FleetChange(0.019, 2, "joins"),
        FleetChange(0.020, 1, "leaves"),
        FleetChange(0.034, 3, "joins"),
        FleetChange(0.035, 2, "leaves"),
    )
    where = SimulatedFleet(
        workers, ENGINE, changes=changes, migration_limit=limit, migration_max_tokens=longest
    )
    prompts = []

    def note(record):
        if isinstance(record, Changed) and isinstance(record.change, Booked):
            prompts.append(record.change.prefill_tokens)

    result = simulate([asked(0.0, 0, 8, 4, 1, 2)], where, KV, records=note)
    assert result.counts.moves == moves
    assert prompts == [8, 10, 11][: moves + 1]
    assert result.counts.refused == result.counts.retried == 0
    assert any("migration limit" in text for text in result.notes) == (ended is None)
    if ended is None:
        assert result.counts.failed == 1
        return
    assert (result.seconds, result.ttft_s.max) == (ended / 1e3, 0.008)
    assert result.itl_s.max == pytest.approx((ended - 8) / 1e3 / 3)
    assert [row.output_tokens for row in result.workers] == [2, 1, 1]
    assert result.cache.prompt_tokens == 8


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_request_that_loses_its_decode_worker_is_prefilled_again(bootstrap):
    """9 tokens: prefill until 9 ms, transfer of 3 blocks until 15 ms, first token at 16 ms. The
    decode worker is lost at 20 ms. The prompt has 10 tokens now, of which the prefill worker has 8:
    2 ms of prefill, 6 ms of transfer and 1 ms give the second token at 29 ms, the third at 39."""
    changes = (FleetChange(0.019, 3, "joins"), FleetChange(0.020, 2, "leaves"))
    where = prefill_and_decode([1], [2, 3], bootstrap=bootstrap, changes=changes, migration_limit=1)
    result = simulate([asked(0.0, 0, 9, 3, 1, 2, 3)], where, KV)
    assert (result.counts.moves, result.counts.finished) == (1, 1)
    assert (result.ttft_s.max, result.seconds) == (0.016, 0.039)
    assert [row.cached_tokens for row in result.workers] == [8, 0, 0]
    assert result.cache.cached_tokens == 0


def test_a_request_that_cannot_move_because_no_worker_is_left_has_failed():
    where = fleet(1, losses=(FleetLoss(0.02, worker_id=1),), migration_limit=3)
    result = simulate([asked(0.0, 0, 8, 4, 1, 2)], where, KV)
    assert (result.counts.failed, result.counts.refused, result.counts.moves) == (1, 0, 0)
    assert any("no worker took them" in note for note in result.notes)


def test_what_a_moved_request_computed_is_cached_for_its_next_move():
    """A prompt of 8 tokens has 9 tokens of output when its decode worker is lost, and 11 when the
    next one is. The prefill worker finds 2 blocks of 17 tokens, and then, with the 4 of these that
    it has computed, 4 blocks of 19."""
    changes = (
        FleetChange(0.1, 3, "joins"),
        FleetChange(0.1001, 2, "leaves"),
        FleetChange(0.13, 4, "joins"),
        FleetChange(0.1302, 3, "leaves"),
    )
    where = prefill_and_decode([1], [2, 3, 4], changes=changes, migration_limit=2)
    result = simulate([asked(0.0, 0, 8, 30, 1, 2)], where, KV)
    assert (result.counts.moves, result.counts.finished) == (2, 1)
    assert [row.prompt_tokens for row in result.workers] == [8 + 17 + 19, 0, 0, 0]
    assert [row.cached_tokens for row in result.workers] == [8 + 16, 0, 0, 0]


def test_routers_that_do_not_share_their_bookings_balance_worse():
    trace = [asked(n * 0.002, n, 40, 8, *range(n * 10, n * 10 + 10)) for n in range(200)]
    policy = ReplayPolicy("kv", RouterConfig(router_mode="kv"))
    engine = replace(ENGINE, total_blocks=400)

    def p99(routers, mode):
        where = fleet(8, engine)
        found = simulate(trace, where, policy, 7, routers=routers, sync=SimulatedSync(mode))
        return found.ttft_s.p99

    # Ties are broken at random, so routers that share may be as good as one.
    assert p99(1, "none") <= 1.01 * p99(4, "delayed") < p99(4, "none")


@given(replays())
def test_routers_that_share_without_delay_have_the_same_load_and_all_end_with_none(replay):
    """Bookings of others count once, end when they end, and their prefill ends with its first
    token; so do those that come late."""
    trace, where, policy, _ = replay
    for delay in (0.0, 0.001):
        made: list[ReplayRouters] = []

        class Watched(ReplayRouters):
            def __init__(self, *args, _made=made, **more):
                super().__init__(*args, **more)
                _made.append(self)

            def plan(self, live, _exact=not delay):
                if _exact and not live.attempts and live.enqueued < 0:  # it arrives now
                    assert len({loads(one.router) for one in self.frontends}) == 1
                return super().plan(live)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(simulation, "ReplayRouters", Watched)
            simulate(trace, where, policy, 1, routers=3, sync=SimulatedSync("delayed", delay))
        assert {len(one.router.load) for one in made[0].frontends} == {0}
        assert all(not any(sum(loads(one.router), ())) for one in made[0].frontends)


@given(replays(), st.sampled_from(["none", "delayed"]), st.sampled_from([0.0, 0.001, 0.02]))
def test_what_routers_do_not_count_is_what_the_load_of_each_lacks(replay, mode, delay):
    """The measure has the prefill tokens of every router, at each choice and with every delay."""
    trace, where, policy, _ = replay
    where = replace(where, losses=(), changes=())
    made: list[ReplayRouters] = []

    class Watched(ReplayRouters):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            made.append(self)

        def plan(self, live):
            compare()
            return super().plan(live)

    def compare():
        (routers,) = made
        peers = routers.peers
        assert peers is not None
        for one in routers.frontends:
            counted = sum(booked(one.router.load))
            assert counted == peers._booked - sum(peers._unseen[one.number].values())
        return peers

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulation, "ReplayRouters", Watched)
        sync = SimulatedSync(mode, delay)
        result = simulate(trace, where, policy, 1, routers=3, sync=sync, lean=False)
    peers = compare()
    assert (peers._booked, peers._own) == (0, {})
    assert result.peers is not None
    low, high = result.peers.load_low_share, result.peers.load_high_share
    assert low is None or (0 <= low <= 1 and (mode == "delayed" or high == 0))
    # One that starts again, or leaves a queue, is routed before what happened at its time is seen.
    if mode == "delayed" and not delay and not result.counts.retried + result.counts.queued:
        assert (low or 0, high or 0) == (0, 0)
    lean = simulate(trace, where, policy, 1, routers=3, sync=sync)
    assert lean.peers == result.peers


def loads(router):
    load = router.load
    return tuple(load.requests), booked(load), tuple(load.decode_blocks)


def booked(load):
    """The prefill tokens of each rank, without those that a prefill load model took off."""
    return tuple(map(load.booked_prefill, range(len(load.prefill_tokens))))


@pytest.mark.parametrize(
    ("delay", "apart", "least", "most"),
    [(0.0, 0.0, 6, 6), (0.001, 0.0, 1, 5), (0.001, 0.002, 6, 6)],
)
def test_routers_choose_the_same_worker_for_requests_that_arrive_within_the_delay(
    delay, apart, least, most
):
    """Bursts of 6 requests for 6 idle workers and 3 routers. A router that sees the bookings before
    the next request gives each a worker of its own. Within the delay it sees only its own, and
    some workers get two of the 6."""
    trace = [
        asked(float(n // 6) + n % 6 * apart, n, 40, 8, *range(n * 10, n * 10 + 10))
        for n in range(120)
    ]
    sent: dict[int, set[tuple[int, int]]] = {}

    def note(record):
        if isinstance(record, Decided) and record.decode is not None:
            sent.setdefault(int(record.id[1:]) // 6, set()).add(record.decode)

    engine = replace(ENGINE, total_blocks=4000)
    sync = SimulatedSync("delayed", delay)
    simulate(trace, fleet(6, engine), KV, 1, routers=3, sync=sync, records=note)
    mean = sum(map(len, sent.values())) / len(sent)
    assert least <= mean <= most


def test_requests_wait_in_the_router_queue_and_a_full_one_refuses():
    trace = [asked(0.0, n, 60, 1, *range(n * 15, n * 15 + 15)) for n in range(12)]
    values = {"router_queue_threshold": 0.0, "router_queue_max_requests": 4}
    result = simulate(trace, fleet(2), ReplayPolicy("queue", RouterConfig().with_values(values)), 1)
    assert result.counts.refusals == {"queue_full": result.counts.refused}
    assert result.counts.refused > 0
    assert result.counts.queued == result.queued_s.count > 0
    assert result.refused_share == result.counts.refused / 12


def learnt(apart):
    """30 prompts of 8 to 60 tokens, by which a model measures the engines: one each ``apart`` s."""
    return [
        asked(n * apart, n, 8 + 4 * (n % 14), 1, *range(n * 100, n * 100 + 15)) for n in range(30)
    ]


@pytest.mark.parametrize("model", ["none", "measured"])
@pytest.mark.seed("dynamo-1.6: operation: replay")
def test_the_load_of_a_prefill_falls_while_it_runs_with_a_prefill_load_model(model):
    """A token takes 1 ms. At 40.000 s worker A gets 40 tokens, at 40.029 s worker B gets 20, and a
    third prompt of 20 comes at 40.030 s. Counted in full, B has less: 20 of 40. With the model A
    has 10 left and B 19. KV blocks do not count."""
    values = {"router_prefill_load_model": model, "router_track_active_blocks": False}
    sent = {}

    def note(record):
        if isinstance(record, Decided):
            sent[record.id] = record.decode

    trace = [
        *learnt(1.0),
        asked(40.0, "A", 40, 1, *range(9000, 9010)),
        asked(40.029, "B", 20, 1, *range(9100, 9105)),
        asked(40.030, "C", 20, 1, *range(9200, 9205)),
    ]
    engine = replace(ENGINE, total_blocks=4000)
    simulate(
        trace, fleet(2, engine), ReplayPolicy("p", RouterConfig().with_values(values)), records=note
    )
    assert sent["rA"] != sent["rB"]
    assert sent["rC"] == sent["rA" if model == "measured" else "rB"]


@pytest.mark.parametrize(("model", "waited"), [("none", 5.9), ("measured", 3.0)])
def test_a_request_waits_in_the_queue_until_the_load_has_fallen(model, waited):
    """A token takes 100 ms, and 32 of them may wait. A prompt of 60 tokens comes at 300 s, another
    0.1 s later. It is tried again every 0.5 s: 34 tokens are left after 2.6 s, and 29 after 3.1 s.
    Without a model it waits until the first token, at 6 s."""
    engine = replace(ENGINE, total_blocks=4000, prefill_tokens_per_s=10.0)
    trace = learnt(7.0)
    trace += [asked(300.0, 50, 60, 1, *range(9000, 9015)), asked(300.1, 51, 8, 1, 9100, 9101)]
    values = {"router_prefill_load_model": model, "router_queue_threshold": 0.5}
    found = {}

    def note(record):
        if isinstance(record, Finished):
            found[record.id] = record.queued_s

    policy = ReplayPolicy("p", RouterConfig().with_values(values))
    result = simulate(trace, fleet(1, engine), policy, records=note)
    assert {name: one for name, one in found.items() if one} == {"r51": pytest.approx(waited)}
    assert result.counts.queued == 1
    assert not result.notes


@pytest.mark.parametrize("bootstrap", [False, True])
def test_prefill_workers_are_measured_until_their_blocks_can_be_used(bootstrap):
    """Only the prefill hop has a prediction. 40 tokens take 40 ms on the prefill worker; a pair is
    done there when its 10 blocks were pulled too, after 60 ms."""
    predicted = []

    def note(record):
        if isinstance(record, Changed) and isinstance(record.change, Booked):
            predicted.append((record.change.stage, record.change.predicted_s))

    policy = ReplayPolicy(
        "p", RouterConfig().with_values({"router_prefill_load_model": "measured"})
    )
    engine = replace(ENGINE, total_blocks=4000)
    trace = [asked(float(n), n, 40, 2, *range(n * 100, n * 100 + 10)) for n in range(30)]
    where = prefill_and_decode([1], [2], engine, bootstrap)
    simulate(trace, where, policy, records=note)
    assert {took for stage, took in predicted if stage == "decode"} == {None}
    took = [took for stage, took in predicted if stage == "prefill"][-1]
    assert took == pytest.approx(0.06 if bootstrap else 0.04)


def test_lost_events_lower_what_the_router_expects():
    trace = [asked(n * 0.05, n, 41, 1, *range(n % 5 * 10, n % 5 * 10 + 10)) for n in range(100)]
    whole = simulate(trace, fleet(4), KV, 1)
    lossy = simulate(trace, fleet(4, events_loss=1.0), KV, 1)
    assert lossy.cache.expected_rate == 0.0
    assert lossy.cache.hit_rate < whole.cache.hit_rate


def test_goodput_counts_requests_within_both_limits():
    trace = [asked(0.0, 0, 8, 3, 1, 2), asked(5.0, 1, 40, 3, 9)]
    result = simulate(trace, fleet(1), KV, objective=Objective(0.01, 0.02))
    assert result.goodput.requests == 1
    assert result.goodput.share == 0.5


def test_what_cannot_be_simulated_is_refused_by_name():
    with pytest.raises(ReplayError, match="no requests"):
        simulate([], fleet(), KV)
    with pytest.raises(ReplayError, match="before the one in front"):
        simulate([asked(1.0, 0, 8, 1), asked(0.0, 1, 8, 1)], fleet(), KV)
    with pytest.raises(ReplayError, match="multiple"):
        simulate([replace_block(asked(0.0, 0, 8, 1, 1, 2), 6)], fleet(), KV)
    with pytest.raises(ReplayError, match="routers"):
        simulate([asked(0.0, 0, 8, 1)], fleet(), KV, routers=0)
    result = simulate([asked(0.0, 0, 8, 1, 1, 2), asked(0.0, 1, 4000, 1)], fleet(), KV)
    assert result.counts.refusals == {"too_long": 1}
    assert result.notes[0].startswith("1 of 2 requests have no hash ids: ")
    without_hashes = simulate([asked(0.0, 0, 8, 1)], fleet(), KV)
    assert (without_hashes.cache.ceiling, without_hashes.notes) == (None, [])


def replace_block(request, size):
    return TraceRequest(request.at, request.id, 8, 1, request.hash_ids, size)


@pytest.mark.parametrize(("size", "cached"), [(2, 8), (4, 8), (8, 8)])
def test_blocks_of_the_trace_are_cut_or_joined_to_those_of_the_engines(size, cached):
    engine = replace(ENGINE, block_size=size)
    trace = [asked(0.0, 0, 12, 1, 1, 2, 3), asked(1.0, 1, 12, 1, 1, 2, 4)]
    result = simulate(trace, fleet(1, engine), KV)
    assert result.cache.cached_tokens == cached


def test_a_request_that_arrives_where_a_step_of_a_leap_ends_joins_the_next_step():
    """Worker 2 hands over at 24 ms, where worker 3 ends the second step of a leap: its third step
    begins after that, since steps that end together run in the order of the ranks."""
    engine = replace(ENGINE, total_blocks=18, max_num_seqs=2, max_num_batched_tokens=3)
    trace = [
        asked(0.0, 0, 23, 1, 1000, 1001, 1002, 1003, 1004, 1005),
        asked(0.0, 1, 1, 4, 2000),
        asked(0.0, 2, 1, 1, 3000),
    ]
    workers = tuple(
        SimulatedWorker(n, Role.PREFILL if n <= 2 else Role.DECODE, {"zone": "ab"[n % 2]})
        for n in (1, 2, 3, 4)
    )
    replay = (
        trace,
        SimulatedFleet(workers, engine),
        ReplayPolicy("kv", RouterConfig()),
        {"routers": 3},
    )
    result, records = replayed(replay)
    stepped, expected = replayed(replay, leaps=False)
    assert first_difference(records, expected) is None
    assert encode(result) == encode(stepped)
