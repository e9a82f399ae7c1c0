"""The ladder names the cause that was put into a fleet, and nothing without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dynctl.documents.codec import decode, encode
from dynctl.documents.hits import BY, CAUSES, RUNGS, UNEXPLAINED, HitsReport, best_trial
from dynctl.documents.recording import (
    KINDS,
    Arrived,
    Changed,
    Decided,
    Finished,
    Record,
    Start,
    State,
)
from dynctl.findings.catalogue import all_codes
from dynctl.health.hits import Bounds, SharedCache, Window, hits
from dynctl.settings.router_options import ROUTER_OPTIONS
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import ReplayPolicy
from dynctl.simulation.replay.simulation import simulate
from dynctl.wire.traces import TraceRequest
from router_core import (
    BlocksRemoved,
    BlocksStored,
    Booked,
    Freed,
    KvEvent,
    Role,
    Router,
    RouterConfig,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)
from tests.dynctl.health.recorded_fleet import (
    SIZE,
    Prompt,
    RecordedFleet,
    chats,
    in_zones,
)
from tests.dynctl.simulation.replay.test_simulation import fleet as simulated_fleet

#: 13 conversations on 5 workers, each 6 turns in a new order.
CHATS = chats(13, 6)
#: The same prompts again and again, 8 whole blocks each.
WHOLE = [replace(one, tail=0) for one in chats(13, 6, own=0)]
#: One conversation that all ask for.
HOT = [replace(one, at=one.at + 4 * (i > 0)) for i, one in enumerate(chats(1, 78, every_s=0.1))]
#: Five requests with one prefix in half a second, then five with another one.
BURSTS = [
    replace(one, at=10.0 * start + i / 10)
    for start in range(1, 14)
    for i, one in enumerate(chats(1, 5, seed=start))
]
EVERY = range(5)
FLEET = RecordedFleet(workers=5, state=True)
#: Prompts and answers on different workers of one zone.
PAIRED = replace(
    FLEET,
    zones=("b", "a"),
    decoders=2,
    config={"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"},
)


@dataclass(frozen=True)
class Injected:
    """A cause: the fleet and prompts that have it, and the same without it."""

    cause: str
    fleet: RecordedFleet
    prompts: Sequence[Prompt] = tuple(CHATS)
    control: RecordedFleet = FLEET
    without: Sequence[Prompt] = tuple(CHATS)


CAUSES_INJECTED = {
    "small cache": Injected("capacity", replace(FLEET, blocks=20)),
    "lost events": Injected("events_lost", replace(FLEET, silent=dict.fromkeys(EVERY, 1.5))),
    "lost events that no gap shows": Injected(
        "events_lost",
        replace(FLEET, silent=dict.fromkeys(EVERY, 1.5), gaps=False),
        [*CHATS, Prompt(60.0, (1,))],
        without=[*CHATS, Prompt(60.0, (1,))],
    ),
    "wrong block size": Injected("block_size", replace(FLEET, other_block_size=frozenset(EVERY))),
    "wrong block size since before the recording": Injected(
        "block_size", replace(FLEET, other_block_size=frozenset(EVERY), conditions="holds")
    ),
    "wrong block size of some workers": Injected(
        "block_size", replace(FLEET, other_block_size=frozenset((0, 2, 4)), conditions="holds")
    ),
    "load beats cache": Injected(
        "load",
        replace(FLEET, prefill_s=1.5),
        HOT,
        control=replace(FLEET, prefill_s=0.01),
        without=HOT,
    ),
    "load beats cache where prompts are computed": Injected(
        "load",
        replace(FLEET, prefill_s=1.5, decoders=2),
        HOT,
        control=replace(FLEET, prefill_s=0.01, decoders=2),
        without=HOT,
    ),
    "no decode worker is left in a zone": Injected(
        "topology",
        replace(PAIRED, lost={5: 3.0}),
        control=PAIRED,
    ),
    "two blind routers": Injected(
        "blind",
        replace(FLEET, routers=2, kv_events=False),
        control=replace(FLEET, kv_events=False),
    ),
    "two blind routers with events": Injected(
        "blind",
        replace(FLEET, routers=3, prefill_s=1.5),
        BURSTS,
        control=replace(FLEET, routers=3, prefill_s=0.01),
        without=BURSTS,
    ),
    "salts": Injected(
        "salts",
        FLEET,
        chats(13, 6, tenants=("a", "b", "c")),
        without=chats(13, 6, tenants=("a",)),
    ),
    "an id in the first block": Injected(
        "front",
        FLEET,
        [replace(one, blocks=(i, *one.blocks[1:])) for i, one in enumerate(CHATS)],
    ),
    "round robin": Injected("spread", replace(FLEET, config={"router_mode": "round-robin"})),
    "late events": Injected("stale", replace(FLEET, delay_s=2.0)),
    "topology required": Injected(
        "topology", replace(FLEET, zones=("a", "b")), in_zones(CHATS, ("a", "b"))
    ),
    "engine restart": Injected(
        "restart", replace(FLEET, restarts={one: 3.4 + one / 100 for one in EVERY})
    ),
    "the same prompt at once": Injected(
        "in_flight",
        replace(FLEET, prefill_s=1.5),
        BURSTS,
        control=replace(FLEET, prefill_s=0.01),
        without=BURSTS,
    ),
    "no credit for cached blocks": Injected(
        "no_credit", replace(FLEET, config={"overlap_score_credit": 0.0})
    ),
    "temperature": Injected("temperature", replace(FLEET, config={"router_temperature": 5.0})),
    "last token": Injected(
        "alignment",
        replace(FLEET, exact=False),
        WHOLE,
        without=[replace(one, tail=5) for one in WHOLE],
    ),
    "larger blocks of the engine": Injected(
        "alignment", replace(FLEET, reuses=lambda tokens: tokens // 96 * 96)
    ),
}


def share(report: HitsReport, cause: str) -> float:
    return sum(one.share for one in report.largest if one.cause == cause)


@pytest.mark.parametrize("name", CAUSES_INJECTED)
@pytest.mark.seed("dynamo-1.6: operation: hit rate")
def test_the_injected_cause_is_the_largest_loss(name: str) -> None:
    one = CAUSES_INJECTED[name]
    report = hits(one.fleet.records(one.prompts))
    assert report.requests == len(one.prompts)
    assert report.largest, report.rungs
    assert report.largest[0].cause == one.cause, report.largest
    assert report.largest[0].examples
    assert report.largest[0].act

    without = hits(one.control.records(one.without))
    assert without.requests == len(one.without)
    assert share(without, one.cause) < 0.2 * share(report, one.cause)
    assert not without.largest or without.largest[0].cause != one.cause


@pytest.mark.parametrize(
    ("name", "advised", "of_no_use"),
    [
        ("load beats cache", "prefill_load_scale", []),
        (
            "load beats cache where prompts are computed",
            "overlap_score_credit",
            ["prefill_load_scale"],
        ),
        ("round robin", "router_mode", []),
        ("no credit for cached blocks", "overlap_score_credit", []),
        ("temperature", "router_temperature", []),
        ("late events", "router_predicted_ttl_secs", []),
    ],
)
def test_a_setting_is_advised_after_it_changed_recorded_choices(
    name: str, advised: str, of_no_use: list[str]
) -> None:
    one = CAUSES_INJECTED[name]
    cause = hits(one.fleet.records(one.prompts)).largest[0]
    best = best_trial(cause.trials)
    assert best is not None
    assert list(best.settings) == [advised]
    assert cause.act.startswith(best.flags)
    assert cause.tried == cause.requests == best.changed
    assert best.tokens == cause.tokens
    unused = {key for trial in cause.trials if not trial.changed for key in trial.settings}
    assert unused == set(of_no_use)
    assert not any(ROUTER_OPTIONS[key].flags[0] in cause.act for key in of_no_use)


def test_no_setting_is_advised_that_changes_no_recorded_choice() -> None:
    one = CAUSES_INJECTED["the same prompt at once"]
    cause = hits(one.fleet.records(one.prompts)).largest[0]
    assert cause.cause == "in_flight"
    assert cause.tried == cause.requests
    assert [trial.changed for trial in cause.trials] == [0]
    assert "--router" not in cause.act


def test_no_setting_is_advised_where_choices_cannot_be_repeated() -> None:
    one = CAUSES_INJECTED["load beats cache"]
    records = replace(one.fleet, kv_events=False).records(one.prompts)
    for cause in hits(records).largest:
        assert cause.tried == 0
        assert not any(trial.changed for trial in cause.trials)
        assert "--router-prefill" not in cause.act


def test_a_fleet_without_a_fault_reuses_nearly_what_is_reachable() -> None:
    report = hits(FLEET.records(CHATS))
    assert [one.rung for one in report.rungs] == [one for one in RUNGS if one != "shared"]
    reachable, reused = report.rung("reachable"), report.rung("reused")
    assert reachable is not None
    assert reused is not None
    assert reachable.rate == pytest.approx(13 * 5 * 8 * SIZE / sum(one.tokens for one in CHATS))
    assert reused.rate is not None
    assert reachable.rate is not None
    assert reused.rate > 0.9 * reachable.rate
    assert report.doubts == []
    assert report.capacity_blocks == 5 * 4_000
    assert report.foreign_blocks == 0


def test_the_caches_are_those_of_the_choice_of_the_prefill_worker() -> None:
    # The decision is recorded when the decode worker is chosen: the prompt is in the index then.
    alone, paired = hits(FLEET.records(CHATS)), hits(replace(FLEET, decoders=2).records(CHATS))
    assert [(one.rung, one.tokens, one.causes) for one in paired.rungs] == [
        (one.rung, one.tokens, one.causes) for one in alone.rungs
    ]
    assert paired.requests == len(CHATS)


def test_prompts_of_another_adapter_are_not_reachable_and_no_salt_would_make_them_so() -> None:
    prompts = chats(13, 6, adapters=("german", "sql", ""))
    report = hits(FLEET.records(prompts))
    reachable = report.rung("reachable")
    assert report.requests == len(prompts) == 3 * len(CHATS)
    assert report.rung("shared") is None
    assert reachable is not None
    # Each adapter and the base model compute a conversation once.
    once = 3 * 13 * 5 * 8 * SIZE
    assert reachable.tokens == once
    assert {one.cause for one in report.largest} <= {"load", "in_flight"}


def gain(report: HitsReport, cause: str) -> float | None:
    (found,) = [one for one in report.largest if one.cause == cause]
    return found.gain


def reused(report: HitsReport) -> float:
    rung = report.rung("reused")
    assert rung is not None
    assert rung.rate is not None
    return rung.rate


@pytest.mark.parametrize("blocks", [40, 70, 100])
def test_the_gain_of_twice_the_blocks_is_what_one_worker_of_twice_the_size_gains(
    blocks: int,
) -> None:
    small = RecordedFleet(workers=1, blocks=blocks)
    report = hits(small.records(CHATS))
    larger = hits(replace(small, blocks=2 * blocks).records(CHATS))
    assert gain(report, "capacity") == pytest.approx(reused(larger) - reused(report), abs=1e-9)


def test_the_gain_of_a_choice_is_what_the_most_cached_worker_would_have_reused() -> None:
    beaten = hits(replace(FLEET, prefill_s=1.5).records(HOT))
    spread = hits(replace(FLEET, config={"router_mode": "round-robin"}).records(CHATS))
    for report, cause in ((beaten, "load"), (spread, "spread")):
        best = report.rung("best")
        assert best is not None
        assert best.rate is not None
        # Nothing else is lost here, and what the engines gained back is not gained again.
        assert gain(report, cause) == pytest.approx(best.rate - reused(report))
        assert (gain(report, cause) or 0) > 0.03
    # Each prompt has one more block in the index than an engine reuses.
    last = replace(FLEET, exact=False, config={"router_mode": "round-robin"})
    whole = hits(last.records(WHOLE))
    (part,) = [one for one in whole.largest if one.cause == "spread"]
    assert 0 < (part.gain or 0) < part.share


def test_the_gain_of_smaller_blocks_is_computed_only_down_to_those_of_the_router() -> None:
    larger = hits(replace(FLEET, reuses=lambda tokens: tokens // 96 * 96).records(CHATS))
    (part,) = [one for one in larger.largest if one.cause == "alignment"]
    assert part.gain == pytest.approx(part.share)
    last_token = hits(replace(FLEET, exact=False).records(WHOLE))
    assert gain(last_token, "alignment") is None


def test_a_cause_whose_gain_no_record_shows_has_none() -> None:
    for name in ("lost events", "late events", "two blind routers", "salts", "engine restart"):
        one = CAUSES_INJECTED[name]
        assert gain(hits(one.fleet.records(one.prompts)), one.cause) is None, name


def test_a_request_that_is_sent_again_counts_once_and_the_worker_that_failed_is_named() -> None:
    records = FLEET.records(CHATS)
    place = len(records) // 2
    place = next(
        i
        for i, one in enumerate(records)
        if i > place and isinstance(one, Decided) and one.cached_blocks
    )
    decided, booked = records[place], records[place - 1]
    assert isinstance(decided, Decided)
    assert isinstance(booked, Changed)
    assert isinstance(booked.change, Booked)
    with_prefix = booked.change.worker_id
    other = replace(booked.change, worker_id=with_prefix % FLEET.workers + 1)
    failed = Changed(booked.at, Freed(decided.id, None, False))

    # The worker with the prefix computes it after another one failed: nothing is lost.
    first = [*records[: place - 1], Changed(booked.at, other), failed, *records[place - 1 :]]
    assert hits(first).rungs == hits(records).rungs

    # The worker with the prefix failed.
    away = structs.replace(
        decided, decode=(other.worker_id, 0), cached_blocks=0.0, best_cached_blocks=0.0
    )
    second = [*records[:place], failed, Changed(booked.at, other), away, *records[place + 1 :]]
    expected = hits(second).rung("expected")
    assert expected is not None
    lost = {one.cause: one.examples for one in expected.causes}
    assert lost["unavailable"] == [decided.id]
    assert UNEXPLAINED not in lost


def _late_hit(records: list[Record]) -> tuple[int, Decided]:
    """The first decision of the second half that found cached blocks, and its place."""
    return next(
        (place, one)
        for place, one in enumerate(records)
        if place > len(records) // 2 and isinstance(one, Decided) and one.cached_blocks
    )


def test_a_prefill_that_is_repeated_for_want_of_a_decode_worker_names_the_topology() -> None:
    records = PAIRED.records(CHATS)
    place, decided = _late_hit(records)
    assert decided.prefill is not None
    assert decided.decode is not None
    # The decode worker of the zone is drained while the prompt is computed.
    other = decided.prefill[0] % PAIRED.workers + 1
    at = decided.at
    again: list[Record] = [
        Changed(at, Freed(decided.id)),
        Changed(at, WorkerAvailability(decided.decode[0], "drained")),
        Changed(at, Booked(decided.id, "prefill", other, 0)),
        Changed(at, Freed(decided.id, "prefill")),
        Changed(at, WorkerAvailability(decided.decode[0], None)),
        structs.replace(decided, prefill=(other, 0), cached_blocks=0.0, best_cached_blocks=0.0),
    ]
    expected = hits([*records[: place - 1], *again, *records[place + 1 :]]).rung("expected")
    assert expected is not None
    lost = {one.cause: one.examples for one in expected.causes}
    assert lost["topology"] == [decided.id]
    assert lost.keys() <= {"topology", "load"}


def test_an_eviction_while_the_request_waited_is_named_though_others_evict_later() -> None:
    records = FLEET.records(CHATS)
    place, decided = _late_hit(records)
    assert decided.decode is not None
    stored = next(
        one.change.event
        for one in records
        if isinstance(one, Changed)
        and isinstance(one.change, KvEvent)
        and isinstance(one.change.event, BlocksStored)
        and one.change.worker_id == decided.decode[0]
        and _first_block(records, decided.id) in one.change.event.block_hashes
    )
    here, at = decided.decode[0], decided.at
    there = here % FLEET.workers + 1
    gone = BlocksRemoved(stored.block_hashes)
    late = [
        Changed(at + 5, KvEvent(there, 0, stored)),
        Changed(at + 6, KvEvent(there, 0, gone)),
    ]
    changed: list[Record] = [
        *records[: place + 1],
        Changed(at + 0.001, KvEvent(here, 0, gone)),
        *(
            structs.replace(one, cached_tokens=0)
            if isinstance(one, Finished) and one.id == decided.id
            else one
            for one in records[place + 1 :]
        ),
        *late,
    ]
    reused = hits(sorted(changed, key=lambda one: one.at)).rung("reused")
    assert reused is not None
    lost = {one.cause: one.examples for one in reused.causes if one.tokens > 0}
    assert lost["evicted_waiting"][0] == decided.id
    assert UNEXPLAINED not in lost


def _first_block(records: Sequence[Record], request: str) -> int:
    (found,) = [one for one in records if isinstance(one, Arrived) and one.id == request]
    return found.hashes[0]


def test_a_loss_that_the_engines_gain_back_is_shown_as_a_gain_and_not_as_the_largest() -> None:
    # The only worker reuses all of what its lost events hide.
    fleet = RecordedFleet(workers=1, silent={0: 0.5})
    report = hits(fleet.records(CHATS))
    best, reused = report.rung("best"), report.rung("reused")
    assert best is not None
    assert reused is not None
    assert [one.cause for one in best.causes] == ["events_lost"]
    assert [one.cause for one in reused.causes] == ["more"]
    assert reused.lost is not None
    assert reused.lost < 0
    assert report.largest == []


@pytest.mark.parametrize("by", BY)
def test_groups_add_up_to_the_whole(by: str) -> None:
    fleet = replace(FLEET, zones=("a", "b"))
    report = hits(fleet.records(chats(13, 6, tenants=("a", ""))), by=by)
    assert report.by == by
    assert sum(one.requests for one in report.groups) == report.requests
    assert sum(one.prompt_tokens for one in report.groups) == report.prompt_tokens
    reused = report.rung("reused")
    assert reused is not None
    total = sum((one.rates["reused"] or 0.0) * one.prompt_tokens for one in report.groups)
    assert total == pytest.approx(reused.tokens)
    names = {one.name for one in report.groups}
    expected = {
        "model": {"tiny"},
        "domain": {"zone=a", "zone=b"},
        "tenant": {"a", "(no salt)"},
        "hour": {"+0 h"},
        "worker": {f"worker-{one}" for one in EVERY},
    }
    assert names == expected[by]


def test_requests_outside_the_window_warm_the_caches_and_do_not_count() -> None:
    records = FLEET.records(CHATS)
    late = hits(records, window=Window(2.0))
    assert 0 < late.requests < len(CHATS)
    assert late.start is not None
    assert late.start >= 2.0 - 1e-6
    reachable = late.rung("reachable")
    assert reachable is not None
    # All conversations were seen before: 8 of 10 blocks are reachable.
    assert reachable.rate == pytest.approx(8 * SIZE / (10 * SIZE + 5))


def test_a_recording_without_an_input_names_it_and_claims_nothing() -> None:
    without_events = hits(replace(FLEET, kv_events=False).records(CHATS))
    best = without_events.rung("best")
    assert best is not None
    assert best.rate is None
    assert best.unknown == "not every worker reports KV events"
    assert "DYR0765" in [one.code for one in without_events.doubts]

    silent = [
        Finished(one.at, one.id, 200, "success", one.prompt_tokens, None, 1, 0.05)
        if isinstance(one, Finished)
        else one
        for one in FLEET.records(CHATS)
    ]
    reused = hits(silent).rung("reused")
    assert reused is not None
    assert reused.rate is None
    assert reused.unknown == "no engine reported the tokens that it reused"

    records = [one for one in FLEET.records(CHATS) if not isinstance(one, Decided)]
    report = hits(_only(one, {"decisions"}) for one in records)
    expected = report.rung("expected")
    assert expected is not None
    assert expected.unknown == "the recording has no decisions"
    assert report.requests == len(CHATS)

    assert hits([]).requests == 0
    assert hits([]).largest == []


def _only(record: Record, without: set[str]) -> Record:
    if isinstance(record, Start):
        return Start(0.0, "frontend", "test", "1", complete=frozenset(KINDS) - without)
    return record


def test_a_worker_that_declares_no_blocks_leaves_the_capacity_unknown() -> None:
    report = hits(replace(FLEET, blocks=0).records([Prompt(1.0, (1, 2))]))
    capacity = report.rung("capacity")
    assert capacity is not None
    assert capacity.rate is None
    assert "total-blocks" in capacity.unknown


def test_what_the_bounds_leave_out_is_said_and_not_guessed() -> None:
    report = hits(FLEET.records(CHATS), bounds=Bounds(seen=50, fates=60, requests=2))
    assert report.left_out
    assert "DYR0768" in [one.code for one in report.doubts]
    _adds_up(report)


def test_a_router_that_is_not_recorded_is_noticed_by_the_blocks_of_its_requests() -> None:
    records = replace(FLEET, routers=2).records(CHATS)
    taken = {one.id: one.router for one in records if isinstance(one, Arrived)}
    mine = [
        one
        for one in records
        if not isinstance(one, Arrived | Decided | Finished) or not taken[one.id]
    ]
    alone, both = hits(mine), hits(records)
    assert alone.requests < both.requests
    assert "DYR0767" in [one.code for one in alone.doubts]
    assert both.foreign_blocks == 0
    assert both.doubts == []


def test_a_request_that_is_refused_or_runs_on_is_counted_apart() -> None:
    nowhere = replace(CHATS[-1], at=100.0, required=("gpu=none",))
    records = FLEET.records([*CHATS, nowhere])
    report = hits(records)
    assert report.requests == len(CHATS)
    assert report.skipped == {"refused": 1}
    last = max(
        i for i, one in enumerate(records) if isinstance(one, Finished) and one.cached_tokens
    )
    cut = hits(one for i, one in enumerate(records) if i != last)
    assert cut.skipped == {"refused": 1, "still running": 1}


def test_a_state_in_the_recording_makes_what_was_cached_before_reachable() -> None:
    records = FLEET.records(CHATS)
    half = next(i for i, one in enumerate(records) if one.at > 3.0)
    whole = hits(records, window=Window(3.0))
    cold = hits([records[0], *records[1:7], *records[half:]])
    warm, alone = whole.rung("reachable"), cold.rung("reachable")
    assert warm is not None
    assert alone is not None
    assert (alone.rate or 0) < (warm.rate or 0)


def test_blocks_of_decode_workers_take_no_place_in_the_capacity_for_prompts() -> None:
    fleet = replace(FLEET, state=False)
    records = fleet.records(CHATS)
    decode_only = replace(fleet.worker(90), role=Role.DECODE)
    many = tuple(range(1, 2 * fleet.workers * fleet.blocks))
    stored = KvEvent(decode_only.worker_id, 0, BlocksStored(None, many, many))
    half = next(i for i, one in enumerate(records) if one.at > 3.0)
    at = records[half].at
    joined = [Changed(at, WorkerUpserted(decode_only)), Changed(at, stored)]
    before, after = hits(records), hits([*records[:half], *joined, *records[half:]])
    assert before.rungs == after.rungs


def test_the_report_survives_json_and_every_cause_has_a_page_for_its_codes() -> None:
    report = hits(CAUSES_INJECTED["small cache"].fleet.records(CHATS), by="worker")
    assert decode(encode(report), HitsReport) == report
    known = all_codes()
    for cause in CAUSES.values():
        assert all(code in known for code in cause.codes), cause


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(1, 4),
    blocks=st.sampled_from([8, 30, 90, 4_000]),
    conversations=st.integers(1, 8),
    mode=st.sampled_from(["kv", "round-robin", "least-loaded"]),
    routers=st.integers(1, 2),
    events=st.booleans(),
    delay=st.sampled_from([0.001, 0.4, 3.0]),
    prefill=st.sampled_from([0.01, 0.7]),
    silent=st.booleans(),
    restarts=st.booleans(),
    grain=st.sampled_from([1, 48]),
    tenants=st.sampled_from([("",), ("a", "b")]),
)
def test_the_parts_of_every_step_add_up_to_it(
    workers: int,
    blocks: int,
    conversations: int,
    mode: str,
    routers: int,
    events: bool,
    delay: float,
    prefill: float,
    silent: bool,
    restarts: bool,
    grain: int,
    tenants: tuple[str, ...],
) -> None:
    fleet = RecordedFleet(
        workers=workers,
        blocks=blocks,
        config={"router_mode": mode},
        routers=routers,
        kv_events=events,
        delay_s=delay,
        prefill_s=prefill,
        silent={0: 2.0} if silent else {},
        restarts={workers - 1: 3.0} if restarts else {},
        reuses=lambda tokens: tokens // grain * grain,
    )
    report = hits(fleet.records(chats(conversations, 4, tenants=tenants)), by="tenant")
    assert report.requests == conversations * 4 * len(tenants)
    _adds_up(report)


def _adds_up(report: HitsReport) -> None:
    """Parts add up to steps; reachable bounds the shared cache; the net losses the whole ladder."""
    known = [one for one in report.rungs if one.tokens is not None]
    for before, rung in pairwise(known):
        assert before.tokens is not None
        assert rung.tokens is not None
        assert rung.lost == before.tokens - rung.tokens
        assert sum(one.tokens for one in rung.causes) == rung.lost
    for cause in (*report.largest, *(one for rung in known for one in rung.causes)):
        assert cause.gain is None or 0 <= cause.gain <= max(0.0, cause.share) + 1e-12
        assert bool(cause.gain_if) >= (cause.gain is not None)
    reachable, capacity = report.rung("reachable"), report.rung("capacity")
    if reachable is not None and capacity is not None and capacity.tokens is not None:
        assert reachable.tokens is not None
        assert capacity.tokens <= reachable.tokens
        assert report.with_twice is not None
        assert capacity.rate is not None
        assert report.with_twice >= capacity.rate - 1e-9
    if known:
        top, low = known[0].tokens, known[-1].tokens
        assert top is not None
        assert low is not None
        assert sum(one.tokens for one in report.largest) <= max(0, top - low) + sum(
            -one.tokens for rung in known for one in rung.causes if one.tokens < 0
        )
    for name in {one.cause for rung in known for one in rung.causes}:
        assert name in CAUSES
    assert all(one.rung in RUNGS for one in report.rungs)


@settings(max_examples=60, deadline=None)
@given(
    most=st.integers(1, 12),
    uses=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), max_size=30),
)
def test_the_shared_cache_is_an_lru_cache_and_shows_one_of_twice_its_size(
    most: int, uses: list[list[int]]
) -> None:
    cache = SharedCache()
    cache.resize(most)
    recent: list[int] = []
    for hashes in uses:
        first, both = cache.leading(hashes)
        for limit, found in ((most, first), (2 * most, both)):
            held = set(recent[:limit])
            assert found == next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
        cache.use(hashes)
        recent = [*hashes, *(one for one in recent if one not in hashes)]


def test_a_cause_that_nothing_explains_has_a_size() -> None:
    # The engine reuses only half of what its own events show, for no recorded reason.
    records = replace(FLEET, reuses=lambda tokens: tokens // 32 * 16).records(CHATS)
    report = hits(records)
    reused = report.rung("reused")
    assert reused is not None
    assert UNEXPLAINED in [one.cause for one in reused.causes]
    assert all(one.cause != UNEXPLAINED for one in report.largest)


# -- blocks below the device -----------------------------------------------------------------------


def tiered(host: int, disk: int, **settings_: Any) -> list[Record]:
    """200 prompts of 12 shared prefixes on 3 workers, whose devices have room for 3 prompts each.

    One prompt at a time, so that nothing changes between a decision and its prefill.
    """
    random, records = Random(3), list[Record]()
    trace = []
    for number in range(200):
        first = random.randrange(12) * 100
        ids = (*range(first, first + 12), 10_000 + 2 * number, 10_001 + 2 * number)
        trace.append(TraceRequest(number / 2, f"r{number}", 57, 1, ids, 4))
    engine = EngineConfig(
        block_size=4,
        total_blocks=40,
        host_blocks=host,
        disk_blocks=disk,
        prefill_tokens_per_s=4000.0,
        kv_bytes_per_token=1e6,
    )
    policy = ReplayPolicy("p", RouterConfig(**settings_))
    simulate(trace, simulated_fleet(3, engine), policy, records=records.append)
    return records


@pytest.mark.parametrize(("host", "disk"), [(0, 0), (60, 0), (0, 60), (60, 100), (400, 0)])
@pytest.mark.parametrize("mode", ["kv", "round-robin"])
def test_what_was_reused_from_lower_tiers_was_cached_and_expected(mode: str, host: int, disk: int):
    report = hits(tiered(host, disk, router_mode=mode))
    tokens = {one.rung: one.tokens or 0 for one in report.rungs}
    # Without tiers the workers may keep more than one LRU cache, by luck.
    assert not (host or disk) or tokens["capacity"] >= tokens["best"]
    assert tokens["best"] >= tokens["expected"] == tokens["reused"] > 0
    assert report.capacity_blocks is not None
    assert 120 < report.capacity_blocks <= 3 * (40 + host + disk) or not host + disk
    found = {one.cause for rung in report.rungs for one in rung.causes}
    assert not found & {"more", "load", "stale", "evicted_waiting", "alignment", UNEXPLAINED}
    assert not report.left_out


def test_lower_tiers_that_count_too_little_are_the_cause() -> None:
    report = hits(tiered(60, 100, host_cache_hit_weight=0.0, disk_cache_hit_weight=0.0))
    assert [one.cause for one in report.largest] == ["tier_weight"]
    assert report.largest[0].gain is not None
    assert hits(tiered(60, 100)).largest == []


def test_lower_tiers_of_a_state_are_known() -> None:
    records = tiered(60, 100)
    half = len(records) // 2
    while not isinstance(records[half], Arrived):
        half += 1
    start, router = records[0], Router(exact_reuse=True, learns=True)
    assert isinstance(start, Start)
    for one in records[:half]:
        if isinstance(one, Changed):
            router.apply(one.change, one.at)
    state = State(records[half].at, router.snapshot())
    report = hits([structs.replace(start, at=state.at), state, *records[half:]])
    tokens = {one.rung: one.tokens or 0 for one in report.rungs}
    assert tokens["capacity"] >= tokens["best"] == tokens["expected"] == tokens["reused"] > 0
    assert not report.left_out


def test_a_lower_block_of_an_unknown_prefix_is_left_out_by_name() -> None:
    records = tiered(60, 0)
    at = next(i for i, one in enumerate(records) if isinstance(one, Finished))
    lost = KvEvent(1, 0, BlocksStored(999, (1000,), (1,), tier="host_pinned"))
    report = hits([*records[:at], Changed(records[at].at, lost), *records[at:]])
    assert report.left_out == {"events of lower tiers whose blocks before are unknown": 1}
    assert "DYR0768" in [one.code for one in report.doubts]


def test_a_lost_worker_takes_its_lower_tiers_along() -> None:
    records = tiered(60, 0)
    worker_id = next(
        one.change.worker.worker_id
        for one in records
        if isinstance(one, Changed) and isinstance(one.change, WorkerUpserted)
    )
    last = records[-1].at
    model = next(one.model for one in records if isinstance(one, Arrived))
    arrived = Arrived(last, "z", model, 57, 4, tuple(range(1, 15)))
    end: list[Record] = [
        Changed(last, WorkerLost(worker_id)),
        arrived,
        Decided(last, "z", model, outcome="selected", decode=(worker_id % 3 + 1, 0)),
        Finished(last, "z", 200, "success", 57, 0, 1),
    ]
    before, after = hits(records).capacity_blocks, hits([*records, *end]).capacity_blocks
    assert (before, after) == (3 * (40 + 60), 2 * (40 + 60))
