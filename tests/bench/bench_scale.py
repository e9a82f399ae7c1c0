"""A thousand workers: decisions beside KV events, load reports, bursts, joins and losses.

    python -m tests.bench.bench_scale [--seconds N] [--workers N] [--svg FILE]

`make bench-scale` writes build/scale.svg. The router (`scale_router.py`) is a real one: index,
decision memory, metrics. What is cached and asked: `scale_workload.py`. Time is its CPU time
(`cpu_clock.py`): the numbers are those of a core of its own, on asyncio's loop, whatever else the
machine does. The work of clients and workers takes no time; their memory counts.

2,000 prompts a second arrive at random times, as token ids. Each is hashed, routed and booked; its
first output comes 0.2 s later, its end after 2 s. Meanwhile each worker reports its load once a
second, and a thousand times a second a worker stores 32 blocks or drops 32 old ones (vLLM's bytes
over ZMQ, a socket a worker). Every 10 s 1,000 such events come at 50,000 a second. Every 6 s a
worker is lost; 2 s later it is back under another id, and 1 s after that the events of all its
blocks arrive, at 20,000 a second. Every 5 s `/metrics` is read.

*Latency* is from the arrival of a prompt until its worker is booked. A *stall* is how late the
event loop comes back to a timer of 1 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import random
import select
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import Mock

import msgspec
import zmq

from tests.bench.cpu_clock import CpuClock, CpuSelector
from tests.bench.harness import Options, Row, row
from tests.bench.scale_workload import BLOCK, CONVERSATIONS_HELD, Fleet
from tests.soak.plot import Series, plot

if TYPE_CHECKING:
    from tests.bench.scale_router import ScaleRouter, Second

_BURST_S, _BURST = 10.0, 1000
_LOSS_S, _BACK_S, _CACHE_S = 6.0, 2.0, 1.0
_METRICS_S: Final = 5.0
#: Seconds between two events of a burst, and of the cache of a worker that is back.
_BURST_STEP_S, _CACHE_STEP_S = 20e-6, 50e-6
#: Milliseconds to wait for an event to come through ZMQ, which has threads of its own.
_THROUGH_MS: Final = 20
#: Pause until a worker that is back is looked at again.
_AGAIN_S: Final = 0.01
_NEVER: Final = 1 << 62
#: Events that are made before the first second.
_AHEAD: Final = 1000


class Workers:
    """The sockets of all workers, and the events of what they store and drop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * fleet.workers + 100)
        self._sockets = [self._context.socket(zmq.PUB) for _ in range(fleet.workers)]
        self.endpoints = []
        for one in self._sockets:
            one.set(zmq.SNDHWM, 10_000)
            one.set(zmq.LINGER, 0)
            port = one.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_tries=10_000)
            self.endpoints.append(f"tcp://127.0.0.1:{port}")
        #: The oldest conversation of each worker.
        self.first = [0] * fleet.workers
        self._sequence = [0] * fleet.workers
        self._draw = random.Random(2)
        self._lost: set[int] = set()
        self._changes = self._exchanges()
        self._ready: deque[tuple[int, bytes]] = deque()

    def _stored(self, piece: tuple[int | None, list[int], list[int], bytes]) -> bytes:
        parent, names, _, data = piece
        ids = array("I")
        ids.frombytes(data)
        return _batch(["BlockStored", names, parent, ids.tolist(), BLOCK, None])

    def _exchanges(self) -> Iterator[tuple[int, bytes]]:
        """Events that replace the oldest conversation of a worker by a new one, without end."""
        fleet = self._fleet
        while True:
            worker = self._draw.randrange(fleet.workers)
            oldest = self.first[worker]
            self.first[worker] += 1
            dropped = list(fleet.conversation(worker, oldest).pieces())
            for _, names, _, _ in reversed(dropped):
                yield worker, _batch(["BlockRemoved", names[::-1]])
            for piece in fleet.conversation(worker, oldest + CONVERSATIONS_HELD).pieces():
                yield worker, self._stored(piece)

    def make(self, count: int) -> None:
        """Prepare events."""
        self._ready.extend(next(self._changes) for _ in range(count))

    def send(self) -> int | None:
        """Send an event; returns its worker. None: it is of a lost worker, and is dropped."""
        worker, batch = self._ready.popleft() if self._ready else next(self._changes)
        if worker in self._lost:
            return None
        self._publish(worker, batch)
        return worker

    def lose(self, worker: int) -> None:
        self._lost.add(worker)

    def announce(self, worker: int) -> Iterator[int]:
        """Send the whole cache of a worker that is back; yields it after each event."""
        for chain in self._fleet.cached(worker, self.first[worker]):
            for piece in chain.pieces():
                self._publish(worker, self._stored(piece))
                yield worker
        self._lost.discard(worker)

    def _publish(self, worker: int, batch: bytes) -> None:
        sequence = self._sequence[worker].to_bytes(8, "big")
        self._sequence[worker] += 1
        self._sockets[worker].send_multipart([b"", sequence, batch], zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _batch(event: list[Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, [event], 0])


class Clients:
    """What arrives at the router: prompts, events, load reports, losses."""

    def __init__(
        self, fleet: Fleet, workers: Workers, router: ScaleRouter, decisions: float, events: float
    ) -> None:
        self._fleet, self._workers, self._router = fleet, workers, router
        self._prompts_s, self._events_s = decisions, events
        self._draw = random.Random(1)
        self._coming: list[tuple[int, int, Callable[[int], object]]] = []
        self._number = self._reported = 0
        self.events = self.losses = 0
        self._readings: set[asyncio.Task[Any]] = set()

    def begin(self, now: int) -> None:
        self._after(now, 0.0, self._prompt)
        self._after(now, 0.0, self._event)
        self._after(now, 0.0, self._load)
        self._after(now, _BURST_S / 2, partial(self._burst, left=_BURST))
        self._after(now, _LOSS_S / 2, self._loss)
        self._after(now, _METRICS_S, self._metrics)

    def due(self) -> int:
        return self._coming[0][0] if self._coming else _NEVER

    def arrive(self, now: int) -> bool:
        arrived = False
        while self.due() <= now:
            at, _, happens = heappop(self._coming)
            happens(at)
            arrived = True
        return arrived

    def end(self) -> None:
        self._coming.clear()

    def _after(self, at: int, seconds: float, happens: Callable[[int], object]) -> None:
        self._number += 1
        heappush(self._coming, (at + int(seconds * 1e9), self._number, happens))

    def _prompt(self, at: int) -> None:
        prompt = self._fleet.prompt(self._draw, self._workers.first)
        self._router.arrive(partial(self._router.decide, at, prompt), prompt=True)
        self._after(at, self._draw.expovariate(self._prompts_s), self._prompt)

    def _event(self, at: int) -> None:
        self._through(self._workers.send())
        self._after(at, 1 / self._events_s, self._event)

    def _burst(self, at: int, left: int) -> None:
        self._through(self._workers.send())
        if left > 1:
            self._after(at, _BURST_STEP_S, partial(self._burst, left=left - 1))
        else:
            self._after(at, _BURST_S, partial(self._burst, left=_BURST))

    def _through(self, worker: int | None) -> None:
        """Wait until the event of a worker can be read."""
        descriptor = None if worker is None else self._router.follower(worker)
        if descriptor is not None:
            self.events += 1
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(_THROUGH_MS)

    def _load(self, at: int) -> None:
        worker = self._reported % self._fleet.workers
        self._reported += 1
        blocks, waiting = self._draw.randrange(8000), self._draw.randrange(4000)
        self._router.arrive(partial(self._router.report_load, worker, blocks, waiting))
        self._after(at, 1 / self._fleet.workers, self._load)

    def _loss(self, at: int) -> None:
        worker = self._draw.randrange(self._fleet.workers)
        self.losses += 1
        self._workers.lose(worker)
        self._router.arrive(partial(self._router.lose, worker))
        self._after(at, _BACK_S, lambda _: self._router.arrive(partial(self._router.join, worker)))
        self._after(at, _BACK_S + _CACHE_S, partial(self._back, worker=worker))
        self._after(at, _LOSS_S, self._loss)

    def _back(self, at: int, worker: int) -> None:
        if self._router.follower(worker) is None:
            self._after(at, _AGAIN_S, partial(self._back, worker=worker))
        else:
            self._cache(at, self._workers.announce(worker))

    def _cache(self, at: int, sending: Iterator[int]) -> None:
        worker = next(sending, None)
        if worker is not None:
            self._through(worker)
            self._after(at, _CACHE_STEP_S, partial(self._cache, sending=sending))

    def _metrics(self, at: int) -> None:
        handle = self._router.frontend.administration.metrics.handle
        reading = asyncio.get_running_loop().create_task(handle(Mock(query={})))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        self._after(at, _METRICS_S, self._metrics)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run had. ``fill_s``: CPU seconds in which the index was filled."""

    router: ScaleRouter
    clients: Clients
    seconds: list[Second]
    entries: int
    blocks: int
    fill_s: float


async def _drive(
    clock: CpuClock,
    selector: CpuSelector,
    fleet: Fleet,
    workers: Workers,
    seconds: float,
    decisions: float,
    events: float,
) -> Measured:
    router: ScaleRouter = importlib.import_module("tests.bench.scale_router").ScaleRouter(
        clock, fleet, workers.endpoints
    )
    began = clock.cpu()
    router.fill()
    fill_s = (clock.cpu() - began) / 1e9
    await router.start()
    entries, blocks = router.entries, router.blocks
    workers.make(_AHEAD)
    clients = Clients(fleet, workers, router, decisions, events)
    clients.begin(clock.ns())
    selector.arrivals = clients
    await asyncio.sleep(seconds)
    clients.end()
    await router.end()
    selector.arrivals = None
    return Measured(router, clients, router.seconds, entries, blocks, fill_s)


def run(workers: int, seconds: float, decisions: float, events: float) -> Measured:
    """One run."""
    logging.getLogger("dynctl").setLevel(logging.ERROR)
    clock, fleet = CpuClock(), Fleet(workers)
    selector = CpuSelector(clock)
    loop = partial(asyncio.SelectorEventLoop, selector)
    # The modules of the router take their clock from `time` as they are imported.
    with clock.installed(), asyncio.Runner(loop_factory=loop) as runner:
        sockets = Workers(fleet)
        try:
            return runner.run(_drive(clock, selector, fleet, sockets, seconds, decisions, events))
        finally:
            sockets.close()


def rows_of(measured: Measured, seconds: float, decisions: float) -> list[Row]:
    """The table. The first second, in which everything is new, is not counted."""
    counted = measured.seconds[1:] or measured.seconds
    late = sorted(latency for second in counted for latency in second.latencies)
    outcomes = measured.router.outcomes()
    applied = outcomes.pop("ok", 0)
    return [
        row("(worker, block) entries", "million", measured.entries / 1e6),
        row("blocks that differ", "million", measured.blocks / 1e6),
        row("decisions", "1/s", len(late) / len(counted), aim=f"{0.99 * decisions:,.0f}"),
        row("events", "1/s", measured.clients.events / seconds),
        row("workers lost and back", "", float(measured.clients.losses)),
        row("decision: p50", "ms", _share(late, 0.5)),
        row("decision: p99", "ms", _share(late, 0.99), aim="< 5"),
        row("decision: longest", "ms", late[-1] if late else 0.0),
        row("longest stall", "ms", max(second.stall for second in counted), aim="< 5"),
        row("longest garbage collection", "ms", max(second.collection for second in counted)),
        row("resident memory", "MB", counted[-1].memory / 1e6, aim="< 1,200"),
        row("CPU of the router", "cores", sum(second.cpu for second in counted) / len(counted)),
        row("CPU to fill the index", "s", measured.fill_s),
        row("changes of the index applied, the filling included", "", float(applied)),
        row("refused or invalid", "", float(outcomes.total())),
        row("decisions without a worker", "", float(measured.router.refused)),
    ]


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def series(seconds: list[Second]) -> list[Series]:
    """The panels of the plot."""
    late = [sorted(second.latencies) for second in seconds]
    return [
        Series("CPU", "cores", [second.cpu for second in seconds]),
        Series("memory", "MB", [second.memory / 1e6 for second in seconds]),
        Series("decision p50", "ms", [_share(latencies, 0.5) for latencies in late]),
        Series("decision p99", "ms", [_share(latencies, 0.99) for latencies in late]),
        Series("longest stall", "ms", [second.stall for second in seconds]),
        Series("entries", "million", [second.entries / 1e6 for second in seconds]),
        Series("events waiting", "", [float(second.waiting) for second in seconds]),
    ]


def rows(options: Options) -> Iterator[Row]:
    size = (16, 3.0, 50.0, 50.0) if options.smoke else (1000, 20.0, 500.0, 500.0)
    measured = rows_of(run(*size), size[1], size[2])
    shown = ("decisions", "decision: p50", "CPU of the router")
    yield from (
        measurement for measurement in measured if measurement.aim or measurement.name in shown
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--decisions", type=float, default=2000.0, help="a second")
    parser.add_argument("--events", type=float, default=1000.0, help="a second")
    parser.add_argument("--svg", type=Path, help="write the plot to this file")
    given = parser.parse_args()
    measured = run(given.workers, given.seconds, given.decisions, given.events)
    if given.svg is not None:
        given.svg.parent.mkdir(parents=True, exist_ok=True)
        given.svg.write_text(plot(series(measured.seconds), given.seconds / 60), encoding="utf-8")
    for measurement in rows_of(measured, given.seconds, given.decisions):
        print(f"{measurement.name:55} {measurement.value:14,.4g} {measurement.unit}")


if __name__ == "__main__":
    main()
