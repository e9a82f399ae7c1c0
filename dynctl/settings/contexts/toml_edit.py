"""Change one context in a TOML text and leave every other line, comments above all, as it is.

Works on lines, so it understands only what people usually write: a ``[contexts.NAME]`` table with
a key a line. Whoever calls it reads the result again and compares, see edit.py.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Final

from dynctl.settings.contexts.keys import Value
from dynctl.settings.contexts.path import CURRENT, TABLE

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_ANY_HEADER: Final = re.compile(r"\s*\[")
_KEY_LINE: Final = re.compile(r"\s*(?P<key>[A-Za-z0-9_-]+|\"[^\"\\]*\"|'[^']*')\s*=")
_COMMENT: Final = re.compile(r"\s*#")


def toml_value(value: Value) -> str:
    """A value as TOML; texts must be free of control characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    # JSON's escapes are TOML's too.
    return json.dumps(value, ensure_ascii=False)


def table_lines(name: str, values: Mapping[str, Value]) -> list[str]:
    """The table of one context, a key a line."""
    key = name if _BARE.fullmatch(name) else json.dumps(name)
    return [f"[{TABLE}.{key}]\n", *_key_lines(values)]


def with_current(text: str, name: str | None) -> str:
    """``text`` with another current context; None: with none."""
    lines = _lines(text)
    end = next((at for at, line in enumerate(lines) if _ANY_HEADER.match(line)), len(lines))
    place = next((at for at in range(end) if _key_of(lines[at]) == CURRENT), None)
    if place is not None:
        comment = _comment_after(lines[place])
        lines[place : place + 1] = (
            [] if name is None else [f"{CURRENT} = {json.dumps(name)}{comment}\n"]
        )
    elif name is not None:
        # Below the comment that the file begins with, unless that stands right above a table.
        top = next((at for at, line in enumerate(lines) if not _COMMENT.match(line)), len(lines))
        if top < len(lines) and _ANY_HEADER.match(lines[top]):
            top = 0
        lines.insert(top, f"{CURRENT} = {json.dumps(name)}\n")
        if top + 1 < len(lines) and lines[top + 1].strip():
            lines.insert(top + 1, "\n")
    return "".join(lines)


def with_context(text: str, name: str, values: Mapping[str, Value]) -> str:
    """``text`` with the table of one context added, or its keys replaced.

    A line whose value stays keeps its comment.
    """
    lines = _lines(text)
    found = _table(lines, name)
    if found is None:
        gap = ["\n"] if lines and lines[-1].strip() else []
        return "".join([*lines, *gap, *table_lines(name, values)])
    start, end = found
    left = dict(values)
    kept: list[str] = []
    for line in lines[start + 1 : end]:
        key = _key_of(line)
        if key is None:
            kept.append(line)
        elif key in left and _line_value(line, key) == left[key]:
            kept.append(line)
            del left[key]
    return "".join([*lines[: start + 1], *_key_lines(left), *kept, *lines[end:]])


def without_context(text: str, name: str) -> str:
    """``text`` without the table of one context; comments that may belong to the next one stay."""
    lines = _lines(text)
    found = _table(lines, name)
    if found is None:
        return text
    start, end = found
    last = max((at for at in range(start, end) if _key_of(lines[at])), default=start)
    rest = lines[last + 1 :]
    while rest and not rest[0].strip() and (start == 0 or not lines[start - 1].strip()):
        rest = rest[1:]
    return "".join([*lines[:start], *rest])


def _lines(text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return lines


def _key_lines(values: Mapping[str, Value]) -> list[str]:
    return [f"{key} = {toml_value(value)}\n" for key, value in values.items()]


def _table(lines: list[str], name: str) -> tuple[int, int] | None:
    """Line numbers of a context's header and of what follows its table."""
    key = f"(?:{re.escape(name)}|\"{re.escape(name)}\"|'{re.escape(name)}')"
    header = re.compile(rf"\s*\[\s*{TABLE}\s*\.\s*{key}\s*\]\s*(#.*)?$")
    start = next((at for at, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        return None
    following = range(start + 1, len(lines))
    return start, next((at for at in following if _ANY_HEADER.match(lines[at])), len(lines))


def _key_of(line: str) -> str | None:
    found = _KEY_LINE.match(line)
    return None if found is None else found["key"].strip("\"'")


def _line_value(line: str, key: str) -> object:
    """What a whole ``key = value`` line says; None where it goes on in the next line."""
    try:
        return tomllib.loads(line).get(key)
    except tomllib.TOMLDecodeError:
        return None


def _comment_after(line: str) -> str:
    """The comment at the end of a ``current = "name"`` line, two blanks before it."""
    found = re.search(r"=\s*(?:\"[^\"]*\"|'[^']*')\s*(#.*?)\s*$", line)
    return f"  {found[1]}" if found else ""
