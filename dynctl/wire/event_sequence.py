"""Where a batch stands in its stream: next, after a hole, seen before, late, or from a new process.

Pure: sequence numbers, digests and the engine's own timestamps in, a verdict out.

Going back in sequence has three possible causes. The same bytes under the same number are a
duplicate. Other bytes under a number that was seen are a new process, since an engine never reuses
a number. Where the old bytes are no longer known, the engine's clock decides: an older timestamp
than the last one applied is a straggler, a newer one a new process. After a lost connection the
clock is not trusted (it may have been set back, or belong to another host), so there it is a new
process.
"""

from enum import Enum

_REMEMBERED = 256  # digests of the last applied batches, about 30 KB a stream


class Place(Enum):
    NEXT = "next"
    GAP = "gap"
    DUPLICATE = "duplicate"
    LATE = "late"
    RESTART = "restart"


class EventSequence:
    """Follows the sequence numbers of one publisher, which count from 0."""

    def __init__(self) -> None:
        self.last_seq: int | None = None
        self._last_ts = float("-inf")
        self._digests: dict[int, int] = {}

    @property
    def expected(self) -> int:
        """The number that the next batch must have."""
        return 0 if self.last_seq is None else self.last_seq + 1

    def place(self, seq: int, digest: int, ts: float | None, *, reconnected: bool) -> Place:
        """Where a batch stands. ``digest`` identifies its bytes; ``ts`` is the engine's time in
        seconds, None when the batch is unreadable; ``reconnected`` says that the connection broke
        since the last batch that followed on."""
        if seq == self.expected:
            return Place.NEXT
        if seq > self.expected:
            return Place.GAP
        known = self._digests.get(seq)
        if known is not None:
            return Place.DUPLICATE if known == digest else Place.RESTART
        if reconnected or (ts is not None and ts > self._last_ts):
            return Place.RESTART
        return Place.LATE

    def is_last(self, seq: int, digest: int) -> bool:
        """Whether these are the very bytes that were applied last."""
        return seq == self.last_seq and self._digests.get(seq) == digest

    def advance(self, seq: int, digest: int, ts: float | None) -> int:
        """Take ``seq`` as applied; returns how many numbers before it were skipped."""
        skipped = seq - self.expected
        self.last_seq = seq
        self._digests[seq] = digest
        # Holes leave old entries behind, so the size is held by age of insertion, not by number.
        while len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]
        if ts is not None:
            self._last_ts = max(self._last_ts, ts)
        return skipped

    def reset(self) -> None:
        """Forget everything: a new process counts from 0."""
        self.last_seq = None
        self._last_ts = float("-inf")
        self._digests.clear()
