"""A span for each traced request, and one for each of its hops.

Spans have the numbers of the decision and names of workers, as the decision log does. They have no
prompt, no token id, no key, and no salt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nsmallest
from typing import Final

from dynctl.adapters.otlp import Headers, Span, SpanExport, Value
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Decision, RoutingPlan, WorkerWithDpRank

#: Candidates with costs in a span, the cheapest first.
CANDIDATES: Final = 8
#: Of more candidates only the first two are known without computing all costs.
_ALL: Final = 64
_OPERATIONS: Final = {"completions": "text_completion", "embeddings": "embeddings"}


class RequestTrace:
    """The open spans of one request. Times are seconds of the service's clock."""

    __slots__ = ("_hops", "_root", "_sent", "_wall")

    def __init__(self, root: Span, wall: Callable[[float], int]) -> None:
        self._root = root
        self._wall = wall
        self._sent = False
        self._hops: list[tuple[str, WorkerWithDpRank | None, Span]] = []

    def hop(self, decision: Decision, at: float) -> Headers:
        """A hop is sent to its worker; the headers for that request."""
        self._sent = True
        worker = decision.worker
        name = f"{decision.stage} {worker.name}" if worker is not None else decision.stage
        span = self._root.child(name, self._wall(at))
        # Now: the request may run for minutes, and a decision has columns of all candidates.
        span.set(decision_attributes(decision))
        self._hops.append((decision.stage, decision.ref, span))
        return span.headers()

    def lost(self, decision: Decision, at: float, message: str) -> None:
        """The hop failed."""
        for number, (stage, ref, span) in enumerate(self._hops):
            if (stage, ref) == (decision.stage, decision.ref):
                del self._hops[number]
                span.fail(message)
                span.end(self._wall(at))
                return

    def end(self, record: RequestRecord, doubts: list[str], at: float) -> None:
        """The request ended, in any way."""
        for stage, _, span in self._hops:
            prefill = stage == "prefill"
            ended = record.prefill_done_at if prefill else None
            if not prefill and record.first_token_at is not None:
                span.event("first token", self._wall(record.first_token_at))
            span.end(self._wall(at if ended is None else ended))
        self._hops.clear()
        root = self._root
        root.set(_request_attributes(record, doubts))
        if record.plan is not None and not self._sent:
            root.set(decision_attributes(record.plan.final))
        if record.queued_s is not None:
            entered = record.received_at + record.tokenize_s
            root.event(
                "router queue", self._wall(entered),
                {"dynctl.queued_s": record.queued_s, "dynctl.queue_depth": record.queue_depth},
            )  # fmt: skip
        for name, moment in (
            ("sent", record.dispatched_at),
            ("prefill done", record.prefill_done_at),
            ("first token", record.first_token_at),
        ):
            if moment is not None:
                root.event(name, self._wall(moment))
        if record.plan is not None and record.plan.final.winner is None:
            root.set({"dynctl.refusal": record.plan.final.outcome})
        if record.outcome not in ("success", "client_error", "cancelled"):
            root.fail(record.error_type or record.outcome)
        root.end(self._wall(at))


class Traces(ServiceObserver):
    """Begins and ends the traces of one process. ``clock``: the service's, in seconds.

    ``doubts``: the codes of what makes the index or load of a model's workers doubtful.
    """

    def __init__(
        self,
        export: SpanExport,
        clock: Callable[[], float],
        doubts: Callable[[str], list[str]] = lambda model: [],
    ) -> None:
        self.export = export
        self._clock = clock
        self._doubts = doubts

    def begin(self, record: RequestRecord, headers: Mapping[str, str], path: str) -> None:
        """A request arrived with these headers; ``record.trace`` stays None where it is not
        traced."""
        wall = _wall_of(record)
        span = self.export.begin(f"POST {path}", wall(record.received_at), headers)
        if span is not None:
            span.set({"http.request.method": "POST", "url.path": path})
            record.trace = RequestTrace(span, wall)

    def on_finished(self, record: RequestRecord) -> None:
        trace, record.trace = record.trace, None
        if isinstance(trace, RequestTrace):
            at = self._clock() if record.finished_at is None else record.finished_at
            trace.end(record, self._doubts(record.model), at)


def _wall_of(record: RequestRecord) -> Callable[[float], int]:
    """Monotonic seconds -> nanoseconds since the epoch, as of the arrival of the request."""
    base = record.received_wall - record.received_at
    return lambda at: int((base + at) * 1e9)


def _request_attributes(record: RequestRecord, doubts: list[str]) -> dict[str, Value]:
    attributes: dict[str, Value | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(record.endpoint, "chat"),
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens or record.isl_tokens,
        "gen_ai.usage.output_tokens": record.reported_output,
        "dynctl.output_events": record.output_events or None,
        "http.response.status_code": record.status,
        "error.type": record.error_type or None,
        "dynctl.decision_id": record.decision_id,
        "dynctl.outcome": record.outcome,
        "dynctl.stream": record.stream,
        "dynctl.retries": len(record.attempts),
        "dynctl.tokenize_s": record.tokenize_s,
        "dynctl.route_s": record.route_s,
        "dynctl.queued_s": record.queued_s,
        "dynctl.engine_cached_tokens": record.cached_tokens,
        "dynctl.doubts": doubts or None,
    }
    if record.attempts:
        attributes["dynctl.failed_workers"] = [
            f"{stage} {name}" for name, stage, _ in record.attempts
        ]
    plan: RoutingPlan | None = record.plan
    if plan is not None:
        attributes["dynctl.relaxed"] = plan.relaxed
        if plan.bypass is not None:
            attributes["dynctl.prefill_hop"] = plan.bypass.reason
    return {name: value for name, value in attributes.items() if value is not None}


def decision_attributes(decision: Decision) -> dict[str, Value]:
    """Why this worker: the candidates, the terms of the cost, and what the caches had."""
    winner, inputs = decision.winner, decision.inputs
    attributes: dict[str, Value] = {
        "dynctl.stage": decision.stage,
        "dynctl.mode": decision.mode,
        "dynctl.outcome": decision.outcome,
        "dynctl.candidates": len(decision.costs),
        "dynctl.prompt_blocks": decision.prompt_blocks,
        "dynctl.funnel": [f"{step.filter} {step.left}" for step in decision.funnel],
    }
    worker, ref = decision.worker, decision.ref
    if winner is None or worker is None or ref is None:
        return attributes
    attributes["dynctl.worker"] = worker.name
    attributes["dynctl.dp_rank"] = ref.dp_rank
    attributes |= {f"dynctl.domain.{name}": value for name, value in worker.domains.items()}
    attributes["dynctl.cost"] = float(decision.costs[winner])
    margin = decision.margin
    if margin is not None:
        attributes["dynctl.margin"] = float(margin)
    for term in decision.terms:
        attributes[f"dynctl.cost.{term.name}"] = term.weight * float(term.values[winner])
    if inputs is not None and decision.overlap_modelled:
        attributes["dynctl.cached_blocks"] = decision.overlap_blocks(winner)
        attributes["dynctl.best_cached_blocks"] = inputs.most_overlap
    order = [position for position in (winner, decision.runner_up) if position is not None]
    if len(decision.costs) <= _ALL:
        order = nsmallest(CANDIDATES, range(len(decision.costs)), decision.costs.__getitem__)
    attributes["dynctl.costs"] = [
        f"{decision.workers[position].name} {decision.costs[position]:.3f}" for position in order
    ]
    if decision.notes:
        attributes["dynctl.notes"] = decision.notes
    return attributes
