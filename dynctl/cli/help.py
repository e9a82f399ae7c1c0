"""Help pages: plain text, options in named groups, no library beyond Typer's own.

Typer's rich help costs a second start-up (rich is three times as heavy as Typer) and draws boxes
that do not survive 80 columns; this is what kubectl prints.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from dynctl.cli.quick_values import QuickValues


class PlainCommand(QuickValues, TyperCommand):
    """A command whose help groups options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class PlainGroup(QuickValues, TyperGroup):
    """A group that lists its commands before its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None)
        title = "Arguments" if argument else panel or "Options"
        sections.setdefault(title, []).append(record)
    order = ["Arguments", "Options", *(title for title in sections if title != "Global options")]
    for title in dict.fromkeys([*order, "Global options"]):
        if title in sections:
            with formatter.section(title):
                formatter.write_dl(sections[title])
