"""Whether thresholds are in effect: the busy state of each worker on each replica.

A dynctl frontend reports it. A Dynamo frontend is probed with dry runs: it decides again only at a
load report, and frees a worker only when that worker reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.base.errors import DynctlError
from dynctl.documents.thresholds import ThresholdValues
from dynctl.documents.workers import WorkerRow
from dynctl.sources.thresholds.effects import rank_signals
from dynctl.sources.thresholds.replicas import Replica, at_once

_FIRST_S: Final = 0.05
_LONGEST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Acting:
    """``pending``: replicas whose busy state does not match thresholds and load yet, and why.
    ``unknown``: replicas that do not show it; they are not waited for."""

    pending: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def acts(self) -> bool:
        return not self.pending


def verdicts(replica: Replica, rows: Sequence[WorkerRow], model: str) -> dict[int, bool]:
    """Worker id -> whether a Dynamo frontend refuses it now; no entry: unknown.

    A dry run runs the decode hop only, so prefill workers have no entry.
    """
    probe = replica.probe
    if probe is None:
        return {}
    probed = [row for row in rows if row.model == model and row.role != "prefill" and row.ranks]

    def refused(row: WorkerRow) -> bool | None:
        rank = row.ranks[0].dp_rank if len(row.ranks) > 1 else None
        return probe.refuses_worker(model, row.worker_id, rank)

    found = at_once(refused, probed)
    return {row.worker_id: one for row, one in zip(probed, found, strict=True) if one is not None}


def read_acting(replicas: Sequence[Replica], model: str, values: ThresholdValues) -> Acting:
    """Read every replica once. ``values``: the thresholds that were set."""
    verdicts = at_once(lambda replica: _read_one(replica, model, values), replicas)
    return Acting(
        tuple(text for verdict in verdicts for text in verdict.pending),
        tuple(text for verdict in verdicts for text in verdict.unknown),
    )


def wait_until_acting(
    replicas: Sequence[Replica],
    model: str,
    values: ThresholdValues,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Acting, float]:
    """Read again until nothing is pending, at most for ``seconds``: (last result, seconds)."""
    began = clock()
    pause = _FIRST_S
    while True:
        acting = read_acting(replicas, model, values)
        waited = clock() - began
        if acting.acts or waited >= seconds:
            return acting, waited
        sleep(min(pause, max(0.0, seconds - waited)))
        pause = min(_LONGEST_S, pause * 2)


def _read_one(replica: Replica, model: str, values: ThresholdValues) -> Acting:
    name = replica.name
    try:
        present = replica.holder.thresholds().get(model)
        if present is None:
            return Acting((f"{name}: the model is not served any more",))
        stored = [key for key, value in values.items() if present.get(key) != value]
        if stored:
            return Acting(tuple(f"{name}: {key} is {present.get(key)}" for key in stored))
        rows = [row for row in replica.workers() if row.model == model]
        judged = {
            rank_signal.worker.worker_id: rank_signal.judged
            for rank_signal in rank_signals(rows, model, present)
        }
    except DynctlError as error:
        return Acting((error.message if name in error.message else f"{name}: {error.message}",))
    if replica.probe is None:
        return Acting(tuple(_ours(name, row, judged) for row in rows if _differs(row, judged)))
    return _dynamo(name, rows, judged, verdicts(replica, rows, model))


def _differs(row: WorkerRow, judged: Mapping[int, WorkerRow]) -> bool:
    return row.worker_id in judged and row.busy != judged[row.worker_id].busy


def _ours(name: str, row: WorkerRow, judged: Mapping[int, WorkerRow]) -> str:
    return f"{name}: {row.name} is {_word(row.busy)}, not {_word(judged[row.worker_id].busy)}"


def _dynamo(
    name: str,
    rows: Sequence[WorkerRow],
    judged: Mapping[int, WorkerRow],
    refused: Mapping[int, bool],
) -> Acting:
    pending, unknown = [], []
    for row in rows:
        wanted = judged[row.worker_id].busy if row.worker_id in judged else False
        refuses = refused.get(row.worker_id)
        if refuses is None:
            unknown.append(row.name)
        elif wanted and not refuses:
            pending.append(
                f"{name}: {row.name} is not refused yet; Dynamo decides at the next load report"
            )
        elif refuses and not wanted:
            pending.append(
                f"{name}: {row.name} is still refused; Dynamo frees it at its next report"
            )
    return Acting(
        tuple(pending),
        (f"{name}: unknown whether it uses {_some(unknown)}",) if unknown else (),
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _word(busy: bool) -> str:
    return "busy" if busy else "calm"
