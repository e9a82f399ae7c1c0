"""What routers may rely on between each other, on ZMQ and on NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynctl.adapters.nats.replicas import NatsReplicas
from dynctl.adapters.ports import ChannelCondition, ChannelMessage, ChannelValue, ReplicaPlane
from dynctl.adapters.zmq.replicas import ZmqReplicas
from dynctl.base.errors import UsageProblem
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.events import Envelope
from tests.contract.nats_server import NatsServer
from tests.waiting import until

TOPICS = ("events", "others")


class Joined:
    """A plane that runs, and what it received."""

    def __init__(self, plane: ReplicaPlane) -> None:
        self.plane = plane
        self.values: list[ChannelValue] = []
        self._task = asyncio.create_task(plane.run(lambda _, value: self.values.append(value)))

    def messages(self, publisher: int, topic: str = "events") -> list[int]:
        return [
            one.sequence
            for one in self.values
            if isinstance(one, ChannelMessage)
            and (one.publisher_id, one.topic) == (publisher, topic)
        ]

    def codes(self) -> set[str]:
        return {one.code.value for one in self.values if isinstance(one, ChannelCondition)}

    async def close(self) -> None:
        await end_tasks((self._task,))
        await self.plane.close()


class Network:
    """Planes of one kind that reach each other."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self._directory = kind, directory
        self.nats = NatsServer(directory) if kind == "nats" else None
        self.joined: list[Joined] = []

    def join(self, name: str, *others: str) -> Joined:
        if self.nats is not None:
            servers = f"nats://{self.nats.address}"
            found = Joined(NatsReplicas(servers, "dynctl.replicas.t", TOPICS))
        else:
            peers = [self._address(other) for other in others]
            found = Joined(ZmqReplicas(self._address(name), peers, TOPICS))
        self.joined.append(found)
        return found

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"


@asynccontextmanager
async def network(kind: str, directory: Path) -> AsyncIterator[Network]:
    found = Network(kind, directory)
    try:
        if found.nats is not None:
            await found.nats.start()
        yield found
    finally:
        for one in found.joined:
            await one.close()
        if found.nats is not None:
            await found.nats.kill()


def envelope(publisher: int, sequence: int, topic: str = "events", size: int = 8) -> Envelope:
    return Envelope(publisher, sequence, 1_000_000 + sequence, topic, bytes(size))


async def heard(sender: Joined, publisher: int, *readers: Joined) -> int:
    """Send until every reader receives; the next number."""
    sequence = 0

    def arrives() -> bool:
        nonlocal sequence
        sender.plane.publish(envelope(publisher, sequence))
        sequence += 1
        return all(reader.messages(publisher) for reader in readers)

    await until(arrives)
    return sequence


@pytest.mark.parametrize("kind", ["zmq", "nats"])
@pytest.mark.seed("smart-routing-guide-0.9: replicas: over NATS")
async def test_all_others_receive_all_messages_in_order(kind: str, tmp_path: Path) -> None:
    async with network(kind, tmp_path) as net:
        a, b, c = net.join("a"), net.join("b", "a", "c"), net.join("c", "a")
        start = await heard(a, 1, b, c)
        await heard(c, 3, b)
        for number in range(start, start + 500):
            assert a.plane.publish(envelope(1, number))
        a.plane.publish(envelope(1, 0, "others"))
        a.plane.publish(envelope(1, 0, "unknown"))
        for one in (b, c):
            await until(lambda one=one: start + 499 in one.messages(1))  # type: ignore[misc]
            found = one.messages(1)
            assert found == list(range(found[0], start + 500))
            await until(lambda one=one: one.messages(1, "others") == [0])  # type: ignore[misc]
            assert one.messages(1, "unknown") == []
            assert "CHANNEL_CONNECTED" in one.codes()


@pytest.mark.parametrize("kind", ["zmq", "nats"])
async def test_messages_arrive_again_after_the_connection_is_lost(
    kind: str, tmp_path: Path
) -> None:
    async with network(kind, tmp_path) as net:
        a, b = net.join("a"), net.join("b", "a")
        await heard(a, 1, b)
        if net.nats is not None:
            await net.nats.kill()
            await until(lambda: "CHANNEL_DISCONNECTED" in b.codes())
            a.plane.publish(envelope(1, 900))
            await net.nats.start()
            again = a
        else:
            await a.close()
            await until(lambda: "CHANNEL_DISCONNECTED" in b.codes())
            again = net.join("a")
        b.values.clear()
        await heard(again, 2, b)


@pytest.mark.parametrize("fault", ["killed", "silent"])
async def test_what_is_published_while_nats_is_lost_arrives_afterwards(
    fault: str, tmp_path: Path
) -> None:
    """All connect again by themselves, readers up to a second later; and what was sent to a server
    that did not respond any more is sent again."""
    async with network("nats", tmp_path) as net:
        a, b = net.join("a"), net.join("b")
        number = await heard(a, 1, b)
        assert net.nats is not None
        first = number

        async def publish(count: int) -> None:
            nonlocal number
            for _ in range(count):
                assert a.plane.publish(envelope(1, number))
                number += 1
                await asyncio.sleep(0.01)

        if fault == "killed":
            await net.nats.kill()
            await publish(100)
            await until(lambda: "CHANNEL_DISCONNECTED" in b.codes())
            await net.nats.start()
        else:
            with net.nats.frozen():
                await publish(100)
                await until(lambda: "CHANNEL_DISCONNECTED" in b.codes())
        await publish(50)
        await until(lambda: number - 1 in b.messages(1))
        assert [each for each in b.messages(1) if each >= first] == list(range(first, number))
        assert "EVENTS_DROPPED" not in b.codes()


@pytest.mark.parametrize("kind", ["zmq", "nats"])
async def test_what_is_published_at_the_end_still_arrives(kind: str, tmp_path: Path) -> None:
    async with network(kind, tmp_path) as net:
        a, b = net.join("a"), net.join("b", "a")
        last = await heard(a, 1, b)
        a.plane.publish(envelope(1, last, size=100_000))
        await a.close()
        await until(lambda: last in b.messages(1))
        assert a.plane.publish(envelope(1, last + 1)) in (True, False)  # never an error


async def test_a_queue_that_is_full_refuses_the_newest(tmp_path: Path) -> None:
    """Without a NATS server nothing leaves the queue."""
    plane = NatsReplicas("nats://127.0.0.1:1", "dynctl.replicas.t", TOPICS)
    taken = 0
    while plane.publish(envelope(1, taken)):
        taken += 1
    assert 1_000 <= taken <= 100_000
    await plane.close()


@pytest.mark.parametrize("peer", ["here", "tcp://a", "tcp://a:0", "udp://a:1"])
def test_a_peer_that_is_no_address_is_named(peer: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="--router-replica-peer"):
        ZmqReplicas(f"ipc://{tmp_path}/a", [peer], TOPICS)


async def test_port_0_is_a_free_port(tmp_path: Path) -> None:
    one = ZmqReplicas("tcp://127.0.0.1:0", (), TOPICS)
    other = ZmqReplicas("tcp://127.0.0.1:0", (one.endpoint,), TOPICS)
    assert one.endpoint != other.endpoint
    with pytest.raises(UsageProblem, match="the address is in use"):
        ZmqReplicas(one.endpoint, (), TOPICS)
    await one.close()
    await other.close()
