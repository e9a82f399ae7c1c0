"""Cached blocks below the accelerator's memory: in host memory, and on disk.

A rank's cached prefix goes on from tier to tier: the device blocks of :class:`PrefixIndex` first,
then host blocks from there on, then disk blocks. A lower block is found under the engine's name of
the block before it and its own local hash. So a removed block hides those behind it until it is
stored again, and a block may arrive before its parent. Source: Dynamo 1.6.1, observed on its
SelectionService with 21 sequences of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from router_core.forms import BLOCK_NAME, SLOT, U64, Each, Fields, Maybe, OneOf, Row

HOST: Final = "host_pinned"
DISK: Final = "disk"
#: Name of a tier in events -> where its blocks are counted.
TIERS: Final[Mapping[str, str]] = {HOST: HOST, DISK: DISK, "external": DISK}

_FORM: Final = Each(
    Fields(
        {
            "slot": SLOT,
            "tier": OneOf(TIERS),
            "blocks": Each(Row(Maybe(BLOCK_NAME), U64, BLOCK_NAME)),
        }
    )
)
"""What `LowerTiers.dump` writes."""

_Place = tuple[int | None, int]
"""(the engine's name of the block before it, local hash)."""


class _Chains:
    """The blocks of one rank in one tier, both directions."""

    __slots__ = ("names", "places")

    def __init__(self) -> None:
        self.names: dict[_Place, int] = {}
        self.places: dict[int, _Place] = {}

    def store(self, parent: int | None, names: Sequence[int], locals_: Sequence[int]) -> None:
        for name, local in zip(names, locals_, strict=True):
            self.remove(name)
            place = (parent, local)
            replaced = self.names.get(place)
            if replaced is not None:
                del self.places[replaced]
            self.names[place] = name
            self.places[name] = place
            parent = name

    def remove(self, name: int) -> None:
        place = self.places.pop(name, None)
        if place is not None:
            del self.names[place]


class LowerTiers:
    """The lower tiers of all slots. ``mask``: the slots that hold a block in one of them."""

    __slots__ = ("_chains", "_dropped", "mask")

    def __init__(self) -> None:
        self._chains: dict[str, dict[int, _Chains]] = {HOST: {}, DISK: {}}
        self._dropped: list[dict[Any, Any]] = []
        self.mask = 0

    def block_count(self, slot: int) -> tuple[int, int]:
        """Blocks that ``slot`` holds in host memory and on disk."""
        host, disk = (self._chains[tier].get(slot) for tier in (HOST, DISK))
        return len(host.places) if host else 0, len(disk.places) if disk else 0

    @property
    def total_blocks(self) -> int:
        """Blocks of all slots in both tiers."""
        return sum(len(held.places) for slots in self._chains.values() for held in slots.values())

    def store(
        self,
        slot: int,
        tier: str,
        parent: int | None,
        names: Sequence[int],
        local_hashes: Sequence[int],
    ) -> None:
        """Add a chain of blocks; ``names`` and ``local_hashes`` have equal length.

        ``tier``: a key of TIERS. Storing held blocks again changes nothing.
        """
        if names:
            chains = self._chains[TIERS[tier]]
            chains.setdefault(slot, _Chains()).store(parent, names, local_hashes)
            self.mask |= 1 << slot

    def remove(self, slot: int, tier: str, names: Sequence[int]) -> None:
        """Remove blocks; unknown names are ignored."""
        held = self._chains[TIERS[tier]].get(slot)
        if held is not None:
            for name in names:
                held.remove(name)
            if not held.places:
                del self._chains[TIERS[tier]][slot]
                self._update(slot)

    def clear(self, slot: int) -> None:
        """Remove all blocks of ``slot``; :meth:`sweep` frees their memory."""
        for chains in self._chains.values():
            held = chains.pop(slot, None)
            if held is not None:
                self._dropped += [held.names, held.places]
        self._update(slot)

    def sweep(self, max_blocks: int) -> bool:
        """Free memory of cleared slots, at most ``max_blocks`` blocks; True while more is left."""
        while self._dropped and max_blocks > 0:
            table = self._dropped[-1]
            count = min(len(table), max_blocks)
            for _ in range(count):
                table.popitem()
            if table:
                break
            self._dropped.pop()
            max_blocks -= count
        return bool(self._dropped)

    def extend(
        self, slot: int, parent: int | None, local_hashes: Sequence[int], start: int
    ) -> tuple[int, int]:
        """Host and disk blocks with which ``slot`` continues a prompt's cached prefix.

        ``start``: leading blocks cached on the device; ``parent``: the slot's name of the last of
        them, None without any. Cost: one look-up for each block found.
        """
        end, counts = len(local_hashes), []
        for tier in (HOST, DISK):
            held, begin = self._chains[tier].get(slot), start
            if held is not None:
                names = held.names
                while start < end:
                    name = names.get((parent, local_hashes[start]))
                    if name is None:
                        break
                    parent, start = name, start + 1
            counts.append(start - begin)
        return counts[0], counts[1]

    # -- dump and restore --------------------------------------------------------------------

    def copy(self) -> LowerTiers:
        """An independent copy."""
        made = LowerTiers()
        made.mask = self.mask
        for tier, chains in self._chains.items():
            for slot, held in chains.items():
                copied = made._chains[tier][slot] = _Chains()
                copied.names, copied.places = held.names.copy(), held.places.copy()
        return made

    def dump(self) -> list[dict[str, Any]]:
        """``[{"slot", "tier", "blocks": [[parent, local hash, name], ...]}, ...]``."""
        return [
            {
                "slot": slot,
                "tier": tier,
                "blocks": [[parent, local, name] for (parent, local), name in held.names.items()],
            }
            for tier, chains in self._chains.items()
            for slot, held in sorted(chains.items())
        ]

    @classmethod
    def restore(cls, plain: Sequence[Mapping[str, Any]]) -> LowerTiers:
        """The inverse of :meth:`dump`; raises SnapshotError."""
        _FORM.check(plain, "tiers")
        made = cls()
        for row in plain:
            for parent, local, name in row["blocks"]:
                made.store(row["slot"], row["tier"], parent, (name,), (local,))
        return made

    def _update(self, slot: int) -> None:
        if not any(slot in chains for chains in self._chains.values()):
            self.mask &= ~(1 << slot)
