"""Arbitrary JSON is read or refused with a named field; nothing else is ever raised."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import RequestError
from dynctl.documents.selection import _ALIASES, _KNOWN, SelectRequest, parse_select
from dynctl.serving.http.busy_threshold import BadBody, read_body
from router_core import THRESHOLD_SETTINGS, ConfigError, Thresholds

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)
hashes = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4)


@given(st.dictionaries(st.sampled_from([*_KNOWN, *_ALIASES, "other"]), plain | tokens | hashes))
def test_selections(body):
    asked: SelectRequest | RequestError
    try:
        asked = parse_select(body)
    except RequestError as error:
        asked = error
    if isinstance(asked, RequestError):
        assert 400 <= asked.status < 500
        json.dumps(asked.body())
        return
    columns = (asked.token_ids, asked.local_hashes, asked.sequence_hashes)
    assert sum(column is not None for column in columns) == 1
    assert asked.isl_tokens >= 1
    for column in columns[1:]:
        assert all(0 <= value < 2**64 for value in column or ())


@given(st.dictionaries(st.sampled_from(["model", "clear", "x", *THRESHOLD_SETTINGS]), plain))
def test_thresholds(body):
    _read(json.dumps({"model": "tiny", **body}).encode())


@given(st.binary(max_size=60))
def test_thresholds_from_any_bytes(body):
    _read(body)


@given(plain)
def test_thresholds_from_any_json(body):
    _read(json.dumps(body).encode())


def _read(body: bytes) -> None:
    found: tuple[str, dict, list[str]] | BadBody
    try:
        found = read_body("application/json", body)
    except BadBody as bad:
        found = bad
    if isinstance(found, BadBody):
        assert found.status in (400, 422)
        str(found).encode()
        return
    model, values, ignored = found
    assert isinstance(model, str)
    # What was let through, the router takes as well.
    try:
        Thresholds().with_values(values)
    except ConfigError as error:
        pytest.fail(f"{values} was let through, and then: {error}")
    assert all(name.isascii() and "\n" not in name for name in ignored)
