"""Busy thresholds: which ranks are over one, why, and which workers routing excludes for it.

A rank is busy when ANY of three thresholds is exceeded (all comparisons strict):

- decode blocks: a signal's last value > threshold * total KV blocks, for each of the signals
  *reported active blocks*, *reported used blocks* and *blocks that this router booked*;
- prefill tokens: > an absolute number;
- prefill tokens: > floor(fraction * max_num_batched_tokens), 10,000,000 where that is unknown.

Each signal keeps its last value until the same signal is reported again: this is the decode latch
of Dynamo 1.6.1 as observed (per signal; a signal reported at or below its limit clears itself, the
other signal is not needed). A worker is busy only when all ranks of its card are; a rank that never
reported is not busy. Without a total, decode blocks never make a rank busy.

Two things differ from Dynamo on purpose. A changed threshold applies at once, in both directions:
Dynamo leaves a steady worker latched after the threshold was raised. And the router's own count
and the worker's report are separate signals: in Dynamo the last writer wins, so that a report of 0
hides load that the router booked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from router_core.config import SETTINGS, RouterConfig
from router_core.errors import ConfigError, SnapshotError
from router_core.forms import COUNT, NUMBER, SLOT, TIME, Fields, Maybe, Table
from router_core.load import ActiveSequences
from router_core.registry import WorkerRegistry
from router_core.workers import UNKNOWN_BATCHED_TOKENS, ModelRuntimeConfig

#: The thresholds; each name is also that of the setting with its default.
THRESHOLD_SETTINGS = (
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)

# The signals: counted by this router, or reported by a worker.
BOOKED_BLOCKS = "active decode blocks booked here"
REPORTED_BLOCKS = "active decode blocks reported"
REPORTED_USED = "used KV blocks reported"
BOOKED_TOKENS = "active prefill tokens"
REPORTED_TOKENS = "active prefill tokens reported"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The three thresholds of one model; None: off."""

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    @property
    def any(self) -> bool:
        return (
            self.active_decode_blocks_threshold is not None
            or self.active_prefill_tokens_threshold is not None
            or self.active_prefill_tokens_threshold_frac is not None
        )

    def with_values(self, values: Mapping[str, float | int | None]) -> Thresholds:
        """A copy with the given thresholds checked and set; raises ConfigError."""
        checked = {}
        for name, value in values.items():
            if name not in THRESHOLD_SETTINGS:
                raise ConfigError(
                    f"{name}: no such threshold; expected one of {', '.join(THRESHOLD_SETTINGS)}"
                )
            checked[name] = SETTINGS[name].check(value)
        return replace(self, **checked)

    def to_dict(self) -> dict[str, float | int | None]:
        return {name: getattr(self, name) for name in THRESHOLD_SETTINGS}

    @classmethod
    def of_config(cls, config: RouterConfig) -> Thresholds:
        return cls(**{name: getattr(config, name) for name in THRESHOLD_SETTINGS})


@dataclass(frozen=True, slots=True)
class BusyReason:
    """One threshold that one signal of a rank exceeds. ``limit`` has the unit of ``value``."""

    threshold: str
    signal: str
    value: int
    limit: float
    setting: float

    @property
    def message(self) -> str:
        if self.threshold == "active_decode_blocks_threshold":
            return (
                f"{self.value:,} {self.signal} > {self.setting:g} of the KV blocks"
                f" ({_number(self.limit)})"
            )
        return f"{self.value:,} {self.signal} > {_number(self.limit)}"


@dataclass(frozen=True, slots=True)
class ThresholdSignal:
    """One signal of a rank and the limit of one threshold for it.

    ``value`` None: never reported. ``limit`` None: unknown, so no value is above it.
    """

    threshold: str
    signal: str
    value: int | None
    limit: float | None
    setting: float

    @property
    def over(self) -> bool:
        return self.value is not None and self.limit is not None and self.value > self.limit

    @property
    def reported(self) -> bool:
        """Whether the worker reports it; otherwise this router counts it."""
        return self.signal not in (BOOKED_BLOCKS, BOOKED_TOKENS)


@dataclass(slots=True)
class Reported:
    """Last values that a rank reported, None: never. ``at``: time of the last report."""

    active_decode_blocks: int | None = None
    kv_used_blocks: int | None = None
    active_prefill_tokens: int | None = None
    at: float | None = None


_SIGNALS: Final = dict.fromkeys(
    ("active_decode_blocks", "kv_used_blocks", "active_prefill_tokens"), Maybe(COUNT)
)
_REPORT: Final = (*_SIGNALS, "at")
_FORM: Final = Fields(
    {
        "thresholds": Table(Table(Maybe(NUMBER))),
        "reported": Table(Fields({"at": Maybe(TIME)}, _SIGNALS), SLOT.high),
    }
)
"""What `BusyTracker.dump` writes."""


class BusyTracker:
    """Which ranks are over a threshold, kept as masks."""

    def __init__(self, registry: WorkerRegistry, load: ActiveSequences) -> None:
        self._registry = registry
        self._load = load
        self._thresholds: dict[str, Thresholds] = {}
        self.default = Thresholds()
        #: Whether any threshold is set.
        self.limits = False
        self.reported: list[Reported] = []
        #: Ranks over a threshold; ranks of workers with all ranks over one, which routing excludes.
        self.busy_ranks = 0
        self.mask = 0

    def grow(self, capacity: int) -> None:
        while len(self.reported) < capacity:
            self.reported.append(Reported())

    def thresholds(self, model: str) -> Thresholds:
        return self._thresholds.get(model, self.default)

    def overrides(self) -> dict[str, Thresholds]:
        """Thresholds that were set for a model, by model."""
        return dict(self._thresholds)

    def set_default(self, thresholds: Thresholds) -> None:
        """Set the thresholds of models without their own; :meth:`update_all` checks the ranks."""
        self.default = thresholds
        self._note_limits()

    def set_thresholds(self, model: str, values: Mapping[str, float | int | None]) -> None:
        """Set some thresholds of a model and check its workers again; raises ConfigError."""
        self._thresholds[model] = self.thresholds(model).with_values(values)
        self._note_limits()
        self.update_all()

    def report(
        self,
        slot: int,
        now: float,
        *,
        active_decode_blocks: int | None,
        kv_used_blocks: int | None,
        active_prefill_tokens: int | None,
    ) -> None:
        """Store the values that a rank reports; None keeps the last value."""
        row = self.reported[slot]
        row.at = now
        if active_decode_blocks is not None:
            row.active_decode_blocks = active_decode_blocks
        if kv_used_blocks is not None:
            row.kv_used_blocks = kv_used_blocks
        if active_prefill_tokens is not None:
            row.active_prefill_tokens = active_prefill_tokens
        self.update(slot)

    def update(self, slot: int) -> None:
        """Check a rank, and with it its worker, with the current values."""
        if not self.limits and not self.busy_ranks:
            return
        worker = self._registry.worker(slot)
        thresholds = self._thresholds.get(worker.model, self.default)
        bit = 1 << slot
        over = thresholds.any and self._is_over(slot, worker.runtime_config, thresholds)
        if over == bool(self.busy_ranks & bit):
            return
        self.busy_ranks ^= bit
        ranks = self._registry.mask_of((worker.worker_id,))
        if self.busy_ranks & ranks == ranks:
            self.mask |= ranks
        else:
            self.mask &= ~ranks

    def update_all(self) -> None:
        """Check every rank again, after a change of thresholds or cards."""
        self.busy_ranks = self.mask = 0
        for worker in self._registry if self.limits else ():
            for slot in self._registry.slots(worker.worker_id):
                self.update(slot)

    def forget(self, slot: int) -> None:
        """Reset the slot of a removed rank."""
        self.reported[slot] = Reported()
        self.busy_ranks &= ~(1 << slot)
        self.mask &= ~(1 << slot)

    def reasons(self, slot: int) -> tuple[BusyReason, ...]:
        """Every threshold that the rank exceeds; empty for a rank that is not busy."""
        return tuple(
            BusyReason(signal.threshold, signal.signal, signal.value, signal.limit, signal.setting)
            for signal in self.signals(slot)
            if signal.value is not None and signal.limit is not None and signal.value > signal.limit
        )

    def signals(self, slot: int) -> tuple[ThresholdSignal, ...]:
        """Every signal of a rank with the limit of every threshold that is set."""
        worker = self._registry.worker(slot)
        thresholds, config = self.thresholds(worker.model), worker.runtime_config
        signals = []
        fraction = thresholds.active_decode_blocks_threshold
        if fraction is not None:
            limit = fraction * config.total_kv_blocks if config.total_kv_blocks else None
            for signal, value in self._decode_signals(slot):
                name = "active_decode_blocks_threshold"
                signals.append(ThresholdSignal(name, signal, value, limit, fraction))
        for name, setting, most in _prefill_limits(thresholds, config):
            for signal, value in self._prefill_signals(slot):
                signals.append(ThresholdSignal(name, signal, value, most, setting))
        return tuple(signals)

    def dump(self) -> dict[str, Any]:
        """Plain data: the thresholds that were set, and the reports by slot."""
        rows = {}
        for slot, row in enumerate(self.reported):
            if row.at is not None:
                rows[str(slot)] = {
                    "active_decode_blocks": row.active_decode_blocks,
                    "kv_used_blocks": row.kv_used_blocks,
                    "active_prefill_tokens": row.active_prefill_tokens,
                    "at": row.at,
                }
        return {
            "thresholds": {model: t.to_dict() for model, t in self._thresholds.items()},
            "reported": rows,
        }

    def load_dump(self, plain: Mapping[str, Any]) -> None:
        """Restore a :meth:`dump`; the registry and the load must be restored before.

        Raises SnapshotError.
        """
        _FORM.check(plain, "busy")
        self._thresholds = {}
        for model, values in plain["thresholds"].items():
            try:
                self._thresholds[model] = Thresholds().with_values(values)
            except ConfigError as error:
                raise SnapshotError(f"busy.thresholds.{model[:40]}: {error}") from None
        for slot, row in plain["reported"].items():
            if int(slot) >= len(self.reported):
                raise SnapshotError(f"busy.reported.{slot}: slot {slot} does not exist")
            self.reported[int(slot)] = Reported(**{name: row.get(name) for name in _REPORT})
        self._note_limits()
        self.update_all()

    def _note_limits(self) -> None:
        self.limits = self.default.any or any(own.any for own in self._thresholds.values())

    def _is_over(self, slot: int, config: ModelRuntimeConfig, thresholds: Thresholds) -> bool:
        fraction = thresholds.active_decode_blocks_threshold
        if fraction is not None and config.total_kv_blocks:
            limit = fraction * config.total_kv_blocks
            if any(v is not None and v > limit for _, v in self._decode_signals(slot)):
                return True
        for _, _, limit in _prefill_limits(thresholds, config):
            if any(v is not None and v > limit for _, v in self._prefill_signals(slot)):
                return True
        return False

    def _decode_signals(self, slot: int) -> tuple[tuple[str, int | None], ...]:
        row = self.reported[slot]
        return (
            (BOOKED_BLOCKS, self._load.decode_blocks[slot]),
            (REPORTED_BLOCKS, row.active_decode_blocks),
            (REPORTED_USED, row.kv_used_blocks),
        )

    def _prefill_signals(self, slot: int) -> tuple[tuple[str, int | None], ...]:
        return (
            (BOOKED_TOKENS, self._load.prefill_tokens[slot]),
            (REPORTED_TOKENS, self.reported[slot].active_prefill_tokens),
        )


def _prefill_limits(
    thresholds: Thresholds, config: ModelRuntimeConfig
) -> list[tuple[str, float, float]]:
    """``(name, setting, limit in tokens)`` of the prefill thresholds that are set."""
    limits: list[tuple[str, float, float]] = []
    tokens = thresholds.active_prefill_tokens_threshold
    if tokens is not None:
        limits.append(("active_prefill_tokens_threshold", tokens, tokens))
    fraction = thresholds.active_prefill_tokens_threshold_frac
    if fraction is not None:
        batched = config.max_num_batched_tokens or UNKNOWN_BATCHED_TOKENS
        limit = float(math.floor(fraction * batched))
        limits.append(("active_prefill_tokens_threshold_frac", fraction, limit))
    return limits


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
