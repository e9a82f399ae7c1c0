"""The file of a recording: records (:mod:`dynctl.documents.recording`) as chunks of bytes.

The file is a header, then chunks that can each be read alone. The header is :data:`MAGIC` and the
schema (u16). A chunk is ``CHNK``, flags (u8; 1: a router can start here), the number of records
(u32), the times of its first and last record (f64 each), the length of the payload and of what it
decompresses to (u32 each), the payload's CRC-32 (u32), and the payload. All numbers are
little-endian. A payload is the number of its hashes (u32), these as u64, and zlib over a
MessagePack array of records, each an array: its tag, then its fields in their order; fields that
are missing at the end have their defaults. A column of hashes is extension 1: the place of its
first hash in the payload and how many they are (u32 each).
"""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from sys import maxsize
from typing import Any, BinaryIO, Final, NamedTuple, get_type_hints

import msgspec

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import named_in_errors, open_regular, single_line
from dynctl.documents.recording import (
    KINDS,
    NO_DECISIONS,
    PUBLISH_DECISIONS,
    RECORD_MORE,
    Arrived,
    Changed,
    Decided,
    Finished,
    Length,
    Noted,
    Record,
    RecordingReport,
    RequestOptions,
    Start,
    State,
    Unwrapped,
)
from router_core import (
    BlocksRemoved,
    BlocksStored,
    Booked,
    Change,
    Cleared,
    ConfigSet,
    Dequeued,
    Enqueued,
    Expired,
    Freed,
    IndexConnected,
    IndexMarked,
    KvEvent,
    LoadReported,
    OutputBlock,
    PrefillDone,
    Progressed,
    ThresholdsSet,
    TransferTable,
    TransferTableSet,
    WindowStored,
    Worker,
    WorkerAvailability,
    WorkerLost,
    WorkerUpserted,
)

SCHEMA: Final = 1
MAGIC: Final = b"dynctl recording"
HEADER: Final = MAGIC + struct.pack("<H", SCHEMA)
_CHUNK: Final = struct.Struct("<4sBIddIII")
_MARK: Final = b"CHNK"
#: A chunk of another program, or of a damaged file, may declare any length.
MAX_CHUNK: Final = 1 << 30
#: What a chunk decompresses to, above a size at which it matters: those of writers have a tenth.
_MOST_RATIO: Final = 200
_SMALL: Final = 64 << 20
_STARTS: Final = 1
#: Wall-clock seconds of the year 10000: the times that have a date are below.
_END_OF_TIME: Final = 253_402_300_800.0
#: Level 1 costs a third of level 6 and saves nearly as much: hashes do not compress.
_LEVEL: Final = 1
#: The most that zlib takes, 256 KiB more than by default: a third less CPU on hashes.
_MEMORY: Final = 9
#: Records that are encoded in one call, which costs less than one each.
ENCODED_AT_A_TIME: Final = 128
#: Columns that are known by the identity of their hashes, which live as long.
_MOST_COLUMNS: Final = 32
_COLUMN: Final = 1
_WIDE: Final = 3
_WIDEST: Final = 2**256
#: The number of a payload's hashes; the place and length of a column.
_HASHES: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<II")
_SCANNED: Final = 1 << 20

# Tags are positions: new ones come at the end, and fields of a value are added at its end.
_RECORDS: Final[tuple[type[Any], ...]] = (Start, State, Arrived, Decided, Finished, Noted)
_FIRST_CHANGE: Final = 16
_CHANGES: Final[tuple[type[Any], ...]] = (
    WorkerUpserted,
    WorkerLost,
    WorkerAvailability,
    KvEvent,
    IndexMarked,
    IndexConnected,
    Booked,
    PrefillDone,
    Progressed,
    OutputBlock,
    Enqueued,
    Dequeued,
    Freed,
    LoadReported,
    ThresholdsSet,
    ConfigSet,
    TransferTableSet,
    Expired,
)
_EVENTS: Final[tuple[type[Any], ...]] = (BlocksStored, WindowStored, BlocksRemoved, Cleared)
_COLUMNS: Final = frozenset(
    {"hashes", "sequence_hashes", "prompt_hashes", "block_hashes", "local_hashes"}
)


def _names(form: type[Any]) -> tuple[str, ...]:
    if issubclass(form, msgspec.Struct):
        return form.__struct_fields__
    return tuple(form.__dataclass_fields__)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda value: ()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda value: (only(value),)
    return attrgetter(*names)


class _Form(NamedTuple):
    """How a type is written: its tag, its fields, and which of them are columns of hashes.

    ``get``: the values behind the tag and the time. ``places``: of the columns in a row.
    ``own``: some values have their own form.
    """

    tag: int
    form: type[Any]
    names: tuple[str, ...]
    get: Callable[[Any], tuple[Any, ...]]
    columns: tuple[int, ...]
    places: tuple[int, ...]
    own: bool


#: Types with values of their own form.
_OWN: Final = (Start, State, Enqueued, KvEvent, WorkerUpserted, TransferTableSet)


def _form(tag: int, form: type[Any]) -> _Form:
    names = _names(form)
    timed = names[:1] == ("at",)  # records have their time themselves
    columns = tuple(i for i, name in enumerate(names) if name in _COLUMNS)
    places = tuple(i + 2 - timed for i in columns)
    get = _SHORT_VALUES.get(form) or _getter(names[timed:])
    return _Form(tag, form, names, get, columns, places, form in _OWN)


_all_of_finished = _getter(_names(Finished)[1:])
_FINISHED_BEFORE: Final = _names(Finished).index("state") - 1


def _finished_values(value: Finished) -> tuple[Any, ...]:
    """The values of the end of a request; without a state as files always had them."""
    values = _all_of_finished(value)
    return values if value.state else values[:_FINISHED_BEFORE]


_all_of_arrived = _getter(_names(Arrived)[1:])


def _arrived_values(value: Arrived) -> tuple[Any, ...]:
    """The values of a request; without segments as files always had them."""
    values = _all_of_arrived(value)
    return values if value.segments else values[:-1]


_SHORT_VALUES: Final[dict[type[Any], Callable[[Any], tuple[Any, ...]]]] = {
    Arrived: _arrived_values,
    Finished: _finished_values,
}

_OF_RECORD: Final = {form: _form(tag, form) for tag, form in enumerate(_RECORDS)}
_OF_CHANGE: Final = {form: _form(_FIRST_CHANGE + i, form) for i, form in enumerate(_CHANGES)}
_OF_EVENT: Final = {form: _form(tag, form) for tag, form in enumerate(_EVENTS)}
_OF_ALL: Final = {**_OF_RECORD, **_OF_CHANGE}
_BY_TAG: Final = {form.tag: form for form in _OF_ALL.values()}
_EVENT_BY_TAG: Final = {form.tag: form for form in _OF_EVENT.values()}
#: Tag and values of those that are written as they are: most of a recording are of this kind.
_PLAIN: Final = {
    form.form: (form.tag, form.get)
    for form in _OF_ALL.values()
    if not form.columns and not form.own
}


#: The place of `Start.complete` behind the tag.
_COMPLETE: Final = _names(Start).index("complete") + 1
#: And of the time in an Enqueued.
_ARRIVED_AT: Final = _names(Enqueued).index("arrived_at") + 2


class ChunkHeader(NamedTuple):
    """A chunk at ``offset`` of the file. ``starts``: a router can start at one of its records."""

    offset: int
    starts: bool
    records: int
    first: float
    last: float
    length: int
    plain_length: int
    crc: int

    @property
    def end(self) -> int:
        return self.offset + _CHUNK.size + self.length


class ChunkWriter:
    """Encodes records into one chunk; then it begins the next one. Compression is left to
    :func:`pack_chunk`, in another thread.

    ``offset``: seconds that are added to the times in noted changes.
    """

    def __init__(self, offset: float = 0.0) -> None:
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
        #: Records that were noted, but not written.
        self.lost = 0
        self._offset = offset
        #: Changes and other records with their times, which wait for :meth:`encode_noted` and so
        #: must not change. To append here takes less time than :meth:`add`.
        self.noted: list[tuple[float, Change | Unwrapped]] = []
        self._begin()

    def _begin(self) -> None:
        #: Encoded records and columns, joined when the chunk is packed: a buffer that grows is
        #: copied again and again.
        self._body: list[bytes | memoryview] = []
        self._hashes: list[bytes] = []
        self._body_size = self._hash_count = 0
        self._count = 0
        self._columns: dict[int, tuple[msgspec.msgpack.Ext, Sequence[int]]] = {}
        self._first = self._last = 0.0
        self._starts = False

    def __len__(self) -> int:
        return self._count + len(self.noted)

    @property
    def size(self) -> int:
        """Bytes of the chunk so far, before compression, without what waits to be encoded."""
        return self._body_size + 8 * self._hash_count

    def add(self, record: Record) -> None:
        """Add a record. That of a State takes long where the index is large.

        Raises OverflowError, TypeError or ValueError for a value that the file has no form for;
        the chunk is then as before.
        """
        self.encode_noted()
        at = record.at
        value = record.change if isinstance(record, Changed) else record
        self._append(self._row(at, value, 0.0))

    def encode_noted(self) -> None:
        """Add what was noted. What the file has no form for is counted in ``lost``."""
        noted, self.noted = self.noted, []
        rows: list[Sequence[Any]] = []
        for at, value in noted:
            plain = _PLAIN.get(type(value))
            if plain is not None:
                rows.append((plain[0], at) + plain[1](value))  # noqa: RUF005 - it is faster
                continue
            try:
                rows.append(self._row(at, value, self._offset))
            except (OverflowError, TypeError, ValueError):
                self.lost += 1
        if rows:
            self._encode_rows(rows)

    def _encode_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        try:
            data = self._encode(rows)
        except (OverflowError, TypeError, ValueError):
            for row in rows:
                try:
                    self._append(row)
                except (OverflowError, TypeError, ValueError):
                    self.lost += 1
            return
        # Without the head of the array, which has its length.
        body = memoryview(data)[1 if len(rows) < 16 else 3 :]
        self._put(body, len(rows), rows[0][1], rows[-1][1])

    def _row(self, at: float, value: Change | Unwrapped, offset: float) -> list[Any]:
        form = _OF_ALL[type(value)]
        row = [form.tag, at, *form.get(value)]
        for i in form.places:
            row[i] = self._column(row[i])
        if form.form is Booked and not value.chains:  # type: ignore[union-attr]
            row.pop()  # files without chains have the bytes that they always had
        if form.own:
            self._own(row, value, offset)
        return row

    def _own(self, row: list[Any], value: Change | Unwrapped, offset: float) -> None:
        """Put the own forms of values into a row."""
        if isinstance(value, KvEvent):
            row[-1] = self._event(value.event)
        elif isinstance(value, WorkerUpserted):
            row[-1] = value.worker.to_dict()
        elif isinstance(value, Enqueued):
            row[_ARRIVED_AT] += offset
        elif isinstance(value, TransferTableSet) and value.table is not None:
            row[-1] = value.table.to_dict()
        elif isinstance(value, Start):
            row[_COMPLETE] = sorted(value.complete)
        elif isinstance(value, State):
            self._starts = True

    def take(self) -> PlainChunk:
        """What was added since the last call."""
        self.encode_noted()
        head = b"\xdd" + self._count.to_bytes(4, "big")
        chunk = PlainChunk(
            self._starts,
            self._count,
            self._first,
            self._last,
            [head, *self._body],
            self._hashes,
            len(head) + self._body_size,
            self._hash_count,
        )
        self._begin()
        return chunk

    def _append(self, row: Sequence[Any]) -> None:
        self._put(self._encode(row), 1, row[1], row[1])

    def _put(self, data: bytes | memoryview, count: int, first: float, last: float) -> None:
        """Add encoded records."""
        self._body.append(data)
        self._body_size += len(data)
        if not self._count:
            self._first = first
        self._count += count
        self._last = last

    def _event(self, event: Any) -> list[Any]:
        form = _OF_EVENT[type(event)]
        values = [form.tag, *form.get(event)]
        for i in form.columns:
            values[i + 1] = self._column(values[i + 1])
        return values

    def _column(self, hashes: Sequence[int]) -> Any:
        if not hashes:
            return None
        known = self._columns.get(id(hashes))
        if known is not None:
            return known[0]
        count = len(hashes)
        try:
            column = _packer(count).pack(*hashes)
        except struct.error:
            text = ",".join(map(str, hashes))
            return msgspec.msgpack.Ext(_WIDE, text.encode())
        place = _PLACE.pack(self._hash_count, count)
        self._hashes.append(column)
        self._hash_count += count
        reference = msgspec.msgpack.Ext(_COLUMN, place)
        if len(self._columns) >= _MOST_COLUMNS:
            self._columns.clear()
        # The reference keeps the id from being used again.
        self._columns[id(hashes)] = reference, hashes
        return reference


_BIG_ENDIAN: Final = struct.pack("=H", 1) != struct.pack("<H", 1)


@lru_cache(maxsize=1024)
def _packer(count: int) -> struct.Struct:
    """Packs so many hashes (u64). As a size_t each takes half of the time that an array takes."""
    native = maxsize > 2**32 and not _BIG_ENDIAN
    return struct.Struct(f"{count}N" if native else f"<{count}Q")


class PlainChunk(NamedTuple):
    """A chunk before compression. ``hashes``: the columns (u64) to which the body refers.
    ``body_size`` is in bytes."""

    starts: bool
    records: int
    first: float
    last: float
    body: list[bytes | memoryview]
    hashes: list[bytes]
    body_size: int
    hash_count: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.body_size + 8 * self.hash_count


def pack_chunk(chunk: PlainChunk) -> bytes:
    """The bytes of a chunk in the file. Most of its time the interpreter lock is free."""
    packer = zlib.compressobj(_LEVEL, memLevel=_MEMORY)
    # Hashes do not compress: zlib over them is half of the cost of a recording.
    payload = b"".join(
        (
            _HASHES.pack(chunk.hash_count),
            *chunk.hashes,
            packer.compress(b"".join(chunk.body)),
            packer.flush(),
        )
    )
    head = _CHUNK.pack(
        _MARK,
        _STARTS if chunk.starts else 0,
        chunk.records,
        chunk.first,
        chunk.last,
        len(payload),
        chunk.body_size,
        zlib.crc32(payload),
    )
    return head + payload


def encode_records(records: Sequence[Record], per_chunk: int = 4096) -> bytes:
    """A whole file."""
    parts, writer = [HEADER], ChunkWriter()
    for at in range(0, len(records), per_chunk):
        for record in records[at : at + per_chunk]:
            writer.add(record)
        parts.append(pack_chunk(writer.take()))
    return b"".join(parts)


# -- reading -----------------------------------------------------------------------------------


class RecordingFile:
    """A recording that is read from its file, in parts.

    Opening raises OSError, and WireError for what is not a recording and for a newer schema;
    reading raises WireError for a damaged chunk, unless ``skip_bad``. A file that ends within a
    chunk is read up to there.
    """

    def __init__(self, path: Path, *, skip_bad: bool = False) -> None:
        self.path = path
        self.skip_bad = skip_bad
        #: Chunks that were left out, and why; the offset at which the file is cut, None: whole.
        self.skipped: list[str] = []
        self.cut: int | None = None
        with named_in_errors(path), open_regular(path) as file:
            self._check_header(file.read(len(HEADER)))

    def headers(self) -> Iterator[ChunkHeader]:
        """The headers of all whole chunks; no payload is read."""
        self.cut = None
        self.skipped.clear()
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            at = len(HEADER)
            while at < size:
                file.seek(at)
                header = _header(file.read(_CHUNK.size), at)
                if header is None and size - at >= _CHUNK.size:
                    self._bad(at, "no chunk begins here")
                    mark = _next_mark(file, at + 1)
                    if mark is None:
                        return
                    at = mark
                    continue
                if header is None or header.end > size:
                    self.cut = at
                    return
                yield header
                at = header.end

    def records(self, header: ChunkHeader) -> list[Record]:
        """The records of one chunk; none of a bad one with ``skip_bad``."""
        with self.path.open("rb") as file:
            file.seek(header.offset + _CHUNK.size)
            payload = file.read(header.length)
        try:
            return decode_chunk(header, payload)
        except WireError as error:
            self._bad(header.offset, error.problem)
            return []

    def __iter__(self) -> Iterator[Record]:
        """All records. What is missing is a Noted at its place."""
        last, named = 0.0, 0
        for header in self.headers():
            last = header.last
            yield from self.records(header)
            for text in self.skipped[named:]:
                yield Noted(header.first, "skipped", str(self.path.name), "", text)
            named = len(self.skipped)
        for text in self.skipped[named:]:
            yield Noted(last, "skipped", str(self.path.name), "", text)
        if self.cut is not None:
            text = f"the file is cut at byte {self.cut:,}; what follows is missing"
            yield Noted(last, "cut", str(self.path.name), "", text)

    def _check_header(self, head: bytes) -> None:
        if head and len(head) < len(HEADER) and MAGIC.startswith(head[: len(MAGIC)]):
            raise WireError(
                str(self.path),
                f"the recording is cut at byte {len(head)}, within its header of {len(HEADER)} "
                "bytes: it has no records",
            )
        if not head.startswith(MAGIC) or len(head) < len(HEADER):
            raise WireError(str(self.path), "is not a recording; make one: dynctl record FILE")
        schema = struct.unpack("<H", head[len(MAGIC) :])[0]
        if schema > SCHEMA:
            raise WireError(
                str(self.path),
                f"a recording of schema {schema}; this dynctl reads up to {SCHEMA}: "
                "use the dynctl that made it, or a newer one",
            )

    def _bad(self, offset: int, why: str) -> None:
        text = f"bytes from {offset:,}: {why}"
        if not self.skip_bad:
            raise WireError(
                str(self.path),
                f"{text}; --skip-bad of record --show, hits, hot and replay leaves it out",
            )
        self.skipped.append(text)


def read_recording(path: Path, *, skip_bad: bool = False) -> Iterator[Record]:
    """The records of a file in their order, one chunk in memory at a time.

    A cut end and, with ``skip_bad``, damaged chunks become Noted records (``cut``, ``skipped``).
    Raises WireError naming the file, the offset and what is wrong; OSError.
    """
    yield from RecordingFile(path, skip_bad=skip_bad)


#: Kinds of notes about the recording itself.
_ABOUT_ITSELF: Final = ("dropped", "stopped", "cut", "skipped")
_MOST_NOTES: Final = 20


def recording_report(path: Path, *, skip_bad: bool = False) -> RecordingReport:
    """Read a whole file and count what it has. Raises as :func:`read_recording`."""
    counts: Counter[str] = Counter()
    conditions: Counter[str] = Counter()
    notes: list[str] = []
    models: set[str] = set()
    start: Start | None = None
    first = last = 0.0
    for record in read_recording(path, skip_bad=skip_bad):
        counts[type(record.change if isinstance(record, Changed) else record).__name__] += 1
        first, last = first or record.at, max(last, record.at)
        match record:
            case Start():
                start = start or record
                models |= record.block_sizes.keys()
            case Arrived():
                models.add(record.model)
            case Noted(kind="began"):
                conditions[record.code] += 1
            case Noted() if record.kind in _ABOUT_ITSELF and len(notes) < _MOST_NOTES:
                notes.append(record.text)
    if not last:
        notes.append("the file has no records" + (f": {notes.pop()}" if notes else ""))
    elif start is not None and not counts["Arrived"] and not counts["Decided"]:
        notes.append(_without_requests(start))
    report = RecordingReport(
        file=str(path),
        bytes=path.stat().st_size,
        source="unknown",
        router="",
        version="",
        first=first,
        last=last,
        records=dict(sorted(counts.items())),
        models=sorted(models),
        states=counts["State"],
        missing=sorted(KINDS),
        conditions=dict(conditions),
        notes=notes,
    )
    if start is None:
        return report
    return msgspec.structs.replace(
        report,
        source=start.source,
        router=start.router,
        version=start.version,
        missing=sorted(set(KINDS) - start.complete),
    )


def _without_requests(start: Start) -> str:
    """Why a recording has no requests, and what to do."""
    if "decisions" not in start.complete:
        return f"requests are unknown: {NO_DECISIONS}; {PUBLISH_DECISIONS}"
    return f"no requests are recorded: {RECORD_MORE}"


def chunk_header(data: bytes, offset: int = 0) -> ChunkHeader | None:
    """The header at the beginning of ``data``; None while it is not complete. Raises WireError."""
    if len(data) < _CHUNK.size:
        return None
    header = _header(data[: _CHUNK.size], offset)
    if header is None:
        raise WireError("recording", f"no chunk begins at byte {offset:,}")
    return header


def _header(data: bytes, offset: int) -> ChunkHeader | None:
    if len(data) < _CHUNK.size:
        return None
    mark, flags, records, first, last, length, plain, crc = _CHUNK.unpack(data)
    if mark != _MARK or length > MAX_CHUNK or plain > MAX_CHUNK:
        return None
    if not (0 <= first < _END_OF_TIME and 0 <= last < _END_OF_TIME):
        return None
    return ChunkHeader(offset, bool(flags & _STARTS), records, first, last, length, plain, crc)


def _next_mark(file: BinaryIO, at: int) -> int | None:
    """The offset of the next mark of a chunk from ``at`` on."""
    kept = b""
    while True:
        file.seek(at)
        block = file.read(_SCANNED)
        if not block:
            return None
        position = (kept + block).find(_MARK)
        if position >= 0:
            return at - len(kept) + position
        kept, at = block[-3:], at + len(block)


def decode_chunk(header: ChunkHeader, payload: bytes) -> list[Record]:
    """The records of a payload; raises WireError."""
    if zlib.crc32(payload) != header.crc:
        raise WireError("recording", "the chunk's checksum does not match: it is damaged")
    try:
        (count,) = _HASHES.unpack_from(payload)
        if header.plain_length > max(_SMALL, _MOST_RATIO * len(payload)):
            raise WireError(
                "recording",
                f"{len(payload):,} bytes cannot be {header.plain_length:,} bytes of records",
            )
        begin = _HASHES.size + 8 * count
        if begin > len(payload):
            raise WireError("recording", f"expected {count:,} hashes in the chunk")
        column = array("Q", payload[_HASHES.size : begin])
        if _BIG_ENDIAN:
            column.byteswap()
        columns = _ChunkColumns(column)
        unpacker = zlib.decompressobj()
        body = unpacker.decompress(memoryview(payload)[begin:], header.plain_length + 1)
        if len(body) != header.plain_length or not unpacker.eof:
            raise WireError("recording", f"expected {header.plain_length:,} bytes in the chunk")
        rows = msgspec.msgpack.decode(body, ext_hook=columns.read)
        if not isinstance(rows, list) or len(rows) != header.records:
            raise WireError("recording", f"expected {header.records:,} records in the chunk")
        return [_record(row) for row in rows]
    except (
        zlib.error, struct.error, msgspec.MsgspecError, ValueError, TypeError, LookupError,
        AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise WireError("recording", f"invalid chunk: {single_line(str(error), 200)}") from None


class _ChunkColumns:
    """The columns of a chunk; a column that several records have is one tuple."""

    def __init__(self, hashes: array[int]) -> None:
        self._hashes = hashes
        self._found: dict[bytes, tuple[int, ...]] = {}
        self._left = len(hashes)

    def read(self, code: int, data: memoryview) -> tuple[int, ...]:
        if code == _WIDE:
            wide = tuple(map(int, bytes(data).decode().split(",")))
            if max(map(abs, wide)) > _WIDEST:
                raise ValueError("hashes: expected at most 2^256")
            return wide
        if code != _COLUMN:
            raise ValueError(f"extension {code} is not known")
        place = bytes(data)
        column = self._found.get(place)
        if column is None:
            first, count = _PLACE.unpack(place)
            column = self._found[place] = tuple(self._hashes[first : first + count])
            if len(column) != count:
                raise ValueError(f"{count:,} hashes from {first:,} on are not in the chunk")
            self._left -= count
            if self._left < 0:  # writers share columns, not parts of them
                raise ValueError("columns overlap")
        return column


def _record(row: list[Any]) -> Record:
    form = _BY_TAG.get(row[0])
    if form is None:
        raise ValueError(f"record of kind {str(row[0])[:20]!r} is not known")
    if form.tag < _FIRST_CHANGE:
        values = dict(zip(form.names, row[1:], strict=False))
        for i in form.columns:
            values[form.names[i]] = values[form.names[i]] or ()
        record: Record = msgspec.convert(values, form.form)
        if isinstance(record, Arrived):
            msgspec.convert(record.asked, RequestOptions)
        _check_time(record.at)
        return record
    at = row[1]
    _check_time(at)
    return Changed(at, _value(form, row[2:]))


def _check_time(at: Any) -> None:
    if not (isinstance(at, float) and 0 <= at < _END_OF_TIME):
        raise ValueError(f"expected a time in wall-clock seconds, got {at!r:.40}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if type(value) is int and name not in _IDS and not _LEAST.get(name, 0) <= value <= _MOST:
        raise ValueError(f"{name}: expected at most 2^53, not negative, got {value}")


def _value(form: _Form, row: list[Any]) -> Any:
    """A change or an event; each field has the type that it is declared with."""
    kind = _TYPED.get(form.form)
    if kind is None:
        kind = _TYPED[form.form] = _array_type(form.form)
    values = list(msgspec.structs.astuple(msgspec.convert(row, kind)))
    for name, value in zip(form.names, values, strict=True):
        _check_number(name, value)
    for i in form.columns:
        column = values[i]
        if not isinstance(column, tuple):
            if column:
                raise ValueError(f"{form.names[i]}: expected a column of hashes")
            values[i] = ()
    if form.form is KvEvent:
        tag, *fields = values[-1]
        values[-1] = _value(_EVENT_BY_TAG[tag], fields)
    elif form.form is WorkerUpserted:
        values[-1] = Worker.from_dict(values[-1])
    elif form.form is TransferTableSet and values[-1] is not None:
        values[-1] = TransferTable.from_dict(values[-1])
    return form.form(*values)


#: Integers of changes that are not counts, and counts that may be negative.
_MOST: Final = 2**53
_IDS: Final = frozenset({"worker_id", "parent_hash"})
_LEAST: Final = {"priority": -_MOST, "strict_priority": -_MOST}
#: Fields that are read here, not by msgspec.
_APART: Final = frozenset({"event", "worker", "table"})


_TYPED: dict[type[Any], type[msgspec.Struct]] = {}


def _array_type(form: type[Any]) -> type[msgspec.Struct]:
    """An array with the fields of a change or an event, for :func:`msgspec.convert`."""
    hints = get_type_hints(form)
    fields: list[Any] = []
    for field in dataclasses.fields(form):
        hint = hints[field.name]
        kind = Any if field.name in _COLUMNS or field.name in _APART else hint
        if field.name == "span":
            kind = Length
        if field.default is not dataclasses.MISSING:
            fields.append((field.name, kind, field.default))
        elif field.default_factory is not dataclasses.MISSING:
            made = msgspec.field(default_factory=field.default_factory)
            fields.append((field.name, kind, made))
        else:
            fields.append((field.name, kind))
    return msgspec.defstruct(form.__name__, fields, array_like=True)


def _plain(value: Any) -> Any:
    """What MessagePack has no form for: mappings and sequences of other types."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be recorded")
