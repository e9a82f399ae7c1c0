"""The prefixes that requests share: their sizes, their copies, and when these are few or many."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dynctl.documents.codec import decode, encode
from dynctl.documents.hot import HotReport
from dynctl.documents.recording import Arrived, Record, State
from dynctl.health.hits import Ladder, Window
from dynctl.health.hits.hot import HotPrefixes, verdict
from dynctl.sources.hits import hot_report
from router_core import Link, Router, TransferTable, TransferTableSet
from tests.dynctl.health.recorded_fleet import SIZE, Prompt, RecordedFleet

FLEET = RecordedFleet(workers=4, state=True)
ALL = Window()
SYSTEM = (1, 2, 3, 4, 5, 6)


def hot(
    records: list[Record],
    top: int = 20,
    window: Window = ALL,
    bytes_per_token: float | None = None,
) -> HotReport:
    prefixes = HotPrefixes(top, bytes_per_token)
    ladder = Ladder(window=window, hot=prefixes)
    for record in records:
        ladder.take(record)
    return hot_report(ladder.report("test"), prefixes)


def agents(tenant: str = "") -> list[Prompt]:
    """40 requests with one system prompt, 10 of them with 3 more equal blocks."""
    starts = [SYSTEM + ((7, 8, 9) if number % 4 == 0 else ()) for number in range(40)]
    return [
        Prompt(1.0 + number, (*start, 1_000 + number), tenant=tenant)
        for number, start in enumerate(starts)
    ]


def test_a_longer_prefix_counts_only_what_is_behind_the_shorter_one() -> None:
    report = hot(FLEET.records(agents()))
    assert (report.requests, report.shared) == (40, 2)
    system, agent = report.prefixes
    assert (system.tokens, system.own_tokens, system.requests) == (6 * SIZE, 6 * SIZE, 40)
    assert (agent.tokens, agent.own_tokens, agent.requests) == (9 * SIZE, 3 * SIZE, 10)
    assert (system.parent, agent.parent) == ("", system.prefix)
    assert system.share == 40 * 6 * SIZE / report.prompt_tokens
    assert system.reused_tokens == 39 * 6 * SIZE
    assert agent.examples == ["r0", "r4", "r8"]
    assert (system.copies, system.missed, system.verdict) == (1, 0, "")
    assert decode(encode(report), HotReport) == report
    assert [row.prefix for row in hot(FLEET.records(agents()), top=1).prefixes] == [system.prefix]


def test_prefixes_of_tenants_are_apart_and_named() -> None:
    prompts = [*agents("a"), *(replace(prompt, at=prompt.at + 0.5) for prompt in agents("b"))]
    report = hot(FLEET.records(prompts))
    assert Counter(row.tenant for row in report.prefixes) == {"a": 2, "b": 2}
    assert {row.requests for row in report.prefixes} == {10, 40}


def test_copies_on_each_worker_that_are_read_once_are_too_many() -> None:
    fleet = replace(FLEET, config={"router_mode": "round-robin"})
    report = hot(fleet.records(agents()[1:4] + agents()[5:8]))
    (system,) = report.prefixes
    assert (system.copies, system.verdict) == (4, "too many copies")
    assert (system.missed, system.missed_by_load) == (3, 0)
    assert system.workers == [f"worker-{number}" for number in range(4)]


def test_requests_that_went_to_workers_without_the_prefix_show_too_few_copies() -> None:
    """The prefix is on one worker, then load beats cache."""
    prompts = [
        replace(prompt, at=1.0 if number == 0 else 5.0 + number / 10)
        for number, prompt in enumerate(agents())
    ]
    report = hot(replace(FLEET, workers=20, prefill_s=1.5).records(prompts))
    system = report.prefixes[0]
    assert system.missed >= system.missed_by_load > 4
    assert system.copies is not None
    assert 1 < system.copies < 20
    assert system.verdict == "too few copies"


@pytest.mark.parametrize(
    ("requests", "missed", "copies", "expected"),
    [
        (100, 9, 1, ""),
        (100, 10, 1, "too few copies"),
        (100, 10, 8, ""),
        (3, 1, 1, ""),
        (7, 0, 4, "too many copies"),
        (8, 0, 4, ""),
        (7, 3, 4, "too many copies"),
        (1, 0, 1, ""),
        (5, 0, 0, ""),
    ],
)
def test_when_copies_are_few_or_many(
    requests: int, missed: int, copies: int, expected: str
) -> None:
    assert verdict(requests, missed, copies, workers=8) == expected


def test_without_kv_events_copies_are_unknown_and_not_judged() -> None:
    report = hot(replace(FLEET, kv_events=False).records(agents()))
    assert report.prefixes
    assert {(row.copies, row.verdict, row.missed) for row in report.prefixes} == {(None, "", 0)}


def test_the_bytes_of_a_copy_are_those_of_the_model_or_of_the_router() -> None:
    records = FLEET.records(agents())
    assert {row.bytes for row in hot(records).prefixes} == {None}
    system, agent = hot(records, bytes_per_token=1_024.0).prefixes
    assert (system.bytes, agent.bytes) == (6 * SIZE * 1_024, 9 * SIZE * 1_024)
    table = TransferTable((("zone", Link(0.001, 1e9)),), Link(0.01, 1e9), 2_048, {"other": 1})
    start, state, *rest = records
    assert isinstance(state, State)
    router = Router.restore(state.snapshot)
    assert router.apply(TransferTableSet(table), state.at).ok
    known = [start, structs.replace(state, snapshot=router.snapshot()), *rest]
    assert hot(known).prefixes[0].bytes == 6 * SIZE * 2_048


def test_the_size_of_one_model_is_not_that_of_two() -> None:
    others = [Prompt(100.0 + number, (70, 71)) for number in range(2)]
    records = [
        structs.replace(record, model="other")
        if isinstance(record, Arrived) and record.at >= 100.0
        else record
        for record in FLEET.records(agents() + others)
    ]
    report = hot(records, bytes_per_token=1_024.0)
    assert {row.model for row in report.prefixes} == {"tiny", "other"}
    assert {row.bytes for row in report.prefixes} == {None}


def test_requests_outside_the_window_do_not_count() -> None:
    report = hot(FLEET.records(agents()), window=Window(11.0, 21.0))
    assert report.requests == 10
    assert report.prefixes[0].requests == 10


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)
)
def test_shared_tokens_add_up_to_those_of_all_prefixes_of_several_requests(
    prompts: list[list[int]],
) -> None:
    report = hot(
        FLEET.records([Prompt(1.0 + at, tuple(blocks)) for at, blocks in enumerate(prompts)])
    )
    counts = Counter(tuple(blocks[: end + 1]) for blocks in prompts for end in range(len(blocks)))
    expected = sum(number for number in counts.values() if number > 1) * SIZE
    assert sum(row.requests * row.own_tokens for row in report.prefixes) == expected
    assert {row.requests for row in report.prefixes} <= set(counts.values())
    assert all(row.parent in ("", *(p.prefix for p in report.prefixes)) for row in report.prefixes)
