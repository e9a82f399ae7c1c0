"""The decisions of the last while, bounded in bytes: what `why ID` and the dashboard look up.

Refusals, decisions with notes, those of small fleets and every 16th other plan are kept whole,
their columns packed into arrays. Of the rest the winner, the runner-up and the funnel's counts are
kept: enough to say who won, against whom and by how much, at a few hundred bytes a hop. The oldest
leave first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from dynctl.serving.config import SMALL_FLEET
from dynctl.serving.observers import RequestRecord, ServiceObserver
from router_core.changes import Stage
from router_core.cost import CostInputs, CostParameters, TermColumn
from router_core.decision import Decision, FunnelStep, RoutingPlan
from router_core.selection import RoutingRequest
from router_core.taints import RoutingConstraints, topology_of
from router_core.workers import Worker

DEFAULT_BYTES = 64 * 1024 * 1024
#: One in this many uneventful plans is kept whole.
SAMPLE_EVERY = 16

# Sizes in bytes of what CPython 3.11 allocates, measured with sys.getsizeof and rounded up; they
# are estimates that err on the large side. A test holds them against tracemalloc.
_PLAN = 500
_WHOLE_HOP = 1_000
_BRIEF_HOP = 560
_COLUMN = 112
_STEP = 96
_REJECTION = 320
_CONSTRAINT = 240
_CARD = 1_600
_NUMBER = 8


class BriefHop(NamedTuple):
    """One hop without the candidates that came third or worse.

    A row (``first`` is the winner's, ``second`` the runner-up's) is ``(worker, ref, cost, overlap,
    prefill tokens, active blocks, shared blocks, requests, multiplier, *term values)``. ``counts``
    are the funnel's (entered, left), flat; ``terms`` are (name, unit, weight).
    """

    id: str
    model: str
    stage: Stage
    mode: str
    isl_tokens: int
    block_size: int
    temperature: float
    sample: float
    parameters: CostParameters
    constraints: RoutingConstraints
    overlap_modelled: bool
    notes: tuple[str, ...]
    candidates: int
    first: tuple[Any, ...]
    second: tuple[Any, ...] | None
    filters: tuple[str, ...]
    counts: tuple[int, ...]
    terms: tuple[tuple[str, str, float], ...]

    def expand(self) -> Decision:
        """A Decision over the rows that were kept; its notes say that others are gone."""
        rows = (self.first,) if self.second is None else (self.first, self.second)
        columns = list(zip(*rows, strict=True))
        counts = iter(self.counts)
        note = f"kept in brief: {len(rows)} of {self.candidates} scored candidates"
        prompt_blocks = self.isl_tokens // self.block_size
        inputs = None
        if columns[3][0] is not None:
            inputs = CostInputs(
                isl_tokens=self.isl_tokens,
                block_size=self.block_size,
                prompt_blocks=prompt_blocks,
                overlap_blocks=columns[3],
                prefill_tokens=columns[4],
                active_blocks=columns[5],
                shared_blocks=columns[6] if columns[6][0] is not None else None,
                active_requests=columns[7],
                multipliers=columns[8] if columns[8][0] is not None else None,
            )
        return Decision(
            id=self.id,
            stage=self.stage,
            mode=self.mode,
            model=self.model,
            outcome="selected",
            isl_tokens=self.isl_tokens,
            block_size=self.block_size,
            prompt_blocks=prompt_blocks,
            temperature=self.temperature,
            sample=self.sample,
            parameters=self.parameters,
            constraints=self.constraints,
            funnel=tuple(
                FunnelStep(name, entered, next(counts))
                for name, entered in zip(self.filters, counts, strict=False)
            ),
            workers=columns[0],
            refs=columns[1],
            costs=columns[2],
            inputs=inputs,
            terms=tuple(
                TermColumn(name, unit, weight, column)
                for (name, unit, weight), column in zip(self.terms, columns[9:], strict=True)
            ),
            winner=0,
            overlap_modelled=self.overlap_modelled,
            notes=(*self.notes, note) if len(rows) < self.candidates else self.notes,
        )


class Remembered(NamedTuple):
    """One plan. ``at`` is wall-clock seconds, ``size`` its estimated bytes."""

    id: str
    at: float
    model: str
    outcome: str
    whole: bool
    size: int
    relaxed: bool
    implied: tuple[Any, ...]
    prefill: Decision | BriefHop | None
    decode: Decision | BriefHop | None

    @property
    def plan(self) -> RoutingPlan:
        """The plan again; of one kept in brief, each hop has the winner and the runner-up."""
        return RoutingPlan(
            self.id,
            self.model,
            _expanded(self.prefill),
            _expanded(self.decode),
            self.implied,
            self.relaxed,
        )

    def cards(self) -> Iterator[Worker]:
        """Every worker that the plan holds on to, with repetitions."""
        for hop in (self.prefill, self.decode):
            if isinstance(hop, BriefHop):
                yield hop.first[0]
                if hop.second is not None:
                    yield hop.second[0]
            elif hop is not None:
                yield from hop.workers
                for step in hop.funnel:
                    for rejection in step.rejected:
                        yield rejection.worker

    def winners(self) -> Iterator[Worker]:
        """The chosen workers, prefill first."""
        for hop in (self.prefill, self.decode):
            if isinstance(hop, BriefHop):
                yield hop.first[0]
            elif hop is not None and hop.worker is not None:
                yield hop.worker

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
            if not isinstance(hop, Decision) or hop.winner is not None:
                continue
            for item in hop.constraints.required:
                topology = topology_of(item.taint)
                if topology is not None and _in_domain(
                    dict([topology]), name, value, bool(separator)
                ):
                    return True
        return False


class DecisionMemory(ServiceObserver):
    """Plans by id and by age. Not thread-safe: it lives on the event loop.

    ``max_bytes`` 0 keeps nothing. A worker's card is counted once, however many plans name it: the
    cards of workers that changed or left live on in the plans that chose among them.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_BYTES,
        sample_every: int = SAMPLE_EVERY,
        small_fleet: int = SMALL_FLEET,
    ) -> None:
        if max_bytes < 0 or sample_every < 1:
            raise ValueError(
                f"expected max_bytes of at least 0 and sample_every of at least 1, "
                f"got {max_bytes} and {sample_every}"
            )
        self.max_bytes = max_bytes
        self.size = 0
        #: Plans that were recorded, and those that had to leave.
        self.recorded = 0
        self.evicted = 0
        self._sample_every = sample_every
        self._small_fleet = small_fleet
        self._plans: dict[int, Remembered] = {}
        self._by_id: dict[str, tuple[int, ...]] = {}
        #: id() of a card -> plans that hold it (and so keep the id from being reused).
        self._cards: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def record(self, plan: RoutingPlan, at: float) -> None:
        """Keep a plan decided at wall-clock time ``at``; the same id again is a further attempt."""
        if not self.max_bytes:
            return
        turn = self.recorded
        self.recorded += 1
        sampled = turn % self._sample_every == 0 or _ranks(plan) <= self._small_fleet
        kept = _remember(plan, at, sampled=sampled)
        self._plans[turn] = kept
        self._by_id[kept.id] = (*self._by_id.get(kept.id, ()), turn)
        self.size += kept.size
        cards = self._cards
        for worker in kept.cards():
            key = id(worker)
            holders = cards.get(key, 0)
            if not holders:
                self.size += _CARD
            cards[key] = holders + 1
        while self.size > self.max_bytes and self._plans:
            self._forget_oldest()

    def get(self, plan_id: str) -> Remembered | None:
        """The last plan with this id; None when it was never there or had to leave."""
        turns = self._by_id.get(plan_id)
        return self._plans[turns[-1]] if turns else None

    def attempts(self, plan_id: str) -> tuple[Remembered, ...]:
        """All plans with this id, oldest first: a request that was retried has several."""
        return tuple(self._plans[turn] for turn in self._by_id.get(plan_id, ()))

    def recent(
        self,
        n: int = 50,
        *,
        outcome: str | None = None,
        worker: str | None = None,
        domain: str | None = None,
        model: str | None = None,
    ) -> list[Remembered]:
        """The last ``n`` plans, newest first, that match every filter given.

        ``outcome`` is an Outcome or ``refused`` (any without a winner); ``worker`` a name or a
        decimal id; ``domain`` as in :meth:`Remembered.in_domain`.
        """
        matching = (
            kept
            for kept in reversed(self._plans.values())
            if (model is None or kept.model == model)
            and (outcome is None or _has_outcome(kept, outcome))
            and (worker is None or any(_is(one, worker) for one in kept.winners()))
            and (domain is None or kept.in_domain(domain))
        )
        return list(islice(matching, n))

    def on_decision(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> None:
        self.record(plan, record.received_wall)

    def _forget_oldest(self) -> None:
        turn = next(iter(self._plans))
        kept = self._plans.pop(turn)
        self.size -= kept.size
        self.evicted += 1
        for worker in kept.cards():
            key = id(worker)
            self._cards[key] -= 1
            if not self._cards[key]:
                del self._cards[key]
                self.size -= _CARD
        left = self._by_id[kept.id][1:]
        if left:
            self._by_id[kept.id] = left
        else:
            del self._by_id[kept.id]


def pack(decision: Decision) -> Decision:
    """The same decision with its columns in arrays: a quarter of the memory of lists of numbers."""
    inputs = decision.inputs
    if inputs is not None:
        inputs = replace(
            inputs,
            overlap_blocks=_packed(inputs.overlap_blocks),
            prefill_tokens=_packed(inputs.prefill_tokens),
            active_blocks=_packed(inputs.active_blocks),
            shared_blocks=None if inputs.shared_blocks is None else _packed(inputs.shared_blocks),
            active_requests=_packed(inputs.active_requests),
            multipliers=None if inputs.multipliers is None else array("d", inputs.multipliers),
        )
    return replace(
        decision,
        inputs=inputs,
        terms=tuple(
            TermColumn(term.name, term.unit, term.weight, array("d", term.values))
            for term in decision.terms
        ),
        costs=array("d", decision.costs),
    )


def brief(decision: Decision) -> BriefHop:
    """The hop with its winner and runner-up alone; the decision must have a winner."""
    winner = decision.winner
    if winner is None:
        raise ValueError(f"decision {decision.id} has no winner; keep refusals whole")
    second = None
    if len(decision.costs) > 1:
        costs = list(decision.costs)
        costs[winner] = inf
        second = _row(decision, costs.index(min(costs)))
    counts: list[int] = []
    for step in decision.funnel:
        counts += (step.entered, step.left)
    return BriefHop(
        decision.id,
        decision.model,
        decision.stage,
        decision.mode,
        decision.isl_tokens,
        decision.block_size,
        decision.temperature,
        decision.sample,
        decision.parameters,
        decision.constraints,
        decision.overlap_modelled,
        decision.notes,
        len(decision.costs),
        _row(decision, winner),
        second,
        tuple([step.filter for step in decision.funnel]),
        tuple(counts),
        tuple([(term.name, term.unit, term.weight) for term in decision.terms]),
    )


def _row(decision: Decision, i: int) -> tuple[Any, ...]:
    inputs = decision.inputs
    read: tuple[Any, ...] = (None, None, None, None, None, None)
    if inputs is not None:
        shared, multipliers = inputs.shared_blocks, inputs.multipliers
        read = (
            inputs.overlap_blocks[i],
            inputs.prefill_tokens[i],
            inputs.active_blocks[i],
            None if shared is None else shared[i],
            inputs.active_requests[i],
            None if multipliers is None else multipliers[i],
        )
    values = [term.values[i] for term in decision.terms]
    return (decision.workers[i], decision.refs[i], decision.costs[i], *read, *values)


def _ranks(plan: RoutingPlan) -> int:
    """Ranks that the plan's first filter saw."""
    hop = plan.prefill or plan.decode
    return hop.funnel[0].entered if hop is not None and hop.funnel else 0


def _remember(plan: RoutingPlan, at: float, *, sampled: bool) -> Remembered:
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
    size = _PLAN + 2 * len(plan.id) + len(plan.model) + _CONSTRAINT * len(plan.implied)
    measure, keep = (_whole_size, pack) if whole else (_brief_size, brief)
    if prefill is not None:
        size += measure(prefill)
    if decode is not None:
        size += measure(decode)
    return Remembered(
        plan.id,
        at,
        plan.model,
        outcome,
        whole,
        size,
        plan.relaxed,
        plan.implied,
        None if prefill is None else keep(prefill),
        None if decode is None else keep(decode),
    )


def _expanded(hop: Decision | BriefHop | None) -> Decision | None:
    return hop.expand() if isinstance(hop, BriefHop) else hop


def _whole_size(decision: Decision) -> int:
    inputs = decision.inputs
    # Two pointers a candidate stand for the worker and rank columns, shared as long as the fleet
    # does not change and then owned by the decisions that are left.
    columns = 1 + len(decision.terms)
    if inputs is not None:
        columns += 4 + (inputs.shared_blocks is not None) + (inputs.multipliers is not None)
    size = _WHOLE_HOP + columns * _COLUMN + (columns + 2) * _NUMBER * len(decision.costs)
    size += _CONSTRAINT * len(decision.constraints.items)
    for step in decision.funnel:
        size += _STEP + _REJECTION * len(step.rejected)
    return size + 2 * (sum(map(len, decision.notes)) + len(decision.message or ""))


def _brief_size(decision: Decision) -> int:
    numbers = 12 + len(decision.terms)
    size = _BRIEF_HOP + 2 * (40 + 3 * _NUMBER * numbers) + 48 * len(decision.terms)
    size += 3 * _NUMBER * len(decision.funnel)
    return size + _CONSTRAINT * len(decision.constraints.items)


def _packed(column: Sequence[int]) -> array[int]:
    return array("q", column)


def _has_outcome(kept: Remembered, outcome: str) -> bool:
    if outcome == "refused":
        return kept.outcome != "selected"
    return kept.outcome == outcome


def _is(worker: Worker, text: str) -> bool:
    return worker.name == text or str(worker.worker_id) == text


def _in_domain(domains: Any, name: str, value: str, named: bool) -> bool:
    return domains.get(name) == value if named else name in domains.values()
