"""Selections of a standalone router: a request by tokens or hashes, and its answer.

The names of Dynamo's selection service (``model_name``, ``selection_id``,
``routing_constraints``, ``pinned_worker``) are accepted beside dynctl's own. Hashes may be unsigned
or, as Dynamo's JSON writes them, signed 64-bit numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from dynctl.base.decode_errors import RequestError
from dynctl.base.json_fields import (
    U32_MAX,
    U64_MAX,
    read_array,
    read_boolean,
    read_integer,
    read_number,
    read_object,
    read_text,
    read_tokens,
    refuse_unknown,
)
from dynctl.documents.route_of_plan import bypass_row, queue_row
from dynctl.documents.route_result import BypassRow, Constraint, QueueRow
from dynctl.documents.workers import ReportedLoad, WorkerRow
from dynctl.wire.nvext import MAX_TOKENS_IN_REQUEST
from router_core import (
    NO_CONSTRAINTS,
    Decision,
    RoutingConstraints,
    RoutingPlan,
    constraints,
    to_unsigned,
)

SCHEMA = 1
Hops = Literal["all", "prefill", "decode"]
HOPS: Final[tuple[Hops, ...]] = ("all", "prefill", "decode")
MAX_ID: Final = 256
_MAX_TAINTS: Final = 256
_MAX_ALLOWED: Final = 4096
_I64_MIN: Final = -(2**63)
_I32: Final = 2**31

_ALIASES: Final = {
    "model_name": "model",
    "selection_id": "request_id",
    "routing_constraints": "constraints",
}
_KNOWN: Final = (
    "model",
    "request_id",
    "token_ids",
    "block_hashes",
    "sequence_hashes",
    "isl_tokens",
    "constraints",
    "pins",
    "pinned_worker",
    "allowed_worker_ids",
    "cache_salt",
    "lora_name",
    "session_id",
    "hops",
    "expected_output_tokens",
    "policy_class",
    "priority",
    "strict_priority",
    "stream",
)


@dataclass(frozen=True, slots=True)
class PinRef:
    """A worker by name or id as the client wrote it; ``field`` is where, for errors."""

    worker: str | int
    dp_rank: int | None
    field: str


@dataclass(frozen=True, slots=True)
class SelectRequest:
    """One selection. Exactly one of the three columns is set; hashes come with ``isl_tokens``.

    ``hops``: ``prefill`` books the prefill hop alone: decode is decided again when prefill is done,
    or by another router. ``decode`` decides the decode hop alone.
    ``expected_output_tokens``: by which the weight of its blocks falls while it generates.
    ``policy_class``, ``priority`` and ``strict_priority`` are for the router queue. ``stream``
    False: the response comes as a whole, so the client cannot report the first output.
    """

    model: str | None
    request_id: str | None
    token_ids: Sequence[int] | None
    local_hashes: Sequence[int] | None
    sequence_hashes: Sequence[int] | None
    isl_tokens: int
    constraints: RoutingConstraints = NO_CONSTRAINTS
    pin_prefill: PinRef | None = None
    pin_decode: PinRef | None = None
    allowed: tuple[str | int, ...] | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    session_id: str | None = field(default=None, repr=False)
    hops: Hops = "all"
    expected_output_tokens: int | None = None
    policy_class: str | None = None
    priority: int = 0
    strict_priority: int = 0
    stream: bool = True


class SelectedHop(msgspec.Struct, frozen=True):
    """The worker of one hop. ``prefill_tokens`` of the prompt are not cached there."""

    worker: str
    worker_id: int
    dp_rank: int
    stage: str
    endpoint: str | None
    domains: dict[str, str]
    overlap_blocks: int
    prefill_tokens: int
    cost: float
    margin: float | None


class SelectionResult(msgspec.Struct, frozen=True):
    """The answer to a selection. ``id`` names the booking; ``booked`` are the hops that count as
    load from now on. ``implied`` is what the prefill worker requires of decode."""

    id: str
    model: str
    tokens: int
    block_size: int
    blocks: int
    booked: list[str]
    prefill: SelectedHop | None
    decode: SelectedHop | None
    implied: list[Constraint] = []
    relaxed: bool = False
    notes: list[str] = []
    bypass: BypassRow | UnsetType = UNSET
    kind: str = "Selection"
    schema: int = SCHEMA
    #: Absent without a router queue.
    queue: QueueRow | UnsetType = UNSET


class ActiveHop(msgspec.Struct, frozen=True):
    """One hop of a booking that counts as load now."""

    stage: str
    prefill_tokens: int
    output_blocks: int


class BookingState(msgspec.Struct, frozen=True):
    """What a booking still counts as load; ``active`` is empty after its end."""

    id: str
    active: list[ActiveHop]


class OverlapRow(msgspec.Struct, frozen=True):
    """How many leading blocks of a prompt one rank has cached. ``index``: the index's state."""

    worker: str
    worker_id: int
    dp_rank: int
    device_blocks: int
    index: str


class OverlapScores(msgspec.Struct, frozen=True):
    """The answer of ``POST /v1/overlap_scores``. ``num_blocks``: blocks of the prompt."""

    model: str
    block_size: int
    num_blocks: int
    workers: list[OverlapRow]


class RankLoadRow(msgspec.Struct, frozen=True):
    """The load of one rank, counted by the router and ``reported`` by the rank itself."""

    worker: str
    worker_id: int
    dp_rank: int
    model: str
    role: str
    status: str
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: float
    reported: ReportedLoad
    busy: bool


class PotentialLoads(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/loads``. ``bookings``: how many are open."""

    loads: list[RankLoadRow]
    bookings: int


def parse_select(body: Mapping[str, Any]) -> SelectRequest:
    """Read the body of ``/v1/select``; raises RequestError naming the field."""
    fields = _by_present_names(body)
    refuse_unknown(fields, "body", _KNOWN)
    tokens, local, sequence, isl = _prompt(fields)
    pin_prefill, pin_decode = _pins(fields)
    allowed = fields.get("allowed_worker_ids")
    if allowed is not None:
        items = read_array(allowed, "allowed_worker_ids", longest=_MAX_ALLOWED)
        allowed = tuple(_worker(item, f"allowed_worker_ids[{i}]") for i, item in enumerate(items))
    expected = fields.get("expected_output_tokens")
    hops = next((name for name in HOPS if name == fields.get("hops", "all")), None)
    if hops is None:
        raise RequestError(400, "out_of_range", "hops", "expected all, prefill or decode")
    return SelectRequest(
        model=_optional_text(fields, "model", 1024),
        request_id=_request_id(fields),
        token_ids=tokens,
        local_hashes=local,
        sequence_hashes=sequence,
        isl_tokens=isl,
        constraints=parse_constraints(fields.get("constraints"), "constraints"),
        pin_prefill=pin_prefill,
        pin_decode=pin_decode,
        allowed=allowed,
        cache_salt=_optional_text(fields, "cache_salt", 1024),
        lora_name=_optional_text(fields, "lora_name", 1024),
        session_id=_optional_text(fields, "session_id", 256),
        hops=hops,
        expected_output_tokens=None
        if expected is None
        else read_integer(expected, "expected_output_tokens", 1, U32_MAX),
        policy_class=_optional_text(fields, "policy_class", 128),
        priority=_integer(fields, "priority", -_I32, _I32 - 1),
        strict_priority=_integer(fields, "strict_priority", 0, U32_MAX),
        stream=read_boolean(fields.get("stream", True), "stream"),
    )


def parse_constraints(value: Any, path: str) -> RoutingConstraints:
    """``{"required_taints": [..], "preferred_taints": {taint: weight}}``; raises RequestError."""
    if value is None:
        return NO_CONSTRAINTS
    fields = read_object(value, path)
    refuse_unknown(fields, path, ("required_taints", "preferred_taints"))
    where = f"{path}.required_taints"
    items = read_array(fields.get("required_taints") or [], where, longest=_MAX_TAINTS)
    required = [read_text(item, f"{where}[{i}]", longest=1024) for i, item in enumerate(items)]
    where = f"{path}.preferred_taints"
    weights = read_object(fields.get("preferred_taints") or {}, where)
    if len(weights) > _MAX_TAINTS:
        problem = f"expected at most {_MAX_TAINTS} taints, got {len(weights)}"
        raise RequestError(400, "out_of_range", where, problem)
    preferred = {
        read_text(taint, where, longest=1024): read_number(weight, f"{where}[{taint[:64]!r}]")
        for taint, weight in weights.items()
    }
    return constraints(required, preferred)


def selection_result(plan: RoutingPlan, booked: Sequence[str]) -> SelectionResult:
    """The answer for a plan whose hops have winners."""
    final = plan.final
    hops = [hop for hop in (plan.prefill, plan.decode) if hop is not None]
    return SelectionResult(
        id=plan.id,
        model=plan.model,
        tokens=final.isl_tokens,
        block_size=final.block_size,
        blocks=final.prompt_blocks,
        booked=list(booked),
        prefill=_hop(plan.prefill),
        decode=_hop(plan.decode),
        implied=[Constraint(i.taint, i.kind, i.weight, i.origin) for i in plan.implied],
        relaxed=plan.relaxed,
        notes=list(dict.fromkeys(note for hop in hops for note in hop.notes)),
        bypass=bypass_row(plan),
        queue=queue_row(plan.first),
    )


def potential_loads(workers: Iterable[WorkerRow], *, bookings: int) -> PotentialLoads:
    """The load of every rank of these workers."""
    loads = [
        RankLoadRow(
            row.name,
            row.worker_id,
            rank.dp_rank,
            row.model,
            row.role,
            row.status,
            rank.active_requests,
            rank.active_prefill_tokens,
            rank.active_decode_blocks,
            rank.reported,
            rank.busy,
        )
        for row in workers
        for rank in row.ranks
    ]
    return PotentialLoads(loads, bookings)


def _hop(decision: Decision | None) -> SelectedHop | None:
    if decision is None or decision.winner is None:
        return None
    ref, worker = decision.refs[decision.winner], decision.workers[decision.winner]
    return SelectedHop(
        worker=worker.name,
        worker_id=ref.worker_id,
        dp_rank=ref.dp_rank,
        stage=decision.stage,
        endpoint=worker.endpoint,
        domains=dict(worker.domains),
        overlap_blocks=decision.overlap_blocks(decision.winner),
        prefill_tokens=0
        if decision.stage == "decode"
        else max(0, decision.isl_tokens - decision.cached_tokens),
        cost=decision.costs[decision.winner],
        margin=decision.margin,
    )


def _by_present_names(body: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in body.items():
        name = _ALIASES.get(key, key)
        if name in fields:
            raise RequestError(400, "given_twice", key, f"{name} is there under two names")
        fields[name] = value
    return {key: value for key, value in fields.items() if value is not None}


def _prompt(
    fields: Mapping[str, Any],
) -> tuple[Sequence[int] | None, list[int] | None, list[int] | None, int]:
    """(token ids, local hashes, sequence hashes, length in tokens); one of the three is set."""
    columns = ("token_ids", "block_hashes", "sequence_hashes")
    given = [name for name in columns if name in fields]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise RequestError(
            400, "prompt", None, f"expected exactly one of {', '.join(columns)}, got {got}"
        )
    name = given[0]
    isl = fields.get("isl_tokens")
    if isl is not None:
        isl = read_integer(isl, "isl_tokens", 1, MAX_TOKENS_IN_REQUEST)
    if name == "token_ids":
        tokens = _tokens(fields[name])
        if isl is not None and isl != len(tokens):
            problem = f"expected {len(tokens)}, the number of token_ids, got {isl}"
            raise RequestError(400, "out_of_range", "isl_tokens", problem)
        return tokens, None, None, len(tokens)
    if isl is None:
        problem = f"needed beside {name}: the prompt's length in tokens"
        raise RequestError(400, "missing_field", "isl_tokens", problem)
    hashes = _hashes(fields[name], name)
    if name == "block_hashes":
        return None, hashes, None, isl
    return None, None, hashes, isl


def _tokens(value: Any) -> Sequence[int]:
    # In C where all is well; the slow reader names what is not.
    if isinstance(value, list) and 0 < len(value) <= MAX_TOKENS_IN_REQUEST:
        plain = set(map(type, value)) == {int}
        if plain and min(value) >= 0 and max(value) <= U32_MAX:
            return value
    return read_tokens(value, "token_ids", longest=MAX_TOKENS_IN_REQUEST)


def _hashes(value: Any, name: str) -> list[int]:
    items = read_array(value, name, longest=MAX_TOKENS_IN_REQUEST, private=True)
    for i, item in enumerate(items):
        if type(item) is not int or not _I64_MIN <= item <= U64_MAX:
            problem = "expected a 64-bit integer (unsigned, or signed as Dynamo writes it)"
            raise RequestError(400, "wrong_type", f"{name}[{i}]", problem)
    return [to_unsigned(item) for item in items]


def _pins(fields: Mapping[str, Any]) -> tuple[PinRef | None, PinRef | None]:
    prefill = decode = None
    if "pins" in fields:
        pins = read_object(fields["pins"], "pins")
        refuse_unknown(pins, "pins", ("prefill", "decode"))
        prefill = _pin(pins.get("prefill"), "pins.prefill")
        decode = _pin(pins.get("decode"), "pins.decode")
    if "pinned_worker" in fields:
        if decode is not None:
            problem = "the same as pins.decode; give one of them"
            raise RequestError(400, "given_twice", "pinned_worker", problem)
        decode = _pin(fields["pinned_worker"], "pinned_worker")
    return prefill, decode


def _pin(value: Any, path: str) -> PinRef | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        return PinRef(_worker(value, path), None, path)
    refuse_unknown(value, path, ("worker", "worker_id", "dp_rank"))
    worker = value.get("worker", value.get("worker_id"))
    if worker is None:
        raise RequestError(400, "missing_field", f"{path}.worker_id", "a worker's id or name")
    rank = value.get("dp_rank")
    if rank is not None:
        rank = read_integer(rank, f"{path}.dp_rank", 0, U32_MAX)
    return PinRef(_worker(worker, f"{path}.worker_id"), rank, path)


def _worker(value: Any, path: str) -> str | int:
    if isinstance(value, str):
        return read_text(value, path, longest=256)
    if type(value) is int:
        return read_integer(value, path, 0, U64_MAX)
    raise RequestError(400, "wrong_type", path, "expected a worker's name or id")


def _optional_text(fields: Mapping[str, Any], name: str, longest: int) -> str | None:
    value = fields.get(name)
    return None if value is None else read_text(value, name, longest=longest)


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    return 0 if value is None else read_integer(value, name, low, high)


def _request_id(fields: Mapping[str, Any]) -> str | None:
    text = _optional_text(fields, "request_id", MAX_ID)
    if text is not None and (not text or not text.isprintable() or "/" in text):
        problem = "expected printable characters without '/', at least one"
        raise RequestError(400, "out_of_range", "request_id", problem)
    return text
