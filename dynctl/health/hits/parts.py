"""One prompt beside an index: what of each part is cached where, and why the rest is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.documents.prompt_parts import PartBreak, PartHolder, PromptPart, PromptParts
from dynctl.health.hits.breaks import (
    Run,
    Segment,
    TextPlace,
    cause_in,
    causes_of,
    changed_block,
    named_segments,
    runs_from,
    split_by_segments,
)
from router_core import BlockHashes, Router, sequence_hashes, slots_of

#: The name of a prompt whose parts are unknown.
_WHOLE: Final = "prompt"


def prompt_parts(
    router: Router,
    model: str,
    mask: int,
    hashes: BlockHashes,
    tokens: int,
    starts: Sequence[tuple[str, int]],
) -> PromptParts:
    """A prompt of ``tokens`` part by part. ``mask``: the ranks that may compute it. ``starts``:
    kind and first token of each part, as a recording has them."""
    size = hashes.block_size
    holders = [_holder(router, slot, hashes) for slot in slots_of(mask)]
    best = max((holder.blocks for holder in holders), default=0)
    places: list[Sequence[TextPlace]] = [()] * (len(hashes) - best)
    if best < len(hashes):
        places = _places(router, mask, hashes.local[best:])
    runs = runs_from(best, places)
    segments = named_segments(starts, tokens) or [Segment(_WHOLE, 0, tokens)]
    return PromptParts(
        model,
        tokens,
        size,
        [_part(segment, holders, runs, best, size) for segment in segments],
        sorted(filter(_has_blocks, holders), key=lambda holder: -holder.blocks),
        _break(router, runs, segments, size) if runs else None,
    )


def _has_blocks(holder: PartHolder) -> bool:
    return holder.blocks > 0


def _holder(router: Router, slot: int, hashes: BlockHashes) -> PartHolder:
    """The leading blocks that a rank has, by tier."""
    count = len(hashes)
    device = min(router.index.find_matches(hashes.sequence, 1 << slot, count).get(slot), count)
    host = disk = 0
    if router.tiers.mask >> slot & 1:
        name = router.index.name_of(slot, hashes.sequence[:device]) if device else None
        host, disk = router.tiers.extend(slot, name, hashes.local, device)
    worker, ref = router.registry.worker(slot), router.registry.ref(slot)
    several = worker.runtime_config.data_parallel_size > 1
    name_of_rank = f"{worker.name}/{ref.dp_rank}" if several else worker.name
    return PartHolder(name_of_rank, device, host, disk)


def _places(router: Router, mask: int, contents: Sequence[int]) -> list[Sequence[TextPlace]]:
    """Where the index has equal contents: of each block its places, with the slot as ``at``."""
    wanted = set(contents)
    places: dict[int, dict[int, TextPlace]] = {}
    for slot in slots_of(mask):
        known: dict[int, tuple[int, int]] = {}
        for event in router.index.stored_events(slot):
            above: int | None = None
            depth = -1
            if event.parent_hash is not None:
                above, depth = known[event.parent_hash]
            chained = sequence_hashes(event.local_hashes, above)
            columns = zip(event.block_hashes, event.local_hashes, chained, strict=True)
            for name, local, block in columns:
                depth += 1
                known[name] = (block, depth)
                if local in wanted:
                    at = places.setdefault(local, {})
                    at.setdefault(depth, TextPlace(depth, float(slot), block))
    return [tuple(places.get(local, {}).values()) for local in contents]


def _part(
    segment: Segment, holders: Sequence[PartHolder], runs: Sequence[Run], best: int, size: int
) -> PromptPart:
    whole = segment.end // size
    workers = [holder.worker for holder in holders if 0 < whole <= holder.blocks]
    equal = 0
    for run in runs:
        if run.place is not None:
            within = split_by_segments([segment], run.start * size, run.end * size)
            equal += within[segment.name]
    return PromptPart(
        segment.name,
        segment.start,
        segment.end - segment.start,
        max(0, min(best * size, segment.end) - segment.start),
        workers,
        equal,
    )


def _break(
    router: Router, runs: Sequence[Run], segments: Sequence[Segment], size: int
) -> PartBreak:
    """The first block that no worker has, and the first equal text behind it."""
    first = runs[0].start
    named = [segment for segment in segments if segment.name != _WHOLE]
    label = " or ".join(split_by_segments(segments, first * size, (first + 1) * size))
    for number, cause in enumerate(causes_of(runs)):
        run = runs[number]
        if run.place is None:
            continue
        changed = changed_block(runs, number)
        parts = [*split_by_segments(named, changed * size, (changed + 1) * size)]
        worker = router.registry.worker(int(run.place.at)).name
        return PartBreak(
            first,
            first * size,
            label,
            cause_in(parts, cause),
            run.start,
            run.end,
            run.place.depth,
            worker,
        )
    return PartBreak(first, first * size, label, "new")
