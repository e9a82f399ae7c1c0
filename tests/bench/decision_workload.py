"""The decision benchmark's fleet and prompts, the same for ours and the peer. Stdlib only.

Every prompt is half one of `DOCUMENTS`, which some workers have cached, and half new text, so
that each decision finds overlap and has something left to compute.
"""

import random

BLOCK = 16
DOCUMENTS = 4
HOLDERS = 8
MODEL = "m"
TOTAL_KV_BLOCKS = 1_000_000
MAX_BATCHED_TOKENS = 8192


def documents(tokens: int) -> list[list[int]]:
    """The cached beginnings, ``tokens // 2`` tokens each."""
    source = random.Random(tokens)
    return [[source.randrange(150_000) for _ in range(tokens // 2)] for _ in range(DOCUMENTS)]


def holders(document: int, workers: int) -> list[int]:
    """Numbers (0-based) of the workers that hold a document."""
    return [(document * 3 + turn) % workers for turn in range(min(HOLDERS, workers))]


def held(worker: int, workers: int) -> list[int]:
    """Documents that a worker holds."""
    return [d for d in range(DOCUMENTS) if worker in holders(d, workers)]


def prompts(tokens: int, count: int, seed: int) -> list[list[int]]:
    """``count`` prompts whose second half is new to every worker."""
    source = random.Random(seed)
    texts = documents(tokens)
    rest = tokens - tokens // 2
    return [
        texts[number % DOCUMENTS] + [source.randrange(150_000) for _ in range(rest)]
        for number in range(count)
    ]
