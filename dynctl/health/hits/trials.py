"""Settings tried on recorded choices: the same decision with one change, on the same state.

A setting is advised only where this shows that it changes choices, and for the better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dynctl.documents.recording import Arrived, local_hashes_below, request_of
from router_core import (
    ConfigError,
    Decision,
    Router,
    RouterConfig,
    RoutingRequest,
    RoutingView,
    slots_of,
)

#: A change: names of settings and their values.
Change = tuple[tuple[str, Any], ...]
#: Leading blocks that a rank has, by its slot.
DepthOf = Callable[[int], int]

#: Costs that differ by rounding: sums in another order.
_SAME_COST: Final = 1e-6
#: Costs that are computed for the trials of one report; what comes later is not tried.
MOST_COSTS: Final = 400_000
#: Equal draws in both decisions, so that they differ by the change alone.
_SAMPLES: Final = (0.5, 0.5)
_PREDICTED: Final = "router_predicted_ttl_secs"
#: Seconds for which a router counts a prompt where it was sent, in the trial.
BRIDGED_S: Final = 5.0


def changes(cause: str, config: RouterConfig) -> list[Change]:
    """The changes of settings that may reduce a cause, the smallest first; without those in force.

    Several weights are tried: which of them counts depends on the hop.
    """
    scale, credit = config.prefill_load_scale, config.overlap_score_credit
    weights: list[dict[str, Any]] = [
        *({"prefill_load_scale": max(1.0, times * scale)} for times in (2, 4)),
        *({"overlap_score_credit": max(1.0, times * credit)} for times in (2, 4)),
    ]
    soft = {
        "router_session_affinity_mode": "soft",
        "router_session_affinity_yield_blocks": 0.0,
    }
    if not config.kv_transfer_domain and cause == "topology":
        return []  # the policy is that of the workers' cards, or of the request
    by_cause: dict[str, list[dict[str, Any]]] = {
        "spread": [{"router_mode": "kv"}],
        "split": weights,
        "load": weights,
        "in_flight": [{_PREDICTED: BRIDGED_S}],
        "stale": [{_PREDICTED: BRIDGED_S}],
        "no_credit": [
            {
                "overlap_score_credit": 1.0,
                "prefill_load_scale": 1.0,
                "router_track_prefill_tokens": True,
            }
        ],
        "temperature": [{"router_temperature": 0.0}],
        # Sessions of other modes move only when their worker is not eligible.
        "session": [soft] if config.router_mode == "kv" else [],
        "topology": [
            {"kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.85}
        ],
        "tier_weight": [{"host_cache_hit_weight": 1.0, "disk_cache_hit_weight": 1.0}],
    }
    tried = []
    for settings in by_cause.get(cause, []):
        own = {name: v for name, v in settings.items() if getattr(config, name) != v}
        if own:
            tried.append(tuple(own.items()))
    return tried


class Trials:
    """Tries settings on choices, in order of time, as long as the bound allows."""

    def __init__(self) -> None:
        self._costs_left = MOST_COSTS

    def of_choice(
        self,
        arrived: Arrived,
        router: Router,
        chosen: int,
        depth_of: DepthOf,
        predicted: Mapping[int, int],
    ) -> dict[Change, int | None] | None:
        """Change -> tokens that the rank of the other choice has cached in addition; None where
        the choice stays. None for all: the choice cannot be repeated, or the bound is reached.

        ``router``: as it decided, at its time. ``chosen``: the slot of the rank that computed the
        prompt. ``predicted``: slot -> leading blocks that it has, or was sent just before.
        """
        config = router.config
        request = _request(arrived, router)
        before = self._first_decision(router, request, router.view())
        place = None if before is None else _place(before, router, chosen)
        if before is None or place is None or not _is_repeatable(before, place):
            return None
        tried: dict[Change, int | None] = {}
        for change in _all_changes(config):
            if self._costs_left <= 0:
                return None
            if change[0][0] == _PREDICTED:
                after, depths = _with_predicted(before, router, predicted), predicted
            else:
                after, depths = self._decision_under(router, request, config, change), {}
            tried[change] = None
            slot = None if after is None else _other_slot(after, router, chosen)
            if slot is not None:
                depth = depths.get(slot, depth_of(slot))
                tried[change] = (depth - depth_of(chosen)) * arrived.block_size
        return tried

    def _decision_under(
        self, router: Router, request: RoutingRequest, config: RouterConfig, change: Change
    ) -> Decision | None:
        """The decision with other settings; None where they are refused."""
        try:
            view = router.view(config.with_values(dict(change)))
        except ConfigError:
            return None
        return self._first_decision(router, request, view)

    def _first_decision(
        self, router: Router, request: RoutingRequest, view: RoutingView
    ) -> Decision | None:
        """The decision of the hop that computes the prompt; None for a refusal."""
        hop = router.plan(request, samples=_SAMPLES, view=view).first
        self._costs_left -= len(hop.costs)
        return None if hop.winner is None else hop


def _all_changes(config: RouterConfig) -> list[Change]:
    """Each change once."""
    causes: tuple[str, ...] = (
        *("load", "in_flight", "no_credit", "session", "tier_weight"),
        *(["topology"] if config.kv_transfer_domain else []),
    )
    if config.router_mode != "kv":
        causes = ("spread",)
    elif config.router_temperature > 0:
        # The draw is not recorded, so only that it is left out can be tried.
        causes = ("temperature",)
    return list(dict.fromkeys(change for cause in causes for change in changes(cause, config)))


def _request(arrived: Arrived, router: Router) -> RoutingRequest:
    request = request_of(arrived)
    if router.tiers.mask and request.sequence_hashes:
        local = local_hashes_below(router, request.sequence_hashes)
        request = replace(request, local_hashes=local)
    return request


def _slots(decision: Decision, router: Router) -> list[int | None]:
    return [router.registry.slot(ref.worker_id, ref.dp_rank) for ref in decision.refs]


def _place(decision: Decision, router: Router, slot: int) -> int | None:
    """The position of a rank among the candidates."""
    slots = _slots(decision, router)
    return slots.index(slot) if slot in slots else None


def _cheapest_candidates(decision: Decision) -> Sequence[int]:
    """The positions with the lowest cost."""
    low = min(decision.costs[candidate] for candidate in decision.group)
    return [
        candidate for candidate in decision.group if decision.costs[candidate] <= low + _SAME_COST
    ]


def _is_repeatable(decision: Decision, place: int) -> bool:
    """Whether the decision can choose this candidate, as the recorded one did."""
    if decision.mode != "kv" or decision.temperature > 0:
        return True
    return place in _cheapest_candidates(decision)


def _other_slot(decision: Decision, router: Router, chosen: int) -> int | None:
    """The rank that the decision chooses in place of ``chosen``; None where that one may stay."""
    slots, cheapest = _slots(decision, router), _cheapest_candidates(decision)
    if any(slots[candidate] == chosen for candidate in cheapest):
        return None
    return slots[cheapest[0]]


def _with_predicted(
    decision: Decision, router: Router, predicted: Mapping[int, int]
) -> Decision | None:
    """The decision if blocks that were sent to a rank just before counted as cached there."""
    inputs = decision.inputs
    if inputs is None:
        return None
    slots = _slots(decision, router)
    counted = [
        max(held, predicted.get(-1 if slot is None else slot, 0))
        for held, slot in zip(inputs.overlap_blocks, slots, strict=True)
    ]
    return decision.replay(replace(inputs, overlap_blocks=counted))


def sent_blocks(slots: int, depth_of: DepthOf, sent_to: Sequence[int | None]) -> dict[int, int]:
    """Slot -> its leading blocks with those that were sent there: ``sent_to`` has the slot to
    which each block of the prompt was sent just before, None where it was not."""
    blocks = {}
    for slot in slots_of(slots):
        held = depth = depth_of(slot)
        while depth < len(sent_to) and sent_to[depth] == slot:
            depth += 1
        if depth > held:
            blocks[slot] = depth
    return blocks
