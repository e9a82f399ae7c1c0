"""Traces are streamed, and what is wrong with a line is named with its number."""

import contextlib
import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.wire.traces import MOST_LINE_BYTES, SkippedLines, TraceRequest, read_trace, trace_format

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0300000,3180,8
2023-11-16 18:17:14.0799600,110,0
"""


def line(timestamp: float = 0, **changed: Any) -> str:
    values = {
        "timestamp": timestamp,
        "input_length": 1100,
        "output_length": 20,
        "hash_ids": [1, 2, 3],
    }
    return json.dumps(values | changed)


@pytest.fixture
def trace(tmp_path: Path):
    def write(*lines: str) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(one + "\n" for one in lines))
        return path

    return write


def test_a_mooncake_line_is_a_request(trace) -> None:
    path = trace(line(27482), "", line(30000, hash_ids=[1, 2], session_id="s", zone="a", id="x"))
    assert trace_format(path) == "mooncake"
    assert list(read_trace(path)) == [
        TraceRequest(27.482, "1", 1100, 20, (1, 2, 3), 512),
        TraceRequest(30.0, "x", 1100, 20, (1, 2), 512, session="s", zone="a"),
    ]


def test_numbers_and_nulls_in_place_of_names_are_read(trace) -> None:
    path = trace(line(0, id=7, session_id=12, model=None, zone=None))
    assert list(read_trace(path)) == [
        TraceRequest(0.0, "7", 1100, 20, (1, 2, 3), 512, session="12")
    ]


def test_a_bailian_trace_has_seconds_and_ids_of_single_blocks(trace) -> None:
    def chat(at: float, blocks: list[int]) -> str:
        return line(at, chat_id=5, parent_chat_id=-1, input_length=50, hash_ids=blocks)

    path = trace(chat(1.5, [7, 7, 8]), chat(61.25, [7, 8, 7]))
    assert trace_format(path) == "bailian"
    first, second = read_trace(path)
    assert (first.at, second.at, first.block_size) == (1.5, 61.25, 16)
    # An id stands for the blocks in front of it too, as in every other trace.
    assert first.hash_ids[0] == second.hash_ids[0]
    assert len({*first.hash_ids, *second.hash_ids}) == 5
    with pytest.raises(WireError, match=r"line 2: one of this line and the first has a chat_id"):
        list(read_trace(trace(chat(1, [7, 7, 8]), line(2000))))


def test_an_azure_trace_starts_at_0_and_has_no_hashes(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("\ufeff" + AZURE, encoding="utf-8")
    assert trace_format(path) == "azure"
    requests = list(read_trace(path))
    assert [round(one.at, 4) for one in requests] == [0.0, 0.05, 10.1]
    assert [(one.input_tokens, one.output_tokens) for one in requests] == [
        (4808, 10),
        (3180, 8),
        (110, 1),  # an engine computes one token to find that there are none
    ]
    assert all(one.hash_ids == () for one in requests)


def test_the_cells_of_a_csv_may_have_quotes_and_its_lines_may_end_as_those_of_dos(tmp_path: Path):
    path, plain = tmp_path / "quoted.csv", tmp_path / "plain.csv"
    plain.write_text(AZURE, encoding="utf-8")
    rows = [",".join(f'"{cell}"' for cell in row.split(",")) for row in AZURE.splitlines()]
    path.write_bytes("\r\n".join(rows).encode())
    assert trace_format(path) == "azure"
    assert list(read_trace(path)) == list(read_trace(plain))


def test_a_compressed_trace_is_read_as_it_is(trace) -> None:
    path = trace(line(1), line(2))
    plain = list(read_trace(path))
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_trace(path)) == plain


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "Expected object, got array"),
        (line(-1), "timestamp -1 ms; expected a time since the start of the trace"),
        (line(1e18), "at most 10 years"),
        (line(5), "its time, 0.005 s, is before 0.010 s of line 1; expected requests in order"),
        (line(20, input_length=-5), "input_length -5; expected 1 to 10,000,000 tokens"),
        (line(20, input_length=0), "input_length 0; expected 1"),
        (line(20, output_length=-1), "output_length -1; expected 0 to 10,000,000 tokens"),
        (line(20, input_length="many"), "input_length: Expected int, got str"),
        (line(20, input_length=10**30), "input_length"),
        (line(20, hash_ids=[1]), "1 hash_ids for 1,100 input tokens; expected 2 or 3 with blocks"),
        (line(20, hash_ids=[1, 2, 3, 4]), "--trace-block-size"),
        (line(20, hash_ids=[1, 2, 1]), "a hash id occurs twice"),
        (line(20, hash_ids=[1, None]), "hash_ids[1]: Expected int, got null"),
        ('{"timestamp": 20}', "no field input_length"),
        ("x" * 100, "not JSON"),
        ("[" * 100_000, "expected"),
    ],
)
def test_a_bad_line_is_named_or_counted(trace, bad: str, problem: str) -> None:
    path = trace(line(10), bad, line(30))
    with pytest.raises(WireError) as raised:
        list(read_trace(path))
    if bad != "[" * 100_000:
        assert problem in str(raised.value).replace("Expected `array`", "expected")
    assert f"{path}: line 2:" in str(raised.value)

    skipped = SkippedLines()
    assert [one.at for one in read_trace(path, skipped=skipped)] == [0.01, 0.03]
    assert skipped.count == 1
    assert skipped.problems[0].startswith("line 2: ")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("2023-11-16 18:17:05,1", "2 columns; expected TIMESTAMP,ContextTokens"),
        ("yesterday,1,1", "TIMESTAMP 'yesterday'; expected a time such as"),
        ("2023-11-16 18:17:05,-7,1", "ContextTokens -7; expected 1"),
        ("2023-11-16 18:17:05,7,1.5", "GeneratedTokens '1.5'; expected a whole number"),
        ("2020-01-01 00:00:00,7,1", "is before that of the first request"),
    ],
)
def test_a_bad_row_of_a_csv_is_named(tmp_path: Path, row: str, problem: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + row + "\n")
    with pytest.raises(WireError, match="line 5") as raised:
        list(read_trace(path))
    assert problem in str(raised.value)


def test_an_empty_trace_and_a_file_of_another_kind_are_refused(trace) -> None:
    with pytest.raises(WireError, match="the trace is empty; expected at least one request"):
        list(read_trace(trace()))
    with pytest.raises(WireError, match="not a trace; expected JSON lines with timestamp"):
        list(read_trace(trace("name: a yaml file")))
    for text in ('{"messages": []}', '{"conversations": []}', '{"body": {"timestamp": 1}}'):
        with pytest.raises(WireError, match="not a trace; expected JSON lines with timestamp"):
            list(read_trace(trace(text)))
    with pytest.raises(WireError, match="line 1: no field timestamp"):
        list(read_trace(trace('{"input_length": 5, "output_length": 1}')))
    with pytest.raises(WireError, match="no line is good: 2 skipped, the first: line 1"):
        list(read_trace(trace("{", "{"), skipped=SkippedLines()))


def test_a_line_without_an_end_is_refused_before_it_is_held(trace) -> None:
    path = trace(line(1), "{" + " " * (MOST_LINE_BYTES + 1))
    with pytest.raises(WireError, match="line 2: longer than"):
        list(read_trace(path))


def test_a_compressed_trace_that_was_cut_names_the_line(trace) -> None:
    path = trace(*(line(number) for number in range(5000)))
    whole = gzip.compress(path.read_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WireError, match=r"line [\d,]+: the compressed data ends here"):
        list(read_trace(path))
    path.write_bytes(whole[:40] + b"garbage" * 20)
    with pytest.raises(WireError, match=r"gzip|the compressed data ends"):
        list(read_trace(path))


def test_a_large_trace_is_never_held_whole(tmp_path: Path) -> None:
    """20 MB of lines; the reader may not use a twentieth of it."""
    path = tmp_path / "large.jsonl"
    body = line(0, input_length=512 * 400, hash_ids=list(range(10**6, 10**6 + 400)))
    with path.open("w") as lines:
        for _ in range(5_000):
            lines.write(body + "\n")
    assert path.stat().st_size > 15_000_000

    def count(requests: Iterator[TraceRequest]) -> int:
        return sum(1 for _ in requests)

    tracemalloc.start()
    try:
        assert count(read_trace(path)) == 5_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@given(st.binary(max_size=300))
def test_any_bytes_are_a_trace_or_a_wire_error(tmp_path_factory, junk: bytes) -> None:
    path = tmp_path_factory.mktemp("junk") / "trace"
    path.write_bytes(line(1).encode() + b"\n" + junk)
    with contextlib.suppress(WireError):
        list(read_trace(path))
    assert len(list(read_trace(path, skipped=SkippedLines()))) >= 1
