"""The global options of one command line, merged from left to right."""

from dataclasses import fields
from typing import Any

import typer

from dynctl.base.options import GlobalOptions

#: Before the name of a global option, in the parameters of commands and groups.
PREFIX = "global_"


def merge(context: typer.Context, arguments: dict[str, Any]) -> dict[str, Any]:
    """Move the global options from ``arguments`` over those given further left."""
    merged: dict[str, Any] = dict(context.obj) if isinstance(context.obj, dict) else {}
    for item in fields(GlobalOptions):
        value = arguments.pop(PREFIX + item.name, None)
        if item.name == "frontend":
            value = (*merged.get("frontend", ()), *value) if value else None
        if value is not None:
            merged[item.name] = value
    context.obj = merged
    return merged


def options_of_line(context: typer.Context) -> GlobalOptions:
    """The global options of a line that is still typed, before and after the command's name."""
    contexts: list[Any] = [context]
    while contexts[0].parent is not None:
        contexts.insert(0, contexts[0].parent)
    merged: dict[str, Any] = {}
    for part in contexts:
        part.obj = dict(merged)
        # A command may declare a global option itself.
        values = {
            PREFIX + item.name: part.params.get(item.name) or part.params.get(PREFIX + item.name)
            for item in fields(GlobalOptions)
        }
        merged = merge(part, values)
    return GlobalOptions(**merged, given=frozenset(merged))
