"""Bodies of requests: reserved as they arrive, bounded when they expand, and never a 500."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.serving.http.bodies import BODIES, Bodies
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.refusal import HttpError
from tests.dynctl.serving.fleets import chat_body, site, until
from tests.dynctl.serving.sockets import CHAT, chat_bytes, raw

ENGINE = [{"name": "a0"}]
CHAT_JSON = json.dumps(chat_body("hello")).encode()


def held(fleet) -> int:
    """Bytes of bodies that the frontend counts now."""
    bodies: Bodies = fleet.frontend.listeners._runners[-1].app[BODIES]
    return bodies.held


async def test_a_declared_length_over_the_limit_is_refused_at_once():
    async with site(ENGINE) as fleet, raw(fleet.frontend.port) as client:
        await client.send(CHAT + b"content-length: 600000000\r\n\r\n{")
        status, body = await client.answer()
        assert status == 413
        assert body["error"]["code"] == "body_too_large"


async def test_declared_lengths_reserve_nothing():
    limits = Limits(all_bodies_bytes=20_000, body_bytes=16_000, body_s=60.0)
    async with site(ENGINE, limits=limits) as fleet:
        async with asyncio.TaskGroup() as group:
            clients = []
            for _ in range(20):
                context = raw(fleet.frontend.port)
                client = await context.__aenter__()
                clients.append(context)
                group.create_task(client.send(CHAT + b"content-length: 15000\r\n\r\n{"))
        try:
            await until(lambda: held(fleet) == 20)
            assert (await fleet.chat())[0] == 200
        finally:
            for context in clients:
                await context.__aexit__(None, None, None)
        await until(lambda: held(fleet) == 0)


async def test_slow_bodies_take_no_place_of_others():
    limits = Limits(in_flight=2, body_s=60.0)
    async with (
        site(ENGINE, limits=limits) as fleet,
        raw(fleet.frontend.port) as one,
        raw(fleet.frontend.port) as two,
    ):
        for client in (one, two):
            await client.send(CHAT + b"content-length: 15000\r\n\r\n{")
        await until(lambda: fleet.frontend.core.inference.in_flight == 2)
        assert (await fleet.chat())[0] == 200


async def test_one_peer_has_at_most_its_share():
    limits = Limits(all_bodies_bytes=10_000, body_s=60.0)
    async with (
        site(ENGINE, limits=limits) as fleet,
        raw(fleet.frontend.port) as holder,
        raw(fleet.frontend.port, "127.0.0.2") as other,
    ):
        await holder.send(CHAT + b"content-length: 9000\r\n\r\n" + b" " * 7000)
        await until(lambda: held(fleet) == 7000)
        status, body, _ = await fleet.chat("x" * 1000)
        assert status == 529
        assert "7500 bytes, the maximum of one client" in body["error"]["message"]
        await other.send(chat_bytes("y" * 1000))
        assert (await other.answer())[0] == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_compressed_bodies_are_off_by_default(encoding):
    async with site(ENGINE) as fleet:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/route", "/busy_threshold"):
            status, body, headers = await fleet.post(
                path, chat_body("x"), headers={"content-encoding": encoding}
            )
            assert status == 415
            assert "--compressed-requests" in body["error"]["message"]
            assert headers["accept-encoding"] == "identity"


async def test_compressed_bodies_when_enabled():
    async with site(ENGINE, compressed_requests=True) as fleet:
        for encoding, packed in (
            ("gzip", gzip.compress(CHAT_JSON)),
            ("deflate", zlib.compress(CHAT_JSON)),
        ):
            async with raw(fleet.frontend.port) as client:
                await client.send(chat_bytes(encoding=encoding, body=packed))
                assert (await client.answer())[0] == 200
        status, body, _ = await fleet.post(
            "/v1/chat/completions", chat_body("x"), headers={"content-encoding": "br"}
        )
        assert (status, "gzip, deflate" in body["error"]["message"]) == (415, True)


async def test_a_gzip_bomb_ends_at_the_limit_and_stops_nobody():
    limits = Limits(body_bytes=1 << 20)
    bomb = gzip.compress(b" " * (1 << 28))
    assert len(bomb) < 1 << 20
    async with site(ENGINE, limits=limits, compressed_requests=True) as fleet:
        async with raw(fleet.frontend.port) as client:
            await client.send(chat_bytes(encoding="gzip", body=bomb))
            status, body = await client.answer()
            assert (status, body["error"]["code"]) == (413, "body_too_large")
        await until(lambda: held(fleet) == 0)
        assert (await fleet.chat())[0] == 200


@pytest.mark.parametrize(
    "packed",
    [
        b"not gzip at all",
        gzip.compress(CHAT_JSON)[:-4],
        gzip.compress(CHAT_JSON) + b"more",
        gzip.compress(CHAT_JSON)[:20] + b"\xff" * 20,
    ],
    ids=["no gzip", "cut off", "data after it", "damaged"],
)
async def test_a_corrupt_body_is_a_400(packed):
    async with (
        site(ENGINE, compressed_requests=True) as fleet,
        raw(fleet.frontend.port) as client,
    ):
        await client.send(chat_bytes(encoding="gzip", body=packed))
        status, body = await client.answer()
        assert (status, body["error"]["code"]) == (400, "corrupt_body")


class _Request:
    """What Bodies reads of a request, from pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.headers = {"content-encoding": "gzip"}
        self.content_length = None
        self.remote = "peer"
        self.content = self
        self._pieces = pieces

    def is_eof(self) -> bool:
        return False

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@given(st.binary(max_size=3000), st.integers(1, 50), st.integers(0, 60), st.booleans())
@settings(max_examples=60)
def test_any_bytes_in_any_pieces(body, size, damage, cut):
    packed = bytearray(gzip.compress(body))
    if cut:
        del packed[damage:]
    elif damage < len(packed):
        packed[damage] ^= 0xFF
    pieces = [bytes(packed[at : at + size]) for at in range(0, len(packed), size)]
    bodies = Bodies(Limits(body_bytes=2000), compressed=True)

    async def read() -> bytes | HttpError:
        http: Any = _Request(pieces)
        with bodies.of(http) as one:
            try:
                return await one.read(http, 2000)
            except HttpError as error:
                return error

    found = asyncio.run(read())
    assert bodies.held == 0
    if isinstance(found, HttpError):
        assert found.status in (400, 413)
    else:
        assert len(found) <= 2000
