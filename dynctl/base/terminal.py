"""Text that is safe on a terminal: names and messages from outside may hold escape sequences.

Everything that dynctl prints passes :func:`printable` (or, for JSON, :func:`printable_json`) in the
writer of its stream: ``screens/render.py`` for stdout, :func:`say` for stderr.
"""

from __future__ import annotations

import os
import re
import sys
from textwrap import wrap
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


#: Narrower terminals get lines of this length and wrap them.
_LEAST_WIDTH: Final = 64
#: How further lines of a message begin: below the text of a note.
_GOES_ON: Final = " " * 6


def message_width() -> int | None:
    """Columns of messages on stderr: COLUMNS, else its terminal's; None in a pipe without it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return max(_LEAST_WIDTH, int(columns))
    try:
        return max(_LEAST_WIDTH, os.get_terminal_size(sys.stderr.fileno()).columns or 80)
    except (OSError, ValueError):
        return None


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """The lines of ``text``; longer ones are wrapped at words, and go on after ``indent``."""
    lines: list[str] = []
    for line in text.splitlines():
        if len(line) <= width:
            lines.append(line)
        else:
            lines += wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def advise(message: str) -> None:
    """Write a note, a warning or another sentence for the user to stderr, wrapped at words. In a
    pipe it stays one line, for programs that read lines."""
    width = message_width()
    if width is not None:
        message = "\n".join(wrapped(printable(message), width, _GOES_ON))
    say(message)
