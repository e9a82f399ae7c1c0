"""The inputs of the cost: one column for each quantity, one place for each candidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import add
from typing import Final

from router_core.cost import (
    CostInputs,
    CostParameters,
)
from router_core.freshness import counted_blocks
from router_core.load_order import OverlapColumn
from router_core.registry import CandidateSet
from router_core.routing_view import (
    RoutingRequest,
    RoutingView,
    SelectionContext,
)
from router_core.taints import preference_multiplier
from router_core.terms import added_columns
from router_core.worker_sets import NO_OVERLAPS, Overlaps

#: Candidates from which leading blocks stay in levels until a whole column of them is read.
_LEVELS_FROM: Final = 64


def cost_inputs(
    view: RoutingView,
    context: SelectionContext,
    candidates: CandidateSet,
    mask: int,
    parameters: CostParameters,
) -> CostInputs:
    """The inputs of the formula for the ranks in ``mask``."""
    request, slots, load = context.request, candidates.slots, view.load
    overlaps = shared = NO_OVERLAPS
    # A plain decode hop credits no cached blocks.
    reads = context.stage != "decode" or parameters.overlap_score_credit > 0
    if request.sequence_hashes and reads:
        overlaps = view.index.find_matches(request.sequence_hashes, mask, request.most_reusable)
    overlap_blocks = _column(overlaps, slots)
    host_blocks = disk_blocks = None
    if request.local_hashes and view.tiers.mask & mask and reads:
        host_blocks, disk_blocks = _lower_columns(view, request, slots, overlap_blocks)
    if parameters.track_active_blocks and parameters.assume_kv_reuse:
        shared = load.shared_blocks(request.sequence_hashes, mask)
    shared_blocks = _column(shared, slots) if shared.levels else None
    expected = view.predicted.live & mask if context.stage != "decode" else 0
    by_prompt = [overlap_blocks] if expected else []
    for number, hashes in enumerate(request.more_hashes, start=1):
        if reads:
            limit = request.most_reusable_of(number)
            more = _column(view.index.find_matches(hashes, mask, limit), slots)
            overlap_blocks = list(map(add, overlap_blocks, more))
            if expected:
                by_prompt.append(more)
        if parameters.track_active_blocks and parameters.assume_kv_reuse:
            more = _column(load.shared_blocks(hashes, mask), slots)
            shared_blocks = list(map(add, shared_blocks or repeat(0), more))
    trust = indexed_blocks = None
    if reads:
        trust = view.freshness.trusts(slots, mask)
    if trust is not None:
        rule, freshness = view.config.router_on_degraded, view.freshness
        estimated = learned_blocks(view, request, slots, mask & freshness.estimated)
        if any(estimated):
            overlap_blocks = list(map(add, overlap_blocks, estimated))
        indexed_blocks = overlap_blocks
        if mask & (freshness.degraded | freshness.none):  # those of all others count in full
            learned: Iterable[int] = repeat(0)
            if rule == "approximate":
                learned = learned_blocks(view, request, slots, mask & freshness.degraded)
            rated = freshness.rated(trust, slots, mask)
            overlap_blocks = counted_blocks(overlap_blocks, rated, rule, learned)
            host_blocks = host_blocks and counted_blocks(host_blocks, rated, rule)
            disk_blocks = disk_blocks and counted_blocks(disk_blocks, rated, rule)
    predicted_blocks = None
    if expected:
        found = _Cached(list(overlap_blocks), indexed_blocks, host_blocks, disk_blocks)
        predicted_blocks = _predict(view, request, slots, expected, by_prompt, trust, found)
        if predicted_blocks is not None:
            overlap_blocks, indexed_blocks = found.overlap, found.indexed
            host_blocks, disk_blocks = found.host, found.disk
    prefill_tokens = candidates.gather(load.prefill_tokens)
    active_blocks = candidates.gather(load.decode_blocks)
    active_requests = candidates.gather(load.requests)
    booked_tokens = list(map(load.booked_prefill, slots)) if load.decaying else None
    if view.what_if is not None:
        prefill_tokens = _shifted(prefill_tokens, slots, view.what_if.prefill_tokens)
        if booked_tokens is not None:
            booked_tokens = _shifted(booked_tokens, slots, view.what_if.prefill_tokens)
        active_blocks = _shifted(active_blocks, slots, view.what_if.decode_blocks)
        active_requests = _shifted(active_requests, slots, view.what_if.active_requests)
    return CostInputs(
        isl_tokens=request.isl_tokens,
        block_size=request.block_size,
        prompt_blocks=request.prompt_blocks,
        overlap_blocks=overlap_blocks,
        prefill_tokens=prefill_tokens,
        active_blocks=active_blocks,
        shared_blocks=shared_blocks,
        active_requests=active_requests,
        multipliers=_multipliers(view, context, slots) if context.constraints.preferred else None,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        trust=trust,
        indexed_blocks=indexed_blocks,
        booked_tokens=booked_tokens,
        following=None if context.following is None else context.following(slots),
        predicted_blocks=predicted_blocks,
        added=added_columns(view, context, slots, mask, parameters),
    )


@dataclass(slots=True)
class _Cached:
    """The columns of cached blocks, as far as they depend on predictions."""

    overlap: list[int]
    indexed: Sequence[int] | None
    host: list[int] | None
    disk: list[int] | None


def _predict(
    view: RoutingView,
    request: RoutingRequest,
    slots: Sequence[int],
    mask: int,
    by_prompt: Sequence[Sequence[int]],
    trust: Sequence[int] | None,
    found: _Cached,
) -> list[int] | None:
    """Add to ``found`` the blocks that slots of ``mask`` will have by their bookings, and return
    the column of those; None without any.

    Of what events show and what was booked the larger counts, for each prompt of a batch
    (``by_prompt``: what the events show). Lower tiers count behind it only.
    """
    side, best = [0] * len(slots), [0] * len(slots)
    for number, hashes in enumerate((request.sequence_hashes, *request.more_hashes)):
        if view.index.exact:
            hashes = hashes[: request.most_reusable_of(number)]
        column = _column(view.predicted.find_matches(hashes, mask), slots)
        side = list(map(add, side, column))
        best = list(map(add, best, map(max, column, by_prompt[number])))
    predicted = [0] * len(slots)
    indexed = None if found.indexed is None else list(found.indexed)
    host = None if found.host is None else list(found.host)
    disk = None if found.disk is None else list(found.disk)
    for i in compress(range(len(slots)), side):
        doubtful = trust is not None and trust[i]
        if doubtful and view.config.router_on_degraded == "load-only":
            continue
        more = (side[i] if doubtful else best[i]) - found.overlap[i]
        if more <= 0:
            continue
        predicted[i] = more
        found.overlap[i] += more
        if indexed is not None:
            indexed[i] = max(indexed[i], found.overlap[i])
        for tier in filter(None, (host, disk)):
            covered = min(tier[i], more)
            tier[i] -= covered
            more -= covered
    if not any(predicted):
        return None
    found.indexed, found.host, found.disk = indexed, host, disk
    return predicted


def learned_blocks(
    view: RoutingView, request: RoutingRequest, slots: Sequence[int], mask: int
) -> Iterable[int]:
    """Leading prompt blocks of the slots in ``mask`` by what was booked there; 0 for others."""
    indexes = [index for index in view.learned if index.live & mask]
    if not indexes:
        return repeat(0, len(slots))
    found = [0] * len(slots)
    for number, hashes in enumerate((request.sequence_hashes, *request.more_hashes)):
        if view.index.exact:
            hashes = hashes[: request.most_reusable_of(number)]
        for index in indexes:  # a slot has its blocks in one of them
            more = _column(index.find_matches(hashes, mask), slots)
            found = list(map(add, found, more))
    return found


def _lower_columns(
    view: RoutingView, request: RoutingRequest, slots: Sequence[int], overlap: Sequence[int]
) -> tuple[list[int] | None, list[int] | None]:
    """Prompt blocks in host memory and on disk; None for a tier where no candidate has any."""
    host, disk = [0] * len(slots), [0] * len(slots)
    hashes, overlap = request.local_hashes, list(overlap)
    if view.index.exact:
        hashes = hashes[: request.most_reusable]
    for i, slot in enumerate(slots):
        if view.tiers.mask >> slot & 1:
            depth, parent = overlap[i], None
            if depth:
                parent = view.index.name_of(slot, request.sequence_hashes[:depth])
            host[i], disk[i] = view.tiers.extend(slot, parent, hashes, depth)
    return host if any(host) else None, disk if any(disk) else None


def _multipliers(
    view: RoutingView, context: SelectionContext, slots: Sequence[int]
) -> list[float] | None:
    # As in Dynamo, a pinned request has no preferences: there is no choice left.
    if context.pin is not None:
        return None
    preferred = context.constraints.preferred
    masks = [(view.registry.taint(item.taint), item.weight or 0.0) for item in preferred]
    if len(masks) == 1:
        mask, weight = masks[0]
        matched = preference_multiplier((weight,))
        return [matched if mask >> slot & 1 else 1.0 for slot in slots]
    return [preference_multiplier(w for mask, w in masks if mask >> slot & 1) for slot in slots]


def _column(overlaps: Overlaps, slots: Sequence[int]) -> Sequence[int]:
    if len(slots) < _LEVELS_FROM:
        return overlaps.column(slots)
    return OverlapColumn(overlaps, slots)


def _shifted(column: list[int], slots: Sequence[int], deltas: Mapping[int, int]) -> list[int]:
    return [max(0, value + deltas.get(slot, 0)) for value, slot in zip(column, slots, strict=True)]
