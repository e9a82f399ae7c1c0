"""Queue length, KV cache usage and cache configuration of an engine, from its metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from dynctl.wire.prometheus_text import Sample, read_samples

#: No engine's answer is larger.
MAX_BYTES: Final = 8 * 1024 * 1024

_RANK_LABELS: Final = ("engine", "dp_rank")
_MOST_RANKS: Final = 1024
_COUNT_MAX: Final = 2**53


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Names of metrics; of each tuple the first that occurs counts.

    ``waiting``: requests in the queue. ``usage``: KV cache in use, 0..1. ``cache_config``: has the
    labels ``block_size`` and ``num_gpu_blocks``.
    """

    waiting: tuple[str, ...] = ()
    usage: tuple[str, ...] = ()
    cache_config: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """One rank; None is not reported. ``kv_usage``: KV cache in use, 0..1.

    ``total_blocks`` counts KV blocks of ``block_size`` tokens. ``labelled``: a label names the
    rank, so the engine reports its data-parallel ranks.
    """

    waiting: int | None = None
    kv_usage: float | None = None
    total_blocks: int | None = None
    block_size: int | None = None
    labelled: bool = False

    def used_blocks(self, total: int | None) -> int | None:
        """KV blocks in use of ``total``, by default of the engine's own total."""
        blocks = total or self.total_blocks
        return None if self.kv_usage is None or not blocks else round(self.kv_usage * blocks)


def read_engine_metrics(body: bytes, names: MetricNames) -> Mapping[int, EngineGauges]:
    """The gauges of each rank; a line without a rank belongs to rank 0. Bad lines are skipped, and
    lines of one priority: SGLang's line with an empty priority counts all requests."""
    rows: dict[str, list[tuple[int, Sample]]] = {}
    wanted = frozenset((*names.waiting, *names.usage, *names.cache_config))
    for sample in read_samples(body, wanted, max_bytes=MAX_BYTES, strict=False):
        rank = _rank(sample.labels)
        if rank is not None and not sample.labels.get("priority"):
            rows.setdefault(sample.name, []).append((rank, sample))

    gauges: dict[int, dict[str, Any]] = defaultdict(dict)
    readers = ((names.waiting, _waiting), (names.usage, _usage), (names.cache_config, _sizes))
    for candidates, read in readers:
        for rank, sample in next((rows[name] for name in candidates if name in rows), []):
            if values := read(sample):
                gauges[rank] |= values
    labelled = {
        rank
        for rank, sample in chain.from_iterable(rows.values())
        if not sample.labels.keys().isdisjoint(_RANK_LABELS)
    }
    return {
        rank: EngineGauges(**values, labelled=rank in labelled) for rank, values in gauges.items()
    }


def _waiting(sample: Sample) -> dict[str, Any]:
    value = float(sample.value)
    return {"waiting": int(value)} if 0 <= value <= _COUNT_MAX and value.is_integer() else {}


def _usage(sample: Sample) -> dict[str, Any]:
    value = float(sample.value)
    return {"kv_usage": value} if 0 <= value <= 1 else {}


def _sizes(sample: Sample) -> dict[str, Any]:
    sizes = {
        "total_blocks": _digits(sample.labels.get("num_gpu_blocks", ""), 15),
        "block_size": _digits(sample.labels.get("block_size", ""), 5),
    }
    return {name: size for name, size in sizes.items() if size}


def _rank(labels: Mapping[str, str]) -> int | None:
    """The rank of a sample; None where it is more than any engine has."""
    text = next((labels[name] for name in _RANK_LABELS if name in labels), "0")
    rank = _digits(text, 9) or 0
    return rank if rank < _MOST_RANKS else None


def _digits(text: str, most: int) -> int | None:
    """The number that a label's ``most`` or fewer digits are; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None
