"""The tasks that update the index: follow KV-event streams, apply changes, sweep lost workers.

Index work shares the event loop with streams of tokens and decisions. So in each turn of the loop
the streams of events take about a millisecond together, and the changes of the index half of one.
That is CPU time: on a busy machine the process is stopped within it, and would make no headway.
Where many changes wait, and a turn of the loop is long and comes seldom, they get more.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from dynctl.adapters.ports import IndexUpdate, StreamCondition, StreamValue
from dynctl.adapters.zmq.context import close_context, new_context, ready_sockets
from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.adapters.zmq.kv_events import ZmqKvEvents
from dynctl.base.tasks import LoopShare, Supervisor, end_tasks
from dynctl.documents.workers import StreamState
from router_core import Applied, BlocksStored, CacheEvent, Change, Cleared, KvEvent

SLICE_S: Final = 0.0005
#: With so many values that wait a slice is twice as long, and at most so many times as long: a
#: burst of a thousand events is no backlog, and decisions would wait for it.
_BACKLOG: Final = 512
_MOST_SLICES: Final = 10
#: Seconds of a turn that streams have together.
STREAMS_S: Final = 0.001
#: Blocks of one event that are applied before the clock is read again.
PIECE_BLOCKS: Final = 128
#: Values waiting to be applied; beyond this the stream that adds one waits for the oldest.
MAX_WAITING: Final = 8192
#: Blocks of one worker that wait to be applied; beyond this its streams wait. One batch more may.
MAX_WAITING_BLOCKS: Final = 256 * 1024
_SWEEP_BLOCKS: Final = 250
_IDLE_SWEEP_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Queued:
    """A value's changes that wait to be applied, with their number of blocks."""

    worker_id: int
    generation: int
    changes: Iterator[Change]
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class IndexSeed:
    """The index of a rank that another router had, to begin with.

    ``sequence`` and ``digest``: of the last batch in it, at ``endpoint``.
    """

    endpoint: str
    block_size: int
    sequence: int
    digest: int
    events: Callable[[], Iterator[CacheEvent]]


@dataclass(frozen=True, slots=True)
class _Room:
    """The room for the values of one worker."""

    runtime: "IndexRuntime"
    worker_id: int

    @property
    def full(self) -> bool:
        return self.runtime.blocks[self.worker_id] > MAX_WAITING_BLOCKS

    async def wait(self) -> None:
        while self.full:
            self.runtime.applied.clear()
            await self.runtime.applied.wait()


@dataclass(slots=True)
class _Stream:
    stream: ZmqKvEvents
    task: asyncio.Task[None]


class IndexRuntime:
    """Follows engines' KV events and applies them in slices.

    ``apply`` takes one change. ``sweep(max_blocks)`` removes blocks of lost workers; True while
    there are more. ``on_condition`` gets what streams report. ``clock``: monotonic seconds.
    ``tasks`` runs the streams and the applying task. ``worked``: CPU seconds of this
    thread; ``wall``: seconds of a clock that is never slower.
    """

    def __init__(
        self,
        apply: Callable[[Change], Applied],
        sweep: Callable[[int], bool],
        on_condition: Callable[[StreamCondition], None],
        clock: Callable[[], float],
        tasks: Supervisor,
        worked: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        self._apply = apply
        self._sweep = sweep
        self._on_condition = on_condition
        self._clock = clock
        self._worked = worked
        self._wall = wall
        self._tasks = tasks
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._waiting: deque[_Queued] = deque()
        #: Worker id -> blocks that wait to be applied; set when some are not any more.
        self.blocks: Counter[int] = Counter()
        self.applied = asyncio.Event()
        self._wake = asyncio.Event()
        self._context: Any = None  # ZMQ's; only adapters use it
        self._ready = ready_sockets()
        self._share = LoopShare(STREAMS_S, worked)
        self._slice_ended = -math.inf
        self._worker: asyncio.Task[None] | None = None
        #: (worker id, rank) -> what its stream begins with.
        self.seeds: dict[tuple[int, int], IndexSeed] = {}
        #: Ranks that began with a seed.
        self.seeded = 0
        #: Worker id -> how often it was unfollowed; values queued before that are stale.
        self._generation: Counter[int] = Counter()

    # -- streams ---------------------------------------------------------------------------

    def follow(self, source: KvEventSource, name: str = "") -> None:
        """Start following a rank's events; the caller has cleared the rank's index.

        ``name``: the worker's. Raises EndpointError. A stream that is followed already is replaced.
        """
        key = (source.worker_id, source.dp_rank)
        if self._context is None:
            self._context = new_context()
        generation = self._generation[source.worker_id]

        def emit(value: StreamValue) -> None:
            # A stream that was replaced may still emit while it ends.
            if self._generation[source.worker_id] == generation:
                self.take(value)

        stream = ZmqKvEvents(
            source,
            emit,
            self._clock,
            context=self._context,
            share=self._share,
            readers=self._ready,
            room=_Room(self, source.worker_id),
        )
        seed = self.seeds.pop(key, None)
        if seed is not None and self._fits(seed, source, stream):
            stream.resume(seed.sequence, seed.digest)
            begin = _seed_changes(*key, seed.events())
            self._waiting.append(_Queued(source.worker_id, generation, begin))
            self._wake.set()
            self.seeded += 1
        old = self._streams.pop(key, None)
        if old is not None:
            old.task.cancel()
        of = f"{name or source.worker_id} rank {source.dp_rank}"
        task = self._tasks.start("KV event stream", stream.run, of)
        self._streams[key] = _Stream(stream, task)

    @staticmethod
    def _fits(seed: IndexSeed, source: KvEventSource, stream: ZmqKvEvents) -> bool:
        return seed.endpoint == stream.endpoint and seed.block_size == source.block_size

    def position(self, worker_id: int, dp_rank: int) -> tuple[str, int, int] | None:
        """Endpoint of a rank's stream, number and digest of its last batch; None unless it is
        connected and nothing is missing. Only what is applied counts while nothing waits."""
        held = self._streams.get((worker_id, dp_rank))
        position = None if held is None else held.stream.position()
        if held is None or position is None:
            return None
        return held.stream.endpoint, *position

    def unfollow(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Stop all streams of a worker and drop their values that are not applied yet.

        With ``dp_rank``: the stream of this rank alone; what waits of it is applied first.
        """
        if dp_rank is None:
            self._generation[worker_id] += 1
        else:
            own = [queued for queued in self._waiting if queued.worker_id == worker_id]
            for queued in own:
                self._waiting.remove(queued)
                self._finish(queued)
        for key in [key for key in self._streams if key[0] == worker_id]:
            if dp_rank is None or key[1] == dp_rank:
                self._streams.pop(key).task.cancel()

    def states(self, worker_id: int) -> dict[int, StreamState]:
        """Rank -> state of its stream; empty for a worker without streams."""
        return {
            rank: held.stream.state()
            for (owner, rank), held in self._streams.items()
            if owner == worker_id
        }

    def states_by_worker(self) -> dict[int, dict[int, StreamState]]:
        """Worker id -> rank -> state of its stream."""
        states: dict[int, dict[int, StreamState]] = {}
        for (worker_id, rank), held in self._streams.items():
            states.setdefault(worker_id, {})[rank] = held.stream.state()
        return states

    def all_states(self) -> dict[tuple[int, int], StreamState]:
        return {key: held.stream.state() for key, held in self._streams.items()}

    async def first_read(self, timeout_s: float) -> None:
        """Wait until every followed stream tried to read what its engine caches, and what was read
        is applied; at most ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for held in list(self._streams.values()):
                    await held.stream.tried()
                await self.drained()

    @property
    def waiting(self) -> int:
        """Values received and not applied yet."""
        return len(self._waiting)

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        self._worker = self._tasks.start("index update", self._work)

    async def close(self) -> None:
        """Stop everything; leaves no task and no socket behind."""
        tasks = [held.task for held in self._streams.values()]
        if self._worker is not None:
            tasks.append(self._worker)
        self._streams.clear()
        await end_tasks(tasks)
        if self._context is not None:
            close_context(self._context)
            self._context = None

    def request_sweep(self) -> None:
        """Have the blocks of lost workers swept."""
        self._wake.set()

    async def drained(self) -> None:
        """Wait until all received values are applied (tests, shutdown)."""
        while self._waiting:  # noqa: ASYNC110  no event for it
            await asyncio.sleep(0)

    # -- inside ----------------------------------------------------------------------------

    def take(self, value: StreamValue) -> None:
        """Queue what a stream reported; beyond MAX_WAITING the oldest is applied at once."""
        if isinstance(value, StreamCondition):
            self._on_condition(value)
        while len(self._waiting) >= MAX_WAITING:
            self._finish(self._waiting.popleft())
        generation = self._generation[value.worker_id]
        blocks = _blocks(value)
        self.blocks[value.worker_id] += blocks
        self._waiting.append(_Queued(value.worker_id, generation, _pieces(value), blocks))
        self._wake.set()

    def _stale(self, queued: _Queued) -> bool:
        return queued.generation != self._generation[queued.worker_id]

    def _finish(self, queued: _Queued) -> None:
        try:
            for change in () if self._stale(queued) else queued.changes:
                self._apply(change)
        finally:
            self._left(queued)

    def _left(self, queued: _Queued) -> None:
        """A value waits no more."""
        self.blocks[queued.worker_id] -= queued.blocks
        if not self.blocks[queued.worker_id]:
            del self.blocks[queued.worker_id]
        self.applied.set()

    async def _work(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                if not self._waiting:
                    async with asyncio.timeout(_IDLE_SWEEP_S * 20):
                        await self._wake.wait()
            self._wake.clear()
            try:
                more = self._slice()
            except Exception as error:
                self._tasks.report("index update", error)
                more = True
            if more:
                self._wake.set()
                await asyncio.sleep(0)

    def _slice(self) -> bool:
        """Work for about SLICE_S seconds; True while there is more. With a backlog longer, if the
        turns of the others are long too: at most half of what they had since the last slice."""
        waiting = self._waiting
        seconds = SLICE_S * min(_MOST_SLICES, 1 + len(waiting) // _BACKLOG)
        others = self._clock() - self._slice_ended
        try:
            return self._apply_for(min(seconds, max(SLICE_S, others / 2)))
        finally:
            self._slice_ended = self._clock()

    def _apply_for(self, seconds: float) -> bool:
        """Work for so many seconds of CPU; True while there is more."""
        waiting = self._waiting
        # CPU time is never ahead of the wall clock, and reading it is a call of the system.
        wall, worked = self._wall, self._worked
        end, worked_end = wall() + seconds, worked() + seconds
        while waiting:
            queued = waiting.popleft()
            try:
                for change in () if self._stale(queued) else queued.changes:
                    self._apply(change)
                    if wall() >= end and worked() >= worked_end:
                        waiting.appendleft(queued)
                        return True
            except BaseException:
                self._left(queued)
                raise
            self._left(queued)
        while self._sweep(_SWEEP_BLOCKS):
            if wall() >= end and worked() >= worked_end:
                return True
        return False


def _seed_changes(worker_id: int, dp_rank: int, events: Iterator[CacheEvent]) -> Iterator[Change]:
    for event in events:
        for piece in _cut_event(event):
            yield KvEvent(worker_id, dp_rank, piece)


def _blocks(value: StreamValue) -> int:
    """The number of blocks in a value."""
    if not isinstance(value, IndexUpdate):
        return 0
    return sum(len(event.block_hashes) for event in value.events if not isinstance(event, Cleared))


def _pieces(value: StreamValue) -> Iterator[Change]:
    """The value's changes, with long runs of blocks cut into pieces."""
    if not isinstance(value, IndexUpdate):
        yield from value.changes()
        return
    for event in value.events:
        for piece in _cut_event(event):
            yield KvEvent(value.worker_id, value.dp_rank, piece)


def _cut_event(event: CacheEvent) -> Iterator[CacheEvent]:
    if isinstance(event, Cleared) or len(event.block_hashes) <= PIECE_BLOCKS:
        yield event
        return
    for at in range(0, len(event.block_hashes), PIECE_BLOCKS):
        hashes = event.block_hashes[at : at + PIECE_BLOCKS]
        if not isinstance(event, BlocksStored):
            yield replace(event, block_hashes=hashes)
            continue
        # The parent of a piece is the last block of the piece before, as in the whole run.
        parent = event.block_hashes[at - 1] if at else event.parent_hash
        local = event.local_hashes[at : at + PIECE_BLOCKS]
        yield replace(event, parent_hash=parent, block_hashes=hashes, local_hashes=local)
