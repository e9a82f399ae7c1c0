"""The tiers of a rank's prefix cache below its device: blocks in host memory, then on disk.

What the device evicts goes to host memory, what has no room there to disk, and what has no room
there is gone. A tier without a size is left out. Each tier forgets its least recently used block
first; a block that is loaded stays in its tier, and is on the device as well.

A cached prefix goes on from tier to tier: device blocks, then host blocks from there on, then disk
blocks. Routers credit it in the same way (:mod:`router_core.lower_tiers`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import filterfalse
from typing import Final, NamedTuple

from dynctl.simulation.engine.cache_events import CacheRemoved, CacheStored

HOST: Final = "host_pinned"
DISK: Final = "disk"


class Content(NamedTuple):
    """What events show of a block: the block before it, its tokens, adapter and cache salt."""

    parent: int | None
    tokens: tuple[int, ...]
    lora: str | None
    salt: str | None


class EngineTiers:
    """At most ``host_blocks`` and ``disk_blocks`` blocks. ``on_device``: hashes that the device
    has cached. ``publish`` gets the changes in order; without it contents are not kept."""

    def __init__(
        self,
        host_blocks: int,
        disk_blocks: int,
        on_device: Mapping[int, object],
        publish: Callable[[CacheStored | CacheRemoved], None] | None,
    ) -> None:
        sizes = ((HOST, host_blocks), (DISK, disk_blocks))
        self._sizes = dict(sizes)
        self._tiers: dict[str, OrderedDict[int, None]] = {tier: OrderedDict() for tier, _ in sizes}
        self._on_device = on_device
        self._publish = publish
        #: Of each block that the device or a tier has.
        self._contents: dict[int, Content] = {}

    def blocks(self, tier: str) -> Sequence[int]:
        """The hashes of a tier, least recently used first."""
        return list(self._tiers[tier])

    @property
    def known_blocks(self) -> int:
        """Blocks whose contents are kept: those of the device and of the tiers, each once."""
        return len(self._contents)

    def learn(self, block: int, content: Content) -> None:
        """The device has a block now. Called for each, where changes are published."""
        self._contents[block] = content

    def match(self, hashes: Sequence[int], start: int) -> tuple[int, int]:
        """As `find`, without a change."""
        counts, end = [], len(hashes)
        for held in self._tiers.values():
            begin = start
            while start < end and hashes[start] in held:
                start += 1
            counts.append(start - begin)
        return counts[0], counts[1]

    def find(self, hashes: Sequence[int], start: int) -> tuple[int, int]:
        """Blocks in host memory and on disk with which the prefix goes on behind ``start`` blocks.

        They count as used.
        """
        counts = self.match(hashes, start)
        for held, count in zip(self._tiers.values(), counts, strict=True):
            # As on the device, the end of a prefix is forgotten before its beginning.
            for block in reversed(hashes[start : start + count]):
                held.move_to_end(block)
            start += count
        return counts

    def take(self, evicted: Sequence[int]) -> None:
        """The device evicted these blocks, in this order."""
        for tier, held in self._tiers.items():
            size = self._sizes[tier]
            if not size or not evicted:
                continue
            added = [block for block in evicted if block not in held]
            for block in evicted:
                held[block] = None
                held.move_to_end(block)
            left = [held.popitem(last=False)[0] for _ in range(len(held) - size)]
            if self._publish is not None:
                self._report(self._publish, tier, added, left)
            evicted = left
        if self._publish is not None:
            for block in filterfalse(self._is_cached, evicted):
                del self._contents[block]

    def _is_cached(self, block: int) -> bool:
        return block in self._on_device or any(block in held for held in self._tiers.values())

    def _report(
        self,
        publish: Callable[[CacheStored | CacheRemoved], None],
        tier: str,
        added: Sequence[int],
        left: Sequence[int],
    ) -> None:
        """Publish what a tier got, and what left it; not what only passed it."""
        new = set(added)
        removed = tuple(block for block in left if block not in new)
        if removed:
            publish(CacheRemoved(removed, tier))
        held = self._tiers[tier]
        for run in self._runs([block for block in reversed(added) if block in held]):
            first = self._contents[run[0]]
            tokens = tuple(token for block in run for token in self._contents[block].tokens)
            publish(CacheStored(first.parent, tuple(run), tokens, first.lora, first.salt, tier))

    def clear(self) -> None:
        """Forget everything; no change is published."""
        self._contents.clear()
        for held in self._tiers.values():
            held.clear()

    def _runs(self, blocks: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive blocks of one prompt, together."""
        run: list[int] = []
        for block in blocks:
            if run and self._contents[block].parent != run[-1]:
                yield run
                run = []
            run.append(block)
        if run:
            yield run
