"""The router queue: requests that wait while every worker has much to prefill.

Within a class the entry with the highest (strict priority, score) is next; between classes a
deficit round robin by uncached tokens decides. The queue has no clock: callers pass ``now``.

Formulas of the score, with j = max(0, priority): ``fcfs`` j - arrival, ``lcfs`` j + arrival,
``wspt`` (1 + j) / max(1, uncached prompt tokens), as in Dynamo 1.6. Arrival is in seconds, so that
one step of priority is worth a second. Of equal entries the earlier one is next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from router_core.errors import SnapshotError
from router_core.forms import (
    COUNT,
    COUNT_MAX,
    FLAG,
    NUMBER,
    TEXT,
    TIME,
    U64,
    Each,
    Either,
    Fields,
    Form,
    Maybe,
    Row,
    Table,
    Whole,
    check_once,
)
from router_core.policy_classes import PolicyClass, PolicyTable
from router_core.reasons import LimitKind, QueueFull

_SIGNED: Final = Whole(-COUNT_MAX, COUNT_MAX)
_PINNED: Final = Row(U64, Maybe(COUNT))
_NAMED: Final = Maybe(TEXT)


def _lane_form(lane: object) -> Form:
    return _PINNED if isinstance(lane, (list, tuple)) else _NAMED


_FORM: Final = Fields(
    {
        "known": FLAG,
        "number": COUNT,
        "entries": Each(
            Row(TEXT, TEXT, TEXT, COUNT, COUNT, TIME, COUNT, NUMBER, _SIGNED, Either(_lane_form))
        ),
        "credits": Each(Row(TEXT, TEXT, Whole(-(2**64), 2**64))),
        "cursors": Table(TEXT),
    }
)
"""What `RouterQueue.dump` writes."""

#: Worker and rank of a pinned request; a text for another need of certain workers, which all
#: requests with that need have: required taints, allowed workers, another name than the model's;
#: None: any worker.
Lane = tuple[int, int | None] | str | None
#: Lanes of a class whose heads are tried one by one; requests with further needs wait in the common
#: lane. Pinned requests are not counted: whether one has room is known at once.
MOST_LANES: Final = 32
#: Order within a class, the lowest first: negated strict priority and score, number of arrival.
Key = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request that waits. ``number`` counts arrivals; ``score`` orders within its class."""

    request_id: str
    model: str
    policy_class: str
    isl_tokens: int
    cached_tokens: int
    queued_at: float
    number: int
    score: float
    strict_priority: int = 0
    lane: Lane = None

    @property
    def cost(self) -> int:
        """Uncached prompt tokens, at least 1: what its class pays for it."""
        return max(1, self.isl_tokens - self.cached_tokens)

    @property
    def key(self) -> Key:
        """Its place in the order of its class."""
        return (-self.strict_priority, -self.score, self.number)


@dataclass(frozen=True, slots=True)
class ClassStats:
    """What waits in one class: requests, their prompt tokens, and the cached ones of these."""

    requests: int = 0
    isl_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The next request of a model, and what its admission leaves: credits by class, and the class
    whose turn is next."""

    entry: QueueEntry
    credits: tuple[tuple[str, int], ...]
    cursor: str


@dataclass(slots=True)
class _ClassQueue:
    """One class of one model. ``lanes``: heaps of entries, with entries that left among them."""

    lanes: dict[Lane, list[tuple[Key, QueueEntry]]] = field(default_factory=dict)
    requests: int = 0
    isl_tokens: int = 0
    cached_tokens: int = 0
    credit: int = 0


class RouterQueue:
    """The waiting requests of all models. Changes only through `Router.apply`.

    ``known`` False: those of an observed router, which exports none of them.
    """

    def __init__(self, *, known: bool = True) -> None:
        self.known = known
        self._entries: dict[str, QueueEntry] = {}
        self._classes: dict[tuple[str, str], _ClassQueue] = {}
        #: Model -> the class whose turn is next.
        self._cursors: dict[str, str] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(self._entries.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return list(
            dict.fromkeys(model for (model, _), waiting in self._classes.items() if waiting.lanes)
        )

    def stats(self, model: str, policy_class: str) -> ClassStats:
        """What waits in a class of a model."""
        waiting = self._classes.get((model, policy_class))
        if waiting is None:
            return ClassStats()
        return ClassStats(waiting.requests, waiting.isl_tokens, waiting.cached_tokens)

    def ahead(self, model: str, policy_class: str, key: Key) -> int:
        """Requests of the class that go before one with ``key``."""
        waiting = self._classes.get((model, policy_class))
        lanes = () if waiting is None else waiting.lanes.values()
        return sum(
            entry.request_id in self._entries and k < key for heap in lanes for k, entry in heap
        )

    def open_lane(self, model: str, policy_class: str, lane: Lane) -> Lane:
        """The lane for a request of ``lane``: None, the common one, where its class has as many
        lanes as it may."""
        waiting = self._classes.get((model, policy_class))
        if not isinstance(lane, str) or waiting is None or lane in waiting.lanes:
            return lane
        texts = sum(isinstance(other, str) for other in waiting.lanes)
        return lane if texts < MOST_LANES else None

    def full(
        self, model: str, policy_class: PolicyClass, workers: int, most: int
    ) -> QueueFull | None:
        """The limit that keeps another request from waiting, as in Dynamo compared before it is
        added: the request that crosses a limit may wait, the next one may not.

        ``workers`` of the model scale the limits of the class; ``most`` requests of all classes
        and models may wait.
        """
        stats = self.stats(model, policy_class.name)
        limits: tuple[tuple[LimitKind, int, int | None], ...] = (
            ("requests", stats.requests, policy_class.request_queue_limit_per_worker),
            ("raw_isl_tokens", stats.isl_tokens, policy_class.raw_isl_token_queue_limit_per_worker),
            (
                "cached_tokens",
                stats.cached_tokens,
                policy_class.cached_token_queue_limit_per_worker,
            ),
        )
        for kind, current, limit in limits:
            if limit is not None and current >= limit * workers:
                return QueueFull(policy_class.name, kind, current, limit * workers)
        if len(self._entries) >= most:
            return QueueFull(policy_class.name, "total_requests", len(self._entries), most)
        return None

    def next(
        self, model: str, table: PolicyTable, admissible: Callable[[QueueEntry], bool]
    ) -> Turn | None:
        """The request of a model that is next, among those that ``admissible`` passes; None: all
        have to wait. Changes nothing.

        Only the head of a lane is tried: requests for any worker form one lane, those that need the
        same workers another, so that a busy worker or zone does not hold back the others. A class
        whose heads are all blocked keeps its credit and earns none.
        """
        ring = self._ring(model, table)
        heads: dict[str, QueueEntry] = {}
        credits: dict[str, int] = {}
        quanta = {policy_class.name: policy_class.quantum for policy_class in table.classes}
        for name in ring:
            waiting = self._classes.get((model, name))
            head = None if waiting is None else self._head(waiting, admissible)
            if head is None or waiting is None:
                continue
            heads[name], credits[name] = head, waiting.credit
            if head.cost > credits[name]:
                credits[name] += quanta.get(name, 1)
            if head.cost <= credits[name]:
                return self._turn(name, ring, heads, credits)
        if not heads:
            return None
        payer = _pay_in_rounds(heads, credits, quanta)
        return self._turn(payer, ring, heads, credits)

    # -- changes ---------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        model: str,
        policy: PolicyClass,
        now: float,
        *,
        isl_tokens: int,
        cached_tokens: int,
        arrived_at: float,
        priority: int = 0,
        strict_priority: int = 0,
        lane: Lane = None,
    ) -> QueueEntry | None:
        """Add a request; None, and nothing changes, if it waits already."""
        if request_id in self._entries:
            return None
        cached = min(cached_tokens, isl_tokens)
        entry = QueueEntry(
            request_id,
            model,
            policy.name,
            isl_tokens,
            cached,
            now,
            self._number,
            score(policy.queue_policy, arrived_at, priority, isl_tokens - cached),
            strict_priority,
            lane,
        )
        self._number += 1
        self._put(entry)
        return entry

    def take(
        self, request_id: str, credits: tuple[tuple[str, int], ...], cursor: str | None
    ) -> bool:
        """Remove a request. With a ``cursor`` its turn is charged: see :class:`Turn`."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if cursor is not None:
            for name, credit in credits:
                waiting = self._classes.get((entry.model, name))
                if waiting is not None:
                    waiting.credit = credit
            self._cursors[entry.model] = cursor
        self._remove(entry)
        return True

    # -- snapshot --------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """All state as plain data."""
        return {
            "known": self.known,
            "number": self._number,
            "entries": [
                [
                    e.request_id, e.model, e.policy_class, e.isl_tokens, e.cached_tokens,
                    e.queued_at, e.number, e.score, e.strict_priority,
                    list(e.lane) if isinstance(e.lane, tuple) else e.lane,
                ]
                for e in self._entries.values()
            ],
            "credits": [[*key, waiting.credit] for key, waiting in self._classes.items()],
            "cursors": dict(self._cursors),
        }  # fmt: skip

    @classmethod
    def restore(cls, plain: dict[str, Any]) -> RouterQueue:
        """The inverse of :meth:`dump`; raises SnapshotError."""
        _FORM.check(plain, "queue")
        check_once((row[0] for row in plain["entries"]), "queue.entries", "this request")
        check_once((row[6] for row in plain["entries"]), "queue.entries", "this number")
        queue = cls(known=plain["known"])
        queue._number = plain["number"]
        for row in plain["entries"]:
            *fields, lane = row
            fields.append(tuple(lane) if isinstance(lane, list) else lane)
            entry = QueueEntry(*fields)
            if entry.number >= queue._number:
                raise SnapshotError(
                    f"queue.number: {queue._number}, more than all entries expected"
                )
            queue._put(entry)
        for place, (model, name, credit) in enumerate(plain["credits"]):
            waiting = queue._classes.get((model, name))
            if waiting is None:
                raise SnapshotError(f"queue.credits[{place}]: no request of this class waits")
            waiting.credit = credit
        queue._cursors = dict(plain["cursors"])
        return queue

    # -- inside ----------------------------------------------------------------------------

    def _put(self, entry: QueueEntry) -> None:
        self._entries[entry.request_id] = entry
        waiting = self._classes.setdefault((entry.model, entry.policy_class), _ClassQueue())
        heapq.heappush(waiting.lanes.setdefault(entry.lane, []), (entry.key, entry))
        waiting.requests += 1
        waiting.isl_tokens += entry.isl_tokens
        waiting.cached_tokens += entry.cached_tokens

    def _remove(self, entry: QueueEntry) -> None:
        del self._entries[entry.request_id]
        key = (entry.model, entry.policy_class)
        waiting = self._classes[key]
        waiting.requests -= 1
        waiting.isl_tokens -= entry.isl_tokens
        waiting.cached_tokens -= entry.cached_tokens
        if not waiting.requests:
            # An empty class keeps no credit.
            del self._classes[key]
            return
        heap = waiting.lanes[entry.lane]
        self._trim(heap)
        if not heap:
            del waiting.lanes[entry.lane]
        elif sum(len(lane) for lane in waiting.lanes.values()) > 2 * waiting.requests + 16:
            self._compact(waiting)

    def _ring(self, model: str, table: PolicyTable) -> list[str]:
        """The classes from the one whose turn is next."""
        names = [policy_class.name for policy_class in table.classes]
        # Classes that the table no longer has drain too.
        names += [n for (m, n), _ in self._classes.items() if m == model and n not in names]
        cursor = self._cursors.get(model)
        at = names.index(cursor) if cursor in names else 0
        return names[at:] + names[:at]

    def _head(
        self, waiting: _ClassQueue, admissible: Callable[[QueueEntry], bool]
    ) -> QueueEntry | None:
        """The first entry of the class whose lane is not blocked."""
        heads = sorted(heap[0] for heap in waiting.lanes.values())
        return next((entry for _, entry in heads if admissible(entry)), None)

    def _turn(
        self, name: str, ring: list[str], heads: dict[str, QueueEntry], credits: dict[str, int]
    ) -> Turn:
        entry = heads[name]
        credits[name] -= entry.cost
        waiting = self._classes[entry.model, name]
        # A class that can pay for its next request too keeps its turn.
        rest = [heap[0][1] for lane, heap in waiting.lanes.items() if lane != entry.lane]
        rest += self._second(waiting.lanes[entry.lane])
        following = min(rest, key=lambda other: other.key, default=None)
        stays = following is not None and following.cost <= credits[name]
        cursor = name if stays else ring[(ring.index(name) + 1) % len(ring)]
        return Turn(entry, tuple(credits.items()), cursor)

    def _second(self, heap: list[tuple[Key, QueueEntry]]) -> list[QueueEntry]:
        """The entry after the first one; empty if there is none."""
        places = [(heap[i][0], i) for i in (1, 2) if i < len(heap)]
        heapq.heapify(places)
        while places:
            _, place = heapq.heappop(places)
            entry = heap[place][1]
            if self._entries.get(entry.request_id) is entry:
                return [entry]
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(places, (heap[child][0], child))
        return []

    def _trim(self, heap: list[tuple[Key, QueueEntry]]) -> None:
        """Remove what left from the top of a heap, so that its first entry waits."""
        while heap and self._entries.get(heap[0][1].request_id) is not heap[0][1]:
            heapq.heappop(heap)

    def _compact(self, waiting: _ClassQueue) -> None:
        for heap in waiting.lanes.values():
            heap[:] = [row for row in heap if self._entries.get(row[1].request_id) is row[1]]
            heapq.heapify(heap)


def score(queue_policy: str, arrival: float, priority: int, uncached_tokens: int) -> float:
    """The score of a request: the highest of its class is next. A negative priority counts 0."""
    jump = float(max(0, priority))
    if queue_policy == "wspt":
        return (1.0 + jump) / max(1, uncached_tokens)
    return jump + arrival if queue_policy == "lcfs" else jump - arrival


def _pay_in_rounds(
    heads: Mapping[str, QueueEntry], credits: dict[str, int], quanta: Mapping[str, int]
) -> str:
    """Give the classes as many whole rounds of credit as the first one needs that can pay for its
    head then; returns its name. None of them can pay after one round."""
    rounds = min(
        -(-(head.cost - credits[name]) // quanta.get(name, 1)) for name, head in heads.items()
    )
    for name in heads:
        credits[name] += rounds * quanta.get(name, 1)
    return next(name for name, head in heads.items() if head.cost <= credits[name])
