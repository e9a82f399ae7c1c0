"""The signals of each rank against a replica's thresholds, and why some have no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynctl.documents.thresholds import Latch, SignalRow, ThresholdValues
from dynctl.documents.workers import WorkerRow
from dynctl.sources.thresholds.effects import RankSignals, rank_signals
from router_core import REPORTED_TOKENS, UNKNOWN_BATCHED_TOKENS, ThresholdSignal

_NEXT_REPORT = "a Dynamo frontend decides again at the next load report"
_CALM_RANK = "another rank of the worker is calm: the worker still gets requests"


@dataclass(frozen=True, slots=True)
class DynamoVerdicts:
    """Which workers a Dynamo frontend refuses: it does not export that.

    ``verdicts``: worker id -> whether it refuses the worker; no entry: unknown.
    ``no_report_reason``: why the report of a worker may be unknown.
    """

    no_report_reason: str
    verdicts: Mapping[int, bool] = field(default_factory=dict)


def signal_rows(
    replica: str,
    rows: Sequence[WorkerRow],
    model: str,
    thresholds: ThresholdValues,
    dynamo: DynamoVerdicts | None = None,
) -> list[SignalRow]:
    """Every signal of every rank of ``model`` against each threshold that is set.

    ``dynamo`` None: a dynctl frontend, whose rows have the busy state. Raises UsageProblem for a
    threshold out of bounds.
    """
    return [
        _row(replica, ranked, signal, dynamo)
        for ranked in rank_signals(rows, model, thresholds)
        for signal in ranked.signals
    ]


def _row(
    replica: str, ranked: RankSignals, signal: ThresholdSignal, dynamo: DynamoVerdicts | None
) -> SignalRow:
    worker, rank = ranked.worker, ranked.rank
    if dynamo is None:
        busy: bool | None = worker.busy
        latch = _latch(signal)
        why = _why(ranked, signal, "the worker never reported it")
    else:
        busy = dynamo.verdicts.get(worker.worker_id)
        latch, why = _as_dynamo(ranked, signal, dynamo)
    return SignalRow(
        replica=replica,
        model=worker.model,
        worker=worker.name,
        worker_id=worker.worker_id,
        role=worker.role,
        dp_rank=rank.dp_rank,
        threshold=signal.threshold,
        setting=signal.setting,
        signal=signal.signal,
        value=signal.value,
        limit=signal.limit,
        over=signal.over,
        latch=latch,
        age_s=rank.load_age_s if signal.reported and signal.value is not None else None,
        acts=signal.over and ranked.judged.busy
        if busy is None
        else busy and (signal.over or latch == "latched"),
        busy=busy,
        why=why,
    )


def _latch(signal: ThresholdSignal) -> Latch:
    if not signal.reported:
        return "live"
    if signal.value is None:
        return "empty"
    return "latched" if signal.over else "open"


def _why(ranked: RankSignals, signal: ThresholdSignal, never: str) -> str:
    """Why this signal does not make the worker busy; empty where it does, or is under its limit."""
    card = ranked.worker.runtime_config
    if signal.limit is None:
        return "the card has no total_kv_blocks: decode blocks never make the worker busy"
    if signal.value is None:
        return never
    if signal.over:
        return "" if ranked.judged.busy else _CALM_RANK
    if signal.threshold.endswith("_frac") and not card.get("max_num_batched_tokens"):
        return f"the card has no max_num_batched_tokens: {UNKNOWN_BATCHED_TOKENS:,} is used"
    return ""


def _as_dynamo(
    ranked: RankSignals, signal: ThresholdSignal, dynamo: DynamoVerdicts
) -> tuple[Latch, str]:
    """The latch of a signal on a Dynamo frontend, derived from whether it refuses the worker."""
    if signal.signal == REPORTED_TOKENS:
        return "empty", "Dynamo's workers do not report it"
    why = _why(ranked, signal, dynamo.no_report_reason)
    refuses = dynamo.verdicts.get(ranked.worker.worker_id)
    if signal.limit is None or refuses is None:
        return ("not reported" if signal.reported else "live"), why
    judged = ranked.judged.busy
    if refuses and not judged and signal.reported:
        text = "refused, but no known value is over: Dynamo frees the worker at the next report"
        return "latched", text
    if not refuses and judged and signal.over:
        return ("open" if signal.reported else "live"), f"not refused yet: {_NEXT_REPORT}"
    if not signal.reported:
        return "live", why
    if signal.value is None:
        return "not reported", why
    return ("latched" if refuses and signal.over else "open"), why
