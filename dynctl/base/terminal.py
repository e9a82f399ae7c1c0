"""Text that is safe on a terminal: names and messages from outside may hold escape sequences.

Everything that dynctl prints passes :func:`printable` (or, for JSON, :func:`printable_json`) in the
writer of its stream: ``screens/render.py`` for stdout, :func:`say` for stderr. Documents pass
:func:`printable_value` before a screen is drawn from them, so that a line break in a name is no
line of a screen. Logs and labels of metrics pass :func:`escaped`.
"""

from __future__ import annotations

import os
import re
import sys
from textwrap import wrap
from typing import Final, TextIO, TypeVar, cast

Value = TypeVar("Value")

#: The one list of characters that no text from outside brings onto a screen, into a log or into a
#: label: control characters with line breaks and tabs (ESC and C1 start escape sequences),
#: the separators of lines and paragraphs, characters that change the direction of text, are
#: invisible, or are half of a character.
_CONTROLS: Final = r"\x00-\x1f\x7f-\x9f"
_DECEIVING: Final = (
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff"
)
UNSAFE: Final = re.compile(f"[{_CONTROLS}{_DECEIVING}]")
_UNSAFE_IN_JSON: Final = re.compile(rf"[\x7f-\x9f{_DECEIVING}]")
#: The same as escapes of a JSON text, which has no other control characters.
_ESCAPED: Final = re.compile(rf"\\u00[01][0-9a-f]|\\[bfnrt]|[\x7f-\x9f{_DECEIVING}]", re.IGNORECASE)
_PAIRS: Final = re.compile(r"\\\\|" + _ESCAPED.pattern, re.IGNORECASE)
_ESCAPE_ITSELF: Final = re.compile(r"\\(?=u[0-9a-f]{4})")


def printable(text: str, instead: str = "?") -> str:
    """``text`` as one line, with ``instead`` for each unsafe character."""
    return UNSAFE.sub(instead, text)


def printable_lines(text: str) -> str:
    """Lines that dynctl composed, each without unsafe characters; the line breaks stay.

    Names in it must have passed :func:`printable`: their line breaks would be lines of dynctl.
    """
    return "\n".join(map(printable, text.split("\n")))


def escaped(text: str, *, reversible: bool = False) -> str:
    """``text`` as one line with ``\\uXXXX`` for each unsafe character.

    ``reversible``: also a backslash before such digits becomes one, so that texts that differ stay
    different.
    """
    if reversible and "\\u" in text:
        text = _ESCAPE_ITSELF.sub(r"\\u005c", text)
    return UNSAFE.sub(lambda found: _utf16(found[0]), text)


def printable_json(text: str) -> str:
    """A JSON text with escapes for such characters: the same value."""
    return _UNSAFE_IN_JSON.sub(lambda found: _utf16(found[0]), text)


def printable_value(value: Value) -> Value:
    """A document whose texts are printable lines; the same object where they are already.

    A document with texts of several lines that dynctl wrote has ``with_own_lines(original)``, which
    returns it with their line breaks.
    """
    import msgspec

    data = msgspec.json.encode(value)
    # Of most documents this shows as much, in a hundredth of the time of a search.
    if data.isascii() and b"\\" not in data and b"\x7f" not in data:
        return value
    encoded = data.decode()
    if _ESCAPED.search(encoded) is None:
        return value
    plain = _PAIRS.sub(lambda found: found[0] if found[0] == "\\\\" else "?", encoded)
    decoded = msgspec.json.decode(plain, type=type(value))
    restore = getattr(decoded, "with_own_lines", None)
    return decoded if restore is None else cast(Value, restore(value))


def _utf16(character: str) -> str:
    """The escapes of a character in JSON: two above U+FFFF."""
    units = character.encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs)


def say(message: str) -> None:
    """Write a line for the user to stderr."""
    sys.stderr.write(printable(message) + "\n")


#: Narrower terminals get lines of this length and wrap them.
MIN_WIDTH: Final = 64
#: Of a terminal that does not report its width.
DEFAULT_WIDTH: Final = 80
#: How further lines of a message begin: below the text of a note.
_GOES_ON: Final = " " * 6


def stream_width(stream: TextIO) -> int | None:
    """Columns of a stream: COLUMNS, else its terminal's; None in a pipe without it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return max(MIN_WIDTH, int(columns))
    if not stream.isatty():
        return None
    try:
        return max(MIN_WIDTH, os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH)
    except (OSError, ValueError):
        return DEFAULT_WIDTH


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
    width = stream_width(sys.stderr)
    if width is not None:
        sys.stderr.write("\n".join(wrapped(printable(message), width, _GOES_ON)) + "\n")
        return
    say(message)
