"""What would have changed a decision: flips, and how near a preference is to losing.

Both evaluate the decision's own columns again (``Decision.replay``), so they agree with the router.
They are computed on demand, never on the request path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from router_core.decision import Decision
from router_core.taints import TaintConstraint, preference_multiplier
from router_core.terms import TERMS

#: Loads are searched up to this many tokens or blocks, more than any fleet has.
_LARGEST_LOAD = 1 << 40
#: Cost weights are searched from 0 to this multiple of their current value (at least 1).
_WEIGHT_REACH = 16.0
#: Load that flips -> the input that counts it.
_INPUT_OF_LOAD = dict(term.load for term in TERMS if term.load is not None)


@dataclass(frozen=True, slots=True)
class Flip:
    """The smallest change of one number with which the winner loses.

    ``change`` is a load of ``worker`` (``active_prefill_tokens`` in tokens,
    ``active_decode_blocks`` in blocks, ``active_requests``) or, with ``worker`` None, a weight.
    ``by`` is signed and has the change's own unit; loads change by whole numbers.
    """

    change: str
    by: float
    worker: str | None = None
    dp_rank: int = 0

    @property
    def is_load(self) -> bool:
        return self.worker is not None


@dataclass(frozen=True, slots=True)
class Preference:
    """How near a preferred taint is to losing, at the current costs.

    ``crossover``: a preferred candidate wins while its unweighted cost is below this multiple of
    the best other's. ``now``: the current multiple, None when the other's cost is 0.
    ``smallest_weight``: the least weight in 0..1 that keeps it local, None when none can.
    ``verdict``: the same in words.
    """

    taint: str
    weight: float
    crossover: float
    now: float | None
    smallest_weight: float | None
    verdict: str


def flip(decision: Decision) -> Flip | None:
    """The first of :func:`flips`: a load of the winner where there is one, else a weight."""
    return next(flips(decision), None)


def flips(decision: Decision) -> Iterator[Flip]:
    """Every single change that makes the winner lose, loads before weights.

    Yields nothing without another candidate, above temperature 0 (where cost alone does not
    decide) and in modes whose terms are not loads. The flip of a drawn pair is one of that pair.
    """
    second = decision.runner_up
    winner = decision.winner
    if winner is None or decision.temperature > 0 or decision.inputs is None:
        return
    if second is None and (decision.budget is None or not decision.budget.has_both_classes):
        return
    if decision.mode == "kv" and second is not None:
        yield from _load_flips(decision, winner, second)
        yield from _weight_flips(decision)
        return
    if any(term.name == "active_requests" for term in decision.terms):
        by = _smallest_flip(partial(_loses_under, decision, winner, "active_requests", 1))
        if by is not None:
            yield _load_flip(decision, winner, "active_requests", by)


def loses(decision: Decision, changed: Decision) -> bool:
    """Whether the winner of ``decision`` costs more than another candidate in ``changed``, or
    loses its drawn pair, or is not of the device class that is next."""
    winner = decision.winner
    if winner is None or not changed.costs:
        return False
    if changed.pair is not None:
        return changed.winner != winner
    group = changed.group
    return winner not in group or min(changed.costs[i] for i in group) < changed.costs[winner]


def with_load(decision: Decision, position: int, change: str, by: int) -> Decision:
    """The decision with one candidate's load changed by ``by`` (down to 0)."""
    inputs = decision.inputs
    if inputs is None:
        return decision
    column = _INPUT_OF_LOAD[change]
    values = list(getattr(inputs, column))
    values[position] = max(0, values[position] + by)
    changed: dict[str, Any] = {column: values}
    return decision.replay(inputs=replace(inputs, **changed))


def with_weight(decision: Decision, name: str, value: float) -> Decision:
    """The decision with one cost weight set; ``name`` as in CostParameters."""
    return decision.replay(parameters=decision.parameters.with_weight(name, value))


def _load_flips(decision: Decision, winner: int, second: int) -> Iterator[Flip]:
    names = {term.name for term in decision.terms if term.weight}
    loads = [term.load[0] for term in TERMS if term.load is not None and term.name in names]
    for change in loads:
        by = _smallest_flip(partial(_loses_under, decision, winner, change, 1))
        if by is not None:
            yield _load_flip(decision, winner, change, by)
    for change in loads:
        have = _current_load(decision, second, change)
        by = _smallest_flip(partial(_loses_under, decision, second, change, -1), most=have)
        if by is not None:
            yield _load_flip(decision, second, change, -by)


def _weight_flips(decision: Decision) -> Iterator[Flip]:
    names = {term.name for term in decision.terms}
    terms = [term for term in TERMS if term.name in names]
    if decision.inputs is not None and decision.inputs.following is not None:
        # The weights of others change the decode hop too, whose costs are an input here.
        terms = [term for term in terms if term.prefill_only]
    for name in chain.from_iterable(term.flips for term in terms):
        by = _smallest_weight_change(decision, name)
        if by is not None:
            yield Flip(name, by)


def _smallest_weight_change(decision: Decision, name: str) -> float | None:
    """The change of a weight, down or up, at which the winner loses; None if none does."""
    now = decision.parameters.weight(name)
    loses_at = partial(_loses_at, decision, name)
    down = _change_towards(loses_at, now, 0.0)
    up = _change_towards(loses_at, now, max(1.0, now) * _WEIGHT_REACH)
    return min((by for by in (down, up) if by is not None), key=abs, default=None)


def _loses_at(decision: Decision, name: str, value: float) -> bool:
    return loses(decision, with_weight(decision, name, value))


def _loses_under(decision: Decision, position: int, change: str, sign: int, by: int) -> bool:
    return loses(decision, with_load(decision, position, change, sign * by))


def _load_flip(decision: Decision, position: int, change: str, by: int) -> Flip:
    return Flip(change, by, decision.workers[position].name, decision.refs[position].dp_rank)


def _current_load(decision: Decision, position: int, change: str) -> int:
    inputs = decision.inputs
    if inputs is None:
        return 0
    column: Sequence[int] = getattr(inputs, _INPUT_OF_LOAD[change])
    return column[position]


def _smallest_flip(flipped: Callable[[int], bool], most: int = _LARGEST_LOAD) -> int | None:
    """The least k in 1..most that flips, None if none does; ``flipped`` is monotone."""
    if most < 1:
        return None
    high = 1
    while not flipped(high):
        if high >= most:
            return None
        high = min(most, high * 2)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if flipped(middle) else (middle, high)
    return high


def _change_towards(flipped: Callable[[float], bool], now: float, end: float) -> float | None:
    """The change from ``now`` towards ``end`` at which it flips, None if it does not flip."""
    if now == end or not flipped(end):
        return None
    low, high = now, end
    for _ in range(80):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if flipped(middle) else (middle, high)
    by = high - now
    # now + by must flip too, and floats do not subtract exactly.
    while not flipped(now + by):
        by = math.nextafter(by, math.copysign(math.inf, by))
    return by


# -- preferences ---------------------------------------------------------------------------


def preference(decision: Decision) -> Preference | None:
    """The preference of the strongest preferred taint, None without one or without costs.

    ``crossover = exp(tanh(weight))``, at most 2.1415 for a weight of 1. Candidates are compared
    by their cost with all *other* preferences applied.
    """
    constraints = decision.constraints.preferred
    if not constraints or not decision.costs or decision.inputs is None:
        return None
    if decision.inputs.multipliers is None or decision.inputs.following is not None:
        # Of a pair the preference multiplies a part of the cost only.
        return None
    derived = [item for item in constraints if item.origin != "request"]
    item = max(derived or constraints, key=lambda constraint: abs(_weight_of(constraint)))
    weight = _weight_of(item)
    local, remote = _local_and_remote(decision, decision.inputs.multipliers, item)
    crossover = 1.0 / preference_multiplier((weight,))
    if not local:
        return Preference(item.taint, weight, crossover, None, None, "no candidate has the taint")
    if not remote:
        return Preference(item.taint, weight, crossover, None, 0.0, "every candidate has the taint")
    return _measure_preference(item.taint, weight, crossover, local, min(remote))


def _local_and_remote(
    decision: Decision, multipliers: Sequence[float], item: TaintConstraint
) -> tuple[list[tuple[float, float]], list[float]]:
    """Of candidates with the taint the cost without preferences and the weight of the others; of
    candidates without it the cost with the other preferences."""
    others = [other for other in decision.constraints.preferred if other.taint != item.taint]
    local: list[tuple[float, float]] = []
    remote: list[float] = []
    for worker, cost, multiplier in zip(decision.workers, decision.costs, multipliers, strict=True):
        taints = worker.runtime_config.taints
        raw = cost / multiplier
        rest = math.fsum(_weight_of(other) for other in others if other.taint in taints)
        if item.taint in taints:
            local.append((raw, rest))
        else:
            remote.append(raw * preference_multiplier((rest,)))
    return local, remote


def _weight_of(constraint: TaintConstraint) -> float:
    return constraint.weight or 0.0


def _measure_preference(
    taint: str, weight: float, crossover: float, local: list[tuple[float, float]], remote: float
) -> Preference:
    best = min(raw * preference_multiplier((rest,)) for raw, rest in local)
    if remote == 0:
        if best == 0:
            verdict = "no effect: both cost 0, so a multiplier changes nothing"
            return Preference(taint, weight, crossover, None, None, verdict)
        verdict = "no weight can keep it local: the best other costs 0"
        return Preference(taint, weight, crossover, None, None, verdict)
    needed = [w for raw, rest in local if (w := _weight_to_win(raw, rest, remote)) is not None]
    smallest = min(needed) if needed else None
    now = best / remote
    if min(raw * preference_multiplier((rest, weight)) for raw, rest in local) < remote:
        verdict = "local wins"
    elif smallest is None:
        verdict = "no weight in 0..1 can keep it local: use required or add decode workers"
    else:
        verdict = "spills to another domain"
    return Preference(taint, weight, crossover, now, smallest, verdict)


def _weight_to_win(raw: float, rest: float, remote: float) -> float | None:
    """The weight in 0..1 at which ``raw * exp(-tanh(rest + weight))`` reaches ``remote``.

    The candidate wins above it, or at 0 if it is cheaper without a preference.
    """
    if raw == 0:
        return 0.0
    target = math.log(raw / remote)
    if target >= 1.0:
        return None
    if target <= -1.0:
        return 0.0
    weight = max(0.0, math.atanh(target) - rest)
    return weight if weight < 1.0 else None
