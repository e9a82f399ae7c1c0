"""Whether thresholds act, and are not only stored: each replica's verdict on each worker.

A frontend of ours tells who is busy. A Dynamo frontend is asked with dry runs, since it judges
again only when load is reported, and frees a worker only when the worker reports again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.base.errors import DynctlError
from dynctl.documents.workers import WorkerRow
from dynctl.sources.thresholds.replicas import Replica, Values, at_once
from dynctl.sources.thresholds.trial import standings

_FIRST_S: Final = 0.05
_LONGEST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Acting:
    """``pending``: where the verdict is another one than the thresholds' and the load's, and why.
    ``untold``: where nobody says; nothing is waited for there."""

    pending: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()

    @property
    def acts(self) -> bool:
        return not self.pending


def verdicts(replica: Replica, rows: Sequence[WorkerRow], model: str) -> dict[int, bool]:
    """Worker id -> whether a Dynamo frontend refuses it now; without entry where it does not say.

    A dry run runs the decode hop only, so nothing is told of prefill workers.
    """
    dynamo = replica.dynamo
    if dynamo is None:
        return {}
    asked = [row for row in rows if row.model == model and row.role != "prefill" and row.ranks]

    def ask(row: WorkerRow) -> bool | None:
        rank = row.ranks[0].dp_rank if len(row.ranks) > 1 else None
        return dynamo.refuses_worker(model, row.worker_id, rank)

    told = at_once(ask, asked)
    return {row.worker_id: one for row, one in zip(asked, told, strict=True) if one is not None}


def look(replicas: Sequence[Replica], model: str, values: Values) -> Acting:
    """Ask every replica once. ``values``: what was set."""
    looks = at_once(lambda replica: _look(replica, model, values), replicas)
    return Acting(
        tuple(text for one in looks for text in one.pending),
        tuple(text for one in looks for text in one.untold),
    )


def wait_until_acting(
    replicas: Sequence[Replica],
    model: str,
    values: Values,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Acting, float]:
    """Look again until nothing is pending, at most for ``seconds``: (the last look, seconds)."""
    began = clock()
    pause = _FIRST_S
    while True:
        found = look(replicas, model, values)
        waited = clock() - began
        if found.acts or waited >= seconds:
            return found, waited
        sleep(min(pause, max(0.0, seconds - waited)))
        pause = min(_LONGEST_S, pause * 2)


def _look(replica: Replica, model: str, values: Values) -> Acting:
    name = replica.name
    try:
        present = replica.holder.thresholds().get(model)
        if present is None:
            return Acting((f"{name}: it serves the model no more",))
        stored = [key for key, value in values.items() if present.get(key) != value]
        if stored:
            return Acting(tuple(f"{name}: {key} is {present.get(key)}" for key in stored))
        rows = [row for row in replica.workers() if row.model == model]
        judged = {one.worker.worker_id: one.judged for one in standings(rows, model, present)}
    except DynctlError as error:
        return Acting((error.message if name in error.message else f"{name}: {error.message}",))
    if replica.dynamo is None:
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
    told: Mapping[int, bool],
) -> Acting:
    pending, silent = [], []
    for row in rows:
        wanted = judged[row.worker_id].busy if row.worker_id in judged else False
        refuses = told.get(row.worker_id)
        if refuses is None:
            silent.append(row.name)
        elif wanted and not refuses:
            pending.append(
                f"{name}: {row.name} is not refused yet; Dynamo judges at the next load report"
            )
        elif refuses and not wanted:
            pending.append(
                f"{name}: {row.name} is still refused; Dynamo frees it when it reports again"
            )
    untold = (f"{name}: it does not say whether it uses {_some(silent)}",) if silent else ()
    return Acting(tuple(pending), untold)


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _word(busy: bool) -> str:
    return "busy" if busy else "calm"
