"""`dynctl check` as people run it: nothing is wrong with what works, and what dies is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

from tests.dynamo.fleet import DynamoFleet, two_zones
from tests.waiting import patience


def check(fleet: DynamoFleet, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the checks by code."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
    frontends = [text for one in fleet.frontends for text in ("--frontend", one.url)]
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", "check", "-o", "json", *frontends, *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env=clean | fleet.reached_by,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    return done.returncode, {c["code"]: c for s in document["sections"] for c in s["checks"]}


def wrong(found: dict[str, Any]) -> dict[str, Any]:
    return {code: one["findings"] for code, one in found.items() if one["findings"]}


def test_a_fleet_that_works_passes_and_its_events_are_seen_to_flow() -> None:
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        code, found = check(fleet)
        assert (code, wrong(found)) == (0, {})
        assert not [one for one in found.values() if one["unread"]]

        ended = threading.Event()

        def ask() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                fleet.frontend.chat(f"{number} " * 60)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            code, found = check(fleet)
        finally:
            ended.set()
            asking.join()
        assert (code, wrong(found)) == (0, {})
        assert found["DYR0306"]["state"] == "pass"


def test_frontends_that_differ_and_a_way_back_that_is_closed() -> None:
    other = ("--router-mode", "round-robin", "--active-decode-blocks-threshold", "0.5")
    with DynamoFleet(two_zones("required"), frontends=((), other), speedup=0) as fleet:
        code, found = check(fleet)
        second = fleet.frontends[1].url
        assert code == 1
        assert set(wrong(found)) == {"DYR0403", "DYR0408"}
        assert [one["subject"] for one in found["DYR0403"]["findings"]] == [second]
        # Neither the frontends nor mockers without a router config say it.
        assert found["DYR0409"]["unread"]


def test_a_worker_that_was_killed_is_named_until_its_lease_ends() -> None:
    with DynamoFleet(two_zones("required"), speedup=0) as fleet:
        killed = f"{fleet.workers['prefill-a0'].instance_id:016x}"
        fleet.kill("prefill-a0")
        fleet.kill("decode-a0")
        code, found = check(fleet, "--wait", "1")
        # Its lease may have been about to end: then it is gone, and nothing is expected of it.
        if found["DYR0302"]["message"] != "1 channel":
            assert code == 1
            for code_of_death in ("DYR0302", "DYR0303"):
                [finding] = found[code_of_death]["findings"]
                assert killed.endswith(finding["subject"].partition("/")[2])
            assert found["DYR0305"]["unread"]
        fleet.start_worker("prefill-a0", wait=False)
        fleet.wait_ready()
        code, found = check(fleet)
        assert code == 1
        assert set(wrong(found)) == {"DYR0210"}
        assert "zone-a" in found["DYR0210"]["findings"][0]["value"]
