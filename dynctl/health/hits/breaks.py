"""Where a prompt leaves all earlier prompts, and whether equal text follows.

A block of a prompt has two hashes: the sequence hash stands for the whole prefix, the local hash
for the tokens of the block alone. A block whose sequence hash is new, but whose local hash was in
an earlier prompt, is equal text behind something that changed. Text that moved by other than whole
blocks has other local hashes, so it counts as new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple

_TEMPLATE: Final = "template"
_PARTS: Final = frozenset({_TEMPLATE, "system", "tools", "documents"})
_TURN: Final = "turn "
_TURNS: Final = frozenset({"user", "assistant", "tool"})
#: Parts of a prompt that count; a recording of another program may have any number.
_MOST_SEGMENTS: Final = 256
#: Turns that are counted apart.
_MOST_TURNS: Final = 16
#: Positions that are kept of a text: a history that moves with each turn has many.
_MOST_PLACES: Final = 8


class TextPlace(NamedTuple):
    """Where a text was: after ``depth`` blocks, since the time ``at``, with the sequence hash
    ``block``."""

    depth: int
    at: float
    block: int


class Texts:
    """The places of blocks in the prompts of one model, by tenant and local hash.

    ``most``: distinct texts that are kept; the oldest make room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[int, tuple[TextPlace, ...]] = {}

    def note(self, tenant: str, local: int, place: TextPlace) -> bool:
        """Note a place of a text. Returns whether others had to make room."""
        key = _key(tenant, local)
        places = self._places.get(key, ())
        same = next((known for known in places if known.depth == place.depth), None)
        if same is not None and same.at <= place.at:
            return False
        others = tuple(known for known in places if known is not same)
        self._places[key] = (*others[-(_MOST_PLACES - 1) :], place)
        if len(self._places) <= self._most:
            return False
        for oldest in list(islice(self._places, max(1, self._most // 10))):
            del self._places[oldest]
        return True

    def before(self, tenant: str, local: int, at: float) -> tuple[TextPlace, ...]:
        """The places of a text before a time, the latest last."""
        places = self._places.get(_key(tenant, local), ())
        return tuple(sorted((place for place in places if place.at < at), key=lambda p: p.at))


def _key(tenant: str, local: int) -> int:
    """A number in place of a pair: there are as many texts as blocks."""
    return hash((tenant, local)) if tenant else local


class Segment(NamedTuple):
    """A part of a prompt, in tokens; ``end`` is not included."""

    name: str
    start: int
    end: int


def named_segments(starts: Sequence[tuple[str, int]], tokens: int) -> list[Segment]:
    """The parts of a prompt by name; turns have their number. Empty where none is known.

    ``starts``: kind and first token of each, in order.
    """
    bounds = [(kind, at) for kind, at in starts[:_MOST_SEGMENTS] if at < tokens]
    if bounds and bounds[0][1] > 0:
        bounds.insert(0, (_TEMPLATE, 0))
    segments, turn = [], 0
    for (kind, at), (_, end) in pairwise([*bounds, ("", tokens)]):
        name = kind
        if kind in _TURNS:
            # A turn begins with what the user writes.
            turn += kind == "user" or not turn
            number = f"{turn}" if turn <= _MOST_TURNS else f"{_MOST_TURNS + 1}+"
            name = f"{_TURN}{number} ({kind})"
        elif kind not in _PARTS:
            name = "another part"
        segments.append(Segment(name, at, end))
    return segments


def split_by_segments(segments: Sequence[Segment], low: int, high: int) -> Counter[str]:
    """How many of the tokens from ``low`` to ``high`` are in each part."""
    tokens: Counter[str] = Counter()
    for segment in segments:
        within = min(high, segment.end) - max(low, segment.start)
        if within > 0:
            tokens[segment.name] += within
    return tokens


class Run(NamedTuple):
    """Blocks ``start`` to ``end`` (not included) of a prompt that have one origin.

    ``known``: whether their contents are known. ``place``: where an earlier prompt had the first
    of them, None for new text.
    """

    start: int
    end: int
    known: bool
    place: TextPlace | None = None

    @property
    def shift(self) -> int:
        """By how many blocks the text moved to the front; negative: to the end."""
        return 0 if self.place is None else self.place.depth - self.start

    def covers(self, low: int, high: int) -> bool:
        """Whether it has blocks that an earlier prompt had from ``low`` to ``high``."""
        if self.place is None:
            return False
        begin = self.place.depth
        return begin < high and low < begin + self.end - self.start


def runs_from(start: int, places: Sequence[Sequence[TextPlace] | None]) -> list[Run]:
    """The runs of the blocks from ``start`` on.

    ``places``: of each block those in earlier prompts, the latest last; None: contents unknown.
    """
    runs: list[Run] = []
    for block, earlier in enumerate(places, start):
        last = runs[-1] if runs else None
        run = _run_of(block, earlier, last)
        if last is not None and run.start == last.start:
            runs[-1] = run
        else:
            runs.append(run)
    return runs


def _run_of(block: int, earlier: Sequence[TextPlace] | None, last: Run | None) -> Run:
    """The run that a block continues, or begins."""
    if earlier:
        if last is not None and last.place is not None:
            wanted = last.shift + block
            if any(place.depth == wanted for place in earlier):
                return last._replace(end=block + 1)
        here = next((place for place in earlier if place.depth == block), earlier[-1])
        return Run(block, block + 1, True, here)
    known = earlier is not None
    if last is not None and last.place is None and last.known == known:
        return last._replace(end=block + 1)
    return Run(block, block + 1, known)


def changed_block(runs: Sequence[Run], number: int) -> int:
    """The first block of the part that changed in front of a run of equal text; where none did, the
    first block of the run."""
    while number and runs[number - 1].place is None:
        number -= 1
    return runs[number].start


def in_turns(parts: Iterable[str]) -> bool:
    """Whether all of these parts of a prompt are turns."""
    return all(part.startswith(_TURN) for part in parts)


def cause_in(parts: Sequence[str], cause: str) -> str:
    """A cause by blocks alone, where the parts are known in which the changed block is: more than
    one where it reaches over their bounds."""
    if not parts:
        return cause
    if cause == "front" and in_turns(parts):
        return "edited"
    if cause == "truncated" and not any(in_turns([part]) for part in parts):
        return "front"
    return cause


def causes_of(runs: Sequence[Run]) -> list[str]:
    """The cause of each run: ``new``, ``contents`` (unknown), ``truncated`` or ``front``.

    The start of a history is gone where its text follows at once, and what was before that text is
    nowhere in the prompt. Other equal text is behind a part that changed.
    """
    causes = []
    shifts: set[int] = set()
    for run in runs:
        if run.place is None:
            causes.append("new" if run.known else "contents")
            # A block whose contents are unknown may be part of the text around it.
            shifts = shifts if not run.known else set()
            continue
        if run is runs[0] and run.shift > 0:
            gone = (run.start, run.place.depth)
            if not any(other.covers(*gone) for other in runs):
                shifts = {run.shift}
        causes.append("truncated" if run.shift in shifts else "front")
    return causes
