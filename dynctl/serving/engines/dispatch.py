"""How requests reach workers: what is sent on each hop, and what one hop hands to the next."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from dynctl.base.decode_errors import RequestError
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.fleet import Member
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_kinds.table import OTHER
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import Decision, RoutingPlan, RoutingRequest, Worker, quick_init

RANK_HEADER: Final = "x-data-parallel-rank"


@quick_init
@dataclass(frozen=True, slots=True)
class Call:
    """What a client asks of the workers. ``body`` is what engines receive; ``raw`` the same as
    bytes.

    Nothing that a call refers to may refer to the call: such a cycle keeps everything of a request
    until a full garbage collection, and those are rare.

    ``path`` is that of the engine's endpoint. ``one_engine``: it cannot be handed off, as several
    prompts or embeddings. ``parsed``, ``token_ids`` and ``options`` are for workers that get
    tokens; ``message`` is the request that :meth:`Dispatch.prepare` made of them. ``moving``: the
    response that this call continues on another worker; None: the client has nothing yet.
    """

    request: RoutingRequest
    path: str
    body: Mapping[str, Any]
    raw: bytes
    stream: bool
    headers: dict[str, str]
    record: RequestRecord
    one_engine: bool = False
    parsed: ChatRequest | CompletionRequest | None = None
    token_ids: Sequence[int] | None = field(default=None, repr=False)
    options: Any = field(default=None, repr=False)
    message: Any = field(default=None, repr=False)
    moving: EngineStream | None = None


class Hop(NamedTuple):
    """A request that is sent to the winner of a decision, at ``sent_at`` of the service's clock.

    ``message``: of the :class:`Dispatch`. ``member``: the winner in the fleet, None where it left.
    ``tokens``: of prompts that it may compute before the first output.
    ``headers``: for the engine. ``first_output_s``: how long to wait for the first output; None
    where that does not come before the whole answer.

    For workers whose responses are read by tokens: ``on_first_token`` is called with the first
    output of a response where the flow does not see it; ``move`` moves a response whose worker
    failed to another worker, and raises UpstreamFailure where that is not possible.
    """

    call: Call
    decision: Decision
    worker: Worker
    message: Any
    member: Member | None
    headers: Mapping[str, str]
    sent_at: float
    tokens: int
    first_output_s: float | None
    on_first_token: Callable[[], None] | None = None
    move: Callable[[EngineStream, UpstreamFailure], Coroutine[Any, Any, None]] | None = None


class Dispatch(Protocol):
    """Sends the hops of a request to workers of one kind.

    A message is opaque to the caller: it comes from :meth:`whole`, :meth:`prefill`,
    :meth:`decode` or :meth:`pair` and goes to :meth:`open`.
    """

    @property
    def reads_tokens(self) -> bool:
        """Whether workers stream each response, so that it is read by tokens, and may move."""
        ...

    def read(self, parsed: ChatRequest | CompletionRequest) -> Any:
        """What a body asks of these workers, for ``Call.options``. Raises RequestError."""
        ...

    def prepare(self, call: Call) -> Call:
        """The call with what all hops need. Raises RequestError for what these workers cannot
        do."""
        ...

    def whole(self, call: Call) -> Any:
        """The message to a worker that does the whole request."""
        ...

    def prefill(self, call: Call, decision: Decision) -> Any:
        """The message of a prefill hop to the decision's winner."""
        ...

    def handed_over(self, decision: Decision, answer: bytes) -> Any:
        """What the answer of a prefill hop hands over. Raises ValueError."""
        ...

    def decode(self, call: Call, plan: RoutingPlan, handed: Any) -> Any:
        """The message of a decode hop after a prefill hop."""
        ...

    def pair(
        self, call: Call, plan: RoutingPlan, address: tuple[str, int], room: int
    ) -> tuple[Any, Any]:
        """The messages to a prefill and a decode worker that get them at once and meet."""
        ...

    def open(self, hop: Hop) -> Awaitable[EngineStream]:
        """Send the hop; as :meth:`Upstream.open`."""
        ...

    def moved(self, call: Call, stream: EngineStream) -> Call:
        """The call that continues a response of :meth:`open`, after the output so far."""
        ...


class EngineKinds(Protocol):
    """The kinds of a fleet's engines."""

    @property
    def other_kinds(self) -> Mapping[int, EngineKind]:
        """Worker id -> kind of an engine whose rules for requests are not those of `OTHER`."""
        ...

    def kinds(self, model: str) -> Set[EngineKind]:
        """The kinds of the model's engines; empty in a fleet without `other_kinds`."""
        ...


class HttpDispatch:
    """Engines with an OpenAI API: each gets the client's body over HTTP."""

    reads_tokens = False

    def __init__(self, upstream: Upstream, fleet: EngineKinds) -> None:
        self._upstream = upstream
        self._fleet = fleet

    def read(self, parsed: ChatRequest | CompletionRequest) -> None:
        """Engines check the body."""

    def prepare(self, call: Call) -> Call:
        """Engines get the body as it is, but for adapters. Raises RequestError where a kind of
        the model's engines would ignore the adapter or the cache salt."""
        request = call.request
        if request.lora_name is None and not request.salted:
            return call
        for kind in self._fleet.kinds(request.model):
            if request.lora_name is not None and call.path in kind.without_adapters:
                problem = (
                    f"{call.path} of {kind.label} has no LoRA adapters: it would answer with "
                    f"{request.model}; send the request to /v1/chat/completions"
                )
                raise RequestError(501, "unsupported", "model", problem)
            if request.salted and call.path in kind.without_salt:
                problem = (
                    f"{call.path} of {kind.label} has no cache salt: its blocks would be shared "
                    "with other clients; send the request to /v1/chat/completions or "
                    "/v1/completions, or use a key without isolation and no cache_salt"
                )
                raise RequestError(501, "unsupported", "cache_salt", problem)
        return call

    def whole(self, call: Call) -> bytes:
        return call.raw

    def prefill(self, call: Call, decision: Decision) -> bytes:
        return self._kind(decision).handoff.prefill(call.body, call.path)

    def handed_over(self, decision: Decision, answer: bytes) -> Any:
        return self._kind(decision).handoff.handed_over(answer)

    def decode(self, call: Call, plan: RoutingPlan, handed: Any) -> bytes:
        return self._kind(plan.prefill).handoff.decode(call.body, handed)

    def pair(
        self, call: Call, plan: RoutingPlan, address: tuple[str, int], room: int
    ) -> tuple[bytes, bytes]:
        body = self._kind(plan.prefill).handoff.pair(call.body, address, room)
        return body, body

    def _kind(self, decision: Decision | None) -> EngineKind:
        """The kind of a decision's winner."""
        ref = None if decision is None else decision.ref
        return OTHER if ref is None else self._fleet.other_kinds.get(ref.worker_id, OTHER)

    def open(self, hop: Hop) -> Awaitable[EngineStream]:
        call, worker, member = hop.call, hop.worker, hop.member
        headers, message = hop.headers, hop.message
        if "authorization" in headers and not (member and member.spec.forward_authorization):
            headers = {name: headers[name] for name in headers if name != "authorization"}
        config = worker.runtime_config
        if config.data_parallel_size > 1:
            rank = hop.decision.require().dp_rank - config.data_parallel_start_rank
            headers = {**headers, RANK_HEADER: str(rank)}
        adapter = call.request.lora_name
        if adapter is not None:
            kind = self._fleet.other_kinds.get(worker.worker_id, OTHER)
            if kind.adapter_body is not None:
                message = kind.adapter_body(message, call.path, worker.model, adapter)
        return self._upstream.open(
            f"{worker.endpoint}{call.path}",
            message,
            headers,
            first_byte_s=hop.first_output_s,
            waiting=None if member is None else member.responses,
        )

    def moved(self, call: Call, stream: EngineStream) -> Call:
        raise NotImplementedError("an engine with an OpenAI API cannot continue an answer")
