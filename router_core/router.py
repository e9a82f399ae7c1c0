"""The router: its state, and the only place where changes take effect.

``plan`` reads; ``apply`` writes; ``advance`` lets loads fall that fall with time. The router has no
clock and no randomness: callers pass ``now`` in seconds of any one monotonic clock, and ``samples``
for ties and temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any, Final

import router_core.changes as c
import router_core.planning as planning
from router_core.busy import BusyTracker, Thresholds
from router_core.changes import OK, Applied, Booked, Change, Stage
from router_core.config import RouterConfig
from router_core.cost import CostParameters
from router_core.cost_inputs import learned_blocks
from router_core.decision import Decision, RoutingPlan
from router_core.errors import ConfigError, HashingError, SnapshotError, WorkerError, is_a
from router_core.events import (
    DEVICE,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Fault,
    WindowStored,
    refused_store,
    wrong_hash,
)
from router_core.forms import (
    ANYTHING,
    COUNT,
    FLAG,
    SLOT,
    TEXT,
    TIME,
    U64,
    Each,
    Fields,
    Maybe,
    OneOf,
    Row,
    Table,
    Whole,
    brief,
    check_once,
)
from router_core.freshness import Freshness, FreshnessTable
from router_core.index import IndexBound, PrefixIndex
from router_core.learned import MOST_LEARNED, LearnedIndex, RecencyIndex
from router_core.load import ActiveSequences, PotentialLoad
from router_core.lower_tiers import TIERS, LowerTiers
from router_core.policies import PROFILES
from router_core.policy_classes import (
    NO_CLASSES,
    PolicyClasses,
    PolicyTable,
    read_policy_classes,
)
from router_core.reasons import QueueFull
from router_core.registry import WorkerRegistry
from router_core.router_queue import QueueEntry, RouterQueue, Turn
from router_core.routing_view import Profile, RoutingRequest, RoutingView, WhatIf
from router_core.sessions import SessionTable
from router_core.taints import parse_domains
from router_core.topology import PairGroups, RouterPolicy, TransferGroupsCache
from router_core.transfer import TransferClasses, TransferTable
from router_core.worker_sets import slots_of
from router_core.workers import UNKNOWN_BATCHED_TOKENS, Worker, WorkerWithDpRank

SNAPSHOT_SCHEMA = 1
#: Stored blocks after which the size of the whole index is compared with its bound.
_COMPARED_EVERY = 4_096
#: What the index of a rank can be marked as.
_STATES = ("current", "gapped", "over_limit", "absent")

_FORM: Final = Fields(
    {
        "schema": Whole(SNAPSHOT_SCHEMA, SNAPSHOT_SCHEMA),
        "config": Table(ANYTHING),
        "registry": ANYTHING,
        "index": ANYTHING,
        "load": ANYTHING,
        "busy": ANYTHING,
        "rotation": Each(Row(TEXT, OneOf(c.STAGES), COUNT)),
        "freshness": Table(
            Row(OneOf((*_STATES, "estimated")), Maybe(TIME), Maybe(TIME), COUNT, FLAG), SLOT.high
        ),
    },
    {"learns": FLAG, "recovering": Each(SLOT)},
)
"""What `Captured.document` writes, without its parts, which have forms of their own."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A copy of a router's state at one moment; safe to read in another thread."""

    parts: dict[str, Any]
    index: PrefixIndex
    tiers: LowerTiers
    learned: LearnedIndex
    recent: RecencyIndex
    predicted: LearnedIndex

    def document(self) -> dict[str, Any]:
        """The snapshot. Takes seconds for a million cached blocks."""
        return {
            **self.parts,
            "index": self.index.dump(),
            "tiers": self.tiers.dump(),
            "learned": self.learned.dump(),
            "recent": self.recent.dump(),
            "predicted": self.predicted.dump(),
        }


class Router:
    """Routing state of any number of models.

    ``exact_reuse``: cached blocks count as an engine itself reuses them (see `PrefixIndex`).
    Without it they count as in Dynamo, which credits a prompt's last block too and forgets a block
    with the first removal.
    ``learns``: a rank without KV events has an index that is learned from the bookings of this
    router (`LearnedIndex`), and the trust ``estimated``. Without it such a rank is chosen by load.
    Under the policy ``lru`` that index is ``recent`` where the rank declares its blocks.
    ``predicted`` has the bookings of ranks with KV events until these should have arrived, where
    ``router_predicted_ttl_secs`` is set.
    ``policy_classes``: those of the router queue, in place of the settings of the queue.

    Callers may read ``registry``, ``index``, ``load`` and ``busy``; these change only through
    :meth:`apply` (and :meth:`sweep`, which frees memory and forgets what was learned long ago).
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        profile: Profile | None = None,
        *,
        exact_reuse: bool = False,
        learns: bool = False,
        policy_classes: PolicyClasses = NO_CLASSES,
    ) -> None:
        self.config = RouterConfig() if config is None else config
        if not is_a(self.config, RouterConfig):
            kind = type(config).__name__
            raise ConfigError(f"config: expected a RouterConfig or None, got {kind}")
        self._live: RoutingView | None = None
        self.profile = profile
        self.registry = WorkerRegistry()
        self.index = PrefixIndex(exact=exact_reuse)
        self.tiers = LowerTiers()
        self.learns = learns
        self.learned = LearnedIndex()
        self.recent = RecencyIndex()
        self.predicted = LearnedIndex()
        self._learning = (self.learned, self.recent, self.predicted)
        self.sessions = SessionTable()
        self._bound_learned()
        self.load = ActiveSequences()
        self.busy = BusyTracker(self.registry, self.load)
        self.busy.set_default(Thresholds.of_config(self.config))
        self.rotation: dict[tuple[str, Stage], int] = {}
        self.policy_classes = policy_classes
        self.queue = RouterQueue()
        self.freshness = FreshnessTable()
        #: The bound of what the index may hold (:meth:`bound_index`); None: none.
        self.bound: IndexBound | None = None
        self._stored = 0  # blocks since the whole index was compared with its bound
        self._emptied: list[int] = []  # slots whose index is dropped and starts again
        self._draining: list[int] = []
        self._groups = TransferGroupsCache()
        #: The links between topology domains; they count while the config has a transfer weight.
        self.transfer: TransferTable | None = None
        self._classes = TransferClasses()
        self._pairs = PairGroups()

    @property
    def profile(self) -> Profile | None:
        """Filters and scorer in place of those of ``config.router_mode``; None for those.

        Setting it raises ConfigError for another scorer under the name of a built-in mode.
        """
        return self._profile

    @profile.setter
    def profile(self, profile: Profile | None) -> None:
        built_in = PROFILES.get(profile.mode) if profile is not None else None
        if profile is not None and built_in is not None and profile.scorer != built_in.scorer:
            raise ConfigError(
                f"profile: mode {profile.mode!r} has a built-in scorer; give a profile with "
                "another scorer another mode name"
            )
        self._profile = profile
        self._live = None

    def bound_index(self, bound: IndexBound | None) -> None:
        """Bound what the index may hold from now on; None: no longer."""
        self.bound = bound

    # -- reading ---------------------------------------------------------------------------

    def view(
        self,
        config: RouterConfig | None = None,
        what_if: WhatIf | None = None,
        transfer: TransferTable | None = None,
        policy_classes: PolicyClasses | None = None,
    ) -> RoutingView:
        """What decisions read: the live state, or (a dry run) other settings, pretended load,
        another table of links or other policy classes."""
        config = config or self.config
        other = (what_if, transfer, policy_classes)
        if config is self.config and other == (None, None, None):
            live = self._live
            if live is None or live.config is not config or live.registry is not self.registry:
                live = self._live = self._view(config, self.load, self.busy)
            return live
        load, busy = self._load_under(config)
        classes = policy_classes
        if classes is None and config.router_policy_config != self.config.router_policy_config:
            classes = NO_CLASSES
        return self._view(config, load, busy, what_if, transfer, classes)

    def _release(self, slot: int) -> bool:
        """Free the slot of a lost worker as soon as no index has blocks of it; whether it did."""
        if not self.index.is_free(slot) or not all(i.is_free(slot) for i in self._learning):
            return False
        self.registry.release(slot)
        return True

    def _load_under(self, config: RouterConfig) -> tuple[ActiveSequences, BusyTracker]:
        """Load and busy ranks as other settings count them."""
        load, model = self.load, config.router_prefill_load_model
        if load.decaying and model == "none" != self.config.router_prefill_load_model:
            load = load.without_decay()
        thresholds = Thresholds.of_config(config)
        if load is self.load and thresholds == self.busy.default:
            return load, self.busy
        return load, self._busy_under(thresholds, load)

    def stages(
        self, model: str, worker_set: str | None = None, served_name: str | None = None
    ) -> tuple[Stage, ...]:
        """The hops of a request of ``model`` (:func:`planning.stages`)."""
        return planning.stages(self.view(), model, worker_set, served_name)

    def plan(
        self,
        request: RoutingRequest,
        *,
        samples: tuple[float, float] = (0.0, 0.0),
        view: RoutingView | None = None,
        detail: bool = False,
    ) -> RoutingPlan:
        """Decide every hop without booking any (:func:`planning.plan`).

        Where the blocks of the request have another size than those of all its workers, what is
        cached of it is unknown: the decisions have a note, and ``overlap_modelled`` is False.
        Raises HashingError for a number of tokens or a block size out of range, ValueError for
        samples that are not in 0 <= sample < 1.
        """
        view = view or self.view()
        if not (0.0 <= samples[0] < 1.0 and 0.0 <= samples[1] < 1.0):
            raise _no_sample(samples)
        request = _readable(view.registry, request)
        return planning.plan(view, request, samples=samples, detail=detail)

    def plan_hop(
        self,
        request: RoutingRequest,
        stage: Stage,
        *,
        after: Worker | None = None,
        sample: float = 0.0,
        view: RoutingView | None = None,
        detail: bool = False,
    ) -> RoutingPlan:
        """Decide one hop alone (:func:`planning.one_hop`); raises as :meth:`plan`."""
        view = view or self.view()
        if not 0.0 <= sample < 1.0:
            raise _no_sample(sample)
        request = _readable(view.registry, request)
        return planning.one_hop(view, request, stage, after=after, sample=sample, detail=detail)

    def continue_plan(
        self,
        request: RoutingRequest,
        prefill: Decision,
        *,
        sample: float = 0.0,
        view: RoutingView | None = None,
        detail: bool = False,
    ) -> RoutingPlan:
        """Decide the decode hop (again) for a prefill decision (:func:`planning.continue_plan`);
        raises as :meth:`plan`."""
        view = view or self.view()
        if not 0.0 <= sample < 1.0:
            raise _no_sample(sample)
        request = _readable(view.registry, request)
        return planning.continue_plan(view, request, prefill, sample=sample, detail=detail)

    def decode_by_prefill(
        self, request: RoutingRequest, plan: RoutingPlan, *, view: RoutingView | None = None
    ) -> Iterator[RoutingPlan]:
        """The plan for each prefill rank that a tie or the temperature could have chosen."""
        return planning.decode_by_prefill(view or self.view(), request, plan)

    def overlap_scores(self, request: RoutingRequest) -> dict[WorkerWithDpRank, int]:
        """Leading prompt blocks that each rank of the request's model has cached; 0 for none.

        Raises HashingError for a request whose blocks have another size than those of all workers
        of the model: what is cached of it is unknown.
        """
        self._check_block_size(request)
        mask = self.registry.serving(request.model, request.served_name)
        slots = slots_of(mask)
        held = self._cached_blocks(request, slots, mask)
        return {self.registry.ref(slot): blocks for slot, blocks in zip(slots, held, strict=True)}

    def _check_block_size(self, request: RoutingRequest) -> None:
        """Raise HashingError for a request that no worker's cache can be compared with."""
        _check_request(request)
        other = _other_block_size(self.registry, request)
        if other is not None:
            raise HashingError(f"request {request.id}: {other}")

    def _cached_blocks(self, request: RoutingRequest, slots: Sequence[int], mask: int) -> list[int]:
        limit = request.most_reusable
        held = dict(self.index.find_matches(request.sequence_hashes, mask, limit).items())
        learned = learned_blocks(self.view(), request, slots, mask & self.freshness.estimated)
        return [held.get(slot, 0) + more for slot, more in zip(slots, learned, strict=True)]

    def cached_blocks(self, slot: int) -> int:
        """Blocks in a rank's index, or those that it is expected to have where it is learned."""
        if self.freshness.estimated >> slot & 1:
            return self.learned.block_count(slot) + self.recent.block_count(slot)
        return self.index.block_count(slot)

    def potential_loads(self, request: RoutingRequest) -> dict[WorkerWithDpRank, PotentialLoad]:
        """The load that each rank of the request's model would have with the request.

        Only load booked by this router counts. Cached blocks are not computed again, and prompt
        blocks that running requests hold are not counted twice. Raises as :meth:`overlap_scores`.
        """
        self._check_block_size(request)
        mask = self.registry.serving(request.model, request.served_name)
        slots = slots_of(mask)
        shared = dict(self.load.shared_blocks(request.sequence_hashes, mask).items())
        loads = {}
        for slot, cached in zip(slots, self._cached_blocks(request, slots, mask), strict=True):
            new_tokens = request.isl_tokens - cached * request.block_size
            new_blocks = request.prompt_blocks - shared.get(slot, 0)
            loads[self.registry.ref(slot)] = PotentialLoad(
                self.load.prefill_tokens[slot] + max(0, new_tokens),
                self.load.decode_blocks[slot] + new_blocks,
            )
        return loads

    # -- the queue -------------------------------------------------------------------------

    def entering(self, plan: RoutingPlan, request: RoutingRequest) -> c.Enqueued | QueueFull:
        """The change by which a request begins to wait in the queue; QueueFull: it may not."""
        first = plan.first
        queueing = first.queue
        if queueing is None:
            raise ValueError(f"plan {plan.id}: its request does not wait")
        model, name = request.model, queueing.policy_class
        policy = self.policy_classes.table(model, self.config).class_named(name)
        if policy is not None:
            workers = planning.workers_of(self.view(), request, first.stage)
            full = self.queue.full(model, policy, workers, self.config.router_queue_max_requests)
            if full is not None:
                return full
        lane = self.queue.open_lane(model, name, planning.lane_of(request, first.stage))
        return c.Enqueued(
            request.id,
            model,
            name,
            request.isl_tokens,
            request.isl_tokens - queueing.uncached_tokens,
            request.arrived_at,
            request.priority,
            request.strict_priority,
            lane,
        )

    def next_turn(self, model: str, admissible: Callable[[QueueEntry], bool]) -> Turn | None:
        """The waiting request of ``model`` that is next (:meth:`RouterQueue.next`).

        Requests pinned to a rank without room are not tried: there may be one for each worker.
        """
        table = self.policy_classes.table(model, self.config)
        on = self.view().queue is not None

        def passes(entry: QueueEntry) -> bool:
            return not (on and self._pin_is_busy(entry, table)) and admissible(entry)

        return self.queue.next(model, table, passes)

    def _pin_is_busy(self, entry: QueueEntry, table: PolicyTable) -> bool:
        """Whether every rank that a request is pinned to is above the limit of its class."""
        policy = table.class_named(entry.policy_class)
        if entry.lane is None or isinstance(entry.lane, str) or policy is None:
            return False
        worker_id, rank = entry.lane
        slots = self.registry.slots(worker_id)
        if rank is not None:
            slot = self.registry.slot(worker_id, rank)
            slots = () if slot is None else (slot,)
        if not slots:
            return False
        batched = self.registry.worker(slots[0]).runtime_config.max_num_batched_tokens
        limit = policy.limit(batched or UNKNOWN_BATCHED_TOKENS)
        return all(self.load.prefill_tokens[slot] > limit for slot in slots)

    # -- bookings --------------------------------------------------------------------------

    def booking(self, decision: Decision, request: RoutingRequest) -> Booked:
        """The change that gives the request to the decision's winner; `apply` it to book."""
        winner, inputs = decision.winner, decision.inputs
        ref = decision.require() if winner is None else decision.refs[winner]
        parameters = decision.parameters
        tokens = request.isl_tokens
        if winner is not None and inputs is not None:
            tokens -= inputs.cached_tokens(winner, parameters)
        blocks = request.prompt_blocks if parameters.track_active_blocks else 0
        hashes = request.all_hashes if request.more_hashes else request.sequence_hashes
        reuse = parameters.assume_kv_reuse and bool(hashes)
        return Booked(
            request_id=request.id,
            stage=decision.stage,
            worker_id=ref.worker_id,
            dp_rank=ref.dp_rank,
            prefill_tokens=max(0, tokens) if parameters.track_prefill_tokens else 0,
            sequence_hashes=hashes if blocks and reuse else (),
            anonymous_blocks=0 if reuse else blocks,
            predicted_s=None if decision.predicted is None else decision.predicted.seconds,
            prompt_hashes=hashes if self.learns or self._predicts else (),
            session=None if request.session is None else self._binds(request, decision.stage),
            chains=request.chains if blocks and reuse else (),
        )

    def _binds(self, request: RoutingRequest, stage: Stage) -> str | None:
        """The session that the hop binds; as in Dynamo, a pin moves none."""
        session = request.session
        if session is None or self.config.router_session_affinity_ttl_secs is None:
            return None
        return session.key if planning.pin_of(request, stage) is None else None

    # -- changes ---------------------------------------------------------------------------

    def apply(self, change: Change, now: float) -> Applied:
        """Apply one change at time ``now``; a refused change changes nothing."""
        handler = _HANDLERS.get(type(change))
        if handler is None:
            return _invalid("change", "a Change", change)
        return handler(self, change, now)

    def advance(self, now: float) -> None:
        """Let prefill tokens fall whose duration is predicted, to what is left at ``now``.

        Call it before a decision or a reading of the load. It costs nothing where no booking has
        ``predicted_s``, and changes only what follows from the bookings and the time.
        """
        if self.load.decaying:
            changed = self.load.advance(now)
            if self.busy.limits:
                for slot in changed:
                    self.busy.update(slot)

    def sweep(self, max_blocks: int = 2_000, now: float | None = None) -> bool:
        """Remove some cached blocks of lost workers; True while there is more to do.

        A lost worker is excluded from routing at once; this only frees its memory and slot, in
        steps that fit between two turns of an event loop. With ``now`` it also forgets learned
        blocks that are too old; so does each booking, in part.
        """
        more = self.tiers.sweep(max_blocks)
        for index in self._learning:
            more = index.sweep(max_blocks, now) or more
        if now is not None:
            self.sessions.expire(now)
        if not self._draining and not self._emptied:
            return more
        self.index.sweep(max_blocks)
        self._emptied = [slot for slot in self._emptied if not self.index.is_free(slot)]
        self._draining = [slot for slot in self._draining if not self._release(slot)]
        return more or bool(self._draining) or bool(self._emptied)

    # -- snapshot --------------------------------------------------------------------------

    def capture(self) -> Captured:
        """A copy of all state; the slow part, encoding it, is left to ``Captured.document``."""
        return Captured(
            {
                "schema": SNAPSHOT_SCHEMA,
                "config": {
                    name: getattr(self.config, name) for name in self.config.__dataclass_fields__
                },
                "registry": self.registry.dump(),
                "load": self.load.dump(),
                "busy": self.busy.dump(),
                "rotation": [[model, stage, n] for (model, stage), n in self.rotation.items()],
                "freshness": {
                    str(slot): [f.index_state, f.index_at, f.load_at, f.gaps, f.connected]
                    for slot, f in self.freshness.items()
                },
                "recovering": [slot for slot, f in self.freshness.items() if f.recovering],
                "learns": self.learns,
                "sessions": self.sessions.dump(),
                **({"queue": self.queue.dump()} if len(self.queue) or not self.queue.known else {}),
                **({"policy_classes": self.policy_classes.dump()} if self.policy_classes else {}),
                **({} if self.transfer is None else {"transfer": self.transfer.to_dict()}),
            },
            self.index.copy(),
            self.tiers.copy(),
            self.learned.copy(),
            self.recent.copy(),
            self.predicted.copy(),
        )

    def snapshot(self) -> dict[str, Any]:
        """All state as plain data (JSON-able): ``capture().document()``."""
        return self.capture().document()

    @classmethod
    def restore(cls, plain: dict[str, Any], profile: Profile | None = None) -> Router:
        """The router of a :meth:`snapshot`; raises SnapshotError naming what does not fit.

        A snapshot has no profile: pass the one that the router had.
        """
        if not is_a(plain, dict):
            kind = type(plain).__name__
            raise SnapshotError(f"snapshot: expected a mapping, got {kind}")
        if plain.get("schema") != SNAPSHOT_SCHEMA:
            schema = brief(plain.get("schema"))
            raise SnapshotError(f"snapshot schema: {schema}, {SNAPSHOT_SCHEMA} expected")
        _FORM.check(plain, "")
        try:
            return cls._restore_plain(plain, profile)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"snapshot cannot be restored: {error}") from error

    @classmethod
    def _restore_plain(cls, plain: dict[str, Any], profile: Profile | None) -> Router:
        """The router of a snapshot whose values outside of its parts have their form."""
        part = "config"
        try:
            config = RouterConfig().with_values(plain["config"])
            part = "policy_classes"
            classes = plain.get("policy_classes")
            policies = NO_CLASSES if classes is None else read_policy_classes(classes)
            part = "transfer"
            table = plain.get("transfer")
            transfer = None if table is None else TransferTable.from_dict(table)
        except ConfigError as error:
            raise SnapshotError(f"{part}.{str(error)[:400]}") from None
        router = cls(config, profile, learns=plain.get("learns", False), policy_classes=policies)
        router.transfer = transfer
        router.registry = WorkerRegistry.restore(plain["registry"])
        router.index = PrefixIndex.restore(plain["index"])
        # Snapshots of earlier versions have no lower tiers.
        router.tiers = LowerTiers.restore(plain.get("tiers", ()))
        router.learned.load(plain.get("learned", ()))
        router.recent.load(plain.get("recent", ()), "recent")
        router.predicted.load(plain.get("predicted", ()), "predicted")
        router.sessions.load(plain.get("sessions", {}))
        router.load = ActiveSequences.restore(plain["load"], router.registry.capacity)
        router.busy = BusyTracker(router.registry, router.load)
        router.busy.set_default(Thresholds.of_config(router.config))
        router.busy.grow(router.registry.capacity)
        router.busy.load_dump(plain["busy"])
        _check_slots(plain, router.registry)
        check_once((tuple(row[:2]) for row in plain["rotation"]), "rotation", "this hop")
        router.rotation = {(model, stage): n for model, stage, n in plain["rotation"]}
        if "queue" in plain:
            router.queue = RouterQueue.restore(plain["queue"])
        recovering = frozenset(plain.get("recovering", ()))
        for name, row in plain["freshness"].items():
            slot = int(name)
            restored = router.freshness[slot] = Freshness(*row)
            restored.recovering = slot in recovering
            restored.unlinked = router.index.is_doubtful(slot)
            router.freshness.note(slot)
        for worker in router.registry:
            for slot in router.registry.slots(worker.worker_id):
                if slot not in router.freshness:
                    raise SnapshotError(f"freshness.{slot}: missing, a row for each rank expected")
        return router

    # -- inside ----------------------------------------------------------------------------

    def _view(
        self,
        config: RouterConfig,
        load: ActiveSequences,
        busy: BusyTracker,
        what_if: WhatIf | None = None,
        transfer: TransferTable | None = None,
        classes: PolicyClasses | None = None,
    ) -> RoutingView:
        table = (transfer or self.transfer) if config.router_kv_transfer_weight else None
        own = config.router_own_domains
        classes = self.policy_classes if classes is None else classes
        return RoutingView(
            self.registry,
            self.index,
            load,
            busy,
            config,
            self.rotation,
            self._groups,
            {stage: CostParameters.for_stage(config, stage) for stage in c.STAGES},
            RouterPolicy.of_config(config),
            self.profile or PROFILES[config.router_mode],
            what_if,
            self.tiers,
            self.freshness,
            (self.learned, self.recent),
            self.queue if _queues(config, classes) else None,
            classes,
            table,
            None if table is None or own is None else table.place(parse_domains(own)),
            self._classes,
            self._pairs,
            self.predicted,
            None if config.router_session_affinity_ttl_secs is None else self.sessions,
        )

    def _busy_under(self, default: Thresholds, load: ActiveSequences) -> BusyTracker:
        """The busy masks with other default thresholds, or another load. A threshold that differs
        from the present default also replaces what was set for a model; the others stay."""
        tracker = BusyTracker(self.registry, load)
        tracker.set_default(default)
        tracker.grow(self.registry.capacity)
        present, plain = self.busy.default.to_dict(), self.busy.dump()
        other = {name: limit for name, limit in default.to_dict().items() if limit != present[name]}
        own = {model: {**values, **other} for model, values in plain["thresholds"].items()}
        tracker.load_dump({**plain, "thresholds": own})
        return tracker

    def _apply_dequeued(self, change: c.Dequeued, now: float) -> Applied:
        left = self.queue.take(change.request_id, change.credits, change.cursor)
        return OK if left else _not_waiting(change.request_id)

    def _apply_progressed(self, change: c.Progressed, now: float) -> Applied:
        alive = self.load.touch(change.request_id, now)
        return OK if alive else _unknown_request(change.request_id)

    def _availability(self, change: c.WorkerAvailability, now: float) -> Applied:
        if self.registry.get(change.worker_id) is None:
            return _unknown_worker(change.worker_id)
        self.registry.set_available(change.worker_id, change.reason)
        return OK

    def _transfer_table_set(self, change: c.TransferTableSet, now: float) -> Applied:
        if change.table is not None and not is_a(change.table, TransferTable):
            return _invalid("table", "a TransferTable or None", change.table)
        self.transfer = change.table
        self._live = None
        return OK

    def _apply_expired(self, change: c.Expired, now: float) -> Applied:
        busy, slots = self.busy, set()
        if busy.limits or busy.busy_ranks:
            slots = {booking.slot for booking in self.load}
        for request_id, stage in self.load.expire(now, self.config.active_request_expiry_secs):
            self._end_learning(request_id, (stage,), now)
        for slot in slots:
            busy.update(slot)
        return OK

    def _apply_upserted(self, change: c.WorkerUpserted, now: float) -> Applied:
        worker = change.worker
        old, slots = self.registry.get(worker.worker_id), self.registry.slots(worker.worker_id)
        try:
            dropped = self.registry.upsert(worker)
        except WorkerError as error:
            return Applied(False, "invalid", str(error))
        self.load.grow(self.registry.capacity)
        self.busy.grow(self.registry.capacity)
        self._forget(dropped, now)
        # Blocks of another size match no prompt, and those of another model the wrong ones.
        renewed = old is not None and (old.model, old.block_size, old.kv_events) != (
            worker.model,
            worker.block_size,
            worker.kv_events,
        )
        silent = "estimated" if self.learns else "absent"
        for slot in self.registry.slots(worker.worker_id):
            row = self.freshness.setdefault(slot, Freshness("current"))
            if renewed and slot in slots:
                self._empty(slot)
                row.unlinked = False
                row.index_state = "over_limit" if slot in self._emptied else "current"
            if not worker.kv_events:
                row.index_state = silent
            self.freshness.note(slot)
        self.busy.update_all()
        return OK

    def _empty(self, slot: int) -> None:
        """Forget what a rank caches."""
        self.index.clear(slot)
        self.tiers.clear(slot)
        self._clear_learned(slot)

    def _apply_lost(self, change: c.WorkerLost, now: float) -> Applied:
        worker_id = change.worker_id
        slots = self.registry.remove(worker_id)
        if not slots:
            return _unknown_worker(worker_id)
        self._forget(slots, now)
        return OK

    def _forget(self, slots: tuple[int, ...], now: float) -> None:
        for slot in slots:
            for key in self.load.drop_slot(slot):
                self.sessions.end(*key, now)
            self.busy.forget(slot)
            self.freshness.pop(slot, None)
            self.freshness.note(slot)
            self.index.begin_drop(slot)
            self.tiers.clear(slot)
            self._clear_learned(slot)
            self._draining.append(slot)

    def _prefill_done(self, change: c.PrefillDone, now: float) -> Applied:
        busy, changed = self.busy, self.load.prefill_done(change.request_id, now)
        if busy.limits or busy.busy_ranks:
            for slot in changed:
                busy.update(slot)
        known = changed or self.load.touch(change.request_id, now)
        return OK if known else _unknown_request(change.request_id)

    def _apply_freed(self, change: c.Freed, now: float) -> Applied:
        if change.stage is not None and change.stage not in c.STAGES:
            return _invalid("stage", f"one of {', '.join(c.STAGES)} or None", change.stage)
        busy, changed = self.busy, self.load.free(change.request_id, change.stage, now)
        if busy.limits or busy.busy_ranks:
            for slot in changed:
                busy.update(slot)
        stages = c.STAGES if change.stage is None else (change.stage,)
        self._end_learning(change.request_id, stages, now, computed=change.computed)
        return OK if changed else _unknown_request(change.request_id)

    def _kv_event(self, change: c.KvEvent, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        row, event = self.freshness[slot], change.event
        row.index_at = now
        if isinstance(event, Cleared):
            return self._clear_index(slot, row)
        try:
            applied = self._blocks_changed(slot, event)
        except (AttributeError, TypeError):
            problem = wrong_hash(event)
            if problem is None:
                raise
            return Applied(False, Fault.NOT_A_HASH.value, problem)
        if self.index.detached or row.unlinked:
            self._note_unlinked(slot, row)
        if self.bound is not None and applied.ok and not isinstance(event, BlocksRemoved):
            return self._within_bound(slot, len(event.block_hashes), self.bound) or applied
        return applied

    def _clear_index(self, slot: int, row: Freshness) -> Applied:
        self._empty(slot)
        self._note_unlinked(slot, row)
        if row.index_state == "over_limit" and slot not in self._emptied:
            row.index_state = "current"
            self.freshness.note(slot)
        return OK

    def _blocks_changed(
        self, slot: int, event: BlocksStored | WindowStored | BlocksRemoved
    ) -> Applied:
        if event.tier != DEVICE:
            return self._lower_event(slot, event)
        if isinstance(event, BlocksStored):
            stored = self.index.store(
                slot,
                event.parent_hash,
                event.block_hashes,
                event.local_hashes,
                event.group,
                event.counted,
            )
            if stored.waiting:
                return _awaits_parent(event.parent_hash, stored.waiting)
            refused = stored.refused
            return OK if refused is None else Applied(False, refused.code.value, refused.message)
        if isinstance(event, WindowStored):
            refused = self.index.store_window(
                slot, event.group, event.block_hashes, event.needed, event.span
            ).refused
            return OK if refused is None else Applied(False, refused.code.value, refused.message)
        self.index.remove(slot, event.block_hashes, event.group)
        return OK

    def _note_unlinked(self, slot: int, row: Freshness) -> None:
        unlinked = self.index.is_doubtful(slot)
        if unlinked != row.unlinked:
            row.unlinked = unlinked
            self.freshness.note(slot)

    def _lower_event(
        self, slot: int, event: BlocksStored | WindowStored | BlocksRemoved
    ) -> Applied:
        if event.tier not in TIERS:
            return Applied(True, "ignored_tier", f"blocks in tier {event.tier} are not indexed")
        if isinstance(event, WindowStored) or not self.index.is_main(slot, event.group):
            return Applied(True, "ignored_tier", f"group {event.group} is not indexed there")
        problem = wrong_hash(event)
        if problem is None and isinstance(event, BlocksStored):
            outside = not U64.holds_all(event.local_hashes)
            problem = f"local_hashes: expected {U64.expected}" if outside else None
        if problem is not None:
            return Applied(False, Fault.NOT_A_HASH.value, problem)
        if isinstance(event, BlocksRemoved):
            self.tiers.remove(slot, event.tier, event.block_hashes)
            return OK
        names, hashes = event.block_hashes, event.local_hashes
        if len(names) != len(hashes):
            refused = refused_store(Fault.COLUMNS_DIFFER, len(hashes), len(names)).refused
            return Applied(False, Fault.COLUMNS_DIFFER.value, refused.message if refused else "")
        self.tiers.store(slot, event.tier, event.parent_hash, names, hashes)
        return OK

    def _within_bound(self, slot: int, stored: int, bound: IndexBound) -> Applied | None:
        """The refusal of a rank with more blocks than the bound allows, whose index is dropped.

        More blocks than a rank can have mean that its events are wrong or its removals are lost.
        """
        most = bound.of_rank(self.registry.worker(slot).runtime_config.total_kv_blocks)
        if most is not None:
            held = self.index.block_count(slot)
            if held <= most < held + self.index.copy_count(slot):
                self.index.forget_copies(slot)
            if held > most:
                return self._drop_index(slot, f"{held:,} blocks, expected at most {most:,}")
        self._stored += stored
        if bound.total_blocks is None or self._stored < _COMPARED_EVERY:
            return None
        self._stored = 0
        total = self.index.table_size + self.tiers.total_blocks
        if total <= bound.total_blocks:
            return None
        sizes = {rank: self._size(rank) for rank in self.freshness}
        largest = max(sizes, key=sizes.__getitem__)
        why = (
            f"all ranks have {total:,} blocks, expected at most {bound.total_blocks:,}; this one "
            f"has the most, {sizes[largest]:,}"
        )
        dropped = self._drop_index(largest, why)
        return dropped if largest == slot else None

    def _size(self, slot: int) -> int:
        return self.index.block_count(slot) + sum(self.tiers.block_count(slot))

    def _drop_index(self, slot: int, why: str) -> Applied:
        self.index.begin_drop(slot)
        self.tiers.clear(slot)
        self.freshness[slot].unlinked = False
        if slot not in self._emptied:
            self._emptied.append(slot)
        self.freshness[slot].index_state = "over_limit"
        self.freshness.note(slot)
        return Applied(False, "over_limit", why)

    def index_is_empty(self, worker_id: int, dp_rank: int) -> bool:
        """Whether a rank's index that was dropped is free and can be stored again."""
        slot = self.registry.slot(worker_id, dp_rank)
        return slot is not None and slot not in self._emptied

    def _index_marked(self, change: c.IndexMarked, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        if change.state not in _STATES:
            return _invalid("state", f"one of {', '.join(_STATES)}", change.state)
        if change.missing < 0:
            return _invalid("missing", "0 or more batches", change.missing)
        row = self.freshness[slot]
        row.index_at = now
        if change.state == "current" and row.index_state == "over_limit":
            return OK  # what was dropped is missing until the index is cleared and read again
        row.index_state = change.state
        if change.state == "gapped":
            row.gaps += max(1, change.missing)
        self.freshness.note(slot)
        return OK

    def _index_connected(self, change: c.IndexConnected, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        row = self.freshness[slot]
        row.connected = change.connected
        if change.recovering is not None:
            row.recovering = change.recovering
        self.freshness.note(slot)
        return OK

    def _apply_booked(self, change: Booked, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        if change.stage not in c.STAGES:
            return _invalid("stage", f"one of {', '.join(c.STAGES)}", change.stage)
        if change.prefill_tokens < 0:
            return _invalid("prefill_tokens", "0 or more", change.prefill_tokens)
        if change.anonymous_blocks < 0:
            return _invalid("anonymous_blocks", "0 or more", change.anonymous_blocks)
        predicted = change.predicted_s
        if predicted is not None and not 0.0 <= predicted < inf:
            return Applied(False, "invalid", f"predicted_s: expected 0 or more, got {predicted}")
        booked = self.load.book(
            change.request_id,
            change.stage,
            slot,
            prefill_tokens=change.prefill_tokens,
            sequence_hashes=change.sequence_hashes,
            anonymous_blocks=change.anonymous_blocks,
            now=now,
            predicted_s=change.predicted_s,
            chains=change.chains,
        )
        if not booked:
            message = f"request {change.request_id} is already booked on the {change.stage} hop"
            return Applied(False, "duplicate_request", message)
        busy = self.busy
        if not change.replica:
            key = (self.registry.worker(slot).model, change.stage)
            self.rotation[key] = self.rotation.get(key, 0) + 1
        if busy.limits or busy.busy_ranks:
            busy.update(slot)
        if change.prompt_hashes:
            self._learn(slot, change, now)
        if change.session is not None:
            model, ref = self.registry.worker(slot).model, self.registry.ref(slot)
            request_id = change.request_id
            self.sessions.bind(change.session, model, change.stage, ref, request_id, now)
        return OK

    # -- what is learned from bookings -------------------------------------------------------

    @property
    def _predicts(self) -> bool:
        config = self.config
        return config.router_predicted_ttl_secs is not None and config.use_kv_events

    def _learn(self, slot: int, change: Booked, now: float) -> None:
        """Learn a booking where it counts: in place of a rank's events, or until they arrive.

        A decode worker has the prompt after the hand-off. It counts there once the worker computes
        prompts itself.
        """
        blocks, key = change.prompt_hashes, (change.request_id, change.stage)
        estimated = self.freshness.estimated >> slot & 1
        config = self.config
        if self.learns and (estimated or config.router_on_degraded == "approximate"):
            most = self.registry.worker(slot).runtime_config.total_kv_blocks
            index: LearnedIndex = self.learned
            other: LearnedIndex = self.recent
            if config.router_approximate_cache_policy == "lru" and most:
                index, other = self.recent, self.learned
            if other.live >> slot & 1:  # the worker declares its blocks only now
                other.clear(slot)
            index.learn(slot, blocks, now, most, key)
            if estimated:
                self.freshness[slot].index_at = now
        if self._predicts and not estimated:
            self.predicted.learn(slot, blocks, now, key=key)

    def _end_learning(
        self, request_id: str, stages: Sequence[Stage], now: float, *, computed: bool = True
    ) -> None:
        """End what bookings of a request taught, where any booking did."""
        learning = [index for index in self._learning if index.leases]
        if not learning and not self.sessions.running:
            return
        for stage in stages:
            for index in learning:
                index.end((request_id, stage), now, computed=computed)
            self.sessions.end(request_id, stage, now)

    def _clear_learned(self, slot: int) -> None:
        for index in self._learning:
            index.clear(slot)

    def _bound_learned(self) -> None:
        """Apply the settings of what is learned from bookings."""
        config = self.config
        self.sessions.ttl_s = config.router_session_affinity_ttl_secs
        if self.sessions.ttl_s is None:
            self.sessions.clear()
        self.learned.ttl_s = config.router_ttl_secs
        self.predicted.ttl_s = config.router_predicted_ttl_secs or 0.0
        for index in (self.learned, self.recent):
            index.keep = config.router_prune_target_ratio
            index.most = config.router_max_tree_size or MOST_LEARNED
        stops = [] if self._predicts else [self.predicted]
        if config.router_approximate_cache_policy != "lru":
            stops.append(self.recent)
        for index in stops:
            for slot in slots_of(index.live):
                index.clear(slot)

    def _apply_enqueued(self, change: c.Enqueued, now: float) -> Applied:
        table = self.policy_classes.table(change.model, self.config)
        policy = table.class_named(change.policy_class)
        if policy is None:
            return Applied(False, "invalid", f"policy class {change.policy_class} is not known")
        added = self.queue.add(
            change.request_id,
            change.model,
            policy,
            now,
            isl_tokens=change.isl_tokens,
            cached_tokens=change.cached_tokens,
            arrived_at=change.arrived_at,
            priority=change.priority,
            strict_priority=change.strict_priority,
            lane=change.lane,
        )
        if not added:
            message = f"request {change.request_id} waits already"
            return Applied(False, "duplicate_request", message)
        return OK

    def _output_block(self, change: c.OutputBlock, now: float) -> Applied:
        fraction = change.decay_fraction
        if fraction is not None and not 0.0 <= fraction <= 1.0:
            return Applied(False, "invalid", f"decay_fraction: expected 0 to 1, got {fraction}")
        slot = self.load.output_block(change.request_id, fraction, now)
        if slot is None:
            return _unknown_request(change.request_id)
        self.busy.update(slot)
        return OK

    def _load_reported(self, change: c.LoadReported, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        for name in ("active_decode_blocks", "kv_used_blocks", "active_prefill_tokens"):
            value = getattr(change, name)
            if value is not None and not (is_a(value, int) and value >= 0):
                return _invalid(name, "a whole number of at least 0 or None", value)
        self.freshness[slot].load_at = now
        self.busy.report(
            slot,
            now,
            active_decode_blocks=change.active_decode_blocks,
            kv_used_blocks=change.kv_used_blocks,
            active_prefill_tokens=change.active_prefill_tokens,
        )
        return OK

    def _thresholds_set(self, change: c.ThresholdsSet, now: float) -> Applied:
        try:
            self.busy.set_thresholds(change.model, change.values)
        except ConfigError as error:
            return Applied(False, "invalid", str(error))
        return OK

    def _config_set(self, change: c.ConfigSet, now: float) -> Applied:
        try:
            self.config = self.config.with_values(change.values)
        except ConfigError as error:
            return Applied(False, "invalid", str(error))
        self.busy.set_default(Thresholds.of_config(self.config))
        self.busy.update_all()
        self._bound_learned()
        return OK


def _check_slots(plain: Mapping[str, Any], registry: WorkerRegistry) -> None:
    """Raise SnapshotError for what a snapshot has for a slot that no rank has."""
    used = {slot for worker in registry for slot in registry.slots(worker.worker_id)}
    for place, slot in _slots_in_use(plain):
        if slot not in used:
            raise SnapshotError(f"{place}: no rank has slot {slot}")


def _slots_in_use(plain: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Each place of a snapshot that names a slot, and the slot."""
    parts = {part: plain.get(part, ()) for part in ("tiers", "learned", "recent", "predicted")}
    for name, rows in {
        "index.slots": plain["index"]["slots"],
        **parts,
        "load": plain["load"],
    }.items():
        for place, row in enumerate(rows):
            yield f"{name}[{place}].slot", row["slot"]
    for slot in plain["freshness"]:
        yield f"freshness.{slot}", int(slot)
    for slot in plain["busy"]["reported"]:
        yield f"busy.reported.{slot}", int(slot)
    for place, slot in enumerate(plain.get("recovering", ())):
        yield f"recovering[{place}]", slot


def _queues(config: RouterConfig, classes: PolicyClasses) -> bool:
    """Whether requests can wait in the queue; as in Dynamo, only in mode kv."""
    on = config.router_queue_threshold is not None or bool(classes)
    return on and config.router_mode == "kv"


def _invalid(name: str, expected: str, value: object) -> Applied:
    shown = value if isinstance(value, int | float | str) else type(value).__name__
    return Applied(False, "invalid", f"{name}: expected {expected}, got {shown!r}")


def _unknown_worker(worker_id: int) -> Applied:
    return Applied(False, "unknown_worker", f"worker {worker_id} is not registered")


def _awaits_parent(parent: int | None, blocks: int) -> Applied:
    message = f"parent block {parent} is not stored yet; blocks that wait for it: {blocks}"
    return Applied(True, "awaits_parent", message)


def _unknown_request(request_id: str) -> Applied:
    return Applied(False, "unknown_request", f"request {request_id} has no active booking")


def _not_waiting(request_id: str) -> Applied:
    return Applied(False, "unknown_request", f"request {request_id} does not wait")


def _unknown_rank(worker_id: int, dp_rank: int) -> Applied:
    message = f"rank {dp_rank} of worker {worker_id} is not registered"
    return Applied(False, "unknown_worker", message)


def _no_sample(value: object) -> ValueError:
    return ValueError(f"sample: expected at least 0 and below 1, got {value!r}")


def _check_request(request: RoutingRequest) -> None:
    tokens, size = request.isl_tokens, request.block_size
    if not is_a(tokens, int) or tokens < 0:
        raise HashingError(
            f"request {request.id}: isl_tokens is {tokens!r}; expected a whole number of at least 0"
        )
    if not is_a(size, int) or size < 1:
        raise HashingError(
            f"request {request.id}: block size is {size!r}; expected at least 1 token per block"
        )
    hashes = request.sequence_hashes
    if hashes and not is_a(hashes[0], int):
        raise HashingError(
            f"request {request.id}: sequence_hashes[0] is of type {type(hashes[0]).__name__}; "
            "expected unsigned 64-bit numbers"
        )


def _readable(registry: WorkerRegistry, request: RoutingRequest) -> RoutingRequest:
    """The request, without hashes that no worker's cache can be compared with."""
    hashes = request.sequence_hashes
    if (
        request.block_size in registry.block_sizes(request.model)
        and request.isl_tokens.__class__ is int
        and request.isl_tokens >= 0
        and (not hashes or hashes[0].__class__ is int)
    ):
        return request
    _check_request(request)
    other = _other_block_size(registry, request)
    if other is None or not request.overlap_modelled:
        return request
    return replace(
        request,
        sequence_hashes=(),
        local_hashes=(),
        more_hashes=(),
        overlap_modelled=False,
        notes=(*request.notes, f"cached blocks are unknown: {other}"),
    )


def _other_block_size(registry: WorkerRegistry, request: RoutingRequest) -> str | None:
    """The block sizes of a request and of its model's workers, where no worker has the former."""
    sizes = registry.block_sizes(request.model)
    if request.block_size in sizes or not sizes:
        return None
    theirs = ", ".join(map(str, sorted(sizes)))
    return (
        f"the request has blocks of {request.block_size} tokens, the workers of {request.model} "
        f"blocks of {theirs}; hash the prompt with their block size"
    )


#: Change -> what applies it.
_HANDLERS: Final[Mapping[type, Callable[[Router, Any, float], Applied]]] = MappingProxyType(
    {
        c.KvEvent: Router._kv_event,
        c.Booked: Router._apply_booked,
        c.PrefillDone: Router._prefill_done,
        c.Freed: Router._apply_freed,
        c.OutputBlock: Router._output_block,
        c.Enqueued: Router._apply_enqueued,
        c.Dequeued: Router._apply_dequeued,
        c.Progressed: Router._apply_progressed,
        c.LoadReported: Router._load_reported,
        c.WorkerUpserted: Router._apply_upserted,
        c.WorkerLost: Router._apply_lost,
        c.WorkerAvailability: Router._availability,
        c.IndexConnected: Router._index_connected,
        c.IndexMarked: Router._index_marked,
        c.ThresholdsSet: Router._thresholds_set,
        c.ConfigSet: Router._config_set,
        c.TransferTableSet: Router._transfer_table_set,
        c.Expired: Router._apply_expired,
    }
)
