"""Parse a page of the documentation: its commands, their shown output, the worlds they run in.

Two kinds of code blocks are run. ``console`` blocks are sessions: ``$ `` and a command, then its
output; a line of three dots leaves lines out, three dots inside a line leave out a part of it.
``sh`` blocks are commands alone. Comments in the page, which readers do not see, add the rest:

- ``<!-- world: cluster node-relabelled -->``: the blocks from here on run in a new world;
- ``<!-- run: kubectl label ... -->``: a command that runs here and is not shown;
- ``<!-- exit: 1 -->``: the exit code of the last command of the next block;
- ``<!-- file: deploy.yaml -->``: the next block is written to a file of that name;
- ``<!-- either: a/b zone-a/zone-b -->``: the next block may also have these names exchanged, for
  example where a tie is decided at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
#: Pages and folders without commands of their own to run.
GENERATED: Final = ("checks", "cli.md")
NOWHERE: Final = "none"

_COMMENT = re.compile(r"^<!-- (world|run|exit|file|either): (.+?) -->$")
_FENCE = re.compile(r"^(`{3,})(\w*)$")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page. ``shown`` None: its output is not shown. ``line`` counts from 1.

    ``exchanged``: names that may stand for one another, both ways.
    """

    text: str
    line: int
    shown: tuple[str, ...] | None = None
    exit: int = 0
    exchanged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class File:
    """A file that a page shows and whose commands read."""

    name: str
    text: str


@dataclass(slots=True)
class Scene:
    """Commands and files that share one world, in their order."""

    page: str
    world: str
    line: int
    steps: list[Command | File] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}:{self.world}".replace(" ", "-")

    @property
    def commands(self) -> list[Command]:
        return [step for step in self.steps if isinstance(step, Command)]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block. ``line`` is that of its first line."""

    language: str
    line: int
    lines: tuple[str, ...]


def pages() -> list[Path]:
    """Every page whose commands are all run."""
    found = sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)
    outside = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")]
    return [path for path in found if path.relative_to(DOCS).parts[0] not in GENERATED] + outside


def written() -> list[Path]:
    """Every page that a person writes, decision records included: the pages whose words count.

    Compatibility, reliability and benchmarks are made of recorded runs.
    """
    records = sorted((DOCS / "decisions").iterdir())
    recorded = ("compatibility.md", "reliability.md", "benchmarks.md")
    return [path for path in (README, *pages(), *records) if path.name not in recorded]


def by_hand(path: Path) -> str:
    """A page without comments and without the parts that are made from the code."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> Iterator[Block | tuple[str, str, int]]:
    """The code blocks and the comments (kind, value, line) of a page, in their order."""
    fence, language, start = "", "", 0
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            if line == fence:
                yield Block(language, start, tuple(inside))
                fence, inside = "", []
            else:
                inside.append(line)
        elif opened := _FENCE.match(line):
            fence, language, start = opened[1], opened[2], number + 1
        elif comment := _COMMENT.match(line):
            yield comment[1], comment[2], number
    assert not fence, f"a code block is not closed (line {start})"


def all_scenes() -> list[Scene]:
    """Scenes of every page, and those of the README that run on a cluster.

    The README's other commands have a test of their own (tests/dynctl/test_readme.py).
    """
    readme = [scene for scene in scenes(README) if scene.world != NOWHERE]
    return [*readme, *(scene for path in pages() for scene in scenes(path))]


def scenes(path: Path) -> list[Scene]:
    """The scenes of a page that have commands."""
    page = name_of(path)
    found = [Scene(page, NOWHERE, 1)]
    exit_code, file, exchanged = 0, "", dict[str, str]()
    for item in blocks(path.read_text(encoding="utf-8")):
        if not isinstance(item, Block):
            kind, value, line = item
            if kind == "world":
                found.append(Scene(page, value, line))
            elif kind == "run":
                found[-1].steps.append(Command(value, line))
            elif kind == "exit":
                exit_code = int(value)
            elif kind == "either":
                pairs = [pair.partition("/") for pair in value.split()]
                exchanged = {a: b for a, _, b in pairs} | {b: a for a, _, b in pairs}
            else:
                file = value
        elif file:
            found[-1].steps.append(File(file, "\n".join(item.lines) + "\n"))
            file = ""
        elif item.language in ("console", "sh"):
            commands = _session(item) if item.language == "console" else _plain(item)
            commands[-1] = replace(commands[-1], exit=exit_code)
            found[-1].steps += [replace(one, exchanged=exchanged) for one in commands]
            exit_code, exchanged = 0, {}
    return [scene for scene in found if scene.commands]


def _session(block: Block) -> list[Command]:
    """``$ command``, continued after a backslash, then its output."""
    found: list[Command] = []
    text, start, shown = "", 0, list[str]()

    def done() -> None:
        if text:
            found.append(Command(text, start, tuple(shown) or None))

    for number, line in enumerate(block.lines, start=block.line):
        if line.startswith("$ "):
            done()
            text, start, shown = line[2:], number, []
        elif text.endswith("\\"):
            text = text[:-1] + " " + line.strip()
        else:
            assert text, f"line {number}: a console block begins with `$ ` and a command"
            shown.append(line)
    done()
    return found


def _plain(block: Block) -> list[Command]:
    found: list[Command] = []
    text, start = "", 0
    for number, line in enumerate(block.lines, start=block.line):
        start = start if text else number
        text += line.rstrip("\\").strip() + " "
        if not line.endswith("\\"):
            if text.strip() and not text.startswith("#"):
                found.append(Command(text.strip(), start))
            text = ""
    return found
