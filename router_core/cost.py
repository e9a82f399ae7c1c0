"""The cost of a request on each worker: its inputs and weights, their sum, and the draw.

The terms, and their formula, are in :mod:`router_core.terms`. Everything is in columns, with one
place for each candidate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import add, mul
from typing import Any, NamedTuple

from router_core.changes import Stage
from router_core.config import WEIGHT_SETTINGS, RouterConfig
from router_core.frozen import quick_init
from router_core.load_order import OverlapColumn

#: Products below this have no finite reciprocal.
_SMALLEST = 1e-300


@dataclass(frozen=True, slots=True)
class CostParameters:
    """The weights and switches of the formula on one hop.

    ``weights``: (parameter, weight) of the terms whose setting ``weighs`` them, where it is set.
    """

    prefill_load_scale: float
    overlap_score_credit: float
    overlap_score_credit_decay: float
    decode_active_request_weight: float
    track_prefill_tokens: bool
    track_active_blocks: bool
    assume_kv_reuse: bool
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    weights: tuple[tuple[str, float], ...] = ()

    @classmethod
    def for_stage(cls, config: RouterConfig, stage: Stage) -> CostParameters:
        """The parameters that ``config`` gives a hop (as observed in Dynamo 1.6.1)."""
        base = cls(
            prefill_load_scale=config.prefill_load_scale,
            overlap_score_credit=config.overlap_score_credit,
            overlap_score_credit_decay=config.overlap_score_credit_decay,
            decode_active_request_weight=config.decode_active_request_weight,
            track_prefill_tokens=config.router_track_prefill_tokens,
            track_active_blocks=config.router_track_active_blocks,
            assume_kv_reuse=config.router_assume_kv_reuse,
            host_cache_hit_weight=config.host_cache_hit_weight,
            disk_cache_hit_weight=config.disk_cache_hit_weight,
            weights=tuple(
                (parameter, float(value))
                for parameter, setting in WEIGHT_SETTINGS.items()
                if (value := getattr(config, setting))
            ),
        )
        if stage == "prefill":
            return replace(base, track_active_blocks=False)
        if stage == "decode":
            credit = base.overlap_score_credit if config.skips_prefill else 0.0
            return replace(
                base, overlap_score_credit=credit, track_prefill_tokens=False, assume_kv_reuse=False
            )
        return base

    def weight(self, parameter: str) -> float:
        """A parameter that multiplies a term; 0 for one of ``weights`` that is not set."""
        if parameter in WEIGHT_SETTINGS:
            return dict(self.weights).get(parameter, 0.0)
        return float(getattr(self, parameter))

    def with_weight(self, parameter: str, value: float) -> CostParameters:
        """A copy with one parameter set."""
        if parameter in WEIGHT_SETTINGS:
            weights = {**dict(self.weights), parameter: value}
            return replace(self, weights=tuple(weights.items()))
        changed: dict[str, Any] = {parameter: value}
        return replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``weights`` by their names, where they are set."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {name: value for name, value in plain.pop("weights") if value}


class AddedColumn(NamedTuple):
    """The column of a term that reads one of its own: a value for each candidate, before the
    weight. ``labels``: what each value stands for, such as the class of a distance."""

    name: str
    values: Sequence[float]
    labels: Sequence[str] | None = None

    def at_position(self, position: int) -> AddedColumn:
        """The column of one candidate alone."""
        labels = None if self.labels is None else (self.labels[position],)
        return AddedColumn(self.name, (self.values[position],), labels)


@quick_init
@dataclass(frozen=True, slots=True)
class CostInputs:
    """The inputs of the formula; every column has one entry per candidate.

    ``overlap_blocks``: leading prompt blocks cached there. ``prefill_tokens``: active, without
    this request. ``active_blocks``: blocks active there. ``shared_blocks``: leading blocks of this
    prompt among them. ``multipliers``: None without a preferred taint. ``host_blocks``: prompt
    blocks after those that are cached in host memory, ``disk_blocks`` those after them on disk;
    None where no candidate has any. ``trust``: of each candidate's index, its place in
    ``freshness.TRUST``, and ``indexed_blocks`` what that index has, of which ``overlap_blocks``
    count (``router_on_degraded``); None where every index is exact. ``booked_tokens``: the
    ``prefill_tokens`` before they fell with time; None where none of them falls.
    ``added``: the columns of terms that read one of their own (:mod:`router_core.terms`); None
    without any. ``following``: the lowest cost of a decode worker after this prefill worker, where
    prefill and decode are chosen as a pair.
    ``predicted_blocks``: how many of ``overlap_blocks`` no event has shown yet, because they were
    booked there just now; None where there are none.
    """

    isl_tokens: int
    block_size: int
    prompt_blocks: int
    overlap_blocks: Sequence[int]
    prefill_tokens: Sequence[int]
    active_blocks: Sequence[int]
    shared_blocks: Sequence[int] | None
    active_requests: Sequence[int]
    multipliers: Sequence[float] | None = None
    host_blocks: Sequence[int] | None = None
    disk_blocks: Sequence[int] | None = None
    trust: Sequence[int] | None = None
    indexed_blocks: Sequence[int] | None = None
    booked_tokens: Sequence[int] | None = None
    following: Sequence[float] | None = None
    predicted_blocks: Sequence[int] | None = None
    added: tuple[AddedColumn, ...] | None = None

    def column(self, term: str) -> AddedColumn | None:
        """The own column of a term; None where it does not count."""
        return next((column for column in self.added or () if column.name == term), None)

    @property
    def most_overlap(self) -> int:
        """The highest of the ``overlap_blocks``; 0 without candidates."""
        column = self.overlap_blocks
        if isinstance(column, OverlapColumn):
            levels = column.overlaps.levels
            return levels[0][0] if levels else 0
        return max(column, default=0)

    def cached_tokens(self, position: int, parameters: CostParameters) -> int:
        """Prompt tokens that a candidate does not compute; lower tiers count by their weights.

        Rounded to whole tokens, as Dynamo books them.
        """
        blocks: float = self.overlap_blocks[position]
        if self.host_blocks is not None:
            blocks += parameters.host_cache_hit_weight * self.host_blocks[position]
        if self.disk_blocks is not None:
            blocks += parameters.disk_cache_hit_weight * self.disk_blocks[position]
        return int(blocks * self.block_size + 0.5)


@quick_init
@dataclass(frozen=True, slots=True)
class TermColumn:
    """One term of the cost: its value for each candidate, in ``unit``, before ``weight``."""

    name: str
    unit: str
    weight: float
    values: Sequence[float]


def total_costs(
    terms: Sequence[TermColumn],
    multipliers: Sequence[float] | None,
    count: int,
    following: Sequence[float] | None = None,
) -> list[float]:
    """``multiplier * sum(weight * value) + following`` for each of ``count`` candidates."""
    costs: list[float] | None = None
    for term in terms:
        values: Iterable[float] = term.values
        if term.weight != 1.0:
            values = map(mul, values, repeat(term.weight))
        costs = list(map(float, values)) if costs is None else list(map(add, costs, values))
    if costs is None:
        costs = [0.0] * count
    elif multipliers is not None:
        costs = list(map(mul, costs, multipliers))
    return costs if following is None else list(map(add, costs, following))


def probabilities(costs: Sequence[float], temperature: float) -> list[float]:
    """The probability of each candidate; the sum is 1.

    Temperature 0: the lowest cost, exact ties evenly. Above 0: proportional to
    ``exp(-((cost - min) / (max - min)) / temperature)``, equal costs evenly. Source: Dynamo 1.6.1,
    observed on 3,000 draws.
    """
    low, high = min(costs), max(costs)
    # The limit of the formula for small temperatures is that of temperature 0.
    if temperature <= 0 or (high - low) * temperature < _SMALLEST:
        ties = costs.count(low)
        return [1.0 / ties if cost == low else 0.0 for cost in costs]
    scale = -1.0 / ((high - low) * temperature)
    weights = [math.exp((cost - low) * scale) for cost in costs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def pick(costs: Sequence[float], temperature: float, sample: float) -> int:
    """The position that ``sample`` (0 <= sample < 1) picks; costs must not be empty.

    The probabilities are summed in order until they exceed the sample: sample 0 at temperature 0
    picks the first of the tied candidates.
    """
    if temperature <= 0:
        low = min(costs)
        position = costs.index(low)
        for _ in range(int(sample * costs.count(low))):
            position = costs.index(low, position + 1)
        return position
    cumulative = 0.0
    chances = probabilities(costs, temperature)
    for index, chance in enumerate(chances):
        cumulative += chance
        if sample < cumulative:
            return index
    return max(i for i, chance in enumerate(chances) if chance > 0)


def draw_two(count: int, sample: float) -> tuple[int, int]:
    """Two different positions out of ``count`` (at least 2), in the order of the draw.

    ``sample`` (0 <= sample < 1) is spread evenly over all ordered pairs.
    """
    first, second = divmod(int(sample * count * (count - 1)), count - 1)
    return first, second + (second >= first)


def better_of_two(costs: Sequence[float], pair: tuple[int, int]) -> int:
    """The cheaper position of a drawn pair; the first one of equals, as in Dynamo 1.6."""
    first, second = pair
    return first if costs[first] <= costs[second] else second


def pair_probabilities(costs: Sequence[float]) -> list[float]:
    """The probability of each candidate to be the better of two that are drawn evenly."""
    count = len(costs)
    if count < 2:
        return [1.0] * count
    ordered = sorted(costs)
    pairs = count * (count - 1)
    chances = []
    for cost in costs:
        equal, dearer = bisect_left(ordered, cost), bisect_right(ordered, cost)
        # It wins both orders against a dearer one, and one of both against an equal one.
        chances.append((2 * (count - dearer) + dearer - equal - 1) / pairs)
    return chances
