"""Help pages in plain text with options in named groups, as kubectl prints them.

Typer's rich help doubles the start-up time and draws boxes that do not fit 80 columns.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from dynctl.cli.global_options import DYNAMO, KUBERNETES, PANEL
from dynctl.cli.quick_values import QuickValues

#: On every page except the one of `dynctl`, which lists them.
_GLOBAL = "Global options (--frontend, --discovery, --demo, -n, -o, ..): dynctl --help"


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
        if argument and parameter.metavar:
            record = (parameter.metavar, record[1])
        sections.setdefault(title, []).append(record)
    shared = (PANEL, DYNAMO, KUBERNETES)
    own = [title for title in sections if title not in ("Arguments", "Options", *shared)]
    is_root = ctx.parent is None
    for title in ("Arguments", "Options", *own, *(shared if is_root else ())):
        if title in sections:
            with formatter.section(title):
                formatter.write_dl(sections[title])
    if not is_root:
        formatter.write_paragraph()
        formatter.write_text(_GLOBAL)
