"""The simulated engine: it describes itself and its load in JSON of its own, else as vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dynctl.wire.engine_kinds.facts import (
    EngineFacts,
    own_endpoint,
    positive_count,
    short_texts,
    text_or_none,
    whole_number,
)
from dynctl.wire.engine_kinds.kind import Description, LoadPath
from dynctl.wire.engine_kinds.vllm.kind import VLLM
from dynctl.wire.engine_metrics import MetricNames

if TYPE_CHECKING:
    from dynctl.wire.engine_kinds.load import LoadReading


_NAME: Final = "simulated"


def facts_from_info(info: Mapping[str, Any], host: str) -> EngineFacts:
    """The facts in a simulated engine's ``GET /engine/info``; fields of a wrong type are left out.
    No fact where another engine answers."""
    if info.get("simulated") is not True:
        return EngineFacts()
    rows = info.get("kv_events")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    config = info.get("runtime_config")
    config = config if isinstance(config, dict) else {}
    model = text_or_none(info.get("model"))
    return EngineFacts(
        model=model,
        models=() if model is None else (model,),
        role=text_or_none(info.get("role")),
        can_prefill=info.get("can_prefill") if isinstance(info.get("can_prefill"), bool) else None,
        block_size=positive_count(info.get("block_size")),
        dp=positive_count(info.get("data_parallel_size")),
        total_blocks=positive_count(config.get("total_kv_blocks")),
        max_num_batched_tokens=positive_count(config.get("max_num_batched_tokens")),
        runtime_config=config,
        kv_events=own_endpoint(first.get("endpoint"), host),
        replay=own_endpoint(first.get("replay"), host),
        topic=text_or_none(first.get("topic")) or "",
        engine_id=text_or_none(info.get("engine_id")),
        adapters=short_texts(info.get("lora")),
        kind=_NAME,
    )


def load_from_ranks(answer: Mapping[str, Any], worker_id: int) -> LoadReading:
    """The load in a simulated engine's ``GET /load``; invalid rows are left out."""
    from dynctl.wire.engine_kinds.load import LoadReading, load_report

    rows = answer.get("ranks")
    reports, waiting = [], {}
    for row in rows if isinstance(rows, list) else ():
        report = load_report(worker_id, row)
        if report is None:
            continue
        reports.append(report)
        waits = whole_number(row.get("waiting"))
        if waits is not None:
            waiting[report.dp_rank] = waits
    return LoadReading(tuple(reports), waiting, bool(reports))


SIMULATED: Final = replace(
    VLLM,
    name=_NAME,
    label="the simulated engine",
    description=Description(("/engine/info",), facts_from_info, first=True),
    load=LoadPath("/load", load_from_ranks),
    metrics=MetricNames(),
)
