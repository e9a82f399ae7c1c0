"""How full an engine is, out of its Prometheus metrics: vLLM's and SGLang's own names.

Only four numbers of some thousand lines are wanted, so their lines are looked for and the others
are never read: a fleet of engines is asked every few seconds beside the data path. The names are
those of vLLM 0.6 to 0.11 and of SGLang 0.4 and 0.5 (modelled from their documentation).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

#: An answer of this size is no engine's.
MAX_BYTES: Final = 8 * 1024 * 1024

_WAITING: Final = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_USAGE: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
_BLOCKS: Final = (b"vllm:cache_config_info",)
_RANK: Final = re.compile(rb'(?:[{,])(?:engine|dp_rank)="([0-9]{1,9})"')
_TOTAL: Final = re.compile(rb'[{,]num_gpu_blocks="([0-9]{1,15})"')
_MOST_RANKS: Final = 1024
_COUNT_MAX: Final = 2**53


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """One rank; None is not told. ``kv_usage``: KV cache in use, 0..1."""

    waiting: int | None = None
    kv_usage: float | None = None
    total_blocks: int | None = None

    def used_blocks(self, total: int | None) -> int | None:
        """KV blocks in use of ``total``, which where it is None the engine may tell itself."""
        blocks = total or self.total_blocks
        return None if self.kv_usage is None or not blocks else round(self.kv_usage * blocks)


def read_engine_metrics(body: bytes) -> Mapping[int, EngineGauges]:
    """Rank -> its gauges; a line without a rank is of rank 0. Lines that are odd say nothing."""
    found: dict[int, EngineGauges] = {}
    if len(body) > MAX_BYTES:
        return found
    for rank, _, value in _lines(body, _WAITING):
        if value is not None and 0 <= value <= _COUNT_MAX and value == int(value):
            found[rank] = replace(found.get(rank, EngineGauges()), waiting=int(value))
    for rank, _, value in _lines(body, _USAGE):
        if value is not None and 0 <= value <= 1:
            found[rank] = replace(found.get(rank, EngineGauges()), kv_usage=value)
    for rank, labels, _ in _lines(body, _BLOCKS):
        total = _TOTAL.search(labels)
        if total is not None and int(total[1]):
            found[rank] = replace(found.get(rank, EngineGauges()), total_blocks=int(total[1]))
    return found


def _lines(body: bytes, names: tuple[bytes, ...]) -> Iterator[tuple[int, bytes, float | None]]:
    """``(rank, labels, value)`` of the lines of the first of ``names`` that is there."""
    for name in names:
        place, some = 0, False
        while (place := body.find(name, place)) >= 0:
            end = body.find(b"\n", place)
            line = body[place : end if end >= 0 else len(body)]
            start, place = place, place + len(name)
            rest = line[len(name) :]
            if (start and body[start - 1 : start] != b"\n") or rest[:1] not in (b"{", b" "):
                continue  # a comment, or a longer name
            labels, _, told = rest.rpartition(b"}") if rest[:1] == b"{" else (b"", b"", rest)
            rank = _RANK.search(labels)
            number = int(rank[1]) if rank is not None else 0
            if number < _MOST_RANKS:
                some = True
                yield number, labels, _number(told)
        if some:
            return


def _number(text: bytes) -> float | None:
    parts = text.split()
    try:
        return float(parts[0]) if parts else None
    except ValueError:
        return None
