"""The file of a recording: every record survives it, and a damaged file gives what is whole."""

import math
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.documents import recording_file as r
from dynctl.documents.recording import (
    KINDS,
    Arrived,
    Changed,
    Decided,
    Finished,
    Noted,
    Record,
    Start,
    State,
    moved_snapshot,
)
from dynctl.documents.recording_file import (
    HEADER,
    MAGIC,
    ChunkWriter,
    RecordingFile,
    encode_records,
    read_recording,
)
from router_core import (
    Booked,
    Change,
    Enqueued,
    Expired,
    KvEvent,
    Router,
    RouterConfig,
    RoutingRequest,
    TransferTable,
    Worker,
    WorkerLost,
    WorkerUpserted,
)
from router_core.changes import LoadReported, ThresholdsSet
from router_core.events import BlocksRemoved, BlocksStored, CacheEvent, WindowStored
from router_core.transfer import Link
from router_core.workers import ModelRuntimeConfig, Role

U64 = st.integers(0, 2**64 - 1)
#: The largest count that a number of JSON keeps exactly.
COUNTS = st.integers(0, 2**53)
SMALL = st.integers(0, 10**6)
HASHES = st.lists(U64, max_size=6).map(tuple)
TEXT = st.text(max_size=12)
TIMES = st.floats(0, 4e9)
WORKERS = st.builds(
    Worker,
    worker_id=U64,
    name=st.text("abc-", min_size=1, max_size=8),
    model=st.text("abc-", min_size=1, max_size=8),
    role=st.sampled_from(Role),
    block_size=st.integers(1, 256),
    runtime_config=st.builds(
        ModelRuntimeConfig,
        total_kv_blocks=st.none() | st.integers(1, 10**6),
        data_parallel_size=st.integers(1, 4),
        topology_domains=st.dictionaries(
            st.sampled_from(["zone", "rack"]), st.sampled_from(["a", "b"]), max_size=2
        ),
    ),
    kv_events=st.booleans(),
    endpoint=st.none() | st.just("http://127.0.0.1:1"),
    aliases=st.lists(st.text("xyz", min_size=1, max_size=3), max_size=2).map(tuple),
)
TABLES = st.builds(
    TransferTable,
    levels=st.just((("rack", Link(0.001, 1e9)), ("zone", Link(0.01, 1e8)))),
    beyond=st.just(Link(0.1, 1e7)),
    bytes_per_token=st.none() | st.floats(1, 1e6),
    by_model=st.dictionaries(st.sampled_from(["m"]), st.floats(1, 1e6), max_size=1),
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(0, 1) | TEXT


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": HASHES,
    "local_hashes": HASHES,
    "sequence_hashes": HASHES,
    "prompt_hashes": HASHES,
    "worker": WORKERS,
    "table": st.none() | TABLES,
    "values": st.dictionaries(TEXT, PLAIN, max_size=3),
    "span": st.integers(1, 2**40),
    "lane": st.none() | st.tuples(U64, st.none() | st.integers(0, 7)),
    "chains": st.lists(st.integers(1, 10**6), max_size=3).map(tuple),
    "credits": st.lists(st.tuples(TEXT, st.integers(0, 99)), max_size=2).map(tuple),
}


def strategy(form: type[Any]) -> st.SearchStrategy[Any]:
    """All values of one type of change or event."""
    made = {n: FIELDS[n] for n in form.__dataclass_fields__ if n in FIELDS}
    for name, hint in get_type_hints(form).items():
        if name not in made and hint in (int, int | None):
            number = U64 if name.endswith("_id") else COUNTS
            made[name] = number if hint is int else st.none() | number
        elif name not in made and hint in (float, float | None):
            made[name] = TIMES if hint is float else st.none() | TIMES  # NaN is not equal to itself
    if form is ThresholdsSet:
        numbers = st.none() | st.integers(-(2**40), 2**40) | st.floats(0, 1)
        made["values"] = st.dictionaries(TEXT, numbers, max_size=3)
    return st.builds(form, **made)


FIELDS["event"] = st.one_of([strategy(one) for one in get_args(CacheEvent)])
CHANGES = st.one_of([strategy(one) for one in get_args(Change)])


def written(records: list[Record], tmp: Path) -> Path:
    path = tmp / "r.dynrec"
    path.write_bytes(encode_records(records, per_chunk=3))
    return path


def test_every_type_of_change_and_event_has_a_tag() -> None:
    assert set(r._OF_CHANGE) == set(get_args(Change))
    assert set(r._OF_EVENT) == set(get_args(CacheEvent))
    assert {*r._OF_RECORD, Changed} == set(get_args(Record))


@given(st.lists(st.builds(Changed, TIMES, CHANGES), max_size=8))
def test_changes_round_trip(tmp_path_factory: pytest.TempPathFactory, made: list[Record]) -> None:
    path = written(made, tmp_path_factory.mktemp("r"))
    assert list(read_recording(path)) == made


@given(
    st.lists(
        st.builds(
            Arrived,
            at=TIMES,
            isl_tokens=st.integers(0, 10**6),
            block_size=st.integers(1, 256),
            hashes=HASHES,
            priority=SMALL,
            output_limit=st.none() | SMALL,
            asked=st.dictionaries(TEXT, PLAIN, max_size=2),
            router=SMALL,
        )
        | st.builds(
            Decided,
            at=TIMES,
            prefill=st.none() | st.tuples(U64, SMALL),
            decode=st.none() | st.tuples(U64, SMALL),
            cost=st.none() | st.floats(0, 1e6),
            document=st.binary(),
        )
        | st.builds(
            Finished,
            at=TIMES,
            status=st.none() | SMALL,
            prompt_tokens=st.none() | SMALL,
            cached_tokens=st.none() | SMALL,
            output_tokens=st.none() | SMALL,
            ttft_s=st.none() | st.floats(0, 100),
        )
        | st.builds(Noted, at=TIMES)
        | st.builds(
            Start,
            at=TIMES,
            settings=st.dictionaries(TEXT, PLAIN, max_size=3),
            block_sizes=st.dictionaries(TEXT, st.integers(1, 256), max_size=2),
            complete=st.frozensets(st.sampled_from(KINDS)),
        ),
        max_size=8,
    )
)
def test_other_records_round_trip(
    tmp_path_factory: pytest.TempPathFactory, made: list[Record]
) -> None:
    path = written(made, tmp_path_factory.mktemp("r"))
    assert list(read_recording(path)) == made


def test_hashes_that_are_not_u64_round_trip(tmp_path: Path) -> None:
    made: list[Record] = [Changed(1.0, KvEvent(1, 0, BlocksRemoved((-1, 2**70))))]
    assert list(read_recording(written(made, tmp_path))) == made


GOLDEN: list[Record] = [
    Start(
        1000.0, "frontend", "r1", "0.1.0", {"router_mode": "kv"}, {"m": 16},
        complete=frozenset({"arrivals"}),
    ),
    State(1000.5, {"schema": 1}),
    Arrived(1001.0, "a", "m", 32, 16, (1, 2)),
    Changed(1001.0, Booked("a", "aggregated", 7, 0, 32, (1, 2))),
    Decided(1001.0, "a", "m", None, (7, 0), 0.0, 0.0, 2.0, None, why="load"),
    Changed(1001.5, KvEvent(7, 0, BlocksStored(None, (9, 8), (3, 4)))),
    Finished(1002.0, "a", 200, "success", 32, 16, 5, 0.1),
    Noted(1003.0, "stopped", "recording", text="the end"),
]  # fmt: skip


def test_the_bytes_of_a_file_stay_readable(tmp_path: Path) -> None:
    """Files of this version are read by all later ones: the bytes are part of the test."""
    golden = Path(__file__).parent / "golden.dynrec"
    assert golden.read_bytes()[: len(HEADER)] == HEADER
    assert list(read_recording(golden)) == GOLDEN
    # zlib may compress otherwise; what it decompresses to is fixed.
    mine, theirs = written(GOLDEN, tmp_path), RecordingFile(golden)
    for one, other in zip(RecordingFile(mine).headers(), theirs.headers(), strict=True):
        assert one.records == other.records
        assert one.first == other.first
        assert plain(mine, one) == plain(golden, other)


def plain(path: Path, header: r.ChunkHeader) -> bytes:
    """The payload with its zlib part decompressed."""
    payload = path.read_bytes()[header.end - header.length : header.end]
    hashes = 4 + 8 * int.from_bytes(payload[:4], "little")
    return payload[:hashes] + zlib.decompress(payload[hashes:])


def test_hashes_are_in_a_chunk_once_and_as_they_are(tmp_path: Path) -> None:
    """A reader may take the hashes of a chunk without decompressing it."""
    hashes = tuple(range(2**63, 2**63 + 100))
    made: list[Record] = [
        Arrived(1.0, "a", "m", 1600, 16, hashes),
        Changed(1.0, Booked("a", "aggregated", 7, 0, 1600, hashes)),
        Changed(2.0, KvEvent(7, 0, BlocksRemoved(hashes[:50]))),
    ]
    path = written(made, tmp_path)
    (header,) = RecordingFile(path).headers()
    payload = path.read_bytes()[header.end - header.length : header.end]
    assert payload[:4] == (150).to_bytes(4, "little")
    assert payload[4:1204] == struct.pack("<150Q", *hashes, *hashes[:50])
    assert list(read_recording(path)) == made


def test_a_record_that_cannot_be_written_harms_no_other(tmp_path: Path) -> None:
    writer, hashes, other = ChunkWriter(), (1, 2), (3, 4, 5)
    made: list[Record] = [Arrived(1.0, "a", "m", 32, 16, hashes)]
    writer.add(made[0])
    with pytest.raises(OverflowError):
        writer.add(Arrived(2.0, "b", "m", 48, 16, other, priority=2**80))
    made += [
        Arrived(3.0, "c", "m", 48, 16, other),
        Arrived(4.0, "d", "m", 32, 16, hashes),
    ]
    for record in made[1:]:
        writer.add(record)
    path = tmp_path / "some"
    path.write_bytes(HEADER + r.pack_chunk(writer.take()))
    assert list(read_recording(path)) == made


@given(st.lists(st.builds(Changed, TIMES, CHANGES), max_size=20), st.integers(1, 9))
def test_notes_make_the_same_bytes(made: list[Changed], at_a_time: int) -> None:
    """Changes that are encoded many at a time, and one at a time."""
    one, many = ChunkWriter(), ChunkWriter()
    for record in made:
        one.add(record)
        many.noted.append((record.at, record.change))
        assert len(one) == len(many)
        if len(many.noted) >= at_a_time:
            many.encode_noted()
            assert len(one) == len(many)
    assert r.pack_chunk(many.take()) == r.pack_chunk(one.take())
    assert many.lost == 0


def test_a_note_that_cannot_be_written_harms_no_other(tmp_path: Path) -> None:
    writer = ChunkWriter()
    for number in range(400):
        wide = number % 50 == 7
        record = Finished(float(number), "a", 200, cached_tokens=2**80 if wide else number)
        arrived = Arrived(record.at, "a", "m", 16, 16, (number,) * 3, priority=1)
        writer.noted += [(record.at, record), (record.at, arrived)]
        if number % 64 == 0:
            writer.encode_noted()
    writer.encode_noted()
    assert writer.lost == 8
    assert len(writer) == 792
    path = tmp_path / "some"
    path.write_bytes(HEADER + r.pack_chunk(writer.take()))
    records = list(read_recording(path))
    assert [one.cached_tokens for one in records if isinstance(one, Finished)] == [
        number for number in range(400) if number % 50 != 7
    ]
    assert [one.hashes for one in records if isinstance(one, Arrived)] == [
        (number,) * 3 for number in range(400)
    ]


def test_times_within_changes_are_moved_when_they_are_noted(tmp_path: Path) -> None:
    writer = ChunkWriter(100.0)
    writer.noted.append((5.0, Enqueued("a", "m", "", 16, 0, arrived_at=1.5)))
    path = tmp_path / "some"
    path.write_bytes(HEADER + r.pack_chunk(writer.take()))
    (record,) = read_recording(path)
    assert isinstance(record, Changed)
    assert isinstance(record.change, Enqueued)
    assert (record.at, record.change.arrived_at) == (5.0, 101.5)


def test_a_file_cut_anywhere_gives_every_whole_chunk(tmp_path: Path) -> None:
    whole = encode_records(GOLDEN, per_chunk=3)
    path = tmp_path / "whole"
    path.write_bytes(whole)
    ends = {header.end: header for header in RecordingFile(path).headers()}
    assert list(ends)[-1] == len(whole)
    cut = tmp_path / "cut"
    for length in range(len(HEADER), len(whole)):
        cut.write_bytes(whole[:length])
        file = RecordingFile(cut)
        kept = sum(h.records for end, h in ends.items() if end <= length)
        found = list(file)
        assert found[:kept] == GOLDEN[:kept]
        begins = max([len(HEADER), *(end for end in ends if end <= length)])
        if begins == length:
            assert file.cut is None
            assert len(found) == kept
        else:
            assert file.cut == begins
            (noted,) = found[kept:]
            assert isinstance(noted, Noted)
            assert noted.kind == "cut"
            assert f"byte {begins:,}" in noted.text


def test_a_damaged_chunk_is_named_or_skipped(tmp_path: Path) -> None:
    whole = encode_records(GOLDEN, per_chunk=3)
    path = tmp_path / "damaged"
    path.write_bytes(whole)
    second = list(RecordingFile(path).headers())[1]
    for offset in (second.offset, second.offset + 30, second.end - 1):
        damaged = bytearray(whole)
        damaged[offset] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(WireError, match=f"{path}: bytes from {second.offset:,}: .*--skip-bad"):
            list(read_recording(path))
        found = list(read_recording(path, skip_bad=True))
        kept = [one for one in found if not isinstance(one, Noted) or one.kind != "skipped"]
        assert kept == GOLDEN[:3] + GOLDEN[6:]
        assert len(kept) < len(found)


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_damage_is_an_error_with_a_name(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    data = bytearray(encode_records(GOLDEN, per_chunk=3))
    data[place % len(data)] = byte
    path = tmp_path_factory.mktemp("r") / "damaged"
    path.write_bytes(data)
    with suppress(WireError):
        list(read_recording(path))
    list_of = list(read_recording(path, skip_bad=True)) if data[:18] == HEADER else []
    assert all(isinstance(one, get_args(Record)) for one in list_of)


def test_a_value_that_no_router_can_have_is_damage(tmp_path: Path) -> None:
    """A file from elsewhere may have right checksums around wrong values."""
    nan, far = float("nan"), 1e300
    wrong: list[Any] = [
        Changed(1.0, WorkerLost("x")),  # type: ignore[arg-type]
        Changed(1.0, Booked("r", "no stage", 1, 0)),  # type: ignore[arg-type]
        Changed(1.0, Booked("r", "prefill", 1, 0, sequence_hashes=5)),  # type: ignore[arg-type]
        Changed(1.0, KvEvent(1, 0, WindowStored(0, (1,), 2, span=0))),
        Changed(1.0, LoadReported(1, 0, kv_used_blocks=0.5)),  # type: ignore[arg-type]
        Changed(nan, Expired()),
        Changed(far, Expired()),
        Changed(-1.0, Expired()),
        Arrived(1.0, "a", "m", 32, 0),
        Arrived(1.0, "a", "m", -1, 16),
        Decided(1.0, "a", "m", cached_blocks=float("inf")),
        Finished(1.0, "a", cached_tokens=-1),
        Start(1.0, "frontend", "r", "1", block_sizes={"m": 0}),
    ]
    for record in wrong:
        path = tmp_path / "wrong"
        try:
            path.write_bytes(encode_records([record]))
        except TypeError:
            continue
        with pytest.raises(WireError):
            list(read_recording(path))


def chunk(body: bytes, hashes: int = 0, plain_length: int | None = None) -> bytes:
    """A chunk of 1 record with this MessagePack, with the right checksum."""
    payload = r._HASHES.pack(hashes) + bytes(8 * hashes) + zlib.compress(body)
    length = len(body) if plain_length is None else plain_length
    return r._CHUNK.pack(
        r._MARK, 0, 1, 1.0, 1.0, len(payload), length, zlib.crc32(payload)
    ) + payload  # fmt: skip


def overlapping() -> bytes:
    """2,000 columns that each end at another place of 4,000 hashes: 6 million numbers."""
    columns = [
        msgspec.msgpack.Ext(r._COLUMN, r._PLACE.pack(0, count)) for count in range(2000, 4000)
    ]
    return chunk(msgspec.msgpack.encode([columns]), 4000)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (chunk(b"\x91" * 200_000), "invalid chunk"),
        (chunk(bytes(80 << 20)), "cannot be 83,886,080 bytes"),
        (chunk(b"\x90", plain_length=1 << 29), "cannot be 536,870,912 bytes"),
        (overlapping(), "columns overlap"),
        (chunk(msgspec.msgpack.encode([["a\nb"]])), r"'a\\nb' is not known"),
    ],
    ids=["deep", "a bomb", "a lie", "overlapping", "a line break"],
)
def test_what_would_fill_the_memory_or_the_stack_is_refused(
    tmp_path: Path, made: bytes, problem: str
) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HEADER + made)
    with pytest.raises(WireError, match=problem):
        list(read_recording(path))


def test_what_is_not_a_recording_and_what_is_newer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"{}")
    with pytest.raises(WireError, match=r"is not a recording; make one: dynctl record FILE"):
        list(read_recording(path))
    path.write_bytes(MAGIC + struct.pack("<H", 9))
    with pytest.raises(WireError, match=r"a recording of schema 9; this dynctl reads up to 1"):
        list(read_recording(path))


def test_a_chunk_says_its_time_and_where_a_router_can_start(tmp_path: Path) -> None:
    path = written(GOLDEN, tmp_path)
    headers = list(RecordingFile(path).headers())
    assert [(h.first, h.last, h.starts, h.records) for h in headers] == [
        (1000.0, 1001.0, True, 3),
        (1001.0, 1001.5, False, 3),
        (1002.0, 1003.0, False, 2),
    ]


def busy_router(at: float) -> Router:
    """A router with every kind of state that has a time, made at ``at``."""
    config = RouterConfig().with_values(
        {
            "router_session_affinity_ttl_secs": 60.0,
            "router_queue_threshold": 1.0,
            "router_prefill_load_model": "measured",
        }
    )
    router = Router(config, exact_reuse=True, learns=True)
    for worker_id, events in ((1, True), (2, False)):
        runtime = ModelRuntimeConfig(total_kv_blocks=100, max_num_batched_tokens=64)
        router.apply(
            WorkerUpserted(
                Worker(worker_id, f"w{worker_id}", "m", runtime_config=runtime, kv_events=events)
            ),
            at,
        )
    stored = BlocksStored(None, (11, 12), (21, 22))
    router.apply(KvEvent(1, 0, stored), at + 1)
    router.apply(LoadReported(1, 0, kv_used_blocks=3), at + 2)
    for worker_id in (1, 2):
        router.apply(
            Booked(
                f"r{worker_id}", "aggregated", worker_id, 0, 64, (1, 2, 3, 4), 0, (1, 2, 3, 4),
                predicted_s=2.0, session=f"s{worker_id}",
            ),
            at + 3,
        )  # fmt: skip
    router.apply(Enqueued("q", "m", "default", 32, 0, at + 3.5), at + 3.5)
    return router


def test_a_snapshot_moves_to_another_clock(tmp_path: Path) -> None:
    here, there = busy_router(100.0), busy_router(1_700_000_100.0)
    moved = moved_snapshot(here.snapshot(), 1_700_000_000.0)
    wanted = there.snapshot()
    for plain in (moved, wanted):  # scores are relative to the clock
        for row in plain.get("queue", {}).get("entries", ()):
            row[7] = 0.0
    assert moved == wanted
    path = written([State(1.0, moved)], tmp_path)
    (state,) = read_recording(path)
    assert isinstance(state, State)
    restored, now = Router.restore(state.snapshot), 1_700_000_104.0
    for router in (restored, there):
        router.advance(now)
    request = RoutingRequest("x", "m", 64, 16, (1, 2, 3, 4))
    assert restored.plan(request).final.costs == there.plan(request).final.costs
    assert math.isclose(restored.load.prefill_tokens[0], there.load.prefill_tokens[0])
