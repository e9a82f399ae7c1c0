"""How requests reach workers: what is sent on each hop, and what one hop hands to the next."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dynctl.base.decode_errors import RequestError
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.handoff import (
    adapter_body,
    bootstrap_body,
    decode_body,
    kv_transfer_params,
    prefill_body,
)
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.engines.upstream import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import Decision, RoutingPlan, RoutingRequest, Worker

RANK_HEADER: Final = "x-data-parallel-rank"
#: Endpoints of SGLang 0.5.23 that have no cache salt.
_UNSALTED: Final = frozenset({"/v1/messages", "/v1/embeddings"})


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

    def prefill(self, call: Call) -> Any:
        """The message of a prefill hop."""
        ...

    def handed_over(self, answer: bytes) -> Any:
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
    """What is known of the engines of a fleet."""

    def is_sglang(self, worker_id: int) -> bool:
        """Whether the worker is an engine of SGLang, by its description of itself."""
        ...

    def readers(self, model: str) -> Set[str]:
        """The kinds of the model's engines; empty in a fleet without SGLang."""
        ...


class HttpDispatch:
    """Engines with an OpenAI API: each gets the client's body over HTTP."""

    def __init__(self, upstream: Upstream, kinds: EngineKinds) -> None:
        self._upstream = upstream
        self._kinds = kinds

    def read(self, parsed: ChatRequest | CompletionRequest) -> None:
        """Engines check the body."""

    def prepare(self, call: Call) -> None:
        """Engines get the body as it is, except for adapters of SGLang."""
        request = call.request
        adapter = request.lora_name is not None and call.path == "/v1/responses"
        salted = request.salted and call.path in _UNSALTED
        if not (adapter or salted) or "sglang" not in self._kinds.readers(request.model):
            return
        if adapter:
            problem = (
                "/v1/responses of SGLang has no LoRA adapters: it would answer with "
                f"{request.model}; send the request to /v1/chat/completions"
            )
            raise RequestError(501, "unsupported", "model", problem)
        problem = (
            f"{call.path} of SGLang has no cache salt: its blocks would be shared with other "
            "clients; send the request to /v1/chat/completions or /v1/completions, or use a key "
            "without isolation and no cache_salt"
        )
        raise RequestError(501, "unsupported", "cache_salt", problem)

    def whole(self, call: Call) -> bytes:
        return call.raw

    def prefill(self, call: Call) -> bytes:
        return prefill_body(call.body, call.path)

    def handed_over(self, answer: bytes) -> Mapping[str, Any] | None:
        return kv_transfer_params(answer)

    def decode(self, call: Call, plan: RoutingPlan, handed: Mapping[str, Any] | None) -> bytes:
        return decode_body(call.body, handed)

    def pair(
        self, call: Call, plan: RoutingPlan, address: tuple[str, int], room: int
    ) -> tuple[bytes, bytes]:
        body = bootstrap_body(call.body, address, room)
        return body, body

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
            headers = {name: one for name, one in headers.items() if name != "authorization"}
        config = worker.runtime_config
        if config.data_parallel_size > 1:
            rank = ref.dp_rank - config.data_parallel_start_rank
            headers = {**headers, RANK_HEADER: str(rank)}
        adapter = call.request.lora_name
        if adapter is not None and self._kinds.is_sglang(worker.worker_id):
            message = adapter_body(message, call.path, worker.model, adapter)
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
