"""The simulated fleet of flags, of planned places (capacities, manifests), or of live workers.

That of a recording: :mod:`dynctl.simulation.replay.recorded`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, repeat
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.base.quantities import DURATION, in_seconds
from dynctl.documents.workers import WorkerRow
from dynctl.planning.planned_fleet import PlannedFleet
from dynctl.simulation.engine.config import TIMED, EngineConfig, EngineConfigError
from dynctl.simulation.replay.fleet import FleetChange, FleetLoss, SimulatedFleet, SimulatedWorker
from router_core import Role

MOST_SIMULATED: Final = 2_000
#: Field of a worker's card -> field of EngineConfig.
CARD: Final = {
    "total_kv_blocks": "total_blocks",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
#: Settings of a router, and fields of a worker's card, that are its KV-transfer policy.
POLICY: Final = ("kv_transfer_domain", "kv_transfer_enforcement", "kv_transfer_preferred_weight")
_LOSS: Final = re.compile(rf"(.+?)@{DURATION}(?:\.\.{DURATION})?")
_MOST_LOSSES: Final = 100
#: Weight of the policy ``preferred`` where none is set.
_WEIGHT: Final = 0.85


@dataclass(frozen=True, slots=True)
class FleetSource:
    """Workers before their engine is known.

    ``card``: what workers publish of it; ``published``: whether these are workers with cards.
    ``changes``: what happens to them, in seconds from the first request at the recorded rate.
    ``shows_pairs``: whether it is known which prefill workers get requests with a decode worker.
    """

    source: str
    workers: tuple[SimulatedWorker, ...]
    domain: str = "zone"
    enforcement: str | None = None
    preferred_weight: float | None = None
    model: str | None = None
    card: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    published: bool = False
    changes: tuple[FleetChange, ...] = ()
    shows_pairs: bool = False

    def assumed_options(self, engine: Mapping[str, Any]) -> list[str]:
        """The options of the engine that neither the workers publish nor ``engine`` gives, where
        the workers are those of a real fleet."""
        if not self.published:
            return []
        unused = set()
        if all(worker.role is Role.AGGREGATED for worker in self.workers):
            unused |= {"kv_transfer_ms_per_block", "kv_transfer_cross_domain_factor"}
        for tier in ("host", "disk"):
            if not engine.get(f"{tier}_blocks"):
                unused |= {f"{tier}_blocks", f"{tier}_gb_per_s"}
        if {"host_blocks", "disk_blocks"} <= unused:
            unused.add("kv_bytes_per_token")
        return [name for name in TIMED if name not in self.card.keys() | engine.keys() | unused]

    @property
    def places(self) -> list[str]:
        """The values of the domain, in order of the workers."""
        values = (worker.domains.get(self.domain) for worker in self.workers)
        return list(dict.fromkeys(value for value in values if value is not None))


def fleet_of_count(workers: int, zones: Sequence[str], ranks: int) -> FleetSource:
    """``workers`` aggregated workers, spread over ``zones`` in turn."""
    if len(set(zones)) != len(zones):
        raise UsageProblem(f"--zones {','.join(zones)}: expected different names")
    return FleetSource(
        "--workers",
        tuple(
            SimulatedWorker(
                number + 1,
                Role.AGGREGATED,
                {"zone": zones[number % len(zones)]} if zones else {},
                ranks,
            )
            for number in range(workers)
        ),
    )


def fleet_of_places(planned: PlannedFleet, ranks: int) -> FleetSource:
    """The prefill and decode workers of planned places; unpinned ones take the places in turn."""
    notes = list(planned.notes)
    pools = {cell.pool for cell in planned.cells} | {group.pool for group in planned.floating}
    if len(pools) > 1:
        raise UsageProblem(
            f"{planned.source}: {len(pools)} graphs ({', '.join(sorted(pools)[:3])}); a replay "
            "simulates one: give its manifest alone"
        )
    total = sum(cell.prefill + cell.decode for cell in planned.cells)
    total += sum(group.workers for group in planned.floating)
    _check_size(planned.source, total)
    workers: list[SimulatedWorker] = []
    for role, value in _planned_places(planned, notes):
        domains = {} if value is None else {planned.domain: value}
        workers.append(SimulatedWorker(len(workers) + 1, Role(role), domains, ranks))
    enforcement = next(iter(planned.in_force.values()), None)
    return FleetSource(
        planned.source,
        tuple(workers),
        planned.domain,
        None if enforcement in (None, "none", "mixed") else enforcement,
        notes=tuple(notes),
    )


def _planned_places(planned: PlannedFleet, notes: list[str]) -> Iterator[tuple[str, str | None]]:
    """Role and value of the domain of each worker; None: it is in no place."""
    for cell in planned.cells:
        yield from repeat(("prefill", cell.value), cell.prefill)
        yield from repeat(("decode", cell.value), cell.decode)
    values = [cell.value for cell in planned.cells if cell.value is not None]
    for group in planned.floating:
        allowed = [value for value in values if group.may_land_in(value)]
        yield from islice(zip(repeat(group.role), cycle(allowed or [None])), group.workers)
        if allowed:
            notes.append(
                f"{group.workers:,} {group.role} workers are not pinned to a {planned.domain}: "
                f"spread over {', '.join(allowed[:5])}"
            )


def fleet_of_live(source: str, rows: Sequence[WorkerRow], model: str | None) -> FleetSource:
    """The ready workers of a live deployment, with what their cards publish."""
    ready = [row for row in rows if row.status == "ready" and model in (None, row.model)]
    models = sorted({row.model for row in ready})
    if len(models) > 1:
        raise UsageProblem(
            f"{source}: workers of {', '.join(models[:5])}; a replay simulates one model",
            "choose it with --model NAME",
        )
    notes: list[str] = []
    left_out = len(rows) - len(ready)
    if left_out and model is None:
        notes.append(f"{left_out:,} workers that are not ready are left out")
    card = _common_card(ready, notes)
    domain, enforcement, weight = _common_policy(ready, notes)
    return FleetSource(
        source,
        tuple(
            SimulatedWorker(
                number, Role(row.role), dict(sorted(row.domains.items())), max(1, len(row.ranks))
            )
            for number, row in enumerate(sorted(ready, key=lambda row: row.name), 1)
        ),
        domain or "zone",
        enforcement,
        weight,
        models[0] if models else None,
        card,
        tuple(notes),
        published=True,
    )


def _common_card(rows: Sequence[WorkerRow], notes: list[str]) -> dict[str, int]:
    """The engine's options that the workers publish, the least of each where they differ."""
    card = {}
    cards = [{**row.runtime_config, "block_size": row.block_size} for row in rows]
    for name in (*CARD, "block_size"):
        values = [published.get(name) for published in cards]
        known = sorted({value for value in values if isinstance(value, int) and value > 0})
        if known:
            card[CARD.get(name, name)] = known[0]
        if len(known) > 1:
            notes.append(
                f"workers differ in {name} ({known[0]:,} to {known[-1]:,}): all have "
                f"{known[0]:,} in the simulation"
            )
    return card


def _common_policy(
    rows: Sequence[WorkerRow], notes: list[str]
) -> tuple[str | None, str | None, float | None]:
    """(domain, enforcement, weight) of the workers' KV-transfer policy, if they have one."""
    policies = set()
    for row in rows:
        domain, enforcement, weight = map(row.runtime_config.get, POLICY)
        if domain is not None:
            policies.add((domain, enforcement, weight))
    if len(policies) == 1:
        return policies.pop()
    if policies:
        notes.append("workers differ in their KV-transfer policy: the simulation has none")
    return None, None, None


def simulated_fleet(
    source: FleetSource,
    engine: Mapping[str, Any],
    *,
    block_size: int,
    enforcement: str | None = None,
    weight: float | None = None,
    lose: Sequence[str] = (),
    bootstrap: bool | None = None,
    migration_limit: int = 0,
    migration_max_tokens: int | None = None,
    events_delay_s: float = 0.0,
    events_loss: float = 0.0,
    block_bytes: int = 0,
) -> SimulatedFleet:
    """The fleet to simulate. ``engine``: given fields of EngineConfig, which win over cards;
    ``block_size``: where neither has it. ``enforcement``: none, or a policy for the domain.
    ``bootstrap``: whether prefill workers get requests together with a decode worker; None: as the
    source has it.

    Raises UsageProblem.
    """
    _check_size(source.source, len(source.workers))
    missing = _missing_role(source)
    if missing is not None:
        raise UsageProblem(f"{source.source}: no {missing} workers; nothing can be simulated")
    workers = source.workers if bootstrap is None else _with_bootstrap(source, bootstrap)
    values = {"block_size": block_size} | dict(source.card) | dict(engine)
    if block_bytes:
        values.setdefault("kv_bytes_per_token", block_bytes / values["block_size"])
    policy = enforcement or source.enforcement or "none"
    if policy != "none":
        values |= _policy_values(source, policy, weight)
    try:
        config = EngineConfig(**values)
        # The context is as long as the cache: a trace has lengths of another deployment.
        longest = min(10_000_000, config.total_blocks * config.block_size)
        config = replace(config, max_model_len=longest, kv_events="", replay="")
    except EngineConfigError as error:
        raise UsageProblem(str(error)) from None
    losses = tuple(_loss(text, source) for text in lose[:_MOST_LOSSES])
    return SimulatedFleet(
        workers,
        config,
        model=source.model or "model",
        events_delay_s=events_delay_s,
        events_loss=events_loss,
        block_bytes=block_bytes,
        losses=losses,
        changes=source.changes,
        migration_limit=migration_limit,
        migration_max_tokens=migration_max_tokens,
        link_domain=source.domain if source.places else "",
    )


def _missing_role(source: FleetSource) -> str | None:
    roles = {worker.role for worker in source.workers}
    if not roles:
        return "ready"
    if roles == {Role.PREFILL}:
        return "decode"
    return "prefill" if roles == {Role.DECODE} else None


def _with_bootstrap(source: FleetSource, bootstrap: bool) -> tuple[SimulatedWorker, ...]:
    """The workers; prefill workers get requests together with a decode worker, or in turn."""
    if all(worker.role is not Role.PREFILL for worker in source.workers):
        flag = "--bootstrap" if bootstrap else "--no-bootstrap"
        raise UsageProblem(
            f"{flag}: {source.source} has no prefill workers",
            "give the fleet some: --capacity zone-a:prefill=2,decode=4",
        )
    return tuple(
        replace(worker, bootstrap=bootstrap and worker.role is Role.PREFILL)
        for worker in source.workers
    )


def _policy_values(source: FleetSource, policy: str, weight: float | None) -> dict[str, Any]:
    """The fields of EngineConfig for a KV-transfer policy; raises UsageProblem."""
    if not source.places:
        raise UsageProblem(
            f"--enforcement {policy}: no worker has a value of {source.domain}",
            "give the workers places: --zones a,b,c or --capacity",
        )
    values = {"kv_transfer_domain": source.domain, "kv_transfer_enforcement": policy}
    if policy != "preferred":
        return values
    if weight is None:
        weight = source.preferred_weight
    return values | {"kv_transfer_preferred_weight": _WEIGHT if weight is None else weight}


def _loss(text: str, source: FleetSource) -> FleetLoss:
    """``zone-a@60s`` (a value of the domain) or ``3@60s..120s`` (a worker); raises UsageProblem."""
    match = _LOSS.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(
            f"--lose {text}: expected PLACE@TIME or PLACE@TIME..TIME, for example zone-a@60s"
        )
    name, at, until = match[1], in_seconds(match[2], match[3]), None
    if match[4] is not None:
        until = in_seconds(match[4], match[5])
        if until <= at:
            raise UsageProblem(f"--lose {text}: the end, {until:g} s, is not after {at:g} s")
    if name in source.places:
        return FleetLoss(at, domain=source.domain, value=name, until=until)
    if name.isdigit() and int(name) in {worker.worker_id for worker in source.workers}:
        return FleetLoss(at, worker_id=int(name), until=until)
    expected = ", ".join(source.places[:10]) or f"a worker from 1 to {len(source.workers)}"
    raise UsageProblem(f"--lose {text}: {name} is not a place of the fleet; expected {expected}")


def _check_size(source: str, workers: int) -> None:
    if workers > MOST_SIMULATED:
        raise UsageProblem(
            f"{source}: {workers:,} workers; expected at most {MOST_SIMULATED:,} in a simulation"
        )
