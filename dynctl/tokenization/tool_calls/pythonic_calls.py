"""Calls as a list of Python calls, ``[f(x=1), g(city="a")]``: the format of Llama 4 and others.

The rules for broken text are those of Dynamo 1.6.1, as observed. The running
Python reads a list. What Dynamo's reader may know and Python does not is an error, not a guess.
"""

import ast
import contextlib
import json
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any, Final

from dynctl.tokenization.tool_calls.calls import Parsed, ToolCall, ToolCallError, strip_space
from dynctl.tokenization.tool_calls.json_values import LARGEST, write_float, write_text
from dynctl.tokenization.tool_calls.pythonic_list import find_list

MAX_TOKENS: Final = 65_536
"""Words and marks in one list of calls: reading them costs more than text does."""

_TOKEN: Final = re.compile(r"\w+|[^\w\s]")
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
_UNSURE: Final = re.compile(r"""\b(?:r?[ft]|[ft]r)["']|[0-9_]{4000}|\0""", re.IGNORECASE)
"""Strings of newer Pythons, numbers of more digits than Python reads, and NUL."""

_PRIVATE: Final = "".join(map(chr, range(0xE000, 0xE040)))
"""Characters that nothing uses."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MARKS: Final = ("<|python_start|>", "<|python_end|>")


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """Lists of calls anywhere in text. Text is held back from a piece with an opening bracket.

    No list begins with the start mark; Dynamo looks for it nevertheless, so text may be held back.
    """

    starts: tuple[str, ...] = ("__NEVER_MATCH__",)
    ends: tuple[str, ...] = ()
    loose_starts: tuple[str, ...] = _MARKS[:1]
    cuts: bool = False
    hides: bool = False
    tried: str = "]"

    def may_begin(self, text: str) -> bool:
        return "[" in text

    def parse(self, text: str, *, final: bool) -> Parsed:
        for mark in _MARKS:
            text = text.replace(mark, "")
        text = strip_space(text)
        place = find_list(text)
        if place is None:
            return Parsed((), text)
        calls = _calls(text[place[0] : place[1]], final=final)
        return Parsed((), "") if calls is None else Parsed(calls, strip_space(text[: place[0]]))

    def end(self, text: str, *, seen: int = 0) -> int:
        return len(text)


class _NotConstantError(Exception):
    pass


def _calls(source: str, *, final: bool) -> tuple[ToolCall, ...] | None:
    """The calls in a list; None where it is not Python.

    Raises ToolCallError for a list of more than ``MAX_TOKENS``, and at the end of an answer for one
    that Python cannot read, and a newer Python might.
    """
    if len(source) > MAX_TOKENS and sum(1 for _ in _TOKEN.finditer(source)) > MAX_TOKENS:
        raise ToolCallError(f"wrote more than {MAX_TOKENS} words and marks in one tool call")
    stand_in = _nul_stand_in(source)
    source = source.replace("\0", stand_in or "\0")
    tree = _parse_python(source, final=final)
    if tree is None or any(map(_has_twins, ast.walk(tree))):
        return None
    elements = tree.body.elts if isinstance(tree.body, ast.List) else []
    values = _Values(source, stand_in)
    return tuple(
        ToolCall(each.func.id, values.arguments(each), f"call-{number}")
        for number, each in enumerate(elements, 1)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
    )


def _nul_stand_in(source: str) -> str:
    """A character in place of NUL, which Dynamo reads in texts and Python does not; empty without
    one. An escape may make any character."""
    if "\0" not in source or "\\" in source:
        return ""
    return next((each for each in _PRIVATE if each not in source), "")


def _parse_python(source: str, *, final: bool) -> ast.Expression | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for escapes that Python does not know
            return ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        deep = isinstance(error, MemoryError | RecursionError) or "too many nested" in str(error)
        if final and (deep or _UNSURE.search(source)):
            raise ToolCallError("wrote a tool call in Python that dynctl cannot read") from None
        return None


def _has_twins(node: ast.AST) -> bool:
    """Whether a node is a call with two arguments of one name."""
    if not isinstance(node, ast.Call):
        return False
    names = [each.arg for each in node.keywords if each.arg is not None]
    return len(set(names)) < len(names)


class _Values:
    """Writes constants of a Python text as JSON."""

    def __init__(self, source: str, nul: str) -> None:
        self._source = source
        self._nul = nul
        self._lines: list[bytes] | None = None

    def arguments(self, call: ast.Call) -> str:
        """The arguments with names and constant values; Dynamo leaves the others out."""
        values = {}
        for keyword in call.keywords:
            with contextlib.suppress(_NotConstantError):
                if keyword.arg is not None:
                    values[keyword.arg] = self._json(keyword.value)
        written = _object(values)
        return written.replace(self._nul, "\\u0000") if self._nul else written

    def _json(self, node: ast.expr | None) -> str:
        if isinstance(node, ast.List):
            return "[" + ",".join(map(self._json, node.elts)) + "]"
        if isinstance(node, ast.Dict):
            return _object(
                {
                    self._key(key): self._json(value)
                    for key, value in zip(node.keys, node.values, strict=True)
                }
            )
        if not isinstance(node, ast.Constant):
            raise _NotConstantError
        value: Any = node.value
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, str):
            return _string(value)
        if isinstance(value, int):
            return str(value) if value <= LARGEST else _string(self._digits_of(node))
        if isinstance(value, float):
            return _number(value)
        raise _NotConstantError

    def _key(self, node: ast.expr | None) -> str:
        written = self._json(node)
        return str(json.loads(written)) if written.startswith('"') else written

    def _digits_of(self, node: ast.expr) -> str:
        if self._lines is None:
            self._lines = _LINE_END.split(self._source.encode())
        line = self._lines[node.lineno - 1]
        return line[node.col_offset : node.end_col_offset].decode().replace("_", "")


def _object(members: dict[str, str]) -> str:
    return "{" + ",".join(f"{_string(name)}:{value}" for name, value in members.items()) + "}"


def _string(text: str) -> str:
    return write_text(_SURROGATE.sub("\ufffd", text))


def _number(value: float) -> str:
    return write_float(value) if math.isfinite(value) else "null"
