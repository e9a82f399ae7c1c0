"""Durations and sizes as people write them (``30s``, ``1.5m``, ``64MiB``), and shares of 1 in
percent."""

import re
from typing import Final

#: A duration; the groups are its number and its unit.
DURATION: Final = r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)"
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(b|kib|ki|mib|mi|gib|gi|tib|ti|)", re.I)
_BYTES: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

SIZES: Final = "a number of bytes, or one with KiB, MiB or GiB, for example 64MiB"


def in_seconds(number: str, unit: str, default: str = "s") -> float:
    """The seconds of what DURATION matched; a number alone has the unit ``default``."""
    return float(number) * _SECONDS[unit or default]


def duration(text: str, default: str = "s") -> float | None:
    """The seconds of a text; None if it is not a duration. A number alone has the unit
    ``default``."""
    match = re.fullmatch(DURATION, text.strip())
    return None if match is None else in_seconds(match[1], match[2], default)


def duration_text(seconds: float) -> str:
    """The shortest text that :func:`duration` reads as these seconds: ``90s``, ``24h``."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:g}ms" if 0 < seconds < 0.1 else f"{seconds:g}s"


def percent(share: float, digits: int | None = 0, *, signed: bool = False) -> str:
    """A share of 1 in percent, with a space: ``61 %``, ``0.3 %``.

    ``digits``: behind the point; None: as short as exact. ``signed``: ``+2 %``, never ``-0 %``.
    """
    value = 100 * share
    value = (float(f"{value:.6g}") if digits is None else round(value, digits)) or 0.0
    form = ",.6g" if digits is None else f",.{digits}f"
    return f"{value:{'+' if signed else ''}{form}} %"


def chance(share: float) -> str:
    """A probability as ``61 %``; never 0 % or 100 % of what is only nearly so."""
    if 0 < share < 0.01:
        return "less than 1 %"
    return "more than 99 %" if 0.99 < share < 1 else percent(share)


def size(text: str) -> int | None:
    """The bytes of a text; None if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(float(match[1]) * _BYTES.get(match[2][:1].lower(), 1))


def plural(number: int, noun: str) -> str:
    """``1 worker``, ``2,048 workers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
