"""Tokens to block hashes, beside Dynamo's binding.

The binding makes local hashes only; ours makes the sequence hashes too that the prefix index needs.
CPU nanoseconds a block; prompts of 512, 8,192 and 65,536 tokens.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial

from router_core import PromptHasher, hash_prompt, local_block_hashes
from tests.bench.harness import Options, Row, alternate, measure, peer_or_none, row

BLOCK = 16


def rows(options: Options) -> Iterator[Row]:
    with peer_or_none(options, "index") as peer:
        for tokens, inner in ((512, 400), (8192, 40), (65536, 5)):
            source = random.Random(tokens)
            prompt = [source.randrange(150_000) for _ in range(tokens)]
            hasher = PromptHasher(BLOCK)
            ours: list[Callable[[], object]] = [
                partial(local_block_hashes, prompt, BLOCK),
                partial(hash_prompt, array("I", prompt), BLOCK),
                partial(hasher.hash_prompt, prompt),
            ]
            sides = [partial(_once, fn, inner) for fn in ours]
            if peer is not None:
                ask = partial(peer.ask, "hash", tokens=tokens, block_size=BLOCK)
                sides.append(partial(ask, inner=inner, seed=tokens))
            taken = [
                side / (tokens / BLOCK) for side in alternate(sides, 1 if options.smoke else 7)
            ]
            theirs = taken[3] if peer is not None else None
            yield row(f"list of {tokens:,} tokens -> local hashes", "ns/block", taken[0], theirs)
            yield row(
                f"array of {tokens:,} -> sequence hashes", "ns/block", taken[1], theirs, "1.5x"
            )
            yield row(f"{tokens:,} tokens seen before", "ns/block", taken[2], theirs, "2x")


def _once(fn: Callable[[], object], inner: int) -> float:
    return measure(fn, 1, inner=inner).value
