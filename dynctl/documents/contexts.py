"""The answers of `dynctl context`: saved contexts, and the values in force."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1


class ContextRow(msgspec.Struct, frozen=True):
    """One context as the file has it."""

    name: str
    current: bool
    values: dict[str, Any]


class ContextList(msgspec.Struct, frozen=True):
    """``current`` may name one that is not there."""

    file: str
    current: str | None = None
    contexts: list[ContextRow] = []
    kind: str = "ContextList"
    schema: int = SCHEMA


class ContextValue(msgspec.Struct, frozen=True):
    """What holds for one option, and who says so.

    ``source``: ``flag --x``, ``env X``, ``context NAME`` or ``default`` (then ``value`` is None
    and ``default`` is what holds). ``unused``: what the context says and does not count here,
    because of ``unused_because``.
    """

    name: str
    value: Any
    source: str
    default: str
    unused: Any = None
    unused_because: str | None = None


class ContextDetail(msgspec.Struct, frozen=True):
    """``chosen_by``: ``argument``, ``--context``, ``$DYNCTL_CONTEXT`` or ``current``."""

    name: str | None
    chosen_by: str
    file: str
    values: list[ContextValue]
    kind: str = "Context"
    schema: int = SCHEMA


class ContextChange(msgspec.Struct, frozen=True):
    """What was done: ``added``, ``replaced``, ``removed``, ``used`` or ``left``."""

    name: str | None
    done: str
    file: str
    current: str | None = None
    kind: str = "ContextChange"
    schema: int = SCHEMA
