"""Documents about topology domains: capacity, plans, and the value of one domain."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1
NO_DOMAIN = "(none)"


class RoleCapacity(msgspec.Struct, frozen=True):
    """The workers of one role in a domain.

    ``workers`` = ``ready`` + ``busy`` + ``unavailable``; busy are those whose every rank is over a
    threshold. ``kv_used_blocks`` is what ``kv_reporting`` of ``ranks`` ranks report, None where
    none does; ``kv_total_blocks`` is None where no card tells. ``active_prefill_tokens`` and
    ``active_decode_blocks`` are the router's own count.
    """

    workers: int = 0
    ready: int = 0
    busy: int = 0
    unavailable: int = 0
    ranks: int = 0
    kv_reporting: int = 0
    kv_used_blocks: int | None = None
    kv_total_blocks: int | None = None
    active_prefill_tokens: int = 0
    active_decode_blocks: float = 0


class TransferPolicy(msgspec.Struct, frozen=True):
    """A KV-transfer policy in force for ``workers`` (prefill, by name).

    ``enforcement``: required, preferred, fallback; None where there is no policy. ``origin``:
    ``card`` (the worker's own), ``router``, or None. ``problem``: why it cannot be applied.
    """

    workers: list[str]
    enforcement: str | None = None
    domain: str | None = None
    weight: float | None = None
    origin: str | None = None
    problem: str | None = None


class Stranded(msgspec.Struct, frozen=True):
    """Prefill workers that have nobody to hand over to.

    ``requires``: the taint that a decode worker needs ("it" of ``reason``); None where any would
    do, or where the policy itself cannot be applied. ``outcome``: what happens to requests.
    """

    workers: list[str]
    requires: str | None
    reason: str
    outcome: str


class DomainCapacity(msgspec.Struct, frozen=True):
    """One model in one value of a domain; ``value`` None: its workers publish no such domain.

    ``decode_per_prefill``: available decode workers for each available prefill worker, None where
    there are none of one. ``state``: ok or stranded.
    """

    model: str
    value: str | None
    prefill: RoleCapacity
    decode: RoleCapacity
    aggregated: RoleCapacity
    decode_per_prefill: float | None
    policies: list[TransferPolicy]
    stranded: list[Stranded]
    state: str
    workers: list[str]


class TopologyShow(msgspec.Struct, frozen=True):
    """``domain`` is what the rows are by, None where no worker publishes any."""

    source: str
    domain: str | None
    domains: list[str] = []
    rows: list[DomainCapacity] = []
    kind: str = "TopologyShow"
    schema: int = SCHEMA


class Patch(msgspec.Struct, frozen=True):
    """``type``: json (RFC 6902) or merge (RFC 7386); ``command`` applies ``body``."""

    graph: str
    type: str
    body: Any
    command: str


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


class TopologyValue(msgspec.Struct, frozen=True):
    """What a worker would read for one topology domain, and the file it stands in."""

    domain: str
    value: str
    path: str
    kind: str = "TopologyValue"
    schema: int = SCHEMA
