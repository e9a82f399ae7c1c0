"""The events of requests and the fleet that metrics, logs and the decision memory observe."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVarTuple

from dynctl.documents.decisions import ClientResponse, ResponseState
from dynctl.documents.errors import EngineAttempt
from dynctl.documents.fleet_load import Condition
from dynctl.wire.openai import reported_usage
from router_core import Decision, RoutingPlan, RoutingRequest

_Values = TypeVarTuple("_Values")

#: Outcome of a record -> state of the client's response; the others failed, or were cut.
_STATES: Final[dict[str, ResponseState]] = {
    "success": "complete",
    "cancelled": "cancelled",
    "refused": "refused",
    "unknown": "unknown",
}
#: Endpoints of a record whose client is another process's: no HTTP status is seen here.
_STATUS_UNSEEN: Final = "select"
_MAX_ERROR: Final = 500


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
    not have waited. ``began``: the head of its stream was sent. ``error``: what went wrong, without
    the client's or an engine's text; of a failure of the engine that answers, beside ``attempts``.
    ``trace``: its open spans, None where it is not traced. ``response``: what the client got, as
    another process reports it. ``left_in_prefill``: the client left during the prefill hop, before
    the engine of the decode hop got anything. ``details``: the client may see what was cached,
    which workers it got and how long it waited.
    """

    decision_id: str
    request_id: str
    endpoint: str
    received_at: float
    received_wall: float
    model: str = ""
    stream: bool = False
    began: bool = False
    details: bool = True
    isl_tokens: int = 0
    tokenize_s: float = 0.0
    route_s: float = 0.0
    dispatched_at: float | None = None
    prefill_done_at: float | None = None
    left_in_prefill: bool = False
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
    error: str = ""
    trace: "OpenTrace | None" = None
    response: ClientResponse | None = None

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

    def client_response(self) -> ClientResponse:
        """What the client got; call it when the request has ended."""
        if self.response is not None:
            return self.response
        elsewhere = self.endpoint == _STATUS_UNSEEN
        state, status = self._state(elsewhere)
        # By the process that serves the client they are tokens, in a stream here events.
        events = self.output_events if self.reported_output is None else 0
        first_output_s = None
        if self.first_token_at is not None and (self.stream or elsewhere):
            first_output_s = self.first_token_at - self.received_at
        prompt = self.prompt_tokens
        plan = self.plan
        if prompt is None and plan is not None:
            hop = plan.prefill or plan.decode
            prompt = (self.isl_tokens or None) if hop is not None and hop.overlap_modelled else None
        self.response = ClientResponse(
            state,
            status,
            self.error[:_MAX_ERROR],
            first_output_s,
            None if self.finished_at is None else self.finished_at - self.received_at,
            prompt,
            self.cached_tokens,
            events if elsewhere and events else self.reported_output,
            (events or None) if self.stream and not elsewhere else None,
            self._only_attempt(state) or self._engine_attempts(state),
        )
        return self.response

    def _state(self, elsewhere: bool) -> tuple[ResponseState, int | None]:
        """How the response ended, and its HTTP status; None where it is not known."""
        state = _STATES.get(self.outcome)
        if state is None:
            state = "cut" if self.began or self.status == 200 else "failed"
        status: int | None = 200 if self.began else self.status or None
        if elsewhere and state != "refused":
            status = None
            if state == "failed" and self.first_token_at is not None:
                state = "cut"
        return state, status

    def _only_attempt(self, state: ResponseState) -> tuple[EngineAttempt, ...]:
        """The hop of an answered request without a prefill hop, as most are; else nothing."""
        plan = self.plan
        hop = None if plan is None or plan.prefill is not None else plan.decode
        failed = self.attempts or state != "complete" or self.dispatched_at is None
        if failed or hop is None or hop.winner is None:
            return ()
        return (EngineAttempt(hop.workers[hop.winner].name, hop.stage, ""),)

    def _engine_attempts(self, state: ResponseState) -> tuple[EngineAttempt, ...]:
        """The requests to engines: those that failed, then the hops of the last plan."""
        failed = tuple(EngineAttempt(*attempt) for attempt in self.attempts)
        plan = self.plan
        if plan is None or state == "refused" or (state == "failed" and failed):
            return failed
        if self.dispatched_at is None and plan.waits:  # the client left the router queue
            return failed
        hops = [hop for hop in (plan.prefill, plan.decode) if hop is not None]
        broken = hops[-1] if hops and state in ("cut", "failed") else None
        if self.left_in_prefill:
            hops = [hop for hop in hops if hop is plan.prefill]
        attempts = []
        for hop in hops:
            if hop.winner is None:  # a refusal, which no engine got
                return failed
            problem = self.error if hop is broken else ""
            attempts.append(EngineAttempt(hop.workers[hop.winner].name, hop.stage, problem))
        return (*failed, *attempts)


class ServiceObserver:
    """Hooks to override. Called on the event loop, in order; they must not block or raise.

    Dry runs are not reported.
    """

    def listens(self, hook: str) -> bool:
        """Whether the hook of this name is called: those that do something. It does not change."""
        return getattr(type(self), hook, None) is not _HOOKS[hook]

    def on_received(self, record: RequestRecord) -> None:
        """A valid request for a model was read; not called for unreadable requests."""

    def on_prepared(
        self, request: RoutingRequest, record: RequestRecord, ids: Sequence[int]
    ) -> None:
        """The prompt of a request is hashed; nothing was decided or booked for it yet. ``ids``: its
        tokens, empty where they are not here. They are not kept."""

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

    def on_response(self, decision_id: str, response: ClientResponse) -> None:
        """Another process reports what the client of an ended request got."""

    def on_condition(self, condition: Condition, cleared: bool) -> None:
        """A condition began, changed its message, or ended."""

    def on_note(self, kind: str, subject: str, text: str) -> None:
        """What an operator does: `canary` of a model's thresholds."""


def _notify_each(
    hook: Callable[[ServiceObserver, *_Values], None],
) -> Callable[["Observers", *_Values], None]:
    """The method of :class:`Observers` that calls a hook of each observer that has it."""
    name = hook.__name__

    def notify(observers: "Observers", /, *values: *_Values) -> None:
        for observer, listen in observers.listening[name]:
            try:
                listen(*values)
            except Exception as error:
                observers.failed(observer, error)

    return notify


class Observers:
    """The observers of a service, in the order in which they are notified.

    An observer that fails changes nothing for the request that it observes: ``failed(observer,
    error)`` reports it, and the next one is notified. ``listening``: name of a hook -> the
    observers that override it, each with its method.
    """

    def __init__(self, failed: Callable[[object, Exception], None]) -> None:
        self.failed = failed
        self._members: tuple[ServiceObserver, ...] = ()
        self.listening: dict[str, tuple[tuple[ServiceObserver, Callable[..., None]], ...]] = {}
        self._set(())

    def __iter__(self) -> Iterator[ServiceObserver]:
        return iter(self._members)

    def __iadd__(self, observers: Iterable[ServiceObserver]) -> "Observers":
        self._set((*self._members, *observers))
        return self

    def append(self, observer: ServiceObserver) -> None:
        self._set((*self._members, observer))

    def remove(self, observer: ServiceObserver) -> None:
        self._set(tuple(member for member in self._members if member is not observer))

    def _set(self, members: tuple[ServiceObserver, ...]) -> None:
        self._members = members
        for name in _HOOKS:
            self.listening[name] = tuple(
                (member, getattr(member, name)) for member in members if member.listens(name)
            )

    received = _notify_each(ServiceObserver.on_received)
    prepared = _notify_each(ServiceObserver.on_prepared)
    hop = _notify_each(ServiceObserver.on_hop)
    decision = _notify_each(ServiceObserver.on_decision)
    first_token = _notify_each(ServiceObserver.on_first_token)
    finished = _notify_each(ServiceObserver.on_finished)
    response = _notify_each(ServiceObserver.on_response)
    condition = _notify_each(ServiceObserver.on_condition)
    note = _notify_each(ServiceObserver.on_note)


#: The hooks that an observer may override, by their names.
_HOOKS: Final = {
    name: hook for name, hook in vars(ServiceObserver).items() if name.startswith("on_")
}
