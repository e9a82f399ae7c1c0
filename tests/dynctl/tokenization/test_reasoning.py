"""Reasoning and answer are separated, in pieces as in one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization.reasoning import Parts, ReasoningSplitter

words = st.text(alphabet="ab \nü", max_size=8)


def split(pieces: list[str], *, inside: bool = False, prompted: bool = False) -> Parts:
    splitter = ReasoningSplitter(inside=inside, prompted=prompted)
    parts = [splitter.feed(piece) for piece in pieces]
    return Parts("".join(each.answer for each in parts), "".join(each.reasoning for each in parts))


@given(words, words, words)
def test_marks_separate_reasoning_from_the_answer(before, reasoning, after):
    text = f"{before}<think>{reasoning}</think>{after}"
    assert split([text]) == (before + after, reasoning)


@given(words, words, st.lists(st.integers(2, 9)))
def test_marks_may_be_cut_after_their_second_character(reasoning, after, sizes):
    pieces = []
    for mark in ("<think>", reasoning, "</think>", after):
        rest = mark
        for size in sizes:
            pieces.append(rest[:size])
            rest = rest[size:]
        pieces.append(rest)
    assert split(pieces) == (after, reasoning)


@given(st.lists(words, max_size=4))
def test_text_without_marks_is_the_answer_or_all_reasoning(pieces):
    text = "".join(pieces)
    assert split(pieces) == (text, "")
    assert split(pieces, inside=True) == ("", text)
    assert split(pieces, prompted=True) == ("", text)


@pytest.mark.parametrize(
    ("pieces", "answer", "reasoning"),
    [
        (["a<think>b</think>c<think>d</think>e"], "ace", "bd"),
        (["a</think>b"], "ab", ""),
        (["<think>a", "<think>b</think>c"], "c", "a<think>b"),
        (["<", "think>a"], "<think>a", ""),
        (["a <thi"], "a ", ""),
        (["<thi", "s"], "<this", ""),
    ],
)
def test_unusual_marks_are_read_as_in_dynamo(pieces, answer, reasoning):
    assert split(pieces) == (answer, reasoning)


def test_a_mark_that_the_prompt_has_is_not_looked_for_again():
    assert split(["<think>a</think>b"], inside=True) == ("b", "a")
    assert split(["<think>a</think>b"], prompted=True) == ("b", "<think>a")
