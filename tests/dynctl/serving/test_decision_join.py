"""Decisions of a live Dynamo: from its log, and from replica-sync events."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.documents.fleet_load import Transfer
from dynctl.serving.dynamo.decision_join import EVENTS, KEPT, LOG, DecisionJoin
from dynctl.sources.dynamo.log_tail import LogTail
from dynctl.wire.dynamo.active_sequences import SequenceAdded, SequenceFreed
from dynctl.wire.dynamo.frontend_log import read_line
from router_core import Worker
from tests.golden.fleets import worker

PREFILL = worker("prefill-a0", "prefill", 1, zone="zone-a")
DECODE_A = worker("decode-a0", "decode", 2, zone="zone-a")
DECODE_B = worker("decode-b0", "decode", 3, zone="zone-b")
ALONE = worker("agg-0", "aggregated", 4)
KNOWN = {one.worker_id: one for one in (PREFILL, DECODE_A, DECODE_B, ALONE)}


def winners() -> DecisionJoin:
    return DecisionJoin(KNOWN.get, lambda: 1000.0)


def line(to: Worker, kind: str, request: str = "4aec", **more: str) -> str:
    fields = " ".join(f"{name}={value}" for name, value in more.items())
    return (
        "2026-11-21T18:18:40.603428Z  INFO dynamo_kv_router::scheduling::selector: Selected worker "
        f'router_mode="kv" request_id="{request}" worker_id={to.worker_id} worker_type={kind} '
        f"dp_rank=0 logit=26.5625 {fields}"
    )


def take(into: DecisionJoin, *lines: str) -> None:
    for text in lines:
        read = read_line(text)
        assert read is not None, text
        into.take_line(read)


def added(to: Worker, request: str, blocks: int | None = None) -> SequenceAdded:
    tokens = None if blocks is None else tuple(range(blocks))
    return SequenceAdded(request, to.worker_id, 0, tokens, 8, 77)


def test_two_lines_of_a_request_are_one_decision():
    made = winners()
    take(
        made,
        line(PREFILL, "prefill", effective_cached_blocks="12.0", total_kv_blocks="Some(128)"),
        line(DECODE_A, "decode"),
    )
    (shown,) = made.lines()
    assert (shown.id, shown.at, shown.complete, shown.source) == (
        "4aec",
        1795285120.603428,
        False,
        LOG,
    )
    assert (shown.prefill and shown.prefill.worker, shown.decode and shown.decode.worker) == (
        "prefill-a0",
        "decode-a0",
    )
    assert (shown.cached_blocks, shown.cost, shown.margin, shown.blocks) == (
        12,
        26.5625,
        None,
        None,
    )
    assert made.transfers() == (Transfer("zone", "zone-a", 1, 0),)


def test_events_have_the_worker_and_the_number_of_blocks_only():
    made = winners()
    made.take_sequence(added(PREFILL, "r1"))
    made.take_sequence(added(DECODE_B, "r1", 26))
    made.take_sequence(SequenceFreed("r1", DECODE_B.worker_id, 0, 77))
    (shown,) = made.lines()
    assert (shown.source, shown.stage, shown.blocks) == (EVENTS, "decode", 26)
    assert (shown.cost, shown.cached_blocks, shown.margin) == (None, None, None)
    assert made.transfers() == (Transfer("zone", "zone-a", 0, 1),)


def test_log_and_events_of_one_request_are_one_decision():
    made = winners()
    take(made, line(PREFILL, "prefill", "r1", effective_cached_blocks="3.0"))
    made.take_sequence(added(PREFILL, "r1"))
    made.take_sequence(added(DECODE_A, "r1", 26))
    take(made, line(DECODE_A, "decode", "r1"))
    (shown,) = made.lines()
    assert (shown.blocks, shown.cached_blocks) == (26, 3)
    assert made.transfers() == (Transfer("zone", "zone-a", 1, 0),)
    assert made.hops == {LOG: 2, EVENTS: 2}


def test_an_aggregated_worker_is_called_decode_in_logs():
    made = winners()
    take(made, line(ALONE, "decode", effective_cached_blocks="2.0"))
    (shown,) = made.lines()
    assert (shown.stage, shown.prefill, shown.cached_blocks, shown.cost) == (
        "aggregated", None, 2, 26.5625,
    )  # fmt: skip


def test_a_refusal_stands_out_and_joins_its_request():
    made = winners()
    start = "2026-11-21T18:18:41Z  WARN dynamo_kv_router::scheduling::queue: scheduling failed: "
    take(
        made,
        start + "no endpoints available to route work",
        start + "all eligible workers are overloaded",
    )
    newest, oldest = made.lines()
    assert (oldest.outcome, oldest.id) == ("no_eligible_worker", "-")
    assert (newest.outcome, newest.refused) == ("all_busy", True)
    assert newest.message == "all eligible workers are overloaded"


def test_a_worker_that_is_not_registered_any_more_has_its_id():
    made = winners()
    made.take_sequence(SequenceAdded("r1", 0xABC, 1, None, 0, 7))
    (shown,) = made.lines()
    assert shown.decode is not None
    assert (shown.decode.worker, shown.domains) == ("abc", {})


def test_only_the_last_ones_are_kept():
    made = winners()
    for number in range(KEPT + 50):
        made.take_sequence(added(PREFILL, f"r{number}"))
    lines = made.lines()
    assert (len(lines), lines[0].id, lines[-1].id) == (KEPT, f"r{KEPT + 49}", "r50")


# -- the log as it grows -----------------------------------------------------------------------


def test_a_log_is_read_from_near_its_end_and_as_it_grows(tmp_path: Path):
    log = tmp_path / "frontend.log"
    lines: list[str] = []
    log.write_text("x" * 300_000 + "\nfirst\nsec")
    follower = LogTail(str(log), lines.append)
    follower.read()
    assert lines[-1:] == ["first"]
    with log.open("a") as file:
        file.write("ond\r\nthird\n")
    follower.read()
    assert lines[-2:] == ["second", "third"]
    assert all(len(line) < 300_000 for line in lines)
    follower.close()


@pytest.mark.parametrize("how", ["moved", "emptied"])
def test_a_rotated_log_goes_on(tmp_path: Path, how: str):
    log = tmp_path / "frontend.log"
    lines: list[str] = []
    log.write_text("one\n")
    follower = LogTail(str(log), lines.append)
    follower.read()
    if how == "moved":
        log.rename(tmp_path / "frontend.log.1")
        follower.read()
        log.write_text("two\n")
    else:
        log.write_text("")
        follower.read()
        log.write_text("two\n")
    for _ in range(3):
        follower.read()
    assert lines == ["one", "two"]
    follower.close()


def test_standard_input_ends_when_its_writer_does(monkeypatch: pytest.MonkeyPatch):
    reading, writing = os.pipe()
    kept = os.dup(0)
    lines: list[str] = []
    os.dup2(reading, 0)
    try:
        follower = LogTail("-", lines.append)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reading)
    follower.read()
    assert (lines, follower.ended) == ([], False)
    os.write(writing, b"a line\nand")
    follower.read()
    assert lines == ["a line"]
    os.write(writing, b" another\n")
    os.close(writing)
    follower.read()
    assert (lines, follower.ended) == (["a line", "and another"], True)
    follower.close()


def test_logs_that_cannot_be_read_are_usage_problems(tmp_path: Path):
    with pytest.raises(UsageProblem, match=r"nowhere\.log: the file does not exist"):
        LogTail(str(tmp_path / "nowhere.log"), print)
    with pytest.raises(UsageProblem, match="a directory; expected a log file"):
        LogTail(str(tmp_path), print)
