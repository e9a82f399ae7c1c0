"""Refusals with an explanation: the filter that left no worker, and what would admit one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from dynctl.documents.codec import encode
from dynctl.documents.errors import (
    AnthropicErrorBody,
    EngineAttempt,
    ErrorBody,
    ErrorDetails,
    ErrorRow,
    FilterCount,
    RefusedRank,
)
from dynctl.documents.route_result import Constraint
from dynctl.documents.workers import WorkerRow
from dynctl.wire.nvext import PREFILL_HEADER, WORKER_HEADER
from router_core import (
    Decision,
    FunnelStep,
    Pin,
    QueueFull,
    Queueing,
    Rejection,
    RouterConfig,
    RoutingPlan,
    RoutingRequest,
    WorkerRegistry,
)

#: Rejected ranks that a refusal lists; its funnel counts all.
MAX_REJECTIONS = 16
#: The error code when a request may not wait in the router queue, as Dynamo names it.
QUEUE_FULL_CODE = "RouterQueueLimitExceeded"
#: The paths whose errors have Anthropic's shape begin with it.
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
QUEUE_OUTCOMES = ("queue_full", "queue_timeout")


@dataclass(eq=False)
class HttpError(Exception):
    """An error response. ``details`` is what dynctl adds to OpenAI's fields.

    ``public`` replaces ``message`` where that names workers, addresses or domains: for callers who
    may not see routing details. Empty: the message names none. ``served``: the endpoints that
    exist, for one that does not.
    """

    status: int
    message: str
    type: str
    code: str | int
    param: str | None = None
    details: ErrorDetails | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    public: str = ""
    served: Sequence[str] = ()

    def for_client(self) -> "HttpError":
        """The error without routing details; the decision's id leads operators to them."""
        details = self.details
        if details is not None:
            details = ErrorDetails(decision=details.decision, retry_after_s=details.retry_after_s)
        return replace(self, message=self.public or self.message, details=details)

    def __str__(self) -> str:
        return self.message

    def body(self, path: str = "") -> bytes:
        """The JSON body, in the shape of the API that ``path`` belongs to."""
        messages = path.startswith(ANTHROPIC_PATH)
        error = ErrorRow(
            self.message,
            anthropic_type(self.status) if messages else self.type,
            self.code,
            UNSET if self.param is None else self.param,
            UNSET if self.details is None else self.details,
            list(self.served) or UNSET,
        )
        return encode(AnthropicErrorBody(error) if messages else ErrorBody(error))


def overloaded(status: int, problem: str) -> HttpError:
    """A limit of requests in flight is reached. ``status``: the setting overload_status_code."""
    return HttpError(
        status,
        problem,
        "overloaded",
        "too_many_requests_in_flight",
        headers={"retry-after": "1"},
    )


def internal_error(decision_id: str = "") -> HttpError:
    """A defect; the log has the traceback, under the decision's id where there is one."""
    where = f" under {decision_id}" if decision_id else ""
    problem = f"internal error; the log has the details{where}"
    return HttpError(500, problem, "internal_error", 500)


def unknown_model(
    model: str,
    served: Iterable[str],
    unread: Sequence[WorkerRow],
    *,
    by: str = "frontend",
    left_s: float | None = None,
) -> HttpError:
    """The error for a model that no registered worker serves. ``unread``: the engines that may
    serve it, since they were not read yet; without one the answer is sure, a 404, else a 503.
    ``left_s``: seconds since its last worker left, where it may return: also a 503. ``model``
    empty: the request names none."""
    known = ", ".join(sorted(served)) or "none yet"
    shown = f"model {model[:200]!r}" if model else "a model"
    if left_s is not None:
        return HttpError(
            503,
            f"{shown} has no worker: the last one left {left_s:,.0f} s ago; try again",
            "service_unavailable",
            "model_has_no_worker",
            param="model",
            headers={"retry-after": "1"},
        )
    if not unread:
        return HttpError(
            404,
            f"{shown} is not served by this {by}; models: {known}",
            "not_found_error",
            "model_not_found",
            param="model",
        )
    public = (
        f"whether {shown} is served by this {by} is not known yet: workers whose models were not "
        f"read: {len(unread):,}; models: {known}; try again"
    )
    first = unread[0]
    return HttpError(
        503,
        f"{public} ({first.name}: {first.reason})",
        "service_unavailable",
        "model_not_known_yet",
        param="model",
        headers={"retry-after": "1"},
        public=public,
    )


def anthropic_type(status: int) -> str:
    """The type of an error of the Messages API, by its HTTP status."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def refusal(
    plan: RoutingPlan,
    config: RouterConfig,
    *,
    attempts: Sequence[tuple[str, str, str]] = (),
    probe_interval_s: float = 2.0,
) -> HttpError:
    """The error response for a plan without a winner on some hop."""
    decision = plan.refusal
    if decision is None:
        raise ValueError(f"plan {plan.id} is not a refusal")
    status, kind = _status(decision, config)
    step = decision.emptied_by()
    full = None if decision.queue is None else decision.queue.refused
    wait = _retry_after(decision, step, probe_interval_s)
    details = ErrorDetails(
        decision=plan.id,
        stage=decision.stage,
        outcome=decision.outcome,
        filter=step.filter if step is not None else None,
        funnel=[FilterCount(step.filter, step.entered, step.left) for step in decision.funnel],
        constraints=[
            Constraint(item.taint, item.kind, item.weight, item.origin)
            for item in decision.constraints.items
        ],
        rejected=_rejected_ranks(step),
        nearest=_nearest(step),
        what_would_admit=_what_would_admit(decision, step),
        retry_after_s=wait,
        notes=list(decision.notes) or UNSET,
        attempts=attempts_of(attempts) or UNSET,
        policy_class=UNSET if full is None else full.policy_class,
        limit_kind=UNSET if full is None else full.limit_kind,
        current=UNSET if full is None else full.current,
        limit=UNSET if full is None else full.limit,
    )
    headers = {} if wait is None else {"retry-after": str(wait)}
    where = f"{decision.stage}: " if plan.prefill is not None else ""
    if decision.outcome == "not_pinned":
        header, name = _pin_names(decision)
        text = f"{decision.summary()}; set the header {header} or {name}"
        return HttpError(
            status, text, kind, "worker_required", param=name, details=details, public=text
        )
    return HttpError(
        status,
        where + decision.summary(),
        kind,
        status if full is None else QUEUE_FULL_CODE,
        details=details,
        headers=headers,
        public=_public(decision, step),
    )


def _pin_names(decision: Decision) -> tuple[str, str]:
    """The header and the field that name the worker of the decision's hop."""
    if decision.stage == "prefill":
        return PREFILL_HEADER, "nvext.prefill_worker_id"
    return WORKER_HEADER, "nvext.decode_worker_id"


def _public(decision: Decision, step: FunnelStep | None) -> str:
    """The refusal without the names of workers and domains."""
    if decision.outcome == "all_busy":
        return "all workers are busy; try again later"
    if decision.outcome in QUEUE_OUTCOMES:
        return "the router queue is full; try again later"
    if step is None or step.filter in ("model", "role"):
        return f"model {decision.model!r} cannot be served now"
    return "no worker can take this request now"


def what_frees_queue(queue: Queueing, full: QueueFull) -> str:
    """What would let a request into the router queue, or out of it."""
    if full.limit_kind == "wait_seconds":
        needed = f"{queue.needs:,} fewer active prefill tokens on {queue.nearest}, or "
        return (needed if queue.nearest else "") + "a longer --router-queue-max-wait-secs"
    if full.limit_kind == "total_requests":
        return "a shorter queue, or a higher --router-queue-max-requests"
    return f"a shorter queue, or a higher limit of the class {full.policy_class}"


def attempts_of(attempts: Sequence[tuple[str, str, str]]) -> list[EngineAttempt]:
    """The requests to engines that failed."""
    return [EngineAttempt(*attempt) for attempt in attempts]


def unknown_pin(request: RoutingRequest, registry: WorkerRegistry) -> HttpError | None:
    """A 400 for a pin on a worker or rank that is not registered; None if all are."""
    for field_name, pin in (
        ("nvext.prefill_worker_id", request.pin_prefill),
        ("nvext.decode_worker_id", request.pin_decode),
    ):
        if pin is not None and not _is_registered(pin, registry):
            rank = "" if pin.dp_rank is None else f" with rank {pin.dp_rank}"
            known = ", ".join(f"{w.name} ({w.worker_id})" for w in list(registry)[:8])
            return HttpError(
                400,
                f"{field_name}: no worker {pin.worker_id}{rank} is registered; "
                f"registered: {known or 'none'}",
                "invalid_request_error",
                "unknown_worker",
                param=field_name,
                public=f"{field_name}: no worker {pin.worker_id}{rank} is registered",
            )
    return None


def _is_registered(pin: Pin, registry: WorkerRegistry) -> bool:
    if pin.dp_rank is None:
        return registry.get(pin.worker_id) is not None
    return registry.slot(pin.worker_id, pin.dp_rank) is not None


def _status(decision: Decision, config: RouterConfig) -> tuple[int, str]:
    if decision.outcome == "all_busy" or decision.outcome in QUEUE_OUTCOMES:
        return config.overload_status_code, "overloaded"
    if decision.outcome == "not_pinned":
        return 400, "invalid_request_error"
    return 503, "service_unavailable"


def _rejected_ranks(step: FunnelStep | None) -> list[RefusedRank]:
    if step is None:
        return []
    return [_rejection(rejection) for rejection in step.rejected[:MAX_REJECTIONS]]


def _rejection(one: Rejection) -> RefusedRank:
    return RefusedRank(
        one.worker.name,
        one.worker.worker_id,
        one.dp_rank,
        dict(one.worker.domains),
        one.reason.code,
        one.reason.value,
        one.reason.limit,
        one.reason.message,
    )


def _closest(step: FunnelStep | None) -> Rejection | None:
    """The rank that is nearest to being eligible: for numbers, the smallest ratio to its limit."""
    if step is None or not step.rejected:
        return None

    def over(one: Rejection) -> float:
        value, limit = one.reason.value, one.reason.limit
        if isinstance(value, (int, float)) and isinstance(limit, (int, float)):
            return value / limit if limit else math.inf
        return math.inf

    return min(step.rejected, key=over)


def _nearest(step: FunnelStep | None) -> RefusedRank | None:
    closest = _closest(step)
    return None if closest is None else _rejection(closest)


def _what_would_admit(decision: Decision, step: FunnelStep | None) -> str | None:
    closest = _closest(step)
    if decision.queue is not None and decision.queue.refused is not None:
        return what_frees_queue(decision.queue, decision.queue.refused)
    if step is None or step.filter in ("model", "role") or closest is None:
        role = "prefill or aggregated" if decision.stage == "aggregated" else decision.stage
        return f"a {role} worker for {decision.model}"
    name, reason = closest.worker.name, closest.reason
    match reason.code:
        case "busy":
            return (
                f"{name} below its limit ({reason.message}), or a higher threshold "
                "(POST /busy_threshold)"
            )
        case "missing_taint":
            return f"a {decision.stage} worker with the taint {reason.limit}"
        case "missing_domain":
            return (
                f"topology domain {reason.limit!r} published by a {decision.stage} worker, or the "
                "fallback policy"
            )
        case "no_decode_capacity":
            return (
                f"an eligible decode worker in {reason.limit} {reason.value}, or in the domain of "
                "another prefill worker"
            )
        case "policy_underivable":
            return f"a KV-transfer policy of {name} that can be applied: {reason.message}"
        case "not_pinned":
            return f"a request that names its {decision.stage} worker"
        case "unavailable":
            return f"{name} responding again ({reason.message})"
        case "excluded":
            return f"{name} answering again ({reason.message})"
        case "not_allowed":
            return f"the request without its pin or its allowed set ({reason.message})"
    return reason.message


def _retry_after(
    decision: Decision, step: FunnelStep | None, probe_interval_s: float
) -> int | None:
    """Whole seconds until a retry is useful; None if nothing changes by itself."""
    if decision.outcome == "all_busy" or decision.outcome in QUEUE_OUTCOMES:
        return 1
    if step is not None and step.filter == "available":
        return max(1, math.ceil(probe_interval_s))
    return None
