"""One prompt part by part beside an index: what is cached where, and where it breaks."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.documents.codec import decode, encode
from dynctl.documents.prompt_parts import PromptParts
from dynctl.health.hits.parts import prompt_parts
from router_core import (
    TIERS,
    BlockHashes,
    BlocksStored,
    KvEvent,
    Router,
    Worker,
    WorkerUpserted,
    sequence_hashes,
)

SIZE = 16
HOST = next(iter(TIERS))
STARTS = (("system", 0), ("tools", 2 * SIZE), ("user", 4 * SIZE))


def holding(router: Router, number: int, contents: list[int], host: int = 0) -> None:
    """A worker that has these blocks, the last ``host`` of them in host memory."""
    worker = Worker(number, f"w{number}", "m", block_size=SIZE, kv_events=True)
    router.apply(WorkerUpserted(worker), 1.0)
    names = sequence_hashes(contents)
    cut = len(contents) - host
    router.apply(KvEvent(number, 0, BlocksStored(None, names[:cut], contents[:cut])), 1.0)
    if host:
        stored = BlocksStored(names[cut - 1], names[cut:], contents[cut:], HOST)
        router.apply(KvEvent(number, 0, stored), 1.0)


def parts_of(
    router: Router, contents: list[int], tail: int = 5, starts: Any = STARTS
) -> PromptParts:
    hashes = BlockHashes(SIZE, contents, sequence_hashes(contents))
    mask = router.registry.model("m")
    return prompt_parts(router, "m", mask, hashes, len(contents) * SIZE + tail, starts)


def test_each_part_has_its_workers_its_tiers_and_the_tokens_that_are_cached() -> None:
    router = Router()
    holding(router, 1, [1, 2, 3, 4, 5, 6, 7], host=2)
    holding(router, 2, [1, 2, 3])
    report = parts_of(router, [1, 2, 3, 4, 5, 6, 7, 8])
    system, tools, turn = report.parts
    assert (system.name, system.start, system.tokens, system.cached) == ("system", 0, 32, 32)
    assert (tools.name, tools.cached, tools.workers) == ("tools", 32, ["w1"])
    assert (turn.name, turn.tokens, turn.cached, turn.workers) == ("turn 1 (user)", 69, 48, [])
    assert system.workers == ["w1", "w2"]
    best, other = report.holders
    assert (best.worker, best.device, best.host, best.blocks) == ("w1", 5, 2, 7)
    assert (other.worker, other.blocks) == ("w2", 3)
    assert report.breaks is not None
    assert (report.breaks.block, report.breaks.cause, report.breaks.worker) == (7, "new", "")
    assert decode(encode(report), PromptParts) == report


@pytest.mark.parametrize(
    ("contents", "cause", "segment", "block", "equal"),
    [
        ([1, 90, 3, 4, 5, 6, 7], "front", "system", 1, (2, 7, 2)),
        ([1, 2, 4, 3, 5, 6, 7], "front", "tools", 2, (2, 3, 3)),
        ([1, 2, 3, 4, 90, 6, 7], "edited", "turn 1 (user)", 4, (5, 7, 5)),
        ([1, 2, 3, 4, 7, 91], "truncated", "turn 1 (user)", 4, (4, 5, 6)),
    ],
)
def test_a_break_names_its_part_its_cause_and_where_the_equal_text_is(
    contents: list[int], cause: str, segment: str, block: int, equal: tuple[int, int, int]
) -> None:
    router = Router()
    holding(router, 1, [1, 2, 3, 4, 5, 6, 7])
    seen = parts_of(router, contents).breaks
    assert seen is not None
    assert (seen.cause, seen.segment, seen.block, seen.token) == (
        cause,
        segment,
        block,
        block * SIZE,
    )
    assert (seen.equal_from, seen.equal_to, seen.was_at, seen.worker) == (*equal, "w1")


def test_a_prompt_without_known_parts_is_one_and_a_whole_one_does_not_break() -> None:
    router = Router()
    holding(router, 1, [1, 2, 3])
    report = parts_of(router, [1, 2, 3], starts=())
    (whole,) = report.parts
    assert (whole.name, whole.tokens, whole.cached, whole.workers) == ("prompt", 53, 48, ["w1"])
    assert report.breaks is None
    empty = parts_of(Router(), [1, 2, 3], starts=())
    assert (empty.holders, empty.parts[0].cached) == ([], 0)
