"""Ask for what a worker's cache holds: its local indexer, and an indexer that a frontend serves.

A worker keeps its last events (1,024 in Dynamo 1.6) and a tree of what they led to. Asked for
everything, or from an event that it no longer has, it answers with a TreeDump; asked from one that
it has, with the Events from there to the newest. The events of a dump replace all that is known.
They may be the kept events themselves, removals among them, or made up from the tree: then their
ids count from 0 and mean nothing. ``last_event_id`` is where the stream goes on in both cases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.events import RouterEvent, decode_router_events, router_event_from
from dynctl.wire.dynamo.msgpack_slices import SLICE_BYTES, LongArray, find_long_array
from dynctl.wire.dynamo.request_plane import RawItem, printable

MAX_HASHES: Final = 65_536
"""Of one indexer query; a prompt of a million tokens at block size 16."""

_SLICE_EVENTS: Final = 200

_U64 = Annotated[int, Meta(ge=0)]
_T = TypeVar("_T")


def recovery_query(
    worker_id: int,
    dp_rank: int,
    start_event_id: int | None = None,
    end_event_id: int | None = None,
) -> dict[str, Any]:
    """The body that asks a worker's ``recovery_target``. Without a start: for everything.

    Dynamo runs on to its newest event whatever the end says.
    """
    return {
        "worker_id": worker_id,
        "dp_rank": dp_rank,
        "start_event_id": start_event_id,
        "end_event_id": end_event_id,
        "supports_tree_dump_failed": True,
        "kind": "recovery",
    }


class EventSlices(Protocol):
    """A worker's events in order; can be read more than once.

    Reading raises WireError at a slice that cannot be read; what came before it is good.
    """

    def __len__(self) -> int: ...

    def slices(self) -> Iterator[tuple[RouterEvent, ...]]:
        """A few hundred events at a time: let the event loop run between two slices."""
        ...


@dataclass(frozen=True, slots=True)
class TreeDump:
    """Everything the rank holds. ``reset_scope`` says what it replaces; seen: ``all``."""

    events: EventSlices
    last_event_id: int
    reset_scope: str


@dataclass(frozen=True, slots=True)
class Events:
    """Every event from the start that was asked for to the newest."""

    events: EventSlices
    last_event_id: int


@dataclass(frozen=True, slots=True)
class TooNew:
    """The worker has no such event yet; asking from ``newest_available + 1`` is told so too."""

    requested_start: int
    newest_available: int

    @property
    def nothing_missed(self) -> bool:
        """Whether who asked has everything. If not, the worker counts anew: it was restarted."""
        return self.requested_start == self.newest_available + 1


@dataclass(frozen=True, slots=True)
class InvalidRange:
    """The end lies before the start."""

    start_id: int
    end_id: int


@dataclass(frozen=True, slots=True)
class RecoveryError:
    """The worker or the indexer says why it has no answer."""

    message: str


RecoveryAnswer = TreeDump | Events | TooNew | InvalidRange | RecoveryError


@dataclass(frozen=True, slots=True)
class _EncodedEvents:
    """Those of a long answer, undecoded."""

    array: LongArray

    def __len__(self) -> int:
        return len(self.array)

    def slices(self) -> Iterator[tuple[RouterEvent, ...]]:
        for payload in self.array.slices():
            yield decode_router_events(payload)


@dataclass(frozen=True, slots=True)
class _PlainEvents:
    """Those of a short answer, or of one that came as JSON: decoded to plain objects."""

    events: Sequence[Any]

    def __len__(self) -> int:
        return len(self.events)

    def slices(self) -> Iterator[tuple[RouterEvent, ...]]:
        for start in range(0, len(self.events), _SLICE_EVENTS):
            part = self.events[start : start + _SLICE_EVENTS]
            yield tuple(
                router_event_from(event, f"events[{start + place}]")
                for place, event in enumerate(part)
            )


class _TreeDumpMessage(msgspec.Struct):
    last_event_id: _U64
    reset_scope: str = "all"


class _EventsMessage(msgspec.Struct):
    last_event_id: _U64


class _TooNewMessage(msgspec.Struct):
    requested_start: _U64 | None = None
    newest_available: _U64 | None = None


class _InvalidRangeMessage(msgspec.Struct):
    start_id: _U64
    end_id: _U64


def parse_recovery(item: Any) -> RecoveryAnswer:
    """Read a worker's answer: an item as ``ask_raw`` gives it, or decoded.

    A long undecoded one in msgpack is not decoded here but by its ``events.slices()``. What is
    not known, or says that the worker failed, is a RecoveryError. Raises WireError for what cannot
    be read.
    """
    raw = RawItem.of(item)
    document = memoryview(raw.document)
    if raw.codec == "msgpack" and len(document) > SLICE_BYTES:
        array = find_long_array(document, "events", "last_event_id")
        if array is not None:
            return _with_events(array.name, _EncodedEvents(array), array.fields)
    kind, told = _variant(raw.decode())
    if kind in ("TreeDump", "Events"):
        events = told.get("events") if isinstance(told, dict) else None
        if not isinstance(events, list):
            raise WireError(kind, "expected a field `events` with a list")
        return _with_events(kind, _PlainEvents(events), told)
    if kind == "TooNew":
        read = _convert(kind, told, _TooNewMessage)
        return TooNew(read.requested_start or 0, read.newest_available or 0)
    if kind == "InvalidRange":
        invalid = _convert(kind, told, _InvalidRangeMessage)
        return InvalidRange(invalid.start_id, invalid.end_id)
    return _failure(kind, told)


def _with_events(kind: str, events: EventSlices, told: dict[str, Any]) -> RecoveryAnswer:
    if kind == "TreeDump":
        dump = _convert(kind, told, _TreeDumpMessage)
        return TreeDump(events, dump.last_event_id, printable(dump.reset_scope))
    if kind == "Events":
        return Events(events, _convert(kind, told, _EventsMessage).last_event_id)
    return _failure(kind, None)


# -- an indexer that a frontend or a router serves -------------------------------------------------


@dataclass(frozen=True, slots=True)
class TieredScores:
    """Leading blocks of the query that each (worker id, rank) holds on its device.

    ``lower_tiers`` are the entries for other tiers as they came.
    """

    device: dict[tuple[int, int], int]
    lower_tiers: tuple[Any, ...] = ()


class _WorkerMessage(msgspec.Struct):
    worker_id: _U64
    dp_rank: _U64 = 0


class _ScoresMessage(msgspec.Struct):
    scores: list[tuple[_WorkerMessage, _U64]]


class _TieredScoresMessage(msgspec.Struct):
    device: _ScoresMessage
    lower_tier: list[Any] = []


def indexer_query(
    model: str, local_hashes: Sequence[int], *, device_only: bool | None = None
) -> dict[str, Any]:
    """The body that asks ``kv_indexer_query``: only a prompt's hashes (u64) travel.

    Raises ValueError above MAX_HASHES.
    """
    if len(local_hashes) > MAX_HASHES:
        raise ValueError(f"{len(local_hashes):,} hashes are over the limit of {MAX_HASHES:,}")
    body: dict[str, Any] = {"model_name": model, "block_hashes": list(local_hashes)}
    if device_only is not None:
        body["device_only"] = device_only
    return body


def parse_scores(item: Any) -> TieredScores | RecoveryError:
    """Read an indexer's answer: an item undecoded or decoded. Raises WireError."""
    kind, told = _variant(RawItem.of(item).decode())
    if kind != "TieredScores":
        return _failure(kind, told)
    read = _convert(kind, told, _TieredScoresMessage)
    device = {(worker.worker_id, worker.dp_rank): blocks for worker, blocks in read.device.scores}
    return TieredScores(device, tuple(read.lower_tier))


# -- what both have in common ----------------------------------------------------------------------


def _variant(decoded: Any) -> tuple[str, Any]:
    """(name, contents) of a Rust enum; one without contents is its bare name."""
    if isinstance(decoded, str):
        return decoded, None
    if isinstance(decoded, dict) and decoded.get("event") == "error":
        return "Error", _text(decoded.get("error") or decoded.get("comment"))
    if isinstance(decoded, dict) and len(decoded) == 1:
        [(name, told)] = decoded.items()
        return str(name), told
    raise WireError("item", "expected one answer by its name")


def _failure(kind: str, told: Any) -> RecoveryError:
    if kind == "Error":
        return RecoveryError(_text(told))
    if kind == "TreeDumpFailed":
        return RecoveryError(f"the worker could not dump its tree: {_text(told)}")
    return RecoveryError(f"an answer that is not known here: {printable(kind)}")


def _text(told: Any) -> str:
    """What a peer gives as a reason: a text, or an object whose ``message`` is one."""
    if isinstance(told, dict):
        told = next((told[key] for key in ("message", "error", "reason") if key in told), None)
    return printable(told) if isinstance(told, str) else "no reason given"


def _convert(kind: str, told: Any, to: type[_T]) -> _T:
    try:
        return msgspec.convert(told, to)
    except msgspec.ValidationError as error:
        raise WireError(kind, str(error)) from None
