"""The events of requests and the fleet that metrics, logs and the decision memory observe."""

from dataclasses import dataclass, field
from typing import Protocol

from dynctl.documents.fleet_load import Condition
from dynctl.wire.openai import reported_usage
from router_core import Decision, RoutingPlan, RoutingRequest


class OpenTrace(Protocol):
    """The open spans of a request, as far as the flow reports to them (:mod:`.traces`).

    ``at``: seconds of the service's clock.
    """

    def hop(self, decision: Decision, at: float) -> dict[str, str]:
        """A hop is sent to its worker; the headers for that request."""
        ...

    def lost(self, decision: Decision, at: float, message: str) -> None:
        """The hop failed."""
        ...


@dataclass(slots=True)
class RequestRecord:
    """One client request from arrival to end; filled in step by step.

    Times are seconds of the service's monotonic clock, None until they happen;
    ``received_wall`` is wall-clock seconds. ``status`` is the HTTP status that the client got.
    ``outcome`` is ``success``, ``refused``, ``upstream_error``, ``client_error``, ``cancelled``
    (the client left) or ``internal``; a stream that broke after its first token has status 200
    and outcome ``upstream_error``. ``attempts`` lists the dispatches that failed:
    ``(worker name, stage, what happened)``. ``prompts``: of a batch. ``prompt_tokens`` and
    ``cached_tokens``: what the engine that computed the prompt reported, None if it did not.
    ``output_events``: of its stream, about one for each token; ``reported_output``: the output
    tokens of the engine's usage, None where it reports none.
    ``tenant``: a keyed digest of its cache salt, empty without one; ``output_limit``: the most
    tokens that it may generate, None without a limit.
    ``queued_s``: seconds that it waited in the router queue, None if it did not; ``queue_depth``
    others waited when it was admitted. ``unused``: its fields for the router queue, where it could
    not have waited. ``began``: the head of its stream was sent. ``trace``: its
    open spans, None where it is not traced.
    """

    decision_id: str
    request_id: str
    endpoint: str
    received_at: float
    received_wall: float
    model: str = ""
    stream: bool = False
    began: bool = False
    isl_tokens: int = 0
    tokenize_s: float = 0.0
    route_s: float = 0.0
    dispatched_at: float | None = None
    prefill_done_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    status: int = 0
    outcome: str = ""
    error_type: str = ""
    output_events: int = 0
    output_bytes: int = 0
    plan: RoutingPlan | None = None
    attempts: list[tuple[str, str, str]] = field(default_factory=list)
    prompts: int = 1
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reported_output: int | None = None
    queued_s: float | None = None
    queue_depth: int = 0
    unused: str = ""
    tenant: str = ""
    output_limit: int | None = None
    trace: "OpenTrace | None" = None

    def take_usage(self, end: bytes, *, prefill: bool = False) -> None:
        """Take the usage at the end of an engine's response. Where the prompt is computed on a
        prefill hop, that engine's report counts: the other one received the blocks."""
        handed_off = self.plan is not None and self.plan.prefill is not None
        prompt, cached, output = reported_usage(end)
        if prefill or not handed_off:
            self.prompt_tokens, self.cached_tokens = prompt, cached
        if not prefill:
            self.reported_output = output

    @property
    def answered(self) -> bool:
        """Whether the client got output. A response that came as a whole has no known time of its
        first token (``first_token_at``)."""
        return self.first_token_at is not None or self.outcome == "success"

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated, as the engine reported; else the events of the stream."""
        return self.output_events if self.reported_output is None else self.reported_output


class ServiceObserver:
    """Hooks to override. Called on the event loop, in order; they must not block or raise.

    Dry runs are not reported.
    """

    def on_received(self, record: RequestRecord) -> None:
        """A valid request for a model was read; not called for unreadable requests."""

    def on_prepared(self, request: RoutingRequest, record: RequestRecord) -> None:
        """The prompt of a request is hashed; nothing was decided or booked for it yet."""

    def on_hop(self, decision: Decision, request: RoutingRequest, record: RequestRecord) -> None:
        """A hop was decided and its winner booked."""

    def on_decision(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> None:
        """The plan of the response, or the refusal. Called again after a retry."""

    def on_first_token(self, record: RequestRecord) -> None:
        """The client gets its first output."""

    def on_finished(self, record: RequestRecord) -> None:
        """The request ended, in any way."""

    def on_condition(self, condition: Condition, cleared: bool) -> None:
        """A condition began, changed its message, or ended."""

    def on_note(self, kind: str, subject: str, text: str) -> None:
        """What an operator does: `canary` of a model's thresholds."""
