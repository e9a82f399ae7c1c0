"""Requests over a real nats-server, with and without a worker at the subject."""

from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynctl.adapters.nats.requests import NatsMessenger
from dynctl.adapters.ports import RequestPlaneError
from tests.contract.nats_server import nats_server


async def test_a_request_reaches_its_subject_and_the_reply_comes_back(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as server:
        worker = Client()
        await worker.connect(f"nats://{server.address}")
        heard: list[tuple[bytes, dict[str, str]]] = []

        async def accept(message: Msg) -> None:
            heard.append((message.data, dict(message.headers or {})))
            await message.respond(b"" if message.data == b"yes" else b"no such endpoint")

        await worker.subscribe("dynamo_backend.generate-1", cb=accept)
        await worker.flush()
        messenger = NatsMessenger(f"nats://{server.address}")
        try:
            assert await messenger.local_host() == "127.0.0.1"
            sent = ("dynamo_backend.generate-1", b"yes", {"request-id": "r"}, 5.0)
            assert await messenger.request(*sent) == b""
            sent = ("dynamo_backend.generate-1", b"other", {"request-id": "r"}, 5.0)
            assert await messenger.request(*sent) == b"no such endpoint"
            assert heard[0] == (b"yes", {"request-id": "r"})
            with pytest.raises(RequestPlaneError, match="does not listen at absent"):
                await messenger.request("absent", b"", {}, 5.0)
        finally:
            await messenger.close()
            await worker.close()


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
            await messenger.request("any", b"", {}, 5.0)
        await messenger.close()
