"""Group "tokens": workers count the same tokens, and as many as the tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.experiments.canary import Chat, Reply
from dynctl.experiments.groups.group import Bench, TrialGroup, refusal, served_by
from dynctl.findings.runner import Check, Outcome, Passed, Skipped, Wrong, found

_TEXTS: Final = 8
_WORDS: Final = 40


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """``replies``: to texts of the same words in another order, so all have the same count.

    ``own``: the count of the first text by a tokenizer, ``by`` names that; None without one.
    """

    model: str
    replies: Sequence[Reply]
    own: int | None
    by: str

    @property
    def counts(self) -> list[int]:
        return [reply.prompt_tokens for reply in self.replies if reply.prompt_tokens is not None]


async def _gather(bench: Bench) -> TokenFacts:
    model = bench.subject.model
    texts = bench.prompts.reordered(_WORDS, _TEXTS)
    replies = await bench.client.chats(*map(bench.chat, texts))
    if bench.subject.count is not None:
        return TokenFacts(model, replies, bench.subject.count((texts[0],)), "the tokenizer here")
    counted = await bench.client.token_count(Chat(model, (texts[0],)))
    return TokenFacts(model, replies, counted, "POST /tokenize")


def _usage(facts: TokenFacts) -> Outcome:
    answered = [reply for reply in facts.replies if reply.answered]
    missing = [reply for reply in answered if reply.prompt_tokens is None]
    if not answered:
        return refusal(facts.replies) or Skipped("no reply")
    if missing:
        return Wrong((found(facts.model, missing=str(len(missing)), replies=str(len(answered))),))
    return Passed(f"{len(answered)} replies")


def _same_count(facts: TokenFacts) -> Outcome:
    if len(facts.counts) < 2:
        return refusal(facts.replies) or Skipped("no reply has usage.prompt_tokens")
    counts = Counter(facts.counts).most_common()
    if len(counts) == 1:
        tokens = f"{counts[0][0]} tokens in {len(facts.counts)} replies"
        return Passed(tokens + served_by(facts.replies))
    listed = ", ".join(f"{count} tokens in {replies}" for count, replies in counts)
    return Wrong((found(facts.model, listed=listed, replies=str(len(facts.counts))),))


def _expected_count(facts: TokenFacts) -> Outcome:
    if facts.own is None:
        return Skipped("no tokenizer: the server has no POST /tokenize (use --model-path DIR)")
    if not facts.counts:
        return refusal(facts.replies) or Skipped("no reply has usage.prompt_tokens")
    if facts.own in facts.counts:
        return Passed(f"{facts.own} tokens by {facts.by}")
    return Wrong(
        (
            found(
                facts.model,
                reported=str(facts.counts[0]),
                counted=str(facts.own),
                by=facts.by,
            ),
        )
    )


TOKENS: Final = TrialGroup(
    "tokens",
    "tokens",
    requests=_TEXTS,
    generated=_TEXTS,
    gather=_gather,
    checks=(
        Check("DYE0201", _usage),
        Check("DYE0202", _same_count),
        Check("DYE0203", _expected_count),
    ),
)
