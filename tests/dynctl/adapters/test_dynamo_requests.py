"""The request plane's client against an endpoint that behaves, and one that does not."""

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
import uvloop

from dynctl.adapters.dynamo.call_home import CallHome, network_of
from dynctl.adapters.dynamo.request_plane import RequestLimits, TcpRequestPlane
from dynctl.adapters.ports import RequestPlaneError
from dynctl.wire.dynamo.discovery import Instance
from dynctl.wire.dynamo.request_plane import FrameDecoder
from tests.dynctl.adapters.dynamo_endpoint import (
    PATH,
    FakeEndpoint,
    Fault,
    fake_endpoint,
    frame,
)
from tests.waiting import patience

LONG = 20.0
SHORT = 0.2
WHO = r"dynamo\.backend\.worker_kv_query_source_1 of worker 2040a1fd555013b9 at 127\.0\.0\.1:\d+ "


@pytest.fixture
async def plane() -> AsyncIterator[TcpRequestPlane]:
    """Whatever a test does: afterwards no task is left and nothing listens."""
    made = TcpRequestPlane()
    yield made
    await made.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def ask(
    plane: TcpRequestPlane,
    instance: Instance,
    body: Any = None,
    *,
    timeout: float = LONG,
    max_bytes: int = 1_000_000,
) -> list[Any]:
    return [item async for item in plane.ask(instance, body, timeout=timeout, max_bytes=max_bytes)]


# -- as it should be -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_items_come_decoded_and_in_order(plane: TcpRequestPlane, codec: str) -> None:
    async with fake_endpoint(lambda body: [body, "ä", 2**64 - 1, None], codec=codec) as endpoint:
        assert await ask(plane, endpoint.instance(), {"n": [1]}) == [
            {"n": [1]},
            "ä",
            2**64 - 1,
            None,
        ]
        [question] = endpoint.questions
        await endpoint.ended.wait()
    assert question.path == PATH == question.headers["x-endpoint-path"]
    assert question.headers["request-id"] == question.control["id"]
    assert question.control["payload_codec"] == codec
    assert endpoint.controls == []  # no request was cancelled
    assert (plane.calls.matched, plane.calls.dropped) == (1, 0)


async def test_an_answer_of_no_items(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda _: []) as endpoint:
        assert await ask(plane, endpoint.instance()) == []


async def test_a_worker_that_connects_back_has_accepted_the_request(
    plane: TcpRequestPlane,
) -> None:
    async with fake_endpoint(lambda _: [1], fault=Fault.CALLS_WITHOUT_ACK) as endpoint:
        for _ in range(3):
            assert await ask(plane, endpoint.instance()) == [1]
        assert plane.calls.matched == 3


async def test_a_host_that_the_system_gives_up_has_vanished(plane: TcpRequestPlane) -> None:
    """All requests that wait for it: other workers may get them."""
    async with fake_endpoint(lambda _: [1], fault=Fault.NO_ACK) as endpoint:
        asked = [asyncio.create_task(ask(plane, endpoint.instance())) for _ in range(2)]
        await until(lambda: len(endpoint.questions) == 2)
        for worker in list(plane._workers.values()):
            for connection in list(worker.open):
                connection.connection_lost(OSError(errno.ETIMEDOUT, "timed out"))
                connection.abort()
        for request in asked:
            with pytest.raises(RequestPlaneError, match="its host does not respond") as caught:
                await request
            assert caught.value.kind == "vanished"


async def test_requests_without_an_acknowledgement_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynctl.adapters.dynamo.request_plane._UNACKNOWLEDGED", 1)
    plane = TcpRequestPlane(limits=RequestLimits(connections=1))
    async with fake_endpoint(lambda _: [1], fault=Fault.CALLS_WITHOUT_ACK) as endpoint:
        assert await ask(plane, endpoint.instance()) == [1]
        with pytest.raises(RequestPlaneError, match="before it accepted"):
            await ask(plane, endpoint.instance())
        assert await ask(plane, endpoint.instance()) == [1]  # over another connection
        await plane.close()


def test_one_turn_of_the_event_loop_accepts_several_connections() -> None:
    class Home(CallHome):
        accepted = 0

        def opened(self, connection: Any) -> None:
            self.accepted += 1
            super().opened(connection)

    async def turns() -> int:
        home = Home(strangers=64, handshake_s=LONG)
        port = await home.port("127.0.0.1")
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]
        count = 0
        while home.accepted < len(clients) and count < 1000:
            await asyncio.sleep(0)
            count += 1
        for client in clients:
            client.close()
        await home.close()
        return count

    assert uvloop.run(turns()) < 12


async def test_raw_items_are_left_undecoded(plane: TcpRequestPlane) -> None:
    large = {"Events": {"events": ["x" * 100] * 20_000, "last_event_id": 1}}
    async with fake_endpoint(lambda _: [large, 1]) as endpoint:
        raw = plane.ask_raw(endpoint.instance(), None, timeout=LONG, max_bytes=5_000_000)
        items = [item async for item in raw]
    assert [item.codec for item in items] == ["msgpack", "msgpack"]
    assert [item.decode() for item in items] == [large, 1]


async def test_many_questions_at_once_share_one_listener(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda body: [body] * 3) as endpoint:
        answers = await asyncio.gather(
            *(ask(plane, endpoint.instance(), number) for number in range(30))
        )
    assert answers == [[number] * 3 for number in range(30)]
    homes = {q.control["connection_info"]["info"].split('"address":"')[1].split('"')[0]
             for q in endpoint.questions}  # fmt: skip
    assert len(homes) == 1


@pytest.mark.parametrize(
    ("listen", "advertised", "address"),
    [
        (None, None, "127.0.0.1:"),
        ("127.0.0.2", None, "127.0.0.2:"),
        ("0.0.0.0", None, "127.0.0.1:"),
        (None, "127.0.0.3", "127.0.0.3:"),
        ("localhost", None, "localhost:"),
        ("127.0.0.2", "192.0.2.1", "192.0.2.1:"),
        (None, "::ffff:192.0.2.1", "192.0.2.1:"),
    ],
)
async def test_workers_are_told_the_route_to_them_unless_told_otherwise(
    listen: str | None, advertised: str | None, address: str
) -> None:
    plane = TcpRequestPlane(listen_host=listen, advertised_host=advertised)
    elsewhere = address.startswith("192.0.2.1")  # TEST-NET: no worker reaches us there
    async with fake_endpoint(fault=Fault.NO_ACK if elsewhere else Fault.NONE) as endpoint:
        if elsewhere:
            with pytest.raises(RequestPlaneError):
                await ask(plane, endpoint.instance(), timeout=SHORT)
        else:
            assert await ask(plane, endpoint.instance(), 1) == [{"asked": 1}]
        info = endpoint.questions[-1].control["connection_info"]["info"]
        assert f'"address":"{address}' in info
    await plane.close()


async def test_who_cannot_listen_says_which_variable_to_set() -> None:
    plane = TcpRequestPlane(listen_host="192.0.2.1")  # TEST-NET: no address of this host
    async with fake_endpoint() as endpoint:
        with pytest.raises(RequestPlaneError, match=r"192\.0\.2\.1.*DYN_TCP_RESPONSE_STREAM_HOST"):
            await ask(plane, endpoint.instance())
    await plane.close()


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "timeout", "problem"),
    [
        (Fault.NO_ACK, SHORT, "did not accept the request within 0.2 s"),
        (Fault.CLOSES_BEFORE_ACK, LONG, "closed the connection before it accepted"),
        (Fault.REFUSES, LONG, f"refused the request: Server unavailable: unknown endpoint {PATH}"),
        (Fault.LONG_REFUSAL, LONG, "sent an invalid response|does not use Dynamo's"),
        (
            Fault.NEVER_CALLS,
            SHORT,
            r"did not connect back to 127\.0\.0\.1:\d+ within 0.2 s.*DYN_TCP",
        ),
        (Fault.WRONG_SUBJECT, SHORT, "did not connect back"),
        (Fault.ERROR_PROLOGUE, LONG, "returned an error: no such model"),
        (Fault.NO_PROLOGUE, LONG, "sent an invalid response, after 0 items"),
        (Fault.HALF_A_FRAME, LONG, "ended its response inside a frame, after 1 items"),
        (Fault.HUGE_ITEM, LONG, r"after 1 items: .* 1,099,511,627,800 bytes, over the limit of "),
        (Fault.JUNK_ITEM, LONG, "sent an invalid response, after 1 items"),
        (Fault.CLOSES_IN_THE_MIDDLE, LONG, "ended its response early, after 1 items"),
        (Fault.SENTINEL_IN_THE_MIDDLE, LONG, "ended its response early, after 1 items"),
        (Fault.STALLS, SHORT, "sent nothing for 0.2 s in its response, after 1 items"),
    ],
)
async def test_a_fault_is_an_error_that_names_the_worker(
    plane: TcpRequestPlane, fault: Fault, timeout: float, problem: str
) -> None:
    async with fake_endpoint(lambda _: [1, 2], fault=fault) as endpoint:
        with pytest.raises(RequestPlaneError, match=WHO + f"(?:.*)(?:{problem})"):
            await ask(plane, endpoint.instance(), timeout=timeout)
        if fault is Fault.WRONG_SUBJECT:
            await endpoint.ended.wait()
            assert plane.calls.dropped == 1
        if fault is Fault.STALLS:
            await endpoint.ended.wait()
            assert endpoint.controls == ["kill"]
        endpoint.fault = Fault.NONE
        assert await ask(plane, endpoint.instance()) == [1, 2]  # and the next one is fine


async def test_items_before_a_fault_were_given(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda _: ["first"], fault=Fault.CLOSES_IN_THE_MIDDLE) as endpoint:
        items = plane.ask(endpoint.instance(), None, timeout=LONG, max_bytes=1_000_000)
        assert await anext(items) == "first"
        with pytest.raises(RequestPlaneError):
            await anext(items)


async def test_the_bound_is_on_the_whole_answer(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda _: ["x" * 1_000] * 10) as endpoint:
        assert len(await ask(plane, endpoint.instance(), max_bytes=11_000)) == 10
        with pytest.raises(RequestPlaneError, match=r"after 4 items: .* of 5,000 for the whole"):
            await ask(plane, endpoint.instance(), max_bytes=5_000)
        await endpoint.ended.wait()


async def test_who_calls_too_late_is_dropped(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(fault=Fault.CALLS_LATE) as endpoint:
        with pytest.raises(RequestPlaneError, match="did not connect back"):
            await ask(plane, endpoint.instance(), timeout=SHORT)
        endpoint.release.set()
        await endpoint.ended.wait()
        assert (plane.calls.matched, plane.calls.dropped) == (0, 1)


async def test_an_address_where_nobody_listens(plane: TcpRequestPlane) -> None:
    async with fake_endpoint() as endpoint:
        gone = endpoint.instance()
    with pytest.raises(RequestPlaneError, match=WHO + "is not reachable: "):
        await ask(plane, gone)


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ({"transport": "nats_tcp", "address": "dynamo_backend.generate-1"}, "needs NATS"),
        ({"transport": "velo"}, "a transport that is not supported .'velo'"),
        ({"address": "127.0.0.1"}, "cannot be requested: address: expected HOST:PORT/PATH"),
        ({"codec": "protobuf"}, "cannot be requested: codec: expected one of msgpack, json"),
    ],
)
async def test_an_instance_that_cannot_be_asked(
    plane: TcpRequestPlane, others: dict[str, Any], problem: str
) -> None:
    async with fake_endpoint() as endpoint:
        with pytest.raises(RequestPlaneError, match=f"2040a1fd555013b9 .*{problem}"):
            await ask(plane, endpoint.instance(**others))
        assert endpoint.questions == []


# -- leaving early ---------------------------------------------------------------------------------


async def test_leaving_early_kills_the_rest(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda _: range(100_000)) as endpoint:
        items = plane.ask(endpoint.instance(), None, timeout=LONG, max_bytes=100_000_000)
        async with aclosing(items):
            async for item in items:
                assert item == 0
                break
        await endpoint.ended.wait()
        assert endpoint.calls_ended == 1


async def test_who_wanted_one_item_of_a_whole_answer_kills_nothing(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda _: [1]) as endpoint:
        items = plane.ask(endpoint.instance(), None, timeout=LONG, max_bytes=1_000)
        async with aclosing(items):
            assert await anext(items) == 1
            await asyncio.sleep(0)
        await endpoint.ended.wait()
        assert endpoint.controls == []


@pytest.mark.parametrize("fault", [Fault.NO_ACK, Fault.NEVER_CALLS, Fault.STALLS])
async def test_a_cancelled_question_leaves_nothing(plane: TcpRequestPlane, fault: Fault) -> None:
    async with fake_endpoint(lambda _: [1, 2], fault=fault) as endpoint:
        seen: list[Any] = []

        async def read() -> None:
            async for item in plane.ask(
                endpoint.instance(), None, timeout=LONG, max_bytes=1_000_000
            ):
                seen.append(item)

        task = asyncio.create_task(read())
        await until(lambda: endpoint.questions and (fault is not Fault.STALLS or seen))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if fault is Fault.STALLS:
            await endpoint.ended.wait()
            assert endpoint.controls == ["kill"]


@pytest.mark.parametrize("fault", [Fault.NEVER_CALLS, Fault.STALLS])
async def test_closing_the_plane_ends_what_is_being_asked(fault: Fault) -> None:
    async with fake_endpoint(lambda _: [1, 2], fault=fault) as endpoint:
        plane = TcpRequestPlane()
        task = asyncio.create_task(ask(plane, endpoint.instance()))
        await until(
            lambda: endpoint.questions and (fault is not Fault.STALLS or plane.calls.matched)
        )
        await plane.close()
        with pytest.raises(RequestPlaneError):
            await task
        with pytest.raises(RequestPlaneError, match="was closed"):
            await ask(plane, endpoint.instance())


async def until(condition: Any) -> None:
    async with asyncio.timeout(patience(10)):
        while not condition():  # noqa: ASYNC110 - the other side has no event for it
            await asyncio.sleep(0.005)


# -- strangers at the listener ---------------------------------------------------------------------


async def listener_of(plane: TcpRequestPlane, endpoint: FakeEndpoint) -> tuple[str, int]:
    await ask(plane, endpoint.instance())
    info = endpoint.questions[-1].control["connection_info"]["info"]
    host, port = info.split('"address":"')[1].split('"')[0].rsplit(":", 1)
    return host, int(port)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here.example\r\n\r\n",
        struct.pack(">QQQ", 5_000, 0, 0),
        struct.pack(">QQQ", 2**64 - 1, 2**64 - 1, 0),
        struct.pack(">QQQ", 0, 0, 0),
        frame({"subject": "x", "stream_type": "response"}),
        frame({"stream_type": "response"}),
        frame({"subject": "x"})[:-1],
        b"",
    ],
)
async def test_a_stranger_is_dropped_unanswered(said: bytes) -> None:
    plane = TcpRequestPlane(limits=RequestLimits(handshake_s=SHORT))
    async with fake_endpoint() as endpoint:
        reader, writer = await asyncio.open_connection(*await listener_of(plane, endpoint))
        writer.write(said)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert plane.calls.dropped == 1
        assert await ask(plane, endpoint.instance(), 1) == [{"asked": 1}]
    await plane.close()


async def test_silent_strangers_do_not_keep_workers_out() -> None:
    plane = TcpRequestPlane(limits=RequestLimits(strangers=3, handshake_s=LONG))
    async with fake_endpoint() as endpoint:
        home = await listener_of(plane, endpoint)
        crowd = [await asyncio.open_connection(*home) for _ in range(10)]
        await until(lambda: plane.calls.dropped >= 7)
        assert await ask(plane, endpoint.instance(), 1) == [{"asked": 1}]
        for _, writer in crowd:
            writer.close()
    await plane.close()


class _Taken:
    """A receiver that notes whether its worker connected."""

    is_called = False

    def called(self, transport: asyncio.Transport, frames: FrameDecoder) -> None:
        self.is_called = True

    def received(self) -> None: ...

    def host_is_silent(self) -> None: ...

    def lost(self, error: Exception | None) -> None: ...


@pytest.mark.parametrize("flooders", ["127.0.0.2", None])
async def test_a_flood_of_one_address_closes_its_own_connections(flooders: str | None) -> None:
    home = CallHome(strangers=3, handshake_s=LONG)
    port = await home.port("127.0.0.1")
    taken = _Taken()
    subject = home.expect(taken)
    _, worker = await asyncio.open_connection("127.0.0.1", port)
    local = None if flooders is None else (flooders, 0)
    crowd = []
    for number in range(20):
        crowd.append(await asyncio.open_connection("127.0.0.1", port, local_addr=local))
        # One after the other: which of them was first has to be certain.
        await until(lambda n=number: home.counts.dropped >= n - 2)
    worker.write(frame({"subject": subject, "stream_type": "response"}))
    if flooders is None:
        # The limit that docs/security.md names: at the worker's own address it is the oldest.
        await until(lambda: home.counts.dropped >= 17)
        assert (taken.is_called, home.counts.matched) == (False, 0)
    else:
        await until(lambda: taken.is_called)
        assert home.counts.matched == 1
    for _, writer in [*crowd, (None, worker)]:
        writer.close()
    await home.close()


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("192.0.2.1", 1), "192.0.2.1"),
        (("::ffff:192.0.2.1", 1, 0, 0), "::ffff:192.0.2.1"),
        (("2001:db8::1", 1, 0, 0), bytes.fromhex("20010db800000000")),
        (("fe80::1%lo", 1, 0, 1), bytes.fromhex("fe80000000000000")),
        (None, ""),
    ],
)
def test_an_ipv6_host_counts_as_one_address(peer: Any, network: str | bytes) -> None:
    assert network_of(peer) == network


async def test_workers_that_connect_all_at_once_are_not_taken_for_strangers() -> None:
    plane = TcpRequestPlane(limits=RequestLimits(strangers=3, handshake_s=LONG))
    async with fake_endpoint(fault=Fault.CALLS_LATE) as endpoint:
        asked = [asyncio.ensure_future(ask(plane, endpoint.instance(), n)) for n in range(128)]
        await until(lambda: len(endpoint.questions) == 128)
        endpoint.release.set()
        assert await asyncio.gather(*asked) == [[{"asked": n}] for n in range(128)]
        assert (plane.calls.matched, plane.calls.dropped) == (128, 0)
    await plane.close()


async def test_a_second_caller_with_the_same_subject_is_dropped(plane: TcpRequestPlane) -> None:
    async with fake_endpoint(lambda _: [1, 2], fault=Fault.STALLS) as endpoint:
        items = plane.ask(endpoint.instance(), None, timeout=LONG, max_bytes=1_000_000)
        async with aclosing(items):
            assert await anext(items) == 1
            info = endpoint.questions[-1].control["connection_info"]["info"]
            home = info.split('"address":"')[1].split('"')[0].rsplit(":", 1)
            subject = info.split('"subject":"')[1].split('"')[0]
            reader, writer = await asyncio.open_connection(home[0], int(home[1]))
            writer.write(frame({"subject": subject, "stream_type": "response"}))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert (plane.calls.matched, plane.calls.dropped) == (1, 1)
