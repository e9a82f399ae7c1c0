"""Blocks that a worker caches and whose parent it does not hold.

A block may be announced before its parent, and a block in the middle of a chain may leave while
those after it stay. No prompt can reuse a block without all blocks before it, so such blocks wait
here and count again as soon as the parent is stored. The number of blocks of one worker that wait
is bounded.

After a removed parent nothing is unknown: the cache has a hole. After a parent that was never
announced an event is missing, or has not arrived yet, and what the worker caches is in doubt. So it
is where a block found no room here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from router_core.forms import BLOCK_NAME, FLAG, U64, Each, Fields, Row

#: Blocks of one worker that wait for a parent, 300 bytes each.
MOST_DETACHED: Final = 16_384

DETACHED: Final = Fields(
    {
        "blocks": Each(Row(BLOCK_NAME, BLOCK_NAME, U64)),
        "removed": Each(BLOCK_NAME),
        "incomplete": FLAG,
    }
)
"""What `DetachedBlocks.dump` writes."""


class DetachedBlocks:
    """The waiting blocks of one slot, by the engine's names.

    ``places``: name -> (name of the parent, local hash). ``incomplete``: a block was forgotten.
    """

    __slots__ = ("_kids", "_removed", "_unknown", "incomplete", "places")

    def __init__(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}
        self.incomplete = False
        self._kids: dict[int, dict[int, None]] = {}
        """parent -> the blocks that wait for it"""
        self._removed: set[int] = set()
        """parents that the engine removed"""
        self._unknown: set[int] = set()
        """parents that do not wait and that the engine did not remove"""

    @property
    def doubtful(self) -> bool:
        """Whether an event is missing: a parent is unknown, or a block was forgotten."""
        return self.incomplete or bool(self._unknown)

    def add(self, parent: int, names: Sequence[int], local_hashes: Sequence[int]) -> int:
        """Let a chain of blocks wait for ``parent``; returns how many waited already.

        Blocks for which there is no room are forgotten.
        """
        known = 0
        for name, local in zip(names, local_hashes, strict=False):
            if name in self.places:
                known += 1
            elif len(self.places) >= MOST_DETACHED:
                self.incomplete = True
                break
            else:
                self._place(parent, name, local)
            parent = name
        return known

    def _place(self, parent: int, name: int, local: int) -> None:
        self.places[name] = (parent, local)
        self._kids.setdefault(parent, {})[name] = None
        if parent not in self.places and parent not in self._removed:
            self._unknown.add(parent)
        self._unknown.discard(name)
        self._removed.discard(name)

    def note_removed(self, name: int) -> None:
        """The engine removed a block: those that wait for it are behind a hole."""
        if name in self._kids:
            self._unknown.discard(name)
            self._removed.add(name)

    def removed_parents(self) -> list[int]:
        """The parents that the engine removed, in ascending order."""
        return sorted(self._removed)

    def pop(self, name: int) -> bool:
        """The block waits no more; returns whether it did."""
        place = self.places.pop(name, None)
        if place is None:
            return False
        siblings = self._kids[place[0]]
        del siblings[name]
        if not siblings:
            self._forget_parent(place[0])
        if name in self._kids:
            self._unknown.add(name)
        return True

    def _forget_parent(self, parent: int) -> None:
        del self._kids[parent]
        self._removed.discard(parent)
        self._unknown.discard(parent)

    def take_chains(self, parent: int) -> Iterator[tuple[list[int], list[int]]]:
        """Take out the chains that wait for ``parent``, which is held now: names, local hashes.

        A chain ends where several blocks, or none, wait for its last one.
        """
        for first in self._take_kids(parent):
            names, local_hashes = [], []
            kids = [first]
            while len(kids) == 1:
                names.append(kids[0])
                local_hashes.append(self.places.pop(kids[0])[1])
                kids = [*self._kids.get(names[-1], ())]
                if len(kids) == 1:
                    self._forget_parent(names[-1])
            yield names, local_hashes

    def _take_kids(self, parent: int) -> list[int]:
        kids = [*self._kids.get(parent, ())]
        if kids:
            self._forget_parent(parent)
        return kids

    def has_kids(self, name: int) -> bool:
        """Whether a block waits for ``name``."""
        return name in self._kids

    def chains(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Parent, names and local hashes of all waiting chains, parents first."""
        left = self.copy()
        pending = [parent for parent in left._kids if parent not in left.places]
        while pending:
            parent = pending.pop()
            for names, local_hashes in left.take_chains(parent):
                yield parent, names, local_hashes
                pending.append(names[-1])

    def copy(self) -> DetachedBlocks:
        """An independent copy."""
        made = DetachedBlocks()
        made.places = self.places.copy()
        made.incomplete = self.incomplete
        made._kids = {parent: kids.copy() for parent, kids in self._kids.items()}
        made._removed, made._unknown = self._removed.copy(), self._unknown.copy()
        return made

    def dump(self) -> dict[str, Any]:
        """The blocks as plain data, in the order of their names; see `restore`."""
        return {
            "blocks": [
                [parent, name, local] for name, (parent, local) in sorted(self.places.items())
            ],
            "removed": self.removed_parents(),
            "incomplete": self.incomplete,
        }

    @classmethod
    def restore(cls, dump: Mapping[str, Any]) -> DetachedBlocks:
        """The blocks of a `dump`, which has the form `DETACHED`."""
        made = cls()
        for parent, name, local in dump["blocks"]:
            made.add(parent, (name,), (local,))
        for name in dump["removed"]:
            made.note_removed(name)
        made.incomplete = made.incomplete or dump["incomplete"]
        return made
