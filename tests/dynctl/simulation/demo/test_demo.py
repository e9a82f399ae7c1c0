"""`dynctl demo` in real processes: its steps, its screens, no process left behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynctl.base.options import GlobalOptions
from dynctl.cli.commands import demo
from dynctl.documents.demo import DemoEnd, DemoStep
from dynctl.screens.canvas import Canvas
from dynctl.screens.demo import demo_end, demo_step
from dynctl.simulation.demo.fleet import DemoError, DemoFleet, EnginePlan
from tests.forks import Program
from tests.waiting import patience

TIMEOUT = 90.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    process = Program(
        ["dynctl", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(TIMEOUT)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


@pytest.fixture(scope="module")
def demo_steps() -> list[dict[str, Any]]:
    """The story once, as JSON lines."""
    done = run("-o", "jsonl")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def zone(step: dict[str, Any], hop: str) -> str:
    winner = step["route"]["winner"][hop]["worker"]
    rows = step["route"][hop]["candidates"]
    return str(next(row["domains"]["zone"] for row in rows if row["worker"] == winner))


def test_prefill_and_decode_stay_in_one_zone(demo_steps: list[dict[str, Any]]) -> None:
    for step in demo_steps[:3]:
        assert step["status"] == 200
        assert zone(step, "prefill") == zone(step, "decode")
        (constraint,) = step["route"]["decode"]["constraints"]
        assert constraint["kind"] == "required"
        assert constraint["origin"].startswith("kv-transfer policy of worker prefill-")


def test_the_second_request_hits_the_cache_of_the_first(demo_steps: list[dict[str, Any]]) -> None:
    first, second = demo_steps[0]["route"], demo_steps[1]["route"]
    assert second["winner"]["prefill"] == first["winner"]["prefill"]
    winner = second["winner"]["prefill"]["worker"]
    overlap = {row["worker"]: row["overlap_blocks"] for row in second["prefill"]["candidates"]}
    assert overlap[winner] == first["blocks"]
    assert all(blocks == 0 for name, blocks in overlap.items() if name != winner)


def test_the_guard_moves_the_request_when_its_zone_cannot_decode(
    demo_steps: list[dict[str, Any]],
) -> None:
    assert zone(demo_steps[2], "prefill") != zone(demo_steps[1], "prefill")
    steps = {step["filter"]: step for step in demo_steps[2]["route"]["prefill"]["funnel"]}
    guard = steps["decode_capacity"]
    assert (guard["entered"], guard["left"]) == (2, 1)
    (passed_over,) = guard["rejected"]
    assert passed_over["worker"] == demo_steps[1]["route"]["winner"]["prefill"]["worker"]


def test_a_request_bound_to_the_lost_zone_is_refused_with_the_reason(
    demo_steps: list[dict[str, Any]],
) -> None:
    refused = demo_steps[3]
    assert refused["status"] == 503
    assert refused["route"]["winner"] == {"prefill": None, "decode": None}
    assert refused["route"]["prefill"]["outcome"] == "no_eligible_worker"
    assert "no eligible decode worker" in refused["answer"]
    assert demo_steps[4]["kind"] == "DemoEnd"


def test_the_screens_fit_80_columns(demo_steps: list[dict[str, Any]]) -> None:
    canvas = Canvas(width=80)
    steps = [demo_step(msgspec.convert(step, DemoStep), canvas) for step in demo_steps[:-1]]
    shown = "".join([*steps, demo_end(msgspec.convert(demo_steps[-1], DemoEnd), canvas)])
    assert max(map(len, shown.splitlines())) <= 80
    assert "decode-capacity guard: skipped prefill-" in shown
    assert "would flip with" in shown


def test_keep_prints_what_to_try_and_stops_on_ctrl_c() -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dynctl", "demo", "--keep", "--no-story", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(patience(TIMEOUT), process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "Ctrl-C stops it." not in lines[-1]:
            line = process.stdout.readline()
            assert line, "the demo ended before it printed what to try"
            lines.append(line)
        assert "  dynctl top\n" in lines
        assert any("export DYNCTL_FRONTEND=http://127" in line for line in lines)
        assert not [line for line in lines if "--frontend" in line]
        assert max(map(len, lines)) <= 81
        children = _children(process.pid)
        assert len(children) == 7
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(TIMEOUT)) == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_hints_of_a_fleet_at_the_default_address_name_no_address(monkeypatch) -> None:
    url = "http://127.0.0.1:8000"
    lines = demo_end(DemoEnd(url, [], 0, 1.0, True, True), Canvas()).splitlines()
    assert "  dynctl top" in lines
    assert [line for line in lines if url in line] == [f"  curl -s {url}/v1/chat/completions \\"]
    monkeypatch.delenv("DYNCTL_FRONTEND", raising=False)
    assert demo._is_default_source(url, GlobalOptions())
    assert not demo._is_default_source("http://127.0.0.1:8001", GlobalOptions())
    monkeypatch.setenv("DYNCTL_FRONTEND", "http://prod:8000")
    assert not demo._is_default_source(url, GlobalOptions())


def test_a_kept_fleet_takes_the_default_port_if_it_is_free(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr("dynctl.sources.named.DEFAULT_FRONTEND", f"http://127.0.0.1:{taken}")
        assert demo._port(keep=True) == 0
    assert demo._port(keep=True) == taken
    assert demo._port(keep=False) == 0


def test_a_port_in_use_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("--port", str(port))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: --port {port}: the address is in use" in done.stderr
    assert "starting" not in done.stderr


def test_an_engine_that_cannot_start_is_named_with_its_log() -> None:
    with pytest.raises(DemoError, match="broken ended with exit code 2"):
        DemoFleet(
            [EnginePlan("broken", "prefill", "zone-a")], engine_args=["--block-size", "none"]
        ).__enter__()


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]
