"""Derive the constraints of the decode hop from the chosen prefill worker.

The policy is the prefill worker's own if it publishes one, else the router's. The cases are
those of Dynamo's prefill router, in its order; the router's own policy adds ``fallback``.

============================================== =====================================
the chosen prefill worker ...                  the decode hop
============================================== =====================================
is unknown, a sibling is ``required``          refused (PolicyUnderivable)
is unknown, no sibling is ``required``         unconstrained
has no policy, the router has none             unconstrained
has a transfer domain but no value for it      refused
is ``preferred`` without a weight              refused
is ``required``                                requires its domain's taint
is ``preferred``                               prefers it, with the policy's weight
has no policy, the router's is ``fallback``    requires it; unconstrained without such
============================================== =====================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from router_core.config import RouterConfig
from router_core.errors import PolicyUnderivable
from router_core.registry import WorkerRegistry
from router_core.taints import TaintConstraint, canonical_taint
from router_core.transfer import Place, TransferTable
from router_core.workers import Role, Worker


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """The router's own KV-transfer policy, for prefill workers that publish none."""

    domain: str
    enforcement: str
    weight: float | None = None

    @classmethod
    def of_config(cls, config: RouterConfig) -> RouterPolicy | None:
        if config.kv_transfer_domain is None:
            return None
        return cls(
            config.kv_transfer_domain,
            config.kv_transfer_enforcement,
            config.kv_transfer_preferred_weight,
        )


@dataclass(frozen=True, slots=True)
class ImpliedConstraints:
    """Constraints of the decode hop. ``relaxable``: dropped if no decode worker satisfies them.
    ``note``: why a policy implies none."""

    constraints: tuple[TaintConstraint, ...] = ()
    relaxable: bool = False
    note: str = field(default="", compare=False)


UNCONSTRAINED = ImpliedConstraints()


def implied_constraints(
    worker: Worker | None, siblings: Iterable[Worker], policy: RouterPolicy | None
) -> ImpliedConstraints:
    """The decode constraint that the chosen prefill ``worker`` implies.

    ``siblings`` are the prefill workers of the model. Raises PolicyUnderivable, whose message
    names the worker and the domain.
    """
    if worker is None:
        for sibling in siblings:
            if sibling.runtime_config.kv_transfer_enforcement == "required":
                raise PolicyUnderivable(
                    "the chosen prefill worker publishes no configuration while worker "
                    f"{sibling.name} of its pool requires same-domain KV transfer"
                )
        return UNCONSTRAINED
    config = worker.runtime_config
    if config.kv_transfer_domain is None:
        return _implied_by_router(worker, policy)
    domain, value = (
        config.kv_transfer_domain,
        config.topology_domains.get(config.kv_transfer_domain),
    )
    origin = f"kv-transfer policy of worker {worker.name}"
    if value is None:
        raise PolicyUnderivable(
            f"prefill worker {worker.name} configured kv_transfer_domain={domain!r}, but its "
            "topology_domains do not contain that domain; restart it when its topology file exists"
        )
    enforcement = config.kv_transfer_enforcement
    if enforcement is None:
        raise PolicyUnderivable(
            f"prefill worker {worker.name} configured kv_transfer_domain={domain!r} without "
            "kv_transfer_enforcement; set it to required or preferred"
        )
    taint = canonical_taint(domain, value)
    if enforcement == "required":
        return ImpliedConstraints((TaintConstraint(taint, "required", None, origin),))
    if config.kv_transfer_preferred_weight is None:
        raise PolicyUnderivable(
            f"prefill worker {worker.name} configured preferred KV transfer enforcement for domain "
            f"{domain!r}, but kv_transfer_preferred_weight is missing"
        )
    weight = config.kv_transfer_preferred_weight
    return ImpliedConstraints((TaintConstraint(taint, "preferred", weight, origin),))


def _implied_by_router(worker: Worker, policy: RouterPolicy | None) -> ImpliedConstraints:
    if policy is None:
        return UNCONSTRAINED
    value = worker.domains.get(policy.domain)
    if value is None:
        if policy.enforcement == "required":
            raise PolicyUnderivable(
                f"prefill worker {worker.name} publishes no topology domain {policy.domain!r}, "
                "which the router's KV-transfer policy requires; publish the domain or use fallback"
            )
        return ImpliedConstraints(
            note=f"prefill worker {worker.name} publishes no topology domain {policy.domain!r}: "
            f"the router's KV-transfer policy ({policy.enforcement}) does not apply to its requests"
        )
    taint = canonical_taint(policy.domain, value)
    if policy.enforcement == "preferred":
        constraint = TaintConstraint(taint, "preferred", policy.weight, "router policy")
        return ImpliedConstraints((constraint,))
    constraint = TaintConstraint(taint, "required", None, "router policy")
    return ImpliedConstraints((constraint,), relaxable=policy.enforcement == "fallback")


def policy_conflict(worker: Worker, policy: RouterPolicy | None) -> str | None:
    """How the worker's own policy differs from the router's; None if it does not.

    The worker's policy applies; a difference is reported as a condition.
    """
    config = worker.runtime_config
    if policy is None or config.kv_transfer_domain is None:
        return None
    own = (
        config.kv_transfer_domain,
        config.kv_transfer_enforcement,
        config.kv_transfer_preferred_weight,
    )
    if own == (policy.domain, policy.enforcement, policy.weight):
        return None
    return (
        f"worker {worker.name} publishes {_policy_text(*own)}, the router is set to "
        f"{_policy_text(policy.domain, policy.enforcement, policy.weight)}; "
        "the worker's policy is used"
    )


def _policy_text(domain: str, enforcement: str | None, weight: float | None) -> str:
    strength = "" if weight is None else f" {weight:g}"
    return f"{enforcement or 'no enforcement'}{strength} {domain}"


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Prefill ranks that imply the same required taint; ``relaxable`` as above."""

    taint: str
    mask: int
    relaxable: bool


@dataclass(frozen=True, slots=True)
class TransferGroups:
    """The prefill ranks of a registry by the decode constraint that they imply.

    ``free``: ranks without a required taint. ``underivable``: ranks whose policy cannot be applied
    (choosing one would refuse the request).
    """

    groups: tuple[TransferGroup, ...] = ()
    free: int = 0
    underivable: int = 0

    @classmethod
    def of_registry(cls, registry: WorkerRegistry, policy: RouterPolicy | None) -> TransferGroups:
        masks: dict[tuple[str, bool], int] = {}
        free = underivable = 0
        for worker in registry:
            if worker.role is not Role.PREFILL:
                continue
            mask = registry.mask_of((worker.worker_id,))
            try:
                derived = implied_constraints(worker, (), policy)
            except PolicyUnderivable:
                underivable |= mask
                continue
            hard = [item for item in derived.constraints if item.kind == "required"]
            if not hard:
                free |= mask
            for item in hard:
                key = (item.taint, derived.relaxable)
                masks[key] = masks.get(key, 0) | mask
        groups = tuple(TransferGroup(taint, mask, soft) for (taint, soft), mask in masks.items())
        return cls(groups, free, underivable)


class TransferGroupsCache:
    """The groups of the current fleet and policy, computed again when either changes."""

    def __init__(self) -> None:
        self._known: tuple[int, RouterPolicy | None, TransferGroups] | None = None

    def current(self, registry: WorkerRegistry, policy: RouterPolicy | None) -> TransferGroups:
        known = self._known
        if known is None or known[0] != registry.version or known[1] != policy:
            groups = TransferGroups.of_registry(registry, policy)
            known = self._known = (registry.version, policy, groups)
        return known[2]


class PairGroups:
    """Prefill ranks by all that the decode hop reads of them: the constraints that they imply, and
    their place on the levels of a table of links.

    Computed once per fleet, policy and levels, rank by rank.
    """

    def __init__(self) -> None:
        self._version: tuple[int, RouterPolicy | None, tuple[str, ...]] | None = None
        self._of_slot: dict[int, int] = {}
        self._groups: dict[tuple[ImpliedConstraints, Place], int] = {}
        #: The groups by their number.
        self.known: list[tuple[ImpliedConstraints, Place]] = []

    def numbers(
        self,
        registry: WorkerRegistry,
        policy: RouterPolicy | None,
        table: TransferTable | None,
        slots: Iterable[int],
    ) -> list[int]:
        """The number of the group of each slot; raises PolicyUnderivable."""
        version = (registry.version, policy, () if table is None else table.names)
        if self._version != version:
            self._version = version
            self._of_slot, self._groups, self.known = {}, {}, []
        numbers = self._of_slot
        try:
            return [numbers[slot] for slot in slots]
        except KeyError:
            for slot in slots:
                if slot not in numbers:
                    numbers[slot] = self._group(registry.worker(slot), policy, table)
        return [numbers[slot] for slot in slots]

    def _group(
        self, worker: Worker, policy: RouterPolicy | None, table: TransferTable | None
    ) -> int:
        implied = implied_constraints(worker, (), policy)
        # Origins name the worker, and do not change what the constraints do.
        plain = tuple(TaintConstraint(o.taint, o.kind, o.weight, "") for o in implied.constraints)
        place = () if table is None else table.place(worker.domains)
        key = (ImpliedConstraints(plain, implied.relaxable), place)
        number = self._groups.setdefault(key, len(self.known))
        if number == len(self.known):
            self.known.append(key)
        return number
