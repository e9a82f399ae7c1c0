"""Help pages: what they show, drawn with rich in boxes, a box for each group of options.

Typer's own boxes shorten names of options and variables at 80 columns; these do not. Groups that
few users need stand behind ``--help=GROUP``, and all of them behind ``--help=all``.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from dynctl.base.errors import UsageProblem
from dynctl.base.options import OutputFormat
from dynctl.base.quantities import duration_text
from dynctl.cli.global_options import DYNAMO, KUBERNETES, PANEL
from dynctl.cli.table import COMMANDS, Command, Reads

#: Options under this heading have no effect yet.
NOT_SUPPORTED: Final = "Not supported yet (validated and ignored)"
#: Options under this heading are names that work and warn.
OLDER_NAMES: Final = "Older names of router settings (a warning has the current name)"

_GLOBAL: Final = (PANEL, DYNAMO, KUBERNETES)
#: Shown only by name, or with ``all``.
_RARE: Final = (*_GLOBAL, NOT_SUPPORTED, OLDER_NAMES)
_ALL: Final = "all"
#: Columns of a page, and of the spelling of an option.
_WIDEST, _SPELLING, _NARROWEST = 100, 28, 12


class _GivenValues:
    """Converts only values that need it: Typer 0.29 builds a pydantic converter for each option,
    given or not, which takes longer than a short command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option among them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if "process_value" not in vars(parameter):
                parameter.process_value = partial(
                    _convert_value, parameter, parameter.process_value
                )
        return parameters


def _convert_value(parameter: Any, convert: Callable[..., Any], context: Any, value: Any) -> Any:
    """The value that the command receives; ``convert`` is Typer's conversion."""
    several = parameter.multiple or parameter.nargs != 1
    descriptor = getattr(parameter, "type_descriptor", None)
    if value is None or value == ():
        if parameter.required and not context.resilient_parsing:
            return convert(context, value)
        value = () if several else None
    elif descriptor is None:
        return convert(context, value)
    elif several and descriptor.annotation == list[str]:
        value = tuple(value)
    elif type(value) is not descriptor.annotation:
        try:
            value = _read_text(value, descriptor)
        except _NotPlain:
            return convert(context, value)
    # Otherwise a text, or a default.
    if parameter.callback is not None:
        return parameter.callback(context, parameter, value)
    return value


class _NotPlain(Exception):
    """Typer converts this value, or refuses it."""


def _read_text(text: Any, descriptor: Any) -> Any:
    """What a text of the command line is in the type of its option; raises _NotPlain."""
    information, annotation = descriptor.parameter_info, descriptor.annotation
    if information.parser is not None:
        return information.parser(text)
    if annotation is OutputFormat and text in list(OutputFormat):
        return OutputFormat(text)
    if annotation is Path and (not os.path.exists(text) or os.access(text, os.R_OK)):
        return Path(text)
    raise _NotPlain


class CommandPage(_GivenValues, TyperCommand):
    """A command with a page of this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(page(self, ctx))


class GroupPage(_GivenValues, TyperGroup):
    """A group of commands with a page of this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(page(self, ctx))


def help_wanted(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The words with a plain ``--help``, and the group of ``--help=GROUP``; empty without one."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:end]):
        name, equals, group = word.partition("=")
        if name == "--help" and equals:
            words[place] = name
            return words, group.strip().lower() or _ALL
    return words, ""


def chosen(arguments: Sequence[str], root: Any) -> tuple[str, Any]:
    """The path of the command that the arguments name, with the program, and the command."""
    path, command = "dynctl", root
    for word in arguments:
        below = getattr(command, "commands", {}).get(word)
        if below is not None:
            path, command = f"{path} {word}", below
    return path, command


def arrange(path: str, command: Any, group: str = "") -> None:
    """Hide the options that the help page of a command does not show.

    Without ``group`` these are the rare ones, and all but the first of a command that has many.
    Raises UsageProblem for a group that the command does not have.
    """
    row = COMMANDS.get(path.partition(" ")[2])
    options = [option for option in command.params if option.param_type_name == "option"]
    groups = list(dict.fromkeys(_group_of(_title(option)) for option in options))
    if group not in ("", _ALL):
        named = [name for name in groups if group in name]
        if not named:
            raise UsageProblem(
                f"--help={group}: {path} has no such group of options; expected one of "
                f"{', '.join((_ALL, *groups))}"
            )
        for option in options:
            option.hidden = _group_of(_title(option)) not in named
    elif not group:
        first = row.first if row else ()
        for option in options:
            rare = not set(option.opts) & set(first) if first else _title(option) in _RARE
            option.hidden = rare
        command.epilog = "\n".join(_more(row, groups))


def _title(option: Any) -> str:
    return option.rich_help_panel or "Options"


def _group_of(title: str) -> str:
    """The word of a heading in ``--help=GROUP``: ``Router settings`` is ``router-settings``."""
    if title in _GLOBAL:
        return "global"
    return re.sub(r"[^a-z]+", "-", title.partition(" (")[0].lower()).strip("-")


def _more(row: Command | None, groups: Sequence[str]) -> Iterator[str]:
    """How to see what the page does not show."""
    if row is not None and row.first:
        others = [name for name in groups if name != "global"]
        yield f"More options: --help=all, or --help=GROUP with one of {', '.join(others)}."
    served = row is not None and row.serves
    if served or (row is not None and row.reads is Reads.NOTHING):
        some = "--discovery, --file-kv, .." if row and row.unserved else "-o, --no-color, --debug"
    elif row is not None and row.reads is Reads.CLUSTER:
        some = "-n, -A, --kubeconfig, -o, .."
    else:
        some = "--frontend, --discovery, --demo, -n, -o, .."
    yield f"Global options ({some}): --help=global"


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Spelling and meaning of a parameter, as Typer has it; durations have their unit."""
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    if record is not None and parameter.param_type_name == "argument" and parameter.metavar:
        record = (parameter.metavar, record[1])
    default = parameter.default
    if record is None or parameter.metavar != "DURATION" or not isinstance(default, float):
        return record
    seconds = default / 1000 if parameter.name.endswith("_ms") else default
    return record[0], record[1].replace(
        f"[default: {default}]", f"[default: {duration_text(seconds)}]"
    )


# -- drawing ---------------------------------------------------------------------------------------


def page(command: Any, ctx: Any) -> str:
    """The page of a command or group for the terminal, or of 80 columns."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    with console.capture() as captured:
        usage = " ".join(command.collect_usage_pieces(ctx))
        console.print(Text.assemble(("Usage: ", "bold"), f"{ctx.command_path} {usage}"))
        for paragraph in (command.help or "").strip().split("\n\n"):
            console.print(Text("\n" + " ".join(paragraph.split())))
        console.print()
        for title, records in _boxes(command, ctx).items():
            console.print(_box(title, records, console.width - 4))
        for line in (command.epilog or "").splitlines():
            console.print(Text(line))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _boxes(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (spelling, meaning) of each argument, command or option below it."""
    row = COMMANDS.get(ctx.command_path.partition(" ")[2])
    first = row.first if row is not None else ()
    # With a group, or with `all`, every option has its own box and its whole meaning.
    chosen_few = bool(first) and bool(command.epilog)
    parameters = command.get_params(ctx)
    if chosen_few:
        order = {name: place for place, name in enumerate(first)}
        parameters = sorted(
            parameters, key=lambda parameter: order.get(parameter.opts[0], len(order))
        )
    boxes: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Commands": [], "Options": []}
    for name, below in getattr(command, "commands", {}).items():
        # A group has no summary: the first sentence of its page.
        boxes["Commands"].append((name, below.short_help or f"{below.help} ".split(". ")[0] + "."))
    for parameter in parameters:
        record = None if getattr(parameter, "hidden", False) else help_record(parameter, ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            boxes["Arguments"].append(record)
        else:
            title = "Options" if chosen_few else _title(parameter)
            boxes.setdefault(title, []).append(_brief(*record) if chosen_few else record)
    return {title: records for title, records in boxes.items() if records}


def _brief(spelling: str, meaning: str) -> tuple[str, str]:
    """The spelling, and the first sentence of the meaning with the default."""
    sentence = re.split(r"(?<=\w)\.\s|\s\[", meaning, maxsplit=1)[0].rstrip(".")
    default = re.search(r"default: [^;\]]+", meaning)
    return spelling, f"{sentence}." + (f" [{default[0]}]" if default else "")


def _box(title: str, records: Sequence[tuple[str, str]], width: int) -> Any:
    """Spellings and meanings in two columns; a long spelling has a line of its own."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    longest_word = max(len(word) for _, meaning in records for word in (meaning.split() or [""]))
    longest = max(len(spelling) for spelling, _ in records)
    column = max(_NARROWEST, min(longest, _SPELLING, width - longest_word - 2))
    lines: list[Text] = []
    for spelling, meaning in records:
        first, *rest = wrap(meaning, width - column - 2, break_on_hyphens=False) or [""]
        name = Text(spelling, style="bold cyan")
        if len(spelling) > column:
            lines += [name, Text(" " * (column + 2) + first)]
        else:
            lines.append(Text.assemble(name, " " * (column + 2 - len(spelling)), first))
        lines += [Text(" " * (column + 2) + line) for line in rest]
    return Panel(Group(*lines), title=title, title_align="left", border_style="dim")
