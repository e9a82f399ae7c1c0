"""How busy thresholds stand on each rank, and how that changes: rows of `thresholds`."""

from __future__ import annotations

from typing import Literal

import msgspec

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
