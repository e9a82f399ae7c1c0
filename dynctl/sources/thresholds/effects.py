"""The effect of busy thresholds on reported loads, computed here without setting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynctl.base.errors import UsageProblem
from dynctl.documents.workers import RankRow, WorkerRow, worker_rows
from router_core import (
    Booked,
    LoadReported,
    ModelRuntimeConfig,
    Role,
    Router,
    ThresholdSignal,
    ThresholdsSet,
    Worker,
    WorkerUpserted,
)


@dataclass(frozen=True, slots=True)
class RankSignals:
    """One rank against the thresholds. ``worker`` and ``rank``: the reported rows; ``judged``: the
    worker's row with the busy state that a dynctl router computes."""

    worker: WorkerRow
    rank: RankRow
    judged: WorkerRow
    signals: tuple[ThresholdSignal, ...]


def judged_rows(
    rows: Sequence[WorkerRow],
    model: str,
    present: Mapping[str, float | int | None],
    values: Mapping[str, float | int | None],
) -> list[WorkerRow]:
    """The workers of ``model`` as they would be with ``values`` over the ``present`` thresholds.

    A router gets the same cards and loads, so that the rule exists once, in the core. Raises
    UsageProblem for a threshold out of bounds.
    """
    return worker_rows(_judge(rows, model, {**present, **values}), 0.0)


def rank_signals(
    rows: Sequence[WorkerRow], model: str, thresholds: Mapping[str, float | int | None]
) -> list[RankSignals]:
    """Every rank of ``model`` and how each of its signals stands. Raises UsageProblem."""
    router = _judge(rows, model, thresholds)
    judged = {row.worker_id: row for row in worker_rows(router, 0.0)}
    return [
        RankSignals(
            row,
            rank,
            judged[row.worker_id],
            router.busy.signals(slot),
        )
        for row in rows
        if row.model == model
        for rank in row.ranks
        if (slot := router.registry.slot(row.worker_id, rank.dp_rank)) is not None
    ]


def _judge(
    rows: Sequence[WorkerRow], model: str, thresholds: Mapping[str, float | int | None]
) -> Router:
    router = Router()
    for row in rows:
        if row.model != model:
            continue
        card = replace(ModelRuntimeConfig.from_dict(row.runtime_config), validate=False)
        worker = Worker(row.worker_id, row.name, row.model, Role(row.role), row.block_size, card)
        router.apply(WorkerUpserted(worker), 0.0)
        for rank in row.ranks:
            key = (row.worker_id, rank.dp_rank)
            booked = Booked(
                f"{row.worker_id}.{rank.dp_rank}",
                "aggregated",
                *key,
                prefill_tokens=rank.active_prefill_tokens,
                anonymous_blocks=int(rank.active_decode_blocks),
            )
            router.apply(booked, 0.0)
            reported = rank.reported
            router.apply(
                LoadReported(
                    *key,
                    reported.active_decode_blocks,
                    reported.kv_used_blocks,
                    reported.active_prefill_tokens,
                ),
                0.0,
            )
    applied = router.apply(ThresholdsSet(model, dict(thresholds)), 0.0)
    if not applied.ok:
        raise UsageProblem(applied.message, "dynctl config show -o wide lists the bounds")
    return router
