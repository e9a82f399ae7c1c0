"""Choose one rank for one hop: filters exclude, terms score, the lowest cost or a draw wins.

Filters are masks over slots; reasons of rejections are computed only for a dry run or a refusal.
Nothing in this module changes state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, compress, repeat
from operator import add
from typing import Any, Literal, Protocol

from router_core.busy import BusyTracker
from router_core.changes import Stage
from router_core.config import RouterConfig
from router_core.cost import (
    CostInputs,
    CostParameters,
    TermColumn,
    draw_two,
    kv_terms,
    total_costs,
)
from router_core.decision import Decision, FunnelStep, Outcome, Reason, Rejection, choose
from router_core.devices import DeviceBudget
from router_core.freshness import FreshnessTable, counted_blocks
from router_core.frozen import quick_init
from router_core.hashing import hash_prompt
from router_core.index import PrefixIndex
from router_core.learned import LearnedIndex
from router_core.load import ActiveSequences
from router_core.load_order import LazyColumn
from router_core.lower_tiers import LowerTiers
from router_core.policy_classes import NO_CLASSES, PolicyClasses
from router_core.registry import CandidateSet, WorkerRegistry
from router_core.router_queue import RouterQueue
from router_core.sessions import BoundWorker, Session, SessionTable
from router_core.taints import NO_CONSTRAINTS, RoutingConstraints, preference_multiplier
from router_core.topology import PairGroups, RouterPolicy, TransferGroupsCache
from router_core.transfer import (
    BEYOND,
    Place,
    TransferClasses,
    TransferTable,
    transfer_columns,
)
from router_core.worker_sets import NO_OVERLAPS, Overlaps, nth_slot, slots_of
from router_core.workers import Role, WorkerWithDpRank

#: Rejections per filter that a refusal on the request path explains; a dry run has all.
MAX_REFUSAL_REASONS = 64
#: The note of a decode hop whose KV transfer has no cost.
SIZE_UNKNOWN = (
    "KV transfer cost not counted: the size of the KV cache is unknown; set bytes_per_token in the "
    "file of router_kv_transfer_qos"
)


#: Candidates from which the order of load decides; below it the columns are cheaper.
_ORDERED_FROM = 64
#: Ranks of one such class whose costs are computed one by one.
_SMALL_CLASS = 16
#: Inputs that the order of load does not know.
_MORE_INPUTS = (
    *("multipliers", "host_blocks", "disk_blocks", "transfer_s", "following", "session_blocks"),
)


@dataclass(frozen=True, slots=True)
class Pin:
    """The worker that the client chose; any of its ranks if ``dp_rank`` is None."""

    worker_id: int
    dp_rank: int | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What routing reads of a request; never its text.

    ``isl_tokens`` is the prompt length in tokens. ``sequence_hashes`` are the chained hashes of
    its complete blocks of ``block_size`` tokens; without a tokenizer they are empty and
    ``overlap_modelled`` is False. Without ``local_hashes`` of these blocks, those cached in host
    memory or on disk are not found. In a batch of prompts ``isl_tokens`` is their sum,
    ``lengths`` has the tokens of each prompt and ``more_hashes`` the hashes of each after the
    first. ``worker_set``: only workers of
    this set, chosen before. ``is_eagle``: the workers decode speculatively, so that a block is
    complete only with the token behind it. ``lora_name`` is the adapter, ``salted`` whether there
    is a cache salt; both are part of the hashes already, and the salt itself is not kept.
    ``notes`` are copied into every decision on the request. ``policy_class``, ``priority``,
    ``strict_priority`` and ``arrived_at`` (seconds of the clock of all changes) decide its place in
    the router queue. ``session``: the session of the request, where the client named one.
    """

    id: str
    model: str
    isl_tokens: int
    block_size: int
    sequence_hashes: Sequence[int] = ()
    constraints: RoutingConstraints = NO_CONSTRAINTS
    pin_prefill: Pin | None = None
    pin_decode: Pin | None = None
    allowed_worker_ids: frozenset[int] | None = None
    worker_set: str | None = None
    is_eagle: bool = False
    overlap_modelled: bool = True
    notes: tuple[str, ...] = ()
    lora_name: str | None = None
    salted: bool = False
    local_hashes: Sequence[int] = ()
    more_hashes: tuple[Sequence[int], ...] = ()
    lengths: tuple[int, ...] = ()
    policy_class: str | None = None
    priority: int = 0
    strict_priority: int = 0
    arrived_at: float = 0.0
    session: Session | None = None

    @classmethod
    def from_tokens(
        cls,
        id: str,
        model: str,
        tokens: Sequence[int],
        block_size: int,
        *,
        constraints: RoutingConstraints = NO_CONSTRAINTS,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        cache_salt: str | None = None,
    ) -> RoutingRequest:
        """The request of a prompt of token ids; ``block_size`` is that of the model's workers.

        ``lora_name``, ``cache_namespace`` and ``cache_salt`` are mixed into the hashes as in
        :func:`hash_prompt`. Raises HashingError.
        """
        hashes = hash_prompt(
            tokens,
            block_size,
            lora_name=lora_name,
            cache_namespace=cache_namespace,
            cache_salt=cache_salt,
        )
        return cls(
            id,
            model,
            len(tokens),
            block_size,
            tuple(hashes.sequence),
            constraints=constraints,
            lora_name=lora_name or None,
            salted=bool(cache_namespace or cache_salt),
            local_hashes=tuple(hashes.local),
        )

    @property
    def prompt_blocks(self) -> int:
        """Complete blocks of the prompt."""
        return max(0, self.isl_tokens - self.is_eagle) // self.block_size

    @property
    def all_hashes(self) -> Sequence[int]:
        """The hashes of all prompts; a block that several prompts begin with occurs once."""
        if not self.more_hashes:
            return self.sequence_hashes
        return tuple(dict.fromkeys(chain(self.sequence_hashes, *self.more_hashes)))

    @property
    def most_reusable(self) -> int:
        """Blocks of the (first) prompt that an engine can reuse at most; see `most_reusable_of`."""
        return self.most_reusable_of(0)

    def most_reusable_of(self, prompt: int) -> int:
        """Blocks of a prompt of the batch that an engine can reuse at most: it always computes the
        last token."""
        tokens = self.lengths[prompt] if self.lengths else self.isl_tokens
        return max(0, tokens - 1) // self.block_size


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Pretended load of a dry run: slot -> tokens, blocks or requests to add (negative: to
    subtract)."""

    prefill_tokens: Mapping[int, int] = field(default_factory=dict)
    decode_blocks: Mapping[int, int] = field(default_factory=dict)
    active_requests: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingView:
    """The state that a decision may read.

    ``rotation``: requests booked so far, by (model, stage). ``parameters`` and ``policy`` follow
    from ``config``; ``profile`` too, unless the router has its own. ``learned``: what ranks without
    KV events are expected to have; ``predicted``: what those with events are, until these arrive.
    ``queue``: None while requests never wait. ``transfer``: the table of links, where distances
    cost; ``own_place``: that of the frontend, where it is known. ``sessions``: None without
    session affinity.
    """

    registry: WorkerRegistry
    index: PrefixIndex
    load: ActiveSequences
    busy: BusyTracker
    config: RouterConfig
    rotation: Mapping[tuple[str, Stage], int]
    groups: TransferGroupsCache
    parameters: Mapping[Stage, CostParameters]
    policy: RouterPolicy | None
    profile: Profile
    what_if: WhatIf | None = None
    tiers: LowerTiers = field(default_factory=LowerTiers)
    freshness: FreshnessTable = field(default_factory=FreshnessTable)
    learned: tuple[LearnedIndex, ...] = ()
    queue: RouterQueue | None = None
    policy_classes: PolicyClasses = NO_CLASSES
    transfer: TransferTable | None = None
    own_place: Place | None = None
    classes: TransferClasses = field(default_factory=TransferClasses)
    pairs: PairGroups = field(default_factory=PairGroups)
    predicted: LearnedIndex = field(default_factory=LearnedIndex)
    sessions: SessionTable | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class SelectionContext:
    """One hop of one request. ``role_mask``: slots whose role can serve the hop.

    ``capacity_mask``: on a prefill hop with the decode-capacity guard, the slots whose transfer
    domain has an eligible decode rank. ``domain``: the domain that a required router policy needs.
    ``source``: the topology domains of the worker that sends the KV cache. ``following``: computes
    the lowest cost of the decode hop after each candidate.
    """

    request: RoutingRequest
    stage: Stage
    role_mask: int
    constraints: RoutingConstraints
    pin: Pin | None = None
    capacity_mask: int | None = None
    domain: str | None = None
    source: Mapping[str, str] | None = None
    following: Callable[[Sequence[int]], list[float] | None] | None = None


class Filter(Protocol):
    """Excludes ranks. ``name`` is its name in the funnel."""

    @property
    def name(self) -> str: ...

    def mask(self, view: RoutingView, context: SelectionContext) -> int | None:
        """Slots that pass; None if the filter does not apply to this hop."""

    def reason(self, slot: int, view: RoutingView, context: SelectionContext) -> Reason:
        """Why ``slot`` does not pass; called only for slots that do not."""


class Scorer(Protocol):
    """Computes the cost terms of the candidates; ``turn``: requests booked so far on this hop."""

    def __call__(
        self,
        inputs: CostInputs,
        parameters: CostParameters,
        candidates: CandidateSet,
        turn: int,
    ) -> tuple[TermColumn, ...]: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """A router mode: its filters, its scorer, and whether the temperature applies.

    ``among``: the candidates of which the cheapest wins: ``all``, ``two`` that are drawn, or those
    of one ``device`` class (:mod:`router_core.devices`).
    A profile with a scorer of its own needs a ``mode`` name of its own, because decisions are
    replayed by their mode.
    """

    mode: str
    filters: tuple[Filter, ...]
    scorer: Scorer
    sampled: bool = False
    among: Literal["all", "two", "device"] = "all"

    def with_filters(self, *filters: Filter) -> Profile:
        """A copy with ``filters`` added before the filters that read load (capacity and busy)."""
        names = [one.name for one in self.filters]
        places = [names.index(name) for name in ("decode_capacity", "busy") if name in names]
        at = min(places, default=len(names))
        return replace(self, filters=(*self.filters[:at], *filters, *self.filters[at:]))


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
    request, stage, profile = context.request, context.stage, view.profile
    mask = view.registry.alive
    funnel: list[FunnelStep] = []
    rejected: list[tuple[Filter, int]] = []
    for one in profile.filters:
        passing = one.mask(view, context)
        if passing is None:
            continue
        left = mask & passing
        rejected.append((one, mask & ~left))
        funnel.append(_step(one.name, mask.bit_count(), left.bit_count()))
        mask = left
        if not mask:
            break
    bound = None
    if request.session is not None and view.sessions is not None and mask:
        bound = _bound_worker(view, context, rejected)
        if bound is not None and bound.excluded is None and not _soft(view):
            slot = view.registry.slot(*bound.ref)
            left = mask if slot is None else 1 << slot
            rejected.append((BoundFilter(bound), mask & ~left))
            funnel.append(FunnelStep("session", mask.bit_count(), 1))
            mask = left
    if detail or not mask:
        limit = None if detail else MAX_REFUSAL_REASONS
        funnel = [
            replace(step, rejected=_rejections(one, out, view, context, limit)) if out else step
            for step, (one, out) in zip(funnel, rejected, strict=True)
        ]
    parameters = view.parameters[stage]
    common: dict[str, Any] = {
        "id": request.id,
        "stage": stage,
        "mode": profile.mode,
        "model": request.model,
        "isl_tokens": request.isl_tokens,
        "block_size": request.block_size,
        "prompt_blocks": request.prompt_blocks,
        "temperature": view.config.router_temperature if profile.sampled else 0.0,
        "sample": sample,
        "parameters": parameters,
        "constraints": context.constraints,
        "funnel": tuple(funnel),
        "overlap_modelled": request.overlap_modelled,
        "notes": request.notes,
        "lora_name": request.lora_name,
        "salted": request.salted,
    }
    if not mask:
        return Decision(outcome=_refused(funnel, context), **common)
    candidates = view.registry.candidates(mask)
    inputs = cost_inputs(view, context, candidates, mask, parameters)
    if bound is not None and bound.excluded is None and _soft(view):
        inputs = replace(inputs, session_blocks=_session_blocks(view, candidates, bound.ref))
    turn = view.rotation.get((request.model, stage), 0)
    found = None
    large = len(candidates.slots) >= _ORDERED_FROM
    if large and profile.mode == "kv" and not common["temperature"]:
        found = _from_order(view, context, candidates, mask, inputs, parameters, sample)
    if found is None:
        terms = profile.scorer(inputs, parameters, candidates, turn)
        costs = total_costs(terms, inputs.multipliers, len(candidates.slots), inputs.following)
        chosen: dict[str, Any] = {}
        if profile.among != "all":
            chosen = _among(view, candidates, inputs, sample)
        workers = candidates.workers
        found = (
            terms,
            costs,
            choose(costs, common["temperature"], sample, workers=workers, **chosen),
        )
        common |= chosen
    if view.transfer is not None and context.source is not None and inputs.transfer_s is None:
        common["notes"] = (*request.notes, SIZE_UNKNOWN)
    if bound is not None:
        common["session"] = bound
    return Decision(
        outcome="selected",
        workers=candidates.workers,
        refs=candidates.refs,
        inputs=inputs,
        terms=found[0],
        costs=found[1],
        winner=found[2],
        **common,
    )


def _from_order(
    view: RoutingView,
    context: SelectionContext,
    candidates: CandidateSet,
    mask: int,
    inputs: CostInputs,
    parameters: CostParameters,
    sample: float,
) -> tuple[tuple[TermColumn, ...], Sequence[float], int] | None:
    """Terms, costs and the winner in mode kv at temperature 0, computed for the ranks that can win.

    Those are the ranks with cached blocks of the prompt, and of all others, by how many of its
    blocks they compute already, the first in the order of load. None where the cost has more inputs
    than that, and where it would not be less work.
    """
    slots = candidates.slots
    count = len(slots)
    if (
        not (parameters.track_prefill_tokens or parameters.track_active_blocks)
        or parameters.overlap_score_credit_decay
        or parameters.decode_active_request_weight
        or view.what_if is not None
        or view.load.decaying  # the load of many ranks changes before each decision
        or context.request.more_hashes
        or any(getattr(inputs, name) is not None for name in _MORE_INPUTS)
    ):
        return None
    per_token = 0.0
    if parameters.track_prefill_tokens:
        per_token = parameters.prefill_load_scale / inputs.block_size
    per_block = 1.0 if parameters.track_active_blocks else 0.0
    load = view.load
    order = load.orders.order(mask, per_token, per_block, load.prefill_tokens, load.decode_blocks)
    if order is None:
        return None
    one_by_one = 0
    for slot in compress(slots, inputs.overlap_blocks):
        one_by_one |= 1 << slot
    left = mask & ~one_by_one
    # The ranks without anything cached, by how much of the prompt their running requests hold.
    groups: list[int] = []
    rest = inputs.isl_tokens * per_token + inputs.prompt_blocks * per_block
    if inputs.shared_blocks is not None:
        for depth, holders in load.shared_blocks(context.request.sequence_hashes, left).levels:
            left &= ~holders
            found = None
            if holders.bit_count() > _SMALL_CLASS:
                found = order.cheapest(holders, rest - depth)
            if found is None:
                one_by_one |= holders
            else:
                groups += found
    found = order.cheapest(left, rest)
    if found is None or one_by_one.bit_count() + len(groups) + len(found) > count // 3:
        return None
    groups += found
    groups += [1 << slot for slot in slots_of(one_by_one)]
    # One rank of each group: the others cost the same.
    position = partial(bisect_left, slots)
    positions = [position((group & -group).bit_length() - 1) for group in groups]
    shared = inputs.shared_blocks
    some = CostInputs(
        inputs.isl_tokens,
        inputs.block_size,
        inputs.prompt_blocks,
        [inputs.overlap_blocks[i] for i in positions],
        [inputs.prefill_tokens[i] for i in positions],
        [inputs.active_blocks[i] for i in positions],
        None if shared is None else [shared[i] for i in positions],
        (),
    )
    terms = kv_terms(some, parameters)
    costs = total_costs(terms, None, len(positions))
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
    winner = position(chosen)
    runner_up = position((others & -others).bit_length() - 1) if others else None
    of = {}
    for at, group in enumerate(groups):
        for one in (positions[at], winner, runner_up):
            if one is not None and group >> slots[one] & 1:
                of[one] = at
    everything: list[tuple[TermColumn, ...]] = []

    def all_terms() -> tuple[TermColumn, ...]:
        if not everything:
            everything.append(kv_terms(inputs, parameters))
        return everything[0]

    def values_of(number: int) -> Sequence[float]:
        return all_terms()[number].values

    def known(values: Sequence[float]) -> dict[int, float]:
        return {at: values[found] for at, found in of.items()}

    lazy = tuple(
        TermColumn(
            term.name,
            term.unit,
            term.weight,
            LazyColumn(partial(values_of, number), count, known(term.values)),
        )
        for number, term in enumerate(terms)
    )

    def all_costs() -> list[float]:
        return total_costs(all_terms(), None, count)

    return lazy, LazyColumn(all_costs, count, known(costs), (winner, runner_up)), winner


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
    bound = None if _soft(view) else _session_rank(view, context, mask)
    return mask if bound is None else 1 << bound


def with_session(
    view: RoutingView,
    context: SelectionContext,
    candidates: CandidateSet,
    mask: int,
    inputs: CostInputs,
) -> CostInputs:
    """The inputs, with the cost of leaving the worker of the request's session."""
    slot = _session_rank(view, context, mask) if _soft(view) else None
    if slot is None:
        return inputs
    column = _session_blocks(view, candidates, view.registry.ref(slot))
    return replace(inputs, session_blocks=column)


def _session_rank(view: RoutingView, context: SelectionContext, mask: int) -> int | None:
    """The slot in ``mask`` that the request's session is bound to."""
    bound = _bound_worker(view, context, ())
    slot = None if bound is None else view.registry.slot(*bound.ref)
    return slot if slot is not None and mask >> slot & 1 else None


def _session_blocks(
    view: RoutingView, candidates: CandidateSet, bound: WorkerWithDpRank
) -> list[float]:
    more = view.config.router_session_affinity_yield_blocks
    return [0.0 if ref == bound else more for ref in candidates.refs]


def _soft(view: RoutingView) -> bool:
    """Whether the worker of a session is compared with the others by cost."""
    return view.config.router_session_affinity_mode == "soft" and view.profile.mode == "kv"


def _bound_worker(
    view: RoutingView, context: SelectionContext, rejected: Sequence[tuple[Filter, int]]
) -> BoundWorker | None:
    """The worker of the request's session; None without one, and where a pin chooses already."""
    session, sessions = context.request.session, view.sessions
    if session is None or sessions is None or context.pin is not None:
        return None
    found = sessions.find(session, context.request.model, context.stage)
    if found is None:
        return None
    ref, left_s = found
    slot = view.registry.slot(*ref)
    if slot is None:
        return None  # the worker left: the session starts again
    excluded = next((one.name for one, out in rejected if out >> slot & 1), None)
    return BoundWorker(view.registry.worker(slot).name, ref, left_s, excluded)


def _among(
    view: RoutingView, candidates: CandidateSet, inputs: CostInputs, sample: float
) -> dict[str, Any]:
    """What narrows the choice where not all candidates compete: a drawn pair, or the budget of the
    device classes."""
    if view.profile.among == "device":
        ratio = view.config.encoder_cuda_to_cpu_ratio
        budget = DeviceBudget.of(candidates.workers, inputs.active_requests, ratio)
        return {"budget": budget}
    count = len(candidates.slots)
    return {"pair": draw_two(count, sample)} if count > 1 else {}


def cost_inputs(
    view: RoutingView,
    context: SelectionContext,
    candidates: CandidateSet,
    mask: int,
    parameters: CostParameters,
) -> CostInputs:
    """The inputs of the formula for the ranks in ``mask``."""
    request, slots, load = context.request, candidates.slots, view.load
    overlaps = shared = NO_OVERLAPS
    # A plain decode hop credits no cached blocks.
    reads = context.stage != "decode" or parameters.overlap_score_credit > 0
    if request.sequence_hashes and reads:
        overlaps = view.index.find_matches(request.sequence_hashes, mask, request.most_reusable)
    overlap_blocks = _column(overlaps, slots)
    host_blocks = disk_blocks = None
    if request.local_hashes and view.tiers.mask & mask and reads:
        host_blocks, disk_blocks = _lower_columns(view, request, slots, overlap_blocks)
    if parameters.track_active_blocks and parameters.assume_kv_reuse:
        shared = load.shared_blocks(request.sequence_hashes, mask)
    shared_blocks = _column(shared, slots) if shared.levels else None
    expected = view.predicted.live & mask if context.stage != "decode" else 0
    by_prompt = [overlap_blocks] if expected else []
    for number, hashes in enumerate(request.more_hashes, start=1):
        if reads:
            limit = request.most_reusable_of(number)
            more = _column(view.index.find_matches(hashes, mask, limit), slots)
            overlap_blocks = list(map(add, overlap_blocks, more))
            if expected:
                by_prompt.append(more)
        if parameters.track_active_blocks and parameters.assume_kv_reuse:
            more = _column(load.shared_blocks(hashes, mask), slots)
            shared_blocks = list(map(add, shared_blocks or repeat(0), more))
    trust = indexed_blocks = None
    if reads:
        trust = view.freshness.trusts(slots, mask)
    if trust is not None:
        rule, freshness = view.config.router_on_degraded, view.freshness
        estimated = learned_blocks(view, request, slots, mask & freshness.estimated)
        if any(estimated):
            overlap_blocks = list(map(add, overlap_blocks, estimated))
        indexed_blocks = overlap_blocks
        if mask & (freshness.degraded | freshness.none):  # those of all others count in full
            learned: Iterable[int] = repeat(0)
            if rule == "approximate":
                learned = learned_blocks(view, request, slots, mask & freshness.degraded)
            overlap_blocks = counted_blocks(overlap_blocks, trust, rule, learned)
            host_blocks = host_blocks and counted_blocks(host_blocks, trust, rule)
            disk_blocks = disk_blocks and counted_blocks(disk_blocks, trust, rule)
    predicted_blocks = None
    if expected:
        found = _Cached(list(overlap_blocks), indexed_blocks, host_blocks, disk_blocks)
        predicted_blocks = _predict(view, request, slots, expected, by_prompt, trust, found)
        if predicted_blocks is not None:
            overlap_blocks, indexed_blocks = found.overlap, found.indexed
            host_blocks, disk_blocks = found.host, found.disk
    prefill_tokens = candidates.gather(load.prefill_tokens)
    active_blocks = candidates.gather(load.decode_blocks)
    active_requests = candidates.gather(load.requests)
    booked_tokens = list(map(load.booked_prefill, slots)) if load.decaying else None
    if view.what_if is not None:
        prefill_tokens = _shifted(prefill_tokens, slots, view.what_if.prefill_tokens)
        if booked_tokens is not None:
            booked_tokens = _shifted(booked_tokens, slots, view.what_if.prefill_tokens)
        active_blocks = _shifted(active_blocks, slots, view.what_if.decode_blocks)
        active_requests = _shifted(active_requests, slots, view.what_if.active_requests)
    transfer_s = transfer_levels = None
    if view.transfer is not None:
        transfer_s, transfer_levels = _transfer(view, context, slots, mask, view.transfer)
    return CostInputs(
        isl_tokens=request.isl_tokens,
        block_size=request.block_size,
        prompt_blocks=request.prompt_blocks,
        overlap_blocks=overlap_blocks,
        prefill_tokens=prefill_tokens,
        active_blocks=active_blocks,
        shared_blocks=shared_blocks,
        active_requests=active_requests,
        multipliers=_multipliers(view, context, slots),
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        trust=trust,
        indexed_blocks=indexed_blocks,
        booked_tokens=booked_tokens,
        transfer_s=transfer_s,
        transfer_levels=transfer_levels,
        following=None if context.following is None else context.following(slots),
        predicted_blocks=predicted_blocks,
    )


@dataclass(slots=True)
class _Cached:
    """The columns of cached blocks, as far as they depend on predictions."""

    overlap: list[int]
    indexed: list[int] | None
    host: list[int] | None
    disk: list[int] | None


def _predict(
    view: RoutingView,
    request: RoutingRequest,
    slots: Sequence[int],
    mask: int,
    by_prompt: Sequence[Sequence[int]],
    trust: Sequence[int] | None,
    found: _Cached,
) -> list[int] | None:
    """Add to ``found`` the blocks that slots of ``mask`` will have by their bookings, and return
    the column of those; None without any.

    Of what events show and what was booked the larger counts, for each prompt of a batch
    (``by_prompt``: what the events show). Lower tiers count behind it only.
    """
    side, best = [0] * len(slots), [0] * len(slots)
    for number, hashes in enumerate((request.sequence_hashes, *request.more_hashes)):
        if view.index.exact:
            hashes = hashes[: request.most_reusable_of(number)]
        column = _column(view.predicted.find_matches(hashes, mask), slots)
        side = list(map(add, side, column))
        best = list(map(add, best, map(max, column, by_prompt[number])))
    predicted = [0] * len(slots)
    indexed = None if found.indexed is None else list(found.indexed)
    host = None if found.host is None else list(found.host)
    disk = None if found.disk is None else list(found.disk)
    for i in compress(range(len(slots)), side):
        doubtful = trust is not None and trust[i]
        if doubtful and view.config.router_on_degraded == "load-only":
            continue
        more = (side[i] if doubtful else best[i]) - found.overlap[i]
        if more <= 0:
            continue
        predicted[i] = more
        found.overlap[i] += more
        if indexed is not None:
            indexed[i] = max(indexed[i], found.overlap[i])
        for tier in filter(None, (host, disk)):
            covered = min(tier[i], more)
            tier[i] -= covered
            more -= covered
    if not any(predicted):
        return None
    found.indexed, found.host, found.disk = indexed, host, disk
    return predicted


def learned_blocks(
    view: RoutingView, request: RoutingRequest, slots: Sequence[int], mask: int
) -> Iterable[int]:
    """Leading prompt blocks of the slots in ``mask`` by what was booked there; 0 for others."""
    indexes = [index for index in view.learned if index.live & mask]
    if not indexes:
        return repeat(0, len(slots))
    found = [0] * len(slots)
    for number, hashes in enumerate((request.sequence_hashes, *request.more_hashes)):
        if view.index.exact:
            hashes = hashes[: request.most_reusable_of(number)]
        for index in indexes:  # a slot has its blocks in one of them
            more = _column(index.find_matches(hashes, mask), slots)
            found = list(map(add, found, more))
    return found


def _lower_columns(
    view: RoutingView, request: RoutingRequest, slots: Sequence[int], overlap: Sequence[int]
) -> tuple[list[int] | None, list[int] | None]:
    """Prompt blocks in host memory and on disk; None for a tier where no candidate has any."""
    host, disk = [0] * len(slots), [0] * len(slots)
    hashes = request.local_hashes
    if view.index.exact:
        hashes = hashes[: request.most_reusable]
    for i, slot in enumerate(slots):
        if view.tiers.mask >> slot & 1:
            depth, parent = overlap[i], None
            if depth:
                parent = view.index.name_of(slot, request.sequence_hashes[:depth])
            host[i], disk[i] = view.tiers.extend(slot, parent, hashes, depth)
    return host if any(host) else None, disk if any(disk) else None


def _transfer(
    view: RoutingView,
    context: SelectionContext,
    slots: Sequence[int],
    mask: int,
    table: TransferTable,
) -> tuple[list[float] | None, list[str] | None]:
    """The seconds from where the request or its KV cache is, and the classes of the distances.

    None where the place, or the size of the KV cache, is unknown.
    """
    if context.stage == "decode":
        if context.source is None:
            return None, None
        place = table.place(context.source)
        seconds = decode_seconds(view.registry, table, context.request)
    else:
        if view.own_place is None:
            return None, None
        place, seconds = view.own_place, table.seconds(0)
    if seconds is None:
        return None, None
    masks = view.classes.of(view.registry, table, place)
    column, classes = transfer_columns(masks, slots, mask, seconds)
    names = (*table.names, BEYOND)
    return column, list(map(names.__getitem__, classes))


def decode_seconds(
    registry: WorkerRegistry, table: TransferTable, request: RoutingRequest
) -> tuple[float, ...] | None:
    """The time of the request's KV transfer in each class; None where its size is unknown.

    An alias or an adapter has the size of its workers' model.
    """
    size = table.size_of(request.model)
    members = registry.model(request.model) if size is None and table.by_model else 0
    if members:
        size = table.size_of(registry.worker((members & -members).bit_length() - 1).model)
    return None if size is None else table.seconds(request.isl_tokens * size)


def _multipliers(
    view: RoutingView, context: SelectionContext, slots: Sequence[int]
) -> list[float] | None:
    # As in Dynamo, a pinned request has no preferences: there is no choice left.
    preferred = context.constraints.preferred
    if not preferred or context.pin is not None:
        return None
    masks = [(view.registry.taint(item.taint), item.weight or 0.0) for item in preferred]
    if len(masks) == 1:
        mask, weight = masks[0]
        matched = preference_multiplier((weight,))
        return [matched if mask >> slot & 1 else 1.0 for slot in slots]
    return [preference_multiplier(w for mask, w in masks if mask >> slot & 1) for slot in slots]


def _column(overlaps: Overlaps, slots: Sequence[int]) -> list[int]:
    column = [0] * len(slots)
    if not overlaps.levels:
        return column
    first = slots[0]
    if slots[-1] - first == len(slots) - 1:
        for depth, mask in overlaps.levels:
            for slot in slots_of(mask):
                column[slot - first] = depth
        return column
    sparse: dict[int, int] = {}
    for depth, mask in overlaps.levels:
        sparse.update(dict.fromkeys(slots_of(mask), depth))
    return list(map(sparse.get, slots, repeat(0)))


def _shifted(column: list[int], slots: Sequence[int], deltas: Mapping[int, int]) -> list[int]:
    return [max(0, value + deltas.get(slot, 0)) for value, slot in zip(column, slots, strict=True)]


def _rejections(
    one: Filter, mask: int, view: RoutingView, context: SelectionContext, limit: int | None
) -> tuple[Rejection, ...]:
    registry = view.registry
    slots = registry.candidates(mask).slots[:limit]
    return tuple(
        Rejection(
            registry.worker(slot), registry.ref(slot).dp_rank, one.reason(slot, view, context)
        )
        for slot in slots
    )


def _refused(funnel: Sequence[FunnelStep], context: SelectionContext) -> Outcome:
    """The outcome of a funnel without candidates."""
    last = funnel[-1] if funnel else None
    if last is None or not last.entered or last.filter in ("model", "worker_set", "role"):
        return "no_workers"
    if last.filter == "busy":
        return "all_busy"
    if last.filter == "direct":
        return "not_pinned"
    return "pinned_ineligible" if context.pin is not None else "no_eligible_worker"


def eligible(view: RoutingView, context: SelectionContext, filters: Sequence[Filter]) -> int:
    """The slots that pass all filters, without reasons; used by the decode-capacity guard."""
    mask = view.registry.alive
    for one in filters:
        passing = one.mask(view, context)
        if passing is not None:
            mask &= passing
    return mask


def role_mask(
    registry: WorkerRegistry, model: str, role: Role, worker_set: str | None = None
) -> int:
    """Registered ranks of a model (and of a set of workers) with a role, available or not."""
    mask = registry.model(model) & registry.role(role)
    return mask if worker_set is None else mask & registry.worker_set(worker_set)
