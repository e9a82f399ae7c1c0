"""The tasks that keep the index true: KV-event streams in, changes applied, lost workers swept.

Index work shares the event loop with streams of tokens, so it is done in slices of at most about
two milliseconds, with a turn of the loop between them.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dynctl.adapters.ports import IndexUpdate, StreamCondition, StreamValue
from dynctl.adapters.zmq.context import close_context, new_context
from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.adapters.zmq.kv_events import ZmqKvEvents
from dynctl.base.tasks import end_tasks
from dynctl.documents.workers import StreamState
from router_core import Applied, BlocksRemoved, BlocksStored, Change, Cleared, KvEvent

SLICE_S: Final = 0.002
#: Blocks of one event that are applied before the clock is looked at again.
PIECE_BLOCKS: Final = 256
#: Values waiting to be applied; beyond this the stream that adds one waits for the oldest.
MAX_WAITING: Final = 8192
_SWEEP_BLOCKS: Final = 500
_IDLE_SWEEP_S: Final = 0.05

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    stream: ZmqKvEvents
    task: asyncio.Task[None]


class IndexRuntime:
    """Follows engines' KV events and applies them in slices.

    ``apply`` takes one change. ``sweep(max_blocks)`` forgets some of what lost workers had, True
    while there is more. ``on_condition`` hears what streams report. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        apply: Callable[[Change], Applied],
        sweep: Callable[[int], bool],
        on_condition: Callable[[StreamCondition], None],
        clock: Callable[[], float],
    ) -> None:
        self._apply = apply
        self._sweep = sweep
        self._on_condition = on_condition
        self._clock = clock
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._waiting: deque[Iterator[Change]] = deque()
        self._wake = asyncio.Event()
        self._context: Any = None  # of ZMQ, which only the planes touch
        self._worker: asyncio.Task[None] | None = None
        self._generation: dict[int, int] = {}

    # -- streams ---------------------------------------------------------------------------

    def follow(self, source: KvEventSource) -> None:
        """Start following a rank's events; what it knew before is void and must be cleared first.

        Raises EndpointError. A stream that is followed already is replaced.
        """
        key = (source.worker_id, source.dp_rank)
        if self._context is None:
            self._context = new_context()
        generation = self._generation.get(source.worker_id, 0)

        def emit(value: StreamValue) -> None:
            # A stream that was replaced may still have something to say: nobody wants it.
            if self._generation.get(source.worker_id, 0) == generation:
                self.take(value)

        stream = ZmqKvEvents(source, emit, self._clock, context=self._context)
        old = self._streams.pop(key, None)
        if old is not None:
            old.task.cancel()
        task = asyncio.create_task(self._run(stream), name=f"kv-events {source.worker_id}")
        self._streams[key] = _Stream(stream, task)

    def unfollow(self, worker_id: int) -> None:
        """Stop all streams of a worker; nothing of theirs is applied any more."""
        self._generation[worker_id] = self._generation.get(worker_id, 0) + 1
        for key in [key for key in self._streams if key[0] == worker_id]:
            self._streams.pop(key).task.cancel()

    def states(self, worker_id: int) -> dict[int, StreamState]:
        """Rank -> how far its stream can be believed; empty for a worker without streams."""
        return {
            rank: held.stream.state()
            for (owner, rank), held in self._streams.items()
            if owner == worker_id
        }

    def all_states(self) -> dict[tuple[int, int], StreamState]:
        return {key: held.stream.state() for key, held in self._streams.items()}

    @property
    def waiting(self) -> int:
        """Values received and not applied yet."""
        return len(self._waiting)

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        self._worker = asyncio.create_task(self._work(), name="index")

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
        """A worker was lost: its blocks wait to be swept."""
        self._wake.set()

    async def drained(self) -> None:
        """Until everything received so far is applied (tests, shutdown)."""
        while self._waiting:  # noqa: ASYNC110  the worker is woken, not us
            await asyncio.sleep(0)

    # -- inside ----------------------------------------------------------------------------

    async def _run(self, stream: ZmqKvEvents) -> None:
        while True:
            try:
                await stream.run()
            except asyncio.CancelledError:
                raise
            except Exception:
                _log.exception("KV events of %s stopped; following again", stream.endpoint)
            await asyncio.sleep(1.0)

    def take(self, value: StreamValue) -> None:
        """Queue what a stream reported; beyond MAX_WAITING the oldest is applied at once."""
        if isinstance(value, StreamCondition):
            self._on_condition(value)
        while len(self._waiting) >= MAX_WAITING:
            self._finish(self._waiting.popleft())
        self._waiting.append(_pieces(value))
        self._wake.set()

    def _finish(self, changes: Iterator[Change]) -> None:
        for change in changes:
            self._apply(change)

    async def _work(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                if not self._waiting:
                    async with asyncio.timeout(_IDLE_SWEEP_S * 20):
                        await self._wake.wait()
            self._wake.clear()
            try:
                more = self._slice()
            except Exception:
                _log.exception("a change of the index failed; going on with the next")
                more = True
            if more:
                self._wake.set()
                await asyncio.sleep(0)

    def _slice(self) -> bool:
        """Work for about SLICE_S seconds; True while there is more."""
        end = self._clock() + SLICE_S
        waiting = self._waiting
        while waiting:
            changes = waiting.popleft()
            for change in changes:
                self._apply(change)
                if self._clock() >= end:
                    waiting.appendleft(changes)
                    return True
        while self._sweep(_SWEEP_BLOCKS):
            if self._clock() >= end:
                return True
        return False


def _pieces(value: StreamValue) -> Iterator[Change]:
    """The value's changes, long runs of blocks cut so that no single one is a long turn."""
    if not isinstance(value, IndexUpdate):
        yield from value.changes()
        return
    for event in value.events:
        for piece in _cut(event):
            yield KvEvent(value.worker_id, value.dp_rank, piece)


def _cut(
    event: BlocksStored | BlocksRemoved | Cleared,
) -> Iterator[BlocksStored | BlocksRemoved | Cleared]:
    if isinstance(event, Cleared) or len(event.block_hashes) <= PIECE_BLOCKS:
        yield event
        return
    for at in range(0, len(event.block_hashes), PIECE_BLOCKS):
        hashes = event.block_hashes[at : at + PIECE_BLOCKS]
        if isinstance(event, BlocksRemoved):
            yield BlocksRemoved(hashes, event.tier)
            continue
        # A piece hangs on the last block of the one before, as the whole run would.
        parent = event.block_hashes[at - 1] if at else event.parent_hash
        local = event.local_hashes[at : at + PIECE_BLOCKS]
        yield BlocksStored(parent, hashes, local, event.tier)
