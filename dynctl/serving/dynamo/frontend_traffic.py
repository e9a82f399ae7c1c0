"""What clients of a live Dynamo's frontends get, from the counters of their ``GET /metrics``."""

from __future__ import annotations

from dynctl.documents.fleet_load import Traffic, ended_requests
from dynctl.wire.dynamo.frontend_metrics import RequestTotals, buckets


class FrontendTraffic:
    """Adds up what each frontend counted between two readings, so that the sum never falls.

    What a frontend counted before its first reading is not in the sum. The first reading after a
    restart (a counter fell) and after a reading without an answer is a first reading again.
    """

    def __init__(self) -> None:
        self._last: dict[str, RequestTotals] = {}
        self._sum = Traffic()

    @property
    def total(self) -> Traffic | None:
        """The sum; None where no frontend answered the last time."""
        return self._sum if self._last else None

    def take(self, frontend: str, totals: RequestTotals) -> None:
        """Take a reading of one frontend. One that counts no requests, and has times of some,
        counts as no answer."""
        if not totals.ended and any(any(row.values()) for row in totals.latencies.values()):
            return self.lost(frontend)
        before, self._last[frontend] = self._last.get(frontend), totals
        if before is not None and not counters_fell(before, totals):
            self._sum += _traffic_between(before, totals)

    def lost(self, frontend: str) -> None:
        """The frontend did not answer, or is gone."""
        self._last.pop(frontend, None)


def counters_fell(before: RequestTotals, after: RequestTotals) -> bool:
    """Whether the process restarted between two readings: counters never fall otherwise."""
    return (
        any(after.ended.get(kind, 0.0) < number for kind, number in before.ended.items())
        or any(after.tokens.get(kind, 0.0) < number for kind, number in before.tokens.items())
        or any(
            after.latencies.get(kind, {}).get(edge, 0.0) < number
            for kind, row in before.latencies.items()
            for edge, number in row.items()
        )
    )


def _traffic_between(before: RequestTotals, after: RequestTotals) -> Traffic:
    ended = ended_requests(
        {kind: number - before.ended.get(kind, 0.0) for kind, number in after.ended.items()}
    )
    times = after.latencies.get("ttft", {})
    earlier = before.latencies.get("ttft", {})
    edges, counts = buckets(
        {edge: number - earlier.get(edge, 0.0) for edge, number in times.items()}
    )
    both = after.tokens.keys() >= {"cached", "input"}
    tokens = {
        kind: int(number - before.tokens.get(kind, 0.0)) if both else 0
        for kind, number in after.tokens.items()
    }
    return Traffic(
        ended.requests,
        ended.errors,
        ended.refused,
        edges,
        tuple(int(count) for count in counts),
        tokens.get("input", 0),
        tokens.get("cached", 0),
        ended.clients,
    )
