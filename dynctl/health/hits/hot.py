"""The prefixes that requests share: a tree of blocks, in which each counts its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from msgspec import structs

from dynctl.documents.hot import HotPrefix, Verdict
from dynctl.health.hits.past import Request

#: Distinct blocks that are counted; requests for more are left out.
_MOST_BLOCKS: Final = 500_000
_MOST_EXAMPLES: Final = 3
#: Share of a prefix's requests that went to workers without it, from which its copies are few.
_MISSED: Final = 0.1
#: Requests for each copy below which copies are many: each was read less than once.
_READ: Final = 2.0

#: Causes of a choice that more copies would have changed.
_PRESSURE: Final = ("load", "busy")

#: The workers that have all blocks of a prompt of a model, and how many compute its prompts; None:
#: unknown.
#: Bytes of the KV cache of a token of a model; None: unknown.
BytesOf = Callable[[str], float | None]

HoldersOf = Callable[[str, Sequence[int]], tuple[Sequence[str], int] | None]


@dataclass(slots=True, eq=False)
class _Block:
    """What is counted of one block of prompts; ``depth``: blocks before it."""

    parent: int | None
    depth: int
    model: str
    tenant: str
    size: int
    requests: int = 0
    missed: int = 0
    pressed: int = 0
    reported: int = 0
    reused: int = 0
    #: The most requests of a block behind it.
    most_below: int = 0
    examples: list[str] = field(default_factory=list)


class HotPrefixes:
    """Counts requests by prefix. ``add`` takes each request; then ``locate`` finds the ``top``
    largest prefixes, and their copies.

    ``bytes_per_token``: of the KV cache of the model, where all requests are for one.
    """

    def __init__(self, top: int, bytes_per_token: float | None = None) -> None:
        self._top = top
        self._bytes_per_token = bytes_per_token
        self._blocks: dict[int, _Block] = {}
        #: Requests that were counted, and the tokens of their prompts.
        self.requests = self.prompt_tokens = 0
        #: Blocks that did not fit.
        self.left_out = 0
        #: Prefixes of at least two requests, and the largest of them.
        self.shared = 0
        self.prefixes: list[HotPrefix] = []

    def add(self, request: Request) -> None:
        """Count a request that has ended."""
        arrived, end = request.arrived, request.finished
        reused = None if end is None else end.cached_tokens
        best = request.rungs.get("best")
        missed = range(0)
        if best is not None and request.depth is not None:
            missed = range(request.depth, best // arrived.block_size)
        pressed = any(request.parts["expected", cause] > 0 for cause in _PRESSURE)
        self.requests += 1
        self.prompt_tokens += arrived.isl_tokens
        parent = None
        for depth, name in enumerate(request.hashes):
            block = self._blocks.get(name)
            if block is None:
                if len(self._blocks) >= _MOST_BLOCKS:
                    self.left_out += len(request.hashes) - depth
                    return
                size = arrived.block_size
                block = _Block(parent, depth, arrived.model, arrived.tenant, size)
                self._blocks[name] = block
            block.requests += 1
            block.missed += depth in missed
            block.pressed += pressed and depth in missed
            block.reported += reused is not None
            block.reused += (depth + 1) * block.size <= (reused or 0)
            if len(block.examples) < _MOST_EXAMPLES:
                block.examples.append(arrived.id)
            parent = name

    def locate(self, holders_of: HoldersOf, bytes_of: BytesOf) -> None:
        """Find the largest prefixes, where they are now, and their bytes."""
        for block in self._blocks.values():
            if block.parent is not None:
                above = self._blocks[block.parent]
                above.most_below = max(above.most_below, block.requests)
        # A prefix ends where fewer requests go on.
        ends = [
            name
            for name, block in self._blocks.items()
            if block.requests > max(1, block.most_below)
        ]
        self.shared = len(ends)
        rows = nlargest(self._top, (self._row(name) for name in ends), key=_size)
        models = {block.model for block in self._blocks.values()}
        given = self._bytes_per_token if len(models) == 1 else None
        self.prefixes = [
            _sized(self._located(row, holders_of), given or bytes_of(row.model)) for row in rows
        ]

    def _row(self, name: int) -> HotPrefix:
        end = self._blocks[name]
        own = list(self._own_blocks(name))
        parent = own[-1].parent
        reused = sum(block.reused for block in own) * end.size if end.reported else None
        return HotPrefix(
            f"{name:016x}",
            end.model,
            end.tenant,
            (end.depth + 1) * end.size,
            len(own) * end.size,
            end.requests,
            0.0,
            reused,
            missed=end.missed,
            missed_by_load=end.pressed,
            parent="" if parent is None else f"{parent:016x}",
            examples=end.examples,
        )

    def _own_blocks(self, name: int | None) -> Iterator[_Block]:
        """The blocks up to one, from it back to the first that as many requests have."""
        requests = self._blocks[name].requests if name is not None else 0
        while name is not None and self._blocks[name].requests == requests:
            yield self._blocks[name]
            name = self._blocks[name].parent

    def _chain(self, name: int | None) -> list[int]:
        chain = []
        while name is not None:
            chain.append(name)
            name = self._blocks[name].parent
        return chain[::-1]

    def _located(self, row: HotPrefix, holders_of: HoldersOf) -> HotPrefix:
        share = _size(row) / self.prompt_tokens if self.prompt_tokens else 0.0
        located = holders_of(row.model, self._chain(int(row.prefix, 16)))
        if located is None:
            return structs.replace(row, share=share)
        names, workers = located
        return structs.replace(
            row,
            share=share,
            copies=len(names),
            workers=sorted(names),
            verdict=verdict(row.requests, row.missed_by_load, len(names), workers),
        )


def _sized(row: HotPrefix, bytes_per_token: float | None) -> HotPrefix:
    """The row with the bytes of one copy."""
    if bytes_per_token is None:
        return row
    return structs.replace(row, bytes=round(row.tokens * bytes_per_token))


def _size(row: HotPrefix) -> int:
    """Tokens of a prefix in all its requests, without those of shorter prefixes."""
    return row.requests * row.own_tokens


def verdict(requests: int, missed: int, copies: int, workers: int) -> Verdict:
    """Whether a prefix should be on more or on fewer of the ``workers``. ``missed``: requests that
    the load of its workers sent to others."""
    if copies > 1 and requests < _READ * copies:
        return "too many copies"
    few = missed > 1 and missed >= _MISSED * requests and copies < workers
    return "too few copies" if few else ""
