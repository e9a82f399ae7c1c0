"""An engine that costs next to nothing: answers made beforehand, written piece by piece.

It exists so that a frontend, and not the engine behind it, is what a benchmark measures. One
asyncio protocol on uvloop; reads no JSON, keeps connections alive, and knows just as much HTTP/1.1
as the frontends under test speak with it.
"""

import asyncio
import json
from typing import cast

CHUNKS = 32
MODEL = "bench"

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _pieces() -> list[bytes]:
    """One write each: the head with the first event, then an event a time, [DONE] with the last."""
    pieces = []
    for number in range(CHUNKS):
        choice = {"index": 0, "delta": {"content": f" word{number:02d}"}, "finish_reason": None}
        event = {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": MODEL,
            "choices": [choice],
        }
        pieces.append(_framed(b"data: " + json.dumps(event).encode() + b"\n\n"))
    pieces[0] = _HEAD + pieces[0]
    pieces[-1] += _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return pieces


PIECES = _pieces()

#: What frontends ask an engine before they use it.
_FACTS: dict[bytes, object] = {
    b"/health": {},
    b"/health_generate": {},
    b"/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}],
    },
    b"/get_model_info": {"model_path": MODEL, "is_generation": True},
    b"/model_info": {"model_path": MODEL, "is_generation": True},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1},
}


class Pacer:
    """Writes the next piece of every running answer, once a turn.

    ``pace_s`` 0: a turn is one of the event loop, so each piece is a write of its own and nothing
    waits. Above 0: a turn is that many seconds, as an engine's decode steps are.
    """

    def __init__(self, pace_s: float = 0.0) -> None:
        self.pace_s = pace_s
        self._running: dict[asyncio.Transport, int] = {}
        self._ticking = False

    def start(self, transport: asyncio.Transport) -> None:
        self._running[transport] = 0
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)

    def drop(self, transport: asyncio.Transport) -> None:
        self._running.pop(transport, None)

    def _tick(self) -> None:
        running = self._running
        for transport, at in list(running.items()):
            transport.write(PIECES[at])
            if at + 1 < CHUNKS:
                running[transport] = at + 1
            else:
                del running[transport]
        loop = asyncio.get_running_loop()
        if not running:
            self._ticking = False
        elif self.pace_s:
            loop.call_later(self.pace_s, self._tick)
        else:
            loop.call_soon(self._tick)


class Engine(asyncio.Protocol):
    """One connection of a frontend; a request at a time."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._pending = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._pacer.drop(self._transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        pending = self._pending + data if self._pending else data
        end = pending.find(b"\r\n\r\n")
        if end < 0:
            self._pending = pending
            return
        if pending.startswith(b"POST"):
            if not _body_complete(pending, end):
                self._pending = pending
                return
            self._pending = b""
            if pending.startswith((b"POST /v1/chat", b"POST /v1/comp")):
                self._pacer.start(self._transport)
                return
        self._pending = b""
        self._transport.write(_fact(pending.split(b" ", 2)[1]))


def _body_complete(pending: bytes, end: int) -> bool:
    head = pending[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return pending.endswith(b"0\r\n\r\n")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0])
    return len(pending) >= end + 4 + length


def _fact(path: bytes) -> bytes:
    found = _FACTS.get(path.split(b"?", 1)[0])
    status = b"200 OK" if found is not None else b"404 Not Found"
    body = json.dumps(found if found is not None else {"detail": "Not Found"}).encode()
    return (b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b") % (
        status,
        len(body),
        body,
    )


async def serve(pacer: Pacer, count: int) -> list[asyncio.Server]:
    """``count`` engines on free ports of the loopback."""
    loop = asyncio.get_running_loop()
    return [await loop.create_server(lambda: Engine(pacer), "127.0.0.1", 0) for _ in range(count)]


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
