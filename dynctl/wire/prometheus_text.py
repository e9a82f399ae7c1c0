"""Read samples from the Prometheus text format.

The only reader of metrics: engines and Dynamo frontends. It parses the wanted metrics only, which
is why it is not the parser of prometheus-client: docs/decisions/0020-metrics-are-read-by-hand.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from dynctl.base.decode_errors import WireError


class Sample(NamedTuple):
    """One line. ``value`` is the text of a number."""

    name: str
    labels: dict[str, str]
    value: str


class _BadSample(Exception):
    """``at``: offset in the text. To count lines up to it for every bad line would be quadratic."""

    def __init__(self, at: int, problem: str) -> None:
        self.at = at
        self.problem = problem


#: The first line that is neither blank nor a comment nor starts with the name of a metric.
_BAD_LINE: Final = re.compile(r"\n(?![ \t]*(?:[a-zA-Z_:][a-zA-Z0-9_:]*[{ \t]|#|\n|\Z))")
#: A label value has no bare quote, backslash or newline.
_LABEL: Final = re.compile(
    r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*)"[ \t]*'
)
_CLOSING_BRACE: Final = re.compile(r"[ \t]*\}")
_VALUE: Final = re.compile(r"[ \t]*([-+.0-9A-Za-z]+)(?:[ \t]+-?[0-9]+)?[ \t]*(?=\n|\Z)")
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPES: Final = {"n": "\n", "\\": "\\", '"': '"'}


def read_samples(
    body: bytes, wanted: frozenset[str], *, max_bytes: int, strict: bool = True
) -> Iterator[Sample]:
    """The samples of the ``wanted`` metrics, in order.

    If ``strict``, a body that is too large, not UTF-8 or not in the format raises WireError with
    the line; else its bad lines are skipped, and a body that is too large has no samples.
    """
    if len(body) > max_bytes:
        if strict:
            raise WireError("metrics", f"{len(body):,} bytes are over the limit of {max_bytes:,}")
        return
    try:
        text = "\n" + body.decode(errors="strict" if strict else "replace")
    except UnicodeDecodeError as error:
        raise WireError("metrics", f"not UTF-8 at byte {error.start:,}") from None
    if strict and (bad := _BAD_LINE.search(text)):
        raise _error(text, bad.end(), "expected the name of a metric")
    for row in _rows(wanted).finditer(text):
        try:
            yield _sample(text, row)
        except _BadSample as error:
            if strict:
                raise _error(text, error.at, error.problem) from None


@cache
def _rows(names: frozenset[str]) -> re.Pattern[str]:
    """The start of each line with one of the names, up to its labels or its value."""
    return re.compile(rf"\n[ \t]*({'|'.join(map(re.escape, sorted(names)))})(?=[{{ \t])[ \t]*")


def _sample(text: str, row: re.Match[str]) -> Sample:
    """``name{labels} value [timestamp]``."""
    at = row.end()
    labels: dict[str, str] = {}
    if text.startswith("{", at):
        at += 1
        while match := _LABEL.match(text, at):
            value = match[2]
            labels[match[1]] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
            at = match.end()
            if not text.startswith(",", at):
                break
            at += 1
        closing = _CLOSING_BRACE.match(text, at)
        if closing is None:
            raise _BadSample(at, 'expected labels as {name="value",..}')
        at = closing.end()
    number = _VALUE.match(text, at)
    if number is None:
        raise _BadSample(at, "expected a value after the name and labels")
    try:
        float(number[1])
    except ValueError:
        raise _BadSample(at, "expected a number as the value") from None
    return Sample(row[1], labels, number[1])


def _error(text: str, at: int, problem: str) -> WireError:
    return WireError(f"metrics line {text.count(chr(10), 0, at)}", problem)


def _unescape(match: re.Match[str]) -> str:
    """An escape that the format does not define stays as it is."""
    return _ESCAPES.get(match[1], match[0])
