"""The remarks under `workers list`."""

import dataclasses

from msgspec.structs import replace

from dynctl.documents.codec import encode
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.workers import (
    StreamState,
    WorkerDetail,
    WorkerList,
    decode_worker_rows,
    engine_row,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.workers import worker_detail, worker_list
from tests.golden.fleets import view, worker


def test_the_note_about_missing_kv_events_excludes_decode_workers():
    workers = [
        worker("p", "prefill", 1, kv_events=False),
        worker("a", "aggregated", 2, kv_events=False),
        worker("d", "decode", 3, kv_events=False),
    ]
    text = worker_list(WorkerList("test", view(workers).workers()), Canvas())
    assert text.splitlines()[-1] == "no KV events, routed by load only: p, a"
    text = worker_list(WorkerList("test", view(workers[2:]).workers()), Canvas())
    assert "routed by load only" not in text


def test_a_lost_event_stream_shows_how_long_it_is_lost():
    (row,) = view([worker("a", "aggregated", 2)]).workers()
    lost = replace(row, ranks=[replace(rank, index="disconnected") for rank in row.ranks])
    events = {0: StreamState(connected=False, for_s=75.0)}
    engine = engine_row(lost, source="api", endpoint="http://x", events=events)
    sent = b'{"workers": [' + encode(engine) + b"]}"
    text = worker_list(WorkerList("test", decode_worker_rows(sent)), Canvas())
    assert "disconnected, 75 s" in text


def test_the_index_of_an_engine_that_hangs_is_not_called_current():
    (row,) = view([worker("a", "aggregated", 2)]).workers()
    ranks = [replace(rank, index="current", index_age_s=28.0) for rank in row.ranks]
    hangs = replace(row, status="unavailable", reason="does not answer", ranks=ranks)
    for text in (
        worker_list(WorkerList("test", [hangs]), Canvas()),
        worker_detail(WorkerDetail("test", hangs), Canvas()),
    ):
        assert "as of 28 s ago" in text
        assert "current" not in text


def test_columns_that_do_not_fit_are_named_where_they_were_requested():
    rows = WorkerList("test", view([worker("a", "aggregated", 2)]).workers())
    narrow = worker_list(rows, Canvas(80, wide=True))
    assert "no room for OTHER TAINTS, LOAD AGE, ID, ENDPOINT: -o json" in narrow
    assert "no room" not in worker_list(rows, Canvas(200, wide=True)) + worker_list(
        rows, Canvas(80)
    )


def test_an_unknown_role_is_a_dash():
    (row,) = view([worker("a", "aggregated", 2)]).workers()
    text = worker_list(WorkerList("test", [replace(row, role="")]), Canvas())
    assert text.splitlines()[1].split()[:2] == ["a", "-"]


def test_other_routers_are_named_below_the_workers():
    replicas = [
        ReplicaRow("http://a:8000", "01", None, "in step", 0.31, 12, 0, 1),
        ReplicaRow("http://b:8000", "02", None, "silent", 40.0, 1, 3),
        ReplicaRow("tcp://c:5560", None, "tcp://c:5560"),
    ]
    text = worker_list(
        WorkerList("test", view([worker("a", "aggregated", 2)]).workers(), replicas), Canvas()
    )
    assert text.splitlines()[-5:] == [
        "router http://a:8000: in step, heard 0.3 s ago, 12 requests of it counted above,",
        "  0 messages lost",
        "router http://b:8000: silent, heard 40 s ago, 1 request of it counted above, 3",
        "  messages lost",
        "router tcp://c:5560: never heard",
    ]


def test_the_device_is_in_the_details_where_it_is_known():
    known = dataclasses.replace(worker("a", "aggregated", 1), device="cpu")
    rows = view([known, worker("b", "aggregated", 2)]).workers()
    first, second = (worker_detail(WorkerDetail("test", row), Canvas()) for row in rows)
    assert "device        cpu\n" in first
    assert "device" not in second
    assert b'"device"' not in encode(rows[1])
