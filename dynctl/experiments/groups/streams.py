"""Group "streams": events come as they are generated, end properly, and end when a client goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Final

from dynctl.experiments.canary import Chat, Reply
from dynctl.experiments.groups.group import Bench, TrialGroup, refusal, running_requests
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found

_LONG: Final = 32
_SHORT: Final = 1
_PAIRS: Final = 3
_MOST_PAIRS: Final = 5
"""Where a short answer waited, its pair shows nothing, and a busy client sees events late: so many
are sent at most."""
_WORDS: Final = 24
_SHORTEST_S: Final = 0.05
"""Generating the long answer must take so much longer than the short one to show a buffer."""
_CANCEL_LASTS_S: Final = 3.0
"""A cancelled answer must have so long to go, or its end proves nothing."""
_MOST_CANCELLED: Final = 2048
"""Its tokens, at most; few of them are generated where the cancel is seen."""
_FREED_S: Final = 1.0
_STEP_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class CancelFacts:
    """Running requests by ``gauge``: before the stream, while it ran, and later.

    ``after``: one value for each 0.1 s after the cancel, up to the first that is as before.
    """

    gauge: str = ""
    before: float = 0.0
    during: float = 0.0
    after: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """``short`` and ``long``: streams of 1 and of 32 tokens."""

    model: str
    short: Sequence[Reply]
    long: Sequence[Reply]
    cancel: CancelFacts | Skipped

    @property
    def per_token(self) -> float:
        """Seconds for one token of the long streams, as the client sees their ends."""
        extra = median(r.seconds for r in self.long) - median(r.seconds for r in self.short)
        return max(0.0, extra) / (_LONG - _SHORT)

    @property
    def telling(self) -> Sequence[tuple[Reply, float]]:
        """The long streams that took longer than their short one, and by how many seconds."""
        pairs = zip(self.short, self.long, strict=True)
        extras = [(long, long.seconds - short.seconds) for short, long in pairs]
        return [(long, extra) for long, extra in extras if extra >= _SHORTEST_S]

    @property
    def held(self) -> Sequence[Reply]:
        """The telling streams whose events came together at their end."""
        if not self.telling:
            return ()
        extra = median(extra for _, extra in self.telling)
        return [long for long, _ in self.telling if _came_together(long, extra)]

    @property
    def clear(self) -> bool:
        """Whether enough streams are telling, and all or none of them were held back. Beside three
        held streams one other stream may differ: the client read its events late."""
        held, telling = len(self.held), len(self.telling)
        return telling >= _PAIRS and (not held or held >= max(_PAIRS, telling - 1))


def _came_together(long: Reply, extra: float) -> bool:
    """Whether the events of a stream, generated for ``extra`` seconds, came together at its end.

    A stream that is not held back has its first event when one token is generated. A busy client
    makes the longest time between two events longer, so this time does not count; but the first
    event must come in the second half of the generation.
    """
    times = (*long.events, long.seconds)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return sum(gaps) < extra / 2 and sum(gaps) - max(gaps) < extra / 4


async def _gather(bench: Bench) -> StreamFacts:
    model = bench.subject.model
    short: list[Reply] = []
    long: list[Reply] = []
    exactly = True
    facts = StreamFacts(model, short, long, Skipped("no stream was answered"))
    while _shows_too_little(facts):
        # One after the other: what streams share would be measured otherwise.
        for tokens, replies in ((_SHORT, short), (_LONG, long)):
            chat = Chat(model, (bench.prompts.fresh(_WORDS),), tokens, stream=True, exactly=exactly)
            reply = await bench.client.chat(chat)
            if reply.status in (400, 422) and exactly:
                exactly = False  # the server refuses the fields with which an engine goes on
                reply = await bench.client.chat(replace(chat, exactly=False))
            replies.append(reply)
    if refusal((*short, *long)) is not None:
        return facts
    return replace(facts, cancel=await _cancel(bench, facts.per_token, exactly=exactly))


def _shows_too_little(facts: StreamFacts) -> bool:
    """Whether one more pair can show more. No answer is long enough where none of the first is."""
    pairs = len(facts.long)
    if pairs < _PAIRS:
        return True
    return (
        pairs < _MOST_PAIRS and not refusal(facts.long) and bool(facts.telling) and not facts.clear
    )


async def _cancel(bench: Bench, per_token: float, *, exactly: bool) -> CancelFacts | Skipped:
    context = bench.subject.context
    most = _MOST_CANCELLED if context is None else min(_MOST_CANCELLED, context // 2)
    lasts = per_token * most
    if lasts < _CANCEL_LASTS_S:
        return Skipped(f"an answer of {most:,} tokens lasts {lasts:.1f} s here: too short")
    tokens = min(most, ceil(2 * _CANCEL_LASTS_S / per_token))
    gauge, before = await running_requests(bench.client)
    if not gauge:
        return Skipped("GET /metrics has no gauge of running requests", unread=True)
    if before:
        return Skipped(f"{gauge} is {before:g} before the test: others use this server")
    text = bench.prompts.fresh(_WORDS)
    chat = Chat(bench.subject.model, (text,), tokens, stream=True, exactly=exactly)
    during = await bench.client.cancel_stream(chat, lambda: running_requests(bench.client))
    if during is None:
        return Skipped("the stream to be cancelled had no event", unread=True)
    after: list[float] = []
    for _ in range(round(_CANCEL_LASTS_S / _STEP_S)):
        after.append((await running_requests(bench.client))[1])
        if after[-1] <= before:
            break
        await bench.pause(_STEP_S)
    return CancelFacts(gauge, before, during[1], after)


def _incremental(facts: StreamFacts) -> Outcome:
    if refused := refusal((*facts.short, *facts.long)):
        return refused
    telling = facts.telling
    if len(telling) < _PAIRS:
        extra = median(long.seconds for long in facts.long)
        extra -= median(short.seconds for short in facts.short)
        return Skipped(f"{_LONG} tokens take {extra * 1e3:.0f} ms longer than 1: too short to see")
    held = facts.held
    first = median(long.events[0] for long, _ in telling)
    whole = median(long.seconds for long, _ in telling)
    if held and facts.clear:
        return Wrong((found(facts.model, first=f"after {first:.2f} s", whole=f"{whole:.2f} s"),))
    if held:
        return Skipped(f"{len(held)} of {len(telling)} streams came at once, the others did not")
    return Passed(f"first event after {first:.2f} s, the last after {whole:.2f} s")


def _ends(facts: StreamFacts) -> Outcome:
    replies = (*facts.short, *facts.long)
    begun = [reply for reply in replies if reply.status == 200]
    broken = [reply for reply in begun if reply.problem or not reply.done]
    if broken:
        problem = broken[0].problem or "no [DONE]"
        count, streams = str(len(broken)), str(len(begun))
        return Wrong((found(facts.model, count=count, streams=streams, problem=problem),))
    return refusal(replies) or Passed(f"{len(replies)} streams")


def _in_order(facts: StreamFacts) -> Outcome:
    replies = (*facts.short, *facts.long)
    if refused := refusal(replies):
        return refused
    problems = [problem for problem in map(_disorder, replies) if problem]
    if problems:
        count, streams = str(len(problems)), str(len(replies))
        return Wrong((found(facts.model, count=count, streams=streams, problem=problems[0]),))
    return Passed(f"{len(replies)} streams")


def _disorder(reply: Reply) -> str:
    """What is wrong with the events of a stream; empty if nothing."""
    tokens = reply.completion_tokens
    # A text has at least one token. One more event may bring what was held back at the end.
    if tokens is not None and reply.texts > tokens + 1:
        return f"{reply.texts} events with text for {tokens} tokens"
    return reply.disorder


def _usage(facts: StreamFacts) -> Outcome:
    replies = (*facts.short, *facts.long)
    if refused := refusal(replies):
        return refused
    without = [reply for reply in replies if reply.prompt_tokens is None]
    if without:
        return Wrong((found(facts.model, count=str(len(without)), streams=str(len(replies))),))
    return Passed(f"{len(replies)} streams")


def _frees(facts: StreamFacts) -> Outcome:
    cancel = facts.cancel
    if isinstance(cancel, Skipped):
        return cancel
    if cancel.during <= cancel.before:
        return Skipped(f"{cancel.gauge} did not show the request while it ran")
    freed = [number for number, value in enumerate(cancel.after) if value <= cancel.before]
    if freed and freed[0] * _STEP_S <= _FREED_S:
        return Passed(f"within {(freed[0] + 1) * _STEP_S:.1f} s ({cancel.gauge})")
    if not freed and set(cancel.after) != {cancel.before + 1}:
        return Skipped(f"{cancel.gauge} changed meanwhile: others use this server")
    took = f"after {freed[0] * _STEP_S:.1f} s" if freed else f"not within {_CANCEL_LASTS_S:g} s"
    return Wrong((found(facts.model, gauge=cancel.gauge, took=took),))


STREAMS: Final = TrialGroup(
    "streams",
    "streams",
    requests=2 * _MOST_PAIRS + 2,
    generated=_MOST_PAIRS * (_LONG + _SHORT) + _LONG + _MOST_CANCELLED,
    gather=_gather,
    checks=(
        Check("DYE0301", _incremental),
        Check("DYE0302", _ends),
        Check("DYE0303", _usage),
        Check("DYE0304", _frees),
        Check("DYE0305", _in_order),
    ),
)
