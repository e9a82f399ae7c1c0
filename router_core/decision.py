"""The Decision: a routing result with everything that produced it.

It is built on every request, in columns (one list per term, not one object per candidate). There is
no second path for explanations: dispatch, dry run, dashboard and refusal read this value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from operator import attrgetter
from typing import Any, Literal

from router_core.changes import Stage
from router_core.conditional_disagg import Bypass
from router_core.cost import (
    CostInputs,
    CostParameters,
    TermColumn,
    better_of_two,
    pair_probabilities,
    pick,
    probabilities,
    total_costs,
)
from router_core.devices import DeviceBudget
from router_core.errors import RouterCoreError
from router_core.freshness import TRUST, Trust
from router_core.frozen import quick_init
from router_core.load_order import LazyColumn
from router_core.reasons import QueueFull, Reason
from router_core.sessions import BoundWorker
from router_core.taints import NO_CONSTRAINTS, RoutingConstraints
from router_core.terms import kv_terms
from router_core.workers import Worker, WorkerWithDpRank

Outcome = Literal[
    "selected",
    "no_workers",
    "no_eligible_worker",
    "all_busy",
    "queued",
    "queue_full",
    "queue_timeout",
    "policy_underivable",
    "pinned_ineligible",
    "not_pinned",
]

#: Candidates from which a decision that was made is kept without the columns of the others.
_SETTLED_FROM = 64
#: Modes that count the requests in flight.
_COUNTING = ("power-of-two", "least-loaded", "device-aware-weighted")
#: The columns of the inputs.
_COLUMNS = tuple(
    column.name
    for column in fields(CostInputs)
    if column.name not in ("isl_tokens", "block_size", "prompt_blocks", "added")
)


_columns_of = attrgetter(*_COLUMNS)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rank, and the reason for which a filter rejected it."""

    worker: Worker
    dp_rank: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """One filter: how many ranks entered, how many were left.

    ``rejected`` has the reasons in a dry run and in a refusal, else it is empty while
    ``entered - left`` still counts. ``skipped``: why a filter that would have emptied the set was
    not applied.
    """

    filter: str
    entered: int
    left: int
    rejected: tuple[Rejection, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class PredictedPrefill:
    """The duration that a model predicts for the prefill of a request on the chosen rank.

    ``tokens`` are computed there in ``seconds``; ``cached`` tokens of the prompt are not.
    ``model`` describes the model and its origin.
    """

    model: str
    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One scored rank, built from the columns on demand.

    ``overlap_blocks``: cached blocks that count, of the ``indexed_blocks`` that its index has and
    trusts as ``index`` says; the engine is expected to reuse ``usable_blocks`` of them.
    ``booked_prefill_tokens``: active prefill tokens before they fell with time; None where those of
    no candidate fall. Of the blocks that count, ``predicted_blocks`` were booked there and no event
    has shown them yet.
    ``transfer_level``: the class of the distance; ``following``: the part of the cost that is the
    lowest cost of a decode worker after this one (see `CostInputs`).
    """

    worker: Worker
    dp_rank: int
    overlap_blocks: int
    prefill_blocks: float | None
    decode_blocks: float | None
    active_requests: int
    active_prefill_tokens: int
    terms: Mapping[str, float]
    multiplier: float
    cost: float
    probability: float
    host_blocks: int = 0
    disk_blocks: int = 0
    usable_blocks: int = 0
    indexed_blocks: int = 0
    index: Trust = "exact"
    booked_prefill_tokens: int | None = None
    transfer_level: str | None = None
    following: float | None = None
    predicted_blocks: int = 0

    @property
    def ref(self) -> WorkerWithDpRank:
        return WorkerWithDpRank(self.worker.worker_id, self.dp_rank)


@dataclass(frozen=True, slots=True)
class Queueing:
    """What the router queue did with a request, or would do: part of the decision of its first hop.

    ``all_busy``: each of the ``ranks`` that could take it holds more active prefill tokens than the
    class allows; ``needs``: tokens that have to finish on ``nearest`` until one does not.
    ``backlog``: requests of its class that wait already, ``ahead`` of them go first; None: not
    known. A request waits if either holds. ``waited_s``: seconds that it waited; None while it
    does, and in a dry run. ``refused``: the limit for which it may not wait.
    """

    policy_class: str
    queue_policy: str
    uncached_tokens: int
    ranks: int
    all_busy: bool = False
    needs: int = 0
    nearest: str | None = None
    backlog: int | None = 0
    ahead: int | None = 0
    priority: int = 0
    strict_priority: int = 0
    prefill_busy_threshold: int | None = None
    prefill_busy_threshold_frac: float | None = None
    waited_s: float | None = None
    refused: QueueFull | None = None

    @property
    def waits(self) -> bool:
        """Whether the request has to wait now."""
        return self.waited_s is None and (self.all_busy or bool(self.backlog))


@quick_init
@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of one hop, and its inputs.

    Columns (``workers``, ``refs``, ``costs`` and those inside ``inputs`` and ``terms``) have
    one entry per scored candidate, in slot order. ``winner`` and ``tied`` are positions in them.
    ``sample`` is the number in 0..1 that broke ties or drew from the temperature. ``lora_name``
    and ``salted``: cached blocks count only with this adapter and the request's own cache salt.
    ``predicted``: how long the winner's prefill is expected to take, where a prefill load model is
    on; it does not change this decision, but the load of later ones.
    ``queue``: on the first hop, where the router queue is on. ``session``: the worker that the
    request's session is bound to.
    ``pair``: the two positions that power-of-two drew, in this order. ``budget``: what chose
    between CPU workers and accelerators in mode device-aware-weighted.
    """

    id: str
    stage: Stage
    mode: str
    model: str
    outcome: Outcome
    isl_tokens: int
    block_size: int
    prompt_blocks: int
    temperature: float
    sample: float
    parameters: CostParameters
    constraints: RoutingConstraints = NO_CONSTRAINTS
    funnel: tuple[FunnelStep, ...] = ()
    workers: Sequence[Worker] = ()
    refs: Sequence[WorkerWithDpRank] = ()
    inputs: CostInputs | None = None
    terms: tuple[TermColumn, ...] = ()
    costs: Sequence[float] = ()
    winner: int | None = None
    overlap_modelled: bool = True
    notes: tuple[str, ...] = ()
    message: str | None = None
    lora_name: str | None = None
    salted: bool = False
    predicted: PredictedPrefill | None = None
    queue: Queueing | None = None
    pair: tuple[int, int] | None = None
    budget: DeviceBudget | None = None
    session: BoundWorker | None = None

    # -- the result ------------------------------------------------------------------------

    @property
    def ref(self) -> WorkerWithDpRank | None:
        """The chosen (worker, rank)."""
        if self.winner is None:
            return None
        return self.refs[self.winner]

    @property
    def worker(self) -> Worker | None:
        return None if self.winner is None else self.workers[self.winner]

    @property
    def tied(self) -> tuple[int, ...]:
        """Positions with exactly the lowest cost, each as likely; empty unless there are at least
        two. In mode power-of-two the draw decides, so none are tied."""
        if self.winner is None or self.temperature > 0 or self.pair is not None:
            return ()
        group = self.group
        low = min(self.costs[i] for i in group)
        cheapest = tuple(i for i in group if self.costs[i] == low)
        return cheapest if len(cheapest) > 1 else ()

    @property
    def group(self) -> Sequence[int]:
        """Positions among which the lowest cost wins: all, or those of one device class."""
        chosen = None if self.budget is None else self.budget.group(self.workers)
        return range(len(self.costs)) if chosen is None else chosen

    @property
    def runner_up(self) -> int | None:
        """The position of the cheapest candidate except the winner: of its device class, of the
        drawn pair."""
        if self.winner is None or len(self.costs) < 2:
            return None
        if self.pair is None and self.budget is None:
            costs = self.costs  # not isinstance: a class of an ABC takes five times as long
            two = costs.two if type(costs) is LazyColumn else None
            if two is not None and two[0] == self.winner:
                return two[1]
            costs = list(costs)
            costs[self.winner] = inf  # a third of the time of the loop below
            cheapest = costs.index(min(costs))
            if cheapest != self.winner:
                return cheapest
        rest = (i for i in self.pair or self.group if i != self.winner)
        return min(rest, key=lambda i: self.costs[i], default=None)

    @property
    def margin(self) -> float | None:
        """Blocks by which the winner is cheaper than the runner-up; may be negative if sampled."""
        second = self.runner_up
        if self.winner is None or second is None:
            return None
        return self.costs[second] - self.costs[self.winner]

    def overlap_blocks(self, position: int) -> int:
        """Cached leading blocks of a candidate; 0 where overlap is not modelled."""
        return self.inputs.overlap_blocks[position] if self.inputs is not None else 0

    def usable_blocks(self, position: int) -> int:
        """Cached leading blocks that the candidate's engine reuses.

        It always computes the prompt's last token, so a prompt of whole blocks that is cached
        entirely reuses one block less. Costs and bookings count that block, as in Dynamo.
        """
        most = max(0, self.isl_tokens - 1) // self.block_size
        return min(self.indexed_blocks(position), most)

    def indexed_blocks(self, position: int) -> int:
        """Leading prompt blocks in a candidate's index, whether they count in full or not."""
        if self.inputs is None or self.inputs.indexed_blocks is None:
            return self.overlap_blocks(position)
        return self.inputs.indexed_blocks[position]

    def predicted_blocks(self, position: int) -> int:
        """Leading prompt blocks that count because they were booked there, before their events."""
        return _count_at(self.inputs.predicted_blocks, position) if self.inputs is not None else 0

    @property
    def session_kept(self) -> bool:
        """Whether the worker of the request's session was chosen."""
        return self.session is not None and self.session.ref == self.ref

    def trust(self, position: int) -> Trust:
        """How far a candidate's index can be trusted."""
        if self.inputs is None or self.inputs.trust is None:
            return "exact"
        return TRUST[self.inputs.trust[position]]

    @property
    def credits_overlap(self) -> bool:
        """Whether cached blocks count on this hop: not on a plain decode hop."""
        return self.stage != "decode" or self.parameters.overlap_score_credit > 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the winner has cached; lower tiers count by their weights."""
        if self.winner is None or self.inputs is None:
            return 0
        return self.inputs.cached_tokens(self.winner, self.parameters)

    def require(self) -> WorkerWithDpRank:
        """The winner; raises NoEligibleWorker or AllWorkersBusy with this decision."""
        ref = self.ref
        if ref is None:
            raise (AllWorkersBusy if self.outcome == "all_busy" else NoEligibleWorker)(self)
        return ref

    @property
    def starts_pairs(self) -> bool:
        """Whether a decode worker may get the request together with the winner, a prefill worker.

        Not in modes that count the requests in flight: as in Dynamo, decode is chosen there when
        prefill is done.
        """
        return self.mode not in _COUNTING

    @property
    def own_costs(self) -> Sequence[float]:
        """The costs of this hop alone, without those of the decode hop that follows."""
        inputs = self.inputs
        if inputs is None or inputs.following is None:
            return self.costs
        return total_costs(self.terms, inputs.multipliers, len(self.costs))

    @property
    def greedy(self) -> int | None:
        """The position that this hop alone would choose at temperature 0.

        The winner if it is one of the cheapest, else the one that the sample picks.
        """
        if self.winner is None:
            return None
        own = self.own_costs
        first = pick(own, 0.0, self.sample)
        return self.winner if own[self.winner] == own[first] else first

    # -- details ---------------------------------------------------------------------------

    def probabilities(self) -> list[float]:
        """The probability of each candidate, over all samples."""
        if not self.costs:
            return []
        if self.pair is not None:
            return pair_probabilities(self.costs)
        group = self.group
        chances = probabilities([self.costs[i] for i in group], self.temperature)
        if len(group) == len(self.costs):
            return chances
        spread = [0.0] * len(self.costs)
        for position, chance in zip(group, chances, strict=True):
            spread[position] = chance
        return spread

    def rows(self) -> Iterator[Candidate]:
        """One Candidate for each scored rank, in slot order."""
        chances = self.probabilities()
        inputs = self.inputs
        booked = None if inputs is None else inputs.booked_tokens
        transfer = None if inputs is None else inputs.column("transfer")
        for i, worker in enumerate(self.workers):
            terms = {term.name: float(term.values[i]) for term in self.terms}
            multipliers = inputs.multipliers if inputs is not None else None
            yield Candidate(
                worker=worker,
                dp_rank=self.refs[i].dp_rank,
                overlap_blocks=self.overlap_blocks(i),
                prefill_blocks=terms.get("prefill_blocks"),
                decode_blocks=terms.get("decode_blocks"),
                active_requests=inputs.active_requests[i] if inputs is not None else 0,
                active_prefill_tokens=inputs.prefill_tokens[i] if inputs is not None else 0,
                terms=terms,
                multiplier=multipliers[i] if multipliers is not None else 1.0,
                cost=self.costs[i],
                probability=chances[i],
                host_blocks=_count_at(inputs.host_blocks, i) if inputs is not None else 0,
                disk_blocks=_count_at(inputs.disk_blocks, i) if inputs is not None else 0,
                usable_blocks=self.usable_blocks(i),
                indexed_blocks=self.indexed_blocks(i),
                index=self.trust(i),
                booked_prefill_tokens=None if booked is None else booked[i],
                transfer_level=None if transfer is None else _value_at(transfer.labels, i),
                following=_value_at(inputs.following, i) if inputs is not None else None,
                predicted_blocks=self.predicted_blocks(i),
            )

    def replay(
        self, inputs: CostInputs | None = None, parameters: CostParameters | None = None
    ) -> Decision:
        """The decision computed again, with other inputs or parameters where given.

        With neither it has the same winner, so a saved decision is a complete bug report. Modes
        other than ``kv`` keep their terms, except active requests.
        """
        inputs = inputs if inputs is not None else self.inputs
        parameters = parameters or self.parameters
        if inputs is None or not self.costs:
            return self
        if self.mode == "kv":
            terms = kv_terms(inputs, parameters)
        else:
            terms = tuple(
                replace(term, values=inputs.active_requests)
                if term.name == "active_requests"
                else term
                for term in self.terms
            )
        costs = total_costs(terms, inputs.multipliers, len(self.costs), inputs.following)
        budget = self.budget
        if budget is not None and inputs is not self.inputs:
            budget = DeviceBudget.of_candidates(self.workers, inputs.active_requests, budget.ratio)
        winner = choose(costs, self.temperature, self.sample, self.pair, budget, self.workers)
        return replace(
            self,
            inputs=inputs,
            parameters=parameters,
            terms=terms,
            costs=costs,
            winner=winner,
            predicted=self.predicted if winner == self.winner else None,
            budget=budget,
        )

    @property
    def costs_follow(self) -> bool:
        """Whether terms and costs are those that :meth:`replay` computes of the inputs, to the last
        bit: where they were not computed for all candidates."""
        return isinstance(self.costs, LazyColumn)

    def settled(self) -> Decision:
        """The decision with the columns of its winner alone, where there are many: all that a
        running request needs of it. In a fleet of 1,000 ranks the columns take 50 kB."""
        at, inputs = self.winner, self.inputs
        if at is None or inputs is None or len(self.costs) < _SETTLED_FROM:
            return self
        if self.pair is not None or self.budget is not None:  # these refer to other positions
            return self
        # As `replace`, in a fifth of the time: this is done for each request.
        columns: list[Any] = [inputs.isl_tokens, inputs.block_size, inputs.prompt_blocks]
        columns += [None if column is None else (column[at],) for column in _columns_of(inputs)]
        if inputs.added is not None:
            columns.append(tuple([column.at_position(at) for column in inputs.added]))
        values = list(_fields_of(self))
        values[_WORKERS_AT], values[_REFS_AT] = (self.workers[at],), (self.refs[at],)
        values[_INPUTS_AT] = CostInputs(*columns)
        values[_TERMS_AT] = tuple(
            [
                TermColumn(term.name, term.unit, term.weight, (term.values[at],))
                for term in self.terms
            ]
        )
        values[_COSTS_AT], values[_WINNER_AT] = (self.costs[at],), 0
        return Decision(*values)

    def summary(self) -> str:
        """One line: the winner and its cost, or the number of rejected ranks by reason.

        ``0/6 workers eligible: 4 missing_taint dynamo.topology/zone=us-east-1a, 2 busy (...)``
        """
        if self.winner is not None:
            worker = self.workers[self.winner]
            rank, cost = self.refs[self.winner].dp_rank, self.costs[self.winner]
            return f"{worker.name} rank {rank}, cost {cost:.3f}"
        if self.message:
            return self.message
        steps = [step for step in self.funnel if step.filter not in ("model", "role")]
        if not steps or not steps[0].entered:
            return f"no {self.stage} worker is registered for model {self.model}"
        parts = [self._histogram(step) for step in steps if step.entered > step.left]
        return f"0/{steps[0].entered} workers eligible: " + ", ".join(parts)

    def _histogram(self, step: FunnelStep) -> str:
        if not step.rejected:
            return f"{step.entered - step.left} {step.filter}"
        by_reason: dict[tuple[str, str], int] = {}
        for rejection in step.rejected:
            reason = rejection.reason
            if reason.code in ("missing_taint", "missing_domain", "not_allowed"):
                detail = f" {reason.limit}" if reason.limit else ""
            else:
                detail = f" ({reason.message})"
            key = (reason.code.replace("_", " "), detail)
            by_reason[key] = by_reason.get(key, 0) + 1
        return ", ".join(f"{count} {code}{detail}" for (code, detail), count in by_reason.items())

    def emptied_by(self) -> FunnelStep | None:
        """The filter that rejected the last candidates; None for a selected decision."""
        if self.winner is not None:
            return None
        return next((step for step in self.funnel if step.entered and not step.left), None)


_FIELDS = tuple(field_.name for field_ in fields(Decision))
_fields_of = attrgetter(*_FIELDS)
_WORKERS_AT, _REFS_AT, _INPUTS_AT, _TERMS_AT, _COSTS_AT, _WINNER_AT = map(
    _FIELDS.index, ("workers", "refs", "inputs", "terms", "costs", "winner")
)


def choose(
    costs: Sequence[float],
    temperature: float,
    sample: float,
    pair: tuple[int, int] | None = None,
    budget: DeviceBudget | None = None,
    workers: Sequence[Worker] = (),
) -> int:
    """The position that wins: of a drawn pair, of the device class that is next, or of all."""
    if pair is not None:
        return better_of_two(costs, pair)
    group = None if budget is None else budget.group(workers)
    if group is None:
        return pick(costs, temperature, sample)
    return group[pick([costs[i] for i in group], temperature, sample)]


def _count_at(column: Sequence[int] | None, position: int) -> int:
    return 0 if column is None else column[position]


def _value_at(column: Sequence[Any] | None, position: int) -> Any:
    return None if column is None else column[position]


@quick_init
@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """The hops of one request. ``prefill`` is None for an aggregated request.

    ``implied`` are the constraints that the chosen prefill worker adds to the decode hop;
    ``relaxed``: a ``fallback`` policy dropped them because no decode worker satisfied them.
    ``bypass``: the verdict of conditional disaggregation, None where it is off or there is no
    prefill hop to leave out. Where it leaves the hop out, ``decode`` is an aggregated decision
    among the decode workers.
    """

    id: str
    model: str
    prefill: Decision | None
    decode: Decision | None
    implied: tuple[Any, ...] = ()
    relaxed: bool = False
    bypass: Bypass | None = None

    @property
    def ok(self) -> bool:
        """Whether every hop of the plan has a winner."""
        return self.refusal is None

    @property
    def refusal(self) -> Decision | None:
        """The decision without a winner, prefill first; None if every hop has one."""
        # Read ten times a request, so without a loop.
        prefill, decode = self.prefill, self.decode
        if prefill is not None and prefill.winner is None:
            return prefill
        return decode if decode is not None and decode.winner is None else None

    def settled(self) -> RoutingPlan:
        """The plan with the columns of the winners alone (:meth:`Decision.settled`)."""
        prefill, decode = self.prefill, self.decode
        if prefill is not None and len(prefill.costs) >= _SETTLED_FROM:
            prefill = prefill.settled()
        if decode is not None and len(decode.costs) >= _SETTLED_FROM:
            decode = decode.settled()
        if prefill is self.prefill and decode is self.decode:
            return self
        # As `replace`, which takes longer than all of this.
        rest = (self.implied, self.relaxed, self.bypass)
        return RoutingPlan(self.id, self.model, prefill, decode, *rest)

    @property
    def first(self) -> Decision:
        """The decision of the hop that computes the prompt."""
        return self.prefill if self.prefill is not None else self.final

    @property
    def waits(self) -> bool:
        """Whether the request has to wait in the router queue before it is dispatched."""
        queue = self.first.queue
        return queue is not None and queue.waits and self.refusal is None

    def after_wait(self, before: RoutingPlan, seconds: float) -> RoutingPlan:
        """This plan of a request that waited so long since the plan ``before``, with its reason."""
        queue = before.first.queue
        if queue is None:
            return self
        return self._with_first(replace(self.first, queue=replace(queue, waited_s=seconds)))

    def turned_away(self, full: QueueFull) -> RoutingPlan:
        """The refusal of a request that may not wait in the router queue (any more)."""
        first, queue = self.first, self.first.queue
        outcome: Outcome = "queue_timeout" if full.limit_kind == "wait_seconds" else "queue_full"
        refused = replace(
            first,
            outcome=outcome,
            winner=None,
            message=full.message,
            queue=None if queue is None else replace(queue, refused=full),
        )
        return self._with_first(refused)

    def _with_first(self, decision: Decision) -> RoutingPlan:
        if self.prefill is not None:
            decode = None if decision.winner is None else self.decode
            return replace(self, prefill=decision, decode=decode)
        return replace(self, decode=decision)

    @property
    def final(self) -> Decision:
        """The decision of the hop that answers the client, or the refusal."""
        refusal = self.refusal
        if refusal is not None:
            return refusal
        decision = self.decode if self.decode is not None else self.prefill
        if decision is None:
            raise ValueError(f"plan {self.id} has no decision")
        return decision


class RoutingRefused(RouterCoreError):
    """No worker was selected; ``decision`` has the filters and their reasons."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.summary())
        self.decision = decision


class NoEligibleWorker(RoutingRefused):
    """No registered worker satisfies the request (role, model, constraints, availability)."""


class AllWorkersBusy(RoutingRefused):
    """Workers satisfy the request, and every one of them is over a busy threshold."""
