"""Queue length, KV cache usage and cache configuration of an engine, from its Prometheus metrics.

The names are those of vLLM 0.6 to 0.32 (``vllm:cache_config_info`` as observed with 0.32) and of
SGLang 0.4 and 0.5 (0.5.23 as observed, older ones from their documentation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dynctl.wire.prometheus_text import Sample, read_samples

#: No engine's answer is larger.
MAX_BYTES: Final = 8 * 1024 * 1024

#: Of each tuple the first name that occurs counts.
_WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_BLOCKS: Final = ("vllm:cache_config_info",)
_WANTED: Final = frozenset((*_WAITING, *_USAGE, *_BLOCKS))
_RANK_LABELS: Final = ("engine", "dp_rank")
_MOST_RANKS: Final = 1024
_COUNT_MAX: Final = 2**53


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


def read_engine_metrics(body: bytes) -> Mapping[int, EngineGauges]:
    """The gauges of each rank; a line without a rank belongs to rank 0. Bad lines are skipped."""
    found: dict[int, EngineGauges] = {}
    rows: dict[str, list[tuple[int, Sample]]] = {}
    for sample in read_samples(body, _WANTED, max_bytes=MAX_BYTES, strict=False):
        rank = _rank(sample.labels)
        if rank is not None:
            rows.setdefault(sample.name, []).append((rank, sample))

    def rows_of(names: tuple[str, ...]) -> list[tuple[int, Sample]]:
        return next((rows[name] for name in names if name in rows), [])

    def set_gauge(rank: int, **gauge: float) -> None:
        found[rank] = replace(found.get(rank, EngineGauges()), **gauge)  # type: ignore[arg-type]

    for rank, sample in rows_of(_WAITING):
        value = float(sample.value)
        if 0 <= value <= _COUNT_MAX and value.is_integer():
            set_gauge(rank, waiting=int(value))
    for rank, sample in rows_of(_USAGE):
        value = float(sample.value)
        if 0 <= value <= 1:
            set_gauge(rank, kv_usage=value)
    for rank, sample in rows_of(_BLOCKS):
        total = _digits(sample.labels.get("num_gpu_blocks", ""), 15)
        if total:
            set_gauge(rank, total_blocks=total)
        size = _digits(sample.labels.get("block_size", ""), 5)
        if size:
            set_gauge(rank, block_size=size)
    for name in rows:
        for rank, sample in rows[name]:
            if rank in found and any(label in sample.labels for label in _RANK_LABELS):
                set_gauge(rank, labelled=True)
    return found


def _rank(labels: Mapping[str, str]) -> int | None:
    """The rank of a sample; None where it is more than any engine has."""
    text = next((labels[name] for name in _RANK_LABELS if name in labels), "0")
    rank = _digits(text, 9)
    return 0 if rank is None else rank if rank < _MOST_RANKS else None


def _digits(text: str, most: int) -> int | None:
    """The number that a label's ``most`` or fewer digits are; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None
