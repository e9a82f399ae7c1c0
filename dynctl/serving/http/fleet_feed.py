"""``GET /v1/fleet``: the fleet's load and state, for those who look once a second.

Loads, counters and conditions each time; the workers' cards only where the asker lacks them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from dynctl import version
from dynctl.documents.fleet_load import FleetLoad, Transfer, WorkerLoad
from dynctl.documents.workers import NOBODY_WAITS, WorkerRow, rank_rows, worker_row
from dynctl.serving.http.json_answers import json_answer
from dynctl.serving.service import RoutingService
from dynctl.serving.telemetry.decision_memory import DecisionMemory
from router_core import Worker

PATH = "/v1/fleet"

#: (domain, value) -> hand-offs that stayed and that crossed.
Transfers = Mapping[tuple[str, str], tuple[int, int]]


class FleetFeed:
    """Reads a service. ``others``: rows of engines that are not registered (yet).

    ``waiting``: worker id -> rank -> requests that wait in the engine; ``in_flight`` counts
    the process's own requests; ``probe_s``: seconds between two readings of an engine's load.
    """

    def __init__(
        self,
        service: RoutingService,
        memory: DecisionMemory,
        *,
        transfers: Callable[[], Transfers] = dict,
        others: Callable[[], Sequence[WorkerRow]] = tuple,
        waiting: Callable[[], Mapping[int, Mapping[int, int]]] = dict,
        in_flight: Callable[[], int] = lambda: 0,
        probe_s: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._service = service
        self._memory = memory
        self._transfers = transfers
        self._others = others
        self._waiting = waiting
        self._in_flight = in_flight
        self._probe_s = probe_s
        # Told apart from the sets of the process that listened here before.
        self._process = secrets.token_hex(4)
        self._sets = 0
        self._workers: list[Worker] = []
        self._unregistered: tuple[tuple[int, str], ...] = ()

    def read(self, known: str | None = None) -> FleetLoad:
        """The fleet now. ``known``: the set of cards that the asker has."""
        service = self._service
        router, now = service.router, service.clock()
        registry, waiting = router.registry, self._waiting()
        others = self._others()
        workers = list(registry)
        cards = self._cards(workers, others)
        loads = []
        for worker in workers:
            waits = waiting.get(worker.worker_id, NOBODY_WAITS)
            ranks = rank_rows(router, worker, now, waits)
            reason = registry.unavailable_reason(worker.worker_id)
            status = "ready" if reason is None else "unavailable"
            busy = bool(ranks) and all(rank.busy for rank in ranks)
            loads.append(WorkerLoad(worker.worker_id, ranks, status, reason, busy))
        loads += [WorkerLoad(row.worker_id, [], row.status, row.reason, row.busy) for row in others]
        return FleetLoad(
            at=service.wall(),
            version=version(),
            cards=cards,
            loads=loads,
            workers=None
            if known == cards
            else [*(worker_row(worker, []) for worker in workers), *others],
            conditions=list(service.conditions),
            transfers=[
                Transfer(*key, *counts) for key, counts in sorted(self._transfers().items())
            ],
            thresholds={
                model: router.busy.thresholds(model).to_dict() for model in service.models()
            },
            probe_s=self._probe_s(),
            in_flight=self._in_flight(),
            recorded=self._memory.recorded,
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/fleet[?cards=SET]``."""
        return json_answer(self.read(request.query.get("cards")))

    def _cards(self, workers: list[Worker], others: Sequence[WorkerRow]) -> str:
        """The name of this set of cards; a worker that publishes another one is another object."""
        unregistered = tuple((row.worker_id, row.name) for row in others)
        same = (
            len(workers) == len(self._workers)
            and all(map(_same, workers, self._workers))
            and unregistered == self._unregistered
        )
        if not same:
            self._workers, self._unregistered = workers, unregistered
            self._sets += 1
        return f"{self._process}-{self._sets}"


def _same(one: Worker, other: Worker) -> bool:
    return one is other
