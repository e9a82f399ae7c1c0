"""Text of output ids up to a stop: in any pieces the same text, and no stop string in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from dynctl.tokenization.detokenizer import DynamoDecoder, OutputDecoder, StopRules

MODEL = load_tokenizer(DEMO_MODEL_DIR)
texts = st.text(alphabet="abAB ü好👩\n", max_size=30)
stops = st.lists(st.text(alphabet="abAB ü好", min_size=1, max_size=4), max_size=3)


def decoder(*strings: str, **rules) -> OutputDecoder:
    return OutputDecoder(DynamoDecoder(MODEL), StopRules(strings=strings, **rules))


def show(decoder: OutputDecoder, pieces: list[list[int]]) -> str:
    text = ""
    for piece in pieces:
        found = decoder.feed(piece)
        text += found.text
        if found.stopped:
            return text
    return text + decoder.flush()


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces = []
    for size in sizes:
        pieces.append(ids[:size])
        ids = ids[size:]
    return [*pieces, ids]


@given(texts, stops, st.lists(st.integers(0, 4)), st.booleans())
def test_pieces_do_not_change_the_text(text, stops, sizes, keep):
    ids = MODEL.encode(text)
    whole = show(decoder(*stops, keep_string=keep), [ids])
    assert show(decoder(*stops, keep_string=keep), cut(ids, sizes)) == whole


@given(texts, stops)
def test_the_text_ends_before_the_first_stop(text, stops):
    shown = show(decoder(*stops), [[each] for each in MODEL.encode(text)])
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if shown != text:
        assert any(text.startswith(stop, len(shown)) for stop in stops)


@given(texts, stops)
def test_a_kept_stop_ends_the_text(text, stops):
    shown = show(decoder(*stops, keep_string=True), [[each] for each in MODEL.encode(text)])
    assert text.startswith(shown)
    if shown != text:
        assert any(shown.endswith(stop) for stop in stops)


@given(texts, st.lists(st.integers(0, 3)))
def test_without_stops_the_text_is_that_of_all_ids(text, sizes):
    ids = MODEL.encode(text)
    assert show(decoder(), cut(ids, sizes)) == MODEL.decode(ids)


def test_the_beginning_of_a_stop_is_held_back_until_it_is_decided():
    held = decoder("stop")
    assert held.feed(MODEL.encode("a st")).text == "a "
    assert held.feed(MODEL.encode("e")).text == "ste"
    held.feed(MODEL.encode("st"))
    assert held.flush() == "st"


@given(st.text())
def test_a_stream_has_the_same_text_as_the_whole(text):
    stream = DynamoDecoder(MODEL, skip_special_tokens=False)
    pieces = [stream.step(each) or "" for each in MODEL.encode(text)]
    assert "".join([*pieces, stream.flush()]) == text


def test_an_emoji_split_across_tokens():
    ids = MODEL.encode("hi 👩‍🚀!")
    assert len(MODEL.encode("👩")) > 1
    stream = DynamoDecoder(MODEL)
    pieces = [stream.step(each) or "" for each in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "👩" in pieces
    assert "".join(pieces) == "hi 👩‍🚀!"


def test_an_unfinished_character_is_shown_at_the_end():
    stream = DynamoDecoder(MODEL)
    shown = "".join(stream.step(each) or "" for each in MODEL.encode("ok 👩")[:-1])
    assert (shown, stream.flush()) == ("ok ", "\ufffd")


def test_invalid_bytes_wait_for_a_character_but_not_for_ever():
    (lead, *_) = MODEL.encode("👩")
    stream = DynamoDecoder(MODEL)
    assert [stream.step(lead) for _ in range(100)] == [None] * 100
    assert stream.step(MODEL.encode("a")[0]) == "\ufffd" * 100 + "a"
    shown = "".join(stream.step(lead) or "" for _ in range(3000))
    assert len(shown) > 1000


@pytest.mark.parametrize(("minimum", "shown"), [(0, ""), (1, "a"), (2, "aba")])
def test_the_first_tokens_do_not_count(minimum, shown):
    ids = [each for char in "abab" for each in MODEL.encode(char)]
    assert len(ids) == 4
    stopped = "b" if minimum else "a"
    text = show(decoder(stopped, min_tokens=minimum), [ids])
    assert text == shown


def test_a_stop_id_is_named_only_if_the_request_has_it():
    (a,) = MODEL.encode("a")
    ended = decoder(hidden_ids=frozenset({a})).feed([a])
    assert (ended.text, ended.stopped, ended.cause, ended.hidden) == ("", True, None, True)
    asked = decoder(hidden_ids=frozenset({a}), requested_ids=frozenset({a})).feed([a, a])
    assert (asked.cause, asked.used) == (a, 1)
    kept = decoder(hidden_ids=frozenset({a}), visible_ids=frozenset({a})).feed([a])
    assert (kept.text, kept.stopped) == ("a", True)


def test_the_prompt_is_the_context_of_the_first_piece():
    (lead, *rest) = MODEL.encode("👩")
    stream = DynamoDecoder(MODEL, [lead])
    assert "".join(stream.step(each) or "" for each in [*rest, *MODEL.encode("x")]) != ""
