"""A saved view: the whole state of a router at one moment, to repeat a decision.

The file is JSON. It contains hashes, loads, cards and settings, never prompts or tokens. ``now`` is
the clock of the router that saved it, so ages do not depend on when the file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import single_line
from dynctl.base.json_reader import check_depth
from dynctl.documents.codec import decode, encode
from dynctl.documents.doubts import Doubt, doubt
from router_core import Captured, Router

SCHEMA = 1
#: The router's own schema that the forms below describe; the router refuses another one.
_SNAPSHOT_SCHEMA = 1
#: A view of a thousand workers with a million blocks is about 60 MB.
MAX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SavedView:
    """The content of a view file. ``model_paths``: model -> tokenizer directory, where known.

    ``from_file``: the view was read from a file, whose author may be another user: its paths are
    not followed, except to directories of dynctl's own.

    ``chats``: how the router's frontend prepares a chat for its template: ``plain`` as received,
    or ``dynamo`` as Dynamo's frontend does. ``doubts``: what its source did not know.
    ``origins``: setting -> where it was read, of a router that exports only some; None: all are
    the router's own.
    """

    router: Router
    now: float
    preset: str | None = None
    model_paths: dict[str, str] = field(default_factory=dict)
    tokenizers: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    source: str = "view"
    chats: str = "plain"
    doubts: tuple[Doubt, ...] = ()
    origins: dict[str, str] | None = None
    from_file: bool = False


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Slot = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class _WorkerForm(msgspec.Struct):
    """The fields of a worker that no constructor of the router checks."""

    worker_id: int
    name: str
    model: str
    slots: list[_Slot]
    role: str = "aggregated"
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 16
    runtime_config: dict[str, Any] = {}
    can_prefill: bool = True
    kv_events: bool = True
    endpoint: str | None = None
    device: str | None = None


class _RegistryForm(msgspec.Struct):
    capacity: _Slot
    workers: list[_WorkerForm]
    unavailable: dict[str, str]


class _BookingForm(msgspec.Struct):
    request_id: str
    stage: str
    slot: _Slot
    prefill_tokens: _Count
    sequence_hashes: list[int]
    anonymous_blocks: _Count
    booked_at: float
    seen_at: float
    output_blocks: _Count
    adjustment: float
    predicted_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    anchor_since: float | None = None


class _ReportForm(msgspec.Struct):
    active_decode_blocks: _Count | None = None
    kv_used_blocks: _Count | None = None
    active_prefill_tokens: _Count | None = None
    at: float | None = None


class _BusyForm(msgspec.Struct):
    thresholds: dict[str, dict[str, float | None]]
    reported: dict[str, _ReportForm]


class _ChainForm(msgspec.Struct):
    parent_hash: int | None
    block_hashes: list[int]
    local_hashes: list[int]


class _GroupForm(msgspec.Struct):
    group: int
    span: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    needed: int | None
    names: list[tuple[int, int]]


class _GroupsForm(msgspec.Struct):
    main: int | None
    groups: list[_GroupForm]


class _IndexSlotForm(msgspec.Struct):
    slot: _Slot
    events: list[_ChainForm]
    groups: _GroupsForm | None = None
    extra: list[tuple[int, int]] = []


class _IndexForm(msgspec.Struct):
    slots: list[_IndexSlotForm]


class _TierForm(msgspec.Struct):
    slot: _Slot
    tier: str
    blocks: list[tuple[int | None, int, int]]


class _LearnedForm(msgspec.Struct):
    """The blocks of a slot, or a running booking."""

    slot: _Slot
    blocks: list[tuple[int, float]] = []
    request: tuple[str, str] | None = None
    leased: list[int] = []
    fresh: list[int] = []
    at: float = 0.0


class _TransferForm(msgspec.Struct):
    levels: list[tuple[str, float, float]]
    beyond: tuple[float, float]
    bytes_per_token: float | None
    by_model: dict[str, float]


_Lane = tuple[int, int | None]


class _QueueForm(msgspec.Struct):
    known: bool
    number: _Count
    entries: list[
        tuple[
            str,
            str,
            str,
            _Count,
            _Count,
            float,
            _Count,
            float,
            _Count,
            tuple[int, int | None] | None,
        ]
    ]
    credits: list[tuple[str, str, _Count]]
    cursors: dict[str, str]


class _SnapshotForm(msgspec.Struct):
    """The types of a snapshot's values. The router itself judges what they mean."""

    schema: int
    config: dict[str, Any]
    registry: _RegistryForm
    index: _IndexForm
    load: list[_BookingForm]
    busy: _BusyForm
    rotation: list[tuple[str, str, _Count]]
    freshness: dict[str, tuple[str, float | None, float | None, _Count, bool]]
    tiers: list[_TierForm] = []
    recovering: list[int] = []
    learned: list[_LearnedForm] = []
    recent: list[_LearnedForm] = []
    predicted: list[_LearnedForm] = []
    learns: bool = False
    transfer: _TransferForm | None = None
    queue: _QueueForm | None = None
    policy_classes: dict[str, Any] | None = None


class _ViewDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The file. ``snapshot`` is :meth:`Router.snapshot`."""

    kind: str = "RoutingView"
    schema: int = SCHEMA
    now: float
    preset: str | None = None
    source: str = "view"
    chats: str = "plain"
    model_paths: dict[str, str] = {}
    tokenizers: dict[str, str] = {}
    assumptions: tuple[str, ...] = ()
    #: None in files of versions that did not record doubts.
    doubts: tuple[Doubt, ...] | None = None
    origins: dict[str, str] | None = None
    snapshot: dict[str, Any]


def encode_view(
    captured: Captured,
    *,
    now: float,
    preset: str | None = None,
    model_paths: dict[str, str] | None = None,
    tokenizers: dict[str, str] | None = None,
    assumptions: tuple[str, ...] = (),
    source: str = "this router",
    chats: str = "plain",
    doubts: tuple[Doubt, ...] = (),
    origins: dict[str, str] | None = None,
) -> bytes:
    """The file's bytes, from ``router.capture()``.

    ``tokenizers``: model -> fingerprint, which shows whether another tokenizer is in use.
    """
    snapshot = captured.document()
    # Sessions belong to clients, and their keys mean something to the running router only.
    snapshot.pop("sessions", None)
    return encode(
        _ViewDocument(
            now=now,
            preset=preset,
            source=source,
            chats=chats,
            model_paths=model_paths or {},
            tokenizers=tokenizers or {},
            assumptions=assumptions,
            doubts=doubts,
            origins=origins,
            snapshot=snapshot,
        )
    )


def decode_view(data: bytes, *, from_file: bool = True) -> SavedView:
    """Read a view file; raises WireError naming the field that does not fit. ``from_file`` False:
    the bytes come from a source that the operator named, such as a frontend."""
    if len(data) > MAX_BYTES:
        raise WireError("view file", f"{len(data):,} bytes are over the limit of {MAX_BYTES:,}")
    read = decode(data, _ViewDocument, "view file")
    try:
        check_depth(read.snapshot, "view file")
        if read.snapshot.get("schema") == _SNAPSHOT_SCHEMA:
            msgspec.convert(read.snapshot, _SnapshotForm)
        router = Router.restore(read.snapshot)
        router.advance(read.now)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # ValidationError and SnapshotError are ValueErrors.
        raise WireError("view file", single_line(str(error))) from None
    return SavedView(
        router=router,
        now=read.now,
        preset=read.preset,
        model_paths=read.model_paths,
        tokenizers=read.tokenizers,
        assumptions=read.assumptions,
        source=read.source,
        chats=read.chats,
        doubts=(doubt("DYR0703"),) if read.doubts is None else read.doubts,
        origins=read.origins,
        from_file=from_file,
    )
