"""What only one of the event planes can run into: queues that fill, servers that refuse."""

import asyncio
import contextlib
import os
import resource
import select
import socket
from collections import Counter

import pytest
import zmq
import zmq.asyncio
from nats.aio.client import Client

from dynctl.adapters.nats.address import NatsAuth, nats_servers
from dynctl.adapters.nats.dynamo_events import NatsBounds, NatsEventPlane
from dynctl.adapters.zmq.context import SocketWatch
from dynctl.adapters.zmq.dynamo_events import ZmqBounds, ZmqEventPlane
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.wire.dynamo.discovery import KV_EVENTS, EventChannel, NatsTransport, ZmqTransport
from dynctl.wire.dynamo.events import encode_envelope, encode_zmq_frames
from tests.contract.certificates import own_certificate
from tests.contract.event_rigs import (
    NAME,
    SCOPE,
    NatsRig,
    Recorder,
    ZmqRig,
    envelope,
    nats_plane,
)
from tests.contract.nats_server import end_without_report, nats_server
from tests.contract.zmq_publisher import PATIENCE, running
from tests.waiting import patience

SUBJECT = f"{NatsRig.prefix}.{KV_EVENTS}"
CHANNEL = EventChannel(SCOPE, KV_EVENTS, NAME, NatsTransport(NatsRig.prefix))
SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"
PUBLIC = "UAB2CB576PHBBPQ5ODORRZ2LYCMWPZGWGCN2KDK7DXOIMZASKUY3RLKK"


# -- zmq -------------------------------------------------------------------------------------------


async def test_what_a_full_queue_drops_is_counted():
    context = zmq.asyncio.Context()
    plane = ZmqEventPlane(bounds=ZmqBounds(queue_messages=4))
    pub = context.socket(zmq.XPUB)
    pub.set(zmq.SNDHWM, 4)
    pub.set(zmq.SNDBUF, 64 * 1024)
    pub.bind("tcp://127.0.0.1:*")
    endpoint = pub.get_string(zmq.LAST_ENDPOINT)
    heard = Recorder()
    follower = plane.follow(EventChannel(SCOPE, KV_EVENTS, NAME, ZmqTransport(endpoint)), heard)
    # Sent without giving the loop a turn, so that the follower cannot read meanwhile.
    direct: zmq.Socket[bytes] = zmq.Socket.shadow(pub.underlying)
    sent = 400
    try:
        async with running(follower.run()):
            assert await pub.recv() == b"\x01"
            for number in range(sent):
                direct.send_multipart(encode_zmq_frames(envelope(number, bytes(256 * 1024))))
            # The queues empty again, and one message that comes through shows the hole before it.
            number = sent
            while not heard.numbers or heard.numbers[-1] < sent:
                direct.send_multipart(encode_zmq_frames(envelope(number)))
                number += 1
                await asyncio.sleep(0.01)
    finally:
        await plane.close()
        context.destroy(linger=0)
    assert follower.counts.dropped > 0
    assert "EVENTS_DROPPED" in heard.codes
    last = heard.numbers[-1]
    assert follower.counts.received + follower.counts.dropped == last + 1
    assert sum(each.count for each in heard.conditions) == follower.counts.dropped


async def test_a_turn_wakes_few_of_the_followers_that_are_ready_at_once(monkeypatch):
    turn, woken, rig = 0, Counter[int](), ZmqRig(None)
    note_change = SocketWatch._note_change

    def counted(watch, changed):
        woken[turn] += 1
        note_change(watch, changed)

    monkeypatch.setattr(SocketWatch, "_note_change", counted)
    recorders = [Recorder() for _ in range(40)]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(rig.close)
        for recorder in recorders:
            channel = await rig.publisher()
            await stack.enter_async_context(running(rig.plane.follow(channel, recorder).run()))
            await rig.ready(channel, recorder)
        woken.clear()
        # No turn of the loop until all is sent and has arrived.
        for publisher in rig._publishers.values():
            direct: zmq.Socket[bytes] = zmq.Socket.shadow(publisher.pub.underlying)
            direct.send_multipart(encode_zmq_frames(envelope(0)))
        assert rig.plane.ready is not None
        for descriptor in rig.plane.ready._callbacks:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(20)  # monitors stay without a message
        while not all(recorder.numbers for recorder in recorders):
            await asyncio.sleep(0)
            turn += 1
    assert sum(woken.values()) >= len(recorders)
    assert max(woken.values()) <= 16


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://nowhere", "udp://127.0.0.1:1", "tcp://127.0.0.1:99999"]
)
async def test_an_endpoint_that_cannot_be_dialled_is_told(endpoint):
    plane = ZmqEventPlane()
    heard = Recorder()
    channel = EventChannel(SCOPE, KV_EVENTS, NAME, ZmqTransport(endpoint))
    async with running(plane.follow(channel, heard).run()):
        await heard.until_code("CHANNEL_DISCONNECTED")
    await plane.close()
    assert "expected" in heard.message_of("CHANNEL_DISCONNECTED")


async def test_without_files_it_says_so_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("dynctl.adapters.zmq.dynamo_events._EXHAUSTED_PAUSE_S", 0.01)
    rig = ZmqRig(tmp_path)
    heard, first = Recorder(), Recorder()
    other = await rig.publisher(1)
    channel = await rig.publisher()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running(rig.plane.follow(other, first).run()):
        await rig.ready(other, first)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            follower = rig.plane.follow(channel, heard)
            async with running(follower.run()):
                await heard.until_code("CHANNEL_DISCONNECTED")
                while taken:
                    os.close(taken.pop())
                await rig.ready(channel, heard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for each in taken:
                os.close(each)
    await rig.close()
    assert "ulimit" in heard.message_of("CHANNEL_DISCONNECTED")


# -- nats: what a full queue drops -----------------------------------------------------------------


async def test_what_a_slow_subscription_drops_is_counted(tmp_path):
    async with nats_server(tmp_path) as server:
        plane = nats_plane(server, pending_messages=4)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"CONNECT {}\r\n")
        heard = Recorder()
        follower = plane.follow(CHANNEL, heard)
        number = 0
        async with running(follower.run()):
            await heard.until_code("CHANNEL_CONNECTED")
            async with asyncio.timeout(patience(PATIENCE)):
                while not plane.slow_drops:
                    # In one write, so that the library reads more at once than its queue takes.
                    bodies = [encode_envelope(envelope(number + more)) for more in range(1000)]
                    number += 1000
                    writer.writelines(
                        b"PUB %s %d\r\n%s\r\n" % (SUBJECT.encode(), len(body), body)
                        for body in bodies
                    )
                    await asyncio.sleep(0.05)
                # One message that comes through shows the hole before it.
                while number - 1 not in heard.numbers:
                    body = encode_envelope(envelope(number))
                    number += 1
                    writer.write(b"PUB %s %d\r\n%s\r\n" % (SUBJECT.encode(), len(body), body))
                    await asyncio.sleep(0.05)
        writer.close()
        await plane.close()
    assert follower.counts.dropped == plane.slow_drops > 0
    assert follower.counts.received + follower.counts.dropped == number


# -- nats: reaching it -----------------------------------------------------------------------------


def auth(**fields) -> NatsAuth:
    return NatsAuth(**fields)


async def test_connecting_to_a_server_that_is_there(tmp_path):
    async with nats_server(tmp_path) as server:
        plane = nats_plane(server)
        await plane.connect()
        await plane.connect()
        await plane.close()


@pytest.mark.seed("smart-routing-guide-0.9: infrastructure: NATS_SERVER")
async def test_nothing_listens():
    tasks = asyncio.all_tasks()
    plane = NatsEventPlane("nats://someone:secret@127.0.0.1:9", NatsAuth())
    with pytest.raises(Unreachable) as caught:
        await plane.connect()
    assert "nats://127.0.0.1:9" in caught.value.message
    assert "nats://127.0.0.1:9: connection refused" in caught.value.message
    assert "NATS_SERVER" in caught.value.hint
    assert "secret" not in caught.value.message + caught.value.hint + plane.title
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks


async def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it never accepts
        port = silent.getsockname()[1]
        plane = NatsEventPlane(
            f"127.0.0.1:{port}", NatsAuth(), bounds=NatsBounds(dial=0.1, connect=0.5)
        )
        with pytest.raises(Unreachable, match="no response within"):
            await plane.connect()


def test_the_first_round_ends_within_five_seconds():
    assert NatsBounds().connect < 5


async def test_followers_hear_why_it_cannot_be_reached_and_it_goes_on_trying(tmp_path):
    async with nats_server(tmp_path) as server:
        await server.kill()
        plane = nats_plane(server)
        first, late = Recorder(), Recorder()
        async with running(plane.follow(CHANNEL, first).run()):
            await first.until_code("CHANNEL_DISCONNECTED")
            async with running(plane.follow(CHANNEL, late).run()):
                await late.until_code("CHANNEL_DISCONNECTED")
                await server.start()
                await first.until_code("CHANNEL_CONNECTED")
                await late.until_code("CHANNEL_CONNECTED")
        await plane.close()
    for heard in (first, late):
        assert heard.codes == ["CHANNEL_DISCONNECTED", "CHANNEL_CONNECTED"]
        assert server.address in heard.conditions[0].message


async def test_an_end_that_the_library_does_not_report_is_noticed(tmp_path, monkeypatch):
    clients = []

    class KnownClient(Client):
        def __init__(self):
            super().__init__()
            clients.append(self)

    monkeypatch.setattr("dynctl.adapters.nats.dynamo_events.Client", KnownClient)
    async with nats_server(tmp_path) as server:
        plane = nats_plane(server, ping=0.1)
        heard = Recorder()
        async with running(plane.follow(CHANNEL, heard).run()):
            await heard.until_code("CHANNEL_CONNECTED")
            await end_without_report(clients[0])
            await heard.until_code("CHANNEL_CONNECTED", 2)
        await plane.close()


async def test_it_takes_the_server_that_answers(tmp_path):
    async with nats_server(tmp_path) as server:
        plane = NatsEventPlane(f"127.0.0.1:9,{server.address}", NatsAuth())
        heard = Recorder()
        async with running(plane.follow(CHANNEL, heard).run()):
            await heard.until_code("CHANNEL_CONNECTED")
        assert plane.title == f"nats://127.0.0.1:9, nats://{server.address}"
        await plane.close()


USERS = 'authorization { users = [{user: "u", password: "p@:/w"}] }'


@pytest.mark.parametrize(
    ("config", "accepted", "refused"),
    [
        (USERS, auth(username="u", password="p@:/w"), auth(username="u", password="secret")),
        ('authorization { token: "tok" }', auth(token="tok"), auth(token="secret")),
        (
            "authorization { users = [{nkey: " + PUBLIC + "}] }",
            auth(nkey_seed=SEED),
            auth(nkey_seed="SUsecret"),
        ),
        # What Dynamo says of itself when nothing is set.
        (
            'authorization { users = [{user: "user", password: "user"}] }',
            auth(),
            auth(token="secret"),
        ),
    ],
    ids=["password", "token", "nkey", "default"],
)
async def test_credentials(tmp_path, caplog, config, accepted, refused):
    if accepted.nkey_seed:
        pytest.importorskip("nkeys")
    caplog.set_level("DEBUG", "dynctl")
    async with nats_server(tmp_path, config) as server:
        plane = nats_plane(server, accepted)
        await plane.connect()
        await plane.close()
        plane = nats_plane(server, refused)
        with pytest.raises(Unreachable) as caught:
            await plane.connect()
    given = f"{caught.value.message} {caught.value.hint} {plane.title} {refused!r} {caplog.text}"
    assert "secret" not in given
    assert server.address in given
    if not accepted.nkey_seed:
        assert "uthorization" in caught.value.message
        assert "NATS_AUTH_USERNAME" in caught.value.hint


async def test_the_end_of_a_tls_connection_warns_of_nothing(tmp_path, caplog):
    """Of a server that goes, too: asyncio has a warning that only a library can heed."""
    certificate, key = own_certificate(tmp_path)
    config = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}'
    async with nats_server(tmp_path, config) as server:
        plane = nats_plane(server, auth(ca_file=str(certificate)))
        heard = Recorder()
        async with running(plane.follow(CHANNEL, heard).run()):
            await heard.until_code("CHANNEL_CONNECTED")
            await server.kill()
            await heard.until_code("CHANNEL_DISCONNECTED")
        await plane.close()
    assert "eof_received" not in caplog.text


async def test_credentials_in_the_address(tmp_path):
    async with nats_server(tmp_path, 'authorization { user: "u", password: "p" }') as server:
        plane = NatsEventPlane(f"nats://u:p@{server.address}", NatsAuth(token="other"))
        await plane.connect()
        assert "u:p" not in plane.title
        await plane.close()


async def test_a_subject_that_may_not_be_read_is_told(tmp_path):
    config = (
        'authorization { users = [{user: "user", password: "user", '
        'permissions: {subscribe: {deny: ["namespace.>"]}}}] }'
    )
    async with nats_server(tmp_path, config) as server:
        plane = nats_plane(server)
        heard = Recorder()
        follower = plane.follow(CHANNEL, heard)
        async with running(follower.run()):
            await heard.until_code("CHANNEL_DISCONNECTED")
            assert not follower.connected
        await plane.close()
    assert "ermissions" in heard.message_of("CHANNEL_DISCONNECTED")


# -- nats: addresses and variables -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "titles"),
    [
        ("host", ["nats://host:4222"]),
        ("host:1, tls://u:p@other:2", ["nats://host:1", "tls://other:2"]),
        (["nats://[::1]", "b"], ["nats://[::1]:4222", "nats://b:4222"]),
        ("nats://token@host", ["nats://host:4222"]),
    ],
)
def test_addresses(given, titles):
    servers = nats_servers(given)
    assert [server.title for server in servers] == titles
    assert "u:p" not in repr(servers)


@pytest.mark.parametrize(
    "given",
    ["", " , ", "http://host", "nats://", "host:port", "nats://u:secret@host:x", "secret://x@host"],
)
def test_addresses_that_cannot_be_used(given):
    with pytest.raises(UsageProblem) as caught:
        nats_servers(given)
    assert "NATS_SERVER" in caught.value.hint
    assert "secret" not in caught.value.message
    assert "http://http://" not in caught.value.message


def test_variables_are_dynamos():
    assert NatsAuth.from_environment({}) == NatsAuth()
    names = ("USERNAME", "PASSWORD", "TOKEN", "NKEY", "CREDENTIALS_FILE")
    given = {f"NATS_AUTH_{name}": name.lower() for name in names} | {"NATS_TLS_CA_CERT_PATH": "ca"}
    assert NatsAuth.from_environment(given) == NatsAuth(
        "username", "password", "token", "nkey", "credentials_file", "ca"
    )


@pytest.mark.parametrize("name", ["USERNAME", "PASSWORD"])
def test_half_a_pair_is_refused(name):
    with pytest.raises(UsageProblem, match="is set and") as caught:
        NatsAuth.from_environment({f"NATS_AUTH_{name}": "secret"})
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("field", ["credentials_file", "ca_file"])
def test_files_that_cannot_be_read_are_told_at_once(tmp_path, field):
    if field == "credentials_file":
        pytest.importorskip("nkeys")
    with pytest.raises(UsageProblem, match="the file does not exist"):
        NatsEventPlane("host", auth(**{field: str(tmp_path / "gone")}))


def test_a_key_without_the_package_that_signs(monkeypatch):
    monkeypatch.setattr("dynctl.adapters.nats.address.find_spec", lambda name: None)
    with pytest.raises(UsageProblem, match="NATS_AUTH_NKEY is set") as caught:
        NatsEventPlane("host", auth(nkey_seed="secret"))
    assert "pip install" in caught.value.hint
    assert "secret" not in caught.value.message
