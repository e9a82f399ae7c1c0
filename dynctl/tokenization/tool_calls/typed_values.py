"""Values of arguments that a model wrote as plain text, by the JSON schema of their parameter."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from dynctl.tokenization.tool_calls.calls import strip_space
from dynctl.tokenization.tool_calls.json_values import Written, read_value

_ENTITIES: Final = (
    ("&lt;", "<"),
    ("&gt;", ">"),
    ("&amp;", "&"),
    ("&quot;", '"'),
    ("&#x27;", "'"),
    ("&#39;", "'"),
)
"""In the order in which they are replaced."""

_TEXTS: Final = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_FLAGS: Final = frozenset({"boolean", "bool", "binary"})
_INTEGERS: Final = ("int", "uint", "long", "short", "unsigned")
_NUMBERS: Final = ("num", "float")
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_DIGITS: Final = 30
_LIMIT: Final = 2**63
_PYTHON: Final = (("'", '"'), ("True", "true"), ("False", "false"), ("None", "null"))


def typed_value(text: str, schema: Any) -> Any:
    """The value of an argument, for ``write_value``; ``schema``: None where there is none.

    What does not have the type of the schema is a text.
    """
    text = strip_space(text)
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    if text.lower() == "null":
        return None
    kind = _kind(schema)
    if kind in _TEXTS:
        return text
    if kind.startswith(_INTEGERS):
        value = _integer(text)
        return text if value is None else value
    if kind.startswith(_NUMBERS):
        return _number(text)
    if kind in _FLAGS:
        return text.lower() == "true"
    return _literal(text)


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "string"
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind.lower()
    return "object" if "anyOf" in schema or "oneOf" in schema else "string"


def _integer(text: str) -> int | None:
    """An integer of 64 bits, None for another text."""
    if _INTEGER.fullmatch(text) is None:
        return None
    digits = text.lstrip("+-").lstrip("0") or "0"
    if len(digits) > _MAX_DIGITS:
        return None
    value = -int(digits) if text.startswith("-") else int(digits)
    return value if -_LIMIT <= value < _LIMIT else None


def _number(text: str) -> Any:
    """A number: an integer where it is whole, as it was written where it is large."""
    integer = _integer(text)
    if integer is not None:
        return integer
    if _NUMBER.fullmatch(text) is None:
        return text
    value = float(text)
    if not math.isfinite(value):
        return text
    if not value.is_integer():
        return value
    if -_LIMIT <= value < _LIMIT:
        return int(value)
    return Written(text) if _JSON_NUMBER.fullmatch(text) else text


def _literal(text: str) -> Any:
    """JSON, or what becomes JSON when Python's words are replaced; else the text."""
    python = text
    for word, other in _PYTHON:
        python = python.replace(word, other)
    for each in (text, python):
        try:
            return read_value(each)
        except ValueError:
            continue
    return text
