"""Commands and a frontend with TLS: --ca-cert, and what a certificate that is not trusted says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from tests.dynctl.serving.test_listeners import write_certificate


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a frontend without workers, and its certificate."""
    cert, key = write_certificate(tmp_path_factory.mktemp("tls"), "frontend")
    loop = asyncio.new_event_loop()
    frontend = build_frontend(FrontendConfig(port=0, tls_cert=cert, tls_key=key))
    loop.run_until_complete(frontend.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield frontend.url, cert
    asyncio.run_coroutine_threadsafe(frontend.close(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize(
    "command",
    [["workers", "list"], ["config", "show"], ["version"], ["top", "--once"]],
    ids=" ".join,
)
def test_with_the_authority(dynctl, https, command, monkeypatch):
    url, cert = https
    monkeypatch.setenv("DYNCTL_CA_CERT", "")
    ran = dynctl(*command, "--frontend", url, "--ca-cert", str(cert))
    assert ran.code == 0, ran.err


def test_with_the_variable(dynctl, https, monkeypatch):
    url, cert = https
    monkeypatch.setenv("DYNCTL_CA_CERT", str(cert))
    assert dynctl("config", "show", "--frontend", url).code == 0


def test_a_context_keeps_the_authority(dynctl, https, monkeypatch, tmp_path):
    url, cert = https
    monkeypatch.setenv("DYNCTL_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("DYNCTL_CA_CERT", "")
    monkeypatch.chdir(cert.parent)
    add = ("context", "add", "gw", "--frontend", url, "--ca-cert", cert.name)
    assert dynctl(*add).code == 0
    monkeypatch.setenv("DYNCTL_CA_CERT", "")  # as in another process
    monkeypatch.chdir(tmp_path)
    ran = dynctl("workers", "list", "--context", "gw")
    assert ran.code == 0, ran.err
    assert str(cert) in dynctl("context", "show", "gw", "-o", "json").out
    # Another server than the context's does not get the context's authority.
    monkeypatch.setenv("DYNCTL_CA_CERT", "")
    other = url.replace("127.0.0.1", "localhost")
    assert dynctl("context", "use", "gw").code == 0
    ran = dynctl("workers", "list", "--frontend", other)
    assert (ran.code, "its certificate is not trusted" in " ".join(ran.err.split())) == (3, True)


def test_a_certificate_that_is_not_trusted(dynctl, https, monkeypatch):
    monkeypatch.setenv("DYNCTL_CA_CERT", "")
    ran = dynctl("workers", "list", "--frontend", https[0])
    assert ran.code == 3
    assert "its certificate is not trusted: self-signed certificate" in " ".join(ran.err.split())
    assert "--ca-cert FILE" in ran.err


def test_https_to_a_server_without_tls(dynctl, monkeypatch):
    monkeypatch.setenv("DYNCTL_CA_CERT", "")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1024)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ran = dynctl("workers", "list", "--frontend", f"https://{address}")
        thread.join()
    assert ran.code == 3
    assert "TLS: " in ran.err
    assert "give its URL with http://" in ran.err


def test_http_to_a_frontend_with_tls(dynctl, https):
    address = https[0].removeprefix("https://")
    ran = dynctl("workers", "list", "--frontend", f"http://{address}")
    assert ran.code == 3
    assert "give its URL with https://" in ran.err


def test_a_file_that_is_no_certificate(dynctl, https, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNCTL_CA_CERT", "")
    file = tmp_path / "ca.pem"
    file.write_text("hello")
    for given, problem in (
        (file, "not a PEM file"),
        (tmp_path / "none", "the file does not exist"),
    ):
        ran = dynctl("workers", "list", "--frontend", https[0], "--ca-cert", str(given))
        assert ran.code == 2
        assert problem in ran.err
