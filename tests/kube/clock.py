"""A clock that a test moves by hand."""

NOON = 1795262400.0
"""2026-11-21 12:00:00 UTC, seconds since the epoch."""


class Clock:
    """Seconds since the epoch; stands still until it is moved."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
