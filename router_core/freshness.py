"""Age, completeness and trust of what is known about each rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice, repeat
from typing import Final, Literal

from router_core.worker_sets import slots_of

Trust = Literal["exact", "degraded", "none", "estimated"]
#: How far the index of a rank can be trusted: it has all that the rank caches; it has lost events,
#: or is not read completely yet; the rank does not report what it caches; it does not either, and
#: what this router sent there counts instead.
TRUST: Final[tuple[Trust, ...]] = ("exact", "degraded", "none", "estimated")
_ESTIMATED: Final = TRUST.index("estimated")
#: Divisor of the cached blocks of a degraded index under the setting ``discount``.
DISCOUNT: Final = 2


@dataclass(slots=True)
class Freshness:
    """Age and completeness of one rank's data. Times are those passed to ``apply``; None: never.

    ``index_state``: ``current``, ``gapped`` (batches were lost), ``over_limit`` (more blocks than
    the rank can have: its index was dropped and starts again), ``absent`` (no cache events) or
    ``estimated`` (no cache events, the index is learned from bookings).
    ``connected``: events can be received now. ``recovering``: what the rank cached before, or while
    the connection was lost, is not read yet. ``unlinked``: the rank stores blocks after one that
    its events do not name (:mod:`router_core.detached`).
    """

    index_state: str = "absent"
    index_at: float | None = None
    load_at: float | None = None
    gaps: int = 0
    connected: bool = True
    recovering: bool = False
    unlinked: bool = False

    @property
    def state(self) -> str:
        """``index_state``, or why it is not to be trusted now: ``disconnected``, ``unlinked`` or
        ``recovering``."""
        if self.index_state in ("absent", "estimated"):
            return self.index_state
        if not self.connected:
            return "disconnected"
        if self.index_state != "current":
            return self.index_state
        if self.unlinked:
            return "unlinked"
        return "recovering" if self.recovering else "current"

    @property
    def trust(self) -> Trust:
        """How far the rank's index can be trusted, one of `TRUST`."""
        return _TRUST_OF.get(self.state, "degraded")


_TRUST_OF: Final[dict[str, Trust]] = {
    "current": "exact",
    "absent": "none",
    "estimated": "estimated",
}


class FreshnessTable(dict[int, Freshness]):
    """Slot -> freshness. ``degraded``, ``none`` and ``estimated`` are the masks of slots with that
    trust; ``unlinked`` of the degraded ones that are so because blocks are missing.

    Call :meth:`note` after a change of a row.
    """

    degraded = 0
    none = 0
    estimated = 0
    unlinked = 0

    def note(self, slot: int) -> None:
        """Update the masks after the slot's row changed or was removed."""
        bit = 1 << slot
        row = self.get(slot)
        trust = "exact" if row is None else row.trust
        unlinked = row is not None and row.unlinked and row.state == "unlinked"
        self.unlinked = self.unlinked | bit if unlinked else self.unlinked & ~bit
        self.degraded = self.degraded | bit if trust == "degraded" else self.degraded & ~bit
        self.none = self.none | bit if trust == "none" else self.none & ~bit
        self.estimated = self.estimated | bit if trust == "estimated" else self.estimated & ~bit

    def trusts(self, slots: Sequence[int], mask: int) -> list[int] | None:
        """The trust of each slot as its place in `TRUST`; None where all of ``mask`` are exact."""
        if not (self.degraded | self.none | self.estimated) & mask:
            return None
        degraded, none, estimated = self.degraded, self.none, self.estimated
        if not mask & ~estimated:
            return [_ESTIMATED] * len(slots)
        column = [0] * len(slots)
        for trust, members in ((1, degraded), (2, none), (_ESTIMATED, estimated)):
            for slot in slots_of(members & mask):
                column[bisect_left(slots, slot)] = trust
        return column

    def counted_trusts(self, trusts: list[int], slots: Sequence[int], mask: int) -> list[int]:
        """The trusts by which cached blocks count. An index that misses blocks has those that it
        names, so they count in full; a doubt states that there can be more."""
        unlinked = self.unlinked & mask
        if not unlinked:
            return trusts
        rated = list(trusts)
        for slot in slots_of(unlinked):
            rated[bisect_left(slots, slot)] = 0
        return rated


def counted_blocks(
    blocks: Sequence[int], trusts: Sequence[int], rule: str, learned: Iterable[int] = repeat(0)
) -> list[int]:
    """What cached blocks count for by the setting ``router_on_degraded``, for each rank.

    ``learned``: the blocks of each rank that this router sent there, which count under the rule
    ``approximate``. Those of an estimated index count in full.
    """
    if rule == "full":
        return list(blocks)
    counted, less = (
        list(blocks),
        list(islice(learned, len(blocks))) if rule == "approximate" else None,
    )
    for at in compress(range(len(counted)), trusts):
        if trusts[at] >= _ESTIMATED:
            continue
        if less is not None:
            counted[at] = less[at]
        else:
            counted[at] = counted[at] // DISCOUNT if rule == "discount" else 0
    return counted
