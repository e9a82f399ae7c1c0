"""RoutingService: the router inside a process.

It owns the one :class:`Router`, supplies its clock and random numbers, turns prompts into routing
requests, and notifies observers (metrics, logs, decision memory). ``serve frontend`` and
``serve router`` are interfaces of the same service.
"""

import hashlib
import logging
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from dynctl.adapters.otlp import SpanExport
from dynctl.base.quantities import chance
from dynctl.base.tasks import Supervisor
from dynctl.base.turns import Apart
from dynctl.documents.doubts import Doubt, doubt
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_of_plan import route_result
from dynctl.documents.route_result import RouteResult
from dynctl.documents.workers import CORDONED, WorkerRow, worker_rows
from dynctl.health import conditions as codes
from dynctl.health.evaluation import FleetHealth
from dynctl.planning.prefill_load import PrefillModel, PrefillTimes, predicted_plan
from dynctl.serving.routing.admission import Admission
from dynctl.serving.routing.config import SMALL_FLEET
from dynctl.serving.routing.prompts import (
    NOT_MODELLED,
    Prompt,
    PromptTokenizers,
    PromptTokens,
    estimate_tokens,
)
from dynctl.serving.routing.served_models import ServedModels
from dynctl.serving.routing.service_health import CHANGES_OF_HEALTH, ServiceHealth
from dynctl.serving.routing.unseen_prefills import UnseenPrefills
from dynctl.serving.telemetry.observers import Observers, RequestRecord
from dynctl.serving.telemetry.traces import Traces
from dynctl.tokenization.errors import TokenizationError
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import (
    NO_CONSTRAINTS,
    Applied,
    BlockHashes,
    Booked,
    Change,
    ConfigSet,
    Decision,
    Expired,
    Freed,
    KvEvent,
    LoadReported,
    OutputBlock,
    Pin,
    PrefillDone,
    Progressed,
    PromptHasher,
    Router,
    RouterConfig,
    RoutingConstraints,
    RoutingPlan,
    RoutingRequest,
    RoutingView,
    Session,
    Stage,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)

Clock = Callable[[], float]
Tap = Callable[[Change, float, Applied], None]

_log = logging.getLogger(__name__)

#: Workers that the operator may take out of routing at a time.
MAX_CORDONED: Final = 4_096
#: Changes after which a waiting request may be admitted.
_MAKES_ROOM: Final = (*CHANGES_OF_HEALTH, Expired, Freed, LoadReported, PrefillDone)


#: Prompts of a batch, and their blocks together, up to which the caches of all of them count. A
#: decision about more would hold up other requests.
_HASHED_PROMPTS: Final = 256
_HASHED_BLOCKS: Final = 65_536
_LONG_BATCH: Final = (
    f"cache overlap not modelled: a batch of more than {_HASHED_PROMPTS} prompts or "
    f"{_HASHED_BLOCKS} blocks"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be routed, and the tokens it came from (``ids`` None: not tokenized).

    In a batch ``tokens`` are the first prompt's; ``prompts`` counts them, and ``longest`` is the
    length of the longest one in tokens.
    """

    request: RoutingRequest
    tokens: PromptTokens
    tokenize_s: float = 0.0
    prompts: int = 1
    longest: int = 0


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
    """

    def __init__(
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
    ) -> None:
        self._reports = reports
        self.router = router or Router(config, exact_reuse=True, learns=True)
        self.tokenizers = tokenizers or PromptTokenizers()
        self.clock = clock
        self.wall = wall
        self.sample = sample
        #: All workers, registered or not, as they are at the call; seconds between two load
        #: reports, and whether the process is draining; the fleet and the server set them.
        self.rows: Callable[[], Iterable[WorkerRow]] = self.workers
        self.probe_s: Callable[[], float] = lambda: 1.0
        #: Engines that cannot be registered (yet), so that their models may be unknown.
        self.unregistered: Callable[[], Iterable[WorkerRow]] = tuple
        self.draining = False
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
        #: Responses that went on with another worker.
        self.moved = 0
        self.started_at = clock()
        #: Predicts how long prefills take; None: their load stays until the first output token.
        self.prefill_model = prefill_model
        self.prefill_times = PrefillTimes()
        #: Whether a cache salt is mixed into each block of a prompt, as by the workers of a Dynamo
        #: deployment, and not into the first one alone, as by engines.
        self.salts_each_block = False
        #: Block size -> hasher that caches the beginnings of prompts.
        self._hashers: dict[int, PromptHasher] = {}
        self._prefix = id_prefix if id_prefix is not None else f"{random.getrandbits(40):010x}"
        self._count = 0
        #: The models of the registered workers.
        self.served = ServedModels(self.router, sample, default_block_size)
        #: Names of workers that the operator took out of routing, in that order.
        self.cordoned: dict[str, None] = {}
        #: Worker id -> why it is not routable, apart from a cordon.
        self._problems: dict[int, str] = {}
        #: Hashes session names, so that a key does not reveal its name.
        self.session_secret = secrets.token_bytes(32) if reports is None else reports.session_secret

    # -- ids -------------------------------------------------------------------------------

    def new_id(self) -> str:
        """A decision id: unique in this process, and almost surely across processes."""
        self._count += 1
        return f"{self._prefix}{self._count:08x}"

    # -- preparing -------------------------------------------------------------------------

    def models(self) -> tuple[str, ...]:
        """Models of all registered workers, reachable or not."""
        return self.router.registry.models()

    def may_serve(self, name: str) -> list[WorkerRow]:
        """The engines that are not registered and that may serve the model, as far as is known;
        with an empty name those that may serve any."""
        return [row for row in self.unregistered() if not name or row.model in ("", name)]

    async def prepare(  # noqa: PLR0913  the keyword arguments are fields of the request
        self,
        model: str,
        prompts: Prompt | Sequence[Prompt],
        *,
        decision_id: str | None = None,
        constraints: RoutingConstraints = NO_CONSTRAINTS,
        pin_prefill: Pin | None = None,
        pin_decode: Pin | None = None,
        allowed_worker_ids: frozenset[int] | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        not_modelled: str | None = None,
        session: Session | None = None,
        policy_class: str | None = None,
        priority: int = 0,
        strict_priority: int = 0,
        worker_set: str | None = None,
        served_name: str | None = None,
        streams: bool = True,
        apart: Apart | None = None,
    ) -> Prepared:
        """Tokenize and hash one prompt or a batch. Raises PromptError, TemplateError or
        HashingError (a client's 4xx).

        ``not_modelled`` is why the prompt cannot be tokenized here (images, a template in the
        request): it is routed by load, and its decisions have this note. ``lora_name`` is the
        adapter, which is part of the hashes. ``served_name``: see :meth:`ServedModels.served_name`.
        ``session``: made by :meth:`session`. ``policy_class``, ``priority`` and
        ``strict_priority`` are for the router queue. ``worker_set``: see
        :meth:`ServedModels.draw_worker_set`. ``apart``: runs what takes long, for a large
        request; None: it runs here.
        """
        started = self.clock()
        batch = [prompts] if isinstance(prompts, Prompt) else prompts
        if not_modelled is None:
            try:
                found = await self.tokenizers.tokenize_batch(model, batch, worker_set, apart)
            except TokenizationError as error:
                if error.over_limit is not None:
                    self._health.model_file_over_limit(model, error.over_limit)
                raise
        else:
            found = [PromptTokens(None, estimate_tokens(p), "estimate") for p in batch]
        tokens = found[0]
        tokenize_s = self.clock() - started
        size = self.served.block_size(model, worker_set)
        eagle = self.served.is_eagle(model, worker_set)
        hashes = [BlockHashes(size, [], [])]
        modelled, note = tokens.ids is not None, not_modelled or tokens.note or NOT_MODELLED
        if modelled and len(found) > 1 and _is_long(found, size):
            modelled, note = False, _LONG_BATCH
        if modelled:
            hash_all = partial(self._all_hashed, found, size, lora_name, cache_salt, is_eagle=eagle)
            hashes = hash_all() if apart is None else await apart(hash_all)
        request = RoutingRequest(
            id=decision_id or self.new_id(),
            model=model,
            isl_tokens=sum(prompt_tokens.count for prompt_tokens in found),
            block_size=size,
            sequence_hashes=hashes[0].sequence,
            local_hashes=hashes[0].local,
            constraints=constraints,
            pin_prefill=pin_prefill,
            pin_decode=pin_decode,
            allowed_worker_ids=allowed_worker_ids,
            worker_set=worker_set,
            is_eagle=eagle,
            overlap_modelled=modelled,
            notes=() if modelled else (note,),
            lora_name=lora_name,
            salted=bool(cache_salt),
            more_hashes=tuple(more.sequence for more in hashes[1:]),
            lengths=tuple(prompt_tokens.count for prompt_tokens in found) if len(found) > 1 else (),
            session=session,
            policy_class=policy_class,
            priority=priority,
            strict_priority=strict_priority,
            arrived_at=started,
            chained=True,
            served_name=served_name,
            streams=streams,
        )
        longest = max(prompt_tokens.count for prompt_tokens in found)
        return Prepared(request, tokens, tokenize_s, len(found), longest)

    def salt_of(self, parsed: ChatRequest | CompletionRequest) -> str | None:
        """The cache salt of a request. Dynamo prefers that of ``nvext``, engines the body's own."""
        if self.salts_each_block:
            return parsed.nvext.cache_salt or parsed.cache_salt
        return parsed.cache_salt

    def _all_hashed(
        self,
        found: Sequence[PromptTokens],
        block_size: int,
        lora_name: str | None,
        cache_salt: str | None,
        *,
        is_eagle: bool,
    ) -> list[BlockHashes]:
        hashes = []
        for prompt_tokens in found:
            ids = prompt_tokens.ids or ()
            hashes.append(self._hashed(ids, block_size, lora_name, cache_salt, is_eagle=is_eagle))
        return hashes

    def _hashed(
        self,
        ids: Sequence[int],
        block_size: int,
        lora_name: str | None,
        cache_salt: str | None,
        *,
        is_eagle: bool,
    ) -> BlockHashes:
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = PromptHasher(block_size)
        each = self.salts_each_block
        return hasher.hash_prompt(
            ids,
            lora_name=lora_name,
            cache_namespace=cache_salt if each else None,
            cache_salt=None if each else cache_salt,
            is_eagle=is_eagle,
        )

    def rehashed(
        self, request: RoutingRequest, ids: Sequence[int], cache_salt: str | None
    ) -> RoutingRequest:
        """The request with a longer prompt: what was generated is part of it now."""
        size, lora, eagle = request.block_size, request.lora_name, request.is_eagle
        hashes = self._hashed(ids, size, lora, cache_salt, is_eagle=eagle)
        return replace(
            request,
            isl_tokens=len(ids),
            sequence_hashes=hashes.sequence,
            local_hashes=hashes.local,
        )

    def session(self, name: str | None, client: bytes = b"") -> Session | None:
        """The session that a client names; None without one, and while affinity is off.

        The key says nothing about the name, and equal names of two clients have different keys.
        """
        if not name or self.router.config.router_session_affinity_ttl_secs is None:
            return None
        whole = len(client).to_bytes(4) + client + name.encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(whole, key=self.session_secret, digest_size=16)
        return Session(digest.hexdigest(), self.clock())

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
        detail = detail or self._small_fleet
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
            self.served.update(now)
            self._health.fleet_changed(self.served.mismatches())
        return applied

    def expire(self) -> None:
        """Remove bookings without progress, except those with an open stream in this process."""
        for request_id in self.held:
            self.apply(Progressed(request_id))
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

    def drain(self) -> None:
        """New requests are refused from now on."""
        self.draining = True

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

    def upsert_worker(self, worker: Worker) -> Applied:
        applied = self.apply(WorkerUpserted(worker))
        if applied.ok and worker.name in self.cordoned:
            self._show_cordon(worker)
        return applied

    def remove_worker(self, worker_id: int) -> Applied:
        worker = self.router.registry.get(worker_id)
        applied = self.apply(WorkerLost(worker_id))
        self._problems.pop(worker_id, None)
        if worker is not None:
            self.conditions.forget(worker.name)
            if worker.model not in self.models():
                self.conditions.forget(worker.model)
            self._health.changed()
        return applied

    def set_available(self, worker_id: int, reason: str | None) -> Applied:
        """``reason``: why the worker is not routable; None: it is routable again, unless it is
        cordoned."""
        if reason is None:
            self._problems.pop(worker_id, None)
        else:
            self._problems[worker_id] = reason
        worker = self.router.registry.get(worker_id)
        if worker is not None and worker.name in self.cordoned:
            reason = CORDONED if reason is None else f"{CORDONED}; {reason}"
        return self.apply(WorkerAvailability(worker_id, reason))

    def cordon(self, name: str, *, cordoned: bool) -> None:
        """Take the worker of this name out of routing, or put it back.

        Its requests go on. The cordon holds for the name while this process runs, also when the
        worker leaves and returns. Raises ValueError for more than :data:`MAX_CORDONED` names.
        """
        if not cordoned:
            self.cordoned.pop(name, None)
            self.clear_condition(codes.WORKER_CORDONED, name)
        elif len(self.cordoned) >= MAX_CORDONED:
            raise ValueError(f"{MAX_CORDONED:,} workers are cordoned, no more are")
        else:
            self.cordoned[name] = None
        worker = self.router.registry.by_name(name)
        if worker is not None:
            self._show_cordon(worker)
        self._health.changed()

    def _show_cordon(self, worker: Worker) -> None:
        self.set_available(worker.worker_id, self._problems.get(worker.worker_id))
        if worker.name in self.cordoned:
            self.set_condition(codes.WORKER_CORDONED, worker.name, CORDONED)

    def find_worker(self, text: str) -> Worker | None:
        """A worker by name, decimal id or hex id (``0x..``)."""
        registry = self.router.registry
        worker = registry.by_name(text)
        if worker is not None:
            return worker
        for base in (10, 16):
            try:
                worker = registry.get(int(text, base))
            except ValueError:
                continue
            if worker is not None:
                return worker
        return None

    def workers(self) -> list[WorkerRow]:
        """One row per worker, with its ranks' load, cache and freshness."""
        return worker_rows(self.router, self.clock())

    def configure(self, values: Mapping[str, Any]) -> Applied:
        return self.apply(ConfigSet(values))


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


def _is_long(batch: Sequence[PromptTokens], block_size: int) -> bool:
    """Whether a batch has more prompts or blocks than are hashed."""
    blocks = sum(prompt_tokens.count for prompt_tokens in batch) // block_size
    return len(batch) > _HASHED_PROMPTS or blocks > _HASHED_BLOCKS
