"""Session affinity: one worker answers the requests of a session, for a time after the last.

A session is an opaque key. Callers make it of the client and of the id that the client sent, so
that equal ids of two clients are two sessions. Source: Dynamo 1.6
(``--router-session-affinity-*``), which keeps at most as many sessions; observed: a pinned request
moves no session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from router_core.changes import STAGES, Stage
from router_core.forms import COUNT, TEXT, TIME, U64, Each, Fields, OneOf, Row, check_once
from router_core.workers import WorkerWithDpRank

#: Sessions, by hop; beyond them the one whose last request is the longest ago is forgotten.
MOST_SESSIONS = 65_536


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a request. ``at``: the time of the request, by the clock of the changes."""

    key: str
    at: float


@dataclass(frozen=True, slots=True)
class BoundWorker:
    """The worker that a session is bound to on one hop.

    ``left_s``: seconds until the binding ends, from the time of the request on. ``excluded``: the
    filter that excludes the worker now, so that the session moves.
    """

    name: str
    ref: WorkerWithDpRank
    left_s: float
    excluded: str | None = None


@dataclass(slots=True)
class _Binding:
    ref: WorkerWithDpRank
    until: float
    running: int = 0


_Place = tuple[str, str, Stage]
"""key, model and hop"""

_STAGE: Final = OneOf(STAGES)
_FORM: Final = Fields(
    {},
    {
        "bound": Each(Row(TEXT, TEXT, _STAGE, U64, COUNT, TIME)),
        "running": Each(Row(TEXT, _STAGE, TEXT, TEXT, _STAGE)),
    },
)
"""What `SessionTable.dump` writes."""


class SessionTable:
    """The bindings of sessions. ``ttl_s``: seconds after the last request of a session; None: no
    session is bound. The time of a binding starts again when a request of it begins and ends."""

    __slots__ = ("_bound", "most", "running", "ttl_s")

    def __init__(self, ttl_s: float | None = None, most: int = MOST_SESSIONS) -> None:
        self.ttl_s = ttl_s
        self.most = most
        self._bound: OrderedDict[_Place, _Binding] = OrderedDict()
        """the one whose time ends first comes first"""
        self.running: dict[tuple[str, Stage], _Place] = {}
        """request and hop -> its session"""

    def __len__(self) -> int:
        return len(self._bound)

    def find(
        self, session: Session, model: str, stage: Stage
    ) -> tuple[WorkerWithDpRank, float] | None:
        """The rank that the session is bound to, and the seconds that are left."""
        bound = self._bound.get(_place(session.key, model, stage))
        if bound is None or (bound.until <= session.at and not bound.running):
            return None
        return bound.ref, max(0.0, bound.until - session.at)

    def bind(
        self, key: str, model: str, stage: Stage, ref: WorkerWithDpRank, request_id: str, now: float
    ) -> None:
        """A request of the session was given to ``ref``: the next ones follow it."""
        if self.ttl_s is None:
            return
        place = _place(key, model, stage)
        bound = self._bound.get(place)
        if bound is None:
            bound = self._bound[place] = _Binding(ref, now)
        bound.ref = ref
        bound.running += 1
        self.running[request_id, stage] = place
        self._touch(place, bound, now)
        self.expire(now)
        while len(self._bound) > self.most:
            self._bound.popitem(last=False)

    def end(self, request_id: str, stage: Stage, now: float) -> None:
        """A request ended on one hop."""
        place = self.running.pop((request_id, stage), None)
        bound = None if place is None else self._bound.get(place)
        if place is not None and bound is not None:
            bound.running = max(0, bound.running - 1)
            self._touch(place, bound, now)

    def expire(self, now: float) -> None:
        """Forget the bindings that are over at ``now``."""
        # Each at most once: a time that is too short to add to ``now`` does not move an end.
        for _ in range(len(self._bound)):
            place, bound = next(iter(self._bound.items()))
            if bound.until > now:
                return
            if bound.running:
                self._touch(place, bound, now)
            else:
                del self._bound[place]

    def clear(self) -> None:
        """Forget all bindings."""
        self._bound.clear()
        self.running.clear()

    def _touch(self, place: _Place, bound: _Binding, now: float) -> None:
        bound.until = max(bound.until, now + (self.ttl_s or 0.0))
        self._bound.move_to_end(place)

    # -- dump and restore --------------------------------------------------------------------

    def copy(self) -> Self:
        """An independent copy."""
        made = type(self)(self.ttl_s, self.most)
        made.load(self.dump())
        return made

    def dump(self) -> dict[str, Any]:
        """The bindings in their order, and the requests that run, as plain data."""
        return {
            "bound": [
                [*place, bound.ref.worker_id, bound.ref.dp_rank, bound.until]
                for place, bound in self._bound.items()
            ],
            "running": [[*request, *place] for request, place in self.running.items()],
        }

    def load(self, plain: Mapping[str, Any]) -> None:
        """Take over a :meth:`dump`, into an empty table; raises SnapshotError."""
        _FORM.check(plain, "sessions")
        bound_rows, running = plain.get("bound", ()), plain.get("running", ())
        check_once((tuple(row[:3]) for row in bound_rows), "sessions.bound", "this session")
        check_once((tuple(row[:2]) for row in running), "sessions.running", "this request")
        for key, model, stage, worker_id, dp_rank, until in bound_rows:
            ref = WorkerWithDpRank(worker_id, dp_rank)
            self._bound[key, model, stage] = _Binding(ref, until)
        for request_id, on, key, model, stage in running:
            self.running[request_id, on] = (key, model, stage)
            bound = self._bound.get((key, model, stage))
            if bound is not None:
                bound.running += 1


def _place(key: str, model: str, stage: Stage) -> _Place:
    """What a session is bound on: the worker that answers is the same with and without a prefill
    hop, which conditional disaggregation leaves out from request to request."""
    return key, model, "decode" if stage == "aggregated" else stage
