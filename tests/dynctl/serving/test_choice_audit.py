"""Choices of a live Dynamo against predictions: hits, likely causes, what cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dynctl.documents.audit import AuditRow
from dynctl.serving.dynamo import choice_audit as audit_module
from dynctl.serving.dynamo.choice_audit import (
    NO_CHOICE,
    NO_EVENT,
    NO_PREFILL,
    NO_PROMPT,
    NOT_COUNTED,
    UNKNOWN_WORKER,
    ChoiceAudit,
)
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequenceFreed
from dynctl.wire.dynamo.frontend_log import SelectedLine
from router_core import IndexMarked, Router
from tests.router_core.fleet import active, apply_all, request, router, stored, worker

PROMPT = request(70)


def added(to: int, name: str = "r", *, cached: int = 0, **more: Any) -> SequenceAdded:
    """A router gave the prompt to a worker that has ``cached`` of its 4 blocks."""
    hashes = more.pop("hashes", tuple(PROMPT.sequence_hashes))
    return SequenceAdded(name, to, 0, hashes, 70 - cached * 16, 77, **more)


def two(cached: int = 3, load: int = 0, **values: Any) -> Router:
    """w1 has ``cached`` blocks of the prompt and ``load`` blocks of others; w2 nothing."""
    made = router(worker(1), worker(2), **values)
    for number in (1, 2):
        apply_all(made, IndexMarked(number, 0, "current"))
    if cached:
        apply_all(made, stored(1, cached))
    if load:
        apply_all(made, active(1, "other", blocks=load))
    return made


def loaded() -> Router:
    """w1 has the prompt and no load, so no weight makes w2 cheaper."""
    made = two()
    apply_all(made, active(2, "other", prefill_tokens=90, blocks=9))
    return made


def judged(made: Router, *events: Any) -> tuple[dict[str, AuditRow], dict[str, int]]:
    audit = ChoiceAudit(made)
    for event in events:
        audit.take_sequence(event)
    return {row.worker: row for row in audit.rows()}, dict(audit.skipped)


def test_the_predicted_worker_is_a_hit_and_another_one_a_miss():
    rows, skipped = judged(two(), added(1, "a", cached=3), added(2, "b"))
    assert (rows["w1"].requests, rows["w1"].hits) == (1, 1)
    assert (rows["w2"].requests, rows["w2"].hits) == (1, 0)
    assert skipped == {}


def test_every_equally_cheap_worker_is_a_hit():
    rows, _ = judged(two(cached=0), added(1, "a"), added(2, "b"))
    assert [row.hits for row in rows.values()] == [1, 1]


@pytest.mark.parametrize(
    ("made", "chosen", "cause"),
    [
        (two(cached=3, load=2), 2, "settings"),
        (loaded(), 2, "load"),
    ],
    ids=["less credit explains it", "nothing but load explains it"],
)
def test_a_miss_has_a_likely_cause(made: Router, chosen: int, cause: str):
    rows, _ = judged(made, added(chosen))
    assert rows[f"w{chosen}"].causes == {cause: 1}


def test_an_index_that_is_not_current_comes_first():
    made = two()
    apply_all(made, IndexMarked(2, 0, "gapped"))
    rows, _ = judged(made, added(2))
    assert rows["w2"].causes == {"index": 1}


def test_a_worker_that_is_no_candidate_is_named():
    made = two(active_prefill_tokens_threshold=10)
    apply_all(made, active(2, "long", prefill_tokens=500))
    rows, _ = judged(made, added(2))
    assert rows["w2"].causes == {"candidates": 1}


def test_decode_is_predicted_for_the_prefill_worker_that_was_chosen():
    """Two zones, required: prefill 2 is in zone b, so decode 4 is the only one there but 5."""
    made = router(
        worker(1, role="prefill", zone="a", policy="required"),
        worker(2, role="prefill", zone="b", policy="required"),
        worker(3, role="decode", zone="a"),
        worker(4, role="decode", zone="b"),
        worker(5, role="decode", zone="b"),
        decode_capacity_guard=False,
    )
    apply_all(made, active(5, "busy", stage="decode", blocks=9))
    prefill = added(2, "a", hashes=None)
    rows, skipped = judged(made, prefill, added(4, "a"), added(3, "b"))
    assert (rows["w4"].requests, rows["w4"].hits) == (1, 1)
    assert skipped == {NO_PROMPT: 1, NO_PREFILL: 1}
    rows, _ = judged(made, prefill, added(5, "a"))
    assert rows["w5"].hits == 0
    rows, _ = judged(made, prefill, added(3, "a"))
    assert rows["w3"].causes == {"candidates": 1}
    rows, skipped = judged(made, added(1, "a", hashes=None), added(3, "a"))
    assert (rows, skipped) == ({}, {NO_PROMPT: 1, NO_CHOICE: 1})


def test_what_cannot_be_compared_is_counted_by_its_reason():
    rows, skipped = judged(two(), added(9), added(1, hashes=None), SequenceFreed("r", 1, 0, 77))
    assert (rows, skipped) == ({}, {UNKNOWN_WORKER: 1, NOT_COUNTED: 1})
    rows, skipped = judged(router(worker(1)), added(1))
    assert (rows, skipped) == ({}, {NO_CHOICE: 1})


def line(request_id: str, worker_id: int, cost: float) -> SelectedLine:
    return SelectedLine(request_id, worker_id, 0, "decode", cost, None, None)


def test_the_tokens_that_the_frontend_believed_cached_are_in_the_event():
    rows, _ = judged(two(cached=3), added(1, "a", cached=2), added(2, "b"))
    assert (rows["w1"].predicted_tokens, rows["w1"].reported_tokens) == (48, 32)
    assert (rows["w2"].predicted_tokens, rows["w2"].reported_tokens) == (0, 0)
    untracked, _ = judged(two(), replace(added(1), prefill_tokens=0, track_prefill_tokens=False))
    assert untracked["w1"].hits == 1
    assert untracked["w1"].reported_tokens == 0


def test_a_log_line_adds_the_cost_that_the_frontend_computed():
    """70 tokens: 4.375 blocks to compute less 3 cached, and 4 complete blocks to decode."""
    made = two()
    audit = ChoiceAudit(made)
    for name in ("a", "b"):
        audit.take_sequence(added(1, name, cached=3))
    audit.take_line(line("a", 1, 5.375))
    audit.take_line(line("b", 1, 6.375))
    [row] = audit.rows()
    assert (row.costs, row.same_costs) == (2, 1)
    audit.take_line(line("unseen", 1, 2.0))
    assert dict(audit.skipped) == {NO_EVENT: 1}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_module, "KEPT", 3)
    audit = ChoiceAudit(two())
    for number in range(10):
        audit.take_sequence(added(1, f"r{number}"))
    assert len(audit._expected) == 3
