"""The prompt's causes: generated conversations whose breaks are known, and the pure part alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.documents.hits import HitsReport
from dynctl.health.hits import hits
from dynctl.health.hits.breaks import (
    Run,
    TextPlace,
    Texts,
    causes_of,
    named_segments,
    runs_from,
    split_by_segments,
)
from tests.dynctl.health.recorded_fleet import SIZE, Prompt, RecordedFleet

#: How the prompts of a conversation differ from turn to turn.
KINDS = ("appended", "stamped", "reordered", "edited", "shortened", "compacted")
TURNS = 5
TAIL = 5


class Conversation:
    """Prompts of 12 blocks and 4 more each turn; ``truth`` has the blocks of each cause."""

    def __init__(self, kind: str, random: Random) -> None:
        self.kind = kind
        self._random = random
        self._system, self._tools, self._history = self._text(4), self._text(4), self._text(4)
        self._reached = [4, 12]
        self.truth: Counter[str] = Counter()

    def _text(self, blocks: int) -> list[int]:
        return [self._random.getrandbits(63) for _ in range(blocks)]

    def segments(self) -> tuple[tuple[str, int], ...]:
        """Each turn as two messages of two blocks."""
        turns = range(8, 8 + len(self._history), 2)
        roles = cycle(("user", "assistant"))
        return (
            ("system", 0),
            ("tools", 4 * SIZE),
            *((role, at * SIZE) for role, at in zip(roles, turns, strict=False)),
        )

    def prompts(self) -> Iterator[tuple[int, ...]]:
        """One prompt for each turn."""
        yield tuple(self._system + self._tools + self._history)
        self.truth["new"] += 12
        for _ in range(1, TURNS):
            yield tuple(self._next())

    def _next(self) -> list[int]:
        turn = self._text(4)
        equal = len(self._system + self._tools + self._history)
        if self.kind == "stamped":
            self._system[1:2] = self._text(1)
            self.truth += Counter(new=1, front=equal - 2)
        elif self.kind == "reordered":
            self._tools = self._tools[2:] + self._tools[:2]
            # Each order was there two turns before, with the history that it had then.
            self.truth += Counter(front=equal - self._reached[0])
            self._reached = [self._reached[1], equal + 4]
        elif self.kind == "edited":
            self._history[2:3] = self._text(1)
            self.truth += Counter(new=1, front=equal - 11)
        elif self.kind == "shortened":
            del self._history[:2]
            self.truth += Counter(truncated=equal - 10)
        elif self.kind == "compacted":
            self._history[:3] = self._text(1)
            self.truth += Counter(new=1, front=equal - 11)
        self.truth["new"] += len(turn)
        self._history += turn
        return self._system + self._tools + self._history


def conversations(
    kinds: Sequence[str] = KINDS, requests: int = 1_000, *, segmented: bool = False
) -> tuple[list[Prompt], Counter[str]]:
    """Prompts of conversations in turn, and the tokens of each cause.

    ``segmented``: with the parts of each, so that edited turns are known as such.
    """
    random = Random(11)
    chats = [Conversation(kinds[i % len(kinds)], random) for i in range(requests // TURNS)]
    streams = [chat.prompts() for chat in chats]
    prompts = []
    for turn in range(TURNS):
        for number, (chat, stream) in enumerate(zip(chats, streams, strict=True)):
            at = 1.0 + 20.0 * turn + number * 15.0 / len(streams)
            prompt = Prompt(at, next(stream), tail=TAIL)
            if segmented:
                prompt = replace(prompt, segments=chat.segments())
            prompts.append(prompt)
    truth: Counter[str] = Counter()
    for chat in chats:
        in_turns = segmented and chat.kind in ("edited", "compacted")
        for cause, blocks in chat.truth.items():
            truth["edited" if in_turns and cause == "front" else cause] += blocks * SIZE
    truth["tail"] = TAIL * len(prompts)
    return prompts, truth


def causes_of_prompts(report: HitsReport) -> dict[str, int]:
    """The tokens of each cause of the step to what was reachable."""
    reachable = report.rung("reachable")
    assert reachable is not None
    return {cause.cause: cause.tokens for cause in reachable.causes}


FLEET = RecordedFleet(workers=7, blocks=40_000, state=True)
FLEETS = {
    "alone": FLEET,
    "evictions": replace(FLEET, blocks=400),
    "round robin": replace(FLEET, config={"router_mode": "round-robin"}),
    "load beats cache": replace(FLEET, prefill_s=1.5),
    "late events": replace(FLEET, delay_s=25.0),
    "restarts": replace(FLEET, restarts={worker: 45.0 + worker for worker in range(7)}),
    "two routers": replace(FLEET, routers=2, prefill_s=1.5),
}


@pytest.mark.parametrize("name", FLEETS)
def test_the_prompts_causes_have_their_true_size_whatever_the_fleet_does(name: str) -> None:
    prompts, truth = conversations()
    report = hits(FLEETS[name].records(prompts))
    shown = causes_of_prompts(report)
    assert shown.keys() == truth.keys()
    for cause, tokens in truth.items():
        assert abs(shown[cause] - tokens) <= 0.01 * report.prompt_tokens, cause
    lost = sum(cause.tokens for rung in report.rungs for cause in rung.causes)
    assert report.rungs[0].rung == "prompt"
    assert report.rungs[-1].tokens == report.prompt_tokens - lost
    fleet_causes = {cause.cause for rung in report.rungs[2:] for cause in rung.causes}
    assert (name == "alone") == (not fleet_causes), fleet_causes


@pytest.mark.parametrize("name", ["alone", "evictions"])
def test_where_the_parts_of_prompts_are_known_each_cause_names_those_that_changed(
    name: str,
) -> None:
    prompts, truth = conversations(segmented=True)
    report = hits(FLEETS[name].records(prompts))
    shown = causes_of_prompts(report)
    assert shown.keys() == truth.keys()
    for cause, tokens in truth.items():
        assert abs(shown[cause] - tokens) <= 0.01 * report.prompt_tokens, cause
    reachable = report.rung("reachable")
    assert reachable is not None
    parts = {cause.cause: cause.segments for cause in reachable.causes}
    assert parts["front"].keys() == {"system", "tools"}
    assert set(parts["edited"]) <= {"turn 1 (user)", "turn 1 (assistant)"}
    assert sum(parts["edited"].values()) == shown["edited"]
    assert sum(parts["new"].values()) == shown["new"]
    seen = [seen.segment for cause in report.largest for seen in cause.breaks]
    assert seen
    assert all(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_break_is_named_alone(kind: str) -> None:
    prompts, truth = conversations([kind], requests=100)
    assert causes_of_prompts(hits(FLEET.records(prompts))) == truth


def test_a_break_names_the_block_the_equal_text_and_the_request_that_had_it() -> None:
    start = (1, 2, 3, 4, 5, 6)
    prompts = [Prompt(1.0, start), Prompt(2.0, (1, 2, 77, 4, 5, 6, 8))]
    report = hits(FLEET.records(prompts))
    front = next(cause for cause in report.largest if cause.cause == "front")
    assert (front.tokens, front.requests, front.examples) == (3 * SIZE, 1, ["r1"])
    (seen,) = front.breaks
    assert (seen.request, seen.block, seen.token) == ("r1", 2, 2 * SIZE)
    assert (seen.equal_from, seen.equal_to, seen.was_at, seen.earlier) == (3, 6, 3, "r0")


def test_equal_text_of_another_tenant_is_new() -> None:
    texts = (1, 2, 3, 4), (9, 2, 3, 4)
    prompts = [Prompt(1.0, texts[0], tenant="a"), Prompt(2.0, texts[1], tenant="b")]
    report = hits(FLEET.records([prompts[0], replace(prompts[1], blocks=(9, 8, 2, 3, 4))]))
    assert causes_of_prompts(report) == {"new": 9 * SIZE, "tail": 2 * TAIL}
    same = hits(FLEET.records([prompts[0], replace(prompts[1], tenant="a")]))
    assert causes_of_prompts(same) == {"new": 5 * SIZE, "front": 3 * SIZE, "tail": 2 * TAIL}


def test_without_kv_events_the_contents_are_unknown_and_nothing_is_guessed() -> None:
    prompts, truth = conversations(requests=60)
    report = hits(replace(FLEET, kv_events=False).records(prompts))
    shown = causes_of_prompts(report)
    assert shown.keys() == {"contents", "tail"}
    assert sum(shown.values()) == sum(truth.values())
    assert "front" not in [cause.cause for cause in report.largest]


def test_equal_text_that_may_have_moved_within_its_blocks_is_a_doubt_and_a_new_chat_is_none() -> (
    None
):
    parts = (("system", 0), ("user", 4 * SIZE))
    first = Prompt(1.0, (1, 2, 3, 4, 5, 6, 7), segments=parts)
    moved = replace(first, at=2.0, blocks=(1, 20, 21, 22, 23, 24, 25))
    other = replace(first, at=2.0, blocks=(1, 2, 3, 4, 23, 24, 25))
    # Where a block has the end of the system prompt and the first words of the turn.
    over = replace(other, segments=(("system", 0), ("user", 4 * SIZE + 9)))
    shown = [
        [doubt.code for doubt in hits(FLEET.records([first, second])).doubts]
        for second in (moved, other, over)
    ]
    assert shown == [["DYR0770"], [], []]


def test_a_block_over_the_bounds_of_two_parts_names_both() -> None:
    parts = (("system", 0), ("user", 2 * SIZE + 3))
    first = Prompt(1.0, (1, 2, 3, 4, 5), segments=parts)
    report = hits(FLEET.records([first, replace(first, at=2.0, blocks=(1, 2, 9, 4, 5))]))
    (cause,) = (cause for cause in report.largest if cause.breaks)
    assert (cause.cause, cause.segments) == ("front", {"system or turn 1 (user)": 2 * SIZE})


def test_parts_are_named_by_turn_and_what_is_before_them_is_the_templates() -> None:
    kinds = ["system", "user", "assistant", "tool", "user", "odd", *["user"] * 20]
    segments = named_segments([(kind, 2 + 3 * n) for n, kind in enumerate(kinds)], 100)
    names = [segment.name for segment in segments]
    assert names[:3] == ["template", "system", "turn 1 (user)"]
    assert names[3:7] == ["turn 1 (assistant)", "turn 1 (tool)", "turn 2 (user)", "another part"]
    assert (names[20], names[21], names[-1]) == ("turn 16 (user)", "turn 17+ (user)", names[21])
    assert [(one.start, one.end) for one in segments[:2]] == [(0, 2), (2, 5)]
    assert segments[-1].end == 100
    assert split_by_segments(segments, 1, 6) == {"template": 1, "system": 3, "turn 1 (user)": 1}
    assert len(named_segments([("user", 0)] * 5_000, 100)) == 256
    assert named_segments([], 100) == []
    assert named_segments([("user", 100)], 100) == []


# -- the pure part ------------------------------------------------------------------------


def _places(texts: Sequence[int | None], earlier: Sequence[int]) -> list[list[TextPlace] | None]:
    at: dict[int, list[TextPlace]] = {}
    for depth, text in enumerate(earlier):
        at.setdefault(text, []).append(TextPlace(depth, float(depth), depth))
    return [None if text is None else at.get(text, []) for text in texts]


@settings(max_examples=200)
@given(
    start=st.integers(0, 5),
    texts=st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=20),
    earlier=st.lists(st.integers(0, 9), max_size=20),
)
def test_runs_cover_each_block_once_and_equal_blocks_were_where_they_say(
    start: int, texts: list[int | None], earlier: list[int]
) -> None:
    runs = runs_from(start, _places(texts, earlier))
    blocks = [block for run in runs for block in range(run.start, run.end)]
    assert blocks == list(range(start, start + len(texts)))
    for run in runs:
        for block in range(run.start, run.end):
            text = texts[block - start]
            assert run.known == (text is not None)
            if run.place is not None:
                assert earlier[block + run.shift] == text
            elif run.known:
                assert text not in earlier
    causes = causes_of(runs)
    assert len(causes) == len(runs)
    for run, cause in zip(runs, causes, strict=True):
        assert (cause == "contents") == (not run.known)
        assert (cause in ("front", "truncated")) == (run.place is not None)


@settings(max_examples=100)
@given(
    front=st.integers(0, 4), gone=st.integers(1, 6), kept=st.integers(1, 8), more=st.integers(0, 4)
)
def test_a_history_whose_start_is_gone_is_no_change_in_front_and_the_reverse(
    front: int, gone: int, kept: int, more: int
) -> None:
    earlier = list(range(front + gone + kept))
    new = [100 + number for number in range(more)]
    rest = earlier[front + gone :]
    shortened = runs_from(front, _places(rest + new, earlier))
    assert causes_of(shortened) == ["truncated"] + ["new"] * bool(more)
    moved = runs_from(front, _places(rest + earlier[front : front + gone] + new, earlier))
    assert causes_of(moved) == ["front", "front"] + ["new"] * bool(more)
    stamped = runs_from(front, _places([99, *earlier[front + 1 :]], earlier))
    assert causes_of(stamped) == ["new"] + ["front"] * (gone + kept > 1)


def test_places_are_those_of_the_tenant_before_a_time_and_bounded() -> None:
    texts = Texts(most=10)
    assert not texts.note("a", 7, TextPlace(3, 2.0, 70))
    assert not texts.note("a", 7, TextPlace(3, 1.0, 71))
    assert not texts.note("a", 7, TextPlace(1, 5.0, 72))
    assert texts.before("a", 7, 5.0) == (TextPlace(3, 1.0, 71),)
    assert texts.before("a", 7, 6.0) == (TextPlace(3, 1.0, 71), TextPlace(1, 5.0, 72))
    assert texts.before("b", 7, 6.0) == ()
    for depth in range(100):
        texts.note("a", 7, TextPlace(depth, 9.0, 73))
    assert len(texts.before("a", 7, 10.0)) == 8
    dropped = [texts.note("a", 1_000 + number, TextPlace(0, 1.0, 1)) for number in range(30)]
    assert any(dropped)
    assert texts.before("a", 7, 10.0) == ()


def test_a_shift_is_how_far_text_moved() -> None:
    assert Run(5, 8, True, TextPlace(9, 1.0, 1)).shift == 4
    assert Run(5, 8, True, TextPlace(9, 1.0, 1)).covers(11, 20)
    assert not Run(5, 8, True, TextPlace(9, 1.0, 1)).covers(12, 20)
    assert not Run(5, 8, True).covers(0, 20)
