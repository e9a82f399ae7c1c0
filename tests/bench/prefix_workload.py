"""The prefix index's workload, the same for ours and the peer. Standard library only.

Documents of `LENGTH` blocks, their local hashes random u64; document d is held by ``degree``
workers from worker d on. In the *staggered* workload the holders hold different depths: the
longest the whole, the others evenly spaced down to half of it.
"""

import random
from collections.abc import Iterator

WORKERS = 64
LENGTH = 4096
EVENT = 32
ENTRIES = 1_000_000

Event = tuple[int, int | None, list[int], list[int]]
"""(worker, parent's engine hash, engine hashes, local hashes)"""


def documents(degree: int, length: int = LENGTH) -> list[list[int]]:
    """Local hashes of the documents that make about `ENTRIES` (worker, block) pairs.

    A quarter of that for documents of another length.
    """
    source = random.Random(degree)
    entries = ENTRIES if length == LENGTH else ENTRIES // 4
    count = max(1, round(entries / (length * degree)))
    return [[source.getrandbits(64) for _ in range(length)] for _ in range(count)]


def holders(
    document: int, degree: int, *, staggered: bool, length: int = LENGTH
) -> list[tuple[int, int]]:
    """(worker, blocks held); if staggered, the blocks are a multiple of `EVENT`."""
    held = []
    for turn in range(degree):
        depth = length
        if staggered and degree > 1:
            depth = length - (length // 2) * turn // (degree - 1) // EVENT * EVENT
        held.append(((document * 7 + turn) % WORKERS, depth))
    return held


def engine_name(local: int) -> int:
    """An engine's name of a block: all workers agree, and it is not the local hash."""
    return local ^ 0x9E3779B97F4A7C15


def events(texts: list[list[int]], degree: int, *, staggered: bool = False) -> Iterator[Event]:
    """Stored events of at most `EVENT` blocks that lay the documents ``texts`` on their holders."""
    for number, document in enumerate(texts):
        for worker, depth in holders(number, degree, staggered=staggered, length=len(document)):
            for at in range(0, depth, EVENT):
                local = document[at : at + EVENT]
                parent = engine_name(document[at - 1]) if at else None
                yield worker, parent, [engine_name(value) for value in local], local
