"""The prefix index beside Dynamo's RadixTree: matching, ingest and memory.

64 workers, a million (worker, block) entries in documents of 4,096 blocks that 8, 2 or 1 workers
hold (for matching, to different depths); then prompts of 16 blocks and of one. A prompt is a
document's first blocks. Before measuring, both answers are compared. The peer takes events as JSON
and matches local hashes; ours takes values and sequence hashes. Both take one event of 32 blocks in
a call. The peer hands it to its thread and waits: such a call took 13 to 26 us of CPU on an Intel
Xeon and 58 on an AMD EPYC, ours for new blocks 80 to 120 and 50. So the ratio of ingest depends on
the machine. CPU times; of ours the worst event is the lesser of two builds, since other load on the
machine counts too. Each index is built in a process of its own: its bytes are the resident memory
after, less before.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from router_core import PrefixIndex, sequence_hashes
from tests.bench import prefix_workload as workload
from tests.bench.harness import (
    Options,
    Peer,
    Row,
    alternate,
    in_own_process,
    measure,
    peer_or_none,
    resident_bytes,
    row,
)

INNER = 200
LENGTHS = {64: "0.7x", 512: "2x", 4096: "7x"}
#: Holders, blocks of a document, and the bound for the bytes of a distinct block.
SHAPES = (
    (8, workload.LENGTH, "< 60"),
    (2, workload.LENGTH, "< 60"),
    (1, workload.LENGTH, "< 60"),
    (1, 16, "< 120"),
    (1, 1, "< 200"),
)


def build(
    documents: list[list[int]], degree: int, *, staggered: bool = False
) -> tuple[PrefixIndex, float, float]:
    """The index, events a second, and the CPU milliseconds of the worst event."""
    index = PrefixIndex()
    spent = count = worst = 0
    for worker, parent, names, local in workload.events(documents, degree, staggered=staggered):
        # Fresh objects, as a decoder makes them: sharing must be the index's own doing.
        names, local = [n + 0 for n in names], [n | 0 for n in local]
        start = time.process_time_ns()
        index.store(worker, parent, names, local)
        taken = time.process_time_ns() - start
        worst = max(worst, taken)
        spent += taken
        count += 1
    return index, count / spent * 1e9, worst / 1e6


def built(degree: int, length: int, limit: int | None) -> dict[str, float]:
    """What an index takes, in a new process."""
    documents = workload.documents(degree, length)[:limit]
    before = resident_bytes()
    index, rate, worst = build(documents, degree)
    taken = resident_bytes() - before
    *_, again = build(documents, degree)
    return {
        "events_per_s": rate,
        "worst_ms": min(worst, again),
        "entries": index.entry_count,
        "block_bytes": taken / index.node_count,
    }


def rows(options: Options) -> Iterator[Row]:
    limit = 1 if options.smoke else None
    with peer_or_none(options, "index") as peer:
        yield from _matching(peer, SHAPES[0][0], options)
    for degree, length, aim in SHAPES[:1] if options.smoke else SHAPES:
        ours = in_own_process(built, degree, length, limit)
        theirs: dict[str, Any] = {}
        with peer_or_none(options, "index") as peer:
            if peer is not None:
                theirs = peer.ask("build", degree=degree, staggered=False, length=length)
                theirs["block_bytes"] = theirs["bytes"] / theirs["entries"] * degree
        name = "1 holder" if degree == 1 else f"{degree} holders"
        if length == workload.LENGTH:
            rate = theirs.get("events_per_s")
            ingested = ours["events_per_s"]
            yield row(f"{name}: ingest", "events/s", ingested, rate, "0.7x", better="higher")
            worst = theirs.get("worst_ms")
            yield row(f"{name}: worst event", "ms", ours["worst_ms"], worst, "< 5")
        else:
            name += f", prompts of {length} block{'s' if length > 1 else ''}"
        bytes_ = theirs.get("block_bytes")
        yield row(f"{name}: a distinct block", "bytes", ours["block_bytes"], bytes_, aim)


def _matching(peer: Peer | None, degree: int, options: Options) -> Iterator[Row]:
    """How long it takes to find the holders of a prompt."""
    documents = workload.documents(degree)[: 1 if options.smoke else None]
    index, *_ = build(documents, degree, staggered=True)
    if peer is not None:
        peer.ask("build", degree=degree, staggered=True)
    for blocks, aim in LENGTHS.items():
        prompts = [sequence_hashes(document[:blocks]) for document in documents]
        if peer is not None:
            for number in range(0, len(prompts), 5):
                ours = sorted([slot, n] for slot, n in index.find_matches(prompts[number]).items())
                assert ours == peer.ask("scores", document=number, blocks=blocks)
        turn = itertools.cycle(prompts)

        def find(turn: Iterator[list[int]] = turn) -> float:
            return measure(lambda: index.find_matches(next(turn)), 1, inner=INNER).value

        def peer_find(blocks: int = blocks) -> float:
            assert peer is not None
            return float(peer.ask("find", blocks=blocks, inner=INNER))

        sides: list[Callable[[], float]] = [find] if peer is None else [find, peer_find]
        taken = [side / 1000 for side in alternate(sides, 1 if options.smoke else 7)]
        theirs = taken[1] if peer is not None else None
        yield row(f"{degree} holders: find {blocks:,} blocks", "us", taken[0], theirs, aim)
