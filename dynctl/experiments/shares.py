"""What a few requests show of a share: its interval, and how likely chance alone is."""

from __future__ import annotations

from math import comb, sqrt
from typing import Final

_DEVIATIONS: Final = 1.96
"""Standard deviations of a 95 % interval."""


def share_interval(hits: int, number: int) -> tuple[float, float]:
    """The 95 % interval (Wilson) of the share 0..1 of which ``hits`` of ``number`` are a sample."""
    if not number:
        return 0.0, 1.0
    share, square = hits / number, _DEVIATIONS**2
    middle = share + square / (2 * number)
    half = _DEVIATIONS * sqrt(share * (1 - share) / number + square / (4 * number**2))
    scale = 1 + square / number
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def at_most_by_chance(hits: int, number: int, chance: float) -> float:
    """The probability of at most ``hits`` of ``number`` where each one has ``chance``."""
    return sum(comb(number, k) * chance**k * (1 - chance) ** (number - k) for k in range(hits + 1))
