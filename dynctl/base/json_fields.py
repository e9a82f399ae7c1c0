"""Typed values from untyped JSON.

``read_*`` are for requests: a wrong value raises RequestError with its path. The short ones
(``text``, ``mapping``, ...) are for objects of other systems: a wrong value counts as absent.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from dynctl.base.decode_errors import RequestError
from dynctl.base.errors import single_line

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
_SHOWN: Final = 40  # characters of a client's string that an error quotes


def describe(value: Any, *, private: bool = False) -> str:
    """A wrong value for an error message: numbers and short strings as they are, others by kind.

    With ``private`` (prompt text, token ids) only the kind.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and not private:
        shown = str(value) if isinstance(value, float) or abs(value) < 10**24 else "a huge integer"
        return shown
    if isinstance(value, str) and not private:
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    names = {int: "an integer", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


def wrong_type(
    path: str | None, expected: str, value: Any, *, private: bool = False
) -> RequestError:
    return RequestError(
        400, "wrong_type", path, f"expected {expected}, got {describe(value, private=private)}"
    )


def read_text(value: Any, path: str, *, longest: int) -> str:
    """A string of at most ``longest`` characters."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    if len(value) > longest:
        raise RequestError(
            400, "out_of_range", path, f"expected at most {longest} characters, got {len(value)}"
        )
    return value


def read_integer(value: Any, path: str, low: int, high: int) -> int:
    """An integer in ``low`` .. ``high``; 3.0 and true are not integers."""
    if type(value) is not int:
        raise wrong_type(path, "an integer", value)
    if not low <= value <= high:
        raise RequestError(
            400,
            "out_of_range",
            path,
            f"expected an integer from {low} to {high}, got {describe(value)}",
        )
    return value


def read_boolean(value: Any, path: str) -> bool:
    """``true`` or ``false``; raises RequestError."""
    if not isinstance(value, bool):
        raise wrong_type(path, "true or false", value)
    return value


def read_number(value: Any, path: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(path, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(
            400, "out_of_range", path, f"expected a finite number, got {describe(value)}"
        )
    return number


def read_array(value: Any, path: str, *, longest: int, private: bool = False) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(path, "an array", value, private=private)
    if len(value) > longest:
        raise RequestError(
            400, "out_of_range", path, f"expected at most {longest} entries, got {len(value)}"
        )
    return value


def read_tokens(value: Any, path: str, *, longest: int) -> tuple[int, ...]:
    """At least one token id, u32 each; errors give the position, never the id."""
    tokens = read_array(value, path, longest=longest, private=True)
    if not tokens:
        raise RequestError(400, "out_of_range", path, "expected at least one token id")
    for i, token in enumerate(tokens):
        if type(token) is not int:
            raise wrong_type(f"{path}[{i}]", "a token id (an integer)", token, private=True)
        if not 0 <= token <= U32_MAX:
            raise RequestError(
                400, "out_of_range", f"{path}[{i}]", f"expected a token id from 0 to {U32_MAX}"
            )
    return tuple(tokens)


def read_object(value: Any, path: str | None, *, private: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value, private=private)
    return value


def refuse_unknown(value: Mapping[str, Any], path: str, known: Collection[str]) -> None:
    """Name the first key that is not ``known``, and list those that are."""
    for key in value:
        if key not in known:
            shown = single_line(key, _SHOWN)
            raise RequestError(
                400,
                "unknown_field",
                f"{path}.{shown}",
                f"unknown field, expected one of {', '.join(known)}",
            )


def text(value: Any) -> str:
    """``value`` if it is a string, else ``""``."""
    return value if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else ()


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; empty in place of anything else, and of an entry that is not one."""
    return [mapping(entry) for entry in sequence(value)]


def texts(value: Any) -> dict[str, str]:
    """The entries of a mapping whose values are strings: labels, annotations."""
    return {key: one for key, one in mapping(value).items() if isinstance(one, str)}


def count(value: Any) -> int:
    """``value`` if it is an integer, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def moment(value: Any) -> float | None:
    """An RFC 3339 time as seconds since the epoch; None for any other value."""
    try:
        read = datetime.fromisoformat(text(value))
    except ValueError:
        return None
    return read.timestamp() if read.tzinfo is not None else None
