"""Past decisions of a router: ``GET /v1/decisions`` and ``GET /v1/decisions/{id}``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.errors import EngineAttempt
from dynctl.documents.route_of_plan import (
    bypass_row,
    decision_ref,
    decision_result,
    overlap_doubts,
    pair_choice,
    preference_row,
)
from dynctl.documents.route_result import (
    DecisionResult,
    ObservedChoice,
    PreferenceRow,
    Ref,
    RouteResult,
    Winner,
)
from router_core import Decision, Outcome, Role, RoutingPlan, Worker, topology_of

SCHEMA = 1
#: Preferred taints of one list whose preference is computed.
MAX_PREFERENCES = 16
#: The filter of prefill workers that have no decode worker within reach.
GUARD: Final = "decode_capacity"


ResponseState = Literal[
    "running", "complete", "failed", "cut", "cancelled", "refused", "retried", "unknown"
]
RESPONSE_STATES: Final[tuple[str, ...]] = get_args(ResponseState)


class ClientResponse(msgspec.Struct, frozen=True, gc=False):
    """What became of a request: the response that its client got, and the requests to engines.

    ``state``: ``running``; ``complete``; ``failed``: the client got an error that is not a refusal
    of the router; ``cut``: the response began, and its end did not arrive; ``cancelled``: the
    client left; ``refused``: the router refused it; ``retried``: the engine of this decision
    failed, and a later decision of the same request followed; ``unknown``: not reported.
    ``status``: of the HTTP response, 499 where the client left before it began; None where none
    was sent or seen. ``error``: what went wrong, empty where nothing did. ``ttft_s`` and
    ``duration_s``: seconds from the request's arrival to the first output of a stream, and to the
    end. ``prompt_tokens``, ``cached_tokens``, ``output_tokens``: as the engine reports them; of the
    prompt else the router's count; None where that is not known. ``output_events``: of a stream
    without a report, about one for each token. ``attempts``: the requests to engines that failed,
    in their order, then those of the last plan.
    """

    state: ResponseState
    status: int | None = None
    error: str = ""
    ttft_s: float | None = None
    duration_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_events: int | None = None
    attempts: tuple[EngineAttempt, ...] = ()

    def of_earlier(self, workers: Collection[str]) -> ClientResponse:
        """The same request's response at an earlier decision, which chose ``workers``."""
        failed = tuple(
            attempt for attempt in self.attempts if attempt.problem and attempt.worker in workers
        )
        error = failed[-1].problem if failed else ""
        return ClientResponse("retried", error=error, attempts=failed)


UNKNOWN_RESPONSE: Final = ClientResponse("unknown")
RUNNING: Final = ClientResponse("running")


class ChosenRank(NamedTuple):
    """A worker and its rank that another router chose."""

    worker: Worker
    dp_rank: int

    @property
    def ref(self) -> Ref:
        return Ref(self.worker.name, self.worker.worker_id, self.dp_rank)


class Choice(NamedTuple):
    """A choice of a Dynamo frontend, beside a plan that predicts it (:class:`ObservedChoice`).

    ``refused``: outcome and message of the frontend; then ``prefill`` at most was chosen.
    ``cached_blocks``: what the frontend counted as cached at ``prefill``, None where it is unknown.
    """

    source: str
    router_id: int | None
    model: str
    prefill: ChosenRank | None = None
    decode: ChosenRank | None = None
    blocks: int = 0
    unpredicted: str = ""
    cost: float | None = None
    refused: tuple[Outcome, str] | None = None
    cached_blocks: int | None = None

    @property
    def final(self) -> ChosenRank | None:
        return self.decode or self.prefill

    @property
    def stage(self) -> str:
        final = self.final
        if final is not None and final.worker.role is Role.AGGREGATED:
            return "aggregated"
        return "prefill" if self.decode is None else "decode"


class DecisionRow(msgspec.Struct, frozen=True):
    """One past plan in a list. ``at`` is wall-clock seconds.

    ``whole`` False: only winner and runner-up were kept. ``domains`` are those of the worker that
    answered. ``preference``: how near the preferred domain was to losing; only for the newest plan
    of each preferred taint, and only with ``?preferences=1``. ``observed``: the choice of a Dynamo
    frontend; its workers are those of the row, and tokens, cached blocks, cost and margin are
    predicted. ``tokens_estimated``: the prompt was not tokenized, so ``tokens`` and ``blocks`` are
    estimates from its characters, and ``cached_blocks`` is None: unknown. ``outcome`` is that of
    the decision, ``response`` that of the request.
    """

    id: str
    at: float
    model: str
    mode: str
    outcome: str
    stage: str
    tokens: int = 0
    blocks: int = 0
    cached_blocks: int | None = 0
    prefill: Ref | None = None
    decode: Ref | None = None
    domains: dict[str, str] = {}
    prefill_domains: dict[str, str] = {}
    margin: float | None = None
    cost: float | None = None
    relaxed: bool = False
    whole: bool = True
    message: str | None = None
    preference: PreferenceRow | None = None
    #: Conditional disaggregation: why the prefill hop was left out or kept.
    bypass: str | UnsetType = UNSET
    observed: ObservedChoice | UnsetType = UNSET
    #: What decided, in a few words (:func:`short_reason`), and how topology moved the request
    #: (:func:`moved_by`), empty where it did not. A refusal has its message instead.
    why: str = ""
    moved: str = ""
    tokens_estimated: bool = False
    response: ClientResponse = UNKNOWN_RESPONSE


class DecisionList(msgspec.Struct, frozen=True):
    """Past plans, newest first. ``kept`` are in memory, ``evicted`` were removed from it.

    ``cursor``: the value of ``since=`` for the next reading; ``skipped``: plans between the last
    reading and the oldest plan of this list. ``process``: the value of ``process=`` for the next
    reading; another one after a restart, whose cursors begin at 0 again. ``ended``: with ``ends=``,
    earlier plans whose request ended after that cursor; ``ends`` is its next value.
    """

    decisions: list[DecisionRow]
    kept: int
    evicted: int
    bytes: int
    limit_bytes: int
    cursor: int = 0
    skipped: int = 0
    process: str = ""
    ended: list[DecisionRow] | UnsetType = UNSET
    ends: int | UnsetType = UNSET
    kind: str = "DecisionList"
    schema: int = SCHEMA


class PastDecision(RouteResult, frozen=True, kw_only=True):
    """A past RouteResult with its time (``at``, wall-clock seconds).

    ``attempt`` of ``attempts``: a retried request has several decisions; ``earlier`` lists the
    others. Freshness is not recorded. ``response``: what became of the request.
    """

    at: float
    whole: bool
    attempt: int = 1
    attempts: int = 1
    earlier: list[DecisionRow] = msgspec.field(default_factory=list)
    response: ClientResponse = UNKNOWN_RESPONSE


def decision_row(
    plan: RoutingPlan,
    *,
    at: float,
    whole: bool,
    choice: Choice | None = None,
    response: ClientResponse = UNKNOWN_RESPONSE,
) -> DecisionRow:
    """A plan as one row of a list. ``choice``: what the plan predicts; then it may have no hop."""
    if choice is not None:
        return _choice_row(plan, choice, at, whole)
    final = plan.final
    first = plan.prefill if plan.prefill is not None else final
    answering = final.worker
    return DecisionRow(
        id=plan.id,
        at=at,
        model=plan.model,
        mode=final.mode,
        outcome=final.outcome,
        stage=final.stage,
        tokens=final.isl_tokens,
        blocks=final.prompt_blocks,
        cached_blocks=_cached_blocks(first),
        prefill=decision_ref(plan.prefill),
        decode=decision_ref(plan.decode),
        domains={} if answering is None else dict(answering.domains),
        prefill_domains={}
        if plan.prefill is None or plan.prefill.worker is None
        else dict(plan.prefill.worker.domains),
        margin=first.margin,
        cost=None if first.winner is None else first.costs[first.winner],
        relaxed=plan.relaxed,
        whole=whole,
        message=None if plan.ok else final.summary(),
        bypass=UNSET if plan.bypass is None else plan.bypass.reason,
        why=short_reason(first) if plan.ok else "",
        moved=moved_by(plan),
        tokens_estimated=not first.overlap_modelled,
        response=response,
    )


def _cached_blocks(first: Decision) -> int | None:
    """What the winner of the first hop has of the prompt; None where that is unknown."""
    if not first.overlap_modelled:
        return None
    return 0 if first.winner is None else first.overlap_blocks(first.winner)


def short_reason(decision: Decision) -> str:
    """What made the winner of a hop win over the runner-up, in one or two words.

    ``cache``, ``load``, ``preference`` or ``decode hop``: the part of the cost by which the winner
    gained most. ``session``, ``only one``, ``tie`` and ``temperature`` need no comparison; other
    modes than kv are named. Empty for a refusal.
    """
    first, second = decision.winner, decision.runner_up
    if first is None:
        return ""
    if decision.session_kept:
        return "session"
    if second is None:
        return "only one"
    if decision.mode != "kv" or decision.inputs is None:
        return decision.mode
    if decision.tied:
        return "tie"
    margin = decision.costs[second] - decision.costs[first]
    if margin <= 0:
        return "tie" if margin == 0 else "temperature"
    gains = _gains(decision, first, second)
    return max(gains, key=lambda name: gains[name])


def _gains(decision: Decision, first: int, second: int) -> dict[str, float]:
    """Blocks by which ``first`` is cheaper than ``second``, by their origin."""
    inputs, own = decision.inputs, decision.own_costs
    assert inputs is not None
    bases = [
        sum(term.weight * term.values[place] for term in decision.terms)
        for place in (first, second)
    ]
    cache = 0.0
    if decision.credits_overlap:
        weight = next((t.weight for t in decision.terms if t.name == "prefill_blocks"), 1.0)
        tokens = [inputs.cached_tokens(at, decision.parameters) for at in (first, second)]
        cache = weight * (tokens[0] - tokens[1]) / decision.block_size
    alone = own[second] - own[first]
    return {
        "cache": cache,
        "load": bases[1] - bases[0] - cache,
        "preference": alone - (bases[1] - bases[0]),
        "decode hop": decision.costs[second] - decision.costs[first] - alone,
    }


def was_moved(relaxed: bool, steps: Iterable[tuple[str, int, int]]) -> bool:
    """Whether topology changed which workers a plan could use. ``relaxed``: a fallback policy
    crossed its domain. ``steps``: (filter, entered, left) of the prefill hop; ranks that the
    decode-capacity guard rejected had no decode worker within reach."""
    return relaxed or any(name == GUARD and left < entered for name, entered, left in steps)


def moved_by(plan: RoutingPlan) -> str:
    """How topology moved a request, in a few words; empty where it did not."""
    if plan.relaxed:
        domains = filter(None, (topology_of(item.taint) for item in plan.implied))
        wanted = ", ".join(value for _, value in domains)
        return f"crossed: no decode in {wanted or 'its domain'}"
    if not plan.ok or plan.prefill is None:
        return ""
    left_out = sum(s.entered - s.left for s in plan.prefill.funnel if s.filter == GUARD)
    return f"{left_out} left out: no decode there" if left_out else ""


def _choice_row(plan: RoutingPlan, choice: Choice, at: float, whole: bool) -> DecisionRow:
    prefill, decode = choice.prefill, choice.decode
    outcome, message = choice.refused or ("selected", None)
    row = DecisionRow(
        id=plan.id,
        at=at,
        model=choice.model,
        mode="kv",
        outcome=outcome,
        stage=choice.stage,
        blocks=choice.blocks,
        prefill=None if prefill is None else prefill.ref,
        decode=None if decode is None else decode.ref,
        domains={} if decode is None else dict(decode.worker.domains),
        prefill_domains={} if prefill is None else dict(prefill.worker.domains),
        whole=whole,
        message=message,
        observed=_observed_choice(plan, choice),
    )
    return row if plan.decode is None else _with_prediction(row, plan.decode, choice)


def _with_prediction(row: DecisionRow, predicted: Decision, choice: Choice) -> DecisionRow:
    """The row of a choice with what its prediction has of it."""
    assert row.observed is not UNSET
    position = _chosen_at(predicted, choice)
    cached_blocks: int | None = 0
    if position is not None and choice.prefill is None:
        cached_blocks = predicted.overlap_blocks(position)
    return msgspec.structs.replace(
        row,
        mode=predicted.mode,
        tokens=predicted.isl_tokens,
        blocks=predicted.prompt_blocks,
        cached_blocks=cached_blocks,
        margin=predicted.margin if row.observed.as_predicted else None,
        cost=None if position is None else predicted.costs[position],
        why=_observed_reason(predicted, row.observed) if choice.refused is None else "",
    )


def _observed_reason(predicted: Decision, observed: ObservedChoice) -> str:
    """What decided a choice of another router: known where it is the predicted one."""
    if observed.as_predicted is None:
        return ""
    return short_reason(predicted) if observed.as_predicted else "not as predicted"


def _chosen_at(predicted: Decision | None, choice: Choice) -> int | None:
    """The position of the chosen rank among the candidates of the prediction."""
    if predicted is None or choice.decode is None:
        return None
    wanted = (choice.decode.worker.worker_id, choice.decode.dp_rank)
    return next((i for i, ref in enumerate(predicted.refs) if tuple(ref) == wanted), None)


def _observed_choice(plan: RoutingPlan, choice: Choice) -> ObservedChoice:
    predicted = plan.decode
    position = _chosen_at(predicted, choice)
    agrees = None
    if predicted is not None:
        agrees = position is not None and predicted.costs[position] == min(predicted.costs)
    return ObservedChoice(
        source=choice.source,
        router="" if choice.router_id is None else f"{choice.router_id:x}",
        prefill=None if choice.prefill is None else choice.prefill.ref,
        decode=None if choice.decode is None else choice.decode.ref,
        # Of equal costs any is right.
        predicted=choice.decode.ref
        if agrees and choice.decode is not None
        else decision_ref(predicted),
        as_predicted=agrees,
        unpredicted=choice.unpredicted,
        cost=choice.cost,
        refused="" if choice.refused is None else choice.refused[1],
    )


def with_preferences(
    rows: Sequence[DecisionRow], plans: Sequence[RoutingPlan]
) -> list[DecisionRow]:
    """``rows`` (of ``plans``, newest first) with the preference of the newest whole row per taint.

    At most :data:`MAX_PREFERENCES` preferences: each takes all candidates to compute.
    """
    shown: set[str] = set()
    completed = []
    for row, plan in zip(rows, plans, strict=True):
        if row.observed is not UNSET:
            completed.append(row)
            continue
        final = plan.final
        taints = {item.taint for item in final.constraints.preferred}
        if row.whole and taints - shown and len(shown) < MAX_PREFERENCES:
            preference = preference_row(final)
            if preference is not None and preference.taint not in shown:
                shown.add(preference.taint)
                row = msgspec.structs.replace(row, preference=preference)
        completed.append(row)
    return completed


def past_decision(
    plan: RoutingPlan,
    *,
    at: float,
    whole: bool,
    preset: str | None = None,
    earlier: Sequence[DecisionRow] = (),
    choice: Choice | None = None,
    response: ClientResponse = UNKNOWN_RESPONSE,
) -> PastDecision:
    """A kept plan as a document. ``choice``: what the plan predicts; then it may have no hop."""
    if choice is not None and plan.decode is None:
        chosen = choice.final
        size = 0 if chosen is None else chosen.worker.block_size
        return PastDecision(
            id=plan.id,
            model=choice.model,
            mode="kv",
            preset=preset,
            tokens=0,
            block_size=size,
            blocks=choice.blocks,
            winner=Winner(None, None),
            prefill=None,
            decode=None,
            observed=_observed_choice(plan, choice),
            at=at,
            whole=whole,
            attempt=len(earlier) + 1,
            attempts=len(earlier) + 1,
            earlier=list(earlier),
        )
    final = plan.final
    notes = [note for hop in (plan.prefill, plan.decode) if hop is not None for note in hop.notes]
    return PastDecision(
        id=plan.id,
        model=plan.model,
        mode=final.mode,
        preset=preset,
        tokens=final.isl_tokens,
        block_size=final.block_size,
        blocks=final.prompt_blocks,
        assumptions=list(dict.fromkeys(notes)),
        doubts=list(overlap_doubts(final)),
        tokens_estimated=not final.overlap_modelled,
        winner=Winner(decision_ref(plan.prefill), decision_ref(plan.decode)),
        prefill=_past_hop(plan.prefill, whole),
        decode=_past_hop(plan.decode, whole),
        relaxed=plan.relaxed,
        bypass=bypass_row(plan),
        pairs=pair_choice(plan, lambda _: None) if whole else UNSET,
        observed=UNSET if choice is None else _observed_choice(plan, choice),
        at=at,
        whole=whole,
        attempt=len(earlier) + 1,
        attempts=len(earlier) + 1,
        earlier=list(earlier),
        response=response,
    )


def _past_hop(decision: Decision | None, whole: bool) -> DecisionResult | None:
    if decision is None:
        return None
    result = decision_result(decision)
    # Two candidates are not enough to compute what would have flipped the decision.
    return result if whole else msgspec.structs.replace(result, flip=None, preference=None)
