"""`events tail`: lines of events, remarks about the stream, and lines that a slow reader misses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.memory import MemoryDiscovery
from dynctl.adapters.ports import DiscoveryChange, Interrupted
from dynctl.base.errors import UsageProblem
from dynctl.documents.events import TailKind, TailLine
from dynctl.sources.dynamo.event_filter import TailQuery, followed
from dynctl.sources.dynamo.event_lines import remark, time_text
from dynctl.sources.dynamo.event_stream import EventTail, TailQueue
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    encode_sequences,
)
from dynctl.wire.dynamo.discovery import EventChannel
from dynctl.wire.dynamo.events import (
    KvMetrics,
    RouterEvent,
    UnknownEvent,
    encode_kv_metrics,
    encode_router_events,
)
from router_core import BlocksRemoved, BlocksStored, Cleared
from tests.memory_planes import MemoryEventPlane
from tests.waiting import patience

CAPTURE = Path(__file__).parents[2] / "captures" / "etcd-disagg-required.json"
NOW_MS = 1_795_000_000_000
SENT_MS = NOW_MS - 5
ENTRIES = {key: row["value"] for key, row in json.loads(CAPTURE.read_text()).items()}


class Followed:
    """A tail of the captured two-zone fleet over memory planes."""

    def __init__(self, **options: Any) -> None:
        self.discovery = MemoryDiscovery()
        for key, value in ENTRIES.items():
            self.discovery.put(key, json.dumps(value).encode())
        self.sent_ms = SENT_MS
        self.plane = MemoryEventPlane(lambda: self.sent_ms)
        self.lines: list[TailLine] = []
        self.said: list[str] = []
        self.tail = EventTail(
            self.discovery,
            lambda channel: self.plane,
            self.lines.append,
            self.said.append,
            lambda: NOW_MS,
            namespace="dynamo",
            **options,
        )

    def prefill(self, zone: str) -> tuple[EventChannel, int]:
        """(channel of its events, worker id) of the prefill worker of a zone."""
        for item in self.tail.deployment.workers:
            if item.kv_events and item.worker.domains["zone"] == zone:
                return item.kv_events[0], item.worker.worker_id
        raise AssertionError(zone)

    def send(self, zone: str, *numbered: tuple[int, Any]) -> None:
        channel, worker_id = self.prefill(zone)
        events = [RouterEvent(worker_id, 0, number, event) for number, event in numbered]
        self.plane.publish(channel, encode_router_events(events))

    def kinds(self) -> list[str]:
        return [line.event for line in self.lines]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(patience(5)):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def follows(self) -> None:
        """Until the follower of each channel runs: earlier messages are lost."""
        tail = self.tail
        await self.until(
            lambda: len(self.plane.followed) == tail.publishers + tail.load_channels > 0
        )


@asynccontextmanager
async def following(query: TailQuery | None = None, **options: Any) -> AsyncIterator[Followed]:
    fleet = Followed(**options)
    async with fleet.tail:
        if query is not None:
            fleet.tail.wanted = query.wanted(fleet.tail.deployment)
        fleet.tail.follow()
        await fleet.follows()
        yield fleet
    await fleet.plane.close()


def stored(*hashes: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored(parent, hashes, hashes)


async def test_events_become_lines_with_worker_domain_blocks_and_tier():
    async with following() as fleet:
        fleet.send("zone-a", (7, stored(0xAB, 0xCD, parent=0xEF)), (8, BlocksRemoved((0xAB,))))
        fleet.send("zone-b", (1, Cleared()))
    first, second, third = fleet.lines
    assert (first.event, first.blocks, first.event_id) == ("stored", 2, 7)
    assert (first.first_hash, first.parent_hash) == ("00000000000000ab", "00000000000000ef")
    assert (first.worker or "").startswith("prefill/")
    assert (first.role, first.model, first.dp_rank, first.tier) == ("prefill", "tiny", 0, "device")
    assert first.domains["zone"] == "zone-a"
    assert first.time == time_text(SENT_MS), "the publisher's time, not ours"
    assert (second.event, second.blocks, second.event_id) == ("removed", 1, 8)
    assert (third.event, third.blocks, third.domains["zone"]) == ("cleared", None, "zone-b")
    assert not any(line.is_remark for line in fleet.lines)


async def test_a_gap_says_which_events_are_missing_and_that_messages_were_lost():
    async with following() as fleet:
        fleet.send("zone-a", (1, stored(1)))
        fleet.plane.lose(fleet.prefill("zone-a")[0], 2)
        fleet.send("zone-a", (2, stored(2)), (3, stored(3)))
        fleet.send("zone-a", (4, stored(4)))
        fleet.send("zone-a", (5, stored(5)))
    assert fleet.kinds() == ["stored", "gap", "stored"]
    gap = fleet.lines[1]
    assert gap.is_remark
    assert (gap.missing, gap.dp_rank) == (3, 0)
    assert gap.message == "events 2 to 4 are missing (2 messages lost on the way)"


async def test_a_hole_in_the_numbers_alone_is_a_gap_too():
    async with following() as fleet:
        fleet.send("zone-a", (1, stored(1)))
        fleet.send("zone-a", (3, stored(3)))
        fleet.send("zone-b", (9, stored(9)))
    assert fleet.kinds() == ["stored", "gap", "stored", "stored"], "each publisher has its own"
    assert fleet.lines[1].message == "event 2 is missing"


async def test_lost_messages_without_a_hole_in_the_numbers_are_said():
    async with following() as fleet:
        fleet.send("zone-a", (1, stored(1)))
        fleet.plane.lose(fleet.prefill("zone-a")[0])
        fleet.send("zone-a")
        fleet.send("zone-a", (2, stored(2)))
    assert fleet.kinds() == ["stored", "gap", "stored"]
    assert "1 message lost on the way; no numbered event" in (fleet.lines[1].message or "")


async def test_an_event_that_comes_again_is_shown_as_such():
    async with following() as fleet:
        fleet.send("zone-a", (1, stored(1)), (2, stored(2)))
        fleet.send("zone-a", (1, stored(1)))
        fleet.send("zone-a", (3, stored(3)))
    assert fleet.kinds() == ["stored"] * 4
    assert [line.message for line in fleet.lines] == [
        None, None, "again or late: after event 2", None,
    ]  # fmt: skip


async def test_a_publisher_that_starts_again_is_not_a_gap():
    async with following() as fleet:
        channel, _ = fleet.prefill("zone-a")
        for number in range(1, 4):
            fleet.send("zone-a", (number, stored(number)))
        fleet.plane.restart(channel)
        fleet.sent_ms += 1000
        fleet.send("zone-a", (1, stored(1)))
        fleet.send("zone-a", (2, stored(2)))
    assert fleet.kinds() == ["stored"] * 3 + ["restart"] + ["stored"] * 2
    assert "its earlier cache contents are invalid" in (fleet.lines[3].message or "")


async def test_what_cannot_be_read_is_marked_and_stops_nothing():
    async with following() as fleet:
        channel, worker_id = fleet.prefill("zone-a")
        fleet.send("zone-a", (1, stored(1)))
        fleet.plane.publish_bytes(channel, b"\xc1 no envelope")
        fleet.plane.publish(channel, b"\xc1 no events")
        event = RouterEvent(worker_id, 0, 2, UnknownEvent("compressed"))
        fleet.plane.publish(channel, encode_router_events([event]))
        event = RouterEvent(worker_id + 1, 0, 3, stored(1))
        fleet.plane.publish(channel, encode_router_events([event]))
        fleet.send("zone-a", (3, stored(3)))
    assert fleet.kinds() == ["stored", "malformed", "malformed", "unknown", "foreign", "stored"]
    assert fleet.lines[3].message == "unknown kind of event 'compressed'"


async def test_a_lost_connection_and_its_return_are_marked_but_not_the_first():
    async with following() as fleet:
        channel, _ = fleet.prefill("zone-a")
        fleet.plane.disconnect(channel)
        fleet.plane.reconnect(channel)
    assert fleet.kinds() == ["disconnect", "reconnect"]


async def test_workers_that_leave_and_come():
    async with following() as fleet:
        key = next(key for key in ENTRIES if key.startswith("v1/mdc/dynamo/prefill/"))
        before = fleet.tail.publishers
        fleet.discovery.delete(key)
        await fleet.until(lambda: len(fleet.lines) == 1)
        assert fleet.tail.publishers == before - 1
        fleet.discovery.put(key, json.dumps(ENTRIES[key]).encode())
        await fleet.until(lambda: len(fleet.lines) == 2)
        await fleet.follows()
        for zone in ("zone-a", "zone-b"):
            fleet.send(zone, (1, stored(1)))
    assert fleet.kinds() == ["left", "joined", "stored", "stored"]


async def test_interrupted_discovery_is_said_once_and_what_is_known_stays():
    async with following() as fleet:
        for reason in ("no route", "no route still"):
            fleet.tail._take(Interrupted(reason))
        fleet.send("zone-a", (1, stored(1)))
        listed: DiscoveryChange = await fleet.discovery.list()
        fleet.tail._take(listed)
    assert fleet.said == [
        "discovery is interrupted: no route; known publishers stay",
        "discovery works again",
    ]
    assert fleet.kinds() == ["stored"]


async def test_only_wanted_workers_are_followed():
    query = TailQuery.parse((), "zone=zone-b", (), load=False)
    async with following(query) as fleet:
        assert fleet.tail.publishers == 1
        fleet.send("zone-a", (1, stored(1)))
        fleet.send("zone-b", (1, stored(1)))
    assert [line.domains["zone"] for line in fleet.lines] == ["zone-b"]


async def test_a_worker_is_named_by_the_end_of_its_id():
    fleet = Followed()
    async with fleet.tail:
        _, worker_id = fleet.prefill("zone-b")
        query = TailQuery.parse([f"{worker_id:x}"[-6:]], "", (), load=False)
        wanted = query.wanted(fleet.tail.deployment)
        chosen = [i.worker.worker_id for i in fleet.tail.deployment.workers if wanted(i.worker)]
        assert chosen == [worker_id]
        assert not wanted(None)
        with pytest.raises(UsageProblem, match="'absent'"):
            TailQuery.parse(["absent"], "", (), load=False).wanted(fleet.tail.deployment)


async def test_load_reports_and_bookings():
    async with following(load=True) as fleet:
        _, worker_id = fleet.prefill("zone-a")
        report = KvMetrics(worker_id, 0, active_decode_blocks=3, kv_used_blocks=1_200)
        fleet.plane.publish(fleet.tail.deployment.loads[0], encode_kv_metrics(report))
        bookings = fleet.tail.deployment.sequences[0]
        events: list[SequenceEvent] = [
            SequenceAdded("r1", worker_id, 0, (1, 2), 40, router_id=9),
            SequenceFreed("r1", 1, 0, router_id=9),
        ]
        fleet.plane.publish(bookings, encode_sequences(events))
        fleet.plane.publish(bookings, b"\xc1")
        fleet.plane.lose(bookings)
        for _ in range(2):
            fleet.plane.publish(bookings, encode_sequences([]))
    assert fleet.kinds() == ["load", "booked", "freed", "malformed", "gap"]
    load, booked, freed = fleet.lines[:3]
    assert load.message == "3 active decode blocks, 1,200 KV blocks used"
    assert booked.message == "request r1: 40 prefill tokens, 2 prompt blocks"
    assert (booked.request_id, booked.prefill_tokens, booked.blocks) == ("r1", 40, 2)
    assert freed.worker == "0000000000000001", "one that is not registered is shown by its id"


async def test_load_is_followed_only_with_load():
    async with following() as fleet:
        assert fleet.tail.load_channels == 0
        assert followed(fleet.tail, "memory", "dynamo") == (
            "following 2 publishers of KV events: memory, namespace dynamo"
        )
    assert TailQuery.parse((), "", ["booked"], load=False).load
    assert not TailQuery.parse((), "", ["gap"], load=False).load


def test_kinds_are_checked_and_skipped_lines_are_always_reported():
    with pytest.raises(UsageProblem, match="--kind lost: expected one of stored, removed"):
        TailQuery.parse((), "", ["lost"], load=False)
    query = TailQuery.parse((), "", ["gap"], load=False)
    assert query.wants(remark(TailKind.GAP, 0, "x"))
    assert query.wants(remark(TailKind.SKIPPED, 0, "x"))
    assert not query.wants(remark(TailKind.RESTART, 0, "x"))


def test_a_publishers_clock_may_be_anything():
    assert time_text(0) == "1970-01-01T00:00:00.000Z"
    assert time_text(2**64 - 1) == "9999-12-31T23:59:59.999Z"


async def test_a_slow_reader_gets_the_number_of_missed_lines():
    queue = TailQueue(lambda: NOW_MS, most=3)
    for number in range(8):
        queue.put(remark(TailKind.GAP, number, str(number)))
    assert [line.message for line in await queue.take(2)] == ["0", "1"]
    queue.put(remark(TailKind.GAP, 8, "8"))
    lines = await queue.take(10)
    assert [line.message for line in lines] == [
        "2", "5 events not shown: the output is slower", "8",
    ]  # fmt: skip
    assert (lines[1].event, lines[1].missing) == ("skipped", 5)


async def test_dropped_lines_are_reported_when_nothing_follows():
    queue = TailQueue(lambda: NOW_MS, most=1)
    for number in range(3):
        queue.put(remark(TailKind.GAP, number, str(number)))
    assert [line.message for line in await queue.take(5)] == ["0"]
    assert [line.event for line in await queue.take(5)] == ["skipped"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await queue.take(1)
