"""Chains of blocks as runs: the tree of prefixes in columns.

A *run* is a chain of at most `LIMIT` blocks without a gap. Its body is one object of three columns
of u64, in the byte order of the machine: the blocks' sequence hashes, their local hashes,
and the engines' names of them. The columns have room for more blocks than the run has. A block's
*address* is its run and its position there; it never changes. A run starts prompts (`ROOT`) or
continues another one after one of its blocks (its *above*).

**What a slot holds of a run is a beginning of it**, since a worker's blocks are prefix-closed. So
the holders of a run are a mask, or where slots hold different numbers of blocks, steps: a tuple
(end, mask, end, mask, ...), ends ascending, masks shrinking, the last end being the run's. A run
therefore never splits: another continuation after a block in its middle is a run of its own.

The garbage collector visits no run: the columns have bytes, ints and tuples of ints only.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct

from router_core.hashing import U64_FORMAT, chain
from router_core.packed_table import VALUE_BITS, PackedTable
from router_core.sharded import ShardedDict
from router_core.worker_sets import slots_of

POSITION_BITS = 12
LIMIT = 1 << POSITION_BITS
"""Most blocks of a run."""
POSITION = LIMIT - 1
ROOT = 2**64 - 1
"""The above of a run that starts prompts."""
WIDTH = 24
_SAME_MASKS = 4096
# Blocks for which a run that grows gets room at least: an output fills one block at a time.
_ROOM = 4
_BEGINNING = 32
_MOST_RUNS = 1 << VALUE_BITS - POSITION_BITS

u64 = Struct("=Q").unpack_from

Buffer = bytes | memoryview


@lru_cache(maxsize=2048)
def packer(count: int) -> Struct:
    """A Struct of ``count`` u64."""
    return Struct(f"{count}{U64_FORMAT}")


def _pack(hashes: Sequence[int]) -> Buffer:
    """Hashes (u64) as bytes."""
    if isinstance(hashes, array):
        return memoryview(hashes).cast("B")
    return packer(len(hashes)).pack(*hashes)


class Runs:
    """Runs by number; 0 is none."""

    __slots__ = (
        "above",
        "after",
        "before",
        "block_count",
        "bodies",
        "forks",
        "free",
        "holders",
        "kids",
        "lengths",
        "masks",
        "starts",
    )

    def __init__(self) -> None:
        self.bodies: list[bytes | bytearray] = [b""]
        """bytes where a run has no room for more blocks, which are 40 bytes smaller"""
        self.lengths = array("H", (0,))
        """blocks"""
        self.holders: list[int | tuple[int, ...]] = [0]
        self.above = array("Q", (ROOT,))
        """address of the block before the first"""
        self.kids = ShardedDict()
        """address -> the first of the runs that continue after it"""
        self.after = array("I", (0,))
        """the next run with the same above, 0 for the last"""
        self.before = array("I", (0,))
        """the previous one, 0 for the first"""
        self.forks: dict[int, int] = {}
        """run -> its positions in ``kids``, as bits"""
        self.starts = PackedTable()
        """sequence hash of a run's first block -> run"""
        self.free = array("I")
        self.masks: dict[int, int] = {}
        """equal masks as one object"""
        self.block_count = 0

    def copy(self) -> "Runs":
        """An independent copy."""
        made = Runs.__new__(Runs)
        made.bodies, made.lengths = [body[:] for body in self.bodies], self.lengths[:]
        made.holders = self.holders[:]
        made.above, made.after, made.before = self.above[:], self.after[:], self.before[:]
        made.kids, made.forks = self.kids.copy(), self.forks.copy()
        made.starts, made.free = self.starts.copy(), self.free[:]
        made.masks, made.block_count = self.masks.copy(), self.block_count
        return made

    # ---- blocks

    def sequence(self, address: int) -> int:
        """Sequence hash of a block."""
        sequence: int = u64(self.bodies[address >> POSITION_BITS], (address & POSITION) * 8)[0]
        return sequence

    def local(self, address: int) -> int:
        """Local hash of a block."""
        body = self.bodies[address >> POSITION_BITS]
        local: int = u64(body, len(body) // 3 + (address & POSITION) * 8)[0]
        return local

    def start(self, sequence: int, above: int) -> int:
        """The run after ``above`` whose first block has this sequence hash; 0 if there is none."""
        run = self.starts.first(sequence)
        if not run or (self.above[run] == above and u64(self.bodies[run])[0] == sequence):
            return run
        # Another key with the same remainder, or the same block elsewhere: a worker may report a
        # prompt that starts with a block whose hash is that of a longer prefix.
        return self.starts.find(
            sequence,
            lambda run, key: self.above[run] == above and u64(self.bodies[run])[0] == key,
        )

    def kids_from(self, run: int, position: int) -> Iterator[int]:
        """The runs that continue after the block at ``position`` or a later one of ``run``."""
        fork = self.forks.get(run, 0) >> position
        if fork:
            for at in slots_of(fork):
                kid = self.kids[run << POSITION_BITS | position + at]
                while kid:
                    yield kid
                    kid = self.after[kid]

    # ---- holders

    def end(self, run: int, bit: int) -> int:
        """How many blocks of the run the slot of ``bit`` holds."""
        held = self.holders[run]
        if isinstance(held, int):
            return self.lengths[run] if held & bit else 0
        for at in range(len(held) - 1, 0, -2):
            if held[at] & bit:
                return held[at - 1]
        return 0

    def hold(self, run: int, bit: int, end: int) -> int:
        """Let the slot of ``bit`` hold the first ``end`` blocks; returns how many any slot holds.

        If these are fewer than before, the caller cuts the rest.
        """
        held = self.holders[run]
        if isinstance(held, int):
            length = self.lengths[run]
            if end == length:
                self.holders[run] = self._same_object(held | bit)
                return length
            if held == bit:
                return end
            held = (length, held)
        made: list[int] = []
        low, last = 0, -1
        for at in range(0, len(held), 2):
            high, mask = held[at], held[at + 1]
            if low < end:
                joined = mask | bit
                upto = high if high <= end else end
                if joined == last:
                    made[-2] = upto
                else:
                    last = self._same_object(joined)
                    made += (upto, last)
            if high > end:
                left = mask & ~bit
                if left == last:
                    made[-2] = high
                elif left:
                    last = self._same_object(left)
                    made += (high, last)
            low = high
        if not made:
            return 0
        self.holders[run] = made[1] if len(made) == 2 else tuple(made)
        return made[-2]

    def _same_object(self, mask: int) -> int:
        """The one object for masks of this value."""
        if len(self.masks) > _SAME_MASKS:
            self.masks.clear()
        return self.masks.setdefault(mask, mask)

    # ---- changes

    def next_number(self) -> int:
        """The number of the next new run; raises OverflowError where there can be no more."""
        if self.free:
            return self.free[-1]
        if len(self.bodies) == _MOST_RUNS:
            raise OverflowError(f"the prefix index has {_MOST_RUNS:,} runs of blocks; no more fit")
        return len(self.bodies)

    def create(self, run: int, above: int, body: bytes, bit: int) -> None:
        """Add a run, by its `next_number`, whose blocks the slot of ``bit`` alone holds."""
        bit, count = self._same_object(bit), len(body) // WIDTH
        if self.free:
            self.free.pop()
            self.bodies[run], self.holders[run], self.above[run] = body, bit, above
            self.lengths[run] = count
        else:
            self.bodies.append(body)
            self.lengths.append(count)
            self.holders.append(bit)
            self.above.append(above)
            self.after.append(0)
            self.before.append(0)
        self.starts.add(u64(body)[0], run)
        self.block_count += count
        if above != ROOT:
            first = self.kids.find(above)
            if first is None:
                parent = above >> POSITION_BITS
                self.forks[parent] = self.forks.get(parent, 0) | 1 << (above & POSITION)
            else:
                self.after[run] = first
                self.before[first] = run
            self.kids[above] = run

    def extend(self, run: int, sequences: bytes, locals_: bytes, names: bytes, bit: int) -> None:
        """Add blocks at the end of a run, which the slot of ``bit`` holds to its end."""
        end = self.lengths[run]
        length = end + len(sequences) // 8
        if length * WIDTH > len(self.bodies[run]):
            self._resize(run, min(LIMIT, length + max(_ROOM, length >> 3)))
        body = self.writable(run)
        size = len(body) // 3
        first, last = 8 * end, 8 * length
        body[first:last] = sequences
        body[size + first : size + last] = locals_
        body[2 * size + first : 2 * size + last] = names
        self.lengths[run] = length
        self.block_count += length - end
        held = self.holders[run]
        if held == bit:
            return
        if isinstance(held, int):
            held = (end, held)
        if held[-1] == bit:
            held = held[:-2]
        self.holders[run] = (*held, length, self._same_object(bit))

    def cut(self, run: int, end: int) -> None:
        """Keep the first ``end`` blocks of a run; no run continues after a later one."""
        self.block_count -= self.lengths[run] - end
        self.lengths[run] = end
        if end:
            if 2 * WIDTH * end < len(self.bodies[run]):
                self._resize(run, end)
            return
        self.starts.remove(u64(self.bodies[run])[0], run)
        self.bodies[run], self.holders[run] = self.bodies[0], 0
        above = self.above[run]
        if above != ROOT:
            before, after = self.before[run], self.after[run]
            if after:
                self.before[after] = before
            if before:
                self.after[before] = after
            elif after:
                self.kids[above] = after
            else:
                del self.kids[above]
                parent = above >> POSITION_BITS
                left = self.forks[parent] ^ 1 << (above & POSITION)
                if left:
                    self.forks[parent] = left
                else:
                    del self.forks[parent]
            self.after[run] = self.before[run] = 0
        self.free.append(run)

    def writable(self, run: int) -> bytearray:
        """The body of a run, to change it in place."""
        body = self.bodies[run]
        if not isinstance(body, bytearray):
            body = self.bodies[run] = bytearray(body)
        return body

    def _resize(self, run: int, room: int) -> None:
        """Give the columns of a run room for so many blocks."""
        old = memoryview(self.bodies[run])
        size, used = len(old) // 3, 8 * self.lengths[run]
        body = bytearray(WIDTH * room)
        for column in range(3):
            start = 8 * room * column
            body[start : start + used] = old[size * column : size * column + used]
        self.bodies[run] = body

    # ---- matching

    def path(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The runs along a prompt, given by its sequence hashes, and how many blocks match."""
        kids = self.kids.shards
        shards = len(kids)
        total, at, above = len(hashes), 0, ROOT
        while run := self.start(hashes[at], above):
            same = min(self.lengths[run], total - at)
            if u64(self.bodies[run], 8 * same - 8)[0] != hashes[at + same - 1]:
                same = self._equal(run, hashes, at, same - 1)
            yield run, same
            at += same
            above = run << POSITION_BITS | same - 1
            if at == total or above not in kids[above % shards]:
                return

    def _path_of_locals(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """As `path`, of a prompt given by its local hashes. They are chained only where another run
        may continue."""
        kids = self.kids.shards
        shards = len(kids)
        total, at, above, sequence = len(hashes), 0, ROOT, hashes[0]
        # Packing is most of the cost, so it waits until a beginning of the prompt is held.
        data = _pack(hashes[:_BEGINNING])
        while run := self.start(sequence, above):
            # The first block is the same, since its sequence hash is.
            same = self.equal_locals(run, 0, data, at) or 1
            if (at + same) * 8 == len(data) and at + same < total:
                data = _pack(hashes)
                same = self.equal_locals(run, 0, data, at)
            yield run, same
            at += same
            above = run << POSITION_BITS | same - 1
            if at == total or above not in kids[above % shards]:
                return
            sequence = chain(u64(self.bodies[run], 8 * same - 8)[0], hashes[at])

    def _equal(self, run: int, hashes: Sequence[int], at: int, end: int) -> int:
        """How many blocks continue the prompt from ``at`` on: the first does, that at ``end`` not.

        An equal sequence hash means that all blocks before are equal.
        """
        body, low = self.bodies[run], 1
        while low < end:
            middle = (low + end) >> 1
            if u64(body, 8 * middle)[0] == hashes[at + middle]:
                low = middle + 1
            else:
                end = middle
        return low

    def equal_locals(self, run: int, first: int, data: Buffer, at: int) -> int:
        """How many local hashes of a run from ``first`` on equal those in ``data`` from ``at``.

        ``data`` has them as bytes, ``first`` and ``at`` are numbers of blocks.
        """
        body = self.bodies[run]
        start = len(body) // 3 + 8 * first
        size = min(8 * (self.lengths[run] - first), len(data) - 8 * at)
        theirs = data[8 * at : 8 * at + size] if at or size < len(data) else data
        if body.startswith(theirs, start):
            return size // 8
        low, high = 0, size // 8
        while high - low > 1:
            middle = (low + high) >> 1
            if body.startswith(theirs[8 * low : 8 * middle], start + 8 * low):
                low = middle
            else:
                high = middle
        return low if low else int(body.startswith(theirs[:8], start))

    def equal_names(self, run: int, first: int, data: bytes) -> bool:
        """Whether the names of a run from ``first`` on are those in ``data``."""
        body = self.bodies[run]
        return body.startswith(data, len(body) // 3 * 2 + 8 * first)

    def levels(self, hashes: Sequence[int], live: int) -> tuple[tuple[int, int], ...]:
        """(depth, slots of ``live`` that hold exactly this much of a prompt), deepest first.

        ``hashes``: the prompt's sequence hashes, at least one.
        """
        levels: list[tuple[int, int]] = []
        lengths, kids = self.lengths, self.kids.shards
        shards = len(kids)
        total, at, above = len(hashes), 0, ROOT
        # Along the path as in `path`, without the cost of a generator: each decision does this.
        while run := self.start(hashes[at], above):
            same = lengths[run]
            if same > total - at:
                same = total - at
            if u64(self.bodies[run], 8 * same - 8)[0] != hashes[at + same - 1]:
                same = self._equal(run, hashes, at, same - 1)
            held = self.holders[run]
            if isinstance(held, int):
                left = live & held
                if at and left != live:
                    levels.append((at, live ^ left))
                live = left
            else:
                live = _add_levels(levels, held, live, at, same)
            at += same
            if not live or at == total:
                break
            above = run << POSITION_BITS | same - 1
            if above not in kids[above % shards]:
                break
        return _deepest_first(levels, at, live)

    def levels_of_locals(self, hashes: Sequence[int], live: int) -> tuple[tuple[int, int], ...]:
        """`levels` of a prompt that is given by its local hashes, at least one."""
        levels: list[tuple[int, int]] = []
        at = 0
        for run, same in self._path_of_locals(hashes):
            held = self.holders[run]
            steps = (same, held) if isinstance(held, int) else held
            live = _add_levels(levels, steps, live, at, same)
            at += same
            if not live:
                break
        return _deepest_first(levels, at, live)


def _deepest_first(
    levels: list[tuple[int, int]], at: int, live: int
) -> tuple[tuple[int, int], ...]:
    """The levels in the order of `Overlaps`, with the slots that hold all up to ``at``."""
    if live and at:
        levels.append((at, live))
    levels.reverse()
    return tuple(levels)


def _add_levels(
    levels: list[tuple[int, int]], steps: Sequence[int], live: int, at: int, same: int
) -> int:
    """Add the levels at which slots of ``live`` leave a run, and return the slots that remain.

    ``steps``: the holders of the run, which continues the prompt with ``same`` blocks from ``at``.
    """
    depth = at
    for step in range(1, len(steps), 2):
        left = live & steps[step]
        if depth and left != live:
            levels.append((depth, live ^ left))
        live = left
        if steps[step - 1] >= same or not live:
            break
        depth = at + steps[step - 1]
    return live
