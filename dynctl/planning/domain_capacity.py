"""The capacity of every topology domain, and prefill workers that a required policy strands.

Pure: worker rows in, capacity rows out. The decode workers that a prefill worker may hand over to
come from the router's own :func:`router_core.implied_constraints`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from dynctl.base.errors import UsageProblem
from dynctl.base.tasks import SLICE, drained
from dynctl.documents.topology import (
    DomainCapacity,
    RoleCapacity,
    Stranded,
    TopologyShow,
    TransferPolicy,
    is_weakened,
)
from dynctl.documents.workers import UNREACHED, WorkerRow
from router_core import (
    UNCONSTRAINED,
    ImpliedConstraints,
    ModelRuntimeConfig,
    PolicyUnderivable,
    Role,
    RouterPolicy,
    Worker,
    WorkerError,
    implied_constraints,
)

#: Names of workers in one sentence.
_NAMED: Final = 3


def topology_show(
    source: str,
    workers: Sequence[WorkerRow],
    settings: Mapping[str, Any],
    *,
    domain: str | None = None,
    counted: Callable[[WorkerRow], bool] = lambda row: True,
) -> TopologyShow:
    """The rows, ordered by model and value.

    ``settings``: the router's, by name; only its KV-transfer policy and decode-capacity guard are
    read. ``domain``: the domain of the rows; by default the transfer domain, else zone, else the
    first. ``counted`` selects the workers that are shown; stranded workers are computed from all.
    Raises UsageProblem for a domain that no worker publishes.
    """
    return drained(topology_steps(source, workers, settings, domain=domain, counted=counted))


def topology_steps(
    source: str,
    workers: Sequence[WorkerRow],
    settings: Mapping[str, Any],
    *,
    domain: str | None = None,
    counted: Callable[[WorkerRow], bool] = lambda row: True,
) -> Generator[None, None, TopologyShow]:
    """As :func:`topology_show`, in steps of a few milliseconds at most."""
    known = sorted({name for row in workers for name in row.domains})
    policy = router_policy(settings)
    chosen = _domain(domain, known, workers, policy)
    fleet = _Fleet(workers, policy, guarded=settings.get("decode_capacity_guard") is True)
    givers = [row for row in workers if row.role == Role.PREFILL]
    for count, row in enumerate(givers):
        if not count % (SLICE // 2):
            yield
        fleet.derived(row)
    yield
    groups: dict[tuple[str, str | None], list[WorkerRow]] = defaultdict(list)
    for row in workers:
        if counted(row):
            groups[row.model, row.domains.get(chosen) if chosen else None].append(row)
    ordered = sorted(groups, key=lambda key: (key[0], key[1] is None, key[1] or ""))
    rows = []
    for model, value in ordered:
        rows.append(_capacity(model, chosen, value, groups[model, value], fleet))
        yield
    return TopologyShow(source, chosen, known, rows)


def _domain(
    wanted: str | None,
    known: Sequence[str],
    workers: Sequence[WorkerRow],
    policy: RouterPolicy | None,
) -> str | None:
    if wanted is not None:
        if wanted not in known:
            raise UsageProblem(
                f"--domain {wanted}: no worker publishes it; "
                f"published: {', '.join(known) or 'no domain'}"
            )
        return wanted
    transfer = [row.runtime_config.get("kv_transfer_domain") for row in workers]
    transfer.append(policy.domain if policy is not None else None)
    return primary_domain(known, transfer)


def primary_domain(known: Sequence[str], transfer: Sequence[str | None]) -> str | None:
    """The default domain: the one of the KV-transfer policy, else zone, else the first."""
    return next((name for name in (*transfer, "zone", *known) if name in known), None)


def router_policy(settings: Mapping[str, Any]) -> RouterPolicy | None:
    """The KV-transfer policy in a router's settings."""
    domain = settings.get("kv_transfer_domain")
    if not isinstance(domain, str):
        return None
    enforcement = settings.get("kv_transfer_enforcement") or "required"
    return RouterPolicy(domain, enforcement, settings.get("kv_transfer_preferred_weight"))


def derive_constraints(row: WorkerRow, policy: RouterPolicy | None) -> ImpliedConstraints | str:
    """The constraints that a prefill worker implies for decode, or why they are unknown."""
    try:
        config = ModelRuntimeConfig.from_dict(row.runtime_config, validate=False)
        worker = Worker(row.worker_id, row.name, row.model, Role.PREFILL, runtime_config=config)
        return implied_constraints(worker, (), policy)
    except (PolicyUnderivable, WorkerError) as error:
        return str(error)


class _Fleet:
    """All workers, with the decode workers that each prefill worker may hand over to."""

    def __init__(
        self, workers: Sequence[WorkerRow], policy: RouterPolicy | None, *, guarded: bool
    ) -> None:
        self.policy = policy
        self._guarded = guarded
        #: (model, worker set, taint) -> its decode workers. The set is empty where the model has
        #: none; taint None: all of them.
        self._decode: dict[tuple[str, str, str | None], list[WorkerRow]] = defaultdict(list)
        #: The models whose decode workers belong to sets.
        self._divided: set[str] = set()
        for row in workers:
            if row.role == Role.DECODE:
                if row.worker_sets:
                    self._divided.add(row.model)
                for name in row.worker_sets or [""]:
                    for taint in (None, *row.taints):
                        self._decode[row.model, name, taint].append(row)
        self._lacks: dict[tuple[str, tuple[str, ...], str | None], str | None] = {}
        self._workers = workers
        #: By the identity of a row of ``workers``.
        self._derived: dict[int, ImpliedConstraints | str] = {}

    @cached_property
    def _served_models(self) -> set[str]:
        """Models with prefill workers that can hand over: the guard chooses only those workers."""
        return {
            row.model
            for row in self._workers
            if row.role == Role.PREFILL and _is_available(row) and self._problem(row) is None
        }

    def derived(self, row: WorkerRow) -> ImpliedConstraints | str:
        """The constraints that a prefill worker implies for decode, or why they are unknown;
        computed once for each row."""
        derived = self._derived.get(id(row))
        if derived is None:
            derived = self._derived[id(row)] = derive_constraints(row, self.policy)
        return derived

    def has_decode(self, model: str, domain: str | None, value: str | None) -> bool:
        """Whether a decode worker in that value of the domain is available, busy or not; True for
        workers without a value, whose place is unknown."""
        if domain is None or value is None:
            return True
        return (model, domain, value) in self._decode_places

    @cached_property
    def _decode_places(self) -> set[tuple[str, str, str]]:
        """Model, domain and value of each available decode worker."""
        return {
            (row.model, *place)
            for row in self._workers
            if row.role == Role.DECODE and _is_available(row)
            for place in row.domains.items()
        }

    def stranded(self, rows: Sequence[WorkerRow]) -> list[Stranded]:
        """The prefill workers of ``rows`` without a decode worker, by what is missing."""
        lacking: dict[tuple[str | None, str], list[WorkerRow]] = defaultdict(list)
        for row in rows:
            problem = self._problem(row) if _is_available(row) else None
            if problem is not None:
                lacking[problem].append(row)
        return [
            Stranded(
                sorted(row.name for row in members), taint, reason, self._outcome(members[0].model)
            )
            for (taint, reason), members in lacking.items()
        ]

    def _problem(self, row: WorkerRow) -> tuple[str | None, str] | None:
        derived = self.derived(row)
        if isinstance(derived, str):
            return None, derived
        taint = next((c.taint for c in derived.constraints if c.kind == "required"), None)
        sets = self._sets(row)
        lack = self._lack(row.model, sets, taint)
        if lack is not None and derived.relaxable:
            taint, lack = None, self._lack(row.model, sets, None)
        return None if lack is None else (taint, lack)

    def _sets(self, row: WorkerRow) -> tuple[str, ...]:
        """The sets of the decode workers that a prefill worker hands over to, ``("",)`` if the
        model is not divided into sets."""
        return tuple(row.worker_sets or ()) if row.model in self._divided else ("",)

    def _lack(self, model: str, sets: tuple[str, ...], taint: str | None) -> str | None:
        """Why no decode worker of the sets with this taint takes requests; computed once."""
        key = (model, sets, taint)
        if key not in self._lacks:
            self._lacks[key] = self._why_lacking(model, sets, taint)
        return self._lacks[key]

    def _why_lacking(self, model: str, sets: tuple[str, ...], taint: str | None) -> str | None:
        fitting = [row for name in sets for row in self._decode.get((model, name, taint), ())]
        if any(map(_is_eligible, fitting)):
            return None
        if not fitting:
            there = "has it" if taint else "is there"
            late = [row.name for row in self._decode.get(("", "", taint), ())]
            unreached = f" ({', '.join(late[:_NAMED])} not reached yet)" if late else ""
            return (
                f"no decode worker of {model}{self._words_for_sets(model, sets)} {there}{unreached}"
            )
        busy = sum(map(_is_available, fitting))
        states = [f"{busy:,} busy"] if busy else []
        states += [f"{len(fitting) - busy:,} unavailable"] if busy < len(fitting) else []
        what = "has it and takes work" if taint else "takes work"
        return f"no decode worker of {model} {what} ({', '.join(states)})"

    def _words_for_sets(self, model: str, sets: tuple[str, ...]) -> str:
        """Words for the sets, where another set of the model has decode workers."""
        if {name for other, name, _ in self._decode if other == model} <= {*sets}:
            return ""
        return f" in worker set {' or '.join(sets)}" if sets else " in its Dynamo namespace"

    def _outcome(self, model: str) -> str:
        if not self._guarded:
            return (
                "every request that is prefilled there is refused; the router does not avoid it "
                "(no decode-capacity guard)"
            )
        if model in self._served_models:
            return (
                "the decode-capacity guard prefills elsewhere; requests that fit only there are "
                "refused"
            )
        return "every request that needs a decode worker is refused"


def _capacity(
    model: str, domain: str | None, value: str | None, rows: Sequence[WorkerRow], fleet: _Fleet
) -> DomainCapacity:
    roles: dict[str, list[WorkerRow]] = {role.value: [] for role in Role}
    for row in rows:
        # A worker that never answered has no role yet.
        roles[row.role or Role.AGGREGATED].append(row)
    roles_here = [_role(roles[role]) for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED)]
    prefill, decode, aggregated = roles_here
    givers, takers = prefill.ready + prefill.busy, decode.ready + decode.busy
    stranded = fleet.stranded(roles[Role.PREFILL])
    policies = _policies(roles[Role.PREFILL], fleet)
    kept = domain is not None and any(policy.domain == domain for policy in policies)
    crosses = bool(givers) and kept and not fleet.has_decode(model, domain, value)
    return DomainCapacity(
        model=model,
        value=value,
        prefill=prefill,
        decode=decode,
        aggregated=aggregated,
        decode_per_prefill=round(takers / givers, 6) if givers and takers else None,
        policies=policies,
        stranded=stranded,
        state=_state(rows, stranded, crosses=crosses, weakened=any(map(is_weakened, roles_here))),
        workers=sorted(row.name for row in rows),
        unreached=sorted(row.name for row in rows if row.status == UNREACHED),
    )


def _state(
    rows: Sequence[WorkerRow], stranded: Sequence[Stranded], *, crosses: bool, weakened: bool
) -> str:
    if not any(map(_is_available, rows)):
        return "down"
    if stranded:
        return "stranded"
    if crosses:
        return "crosses"
    return "degraded" if weakened else "ok"


def _role(rows: Sequence[WorkerRow]) -> RoleCapacity:
    available = [row for row in rows if _is_available(row)]
    ranks = [rank for row in available for rank in row.ranks]
    used = [r.reported.kv_used_blocks for r in ranks if r.reported.kv_used_blocks is not None]
    totals = [
        total * len(row.ranks)
        for row in available
        if isinstance(total := row.runtime_config.get("total_kv_blocks"), int)
    ]
    busy = sum(row.busy for row in available)
    return RoleCapacity(
        workers=len(rows),
        ready=len(available) - busy,
        busy=busy,
        unavailable=len(rows) - len(available),
        ranks=len(ranks),
        kv_reporting=len(used),
        kv_used_blocks=sum(used) if used else None,
        kv_total_blocks=sum(totals) if totals else None,
        active_prefill_tokens=sum(rank.active_prefill_tokens for rank in ranks),
        active_decode_blocks=sum(rank.active_decode_blocks for rank in ranks),
    )


def _policies(rows: Sequence[WorkerRow], fleet: _Fleet) -> list[TransferPolicy]:
    """Each distinct policy with its workers."""
    names_by_policy: dict[_Policy, list[str]] = defaultdict(list)
    for row in rows:
        names_by_policy[_policy(row, fleet)].append(row.name)
    return [TransferPolicy(names, *policy) for policy, names in names_by_policy.items()]


class _Policy(NamedTuple):
    """The fields of a TransferPolicy except its workers."""

    enforcement: str | None = None
    domain: str | None = None
    weight: float | None = None
    origin: str | None = None
    problem: str | None = None


def _policy(row: WorkerRow, fleet: _Fleet) -> _Policy:
    derived = fleet.derived(row)
    problem = derived if isinstance(derived, str) else None
    config = row.runtime_config
    if config.get("kv_transfer_domain") is not None:
        enforcement, weight = (
            config.get(name) for name in ("kv_transfer_enforcement", "kv_transfer_preferred_weight")
        )
        return _Policy(enforcement, config["kv_transfer_domain"], weight, "card", problem)
    policy = fleet.policy
    if policy is None or derived == UNCONSTRAINED:
        return _Policy(problem=problem)
    return _Policy(policy.enforcement, policy.domain, policy.weight, "router", problem)


def _is_available(row: WorkerRow) -> bool:
    return row.status == "ready"


def _is_eligible(row: WorkerRow) -> bool:
    return _is_available(row) and not row.busy
