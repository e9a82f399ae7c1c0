"""The lean client: every way to frame an answer, cut at every place, and answers that lie."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.serving.engines import http_client, response_stream
from dynctl.serving.engines.apis import EventCut
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.http_client import EngineClient
from dynctl.serving.engines.response_stream import ClientBounds, EngineStream
from tests.waiting import patience, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STREAM = CHUNKED + b"5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\n\r\n"


class Script:
    """A server that answers each request with the next list of pieces; None closes."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: list[bytes | None], **bounds):
    script = Script(*answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/x"
    client = EngineClient(ClientBounds(**bounds))
    try:
        yield script, client
    finally:
        client.close()
        server.close()
        await server.wait_closed()


async def piped(stream: EngineStream, take: Callable[[bytes], bool]) -> bool:
    """Pipe to ``take``, which returns False when its side is full."""
    ready = True

    def write(chunks: bytes) -> None:
        nonlocal ready
        ready = take(chunks)

    def seen(_chunks: list[bytes]) -> int:
        nonlocal ready
        was, ready = ready, True
        return int(was)

    return await stream.pipe(write, seen, EveryByte())


class EveryByte(EventCut):
    """Takes each part of a stream for whole events."""

    def whole(self, piece: bytes) -> bytes:
        return piece


async def whole(client, url, limit=1_000_000):
    stream = await client.post(url, b"{}", {"x-request-id": "r"})
    return stream.status, await stream.read(limit)


async def test_the_request_as_it_is_sent():
    async with serving([STREAM]) as (script, client):
        await client.post(script.url, b'{"a":1}', {"x-request-id": "r", "bad": "a\r\nb: c"})
        host = script.url.split("/")[2]
        assert script.requests == [
            b"POST /v1/x HTTP/1.1\r\nhost: "
            + host.encode()
            + b"\r\ncontent-type: application/json\r\naccept-encoding: identity\r\n"
            b'content-length: 7\r\nx-request-id: r\r\n\r\n{"a":1}'
        ]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (STREAM, b"hello, world"),
        (HEAD + b"content-length: 5\r\n\r\nhello", b"hello"),
        (HEAD + b"Content-Length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nabc\r\n0\r\ntrailer: x\r\n\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM, b"hello, world"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 2 + STREAM, b"hello, world"),
    ],
)
async def test_an_answer_cut_at_every_byte_reads_the_same(answer, body):
    for at in range(1, len(answer)):
        async with serving([answer[:at], answer[at:]]) as (script, client):
            assert await whole(client, script.url) == (200, body)


async def test_an_answer_until_the_end_of_the_connection():
    async with serving([HEAD + b"\r\n", b"hel", b"lo", None]) as (script, client):
        assert await whole(client, script.url) == (200, b"hello")


async def test_connections_are_kept_and_shared_between_paths():
    async with serving([STREAM], [STREAM], [STREAM]) as (script, client):
        for path in ("", "y", "z"):
            assert await whole(client, script.url + path) == (200, b"hello, world")
        assert script.connections == 1


async def test_idle_connections_are_closed_without_another_request(monkeypatch):
    monkeypatch.setattr(http_client, "KEEPALIVE_S", 0.05)
    async with serving([STREAM], [STREAM], [STREAM], [STREAM]) as (script, client):
        await asyncio.gather(*(whole(client, script.url) for _ in range(4)))
        assert client._open
        await until(lambda: not client._open)
        assert not client._idle


async def test_close_and_bytes_too_many_cost_the_connection():
    closing = HEAD + b"connection: close\r\ncontent-length: 1\r\n\r\na"
    extra = HEAD + b"content-length: 1\r\n\r\nab"
    async with serving([closing], [extra], [STREAM]) as (script, client):
        for body in (b"a", b"a", b"hello, world"):
            assert await whole(client, script.url) == (200, body)
        assert script.connections == 3


async def test_a_stream_that_is_closed_early_cuts_its_connection():
    async with serving([CHUNKED, b"5\r\nhello\r\n"], [STREAM]) as (script, client):
        stream = await client.post(script.url, b"", {})
        assert await stream.readany() == b"hello"
        stream.close()
        assert await whole(client, script.url) == (200, b"hello, world")
        assert script.connections == 2


@pytest.mark.parametrize(
    ("pieces", "kind", "says"),
    [
        ([None], "reset", "closed the connection"),
        ([HEAD, None], "reset", "closed the connection"),
        ([CHUNKED, b"5\r\nhel", None], "reset", "closed the connection during its response"),
        ([CHUNKED, b"5\r\nhello\r\n", None], "reset", "closed the connection during its response"),
        (
            [HEAD + b"content-length: 9\r\n\r\nhello", None],
            "reset",
            "closed the connection during its response",
        ),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "protocol", "not a final HTTP/1.1"),
        ([b"HTTP/1.1 101 Switching\r\n\r\n"], "protocol", "not a final HTTP/1.1"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 9 + STREAM], "protocol", "more than 8 informational"),
        (
            [b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n", None],
            "reset",
            "closed the connection",
        ),
        ([HEAD + b"no colon\r\n\r\n"], "protocol", "malformed header"),
        ([HEAD + b"a b: c\r\n\r\n"], "protocol", "malformed header"),
        ([HEAD + b" folded: c\r\n\r\n"], "protocol", "malformed header"),
        ([HEAD + b"retry-after: 1\nset-cookie: a=b\r\n\r\n"], "protocol", "malformed header"),
        ([HEAD + b"retry-after: 1\rx\r\n\r\n"], "protocol", "malformed header"),
        ([HEAD + b"retry-after: \x00\x1b[31m\r\n\r\n"], "protocol", "malformed header"),
        ([HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n"], "protocol", "not a number"),
        ([HEAD + b"content-length: +1\r\n\r\n"], "protocol", "not a number"),
        (
            [HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"],
            "protocol",
            "ambiguous length",
        ),
        ([HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n"], "protocol", "ambiguous length"),
        ([HEAD + b"x: " + b"a" * 40_000 + b"\r\n\r\n"], "protocol", "headers too long"),
        ([CHUNKED + b"0x5\r\nhello\r\n"], "protocol", "invalid chunk size"),
        ([CHUNKED + b"-5\r\nhello\r\n"], "protocol", "invalid chunk size"),
        ([CHUNKED + b"ffffffff\r\n"], "protocol", "invalid chunk size"),
        ([CHUNKED + b"5\r\nhelloX\r\n"], "protocol", "chunk longer than its size"),
        ([CHUNKED + b"1" * 400], "protocol", "chunk without a size"),
        ([CHUNKED + b"0\r\n" + b"a: b\r\n" * 10_000], "protocol", "trailers too long"),
    ],
)
async def test_answers_that_break_or_lie(pieces, kind, says):
    async with serving(pieces) as (script, client):
        with pytest.raises(UpstreamFailure) as caught:
            await whole(client, script.url)
        assert caught.value.kind == kind
        assert says in str(caught.value)
        assert str(caught.value).startswith(script.url.removesuffix("/v1/x"))


async def test_more_than_the_limit():
    async with serving([STREAM]) as (script, client):
        with pytest.raises(UpstreamFailure, match="more than 5 bytes"):
            await whole(client, script.url, limit=5)


async def test_silence_has_an_end_before_and_inside_the_answer():
    async with serving([b""], [CHUNKED], first_byte_s=0.05) as (script, client):
        for _ in range(2):
            with pytest.raises(UpstreamFailure, match="sent no output within") as caught:
                await whole(client, script.url)
            assert caught.value.kind == "timeout"
    # A pause is noticed before a first byte would be missed.
    begun: list[bytes | None] = [CHUNKED, b"1\r\na\r\n"]
    async with serving(begun, first_byte_s=3600.0, idle_s=0.05) as (script, client):
        with pytest.raises(UpstreamFailure, match="sent nothing for") as caught:
            async with asyncio.timeout(patience(10)):
                await whole(client, script.url)
        assert caught.value.kind == "timeout"


async def test_a_request_may_have_a_time_out_of_its_own_and_waits_in_the_set():
    async with serving([CHUNKED], [CHUNKED], first_byte_s=60.0) as (script, client):
        with pytest.raises(UpstreamFailure, match="no output within"):
            await (await client.post(script.url, b"", {}, first_byte_s=0.05)).read(10)
        waiting: set[EngineStream] = set()
        stream = await client.post(script.url, b"", {}, waiting=waiting)
        assert waiting == {stream}
        reading = asyncio.create_task(stream.read(10))
        await asyncio.sleep(0)
        stream.abandon(UpstreamFailure("ejected", "the engine is ejected"))
        with pytest.raises(UpstreamFailure, match="ejected"):
            await reading


async def test_nobody_listens():
    async with serving() as (script, client):
        pass
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(UpstreamFailure) as caught:
            await client.post(script.url.replace("127.0.0.1", host), b"", {})
        assert caught.value.kind == "refused"
    with pytest.raises(UpstreamFailure) as caught:
        await client.post("http://no-such-host.invalid:1/", b"", {})
    assert caught.value.kind == "connect"


@pytest.mark.parametrize("at", range(1, 30))
async def test_a_pipe_passes_whole_frames_and_nothing_of_the_end(at):
    frames = b"5\r\nhello\r\n7\r\n, world\r\n"
    later = frames + b"0\r\n\r\n"
    async with serving([CHUNKED + b"1\r\n>\r\n", later[:at], later[at:]]) as (script, client):
        stream = await client.post(script.url, b"", {})
        seen = await stream.readany()
        taken: list[bytes] = []

        def take(chunks: bytes) -> bool:
            taken.append(chunks)
            assert chunks.endswith(b"\r\n")
            return True

        while not await piped(stream, take):
            seen += await stream.readany()
        payload = frames.replace(b"5\r\n", b"").replace(b"7\r\n", b"").replace(b"\r\n", b"")
        passed = b"".join(taken)
        for size in (b"5\r\n", b"7\r\n", b"\r\n"):
            passed = passed.replace(size, b"")
        assert seen + passed == b">" + payload


@pytest.mark.parametrize("fast", [b"x" * 20, b"x"], ids=["whole", "short"])
async def test_a_connection_after_a_pipe_is_that_of_the_next_request(fast: bytes):
    chunk = b"%x\r\n%b\r\n" % (len(fast), fast)
    answer: list[bytes | None] = [CHUNKED + b"1\r\n>\r\n", chunk, chunk, chunk, b"0\r\n\r\n"]
    async with serving(*[answer] * 4) as (script, client):
        for _ in range(4):
            stream = await client.post(script.url, b"", {})
            got = await stream.readany()
            taken: list[bytes] = []

            def take(chunks: bytes, taken: list[bytes] = taken) -> bool:
                taken.append(chunks)
                return True

            while not await piped(stream, take):
                got += await stream.readany()
            passed = unframed(b"".join(taken))
            assert sorted(got + passed) == sorted(b">" + fast * 3)
            stream.close()
        assert script.connections == 1


class NoWire:
    """A connection that only exists; ``take`` gets what arrives, if there is one."""

    keep = True
    take: Callable[[bytes], None] | None = None

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def relay(self, take: Callable[[bytes], None] | None) -> None:
        self.take = take

    def finished(self, *, clean: bool) -> None: ...


def unframed(frames: bytes) -> bytes:
    """The payload of whole chunks."""
    found = b""
    while frames:
        line, _, rest = frames.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        assert size
        assert rest[size : size + 2] == b"\r\n"
        found, frames = found + rest[:size], rest[size + 2 :]
    return found


PAYLOADS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40),
        st.sampled_from([b"\r\n", b"5\r\nhello\r\n", b"data: 0123456789\n\n", b"\n"]),
    ),
    min_size=1,
    max_size=8,
)
#: What a server may write after a size, and zeros before it.
SIZES = st.sampled_from(["{:x}", "{:X}", "00{:x}", "{:x};a=b", "{:x};a=" + "b" * 90])


@given(
    PAYLOADS,
    st.data(),
    st.lists(st.integers(0, 400), max_size=8),
    st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_a_pipe_and_reading_together_give_the_body(payloads, data, cuts, answers):
    """Whatever arrives in one read, and whenever the taker is full."""
    frames = b""
    for payload in payloads:
        size = data.draw(SIZES).format(len(payload)).encode()
        frames += size + b"\r\n" + payload + b"\r\n"
    frames += b"0\r\n\r\n"
    places = sorted({0, len(frames), *(cut for cut in cuts if cut < len(frames))})
    pieces = [frames[a:b] for a, b in pairwise(places)]

    async def body() -> bytes:
        wire = NoWire()
        stream = EngineStream(wire, "http://e", ClientBounds())
        stream.received(CHUNKED + b"1\r\n>\r\n")
        got, calls = await stream.readany(), 0

        def take(chunks: bytes) -> bool:
            nonlocal got, calls
            got += unframed(chunks)
            calls += 1
            return bool(answers[calls % len(answers)])

        async def read() -> None:
            nonlocal got
            while not await piped(stream, take):
                got += await stream.readany()

        reading = asyncio.create_task(read())
        for piece in pieces:
            await asyncio.sleep(0)
            (wire.take or stream.received)(piece)
        await reading
        assert wire.take is None
        return got

    assert asyncio.run(body()) == b">" + b"".join(payloads)


async def test_only_sizes_are_kept_of_chunks():
    response_stream._chunk_size.cache_clear()
    response_stream._WHOLE.clear()
    wire = NoWire()
    stream = EngineStream(wire, "http://e", ClientBounds())
    stream.received(CHUNKED + b"1\r\n>\r\n")
    await stream.readany()
    piping = asyncio.create_task(piped(stream, lambda chunks: True))
    await asyncio.sleep(0)
    assert wire.take is not None
    for number in range(50):
        wire.take(b"15;a=%080d\r\nsecret of a user %04d\r\n" % (0, number))
        wire.take(b"15\r\nsecret of a user %04d\r\n" % number)
    wire.take(b"0\r\n\r\n")
    assert await piping
    assert response_stream._chunk_size.cache_info().currsize <= 4
    assert response_stream._WHOLE == {b"15\r\ns": 27}


async def test_a_pipe_whose_taker_is_full_goes_on_by_reading():
    pieces: list[bytes | None] = [
        CHUNKED + b"1\r\n>\r\n",
        b"1\r\na\r\n",
        b"1\r\nb\r\n",
        b"1\r\nc\r\n0\r\n\r\n",
    ]
    async with serving(pieces) as (script, client):
        stream = await client.post(script.url, b"", {})
        got = await stream.readany()

        def take(chunks: bytes) -> bool:
            nonlocal got
            got += chunks[3:-2]
            return False

        while not await piped(stream, take):
            got += await stream.readany()
        assert got.replace(b"\r\n1\r\n", b"") == b">abc"


async def test_a_pipe_that_breaks_says_so():
    pieces = [CHUNKED + b"1\r\n>\r\n", b"1\r\na\r\n5\r\nhe", None]
    async with serving(pieces) as (script, client):
        stream = await client.post(script.url, b"", {})
        await stream.readany()
        taken: list[bytes] = []

        def take(chunks: bytes) -> bool:
            taken.append(chunks)
            return True

        async def to_the_end() -> None:
            while not await piped(stream, take):
                await stream.readany()

        with pytest.raises(UpstreamFailure, match="closed the connection during"):
            await to_the_end()
        assert b"he" not in b"".join(taken)  # half a chunk is not passed on


async def test_a_request_whose_host_is_silent_ends_before_its_output(monkeypatch):
    """Another engine may take it. A response with output may still arrive."""
    monkeypatch.setattr(http_client, "SILENT_S", 0.0)
    monkeypatch.setattr(http_client, "LOOK_S", 0.01)
    silent: list[object] = []

    def all_of_silent_hosts(connections):
        silent.extend(connections)
        return list(connections)

    monkeypatch.setattr(http_client, "connections_of_silent_hosts", all_of_silent_hosts)
    begun = CHUNKED + b"5\r\nhello\r\n"
    async with serving([begun], [CHUNKED]) as (script, client):
        stream = await client.post(script.url, b"{}", {})
        assert await stream.readany() == b"hello"
        silent.clear()
        waiting = await client.post(script.url, b"{}", {})
        with pytest.raises(UpstreamFailure, match="its host does not respond") as caught:
            await waiting.readany()
        assert (caught.value.kind, caught.value.retryable) == ("vanished", True)
        assert len(set(silent)) == 1
        assert not stream.done
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.readany(), 0.05)
