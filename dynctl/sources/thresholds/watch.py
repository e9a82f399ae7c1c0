"""Changes of thresholds and busy ranks: each replica is read at an interval.

Each replica has a thread of its own, so that a slow replica does not delay the others or the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynctl.base.errors import DynctlError, Unreachable
from dynctl.documents.thresholds import ThresholdEvent, ThresholdValues
from dynctl.sources.thresholds.effects import rank_signals
from dynctl.sources.thresholds.replicas import Replica, ThresholdReading, at_once, differing
from router_core import THRESHOLD_SETTINGS

RankKey = tuple[str, int, int]
"""``(model, worker id, rank)``."""
_GONE: Final = "the worker is gone"


@dataclass(frozen=True, slots=True)
class RankState:
    """Whether a rank is busy, and why."""

    worker: str
    busy: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica at one moment (seconds since 1970). ``error``: why it could not be read."""

    replica: Replica
    at: float
    thresholds: Mapping[str, ThresholdValues] = field(default_factory=dict)
    ranks: Mapping[RankKey, RankState] = field(default_factory=dict)
    error: DynctlError | None = None


def read_state(replica: Replica, wall: Callable[[], float] = time.time) -> ReplicaState:
    """Read a replica now; raises nothing.

    A Dynamo frontend does not export the busy state: it is computed from the load that the frontend
    counts and from the workers' reports.
    """
    try:
        thresholds = replica.holder.thresholds()
        rows = replica.workers()
        ranks = {}
        for model, values in thresholds.items():
            for rank_signal in rank_signals(rows, model, values):
                row = rank_signal.judged if replica.probe is not None else rank_signal.worker
                rank = next(it for it in row.ranks if it.dp_rank == rank_signal.rank.dp_rank)
                why = rank.busy_reasons[0] if rank.busy_reasons else "under every threshold"
                ranks[model, row.worker_id, rank.dp_rank] = RankState(row.name, rank.busy, why)
        return ReplicaState(replica, wall(), thresholds, ranks)
    except DynctlError as error:
        return ReplicaState(replica, wall(), error=error)


class Changes:
    """Turns readings into events. ``first``: the state at the start."""

    def __init__(self, first: Sequence[ReplicaState]) -> None:
        self._order = [state.replica.name for state in first]
        self._last = {state.replica.name: state for state in first}
        #: The last successful reading, kept while the replica does not answer.
        self._known = {state.replica.name: state for state in first if state.error is None}
        self._differ = {model: bool(differ) for model, differ in self._differing().items()}

    def take(self, now: ReplicaState) -> list[ThresholdEvent]:
        """The events of a reading, oldest first."""
        name = now.replica.name
        before, self._last[name] = self._last[name], now
        if now.error is not None:
            if before.error is not None:
                return []
            return [ThresholdEvent("lost", now.at, name, why=now.error.message)]
        events = [] if before.error is None else [ThresholdEvent("back", now.at, name)]
        known = self._known.get(name)
        self._known[name] = now
        if known is not None:
            events += [*_thresholds(known, now), *_ranks(known, now)]
        return events + list(self._agreement(now))

    def _differing(self) -> dict[str, dict[str, list[str]]]:
        states = [self._known[name] for name in self._order if name in self._known]
        readings = [ThresholdReading(state.replica, state.thresholds) for state in states]
        models = sorted({model for state in states for model in state.thresholds})
        return {model: differing(readings, model) for model in models}

    def _agreement(self, now: ReplicaState) -> Iterator[ThresholdEvent]:
        for model, differ in self._differing().items():
            if bool(differ) != self._differ.get(model, False):
                why = ", ".join(f"{name} ({', '.join(which)})" for name, which in differ.items())
                event = ThresholdEvent(
                    "differ" if differ else "agree", now.at, model=model, why=why
                )
                yield event
            self._differ[model] = bool(differ)


def _thresholds(before: ReplicaState, now: ReplicaState) -> Iterator[ThresholdEvent]:
    name = now.replica.name
    for model in sorted({*before.thresholds, *now.thresholds}):
        old, new = before.thresholds.get(model), now.thresholds.get(model)
        if old is None or new is None:
            yield ThresholdEvent("came" if old is None else "gone", now.at, name, model)
            continue
        for key in THRESHOLD_SETTINGS:
            if old.get(key) != new.get(key):
                yield ThresholdEvent(
                    "threshold", now.at, name, model, key, old.get(key), new.get(key)
                )


def _ranks(before: ReplicaState, now: ReplicaState) -> Iterator[ThresholdEvent]:
    for key in sorted({*before.ranks, *now.ranks}):
        old, new = before.ranks.get(key), now.ranks.get(key)
        was, is_now = old is not None and old.busy, new is not None and new.busy
        if was == is_now:
            continue
        state = new or old
        assert state is not None
        model, worker_id, rank = key
        yield ThresholdEvent(
            "busy" if is_now else "calm",
            now.at,
            now.replica.name,
            model,
            worker=state.worker,
            worker_id=worker_id,
            dp_rank=rank,
            why=state.why if new is not None else _GONE,
        )


class ThresholdWatch:
    """Reads every replica each ``every`` seconds and emits the events. A context manager.

    ``emit`` is called from other threads, with at least one event. Entering raises the error of
    the first replica where no replica answers.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        every: float,
        emit: Callable[[list[ThresholdEvent]], None],
    ) -> None:
        self._replicas = list(replicas)
        self._every = every
        self._emit = emit
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.first: list[ReplicaState] = []

    def __enter__(self) -> ThresholdWatch:
        self.first = at_once(read_state, self._replicas)
        errors = [state.error for state in self.first if state.error is not None]
        if len(errors) == len(self.first):
            raise errors[0] if errors else Unreachable("no frontend to watch")
        changes = Changes(self.first)
        lost = [
            ThresholdEvent("lost", state.at, state.replica.name, why=state.error.message)
            for state in self.first
            if state.error is not None
        ]
        if lost:
            self._emit(lost)
        for replica in self._replicas:
            arguments = (replica, changes)
            threading.Thread(target=self._follow, args=arguments, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self, replica: Replica, changes: Changes) -> None:
        while not self._ended.wait(self._every):
            state = read_state(replica)
            with self._lock:
                events = changes.take(state)
                if events and not self._ended.is_set():
                    self._emit(events)
