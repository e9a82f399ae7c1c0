"""What an engine is asked: who it is when it joins, and how full it is from then on.

Simulated engines tell both in JSON of their own. Of vLLM and SGLang the model comes from the OpenAI
API, and load from their metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dynctl.serving.engines.facts import (
    EngineFacts,
    count_of,
    facts_from_info,
    facts_from_models,
    load_report,
)
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.upstream import Upstream
from dynctl.serving.engines.worker_spec import WorkerSpec
from dynctl.wire.engine_metrics import EngineGauges, read_engine_metrics
from router_core import LoadReported, Worker


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One reading. ``waiting``: rank -> requests that wait there. ``told``: whether the engine
    says anything of its load at all."""

    reports: tuple[LoadReported, ...] = ()
    waiting: Mapping[int, int] = field(default_factory=dict)
    told: bool = False


class EngineQuestions:
    """Asks over ``upstream``; ``timeout_s`` for each answer. Silence and odd answers tell nothing;
    nothing is raised for them."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s

    async def facts(self, spec: WorkerSpec) -> EngineFacts:
        """What the engine says about itself."""
        info = await self._ask(f"{spec.url}/engine/info")
        if info is not None and info.get("simulated") is True:
            return facts_from_info(info, spec.host)
        models = await self._ask(f"{spec.url}/v1/models")
        facts = facts_from_models(models) if models is not None else EngineFacts()
        gauges = await self._gauges(spec.url)
        total = gauges[0].total_blocks if 0 in gauges else None
        return facts if total is None else replace(facts, runtime_config={"total_kv_blocks": total})

    async def simulated_load(self, url: str, worker: Worker) -> EngineLoad:
        """The load of a simulated engine."""
        load = await self._ask(f"{url}/load")
        rows = load.get("ranks") if load is not None else None
        reports, waiting = [], {}
        for row in rows if isinstance(rows, list) else ():
            report = load_report(worker.worker_id, row)
            if report is not None:
                reports.append(report)
                waits = count_of(row, "waiting")
                if waits is not None:
                    waiting[report.dp_rank] = waits
        return EngineLoad(tuple(reports), waiting, bool(reports))

    async def load(self, url: str, worker: Worker) -> EngineLoad:
        """The load of any other engine, as its metrics tell it."""
        gauges = await self._gauges(url)
        total = worker.runtime_config.total_kv_blocks
        reports = tuple(
            LoadReported(worker.worker_id, rank, kv_used_blocks=used)
            for rank, told in gauges.items()
            if rank in worker.ranks and (used := told.used_blocks(total)) is not None
        )
        waiting = {r: told.waiting for r, told in gauges.items() if told.waiting is not None}
        return EngineLoad(reports, waiting, bool(gauges))

    async def _gauges(self, url: str) -> Mapping[int, EngineGauges]:
        try:
            status, body = await self._upstream.get(f"{url}/metrics", self._timeout_s)
        except UpstreamFailure:
            return {}
        return read_engine_metrics(body) if status == 200 else {}

    async def _ask(self, url: str) -> dict[str, Any] | None:
        try:
            status, body = await self._upstream.get(url, self._timeout_s)
            answer = msgspec.json.decode(body) if status == 200 else None
        except (UpstreamFailure, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None
