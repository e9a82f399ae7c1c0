"""The connections of inference clients: every request is answered as aiohttp answers it, or better.

Both servers have the same handler here, which shows what it read of a request.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import pytest
from aiohttp import web

from dynctl.serving.http import plain_requests
from dynctl.serving.http.bodies import BODIES, Bodies, bodies_of
from dynctl.serving.http.connections import Connections
from dynctl.serving.http.errors import error_middleware, on_aiohttp
from dynctl.serving.http.plain_requests import (
    ClientAnswer,
    ClientRequest,
    HeadReader,
    PlainRequest,
    read_head,
)
from dynctl.serving.routing.config import Limits
from tests.dynctl.serving.fleets import until
from tests.dynctl.serving.sockets import Raw, raw
from tests.waiting import patience

PATH = "/v1/chat/completions"
LIMITS = Limits(body_bytes=100_000, header_bytes=2048)


@dataclass
class Server:
    """A listener with one handler. ``plain``: requests that did not go through aiohttp."""

    connections: Connections
    port: int = 0
    plain: int = 0
    running: int = 0
    cancelled: int = 0
    #: What the handler does after it has read the body.
    work: Callable[[ClientRequest], Any] | None = None

    async def handle(self, http: ClientRequest) -> ClientAnswer:
        self.plain += isinstance(http, PlainRequest)
        self.running += 1
        try:
            with bodies_of(http).of(http) as body:
                read = await body.read(http, LIMITS.body_bytes)
            if self.work is not None:
                answer: ClientAnswer = await self.work(http)
                return answer
            shown = {
                "path": http.path,
                "headers": {name.lower(): value for name, value in http.headers.items()},
                "body": read.decode("latin-1"),
                "remote": http.remote,
                "host": http.hostname if isinstance(http, PlainRequest) else http.url.host,
            }
            return web.json_response(shown)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@asynccontextmanager
async def serving(
    *, plain: bool = True, keep_alive_s: float = 60.0, **bounds: Any
) -> AsyncIterator[Server]:
    server = Server(Connections(64, **bounds))
    app = web.Application(middlewares=[error_middleware])
    app[BODIES] = Bodies(LIMITS)
    app.router.add_post(PATH, on_aiohttp(server.handle))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    server.port = listener.getsockname()[1]
    await server.connections.listen(
        runner,
        listener,
        handlers={PATH: server.handle} if plain else None,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=keep_alive_s,
        max_field_size=LIMITS.header_bytes,
        max_line_size=LIMITS.header_bytes,
    )
    try:
        yield server
    finally:
        await server.connections.close()
        await runner.cleanup()


def post(
    body: bytes = b'{"a":1}', *more: bytes, target: str = PATH, length: bytes | None = None
) -> bytes:
    """A plain request, with ``more`` header lines."""
    lines = [
        f"POST {target} HTTP/1.1".encode(),
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: " + (str(len(body)).encode() if length is None else length),
        *more,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def plain_without(name: bytes) -> bytes:
    head, _, body = post().partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(name)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def outcome(server: Server, pieces: Iterable[bytes], quiet_s: float) -> Any:
    """What a client gets that sends these pieces and then reads until nothing comes for
    ``quiet_s``: the status and body of each answer, and whether the connection was closed."""
    async with raw(server.port) as client:
        for piece in pieces:
            with suppress(ConnectionError):
                await client.send(piece)
            await asyncio.sleep(0.005)
        found: list[Any] = []
        with suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            while True:
                async with asyncio.timeout(quiet_s):
                    head = await client.reader.readuntil(b"\r\n\r\n")
                    size = re.search(rb"(?i)content-length: (\d+)", head)
                    body = await client.reader.readexactly(int(size[1]) if size else 0)
                shown = json.loads(body) if body[:1] == b"{" else body
                found.append((head.split()[1], shown))
        return found, client.reader.at_eof()


def requests_of(data: bytes) -> list[bytes]:
    """The plain requests that the data begins with, and the rest.

    aiohttp answers none of the requests of one read if bytes behind them are not valid.
    """
    pieces = []
    while (request := read_head(data)) is not None and request.path == PATH:
        end = data.index(b"\r\n\r\n") + 4 + request.content_length
        pieces.append(data[:end])
        data = data[end:]
    return [*pieces, data] if data else pieces


async def same(data: bytes, ours: Server, theirs: Server, places: Iterable[int] = ()) -> None:
    """The data is answered as by aiohttp, whole and cut at each of the places."""
    sent = [[data], *([data[:place], data[place:]] for place in places)]

    async def compared(quiet_s: float) -> list[tuple[list[bytes], Any, Any]]:
        expected, *found = await asyncio.gather(
            outcome(theirs, requests_of(data), quiet_s),
            *(outcome(ours, pieces, quiet_s) for pieces in sent),
        )
        return [(pieces, each, expected) for pieces, each in zip(sent, found, strict=True)]

    for quiet_s in (0.1, patience(1.0)):  # the first is enough where the machine is not busy
        if all(each == expected for _, each, expected in await compared(quiet_s)):
            return
    for pieces, each, expected in await compared(patience(5.0)):
        assert each == expected, pieces


CASES: dict[str, bytes] = {
    "plain": post(),
    "a query": post(target=PATH + "?beta=true&x=%00"),
    "many headers": post(b"{}", *(b"x-%d: %d" % (n, n) for n in range(60))),
    "spaces around a value": post(b"{}", b"x-a: \t  b c \t "),
    "no space before a value": post(b"{}", b"x-a:b"),
    "an empty value": post(b"{}", b"x-a:"),
    "bytes above 127 in a value": post(b"{}", "x-a: é".encode() + b"\xff"),
    "another case": post().replace(b"host", b"HoSt").replace(b"content", b"CONTENT"),
    "close": post(b"{}", b"connection: close"),
    "keep-alive": post(b"{}", b"connection: Keep-Alive"),
    "another connection option": post(b"{}", b"connection: foo, close"),
    "an empty body": post(b""),
    "no length": plain_without(b"content-length"),
    "no host": plain_without(b"host"),
    "two hosts": post(b"{}", b"host: evil"),
    "a host with a space": post().replace(b"localhost", b"a b"),
    "a host that is none": post().replace(b"localhost", b"a/b@c"),
    "an IPv6 host": post().replace(b"localhost", b"[::1]:80"),
    "the same header twice": post(b"{}", b"x-a: 1", b"X-A: 2"),
    "the length twice": post(b"{}", b"content-length: 2"),
    "two lengths": post(b"{}", b"content-length: 3"),
    "a list of lengths": post(b"{}", length=b"2, 2"),
    "a negative length": post(b"{}", length=b"-2"),
    "a length with a sign": post(b"{}", length=b"+2"),
    "a hexadecimal length": post(b"{}", length=b"0x2"),
    "a length with a space": post(b"{}", length=b"2 2"),
    "a length in other digits": post(b"{}", length="２".encode()),
    "a length of 40 digits": post(b"{}", length=b"2" * 40),
    "no number as length": post(b"{}", length=b""),
    "length and chunks": post(b"2\r\n{}\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "chunks": plain_without(b"content-length").replace(
        b'\r\n\r\n{"a":1}', b"\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "chunks with extensions": plain_without(b"content-length").replace(
        b'\r\n\r\n{"a":1}', b"\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\n\r\n"
    ),
    "a chunk without a size": plain_without(b"content-length").replace(
        b'\r\n\r\n{"a":1}', b"\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
    ),
    "another encoding": post(b"{}", b"transfer-encoding: gzip"),
    "chunks spelled another way": post(b"{}", b"transfer-encoding: xchunked"),
    "transfer_encoding": post(b"{}", b"transfer_encoding: chunked"),
    "a name with a space at its end": post(b"{}", b"transfer-encoding : chunked"),
    "a name with a space": post(b"{}", b"x a: 1"),
    "a line that is folded": post(b"{}", b"x-a: 1\r\n b"),
    "a folded length": post(b"{}", b"x-a: 1\r\n content-length: 9"),
    "a line without a colon": post(b"{}", b"x-a"),
    "an empty name": post(b"{}", b": 1"),
    "a line feed alone": post(b"{}", b"x-a: 1\ncontent-length: 9"),
    "a carriage return alone": post(b"{}", b"x-a: 1\rcontent-length: 9"),
    "line feeds only": post().replace(b"\r\n", b"\n"),
    "a NUL": post(b"{}", b"x-a: a\0b"),
    "a control character": post(b"{}", b"x-a: a\x08b"),
    "an empty line before": b"\r\n" + post(),
    "HTTP/1.0": post().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/1.0 that stays": post(b"{}", b"connection: keep-alive").replace(b"P/1.1", b"P/1.0"),
    "HTTP/2.0": post().replace(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/1.10": post().replace(b"HTTP/1.1", b"HTTP/1.10"),
    "no version": post().replace(b" HTTP/1.1", b""),
    "two spaces": post().replace(b"POST ", b"POST  "),
    "a small method": post().replace(b"POST", b"post"),
    "HEAD": post().replace(b"POST", b"HEAD"),
    "OPTIONS": post().replace(b"POST", b"OPTIONS"),
    "GET": post().replace(b"POST", b"GET"),
    "PUT": post().replace(b"POST", b"PUT"),
    "another path": post(target="/v1/nothing"),
    "an escaped path": post(target="/v1/chat%2Fcompletions"),
    "dots in the path": post(target="/v1/../v1/chat/completions"),
    "two slashes": post(target="//v1/chat/completions"),
    "a slash at the end": post(target=PATH + "/"),
    "a whole address": post(target="http://evil" + PATH),
    "a fragment": post(target=PATH + "#x"),
    "an upgrade": post(b"{}", b"connection: upgrade", b"upgrade: websocket"),
    "an upgrade that the connection does not name": post(b"{}", b"upgrade: h2c"),
    "100-continue": post(b"{}", b"expect: 100-continue"),
    "another expectation": post(b"{}", b"expect: tea"),
    "another type": post().replace(b"application/json", b"text/plain"),
    "no type": plain_without(b"content-type"),
    "a type with a parameter": post().replace(b"/json", b"/json; charset=utf-8"),
    "a type that begins so": post().replace(b"/json", b"/jsonp"),
    "a compressed body": post(b"{}", b"content-encoding: gzip"),
    "too large a value": post(b"{}", b"x-a: " + b"a" * 4000),
    "too large a name": post(b"{}", b"a" * 4000 + b": 1"),
    "too long a line": post(target=PATH + "?" + "a" * 4000),
    "too many headers": post(b"{}", *(b"x-%d: 1" % n for n in range(200))),
    "too large a body": post(b"{}", length=b"200000"),
    "two requests": post() + post(b"[]"),
    "a request behind another path": post(target="/v1/nothing") + post(b"[]"),
    "another path behind a request": post() + post(target="/v1/nothing") + post(b"[]"),
    "bytes behind a request": post() + b"\x16\x03\x01",
    "ten requests": b"".join(post(b"%d" % n) for n in range(10)),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_request_is_answered_as_by_aiohttp(case: str) -> None:
    data = CASES[case]
    places = random.Random(case).sample(range(1, len(data)), min(3, len(data) - 1))
    async with serving() as ours, serving(plain=False) as theirs:
        await same(data, ours, theirs, places)
        assert theirs.plain == 0


#: Cases of plain requests; all others are aiohttp's.
PLAIN = {
    *("plain", "a query", "many headers", "spaces around a value", "no space before a value"),
    *("an empty value", "bytes above 127 in a value", "another case", "close", "keep-alive"),
    *("an empty body", "an IPv6 host", "transfer_encoding", "a type with a parameter"),
    *("a compressed body", "two requests", "another path behind a request"),
    *("bytes behind a request", "ten requests", "too large a body"),
}


async def test_only_one_form_of_a_request_is_plain() -> None:
    async with serving() as server:
        for case, data in CASES.items():
            before = server.plain
            await outcome(server, [data], 0.05)
            assert (server.plain > before) == (case in PLAIN), case


PARTS = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\0", b"\r\n\r\n", b"0\r\n\r\n", b"HTTP/1.1"),
    *(b"POST ", b"%0d", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n"),
]


@pytest.mark.parametrize("seed", range(4))
async def test_any_change_of_a_request_is_answered_as_by_aiohttp(seed: int) -> None:
    """What one server reads as two requests and the other as one would be smuggled."""
    draw = random.Random(seed)
    bases = [data for data in CASES.values() if len(data) < 1500]
    async with serving() as ours, serving(plain=False) as theirs:
        for _ in range(25):
            data = bytearray(
                draw.choice([post(), draw.choice(bases)]) + draw.choice([b"", post(b"[2]")])
            )
            for _ in range(draw.randint(1, 3)):
                place = draw.randrange(len(data))
                match draw.randrange(4):
                    case 0:
                        data[place] = draw.randrange(256)
                    case 1:
                        data[place:place] = draw.choice(PARTS)
                    case 2:
                        del data[place : place + draw.randint(1, 4)]
                    case _:
                        end = place + draw.randint(1, 40)
                        data[place:place] = data[place:end]
            await same(bytes(data), ours, theirs)
        assert ours.plain


def read_again(first: bytes, second: bytes) -> tuple[Any, Any]:
    """The second head as a connection reads it after the first, and as it is read alone."""

    def shown(request: PlainRequest | None) -> Any:
        if request is None:
            return None
        headers = list(request.headers.items())
        return request.path, headers, request.content_length, request.keep_alive

    heads = HeadReader()
    heads.read(first, first.find(b"\r\n\r\n") + 4)
    again = heads.read(second, second.find(b"\r\n\r\n") + 4)
    return shown(again), shown(read_head(second))


def test_a_head_is_read_after_another_one_as_it_is_alone() -> None:
    draw = random.Random(0)
    plain = [CASES[case] for case in PLAIN]
    known = 0
    for _ in range(3000):
        first = draw.choice(plain)
        second = bytearray(draw.choice([first, draw.choice(plain)]))
        for _ in range(draw.randint(0, 2)):
            place = draw.randrange(len(second))
            second[place : place + draw.randint(0, 2)] = draw.choice([*PARTS, b"7", b"12", b"-"])
        if b"\r\n\r\n" in second:
            again, alone = read_again(first, bytes(second))
            assert again == alone, (first, bytes(second))
            known += alone is not None and first != second
    assert known > 100


def test_a_head_with_another_length_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_requests, "read_head", mock.Mock(side_effect=read_head))
    heads = HeadReader()
    for length in (b"2", b"17", b"000000000000009", b"0"):
        head = post(b"", length=length)
        request = heads.read(head, len(head))
        assert request is not None
        assert request.content_length == int(length)
        assert request.headers["content-length"] == length.decode()
    assert cast(mock.Mock, plain_requests.read_head).call_count == 1


async def settled(server: Server, running: int) -> None:
    await until(lambda: server.running == running)


@asynccontextmanager
async def waiting_request(server: Server) -> AsyncIterator[tuple[Raw, asyncio.Event]]:
    """A client whose request runs until the event is set."""
    go = asyncio.Event()

    async def work(http: ClientRequest) -> ClientAnswer:
        await go.wait()
        return web.json_response({})

    server.work = work
    async with raw(server.port) as client:
        await client.send(post())
        await settled(server, 1)
        yield client, go


async def test_a_connection_stays_for_plain_requests_until_another_one() -> None:
    async with serving() as server, raw(server.port) as client:
        for number in range(3):
            await client.send(post(b"%d" % number))
            assert (await client.answer())[1]["body"] == str(number)
        assert server.plain == 3
        await client.send(post(target="/v1/nothing"))
        assert (await client.answer())[0] == 404
        await client.send(post(b"9"))
        assert (await client.answer())[1]["body"] == "9"
        assert (server.plain, server.connections.open) == (3, 1)
    await until(lambda: server.connections.open == 0)


async def test_a_body_in_many_pieces() -> None:
    body = bytes(range(32, 127)) * 1000
    async with serving() as server, raw(server.port) as client:
        data = post(body) + post(b"next")
        for place in range(0, len(data), 7000):
            await client.send(data[place : place + 7000])
            await asyncio.sleep(0)
        assert (await client.answer())[1]["body"] == body.decode()
        assert (await client.answer())[1]["body"] == "next"
        assert server.plain == 2


async def test_the_answer_to_a_body_that_is_too_large_arrives_while_it_is_sent() -> None:
    """A connection that is closed with bytes that were not read is reset, and the answer lost."""
    async with serving() as server, raw(server.port) as client:
        await client.send(post(b"", length=b"2000000"))
        for _ in range(20):
            await client.send(b"x" * 100_000)
        status, body = await client.answer()
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert await client.closed() == b""
        assert server.plain == 1


@pytest.mark.parametrize("way", ["closes", "sends no more"])
async def test_a_client_that_leaves_stops_its_request(way: str) -> None:
    async with serving() as server, waiting_request(server) as (client, _):
        if way == "closes":
            client.writer.close()
        else:
            client.writer.write_eof()
        await settled(server, 0)
        assert server.cancelled == 1
        await until(lambda: server.connections.open == 0)


async def test_an_idle_connection_is_closed_and_one_with_a_request_is_not() -> None:
    async with (
        serving(keep_alive_s=0.2) as server,
        waiting_request(server) as (client, go),
        raw(server.port) as idle,
    ):
        assert await idle.closed() == b""
        go.set()
        assert (await client.answer())[0] == 200
        assert await client.closed() == b""


async def test_a_head_that_does_not_end_is_not_waited_for() -> None:
    async with serving(header_s=0.2) as server, raw(server.port) as client:
        await client.send(post())
        assert (await client.answer())[0] == 200
        await client.send(post()[:60])
        assert await client.closed() == b""
        assert (server.connections.timed_out, server.connections.open) == (1, 0)


@pytest.mark.parametrize("path", [PATH, "/v1/nothing"])
async def test_what_waits_behind_a_request_is_bounded_and_answered_in_order(path: str) -> None:
    async with serving() as server, waiting_request(server) as (client, go):
        sent, data = 0, post(b"x" * 1000, target=path)
        with suppress(TimeoutError):
            while sent < 64 << 20:
                async with asyncio.timeout(patience(0.3)):
                    await client.send(data * 100)
                sent += 100
        assert sent * len(data) < 64 << 20
        go.set()
        server.work = None
        assert await client.answer() == (200, {})
        for _ in range(sent):
            status, body = await client.answer()
            assert body["body"] == "x" * 1000 if path == PATH else status == 404
        assert (server.plain > 1) == (path == PATH)


async def streaming(http: ClientRequest) -> ClientAnswer:
    assert isinstance(http, PlainRequest)
    stream = http.begin({"content-type": "text/event-stream"})
    for _ in range(10_000):
        await stream.write(b"x" * 10_000)
    await stream.write_eof(b"end")
    return stream


async def test_a_client_that_does_not_read_stops_its_stream_and_is_closed() -> None:
    async with serving(unread_s=0.4) as server, raw(server.port) as client:
        assert client.writer.transport is not None
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        server.work = streaming
        await client.send(post())
        await until(lambda: server.connections.lagging == 1)
        assert server.running == 1
        await until(lambda: server.connections.not_read == 1)
        await settled(server, 0)
        assert (server.cancelled, server.connections.open) == (1, 0)


async def test_a_client_that_reads_slowly_gets_a_whole_stream() -> None:
    async with serving() as server, raw(server.port) as client:
        server.work = streaming
        await client.send(post(b"{}", b"connection: close"))
        await until(lambda: server.connections.lagging == 1)
        answer = await client.closed(30)
        head, _, chunks = answer.partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head
        assert chunks.count(b"x") == 100_000_000
        assert chunks.endswith(b"\r\n3\r\nend\r\n0\r\n\r\n")


@pytest.mark.parametrize("late", [False, True])
async def test_requests_that_run_at_the_end_have_a_second(late: bool) -> None:
    async with (
        serving() as server,
        waiting_request(server) as (client, go),
        raw(server.port) as idle,
    ):
        closing = asyncio.create_task(server.connections.close())
        assert await idle.closed() == b""
        if late:
            assert await client.closed() == b""
            assert server.cancelled == 1
        else:
            go.set()
            head = (await client.closed()).partition(b"\r\n\r\n")[0]
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nconnection: close" in head
        await closing


async def test_no_header_of_an_answer_begins_another_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(http: ClientRequest) -> ClientAnswer:
        assert isinstance(http, PlainRequest)
        return http.begin({"content-type": "a\r\nx: y"})

    async with serving() as server, raw(server.port) as client:
        server.work = work
        await client.send(post())
        assert (await client.answer())[1]["error"]["code"] == 500
    assert "control character" in caplog.text


async def test_a_stream_that_a_handler_leaves_open_is_cut() -> None:
    async def work(http: ClientRequest) -> ClientAnswer:
        assert isinstance(http, PlainRequest)
        stream = http.begin({})
        await stream.write(b"begun")
        return stream

    async with serving() as server, raw(server.port) as client:
        server.work = work
        await client.send(post())
        assert (await client.closed()).endswith(b"\r\nbegun\r\n")
