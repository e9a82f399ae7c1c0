"""A large body has the value that the decoder gives it in one call, or is refused by a count."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import RequestError
from dynctl.wire import large_body
from dynctl.wire.json_body import decode_object
from dynctl.wire.large_body import MOST_NUMBERS, MOST_VALUES, decode_large
from dynctl.wire.nvext import MAX_TOKENS_IN_REQUEST
from dynctl.wire.openai import parse_chat_request, parse_completion_request

#: No scalar below is longer than the smallest window.
SCALARS = st.sampled_from(
    [None, True, 0, -2.5e3, 1e30, "", "a,b]", 'quote " and \\', "}{,[", "\u00e9\U0001f600" * 3]
)
LONG = st.sampled_from(['x\\"' * 40, "[{,", list(range(60)), [[1, 2], [3]], {"k,": "v}" * 30}])
VALUES = st.recursive(
    SCALARS | LONG,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=40,
)
CHANGES = st.tuples(st.floats(0, 1), st.sampled_from(list(b',:"[]{}1x\\ \xff')), st.integers(0, 2))


@pytest.fixture(params=[(24, True), (24, False), (60, False), (400, True)])
def windows(request, monkeypatch):
    """Small windows, so that short texts have many; with and without counting from the start."""
    size, counts = request.param
    monkeypatch.setattr(large_body, "_WINDOW", size)
    if counts:
        bound = large_body._Decoder._separators
        monkeypatch.setattr(
            large_body._Decoder, "_separators", lambda self: bound(self) + MOST_VALUES
        )


def outcome(decode: Any, text: bytes) -> Any:
    try:
        return json.dumps(decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "refused"


@pytest.mark.usefixtures("windows")
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_any_value_is_the_same(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert outcome(decode_large, text) == outcome(msgspec.json.decode, text)


@pytest.mark.usefixtures("windows")
@given(VALUES, st.lists(CHANGES, min_size=1, max_size=2))
def test_any_damage_is_refused_where_the_decoder_refuses_it(value, changes):
    text = bytearray(json.dumps(value).encode())
    for place, byte, kind in changes:
        at = int(place * (len(text) - 1))
        text[at : at + (kind != 1)] = b"" if kind == 2 else bytes([byte])
    assert outcome(decode_large, bytes(text)) == outcome(msgspec.json.decode, bytes(text))


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize(
    "end", [b",]", b",,1]", b"", b"]]", b"}", b"] x", b',"', b",tru]", b":1]", b",\xff]"]
)
def test_a_wrong_end(end):
    for start in (
        b"[" + b"1," * 300 + b"1",
        b'["' + b"x" * 300 + b'"',
        b"[" + b"[]," * 90 + b"1",
    ):
        assert outcome(decode_large, start + end) == "refused"


def test_an_error_has_its_place_in_the_whole_body():
    body = b'{"prompt":[' + b"1," * 70_000 + b"x]}"
    with pytest.raises(RequestError, match=rf"\(byte {len(body) - 3}\)") as caught:
        decode_object(body, len(body))
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[%b]}' % b",".join([b'{"role":"user","content":"x"}'] * 200_000),
        b'{"messages":[{"content":[%b]}]}' % b",".join([b'{"type":"text","text":"a"}'] * 200_000),
        b'{"x":[%b]}' % b",".join([b"[]"] * 300_000),
        b'{"x":{%b}}' % b",".join(b'"%d":1' % i for i in range(600_000)),
        b'{"x":[%b]}' % b",".join([b"null"] * 600_000),
    ],
    ids=["messages", "parts", "arrays", "keys", "words"],
)
def test_more_values_than_the_maximum_are_refused_before_they_are_made(body):
    with pytest.raises(
        RequestError, match=f"more than {MOST_VALUES} values, the maximum"
    ) as caught:
        decode_object(body, len(body))
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


def test_text_has_any_number_of_separators():
    body = json.dumps({"prompt": "[,{" * 400_000, "more": ["a,b"] * 10}).encode()
    assert decode_large(body) == json.loads(body)


def test_numbers_of_arrays_count_apart_up_to_the_longest_prompt():
    assert MOST_NUMBERS >= MAX_TOKENS_IN_REQUEST
    batch = b"[%b]" % b",".join([b"[" + b"5," * 999 + b"5]"] * 1000)
    assert decode_large(batch) == [[5] * 1000] * 1000
    for body in (b"[" + b"1," * MOST_NUMBERS + b"1]", b"[%b]" % b",".join([batch] * 5)):
        with pytest.raises(RequestError, match=f"more than {MOST_NUMBERS} numbers in arrays"):
            decode_large(body)


def test_the_largest_chat_that_is_accepted_still_is():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    body = json.dumps({"model": "m", "messages": [message] * 65_536}).encode()
    assert len(parse_chat_request(decode_object(body, len(body))).messages) == 65_536


def test_deep_nesting_of_large_values_is_refused():
    body = b"[" * 100 + b"1," * 40_000 + b"1" + b"]" * 100
    with pytest.raises(RequestError, match="nested too deeply"):
        decode_object(body, len(body))


class TestManyTokens:
    """Prompts of so many token ids that they are read in slices."""

    def test_they_are_the_ids(self):
        ids = list(range(150_000))
        parsed = parse_completion_request({"prompt": ids, "nvext": {"token_data": ids}})
        assert list(parsed.prompts[0]) == ids
        assert list(parsed.nvext.token_data or ()) == ids

    @pytest.mark.parametrize("wrong", [-1, 2**32, "x", 1.5, True, None])
    def test_a_wrong_one_is_named_as_in_a_short_prompt(self, wrong):
        problems = []
        for before in (3, 140_000):
            with pytest.raises(RequestError) as caught:
                parse_completion_request({"prompt": [1] * before + [wrong, 2]})
            assert caught.value.field == f"prompt[{before}]"
            problems.append((caught.value.code, caught.value.problem))
        assert problems[0] == problems[1]

    def test_a_wrong_one_in_nvext_is_named(self):
        body = {"prompt": "x", "nvext": {"token_data": [1] * 70_000 + [-1]}}
        with pytest.raises(RequestError) as caught:
            parse_completion_request(body)
        assert caught.value.field == "nvext.token_data[70000]"

    def test_more_than_the_maximum(self):
        with pytest.raises(RequestError, match=f"at most {MAX_TOKENS_IN_REQUEST} entries"):
            parse_completion_request({"prompt": [1] * (MAX_TOKENS_IN_REQUEST + 1)})
