"""Workers on Dynamo's request plane: token ids go to them, pieces of output come back.

A response is read as that of an engine with an OpenAI API (:class:`EngineStream`), so everything
else of a request is one path: an :class:`EngineAnswer` makes the OpenAI events of the output.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol
from uuid import uuid4

import msgspec

from dynctl.adapters.dynamo.call_home import Receiver
from dynctl.adapters.ports import RequestPlaneError
from dynctl.base.decode_errors import RequestError, WireError
from dynctl.base.errors import single_line
from dynctl.base.tasks import LoopShare
from dynctl.health.deployment import RegisteredWorker
from dynctl.serving.dynamo.answer import (
    DONE,
    ERROR_STATUS,
    INVALID_STATUS,
    NO_PARSERS,
    AnswerError,
    EngineAnswer,
    Parsers,
    error_body,
    error_event,
    parsers_of,
)
from dynctl.serving.engines.dispatch import Call, Hop
from dynctl.serving.engines.failures import UpstreamFailure, plane_failure
from dynctl.serving.engines.response_stream import SHARE_S, ClientBounds, EngineStream
from dynctl.serving.routing.config import DynamoConfig, Limits
from dynctl.serving.routing.refusal import HttpError
from dynctl.tokenization import ModelTokenizer
from dynctl.wire.anthropic import MessagesRequest
from dynctl.wire.dynamo.discovery import Instance, ModelCard
from dynctl.wire.dynamo.engine_output import (
    ERROR_EVENT,
    EngineItem,
    EngineOutput,
    decode_engine_item,
)
from dynctl.wire.dynamo.engine_request import (
    BootstrapInfo,
    EngineRequest,
    PrefillResult,
    RoutingHints,
)
from dynctl.wire.dynamo.openai_options import (
    EngineOptions,
    engine_request,
    read_engine_options,
)
from dynctl.wire.dynamo.request_plane import (
    NO_CONTEXT,
    AnswerDecoder,
    Begun,
    Completed,
    FrameDecoder,
    RawItem,
    RequestRefused,
    Sentinel,
    encode_control,
    printable,
    trace_context,
)
from dynctl.wire.openai import ChatRequest, CompletionRequest, EmbeddingRequest
from dynctl.wire.responses import ResponsesRequest
from router_core import Decision, RoutingPlan

#: Seconds for a worker's acknowledgement, and then for its connection to us.
_ACCEPT_S: Final = 10.0
#: Steps of a response that are taken in one turn of the event loop: about 1 ms. A step counts once,
#: and once more for each of so many bytes: a token may be one byte, and takes 3 us.
_TURN_STEPS: Final = 64
_STEP_BYTES: Final = 256
#: Tokens in one output. Workers send one, or a few; they are read in one turn.
_OUTPUT_TOKENS: Final = 65_536
#: Seconds for a worker to close the connection of a complete response.
_CLOSE_S: Final = 1.0
#: Failures after which a response may go on elsewhere; an error that the worker reports is none.
_MOVES_AFTER: Final = frozenset({"reset", "timeout", "ejected", "protocol", "vanished"})
#: Characters of a worker's text for the client of an invalid request.
_MAX_PUBLIC: Final = 2000
_AT_LENGTH: Final = EngineOutput(token_ids=[], finish_reason="length")
_OVERRIDE: Final[Mapping[str, Any]] = {
    "overlap_score_credit": 0.0,
    "prefill_load_scale": None,
    "router_temperature": None,
    "assume_kv_reuse": False,
    "track_prefill_tokens": False,
    "shared_cache_multiplier": None,
}
"""What Dynamo's frontend sets for the decode hop of a request; workers do not read it."""

_log = logging.getLogger(__name__)


class Sender(Protocol):
    """The request plane; see `dynctl.adapters.dynamo.request_plane.TcpRequestPlane.send`."""

    async def send(
        self,
        instance: Instance,
        body: Any,
        receiver: Receiver,
        *,
        timeout: float,
        request_id: str | None = None,
        context: Mapping[str, str] = NO_CONTEXT,
    ) -> tuple[str, str]: ...

    def forget(self, subject: str) -> None: ...


class WorkerRegistry(Protocol):
    """Finds what discovery has about workers and models."""

    def registered(self, worker_id: int) -> RegisteredWorker | None: ...

    def tokenizer_of(self, model: str, worker_set: str | None = None) -> ModelTokenizer | None: ...

    def card_of(self, model: str, worker_set: str | None = None) -> ModelCard | None: ...


class _Answer(Protocol):
    """Makes the answer of a response; see :class:`EngineAnswer`."""

    token_ids: list[int]
    stopped: bool

    def feed(self, output: EngineOutput) -> tuple[bytes, ...]: ...

    def end(self) -> tuple[bytes, ...]: ...

    def body(self) -> bytes: ...


class _PrefillAnswer:
    """The answer of a prefill worker: a JSON object with what the decode worker gets, and the usage
    as in an OpenAI answer."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.stopped = False
        self._handed: Any = None
        self._usage: dict[str, Any] = {}

    def feed(self, output: EngineOutput) -> tuple[bytes, ...]:
        if output.error is not None:
            raise AnswerError("reported an error")
        if output.disaggregated_params is not None:
            self._handed = output.disaggregated_params
        if output.completion_usage is not None:
            self._usage = msgspec.to_builtins(output.completion_usage)
        return ()

    def end(self) -> tuple[bytes, ...]:
        return ()

    def body(self) -> bytes:
        return msgspec.json.encode({"handed": self._handed, "usage": self._usage})


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the hops of a request share."""

    options: EngineOptions
    request: EngineRequest
    tokenizer: ModelTokenizer
    parsers: Parsers = NO_PARSERS


@dataclass(frozen=True, slots=True)
class _Message:
    """A request for one hop. ``prefill``: only its first token is computed. ``request_id``: on the
    plane; None for the decision's."""

    request: EngineRequest
    prefill: bool = False
    request_id: str | None = None


_CHATS: Final = "; use /v1/chat/completions"
#: Requests of APIs that Dynamo's request plane does not have, their path, and what to use.
_NOT_FOR_PLANES: Final = (
    (EmbeddingRequest, "/v1/embeddings", ""),
    (MessagesRequest, "/v1/messages", _CHATS),
    (ResponsesRequest, "/v1/responses", _CHATS),
)


class PlaneDispatch:
    """Sends requests to workers over the request plane. ``traced``: with the contexts of their
    traces."""

    reads_tokens = True

    def __init__(
        self,
        plane: Sender,
        registry: WorkerRegistry,
        limits: Limits,
        dynamo: DynamoConfig,
        *,
        traced: bool = False,
    ) -> None:
        self._traced = traced
        self._plane = plane
        self._registry = registry
        self._share = LoopShare(SHARE_S)
        self._bounds = ClientBounds(first_byte_s=limits.first_byte_s, idle_s=limits.idle_s)
        self._most_bytes = limits.stream_answer_bytes
        self._dynamo = dynamo

    def read(self, parsed: ChatRequest | CompletionRequest) -> EngineOptions:
        for kind, path, instead in _NOT_FOR_PLANES:
            if isinstance(parsed, kind):
                problem = f"{path} is not supported for the workers of a Dynamo deployment{instead}"
                raise RequestError(501, "unsupported", None, problem)
        return read_engine_options(parsed.body)

    def prepare(self, call: Call) -> Call:
        parsed, options = call.parsed, call.options
        served = call.request.model, call.request.worker_set
        tokenizer = self._registry.tokenizer_of(*served)
        assert parsed is not None
        if call.one_engine:
            raise _not_supported("a batch is not supported: send one request for each", "prompt")
        if tokenizer is None:
            raise HttpError(
                503,
                f"{call.request.model}: its model files are not here yet; GET /health has why",
                "service_unavailable",
                "model_not_ready",
                headers={"retry-after": "1"},
            )
        if call.token_ids is None:
            raise _not_supported("; ".join(call.request.notes), parsed.prompt_field)
        card = self._registry.card_of(*served)
        parsers = NO_PARSERS
        if card is not None:
            by_text = self._dynamo.answers_by_text
            parsers = parsers_of(options, card.runtime_config, by_text=by_text)
        request = engine_request(
            options,
            call.token_ids,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            lora_name=call.request.lora_name,
        )
        return replace(call, message=_Prepared(options, request, tokenizer, parsers))

    def whole(self, call: Call) -> _Message:
        return _Message(_request(call))

    def prefill(self, call: Call, decision: Decision) -> _Message:
        return self._prefill(call)

    def _prefill(self, call: Call) -> _Message:
        request = _request(call)
        stop = msgspec.structs.replace(request.stop_conditions, max_tokens=1, min_tokens=None)
        return _Message(msgspec.structs.replace(request, stop_conditions=stop), prefill=True)

    def handed_over(self, decision: Decision, answer: bytes) -> PrefillResult:
        body = msgspec.json.decode(answer)
        if body["handed"] is None:
            raise ValueError("the prefill response hands over nothing (no disaggregated_params)")
        details = body["usage"].get("prompt_tokens_details")
        return PrefillResult(disaggregated_params=body["handed"], prompt_tokens_details=details)

    def decode(self, call: Call, plan: RoutingPlan, handed: PrefillResult) -> _Message:
        return _Message(msgspec.structs.replace(_after_prefill(call, plan), prefill_result=handed))

    def pair(
        self, call: Call, plan: RoutingPlan, address: tuple[str, int], room: int
    ) -> tuple[_Message, _Message]:
        info = BootstrapInfo(
            bootstrap_host=address[0],
            bootstrap_port=address[1],
            bootstrap_room=room,
            handoff_id=uuid4(),
        )
        prefill = msgspec.structs.replace(self._prefill(call).request, bootstrap_info=info)
        decode = _after_prefill(call, plan)
        assert plan.prefill is not None
        assert decode.routing is not None
        hints = msgspec.structs.replace(
            decode.routing, prefill_dp_rank=plan.prefill.require().dp_rank
        )
        decode = msgspec.structs.replace(decode, routing=hints, bootstrap_info=info)
        # Workers match the legs by the request's id too, and Dynamo's mock workers by UUIDs alone.
        shared = str(info.handoff_id)
        return _Message(prefill, True, shared), _Message(decode, request_id=shared)

    async def open(self, hop: Hop) -> EngineStream:
        call, worker, message = hop.call, hop.worker, hop.message
        rank = hop.decision.require().dp_rank
        waiting = None if hop.member is None else hop.member.responses
        registered = self._registry.registered(worker.worker_id)
        if registered is None:
            raise UpstreamFailure("refused", f"{worker.name} is not registered any more")
        request = message.request
        hints = request.routing or RoutingHints()
        if message.prefill:
            hints = msgspec.structs.replace(
                hints, prefill_worker_id=worker.worker_id, prefill_dp_rank=rank
            )
        hints = msgspec.structs.replace(hints, dp_rank=rank)
        request = msgspec.structs.replace(request, routing=hints)
        link = _Link(self._plane, registered.instance, self._most_bytes, self._share)
        stream = call.moving
        if not isinstance(stream, PlaneStream) or message.prefill:
            stream = PlaneStream(
                link,
                worker.name,
                self._bounds,
                _PrefillAnswer() if message.prefill else self._answer(call),
                hop.first_output_s,
                streams=call.stream and not message.prefill,
                waiting=waiting,
            )
            if waiting is not None:
                waiting.add(stream)
        try:
            await link.send(
                stream, request, message.request_id or call.record.decision_id, self._context(hop)
            )
        except BaseException:
            link.abort()
            if stream is not call.moving:
                stream.close()
                if waiting is not None:
                    waiting.discard(stream)
            raise
        if stream is call.moving:
            stream.move_to(link, worker.name, hop.on_first_token)
            link.catch_up()
        elif not message.prefill:
            alone = _prepared_request(call).options.choices == 1
            stream.begin(
                hop.on_first_token,
                hop.move,
                moves=self._moves(call, registered),
                most_tokens=request.stop_conditions.max_tokens if alone else None,
            )
        return stream

    def _context(self, hop: Hop) -> Mapping[str, str]:
        if not self._traced:
            return NO_CONTEXT
        record = hop.call.record
        own = record.request_id == record.decision_id
        return trace_context(hop.headers, None if own else record.request_id)

    def moved(self, call: Call, stream: EngineStream) -> Call:
        assert isinstance(stream, PlaneStream)
        prepared = _prepared_request(call)
        request, done = prepared.request, stream.answer.token_ids
        stop = request.stop_conditions
        left = None if stop.max_tokens is None else max(0, stop.max_tokens - len(done))
        least = None if stop.min_tokens is None else max(0, stop.min_tokens - len(done))
        request = msgspec.structs.replace(
            request,
            token_ids=[*request.token_ids, *done],
            stop_conditions=msgspec.structs.replace(stop, max_tokens=left, min_tokens=least),
        )
        return replace(
            call,
            message=replace(prepared, request=request),
            token_ids=request.token_ids,
            moving=stream,
        )

    def _moves(self, call: Call, worker: RegisteredWorker) -> int:
        """How often the response may go on with another worker."""
        limit, most = self._dynamo.migration_limit, self._dynamo.migration_max_tokens
        if most is not None and len(call.token_ids or ()) > most:
            return 0
        if _prepared_request(call).options.choices > 1:
            return 0  # the choices would go on from different tokens
        return worker.card.migration_limit if limit is None else limit

    def _answer(self, call: Call) -> EngineAnswer:
        prepared = _prepared_request(call)
        return EngineAnswer(
            prepared.options,
            prepared.request,
            prepared.tokenizer,
            request_id=call.record.decision_id,
            created=int(call.record.received_wall),
            parsers=prepared.parsers,
        )


def _prepared_request(call: Call) -> _Prepared:
    prepared = call.message
    assert isinstance(prepared, _Prepared)
    return prepared


def _request(call: Call) -> EngineRequest:
    return _prepared_request(call).request


def _not_supported(message: str, field: str) -> RequestError:
    return RequestError(501, "unsupported", field, message)


def _after_prefill(call: Call, plan: RoutingPlan) -> EngineRequest:
    """The request of a decode hop: where prefill ran, and what that requires of decode."""
    prefill, request = plan.prefill, _request(call)
    assert prefill is not None
    required = [item.taint for item in plan.implied if item.kind == "required"]
    preferred = {item.taint: item.weight for item in plan.implied if item.kind == "preferred"}
    constraints: dict[str, Any] = {}
    if required:
        constraints["required_taints"] = required
    if preferred:
        constraints["preferred_taints"] = preferred
    routing = msgspec.structs.replace(
        request.routing or RoutingHints(), prefill_worker_id=prefill.require().worker_id
    )
    if constraints:
        routing = msgspec.structs.replace(routing, routing_constraints=constraints)
    return msgspec.structs.replace(request, routing=routing, router_config_override=dict(_OVERRIDE))


_Move = Callable[[EngineStream, UpstreamFailure], Coroutine[Any, Any, None]]


class PlaneStream(EngineStream):
    """The response of a worker, written as an OpenAI answer.

    ``answer`` makes the answer. ``waiting``: the responses that the worker has not begun, with this
    one as long as it is one of them.
    """

    __slots__ = (
        "_link",
        "_most_tokens",
        "_move",
        "_moved_at",
        "_moves_left",
        "_moving",
        "_on_output",
        "_streams",
        "_waiting",
        "answer",
    )

    def __init__(
        self,
        link: _Link,
        origin: str,
        bounds: ClientBounds,
        answer: _Answer,
        first_byte_s: float | None,
        *,
        streams: bool,
        waiting: set[EngineStream] | None = None,
    ) -> None:
        super().__init__(link, origin, bounds, first_byte_s)
        self.status = 200
        self.chunked = streams
        kind = "text/event-stream" if streams else "application/json"
        self.headers = {"content-type": kind}
        self.answer = answer
        self._move: _Move | None = None
        self._moves_left = 0
        self._most_tokens: int | None = None
        self._moved_at = 0
        self._link = link
        self._streams = streams
        self._moving: asyncio.Task[None] | None = None
        self._waiting = waiting
        self._on_output: Callable[[], None] | None = None

    def begin(
        self,
        on_output: Callable[[], None] | None,
        move: _Move | None,
        *,
        moves: int,
        most_tokens: int | None,
    ) -> None:
        """The worker has the request. ``on_output`` is called once with its first output. ``move``
        continues the response on another worker when this one is lost, at most ``moves`` times.
        After ``most_tokens`` the answer is complete, whatever the worker still sends."""
        self._on_output = on_output
        self._move, self._moves_left = move, moves
        self._most_tokens = most_tokens

    def move_to(self, link: _Link, origin: str, on_output: Callable[[], None] | None) -> None:
        """The response goes on with another worker; ``on_output`` as of :meth:`begin`."""
        self._on_output = on_output
        self._link = link
        self._connection = link
        self._moved_at = len(self.answer.token_ids)
        self.origin = origin
        self._last_read = self._loop.time()
        if self._paused:
            link.pause()

    def close(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        super().close()
        self._on_output = self._move = None  # they refer to the call, and may lead back here
        self._link.let_go()

    # -- called by the link ------------------------------------------------------------------

    def take(self, link: _Link, steps: AnswerDecoder) -> bool:
        """Take steps that have arrived, as many as one turn of the event loop may have. Returns
        whether there may be more."""
        if link is not self._link or self._failure is not None or self.done:
            return False
        self._last_read = self._loop.time()
        events: list[bytes] = []
        more, left = True, _TURN_STEPS
        try:
            while left > 0 and not self.done:
                left -= 1
                step = steps.next_step()
                if step is None:
                    more = False
                    break
                if isinstance(step, RawItem):
                    left -= len(step.document) // _STEP_BYTES
                    self._take_item(step, events)
                elif isinstance(step, Completed):
                    self._complete(events)
                elif isinstance(step, RequestRefused):
                    raise UpstreamFailure(
                        "status", f"{self.origin} refused the request: {step.error}", status=500
                    )
                elif not isinstance(step, Begun):
                    raise UpstreamFailure("reset", f"{self.origin} ended its response early")
        except WireError as error:
            self._pass(events)
            what = f"{self.origin} sent an invalid response: {error}"
            self._fail(UpstreamFailure("protocol", what, status=500))
            return False
        except UpstreamFailure as failure:
            self._pass(events)
            self._fail(failure)
            return False
        self._pass(events)
        if self._pipe is None:
            self._release_waiter()
        return more and not self.done

    def lost(self, link: _Link) -> None:
        """The worker's connection ended before the end of the response."""
        what = f"{self.origin} closed the connection during its response"
        self.fail(link, UpstreamFailure("reset", what, status=500))

    def fail(self, link: _Link, failure: UpstreamFailure) -> None:
        """The response failed in this way."""
        if link is self._link:
            self._fail(failure)

    def _take_item(self, raw: RawItem, events: list[bytes]) -> None:
        """Take one item; output that Dynamo does not accept is an error of the worker, as there."""
        try:
            item = decode_engine_item(raw)
        except WireError as error:
            problem = f"{self.origin} sent an invalid output: {error}"
            raise UpstreamFailure("status", problem, status=500) from None
        answer, output = self.answer, item.data
        if item.event == ERROR_EVENT:
            raise _reported_failure(self.origin, item)
        if output is None:
            return
        if len(output.token_ids) > _OUTPUT_TOKENS:
            problem = (
                f"{self.origin} sent {len(output.token_ids):,} tokens in one output, over the "
                f"limit of {_OUTPUT_TOKENS:,}"
            )
            raise UpstreamFailure("status", problem, status=500)
        self._started = True
        if self._moved_at and output.completion_usage is not None:
            output = _as_of_the_start(output, self._moved_at)
        if self._on_output is not None:
            self._on_output()
            self._on_output = None
        try:
            events += answer.feed(output)
        except AnswerError as error:
            raise UpstreamFailure("status", f"{self.origin} {error}", status=500) from None
        if answer.stopped:
            self._link.stop()
            self._complete(events)

    def _complete(self, events: list[bytes]) -> None:
        """The answer is complete: its last events and the end arrive together."""
        try:
            if self._streams:
                events += self.answer.end()
            else:
                events.append(self.answer.body())
        except AnswerError as error:
            raise UpstreamFailure("status", f"{self.origin} {error}", status=500) from None
        self._pipe = None
        self._pass(events)
        events.clear()
        self._finish(b"")

    def _pass(self, events: list[bytes]) -> None:
        piece = events[0] if len(events) == 1 else b"".join(events)
        if not piece:
            return
        pipe = self._pipe
        if pipe is None:
            self._keep(piece)
        else:
            pipe(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _fail(self, failure: UpstreamFailure) -> None:
        if not self._may_move_after(failure):
            self._end_with(failure)
            return
        if self._most_tokens is not None and len(self.answer.token_ids) >= self._most_tokens:
            # Only the worker's last word is missing.
            self._complete([*self.answer.feed(_AT_LENGTH)])
            self._release_waiter()
            return
        self._moves_left -= 1
        if self._waiting is not None:
            self._waiting.discard(self)  # what becomes of the lost worker is no matter any more
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._last_read = self._loop.time()
        assert self._move is not None
        self._moving = asyncio.create_task(self._continue(self._move, failure))

    def _may_leave_after(self, failure: UpstreamFailure) -> bool:
        return super()._may_leave_after(failure) or self._may_move_after(failure)

    def _may_move_after(self, failure: UpstreamFailure) -> bool:
        running = not self.done and self._failure is None and self._moving is None
        return (
            running
            and self._move is not None
            and self._moves_left > 0
            and failure.kind in _MOVES_AFTER
            and bool(self.answer.token_ids)
        )

    async def _continue(self, move: _Move, failure: UpstreamFailure) -> None:
        try:
            await move(self, failure)
        except UpstreamFailure as error:
            self._end_with(error)
        except Exception:  # its client must not wait for an answer that never goes on
            _log.exception("%s: the response cannot go on with another worker", self.origin)
            self._end_with(failure)
        finally:
            self._moving = None

    def _end_with(self, failure: UpstreamFailure) -> None:
        """Fail; a stream that has begun ends as that of a Dynamo frontend, with an error event."""
        if self._streams and self._started and self._failure is None and not self.done:
            self._pipe = None
            body = failure.body
            event = b"data: %b\n\n" % body if body else error_event(failure.status)
            self._pass([event, DONE])
            failure.shown = True
        super()._fail(failure)


class _Link:
    """Between a stream and the connections of its request: a wire, and a receiver."""

    def __init__(
        self, plane: Sender, instance: Instance, most_bytes: int, share: LoopShare
    ) -> None:
        self.keep = False
        self.stream: PlaneStream | None = None
        self._plane = plane
        self._instance = instance
        self._most_bytes = most_bytes
        self._subject: str | None = None
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerDecoder | None = None
        self._done = False
        self._lost = False
        self._share = share
        #: Whether steps wait for their share of the event loop, and nothing is read meanwhile.
        self._queued = False
        #: Whether the stream takes no more for now.
        self._full = False
        self._timer: asyncio.TimerHandle | None = None

    def catch_up(self) -> None:
        """Pass on what arrived before the stream took this link."""
        self.received()
        if self._lost:
            self.lost(None)

    async def send(
        self,
        stream: PlaneStream,
        request: EngineRequest,
        request_id: str,
        context: Mapping[str, str],
    ) -> None:
        """Send the request; its response goes to ``stream``. Raises UpstreamFailure."""
        self.stream = stream
        try:
            self._subject, home = await self._plane.send(
                self._instance,
                request,
                self,
                timeout=_ACCEPT_S,
                request_id=request_id,
                context=context,
            )
        except RequestPlaneError as error:
            raise plane_failure(error) from error
        if self._transport is None and not self._done:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_ACCEPT_S, self._not_called, home)

    # -- Receiver

    def called(self, transport: asyncio.Transport, frames: FrameDecoder) -> None:
        self._transport = transport
        self._answer = AnswerDecoder(self._instance.codec, self._most_bytes, frames)
        self._stop_timer()
        if self._done:
            self._hang_up()

    def received(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if self._done:
            self._until_sentinel(answer)
        elif self.stream is not None and not self._queued and self.stream.take(self, answer):
            self._queue()

    def _queue(self) -> None:
        """Read nothing more until there is time for the steps that have arrived."""
        self._queued = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._share.later(self._go_on)

    def _go_on(self) -> None:
        """There is time for the steps that wait."""
        self._queued = False
        if not self._full:
            self.resume()
        self.received()
        if self._lost:
            self.lost(None)  # which waits again if there is more

    def host_is_silent(self) -> None:
        if not self._done and self.stream is not None:
            self.stream.host_is_silent()

    def lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._transport = None
        self._lost = True
        if self._queued:
            return
        if not self._done and self.stream is not None:
            self.stream.lost(self)

    # -- Wire

    def pause(self) -> None:
        self._full = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        self._full = False
        if self._transport is not None and not self._transport.is_closing() and not self._queued:
            self._transport.resume_reading()

    def relay(self, take: Callable[[bytes], None] | None) -> None:
        """Nothing: what arrives are not the chunks of the answer."""

    def abort(self) -> None:
        """Cancel the request at the worker, unless it is complete."""
        if self._done:
            return
        self._done = True
        self._stop_timer()
        if self._transport is not None:
            self._hang_up()
        elif self._subject is not None:
            # The worker learns of it when it connects; a closed door alone does not stop it.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_ACCEPT_S, self._plane.forget, self._subject)

    def let_go(self) -> None:
        """The stream is closed. It refers to this link, and such a cycle would keep both."""
        self.stream = None

    def stop(self) -> None:
        """The answer is complete before the worker's end: it may stop."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_control("stop"))

    def finished(self, *, clean: bool) -> None:
        """The response is complete; the worker closes first, else its log has an error."""
        self._done = True
        if self._answer is not None and not self._until_sentinel(self._answer):
            self._timer = asyncio.get_running_loop().call_later(_CLOSE_S, self._close)

    # -- inside

    def _until_sentinel(self, answer: AnswerDecoder) -> bool:
        """Close after the last frame; False while it has not arrived."""
        if self._queued:
            return False
        try:
            for _ in range(_TURN_STEPS):
                step = answer.next_step()
                if step is None:
                    return False
                if isinstance(step, Sentinel):
                    self._close()
                    return True
        except WireError:
            self._close()
            return True
        self._queue()
        return False

    def _hang_up(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_control("kill"))
        self._close()

    def _close(self) -> None:
        self._stop_timer()
        if self._transport is not None:
            self._transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _not_called(self, home: str) -> None:
        if self.stream is not None and not self._done:
            origin = self.stream.origin
            self.stream.fail(
                self,
                UpstreamFailure(
                    "timeout",
                    f"{origin} accepted the request and did not connect back to {home} within "
                    f"{_ACCEPT_S:g} s",
                ),
            )


def _as_of_the_start(output: EngineOutput, earlier: int) -> EngineOutput:
    """The output with the usage of the whole request; its worker counts the ``earlier`` tokens of
    output as a part of its prompt."""
    usage = output.completion_usage
    assert usage is not None
    usage = msgspec.structs.replace(
        usage,
        prompt_tokens=max(0, usage.prompt_tokens - earlier),
        completion_tokens=usage.completion_tokens + earlier,
    )
    return msgspec.structs.replace(output, completion_usage=usage)


def _reported_failure(origin: str, item: EngineItem) -> UpstreamFailure:
    """The failure that a worker reported in its response, without its text."""
    error = item.error if isinstance(item.error, dict) else {}
    status = INVALID_STATUS if error.get("class") == "InvalidRequest" else ERROR_STATUS
    reason = printable(str(error.get("reason") or "an error that its log has"))
    public = error.get("public")
    text = public.get("message") if isinstance(public, dict) else None
    body = error_body(status, single_line(text, _MAX_PUBLIC) if isinstance(text, str) else "")
    return UpstreamFailure("status", f"{origin} reported {reason}", status=status, body=body)
