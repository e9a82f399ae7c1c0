"""The prompt blocks that running requests hold, by slot, each block once per slot.

There are two forms, with equal answers. `HeldBlocks` has an entry for each hash, whatever the
hashes of a booking are. `HeldChains` has one for each *run* of blocks that the same bookings hold,
so that a prompt of hundreds of blocks takes a few look-ups. It needs to know that the hashes are
chains: an equal hash then means that all blocks before are equal too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, repeat

from router_core.worker_sets import NO_OVERLAPS, Overlaps, match_prefix


class NotChains(Exception):
    """A hash occurs after different blocks, so that the hashes are not chains."""


class HeldBlocks:
    """Holders by hash. The lengths of chains are not read here."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        #: Slot -> hash -> additional requests that hold the block there; absent means 0.
        self._extra: dict[int, dict[int, int]] = {}

    def find_shared(self, sequence_hashes: Sequence[int], candidates: int) -> Overlaps:
        """Leading blocks of the prompt that each slot of ``candidates`` holds."""
        return match_prefix(self._holders, sequence_hashes, candidates)

    def exclusive(self, slot: int, hashes: tuple[int, ...], chains: Sequence[int] = ()) -> int:
        """How many blocks of a booking no other booking on its slot has."""
        shared = self._extra.get(slot, {})
        return sum(block not in shared for block in hashes)

    def hold(self, slot: int, hashes: tuple[int, ...], chains: Sequence[int] = ()) -> int:
        """Add the blocks to a slot; returns how many no request held there before."""
        bit, holders = 1 << slot, self._holders
        if len(set(hashes)) < len(hashes):
            return sum(self.hold(slot, (block,)) for block in hashes)
        masks = list(map(holders.get, hashes, repeat(0)))
        held = 0
        # Neighbours in a chain have equal holders mostly, and are then changed in bulk.
        for mask, run in _equal_neighbours(hashes, masks):
            if mask & bit:
                held += len(run)
                extra = self._extra.setdefault(slot, {})
                counts = list(map(extra.get, run, repeat(0)))
                for more, part in _equal_neighbours(run, counts):
                    extra.update(zip(part, repeat(more + 1)))
            else:
                holders.update(zip(run, repeat(mask | bit)))
        return len(hashes) - held

    def drop(self, slot: int, hashes: tuple[int, ...], chains: Sequence[int] = ()) -> int:
        """Release the blocks of a slot; returns how many no request holds there any more."""
        bit, holders = 1 << slot, self._holders
        if len(set(hashes)) < len(hashes):
            return sum(self.drop(slot, (block,)) for block in hashes)
        extra = self._extra.get(slot)
        if extra:
            ending: list[int] = []
            counts = list(map(extra.get, hashes, repeat(0)))
            for more, part in _equal_neighbours(hashes, counts):
                if more > 1:
                    extra.update(zip(part, repeat(more - 1)))
                elif more == 1:
                    for block in part:
                        del extra[block]
                else:
                    ending += part
            if not extra:
                del self._extra[slot]
            hashes = tuple(ending)
        masks = list(map(holders.__getitem__, hashes))
        for mask, run in _equal_neighbours(hashes, masks):
            if mask == bit:
                for block in run:
                    del holders[block]
            else:
                holders.update(zip(run, repeat(mask & ~bit)))
        return len(hashes)


def _equal_neighbours(
    blocks: Sequence[int], values: Sequence[int]
) -> Iterator[tuple[int, Sequence[int]]]:
    """The runs of ``blocks`` with equal values, each with its value."""
    at = 0
    for value, run in groupby(values):
        stop = at + len([*run])
        yield value, blocks[at:stop]
        at = stop


class _HeldRun:
    """The blocks ``chain[start:end]``, which the same bookings hold: those of the slots ``mask``.

    ``extra``: slot -> additional bookings there; absent means 0.
    """

    __slots__ = ("chain", "end", "extra", "mask", "start")

    def __init__(
        self, chain: tuple[int, ...], start: int, end: int, mask: int, extra: dict[int, int]
    ) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.mask = mask
        self.extra = extra


class HeldChains:
    """Holders by run. ``chains``: the lengths of the chains that the hashes of a booking are.

    Of several chains a later one may begin after a block of an earlier one, which it continues.
    Raises `NotChains` where that is found not to be so; what is held is unknown from then on.
    """

    def __init__(self) -> None:
        #: First hash of a run -> the run. Every block is in one run.
        self._starts: dict[int, _HeldRun] = {}

    def find_shared(self, sequence_hashes: Sequence[int], candidates: int) -> Overlaps:
        """Leading blocks of the prompt that each slot of ``candidates`` holds."""
        starts, total = self._starts, len(sequence_hashes)
        levels: list[tuple[int, int]] = []
        at, left = 0, candidates
        while at < total and (run := starts.get(sequence_hashes[at])) is not None:
            held = run.mask & left
            if held != left:
                if at:
                    levels.append((at, left & ~held))
                left = held
                if not held:
                    break
            # Another run may continue in the middle of this one: that of a later prompt of a batch.
            at += _same(run, sequence_hashes, at, min(run.end - run.start, total - at))
        if not at:
            return NO_OVERLAPS
        if left:
            levels.append((at, left))
        levels.reverse()
        return Overlaps(tuple(levels))

    def exclusive(self, slot: int, hashes: tuple[int, ...], chains: Sequence[int]) -> int:
        """How many blocks of a booking no other booking on its slot has."""
        alone = end = 0
        for length in chains:
            end += length
            for _, run in self._runs(slot, hashes, end - length, end):
                alone += 0 if slot in run.extra else run.end - run.start
        return alone

    def hold(self, slot: int, hashes: tuple[int, ...], chains: Sequence[int]) -> int:
        """Add the blocks to a slot; returns how many no request held there before."""
        bit, starts = 1 << slot, self._starts
        at = end = added = 0
        for length in chains:
            end += length
            while at < end:
                run = starts.get(hashes[at])
                if run is None:
                    starts[hashes[at]] = _HeldRun(hashes, at, end, bit, {})
                    added += end - at
                    at = end
                    break
                size = self._fit(run, hashes, at, end)
                if run.mask & bit:
                    run.extra[slot] = run.extra.get(slot, 0) + 1
                else:
                    run.mask |= bit
                    added += size
                at += size
        return added

    def drop(self, slot: int, hashes: tuple[int, ...], chains: Sequence[int]) -> int:
        """Release the blocks of a slot; returns how many no request holds there any more."""
        gone = end = 0
        for length in chains:
            end += length
            gone += self._drop(slot, hashes, end - length, end)
        return gone

    def _drop(self, slot: int, hashes: tuple[int, ...], start: int, end: int) -> int:
        bit, gone = 1 << slot, 0
        before: _HeldRun | None = None
        for at, run in self._runs(slot, hashes, start, end):
            size = run.end - run.start
            more = run.extra.get(slot, 0)
            if more > 1:
                run.extra[slot] = more - 1
            elif more:
                del run.extra[slot]
            else:
                gone += size
                run.mask ^= bit
                if not run.mask:
                    del self._starts[hashes[at]]
                    before = None
                    continue
            if before is not None and before.mask == run.mask and before.extra == run.extra:
                # Equal holders, so one run says the same.
                del self._starts[hashes[at]]
                first = at - (before.end - before.start)
                before.chain, before.start = hashes[first : at + size], 0
                before.end = at + size - first
                continue
            if run.chain is hashes:
                # The hashes of a booking are not kept after its end.
                run.chain, run.start, run.end = hashes[at : at + size], 0, size
            before = run
        return gone

    def _runs(
        self, slot: int, hashes: tuple[int, ...], at: int, end: int
    ) -> Iterator[tuple[int, _HeldRun]]:
        """The runs of the chain ``hashes[at:end]``, which the slot holds, each with the place of
        its first block. A run that goes on elsewhere is split first."""
        bit, starts = 1 << slot, self._starts
        while at < end:
            run = starts.get(hashes[at])
            if run is None or not run.mask & bit:
                raise NotChains
            size = self._fit(run, hashes, at, end)
            yield at, run
            at += size

    def _fit(self, run: _HeldRun, hashes: Sequence[int], at: int, end: int) -> int:
        """Split a run after the last block that it shares with ``hashes[at:end]``; returns its
        length."""
        size = run.end - run.start
        same = _same(run, hashes, at, min(size, end - at))
        if same < size:
            middle = run.start + same
            rest = run.chain[middle]
            if rest in self._starts:
                raise NotChains
            self._starts[rest] = _HeldRun(run.chain, middle, run.end, run.mask, run.extra.copy())
            run.end = middle
        return same


def _same(run: _HeldRun, hashes: Sequence[int], at: int, most: int) -> int:
    """How many of the first ``most`` blocks of a run are those of ``hashes`` from ``at`` on; the
    first one is."""
    chain, start = run.chain, run.start
    if chain[start + most - 1] == hashes[at + most - 1]:
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high) >> 1
        if chain[start + middle] == hashes[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low
