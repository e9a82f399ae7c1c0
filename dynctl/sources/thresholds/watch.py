"""What changes about thresholds and busy ranks: each replica looked at again and again.

Every replica is followed by a thread of its own, so that one which is slow holds up none of the
others, and an end never waits for an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynctl.base.errors import DynctlError, Unreachable
from dynctl.documents.thresholds import ThresholdEvent
from dynctl.sources.thresholds.replicas import Reading, Replica, Values, at_once, differing
from dynctl.sources.thresholds.trial import standings
from router_core import THRESHOLD_SETTINGS

RankKey = tuple[str, int, int]
"""``(model, worker id, rank)``."""
_GONE: Final = "the worker is gone"


@dataclass(frozen=True, slots=True)
class RankState:
    """Whether a rank is busy, and by what."""

    worker: str
    busy: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """One replica at one moment (seconds since 1970). ``error``: why nothing is known."""

    replica: Replica
    at: float
    thresholds: Mapping[str, Values] = field(default_factory=dict)
    ranks: Mapping[RankKey, RankState] = field(default_factory=dict)
    error: DynctlError | None = None


def look(replica: Replica, wall: Callable[[], float] = time.time) -> Look:
    """Read a replica now; raises nothing.

    What a Dynamo frontend does not tell is judged by our rule, from the load that it counts and
    the reports that were heard.
    """
    try:
        thresholds = replica.holder.thresholds()
        rows = replica.workers()
        ranks = {}
        for model, values in thresholds.items():
            for one in standings(rows, model, values):
                row = one.judged if replica.dynamo is not None else one.worker
                rank = next(it for it in row.ranks if it.dp_rank == one.rank.dp_rank)
                why = rank.busy_reasons[0] if rank.busy_reasons else "under every threshold"
                ranks[model, row.worker_id, rank.dp_rank] = RankState(row.name, rank.busy, why)
        return Look(replica, wall(), thresholds, ranks)
    except DynctlError as error:
        return Look(replica, wall(), error=error)


class Changes:
    """Turns looks into events. ``first``: how it was when watching began."""

    def __init__(self, first: Sequence[Look]) -> None:
        self._order = [one.replica.name for one in first]
        self._last = {one.replica.name: one for one in first}
        #: What a replica told last, kept while it does not answer.
        self._known = {one.replica.name: one for one in first if one.error is None}
        self._apart = {model: bool(differ) for model, differ in self._differing().items()}

    def take(self, now: Look) -> list[ThresholdEvent]:
        """The events of a look, oldest first."""
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
        looks = [self._known[name] for name in self._order if name in self._known]
        readings = [Reading(one.replica, one.thresholds) for one in looks]
        models = sorted({model for one in looks for model in one.thresholds})
        return {model: differing(readings, model) for model in models}

    def _agreement(self, now: Look) -> Iterator[ThresholdEvent]:
        for model, differ in self._differing().items():
            if bool(differ) != self._apart.get(model, False):
                who = ", ".join(f"{name} ({', '.join(which)})" for name, which in differ.items())
                event = ThresholdEvent(
                    "differ" if differ else "agree", now.at, model=model, why=who
                )
                yield event
            self._apart[model] = bool(differ)


def _thresholds(before: Look, now: Look) -> Iterator[ThresholdEvent]:
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


def _ranks(before: Look, now: Look) -> Iterator[ThresholdEvent]:
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


class Watch:
    """Looks at every replica each ``every`` seconds and tells the events. A context manager.

    ``tell`` is called from other threads, with at least one event. Entering raises the error of
    the first replica where none answers.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        every: float,
        tell: Callable[[list[ThresholdEvent]], None],
    ) -> None:
        self._replicas = list(replicas)
        self._every = every
        self._tell = tell
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.first: list[Look] = []

    def __enter__(self) -> Watch:
        self.first = at_once(look, self._replicas)
        errors = [one.error for one in self.first if one.error is not None]
        if len(errors) == len(self.first):
            raise errors[0] if errors else Unreachable("no frontend was found to watch")
        changes = Changes(self.first)
        lost = [
            ThresholdEvent("lost", one.at, one.replica.name, why=one.error.message)
            for one in self.first
            if one.error is not None
        ]
        if lost:
            self._tell(lost)
        for replica in self._replicas:
            arguments = (replica, changes)
            threading.Thread(target=self._follow, args=arguments, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self, replica: Replica, changes: Changes) -> None:
        while not self._ended.wait(self._every):
            found = look(replica)
            with self._lock:
                events = changes.take(found)
                if events and not self._ended.is_set():
                    self._tell(events)
