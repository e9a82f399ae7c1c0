"""Follow one engine's KV events over ZMQ, recover gaps from its replay socket, detect restarts.

vLLM numbers its batches from 0 and keeps the recent ones for replay. A gap is requested from its
first missing number. After a reconnect the last applied batch is requested too: a process that does
not return the same bytes is a new one, and the index of the old one is invalid. ZMQ reconnects
silently, so there is no other sign.

Without an answer of the replay socket nothing shows whether the process is the same. A number above
or below the expected one is taken for that of a new process. The expected number is applied, and
the index is not current until the replay socket returns the batch from before the lost connection,
or the engine clears its cache.

Events that cannot be recovered are reported (EVENTS_LOST) and the stream continues: the index then
misses blocks, which costs overlap, and may have blocks that were evicted meanwhile. Blocks with a
lost parent are refused by the index until the chain is stored again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final, Protocol

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import parse_monitor_message

from dynctl.adapters.ports import IndexRead, IndexUpdate, StreamCode, StreamCondition, StreamValue
from dynctl.adapters.zmq.context import Backlog, Readers, SocketWatch, drain, subscriber
from dynctl.adapters.zmq.kv_event_source import (
    DEFAULT_BOUNDS,
    KvEventSource,
    StreamBounds,
    dialable_endpoint,
)
from dynctl.adapters.zmq.replay import ReplayFailed, ReplaySilent, replay
from dynctl.base.decode_errors import WireError
from dynctl.base.tasks import TURN_BYTES, TURN_MESSAGES, LoopShare
from dynctl.documents.workers import StreamState
from dynctl.wire.event_sequence import EventSequence, Verdict
from dynctl.wire.index_events import Drop, DropCode, to_index_events
from dynctl.wire.vllm_events import (
    EventBatch,
    decode_batch,
    decode_message,
)
from router_core import Cleared

# ZMQ drops the connection at its own limit, so a batch that is merely too big must stay below it to
# be reported as one.
_MESSAGE_MARGIN: Final = 4
_COUNTERS: Final = (
    *("batches", "gaps", "healed", "lost", "duplicates", "late", "restarts"),
    *("malformed", "unknown_events", "unknown_fields"),
)
_WATCHED: Final = (
    int(zmq.Event.HANDSHAKE_SUCCEEDED)
    | int(zmq.Event.DISCONNECTED)
    | int(zmq.Event.CONNECT_RETRIED)
)
#: Seconds before a new socket replaces one that lost its connection: the first time, and at most.
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
#: A connection that lasted this long starts again with the first pause.
_STABLE_S: Final = 10.0


class Room(Protocol):
    """The room that the reader of the emitted values has for more of them."""

    @property
    def full(self) -> bool: ...

    async def wait(self) -> None:
        """Wait until it is not full."""


class ZmqKvEvents:
    """The stream of one engine (one publishing socket).

    ``emit`` is called with each value, in order, from the event loop; it must not block.
    ``clock`` gives monotonic seconds. With a shared ``context`` all streams use one IO thread, and
    with a ``share`` they take a bounded part of each turn of the event loop together; ``readers``
    bounds how many of them a turn wakes. While there is no ``room`` nothing is decoded.
    Raises EndpointError for an invalid endpoint.
    """

    def __init__(
        self,
        source: KvEventSource,
        emit: Callable[[StreamValue], None],
        clock: Callable[[], float],
        *,
        bounds: StreamBounds = DEFAULT_BOUNDS,
        context: zmq.asyncio.Context | None = None,
        share: LoopShare | None = None,
        readers: Readers | None = None,
        room: Room | None = None,
    ) -> None:
        self.source = source
        self.endpoint = dialable_endpoint(source.endpoint, source.host)
        self.replay = dialable_endpoint(source.replay, source.host) if source.replay else None
        self._emit = emit
        self._clock = clock
        self._bounds = bounds
        self._context = context
        self._share = share
        self._readers = readers
        self._room = room
        self._sequence = EventSequence()
        self._connected = False
        self._changed_at = clock()
        self._lost = False
        self._last_batch_at: float | None = None
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._dropped: dict[str, int] = {}
        self._reported: set[str] = set()
        self._salted: dict[int, str] | None = {} if source.salt_each_block else None
        self._pairs = source.expects_pairs
        self._missing: dict[int, int] = {source.dp_rank: 0}  # missing batches of each rank's index
        self._reconnected = False
        #: Number and digest of the last batch that is certainly of the process whose index this is,
        #: while later ones may be of another process; and the ranks whose index is in doubt.
        self._proven: tuple[int, int] | None = None
        self._doubted: set[int] = set()
        self._unread = True  # what the engine cached before the connection may be missing
        self._check_due = False
        self._replay_blocked_until = float("-inf")
        self._tried = asyncio.Event()
        self._backlog: Backlog | None = None

    async def tried(self) -> None:
        """Wait until the first reading of what the engine caches succeeded or failed.

        Without a replay socket there is no reading: then until the connection is made or refused.
        """
        await self._tried.wait()

    def resume(self, sequence: int, digest: int) -> None:
        """Begin after a batch that another reader applied; before :meth:`run`.

        The replay socket shows whether the engine is still the process that published it.
        """
        self._sequence.advance(sequence, digest)
        self._reconnected = True  # without a replay socket a gap means another process

    def position(self) -> tuple[int, int] | None:
        """Number and digest of the last applied batch; None unless the stream is connected and
        nothing is missing."""
        digest = self._sequence.last_digest
        incomplete = self._unread or self._incomplete() > 0
        if not self._connected or incomplete or digest is None:
            return None
        return self._sequence.next_number - 1, digest

    def state(self) -> StreamState:
        """A snapshot of the counters."""
        return StreamState(
            connected=self._connected,
            for_s=max(0.0, self._clock() - self._changed_at),
            last_seq=self._sequence.last,
            last_batch_at=self._last_batch_at,
            missing=self._incomplete(),
            dropped=dict(self._dropped),
            **self._counts,
        )

    def _incomplete(self) -> int:
        """Batches that are missing, at least 1 while an unknown number may be."""
        return max(max(self._missing.values()), int(bool(self._doubted)))

    async def run(self) -> None:
        """Follow the stream until cancelled; leaves no socket behind."""
        context = self._context or zmq.asyncio.Context()
        pause = _PAUSE_S
        try:
            while True:
                # ZMQ does not reconnect after a message over its limit, so that every lost
                # connection gets a new socket; what was missed comes from the replay socket.
                began = self._clock()
                with contextlib.ExitStack() as stack:
                    await self._follow(context, stack)
                if self._clock() - began >= _STABLE_S:
                    pause = _PAUSE_S
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
        finally:
            self._connected = False
            if self._context is None:
                context.term()

    async def _follow(self, context: zmq.asyncio.Context, stack: contextlib.ExitStack) -> None:
        """Follow one socket until its connection is lost and its last message is read."""
        self._lost = False
        sub, monitor = subscriber(context, _WATCHED, stack)
        sub.set(zmq.RCVHWM, self._bounds.queue_messages)
        sub.set(zmq.MAXMSGSIZE, _MESSAGE_MARGIN * self._bounds.batch.payload_bytes)
        sub.set(zmq.IPV6, 1)
        sub.set(zmq.RECONNECT_IVL, 100)
        sub.set(zmq.RECONNECT_IVL_MAX, 2000)
        # A lost host sends no FIN: without heartbeats its stream looks idle.
        sub.set(zmq.HEARTBEAT_IVL, 5000)
        sub.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        sub.set(zmq.SUBSCRIBE, self.source.topic)
        sub.connect(self.endpoint)

        watch = SocketWatch(sub, monitor, readers=self._readers)
        stack.callback(watch.close)
        backlog = self._backlog = Backlog(
            sub,
            self.endpoint,
            most_bytes=self._bounds.queue_bytes,
            most_messages=self._bounds.queue_messages,
        )
        began = self._clock()
        while not backlog.overflowed:
            at_once = self._lost or bool(backlog)
            ready = at_once or await watch.wait(self._bounds.idle_check)
            if self._share is not None:
                # Before the socket is read, which takes as long as to decode a short message.
                await self._share.turn()
            backlog.read()
            received = backlog.take()
            # Read after the messages: a disconnect is always reported before the first message of
            # the connection that followed, so its messages never count for the old one.
            self._watch_connection(monitor)
            if self._connected and (self._check_due or not ready):
                self._check_due = False
                await self._check_identity(context)
                self._tried.set()
            for number, frames in enumerate(received):
                if number and self._share is not None:
                    await self._share.turn()
                await self._wait_for_room(backlog)
                await self._take_message(context, frames)
            if self._clock() - began >= _STABLE_S and StreamCode.EVENTS_OVERFLOW in self._reported:
                self._reported.discard(StreamCode.EVENTS_OVERFLOW)
                self._report(StreamCode.EVENTS_KEPT_UP, "its messages are read as they arrive")
            if not received and self._lost:
                return
            if received and self._share is None:  # else the share lets others run
                await asyncio.sleep(0)
        self._overflow()

    # -- connection -------------------------------------------------------------------------

    def _watch_connection(self, changes: zmq.Socket[bytes]) -> None:
        for frames in drain(changes):
            event = parse_monitor_message(frames)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected, self._changed_at = True, self._clock()
                self._check_due = True
                self._note_read(False)
                self._replay_blocked_until = float("-inf")
                self._report(StreamCode.STREAM_CONNECTED, f"connected to {self.endpoint}")
            elif event == zmq.Event.DISCONNECTED:
                self._connected, self._changed_at = False, self._clock()
                self._reconnected = self._lost = True
                self._report(
                    StreamCode.STREAM_DISCONNECTED,
                    f"lost {self.endpoint}; reconnecting, its index is kept until it responds",
                )
            elif event == zmq.Event.CONNECT_RETRIED:
                self._tried.set()

    async def _wait_for_room(self, backlog: Backlog) -> None:
        if self._room is not None and self._room.full:
            async with backlog.reading_ahead():
                await self._room.wait()

    def _overflow(self) -> None:
        """The connection was closed, because too much waited."""
        self._connected, self._changed_at = False, self._clock()
        self._reconnected = self._lost = True
        self._tried.set()
        self._report_once(
            StreamCode.EVENTS_OVERFLOW,
            f"more than {self._bounds.queue_bytes:,} bytes of its messages waited to be read: the "
            "connection is closed and opened again, and they are lost",
        )
        self._report(StreamCode.STREAM_DISCONNECTED, f"closed {self.endpoint}; reconnecting")

    def _note_read(self, complete: bool) -> None:
        if complete is self._unread:
            self._unread = not complete
            self._emit(IndexRead(self.source.worker_id, tuple(sorted(self._missing)), complete))

    async def _check_identity(self, context: zmq.asyncio.Context) -> None:
        """Request the last proven batch and all after it; the same process returns it as is."""
        last = self._last_proven()
        if last is None:
            await self._recover(context, 0)
        else:
            await self._recover(context, last[0], verify=True)

    def _last_proven(self) -> tuple[int, int] | None:
        """Number and digest of the last batch that is certainly of the process whose index this
        is; None before the first batch."""
        if self._proven is not None:
            return self._proven
        last, digest = self._sequence.last, self._sequence.last_digest
        return None if last is None or digest is None else (last, digest)

    # -- live messages ----------------------------------------------------------------------

    async def _take_message(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        try:
            _, seq, payload = decode_message(frames)
        except WireError as error:
            self._counts["malformed"] += 1
            self._report_once(StreamCode.MALFORMED_MESSAGE, f"skipped a message: {error}")
            return
        batch, problem = self._read(payload)
        digest = xxh3_64_intdigest(payload)
        ts = None if batch is None else batch.ts
        # Until the next connection is made, what is read came over the lost one.
        reconnected = self._reconnected and self._connected
        verdict = self._sequence.judge(seq, digest, ts, reconnected=reconnected)
        started = self._sequence.last is not None
        if verdict is Verdict.GAP and started and reconnected:
            # The replay socket did not identify the process. A restart is by far the likelier cause
            # of a gap after a lost connection, and an empty index is only slower, while a stale
            # one routes to lost blocks.
            verdict = Verdict.RESTART
        if verdict is Verdict.RESTART:
            self._restart(f"sequence went from {self._sequence.last} to {seq}", seq)
            verdict = Verdict.NEXT if seq == 0 else Verdict.GAP
        if verdict is Verdict.GAP:
            self._counts["gaps"] += 1
            if self._doubted:
                await self._check_identity(context)
            else:
                await self._recover(context, self._sequence.next_number)
            verdict = self._sequence.judge(seq, digest, ts, reconnected=False)
        if verdict is Verdict.DUPLICATE:
            self._counts["duplicates"] += 1
        elif verdict is Verdict.LATE:
            self._counts["late"] += 1
        else:
            if verdict is Verdict.UNPROVEN:
                self._doubt()
            self._apply(seq, digest, batch, problem, replayed=False)

    def _read(self, payload: bytes) -> tuple[EventBatch | None, str]:
        try:
            return decode_batch(payload, self._bounds.batch), ""
        except WireError as error:
            return None, str(error)

    def _apply(
        self, seq: int, digest: int, batch: EventBatch | None, problem: str, *, replayed: bool
    ) -> None:
        """Take the batch ``seq``; skipped numbers before it are lost from here on."""
        first_missing = self._sequence.next_number
        skipped = self._sequence.advance(seq, digest, None if batch is None else batch.ts)
        if skipped:
            self._lose(first_missing, skipped)
        if self._connected:
            self._reconnected = False
        if not replayed:
            # In sequence with what is applied, or the first of all; what is missing is known.
            self._note_read(True)
        self._counts["batches"] += 1
        self._counts["healed"] += replayed
        self._last_batch_at = self._clock()
        if batch is None:
            self._counts["malformed"] += 1
            self._report(
                StreamCode.MALFORMED_BATCH, f"batch {seq} is unreadable: {problem}", {"seq": seq}
            )
            self._lose(seq, 1)
            return
        rank = self._rank_of(batch, seq)
        if rank is not None:
            self._apply_events(seq, rank, batch, replayed=replayed)

    def _rank_of(self, batch: EventBatch, seq: int) -> int | None:
        """The rank of a batch; None for one more than an engine has."""
        rank = self.source.dp_rank if batch.data_parallel_rank is None else batch.data_parallel_rank
        if rank in self._missing:
            return rank
        if len(self._missing) >= self._bounds.ranks:
            self._counts["malformed"] += 1
            self._report_once(
                StreamCode.MALFORMED_BATCH,
                f"batch {seq} is of rank {rank}, after {self._bounds.ranks:,} other ranks",
                {"seq": seq},
            )
            return None
        self._add_rank(rank)
        return rank

    def _apply_events(self, seq: int, rank: int, batch: EventBatch, *, replayed: bool) -> None:
        converted = to_index_events(
            batch,
            self.source.block_size,
            adapter_names=self.source.adapter_names,
            cache_namespace=self.source.cache_namespace,
            is_eagle=self.source.is_eagle,
            salted=self._salted,
        )
        self._count_unknown(batch)
        for drop in converted.drops:
            self._drop(rank, drop)
        if converted.pairs is not None and converted.pairs is not self._pairs:
            self._report_pairs(converted.pairs)
        if converted.events:
            self._emit(
                IndexUpdate(self.source.worker_id, rank, seq, converted.events, batch.ts, replayed)
            )
        incomplete = self._missing[rank] or rank in self._doubted
        if incomplete and any(isinstance(event, Cleared) for event in converted.events):
            self._missing[rank] = 0
            self._doubted.discard(rank)
            if not self._doubted:
                self._proven = None
            self._report(
                StreamCode.INDEX_CURRENT,
                "the engine cleared its cache, so the index is complete again",
                ranks=(rank,),
                missing=0,
            )

    def _add_rank(self, rank: int) -> None:
        """Take the batches of one more rank; what was missed may have been its batches."""
        missing = self._missing[rank] = max(self._missing.values())
        if self._doubted:
            self._doubted.add(rank)
            missing = max(missing, 1)
        if missing:
            self._report(
                StreamCode.EVENTS_LOST,
                f"batches were lost before the first one of rank {rank}: its index is incomplete",
                ranks=(rank,),
                missing=missing,
            )

    # -- replay -----------------------------------------------------------------------------

    async def _recover(
        self, context: zmq.asyncio.Context, start: int, *, verify: bool = False
    ) -> None:
        """Apply the batches of the replay socket from ``start``; the rest of a gap stays.

        With ``verify``, ``start`` is the last applied batch and must be returned unchanged, else
        the engine is a new process and all its batches are requested.
        """
        if self.replay is None or self._clock() < self._replay_blocked_until:
            return
        assert self._backlog is not None
        async with self._backlog.reading_ahead():
            await self._read_replay(context, start, verify=verify)

    async def _read_replay(self, context: zmq.asyncio.Context, start: int, *, verify: bool) -> None:
        try:
            if verify and not await self._same_process(context, start):
                start = 0
            await self._apply_replay(context, start)
            self._note_read(True)
            if StreamCode.REPLAY_UNAVAILABLE in self._reported:
                self._reported.discard(StreamCode.REPLAY_UNAVAILABLE)
                self._report(StreamCode.REPLAY_AVAILABLE, f"{self.replay} answers again")
        except ReplayFailed as error:
            self._replay_blocked_until = self._clock() + self._bounds.replay_pause
            self._report_once(
                StreamCode.REPLAY_UNAVAILABLE,
                f"replay from {self.replay} failed: {error}; next attempt after "
                f"{self._bounds.replay_pause:g} s at the earliest",
                {"start": start},
            )

    async def _same_process(self, context: zmq.asyncio.Context, last: int) -> bool:
        content, seq = "nothing", last
        proven = self._last_proven()
        async with contextlib.aclosing(self._request_replay(context, last)) as answer:
            async for seq, payload in answer:
                if (seq, xxh3_64_intdigest(payload)) == proven:
                    self._reconnected = False
                    self._end_doubt()
                    return True
                content = f"batch {seq} with other content"
                break
        self._restart(f"replay of batch {last} returned {content}", seq)
        return False

    async def _apply_replay(self, context: zmq.asyncio.Context, start: int) -> None:
        """Apply the batches from ``start``. vLLM's ROUTER drops what exceeds its queue of 1000, in
        the middle or at the end, so requests continue as long as they return batches."""
        while True:
            before = self._sequence.last
            try:
                if await self._apply_answer(context, start):
                    return
            except ReplaySilent:
                if self._sequence.last == before:
                    raise
            start = self._sequence.next_number

    async def _apply_answer(self, context: zmq.asyncio.Context, start: int) -> bool:
        """Whether the response had no gap inside; a gap at its beginning is beyond the engine's
        memory and is lost."""
        applied = turn = size = 0
        async with contextlib.aclosing(self._request_replay(context, start)) as answer:
            async for seq, payload in answer:
                if self._room is not None and self._room.full:
                    await self._room.wait()
                if applied and seq > self._sequence.next_number:
                    return False
                if seq >= self._sequence.next_number:
                    batch, problem = self._read(payload)
                    self._apply(seq, xxh3_64_intdigest(payload), batch, problem, replayed=True)
                    applied += 1
                turn, size = turn + 1, size + len(payload)
                if turn == TURN_MESSAGES or size >= TURN_BYTES:
                    turn = size = 0
                    await asyncio.sleep(0)
        return True

    def _request_replay(
        self, context: zmq.asyncio.Context, start: int
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        if self.replay is None:
            raise ReplayFailed("the worker has no replay socket")
        bounds = self._bounds
        return replay(
            context,
            self.replay,
            start,
            wait=bounds.replay_wait,
            total=bounds.replay_total,
            max_bytes=bounds.replay_bytes,
            max_batch_bytes=_MESSAGE_MARGIN * bounds.batch.payload_bytes,
        )

    # -- reporting --------------------------------------------------------------------------

    def _restart(self, why: str, seq: int) -> None:
        last = self._sequence.last
        self._sequence.reset()
        self._reported.clear()
        self._reconnected = False
        self._proven = None
        self._doubted.clear()
        ranks = tuple(sorted(self._missing))
        self._missing = dict.fromkeys(ranks, 0)
        self._counts["restarts"] += 1
        details: dict[str, int | str] = {"seq": seq}
        if last is not None:
            details["last_seq"] = last
        self._report(
            StreamCode.ENGINE_RESTARTED,
            f"the engine restarted ({why}): its index starts empty",
            details,
            clears=True,
            missing=0,
        )

    def _doubt(self) -> None:
        """The next batch has the expected number after a lost connection, which proves nothing."""
        if self._proven is None:
            self._proven = self._last_proven()
        new = self._missing.keys() - self._doubted
        self._doubted |= new
        way = "has no replay socket" if self.replay is None else "does not replay its batches"
        self._report(
            StreamCode.EVENTS_LOST,
            f"the connection was lost, and the engine {way}: it may be a new process that has "
            "published as many batches, so its index is kept but may be out of date until the "
            "engine clears its cache; set the worker's replay endpoint",
            ranks=tuple(sorted(new)) or None,
            missing=self._incomplete(),
        )

    def _end_doubt(self) -> None:
        """The replay socket has shown that the process is the same."""
        self._proven = None
        complete = tuple(sorted(rank for rank in self._doubted if not self._missing[rank]))
        self._doubted.clear()
        if complete:
            self._report(
                StreamCode.INDEX_CURRENT,
                "the replay socket shows that the engine is the same process",
                ranks=complete,
                missing=0,
            )

    def _lose(self, first: int, count: int) -> None:
        self._counts["lost"] += count
        for rank in self._missing:
            self._missing[rank] += count
        self._report(
            StreamCode.EVENTS_LOST,
            f"{count} batch{'es' if count > 1 else ''} from {first} on are lost: "
            "the index is kept but incomplete, and refuses blocks after a lost parent",
            {"first": first, "count": count},
            missing=max(self._missing.values()),
        )

    def _drop(self, rank: int, drop: Drop) -> None:
        self._dropped[drop.code] = self._dropped.get(drop.code, 0) + drop.blocks
        self._report_once(
            drop.code, drop.message, {"value": drop.value, "expected": drop.expected}, (rank,)
        )

    def _report_pairs(self, pairs: bool) -> None:
        self._pairs = pairs
        if pairs:
            code, what = StreamCode.PAIRS_PUBLISHED, "pairs of tokens (speculative decoding, EAGLE)"
        else:
            code, what = StreamCode.TOKENS_PUBLISHED, "single tokens"
        self._report(code, f"the engine publishes {what}")

    def _count_unknown(self, batch: EventBatch) -> None:
        if batch.unknown_fields:
            self._counts["unknown_fields"] += batch.unknown_fields
        if batch.unknown_types:
            self._counts["unknown_events"] += len(batch.unknown_types)
            name = batch.unknown_types[0]
            self._report_once(
                StreamCode.UNKNOWN_EVENT, f"events of type {name!r} are skipped", {"type": name}
            )

    def _report_once(
        self,
        code: StreamCode | DropCode,
        message: str,
        details: Mapping[str, int | str] | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        """Report the first time only, and again after a restart; counters count the rest."""
        if code not in self._reported:
            self._reported.add(code)
            self._report(code, message, details, ranks)

    def _report(
        self,
        code: StreamCode | DropCode,
        message: str,
        details: Mapping[str, int | str] | None = None,
        ranks: tuple[int, ...] | None = None,
        *,
        clears: bool = False,
        missing: int | None = None,
    ) -> None:
        self._emit(
            StreamCondition(
                self.source.worker_id,
                code.value,
                message,
                tuple(sorted(self._missing)) if ranks is None else ranks,
                details or {},
                clears,
                missing,
            )
        )
