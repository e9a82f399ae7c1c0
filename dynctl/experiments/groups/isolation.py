"""Group "isolation": cache salts and adapters keep caches apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynctl.base.quantities import plural
from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.group import Bench, TrialGroup, refusal, served_by
from dynctl.experiments.groups.reuse import reused, unjudgeable
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found

_PROMPTS: Final = 3
_WORDS: Final = 200
_TRIES: Final = 4
_ADAPTER_PROMPTS: Final = 2
_MOST_REQUESTS: Final = _PROMPTS * (1 + 2 * _TRIES) + 2 * _ADAPTER_PROMPTS
_REFUSED: Final = frozenset({400, 403, 422})


@dataclass(frozen=True, slots=True)
class SaltedReplies:
    """One prompt: with a salt, with another one, with the first again."""

    first: Reply
    other: Reply
    same: Reply

    @property
    def at_one_place(self) -> bool:
        """Whether all three went to the same workers, as far as the router names them."""
        return self.first.place == self.other.place == self.same.place


@dataclass(frozen=True, slots=True)
class IsolationFacts:
    """``adapted``: the replies of ``model`` and of its ``adapter`` to the same prompts; none where
    the server lists no adapter of it."""

    model: str
    prompts: Sequence[SaltedReplies]
    adapter: str = ""
    adapted: Sequence[tuple[Reply, Reply]] = ()

    @property
    def replies(self) -> list[Reply]:
        return [reply for p in self.prompts for reply in (p.first, p.other, p.same)]


async def _gather(bench: Bench) -> IsolationFacts:
    model, rows = bench.subject.model, bench.subject.rows
    sent = [await _send_salted(bench) for _ in range(_PROMPTS)]
    adapters = [str(row["id"]) for row in rows if row.get("parent") == model]
    if not adapters:
        return IsolationFacts(model, sent)
    adapted = [await _send_to_adapter(bench, adapters[0]) for _ in range(_ADAPTER_PROMPTS)]
    return IsolationFacts(model, sent, adapters[0], adapted)


async def _send_salted(bench: Bench) -> SaltedReplies:
    text, salt = bench.prompts.fresh(_WORDS), bench.prompts.salt()
    first = await bench.client.chat(bench.chat(text, cache_salt=salt))
    await bench.pause(bench.settle_s)
    other = await _until_shown(bench, text, first, bench.prompts.salt)
    same = await _until_shown(bench, text, first, lambda: salt)
    return SaltedReplies(first, other, same)


async def _until_shown(bench: Bench, text: str, first: Reply, salt: Callable[[], str]) -> Reply:
    """The first of at most four replies, each with a salt of ``salt``, that is reused, or certainly
    comes from the workers of ``first``."""
    reply = await bench.client.chat(bench.chat(text, cache_salt=salt()))
    for _ in range(_TRIES - 1):
        if reused(reply) or _is_at(reply, first):
            break
        reply = await bench.client.chat(bench.chat(text, cache_salt=salt()))
    return reply


async def _send_to_adapter(bench: Bench, adapter: str) -> tuple[Reply, Reply]:
    """The replies of a model and of its adapter to the same prompt."""
    chat = bench.chat(bench.prompts.fresh(_WORDS))
    first = await bench.client.chat(chat)
    await bench.pause(bench.settle_s)
    return first, await bench.client.chat(replace(chat, model=adapter))


def _is_at(reply: Reply, first: Reply) -> bool:
    """Whether the replies name the same workers."""
    return reply.place == first.place != (None, None)


def _keeps_apart(facts: IsolationFacts) -> Outcome:
    refused = [reply for reply in facts.replies if reply.status in _REFUSED]
    if len(refused) == len(facts.replies):
        return Skipped(f"the server refuses cache_salt: {refused[0]}")
    if skipped := unjudgeable(facts.replies):
        return skipped
    shared = [prompt.other for prompt in facts.prompts if reused(prompt.other)]
    if shared:
        count = max(reply.cached_tokens or 0 for reply in shared)
        return Wrong(
            (
                found(
                    facts.model, shared=str(len(shared)), prompts=_count(facts), cached=f"{count:,}"
                ),
            )
        )
    # A prompt shows something where its blocks were where the other salt was sent.
    shown = [prompt for prompt in facts.prompts if reused(prompt.same) and prompt.at_one_place]
    if not shown:
        return Skipped("no prompt was reused with its own salt at the worker of the other salt")
    return Passed(f"{plural(len(shown), 'prompt')} with two salts each" + served_by(facts.replies))


def _same_salt_shares(facts: IsolationFacts) -> Outcome:
    if skipped := unjudgeable(facts.replies):
        return skipped
    known = [
        prompt.same
        for prompt in facts.prompts
        if reused(prompt.same) or prompt.same.place == prompt.first.place
    ]
    if not known:
        return Skipped("each repeat came from another worker than its prompt", unread=True)
    hits = sum(map(reused, known))
    if not hits:
        return Wrong((found(facts.model, prompts=str(len(known))),))
    return Passed(f"{hits} of {len(known)} prompts")


def _adapter_shares_nothing(facts: IsolationFacts) -> Outcome:
    if not facts.adapter:
        return Skipped(f"the server lists no adapter of {facts.model}")
    replies = [reply for pair in facts.adapted for reply in pair]
    if skipped := refusal(replies) or unjudgeable(facts.replies):
        return skipped
    shared = [reply for _, reply in facts.adapted if reused(reply)]
    if shared:
        wrong = found(
            facts.adapter,
            base=facts.model,
            shared=str(len(shared)),
            prompts=str(len(facts.adapted)),
            cached=f"{max(reply.cached_tokens or 0 for reply in shared):,}",
        )
        return Wrong((wrong,))
    shown = [reply for first, reply in facts.adapted if first.place == reply.place]
    if not shown:
        return Skipped("the adapter answered from other workers than its base model", unread=True)
    return Passed(f"{len(shown)} prompts of {facts.model} at {facts.adapter}")


def _count(facts: IsolationFacts) -> str:
    return str(len(facts.prompts))


ISOLATION: Final = TrialGroup(
    "isolation",
    "isolation",
    requests=_MOST_REQUESTS,
    generated=_MOST_REQUESTS,
    gather=_gather,
    checks=(
        Check("DYE0601", _keeps_apart),
        Check("DYE0602", _same_salt_shares),
        Check("DYE0603", _adapter_shares_nothing),
    ),
)
