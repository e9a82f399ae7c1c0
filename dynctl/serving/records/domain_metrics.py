"""Metrics of topology: load, capacity and decisions by domain value. Dynamo has none of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass

from dynctl.base.tasks import SLICE
from dynctl.serving.telemetry.exposition import Counter, LabelValues
from router_core import Router, RoutingPlan, Worker

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


@dataclass(slots=True)
class _Group:
    """The workers of one role with one value of a domain; ``blocks``: all that they have."""

    workers: int = 0
    ready: int = 0
    busy: int = 0
    requests: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    blocks: int = 0


class DomainCounters:
    """Counts hops by the winner's domains, and hand-offs within a domain value or across."""

    def __init__(self, decisions: Counter, transfers: Counter) -> None:
        self._decisions = decisions
        self._transfers = transfers
        self._values: set[tuple[str, str]] = set()

    def chosen(self, worker: Worker) -> None:
        """Count a hop that chose the worker; one without domains is not counted."""
        for domain, value in worker.domains.items():
            self._decisions.inc((domain, self._shown_value(domain, value), worker.role.value))

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
            shown = self._shown_value(domain, value)
            # Both series from the first hand-off on: a share of 0 is a number, not "no data".
            for one in ("local", "crossing"):
                self._transfers.inc((domain, shown, one), int(one == kind))

    def transfers(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(domain, value) -> (hand-offs that stayed in it, hand-offs that left it)."""
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for (domain, value, kind), number in self._transfers.rows.items():
            local, crossing = counts.get((domain, value), (0, 0))
            more = int(number)
            counts[domain, value] = (
                (local + more, crossing) if kind == "local" else (local, crossing + more)
            )
        return counts

    def _shown_value(self, domain: str, value: str) -> str:
        key = (domain, value)
        if key not in self._values:
            if len(self._values) >= MAX_VALUES:
                return OTHER
            self._values.add(key)
        return value


def domain_gauges(
    router: Router,
) -> Generator[str, None, dict[str, dict[LabelValues, float]]]:
    """Metric name -> (domain, value, role) -> number, from the registered workers.

    Found in steps, with an empty text after each: a thousand workers at once take 2 ms. A worker
    that leaves between two steps counts only where it was read before.
    """
    groups: dict[LabelValues, _Group] = defaultdict(_Group)
    registry, load = router.registry, router.load
    for number, worker in enumerate(tuple(registry), 1):
        if number % SLICE == 0:
            yield ""
        domains = worker.domains
        if not domains or registry.get(worker.worker_id) is not worker:
            continue
        role, slots = worker.role.value, registry.slots(worker.worker_id)
        ready = registry.unavailable_reason(worker.worker_id) is None
        # The mask has all ranks of a worker, or none.
        is_busy = bool(slots) and router.busy.mask >> slots[0] & 1
        blocks = (worker.runtime_config.total_kv_blocks or 0) * len(slots)
        # Read with the slots, which another worker may have later.
        requests = sum(map(load.requests.__getitem__, slots))
        prefill_tokens = sum(map(load.prefill_tokens.__getitem__, slots))
        decode_blocks = sum(map(load.decode_blocks.__getitem__, slots))
        for domain, value in domains.items():
            group = groups[domain, value, role]
            group.workers += 1
            group.ready += ready
            group.busy += is_busy
            group.requests += requests
            group.prefill_tokens += prefill_tokens
            group.decode_blocks += decode_blocks
            group.blocks += blocks
    tables: dict[str, dict[LabelValues, float]] = {f"dynctl_domain_{name}": {} for name in _GAUGES}
    for key, group in groups.items():
        numbers = (
            group.workers,
            group.ready,
            group.busy,
            group.requests,
            group.prefill_tokens,
            group.decode_blocks,
            group.blocks,
        )
        for rows, amount in zip(tables.values(), numbers, strict=True):
            rows[key] = amount
    return tables
