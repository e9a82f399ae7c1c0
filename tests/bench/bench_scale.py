"""A thousand workers: decisions beside KV events, load reports, bursts, joins and losses.

    python -m tests.bench.bench_scale [--seconds N] [--workers N] [--svg FILE]

`make bench-scale` writes build/scale.svg. The router (`scale_router.py`, a real one: index,
decision memory, metrics) is a process of its own, so that this one, the workers and clients, does
not count there. What is cached and asked: `scale_workload.py`.

2,000 prompts a second arrive at random times, as token ids. Each is hashed, routed and booked; its
first output comes 0.2 s later, its end after 2 s. Meanwhile each worker reports its load once a
second, and a thousand times a second a worker stores 32 blocks or drops 32 old ones (vLLM's bytes
over ZMQ, a socket a worker). Every 10 s 1,000 such events come as fast as they can be sent, without
delaying a prompt. Every 6 s a worker is lost; 2 s later it is back under another id, and 1 s after
that the events of all its blocks arrive, also as fast as they can be sent. Every 5 s `/metrics` is
read.

*Latency* is from the sending of a prompt until its worker is booked. A *stall* is how late the
event loop comes back to a timer of 1 ms. *Of our own making* is at most the CPU time within either:
on a busy machine the rest is other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import zmq

from tests.bench.harness import Options, Row, row
from tests.bench.scale_router import HEADER, JOIN, LOAD, LOADS, LOSE, PROMPT
from tests.bench.scale_workload import BLOCK, CONVERSATIONS_HELD, Fleet
from tests.soak.plot import Series, plot
from tests.waiting import patience

_SCRIPT: Final = "tests.bench.scale_router"
_BURST_S, _BURST = 10.0, 1000
_LOSS_S, _BACK_S, _CACHE_S = 6.0, 2.0, 1.0
_METRICS_S: Final = 5.0
_STEP_S: Final = 0.0005
#: Seconds that the router may take for what is left at the end.
_BEHIND_S: Final = 20.0
#: Events that are made ahead of their time.
_AHEAD: Final = 4000


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
        self._ready: deque[tuple[int, bytes, int | None]] = deque()

    def _stored(self, piece: tuple[int | None, list[int], list[int], bytes]) -> bytes:
        parent, names, _, data = piece
        ids = array("I")
        ids.frombytes(data)
        return _batch(["BlockStored", names, parent, ids.tolist(), BLOCK, None])

    def _exchanges(self) -> Iterator[tuple[int, bytes, int | None]]:
        """Events that replace the oldest conversation of a worker by a new one, without end."""
        fleet = self._fleet
        while True:
            worker = self._draw.randrange(fleet.workers)
            oldest = self.first[worker]
            self.first[worker] += 1
            dropped = list(fleet.conversation(worker, oldest).pieces())
            for _, names, _, _ in reversed(dropped):
                yield worker, _batch(["BlockRemoved", names[::-1]]), oldest
            for piece in fleet.conversation(worker, oldest + CONVERSATIONS_HELD).pieces():
                yield worker, self._stored(piece), oldest

    def make(self) -> None:
        """Prepare an event, unless enough are."""
        if len(self._ready) < _AHEAD:
            self._ready.append(next(self._changes))

    def send(self, count: int) -> int:
        """Send ``count`` events; those of lost workers are dropped. Returns how many were sent."""
        sent = 0
        for _ in range(count):
            worker, batch, _ = self._ready.popleft() if self._ready else next(self._changes)
            if worker not in self._lost:
                self._publish(worker, batch)
                sent += 1
        return sent

    def lose(self, worker: int) -> None:
        self._lost.add(worker)

    def announce(self, worker: int) -> Iterator[int]:
        """Send the whole cache of a worker that is back; yields 1 after each event."""
        for chain in self._fleet.cached(worker, self.first[worker]):
            for piece in chain.pieces():
                self._publish(worker, self._stored(piece))
                yield 1
        self._lost.discard(worker)

    def burst(self, count: int) -> Iterator[int]:
        """Send ``count`` events; yields how many were sent after each."""
        for _ in range(count):
            yield self.send(1)

    def _publish(self, worker: int, batch: bytes) -> None:
        sequence = self._sequence[worker].to_bytes(8, "big")
        self._sequence[worker] += 1
        self._sockets[worker].send_multipart([b"", sequence, batch], zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _batch(event: list[Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, [event], 0])


class Generator:
    """Clients and workers: what is due is sent every half millisecond."""

    def __init__(self, fleet: Fleet, workers: Workers, transport: asyncio.Transport) -> None:
        self._fleet, self._workers, self._transport = fleet, workers, transport
        self._draw = random.Random(1)
        self.prompts = self.events = self.losses = 0
        self.late = 0.0

    def _send(self, kind: int, number: int = 0, data: bytes = b"") -> None:
        head = HEADER.pack(kind, number, time.monotonic_ns(), len(data))
        self._transport.write(head + data)

    async def run(self, seconds: float, decisions: float, events: float) -> None:
        start = time.monotonic()
        at = {"prompt": 0.0, "event": 0.0, "load": 0.0, "burst": _BURST_S / 2, "loss": 3.0}
        back: list[tuple[float, str, int]] = []
        #: Bursts and caches that are being sent; a prompt that is due goes first.
        sending: deque[Iterator[int]] = deque()
        prompts: deque[bytes] = deque()
        reported, last = 0, start
        while (now := time.monotonic() - start) < seconds:
            self.late = max(self.late, time.monotonic() - last - _STEP_S)
            last = time.monotonic()
            while at["prompt"] <= now:
                found = prompts.popleft() if prompts else self._prompt()
                self._send(PROMPT, data=found)
                self.prompts += 1
                at["prompt"] += self._draw.expovariate(decisions)
            while at["event"] <= now:
                self.events += self._workers.send(1)
                at["event"] += 1 / events
            if at["burst"] <= now:
                sending.append(self._workers.burst(_BURST))
                at["burst"] += _BURST_S
            while at["load"] <= now:
                self._report(reported % self._fleet.workers)
                reported += 1
                at["load"] += 1 / self._fleet.workers
            if at["loss"] <= now:
                worker = self._draw.randrange(self._fleet.workers)
                at["loss"] += _LOSS_S
                self._workers.lose(worker)
                self._send(LOSE, worker)
                self.losses += 1
                back += [(now + _BACK_S, "join", worker)]
            for due, what, worker in [one for one in back if one[0] <= now]:
                back.remove((due, what, worker))
                if what == "join":
                    self._send(JOIN, worker)
                    back.append((due + _CACHE_S, "cache", worker))
                else:
                    sending.append(self._workers.announce(worker))
            # Until something is due, make what comes next.
            ahead = time.monotonic() + _STEP_S
            while time.monotonic() < ahead:
                if sending:
                    sent = next(sending[0], None)
                    if sent is None:
                        sending.popleft()
                    else:
                        self.events += sent
                elif len(prompts) < 200:
                    prompts.append(self._prompt())
                else:
                    self._workers.make()
                    if time.monotonic() + _STEP_S / 2 < ahead:
                        await asyncio.sleep(ahead - time.monotonic())
            await asyncio.sleep(0)

    def _prompt(self) -> bytes:
        return self._fleet.prompt(self._draw, self._workers.first)

    def _report(self, worker: int) -> None:
        load = LOADS.pack(worker, self._draw.randrange(8000), self._draw.randrange(4000))
        self._send(LOAD, data=load)


async def read_metrics(url: str) -> None:
    """Read ``/metrics`` as Prometheus does, until cancelled."""
    async with aiohttp.ClientSession() as client:
        while True:
            await asyncio.sleep(_METRICS_S)
            async with client.get(f"{url}/metrics") as answer:
                await answer.read()


async def run(
    workers: int, seconds: float, decisions: float, events: float
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows and the samples of each second."""
    fleet = Fleet(workers)
    sockets = Workers(fleet)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as directory:
        endpoints = Path(directory) / "endpoints"
        endpoints.write_text("\n".join(sockets.endpoints), encoding="utf-8")
        argv = ("-m", _SCRIPT, str(workers), str(endpoints), str(theirs.fileno()))
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            limit=1 << 24,
        )
        theirs.close()
        try:
            return await _drive(child, ours, fleet, sockets, seconds, decisions, events)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
            sockets.close()
            ours.close()


async def _drive(
    child: asyncio.subprocess.Process,
    connection: socket.socket,
    fleet: Fleet,
    sockets: Workers,
    seconds: float,
    decisions: float,
    events: float,
) -> tuple[list[Row], list[dict[str, Any]]]:
    assert child.stdout is not None
    stdout = child.stdout
    samples: list[dict[str, Any]] = []

    async def read() -> dict[str, Any]:
        line = await stdout.readline()
        if not line:
            raise RuntimeError("the router process ended; its stderr has the reason")
        found: dict[str, Any] = json.loads(line)
        return found

    async with asyncio.timeout(patience(400)):
        ready = await read()
    assert ready["what"] == "ready", ready
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=connection)
    generator = Generator(fleet, sockets, transport)

    async def collect() -> dict[str, Any]:
        while (found := await read())["what"] == "second":
            samples.append(found)
        return found

    collecting = asyncio.create_task(collect())
    metrics = asyncio.create_task(read_metrics(ready["url"]))
    await generator.run(seconds, decisions, events)
    metrics.cancel()
    transport.close()
    done: dict[str, Any] = {"refused": 0, "events": {}}
    try:
        async with asyncio.timeout(_BEHIND_S):
            done = await collecting
    except TimeoutError:
        print(f"the router had not done all of its work {_BEHIND_S:g} s after the end")
    return rows_of(ready, done, samples, generator, seconds, decisions), samples


def rows_of(
    ready: dict[str, Any],
    done: dict[str, Any],
    samples: list[dict[str, Any]],
    generator: Generator,
    seconds: float,
    decisions: float,
) -> list[Row]:
    """The table. The first second, in which everything is new, is not counted."""
    counted = samples[1:] or samples
    late = sorted(one for second in counted for one in second["latencies"])
    own = sorted(one for second in counted for one in second["own_latencies"])
    applied = sum(count for kind, count in done["events"].items() if kind.endswith(" ok"))
    cpu = [second["cpu"] for second in counted]
    decided = len(late)
    million = ready["entries"] / 1e6
    return [
        row("(worker, block) entries", "million", million),
        row("blocks that differ", "million", ready["blocks"] / 1e6),
        row("decisions", "1/s", decided / len(counted), aim=f"{0.99 * decisions:,.0f}"),
        row("events", "1/s", generator.events / seconds),
        row("workers lost and back", "", float(generator.losses)),
        row("decision: p50", "ms", _share(late, 0.5)),
        row("decision: p99", "ms", _share(late, 0.99), aim="< 2"),
        row("decision: longest", "ms", late[-1] if late else 0.0),
        row("decision: p99 of our own making", "ms", _share(own, 0.99)),
        row("decision: longest of our own making", "ms", own[-1] if own else 0.0),
        row("longest stall", "ms", max(second["stall"] for second in counted)),
        row(
            "longest stall of our own making",
            "ms",
            max(second["own"] for second in counted),
            aim="< 10",
        ),
        row("longest garbage collection", "ms", max(one["collection"] for one in counted)),
        row("resident memory", "MB", counted[-1]["memory"] / 1e6, aim="< 1,200"),
        row("CPU of the router process", "cores", sum(cpu) / len(cpu)),
        row("CPU to fill the index", "s", ready["fill_s"]),
        row("changes of the index applied, the filling included", "", float(applied)),
        row("refused or invalid", "", float(sum(done["events"].values()) - applied)),
        row("decisions without a worker", "", float(done["refused"])),
        row("the generator was late by at most", "ms", generator.late * 1000),
    ]


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def series(samples: list[dict[str, Any]]) -> list[Series]:
    """The panels of the plot."""
    late = [sorted(one["latencies"]) for one in samples]
    return [
        Series("CPU", "cores", [one["cpu"] for one in samples]),
        Series("memory", "MB", [one["memory"] / 1e6 for one in samples]),
        Series("decision p50", "ms", [_share(one, 0.5) for one in late]),
        Series("decision p99", "ms", [_share(one, 0.99) for one in late]),
        Series("longest stall", "ms", [one["stall"] for one in samples]),
        Series("stall, our own", "ms", [one["own"] for one in samples]),
        Series("entries", "million", [one["entries"] / 1e6 for one in samples]),
        Series("events waiting", "", [float(one["waiting"]) for one in samples]),
    ]


def rows(options: Options) -> Iterator[Row]:
    size = (16, 5.0, 50.0, 50.0) if options.smoke else (1000, 20.0, 500.0, 500.0)
    measured, _ = asyncio.run(run(*size))
    shown = ("decisions", "decision: p50", "CPU of the router process")
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
    measured, samples = asyncio.run(
        run(given.workers, given.seconds, given.decisions, given.events)
    )
    if given.svg is not None:
        given.svg.parent.mkdir(parents=True, exist_ok=True)
        given.svg.write_text(plot(series(samples), given.seconds / 60), encoding="utf-8")
    for measurement in measured:
        print(f"{measurement.name:55} {measurement.value:14,.4g} {measurement.unit}")


if __name__ == "__main__":
    main()
