"""The inputs of the cost: one column for each quantity, one place for each candidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    WhatIf,
)
from router_core.taints import preference_multiplier
from router_core.terms import added_columns
from router_core.worker_sets import NO_OVERLAPS, Overlaps

#: Columns of prefill tokens, of those as booked, of active blocks and of active requests.
_Loads = tuple[list[int], list[int] | None, list[int], list[int]]

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
    request, slots = context.request, candidates.slots
    # A plain decode hop credits no cached blocks.
    reads = context.stage != "decode" or parameters.overlap_score_credit > 0
    blocks = _first_prompt(view, request, slots, mask, parameters, reads)
    by_prompt = [blocks.overlap]
    if request.more_hashes:
        by_prompt += _add_prompts(view, request, slots, mask, blocks, parameters, reads)
    trust = view.freshness.trusts(slots, mask) if reads else None
    if trust is not None:
        _discount(view, request, slots, mask, trust, blocks)
    expected = view.predicted.live & mask if context.stage != "decode" else 0
    if expected:
        blocks.predicted = _predict(view, request, slots, expected, by_prompt, trust, blocks)
    prefill_tokens, booked_tokens, active_blocks, active_requests = _loads(view, candidates)
    return CostInputs(
        isl_tokens=request.isl_tokens,
        block_size=request.block_size,
        prompt_blocks=request.prompt_blocks,
        overlap_blocks=blocks.overlap,
        prefill_tokens=prefill_tokens,
        active_blocks=active_blocks,
        shared_blocks=blocks.shared,
        active_requests=active_requests,
        multipliers=_multipliers(view, context, slots) if context.constraints.items else None,
        host_blocks=blocks.host,
        disk_blocks=blocks.disk,
        trust=trust,
        indexed_blocks=blocks.indexed,
        booked_tokens=booked_tokens,
        following=None if context.following is None else context.following(slots),
        predicted_blocks=blocks.predicted,
        added=added_columns(view, context, slots, mask, parameters),
    )


def _loads(view: RoutingView, candidates: CandidateSet) -> _Loads:
    """The load of each candidate, or what a dry run supposes of it."""
    load, slots = view.load, candidates.slots
    loads: _Loads = (
        candidates.gather(load.prefill_tokens),
        list(map(load.booked_prefill, slots)) if load.decaying else None,
        candidates.gather(load.decode_blocks),
        candidates.gather(load.requests),
    )
    return loads if view.what_if is None else _shift_loads(loads, slots, view.what_if)


@dataclass(slots=True)
class _Blocks:
    """The columns of blocks of the prompt; each step of :func:`cost_inputs` may change them."""

    overlap: Sequence[int]
    shared: Sequence[int] | None
    indexed: Sequence[int] | None = None
    host: list[int] | None = None
    disk: list[int] | None = None
    predicted: list[int] | None = None


def _first_prompt(
    view: RoutingView,
    request: RoutingRequest,
    slots: Sequence[int],
    mask: int,
    parameters: CostParameters,
    reads: bool,
) -> _Blocks:
    """The blocks of the request's first prompt: cached ones, and those of running requests."""
    overlaps = shared = NO_OVERLAPS
    if request.sequence_hashes and reads:
        overlaps = view.index.find_matches(request.sequence_hashes, mask, request.most_reusable)
    if parameters.track_active_blocks and parameters.assume_kv_reuse:
        shared = view.load.shared_blocks(request.sequence_hashes, mask)
    blocks = _Blocks(_column(overlaps, slots), _column(shared, slots) if shared.levels else None)
    if request.local_hashes and view.tiers.mask & mask and reads:
        blocks.host, blocks.disk = _lower_columns(view, request, slots, blocks.overlap)
    return blocks


def _add_prompts(
    view: RoutingView,
    request: RoutingRequest,
    slots: Sequence[int],
    mask: int,
    blocks: _Blocks,
    parameters: CostParameters,
    reads: bool,
) -> list[Sequence[int]]:
    """Add the blocks of the prompts of a batch after the first; the cached ones of each."""
    cached: list[Sequence[int]] = []
    for number, hashes in enumerate(request.more_hashes, start=1):
        if reads:
            limit = request.most_reusable_of(number)
            overlap = _column(view.index.find_matches(hashes, mask, limit), slots)
            blocks.overlap = list(map(add, blocks.overlap, overlap))
            cached.append(overlap)
        if parameters.track_active_blocks and parameters.assume_kv_reuse:
            shared = _column(view.load.shared_blocks(hashes, mask), slots)
            blocks.shared = list(map(add, blocks.shared or repeat(0), shared))
    return cached


def _discount(
    view: RoutingView,
    request: RoutingRequest,
    slots: Sequence[int],
    mask: int,
    trust: list[int],
    blocks: _Blocks,
) -> None:
    """Let the blocks count as far as the index of each rank can be trusted."""
    rule, freshness = view.config.router_on_degraded, view.freshness
    estimated = learned_blocks(view, request, slots, mask & freshness.estimated)
    if any(estimated):
        blocks.overlap = list(map(add, blocks.overlap, estimated))
    blocks.indexed = blocks.overlap
    if not mask & (freshness.degraded | freshness.none):
        return  # those of all others count in full
    learned: Iterable[int] = repeat(0)
    if rule == "approximate":
        learned = learned_blocks(view, request, slots, mask & freshness.degraded)
    rated = freshness.counted_trusts(trust, slots, mask)
    blocks.overlap = counted_blocks(blocks.overlap, rated, rule, learned)
    blocks.host = blocks.host and counted_blocks(blocks.host, rated, rule)
    blocks.disk = blocks.disk and counted_blocks(blocks.disk, rated, rule)


def _predict(
    view: RoutingView,
    request: RoutingRequest,
    slots: Sequence[int],
    mask: int,
    by_prompt: Sequence[Sequence[int]],
    trust: Sequence[int] | None,
    blocks: _Blocks,
) -> list[int] | None:
    """Add to ``blocks`` those that slots of ``mask`` will have by their bookings, and return the
    column of those; None without any.

    Of what events show and what was booked the larger counts, for each prompt of a batch
    (``by_prompt``: what the events show). Lower tiers count behind it only.
    """
    side, best = [0] * len(slots), [0] * len(slots)
    for hashes, known in zip(_reusable_prompts(view, request), by_prompt, strict=True):
        column = _column(view.predicted.find_matches(hashes, mask), slots)
        side = list(map(add, side, column))
        best = list(map(add, best, map(max, column, known)))
    predicted, overlap = [0] * len(slots), list(blocks.overlap)
    indexed, host, disk = map(_copy, (blocks.indexed, blocks.host, blocks.disk))
    for i in compress(range(len(slots)), side):
        doubtful = trust is not None and trust[i]
        if doubtful and view.config.router_on_degraded == "load-only":
            continue
        more = (side[i] if doubtful else best[i]) - overlap[i]
        if more <= 0:
            continue
        predicted[i] = more
        overlap[i] += more
        if indexed is not None:
            indexed[i] = max(indexed[i], overlap[i])
        for tier in filter(None, (host, disk)):
            covered = min(tier[i], more)
            tier[i] -= covered
            more -= covered
    if not any(predicted):
        return None
    blocks.overlap, blocks.indexed, blocks.host, blocks.disk = overlap, indexed, host, disk
    return predicted


def _copy(column: Sequence[int] | None) -> list[int] | None:
    return None if column is None else list(column)


def _reusable_prompts(view: RoutingView, request: RoutingRequest) -> Iterator[Sequence[int]]:
    """The hashes of each prompt of a batch, where the index is exact those that can be reused."""
    for number, hashes in enumerate((request.sequence_hashes, *request.more_hashes)):
        yield hashes[: request.most_reusable_of(number)] if view.index.exact else hashes


def learned_blocks(
    view: RoutingView, request: RoutingRequest, slots: Sequence[int], mask: int
) -> Iterable[int]:
    """Leading prompt blocks of the slots in ``mask`` by what was booked there; 0 for others."""
    indexes = [index for index in view.learned if index.live & mask]
    if not indexes:
        return repeat(0, len(slots))
    blocks = [0] * len(slots)
    for hashes in _reusable_prompts(view, request):
        for index in indexes:  # a slot has its blocks in one of them
            more = _column(index.find_matches(hashes, mask), slots)
            blocks = list(map(add, blocks, more))
    return blocks


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
    preferred = context.constraints.preferred
    # As in Dynamo, a pinned request has no preferences: there is no choice left.
    if not preferred or context.pin is not None:
        return None
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


def _shift_loads(loads: _Loads, slots: Sequence[int], what_if: WhatIf) -> _Loads:
    """The loads with the changes that a dry run supposes, down to 0."""

    def shift(column: list[int], changes: Mapping[int, int]) -> list[int]:
        return [
            max(0, value + changes.get(slot, 0)) for value, slot in zip(column, slots, strict=True)
        ]

    prefill, booked, active_blocks, active_requests = loads
    return (
        shift(prefill, what_if.prefill_tokens),
        None if booked is None else shift(booked, what_if.prefill_tokens),
        shift(active_blocks, what_if.decode_blocks),
        shift(active_requests, what_if.active_requests),
    )
