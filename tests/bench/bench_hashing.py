"""Tokens to block hashes, beside Dynamo's binding.

    python -m tests.bench.bench_hashing [--peer-python PATH] [--smoke]

The binding gives local hashes only; ours is shown with and without the chaining into sequence
hashes that the prefix index needs. Nanoseconds a block, tokens given as a list.
"""

import random
from array import array
from collections.abc import Callable
from functools import partial

from router_core import PromptHasher, hash_prompt, local_block_hashes, sequence_hashes
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

BLOCK = 16


def run(peer: Peer | None, turns: int = 7) -> list[Row]:
    """Rows for prompts of 512, 8,192 and 65,536 tokens."""
    rows: list[Row] = []
    for tokens, inner in ((512, 400), (8192, 40), (65536, 5)):
        source = random.Random(tokens)
        prompt = [source.randrange(150_000) for _ in range(tokens)]
        packed = array("I", prompt)
        local = local_block_hashes(prompt, BLOCK)
        blocks = len(local)
        hasher = PromptHasher(BLOCK)
        ours: list[Callable[[], object]] = [
            partial(local_block_hashes, prompt, BLOCK),
            partial(hash_prompt, prompt, BLOCK),
            partial(hash_prompt, packed, BLOCK),
            partial(sequence_hashes, local),
            partial(hasher.hash_prompt, prompt),
        ]
        sides: list[Callable[[], float]] = [partial(measure, fn, 1, inner=inner) for fn in ours]
        if peer is not None:
            sides.append(
                partial(peer.ask, "hash", tokens=tokens, block_size=BLOCK, inner=inner, seed=tokens)
            )
        taken = [value / blocks for value in alternate(sides, turns)]
        theirs = taken[5] if peer is not None else None
        rows += [
            row(f"{tokens} tokens -> local hashes", "ns/block", taken[0], theirs, "2x"),
            row(f"{tokens} tokens -> sequence hashes", "ns/block", taken[1], theirs),
            row(f"{tokens} tokens as array -> sequence", "ns/block", taken[2], theirs),
            row(f"{tokens} tokens seen before -> sequence", "ns/block", taken[4], theirs, "2x"),
            row(f"{blocks} local -> sequence hashes", "ns/block", taken[3]),
        ]
    return rows


def main() -> None:
    arguments = bench_parser(__doc__).parse_args()
    with peer_or_none(arguments.peer_python, "peer_dynamo.py") as peer:
        print_table("hashing", run(peer, 1 if arguments.smoke else 7))


if __name__ == "__main__":
    main()
