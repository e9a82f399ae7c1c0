"""Forced calls are passed on as they come, and each of their characters once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization.tool_calls import (
    TOOL_CALL_PARSERS,
    CallPiece,
    GuidedSplitter,
    Part,
    ToolCallError,
)
from dynctl.tokenization.tool_calls.calls import MAX_CALLS, MAX_HELD

values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(max_size=4), values, max_size=3)
names = st.text(min_size=1, max_size=5)


def read(splitter: GuidedSplitter, text: str, size: int) -> tuple[str, dict[int, list[str]]]:
    """What users read, and the name and arguments of each call."""
    parts: list[Part] = []
    for at in range(0, len(text), size):
        parts += splitter.feed(text[at : at + size])
    last = splitter.end()
    parts += [last] if last is not None else []
    calls: dict[int, list[str]] = {}
    for piece in (piece for part in parts for piece in part.pieces):
        if piece.name is not None:
            assert piece.number not in calls
            calls[piece.number] = [piece.name, ""]
        calls[piece.number][1] += piece.arguments
    return "".join(part.text or "" for part in parts), calls


@given(st.lists(st.tuples(names, arguments), min_size=1, max_size=3), st.integers(1, 40))
def test_an_array_of_calls_is_these_calls(made: list[Any], size: int) -> None:
    text = json.dumps([{"name": name, "parameters": given} for name, given in made])
    shown, calls = read(GuidedSplitter(None, None), text, size)
    assert shown == ""
    expected = [[name, json.dumps(given)] for name, given in made]
    assert [calls[number] for number in range(len(made))] == expected


@given(arguments, st.integers(1, 40), st.sampled_from([None, *TOOL_CALL_PARSERS.values()]))
def test_an_object_is_the_arguments_of_the_named_function(
    given: dict[str, Any], size: int, form: Any
) -> None:
    text = " " + json.dumps(given, ensure_ascii=False)
    assert read(GuidedSplitter(form, "f"), text, size) == ("", {0: ["f", text[1:]]})


def test_a_call_begins_with_its_name_and_the_first_of_its_arguments() -> None:
    splitter = GuidedSplitter(None, None)
    assert splitter.feed('[{"name":"f","parameters":') == []
    assert splitter.feed('{"x"') == [Part("", pieces=(CallPiece(0, "f", '{"x"'),))]
    assert splitter.feed(":1}") == [Part("", pieces=(CallPiece(0, None, ":1}"),))]
    assert splitter.holding
    assert splitter.feed("}] and") == [Part(""), Part(" and")]
    assert not splitter.holding


def test_text_that_is_not_json_is_text() -> None:
    assert read(GuidedSplitter(None, None), "no call", 3) == ("no call", {})
    assert read(GuidedSplitter(None, "f"), "[1]", 3) == ("[1]", {})


def test_calls_in_the_format_of_the_model_are_found() -> None:
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    hermes = TOOL_CALL_PARSERS["hermes"]
    assert read(GuidedSplitter(hermes, None), text, 5) == ("", {0: ["g", "{}"]})
    assert read(GuidedSplitter(hermes, "f"), text, 5) == ("", {})


def test_what_follows_a_call_may_be_one_too() -> None:
    found = read(GuidedSplitter(None, "f"), '{"x": 1} and {"y": 2}', 1)
    assert found == (" and ", {0: ["f", '{"x": 1}'], 1: ["f", '{"y": 2}']})


def test_a_call_that_names_its_arguments_twice_is_passed_on_no_further() -> None:
    text = '[{"name":"f","arguments":{"a":1},"parameters":{"b":2}}]'
    assert read(GuidedSplitter(None, None), text, 1)[1] == {0: ["f", '{"a":1}']}


def test_arguments_that_are_cut_off_stay_as_they_are() -> None:
    assert read(GuidedSplitter(None, "f"), '{"x": "a', 2) == ("", {0: ["f", '{"x": "a']})


def test_the_text_and_the_calls_have_bounds() -> None:
    with pytest.raises(ToolCallError, match="characters"):
        GuidedSplitter(None, "f").feed('{"x": "' + "a" * MAX_HELD)
    call = '{"name":"f","parameters":{}}'
    with pytest.raises(ToolCallError, match="tool calls"):
        GuidedSplitter(None, None).feed("[" + ",".join([call] * (MAX_CALLS + 1)) + "]")
