"""The request plane's server, with dynctl's client and with raw bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dynctl.adapters.dynamo.request_plane import RequestLimits, TcpRequestPlane
from dynctl.adapters.dynamo.request_server import (
    ErrorItem,
    Handler,
    PlaneRequest,
    RequestRefusal,
    RequestServer,
    ServerLimits,
)
from dynctl.adapters.ports import RequestPlaneError
from dynctl.wire.dynamo.discovery import EndpointId, Instance
from dynctl.wire.dynamo.request_plane import RawItem, encode_control, encode_request
from tests.waiting import patience, until

AT = EndpointId("dynamo", "backend", "generate")
ID = 0x2040A1FD555013B9
LONG = 20.0
PATIENT = RequestLimits(connect_s=patience(LONG), handshake_s=patience(LONG))


@asynccontextmanager
async def serving(
    handler: Handler, *, limits: ServerLimits | None = None, **how: Any
) -> AsyncIterator[tuple[RequestServer, Instance]]:
    """A server on loopback; afterwards no task is left."""
    server = RequestServer("127.0.0.1", limits=limits or ServerLimits())
    server.serve(AT, handler, **how)
    await server.start()
    try:
        yield server, server.instance(AT, ID)
    finally:
        await server.close()
        await until(lambda: server.running == 0)


@pytest.fixture
async def plane() -> AsyncIterator[TcpRequestPlane]:
    made = TcpRequestPlane(limits=PATIENT)
    yield made
    await made.close()


async def ask(plane: TcpRequestPlane, instance: Instance, body: Any = None) -> list[Any]:
    asked = plane.ask(instance, body, timeout=patience(LONG), max_bytes=10_000_000)
    return [item async for item in asked]


async def echo(request: PlaneRequest) -> AsyncIterator[Any]:
    for _ in range(3):
        yield {"id": request.request_id, "body": request.body, "at": str(request.endpoint)}


class Typed(msgspec.Struct):
    token_ids: list[int]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_items_reach_the_requester_in_order(plane: TcpRequestPlane, codec: str):
    async with serving(echo) as (server, instance):
        items = await ask(plane, replace(instance, codec=codec), {"a": [1, "ä"]})
    assert len(items) == 3
    assert items[0]["body"] == {"a": [1, "ä"]}
    assert items[0]["at"] == "dynamo.backend.generate"
    assert (server.counts.accepted, server.counts.failed, server.counts.cancelled) == (1, 0, 0)


async def test_bodies_are_read_as_the_endpoints_type(plane: TcpRequestPlane):
    async def tokens(request: PlaneRequest) -> AsyncIterator[Any]:
        assert isinstance(request.body, Typed)
        yield request.body.token_ids

    async with serving(tokens, body=Typed) as (server, instance):
        assert await ask(plane, instance, {"token_ids": [1, 2]}) == [[1, 2]]
        with pytest.raises(RequestPlaneError, match=r"invalid request: .*token_ids"):
            await ask(plane, instance, {"tokens": ["secret"]})
        assert server.counts.refused == 1


async def test_raw_items_are_sent_as_they_are_or_in_the_requests_codec(plane: TcpRequestPlane):
    async def raw(request: PlaneRequest) -> AsyncIterator[Any]:
        yield RawItem(msgspec.msgpack.encode({"n": 1}), "msgpack")

    async with serving(raw) as (_, instance):
        for codec in ("msgpack", "json"):
            assert await ask(plane, replace(instance, codec=codec)) == [{"n": 1}]


async def test_many_requests_at_once(plane: TcpRequestPlane):
    async with serving(echo) as (_, instance):
        answers = await asyncio.gather(*(ask(plane, instance, n) for n in range(300)))
    assert [[item["body"] for item in items] for items in answers] == [[n] * 3 for n in range(300)]


async def test_an_admission_refuses_before_the_answer(plane: TcpRequestPlane):
    def refuse(request: PlaneRequest) -> None:
        raise RequestRefusal("the engine is not ready")

    async with serving(echo, admit=refuse) as (_, instance):
        with pytest.raises(RequestPlaneError, match="returned an error: the engine is not ready"):
            await ask(plane, instance)


async def test_a_failing_handler_ends_with_an_error_item(plane: TcpRequestPlane):
    async def fails(request: PlaneRequest) -> AsyncIterator[Any]:
        yield 1
        if request.body == "known":
            raise ErrorItem("top_q is not supported", "InvalidArgument")
        raise RuntimeError("secret prompt")

    async with serving(fails) as (server, instance):
        _, known = await ask(plane, instance, "known")
        assert known["error"]["message"] == "top_q is not supported"
        assert known["error"]["error_type"] == {"Backend": "InvalidArgument"}
        _, other = await ask(plane, instance)
        assert other["event"] == "error"
        assert "secret" not in json.dumps(other)
        assert server.counts.failed == 2


async def test_a_requester_that_closes_cancels_the_handler(plane: TcpRequestPlane):
    ended = asyncio.Event()

    async def endless(request: PlaneRequest) -> AsyncIterator[Any]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with serving(endless) as (server, instance):
        asked = plane.ask(instance, None, timeout=patience(LONG), max_bytes=10_000_000)
        async with aclosing(asked) as items:
            assert await anext(items) == 1
        async with asyncio.timeout(patience(10)):
            await ended.wait()
        await until(lambda: server.running == 0)
        assert server.counts.cancelled == 1


async def test_a_requester_that_reads_nothing_holds_no_memory(plane: TcpRequestPlane):
    sent = 0

    async def flood(request: PlaneRequest) -> AsyncIterator[Any]:
        nonlocal sent
        while True:
            sent += 1
            yield "x" * 100_000

    async with serving(flood, limits=ServerLimits(stall_s=0.3)) as (server, instance):
        held: list[asyncio.StreamWriter] = []
        home = await asyncio.start_server(
            lambda reader, writer: held.append(writer), "127.0.0.1", 0, limit=1024
        )
        port = home.sockets[0].getsockname()[1]
        await send(instance, f"127.0.0.1:{port}")
        await until(lambda: server.counts.cancelled == 1, 20)
        assert sent < 1000
        home.close()
        held[0].transport.abort()


async def test_stop_ends_the_answer_as_the_handler_sees_fit(plane: TcpRequestPlane):
    async def stoppable(request: PlaneRequest) -> AsyncIterator[Any]:
        yield "first"
        await request.stopped.wait()
        yield "last"

    received = bytearray()
    done = asyncio.Event()

    async def at_home(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            received.extend(data)
            if b"first" in received:
                writer.write(encode_control("stop"))
        writer.close()
        done.set()

    async with serving(stoppable) as (server, instance):
        home = await asyncio.start_server(at_home, "127.0.0.1", 0)
        await send(instance, f"127.0.0.1:{home.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(patience(10)):
            await done.wait()
        home.close()
        assert b"last" in received
        assert received.endswith(b'"sentinel"')
        assert server.counts.cancelled == 0


async def send(instance: Instance, call_home: str, path: str | None = None) -> bytes:
    """One request in raw bytes; the reply."""
    location, _, own = instance.address.partition("/")
    host, _, port = location.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    request = encode_request(
        path or own, "r1", None, call_home=call_home, subject="s", codec="msgpack"
    )
    for at in range(0, len(request), 7):  # in small pieces
        writer.write(request[at : at + 7])
        await writer.drain()
    length = int.from_bytes(await reader.readexactly(4))
    reply = await reader.readexactly(length)
    writer.close()
    return reply


async def test_unknown_endpoints_and_ids_are_refused():
    async with serving(echo) as (_, instance):
        wrong_id = f"{ID + 1:x}/dynamo/backend/generate"
        wrong_name = f"{ID:x}/dynamo/backend/other"
        long = f"{'1' * 40}/dynamo/backend/generate"
        for path in ("-", "x", wrong_id, wrong_name, long, "zz/dynamo/backend/generate"):
            reply = await send(instance, "127.0.0.1:1", path=path)
            assert reply.startswith(b"Server unavailable: unknown endpoint ")


async def test_a_full_server_and_a_draining_one_refuse(plane: TcpRequestPlane):
    release = asyncio.Event()

    async def waits(request: PlaneRequest) -> AsyncIterator[Any]:
        await release.wait()
        yield request.body

    async with serving(waits, limits=ServerLimits(requests=2)) as (server, instance):
        first = asyncio.gather(ask(plane, instance, 1), ask(plane, instance, 2))
        await until(lambda: server.running == 2)
        with pytest.raises(RequestPlaneError, match="2 requests are running, the limit"):
            await ask(plane, instance, 3)
        assert not await server.drain(0.01)
        with pytest.raises(RequestPlaneError, match="shutting down"):
            await ask(plane, instance, 4)
        release.set()
        assert list(await first) == [[1], [2]]  # what was accepted is answered
        assert await server.drain(patience(10))
        server.resume()
        assert await ask(plane, instance, 5) == [5]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4000,
        b"\x00\x01x\x00\x02{}" + (2**32 - 1).to_bytes(4) + b"x",
        b"\x00\x01x\x00\x02[]\x00\x00\x00\x00",
        b"\x00\x01\xff\x00\x02{}\x00\x00\x00\x00",
    ],
)
async def test_bytes_that_are_no_request_end_the_connection(sent: bytes):
    async with serving(echo) as (server, instance):
        host, _, port = instance.address.partition("/")[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(patience(10)):
            assert await reader.read() == b""
        writer.close()
        assert server.counts.accepted == 0


async def test_half_a_request_is_not_waited_for_without_end():
    async with serving(echo, limits=ServerLimits(receive_s=0.1)) as (_, instance):
        host, _, port = instance.address.partition("/")[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\x10half")
        async with asyncio.timeout(patience(10)):
            assert await reader.read() == b""
        writer.close()


async def connect(instance: Instance) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = instance.address.partition("/")[0].rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_silent_connections_and_half_requests_keep_no_requester_out(plane: TcpRequestPlane):
    limits = ServerLimits(connections=6)
    async with serving(echo, limits=limits) as (server, instance), AsyncExitStack() as stack:
        assert len(await ask(plane, instance)) == 3  # its connection stays open
        (honest,) = server._connections
        for number in range(40):
            _, writer = await connect(instance)
            stack.callback(writer.close)
            writer.write(b"\x00\x10half" * (number % 2))
            await writer.drain()
        await until(lambda: len(server._connections) == limits.connections)
        assert honest in server._connections
        assert len(await ask(plane, instance)) == 3
        newcomer = TcpRequestPlane(limits=PATIENT)
        assert len(await ask(newcomer, instance)) == 3
        await newcomer.close()


async def test_requests_that_are_not_complete_have_a_bound_together(plane: TcpRequestPlane):
    limits = ServerLimits(request_bytes=100_000, buffered_bytes=250_000)
    begun = b"\x00\x01x\x00\x02{}" + (99_000).to_bytes(4) + bytes(90_000)
    async with serving(echo, limits=limits) as (server, instance), AsyncExitStack() as stack:
        for _ in range(20):
            _, writer = await connect(instance)
            stack.callback(writer.close)
            writer.write(begun)
            await until(lambda: server._buffered >= 90_000)
            assert server._buffered <= limits.buffered_bytes + limits.request_bytes
        # Of the twenty at most two are left.
        await until(lambda: len(server._connections) <= 2)
        assert len(await ask(plane, instance)) == 3
    assert server._buffered == 0


async def test_a_payload_that_is_no_request_is_refused_in_the_reply():
    async with serving(echo) as (server, instance):
        host, _, port = instance.address.partition("/")[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path = f"{ID:x}/dynamo/backend/generate".encode()
        for payload in (b"", b"junk" * 10, bytes(24)):
            writer.write(len(path).to_bytes(2) + path + b"\x00\x02{}")
            writer.write(len(payload).to_bytes(4) + payload)
            length = int.from_bytes(await reader.readexactly(4))
            assert (await reader.readexactly(length)).startswith(b"invalid request: ")
        writer.close()
        assert server.counts.refused == 3


class Board:
    """Subjects of NATS inside this process; what is not acknowledged with an empty reply is in
    ``replies``."""

    def __init__(self) -> None:
        self.takers: dict[str, Callable[[bytes, Mapping[str, str]], str]] = {}
        self.replies: list[str] = []
        self.asked = 0

    def listen(self, subject: str, take: Callable[[bytes, Mapping[str, str]], str]) -> None:
        self.takers[subject] = take

    def forget(self, subject: str) -> None:
        self.takers.pop(subject, None)

    async def listening(self) -> None:
        self.asked += 1

    async def hush(self) -> None:
        self.takers.clear()

    async def request(
        self, subject: str, body: bytes, headers: dict[str, str], timeout: float
    ) -> bytes:
        if subject not in self.takers:
            raise RequestPlaneError(f"does not listen at {subject}")
        if reply := self.takers[subject](body, headers):
            self.replies.append(reply)
        return reply.encode()

    async def local_host(self) -> str:
        return "127.0.0.1"

    async def close(self) -> None: ...


@asynccontextmanager
async def over_nats(
    handler: Handler, *, limits: ServerLimits | None = None
) -> AsyncIterator[tuple[RequestServer, TcpRequestPlane, Board]]:
    board = Board()
    server = RequestServer("unused.invalid", limits=limits or ServerLimits(), nats=board)
    server.serve(AT, handler)
    await server.start()
    plane = TcpRequestPlane(limits=PATIENT, nats=lambda: board)
    try:
        yield server, plane, board
    finally:
        await plane.close()
        await server.close()


async def test_over_nats_each_instance_has_its_subject():
    async with over_nats(echo) as (server, plane, board):
        instance = server.instance(AT, ID)
        assert (instance.transport, server.port) == ("nats_tcp", 0)
        assert instance.address == f"dynamo_backend.generate-{ID:x}"
        items = await ask(plane, instance, [1, 2])
        assert [item["body"] for item in items] == [[1, 2]] * 3
        await server.listening()
        assert board.asked == 1
        # Another lease: the first subject is not listened to any more.
        assert list(board.takers) == [instance.address]
        later = server.instance(AT, ID + 1)
        assert list(board.takers) == [later.address]
        assert len(await ask(plane, later)) == 3
        server.remove(AT)
        assert not board.takers


async def test_over_nats_a_refusal_is_the_beginning_of_an_answer():
    """Dynamo's frontends wait for the answer and do not read the reply."""

    async def waits(request: PlaneRequest) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield request.body

    limits = ServerLimits(requests=1, request_bytes=5000)
    async with over_nats(waits, limits=limits) as (server, plane, board):
        instance = server.instance(AT, ID)
        with pytest.raises(RequestPlaneError, match=r"returned an error: invalid request: .* over"):
            await ask(plane, instance, "x" * 6000)
        first = asyncio.create_task(ask(plane, instance, 1))
        await until(lambda: server.running == 1)
        with pytest.raises(
            RequestPlaneError, match=r"an error: .*1 requests are running, the limit"
        ):
            await ask(plane, instance, 2)
        assert board.replies == []
        assert server.counts.refused == 2
        # What cannot be answered gets the reason as its reply.
        reply = await board.request(instance.address, b"junk", {}, 1)
        assert reply.startswith(b"Server unavailable: ")
        assert not await server.drain(0.01)
        with pytest.raises(RequestPlaneError, match="does not listen at"):
            await ask(plane, instance, 3)
        await server.close()
        with pytest.raises(RequestPlaneError, match="ended its response early"):
            await first
