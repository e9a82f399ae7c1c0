"""The router: its state, the one place where changes take effect, and the two-hop plan.

``select`` and ``plan`` read; ``apply`` writes. Nothing here knows the time: callers pass ``now``
in seconds of any one monotonic clock, and ``sample`` where chance is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from router_core import changes as c
from router_core.busy import BusyTracker, Thresholds
from router_core.changes import OK, Applied, Booked, Change, Stage
from router_core.config import RouterConfig
from router_core.decision import Decision, RoutingPlan
from router_core.errors import ConfigError, PolicyUnderivable, SnapshotError, WorkerError
from router_core.events import DEVICE, BlocksRemoved, BlocksStored
from router_core.index import PrefixIndex
from router_core.load import ActiveSequences
from router_core.policies import FILTERS, PROFILES
from router_core.registry import WorkerRegistry
from router_core.selection import (
    Pin,
    RoutingRequest,
    RoutingView,
    SelectionContext,
    WhatIf,
    eligible,
    role_mask,
    select,
)
from router_core.taints import RoutingConstraints
from router_core.topology import Derived, RouterPolicy, TransferGroups, derive
from router_core.workers import Role, Worker

SNAPSHOT_SCHEMA = 1


@dataclass(slots=True)
class Freshness:
    """What is known of one rank's data. Times are those passed to ``apply``; None is never.

    ``index_state``: ``current``, ``gapped`` (batches were lost) or ``absent`` (nobody tells).
    """

    index_state: str = "absent"
    index_at: float | None = None
    load_at: float | None = None
    gaps: int = 0


class Router:
    """Routing state of any number of models.

    ``registry``, ``index``, ``load`` and ``busy`` may be read by anyone; they change only through
    :meth:`apply` (and :meth:`sweep`, which finishes what a lost worker left behind).
    """

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.registry = WorkerRegistry()
        self.index = PrefixIndex()
        self.load = ActiveSequences()
        self.busy = BusyTracker(self.registry, self.load)
        self.busy.default = Thresholds.of(self.config)
        self.rotation: dict[tuple[str, Stage], int] = {}
        self.freshness: dict[int, Freshness] = {}
        self._draining: list[int] = []
        self._groups: tuple[int, RouterPolicy | None, TransferGroups] | None = None

    # -- reading ---------------------------------------------------------------------------

    def view(
        self, config: RouterConfig | None = None, what_if: WhatIf | None = None
    ) -> RoutingView:
        """What decisions read: live, or with other settings or pretended load (a dry run)."""
        config = config or self.config
        busy = self.busy
        if config is not self.config and Thresholds.of(config) != self.busy.default:
            busy = self._busy_under(Thresholds.of(config))
        return RoutingView(
            self.registry, self.index, self.load, busy, config, self.rotation, what_if
        )

    def stages(self, model: str) -> tuple[Stage, ...]:
        """The hops that a request of ``model`` takes now: prefill and decode, or aggregated."""
        reachable = ~self.registry.unavailable
        prefill = role_mask(self.registry, model, Role.PREFILL) & reachable
        decode = role_mask(self.registry, model, Role.DECODE)
        if prefill and decode:
            return ("prefill", "decode")
        if prefill and not role_mask(self.registry, model, Role.AGGREGATED):
            return ("prefill", "decode")
        return ("aggregated",)

    def plan(
        self,
        request: RoutingRequest,
        *,
        samples: tuple[float, float] = (0.0, 0.0),
        view: RoutingView | None = None,
        detail: bool = False,
    ) -> RoutingPlan:
        """Decide every hop of a request without booking any.

        ``required`` is checked here, before anything is dispatched: a plan that cannot place the
        decode hop is a refusal although its prefill hop has a winner.
        """
        view = view or self.view()
        if self.stages(request.model) == ("aggregated",):
            decision = self._select(view, request, "aggregated", sample=samples[0], detail=detail)
            return RoutingPlan(request.id, request.model, None, self._explained(decision, request))
        prefill = self._select_prefill(view, request, samples[0], detail)
        return self.continue_plan(request, prefill, sample=samples[1], view=view, detail=detail)

    def continue_plan(
        self,
        request: RoutingRequest,
        prefill: Decision,
        *,
        sample: float = 0.0,
        view: RoutingView | None = None,
        detail: bool = False,
    ) -> RoutingPlan:
        """The plan that follows from a prefill decision; decides the decode hop again.

        Also what `serve` calls between the hops, when prefill is done and the fleet may have
        changed.
        """
        view = view or self.view()
        plan = RoutingPlan(request.id, request.model, prefill, None)
        if prefill.winner is None:
            return plan
        try:
            derived = self._derive(view, request.model, prefill.worker)
        except PolicyUnderivable as error:
            refused = replace(
                prefill, outcome="policy_underivable", winner=None, message=str(error)
            )
            return replace(plan, prefill=refused)
        merged = request.constraints.merged(derived.constraints)
        decode = self._select(
            view, request, "decode", constraints=merged, sample=sample, detail=detail
        )
        relaxed = False
        if decode.outcome == "no_eligible_worker" and derived.relaxable:
            wanted = ", ".join(item.taint for item in derived.constraints)
            free = self._select(view, request, "decode", sample=sample, detail=detail)
            note = f"no decode worker satisfies {wanted}; the fallback policy crosses the domain"
            if free.winner is not None:
                decode, relaxed = replace(free, notes=(*free.notes, note)), True
        decode = self._explained(decode, request)
        return replace(plan, decode=decode, implied=derived.constraints, relaxed=relaxed)

    def decode_by_prefill(
        self, request: RoutingRequest, plan: RoutingPlan, *, view: RoutingView | None = None
    ) -> Iterator[RoutingPlan]:
        """The plan for each prefill rank that could have been chosen: tied, or any above T = 0."""
        prefill = plan.prefill
        if prefill is None or prefill.winner is None:
            return
        positions = prefill.tied
        if prefill.temperature > 0:
            positions = tuple(i for i, p in enumerate(prefill.probabilities()) if p > 0)
        for position in positions:
            chosen = replace(prefill, winner=position)
            yield self.continue_plan(request, chosen, view=view)

    # -- bookings --------------------------------------------------------------------------

    def booking(self, decision: Decision, request: RoutingRequest) -> Booked:
        """The change that gives the request to the decision's winner; apply it to book."""
        ref = decision.require()
        parameters = decision.parameters
        tokens = request.isl_tokens - decision.cached_tokens
        blocks = request.prompt_blocks if parameters.track_active_blocks else 0
        reuse = parameters.assume_kv_reuse and bool(request.sequence_hashes)
        return Booked(
            request_id=request.id,
            stage=decision.stage,
            worker_id=ref.worker_id,
            dp_rank=ref.dp_rank,
            prefill_tokens=max(0, tokens) if parameters.track_prefill_tokens else 0,
            sequence_hashes=request.sequence_hashes if blocks and reuse else (),
            anonymous_blocks=0 if reuse else blocks,
        )

    # -- changes ---------------------------------------------------------------------------

    def apply(self, change: Change, now: float) -> Applied:
        """Take one change at time ``now``; a change that cannot be taken changes nothing."""
        match change:
            case c.KvEvent():
                return self._kv_event(change, now)
            case c.Booked():
                return self._booked(change, now)
            case c.PrefillDone():
                for slot in self.load.prefill_done(change.request_id, now):
                    self.busy.update(slot)
                return OK
            case c.Freed():
                for slot in self.load.free(change.request_id, change.stage):
                    self.busy.update(slot)
                return OK
            case c.OutputBlock():
                return self._output_block(change, now)
            case c.Progressed():
                alive = self.load.touch(change.request_id, now)
                return OK if alive else _unknown_request(change.request_id)
            case c.LoadReported():
                return self._load_reported(change, now)
            case c.WorkerUpserted():
                return self._upsert(change.worker)
            case c.WorkerLost():
                return self._lose(change.worker_id)
            case c.WorkerAvailability():
                if self.registry.get(change.worker_id) is None:
                    return _unknown_worker(change.worker_id)
                self.registry.set_available(change.worker_id, change.reason)
                return OK
            case c.IndexMarked():
                return self._index_marked(change, now)
            case c.ThresholdsSet():
                return self._thresholds_set(change)
            case c.ConfigSet():
                return self._config_set(change)
            case c.Expired():
                slots = {b.slot for b in self.load}
                self.load.expire(now, self.config.active_request_expiry_secs)
                for slot in slots:
                    self.busy.update(slot)
                return OK

    def sweep(self, max_blocks: int = 2_000) -> bool:
        """Forget some of what lost workers had cached; True while there is more to do.

        A lost worker is no candidate from the moment it is lost; this only frees memory and slot,
        in slices that fit between two turns of an event loop.
        """
        if not self._draining:
            return False
        self.index.sweep(max_blocks)
        left = []
        for slot in self._draining:
            if self.index.is_free(slot):
                self.registry.release(slot)
            else:
                left.append(slot)
        self._draining = left
        return bool(left)

    # -- snapshot --------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All state as plain data (JSON-able). Finishes pending sweeps first."""
        while self.sweep(100_000):
            pass
        return {
            "schema": SNAPSHOT_SCHEMA,
            "config": {
                name: getattr(self.config, name) for name in self.config.__dataclass_fields__
            },
            "registry": self.registry.dump(),
            "index": self.index.dump(),
            "load": self.load.dump(),
            "busy": self.busy.dump(),
            "rotation": [[model, stage, n] for (model, stage), n in self.rotation.items()],
            "freshness": {
                str(slot): [f.index_state, f.index_at, f.load_at, f.gaps]
                for slot, f in self.freshness.items()
            },
        }

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> Router:
        """The inverse of :meth:`snapshot`; raises SnapshotError naming what does not fit."""
        if plain.get("schema") != SNAPSHOT_SCHEMA:
            raise SnapshotError(
                f"snapshot schema: expected {SNAPSHOT_SCHEMA}, got {plain.get('schema')!r}"
            )
        try:
            router = cls(RouterConfig().with_values(plain["config"]))
            router.registry = WorkerRegistry.restore(plain["registry"])
            router.index = PrefixIndex.restore(plain["index"])
            router.load = ActiveSequences.restore(plain["load"], router.registry.capacity)
            router.busy = BusyTracker(router.registry, router.load)
            router.busy.default = Thresholds.of(router.config)
            router.busy.grow(router.registry.capacity)
            router.busy.load_dump(plain["busy"])
            router.rotation = {(model, stage): n for model, stage, n in plain["rotation"]}
            router.freshness = {int(k): Freshness(*v) for k, v in plain["freshness"].items()}
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise SnapshotError(f"snapshot cannot be restored: {error!r}") from error
        return router

    # -- inside: deciding ------------------------------------------------------------------

    def _select(
        self,
        view: RoutingView,
        request: RoutingRequest,
        stage: Stage,
        *,
        constraints: RoutingConstraints | None = None,
        sample: float,
        detail: bool,
        capacity_mask: int | None = None,
    ) -> Decision:
        context = self._context(view, request, stage, constraints, capacity_mask)
        return select(
            view, context, PROFILES[view.config.router_mode], sample=sample, detail=detail
        )

    def _context(
        self,
        view: RoutingView,
        request: RoutingRequest,
        stage: Stage,
        constraints: RoutingConstraints | None = None,
        capacity_mask: int | None = None,
    ) -> SelectionContext:
        registry = view.registry
        pin: Pin | None
        if stage == "prefill":
            roles, pin = registry.role(Role.PREFILL), request.pin_prefill
        elif stage == "decode":
            roles, pin = registry.role(Role.DECODE), request.pin_decode
        else:
            alone = registry.role(Role.DECODE) & registry.can_prefill
            roles = registry.role(Role.AGGREGATED) | alone
            pin = request.pin_decode or request.pin_prefill
        policy = RouterPolicy.of(view.config)
        required = stage == "prefill" and policy is not None and policy.enforcement == "required"
        return SelectionContext(
            request=request,
            stage=stage,
            role_mask=roles,
            constraints=request.constraints if constraints is None else constraints,
            pin=pin,
            capacity_mask=capacity_mask,
            domain=policy.domain if required and policy is not None else None,
        )

    def _select_prefill(
        self, view: RoutingView, request: RoutingRequest, sample: float, detail: bool
    ) -> Decision:
        capacity, crossing = self._capacity(view, request)
        decision = self._select(
            view, request, "prefill", sample=sample, detail=detail, capacity_mask=capacity
        )
        emptied = decision.emptied_by()
        if emptied is None or emptied.filter != "decode_capacity":
            return self._explained(decision, request)
        if crossing:
            # fallback: nobody has capacity in the domain, so its workers may cross it.
            free = self._select(
                view, request, "prefill", sample=sample, detail=detail, capacity_mask=crossing
            )
            skipped = "no domain has an eligible decode worker; the fallback policy may cross"
            funnel = tuple(
                replace(step, skipped=skipped) if step.filter == "decode_capacity" else step
                for step in free.funnel
            )
            return self._explained(replace(free, funnel=funnel), request)
        if self._only_busy(view, request):
            decision = replace(decision, outcome="all_busy")
        return self._explained(decision, request)

    def _capacity(self, view: RoutingView, request: RoutingRequest) -> tuple[int | None, int]:
        """Prefill slots that the decode-capacity guard admits, and those that may cross.

        None where the guard is off or no hard policy is in force: then routing is exactly what it
        is without topology.
        """
        if not view.config.decode_capacity_guard:
            return None, 0
        groups = self._transfer_groups(view)
        if not groups.groups and not groups.underivable:
            return None, 0
        decode = eligible(view, self._context(view, request, "decode"), FILTERS)
        mask = groups.free
        crossing = 0
        for group in groups.groups:
            if view.registry.taint(group.taint) & decode:
                mask |= group.mask
            elif group.relaxable and decode:
                crossing |= group.mask
        return mask, crossing

    def _only_busy(self, view: RoutingView, request: RoutingRequest) -> bool:
        """Whether some transfer domain would have a decode worker if none was busy."""
        filters = tuple(one for one in FILTERS if one.name != "busy")
        decode = eligible(view, self._context(view, request, "decode"), filters)
        groups = self._transfer_groups(view).groups
        return any(view.registry.taint(group.taint) & decode for group in groups)

    def _transfer_groups(self, view: RoutingView) -> TransferGroups:
        policy = RouterPolicy.of(view.config)
        known = self._groups
        if known is None or known[0] != self.registry.version or known[1] != policy:
            groups = TransferGroups.of(self.registry, policy)
            known = self._groups = (self.registry.version, policy, groups)
        return known[2]

    def _derive(self, view: RoutingView, model: str, worker: Worker | None) -> Derived:
        siblings = (w for w in self.registry if w.model == model and w.role is Role.PREFILL)
        return derive(worker, siblings, RouterPolicy.of(view.config))

    def _explained(self, decision: Decision, request: RoutingRequest) -> Decision:
        """Messages for refusals whose reason is a role that is not there at all."""
        if decision.winner is not None or decision.message:
            return decision
        message = self._missing_role(decision, request)
        return decision if message is None else replace(decision, message=message)

    def _missing_role(self, decision: Decision, request: RoutingRequest) -> str | None:
        model = request.model
        if not self.registry.model(model):
            return f"no worker is registered for model {model!r}"
        roles = {worker.role for worker in self.registry if worker.model == model}
        if decision.stage != "aggregated":
            missing = Role.DECODE not in roles
            return f"no decode worker is registered for model {model!r}" if missing else None
        last = decision.emptied_by()
        if Role.DECODE not in roles or last is None or last.filter != "role":
            return None
        gone = "answers" if Role.PREFILL in roles else "is registered"
        return f"no prefill worker of {model!r} {gone}, and its decode workers cannot prefill"

    def _busy_under(self, default: Thresholds) -> BusyTracker:
        """The busy masks under other default thresholds, beside the live ones."""
        tracker = BusyTracker(self.registry, self.load)
        tracker.default = default
        tracker.grow(self.registry.capacity)
        tracker.load_dump({**self.busy.dump(), "thresholds": {}})
        return tracker

    # -- inside: changing ------------------------------------------------------------------

    def _upsert(self, worker: Worker) -> Applied:
        try:
            dropped = self.registry.upsert(worker)
        except WorkerError as error:
            return Applied(False, "invalid", str(error))
        self.load.grow(self.registry.capacity)
        self.busy.grow(self.registry.capacity)
        self._forget(dropped)
        for slot in self.registry.slots(worker.worker_id):
            self.freshness.setdefault(slot, Freshness("current" if worker.kv_events else "absent"))
        self.busy.update_all()
        return OK

    def _lose(self, worker_id: int) -> Applied:
        slots = self.registry.slots(worker_id)
        if not slots:
            return _unknown_worker(worker_id)
        for slot in slots:
            self.load.drop_slot(slot)
        self._forget(self.registry.remove(worker_id))
        return OK

    def _forget(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self.load.drop_slot(slot)
            self.busy.forget(slot)
            self.freshness.pop(slot, None)
            self.index.begin_drop(slot)
            self._draining.append(slot)

    def _kv_event(self, change: c.KvEvent, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        self.freshness[slot].index_at = now
        event = change.event
        if isinstance(event, BlocksStored):
            if event.tier != DEVICE:
                return Applied(True, "ignored_tier", f"blocks in tier {event.tier} are not indexed")
            refused = self.index.store(
                slot, event.parent_hash, event.block_hashes, event.local_hashes
            ).refused
            return OK if refused is None else Applied(False, refused.code.value, refused.message)
        if isinstance(event, BlocksRemoved):
            if event.tier == DEVICE:
                self.index.remove(slot, event.block_hashes)
            return OK
        self.index.clear(slot)
        return OK

    def _index_marked(self, change: c.IndexMarked, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        row = self.freshness[slot]
        row.index_state = change.state
        row.index_at = now
        if change.state == "gapped":
            row.gaps += max(1, change.missing)
        return OK

    def _booked(self, change: Booked, now: float) -> Applied:
        slot = self.registry.slot(change.worker_id, change.dp_rank)
        if slot is None:
            return _unknown_rank(change.worker_id, change.dp_rank)
        taken = self.load.book(
            change.request_id,
            change.stage,
            slot,
            prefill_tokens=change.prefill_tokens,
            sequence_hashes=change.sequence_hashes,
            anonymous_blocks=change.anonymous_blocks,
            now=now,
        )
        if not taken:
            message = f"request {change.request_id} is booked on the {change.stage} hop already"
            return Applied(False, "duplicate_request", message)
        key = (self.registry.worker(slot).model, change.stage)
        self.rotation[key] = self.rotation.get(key, 0) + 1
        self.busy.update(slot)
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
        self.freshness[slot].load_at = now
        self.busy.report(
            slot,
            now,
            active_decode_blocks=change.active_decode_blocks,
            kv_used_blocks=change.kv_used_blocks,
            active_prefill_tokens=change.active_prefill_tokens,
        )
        return OK

    def _thresholds_set(self, change: c.ThresholdsSet) -> Applied:
        try:
            self.busy.set_thresholds(change.model, change.values)
        except ConfigError as error:
            return Applied(False, "invalid", str(error))
        return OK

    def _config_set(self, change: c.ConfigSet) -> Applied:
        try:
            self.config = self.config.with_values(change.values)
        except ConfigError as error:
            return Applied(False, "invalid", str(error))
        self.busy.default = Thresholds.of(self.config)
        self.busy.update_all()
        return OK


def _unknown_worker(worker_id: int) -> Applied:
    return Applied(False, "unknown_worker", f"no worker {worker_id} is registered")


def _unknown_request(request_id: str) -> Applied:
    return Applied(False, "unknown_request", f"no active request {request_id}")


def _unknown_rank(worker_id: int, dp_rank: int) -> Applied:
    message = f"no worker {worker_id} with rank {dp_rank} is registered"
    return Applied(False, "unknown_worker", message)
