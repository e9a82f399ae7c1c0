"""`dynctl serve observe` beside a real Dynamo: its choices, predictions, faults, and no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.contract.etcd_server import EtcdServer
from tests.dynamo.fleet import DynamoFleet, Frontend, aggregated, two_zones
from tests.waiting import patience, until_now

REPLICA_SYNC = ("--router-replica-sync",)


class Shadow:
    """A shadow router's process and its operators' API."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self.process = url, process

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=patience(10))
        return answer.json()

    def dynctl(self, *arguments: str) -> Any:
        """What a command prints about it, as JSON."""
        command = [sys.executable, "-m", "dynctl", *arguments, "--frontend", self.url, "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_clean())
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def decisions(self) -> dict[str, Any]:
        """Request id -> its row."""
        rows = self.get("/v1/decisions?limit=1000")["decisions"]
        return {row["id"]: row for row in rows}

    def conditions(self) -> set[str]:
        return {one["code"] for one in self.get("/health")["conditions"]}

    def asked(self, fleet: DynamoFleet, *numbers: int) -> list[Any]:
        """The answers to these questions, sent at once; returns when their choices are shown.

        Events of choices and of caches arrive apart: a burst that waits, because this process was
        held up, may be read in another order than the frontend had.
        """
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = list(pool.map(lambda number: ask(fleet, number), numbers))
        ids = {answer.body["id"].removeprefix("chatcmpl-") for answer in answers}
        until_now(lambda: ids <= self.decisions().keys(), 20.0)
        return answers

    def idle(self) -> bool:
        """Whether no request is running, as far as it knows."""
        ranks = [rank for row in self.get("/v1/workers")["workers"] for rank in row["ranks"]]
        return not any(rank["active_requests"] for rank in ranks)


@contextmanager
def shadowing(*options: str, **environment: str) -> Iterator[Shadow]:
    command = [sys.executable, "-m", "dynctl", "serve", "observe", "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--announce", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_clean() | environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.wait(5)
        yield Shadow(json.loads(line)["url"], process)
        process.terminate()
        assert process.wait(patience(15)) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}


def register_events(frontend: Frontend) -> None:
    """From the first request on, its events have a channel. It may be early for a worker set."""
    until_now(lambda: frontend.chat("The first request registers the events.").ok, 20.0)


def ask(fleet: DynamoFleet, number: int) -> Any:
    topic = f"Topic {number % 3}: " + "the same beginning of many words again. " * 6
    answer = fleet.frontend.chat(f"{topic} Question {number}?", max_tokens=2)
    assert answer.ok
    return answer


def test_choices_are_shown_as_they_were_made(finding: Callable[[str], None]) -> None:
    with DynamoFleet(aggregated(3), frontend_args=REPLICA_SYNC, speedup=0) as fleet:
        register_events(fleet.frontend)
        url = f"http://127.0.0.1:{fleet.frontend.port}"
        with shadowing("--file-kv", str(fleet.file_kv), "--frontend", url) as shadow:
            answers = [answer for number in range(24) for answer in shadow.asked(fleet, number)]
            ids = [answer.body["id"].removeprefix("chatcmpl-") for answer in answers]
            rows = shadow.decisions()
            for request, answer in zip(ids, answers, strict=True):
                row = rows[request]
                assert row["decode"]["worker_id"] == answer.placement.decode
                assert row["observed"]["source"] == "replica-sync events"
            right = sum(rows[one]["observed"]["as_predicted"] for one in ids)
            finding(f"serve observe: {right} of {len(ids)} choices as predicted")
            assert right >= len(ids) - 2

            past = shadow.dynctl("why", ids[-1])
            assert past["observed"]["decode"]["worker_id"] == answers[-1].placement.decode
            report = shadow.dynctl("decisions", "compare")
            assert report["compares"] == "choice"
            assert report["hits"] >= len(ids) - 2
            assert len(shadow.dynctl("workers", "list")["workers"]) == 3
            frame = shadow.dynctl("top", "--once")
            assert len(frame["snapshot"]["decisions"]) >= 10
            # A dry run here answers as the frontend decides.
            text = "Topic 0: " + "the same beginning of many words again. " * 6 + " Question 0?"
            until_now(shadow.idle)
            expected = shadow.dynctl("route", text)
            chosen = fleet.frontend.chat(text, max_tokens=2).placement.decode
            tied = [ref["worker_id"] for ref in expected["decode"]["tied"]]
            assert chosen in (tied or [expected["winner"]["decode"]["worker_id"]])
            # It serves none of this itself.
            for path in ("/v1/chat/completions", "/busy_threshold"):
                url = shadow.url + path
                answer = httpx.post(url, json={"model": "tiny"}, timeout=patience(10))
                assert answer.status_code == 501


def test_both_hops_of_two_zones_and_faults_of_etcd_and_frontend(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    try:
        with DynamoFleet(
            two_zones("required"),
            frontends=((), ()),
            frontend_args=REPLICA_SYNC,
            discovery="etcd",
            etcd_endpoints=etcd.url,
            speedup=0,
        ) as fleet:
            for frontend in fleet.frontends:
                register_events(frontend)
            urls = [f"http://127.0.0.1:{one.port}" for one in fleet.frontends]
            named = [part for url in urls for part in ("--frontend", url)]
            before = etcd.revision(), etcd.leases()
            with shadowing("--etcd-endpoints", etcd.url, *named) as shadow:
                answer = ask(fleet, 1)
                request = answer.body["id"].removeprefix("chatcmpl-")
                until_now(lambda: request in shadow.decisions(), 20.0)
                row = shadow.decisions()[request]
                assert row["prefill"]["worker_id"] == answer.placement.prefill
                assert row["decode"]["worker_id"] == answer.placement.decode
                assert row["observed"]["as_predicted"]
                assert (etcd.revision(), etcd.leases()) == before, "observing writes nothing"

                fleet.frontends[1].process.kill()
                etcd.kill()
                until_now(lambda: "DISCOVERY_INTERRUPTED" in shadow.conditions(), 20.0)
                assert len(shadow.get("/v1/workers")["workers"]) == 4
                until_now(lambda: "DYR0401" in shadow.conditions(), 20.0)
                etcd.start()
                until_now(lambda: "DISCOVERY_INTERRUPTED" not in shadow.conditions(), 30.0)
                known = len(shadow.decisions())
                deadline = time.monotonic() + patience(30)
                while len(shadow.decisions()) == known:
                    assert time.monotonic() < deadline
                    ask(fleet, 2)
    finally:
        etcd.close()
