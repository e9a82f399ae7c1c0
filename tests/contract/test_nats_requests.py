"""Requests over a real nats-server, with and without a worker at the subject."""

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynctl.adapters.nats import requests
from dynctl.adapters.nats.address import NatsAuth
from dynctl.adapters.nats.requests import NatsListener, NatsMessenger
from dynctl.adapters.ports import PlaneInterrupted, RequestPlaneError
from dynctl.base.errors import Unreachable
from tests.contract.certificates import Authority
from tests.contract.nats_accounts import NatsAccounts
from tests.contract.nats_server import NatsServer, end_without_report, nats_server
from tests.waiting import patience, until


@contextlib.asynccontextmanager
async def messenger_of(
    server: NatsServer, auth: NatsAuth | None = None, **options: Any
) -> AsyncIterator[NatsMessenger]:
    """What sends requests over the server."""
    messenger = NatsMessenger(f"nats://{server.address}", auth, **options)
    try:
        yield messenger
    finally:
        await messenger.close()


@contextlib.asynccontextmanager
async def worker_at(
    server: NatsServer, subject: str, accept: Callable[[Msg], Awaitable[None]], **options: Any
) -> AsyncIterator[None]:
    """A worker that gets the requests of the subject."""
    worker = Client()
    await worker.connect(f"nats://{server.address}", **options)
    try:
        await worker.subscribe(subject, cb=accept)
        await worker.flush()
        yield
    finally:
        await worker.close()


async def answer(message: Msg) -> None:
    await message.respond(b"heard")


async def test_a_request_reaches_its_subject_and_the_reply_comes_back(tmp_path: Path) -> None:
    heard: list[tuple[bytes, dict[str, str]]] = []
    subject = "dynamo_backend.generate-1"

    async def accept(message: Msg) -> None:
        heard.append((message.data, dict(message.headers or {})))
        await message.respond(b"" if message.data == b"yes" else b"no such endpoint")

    async with (
        nats_server(tmp_path) as server,
        worker_at(server, subject, accept),
        messenger_of(server) as messenger,
    ):
        assert await messenger.local_host() == "127.0.0.1"
        sent = ({"request-id": "r"}, 5.0)
        assert await messenger.request(subject, b"yes", *sent) == b""
        assert await messenger.request(subject, b"other", *sent) == b"no such endpoint"
        assert heard[0] == (b"yes", {"request-id": "r"})
        with pytest.raises(RequestPlaneError, match="does not listen at absent"):
            await messenger.request("absent", b"", {}, 5.0)


async def test_a_server_that_is_not_reachable_is_named_with_the_reason() -> None:
    with socket.socket() as bound:
        # Bound and not listening: it refuses connections.
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        messenger = NatsMessenger(f"nats://{address}")
        with pytest.raises(RequestPlaneError) as caught:
            await messenger.connected()
    assert str(caught.value).endswith(f"{address}: connection refused")


async def test_a_lost_server_is_named_and_found_again(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as server:
        messenger = NatsMessenger(f"nats://user:secret@{server.address}")
        await messenger.local_host()
        await server.kill()
        with pytest.raises(RequestPlaneError) as caught:
            await messenger.request("any", b"", {}, 1.0)
        assert "secret" not in str(caught.value)
        with pytest.raises(RequestPlaneError, match="NATS, which is not reachable") as caught:
            await messenger.request("any", b"", {}, 1.0)
        assert "secret" not in str(caught.value)
        await server.start()
        with pytest.raises(RequestPlaneError, match="does not listen at any"):
            await messenger.request("any", b"", {}, patience(5.0))
        await messenger.close()


async def test_requests_that_wait_for_a_silent_server_share_one_attempt() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    messenger = NatsMessenger(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        asked = (messenger.request("any", b"", {}, 1.0) for _ in range(20))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} == {RequestPlaneError}
        assert {one.kind for one in found if isinstance(one, RequestPlaneError)} == {"plane"}
        assert len(connections) == 1
    finally:
        await messenger.close()
        server.close()
        for writer in connections:
            writer.close()


async def test_a_server_that_stops_responding_is_the_problem_and_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str | None] = []
    async with (
        nats_server(tmp_path) as server,
        messenger_of(server, report=problems.append) as messenger,
    ):
        await messenger.local_host()
        with server.frozen():
            with pytest.raises(RequestPlaneError, match="needs NATS, which does not") as caught:
                await messenger.request("any", b"", {}, 0.1)
            assert caught.value.kind == "plane"
            assert "needs NATS" in (problems[-1] or "")
        # Without another request.
        await until(lambda: problems[-1] is None)
        await server.kill()
        await until(lambda: "connection refused" in (problems[-1] or ""))
        await server.start()
        await until(lambda: problems[-1] is None)
        with pytest.raises(RequestPlaneError, match="does not listen at any yet") as caught:
            await messenger.request("any", b"", {}, patience(5.0))
        assert caught.value.kind == "plane", "its worker may be on its way back"
        monkeypatch.setattr(requests, "RETURN_S", 0.0)
        with pytest.raises(RequestPlaneError, match="does not listen at any") as caught:
            await messenger.request("any", b"", {}, patience(5.0))
        assert caught.value.kind == "connect"


async def test_a_connection_that_ended_just_now_is_not_the_workers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed(*_: object) -> None:
        raise RuntimeError("the handler is closed")  # uvloop's

    async with nats_server(tmp_path) as server:
        messenger = NatsMessenger(f"nats://{server.address}")
        client = await messenger.connected()
        for write in ("publish", "flush"):
            monkeypatch.setattr(client, write, closed)
        with pytest.raises(PlaneInterrupted, match="needs NATS, which does not respond"):
            await messenger.request("any", b"", {}, 1.0)
        await messenger.close()


async def test_a_server_that_is_silent_is_noticed_without_a_request(tmp_path: Path) -> None:
    problems: list[str | None] = []
    async with (
        nats_server(tmp_path) as server,
        messenger_of(server, report=problems.append) as messenger,
    ):
        await messenger.local_host()
        with server.frozen():
            await until(lambda: "does not respond" in str(problems[-1:]))
        await until(lambda: problems[-1] is None)


async def test_a_request_waits_for_a_worker_that_comes_back_after_us(tmp_path: Path) -> None:
    """All connect again by themselves, and a worker that is later is not to blame."""
    async with (
        nats_server(tmp_path) as server,
        messenger_of(server, report=lambda problem: None) as messenger,
    ):
        await messenger.local_host()
        await server.kill()
        asked = asyncio.create_task(messenger.request("late", b"", {}, patience(5.0)))
        await asyncio.sleep(0.2)
        assert not asked.done(), "it waits for the server too"
        await server.start()
        await until(lambda: messenger._open.is_set())
        await asyncio.sleep(0.2)
        async with worker_at(server, "late", answer):
            assert await asked == b"heard"


async def test_a_request_waits_briefly_for_a_worker_that_lost_its_own_server(
    tmp_path: Path,
) -> None:
    async with nats_server(tmp_path) as server, messenger_of(server) as messenger:
        await messenger.local_host()
        asked = asyncio.create_task(messenger.request("back", b"", {}, patience(5.0)))
        await asyncio.sleep(0.05)
        assert not asked.done()
        async with worker_at(server, "back", answer):
            assert await asked == b"heard"


async def test_a_request_ends_when_its_connection_ends(tmp_path: Path) -> None:
    """Not after its whole time."""
    heard = asyncio.Event()

    async def keep(_message: Msg) -> None:
        heard.set()

    async with (
        nats_server(tmp_path) as server,
        worker_at(server, "slow", keep, allow_reconnect=False),
        messenger_of(server) as messenger,
        asyncio.timeout(patience(30)),
    ):
        asked = asyncio.create_task(messenger.request("slow", b"", {}, 3600.0))
        await heard.wait()
        await server.kill()
        with pytest.raises(PlaneInterrupted) as caught:
            await asked
        assert caught.value.kind == "plane"


async def test_a_request_ends_with_its_connection_where_the_library_does_not_report_the_end(
    tmp_path: Path,
) -> None:
    """The next request finds it closed, and connects again."""
    heard = asyncio.Event()

    async def keep(_message: Msg) -> None:
        heard.set()

    async with (
        nats_server(tmp_path) as server,
        worker_at(server, "slow", keep),
        messenger_of(server) as messenger,
        asyncio.timeout(patience(30)),
    ):
        client = await messenger.connected()
        asked = asyncio.create_task(messenger.request("slow", b"", {}, 3600.0))
        await heard.wait()
        await end_without_report(client)
        assert await messenger.connected() is not client
        with pytest.raises(PlaneInterrupted) as caught:
            await asked
        assert caught.value.kind == "plane"


async def test_a_process_that_stood_still_blames_no_worker(tmp_path: Path) -> None:
    heard = asyncio.Event()

    async def keep(_message: Msg) -> None:
        heard.set()

    async with (
        nats_server(tmp_path) as server,
        worker_at(server, "slow", keep),
        messenger_of(server) as messenger,
    ):
        asked = asyncio.create_task(messenger.request("slow", b"", {}, 1.0))
        await heard.wait()
        time.sleep(2.0)  # noqa: ASYNC251 - as a stopped process does
        with pytest.raises(PlaneInterrupted, match="this process stood still"):
            await asked
        with pytest.raises(RequestPlaneError, match="did not accept") as caught:
            await messenger.request("slow", b"", {}, 0.2)
        assert caught.value.kind == "timeout"


async def test_expired_credentials_are_named_and_those_of_the_new_file_are_used(
    tmp_path: Path,
) -> None:
    accounts, file = NatsAccounts(), tmp_path / "creds"
    accounts.write(file, seconds=2)
    problems: list[str | None] = []
    auth = NatsAuth(credentials_file=str(file))
    async with (
        nats_server(tmp_path, accounts.config) as server,
        messenger_of(server, auth, report=problems.append) as messenger,
    ):
        await messenger.connected()
        await until(lambda: f"NATS_AUTH_CREDENTIALS_FILE {file}" in str(problems))
        accounts.write(file)
        await until(lambda: problems[-1] is None)
        await messenger.connected()


async def test_a_certificate_of_another_authority_is_named_with_our_file(tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    certificate, key = first.issue("server")
    config = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}'
    async with nats_server(tmp_path, config) as server:
        messenger = NatsMessenger(f"tls://{server.address}", NatsAuth(ca_file=str(second.file)))
        try:
            expected = rf"not trusted: .*NATS_TLS_CA_CERT_PATH: {second.file}"
            with pytest.raises(RequestPlaneError, match=expected):
                await messenger.connected()
            shutil.copy(first.file, second.file)
            await messenger.connected()
        finally:
            await messenger.close()


@pytest.mark.parametrize(
    ("permissions", "missing"),
    [
        ('publish: {deny: ["worker"]}', "to publish to worker"),
        ('subscribe: {deny: ["_INBOX.>"]}', r"to subscribe to _INBOX\.>"),
    ],
)
async def test_a_permission_that_is_missing_is_named_and_blames_no_worker(
    tmp_path: Path, permissions: str, missing: str
) -> None:
    def users(permissions: str) -> str:
        user = f'{{user: "user", password: "user", permissions: {{{permissions}}}}}'
        return f'authorization {{ users = [{user}, {{user: "w", password: "w"}}] }}'

    async def answer(message: Msg) -> None:
        await message.respond(b"heard")

    problems: list[str | None] = []
    async with nats_server(tmp_path, users(permissions)) as server:
        messenger = NatsMessenger(f"nats://{server.address}", report=problems.append)
        worker = Client()
        await worker.connect(f"nats://w:w@{server.address}")
        await worker.subscribe("worker", cb=answer)
        await worker.flush()
        try:
            for _ in range(2):
                with pytest.raises(RequestPlaneError, match=missing) as caught:
                    await asyncio.wait_for(
                        messenger.request("worker", b"", {}, 3600.0), patience(10)
                    )
                assert caught.value.kind == "plane"
                assert "needs a permission of NATS" in (problems[-1] or "")
            server.configure(users(""))
            async with asyncio.timeout(patience(10)):
                while problems[-1] is not None:
                    with contextlib.suppress(RequestPlaneError):
                        await messenger.request("worker", b"", {}, 3600.0)
        finally:
            await messenger.close()
            await worker.close()


async def test_a_request_that_is_too_large_for_the_server_is_named(tmp_path: Path) -> None:
    async with (
        nats_server(tmp_path, "max_payload: 1000") as server,
        messenger_of(server) as messenger,
    ):
        with pytest.raises(RequestPlaneError, match=r"2,000 bytes, over .* 1,000") as caught:
            await messenger.request("any", bytes(2000), {}, patience(5.0))
        assert caught.value.kind == "size"


async def test_a_listener_gets_the_requests_of_its_subjects(tmp_path: Path) -> None:
    def take(body: bytes, headers: Mapping[str, str]) -> str:
        return f"{headers.get('request-id')}: {body.decode()}"

    async with nats_server(tmp_path) as server:
        listener = NatsListener(f"nats://{server.address}")
        messenger = NatsMessenger(f"nats://{server.address}")
        sent = (b"body", {"request-id": "r"}, patience(5))
        try:
            listener.listen("one", take)
            listener.listen("two", take)
            await listener.listening()
            assert await messenger.request("one", *sent) == b"r: body"
            assert await messenger.listens("two", patience(5))
            listener.forget("two")
            await listener.listening()
            assert not await messenger.listens("two", patience(5))
            await listener.hush()
            assert not await messenger.listens("one", patience(5))
        finally:
            await listener.close()
            await messenger.close()


async def test_a_listener_is_not_ready_without_its_server_and_finds_it_again(
    tmp_path: Path,
) -> None:
    problems: list[str | None] = []
    async with nats_server(tmp_path) as server:
        address = f"nats://user:secret@{server.address}"
        listener = NatsListener(address, report=problems.append)
        messenger = NatsMessenger(address)
        try:
            listener.listen("one", lambda body, headers: "heard")
            await listener.listening()
            await server.kill()
            await until(lambda: len(problems) == 1)
            assert "NATS, which is not reachable" in (problems[0] or "")
            assert "secret" not in (problems[0] or "")
            with pytest.raises(Unreachable, match="request plane needs NATS"):
                await listener.listening()
            await server.start()
            await until(lambda: problems[-1] is None)
            assert await messenger.request("one", b"", {}, patience(5)) == b"heard"
        finally:
            await listener.close()
            await messenger.close()


async def test_a_subject_that_the_server_refuses_is_named(tmp_path: Path) -> None:
    users = """authorization { users = [
        {user: "user", password: "user", permissions: {subscribe: ["open", "_INBOX.>"]}}
    ] }"""
    async with nats_server(tmp_path, users) as server:
        listener = NatsListener(f"nats://{server.address}")
        try:
            listener.listen("open", lambda body, headers: "")
            await listener.listening()
            listener.listen("closed", lambda body, headers: "")
            with pytest.raises(Unreachable, match="cannot listen at closed: NATS refuses it"):
                await listener.listening()
        finally:
            await listener.close()
