"""Why a router did not choose the worker with the most cached blocks."""

from __future__ import annotations

from typing import Final

import msgspec

from dynctl.documents.hits import UNEXPLAINED
from dynctl.documents.recording import Decided
from dynctl.health.hits.past import Request
from router_core import TOPOLOGY_PREFIX, Role, Router, Worker, slots_of

#: Causes by the short reason of a decision.
_BY_REASON: Final = {"session": "session"}


def beaten(request: Request, decided: Decided) -> str:
    """What made the router choose a worker with fewer cached blocks than the best candidate."""
    named = _BY_REASON.get(decided.why)
    if named is not None:
        return named
    config = request.source.config
    # The credit is taken from the prefill blocks, or else from the decode blocks.
    weight = config.router_track_active_blocks
    if config.router_track_prefill_tokens:
        weight = config.prefill_load_scale > 0
    if not (config.overlap_score_credit and weight):
        return "no_credit"
    if decided.margin is not None and decided.margin < 0:
        return "temperature"
    stage = "prefill" if decided.prefill is not None else "decode"
    document = _document(decided)
    hop = None if document is None else document.hop(stage)
    if hop is not None and len(hop.candidates) > 1 and decided.cost is not None:
        best = max(hop.candidates, key=lambda one: (one.cached_blocks, -one.cost))
        won = min(hop.candidates, key=lambda one: abs(one.cost - (decided.cost or 0.0)))

        def own(one: _Candidate) -> float:
            return (one.cost - one.following) / (one.multiplier or 1.0)

        if best.cost > won.cost and own(best) < own(won):
            return "topology"
    device, most = decided.cached_blocks, decided.best_cached_blocks
    below = min(config.host_cache_hit_weight, config.disk_cache_hit_weight)
    if request.tiered and below < 1 and device is not None and most is not None and most <= device:
        # No candidate had more on its device: what another one had more is below it.
        return "tier_weight"
    return "load"


def excluded(request: Request, router: Router, slots: int, *, every: bool = False) -> str:
    """Why the ranks of a mask, which have the most blocks, would not be candidates.

    ``every``: unexplained where one of them may have been a candidate.
    """
    chosen = None if request.rank is None else router.registry.get(request.rank.key[0])
    reasons = [_reason(request, router, slot, chosen) for slot in slots_of(slots)]
    if every and UNEXPLAINED in reasons:
        return UNEXPLAINED
    return next((one for one in reasons if one != UNEXPLAINED), UNEXPLAINED)


def _reason(request: Request, router: Router, slot: int, chosen: Worker | None) -> str:
    """Why one rank was not a candidate, by the options of the request and the state of the rank."""
    worker, options, bit = router.registry.worker(slot), request.arrived.asked, 1 << slot
    pin, allowed = options.get("pin_prefill") or options.get("pin_decode"), options.get("allowed")
    if pin and pin[0] != worker.worker_id:
        return "constraints"
    if allowed is not None and worker.worker_id not in allowed:
        return "constraints"
    if router.registry.unavailable & bit:
        return "unavailable"
    taints = worker.runtime_config.taints
    lacks = [one for one in options.get("required", ()) if one not in taints]
    if lacks:
        local = all(one.startswith(TOPOLOGY_PREFIX) for one in lacks)
        return "topology" if local else "constraints"
    if router.busy.mask & bit:
        return "busy"
    if router.freshness.degraded & bit:
        return "events_lost"
    domain = worker.runtime_config.kv_transfer_domain or request.source.config.kv_transfer_domain
    if chosen is None or not domain or worker.domains == chosen.domains:
        return UNEXPLAINED
    if worker.role is Role.PREFILL and domain in worker.domains:
        # A prefill worker is a candidate while its domain has a free decode worker.
        registry = router.registry
        answering = registry.model(request.arrived.model) & registry.role(Role.DECODE)
        answering &= registry.taint(f"{TOPOLOGY_PREFIX}{domain}={worker.domains[domain]}")
        if answering & ~registry.unavailable & ~router.busy.mask:
            return UNEXPLAINED
    return "topology"


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


class _Hop(msgspec.Struct):
    candidates: list[_Candidate] = []


class _Document(msgspec.Struct):
    """What is read of a RouteResult."""

    prefill: _Hop | None = None
    decode: _Hop | None = None

    def hop(self, stage: str) -> _Hop | None:
        return self.prefill if stage == "prefill" else self.decode


def _document(decided: Decided) -> _Document | None:
    if not decided.document:
        return None
    try:
        return msgspec.json.decode(decided.document, type=_Document)
    except (msgspec.DecodeError, RecursionError):
        return None
