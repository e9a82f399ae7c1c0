"""The shadow router: follows a live Dynamo as one of its routers would, and serves no request.

What Dynamo's frontends choose is kept beside what is predicted from the state before each choice.
Choices come from replica-sync events, and from a frontend's log where none are published.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from dynctl.adapters.dynamo.planes import Planes
from dynctl.adapters.ports import ChannelMessage, ChannelValue
from dynctl.base.decode_errors import WireError
from dynctl.documents.decisions import Choice, ChosenRank
from dynctl.documents.doubts import Doubt
from dynctl.documents.fleet_load import Traffic
from dynctl.documents.models import EngineHealth
from dynctl.documents.recording import Arrived, Finished
from dynctl.documents.route_result import RouteResult
from dynctl.documents.workers import (
    NONE_WAITING,
    EngineRow,
    StreamState,
    UnregisteredEngine,
    engine_row,
    rank_rows,
    worker_row,
)
from dynctl.health import conditions as codes
from dynctl.serving.dynamo.choice_audit import ChoiceAudit, Prediction, prompt_tokens_of
from dynctl.serving.dynamo.observer import Observer
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.recorder import Recordings, observed
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequenceEvent, SequenceFreed
from dynctl.wire.dynamo.events import decode_forward_pass
from dynctl.wire.dynamo.frontend_log import RefusedLine, SelectedLine
from router_core import Applied, Change, Outcome, Role, RoutingPlan, Worker, WorkerLost

EVENTS: Final = "replica-sync events"
LOG: Final = "frontend log"
NO_EVENTS: Final = "a frontend's log has no prompts, and no frontend publishes its choices"
REFUSED: Final = "a refusal has no event"
#: Seconds between two readings of the frontends, and of the findings about the deployment.
_READ_S: Final = 1.0
_FINDINGS_S: Final = 5.0
#: Seconds for which the start waits for the workers' caches.
_FIRST_READ_S: Final = 5.0
#: Prefill hops that wait for their decode hop; older ones are forgotten.
_MOST_OPEN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about the deployment, by its code."""

    code: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What the deployment's frontends export, applied to the router.

    ``title``: of the planes. ``load``: the origin of the load. ``doubts``: what stays unknown.
    ``origins``: setting -> where its value was read. ``findings`` None: not judged this time.
    ``traffic``: what clients of the frontends got since the first reading; None where no frontend
    answers.
    """

    title: str = ""
    load: str = ""
    doubts: tuple[Doubt, ...] = ()
    origins: Mapping[str, str] | None = None
    findings: Sequence[Finding] | None = None
    traffic: Traffic | None = None


class Beside(Protocol):
    """What is read of a deployment beside its planes: frontends, their log, tokenizers."""

    @property
    def workers_reachable(self) -> bool:
        """Whether the workers' events and caches get through from here."""
        ...

    @property
    def frontends(self) -> tuple[str, ...]:
        """The frontends that are read, as they are shown."""
        ...

    async def open(self, take_line: Callable[[SelectedLine | RefusedLine], None]) -> None:
        """Begin; ``take_line`` gets the lines of the log. Raises DynctlError."""
        ...

    async def close(self) -> None: ...

    async def read(self, observer: Observer, title: str, *, findings: bool) -> Reading:
        """Read the frontends and apply their load and settings. A frontend that does not answer is
        a doubt."""
        ...

    async def route(
        self, observer: Observer, reading: Reading, body: Mapping[str, Any]
    ) -> RouteResult:
        """A dry run of a request's body. Raises DynctlError."""
        ...


class ObservedFleet(Fleet):
    """The workers of an observed deployment: registered by it, and never called."""

    #: The state of each rank's event stream, and requests that wait in engines; set by the shadow.
    states: Callable[[], Mapping[tuple[int, int], StreamState]] = dict
    queued: Callable[[], Mapping[int, Mapping[int, int]]] = dict

    def __len__(self) -> int:
        return len(self._service.router.registry)

    def engines(self) -> list[EngineHealth]:
        registry = self._service.router.registry
        return [
            EngineHealth(w.name, w.endpoint or "", registry.unavailable_reason(w.worker_id))
            for w in registry
        ]

    def find(self, text: str) -> EngineRow | None:
        worker = self._service.membership.find(text)
        return None if worker is None else self._observed_row(worker, self.states())

    def row_steps(self) -> Generator[None, None, list[EngineRow | UnregisteredEngine]]:
        # One step, so that no reading is torn; an observer keeps no client waiting.
        yield
        states = self.states()
        return [self._observed_row(worker, states) for worker in self._service.router.registry]

    def waiting(self) -> dict[int, Mapping[int, int]]:
        return dict(self.queued())

    def _observed_row(
        self, worker: Worker, states: Mapping[tuple[int, int], StreamState]
    ) -> EngineRow:
        router = self._service.router
        waits = self.queued().get(worker.worker_id, NONE_WAITING)
        ranks = rank_rows(router, worker, self._service.clock(), waits)
        reason = router.registry.unavailable_reason(worker.worker_id)
        events = {
            rank: states[worker.worker_id, rank]
            for rank in worker.ranks
            if (worker.worker_id, rank) in states
        }
        return engine_row(
            worker_row(worker, ranks, reason),
            source="discovery",
            endpoint=worker.endpoint or "",
            events=events,
        )


class Shadow:
    """Follows one deployment into ``service``, and keeps its choices in ``memory``.

    ``open_planes`` is called on the event loop. ``namespace``: Dynamo's; None for all.
    ``on_choice`` gets each choice with its verdict: as_predicted, differs, not_predicted, refused.
    ``recordings`` get the requests that are observed.
    """

    def __init__(
        self,
        service: RoutingService,
        memory: DecisionMemory,
        fleet: ObservedFleet,
        beside: Beside,
        *,
        open_planes: Callable[[], Planes],
        namespace: str | None,
        on_choice: Callable[[Choice, str], None],
        recordings: Recordings | None = None,
    ) -> None:
        self._on_choice = on_choice
        self._recordings = recordings or Recordings(service, source="observe")
        self._service = service
        self._memory = memory
        self._beside = beside
        self._open_planes = open_planes
        self._namespace = namespace
        self.audit = ChoiceAudit(service.router)
        self.title = ""
        self.reading = Reading()
        self._observer: Observer | None = None
        #: Request -> its prefill worker, until its decode worker is chosen.
        self._open: OrderedDict[str, _Prefill] = OrderedDict()
        self._waiting: dict[int, dict[int, int]] = {}
        self._findings: set[tuple[str, str]] = set()
        self._judged_at = float("-inf")
        fleet.states = lambda: {} if self._observer is None else self._observer.stream_states()
        fleet.queued = lambda: self._waiting
        # Workers of Dynamo report their load when it changes, so no report is overdue.
        service.read_fleet(probe_s=lambda: float("inf"))

    @property
    def observer(self) -> Observer:
        if self._observer is None:
            raise RuntimeError("the shadow router was not started")
        return self._observer

    @property
    def frontends(self) -> tuple[str, ...]:
        return self._beside.frontends

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the deployment and follow it. Raises Unreachable or UsageProblem."""
        await self._beside.open(self._take_line)
        planes = self._open_planes()
        self.title = planes.title
        reachable = self._beside.workers_reachable
        self._observer = Observer(
            planes,
            self._service.router,
            clock=self._service.clock,
            apply=self._apply,
            namespace=self._namespace,
            follow_index=reachable,
            follow_load=reachable,
            on_sequence=self._take_sequence,
            on_pass=self._take_pass,
        )
        await self._observer.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_READ_S):
                await self._observer.settled()
        await self._read()
        self._service.tasks.start("observed deployment", self._run)

    async def close(self) -> None:
        if self._observer is not None:
            await self._observer.close()
        await self._beside.close()

    async def route(self, body: Mapping[str, Any]) -> RouteResult:
        """A dry run. Raises DynctlError."""
        return await self._beside.route(self.observer, self.reading, body)

    # -- received values -------------------------------------------------------------------

    def _apply(self, change: Change) -> Applied:
        if isinstance(change, WorkerLost):
            self._waiting.pop(change.worker_id, None)
            return self._service.membership.remove(change.worker_id)
        return self._service.apply(change)

    def _take_sequence(self, event: SequenceEvent) -> None:
        predicted = self.audit.take_sequence(event)
        worker = self._service.router.registry.get(event.worker_id)
        if worker is None:
            return
        if isinstance(event, SequenceFreed) and worker.role is not Role.PREFILL:
            self._recordings.add(lambda at: Finished(at, event.request_id))
        if predicted is None or not isinstance(event, SequenceAdded):
            return
        chosen = ChosenRank(worker, event.dp_rank)
        if worker.role is Role.PREFILL:
            computed = event.prefill_tokens if event.track_prefill_tokens else None
            self._remember(event.request_id, _Prefill(chosen, computed=computed))
            return
        first = self._open.get(event.request_id, _NO_PREFILL)
        self._recordings.add(lambda at: _arrival(at, event, worker, first.computed))
        blocks = 0 if event.token_sequence is None else len(event.token_sequence)
        self._record(event.request_id, chosen, EVENTS, predicted, event.router_id, blocks=blocks)

    def _take_line(self, line: SelectedLine | RefusedLine) -> None:
        self.audit.take_line(line)
        registry = self._service.router.registry
        if isinstance(line, RefusedLine):
            prefill = self._open.pop(line.request_id, _NO_PREFILL).chosen
            model = "" if prefill is None else prefill.worker.model
            busy = "overloaded" in line.message
            outcome: Outcome = "all_busy" if busy else "no_eligible_worker"
            refused = (outcome, line.message)
            choice = Choice(LOG, None, model, prefill, unpredicted=REFUSED, refused=refused)
            self._keep(line.request_id, Prediction(), choice, line.at)
            return
        worker = registry.get(line.worker_id)
        if worker is None or self.observer.load.added:
            return  # frontends publish their choices: they come as events
        chosen = ChosenRank(worker, line.dp_rank)
        if worker.role is Role.PREFILL:
            self._remember(line.request_id, _Prefill(chosen, line.logit))
            return
        unpredicted = Prediction(unpredicted=NO_EVENTS)
        self._record(line.request_id, chosen, LOG, unpredicted, None, cost=line.logit, at=line.at)

    def _take_pass(self, value: ChannelValue) -> None:
        """Take an engine's forward-pass metrics: how many requests wait there."""
        if isinstance(value, ChannelMessage):
            try:
                report = decode_forward_pass(value.payload)
            except WireError:
                return
            if self._service.router.registry.get(report.worker_id) is not None:
                ranks = self._waiting.setdefault(report.worker_id, {})
                ranks[report.dp_rank] = report.waiting

    def _remember(self, request_id: str, prefill: _Prefill) -> None:
        if request_id:
            self._open[request_id] = prefill
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)

    def _record(
        self,
        request_id: str,
        chosen: ChosenRank,
        source: str,
        predicted: Prediction,
        router_id: int | None,
        *,
        blocks: int = 0,
        cost: float | None = None,
        at: float | None = None,
    ) -> None:
        prefill = _NO_PREFILL
        if chosen.worker.role is Role.DECODE:
            prefill = self._open.pop(request_id, _NO_PREFILL)
            cost = prefill.cost if prefill.cost is not None else cost
        choice = Choice(
            source,
            router_id,
            chosen.worker.model,
            prefill.chosen,
            chosen,
            blocks,
            predicted.unpredicted,
            cost,
            cached_blocks=prefill.cached_blocks(blocks, chosen.worker.block_size),
        )
        self._keep(request_id, predicted, choice, at)

    def _keep(
        self, request_id: str, predicted: Prediction, choice: Choice, at: float | None
    ) -> None:
        plan = RoutingPlan(request_id or "-", choice.model, None, predicted.decision)
        self._on_choice(choice, _verdict(plan, choice))
        self._recordings.add(lambda now: observed(now, request_id, choice, predicted.decision))
        self._memory.record(plan, self._service.wall() if at is None else at, choice)

    # -- reading ---------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_READ_S)
            await self._read()

    async def _read(self) -> None:
        now = self._service.clock()
        judge = now - self._judged_at >= _FINDINGS_S
        reading = await self._beside.read(self.observer, self.title, findings=judge)
        self.reading = reading
        if reading.findings is not None:
            self._judged_at = now
            self._show(reading.findings)
        interrupted = self.observer.interrupted
        if interrupted is None:
            self._service.clear_condition(codes.DISCOVERY_INTERRUPTED, self.title)
        else:
            text = f"{interrupted}; the workers are those of the last reading"
            self._service.set_condition(codes.DISCOVERY_INTERRUPTED, self.title, text)

    def _show(self, findings: Sequence[Finding]) -> None:
        """Findings are conditions here, as they hold until they are repaired."""
        messages = {(finding.code, finding.subject): finding.message for finding in findings}
        for code, subject in self._findings - messages.keys():
            self._service.clear_condition(code, subject)
        for (code, subject), message in messages.items():
            self._service.set_condition(code, subject, message)
        self._findings = set(messages)


class _Prefill(NamedTuple):
    """The prefill hop of a request whose decode hop is not known yet.

    ``computed``: prompt tokens that the frontend did not count as cached there.
    """

    chosen: ChosenRank | None = None
    cost: float | None = None
    computed: int | None = None

    def cached_blocks(self, blocks: int, size: int) -> int | None:
        """Of a prompt of so many whole blocks; None where it is unknown.

        Only whole blocks are cached, so the rest of the division is the incomplete last block.
        """
        if self.computed is None or not blocks:
            return None
        return max(0, blocks - self.computed // size)


_NO_PREFILL: Final = _Prefill()


def _arrival(at: float, event: SequenceAdded, worker: Worker, computed: int | None) -> Arrived:
    """The request of an event. In a decode pool the hashes are random, and only their number
    counts; ``computed``: as of the prefill hop, from which the incomplete last block follows."""
    size, hashes = worker.block_size, event.token_sequence or ()
    known = worker.role is Role.AGGREGATED and event.token_sequence is not None
    tokens = prompt_tokens_of(event, size) + (computed or 0) % size
    return Arrived(
        at,
        event.request_id,
        worker.model,
        tokens,
        size,
        hashes if known else (),
        lora=event.lora or "",
        output_limit=event.expected_output_tokens,
        asked={} if known else {"not_modelled": True},
    )


def _verdict(plan: RoutingPlan, choice: Choice) -> str:
    if choice.refused is not None:
        return "refused"
    if plan.decode is None or choice.decode is None:
        return "not_predicted"
    decision, wanted = plan.decode, (choice.decode.worker.worker_id, choice.decode.dp_rank)
    at = next((i for i, ref in enumerate(decision.refs) if tuple(ref) == wanted), None)
    cheapest = at is not None and decision.costs[at] == min(decision.costs)
    return "as_predicted" if cheapest else "differs"
