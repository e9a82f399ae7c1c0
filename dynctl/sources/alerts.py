"""Alerts: a frontend's conditions, and domains that cannot serve; each with its code.

``dynctl explain`` explains the codes of findings (``DYT0901``); conditions have the names that a
frontend's log and ``/health`` use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from dynctl.documents.snapshot import Alert, Snapshot
from dynctl.documents.topology import DomainCapacity, TopologyShow
from dynctl.findings.catalogue import catalogue, conditions
from router_core import topology_of

_LEVELS: Final = ("fail", "warn")


def condition_alert(code: str, subject: str, message: str, since: float | None = None) -> Alert:
    """A condition of a frontend, as an alert."""
    entry = conditions().get(code)
    if entry is None:  # of another version
        return Alert(code, "warn", subject, message, "", since)
    return Alert(code, entry.level, subject, message, entry.fix, since)


def capacity_alerts(shown: TopologyShow) -> Iterator[Alert]:
    """Domains whose prefill workers can hand over to no decode worker, or to one only."""
    for row in shown.rows:
        for one in row.stranded:
            taint = one.requires
            place = topology_of(taint) if taint is not None else None
            where = "=".join(place) if place is not None else row.model
            named = ", ".join(one.workers[:3]) + (", .." if one.workers[3:] else "")
            yield Alert(
                "DYT0901",
                catalogue()["DYT0901"].level,
                where,
                f"{named}: {one.reason}; {one.outcome}",
                "add or revive decode workers there, or use enforcement preferred",
            )
        domain = _single_decode_domain(row)
        if domain is not None:
            yield Alert(
                "DYT0902",
                catalogue()["DYT0902"].level,
                f"{domain}={row.value}",
                "one decode worker takes all that is prefilled here: while it restarts, "
                "requests fail or wait",
                f"add a decode replica in {row.value}",
            )


def _single_decode_domain(row: DomainCapacity) -> str | None:
    """The domain that a row's prefill workers are bound to, if it has one decode worker only."""
    bound = next(
        (one.domain for one in row.policies if one.enforcement == "required" and one.domain), None
    )
    decode = row.decode.ready + row.decode.busy
    prefill = row.prefill.ready + row.prefill.busy
    if bound is None or row.stranded or decode != 1 or not prefill:
        return None
    return bound


class AlertBoard:
    """The alerts of one snapshot after the other; remembers when each one began."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float | None] = {}
        self._has_snapshot = False

    def alerts(self, snapshot: Snapshot, shown: TopologyShow) -> tuple[Alert, ...]:
        """All alerts, failures first, then the newest. ``shown``: by the transfer domain."""
        found = list(_once([*snapshot.alerts, *capacity_alerts(shown)]))
        since: dict[tuple[str, str], float | None] = {}
        for one in found:
            key = (one.code, one.subject)
            # An alert of the first snapshot began at an unknown time.
            seen = self._since.get(key, snapshot.at if self._has_snapshot else None)
            since[key] = one.since or seen
        self._since, self._has_snapshot = since, True
        dated = [msgspec.structs.replace(one, since=since[one.code, one.subject]) for one in found]
        dated.sort(key=lambda one: (_LEVELS.index(one.level), -(one.since or 0.0), one.subject))
        return tuple(dated)


def _once(alerts: Iterable[Alert]) -> Iterable[Alert]:
    """One alert for each code and subject: several frontends may report the same."""
    return {(one.code, one.subject): one for one in alerts}.values()
