"""Text that is safe on a terminal: names and messages from outside may hold escape sequences.

Everything that dynctl prints passes :func:`printable` (or, for JSON, :func:`printable_json`) in the
writer of its stream: ``screens/render.py`` for stdout, :func:`say` for stderr.
"""

from __future__ import annotations

import re
import sys
from typing import Final, TypeVar

Value = TypeVar("Value")

#: Control characters (ESC and C1 start escape sequences), and characters that hide text or change
#: its direction. Not the line break and the tab.
_HIDDEN: Final = "\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"
_UNSAFE: Final = re.compile(rf"[\x00-\x08\x0b-\x1f{_HIDDEN}]")
_UNSAFE_IN_JSON: Final = re.compile(f"[{_HIDDEN}]")
#: The same as escapes of a JSON text, which has no other control characters.
_ESCAPED: Final = re.compile(rf"\\u00(?:0[0-8bcef]|1[0-9a-f])|\\[bfr]|[{_HIDDEN}]", re.IGNORECASE)
_PAIRS: Final = re.compile(r"\\\\|" + _ESCAPED.pattern, re.IGNORECASE)


def printable(text: str) -> str:
    """``text`` with ``?`` for each character that could control a terminal."""
    return _UNSAFE.sub("?", text)


def printable_json(text: str) -> str:
    """A JSON text with escapes for such characters: the same value."""
    return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_value(value: Value) -> Value:
    """A document whose texts are printable; the same object where they are already."""
    import msgspec

    encoded = msgspec.json.encode(value).decode()
    if _ESCAPED.search(encoded) is None:
        return value
    plain = _PAIRS.sub(lambda found: found[0] if found[0] == "\\\\" else "?", encoded)
    return msgspec.json.decode(plain, type=type(value))


def status_line(text: str) -> None:
    """Replace the present line of stderr, a terminal, by the first 78 characters of ``text``."""
    sys.stderr.write(f"\r\x1b[K{printable(text)[:78]}")
    sys.stderr.flush()


def say(message: str) -> None:
    """Write a line for the user to stderr."""
    sys.stderr.write(printable(message) + "\n")
