"""Sums over requests: tokens of each rung, and what was lost to each cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from statistics import median
from typing import Final

from dynctl.documents.hits import (
    CAUSES,
    RUNGS,
    UNEXPLAINED,
    CauseText,
    HitsBreak,
    HitsCause,
    HitsTrial,
    best_trial,
)
from dynctl.health.hits.causes import COMPUTABLE
from dynctl.health.hits.past import Request
from dynctl.health.hits.trials import Change, changes
from dynctl.settings.router_options import ROUTER_OPTIONS
from router_core import RouterConfig

#: Examples of each cause.
MOST_EXAMPLES: Final = 3
#: Delays of late events from which the median is taken.
_MOST_DELAYS: Final = 1_000


@dataclass(slots=True)
class TriedChoices:
    """Choices on which settings were tried; by change, how many it changes and tokens gained."""

    tried: int = 0
    config: RouterConfig | None = None
    changed: Counter[Change] = field(default_factory=Counter)
    gained: Counter[Change] = field(default_factory=Counter)

    def add(self, request: Request) -> None:
        if request.trials is None:
            return
        self.tried += 1
        self.config = request.source.config
        for change, tokens in request.trials.items():
            if tokens is not None:
                self.changed[change] += 1
                self.gained[change] += tokens

    def of(self, cause: str) -> list[HitsTrial]:
        """The trials of the changes that may reduce a cause, the largest gain first."""
        if self.config is None:
            return []
        trials = [
            HitsTrial(dict(change), _flags(change), self.changed[change], self.gained[change])
            for change in changes(cause, self.config)
        ]
        return sorted(trials, key=lambda trial: -trial.tokens)


def _flags(change: Change) -> str:
    """The command line options of a change."""
    options = []
    for name, value in change:
        flag = ROUTER_OPTIONS[name].flags[0]
        options.append(flag if value is True else f"{flag} {_text(value)}")
    return " ".join(options)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"


@dataclass(slots=True)
class RungPart:
    tokens: int = 0
    requests: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)
    workers: Counter[str] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)
    #: Tokens that would be gained at most; None: unknown for one of the requests.
    gain: int | None = 0
    choices: TriedChoices = field(default_factory=lambda: TriedChoices())
    breaks: dict[str, HitsBreak] = field(default_factory=dict)
    segments: Counter[str] = field(default_factory=Counter)

    def add(self, tokens: int, request: Request, cause: str, gain: int | None) -> None:
        self.tokens += tokens
        self.gain = None if self.gain is None or gain is None else self.gain + gain
        self.requests += 1
        self.choices.add(request)
        self.workers[request.worker] += tokens
        self.examples.append((abs(tokens), request.arrived.id))
        self.segments.update(request.segments.get(cause, {}))
        if cause in request.breaks:
            self.breaks[request.arrived.id] = request.breaks[cause]
        if len(self.examples) > 8 * MOST_EXAMPLES:
            self.examples = nlargest(MOST_EXAMPLES, self.examples)
            kept = {name for _, name in self.examples}
            self.breaks = {name: seen for name, seen in self.breaks.items() if name in kept}
        if cause == "stale" and len(self.delays) < _MOST_DELAYS:
            self.delays += request.delays


@dataclass(slots=True)
class Tally:
    """Sums over requests: tokens of each rung (None: unknown for one of them), and the parts."""

    requests: int = 0
    tokens: int = 0
    twice: int = 0
    moved: int = 0
    rungs: dict[str, int | None] = field(default_factory=dict)
    parts: dict[tuple[str, str], RungPart] = field(default_factory=dict)
    #: By cause, what was lost and not gained back on a later rung.
    net: dict[str, RungPart] = field(default_factory=dict)
    #: Of all requests: what evicted a prefix are earlier choices than that which missed it.
    choices: TriedChoices = field(default_factory=TriedChoices)
    start: float = math.inf
    end: float = -math.inf

    def add(self, request: Request) -> None:
        self.requests += 1
        self.tokens += request.arrived.isl_tokens
        self.twice += request.twice
        self.moved += request.moved
        self.choices.add(request)
        self.start = min(self.start, request.decided_at)
        self.end = max(self.end, request.decided_at)
        for rung, tokens in request.rungs.items():
            known = self.rungs.get(rung, 0)
            self.rungs[rung] = None if known is None or tokens is None else known + tokens
        for key, tokens in request.parts.items():
            if tokens:
                gain = request.gains.get(key)
                self.parts.setdefault(key, RungPart()).add(tokens, request, key[1], gain)
        for cause, tokens in _net(request.parts).items():
            gain = _gain(request, cause, tokens)
            self.net.setdefault(cause, RungPart()).add(tokens, request, cause, gain)


def _gain(request: Request, cause: str, tokens: int) -> int | None:
    """The gain of a cause on all rungs, at most ``tokens``; None where one is unknown."""
    gained = 0
    for key, lost in request.parts.items():
        if key[1] == cause and lost > 0 and key in COMPUTABLE:
            gain = request.gains.get(key)
            if gain is None:
                return None
            gained += gain
    return min(gained, tokens)


def rate(tokens: int, tally: Tally) -> float | None:
    return tokens / tally.tokens if tally.tokens else None


def _cause(name: str, part: RungPart, tally: Tally) -> HitsCause:
    text = CAUSES[name]
    choices = tally.choices if name == "split" else part.choices
    trials = choices.of(name)
    gain = part.gain / tally.tokens if part.gain is not None and tally.tokens else None
    examples = [request for _, request in nlargest(MOST_EXAMPLES, part.examples)]
    return HitsCause(
        name,
        text.label,
        text.title,
        part.tokens,
        part.tokens / tally.tokens if tally.tokens else 0.0,
        part.requests,
        _act(text, choices.tried, trials),
        examples,
        [worker for worker, n in part.workers.most_common(MOST_EXAMPLES) if worker and n],
        list(text.codes),
        median(part.delays) if part.delays else None,
        gain if text.gain_if else None,
        text.gain_if,
        tried=choices.tried if text.setting else 0,
        trials=trials,
        breaks=[part.breaks[request] for request in examples if request in part.breaks],
        segments=dict(part.segments.most_common()),
    )


def _act(text: CauseText, tried: int, trials: Sequence[HitsTrial]) -> str:
    """What changes a cause: the tried settings that gain most, and what needs no trial."""
    if not tried or not text.setting:
        return text.act
    best = best_trial(trials)
    if best is None:
        return "no setting that was tried helps" if text.act.startswith("--") else text.act
    return best.flags if best.flags == text.act else f"{best.flags}; {text.act}"


def causes(parts: dict[str, RungPart], lost: int, tally: Tally) -> list[HitsCause]:
    """The parts of a step, the largest loss first; they add up to ``lost``."""
    rest = lost - sum(part.tokens for part in parts.values())
    if rest:
        known = parts.get(UNEXPLAINED, RungPart())
        left = RungPart(known.tokens + rest, known.requests, known.examples, known.workers)
        parts = {**parts, UNEXPLAINED: left}
    rows = [_cause(name, part, tally) for name, part in parts.items()]
    return sorted(rows, key=lambda cause: (-cause.tokens, cause.cause))


def _net(parts: Counter[tuple[str, str]]) -> Counter[str]:
    """What a request lost by each cause and did not gain back on a later rung.

    Rungs count leading blocks, so a gain gives back what was lost last: an engine that reuses more
    than expected reuses blocks that the index lacked.
    """
    lost: list[tuple[str, int]] = []
    for rung in RUNGS:
        gained = 0
        for (at, cause), tokens in reversed(parts.items()):
            if at != rung:
                continue
            if tokens > 0:
                lost.append((cause, tokens))
            else:
                gained -= tokens
        while gained > 0 and lost:
            cause, tokens = lost.pop()
            if tokens > gained:
                lost.append((cause, tokens - gained))
            gained -= min(gained, tokens)
    net: Counter[str] = Counter()
    for cause, tokens in lost:
        net[cause] += tokens
    return net


def largest(tally: Tally) -> list[HitsCause]:
    """The causes that an act can change, the largest net loss first."""
    rows = [_cause(name, part, tally) for name, part in tally.net.items() if CAUSES[name].act]
    return sorted(rows, key=lambda cause: (-cause.tokens, cause.cause))
