"""Responses of inference: streams, bodies with ``nvext``, dry runs, and failures as errors."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from dynctl.base.decode_errors import RequestError
from dynctl.documents.errors import ErrorDetails
from dynctl.serving.engines.apis import (
    DONE_DATA,
    ERROR_EVENT,
    ERROR_KEY,
    EVENT_BYTES,
    EVENTS_A_TURN,
    Api,
    EventCut,
    event_data,
    event_name,
    events_of,
)
from dynctl.serving.engines.failures import UpstreamFailure, engine_reason, reported_error
from dynctl.serving.engines.flow import Answer, GaveUp
from dynctl.serving.engines.response_stream import EngineStream, chunk_of, content_of
from dynctl.serving.http.plain_requests import ClientRequest, PlainRequest, PlainStream
from dynctl.serving.routing.refusal import HttpError, attempts_of
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.anthropic import MessagesRequest
from dynctl.wire.nvext import NvExt
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    with_reuse,
    without_reuse,
)
from dynctl.wire.responses import ResponsesRequest
from router_core import Decision, RoutingPlan, RoutingRequest, decay_fraction

#: The last event, in the end of a stream: generated text cannot have it, for a line of JSON has no
#: ends of lines.
_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]")
#: How nearly all streams end, without and with the frame of the chunk.
_ENDS_DONE = (b"\ndata: [DONE]\n\n", b"\ndata: [DONE]\n\n\r\n")
#: What every usage has in its counts; generated text cannot have it, for its quotes are escaped.
_TOKENS = b'_tokens"'
#: The end of a stream in which its last events are looked for: [DONE], and usage before it.
_TAIL_BYTES = 512
#: Bytes waiting for a client; above this no more are sent until it reads some.
_LAGGING_BYTES = 256 * 1024
#: Chunks that were passed on and not counted yet.
_BATCH_BYTES = 8 * 1024
_SSE = "text/event-stream"
#: The router queue: class of a request that waited, requests ahead of it at first, milliseconds.
QUEUE_CLASS_HEADER: Final = "x-dynctl-queue-class"
QUEUE_AHEAD_HEADER: Final = "x-dynctl-queue-ahead"
QUEUE_WAIT_HEADER: Final = "x-dynctl-queue-wait-ms"
#: Fields of the request for the router queue that had no effect: it cannot wait here.
QUEUE_UNUSED_HEADER: Final = "x-dynctl-queue-unused"
_ENGINE_FAILED = "the engine failed; try again"
#: Failures of an engine that went: another one, or its next process, may be there soon.
_WENT: Final = ("refused", "connect", "vanished", "reset", "ejected")


class OutputBlocks:
    """Reports generated blocks to the router, if that is enabled.

    An event of a stream counts as a token: engines send one event per token unless they lag.
    """

    def __init__(self, service: RoutingService, request: RoutingRequest, osl: int | None) -> None:
        self._service = service
        self._request = request
        self._osl = osl
        self._tokens = 0
        self._blocks = 0

    def add(self, events: int) -> None:
        self._tokens += events
        blocks = self._tokens // self._request.block_size
        while self._blocks < blocks:
            self._blocks += 1
            decay = None
            if self._osl:
                decay = decay_fraction(self._tokens, self._osl)
            self._service.output_block(self._request.id, decay)


class PrefillReuse:
    """Puts the number of reused tokens of the prefill engine in the place of the decode engine's,
    which received the blocks of the prompt: nearly all of them are in its cache, or none."""

    def __init__(self, answer: Answer, record: RequestRecord) -> None:
        self._answer = answer
        self._record = record

    @property
    def known(self) -> bool:
        return self._answer.prefill_ended

    async def events(self, whole: bytes) -> bytes:
        """Whole events as the client gets them."""
        if _TOKENS not in whole:
            return whole
        await self._answer.wait_for_prefill()
        return self._events(whole)

    async def event(self, event: bytes) -> bytes:
        """One event, without the blank line after it."""
        return (await self.events(event)).removesuffix(b"\n\n")

    async def body(self, body: bytes) -> bytes:
        """A whole answer."""
        await self._answer.wait_for_prefill()
        return with_reuse(body, self._record.cached_tokens)

    def piping(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Writes chunks of whole events; for the time after `known`."""

        def changed(chunks: bytes) -> None:
            write(chunk_of(self._events(content_of(chunks))) if _TOKENS in chunks else chunks)

        return changed

    def _events(self, whole: bytes) -> bytes:
        cached = self._record.cached_tokens
        return _changed_events(
            whole, lambda data: with_reuse(data, cached) if _TOKENS in data else data
        )


class _Stream(web.StreamResponse):
    """A stream whose head is sent in the same write as its first piece."""

    _send_headers_immediately = False


ClientStream = _Stream | PlainStream


async def _begin(
    http: ClientRequest, answer: Answer, record: RequestRecord, headers: Mapping[str, str]
) -> ClientStream:
    """The client's stream, with ``headers`` and the content type of the engine's."""
    kind = answer.response.headers.get("content-type", _SSE)
    headers = {"content-type": kind, "cache-control": "no-cache", **headers}
    response: ClientStream
    if isinstance(http, PlainRequest):
        response = http.begin(headers)
    else:
        response = _Stream(headers=headers)
        await response.prepare(http)
    record.began = True
    return response


async def pass_stream(
    http: ClientRequest,
    answer: Answer,
    service: RoutingService,
    record: RequestRecord,
    headers: Mapping[str, str],
    *,
    nvext: NvExt,
    blocks: OutputBlocks | None,
    limit: int,
    detailed: Callable[[], bool],
    reuse: PrefillReuse | None = None,
) -> tuple[ClientStream, UpstreamFailure | None]:
    """Pass the engine's stream on as it arrives; returns the failure that ended it, if any.

    ``reuse``: changes the events with usage. After a failure the stream ends with an error event;
    ``detailed``: whether it names the engine.
    A stream without ``[DONE]`` at its end and one of more than ``limit`` bytes are failures.
    """
    upstream = answer.response
    response = await _begin(http, answer, record, headers)
    piece = answer.head
    annotated = nvext.extra_fields and (nvext.wants("worker_id") or nvext.wants("timing"))
    if annotated or not record.details:
        failed = await _pass_annotated(
            response, answer, service, record, nvext, blocks, limit, reuse, detailed=detailed
        )
        return response, failed
    cut = EventCut()
    transport = http.transport
    passed = _Passed(upstream, record, blocks, limit, transport)
    write, began = _frames(http, transport, upstream, reuse), False
    try:
        while piece:
            whole = cut.whole(piece)
            if whole:
                passed.take(whole)
                if reuse is not None:
                    whole = await reuse.events(whole)
            else:
                _check_waiting(cut, upstream)
            if upstream.exhausted and _is_done(passed.end):
                _note_end(record, passed.end)
                await response.write_eof(whole)
                return response, passed.reported
            if whole:
                await response.write(whole)
                began = True
            # Chunks that are piped go to the transport, where the head must be before them.
            if write is not None and began:
                if await upstream.pipe(write, passed.count, cut):
                    break
                chunks = upstream.last_chunks()
                if chunks:
                    _note_end(record, passed.end)
                    await _write_last(response, write, chunks, changed=reuse is not None)
                    return response, passed.reported
            piece = await upstream.readany()
        last = cut.last()
        if last:
            passed.take(last)
            await response.write(await _shown(last, record, reuse))
        if not _is_done(passed.end):
            raise passed.reported or _cut_short(upstream)
    except UpstreamFailure as failure:
        await _end_with_error(response, failure, detailed=detailed())
        return response, failure
    _note_end(record, passed.end)
    await response.write_eof()
    return response, passed.reported


async def _write_last(
    response: ClientStream, write: Callable[[bytes], None], chunks: bytes, *, changed: bool
) -> None:
    """Send the last chunks, which have frames, and the end. ``changed``: by ``write``."""
    if changed or not isinstance(response, PlainStream):
        write(chunks)
        await response.write_eof()
    else:
        await response.write_eof(framed=chunks)


def _frames(
    http: ClientRequest,
    transport: asyncio.Transport | None,
    upstream: EngineStream,
    reuse: PrefillReuse | None,
) -> Callable[[bytes], None] | None:
    """Writes chunks with their frames; None where the client's side has another framing, or the
    number for events with usage is not known."""
    if not upstream.chunked or http.version < HttpVersion11 or transport is None:
        return None
    if reuse is not None and not reuse.known:
        return None
    return transport.write if reuse is None else reuse.piping(transport.write)


class _Passed:
    """What the pieces of a stream show that were passed on. ``end``: the last of them.
    ``reported``: the failure that the engine reported in its stream."""

    def __init__(
        self,
        upstream: EngineStream,
        record: RequestRecord,
        blocks: OutputBlocks | None,
        limit: int,
        transport: asyncio.Transport | None,
    ) -> None:
        self._upstream = upstream
        self._record = record
        self._blocks = blocks
        self._limit = limit
        self._transport = transport
        self.end = b"\n"
        self.reported: UpstreamFailure | None = None

    def take(self, piece: bytes) -> None:
        """Look at whole events."""
        record = self._record
        if ERROR_KEY in piece and self.reported is None:
            self.reported = _reported_error(self._upstream, piece)
        events = piece.count(b"data:")
        record.output_events += events
        record.output_bytes += len(piece)
        if self._blocks is not None:
            self._blocks.add(events)
        end = self.end + piece if len(piece) < _TAIL_BYTES else piece
        self.end = end[-_TAIL_BYTES:]
        if record.output_bytes > self._limit:
            self._upstream.abandon(_too_long(self._upstream, self._limit))

    def count(self, chunks: list[bytes]) -> int:
        """Look at several chunks that were passed on at once: it costs less than at each. Returns
        after how many bytes to look again; 0: the client lags, or left."""
        transport = self._transport
        if chunks:
            self.take(b"".join(chunks))
        if transport is None or transport.is_closing():
            return 0
        if transport.get_write_buffer_size() >= _LAGGING_BYTES:
            return 0
        # Output blocks are reported as they come, and the limit holds to the byte.
        left = self._limit + 1 - self._record.output_bytes
        return 1 if self._blocks is not None else min(_BATCH_BYTES, left)


async def pass_events(
    http: ClientRequest,
    answer: Answer,
    record: RequestRecord,
    headers: Mapping[str, str],
    *,
    api: Api,
    blocks: OutputBlocks | None,
    limit: int,
    detailed: Callable[[], bool],
    reuse: PrefillReuse | None = None,
) -> tuple[ClientStream, UpstreamFailure | None]:
    """As :func:`pass_stream`, for streams of events with names."""
    upstream = answer.response
    response = await _begin(http, answer, record, headers)
    watch, cut = _Events(api, record, blocks), EventCut()
    piece, changes = answer.head, reuse is not None or not record.details
    try:
        while piece:
            record.output_bytes += len(piece)
            if record.output_bytes > limit:
                raise _too_long(upstream, limit)
            whole = cut.whole(piece)
            _check_waiting(cut, upstream)
            if whole:
                await watch.take(whole, upstream)
                await response.write(await _shown(whole, record, reuse) if changes else whole)
            piece = await upstream.readany()
        last = cut.last()
        if last:
            await watch.take(last, upstream)
            await response.write(await _shown(last, record, reuse) if changes else last)
        if watch.error is not None:
            problem = f"{upstream.origin} reported an error in its stream"
            raise UpstreamFailure("status", problem, status=500, shown=True)
        if not watch.ended:
            raise UpstreamFailure(
                "protocol", f"{upstream.origin} ended its stream without its last event"
            )
    except UpstreamFailure as failure:
        if failure.shown:
            await response.write_eof()
            return response, failure
        text = _failed_text(failure, detailed=detailed())
        error: dict[str, Any] = {"type": "api_error", "message": text}
        body: dict[str, Any] = {"type": "error", "error": error}
        if api.endpoint == "responses":
            body = {
                "type": "error",
                "code": "upstream_error",
                "message": text,
                "param": None,
                "sequence_number": watch.count,
            }
        await response.write(b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n")
        await response.write_eof()
        return response, failure
    await response.write_eof()
    return response, None


class _Events:
    """What a stream of named events shows: its output, its usage, and how it ended."""

    def __init__(self, api: Api, record: RequestRecord, blocks: OutputBlocks | None) -> None:
        self._api = api
        self._record = record
        self._blocks = blocks
        #: Events so far.
        self.count = 0
        self.ended = False
        self.error: bytes | None = None

    async def take(self, whole: bytes, upstream: EngineStream) -> None:
        """Take the next bytes of the stream, which are whole events."""
        for number, event in enumerate(events_of(whole), 1):
            if number % EVENTS_A_TURN == 0:
                await upstream.turn()
            self._take(event)

    def _take(self, event: bytes) -> None:
        data = event_data(event)
        if not data:
            return  # a comment
        name = event_name(event)
        self.count += 1
        if name.endswith("delta") and name != "message_delta":
            self._record.output_events += 1
            if self._blocks is not None:
                self._blocks.add(1)
        elif name in self._api.failed:
            self.error = data
        if name in self._api.last:
            self.ended = True
        if (name in self._api.last or name == "message_delta") and b'"usage"' in data:
            self._record.take_usage(data)


async def _pass_annotated(
    response: ClientStream,
    answer: Answer,
    service: RoutingService,
    record: RequestRecord,
    nvext: NvExt,
    blocks: OutputBlocks | None,
    limit: int,
    reuse: PrefillReuse | None,
    *,
    detailed: Callable[[], bool],
) -> UpstreamFailure | None:
    """As above, event by event: the first carries the workers, one before [DONE] the timing."""
    upstream = answer.response
    piece, first, done = answer.head, True, False
    cut, last = EventCut(), b""
    reported: UpstreamFailure | None = None

    async def passed(event: bytes) -> None:
        nonlocal first, done, last, reported
        if first and nvext.wants("worker_id"):
            event = _with_nvext(event, {"worker_id": worker_ids(answer.plan)})
        first = False
        if ERROR_KEY in event and reported is None:
            reported = _reported_error(upstream, event)
        is_end = event_data(event) == DONE_DATA
        done = done or is_end
        if not is_end:
            last = event
        elif nvext.wants("timing"):
            extra = _timing_event(last, answer.plan, service, record)
            await response.write(extra + b"\n\n")
        record.output_events += 1
        record.output_bytes += len(event) + 2
        if record.output_bytes > limit:
            raise _too_long(upstream, limit)
        if blocks is not None:
            blocks.add(1)
        if not record.details:
            event = _changed_event(event, without_reuse)
        elif reuse is not None:
            event = await reuse.event(event)
        await response.write(event + b"\n\n")

    try:
        while piece:
            for number, event in enumerate(cut.feed(piece), 1):
                if number % EVENTS_A_TURN == 0:
                    await upstream.turn()
                await passed(event)
            _check_waiting(cut, upstream)
            piece = await upstream.readany()
        for event in events_of(cut.last()):
            await passed(event)
        if not done:
            raise reported or _cut_short(upstream)
        _note_end(record, last[-_TAIL_BYTES:])
    except UpstreamFailure as failure:
        await _end_with_error(response, failure, detailed=detailed())
        return failure
    await response.write_eof()
    return reported


async def _shown(whole: bytes, record: RequestRecord, reuse: PrefillReuse | None) -> bytes:
    """Whole events, with the numbers of reused tokens that the client may see."""
    if not record.details:
        return _changed_events(whole, without_reuse)
    return whole if reuse is None else await reuse.events(whole)


def _changed_events(whole: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Whole events, each with changed data."""
    return b"".join(_changed_event(event, change) + b"\n\n" for event in events_of(whole))


def _changed_event(event: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """An event of a stream with changed data."""
    head, separator, data = event.partition(b"data:")
    return head + b"data: " + change(data.strip()) if separator else event


def _check_waiting(cut: EventCut, upstream: EngineStream) -> None:
    """Raise UpstreamFailure if an event is too long."""
    if len(cut.waiting) > EVENT_BYTES:
        raise UpstreamFailure("protocol", f"{upstream.origin}: an event is longer than the maximum")


def _note_end(record: RequestRecord, end: bytes) -> None:
    """Take what the whole stream shows: two events of a chat have no token, the role and [DONE]."""
    without = 2 if record.endpoint == "chat_completions" else 1
    record.output_events = max(0, record.output_events - without)
    record.take_usage(end)


def _is_done(end: bytes) -> bool:
    """Whether the end of a stream, with or without the frames of chunks, has the last event."""
    return end.endswith(_ENDS_DONE) or _DONE.search(end) is not None


def _reported_error(upstream: EngineStream, piece: bytes) -> UpstreamFailure | None:
    """The failure of a stream that has an error event, which the client gets as it is; None where
    the piece has no such event. An error of the request is none of the engine."""
    event = ERROR_EVENT.search(piece)
    return None if event is None else reported_error(upstream.origin, event[1], shown=True)


def _cut_short(upstream: EngineStream) -> UpstreamFailure:
    return UpstreamFailure("protocol", f"{upstream.origin} ended its stream without [DONE]")


def _too_long(upstream: EngineStream, limit: int) -> UpstreamFailure:
    return UpstreamFailure("protocol", f"{upstream.origin} sent more than {limit} bytes")


async def _end_with_error(
    response: ClientStream, failure: UpstreamFailure, *, detailed: bool
) -> None:
    """The status line was sent already, so the error is an event."""
    if failure.shown:
        await response.write_eof()
        return
    text = _failed_text(failure, detailed=detailed)
    body = msgspec.json.encode({"error": {"message": text, "type": "upstream_error", "code": 502}})
    await response.write(b"data: " + body + b"\n\n")
    await response.write_eof()


def _failed_text(failure: UpstreamFailure, *, detailed: bool) -> str:
    return "the engine failed during its response" + (f": {failure}" if detailed else "")


def unary_body(
    body: bytes, plan: RoutingPlan, service: RoutingService, record: RequestRecord, nvext: NvExt
) -> bytes:
    """The engine's response, with ``nvext`` if the client requested it."""
    if not record.details:
        body = without_reuse(body)
    if not nvext.extra_fields:
        return body
    extra: dict[str, Any] = {}
    if nvext.wants("worker_id"):
        extra["worker_id"] = worker_ids(plan)
    if nvext.wants("timing"):
        extra["timing"] = timing(plan, service, record)
    if not extra:
        return body
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if not isinstance(plain, dict):
        return body
    return msgspec.json.encode(_with_extra(plain, extra))


def worker_ids(plan: RoutingPlan) -> dict[str, Any]:
    """Worker ids in Dynamo's format: for an aggregated request both ids are the same worker's."""
    final = plan.decode
    prefill = plan.prefill if plan.prefill is not None else final
    ids: dict[str, Any] = {}
    for role, decision in (("prefill", prefill), ("decode", final)):
        ref = decision.ref if decision is not None else None
        if ref is not None:
            ids[f"{role}_worker_id"] = ref.worker_id
            ids[f"{role}_dp_rank"] = ref.dp_rank
    return ids


def timing(plan: RoutingPlan, service: RoutingService, record: RequestRecord) -> dict[str, Any]:
    """Milliseconds, under Dynamo's names; missing times are left out."""
    start, now = record.received_at, service.clock()
    times: dict[str, Any] = {
        "request_received_ms": int(record.received_wall * 1000),
        "total_time_ms": _ms(now - start),
        "kv_hit_rate": hit_rate(plan),
        "router_queue_depth": record.queue_depth,
    }
    if record.dispatched_at is not None:
        times["prefill_wait_time_ms"] = _ms(record.dispatched_at - start)
        ended = record.prefill_done_at or record.first_token_at
        if ended is not None:
            times["prefill_time_ms"] = _ms(ended - record.dispatched_at)
    if record.first_token_at is not None:
        times["ttft_ms"] = _ms(record.first_token_at - start)
    return times


def queue_headers(record: RequestRecord) -> dict[str, str]:
    """What the router queue did with the request; nothing for one that did not wait, unless it
    names fields for the queue that have no effect."""
    if record.unused:
        return {QUEUE_UNUSED_HEADER: record.unused}
    plan = record.plan
    first = None if plan is None else plan.prefill or plan.decode
    queue = None if first is None else first.queue
    if queue is None or (record.queued_s is None and queue.refused is None):
        return {}
    headers = {QUEUE_CLASS_HEADER: queue.policy_class, QUEUE_AHEAD_HEADER: str(queue.ahead)}
    if record.queued_s is not None:
        headers[QUEUE_WAIT_HEADER] = str(round(1000 * record.queued_s))
    return headers


def hit_rate(plan: RoutingPlan) -> float:
    """The fraction of the prompt's blocks that the prefill worker had cached."""
    decision: Decision | None = plan.prefill if plan.prefill is not None else plan.decode
    if decision is None or decision.winner is None or not decision.prompt_blocks:
        return 0.0
    return decision.overlap_blocks(decision.winner) / decision.prompt_blocks


def dry_run_body(
    plan: RoutingPlan, token_ids: Any, parsed: ChatRequest | CompletionRequest
) -> dict[str, Any]:
    """The response of a dry run: an OpenAI object without content, and the routing in ``nvext``."""
    routing = {"worker_id": worker_ids(plan), "token_ids": token_ids}
    if isinstance(parsed, EmbeddingRequest):
        return {"object": "list", "model": parsed.model, "data": [], "nvext": routing}
    if isinstance(parsed, MessagesRequest):
        return {
            "id": f"msg_{plan.id}",
            "type": "message",
            "role": "assistant",
            "model": parsed.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
            "nvext": routing,
        }
    if isinstance(parsed, ResponsesRequest):
        return {
            "id": f"resp_{plan.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": parsed.model,
            "status": "completed",
            "output": [],
            "nvext": routing,
        }
    chat, stream = isinstance(parsed, ChatRequest), parsed.stream
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if not chat:
        choice["text"] = ""
    elif stream:
        choice["delta"] = {"role": "assistant", "content": None}
    else:
        choice["message"] = {"role": "assistant", "content": None}
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{plan.id}",
        "object": kind + (".chunk" if chat and stream else ""),
        "created": int(time.time()),
        "model": parsed.model,
        "choices": [choice],
        "nvext": routing,
    }


def _timing_event(
    last: bytes, plan: RoutingPlan, service: RoutingService, record: RequestRecord
) -> bytes:
    """An event with the times and without choices; ``last``: the event of the stream before it,
    which has the stream's id and kind."""
    body = {
        "id": plan.id,
        "object": "chat.completion.chunk",
        "created": int(record.received_wall),
        "model": plan.model,
    }
    known = _read_object(last.removeprefix(b"data:")) or {}
    body |= {name: known[name] for name in body if name in known}
    body |= {"choices": [], "nvext": {"timing": timing(plan, service, record)}}
    return b"data: " + msgspec.json.encode(body)


def _with_nvext(event: bytes, extra: Mapping[str, Any]) -> bytes:
    head, separator, text = event.partition(b"data:")
    if not separator or head:
        return event
    plain = _read_object(text)
    if plain is None:
        return event
    return b"data: " + msgspec.json.encode(_with_extra(plain, extra))


def _with_extra(plain: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's object with ``extra`` in ``nvext``, in place of one that is not an object."""
    own = plain.get("nvext")
    return {**plain, "nvext": {**(own if isinstance(own, dict) else {}), **extra}}


def _read_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object, or None."""
    try:
        plain = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return plain if isinstance(plain, dict) else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def client_error(error: RequestError) -> HttpError:
    return HttpError(
        error.status, str(error), "invalid_request_error", error.code, param=error.field
    )


def outcome_of(error: HttpError) -> str:
    return "client_error" if error.status < 500 else "refused"


def engine_failure_error(error: GaveUp, record: RequestRecord) -> HttpError:
    """The engine's failure as an error response, with the engine's own reason if it has one."""
    failure = error.failure
    record.error = str(failure)
    record.outcome = "client_error" if 400 <= failure.status < 500 else "upstream_error"
    status = failure.status or (504 if failure.kind == "timeout" else 502)
    message, public = str(failure), _ENGINE_FAILED
    reason = engine_reason(failure.body)
    if reason is not None:
        message = reason.message
    elif failure.kind == "status" and record.attempts:
        message = f"{record.attempts[-1][0]} returned status {status} without a reason"
    if status < 500:
        # What an engine says about the request is for the client; the rest may name the engine.
        public = f"the engine returned status {status} without a reason" if reason is None else ""
    return HttpError(
        status,
        message,
        (reason and reason.type) or "upstream_error",
        status if reason is None or reason.code is None else reason.code,
        param=None if reason is None else reason.param,
        details=ErrorDetails(decision=error.plan.id, attempts=attempts_of(record.attempts)),
        headers=_retry_headers(failure),
        public=public,
    )


def _retry_headers(failure: UpstreamFailure) -> dict[str, str]:
    """``retry-after``: as the engine reports it, else a second where the engine went."""
    wait = failure.retry_after or ("1" if failure.kind in _WENT else None)
    return {} if wait is None else {"retry-after": wait}
