"""Why a router did not choose the worker with the most cached blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynctl.documents.hits import UNEXPLAINED
from dynctl.documents.recording import Decided
from dynctl.health.hits.past import Request
from router_core import TOPOLOGY_PREFIX, Role, Router, RouterConfig, Worker, slots_of


def beaten(request: Request, decided: Decided) -> str:
    """What made the router choose a worker with fewer cached blocks than the best candidate."""
    if decided.why == "session":
        return "session"
    if not _credits_cached_blocks(request.source.config):
        return "no_credit"
    if decided.margin is not None and decided.margin < 0:
        return "temperature"
    if _lost_by_topology(decided):
        return "topology"
    return "tier_weight" if request.tiered and _differs_below_device(request, decided) else "load"


def _credits_cached_blocks(config: RouterConfig) -> bool:
    # The credit is taken from the prefill blocks, or else from the decode blocks.
    weight = config.router_track_active_blocks
    if config.router_track_prefill_tokens:
        weight = config.prefill_load_scale > 0
    return bool(config.overlap_score_credit and weight)


def _lost_by_topology(decided: Decided) -> bool:
    """Whether the best candidate was cheaper than the winner before the costs of the topology."""
    stage = "prefill" if decided.prefill is not None else "decode"
    document = _document(decided)
    hop, cost = None if document is None else document.hop(stage), decided.cost
    if hop is None or len(hop.candidates) < 2 or cost is None:
        return False
    best = max(hop.candidates, key=lambda candidate: (candidate.cached_blocks, -candidate.cost))
    won = min(hop.candidates, key=lambda candidate: abs(candidate.cost - cost))
    return best.cost > won.cost and best.own_cost < won.own_cost


def _differs_below_device(request: Request, decided: Decided) -> bool:
    """Whether no candidate had more on its device: what another one had more is below it."""
    config = request.source.config
    device, most = decided.cached_blocks, decided.best_cached_blocks
    if min(config.host_cache_hit_weight, config.disk_cache_hit_weight) >= 1:
        return False
    return device is not None and most is not None and most <= device


def exclusion(request: Request, router: Router, slots: int, *, every: bool = False) -> str:
    """Why the ranks of a mask, which have the most blocks, would not be candidates.

    ``every``: unexplained where one of them may have been a candidate.
    """
    chosen = None if request.rank is None else router.registry.get(request.rank.key[0])
    reasons = [_reason(request, router, slot, chosen) for slot in slots_of(slots)]
    if every and UNEXPLAINED in reasons:
        return UNEXPLAINED
    return next((reason for reason in reasons if reason != UNEXPLAINED), UNEXPLAINED)


def _reason(request: Request, router: Router, slot: int, chosen: Worker | None) -> str:
    """Why one rank was not a candidate, by the options of the request and the state of the rank."""
    worker, options, bit = router.registry.worker(slot), request.arrived.asked, 1 << slot
    if not _may_serve(worker, options):
        return "constraints"
    if router.registry.unavailable & bit:
        return "unavailable"
    taints = worker.runtime_config.taints
    lacks = [taint for taint in options.get("required", ()) if taint not in taints]
    if lacks:
        local = all(taint.startswith(TOPOLOGY_PREFIX) for taint in lacks)
        return "topology" if local else "constraints"
    if router.busy.mask & bit:
        return "busy"
    if router.freshness.degraded & bit:
        return "events_lost"
    if chosen is not None and _is_elsewhere(request, router, worker, chosen):
        return "topology"
    return UNEXPLAINED


def _may_serve(worker: Worker, options: Mapping[str, Any]) -> bool:
    """Whether the request is not pinned to other workers."""
    pin, allowed = options.get("pin_prefill") or options.get("pin_decode"), options.get("allowed")
    if pin and pin[0] != worker.worker_id:
        return False
    return allowed is None or worker.worker_id in allowed


def _is_elsewhere(request: Request, router: Router, worker: Worker, chosen: Worker) -> bool:
    """Whether a worker has other domains than the chosen one, and no way to hand over."""
    domain = worker.runtime_config.kv_transfer_domain or request.source.config.kv_transfer_domain
    if not domain or worker.domains == chosen.domains:
        return False
    if worker.role is not Role.PREFILL or domain not in worker.domains:
        return True
    # A prefill worker is a candidate while its domain has a free decode worker.
    registry = router.registry
    answering = registry.model(request.arrived.model) & registry.roles[Role.DECODE]
    answering &= registry.taint(f"{TOPOLOGY_PREFIX}{domain}={worker.domains[domain]}")
    return not answering & ~registry.unavailable & ~router.busy.mask


class _Candidate(msgspec.Struct):
    overlap_blocks: int = 0
    cost: float = 0.0
    multiplier: float = 1.0
    following: float = 0.0
    host_blocks: int = 0
    disk_blocks: int = 0

    @property
    def cached_blocks(self) -> int:
        return self.overlap_blocks + self.host_blocks + self.disk_blocks

    @property
    def own_cost(self) -> float:
        """The cost without the costs of the topology."""
        return (self.cost - self.following) / (self.multiplier or 1.0)


class _ScoredHop(msgspec.Struct):
    candidates: list[_Candidate] = []


class _Document(msgspec.Struct):
    """What is read of a RouteResult."""

    prefill: _ScoredHop | None = None
    decode: _ScoredHop | None = None

    def hop(self, stage: str) -> _ScoredHop | None:
        return self.prefill if stage == "prefill" else self.decode


def _document(decided: Decided) -> _Document | None:
    if not decided.document:
        return None
    try:
        return msgspec.json.decode(decided.document, type=_Document)
    except (msgspec.DecodeError, RecursionError):
        return None
