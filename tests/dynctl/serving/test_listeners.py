"""Listeners with TLS, and the Unix socket of operators."""

import asyncio
import logging
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynctl.serving.http.server import build_frontend
from dynctl.serving.http.start import StartError
from dynctl.serving.routing.config import FrontendConfig, Limits
from tests.dynctl.serving.fleets import chat_body, events_of, site, until
from tests.dynctl.serving.sockets import raw
from tests.dynctl.serving.test_process import all_read, engine, process

ENGINE = [{"name": "a0"}]


def write_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that is its own authority, and its key, made by the ``openssl`` program."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl program to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
         "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


def name_on(port: int) -> bytes:
    """The certificate that the listener shows now."""
    return ssl.get_server_certificate(("127.0.0.1", port)).encode()


async def test_tls_and_a_new_certificate_without_restart(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cert, key = write_certificate(tmp_path, "first")
    async with site(ENGINE, tls_cert=cert, tls_key=key) as fleet:
        port = fleet.frontend.port
        assert fleet.frontend.url == f"https://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as client:
            chat = fleet.url("/v1/chat/completions")
            async with client.post(chat, json=chat_body("hi"), ssl=trusting(cert)) as answer:
                assert answer.status == 200
            body = chat_body("hi", stream=True)
            async with client.post(chat, json=body, ssl=trusting(cert)) as answer:
                assert events_of(await answer.read())[-1] == "[DONE]"
        before = await asyncio.to_thread(name_on, port)
        # A key of another certificate changes nothing.
        other = tmp_path / "other"
        other.mkdir()
        next_cert, next_key = write_certificate(other, "second")
        key.write_bytes(next_key.read_bytes())
        await until(lambda: "stays as it is" in caplog.text)
        assert await asyncio.to_thread(name_on, port) == before
        cert.write_bytes(next_cert.read_bytes())
        await until(lambda: "loaded again" in caplog.text)
        assert await asyncio.to_thread(name_on, port) != before
        live = fleet.url("/live")
        async with fleet.client.get(live, ssl=trusting(next_cert)) as answer:
            assert answer.status == 200


async def test_plain_http_and_old_tls_are_refused(tmp_path):
    cert, key = write_certificate(tmp_path, "x")
    async with site(ENGINE, tls_cert=cert, tls_key=key) as fleet:
        async with raw(fleet.frontend.port) as client:
            await client.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert not (await client.closed()).startswith(b"HTTP")
        await until(lambda: fleet.frontend.listeners.connections[-1].open == 0)


async def test_clients_without_a_handshake_have_a_place_and_are_closed(tmp_path):
    cert, key = write_certificate(tmp_path, "x")
    limits = Limits(header_s=0.5, peer_connections=3, drain_s=1.0)
    async with site(ENGINE, tls_cert=cert, tls_key=key, limits=limits) as fleet:
        connections = fleet.frontend.listeners.connections[-1]
        async with raw(fleet.frontend.port) as one, raw(fleet.frontend.port) as two:
            await until(lambda: connections.open == 2)
            assert await one.closed() == b""
            assert await two.closed() == b""
        await until(lambda: connections.open == 0)


@pytest.mark.parametrize("wrong", ["missing", "no PEM", "another key"])
def test_files_that_are_no_certificate(tmp_path, wrong):
    cert, key = write_certificate(tmp_path, "x")
    if wrong == "missing":
        key.unlink()
    elif wrong == "no PEM":
        cert.write_text("hello")
    else:
        other = tmp_path / "other"
        other.mkdir()
        key = write_certificate(other, "y")[1]
    with pytest.raises(StartError, match="--tls-cert"):
        build_frontend(FrontendConfig(tls_cert=cert, tls_key=key))


async def test_the_unix_socket_is_for_the_owner_and_counts_as_operator(tmp_path):
    path = tmp_path / "admin.sock"
    values: dict[str, Any] = {"api_token": "t0ken", "api_keys": ("sk-1",)}
    async with site(ENGINE, unix_socket=path, **values) as fleet:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession("http://localhost", connector=connector) as client:
            for call in ("/v1/workers", "/v1/decisions", "/v1/view", "/health"):
                async with client.get(call) as answer:
                    assert answer.status == 200, call
            async with client.post("/v1/chat/completions", json=chat_body("hi")) as answer:
                assert answer.status == 200
            body = {"model": "demo", "active_prefill_tokens_threshold": 10_000}
            async with client.post("/busy_threshold", json=body) as answer:
                assert answer.status == 200
            new = {"url": fleet.engines["a0"].url, "name": "again"}
            async with client.post("/v1/workers", json=new) as answer:
                assert answer.status == 201
            # A form or a text is no body of an operator's program.
            async with client.post("/v1/workers", data="{}") as answer:
                assert answer.status == 415
        assert (await fleet.get("/v1/workers"))[0] == 401
    assert not path.exists()


async def test_a_left_socket_is_replaced_and_a_used_one_is_not(tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with site(ENGINE, unix_socket=path):
        other = build_frontend(FrontendConfig(port=0, unix_socket=path))
        with pytest.raises(StartError, match="another process listens on it"):
            await other.start()
        assert path.is_socket()
    path.write_text("a file")
    with pytest.raises(StartError, match="--unix-socket"):
        await build_frontend(FrontendConfig(port=0, unix_socket=path)).start()
    assert path.read_text() == "a file"


FRONTEND = """
import sys
from pathlib import Path
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.http.server import run_frontend
from dynctl.tokenization import DEMO_MODEL_DIR
cert, key, path, worker = sys.argv[1:]
sys.exit(run_frontend(FrontendConfig(
    port=0, tls_cert=Path(cert), tls_key=Path(key), unix_socket=Path(path), workers=(worker,),
    model_path=DEMO_MODEL_DIR, announce=True,
)))
"""


async def test_both_on_the_event_loop_of_a_process(tmp_path):
    cert, key = write_certificate(tmp_path, "x")
    path = tmp_path / "admin.sock"
    async with (
        engine("a0") as (_, ready),
        process("-c", FRONTEND, str(cert), str(key), str(path), f"{ready['url']},name=a0") as (
            _,
            record,
        ),
        aiohttp.ClientSession() as client,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as local,
    ):
        assert record["url"].startswith("https://")
        await all_read("http://localhost", connector=aiohttp.UnixConnector(str(path)))
        chat = f"{record['url']}/v1/chat/completions"
        # The connection of the first ones gets another protocol for what is no inference.
        for _ in range(3):
            async with client.post(chat, json=chat_body("hi"), ssl=trusting(cert)) as answer:
                assert answer.status == 200
        for path in ("/live", "/v1/models", "/live"):
            async with client.get(f"{record['url']}{path}", ssl=trusting(cert)) as answer:
                assert answer.status == 200
        body = chat_body("hi", stream=True)
        async with client.post(chat, json=body, ssl=trusting(cert)) as answer:
            assert events_of(await answer.read())[-1] == "[DONE]"
        async with local.get("http://localhost/v1/workers") as answer:
            assert answer.status == 200


async def test_a_system_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        frontend = build_frontend(FrontendConfig(port=0, system_port=taken.getsockname()[1]))
        with pytest.raises(StartError, match="use another --system-port"):
            await frontend.start()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"host": "0.0.0.0"}, "they get inference only"),
        ({"host": "0.0.0.0", "api_token": "t"}, "travel as plain text"),
    ],
)
async def test_the_start_names_what_an_open_address_lacks(fields, expected, caplog):
    caplog.set_level(logging.INFO)
    frontend = build_frontend(FrontendConfig(port=0, **fields))
    await frontend.start()
    try:
        frontend.log_start()
    finally:
        await frontend.close()
    shown = [line for line in caplog.messages if "reachable from other hosts" in line]
    assert len(shown) == (expected is not None)
    assert all(expected in line for line in shown)
