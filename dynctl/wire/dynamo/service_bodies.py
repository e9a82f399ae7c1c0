"""Read the JSON bodies of Dynamo's HTTP services: indexer, selection service, slot tracker.

Dynamo's clients may read the texts of its errors, so a refused body has the status and the text of
Dynamo 1.6.1 (observed): 415 for another content type, 400 for text that is not JSON, 422 for JSON
of another shape, with the path, the value and the position of what does not fit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import DecodeError

from dynctl.base.decode_errors import RequestError
from dynctl.wire.large_body import LARGE, decode_large

#: Bytes of a body; Dynamo's limit.
MAX_BODY_BYTES: Final = 8 * 1024 * 1024
#: Token ids and hashes of one body: these services hash them on their event loop.
MOST_NUMBERS: Final = 1024 * 1024
#: Values of a list that are checked in one step.
_SLICE: Final = 64 * 1024
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_SHAPE: Final = "Failed to deserialize the JSON body into the target type: "
_SYNTAX: Final = "Failed to parse the request body as JSON: "
_DECODER: Final = json.JSONDecoder(strict=True)
_JSON_TYPE: Final = re.compile(r"application/(?:json|.*\+json)", re.IGNORECASE | re.ASCII)
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


class BodyRefused(ValueError):
    """A body that the service does not take. ``status``: 400, 413, 415 or 422."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Misfit(Exception):
    """``problem`` at ``path``. ``at_start``: Dynamo shows where the value begins, not its end."""

    def __init__(
        self, problem: str, path: tuple[str | int, ...], *, at_start: bool = False
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path
        self.at_start = at_start


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of value. ``check`` returns the value to use, or raises _Misfit. ``all_fit``: whether
    all values of a list fit as they are; None if only ``check`` can find out."""

    expected: str
    check: Callable[[Any, tuple[str | int, ...]], Any]
    all_fit: Callable[[list[Any]], bool] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body. ``default``: its value if it is missing; REQUIRED: it may not be."""

    kind: Kind
    default: Any = None


REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of a body, in the order in which Dynamo finds missing ones.

    ``name``: of Dynamo's type, which its errors show. ``flat``: fields that Dynamo has in a type of
    their own; their errors have the position of the body's end and no path.
    """

    name: str
    fields: Mapping[str, Field]
    flat: frozenset[str] = frozenset()


def _refuse_value(
    value: Any, expected: str, path: tuple[str | int, ...], word: str = "type"
) -> Any:
    compound = isinstance(value, (dict, list))
    raise _Misfit(
        f"invalid {word}: {_value_text(value)}, expected {expected}", path, at_start=compound
    )


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return f"integer `{value}`"
    if isinstance(value, (int, float)):
        return f"floating point `{_float(_as_float(value))}`"
    if isinstance(value, str):
        return f'string "{value[:200]}"'
    return "map" if isinstance(value, dict) else "sequence"


def _as_float(value: int | float) -> float:
    """The number as a float; JSON has whole numbers that are too large for any."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else str(value)


def integer(name: str, low: int, high: int) -> Kind:
    """A whole number from ``low`` to ``high``; ``name``: of Dynamo's type."""

    def check(value: Any, path: tuple[str | int, ...]) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
            return int(_refuse_value(value, name, path))
        if not low <= value <= high:
            return int(_refuse_value(value, name, path, "value"))
        return value

    def all_fit(values: list[Any]) -> bool:
        # A prompt has a hundred thousand tokens.
        whole = not values or set(map(type, values)) == {int}
        return whole and (not values or (low <= min(values) and max(values) <= high))

    return Kind(name, check, all_fit)


def _text(value: Any, path: tuple[str | int, ...]) -> str:
    return value if isinstance(value, str) else str(_refuse_value(value, "a string", path))


def _flag(value: Any, path: tuple[str | int, ...]) -> bool:
    return value if isinstance(value, bool) else bool(_refuse_value(value, "a boolean", path))


def number(name: str) -> Kind:
    """A number, also a whole one; ``name``: of Dynamo's type."""

    def check(value: Any, path: tuple[str | int, ...]) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return float(_refuse_value(value, name, path))
        return _as_float(value)

    return Kind(name, check)


U64: Final = integer("u64", 0, 2**64 - 1)
U32: Final = integer("u32", 0, 2**32 - 1)
USIZE: Final = integer("usize", 0, 2**64 - 1)
I64: Final = integer("i64", -(2**63), 2**63 - 1)
TEXT: Final = Kind("a string", _text)
FLAG: Final = Kind("a boolean", _flag)
F64: Final = number("f64")
F32: Final = number("f32")


def optional(kind: Kind) -> Kind:
    """``kind`` or null."""

    def check(value: Any, path: tuple[str | int, ...]) -> Any:
        return None if value is None else kind.check(value, path)

    return Kind(kind.expected, check)


def many(kind: Kind, expected: str = "a sequence") -> Kind:
    """A list of values."""

    def check(value: Any, path: tuple[str | int, ...]) -> list[Any]:
        if not isinstance(value, list):
            return list(_refuse_value(value, expected, path))
        if kind.all_fit is not None and all(
            kind.all_fit(value[start : start + _SLICE]) for start in range(0, len(value), _SLICE)
        ):
            return value
        return [kind.check(item, (*path, at)) for at, item in enumerate(value)]

    return Kind(expected, check)


def table(kind: Kind, key: Callable[[str], Any] = str) -> Kind:
    """An object of values; ``key`` makes the key of its name, ValueError for another one."""

    def check(value: Any, path: tuple[str | int, ...]) -> dict[Any, Any]:
        if not isinstance(value, dict):
            return dict(_refuse_value(value, "a map", path))
        entries = {}
        for name, item in value.items():
            try:
                entries[key(name)] = kind.check(item, (*path, name))
            except ValueError:
                _refuse_value(name, "u32", path)
        return entries

    return Kind("a map", check)


def one_of(*names: str) -> Kind:
    """One of the names."""
    expected = " or ".join(f"`{name}`" for name in names)

    def check(value: Any, path: tuple[str | int, ...]) -> str:
        text = _text(value, path)
        if text not in names:
            raise _Misfit(f"unknown variant `{text[:200]}`, expected {expected}", path)
        return text

    return Kind("a string", check)


def object_of(shape: Shape) -> Kind:
    """An object of a shape of its own."""

    def check(value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        return _fields(value, shape, path)

    return Kind(f"struct {shape.name}", check)


def read_body(data: bytes, content_type: str, shape: Shape) -> dict[str, Any]:
    """The fields of a body, with defaults for missing ones; raises BodyRefused."""
    if not _JSON_TYPE.fullmatch(content_type.partition(";")[0].strip()):
        raise BodyRefused(415, "Expected request with `Content-Type: application/json`")
    if len(data) > MAX_BODY_BYTES:
        raise BodyRefused(413, "Failed to buffer the request body: length limit exceeded")
    if len(data) >= LARGE:
        return _read_large(data, shape)
    text, value = _parse(data)
    try:
        return _fields(value, shape, ())
    except _Misfit as misfit:
        path, ends = misfit.path, len(text.rstrip(" \t\r\n"))
        if path and path[0] in shape.flat:
            # Dynamo reads such a body whole before it looks at these fields.
            path = ()
        else:
            ends = _end_of(text, misfit.path, at_start=misfit.at_start)
        where = _position(data, len(text[:ends].encode()))
        prefix = f"{_path_text(path)}: " if path else ""
        raise BodyRefused(422, f"{_SHAPE}{prefix}{misfit.problem}{where}") from None


def _parse(data: bytes) -> tuple[str, Any]:
    """The text of a body and its value; raises BodyRefused (400)."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        where = _position(data, error.start + 1)
        raise BodyRefused(400, f"{_SYNTAX}invalid unicode code point{where}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant) if text else None
        if _SURROGATE.search(text):
            # A value with half a character cannot be written into an answer.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        surrogate = _SURROGATE.search(text)
        where = _position(data, len(text[: surrogate.end() if surrogate else 0].encode()))
        problem = f"lone leading surrogate in hex escape{where}"
        raise BodyRefused(400, _SYNTAX + problem) from None
    except RecursionError:
        raise BodyRefused(400, f"{_SYNTAX}recursion limit exceeded at line 1 column 128") from None
    except ValueError as error:
        raise BodyRefused(400, _SYNTAX + _syntax(text, data, error)) from None
    if not text:
        raise BodyRefused(400, f"{_SYNTAX}EOF while parsing a value at line 1 column 0")
    return text, value


def _read_large(data: bytes, shape: Shape) -> dict[str, Any]:
    """As `read_body`, in slices (`dynctl.wire.large_body`). A value that does not fit has no exact
    place, since finding it takes as long as decoding."""
    try:
        return _fields(decode_large(data, MOST_NUMBERS), shape, ())
    except RequestError as error:
        raise BodyRefused(413, f"{_SYNTAX}{error.problem}") from None
    except RecursionError:
        raise BodyRefused(400, f"{_SYNTAX}recursion limit exceeded at line 1 column 128") from None
    except (DecodeError, UnicodeError) as error:
        match = _BYTE.search(str(error))
        where = _position(data, len(data) if match is None else int(match[1]))
        raise BodyRefused(400, f"{_SYNTAX}expected value{where}") from None
    except _Misfit as misfit:
        path = () if misfit.path and misfit.path[0] in shape.flat else misfit.path
        prefix = f"{_path_text(path)}: " if path else ""
        where = _position(data, len(data))
        raise BodyRefused(422, f"{_SHAPE}{prefix}{misfit.problem}{where}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fields(value: Any, shape: Shape, path: tuple[str | int, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        if isinstance(value, list):
            size = f"expected struct {shape.name} with {len(shape.fields)} elements"
            raise _Misfit(f"invalid length {len(value)}, {size}", path)
        _refuse_value(value, f"struct {shape.name}", path)
    # In the order of the body: the first value that does not fit is the one that is reported.
    known = shape.fields
    read = {
        name: known[name].kind.check(item, (*path, name))
        for name, item in value.items()
        if name in known
    }
    for name, field in known.items():
        if field.default is REQUIRED and name not in read:
            raise _Misfit(f"missing field `{name}`", path)
    return {name: read.get(name, field.default) for name, field in known.items()}


def _path_text(path: tuple[str | int, ...]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text = f"{text}.{part}" if text else part
    return text


def _position(data: bytes, end: int) -> str:
    """Line and column of a place, both from 1; the column counts bytes."""
    before = data[:end]
    return f" at line {before.count(10) + 1} column {end - before.rfind(10) - 1}"


def _end_of(text: str, path: tuple[str | int, ...], *, at_start: bool) -> int:
    """Where the value at ``path`` ends (``at_start``: begins) in JSON that was read before."""
    at = _after_space(text, 0)
    for part in path:
        at = _after_space(text, at + 1)
        index = 0
        while True:
            if isinstance(part, str):
                name, at = _DECODER.raw_decode(text, at)
                at = _after_space(text, _after_space(text, at) + 1)
                reached = name == part
            else:
                reached = index == part
            if reached:
                break
            index += 1
            at = _after_space(text, _DECODER.raw_decode(text, at)[1])
            at = _after_space(text, at + 1)
    return at if at_start else _DECODER.raw_decode(text, at)[1]


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _syntax(text: str, data: bytes, error: ValueError) -> str:
    """Dynamo's words for text that is not JSON, for the commonest mistakes."""
    at = getattr(error, "pos", len(text))
    if _after_space(text, at) >= len(text):
        opened = text.lstrip()[:1]
        what = {"{": "an object", "[": "a list"}.get(opened, "a value")
        if text.rstrip()[-1:] in (",", ":"):
            what = "a value"
        return f"EOF while parsing {what}{_position(data, len(data))}"
    where = _position(data, len(text[: at + 1].encode()))
    if "property name" in str(error):
        return ("trailing comma" if text[at] == "}" else "key must be a string") + where
    return f"expected value{where}"
