"""Bodies of Dynamo's services: what is taken, and the texts of what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.wire.dynamo.service_bodies import (
    I64,
    REQUIRED,
    TEXT,
    U32,
    U64,
    BodyRefused,
    Field,
    Shape,
    many,
    object_of,
    one_of,
    optional,
    read_body,
    table,
)

SHAPE = Shape(
    "Asked",
    {
        "id": Field(U64, REQUIRED),
        "tokens": Field(many(U32), ()),
        "hashes": Field(many(I64)),
        "name": Field(TEXT, "default"),
        "kind": Field(optional(one_of("a", "b"))),
        "ranks": Field(table(TEXT, int), {}),
        "pin": Field(optional(object_of(Shape("Pin", {"rank": Field(U32, REQUIRED)})))),
    },
)
JSON = "application/json"

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**401, -(10**401)])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def refused(raw: bytes, content_type: str = JSON) -> tuple[int, str]:
    with pytest.raises(BodyRefused) as caught:
        read_body(raw, content_type, SHAPE)
    return caught.value.status, str(caught.value)


def test_missing_fields_have_their_defaults() -> None:
    assert read_body(b'{"id": 7, "unknown": []}', JSON, SHAPE) == {
        "id": 7,
        "tokens": (),
        "hashes": None,
        "name": "default",
        "kind": None,
        "ranks": {},
        "pin": None,
    }


def test_positions_are_lines_and_bytes() -> None:
    assert refused('{"name": "é",\n "id": "x"}'.encode()) == (
        422,
        "Failed to deserialize the JSON body into the target type: "
        'id: invalid type: string "x", expected u64 at line 2 column 10',
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{}", "missing field `id` at line 1 column 2"),
        (b'{"id":1,"tokens":[1,"a"]}', 'tokens[1]: invalid type: string "a", expected u32'),
        (b'{"id":1,"kind":"c"}', "kind: unknown variant `c`, expected `a` or `b`"),
        (b'{"id":1,"pin":{}}', "missing field `rank` at line 1 column 16"),
        (
            b'{"id":1,"name":null}',
            "name: invalid type: null, expected a string at line 1 column 19",
        ),
    ],
)
def test_a_misfit_has_its_path_and_place(raw: bytes, expected: str) -> None:
    status, text = refused(raw)
    assert status == 422
    assert expected in text


def test_other_refusals() -> None:
    assert refused(b"{}", "text/plain")[0] == 415
    assert refused(b"")[0] == 400
    assert refused(b"\xff{}")[0] == 400
    assert refused(b'{"id": NaN}')[0] == 400
    assert refused(b"[" * 100_000)[0] == 400
    assert refused(b'{"id": ' + b"9" * 5_000 + b"}")[0] in (400, 422)
    assert refused(b" " * (8 * 1024 * 1024 + 1))[0] == 413


@pytest.mark.parametrize(
    "raw", [rb'{"id": "\ud800"}', rb'{"\uDFFF": 1}', rb'{"id": [{"a": "\ud800\ud800"}]}']
)
def test_half_a_character_is_refused(raw: bytes) -> None:
    # No answer can contain it: a worker with such a name would break the list of all workers.
    status, text = refused(raw)
    assert status == 400
    assert "lone leading surrogate in hex escape at line 1 column" in text


def test_whole_characters_and_escaped_backslashes_are_taken() -> None:
    assert status_of(rb'{"other": ["\ud83d\ude00", "\\ud800"]}') == status_of(b'{"other": 1}')


def status_of(raw: bytes) -> int:
    """200, or the status with which the body is refused."""
    try:
        read_body(raw, JSON, SHAPE)
    except BodyRefused as error:
        return error.status
    return 200


@given(st.dictionaries(st.sampled_from([*SHAPE.fields, "other"]), anything))
def test_any_object_is_taken_or_refused(value: dict[str, Any]) -> None:
    assert status_of(json.dumps(value).encode()) in (200, 400, 422)


@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    assert status_of(raw) in (200, 400, 422)
