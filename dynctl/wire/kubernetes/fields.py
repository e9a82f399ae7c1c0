"""Reading untyped JSON: what is not of the expected kind is as good as absent, never an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def text(value: Any) -> str:
    """``value`` where it is a string, else nothing."""
    return value if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """``value`` where it is a list, else an empty one."""
    return value if isinstance(value, list) else ()


def texts(value: Any) -> dict[str, str]:
    """The entries of a mapping whose values are strings: labels, annotations."""
    return {key: one for key, one in mapping(value).items() if isinstance(one, str)}


def count(value: Any) -> int:
    """``value`` where it is a whole number, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def moment(value: Any) -> float | None:
    """An RFC 3339 time as seconds since the epoch; None where it is none."""
    try:
        read = datetime.fromisoformat(text(value))
    except ValueError:
        return None
    return read.timestamp() if read.tzinfo is not None else None
