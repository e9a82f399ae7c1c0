"""The router of bench_scale: a real one, on the clock of its CPU time, which measures itself."""

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dynctl.adapters.zmq.kv_event_source import KvEventSource
from dynctl.base.tasks import end_tasks
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
from tests.bench.cpu_clock import CpuClock
from tests.bench.harness import resident_bytes
from tests.bench.scale_workload import BLOCK, MODEL, Fleet, as_array

_TICK_NS = 1_000_000
_PROMPTS_A_TURN = 4
#: Seconds from a decision to the first output token, and to the end of the response.
_PREFILL_S, _RESPONSE_S = 0.2, 2.0


@dataclass
class Second:
    """What one second was like; times in milliseconds."""

    latencies: list[float] = field(default_factory=list)
    stall: float = 0.0
    collection: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    waiting: int = 0
    entries: int = 0


class ScaleRouter:
    """A frontend whose workers exist on the other side only. ``endpoints``: of their events."""

    def __init__(self, clock: CpuClock, fleet: Fleet, endpoints: list[str]) -> None:
        self._clock = clock
        self._fleet = fleet
        self._endpoints = endpoints
        self.frontend = build_frontend(
            FrontendConfig(port=0, index_memory_bytes=16 << 30, log_level="error")
        )
        self._service = self.frontend.service
        self._ids = list(range(1, fleet.workers + 1))
        self._hasher = PromptHasher(BLOCK)
        self._prefills: deque[tuple[float, str]] = deque()
        self._responses: deque[tuple[float, RequestRecord]] = deque()
        #: What arrived and is not done; True for prompts.
        self._arrived: deque[tuple[bool, Callable[[], object]]] = deque()
        self._due = False
        self.second = Second()
        self.seconds: list[Second] = []
        self.refused = 0
        self._measuring: list[asyncio.Task[None]] = []

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

    def report_load(self, number: int, blocks: int, waiting: int) -> None:
        self._service.apply(LoadReported(self._ids[number], 0, blocks, blocks, waiting))

    def follower(self, number: int) -> int | None:
        """The descriptor that shows new events of a worker; None without a connection."""
        held = self.frontend.fleet.index._streams.get((self._ids[number], 0))
        if held is None or held.stream._backlog is None or not held.stream._connected:
            return None
        return held.stream._backlog._socket.FD

    # -- what arrives -------------------------------------------------------------------------

    def arrive(self, work: Callable[[], object], *, prompt: bool = False) -> None:
        """Do ``work`` in a turn of the loop. Where much waits, a turn has a few prompts, as if they
        came on connections of their own."""
        self._arrived.append((prompt, work))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        prompts, self._due = 0, False
        while self._arrived and prompts < _PROMPTS_A_TURN:
            prompt, work = self._arrived.popleft()
            prompts += prompt
            work()
        if self._arrived:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)

    def decide(self, sent: int, data: bytes) -> None:
        """What `serve router` does for a prompt of the time ``sent`` (ns): hash, plan, book, and
        notify the observers."""
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
        self.second.latencies.append((self._clock.ns() - sent) / 1e6)

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

    async def _tick(self) -> None:
        """How late the loop comes back to a timer."""
        while True:
            due = self._clock.ns() + _TICK_NS
            await asyncio.sleep(_TICK_NS / 1e9)
            self.second.stall = max(self.second.stall, (self._clock.ns() - due) / 1e6)

    async def _sample(self) -> None:
        used, at = self._clock.worked(), self._clock.ns()
        while True:
            await asyncio.sleep(1.0)
            with self._clock.stopped():
                now, worked = self._clock.ns(), self._clock.worked()
                second, self.second = self.second, Second()
                second.cpu, used, at = (worked - used) / (now - at), worked, now
                second.memory = resident_bytes()
                second.waiting = self.frontend.fleet.index.waiting
                second.entries = self.entries
                self.seconds.append(second)

    def _watch_collections(self) -> None:
        began = 0

        def collected(phase: str, info: dict[str, int]) -> None:
            nonlocal began
            if phase == "start":
                began = self._clock.cpu()
                return
            took = (self._clock.cpu() - began) / 1e6
            self.second.collection = max(self.second.collection, took)

        gc.callbacks.append(collected)

    async def start(self) -> None:
        """Follow the events of all workers."""
        await self.frontend.start()
        for number in range(self._fleet.workers):
            self.follow(number)
        while not all(map(self.follower, range(self._fleet.workers))):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        settle_garbage_collector()
        self._watch_collections()
        self._measuring = [asyncio.create_task(self._tick()), asyncio.create_task(self._sample())]

    async def end(self) -> None:
        """Do what has arrived, and close."""
        while self._arrived:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await self.frontend.fleet.index.drained()
        await end_tasks(self._measuring)
        await self.frontend.close()

    def outcomes(self) -> Counter[str]:
        """Result of a change of the index -> how many."""
        counts: Counter[str] = Counter()
        for (_, code), number in self._service.kv_events.items():
            counts[code] += number
        return counts

    @property
    def entries(self) -> int:
        """(worker, block) pairs in the index."""
        return self._service.router.index.entry_count

    @property
    def blocks(self) -> int:
        """The blocks in the index that differ."""
        return self._service.router.index.node_count
