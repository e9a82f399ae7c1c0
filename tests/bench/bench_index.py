"""The prefix index beside Dynamo's RadixTree: matching and ingest.

    python -m tests.bench.bench_index [--peer-python PATH] [--degrees 8,2,1] [--smoke]

64 workers, a million (worker, block) entries in documents of 4,096 blocks; ``degree`` workers hold
each document, in the staggered workload to different depths. Every prompt is a document's first
blocks, so its longest holder has all of it. Each of ours and the peer's finds rotates over the
documents. Before measuring, the answers of both are compared.

The peer matches local hashes; ours is shown from sequence hashes and from local ones. The peer
takes events as JSON only, so ours is shown from JSON too. All times are CPU times of the process;
of ours the worst event is the lesser of two builds, since other load on the machine counts too.
"""

import itertools
import json
import time
from collections.abc import Iterator

import msgspec

from router_core import PrefixIndex, sequence_hashes
from tests.bench import prefix_workload as workload
from tests.bench.harness import (
    Peer,
    Row,
    alternate,
    bench_parser,
    measure,
    peer_or_none,
    print_table,
    row,
)

INNER = 200
CPU = time.process_time_ns
LENGTHS = {64: "0.7x", 512: "2x", 4096: "7x"}
LOCAL_AIM = "1x"
WORST_AIM = "< 5"


class Block(msgspec.Struct):
    """One block of the peer's JSON event."""

    block_hash: int
    tokens_hash: int


class Stored(msgspec.Struct):
    """The peer's stored event, as JSON has it."""

    parent_hash: int | None
    blocks: list[Block]


def build(
    documents: list[list[int]], degree: int, *, staggered: bool
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


def ingest_json(documents: list[list[int]], degree: int) -> float:
    """Events a second from JSON bytes."""
    decode = msgspec.json.Decoder(Stored).decode
    index = PrefixIndex()
    spent = count = 0
    for worker, parent, names, local in workload.events(documents, degree):
        blocks = [
            {"block_hash": name, "tokens_hash": value}
            for name, value in zip(names, local, strict=True)
        ]
        data = json.dumps({"parent_hash": parent, "blocks": blocks}).encode()
        start = time.process_time_ns()
        event = decode(data)
        index.store(
            worker,
            event.parent_hash,
            [block.block_hash for block in event.blocks],
            [block.tokens_hash for block in event.blocks],
        )
        spent += time.process_time_ns() - start
        count += 1
    return count / spent * 1e9


def run(
    peer: Peer | None,
    degree: int,
    *,
    staggered: bool,
    turns: int = 7,
    limit: int | None = None,
) -> list[Row]:
    """Rows of one workload, of ``limit`` documents at most (the peer always takes all)."""
    name = f"{degree} holders{', staggered' if staggered else ''}"
    documents = workload.documents(degree)[:limit]
    _, _, worst = build(documents, degree, staggered=staggered)
    index, events, again = build(documents, degree, staggered=staggered)
    worst = min(worst, again)
    entries = index.entry_count
    rows: list[Row] = []
    theirs = peer.ask("build", degree=degree, staggered=staggered) if peer else {}
    if theirs:
        assert theirs["entries"] == entries
    for blocks, aim in LENGTHS.items():
        prompts = [sequence_hashes(document[:blocks]) for document in documents]
        if peer:
            for number in range(0, len(prompts), 5):
                ours = sorted([slot, n] for slot, n in index.find_matches(prompts[number]).items())
                assert ours == peer.ask("scores", document=number, blocks=blocks)
            assert index.find_matches_local(documents[0][:blocks]) == index.find_matches(prompts[0])
        turn: Iterator[list[int]] = itertools.cycle(prompts)
        locals_: Iterator[list[int]] = itertools.cycle([text[:blocks] for text in documents])

        def ours_ns(turn: Iterator[list[int]] = turn) -> float:
            return measure(lambda: index.find_matches(next(turn)), 1, inner=INNER, clock=CPU)

        def local_ns(locals_: Iterator[list[int]] = locals_) -> float:
            return measure(
                lambda: index.find_matches_local(next(locals_)), 1, inner=INNER, clock=CPU
            )

        def peer_ns(blocks: int = blocks) -> float:
            assert peer is not None
            return float(peer.ask("find", blocks=blocks, inner=INNER))

        taken = alternate([ours_ns, local_ns] + ([peer_ns] if peer else []), turns)
        their_us = taken[2] / 1000 if peer else None
        rows.append(row(f"{name}: find {blocks}", "us", taken[0] / 1000, their_us, aim))
        rows.append(
            row(f"{name}: find {blocks} from local", "us", taken[1] / 1000, their_us, LOCAL_AIM)
        )
    peer_events = theirs.get("events_per_s")
    rows.append(row(f"{name}: ingest", "events/s", events, peer_events, "0.7x", better="higher"))
    rows.append(row(f"{name}: worst event", "ms", worst, theirs.get("worst_ms"), WORST_AIM))
    if not staggered:
        from_json = ingest_json(documents, degree)
        rows.append(
            row(f"{name}: ingest from JSON", "events/s", from_json, peer_events, better="higher")
        )
    rows.append(row(f"{name}: distinct blocks", "blocks", index.node_count))
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--degrees", default="8,2,1", help="holders of a document, one run each")
    arguments = parser.parse_args()
    if arguments.smoke:
        print_table("prefix index", run(None, 8, staggered=True, turns=1, limit=1))
        return
    for degree in (int(value) for value in arguments.degrees.split(",")):
        for staggered in (False, True) if degree > 1 else (False,):
            title = f"prefix index, {degree} holders{', staggered' if staggered else ''}"
            with peer_or_none(arguments.peer_python, "peer_dynamo.py") as peer:
                print_table(title, run(peer, degree, staggered=staggered))


if __name__ == "__main__":
    main()
