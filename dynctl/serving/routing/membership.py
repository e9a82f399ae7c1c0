"""Which workers get requests: registered, available, and not cordoned."""

from collections.abc import Callable
from typing import Final

from dynctl.documents.workers import CORDONED
from dynctl.health import conditions as codes
from dynctl.serving.routing.service_health import ServiceHealth
from router_core import (
    Applied,
    Change,
    Router,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)

#: Workers that the operator may take out of routing at a time.
MAX_CORDONED: Final = 4_096


class Membership:
    """The workers of a router. ``apply`` applies a change to it; ``health`` shows cordons, and
    forgets the conditions of workers that left."""

    def __init__(
        self, router: Router, apply: Callable[[Change], Applied], health: ServiceHealth
    ) -> None:
        self._router = router
        self._apply = apply
        self._health = health
        #: Names of workers that the operator took out of routing, in that order.
        self.cordoned: dict[str, None] = {}
        #: Worker id -> why it is not routable, apart from a cordon.
        self._problems: dict[int, str] = {}

    def upsert(self, worker: Worker) -> Applied:
        applied = self._apply(WorkerUpserted(worker))
        if applied.ok and worker.name in self.cordoned:
            self._show_cordon(worker)
        return applied

    def remove(self, worker_id: int) -> Applied:
        worker = self._router.registry.get(worker_id)
        applied = self._apply(WorkerLost(worker_id))
        self._problems.pop(worker_id, None)
        if worker is not None:
            self._health.conditions.forget(worker.name)
            if worker.model not in self._router.registry.models():
                self._health.conditions.forget(worker.model)
            self._health.changed()
        return applied

    def set_available(self, worker_id: int, reason: str | None) -> Applied:
        """``reason``: why the worker is not routable; None: it is routable again, unless it is
        cordoned."""
        if reason is None:
            self._problems.pop(worker_id, None)
        else:
            self._problems[worker_id] = reason
        worker = self._router.registry.get(worker_id)
        if worker is not None and worker.name in self.cordoned:
            reason = CORDONED if reason is None else f"{CORDONED}; {reason}"
        return self._apply(WorkerAvailability(worker_id, reason))

    def cordon(self, name: str, *, cordoned: bool) -> None:
        """Take the worker of this name out of routing, or put it back.

        Its requests go on. The cordon holds for the name while this process runs, also when the
        worker leaves and returns. Raises ValueError for more than :data:`MAX_CORDONED` names.
        """
        if not cordoned:
            self.cordoned.pop(name, None)
            self._health.clear_condition(codes.WORKER_CORDONED, name)
        elif len(self.cordoned) >= MAX_CORDONED:
            raise ValueError(f"{MAX_CORDONED:,} workers are cordoned, no more are")
        else:
            self.cordoned[name] = None
        worker = self._router.registry.by_name(name)
        if worker is not None:
            self._show_cordon(worker)
        self._health.changed()

    def _show_cordon(self, worker: Worker) -> None:
        self.set_available(worker.worker_id, self._problems.get(worker.worker_id))
        if worker.name in self.cordoned:
            self._health.set_condition(codes.WORKER_CORDONED, worker.name, CORDONED)

    def find(self, text: str) -> Worker | None:
        """A worker by name, decimal id or hex id (``0x..``)."""
        registry = self._router.registry
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
