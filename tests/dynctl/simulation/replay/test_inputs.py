"""The input of a replay: traces, recordings and workloads become requests from second 0."""

from pathlib import Path

import pytest

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import UsageProblem
from dynctl.documents.recording import Arrived, Finished, Record, Start
from dynctl.documents.recording_file import HEADER, MAGIC, encode_records
from dynctl.simulation.replay import inputs
from dynctl.simulation.replay.inputs import TraceInput, speeds_of
from dynctl.simulation.replay.workloads import workload
from dynctl.wire.traces import TraceRequest

DAY = 1_790_000_000.0
RECORDS: list[Record] = [
    Start(DAY, "frontend", "f1", "1.0"),
    Arrived(DAY + 1, "a", "m", 40, 16, (7, 8), session="s", tenant="t"),
    Arrived(DAY + 2, "b", "m", 20, 16, (7,), output_limit=64),
    Finished(DAY + 3, "b", 200, "completed", 20, 0, 5),
    Finished(DAY + 4, "a", 200, "completed", 40, 0, 9),
    Arrived(DAY + 5, "c", "m", 16, 16, (9,), output_limit=30),
]


def mooncake(at: int, number: int) -> str:
    """A line of a trace with an id of its own; ``at`` in ms."""
    return f'{{"timestamp": {at}, "input_length": 5, "output_length": 1, "hash_ids": [{number}]}}\n'


def recording(path: Path, records=RECORDS) -> Path:
    path.write_bytes(encode_records(records))
    return path


def test_a_recording_is_requests_with_the_lengths_that_their_ends_report(tmp_path: Path) -> None:
    given = TraceInput(path=recording(tmp_path / "a.rec"))
    assert given.format == "recording"
    assert list(given.requests(0)) == [
        TraceRequest(0.0, "a", 40, 9, (7, 8), 16, "m", "t", "s"),
        TraceRequest(1.0, "b", 20, 5, (7,), 16, "m"),
        TraceRequest(4.0, "c", 16, 30, (9,), 16, "m"),
    ]
    assert "1 requests have no output length" in given.notes[0]
    assert [one.at for one in given.requests(0, speed=2.0)] == [0.0, 0.5, 2.0]


def test_a_cut_recording_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    data = encode_records(RECORDS, per_chunk=2)
    path.write_bytes(data[:-3])
    given = TraceInput(path=path)
    assert [one.id for one in given.requests(0)] == ["a", "b"]
    assert "the file is cut at byte" in given.notes[0]


def test_a_damaged_recording_names_its_offset_or_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    data = bytearray(encode_records(RECORDS, per_chunk=2))
    data[-5] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(WireError, match=r"bytes from [\d,]+"):
        list(TraceInput(path=path).requests(0))
    given = TraceInput(path=path, skip_bad=True)
    assert [one.id for one in given.requests(0)] == ["a", "b"]
    assert given.skipped.count == 1


def test_a_newer_recording_and_one_without_requests_are_refused(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.rec")
    newer = bytearray(path.read_bytes())
    newer[len(MAGIC) : len(HEADER)] = b"\xff\x7f"
    path.write_bytes(newer)
    with pytest.raises(WireError, match="a recording of schema 32767; this dynctl reads up to"):
        TraceInput(path=path).first()
    with pytest.raises(WireError, match="no request; expected at least one"):
        TraceInput(path=recording(path, RECORDS[:1])).first()


def test_a_replay_has_one_model(tmp_path: Path) -> None:
    two = [*RECORDS, Arrived(DAY + 6, "d", "other", 16, 16)]
    path = recording(tmp_path / "a.rec", two)
    with pytest.raises(UsageProblem, match="requests of m and of other"):
        list(TraceInput(path=path).requests(0))
    assert [one.id for one in TraceInput(path=path, model="other").requests(0)] == ["d"]


def test_limit_speed_and_start_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        f'{{"timestamp": {at}, "input_length": 5, "output_length": 1}}\n'
        for at in (1000, 2000, 5000)
    ]
    path.write_text("".join(lines))
    assert [one.at for one in TraceInput(path=path, speed=2).requests(0)] == [0.0, 0.5, 2.0]
    assert len(list(TraceInput(path=path, limit=2).requests(0))) == 2
    assert TraceInput(path=path).first().block_size == 512
    assert TraceInput(path=path, block_size=64).first().block_size == 64


def test_requests_of_one_time_are_spread_until_the_next_time(tmp_path: Path) -> None:
    """Four requests at 0, two at 3 s, three at the last time, 4 s, which take the distance before
    them: 1 s. The speed divides the times after that."""
    path = tmp_path / "a.jsonl"
    times = [0, 0, 0, 0, 3000, 3000, 4000, 4000, 4000]
    path.write_text("".join(mooncake(at, number) for number, at in enumerate(times)))
    given = TraceInput(path=path, spread=True)
    found = list(given.requests(1))
    spread = [0, 0.75, 1.5, 2.25, 3, 3.5, 4, 4 + 1 / 3, 4 + 2 / 3]
    assert [one.at for one in found] == pytest.approx(spread)
    plain = list(TraceInput(path=path).requests(1))
    assert [one.hash_ids for one in found] == [one.hash_ids for one in plain]
    faster = [one.at for one in given.requests(1, 2.0)]
    assert faster == pytest.approx([at / 2 for at in spread])
    alone = TraceInput(path=path, spread=True, limit=3)
    assert [one.at for one in alone.requests(1)] == [0, 0, 0]


def test_requests_of_one_time_that_are_kept_have_a_bound(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "_MOST_TOGETHER", 3)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(mooncake(0, number) for number in range(5)))
    with pytest.raises(UsageProblem, match=r"more than 3 requests .* have the time 0 s"):
        list(TraceInput(path=path, spread=True).requests(1))


def test_a_workload_is_generated_again_for_each_seed() -> None:
    given = TraceInput(workload=workload("chat", ("requests=20",)))
    assert given.name == "generated chat"
    assert given.format == "chat"
    assert list(given.requests(3)) == list(given.requests(3)) != list(given.requests(4))
    assert given.first().at == 0.0


def test_loads_are_factors() -> None:
    assert speeds_of("2, 0.5,1") == (0.5, 1.0, 2.0)
    for bad in ("", "fast", "0", "-1", "nan", "1e9", ",".join(["1"] * 21)):
        with pytest.raises(UsageProblem, match="--loads"):
            speeds_of(bad)
