"""Traffic of the demo fleet: generated requests, caches, engine queues, a crash and a load peak.

A real router decides on the requests; the engines are a few lines of arithmetic. Time is passed in,
so the same seconds give the same fleet.
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
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.sources.demo.fleet import BLOCK, MODEL, SEATS, TOTAL_BLOCKS
from router_core import (
    BlockHashes,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    KvEvent,
    LoadReported,
    Role,
    RoutingPlan,
    RoutingRequest,
    Worker,
    constraints,
    hash_prompt,
)

#: The fleet repeats itself after this many seconds: a crash, then a load peak.
CYCLE_S: Final = 120.0
CRASH: Final = (30.0, 55.0)
PEAK: Final = (75.0, 90.0)
CRASHING: Final = "decode-a0"

_RATE: Final = 3.0
_PEAK_FACTOR: Final = 6.0
_PREFILL_TOKENS_S: Final = 4000.0
_OUTPUT_TOKENS_S: Final = 25.0
_SYSTEM_TOKENS: Final = 640
_LONGEST: Final = 2400
#: Share of requests that require zone-a.
_REQUIRE_SHARE: Final = 0.08
_CACHE_BLOCKS: Final = 3000
_CRASH_REASON: Final = "connection refused"


@dataclass(slots=True)
class _Job:
    """A request in the fleet. ``worker_id``: its engine; ``blocks``: those that it uses there."""

    request: RoutingRequest
    hashes: BlockHashes
    record: RequestRecord
    output: int
    plan: RoutingPlan | None = None
    blocks: int = 0
    worker_id: int = 0


@dataclass(slots=True)
class _Engine:
    """One worker: running and waiting requests, and the block chains in its cache, oldest first."""

    worker: Worker
    seats: int
    running: dict[str, _Job] = field(default_factory=dict)
    waiting: deque[_Job] = field(default_factory=deque)
    chains: deque[tuple[int, ...]] = field(default_factory=deque)
    cached: int = 0
    up: bool = True


class DemoTraffic:
    """Sends requests to ``service`` and runs its engines. ``at``: seconds of the service's clock.

    ``advance`` moves that clock by ``tick``, which gets the new time.
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
        self._order = 0
        self._engines: dict[int, _Engine] = {}
        self._conversations: dict[int, list[int]] = {}
        # Every new token is unique, so that only repeated prompts are found in a cache.
        self._next_token = 1_000_000
        for worker in workers:
            seats = 1 if worker.role is Role.PREFILL else SEATS
            self._engines[worker.worker_id] = _Engine(worker, seats)
            service.membership.upsert(worker)

    def start(self, at: float) -> None:
        """Schedule the first events."""
        self._schedule(at, self._arrive)
        self._schedule(at, self._report)
        if self._events:
            self._schedule(at - at % CYCLE_S + CRASH[0], self._crash)

    def advance(self, until: float) -> None:
        """Run all events up to a time."""
        while self._queue and self._queue[0][0] <= until:
            at, _, happen = heapq.heappop(self._queue)
            self._tick(at)
            happen(at)
        self._tick(until)

    def waiting(self) -> Mapping[int, Mapping[int, int]]:
        """Worker id -> rank -> requests that wait in its engine."""
        return {number: {0: len(engine.waiting)} for number, engine in self._engines.items()}

    def sample(self) -> float:
        """A random number for the router, from the generator of the traffic."""
        return self._random.random()

    @property
    def in_flight(self) -> int:
        return sum(len(engine.running) + len(engine.waiting) for engine in self._engines.values())

    def _schedule(self, when: float, happen: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, happen))

    # -- requests --------------------------------------------------------------------------

    def _arrive(self, at: float) -> None:
        phase = at % CYCLE_S
        peak = self._events and PEAK[0] <= phase < PEAK[1]
        rate = self._rate * (_PEAK_FACTOR if peak else 1.0)
        self._schedule(at + self._random.expovariate(rate), self._arrive)
        self._begin(at, self._job(at))

    def _job(self, at: float) -> _Job:
        """The next turn of one of 24 conversations; each turn repeats all earlier ones."""
        chance = self._random
        number = chance.randrange(24)
        tokens = self._conversations.get(number)
        if tokens is None or len(tokens) > _LONGEST:
            tokens = [number % 4 * 100_000 + place for place in range(_SYSTEM_TOKENS)]
        added = chance.randrange(60, 500)
        tokens = tokens + list(range(self._next_token, self._next_token + added))
        self._next_token += added
        self._conversations[number] = tokens
        hashes = hash_prompt(tokens, BLOCK)
        limits = constraints()
        if chance.random() < _REQUIRE_SHARE:
            limits = constraints(("dynamo.topology/zone=zone-a",))
        name = self._service.new_id()
        request = RoutingRequest(
            name, MODEL, len(tokens), BLOCK, hashes.sequence, constraints=limits
        )
        record = RequestRecord(
            name, name, "chat_completions", at, self._service.wall(), model=MODEL, stream=True
        )
        return _Job(request, hashes, record, chance.randrange(60, 500))

    def _begin(self, at: float, job: _Job) -> None:
        plan = self._service.plan(job.request)
        if not plan.ok or plan.prefill is None:
            self._service.decided(plan, job.request, job.record)
            self._end_job(at, job, "refused")
            return
        self._service.book(plan.prefill, job.request, job.record)
        job.plan = plan
        job.blocks = job.request.isl_tokens // BLOCK
        self._enter(at, job, plan.prefill.require().worker_id)

    def _enter(self, at: float, job: _Job, worker_id: int) -> None:
        job.worker_id = worker_id
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
                self._schedule(at + took, partial(self._end_prefill, job))
            else:
                self._service.prefill_done(job.request.id)
                job.record.first_token_at = at
                self._service.observers.first_token(job.record)
                self._schedule(at + BLOCK / _OUTPUT_TOKENS_S, partial(self._more, job))

    def _end_prefill(self, job: _Job, at: float) -> None:
        engine = self._engines[job.worker_id]
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
                self._end_job(at, job, "refused")
        self._fill(at, engine)

    def _more(self, job: _Job, at: float) -> None:
        engine = self._engines[job.worker_id]
        if job.request.id not in engine.running:
            return
        job.output -= BLOCK
        if job.output > 0:
            job.blocks += 1
            job.record.output_events += BLOCK
            self._service.output_block(job.request.id)
            self._schedule(at + BLOCK / _OUTPUT_TOKENS_S, partial(self._more, job))
            return
        del engine.running[job.request.id]
        self._service.free(job.request.id)
        self._end_job(at, job, "success")
        self._fill(at, engine)

    def _end_job(self, at: float, job: _Job, outcome: str) -> None:
        job.record.finished_at, job.record.outcome = at, outcome
        job.record.status = 200 if outcome == "success" else 503
        self._service.observers.finished(job.record)

    # -- engines ---------------------------------------------------------------------------

    def _store(self, engine: _Engine, hashes: BlockHashes) -> None:
        """Put the prompt into the cache, and evict the oldest chains above the limit."""
        number, chain = engine.worker.worker_id, tuple(hashes.sequence)
        shared = _SYSTEM_TOKENS // BLOCK
        prefixes = [old for old in engine.chains if chain[: len(old)] == old]
        known = max(map(len, prefixes), default=0)
        if known < len(chain):
            parent = chain[known - 1] if known else None
            event = BlocksStored(parent, chain[known:], tuple(hashes.local[known:]))
            self._service.apply(KvEvent(number, 0, event))
        for old in prefixes:
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
        """Every engine reports its load once a second."""
        self._schedule(at + 1.0, self._report)
        for number, engine in self._engines.items():
            if engine.up:
                held = sum(job.blocks for job in engine.running.values())
                self._service.apply(LoadReported(number, 0, kv_used_blocks=min(held, TOTAL_BLOCKS)))

    def _crash(self, at: float) -> None:
        self._schedule(at + CYCLE_S, self._crash)
        engine = self._engine_named(CRASHING)
        if engine is None:
            return
        engine.up = False
        self._service.membership.set_available(engine.worker.worker_id, _CRASH_REASON)
        self._service.set_condition(codes.WORKER_UNREACHABLE, CRASHING, _CRASH_REASON)
        self._service.apply(KvEvent(engine.worker.worker_id, 0, Cleared()))
        for job in [*engine.running.values(), *engine.waiting]:
            self._service.free(job.request.id)
            self._end_job(at, job, "upstream_error")
        engine.running.clear()
        engine.waiting.clear()
        engine.chains.clear()
        engine.cached = 0
        self._schedule(at + CRASH[1] - CRASH[0], self._back)

    def _back(self, at: float) -> None:
        engine = self._engine_named(CRASHING)
        if engine is not None:
            engine.up = True
            self._service.membership.set_available(engine.worker.worker_id, None)
            self._service.clear_condition(codes.WORKER_UNREACHABLE, CRASHING)

    def _engine_named(self, name: str) -> _Engine | None:
        return next(
            (engine for engine in self._engines.values() if engine.worker.name == name), None
        )
