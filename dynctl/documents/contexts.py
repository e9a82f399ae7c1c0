"""The answers of `dynctl context`: saved contexts, and the values in force."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1


class ContextRow(msgspec.Struct, frozen=True):
    """One context of the contexts file."""

    name: str
    current: bool
    values: dict[str, Any]


class ContextList(msgspec.Struct, frozen=True):
    """All contexts of the file. ``current`` may name a context that does not exist."""

    file: str
    current: str | None = None
    contexts: list[ContextRow] = []
    kind: str = "ContextList"
    schema: int = SCHEMA


class ContextValue(msgspec.Struct, frozen=True):
    """The value in force of one option, and its source.

    ``source``: ``flag --x``, ``env X``, ``context NAME`` or ``default`` (then ``value`` is None
    and ``default`` is in force). ``unused``: a value of the context that is not in force, because
    of ``unused_because``.
    """

    name: str
    value: Any
    source: str
    default: str
    unused: Any = None
    unused_because: str | None = None


class ContextDetail(msgspec.Struct, frozen=True):
    """The options of one context.

    ``chosen_by``: ``argument``, ``--context``, ``$DYNCTL_CONTEXT`` or ``current``.
    """

    name: str | None
    chosen_by: str
    file: str
    values: list[ContextValue]
    kind: str = "Context"
    schema: int = SCHEMA


class ContextChange(msgspec.Struct, frozen=True):
    """The result of a change: ``added``, ``replaced``, ``removed``, ``used`` or ``left``.

    ``was_current``: the removed context was the current one.
    """

    name: str | None
    done: str
    file: str
    current: str | None = None
    was_current: bool = False
    kind: str = "ContextChange"
    schema: int = SCHEMA
