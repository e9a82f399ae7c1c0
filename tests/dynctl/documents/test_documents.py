"""Every document: value -> JSON -> value, with the field names that people's tools rely on."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, inspect

import dynctl
from dynctl import documents
from dynctl.base.decode_errors import WireError
from dynctl.documents import index_dump, replicas, route_result
from dynctl.documents.codec import decode, encode
from dynctl.documents.decisions import PastDecision
from dynctl.documents.frontends import FrontendRow
from dynctl.documents.recording import Changed
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.route_result import DecisionResult, RouteResult
from dynctl.findings import report
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from router_core.config import ROUTER_MODES
from tests.golden.fleets import TOKENS, stranded_zones, two_zones

UPDATE = bool(os.environ.get("DYNCTL_UPDATE_GOLDEN"))
FIELDS = Path(__file__).parent / "fields.txt"
ROOT = Path(dynctl.__file__).parent


def _structs() -> Iterator[type[msgspec.Struct]]:
    modules = [
        importlib.import_module(f"dynctl.documents.{one.name}")
        for one in pkgutil.iter_modules(documents.__path__)
    ]
    for module in (*modules, report):
        for value in vars(module).values():
            if not isinstance(value, type) or not issubclass(value, msgspec.Struct):
                continue
            if value.__module__ == module.__name__ and not value.__name__.startswith("_"):
                yield value


STRUCTS = sorted(_structs(), key=lambda one: one.__name__)
#: Those that travel between routers as msgpack.
BINARY = [one for one in STRUCTS if one.__module__ in (index_dump.__name__, replicas.__name__)]
KINDS = {
    one: field.default
    for one in STRUCTS
    for field in msgspec.structs.fields(one)
    if field.name == "kind" and isinstance(field.default, str)
}

_ANY = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    match kind:
        case inspect.StructType(cls=cls):
            return documents_of(cls)
        case inspect.DataclassType(cls=cls, fields=fields):
            return st.builds(cls, **{one.name: values(one.type) for one in fields})
        case inspect.FrozenSetType(item_type=item):
            return st.frozensets(values(item), max_size=2)
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case inspect.CollectionType(item_type=item):
            return st.lists(values(item), max_size=2)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.LiteralType(values=literals):
            return st.sampled_from(literals)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.IntType(ge=least, le=most):
            return st.integers(
                -(2**63) if least is None else least, 2**64 - 1 if most is None else most
            )
        case inspect.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.BytesType():
            return st.binary(max_size=4)
        case inspect.StrType():
            return st.text(max_size=4)
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return _ANY
    raise AssertionError(f"no values of {kind}")


def documents_of(form: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Documents with every field given, except kind and schema."""
    info = inspect.type_info(form)
    assert isinstance(info, inspect.StructType)
    given_fields = {
        one.name: values(one.type) | (st.just(UNSET) if one.default is UNSET else st.nothing())
        for one in info.fields
        if form not in KINDS or one.name not in ("kind", "schema")
    }
    return st.builds(form, **given_fields)


@pytest.mark.parametrize("form", BINARY, ids=lambda form: form.__name__)
def test_a_value_survives_msgpack(form: type[msgspec.Struct]):
    @settings(max_examples=10, deadline=None)
    @given(documents_of(form))
    def survives(document: msgspec.Struct) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(document), type=form) == document

    survives()


@pytest.mark.parametrize(
    "form",
    [one for one in STRUCTS if one not in (*BINARY, Changed)],
    ids=lambda form: form.__name__,
)
def test_a_value_survives_json(form: type[msgspec.Struct]):
    """A Changed has values of the router itself, and a file of its own (test_recording.py)."""

    @settings(max_examples=10, deadline=None)
    @given(documents_of(form))
    def survives(document: msgspec.Struct) -> None:
        data = encode(document)
        assert decode(data, form) == document
        if not form.__struct_config__.omit_defaults:
            names = [
                one.encode_name
                for one in msgspec.structs.fields(form)
                if getattr(document, one.name) is not UNSET
            ]
            tag = form.__struct_config__.tag_field
            assert list(json.loads(data)) == ([tag, *names] if tag else names)

    survives()


def test_field_names_are_as_committed():
    lines = [
        f"{one.__name__}: {', '.join(field.encode_name for field in msgspec.structs.fields(one))}\n"
        for one in STRUCTS
    ]
    kinds = [f"kind {kind}: {one.__name__}\n" for one, kind in KINDS.items()]
    drawn = "".join([*lines, *kinds])
    if UPDATE:
        FIELDS.write_text(drawn)
    assert drawn == FIELDS.read_text()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[]", "RouteResult: Expected `object`, got `array`"),
        (b"{", "RouteResult: not JSON: Input data was truncated"),
        (b'{"kind": "FleetLoad"}', "RouteResult: expected kind RouteResult, got 'FleetLoad'"),
        (b'{"kind": "RouteResult", "schema": 2}', "RouteResult: expected schema 1, got 2"),
        (b'{"kind": "RouteResult"}', "RouteResult: Object missing required field `model`"),
    ],
)
def test_another_document_is_refused(data: bytes, expected: str):
    with pytest.raises(WireError) as raised:
        decode(data, RouteResult)
    assert str(raised.value) == expected


def test_a_past_decision_is_read_as_a_route_result():
    assert issubclass(PastDecision, RouteResult)


def test_documents_with_a_kind_live_in_documents():
    known = {f"documents/{path.name}" for path in (ROOT / "documents").glob("*.py")}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"^    kind: str = .*\n    schema: int", path.read_text(), re.M)
    }
    assert found - known == {"findings/report.py"}


@pytest.mark.parametrize("mode", sorted(set(ROUTER_MODES) - {"direct"}))
@pytest.mark.parametrize("fleet", [two_zones, stranded_zones])
def test_a_route_result_has_the_bytes_that_reading_it_back_gives(
    fleet: Callable[..., ViewSource], mode: str
):
    """So no integer is written into a field of type float."""
    source = fleet(router_mode=mode, router_temperature=1)
    hop = source.route(RouteQuery(token_ids=TOKENS)).prefill
    assert hop is not None
    hop = msgspec.structs.replace(hop, flip=None)  # the amount of a flip may be an integer
    assert encode(decode(encode(hop), DecisionResult)) == encode(hop)


@pytest.mark.parametrize(
    "form",
    [
        route_result.BypassRow,
        route_result.DeviceBudgetRow,
        route_result.PairChoice,
        route_result.QueueLimit,
        route_result.QueueRow,
        route_result.SessionRow,
        FrontendRow,
        ReplicaRow,
    ],
    ids=lambda form: form.__name__,
)
def test_the_page_of_the_interface_names_every_field(form: type[msgspec.Struct]) -> None:
    page = (ROOT.parent / "docs" / "http-api.md").read_text(encoding="utf-8")
    names = {field.encode_name for field in msgspec.structs.fields(form)}
    assert {name for name in names if f"`{name}`" not in page} == set()
