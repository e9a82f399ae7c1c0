"""Choose prefill and decode as a pair: the lowest sum of the costs of both hops.

The prefill hop gets one more term for each candidate, ``following``: the lowest cost of a decode
worker after it. So the lowest cost of the prefill hop is the lowest sum over all pairs, and the
decode hop, decided as always, is its other half. Decode workers see of a prefill worker only the
constraints that it implies and its place on the levels of the table of links. So prefill
workers are grouped by both, and the term is computed once for each group: about one pass over the
prefill workers, one over the decode workers for each implied constraint, and a few steps for each
group, instead of one step for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from router_core.cost import total_costs
from router_core.cost_inputs import cost_inputs
from router_core.routing_view import RoutingRequest, RoutingView, SelectionContext
from router_core.selection import eligible, within_session
from router_core.taints import RoutingConstraints
from router_core.terms import decode_seconds
from router_core.topology import ImpliedConstraints
from router_core.transfer import Place
from router_core.worker_sets import slots_of

#: The context of the decode hop under constraints.
DecodeContext = Callable[[RoutingConstraints], SelectionContext]


def chooses_pairs(view: RoutingView) -> bool:
    """Whether prefill and decode are chosen as a pair; only in the mode kv."""
    return view.config.router_pair_selection == "best" and view.profile.mode == "kv"


def following_costs(
    view: RoutingView, request: RoutingRequest, slots: Sequence[int], context: DecodeContext
) -> list[float] | None:
    """The lowest cost of the decode hop after each prefill rank in ``slots``, in blocks.

    None where one of them has no eligible decode rank: the prefill hop is then chosen alone. Raises
    PolicyUnderivable for a prefill rank whose policy cannot be applied.
    """
    groups = view.pairs.numbers(view.registry, view.policy, view.transfer, slots)
    hops: dict[ImpliedConstraints, _DecodeHop | None] = {}
    lowest: dict[int, float] = {}
    for number in dict.fromkeys(groups):
        implied, place = view.pairs.known[number]
        if implied not in hops:
            hops[implied] = _decode_hop(view, request, implied, context)
        hop = hops[implied]
        if hop is None:
            return None
        lowest[number] = hop.lowest_from(view, place)
    return list(map(lowest.__getitem__, groups))


def _decode_hop(
    view: RoutingView, request: RoutingRequest, implied: ImpliedConstraints, context: DecodeContext
) -> _DecodeHop | None:
    hop = context(request.constraints.merge(implied.constraints))
    mask = eligible(view, hop, view.profile.filters)
    if not mask and implied.relaxable:
        hop = context(request.constraints)
        mask = eligible(view, hop, view.profile.filters)
    return _DecodeHop(view, hop, mask) if mask else None


class _DecodeHop:
    """The decode ranks under one constraint, with their costs before the transfer."""

    def __init__(self, view: RoutingView, context: SelectionContext, mask: int) -> None:
        mask = within_session(view, context, mask)
        candidates = view.registry.candidates(mask)
        self.slots = candidates.slots
        parameters = view.parameters["decode"]
        inputs = cost_inputs(view, context, candidates, mask, parameters)
        turn = view.rotation.get((view.registry.model_of(context.request.model), "decode"), 0)
        terms = view.profile.scorer(inputs, parameters, candidates, turn)
        count = len(self.slots)
        table = view.transfer
        seconds = None if table is None else decode_seconds(view.registry, table, context.request)
        self.weight = parameters.weight("kv_transfer_weight")
        self.seconds = seconds
        self.ordered = seconds is not None and list(seconds) == sorted(seconds)
        self.lowest = 0.0
        self.cheapest: list[_Cheapest] = []
        if table is None or seconds is None:
            self.lowest = min(total_costs(terms, inputs.multipliers, count))
            return
        base = total_costs(terms, None, count)
        multipliers = inputs.multipliers
        for multiplier in {1.0} if multipliers is None else set(multipliers):
            self.cheapest.append(_Cheapest(multiplier, self.slots, base, multipliers))

    def lowest_from(self, view: RoutingView, place: Place) -> float:
        """The lowest cost of the hop if the KV cache comes from ``place``."""
        table, seconds = view.transfer, self.seconds
        if table is None or seconds is None:
            return self.lowest
        masks = view.classes.masks_from(view.registry, table, place)
        lowest = math.inf
        for group in self.cheapest:
            # The operations and their order are those of total_costs: equal to the last bit.
            costs: list[float] = []
            nearer = 0
            for level, members in enumerate((*masks, ~0)):
                mask = members & group.mask & ~nearer
                if not mask:
                    continue
                # Where nearer is not slower, the ranks of nearer classes may count here too: it
                # changes no minimum, and most places share the masks of the wide levels.
                ranks = mask | nearer if self.ordered else mask
                costs.append(group.base_in(ranks) + seconds[level] * self.weight)
                nearer |= mask
            if group.multiplier != 1.0:
                costs = [cost * group.multiplier for cost in costs]
            lowest = min(lowest, *costs)
        return lowest


class _Cheapest:
    """Decode ranks with one multiplier, cheapest first, to find the cheapest one of a class.

    For ranks of one class and one multiplier the order of the costs is that of the costs before
    the transfer, so the first one is the lowest.
    """

    def __init__(
        self,
        multiplier: float,
        slots: Sequence[int],
        base: Sequence[float],
        multipliers: Sequence[float] | None,
    ) -> None:
        self.multiplier = multiplier
        self._base = dict(zip(slots, base, strict=True))
        if multipliers is not None:
            own = (s for s, other in zip(slots, multipliers, strict=True) if other == multiplier)
            self._base = {slot: self._base[slot] for slot in own}
        self._order = sorted(self._base, key=self._base.__getitem__)
        self.mask = sum(1 << slot for slot in self._order)
        self._found: dict[int, float] = {}

    def base_in(self, mask: int) -> float:
        """The lowest cost before the transfer in ``mask``, which has at least one rank of these."""
        lowest = self._found.get(mask)
        if lowest is None:
            count = mask.bit_count()
            if count * count <= len(self._order):
                lowest = min(map(self._base.__getitem__, slots_of(mask)))
            else:
                lowest = self._base[next(slot for slot in self._order if mask >> slot & 1)]
            self._found[mask] = lowest
        return lowest
