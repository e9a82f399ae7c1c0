"""KV cache groups of hybrid models: what sliding windows leave of a cached prefix.

An engine whose layers differ (full attention, sliding windows) caches each group of layers by
itself. A prefix can be reused up to a block if the full attention holds all of it and every sliding
group holds the last blocks before that point, as many as its window reaches back.

One group with full attention is the *main* group; `BlockOwnership` has its blocks. Of every other
group only the engine's names of its blocks are kept here: an engine names a block by its prefix, so
a name is the same in all groups, and the main group has the name of every block of a prefix that
can be reused at all. A group's blocks may span several of the main group's; such a block has the
name of the last of them. Source: vLLM 0.32, `HybridKVCacheCoordinator.find_longest_cache_hit`.
"""

from collections.abc import MutableMapping, Sequence
from math import lcm
from typing import Any, Final

from router_core.forms import BLOCK_NAME, COUNT, COUNT_MAX, Each, Fields, Maybe, Row, Whole
from router_core.sharded import ShardedDict, shards_of

CACHE_GROUPS: Final = Fields(
    {
        "main": Maybe(COUNT),
        "groups": Each(
            Fields(
                {
                    "group": COUNT,
                    "span": Whole(1, COUNT_MAX),
                    "needed": Maybe(COUNT),
                    "names": Each(Row(BLOCK_NAME, Whole(1, COUNT_MAX))),
                }
            ),
            1024,
        ),
    }
)
"""What `CacheGroups.dump` writes."""


class CacheGroup:
    """The blocks of one group beside the main one, by the engine's names.

    ``span``: blocks of the main group in one of this group. ``needed``: blocks (of this group) that
    must be held before the point of reuse; None: all from the prompt's start.
    """

    __slots__ = ("held", "needed", "span")

    def __init__(self, span: int, needed: int | None) -> None:
        self.span = span
        self.needed = needed
        self.held = ShardedDict()
        """name -> copies of the block"""

    def usable(self, names: Sequence[int], shards: Sequence[int], depth: int) -> int:
        """The deepest point of reuse, at most ``depth`` (both in main blocks).

        ``names``: of the main blocks from the prompt's start, -1 for one without a name;
        ``shards``: theirs.
        """
        span = self.span
        end = depth // span
        while end:
            start = 0 if self.needed is None else max(0, end - self.needed)
            window = slice((start + 1) * span - 1, end * span, span)
            copies = self.held.find_many(names[window], shards[window])
            if None not in copies:
                return end * span
            # A point of reuse from the last missing block on would need that block too.
            end -= copies[::-1].index(None) + 1
        return 0


def remove_copy(counts: MutableMapping[int, int], name: int) -> int | None:
    """Remove one copy of a block; returns the copies that are left, None if there was none."""
    count = counts.pop(name, None)
    if count is None:
        return None
    if count > 1:
        counts[name] = count - 1
    return count - 1


class CacheGroups:
    """The groups of one slot. ``main`` is the index of the main group, None until it is known."""

    __slots__ = ("groups", "main")

    def __init__(self, main: int | None) -> None:
        self.main = main
        self.groups: dict[int, CacheGroup] = {}

    def store(
        self, group: int, names: Sequence[int], span: int = 1, needed: int | None = None
    ) -> int:
        """Add blocks; returns how many are new."""
        known = self.groups.get(group)
        if known is None:
            known = self.groups[group] = CacheGroup(span, needed)
        held, shards = known.held, shards_of(names)
        copies = held.find_many(names, shards)
        held.set_many(names, [1 if count is None else count + 1 for count in copies], shards)
        return copies.count(None)

    def remove(self, group: int, names: Sequence[int]) -> int:
        """Remove one copy of each block; returns how many blocks have none left."""
        known = self.groups.get(group)
        return 0 if known is None else sum(remove_copy(known.held, name) == 0 for name in names)

    def usable(self, names: Sequence[int], shards: Sequence[int], depth: int) -> int:
        """The deepest point of reuse that all groups allow; arguments as of `CacheGroup.usable`."""
        groups = self.groups.values()
        if not groups:
            return depth
        step = lcm(*(group.span for group in groups))
        depth -= depth % step
        while depth:
            least = min(group.usable(names, shards, depth) for group in groups)
            least -= least % step
            if least == depth:
                return depth
            depth = least
        return 0

    @property
    def block_count(self) -> int:
        """Blocks of all groups but the main one."""
        return sum(len(group.held) for group in self.groups.values())

    def copy(self) -> "CacheGroups":
        """An independent copy."""
        made = CacheGroups(self.main)
        for index, group in self.groups.items():
            made.groups[index] = CacheGroup(group.span, group.needed)
            made.groups[index].held = group.held.copy()
        return made

    def dump(self) -> dict[str, Any]:
        """The groups as plain data; see `restore`."""
        return {
            "main": self.main,
            "groups": [
                {
                    "group": index,
                    "span": group.span,
                    "needed": group.needed,
                    "names": [*group.held.items()],
                }
                for index, group in self.groups.items()
            ],
        }

    @classmethod
    def restore(cls, dump: dict[str, Any]) -> "CacheGroups":
        """The groups of a `dump`, which has the form `CACHE_GROUPS`."""
        made = cls(dump["main"])
        for row in dump["groups"]:
            restored = made.groups[row["group"]] = CacheGroup(row["span"], row["needed"])
            restored.held.update(row["names"])
        return made
