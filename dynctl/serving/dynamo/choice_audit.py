"""Choices of a live Dynamo's frontends, against predictions made before each choice counts.

A replica-sync event shows the worker that a frontend chose, and the hashes of the prompt where the
pool counts blocks. The prediction uses the state before that event. The log of a frontend adds the
costs that it computed. Nothing is sent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from dynctl.documents.audit import AuditRow
from dynctl.serving.routing.config import SMALL_FLEET
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequenceEvent
from dynctl.wire.dynamo.frontend_log import RefusedLine, SelectedLine
from router_core import (
    Decision,
    PlanQuestion,
    Role,
    Router,
    RoutingRequest,
    Unknown,
    Worker,
    WorkerWithDpRank,
    consequences,
)

_T = TypeVar("_T")

#: Requests whose hops are joined; older ones are forgotten.
KEPT: Final = 10_000
#: Logs round costs.
_SAME_COST: Final = 0.001
#: Above this, workers that are gone are forgotten.
MAX_WORKERS: Final = 4096
NO_PROMPT: Final = "events of prefill workers have no prompt"
NOT_COUNTED: Final = "the event has no blocks: the pool does not count them"
UNKNOWN_WORKER: Final = "the worker is not registered"
NO_PREFILL: Final = "the prefill worker of the request is unknown"
NO_CHOICE: Final = "one worker only: nothing to choose"
NO_EVENT: Final = "a log line without a replica-sync event of its request"
#: Settings that are tried on a miss: does one of them explain the choice? A temperature, or the
#: mode random, would explain any choice, and so neither of them.
_SETTINGS: Final = Unknown(
    settings={
        "overlap_score_credit": [0.0, 0.5, 2.0],
        "prefill_load_scale": [0.0, 0.5, 2.0, 4.0],
        "decode_active_request_weight": [1.0, 4.0],
        "router_track_active_blocks": [False],
        "router_assume_kv_reuse": [False],
    }
)


@dataclass(slots=True)
class _ChoiceCounts:
    requests: int = 0
    hits: int = 0
    predicted: int = 0
    reported: int = 0
    costs: int = 0
    same_costs: int = 0
    causes: Counter[str] = field(default_factory=Counter)


class Prediction(NamedTuple):
    """What was predicted for the final hop of a request; None with the reason why it was not."""

    decision: Decision | None = None
    unpredicted: str = ""


class ChoiceAudit:
    """Counts predictions and choices on the state of ``router``.

    Give :meth:`take_sequence` each event before it is applied to the router.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._counts: dict[int, _ChoiceCounts] = {}
        self._prefill: OrderedDict[str, WorkerWithDpRank] = OrderedDict()
        #: Request -> (the worker that was chosen, its cost).
        self._expected: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.skipped: Counter[str] = Counter()

    def rows(self) -> list[AuditRow]:
        """The counters by the worker that was chosen."""
        rows = []
        for worker_id, counts in self._counts.items():
            worker = self._router.registry.get(worker_id)
            rows.append(
                AuditRow(
                    worker=f"{worker_id:x}" if worker is None else worker.name,
                    worker_id=worker_id,
                    role="" if worker is None else worker.role.value,
                    requests=counts.requests,
                    hits=counts.hits,
                    predicted_tokens=counts.predicted,
                    reported_tokens=counts.reported,
                    costs=counts.costs,
                    same_costs=counts.same_costs,
                    causes=dict(counts.causes),
                )
            )
        return rows

    def take_sequence(self, event: SequenceEvent) -> Prediction | None:
        """Predict the hop of a new request; other events change nothing here, and have None."""
        if not isinstance(event, SequenceAdded):
            return None
        worker = self._router.registry.get(event.worker_id)
        chosen = WorkerWithDpRank(event.worker_id, event.dp_rank)
        if worker is None:
            return self._skip(UNKNOWN_WORKER)
        if worker.role is Role.PREFILL:
            _remember(self._prefill, event.request_id, chosen)
            return self._skip(NO_PROMPT)
        if event.token_sequence is None:
            return self._skip(NOT_COUNTED)
        if worker.role is Role.DECODE and event.request_id in self._prefill:
            return self._judge_decode(event, worker, chosen)
        if worker.role is Role.DECODE:
            return self._skip(NO_PREFILL)
        return self._judge_aggregated(event, worker, chosen)

    def take_line(self, read: SelectedLine | RefusedLine) -> None:
        """Compare the cost in a log line with the one that was computed here."""
        if isinstance(read, RefusedLine) or read.logit is None:
            return
        worker = self._router.registry.get(read.worker_id)
        if worker is not None and worker.role is Role.PREFILL:
            return  # the line of the request's other hop may come later
        worker_id, cost = self._expected.pop(read.request_id, (None, 0.0))
        if worker_id != read.worker_id:
            self.skipped[NO_EVENT] += worker is not None
            return
        counts = self._counts_of(read.worker_id)
        counts.costs += 1
        counts.same_costs += abs(cost - read.logit) < _SAME_COST

    # -- inside ----------------------------------------------------------------------------

    @property
    def _detail(self) -> bool:
        """Whether rejections are listed too: they cost time in a large fleet."""
        return len(self._router.registry) <= SMALL_FLEET

    def _skip(self, reason: str) -> Prediction:
        self.skipped[reason] += 1
        return Prediction(unpredicted=reason)

    def _counts_of(self, worker_id: int) -> _ChoiceCounts:
        if worker_id not in self._counts and len(self._counts) >= MAX_WORKERS:
            registry = self._router.registry
            for gone in [
                worker_id for worker_id in self._counts if registry.get(worker_id) is None
            ]:
                del self._counts[gone]
        return self._counts.setdefault(worker_id, _ChoiceCounts())

    def _judge_aggregated(
        self, event: SequenceAdded, worker: Worker, chosen: WorkerWithDpRank
    ) -> Prediction:
        size, hashes = worker.block_size, event.token_sequence or ()
        slot = self._router.registry.slot(*chosen)
        held = 0
        if slot is not None:
            held = dict(self._router.index.find_matches(hashes, 1 << slot).items()).get(slot, 0)
        tokens = prompt_tokens_of(event, size)
        request = RoutingRequest(event.request_id, worker.model, tokens, size, hashes)
        decision = self._router.plan(request, detail=self._detail).final
        self._judge(decision, request, chosen)
        counts = self._counts.get(event.worker_id)
        if counts is not None and event.track_prefill_tokens:
            counts.predicted += held * size
            counts.reported += max(0, tokens - event.prefill_tokens)
        return Prediction(decision)

    def _judge_decode(
        self, event: SequenceAdded, worker: Worker, chosen: WorkerWithDpRank
    ) -> Prediction:
        size, blocks = worker.block_size, len(event.token_sequence or ())
        request = RoutingRequest(event.request_id, worker.model, blocks * size, size)
        prefill = self._router.plan(request).prefill
        source = self._prefill[event.request_id]
        if prefill is None or source not in prefill.refs:
            return self._skip(NO_PREFILL)
        prefill = replace(prefill, winner=list(prefill.refs).index(source))
        decode = self._router.continue_plan(request, prefill, detail=self._detail).decode
        if decode is None:
            return self._skip(NO_PREFILL)
        self._judge(decode, request, chosen)
        return Prediction(decode)

    def _judge(self, decision: Decision, request: RoutingRequest, chosen: WorkerWithDpRank) -> None:
        known = chosen in decision.refs
        if known:
            cost = decision.costs[list(decision.refs).index(chosen)]
            _remember(self._expected, request.id, (chosen.worker_id, cost))
        if known and len(decision.refs) == 1:
            self.skipped[NO_CHOICE] += 1
            return
        counts = self._counts_of(chosen.worker_id)
        counts.requests += 1
        if not known:
            counts.causes["candidates"] += 1
            return
        cheapest = min(decision.costs)
        if decision.costs[list(decision.refs).index(chosen)] == cheapest:
            counts.hits += 1
        else:
            counts.causes[self._cause(decision, request, chosen)] += 1

    def _cause(self, decision: Decision, request: RoutingRequest, chosen: WorkerWithDpRank) -> str:
        """The likely cause of a miss (``dynctl.documents.audit.CAUSES``)."""
        registry, freshness = self._router.registry, self._router.freshness
        for ref in (chosen, decision.ref):
            slot = None if ref is None else registry.slot(*ref)
            row = None if slot is None else freshness.get(slot)
            if row is not None and row.state != "current" and decision.stage != "decode":
                return "index"
        plan = self._router.plan(request)
        name = decision.workers[list(decision.refs).index(chosen)].name
        view = self._router.view()
        if plan.final.refs == decision.refs:
            question = PlanQuestion(self._router, request, plan, view)
            if any(consequence.worker == name for consequence in consequences(question, _SETTINGS)):
                return "settings"
        return "load"


def prompt_tokens_of(event: SequenceAdded, size: int) -> int:
    """The length of the prompt in tokens, with blocks of ``size``.

    The event has the tokens that the frontend does not believe cached: whole blocks are, so the
    rest of the division is the incomplete last block of the prompt.
    """
    tokens = len(event.token_sequence or ()) * size
    return tokens + event.prefill_tokens % size if event.track_prefill_tokens else tokens


def _remember(kept: OrderedDict[str, _T], key: str, value: _T) -> None:
    kept[key] = value
    while len(kept) > KEPT:
        kept.popitem(last=False)
