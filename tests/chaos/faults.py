"""The faults: what breaks in front of or inside one engine of three, and what clients may see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from tests.chaos.proxies import PASS, AnswerProxy, TcpProxy, Wire

_EVENT: Final = b'data: {"id":"x","object":"chat.completion.chunk","choices":[]}\n\n'
_ERROR: Final = b'data: {"error":{"message":"x"}}\n\n'
_DONE: Final = b"data: [DONE]\n\n"


@dataclass
class Broken:
    """One engine behind its proxies: the HTTP port, KV events and replay."""

    http: TcpProxy
    events: TcpProxy
    replay: TcpProxy
    answers: AnswerProxy
    set_faults: Callable[[Mapping[str, Any]], None]
    restart: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Fault:
    """``begin`` breaks an engine. ``retried``: no client sees it, another engine answers.

    ``shows``: the conditions of which one must be in force while it lasts; empty: none is needed.
    """

    name: str
    begin: Callable[[Broken], Coroutine[Any, Any, None]]
    retried: bool = True
    shows: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


async def heal(broken: Broken) -> None:
    """End every fault."""
    broken.answers.clear()
    broken.set_faults(
        {
            "slow_factor": 1.0,
            "refuse": 0,
            "die_mid_stream_after": 0,
            "stop_publishing": False,
            "drop_events": 0,
        }
    )
    for proxy in (broken.http, broken.events, broken.replay):
        await proxy.set(PASS)


def _http(**wire: Any) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    async def begin(broken: Broken) -> None:
        await broken.http.set(Wire(**wire))

    return begin


def _events(**wire: Any) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    async def begin(broken: Broken) -> None:
        await broken.events.set(Wire(**wire))

    return begin


def _both_event_ports(**wire: Any) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    async def begin(broken: Broken) -> None:
        await broken.events.set(Wire(**wire))
        await broken.replay.set(Wire(**wire))

    return begin


def _engine(**faults: Any) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    async def begin(broken: Broken) -> None:
        broken.set_faults(faults)

    return begin


def _answer(
    status: int = 200,
    body: bytes = b"",
    content_type: str = "text/event-stream",
    headers: Mapping[str, str] | None = None,
    path: str = "/v1/",
) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    """The proxy answers in place of the engine."""

    async def instead(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(
            status=status, body=body, content_type=content_type, headers=headers or {}
        )

    async def begin(broken: Broken) -> None:
        broken.answers.path = path
        broken.answers.instead = instead

    return begin


def _streamed(
    *pieces: bytes, pause_s: float = 0.0, hang: bool = False, path: str = "/v1/"
) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    """The proxy streams ``pieces`` in place of the engine, then ends or hangs."""

    async def instead(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause_s)
        if hang:
            await asyncio.sleep(3600)
        return response

    async def begin(broken: Broken) -> None:
        broken.answers.path = path
        broken.answers.instead = instead

    return begin


def _hang(path: str = "/v1/") -> Callable[[Broken], Coroutine[Any, Any, None]]:
    """No byte of an answer, while other paths work."""

    async def instead(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    async def begin(broken: Broken) -> None:
        broken.answers.path = path
        broken.answers.instead = instead

    return begin


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Broken], Coroutine[Any, Any, None]]:
    async def begin(broken: Broken) -> None:
        broken.answers.change = change

    return begin


async def _restart(broken: Broken) -> None:
    await broken.restart()


#: A fault that is over before the first byte is retried; one in the middle of an answer is not.
FAULTS: Final = (
    # connections
    Fault("connection refused", _http(refuse=True), shows=("WORKER_UNREACHABLE",)),
    Fault("connection reset at once", _http(end="reset"), shows=("WORKER_UNREACHABLE",)),
    Fault("connection closed at once", _http(end="close"), shows=("WORKER_UNREACHABLE",)),
    Fault("connection stalls", _http(stall=True), shows=("WORKER_UNREACHABLE",)),
    Fault("reset inside the answer's header", _http(end="reset", after=40)),
    Fault("closed inside the answer's header", _http(end="close", after=40)),
    Fault("reset in the middle of a stream", _http(end="reset", after=1500), retried=False),
    Fault("closed in the middle of a stream", _http(end="close", after=1500), retried=False),
    Fault("stalls in the middle of a stream", _http(stall=True, after=1500), retried=False),
    Fault("bytes are corrupted", _http(corrupt=True), retried=False),
    Fault("bytes are corrupted in the middle", _http(corrupt=True, after=900), retried=False),
    Fault("one byte in each packet", _http(piece=1)),
    Fault("20 ms before each packet", _http(delay_s=0.02)),
    # statuses
    Fault("status 500", _answer(500, b"{}", "application/json")),
    Fault("status 503", _engine(refuse=503)),
    Fault("status 429", _engine(refuse=429), retried=False),
    Fault("status 404", _answer(404, b"{}", "application/json"), retried=False),
    Fault("status 302", _answer(302, headers={"location": "http://192.0.2.1/"})),
    Fault("status 204", _answer(204)),
    # answers
    Fault("an HTML page", _answer(200, b"<html>sign in</html>", "text/html")),
    Fault("an empty stream", _answer(200, b"")),
    Fault("JSON where events belong", _answer(200, b'{"ok":true}', "application/json")),
    Fault("garbage where events belong", _answer(200, b"\x00\xff\xfe" * 3000)),
    Fault("events that are not JSON", _answer(200, b"data: {not json\n\n" * 3)),
    Fault("a stream without [DONE]", _streamed(_EVENT, _EVENT), retried=False),
    Fault("a stream that hangs", _streamed(_EVENT, hang=True), retried=False),
    Fault("an event of 80 MB", _streamed(b"data: " + b"x" * (80 << 20)), retried=False),
    Fault(
        "an endless stream of comments", _streamed(*[b": ping\n\n"] * 500, pause_s=0.01, hang=True)
    ),
    Fault("events after [DONE]", _streamed(_EVENT, _DONE, _EVENT, _DONE), retried=False),
    Fault(
        "an error event", _streamed(b'data: {"error":{"message":"x"}}\n\n', _DONE), retried=False
    ),
    Fault("[DONE] is removed", _changed(lambda data: data.replace(b"[DONE]", b"")), retried=False),
    Fault("no answer to requests", _hang("/v1/")),
    # the engine itself
    Fault("dies after 3 tokens", _engine(die_mid_stream_after=3), retried=False),
    Fault("50 times slower", _engine(slow_factor=50.0)),
    Fault("restarts with an empty cache", _restart, retried=False),
    # health and metrics
    Fault("/health is 500", _answer(500, path="/health"), shows=("WORKER_UNREACHABLE",)),
    Fault("/health hangs", _hang("/health"), shows=("WORKER_UNREACHABLE",)),
    Fault("/metrics is garbage", _answer(200, b"\xff{{{" * 9, "text/plain", path="/metrics")),
    Fault("/metrics is huge", _answer(200, b"x 1\n" * (4 << 20), "text/plain", path="/metrics")),
    Fault(
        "/metrics has impossible numbers",
        _answer(
            200,
            b'vllm:num_requests_waiting{engine="0"} 1e308\nvllm:kv_cache_usage_perc -7\n',
            "text/plain",
            path="/metrics",
        ),
    ),
    Fault("/metrics hangs", _hang("/metrics")),
    # KV events
    Fault("events are not sent", _engine(stop_publishing=True)),
    Fault("events are lost", _engine(drop_events=5)),
    Fault("the event port is closed", _events(refuse=True), shows=("STREAM_DISCONNECTED",)),
    Fault("the event stream resets", _events(end="reset"), shows=("STREAM_DISCONNECTED",)),
    Fault("the event stream stalls", _events(stall=True)),
    Fault("the event stream is corrupted", _events(corrupt=True)),
    Fault("events and replay are closed", _both_event_ports(refuse=True)),
)
