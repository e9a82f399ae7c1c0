"""A recording: what a router saw and did, as records in order of time.

``at`` is wall-clock seconds everywhere; a router is replayed with ``now=at``. Records have hashes
of prompt blocks and digests, never text, token ids, salts or credentials. Their file is
:mod:`dynctl.documents.recording_file`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from router_core import (
    Change,
    Pin,
    Router,
    RoutingRequest,
    Session,
    constraints,
    sequence_hashes,
)

RecordingSource = Literal["frontend", "observe", "dynamo", "simulation"]

#: What a source may be able to give (`Start.complete`).
KINDS: Final = (
    "arrivals",
    "decisions",
    "kv_events",
    "loads",
    "outcomes",
    "workers",
    "topology",
)

#: Sources that see another router's choices, and what these do not publish.
OF_DYNAMO: Final = frozenset({"observe", "dynamo"})
NO_PROMPT_HASHES: Final = "Dynamo publishes no prompt hashes of requests with a prefill hop"
NO_DECISIONS: Final = "no frontend publishes its decisions"
#: What to do then.
PUBLISH_DECISIONS: Final = "start the frontends with --router-mode kv --router-replica-sync"
#: What to do where a router had no request.
RECORD_MORE: Final = "send requests while it records, or record for longer: --for 5m"
NO_OUTCOMES: Final = "Dynamo does not publish what its engines reused"


#: Numbers that a reader counts with: a count, a length that divides, and any finite number.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Id = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)]


class Start(msgspec.Struct, frozen=True):
    """The first record. ``router`` names the process and ``version`` its release.

    ``settings``: the router's, by field name of RouterConfig. ``block_sizes``: tokens per block by
    model. ``exact_reuse`` and ``learns``: as in ``router_core.Router``. ``complete``: those of
    KINDS that the source gives; an answer that needs another one is unknown. ``model_paths`` and
    ``tokenizers``: model -> tokenizer directory on that machine, and the tokenizer's fingerprint.
    """

    at: float
    source: RecordingSource
    router: str
    version: str
    settings: dict[str, Any] = {}
    block_sizes: dict[str, Length] = {}
    exact_reuse: bool = False
    learns: bool = False
    complete: frozenset[str] = frozenset()
    model_paths: dict[str, str] = {}
    tokenizers: dict[str, str] = {}


class State(msgspec.Struct, frozen=True):
    """The router's snapshot document (``Router.snapshot``) at this moment: a place to start."""

    at: float
    snapshot: dict[str, Any]


class Changed(msgspec.Struct, frozen=True):
    """One change that the router applied."""

    at: float
    change: Change


class RequestOptions(msgspec.Struct, frozen=True):
    """The types of `Arrived.asked`."""

    required: list[str] = []
    preferred: dict[str, Finite] = {}
    pin_prefill: tuple[Id, Count | None] | msgspec.UnsetType = msgspec.UNSET
    pin_decode: tuple[Id, Count | None] | msgspec.UnsetType = msgspec.UNSET
    allowed: list[Id] = []
    policy_class: str | None = None
    strict_priority: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] = 0
    not_modelled: bool = False
    served_name: str | None = None


class Arrived(msgspec.Struct, frozen=True):
    """A request arrived.

    ``hashes``: the sequence hashes of its full prompt blocks (each chained to its parent, salted)
    as the router uses them. ``tenant``: a digest of its cache salt, empty without one.
    ``output_limit``: the most tokens that it may generate, None without a limit.
    ``asked``: what else decides where it may go, as far as it was given: ``required`` (taints),
    ``preferred`` (taint -> weight), ``pin_prefill`` and ``pin_decode`` ([worker id, rank]),
    ``allowed`` (worker ids), ``policy_class``, ``strict_priority``, ``not_modelled``.
    ``router``: which of several routers took it, where one recording has the requests of several.
    ``segments``: the parts of a chat in their order, each its kind (``system``, ``user``, ``tools``
    ...) and the token at which it begins; empty where they are unknown.
    """

    at: float
    id: str
    model: str
    isl_tokens: Count
    block_size: Length
    hashes: tuple[int, ...] = ()
    salted: bool = False
    tenant: str = ""
    lora: str = ""
    session: str = ""
    priority: int = 0
    output_limit: Count | None = None
    asked: dict[str, Any] = {}
    router: int = 0
    segments: tuple[tuple[str, Count], ...] = ()


class Decided(msgspec.Struct, frozen=True):
    """The router chose, or refused.

    ``prefill`` and ``decode``: (worker id, rank), None without that hop. ``cached_blocks``: the
    router's expectation at the worker that computes the prompt; ``best_cached_blocks``: the most
    that any eligible worker had; both None where the source does not know them. ``cost`` and
    ``margin`` are in blocks. ``outcome``: ``selected`` or the name of the refusal, ``code`` its
    code. ``why``: the short reason (such as ``cache``, ``load``). ``doubts``: codes.
    ``document``: the RouteResult in JSON, empty where it is not kept.
    """

    at: float
    id: str
    model: str
    prefill: tuple[int, int] | None = None
    decode: tuple[int, int] | None = None
    cached_blocks: Finite | None = None
    best_cached_blocks: Finite | None = None
    cost: float | None = None
    margin: float | None = None
    outcome: str = "selected"
    code: str = ""
    why: str = ""
    doubts: tuple[str, ...] = ()
    document: bytes = b""


class Finished(msgspec.Struct, frozen=True):
    """A request ended; None where a value is unknown.

    ``status``: of the HTTP response. ``outcome``: ``success`` (in simulations
    ``completed``), ``refused``, ``upstream_error`` (``failed``), ``client_error``, ``cancelled`` or
    ``internal``. ``cached_tokens``: what the engine reported that
    it reused. ``state``, ``error``, ``duration_s``, ``attempts`` (worker, stage, problem) and
    ``output_events`` as in `ClientResponse`; ``state`` is empty in recordings without them.
    """

    at: float
    id: str
    status: int | None = None
    outcome: str = ""
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    ttft_s: Finite | None = None
    itl_s: Finite | None = None
    queued_s: Finite | None = None
    state: str = ""
    error: str = ""
    duration_s: Finite | None = None
    attempts: tuple[tuple[str, str, str], ...] = ()
    output_events: Count | None = None


class Noted(msgspec.Struct, frozen=True):
    """Something that readers must know: a condition, a step of a canary, records that are missing.

    ``kind``: ``began``, ``ended``, ``holds`` (at a State), ``canary``, ``dropped``, ``stopped``,
    ``quiet`` (a sign of life); a reader adds ``cut`` and ``skipped``. ``code``: a code of
    `dynctl explain`, or empty.
    """

    at: float
    kind: str
    subject: str
    code: str = ""
    text: str = ""


class RecordingReport(msgspec.Struct, frozen=True):
    """What a recording file has. ``first`` and ``last``: the times that it covers, in wall-clock
    seconds. ``records``: how many of each kind. ``missing``: those of KINDS that its source cannot
    give. ``notes``: what was dropped, cut or skipped, and how it ended. ``conditions``: codes that
    began while it ran. ``states``: moments at which a router can start.
    """

    file: str
    bytes: int
    source: str
    router: str
    version: str
    first: float
    last: float
    records: dict[str, int]
    models: list[str]
    states: int
    missing: list[str]
    conditions: dict[str, int] = {}
    notes: list[str] = []
    kind: str = "RecordingReport"
    schema: int = 1


Unwrapped = Start | State | Arrived | Decided | Finished | Noted
Record = Unwrapped | Changed


def moved_snapshot(snapshot: dict[str, Any], by: float) -> dict[str, Any]:
    """A router's snapshot whose times are ``by`` seconds later: those of another clock.

    A service counts in seconds of its monotonic clock, a recording in wall-clock seconds.
    """

    def later(at: float | None) -> float | None:
        return None if at is None else at + by

    def learned_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                **row,
                **(
                    {"blocks": [[block, at + by] for block, at in row["blocks"]]}
                    if "blocks" in row
                    else {}
                ),
                **({"at": row["at"] + by} if "at" in row else {}),
            }
            for row in rows
        ]

    plain = dict(snapshot)
    plain["freshness"] = {
        slot: [row[0], later(row[1]), later(row[2]), *row[3:]]
        for slot, row in snapshot["freshness"].items()
    }
    times = ("booked_at", "seen_at", "anchor_since")
    plain["load"] = [
        {**row, **{name: row[name] + by for name in times if name in row}}
        for row in snapshot["load"]
    ]
    busy = snapshot["busy"]
    plain["busy"] = {
        **busy,
        "reported": {
            slot: {**row, "at": later(row["at"])} for slot, row in busy["reported"].items()
        },
    }
    for name in ("learned", "recent", "predicted"):
        plain[name] = learned_rows(snapshot.get(name, ()))
    sessions = snapshot.get("sessions")
    if sessions:
        plain["sessions"] = {
            **sessions,
            "bound": [[*row[:-1], row[-1] + by] for row in sessions["bound"]],
        }
    if "queue" in snapshot:
        # Scores keep the order of these requests among each other, and before later ones.
        queue = snapshot["queue"]
        entries = [[*row[:5], row[5] + by, *row[6:]] for row in queue["entries"]]
        plain["queue"] = {**queue, "entries": entries}
    return plain


# -- a recorded request -------------------------------------------------------------------


def request_of(arrived: Arrived) -> RoutingRequest:
    """The request as the router got it."""
    options = arrived.asked

    def pin(name: str) -> Pin | None:
        return Pin(*options[name]) if name in options else None

    allowed = options.get("allowed")
    return RoutingRequest(
        arrived.id,
        arrived.model,
        arrived.isl_tokens,
        arrived.block_size,
        arrived.hashes,
        constraints(options.get("required", ()), options.get("preferred", {})),
        pin("pin_prefill"),
        pin("pin_decode"),
        None if allowed is None else frozenset(allowed),
        overlap_modelled=not options.get("not_modelled", False),
        lora_name=arrived.lora or None,
        salted=arrived.salted,
        priority=arrived.priority,
        strict_priority=options.get("strict_priority", 0),
        policy_class=options.get("policy_class"),
        arrived_at=arrived.at,
        session=Session(arrived.session, arrived.at) if arrived.session else None,
        served_name=options.get("served_name"),
    )


def local_hashes_below(router: Router, hashes: Sequence[int]) -> tuple[int, ...]:
    """The local hashes of a prompt's blocks that a rank has below its device; -1 for the others,
    which a router does not look up there, or does not find.

    A recording has the sequence hash of each block, which follows from the one before it and the
    local hash. The events of lower tiers have the local hashes.
    """
    local_hashes = [-1] * len(hashes)
    held: dict[int, dict[int | None, list[tuple[int, int]]]] = {}
    for row in router.tiers.dump():
        after = held.setdefault(row["slot"], {})
        for parent, local, name in row["blocks"]:
            after.setdefault(parent, []).append((local, name))
    for slot, after in held.items():
        depth = router.index.find_matches(hashes, 1 << slot).column([slot])[0]
        parents: set[int | None] = {None}
        if depth:
            parents = {router.index.name_of(slot, hashes[:depth])}
        for i in range(depth, len(hashes)):
            above = hashes[i - 1] if i else None
            candidates = [block for parent in parents for block in after.get(parent, ())]
            parents = set()
            for local, name in candidates:
                if sequence_hashes((local,), above)[0] == hashes[i]:
                    local_hashes[i] = local
                    parents.add(name)
    return tuple(local_hashes)
