"""The way of one request: placed, booked, sent, and answered; with retries on other engines until
the first output arrived.

The stages are values. A `Call` is what a client asks of the workers. Its `RoutingPlan` has one
decision, or two where prefill and decode are apart. A `Hop` is a request that goes to the winner of
a decision. An `Answer` is the response that began, with its first output; who has it passes it on.

Selecting and booking happen without an await in between, so that two requests cannot both see an
engine as idle (behind a router process: there). Between attempts the flow frees what it booked; in
every case the caller ends with ``RoutingService.free``.

A plan runs in one of three ways (``_run_whole``, ``_prefill_then_decode``, ``_run_pair``). A hop
that fails before its first output raises `_HopFailed`, and ``start`` tries again. Afterwards a
failure ends the response, but that of a Dynamo worker may move to another worker (``_move``).
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from dynctl.base.tasks import end_tasks
from dynctl.serving.engines.apis import BY_PATH
from dynctl.serving.engines.dispatch import Call, Dispatch, Hop
from dynctl.serving.engines.ejection import FirstOutputs
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.first_output import first_events, whole_answer
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.service import Placement, RoutingService, excluding
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.engine_kinds.handoff import bootstrap_room
from router_core import Decision, Role, RoutingPlan, RoutingRequest

#: Engines that may die of one request: the first and one more.
_MOST_DEAD: Final = 2
#: How long the answer of a decode engine waits for the usage of its prefill engine, in seconds;
#: then it reports no number of reused tokens.
REPORT_S: Final = 1.0
_STRANDED: Final = "this attempt excludes it because its domain had no eligible decode worker"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Course:
    """What changes while a response runs: a move to another worker replaces all of it.

    ``plan``: the one that the response follows. ``companion``: the prefill half of a bootstrap
    pair, which may still run. ``lost``: ids of workers that lost the response, and how.
    """

    plan: RoutingPlan
    companion: asyncio.Task[None] | None = None
    lost: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """A response that began. ``head``: the first piece of a stream, or the whole body.

    ``decoded``: its usage is that of an engine that received the blocks of the prompt, so its
    number of reused tokens means nothing.
    """

    response: EngineStream
    head: bytes
    course: Course
    decoded: bool = False

    @property
    def plan(self) -> RoutingPlan:
        """The plan that the response follows now."""
        return self.course.plan

    @property
    def prefill_ended(self) -> bool:
        """Whether the engine that computes the prompt has reported its usage, if it does."""
        return self.course.companion is None or self.course.companion.done()

    async def wait_for_prefill(self) -> None:
        """Wait for the usage of a prefill engine whose blocks are at the decode engine already."""
        if self.course.companion is not None:
            await asyncio.wait([self.course.companion], timeout=REPORT_S)

    def close(self) -> None:
        """Close both connections, so that the engines stop the request."""
        self.response.close()
        if self.course.companion is not None:
            self.course.companion.cancel()


class Refused(Exception):
    """No worker for the request; ``plan`` has the reason."""

    def __init__(self, plan: RoutingPlan) -> None:
        super().__init__(plan.final.summary())
        self.plan = plan


class HandoffRefused(Exception):
    """A request that one engine has to answer was planned with a prefill hop."""

    def __init__(self, plan: RoutingPlan) -> None:
        super().__init__(plan.id)
        self.plan = plan


class GaveUp(Exception):
    """All tried engines failed; ``failure`` is the last one."""

    def __init__(self, failure: UpstreamFailure, plan: RoutingPlan) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.plan = plan


class _HopFailed(Exception):
    """A hop failed before its first output. ``computed``: its engine has the prompt, for it had
    begun a response that is not an error."""

    def __init__(self, failure: UpstreamFailure, hop: Hop, *, computed: bool = False) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.hop = hop
        self.computed = computed


class _DecodeGone(Exception):
    """Prefill is done, and no decode worker is eligible any more."""

    def __init__(self, plan: RoutingPlan) -> None:
        super().__init__(plan.final.summary())
        self.plan = plan


@dataclass(slots=True)
class _Tries:
    """The attempts of one request. ``failed``: worker ids that are excluded from now on -> why."""

    failed: dict[int, str] = field(default_factory=dict)
    count: int = 0
    second_chance: bool = False
    last: UpstreamFailure | None = None
    #: Names of engines that may have died of the request.
    died: list[str] = field(default_factory=list)
    #: A plan whose decode workers left during its prefill; one retry elsewhere is allowed.
    stranded: RoutingPlan | None = None


class RequestFlow:
    """Sends requests to engines.

    ``read(parsed)``: what a body asks of the workers, for ``prepare(call)``, which returns the call
    with all that its hops need. Both raise RequestError for what the workers cannot do.
    """

    def __init__(
        self,
        service: RoutingService,
        placement: Placement,
        fleet: Fleet,
        dispatch: Dispatch,
        limits: Limits,
    ) -> None:
        self._service = service
        self._placement = placement
        self._fleet = fleet
        self._dispatch = dispatch
        self._limits = limits
        self._first_outputs = FirstOutputs(limits.first_byte_s, limits.first_output_s)
        self.read, self.prepare = dispatch.read, dispatch.prepare
        self.reads_tokens = dispatch.reads_tokens

    async def start(self, call: Call) -> Answer:
        """Run the request up to the first output of an engine. Raises Refused, HandoffRefused or
        GaveUp.

        The caller frees the request's bookings in every case.
        """
        tries, service, record = _Tries(), self._service, call.record
        admitted = call.moving is not None
        while True:
            request = call.request
            if tries.failed:
                request = excluding(request, tries.failed, service.router.registry)
            began = service.clock()
            plan = await self._placement.place(request)
            record.route_s += service.clock() - began
            first = plan.prefill or plan.decode
            if first is not None and first.queue is not None:
                plan = await self._wait_for_turn(plan, request, record, again=admitted)
            admitted = True
            if plan.refusal is not None:
                if self._may_try_again(tries):
                    continue
                raise self._refusal(plan, request, call, tries)
            if call.one_engine and plan.prefill is not None:
                raise HandoffRefused(plan)
            if tries.died:
                _log.warning(
                    "request %s: %s may have died of it (%s); sent once more, to %s",
                    call.request.id, tries.died[-1], tries.last, _first_worker(plan),
                )  # fmt: skip
            earlier = record.plan
            try:
                if plan.prefill is None:
                    return await self._run_whole(call, request, plan)
                address = pair_address(self._fleet, plan.prefill)
                if address is not None:
                    return await self._run_pair(call, request, plan, address)
                return await self._prefill_then_decode(call, request, plan, tries)
            except asyncio.CancelledError:
                if record.plan is earlier:  # no decode hop was decided yet
                    record.left_in_prefill = True
                    service.decided(plan, request, record)
                raise
            except _HopFailed as error:
                self._end_attempt(call, tries, plan, request, error)
            except _DecodeGone as error:
                service.free(call.request.id)
                again = tries.stranded is None
                tries.stranded = error.plan
                if not again:
                    raise self._refusal(error.plan, request, call, tries) from error
                tries.failed |= dict.fromkeys(self._same_domain(error.plan), _STRANDED)

    def report(self, plan: RoutingPlan, failure: UpstreamFailure) -> None:
        """Report that the engine failed during its response."""
        ref = plan.final.ref
        if ref is not None:
            self._fleet.report_failure(ref.worker_id, failure)

    async def _wait_for_turn(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord, *, again: bool
    ) -> RoutingPlan:
        """The plan of a request when the router queue lets it pass."""
        queue = plan.first.queue
        if queue is not None and queue.waited_s is not None and not again:
            record.queued_s = queue.waited_s  # in the queue of the router process
        if not plan.waits:
            return plan
        if again:
            # A retry had its turn already, and the room that it left is free again.
            return plan.after_wait(plan, record.queued_s or 0.0)
        return await self._service.admission.wait(plan, request, record)

    # -- the three ways --------------------------------------------------------------------

    async def _run_whole(self, call: Call, request: RoutingRequest, plan: RoutingPlan) -> Answer:
        """One engine does the whole request."""
        service, decision = self._service, plan.decode
        if decision is None:
            raise ValueError(f"plan {plan.id} has no decision")
        # A hop that waited for its turn is booked already, and the router refuses the second one.
        service.book(decision, request, call.record)
        if not request.streams:
            service.unseen_prefills.begin(decision, request)
        course = Course(service.decided(plan, request, call.record))
        hop = self._hop(call, course, decision, self._dispatch.whole(call))
        return await self._answer(hop, course)

    async def _prefill_then_decode(
        self, call: Call, request: RoutingRequest, plan: RoutingPlan, tries: _Tries
    ) -> Answer:
        """Prefill returns the location of the blocks, decode pulls them."""
        service, prefill = self._service, plan.prefill
        if prefill is None:
            raise ValueError(f"plan {plan.id} has no prefill hop")
        service.book(prefill, request, call.record)
        handed = await self._prefill(call, prefill)
        service.free(request.id, "prefill")
        call.record.prefill_done_at = service.clock()
        while True:
            # The fleet may have changed while prefill ran, so decode is decided only now.
            decided = await self._placement.place_decode(request, prefill)
            plan = replace(decided, bypass=plan.bypass)
            decode = plan.decode
            if decode is None or decode.winner is None:
                raise _DecodeGone(plan)
            service.book(decode, request, call.record)
            course = Course(service.decided(plan, request, call.record))
            hop = self._hop(call, course, decode, self._dispatch.decode(call, plan, handed))
            try:
                return await self._answer(hop, course)
            except _HopFailed as error:
                service.free(request.id, "decode", computed=error.computed)
                if error.failure.sent or tries.count + 1 >= self._limits.attempts:
                    raise
                # Nothing reached the engine, so the blocks still wait to be pulled.
                self._note(call, tries, error)
                request = excluding(request, tries.failed, service.router.registry)

    async def _run_pair(
        self, call: Call, request: RoutingRequest, plan: RoutingPlan, address: tuple[str, int]
    ) -> Answer:
        """Both engines get the request at once and meet in a bootstrap room."""
        service, prefill, decode = self._service, plan.prefill, plan.decode
        if prefill is None or decode is None or prefill.ref is None:
            raise ValueError(f"plan {plan.id} has a missing hop")
        service.book(prefill, request, call.record)
        service.book(decode, request, call.record)
        course = Course(service.decided(plan, request, call.record))
        config = prefill.workers[prefill.winner or 0].runtime_config
        rank = prefill.ref.dp_rank - config.data_parallel_start_rank
        room = bootstrap_room(service.sample(), config.data_parallel_size, rank)
        first, second = self._dispatch.pair(call, plan, address, room)
        half = self._hop(call, None, prefill, first, streams=False)
        companion = course.companion = asyncio.create_task(self._prefill_half(half))
        companion.add_done_callback(_mark_error_read)
        hop = self._hop(call, course, decode, second)
        answering = asyncio.create_task(self._answer(hop, course))
        try:
            await asyncio.wait((companion, answering), return_when=asyncio.FIRST_COMPLETED)
            ended = companion.done() and not companion.cancelled()  # a move cancels it
            if ended and companion.exception() is not None:
                await companion  # raises: decode would wait for blocks that never come
            return await answering
        except BaseException:
            for task in (companion, answering):
                task.cancel()
            done = await asyncio.gather(companion, answering, return_exceptions=True)
            if isinstance(done[1], Answer):
                done[1].response.close()
            raise

    # -- the hops --------------------------------------------------------------------------

    def _hop(
        self,
        call: Call,
        course: Course | None,
        decision: Decision,
        message: Any,
        *,
        streams: bool | None = None,
    ) -> Hop:
        """A hop that is sent now. ``course``: of the response that the client gets, None for a
        prefill hop. ``streams``: its first output comes before its whole answer; None: as the
        client's does."""
        winner, record, now = decision.winner, call.record, self._service.clock()
        if winner is None:
            raise ValueError(f"decision {decision.id} has no winner")
        worker = decision.workers[winner]
        member = self._fleet.by_id(worker.worker_id)
        if record.dispatched_at is None:
            record.dispatched_at = now
        first_output_s, headers, tokens = None, call.headers, _tokens_before(decision)
        if call.stream if streams is None else streams:
            first_output_s = self._first_outputs.timeout_s(worker.model, tokens)
        if member is not None:
            self._fleet.dispatched(member)
        if record.trace is not None:
            headers = {**headers, **record.trace.hop(decision, now)}
        hop = Hop(call, decision, worker, message, member, headers, now, tokens, first_output_s)
        if course is None or not self.reads_tokens:
            return hop
        move = None if call.moving is not None else partial(self._move, call, course)
        noted = None
        if call.moving is not None or not call.stream:
            noted = partial(self._note_first_token, hop)
        return hop._replace(move=move, on_first_token=noted)

    async def _answer(self, hop: Hop, course: Course) -> Answer:
        """Send a hop and wait for its first output. Raises _HopFailed."""
        call, limits, response = hop.call, self._limits, None
        try:
            response = await self._dispatch.open(hop)
            if call.moving is not None:
                return Answer(response, b"", course)  # its reader waits for it already
            if hop.first_output_s is None:
                head = await whole_answer(response, BY_PATH[call.path], limits.unary_answer_bytes)
            else:
                head = await first_events(
                    response, BY_PATH[call.path], hop.first_output_s, limits.unary_answer_bytes
                )
        except BaseException as error:
            self._close(hop, response)
            if isinstance(error, UpstreamFailure):
                raise self._failed(hop, response, error) from error
            raise
        if hop.member is not None:
            hop.member.responses.discard(response)
        self._note_first_output(hop, measured=hop.first_output_s is not None)
        pair = course.companion is not None
        decoded = course.plan.prefill is not None and (pair or not self.reads_tokens)
        return Answer(response, head, course, decoded)

    async def _open(self, hop: Hop) -> EngineStream:
        """Send a hop and wait for the head of its response. Raises _HopFailed."""
        try:
            return await self._dispatch.open(hop)
        except UpstreamFailure as failure:
            raise self._failed(hop, None, failure) from failure

    async def _prefill(self, call: Call, decision: Decision) -> Any:
        """Run the prefill hop; returns what it hands over."""
        hop = self._hop(call, None, decision, self._dispatch.prefill(call, decision), streams=True)
        response = await self._open(hop)
        try:
            answer = await response.read(self._limits.prefill_answer_bytes)
            self._note_first_output(hop, measured=True)
            call.record.take_usage(answer, prefill=True)
            return self._dispatch.handed_over(decision, answer)
        except UpstreamFailure as failure:
            raise self._failed(hop, response, failure) from failure
        except ValueError as error:
            unreadable = UpstreamFailure("protocol", f"{hop.worker.name}: {error}")
            raise _HopFailed(unreadable, hop) from error
        finally:
            self._close(hop, response)

    async def _prefill_half(self, hop: Hop) -> None:
        """Run the prefill hop of a pair, whose blocks the decode engine pulls meanwhile."""
        record, response, computed = hop.call.record, await self._open(hop), False
        try:
            answer = await response.read(self._limits.prefill_answer_bytes)
            computed = True
            self._note_first_output(hop, measured=False)
            record.take_usage(answer, prefill=True)
        except UpstreamFailure as failure:
            computed = _computed(response, failure)
            raise self._failed(hop, response, failure) from failure
        finally:
            self._close(hop, response)
            self._service.free(hop.call.request.id, "prefill", computed=computed)
        record.prefill_done_at = self._service.clock()

    def _note_first_output(self, hop: Hop, *, measured: bool) -> None:
        """A hop's engine has its first output: ``measured`` where that came before the whole
        answer, so that its time is that of the prompt."""
        decision, service = hop.decision, self._service
        if decision.parameters.track_prefill_tokens and (measured or decision.stage == "prefill"):
            service.measure_prefill(decision, hop.sent_at)
        if measured:
            took = service.clock() - hop.sent_at
            self._first_outputs.observe(hop.worker.model, hop.tokens, took)
        self._fleet.answered(hop.worker.worker_id)

    def _note_first_token(self, hop: Hop) -> None:
        """A worker that streams has its first output, whose client gets the whole at its end or
        has output of an earlier worker."""
        if hop.call.moving is None:
            hop.call.record.first_token_at = self._service.clock()
        self._service.prefill_done(hop.call.request.id)
        self._note_first_output(hop, measured=True)

    def _failed(
        self, hop: Hop, response: EngineStream | None, failure: UpstreamFailure
    ) -> _HopFailed:
        """The failure of a hop, whose span ends; other attempts have spans of their own."""
        trace = hop.call.record.trace
        if trace is not None:
            trace.lost(hop.decision, self._service.clock(), failure.kind)
        return _HopFailed(failure, hop, computed=_computed(response, failure))

    def _close(self, hop: Hop, response: EngineStream | None) -> None:
        if response is not None:
            if hop.member is not None:
                hop.member.responses.discard(response)
            response.close()

    async def _move(
        self, call: Call, course: Course, response: EngineStream, failure: UpstreamFailure
    ) -> None:
        """Move a response that its worker lost to another worker, which goes on after its tokens.

        Raises UpstreamFailure where no worker can do it.
        """
        service, final = self._service, course.plan.final
        if course.companion is not None:
            # It frees a prefill hop at its end, which must not be that of the next worker.
            await end_tasks([course.companion])
            course.companion = None
        service.free(call.request.id)
        if final.winner is not None:
            worker = final.workers[final.winner]
            call.record.attempts.append((worker.name, final.stage, str(failure)))
            self._fleet.report_failure(worker.worker_id, failure)
            course.lost[worker.worker_id] = _failed_now(failure)
        later = self._dispatch.moved(call, response)
        preparation = service.preparation
        salt = None if call.parsed is None else preparation.salt_of(call.parsed)
        request = preparation.rehashed(call.request, later.token_ids or (), salt)
        later = replace(later, request=excluding(request, course.lost, service.router.registry))
        _log.warning("request %s: %s; it goes on with another worker", call.request.id, failure)
        try:
            answer = await self.start(later)
        except (Refused, HandoffRefused, GaveUp) as error:
            raise failure from error
        course.plan, course.companion = answer.course.plan, answer.course.companion

    # -- trying again ----------------------------------------------------------------------

    def _end_attempt(
        self,
        call: Call,
        tries: _Tries,
        plan: RoutingPlan,
        request: RoutingRequest,
        error: _HopFailed,
    ) -> None:
        """Note that a hop failed. Raises GaveUp where no other engine gets the request."""
        service, request_id, stage = self._service, call.request.id, error.hop.decision.stage
        service.free(request_id, stage, computed=error.computed)
        # Of a pair whose prefill failed, the decode worker got no block.
        service.free(request_id, computed=stage != "prefill")
        self._note(call, tries, error)
        killed = len(tries.died) >= _MOST_DEAD
        if killed:
            _log.warning(
                "request %s: %s may have died of it; it is not sent to another engine",
                request_id,
                " and then ".join(tries.died),
            )
        if killed or not error.failure.retryable or tries.count >= self._limits.attempts:
            if call.record.plan is None:  # a prefill hop that failed
                service.decided(plan, request, call.record)
            raise GaveUp(error.failure, plan) from error

    def _note(self, call: Call, tries: _Tries, error: _HopFailed) -> None:
        hop, failure, record = error.hop, error.failure, call.record
        tries.count += 1
        tries.last = failure
        # One that refuses connections is ejected already, unless another process does it.
        if failure.kind != "refused" or self._placement.remote:
            tries.failed[hop.worker.worker_id] = _failed_now(failure)
        if failure.fatal:
            tries.died.append(hop.worker.name)
        record.attempts.append((hop.worker.name, hop.decision.stage, str(failure)))
        if call.moving is None:  # else the client has the output of earlier workers
            record.first_token_at = None
        self._fleet.report_failure(hop.worker.worker_id, failure, hop.sent_at)

    def _may_try_again(self, tries: _Tries) -> bool:
        """Whether to retry on the same engine because no other is left: once, after a reset (the
        engine may have closed a kept-alive connection just then)."""
        broken = tries.last is not None and tries.last.kind == "reset"
        if tries.second_chance or not broken or tries.count >= self._limits.attempts:
            return False
        tries.second_chance = True
        tries.failed.clear()
        return True

    def _refusal(
        self, plan: RoutingPlan, request: RoutingRequest, call: Call, tries: _Tries
    ) -> Exception:
        """The error when no worker is left: the first cause, not the exclusion of tried workers."""
        plan = tries.stranded or plan
        self._service.decided(plan, request, call.record)
        if tries.last is not None and tries.failed and tries.stranded is None:
            return GaveUp(tries.last, plan)
        return Refused(plan)

    def _same_domain(self, plan: RoutingPlan) -> set[int]:
        """Prefill workers that imply the taints that the decode hop could not satisfy."""
        prefill = plan.prefill.worker if plan.prefill is not None else None
        if prefill is None:
            return set()
        taints = {item.taint for item in plan.implied if item.kind == "required"}
        return {prefill.worker_id} | {
            worker.worker_id
            for worker in self._service.router.registry
            if worker.role is Role.PREFILL and taints & worker.runtime_config.taints
        }


def _failed_now(failure: UpstreamFailure) -> str:
    return f"this attempt excludes it because it just failed: {failure}"


def pair_address(fleet: Fleet, prefill: Decision) -> tuple[str, int] | None:
    """Where the decode engine meets the prefill engine; None: it waits for that one's end."""
    if not prefill.starts_pairs:
        return None
    member = fleet.by_id(prefill.require().worker_id)
    return None if member is None else member.bootstrap


def _tokens_before(decision: Decision) -> int:
    """Prompt tokens that the winner may compute before the request's first output: those that were
    booked there, whatever a prefill load model leaves of them, and its own."""
    waiting, inputs = 0, decision.inputs
    if inputs is not None and decision.winner is not None:
        booked = inputs.prefill_tokens if inputs.booked_tokens is None else inputs.booked_tokens
        waiting = booked[decision.winner]
    return max(0, int(waiting)) + decision.isl_tokens


def _first_worker(plan: RoutingPlan) -> str:
    """The name of the worker that gets the request first."""
    worker = plan.first.worker
    return "" if worker is None else worker.name


def _computed(response: EngineStream | None, failure: UpstreamFailure) -> bool:
    """Whether an engine that failed has the prompt: it had begun a response that is no error."""
    if response is None or failure.kind in ("status", "protocol"):
        return False
    return response.started


def _mark_error_read(task: asyncio.Task[None]) -> None:
    """Mark the error of the prefill half as read: after decode responds it is not awaited."""
    if not task.cancelled():
        task.exception()
