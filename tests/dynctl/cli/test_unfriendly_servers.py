"""What the command line says of servers that are not there, not ours, slow or failing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from tests.http_servers import Exchange, HttpServer
from tests.waiting import patience


class Server(HttpServer):
    """Answers every request with ``status`` and ``body``; holds them until ``free`` is set."""

    status = 200
    body = b"{}"

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    def respond(self, exchange: Exchange) -> None:
        self.free.wait(patience(30))
        exchange.reply(self.body, self.status, content_type="application/json")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.free.set()


def test_an_unreachable_frontend(dynctl):
    ran = dynctl("workers", "list", "--frontend", "http://127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "http://127.0.0.1:1 does not answer" in ran.err
    assert "dynctl serve frontend --worker" in ran.err


def test_too_slow(dynctl, server):
    server.free.clear()
    ran = dynctl("workers", "list", "--frontend", server.url, "--timeout", "0.2")
    assert (ran.code, ran.out) == (4, "")
    assert f"{server.url}/v1/workers did not answer within 0.2 s" in ran.err
    assert "--timeout 0.6" in ran.err


@pytest.mark.parametrize(
    ("status", "body", "code", "expected"),
    [
        (200, b"<html>", 3, "not as a dynctl frontend of this version"),
        (200, b"[1]", 3, "not as a dynctl frontend of this version"),
        (200, b'{"workers": [{"name": 5}]}', 3, "not as a dynctl frontend of this version"),
        (404, b"", 2, "404, not a dynctl frontend"),
        (404, b'{"detail":"Not Found"}', 2, "404, not a dynctl frontend"),
        (404, b"<html>\n<h1>Not Found</h1></html>", 2, "404, not a dynctl frontend"),
        (502, b"<!DOCTYPE HTML>\n<html>", 3, "failed with 502: a web page"),
        (401, b'{"error": {"message": "a token is needed"}}', 2, "needs a token (401): a token"),
        (
            403,
            b'{"error": {"code": "not_the_operator", "message": "GET /v1/workers: no; send it"}}',
            2,
            "refuses this caller (403): no; send it",
        ),
        (400, b'{"error": {"message": "limit: too high"}}', 2, "answered 400: limit: too high"),
        (500, b"oops", 3, "failed with 500: oops"),
        (503, b'{"error": "draining"}', 3, "failed with 503: draining"),
    ],
)
def test_strange_answers(dynctl, server, status, body, code, expected):
    server.status, server.body = status, body
    ran = dynctl("workers", "list", "--frontend", server.url)
    assert (ran.code, ran.out) == (code, "")
    assert expected in ran.err
    assert server.url in ran.err
    assert "Traceback" not in ran.err


def test_another_server_on_the_default_port_is_not_ours(dynctl, server, monkeypatch):
    monkeypatch.setattr("dynctl.sources.named.DEFAULT_FRONTEND", server.url)
    server.body = json.dumps({"hello": "I am somebody else"}).encode()
    ran = dynctl("workers", "list")
    assert ran.code == 3
    assert f"no dynctl frontend answers at {server.url}" in ran.err


@pytest.mark.parametrize("command", [("workers", "list"), ("check",), ("hits", "--for", "1s")])
def test_a_slow_server_on_the_default_port_is_not_a_missing_one(
    dynctl, server, monkeypatch, command
):
    """Under load a frontend can need seconds: then no answer is known, not the absence of one."""
    for module in ("dynctl.sources.named", "dynctl.sources.dynamo.check_facts"):
        monkeypatch.setattr(f"{module}.DEFAULT_FRONTEND", server.url)
    server.free.clear()
    ran = dynctl(*command, "--timeout", "0.2")
    assert (ran.code, ran.out) == (4, "")
    assert f"{server.url}/v1/config did not answer within 0.2 s" in ran.err
    assert "--timeout 0.6 waits longer" in ran.err


def test_the_version_of_a_slow_server_on_the_default_port_is_not_left_out(
    dynctl, server, monkeypatch
):
    monkeypatch.setattr("dynctl.sources.named.DEFAULT_FRONTEND", server.url)
    server.free.clear()
    ran = dynctl("version", "--timeout", "0.2")
    assert ran.code == 3
    assert "did not answer within 0.2 s" in ran.out


def test_an_answer_without_end_is_cut(dynctl, server, monkeypatch):
    monkeypatch.setattr("dynctl.sources.client.FrontendClient.max_bytes", 1000)
    server.body = b"[" + b" " * 10_000
    ran = dynctl("workers", "list", "--frontend", server.url)
    assert (ran.code, "the response is over 1,000 bytes" in ran.err) == (3, True)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://h:99999", "http://h/?q=1", "http://h:0"]
)
def test_a_url_that_is_none(dynctl, url):
    ran = dynctl("workers", "list", "--frontend", url)
    assert (ran.code, ran.out) == (2, "")
    assert f"--frontend {url}: expected http://HOST:PORT" in ran.err


def test_the_url_of_a_test_is_read_before_it_is_announced(dynctl):
    ran = dynctl("test", "ftp://x")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ftp://x: expected http://HOST:PORT\n")


@pytest.mark.parametrize(
    "command", [("workers", "list", "--frontend"), ("record", "r", "--frontend"), ("test",)]
)
def test_http_where_https_was_named_is_advised(dynctl, server, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    ran = dynctl(*command, server.url.replace("http:", "https:"))
    assert ran.code == 3
    assert "if it serves http, give its URL with http://" in ran.err


def test_a_proxy_of_the_machine_sees_nothing(dynctl, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    server.body = b'{"workers": []}'
    ran = dynctl("workers", "list", "--frontend", server.url)
    assert (ran.code, "no workers are registered" in ran.out) == (0, True)
