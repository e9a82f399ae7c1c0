"""The sequence of a publisher's messages: which one is next, after a gap, duplicate, late or new.

Pure: numbers, digests and the publisher's timestamps in, a verdict out. Every reader of numbered
events uses it: engines' batches, messages of the event plane, router events.

A number below the expected one has three possible causes. The same bytes under the same number are
a duplicate. Other bytes under a known number come from a new process, because a publisher never
reuses a number. If the bytes are no longer known, the publisher's clock decides: a timestamp before
the last applied one is a late message, a later one a new process. After a lost connection the clock
is not trusted (it may have been set back, or belong to another host), so there it is a new process.
Without digests and timestamps a number below the expected one is always late.

After a lost connection the expected number proves nothing either: a new process may have published
as many messages meanwhile. So its verdict is UNPROVEN there.
"""

from enum import Enum
from typing import Final

MOST_MISSING: Final = 2**32
_REMEMBERED: Final = 256  # digests of the last applied messages, about 30 KB for each sequence


class Verdict(Enum):
    NEXT = "next"
    UNPROVEN = "unproven"
    """The expected number, of the same process or of a new one."""
    GAP = "gap"
    DUPLICATE = "duplicate"
    LATE = "late"
    RESTART = "restart"


class EventSequence:
    """The sequence of one publisher.

    ``first``: the first number of a publisher. ``late_join``: the reader may join late, so whatever
    number arrives first is the next one. ``restart_run``: this many late numbers in ascending order
    count as a restart (a publisher whose clock was set back while it restarted); None: never.
    """

    def __init__(
        self, first: int = 0, *, late_join: bool = False, restart_run: int | None = None
    ) -> None:
        self.last: int | None = None
        self._first = first
        self._joining = late_join
        self._restart_run = restart_run
        self._last_timestamp = float("-inf")
        self._digests: dict[int, int] = {}
        self._late_run = 0
        self._last_late = -1

    @property
    def next_number(self) -> int:
        """The next number."""
        return self._first if self.last is None else self.last + 1

    @property
    def last_digest(self) -> int | None:
        """The digest of the last applied message, if it was given."""
        return None if self.last is None else self._digests.get(self.last)

    def missing_before(self, number: int) -> int:
        """How many numbers are missing between the last applied one and ``number``.

        At most MOST_MISSING: a publisher that jumps by 9e18 must not overflow any sum of these.
        """
        return 0 if self._joining else min(MOST_MISSING, max(0, number - self.next_number))

    def judge(
        self,
        number: int,
        digest: int | None = None,
        timestamp: float | None = None,
        *,
        reconnected: bool = False,
    ) -> Verdict:
        """The position of a message.

        ``digest`` identifies its bytes; ``timestamp`` is the publisher's time in seconds, None if
        unknown; ``reconnected``: the connection broke since the last message that was applied.
        """
        if self._joining or number == self.next_number:
            seen = self.last is not None and not self._joining
            return Verdict.UNPROVEN if reconnected and seen else Verdict.NEXT
        if number > self.next_number:
            return Verdict.GAP
        known = self._digests.get(number)
        if known is not None:
            return Verdict.DUPLICATE if known == digest else Verdict.RESTART
        return self._judge_late(number, timestamp, reconnected)

    def _judge_late(self, number: int, timestamp: float | None, reconnected: bool) -> Verdict:
        """The position of a number that is before the next one, and whose message is unknown."""
        if reconnected or (timestamp is not None and timestamp > self._last_timestamp):
            return Verdict.RESTART
        self._late_run = self._late_run + 1 if number == self._last_late + 1 else 1
        self._last_late = number
        restarted = self._restart_run is not None and self._late_run >= self._restart_run
        return Verdict.RESTART if restarted else Verdict.LATE

    def advance(
        self, number: int, digest: int | None = None, timestamp: float | None = None
    ) -> int:
        """Take ``number`` as applied; returns how many numbers before it are missing."""
        missing = self.missing_before(number)
        self.last = number
        self._joining = False
        self._late_run = 0
        if digest is not None:
            self._digests[number] = digest
        # Gaps leave old entries, so the size is bounded by age of insertion, not by number.
        while len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]
        if timestamp is not None:
            self._last_timestamp = max(self._last_timestamp, timestamp)
        return missing

    @property
    def joining(self) -> bool:
        """Whether the next number may be any."""
        return self._joining

    def join(self) -> None:
        """Everything so far is applied, and its last number is unknown: the next may be any."""
        self.reset()
        self._joining = True

    def reset(self) -> None:
        """Forget everything: a new process starts again at the first number."""
        self.last = None
        self._joining = False
        self._last_timestamp = float("-inf")
        self._digests.clear()
        self._late_run = 0
