"""Compare what a command printed with what a page shows; times, ports and ids may differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import pytest

from tests.docs.pages import Command

#: Judges what a command did (exit code, output), given its ports (real one -> the one of the page)
#: and its page.
Judge = Callable[[tuple[int, str], Command, Mapping[str, str], str], None]
#: Where a run that refreshes the pages (tests/docs/refresh.py) puts its judge.
JUDGE: Final = pytest.StashKey[Judge]()
LEFT_OUT: Final = "..."
_DURATION = re.compile(r"\d[\d,]*(\.\d+)?(?= (ms|s|min|h|d)\b)")
_CLOCK = re.compile(r"\b\d\d:\d\d:\d\d(\.\d+)?")
_HEX_NAME = re.compile(r"(?<=\bbackend/|\bprefill/)[0-9a-f]{4,}\b")
_LOCAL = re.compile(r"127\.0\.0\.1:\d{5}")


def masked(line: str) -> str:
    """``line`` without what differs from run to run: durations, times of day, ports and ids."""
    line = _HEX_NAME.sub("ID", _CLOCK.sub("CLOCK", _DURATION.sub("N", line)))
    return _LOCAL.sub("127.0.0.1:PORT", line)


def _plain(line: str) -> str:
    return " ".join(masked(line).split())


def difference(
    shown: Sequence[str], printed: str, ports: Mapping[str, str] | None = None
) -> str | None:
    """None if ``shown`` is what was ``printed``, else a description of what is missing.

    ``ports``: real one -> the one of the page. Durations, times of day, ports of simulated
    servers, ids of live workers and the width of columns do not count.
    """
    for real, written in (ports or {}).items():
        printed = re.sub(rf"\b{real}\b", written, printed)
    lines = [_plain(line) for line in printed.rstrip("\n").splitlines()]
    chunks = _chunks(shown)
    place = 0
    for number, chunk in enumerate(chunks):
        anywhere = number > 0
        found = _find(chunk, lines, place, anywhere)
        if number == len(chunks) - 1 and number > 0 and chunk:
            # Without dots after it, the last part ends where the output ends.
            end = len(lines) - len(chunk)
            found = _find(chunk, lines, end, False) if end >= place else None
        elif number == len(chunks) - 1 and chunk and found is not None:
            found = found if found + len(chunk) == len(lines) else None
        if found is None:
            missing = "\n".join(chunk)
            return f"not printed, or not here:\n{missing}\n\nprinted:\n{printed}"
        place = found + len(chunk)
    return None


def exchange(text: str, names: Mapping[str, str]) -> str:
    """``text`` with every whole word that is a key replaced by its value."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])(?:{words})(?![\w-])", lambda found: names[found[0]], text)


def check(done: tuple[int, str], command: Command, ports: Mapping[str, str], page: str) -> None:
    """Assert that a command did what its page shows."""
    code, printed = done
    where = f"{page}:{command.line}: {command.text}"
    assert "Traceback" not in printed, f"{where}\n{printed}"
    assert code == command.exit, f"{where}\nexit code {code}, expected {command.exit}\n{printed}"
    if command.shown is not None:
        missing = difference(command.shown, printed, ports)
        if missing is not None and command.exchanged:
            printed = exchange(printed, command.exchanged)
            missing = difference(command.shown, printed, ports) and missing
        assert missing is None, f"{where}\n{missing}"


def _chunks(shown: Sequence[str]) -> list[list[str]]:
    """Runs of lines between the dots; the first and the last may be empty."""
    chunks: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == LEFT_OUT:
            chunks.append([])
        else:
            chunks[-1].append(_plain(line))
    while chunks[-1] == [""]:
        chunks[-1].pop()
    return chunks


def _find(chunk: Sequence[str], lines: Sequence[str], start: int, anywhere: bool) -> int | None:
    starts: Iterable[int] = range(start, len(lines) - len(chunk) + 1) if anywhere else (start,)
    for first in starts:
        part = lines[first : first + len(chunk)]
        if len(part) == len(chunk) and all(map(_same, chunk, part)):
            return first
    return None


def _same(shown: str, printed: str) -> bool:
    if LEFT_OUT not in shown:
        return shown == printed
    pattern = ".*".join(re.escape(part) for part in shown.split(LEFT_OUT))
    return re.fullmatch(pattern, printed) is not None
