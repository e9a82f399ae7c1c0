"""The rows of the domains panel: capacity and policy as in `topology show`, and live numbers.

Pure. :mod:`dynctl.planning.domain_capacity` alone decides which workers are stranded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from time import perf_counter
from typing import Any, Final

from dynctl.documents.snapshot import DomainRow, DomainView, Snapshot, stale_reason
from dynctl.documents.topology import TopologyShow
from dynctl.documents.workers import WorkerRow
from dynctl.planning.domain_capacity import topology_show


class DomainBoard:
    """Makes views of snapshots, one after the other; remembers capacity for a short time.

    Computing which workers may hand over to which grows with the square of the fleet. It is done
    again when a worker is added, removed, changes its card, or becomes busy or ready; changes of
    numbers alone wait until the work is a small share of the time. ``clock``: seconds, monotonic.
    """

    #: At most this share of a core where only numbers changed.
    SHARE: Final = 0.02

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._known: dict[str | None, _Known] = {}

    def view(
        self,
        snapshot: Snapshot,
        domain: str | None = None,
        transfers: Mapping[tuple[str, str], tuple[int, int]] | None = None,
    ) -> DomainView:
        """The domains of a snapshot. ``domain``: what to group by; None, or one that no worker
        publishes any more, is the transfer domain. ``transfers``: those of the time that is
        shown, None for all of the snapshot."""
        published = {name for row in snapshot.workers for name in row.domains}
        chosen = domain if domain in published else None
        return domain_view(snapshot, self._capacity(snapshot, chosen), transfers)

    def capacity(self, snapshot: Snapshot) -> TopologyShow:
        """The capacity by the transfer domain, which alerts are about, whatever is shown."""
        return self._capacity(snapshot, None)

    def _capacity(self, snapshot: Snapshot, domain: str | None) -> TopologyShow:
        states = [(row.worker_id, row.status, row.busy) for row in snapshot.workers]
        cards = [row.runtime_config for row in snapshot.workers]
        now, known = self._clock(), self._known.get(domain)
        if (
            known is None
            or now >= known.again_at
            or (snapshot.settings, states) != (known.settings, known.states)
            or not all(map(is_, cards, known.cards))
        ):
            shown = topology_show(
                snapshot.source, snapshot.workers, snapshot.settings, domain=domain
            )
            done = self._clock()
            again_at = done + (done - now) / self.SHARE
            known = _Known(shown, snapshot.settings, states, cards, again_at)
            # Keep the transfer domain and the domain that is shown.
            self._known = {
                key: one for key, one in self._known.items() if key is None or key == domain
            }
            self._known[domain] = known
        return known.shown


@dataclass(frozen=True, slots=True)
class _Known:
    """Capacity, and what it was computed from. ``again_at``: when its numbers are too old."""

    shown: TopologyShow
    settings: dict[str, Any]
    states: list[tuple[int, str, bool]]
    cards: list[dict[str, Any]]
    again_at: float


def domain_view(
    snapshot: Snapshot,
    shown: TopologyShow,
    transfers: Mapping[tuple[str, str], tuple[int, int]] | None = None,
) -> DomainView:
    """Each domain of ``shown``: its capacity and live numbers."""
    if transfers is None:
        transfers = {
            (transfer.domain, transfer.value): (transfer.local, transfer.crossing)
            for transfer in snapshot.transfers
        }
    counted = snapshot.unknown("transfers") is None
    groups: dict[tuple[str, str | None], list[WorkerRow]] = {}
    for row in snapshot.workers:
        value = row.domains.get(shown.domain) if shown.domain else None
        groups.setdefault((row.model, value), []).append(row)
    rows = []
    for capacity in shown.rows:
        members = groups.get((capacity.model, capacity.value), [])
        reported = [
            rank.reported.waiting_requests
            for row in members
            if row.status == "ready"
            for rank in row.ranks
            if rank.reported.waiting_requests is not None
        ]
        local = crossing = None
        if counted and shown.domain is not None and capacity.value is not None:
            local, crossing = transfers.get((shown.domain, capacity.value), (0, 0))
        rows.append(
            DomainRow(
                capacity,
                stale=_stale(members, snapshot.load_every_s),
                waiting=sum(reported) if reported else None,
                waiting_ranks=len(reported),
                local=local,
                crossing=crossing,
            )
        )
    return DomainView(shown.domain, tuple(shown.domains), tuple(rows), shown)


def _stale(members: Sequence[WorkerRow], every_s: float | None) -> dict[str, int]:
    return dict(
        Counter(
            row.role
            for row in members
            if row.status == "ready" and stale_reason(row, every_s) is not None
        )
    )
