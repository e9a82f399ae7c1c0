"""Request traces: what simulations replay, and the readers of their files.

Mooncake's JSON lines (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``),
those of Bailian (Qwen), which have a ``chat_id``, and Azure's CSV
(``TIMESTAMP,ContextTokens,GeneratedTokens``), plain or compressed with gzip. A reader is a stream:
it holds one line at a time.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import named_in_errors, open_regular, single_line

TraceFormat = Literal["mooncake", "bailian", "azure"]

#: Tokens of a block that an id of Mooncake's published traces stands for.
MOONCAKE_BLOCK: Final = 512
#: The same of Bailian's.
BAILIAN_BLOCK: Final = 16
#: The longest line: two million tokens in blocks of 16 tokens, with long ids.
MOST_LINE_BYTES: Final = 4 * 1024 * 1024
#: Blank lines in a row; compressed ones cost a file almost nothing.
MOST_BLANK_LINES: Final = 10_000
MOST_TOKENS: Final = 10_000_000
#: Ten years; larger times are in another unit, or a date.
MOST_SECONDS: Final = 315_360_000.0
#: Bad lines that are kept word for word.
MOST_PROBLEMS: Final = 5

_INT63: Final = (1 << 63) - 1
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace.

    ``at``: its arrival in seconds, not before the request in front of it. ``input_tokens`` (at
    least 1) and ``output_tokens`` (at least 1) are counts. ``hash_ids`` identify the blocks of the
    prompt, each of ``block_size`` tokens: two requests with the same id at one place have the same
    tokens up to and including that block. The last id may stand for a block that is not full; ids
    of missing blocks mean that these cannot be reused. Empty names: not known. ``priority``: a
    larger one is served earlier. ``zone``: where the request comes from.
    """

    at: float
    id: str
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_size: int
    model: str = ""
    tenant: str = ""
    session: str = ""
    priority: int = 0
    zone: str = ""


@dataclass(slots=True)
class SkippedLines:
    """Bad lines or records that were left out: how many, and the first of them with the reason."""

    count: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        self.count += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


class _MooncakeLine(msgspec.Struct, gc=False):
    """A line of Mooncake's format, or of Bailian's, which has a ``chat_id``.

    Fields after ``hash_ids`` are additions that may be missing.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None
    id: str | int | None = None
    model: str | None = None
    tenant: str | int | None = None
    session_id: str | int | None = None
    priority: int = 0
    zone: str | None = None
    chat_id: str | int | None = None


class _BadLine(ValueError):
    """What is wrong with one line."""


def trace_format(path: Path) -> TraceFormat | None:
    """The format of a trace by its first line; None for anything else.

    Raises OSError, and WireError for damaged compressed data.
    """
    with _open_trace(path) as lines:
        first = next((line for _, line in _numbered_lines(lines, path) if line), b"")
    if not first:
        return "mooncake"  # an empty file is an empty trace
    if first.startswith(b"{"):
        return _json_format(first)
    names = first.decode("utf-8", "replace").split(",")
    return "azure" if _columns(names) is not None else None


def _json_format(line: bytes) -> TraceFormat | None:
    """The format of a line of JSON. None for an object without any field of a trace: prompts,
    chats, and batches of requests are lines of JSON too. A broken line may be of a trace."""
    if b'"chat_id"' in line:
        return "bailian"
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "mooncake"
    return "mooncake" if fields.keys() & set(_MooncakeLine.__struct_fields__[:4]) else None


def read_trace(
    path: Path,
    *,
    block_size: int | None = None,
    skipped: SkippedLines | None = None,
) -> Iterator[TraceRequest]:
    """The requests of a trace, one line at a time; times start where the trace has them.

    ``block_size``: tokens that one id stands for; None: those of the published traces. A bad line
    raises WireError with its number; with ``skipped`` it is left out and counted there. A trace
    without any good line raises too.
    """
    name = str(path)
    parse = _parser(path)
    count = 0
    latest, latest_line = -math.inf, 0
    with _open_trace(path) as lines:
        for number, line in _numbered_lines(lines, path):
            if not line:
                continue
            try:
                request = parse(line, number, block_size)
                if request is None:
                    continue
                if request.at < latest:
                    raise _BadLine(
                        f"its time, {request.at:,.3f} s, is before {latest:,.3f} s of line "
                        f"{latest_line:,}; expected requests in order of time: sort the file"
                    )
            except _BadLine as error:
                if skipped is None:
                    advice = "--skip-bad leaves such lines out"
                    raise WireError(f"{name}: line {number:,}", f"{error}; {advice}") from None
                skipped.add(f"line {number:,}: {error}")
                continue
            latest, latest_line = request.at, number
            count += 1
            yield request
    if not count:
        problem = "the trace is empty; expected at least one request"
        if skipped is not None and skipped.count:
            problem = (
                f"no line is good: {skipped.count:,} skipped, the first: {skipped.problems[0]}"
            )
        raise WireError(name, problem)


def _parser(path: Path) -> Callable[[bytes, int, int | None], TraceRequest | None]:
    """What reads a line, its number and the block size; raises WireError for another format."""
    kind = trace_format(path)
    if kind is None:
        raise WireError(
            str(path),
            "not a trace; expected JSON lines with timestamp, input_length, output_length and "
            f"hash_ids, a CSV file that starts with {_AZURE_HEADER}, or a recording",
        )
    return _Azure() if kind == "azure" else partial(_json_line, kind == "bailian")


def _open_trace(path: Path) -> BinaryIO:
    with named_in_errors(path), open_regular(path) as plain:
        compressed = plain.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path, "rb")) if compressed else path.open("rb")


def _numbered_lines(lines: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line without white space at its ends, with its number from 1. Raises WireError."""
    number = blank = 0
    while True:
        number += 1
        try:
            line = lines.readline(MOST_LINE_BYTES + 1)
        except EOFError:
            raise WireError(
                f"{path}: line {number:,}", "the compressed data ends here; the file was cut"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise WireError(
                f"{path}: line {number:,}", f"damaged gzip data: {single_line(str(error))}"
            ) from None
        except OSError as error:
            error.filename = str(path)
            raise
        if not line:
            return
        blank = blank + 1 if line.isspace() else 0
        if blank > MOST_BLANK_LINES:
            raise WireError(
                f"{path}: line {number:,}",
                f"more than {MOST_BLANK_LINES:,} blank lines; expected a request on each line",
            )
        if len(line) > MOST_LINE_BYTES:
            raise WireError(
                f"{path}: line {number:,}", f"longer than {MOST_LINE_BYTES:,} bytes; expected a "
                "request on each line"
            )  # fmt: skip
        yield number, (line.removeprefix(_BOM) if number == 1 else line).strip()


# -- Mooncake and Bailian --------------------------------------------------------------------------

_decode_line = msgspec.json.Decoder(_MooncakeLine).decode


def _json_line(bailian: bool, line: bytes, number: int, block_size: int | None) -> TraceRequest:
    try:
        row = _decode_line(line)
    except msgspec.ValidationError as error:
        raise _BadLine(_field_problem(str(error))) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _BadLine(f"not JSON: {single_line(str(error), 100)}") from None
    if (row.chat_id is not None) is not bailian:
        raise _BadLine("one of this line and the first has a chat_id; expected all lines or none")
    unit, second = ("s", 1.0) if bailian else ("ms", 1000.0)
    block_size = block_size or (BAILIAN_BLOCK if bailian else MOONCAKE_BLOCK)
    at = _time(row.timestamp / second, f"timestamp {row.timestamp:g} {unit}")
    tokens = _tokens("input_length", row.input_length, least=1)
    output = _tokens("output_length", row.output_length, least=0)
    hash_ids = (_chained(row.hash_ids) if bailian else row.hash_ids) or ()
    full, whole = tokens // block_size, -(-tokens // block_size)
    if hash_ids and not full <= len(hash_ids) <= whole:
        expected = f"{full:,}" if full == whole else f"{full:,} or {whole:,}"
        raise _BadLine(
            f"{len(hash_ids):,} hash_ids for {tokens:,} input tokens; expected {expected} with "
            f"blocks of {block_size:,} tokens (set another size with --trace-block-size)"
        )
    if len(set(hash_ids)) != len(hash_ids):
        raise _BadLine(
            "a hash id occurs twice; expected ids that each stand for a block and all blocks "
            "before it"
        )
    return TraceRequest(
        at,
        _name(row.id) or str(number),
        tokens,
        # An engine computes one token to find that there are none.
        max(1, output),
        hash_ids,
        block_size,
        _name(row.model),
        _name(row.tenant),
        _name(row.session_id),
        row.priority,
        _name(row.zone),
    )


def _name(value: str | int | None) -> str:
    return "" if value is None else str(value)


def _chained(blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Ids that stand for the blocks in front of them too: those of Bailian hash one block each."""
    chain = 0
    return tuple(chain := hash((chain, block)) & _INT63 for block in blocks or ())


def _field_problem(text: str) -> str:
    """msgspec's message with the field first: ``hash_ids[2]: Expected `int`, got `str```."""
    problem, _, place = text.partition(" - at `")
    where = place.rstrip("`").removeprefix("$").removeprefix(".")
    problem = problem.replace("Object missing required field", "no field").replace("`", "")
    return f"{where}: {problem}" if where else problem


# -- Azure -----------------------------------------------------------------------------------------


class _Azure:
    """Lines of Azure's CSV, in columns of any order; the first request's time is 0."""

    def __init__(self) -> None:
        self._columns: tuple[int, int, int] | None = None
        self._first: datetime | None = None

    def __call__(self, line: bytes, number: int, block_size: int | None) -> TraceRequest | None:
        cells = [cell.strip().strip('"') for cell in line.decode("utf-8", "replace").split(",")]
        if self._columns is None:
            self._columns = _columns(cells)
            return None
        if len(cells) <= max(self._columns):
            raise _BadLine(f"{len(cells)} columns; expected {_AZURE_HEADER}")
        when, context, generated = (cells[index] for index in self._columns)
        try:
            moment = datetime.fromisoformat(when)
        except ValueError:
            raise _BadLine(
                f"TIMESTAMP {single_line(when, 40)!r}; expected a time such as "
                "2024-05-10 00:00:00.009930"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        tokens = _tokens("ContextTokens", _whole("ContextTokens", context), least=1)
        output = _tokens("GeneratedTokens", _whole("GeneratedTokens", generated), least=0)
        if self._first is None:
            self._first = moment
        at = (moment - self._first).total_seconds()
        if at < 0:
            raise _BadLine(
                f"TIMESTAMP {when} is before that of the first request; expected requests in "
                "order of time: sort the file"
            )
        at = _time(at, f"TIMESTAMP {when}")
        return TraceRequest(
            at, str(number), tokens, max(1, output), (), block_size or MOONCAKE_BLOCK
        )


def _columns(names: list[str]) -> tuple[int, int, int] | None:
    """The places of the time, the input tokens and the output tokens; None without one of them."""
    plain = [name.strip().strip('"').lower() for name in names]
    wanted = [name.lower() for name in _AZURE_HEADER.split(",")]
    if not all(name in plain for name in wanted):
        return None
    when, context, generated = (plain.index(name) for name in wanted)
    return when, context, generated


def _whole(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise _BadLine(f"{name} {single_line(text, 40)!r}; expected a whole number")
    return int(text)


def _tokens(name: str, value: int, *, least: int) -> int:
    if not least <= value <= MOST_TOKENS:
        raise _BadLine(f"{name} {value:,}; expected {least} to {MOST_TOKENS:,} tokens")
    return value


def _time(seconds: float, shown: str) -> float:
    if not 0 <= seconds <= MOST_SECONDS:
        raise _BadLine(f"{shown}; expected a time since the start of the trace, at most 10 years")
    return seconds
