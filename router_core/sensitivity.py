"""Whether what is unknown can change a decision: settings, load and cached blocks within ranges.

An answer is certain only if no value of what is unknown, alone or together with others, gives
another worker a chance. Settings are tried value by value; load and cached blocks have bounds, and
the winner has to win while everything that is unknown speaks against it. Where that is too much to
try, the answer counts as uncertain. Computed on demand, never on the request path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from router_core.busy import THRESHOLD_SETTINGS
from router_core.config import WEIGHT_SETTINGS, RouterConfig
from router_core.cost import CostInputs, CostParameters
from router_core.decision import Decision, RoutingPlan
from router_core.router import Router
from router_core.routing_view import RoutingRequest, RoutingView
from router_core.workers import UNKNOWN_BATCHED_TOKENS, WorkerWithDpRank

#: More load than any rank has, in tokens or blocks.
_ANY_LOAD = 1 << 40
#: Settings in combination are tried up to this many candidate costs.
_MOST_COSTS = 400_000
#: Combinations of settings for which a plan is made again.
_MOST_PLANS = 256

#: Modes in which the running requests of the candidates decide.
_IN_FLIGHT = ("power-of-two", "least-loaded", "device-aware-weighted", "direct")

LoadRange = Literal["known", "more", "fewer", "shared", "prefill"]


@dataclass(frozen=True, slots=True)
class Unknown:
    """One input that is unknown, and the range of its values.

    ``settings``: name -> values that it may have, besides the one in force. ``load``: ``more``: any
    load from the counted one on; ``fewer``: from the counted one divided by ``copies`` to the
    counted one; ``prefill``: 0 to the counted prefill tokens; ``shared``: the sums are right, and
    any of the active blocks may be blocks of this prompt. ``overlap``: 0 to all of the prompt's
    blocks may be cached. ``turn``: the position of the rotation. ``workers``: the ids that load and
    overlap are about; None for all.
    """

    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    load: LoadRange = "known"
    copies: int = 1
    overlap: bool = False
    turn: bool = False
    workers: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Consequence:
    """One way in which an unknown input changes the plan.

    ``worker``: one that can win then; None: the request can be refused, or wait. ``share``: what is
    left to the present winner, 0 to 1, where the winner is drawn. ``setting`` and ``value``: the
    setting that does it, empty for load and cached blocks.
    """

    stage: str
    worker: str | None
    share: float | None = None
    setting: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """A plan, and what it was made of."""

    router: Router
    request: RoutingRequest
    plan: RoutingPlan
    view: RoutingView

    def plan_under(self, config: RouterConfig) -> RoutingPlan:
        """The plan under other settings, with the same samples."""
        view = self.router.view(config, self.view.what_if, self.view.transfer)
        first, second = (
            0.0 if hop is None else hop.sample
            for hop in (self.plan.prefill or self.plan.decode, self.plan.decode)
        )
        return self.router.plan(self.request, samples=(first, second), view=view)


def consequences(question: PlanQuestion, unknown: Unknown) -> Iterator[Consequence]:
    """The ways in which one unknown input alone changes the plan, one for each value."""
    for name, values in unknown.settings.items():
        for value in values:
            consequence = _under_setting(question, name, value)
            if consequence is not None:
                yield replace(consequence, setting=name, value=value)
    consequence = _in_bounds(question, question.plan, (unknown,))
    if consequence is not None:
        yield consequence


def certain(question: PlanQuestion, unknowns: Iterable[Unknown]) -> bool:
    """Whether no combination of values of ``unknowns`` changes the winner of any hop.

    False where a winner is drawn: between equal costs, or above temperature 0.
    """
    ranges = list(unknowns)
    if any(_is_drawn(hop) for hop in _hops(question.plan)):
        return False
    if any(True for unknown in ranges for _ in consequences(question, unknown)):
        return False
    return _certain_together(question, ranges)


def _certain_together(question: PlanQuestion, unknowns: list[Unknown]) -> bool:
    """Whether the winners stay under every combination, where no unknown alone matters."""
    settings = _values_by_setting(question, unknowns)
    loaded = any(unknown.load == "more" for unknown in unknowns)
    if loaded and any(name in settings for name in (*THRESHOLD_SETTINGS, "router_queue_threshold")):
        return False
    inputs = list(unknowns)
    if "use_kv_events" in settings:
        inputs.append(Unknown(overlap=True))
    if _SKIPPING in settings or question.plan.bypass is not None:
        return _same_plans(question, settings, inputs)
    modes = settings.get("router_mode", ())[1:]
    config = question.view.config
    others = [question.plan_under(config.with_values({"router_mode": mode})) for mode in modes]
    inputs += [Unknown(turn=True)] * len(others)
    hops = [hop for plan in (question.plan, *others) for hop in _hops(plan)]
    weights = {name: values for name, values in settings.items() if name in _WEIGHTS}
    return _unbeaten(config, hops, weights, inputs)


def _values_by_setting(question: PlanQuestion, unknowns: Iterable[Unknown]) -> dict[str, list[Any]]:
    """Unknown setting -> the value in force, then those that it may have."""
    settings: dict[str, list[Any]] = {}
    for unknown in unknowns:
        for name, values in unknown.settings.items():
            settings.setdefault(name, [getattr(question.view.config, name)]).extend(values)
    return settings


def _unbeaten(
    config: RouterConfig,
    hops: Sequence[Decision],
    weights: Mapping[str, Sequence[Any]],
    unknowns: Sequence[Unknown],
) -> bool:
    """Whether no candidate beats a winner under any combination of ``weights``; False where that
    is too much to try."""
    if weights and any(hop.inputs is not None and hop.inputs.following for hop in hops):
        return False  # they change the decode hop of every pair
    tried = math.prod(len(values) for values in weights.values())
    if tried * sum(len(hop.costs) for hop in hops) > _MOST_COSTS:
        return False
    for values in product(*weights.values()):
        other = replace(config, **dict(zip(weights, values, strict=True)))
        if any(_challenger(_with_weights(hop, other), unknowns) is not None for hop in hops):
            return False
    return True


def _same_plans(
    question: PlanQuestion, settings: Mapping[str, Sequence[Any]], unknowns: Sequence[Unknown]
) -> bool:
    """Whether every combination of settings gives the same plan, tried one by one: what
    conditional disaggregation decides follows from candidates that the plan does not show."""
    if _load_varies(unknowns) or any(unknown.overlap for unknown in unknowns):
        return False
    ends: Sequence[dict[str, Any]] = (
        ({}, *_BYPASS_ENDS) if settings.get(_SKIPPING, [False])[-1] else ({},)
    )
    others = {name: values for name, values in settings.items() if name != _SKIPPING}
    if len(ends) * math.prod(map(len, others.values())) > _MOST_PLANS:
        return False
    config = question.view.config
    for values in product(*others.values()):
        chosen = dict(zip(others, values, strict=True))
        for end in ends:
            plan = question.plan_under(config.with_values({**chosen, **end}))
            if _difference(question.plan, plan):
                return False
    return True


def waits(decision: Decision, threshold: float | None) -> bool:
    """Whether a router queue holds the request back: every candidate has more active prefill
    tokens than ``threshold`` times its max_num_batched_tokens. None: there is no queue."""
    if threshold is None or decision.inputs is None or decision.stage == "decode":
        return False
    return all(
        tokens
        > threshold * (worker.runtime_config.max_num_batched_tokens or UNKNOWN_BATCHED_TOKENS)
        for worker, tokens in zip(decision.workers, decision.inputs.prefill_tokens, strict=True)
    )


# -- settings ------------------------------------------------------------------------------


#: The setting that may leave out the prefill hop, and the ends of its other settings' ranges.
_SKIPPING = "conditional_disagg_enabled"
_BYPASS_ENDS: tuple[dict[str, Any], ...] = (
    {
        _SKIPPING: True,
        "conditional_disagg_policy": "isl-or-load",
        "conditional_disagg_eff_isl_threshold": 1 << 40,
        "conditional_disagg_eff_isl_ratio_threshold": 1.0,
        "conditional_disagg_prefill_busy_threshold": 0.0,
        "conditional_disagg_decode_busy_threshold": None,
    },
    {
        _SKIPPING: True,
        "conditional_disagg_policy": "isl-bounding",
        "conditional_disagg_eff_isl_threshold": 0,
    },
)
#: The settings of the cost formula: they change costs and nothing else.
_WEIGHTS = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "decode_active_request_weight",
    "router_track_active_blocks",
    "router_track_prefill_tokens",
    "router_assume_kv_reuse",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    *WEIGHT_SETTINGS.values(),
)


def _under_setting(question: PlanQuestion, name: str, value: Any) -> Consequence | None:
    config = question.view.config
    if name == "router_queue_threshold":
        # This router has no queue, so the value in force counts too.
        return _in_queue(question.plan, value)
    if getattr(config, name) == value:
        return None
    if name == _SKIPPING and value:
        # Its thresholds are not known either: the loosest, and those that never leave out the hop.
        ends = (question.plan_under(config.with_values(end)) for end in _BYPASS_ENDS)
        return next(filter(None, (_difference(question.plan, plan) for plan in ends)), None)
    if name == "use_kv_events":
        # The router remembers what it routed instead: any part of the prompt may count as cached.
        return _in_bounds(question, question.plan, (Unknown(overlap=True),))
    changed = question.plan_under(config.with_values({name: value}))
    if value == "round-robin":
        return _by_turn(question.plan, changed) or _difference(question.plan, changed)
    return _difference(question.plan, changed)


def _in_queue(plan: RoutingPlan, threshold: float | None) -> Consequence | None:
    """Whether the first hop would wait."""
    first = next(_hops(plan), None)
    if first is None or not waits(first, threshold):
        return None
    return Consequence(first.stage, None)


def _by_turn(before: RoutingPlan, after: RoutingPlan) -> Consequence | None:
    """Where a rotation of an unknown position decides: every candidate is as likely."""
    winners = [hop.ref for hop in _hops(before)]
    for hop in _hops(after):
        count = len(hop.costs)
        if count > 1:
            other = next(i for i, ref in enumerate(hop.refs) if ref not in winners)
            return Consequence(hop.stage, hop.workers[other].name, 1 / count)
    return None


def _difference(before: RoutingPlan, after: RoutingPlan) -> Consequence | None:
    """What is different between the possible winners of two plans, prefill first."""
    for old, new in ((before.prefill, after.prefill), (before.decode, after.decode)):
        was, now = _possible(old), _possible(new)
        if was == now:
            continue
        if new is None or not now:
            return Consequence((new or old or before.final).stage, None)
        best = max([ref for ref in now if ref not in was] or now, key=now.__getitem__)
        worker = new.workers[list(new.refs).index(best)].name
        left = None if old is None else old.ref
        share = 0.0 if left is None else now.get(left, 0.0)
        return Consequence(new.stage, worker, share if len(now) > 1 else None)
    return None


def _possible(decision: Decision | None) -> dict[WorkerWithDpRank, float]:
    """The ranks that can win, with their probabilities rounded to what users see."""
    if decision is None or decision.winner is None:
        return {}
    chances = zip(decision.refs, decision.probabilities(), strict=True)
    return {ref: round(chance, 3) for ref, chance in chances if chance > 0}


def _with_weights(decision: Decision, config: RouterConfig) -> Decision:
    """The costs under other weights of the formula; the winner is still the one in question."""
    inputs = decision.inputs
    if inputs is None or decision.mode != "kv":
        return decision
    parameters = CostParameters.for_stage(config, decision.stage)
    if not parameters.assume_kv_reuse:
        inputs = replace(inputs, shared_blocks=None)
    return replace(decision.replay(inputs, parameters), winner=decision.winner)


# -- load and cached blocks ----------------------------------------------------------------


def _in_bounds(
    question: PlanQuestion, plan: RoutingPlan, unknowns: Sequence[Unknown]
) -> Consequence | None:
    """Whether load and cached blocks in their ranges change the winner of a hop."""
    busy = _busy(question, plan, unknowns) or _other_verdict(plan, unknowns)
    if busy is not None:
        return busy
    for hop in _hops(plan):
        drawn = _is_drawn(hop) and hop.mode in _IN_FLIGHT
        challenger = _undrawn(hop, unknowns) if drawn else _challenger(hop, unknowns)
        if challenger is not None:
            return Consequence(hop.stage, hop.workers[challenger].name)
    return None


def _busy(
    question: PlanQuestion, plan: RoutingPlan, unknowns: Sequence[Unknown]
) -> Consequence | None:
    """Whether other load makes a winner busy, or a busy rank eligible."""
    kinds = {unknown.load for unknown in unknowns}
    for hop in _hops(plan, refused=True):
        rejected = any(step.filter == "busy" and step.left < step.entered for step in hop.funnel)
        if kinds & {"fewer", "prefill"} and rejected:
            return Consequence(hop.stage, None)
        thresholds = question.view.busy.thresholds(question.view.registry.model_of(hop.model))
        if "more" in kinds and hop.winner is not None and thresholds.any:
            return Consequence(hop.stage, None)
    return None


def _other_verdict(plan: RoutingPlan, unknowns: Sequence[Unknown]) -> Consequence | None:
    """Whether conditional disaggregation may decide otherwise with other loads or caches."""
    if plan.bypass is None or plan.bypass.decode is None:
        return None
    if _load_varies(unknowns) or any(unknown.overlap for unknown in unknowns):
        return Consequence(plan.final.stage, None)
    return None


def _load_varies(unknowns: Iterable[Unknown]) -> bool:
    return any(unknown.load != "known" for unknown in unknowns)


def _turn_varies(unknowns: Iterable[Unknown]) -> bool:
    return any(unknown.turn for unknown in unknowns)


def _undrawn(decision: Decision, unknowns: Sequence[Unknown]) -> int | None:
    """A candidate that no draw can choose, and other running requests could; None if none is."""
    if not _load_varies(unknowns):
        return None
    chances = decision.probabilities()
    return next((i for i, chance in enumerate(chances) if chance == 0), None)


def _challenger(decision: Decision, unknowns: Sequence[Unknown]) -> int | None:
    """A candidate that costs no more than the winner somewhere in the ranges; None if none does.

    The winner is judged at its highest cost and each other candidate at its lowest, which the
    formula reaches at the ends of the ranges: costs rise with load and fall with cached blocks. The
    decay of the credit also depends on the least loaded candidate: the winner gets the strongest
    decay, the others get none. Where the winner is drawn, all that a draw can choose count as
    winners.
    """
    inputs = decision.inputs
    if decision.winner is None or inputs is None or len(decision.costs) < 2:
        return None
    winners = _possible_winners(decision, decision.winner)
    others = [position for position in decision.group if position not in winners]
    if decision.mode == "round-robin":
        return others[0] if _turn_varies(unknowns) else None
    budget = decision.budget
    if budget is not None and budget.has_both_classes and _load_varies(unknowns):
        # Any load of a candidate can make the other device class the next one.
        return min(set(range(len(decision.costs))).difference(decision.group))
    costs = _costs_against(decision, inputs, winners, unknowns)
    if not others or costs is None:
        return None
    dearest, cheapest = costs
    nearest = min(others, key=cheapest.__getitem__)
    return nearest if cheapest[nearest] <= min(map(dearest.__getitem__, winners)) else None


def _possible_winners(decision: Decision, winner: int) -> Set[int]:
    """The winner, and all others that a draw can choose."""
    if not _is_drawn(decision):
        return {winner}
    chances = enumerate(decision.probabilities())
    return {winner, *(position for position, chance in chances if chance > 0)}


def _costs_against(
    decision: Decision, inputs: CostInputs, winners: Set[int], unknowns: Sequence[Unknown]
) -> tuple[Sequence[float], Sequence[float]] | None:
    """The costs where everything unknown speaks against the winners: those for winners, and those
    for the others. None in modes whose costs are not unknown."""
    worst = _against(decision, inputs, winners, unknowns)
    if decision.mode in _IN_FLIGHT:
        return worst.active_requests, worst.active_requests
    if decision.mode != "kv":
        return None
    dearest = decision.replay(worst).costs
    if not decision.parameters.overlap_score_credit_decay > 0:
        return dearest, dearest
    free = replace(decision.parameters, overlap_score_credit_decay=0.0)
    return dearest, decision.replay(worst, free).costs


def _against(
    decision: Decision, inputs: CostInputs, winners: Set[int], unknowns: Sequence[Unknown]
) -> CostInputs:
    """The inputs at the ends of their ranges that speak against the winners."""
    columns = _WorstColumns(inputs, decision.parameters)
    if _load_varies(unknowns):
        columns.load_next_hop(winners)
    for unknown in unknowns:
        for position, ref in enumerate(decision.refs):
            if unknown.workers is not None and ref.worker_id not in unknown.workers:
                continue
            wins = position in winners
            if unknown.overlap and decision.credits_overlap:
                columns.cache(position, wins)
            if wins:
                columns.raise_load(position, unknown)
            else:
                columns.lower_load(position, unknown)
    return columns.inputs()


class _WorstColumns:
    """Inputs whose columns can be changed."""

    def __init__(self, inputs: CostInputs, parameters: CostParameters) -> None:
        self._given = inputs
        self._parameters = parameters
        self._prefill, self._blocks = list(inputs.prefill_tokens), list(inputs.active_blocks)
        self._requests, self._overlap = list(inputs.active_requests), list(inputs.overlap_blocks)
        self._shared = list(inputs.shared_blocks or [0] * len(self._blocks))
        self._following = None if inputs.following is None else list(inputs.following)
        self._host = None if inputs.host_blocks is None else list(inputs.host_blocks)
        self._disk = None if inputs.disk_blocks is None else list(inputs.disk_blocks)

    def load_next_hop(self, winners: Set[int]) -> None:
        """The load of decode workers is unknown: any cost for winners, none for the others."""
        if self._following is not None:
            any_cost = float(_ANY_LOAD)
            count = len(self._following)
            self._following = [any_cost if at in winners else 0.0 for at in range(count)]

    def cache(self, position: int, wins: bool) -> None:
        """Nothing of the prompt is cached on a winner, and all of it on another."""
        cached = 0 if wins else self._given.prompt_blocks
        self._overlap[position] = cached
        parameters = self._parameters
        # A block in host memory can have more credit than one of the device.
        dear = parameters.host_cache_hit_weight > parameters.overlap_score_credit
        for column in (self._host, self._disk):
            if column is not None and (wins or dear):
                column[position] = cached

    def raise_load(self, position: int, unknown: Unknown) -> None:
        """A winner has the highest load in the range."""
        if unknown.load == "more":
            self._prefill[position] += _ANY_LOAD
            self._blocks[position] += _ANY_LOAD
            self._requests[position] += _ANY_LOAD
        elif unknown.load == "shared" and self._requests[position]:
            self._requests[position] += _ANY_LOAD

    def lower_load(self, position: int, unknown: Unknown) -> None:
        """Another candidate has the lowest load in the range."""
        if unknown.load == "fewer":
            self._prefill[position] //= unknown.copies
            self._blocks[position] //= unknown.copies
            self._requests[position] //= unknown.copies
        elif unknown.load == "prefill":
            self._prefill[position] = 0
        elif unknown.load == "shared" and self._parameters.assume_kv_reuse:
            self._shared[position] = min(self._given.prompt_blocks, self._blocks[position])

    def inputs(self) -> CostInputs:
        """The inputs with the columns as they are now."""
        return replace(
            self._given,
            overlap_blocks=self._overlap,
            prefill_tokens=self._prefill,
            active_blocks=self._blocks,
            active_requests=self._requests,
            shared_blocks=self._shared if any(self._shared) else None,
            host_blocks=self._host,
            disk_blocks=self._disk,
            following=self._following,
        )


def _hops(plan: RoutingPlan, *, refused: bool = False) -> Iterator[Decision]:
    """The hops of a plan in order; those without a winner only if ``refused``."""
    for hop in (plan.prefill, plan.decode):
        if hop is not None and (refused or hop.winner is not None):
            yield hop


def _is_drawn(decision: Decision) -> bool:
    """Whether the winner is one of several that could have been drawn."""
    if decision.pair is not None:
        return sum(chance > 0 for chance in decision.probabilities()) > 1
    return len(decision.costs) > 1 and (decision.temperature > 0 or bool(decision.tied))
