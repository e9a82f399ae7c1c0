"""The arithmetic of capacity in topology domains: possible hand-offs, and missing workers.

A *pool* is a group of workers that share requests (one model, or one DynamoGraphDeployment); a
*cell* is the part of a pool in one value of the domain. The enforcement decides where the decode
hop may run:

============ ======================================================================
required     only to the prefill worker's own value; without a value it is refused
fallback     as required where the value has decode, else anywhere in the pool
preferred    anywhere in the pool
none         anywhere in the pool
============ ======================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations
from math import ceil, floor, gcd

from dynctl.base.errors import UsageProblem

ENFORCEMENTS = ("required", "preferred", "fallback", "none")
#: Larger counts of workers are taken as typing errors.
MAX_WORKERS = 1_000_000
#: Up to this many places without decode every placement is tried; with more, a bound is computed.
_EXACT_PLACES = 10


@dataclass(frozen=True, slots=True)
class Ratio:
    """The target: ``decode`` decode workers for ``prefill`` prefill workers; both > 0."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Ratio:
        """``1:2`` is two decode workers a prefill worker; raises UsageProblem."""
        left, colon, right = text.partition(":")
        if not (colon and left.strip().isdecimal() and right.strip().isdecimal()):
            raise UsageProblem(f"--ratio {text}: expected PREFILL:DECODE, for example 1:2")
        ratio = cls(int(left[:9]), int(right[:9]))
        if not (0 < ratio.prefill <= MAX_WORKERS and 0 < ratio.decode <= MAX_WORKERS):
            raise UsageProblem(f"--ratio {text}: both sides must be from 1 to {MAX_WORKERS:,}")
        return ratio.reduced()

    def reduced(self) -> Ratio:
        common = gcd(self.prefill, self.decode)
        return Ratio(self.prefill // common, self.decode // common)

    def decode_for(self, prefill: int) -> int:
        """Decode workers that ``prefill`` prefill workers need."""
        return ceil(Fraction(prefill * self.decode, self.prefill))

    def carried_by(self, decode: int) -> Fraction:
        """Prefill workers whose requests ``decode`` decode workers carry."""
        return Fraction(decode * self.prefill, self.decode)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class NodeWorkers:
    """The workers of one cell on one node."""

    name: str
    prefill: int = 0
    decode: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """The workers of a pool in one value of the domain; ``value`` None: they publish none.

    ``kv_blocks_free`` (decode) and ``batched_tokens_free`` (prefill: free tokens in one forward
    pass of all workers) are None where cards or reports lack the numbers.
    """

    pool: str
    value: str | None
    prefill: int = 0
    decode: int = 0
    kv_blocks_free: int | None = None
    batched_tokens_free: int | None = None
    nodes: tuple[NodeWorkers, ...] = ()


@dataclass(frozen=True, slots=True)
class Floating:
    """Workers of one role that are not pinned to one value: the scheduler places them.

    ``allowed`` None: every value but those ``excluded``.
    """

    pool: str
    role: str
    workers: int
    allowed: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()

    def may_land_in(self, value: str) -> bool:
        return value not in self.excluded and (self.allowed is None or value in self.allowed)


# -- workers without a partner ---------------------------------------------------------------------


def stranded_prefill(cells: Sequence[Cell], enforcement: str) -> list[int]:
    """For each cell, the prefill workers without a decode worker to hand over to."""
    total = _decode_of_pools(cells)
    return [
        0 if _has_decode(cell, total[cell.pool], enforcement) else cell.prefill for cell in cells
    ]


def idle_decode(cells: Sequence[Cell], enforcement: str) -> list[int]:
    """For each cell, the decode workers that no prefill worker may hand over to."""
    total: dict[str, int] = defaultdict(int)
    roaming: dict[str, int] = defaultdict(int)
    pool_decode = _decode_of_pools(cells)
    for cell in cells:
        total[cell.pool] += cell.prefill
        if not cell.decode and pool_decode[cell.pool]:
            roaming[cell.pool] += cell.prefill
    idle = []
    for cell in cells:
        if enforcement == "required":
            givers = 0 if cell.value is None else cell.prefill
        elif enforcement == "fallback":
            givers = (0 if cell.value is None else cell.prefill) + roaming[cell.pool]
        else:
            givers = total[cell.pool]
        idle.append(0 if givers else cell.decode)
    return idle


def uncarried_prefill(cells: Sequence[Cell], enforcement: str, ratio: Ratio | None) -> Fraction:
    """Prefill capacity, in workers, that the decode workers cannot carry at the target ratio.

    Without a ratio: the workers without any decode worker. Under ``fallback``, requests that fall
    back run on any decode worker and are not counted.
    """
    if ratio is None:
        return Fraction(sum(stranded_prefill(cells, enforcement)))
    if enforcement in ("required", "fallback"):
        lacking = stranded_prefill(cells, enforcement)
        return sum(
            (
                _prefill_beyond(cell, ratio)
                if cell.decode and cell.value is not None
                else Fraction(none)
                for cell, none in zip(cells, lacking, strict=True)
            ),
            Fraction(),
        )
    pools: dict[str, tuple[int, int]] = {}
    for cell in cells:
        prefill, decode = pools.get(cell.pool, (0, 0))
        pools[cell.pool] = (prefill + cell.prefill, decode + cell.decode)
    return sum((max(Fraction(), p - ratio.carried_by(d)) for p, d in pools.values()), Fraction())


def uncarried_after(
    cells: Sequence[Cell], lost: Cell, enforcement: str, ratio: Ratio | None, before: Fraction
) -> Fraction:
    """:func:`uncarried_prefill` without the workers ``lost``; ``before``: with them.

    ``cells`` are one pool. Where a loss changes one cell only, the others are not computed again.
    """
    fallback = enforcement == "fallback" and sum(cell.decode for cell in cells) > lost.decode
    if enforcement == "required" or fallback:
        hit = [cell for cell in cells if cell.value == lost.value]
        if fallback:
            # A cell without decode workers falls back to this one.
            hit.append(Cell(lost.pool, "(elsewhere)", decode=1))
        after = uncarried_prefill(subtract(hit, lost), enforcement, ratio)
        return before - uncarried_prefill(hit, enforcement, ratio) + after
    return uncarried_prefill(subtract(cells, lost), enforcement, ratio)


def _prefill_beyond(cell: Cell, ratio: Ratio) -> Fraction:
    return max(Fraction(), cell.prefill - ratio.carried_by(cell.decode))


def _decode_of_pools(cells: Iterable[Cell]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for cell in cells:
        total[cell.pool] += cell.decode
    return total


def _has_decode(cell: Cell, pool_decode: int, enforcement: str) -> bool:
    if enforcement == "required":
        return cell.value is not None and cell.decode > 0
    return pool_decode > 0


# -- what to add -----------------------------------------------------------------------------------


def additions(prefill: int, decode: int, ratio: Ratio) -> tuple[int, int]:
    """The fewest (prefill, decode) workers to add to reach the ratio.

    The ratio is reached when decode carries all prefill and cannot carry one more prefill worker.
    Decode is raised to what prefill needs; spare decode, from rounding or from before, is filled
    with prefill. No role is reduced.
    """
    wanted = max(decode, ratio.decode_for(prefill))
    return floor(ratio.carried_by(wanted)) - prefill, wanted - decode


def headroom(cell: Cell, ratio: Ratio) -> int:
    """Decode workers more than prefill needs at the ratio; negative: missing decode workers."""
    return cell.decode - ratio.decode_for(cell.prefill)


def even_split(prefill: int, decode: int, values: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Split a fleet over ``values``: prefill evenly (the first values get the rest), decode in
    proportion to prefill; the largest remainders get one more decode worker.
    """
    share, rest = divmod(prefill, len(values))
    given = [share + (i < rest) for i in range(len(values))]
    weights = given if prefill else [1] * len(values)
    exact = [Fraction(decode * weight, sum(weights)) for weight in weights]
    whole = [floor(part) for part in exact]
    by_remainder = sorted(range(len(values)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: decode - sum(whole)]:
        whole[i] += 1
    return {value: (given[i], whole[i]) for i, value in enumerate(values)}


# -- loss ------------------------------------------------------------------------------------------


def subtract(cells: Sequence[Cell], lost: Cell) -> list[Cell]:
    """The cells without the workers of ``lost``; ``lost`` must be part of one cell."""
    return [_changed_cell(cell, lost, -1) for cell in cells]


def restore(cells: Sequence[Cell], lost: Cell) -> list[Cell]:
    """The reverse of :func:`subtract`."""
    return [_changed_cell(cell, lost, 1) for cell in cells]


def _changed_cell(cell: Cell, part: Cell, sign: int) -> Cell:
    if (cell.pool, cell.value) != (part.pool, part.value):
        return cell
    return replace(
        cell,
        prefill=cell.prefill + sign * part.prefill,
        decode=cell.decode + sign * part.decode,
    )


# -- where placement is unknown --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """Prefill workers stranded under ``required``: at least ``best``, at most ``worst``."""

    best: int
    worst: int


def stranded_bounds(cells: Sequence[Cell], floating: Sequence[Floating], *, closed: bool) -> Bounds:
    """The bounds over all placements of ``floating`` in the cells of one pool, under ``required``.

    ``closed``: the domain has no other values than those of the cells.
    """
    places = [cell for cell in cells if cell.value is not None]
    refused = sum(cell.prefill for cell in cells if cell.value is None)
    prefill = [group for group in floating if group.role == "prefill"]
    decode = [group for group in floating if group.role == "decode"]
    best = _at_least(places, prefill, decode, closed)
    worst = _at_most(places, prefill, decode, closed)
    return Bounds(refused + best, refused + worst)


def _at_least(
    places: Sequence[Cell], prefill: Sequence[Floating], decode: Sequence[Floating], closed: bool
) -> int:
    """The best placement: each decode worker serves one more place, the fullest first."""

    def reached(value: str) -> bool:
        return any(group.may_land_in(value) and group.workers for group in decode)

    lacking = [cell for cell in places if cell.prefill and not cell.decode]
    hopeless = sum(cell.prefill for cell in lacking if not reached(str(cell.value)))
    open_ = sorted((c.prefill for c in lacking if reached(str(c.value))), reverse=True)
    hopeless += sum(open_[sum(group.workers for group in decode) :])
    anywhere = not closed and any(group.allowed is None and group.workers for group in decode)
    for group in prefill:
        fits = any(
            (cell.decode or reached(str(cell.value))) and group.may_land_in(str(cell.value))
            for cell in places
        )
        if not fits and not (anywhere and group.allowed is None):
            hopeless += group.workers
    return hopeless


def _at_most(
    places: Sequence[Cell], prefill: Sequence[Floating], decode: Sequence[Floating], closed: bool
) -> int:
    """The worst placement: the most prefill in places without decode.

    A set of places can be without decode when none has pinned decode and all floating decode fits
    into other places.
    """
    empty = [str(cell.value) for cell in places if not cell.decode]
    full = [str(cell.value) for cell in places if cell.decode]
    pinned = {str(cell.value): cell.prefill for cell in places}
    groups = [group for group in decode if group.workers]
    elsewhere = not closed

    def without_decode(chosen: Sequence[str]) -> bool:
        rest = [*full, *(value for value in empty if value not in chosen)]
        return all(
            (elsewhere and group.allowed is None) or any(map(group.may_land_in, rest))
            for group in groups
        )

    def prefill_in(chosen: Sequence[str]) -> int:
        return sum(pinned[value] for value in chosen) + sum(
            group.workers
            for group in prefill
            if any(map(group.may_land_in, chosen)) or (elsewhere and group.allowed is None)
        )

    if len(empty) > _EXACT_PLACES:
        return prefill_in(empty)
    sets = chain.from_iterable(combinations(empty, n) for n in range(len(empty) + 1))
    return max((prefill_in(chosen) for chosen in sets if without_decode(chosen)), default=0)
