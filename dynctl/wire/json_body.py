"""Decode JSON bodies into msgspec types; errors name the field, the expected and the found value.

::

    convert({"n": -1}, Body)    RequestError: n: expected an integer from 1 to 128, got -1
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, inspect

from dynctl.base.decode_errors import RequestError
from dynctl.base.errors import single_line
from dynctl.base.json_fields import U32_MAX, U64_MAX, describe
from dynctl.wire.large_body import LARGE, decode_large

T = TypeVar("T")

U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
#: msgspec cannot hold the upper bound of 64 bits; see `check_u64`.
U64 = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=U32_MAX, title="a token id (an integer)")]

#: Fields with prompts or token ids. Errors never show their values.
_PRIVATE: Final = frozenset(
    {
        "arguments",
        "cache_salt",
        "content",
        "documents",
        "input",
        "instructions",
        "messages",
        "output",
        "prompt",
        "prompt_embeds",
        "stop",
        "system",
        "token_data",
        "tokens",
        "tools",
    }
)
_SHOWN_KEY: Final = 40
#: A bound that only infinity passes.
_HUGE: Final = 1e308
_AT: Final = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>.*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>\d+)\]|(?P<values>\[\.\.\.\])")
_CONTAINERS: Final = (inspect.ListType, inspect.VarTupleType, inspect.DictType)
_FIELD: Final = re.compile(r"`(?P<name>.*)`", re.DOTALL)


def decode_object(body: bytes, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a body. Raises RequestError: 413 over ``max_bytes``, else 400.

    A body of `LARGE` bytes takes time: decode it in a thread, which the event loop can interrupt.
    """
    if len(body) > max_bytes:
        raise RequestError(
            413, "body_too_large", None, f"the body has {len(body)} bytes, at most {max_bytes}"
        )
    try:
        value = msgspec.json.decode(body) if len(body) < LARGE else decode_large(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(400, "invalid_json", None, _unreadable(error)) from None
    except RecursionError:
        raise RequestError(400, "invalid_json", None, "the body is nested too deeply") from None
    if not isinstance(value, dict):
        shown = describe(value, private=True)
        raise RequestError(400, "wrong_type", None, f"expected an object, got {shown}")
    return value


def _unreadable(error: Exception) -> str:
    """Why a body is not a JSON value."""
    if str(error).startswith(("Number out of range", "Integer value out of range")):
        # The decoder names no field of a body without a type.
        return "the body has a number that is too large: expected at most 1.8e308"
    return f"the body is not JSON: {error}"


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose value is not null: in the OpenAI API null means not given."""
    return {name: value for name, value in fields.items() if value is not None}


def convert(value: Any, kind: type[T], path: str = "") -> T:
    """``value`` as a ``kind``. Raises RequestError (400); ``path`` stands before its field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _request_error(str(error), value, kind, path) from None
    except UnicodeError:
        raise RequestError(
            400, "out_of_range", path or None, "expected text that is valid Unicode"
        ) from None


def check_u64(value: int | None, path: str) -> None:
    """Raise RequestError if ``value`` does not fit into 64 bits."""
    if value is not None and value > U64_MAX:
        expected = _expected_range(0, None)
        raise RequestError(400, "out_of_range", path, f"{expected}, got {describe(value)}")


def _request_error(text: str, value: Any, kind: Any, path: str) -> RequestError:
    """The error for msgspec's ``text``; msgspec reports the place and not the value."""
    at = _AT.search(text)
    problem = text[: at.start()] if at else text
    place = _BodyPlace(value, _plain(inspect.type_info(kind)), path, _is_private(path))
    for step in _STEP.finditer(at["path"] if at else ""):
        place.enter(step)
    if at and at["key"]:
        return RequestError(400, "out_of_range", place.path, "a key has too many characters")
    field = _FIELD.search(problem)
    if problem.startswith("Object missing required field") and field:
        return RequestError(400, "missing_field", place.path_of(field["name"]), "is required")
    if problem.startswith("Object contains unknown field") and field:
        known = ", ".join(field.encode_name for field in _struct(place.info).fields)
        name = place.path_of(single_line(field["name"], _SHOWN_KEY))
        return RequestError(400, "unknown_field", name, f"unknown field, expected one of {known}")
    code = "wrong_type" if ", got " in problem else "out_of_range"
    problem = _problem(code, place.value, place.info, place.private)
    return RequestError(400, code, place.path or None, problem)


@dataclass(slots=True)
class _BodyPlace:
    """A value inside a body, the type that it should have, and whether errors must not show it."""

    value: Any
    info: inspect.Type
    path: str
    private: bool

    def path_of(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def enter(self, step: re.Match[str]) -> None:
        """Go on to a field, to an item, or to the first value of an object that does not fit."""
        name, index = step["field"], step["index"]
        if name:
            self.value, self.info = self.value[name], _field_type(self.info, name)
            self.path = self.path_of(name)
            self.private = self.private or name in _PRIVATE
            return
        self.info = _item_type(self.info)
        if index:
            self.value = self.value[int(index)]
            self.path += f"[{index}]"
        else:
            misfits = (item for item in self.value.items() if not _fits(item[1], self.info))
            key, self.value = next(misfits)
            self.path += f"[{key[:_SHOWN_KEY]!r}]"


def _problem(code: str, value: Any, info: inspect.Type, private: bool) -> str:
    shown = describe(value, private=private)
    if code == "wrong_type":
        return f"expected {_label(info)}, got {shown}"
    if isinstance(value, str | list | dict):
        kinds = {str: "characters", list: "entries", dict: "entries"}
        most = _most(info, value)
        if len(value) <= most:
            return "must not be empty"
        return f"expected at most {most} {kinds[type(value)]}, got {len(value)}"
    got = "" if private else f", got {shown}"
    bounds = next(
        (option for option in _options(info) if isinstance(option, inspect.IntType)), None
    )
    if bounds is None:
        return f"expected {_float_range(info)}{got}"
    title = _titles(info)
    return _expected_range(bounds.ge or 0, bounds.le, title.split(" (")[0] if title else "") + got


def _expected_range(low: int, high: int | None, name: str = "") -> str:
    return f"expected {name or 'an integer'} from {low} to {U64_MAX if high is None else high}"


def _float_range(info: inspect.Type) -> str:
    """The numbers that a field accepts."""
    bounds = next(
        (option for option in _options(info) if isinstance(option, inspect.FloatType)), None
    )
    if bounds is None:
        return "a finite number"
    low = _range_end("at least", bounds.ge, "above", bounds.gt)
    high = _range_end("at most", bounds.le, "below", bounds.lt)
    unbounded = max(abs(bounds.ge or 0), abs(bounds.le or 0)) >= _HUGE
    if unbounded or not (low or high):
        return "a finite number"
    if None not in (bounds.ge, bounds.le):
        return f"a number from {bounds.ge:g} to {bounds.le:g}"
    return "a number " + " and ".join(filter(None, (low, high)))


def _range_end(inside: str, limit: float | None, outside: str, border: float | None) -> str:
    """One end of a range in words; empty without one."""
    if limit is not None:
        return f"{inside} {limit:g}"
    return "" if border is None else f"{outside} {border:g}"


def _options(info: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union and of those in it, or the one type; without titles and null."""
    info = _plain(info)
    if isinstance(info, inspect.UnionType):
        for option in info.types:
            yield from _options(option)
    elif not isinstance(info, inspect.NoneType):
        yield info


def _plain(info: inspect.Type) -> inspect.Type:
    return info.type if isinstance(info, inspect.Metadata) else info


def _titles(info: inspect.Type) -> str:
    schema = info.extra_json_schema if isinstance(info, inspect.Metadata) else None
    return str((schema or {}).get("title", ""))


def _struct(info: inspect.Type) -> inspect.StructType:
    return next(option for option in _options(info) if isinstance(option, inspect.StructType))


def _field_type(info: inspect.Type, name: str) -> inspect.Type:
    return next(field.type for field in _struct(info).fields if field.encode_name == name)


def _item_type(info: inspect.Type) -> inspect.Type:
    for option in _options(info):
        if isinstance(option, inspect.ListType | inspect.VarTupleType):
            return option.item_type
        if isinstance(option, inspect.DictType):
            return option.value_type
    return inspect.AnyType()


def _label(info: inspect.Type) -> str:
    labels = {
        inspect.StrType: "a string",
        inspect.IntType: "an integer",
        inspect.FloatType: "a number",
        inspect.BoolType: "true or false",
        inspect.ListType: "an array",
        inspect.VarTupleType: "an array",
    }
    return _titles(info) or " or ".join(
        labels.get(type(option), "an object") for option in _options(info)
    )


def _most(info: inspect.Type, value: Any) -> int:
    """The most characters or entries of the option that ``value`` belongs to."""
    for option in _options(info):
        if isinstance(option, inspect.StrType if isinstance(value, str) else _CONTAINERS):
            return len(value) if option.max_length is None else option.max_length
    return len(value)


def _fits(value: Any, info: inspect.Type) -> bool:
    """Whether a value of an object is of the number or string type that all of them have."""
    if isinstance(_plain(info), inspect.FloatType):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) < 10**308
    return isinstance(value, str)


def _is_private(path: str) -> bool:
    return not _PRIVATE.isdisjoint(re.findall(r"[^.\[\]]+", path))
