"""Calls of tools and text are separated, in pieces as in one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization.tool_calls import (
    TOOL_CALL_PARSERS,
    Part,
    ToolCall,
    ToolCallError,
    ToolCallSplitter,
)
from dynctl.tokenization.tool_calls.calls import MAX_HELD, MAX_PARSED, Parsed
from dynctl.tokenization.tool_calls.json_calls import JsonFormat

NESTED = 257
MARKED = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "llama3_json": ("<|python_tag|>", ""),
    "mistral": ("[TOOL_CALLS][", "]"),
    "nemotron_deci": ("<TOOLCALL>[", "]</TOOLCALL>"),
    "phi4": ("functools[", "]"),
    "qwen25": ("<tool_call>", "</tool_call>"),
}

names = st.text(min_size=1, max_size=6, alphabet="abc_<日")
arguments = st.dictionaries(
    st.text(max_size=3), st.none() | st.booleans() | st.integers() | st.text(max_size=8), max_size=3
)
calls = st.builds(
    lambda name, given: ToolCall(name, json.dumps(given, ensure_ascii=False)), names, arguments
)
plain = st.text(alphabet="xyz \nü.", max_size=8)
cuts = st.lists(st.integers(1, 12), max_size=60)


def pieces(text: str, sizes: list[int]) -> list[str]:
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [*found, text]


def split(parser: str, given: list[str]) -> list[Part]:
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS[parser])
    parts = [part for piece in given for part in splitter.feed(piece)]
    last = splitter.end()
    return parts if last is None else [*parts, last]


def all_calls(parts: list[Part]) -> list[ToolCall]:
    return [call for part in parts for call in part.calls]


def written(parser: str, call: ToolCall) -> str:
    start, end = MARKED[parser]
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{start}{{"name": {name}, "arguments": {call.arguments}}}{end}'


@pytest.mark.parametrize("parser", sorted(MARKED))
@given(before=plain, call=calls, sizes=cuts)
def test_a_call_is_found_wherever_the_text_is_cut(parser, before, call, sizes):
    text = before + written(parser, call)
    parts = split(parser, pieces(text, sizes))
    assert all_calls(parts) == [call] == all_calls(split(parser, [text]))
    assert "".join(part.text or "" for part in parts) == before


@pytest.mark.parametrize("parser", ["hermes", "qwen25"])
@given(made=st.lists(calls, min_size=2, max_size=4), sizes=cuts)
def test_calls_in_a_row_keep_their_order(parser, made, sizes):
    text = "\n".join(written(parser, call) for call in made)
    parts = split(parser, pieces(text, sizes))
    assert all_calls(parts) == made == all_calls(split(parser, [text]))
    assert "".join(part.text or "" for part in parts).strip() == ""


@pytest.mark.parametrize("parser", sorted(MARKED))
@given(text=plain, sizes=cuts)
def test_text_without_a_call_stays_as_it_is(parser, text, sizes):
    assert "".join(part.text or "" for part in split(parser, pieces(text, sizes))) == text


@pytest.mark.parametrize("parser", sorted(MARKED))
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<TOOLCALL>", "[TOOL_CALLS]", "functools"])
        | st.sampled_from(['{"name":"f","arguments":{}}', "{", "}", "[", "]", '"', "\\", ";", ","])
        | st.text(max_size=4),
        max_size=12,
    )
)
def test_any_text_is_read_without_an_error(parser, given):
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS[parser])
    for piece in given:
        splitter.feed(piece)
    splitter.end()
    assert not splitter.holding


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        # A name without arguments is a call for some.
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call>',
            [Part("", (ToolCall("f", "{}"),))],
        ),
        ("phi4", 'functools[{"name": "f"}]', [Part("")]),
        # Arguments stay as they were written.
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"x":  1.0e2}}</tool_call>',
            [Part("", (ToolCall("f", '{"x":  1.0e2}'),))],
        ),
        # What the end of the answer cut off is completed, but not by all.
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"x":"a',
            [Part("", (ToolCall("f", '{"x":"a"}'),))],
        ),
        ("qwen25", '<tool_call>{"name":"f","arguments":{"x":"a', [Part("")]),
        (
            "mistral",
            '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"g","arg',
            [Part("", (ToolCall("f", "{}"),))],
        ),
        # Broken JSON: lost, or text.
        (
            "hermes",
            "a<tool_call>{x}</tool_call>b",
            [Part("a"), Part(""), Part("b")],
        ),
        (
            "nemotron_deci",
            "<TOOLCALL>{x}</TOOLCALL>",
            [Part("<TOOLCALL>{x}</TOOLCALL>")],
        ),
        # Bare JSON is a call, with the text before it.
        (
            "llama3_json",
            'so {"name":"f","parameters":{}}',
            [Part("so", (ToolCall("f", "{}"),))],
        ),
        ("hermes", "an { open brace", [Part("an { open brace")]),
        # Several objects after one mark.
        (
            "llama3_json",
            '<|python_tag|>{"name":"f","parameters":{}}; {"name":"g","parameters":{"a":";"}}',
            [Part("", (ToolCall("f", "{}"), ToolCall("g", '{"a":";"}')))],
        ),
        # A mark that is not one is text.
        ("hermes", "a <b> c <tool", [Part("a <b> c "), Part("<tool")]),
        ("hermes", '{"name":"f","name":"g","arguments":{}}', None),
        ("hermes", '{"name":"\\ud800","arguments":{}}', None),
        ("hermes", '{"name":"f","arguments":NaN}', None),
        ("hermes", '{"name":"f","arguments":' + "[" * NESTED + "]" * NESTED + "}", None),
    ],
)
def test_unusual_texts_are_read_as_in_dynamo(parser, text, expected):
    assert split(parser, [text]) == ([Part(text)] if expected is None else expected)


def test_what_is_held_and_how_many_calls_is_bounded():
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS["hermes"])
    splitter.feed("<tool_call>" + "a" * 262_133)
    with pytest.raises(ToolCallError, match="more than 262144 characters"):
        splitter.feed("a")
    one = '<tool_call>{"name":"f"}</tool_call>\n'
    many = ToolCallSplitter(TOOL_CALL_PARSERS["hermes"])
    assert len(all_calls(many.feed(one * 512))) == 512
    with pytest.raises(ToolCallError, match="more than 512 tool calls"):
        many.feed(one)


@pytest.mark.parametrize("marked", [False, True], ids=["bare", "marked"])
@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_text_that_is_no_call_is_not_read_again_with_each_piece(
    parser: str, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may make a model write such text, so its cost has to grow as the text does."""
    read: list[int] = []
    whole = JsonFormat.parse

    def parse(self: JsonFormat, text: str, *, final: bool) -> Parsed:
        read.append(len(text))
        return whole(self, text, final=final)

    monkeypatch.setattr(JsonFormat, "parse", parse)
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS[parser])
    splitter.feed(TOOL_CALL_PARSERS[parser].starts[0] if marked else "{}")
    for _ in range(4000):
        splitter.feed("{}")
    assert sum(read) < MAX_PARSED + MAX_HELD if marked else len(read) <= 1
