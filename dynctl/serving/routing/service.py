"""RoutingService: the router inside a process.

It owns the one :class:`Router`, supplies its clock and random numbers, turns prompts into routing
requests, and notifies observers (metrics, logs, decision memory). ``serve frontend`` and
``serve router`` are interfaces of the same service.
"""

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec

from dynctl.adapters.otlp import SpanExport
from dynctl.base.quantities import chance
from dynctl.base.tasks import SLICE, Supervisor, drained
from dynctl.documents.doubts import Doubt, doubt
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_of_plan import route_result
from dynctl.documents.route_result import RouteResult
from dynctl.documents.workers import WorkerRow, worker_rows
from dynctl.health import conditions as codes
from dynctl.health.evaluation import FleetHealth
from dynctl.planning.prefill_load import PrefillModel, PrefillTimes, predicted_plan
from dynctl.serving.routing.admission import Admission
from dynctl.serving.routing.config import SMALL_FLEET
from dynctl.serving.routing.membership import Membership
from dynctl.serving.routing.preparation import Preparation
from dynctl.serving.routing.prompts import (
    PromptTokenizers,
)
from dynctl.serving.routing.served_models import ServedModels
from dynctl.serving.routing.service_health import CHANGES_OF_HEALTH, HEALTH_AGE_S, ServiceHealth
from dynctl.serving.routing.unseen_prefills import UnseenPrefills
from dynctl.serving.telemetry.observers import Observers, RequestRecord
from dynctl.serving.telemetry.traces import Traces
from router_core import (
    Applied,
    Booked,
    Change,
    ConfigSet,
    Decision,
    Expired,
    Freed,
    KvEvent,
    LoadReported,
    OutputBlock,
    PrefillDone,
    Progressed,
    Router,
    RouterConfig,
    RoutingPlan,
    RoutingRequest,
    RoutingView,
    Stage,
    Worker,
    WorkerLost,
    WorkerUpserted,
)

Clock = Callable[[], float]
Tap = Callable[[Change, float, Applied], None]

_log = logging.getLogger(__name__)

#: Changes after which a waiting request may be admitted.
_MAKES_ROOM: Final = (*CHANGES_OF_HEALTH, Expired, Freed, LoadReported, PrefillDone)


class LoadSharing(Protocol):
    """What shares the load of this router with others (:mod:`dynctl.serving.routing.replicas`)."""

    events: Counter[tuple[str, str]]
    missed: Counter[str]

    def before(self, change: Change) -> None: ...
    def after(self, change: Change) -> None: ...
    def keep_alive(self) -> None: ...
    def out_of_date(self) -> str: ...
    def rows(self) -> list[ReplicaRow]: ...


class BookingReports(Protocol):
    """Passes what happens to requests on to the process that books them too."""

    session_secret: bytes

    def booked(self, decision: Decision, request: RoutingRequest) -> None: ...
    def first_output(self, request_id: str, *, seen: bool) -> None: ...
    def output_block(self, request_id: str, decay_fraction: float | None) -> None: ...
    def freed(self, request_id: str, stage: Stage | None, *, computed: bool) -> None: ...


class RoutingService:
    """One router with its clock, tokenizers, conditions and observers.

    ``clock`` gives monotonic seconds, ``wall`` wall-clock seconds, ``sample`` numbers in [0, 1).
    ``id_prefix`` starts every decision id; each process has another. ``prefill_model`` predicts how
    long prefills take. ``router``: the router itself, in place of one with ``config``. ``export``
    gets the traces of requests; None: tracing is off. ``serves_pools``: a pool of one role is
    served (``FleetState.pools``). ``reports`` get what happens to bookings, before it is applied.
    ``salts_each_block``: see :class:`Preparation`.
    """

    def __init__(  # noqa: PLR0913  what a process has of its own
        self,
        config: RouterConfig | None = None,
        tokenizers: PromptTokenizers | None = None,
        *,
        default_block_size: int = 16,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        sample: Clock = random.random,
        id_prefix: str | None = None,
        prefill_model: PrefillModel | None = None,
        router: Router | None = None,
        export: SpanExport | None = None,
        serves_pools: bool = False,
        reports: BookingReports | None = None,
        salts_each_block: bool = False,
    ) -> None:
        self._reports = reports
        self.router = router or Router(config, exact_reuse=True, learns=True)
        self.clock = clock
        self.wall = wall
        self.sample = sample
        #: All workers, registered or not, as they are at the call (:meth:`read_fleet`).
        self.rows: Callable[[], Iterable[WorkerRow]] = self.workers
        #: Seconds between two load reports.
        self.probe_s: Callable[[], float] = lambda: 1.0
        #: Engines that cannot be registered (yet), so that their models may be unknown.
        self.unregistered: Callable[[], Iterable[WorkerRow]] = tuple
        self.draining = self.refusing = False
        self.serves_pools = serves_pools
        #: Shares the load of this router with others; None without replica sync.
        self.sharing: LoadSharing | None = None
        self._health = ServiceHealth(self)
        #: The conditions in force.
        self.conditions = self._health.conditions
        #: Reads the index of a request's prompt from another process; None: the index is here.
        self.ask_index: Callable[[RoutingRequest], Awaitable[None]] | None = None
        #: Grows with each change of workers, their availability, settings or thresholds.
        self.changes = 0
        self.observers = Observers(self._observer_failed)
        self._reporting = False
        #: Get each change after it was applied, with its time on the service's clock.
        self.taps: tuple[Tap, ...] = ()
        #: Begins the traces of requests; None: tracing is off.
        self.traces: Traces | None = None
        if export is not None:
            self.traces = Traces(export, clock, lambda model: [d.code for d in self.doubts(model)])
            self.observers.append(self.traces)
        #: The requests that wait in the router queue.
        self.admission = Admission(self)
        #: The prefills of requests whose first output is not seen.
        self.unseen_prefills = UnseenPrefills(self)
        self.tasks = Supervisor(self._health.task_failed, self._health.task_recovered)
        #: (kind of event, result code) -> how many; kinds are stored, removed, cleared.
        self.kv_events: Counter[tuple[str, str]] = Counter()
        #: (worker name, kind of UpstreamFailure) -> how many requests the engine failed.
        self.engine_failures: Counter[tuple[str, str]] = Counter()
        #: Failed probes that count for nothing, because our own event loop was late.
        self.probes_excused = 0
        self._stalls: deque[tuple[float, float]] = deque(maxlen=64)
        #: Requests with an open stream in this process: their bookings do not expire.
        self.held: set[str] = set()
        #: Whether the log has that a request asked for a place in the queue, which is off.
        self._queue_named = False
        self.started_at = clock()
        #: Predicts how long prefills take; None: their load stays until the first output token.
        self.prefill_model = prefill_model
        self.prefill_times = PrefillTimes()
        #: The models of the registered workers.
        self.served = ServedModels(self.router, sample, default_block_size)
        #: Those that joined or changed in a block of :meth:`changing_many_workers`; None outside.
        self._changed_workers: list[Worker] | None = None
        #: Which workers get requests.
        self.membership = Membership(self.router, self.apply, self._health)
        #: Makes the routing requests of prompts.
        self.preparation = Preparation(
            self.router,
            tokenizers or PromptTokenizers(),
            self.served,
            clock,
            id_prefix=id_prefix,
            salts_each_block=salts_each_block,
            session_secret=None if reports is None else reports.session_secret,
            over_limit=self._health.model_file_over_limit,
        )
        self.new_id = self.preparation.new_id

    # -- models ----------------------------------------------------------------------------

    def models(self) -> tuple[str, ...]:
        """Models of all registered workers, reachable or not."""
        return self.router.registry.models()

    def may_serve(self, name: str) -> list[WorkerRow]:
        """The engines that are not registered and that may serve the model, as far as is known;
        with an empty name those that may serve any."""
        return [row for row in self.unregistered() if not name or row.model in ("", name)]

    # -- deciding and booking --------------------------------------------------------------

    def plan(
        self,
        request: RoutingRequest,
        *,
        detail: bool = False,
        view: RoutingView | None = None,
        samples: tuple[float, float] | None = None,
    ) -> RoutingPlan:
        """Decide every hop; books nothing.

        ``detail`` lists every rejection: for dry runs, and always in a small fleet, where the cost
        is negligible.
        """
        drawn = samples or (self.sample(), self.sample())
        detail = detail or self.router.registry.capacity <= SMALL_FLEET
        if self.router.load.decaying:
            self.advance()
        plan = self.router.plan(request, samples=drawn, view=view, detail=detail)
        return plan if self.prefill_model is None else predicted_plan(self.prefill_model, plan)

    def plan_hop(
        self, request: RoutingRequest, stage: Stage, *, after: Worker | None = None
    ) -> RoutingPlan:
        """Decide one hop alone, for a pool whose other hop is decided elsewhere."""
        if self.router.load.decaying:
            self.advance()
        plan = self.router.plan_hop(
            request, stage, after=after, sample=self.sample(), detail=self._small_fleet
        )
        return plan if self.prefill_model is None else predicted_plan(self.prefill_model, plan)

    async def read_index(self, request: RoutingRequest) -> None:
        """Read what a decision needs of an index in another process, where there is one."""
        if self.ask_index is not None:
            await self.ask_index(request)

    def explain(
        self, request: RoutingRequest, *, preset: str | None, more: Sequence[Doubt] = ()
    ) -> RouteResult:
        """A dry run as a document. ``more`` doubts come first."""
        plan = self.plan(request, detail=True)
        if request.worker_set is not None:
            more = [*more, *self._other_sets(request)]
        result = route_result(
            self.router,
            request,
            plan,
            now=self.clock(),
            preset=preset,
            doubts=[*more, *self.doubts(plan.model)],
        )
        if request.worker_set is not None:
            result = msgspec.structs.replace(result, worker_set=request.worker_set)
        return result

    def _other_sets(self, request: RoutingRequest) -> Iterable[Doubt]:
        """That the request may go to another worker set than the one of this dry run."""
        shares = self.served.shares(request.model, request.served_name)
        drawn = {name: count for name, count in shares.items() if count}
        if len(drawn) > 1:
            total = sum(drawn.values())
            text = ", ".join(f"{name} {chance(n / total)}" for name, n in drawn.items())
            yield doubt("DYR0722", sets=len(drawn), model=request.model, shares=text)

    def continue_plan(
        self, request: RoutingRequest, prefill: Decision, *, detail: bool = False
    ) -> RoutingPlan:
        """Decide the decode hop again, now that prefill is done."""
        detail = detail or self._small_fleet
        if self.router.load.decaying:
            self.advance()
        return self.router.continue_plan(request, prefill, sample=self.sample(), detail=detail)

    def measure_prefill(self, decision: Decision, sent: float) -> None:
        """The prefill of a decision, sent to its worker at ``sent``, had its first output."""
        now = self.clock()
        self.unseen_prefills.measured(decision, now - sent)
        if self.prefill_model is not None:
            self.prefill_times.ended(self.prefill_model, decision, sent, now)

    def advance(self) -> None:
        """Let the prefill tokens whose duration is predicted fall to those of this moment."""
        self.router.advance(self.clock())

    @property
    def _small_fleet(self) -> bool:
        return self.router.registry.capacity <= SMALL_FLEET

    def book(self, decision: Decision, request: RoutingRequest, record: RequestRecord) -> Applied:
        """Book the hop on its winner; from now on it counts as that worker's load."""
        if self._reports is not None:
            self._reports.booked(decision, request)
        applied = self.apply(self.router.booking(decision, request))
        if applied.ok:
            self.observers.hop(decision, request, record)
        return applied

    def decided(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> RoutingPlan:
        """Notify the observers of the plan that the request is dispatched by. Returns what a
        running request keeps of it (:meth:`RoutingPlan.settled`)."""
        record.plan = plan
        first = plan.prefill or plan.decode
        queued = first is not None and first.queue is not None
        record.unused = "" if queued else request.queue_fields
        if record.unused and not self._queue_named:
            self._queue_named = True
            _log.warning(
                "request %s sets %s, which has no effect: requests do not wait here "
                "(--router-queue-threshold); this is logged once", request.id, record.unused,
            )  # fmt: skip
        if plan.relaxed and plan.prefill is not None and plan.prefill.worker is not None:
            wanted = ", ".join(item.taint for item in plan.implied)
            self.set_condition(
                codes.TRANSFER_CROSSED,
                plan.model,
                f"no eligible decode worker of {plan.model} satisfied {wanted}, so KV caches cross "
                "the domain (fallback policy); add decode capacity there",
            )
        self.observers.decision(plan, request, record)
        # The request may run for minutes.
        settled = record.plan = plan.settled()
        return settled

    def prefill_done(self, request_id: str, *, seen: bool = True) -> Applied:
        """The prompt is computed. Not ``seen``: as events of the worker show or as is estimated,
        and not by its first output token."""
        if self._reports is not None:
            self._reports.first_output(request_id, seen=seen)
        if self.unseen_prefills.running:
            self.unseen_prefills.forget(request_id)
        return self.apply(PrefillDone(request_id))

    def output_block(self, request_id: str, decay_fraction: float | None = None) -> Applied:
        if self._reports is not None:
            self._reports.output_block(request_id, decay_fraction)
        return self.apply(OutputBlock(request_id, decay_fraction))

    def free(
        self, request_id: str, stage: Stage | None = None, *, computed: bool = True
    ) -> Applied:
        """The request ended on one hop or all. Not ``computed``: the engine did not accept
        it, so that it earns no cache credit."""
        if self._reports is not None:
            self._reports.freed(request_id, stage, computed=computed)
        if self.unseen_prefills.running:
            self.unseen_prefills.forget(request_id)
        return self.apply(Freed(request_id, stage, computed))

    # -- changes ---------------------------------------------------------------------------

    def apply(self, change: Change) -> Applied:
        """Apply one change at the current time; all changes of the process go through here."""
        sharing = self.sharing
        if sharing is not None:
            sharing.before(change)
        now = self.clock()
        applied = self.router.apply(change, now)
        for tap in self.taps:
            try:
                tap(change, now, applied)
            except Exception as error:
                self._observer_failed(getattr(tap, "__self__", tap), error)
        if sharing is not None and applied.ok:
            sharing.after(change)
        if self.admission.waiting and isinstance(change, _MAKES_ROOM):
            self.admission.try_soon()
        if isinstance(change, (Booked, Freed, PrefillDone)):
            return applied
        if isinstance(change, CHANGES_OF_HEALTH):
            self._health.changed()
            self.changes += 1
        if isinstance(change, KvEvent):
            kind = type(change.event).__name__.removeprefix("Blocks").removeprefix("Window").lower()
            self.kv_events[kind, applied.code] += 1
            if self.unseen_prefills.running:
                self.unseen_prefills.stored(change)
        elif isinstance(change, (WorkerUpserted, WorkerLost, ConfigSet)) and applied.ok:
            changed: Iterable[Worker] = ()
            if isinstance(change, WorkerUpserted):
                changed = (change.worker,)
            elif isinstance(change, ConfigSet):
                changed = self.router.registry
            if self._changed_workers is None:
                self._fleet_changed(changed)
            else:
                self._changed_workers.extend(changed)
        return applied

    @contextmanager
    def changing_many_workers(self) -> Iterator[None]:
        """What depends on all workers is found once, at the end of the block, which must not give
        the event loop a turn: after each of 1,000 workers that come at once it takes seconds."""
        changed = self._changed_workers = []
        try:
            yield
        finally:
            self._changed_workers = None
            self._fleet_changed(changed)

    def _fleet_changed(self, changed: Iterable[Worker]) -> None:
        self.served.update(self.clock())
        self._health.fleet_changed(changed, self.served.mismatches())

    def expire(self) -> None:
        """Remove bookings without progress, except those with an open stream in this process."""
        drained(self.expiring())

    def expiring(self) -> Generator[None, None, None]:
        """As :meth:`expire`, in steps: thousands of open streams take milliseconds."""
        for number, request_id in enumerate(tuple(self.held), 1):
            if request_id in self.held:
                self.apply(Progressed(request_id))
            if number % SLICE == 0:
                yield
        if self.sharing is not None:
            self.sharing.keep_alive()
        self.apply(Expired())

    def sweep(self, max_blocks: int) -> bool:
        """Remove some blocks of lost workers, and learned ones that are too old."""
        return self.router.sweep(max_blocks, self.clock())

    def loop_was_late(self, seconds: float) -> None:
        """The event loop woke up this much too late just now."""
        self._stalls.append((self.clock(), seconds))

    def loop_late_since(self, began: float) -> float:
        """Seconds that the event loop was late in all since a time of the service's clock."""
        return sum(late for at, late in self._stalls if at >= began)

    def set_condition(self, code: str, subject: str, message: str) -> None:
        """Report a condition; observers are notified when it is new or changed."""
        self._health.set_condition(code, subject, message)

    def outage(self) -> str | None:
        """The code of the condition that loses all requests now."""
        lost = self.conditions.get(codes.REQUEST_PLANE_LOST, "NATS")
        return None if lost is None else lost.code

    def clear_condition(self, code: str, subject: str) -> None:
        """End a condition; observers are notified if it was in force."""
        self._health.clear_condition(code, subject)

    def announce_end(self) -> None:
        """Not ready from now on; new requests are still answered."""
        self.draining = True

    def drain(self) -> None:
        """New requests are refused from now on."""
        self.draining = self.refusing = True

    def read_fleet(
        self,
        rows: Callable[[], Iterable[WorkerRow]] | None = None,
        unregistered: Callable[[], Iterable[WorkerRow]] | None = None,
        probe_s: Callable[[], float] | None = None,
    ) -> None:
        """Read the workers of the process with these from now on; None: as before."""
        self.rows = rows or self.rows
        self.unregistered = unregistered or self.unregistered
        self.probe_s = probe_s or self.probe_s

    def read_index_with(self, ask: Callable[[RoutingRequest], Awaitable[None]]) -> None:
        """Read the index of each request's prompt from another process from now on."""
        self.ask_index = ask

    def share_load(self, sharing: LoadSharing) -> None:
        """Share the load of this router with others from now on."""
        self.sharing = sharing

    def add_tap(self, tap: Tap) -> None:
        """Pass each change to ``tap`` from now on."""
        self.taps = (*self.taps, tap)

    def remove_tap(self, tap: Tap) -> None:
        self.taps = tuple(other for other in self.taps if other != tap)

    def note(self, kind: str, subject: str, text: str) -> None:
        """Report what an operator does, such as a step of a canary, to log and observers."""
        _log.info("%s of %s: %s", kind, subject, text)
        self.observers.note(kind, subject, text)

    def _observer_failed(self, observer: object, error: Exception) -> None:
        """Report the failure of an observer or a tap. The condition that begins is shown to them
        too, and may fail again."""
        if not self._reporting:
            self._reporting = True
            try:
                self.tasks.report("observer", error, type(observer).__name__)
            finally:
                self._reporting = False

    def health(self, max_age_s: float = 0.0) -> FleetHealth:
        """As :meth:`ServiceHealth.evaluate`."""
        return self._health.evaluate(max_age_s)

    async def refresh_health(self, max_age_s: float = 0.0) -> FleetHealth:
        """As :meth:`ServiceHealth.refresh`."""
        return await self._health.refresh(max_age_s)

    def doubts(self, model: str) -> list[Doubt]:
        """Conditions that make the index or load of the model's candidates doubtful."""
        return self._health.doubts(model)

    @property
    def mismatched(self) -> set[str]:
        """Workers whose block size differs from the other workers' of their model."""
        return self._health.mismatched

    # -- workers ---------------------------------------------------------------------------

    def workers(self) -> list[WorkerRow]:
        """One row per worker, with its ranks' load, cache and freshness."""
        return worker_rows(self.router, self.clock())

    def configure(self, values: Mapping[str, Any]) -> Applied:
        return self.apply(ConfigSet(values))


class Placement(Protocol):
    """Decides hops. ``remote``: a router in another process decides now, and books its plans in the
    same step unless they are ``dry``."""

    @property
    def remote(self) -> bool: ...

    async def place(self, request: RoutingRequest, *, dry: bool = False) -> RoutingPlan:
        """Decide every hop. ``dry``: for a dry run, with every rejection."""

    async def place_decode(self, request: RoutingRequest, prefill: Decision) -> RoutingPlan:
        """Decide the decode hop again, now that prefill is done."""

    async def explain(self, request: RoutingRequest, *, preset: str | None) -> RouteResult:
        """A dry run as a document."""


class LocalPlacement:
    """Placement by the router of this process."""

    remote = False

    def __init__(self, service: RoutingService) -> None:
        self._service = service

    async def place(self, request: RoutingRequest, *, dry: bool = False) -> RoutingPlan:
        if self._service.ask_index is not None:
            await self._service.ask_index(request)
        return self._service.plan(request, detail=dry)

    async def place_decode(self, request: RoutingRequest, prefill: Decision) -> RoutingPlan:
        return self._service.continue_plan(request, prefill)

    async def explain(self, request: RoutingRequest, *, preset: str | None) -> RouteResult:
        await self._service.read_index(request)
        await self._service.refresh_health(HEALTH_AGE_S)
        return self._service.explain(request, preset=preset)


def excluding(
    request: RoutingRequest, failed: Mapping[int, str], everyone: Iterable[Worker]
) -> RoutingRequest:
    """The request without the workers that failed it already, by id, each with the reason."""
    if not failed:
        return request
    allowed = request.allowed_worker_ids
    if allowed is None:
        allowed = frozenset(w.worker_id for w in everyone if w.model == request.model)
    reasons = {**dict(request.excluded), **failed}
    return replace(
        request, allowed_worker_ids=allowed - failed.keys(), excluded=tuple(reasons.items())
    )
