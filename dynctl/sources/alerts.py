"""Alerts: a frontend's conditions, and domains that cannot serve; each with its code.

``dynctl explain`` explains the codes of findings (``DYT0901``); conditions have the names that a
frontend's log and ``/health`` use.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Final

import msgspec

from dynctl.documents.snapshot import Alert, Snapshot
from dynctl.documents.topology import TopologyShow
from dynctl.health.conditions import MODEL_NOT_SERVED
from dynctl.health.evaluation import capacity_conditions, condition_texts

_LEVELS: Final = ("fail", "warn")


def condition_alert(code: str, subject: str, message: str, since: float | None = None) -> Alert:
    """A condition as an alert, with the level and the fix of its code."""
    level, _, fix = condition_texts(code)
    return Alert(code, level, subject, message, fix, since)


def capacity_alerts(shown: TopologyShow, refused: Container[str] = frozenset()) -> Iterator[Alert]:
    """Domains whose prefill workers can hand over to no decode worker, or to one only.

    ``refused``: models that are not served; none of their domains is reported.
    """
    for condition in capacity_conditions(shown, refused):
        yield condition_alert(*condition)


class AlertBoard:
    """The alerts of one snapshot after the other; remembers when each one began."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float | None] = {}
        self._has_snapshot = False

    def alerts(self, snapshot: Snapshot, shown: TopologyShow) -> tuple[Alert, ...]:
        """All alerts, failures first, then the newest. ``shown``: by the transfer domain."""
        refused = {alert.subject for alert in snapshot.alerts if alert.code == MODEL_NOT_SERVED}
        alerts = list(_once([*snapshot.alerts, *capacity_alerts(shown, refused)]))
        since: dict[tuple[str, str], float | None] = {}
        for alert in alerts:
            key = (alert.code, alert.subject)
            # An alert of the first snapshot began at an unknown time.
            seen = self._since.get(key, snapshot.at if self._has_snapshot else None)
            since[key] = alert.since or seen
        self._since, self._has_snapshot = since, True
        dated = [
            msgspec.structs.replace(alert, since=since[alert.code, alert.subject])
            for alert in alerts
        ]
        dated.sort(
            key=lambda alert: (_LEVELS.index(alert.level), -(alert.since or 0.0), alert.subject)
        )
        return tuple(dated)


def _once(alerts: Iterable[Alert]) -> Iterable[Alert]:
    """The first alert for each code and subject: several frontends may report the same."""
    first: dict[tuple[str, str], Alert] = {}
    for alert in alerts:
        first.setdefault((alert.code, alert.subject), alert)
    return first.values()
