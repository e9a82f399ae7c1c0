"""The ranks in the order of their booked load, kept while bookings change.

Most ranks of a large fleet have nothing of a prompt: for them the cost depends on their load alone,
and the cheapest of them are the first of this order. So a decision computes the costs of a few
ranks, not of a thousand, and :class:`LazyColumn` computes the others where something reads them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from math import inf
from typing import Any, Final, TypeVar, overload

from router_core.worker_sets import Overlaps, slots_of

T = TypeVar("T")

#: Orders of different sets of ranks, or under different weights, that are kept.
_MOST_ORDERS: Final = 8
#: Changed slots that are remembered for orders that are not up to date; beyond it they start again.
_MOST_CHANGES: Final = 4096
#: Of the cost: further than that from the lowest, rounding cannot make two costs equal. The sums of
#: the formula have a relative error of less than 1e-14.
_MARGIN: Final = 1e-9
#: Slots by which a set of ranks may differ from one that has an order already.
_NEAR: Final = 32
#: Groups of other slots that are passed in search of the cheapest of a mask.
_FAR: Final = 200
_Load = tuple[int, int]


class LoadOrder:
    """The slots of one mask by ``per_token * prefill tokens + per_block * blocks``.

    Slots with equal tokens and equal blocks are one group: whatever their number, they cost the
    same.
    """

    def __init__(self, mask: int, per_token: float, per_block: float) -> None:
        self._mask = mask
        self._per_token, self._per_block = per_token, per_block
        self._load: dict[int, _Load] = {}
        self._groups: dict[_Load, int] = {}
        self._order: list[tuple[float, _Load]] = []
        #: How many changes of the load are in it.
        self.seen = -1

    def renew(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Order all slots again, by the columns of the load."""
        self._load = {slot: (tokens[slot], blocks[slot]) for slot in slots_of(self._mask)}
        groups = self._groups = {}
        for slot, load in self._load.items():
            groups[load] = groups.get(load, 0) | 1 << slot
        self._order = sorted((self._key(load), load) for load in groups)

    def update(self, changed: Iterable[int], tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Move the slots ``changed`` to their places; those of other masks are skipped."""
        loads = self._load
        for slot in changed:
            old, new = loads.get(slot), (tokens[slot], blocks[slot])
            if old is None or old == new:
                continue
            self._remove(slot, old)
            self._add(slot, new)

    def of_slots(self, mask: int, tokens: Sequence[int], blocks: Sequence[int]) -> LoadOrder:
        """The order of another mask, which has few other slots."""
        made = LoadOrder(mask, self._per_token, self._per_block)
        made._load, made._groups = self._load.copy(), self._groups.copy()
        made._order, made.seen = self._order.copy(), self.seen
        for slot in slots_of(self._mask & ~mask):
            made._remove(slot, made._load.pop(slot))
        for slot in slots_of(mask & ~self._mask):
            made._add(slot, (tokens[slot], blocks[slot]))
        return made

    def _remove(self, slot: int, load: _Load) -> None:
        left = self._groups[load] ^ 1 << slot
        if left:
            self._groups[load] = left
        else:
            del self._groups[load]
            del self._order[bisect_left(self._order, (self._key(load), load))]

    def _add(self, slot: int, load: _Load) -> None:
        self._load[slot] = load
        there = self._groups.get(load)
        if there is None:
            insort(self._order, (self._key(load), load))
        self._groups[load] = (there or 0) | 1 << slot

    def _key(self, load: _Load) -> float:
        return self._per_token * load[0] + self._per_block * load[1]

    def cheapest(self, within: int, rest: float) -> list[int] | None:
        """The groups, as masks, that can have one of the two lowest costs of the slots ``within``,
        where each costs its key + ``rest``. None if they are far behind in the order."""
        cheapest: list[int] = []
        groups = self._groups
        limit, count, left = inf, 0, _FAR
        for key, load in self._order:
            if key > limit:
                break
            members = groups[load] & within
            if members:
                cheapest.append(members)
                count += members.bit_count()
                if limit == inf and count > 1:
                    limit = key + _MARGIN * (1.0 + abs(key) + abs(rest))
            elif not left:
                return None
            else:
                left -= 1
        return cheapest


class LoadOrders:
    """The orders that decisions use, up to date with the columns of the load."""

    def __init__(self) -> None:
        self._orders: dict[tuple[Any, ...], LoadOrder] = {}
        self._changed: list[int] = []
        self._forgotten = 0  # changes that are not in the list any more
        self._wanted: tuple[Any, ...] | None = None

    def note_change(self, slot: int) -> None:
        """Note that the load of a slot changed."""
        if self._orders:
            if len(self._changed) >= _MOST_CHANGES:
                self._forgotten += len(self._changed)
                self._changed.clear()
            self._changed.append(slot)

    def order(
        self,
        mask: int,
        per_token: float,
        per_block: float,
        tokens: Sequence[int],
        blocks: Sequence[int],
    ) -> LoadOrder | None:
        """The order of the ranks of ``mask``; None if it was not wanted the last time either.

        Sets that differ much from request to request are not worth an order. Where few ranks came
        or went, the order is made of the one before.
        """
        key = (mask, per_token, per_block)
        order = self._orders.get(key)
        if order is None:
            before, self._wanted = self._wanted, key
            for (other, *weights), known in self._orders.items():
                if weights == [per_token, per_block] and (other ^ mask).bit_count() <= _NEAR:
                    order = known.of_slots(mask, tokens, blocks)
                    break
            else:
                if before != key:
                    return None
                order = LoadOrder(mask, per_token, per_block)
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = order
        total = self._forgotten + len(self._changed)
        if order.seen != total:
            if order.seen < self._forgotten or order.seen < 0:
                order.renew(tokens, blocks)
            else:
                order.update({*self._changed[order.seen - self._forgotten :]}, tokens, blocks)
            order.seen = total
        return order


class LazyColumn(Sequence[T]):
    """A column that is computed when something reads more than a few positions of it.

    ``known``: the values of these, at the places that ``place_of`` gives for their positions.
    ``two``: for costs, the positions of the winner and of the cheapest other; None where there is
    no other. Compares equal to a list of the same values.
    """

    __slots__ = ("_length", "_make", "_place_of", "_values", "known", "two")

    def __init__(
        self,
        make: Callable[[], Sequence[T]],
        length: int,
        place_of: Mapping[int, int],
        known: Sequence[T],
        two: tuple[int, int | None] | None = None,
    ) -> None:
        self._make: Callable[[], Sequence[T]] | None = make
        self._length = length
        self._values: Sequence[T] = ()
        self._place_of, self.known = place_of, known
        self.two = two

    def _all(self) -> Sequence[T]:
        if self._make is not None:
            self._values, self._make = self._make(), None
        return self._values

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, int) and at in self._place_of:
            return self.known[self._place_of[at]]
        return self._all()[at]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class OverlapColumn(LazyColumn[int]):
    """The leading blocks of each of ``slots``, computed for all when the column is iterated."""

    __slots__ = ("_slots", "overlaps")

    def __init__(self, overlaps: Overlaps, slots: Sequence[int]) -> None:
        super().__init__(partial(overlaps.column, slots), len(slots), {}, ())
        self.overlaps = overlaps
        self._slots = slots

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int):
            return self.overlaps.get(self._slots[at])
        return super().__getitem__(at)


def levels_of(column: Sequence[int], slots: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Pairs (blocks, the slots that have so many) of a column, without those that have none."""
    if isinstance(column, OverlapColumn):
        return column.overlaps.levels
    levels: dict[int, int] = {}
    for at in compress(range(len(slots)), column):
        levels[column[at]] = levels.get(column[at], 0) | 1 << slots[at]
    return tuple(levels.items())
