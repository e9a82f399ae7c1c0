"""Admission: requests that wait in the router queue, until a worker has room for their prompt.

A request enters the queue in :meth:`Admission.wait`. It leaves by its turn, with its first hop
booked already, so that no other request sees the same room; or because its client left, or because
it waited too long. Turns are given out when load, fleet or settings change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from dynctl.planning.prefill_load import AGAIN_S
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import (
    Applied,
    Change,
    Decision,
    Dequeued,
    QueueEntry,
    QueueFull,
    Router,
    RoutingPlan,
    RoutingRequest,
)

#: Turns in one step of the event loop.
TURNS: Final = 32

_log = logging.getLogger(__name__)


Decide = Callable[[RoutingRequest], RoutingPlan]


@dataclass(slots=True)
class _Waiting:
    """A request in the queue. ``plan``: why it waits; ``admitted`` gets the plan of its turn, which
    ``decide`` makes."""

    request: RoutingRequest
    record: RequestRecord
    plan: RoutingPlan
    since: float
    admitted: asyncio.Future[RoutingPlan]
    decide: Decide


class Booker(Protocol):
    """The service that decides and books (`RoutingService`)."""

    @property
    def router(self) -> Router: ...

    def clock(self) -> float: ...

    def apply(self, change: Change) -> Applied: ...

    def advance(self) -> None: ...

    def plan(self, request: RoutingRequest) -> RoutingPlan: ...

    def book(
        self, decision: Decision, request: RoutingRequest, record: RequestRecord
    ) -> Applied: ...

    def decided(
        self, plan: RoutingPlan, request: RoutingRequest, record: RequestRecord
    ) -> object: ...

    def free(self, request_id: str) -> Applied: ...


class Admission:
    """The waiting requests of one service."""

    def __init__(self, service: Booker) -> None:
        self._service = service
        #: Request id -> what waits; empty while the queue is off.
        self.waiting: dict[str, _Waiting] = {}
        #: (model, class, stage, kind of limit) -> requests that were turned away.
        self.turned_away: Counter[tuple[str, str, str, str]] = Counter()
        self._soon: asyncio.Handle | None = None
        self._again: asyncio.TimerHandle | None = None

    async def wait(
        self,
        plan: RoutingPlan,
        request: RoutingRequest,
        record: RequestRecord,
        *,
        decide: Decide | None = None,
    ) -> RoutingPlan:
        """The plan of a request when it is admitted; its first hop is booked then.

        ``decide`` makes the plan then, without booking it; by default that of all hops.
        ``plan`` says that it waits (``plan.waits``). Without a winner, the result is the refusal:
        the queue or its class is full, the wait took too long, or no worker is left. The caller
        frees the bookings of the request in every case. The observers get the plan of a request
        whose client leaves.
        """
        service = self._service
        entering = service.router.entering(plan, request)
        if isinstance(entering, QueueFull):
            return self._turned_away(plan, entering)
        service.apply(entering)
        admitted: asyncio.Future[RoutingPlan] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request, record, plan, service.clock(), admitted, decide or service.plan)
        self.waiting[request.id] = waiting
        self.try_soon()
        limit_s = service.router.config.router_queue_max_wait_secs
        try:
            async with asyncio.timeout(limit_s):
                return await admitted
        except TimeoutError:
            if admitted.done() and not admitted.cancelled():
                return admitted.result()  # by its turn, at the last moment
            waited = service.clock() - waiting.since
            full = QueueFull(entering.policy_class, "wait_seconds", round(waited), round(limit_s))
            return self._turned_away(plan, full)
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                service.free(request.id)
            service.decided(plan, request, record)  # its last decision: the client left
            raise
        finally:
            if self.waiting.pop(request.id, None) is not None:
                service.apply(Dequeued(request.id))
                self.try_soon()

    def try_soon(self) -> None:
        """Give out turns in the next step of the event loop: something changed."""
        if self._soon is None and self.waiting:
            self._soon = asyncio.get_running_loop().call_soon(self._turns)

    # -- inside ----------------------------------------------------------------------------

    def _turned_away(self, plan: RoutingPlan, full: QueueFull) -> RoutingPlan:
        stage = plan.first.stage
        self.turned_away[plan.model, full.policy_class, stage, full.limit_kind] += 1
        return plan.turned_away(full)

    def _turns(self) -> None:
        self._soon = None
        self._service.advance()
        left = TURNS
        for model in self._service.router.queue.models():
            while left and self._turn(model):
                left -= 1
        if not left:
            self.try_soon()
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self.waiting:
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(AGAIN_S, self.try_soon)

    def _turn(self, model: str) -> bool:
        """Admit the next request of a model; False if all of them have to wait."""
        service = self._service
        plans: dict[str, RoutingPlan | Exception] = {}

        def admissible(entry: QueueEntry) -> bool:
            waiting = self.waiting.get(entry.request_id)
            if waiting is None:
                return True
            try:
                plan = plans[entry.request_id] = waiting.decide(waiting.request)
            except Exception as error:  # its own request fails, the others must not wait for it
                _log.exception("request %s failed in the router queue", entry.request_id)
                plans[entry.request_id] = error
                return True
            queue = plan.first.queue
            return queue is None or not queue.all_busy or not plan.ok

        turn = service.router.next_turn(model, admissible)
        if turn is None:
            return False
        request_id = turn.entry.request_id
        service.apply(Dequeued(request_id, turn.credits, turn.cursor))
        waiting = self.waiting.pop(request_id, None)
        if waiting is None or waiting.admitted.done():
            return True
        planned = plans[request_id]
        if isinstance(planned, Exception):
            waiting.admitted.set_exception(planned)
            return True
        waited = service.clock() - waiting.since
        plan = planned.after_wait(waiting.plan, waited)
        waiting.record.queued_s = waited
        waiting.record.queue_depth = len(service.router.queue)
        if plan.ok:
            service.book(plan.first, waiting.request, waiting.record)
        waiting.admitted.set_result(plan)
        return True
