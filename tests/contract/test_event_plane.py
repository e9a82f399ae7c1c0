"""What every event plane must do, whatever publishers and networks do."""

import asyncio
import contextlib
import os
import threading
from dataclasses import replace

import pytest

from dynctl.adapters.ports import ChannelCounts, ChannelMessage
from dynctl.wire.dynamo.discovery import (
    KV_EVENTS,
    EventChannel,
    NatsTransport,
    ZmqTransport,
)
from tests.contract.event_rigs import NAME, RIGS, SCOPE, Recorder, Rig, envelope
from tests.contract.zmq_publisher import PATIENCE, running
from tests.waiting import patience, until


@pytest.fixture(params=sorted(RIGS))
async def rig(request, tmp_path):
    rig: Rig = RIGS[request.param](tmp_path)
    await rig.open()
    yield rig
    await rig.close()


@contextlib.asynccontextmanager
async def following(rig, channel=None):
    """A running follower and the values that it emits."""
    recorder = Recorder()
    channel = channel or await rig.publisher()
    follower = rig.plane.follow(channel, recorder)
    async with running(follower.run()):
        await rig.ready(channel, recorder)
        yield channel, follower, recorder


@pytest.mark.seed("router-guide: events: NATS Core")
@pytest.mark.seed("router-guide: events: ZMQ")
async def test_messages_arrive_in_order_as_they_were_sent(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, *map(envelope, range(40)))
        await heard.until_number(39)
        assert follower.connected
    assert heard.numbers == list(range(40))
    assert heard.codes == ["CHANNEL_CONNECTED"]
    assert heard.values[-1] == ChannelMessage(KV_EVENTS, NAME, 39, 1_000_039, b"message 39")
    assert follower.counts == ChannelCounts(received=40)
    assert not follower.connected


async def test_who_comes_late_begins_in_the_middle(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, envelope(500), envelope(501))
        await heard.until_number(501)
    assert heard.numbers == [500, 501]
    assert follower.counts == ChannelCounts(received=2)


async def test_lost_messages_are_counted_and_told_before_the_next(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, *map(envelope, (0, 1, 5, 6, 8)))
        await heard.until_number(8)
    assert heard.numbers == [0, 1, 5, 6, 8]
    reported = [(value.code, value.count) for value in heard.conditions[1:]]
    assert reported == [("EVENTS_DROPPED", 3), ("EVENTS_DROPPED", 1)]
    assert heard.values[3] == heard.conditions[1]
    assert follower.counts == ChannelCounts(received=5, dropped=4)


async def test_duplicates_and_stragglers_are_counted_and_skipped(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, *map(envelope, (0, 1, 1, 3, 2, 0, 4)))
        await heard.until_number(4)
    assert heard.numbers == [0, 1, 3, 4]
    assert heard.codes == ["CHANNEL_CONNECTED", "EVENTS_DROPPED"]
    assert follower.counts == ChannelCounts(received=4, dropped=1, duplicates=3)


async def test_the_same_report_again_is_not_a_duplicate(rig):
    async with following(rig) as (channel, follower, heard):
        for life in range(3):
            await rig.send(channel, envelope(0, b"calm", at=1_000_000 + life))
        await heard.until_number(0, 3)
    assert follower.counts == ChannelCounts(received=3, restarts=2)


async def test_a_publisher_that_begins_anew(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, *map(envelope, range(300, 303)))
        await rig.send(channel, envelope(0, at=2_000_000), envelope(1, at=2_000_001))
        await heard.until_number(1)
        assert heard.codes[1:] == ["PUBLISHER_RESTARTED"]
        # Its next life is first heard in the middle.
        await rig.send(channel, envelope(1, at=3_000_000))
        await heard.until_number(1, 2)
    assert heard.numbers == [300, 301, 302, 0, 1, 1]
    assert heard.codes[2:] == ["PUBLISHER_RESTARTED", "EVENTS_DROPPED"]
    assert heard.conditions[-1].count == 1
    assert follower.counts == ChannelCounts(received=6, restarts=2, dropped=1)


async def test_a_restart_with_the_clock_set_back_is_noticed_after_a_while(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, *map(envelope, range(5000, 5003)))
        await rig.send(channel, *(envelope(number, at=number) for number in range(20)))
        await heard.until_number(19)
    assert heard.numbers == [5000, 5001, 5002, *range(7, 20)]
    assert heard.codes[1:] == ["PUBLISHER_RESTARTED", "EVENTS_DROPPED"]
    assert follower.counts == ChannelCounts(received=16, duplicates=7, restarts=1, dropped=7)


async def test_messages_of_another_publisher_are_skipped(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(
            channel,
            envelope(0),
            envelope(0, publisher=9),
            envelope(1, publisher=9),
            envelope(1),
        )
        await heard.until_number(1)
    assert heard.numbers == [0, 1]
    if rig.name == "nats":
        # All publishers share a subject there; messages of others are ignored.
        assert heard.codes == ["CHANNEL_CONNECTED"]
        assert rig.plane.unclaimed == 2
    else:
        assert heard.codes == ["CHANNEL_CONNECTED", "FOREIGN_PUBLISHER"]
        assert "publisher 9 sends" in heard.message_of("FOREIGN_PUBLISHER")
        assert follower.counts == ChannelCounts(received=2, foreign=2)


async def test_messages_of_another_topic_are_skipped(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, envelope(0, topic="kv_metrics"), envelope(0))
        await heard.until_number(0)
    assert heard.codes == ["CHANNEL_CONNECTED", "FOREIGN_PUBLISHER"]
    assert follower.counts == ChannelCounts(received=1, foreign=1)


async def test_unreadable_messages_are_counted_and_told_once(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, envelope(0))
        await rig.garble(channel)
        await rig.garble(channel)
        await rig.send(channel, envelope(1))
        await heard.until_number(1)
    assert heard.numbers == [0, 1]
    assert heard.codes == ["CHANNEL_CONNECTED", "MALFORMED_MESSAGE"]
    assert "what?" not in heard.message_of("MALFORMED_MESSAGE")
    assert follower.counts == ChannelCounts(received=2, malformed=2)


@pytest.mark.parametrize("rig", ["zmq", "nats"], indirect=True)
async def test_a_message_beyond_the_limit_is_not_read(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, envelope(0), envelope(1, bytes(7000)), envelope(2))
        await heard.until_number(2)
    assert heard.numbers == [0, 2]
    assert heard.codes == ["CHANNEL_CONNECTED", "MALFORMED_MESSAGE", "EVENTS_DROPPED"]
    assert "expected at most" in heard.message_of("MALFORMED_MESSAGE")
    assert (follower.counts.malformed, follower.counts.dropped) == (1, 1)


async def test_a_message_over_the_limit_of_the_transport_does_not_end_the_channel(rig):
    if rig.name != "zmq":
        pytest.skip("only ZMQ gives up a connection for the size of a message")
    async with following(rig) as (channel, follower, heard):
        for lost in (1, 3):
            await rig.send(channel, envelope(lost - 1))
            await heard.until_number(lost - 1)
            await rig.send(channel, envelope(lost, bytes(100_000)))
            await rig.ready(channel, heard, 1 + (lost + 1) // 2)
        await rig.send(channel, envelope(4))
        await heard.until_number(4)
    assert heard.numbers == [0, 2, 4]
    assert follower.counts.dropped == 2


async def test_more_bytes_than_may_wait_close_the_channel_and_it_is_opened_again(rig):
    if rig.name != "zmq":
        pytest.skip("NATS has this bound in its client: pending_bytes")
    rig.plane._bounds = replace(rig.plane._bounds, queue_bytes=5_000)
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, envelope(0))
        await heard.until_number(0)
        await rig.send(channel, envelope(1, bytes(8_000)))
        await heard.until_code("CHANNEL_DISCONNECTED")
        assert "5,000 bytes" in heard.message_of("CHANNEL_DISCONNECTED")
        await rig.ready(channel, heard, 2)
        await rig.send(channel, envelope(2))
        await heard.until_number(2)
    assert heard.numbers == [0, 2]
    assert follower.counts.dropped == 1


async def test_it_reconnects_and_the_numbers_tell_what_was_lost(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, envelope(0), envelope(1))
        await heard.until_number(1)
        await rig.cut(channel)
        await heard.until_code("CHANNEL_DISCONNECTED")
        assert not follower.connected
        await rig.restore(channel)
        await rig.ready(channel, heard, 2)
        assert follower.connected
        await rig.send(channel, envelope(7))
        await heard.until_number(7)
    assert heard.numbers == [0, 1, 7]
    assert heard.codes[0] == "CHANNEL_CONNECTED"
    assert set(heard.codes[1:-2]) == {"CHANNEL_DISCONNECTED"}
    assert heard.codes[-2:] == ["CHANNEL_CONNECTED", "EVENTS_DROPPED"]
    assert follower.counts == ChannelCounts(received=3, dropped=5)


async def test_a_lower_number_after_a_lost_connection_is_a_new_life(rig):
    async with following(rig) as (channel, follower, heard):
        await rig.send(channel, *map(envelope, range(5000, 5300)))
        await heard.until_number(5299)
        await rig.cut(channel)
        await heard.until_code("CHANNEL_DISCONNECTED")
        await rig.restore(channel)
        await rig.ready(channel, heard, 2)
        await rig.send(channel, envelope(0, at=5))  # its clock was set back
        await heard.until_number(0)
    assert heard.codes[-1] == "PUBLISHER_RESTARTED"
    assert follower.counts == ChannelCounts(received=301, restarts=1)


async def test_followers_hear_their_own_publisher_only(rig):
    async with (
        following(rig, await rig.publisher(1)) as (first, _, first_heard),
        following(rig, await rig.publisher(2)) as (second, _, second_heard),
    ):
        for number in range(3):
            await rig.send(first, envelope(number, publisher=1))
            await rig.send(second, envelope(10 + number, publisher=2))
        await first_heard.until_number(2)
        await second_heard.until_number(12)
    for heard, numbers in ((first_heard, [0, 1, 2]), (second_heard, [10, 11, 12])):
        assert heard.numbers == numbers
        assert heard.codes == ["CHANNEL_CONNECTED"]


async def test_a_channel_can_be_followed_again(rig):
    channel = await rig.publisher()
    for number in range(3):
        async with following(rig, channel) as (_, _, heard):
            await rig.send(channel, envelope(number))
            await heard.until_number(number)
        assert heard.numbers == [number]


async def test_a_reader_that_fails_ends_its_follower_and_no_other(rig):
    def refuse(value) -> None:
        if isinstance(value, ChannelMessage):
            raise LookupError("the reader's own")

    async with following(rig) as (channel, _, heard):
        failing = asyncio.create_task(rig.plane.follow(channel, refuse).run())
        while rig.name == "zmq" and not failing.done():
            await rig.send(channel, envelope(0))  # its subscription is on the way
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        with contextlib.suppress(LookupError):  # in memory the publisher sees it too
            await rig.send(channel, envelope(1))
        if rig.name != "memory":
            with pytest.raises(LookupError):
                async with asyncio.timeout(patience(PATIENCE)):
                    await failing
        await heard.until_number(1)
        failing.cancel()
        with contextlib.suppress(asyncio.CancelledError, LookupError):
            await failing


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_closing_leaves_nothing(rig, cancelled_first):
    def traces():
        return (
            set(threading.enumerate()),
            {task for task in asyncio.all_tasks() if not task.done()},
        )

    before, files = traces(), len(os.listdir("/proc/self/fd"))
    tasks = []
    for publisher_id in range(1, 6):
        heard = Recorder()
        channel = await rig.publisher(publisher_id)
        tasks.append(asyncio.create_task(rig.plane.follow(channel, heard).run()))
        await rig.ready(channel, heard)
        await rig.send(channel, envelope(0, publisher=publisher_id))
        await heard.until_number(0)
    if cancelled_first:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE)
    await rig.plane.close()
    await asyncio.wait(tasks, timeout=PATIENCE)
    assert all(task.cancelled() for task in tasks)
    await asyncio.sleep(0)
    threads, left = traces()
    # The rig's own publishers are there since before, but for their sockets and its IO threads.
    if rig.name == "zmq":
        threads, before = set(), (set(), before[1])
    assert (threads, left) == before
    if rig.name != "zmq":
        await until(lambda: len(os.listdir("/proc/self/fd")) == files)
    await rig.plane.close()  # twice does no harm


async def test_an_idle_plane_lets_the_loop_sleep(rig, monkeypatch):
    async with contextlib.AsyncExitStack() as stack:
        for publisher_id in range(1, 9):
            channel = await rig.publisher(publisher_id)
            await stack.enter_async_context(following(rig, channel))
        await asyncio.sleep(0.1)
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        turns = 0
        sleep = selector.select

        def counted(timeout):
            nonlocal turns
            turns += 1
            return sleep(timeout)

        monkeypatch.setattr(selector, "select", counted)
        await asyncio.sleep(0.5)
        assert turns < 10


@pytest.mark.parametrize("rig", ["zmq", "nats"], indirect=True)
async def test_a_channel_of_another_transport_is_disconnected_with_the_reason(rig):
    other = NatsTransport("x") if rig.name == "zmq" else ZmqTransport("tcp://127.0.0.1:9")
    heard = Recorder()
    follower = rig.plane.follow(EventChannel(SCOPE, KV_EVENTS, 1, other), heard)
    async with running(follower.run()):
        await heard.until_code("CHANNEL_DISCONNECTED")
    assert "and this plane reads" in heard.message_of("CHANNEL_DISCONNECTED")
