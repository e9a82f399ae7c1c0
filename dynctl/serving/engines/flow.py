"""The flow of one request: decide, book, dispatch; with retries on other engines until the first
output arrived.

Selecting and booking happen without an await in between, so that two requests cannot both see an
engine as idle (behind a router process: there). Between attempts the flow frees what it booked; in
every case the caller ends with ``RoutingService.free``.

The way of a streamed chat, from `serving.http.inference`: ``_serve`` begins the record, ``_work``
receives and prepares the request, ``RequestFlow.start`` places it, waits for its turn if it must
queue, and runs it in one of three ways: whole, prefill and then decode, or both as a pair. Each hop
is booked and opened until its first output, which is an `Answer`. ``pass_stream`` passes it on. An
engine of OpenAI's kind that fails then ends the stream with an error event; a response of a Dynamo
worker may move (``_continue``).
"""

import asyncio
import logging
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import msgspec

from dynctl.base.tasks import end_tasks
from dynctl.serving.engines.apis import (
    BLANK_LINE,
    BY_PATH,
    ERROR_EVENT,
    EVENTS_A_TURN,
    Api,
    EventCut,
    event_data,
    event_name,
)
from dynctl.serving.engines.dispatch import Call, Dispatch
from dynctl.serving.engines.dispatch import winner as _winner
from dynctl.serving.engines.ejection import FirstOutputs
from dynctl.serving.engines.failures import UpstreamFailure, reported_error
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.placement import Placement
from dynctl.serving.routing.service import RoutingService, excluding
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.wire.engine_kinds.handoff import bootstrap_room
from dynctl.wire.openai import ChatRequest, CompletionRequest
from router_core import Decision, Role, RoutingPlan, RoutingRequest, Stage, Worker

_FIRST_EVENT_BYTES: Final = 64 * 1024
#: The beginning of an event stream: a field, a comment, or empty lines before them.
_EVENT_STREAM: Final = re.compile(rb"[\r\n]*+(?:(?:data|event|id|retry)?:|(?<=[\r\n])\Z)")
_FIRST_BYTES: Final = 8
#: The first field of an event; comments are none.
_FIELD: Final = re.compile(rb"(?:\A|[\r\n])((?:data|event|id|retry):)")
#: The longest end of an event, and the longest first field, without their last bytes.
_LINE_ENDS: Final = 3
_FIELD_BYTES: Final = 6
_COMMENT_BYTES: Final = 64 * 1024
_DONE: Final = (b"data: [DONE]", b"data:[DONE]")
#: Engines that may die of one request: the first and one more.
_MOST_DEAD: Final = 2
_STRANDED: Final = "this attempt excludes it because its domain had no eligible decode worker"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """A response that began. ``head``: the first piece of a stream, or the whole body."""

    response: EngineStream
    head: bytes
    call: Call
    planned: RoutingPlan

    @property
    def plan(self) -> RoutingPlan:
        """The plan that the response follows now."""
        return self.call.moved or self.planned

    def close(self) -> None:
        """Close both connections, so that the engines stop the request."""
        self.response.close()
        if self.call.companion is not None:
            self.call.companion.cancel()


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
    """A hop failed. ``accepted``: the engine had begun a response that is no error, so that it has
    the prompt."""

    def __init__(
        self,
        failure: UpstreamFailure,
        worker: Worker,
        stage: Stage,
        sent_at: float | None = None,
        *,
        accepted: bool = False,
    ) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.worker = worker
        self.stage = stage
        self.sent_at = sent_at
        self.accepted = accepted


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
    """Sends requests to engines."""

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
        self._hops = dispatch
        self._limits = limits
        self._first_outputs = FirstOutputs(limits.first_byte_s, limits.first_output_s)

    def read(self, parsed: ChatRequest | CompletionRequest) -> Any:
        """What a body asks of the workers, for ``Call.options``. Raises RequestError."""
        return self._hops.read(parsed)

    def prepare(self, call: Call) -> None:
        """Make what every hop of a new call needs. Raises RequestError for what the workers cannot
        do."""
        self._hops.prepare(call)

    async def start(self, call: Call) -> Answer:
        """Run the request up to the first output of an engine. Raises Refused, HandoffRefused or
        GaveUp.

        The caller frees the request's bookings in every case.
        """
        tries = _Tries()
        service = self._service
        admitted = call.resume is not None
        call.move = self._continue
        while True:
            request = excluding(call.request, tries.failed, service.router.registry)
            began = service.clock()
            plan = await self._placement.place(request)
            call.record.route_s += service.clock() - began
            if plan.first.queue is not None:
                plan = await self._wait_for_turn(plan, request, call.record, again=admitted)
            admitted = True
            if not plan.ok:
                if self._may_try_again(tries):
                    continue
                raise self._refusal(plan, request, call, tries)
            if call.one_engine and plan.prefill is not None:
                raise HandoffRefused(plan)
            if tries.died:
                _log.warning(
                    "request %s: %s may have died of it (%s); sent once more, to %s",
                    call.request.id, tries.died[-1], tries.last, _first_worker(plan).name,
                )  # fmt: skip
            earlier = call.record.plan
            try:
                if plan.prefill is None:
                    return await self._run_whole(call, request, plan)
                address = pair_address(self._fleet, plan.prefill)
                if address is not None:
                    return await self._run_pair(call, request, plan, address)
                return await self._prefill_then_decode(call, request, plan, tries)
            except asyncio.CancelledError:
                if call.record.plan is earlier:  # no decode hop was decided yet
                    call.record.left_in_prefill = True
                    service.decided(plan, request, call.record)
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

    def _end_attempt(
        self,
        call: Call,
        tries: _Tries,
        plan: RoutingPlan,
        request: RoutingRequest,
        error: _HopFailed,
    ) -> None:
        """Note that a hop failed. Raises GaveUp where no other engine gets the request."""
        service, request_id = self._service, call.request.id
        service.free(request_id, error.stage, computed=error.accepted)
        # Of a pair whose prefill failed, the decode worker got no block.
        service.free(request_id, computed=error.stage != "prefill")
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
        decision = plan.final
        # A hop that waited for its turn is booked already, and the router refuses the second one.
        self._service.book(decision, request, call.record)
        self._service.prefill_ends.begin(decision, request)
        self._service.decided(plan, request, call.record)
        response, head = await self._dispatch(call, decision, self._hops.whole(call))
        return Answer(response, head, call, plan.settled())

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
            service.decided(plan, request, call.record)
            message = self._hops.decode(call, plan, handed)
            try:
                response, head = await self._dispatch(call, decode, message)
            except _HopFailed as error:
                service.free(request.id, "decode", computed=error.accepted)
                if error.failure.sent or tries.count + 1 >= self._limits.attempts:
                    raise
                # Nothing reached the engine, so the blocks still wait to be pulled.
                self._note(call, tries, error)
                request = excluding(request, tries.failed, service.router.registry)
                continue
            return Answer(response, head, call, plan.settled())

    async def _prefill(self, call: Call, decision: Decision) -> Any:
        """Run the prefill hop; returns what it hands over."""
        worker, began = _winner(decision), self._service.clock()
        response = await self._open(call, decision, self._hops.prefill(call, decision), quick=True)
        try:
            answer = await response.read(self._limits.prefill_answer_bytes)
            self._note_first_output(decision, began, quick=True)
            call.record.take_usage(answer, prefill=True)
            return self._hops.handed_over(decision, answer)
        except UpstreamFailure as failure:
            self._trace_lost(call, decision, failure)
            accepted = _has_prompt(response, failure)
            raise _HopFailed(failure, worker, "prefill", began, accepted=accepted) from failure
        except ValueError as error:
            unreadable = UpstreamFailure("protocol", f"{worker.name}: {error}")
            raise _HopFailed(unreadable, worker, "prefill") from error
        finally:
            self._close_response(worker, response)

    async def _run_pair(
        self, call: Call, request: RoutingRequest, plan: RoutingPlan, address: tuple[str, int]
    ) -> Answer:
        """Both engines get the request at once and meet in a bootstrap room."""
        service, prefill, decode = self._service, plan.prefill, plan.decode
        if prefill is None or decode is None or prefill.ref is None:
            raise ValueError(f"plan {plan.id} has a missing hop")
        service.book(prefill, request, call.record)
        service.book(decode, request, call.record)
        service.decided(plan, request, call.record)
        config = _winner(prefill).runtime_config
        rank = prefill.ref.dp_rank - config.data_parallel_start_rank
        room = bootstrap_room(service.sample(), config.data_parallel_size, rank)
        first, second = self._hops.pair(call, plan, address, room)
        companion = asyncio.create_task(self._bootstrap_prefill(call, prefill, first))
        companion.add_done_callback(_mark_error_read)
        answering = asyncio.create_task(self._dispatch(call, decode, second))
        try:
            await asyncio.wait((companion, answering), return_when=asyncio.FIRST_COMPLETED)
            if companion.done() and companion.exception() is not None:
                await companion  # raises: decode would wait for blocks that never come
            response, head = await answering
        except BaseException:
            for task in (companion, answering):
                task.cancel()
            done = await asyncio.gather(companion, answering, return_exceptions=True)
            if isinstance(done[1], tuple):
                done[1][0].close()
            raise
        call.companion = companion
        return Answer(response, head, call, plan.settled())

    async def _bootstrap_prefill(self, call: Call, decision: Decision, message: Any) -> None:
        worker, began = _winner(decision), self._service.clock()
        response = await self._open(call, decision, message, quick=False)
        accepted = False
        try:
            answer = await response.read(self._limits.prefill_answer_bytes)
            accepted = True
            self._note_first_output(decision, began, quick=False)
            call.record.take_usage(answer, prefill=True)
        except UpstreamFailure as failure:
            self._trace_lost(call, decision, failure)
            accepted = _has_prompt(response, failure)
            raise _HopFailed(failure, worker, "prefill", began, accepted=accepted) from failure
        finally:
            self._close_response(worker, response)
            self._service.free(call.request.id, "prefill", computed=accepted)
        call.record.prefill_done_at = self._service.clock()

    # -- dispatching -----------------------------------------------------------------------

    async def _open(
        self, call: Call, decision: Decision, message: Any, *, quick: bool
    ) -> EngineStream:
        """Send to the hop's winner; ``quick``: its first output comes before the whole answer."""
        worker = _winner(decision)
        member = self._fleet.by_id(worker.worker_id)
        if call.record.dispatched_at is None:
            call.record.dispatched_at = self._service.clock()
        timeout_s, began = None, self._service.clock()
        if quick:
            timeout_s = self._first_outputs.timeout_s(worker.model, _tokens_before(decision))
        if member is not None:
            self._fleet.dispatched(member)
        if call.record.trace is not None:
            # Another dictionary: the other hop of a pair may be on its way with this one.
            call.headers = {**call.headers, **call.record.trace.hop(decision, began)}
        try:
            return await self._hops.open(
                call,
                decision,
                message,
                None if member is None else member.spec,
                first_byte_s=timeout_s,
                waiting=None if member is None else member.responses,
            )
        except UpstreamFailure as failure:
            self._trace_lost(call, decision, failure)
            raise _HopFailed(failure, worker, decision.stage, began) from failure

    def _trace_lost(self, call: Call, decision: Decision, failure: UpstreamFailure) -> None:
        """The span of a hop that failed ends; other attempts have spans of their own."""
        if call.record.trace is not None:
            call.record.trace.lost(decision, self._service.clock(), failure.kind)

    def _note_first_output(self, decision: Decision, began: float, *, quick: bool) -> None:
        """The hop's winner sent its first output."""
        worker = _winner(decision)
        took = self._service.clock() - began
        computes = decision.parameters.track_prefill_tokens
        if computes and (quick or decision.stage == "prefill"):
            self._service.prefill_ended(decision, began)
        if quick:
            self._first_outputs.observe(worker.model, _tokens_before(decision), took)
        self._fleet.answered(worker.worker_id)

    def _waits_no_more(self, worker: Worker, response: EngineStream) -> None:
        member = self._fleet.by_id(worker.worker_id)
        if member is not None:
            member.responses.discard(response)

    def _close_response(self, worker: Worker, response: EngineStream) -> None:
        self._waits_no_more(worker, response)
        response.close()

    async def _dispatch(
        self, call: Call, decision: Decision, message: Any
    ) -> tuple[EngineStream, bytes]:
        """Send to the hop's winner and wait for its first output; raises _HopFailed."""
        worker, began = _winner(decision), self._service.clock()
        if call.resume is not None:
            call.on_output = partial(self._on_moved_output, call.request.id, decision, began)
        else:
            call.moved = None
            call.on_output = None
            if not call.stream:
                call.on_output = partial(
                    self._on_whole_output, call.request.id, call.record, decision, began
                )
        response = await self._open(call, decision, message, quick=call.stream)
        if call.resume is not None:
            return response, b""  # its reader waits for it already
        try:
            _check_type(response, "text/event-stream" if call.stream else "application/json")
            if not call.stream:
                head = await response.read(self._limits.unary_answer_bytes)
                _check_answer(response, head, BY_PATH[call.path])
            else:
                timeout_s = self._first_outputs.timeout_s(worker.model, _tokens_before(decision))
                head = await self._first_output(response, timeout_s)
                if BY_PATH[call.path].preamble:
                    head = await self._after_preamble(response, head, BY_PATH[call.path], timeout_s)
        except BaseException as error:
            self._close_response(worker, response)
            if isinstance(error, UpstreamFailure):
                self._trace_lost(call, decision, error)
                accepted = _has_prompt(response, error)
                raise _HopFailed(error, worker, decision.stage, began, accepted=accepted) from error
            raise
        self._waits_no_more(worker, response)
        self._note_first_output(decision, began, quick=call.stream)
        return response, head

    def _on_moved_output(self, request_id: str, decision: Decision, began: float) -> None:
        """A response that moved has its first output from the new worker."""
        self._service.prefill_done(request_id)
        self._note_first_output(decision, began, quick=True)

    def _on_whole_output(
        self, request_id: str, record: RequestRecord, decision: Decision, began: float
    ) -> None:
        """A response that its client gets as a whole has its first output, where workers stream."""
        record.first_token_at = self._service.clock()
        self._on_moved_output(request_id, decision, began)

    async def _continue(self, call: Call, response: EngineStream, failure: UpstreamFailure) -> None:
        """Continue a response that its worker lost on another worker, after the tokens so far.

        Raises UpstreamFailure where no worker can do it.
        """
        service, plan = self._service, call.moved or call.record.plan
        lost = None if plan is None else plan.final.worker
        if call.companion is not None:
            # It frees a prefill hop at its end, which must not be that of the next worker.
            await end_tasks([call.companion])
            call.companion = None
        service.free(call.request.id)
        if lost is not None and plan is not None:
            stage = plan.final.stage
            call.record.attempts.append((lost.name, stage, str(failure)))
            self._fleet.report_failure(lost.worker_id, failure)
            call.lost[lost.worker_id] = _failed_now(failure)
        later = self._hops.continued(call, response)
        salt = None if call.parsed is None else service.salt_of(call.parsed)
        request = service.rehashed(call.request, later.token_ids or (), salt)
        later.request = excluding(request, call.lost, service.router.registry)
        _log.warning("request %s: %s; it goes on with another worker", call.request.id, failure)
        try:
            answer = await self.start(later)
        except (Refused, HandoffRefused, GaveUp) as error:
            raise failure from error
        call.moved, call.companion = answer.plan, later.companion
        service.moved += 1

    async def _first_output(self, response: EngineStream, timeout_s: float) -> bytes:
        """The stream up to its first event or a part of it, with the comments before it."""
        head = await response.readany()
        field = _FIELD.search(head)
        start = -1 if field is None else field.start(1)
        if start < 0:
            try:
                async with asyncio.timeout(timeout_s):
                    head, start = await self._first_field(response, head)
            except TimeoutError:
                raise UpstreamFailure(
                    "timeout", f"{response.origin} sent no event within {timeout_s:g} s"
                ) from None
        # Judged whole: an engine that fails before its first token sends an error as its event.
        if BLANK_LINE.search(head, start) is None:
            head = await self._first_event(response, head, start)
        event = head[start:]
        if event.startswith(_DONE):
            raise UpstreamFailure("protocol", f"{response.origin} sent [DONE] without any output")
        if not _has_json(event):
            raise UpstreamFailure("protocol", f"{response.origin} sent an event that is not JSON")
        if ERROR_EVENT.match(event):
            raise reported_error(response.origin, event_data(BLANK_LINE.split(event, 1)[0]))
        return head

    async def _first_event(self, response: EngineStream, head: bytes, start: int) -> bytes:
        """The stream up to the end of the event at ``start``, or to the most that is judged."""
        whole, searched = bytearray(head), len(head)
        while len(whole) - start < _FIRST_EVENT_BYTES and (more := await response.readany()):
            whole += more
            # The end may be cut, and begin in what was searched.
            if BLANK_LINE.search(whole, max(start, searched - _LINE_ENDS)) is not None:
                break
            searched = len(whole)
        return bytes(whole)

    async def _after_preamble(
        self, response: EngineStream, head: bytes, api: Api, timeout_s: float
    ) -> bytes:
        """The stream up to its first output or its end: until then another engine may answer."""
        most = self._limits.unary_answer_bytes
        cut, whole, piece = EventCut(), bytearray(head), head
        try:
            async with asyncio.timeout(timeout_s):
                while len(whole) <= most:
                    for number, event in enumerate(cut.feed(piece), 1):
                        if number % EVENTS_A_TURN == 0:
                            await response.turn()
                        name = event_name(event)
                        if name in api.preamble or not event_data(event):
                            continue
                        if name in api.failed:
                            raise reported_error(response.origin, event_data(event))
                        return bytes(whole)
                    piece = await response.readany()
                    if not piece:
                        raise UpstreamFailure(
                            "reset", f"{response.origin} ended its response without any output"
                        )
                    whole += piece
        except TimeoutError:
            raise UpstreamFailure(
                "timeout", f"{response.origin} sent no output within {timeout_s:g} s"
            ) from None
        raise UpstreamFailure("protocol", f"{response.origin} sent more than {most} bytes at first")

    async def _first_field(self, response: EngineStream, head: bytes) -> tuple[bytes, int]:
        """The stream up to the first field of an event, and its place."""
        whole, searched, stream = bytearray(head), 0, True
        while True:
            field = _FIELD.search(whole, max(0, searched - _FIELD_BYTES))
            if field is not None:
                return bytes(whole), field.start(1)
            # Empty lines at the beginning are looked at again and again; of those are few.
            if len(whole) >= _FIRST_BYTES and (searched < _FIRST_BYTES or whole[:1] in b"\r\n"):
                stream = _EVENT_STREAM.match(whole) is not None
            searched = len(whole)
            more = await response.readany() if stream and len(whole) <= _COMMENT_BYTES else b""
            if not more and not whole:
                raise UpstreamFailure(
                    "reset", f"{response.origin} ended its response without any output"
                )
            if not more:
                raise UpstreamFailure(
                    "protocol", f"{response.origin} sent something else than events in its stream"
                )
            whole += more

    # -- trying again ----------------------------------------------------------------------

    def _note(self, call: Call, tries: _Tries, error: _HopFailed) -> None:
        tries.count += 1
        tries.last = error.failure
        # One that refuses connections is ejected already, unless another process does it.
        if error.failure.kind != "refused" or self._placement.remote:
            tries.failed[error.worker.worker_id] = _failed_now(error.failure)
        if error.failure.fatal:
            tries.died.append(error.worker.name)
        call.record.attempts.append((error.worker.name, error.stage, str(error.failure)))
        if call.resume is None:  # else the client has the output of earlier workers
            call.record.first_token_at = None
        self._fleet.report_failure(error.worker.worker_id, error.failure, error.sent_at)

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


def _first_worker(plan: RoutingPlan) -> Worker:
    return _winner(plan.prefill if plan.prefill is not None else plan.final)


def _has_prompt(response: EngineStream, failure: UpstreamFailure) -> bool:
    """Whether an engine that failed had begun a response that is no error."""
    return response.started and failure.kind not in ("status", "protocol")


def _check_type(response: EngineStream, expected: str) -> None:
    """Raise UpstreamFailure for an answer of another type or a compressed one; one without a type
    is read."""
    encoding = response.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UpstreamFailure(
            "protocol", f"{response.origin} compressed its answer with {encoding[:40]!r}; expected "
            "no compression, as the request's Accept-Encoding says",
        )  # fmt: skip
    content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type and content_type != expected:
        raise UpstreamFailure(
            "protocol",
            f"{response.origin} answered with {content_type[:80]!r}; expected {expected}",
        )


#: What every whole answer of an endpoint has, by its field.
_ANSWERS: Final = {
    api.answers: msgspec.defstruct("_Answer", [(api.answers, list[msgspec.Raw])])
    for api in BY_PATH.values()
}


def _check_answer(response: EngineStream, body: bytes, api: Api) -> None:
    """Raise UpstreamFailure for a body that is not an answer of the endpoint."""
    try:
        msgspec.json.decode(body, type=_ANSWERS[api.answers])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamFailure(
            "protocol", f"{response.origin} answered without a JSON object with {api.answers}"
        ) from None


def _has_json(stream: bytes) -> bool:
    """Whether the data of the first event is JSON, as far as it is here; no data is fine."""
    event, *others = BLANK_LINE.split(stream, 1)
    data = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    if not data:
        return True
    if not others and len(stream) >= _FIRST_EVENT_BYTES:
        return data[0][:1] in (b"{", b"[")
    try:
        msgspec.json.decode(b"\n".join(data), type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _mark_error_read(task: asyncio.Task[None]) -> None:
    """Mark the error of the prefill half as read: after decode responds it is not awaited."""
    if not task.cancelled():
        task.exception()
