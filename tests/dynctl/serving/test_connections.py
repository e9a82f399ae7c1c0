"""Connections that do not send requests are closed, and take no place of others."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web

from dynctl.serving.http.connections import Connections
from dynctl.serving.http.openapi import routes_of
from dynctl.serving.routing.config import Limits
from dynctl.serving.services.indexer import IndexerConfig, IndexerProcess
from tests.dynctl.serving.fleets import chat_body, site, until
from tests.dynctl.serving.sockets import Raw, chat_bytes, raw
from tests.dynctl.serving.test_process import all_read, engine, process
from tests.ports import free_port
from tests.waiting import patience

ENGINE = [{"name": "a0"}]
QUICK = Limits(header_s=0.3, keep_alive_s=0.5, drain_s=1.0)


def clients(fleet) -> Connections:
    found: Connections = fleet.frontend.listeners.connections[-1]
    return found


async def test_silent_connections_and_half_headers_are_closed():
    async with site(ENGINE, limits=QUICK) as fleet:
        for first in (b"", b"GET /live HTTP/1.1\r\nhost: x\r\n", b"PO"):
            async with raw(fleet.frontend.port) as client:
                if first:
                    await client.send(first)
                assert await client.closed() == b""
        assert clients(fleet).timed_out == 3
        await until(lambda: clients(fleet).open == 0)


async def test_a_header_that_trickles_has_the_same_limit():
    async with site(ENGINE, limits=QUICK) as fleet, raw(fleet.frontend.port) as client:

        async def trickle() -> None:
            for byte in b"GET /live HTTP/1.1\r\nx-long: " + b"y" * 1000:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        await client.closed()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert clients(fleet).timed_out == 1


async def test_idle_connections_are_closed_and_requests_are_not():
    slow = [{"name": "a0", "speedup_ratio": 1.0, "prefill_tokens_per_s": 5.0}]
    async with site(slow, limits=QUICK) as fleet, raw(fleet.frontend.port) as client:
        await client.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.answer())[0] == 200
        await client.send(chat_bytes("one two three four five six seven"))
        # Longer than both limits, which hold for connections without a request.
        assert (await client.answer())[0] == 200
        assert await client.closed() == b""


async def test_half_a_header_after_a_request():
    limits = Limits(header_s=0.3, keep_alive_s=60.0, drain_s=1.0)
    async with site(ENGINE, limits=limits) as fleet, raw(fleet.frontend.port) as client:
        await client.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.answer())[0] == 200
        await client.send(b"GET /live HT")
        assert await client.closed() == b""
        assert clients(fleet).timed_out == 1


async def test_a_peer_has_a_maximum_and_its_oldest_waiting_connection_makes_room():
    limits = Limits(peer_connections=3, header_s=60.0, drain_s=1.0)
    async with site(ENGINE, limits=limits) as fleet, AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(raw(fleet.frontend.port)) for _ in range(8)]
        # The five oldest were closed for the newer ones.
        for client in opened[:5]:
            assert await client.closed() == b""
        assert clients(fleet).open == 3
        await opened[-1].send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await opened[-1].answer())[0] == 200


async def test_above_the_maximum_with_requests_in_flight_a_new_connection_gets_503():
    slow = [{"name": "a0", "speedup_ratio": 1.0, "prefill_tokens_per_s": 5.0}]
    limits = Limits(peer_connections=2, drain_s=1.0)
    async with site(slow, limits=limits) as fleet, AsyncExitStack() as stack:
        for _ in range(2):
            client = await stack.enter_async_context(raw(fleet.frontend.port))
            await client.send(chat_bytes("one two three four five six seven eight"))
        await until(lambda: fleet.frontend.core.inference.in_flight == 2)
        third = await stack.enter_async_context(raw(fleet.frontend.port))
        status, body = await third.answer()
        assert (status, body["error"]["code"]) == (503, "connections")
        assert clients(fleet).refused == 1


@pytest.mark.parametrize(
    ("header", "flood"),
    [
        (b"", b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000),
        (b"connection: upgrade\r\nupgrade: websocket\r\n", b"x" * 65536),
    ],
    ids=["requests", "bytes after an upgrade"],
)
async def test_what_waits_behind_a_request_has_a_bound(header: bytes, flood: bytes):
    """More than the system keeps for both ends is not taken while the request runs."""
    slow = [{"name": "a0", "speedup_ratio": 1.0, "prefill_tokens_per_s": 1.0}]
    async with site(slow) as fleet, raw(fleet.frontend.port) as client:
        text = "one two three four five six seven eight nine ten " * 10
        await client.send(chat_bytes(text).replace(b"\r\n", b"\r\n" + header, 1))
        await until(lambda: fleet.frontend.core.inference.in_flight == 1)
        sent, limit = 0, 64 << 20
        with suppress(TimeoutError):
            while sent < limit:
                async with asyncio.timeout(patience(0.5)):
                    await client.send(flood)
                sent += len(flood)
        assert sent < limit
        assert fleet.frontend.core.inference.in_flight == 1
        assert client.writer.transport is not None
        client.writer.transport.abort()


async def test_bytes_that_are_not_http_get_a_400_without_a_traceback(caplog):
    async with site(ENGINE) as fleet:
        for sent in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000 + b"\r\n\r\n",
        ):
            async with raw(fleet.frontend.port) as client:
                await client.send(sent)
                status, body = await client.answer()
                assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert "Traceback" not in caplog.text


FRONTEND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.http.server import run_frontend
from dynctl.tokenization import DEMO_MODEL_DIR
port = int(sys.argv[1])
sys.exit(run_frontend(FrontendConfig(
    port=0, system_port=port, workers=tuple(sys.argv[2:]), model_path=DEMO_MODEL_DIR, announce=True,
)))
"""


async def test_400_silent_connections_lock_no_process_with_256_descriptors():
    system = free_port()
    async with (
        aiohttp.ClientSession() as client,
        engine("a0") as (_, ready),
        process("-c", FRONTEND, str(system), f"{ready['url']},name=a0") as (_, record),
        AsyncExitStack() as stack,
    ):
        await all_read(record["url"])
        async with asyncio.timeout(patience(30)):
            for _ in range(400):
                one = await stack.enter_async_context(raw(record["port"]))
                await one.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
            for port, path in (
                (record["port"], "/live"),
                (system, "/health"),
                (system, "/metrics"),
            ):
                async with client.get(f"http://127.0.0.1:{port}{path}") as answer:
                    assert answer.status == 200
            url = f"{record['url']}/v1/chat/completions"
            async with client.post(url, json=chat_body("hello")) as answer:
                assert answer.status == 200


@asynccontextmanager
async def deaf(port: int) -> AsyncIterator[Raw]:
    """A client with a small window that reads only when the test does."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    # A stream reads ahead until its limit.
    reader, writer = await asyncio.open_connection(sock=plain, limit=1)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def reads_nothing(fleet, client: Raw) -> None:
    """Send requests until an answer waits for the client to read."""
    before = clients(fleet).lagging
    while clients(fleet).lagging == before:
        await client.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.sleep(0)


async def test_a_client_that_reads_nothing_of_its_answers_is_closed():
    limits = Limits(unread_s=0.3, drain_s=1.0)
    async with site(ENGINE, limits=limits) as fleet, deaf(fleet.frontend.port) as client:
        await reads_nothing(fleet, client)
        await until(lambda: clients(fleet).open == 0)
        assert clients(fleet).not_read == 1


async def test_clients_that_read_nothing_make_room_for_others():
    limits = Limits(peer_connections=3, header_s=60.0, drain_s=1.0)
    async with site(ENGINE, limits=limits) as fleet, AsyncExitStack() as stack:
        for _ in range(3):
            client = await stack.enter_async_context(deaf(fleet.frontend.port))
            await reads_nothing(fleet, client)
        async with asyncio.timeout(patience(20)):
            status = 503
            while status == 503:
                async with raw(fleet.frontend.port) as other:
                    await other.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    status = (await other.answer())[0]
        assert (status, clients(fleet).not_read) == (200, 1)


class Answering:
    """A server whose answers fill what the system keeps for a client that does not read."""

    def __init__(self, place: Connections, *, ends: bool) -> None:
        self.place = place
        self.port = 0
        self._ends = ends
        self._transport: asyncio.Transport | None = None

    @property
    def waiting(self) -> int:
        """Bytes of the answer that wait here."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._transport = request.transport
        response = web.StreamResponse()
        await response.prepare(request)
        while not (self._ends and self.waiting):
            await response.write(b"x" * 4096)
            await asyncio.sleep(0)
        return response


@asynccontextmanager
async def answering(*, ends: bool, unread_s: float) -> AsyncIterator[Answering]:
    """``ends``: the answer ends with the first bytes that wait; else it has no end."""
    found = Answering(Connections(2, unread_s=unread_s), ends=ends)
    app = web.Application()
    app.router.add_get("/", found.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    listener = socket.create_server(("127.0.0.1", 0))
    await found.place.listen(runner, listener, keepalive_timeout=0.2)
    found.port = listener.getsockname()[1]
    try:
        yield found
    finally:
        await found.place.close()
        await runner.cleanup()


@pytest.mark.parametrize("ask", ["", "connection: close\r\n"])
async def test_an_unread_end_of_an_answer_keeps_no_connection(ask):
    """So few bytes stop no handler, but a transport that is closed goes on until they are read."""
    async with answering(ends=True, unread_s=0.5) as server, deaf(server.port) as client:
        await client.send(f"GET / HTTP/1.1\r\nhost: localhost\r\n{ask}\r\n".encode())
        await until(lambda: server.place.not_read == 1)
        assert server.place.open == 0


async def test_a_client_that_reads_slowly_stays():
    async with answering(ends=False, unread_s=60.0) as server, deaf(server.port) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: server.place.lagging == 1)
        now = asyncio.get_running_loop().time()
        server.place.close_unread(now)
        for minute in range(1, 4):
            before = server.waiting
            async with asyncio.timeout(patience(10)):
                while server.waiting == before:
                    await client.reader.read(4096)
            server.place.close_unread(now + 59 * minute)
            assert server.place.open == 1
        await until(lambda: server.place.lagging == 1)  # it wrote on, and waits again
        server.place.close_unread(now + 59 * 4)
        server.place.close_unread(now + 59 * 4 + 61)
        assert (server.place.open, server.place.not_read) == (0, 1)


async def test_no_answer_names_the_versions_of_libraries():
    async with site(ENGINE) as fleet:
        for sent in (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            b"\x16\x03\x01 not HTTP\r\n\r\n",
        ):
            async with raw(fleet.frontend.port) as client:
                await client.send(sent)
                head = (await client.closed()).partition(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.")
            assert b"\r\nserver: dynctl" in head
            assert b"aiohttp" not in head
            assert b"python" not in head


async def after_head(port: int, path: str) -> bytes:
    """What follows the head of the answer to HEAD on the same connection."""
    live = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with raw(port) as client:
        await client.send(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() + live)
        _, _, rest = (await client.closed()).partition(b"\r\n\r\n")
    return rest


async def test_an_answer_to_head_has_no_body():
    """A proxy would read the body as the answer to the next request."""
    async with site(ENGINE) as fleet:
        app = fleet.frontend.build_app()
        paths = {path for method, path, _ in routes_of(app) if method == "GET" and "{" not in path}
        assert {"/v1/view", "/v1/recording", "/v1/index"} <= paths
        for path in sorted(paths):
            asked = f"{path}?seconds=1" if path == "/v1/recording" else path
            rest = await after_head(fleet.frontend.port, asked)
            assert rest.startswith(b"HTTP/1.1 200"), path
    process = IndexerProcess(IndexerConfig(port=0))
    await process.start()
    try:
        for path in ("/dump", "/v1/index", "/workers", "/metrics"):
            assert (await after_head(process.port, path)).startswith(b"HTTP/1.1 200"), path
    finally:
        await process.close()
