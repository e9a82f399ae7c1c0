"""Topology domains: capacity (`topology show`), plans (`topology plan`), one domain's value."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1
NO_DOMAIN = "(none)"


class RoleCapacity(msgspec.Struct, frozen=True):
    """The workers of one role in a domain.

    ``workers`` = ``ready`` + ``busy`` + ``unavailable``; a worker is busy when all of its
    ranks are over a threshold. All other fields count available workers (ready or busy) only:
    ``kv_used_blocks`` is what ``kv_reporting`` of ``ranks`` ranks report, None where none does;
    ``kv_total_blocks`` is None where no card has it. ``active_prefill_tokens`` and
    ``active_decode_blocks`` are counted by the router.
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


def is_weakened(role: RoleCapacity) -> bool:
    """Whether half of the workers of a role, or more, take no requests."""
    return 0 < role.workers <= 2 * role.unavailable


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
    """Prefill workers without a decode worker to hand over to.

    ``requires``: the taint that a decode worker needs ("it" of ``reason``); None where any decode
    worker is allowed, or where the policy cannot be applied. ``outcome``: what happens to requests.
    """

    workers: list[str]
    requires: str | None
    reason: str
    outcome: str


class DomainCapacity(msgspec.Struct, frozen=True):
    """One model in one value of a domain; ``value`` None: its workers publish no such domain.

    ``decode_per_prefill``: available decode workers for each available prefill worker, None where
    there are none of one. ``unreached``: those of ``workers`` whose engine was never reached; what
    they publish is unknown. ``state``: ok, stranded, crosses (it has no available decode worker,
    and the policy of its prefill workers lets them hand over to other domains), degraded (half of
    the workers of a role, or more, are unavailable), or down (all its workers are unavailable).
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
    unreached: list[str] = []


class TopologyShow(msgspec.Struct, frozen=True):
    """Capacity per value of one domain. ``domain`` is None where no worker publishes one.

    ``domains``: all that the workers publish.
    """

    source: str
    domain: str | None
    domains: list[str] = []
    rows: list[DomainCapacity] = []
    kind: str = "TopologyShow"
    schema: int = SCHEMA


class Patch(msgspec.Struct, frozen=True):
    """A change of replicas. ``command`` applies ``body``.

    ``type``: json (RFC 6902) or merge (RFC 7386).
    """

    graph: str
    type: str
    body: Any
    command: str


class Headroom(msgspec.Struct, frozen=True):
    """Free capacity.

    ``decode_workers``: more than prefill needs at the target ratio, negative where they are
    missing; None without a target. ``kv_blocks`` (decode) and ``batched_tokens`` (prefill) are free
    now; None where cards or reports lack the numbers.
    """

    decode_workers: int | None = None
    kv_blocks: int | None = None
    batched_tokens: int | None = None


class Change(msgspec.Struct, frozen=True):
    """Workers to add; negative: workers that the target fleet does not need."""

    prefill: int = 0
    decode: int = 0


class DomainPlan(msgspec.Struct, frozen=True):
    """One pool in one value of the domain; None: its workers publish no value, or are not pinned.

    ``prefill`` and ``decode`` are certain; up to ``unpinned_prefill`` and ``unpinned_decode`` more
    may be scheduled there. ``stranded_prefill`` has no decode worker to hand over to, no prefill
    worker is allowed to hand over to ``idle_decode``. ``state``: ok, short (less decode than the
    ratio needs), idle, stranded, or unknown (it depends on the scheduler).
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
    """The rest of a pool after a loss. ``what``: nothing, prefill, decode, node or domain.

    ``stranded_prefill``: prefill workers (fractions count) that the remaining decode workers
    cannot carry at the target ratio, or without a ratio: that have no decode worker.
    ``stranded_share``: of the remaining prefill; ``served_share``: of the prefill before the loss,
    what still works; both 0..1.
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
    """A pool whose placement the scheduler decides: stranded prefill workers under ``required``."""

    pool: str
    prefill: int
    decode: int
    at_least: int
    at_most: int


class TopologyPlan(msgspec.Struct, frozen=True):
    """The capacity of a fleet per domain, what losses cost, and what to add.

    ``enforcement``: the policy of the plan; ``in_force``: the current policy (None where unknown);
    both are ``mixed`` where pools or workers differ. ``ratio``: the target, PREFILL:DECODE.
    ``state``: ok, short, unknown or stranded. ``bounds``: of pools whose placement is unknown.
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
    """The value of one topology domain as a worker reads it, and its file."""

    domain: str
    value: str
    path: str
    kind: str = "TopologyValue"
    schema: int = SCHEMA


class CopiedLabel(msgspec.Struct, frozen=True):
    """One label of one pod after a look of `topology sync`.

    ``source`` is the node's label, ``target`` the pod's; ``has`` and ``wants`` their values, empty
    where there is none. ``state``: current, missing, stale, repair, node-lacks-label, unscheduled,
    node-unknown, no-topology, unread or invalid. ``written``: the pod has the node's value now.
    ``problem``: why it could not be written.
    """

    namespace: str
    pod: str
    node: str
    source: str
    target: str
    state: str
    has: str = ""
    wants: str = ""
    written: bool = False
    message: str = ""
    problem: str = ""


class TopologySync(msgspec.Struct, frozen=True):
    """What `topology sync --once` found and did. ``stale``: its policy for labels that differ."""

    source: str
    dry_run: bool
    stale: str
    rows: list[CopiedLabel] = []
    kind: str = "TopologySync"
    schema: int = SCHEMA
