"""The thresholds of all replicas in one document, for `thresholds get` and bundles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynctl.base.errors import DynctlError
from dynctl.documents.thresholds import ReplicaThresholds, SignalRow, ThresholdList
from dynctl.sources.query import choose_model
from dynctl.sources.thresholds.replicas import (
    Replica,
    ThresholdReading,
    differing,
    read_all,
    serving,
)
from dynctl.sources.thresholds.signals import DynamoVerdicts, signal_rows
from dynctl.sources.thresholds.verdicts import verdicts


def threshold_list(
    title: str,
    replicas: Sequence[Replica],
    model: str | None,
    *,
    signals: bool,
    ask: bool = False,
) -> tuple[ThresholdList, bool]:
    """The thresholds of the replicas, and whether any replica does not answer.

    Raises the error of the first replica if none answers.
    """
    readings = read_all(replicas)
    models = models_of(readings)
    if model is not None:
        models = [choose_model(model, models)]
    rows, agree = [], True
    for name in models:
        apart = differing(readings, name)
        agree = agree and not apart
        members = [reading for group in serving(readings, name).values() for reading in group]
        for reading in members:
            held = reading.thresholds.get(name)
            if reading.error is None and held is None:
                absent = "it does not serve the model"
                rows.append(ReplicaThresholds(reading.replica.name, name, problem=absent))
            elif held is not None:
                differs = apart.get(reading.replica.name, [])
                values: dict[str, Any] = dict(held)
                row = ReplicaThresholds(reading.replica.name, name, **values, differs=differs)
                rows.append(row)
    for reading in readings:
        if reading.error is not None:
            rows.append(ReplicaThresholds(reading.replica.name, problem=reading.error.message))
    rank_rows, notes = _signals(readings, models, ask=ask) if signals else (None, [])
    silent = any(reading.error is not None for reading in readings)
    return ThresholdList(title, rows, agree, rank_rows, notes), silent


def _signals(
    readings: Sequence[ThresholdReading], models: Sequence[str], *, ask: bool
) -> tuple[list[SignalRow], list[str]]:
    """The signals of each rank on each replica that answers, and notes on what is unknown."""
    rank_rows: list[SignalRow] = []
    notes: list[str] = []
    for reading in readings:
        replica, probe = reading.replica, reading.replica.probe
        if reading.error is not None:
            continue
        try:
            rows = replica.workers()
            for model in (name for name in models if name in reading.thresholds):
                view = None
                if probe is not None:
                    tried = verdicts(replica, rows, model) if ask else {}
                    view = DynamoVerdicts(probe.no_report_reason(), tried)
                held = reading.thresholds[model]
                rank_rows += signal_rows(replica.name, rows, model, held, view)
        except DynctlError as error:
            notes.append(f"{replica.name}: workers unknown: {error.message}")
            continue
        if probe is not None and not rows:
            notes.append(f"{replica.name} lists no workers: not in kv mode, or it has none")
    if not ask and any(row.busy is None for row in rank_rows):
        notes.append(
            "a Dynamo frontend does not report which workers it refuses: effects are derived from "
            "the known load; --ask finds out with dry runs"
        )
    return rank_rows, notes


def models_of(readings: Sequence[ThresholdReading]) -> list[str]:
    """The models that any replica serves; raises the first error if none answers."""
    errors = [reading.error for reading in readings if reading.error is not None]
    if errors and len(errors) == len(readings):
        raise errors[0]
    return sorted({model for reading in readings for model in reading.thresholds})
