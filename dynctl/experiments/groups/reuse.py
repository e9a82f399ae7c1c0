"""Group "reuse": a prompt that was sent before is found in a cache, a longer one and one with the
same beginning too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.group import (
    Bench,
    TrialGroup,
    count_running,
    first_metric,
    refusal,
    served_by,
)
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found

_PROMPTS: Final = 4
_WORDS: Final = 200
_MORE_WORDS: Final = 2400
"""Of a further prompt where none of the others was reused: blocks can have 784 tokens and more."""
_TURN_WORDS: Final = 40
_TRIES: Final = 3
_MOST_REQUESTS: Final = (_PROMPTS + 1) * (1 + 2 * _TRIES) + 2 * _PROMPTS * _TRIES
_BRANCHES: Final = 2
_LEAST_BRANCHES: Final = 2
"""A check of fewer could be wrong by chance."""
_LEAST_SHARE: Final = 0.5
"""Of the prompt's tokens. What blocks and a sliding window leave out is less at these lengths."""
NOT_REPORTED: Final = (
    "no reply has usage.prompt_tokens_details.cached_tokens (vLLM: --enable-prompt-tokens-details, "
    "SGLang: --enable-cache-report), or nothing is reused: vLLM leaves out 0"
)
_HITS: Final = ("vllm:prefix_cache_hits_total",)
_NO_REUSE: Final = Skipped("nothing was reused (DYE0401), or only in large blocks")
_BUSY: Final = "other requests run here, and their load may decide against a cache"
_PERHAPS_BUSY: Final = (
    "the router does not read caches, or load decided: nothing shows whether other requests run"
)
OTHER_DECODE: Final = Skipped(
    "each repeat had another decode worker, whose cache the count is of", unread=True
)


@dataclass(frozen=True, slots=True)
class SentTwice:
    """The replies to one prompt: at first, again, and with two more turns. ``others``: requests of
    other clients that ran before the repeat, None where nothing shows them. ``branched``: to
    prompts that only begin as the first one, until one was reused, at most two. vLLM keeps for
    layers with a sliding window the end of a prompt, and where two prompts part, so that the third
    one is reused."""

    first: Reply
    again: Reply
    longer: Reply
    others: int | None = None
    branched: Sequence[Reply] = ()

    @property
    def replies(self) -> tuple[Reply, Reply, Reply]:
        return self.first, self.again, self.longer

    @property
    def known(self) -> list[Reply]:
        """The later replies that show whether the first one's blocks were reused."""
        later = (self.again, self.longer)
        return [reply for reply in later if reused(reply) or shows_miss(self.first, reply)]


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """``prompts``: of about 200 tokens. ``large``: one of 2,400, sent only if none was reused.

    ``hits``: an engine's counter of reused tokens and how much it grew; empty: not known.
    """

    model: str
    prompts: Sequence[SentTwice]
    large: SentTwice | None = None
    hits: tuple[str, float] = ("", 0.0)

    @property
    def others(self) -> int | None:
        """The most requests of other clients; None where nothing shows them."""
        known = [prompt.others for prompt in self.prompts if prompt.others is not None]
        return max(known, default=None)

    @property
    def replies(self) -> list[Reply]:
        """Those to the prompts of about 200 tokens: the large one may be beyond the context."""
        return [reply for prompt in self.prompts for reply in prompt.replies]


def reused(reply: Reply) -> bool:
    """Whether the reply reports at least half of its prompt as cached.

    A reply without the field counts as none: vLLM leaves the field out where it is 0.
    """
    return (reply.cached_tokens or 0) >= _LEAST_SHARE * (reply.prompt_tokens or 1)


def shows_miss(first: Reply, later: Reply) -> bool:
    """Whether a low count of ``later`` means that the blocks of ``first`` were not found.

    A dynctl frontend reports what the prefill worker reused. From others the count may be that of
    the decode worker: where only that one changed, the prefill worker may have found them.
    """
    if later.decision:
        return True
    same_prefill = first.prefill is not None and later.prefill == first.prefill
    return not (same_prefill and later.decode not in (first.decode, None, later.prefill))


def unjudgeable(replies: Sequence[Reply]) -> Skipped | None:
    """Why reuse cannot be judged from ``replies``; None if it can."""
    if refused := refusal(replies):
        return refused
    if all(reply.cached_tokens is None for reply in replies):
        return Skipped(NOT_REPORTED, unread=True)
    return None


async def _gather(bench: Bench) -> ReuseFacts:
    model = bench.subject.model
    counter, before = await first_metric(bench.client, _HITS)
    # One after the other: the load of the others would decide where the second request goes.
    texts = [bench.prompts.fresh(_WORDS) for _ in range(_PROMPTS)]
    sent = [await _send_twice(bench, text) for text in texts]
    _, after = await first_metric(bench.client, _HITS)
    facts = ReuseFacts(model, sent, hits=(counter, after - before))
    again = [prompt.again for prompt in sent]
    if refusal(facts.replies) is not None:
        return facts
    if any(map(reused, again)):
        pairs = zip(texts, sent, strict=True)
        return replace(facts, prompts=[await _branch(bench, text, twice) for text, twice in pairs])
    return replace(facts, large=await _send_twice(bench, bench.prompts.fresh(_MORE_WORDS)))


async def _branch(bench: Bench, text: str, twice: SentTwice) -> SentTwice:
    """With the replies to prompts that only begin as ``text``."""
    branched: list[Reply] = []
    while reused(twice.again) and len(branched) < _BRANCHES and not any(map(reused, branched)):
        prompt = bench.prompts.branched(text, _TURN_WORDS)
        branched.append(await _until_shown(bench, twice.first, prompt))
    return replace(twice, branched=[row for row in branched if _is_shown(twice.first, row)])


def _is_shown(first: Reply, later: Reply) -> bool:
    return reused(later) or (later.answered and shows_miss(first, later))


async def _send_twice(bench: Bench, text: str) -> SentTwice:
    answer = "word"
    first = await bench.client.chat(bench.chat(text))
    await bench.pause(bench.settle_s)
    running = await count_running(bench)
    again = await _until_shown(bench, first, text)
    longer = await _until_shown(bench, first, text, answer, bench.prompts.fresh(_TURN_WORDS))
    return SentTwice(first, again, longer, None if running is None else round(running))


async def _until_shown(bench: Bench, first: Reply, *turns: str) -> Reply:
    """The first of at most three replies that shows whether the blocks of ``first`` are found."""
    reply = await bench.client.chat(bench.chat(*turns))
    for _ in range(_TRIES - 1):
        if reused(reply) or shows_miss(first, reply):
            break
        reply = await bench.client.chat(bench.chat(*turns))
    return reply


def _reuses(facts: ReuseFacts) -> Outcome:
    if skipped := unjudgeable(facts.replies):
        return _counted_none(facts) or skipped
    repeats = _repeats(facts)
    if hits := [reply for reply in repeats if reused(reply)]:
        return Passed(_tokens(hits) + served_by(hits))
    if facts.large is not None and any(map(reused, facts.large.known)):
        return Passed(f"{_tokens(facts.large.known)}; nothing of shorter prompts")
    if not repeats:
        return OTHER_DECODE
    return Wrong((found(facts.model, repeats=str(len(repeats)), tokens=_tokens(repeats)),))


def _counted_none(facts: ReuseFacts) -> Wrong | None:
    """What the engine's own counter shows where the replies report nothing: vLLM leaves out 0."""
    counter, grew = facts.hits
    if not counter or grew or refusal(facts.replies) is not None:
        return None
    repeats = str(2 * len(facts.prompts))
    return Wrong((found(facts.model, repeats=repeats, tokens=f"{counter} did not grow"),))


def _reuses_each_time(facts: ReuseFacts) -> Outcome:
    if skipped := unjudgeable(facts.replies):
        return skipped
    repeats = _repeats(facts)
    hits = sum(map(reused, repeats))
    if not hits:
        return _NO_REUSE
    again = [prompt.again for prompt in facts.prompts if prompt.again in prompt.known]
    if hits < len(repeats) and facts.others:
        return Passed(f"{hits} of {len(repeats)} repeats: {_BUSY}")
    if hits < len(repeats) and not all(map(reused, again)):
        if facts.others is None:
            return Skipped(f"{hits} of {len(repeats)} repeats: {_PERHAPS_BUSY}", unread=True)
        return Wrong((found(facts.model, hits=str(hits), repeats=str(len(repeats))),))
    return Passed(f"{hits} of {len(repeats)} repeats" + served_by(repeats))


def _first_is_new(facts: ReuseFacts) -> Outcome:
    if skipped := unjudgeable(facts.replies):
        return skipped
    firsts = [prompt.first for prompt in facts.prompts]
    wrong = [reply for reply in firsts if reused(reply)]
    if wrong:
        return Wrong((found(facts.model, count=str(len(wrong)), tokens=_tokens(wrong)),))
    return Passed(_tokens(firsts))


def _reuses_earlier_turns(facts: ReuseFacts) -> Outcome:
    if skipped := unjudgeable(facts.replies):
        return skipped
    if not any(map(reused, _repeats(facts))):
        return _NO_REUSE
    longer = [prompt.longer for prompt in facts.prompts if prompt.longer in prompt.known]
    if not longer:
        return OTHER_DECODE
    hits = sum(map(reused, longer))
    if hits:
        return Passed(f"{hits} of {len(longer)} conversations: {_tokens(longer)}")
    if facts.others:
        return Skipped(_BUSY, unread=True)
    if not all(reused(prompt.again) for prompt in facts.prompts):
        return Skipped("prompts are not reused each time they are sent (DYE0402)")
    return Wrong((found(facts.model, prompts=str(len(longer)), tokens=_tokens(longer)),))


def _reuses_beginnings(facts: ReuseFacts) -> Outcome:
    if skipped := unjudgeable(facts.replies):
        return skipped
    if not any(map(reused, _repeats(facts))):
        return _NO_REUSE
    branched = [prompt.branched[-1] for prompt in facts.prompts if prompt.branched]
    hits = sum(map(reused, branched))
    if hits:
        third = any(len(prompt.branched) == _BRANCHES for prompt in facts.prompts)
        note = ", some only from the third prompt on" if third else ""
        return Passed(f"{hits} of {len(branched)} prompts: {_tokens(branched)}{note}")
    if len(branched) < _LEAST_BRANCHES:
        return Skipped("too few prompts were reused when they were sent again (DYE0402)")
    if facts.others is None or facts.others:
        return Skipped(_PERHAPS_BUSY if facts.others is None else _BUSY, unread=True)
    return Wrong((found(facts.model, prompts=str(len(branched)), tokens=_tokens(branched)),))


def _repeats(facts: ReuseFacts) -> list[Reply]:
    """The later replies of all prompts that show reuse or its absence."""
    return [reply for prompt in facts.prompts for reply in prompt.known]


def _tokens(replies: Sequence[Reply]) -> str:
    """For example ``592 of 611 tokens``; of several replies the least and the most."""
    cached = sorted(reply.cached_tokens or 0 for reply in replies)
    prompt = max(reply.prompt_tokens or 0 for reply in replies)
    least, most = cached[0], cached[-1]
    many = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{many} of {prompt:,} tokens cached"


REUSE: Final = TrialGroup(
    "reuse",
    "reuse",
    requests=_MOST_REQUESTS,
    generated=_MOST_REQUESTS,
    gather=_gather,
    checks=(
        Check("DYE0401", _reuses),
        Check("DYE0402", _reuses_each_time),
        Check("DYE0403", _first_is_new),
        Check("DYE0404", _reuses_earlier_turns),
        Check("DYE0405", _reuses_beginnings),
    ),
)
