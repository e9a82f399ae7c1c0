"""What a follower of KV events must do, whatever the engine and the network do."""

import asyncio
import contextlib
import json
import random
import select
from collections import Counter
from pathlib import Path

import pytest
import zmq.asyncio

from dynctl.adapters.ports import IndexRead, IndexUpdate, StreamCondition
from dynctl.adapters.zmq.context import Backlog, close_context, new_context
from dynctl.adapters.zmq.kv_event_source import (
    EndpointError,
    KvEventSource,
    StreamBounds,
    dialable_endpoint,
)
from dynctl.adapters.zmq.kv_events import ZmqKvEvents
from dynctl.base.tasks import LoopShare
from dynctl.serving.routing.config import Limits as FrontendLimits
from dynctl.wire.vllm_events import BatchLimits, decode_message, encode_batch, encode_seq
from router_core import (
    BlocksStored,
    Cleared,
    IndexConnected,
    IndexMarked,
    KvEvent,
    local_block_hashes,
)
from tests.contract.zmq_publisher import (
    CLEARED,
    Recorder,
    ScriptedPublisher,
    batch,
    running,
    stored,
)
from tests.waiting import patience, until

CAPTURE = Path(__file__).parents[1] / "captures" / "vllm-zmq-kv-events.jsonl"
# Waits that must run out in a test are short, those that must not are long.
PATIENT = StreamBounds(idle_check=600.0)


class Bench:
    """One publisher, one follower, one clock that only the test moves."""

    def __init__(self, context, topic_frames=()):
        self.context = context
        self.topic_frames = topic_frames
        self.now = 100.0
        self.recorder = Recorder()
        self.publishers: list[ScriptedPublisher] = []

    def publisher(self, **options) -> ScriptedPublisher:
        self.publishers.append(ScriptedPublisher(self.context, **options))
        self.publishers[-1].topic_frames = self.topic_frames
        return self.publishers[-1]

    def follower(self, publisher, *, bounds=PATIENT, **source) -> ZmqKvEvents:
        return ZmqKvEvents(
            KvEventSource(
                worker_id=7,
                endpoint=publisher.endpoint,
                replay=publisher.replay_endpoint,
                **{"block_size": 2} | source,
            ),
            self.recorder,
            lambda: self.now,
            bounds=bounds,
        )

    @contextlib.asynccontextmanager
    async def following(self, *, bounds=PATIENT, block_size=2, **options):
        """A publisher of these options, and a follower that is subscribed to it."""
        publisher = self.publisher(**options)
        follower = self.follower(publisher, bounds=bounds, block_size=block_size)
        async with running(follower.run()):
            await publisher.subscribed()
            yield publisher, follower

    async def deliver(self, publisher, *seqs):
        """Send a batch of each number, and wait until the last one has arrived."""
        for seq in seqs:
            await publisher.send(seq, batch(seq))
        await self.recorder.until_seq(seqs[-1])


@pytest.fixture(params=[(), (b"kv-events",)], ids=["old framing", "vLLM 0.32"])
async def bench(request):
    """``params``: the topic frames of a replayed batch; vLLM 0.32 sends one, older ones none."""
    context = zmq.asyncio.Context()
    bench = Bench(context, request.param)
    yield bench
    for publisher in bench.publishers:
        await publisher.die()
    context.destroy(linger=0)


async def test_batches_arrive_in_order_as_index_events(bench):
    async with bench.following() as (publisher, follower):
        await bench.deliver(publisher, 0, 1, 2)
    assert bench.recorder.seqs == [0, 1, 2]
    assert bench.recorder.codes == ["STREAM_CONNECTED"]
    update = bench.recorder.values[-1]
    assert isinstance(update, IndexUpdate)
    assert update == IndexUpdate(
        worker_id=7,
        dp_rank=0,
        seq=2,
        events=(BlocksStored(1001, (1002,), local_block_hashes([2, 2], 2), counted=True),),
        published_at=2.0,
    )
    assert list(update.changes()) == [KvEvent(7, 0, update.events[0])]
    state = follower.state()
    assert (state.batches, state.last_seq, state.gaps, state.missing) == (3, 2, 0, 0)
    assert state.last_batch_at == 100.0
    assert not state.connected  # it was cancelled


@pytest.mark.seed("router-guide: events: ZMQ")
async def test_captured_stream_of_a_real_mock_worker(bench):
    rows = [json.loads(line) for line in CAPTURE.read_text().splitlines()]
    frames = [
        [bytes.fromhex(frame) for frame in row["frames_hex"]]
        for row in rows
        if row["publisher"] == "port-18558"
    ]
    async with bench.following(block_size=16) as (publisher, follower):
        for message in frames:
            await publisher.raw(*message)
        await bench.recorder.until_seq(decode_message(frames[-1])[1])
    assert bench.recorder.seqs == list(range(len(frames)))
    assert follower.state().dropped == {}
    first = next(one for one in bench.recorder.values if isinstance(one, IndexUpdate))
    (event,) = first.events
    assert isinstance(event, BlocksStored)
    # The mocker names a first block by its local hash, so its own name proves our hashing.
    assert event.block_hashes[0] == event.local_hashes[0]


async def test_what_was_cached_before_we_came_is_replayed_without_live_traffic(bench):
    publisher = bench.publisher(replay=True)
    for seq in range(5):
        publisher.keep(seq, batch(seq))
    follower = bench.follower(publisher)
    async with running(follower.run()):
        await bench.recorder.until_seq(4)
    assert bench.recorder.seqs == [0, 1, 2, 3, 4]
    assert all(v.replayed for v in bench.recorder.values if isinstance(v, IndexUpdate))
    assert (follower.state().healed, follower.state().lost) == (5, 0)


async def test_first_batch_above_zero_is_a_gap(bench):
    async with bench.following() as (publisher, _):
        await bench.deliver(publisher, 3)
    lost = bench.recorder.condition("EVENTS_LOST")
    assert lost.details == {"first": 0, "count": 3}
    assert list(lost.changes()) == [IndexMarked(7, 0, "gapped", 3)]


@pytest.mark.seed("router-guide: events: gaps and replay")
async def test_gap_is_healed_from_the_first_missing_batch(bench):
    async with bench.following(replay=True) as (publisher, follower):
        await bench.deliver(publisher, 0)
        publisher.keep(1, batch(1))
        publisher.keep(2, batch(2))
        await bench.deliver(publisher, 3, 4)
    assert bench.recorder.seqs == [0, 1, 2, 3, 4]
    assert 1 in publisher.asked
    assert bench.recorder.codes == ["STREAM_CONNECTED"]
    state = follower.state()
    assert (state.gaps, state.lost, state.missing) == (1, 0, 0)


async def test_gap_that_replay_heals_in_part(bench):
    async with bench.following(replay=True) as (publisher, follower):
        await bench.deliver(publisher, 0)
        publisher.keep(3, batch(3))
        await bench.deliver(publisher, 4)
    assert bench.recorder.seqs == [0, 3, 4]
    assert bench.recorder.condition("EVENTS_LOST").details == {"first": 1, "count": 2}
    assert (follower.state().lost, follower.state().missing) == (2, 2)


async def test_gap_without_replay_is_lost_until_the_engine_clears_its_cache(bench):
    async with bench.following() as (publisher, follower):
        await bench.deliver(publisher, 0, 3)
        assert bench.recorder.seqs == [0, 3]
        assert bench.recorder.condition("EVENTS_LOST").missing == 2
        assert follower.state().missing == 2
        await bench.deliver(publisher, 5)
        assert follower.state().missing == 3
        await publisher.send(6, batch(6, CLEARED))
        await bench.recorder.until_code("INDEX_CURRENT")
    current = bench.recorder.condition("INDEX_CURRENT")
    assert list(current.changes()) == [IndexMarked(7, 0, "current", 0)]
    assert (follower.state().missing, follower.state().lost) == (0, 3)


async def test_batch_lost_at_the_end_is_found_while_idle(bench):
    bounds = StreamBounds(idle_check=0.05)
    async with bench.following(replay=True, bounds=bounds) as (publisher, follower):
        await bench.deliver(publisher, 0)
        publisher.keep(1, batch(1))
        await bench.recorder.until_seq(1)
    assert bench.recorder.seqs == [0, 1]
    assert follower.state().restarts == 0


@pytest.mark.parametrize("replay", [False, True])
async def test_sequence_that_starts_again_clears_the_index_first(bench, replay):
    async with bench.following(replay=replay) as (publisher, follower):
        await bench.deliver(publisher, 0, 1, 2)
        publisher.kept.clear()
        await publisher.send(0, batch(0, life=1))
        await bench.recorder.until_seq(0, times=2)
    assert bench.recorder.seqs == [0, 1, 2, 0]
    restarted = bench.recorder.condition("ENGINE_RESTARTED")
    assert restarted.details == {"seq": 0, "last_seq": 2}
    assert list(restarted.changes()) == [
        KvEvent(7, 0, Cleared()),
        IndexMarked(7, 0, "current", 0),
    ]
    assert bench.recorder.values.index(restarted) == len(bench.recorder.values) - 2
    assert follower.state().restarts == 1


async def test_restart_of_a_gapped_stream_is_whole_again(bench):
    async with bench.following() as (publisher, follower):
        await publisher.send(2, batch(2))
        await publisher.send(0, batch(0, life=1))
        await bench.recorder.until_seq(0)
    assert follower.state().missing == 0
    assert follower.state().lost == 2


async def reborn(bench, publisher, **options):
    """Another process behind the same endpoints."""
    await publisher.die()
    return bench.publisher(
        endpoint=publisher.endpoint,
        **({"replay": True, "replay_endpoint": publisher.replay_endpoint}
           if publisher.replay_endpoint else {}),
        **options,
    )  # fmt: skip


async def test_new_process_that_has_counted_past_us_is_noticed(bench):
    async with bench.following(replay=True) as (publisher, follower):
        await bench.deliver(publisher, 0, 1)
        second = await reborn(bench, publisher)
        for seq in range(6):
            second.keep(seq, batch(seq, life=1))
        await second.subscribed()
        await second.send(6, batch(6, life=1))
        await bench.recorder.until_seq(6)
    assert bench.recorder.seqs == [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert bench.recorder.condition("ENGINE_RESTARTED").clears
    assert follower.state().lost == 0


async def test_new_process_that_says_nothing_is_noticed(bench):
    async with bench.following(replay=True) as (publisher, _):
        await bench.deliver(publisher, 0)
        await reborn(bench, publisher)
        await bench.recorder.until_code("ENGINE_RESTARTED")
    assert bench.recorder.seqs == [0]
    assert bench.recorder.codes[:2] == ["STREAM_CONNECTED", "STREAM_DISCONNECTED"]


async def test_same_process_after_a_broken_connection_keeps_its_index(bench):
    async with bench.following(replay=True) as (publisher, follower):
        await bench.deliver(publisher, 0, 1)
        second = await reborn(bench, publisher)
        second.kept = publisher.kept  # the same history: only the connection was lost
        second.keep(2, batch(2))
        await bench.recorder.until_seq(2)
    assert bench.recorder.seqs == [0, 1, 2]
    assert follower.state().restarts == 0


async def test_hole_after_a_broken_connection_without_replay_counts_as_restart(bench):
    async with bench.following() as (publisher, _follower):
        await bench.deliver(publisher, 0)
        second = await reborn(bench, publisher)
        await second.subscribed()
        await second.send(9, batch(9, life=1))
        await bench.recorder.until_seq(9)
    assert bench.recorder.condition("ENGINE_RESTARTED").clears
    assert bench.recorder.condition("EVENTS_LOST").details == {"first": 0, "count": 9}


async def test_going_back_after_a_broken_connection_is_a_restart_whatever_the_clock_says(bench):
    async with bench.following() as (publisher, follower):
        await bench.deliver(publisher, 1000)
        second = await reborn(bench, publisher)
        await second.subscribed()
        await second.send(0, batch(0))  # its clock is behind the old process's
        await bench.recorder.until_seq(0)
    assert follower.state().restarts == 1


async def test_the_expected_number_after_a_broken_connection_proves_nothing(bench):
    async with bench.following() as (publisher, follower):
        await publisher.send(0, batch(0))
        await publisher.send(1, batch(1, dp_rank=3))
        await bench.recorder.until_seq(1)
        second = await reborn(bench, publisher)
        await second.subscribed()
        await second.send(2, batch(2))
        await second.send(3, batch(3, dp_rank=5))
        await bench.recorder.until_seq(3)
        conditions = [v for v in bench.recorder.values if isinstance(v, StreamCondition)]
        doubts = [one for one in conditions if one.code == "EVENTS_LOST"]
        assert [(one.ranks, one.missing) for one in doubts] == [((0, 3), 1), ((5,), 1)]
        assert "has no replay socket" in doubts[0].message
        state = follower.state()
        assert (state.restarts, state.lost, state.missing) == (0, 0, 1)
        assert follower.position() is None
        for seq, rank in enumerate((0, 3, 5), start=4):
            await second.send(seq, batch(seq, CLEARED, dp_rank=rank))
        await bench.recorder.until_seq(6)
        assert follower.state().missing == 0
        assert follower.position() is not None
    ended = [v.ranks for v in bench.recorder.values if getattr(v, "code", "") == "INDEX_CURRENT"]
    assert ended == [(0,), (3,), (5,)]


@pytest.mark.parametrize("same", [True, False])
async def test_a_later_answer_of_the_replay_socket_shows_which_process_it_is(bench, same):
    bounds = StreamBounds(replay_wait=0.05, idle_check=0.05)
    async with bench.following(replay=True, bounds=bounds) as (publisher, follower):
        await bench.deliver(publisher, 0, 1)
        second = await reborn(bench, publisher, silent=True)
        second.kept = {n: encode_batch(batch(n, life=0 if same else 1)) for n in range(2)}
        await second.subscribed()
        await second.send(2, batch(2, life=0 if same else 1))
        await bench.recorder.until_code("EVENTS_LOST")
        second.silent = False
        bench.now += 31.0
        await bench.recorder.until_code("INDEX_CURRENT" if same else "ENGINE_RESTARTED")
        if not same:
            await bench.recorder.until_seq(2, times=2)
        assert follower.state().missing == 0
    assert bench.recorder.seqs == ([0, 1, 2] if same else [0, 1, 2, 0, 1, 2])
    assert second.asked[-1] == (1 if same else 0)


async def test_duplicate_is_applied_once(bench):
    async with bench.following() as (publisher, follower):
        await bench.deliver(publisher, 0, 1, 1, 0, 2)
    assert bench.recorder.seqs == [0, 1, 2]
    assert follower.state().duplicates == 2


async def test_batch_that_overtook_another_is_not_undone_by_it(bench):
    async with bench.following() as (publisher, follower):
        await bench.deliver(publisher, 0, 2, 1, 3)
    assert bench.recorder.seqs == [0, 2, 3]
    state = follower.state()
    assert (state.late, state.lost, state.restarts) == (1, 1, 0)


async def test_reordered_batches_are_put_in_order_where_replay_is_there(bench):
    async with bench.following(replay=True) as (publisher, follower):
        publisher.keep(1, batch(1))
        await bench.deliver(publisher, 0, 2, 1, 3)
    assert bench.recorder.seqs == [0, 1, 2, 3]
    assert (follower.state().lost, follower.state().restarts) == (0, 0)


@pytest.mark.parametrize(
    "junk", [b"\xc1", encode_batch(batch(1))[:-3], b"\x92\xa1x\x90", b"\x91" * 5000]
)
async def test_unreadable_batch_is_lost_and_the_stream_goes_on(bench, junk):
    async with bench.following() as (publisher, follower):
        await publisher.send(0, batch(0))
        await publisher.send(1, junk)
        await bench.deliver(publisher, 2)
    assert bench.recorder.seqs == [0, 2]
    assert bench.recorder.condition("MALFORMED_BATCH").details == {"seq": 1}
    assert bench.recorder.condition("EVENTS_LOST").details == {"first": 1, "count": 1}
    assert (follower.state().malformed, follower.state().missing) == (1, 1)


async def test_unreadable_messages_are_counted_and_told_once(bench):
    async with bench.following() as (publisher, follower):
        await publisher.raw(b"", b"short", encode_batch(batch(0)))
        await publisher.raw(b"", encode_seq(0))
        await publisher.raw(b"", b"\xff" * 8, b"")
        await bench.deliver(publisher, 0)
    assert bench.recorder.codes.count("MALFORMED_MESSAGE") == 1
    assert follower.state().malformed == 3


async def test_batch_over_the_bound_is_refused(bench):
    bounds = StreamBounds(batch=BatchLimits(payload_bytes=500))
    async with bench.following(bounds=bounds) as (publisher, _follower):
        await publisher.send(0, batch(0, *[stored(n) for n in range(12)]))
        await bench.deliver(publisher, 1)
    assert "at most 500 bytes" in bench.recorder.condition("MALFORMED_BATCH").message


@pytest.mark.parametrize("replay", [True, False])
async def test_message_over_the_limit_of_the_socket_does_not_end_the_stream(bench, replay):
    publisher = bench.publisher(replay=replay)
    small = StreamBounds(idle_check=600.0, batch=BatchLimits(payload_bytes=1000))
    follower = bench.follower(publisher, bounds=small)
    async with running(follower.run()):
        for life in range(3):
            await publisher.subscribed()
            first = 3 * life
            await bench.deliver(publisher, first)
            publisher.keep(first + 1, batch(first + 1))  # lost on the wire
            bench.now += 5.0
            await publisher.raw(b"", encode_seq(first + 2), b"x" * 10_000)
            publisher.keep(first + 2, batch(first + 2))
            await bench.recorder.until_code("STREAM_DISCONNECTED", life + 1)
            assert follower.state().for_s == 0.0
        await publisher.subscribed()
        await bench.deliver(publisher, 9)
        bench.now += 7.0
        state = follower.state()
        assert (state.connected, state.for_s) == (True, 7.0)
    if replay:
        assert state.missing == 0
        assert bench.recorder.seqs == list(range(10))


async def test_more_bytes_than_may_wait_close_the_connection_and_it_is_opened_again(bench):
    bounds = StreamBounds(idle_check=600.0, queue_bytes=20_000)
    async with bench.following(replay=True, bounds=bounds) as (publisher, follower):
        await bench.deliver(publisher, 0)
        publisher.keep(1, batch(1))
        await publisher.raw(b"", encode_seq(1), b"x" * 30_000)
        await bench.recorder.until_code("EVENTS_OVERFLOW")
        await bench.recorder.until_code("STREAM_DISCONNECTED")
        await publisher.subscribed()
        await bench.deliver(publisher, 2)
        assert follower.state().missing == 0
        bench.now += 11.0
        await bench.deliver(publisher, 3)
        await bench.recorder.until_code("EVENTS_KEPT_UP")
    assert bench.recorder.seqs == [0, 1, 2, 3]
    assert "20,000 bytes" in bench.recorder.condition("EVENTS_OVERFLOW").message


async def test_streams_that_are_ready_at_once_are_read_in_several_turns(bench, monkeypatch):
    """Reading a socket takes its part of a turn, and each stream keeps its order."""
    turn, reads = 0, Counter[int]()

    class Counted(Backlog):
        def read(self) -> None:
            reads[turn] += 1
            super().read()

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    monkeypatch.setattr("dynctl.adapters.zmq.kv_events.Backlog", Counted)
    share, recorders, followers = LoopShare(0.0), [Recorder() for _ in range(40)], []
    for recorder in recorders:
        source = KvEventSource(7, bench.publisher().endpoint, 2)
        one = ZmqKvEvents(source, recorder, lambda: 1.0, bounds=PATIENT, share=share)
        followers.append(one)
    async with contextlib.AsyncExitStack() as stack:
        for one in followers:
            await stack.enter_async_context(running(one.run()))
        for publisher in bench.publishers:
            await publisher.subscribed()
        await stack.enter_async_context(running(count()))
        while turn == 0:  # noqa: ASYNC110  until it counts, several turns would have one number
            await asyncio.sleep(0)
        reads.clear()
        # No turn of the loop until every socket has a message. The descriptors show it once, and
        # a look at the socket would take that away from its follower.
        for publisher in bench.publishers:
            sender: zmq.Socket[bytes] = zmq.Socket.shadow(publisher.pub.underlying)
            for seq in range(3):
                sender.send_multipart([b"", encode_seq(seq), encode_batch(batch(seq))])
        for one in followers:
            assert one._backlog is not None
            assert select.select([one._backlog._socket.FD], [], [], patience(10))[0]
        for recorder in recorders:
            await recorder.until_seq(2)
    assert all(recorder.seqs == [0, 1, 2] for recorder in recorders)
    assert max(reads.values()) <= 8


async def test_what_waits_while_the_reader_waits_has_the_same_bound(bench):
    """The reader waits for an answer of the replay socket, or for room."""
    context = bench.context
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    sender.set(zmq.SNDHWM, 0)
    receiver.set(zmq.RCVHWM, 0)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    receiver.connect(endpoint)
    shadow: zmq.Socket[bytes] = zmq.Socket.shadow(receiver.underlying)
    backlog = Backlog(shadow, endpoint, most_bytes=50_000, most_messages=100)
    async with backlog.reading_ahead():
        for _ in range(40):
            await sender.send(b"x" * 1000)
        await until(lambda: backlog)
        assert not backlog.overflowed
        for _ in range(40):
            await sender.send(b"x" * 1000)
        await until(lambda: backlog.overflowed)
    assert not backlog.take()
    with pytest.raises(zmq.Again):
        shadow.recv(zmq.NOBLOCK)
    sender.close(linger=0)
    receiver.close(linger=0)


async def test_the_ranks_of_one_stream_have_a_bound(bench):
    bounds = StreamBounds(idle_check=600.0, ranks=3)
    async with bench.following(bounds=bounds) as (publisher, follower):
        for seq in range(8):
            await publisher.send(seq, batch(seq, dp_rank=seq))
        await publisher.send(8, batch(8, dp_rank=1))
        await bench.recorder.until_seq(8)
    assert bench.recorder.seqs == [0, 1, 2, 8]
    assert follower.state().malformed == 5
    assert "after 3 other ranks" in bench.recorder.condition("MALFORMED_BATCH").message


async def test_replay_that_never_answers_costs_one_wait_and_is_left_alone(bench):
    bounds = StreamBounds(replay_wait=0.05, replay_pause=30.0, idle_check=600.0)
    async with bench.following(replay=True, silent=True, bounds=bounds) as (publisher, follower):
        await bench.recorder.until_code("REPLAY_UNAVAILABLE")
        await bench.deliver(publisher, 2)
        await bench.deliver(publisher, 5)
        assert publisher.asked == [0]
        publisher.silent = False
        bench.now += 31.0
        publisher.keep(6, batch(6))
        await bench.deliver(publisher, 7)
    assert bench.recorder.seqs == [2, 5, 6, 7]
    assert publisher.asked == [0, 6]
    assert follower.state().lost == 4
    assert "no message for 0.05 s" in bench.recorder.condition("REPLAY_UNAVAILABLE").message


async def test_replay_that_answers_nonsense(bench):
    publisher = bench.publisher(replay=True)
    publisher.garbled = True
    async with running(bench.follower(publisher).run()):
        await publisher.subscribed()
        await bench.deliver(publisher, 1)
    assert "expected 8 bytes" in bench.recorder.condition("REPLAY_UNAVAILABLE").message
    assert bench.recorder.condition("EVENTS_LOST").details == {"first": 0, "count": 1}


async def test_replay_that_answers_again_is_reported(bench):
    publisher = bench.publisher(replay=True)
    publisher.garbled = True
    bounds = StreamBounds(replay_pause=30.0, idle_check=600.0)
    async with running(bench.follower(publisher, bounds=bounds).run()):
        await publisher.subscribed()
        await bench.recorder.until_code("REPLAY_UNAVAILABLE")
        publisher.garbled = False
        bench.now += 31.0
        publisher.keep(0, batch(0))
        await publisher.send(1, batch(1))
        await bench.recorder.until_code("REPLAY_AVAILABLE")
        await bench.recorder.until_seq(1)
    assert bench.recorder.seqs == [0, 1]


async def test_replay_answer_is_bounded(bench):
    publisher = bench.publisher(replay=True)
    for seq in range(50):
        publisher.keep(seq, batch(seq))
    bounds = StreamBounds(replay_bytes=1000, idle_check=600.0)
    async with running(bench.follower(publisher, bounds=bounds).run()):
        await bench.recorder.until_code("REPLAY_UNAVAILABLE")
    assert "exceeds 1000 bytes" in bench.recorder.condition("REPLAY_UNAVAILABLE").message
    assert bench.recorder.seqs == list(range(len(bench.recorder.seqs)))
    assert 0 < len(bench.recorder.seqs) < 50


async def test_replay_that_drops_the_end_of_its_answers_is_asked_on(bench):
    publisher = bench.publisher(replay=True)
    publisher.capacity = 4
    for seq in range(10):
        publisher.keep(seq, batch(seq))
    bounds = StreamBounds(replay_wait=0.5, idle_check=600.0)
    follower = bench.follower(publisher, bounds=bounds)
    async with running(follower.run()):
        await bench.recorder.until_seq(9)
    assert bench.recorder.seqs == list(range(10))
    assert publisher.asked[:3] == [0, 4, 8]
    assert follower.state().lost == 0


async def test_replay_with_a_hole_inside_is_asked_again(bench):
    publisher = bench.publisher(replay=True)
    publisher.holes = {3, 4, 8}
    for seq in range(10):
        publisher.keep(seq, batch(seq))
    follower = bench.follower(publisher)
    async with running(follower.run()):
        await bench.recorder.until_seq(9)
    assert bench.recorder.seqs == list(range(10))
    assert publisher.asked == [0, 3]
    assert follower.state().lost == 0


async def test_wrong_block_size_is_told_once_with_both_sizes(bench):
    async with bench.following(block_size=16) as (publisher, follower):
        await publisher.send(0, batch(0))
        await publisher.send(1, batch(1))
        await publisher.send(2, batch(2, stored(2), stored(3, block_size=16)))
        await bench.recorder.until_seq(2)
    mismatch = bench.recorder.condition("BLOCK_SIZE_MISMATCH")
    assert mismatch.details == {"value": 2, "expected": 16}
    assert list(mismatch.changes()) == []
    assert bench.recorder.seqs == [2]
    assert follower.state().dropped == {"BLOCK_SIZE_MISMATCH": 3}
    assert follower.state().batches == 3


async def test_rank_in_the_batch_wins_and_a_restart_clears_every_rank(bench):
    async with bench.following() as (publisher, _):
        await publisher.send(0, batch(0))
        await publisher.send(1, batch(1, dp_rank=3))
        await publisher.send(0, batch(0, life=1))
        await bench.recorder.until_seq(0, times=2)
    ranks = [v.dp_rank for v in bench.recorder.values if isinstance(v, IndexUpdate)]
    assert ranks == [0, 3, 0]
    assert bench.recorder.condition("ENGINE_RESTARTED").ranks == (0, 3)


async def test_engine_that_comes_up_after_us(bench):
    first = bench.publisher()
    await first.die()
    follower = bench.follower(first)
    async with running(follower.run()):
        assert not follower.state().connected
        publisher = bench.publisher(endpoint=first.endpoint)
        await publisher.subscribed()
        await bench.deliver(publisher, 0)
        assert follower.state().connected
    assert follower.state().restarts == 0


@pytest.mark.parametrize("seed", range(3))
async def test_lossy_network_with_replay_loses_nothing(bench, seed):
    """Dropped, repeated and swapped messages: with replay the index sees every batch in order."""
    chance = random.Random(seed)
    publisher = bench.publisher(replay=True)
    follower = bench.follower(publisher)
    count = 400
    async with running(follower.run()):
        await publisher.subscribed()
        held = None
        for seq in range(count):
            fate = 1.0 if seq % 8 == 0 or seq == count - 1 else chance.random()
            payload = publisher.keep(seq, batch(seq))
            if fate < 0.2:
                continue
            if fate < 0.3:
                held = (seq, payload)
                continue
            for number, bytes_ in [(seq, payload), *([held] if held and fate < 0.5 else [])]:
                await publisher.raw(b"", encode_seq(number), bytes_)
            if fate < 0.4:
                await publisher.raw(b"", encode_seq(seq), payload)
            if seq % 8 == 0:
                # Let the follower keep up: what it finds in one replay is only one hole to it.
                await bench.recorder.until_seq(seq)
        await bench.recorder.until_seq(count - 1)
    assert bench.recorder.seqs == list(range(count))
    state = follower.state()
    assert (state.lost, state.missing, state.restarts, state.batches) == (0, 0, 0, count)
    assert state.gaps > 10


async def test_cancelling_leaves_nothing_behind(bench):
    publisher = bench.publisher(replay=True)
    follower = bench.follower(publisher)
    task = asyncio.create_task(follower.run())
    await publisher.subscribed()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # its own context ended too, which it cannot while a socket is open
    assert not follower.state().connected


@pytest.mark.parametrize(
    ("endpoint", "host", "rank", "dialled"),
    [
        ("tcp://*:5557", "127.0.0.1", 0, "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", 2, "tcp://10.0.0.7:5559"),
        ("tcp://[::]:5557", "fd00::7", 0, "tcp://[fd00::7]:5557"),
        ("tcp://engine-1:5557", "10.0.0.7", 1, "tcp://engine-1:5558"),
        ("ipc:///run/engine.sock", "h", 0, "ipc:///run/engine.sock"),
    ],
)
def test_endpoint_is_dialled_where_the_worker_is(endpoint, host, rank, dialled):
    assert dialable_endpoint(endpoint, host, rank) == dialled


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "expected tcp://HOST:PORT"),
        ("localhost:5557", "expected tcp://HOST:PORT"),
        ("http://localhost:5557", "expected tcp://HOST:PORT"),
        ("tcp://5557", "expected tcp://HOST:PORT"),
        ("tcp://:5557", "expected tcp://HOST:PORT"),
        ("tcp://h:port", "port 'port'"),
        ("tcp://h:0", "port '0'"),
        ("tcp://h:65536", "1 to 65535"),
        ("tcp://*:*", "port '*'"),
    ],
)
def test_endpoint_that_cannot_be_dialled(endpoint, says):
    with pytest.raises(EndpointError, match=says.replace("*", r"\*")):
        dialable_endpoint(endpoint)


def reads(bench) -> list[bool]:
    return [value.complete for value in bench.recorder.values if isinstance(value, IndexRead)]


async def test_the_index_is_read_when_the_replay_socket_answered(bench):
    """Before, what the engine cached earlier may be missing; an empty answer is an answer."""
    async with bench.following(replay=True) as (_publisher, _follower):
        await until(lambda: reads(bench) == [True])
    assert IndexConnected(7, 0, True, recovering=False) in [
        change for value in bench.recorder.values for change in value.changes()
    ]


async def test_without_a_replay_socket_the_first_batch_shows_whether_anything_is_missing(bench):
    async with bench.following() as (publisher, _follower):
        await bench.recorder.until_code("STREAM_CONNECTED")
        assert reads(bench) == []
        await bench.deliver(publisher, 0)
    assert reads(bench) == [True]


async def test_the_shared_context_has_sockets_for_every_worker_that_a_frontend_accepts():
    context = new_context()
    sockets = []
    try:
        for _ in range(400):  # each followed engine takes three; ZMQ's default are 1,023 in all
            for _ in range(3):
                sockets.append(context.socket(zmq.PAIR))
        assert context.get(zmq.MAX_SOCKETS) >= 3 * FrontendLimits().workers
    finally:
        for one in sockets:
            one.close(linger=0)
        close_context(context)
