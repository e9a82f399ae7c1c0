"""The last minutes of every domain and of all requests, for sparklines and recent shares.

Bounded: one number per bucket, a fixed number of buckets; domains without workers are dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import UnsetType

from dynctl.documents.fleet_load import Rates, Traffic, rates_between
from dynctl.documents.snapshot import Snapshot
from dynctl.documents.workers import WorkerRow
from router_core import Role

#: Seconds of one bucket, and buckets kept: five minutes.
BUCKET_S: Final = 5.0
BUCKETS: Final = 60
_MOST_SERIES: Final = 16_384
#: Seconds between the two clocks from which on one of them was set.
JUMP_S: Final = 2.0

Key = tuple[str, str, str]
"""``(model, domain, value)``; hand-offs are not counted by model, their model is ""."""


#: Seconds that the rates of requests cover.
RATE_S: Final = 10.0


class Series:
    """A number per time bucket; a bucket keeps its last number."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=BUCKETS)

    def add(self, at: float, value: float) -> None:
        bucket = int(at // BUCKET_S)
        if self._points and self._points[-1][0] >= bucket:
            self._points[-1] = (self._points[-1][0], value)
        else:
            self._points.append((bucket, value))

    def last(self, count: int, step: int, at: float) -> list[float | None]:
        """``count`` values up to ``at``, oldest first, each the largest of ``step`` buckets; None
        where there is no value."""
        end = int(at // BUCKET_S) // step
        found: dict[int, float] = {}
        for bucket, value in self._points:
            found[bucket // step] = max(value, found.get(bucket // step, value))
        return [found.get(place) for place in range(end - count + 1, end + 1)]

    def oldest(self) -> float:
        return self._points[0][1]


class History:
    """Keeps numbers of snapshots. Add every snapshot, in order."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Key, Series]] = defaultdict(dict)
        self._since: float | None = None
        #: When the last snapshot was read, by the wall clock and by the monotonic one.
        self._read: tuple[float, float] | None = None
        #: Readings of the requests, one a second.
        self._times: list[float] = []
        self._traffic: list[Traffic] = []
        self._restarts = 0

    def clear(self) -> None:
        """Forget everything."""
        self._series.clear()
        self._since = None
        self._times.clear()
        self._traffic.clear()

    def rates(self, at: float) -> Rates | None:
        """The rates of the last :data:`RATE_S` seconds; None before there are two readings."""
        return self._rates(at - RATE_S, at)

    def trend(self, count: int, step: float, at: float) -> list[Rates | None]:
        """``count`` rates up to ``at``, oldest first, of ``step`` seconds each; None where the
        requests were not read."""
        end = math.ceil(at / step) * step
        return [
            self._rates(end - (place + 1) * step, end - place * step)
            for place in reversed(range(count))
        ]

    def _rates(self, since: float, until: float) -> Rates | None:
        """From the last reading until ``since``, or the first one, to the last until ``until``."""
        times = self._times
        last = bisect_right(times, until) - 1
        first = max(0, bisect_right(times, since) - 1)
        if last <= first or times[last] <= since:
            return None
        return rates_between(self._traffic[first], self._traffic[last], times[last] - times[first])

    def _add_traffic(self, at: float, traffic: Traffic) -> None:
        times, known = self._times, self._traffic
        if known and traffic.requests < known[-1].requests:  # a frontend restarted
            times.clear()
            known.clear()
        # Only one reading a second is kept, and the first one as it is.
        if len(times) > 1 and at - times[-2] < 1.0:
            times[-1], known[-1] = at, traffic
            return
        times.append(at)
        known.append(traffic)
        if len(times) > 2 * BUCKET_S * BUCKETS:
            del times[: len(times) // 2]
            del known[: len(known) // 2]

    def add(self, snapshot: Snapshot, now: float | None = None) -> None:
        """Add the loads and hand-offs of a snapshot; a snapshot with a problem is ignored.

        ``now``: monotonic seconds, None where they are not compared. If the wall clock was set, or
        the machine slept, it is unknown how long ago the last readings were: the history starts
        again.
        """
        if snapshot.problem:
            return
        at = snapshot.at
        if self._is_interrupted(snapshot, now):
            self.clear()
        self._restarts = snapshot.restarts
        self._read = None if now is None else (at, now)
        self._since = at if self._since is None else self._since
        traffic = snapshot.header.traffic
        if not isinstance(traffic, UnsetType):
            self._add_traffic(at, traffic)
        sums = _sums(snapshot.workers)
        for name in ("local", "crossing"):
            sums[name] = {("", t.domain, t.value): getattr(t, name) for t in snapshot.transfers}
        for name, values in sums.items():
            self._add_values(self._series[name], values, at)

    def _is_interrupted(self, snapshot: Snapshot, now: float | None) -> bool:
        """Whether the clock jumped, or counts come from another process than before."""
        if snapshot.restarts != self._restarts:
            return True
        if now is None or self._read is None:
            return False
        return abs((snapshot.at - self._read[0]) - (now - self._read[1])) > JUMP_S

    @staticmethod
    def _add_values(table: dict[Key, Series], values: Mapping[Key, float], at: float) -> None:
        for key, value in values.items():
            if key not in table:
                table[key] = Series()
            table[key].add(at, value)
        if len(table) > _MOST_SERIES:
            for gone in table.keys() - values.keys():
                del table[gone]

    def kv_share(self, key: Key, count: int, step: int, at: float) -> list[float | None]:
        """Used share of KV blocks (0..1) of a domain's generating workers: ``count`` values of
        ``step`` buckets each."""
        return self._last("kv", key, count, step, at)

    def prefill_tokens(self, key: Key, count: int, step: int, at: float) -> list[float | None]:
        """Active prefill tokens of a domain."""
        return self._last("prefill", key, count, step, at)

    def watched(self, at: float) -> float:
        """Seconds that :meth:`recent_transfers` covers, at most five minutes."""
        return 0.0 if self._since is None else min(at - self._since, BUCKET_S * BUCKETS)

    def recent_transfers(self, snapshot: Snapshot) -> dict[tuple[str, str], tuple[int, int]]:
        """(domain, value) -> hand-offs of the last minutes that stayed and that crossed.

        A count that decreased is from a restarted frontend and starts at 0.
        """
        return {
            (one.domain, one.value): (
                self._more("local", one.domain, one.value, one.local),
                self._more("crossing", one.domain, one.value, one.crossing),
            )
            for one in snapshot.transfers
        }

    def _last(self, name: str, key: Key, count: int, step: int, at: float) -> list[float | None]:
        series = self._series[name].get(key)
        return [None] * count if series is None else series.last(count, step, at)

    def _more(self, name: str, domain: str, value: str, now: int) -> int:
        series = self._series[name].get(("", domain, value))
        before = 0 if series is None else int(series.oldest())
        return now if before > now else now - before


def _sums(workers: Iterable[WorkerRow]) -> dict[str, dict[Key, float]]:
    """Used share of KV blocks of generating workers, and prefill tokens; of available workers."""
    used: dict[Key, int] = defaultdict(int)
    total: dict[Key, int] = defaultdict(int)
    prefill: dict[Key, float] = defaultdict(float)
    for row in workers:
        if row.status != "ready":
            continue
        size = row.runtime_config.get("total_kv_blocks") if row.role != Role.PREFILL else None
        tokens = held = have = 0
        for rank in row.ranks:
            tokens += rank.active_prefill_tokens
            reported = rank.reported.kv_used_blocks
            if reported is not None and isinstance(size, int):
                held, have = held + reported, have + size
        for domain, value in row.domains.items():
            key = (row.model, domain, value)
            prefill[key] += tokens
            if have:
                used[key] += held
                total[key] += have
    return {"prefill": prefill, "kv": {key: used[key] / total[key] for key in total}}
