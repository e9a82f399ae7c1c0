"""Recent decisions, bounded in bytes: for `why ID` and the dashboard.

Refusals, decisions with notes, those of small fleets and every 16th other plan are kept whole,
their columns packed into bytes. Of other plans the winner, the runner-up and the funnel's counts
are kept: a few hundred bytes per hop. The oldest plans are removed first.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from dynctl.documents.decisions import (
    RESPONSE_STATES,
    RUNNING,
    UNKNOWN_RESPONSE,
    Choice,
    ClientResponse,
    was_moved,
)
from dynctl.serving.records.decision_storage import (
    CONSTRAINT_BYTES,
    BriefHop,
    PackedHop,
    brief,
    brief_size,
    pack,
    packed_size,
)
from dynctl.serving.routing.config import SMALL_FLEET
from dynctl.serving.telemetry.observers import RequestRecord, ServiceObserver
from router_core import Bypass, RoutingPlan, RoutingRequest, Worker, topology_of

DEFAULT_BYTES = 64 * 1024 * 1024
#: One in this many uneventful plans is kept whole.
SAMPLE_EVERY = 16
#: Readers that may wait for the next plan at a time; further ones return at once.
MAX_WAITING = 64
#: Ends of requests that a reader can still get; one that reads less often misses the older ones.
MAX_ENDS = 4096

# Bytes that CPython 3.11 allocates, measured with sys.getsizeof and rounded up: estimates on the
# large side. A test compares them with tracemalloc.
_PLAN = 500
_CARD = 1_600
_CANDIDATE = 16  # in the columns of workers and ranks
_BYPASS = 600
_CHOICE = 700
_RESPONSE = 400  # with its place in the table
_ATTEMPT = 64


class Remembered(NamedTuple):
    """One plan. ``at`` is wall-clock seconds, ``size`` its estimated bytes.

    ``choice``: what another router chose, where the plan is only its prediction; such a plan may
    have no hop.
    """

    id: str
    at: float
    model: str
    outcome: str
    whole: bool
    size: int
    relaxed: bool
    implied: tuple[Any, ...]
    bypass: Bypass | None
    prefill: PackedHop | BriefHop | None
    decode: PackedHop | BriefHop | None
    choice: Choice | None = None

    @property
    def plan(self) -> RoutingPlan:
        """The plan again; if kept in brief, each hop has only the winner and the runner-up."""
        return RoutingPlan(
            self.id,
            self.model,
            None if self.prefill is None else self.prefill.expand(),
            None if self.decode is None else self.decode.expand(),
            self.implied,
            self.relaxed,
            self.bypass,
        )

    def cards(self) -> list[Worker]:
        """All other workers that the plan refers to, with repetitions."""
        workers: list[Worker] = []
        for hop in (self.prefill, self.decode):
            if isinstance(hop, BriefHop):
                workers.append(hop.first[0])
                if hop.second is not None:
                    workers.append(hop.second[0])
            elif hop is not None:
                for step in hop.funnel:
                    if step.rejected:
                        workers += [rejection.worker for rejection in step.rejected]
        if self.choice is not None:
            workers += self._chosen_workers()
        return workers

    def winners(self) -> Iterator[Worker]:
        """The chosen workers, prefill first."""
        if self.choice is not None:
            yield from self._chosen_workers()
            return
        for hop in (self.prefill, self.decode):
            if isinstance(hop, BriefHop):
                yield hop.first[0]
            elif hop is not None and hop.worker is not None:
                yield hop.worker

    @property
    def moved(self) -> bool:
        """Whether topology changed which workers the plan could use; a refusal never moved."""
        hop = self.prefill
        if self.outcome != "selected" or hop is None:
            return False
        if isinstance(hop, BriefHop):
            steps = list(zip(hop.filters, hop.counts[::2], hop.counts[1::2], strict=True))
        else:
            steps = [(step.filter, step.entered, step.left) for step in hop.funnel]
        return was_moved(self.relaxed, steps)

    def _chosen_workers(self) -> Iterator[Worker]:
        if self.choice is not None:
            for rank in (self.choice.prefill, self.choice.decode):
                if rank is not None:
                    yield rank.worker

    def in_domain(self, text: str) -> bool:
        """Whether a winner is in the domain, or a refusal required it.

        ``text`` is a value (``zone-a``) or ``domain=value``.
        """
        name, separator, value = text.partition("=")
        if any(
            _in_domain(worker.domains, name, value, bool(separator)) for worker in self.winners()
        ):
            return True
        for hop in (self.prefill, self.decode):
            if not isinstance(hop, PackedHop) or hop.winner is not None:
                continue
            for item in hop.constraints.required:
                topology = topology_of(item.taint)
                if topology is not None and _in_domain(
                    dict([topology]), name, value, bool(separator)
                ):
                    return True
        return False


class DecisionMemory(ServiceObserver):
    """Plans by id and by age. Not thread-safe: for the event loop only.

    ``max_bytes`` 0 keeps nothing. A worker's card is counted once for all plans that refer to
    it; cards of changed or removed workers are kept as long as their plans. ``elsewhere``: whether
    another process keeps the decision of a request.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_BYTES,
        sample_every: int = SAMPLE_EVERY,
        small_fleet: int = SMALL_FLEET,
        elsewhere: Callable[[str], bool] | None = None,
    ) -> None:
        if max_bytes < 0 or sample_every < 1:
            raise ValueError(
                f"expected max_bytes of at least 0 and sample_every of at least 1, "
                f"got {max_bytes} and {sample_every}"
            )
        self.max_bytes = max_bytes
        #: Different after a restart: numbers of an earlier process at this address do not count on.
        self.process = secrets.token_hex(4)
        self.size = 0
        #: Plans that were recorded, and those that were removed.
        self.recorded = 0
        self.evicted = 0
        self._sample_every = sample_every
        self._small_fleet = small_fleet
        self._elsewhere = elsewhere
        self._plans: dict[int, Remembered] = {}
        self._by_id: dict[str, tuple[int, ...]] = {}
        #: Requests that ended, and the ids of the last of them.
        self.ended = 0
        self._ends: deque[str] = deque(maxlen=MAX_ENDS)
        self._responses: dict[str, ClientResponse] = {}
        #: Readers that wait for the next plan, or the next end of a request.
        self._waiting: list[asyncio.Future[None]] = []
        self._waiting_ends: list[asyncio.Future[None]] = []
        #: id() of a card -> plans that hold it (and so keep the id from being reused).
        self._cards: dict[int, int] = {}
        #: id() of a column of candidates -> plans that hold it; its cards are held once for all.
        self._columns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def record(self, plan: RoutingPlan, at: float, choice: Choice | None = None) -> None:
        """Keep a plan decided at wall-clock time ``at``; the same id again is a further attempt.

        ``choice``: what another router chose, where the plan is only its prediction.
        """
        if not self.max_bytes:
            return
        turn = self.recorded
        self.recorded += 1
        first = plan.prefill or plan.decode
        ranks = first.funnel[0].entered if first is not None and first.funnel else 0
        sampled = turn % self._sample_every == 0 or ranks <= self._small_fleet
        # In brief a plan has its winner and the next one, not what another router chose.
        sampled = sampled or (choice is not None and not _as_predicted(plan, choice))
        kept = _remember(plan, at, sampled=sampled, choice=choice)
        self._plans[turn] = kept
        self._by_id[kept.id] = (*self._by_id.get(kept.id, ()), turn)
        self.size += kept.size
        held = self._columns
        for hop in (kept.prefill, kept.decode):
            if isinstance(hop, PackedHop):
                key = id(hop.workers)
                plans = held.get(key, 0)
                if not plans:
                    self.size += _CANDIDATE * len(hop.workers)
                    self._hold(hop.workers)
                held[key] = plans + 1
        cards = kept.cards()
        if cards:
            self._hold(cards)
        if self.size > self.max_bytes:
            self._make_room()
        if self._waiting:
            _release_all(self._waiting)
        if self._waiting_ends:
            _release_all(self._waiting_ends)

    def respond(self, decision_id: str, response: ClientResponse) -> None:
        """Keep what the client of an ended request got; without its plans, nothing. A later
        response to the same request replaces the earlier one."""
        if decision_id not in self._by_id:
            return
        earlier = self._responses.get(decision_id)
        self.size += _response_size(response)
        self.size -= 0 if earlier is None else _response_size(earlier)
        self._responses[decision_id] = response
        self._ends.append(decision_id)
        self.ended += 1
        if self.size > self.max_bytes:
            self._make_room()
        if self._waiting_ends:
            _release_all(self._waiting_ends)

    def response(self, kept: Remembered) -> ClientResponse:
        """What became of the request at this plan. Of another router's choice it is unknown."""
        if kept.choice is not None:
            return UNKNOWN_RESPONSE
        response = self._responses.get(kept.id, RUNNING)
        if kept is self.get(kept.id):
            return response
        return response.of_earlier({worker.name for worker in kept.winners()})

    def ended_since(self, ends: int, before: int, n: int) -> list[Remembered]:
        """The plans of the last ``n`` requests that ended after the first ``ends`` ones, newest end
        first; only plans that were recorded among the first ``before``. A higher number than ended
        is from another process: then none."""
        fresh = 0 if ends > self.ended else min(n, self.ended - ends, len(self._ends))
        ids = dict.fromkeys(islice(reversed(self._ends), fresh))
        turns = (turn for decision_id in ids for turn in reversed(self._by_id.get(decision_id, ())))
        return [self._plans[turn] for turn in turns if turn < before]

    async def next_recorded(self, *, or_ended: bool = False) -> None:
        """Wait until one more plan is recorded, or a request ended (``or_ended``); with
        :data:`MAX_WAITING` readers, return at once.

        With ``max_bytes`` 0 no plan is recorded.
        """
        if len(self._waiting) + len(self._waiting_ends) >= MAX_WAITING:
            return
        waiting = self._waiting_ends if or_ended else self._waiting
        arrived = asyncio.get_running_loop().create_future()
        waiting.append(arrived)
        try:
            await arrived
        finally:
            if arrived in waiting:
                waiting.remove(arrived)

    def get(self, plan_id: str) -> Remembered | None:
        """The last plan with this id; None if unknown or removed."""
        turns = self._by_id.get(plan_id)
        return self._plans[turns[-1]] if turns else None

    def attempts(self, plan_id: str) -> tuple[Remembered, ...]:
        """All plans with this id, oldest first: a request that was retried has several."""
        return tuple(self._plans[turn] for turn in self._by_id.get(plan_id, ()))

    def ids_ending_with(self, suffix: str, most: int) -> list[str]:
        """Up to ``most`` kept ids that end with ``suffix``, newest first."""
        matching = (known for known in reversed(self._by_id) if known.endswith(suffix))
        return list(islice(matching, most))

    def recent(
        self,
        n: int = 50,
        *,
        outcome: str | None = None,
        worker: str | None = None,
        domain: str | None = None,
        model: str | None = None,
        moved: bool = False,
        since: int = 0,
    ) -> list[Remembered]:
        """The last ``n`` plans, newest first, that match every filter given.

        ``since``: only plans recorded after that many; a higher number than were recorded is
        from another process, so all are new. ``outcome`` is an Outcome, a state of the client's
        response, or ``refused`` (any without a winner, unless the client got an engine's error);
        ``worker`` a name or a decimal id; ``domain`` as in :meth:`Remembered.in_domain`;
        ``moved``: only those that topology moved.
        """
        since = 0 if since > self.recorded else since
        newer = takewhile(lambda turn: turn >= since, reversed(self._plans))
        matching = (
            kept
            for kept in map(self._plans.__getitem__, newer)
            if self._matches(kept, outcome, worker, domain, model, moved=moved)
        )
        return list(islice(matching, n))

    def matching(self, plans: Iterable[Remembered], **filters: Any) -> list[Remembered]:
        """Those of ``plans`` that match every filter, as in :meth:`recent`."""
        names = ("outcome", "worker", "domain", "model")
        values = [filters.get(name) for name in names]
        moved = filters.get("moved", False)
        return [kept for kept in plans if self._matches(kept, *values, moved=moved)]

    def _matches(
        self,
        kept: Remembered,
        outcome: str | None,
        worker: str | None,
        domain: str | None,
        model: str | None,
        *,
        moved: bool,
    ) -> bool:
        return (
            (model is None or kept.model == model)
            and (outcome is None or self._has_outcome(kept, outcome))
            and (worker is None or any(_is(winner, worker) for winner in kept.winners()))
            and (domain is None or kept.in_domain(domain))
            and (not moved or kept.moved)
        )

    def _has_outcome(self, kept: Remembered, outcome: str) -> bool:
        if outcome == "refused":
            return kept.outcome != "selected" and self.response(kept).state != "failed"
        if outcome in RESPONSE_STATES:
            return self.response(kept).state == outcome
        return kept.outcome == outcome

    def on_decision(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> None:
        if self._elsewhere is None or not self._elsewhere(request.id):
            self.record(plan, record.received_wall)

    def on_finished(self, record: RequestRecord) -> None:
        if record.decision_id in self._by_id:
            self.respond(record.decision_id, record.client_response())

    def on_response(self, decision_id: str, response: ClientResponse) -> None:
        self.respond(decision_id, response)

    def _make_room(self) -> None:
        while self.size > self.max_bytes and self._plans:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        # The first key of a dict would be found behind those of all plans that were removed.
        kept = self._plans.pop(self.evicted)
        self.size -= kept.size
        self.evicted += 1
        for hop in (kept.prefill, kept.decode):
            if isinstance(hop, PackedHop):
                column = hop.workers
                self._columns[id(column)] -= 1
                if not self._columns[id(column)]:
                    del self._columns[id(column)]
                    self.size -= _CANDIDATE * len(column)
                    self._release(column)
        self._release(kept.cards())
        left = self._by_id[kept.id][1:]
        if left:
            self._by_id[kept.id] = left
        else:
            del self._by_id[kept.id]
            response = self._responses.pop(kept.id, None)
            self.size -= 0 if response is None else _response_size(response)

    def _hold(self, workers: Sequence[Worker]) -> None:
        """Count the cards of the workers, which may be named repeatedly."""
        cards = self._cards
        for key in map(id, workers):
            holders = cards.get(key, 0)
            if not holders:
                self.size += _CARD
            cards[key] = holders + 1

    def _release(self, workers: Iterable[Worker]) -> None:
        cards = self._cards
        for key in map(id, workers):
            cards[key] -= 1
            if not cards[key]:
                del cards[key]
                self.size -= _CARD


def _remember(plan: RoutingPlan, at: float, *, sampled: bool, choice: Choice | None) -> Remembered:
    prefill, decode = plan.prefill, plan.decode
    outcome: str = "selected"
    whole = sampled or plan.relaxed
    for hop in (prefill, decode):
        if hop is None:
            continue
        if hop.winner is None:
            outcome, whole = hop.outcome, True
        # The note that overlap is not modelled comes with every decision of such a prompt.
        elif len(hop.notes) > (not hop.overlap_modelled):
            whole = True
    size = _PLAN + 2 * len(plan.id) + len(plan.model) + CONSTRAINT_BYTES * len(plan.implied)
    size += _BYPASS if plan.bypass is not None else 0
    if choice is not None:
        outcome = "selected" if choice.refused is None else choice.refused[0]
        message = "" if choice.refused is None else choice.refused[1]
        size += _CHOICE + 2 * (len(message) + len(choice.unpredicted))
    kept: list[PackedHop | BriefHop | None] = []
    for hop in (prefill, decode):
        if hop is None:
            kept.append(None)
        elif whole:
            packed = pack(hop)
            kept.append(packed)
            size += packed_size(hop, packed)
        else:
            kept.append(brief(hop))
            size += brief_size(hop)
    return Remembered(
        plan.id,
        at,
        plan.model,
        outcome,
        whole,
        size,
        plan.relaxed,
        plan.implied,
        plan.bypass,
        kept[0],
        kept[1],
        choice,
    )


def _as_predicted(plan: RoutingPlan, choice: Choice) -> bool:
    if plan.decode is None or choice.decode is None:
        return False
    return plan.decode.ref == (choice.decode.worker.worker_id, choice.decode.dp_rank)


def _response_size(response: ClientResponse) -> int:
    size = _RESPONSE + 2 * len(response.error) + _ATTEMPT * len(response.attempts)
    for attempt in response.attempts:
        size += 2 * len(attempt.problem)
    return size


def _release_all(waiting: list[asyncio.Future[None]]) -> None:
    """Wake all readers, and empty their list."""
    for reader in waiting:
        if not reader.done():
            reader.set_result(None)
    waiting.clear()


def _is(worker: Worker, text: str) -> bool:
    return worker.name == text or str(worker.worker_id) == text


def _in_domain(domains: Any, name: str, value: str, named: bool) -> bool:
    return domains.get(name) == value if named else name in domains.values()
