"""Rewrite the outputs that pages show: ``python -m tests.docs.refresh [PAGE ...]`` (`make docs`).

The commands run in the same worlds as in tests/docs/test_docs_commands.py. An output that still
matches stays as it is. In an output with elisions each shown part is replaced by the most similar
part of what was printed; where there is none that is similar enough, the page keeps its text, and
the page, the line and the new output are printed for a person. Read the diff.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from tests.docs.comparing import JUDGE, LEFT_OUT, difference, exchange, masked
from tests.docs.pages import ROOT, Command, all_scenes
from tests.dynamo.fleet import DYNAMO_PYTHON

_TESTS: Final = "tests/docs/test_docs_commands.py"
_DYNAMO_TESTS: Final = "tests/dynamo/test_docs.py::test_the_lines_of_a_page"
_WIDTH: Final = 80
#: A shown line is paired with a printed one at least this similar (0 to 1).
_SIMILAR: Final = 0.35
#: Costs of a shown line without a partner, and of a printed line inside a part.
_GONE, _NEW = -0.2, -0.15
_CODE: Final = re.compile(r"DY[A-Z]\d{4}")
_SAME_CODE: Final = 0.8
#: A part is replaced if its lines are on average at least this similar to the printed ones.
_SURE: Final = 0.5


@dataclass(slots=True)
class Refresher:
    """Collects what commands print. ``blocks``: (page, line of the command) -> new lines."""

    blocks: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    unsure: list[str] = field(default_factory=list)

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[JUDGE] = self.judge

    def judge(
        self, done: tuple[int, str], command: Command, ports: Mapping[str, str], page: str
    ) -> None:
        code, printed = done
        where = f"{page}:{command.line}: {command.text}"
        if code != command.exit:
            self.unsure.append(f"{where}\nexit code {code}, expected {command.exit}\n{printed}")
        if command.shown is None or difference(command.shown, printed, ports) is None:
            return
        if command.exchanged:
            other = exchange(printed, command.exchanged)
            if difference(command.shown, other, ports) is None:
                return
            printed = max((printed, other), key=lambda one: _likeness(command.shown or (), one))
        for real, written in ports.items():
            printed = re.sub(rf"\b{real}\b", written, printed)
        lines = refreshed(command.shown, printed.rstrip("\n").splitlines())
        if lines is None:
            self.unsure.append(f"{where}\n{printed}")
        else:
            self.blocks[page, command.line] = lines
            lost = [line for line in _elided(command.shown) if line not in lines]
            if lost:
                self.unsure.append(f"{where}\nleave out again what varies: {lost}")

    def write(self) -> None:
        for page in {page for page, _ in self.blocks}:
            path = ROOT / page
            lines = path.read_text(encoding="utf-8").split("\n")
            found = {line: new for (one, line), new in self.blocks.items() if one == page}
            for line, new in sorted(found.items(), reverse=True):
                start = line
                while lines[start - 1].endswith("\\"):
                    start += 1
                end = start
                while not lines[end].startswith(("```", "$ ")):
                    end += 1
                blank = [""] * (lines[end - 1] == "")
                lines[start:end] = [*new, *blank]
            path.write_text("\n".join(lines), encoding="utf-8")


def refreshed(shown: Sequence[str], printed: Sequence[str]) -> list[str] | None:
    """What a page shows of ``printed`` from now on; None where that needs a person."""
    parts = _parts(shown)
    if len(parts) == 1:
        return _kept(shown, printed)
    found = _aligned(parts, printed)
    if found is None:
        return None
    new: list[str] = []
    for number, (part, (start, end)) in enumerate(zip(parts, found, strict=True)):
        if number:
            new.append(LEFT_OUT)
        new += _kept(part, printed[start:end])
    return new if difference(new, "\n".join(printed)) is None else None


def _parts(shown: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _kept(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """``new``, with the old line where the two differ only in times and ids, or in what is left
    out inside a line."""
    by_mask = {masked(line): line for line in old}
    elided = _elided(old)

    def kept(line: str) -> str:
        for one in elided:
            if difference([one], line) is None:
                return one
        return by_mask.get(masked(line), line)

    return [kept(line) for line in new]


def _elided(shown: Sequence[str]) -> list[str]:
    """Lines that leave out a part of themselves."""
    return [line for line in shown if LEFT_OUT in line and line.strip() != LEFT_OUT]


def _aligned(parts: list[list[str]], printed: Sequence[str]) -> list[tuple[int, int]] | None:
    """The lines of ``printed`` (start, end) that each part shows; None where it is not certain.

    Lines are paired so that the sum of their similarities is highest. Printed lines are left out
    freely between parts, and at a price inside one. The first and the last part, if not empty,
    are at the start and at the end.
    """
    lines = [(number, line) for number, part in enumerate(parts) for line in part]
    words = [_words(line) for line in printed]
    best = [[0.0] * (len(printed) + 1) for _ in range(len(lines) + 1)]
    step = [["skip"] * (len(printed) + 1) for _ in range(len(lines) + 1)]

    def skipped(i: int) -> float:
        """Price of a printed line after ``i`` lines of the parts."""
        before = lines[i - 1][0] if i else -1
        after = lines[i][0] if i < len(lines) else len(parts)
        if i == 0:
            return 0.0 if not parts[0] else _NEW
        if i == len(lines):
            return 0.0 if not parts[-1] else _NEW
        return _NEW if before == after else 0.0

    for i in range(len(lines) + 1):
        line_words = _words(lines[i - 1][1]) if i else frozenset()
        for j in range(len(printed) + 1):
            options: list[tuple[float, str]] = []
            if i == j == 0:
                continue
            if j:
                options.append((best[i][j - 1] + skipped(i), "skip"))
            if i:
                options.append((best[i - 1][j] + _GONE, "gone"))
            if i and j:
                alike = _similar(line_words, words[j - 1])
                if alike >= _SIMILAR:
                    options.append((best[i - 1][j - 1] + alike, "pair"))
            best[i][j], step[i][j] = max(options)
    pairs: dict[int, int] = {}
    i, j = len(lines), len(printed)
    while i or j:
        match step[i][j]:
            case "pair":
                i, j = i - 1, j - 1
                pairs[i] = j
            case "gone":
                i -= 1
            case _:
                j -= 1
    return _ranges(parts, printed, pairs)


def _ranges(
    parts: list[list[str]], printed: Sequence[str], pairs: Mapping[int, int]
) -> list[tuple[int, int]] | None:
    found: list[tuple[int, int]] = []
    first = 0
    for number, part in enumerate(parts):
        numbers = range(first, first + len(part))
        first += len(part)
        if not part:
            at = found[-1][1] if found else 0
            found.append((at, at))
            continue
        mine = [pairs[i] for i in numbers if i in pairs]
        alike = sum(
            _similar(_words(part[i - numbers.start]), _words(printed[pairs[i]]))
            for i in numbers
            if i in pairs
        )
        if not mine or alike / len(part) < _SURE:
            return None
        start = 0 if number == 0 else mine[0]
        end = len(printed) if number == len(parts) - 1 else mine[-1] + 1
        if part[-1] != printed[end - 1]:
            end = _wrapped(printed, end)
        found.append((start, end))
    overlapping = any(a[1] > b[0] for a, b in pairwise(found))
    return None if overlapping else found


def _wrapped(printed: Sequence[str], end: int) -> int:
    """``end`` after the lines that continue the last one, because it was full."""
    while end < len(printed) and printed[end].strip():
        last, following = printed[end - 1], printed[end]
        word = following.split()[0]
        if not following.startswith(" ") or len(last) + 1 + len(word) <= _WIDTH:
            break
        end += 1
    return end


def _words(line: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w!=-]+", masked(line)))


def _similar(a: frozenset[str], b: frozenset[str]) -> float:
    """Share of common words, 0 to 1; 1 for two empty lines; high for the same code of a check."""
    alike = 2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0
    same_code = any(_CODE.fullmatch(word) for word in a & b)
    return max(alike, _SAME_CODE) if same_code else alike


def _likeness(shown: Sequence[str], printed: str) -> int:
    lines = {masked(line) for line in printed.splitlines()}
    return sum(masked(line) in lines for line in shown)


def main() -> int:
    """Returns 1 where a person is needed."""
    parser = argparse.ArgumentParser(prog="tests.docs.refresh", description=__doc__)
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="docs/routing/cost.md; default: all"
    )
    wanted = [str(Path(page).resolve().relative_to(ROOT)) for page in parser.parse_args().pages]
    scenes = [one for one in all_scenes() if not wanted or one.page in wanted]
    tests, left_out = set[str](), set[str]()
    for scene in scenes:
        if scene.world != "dynamo":
            tests.add(f"{_TESTS}::test_the_commands_of_a_page_do_what_it_shows[{scene.id}]")
        elif DYNAMO_PYTHON:
            tests.add(f"{_DYNAMO_TESTS}[{scene.id}]")
        else:
            left_out.add(scene.page)
    os.chdir(ROOT)
    refresher = Refresher()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = pytest.main([*options, *sorted(tests)], plugins=[refresher]) if tests else 0
    refresher.write()
    for page, line in sorted(refresher.blocks):
        print(f"rewritten: {page}:{line}")
    for text in refresher.unsure:
        print(f"\nplease edit by hand: {text}")
    for page in sorted(left_out):
        print(f"left out: {page}: DYNCTL_DYNAMO_PYTHON is not set")
    return 1 if ended or refresher.unsure else 0


if __name__ == "__main__":
    sys.exit(main())
