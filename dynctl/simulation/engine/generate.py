"""One generation over HTTP: admit, stream or collect, and hand the KV blocks on."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from dynctl.simulation.engine.engine import Engine, EngineRestarted, Rank
from dynctl.simulation.engine.handoff import HeldKv
from dynctl.simulation.engine.openai_request import (
    ApiError,
    Generate,
    decode_body,
    off_loop_if_long,
    parse_generate,
)
from dynctl.simulation.engine.scheduler import EngineRequest, KvLost, RankBusy

_MAX_REQUEST_ID = 128
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class EngineWentAway(Exception):
    """The engine shows a failure: the connection must be cut without an answer."""


async def generate(engine: Engine, http: web.Request, *, chat: bool) -> web.StreamResponse:
    """Serve one chat or text completion."""
    raw = await http.read()
    asked = await off_loop_if_long(raw, partial(_parse, engine, http.headers, chat))
    prefix = "chatcmpl" if chat else "cmpl"
    given_id = http.headers.get("X-Request-Id", "")[:_MAX_REQUEST_ID]
    if not given_id.isascii() or not given_id.isprintable():
        given_id = ""
    answer_id = f"{prefix}-{given_id or secrets.token_hex(16)}"
    rank = engine.choose_rank(asked.dp_rank)
    if asked.room is not None and not engine.held.reserve(asked.room):
        raise ApiError(409, f"bootstrap_room {asked.room} is in use", param="bootstrap_room")
    try:
        request = engine.admit(rank, asked, answer_id)
    except RankBusy as error:
        if asked.room is not None:
            engine.held.fail(asked.room)
        raise ApiError(503, str(error)) from None
    run = _Run(engine, rank, asked, request)
    try:
        if asked.stream:
            return await _stream(run, http)
        return await _collect(run)
    finally:
        run.finish()


def _parse(engine: Engine, headers: Mapping[str, str], chat: bool, raw: bytes) -> Generate:
    return parse_generate(decode_body(raw), headers, engine.config, engine.tokenizer, chat=chat)


@dataclass
class _Run:
    engine: Engine
    rank: Rank
    asked: Generate
    request: EngineRequest
    created: int = field(default_factory=lambda: int(time.time()))
    shown: int = 0
    finish_reason: str = "stop"
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._stops = StopScanner(self.asked.stop)
        self._handed_over = False

    async def pieces(self) -> AsyncIterator[list[str]]:
        """The text of the tokens, several at a time when they came faster than we looked.

        Sets `finish_reason` at the end. Raises ApiError or EngineWentAway.
        """
        request = self.request
        while True:
            await request.news()
            if request.error is not None:
                raise self._failure(request.error)
            limit = self.engine.faults.current.die_mid_stream_after
            texts = []
            while self.shown < request.produced and not self._stops.stopped:
                piece = self._stops.feed(request.plan.text(self.shown))
                self.shown += 1
                if piece:
                    texts.append(piece)
                if limit and self.shown >= limit:
                    if texts:
                        yield texts
                    await asyncio.sleep(0)  # what was written leaves before the cut
                    raise EngineWentAway
            ended = request.ended or self._stops.stopped
            if ended and not self._stops.stopped and (rest := self._stops.rest()):
                texts.append(rest)
            if texts:
                yield texts
            if ended:
                self.finish_reason = "stop" if self._stops.stopped else request.finish or "stop"
                await self._hand_over()
                return

    def usage(self) -> dict[str, Any]:
        request = self.request
        return usage_of(request.prompt_tokens, self.shown, request.cached_tokens or 0)

    def finish(self) -> None:
        """Stop the request if the client left, or free what nobody will pull."""
        self.rank.scheduler.end(self.request)
        if not self._handed_over:
            if self.request.table is not None:
                self.rank.scheduler.release(self.request.table)
                self.request.table = None
            if self.asked.room is not None:
                self.engine.held.fail(self.asked.room)

    async def _hand_over(self) -> None:
        request, asked, engine = self.request, self.asked, self.engine
        if not request.keep_kv or request.table is None:
            return
        self.rank.scheduler.detach(request)
        room = asked.room
        # A client may repeat its request id, so the hand-off's has a suffix (as vLLM's does).
        key = room if room is not None else f"{request.id}-{secrets.token_hex(4)}"
        held = engine.held.hold(key, request.table, self.rank.dp_rank, self.rank.scheduler.release)
        self._handed_over = True
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
    except asyncio.CancelledError:  # the client gave the request up, so nobody is to pull it
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


async def _collect(run: _Run) -> web.Response:
    parts: list[str] = []
    async for texts in run.pieces():
        parts += texts
    body = unary(
        run.asked,
        run.request.id,
        run.created,
        "".join(parts),
        run.finish_reason,
        run.usage(),
        run.kv_transfer_params,
    )
    return web.Response(body=body, content_type="application/json")


async def _stream(run: _Run, http: web.Request) -> web.StreamResponse:
    """The status line waits for the first token: until then a failure is a plain error."""
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    chunks = ChunkWriter(run.asked, run.request.id, run.created)
    try:
        async for texts in run.pieces():
            events = b"".join(map(chunks.text, texts))
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
    if not response.prepared:  # a stop string right at the start: no text at all
        await response.prepare(http)
        await response.write(chunks.first())
    tail = chunks.last(run.finish_reason, run.kv_transfer_params)
    if run.asked.include_usage:
        tail += chunks.usage(run.usage())
    await response.write(tail + DONE)
    await response.write_eof()
    return response


# -- bytes of answers ------------------------------------------------------------------------------


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`cached_tokens` were found in this engine's own cache; pulled ones do not count."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def unary(
    asked: Generate,
    answer_id: str,
    created: int,
    text: str,
    finish_reason: str,
    usage: dict[str, Any],
    kv_transfer_params: dict[str, Any] | None,
) -> bytes:
    """The whole answer of a request without `stream`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if asked.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    body = {
        "id": answer_id,
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": created,
        "model": asked.model,
        "choices": [choice],
        "usage": usage,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return _encode(body)


class ChunkWriter:
    """Server-sent events of one answer. The constant parts are encoded once."""

    def __init__(self, asked: Generate, answer_id: str, created: int) -> None:
        self._chat = asked.chat
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk" if asked.chat else "text_completion",
            "created": created,
            "model": asked.model,
        }
        head = b"data: " + _encode(self._base)[:-1] + b',"choices":[{"index":0,'
        if asked.chat:
            self._before = head + b'"delta":{"content":'
            self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            self._before = head + b'"text":'
            self._after = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def first(self) -> bytes:
        """The chunk that announces the assistant's role; nothing for a plain completion."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._event({"choices": [self._choice(delta, None)]})

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def last(self, finish_reason: str, kv_transfer_params: dict[str, Any] | None) -> bytes:
        extra = {"choices": [self._choice({} if self._chat else "", finish_reason)]}
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
    """An error after the stream began: the status line is gone, so it is an event."""
    return b"data: " + body + b"\n\n"


class StopScanner:
    """Finds stop strings in text that arrives in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        # The start of a stop string may be at the end of what is there: that much is held back.
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that may be shown now; sets `stopped` once a stop string is complete."""
        if not self._stops:
            return piece
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        cut = max(0, len(self._held) - self._keep)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        rest, self._held = self._held, ""
        return rest
