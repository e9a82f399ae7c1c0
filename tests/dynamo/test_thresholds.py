"""`dynctl thresholds` against the real thing: replicas, latches, and whether thresholds act."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from dynctl.documents.fleet_load import Traffic, rates_between
from dynctl.sources.dynamo.frontends import PolledFrontends
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.waiting import patience, until_now

DECODE = "active_decode_blocks_threshold"
LONG = f"{patience(10):g}s"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def thresholds(
    fleet: DynamoFleet, *arguments: str, planes: bool = True, command: str = "thresholds"
) -> Ran:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
    urls = [word for one in fleet.frontends for word in ("--frontend", one.url)]
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", command, *arguments, "-o", "json", *urls],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env=clean | ({"DYN_FILE_KV": str(fleet.file_kv)} if planes else {}),
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_replicas_of_a_live_dynamo_are_compared_set_and_waited_for() -> None:
    with DynamoFleet(aggregated(2, kind="held"), frontends=((), ()), blocks=100) as fleet:
        first, second = fleet.frontends
        first.thresholds(active_decode_blocks_threshold=0.9)
        apart = thresholds(fleet, "get")
        assert (apart.code, apart.json["agree"]) == (1, False), apart.err

        done = thresholds(fleet, "set", "--active-decode-blocks", "0.5", "--wait", LONG)
        assert (done.code, done.json["waited"]["acts"]) == (0, True), done.err
        assert [one.thresholds()[DECODE] for one in (first, second)] == [0.5, 0.5]

        # Over the limit when it reports: refused by both until it reports again.
        worker = fleet.workers["worker-0"]
        worker.held.report_load(60, 60)

        def refused() -> bool:
            rows = thresholds(fleet, "get", "--ask", planes=False).json["signals"]
            busy = {(row["replica"], row["worker"]) for row in rows if row["busy"]}
            return busy == {(one.url, f"{worker.instance_id:x}") for one in (first, second)}

        fleet.wait_until(refused, "both frontends to refuse the worker that is over")

        stuck = thresholds(fleet, "set", "--active-decode-blocks", "0.95", "--wait", "500ms")
        assert stuck.code == 4
        assert "still refused; Dynamo frees it at its next report" in " ".join(stuck.err.split())
        worker.held.report_load(61, 61)
        freed = thresholds(fleet, "set", "--active-decode-blocks", "0.95", "--wait", LONG)
        assert (freed.code, freed.json["waited"]["pending"]) == (0, []), freed.err

        # A canary under which both workers are over their limit, so that requests are refused.
        ended = threading.Event()

        def load() -> None:
            blocks = 62
            while not ended.wait(0.02):
                # Dynamo decides again only where a report differs from the last one.
                blocks = 125 - blocks
                for one in fleet.workers.values():
                    one.held.report_load(blocks, blocks)
                first.complete([1] * 40)

        requests = threading.Thread(target=load)
        requests.start()
        try:
            line = ("--active-decode-blocks", "0.5", "--canary", "1h", "--revert-if", "refused>5%")
            canary = thresholds(fleet, "set", *line, "--min-requests", "10")
        finally:
            ended.set()
            requests.join()
        assert (canary.code, canary.json["canary"]["state"]) == (1, "breached"), canary.err
        assert canary.json["canary"]["conditions"][0]["value"] > 0.05
        assert [one.thresholds()[DECODE] for one in (first, second)] == [0.95, 0.95]


def counted(fleet: DynamoFleet, requests: int) -> Traffic:
    """What the frontends of a fleet count of some requests that are sent to them in turn."""

    async def read() -> Traffic:
        polled = PolledFrontends([one.url for one in fleet.frontends], 30.0)
        try:
            await polled.read()
            for place in range(requests):
                one = fleet.frontends[place % len(fleet.frontends)]
                await asyncio.to_thread(
                    one.chat, [{"role": "user", "content": "hello " * 100}], max_tokens=4
                )
            deadline = time.monotonic() + patience(10)
            while (found := polled.traffic.total) is None or found.requests < requests:
                assert time.monotonic() < deadline, found
                await asyncio.sleep(0.1)
                await polled.read()
            return found
        finally:
            await polled.close()

    return asyncio.run(read())


def test_advice_and_rates_are_about_the_requests_of_a_live_dynamo() -> None:
    with DynamoFleet(aggregated(2), frontends=((), ())) as fleet:

        def advice() -> dict[str, Any]:
            ran = thresholds(fleet, "show", "--advise", command="config")
            assert ran.code == 0, ran.err
            [one] = ran.json["advice"]
            return dict(one)

        assert advice()["workload"] == "unknown"
        for frontend in fleet.frontends:
            frontend.complete(list(range(3, 503)), max_tokens=4)  # not counted: no text
            frontend.chat([{"role": "user", "content": "hello " * 100}], max_tokens=4)
        until_now(lambda: advice()["requests"] == 2)
        one = advice()
        assert (one["workload"], one["output_tokens"]) == ("mixed", 4.0)
        assert one["input_tokens"] > 100

        found = counted(fleet, 6)
        assert (found.requests, found.errors, found.refused, found.clients) == (6, 0, 0, 0)
        assert sum(found.ttft) == 6
        assert found.prompt_tokens > 600
        rates = rates_between(Traffic(), found, 1.0)
        assert rates.ttft_p99 is not None
        assert rates.hits is not None
        assert rates.hits > 0
