"""The router of bench_scale: a real one in a process of its own, which measures itself.

    python scale_router.py WORKERS ENDPOINTS_FILE FD

The index is filled first, without sockets. Then JSON lines on stdout: ``ready``, a sample a second,
and ``done`` when the generator closes the socket FD. Over that socket come prompts, load reports
and changes of the fleet (see `Inbox`); events come over ZMQ from each worker's socket.
"""

import asyncio
import gc
import json
import logging
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.serving.http.server import build_frontend
from dynctl.serving.http.start import settle_garbage_collector
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import (
    BlocksStored,
    KvEvent,
    LoadReported,
    ModelRuntimeConfig,
    PromptHasher,
    RoutingRequest,
    Worker,
)
from tests.bench.harness import resident_bytes
from tests.bench.scale_workload import BLOCK, MODEL, Fleet, as_array

#: A message: its kind, a number, the time of sending (monotonic ns), bytes that follow.
HEADER = struct.Struct("<BIqI")
PROMPT, LOAD, LOSE, JOIN = range(4)
LOADS = struct.Struct("<III")  # worker, active decode blocks, active prefill tokens
_TICK_S = 0.001
_PROMPTS_A_TURN = 4
#: Seconds from a decision to the first output token, and to the end of the response.
_PREFILL_S, _RESPONSE_S = 0.2, 2.0


@dataclass
class Second:
    """What one second was like; times in milliseconds."""

    latencies: list[float] = field(default_factory=list)
    own_latencies: list[float] = field(default_factory=list)
    stall: float = 0.0
    own: float = 0.0
    collection: float = 0.0
    cpu: float = 0.0


class Inbox(asyncio.Protocol):
    """Reads messages of the generator and does what they say. Where many wait, a turn of the event
    loop takes a few prompts, as if they came on connections of their own."""

    def __init__(self, router: "ScaleRouter") -> None:
        self._router = router
        self._rest = bytearray()
        self._messages: deque[tuple[int, int, int, bytes]] = deque()
        self._due = False
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        at, end = 0, len(rest)
        while end - at >= HEADER.size:
            kind, number, sent, length = HEADER.unpack_from(rest, at)
            begin = at + HEADER.size
            if end - begin < length:
                break
            at = begin + length
            if not self._messages and not self._due:
                self._due = True
                asyncio.get_running_loop().call_soon(self._next)
            self._messages.append((kind, number, sent, bytes(rest[begin:at])))
        del rest[:at]

    def _next(self) -> None:
        prompts, self._due = 0, False
        while self._messages and prompts < _PROMPTS_A_TURN:
            message = self._messages.popleft()
            prompts += message[0] == PROMPT
            self._router.take(*message)
        if self._messages:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class ScaleRouter:
    """A frontend whose workers exist on the generator's side only."""

    def __init__(self, workers: int, endpoints: list[str]) -> None:
        self._fleet = Fleet(workers)
        self._endpoints = endpoints
        self.frontend = build_frontend(
            FrontendConfig(port=0, index_memory_bytes=16 << 30, log_level="error")
        )
        self._service = self.frontend.service
        self._ids = list(range(1, workers + 1))
        self._hasher = PromptHasher(BLOCK)
        self._prefills: deque[tuple[float, str]] = deque()
        self._responses: deque[tuple[float, RequestRecord]] = deque()
        #: Times of ticks with the CPU time until then (ns); prompts that were sent before the
        #: first are done.
        self._ticks: deque[tuple[int, int]] = deque(maxlen=100_000)
        self.second = Second()
        self.refused = 0

    # -- the fleet ----------------------------------------------------------------------------

    def register(self, number: int) -> None:
        card = ModelRuntimeConfig(
            total_kv_blocks=20_000, max_num_seqs=256, max_num_batched_tokens=8192
        )
        worker = Worker(self._ids[number], f"w{number}", MODEL, runtime_config=card)
        assert self._service.membership.upsert(worker).ok

    def fill(self) -> None:
        """Register all workers and lay their caches into the index."""
        for number in range(self._fleet.workers):
            self.register(number)
            for chain in self._fleet.cached(number):
                for parent, names, local, _ in chain.pieces():
                    event = KvEvent(self._ids[number], 0, BlocksStored(parent, names, local))
                    assert self._service.apply(event).ok

    def follow(self, number: int) -> None:
        source = KvEventSource(self._ids[number], self._endpoints[number], BLOCK)
        self.frontend.fleet.index.follow(source, f"w{number}")

    def lose(self, number: int) -> None:
        self.frontend.fleet.index.unfollow(self._ids[number])
        self._service.membership.remove(self._ids[number])
        self.frontend.fleet.index.request_sweep()

    def join(self, number: int) -> None:
        self._ids[number] += self._fleet.workers
        self.register(number)
        self.follow(number)

    # -- messages -----------------------------------------------------------------------------

    def take(self, kind: int, number: int, sent: int, data: bytes) -> None:
        if kind == PROMPT:
            self._decide(sent, data)
        elif kind == LOAD:
            for worker, blocks, waiting in LOADS.iter_unpack(data):
                change = LoadReported(self._ids[worker], 0, blocks, blocks, waiting)
                self._service.apply(change)
        elif kind == LOSE:
            self.lose(number)
        else:
            self.join(number)

    def _decide(self, sent: int, data: bytes) -> None:
        """What `serve router` does for a prompt: hash, plan, book, and notify the observers."""
        service, now = self._service, self._service.clock()
        self._end_responses(now)
        ids = as_array(data)
        hashes = self._hasher.hash_prompt(ids)
        request = RoutingRequest(
            id=service.new_id(),
            model=MODEL,
            isl_tokens=len(ids),
            block_size=BLOCK,
            sequence_hashes=hashes.sequence,
            local_hashes=hashes.local,
            arrived_at=now,
            chained=True,
        )
        record = RequestRecord(request.id, request.id, "chat", now, service.wall(), model=MODEL)
        for observer in service.observers:
            observer.on_received(record)
        plan = service.plan(request)
        if plan.decode is None or plan.decode.worker is None:
            self.refused += 1
            return
        service.book(plan.decode, request, record)
        service.decided(plan, request, record)
        self._prefills.append((now + _PREFILL_S, request.id))
        self._responses.append((now + _RESPONSE_S, record))
        late = time.monotonic_ns() - sent
        self.second.latencies.append(late / 1e6)
        # CPU time since the last tick before it was sent: a little more than is due to it.
        while len(self._ticks) > 1 and self._ticks[1][0] <= sent:
            self._ticks.popleft()
        own = time.thread_time_ns() - self._ticks[0][1] if self._ticks else late
        self.second.own_latencies.append(min(late, own) / 1e6)

    def _end_responses(self, now: float) -> None:
        service = self._service
        while self._prefills and self._prefills[0][0] <= now:
            service.prefill_done(self._prefills.popleft()[1])
        while self._responses and self._responses[0][0] <= now:
            record = self._responses.popleft()[1]
            service.free(record.decision_id)
            record.status, record.outcome, record.finished_at = 200, "success", now
            for observer in service.observers:
                observer.on_finished(record)

    # -- measuring ----------------------------------------------------------------------------

    async def tick(self) -> None:
        """How late the loop comes back, and how much of that is CPU time of this thread."""
        while True:
            due, used = time.monotonic() + _TICK_S, time.thread_time()
            self._ticks.append((time.monotonic_ns(), time.thread_time_ns()))
            await asyncio.sleep(_TICK_S)
            late = time.monotonic() - due
            own = min(late, time.thread_time() - used)
            self.second.stall = max(self.second.stall, late * 1000)
            self.second.own = max(self.second.own, own * 1000)

    async def sample(self) -> None:
        used, at = time.process_time(), time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, at + 1.0 - time.monotonic()))
            now, cpu = time.monotonic(), time.process_time()
            second, self.second = self.second, Second()
            second.cpu, used, at = (cpu - used) / (now - at), cpu, now
            report(
                "second",
                memory=resident_bytes(),
                waiting=self.frontend.fleet.index.waiting,
                entries=self._service.router.index.entry_count,
                **vars(second),
            )

    def watch_collections(self) -> None:
        began = 0.0

        def collected(phase: str, info: dict[str, int]) -> None:
            nonlocal began
            if phase == "start":
                began = time.thread_time()
                return
            took = (time.thread_time() - began) * 1000
            self.second.collection = max(self.second.collection, took)

        gc.callbacks.append(collected)

    async def run(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        began = time.process_time()
        self.fill()
        filled = time.process_time() - began
        await self.frontend.start()
        for number in range(self._fleet.workers):
            self.follow(number)
        settle_garbage_collector()
        self.watch_collections()
        index = self.frontend.fleet.index
        while not all(state.connected for state in index.all_states().values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        _, inbox = await loop.create_connection(lambda: Inbox(self), sock=connection)
        report(
            "ready",
            url=self.frontend.url,
            entries=self._service.router.index.entry_count,
            blocks=self._service.router.index.node_count,
            memory=resident_bytes(),
            fill_s=filled,
        )
        tasks = [asyncio.create_task(self.tick()), asyncio.create_task(self.sample())]
        await inbox.closed
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        counts = {f"{kind} {code}": n for (kind, code), n in self._service.kv_events.items()}
        report("done", refused=self.refused, events=counts)
        await self.frontend.close()


def report(what: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"what": what, **values}) + "\n")
    sys.stdout.flush()


def main() -> None:
    logging.getLogger("dynctl").setLevel(logging.ERROR)
    workers, endpoints, descriptor = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    router = ScaleRouter(workers, endpoints.read_text(encoding="utf-8").split())
    uvloop.run(router.run(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
