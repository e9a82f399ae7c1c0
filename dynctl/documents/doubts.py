"""Doubts about an answer: what is unknown, and whether it can change the winner.

A source names each input that it does not know, with the range of its values where there is one.
:func:`judge` tries the ranges on the answer (``router_core.sensitivity``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from dynctl.base.quantities import chance
from dynctl.findings.catalogue import doubts as codes
from router_core import (
    Consequence,
    LoadRange,
    PlanQuestion,
    Unknown,
    certain,
    consequences,
)

#: Names in one sentence; more are counted.
MOST_NAMED = 3
_UNCHANGED = "this cannot change the answer"
_TOGETHER = "together with the other doubts another worker can win"


class Varies(msgspec.Struct, frozen=True, omit_defaults=True):
    """The range of an unknown input, as in ``router_core.Unknown``; ``workers``: by name."""

    settings: dict[str, list[Any]] = {}
    load: LoadRange = "known"
    copies: int = 1
    overlap: bool = False
    turn: bool = False
    workers: list[str] | None = None


class Doubt(msgspec.Struct, frozen=True):
    """One input of an answer that is unknown, or one behaviour that is not modelled.

    ``code``: DYR07xx. ``what`` is unknown, its ``effect`` on the answer, how to ``resolve`` it.
    ``matters``: it can change the winner; the other doubts are listed all the same. ``varies``: the
    range that was tried; without one a doubt matters unless its source knows better.
    """

    code: str
    what: str
    effect: str
    resolve: str
    matters: bool = True
    varies: Varies | None = None


def doubt(
    code: str, *, matters: bool = True, varies: Varies | None = None, **values: object
) -> Doubt:
    """The doubt ``code`` of findings/doubts.toml with its named values filled in.

    Raises KeyError for an unknown code and ValueError where the values are not those of the code.
    """
    return Doubt(code, *codes()[code].texts("", values), matters, varies)


def distinct(doubts: Iterable[Doubt]) -> list[Doubt]:
    """The doubts in their order, each code with one text once."""
    return list({(doubt.code, doubt.what): doubt for doubt in doubts}.values())


def judge(doubts: Iterable[Doubt], question: PlanQuestion) -> list[Doubt]:
    """The doubts with what their ranges do to this answer, those that matter first."""
    judged: list[Doubt] = []
    ranges: list[Unknown] = []
    for doubt in distinct(doubts):
        unknown = _unknown(doubt.varies, question)
        if unknown is not None:
            ranges.append(unknown)
            doubt = _with_effect(doubt, list(consequences(question, unknown)), question)
        judged.append(doubt)
    if ranges and not any(doubt.matters for doubt in judged) and not certain(question, ranges):
        judged = [_matters_together(doubt) for doubt in judged]
    return sorted(judged, key=lambda doubt: not doubt.matters)


def _matters_together(doubt: Doubt) -> Doubt:
    if doubt.varies is None:
        return doubt
    return msgspec.structs.replace(doubt, matters=True, effect=_TOGETHER)


def without_settings(doubts: Iterable[Doubt], known: Iterable[str]) -> Iterator[Doubt]:
    """The doubts without those about settings that are ``known`` after all."""
    names = set(known)
    for doubt in doubts:
        if doubt.varies is None or not doubt.varies.settings.keys() & names:
            yield doubt
            continue
        left = {name: v for name, v in doubt.varies.settings.items() if name not in names}
        if left:
            yield msgspec.structs.replace(
                doubt, varies=msgspec.structs.replace(doubt.varies, settings=left)
            )


def some_names(names: Iterable[str]) -> str:
    """The first names, each once, and the number of the others: ``a, b, c and 2 more``."""
    distinct_names = list(dict.fromkeys(names))
    more = len(distinct_names) - MOST_NAMED
    return ", ".join(distinct_names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


# -- inside --------------------------------------------------------------------------------


def _unknown(varies: Varies | None, question: PlanQuestion) -> Unknown | None:
    if varies is None:
        return None
    workers = None
    if varies.workers is not None:
        registered = (question.router.registry.by_name(name) for name in varies.workers)
        workers = frozenset(worker.worker_id for worker in registered if worker is not None)
    return Unknown(
        varies.settings, varies.load, varies.copies, varies.overlap, varies.turn, workers
    )


def _with_effect(doubt: Doubt, results: Sequence[Consequence], question: PlanQuestion) -> Doubt:
    if not results:
        return msgspec.structs.replace(doubt, matters=False, effect=_UNCHANGED)
    if results[0].setting:
        return msgspec.structs.replace(doubt, matters=True, effect=_settings(results, question))
    effect = f"{doubt.effect}, so {_result(results[0], question)}"
    return msgspec.structs.replace(doubt, matters=True, effect=effect)


def _settings(results: Sequence[Consequence], question: PlanQuestion) -> str:
    """What the first value of each setting does that changes the answer."""
    first: dict[str, Consequence] = {}
    for item in results:
        first.setdefault(item.setting, item)
    texts = [
        f"with {item.setting}={_value(item.value)} {_result(item, question)}"
        for item in list(first.values())[:MOST_NAMED]
    ]
    more = len(first) - MOST_NAMED
    return "; ".join(texts) + (f"; {more:,} more settings can change it too" if more > 0 else "")


def _result(result: Consequence, question: PlanQuestion) -> str:
    if result.setting == "router_queue_threshold":
        return "the request would wait in the queue"
    if result.worker is None:
        return f"the {result.stage} hop could be refused, or have other candidates"
    hops = (question.plan.prefill, question.plan.decode)
    winner = next((h.worker for h in hops if h is not None and h.stage == result.stage), None)
    if result.share is not None and winner is not None:
        return f"{result.worker} could win, {winner.name} would get {chance(result.share)}"
    return f"{result.worker} {'would' if result.setting else 'could'} win the {result.stage} hop"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
