"""Links from a block to the blocks after it.

A child is stored as its local hash: with the parent's sequence hash it gives the child's sequence
hash, and a dump needs the local hash itself. Most blocks have one child, in an int -> int dict.
"""

from collections.abc import Container, Sequence

from router_core.hashing import chain
from router_core.sharded import ShardedDict

_FIRST_LIMIT = 8


class ChildLinks:
    """Children of blocks; a block is its sequence hash, a child its local hash.

    Links to removed blocks stay (finding them would need a link to the parent). `link` removes them
    once their number may have doubled.
    """

    __slots__ = ("branches", "only")

    def __init__(self) -> None:
        self.only = ShardedDict()
        """block -> its only child"""
        self.branches: dict[int, Branch] = {}
        """block -> its children, where there were several; never a block in `only`"""

    def copy(self) -> "ChildLinks":
        """An independent copy."""
        made = ChildLinks()
        made.only = self.only.copy()
        made.branches = {block: Branch(set(b.locals)) for block, b in self.branches.items()}
        return made

    def of(self, block: int) -> Sequence[int]:
        """The children of ``block``, ascending; some may be removed already."""
        local = self.only.find(block)
        if local is not None:
            return (local,)
        branch = self.branches.get(block)
        return () if branch is None else sorted(branch.locals)

    def link(self, parent: int, local: int, blocks: Container[int]) -> None:
        """Make ``local`` a child of ``parent``; ``blocks`` are the existing blocks."""
        branch = self.branches.get(parent)
        if branch is not None:
            branch.locals.add(local)
            if len(branch.locals) > branch.limit:
                branch.locals = {kid for kid in branch.locals if chain(parent, kid) in blocks}
                branch.limit = max(_FIRST_LIMIT, 2 * len(branch.locals))
            return
        first = self.only.find(parent)
        if first is None or first == local or chain(parent, first) not in blocks:
            self.only[parent] = local
        else:
            del self.only[parent]
            self.branches[parent] = Branch({first, local})


class Branch:
    """Children of a block that has several; at the size ``limit`` removed ones are dropped."""

    __slots__ = ("limit", "locals")

    def __init__(self, locals_: set[int]) -> None:
        self.locals = locals_
        self.limit = _FIRST_LIMIT
