"""Streams that pass from an engine's connection to the client's: what is counted, and the bound."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.response_stream import ClientBounds, EngineStream
from dynctl.serving.http.inference_responses import OutputBlocks, pass_stream
from dynctl.serving.http.plain_requests import ClientRequest, read_head
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.nvext import NvExt

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":41,"total_tokens":48}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


class Client:
    """The transport of a client that does not read."""

    def __init__(self, lags_after: int = 1 << 40) -> None:
        self.passed: list[bytes] = []
        self._lags_after = lags_after
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.passed.append(data)

    def get_write_buffer_size(self) -> int:
        return (1 << 20) * (sum(map(len, self.passed)) > self._lags_after)

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default


class Passing:
    """A stream that is passed on, one read of the engine's connection at a time."""

    def __init__(
        self,
        client: Client,
        *,
        limit: int = 1 << 30,
        blocks: OutputBlocks | None = None,
        first: bytes = EVENT,
    ) -> None:
        self.record = RequestRecord("d", "r", "chat_completions", 0.0, 0.0)
        self.wire = mock.Mock()
        self.wire.relay = self._relay
        self._take: Callable[[bytes], None] | None = None
        self.stream = EngineStream(self.wire, "http://engine", ClientBounds())
        self.stream.received(HEAD + framed(first))
        self._client, self._limit, self._blocks = client, limit, blocks
        self.answering: asyncio.Task[UpstreamFailure | None]

    async def start(self, http: ClientRequest | None = None) -> None:
        head = await self.stream.readany()
        http = http or make_mocked_request("POST", "/v1/chat/completions", transport=self._client)
        answer = cast(Any, SimpleNamespace(response=self.stream, head=head, plan=None))

        async def passing() -> UpstreamFailure | None:
            _, failure = await pass_stream(
                http,
                answer,
                cast(Any, None),
                self.record,
                {},
                nvext=NvExt(),
                blocks=self._blocks,
                limit=self._limit,
                detailed=lambda: True,
            )
            return failure

        self.answering = asyncio.create_task(passing())
        await settled()

    def _relay(self, take: Callable[[bytes], None] | None) -> None:
        self._take = take

    def arrive(self, data: bytes) -> None:
        """The engine's connection receives this in one read."""
        (self._take or self.stream.received)(data)

    async def ends(self) -> UpstreamFailure | None:
        return await asyncio.wait_for(self.answering, 30)


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [1, 3, 400])
@pytest.mark.parametrize("lags_after", [1 << 40, 0, 6000])
async def test_events_usage_and_bytes_are_counted(number: int, lags_after: int):
    client = Client(lags_after)
    passing = Passing(client)
    await passing.start()
    for _ in range(number):
        passing.arrive(framed(EVENT))
        if lags_after < 1 << 40:
            await settled()
    passing.arrive(framed(USAGE))
    passing.arrive(framed(DONE) + b"0\r\n\r\n")
    assert await passing.ends() is None
    record = passing.record
    # The first event, the others and that of the usage, less the role and [DONE].
    assert record.output_events == number + 3 - 2
    assert (record.prompt_tokens, record.reported_output) == (7, 41)
    assert record.output_bytes >= len(EVENT) * (number + 1) + len(USAGE) + len(DONE)
    if lags_after == 1 << 40:
        events = framed(EVENT) * number + framed(USAGE) + framed(DONE)
        assert b"".join(client.passed) == events


async def test_the_head_comes_before_a_long_first_event_in_pieces():
    """The answer is judged by its first 64 KiB, so it may begin within its first event."""
    client = Client()
    http = read_head(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"content-length: 0\r\n\r\n"
    )
    assert http is not None
    http.arrive(cast(Any, SimpleNamespace(transport=client, writing_paused=False)), "", {}, b"")
    passing = Passing(client, first=b'data: {"a": "' + b"x" * 70_000)
    await passing.start(http)
    for piece in (framed(b'"}\n\n'), framed(EVENT), framed(DONE) + b"0\r\n\r\n"):
        passing.arrive(piece)
        await settled()
    assert await passing.ends() is None
    answer = b"".join(client.passed)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.count(b"data: ") == 3


@pytest.mark.parametrize("spare", [1, 4095, 4096, 5000])
async def test_the_bound_of_a_stream_holds_to_the_byte(spare: int):
    whole = 300 * len(framed(EVENT)) + len(EVENT)
    client = Client()
    passing = Passing(client, limit=whole + spare)
    await passing.start()
    for _ in range(300):
        passing.arrive(framed(EVENT))
    assert not passing.wire.abort.called
    passing.arrive(framed(b"x" * spare + b"\n\n"))
    assert passing.wire.abort.called
    failure = await passing.ends()
    assert failure is not None
    assert f"more than {whole + spare} bytes" in str(failure)


async def test_a_stream_within_its_bound_is_not_ended():
    last = framed(DONE) + b"0\r\n\r\n"
    limit = len(EVENT) + 300 * len(framed(EVENT)) + len(DONE)
    passing = Passing(Client(), limit=limit)
    await passing.start()
    for _ in range(300):
        passing.arrive(framed(EVENT))
    passing.arrive(last)
    assert await passing.ends() is None


async def test_output_blocks_are_reported_as_they_come():
    service = mock.Mock()
    request = cast(Any, SimpleNamespace(id="r", block_size=4))
    passing = Passing(Client(), blocks=OutputBlocks(service, request, None))
    await passing.start()
    for number in range(2, 14):
        passing.arrive(framed(EVENT))
        assert service.output_block.call_count == number // 4
    passing.arrive(framed(DONE) + b"0\r\n\r\n")
    assert await passing.ends() is None


async def test_what_was_passed_on_counts_when_the_engine_fails():
    passing = Passing(Client())
    await passing.start()
    for _ in range(5):
        passing.arrive(framed(EVENT))
    passing.stream.ended(None)
    failure = await passing.ends()
    assert failure is not None
    assert failure.kind == "reset"
    assert passing.record.output_events == 6


EVENTS = st.sampled_from(
    [EVENT, DONE[:-2] + b"x" + DONE[-2:], b": ping\r\n\r\n", b"data: {\rdata: }\r\r"]
)


@given(
    st.lists(EVENTS, max_size=8),
    st.sampled_from([b"", b"d", EVENT[:-1], EVENT[:20]]),
    st.lists(st.integers(0, 400), max_size=8),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_only_whole_events_pass(
    events: list[bytes], half: bytes, chunks: list[int], reads: list[int]
):
    """However an engine cuts its stream into chunks, and the network the chunks into reads."""

    def pieces(data: bytes, places: list[int]) -> list[bytes]:
        cuts = sorted({0, len(data), *(at for at in places if at < len(data))})
        return [data[a:b] for a, b in pairwise(cuts)]

    async def passed() -> bytes:
        client = Client()
        passing = Passing(client)
        await passing.start()
        stream = b"".join(map(framed, pieces(b"".join(events) + half, chunks)))
        for read in pieces(stream, reads):
            passing.arrive(read)
        passing.stream.ended(None)
        assert await passing.ends() is not None
        assert not b"".join(client.passed) or client.passed[-1].endswith(b"\r\n")
        return unframed(b"".join(client.passed))

    assert asyncio.run(passed()) == b"".join(events)


def unframed(frames: bytes) -> bytes:
    """The contents of whole chunks."""
    contents = b""
    while frames:
        size, _, rest = frames.partition(b"\r\n")
        at = int(size, 16)
        assert rest[at : at + 2] == b"\r\n"
        contents, frames = contents + rest[:at], rest[at + 2 :]
    return contents


async def test_an_event_without_an_end_is_bounded(monkeypatch):
    monkeypatch.setattr("dynctl.serving.engines.response_stream.EVENT_BYTES", 1000)
    passing = Passing(Client())
    await passing.start()
    for _ in range(21):
        passing.arrive(framed(b"x" * 50))
    assert passing.wire.abort.called
    assert "an event is longer than the maximum" in str(await passing.ends())


async def test_a_client_that_left_ends_the_pipe():
    client = Client()
    passing = Passing(client)
    await passing.start()
    passing.arrive(framed(EVENT))

    client.closed = True
    passing.arrive(framed(EVENT))
    assert passing._take is None
    passing.answering.cancel()
    await asyncio.wait({passing.answering})
