"""The tree of commands and options for completion scripts, read from the parser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynctl.cli.completion.values import Kind, Meaning, meaning
from dynctl.cli.help import OLDER_NAMES

#: Longer descriptions are cut, since word and description share a line.
_LONGEST: Final = 72
#: ``dynctl serve --worker URL`` means ``dynctl serve frontend --worker URL``, and ``dynctl
#: decisions --refused`` means ``dynctl decisions list --refused``.
_IMPLIED: Final[Mapping[str, str]] = {"serve": "frontend", "decisions": "list"}


@dataclass(frozen=True, slots=True)
class Flag:
    """An option. ``value`` is None for a switch."""

    names: tuple[str, ...]
    summary: str
    value: Meaning | None


@dataclass(frozen=True, slots=True)
class Command:
    """A command or a group; ``path`` is empty for the program itself.

    ``commands`` are (name, summary). ``more``: the last argument may be repeated.
    """

    path: str
    commands: tuple[tuple[str, str], ...]
    flags: tuple[Flag, ...]
    arguments: tuple[Meaning, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """All commands, each group before its commands. ``common``: the options of every command."""

    commands: tuple[Command, ...]
    common: tuple[Flag, ...]

    def own(self, command: Command) -> tuple[Flag, ...]:
        """The options of a command without the common ones."""
        return tuple(flag for flag in command.flags if flag not in self.common)

    def meanings(self) -> Iterator[tuple[str, str, Meaning]]:
        """(path, flag, meaning) of every option with a value; an empty path applies to all other
        paths."""
        by_name: dict[str, dict[str, Meaning | None]] = {}
        for command in self.commands:
            for flag in command.flags:
                for name in flag.names:
                    by_name.setdefault(name, {})[command.path] = flag.value
        for name, found in sorted(by_name.items()):
            values = list(found.values())
            usual = max(values, key=values.count)
            for path, value in found.items():
                # An option is a switch or takes a value in all commands; a test verifies that.
                if value is not None and value != usual:
                    yield path, name, value
            if usual is not None:
                yield "", name, usual


def read_tree(root: Any) -> Tree:
    """The tree of a click group, without hidden commands and options."""
    commands = tuple(_commands(root, ""))
    first, *rest = (set(command.flags) for command in commands)
    shared = first.intersection(*rest)
    return Tree(commands, tuple(flag for flag in commands[0].flags if flag in shared))


def _commands(command: Any, path: str) -> Iterator[Command]:
    children = _children(command)
    flags = [_flag(path, one) for one in command.params if _is_option(one)]
    flags += [Flag(("--help", "-h"), "Show the help page", None)]
    implied = _IMPLIED.get(path)
    if implied in children:
        inner = (
            _flag(f"{path} {implied}", one) for one in children[implied].params if _is_option(one)
        )
        flags += [flag for flag in inner if flag not in flags]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    yield Command(
        path,
        tuple((name, brief(child.short_help or child.help)) for name, child in children.items()),
        tuple(flags),
        tuple(meaning(path, (), one.metavar) for one in arguments),
        bool(arguments) and arguments[-1].nargs == -1,
    )
    for name, child in children.items():
        yield from _commands(child, f"{path} {name}".strip())


def _children(command: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(command, "commands", {})
    order = command.list_commands(None) if found else []
    return {name: found[name] for name in order if not found[name].hidden}


def _is_option(parameter: Any) -> bool:
    if parameter.param_type_name != "option" or parameter.hidden:
        return False
    return getattr(parameter, "rich_help_panel", None) != OLDER_NAMES


def _flag(path: str, option: Any) -> Flag:
    names = (*option.opts, *option.secondary_opts)
    value = None if option.is_flag else meaning(path, names, option.metavar)
    return Flag(names, brief(option.help), value)


def brief(text: str | None) -> str:
    """The first sentence of a help text, without full stop and defaults."""
    line = " ".join((text or "").partition(" [")[0].split())
    sentence = line.partition(". ")[0].partition("; ")[0].removesuffix(".")
    if len(sentence) <= _LONGEST:
        return sentence
    return sentence[: _LONGEST - 2].rpartition(" ")[0] + " .."


def quoted(text: str) -> str:
    """A word for bash and zsh, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


def flags_of(tree: Tree, command: Command | None) -> Iterator[Flag]:
    """The common options (None), or the own options of a command."""
    yield from tree.common if command is None else tree.own(command)


def meaning_arms(tree: Tree) -> Iterator[tuple[list[tuple[str, str]], str]]:
    """``([(path, flag), ..], meaning)``: with a path first, then without (path ``*``), so that the
    first match is the right one."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path, name, value in tree.meanings():
        found.setdefault(value.text, []).append((path or "*", name))
    # Most options accept any text; they come last.
    ordered = sorted(found.items(), key=lambda item: item[0] == Kind.FREE)
    for everywhere in (False, True):
        for text, places in ordered:
            chosen = [place for place in places if (place[0] == "*") is everywhere]
            if chosen:
                yield chosen, text
