"""When an engine that answers its probes gets no requests, and how long a request waits for output.

Without IO and without a clock: every call has the time, in seconds of one monotonic clock.
"""

from typing import Final, Literal

from dynctl.serving.routing.config import EjectionLimits

#: Seconds to the first output that are never too long, plus a second per this many tokens.
_LEAST_S: Final = 10.0
_TOKENS_A_SECOND: Final = 1000.0
#: How often the slowest measured first output fits into the time-out.
_MARGIN: Final = 8.0
#: How much of the slowest measurement is left after one more.
_DECAY: Final = 0.99
#: A worker that stayed in for this many of its last pauses starts again with the first one.
_FORGOTTEN_PAUSES: Final = 2.0


class Ejection:
    """One engine as its requests see it: ``in``, ``out`` for a pause, or on ``trial``.

    On trial it gets one request: an output ends the ejection, a failure starts a longer pause. A
    trial without a result is followed by another one after the length of the last pause.
    """

    __slots__ = ("_back_at", "_limits", "_pause_s", "_row", "_trial_at", "_until", "cause", "state")

    def __init__(self, limits: EjectionLimits) -> None:
        self.state: Literal["in", "out", "trial"] = "in"
        self.cause = ""
        self._limits = limits
        self._row = 0
        self._pause_s = 0.0
        self._until = 0.0
        self._back_at: float | None = None
        self._trial_at: float | None = None

    @property
    def open(self) -> bool:
        """Whether it may get a request now: in, or on trial without one."""
        return self.state == "in" or (self.state == "trial" and self._trial_at is None)

    def reason(self) -> str | None:
        """Why it gets no requests; None if it may get one."""
        if self.open:
            return None
        if self.state == "trial":
            return f"on trial with one request after {self.cause}"
        return f"ejected for {self._pause_s:g} s: {self.cause}"

    def failed(self, now: float, cause: str, *, silent: bool = False) -> bool:
        """A request failed; returns whether that ejected the engine. ``silent``: nothing came from
        it since the request was sent, which ejects at once."""
        if self.state == "out" or not self._limits.failures:
            return False
        self._row += 1
        if self.state == "in" and not silent and self._row < self._limits.failures:
            return False
        row = f"{self._row} requests in a row failed, the last one: " if self._row > 1 else ""
        self.cause = row + cause
        forgotten = _FORGOTTEN_PAUSES * self._pause_s
        fresh = self.state == "in" and (self._back_at is None or now - self._back_at >= forgotten)
        longer = self._limits.pause_s if fresh else 2 * self._pause_s
        self._pause_s = min(self._limits.max_pause_s, longer)
        self.state, self._until = "out", now + self._pause_s
        return True

    def answered(self, now: float) -> bool:
        """An output arrived; returns whether that ended an ejection."""
        self._row = 0
        if self.state == "in":
            return False
        self.state, self._back_at, self.cause = "in", now, ""
        return True

    def sent(self, now: float) -> bool:
        """A request is sent to it; returns whether it is the one on trial."""
        if self.state != "trial" or self._trial_at is not None:
            return False
        self._trial_at = now
        return True

    def wait_s(self, now: float) -> float | None:
        """Seconds until :meth:`tick` changes something; None if nothing does."""
        if self.state == "out":
            return max(0.0, min(self._pause_s, self._until - now))
        if self.state == "trial" and self._trial_at is not None:
            return max(0.0, min(self._pause_s, self._trial_at + self._pause_s - now))
        return None

    def tick(self, now: float) -> bool:
        """Begin a trial that is due; returns whether one began."""
        wait = self.wait_s(now)
        if wait is None or wait > 0:
            return False
        self.state, self._trial_at = "trial", None
        return True


class FirstOutputs:
    """The time-out of a request's first output, from those that were measured, by model.

    A prompt takes longer the more tokens it has and the more wait before it, so seconds are
    measured per 1,000 tokens (and one more thousand for what every request takes). The time-out is
    8 times the slowest recent one, at least 10 s and a second per 1,000 tokens.
    """

    def __init__(self, most_s: float, fixed_s: float | None = None) -> None:
        self._most_s = most_s
        self._fixed_s = fixed_s
        self._slowest: dict[str, float] = {}

    def observe(self, model: str, tokens: int, seconds: float) -> None:
        """The first output of a request with ``tokens`` before it arrived after ``seconds``."""
        pace = seconds / (1 + tokens / _TOKENS_A_SECOND)
        self._slowest[model] = max(pace, _DECAY * self._slowest.get(model, 0.0))

    def timeout_s(self, model: str, tokens: int) -> float:
        """How long to wait; the longest time while nothing is measured."""
        if self._fixed_s is not None:
            return min(self._fixed_s, self._most_s)
        slowest = self._slowest.get(model)
        if slowest is None:
            return self._most_s
        thousands = tokens / _TOKENS_A_SECOND
        return min(self._most_s, max(_LEAST_S + thousands, _MARGIN * slowest * (1 + thousands)))
