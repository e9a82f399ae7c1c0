"""``RouteResult``: a routing decision as JSON.

The command line prints it, `POST /v1/route` returns it and `why` reads it. Use ``worker`` as the
key of a worker: ids exceed 2^53, the largest integer that JSON readers keep exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.doubts import Doubt, Varies, doubt, judge, percent, some_names
from router_core import (
    BusyLine,
    Candidate,
    Decision,
    Freshness,
    FunnelStep,
    Question,
    Rejection,
    Router,
    RoutingPlan,
    RoutingRequest,
    RoutingView,
    flip,
    preference,
)

SCHEMA = 1
#: The load source where no source reports load.
UNKNOWN_LOAD = "unknown"
#: Prefill ranks whose decode hop is listed where several were possible.
MAX_BY_PREFILL = 16


class Ref(msgspec.Struct, frozen=True):
    """One data-parallel rank of one worker."""

    worker: str
    worker_id: int
    dp_rank: int = 0


class Term(msgspec.Struct, frozen=True):
    """One term of the cost formula. ``unit``: blocks, for example."""

    name: str
    unit: str
    weight: float


class Constraint(msgspec.Struct, frozen=True):
    """One taint that the request requires or prefers. ``origin``: request, or a worker's policy."""

    taint: str
    kind: str
    weight: float | None = None
    origin: str = "request"


class RejectedRow(msgspec.Struct, frozen=True):
    """One rank that a filter rejected: its ``value`` and the ``limit``."""

    worker: str
    worker_id: int
    code: str
    message: str
    dp_rank: int = 0
    domains: dict[str, str] = {}
    value: str | int | float | None = None
    limit: str | int | float | None = None


class FunnelRow(msgspec.Struct, frozen=True):
    filter: str
    entered: int
    left: int
    skipped: str | None = None
    rejected: list[RejectedRow] = []


class CandidateRow(msgspec.Struct, frozen=True):
    """One scored rank. ``host_blocks``: prompt blocks in host memory after the cached ones
    (``overlap_blocks``), ``disk_blocks``: those after them on disk. ``usable_blocks``: the cached
    ones that the engine reuses; it always computes the prompt's last token. ``index``: whether the
    rank's index is ``exact``, ``degraded``, ``estimated`` or ``none``; of its ``indexed_blocks``
    those in ``overlap_blocks`` count. ``booked_prefill_tokens``: the active prefill tokens before
    the prefill load model let them fall; absent where none fall. ``device``: ``cpu`` or an
    accelerator; absent where unknown. ``predicted_blocks``: those of ``overlap_blocks`` that were
    sent there just now, and that no event has shown yet; absent without any. ``transfer_level``:
    the narrowest level of --router-kv-transfer-qos on which both workers of the pair agree;
    ``following``: the cost of the best decode hop after this prefill worker. Both absent where off.
    """

    worker: str
    worker_id: int
    cost: float
    dp_rank: int = 0
    domains: dict[str, str] = {}
    overlap_blocks: int = 0
    prefill_blocks: float | None = None
    decode_blocks: float | None = None
    active_requests: int = 0
    active_prefill_tokens: int = 0
    terms: dict[str, float] = {}
    multiplier: float = 1.0
    probability: float = 0.0
    host_blocks: int = 0
    disk_blocks: int = 0
    usable_blocks: int = 0
    indexed_blocks: int = 0
    index: str = "exact"
    booked_prefill_tokens: int | UnsetType = UNSET
    device: str | UnsetType = UNSET
    predicted_blocks: int | UnsetType = UNSET
    #: The class of the distance to there, by the table of links: a level, or ``beyond``.
    transfer_level: str | UnsetType = UNSET
    #: The part of the cost that is the lowest cost of a decode worker after this one.
    following: float | UnsetType = UNSET


class PrefillPrediction(msgspec.Struct, frozen=True):
    """How long the winner's prefill is expected to take, and the model that predicts it.

    It computes ``tokens`` of the prompt, after ``cached`` ones, in ``seconds``.
    """

    model: str
    tokens: int
    cached: int
    seconds: float


class SessionRow(msgspec.Struct, frozen=True):
    """The worker that the request's session is bound to, for ``left_s`` more seconds.

    ``kept``: it was chosen. Else ``excluded`` is the filter that excludes it, or ``extra_cost`` the
    cost above that of the winner, more than a session may cost.
    """

    worker: str
    worker_id: int
    dp_rank: int
    left_s: float
    kept: bool
    excluded: str | UnsetType = UNSET
    extra_cost: float | UnsetType = UNSET


class FlipRow(msgspec.Struct, frozen=True):
    """``worker`` None: ``change`` is a weight."""

    worker: str | None
    change: str
    by: float


class PreferenceRow(msgspec.Struct, frozen=True):
    """How near a preferred taint is to losing: it loses where ``now`` exceeds ``crossover``."""

    taint: str
    weight: float
    crossover: float
    now: float | None
    smallest_weight: float | None
    verdict: str


class IndexFreshness(msgspec.Struct, frozen=True):
    """``publishers``: ranks that publish KV events; ``current``: those whose index is current.
    ``estimated``: ranks whose cache is estimated from requests sent there.
    """

    publishers: int = 0
    current: int = 0
    gaps: int = 0
    oldest_s: float | None = None
    estimated: int = 0


class LoadFreshness(msgspec.Struct, frozen=True):
    source: str = "unknown"
    oldest_s: float | None = None


class FreshnessRow(msgspec.Struct, frozen=True):
    index: IndexFreshness = IndexFreshness()
    load: LoadFreshness = LoadFreshness()


class DeviceBudgetRow(msgspec.Struct, frozen=True):
    """What mode device-aware-weighted compares: workers and running requests of both classes.

    The ``next`` class is ``cpu`` while ``cpu_requests`` is below ``allowed_cpu``, which is
    accelerator_requests * cpu_workers / (ratio * accelerators), rounded down.
    """

    next: str
    ratio: float
    cpu_workers: int
    cpu_requests: int
    accelerators: int
    accelerator_requests: int
    allowed_cpu: int


class QueueLimit(msgspec.Struct, frozen=True):
    """The limit of the router queue for which a request may not wait (any more)."""

    policy_class: str
    limit_kind: str
    current: int
    limit: int


class QueueRow(msgspec.Struct, frozen=True):
    """What the router queue does with a request, or did.

    ``waits``: it has to wait now. ``all_busy``: all ``ranks`` that could take it hold more active
    prefill tokens than its class allows; ``needs`` tokens have to finish on ``nearest``.
    ``backlog`` requests of the class waited already, ``ahead`` of them go first; None: not known.
    ``waited_s``: seconds that it waited.
    """

    policy_class: str
    queue_policy: str
    waits: bool
    uncached_tokens: int
    ranks: int
    all_busy: bool = False
    needs: int = 0
    nearest: str | None = None
    backlog: int | None = 0
    ahead: int | None = 0
    priority: int = 0
    strict_priority: int = 0
    prefill_busy_threshold: int | None = None
    prefill_busy_threshold_frac: float | None = None
    waited_s: float | None = None
    refused: QueueLimit | None = None


class DecisionResult(msgspec.Struct, frozen=True):
    """One hop. ``outcome`` is ``selected`` or the reason of a refusal."""

    id: str
    stage: str
    mode: str
    outcome: str
    winner: Ref | None = None
    margin: float | None = None
    tied: list[Ref] = []
    temperature: float = 0.0
    parameters: dict[str, Any] = {}
    terms: list[Term] = []
    constraints: list[Constraint] = []
    funnel: list[FunnelRow] = []
    candidates: list[CandidateRow] = []
    overlap_modelled: bool = True
    notes: list[str] = []
    message: str | None = None
    #: The LoRA adapter, and whether the request has a cache salt: both separate cached blocks.
    lora: str | None = None
    salted: bool = False
    flip: FlipRow | None = None
    preference: PreferenceRow | None = None
    #: None for a past decision: the age of its data is not recorded.
    freshness: FreshnessRow | None = None
    #: Absent without a prefill load model.
    prefill_load: PrefillPrediction | UnsetType = UNSET
    #: Mode power-of-two: the two ranks that were drawn, in this order, and the number from 0 to 1
    #: that drew them. The one with fewer active requests wins, and the first of equals.
    drawn: list[Ref] | UnsetType = UNSET
    sample: float | UnsetType = UNSET
    #: Mode device-aware-weighted: why this class of devices gets the request.
    devices: DeviceBudgetRow | UnsetType = UNSET
    #: The worker of the request's session, where it is bound to one.
    session: SessionRow | UnsetType = UNSET
    #: Absent without a router queue, and on the decode hop.
    queue: QueueRow | UnsetType = UNSET


class Winner(msgspec.Struct, frozen=True):
    prefill: Ref | None = None
    decode: Ref | None = None


class ByPrefill(msgspec.Struct, frozen=True):
    prefill: Ref
    decode: DecisionResult | None


class PairRow(msgspec.Struct, frozen=True):
    """A prefill and a decode worker; ``cost`` is the sum of both hops. ``decode`` None: not known
    for a past decision."""

    prefill: Ref
    decode: Ref | None
    cost: float


class PairChoice(msgspec.Struct, frozen=True):
    """The pair that was chosen, and the one that choosing hop by hop would have found."""

    best: PairRow
    greedy: PairRow


class WorkerSetRow(msgspec.Struct, frozen=True):
    """One set of workers that a frontend can draw before it chooses a worker in it.

    ``available`` of its ``workers`` can be chosen; the ``share`` of requests that the set gets
    follows from that. ``prefill`` and ``decode``: the decision within the set.
    """

    name: str
    workers: int
    available: int
    share: float
    winner: Winner
    prefill: DecisionResult | None
    decode: DecisionResult | None


class BusyRow(msgspec.Struct, frozen=True):
    """A worker's load in tokens or blocks, and the line above which it is busy (None: unknown)."""

    worker: str
    value: float
    limit: float | None = None


class BypassRow(msgspec.Struct, frozen=True):
    """The verdict of conditional disaggregation: whether the prefill hop is left out, and why.

    ``decode`` is the worker that would do everything; it has ``cached_tokens`` of the prompt and
    would compute ``eff_isl``. ``drawn``: another one was as likely, with the other verdict.
    """

    bypassed: bool
    reason: str
    message: str
    policy: str
    eff_isl_threshold: int
    eff_isl_ratio_threshold: float
    cached_tokens: int = 0
    eff_isl: int = 0
    decode: str | None = None
    prefill_load: BusyRow | None = None
    decode_load: BusyRow | None = None
    drawn: bool = False


class ObservedChoice(msgspec.Struct, frozen=True):
    """A choice of a Dynamo frontend that dynctl observed; what else a result has is a prediction.

    ``source``: where it was read; ``router``: the frontend's id in hex, empty where the source does
    not have it. ``predicted``: the worker of the final hop that dynctl would have chosen;
    ``as_predicted``: whether the chosen one costs as little. Both are None without a prediction,
    with the reason in ``unpredicted``. ``cost``: the frontend's own, in blocks, where its log has
    it. ``refused``: the frontend's message; then nothing was chosen.
    """

    source: str
    router: str = ""
    prefill: Ref | None = None
    decode: Ref | None = None
    predicted: Ref | None = None
    as_predicted: bool | None = None
    unpredicted: str = ""
    cost: float | None = None
    refused: str = ""


class RouteResult(msgspec.Struct, frozen=True):
    """The answer to "where would this request go, and why".

    ``doubts``: what is unknown, those that can change the winner first. ``certain``: none of them
    can; False too where it is not known, as from a frontend that reports no doubts.
    ``worker_sets``: where the workers of the model form several sets, the decision in each; the
    answer itself is that of ``worker_set``, the most likely one. ``status``: the HTTP status with
    which a Dynamo frontend refuses the request, where it is known. ``bypass``: only with
    conditional disaggregation. ``observed``: what a Dynamo frontend chose, only in past decisions
    of ``serve observe``; ``winner`` and the hops are then predictions.
    """

    model: str
    mode: str
    tokens: int
    block_size: int
    blocks: int
    winner: Winner
    prefill: DecisionResult | None
    decode: DecisionResult | None
    id: str = ""
    preset: str | None = None
    assumptions: list[str] = []
    doubts: list[Doubt] = []
    certain: bool = False
    relaxed: bool = False
    decode_by_prefill: list[ByPrefill] = []
    worker_set: str | None = None
    worker_sets: list[WorkerSetRow] = []
    status: int | None = None
    bypass: BypassRow | UnsetType = UNSET
    #: Where prefill and decode are chosen as a pair, at temperature 0.
    pairs: PairChoice | UnsetType = UNSET
    observed: ObservedChoice | UnsetType = UNSET
    kind: str = "RouteResult"
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        """Whether every hop has a winner; of an observed choice, whether there was one."""
        if not isinstance(self.observed, UnsetType):
            return not self.observed.refused
        hops = [hop for hop in (self.prefill, self.decode) if hop is not None]
        return bool(hops) and all(hop.winner is not None for hop in hops)


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

    def shown(decision: Decision | None) -> DecisionResult | None:
        if decision is None:
            return None
        return decision_result(decision, freshness_of(router, decision, now, load_source))

    prefill, decode = plan.prefill, plan.decode
    by_prefill = [
        ByPrefill(ref, shown(other.decode))
        for other in islice(router.decode_by_prefill(request, plan, view=view), MAX_BY_PREFILL)
        if (ref := decision_ref(other.prefill)) is not None
    ]
    hops = (shown(prefill), shown(decode))
    question = Question(router, request, plan, view)
    found = judge(
        [
            *_drawn(hops),
            *_refused_draws(by_prefill),
            *_drawn_bypass(plan),
            *_estimated(hops),
            *_waiting(hops, doubts := list(doubts)),
            *doubts,
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
        doubts=found,
        certain=not any(one.matters for one in found),
        winner=Winner(decision_ref(prefill), decision_ref(decode)),
        prefill=hops[0],
        decode=hops[1],
        decode_by_prefill=by_prefill,
        relaxed=plan.relaxed,
        bypass=bypass_row(plan),
        pairs=pair_choice(plan, decode_after),
    )


def bypass_row(plan: RoutingPlan) -> BypassRow | UnsetType:
    """The verdict of conditional disaggregation; unset where it was not in force."""
    one = plan.bypass
    if one is None:
        return UNSET
    return BypassRow(
        one.bypassed,
        one.reason,
        one.message,
        one.rule.policy,
        one.rule.eff_isl_threshold,
        float(one.rule.eff_isl_ratio_threshold),
        one.cached_tokens,
        one.eff_isl,
        one.decode,
        _busy_row(one.prefill_load),
        _busy_row(one.decode_load),
        one.drawn,
    )


def _busy_row(line: BusyLine | None) -> BusyRow | None:
    if line is None:
        return None
    return BusyRow(line.worker, float(line.value), _float(line.limit))


def _drawn_bypass(plan: RoutingPlan) -> Iterator[Doubt]:
    """A doubt where a draw decides whether the prefill hop is left out."""
    if plan.bypass is not None and plan.bypass.drawn:
        yield doubt("DYR0785", worker=plan.bypass.decode)


def _drawn(hops: Iterable[DecisionResult | None]) -> Iterator[Doubt]:
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
                    share=percent(best.probability),
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
                share=percent(best.probability),
            )


def _refused_draws(by_prefill: Sequence[ByPrefill]) -> Iterator[Doubt]:
    """A doubt where the request is refused after some of the possible prefill workers only."""
    refused = [one for one in by_prefill if one.decode is None or one.decode.winner is None]
    if 0 < len(refused) < len(by_prefill):
        names = some_names(one.prefill.worker for one in refused)
        yield doubt("DYR0725", refused=len(refused), drawn=len(by_prefill), names=names)


def _estimated(hops: Iterable[DecisionResult | None]) -> Iterator[Doubt]:
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


def _waiting(hops: Iterable[DecisionResult | None], doubts: Iterable[Doubt]) -> Iterator[Doubt]:
    """A doubt where the request waits first: it is decided on the load of that later moment."""
    if any(one.code == "DYR0713" for one in doubts):
        return
    for hop in hops:
        if hop is not None and hop.queue is not UNSET and hop.queue.waits:
            yield doubt("DYR0713", why=waiting_text(hop.queue))


def waiting_text(queue: QueueRow) -> str:
    """That a request waits in the router queue, or waited: behind how many others, and why."""
    past = queue.waited_s is not None
    why = []
    if queue.all_busy:
        limits = []
        if queue.prefill_busy_threshold is not None:
            limits.append(f"{queue.prefill_busy_threshold:,}")
        if queue.prefill_busy_threshold_frac is not None:
            limits.append(f"{queue.prefill_busy_threshold_frac:g} x max_num_batched_tokens")
        which = "the eligible rank" if queue.ranks == 1 else f"all {queue.ranks:,} eligible ranks"
        verb = "held" if past else "holds" if queue.ranks == 1 else "hold"
        text = f"{which} {verb} more active prefill tokens than {' or '.join(limits)}"
        if not past:
            text += f" ({queue.nearest} has {queue.needs:,} too many)"
        why.append(text)
    if queue.backlog:
        verb = "waited" if past else "waits" if queue.backlog == 1 else "wait"
        why.append(f"{queue.backlog:,} of its class {verb} already")
    behind = "behind an unknown number of others"
    if queue.ahead is not None:
        others = f"{queue.ahead:,} other{'' if queue.ahead == 1 else 's'}"
        behind = f"behind {others}" if queue.ahead else "first in line"
    verb = f"waited {queue.waited_s:,.3f} s" if past else "waits"
    return (
        f"the request {verb} in the router queue, class {queue.policy_class}, {behind}: "
        + " and ".join(why or ["it was tried again"])
    )


#: State of an index -> why it may be wrong.
_INCOMPLETE: Final = {
    "disconnected": "its event stream is not connected",
    "gapped": "events were lost",
    "over_limit": "it had more blocks than the worker can have, and starts again",
    "recovering": "what was cached before is not read yet",
}


def index_doubts(router: Router, plan: RoutingPlan) -> Iterator[Doubt]:
    """The candidates whose index is not current, by its state.

    Cached blocks count on the first hop, which computes the prompt, and with conditional
    disaggregation on the decode hop too.
    """
    hops = (hop for hop in (plan.prefill, plan.decode) if hop is not None and hop.credits_overlap)
    stale: dict[str, list[str]] = {}
    for worker, ref in ((w, r) for hop in hops for w, r in zip(hop.workers, hop.refs, strict=True)):
        slot = router.registry.slot(ref.worker_id, ref.dp_rank)
        row = None if slot is None else router.freshness.get(slot)
        if row is not None and row.state not in ("absent", "current", "estimated"):
            stale.setdefault(row.state, []).append(worker.name)
    for state, names in stale.items():
        varies = Varies(overlap=True, workers=list(dict.fromkeys(names)))
        why = _INCOMPLETE.get(state, f"the index is {state}")
        yield doubt("DYR0705", varies=varies, workers=some_names(names), why=why)


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
            Constraint(one.taint, one.kind, _float(one.weight), one.origin)
            for one in decision.constraints.items
        ],
        funnel=[_funnel_row(step) for step in decision.funnel],
        candidates=[_candidate_row(row) for row in decision.rows()],
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
        added = decision.inputs.session_blocks if decision.inputs is not None else None
        # Without what the session adds to the others.
        extra = decision.costs[at] - decision.costs[decision.winner]
        extra += added[decision.winner] if added is not None else 0.0
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
    one = decision.queue
    if one is None:
        return UNSET
    full = one.refused
    return QueueRow(
        one.policy_class,
        one.queue_policy,
        one.waits and full is None,
        one.uncached_tokens,
        one.ranks,
        one.all_busy,
        one.needs,
        one.nearest,
        one.backlog,
        one.ahead,
        one.priority,
        one.strict_priority,
        one.prefill_busy_threshold,
        one.prefill_busy_threshold_frac,
        None if one.waited_s is None else round(one.waited_s, 6),
        None
        if full is None
        else QueueLimit(full.policy_class, full.limit_kind, full.current, full.limit),
    )


def _prediction(decision: Decision) -> PrefillPrediction | UnsetType:
    one = decision.predicted
    if one is None:
        return UNSET
    return PrefillPrediction(one.model, one.tokens, one.cached, float(one.seconds))


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


def _candidate_row(row: Candidate) -> CandidateRow:
    return CandidateRow(
        worker=row.worker.name,
        worker_id=row.worker.worker_id,
        cost=float(row.cost),
        dp_rank=row.dp_rank,
        domains=dict(row.worker.domains),
        overlap_blocks=row.overlap_blocks,
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
