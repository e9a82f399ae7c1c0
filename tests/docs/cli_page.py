"""docs/cli.md, made from the command tree that the parser itself uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from dynctl.cli.app import program
from dynctl.cli.global_options import DYNAMO, KUBERNETES, PANEL
from dynctl.cli.help import help_record
from dynctl.cli.table import COMMANDS

_HEAD = """\
<!-- Made from the command line itself by `make docs`; change the commands. -->
# Every command

`dynctl COMMAND --help=all` shows the same. The [global options](#global-options) stand before or
after the command's name; `dynctl --help=global` and the end of this page list them. Exit codes:
0 yes, 1 the answer is no, 2 usage or configuration, 3 unreachable, 4 timeout. The answer is on
stdout, messages are on stderr.
"""
_GLOBAL_PANELS = (PANEL, DYNAMO, KUBERNETES)


def cli_page() -> str:
    """The whole page."""
    root = program()
    parts = [_HEAD, _overview()]
    for path in COMMANDS:
        parts.append("\n".join(_command(path, find_command(root, path))) + "\n")
    parts.append("\n".join(_global(root)) + "\n")
    return "\n".join(parts)


def find_command(root: Any, path: str) -> Any:
    found = root
    for word in path.split():
        found = found.commands[word]
    return found


def _overview() -> str:
    rows = [
        f"| [`dynctl {path}`](#dynctl-{_anchor(path)}) | {row.summary} |"
        for path, row in COMMANDS.items()
    ]
    return "\n".join(["| command | |", "|---|---|", *rows]) + "\n"


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


def _command(path: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=f"dynctl {path}")
    usage = " ".join(command.collect_usage_pieces(context)).replace("[[", "[").replace("]]", "]")
    yield f"## dynctl {path}"
    yield ""
    yield f"`dynctl {path}{' ' + usage if usage else ''}`"
    yield ""
    yield _prose(command.help)
    sections = command_sections(command, context)
    for title, records in sections.items():
        yield ""
        yield f"| {title.lower() if title in ('Arguments', 'Options') else title} | |"
        yield "|---|---|"
        yield from (_row(*record) for record in records)


def command_sections(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (spelling, meaning), without the options that every command has."""
    found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        record = help_record(parameter, context)
        panel = getattr(parameter, "rich_help_panel", None)
        if record is None or panel in _GLOBAL_PANELS or "--help" in parameter.opts:
            continue
        title = "Arguments" if parameter.param_type_name == "argument" else panel or "Options"
        found.setdefault(title, []).append(record)
    return {title: records for title, records in found.items() if records}


def _global(root: Any) -> Iterator[str]:
    context = typer.Context(root, info_name="dynctl")
    yield "## Global options"
    panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in _GLOBAL_PANELS}
    for parameter in root.get_params(context):
        panel = getattr(parameter, "rich_help_panel", None)
        record = help_record(parameter, context)
        if panel in panels and record is not None:
            panels[panel].append(record)
    for panel, records in panels.items():
        yield ""
        yield f"| {'everywhere' if panel == PANEL else panel} | |"
        yield "|---|---|"
        yield from (_row(*record) for record in records)


def _row(spelling: str, meaning: str) -> str:
    spelling = (
        spelling.replace("<int range>", "N").removesuffix(" <str>").removesuffix(" <list[str]>")
    )
    return f"| `{_cell(spelling)}` | {_cell(_marked(meaning))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _marked(text: str) -> str:
    """Nothing in angle brackets is taken for HTML, no asterisk for emphasis."""
    return re.sub(r"([<*])", r"\\\1", text)


def _prose(text: str | None) -> str:
    paragraphs = (text or "").strip().split("\n\n")
    return "\n\n".join(_marked(" ".join(one.split())) for one in paragraphs)
