"""The man page, made from the command tree that the parser itself uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from dynctl.cli.app import program
from dynctl.cli.global_options import DYNAMO, KUBERNETES, PANEL
from dynctl.cli.help import help_record
from dynctl.cli.table import COMMANDS
from tests.docs.cli_page import command_sections, find_command

_HEAD = r""".\" Made from the command line itself by `make docs`; change the commands.
.TH DYNCTL 1 "" "dynctl" "User Commands"
.SH NAME
dynctl \- KV-cache-aware, topology-aware routing for LLM fleets
.SH SYNOPSIS
.B dynctl
[\fIGLOBAL OPTION\fR]... \fICOMMAND\fR [\fIOPTION\fR]...
.br
.B kubectl dynctl
\fICOMMAND\fR [\fIOPTION\fR]...
.SH DESCRIPTION
Route, explain and verify topology-aware disaggregated LLM serving.
The answer is on stdout, messages are on stderr.
"""
_TAIL = r""".SH EXIT STATUS
.TP
0
yes
.TP
1
the answer is no
.TP
2
usage or configuration
.TP
3
unreachable
.TP
4
timeout
.SH SEE ALSO
.BR kubectl (1)
"""
_GLOBAL = (PANEL, DYNAMO, KUBERNETES)


def man_page() -> str:
    """The whole page, in the macros of man(7)."""
    root: Any = program()
    lines = [_HEAD + ".SH COMMANDS"]
    for path in COMMANDS:
        lines += _command(path, find_command(root, path))
    lines.append(".SH GLOBAL OPTIONS\nThey stand before or after the command's name.")
    context = typer.Context(root, info_name="dynctl")
    for parameter in root.get_params(context):
        record = help_record(parameter, context)
        if getattr(parameter, "rich_help_panel", None) in _GLOBAL and record is not None:
            lines += _option(*record)
    return "\n".join(lines) + "\n" + _TAIL


def _command(path: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=f"dynctl {path}")
    usage = " ".join(command.collect_usage_pieces(context)).replace("[[", "[").replace("]]", "]")
    yield f".SS dynctl {_text(path)} {_text(usage)}".rstrip()
    for i, paragraph in enumerate((command.help or "").strip().split("\n\n")):
        if i:
            yield ".PP"
        yield _line(paragraph)
    for records in command_sections(command, context).values():
        for record in records:
            yield from _option(*record)


def _option(spelling: str, meaning: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_text(spelling)}"
    yield _line(meaning)


def _line(text: str) -> str:
    """A line of text; a dot or an apostrophe at its start is no request."""
    found = _text(text)
    return rf"\&{found}" if found.startswith((".", "'")) else found


def _text(text: str) -> str:
    return " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-")
