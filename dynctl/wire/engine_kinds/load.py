"""The load that an engine reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynctl.wire.engine_kinds.facts import whole_number
from router_core import LoadReported


@dataclass(frozen=True, slots=True)
class LoadReading:
    """One reading. ``waiting``: rank -> requests that wait there. ``reported``: whether the engine
    reports any load."""

    reports: tuple[LoadReported, ...] = ()
    waiting: Mapping[int, int] = field(default_factory=dict)
    reported: bool = False


def load_report(worker_id: int, row: object) -> LoadReported | None:
    """A rank's load from a row of ``GET /load``; None for an invalid row."""
    if not isinstance(row, dict):
        return None

    rank = whole_number(row.get("dp_rank"))
    if rank is None:
        return None
    return LoadReported(
        worker_id,
        rank,
        active_decode_blocks=whole_number(row.get("active_decode_blocks")),
        kv_used_blocks=whole_number(row.get("kv_used_blocks")),
        active_prefill_tokens=whole_number(row.get("active_prefill_tokens")),
    )
