"""Dynamo frontends as replicas: whose load each counts, and whether it refuses a worker.

A frontend's busy verdict shows nowhere but in what it does. As seen on Dynamo 1.6.1, a dry run
that is pinned to a busy worker is refused as overloaded, and books nothing; only a frontend that
routes by kv makes dry runs, another really runs the request, so that one is never asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from dynctl.base.errors import DynctlError, UsageProblem
from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.sources.dynamo.worker_reports import WorkerReports
from dynctl.sources.frontend.client import FrontendClient
from dynctl.sources.thresholds.replicas import Replica
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics, RankLoad

#: The colon is needed: without it the request really runs.
_DRY_RUN: Final = "query_instance_id:"
#: A dry run may wait in the router's queue; then it tells nothing in time.
_PROBE_S: Final = 2.0
_OVERLOADED: Final = "Overloaded"
_NOTHING: Final = RankLoad()
_NO_PLANES: Final = "reports come over the event plane, and no discovery backend was named"


class DryRuns:
    """Asks one frontend whether it would use a worker now. ``followed``: where its workers' reports
    are heard. Raises nothing."""

    def __init__(self, frontend: DynamoFrontend, followed: WorkerReports | None = None) -> None:
        self._frontend = DynamoFrontend(frontend.url, _PROBE_S)
        self._followed = followed
        self._by_kv: bool | None = None

    def unheard(self) -> str:
        """Why the report of a worker may not be known."""
        return _NO_PLANES if self._followed is None else self._followed.unheard

    def refuses_worker(self, model: str, worker_id: int, dp_rank: int | None) -> bool | None:
        """True: the worker is busy; False: not; None: it does not say.

        ``dp_rank``: any one of a worker that has several.
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
        # The status of an overload can be configured; the type stays.
        return True if document.get("type") == _OVERLOADED else None


def dynamo_replica(
    name: str, frontend: DynamoFrontend, followed: WorkerReports | None = None, group: str = ""
) -> Replica:
    """A frontend with the load that it counts. ``followed``: the workers where planes are named;
    otherwise they are what its metrics tell of them. ``group``: see Replica."""

    def rows() -> list[WorkerRow]:
        metrics = frontend.metrics()
        if followed is not None:
            return with_gauges(followed.rows(), metrics)
        return rows_of_metrics(metrics, list(frontend.thresholds()))

    return Replica(name, frontend, rows, DryRuns(frontend, followed), group)


def replica_at(source: FrontendClient) -> Replica:
    """The frontend at an address, whoever's it is. Where nobody answers it is taken for ours, and
    says so when it is asked."""
    frontend = DynamoFrontend(source.url, source.timeout)
    try:
        kind = frontend.identify()
    except DynctlError:
        kind = "other"
    if kind == "dynamo":
        return dynamo_replica(source.url, frontend)
    return Replica(source.url, source, source.workers)


def with_gauges(rows: Sequence[WorkerRow], metrics: FrontendMetrics) -> list[WorkerRow]:
    """``rows`` with the load that one frontend counts; ranks that it does not name are idle."""
    return [replace(row, ranks=[_loaded(row, rank, metrics) for rank in row.ranks]) for row in rows]


def _loaded(row: WorkerRow, rank: RankRow, metrics: FrontendMetrics) -> RankRow:
    load = metrics.rank_loads.get((row.worker_id, rank.dp_rank), _NOTHING)
    return replace(
        rank,
        active_prefill_tokens=load.active_prefill_tokens,
        active_decode_blocks=load.active_decode_blocks,
    )


def rows_of_metrics(metrics: FrontendMetrics, models: Sequence[str]) -> list[WorkerRow]:
    """The workers as a frontend's metrics name them: by id, all with the facts of the one model.

    Raises UsageProblem where the metrics do not tell which workers are whose.
    """
    if not metrics.registered:
        return []
    if len(models) != 1:
        raise UsageProblem(
            f"the metrics do not tell which workers serve which of {', '.join(models)}",
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
        told = metrics.registered[worker_id, numbers[0]]
        rows.append(
            WorkerRow(
                name=f"{worker_id:x}",
                worker_id=worker_id,
                model=models[0],
                role=told if split and told in ("prefill", "decode") else "aggregated",
                runtime_config=_told(card, numbers),
                ranks=[RankRow(dp_rank=number) for number in numbers],
            )
        )
    return with_gauges(rows, metrics)


def _told(card: Mapping[str, int | None], ranks: Sequence[int]) -> dict[str, Any]:
    known: dict[str, Any] = {name: value for name, value in card.items() if value is not None}
    return known | {"data_parallel_start_rank": ranks[0], "data_parallel_size": len(ranks)}
