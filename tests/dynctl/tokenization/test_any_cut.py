"""By the text alone, reasoning and calls are the same however the text is cut into pieces."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization.reasoning import REASONING_PARSERS, Parts, TextReasoningSplitter
from dynctl.tokenization.tool_calls import (
    TOOL_CALL_PARSERS,
    GuidedSplitter,
    ToolCallSplitter,
    call_format,
)
from dynctl.tokenization.tool_calls.calls import SPACE

OBJECT = '{"name": "f", "arguments": {"a": "}<think>"}}'
#: A call as each parser's models write it.
CALLS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "hermes": f"<tool_call>{OBJECT}</tool_call>",
    "jamba": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": f"<|python_tag|>{OBJECT}",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>'
    "</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "nemotron_deci": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "nemotron_nano": "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    "phi4": f"functools[{OBJECT}]",
    "pythonic": "<|python_start|>[f(a=1)]",
    "qwen25": f"<tool_call>{OBJECT}</tool_call>",
    "qwen3_coder": "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
}
MARKS = ["<think>", "</think>", "<thi", "</", "<", "<to", "{", "}", "[", "]", '"', "\\", ";", "\n"]
cuts = st.lists(st.integers(0, 300), max_size=30)


def pieces(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(at for at in places if at < len(text))})
    return [text[a:b] for a, b in pairwise(ends)]


def texts(call: str) -> st.SearchStrategy[str]:
    """Texts with a call, its parts, and marks of all kinds."""
    half = st.integers(0, len(call)).map(lambda at: call[:at])
    rest = st.integers(0, len(call)).map(lambda at: call[at:])
    part = st.one_of(
        st.just(call), half, rest, st.sampled_from(MARKS), st.text("fa {\n", max_size=5)
    )
    return st.lists(part, max_size=8).map("".join)


def reasoned(given: list[str], *, inside: bool, prompted: bool) -> Parts:
    splitter = TextReasoningSplitter(inside=inside, prompted=prompted)
    parts = [*map(splitter.feed, given), splitter.end()]
    return Parts("".join(each.answer for each in parts), "".join(each.reasoning for each in parts))


def read(splitter: ToolCallSplitter, given: list[str]) -> tuple[str, list[list[Any]]]:
    """What users read, and all calls."""
    parts = [part for piece in given for part in splitter.feed(piece)]
    last = splitter.end()
    parts += [] if last is None else [last]
    calls: list[list[Any]] = []
    for part in parts:
        calls += [[call.name, call.arguments] for call in part.calls]
        for piece in part.pieces:
            if piece.name is not None:
                calls.append([piece.name, piece.number, piece.arguments])
            else:
                next(each for each in calls if each[1] == piece.number)[2] += piece.arguments
    assert not splitter.holding
    return "".join(part.text or "" for part in parts), calls


@pytest.mark.parametrize("parser", REASONING_PARSERS)
@given(texts("<think>a</think>"), cuts, st.booleans())
def test_the_cut_does_not_change_the_reasoning(
    parser: str, text: str, places: list[int], prompted: bool
) -> None:
    inside = REASONING_PARSERS[parser]
    whole = reasoned([text], inside=inside, prompted=prompted)
    assert reasoned(pieces(text, places), inside=inside, prompted=prompted) == whole
    assert reasoned(list(text), inside=inside, prompted=prompted) == whole


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>a</think>b", False, ("b", "a")),
        ("<think>a</think>b", True, ("b", "a")),
        ("a</think>b", True, ("b", "a")),
        ("a<think>b</think>c", True, ("c", "a<think>b")),
        ("a <thi", False, ("a <thi", "")),
        ("<think>a</th", False, ("", "a</th")),
        ("<thi", True, ("", "<thi")),
        ("<", False, ("<", "")),
        ("a</think>b", False, ("ab", "")),
    ],
)
def test_marks_are_found_wherever_they_are_cut(
    text: str, inside: bool, expected: tuple[str, str]
) -> None:
    for cut in ([text], list(text)):
        assert reasoned(cut, inside=inside, prompted=False) == expected


def splitters(parser: str) -> list[Any]:
    form = call_format(parser, ())
    return [
        lambda: ToolCallSplitter(form, by_text=True),
        lambda: ToolCallSplitter(form, by_text=True, thinking=False),
        lambda: ToolCallSplitter(form, by_text=True, thinking=True),
        lambda: GuidedSplitter(form, None, by_text=True),
        lambda: GuidedSplitter(form, "f", by_text=True),
    ]


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@given(data=st.data(), places=cuts)
def test_the_cut_does_not_change_the_calls(
    parser: str, data: st.DataObject, places: list[int]
) -> None:
    text = data.draw(texts(CALLS[parser]))
    for make in splitters(parser):
        whole = read(make(), [text])
        assert read(make(), pieces(text, places)) == whole
        assert read(make(), list(text)) == whole


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_call_in_thoughts_is_text(parser: str, size: int) -> None:
    call = CALLS[parser]
    text = f"a <think>so {call} or</think> b {call}"
    given = [text[at : at + size] for at in range(0, len(text), size)]
    shown, calls = read(
        ToolCallSplitter(call_format(parser, ()), by_text=True, thinking=False), given
    )
    assert [each[0] for each in calls] == ["f"]
    assert json.loads(calls[0][1]) in ({}, {"a": 1}, {"a": "1"}, {"a": "}<think>"})
    assert shown.strip(SPACE) == f"a <think>so {call} or</think> b"


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_what_the_prompt_began_is_thought(parser: str) -> None:
    call = CALLS[parser]
    for cut in ([f"{call}</think>{call}\n"], list(f"{call}</think>{call}\n")):
        made = ToolCallSplitter(call_format(parser, ()), by_text=True, thinking=True)
        shown, calls = read(made, cut)
        assert (shown, len(calls)) == (f"{call}</think>", 1)


@given(st.text("abc \n", max_size=30), cuts)
def test_text_without_a_call_is_passed_on_at_once(text: str, places: list[int]) -> None:
    for form in TOOL_CALL_PARSERS.values():
        splitter = ToolCallSplitter(form, by_text=True, thinking=False)
        for piece in pieces(text, places):
            assert "".join(part.text or "" for part in splitter.feed(piece)) == piece


#: What a call is held back for, character by character, beside what each format has.
ENDLESS = ["[", "{", "]", " ", "\\", "<"]


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@given(data=st.data(), places=cuts)
def test_the_cut_does_not_change_long_text_after_a_call_or_its_beginning(
    parser: str, data: st.DataObject, places: list[int]
) -> None:
    call = CALLS[parser]
    front = data.draw(st.sampled_from([call, call[:-3], call[: len(call) // 2]]))
    filling = data.draw(st.sampled_from(ENDLESS)) * data.draw(st.integers(1, 120))
    text = front + filling + data.draw(st.sampled_from(["", "x", call, call[-9:], call[-9:-3]]))
    for make in splitters(parser):
        whole = read(make(), [text])
        assert read(make(), pieces(text, places)) == whole
        assert read(make(), list(text)) == whole


def test_held_text_grows_in_place() -> None:
    """A copy for each piece costs the square of the length: 200,000 brackets took 7 s."""
    splitter = ToolCallSplitter(call_format("hermes", ()), by_text=True)
    splitter.feed("<tool_call>" + "[" * 100_000)
    kept = 0
    for _ in range(1000):
        before = id(splitter._held)
        splitter.feed("[")
        kept += id(splitter._held) == before
    assert kept > 500


def test_white_space_after_a_call_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """48,000 spaces took 15 s where each was a reason to look for the end of the calls again."""
    form = call_format("mistral", ())
    looked = 0
    end = type(form).end

    def counted(self: Any, text: str, *, seen: int = 0) -> int | None:
        nonlocal looked
        looked += 1
        return end(self, text, seen=seen)

    monkeypatch.setattr(type(form), "end", counted)
    splitter = ToolCallSplitter(form, by_text=True)
    shown, calls = read(splitter, list(CALLS["mistral"] + " " * 1000 + "x"))
    assert (shown.strip(SPACE), len(calls)) == ("x", 1)
    assert looked < 5
