"""Past decisions of a router: ``GET /v1/decisions`` and ``GET /v1/decisions/{id}``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.documents.route_result import (
    DecisionResult,
    PreferenceRow,
    Ref,
    RouteResult,
    Winner,
    bypass_row,
    decision_ref,
    decision_result,
    pair_choice,
    preference_row,
)
from router_core import Decision, RoutingPlan

SCHEMA = 1
#: Preferred taints of one list whose preference is computed.
MAX_PREFERENCES = 16


class DecisionRow(msgspec.Struct, frozen=True):
    """One past plan in a list. ``at`` is wall-clock seconds.

    ``whole`` False: only winner and runner-up were kept. ``domains`` are those of the worker that
    answered. ``preference``: how near the preferred domain was to losing; only for the newest plan
    of each preferred taint, and only with ``?preferences=1``.
    """

    id: str
    at: float
    model: str
    mode: str
    outcome: str
    stage: str
    tokens: int = 0
    blocks: int = 0
    cached_blocks: int = 0
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


class DecisionList(msgspec.Struct, frozen=True):
    """Past plans, newest first. ``kept`` are in memory, ``evicted`` were removed from it.

    ``cursor``: the value of ``since=`` for the next reading; ``skipped``: plans between the last
    reading and the oldest plan of this list.
    """

    decisions: list[DecisionRow]
    kept: int
    evicted: int
    bytes: int
    limit_bytes: int
    cursor: int = 0
    skipped: int = 0
    kind: str = "DecisionList"
    schema: int = SCHEMA


class PastDecision(RouteResult, frozen=True, kw_only=True):
    """A past RouteResult with its time (``at``, wall-clock seconds).

    ``attempt`` of ``attempts``: a retried request has several decisions; ``earlier`` lists the
    others. Freshness is not recorded.
    """

    at: float
    whole: bool
    attempt: int = 1
    attempts: int = 1
    earlier: list[DecisionRow] = msgspec.field(default_factory=list)


def decision_row(plan: RoutingPlan, *, at: float, whole: bool) -> DecisionRow:
    """A plan as one row of a list."""
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
        cached_blocks=first.overlap_blocks(first.winner) if first.winner is not None else 0,
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
    )


def with_preferences(
    rows: Sequence[DecisionRow], plans: Sequence[RoutingPlan]
) -> list[DecisionRow]:
    """``rows`` (of ``plans``, newest first) with the preference of the newest whole row per taint.

    At most :data:`MAX_PREFERENCES` preferences: each takes all candidates to compute.
    """
    found: set[str] = set()
    completed = []
    for row, plan in zip(rows, plans, strict=True):
        final = plan.final
        taints = {item.taint for item in final.constraints.preferred}
        if row.whole and taints - found and len(found) < MAX_PREFERENCES:
            preference = preference_row(final)
            if preference is not None and preference.taint not in found:
                found.add(preference.taint)
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
) -> PastDecision:
    """A kept plan as a document."""
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
        winner=Winner(decision_ref(plan.prefill), decision_ref(plan.decode)),
        prefill=_shown(plan.prefill, whole),
        decode=_shown(plan.decode, whole),
        relaxed=plan.relaxed,
        bypass=bypass_row(plan),
        pairs=pair_choice(plan, lambda _: None) if whole else UNSET,
        at=at,
        whole=whole,
        attempt=len(earlier) + 1,
        attempts=len(earlier) + 1,
        earlier=list(earlier),
    )


def _shown(decision: Decision | None, whole: bool) -> DecisionResult | None:
    if decision is None:
        return None
    result = decision_result(decision)
    # Two candidates are not enough to compute what would have flipped the decision.
    return result if whole else msgspec.structs.replace(result, flip=None, preference=None)
