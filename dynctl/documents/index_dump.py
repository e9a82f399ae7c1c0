"""The index of a router's workers as bytes, for another router that starts: ``GET /v1/index``.

Frames, each after its length (u32, big endian) and in msgpack: one :class:`DumpHead`, one
:class:`RankDump` for each rank, one :class:`DumpTail` with the checksum of all bytes before it.
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
from xxhash import xxh3_64

from dynctl.base.decode_errors import WireError
from router_core import BlocksStored, PrefixIndex

KIND: Final = "IndexDump"
SCHEMA: Final = 1
#: Of a dump, and of one of its frames. A million blocks are 16 MB.
MAX_BYTES: Final = 1024 * 1024 * 1024
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
_LENGTH: Final = 4
MOST_COPIES: Final = 1024

_U64 = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(max_length=512)]


class DumpHead(msgspec.Struct, frozen=True):
    """The first frame. ``version``: of the dynctl that wrote it."""

    version: _Name
    kind: str = KIND
    schema: int = SCHEMA


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """A chain of blocks after ``parent``, in the engine's names. ``names``, ``hashes``: columns."""

    parent: _U64 | None
    names: bytes
    hashes: bytes


class RankDump(msgspec.Struct, frozen=True):
    """The index of one rank. ``endpoint``: of its KV events.

    ``sequence`` and ``digest``: of the last batch in it. ``copies``: name -> further copies of a
    block. ``lower``: tier -> parents, names and hashes of blocks below the device.
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

    @property
    def blocks(self) -> int:
        """Blocks on the device."""
        return sum(len(chain.names) for chain in self.chains) // 8

    def events(self) -> Iterator[BlocksStored]:
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
        for name, count in copied.items():
            place = places.get(name)
            if place is not None:
                again = BlocksStored(place[0], (name,), (place[1],), counted=True)
                yield from [again] * count
        for tier, blocks in self.lower.items():
            for parent, block, name in blocks:
                yield BlocksStored(parent, (name,), (block,), tier=tier)


class DumpTail(msgspec.Struct, frozen=True):
    """The last frame. ``checksum``: XXH3 (64 bit) of all bytes before it."""

    checksum: _U64


_encoder: Final = msgspec.msgpack.Encoder()
_head: Final = msgspec.msgpack.Decoder(DumpHead)
_rank: Final = msgspec.msgpack.Decoder(RankDump)
_tail: Final = msgspec.msgpack.Decoder(DumpTail)


def chains_of(index: PrefixIndex, slot: int) -> list[Chain]:
    """The blocks of a slot, parents first. Raises OverflowError for a name that is not a u64."""
    return [
        Chain(event.parent_hash, _column(event.block_hashes), _column(event.local_hashes))
        for event in index.stored_events(slot, 4096)
    ]


def encode_dump(version: str, ranks: Iterable[RankDump]) -> Iterator[bytes]:
    """The dump, frame by frame."""
    checksum = xxh3_64()
    yield _frame(DumpHead(version), checksum)
    for rank in ranks:
        yield _frame(rank, checksum)
    yield _frame(DumpTail(checksum.intdigest()), checksum)


def decode_dump(data: bytes) -> list[RankDump]:
    """The ranks of a whole dump; raises WireError if it is cut, changed or of another kind."""
    checksum = xxh3_64()
    frames = []
    at = 0
    while at < len(data):
        if len(data) - at < _LENGTH:
            raise WireError("index dump", "it ends in the middle")
        size = int.from_bytes(data[at : at + _LENGTH], "big")
        if size > MAX_FRAME_BYTES:
            raise WireError("index dump", f"a frame of {size:,} bytes is over the limit")
        if at + _LENGTH + size > len(data):
            raise WireError("index dump", "it ends in the middle")
        frames.append((at, at + _LENGTH + size))
        at += _LENGTH + size
    if len(frames) < 2:
        raise WireError("index dump", "it ends in the middle")
    view = memoryview(data)
    checksum.update(view[: frames[-1][0]])
    try:
        head = _head.decode(view[frames[0][0] + _LENGTH : frames[0][1]])
        if head.kind != KIND or head.schema != SCHEMA:
            raise WireError("index dump", f"expected {KIND} of schema {SCHEMA}, got {head.schema}")
        tail = _tail.decode(view[frames[-1][0] + _LENGTH : frames[-1][1]])
        if tail.checksum != checksum.intdigest():
            raise WireError("index dump", "its checksum does not match: it was changed or cut")
        ranks = [_rank.decode(view[start + _LENGTH : end]) for start, end in frames[1:-1]]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise WireError("index dump", "not an index of a router of dynctl") from None
    for rank in ranks:
        if any(len(one.names) != len(one.hashes) or len(one.names) % 8 for one in rank.chains):
            raise WireError("index dump", "columns of different lengths")
    return ranks


def _frame(value: msgspec.Struct, checksum: xxh3_64) -> bytes:
    body = _encoder.encode(value)
    frame = len(body).to_bytes(_LENGTH, "big") + body
    checksum.update(frame)
    return frame


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
