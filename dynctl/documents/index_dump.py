"""The index of a router's workers as bytes, for another router that starts: ``GET /v1/index``.

Frames: the length (u32, big endian), the checksum (XXH3, u64) and the body in msgpack: one
:class:`DumpHead`, one :class:`RankDump` for each rank, one :class:`DumpTail`. Each rank can be used
as soon as its frame is whole.
A rank comes with the number and digest of the last batch of KV events that it contains, so the
reader continues exactly there, or notices that the engine is another process by now. Hashes are
columns of u64, little endian. No prompts and no tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from dynctl.base.decode_errors import WireError
from router_core import BlocksRemoved, BlocksStored, PrefixIndex

KIND: Final = "IndexDump"
SCHEMA: Final = 1
#: Of a dump, and of one of its frames. A million blocks are 16 MB.
MAX_BYTES: Final = 1024 * 1024 * 1024
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
#: Length and checksum before a body.
_HEADER: Final = 12
#: A tail has one number; a rank is longer.
_LONGEST_TAIL: Final = 20
MOST_COPIES: Final = 1024

_U64 = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(max_length=512)]


class RegisteredRank(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank of an engine publishes its KV events, as it was registered at an indexer.

    ``replay``: where it repeats them; None: nowhere.
    """

    worker_id: _U64
    dp_rank: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    model: _Name
    routing_group: _Name
    block_size: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    endpoint: _Name
    replay: _Name | None = None


class DumpHead(msgspec.Struct, frozen=True):
    """The first frame. ``version``: of the dynctl that wrote it. ``registered``: in the snapshot of
    an indexer, all ranks that it follows."""

    version: _Name
    kind: str = KIND
    schema: int = SCHEMA
    registered: list[RegisteredRank] = []


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """A chain of blocks after ``parent``, in the engine's names. ``names``, ``hashes``: columns."""

    parent: _U64 | None
    names: bytes
    hashes: bytes


class RankDump(msgspec.Struct, frozen=True):
    """The index of one rank. ``endpoint``: of its KV events.

    ``sequence`` and ``digest``: of the last batch in it. ``copies``: name -> further copies of a
    block. ``lower``: tier -> parents, names and hashes of blocks below the device. ``holes``: names
    of removed blocks after which the rank still has some; their chains come last.
    """

    worker_id: _U64
    dp_rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    model: _Name
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    endpoint: _Name
    sequence: _U64
    digest: _U64
    chains: list[Chain] = []
    copies: list[tuple[_U64, Annotated[int, Meta(ge=1, le=MOST_COPIES)]]] = []
    lower: dict[str, list[tuple[_U64 | None, _U64, _U64]]] = {}
    holes: list[_U64] = []

    @property
    def blocks(self) -> int:
        """Blocks on the device, also those that no prompt can reuse for now."""
        return sum(len(chain.names) for chain in self.chains) // 8

    def events(self) -> Iterator[BlocksStored | BlocksRemoved]:
        """The events that make this index of an empty one."""
        copied = dict(self.copies)
        places: dict[int, tuple[int | None, int]] = {}
        for chain in self.chains:
            names, hashes = _numbers(chain.names), _numbers(chain.hashes)
            yield BlocksStored(chain.parent, names, hashes)
            parent = chain.parent
            for name, block in zip(names, hashes, strict=True) if copied else ():
                if name in copied:
                    places[name] = (parent, block)
                parent = name
        if self.holes:
            yield BlocksRemoved(self.holes)
        for name, count in copied.items():
            place = places.get(name)
            if place is not None:
                again = BlocksStored(place[0], (name,), (place[1],), counted=True)
                yield from [again] * count
        for tier, blocks in self.lower.items():
            for parent, block, name in blocks:
                yield BlocksStored(parent, (name,), (block,), tier=tier)


class DumpTail(msgspec.Struct, frozen=True):
    """The last frame. ``ranks``: how many were sent."""

    ranks: _U64


_encoder: Final = msgspec.msgpack.Encoder()
_head: Final = msgspec.msgpack.Decoder(DumpHead)
_rank: Final = msgspec.msgpack.Decoder(RankDump)
_tail: Final = msgspec.msgpack.Decoder(DumpTail)


def chains_of(index: PrefixIndex, slot: int) -> list[Chain]:
    """The blocks of a slot, parents first, then those that wait for a parent.

    Raises OverflowError for a name that is not a u64.
    """
    return [
        Chain(event.parent_hash, _column(event.block_hashes), _column(event.local_hashes))
        for event in (*index.stored_events(slot, 4096), *index.detached_events(slot))
    ]


def encode_dump(
    version: str, ranks: Iterable[RankDump], registered: Iterable[RegisteredRank] = ()
) -> Iterator[bytes]:
    """The dump, frame by frame."""
    yield _frame(DumpHead(version, registered=list(registered)))
    count = 0
    for rank in ranks:
        yield _frame(rank)
        count += 1
    yield _frame(DumpTail(count))


class DumpReader:
    """Reads a dump in pieces, as they arrive. ``complete``: its last frame was read; ``head``: its
    first frame, once it was."""

    def __init__(self) -> None:
        self.complete = False
        self.head: DumpHead | None = None
        self._buffer = bytearray()
        self._count = 0

    def feed(self, piece: bytes) -> list[RankDump]:
        """The ranks that are whole with this piece; raises WireError if the bytes are no dump."""
        self._buffer += piece
        ranks = []
        while len(self._buffer) >= _HEADER:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise WireError("index dump", f"a frame of {size:,} bytes is over the limit")
            if len(self._buffer) < _HEADER + size:
                break
            checksum = int.from_bytes(self._buffer[4:_HEADER], "big")
            body = bytes(self._buffer[_HEADER : _HEADER + size])
            del self._buffer[: _HEADER + size]
            rank = self._frame(body, checksum)
            if rank is not None:
                ranks.append(rank)
        return ranks

    @property
    def rest(self) -> int:
        """Bytes of a frame that is not whole."""
        return len(self._buffer)

    def _frame(self, body: bytes, checksum: int) -> RankDump | None:
        if xxh3_64_intdigest(body) != checksum:
            raise WireError("index dump", "a checksum does not match: it was changed")
        if self.complete:
            raise WireError("index dump", "bytes follow its end")
        try:
            if self.head is None:
                self.head = _read_head(body)
                return None
            if len(body) < _LONGEST_TAIL:
                self.complete = True
                if _tail.decode(body).ranks != self._count:
                    raise WireError("index dump", "ranks are missing")
                return None
            rank = _rank.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise WireError("index dump", "not an index of a router of dynctl") from None
        if any(
            len(chain.names) != len(chain.hashes) or len(chain.names) % 8 for chain in rank.chains
        ):
            raise WireError("index dump", "columns of different lengths")
        self._count += 1
        return rank


def _read_head(body: bytes) -> DumpHead:
    head = _head.decode(body)
    if head.kind != KIND or head.schema != SCHEMA:
        expected = f"expected {KIND} of schema {SCHEMA}"
        raise WireError("index dump", f"{expected}, got {head.kind} {head.schema}")
    return head


def decode_snapshot(data: bytes) -> tuple[DumpHead, list[RankDump]]:
    """Head and ranks of a whole dump; raises WireError if it is cut, changed or of another kind."""
    reader = DumpReader()
    ranks = reader.feed(data)
    if not reader.complete or reader.rest or reader.head is None:
        raise WireError("index dump", "it ends in the middle")
    return reader.head, ranks


def _frame(value: msgspec.Struct) -> bytes:
    body = _encoder.encode(value)
    head = len(body).to_bytes(4, "big") + xxh3_64_intdigest(body).to_bytes(8, "big")
    return head + body


def _column(numbers: Iterable[int]) -> bytes:
    column = array("Q", numbers)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _numbers(column: bytes) -> list[int]:
    numbers = array("Q")
    numbers.frombytes(column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
