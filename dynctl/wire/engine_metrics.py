"""Queue length, KV cache usage and cache configuration of an engine, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

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
    """The gauges of each rank; a line without a rank belongs to rank 0. Bad lines are skipped."""
    gauges: dict[int, EngineGauges] = {}
    rows: dict[str, list[tuple[int, Sample]]] = {}
    wanted = frozenset((*names.waiting, *names.usage, *names.cache_config))
    for sample in read_samples(body, wanted, max_bytes=MAX_BYTES, strict=False):
        rank = _rank(sample.labels)
        if rank is not None:
            rows.setdefault(sample.name, []).append((rank, sample))

    def rows_of(candidates: tuple[str, ...]) -> list[tuple[int, Sample]]:
        return next((rows[name] for name in candidates if name in rows), [])

    def set_gauge(rank: int, **gauge: float) -> None:
        gauges[rank] = replace(gauges.get(rank, EngineGauges()), **gauge)  # type: ignore[arg-type]

    for rank, sample in rows_of(names.waiting):
        value = float(sample.value)
        if 0 <= value <= _COUNT_MAX and value.is_integer():
            set_gauge(rank, waiting=int(value))
    for rank, sample in rows_of(names.usage):
        value = float(sample.value)
        if 0 <= value <= 1:
            set_gauge(rank, kv_usage=value)
    for rank, sample in rows_of(names.cache_config):
        total = _digits(sample.labels.get("num_gpu_blocks", ""), 15)
        if total:
            set_gauge(rank, total_blocks=total)
        size = _digits(sample.labels.get("block_size", ""), 5)
        if size:
            set_gauge(rank, block_size=size)
    for name in rows:
        for rank, sample in rows[name]:
            if rank in gauges and any(label in sample.labels for label in _RANK_LABELS):
                set_gauge(rank, labelled=True)
    return gauges


def _rank(labels: Mapping[str, str]) -> int | None:
    """The rank of a sample; None where it is more than any engine has."""
    text = next((labels[name] for name in _RANK_LABELS if name in labels), "0")
    rank = _digits(text, 9)
    return 0 if rank is None else rank if rank < _MOST_RANKS else None


def _digits(text: str, most: int) -> int | None:
    """The number that a label's ``most`` or fewer digits are; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None
