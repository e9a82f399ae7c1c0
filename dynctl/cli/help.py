"""Help pages in plain text with options in named groups, as kubectl prints them.

Typer's rich help doubles the start-up time and draws boxes that do not fit 80 columns.
"""

from textwrap import wrap
from typing import Any

from typer.core import TyperCommand, TyperGroup

from dynctl.base.quantities import duration_text
from dynctl.cli.global_options import DYNAMO, KUBERNETES, PANEL
from dynctl.cli.quick_values import QuickValues

#: Options under this heading have no effect yet: pages list only their names.
NOT_SUPPORTED = "Not supported yet (validated and ignored)"

#: Options under this heading are names that work and warn: help pages list them, completion does
#: not offer them.
OLDER_NAMES = "Older names of router settings (a warning has the current name)"

#: Widths of the column of spellings, and of the gaps beside the meanings.
_SPELLING, _NARROWEST, _GAPS = 30, 12, 4


class PlainCommand(QuickValues, TyperCommand):
    """A command whose help groups options by panel."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments without the braces of some versions of Typer: ``ID``."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class PlainGroup(QuickValues, TyperGroup):
    """A group that lists its commands before its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Spelling and meaning of a parameter, as Typer has it; durations have their unit."""
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    default = parameter.default
    if record is None or parameter.metavar != "DURATION" or not isinstance(default, float):
        return record
    seconds = default / 1000 if parameter.name.endswith("_ms") else default
    return record[0], record[1].replace(
        f"[default: {default}]", f"[default: {duration_text(seconds)}]"
    )


def options_page(root: Any, ctx: Any) -> str:
    """The global options, which no command's page repeats."""
    formatter = ctx.make_formatter()
    found = _sections(root, ctx)
    for title in (PANEL, DYNAMO, KUBERNETES):
        with formatter.section(title):
            _write_records(found[title], formatter)
    formatter.write_paragraph()
    formatter.write_text("They stand before or after the command's name.")
    formatter.write_text(
        "Exit codes: 0 yes, 1 the answer is no, 2 usage or configuration, 3 unreachable, 4 timeout."
    )
    return str(formatter.getvalue())


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (spelling, meaning) of the arguments and options below it."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = help_record(parameter, ctx)
        if record is None:
            continue
        argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None)
        title = "Arguments" if argument else panel or "Options"
        if argument and parameter.metavar:
            record = (parameter.metavar, record[1])
        sections.setdefault(title, []).append(record)
    return {title: records for title, records in sections.items() if records}


def _write_records(records: list[tuple[str, str]], formatter: Any) -> None:
    """Spellings and meanings in two columns; the first is narrower where a word needs the room."""
    longest = max(len(word) for _, meaning in records for word in meaning.split())
    room = formatter.width - longest - _GAPS
    formatter.write_dl(records, col_max=max(_NARROWEST, min(_SPELLING, room)))


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    for title, records in _sections(command, ctx).items():
        if title in (PANEL, DYNAMO, KUBERNETES):
            continue
        with formatter.section(title):
            if title == NOT_SUPPORTED:
                names = ", ".join(name.split()[0] for name, _ in records)
                indent = " " * formatter.current_indent
                lines = wrap(names, formatter.width - len(indent), break_on_hyphens=False)
                formatter.write("".join(f"{indent}{line}\n" for line in lines))
            else:
                _write_records(records, formatter)
