"""Run a trace through simulated routers and engines, in virtual time.

One heap has what happens next: steps of engines end, hand-offs arrive, events reach the routers,
workers fail. Routers decide with :class:`router_core.Router`, as ``serve frontend`` does; engines
are :class:`VirtualRank`. The same input and seed give the same result and the same records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from dynctl import __version__
from dynctl.documents.recording import (
    KINDS,
    Arrived,
    Changed,
    Decided,
    Finished,
    Record,
    Start,
)
from dynctl.documents.replay import ReplayResult
from dynctl.simulation.engine.config import EngineConfig, EngineConfigError
from dynctl.simulation.engine.model import RankBusy, transfer_seconds
from dynctl.simulation.engine.prefix_cache import CacheEvent as EngineEvent
from dynctl.simulation.engine.prefix_cache import Removed, Stored
from dynctl.simulation.replay.fleet import (
    Loss,
    Objective,
    Policy,
    ReplicaSync,
    SimulatedFleet,
    SimulatedWorker,
)
from dynctl.simulation.replay.metrics import MOST_BLOCKS, Ceiling
from dynctl.simulation.replay.rank import NS, VirtualRank, VirtualRequest
from dynctl.simulation.replay.result import Measures, changed_settings
from dynctl.simulation.replay.state import (
    Frontend,
    Handoff,
    LiveRequest,
    NotedRequest,
    ReplayRank,
)
from dynctl.wire.traces import TraceRequest
from router_core import (
    BlocksRemoved,
    BlocksStored,
    Booked,
    CacheEvent,
    Change,
    Cleared,
    Decision,
    Dequeued,
    Freed,
    IndexMarked,
    KvEvent,
    LeanIndex,
    LeanRouter,
    LoadReported,
    ModelRuntimeConfig,
    PrefillDone,
    QueueFull,
    Role,
    Router,
    RoutingPlan,
    RoutingRequest,
    Session,
    TransferTableSet,
    Worker,
    WorkerLost,
    WorkerUpserted,
    WorkerWithDpRank,
    sequence_hashes,
)

#: Dispatches of one request, the first included (as `serve frontend`).
ATTEMPTS = 3
#: Seconds between two load reports of a worker, where a threshold reads them.
LOAD_INTERVAL_S = 1.0
_U64 = (1 << 64) - 1
#: The longest context of an engine, in tokens.
_LONGEST = 10_000_000
#: At one time: ends of steps, then what travels, then faults and limits.
_STEP, _TRAVEL, _LATER = 0, 1, 2


class ReplayError(ValueError):
    """A trace or fleet that cannot be simulated; the text names the value and what is expected."""


def simulate(
    requests: Iterable[TraceRequest],
    fleet: SimulatedFleet,
    policy: Policy,
    seed: int = 0,
    *,
    routers: int = 1,
    sync: ReplicaSync | None = None,
    records: Callable[[Record], None] | None = None,
    objective: Objective | None = None,
    most_blocks: int = MOST_BLOCKS,
    leaps: bool = True,
    lean: bool = True,
) -> ReplayResult:
    """Replay ``requests`` (in order of time) and measure; raises ReplayError.

    Each request goes to one of ``routers`` at random; each router sees the events of all workers
    and books its own requests, with ``sync`` also those of the others. ``records`` gets what
    happened as a recording: the changes are those of the first router, and the bookings of all.
    ``most_blocks``: distinct prompt blocks that the ceiling remembers. ``leaps`` False takes each
    step alone, ``lean`` False decides with a whole Router in every case; the result is the same.
    """
    if routers < 1:
        raise ReplayError(f"routers: expected at least 1, got {routers}")
    measures = Measures(objective or Objective(), Ceiling(most_blocks))
    sync = sync or ReplicaSync()
    run = _Replay(fleet, policy, seed, routers, sync, measures, records, leaps, lean)
    return run.run(requests)


class _Replay:
    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: Policy,
        seed: int,
        routers: int,
        sync: ReplicaSync,
        measures: Measures,
        records: Callable[[Record], None] | None,
        leaps: bool,
        lean: bool,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.seed = seed
        self.sync = sync
        self.measures = measures
        self._random = random.Random(seed)
        self._draw = self._random.random
        # Other decisions must not depend on how many events are lost.
        self._loss_draw = random.Random(f"{seed} events").random
        self._config = _engine_config(fleet)
        self._context_length = self._config.context_length
        self._leaps = leaps
        self._emit = records
        self._heap: list[tuple[int, int, int, int, Callable[..., None], Any]] = []
        self._order = count()
        self._numbers = count()
        self.frontends = [self._frontend(number) for number in range(routers)]
        self.ranks: dict[tuple[int, int], ReplayRank] = {}
        for worker in fleet.workers:
            for dp_rank in range(worker.ranks):
                one = self.ranks[worker.worker_id, dp_rank] = self._rank(worker, dp_rank)
                one.alive = True
        if len({worker.worker_id for worker in fleet.workers}) != len(fleet.workers):
            raise ReplayError("workers: expected different ids, got one twice")
        if not fleet.workers:
            raise ReplayError("workers: expected at least one, got none")
        self._events = policy.config.use_kv_events
        self._ranks = list(self.ranks.values())
        self._events_delay = round(fleet.events_delay_s * NS)
        #: What lean routers share; None: routers of the full kind.
        self._lean_index: LeanIndex | None = None
        if self._may_be_lean(records, routers, lean):
            holdings = None
            if not self._events_delay:
                # What a router knows of a rank is always what its engine has.
                for one in self._ranks:
                    one.engine = VirtualRank(self._config, leaps=leaps, events=False)
                holdings = [one.engine.cache.blocks for one in self._ranks]
            self._lean_index = LeanIndex(len(self._ranks), holdings)
            refs = [WorkerWithDpRank(*one.key) for one in self._ranks]
            for frontend in self.frontends:
                frontend.lean = LeanRouter(
                    policy.config, refs, self._config.block_size, self._lean_index
                )
        self._sync_delay = round(sync.delay_s * NS) if sync.mode == "delayed" else -1
        self._shares = routers > 1 and self._sync_delay >= 0
        self._now = 0
        self._start = 0
        #: The number of the rank whose step ends now; -1: none.
        self._ending = -1
        self._began = False
        self._more = True
        self._under_way = 0
        self._last_end = 0

    # -- the run ---------------------------------------------------------------------------

    def run(self, requests: Iterable[TraceRequest]) -> ReplayResult:
        heap = self._heap
        last = None
        for trace in requests:
            now = round(trace.at * NS)
            if last is None:
                self._begin(now)
            elif now < last:
                raise ReplayError(
                    f"request {trace.id}: arrives at {trace.at} s, before the one in front of it; "
                    "expected requests in order of time"
                )
            last = now
            while heap and heap[0][0] <= now:
                self._next()
            self._now = now
            self._arrive(trace)
        self._more = False
        while heap:
            self._next()
        if not self._began:
            raise ReplayError("the trace has no requests; expected at least one")
        return self.measures.result(
            policy=self.policy,
            fleet=self.fleet,
            engine=self._config,
            seed=self.seed,
            routers=len(self.frontends),
            sync=self.sync.mode,
            seconds=(self._last_end - self._start) / NS,
            ranks=self.ranks.values(),
        )

    def _next(self) -> None:
        self._now, _, _, _, act, what = heappop(self._heap)
        act(what)

    def _at(self, when: int, act: Callable[..., None], what: Any, order: int = _TRAVEL) -> None:
        heappush(self._heap, (when, order, 0, next(self._order), act, what))

    @property
    def _seconds(self) -> float:
        return self._now / NS

    def _begin(self, now: int) -> None:
        self._now = self._start = now
        self._began = True
        if self._emit is not None:
            self._emit(
                Start(
                    at=self._seconds,
                    source="simulation",
                    router=f"replay of {self.policy.name}",
                    version=__version__,
                    settings=changed_settings(self.policy.config),
                    block_sizes={self.fleet.model: self._config.block_size},
                    exact_reuse=True,
                    learns=True,
                    complete=frozenset(KINDS),
                )
            )
        for worker in self.fleet.workers:
            self._everywhere(WorkerUpserted(self._card(worker)))
        if self.policy.transfer is not None:
            self._everywhere(TransferTableSet(self.policy.transfer))
        for loss in self.fleet.losses:
            self._at(now + round(loss.at * NS), self._lose, loss, _LATER)
        if self.frontends[0].router.busy.limits:
            self._at(now + round(LOAD_INTERVAL_S * NS), self._report_loads, None, _LATER)

    # -- arrivals and decisions --------------------------------------------------------------

    def _arrive(self, trace: TraceRequest) -> None:
        number = next(self._numbers)
        frontends = self.frontends
        frontend = frontends[0]
        if len(frontends) > 1:
            frontend = frontends[int(self._draw() * len(frontends))]
        size = self._config.block_size
        local = _local_hashes(trace, size)
        lean = frontend.lean
        hashes = sequence_hashes(local) if lean is None else _chained(local)
        self.measures.requests += 1
        self._under_way += 1
        tokens = trace.input_tokens
        self.measures.trace_tokens += tokens
        if trace.hash_ids:
            self.measures.hashed += 1
            self.measures.ceiling_tokens += (
                self.measures.ceiling.see(hashes, (tokens - 1) // size) * size
            )
        live = LiveRequest(trace, frontend, number, self._now, hashes)
        if tokens + trace.output_tokens <= self._context_length and lean is not None:
            self._place_lean(live, lean)
            return
        seconds = self._now / NS
        session = None
        if trace.session and self.policy.config.router_session_affinity_ttl_secs is not None:
            session = Session(trace.session, seconds)
        live.local = local
        live.routed = RoutingRequest(
            trace.id,
            self.fleet.model,
            tokens,
            size,
            hashes,
            priority=trace.priority,
            arrived_at=seconds,
            session=session,
        )
        if self._emit is not None:
            self._emit(
                Arrived(
                    seconds,
                    trace.id,
                    self.fleet.model,
                    tokens,
                    size,
                    tuple(hashes),
                    tenant=trace.tenant,
                    session=trace.session,
                    priority=trace.priority,
                    output_limit=trace.output_tokens,
                    router=frontend.number,
                )
            )
        if tokens + trace.output_tokens > self._context_length:
            self._refused(live, "too_long")
            return
        self._place(live)

    def _place_lean(self, live: LiveRequest, lean: LeanRouter) -> None:
        """As `_place`: a lean router lets no request wait."""
        draw, trace = self._draw, live.trace
        among = None
        if live.failed:
            ranks = self._ranks
            among = [n for n, one in enumerate(ranks) if one.worker.worker_id not in live.failed]
            if not among:
                self._refused(live, "no_eligible_worker")
                return
        sample, _ = draw(), draw()
        tokens = trace.input_tokens
        position, cached = lean.choose(live.hashes, tokens, sample, among)
        live.booking = lean.book(position, live.hashes, tokens, cached)
        live.expected_tokens = cached * self._config.block_size
        self._submit(live, self._ranks[position], trace.output_tokens)

    def _plan(self, live: LiveRequest) -> RoutingPlan:
        draw = self._draw
        request = live.request
        if live.failed:
            everyone = {worker.worker_id for worker in live.frontend.router.registry}
            request = replace(request, allowed_worker_ids=frozenset(everyone - live.failed))
        return live.frontend.router.plan(request, samples=(draw(), draw()))

    def _place(self, live: LiveRequest) -> None:
        """Decide, and send the request on or let it wait."""
        plan = self._plan(live)
        if plan.first.queue is not None and plan.waits and not live.admitted:
            self._enqueue(live, plan)
            return
        live.admitted = True
        if not plan.ok:
            self._decided(live, plan)
            self._refused(live, plan.final.outcome)
            return
        self._dispatch(live, plan, booked=False)

    def _dispatch(self, live: LiveRequest, plan: RoutingPlan, *, booked: bool) -> None:
        live.plan, live.prefiller = plan, None
        first = plan.first
        if not booked:
            self._book(live, first)
        if plan.prefill is None:
            self._decided(live, plan)
            live.expected_tokens = first.cached_tokens
            self._submit(live, self._winner(first), live.trace.output_tokens)
        else:
            live.expected_tokens = first.cached_tokens
            live.prefiller = self._winner(first)
            self._submit(live, live.prefiller, 1, keep_kv=True)

    def _winner(self, decision: Decision) -> ReplayRank:
        ref = decision.require()
        return self.ranks[ref.worker_id, ref.dp_rank]

    def _submit(
        self,
        live: LiveRequest,
        rank: ReplayRank,
        max_tokens: int,
        *,
        keep_kv: bool = False,
        pulls: bool = False,
    ) -> None:
        generation = NotedRequest(
            max_tokens=max_tokens,
            prompt_tokens=live.trace.input_tokens,
            keep_kv=keep_kv,
            pulls=pulls,
            hashes=list(live.hashes),
            local=list(live.local),
            owner=live,
            # The hop is part of the name: both hops fill blocks of their own.
            number=live.number * 2 + pulls,
            submitted_ns=self._now,
        )
        generation.news = rank.news
        live.generation = generation
        live.attempts += 1
        try:
            rank.engine.submit(generation)
        except RankBusy:
            self._failed_hop(live, rank, "engine_queue_full")
            return
        if rank.engine.due < 0:
            self._start_step(rank)
        else:
            self._touch(rank)

    def _failed_hop(self, live: LiveRequest, rank: ReplayRank, reason: str) -> None:
        """Send a request elsewhere that an engine did not take, or lost."""
        live.generation = None
        lean = live.frontend.lean
        if lean is None:
            self._apply(live.frontend, Freed(live.trace.id, None, False))
        elif live.booking is not None:
            lean.free(live.booking)
            live.booking = None
        if live.held is not None:
            self._pulled(live.held)
            live.held = None
        if live.first >= 0:
            self._finish(live, "failed")
            return
        if live.attempts >= ATTEMPTS:
            if reason == "lost":
                self._finish(live, "failed")
            else:
                self._refused(live, reason)
            return
        self.measures.retried += 1
        live.failed |= {rank.worker.worker_id}
        if lean is None:
            self._place(live)
        else:
            self._place_lean(live, lean)

    def _book(self, live: LiveRequest, decision: Decision) -> None:
        frontend = live.frontend
        self._apply(frontend, frontend.router.booking(decision, live.request))

    # -- the router queue --------------------------------------------------------------------

    def _enqueue(self, live: LiveRequest, plan: RoutingPlan) -> None:
        frontend = live.frontend
        entering = frontend.router.entering(plan, live.request)
        if isinstance(entering, QueueFull):
            refused = plan.turned_away(entering)
            self._decided(live, refused)
            self._refused(live, refused.final.outcome)
            return
        self._apply(frontend, entering)
        live.waits, live.enqueued = plan, self._now
        frontend.waiting[live.request.id] = live
        self.measures.queued += 1
        limit = self.policy.config.router_queue_max_wait_secs
        self._at(self._now + round(limit * NS), self._waited_too_long, live, _LATER)
        self._turns(frontend)

    def _waited_too_long(self, live: LiveRequest) -> None:
        frontend = live.frontend
        if frontend.waiting.pop(live.request.id, None) is None:
            return
        self._apply(frontend, Dequeued(live.request.id))
        self._note_wait(live)
        self._refused(live, "queue_timeout")
        self._turns(frontend)

    def _note_wait(self, live: LiveRequest) -> None:
        live.queued_s = (self._now - live.enqueued) / NS
        self.measures.queue_wait.add(live.queued_s)

    def _turns(self, frontend: Frontend) -> None:
        """Admit what waits, as long as there is room."""
        router, waiting = frontend.router, frontend.waiting
        while waiting:
            plans: dict[str, RoutingPlan] = {}

            def admissible(entry: Any, plans: dict[str, RoutingPlan] = plans) -> bool:
                live = waiting.get(entry.request_id)
                if live is None:
                    return True
                plan = plans[entry.request_id] = self._plan(live)
                queue = plan.first.queue
                return queue is None or not queue.all_busy or not plan.ok

            turn = router.next_turn(self.fleet.model, admissible)
            if turn is None:
                return
            name = turn.entry.request_id
            self._apply(frontend, Dequeued(name, turn.credits, turn.cursor))
            live = waiting.pop(name, None)
            if live is None:
                continue
            self._note_wait(live)
            live.admitted = True
            before, plan = live.waits, plans[name]
            if before is not None:
                plan = plan.waited(before, live.queued_s or 0.0)
            if plan.ok:
                self._book(live, plan.first)
                self._dispatch(live, plan, booked=True)
            else:
                self._decided(live, plan)
                self._refused(live, plan.final.outcome)

    # -- engines -----------------------------------------------------------------------------

    def _start_step(self, rank: ReplayRank) -> None:
        engine = rank.engine
        for generation, missing in engine.start_step(self._now):
            self._pull(rank, generation, missing)
        cache = engine.cache
        if cache.changed:
            self._flush(rank)
        held = cache.held_blocks
        if held > rank.peak:
            rank.peak = held
        if engine.due >= 0:
            self._watch(rank)

    def _touch(self, rank: ReplayRank) -> None:
        """Let the next step of a rank that runs see what changed. Steps that begin now begin in the
        order of the ranks: those after the one whose step ends now have not begun."""
        rank.engine.touched(self._now, begun=not 0 <= self._ending < rank.number)
        self._watch(rank)

    def _watch(self, rank: ReplayRank) -> None:
        due = rank.engine.due
        if due >= 0 and due != rank.watched:
            rank.watched = due
            what = (rank, rank.engine, due)
            # Of steps that end together, the order of the ranks decides.
            heappush(
                self._heap,
                (due, _STEP, rank.number, next(self._order), self._step_ended, what),
            )

    def _step_ended(self, what: tuple[ReplayRank, VirtualRank, int]) -> None:
        rank, engine, due = what
        if engine.due != due or rank.engine is not engine:
            return  # the leap ended before, or the worker was lost
        rank.watched = -1
        self._ending = rank.number
        engine.finish_step()
        if engine.cache.changed:
            self._flush(rank)
        if rank.news:
            news = rank.news[:]
            rank.news.clear()
            for generation in news:
                self._progressed(rank, generation)
            for frontend in self.frontends:
                if frontend.waiting:
                    self._turns(frontend)
        if rank.engine is engine and engine.due < 0:
            self._start_step(rank)
        self._ending = -1

    def _progressed(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """A request has its first or its last token."""
        live: LiveRequest = generation.owner
        if live.generation is not generation:
            return
        if live.prefiller is rank and generation.keep_kv:
            self._hand_over(live, rank, generation)
            return
        lean, booking = live.frontend.lean, live.booking
        if generation.produced == 1:
            live.first = self._now
            if lean is None:
                self._apply(live.frontend, PrefillDone(live.trace.id))
            elif booking is not None:
                lean.prefill_done(booking)
            if live.prefiller is None:
                self._computed(live, rank, generation)
        if generation.ended:
            rank.output_tokens += generation.produced
            if lean is None:
                self._apply(live.frontend, Freed(live.trace.id))
            elif booking is not None:
                lean.free(booking)
            live.generation = live.booking = None
            self._finish(live, "completed")

    def _computed(self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest) -> None:
        """The prompt was computed on a rank."""
        cached = live.cached_tokens = generation.cached_tokens or 0
        rank.requests += 1
        rank.prompt_tokens += generation.prompt_tokens
        rank.cached_tokens += cached
        self.measures.engine_wait.add((generation.admitted_ns - generation.submitted_ns) / NS)

    # -- hand-offs ---------------------------------------------------------------------------

    def _hand_over(self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest) -> None:
        self._computed(live, rank, generation)
        plan, table = live.plan, generation.table
        if plan is None or plan.prefill is None or table is None:
            raise AssertionError(f"request {live.request.id}: a prefill without a plan")
        held = live.held = Handoff(rank, table)
        hold = round(self._config.kv_hold_timeout_s * NS)
        self._at(self._now + hold, self._pulled, held, _LATER)
        frontend = live.frontend
        self._apply(frontend, Freed(live.request.id, "prefill"))
        decided = frontend.router.continue_plan(live.request, plan.prefill, sample=self._draw())
        live.plan = plan = replace(decided, bypass=plan.bypass)
        self._decided(live, plan)
        decode = plan.decode
        if decode is None or decode.winner is None:
            self._apply(frontend, Freed(live.request.id))
            self._pulled(held)
            live.held = None
            self._refused(live, plan.final.outcome)
            return
        self._book(live, decode)
        self._submit(live, self._winner(decode), live.trace.output_tokens, pulls=True)

    def _pull(self, rank: ReplayRank, generation: VirtualRequest, missing: int) -> None:
        live: LiveRequest = generation.owner
        held = live.held
        if held is None or held.gone:
            self._at(self._now, self._loaded, (rank, rank.engine, generation, None))
            return
        source, target = held.rank.worker.domains, rank.worker.domains
        domain = self.fleet.link_domain or self._config.kv_transfer_domain
        seconds = transfer_seconds(self._config, missing, source, target, domain)
        self.measures.transfers += 1
        self.measures.moved_blocks += missing
        if domain and source.get(domain) != target.get(domain):
            self.measures.crossing += 1
            self.measures.crossing_blocks += missing
        arrival = self._now + round(seconds * NS)
        self._at(arrival, self._loaded, (rank, rank.engine, generation, held))

    def _loaded(self, what: tuple[ReplayRank, VirtualRank, VirtualRequest, Handoff | None]) -> None:
        rank, engine, generation, held = what
        live: LiveRequest = generation.owner
        if rank.engine is not engine or live.generation is not generation:
            return
        if held is not None and not held.gone:
            self._pulled(held)
            live.held = None
            engine.loaded(generation)
        else:
            generation.loading = False
            if self._config.kv_load_failure_policy == "fail" or not self._config.can_prefill:
                engine.end(generation)
                self._failed_hop(live, rank, "kv_lost")
        if engine.due < 0:
            self._start_step(rank)
        else:
            self._touch(rank)

    def _pulled(self, held: Handoff) -> None:
        """Free the blocks of a hand-off; no effect the second time."""
        if held.gone:
            return
        held.gone = True
        rank = held.rank
        rank.engine.release(held.table)
        if rank.engine.waiting and rank.alive:
            if rank.engine.due < 0:
                self._start_step(rank)
            else:
                self._touch(rank)

    # -- what routers see --------------------------------------------------------------------

    def _apply(self, frontend: Frontend, change: Change) -> None:
        frontend.router.apply(change, self._now / NS)
        if self._emit is not None:
            self._emit(Changed(self._now / NS, change))
        if self._shares and isinstance(change, Booked | PrefillDone | Freed):
            if isinstance(change, Booked):
                change = replace(change, replica=True, session=None, prompt_hashes=())
            self._at(self._now + self._sync_delay, self._share, (frontend, change))

    def _share(self, what: tuple[Frontend, Change]) -> None:
        origin, change = what
        seconds = self._now / NS
        for frontend in self.frontends:
            if frontend is not origin:
                frontend.router.apply(change, seconds)
                if frontend.waiting:
                    self._turns(frontend)

    def _everywhere(self, change: Change) -> None:
        """Apply a change that every router sees."""
        seconds = self._now / NS
        for frontend in self.frontends:
            frontend.router.apply(change, seconds)
        if self._emit is not None:
            self._emit(Changed(seconds, change))

    def _flush(self, rank: ReplayRank) -> None:
        """Send the cache events of a step to the routers."""
        cache = rank.engine.cache
        if self._lean_index is not None:
            events = cache.take_events()
            self._at(self._now + self._events_delay, self._deliver_lean, (rank, events))
            return
        found: list[CacheEvent] = []
        for event in cache.take_events():
            if isinstance(event, Stored):
                stored = BlocksStored(event.parent, event.hashes, event.tokens, counted=True)
                found.append(stored)
            elif isinstance(event, Removed):
                found.append(BlocksRemoved(event.hashes))
            else:
                found.append(Cleared())
        if not self._events:
            return
        worker_id, dp_rank = rank.key
        changes: list[Change] = [KvEvent(worker_id, dp_rank, event) for event in found]
        if self.fleet.events_loss and self._loss_draw() < self.fleet.events_loss:
            rank.gap += 1
            return
        if rank.gap:
            changes.insert(0, IndexMarked(worker_id, dp_rank, "gapped", rank.gap))
            rank.gap = 0
        if self._events_delay:
            self._at(self._now + self._events_delay, self._deliver, (rank, rank.engine, changes))
        else:
            for change in changes:
                self._everywhere(change)

    def _deliver_lean(self, what: tuple[ReplayRank, list[EngineEvent]]) -> None:
        rank, events = what
        index = self._lean_index or LeanIndex(0)
        for event in events:
            if isinstance(event, Stored):
                index.store(rank.number, event.hashes)
            elif isinstance(event, Removed):
                index.remove(rank.number, event.hashes)

    def _deliver(self, what: tuple[ReplayRank, VirtualRank, list[Change]]) -> None:
        rank, engine, changes = what
        if rank.engine is engine and rank.alive:
            for change in changes:
                self._everywhere(change)

    def _report_loads(self, _nothing: None) -> None:
        for rank in self.ranks.values():
            if not rank.alive:
                continue
            engine = rank.engine
            blocks = sum(len(one.table.blocks) for one in engine.running if one.table)
            self._everywhere(
                LoadReported(
                    rank.worker.worker_id,
                    rank.dp_rank,
                    active_decode_blocks=blocks,
                    kv_used_blocks=engine.cache.held_blocks,
                    active_prefill_tokens=engine.active_prefill_tokens,
                )
            )
        for frontend in self.frontends:
            if frontend.waiting:
                self._turns(frontend)
        if self._more or self._under_way:
            self._at(self._now + round(LOAD_INTERVAL_S * NS), self._report_loads, None, _LATER)

    # -- faults ------------------------------------------------------------------------------

    def _lose(self, loss: Loss) -> None:
        gone = [
            worker
            for worker in self.fleet.workers
            if worker.worker_id == loss.worker_id
            or (loss.domain and worker.domains.get(loss.domain) == loss.value)
        ]
        stranded: list[tuple[LiveRequest, ReplayRank]] = []
        for worker in gone:
            self._everywhere(WorkerLost(worker.worker_id))
            for dp_rank in range(worker.ranks):
                rank = self.ranks[worker.worker_id, dp_rank]
                if not rank.alive:
                    continue
                rank.alive = False
                engine = rank.engine
                for generation in (*engine.running, *engine.waiting):
                    stranded.append((generation.owner, rank))
                rank.lost_requests += len(engine.running) + len(engine.waiting)
                engine.stop(self._now)
                rank.busy_ns += engine.busy_ns
                rank.evicted += engine.cache.evictions
                rank.preemptions += engine.preemptions
                rank.news.clear()
                rank.engine = VirtualRank(self._config, leaps=self._leaps)
                rank.watched = -1
        for frontend in self.frontends:
            while frontend.router.sweep(1_000_000, self._now / NS):
                pass
        lost = {worker.worker_id for worker in gone}
        for live, rank in stranded:
            if live.held is not None and live.held.rank.worker.worker_id in lost:
                live.held.gone = True
            self._failed_hop(live, rank, "lost")
        if loss.until is not None:
            back = self._start + round(loss.until * NS)
            self._at(max(self._now, back), self._return, gone, _LATER)

    def _return(self, workers: list[SimulatedWorker]) -> None:
        for worker in workers:
            for dp_rank in range(worker.ranks):
                self.ranks[worker.worker_id, dp_rank].alive = True
            self._everywhere(WorkerUpserted(self._card(worker)))
        for frontend in self.frontends:
            if frontend.waiting:
                self._turns(frontend)

    # -- ends --------------------------------------------------------------------------------

    def _refused(self, live: LiveRequest, reason: str) -> None:
        self.measures.refusals[reason] += 1
        self._ended(live, "refused")

    def _finish(self, live: LiveRequest, outcome: str) -> None:
        if outcome != "completed":
            self.measures.failed += 1
            self._ended(live, outcome)
            return
        ttft, itl = self.measures.completed(live, self._now)
        self._ended(live, outcome, ttft, itl)

    def _ended(
        self, live: LiveRequest, outcome: str, ttft: float | None = None, itl: float | None = None
    ) -> None:
        self._under_way -= 1
        self._last_end = self._now
        if self._emit is not None:
            done = outcome == "completed"
            self._emit(
                Finished(
                    self._now / NS,
                    live.trace.id,
                    {"completed": 200, "refused": 503}.get(outcome, 502),
                    outcome,
                    live.trace.input_tokens,
                    live.cached_tokens,
                    live.trace.output_tokens if done else None,
                    ttft,
                    itl,
                    live.queued_s,
                )
            )

    def _decided(self, live: LiveRequest, plan: RoutingPlan) -> None:
        if self._emit is None:
            return
        first, final = plan.first, plan.final
        refs = [
            None if one is None or one.ref is None else (one.ref.worker_id, one.ref.dp_rank)
            for one in (plan.prefill, plan.decode)
        ]
        cached = best = None
        if first.inputs is not None and first.winner is not None:
            cached = float(first.overlap_blocks(first.winner))
            best = float(max(first.inputs.overlap_blocks, default=0))
        self._emit(
            Decided(
                self._now / NS,
                live.trace.id,
                plan.model,
                refs[0],
                refs[1],
                cached,
                best,
                None if first.winner is None else first.costs[first.winner],
                first.margin,
                final.outcome,
            )
        )

    # -- parts -------------------------------------------------------------------------------

    def _may_be_lean(
        self, records: Callable[[Record], None] | None, routers: int, wanted: bool
    ) -> bool:
        """Whether a lean router decides as a whole one: nothing else is read of a decision."""
        fleet, policy = self.fleet, self.policy
        return (
            wanted
            and records is None
            and all(worker.role is Role.AGGREGATED for worker in fleet.workers)
            and (routers == 1 or self.sync.mode == "none")
            and not (fleet.losses or fleet.events_loss or policy.classes)
            and policy.transfer is None
            and LeanRouter.supports(policy.config)
        )

    def _frontend(self, number: int) -> Frontend:
        classes = self.policy.classes
        router = Router(self.policy.config, exact_reuse=True, learns=True, policy_classes=classes)
        return Frontend(router, number)

    def _rank(self, worker: SimulatedWorker, dp_rank: int) -> ReplayRank:
        engine = VirtualRank(self._config, leaps=self._leaps)
        return ReplayRank(worker, dp_rank, engine, [], len(self.ranks))

    def _card(self, worker: SimulatedWorker) -> Worker:
        config = self._config
        return Worker(
            worker_id=worker.worker_id,
            name=f"{worker.role.value}-{worker.worker_id}",
            model=self.fleet.model,
            role=worker.role,
            block_size=config.block_size,
            runtime_config=ModelRuntimeConfig(
                total_kv_blocks=config.total_blocks,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                context_length=self._context_length,
                data_parallel_size=worker.ranks,
                topology_domains=worker.domains,
                kv_transfer_domain=config.kv_transfer_domain,
                kv_transfer_enforcement=config.kv_transfer_enforcement,
                kv_transfer_preferred_weight=config.kv_transfer_preferred_weight,
            ),
            can_prefill=config.can_prefill or worker.role is not Role.DECODE,
            kv_events=self.policy.config.use_kv_events,
        )


def _local_hashes(trace: TraceRequest, size: int) -> list[int]:
    """The local hashes of a prompt's full blocks of ``size`` tokens; raises ReplayError.

    Blocks of the trace are cut, or joined: an id stands for all tokens up to the end of its block.
    """
    full = trace.input_tokens // size
    ids = trace.hash_ids
    if not ids:
        return []
    given = trace.block_size
    if given == size:
        return list(ids[:full])
    if given % size == 0:
        parts = given // size
        blocks = [(one * parts + part) & _U64 for one in ids for part in range(parts)]
        return blocks[:full]
    if size % given == 0:
        step = size // given
        return list(ids[step - 1 :: step])[:full]
    raise ReplayError(
        f"request {trace.id}: its blocks have {given} tokens, those of the engines {size}; "
        "expected one to be a multiple of the other"
    )


def _chained(local: Sequence[int]) -> list[int]:
    """Names of the blocks in which each stands for those in front of it too."""
    name = 0
    return [name := hash((name, one)) for one in local]


def _engine_config(fleet: SimulatedFleet) -> EngineConfig:
    """The engines' configuration; without a context length, what the KV blocks hold."""
    config = fleet.engine
    try:
        return replace(
            config,
            max_model_len=config.max_model_len
            or min(_LONGEST, config.total_blocks * config.block_size),
        )
    except EngineConfigError as error:
        raise ReplayError(str(error)) from None
