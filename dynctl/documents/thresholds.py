"""How busy thresholds stand on each rank, and how that changes: rows of `thresholds`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dynctl.documents.workers import WorkerRow

SCHEMA = 1

Latch = Literal["live", "latched", "open", "empty", "not told"]
"""``live``: counted by the frontend itself, follows at once. Of what a worker reports: ``latched``
is over its limit until the same signal is reported again, ``open`` is not, ``empty`` was never
reported; ``not told``: the frontend does not say, and nothing was heard."""


class SignalRow(msgspec.Struct, frozen=True):
    """One signal of one rank against one threshold, as one replica counts it.

    ``value`` and ``limit`` are in KV blocks or tokens, None where not known. ``age_s``: seconds
    since the rank reported anything, None for what the replica counts itself, or never.
    ``acts``: whether this keeps new requests from the worker now; ``why`` it does not, or what is
    odd about it. ``busy``: whether the replica uses the worker; None: it does not say.
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
    """Something that changed. ``at``: seconds since 1970, UTC.

    ``threshold``: a value was changed from ``before`` to ``after`` (None is off). ``busy`` and
    ``calm``: of one rank. ``lost`` and ``back``: a replica that no longer answers, and answers
    again. ``agree`` and ``differ``: the replicas, about the thresholds of a model. ``came`` and
    ``gone``: a model of a replica.
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
    """Busy thresholds of one model; None is off. ``busy`` of ``ranks`` ranks are over one."""

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None


class ReplicaThresholds(msgspec.Struct, frozen=True):
    """The thresholds of one model on one replica; None is off.

    ``differs``: those that most replicas hold otherwise. ``problem``: why the replica told nothing
    (then there is no model), or does not serve the model.
    """

    replica: str
    model: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    differs: list[str] = []
    problem: str = ""


class ThresholdList(msgspec.Struct, frozen=True):
    """A row a replica and model. ``agree``: whether all that answered hold the same.

    ``signals`` (None: not asked for): how each rank stands against them. ``notes``: what could not
    be known; whole sentences.
    """

    source: str
    thresholds: list[ReplicaThresholds] = []
    agree: bool = True
    signals: list[SignalRow] | None = None
    notes: list[str] = []
    kind: str = "ThresholdList"
    schema: int = SCHEMA


class RankEffect(msgspec.Struct, frozen=True):
    """What a threshold change does to one rank, by the load that ``replica`` counts. ``reasons``:
    what it is over afterwards."""

    worker: str
    worker_id: int
    dp_rank: int
    before: bool
    after: bool
    worker_busy: bool
    reasons: list[str] = []
    replica: str = ""


class ReplicaChange(msgspec.Struct, frozen=True):
    """What became of one replica. ``state``: set, failed, set back (as before, because another one
    failed), left over (it could not be set back), or tried (a dry run)."""

    replica: str
    state: str
    before: ModelThresholds | None = None
    after: ModelThresholds | None = None
    problem: str = ""


class Waited(msgspec.Struct, frozen=True):
    """Whether the thresholds act and are not only stored. ``pending``: where they do not yet;
    ``untold``: where nobody says."""

    seconds: float
    acts: bool
    pending: list[str] = []
    untold: list[str] = []


class ThresholdChange(msgspec.Struct, frozen=True):
    """Before and after, on the first replica. ``applied`` is False for a dry run, and where nothing
    stayed set.

    ``agree``: whether all replicas hold the same afterwards. ``waited`` None: nobody asked.
    """

    source: str
    before: ModelThresholds
    after: ModelThresholds
    applied: bool
    ranks: list[RankEffect] = []
    replicas: list[ReplicaChange] = []
    agree: bool = True
    waited: Waited | None = None
    notes: list[str] = []
    kind: str = "ThresholdChange"
    schema: int = SCHEMA


def rank_effects(
    before: Sequence[WorkerRow], after: Sequence[WorkerRow], replica: str = ""
) -> list[RankEffect]:
    """What becomes of each rank: its state now, and under the thresholds of ``after``."""
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
