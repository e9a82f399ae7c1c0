"""Which signals of which ranks a replica's thresholds act on, and why others have no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynctl.documents.thresholds import Latch, SignalRow
from dynctl.documents.workers import WorkerRow
from dynctl.sources.thresholds.replicas import Values
from dynctl.sources.thresholds.trial import RankStanding, standings
from router_core import REPORTED_TOKENS, UNKNOWN_BATCHED_TOKENS, ThresholdSignal

_NEXT_REPORT = "a Dynamo frontend judges again when load is reported next"
_CALM_RANK = "another rank of the worker is calm: still routed to"


@dataclass(frozen=True, slots=True)
class DynamoView:
    """What is known of a Dynamo frontend's own verdict, where rows cannot tell it.

    ``verdicts``: worker id -> whether it refuses the worker; without an entry nobody asked or it
    did not say. ``unheard``: why a report is not known that nobody heard.
    """

    unheard: str
    verdicts: Mapping[int, bool] = field(default_factory=dict)


def signal_rows(
    replica: str,
    rows: Sequence[WorkerRow],
    model: str,
    thresholds: Values,
    dynamo: DynamoView | None = None,
) -> list[SignalRow]:
    """Every signal of every rank of ``model`` against each threshold that is set.

    ``dynamo`` None: a frontend of ours, whose rows say themselves what is busy. Raises
    UsageProblem for a threshold out of bounds.
    """
    return [
        _row(replica, standing, signal, dynamo)
        for standing in standings(rows, model, thresholds)
        for signal in standing.signals
    ]


def _row(
    replica: str, standing: RankStanding, signal: ThresholdSignal, dynamo: DynamoView | None
) -> SignalRow:
    worker, rank = standing.worker, standing.rank
    if dynamo is None:
        busy: bool | None = worker.busy
        latch = _latch(signal)
        why = _why(standing, signal, "the worker never reported it")
    else:
        busy = dynamo.verdicts.get(worker.worker_id)
        latch, why = _as_dynamo(standing, signal, dynamo)
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
        acts=signal.over and standing.judged.busy
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


def _why(standing: RankStanding, signal: ThresholdSignal, never: str) -> str:
    """Why this signal does not make the worker busy; empty where it does, or only is not over."""
    told = standing.worker.runtime_config
    if signal.limit is None:
        return "the card tells no total_kv_blocks: decode blocks never make it busy"
    if signal.value is None:
        return never
    if signal.over:
        return "" if standing.judged.busy else _CALM_RANK
    if signal.threshold.endswith("_frac") and not told.get("max_num_batched_tokens"):
        return f"the card tells no max_num_batched_tokens: {UNKNOWN_BATCHED_TOKENS:,} is taken"
    return ""


def _as_dynamo(
    standing: RankStanding, signal: ThresholdSignal, dynamo: DynamoView
) -> tuple[Latch, str]:
    """What holds on a Dynamo frontend, whose latches show only in whether it refuses a worker."""
    if signal.signal == REPORTED_TOKENS:
        return "empty", "Dynamo's workers do not report it"
    why = _why(standing, signal, dynamo.unheard)
    refuses = dynamo.verdicts.get(standing.worker.worker_id)
    if signal.limit is None:
        return ("not told" if signal.reported else "live"), why
    if refuses is None:
        return ("not told" if signal.reported else "live"), why
    judged = standing.judged.busy
    if refuses and not judged and signal.reported:
        text = (
            "refused although no known value is over: Dynamo frees it when this is reported again"
        )
        return "latched", text
    if not refuses and judged and signal.over:
        return ("open" if signal.reported else "live"), f"not refused yet: {_NEXT_REPORT}"
    if not signal.reported:
        return "live", why
    if signal.value is None:
        return "not told", why
    return ("latched" if refuses and signal.over else "open"), why
