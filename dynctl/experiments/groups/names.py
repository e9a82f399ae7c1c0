"""Group "models and names": every name that the server lists is answered, on every try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.experiments.canary import Chat, Reply
from dynctl.experiments.groups.group import Bench, TrialGroup
from dynctl.findings.runner import Check, Found, Outcome, Passed, Wrong, found, outcome

_MOST_NAMES: Final = 8
_TRIES: Final = 6
"""For each name. A name that half of the workers serve is found with 97 % (1 - 2 / 2**6)."""
_WORDS: Final = 12


@dataclass(frozen=True, slots=True)
class NamesFacts:
    """``listed``: the reply to GET /v1/models, ``names`` how many it lists.

    ``replies``: name -> its replies. The tested model is one of the names, listed or not.
    ``untried``: how many more names are listed.
    """

    url: str
    listed: Reply
    names: int
    replies: Mapping[str, Sequence[Reply]]
    untried: int


async def _gather(bench: Bench) -> NamesFacts:
    subject = bench.subject
    names = list(dict.fromkeys(str(row["id"]) for row in subject.rows))
    listed = len(names)
    if subject.model in names:
        names.remove(subject.model)
    names.insert(0, subject.model)
    replies = {}
    for name in names[:_MOST_NAMES]:
        chats = [Chat(name, (bench.prompts.fresh(_WORDS),)) for _ in range(_TRIES)]
        replies[name] = await bench.client.chats(*chats)
    untried = max(0, len(names) - _MOST_NAMES)
    return NamesFacts(bench.client.url, subject.listed, listed, replies, untried)


def _lists_models(facts: NamesFacts) -> Outcome:
    if not facts.listed.answered:
        return Wrong((found(facts.url, reply=str(facts.listed)),))
    return Passed(f"{facts.names} listed")


def _names_answer(facts: NamesFacts) -> Outcome:
    silent = [
        found(name, tries=str(len(replies)), reply=str(replies[0]))
        for name, replies in facts.replies.items()
        if not any(reply.answered for reply in replies)
    ]
    return outcome(silent, summary=_summary(facts))


def _answers_each_time(facts: NamesFacts) -> Outcome:
    return outcome(
        [
            _sometimes(name, replies)
            for name, replies in facts.replies.items()
            if 0 < sum(reply.answered for reply in replies) < len(replies)
        ],
        summary=_summary(facts),
    )


def _sometimes(name: str, replies: Sequence[Reply]) -> Found:
    failed = [reply for reply in replies if not reply.answered]
    return found(name, failed=str(len(failed)), tries=str(len(replies)), reply=str(failed[0]))


def _summary(facts: NamesFacts) -> str:
    names = "1 name" if len(facts.replies) == 1 else f"{len(facts.replies)} names"
    more = f", {facts.untried} more not tried" if facts.untried else ""
    return f"{names}, {_TRIES} requests each{more}"


NAMES: Final = TrialGroup(
    "names",
    "models and names",
    requests=_MOST_NAMES * _TRIES,
    generated=_MOST_NAMES * _TRIES,
    gather=_gather,
    checks=(
        Check("DYE0101", _lists_models),
        Check("DYE0102", _names_answer),
        Check("DYE0103", _answers_each_time),
    ),
)
