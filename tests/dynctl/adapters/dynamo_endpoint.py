"""A worker's endpoint as the request plane sees it, with faults; written from captures alone.

It reads and writes the bytes by itself, so that a mistake in dynctl's own codec shows.
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from dynctl.wire.dynamo.discovery import EndpointId, Instance

ENDPOINT = EndpointId("dynamo", "backend", "worker_kv_query_source_1")
INSTANCE_ID = 0x2040A1FD555013B9
PATH = f"{INSTANCE_ID:x}/dynamo/backend/worker_kv_query_source_1"


class Fault(Enum):
    """What the endpoint does wrong; NONE answers as it should."""

    NONE = auto()
    NO_ACK = auto()
    CALLS_WITHOUT_ACK = auto()
    CLOSES_BEFORE_ACK = auto()
    REFUSES = auto()
    LONG_REFUSAL = auto()
    NEVER_CALLS = auto()
    CALLS_LATE = auto()  # when `release` is set
    WRONG_SUBJECT = auto()
    ERROR_PROLOGUE = auto()
    NO_PROLOGUE = auto()
    HALF_A_FRAME = auto()
    HUGE_ITEM = auto()
    JUNK_ITEM = auto()
    CLOSES_IN_THE_MIDDLE = auto()
    SENTINEL_IN_THE_MIDDLE = auto()
    STALLS = auto()  # after the first item, until the other side closes


class Question(NamedTuple):
    path: str
    headers: Any
    control: Any
    body: Any


def frame(header: Any = None, body: bytes = b"") -> bytes:
    text = b"" if header is None else json.dumps(header).encode()
    return struct.pack(">QQQ", len(text), len(body), 0) + text + body


class FakeEndpoint:
    """``answer(body)`` gives the items. Received messages are kept."""

    def __init__(self, answer: Callable[[Any], Sequence[Any]], fault: Fault, codec: str) -> None:
        self.questions: list[Question] = []
        self.controls: list[Any] = []
        self.calls_ended = 0
        self.release = asyncio.Event()
        self.ended = asyncio.Event()
        self.fault = fault
        self.codec = codec
        self.port = 0
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    def instance(self, **others: Any) -> Instance:
        fields: dict[str, Any] = {
            "endpoint": ENDPOINT,
            "instance_id": INSTANCE_ID,
            "transport": "tcp",
            "address": f"127.0.0.1:{self.port}/{PATH}",
            "codec": self.codec,
        }
        return Instance(**(fields | others))

    # -- the question

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:  # Dynamo reuses connections
                await self._take(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def sized(kind: str) -> bytes:
            [length] = struct.unpack(kind, await reader.readexactly(struct.calcsize(kind)))
            return await reader.readexactly(length)

        path = (await sized(">H")).decode()
        headers = json.loads(await sized(">H"))
        payload = await sized(">I")
        header_length, body_length, _ = struct.unpack_from(">QQQ", payload)
        control = json.loads(payload[24 : 24 + header_length])
        coded = payload[24 + header_length :]
        assert len(coded) == body_length
        decode = msgspec.msgpack.decode if control["payload_codec"] == "msgpack" else json.loads
        question = Question(path, headers, control, decode(coded))
        self.questions.append(question)
        match self.fault:
            case Fault.NO_ACK:
                return
            case Fault.CLOSES_BEFORE_ACK:
                raise ConnectionError
            case Fault.REFUSES:
                text = f"Server unavailable: unknown endpoint {path}".encode()
                writer.write(struct.pack(">I", len(text)) + text)
                return
            case Fault.LONG_REFUSAL:
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
        if self.fault is not Fault.CALLS_WITHOUT_ACK:
            writer.write(bytes(4))
        if self.fault is not Fault.NEVER_CALLS:
            task = asyncio.create_task(self._call_home(question))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # -- the answer

    async def _call_home(self, question: Question) -> None:
        info = json.loads(question.control["connection_info"]["info"])
        if self.fault is Fault.CALLS_LATE:
            await self.release.wait()
        host, _, port = info["address"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            listening = asyncio.create_task(self._listen(reader))
            self._tasks.add(listening)
            listening.add_done_callback(self._tasks.discard)
            # In one write, so that what belongs together arrives together.
            writer.write(b"".join(self._pieces(question, info["subject"])))
            await writer.drain()
            if self.fault not in (Fault.CLOSES_IN_THE_MIDDLE, Fault.HALF_A_FRAME):
                await listening  # as Dynamo: who asked closes
        except ConnectionError:
            pass
        finally:
            writer.close()
            self.calls_ended += 1
            self.ended.set()

    def _pieces(self, question: Question, subject: str) -> list[bytes]:
        fault, codec = self.fault, question.control["payload_codec"]
        encode = msgspec.msgpack.encode if codec == "msgpack" else msgspec.json.encode

        def item(value: Any) -> bytes:
            return frame(body=encode({"data": value, "complete_final": False}))

        named = "another-subject" if fault is Fault.WRONG_SUBJECT else subject
        pieces = [frame({"subject": named, "stream_type": "response"})]
        if fault is Fault.ERROR_PROLOGUE:
            return [*pieces, frame({"error": "no such model\n"})]
        if fault is not Fault.NO_PROLOGUE:
            pieces.append(frame({"error": None}))
        items = [item(value) for value in self._answer(question.body)]
        end = [frame(body=encode({"complete_final": True})), frame("sentinel")]
        match fault:
            case Fault.HALF_A_FRAME:
                return [*pieces, items[0], items[0][:-1]]
            case Fault.HUGE_ITEM:
                return [*pieces, items[0], struct.pack(">QQQ", 0, 2**40, 0)]
            case Fault.JUNK_ITEM:
                return [*pieces, items[0], frame(body=b"\xc1")]
            case Fault.CLOSES_IN_THE_MIDDLE | Fault.STALLS:
                return [*pieces, items[0]]
            case Fault.SENTINEL_IN_THE_MIDDLE:
                return [*pieces, items[0], frame("sentinel")]
        return [*pieces, *items, *end]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Control messages of who asked, until it closes."""
        try:
            while True:
                header_length, body_length, _ = struct.unpack(">QQQ", await reader.readexactly(24))
                control = await reader.readexactly(header_length + body_length)
                self.controls.append(json.loads(control))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def fake_endpoint(
    answer: Callable[[Any], Sequence[Any]] = lambda body: [{"asked": body}],
    *,
    fault: Fault = Fault.NONE,
    codec: str = "msgpack",
) -> AsyncIterator[FakeEndpoint]:
    """A listening endpoint on a free port of loopback."""
    endpoint = FakeEndpoint(answer, fault, codec)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        await endpoint.close()
