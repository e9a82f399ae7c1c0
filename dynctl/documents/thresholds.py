"""Busy thresholds: their values per replica, the signals of each rank, and changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from dynctl.documents.workers import WorkerRow

SCHEMA = 1

Thresholds = dict[str, float | int | None]
"""Threshold -> value; None: off."""
ThresholdValues = Mapping[str, float | int | None]
"""Thresholds to set, by name; None switches one off."""

Latch = Literal["live", "latched", "open", "empty", "not reported"]
"""How a signal is held. ``live``: counted by the frontend itself, never out of date. Of what a
worker reports: ``latched`` is over its limit until the next report of the same signal, ``open`` is
not over it, ``empty`` was never reported; ``not reported``: the frontend does not export it, and no
report was received."""


class SignalRow(msgspec.Struct, frozen=True):
    """One signal of one rank against one threshold, as one replica counts it.

    ``value`` and ``limit`` are in KV blocks or tokens, None where unknown. ``age_s``: seconds
    since the last report of the rank, None for signals that the replica counts itself and for
    ranks without a report. ``acts``: whether the signal keeps new requests from the worker now;
    ``why``: why it does not, or what is unusual. ``busy``: whether the replica considers the
    worker busy; None where unknown.
    """

    replica: str
    model: str
    worker: str
    worker_id: int
    role: str
    dp_rank: int
    threshold: str
    setting: float
    signal: str
    value: int | None
    limit: float | None
    over: bool
    latch: Latch
    age_s: float | None
    acts: bool
    busy: bool | None
    why: str = ""


class ThresholdEvent(msgspec.Struct, frozen=True):
    """One change. ``at``: seconds since 1970, UTC.

    ``threshold``: a value changed from ``before`` to ``after`` (None is off). ``busy`` and
    ``calm``: of one rank. ``lost`` and ``back``: a replica stopped answering, or answers again.
    ``agree`` and ``differ``: the thresholds of a model on the replicas. ``came`` and ``gone``: a
    model of a replica.
    """

    event: Literal["threshold", "busy", "calm", "lost", "back", "differ", "agree", "came", "gone"]
    at: float
    replica: str = ""
    model: str | None = None
    threshold: str | None = None
    before: float | None = None
    after: float | None = None
    worker: str | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    why: str = ""
    kind: str = "ThresholdEvent"


class ModelThresholds(msgspec.Struct, frozen=True):
    """Busy thresholds of one model, a row of ``/busy_threshold``; None is off."""

    model: str
    active_decode_blocks_threshold: float | int | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | int | None = None


class BusyThresholdList(msgspec.Struct, frozen=True):
    """The answer of ``GET /busy_threshold``."""

    thresholds: list[ModelThresholds]


class ReplicaThresholds(msgspec.Struct, frozen=True):
    """The thresholds of one model on one replica; None is off.

    ``differs``: thresholds whose value differs from that of most replicas. ``problem``: why the
    thresholds could not be read (``model`` is then None), or that the replica does not serve the
    model.
    """

    replica: str
    model: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    differs: list[str] = []
    problem: str = ""


class ThresholdList(msgspec.Struct, frozen=True):
    """One row per replica and model. ``agree``: all replicas that answered have the same values.

    ``signals``: the signals of each rank, None where not requested. ``notes``: sentences about
    what is unknown.
    """

    source: str
    thresholds: list[ReplicaThresholds] = []
    agree: bool = True
    signals: list[SignalRow] | None = None
    notes: list[str] = []
    kind: str = "ThresholdList"
    schema: int = SCHEMA


class RankEffect(msgspec.Struct, frozen=True):
    """The effect of a threshold change on one rank, by the load that ``replica`` counts.

    ``before`` and ``after``: whether it is busy; ``reasons``: the thresholds that it exceeds then.
    """

    worker: str
    worker_id: int
    dp_rank: int
    before: bool
    after: bool
    worker_busy: bool
    reasons: list[str] = []
    replica: str = ""


class ReplicaChange(msgspec.Struct, frozen=True):
    """The result of a change on one replica.

    ``state``: set, failed, set back (restored because another replica failed), left over (restoring
    failed, or another operator's value is there and stays), or tried (a dry run).
    """

    replica: str
    state: str
    before: ModelThresholds | None = None
    after: ModelThresholds | None = None
    problem: str = ""


class Waited(msgspec.Struct, frozen=True):
    """Whether the thresholds are in effect, after ``seconds``.

    ``pending``: where they are not yet in effect; ``untold``: where this is unknown.
    """

    seconds: float
    acts: bool
    pending: list[str] = []
    untold: list[str] = []


CanaryState = Literal["held", "breached", "unproven", "lost", "changed", "interrupted"]
"""How the watching of a canary ended. ``held``: every condition was measured and never breached;
``unproven``: there were too few requests to know; ``lost``: a replica stopped answering;
``changed``: a replica restarted, or another operator set its thresholds."""


class CanaryCondition(msgspec.Struct, frozen=True):
    """One condition of a canary. ``state``: held, breached or unknown.

    ``value`` and ``limit``: a share (0..1) or seconds; ``value`` None: unknown. ``requests``: those
    that it was measured on.
    """

    condition: str
    state: Literal["held", "breached", "unknown"]
    value: float | None
    limit: float
    requests: int


class CanaryVerdict(msgspec.Struct, frozen=True):
    """How a canary of the thresholds ``values`` ended after ``seconds``; they stayed only where
    ``kept``."""

    state: CanaryState
    seconds: float
    why: str
    conditions: list[CanaryCondition]
    values: dict[str, float | int | None]
    kept: bool


class ThresholdChange(msgspec.Struct, frozen=True):
    """The values before and after a change, on the first replica.

    ``applied`` is False for a dry run, and where no value stayed set. ``agree``: all replicas have
    the same values afterwards. ``waited`` is None without --wait, ``canary`` without --canary.
    """

    source: str
    before: ModelThresholds
    after: ModelThresholds
    applied: bool
    ranks: list[RankEffect] = []
    replicas: list[ReplicaChange] = []
    agree: bool = True
    waited: Waited | None = None
    canary: CanaryVerdict | None = None
    notes: list[str] = []
    kind: str = "ThresholdChange"
    schema: int = SCHEMA


def rank_effects(
    before: Sequence[WorkerRow], after: Sequence[WorkerRow], replica: str = ""
) -> list[RankEffect]:
    """The state of each rank now, and under the thresholds of ``after``."""
    was = {(row.worker_id, rank.dp_rank): rank.busy for row in before for rank in row.ranks}
    return [
        RankEffect(
            worker=row.name,
            worker_id=row.worker_id,
            dp_rank=rank.dp_rank,
            before=was.get((row.worker_id, rank.dp_rank), False),
            after=rank.busy,
            worker_busy=row.busy,
            reasons=rank.busy_reasons,
            replica=replica,
        )
        for row in after
        for rank in row.ranks
    ]
