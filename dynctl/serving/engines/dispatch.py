"""How requests reach workers: what is sent on each hop, and what one hop hands to the next."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dynctl.base.decode_errors import RequestError
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.engines.upstream import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.engine_kinds.kind import EngineKind
from dynctl.wire.engine_kinds.table import OTHER
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import Decision, RoutingPlan, RoutingRequest, Worker

RANK_HEADER: Final = "x-data-parallel-rank"


@dataclass(slots=True)
class Call:
    """One client request. ``body`` is what engines receive; ``raw`` the same as bytes.

    Nothing that a call refers to may refer to the call: such a cycle keeps everything of a request
    until a full garbage collection, and those are rare.

    ``path`` is that of the engine's endpoint. ``one_engine``: it cannot be handed off, as several
    prompts or embeddings. ``parsed``, ``token_ids`` and ``options`` are for workers that get
    tokens; ``message`` is the request that :meth:`Dispatch.prepare` made of them. ``resume``: the
    response that this call continues on another worker. ``companion``: the prefill half of a
    bootstrap pair, which may still run.
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
    resume: EngineStream | None = None
    companion: asyncio.Task[None] | None = field(default=None, repr=False)
    #: Continues the response of a call on another worker, where workers support that.
    move: "Move | None" = field(default=None, repr=False)
    #: Called with the first output of the worker that continues a response, or that streams one
    #: which its client gets as a whole.
    on_output: Callable[[], None] | None = field(default=None, repr=False)
    #: Workers that lost the response, by id, and how.
    lost: dict[int, str] = field(default_factory=dict)
    #: The plan that is in force since the response moved to another worker.
    moved: RoutingPlan | None = None


Move = Callable[[Call, EngineStream, UpstreamFailure], Coroutine[Any, Any, None]]
"""Continues a response whose worker failed; raises UpstreamFailure where that is not possible."""


class Dispatch(Protocol):
    """Sends the hops of a request to workers of one kind.

    A message is opaque to the caller: it comes from :meth:`whole`, :meth:`prefill`,
    :meth:`decode` or :meth:`pair` and goes to :meth:`open`.
    """

    def read(self, parsed: ChatRequest | CompletionRequest) -> Any:
        """What a body asks of these workers, for ``Call.options``. Raises RequestError."""
        ...

    def prepare(self, call: Call) -> None:
        """Make what all hops need. Raises RequestError for what these workers cannot do."""
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

    async def open(
        self,
        call: Call,
        decision: Decision,
        message: Any,
        spec: WorkerSpec | None,
        *,
        first_byte_s: float | None,
        waiting: set[EngineStream] | None,
    ) -> EngineStream:
        """Send a message to the hop's winner; as :meth:`Upstream.open`. ``spec``: the winner's."""
        ...

    def continued(self, call: Call, stream: EngineStream) -> Call:
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

    def __init__(self, upstream: Upstream, fleet: EngineKinds) -> None:
        self._upstream = upstream
        self._fleet = fleet

    def read(self, parsed: ChatRequest | CompletionRequest) -> None:
        """Engines check the body."""

    def prepare(self, call: Call) -> None:
        """Engines get the body as it is, but for adapters. Raises RequestError where a kind of
        the model's engines would ignore the adapter or the cache salt."""
        request = call.request
        if request.lora_name is None and not request.salted:
            return
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

    async def open(
        self,
        call: Call,
        decision: Decision,
        message: bytes,
        spec: WorkerSpec | None,
        *,
        first_byte_s: float | None,
        waiting: set[EngineStream] | None,
    ) -> EngineStream:
        worker, ref = winner(decision), decision.require()
        headers = call.headers
        if "authorization" in headers and not (spec and spec.forward_authorization):
            headers = {name: headers[name] for name in headers if name != "authorization"}
        config = worker.runtime_config
        if config.data_parallel_size > 1:
            rank = ref.dp_rank - config.data_parallel_start_rank
            headers = {**headers, RANK_HEADER: str(rank)}
        adapter = call.request.lora_name
        if adapter is not None:
            kind = self._fleet.other_kinds.get(worker.worker_id, OTHER)
            if kind.adapter_body is not None:
                message = kind.adapter_body(message, call.path, worker.model, adapter)
        return await self._upstream.open(
            f"{worker.endpoint}{call.path}",
            message,
            headers,
            first_byte_s=first_byte_s,
            waiting=waiting,
        )

    def continued(self, call: Call, stream: EngineStream) -> Call:
        raise NotImplementedError("an engine with an OpenAI API cannot continue an answer")


def winner(decision: Decision) -> Worker:
    """The worker of a decision that has one."""
    worker = decision.worker
    if worker is None:
        raise ValueError(f"decision {decision.id} has no winner")
    return worker
