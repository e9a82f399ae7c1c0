"""User-visible texts and names are in plain words: banned words stay out of them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.commands import all_commands

ROOT: Final = Path(__file__).parents[1]

#: Words and phrases that no text for users contains, with the plain ones.
BANNED: Final[Mapping[str, str]] = {
    r"told|tells?|telling": "reports, shows, contains",
    r"nobody|somebody|everybody|whoever": "name the component",
    r"anew": "again",
    r"otherwise than": "different from",
    r"of now": "current",
    r"(?<!there )(?<!answer )is no\b(?! longer\b)": "is not a",
    r"without holes": "contiguous",
    r"could(?: not)? be had": "unavailable",
    r"what was met": "show an example",
    r"again by now": "is overdue",
    r"a chunk's size is not one": "invalid chunk size",
    r"this is no such": "not a ... file",
    r"how much \w+ prefers": "weight of the preference",
    r"that is named is there": "the referenced ... do not exist",
    r"how fresh": "age",
    r"is not kept with": "not recorded for",
    r"\d+, \d+ gone": "0/2",
    r"types them twice": "saved",
    r"knows nothing|knows no|know nothing": "unknown",
}
_BANNED: Final = re.compile("|".join(rf"\b(?:{one})" + r"(?!\w)" for one in BANNED), re.I)

#: Words that no name of a module, class, function or argument contains.
BANNED_IN_NAMES: Final = frozenset(
    {"told", "untold", "asked", "unasked", "looking", "standing", "settling", "anew", "nobody"}
)

#: Texts of foreign systems, word for word -> where they come from.
QUOTED: Final[Mapping[str, str]] = {}

#: JSON field names that stay for the tools that read them.
FIELDS: Final = frozenset({"told", "waiting_told"})

#: Rooms whose texts are still being rewritten. A clean room is removed from this list; the list
#: gets no new entries.
NOT_CLEAN: Final[frozenset[str]] = frozenset()


PAGES: Final = {
    "README.md": ("README.md",),
    "docs": ("docs/*.md", "docs/tour/*.md"),
    "docs/decisions": ("docs/decisions/*.md",),
}
ROOMS: Final = sorted(
    {"completions", "dynctl", "router_core", *PAGES}
    | {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("dynctl/*/__init__.py")}
)


def texts(room: str) -> Iterator[tuple[str, str]]:
    """(place, text) of everything in a room that a user may read."""
    for page in PAGES.get(room, ()):
        for path in sorted(ROOT.glob(page)):
            yield from prose(path)
    for path in sources(room):
        yield from literals(path)
    if room == "completions":
        for path in sorted((ROOT / room).iterdir()):
            yield from lines(path)
    if room == "dynctl/cli":
        yield from help_texts(all_commands())
    if room.startswith("dynctl/"):
        for path in sorted((ROOT / room).rglob("*.toml")):
            for key, value in strings(tomllib.loads(path.read_text(encoding="utf-8"))):
                yield f"{place(path)}: {key}", value


def sources(room: str) -> list[Path]:
    """The modules of a room."""
    if room == "dynctl":
        return sorted((ROOT / room).glob("*.py"))
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else []


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def literals(path: Path) -> list[tuple[str, str]]:
    """String literals of a module that are not docstrings; none where no word is banned."""
    text = path.read_text(encoding="utf-8")
    if not _BANNED.search(text):
        return []
    tree = ast.parse(text)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        (f"{place(path)}:{node.lineno}", node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documentation
    ]


def names(path: Path) -> Iterator[tuple[str, str]]:
    """Names of the module, its classes and functions, and their arguments."""
    yield place(path), path.stem
    text = path.read_text(encoding="utf-8")
    if not any(word in text.lower() for word in BANNED_IN_NAMES):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{place(path)}:{node.lineno}", node.name
        elif isinstance(node, ast.arg):
            yield f"{place(path)}:{node.lineno}", node.arg


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of a document."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from strings(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, key)


def help_texts(command: Any, path: str = "dynctl") -> Iterator[tuple[str, str]]:
    yield f"{path} --help", command.help or ""
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from help_texts(inner, f"{path} {name}")


def lines(path: Path) -> list[tuple[str, str]]:
    found = path.read_text(encoding="utf-8").splitlines()
    return [(f"{place(path)}:{number}", line) for number, line in enumerate(found, start=1)]


def prose(path: Path) -> list[tuple[str, str]]:
    """The lines of a page outside its code blocks and comments."""
    found, fence = [], ""
    for where, line in lines(path):
        if opened := re.match(r"`{3,}", line):
            fence = "" if fence == opened[0] else fence or opened[0]
        elif not fence:
            found.append((where, re.sub(r"<!--.*?-->", "", line)))
    return found


def findings(room: str) -> list[str]:
    """Banned words in a room, with their places."""
    found = []
    for where, text in texts(room):
        for quoted in QUOTED:
            text = text.replace(quoted, "")
        if text in FIELDS:
            continue
        found += [
            f"{where}: {word[0].strip()!r} in {text!r:.90}" for word in _BANNED.finditer(text)
        ]
    for path in sources(room):
        found += [f"{where}: the name {name}" for where, name in names(path) if banned_name(name)]
    return found


def banned_name(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+", name)
    return any(word.lower() in BANNED_IN_NAMES for word in words)


@pytest.mark.parametrize("room", ROOMS)
def test_texts_and_names_are_plain(room: str) -> None:
    found = findings(room)
    if room in NOT_CLEAN:
        assert found, f"{room} is clean: remove it from NOT_CLEAN"
    else:
        assert not found, "\n".join(found)


def test_lists_are_exact() -> None:
    assert set(ROOMS) >= NOT_CLEAN
    everything = "\n".join(text for room in ROOMS for _, text in texts(room))
    assert [one for one in QUOTED if one not in everything] == []


@pytest.mark.parametrize(
    "text",
    [
        "no finding is told",
        "names nobody who could be asked",
        "the events of every worker are without holes",
        "it should have told its load again by now",
        "take the kubeconfig anew from whoever runs the cluster",
        "a chunk's size is not one",
        "X is no kubeconfig",
        "this is no such file",
        "how much preferred prefers",
        "no topology that is named is there",
        "could not be had",
        "2, 2 gone",
    ],
)
def test_banned_phrases_are_found(text: str) -> None:
    assert _BANNED.search(text)


def test_plain_phrases_are_not_found() -> None:
    for text in ("there is no worker", "is no longer running", "masked", "again", "is not a file"):
        assert not _BANNED.search(text)
    assert not banned_name("outstanding_tasks")
    assert not banned_name("masked")
    assert banned_name("_is_told")
    assert banned_name("WhoAsked")


if __name__ == "__main__":
    import sys

    for one in sys.argv[1:] or ROOMS:
        for text in findings(one):
            sys.stdout.write(f"{text}\n")
