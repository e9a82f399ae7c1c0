"""Plan the hops of a request: prefill, the constraints that it implies, decode.

All functions read a RoutingView and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from xxhash import xxh3_64_hexdigest

from router_core.changes import Stage
from router_core.conditional_disagg import BusyLine, Bypass
from router_core.decision import Decision, Queueing, RoutingPlan
from router_core.errors import PolicyUnderivable
from router_core.pairs import chooses_pairs, following_costs
from router_core.policy_classes import PolicyClass
from router_core.router_queue import Lane, score
from router_core.routing_view import Pin, RoutingRequest, RoutingView, SelectionContext
from router_core.selection import eligible, select
from router_core.taints import NO_CONSTRAINTS, RoutingConstraints, TaintConstraint
from router_core.topology import ImpliedConstraints, TransferGroups, implied_constraints
from router_core.worker_sets import slots_of
from router_core.workers import UNKNOWN_BATCHED_TOKENS, Role, Worker

#: Domains in one note.
_MOST_NAMED = 4
#: Why the priority of a request changes nothing.
QUEUE_OFF = "the router queue is off (it needs router_queue_threshold, in mode kv)"


def stages(
    view: RoutingView, model: str, worker_set: str | None = None, served_name: str | None = None
) -> tuple[Stage, ...]:
    """The hops of a request of ``model`` on the current fleet: prefill and decode, or aggregated.

    Disaggregated if a prefill worker is available, unless only aggregated workers could decode.
    ``worker_set`` and ``served_name`` are those of the request.
    """
    registry = view.registry
    serving = registry.model(model)
    if served_name is not None or worker_set is not None:
        serving = registry.serving(model, served_name, worker_set)
    prefill = serving & registry.roles[Role.PREFILL] & ~registry.unavailable
    decode = serving & registry.roles[Role.DECODE]
    if prefill and (decode or not serving & registry.roles[Role.AGGREGATED]):
        return ("prefill", "decode")
    return ("aggregated",)


def plan(
    view: RoutingView,
    request: RoutingRequest,
    *,
    samples: tuple[float, float] = (0.0, 0.0),
    detail: bool = False,
) -> RoutingPlan:
    """Decide every hop of a request without booking any.

    ``required`` is checked here, before dispatch: a plan without a decode worker is a refusal
    although its prefill hop has a winner.
    """
    hops = stages(view, request.model, request.worker_set, request.served_name)
    if hops == ("aggregated",):
        decision = _select(view, request, "aggregated", sample=samples[0], detail=detail)
        decision = _with_queueing(view, request, decision)
        if decision.winner is None:
            decision = _with_message(view, request, decision)
        return RoutingPlan(request.id, request.model, None, decision)
    prefill = _select_prefill(view, request, samples[0], detail)
    bypass = None
    if view.config.skips_prefill:
        bypass, alone = _bypass(view, request, prefill, samples[1], detail)
        if bypass.bypassed and alone is not None:
            alone = _with_queueing(view, request, alone)
            return RoutingPlan(request.id, request.model, None, alone, bypass=bypass)
    prefill = _with_queueing(view, request, prefill)
    made = continue_plan(view, request, prefill, sample=samples[1], detail=detail)
    return made if bypass is None else replace(made, bypass=bypass)


def continue_plan(
    view: RoutingView,
    request: RoutingRequest,
    prefill: Decision,
    *,
    sample: float = 0.0,
    detail: bool = False,
) -> RoutingPlan:
    """The plan that follows from a prefill decision; decides the decode hop again.

    Frontends use it between the hops too, when prefill is done and the fleet may have changed.
    """
    prefill_only = RoutingPlan(request.id, request.model, prefill, None)
    if prefill.winner is None:
        return prefill_only
    try:
        derived = _implied_constraints(view, request.model, prefill.worker)
    except PolicyUnderivable as error:
        return replace(prefill_only, prefill=_underivable(prefill, error))
    decode, relaxed = _decode(view, request, prefill.worker, derived, sample, detail)
    return replace(
        prefill_only, decode=decode, implied=_stated_constraints(view, derived), relaxed=relaxed
    )


def one_hop(
    view: RoutingView,
    request: RoutingRequest,
    stage: Stage,
    *,
    after: Worker | None = None,
    sample: float = 0.0,
    detail: bool = False,
) -> RoutingPlan:
    """Decide the prefill or the decode hop alone, for a pool whose other hop is decided elsewhere.

    ``prefill``: without the decode-capacity guard and without the cost of the decode hop that
    follows, because the decode workers are not known;
    ``implied`` are the constraints that the winner adds to the decode hop. ``decode``: as after
    prefill on the worker ``after``, whose transfer policy applies; None: no policy. Raises
    ValueError for another stage.
    """
    made = RoutingPlan(request.id, request.model, None, None)
    if stage == "prefill":
        prefill = _select(view, request, stage, sample=sample, detail=detail, pairs=False)
        if prefill.winner is None:
            return replace(made, prefill=_alone(view, request, prefill))
        try:
            derived = _implied_constraints(view, request.model, prefill.worker)
        except PolicyUnderivable as error:
            return replace(made, prefill=_underivable(prefill, error))
        prefill = _with_queueing(view, request, prefill)
        return replace(made, prefill=prefill, implied=_stated_constraints(view, derived))
    if stage != "decode":
        raise ValueError(f"stage: expected prefill or decode, got {stage!r}")
    if after is None:
        decode = _select(view, request, stage, sample=sample, detail=detail)
        return replace(made, decode=_alone(view, request, decode))
    try:
        derived = _implied_constraints(view, request.model, after)
    except PolicyUnderivable as error:
        decode = _select(view, request, stage, sample=sample, detail=detail)
        return replace(made, decode=_underivable(decode, error))
    decode, relaxed = _decode(view, request, after, derived, sample, detail)
    return replace(
        made,
        decode=_alone(view, request, decode),
        implied=_stated_constraints(view, derived),
        relaxed=relaxed,
    )


def decode_by_prefill(
    view: RoutingView, request: RoutingRequest, made: RoutingPlan
) -> Iterator[RoutingPlan]:
    """The plan for each prefill rank that could have been chosen: tied, drawn as one of two, or any
    above T = 0."""
    prefill = made.prefill
    if prefill is None or prefill.winner is None:
        return
    positions = prefill.tied
    if prefill.temperature > 0 or prefill.pair is not None:
        positions = tuple(i for i, p in enumerate(prefill.probabilities()) if p > 0)
    for position in positions:
        yield continue_plan(view, request, replace(prefill, winner=position))


def pin_of(request: RoutingRequest, stage: Stage) -> Pin | None:
    """The worker that the client chose for a hop."""
    if stage == "prefill":
        return request.pin_prefill
    if stage == "decode":
        return request.pin_decode
    return request.pin_decode or request.pin_prefill


def lane_of(request: RoutingRequest, stage: Stage) -> Lane:
    """The lane of a request that waits for a hop: requests of one lane may use the same workers."""
    pin = pin_of(request, stage)
    if pin is not None:
        return pin.worker_id, pin.dp_rank
    taints = sorted(item.taint for item in request.constraints.required)
    allowed = request.allowed_worker_ids
    if not taints and allowed is None:
        return request.served_name
    need = (request.served_name, taints, None if allowed is None else sorted(allowed))
    return xxh3_64_hexdigest(repr(need).encode("utf-8", "surrogatepass"))


def workers_of(view: RoutingView, request: RoutingRequest, stage: Stage) -> int:
    """The number of registered workers that can serve a hop of the request."""
    slots = slots_of(_serving(view, request) & view.registry.roles_for(stage))
    return len({view.registry.ref(slot).worker_id for slot in slots})


# -- inside --------------------------------------------------------------------------------


def _decode(
    view: RoutingView,
    request: RoutingRequest,
    prefill: Worker | None,
    derived: ImpliedConstraints,
    sample: float,
    detail: bool,
) -> tuple[Decision, bool]:
    """The decode hop after a prefill worker, and whether a fallback policy crossed its domain."""
    merged = request.constraints.merge(derived.constraints)
    source = None if view.transfer is None or prefill is None else prefill.domains
    decode = _select(
        view, request, "decode", constraints=merged, sample=sample, detail=detail, source=source
    )
    relaxed = False
    if decode.winner is None and derived.relaxable:
        decode, relaxed = _fall_back(view, request, decode, derived, sample, detail, source)
    if derived.note and view.config.applies_taints:
        decode = replace(decode, notes=(*decode.notes, derived.note))
    if decode.winner is None and derived.constraints and pin_of(request, "prefill") is None:
        decode = _with_served_domains(view, request, decode)
    if decode.winner is None:
        decode = _with_message(view, request, decode)
    return decode, relaxed


def _fall_back(
    view: RoutingView,
    request: RoutingRequest,
    decode: Decision,
    derived: ImpliedConstraints,
    sample: float,
    detail: bool,
    source: Mapping[str, str] | None,
) -> tuple[Decision, bool]:
    """What a fallback policy makes of a refused decode hop, and whether it crossed its domain."""
    wanted = ", ".join(item.taint for item in derived.constraints)
    if decode.outcome == "all_busy":
        message = (
            f"every decode worker with {wanted} is busy; the fallback policy crosses the domain "
            "only where it has none"
        )
        return replace(decode, message=message), False
    if decode.outcome != "no_eligible_worker":
        return decode, False
    free = _select(view, request, "decode", sample=sample, detail=detail, source=source)
    if free.winner is None:
        return decode, False
    note = f"no decode worker satisfies {wanted}; the fallback policy crosses the domain"
    return replace(free, notes=(*free.notes, note)), True


def _stated_constraints(
    view: RoutingView, derived: ImpliedConstraints
) -> tuple[TaintConstraint, ...]:
    """What the prefill worker adds to the decode hop, where constraints are applied at all."""
    return derived.constraints if view.config.applies_taints else ()


def _underivable(decision: Decision, error: PolicyUnderivable) -> Decision:
    """The refusal where the transfer policy of a prefill worker cannot be applied."""
    return replace(decision, outcome="policy_underivable", winner=None, message=str(error))


def _alone(view: RoutingView, request: RoutingRequest, decision: Decision) -> Decision:
    """The decision, with a message if the pool has no worker of the hop's role."""
    role = Role.PREFILL if decision.stage == "prefill" else Role.DECODE
    if decision.winner is not None or _serving(view, request) & view.registry.roles[role]:
        return decision
    return replace(decision, message=_no_worker(request, f"{role.value} "))


def _serving(view: RoutingView, request: RoutingRequest) -> int:
    """The slots of all workers that serve the name of the request."""
    return view.registry.serving(request.model, request.served_name, request.worker_set)


def _no_worker(request: RoutingRequest, role: str = "") -> str:
    """That no worker, or none of a role, serves the model or the name of the request."""
    if request.served_name is None:
        return f"no {role}worker is registered for model {request.model!r}"
    return f"no {role}worker of model {request.model!r} serves the name {request.served_name!r}"


def _with_queueing(view: RoutingView, request: RoutingRequest, decision: Decision) -> Decision:
    """The decision of a first hop, with what the router queue does with the request.

    A refused request does not wait, nor does one whose class has no threshold.
    """
    queue, inputs = view.queue, decision.inputs
    if queue is None:
        if not (request.priority or request.strict_priority or request.policy_class):
            return decision
        return _without_queue(request, decision, QUEUE_OFF)
    if inputs is None or decision.winner is None:
        return decision
    table = view.policy_classes.table(request.model, view.config)
    cached = inputs.most_overlap * request.block_size
    uncached = max(0, request.isl_tokens - cached)
    policy = table.class_of(request.policy_class, uncached)
    if not policy.queues:
        why = f"the class {policy.name} of the router queue has no threshold"
        return _without_queue(request, decision, why)
    queueing = Queueing(
        policy.name,
        policy.queue_policy,
        uncached,
        len(decision.workers),
        priority=request.priority,
        strict_priority=request.strict_priority,
        prefill_busy_threshold=policy.prefill_busy_threshold,
        prefill_busy_threshold_frac=policy.prefill_busy_threshold_frac,
    )
    needs, nearest = _nearest_excess(decision, inputs.prefill_tokens, policy)
    if needs > 0:
        queueing = replace(queueing, all_busy=True, needs=math.ceil(needs), nearest=nearest)
    if not queue.known:
        return replace(decision, queue=replace(queueing, backlog=None, ahead=None))
    backlog = queue.stats(request.model, policy.name).requests
    if not backlog:
        return replace(decision, queue=queueing)
    value = score(policy.queue_policy, request.arrived_at, request.priority, uncached)
    key = (-request.strict_priority, -value, math.inf)
    ahead = queue.ahead(request.model, policy.name, key)
    return replace(decision, queue=replace(queueing, backlog=backlog, ahead=ahead))


def _without_queue(request: RoutingRequest, decision: Decision, why: str) -> Decision:
    """The decision of a request that never waits, with a note if its place in the queue is set."""
    if not (request.priority or request.strict_priority or request.policy_class):
        return decision
    note = f"{request.queue_fields}: no effect on routing, {why}"
    return replace(decision, notes=(*decision.notes, note))


def _nearest_excess(
    decision: Decision, prefill_tokens: Sequence[int], policy: PolicyClass
) -> tuple[float, str | None]:
    """Tokens that the nearest rank has above the limit of the class, and its worker; 0: a rank has
    room."""
    limits: dict[int | None, float] = {}

    def excess(position: int) -> float:
        batched = decision.workers[position].runtime_config.max_num_batched_tokens
        limit = limits.get(batched)
        if limit is None:
            limit = limits[batched] = policy.limit(batched or UNKNOWN_BATCHED_TOKENS)
        return prefill_tokens[position] - limit

    # Mostly the rank with the fewest tokens has room, and the others need not be compared.
    nearest = prefill_tokens.index(min(prefill_tokens))
    if excess(nearest) <= 0:
        return 0, None
    # It is also the nearest one, unless workers have different limits.
    if len({worker.runtime_config.max_num_batched_tokens for worker in decision.workers}) > 1:
        nearest = min(range(len(prefill_tokens)), key=excess)
    return max(0.0, excess(nearest)), decision.workers[nearest].name


def _select(
    view: RoutingView,
    request: RoutingRequest,
    stage: Stage,
    *,
    constraints: RoutingConstraints | None = None,
    sample: float,
    detail: bool,
    capacity_mask: int | None = None,
    source: Mapping[str, str] | None = None,
    pairs: bool = True,
) -> Decision:
    context = _context(view, request, stage, constraints, capacity_mask)
    if source is not None:
        context = replace(context, source=source)
    elif pairs and stage == "prefill" and chooses_pairs(view):

        def decode(under: RoutingConstraints) -> SelectionContext:
            return _context(view, request, "decode", under)

        following = partial(following_costs, view, request, context=decode)
        context = replace(context, following=following)
    if (not context.constraints.items and context.domain is None) or view.config.applies_taints:
        return select(view, context, sample=sample, detail=detail)
    context = replace(context, constraints=NO_CONSTRAINTS, domain=None)
    decision = select(view, context, sample=sample, detail=detail)
    note = f"mode {view.profile.mode} does not apply taints and KV-transfer policies here"
    return replace(decision, notes=(*decision.notes, note))


def _context(
    view: RoutingView,
    request: RoutingRequest,
    stage: Stage,
    constraints: RoutingConstraints | None = None,
    capacity_mask: int | None = None,
) -> SelectionContext:
    policy = view.policy
    required = stage == "prefill" and policy is not None and policy.enforcement == "required"
    return SelectionContext(
        request=request,
        stage=stage,
        role_mask=view.registry.roles_for(stage),
        constraints=request.constraints if constraints is None else constraints,
        pin=pin_of(request, stage) if request.pin_decode or request.pin_prefill else None,
        capacity_mask=capacity_mask,
        domain=policy.domain if required and policy is not None else None,
    )


def _bypass(
    view: RoutingView, request: RoutingRequest, prefill: Decision, sample: float, detail: bool
) -> tuple[Bypass, Decision | None]:
    """The verdict of conditional disaggregation, and the decision of a decode worker that does
    everything. As in Dynamo, such a worker is chosen like an aggregated one, without a transfer
    policy's constraints, and a request that names its prefill worker keeps the hop."""
    config, rule = view.config, view.config.bypass_rule
    kept = Bypass(False, "prefill_pinned", rule, request.isl_tokens)
    if request.pin_prefill is not None:
        return kept, None
    if not request.overlap_modelled:
        return replace(kept, reason="not_tokenized"), None
    registry = view.registry
    able = registry.can_prefill if config.conditional_disagg_require_can_prefill else -1
    context = replace(
        _context(view, request, "aggregated"),
        role_mask=registry.roles[Role.DECODE] & able,
        pin=request.pin_decode,
    )
    alone = select(view, context, sample=sample, detail=detail)
    inputs = alone.inputs
    if alone.winner is None or inputs is None:
        return replace(kept, reason="no_decode_worker"), None
    prefill_load = _prefill_load(prefill, config.bypass_busy_threshold)

    def verdict(position: int) -> Bypass:
        worker, gate = alone.workers[position], config.conditional_disagg_decode_busy_threshold
        decode_load = None
        if gate is not None:
            size = worker.runtime_config.total_kv_blocks
            # With the request, its last incomplete block too; shared blocks count once.
            blocks = inputs.active_blocks[position]
            blocks += math.ceil(request.isl_tokens / request.block_size)
            if inputs.shared_blocks is not None:
                blocks -= inputs.shared_blocks[position]
            decode_load = BusyLine(worker.name, blocks, None if not size else gate * size)
        cached = inputs.cached_tokens(position, alone.parameters)
        bypassed, reason = rule.decide(request.isl_tokens, cached, prefill_load, decode_load)
        return Bypass(
            bypassed,
            reason,
            rule,
            request.isl_tokens,
            cached,
            worker.name,
            prefill_load,
            decode_load,
        )

    bypass = verdict(alone.winner)
    drawn = False
    if detail:
        likely = range(len(alone.costs)) if alone.temperature > 0 else alone.tied
        drawn = any(verdict(other).bypassed != bypass.bypassed for other in likely)
    return replace(bypass, drawn=True) if drawn else bypass, alone


def _prefill_load(prefill: Decision, threshold: float | None) -> BusyLine | None:
    """The load of the chosen prefill worker, None where it is not read or there is none."""
    if threshold is None or prefill.winner is None or prefill.inputs is None:
        return None
    worker = prefill.workers[prefill.winner]
    most = worker.runtime_config.max_num_batched_tokens or UNKNOWN_BATCHED_TOKENS
    return BusyLine(worker.name, prefill.inputs.prefill_tokens[prefill.winner], threshold * most)


def _select_prefill(
    view: RoutingView, request: RoutingRequest, sample: float, detail: bool
) -> Decision:
    capacity, crossing = _capacity(view, request)
    decision = _select(
        view, request, "prefill", sample=sample, detail=detail, capacity_mask=capacity
    )
    emptied = decision.emptied_by()
    if emptied is None or emptied.filter != "decode_capacity":
        return _with_message(view, request, decision)
    if crossing:
        # fallback: the domain has no decode worker, so its prefill workers may cross it.
        free = _select(
            view, request, "prefill", sample=sample, detail=detail, capacity_mask=crossing
        )
        skipped = "no domain has an eligible decode worker; the fallback policy may cross domains"
        funnel = tuple(
            replace(step, skipped=skipped) if step.filter == "decode_capacity" else step
            for step in free.funnel
        )
        return _with_message(view, request, replace(free, funnel=funnel))
    if _only_busy(view, request):
        decision = replace(decision, outcome="all_busy")
        if view.policy is not None and view.policy.enforcement == "fallback":
            message = (
                "every decode worker in the domains of the prefill workers is busy; the fallback "
                "policy crosses a domain only where it has none"
            )
            decision = replace(decision, message=message)
    return _with_message(view, request, decision)


def _capacity(view: RoutingView, request: RoutingRequest) -> tuple[int | None, int]:
    """Prefill slots that the decode-capacity guard admits, and those that may cross.

    None where the guard is off, the request names the workers (mode direct), or no required policy
    applies: then topology does not change routing. Pairs always have a decode worker, so the guard
    is on where they are chosen.
    """
    guarded = view.config.decode_capacity_guard or chooses_pairs(view)
    if not guarded or view.profile.mode == "direct" or not view.config.applies_taints:
        return None, 0
    groups = _groups(view)
    if not groups.groups and not groups.underivable:
        return None, 0
    decode = eligible(view, _context(view, request, "decode"), view.profile.filters)
    mask = groups.free
    crossing = 0
    for group in groups.groups:
        taint = view.registry.taint(group.taint)
        if taint & decode:
            mask |= group.mask
        elif group.relaxable and decode and not taint & _decode_if_none_was_busy(view, request):
            crossing |= group.mask
    return mask, crossing


def _decode_if_none_was_busy(view: RoutingView, request: RoutingRequest) -> int:
    """The slots that pass all filters of the decode hop, busy or not."""
    calm = tuple(filter_ for filter_ in view.profile.filters if filter_.name != "busy")
    return eligible(view, _context(view, request, "decode"), calm)


def _with_served_domains(view: RoutingView, request: RoutingRequest, decode: Decision) -> Decision:
    """The refusal of a decode hop, with a note on the domains that could have served the request:
    the prefill worker was chosen without regard to decode."""
    if view.config.decode_capacity_guard or not view.config.applies_taints:
        return decode
    prefill = eligible(view, _context(view, request, "prefill"), view.profile.filters)
    decoding = eligible(view, _context(view, request, "decode"), view.profile.filters)
    served = [
        group.taint
        for group in _groups(view).groups
        if group.mask & prefill and view.registry.taint(group.taint) & decoding
    ]
    if not served:
        return decode
    note = (
        f"{', '.join(served[:_MOST_NAMED])} has prefill and decode workers for this request: with "
        "decode_capacity_guard such domains are chosen"
    )
    return replace(decode, notes=(*decode.notes, note))


def _only_busy(view: RoutingView, request: RoutingRequest) -> bool:
    """Whether a domain with a prefill worker would have a decode worker if none was busy."""
    prefill = eligible(view, _context(view, request, "prefill"), view.profile.filters)
    decode = _decode_if_none_was_busy(view, request)
    return any(
        group.mask & prefill and view.registry.taint(group.taint) & decode
        for group in _groups(view).groups
    )


def _groups(view: RoutingView) -> TransferGroups:
    return view.groups.current(view.registry, view.policy)


def _implied_constraints(
    view: RoutingView, model: str, worker: Worker | None
) -> ImpliedConstraints:
    siblings = (w for w in view.registry if model in w.served_names and w.role is Role.PREFILL)
    return implied_constraints(worker, siblings, view.policy)


def _with_message(view: RoutingView, request: RoutingRequest, decision: Decision) -> Decision:
    """A refusal, with a message if all workers of a role are missing, or no worker is named."""
    if decision.message:
        return decision
    if decision.outcome == "not_pinned":
        hop = "" if decision.stage == "aggregated" else f"{decision.stage} "
        return replace(decision, message=f"mode direct: the request names no {hop}worker")
    message = _missing_role(view, request, decision)
    return decision if message is None else replace(decision, message=message)


def _missing_role(view: RoutingView, request: RoutingRequest, decision: Decision) -> str | None:
    model, registry = decision.model, view.registry
    if not registry.serving(model, request.served_name):
        return _no_worker(request)
    serving = _serving(view, request)
    roles = {role for role in Role if serving & registry.roles[role]}
    if decision.stage != "aggregated":
        return None if Role.DECODE in roles else _no_worker(request, "decode ")
    last = decision.emptied_by()
    if Role.DECODE not in roles or last is None or last.filter != "role":
        return None
    lack = "available" if Role.PREFILL in roles else "registered"
    return f"no prefill worker of {model!r} is {lack}, and its decode workers cannot prefill"
