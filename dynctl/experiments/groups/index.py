"""Group "truth of the index": engines reuse what the router expected, worker by worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.base.quantities import plural
from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.group import Bench, TrialGroup
from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, Wrong, found

_PROMPTS: Final = 8
_WORDS: Final = 200
_LEAST_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """One repeated prompt: tokens that the router expected ``worker`` to reuse, and those that the
    engine reported."""

    worker: str
    expected: int
    reused: int


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """``skipped``: why nothing could be compared. ``uncompared``: replies without a count or a
    decision."""

    compared: Sequence[Comparison]
    uncompared: int = 0
    skipped: Skipped | None = None

    def sums(self) -> Iterator[Comparison]:
        """The sums of each worker."""
        for worker in sorted({row.worker for row in self.compared}):
            rows = [row for row in self.compared if row.worker == worker]
            yield Comparison(worker, sum(r.expected for r in rows), sum(r.reused for r in rows))


async def _gather(bench: Bench) -> IndexFacts:
    if not bench.subject.shows_decisions:
        return IndexFacts((), skipped=bench.operator.unreadable("past decisions cannot be read"))
    texts = [bench.prompts.fresh(_WORDS) for _ in range(_PROMPTS)]
    await bench.client.chats(*map(bench.chat, texts))
    await bench.pause(bench.settle_s)
    replies = [await bench.client.chat(bench.chat(text)) for text in texts]
    if all(reply.cached_tokens is None for reply in replies):
        return IndexFacts((), len(texts))
    return await _compare(bench, replies)


async def _compare(bench: Bench, replies: Sequence[Reply]) -> IndexFacts:
    """Each reply beside what the router expected of it."""
    compared = []
    unknown = ""
    for reply in replies:
        expectation = await bench.client.expectation(reply)
        if expectation is None:
            continue
        if expectation.tokens is None:
            unknown = f"the router had no expectation: {expectation.unknown}"
            continue
        # vLLM leaves out a count of 0.
        reused = reply.cached_tokens or 0
        compared.append(Comparison(expectation.worker, expectation.tokens, reused))
    skipped = Skipped(unknown, unread=True) if unknown and not compared else None
    return IndexFacts(compared, len(replies) - len(compared), skipped)


def _nothing(facts: IndexFacts) -> Skipped | None:
    if facts.skipped is not None:
        return facts.skipped
    if not facts.compared:
        return Skipped(
            f"none of {facts.uncompared} replies has a count of cached tokens and a decision",
            unread=True,
        )
    return None


def _expected_is_reused(facts: IndexFacts) -> Outcome:
    missed = [row for row in facts.sums() if row.reused < _LEAST_SHARE * row.expected]
    return _nothing(facts) or _judged(facts, missed)


def _reused_is_expected(facts: IndexFacts) -> Outcome:
    unseen = [row for row in facts.sums() if row.expected < _LEAST_SHARE * row.reused]
    return _nothing(facts) or _judged(facts, unseen)


def _judged(facts: IndexFacts, wrong: Sequence[Comparison]) -> Outcome:
    if wrong:
        return Wrong(tuple(map(_found, wrong)))
    expected = sum(row.expected for row in facts.compared)
    reused = sum(row.reused for row in facts.compared)
    if not expected and not reused:
        return Skipped("nothing was expected and nothing was reused (DYE0401)")
    workers = plural(len({row.worker for row in facts.compared}), "worker")
    return Passed(f"{expected:,} tokens expected, {reused:,} reused, by {workers}")


def _found(row: Comparison) -> Found:
    return found(row.worker, expected=f"{row.expected:,}", reused=f"{row.reused:,}")


INDEX: Final = TrialGroup(
    "index",
    "truth of the index",
    requests=2 * _PROMPTS,
    generated=2 * _PROMPTS,
    gather=_gather,
    checks=(
        Check("DYE0501", _expected_is_reused),
        Check("DYE0502", _reused_is_expected),
    ),
)
