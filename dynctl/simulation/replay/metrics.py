"""Measurements of a replay, in memory that does not grow with the trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dynctl.documents.replay import Spread

#: The largest error of a percentile, relative to the true value: so small that a difference which
#: `--max-regress` judges is not that of two buckets.
RELATIVE_ERROR = 0.0005
_BASE = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_SCALE = 1 / math.log(_BASE)
#: What is smaller counts as this, seconds.
_LEAST = 1e-9
#: Prompt blocks that the ceiling remembers by default: about 100 bytes each.
MOST_BLOCKS = 2_000_000


class Distribution:
    """Counts in buckets whose bounds grow by 0.1 %: percentiles are at most 0.05 % off.

    Values are 0 or more. Buckets from 1 ns to 30 years are 42,000, whatever is added; those from
    1 ms to a minute 11,000. Source of the idea: DDSketch (Masson et al., 2019).
    """

    __slots__ = ("_buckets", "_zeros", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._zeros = 0
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self.smallest = math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if value < self.smallest:
            self.smallest = value
        if value <= _LEAST:
            self._zeros += 1
            return
        bucket = math.ceil(math.log(value) * _SCALE)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` (0 to 1) of all do not exceed; None without values."""
        if not self.count:
            return None
        left = max(1, math.ceil(share * self.count)) - self._zeros
        if left <= 0:
            return 0.0
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                middle = 2 * _BASE**bucket / (_BASE + 1)
                return max(self.smallest, min(middle, self.largest))
        return self.largest

    def spread(self) -> Spread:
        if not self.count:
            return Spread(0)
        p50, p90, p99 = map(self.quantile, (0.5, 0.9, 0.99))
        return Spread(self.count, self.total / self.count, p50, p90, p99, self.largest)


class Ceiling:
    """What one unlimited cache, shared by all workers, would reuse of the prompts so far.

    It remembers at least the last ``most_blocks`` / 2 distinct blocks. Until more were seen,
    ``exact`` is True; then the result is a lower bound.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._half = max(1, most_blocks // 2)
        self._new: set[int] = set()
        self._old: set[int] = set()
        self.exact = True

    def see(self, hashes: Sequence[int], most: int) -> int:
        """Leading blocks of a prompt that were seen before, at most ``most``; remembers it."""
        new, old = self._new, self._old
        low, high = 0, min(most, len(hashes))
        if old:
            while low < high:
                middle = (low + high) // 2
                if hashes[middle] in new or hashes[middle] in old:
                    low = middle + 1
                else:
                    high = middle
        else:
            while low < high:
                middle = (low + high) // 2
                if hashes[middle] in new:
                    low = middle + 1
                else:
                    high = middle
        new.update(hashes)
        if len(new) > self._half:
            self.exact = self.exact and not old
            self._old, self._new = new, set()
        return low


def imbalance(values: Iterable[float]) -> tuple[float, float]:
    """(largest / mean, standard deviation / mean) of the ranks of a role; (1, 0) without work."""
    column = list(values)
    mean = sum(column) / len(column) if column else 0.0
    if not mean:
        return 1.0, 0.0
    variance = sum((value - mean) ** 2 for value in column) / len(column)
    return max(column) / mean, math.sqrt(variance) / mean
