"""Calls of tools in formats with marks of their own are found, whole, in pieces and broken."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization.tool_calls import (
    TOOL_CALL_PARSERS,
    Part,
    ToolCall,
    ToolCallSplitter,
)
from dynctl.tokenization.tool_calls.calls import MAX_HELD, MAX_PARSED, Parsed
from dynctl.tokenization.tool_calls.deepseek_calls import DeepseekFormat
from dynctl.tokenization.tool_calls.json_values import read_value, write_value

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def deepseek_v3(name: str, arguments: str) -> str:
    body = f"function{SEPARATOR}{name}\n```json\n{arguments}\n```"
    return f"{BEGIN}{CALL_BEGIN}{body}{CALL_END}{END}"


def deepseek_v3_1(name: str, arguments: str) -> str:
    return f"{BEGIN}{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}{END}"


WRITERS: dict[str, Callable[[str, str], str]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v3_1": deepseek_v3_1,
}
FRAGMENTS = [BEGIN, END, CALL_BEGIN, CALL_END, SEPARATOR, "```json\n", "```", "f", "{}", "\n", " "]

names = st.text(min_size=1, max_size=6, alphabet="abc_日")
arguments = st.dictionaries(
    names, st.none() | st.booleans() | st.integers() | st.text("ab<é \n", max_size=8), max_size=3
)
plain = st.text(alphabet="xyz \nü.", max_size=8)
cuts = st.lists(st.integers(1, 12), max_size=60)


def pieces(text: str, sizes: list[int]) -> list[str]:
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [*found, text]


def split(parser: str, *given: str) -> list[Part]:
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS[parser])
    parts = [part for piece in given for part in splitter.feed(piece)]
    last = splitter.end()
    assert not splitter.holding
    return parts if last is None else [*parts, last]


@pytest.mark.parametrize("parser", sorted(WRITERS))
@given(before=plain, name=names, given=arguments, sizes=cuts)
def test_a_call_is_found_wherever_the_text_is_cut(parser, before, name, given, sizes):
    text = before + WRITERS[parser](name, json.dumps(given, ensure_ascii=False))
    for cut in (pieces(text, sizes), [text]):
        parts = split(parser, *cut)
        found = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
        assert found == [(name, given)]
        assert "".join(part.text for part in parts) == before


@pytest.mark.parametrize("parser", sorted(WRITERS))
@given(text=plain, sizes=cuts)
def test_text_without_a_call_stays_as_it_is(parser, text, sizes):
    assert "".join(part.text for part in split(parser, *pieces(text, sizes))) == text


@pytest.mark.parametrize("parser", sorted(WRITERS))
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14), cuts)
def test_any_text_is_read_without_an_error(parser, given, sizes):
    split(parser, *pieces("".join(given), sizes))


CALL = f"{CALL_BEGIN}f{SEPARATOR}{{}}{CALL_END}"
F = ToolCall("f", "{}")


@pytest.mark.parametrize(
    ("parser", "given", "expected"),
    [
        # Calls that are whole count without the mark after all of them; broken ones are lost.
        ("deepseek_v3_1", [BEGIN + CALL + CALL[:-1]], [Part("", (F,))]),
        ("deepseek_v3_1", [f"a{BEGIN} b"], [Part("a"), Part("")]),
        ("deepseek_v3_1", [f"{BEGIN}b{END} c"], [Part(""), Part(" c")]),
        # Without the outer marks a call is one where a piece has its whole mark.
        ("deepseek_v3_1", [f"a {CALL}{CALL}", " b"], [Part("a ", (F, F)), Part(" b")]),
        ("deepseek_v3_1", [f"a {CALL}"[:-30], f"a {CALL}"[-30:]], None),
        ("deepseek_v3_1", [f"a {CALL_BEGIN} b"], [Part("")]),
        # What may become a mark is held back, also before white space.
        ("deepseek_v3_1", ["a < ", "b"], [Part("a < b")]),
        # Texts may have ends of lines, which become spaces.
        ("deepseek_v3_1", [CALL.replace("{}", '"a\n  b"')], [Part("", (ToolCall("f", '"a b"'),))]),
        ("deepseek_v3_1", [CALL.replace("{}", '"a\tb"')], [Part("")]),
        # The block of code is needed in one format; it ends at its first end, or with the call.
        ("deepseek_v3", [deepseek_v3("f", "{}").replace("```json", "")], [Part("")]),
        ("deepseek_v3", [deepseek_v3("f", "{}").replace("\n```<", "<")], [Part("", (F,))]),
        ("deepseek_v3", [deepseek_v3("f", '"```"')], [Part("")]),
        ("deepseek_v3", [deepseek_v3("a[", "{}")], [Part("")]),
    ],
)
def test_unusual_texts_are_read_as_in_dynamo(parser, given, expected):
    found = split(parser, *given)
    if expected is None:
        assert "".join(part.text for part in found) == "".join(given)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            '{"x": 1, "a": [true, null], "x": "\\u00e9\\/\\u0007"}',
            '{"x":"é/\\u0007","a":[true,null]}',
        ),
        (
            "[-0, 1.50, 1e5, 1e15, 1e16, 1E-5, -0.00002, 1e-7, 1e-400]",
            "[-0.0,1.5,100000.0,1000000000000000.0,1e+16,0.00001,-0.00002,1e-7,0.0]",
        ),
        (
            "[18446744073709551615, 18446744073709551616, -9223372036854775809]",
            "[18446744073709551615,1.8446744073709552e+19,-9.223372036854776e+18]",
        ),
        ("0.90142745761148357e-37", "9.014274576114835e-38"),
        ("[" * 127 + "]" * 127, "[" * 127 + "]" * 127),
    ],
)
def test_values_are_written_as_dynamo_writes_them(text, written):
    assert write_value(read_value(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "01",
        "1.",
        '"\\ud800"',
        '{"\\udc00": 1}',
        '"a\nb"',
        "1e309",
        "{} {}",
        "1e99999999999",
        "[" * 128 + "]" * 128,
        "[" * 100000,
    ],
)
def test_values_that_dynamo_does_not_read_are_errors(text):
    with pytest.raises(ValueError):
        read_value(text)


def test_text_is_not_read_again_with_each_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may make a model write such text, so its cost has to grow as the text does."""
    read: list[int] = []
    whole = DeepseekFormat.parse

    def parse(self: DeepseekFormat, text: str, *, final: bool) -> Parsed:
        read.append(len(text))
        return whole(self, text, final=final)

    monkeypatch.setattr(DeepseekFormat, "parse", parse)
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS["deepseek_v3_1"])
    splitter.feed(CALL_BEGIN)
    for _ in range(4000):
        splitter.feed(CALL_END)
        splitter.feed(" no mark")
    assert sum(read) < MAX_PARSED + MAX_HELD
    assert len(read) <= 4000
