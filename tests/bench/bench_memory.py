"""Memory of the prefix index for a million (worker, block) entries, beside Dynamo's RadixTree.

    python -m tests.bench.bench_memory [--peer-python PATH] [--smoke]

The workload of `bench_index`: 64 workers, documents of 4,096 blocks held by eight, two or one of
them; then prompts of 16 blocks and of one, each held by one worker. What a process takes from the
system depends on what it freed before, so each index is built in a process of its own: resident
memory after, less before. Fewer holders of a document mean more distinct blocks for the same number
of entries, and those are what memory goes to.
"""

import json
import subprocess
import sys

from router_core import PrefixIndex
from tests.bench import prefix_workload as workload
from tests.bench.harness import Row, bench_parser, peer_or_none, print_table, resident_bytes, row

SHAPES = (
    (8, workload.LENGTH, "< 60"),
    (2, workload.LENGTH, "< 60"),
    (1, workload.LENGTH, "< 60"),
    (1, 16, "< 120"),
    (1, 1, "< 200"),
)
"""Holders, blocks of a document, and the aim for a distinct block."""


def taken(degree: int, length: int, limit: int | None) -> dict[str, int]:
    """Bytes, entries and distinct blocks of an index that was built just now."""
    texts = workload.documents(degree, length)[:limit]
    index = PrefixIndex()
    before = resident_bytes()
    for worker, parent, names, local in workload.events(texts, degree):
        # Fresh objects, as a decoder makes them: sharing must be the index's own doing.
        index.store(worker, parent, [n + 0 for n in names], [n | 0 for n in local])
    return {
        "bytes": resident_bytes() - before,
        "entries": index.entry_count,
        "blocks": index.node_count,
    }


def run(
    peer_python: str | None, degree: int, length: int, aim: str, limit: int | None
) -> list[Row]:
    """Rows of one workload."""
    argv = [sys.executable, "-m", "tests.bench.bench_memory", "--degree", str(degree)]
    argv += ["--length", str(length)]
    argv += [] if limit is None else ["--limit", str(limit)]
    ours = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    theirs = None
    with peer_or_none(peer_python, "peer_dynamo.py") as peer:
        if peer is not None:
            built = peer.ask("build", degree=degree, staggered=False, length=length)
            theirs = built["bytes"] / built["entries"]
    name = "1 holder" if degree == 1 else f"{degree} holders"
    if length != workload.LENGTH:
        name += f", prompts of {length} block{'s' if length > 1 else ''}"
    their_block = theirs * degree if theirs is not None else None
    # Bytes an entry are megabytes a million entries.
    return [
        row(name, "MB a million", ours["bytes"] / ours["entries"], theirs),
        row(
            f"{name}: of a distinct block",
            "bytes",
            ours["bytes"] / ours["blocks"],
            their_block,
            aim,
        ),
    ]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--degree", type=int, help="build one index here and print what it took")
    parser.add_argument("--length", type=int, default=workload.LENGTH, help="its blocks a document")
    parser.add_argument("--limit", type=int, help="documents at most, with --degree")
    arguments = parser.parse_args()
    if arguments.degree is not None:
        print(json.dumps(taken(arguments.degree, arguments.length, arguments.limit)))
        return
    limit = 1 if arguments.smoke else None
    shapes = SHAPES[:1] if arguments.smoke else SHAPES
    rows = [line for shape in shapes for line in run(arguments.peer_python, *shape, limit)]
    print_table("index memory", rows)


if __name__ == "__main__":
    main()
