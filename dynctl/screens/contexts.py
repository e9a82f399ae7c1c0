"""`context`: the list, one context, and changes."""

from __future__ import annotations

from typing import Any

from dynctl.documents.contexts import (
    ContextChange,
    ContextDetail,
    ContextList,
    ContextRow,
    ContextValue,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, table


def context_list(result: ContextList, canvas: Canvas) -> str:
    """One line per context; ``*`` marks the current one."""
    if not result.contexts:
        return f"{result.file} has no contexts\nadd one: dynctl context add NAME --frontend URL\n"
    columns: list[Column[ContextRow]] = [
        Column(
            "current", " ", lambda row: row.current, text=lambda row: "*" if row.current else ""
        ),
        Column("name", "NAME", lambda row: row.name, name=True),
        Column("values", "OPTIONS", lambda row: row.values, text=_line, name=True, shortest=20),
    ]
    return table(columns, result.contexts, canvas)


def context_detail(result: ContextDetail, canvas: Canvas) -> str:
    """One line per option: its value and where it comes from."""
    if result.name is None:
        head = [f"no context  (none is current in {result.file})"]
    else:
        by = {"current": "current", "argument": f"as with --context {result.name}"}
        chosen = by.get(result.chosen_by, f"chosen by {result.chosen_by}")
        head = [f"context {result.name}  ({chosen}; {result.file})"]
    columns: list[Column[ContextValue]] = [
        Column("name", "OPTION", lambda row: row.name),
        Column("value", "VALUE", lambda row: row.value, text=_value, name=True, shortest=16),
        Column("source", "FROM", lambda row: row.source),
    ]
    lines = [*head, "", table(columns, result.values, canvas).rstrip("\n")]
    for row in result.values:
        if row.unused_because is not None:
            note = f"{row.name} {value_text(row.unused)} of the context is not used"
            lines += ["", *canvas.paragraph(f"{note}: {row.unused_because}", first="note: ")]
    return "\n".join(lines) + "\n"


def context_change(result: ContextChange, canvas: Canvas) -> str:
    if result.done == "used":
        return f"{result.name} is the current context\n"
    if result.done == "left":
        return "no context is current now\n"
    ended = "" if not result.was_current else "; no context is current now"
    lines = [f"{result.done} context {result.name}{ended}"]
    if result.done in ("added", "replaced") and result.current != result.name:
        lines.append(f"  dynctl context use {result.name}   makes it current")
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """A value of a context on one line."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if value is True:
        return "yes"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(row: ContextValue) -> str:
    return row.default if row.value is None else value_text(row.value)


def _line(row: ContextRow) -> str:
    return "  ".join(f"{name} {value_text(value)}" for name, value in row.values.items())
