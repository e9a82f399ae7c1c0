"""Age, completeness and trust of what is known about each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, Literal

Trust = Literal["exact", "degraded", "none"]
#: How far the index of a rank can be trusted: it has all that the rank caches; it has lost events,
#: or is not read completely yet; the rank does not report what it caches.
TRUST: Final[tuple[Trust, ...]] = ("exact", "degraded", "none")
#: Divisor of the cached blocks of a degraded index under the setting ``discount``.
DISCOUNT: Final = 2


@dataclass(slots=True)
class Freshness:
    """Age and completeness of one rank's data. Times are those passed to ``apply``; None: never.

    ``index_state``: ``current``, ``gapped`` (batches were lost), ``over_limit`` (more blocks than
    the rank can have: its index was dropped and starts again) or ``absent`` (no cache events).
    ``connected``: events can be received now. ``recovering``: what the rank cached before, or while
    the connection was lost, is not read yet.
    """

    index_state: str = "absent"
    index_at: float | None = None
    load_at: float | None = None
    gaps: int = 0
    connected: bool = True
    recovering: bool = False

    @property
    def state(self) -> str:
        """``index_state``, or why it is not to be trusted now: ``disconnected``, ``recovering``."""
        if self.index_state == "absent":
            return self.index_state
        if not self.connected:
            return "disconnected"
        complete = self.index_state == "current"
        return "recovering" if self.recovering and complete else self.index_state

    @property
    def trust(self) -> Trust:
        """How far the rank's index can be trusted: ``exact``, ``degraded`` or ``none``."""
        state = self.state
        return "exact" if state == "current" else "none" if state == "absent" else "degraded"


class FreshnessTable(dict[int, Freshness]):
    """Slot -> freshness. ``degraded`` and ``none`` are the masks of slots with that trust.

    Call :meth:`note` after a change of a row.
    """

    degraded = 0
    none = 0

    def note(self, slot: int) -> None:
        """Update the masks after the slot's row changed or was removed."""
        bit = 1 << slot
        row = self.get(slot)
        trust = "exact" if row is None else row.trust
        self.degraded = self.degraded | bit if trust == "degraded" else self.degraded & ~bit
        self.none = self.none | bit if trust == "none" else self.none & ~bit

    def trusts(self, slots: Sequence[int], mask: int) -> list[int] | None:
        """The trust of each slot as its place in `TRUST`; None where all of ``mask`` are exact."""
        if not (self.degraded | self.none) & mask:
            return None
        degraded, none = self.degraded, self.none
        return [(degraded >> slot & 1) or 2 * (none >> slot & 1) for slot in slots]


def counted_blocks(blocks: Sequence[int], trusts: Sequence[int], rule: str) -> list[int]:
    """What cached blocks count for by the setting ``router_on_degraded``, for each rank."""
    if rule == "full":
        return list(blocks)
    worth = repeat(0) if rule == "load-only" else (count // DISCOUNT for count in blocks)
    return [
        less if trust else count for count, less, trust in zip(blocks, worth, trusts, strict=False)
    ]
