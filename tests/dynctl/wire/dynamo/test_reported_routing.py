"""Routing decisions in a frontend's log, and the reports of engines' schedulers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import WireError
from dynctl.serving.records.decision_log import selected_line, selected_line_09
from dynctl.wire.dynamo.events import PASS_TOPIC, ForwardPass, decode_forward_pass
from dynctl.wire.dynamo.frontend_log import RefusedLine, SelectedLine, read_line
from router_core import RoutingRequest
from tests.dynctl.serving.routed import request, router, worker

CAPTURES = Path(__file__).parents[3] / "captures"

#: As a frontend of Dynamo 1.6.1 wrote it.
SEEN = (
    ' INFO dynamo_kv_router::scheduling::selector: Selected worker router_mode="kv" '
    'request_id="4aec0c3e" worker_id=2324035517153284967 worker_type=prefill dp_rank=0 '
    "logit=26.5625 effective_cached_blocks=0.0 host_pinned_blocks=0 disk_blocks=0 "
    "total_kv_blocks=Some(128)"
)
EXPECTED = SelectedLine("4aec0c3e", 2324035517153284967, 0, "prefill", 26.5625, 0.0, None)


def test_an_observed_line():
    assert read_line(SEEN) == EXPECTED


def test_the_line_of_the_decode_hop_has_no_cache():
    text = (
        '2026-11-21T18:18:40.603428123Z  INFO x: Selected worker router_mode="kv" '
        'request_id="4aec" worker_id=18446744073709551615 worker_type=decode dp_rank=3 '
        "logit=26.0 host_pinned_blocks=0 disk_blocks=0"
    )
    at = 1795285120.603428
    expected = SelectedLine("4aec", 2**64 - 1, 3, "decode", 26.0, None, at)
    assert read_line(text) == expected


def test_colours_do_not_matter():
    recorded = SEEN.replace("INFO", "\x1b[32mINFO\x1b[0m").replace(
        "worker_id", "\x1b[3mworker_id\x1b[0m\x1b[2m"
    )
    assert read_line("\x1b[2m2026-11-21T18:18:40Z\x1b[0m" + recorded) == replace(
        EXPECTED, at=1795285120.0
    )


@pytest.mark.parametrize("nested", [True, False])
def test_json_lines_have_the_same_content(nested: bool):
    fields = {
        "message": "Selected worker", "router_mode": "kv", "request_id": "4aec0c3e",
        "worker_id": 2324035517153284967, "worker_type": "prefill", "dp_rank": 0,
        "logit": 26.5625, "effective_cached_blocks": 0.0,
    }  # fmt: skip
    document: dict[str, Any] = {"time": "2026-11-21T18:18:40Z", "level": "INFO"}
    document |= {"fields": fields} if nested else fields
    read = read_line(json.dumps(document))
    assert isinstance(read, SelectedLine)
    assert (read.worker_id, read.at) == (2324035517153284967, 1795285120.0)


def test_lines_of_a_dynctl_frontend():
    made = router(worker(1, "prefill"), worker(2, "decode"))
    wanted: RoutingRequest = request(request_id="r1")
    plan = made.plan(wanted)
    assert plan.prefill is not None
    read = read_line(selected_line(plan.prefill))
    assert isinstance(read, SelectedLine)
    assert (read.request_id, read.worker_id, read.worker_type) == ("r1", 1, "prefill")
    assert read.logit == plan.prefill.costs[0]
    old = read_line(selected_line_09(plan.prefill))
    assert isinstance(old, SelectedLine)
    assert (old.request_id, old.worker_id, old.cached_blocks) == ("", 1, 0)
    assert old.logit == pytest.approx(plan.prefill.costs[0], abs=1e-3)


def test_refusals():
    start = "2026-11-21T18:18:40Z  WARN dynamo_kv_router::scheduling::queue: scheduling failed: "
    assert read_line(start + "all eligible workers are overloaded") == RefusedLine(
        "", "all eligible workers are overloaded", 1795285120.0
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "Selected worker", "Selected worker worker_id=abc dp_rank=0",
        "Selected worker worker_id=99999999999999999999999", "scheduling failed:",
        '{"message": "Selected worker"', '{"message": "Selected worker", "worker_id": true}',
        '["Selected worker"]', "Selected worker worker_id=" + "1" * 70_000,
    ],
)  # fmt: skip
def test_other_lines_are_ignored(text: str):
    assert read_line(text) is None


@given(st.text(max_size=300))
def test_any_text_is_accepted(text: str):
    read_line("Selected worker " + text)
    read_line('{"message": "Selected worker", ' + text)


# -- forward-pass-metrics ----------------------------------------------------------------------


def payloads():
    for row in (CAPTURES / "dynamo-events-zmq.jsonl").read_text().splitlines():
        recorded = json.loads(row)
        if recorded["decoded"]["topic"] == PASS_TOPIC:
            yield recorded["decoded"]["payload"]


def test_captured_reports_are_read():
    found = list(payloads())
    assert found
    for payload in found:
        read = decode_forward_pass(msgspec.msgpack.encode(payload))
        assert read.worker_id == int(payload["worker_id"])
        assert read.waiting == payload["queued_requests"]["num_prefill_requests"]


def test_both_kinds_of_waiting_requests_count():
    payload = {
        "worker_id": "7", "dp_rank": 1,
        "scheduled_requests": {"num_prefill_requests": 1, "num_decode_requests": 5},
        "queued_requests": {"num_prefill_requests": 2, "num_decode_requests": 3, "more": 1},
    }  # fmt: skip
    assert decode_forward_pass(msgspec.msgpack.encode(payload)) == ForwardPass(7, 1, 6, 5)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", msgspec.msgpack.encode([]), msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"worker_id": 7}), msgspec.msgpack.encode({"worker_id": "x"}),
        msgspec.msgpack.encode({"worker_id": "9" * 20}),
        msgspec.msgpack.encode({"worker_id": "7", "queued_requests": {"num_prefill_requests": -1}}),
    ],
)  # fmt: skip
def test_other_reports_are_refused(payload: bytes):
    with pytest.raises(WireError):
        decode_forward_pass(payload)
