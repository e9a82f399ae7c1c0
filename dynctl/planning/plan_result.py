"""What `topology plan` answers: a contract that other tools read as JSON."""

from __future__ import annotations

import msgspec

from dynctl.planning.patches import Patch

SCHEMA = 1


class Headroom(msgspec.Struct, frozen=True):
    """What is left. ``decode_workers``: beyond what prefill needs at the target ratio, negative
    where so many are missing; None without a target. ``kv_blocks`` (decode) and ``batched_tokens``
    (prefill) are free now; None where cards and reports do not tell."""

    decode_workers: int | None = None
    kv_blocks: int | None = None
    batched_tokens: int | None = None


class Change(msgspec.Struct, frozen=True):
    """Workers to add (negative: more than the target fleet wants)."""

    prefill: int = 0
    decode: int = 0


class DomainPlan(msgspec.Struct, frozen=True):
    """One pool in one value; None: its workers publish no value, or nothing says where they go.

    ``prefill`` and ``decode`` are certain; up to ``unpinned_prefill`` and ``unpinned_decode`` more
    may be scheduled there. ``stranded_prefill`` has no decode worker to hand over to, no prefill
    worker may hand over to ``idle_decode``. ``state``: ok, short (less decode than the ratio
    wants), idle, stranded, or unknown (it depends on the scheduler).
    """

    pool: str
    value: str | None
    enforcement: str
    prefill: int
    decode: int
    unpinned_prefill: int
    unpinned_decode: int
    decode_per_prefill: float | None
    headroom: Headroom
    stranded_prefill: int
    idle_decode: int
    state: str
    add: Change


class Loss(msgspec.Struct, frozen=True):
    """What is left of a pool after a loss. ``what``: nothing, prefill, decode, node or domain.

    ``stranded_prefill``: prefill workers, or parts of one, that the decode which is left cannot
    carry (at the target ratio; without one: that have none). ``stranded_share`` is that of
    the prefill left, ``served_share`` what still works of the prefill before; both 0..1.
    """

    what: str
    pool: str
    value: str | None
    node: str | None
    prefill_left: int
    decode_left: int
    stranded_prefill: float
    stranded_share: float
    served_share: float


class StrandedBounds(msgspec.Struct, frozen=True):
    """A pool whose placement the manifests leave to the scheduler, under ``required``."""

    pool: str
    prefill: int
    decode: int
    at_least: int
    at_most: int


class TopologyPlan(msgspec.Struct, frozen=True):
    """``enforcement`` is what was judged under, ``in_force`` what holds now (None where not known);
    both are ``mixed`` where pools or workers differ. ``ratio``: the target, PREFILL:DECODE.
    ``state``: ok, short, unknown or stranded. ``bounds`` is there where placement is not known.
    ``patches`` make the changes of ``add``.
    """

    source: str
    domain: str
    enforcement: str
    in_force: str | None
    ratio: str | None
    prefill: int
    decode: int
    state: str
    rows: list[DomainPlan] = []
    losses: list[Loss] = []
    bounds: list[StrandedBounds] = []
    patches: list[Patch] = []
    warnings: list[str] = []
    notes: list[str] = []
    kind: str = "TopologyPlan"
    schema: int = SCHEMA
