"""`dynctl events tail` over a file store and a real ZMQ publisher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zmq

from dynctl.wire.dynamo.discovery import KV_EVENTS
from dynctl.wire.dynamo.events import (
    Envelope,
    RouterEvent,
    encode_router_events,
    encode_zmq_frames,
)
from router_core import BlocksStored
from tests.forks import Program
from tests.waiting import patience

CAPTURE = Path(__file__).parents[2] / "captures" / "etcd-disagg-required.json"
ENTRIES: dict[str, Any] = {
    key: row["value"] for key, row in json.loads(CAPTURE.read_text()).items()
}


class Publisher(threading.Thread):
    """One prefill worker: every 10 ms an event, the fifth of each ten is never sent."""

    def __init__(self, publisher_id: int, worker_id: int) -> None:
        super().__init__(daemon=True)
        self.publisher_id = publisher_id
        self.worker_id = worker_id
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.ended = threading.Event()

    def run(self) -> None:
        sequence = 0
        while not self.ended.wait(0.01):
            sequence += 1
            if sequence % 10 != 5:
                stored = BlocksStored(None, (sequence,), (sequence,))
                event = RouterEvent(self.worker_id, 0, sequence, stored)
                payload = encode_router_events([event])
                at = time.time_ns() // 1_000_000
                envelope = Envelope(self.publisher_id, sequence, at, KV_EVENTS, payload)
                self.socket.send_multipart(encode_zmq_frames(envelope))
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A file store of the captured fleet; one prefill worker's events are really published."""
    sources = [value for key, value in ENTRIES.items() if key.startswith("v1/event_sources/")]
    source = next(each for each in sources if each["topic"] == KV_EVENTS)
    publisher = Publisher(source["publisher_id"], source["metadata"]["worker"]["worker_id"])
    for key, value in ENTRIES.items():
        if value.get("instance_id") == publisher.publisher_id:
            config = {"endpoint": f"tcp://127.0.0.1:{publisher.port}"}
            value = {**value, "transport": {"kind": "Zmq", "config": config}}
        version, bucket, name = key.split("/", 2)
        path = (
            tmp_path
            / version
            / bucket
            / quote(name, safe="").replace("-", "%2D").replace("_", "%5F")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
        os.utime(path, (time.time() + 600,) * 2)
    publisher.start()
    yield tmp_path
    publisher.ended.set()
    publisher.join()


@pytest.mark.seed("smart-routing-guide-0.9: verification: KV event stream")
def test_lines_come_until_the_limit(dynctl, store: Path):
    ran = dynctl("events", "tail", "--file-kv", store, "--limit", 12)
    assert ran.code == 0
    heading, *lines = ran.out.splitlines()
    assert heading.split() == [
        "TIME", "EVENT", "WORKER", "ZONE", "RANK", "BLOCKS", "FIRST", "TIER", "ID",
    ]  # fmt: skip
    assert len(lines) == 12
    assert ran.err == (f"following 2 publishers of KV events: file {store}, namespace dynamo\n")
    gaps = [line for line in lines if " ! gap " in line]
    assert gaps
    assert "is missing (1 message lost on the way)" in gaps[0]


def test_jsonl_is_an_object_a_line(dynctl, store: Path):
    ran = dynctl("events", "tail", "--file-kv", store, "--limit", 3, "-o", "jsonl", "-l",
                 "role=prefill", "--kind", "stored")  # fmt: skip
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["event"] for line in lines] == ["stored"] * 3
    assert {line["kind"] for line in lines} == {"KvEventLine"}
    assert all(line["first_hash"] == f"{line['event_id']:016x}" for line in lines)


def test_only_the_requested_kind(dynctl, store: Path):
    ran = dynctl("events", "tail", "--file-kv", store, "--limit", 2, "-o", "jsonl", "--kind", "gap")
    assert [json.loads(line)["missing"] for line in ran.out.splitlines()] == [1, 1]


def test_it_ends_after_the_duration(dynctl, store: Path):
    ran = dynctl("events", "tail", "--file-kv", store, "--duration", 0.2, "-l", "zone=nowhere")
    assert (ran.code, len(ran.out.splitlines())) == (0, 1)
    assert "following 0 publishers" in ran.err


def test_a_namespace_without_workers_names_the_others(dynctl, store: Path):
    ran = dynctl("events", "tail", "--file-kv", store, "--dyn-namespace", "x", "--duration", 0)
    assert "no worker yet; other namespaces: dynamo" in ran.err


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (["--demo"], "--demo has no event plane"),
        (["--frontend", "http://127.0.0.1:1"], "--frontend has no event plane"),
        ([], "no discovery backend is set"),
        (["--file-kv", "x", "-o", "json"], "expected one of table, wide, jsonl"),
        (["--file-kv", "x", "--kind", "lost"], "--kind lost: expected one of stored"),
        (["--file-kv", "x", "-l", "zone"], "--selector zone: expected KEY=VALUE"),
    ],
)
def test_what_it_cannot_follow_is_a_usage_problem(dynctl, monkeypatch, line, error):
    for name in ("DYN_DISCOVERY_BACKEND", "DYN_FILE_KV", "ETCD_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)
    ran = dynctl("events", "tail", *line)
    assert (ran.code, ran.out) == (2, "")
    assert error in ran.err
    assert ("workers list has each worker's INDEX" in ran.err) is ("--file-kv" not in line)


def started(store: Path, *more: str) -> Program:
    return Program(
        ["dynctl", "events", "tail", "--file-kv", str(store), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_ctrl_c_is_130_without_a_word(store: Path):
    with started(store) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=patience(20))
    assert process.returncode == 130
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("more", [[], ["--kind", "cleared"]])
def test_a_reader_that_leaves_ends_it(store: Path, more: list[str]):
    """Also where no line would ever be written again."""
    with started(store, *more) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=patience(20)) == 0
        assert process.stderr is not None
        assert process.stderr.read().count("\n") == 1
