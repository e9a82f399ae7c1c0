"""Choose one rank for one hop: filters exclude, terms score, the lowest cost or a draw wins.

Filters are masks over slots; reasons of rejections are computed only for a dry run or a refusal.
Nothing in this module changes state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

from router_core.cost import (
    CostInputs,
    CostParameters,
    TermColumn,
    draw_two,
    total_costs,
)
from router_core.cost_inputs import cost_inputs
from router_core.decision import Decision, FunnelStep, Outcome, Rejection, choose
from router_core.devices import DeviceBudget
from router_core.load_order import LazyColumn, levels_of
from router_core.policies import FILTERS, kv_scorer
from router_core.reasons import Reason
from router_core.registry import CandidateSet
from router_core.routing_view import (
    Filter,
    RoutingView,
    SelectionContext,
    bound_rank,
    compares_sessions,
)
from router_core.sessions import BoundWorker
from router_core.terms import TERMS, kv_terms
from router_core.worker_sets import nth_slot, slots_of

#: Rejections per filter that a refusal on the request path explains; a dry run has all.
MAX_REFUSAL_REASONS = 64

#: The note of a decode hop whose KV transfer has no cost.
SIZE_UNKNOWN = (
    "KV transfer cost not counted: the size of the KV cache is unknown; set bytes_per_token in the "
    "file of router_kv_transfer_qos"
)

#: Candidates from which the order of load decides; below it the columns are cheaper.
_ORDERED_FROM = 64
#: Filters after which no worker is left because none is registered for the request.
_OF_NO_WORKER = ("model", "worker_set", "served_name", "role")

#: Ranks of one such class whose costs are computed one by one.
_SMALL_CLASS = 16

#: Inputs of the cost that the order of load knows, then those that only explain a decision. With
#: any other input the whole columns decide.
_KNOWN_INPUTS = frozenset(
    {
        *("isl_tokens", "block_size", "prompt_blocks", "overlap_blocks", "prefill_tokens"),
        *("active_blocks", "shared_blocks", "active_requests"),
        *("trust", "indexed_blocks", "booked_tokens", "predicted_blocks"),
    }
)
#: Parameters that it knows, then the weights of inputs that it does not know, which have no effect
#: without these. With any other parameter that is set the whole columns decide.
_KNOWN_PARAMETERS = frozenset(
    {
        *("prefill_load_scale", "overlap_score_credit", "track_prefill_tokens"),
        *("track_active_blocks", "assume_kv_reuse"),
        *("host_cache_hit_weight", "disk_cache_hit_weight", "weights"),
    }
)
#: Terms that are sums of what it orders by and of what ranks of a class have in common.
_KNOWN_TERMS = frozenset(term.name for term in TERMS if term.ordered)


def select(
    view: RoutingView,
    context: SelectionContext,
    *,
    sample: float = 0.0,
    detail: bool = False,
) -> Decision:
    """Choose a rank for one hop.

    ``sample`` (0 <= sample < 1) breaks ties and draws from the temperature. ``detail`` explains
    every rejection. A refusal is a normal Decision without a winner.
    """
    profile = view.profile
    bound = None
    funnel, mask = _pass_plainly(view, context)
    if not mask or (detail and mask != view.registry.alive):  # there are reasons to show
        funnel, mask, bound = _pass_filters(view, context, detail)
    given = _common_fields(view, context, funnel, sample)
    if not mask:
        return Decision(outcome=_refusal_outcome(funnel, context), **given)
    parameters: CostParameters = given["parameters"]
    candidates = view.registry.candidates(mask)
    inputs = cost_inputs(view, context, candidates, mask, parameters)
    choice: _Choice | None = None
    if len(candidates.slots) >= _ORDERED_FROM and not given["temperature"]:
        choice = _from_order(view, context, candidates, mask, inputs, parameters, sample)
    if choice is None:
        given |= {} if profile.among == "all" else _among(view, candidates, inputs, sample)
        choice = _from_scorer(view, context, candidates, inputs, given)
    if view.transfer is not None and _transfer_uncounted(context, inputs):
        given["notes"] = (*context.request.notes, SIZE_UNKNOWN)
    return Decision(
        outcome="selected",
        workers=candidates.workers,
        refs=candidates.refs,
        inputs=inputs,
        terms=choice[0],
        costs=choice[1],
        winner=choice[2],
        session=bound,
        **given,
    )


def _common_fields(
    view: RoutingView, context: SelectionContext, funnel: tuple[FunnelStep, ...], sample: float
) -> dict[str, Any]:
    """The fields of a decision that are known before the costs, with or without candidates."""
    request, profile = context.request, view.profile
    return {
        "id": request.id,
        "stage": context.stage,
        "mode": profile.mode,
        "model": request.model,
        "isl_tokens": request.isl_tokens,
        "block_size": request.block_size,
        "prompt_blocks": request.prompt_blocks,
        "temperature": view.config.router_temperature if profile.sampled else 0.0,
        "sample": sample,
        "parameters": view.parameters[context.stage],
        "constraints": context.constraints,
        "funnel": funnel,
        "overlap_modelled": request.overlap_modelled,
        "notes": request.notes,
        "lora_name": request.lora_name,
        "salted": request.salted,
    }


def _with_reasons(
    view: RoutingView,
    context: SelectionContext,
    funnel: Sequence[FunnelStep],
    rejected: Sequence[tuple[Filter, int]],
    detail: bool,
) -> list[FunnelStep]:
    """The funnel with the rejections of each step, all of them only with ``detail``."""
    limit = None if detail else MAX_REFUSAL_REASONS
    return [
        replace(step, rejected=_rejections(filter_, out, view, context, limit)) if out else step
        for step, (filter_, out) in zip(funnel, rejected, strict=True)
    ]


def _within_bound(
    view: RoutingView,
    bound: BoundWorker,
    funnel: list[FunnelStep],
    rejected: list[tuple[Filter, int]],
    mask: int,
) -> int:
    """The slot that the request's session is bound to, which is a step of the funnel; ``mask``
    where the session does not decide alone."""
    if bound.excluded is not None or compares_sessions(view):
        return mask
    slot = view.registry.slot(*bound.ref)
    left = mask if slot is None else 1 << slot
    rejected.append((BoundFilter(bound), mask & ~left))
    funnel.append(FunnelStep("session", mask.bit_count(), 1))
    return left


def _turn(view: RoutingView, context: SelectionContext) -> int:
    """Requests of the model booked so far on this hop."""
    model = view.registry.model_of(context.request.model)
    return view.rotation.get((model, context.stage), 0)


def _pass_plainly(
    view: RoutingView, context: SelectionContext
) -> tuple[tuple[FunnelStep, ...], int]:
    """The funnel of a request that names neither workers nor taints, by the filters that apply to
    every request, and the slots that are left. No slots: all filters decide."""
    request, registry = context.request, view.registry
    if (
        context.pin is not None
        or context.constraints.items
        or context.domain is not None
        or context.capacity_mask is not None
        or request.session is not None
        or request.served_name is not None
        or request.worker_set is not None
        or request.allowed_worker_ids is not None
        or view.profile.filters is not FILTERS
    ):
        return (), 0
    model = registry.model(request.model)
    return _plain_funnel(
        registry.alive, model, context.role_mask, registry.unavailable, view.busy.mask
    )


@lru_cache(maxsize=256)
def _plain_funnel(
    alive: int, model: int, roles: int, unavailable: int, busy: int
) -> tuple[tuple[FunnelStep, ...], int]:
    """The steps of :func:`_pass_plainly`. Fleets change rarely, so the same masks occur again."""
    passing = {
        "model": model,
        "role": roles,
        "available": ~unavailable,
        "taints": -1,
        "busy": ~busy,
    }
    funnel = []
    mask = alive
    for name, slots in passing.items():
        left = mask & slots
        funnel.append(_step(name, mask.bit_count(), left.bit_count()))
        mask = left
    return tuple(funnel), mask


def _pass_filters(
    view: RoutingView, context: SelectionContext, detail: bool
) -> tuple[tuple[FunnelStep, ...], int, BoundWorker | None]:
    """The funnel by all filters, the slots that are left, and the worker of the session."""
    funnel, rejected, mask = _apply_filters(view, context)
    bound = None
    if context.request.session is not None and mask:
        bound = _bound_worker(view, context, rejected)
        if bound is not None:
            mask = _within_bound(view, bound, funnel, rejected, mask)
    if detail or not mask:
        funnel = _with_reasons(view, context, funnel, rejected, detail)
    return tuple(funnel), mask, bound


def _apply_filters(
    view: RoutingView, context: SelectionContext
) -> tuple[list[FunnelStep], list[tuple[Filter, int]], int]:
    """The steps of the funnel, what each filter rejected, and the slots that are left."""
    mask = view.registry.alive
    funnel: list[FunnelStep] = []
    rejected: list[tuple[Filter, int]] = []
    for filter_ in view.profile.filters:
        passing = filter_.mask(view, context)
        if passing is None:
            continue
        left = mask & passing
        rejected.append((filter_, mask & ~left))
        funnel.append(_step(filter_.name, mask.bit_count(), left.bit_count()))
        mask = left
        if not mask:
            break
    return funnel, rejected, mask


#: Terms, costs and the position of the winner.
_Choice = tuple[tuple[TermColumn, ...], Sequence[float], int]


def _from_scorer(
    view: RoutingView,
    context: SelectionContext,
    candidates: CandidateSet,
    inputs: CostInputs,
    given: Mapping[str, Any],
) -> _Choice:
    """Terms, costs and the winner, computed for all candidates."""
    profile = view.profile
    turn = 0 if profile.mode == "kv" else _turn(view, context)
    terms = profile.scorer(inputs, given["parameters"], candidates, turn)
    costs = total_costs(terms, inputs.multipliers, len(candidates.slots), inputs.following)
    narrowed = given.get("pair"), given.get("budget")
    winner = choose(costs, given["temperature"], given["sample"], *narrowed, candidates.workers)
    return terms, costs, winner


def _from_order(
    view: RoutingView,
    context: SelectionContext,
    candidates: CandidateSet,
    mask: int,
    inputs: CostInputs,
    parameters: CostParameters,
    sample: float,
) -> _Choice | None:
    """Terms, costs and the winner at temperature 0, computed for the ranks that can win.

    Ranks with equally many cached blocks of the prompt, of which their running requests hold
    equally many, differ in their load alone: of a large class of these only the first in the order
    of load can win. None where the cost has, or may have, more inputs than that, and where it would
    not be less work.
    """
    slots = candidates.slots
    if not _follows_order(view, context, inputs, parameters):
        return None
    groups = _groups(view, slots, mask, inputs, parameters)
    if groups is None:
        return None
    # One rank of each group: the others cost the same.
    position = partial(bisect_left, slots)
    positions = list(map(position, groups.first))
    terms = kv_terms(_inputs_of_groups(inputs, groups, positions), parameters)
    if any(term.name not in _KNOWN_TERMS for term in terms):
        return None
    costs = total_costs(terms, None, len(positions))
    chosen, others = _cheapest(groups.slots, costs, sample)
    winner = position(chosen)
    runner_up = position((others & -others).bit_length() - 1) if others else None
    group_of = dict(zip(positions, range(len(positions)), strict=True))
    for at in (winner, runner_up):
        if at is not None and at not in group_of:
            group_of[at] = groups.number_of(slots[at])
    two = (winner, runner_up)
    return *_lazily(inputs, parameters, terms, costs, group_of, two), winner


def _inputs_of_groups(inputs: CostInputs, groups: _Groups, positions: Sequence[int]) -> CostInputs:
    """The inputs of one rank of each group, which are at ``positions``."""
    return CostInputs(
        inputs.isl_tokens,
        inputs.block_size,
        inputs.prompt_blocks,
        groups.overlap,
        [inputs.prefill_tokens[i] for i in positions],
        [inputs.active_blocks[i] for i in positions],
        None if inputs.shared_blocks is None else groups.shared,
        (),
    )


def _follows_order(
    view: RoutingView, context: SelectionContext, inputs: CostInputs, parameters: CostParameters
) -> bool:
    """Whether the order of load knows all that the cost depends on here."""
    return (
        view.profile.mode == "kv"
        and (parameters.track_prefill_tokens or parameters.track_active_blocks)
        and view.what_if is None
        and not view.load.decaying  # the load of many ranks changes before each decision
        and not context.request.more_hashes
        and view.profile.scorer is kv_scorer
        and _is_known(inputs, parameters)
    )


@dataclass(slots=True)
class _Groups:
    """Ranks that cost the same: their ``slots`` as a mask and the ``first`` of them, their cached
    blocks and how many of these their requests hold."""

    slots: list[int]
    first: list[int]
    overlap: list[int]
    shared: list[int]

    def number_of(self, slot: int) -> int:
        """The group of a slot, which is in one of them."""
        return next(number for number, group in enumerate(self.slots) if group >> slot & 1)


def _groups(
    view: RoutingView,
    slots: Sequence[int],
    mask: int,
    inputs: CostInputs,
    parameters: CostParameters,
) -> _Groups | None:
    """The groups of ranks that can win; None where they are too many to be less work."""
    per_token, per_block = _weights_of_load(inputs, parameters)
    load, most = view.load, len(slots) // 3
    order = load.orders.order(mask, per_token, per_block, load.prefill_tokens, load.decode_blocks)
    if order is None:
        return None
    cached = levels_of(inputs.overlap_blocks, slots)
    held = () if inputs.shared_blocks is None else levels_of(inputs.shared_blocks, slots)
    cut_off = bool(cached) and _cuts_off(inputs, parameters, max(cached)[0])
    rest = inputs.isl_tokens * per_token + inputs.prompt_blocks * per_block
    groups = _Groups([], [], [], [])
    scored = 0
    for members, overlap, depth in _classes(mask, cached, held):
        cheapest = None
        if members.bit_count() > _SMALL_CLASS and not (overlap and cut_off):
            cheapest = order.cheapest(members, rest)
        if cheapest is None:
            scored += members.bit_count()
            if scored > most:
                return None
            single = slots_of(members)
            cheapest = [1 << slot for slot in single]
            groups.first += single
        else:
            groups.first += [(group & -group).bit_length() - 1 for group in cheapest]
        groups.slots += cheapest
        groups.overlap += [overlap] * len(cheapest)
        groups.shared += [depth] * len(cheapest)
    return None if len(groups.slots) > most else groups


def _weights_of_load(inputs: CostInputs, parameters: CostParameters) -> tuple[float, float]:
    """What a token that waits to be computed costs, and an active block."""
    per_token = parameters.prefill_load_scale / inputs.block_size
    return (
        per_token if parameters.track_prefill_tokens else 0.0,
        1.0 if parameters.track_active_blocks else 0.0,
    )


def _cuts_off(inputs: CostInputs, parameters: CostParameters, deepest: int) -> bool:
    """Whether the credit of ``deepest`` cached blocks may be above the prompt: it would cut the
    cost off at 0, whatever the load."""
    return (
        not parameters.track_prefill_tokens
        or parameters.overlap_score_credit > 1
        or deepest * inputs.block_size > inputs.isl_tokens
    )


def _cheapest(groups: Sequence[int], costs: Sequence[float], sample: float) -> tuple[int, int]:
    """The slot that ``sample`` picks of the cheapest, and the mask of those that are second."""
    low = min(costs)
    tied = 0
    for group, cost in zip(groups, costs, strict=True):
        if cost == low:
            tied |= group
    chosen = nth_slot(tied, int(sample * tied.bit_count()))
    others = tied & ~(1 << chosen)
    if not others:
        second = min((cost for cost in costs if cost != low), default=None)
        for group, cost in zip(groups, costs, strict=True):
            if cost == second:
                others |= group
    return chosen, others


def _lazily(
    inputs: CostInputs,
    parameters: CostParameters,
    terms: Sequence[TermColumn],
    costs: Sequence[float],
    group_of: Mapping[int, int],
    two: tuple[int, int | None],
) -> tuple[tuple[TermColumn, ...], LazyColumn[float]]:
    """Terms and costs of all candidates, which are computed when one is read that is not in
    ``group_of`` (position -> its place in ``terms`` and ``costs``)."""
    computed: list[tuple[TermColumn, ...]] = []
    count = len(inputs.prefill_tokens)

    def all_terms() -> tuple[TermColumn, ...]:
        if not computed:
            computed.append(kv_terms(inputs, parameters))
        return computed[0]

    def values_of(number: int) -> Sequence[float]:
        return all_terms()[number].values

    def all_costs() -> list[float]:
        return total_costs(all_terms(), None, count)

    lazy = []
    for number, term in enumerate(terms):
        column = LazyColumn(partial(values_of, number), count, group_of, term.values)
        lazy.append(TermColumn(term.name, term.unit, term.weight, column))
    return tuple(lazy), LazyColumn(all_costs, count, group_of, costs, two)


def _transfer_uncounted(context: SelectionContext, inputs: CostInputs) -> bool:
    """Whether the KV cache comes from a known place and its transfer has no cost."""
    return context.source is not None and inputs.column("transfer") is None


def _is_known(inputs: CostInputs, parameters: CostParameters) -> bool:
    """Whether the order of load knows every input that is there and every parameter that is set."""
    kinds: tuple[Any, Any] = type(inputs), type(parameters)
    columns = _other_fields(kinds[0], _KNOWN_INPUTS)(inputs)
    if columns.count(None) < len(columns):
        return False
    return not any(_other_fields(kinds[1], _KNOWN_PARAMETERS)(parameters))


@lru_cache(maxsize=16)
def _other_fields(kind: Any, known: frozenset[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the fields of a dataclass that are not ``known``: two or more."""
    return attrgetter(*[item.name for item in fields(kind) if item.name not in known])


def _classes(
    mask: int, cached: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """The slots of ``mask`` by how many blocks they have cached and how many of these their
    requests hold: (slots, cached, held). Both sequences are pairs (blocks, slots)."""
    for overlap, members in (*cached, (0, mask)):
        left = members & mask
        mask ^= left
        for depth, holders in held:
            both = left & holders
            if both:
                left ^= both
                yield both, overlap, depth
        if left:
            yield left, overlap, 0


@lru_cache(maxsize=1024)
def _step(name: str, entered: int, left: int) -> FunnelStep:
    """A step without reasons. Fleets change rarely, so the same steps are used again and again."""
    return FunnelStep(name, entered, left)


class BoundFilter:
    """Pass the rank that the request's session is bound to."""

    name = "session"

    def __init__(self, bound: BoundWorker) -> None:
        self._bound = bound

    def mask(self, view: RoutingView, context: SelectionContext) -> int:
        slot = view.registry.slot(*self._bound.ref)
        return 0 if slot is None else 1 << slot

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        bound, ref = self._bound, view.registry.ref(slot)
        message = f"the session is bound to {bound.name}, {bound.left_s:.0f} s left"
        return Reason("session", str(ref.worker_id), bound.name, message)


def within_session(view: RoutingView, context: SelectionContext, mask: int) -> int:
    """The slots of ``mask``, or that of the request's session alone if it must answer."""
    bound = None if compares_sessions(view) else bound_rank(view, context)
    return mask if bound is None or not mask >> bound.slot & 1 else 1 << bound.slot


def _bound_worker(
    view: RoutingView, context: SelectionContext, rejected: Sequence[tuple[Filter, int]]
) -> BoundWorker | None:
    """The worker of the request's session; None without one, and where a pin chooses already."""
    bound = bound_rank(view, context)
    if bound is None:
        return None
    excluded = next((filter_.name for filter_, out in rejected if out >> bound.slot & 1), None)
    return BoundWorker(view.registry.worker(bound.slot).name, bound.ref, bound.left_s, excluded)


def _among(
    view: RoutingView, candidates: CandidateSet, inputs: CostInputs, sample: float
) -> dict[str, Any]:
    """What narrows the choice where not all candidates compete: a drawn pair, or the budget of the
    device classes."""
    if view.profile.among == "device":
        ratio = view.config.encoder_cuda_to_cpu_ratio
        budget = DeviceBudget.of_candidates(candidates.workers, inputs.active_requests, ratio)
        return {"budget": budget}
    count = len(candidates.slots)
    return {"pair": draw_two(count, sample)} if count > 1 else {}


def _rejections(
    filter_: Filter, mask: int, view: RoutingView, context: SelectionContext, limit: int | None
) -> tuple[Rejection, ...]:
    registry = view.registry
    slots = registry.candidates(mask).slots[:limit]
    return tuple(
        Rejection(
            registry.worker(slot), registry.ref(slot).dp_rank, filter_.reason(slot, view, context)
        )
        for slot in slots
    )


def _refusal_outcome(funnel: Sequence[FunnelStep], context: SelectionContext) -> Outcome:
    """The outcome of a funnel without candidates."""
    last = funnel[-1] if funnel else None
    if last is None or not last.entered or last.filter in _OF_NO_WORKER:
        return "no_workers"
    if last.filter == "busy":
        return "all_busy"
    if last.filter == "direct":
        return "not_pinned"
    return "pinned_ineligible" if context.pin is not None else "no_eligible_worker"


def eligible(view: RoutingView, context: SelectionContext, filters: Sequence[Filter]) -> int:
    """The slots that pass all filters, without reasons; used by the decode-capacity guard."""
    mask = view.registry.alive
    for filter_ in filters:
        passing = filter_.mask(view, context)
        if passing is not None:
            mask &= passing
    return mask
