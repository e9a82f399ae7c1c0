"""``serve router --endpoint``: a router as a component of Dynamo, as ``python -m dynamo.router``.

It registers the endpoints ``generate``, ``best_worker_id`` and ``get_overlap_scores`` of the
component ``router`` in the workers' namespace. ``generate`` takes the request of a worker, chooses
one, forwards it there and returns its output. Observed with Dynamo 1.6.1.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from dynctl.adapters.dynamo.request_server import ErrorItem, ErrorKind, PlaneRequest
from dynctl.adapters.ports import Registrar, RequestPlaneError
from dynctl.base.decode_errors import WireError
from dynctl.health.deployment import RegisteredWorker
from dynctl.serving.dynamo.served_index import INDEXER, IndexQueries, PlaneProcess
from dynctl.serving.engines.failures import UpstreamFailure, plane_failure
from dynctl.serving.engines.fleet import Member
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.service import RoutingService, excluding
from dynctl.wire.dynamo.discovery import EndpointId, Instance
from dynctl.wire.dynamo.engine_request import MAX_TOKENS, U32, RoutingHints
from dynctl.wire.dynamo.request_plane import RawItem
from router_core import (
    ConfigError,
    ConstraintError,
    HashingError,
    Pin,
    RoutingConstraints,
    RoutingPlan,
    RoutingRequest,
    constraints,
    hash_prompt,
    slots_of,
)

_log = logging.getLogger(__name__)

COMPONENT: Final = "router"
DRY_RUN: Final = "query_instance_id:"
_NAMES: Final = ("generate", "best_worker_id", "get_overlap_scores")
_NO_WORKER: Final = "no endpoints available to route work"
_UNAVAILABLE: Final = "WorkerUnavailable"
#: The kind of a request's failure at a worker -> the error for the client; others are unknown.
_ERRORS: Final[Mapping[str, ErrorKind]] = {
    "refused": "CannotConnect",
    "connect": "CannotConnect",
    "vanished": "CannotConnect",
    "plane": "CannotConnect",
    "timeout": "ConnectionTimeout",
    "reset": "Disconnected",
    "refusal": "WorkerUnavailable",
    "size": "InvalidArgument",
}
#: Failures after which another worker may get the request: this one never began.
_NOT_BEGUN: Final = frozenset({"refused", "connect", "vanished", "refusal"})
#: Workers that may die of one request.
_MOST_DEAD: Final = 2


class Requests(Protocol):
    """The client of the request plane."""

    def ask_raw(
        self, instance: Instance, body: Any, *, timeout: float, max_bytes: int
    ) -> AsyncGenerator[RawItem, None]: ...


class Workers(Protocol):
    """The workers in discovery, and what their requests show of them; see :class:`Fleet`."""

    def registered(self, worker_id: int) -> RegisteredWorker | None: ...

    def by_id(self, worker_id: int) -> Member | None: ...

    def dispatched(self, member: Member) -> None: ...

    def answered(self, worker_id: int) -> None: ...

    def report_failure(
        self, worker_id: int, failure: UpstreamFailure, sent_at: float | None = None
    ) -> None: ...


class Bookings(Protocol):
    """Places requests and follows them to their end; see :class:`SelectionApi`."""

    @property
    def bookings(self) -> Mapping[str, Any]: ...

    async def place(
        self,
        request: RoutingRequest,
        prefill_only: Callable[[RoutingPlan], bool],
        *,
        attempt: int = 0,
    ) -> tuple[RoutingPlan, Any]: ...

    def first_output(self, booking: Any) -> None: ...

    def ended(
        self, booking: Any, stage: Any, tokens: int, outcome: str, *, computed: bool = True
    ) -> None: ...


class _WorkerPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What routing reads of a worker's request; the rest is forwarded as it is."""

    token_ids: list[U32]
    model: str = ""
    annotations: list[str] = []
    routing: RoutingHints | None = None


@dataclass(slots=True)
class _Routed:
    """A request at its worker, ``ref`` (id and rank).

    ``began`` and ``received``: when, by the monotonic and by the wall clock. ``first_at``: time of
    the first output. ``begun``: the client has items of the answer. ``failures``: their kinds.
    """

    request: RoutingRequest
    plan: RoutingPlan
    ref: tuple[int, int]
    booking: Any
    began: float
    received: float
    first_at: float | None = None
    tokens: int = 0
    outcome: str = "error"
    begun: bool = False
    complete: bool = False
    failures: list[str] = field(default_factory=list)


class RouterComponent:
    """The endpoints of one router. ``indexer``: answer ``kv_indexer_query`` too.

    ``process`` listens and registers; nothing is registered while no worker is there.
    """

    def __init__(
        self,
        service: RoutingService,
        workers: Workers,
        bookings: Bookings,
        requests: Requests,
        registrar: Registrar,
        endpoint: EndpointId,
        host: str,
        limits: Limits,
        *,
        indexer: bool = False,
    ) -> None:
        self._service = service
        self._workers = workers
        self._bookings = bookings
        self._requests = requests
        self._limits = limits
        own = endpoint._replace(component=COMPONENT)
        handlers = (self.generate, self.best_worker_id, self.get_overlap_scores)
        self._endpoints = [own._replace(name=name) for name in _NAMES]
        self.process = PlaneProcess(service, registrar, host, self._served_endpoints)
        for at, handler in zip(self._endpoints, handlers, strict=True):
            self.process.server.serve(at, handler)
        if indexer:
            at = endpoint._replace(name=INDEXER)
            self._endpoints.append(at)
            self.process.server.serve(at, IndexQueries(service).answer)

    def _served_endpoints(self) -> list[EndpointId]:
        """Nothing is registered that cannot serve."""
        return self._endpoints if self._service.router.registry.models() else []

    # -- endpoints -------------------------------------------------------------------------

    async def generate(self, plane: PlaneRequest) -> AsyncIterator[Any]:
        """Choose a worker, forward the request there, and return its output."""
        body = plane.body
        try:
            prompt = msgspec.convert(body, _WorkerPrompt, strict=True)
        except msgspec.ValidationError as error:
            raise ErrorItem(f"invalid request: {error}", "InvalidArgument") from None
        service = self._service
        began, received = service.clock(), service.wall()
        request = self._request(prompt, plane.request_id)
        if DRY_RUN in prompt.annotations:
            await service.read_index(request)
            routing = {**_ids(*_chosen_ref(service.plan(request))), "token_ids": prompt.token_ids}
            yield {"data": {**_EMPTY, "routing_data": routing}}
            return
        plan, _ = await self._bookings.place(request, lambda _: False)
        ref = _chosen_ref(plan)  # a refusal has no booking
        booking = self._bookings.bookings[request.id]
        routed = _Routed(request, plan, ref, booking, began, received)
        try:
            while not routed.complete:
                sent_at = service.clock()
                try:
                    async with aclosing(self._forward(body, *routed.ref)) as items:
                        async for raw in items:
                            routed.begun = True
                            yield self._take_item(routed, raw)
                    routed.complete = True
                except RequestPlaneError as error:
                    await self._place_again(routed, error, sent_at)
        except WireError as error:
            raise ErrorItem(f"the worker's answer: {error}", "Unknown") from None
        except (asyncio.CancelledError, GeneratorExit):
            routed.outcome = "cancelled"
            raise
        finally:
            if self._bookings.bookings.get(request.id) is routed.booking:
                computed = routed.first_at is not None
                self._bookings.ended(
                    routed.booking, None, routed.tokens, routed.outcome, computed=computed
                )

    def _take_item(self, routed: _Routed, raw: RawItem) -> Any:
        """The item for the client: the worker's, with who serves the request in the first output,
        and its times in the last one."""
        item = raw.decode()
        chunk = item.get("data") if isinstance(item, dict) else None
        if not isinstance(chunk, dict):
            return raw
        routed.tokens += len(chunk.get("token_ids") or ())
        routing: dict[str, Any] = {}
        now = self._service.clock()
        if routed.first_at is None:
            routed.first_at = now
            self._workers.answered(routed.ref[0])
            self._bookings.first_output(routed.booking)
            routing |= _ids(*routed.ref)
        if chunk.get("finish_reason") is not None:
            routed.outcome = "success"
            timing = _timing(routed.received, routed.began, routed.first_at, now)
            timing["kv_hit_rate"] = _hit_rate(routed.plan, routed.request)
            routing["timing"] = timing
        if routing:
            chunk["routing_data"] = routing
        return item

    async def _place_again(self, routed: _Routed, error: RequestPlaneError, sent_at: float) -> None:
        """Place a request that a worker failed on another one. Raises ErrorItem where that is not
        possible."""
        self._workers.report_failure(routed.ref[0], plane_failure(error), sent_at)
        routed.failures.append(error.kind)
        decision, record = routed.plan.final, routed.booking.record
        name = "" if decision.worker is None else decision.worker.name
        record.attempts.append((name, decision.stage, str(error)))
        record.error = str(error)
        for_client = ErrorItem(str(error), _ERRORS.get(error.kind, "Unknown"))
        # What has begun at the client goes on nowhere else: it may ask again.
        if routed.begun or not self._may_try_again(routed.failures):
            raise for_client from None
        why = f"this attempt excludes it because it just failed: {error}"
        registry = self._service.router.registry
        routed.request = request = excluding(routed.request, {routed.ref[0]: why}, registry)
        self._service.free(request.id, computed=False)
        plan, _ = await self._bookings.place(request, lambda _: False, attempt=len(routed.failures))
        if not plan.ok:  # placed as a refusal; the client gets the worker's error
            record.outcome, record.response = "upstream_error", None
            self._service.observers.response(request.id, record.client_response())
            raise for_client from None
        routed.plan, routed.ref = plan, _chosen_ref(plan)
        routed.booking = self._bookings.bookings[request.id]

    async def _forward(
        self, body: Mapping[str, Any], worker_id: int, dp_rank: int
    ) -> AsyncGenerator[RawItem, None]:
        """The items of a worker's answer to the request. Raises RequestPlaneError."""
        worker, member = self._workers.registered(worker_id), self._workers.by_id(worker_id)
        if worker is None:
            raise RequestPlaneError(f"worker {worker_id} is not registered any more", "refusal")
        if member is not None:
            self._workers.dispatched(member)
        answer = self._requests.ask_raw(
            worker.instance,
            {**body, "routing": _hints(body.get("routing"), worker_id, dp_rank)},
            timeout=self._limits.idle_s,
            max_bytes=self._limits.stream_answer_bytes,
        )
        async with aclosing(answer) as items:
            async for raw in items:
                yield raw

    def _may_try_again(self, failed: Sequence[str]) -> bool:
        """Whether another worker may get a request after failures of these kinds."""
        if len(failed) >= self._limits.attempts or failed[-1] not in {*_NOT_BEGUN, "reset"}:
            return False
        return failed.count("reset") < _MOST_DEAD

    async def best_worker_id(self, plane: PlaneRequest) -> AsyncIterator[Any]:
        """The worker for a list of token ids; books nothing."""
        tokens = _tokens(plane.body, "token_ids")
        request = self._request(_WorkerPrompt(token_ids=tokens), plane.request_id)
        await self._service.read_index(request)
        yield {"data": _chosen_ref(self._service.plan(request))[0]}

    async def get_overlap_scores(self, plane: PlaneRequest) -> AsyncIterator[Any]:
        """The cached blocks of each rank by tier."""
        body = plane.body
        if not isinstance(body, dict) or "token_ids" not in body:
            raise ErrorItem("KeyError: 'token_ids'", "Unknown")
        hints = RoutingHints(
            lora_name=_maybe_text(body, "lora_name"),
            cache_salt=_maybe_text(body, "cache_namespace"),
        )
        prompt = _WorkerPrompt(token_ids=_tokens(body["token_ids"], "token_ids"), routing=hints)
        request = self._request(prompt, plane.request_id)
        await self._service.read_index(request)
        router = self._service.router
        mask = router.registry.model(request.model)
        held = dict(router.index.find_matches(request.sequence_hashes, mask).items())
        rows = []
        for slot in slots_of(mask):
            device, host, disk = held.get(slot, 0), 0, 0
            if router.tiers.mask >> slot & 1:
                leading = request.sequence_hashes[:device]
                name = router.index.name_of(slot, leading) if device else None
                host, disk = router.tiers.extend(slot, name, request.local_hashes, device)
            ref = router.registry.ref(slot)
            rows.append(
                {
                    "worker_id": ref.worker_id,
                    "dp_rank": ref.dp_rank,
                    "device_blocks": device,
                    "host_pinned_blocks": device + host,
                    "disk_blocks": device + host + disk,
                    "host_pinned_extension_blocks": host,
                    "disk_extension_blocks": disk,
                    "shared_beyond_device_blocks": None,
                }
            )
        shared = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        yield {
            "data": {
                "block_size": request.block_size,
                "num_blocks": len(request.sequence_hashes),
                "workers": rows,
                "shared_cache": shared,
            }
        }

    # -- inside ----------------------------------------------------------------------------

    def _request(self, prompt: _WorkerPrompt, request_id: str) -> RoutingRequest:
        service = self._service
        models = service.models()
        if not models:
            raise ErrorItem(_NO_WORKER, _UNAVAILABLE)
        model = prompt.model if prompt.model in models else models[0]
        hints = prompt.routing or RoutingHints()
        lora_name = hints.lora_name or None
        size, eagle = service.served.block_size(model), service.served.is_eagle(model)
        try:
            hashes = hash_prompt(
                prompt.token_ids,
                size,
                lora_name=lora_name,
                cache_namespace=hints.cache_salt or None,
                is_eagle=eagle,
            )
            limits = _constraints(hints)
        except (HashingError, ConstraintError, ConfigError, TypeError, AttributeError) as error:
            raise ErrorItem(f"invalid request: {error}", "InvalidArgument") from None
        pinned = hints.backend_instance_id
        allowed = hints.allowed_worker_ids
        return RoutingRequest(
            str(uuid.uuid4()) if self._is_running(request_id) else request_id,
            model,
            len(prompt.token_ids),
            size,
            tuple(hashes.sequence),
            constraints=limits,
            pin_decode=None if pinned is None else Pin(pinned, hints.dp_rank),
            allowed_worker_ids=None if allowed is None else frozenset(allowed),
            local_hashes=tuple(hashes.local),
            lora_name=lora_name,
            served_name=service.served.served_name(lora_name or ""),
            salted=bool(hints.cache_salt),
            is_eagle=eagle,
            priority=hints.priority or 0,
            strict_priority=hints.strict_priority or 0,
            arrived_at=service.clock(),
            chained=True,
        )

    def _is_running(self, request_id: str) -> bool:
        router = self._service.router
        return (
            bool(router.load.bookings(request_id))
            or request_id in self._bookings.bookings
            or request_id in router.queue
        )


def _constraints(hints: RoutingHints) -> RoutingConstraints:
    """Raises ConstraintError, ConfigError, TypeError or AttributeError for what is none."""
    limits = hints.routing_constraints or {}
    return constraints(limits.get("required_taints") or (), limits.get("preferred_taints") or {})


_EMPTY: Final[Mapping[str, Any]] = {
    "token_ids": [],
    "tokens": None,
    "text": None,
    "output_type": "text",
    "cum_log_probs": None,
    "log_probs": None,
    "top_logprobs": None,
    "finish_reason": None,
    "index": None,
}
"""An output without tokens, as Dynamo writes it."""


def _chosen_ref(plan: RoutingPlan) -> tuple[int, int]:
    """The worker id and rank of a plan; raises ErrorItem for a refusal."""
    decision = plan.final
    if not plan.ok or decision.winner is None:
        raise ErrorItem(_NO_WORKER, _UNAVAILABLE)
    ref = decision.require()
    return ref.worker_id, ref.dp_rank


def _ids(worker_id: int, dp_rank: int) -> dict[str, Any]:
    """Who serves a request; the hops of a request to one pool are one."""
    return {
        "worker_id": {
            "prefill_worker_id": worker_id,
            "prefill_dp_rank": dp_rank,
            "decode_worker_id": worker_id,
            "decode_dp_rank": dp_rank,
        }
    }


def _hints(given: Any, worker_id: int, dp_rank: int) -> dict[str, Any]:
    hints = dict(given) if isinstance(given, dict) else {}
    return {**hints, "backend_instance_id": worker_id, "dp_rank": dp_rank}


def _timing(received: float, began: float, first_at: float, now: float) -> dict[str, Any]:
    """Milliseconds of a request, as Dynamo reports them; the wait is that for the first output."""
    ttft = 1000 * (first_at - began)
    return {
        "request_received_ms": int(1000 * received),
        "prefill_wait_time_ms": 0.0,
        "prefill_time_ms": ttft,
        "ttft_ms": ttft,
        "total_time_ms": 1000 * (now - began),
        "router_queue_depth": 0,
    }


def _hit_rate(plan: RoutingPlan, request: RoutingRequest) -> float:
    """The part of the prompt's blocks that the worker has, as Dynamo counts: an incomplete block
    is one too."""
    decision = plan.final
    blocks = -(-request.isl_tokens // request.block_size)
    held = 0 if decision.winner is None else decision.overlap_blocks(decision.winner)
    return held / blocks if blocks else 0.0


def _tokens(value: Any, name: str) -> list[int]:
    """Token ids, or the error of Dynamo's binding."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        kind = type(value).__name__
        raise ErrorItem(
            f"TypeError: argument '{name}': '{kind}' object cannot be converted to 'Sequence'",
            "InvalidArgument",
        )
    try:
        tokens = msgspec.convert(value, list[U32])
    except msgspec.ValidationError as error:
        raise ErrorItem(f"TypeError: argument '{name}': {error}", "InvalidArgument") from None
    if len(tokens) > MAX_TOKENS:
        raise ErrorItem(f"argument '{name}': more than {MAX_TOKENS:,} tokens", "InvalidArgument")
    return tokens


def _maybe_text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise ErrorItem(f"TypeError: argument '{name}': expected a string", "InvalidArgument")
    return value or None
