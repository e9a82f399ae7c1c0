"""Conditions and health of a routing service: problems of its fleet, and whether it is ready.

What a condition is: :mod:`dynctl.health.conditions`; what follows from the state of a fleet:
:mod:`dynctl.health.evaluation`. This sets and ends them as the fleet changes.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Protocol

from dynctl.base.tasks import SLICE, drained, in_turns
from dynctl.documents.doubts import Doubt, Varies, doubt, some_names
from dynctl.documents.fleet_load import Condition
from dynctl.documents.workers import WorkerRow
from dynctl.health import conditions as codes
from dynctl.health.conditions import INCIDENT_S, INCIDENTS, Conditions
from dynctl.health.evaluation import DERIVED_CODES, FleetHealth, FleetState, evaluation
from dynctl.serving.routing.served_models import ServedModels
from dynctl.serving.telemetry.observers import Observers
from dynctl.tokenization.errors import OverLimit
from router_core import (
    ConfigError,
    ConfigSet,
    IndexConnected,
    Role,
    Router,
    RouterPolicy,
    ThresholdsSet,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
    policy_conflict,
    slots_of,
)

#: The name of the service, which the lines of conditions have in logs.
#: Conditions whose doubt always matters: about the load, or the hashes of the prompt itself.
_ALWAYS: Final = frozenset(
    {codes.LOAD_OVERDUE, codes.TOKENIZER_DIFFERS, codes.ENGINE_TOKENIZERS_DIFFER}
)

_log = logging.getLogger("dynctl.serving.routing.service")

#: Seconds that an evaluation may be shown again while nothing changes.
HEALTH_AGE_S: Final = 0.5
#: In a larger fleet, at most so many workers are evaluated per second.
_MANY_WORKERS: Final = 256
_WORKERS_A_SECOND: Final = 1000
#: Evaluations in slices, where the fleet changes during each, before one is taken as it is.
_TRIES: Final = 3
#: Conditions of the evaluation whose subject is a worker, which may have left since.
_OF_WORKERS: Final = (codes.INDEX_OVER_LIMIT, codes.LOAD_OVERDUE, codes.STREAM_DISCONNECTED)
_MOST_DOUBTS: Final = 16
#: Bookings, events and load reports change too often; an evaluation reads them at its next time.
CHANGES_OF_HEALTH: Final = (
    ConfigSet,
    IndexConnected,
    ThresholdsSet,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)


class _Sharing(Protocol):
    def out_of_date(self) -> str: ...


class Evaluated(Protocol):
    """The service whose fleet is evaluated (`RoutingService`)."""

    observers: Observers
    rows: Callable[[], Iterable[WorkerRow]]
    probe_s: Callable[[], float]
    draining: bool
    serves_pools: bool
    started_at: float

    @property
    def router(self) -> Router: ...

    @property
    def sharing(self) -> _Sharing | None: ...

    def clock(self) -> float: ...

    def wall(self) -> float: ...

    @property
    def served(self) -> ServedModels: ...


class ServiceHealth:
    """The conditions of a service, and the last evaluation of its fleet."""

    def __init__(self, service: Evaluated) -> None:
        self._service = service
        self.conditions = Conditions(service.wall)
        #: Workers whose block size differs from the other workers' of their model.
        self.mismatched: set[str] = set()
        self._evaluated: tuple[float, FleetHealth] | None = None
        #: When :meth:`refresh` last returned an evaluation.
        self._refreshed_at = -math.inf
        #: Changes that an evaluation must show, and how many the last one does.
        self._changes = self._shown = 0
        self._evaluating = asyncio.Lock()

    def changed(self) -> None:
        """The next evaluation must show a change."""
        self._changes += 1

    # -- conditions ------------------------------------------------------------------------

    def set_condition(self, code: str, subject: str, message: str) -> None:
        """Report a condition; observers are notified when it is new or changed."""
        changed = self.conditions.set(code, subject, message)
        if changed is not None:
            self._changes += 1
            if self.conditions.may_log(code, subject):
                _log.warning("%s %s: %s", code, subject, message)
            self._service.observers.condition(changed, False)

    def clear_condition(self, code: str, subject: str) -> None:
        """End a condition; observers are notified if it was in force."""
        over = self.conditions.clear(code, subject)
        if over is not None:
            self._changes += 1
            if self.conditions.may_log(code, subject):
                _log.info("%s %s: over", code, subject)
            self._service.observers.condition(over, True)

    def _hold(self, code: str, subject: str, message: str | None) -> None:
        if message is None:
            self.clear_condition(code, subject)
        else:
            self.set_condition(code, subject, message)

    def task_failed(self, name: str, message: str) -> None:
        """A background task of the service failed."""
        message = f"internal error, the task restarts by itself; see the log: {message}"
        self.set_condition(codes.BACKGROUND_TASK_FAILED, name, message)

    def task_recovered(self, name: str) -> None:
        """A background task that had failed works again."""
        self.clear_condition(codes.BACKGROUND_TASK_FAILED, name)

    def model_file_over_limit(self, model: str, over_limit: OverLimit) -> None:
        """A request was refused because the work of a model's file exceeded a limit."""
        known = self.conditions.get(codes.MODEL_FILE_OVER_LIMIT, model)
        count = 1 if known is None else known.count + 1
        requests = "1 request is" if count == 1 else f"{count:,} requests are"
        last = datetime.fromtimestamp(self._service.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        message = f"{over_limit.file}: {over_limit.limit}; {requests} refused, the last at {last}"
        self.set_condition(codes.MODEL_FILE_OVER_LIMIT, model, message)

    def fleet_changed(self, changed: Iterable[Worker], mismatched: dict[str, str]) -> None:
        """Update the conditions that depend on the registered workers. ``changed``: those that
        joined or changed; all after a change of the settings. ``mismatched``: worker name -> why
        its cache cannot be matched."""
        try:
            policy = RouterPolicy.of_config(self._service.router.config)
        except ConfigError:
            policy = None
        for worker in changed:
            self._hold(codes.POLICY_CONFLICT, worker.name, policy_conflict(worker, policy))
            self._hold(codes.CAPACITY_UNKNOWN, worker.name, self._by_time(worker))
        self._hold_levels(policy)
        self._hold_mismatches(mismatched)

    def _hold_mismatches(self, mismatched: dict[str, str]) -> None:
        # An engine's event stream reports this code too; only conditions set here are cleared here.
        for name in self.mismatched - set(mismatched):
            self.clear_condition(codes.BLOCK_SIZE_MISMATCH, name)
        for name, message in mismatched.items():
            self.set_condition(codes.BLOCK_SIZE_MISMATCH, name, message)
        self.mismatched = set(mismatched)

    @property
    def _distance_costs(self) -> bool:
        return bool(self._service.router.config.router_kv_transfer_weight)

    def _hold_levels(self, policy: RouterPolicy | None) -> None:
        """A condition for each level, of the table of links or of the router's policy, that no
        worker publishes, or that some prefill or decode workers do not publish."""
        registry = self._service.router.registry
        bound, others = self._models_of_policies() if policy is not None else (set(), set())
        for level, (named, effect, some) in self._effects_of_levels(policy).items():
            of_policy = policy is not None and level == policy.domain
            models = bound if of_policy else registry.models()
            unused = None
            if models and registry.with_domain(level):
                # Where prefill workers of a model have two policies, the effect is not known.
                missing = self._without_level(level, bound - others if of_policy else models)
                unused = missing and f"{missing} do not publish the domain {level}, {named}: {some}"
            elif models:
                known = sorted({domain for worker in registry for domain in worker.domains})
                published = f"; published: {', '.join(known)}" if known else ""
                unused = f"no worker publishes the domain {level}, {named}: {effect}{published}"
            self._hold(codes.LEVEL_NOT_PUBLISHED, level, unused)

    def _effects_of_levels(self, policy: RouterPolicy | None) -> dict[str, tuple[str, str, str]]:
        """Level -> where it is set, the effect where no worker publishes it, and the effect on
        those that do not where others do."""
        effects: dict[str, tuple[str, str, str]] = {}
        table = self._service.router.transfer
        for level in () if table is None or not self._distance_costs else table.names:
            effect = "KV transfers count as those of a wider level"
            effects[level] = ("a level of --router-kv-transfer-qos", effect, f"their {effect}")
        if policy is not None:
            effect, some = "the policy has no effect", "they are in none of its domains"
            if policy.enforcement == "required":
                effect = "every request with a prefill hop is refused"
                some = "they get no request with a prefill hop"
            effects[policy.domain] = ("that of --router-kv-transfer-topology-level", effect, some)
        return effects

    def _models_of_policies(self) -> tuple[set[str], set[str]]:
        """The models with prefill workers that have the router's policy, and with those that have
        one of their own."""
        bound: set[str] = set()
        own: set[str] = set()
        for worker in self._service.router.registry:
            if worker.role is Role.PREFILL:
                has_one = worker.runtime_config.kv_transfer_domain is not None
                (own if has_one else bound).add(worker.model)
        return bound, own

    def _without_level(self, level: str, models: Iterable[str]) -> str | None:
        """The prefill and decode workers of the models that do not publish a level, with their
        number; None where all publish it."""
        registry = self._service.router.registry
        slots = 0
        for model in models:
            slots |= registry.model(model)
        slots &= registry.roles_for("prefill") | registry.roles_for("decode")
        missing = slots & ~registry.with_domain(level)
        if not missing:
            return None
        names = sorted({registry.worker(slot).name for slot in slots_of(missing)})
        total = len({registry.ref(slot).worker_id for slot in slots_of(slots)})
        return f"{len(names):,} of {total:,} prefill and decode workers ({some_names(names)})"

    def _by_time(self, worker: Worker) -> str | None:
        """Why the policy lru does not apply to the worker; None where it does, or is not set."""
        lru = self._service.router.config.router_approximate_cache_policy == "lru"
        if not lru or worker.kv_events or worker.runtime_config.total_kv_blocks:
            return None
        return (
            f"worker {worker.name} declares no KV blocks, so its cache is estimated by time (ttl), "
            "not by the policy lru"
        )

    # -- health ----------------------------------------------------------------------------

    def evaluate(self, max_age_s: float = 0.0) -> FleetHealth:
        """Evaluate the fleet, and set and end the conditions that follow.

        An evaluation that is at most ``max_age_s`` old is returned again, unless a worker, a
        stream, a threshold or a condition changed. That of a large fleet takes long, so it is
        returned for longer, whatever changed; also what :meth:`refresh` returned a moment ago.
        """
        known = self._last_evaluation(max_age_s, self._refreshed_at)
        return known or self._conclude(
            self._service.clock(), drained(self._evaluation()), self._changes
        )

    async def refresh(self, max_age_s: float = 0.0) -> FleetHealth:
        """As :meth:`evaluate`, but a large fleet is evaluated in several turns of the event loop: a
        handler awaits this, then reads :meth:`evaluate`.

        Where the fleet changes during each of some evaluations, the last one is of the moment when
        it began, and the next call evaluates again.
        """
        if len(self._service.router.registry) <= _MANY_WORKERS:
            return self.evaluate(max_age_s)
        async with self._evaluating:
            health = self._last_evaluation(max_age_s) or await self._evaluate_in_turns(max_age_s)
        self._refreshed_at = self._service.clock()
        return health

    async def _evaluate_in_turns(self, max_age_s: float) -> FleetHealth:
        service, tries = self._service, 0
        while True:
            began, draining, changes = service.clock(), service.draining, self._changes
            health = await in_turns(self._evaluation())
            tries += 1
            if draining == service.draining and (changes == self._changes or tries >= _TRIES):
                return self._conclude(began, health, changes)
            known = self._last_evaluation(max_age_s)
            if known is not None:
                return known

    def _last_evaluation(
        self, max_age_s: float, refreshed_at: float = -math.inf
    ) -> FleetHealth | None:
        """The last evaluation, where it may be shown again. That of a large fleet may be for a
        while after it was made, or after ``refreshed_at``."""
        now, workers = self._service.clock(), len(self._service.router.registry)
        if self._evaluated is not None:
            at, last = self._evaluated
            least_s = workers / _WORKERS_A_SECOND if workers > _MANY_WORKERS else 0.0
            outdated = self._shown != self._changes
            recent = now - max(at, refreshed_at) < least_s
            reusable = recent or (now - at <= max_age_s and not outdated)
            if reusable and (last.status == "draining") == self._service.draining:
                return last
        return None

    def _evaluation(self) -> Generator[None, None, FleetHealth]:
        """Evaluate the fleet in steps; what changes is read in the first one."""
        config = self._service.router.config
        reported = [
            condition
            for condition in self.conditions
            if condition.code not in DERIVED_CODES and not self._is_over(condition)
        ]
        state = FleetState(
            (),
            reported,
            {name: getattr(config, name) for name in config.__dataclass_fields__},
            self._service.probe_s(),
            self._service.clock() - self._service.started_at,
            self._service.draining,
            self._service.serves_pools,
        )
        rows: list[WorkerRow] = []
        for row in self._service.rows():
            if not len(rows) % SLICE:
                yield
            rows.append(row)
        yield
        return (yield from evaluation(replace(state, workers=rows)))

    def _is_over(self, condition: Condition) -> bool:
        """Whether an incident was reported long ago."""
        return condition.code in INCIDENTS and self._service.wall() - condition.seen > INCIDENT_S

    def _conclude(self, now: float, health: FleetHealth, changes: int) -> FleetHealth:
        """Set and end the conditions that follow from an evaluation of the fleet as it was after so
        many ``changes``."""
        current = changes == self._changes
        for old in self.conditions:
            if self._is_over(old):
                self.clear_condition(old.code, old.subject)
        self._hold_mismatches(self._service.served.mismatches())
        messages = {
            (condition.code, condition.subject): condition.message
            for condition in health.derived
            if current or not self._has_left(condition.code, condition.subject)
        }
        for old in self.conditions:
            if old.code in DERIVED_CODES and (old.code, old.subject) not in messages:
                self.clear_condition(old.code, old.subject)
        for (code, subject), message in messages.items():
            self.set_condition(code, subject, message)
        self._evaluated, self._shown = (now, health), self._changes if current else -1
        return health

    def _has_left(self, code: str, subject: str) -> bool:
        """Whether the subject of a condition is a worker that is not registered."""
        worker = code in _OF_WORKERS and subject != "fleet"  # of which there may be more
        return worker and self._service.router.registry.by_name(subject) is None

    def doubts(self, model: str) -> list[Doubt]:
        """Conditions that make the index or load of the model's candidates doubtful. Beyond the
        first ones only their number is given."""
        self.evaluate(HEALTH_AGE_S)
        registry = self._service.router.registry
        subjects = {model} | {
            worker.name
            for worker in registry
            if worker.model == model and registry.unavailable_reason(worker.worker_id) is None
        }
        doubts = [
            doubt(
                "DYR0760" if condition.code in codes.NOT_MODELLED else "DYR0705",
                varies=None
                if condition.code in _ALWAYS
                else Varies(
                    overlap=True,
                    workers=None if condition.subject == model else [condition.subject],
                ),
                workers=condition.subject,
                why=f"{condition.code} {condition.message}",
            )
            for condition in self.conditions
            if condition.code in codes.INDEX_OR_LOAD and condition.subject in subjects
        ]
        sharing = self._service.sharing
        late = sharing.out_of_date() if sharing is not None else ""
        if late:
            doubts.insert(0, doubt("DYR0734", routers=late))
        more = len(doubts) - _MOST_DOUBTS
        if more > 0:
            why = f"{more:,} more conditions"
            doubts[_MOST_DOUBTS:] = [doubt("DYR0705", workers="other workers", why=why)]
        return doubts
