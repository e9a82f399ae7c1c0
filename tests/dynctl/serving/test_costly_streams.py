"""Streams that engines make costly: what they may cost in a turn, and how long others wait.

The aim is that the slowest ``GET /live`` beside four such streams takes 50 ms on two busy cores.
Measured is the CPU time that the frontend spends before it answers: on a busy machine the time of
the clock is that of other processes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from urllib.parse import urlsplit

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.tasks import LoopShare
from dynctl.serving.dynamo.request_plane import _TURN_STEPS, PlaneStream, _Link
from dynctl.serving.engines import response_stream
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.engines.response_stream import ClientBounds, EngineStream
from dynctl.serving.routing.config import Limits
from dynctl.tokenization import DEMO_MODEL_DIR
from dynctl.wire.dynamo.request_plane import (
    FrameDecoder,
    encode_end,
    encode_item,
    encode_prologue,
)
from tests.dynctl.serving import costly_engine
from tests.dynctl.serving.test_engine_http import EveryByte
from tests.forks import Program
from tests.waiting import patience

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
STREAMS = 4
#: CPU time of the frontend until an answer; before streams had a share, 1 to 43 s of the clock.
SLOWEST_S = 0.1


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process's main thread so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def running(*command: str) -> Iterator[tuple[str, int]]:
    """A module as a process: the first line of its output, and its id."""
    process = Program(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline(), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@asynccontextmanager
async def reading(url: str, path: str, body: Any) -> AsyncIterator[None]:
    """Clients that read what they get, without parsing it: that would cost more than the streams
    do in the frontend, and the answers of others would wait for it in this process."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def read() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request)
            while await reader.read(1 << 18):
                pass
        except OSError:
            pass  # the end of the frontend
        finally:
            writer.close()

    tasks = [asyncio.create_task(read()) for _ in range(STREAMS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "annotated": ("/v1/chat/completions", {**CHAT, "nvext": {"extra_fields": ["worker_id"]}}),
    "responses": ("/v1/responses", {"model": "demo", "input": "hi", "stream": True}),
}
#: All kinds for chats; where events are read one by one, those that have many.
ROWS = [("chat", kind) for kind in costly_engine.KINDS] + [
    (api, kind)
    for api in ("annotated", "responses")
    for kind in ("events of a byte", "empty events", "the largest chunks")
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU time from /proc")
@pytest.mark.parametrize(("api", "kind"), ROWS)
async def test_others_do_not_wait_for_a_costly_stream(api: str, kind: str) -> None:
    path, body = APIS[api]
    with running(costly_engine.__name__, kind) as (port, _):
        worker = f"http://127.0.0.1:{int(port)},name=e0,model=demo"
        frontend = ("dynctl", "serve", "frontend", "--http-port", "0", "--announce")
        options = ("--worker", worker, "--model-path", str(DEMO_MODEL_DIR))
        with running(*frontend, *options) as (record, pid):
            url = json.loads(record)["url"]
            timeout = aiohttp.ClientTimeout(total=patience(60))
            async with aiohttp.ClientSession(timeout=timeout) as session:
                waits = []
                async with reading(url, path, body):
                    await asyncio.sleep(0.3)
                    for _ in range(25):
                        started = cpu_seconds(pid)
                        async with session.get(url + "/live") as answer:
                            await answer.read()
                        waits.append(cpu_seconds(pid) - started)
                        await asyncio.sleep(0.005)
    assert sorted(waits)[-2] < SLOWEST_S, (statistics.quantiles(waits), max(waits))


# -- what one turn of the event loop takes ---------------------------------------------------------


def framed(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


async def read_all(stream: EngineStream) -> bytes:
    async with asyncio.timeout(patience(10)):
        return await stream.read(1 << 30)


async def test_a_read_of_many_chunks_is_taken_in_turns_and_nothing_is_read_meanwhile() -> None:
    wire = mock.Mock()
    stream = EngineStream(wire, "http://engine", ClientBounds())
    stream.received(HEAD + framed(b"x") * 10_000 + END)
    assert stream._buffered == response_stream._TURN_CHUNKS
    assert wire.mock_calls == [mock.call.pause()]
    assert await read_all(stream) == b"x" * 10_000
    # It reads again before the response is complete: the connection takes another request.
    assert wire.mock_calls[-2:] == [mock.call.resume(), mock.call.finished(clean=True)]


async def test_many_streams_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    share = LoopShare(0.0)
    streams = [EngineStream(mock.Mock(), "e", ClientBounds(), share=share) for _ in range(50)]
    for stream in streams:
        stream.received(HEAD + framed(b"x") * 1000)
    before = sum(stream._buffered for stream in streams)
    for _ in range(10):
        await asyncio.sleep(0)
        now = sum(stream._buffered for stream in streams)
        assert now - before <= response_stream._TURN_CHUNKS
        before = now
    for stream in streams:
        stream.close()


async def test_a_large_read_waits_for_its_share_before_the_next() -> None:
    wire = mock.Mock()
    stream = EngineStream(wire, "http://engine", ClientBounds())
    stream.received(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 100_000)
    assert wire.mock_calls == [mock.call.pause()]
    async with asyncio.timeout(patience(10)):
        while wire.mock_calls[-1] != mock.call.resume():  # noqa: ASYNC110  turns are counted
            await asyncio.sleep(0)
    stream.close()


async def test_a_large_chunk_passes_as_it_arrives() -> None:
    stream = EngineStream(mock.Mock(), "http://engine", ClientBounds())
    stream.received(HEAD + b"%x\r\n" % (16 << 20) + b"x" * 1000)
    assert await stream.readany() == b"x" * 1000
    assert not stream._tail
    stream.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_what_arrived_before_the_connection_ended_is_read(ends: bool) -> None:
    stream = EngineStream(mock.Mock(), "http://engine", ClientBounds())
    stream.received(HEAD + framed(b"x") * 1000 + (END if ends else b""))
    stream.ended(None)
    if ends:
        assert await read_all(stream) == b"x" * 1000
        return
    read = bytearray()

    async def read_on() -> None:
        while True:
            read.extend(await stream.readany())

    with pytest.raises(UpstreamFailure, match="closed the connection during its response"):
        await asyncio.wait_for(read_on(), patience(10))
    assert read == b"x" * 1000


async def test_a_closed_stream_takes_nothing_more() -> None:
    stream = EngineStream(mock.Mock(), "http://engine", ClientBounds())
    stream.received(HEAD + framed(b"x") * 1000)
    stream.close()
    before = stream._buffered
    for _ in range(10):
        await asyncio.sleep(0)
    assert (stream._buffered, len(stream._tail)) == (before, 0)


chunks = st.lists(
    st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b";x=y"])), max_size=30
)


@given(chunks, st.lists(st.integers(0, 600), max_size=30), st.booleans(), st.booleans())
async def test_turns_and_cuts_do_not_change_a_stream(
    given_chunks: list[tuple[bytes, bytes]], places: list[int], pipes: bool, broken: bool
) -> None:
    """Also where a chunk is one that passes in parts, or the end is not that of chunks."""
    expected = b"".join(data for data, _ in given_chunks)
    sent = b"".join(framed(data, extension) for data, extension in given_chunks)
    sent += b"x\r\n" if broken else END
    ends = sorted({0, len(sent), *(at for at in places if at < len(sent))})
    with mock.patch.multiple(response_stream, _TURN_CHUNKS=2, _PARTS_ABOVE=8, _TURN_BYTES=64):
        wire = mock.Mock()
        stream = EngineStream(wire, "http://engine", ClientBounds())
        stream.received(HEAD)
        passed = bytearray()
        cut = EveryByte()

        async def take() -> None:
            if pipes and await stream.pipe(passed.extend, lambda _: 1 << 30, cut):
                return
            while piece := await stream.readany():
                passed.extend(framed(piece) if pipes else piece)

        taking = asyncio.create_task(take())
        await asyncio.sleep(0)
        for a, b in pairwise(ends):
            while stream._queued:  # noqa: ASYNC110  the wire is paused
                await asyncio.sleep(0)
            stream.received(sent[a:b])
        if broken:
            with pytest.raises(UpstreamFailure, match="invalid chunk size"):
                await asyncio.wait_for(taking, patience(10))
        else:
            await asyncio.wait_for(taking, patience(10))
    content = unframed(bytes(passed)) if pipes else bytes(passed)
    if broken and pipes:
        # A pipe passes on nothing of a read with a chunk that is broken.
        assert expected.startswith(content)
    else:
        assert content == expected


def unframed(data: bytes) -> bytes:
    content = b""
    while data:
        line, _, rest = data.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        content += rest[:size]
        data = rest[size + 2 :]
    return content


class Plane:
    """A response of a worker on Dynamo's request plane, that takes ``x`` for each output."""

    def __init__(self) -> None:
        self.transport, self.frames, self.taken = mock.Mock(), FrameDecoder(), 0
        self.transport.is_closing.return_value = False
        instance = cast(Any, SimpleNamespace(codec="msgpack"))
        self.link = _Link(mock.Mock(), instance, 1 << 30, LoopShare(0.002))
        answer = SimpleNamespace(feed=self._feed, end=lambda: (b"!",), stopped=False, token_ids=[])
        self.stream = PlaneStream(
            self.link, "w1", ClientBounds(), cast(Any, answer), None, streams=True
        )
        self.link.stream = self.stream
        self.link.called(self.transport, self.frames)

    def _feed(self, _output: Any) -> tuple[bytes, ...]:
        self.taken += 1
        return (b"x",)

    def arrive(self, *tokens: int) -> None:
        """Outputs with these numbers of tokens, and the end, in one read."""
        items = (encode_item({"data": {"token_ids": [1] * each}}, "msgpack") for each in tokens)
        self.frames.feed(encode_prologue() + b"".join(items) + encode_end("msgpack"))
        self.link.received()


async def test_a_read_of_many_steps_of_a_worker_is_taken_in_turns() -> None:
    """Frames of a few bytes, tens of thousands in a read."""
    plane = Plane()
    plane.arrive(*[1] * 1000)
    assert plane.taken == _TURN_STEPS - 1
    assert plane.transport.mock_calls[-1] == mock.call.pause_reading()
    plane.link.lost(None)  # after all of it has arrived
    assert await read_all(plane.stream) == b"x" * 1000 + b"!"


async def test_outputs_of_many_tokens_count_as_many_steps() -> None:
    plane = Plane()
    plane.arrive(*[10_000] * 10)
    assert plane.taken == 2
    assert await read_all(plane.stream) == b"x" * 10 + b"!"


async def test_an_output_has_a_bounded_number_of_tokens() -> None:
    plane = Plane()
    plane.arrive(1, 100_000)
    assert plane.taken == 1
    read = await plane.stream.readany()
    assert read.startswith(b"x")
    assert b"error" in read


@asynccontextmanager
async def answering(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server whose connections are closed, and their handlers done, at its end; its origin."""
    running: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        try:
            await handle(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is closed
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*filter(None, running), return_exceptions=True)


async def test_a_control_request_is_sent_again_where_its_connection_was_closed() -> None:
    """A kept connection may close just then. Other methods are not sent twice."""
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")

    async with answering(serve) as origin, Upstream(Limits()) as upstream:
        for _ in range(2):
            assert await upstream.get(f"{origin}/x?y=1", patience(5)) == (200, b"ok")
        assert served == 2
        with pytest.raises(UpstreamFailure, match="closed the connection"):
            await upstream.post(f"{origin}/x?y=1", {}, patience(5))


async def test_an_answer_to_a_control_request_is_taken_in_turns() -> None:
    """Probes and metrics are read by the same client: one of another library has no such bound."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + framed(b"x") * 20_000 + END)
        await reader.read()

    most = 0
    received = EngineStream.received

    def counted(self: EngineStream, data: bytes) -> None:
        nonlocal most
        before = self._buffered
        received(self, data)
        most = max(most, self._buffered - before)

    with mock.patch.object(EngineStream, "received", counted):
        async with answering(serve) as origin, Upstream(Limits()) as upstream:
            assert await upstream.get(f"{origin}/metrics", patience(10)) == (200, b"x" * 20_000)
    assert 0 < most <= response_stream._TURN_CHUNKS
