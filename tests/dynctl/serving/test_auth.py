"""The bearer token: what it protects, and the response to a request without it."""

import pytest

from dynctl.serving.http.auth import checked_token
from tests.dynctl.serving.test_admin import decide, serving

TOKEN = "s3cret"
GUARDED = [
    ("GET", "/v1/decisions"),
    ("GET", "/v1/decisions/r1"),
    ("GET", "/v1/view"),
    ("POST", "/busy_threshold"),
]
OPEN = [("GET", "/busy_threshold"), ("GET", "/v1/config"), ("GET", "/metrics")]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_guarded_without_a_token(method, path):
    async with serving(token=TOKEN) as (client, service):
        decide(service)
        got = await client.request(method, path, json={"model": "tiny"})
        assert got.status == 401
        assert got.headers["WWW-Authenticate"] == 'Bearer realm="dynctl"'
        error = (await got.json())["error"]
        assert error["code"] == "token_needed"
        assert f"{method} {path}" in error["message"]
        assert TOKEN not in error["message"]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_guarded_with_the_token(method, path):
    async with serving(token=TOKEN) as (client, service):
        decide(service)
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {TOKEN}"}
            got = await client.request(method, path, json={"model": "tiny"}, headers=headers)
            assert got.status == 200


@pytest.mark.parametrize(
    "header", [f"Basic {TOKEN}", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", TOKEN, "Bearer \xff"]
)
async def test_wrong_credentials(header):
    async with serving(token=TOKEN) as (client, _):
        got = await client.get("/v1/decisions", headers={"Authorization": header})
        assert got.status == 401
        assert (await got.json())["error"]["code"] == "invalid_token"


async def test_bytes_that_are_no_text_are_wrong_and_no_error():
    import asyncio

    async with serving(token=TOKEN) as (client, _):
        assert client.server is not None
        port = client.server.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /v1/decisions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n"
            b"Connection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b" 401 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(("method", "path"), OPEN)
async def test_reading_settings_needs_no_token(method, path):
    async with serving(token=TOKEN) as (client, _):
        assert (await client.request(method, path)).status == 200


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_without_a_configured_token_everybody_may(method, path):
    async with serving() as (client, service):
        decide(service)
        assert (await client.request(method, path, json={"model": "tiny"})).status == 200


@pytest.mark.parametrize("token", ["", "a\nb", "geheimnis-ä", "tab\there"])
def test_tokens_that_no_header_can_carry(token):
    with pytest.raises(ValueError, match="openssl rand"):
        checked_token(token)


def test_no_token_is_fine():
    assert checked_token(None) is None
    assert checked_token(TOKEN) == TOKEN
