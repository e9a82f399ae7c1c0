"""Discovery in an etcd cluster whose members die, stop, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.contract.etcd_server import EtcdServer, etcd_cluster, start_members
from tests.dynamo.fleet import DynamoFleet
from tests.dynamo.ours import FOREIGN, OurFrontend, wait
from tests.planes.traffic import Scores
from tests.waiting import patience, until_now


def interrupted(ours: OurFrontend) -> bool:
    return any(code == "DISCOVERY_INTERRUPTED" for code, _ in ours.conditions())


def test_each_member_dies_and_returns(
    ours: OurFrontend, workers: DynamoFleet, etcd: list[EtcdServer], scores: Scores
) -> None:
    """No request fails, and no worker is lost from view."""
    for member in etcd:
        with scores.traffic("each etcd member killed in turn", ours, workers.frontend) as requests:
            member.kill()
            time.sleep(2)
            member.start()
            wait(ours, lambda: not interrupted(ours), "discovery to be read again")
        assert not requests.lost, requests.lost[:3]
        assert len(ours.ready()) == len(workers.workers)


def test_a_member_is_silent(
    ours: OurFrontend, workers: DynamoFleet, etcd: list[EtcdServer], scores: Scores
) -> None:
    for member in etcd:
        fault = "each etcd member stopped, 3 s"
        with scores.traffic(fault, ours, workers.frontend) as requests, member.frozen():
            time.sleep(3)
        assert not requests.lost, requests.lost[:3]
    wait(ours, lambda: not interrupted(ours), "discovery to be read again")
    assert len(ours.ready()) == len(workers.workers)


def test_the_quorum_is_lost_for_a_while(
    ours: OurFrontend, workers: DynamoFleet, etcd: list[EtcdServer], scores: Scores
) -> None:
    """Serving goes on with the last view, which a condition reports as old."""
    with scores.traffic("etcd without a quorum for 5 s", ours, workers.frontend) as requests:
        for member in etcd[1:]:
            member.kill()
        wait(ours, lambda: interrupted(ours), "the condition")
        assert len(ours.ready()) == len(workers.workers)
        time.sleep(3)
        start_members(etcd[1:])
        wait(ours, lambda: not interrupted(ours), "discovery to be read again")
    assert not requests.lost, requests.lost[:3]
    assert len(ours.ready()) == len(workers.workers)


@contextmanager
def serve(
    directory: Path, etcd: list[EtcdServer], *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    endpoints = ",".join(member.url for member in etcd)
    command = [sys.executable, "-m", "dynctl", "serve", "frontend", "--http-port", "0"]
    command += ["--discovery", "etcd", "--etcd-endpoints", endpoints, "--announce", *options]
    with (directory / "log").open("wb") as log:
        environment = clean | {"XDG_CACHE_HOME": str(directory)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_start_without_a_quorum_waits_for_it(tmp_path: Path) -> None:
    members = etcd_cluster(tmp_path)
    log = tmp_path / "log"
    try:
        members[0].launch()
        with serve(tmp_path, members, "--start-timeout", "1") as limited:
            assert limited.wait(patience(30)) == 3
        with serve(tmp_path, members) as waiting:
            until_now(lambda: "the start waits: etcd is not reachable" in log.read_text(), 30)
            members[1].launch()
            assert waiting.stdout is not None
            assert json.loads(waiting.stdout.readline())["port"]
            assert log.read_text().count("the start waits") < 5
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait(patience(30)) == 0
    finally:
        for member in members:
            member.close()
