"""Rows of a router in this process, as often as somebody looks: the cards are made once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynctl.documents.workers import NOBODY_WAITS, WorkerRow, rank_rows, worker_row
from router_core.router import Router
from router_core.workers import Worker


class RowMaker:
    """Remembers the row of every card, so that a card that did not change is the same object."""

    def __init__(self) -> None:
        self._cards: dict[int, tuple[Worker, WorkerRow]] = {}

    def rows(
        self, router: Router, now: float, waiting: Mapping[int, Mapping[int, int]] | None = None
    ) -> tuple[WorkerRow, ...]:
        """One row a worker. ``waiting``: worker id -> rank -> requests that wait in its engine."""
        waiting = waiting or {}
        cards: dict[int, tuple[Worker, WorkerRow]] = {}
        found = []
        for worker in router.registry:
            known = self._cards.get(worker.worker_id)
            if known is None or known[0] is not worker:
                known = (worker, worker_row(worker, []))
            cards[worker.worker_id] = known
            ranks = rank_rows(router, worker, now, waiting.get(worker.worker_id, NOBODY_WAITS))
            reason = router.registry.unavailable_reason(worker.worker_id)
            found.append(
                msgspec.structs.replace(
                    known[1],
                    ranks=ranks,
                    status="ready" if reason is None else "unavailable",
                    reason=reason,
                    busy=bool(ranks) and all(rank.busy for rank in ranks),
                )
            )
        self._cards = cards
        return tuple(found)
