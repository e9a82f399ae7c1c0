"""The simulated engine: ``GET /engine/info`` and ``GET /load``."""

from __future__ import annotations

from typing import Any

import msgspec


class EventEndpoints(msgspec.Struct, frozen=True):
    """The KV event sockets of one rank. ``next_seq``: the number of its next batch."""

    dp_rank: int
    endpoint: str
    replay: str | None
    topic: str
    next_seq: int


class Bootstrap(msgspec.Struct, frozen=True):
    """Where decode engines pull KV cache from."""

    host: str
    port: int


class EngineInfo(msgspec.Struct, frozen=True):
    """The identity and settings of an engine. ``engine_id`` changes with every restart."""

    name: str
    engine_id: str
    model: str
    lora: list[str]
    role: str
    can_prefill: bool
    simulated: bool
    block_size: int
    data_parallel_size: int
    runtime_config: dict[str, Any]
    kv_events: list[EventEndpoints]
    bootstrap: Bootstrap | None


class EngineRankLoad(msgspec.Struct, frozen=True):
    """The load of one rank: tokens, KV blocks and requests."""

    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int
    kv_used_blocks: int
    kv_cached_blocks: int
    kv_total_blocks: int
    running: int
    waiting: int


class EngineLoad(msgspec.Struct, frozen=True):
    """Totals over the ranks, then each rank. ``held_handoffs``: KV cache kept for decode."""

    active_prefill_tokens: int
    active_decode_blocks: int
    kv_used_blocks: int
    kv_cached_blocks: int
    kv_total_blocks: int
    running: int
    waiting: int
    held_handoffs: int
    ranks: list[EngineRankLoad]


def engine_load(ranks: list[EngineRankLoad], *, held_handoffs: int) -> EngineLoad:
    """The load of an engine with these ranks."""
    totals = {
        name: sum(getattr(rank, name) for rank in ranks)
        for name in EngineRankLoad.__struct_fields__
        if name != "dp_rank"
    }
    return EngineLoad(**totals, held_handoffs=held_handoffs, ranks=ranks)
