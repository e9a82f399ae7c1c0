"""A thousand workers: what each has cached, and the prompts that arrive.

Of the 10,240 blocks of a worker 10 % are 16 system prompts of 64 blocks, each cached by 64 workers;
30 % are 12 documents of 256 blocks, each cached by 8 workers; 60 % are 48 conversations of 128
blocks after a system prompt, cached by this worker alone. That are 10.2 million (worker, block)
entries and 6.5 million blocks that differ.

Of the prompts 50 % continue a conversation that a worker has (208 blocks), 30 % ask something new
about a document (272 blocks; a few documents get most of them), and 20 % begin after a system
prompt (96 blocks). Every prompt ends with blocks that no worker has, and is never the same twice.
"""

import random
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from router_core import hash_prompt

BLOCK = 16
MODEL = "m"
SYSTEM, DOCUMENT, CONVERSATION = 64, 256, 128
SYSTEMS_HELD, DOCUMENTS_HELD, CONVERSATIONS_HELD = 16, 12, 48
_SYSTEM_HOLDERS, _DOCUMENT_HOLDERS = 64, 8
ENTRIES = SYSTEMS_HELD * SYSTEM + DOCUMENTS_HELD * DOCUMENT + CONVERSATIONS_HELD * CONVERSATION
"""(worker, block) entries of a worker."""
PIECE = 32
"""Blocks of one event."""


def tokens(kind: str, number: int, blocks: int) -> bytes:
    """The token ids of a text as little-endian u32; random, the same for the same arguments."""
    short = array("H")
    short.frombytes(random.Random(f"{kind}{number}").randbytes(2 * BLOCK * blocks))
    wide = array("I", short)
    if sys.byteorder == "big":
        wide.byteswap()
    return wide.tobytes()


@lru_cache(maxsize=2048)
def shared_tokens(kind: str, number: int, blocks: int) -> bytes:
    """As :func:`tokens`, for texts that occur often."""
    return tokens(kind, number, blocks)


def as_array(data: bytes) -> "array[int]":
    """Token ids as a tokenizer returns them."""
    found = array("I")
    found.frombytes(data)
    return found


def names_of(sequence: list[int]) -> list[int]:
    """What engines call the blocks: the same in all of them."""
    return [value ^ 0x9E3779B97F4A7C15 for value in sequence]


@dataclass(frozen=True)
class Chain:
    """A text that a worker has cached, of ``blocks`` blocks after ``before``."""

    kind: str
    number: int
    blocks: int
    before: "Chain | None" = None

    @cached_property
    def data(self) -> bytes:
        """The token ids, without those of ``before``."""
        found = tokens if self.before is not None else shared_tokens
        return found(self.kind, self.number, self.blocks)

    @property
    def whole(self) -> bytes:
        return self.data if self.before is None else self.before.data + self.data

    def pieces(self) -> Iterator[tuple[int | None, list[int], list[int], bytes]]:
        """(parent's name, names, local hashes, token ids) of events that store the chain."""
        found = hash_prompt(as_array(self.whole), BLOCK)
        names, start = names_of(found.sequence), len(found) - self.blocks
        for at in range(start, len(found), PIECE):
            data = self.data[4 * BLOCK * (at - start) :][: 4 * BLOCK * PIECE]
            parent = names[at - 1] if at else None
            yield parent, names[at : at + PIECE], found.local[at : at + PIECE], data


@dataclass(frozen=True)
class Fleet:
    """What ``workers`` workers have cached; a worker is a number from 0."""

    workers: int

    def systems(self, worker: int) -> list[int]:
        count = max(SYSTEMS_HELD, self.workers * SYSTEMS_HELD // _SYSTEM_HOLDERS)
        return [(worker * 7 + turn) % count for turn in range(SYSTEMS_HELD)]

    def documents(self, worker: int) -> list[int]:
        groups = max(1, self.workers // _DOCUMENT_HOLDERS)
        return [worker % groups * DOCUMENTS_HELD + turn for turn in range(DOCUMENTS_HELD)]

    def conversation(self, worker: int, number: int) -> Chain:
        """The conversation ``number`` of a worker, after one of its system prompts."""
        systems = self.systems(worker)
        before = Chain("system", systems[number % len(systems)], SYSTEM)
        return Chain("conversation", worker * 1_000_000 + number, CONVERSATION, before)

    def cached(self, worker: int, first: int = 0) -> Iterator[Chain]:
        """What a worker has, its conversations from ``first`` on."""
        yield from (Chain("system", number, SYSTEM) for number in self.systems(worker))
        yield from (Chain("document", number, DOCUMENT) for number in self.documents(worker))
        for number in range(first, first + CONVERSATIONS_HELD):
            yield self.conversation(worker, number)

    def prompt(self, draw: random.Random, first: list[int]) -> bytes:
        """The token ids of a prompt; ``first``: the oldest conversation of each worker."""
        worker, kind = draw.randrange(self.workers), draw.random()
        if kind < 0.5:
            number = first[worker] + 8 + draw.randrange(CONVERSATIONS_HELD - 8)
            begin, new = self.conversation(worker, number).whole, 16
        elif kind < 0.8:
            count = max(1, self.workers // _DOCUMENT_HOLDERS) * DOCUMENTS_HELD
            begin, new = shared_tokens("document", int(count * draw.random() ** 3), DOCUMENT), 16
        else:
            begin, new = shared_tokens("system", draw.choice(self.systems(worker)), SYSTEM), 32
        return begin + draw.randbytes(4 * BLOCK * new)
