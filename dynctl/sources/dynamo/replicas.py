"""Dynamo frontends as replicas: the load that each counts, and whether it refuses a worker.

A frontend does not export which workers are busy. On Dynamo 1.6.1 a dry run that is pinned to a
busy worker is refused as overloaded, and books nothing. Only frontends with router mode kv make
dry runs; others run the request, so they are never probed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from dynctl.base.errors import DynctlError, UsageProblem
from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.sources.client import FrontendClient
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.worker_reports import WorkerReports
from dynctl.sources.thresholds.replicas import Replica
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, RankLoad

#: The colon is needed: without it the request runs.
_DRY_RUN: Final = "query_instance_id:"
#: A dry run may wait in the router's queue; then the result stays unknown.
_PROBE_S: Final = 2.0
_OVERLOADED: Final = "Overloaded"
_IDLE: Final = RankLoad()
_NO_PLANES: Final = "load reports need a discovery backend, and none is set"


class DryRuns:
    """Probes whether a frontend uses a worker. ``reports``: of its workers. Raises nothing."""

    def __init__(self, frontend: DynamoFrontend, reports: WorkerReports | None = None) -> None:
        self._frontend = DynamoFrontend(frontend.url, _PROBE_S)
        self._reports = reports
        self._by_kv: bool | None = None

    def no_report_reason(self) -> str:
        """Why the report of a worker may be unknown."""
        return _NO_PLANES if self._reports is None else self._reports.no_report_reason

    def refuses_worker(self, model: str, worker_id: int, dp_rank: int | None) -> bool | None:
        """True: the worker is busy; False: not; None: unknown.

        ``dp_rank``: any rank of a worker with several.
        """
        pin: dict[str, Any] = {"annotations": [_DRY_RUN], "backend_instance_id": worker_id}
        if dp_rank is not None:
            pin["dp_rank"] = dp_rank
        try:
            if self._by_kv is None:
                self._by_kv = self._frontend.metrics().kv_routing is True
            if not self._by_kv:
                return None
            status, document = self._frontend.chat(model, "?", pin)
        except DynctlError:
            return None
        if status == 200:
            return False
        # The status of an overload can be configured, the type cannot.
        return True if document.get("type") == _OVERLOADED else None


def dynamo_replica(
    name: str, frontend: DynamoFrontend, reports: WorkerReports | None = None, group: str = ""
) -> Replica:
    """A frontend with the load that it counts. ``reports``: the workers of the planes; None: the
    workers in its metrics. ``group``: see Replica."""

    def rows() -> list[WorkerRow]:
        metrics = frontend.metrics()
        if reports is not None:
            return with_gauges(reports.rows(), metrics)
        return rows_of_metrics(metrics, list(frontend.thresholds()))

    return Replica(name, frontend, rows, DryRuns(frontend, reports), group, frontend.metrics_body)


def replica_at(source: FrontendClient) -> Replica:
    """The frontend at an address: Dynamo's, or ours. Where nothing answers it counts as ours, and
    its first request fails."""
    frontend = DynamoFrontend(source.url, source.timeout)
    try:
        kind = frontend.identify()
    except DynctlError:
        kind = "other"
    if kind == "dynamo":
        return dynamo_replica(source.url, frontend)
    return Replica(source.url, source, source.workers, metrics=source.metrics_body)


def with_gauges(rows: Sequence[WorkerRow], metrics: FrontendMetrics) -> list[WorkerRow]:
    """``rows`` with the load that one frontend counts; ranks without a gauge are idle."""
    return [
        replace(row, ranks=[_with_load(row, rank, metrics) for rank in row.ranks]) for row in rows
    ]


def _with_load(row: WorkerRow, rank: RankRow, metrics: FrontendMetrics) -> RankRow:
    load = metrics.rank_loads.get((row.worker_id, rank.dp_rank), _IDLE)
    return replace(
        rank,
        active_prefill_tokens=load.active_prefill_tokens,
        active_decode_blocks=load.active_decode_blocks,
    )


def rows_of_metrics(metrics: FrontendMetrics, models: Sequence[str]) -> list[WorkerRow]:
    """The workers in a frontend's metrics, named by their ids, with the facts of the only model.

    Raises UsageProblem where several models are served: the metrics do not show their workers.
    """
    if not metrics.registered:
        return []
    if len(models) != 1:
        raise UsageProblem(
            f"the metrics do not show which workers serve which of {', '.join(models)}",
            "name the deployment's discovery backend too: --discovery etcd --etcd-endpoints ..",
        )
    facts = metrics.models.get(models[0])
    card = {
        "total_kv_blocks": facts.total_kv_blocks if facts else None,
        "max_num_batched_tokens": facts.max_num_batched_tokens if facts else None,
    }
    ranks: dict[int, list[int]] = {}
    for worker_id, dp_rank in sorted(metrics.registered):
        ranks.setdefault(worker_id, []).append(dp_rank)
    split = "prefill" in metrics.registered.values()
    rows = []
    for worker_id, numbers in ranks.items():
        role = metrics.registered[worker_id, numbers[0]]
        rows.append(
            WorkerRow(
                name=f"{worker_id:x}",
                worker_id=worker_id,
                model=models[0],
                role=role if split and role in ("prefill", "decode") else "aggregated",
                runtime_config=_card(card, numbers),
                ranks=[RankRow(dp_rank=number) for number in numbers],
            )
        )
    return with_gauges(rows, metrics)


def _card(card: Mapping[str, int | None], ranks: Sequence[int]) -> dict[str, Any]:
    known: dict[str, Any] = {name: value for name, value in card.items() if value is not None}
    return known | {"data_parallel_start_rank": ranks[0], "data_parallel_size": len(ranks)}
