"""The cost of a request on each worker: one formula, evaluated in columns. Lower is better.

::

    prefill_blocks = max(0, (active_prefill_tokens + isl) / block_size - credit)
    credit         = overlap_score_credit * decay * overlap_blocks
                     + host_cache_hit_weight * host_blocks + disk_cache_hit_weight * disk_blocks
    decay          = 1 / (1 + credit_decay * ((P - min P) / block_size) / ceil(isl / block_size))
    decode_blocks  = active blocks + complete prompt blocks that are not active there yet
    cost           = multiplier * (prefill_load_scale * prefill_blocks + decode_blocks
                                   + decode_active_request_weight * active_requests
                                   + kv_transfer_weight * transfer seconds) + following

Prefill blocks are fractional (34 tokens of 16 are 2.125 blocks), decode blocks count complete
blocks (34 tokens: 2). Cached blocks in host memory and on disk count by their weights, unless the
overlap_score_credit is 0. On the prefill hop decode blocks are not tracked; on the decode hop
neither prefill nor overlap counts. Where prefill is not tracked on an aggregated worker, and on the
decode hop with conditional disaggregation, the credit is taken from the decode blocks instead. The
transfer and ``following`` are terms of this router, off by default: a table of links
(:mod:`router_core.transfer`) gives the seconds, and where pairs are chosen
(:mod:`router_core.pairs`), ``following`` is the lowest cost of a decode worker after this prefill
worker. Source of the others: Dynamo 1.6.1, verified on its log to three digits;
the 0.9 formula is the same with prefill_load_scale = overlap_score_weight.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from operator import add, mul, sub, truediv
from typing import Any

from router_core.changes import Stage
from router_core.config import RouterConfig
from router_core.frozen import quick_init
from router_core.load_order import OverlapColumn

#: Products below this have no finite reciprocal.
_SMALLEST = 1e-300


@dataclass(frozen=True, slots=True)
class CostParameters:
    """The weights and switches of the formula on one hop."""

    prefill_load_scale: float
    overlap_score_credit: float
    overlap_score_credit_decay: float
    decode_active_request_weight: float
    track_prefill_tokens: bool
    track_active_blocks: bool
    assume_kv_reuse: bool
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    kv_transfer_weight: float = 0.0

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
            kv_transfer_weight=config.router_kv_transfer_weight or 0.0,
        )
        if stage == "prefill":
            return replace(base, track_active_blocks=False)
        if stage == "decode":
            credit = base.overlap_score_credit if config.skips_prefill else 0.0
            return replace(
                base, overlap_score_credit=credit, track_prefill_tokens=False, assume_kv_reuse=False
            )
        return base

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the transfer weight only where it is set."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if not self.kv_transfer_weight:
            del plain["kv_transfer_weight"]
        return plain


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
    ``transfer_s``: seconds of the KV transfer to there (on the first hop the latency from the
    frontend), and ``transfer_levels`` the class of that distance; None without a table of links.
    ``following``: the lowest cost of a decode worker after this prefill worker, where prefill and
    decode are chosen as a pair.
    ``predicted_blocks``: how many of ``overlap_blocks`` no event has shown yet, because they were
    booked there just now; None where there are none. ``session_blocks``: what the worker of the
    request's session is preferred by, as a cost of all others; None without soft session affinity.
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
    transfer_s: Sequence[float] | None = None
    transfer_levels: Sequence[str] | None = None
    following: Sequence[float] | None = None
    predicted_blocks: Sequence[int] | None = None
    session_blocks: Sequence[float] | None = None

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


def kv_terms(inputs: CostInputs, parameters: CostParameters) -> tuple[TermColumn, ...]:
    """The terms of the formula, without those that do not count on this hop."""
    terms = []
    credits = _credits(inputs, parameters)
    if parameters.track_prefill_tokens:
        raw = map(add, inputs.prefill_tokens, repeat(inputs.isl_tokens))
        blocks = list(map(truediv, raw, repeat(inputs.block_size)))
        _subtract(blocks, credits)
        terms.append(TermColumn("prefill_blocks", "blocks", parameters.prefill_load_scale, blocks))
    if parameters.track_active_blocks:
        decode: list[float] = list(map(add, inputs.active_blocks, repeat(inputs.prompt_blocks)))
        if inputs.shared_blocks is not None:
            decode = list(map(sub, decode, inputs.shared_blocks))
        if not parameters.track_prefill_tokens:
            _subtract(decode, credits)
        terms.append(TermColumn("decode_blocks", "blocks", 1.0, decode))
    if parameters.decode_active_request_weight:
        weight = parameters.decode_active_request_weight
        terms.append(TermColumn("active_requests", "requests", weight, inputs.active_requests))
    if inputs.session_blocks is not None:
        terms.append(TermColumn("session_affinity", "blocks", 1.0, inputs.session_blocks))
    if inputs.transfer_s is not None:
        # The last term: router_core.pairs adds it to the sum of the others.
        weight = parameters.kv_transfer_weight
        terms.append(TermColumn("transfer", "seconds", weight, inputs.transfer_s))
    return tuple(terms)


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


def _subtract(blocks: list[float], credits: dict[int, float]) -> None:
    """Subtract each position's credit, down to 0."""
    for position, credit in credits.items():
        left = blocks[position] - credit
        blocks[position] = left if left > 0 else 0.0


def _credits(inputs: CostInputs, parameters: CostParameters) -> dict[int, float]:
    """Position -> blocks credited for its cached prefix, where it has one."""
    credit = parameters.overlap_score_credit
    if not credit:
        return {}
    overlap = inputs.overlap_blocks
    cached = compress(range(len(overlap)), overlap)
    decay = parameters.overlap_score_credit_decay
    if decay and parameters.track_prefill_tokens:
        size, tokens = inputs.block_size, inputs.prefill_tokens
        least = min(tokens)
        per_token = decay / size / max(1, math.ceil(inputs.isl_tokens / size))
        found = {i: credit * overlap[i] / (1.0 + per_token * (tokens[i] - least)) for i in cached}
    else:
        found = {i: credit * overlap[i] for i in cached}
    lower = (inputs.host_blocks, parameters.host_cache_hit_weight)
    for column, weight in (lower, (inputs.disk_blocks, parameters.disk_cache_hit_weight)):
        if column is not None and weight:
            for i in compress(range(len(column)), column):
                found[i] = found.get(i, 0.0) + weight * column[i]
    return found


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
