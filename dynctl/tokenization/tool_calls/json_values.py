"""JSON values, read and written as Dynamo does it, where arguments are not kept as they came.

Dynamo's reader takes numbers out of range, half surrogates and deep nesting for errors. Numbers
that are not integers of 64 bits become floats. The parser is Python's own; only what it accepts and
Dynamo does not is checked here, and floats are written in Dynamo's form.
"""

import json
import math
import re
from typing import Any, Final, NoReturn

MAX_DEPTH: Final = 127
"""Objects and arrays in each other."""

LARGEST: Final = 2**64 - 1
"""The largest integer that stays one."""

_SMALLEST: Final = -(2**63)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Written(str):
    """A number as it is written."""

    __slots__ = ()


def read_value(text: str) -> Any:
    """The value of a JSON text, for :func:`write_value`.

    Raises ValueError for what Dynamo does not read.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check(value, MAX_DEPTH)
    return value


def value_end(text: str, at: int = 0) -> int | None:
    """The end of the JSON value that begins at a place, None if none is there."""
    try:
        end: int = _SYNTAX.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None
    return end


def write_value(value: Any) -> str:
    """A value as JSON without white space. Floats are finite."""
    if isinstance(value, dict):
        members = (f"{write_text(key)}:{write_value(each)}" for key, each in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_value, value)) + "]"
    if isinstance(value, Written):
        return str(value)
    if isinstance(value, str):
        return write_text(value)
    return write_float(value) if isinstance(value, float) else json.dumps(value)


def write_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_float(value: float) -> str:
    """A finite float in its shortest form: ``1.5``, ``1e+16``, ``0.00001``, ``1e-6``."""
    digits, _, exponent = repr(value).partition("e")
    if not exponent:
        return digits
    if int(exponent) == -5:
        sign = "-" if digits.startswith("-") else ""
        return sign + "0.0000" + digits.lstrip("-").replace(".", "")
    return f"{digits}e{int(exponent):+d}"


def _integer(text: str) -> int | float:
    if len(text) < 21 and text != "-0":
        value = int(text)
        if _SMALLEST <= value <= LARGEST:
            return value
    return _float(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_SYNTAX: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_constant)
_DECODER: Final = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_constant)


def _check(value: Any, depth: int) -> None:
    """Raises ValueError for half surrogates and for values that are nested too deeply."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise ValueError("half of a surrogate pair")
        return
    if not isinstance(value, dict | list):
        return
    if depth == 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        for key, each in value.items():
            _check(key, depth)
            _check(each, depth - 1)
    else:
        for each in value:
            _check(each, depth - 1)
