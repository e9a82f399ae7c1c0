"""Metrics of topology: load, capacity and decisions by domain value. Dynamo has none of them."""

from __future__ import annotations

from collections import defaultdict

from dynctl.serving.telemetry.exposition import Counter, LabelValues
from router_core import Decision, Router, RoutingPlan, Worker

#: Values of domains counted separately; further ones count under OTHER. Gauges have no such
#: bound: they show the registered workers.
MAX_VALUES = 1024
OTHER = "other"

_GAUGES = (
    "workers",
    "workers_ready",
    "workers_busy",
    "active_requests",
    "active_prefill_tokens",
    "active_decode_blocks",
    "total_kv_blocks",
)


class DomainCounters:
    """Counts hops by the winner's domains, and hand-offs within a domain value or across."""

    def __init__(self, decisions: Counter, transfers: Counter) -> None:
        self._decisions = decisions
        self._transfers = transfers
        self._values: set[tuple[str, str]] = set()

    def hop(self, decision: Decision) -> None:
        """Count a decided hop; a worker without domains is not counted."""
        if decision.worker is not None:
            self.chosen(decision.worker)

    def chosen(self, worker: Worker) -> None:
        """Count a hop that chose the worker."""
        for domain, value in worker.domains.items():
            self._decisions.inc((domain, self._known(domain, value), worker.role.value))

    def plan(self, plan: RoutingPlan) -> None:
        """Count a plan's hand-off, for each domain of its prefill worker."""
        if plan.prefill is None or plan.decode is None:
            return
        prefill, decode = plan.prefill.worker, plan.decode.worker
        if prefill is not None and decode is not None:
            self.transfer(prefill, decode)

    def transfer(self, prefill: Worker, decode: Worker) -> None:
        """Count a hand-off, for each domain of the prefill worker."""
        for domain, value in prefill.domains.items():
            kind = "local" if decode.domains.get(domain) == value else "crossing"
            self._transfers.inc((domain, self._known(domain, value), kind))

    def transfers(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(domain, value) -> (hand-offs that stayed in it, hand-offs that left it)."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for (domain, value, kind), number in self._transfers.rows.items():
            local, crossing = found.get((domain, value), (0, 0))
            more = int(number)
            found[domain, value] = (
                (local + more, crossing) if kind == "local" else (local, crossing + more)
            )
        return found

    def _known(self, domain: str, value: str) -> str:
        key = (domain, value)
        if key not in self._values:
            if len(self._values) >= MAX_VALUES:
                return OTHER
            self._values.add(key)
        return value


def domain_gauges(router: Router) -> dict[str, dict[LabelValues, float]]:
    """Metric name -> (domain, value, role) -> number, from the registered workers."""
    tables: dict[str, dict[LabelValues, float]] = {name: defaultdict(float) for name in _GAUGES}
    registry, load = router.registry, router.load
    for worker in registry:
        if not worker.domains:
            continue
        slots = registry.slots(worker.worker_id)
        mask = registry.mask_of((worker.worker_id,))
        numbers = (
            1,
            registry.unavailable_reason(worker.worker_id) is None,
            bool(router.busy.mask & mask),
            sum(load.requests[slot] for slot in slots),
            sum(load.prefill_tokens[slot] for slot in slots),
            sum(load.decode_blocks[slot] for slot in slots),
            (worker.runtime_config.total_kv_blocks or 0) * len(slots),
        )
        for domain, value in worker.domains.items():
            key = (domain, value, worker.role.value)
            for name, amount in zip(_GAUGES, numbers, strict=True):
                tables[name][key] += amount
    return {f"dynctl_domain_{name}": dict(rows) for name, rows in tables.items()}
