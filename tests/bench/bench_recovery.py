"""What the recovery of a large index does to streams that run meanwhile.

64 streams get a token every 5 ms from another process; the time from sending to arrival is how long
something else held the event loop. First nothing else runs, then the events of a million (worker,
block) entries are applied by `IndexRuntime`, 32 blocks an event, 8 events a batch, put in as fast
as it takes them, within the share of a turn that streams of engines have; then a worker is lost and
swept. *Added* is the p99 with the work less the
p99 without. Decoding the events from the wire is not part of it.
"""

import asyncio
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from dynctl.adapters.ports import IndexUpdate, StreamCondition
from dynctl.base.tasks import LoopShare
from dynctl.serving.http.start import settle_garbage_collector
from dynctl.serving.routing.index_runtime import MAX_WAITING, STREAMS_S, IndexRuntime
from dynctl.serving.routing.service import RoutingService
from router_core import BlocksStored, Worker
from tests.bench import prefix_workload as workload
from tests.bench.harness import Options, Row, row

STREAMS, TICK_S = 64, 0.005
EVENTS_A_BATCH = 8
DEGREE = 8
_TICKER = str(Path(__file__).with_name("ticker.py"))


class _Stream(asyncio.Protocol):
    def __init__(self, late: list[float]) -> None:
        self._late = late

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        for (sent,) in struct.iter_unpack("<q", data):
            self._late.append((now - sent) / 1e6)


class Ticks:
    """Running streams; ``late`` are the milliseconds from a token's sending to its arrival."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def during(self, work: Callable[[], Awaitable[object]]) -> tuple[list[float], float]:
        """The lateness of every token, sorted, while ``work`` runs, and the seconds it took."""
        await asyncio.sleep(0.05)
        self.late.clear()
        started = time.perf_counter()
        await work()
        took = time.perf_counter() - started
        await asyncio.sleep(0.01)
        return sorted(self.late), took


@asynccontextmanager
async def streams() -> AsyncIterator[Ticks]:
    ticks, loop = Ticks(), asyncio.get_running_loop()
    pairs = [socket.socketpair() for _ in range(STREAMS)]
    for ours, _ in pairs:
        await loop.create_connection(lambda: _Stream(ticks.late), sock=ours)
    fds = [theirs.fileno() for _, theirs in pairs]
    argv = [sys.executable, _TICKER, str(TICK_S), *map(str, fds)]
    sender = await asyncio.to_thread(subprocess.Popen, argv, pass_fds=fds)
    for _, theirs in pairs:
        theirs.close()
    try:
        await asyncio.sleep(0.3)  # the sender starts
        yield ticks
    finally:
        sender.kill()
        await asyncio.to_thread(sender.wait)


def p99(ordered: Sequence[float]) -> float:
    return ordered[int(0.99 * len(ordered))]


def updates(documents: list[list[int]]) -> list[IndexUpdate]:
    """The workload as batches of engines, as they come decoded from the wire."""
    batches: dict[int, list[BlocksStored]] = {}
    for worker, parent, names, local in workload.events(documents, DEGREE):
        batches.setdefault(worker, []).append(BlocksStored(parent, names, local))
    batched = []
    for worker, events in batches.items():
        for seq, at in enumerate(range(0, len(events), EVENTS_A_BATCH)):
            batch = tuple(events[at : at + EVENTS_A_BATCH])
            batched.append(IndexUpdate(worker + 1, 0, seq, batch, 0.0, replayed=True))
    return batched


async def run(entries_scale: float, quiet_s: float) -> list[Row]:
    """Rows for the quiet loop, the recovery, and the loss of a worker."""
    documents = workload.documents(DEGREE)
    documents = documents[: max(1, int(len(documents) * entries_scale))]
    service = RoutingService(id_prefix="bench")
    for number in range(workload.WORKERS):
        service.membership.upsert(Worker(number + 1, f"w{number}", "m"))
    waiting = updates(documents)
    conditions: list[StreamCondition] = []
    index = IndexRuntime(
        service.apply, service.router.sweep, conditions.append, service.clock, service.tasks
    )
    settle_garbage_collector()

    async def recover() -> None:
        index.start()
        share = LoopShare(STREAMS_S)
        for update in waiting:
            await share.turn()
            while index.waiting >= MAX_WAITING // 2:  # noqa: ASYNC110
                await asyncio.sleep(0)  # as a socket's task would come back later
            index.take(update)
        await index.drained()

    async def lose() -> None:
        slot = service.router.registry.slots(1)[0]
        service.membership.remove(1)
        index.request_sweep()
        while not service.router.index.is_free(slot):  # noqa: ASYNC110
            await asyncio.sleep(0)

    async with streams() as ticks:
        quiet, _ = await ticks.during(lambda: asyncio.sleep(quiet_s))
        busy, took = await ticks.during(recover)
        entries = service.router.index.entry_count
        lost, _ = await ticks.during(lose)
    await index.close()
    million = f"{entries / 1e6:.2g}M entries recovered"
    added = max(0.0, p99(busy) - p99(quiet))
    return [
        row(f"{million}: p99 added to a stream", "ms", added, aim="< 5"),
        row(f"{million}: worst token", "ms", busy[-1]),
        row(f"{million}: speed", "entries/s", entries / took),
        row("a worker is lost: worst token while its entries go", "ms", lost[-1]),
    ]


def rows(options: Options) -> Iterator[Row]:
    scale, quiet_s = (0.03, 0.1) if options.smoke else (1.0, 2.0)
    yield from uvloop.run(run(scale, quiet_s))
