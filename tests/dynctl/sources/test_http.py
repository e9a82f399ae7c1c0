"""Failed requests to frontends: the user gets the plain reason, whichever library raised it."""

from __future__ import annotations

import asyncio
import errno
import socket

import httpx
import pytest
import zmq

from dynctl.base.errors import TimedOut, Unreachable, network_reason
from dynctl.sources.client import AsyncFrontendClient, FrontendClient
from dynctl.sources.dynamo.frontends import PolledFrontends
from dynctl.sources.http import async_client, frontend_url, read_response
from tests.waiting import patience


@pytest.fixture
def closed_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


async def test_a_refused_connection_is_reported_in_plain_text(closed_url: str):
    async with async_client() as client:
        with pytest.raises(Unreachable) as caught:
            await AsyncFrontendClient(client, closed_url, patience(5)).fleet(None)
    assert caught.value.message == "connection refused"
    polled = PolledFrontends([closed_url], patience(5))
    await polled.read()
    assert polled.problem == f"{closed_url}: connection refused"
    await polled.close()
    with pytest.raises(Unreachable, match=f"^{closed_url} does not answer: connection refused$"):
        FrontendClient(closed_url).models()


async def test_an_unknown_host_is_reported_without_a_number():
    async with async_client() as client:
        with pytest.raises(Unreachable) as caught:
            await read_response(client, "http://nowhere.invalid:1", 100, patience(10))
    assert "Errno" not in caught.value.message
    assert "All connection attempts failed" not in caught.value.message


async def test_a_connection_that_breaks_and_one_that_is_silent():
    closed = asyncio.Event()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.transport.abort()
        closed.set()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.set()

    for serve, expected, message in (
        (cut, Unreachable, ""),
        (silent, TimedOut, "no response within 0.2 s"),
    ):
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with async_client() as client:
                with pytest.raises(expected) as caught:
                    await read_response(client, url, 100, 0.2)
            await closed.wait()
            closed.clear()
        assert message in caught.value.message
        assert caught.value.message
        assert "Error" not in caught.value.message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "connection refused"),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno "
                "111] Connect call failed ('127.0.0.1', 1)"
            ),
            "connection refused",
        ),
        (
            OSError(
                "Multiple exceptions: [Errno 101] Connect call failed ('::1', 1, 0, 0), [Errno "
                "111] Connect call failed ('127.0.0.1', 1)"
            ),
            "the network is not reachable, connection refused",
        ),
        (
            OSError(errno.EHOSTUNREACH, "Connect call failed ('10.0.0.1', 1)"),
            "no route to the host",
        ),
        (TimeoutError(errno.ETIMEDOUT, "Connect call failed"), "no response in time"),
        (TimeoutError(), "no response in time"),
        (ConnectionResetError(errno.ECONNRESET, "read"), "the other side closed the connection"),
        (PermissionError(errno.EACCES, "bind"), "no permission to use the address"),
        (
            OSError(errno.EADDRINUSE, "error while attempting to bind on address ('127.0.0.1', 1)"),
            "the address is in use",
        ),
        (zmq.ZMQError(errno.EADDRINUSE), "the address is in use"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "unknown host name"),
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            "unknown host name (the name server does not respond)",
        ),
    ],
)
def test_usual_problems_of_addresses_have_the_same_words_from_every_library(
    error: Exception, reason: str
):
    assert network_reason(error) == reason
    wrapped = httpx.ConnectError("All connection attempts failed")
    wrapped.__cause__ = error
    assert network_reason(wrapped) == (reason if str(error) else "All connection attempts failed")


def test_the_reason_is_found_in_the_chain_of_causes():
    refused = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)")
    library = httpx.ConnectError("All connection attempts failed")
    library.__cause__ = ExceptionGroup("multiple connection attempts failed", [refused])
    assert network_reason(library) == "connection refused"
    late = httpx.ReadTimeout("")
    late.__cause__ = TimeoutError()
    assert network_reason(late) == "no response in time"
    assert network_reason(httpx.ReadError("")) == "the connection failed"
    wrong = httpx.TransportError("the response is over 100 bytes")
    assert network_reason(wrong) == "the response is over 100 bytes"


@pytest.mark.parametrize("typed", ["h:8000", "http://h:8000/", "http://h:8000/v1", "h:8000/v1/"])
def test_the_base_url_of_a_client_names_the_frontend_too(typed: str):
    assert frontend_url(typed) == "http://h:8000"
