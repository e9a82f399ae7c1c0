"""Queries of a worker's cache contents: its local indexer, and the indexer of a frontend.

A worker keeps its last events (1,024 in Dynamo 1.6) and a tree of their result. A query for
everything, or from an event that it no longer has, returns a TreeDump; a query from an event that
it has returns the Events from there to the newest. The events of a dump replace all earlier ones.
They may be the kept events themselves, including removals, or generated from the tree: then their
ids count from 0 and are not event ids. In both cases the stream continues after ``last_event_id``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta

from dynctl.base.decode_errors import WireError
from dynctl.wire.dynamo.events import (
    RouterEvent,
    decode_router_events,
    encode_router_events,
    router_event_from,
)
from dynctl.wire.dynamo.msgpack_slices import SLICE_BYTES, LongArray, find_long_array
from dynctl.wire.dynamo.request_plane import RawItem, printable

MAX_HASHES: Final = 65_536
"""The most hashes of one indexer query: a prompt of a million tokens at block size 16."""

_SLICE_EVENTS: Final = 200

_U64 = Annotated[int, Meta(ge=0)]
_T = TypeVar("_T")


def recovery_query(
    worker_id: int, dp_rank: int, start_event_id: int | None = None
) -> dict[str, Any]:
    """The body of a query to a worker's ``recovery_target``; without a start, for everything."""
    return {
        "worker_id": worker_id,
        "dp_rank": dp_rank,
        "start_event_id": start_event_id,
        "end_event_id": None,  # Dynamo returns all events up to the newest, and ignores it
        "supports_tree_dump_failed": True,
        "kind": "recovery",
    }


class EventSlices(Protocol):
    """A worker's events in order; can be read more than once.

    Reading raises WireError at a slice that cannot be read; the slices before it are valid.
    """

    def __len__(self) -> int: ...

    def slices(self) -> Iterator[tuple[RouterEvent, ...]]:
        """A few hundred events at a time. Callers let the event loop run between two slices."""
        ...


@dataclass(frozen=True, slots=True)
class TreeDump:
    """All blocks of the rank. ``reset_scope``: what it replaces; only ``all`` was observed.

    ``last_event_id`` is None in Dynamo 1.0, which sends the events alone.
    """

    events: EventSlices
    last_event_id: int | None
    reset_scope: str


@dataclass(frozen=True, slots=True)
class Events:
    """Every event from the requested start to the newest.

    ``last_event_id`` is None in Dynamo 1.0, which sends the events alone, if there is none.
    """

    events: EventSlices
    last_event_id: int | None


@dataclass(frozen=True, slots=True)
class TooNew:
    """The worker has no such event yet, also if the start is ``newest_available + 1``."""

    requested_start: int
    newest_available: int

    @property
    def nothing_missed(self) -> bool:
        """Whether no event is missing. If one is, the worker restarted and counts from 0 again."""
        return self.requested_start == self.newest_available + 1


@dataclass(frozen=True, slots=True)
class InvalidRange:
    """The end lies before the start."""

    start_id: int
    end_id: int


@dataclass(frozen=True, slots=True)
class RecoveryError:
    """The worker or the indexer reports why it has no answer."""

    message: str


RecoveryAnswer = TreeDump | Events | TooNew | InvalidRange | RecoveryError


@dataclass(frozen=True, slots=True)
class _EncodedEvents:
    """The undecoded events of a long answer."""

    array: LongArray

    def __len__(self) -> int:
        return len(self.array)

    def slices(self) -> Iterator[tuple[RouterEvent, ...]]:
        for payload in self.array.slices():
            yield decode_router_events(payload)


@dataclass(frozen=True, slots=True)
class _PlainEvents:
    """The decoded events of a short answer, or of one in JSON."""

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
    """Read a worker's answer: an undecoded item, or a decoded one.

    A long undecoded msgpack item is decoded later, by its ``events.slices()``. An unknown answer,
    or the report of a failure, is a RecoveryError. Raises WireError for an unreadable answer.
    """
    raw = RawItem.wrap(item)
    document = memoryview(raw.document)
    if raw.codec == "msgpack" and len(document) > SLICE_BYTES:
        array = find_long_array(document, "events", "last_event_id")
        if array is not None:
            return _with_events(array.name, _EncodedEvents(array), array.fields)
    kind, content = _variant(raw.decode())
    if kind in ("TreeDump", "Events"):
        return _plain_events_answer(kind, content)
    if kind == "TooNew":
        read = _convert(kind, content, _TooNewMessage)
        return TooNew(read.requested_start or 0, read.newest_available or 0)
    if kind == "InvalidRange":
        invalid = _convert(kind, content, _InvalidRangeMessage)
        return InvalidRange(invalid.start_id, invalid.end_id)
    return _failure(kind, content)


def _plain_events_answer(kind: str, content: Any) -> RecoveryAnswer:
    """Events in a field, with their last id, or of earlier versions: the list alone."""
    if isinstance(content, list):
        events = _PlainEvents(content)
        if kind == "TreeDump":
            return TreeDump(events, None, "all")
        event_ids = (event.event_id for part in events.slices() for event in part)
        return Events(events, max(event_ids, default=None))
    if not isinstance(content, dict) or not isinstance(content.get("events"), list):
        raise WireError(kind, "expected a field `events` with a list")
    return _with_events(kind, _PlainEvents(content["events"]), content)


def _with_events(kind: str, events: EventSlices, fields: dict[str, Any]) -> RecoveryAnswer:
    if kind == "TreeDump":
        dump = _convert(kind, fields, _TreeDumpMessage)
        return TreeDump(events, dump.last_event_id, printable(dump.reset_scope))
    if kind == "Events":
        return Events(events, _convert(kind, fields, _EventsMessage).last_event_id)
    return _failure(kind, None)


# -- answers, as a worker writes them --------------------------------------------------------------


class RecoveryQuery(msgspec.Struct):
    """The body of a query, see :func:`recovery_query`."""

    worker_id: _U64
    dp_rank: _U64 = 0
    start_event_id: _U64 | None = None
    end_event_id: _U64 | None = None


def encode_dump(events: Sequence[RouterEvent], last_event_id: int) -> RawItem:
    """A TreeDump of these events, which replace all earlier ones."""
    return _encoded_events("TreeDump", events, last_event_id, {"reset_scope": "all"})


def encode_events(events: Sequence[RouterEvent], last_event_id: int) -> RawItem:
    """The events from the requested start to the newest."""
    return _encoded_events("Events", events, last_event_id, {})


def _encoded_events(
    kind: str, events: Sequence[RouterEvent], last_event_id: int, more: dict[str, str]
) -> RawItem:
    listed = msgspec.Raw(encode_router_events(events))
    content = {"events": listed, "last_event_id": last_event_id, **more}
    return RawItem.wrap({kind: content})


# -- the indexer of a frontend or a router ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TieredScores:
    """The number of leading blocks of the query on the device of each (worker id, rank).

    ``lower_tiers``: the entries for other tiers, as received.
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


def indexer_query(model: str, local_hashes: Sequence[int]) -> dict[str, Any]:
    """The body of a ``kv_indexer_query``: the hashes (u64) of a prompt, and no tokens.

    Raises ValueError above MAX_HASHES.
    """
    if len(local_hashes) > MAX_HASHES:
        raise ValueError(f"{len(local_hashes):,} hashes are over the limit of {MAX_HASHES:,}")
    return {"model_name": model, "block_hashes": list(local_hashes)}


def parse_scores(item: Any) -> TieredScores | RecoveryError:
    """Read an indexer's answer: an undecoded or decoded item. Raises WireError."""
    kind, content = _variant(RawItem.wrap(item).decode())
    if kind != "TieredScores":
        return _failure(kind, content)
    read = _convert(kind, content, _TieredScoresMessage)
    device = {(worker.worker_id, worker.dp_rank): blocks for worker, blocks in read.device.scores}
    return TieredScores(device, tuple(read.lower_tier))


# -- common parts ----------------------------------------------------------------------------------


def _variant(decoded: Any) -> tuple[str, Any]:
    """(name, content) of a Rust enum; a variant without content is its bare name."""
    if isinstance(decoded, str):
        return decoded, None
    if isinstance(decoded, dict) and decoded.get("event") == "error":
        return "Error", _text(decoded.get("error") or decoded.get("comment"))
    if isinstance(decoded, dict) and len(decoded) == 1:
        [(name, content)] = decoded.items()
        return str(name), content
    raise WireError("item", "expected one answer by its name")


def _failure(kind: str, content: Any) -> RecoveryError:
    if kind == "Error":
        return RecoveryError(_text(content))
    if kind == "TreeDumpFailed":
        return RecoveryError(f"the worker could not dump its tree: {_text(content)}")
    return RecoveryError(f"unknown answer: {printable(kind)}")


def _text(reason: Any) -> str:
    """A peer's reason: a text, or an object whose ``message`` is a text."""
    if isinstance(reason, dict):
        keys = (key for key in ("message", "error", "reason") if key in reason)
        reason = reason.get(next(keys, ""))
    return printable(reason) if isinstance(reason, str) else "no reason reported"


def _convert(kind: str, content: Any, to: type[_T]) -> _T:
    try:
        return msgspec.convert(content, to)
    except msgspec.ValidationError as error:
        raise WireError(kind, str(error)) from None
