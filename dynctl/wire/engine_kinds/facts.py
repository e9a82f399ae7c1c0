"""Facts about an engine and its load, as its responses have them: pure readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from dynctl.wire.engine_metrics import EngineGauges

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
WILDCARD: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - recognised, never bound
#: Sums of the numbers of many engines stay below 64 bits.
_COUNT_MAX: Final = 2**40


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that an engine reports over HTTP; empty where it reports nothing.

    ``models`` are all names of its model, the first is ``model``. ``dp`` counts data-parallel
    ranks, from ``start_rank`` on. ``total_blocks`` are those of each rank. ``engine_id`` changes
    with every restart of the process, where the engine has one. ``adapters`` are the names of LoRA
    adapters that it serves. ``kind`` is the name of its kind, where it describes itself.
    """

    model: str | None = None
    models: tuple[str, ...] = ()
    role: str | None = None
    can_prefill: bool | None = None
    block_size: int | None = None
    dp: int | None = None
    start_rank: int | None = None
    total_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    runtime_config: Mapping[str, Any] = field(default_factory=dict)
    kv_events: str | None = None
    replay: str | None = None
    topic: str = ""
    bootstrap: str | None = None
    engine_id: str | None = None
    context_length: int | None = None
    adapters: tuple[str, ...] = ()
    kind: str | None = None

    def or_else(self, other: EngineFacts) -> EngineFacts:
        """These facts, with those of ``other`` where nothing is reported."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        reported = {name: value for name, value in own.items() if value not in (None, "", (), {})}
        return replace(other, **reported)


def facts_from_models(answer: Mapping[str, Any]) -> EngineFacts:
    """The facts in an OpenAI ``GET /v1/models``: the model with all its names, its length if
    reported, and its LoRA adapters (vLLM: the rows with a parent)."""
    rows = answer.get("data")
    rows = [row for row in rows[:1024] if isinstance(row, dict)] if isinstance(rows, list) else []
    adapters = [row for row in rows if text_or_none(row.get("parent")) not in (None, row.get("id"))]
    bases = [row for row in rows if row not in adapters]
    names = short_texts([row.get("id") for row in bases])
    return EngineFacts(
        model=names[0] if names else None,
        models=names,
        context_length=positive_count(bases[0].get("max_model_len")) if bases else None,
        adapters=short_texts([row.get("id") for row in adapters]) if names else (),
    )


def facts_from_gauges(gauges: Mapping[int, EngineGauges]) -> EngineFacts:
    """The facts in an engine's metrics (vLLM): block size, blocks of a rank, and the ranks.

    Where ranks differ in their blocks, the smallest number counts. Ranks count only if labels name
    them and they have no gap.
    """
    ranks = sorted(rank for rank, gauge in gauges.items() if gauge.labelled)
    whole = bool(ranks) and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    totals = [gauge.total_blocks for gauge in gauges.values() if gauge.total_blocks]
    sizes = {gauge.block_size for gauge in gauges.values() if gauge.block_size}
    return EngineFacts(
        block_size=sizes.pop() if len(sizes) == 1 else None,
        dp=len(ranks) if whole else None,
        start_rank=ranks[0] if whole else None,
        total_blocks=min(totals) if totals else None,
    )


def own_endpoint(endpoint: object, host: str) -> str | None:
    """A KV-event endpoint on the worker's own host: an engine must not make the frontend connect to
    another one. None for any other value."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    name = endpoint[len("tcp://") :].rpartition(":")[0]
    local = name in _LOOPBACK and host in _LOOPBACK
    return endpoint if name == host or name in WILDCARD or local else None


def text_or_none(value: object) -> str | None:
    """A text that is not empty."""
    return value if isinstance(value, str) and value else None


def short_texts(values: object) -> tuple[str, ...]:
    """The different texts of 1 to 256 characters in the first 1,024 values of a list."""
    if not isinstance(values, list):
        return ()
    texts = (value for value in values[:1024] if isinstance(value, str) and 0 < len(value) <= 256)
    return tuple(dict.fromkeys(texts))


def positive_count(value: object) -> int | None:
    """A whole number from 1; None for any other value."""
    return whole_number(value) or None


def whole_number(value: object) -> int | None:
    """A whole number from 0; None for any other value, and for one that no engine has."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _COUNT_MAX else None
