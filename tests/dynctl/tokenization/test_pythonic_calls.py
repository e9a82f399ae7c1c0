"""Lists of Python calls in generated text are found and read, whole, in pieces and broken."""

import json
import re
import warnings

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
from dynctl.tokenization.tool_calls.pythonic_calls import PythonicFormat
from dynctl.tokenization.tool_calls.pythonic_list import find_list

ARGUMENT = r"[a-zA-Z]+\w*=.*?"
FIRST = rf"([a-zA-Z]+\w*\(({ARGUMENT},\s*)*({ARGUMENT}\s?)?\),\s*)*"
LAST = rf"([a-zA-Z]+\w*\(({ARGUMENT},\s*)*({ARGUMENT}\s*)?\)\s*)+"
EXPRESSION = re.compile(rf"\[{FIRST}{LAST}\]")
"""What Dynamo looks for. Short texts only: Python's time for long ones is exponential."""

names = st.text(min_size=1, max_size=6, alphabet="abcXYZ")
values = st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.text("ab], 日é", max_size=8)
calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3
)
plain = st.text(alphabet="xyz \nü.", max_size=8)
cuts = st.lists(st.integers(1, 12), max_size=60)
fragments = st.lists(
    st.sampled_from(["[", "]", "(", ")", ",", "=", "f", "1", " ", "\n", "f(", "x=", "_", "é"])
    | st.sampled_from(["f(x=1)", "f(x=1), ", "[f(x=1", "[f(x=1)]", "y=2", ")]", "[f("]),
    max_size=14,
)


def split(*pieces: str) -> list[Part]:
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS["pythonic"])
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    last = splitter.end()
    assert not splitter.holding
    return parts if last is None else [*parts, last]


def cut(text: str, sizes: list[int]) -> list[str]:
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [*found, text]


@given(fragments)
def test_the_list_found_is_that_of_the_expression(given):
    text = "".join(given)
    found = EXPRESSION.search(text)
    assert find_list(text) == (found and found.span())


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("日[f(x=é)]", (1, 9)),
        ("\ud800[f(x='\udfff')]", (1, 11)),
        ("[f(),\u2003g()]", (0, 10)),
        ("[f(),\x1fg()]", None),  # Python's white space, not Unicode's
        ("[fé\u0301\u200c٣‿()]", (0, 10)),
        ("[éf()]", None),
    ],
)
def test_characters_are_those_of_unicode(text: str, place: tuple[int, int] | None) -> None:
    assert find_list(text) == place


@pytest.mark.parametrize("part", ["[f(x=1, ", "f(a=b=, c)", "[f(x=1),"])
def test_a_text_of_many_readings_is_searched_to_its_end(part: str) -> None:
    """A matcher that tries readings one after the other would not end."""
    assert find_list("[" + part * 30_000) is None


@given(before=plain, made=calls, sizes=cuts)
def test_calls_are_found_wherever_the_text_is_cut(before, made, sizes):
    lists = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in made
    )
    expected = [(name, given, f"call-{number}") for number, (name, given) in enumerate(made, 1)]
    for pieces in (cut(f"{before}[{lists}]", sizes), [f"{before}[{lists}]"]):
        parts = split(*pieces)
        found = [call for part in parts for call in part.calls]
        assert [(call.name, json.loads(call.arguments), call.id) for call in found] == expected
        assert "".join("".join(part.text or "" for part in parts).split()) == "".join(
            before.split()
        )


@given(fragments, cuts)
def test_any_text_is_read_without_an_error(given, sizes):
    split(*cut("".join(given), sizes))


def called(*given: tuple[str, str]) -> list[Part]:
    made = (ToolCall(*each, f"call-{number}") for number, each in enumerate(given, 1))
    return [Part("", tuple(made))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What is not a constant is left out, as is what has no name.
        ("[f(x=-1, y=1 + 2, z=[1, a], w=1)]", called(("f", '{"w":1}'))),
        ("[f(x=1, **more), g()]", called(("f", '{"x":1}'), ("g", "{}"))),
        ('[f(x=b"a", y=1j, z=(1, 2), w=f"a")]', called(("f", "{}"))),
        # Numbers, texts and objects as Dynamo writes them.
        (
            "[f(a=1e400, b=1e-7, c=1e22, d=0.00001, e=1.50, f=0x10, g=1_0)]",
            called(("f", '{"a":null,"b":1e-7,"c":1e+22,"d":0.00001,"e":1.5,"f":16,"g":10}')),
        ),
        (
            "[f(a=99_999_999_999_999_999_999, b=0xFFFFFFFFFFFFFFFFFF)]",
            called(("f", '{"a":"99999999999999999999","b":"0xFFFFFFFFFFFFFFFFFF"}')),
        ),
        (
            "[f(a={1: None, True: 2.0, 'x': [], 1.5: {}})]",
            called(("f", '{"a":{"1":null,"true":2.0,"x":[],"1.5":{}}}')),
        ),
        (r"[f(a='\ud83d\ude00', b='\d' r'\n')]", called(("f", '{"a":"��","b":"\\\\d\\\\n"}'))),
        # NUL and characters that nothing uses are as any other.
        (
            "[f(x='a\0\ue000', y='\0\ue001')]",
            called(("f", '{"x":"a\\u0000\ue000","y":"\\u0000\ue001"}')),
        ),
        ("[f(x='a\0'\0)]", [Part("")]),
        # Broken lists are lost; what does not look like a list is text.
        ("[f(x=1, x=2)]", [Part("")]),
        ("[f(x=1) g(y=2)]", [Part("")]),
        ("[f(x='.)]')]", [Part("")]),
        ("[f(1)]", [Part("[f(1)]")]),
        ("[ f(x=1)]", [Part("[ f(x=1)]")]),
        ("a [link](url) b", [Part("a [link](url) b")]),
        # Letters in circles and squares belong to words, digits that are raised do not.
        ("[fⒶ()]", [Part("")]),
        ("[f\U0001f130()]", [Part("")]),
        ("[f㉠()]", [Part("[f㉠()]")]),
        ("[f²()]", [Part("[f²()]")]),
        # A list without calls is lost, with text before it all of it is text.
        ("[f(x=1) + (y)]", [Part("")]),
        ("a [f(x=1) + (y)] b", [Part("a [f(x=1) + (y)] b")]),
    ],
)
def test_unusual_texts_are_read_as_in_dynamo(text: str, expected: list[Part]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split(text) == expected


def test_a_piece_that_ends_like_the_mark_is_held_back() -> None:
    assert split("a_", "b") == [Part("a"), Part("_b")]
    assert split("[f_", "g(x=1)]", ".") == [
        Part("[f"),
        Part("_g(x=1)]"),
        Part("."),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[f(x='\0\\n')]",
        "[f(x=" + "[" * 250 + "]" * 250 + ")]",
        "[f(x=" + "-" * 50_000 + "1)]",
        "[f(x=t'a' $)]",
        f"[f(x={'1' * 5000})]",
    ],
)
def test_what_another_python_may_read_is_an_error(text: str) -> None:
    with pytest.raises(ToolCallError, match="Python that dynctl cannot read"):
        split(text)


def test_a_list_of_too_many_parts_is_an_error() -> None:
    with pytest.raises(ToolCallError, match="more than 65536 words and marks"):
        split("[f(x=[" + "1," * 40_000 + "])]")
    text = "word " * 40_000
    assert split(f"[f(x='{text}')]") == called(
        ("f", json.dumps({"x": text}, separators=(",", ":")))
    )


def test_text_is_not_read_again_with_each_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may make a model write such text, so its cost has to grow as the text does."""
    read: list[int] = []
    whole = PythonicFormat.parse

    def parse(self: PythonicFormat, text: str, *, final: bool) -> Parsed:
        read.append(len(text))
        return whole(self, text, final=final)

    monkeypatch.setattr(PythonicFormat, "parse", parse)
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS["pythonic"])
    splitter.feed("[f(x=1, x=2)")
    for _ in range(4000):
        splitter.feed("]")
        splitter.feed(" no bracket")
    assert sum(read) < MAX_PARSED + MAX_HELD
    assert len(read) <= 4000
