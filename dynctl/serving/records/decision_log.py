"""Log lines of decisions, in the format that operators of each preset search for.

With the preset ``dynamo-0.9`` a hop is logged as in the 0.9 guides, one ``Formula for`` line for
each candidate and one ``Selected worker:`` line; otherwise as Dynamo 1.6 logs it, ``Selected worker
router_mode="kv" ... logit=...``. Refusals, and requests that an engine failed, are logged as
warnings at every level, since each one is a lost request; the other ends of requests where
decisions are. Prompts are never logged: a Decision has none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Final

from dynctl.base.errors import single_line
from dynctl.documents.decisions import ClientResponse
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import TERMS, Decision, RoutingPlan, RoutingRequest, WorkerWithDpRank

LEVELS = ("off", "winner", "all")
#: Lost requests written in one second; the others are counted in one line.
REFUSALS_A_SECOND = 20
#: While an outage loses all requests and is a condition: lines for one request in these seconds.
OUTAGE_S = 10
_OUTAGE_LINES = 2
#: Below it an error is that of the request.
_SERVER_ERROR: Final = 500

TreeSize = Callable[[WorkerWithDpRank], int]


class DecisionLog(ServiceObserver):
    """Writes decisions to a logger.

    ``level``: ``off`` (only lost requests), ``winner``, or ``all`` (every candidate with its
    terms). ``tree_size``: blocks of a rank in the index, for the 0.9 line. ``outage``: the code of
    the condition in force that loses all requests, None without one.
    """

    def __init__(
        self,
        level: str = "off",
        preset: str = "dynamo-1.6",
        *,
        tree_size: TreeSize | None = None,
        logger: logging.Logger | None = None,
        outage: Callable[[], str | None] = lambda: None,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"log_decisions: expected one of {', '.join(LEVELS)}, got {level!r}")
        self.level = level
        self._old = preset == "dynamo-0.9"
        self._tree_size = tree_size
        self._logger = logger or logging.getLogger("dynctl.decisions")
        self._outage = outage
        #: Wall-clock time at which the present count of lost requests began and ends.
        self._counting = (0, 0)
        self._during: str | None = None
        self._refusals = 0
        self._most = 0

    def listens(self, hook: str) -> bool:
        return super().listens(hook) and (hook != "on_hop" or self.level != "off")

    def on_hop(self, decision: Decision, request: RoutingRequest, record: RequestRecord) -> None:
        if self.level != "off":
            self.hop(decision)

    def on_decision(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> None:
        if plan.bypass is not None and self.level != "off":
            extra = {"decision": plan.id, "bypassed": plan.bypass.bypassed}
            self._logger.info(
                "Conditional disagg decision request_id=%s bypass=%s reason=%s: %s",
                json.dumps(plan.id, ensure_ascii=False),
                str(plan.bypass.bypassed).lower(), plan.bypass.reason, plan.bypass.message,
                extra=extra,
            )  # fmt: skip
        refusal = plan.refusal
        if refusal is not None:
            self.refusal(refusal, record.received_wall, after_failure=bool(record.attempts))

    def on_finished(self, record: RequestRecord) -> None:
        response = record.response or record.client_response()
        lost = response.state == "cut" or (
            response.state == "failed" and (response.status or 0) >= _SERVER_ERROR
        )
        lost = lost and record.plan is not None
        if lost:
            at = record.received_wall
            if record.finished_at is not None:
                at += record.finished_at - record.received_at
            if not self._may_warn(at):
                return
        elif self.level == "off" or record.plan is None or response.state == "unknown":
            return
        extra = {"decision": record.decision_id, "outcome": response.state}
        self._logger.log(
            logging.WARNING if lost else logging.INFO,
            "%s", end_line(record.decision_id, response), extra=extra,
        )  # fmt: skip

    def hop(self, decision: Decision) -> None:
        """Log a hop with a winner."""
        if decision.winner is None or not self._logger.isEnabledFor(logging.INFO):
            return
        extra = {"decision": decision.id}
        for line in lines(
            decision, every=self.level == "all", old=self._old, tree_size=self._tree_size
        ):
            self._logger.info("%s", line, extra=extra)

    def refusal(self, decision: Decision, at: float, *, after_failure: bool = False) -> None:
        """Log a refusal, at most ``REFUSALS_A_SECOND`` lost requests in a second of wall-clock
        time. ``after_failure``: an engine failed the request, and no other one could take it."""
        if not self._may_warn(at):
            return
        extra = {"decision": decision.id, "stage": decision.stage, "outcome": decision.outcome}
        what = "No other worker after a failed attempt" if after_failure else "Refused"
        self._logger.warning("%s: %s", what, decision.summary(), extra=extra)

    def _may_warn(self, at: float) -> bool:
        """Whether one more line of a lost request may be logged now."""
        begin, end = self._counting
        if not begin <= at < end:
            skipped = self._refusals - self._most
            if skipped > 0:
                self._logger.warning(
                    "%d more requests were refused or failed and not logged%s",
                    skipped, f"; condition {self._during}" if self._during else "",
                )  # fmt: skip
            self._during = self._outage()
            seconds, self._most = 1, REFUSALS_A_SECOND
            if self._during:
                seconds, self._most = OUTAGE_S, _OUTAGE_LINES
            self._counting, self._refusals = (int(at), int(at) + seconds), 0
        self._refusals += 1
        return self._refusals <= self._most


def end_line(decision_id: str, response: ClientResponse) -> str:
    """The line of a request that ended: what its client got, times, tokens, and what went wrong."""
    line = (
        f"Finished request_id={json.dumps(decision_id, ensure_ascii=False)}"
        f" outcome={response.state} status={_or_none(response.status)}"
        f" ttft_s={_seconds_text(response.ttft_s)} duration_s={_seconds_text(response.duration_s)}"
        f" prompt_tokens={_or_none(response.prompt_tokens)}"
        f" output_tokens={_or_none(response.output_tokens)}"
        f" output_events={_or_none(response.output_events)}"
    )
    failed = [attempt for attempt in response.attempts if attempt.problem]
    if failed:
        shown = "; ".join(
            f"{attempt.worker} ({attempt.stage}): {attempt.problem}" for attempt in failed
        )
        line += f" failed_attempts={len(failed)}: {single_line(shown)}"
    elif response.error:
        line += f": {single_line(response.error)}"
    return line


def _or_none(value: float | int | None) -> str:
    return "None" if value is None else f"{value}"


def _seconds_text(value: float | None) -> str:
    return "None" if value is None else f"{value:.3f}"


def lines(
    decision: Decision, *, every: bool, old: bool, tree_size: TreeSize | None = None
) -> list[str]:
    """The log lines of a hop with a winner. ``every``: candidates too; ``old``: the 0.9 format."""
    winner = decision.winner
    if winner is None:
        return []
    positions = range(len(decision.costs)) if every else range(0)
    if old and decision.mode == "kv":
        candidates = [formula_line(decision, position) for position in positions]
        return [*candidates, selected_line_09(decision, tree_size)]
    candidates = [candidate_line(decision, position) for position in positions]
    return [*candidates, selected_line(decision)]


def formula_line(decision: Decision, position: int) -> str:
    """The terms of a candidate's cost, in the 0.9 format.

    On a decode hop prefill blocks are shown with the weight 0, on a prefill hop decode blocks are
    0. Terms that 0.9 did not have, a preference's multiplier and the next hop of a pair follow at
    the end of its line.
    """
    terms = {term.name: term for term in decision.terms}
    ref = decision.refs[position]
    prefill, decode = terms.get("prefill_blocks"), terms.get("decode_blocks")
    weight = 0.0 if prefill is None else prefill.weight
    blocks = decision.isl_tokens / decision.block_size
    if prefill is not None:
        blocks = prefill.values[position]
    active = 0.0 if decode is None else decode.values[position]
    scale = _weight(weight)
    line = (
        f"Formula for worker_id={ref.worker_id} dp_rank={ref.dp_rank} with"
        f" {_cached_blocks(decision, position)} cached blocks: {decision.costs[position]:.3f} ="
        f" {scale} * prefill_blocks + decode_blocks = {scale} * {blocks:.3f} + {active:.3f}"
    )
    for term in TERMS[2:]:
        column = terms.get(term.name)
        if column is not None:
            value = term.text(column.values[position])
            line += f" + {_weight(column.weight)} * {value} {term.phrase}"
    multipliers = decision.inputs.multipliers if decision.inputs is not None else None
    if multipliers is not None and multipliers[position] != 1.0:
        line += f", times {multipliers[position]:.4f} for preferred taints"
    following = decision.inputs.following if decision.inputs is not None else None
    if following is not None:
        line += f", plus {following[position]:.3f} for the next hop"
    return line


def selected_line_09(decision: Decision, tree_size: TreeSize | None = None) -> str:
    """The winner in the 0.9 format; a decode hop uses no tree and shows 0."""
    winner = _winner(decision)
    ref, worker = decision.refs[winner], decision.workers[winner]
    size = 0 if tree_size is None or decision.stage == "decode" else tree_size(ref)
    return (
        f"Selected worker: worker_id={ref.worker_id} dp_rank={ref.dp_rank},"
        f" logit: {decision.costs[winner]:.3f}, cached blocks: {_cached_blocks(decision, winner)},"
        f" tree size: {size}, total blocks: {worker.runtime_config.total_kv_blocks or 0}"
    )


def selected_line(decision: Decision) -> str:
    """The winner in the 1.6 format. Aggregated hops have the fields of a prefill hop."""
    winner = _winner(decision)
    total = decision.workers[winner].runtime_config.total_kv_blocks
    line = "Selected worker " + _fields(decision, winner)
    if decision.stage != "decode":
        line += f" effective_cached_blocks={float(_cached_blocks(decision, winner))}"
    line += " host_pinned_blocks=0 disk_blocks=0"
    if decision.stage != "decode":
        line += " total_kv_blocks=" + ("None" if total is None else f"Some({total})")
    return line + _among(decision)


def _among(decision: Decision) -> str:
    """What narrowed the choice: the drawn pair with its active requests, or the device classes."""
    inputs, budget = decision.inputs, decision.budget
    if decision.pair is not None and inputs is not None:
        drawn = ",".join(
            f"{decision.refs[i].worker_id}/{decision.refs[i].dp_rank}:{inputs.active_requests[i]}"
            for i in decision.pair
        )
        return f" drawn={drawn}"
    if budget is not None:
        return (
            f" next_class={'cpu' if budget.cpu_is_next else 'accelerator'}"
            f" cpu_requests={budget.cpu_requests} allowed_cpu={budget.allowed_cpu}"
            f" accelerator_requests={budget.accelerator_requests}"
        )
    return ""


def candidate_line(decision: Decision, position: int) -> str:
    """A candidate with its terms; 1.6 has no such line, the field names are those of its lines."""
    line = "Candidate worker " + _fields(decision, position)
    for term in decision.terms:
        line += f" {term.name}={term.values[position]:g} {term.name}_weight={term.weight:g}"
    following = decision.inputs.following if decision.inputs is not None else None
    if following is not None:
        line += f" next_hop={following[position]:g}"
    if decision.stage != "decode":
        line += f" effective_cached_blocks={float(_cached_blocks(decision, position))}"
    return line


def _fields(decision: Decision, position: int) -> str:
    ref = decision.refs[position]
    # An aggregated worker is a `decode` one in Dynamo's logs and metrics.
    kind = "prefill" if decision.stage == "prefill" else "decode"
    return (
        f"router_mode={json.dumps(decision.mode)}"
        f" request_id={json.dumps(decision.id, ensure_ascii=False)}"
        f" worker_id={ref.worker_id} worker_type={kind} dp_rank={ref.dp_rank}"
        f" logit={float(decision.costs[position])}"
    )


def _winner(decision: Decision) -> int:
    if decision.winner is None:
        raise ValueError(f"decision {decision.id} has no winner")
    return decision.winner


def _cached_blocks(decision: Decision, position: int) -> int:
    return decision.overlap_blocks(position) if decision.credits_overlap else 0


def _weight(value: float) -> str:
    """One decimal as in 0.9, more if needed for the exact weight."""
    short = f"{value:.1f}"
    return short if float(short) == value else f"{value:g}"
