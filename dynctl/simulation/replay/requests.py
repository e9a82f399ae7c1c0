"""The way of a request through a replay: arrival, decision, engine, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dynctl.simulation.engine.model import RankBusy
from dynctl.simulation.engine.prefix_cache import BlockTable
from dynctl.simulation.replay.agenda import Agenda
from dynctl.simulation.replay.engines import Engines
from dynctl.simulation.replay.fleet import ReplayError, SimulatedFleet
from dynctl.simulation.replay.handoffs import Handoffs
from dynctl.simulation.replay.journal import Journal
from dynctl.simulation.replay.rank import NS, VirtualRequest, generated_block
from dynctl.simulation.replay.result import Measures
from dynctl.simulation.replay.routers import ReplayRouters
from dynctl.simulation.replay.state import LiveRequest, NotedRequest, ReplayRank
from dynctl.wire.traces import TraceRequest
from router_core import (
    Decision,
    Freed,
    LeanRouter,
    PrefillDone,
    RoutingPlan,
    RoutingRequest,
    Session,
    sequence_hashes,
)

#: Failures of one request until it is given up (as `serve frontend`).
ATTEMPTS = 3
_U64 = (1 << 64) - 1


class ReplayRequests:
    """All requests under way. ``draw``: random numbers from 0 to 1.

    It is the user of ``routers``, ``engines`` and ``handoffs``.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        *,
        routers: ReplayRouters,
        engines: Engines,
        handoffs: Handoffs,
        agenda: Agenda,
        journal: Journal,
        measures: Measures,
        draw: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._model = fleet.model
        self._routers = routers
        self._peers = routers.peers
        self._engines = engines
        self._handoffs = handoffs
        self._agenda = agenda
        self._journal = journal
        self._measures = measures
        self._draw = draw
        config = engines.config
        self._block_size = config.block_size
        self._context_length = config.context_length
        #: Routers find blocks of these by their local hashes.
        self._lower_tiers = bool(config.host_blocks or config.disk_blocks)
        self._keeps_sessions = routers.policy.config.router_session_affinity_ttl_secs is not None
        self._arrived = 0
        self.under_way = 0
        #: When the last request ended, in ns.
        self.last_end = 0
        routers.users = self
        engines.users = self
        handoffs.users = self

    # -- arrivals and decisions --------------------------------------------------------------

    def arrive(self, trace: TraceRequest) -> None:
        """A request arrives now; raises ReplayError."""
        number = self._arrived
        self._arrived += 1
        frontend = self._routers.any()
        size, tokens = self._block_size, trace.input_tokens
        local = local_hashes(trace, size)
        lean = frontend.lean
        hashes = sequence_hashes(local) if lean is None else _chain_hashes(local)
        reachable = self._measures.count_arrival(trace, hashes, size)
        self.under_way += 1
        live = LiveRequest(trace, frontend, number, self._agenda.now, hashes, reachable=reachable)
        live.moves = self._fleet.moves(tokens)
        fits = tokens + trace.output_tokens <= self._context_length
        if fits and lean is not None:
            self._place_lean(live, lean)
            return
        seconds = self._agenda.seconds
        session = None
        if trace.session and self._keeps_sessions:
            session = Session(trace.session, seconds)
        live.local = local
        live.routed = RoutingRequest(
            trace.id,
            self._model,
            tokens,
            size,
            hashes,
            priority=trace.priority,
            arrived_at=seconds,
            session=session,
            local_hashes=local if self._lower_tiers else (),
        )
        self._journal.note_arrival(live, hashes, size)
        if fits:
            self._place(live)
        else:
            self.refuse(live, "too_long")

    def _place_lean(self, live: LiveRequest, lean: LeanRouter) -> None:
        """As `_place`: a lean router lets no request wait."""
        draw, trace, ranks = self._draw, live.trace, self._engines.in_order
        sample, _ = draw(), draw()  # also where no rank is left, as in `_place`
        among = None
        if live.failed:
            among = [n for n, rank in enumerate(ranks) if rank.worker.worker_id not in live.failed]
            if not among:
                self.refuse(live, "no_eligible_worker")
                return
        tokens = trace.input_tokens
        position, cached = lean.choose(live.hashes, tokens, sample, among)
        live.booking = lean.book(position, live.hashes, tokens, cached)
        live.expected_tokens = int(cached * self._block_size + 0.5)
        rank = ranks[position]
        if self._peers is not None:
            left, number = live.booking.prefill_tokens, live.frontend.number
            self._peers.book(number, live.number, rank.key, left, self._agenda.now)
        self._submit(live, rank, trace.output_tokens)

    def _place(self, live: LiveRequest) -> None:
        """Decide, and send the request on or let it wait."""
        plan = self._routers.plan(live)
        if plan.first.queue is not None and plan.waits and not live.admitted:
            self._routers.enqueue(live, plan)
            return
        live.admitted = True
        if not plan.ok:
            self._journal.note_decision(live, plan)
            self.refuse(live, plan.final.outcome)
            return
        self.dispatch(live, plan, booked=False)

    def dispatch(self, live: LiveRequest, plan: RoutingPlan, *, booked: bool) -> None:
        """Send a request to the first worker of its plan, or to both at once."""
        live.plan, live.prefiller = plan, None
        first = plan.first
        if not booked:
            self._routers.book(live, first)
        live.sent = self._agenda.seconds
        if not live.output:
            live.expected_tokens = first.cached_tokens
        if plan.prefill is None:
            self._journal.note_decision(live, plan)
            self._submit(live, self._winner(first), live.remaining_tokens)
            return
        live.prefiller = self._winner(first)
        decode = plan.decode
        if decode is None or not (live.prefiller.worker.bootstrap and first.starts_pairs):
            self._submit(live, live.prefiller, 1, keep_kv=True)
            return
        self._routers.book(live, decode)
        self._journal.note_decision(live, plan)
        self._measures.pairs += 1
        if self._submit(live, live.prefiller, 1, keep_kv=True):
            live.companion = live.generation
            self._submit(live, self._winner(decode), live.remaining_tokens, pulls=True)

    def _winner(self, decision: Decision) -> ReplayRank:
        ref = decision.require()
        return self._engines.ranks[ref.worker_id, ref.dp_rank]

    # -- on engines --------------------------------------------------------------------------

    def _submit(
        self,
        live: LiveRequest,
        rank: ReplayRank,
        max_tokens: int,
        *,
        keep_kv: bool = False,
        pulls: bool = False,
    ) -> bool:
        """Send a request to a rank; False if that one is full, and the request goes elsewhere."""
        generation = NotedRequest(
            max_tokens=max_tokens,
            prompt_tokens=live.trace.input_tokens + live.output,
            keep_kv=keep_kv,
            pulls=pulls,
            hashes=list(live.hashes),
            local=list(live.local),
            owner=live,
            # The hop is part of the name: both hops fill blocks of their own.
            number=live.number * 2 + pulls,
            submitted_ns=self._agenda.now,
        )
        generation.news = rank.news
        live.generation, live.rank = generation, rank
        live.attempts += 1
        try:
            self._engines.submit(rank, generation)
        except RankBusy:
            self.failed_hop(live, rank, "engine_queue_full")
            return False
        if live.moving and not keep_kv:
            live.moving = False
            self._measures.moves += 1
        return True

    def lose_request(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """A rank was lost with a request that it had."""
        live: LiveRequest = generation.owner
        if generation is live.generation or generation is live.companion:
            self.failed_hop(live, rank, "lost")

    def lose_blocks(self, rank: ReplayRank) -> None:
        """A rank was lost with the blocks that it held for decode workers."""
        for held in self._handoffs.lost_pairs(rank):
            if held.pair is not None and not held.freed:
                self.failed_hop(held.pair, rank, "lost")

    def failed_hop(self, live: LiveRequest, rank: ReplayRank, reason: str) -> None:
        """Send a request elsewhere that an engine did not take, or lost."""
        if live.companion is not None:
            if live.first >= 0 and rank is live.prefiller:
                # The decode worker computes, or has computed, the prompt itself.
                self._freed_prefill(live)
                self._let_go(live)
                self._handoffs.give_up(live)
                return
            self._part(live)
        generation, live.generation = live.generation, None
        lean = live.frontend.lean
        if lean is None:
            self._routers.apply(live.frontend, Freed(live.trace.id, None, False))
        elif live.booking is not None:
            lean.free(live.booking)
            live.booking = None
            self._prefill_ended(live)
        self._let_go(live)
        if live.first >= 0 and not live.moving:
            if generation is None or reason != "lost" or not live.moves:
                self._cut_off(live)
                return
            self._move(live, rank, generation)
        elif not self._may_retry(live, rank, reason):
            return
        if lean is None:
            self._place(live)
        else:
            self._place_lean(live, lean)

    def _may_retry(self, live: LiveRequest, rank: ReplayRank, reason: str) -> bool:
        """Whether a request without output gets another rank; if not, it ends."""
        live.failures += 1
        if live.failures < ATTEMPTS:
            self._measures.retried += 1
            live.failed |= {rank.worker.worker_id}
            return True
        if reason == "lost" and live.first < 0:
            self._finish(live, "failed")
        else:
            self.refuse(live, reason)
        return False

    def _move(self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest) -> None:
        """Go on elsewhere: the output so far is a part of the prompt now."""
        rank.output_tokens += generation.produced
        live.output += generation.produced
        live.moves -= 1
        live.moving, live.failures = True, 0
        live.failed = live.lost = live.lost | {rank.worker.worker_id}
        tokens = live.trace.input_tokens + live.output
        if live.local:
            full = range(len(live.local), tokens // self._block_size)
            live.local = [*live.local, *(generated_block(live.number * 2, n) for n in full)]
            live.hashes = sequence_hashes(live.local)
        live.routed = replace(
            live.request,
            isl_tokens=tokens,
            sequence_hashes=live.hashes,
            local_hashes=live.local if self._lower_tiers else (),
        )

    def _cut_off(self, live: LiveRequest) -> None:
        """A request that had output ends without the rest."""
        self._measures.cut_off += 1
        self._finish(live, "failed")

    def pulls(self, rank: ReplayRank, generation: VirtualRequest, missing: int) -> None:
        self._handoffs.pull(rank, generation, missing)

    def note_progress(self, rank: ReplayRank, generation: VirtualRequest) -> None:
        """A request has its first or its last token."""
        live: LiveRequest = generation.owner
        if generation is live.companion:
            self._count_prompt(live, rank, generation)
            live.held = self._handoffs.hold(rank, _table(generation), live)
            self._handoffs.meet(live)
            return
        if live.generation is not generation:
            return
        if live.prefiller is rank and generation.keep_kv:
            self._hand_over(live, rank, generation)
            return
        if generation.produced == 1:
            self._note_first_token(live, rank, generation)
        if generation.ended:
            self._complete(live, rank, generation)

    def _note_first_token(
        self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest
    ) -> None:
        lean, booking = live.frontend.lean, live.booking
        if live.first < 0:
            live.first = self._agenda.now
        if lean is None:
            self._routers.apply(live.frontend, PrefillDone(live.trace.id))
        elif booking is not None:
            lean.prefill_done(booking)
            self._prefill_ended(live)
        if live.prefiller is None:
            self._count_prompt(live, rank, generation)
            if lean is None:
                self._routers.prefill_ended(live)

    def _complete(self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest) -> None:
        lean, booking = live.frontend.lean, live.booking
        rank.output_tokens += generation.produced
        if lean is None:
            self._routers.apply(live.frontend, Freed(live.trace.id))
        elif booking is not None:
            lean.free(booking)
        if live.companion is not None:
            self._part(live)
            self._let_go(live)
        live.generation = live.booking = None
        self._finish(live, "completed")

    def _prefill_ended(self, live: LiveRequest) -> None:
        """A lean router counts the prompt no longer as load."""
        if self._peers is not None:
            self._peers.end(live.frontend.number, live.number)

    def step_ended(self) -> None:
        self._routers.admit_waiting()

    def _count_prompt(
        self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest
    ) -> None:
        """The prompt was computed on a rank."""
        cached = generation.cached_tokens or 0
        rank.requests += 1
        rank.prompt_tokens += generation.prompt_tokens
        rank.cached_tokens += cached
        if not live.output:
            live.cached_tokens = cached
            live.host_tokens, live.disk_tokens = generation.host_tokens, generation.disk_tokens
        if generation.host_tokens or generation.disk_tokens:
            rank.host_tokens += generation.host_tokens
            rank.disk_tokens += generation.disk_tokens
        wait = generation.admitted_ns - generation.submitted_ns
        self._measures.engine_wait.add(wait / NS)

    def _hand_over(self, live: LiveRequest, rank: ReplayRank, generation: VirtualRequest) -> None:
        """A prefill ended: choose the decode worker, which pulls the blocks."""
        self._count_prompt(live, rank, generation)
        self._routers.prefill_ended(live)
        plan = live.plan
        if plan is None or plan.prefill is None:
            raise AssertionError(f"request {live.request.id}: a prefill without a plan")
        live.held = self._handoffs.hold(rank, _table(generation))
        self._routers.apply(live.frontend, Freed(live.request.id, "prefill"))
        decided = self._routers.plan_decode(live, plan.prefill)
        live.plan = plan = replace(decided, bypass=plan.bypass)
        self._journal.note_decision(live, plan)
        decode = plan.decode
        if decode is None or decode.winner is None:
            self._routers.apply(live.frontend, Freed(live.request.id))
            self._let_go(live)
            self.refuse(live, plan.final.outcome)
            return
        self._routers.book(live, decode)
        self._submit(live, self._winner(decode), live.remaining_tokens, pulls=True)

    def end_pull(self, live: LiveRequest) -> None:
        """The prefill worker of a pair is done with a request."""
        self._routers.prefill_ended(live)
        self._freed_prefill(live)

    def _freed_prefill(self, live: LiveRequest) -> None:
        live.companion = None
        self._routers.apply(live.frontend, Freed(live.request.id, "prefill"))

    def _part(self, live: LiveRequest) -> None:
        """Stop what both workers of a pair do for a request."""
        companion, generation, prefiller = live.companion, live.generation, live.prefiller
        live.companion = live.pull = None
        if companion is not None and prefiller is not None:
            self._engines.end(prefiller, companion)
        if generation is not None and live.rank is not None and generation is not companion:
            self._engines.end(live.rank, generation)

    def _let_go(self, live: LiveRequest) -> None:
        """Free the blocks that a prefill worker holds for a request, if any."""
        if live.held is not None:
            self._handoffs.free(live.held)
            live.held = None

    # -- ends --------------------------------------------------------------------------------

    def refuse(self, live: LiveRequest, reason: str) -> None:
        """End a request that no worker takes."""
        if live.first >= 0:
            self._cut_off(live)
            return
        self._measures.refusals[reason] += 1
        self._end(live, "refused")

    def _finish(self, live: LiveRequest, outcome: str) -> None:
        if outcome != "completed":
            self._measures.failed += 1
            self._end(live, outcome)
            return
        ttft, itl = self._measures.count_end(live, self._agenda.now)
        self._end(live, outcome, ttft, itl)

    def _end(
        self, live: LiveRequest, outcome: str, ttft: float | None = None, itl: float | None = None
    ) -> None:
        self.under_way -= 1
        self.last_end = self._agenda.now
        self._journal.note_end(live, outcome, ttft, itl)


def _table(generation: VirtualRequest) -> BlockTable:
    """The blocks of a finished prefill."""
    if generation.table is None:
        raise AssertionError("a prefill without blocks")
    return generation.table


def local_hashes(trace: TraceRequest, size: int) -> list[int]:
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
        blocks = [(block_id * parts + part) & _U64 for block_id in ids for part in range(parts)]
        return blocks[:full]
    if size % given == 0:
        step = size // given
        return list(ids[step - 1 :: step])[:full]
    raise ReplayError(
        f"request {trace.id}: its blocks have {given} tokens, those of the engines {size}; "
        "expected one to be a multiple of the other"
    )


def _chain_hashes(local: Sequence[int]) -> list[int]:
    """Names of the blocks in which each stands for those in front of it too."""
    name = 0
    return [name := hash((name, block)) for block in local]
