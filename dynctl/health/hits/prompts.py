"""The causes that are in a prompt: what of it no earlier prompt had at its place, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dynctl.documents.hits import HitsBreak
from dynctl.health.hits.breaks import (
    Run,
    TextPlace,
    cause_in,
    causes_of,
    changed_block,
    in_turns,
    named_segments,
    runs_from,
    split_by_segments,
)
from dynctl.health.hits.past import Fate, Request


class PromptCauses:
    """Gives the blocks of a prompt from ``first`` on to causes, in ``Request.parts``.

    Other prompts have the blocks before. ``fates``: what happened to each block.
    """

    def __init__(self, request: Request, fates: Mapping[int, Fate], first: int) -> None:
        self._request = request
        self._fates = fates
        self._first = first
        self._size = request.arrived.block_size
        self._segments = named_segments(request.arrived.segments, request.arrived.isl_tokens)
        #: Ids of earlier prompts -> the leading blocks that they share, as far as was compared.
        self._shared: dict[str, int] = {}

    def judge(self) -> None:
        request, first = self._request, self._first
        tail = request.arrived.isl_tokens - max(first, request.usable) * self._size
        if tail > 0:
            request.parts["shared", "tail"] += tail
        runs = runs_from(first, [self._earlier(n) for n in range(first, request.usable)])
        for number, cause in enumerate(causes_of(runs)):
            place = runs[number].place
            if place is None:
                self._judge_new(runs[number], cause)
            else:
                self._judge_equal(runs, number, cause, place)

    def _earlier(self, block: int) -> Sequence[TextPlace] | None:
        """Where earlier prompts of the tenant had the contents of a block; None: not known."""
        request = self._request
        fate = self._fates.get(request.hashes[block])
        if fate is None or not fate.local or request.texts is None:
            return None
        return request.texts.before(request.arrived.tenant, fate.local, request.decided_at)

    def _parts_of(self, start: int, end: int) -> Counter[str]:
        """The parts of the prompt in which blocks are, with their tokens."""
        return split_by_segments(self._segments, start * self._size, end * self._size)

    def _judge_new(self, run: Run, cause: str) -> None:
        parts = self._parts_of(run.start, run.end)
        self._add(run, cause, parts)
        broken = self._parts_of(self._first, self._first + 1) if self._first else ()
        if cause == "new" and broken and not any(in_turns([part]) for part in broken):
            turns = (tokens for part, tokens in parts.items() if in_turns([part]))
            self._request.moved += sum(turns)

    def _judge_equal(self, runs: Sequence[Run], number: int, cause: str, place: TextPlace) -> None:
        run = runs[number]
        block, earlier = self._first_difference(place)
        changed = changed_block(runs, number) if block == self._first else block
        parts = [*self._parts_of(changed, changed + 1)]
        cause = cause_in(parts, cause)
        part = " or ".join(parts)
        seen = HitsBreak(
            self._request.arrived.id,
            block,
            block * self._size,
            run.start,
            run.end,
            place.depth,
            earlier,
            part,
        )
        self._request.breaks.setdefault(cause, seen)
        self._add(run, cause, {part: (run.end - run.start) * self._size} if part else {})

    def _first_difference(self, place: TextPlace) -> tuple[int, str]:
        """The first block that differs from the prompt that had a text, and that prompt's id; empty
        where it is unknown."""
        fate = self._fates.get(place.block)
        if fate is None or fate.by is None:
            return self._first, ""
        earlier = fate.by.arrived
        if earlier.id not in self._shared:
            pairs = zip(self._request.hashes[: self._first], earlier.hashes, strict=False)
            unequal = (block for block, (own, other) in enumerate(pairs) if own != other)
            self._shared[earlier.id] = next(unequal, self._first)
        return self._shared[earlier.id], earlier.id

    def _add(self, run: Run, cause: str, parts: Mapping[str, int]) -> None:
        request = self._request
        request.parts["shared", cause] += (run.end - run.start) * self._size
        request.segments.setdefault(cause, Counter()).update(parts)
