"""The routers of a replay: what they know, what they decide, and what waits in their queues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from dynctl.planning.prefill_load import AGAIN_S, predicted_plan, prefill_model
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.agenda import LATER, Agenda
from dynctl.simulation.replay.fleet import (
    ReplayPolicy,
    SimulatedFleet,
    SimulatedSync,
    SimulatedWorker,
)
from dynctl.simulation.replay.journal import Journal
from dynctl.simulation.replay.peers import Peers, Step
from dynctl.simulation.replay.rank import NS
from dynctl.simulation.replay.result import Measures
from dynctl.simulation.replay.state import LiveRequest, ReplayRank, VirtualFrontend
from router_core import (
    Booked,
    Change,
    Decision,
    Dequeued,
    Freed,
    LeanIndex,
    LeanRouter,
    ModelRuntimeConfig,
    PrefillDone,
    QueueFull,
    Role,
    Router,
    RoutingPlan,
    Worker,
    WorkerUpserted,
    WorkerWithDpRank,
)


class RouterUsers(Protocol):
    """What follows from the turn of a request that waited."""

    def dispatch(self, live: LiveRequest, plan: RoutingPlan, *, booked: bool) -> None:
        """Send a request to the worker of its plan."""

    def refuse(self, live: LiveRequest, reason: str) -> None:
        """End a request that no worker takes."""


class ReplayRouters:
    """``count`` routers with one policy. ``draw``: random numbers from 0 to 1.

    ``users`` is notified of requests that waited; set it before the first change.
    """

    users: RouterUsers

    def __init__(
        self,
        fleet: SimulatedFleet,
        policy: ReplayPolicy,
        config: EngineConfig,
        sync: SimulatedSync,
        count: int,
        *,
        agenda: Agenda,
        journal: Journal,
        measures: Measures,
        draw: Callable[[], float],
    ) -> None:
        self.policy = policy
        self._fleet = fleet
        self._engine = config
        self._agenda = agenda
        self._journal = journal
        self._measures = measures
        self._draw = draw
        self.frontends = [
            VirtualFrontend(
                Router(
                    policy.config, exact_reuse=True, learns=True, policy_classes=policy.classes
                ),
                number,
                model=prefill_model(policy.config),
            )
            for number in range(count)
        ]  # fmt: skip
        self._shares = count > 1 and sync.mode == "delayed"
        self._sync_delay = round(sync.delay_s * NS)
        #: Of several routers: what they know of each other.
        self.peers = Peers(count, self._sync_delay) if count > 1 else None

    def decide_lean(self, ranks: list[ReplayRank], index: LeanIndex) -> None:
        """Let lean routers decide; they choose among ``ranks`` by position."""
        refs = [WorkerWithDpRank(*rank.key) for rank in ranks]
        for frontend in self.frontends:
            frontend.lean = LeanRouter(self.policy.config, refs, self._engine.block_size, index)

    def any(self) -> VirtualFrontend:
        """The router that gets a request: each with the same probability."""
        frontends = self.frontends
        if len(frontends) == 1:
            return frontends[0]
        return frontends[int(self._draw() * len(frontends))]

    def plan(self, live: LiveRequest) -> RoutingPlan:
        """Decide on all workers on which the request has not failed."""
        draw, request = self._draw, live.request
        if live.failed:
            everyone = {worker.worker_id for worker in live.frontend.router.registry}
            request = replace(request, allowed_worker_ids=frozenset(everyone - live.failed))
        frontend = live.frontend
        if frontend.router.load.decaying:
            frontend.router.advance(self._agenda.seconds)
        plan = frontend.router.plan(request, samples=(draw(), draw()))
        return plan if frontend.model is None else predicted_plan(frontend.model, plan)

    def plan_decode(self, live: LiveRequest, prefill: Decision) -> RoutingPlan:
        """Decide the second hop after a prefill."""
        router = live.frontend.router
        if router.load.decaying:
            router.advance(self._agenda.seconds)
        return router.continue_plan(live.request, prefill, sample=self._draw())

    def prefill_ended(self, live: LiveRequest) -> None:
        """The first worker of a request has computed its prompt: what a measured model learns."""
        frontend, plan = live.frontend, live.plan
        if frontend.model is not None and plan is not None:
            decision = plan.first
            if decision.parameters.track_prefill_tokens:
                now = self._agenda.seconds
                frontend.times.ended(frontend.model, decision, live.sent, now)

    # -- what they know ----------------------------------------------------------------------

    def apply(self, frontend: VirtualFrontend, change: Change) -> None:
        """Apply a change of one router, which shares its bookings with the others."""
        frontend.router.apply(change, self._agenda.seconds)
        self._journal.note_change(change)
        peers, now = self.peers, self._agenda.now
        if peers is None or not isinstance(change, Booked | PrefillDone | Freed):
            return
        step = peers.apply_change(frontend.number, change, now)
        if self._shares:
            if isinstance(change, Booked):
                change = replace(change, replica=True, session=None, prompt_hashes=())
            self._agenda.schedule(now + self._sync_delay, self._share, (frontend, change, step))

    def _share(self, what: tuple[VirtualFrontend, Change, Step | None]) -> None:
        origin, change, step = what
        seconds = self._agenda.seconds
        for frontend in self.frontends:
            if frontend is not origin:
                frontend.router.apply(change, seconds)
                if self.peers is not None:
                    self.peers.learn(frontend.number, step)
                if frontend.waiting:
                    self._admit(frontend)

    def everywhere(self, change: Change) -> None:
        """Apply a change that every router sees."""
        seconds = self._agenda.seconds
        for frontend in self.frontends:
            frontend.router.apply(change, seconds)
        self._journal.note_change(change)

    def register(self, worker: SimulatedWorker) -> None:
        """Every router sees a worker's card."""
        self.everywhere(WorkerUpserted(self._card(worker)))

    def sweep(self) -> None:
        """Free what routers have of workers that are lost."""
        for frontend in self.frontends:
            while frontend.router.sweep(1_000_000, self._agenda.seconds):
                pass

    def book(self, live: LiveRequest, decision: Decision) -> None:
        frontend = live.frontend
        self.apply(frontend, frontend.router.booking(decision, live.request))

    # -- their queues ------------------------------------------------------------------------

    def enqueue(self, live: LiveRequest, plan: RoutingPlan) -> None:
        """Let a request wait, or refuse it where the queue is full."""
        frontend = live.frontend
        entering = frontend.router.entering(plan, live.request)
        if isinstance(entering, QueueFull):
            refused = plan.turned_away(entering)
            self._journal.note_decision(live, refused)
            self.users.refuse(live, refused.final.outcome)
            return
        self.apply(frontend, entering)
        live.waits, live.enqueued = plan, self._agenda.now
        frontend.waiting[live.request.id] = live
        self._measures.queued += 1
        limit = self.policy.config.router_queue_max_wait_secs
        self._agenda.schedule(
            self._agenda.now + round(limit * NS), self._waited_too_long, live, LATER
        )  # fmt: skip
        self._admit(frontend)

    def admit_waiting(self) -> None:
        """Admit what waits in any queue, as long as there is room."""
        for frontend in self.frontends:
            if frontend.waiting:
                self._admit(frontend)

    def _waited_too_long(self, live: LiveRequest) -> None:
        frontend = live.frontend
        if frontend.waiting.pop(live.request.id, None) is None:
            return
        self.apply(frontend, Dequeued(live.request.id))
        self._note_wait(live)
        self.users.refuse(live, "queue_timeout")
        self._admit(frontend)

    def _note_wait(self, live: LiveRequest) -> None:
        live.queued_s = (self._agenda.now - live.enqueued) / NS
        self._measures.queue_wait.add(live.queued_s)

    def _admit(self, frontend: VirtualFrontend) -> None:
        router, waiting = frontend.router, frontend.waiting
        while waiting:
            plans: dict[str, RoutingPlan] = {}

            def admissible(entry: Any, plans: dict[str, RoutingPlan] = plans) -> bool:
                live = waiting.get(entry.request_id)
                if live is None:
                    return True
                plan = plans[entry.request_id] = self.plan(live)
                queue = plan.first.queue
                return queue is None or not queue.all_busy or not plan.ok

            turn = router.next_turn(self._fleet.model, admissible)
            if turn is None:
                self._try_again(frontend)
                return
            name = turn.entry.request_id
            self.apply(frontend, Dequeued(name, turn.credits, turn.cursor))
            live = waiting.pop(name, None)
            if live is None:
                continue
            self._note_wait(live)
            live.admitted = True
            before, plan = live.waits, plans[name]
            if before is not None:
                plan = plan.after_wait(before, live.queued_s or 0.0)
            if plan.ok:
                self.book(live, plan.first)
                self.users.dispatch(live, plan, booked=True)
            else:
                self._journal.note_decision(live, plan)
                self.users.refuse(live, plan.final.outcome)

    def _try_again(self, frontend: VirtualFrontend) -> None:
        """Give turns again after a while: loads fall with time, without a change."""
        if frontend.router.load.decaying and not frontend.again:
            frontend.again = True
            when = self._agenda.now + round(AGAIN_S * NS)
            self._agenda.schedule(when, self._again, frontend, LATER)

    def _again(self, frontend: VirtualFrontend) -> None:
        frontend.again = False
        if frontend.waiting:
            self._admit(frontend)

    # -- parts -------------------------------------------------------------------------------

    def _card(self, worker: SimulatedWorker) -> Worker:
        config = self._engine
        return Worker(
            worker_id=worker.worker_id,
            name=f"{worker.role.value}-{worker.worker_id}",
            model=self._fleet.model,
            role=worker.role,
            block_size=config.block_size,
            runtime_config=ModelRuntimeConfig(
                total_kv_blocks=config.total_blocks,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                context_length=config.context_length,
                data_parallel_size=worker.ranks,
                topology_domains=worker.domains,
                kv_transfer_domain=config.kv_transfer_domain,
                kv_transfer_enforcement=config.kv_transfer_enforcement,
                kv_transfer_preferred_weight=config.kv_transfer_preferred_weight,
            ),
            can_prefill=config.can_prefill or worker.role is not Role.DECODE,
            kv_events=self.policy.config.use_kv_events,
        )


def may_be_lean(
    fleet: SimulatedFleet, policy: ReplayPolicy, sync: SimulatedSync, routers: int
) -> bool:
    """Whether lean routers decide as whole ones, where nothing else is read of a decision."""
    return (
        all(worker.role is Role.AGGREGATED for worker in fleet.workers)
        and (routers == 1 or sync.mode == "none")
        and not (fleet.losses or fleet.changes or fleet.events_loss or policy.classes)
        # Lean routers look into lower tiers, and know no events of them.
        and not ((fleet.engine.host_blocks or fleet.engine.disk_blocks) and fleet.events_delay_s)
        and policy.transfer is None
        and LeanRouter.supports(policy.config)
    )
