"""The life of the embedded fleet: requests, caches, engines' queues, a crash and a rush.

No process and no network: a router of ours decides on requests that are made up here, and the
engines are a few lines of arithmetic. Time is given, so the same seconds bring the same fleet.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from dynctl.health import conditions as codes
from dynctl.serving.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import (
    BlockHashes,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    KvEvent,
    LoadReported,
    ModelRuntimeConfig,
    Role,
    RoutingPlan,
    RoutingRequest,
    Worker,
    constraints,
    hash_prompt,
)

MODEL: Final = "demo"
BLOCK: Final = 16
TOTAL_BLOCKS: Final = 4096
#: The fleet repeats itself after this many seconds: a crash, then a rush.
CYCLE_S: Final = 120.0
CRASH: Final = (30.0, 55.0)
RUSH: Final = (75.0, 90.0)
CRASHING: Final = "decode-a0"

_RATE: Final = 3.0
_RUSH_FACTOR: Final = 6.0
_PREFILL_TOKENS_S: Final = 4000.0
_OUTPUT_TOKENS_S: Final = 25.0
_SEATS: Final = 24
_SYSTEM_TOKENS: Final = 640
_LONGEST: Final = 2400
_BOUND_SHARE: Final = 0.08
_CACHE_BLOCKS: Final = 3000
_CRASH_REASON: Final = "connection refused: nobody listens there any more"


@dataclass(slots=True)
class _Job:
    """A request on its way. ``blocks``: that it holds on the engine it is at."""

    request: RoutingRequest
    hashes: BlockHashes
    record: RequestRecord
    output: int
    plan: RoutingPlan | None = None
    blocks: int = 0
    place: int = 0


@dataclass(slots=True)
class _Engine:
    """One worker: who runs, who waits, and the chains in its cache, oldest first."""

    worker: Worker
    seats: int
    running: dict[str, _Job] = field(default_factory=dict)
    waiting: deque[_Job] = field(default_factory=deque)
    chains: deque[tuple[int, ...]] = field(default_factory=deque)
    cached: int = 0
    up: bool = True


class DemoTraffic:
    """Drives ``service`` from :meth:`start` on. ``at``: seconds of the service's own clock.

    ``advance`` moves the service's clock by ``tick``, which takes the new time.
    """

    def __init__(
        self,
        service: RoutingService,
        workers: list[Worker],
        tick: Callable[[float], None],
        *,
        seed: int = 7,
        rate: float = _RATE,
        events: bool = True,
    ) -> None:
        self._service = service
        self._tick = tick
        self._random = random.Random(seed)
        self._rate = rate
        self._events = events
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._turn = 0
        self._engines: dict[int, _Engine] = {}
        self._talks: dict[int, list[int]] = {}
        # Every word is said once, so that only what is repeated is found in a cache.
        self._words = 1_000_000
        for worker in workers:
            seats = 1 if worker.role is Role.PREFILL else _SEATS
            self._engines[worker.worker_id] = _Engine(worker, seats)
            service.upsert_worker(worker)

    def start(self, at: float) -> None:
        """Let the first request come soon."""
        self._at(at, self._arrive)
        self._at(at, self._report)
        if self._events:
            self._at(at - at % CYCLE_S + CRASH[0], self._crash)

    def advance(self, until: float) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until:
            at, _, happen = heapq.heappop(self._queue)
            self._tick(at)
            happen(at)
        self._tick(until)

    def waiting(self) -> Mapping[int, Mapping[int, int]]:
        """Worker id -> rank -> requests that wait in its engine."""
        return {number: {0: len(engine.waiting)} for number, engine in self._engines.items()}

    def sample(self) -> float:
        """Chance for the router, from the same draws as everything here."""
        return self._random.random()

    @property
    def in_flight(self) -> int:
        return sum(len(one.running) + len(one.waiting) for one in self._engines.values())

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._turn += 1
        heapq.heappush(self._queue, (when, self._turn, happen))

    # -- requests --------------------------------------------------------------------------

    def _arrive(self, at: float) -> None:
        phase = at % CYCLE_S
        rush = self._events and RUSH[0] <= phase < RUSH[1]
        rate = self._rate * (_RUSH_FACTOR if rush else 1.0)
        self._at(at + self._random.expovariate(rate), self._arrive)
        self._begin(at, self._job(at))

    def _job(self, at: float) -> _Job:
        """The next turn of one of a few conversations; each repeats all that was said before."""
        chance = self._random
        number = chance.randrange(24)
        talk = self._talks.get(number)
        if talk is None or len(talk) > _LONGEST:
            talk = [number % 4 * 100_000 + place for place in range(_SYSTEM_TOKENS)]
        said = chance.randrange(60, 500)
        talk = talk + list(range(self._words, self._words + said))
        self._words += said
        self._talks[number] = talk
        hashes = hash_prompt(talk, BLOCK)
        bound = constraints()
        if chance.random() < _BOUND_SHARE:
            bound = constraints(("dynamo.topology/zone=zone-a",))
        name = self._service.new_id()
        request = RoutingRequest(name, MODEL, len(talk), BLOCK, hashes.sequence, constraints=bound)
        record = RequestRecord(
            name, name, "chat_completions", at, self._service.wall(), model=MODEL
        )
        return _Job(request, hashes, record, chance.randrange(60, 500))

    def _begin(self, at: float, job: _Job) -> None:
        plan = self._service.plan(job.request)
        if not plan.ok or plan.prefill is None:
            self._service.decided(plan, job.request, job.record)
            return
        self._service.book(plan.prefill, job.request, job.record)
        job.plan = plan
        job.blocks = job.request.isl_tokens // BLOCK
        self._enter(at, job, plan.prefill.require().worker_id)

    def _enter(self, at: float, job: _Job, worker_id: int) -> None:
        job.place = worker_id
        self._engines[worker_id].waiting.append(job)
        self._fill(at, self._engines[worker_id])

    def _fill(self, at: float, engine: _Engine) -> None:
        while engine.waiting and len(engine.running) < engine.seats and engine.up:
            job = engine.waiting.popleft()
            engine.running[job.request.id] = job
            if engine.worker.role is Role.PREFILL:
                prefill = job.plan.prefill if job.plan is not None else None
                cached = prefill.cached_tokens if prefill is not None else 0
                took = 0.03 + (job.request.isl_tokens - cached) / _PREFILL_TOKENS_S
                self._at(at + took, partial(self._prefilled, job))
            else:
                self._service.prefill_done(job.request.id)
                self._at(at + BLOCK / _OUTPUT_TOKENS_S, partial(self._more, job))

    def _prefilled(self, job: _Job, at: float) -> None:
        engine = self._engines[job.place]
        if engine.running.pop(job.request.id, None) is None:
            return
        self._store(engine, job.hashes)
        service = self._service
        service.free(job.request.id, "prefill")
        prefill = job.plan.prefill if job.plan is not None else None
        if prefill is not None:
            plan = service.continue_plan(job.request, prefill)
            service.decided(plan, job.request, job.record)
            if plan.decode is not None and plan.decode.winner is not None:
                service.book(plan.decode, job.request, job.record)
                self._enter(at, job, plan.decode.require().worker_id)
            else:
                service.free(job.request.id)
        self._fill(at, engine)

    def _more(self, job: _Job, at: float) -> None:
        engine = self._engines[job.place]
        if job.request.id not in engine.running:
            return
        job.output -= BLOCK
        if job.output > 0:
            job.blocks += 1
            self._service.output_block(job.request.id)
            self._at(at + BLOCK / _OUTPUT_TOKENS_S, partial(self._more, job))
            return
        del engine.running[job.request.id]
        self._service.free(job.request.id)
        self._fill(at, engine)

    # -- engines ---------------------------------------------------------------------------

    def _store(self, engine: _Engine, hashes: BlockHashes) -> None:
        """The prompt is cached there now; the oldest chains leave when it gets too much."""
        number, chain = engine.worker.worker_id, tuple(hashes.sequence)
        shared = _SYSTEM_TOKENS // BLOCK
        said = [old for old in engine.chains if chain[: len(old)] == old]
        known = max(map(len, said), default=0)
        if known < len(chain):
            parent = chain[known - 1] if known else None
            event = BlocksStored(parent, chain[known:], tuple(hashes.local[known:]))
            self._service.apply(KvEvent(number, 0, event))
        for old in said:
            engine.chains.remove(old)
            engine.cached -= len(old) - shared
        engine.chains.append(chain)
        engine.cached += len(chain) - shared
        while engine.cached > _CACHE_BLOCKS:
            gone = engine.chains.popleft()
            engine.cached -= len(gone) - shared
            removed = BlocksRemoved(tuple(reversed(gone[shared:])))
            self._service.apply(KvEvent(number, 0, removed))

    def _report(self, at: float) -> None:
        """Engines tell their own numbers once a second."""
        self._at(at + 1.0, self._report)
        for number, engine in self._engines.items():
            if engine.up:
                held = sum(job.blocks for job in engine.running.values())
                self._service.apply(LoadReported(number, 0, kv_used_blocks=min(held, TOTAL_BLOCKS)))

    def _crash(self, at: float) -> None:
        self._at(at + CYCLE_S, self._crash)
        engine = self._named(CRASHING)
        if engine is None:
            return
        engine.up = False
        self._service.set_available(engine.worker.worker_id, _CRASH_REASON)
        self._service.set_condition(codes.WORKER_UNREACHABLE, CRASHING, _CRASH_REASON)
        self._service.apply(KvEvent(engine.worker.worker_id, 0, Cleared()))
        for job in [*engine.running.values(), *engine.waiting]:
            self._service.free(job.request.id)
        engine.running.clear()
        engine.waiting.clear()
        engine.chains.clear()
        engine.cached = 0
        self._at(at + CRASH[1] - CRASH[0], self._back)

    def _back(self, at: float) -> None:
        engine = self._named(CRASHING)
        if engine is not None:
            engine.up = True
            self._service.set_available(engine.worker.worker_id, None)
            self._service.clear_condition(codes.WORKER_UNREACHABLE, CRASHING)

    def _named(self, name: str) -> _Engine | None:
        return next((one for one in self._engines.values() if one.worker.name == name), None)


def demo_workers() -> list[Worker]:
    """The six workers of `--demo` in two zones, with racks and hosts, and a third zone that
    prefers its own decode workers where the others require them."""
    plan = [
        ("prefill", "a", 0), ("decode", "a", 0), ("prefill", "b", 0), ("decode", "b", 0),
        ("prefill", "b", 1), ("decode", "b", 1), ("prefill", "c", 0), ("decode", "c", 0),
        ("decode", "c", 1),
    ]  # fmt: skip
    return [
        demo_worker(role, zone, index, number + 1, preferred=0.85 if zone == "c" else None)
        for number, (role, zone, index) in enumerate(plan)
    ]


def demo_worker(
    role: str, zone: str, index: int, number: int, *, preferred: float | None = None
) -> Worker:
    """One worker of a made-up zone. ``preferred``: the weight of its policy, None for required."""
    prefill = role == "prefill"
    card = ModelRuntimeConfig(
        total_kv_blocks=TOTAL_BLOCKS,
        max_num_batched_tokens=8192,
        max_num_seqs=_SEATS,
        topology_domains={
            "zone": f"zone-{zone}",
            "rack": f"rack-{zone}{index // 2}",
            "host": f"host-{zone}{index}",
        },
        kv_transfer_domain="zone" if prefill else None,
        kv_transfer_enforcement=("required" if preferred is None else "preferred")
        if prefill
        else None,
        kv_transfer_preferred_weight=preferred if prefill else None,
    )
    worker_id = 0xD1C0_0000_0000_0000 + number * 0x1_2345_6789
    name = f"{role}-{zone}{index}"
    return Worker(worker_id, name, MODEL, Role(role), BLOCK, card, can_prefill=prefill)
