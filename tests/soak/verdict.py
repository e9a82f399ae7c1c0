"""Judges a soak run: what may grow, what must be right again, and what no client may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Seconds after the last request until loads and index must be right, on a machine that does
#: nothing else.
RIGHT_S: Final = 2.0
#: Minutes that memory may take to reach its size, and the shortest time after them over which a
#: slope is judged.
WARM_MIN: Final = 10.0
_FITTED_MIN: Final = 30.0
#: Bytes an hour that the memory of a frontend may grow by; in a shorter run, bytes in all.
GROWTH: Final = 2e6
_SHORT_GROWTH: Final = 6e6
#: The fault after which a frontend is a new process.
RESTARTED: Final = "frontend restarted"
#: What else must stay flat -> by how much it may grow.
_FLAT: Final = {"descriptors": 16.0, "threads": 2.0, "tasks": 16.0}

Samples = Mapping[str, Sequence[float]]
"""Name -> values; ``minutes`` has the times of all of them."""


class Slope(NamedTuple):
    """A straight line by least squares: its rise in an hour, and its standard error."""

    an_hour: float
    error: float


def fit(minutes: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of values over time."""
    count = len(values)
    if count < 3:
        return Slope(0.0, float("inf"))
    middle, mean = sum(minutes) / count, sum(values) / count
    spread = sum((at - middle) ** 2 for at in minutes) or 1.0
    pairs = list(zip(minutes, values, strict=True))
    slope = sum((at - middle) * (value - mean) for at, value in pairs) / spread
    rest = sum((value - mean - slope * (at - middle)) ** 2 for at, value in pairs)
    return Slope(60 * slope, 60 * (rest / (count - 2) / spread) ** 0.5)


def warmed(
    minutes: Sequence[float], values: Sequence[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """Times and values after the warm-up: ten minutes, or half of a shorter run."""
    begin = min(WARM_MIN, minutes[-1] / 2)
    first = next(place for place, at in enumerate(minutes) if at >= begin)
    return minutes[first:], values[first:]


def problems(result: Mapping[str, Any]) -> list[str]:
    """Why a run does not pass, from its JSON."""
    found = [f"lost: {text}" for text in result["lost"]]
    for check in result["quiet"]:
        for name in ("loads", "index"):
            seconds = check[f"{name}_s"]
            if seconds is None or seconds > result["right_s"]:
                found.append(_late(check, name, seconds, result["right_s"]))
    samples = result["samples"]
    found += _growth(samples["minutes"], samples["memory a"])
    restarted = {fault["of"] for fault in result["faults"] if fault["kind"] == RESTARTED}
    for name, values in samples.items():
        kind, _, frontend = name.partition(" ")
        # The pool of threads of a new process fills as it works.
        if kind in _FLAT and not (kind == "threads" and frontend in restarted):
            found += _rise(name, warmed(samples["minutes"], values)[1], _FLAT[kind])
    return found


def _late(check: Mapping[str, Any], name: str, seconds: float | None, limit: float) -> str:
    after = "never" if seconds is None else f"after {seconds:.1f} s"
    wrong = f": {check['wrong']}" if check["wrong"] else ""
    minute = f"minute {check['minute']:.0f}"
    return f"{minute}: {name} right {after}; expected {limit:g} s{wrong}"


def _growth(minutes: Sequence[float], values: Sequence[float]) -> list[str]:
    minutes, values = warmed(minutes, values)
    if minutes[-1] - minutes[0] >= _FITTED_MIN:
        slope = fit(minutes, values)
        if slope.an_hour <= GROWTH:
            return []
        return [f"memory grows by {slope.an_hour / 1e6:.1f} MB an hour"]
    grown = _median(values[-len(values) // 4 :]) - _median(values[: -(-len(values) // 4)])
    return [f"memory grew by {grown / 1e6:.1f} MB"] if grown > _SHORT_GROWTH else []


def _rise(name: str, values: Sequence[float], amount: float) -> list[str]:
    early, late = _median(values[: -(-len(values) // 4)]), _median(values[-len(values) // 4 :])
    return [f"{name} grew from {early:,.0f} to {late:,.0f}"] if late > early + amount else []


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
