"""The last minutes of every domain, for sparklines and recent shares.

Bounded: one number per bucket, a fixed number of buckets; domains without workers are dropped.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Final

from dynctl.documents.snapshot import Snapshot
from dynctl.documents.workers import WorkerRow
from router_core import Role

#: Seconds of one bucket, and buckets kept: five minutes.
BUCKET_S: Final = 5.0
BUCKETS: Final = 60
_MOST_SERIES: Final = 16_384

Key = tuple[str, str, str]
"""``(model, domain, value)``; hand-offs are not counted by model, their model is ""."""


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

    def add(self, snapshot: Snapshot) -> None:
        """Add the loads and hand-offs of a snapshot; a snapshot with a problem is ignored."""
        if snapshot.problem:
            return
        at = snapshot.at
        self._since = at if self._since is None else self._since
        seen = _sums(snapshot.workers)
        seen["local"] = {("", one.domain, one.value): one.local for one in snapshot.transfers}
        seen["crossing"] = {("", one.domain, one.value): one.crossing for one in snapshot.transfers}
        for name, values in seen.items():
            table = self._series[name]
            for key, value in values.items():
                series = table.get(key)
                if series is None:
                    series = table[key] = Series()
                series.add(at, value)
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
