"""What a frontend process and the router process of ``--router`` send to each other.

A frontend joins and gets a lease with the fleet; it sends each request's hashes, never text or
token ids, and gets the chosen workers; it reports what happens to the request. Times are seconds.
Hashes are packed: 8 bytes each, little-endian, as base64 in JSON. As a list of numbers they were
most of what a message costs.
Both processes may have different versions of dynctl: unknown fields are ignored, and a change that
an older process would misunderstand raises :data:`PROTOCOL`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.documents.decisions import ClientResponse
from router_core import (
    NO_CONSTRAINTS,
    Bypass,
    CostInputs,
    CostParameters,
    Decision,
    FunnelStep,
    Outcome,
    Pin,
    Queueing,
    Reason,
    Rejection,
    RouterConfig,
    RoutingConstraints,
    RoutingPlan,
    RoutingRequest,
    Session,
    Stage,
    TaintConstraint,
    Worker,
    WorkerWithDpRank,
)

#: Frontends and routers with different numbers refuse each other.
PROTOCOL = 4
#: Maximum of reports in one message, and of requests in one message of running ones.
MAX_REPORTS = 4096
#: Maximum of requests in one message of placements; the router decides them without a pause.
MAX_PLACES = 16
MAX_FRONTENDS = 256
_MOST_BLOCKS = 1 << 20
_MOST_TOKENS = 1 << 30
_HASH_BYTES: Final = 8


class Join(msgspec.Struct, frozen=True):
    """``POST /v1/frontends/NAME/join``: a process starts, or returns after it lost its lease."""

    protocol: int
    version: str = ""


class FleetCard(msgspec.Struct, frozen=True):
    """One worker as a frontend needs it. Keys of engines are never sent.

    ``worker`` is the plain form of `router_core.Worker`; ``reason``: why it gets no requests.
    ``given``: the worker comes from the command line or the workers file of the router, so the
    frontend's own engine key may be sent there. ``key_env``: the variable with the engine's own
    key, where router and frontend were started by one command, with the same environment.
    ``kind``: the name of its kind of engine.
    """

    worker: dict[str, Any]
    reason: str | None = None
    bootstrap: tuple[str, int] | None = None
    forward_authorization: bool = False
    given: bool = False
    key_env: str | None = None
    kind: str = ""


class FleetCards(msgspec.Struct, frozen=True):
    """The fleet, the router's settings and the thresholds of each model. ``version`` changes when
    one of them does."""

    version: str
    cards: list[FleetCard]
    settings: dict[str, Any]
    thresholds: dict[str, dict[str, float | int | None]]


class Joined(msgspec.Struct, frozen=True):
    """The answer to `Join`. Without a message from the frontend for ``lease_s`` seconds the lease
    ends, and its bookings with it."""

    lease: str
    lease_s: float
    fleet: FleetCards
    version: str = ""


class SentRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `RoutingRequest` with packed hashes and without times: each process has another clock.

    ``session`` is the session's key.
    """

    id: str
    model: str
    isl_tokens: int
    block_size: int
    sequence_hashes: bytes = b""
    constraints: RoutingConstraints = NO_CONSTRAINTS
    pin_prefill: Pin | None = None
    pin_decode: Pin | None = None
    allowed_worker_ids: frozenset[int] | None = None
    worker_set: str | None = None
    is_eagle: bool = False
    overlap_modelled: bool = True
    notes: tuple[str, ...] = ()
    lora_name: str | None = None
    salted: bool = False
    local_hashes: bytes = b""
    more_hashes: tuple[bytes, ...] = ()
    lengths: tuple[int, ...] = ()
    policy_class: str | None = None
    priority: int = 0
    strict_priority: int = 0
    session: str | None = None
    chained: bool = False
    served_name: str | None = None
    streams: bool = True
    excluded: tuple[tuple[int, str], ...] = ()

    @property
    def size(self) -> int:
        """Bytes that have no bound of their own."""
        return len(self.sequence_hashes) + len(self.local_hashes) + sum(map(len, self.more_hashes))


class Place(msgspec.Struct, frozen=True):
    """``POST .../place``: choose the workers of a request and book it as their load.

    ``attempt`` counts the places of one request: a later one replaces the bookings of an earlier
    one, the same one again gets the same answer. ``dry``: book nothing.
    """

    lease: str
    request: SentRequest
    attempt: int = 0
    dry: bool = False


class ToPlace(msgspec.Struct, frozen=True):
    """One request of an `Exchange`; ``attempt`` as in `Place`."""

    request: SentRequest
    attempt: int = 0


class Placed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer for one request of an `Exchange`: a placement, or the error of a `Place`.
    ``waits``: it would wait in the router queue and is not placed; send it alone."""

    placement: PlacementReply | None = None
    waits: bool = False
    status: int = 0
    code: str = ""
    message: str = ""


class PlaceDecode(msgspec.Struct, frozen=True):
    """``POST .../decode``: prefill of a request is done; choose its decode worker again.

    ``allowed`` are the request's allowed workers now, without those that failed it; None: all.
    ``excluded``: those that failed it, by id, each with the reason.
    """

    lease: str
    id: str
    attempt: int
    allowed: frozenset[int] | None = None
    excluded: tuple[tuple[int, str], ...] = ()


class RejectedRank(msgspec.Struct, frozen=True):
    """A rank that a filter rejected."""

    worker_id: int
    dp_rank: int
    reason: Reason


class Step(msgspec.Struct, frozen=True):
    """One filter of a refusal."""

    filter: str
    entered: int
    left: int
    rejected: list[RejectedRank] = []
    skipped: str | None = None


class Hop(msgspec.Struct, frozen=True, omit_defaults=True):
    """One hop: its winner with the winner's inputs, or (``worker_id`` None) why there is none."""

    stage: Stage
    mode: str
    worker_id: int | None = None
    dp_rank: int = 0
    cost: float = 0.0
    overlap_blocks: int = 0
    indexed_blocks: int | None = None
    host_blocks: int = 0
    disk_blocks: int = 0
    prefill_tokens: int = 0
    active_blocks: int = 0
    active_requests: int = 0
    outcome: Outcome = "selected"
    message: str | None = None
    notes: tuple[str, ...] = ()
    constraints: RoutingConstraints | None = None
    funnel: list[Step] = []
    queue: Queueing | None = None


class PlacementReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `Place` and `PlaceDecode`: a `RoutingPlan` without the losing candidates.

    ``booked``: the hops that count as load from now on.
    """

    id: str
    booked: list[Stage] = []
    prefill: Hop | None = None
    decode: Hop | None = None
    implied: tuple[TaintConstraint, ...] = ()
    relaxed: bool = False
    bypass: Bypass | None = None


class FirstOutput(msgspec.Struct, frozen=True, tag="first"):
    """The client gets the first output of the request."""

    id: str
    attempt: int


class Block(msgspec.Struct, frozen=True, tag="block"):
    """Generation filled one more block."""

    id: str
    attempt: int
    decay_fraction: float | None = None


class Ended(msgspec.Struct, frozen=True, tag="end"):
    """A hop of the request ended, or (``stage`` None) the request. Not ``computed``: the engine
    did not accept it. ``response``: what the client of the request got."""

    id: str
    attempt: int
    stage: Stage | None = None
    outcome: str = "success"
    output_tokens: int = 0
    computed: bool = True
    response: ClientResponse | None = None


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """These requests still run."""

    ids: list[str]


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """An engine sent the first output of a request."""

    worker_id: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An engine failed a request that was sent ``ago_s`` seconds before (None: not known).

    ``kind`` and ``status`` as in `UpstreamFailure`.
    """

    worker_id: int
    kind: str
    message: str
    status: int = 0
    ago_s: float | None = None


Report = FirstOutput | Block | Ended | Alive | Answered | Failed


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True):
    """``POST /v1/frontends/exchange``: what happened since the last message, in order, and then the
    requests that are placed, one after the other. It renews the lease.

    ``number`` counts the messages of a lease from 1: the reports of one that was received already
    change nothing.
    """

    lease: str
    number: int
    reports: list[Report] = []
    places: list[ToPlace] = []


class Exchanged(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `Exchange`: one for each request, in the same order. ``fleet``: the version of
    the fleet now."""

    fleet: str
    answers: list[Placed] = []


class Lease(msgspec.Struct, frozen=True):
    """``POST .../fleet``, ``.../leave``: a message without more."""

    lease: str


class Running(msgspec.Struct, frozen=True):
    """A request that was placed before the lease began, and the hops that count as load."""

    request: SentRequest
    attempt: int
    hops: list[Hop]
    first_output: bool = False


class Resume(msgspec.Struct, frozen=True):
    """``POST .../resume``: requests to book again under a new lease."""

    lease: str
    running: list[Running]


class Resumed(msgspec.Struct, frozen=True):
    """The answer to `Resume`: how many are booked. Others run on workers that are gone."""

    booked: int


class FrontendRow(msgspec.Struct, frozen=True):
    """One frontend process of ``GET /v1/frontends``."""

    name: str
    bookings: int
    age_s: float
    silent_s: float
    version: str = ""


class FrontendList(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/frontends``."""

    frontends: list[FrontendRow]
    lease_s: float


def sent_request(request: RoutingRequest) -> SentRequest:
    """The form in which a frontend sends a request."""
    return SentRequest(
        request.id,
        request.model,
        request.isl_tokens,
        request.block_size,
        _pack(request.sequence_hashes),
        request.constraints,
        request.pin_prefill,
        request.pin_decode,
        request.allowed_worker_ids,
        request.worker_set,
        request.is_eagle,
        request.overlap_modelled,
        request.notes,
        request.lora_name,
        request.salted,
        _pack(request.local_hashes) if request.local_hashes else b"",
        tuple(map(_pack, request.more_hashes)) if request.more_hashes else (),
        request.lengths,
        request.policy_class,
        request.priority,
        request.strict_priority,
        None if request.session is None else request.session.key,
        request.chained,
        request.served_name,
        request.streams,
        request.excluded,
    )


def request_of(sent: SentRequest, block_size: int, now: float) -> RoutingRequest:
    """The request, which arrived at ``now``. Checks what the types of the message do not; raises
    RequestError with the field."""
    request = RoutingRequest(
        sent.id,
        sent.model,
        sent.isl_tokens,
        sent.block_size,
        _unpack("sequence_hashes", sent.sequence_hashes),
        sent.constraints,
        sent.pin_prefill,
        sent.pin_decode,
        sent.allowed_worker_ids,
        sent.worker_set,
        sent.is_eagle,
        sent.overlap_modelled,
        sent.notes,
        sent.lora_name,
        sent.salted,
        _unpack("local_hashes", sent.local_hashes) if sent.local_hashes else (),
        _unpack_prompts(sent.more_hashes) if sent.more_hashes else (),
        sent.lengths,
        sent.policy_class,
        sent.priority,
        sent.strict_priority,
        now,
        None if sent.session is None else Session(sent.session, now),
        sent.chained,
        sent.served_name,
        sent.streams,
        sent.excluded,
    )
    _check(request, block_size)
    return request


def _pack(hashes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def _unpack(field: str, packed: bytes) -> tuple[int, ...]:
    count, rest = divmod(len(packed), _HASH_BYTES)
    if rest:
        raise _wrong(field, f"expected {_HASH_BYTES} bytes a hash, got {len(packed)} bytes")
    return struct.unpack(f"<{count}Q", packed)


def _unpack_prompts(columns: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    return tuple(_unpack("more_hashes", column) for column in columns)


def _wrong(field: str, problem: str) -> RequestError:
    return RequestError(400, "out_of_range", f"request.{field}", problem)


def _check(request: RoutingRequest, block_size: int) -> None:
    if not request.id or len(request.id) > 256 or not request.id.isprintable():
        raise _wrong("id", "expected 1 to 256 printable characters")
    if request.session is not None and len(request.session.key) > 64:
        raise _wrong("session", "expected a key of at most 64 characters")
    if request.served_name is not None and not 0 < len(request.served_name) <= 256:
        raise _wrong("served_name", "expected 1 to 256 characters")
    if request.block_size != block_size:
        raise _wrong("block_size", f"expected {block_size}, got {request.block_size}")
    if not 0 <= request.isl_tokens <= _MOST_TOKENS:
        raise _wrong("isl_tokens", f"expected 0 to {_MOST_TOKENS}, got {request.isl_tokens}")
    _check_prompts(request, block_size)


def _check_prompts(request: RoutingRequest, block_size: int) -> None:
    blocks = len(request.sequence_hashes)
    if request.more_hashes:
        blocks += sum(map(len, request.more_hashes))
    if blocks > min(_MOST_BLOCKS, request.isl_tokens // block_size):
        problem = f"{request.isl_tokens} tokens of {block_size} a block have fewer than {blocks}"
        raise _wrong("sequence_hashes", f"{problem} blocks")
    if request.local_hashes and len(request.local_hashes) != len(request.sequence_hashes):
        raise _wrong("local_hashes", "expected as many as sequence_hashes")
    if len(request.more_hashes) > _MOST_BLOCKS or len(request.lengths) > _MOST_BLOCKS:
        raise _wrong("lengths", f"expected at most {_MOST_BLOCKS} prompts")


def placement(plan: RoutingPlan, booked: list[Stage]) -> PlacementReply:
    """The part of a plan that its frontend needs."""
    return PlacementReply(
        plan.id,
        booked,
        hop_of(plan.prefill),
        hop_of(plan.decode),
        plan.implied,
        plan.relaxed,
        plan.bypass,
    )


def hop_of(decision: Decision | None) -> Hop | None:
    """The part of a decision that its frontend needs."""
    if decision is None:
        return None
    at, inputs = decision.winner, decision.inputs
    if at is None:
        return Hop(
            decision.stage,
            decision.mode,
            outcome=decision.outcome,
            message=decision.message,
            notes=decision.notes,
            constraints=decision.constraints,
            funnel=[_step(step) for step in decision.funnel],
            queue=decision.queue,
        )
    ref = decision.refs[at]
    if inputs is None:
        return Hop(
            decision.stage,
            decision.mode,
            ref.worker_id,
            ref.dp_rank,
            decision.costs[at],
            notes=decision.notes,
            outcome=decision.outcome,
            queue=decision.queue,
        )
    return Hop(
        decision.stage,
        decision.mode,
        ref.worker_id,
        ref.dp_rank,
        decision.costs[at],
        inputs.overlap_blocks[at],
        None if inputs.indexed_blocks is None else inputs.indexed_blocks[at],
        0 if inputs.host_blocks is None else inputs.host_blocks[at],
        0 if inputs.disk_blocks is None else inputs.disk_blocks[at],
        inputs.prefill_tokens[at],
        inputs.active_blocks[at],
        inputs.active_requests[at],
        decision.outcome,
        None,
        decision.notes,
        None,
        [],
        decision.queue,
    )


def plan_of(
    placement: PlacementReply,
    request: RoutingRequest,
    find: Callable[[int], Worker | None],
    config: RouterConfig,
) -> RoutingPlan:
    """The plan with the winners as its only candidates; raises KeyError for a worker that is
    unknown here."""
    return RoutingPlan(
        placement.id,
        request.model,
        None
        if placement.prefill is None
        else decision_of(placement.prefill, request, find, config),
        None if placement.decode is None else decision_of(placement.decode, request, find, config),
        placement.implied,
        placement.relaxed,
        placement.bypass,
    )


def decision_of(
    hop: Hop,
    request: RoutingRequest,
    find: Callable[[int], Worker | None],
    config: RouterConfig,
) -> Decision:
    """As :func:`plan_of`, for one hop."""
    common: Mapping[str, Any] = {
        "id": request.id,
        "stage": hop.stage,
        "mode": hop.mode,
        "model": request.model,
        "isl_tokens": request.isl_tokens,
        "block_size": request.block_size,
        "prompt_blocks": request.prompt_blocks,
        "temperature": 0.0,
        "sample": 0.0,
        "parameters": CostParameters.for_stage(config, hop.stage),
        "overlap_modelled": request.overlap_modelled,
        "lora_name": request.lora_name,
        "salted": request.salted,
        "notes": hop.notes,
        "outcome": hop.outcome,
        "message": hop.message,
        "queue": hop.queue,
    }
    if hop.worker_id is None:
        funnel = tuple(_funnel_step(step, find) for step in hop.funnel)
        return Decision(**common, funnel=funnel, constraints=hop.constraints or request.constraints)
    worker = find(hop.worker_id)
    if worker is None or hop.dp_rank not in worker.ranks:
        raise KeyError(hop.worker_id)
    return Decision(
        **common,
        constraints=request.constraints,
        workers=(worker,),
        refs=(WorkerWithDpRank(hop.worker_id, hop.dp_rank),),
        inputs=CostInputs(
            request.isl_tokens,
            request.block_size,
            request.prompt_blocks,
            (hop.overlap_blocks,),
            (hop.prefill_tokens,),
            (hop.active_blocks,),
            None,
            (hop.active_requests,),
            host_blocks=(hop.host_blocks,) if hop.host_blocks else None,
            disk_blocks=(hop.disk_blocks,) if hop.disk_blocks else None,
            indexed_blocks=None if hop.indexed_blocks is None else (hop.indexed_blocks,),
        ),
        costs=(hop.cost,),
        winner=0,
    )


def _step(step: FunnelStep) -> Step:
    rejected = [
        RejectedRank(rejection.worker.worker_id, rejection.dp_rank, rejection.reason)
        for rejection in step.rejected
    ]
    return Step(step.filter, step.entered, step.left, rejected, step.skipped)


def _funnel_step(step: Step, find: Callable[[int], Worker | None]) -> FunnelStep:
    rejected = []
    for rank in step.rejected:
        worker = find(rank.worker_id)
        if worker is not None:
            rejected.append(Rejection(worker, rank.dp_rank, rank.reason))
    return FunnelStep(step.filter, step.entered, step.left, tuple(rejected), step.skipped)
