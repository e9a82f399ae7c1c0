"""Serve one request over HTTP: admit, stream or collect, and offer the KV blocks."""

import asyncio
import math
import secrets
import struct
import time
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from xxhash import xxh3_64_intdigest

from dynctl.simulation.engine.engine import Engine, EngineRestarted, SimulatedRank
from dynctl.simulation.engine.handoff import HeldKv
from dynctl.simulation.engine.model import RankBusy
from dynctl.simulation.engine.named_events import MessagesWriter, ResponsesWriter
from dynctl.simulation.engine.openai_request import (
    Api,
    ApiError,
    Embed,
    Generate,
    decode_body,
    off_loop_if_long,
    parse_embed,
    parse_generate,
)
from dynctl.simulation.engine.scheduler import KvLost, ScheduledRequest

_MAX_REQUEST_ID = 128
#: Numbers of embeddings that are computed without a thread.
_INLINE_NUMBERS = 4096
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class EngineWentAway(Exception):
    """A simulated crash: the connection must close without an answer."""


_PREFIX: dict[Api, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "messages": "msg_",
    "responses": "resp_",
}


async def generate(engine: Engine, http: web.Request, *, api: Api) -> web.StreamResponse:
    """Serve one generation."""
    raw = await http.read()
    parsed = await off_loop_if_long(raw, partial(_parse, engine, http.headers, api))
    answer_id = f"{_PREFIX[api]}{_given_id(http) or secrets.token_hex(16)}"
    rank = engine.choose_rank(parsed.dp_rank)
    if parsed.room is not None and not engine.held.reserve(parsed.room):
        raise ApiError(409, f"bootstrap_room {parsed.room} is in use", param="bootstrap_room")
    try:
        request = engine.admit(rank, parsed, answer_id)
    except RankBusy as error:
        if parsed.room is not None:
            engine.held.fail(parsed.room)
        raise ApiError(503, str(error)) from None
    run = _GenerationRun(engine, rank, parsed, request)
    try:
        writer = _writer(run)
        if writer is not None:
            return await _named_events(run, writer, http)
        if parsed.stream:
            return await _stream(run, http)
        return await _collect(run)
    finally:
        run.finish()


def _given_id(http: web.Request) -> str:
    given_id = http.headers.get("X-Request-Id", "")[:_MAX_REQUEST_ID]
    return given_id if given_id.isascii() and given_id.isprintable() else ""


async def embed(engine: Engine, http: web.Request) -> web.Response:
    """Serve one request for embeddings: its prompts run as generations of one token."""
    raw = await http.read()
    parsed = await off_loop_if_long(raw, partial(_parse_embed, engine, http.headers))
    rank = engine.choose_rank(parsed.dp_rank)
    answer_id = f"embd-{secrets.token_hex(16)}"
    runs: list[_GenerationRun] = []
    try:
        for i, generation in enumerate(parsed.runs):
            try:
                request = engine.admit(rank, generation, f"{answer_id}-{i}")
            except RankBusy as error:
                raise ApiError(503, str(error)) from None
            runs.append(_GenerationRun(engine, rank, generation, request))
        for run in runs:
            async for _ in run.pieces():
                pass
    finally:
        for run in runs:
            run.finish()
    tokens = sum(run.request.prompt_tokens for run in runs)
    cached = sum(run.request.cached_tokens or 0 for run in runs)
    body = {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": parsed.model,
        "data": await _embedding_objects(parsed),
        "usage": usage_of(tokens, 0, cached),
    }
    return web.Response(body=_encode(body), content_type="application/json")


async def _embedding_objects(parsed: Embed) -> list[dict[str, Any]]:
    prompts = [run.prompt for run in parsed.runs]
    if len(prompts) * parsed.dimensions > _INLINE_NUMBERS:
        vectors = await asyncio.to_thread(_embeddings, prompts, parsed.dimensions)
    else:
        vectors = _embeddings(prompts, parsed.dimensions)
    return [
        {
            "object": "embedding",
            "index": i,
            "embedding": _pack_floats(vector) if parsed.base64 else vector,
        }
        for i, vector in enumerate(vectors)
    ]


def embedding(prompt: Sequence[int], dimensions: int) -> list[float]:
    """A vector of length 1 that depends on the prompt's tokens alone."""
    data = array("q", prompt).tobytes()
    raw = [xxh3_64_intdigest(data, i) / 2**63 - 1.0 for i in range(dimensions)]
    length = math.hypot(*raw) or 1.0
    return [value / length for value in raw]


def _embeddings(prompts: Sequence[Sequence[int]], dimensions: int) -> list[list[float]]:
    return [embedding(prompt, dimensions) for prompt in prompts]


def _pack_floats(vector: Sequence[float]) -> str:
    """Little-endian float32 in base64, as OpenAI sends it."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _parse_embed(engine: Engine, headers: Mapping[str, str], raw: bytes) -> Embed:
    return parse_embed(decode_body(raw), headers, engine.config, engine.tokenizer)


def _parse(engine: Engine, headers: Mapping[str, str], api: Api, raw: bytes) -> Generate:
    return parse_generate(decode_body(raw), headers, engine.config, engine.tokenizer, api=api)


@dataclass
class _GenerationRun:
    engine: Engine
    rank: SimulatedRank
    parsed: Generate
    request: ScheduledRequest
    created: int = field(default_factory=lambda: int(time.time()))
    shown: int = 0
    sent_ids: int = 0
    finish_reason: str = "stop"
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._stops = StopScanner(self.parsed.stop)
        self._offered = False

    async def pieces(self) -> AsyncIterator[list[str]]:
        """The text of the new tokens, one or several at a time.

        Sets `finish_reason` at the end. Raises ApiError or EngineWentAway.
        """
        request = self.request
        while True:
            await request.news()
            if request.error is not None:
                raise self._failure(request.error)
            texts, dies = self._new_texts()
            if texts:
                yield texts
            if dies:
                await asyncio.sleep(0)  # the written bytes leave before the connection closes
                raise EngineWentAway
            if self._stops.stopped or request.ended:
                self.finish_reason = "stop" if self._stops.stopped else request.finish or "stop"
                await self._offer_kv()
                return

    def _new_texts(self) -> tuple[list[str], bool]:
        """The texts of the new tokens, and whether the engine is to fail after them."""
        request, limit = self.request, self.engine.faults.current.die_mid_stream_after
        texts = []
        while self.shown < request.produced and not self._stops.stopped:
            texts.append(self._stops.feed(request.plan.text(self.shown)))
            self.shown += 1
            if limit and self.shown >= limit:
                return list(filter(None, texts)), True
        if request.ended and not self._stops.stopped:
            texts.append(self._stops.rest())
        return list(filter(None, texts)), False

    def new_ids(self) -> list[int] | None:
        """The ids of the tokens since the last call, for clients that set ``return_token_ids``."""
        if not self.parsed.return_token_ids:
            return None
        ids = [self.request.plan.token(i) for i in range(self.sent_ids, self.shown)]
        self.sent_ids = self.shown
        return ids

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    def usage(self) -> dict[str, Any]:
        request = self.request
        return usage_of(request.prompt_tokens, self.shown, request.cached_tokens or 0)

    def finish(self) -> None:
        """Stop the request if the client left, or free blocks that are not to be pulled."""
        self.rank.scheduler.end(self.request)
        if not self._offered:
            if self.request.table is not None:
                self.rank.scheduler.release(self.request.table)
                self.request.table = None
            if self.parsed.room is not None:
                self.engine.held.fail(self.parsed.room)

    async def _offer_kv(self) -> None:
        request, parsed, engine = self.request, self.parsed, self.engine
        if not request.keep_kv or request.table is None:
            return
        self.rank.scheduler.detach(request)
        room = parsed.room
        # A client may repeat its request id, so the id of the hand-off has a suffix, as in vLLM.
        key = room if room is not None else f"{request.id}-{secrets.token_hex(4)}"
        held = engine.held.hold(key, request.table, self.rank.dp_rank, self.rank.scheduler.release)
        self._offered = True
        if room is not None:
            await _until_pulled(held, engine, room)
            return
        self.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine.engine_id,
            "remote_request_id": key,
            "remote_block_ids": list(request.table.blocks),
            "remote_host": engine.reachable_host,
            "remote_port": engine.port,
            "tp_size": 1,
            "remote_dp_rank": self.rank.dp_rank,
        }

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, EngineRestarted):
            return EngineWentAway()
        if isinstance(error, KvLost):
            return ApiError(500, str(error), param="kv_transfer_params", type="KvLostError")
        return error


async def _until_pulled(held: HeldKv, engine: Engine, room: int) -> None:
    try:
        await held.gone.wait()
    except asyncio.CancelledError:  # the client left, so the blocks are not pulled
        engine.held.release(held, pulled=False)
        raise
    if not held.pulled:
        raise ApiError(
            500,
            f"no decode engine pulled bootstrap_room {room} within "
            f"{engine.config.kv_hold_timeout_s:g} s",
            param="bootstrap_room",
            type="KvLostError",
        )


def _writer(run: _GenerationRun) -> MessagesWriter | ResponsesWriter | None:
    """What writes the answer of an API whose events have names; None for the others."""
    parsed = run.parsed
    if parsed.api == "messages":
        return MessagesWriter(parsed.model, run.request.id)
    if parsed.api == "responses":
        return ResponsesWriter(parsed.model, run.request.id, run.created, parsed.request_body)
    return None


async def _named_events(
    run: _GenerationRun, writer: MessagesWriter | ResponsesWriter, http: web.Request
) -> web.StreamResponse:
    """As :func:`_stream` and :func:`_collect`, for the APIs whose events have names."""
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    parts: list[str] = []
    try:
        async for texts in run.pieces():
            parts += texts
            if not run.parsed.stream:
                continue
            events = b"".join(map(writer.text, texts))
            if not response.prepared:
                await response.prepare(http)
                events = writer.first(run.usage()) + events
            await response.write(events)
    except ApiError as error:
        if not response.prepared:
            raise
        await response.write(writer.error(str(error)))
        await response.write_eof()
        return response
    ending = ("".join(parts), run.finish_reason, run.stopped_by, run.usage())
    if not run.parsed.stream:
        body = writer.whole(*ending)
        if run.kv_transfer_params is not None:
            body["kv_transfer_params"] = run.kv_transfer_params
        return web.Response(body=_encode(body), content_type="application/json")
    if not response.prepared:  # a stop string at the start: no text
        await response.prepare(http)
        await response.write(writer.first(run.usage()))
    await response.write(writer.last(*ending))
    await response.write_eof()
    return response


async def _collect(run: _GenerationRun) -> web.Response:
    parts: list[str] = []
    async for texts in run.pieces():
        parts += texts
    body = unary(
        run.parsed,
        run.request.id,
        run.created,
        "".join(parts),
        run.finish_reason,
        run.usage(),
        run.kv_transfer_params,
        run.new_ids(),
    )
    return web.Response(body=body, content_type="application/json")


async def _stream(run: _GenerationRun, http: web.Request) -> web.StreamResponse:
    """Stream the answer; the status line waits for the first token, so errors have a status."""
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    chunks = AnswerWriter(run.parsed, run.request.id, run.created)
    try:
        async for texts in run.pieces():
            ids = run.new_ids()
            if ids is None:
                events = b"".join(map(chunks.text, texts))
            else:
                events = chunks.tokens("".join(texts), ids)
            if not response.prepared:
                await response.prepare(http)
                events = chunks.first() + events
            await response.write(events)
    except ApiError as error:
        if not response.prepared:
            raise
        await response.write(error_event(error.body()))
        await response.write_eof()
        return response
    if not response.prepared:  # a stop string at the start: no text
        await response.prepare(http)
        await response.write(chunks.first())
    tail = chunks.last(run.finish_reason, run.kv_transfer_params, run.new_ids())
    if run.parsed.include_usage:
        tail += chunks.usage(run.usage())
    await response.write(tail + DONE)
    await response.write_eof()
    return response


# -- bytes of answers ------------------------------------------------------------------------------


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object. `cached_tokens`: found in this engine's cache, without pulled ones."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def unary(
    parsed: Generate,
    answer_id: str,
    created: int,
    text: str,
    finish_reason: str,
    usage: dict[str, Any],
    kv_transfer_params: dict[str, Any] | None,
    token_ids: list[int] | None = None,
) -> bytes:
    """The whole answer of a request without `stream`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    if parsed.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    body = {
        "id": answer_id,
        "object": "chat.completion" if parsed.chat else "text_completion",
        "created": created,
        "model": parsed.model,
        "choices": [choice],
        "usage": usage,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return _encode(body)


class AnswerWriter:
    """Server-sent events of one answer. The constant parts are encoded once."""

    def __init__(self, parsed: Generate, answer_id: str, created: int) -> None:
        self._chat = parsed.chat
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk" if parsed.chat else "text_completion",
            "created": created,
            "model": parsed.model,
        }
        head = b"data: " + _encode(self._base)[:-1] + b',"choices":[{"index":0,'
        if parsed.chat:
            self._before = head + b'"delta":{"content":'
            self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            self._before = head + b'"text":'
            self._after = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def first(self) -> bytes:
        """The chunk with the assistant's role; empty for a plain completion."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event({"choices": [self._choice(delta, None)]})

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def tokens(self, text: str, ids: list[int]) -> bytes:
        """Text with the ids of its tokens."""
        choice = self._choice({"content": text} if self._chat else text, None)
        return self._event({"choices": [choice | {"token_ids": ids}]})

    def last(
        self,
        finish_reason: str,
        kv_transfer_params: dict[str, Any] | None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        choice = self._choice({} if self._chat else "", finish_reason)
        if token_ids is not None:
            choice["token_ids"] = token_ids
        extra = {"choices": [choice]}
        if kv_transfer_params is not None:
            extra["kv_transfer_params"] = kv_transfer_params  # type: ignore[assignment]
        return self._event(extra)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._event({"choices": [], "usage": usage})

    def _choice(self, content: dict[str, str] | str, finish_reason: str | None) -> dict[str, Any]:
        key = "delta" if self._chat else "text"
        return {"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, extra: dict[str, Any]) -> bytes:
        return b"data: " + _encode({**self._base, **extra}) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error as an event, for a stream that has begun."""
    return b"data: " + body + b"\n\n"


class StopScanner:
    """Finds stop strings in text that arrives in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        # The text may end with the start of a stop string: that many characters are held back.
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self.stopped = False
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that can be sent now; sets `stopped` once a stop string is complete."""
        if not self._stops:
            return piece
        self._held += piece
        stops = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if stops:
            self.stopped = True
            at, self.found = min(stops)
            shown, self._held = self._held[:at], ""
            return shown
        cut = max(0, len(self._held) - self._keep)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """The text held back, for an answer that ends without a stop string."""
        rest, self._held = self._held, ""
        return rest
