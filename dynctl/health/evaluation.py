"""The health of a fleet of ours: one reading in, conditions and readiness out. Pure.

Every surface shows this evaluation: `/health`, `/ready`, `/metrics`, `/v1/fleet`, and through it
`check`, `top`, `route` and `bundle`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dynctl.base.tasks import drained
from dynctl.documents.fleet_load import Condition
from dynctl.documents.topology import DomainCapacity, RoleCapacity, TopologyShow
from dynctl.documents.workers import EngineRank, RankRow, WorkerRow
from dynctl.findings.catalogue import Level, all_codes
from dynctl.health.conditions import (
    INDEX_OVER_LIMIT,
    LOAD_OVERDUE,
    MODEL_NOT_SERVED,
    NO_WORKERS,
    STREAM_DISCONNECTED,
    WORKERS_BUSY,
)
from dynctl.planning.domain_capacity import topology_steps
from router_core import Role, topology_of

#: A load report is overdue after this many intervals, at the earliest after _OVERDUE_S.
_OVERDUE_INTERVALS: Final = 5
_OVERDUE_S: Final = 10.0
#: A KV event stream that has not connected yet is a condition after this time.
CONNECT_S: Final = 3.0
_NAMED: Final = 3
#: Workers with the same condition that are named; the others are counted in one more. The store of
#: conditions is bounded: without this limit those of a large fleet would displace each other at
#: every evaluation, and each would be logged again.
MOST_OF_A_CODE: Final = 32


_POOLS: Final = {Role.PREFILL.value, Role.DECODE.value}


class Derived(NamedTuple):
    """A condition that follows from the reading."""

    code: str
    subject: str
    message: str


#: The codes that :func:`evaluate` sets and ends; parts of the frontend report all others.
DERIVED_CODES: Final = frozenset(
    {
        "DYT0901",
        "DYT0902",
        INDEX_OVER_LIMIT,
        LOAD_OVERDUE,
        MODEL_NOT_SERVED,
        NO_WORKERS,
        STREAM_DISCONNECTED,
        WORKERS_BUSY,
    }
)


@dataclass(frozen=True, slots=True)
class FleetState:
    """One reading of a fleet.

    ``workers``: all of them, registered or not. ``reported``: the conditions that parts of the
    frontend reported. ``settings``: the router's, by name. ``probe_s``: seconds between two load
    reports. ``age_s``: seconds since the start of the process. ``pools``: a model whose workers all
    prefill, or all decode, is served: the other hop is decided elsewhere (a router alone).
    """

    workers: Sequence[WorkerRow] = ()
    reported: Sequence[Condition] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    probe_s: float = 1.0
    age_s: float = float("inf")
    draining: bool = False
    pools: bool = False


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """Whether a model can be served now. Role -> workers that are ready, and registered.

    ``missing``: the roles without which no request can be served, empty where one can.
    """

    model: str
    ready: Mapping[str, int]
    registered: Mapping[str, int]
    missing: tuple[str, ...]

    @property
    def is_pool(self) -> bool:
        """Whether all workers have one of the roles of a disaggregated fleet."""
        return len(self.registered) == 1 and self.registered.keys() <= _POOLS


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """``status``: healthy, degraded (a condition holds), unhealthy (no model can be served), or
    draining. ``derived``: the conditions that follow from the reading."""

    status: str
    models: tuple[ModelHealth, ...]
    derived: tuple[Derived, ...]

    @property
    def serves(self) -> bool:
        """At least one model can be served."""
        return any(not model.missing for model in self.models)


class ConditionTexts(NamedTuple):
    """The texts of a condition, which are the same on every surface."""

    level: Level
    expected: str
    fix: str


#: Shorter than the pages of these codes, which are for graphs on Kubernetes as well.
_FLEET_TEXTS: Final = {
    "DYT0901": (
        "decode workers in every domain with prefill workers",
        "add or restart decode workers there, or use enforcement preferred",
    ),
    "DYT0902": (
        "at least two decode workers in a domain with enforcement required",
        "add a decode worker there",
    ),
}


def condition_texts(code: str) -> ConditionTexts:
    """Level, expected state and fix of a condition. An unknown code is a warning without texts."""
    entry = all_codes().get(code)
    if entry is None:
        return ConditionTexts("warn", "", "")
    return ConditionTexts(entry.level, *_FLEET_TEXTS.get(code, (entry.expected, entry.fix)))


def evaluate(state: FleetState) -> FleetHealth:
    """Judge one reading."""
    return drained(evaluation(state))


def evaluation(state: FleetState) -> Generator[None, None, FleetHealth]:
    """As :func:`evaluate`, in steps of a few milliseconds at most."""
    by_model: dict[str, list[WorkerRow]] = defaultdict(list)
    for row in state.workers:
        if row.model:
            by_model[row.model].append(row)
    models = tuple(
        _model_health(name, rows, pools=state.pools) for name, rows in sorted(by_model.items())
    )
    derived: list[Derived] = []
    for part in (
        _unserved_models(state, models),
        _busy_roles(by_model),
        _disconnected_streams(state),
        _over_limit(state),
        _overdue_loads(state),
    ):
        yield
        derived += part
    yield
    registered = [row for row in state.workers if row.ranks]
    refused = {model.model for model in models if model.missing or model.is_pool}
    shown = yield from topology_steps("", registered, state.settings)
    derived += capacity_conditions(shown, refused)
    status = _status(state, models, derived)
    return FleetHealth(status, models, tuple(_bounded_conditions(dict.fromkeys(derived))))


def _status(state: FleetState, models: Sequence[ModelHealth], derived: Sequence[Derived]) -> str:
    if state.draining:
        return "draining"
    if all(model.missing for model in models):
        return "unhealthy"
    return "degraded" if derived or state.reported else "healthy"


def _bounded_conditions(derived: Iterable[Derived]) -> Iterator[Derived]:
    """The first ones of each code, and how many more there are."""
    counts: Counter[str] = Counter()
    for condition in derived:
        counts[condition.code] += 1
        if counts[condition.code] <= MOST_OF_A_CODE:
            yield condition
    for code, count in counts.items():
        if count > MOST_OF_A_CODE:
            yield Derived(code, "fleet", f"{count - MOST_OF_A_CODE:,} more have this condition")


def _model_health(name: str, rows: Sequence[WorkerRow], *, pools: bool) -> ModelHealth:
    available = [row for row in rows if row.gets_requests]
    ready, registered = _count_by_role(available), _count_by_role(rows)
    missing: tuple[str, ...] = ()
    if not any(map(_serves_alone, available)):
        missing = _missing_roles(ready, registered, pools=pools)
    return ModelHealth(name, ready, registered, missing)


def _count_by_role(rows: Iterable[WorkerRow]) -> dict[str, int]:
    counts = Counter(row.role or Role.AGGREGATED.value for row in rows)
    return dict(sorted(counts.items()))


def _serves_alone(row: WorkerRow) -> bool:
    """Whether a worker computes and answers a request without another one."""
    role = row.role or Role.AGGREGATED
    return role == Role.AGGREGATED or (role == Role.DECODE and row.can_prefill)


def _missing_roles(
    ready: Mapping[str, int], registered: Mapping[str, int], *, pools: bool
) -> tuple[str, ...]:
    """The roles without which a model has no pair of workers to serve it."""
    if ready.get("prefill") and ready.get("decode"):
        return ()
    roles: tuple[str, ...] = ("aggregated",)
    if registered.keys() & _POOLS:
        roles = ("prefill", "decode")
    if pools and len(registered) == 1 and registered.keys() <= _POOLS:
        roles = tuple(registered)
    return tuple(role for role in roles if not ready.get(role))


def _unserved_models(state: FleetState, models: Sequence[ModelHealth]) -> Iterator[Derived]:
    if not state.workers:
        yield Derived(NO_WORKERS, "fleet", "the fleet has no workers: every request is refused")
    for model in models:
        if model.missing:
            counts = ", ".join(
                f"{model.ready.get(role, 0):,}/{model.registered.get(role, 0):,} {role}"
                for role in model.missing
            )
            yield Derived(
                MODEL_NOT_SERVED,
                model.model,
                f"{counts} workers are ready: every request for the model is refused",
            )


def _busy_roles(by_model: Mapping[str, Sequence[WorkerRow]]) -> Iterator[Derived]:
    for model, rows in by_model.items():
        roles: dict[str, list[WorkerRow]] = defaultdict(list)
        for row in rows:
            if row.gets_requests:
                roles[row.role].append(row)
        for role, ready in roles.items():
            if all(row.busy for row in ready):
                yield Derived(
                    WORKERS_BUSY,
                    f"{model} {role}",
                    f"all {len(ready):,} ready {role} workers are above a busy threshold: "
                    "requests are refused",
                )


def _over_limit(state: FleetState) -> Iterator[Derived]:
    for row in state.workers:
        ranks = [rank.dp_rank for rank in row.ranks if rank.index == "over_limit"]
        if ranks:
            named = ", ".join(map(str, ranks[:_NAMED]))
            of = f"rank {named}: " if len(row.ranks) > 1 else ""
            yield Derived(
                INDEX_OVER_LIMIT,
                row.name,
                f"{of}its KV events had more blocks than the worker declares, or --index-memory "
                "was reached: its index was dropped and is read again",
            )


def _disconnected_streams(state: FleetState) -> Iterator[Derived]:
    if state.age_s < CONNECT_S:
        return
    for row in state.workers:
        ranks = [rank for rank in row.ranks if rank.index == "disconnected"]
        if row.status != "ready" or not ranks:
            continue
        silent = all(_without_events(rank) for rank in ranks)
        named = ", ".join(f"{rank.dp_rank}" for rank in ranks[:_NAMED])
        of = f"rank {named}" if len(row.ranks) > 1 else "its KV event stream"
        yield Derived(
            STREAM_DISCONNECTED,
            row.name,
            f"{of} is not connected and no event arrived yet: does the engine publish there?"
            if silent
            else f"{of} is not connected: the index has its last contents",
        )


def _without_events(rank: RankRow) -> bool:
    return isinstance(rank, EngineRank) and rank.events is not None and not rank.events.batches


def _overdue_loads(state: FleetState) -> Iterator[Derived]:
    limit = max(_OVERDUE_S, _OVERDUE_INTERVALS * state.probe_s)
    for row in state.workers:
        ages = [rank.load_age_s for rank in row.ranks if rank.load_age_s is not None]
        if row.status == "ready" and ages and max(ages) > limit:
            yield Derived(
                LOAD_OVERDUE,
                row.name,
                f"load report is overdue: the last one is more than {limit:,.0f} s old",
            )


def capacity_conditions(
    shown: TopologyShow, refused: Container[str] = frozenset()
) -> Iterator[Derived]:
    """Domains whose prefill workers can hand over to no decode worker, or to only one.

    ``refused``: models that are not served (MODEL_NOT_SERVED), or whose other hop is decided
    elsewhere; none of their domains is reported.
    """
    for row in shown.rows:
        if row.model in refused:
            continue
        for stranded in row.stranded:
            place = topology_of(stranded.requires) if stranded.requires is not None else None
            where = "=".join(place) if place is not None else row.model
            # The reason first: a list that has no room cuts the names.
            names = _first_names(stranded.workers)
            yield Derived("DYT0901", where, f"{stranded.reason}; {stranded.outcome} ({names})")
        domain = _single_decode_domain(row)
        if domain is not None:
            yield Derived(
                "DYT0902",
                f"{domain}={row.value}",
                "one decode worker takes all that is prefilled here: while it restarts, "
                "requests fail or wait",
            )


def _first_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _available_workers(*roles: RoleCapacity) -> int:
    """Workers that answer, busy or not."""
    return sum(role.ready + role.busy for role in roles)


def _single_decode_domain(row: DomainCapacity) -> str | None:
    """The domain that a row's prefill workers are bound to, if it has one decode worker only."""
    required = [policy.domain for policy in row.policies if policy.enforcement == "required"]
    bound = next(filter(None, required), None)
    if bound is None or row.stranded or not _available_workers(row.prefill):
        return None
    return bound if _available_workers(row.decode) == 1 else None
