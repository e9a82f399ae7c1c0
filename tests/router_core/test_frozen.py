"""The quick ``__init__`` of frozen values is that of the dataclass."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from router_core.frozen import quick_init


@dataclass(frozen=True, slots=True)
class Slow:
    name: str
    count: int = 3
    items: list[int] = field(default_factory=list)


@quick_init
@dataclass(frozen=True, slots=True)
class Quick:
    name: str
    count: int = 3
    items: list[int] = field(default_factory=list)


def test_fields_defaults_and_errors_are_the_same() -> None:
    for arguments in ({"name": "x"}, {"name": "x", "count": 0}, {"name": "x", "items": [1]}):
        slow, quick = Slow(**arguments), Quick(**arguments)
        assert repr(quick) == repr(slow).replace("Slow", "Quick")
    assert Quick("x", 1) == replace(Quick("x"), count=1)
    assert Quick("x").items is not Quick("x").items
    assert list(inspect.signature(Quick).parameters) == list(inspect.signature(Slow).parameters)
    for wrong in ({}, {"name": "x", "other": 1}):
        with pytest.raises(TypeError):
            Quick(**wrong)  # type: ignore[arg-type]


def test_a_value_stays_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Quick("x").count = 1  # type: ignore[misc]


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    name: str
    count: int = 3


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(Base):
    more: int


def test_a_class_with_a_base_takes_the_fields_of_both_by_name() -> None:
    value = Extended(name="x", more=2)
    assert (value.name, value.count, value.more) == ("x", 3, 2)
    assert type(value) is Extended
    assert type(Base(name="x")) is Base
    assert value != Base(name="x")
    with pytest.raises(FrozenInstanceError):
        value.count = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Extended("x", 2)  # type: ignore[call-arg]
