"""Frozen values that each decision and each event creates."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def quick_init(cls: type[T]) -> type[T]:
    """Give a frozen dataclass with slots an ``__init__`` that takes half the time.

    The one of :mod:`dataclasses` sets each field by ``object.__setattr__``, which looks the slot up
    by its name; this one calls the slot. Signature and defaults are the same. Not for classes with
    ``__post_init__`` or keyword-only fields.
    """
    names: dict[str, Any] = {}
    parameters, lines = ["self"], []
    for field in fields(cls):  # type: ignore[arg-type]
        names[f"_set_{field.name}"] = getattr(cls, field.name).__set__
        value = field.name
        if field.default is not MISSING:
            names[f"_default_{field.name}"] = field.default
            parameters.append(f"{field.name}=_default_{field.name}")
        elif field.default_factory is not MISSING:
            names[f"_make_{field.name}"] = field.default_factory
            names["_MISSING"] = MISSING
            parameters.append(f"{field.name}=_MISSING")
            value = f"_make_{field.name}() if {field.name} is _MISSING else {field.name}"
        else:
            parameters.append(field.name)
        lines.append(f"    _set_{field.name}(self, {value})")
    source = f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines)
    made: dict[str, Any] = {}
    # As the dataclass decorator itself: a signature with defaults can only be made from source.
    exec(source, names, made)  # noqa: S102
    made["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    made["__init__"].__annotations__ = cls.__init__.__annotations__
    setattr(cls, "__init__", made["__init__"])  # noqa: B010  a class of any type
    return cls
