"""Decisions of a live Dynamo, joined from the winners of their hops.

Replica-sync events carry the worker that a frontend chose; a frontend's log has a line for each
winner. Neither has the other candidates, so every decision here is marked as incomplete.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from dynctl.documents.fleet_load import Transfer
from dynctl.documents.route_result import Ref
from dynctl.documents.snapshot import DecisionLine
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequenceEvent
from dynctl.wire.dynamo.frontend_log import RefusedLine, SelectedLine
from router_core import Role, Worker

KEPT: Final = 500
EVENTS: Final = "replica-sync events"
LOG: Final = "frontend log"


class DecisionJoin:
    """The last decisions. ``worker_of`` returns a registered worker; ``wall``: seconds since the
    epoch, for events and lines without a time."""

    def __init__(
        self, worker_of: Callable[[int], Worker | None], wall: Callable[[], float]
    ) -> None:
        self._worker_of = worker_of
        self._wall = wall
        self._lines: OrderedDict[str, DecisionLine] = OrderedDict()
        self._transfers: Counter[tuple[str, str, bool]] = Counter()
        self._nameless = 0
        #: Origin (EVENTS, LOG) -> number of hops.
        self.hops: Counter[str] = Counter()

    def lines(self) -> tuple[DecisionLine, ...]:
        """Newest first."""
        return tuple(reversed(self._lines.values()))

    def transfers(self) -> tuple[Transfer, ...]:
        """Hand-offs, by the domain value in which they began."""
        keys = sorted({(domain, value) for domain, value, _ in self._transfers})
        return tuple(
            Transfer(*key, self._transfers[*key, False], self._transfers[*key, True])
            for key in keys
        )

    def take_sequence(self, event: SequenceEvent) -> None:
        """Take a replica-sync event: a router gave a request to a rank."""
        if isinstance(event, SequenceAdded):
            blocks = None if event.token_sequence is None else len(event.token_sequence)
            self._hop(event.request_id, event.worker_id, event.dp_rank, EVENTS, None, blocks=blocks)

    def take_line(self, read: SelectedLine | RefusedLine) -> None:
        """Take a line of a frontend's log."""
        if isinstance(read, RefusedLine):
            at = self._wall() if read.at is None else read.at
            key = self._key(read.request_id)
            known = self._lines.get(key)
            refused = known or DecisionLine(read.request_id or "-", at, LOG, complete=False)
            outcome = "all_busy" if "overloaded" in read.message else "no_eligible_worker"
            self.hops[LOG] += 1
            self._keep(
                key,
                msgspec.structs.replace(
                    refused, outcome=outcome, message=read.message, decode=None
                ),
            )
            return
        self._hop(
            read.request_id,
            read.worker_id,
            read.dp_rank,
            LOG,
            read.at,
            cost=read.logit,
            cached=None if read.cached_blocks is None else int(read.cached_blocks),
        )

    # -- inside ----------------------------------------------------------------------------

    def _hop(
        self,
        request_id: str,
        worker_id: int,
        dp_rank: int,
        source: str,
        at: float | None,
        *,
        blocks: int | None = None,
        cost: float | None = None,
        cached: int | None = None,
    ) -> None:
        self.hops[source] += 1
        worker = self._worker_of(worker_id)
        name = worker.name if worker is not None else f"{worker_id:x}"
        ref = Ref(name, worker_id, dp_rank)
        domains = dict(worker.domains) if worker is not None else {}
        key = self._key(request_id)
        known = self._lines.get(key)
        when = self._wall() if at is None else at
        line = known or DecisionLine(request_id or "-", when, source, complete=False)
        line = msgspec.structs.replace(
            line,
            model=worker.model if worker is not None else line.model,
            # Of a retried request the last decision counts.
            outcome="selected",
            message=None,
        )
        if worker is not None and worker.role is Role.PREFILL:
            line = msgspec.structs.replace(
                line,
                stage="prefill",
                prefill=ref,
                prefill_domains=domains,
                cost=cost if cost is not None else line.cost,
                cached_blocks=cached if cached is not None else line.cached_blocks,
            )
        else:
            first = line.prefill is None
            line = msgspec.structs.replace(
                line,
                stage="decode" if worker is None or worker.role is Role.DECODE else "aggregated",
                decode=ref,
                domains=domains,
                blocks=blocks if blocks is not None else line.blocks,
                cost=cost if first and cost is not None else line.cost,
                cached_blocks=cached if first and cached is not None else line.cached_blocks,
            )
            if known is None or known.decode != ref:
                self._count(line)
        self._keep(key, line)

    def _key(self, request_id: str) -> str:
        """Lines without an id cannot be joined: each is a decision of its own."""
        if request_id:
            return request_id
        self._nameless += 1
        return f"\0{self._nameless}"

    def _keep(self, key: str, line: DecisionLine) -> None:
        self._lines[key] = line
        while len(self._lines) > KEPT:
            self._lines.popitem(last=False)

    def _count(self, line: DecisionLine) -> None:
        for domain, value in line.prefill_domains.items():
            self._transfers[domain, value, line.domains.get(domain) != value] += 1
