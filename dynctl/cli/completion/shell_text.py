"""What the three scripts share: quoting, and the tables in an order that ``case`` needs."""

from __future__ import annotations

from collections.abc import Iterator

from dynctl.cli.completion.tree import Command, Flag, Tree
from dynctl.cli.completion.values import Kind


def quoted(text: str) -> str:
    """A word for bash and zsh, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


def flags_of(tree: Tree, command: Command | None) -> Iterator[Flag]:
    """The options that every command has (None), or those that a command has besides."""
    yield from tree.common if command is None else tree.own(command)


def meaning_arms(tree: Tree) -> Iterator[tuple[list[tuple[str, str]], str]]:
    """``([(path, flag), ..], meaning)``: those with a path first, then those without (a path of
    ``*``), so that the first that fits is the right one."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path, name, value in tree.meanings():
        found.setdefault(value.text, []).append((path or "*", name))
    # Most options take anything: they are looked at last.
    ordered = sorted(found.items(), key=lambda item: item[0] == Kind.FREE)
    for everywhere in (False, True):
        for text, places in ordered:
            chosen = [place for place in places if (place[0] == "*") is everywhere]
            if chosen:
                yield chosen, text
