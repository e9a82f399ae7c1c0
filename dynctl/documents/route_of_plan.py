"""The RouteResult of a router's plan: its rows, and the doubts that the plan itself shows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from msgspec import UNSET, UnsetType

from dynctl.base.quantities import chance
from dynctl.documents.doubts import Doubt, Varies, doubt, judge, some_names
from dynctl.documents.route_result import (
    BusyRow,
    BypassRow,
    ByPrefill,
    CandidateRow,
    Constraint,
    DecisionResult,
    DeviceBudgetRow,
    FlipRow,
    FreshnessRow,
    FunnelRow,
    IndexFreshness,
    LoadFreshness,
    PairChoice,
    PairRow,
    PreferenceRow,
    PrefillPrediction,
    QueueLimit,
    QueueRow,
    Ref,
    RejectedRow,
    RouteResult,
    SessionRow,
    Term,
    Winner,
    waiting_text,
)
from router_core import (
    BusyLine,
    Candidate,
    Decision,
    Freshness,
    FunnelStep,
    PlanQuestion,
    Rejection,
    Router,
    RoutingPlan,
    RoutingRequest,
    RoutingView,
    WorkerWithDpRank,
    flip,
    preference,
)

#: How the note of a decision begins that was made without the block hashes of its prompt.
NOT_MODELLED: Final = "cache overlap not modelled"
#: Prefill ranks whose decode hop is listed where several were possible.
MAX_BY_PREFILL = 16


def route_result(
    router: Router,
    request: RoutingRequest,
    plan: RoutingPlan,
    *,
    now: float,
    view: RoutingView | None = None,
    preset: str | None = None,
    assumptions: Iterable[str] = (),
    doubts: Iterable[Doubt] = (),
    load_source: str = "this router",
) -> RouteResult:
    """A plan as a document, with flip, preference, freshness and doubts.

    ``now`` is the time of the same clock that the router's changes carried. ``doubts``: what the
    caller does not know; those that the plan itself shows are added.
    """
    view = view or router.view()

    def document(decision: Decision | None) -> DecisionResult | None:
        if decision is None:
            return None
        return decision_result(decision, freshness_of(router, decision, now, load_source))

    prefill, decode = plan.prefill, plan.decode
    by_prefill = [
        ByPrefill(ref, document(other.decode))
        for other in islice(router.decode_by_prefill(request, plan, view=view), MAX_BY_PREFILL)
        if (ref := decision_ref(other.prefill)) is not None
    ]
    hops = (document(prefill), document(decode))
    question = PlanQuestion(router, request, plan, view)
    judged = judge(
        [
            *_drawn_winners(hops),
            *_refused_draws(by_prefill),
            *_drawn_bypass(plan),
            *overlap_doubts(plan.final),
            *_estimated_caches(hops),
            *_waiting_hops(hops, doubts := list(doubts)),
            *doubts,
            *_without_condition(router, plan, doubts),
        ],
        question,
    )

    def decode_after(position: int) -> Ref | None:
        if prefill is None:
            return None
        other = replace(prefill, winner=position)
        return decision_ref(router.continue_plan(request, other, view=view).decode)

    return RouteResult(
        id=plan.id,
        model=plan.model,
        mode=plan.final.mode,
        preset=preset,
        tokens=request.isl_tokens,
        block_size=request.block_size,
        blocks=request.prompt_blocks,
        assumptions=list(assumptions),
        doubts=judged,
        certain=not any(row.matters for row in judged),
        winner=Winner(decision_ref(prefill), decision_ref(decode)),
        prefill=hops[0],
        decode=hops[1],
        decode_by_prefill=by_prefill,
        relaxed=plan.relaxed,
        bypass=bypass_row(plan),
        pairs=pair_choice(plan, decode_after),
        tokens_estimated=not request.overlap_modelled,
    )


def bypass_row(plan: RoutingPlan) -> BypassRow | UnsetType:
    """The verdict of conditional disaggregation; unset where it was not in force."""
    bypass = plan.bypass
    if bypass is None:
        return UNSET
    return BypassRow(
        bypass.bypassed,
        bypass.reason,
        bypass.message,
        bypass.rule.policy,
        bypass.rule.eff_isl_threshold,
        float(bypass.rule.eff_isl_ratio_threshold),
        bypass.cached_tokens,
        bypass.eff_isl,
        bypass.decode,
        _busy_row(bypass.prefill_load),
        _busy_row(bypass.decode_load),
        bypass.drawn,
    )


def _busy_row(line: BusyLine | None) -> BusyRow | None:
    if line is None:
        return None
    return BusyRow(line.worker, float(line.value), _float(line.limit))


def _drawn_bypass(plan: RoutingPlan) -> Iterator[Doubt]:
    """A doubt where a draw decides whether the prefill hop is left out."""
    if plan.bypass is not None and plan.bypass.drawn:
        yield doubt("DYR0785", worker=plan.bypass.decode)


def _drawn_winners(hops: Iterable[DecisionResult | None]) -> Iterator[Doubt]:
    """A doubt for each hop whose winner is drawn: between equal costs, or at random."""
    for hop in hops:
        if hop is None or hop.winner is None or len(hop.candidates) < 2:
            continue
        if hop.drawn is not UNSET:
            best = max(hop.candidates, key=lambda row: row.probability)
            if best.probability < 1:
                yield doubt(
                    "DYR0728",
                    stage=hop.stage,
                    candidates=len(hop.candidates),
                    first=hop.drawn[0].worker,
                    second=hop.drawn[1].worker,
                    worker=best.worker,
                    share=chance(best.probability),
                )
        elif hop.tied:
            # The shown winner first.
            tied = sorted(hop.tied, key=lambda ref: ref != hop.winner)
            names = some_names(ref.worker for ref in tied)
            yield doubt("DYR0701", candidates=len(hop.tied), stage=hop.stage, names=names)
        elif hop.temperature > 0:
            best = max(hop.candidates, key=lambda row: row.probability)
            yield doubt(
                "DYR0702",
                stage=hop.stage,
                temperature=f"{hop.temperature:g}",
                worker=best.worker,
                share=chance(best.probability),
            )


def _refused_draws(by_prefill: Sequence[ByPrefill]) -> Iterator[Doubt]:
    """A doubt where the request is refused after some of the possible prefill workers only."""
    refused = [plan for plan in by_prefill if plan.decode is None or plan.decode.winner is None]
    if 0 < len(refused) < len(by_prefill):
        names = some_names(plan.prefill.worker for plan in refused)
        yield doubt("DYR0725", refused=len(refused), drawn=len(by_prefill), names=names)


def overlap_doubts(decision: Decision) -> Iterator[Doubt]:
    """A doubt where the router had no block hashes of the prompt, and so counts none as cached."""
    if not decision.overlap_modelled:
        notes = (note for note in decision.notes if note.startswith(NOT_MODELLED))
        yield doubt("DYR0704", why=next(notes, NOT_MODELLED))


def _estimated_caches(hops: Iterable[DecisionResult | None]) -> Iterator[Doubt]:
    """Doubts where the cache of candidates is an estimate or in part predicted; it counts on the
    first hop only."""
    for hop in hops:
        if hop is not None and hop.overlap_modelled:
            names = [row.worker for row in hop.candidates if row.index == "estimated"]
            if names:
                varies = Varies(overlap=True, workers=list(dict.fromkeys(names)))
                yield doubt("DYR0762", varies=varies, workers=some_names(names))
            names = [row.worker for row in hop.candidates if row.predicted_blocks]
            if names:
                varies = Varies(overlap=True, workers=list(dict.fromkeys(names)))
                yield doubt("DYR0763", varies=varies, workers=some_names(names))


def _waiting_hops(
    hops: Iterable[DecisionResult | None], doubts: Iterable[Doubt]
) -> Iterator[Doubt]:
    """A doubt where the request waits first: it is decided on the load of that later moment."""
    if any(row.code == "DYR0713" for row in doubts):
        return
    for hop in hops:
        if hop is not None and hop.queue is not UNSET and hop.queue.waits:
            yield doubt("DYR0713", why=waiting_text(hop.queue))


#: State of an index -> why it may be wrong.
_INCOMPLETE: Final = {
    "disconnected": "its event stream is not connected",
    "gapped": "events were lost",
    "over_limit": "it had more blocks than the worker can have, and starts again",
    "recovering": "what was cached before is not read yet",
    "unlinked": "it stores blocks after a block that its events do not name",
}


def index_doubts(
    router: Router, plan: RoutingPlan, excluded: Container[str] = ()
) -> Iterator[Doubt]:
    """The candidates whose index is not current, by its state, without the ``excluded`` names.

    Cached blocks count on the first hop, which computes the prompt, and with conditional
    disaggregation on the decode hop too.
    """
    stale: dict[str, list[str]] = {}
    for hop in (plan.prefill, plan.decode):
        if hop is None or not hop.credits_overlap:
            continue
        for worker, ref in zip(hop.workers, hop.refs, strict=True):
            state = _stale_state(router, ref)
            if state is not None and worker.name not in excluded:
                stale.setdefault(state, []).append(worker.name)
    for state, names in stale.items():
        varies = Varies(overlap=True, workers=list(dict.fromkeys(names)))
        why = _INCOMPLETE.get(state, f"the index is {state}")
        yield doubt("DYR0705", varies=varies, workers=some_names(names), why=why)


def _stale_state(router: Router, ref: WorkerWithDpRank) -> str | None:
    """The state of a rank's index; None where it is current, or no events are expected."""
    slot = router.registry.slot(*ref)
    row = None if slot is None else router.freshness.get(slot)
    if row is None or row.state in ("absent", "current", "estimated"):
        return None
    return row.state


def _without_condition(
    router: Router, plan: RoutingPlan, doubts: Iterable[Doubt]
) -> Iterator[Doubt]:
    """The doubts of candidates whose index is not current and that no other doubt names.

    No condition holds for an index that is not read completely yet, or that has blocks whose parent
    is missing: no batch is lost.
    """
    if plan.first.mode != "kv" or not plan.first.overlap_modelled:
        return
    named: set[str] = set()
    shown: set[str] = set()
    for known in doubts:
        shown.add(known.what)
        if known.code == "DYR0705" and known.varies is not None:
            named.update(known.varies.workers or ())
    yield from (row for row in index_doubts(router, plan, named) if row.what not in shown)


def decision_result(decision: Decision, freshness: FreshnessRow | None = None) -> DecisionResult:
    """One decision as a document."""
    turned = flip(decision)
    return DecisionResult(
        id=decision.id,
        stage=decision.stage,
        mode=decision.mode,
        outcome=decision.outcome,
        winner=decision_ref(decision),
        margin=_float(decision.margin),
        tied=[_ref_at(decision, position) for position in decision.tied],
        temperature=float(decision.temperature),
        parameters=decision.parameters.to_dict(),
        terms=[Term(term.name, term.unit, float(term.weight)) for term in decision.terms],
        constraints=[
            Constraint(item.taint, item.kind, _float(item.weight), item.origin)
            for item in decision.constraints.items
        ],
        funnel=[_funnel_row(step) for step in decision.funnel],
        candidates=[_candidate_row(row, decision) for row in decision.rows()],
        overlap_modelled=decision.overlap_modelled,
        notes=list(decision.notes),
        message=None if decision.winner is not None else decision.summary(),
        lora=decision.lora_name,
        salted=decision.salted,
        flip=None if turned is None else FlipRow(turned.worker, turned.change, turned.by),
        preference=preference_row(decision),
        freshness=freshness,
        prefill_load=_prediction(decision),
        session=_session(decision),
        drawn=UNSET if decision.pair is None else [_ref_at(decision, i) for i in decision.pair],
        sample=UNSET if decision.pair is None else float(decision.sample),
        devices=_devices(decision),
        queue=queue_row(decision),
    )


def _devices(decision: Decision) -> DeviceBudgetRow | UnsetType:
    budget = decision.budget
    if budget is None:
        return UNSET
    return DeviceBudgetRow(
        next="cpu" if budget.cpu_is_next else "accelerator",
        ratio=float(budget.ratio),
        cpu_workers=budget.cpu_workers,
        cpu_requests=budget.cpu_requests,
        accelerators=budget.accelerators,
        accelerator_requests=budget.accelerator_requests,
        allowed_cpu=budget.allowed_cpu,
    )


def _session(decision: Decision) -> SessionRow | UnsetType:
    bound = decision.session
    if bound is None:
        return UNSET
    extra: float | UnsetType = UNSET
    if bound.ref in decision.refs and decision.winner is not None and not decision.session_kept:
        at = decision.refs.index(bound.ref)
        added = None if decision.inputs is None else decision.inputs.column("session_affinity")
        # Without what the session adds to the others.
        extra = decision.costs[at] - decision.costs[decision.winner]
        extra += added.values[decision.winner] if added is not None else 0.0
    return SessionRow(
        worker=bound.name,
        worker_id=bound.ref.worker_id,
        dp_rank=bound.ref.dp_rank,
        left_s=round(bound.left_s, 3),
        kept=decision.session_kept,
        excluded=bound.excluded or UNSET,
        extra_cost=extra,
    )


def queue_row(decision: Decision) -> QueueRow | UnsetType:
    """What the router queue does with the request of a first hop."""
    queue = decision.queue
    if queue is None:
        return UNSET
    full = queue.refused
    return QueueRow(
        queue.policy_class,
        queue.queue_policy,
        queue.waits and full is None,
        queue.uncached_tokens,
        queue.ranks,
        queue.all_busy,
        queue.needs,
        queue.nearest,
        queue.backlog,
        queue.ahead,
        queue.priority,
        queue.strict_priority,
        queue.prefill_busy_threshold,
        queue.prefill_busy_threshold_frac,
        None if queue.waited_s is None else round(queue.waited_s, 6),
        None
        if full is None
        else QueueLimit(full.policy_class, full.limit_kind, full.current, full.limit),
    )


def _prediction(decision: Decision) -> PrefillPrediction | UnsetType:
    predicted = decision.predicted
    if predicted is None:
        return UNSET
    return PrefillPrediction(
        predicted.model, predicted.tokens, predicted.cached, float(predicted.seconds)
    )


def _float(value: float | None) -> float | None:
    """``value`` as JSON shows a float: settings may hold integers where floats are meant."""
    return None if value is None else float(value)


def decision_ref(decision: Decision | None) -> Ref | None:
    """The winner of a decision; None without one."""
    if decision is None or decision.winner is None:
        return None
    return _ref_at(decision, decision.winner)


def _ref_at(decision: Decision, position: int) -> Ref:
    ref = decision.refs[position]
    return Ref(decision.workers[position].name, ref.worker_id, ref.dp_rank)


def _funnel_row(step: FunnelStep) -> FunnelRow:
    return FunnelRow(
        step.filter,
        step.entered,
        step.left,
        step.skipped,
        [rejected_row(rejection) for rejection in step.rejected],
    )


def rejected_row(rejection: Rejection) -> RejectedRow:
    """One rejected rank as a document."""
    worker, reason = rejection.worker, rejection.reason
    return RejectedRow(
        worker=worker.name,
        worker_id=worker.worker_id,
        code=reason.code,
        message=reason.message,
        dp_rank=rejection.dp_rank,
        domains=dict(worker.domains),
        value=reason.value,
        limit=reason.limit,
    )


def _candidate_row(row: Candidate, decision: Decision) -> CandidateRow:
    return CandidateRow(
        worker=row.worker.name,
        worker_id=row.worker.worker_id,
        cost=float(row.cost),
        dp_rank=row.dp_rank,
        domains=dict(row.worker.domains),
        overlap_blocks=row.overlap_blocks if decision.overlap_modelled else None,
        prefill_blocks=row.prefill_blocks,
        decode_blocks=row.decode_blocks,
        active_requests=row.active_requests,
        active_prefill_tokens=row.active_prefill_tokens,
        terms=dict(row.terms),
        multiplier=float(row.multiplier),
        probability=row.probability,
        host_blocks=row.host_blocks,
        disk_blocks=row.disk_blocks,
        usable_blocks=row.usable_blocks,
        indexed_blocks=row.indexed_blocks,
        index=row.index,
        booked_prefill_tokens=UNSET
        if row.booked_prefill_tokens is None
        else row.booked_prefill_tokens,
        device=UNSET if row.worker.device is None else row.worker.device,
        predicted_blocks=row.predicted_blocks or UNSET,
        transfer_level=UNSET if row.transfer_level is None else row.transfer_level,
        following=UNSET if row.following is None else float(row.following),
    )


def pair_choice(
    plan: RoutingPlan, decode_after: Callable[[int], Ref | None]
) -> PairChoice | UnsetType:
    """The chosen pair beside that of a choice hop by hop.

    ``decode_after``: the decode worker after the prefill candidate at a position; None: not known.
    """
    prefill, decode = plan.prefill, plan.decode
    if prefill is None or decode is None or prefill.temperature > 0 or prefill.inputs is None:
        return UNSET
    chosen, greedy, following = prefill.winner, prefill.greedy, prefill.inputs.following
    if chosen is None or greedy is None or decode.winner is None or following is None:
        return UNSET
    own = prefill.own_costs
    best = PairRow(
        _ref_at(prefill, chosen),
        _ref_at(decode, decode.winner),
        float(own[chosen] + decode.costs[decode.winner]),
    )
    if greedy == chosen:
        return PairChoice(best, best)
    cost = float(own[greedy] + following[greedy])
    return PairChoice(best, PairRow(_ref_at(prefill, greedy), decode_after(greedy), cost))


def preference_row(decision: Decision) -> PreferenceRow | None:
    """How near the strongest preference was to losing; None without a preference."""
    preferred = preference(decision)
    if preferred is None:
        return None
    return PreferenceRow(
        preferred.taint,
        preferred.weight,
        preferred.crossover,
        preferred.now,
        preferred.smallest_weight,
        preferred.verdict,
    )


def freshness_of(router: Router, decision: Decision, now: float, load_source: str) -> FreshnessRow:
    """The age of the data behind a decision, over its candidates."""
    rows: list[Freshness] = []
    for worker_id in dict.fromkeys(worker.worker_id for worker in decision.workers):
        slots = router.registry.slots(worker_id)
        rows += [router.freshness[slot] for slot in slots if slot in router.freshness]
    publishers = [row for row in rows if row.index_state not in ("absent", "estimated")]
    return FreshnessRow(
        IndexFreshness(
            publishers=len(publishers),
            current=sum(row.state == "current" for row in publishers),
            gaps=sum(row.gaps for row in publishers),
            oldest_s=_oldest([row.index_at for row in publishers], now),
            estimated=sum(row.index_state == "estimated" for row in rows),
        ),
        LoadFreshness(load_source, _oldest([row.load_at for row in rows], now)),
    )


def _oldest(times: Sequence[float | None], now: float) -> float | None:
    known = [now - at for at in times if at is not None]
    return round(max(known), 3) if known else None
