"""`dynctl route` itself, as people run it, against the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.dynamo.fleet import DynamoFleet, aggregated, two_zones
from tests.dynamo.observed import stored_events
from tests.waiting import patience

PROMPT = "Explain how a router decides which worker should serve a request, and why that matters."


def route(fleet: DynamoFleet, *arguments: str) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", "route", PROMPT, "-o", "json", *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env=clean | fleet.reached_by,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# A frontend of 1.6.1 that serves an indexer never gets ready in a disaggregated fleet.
@pytest.mark.parametrize(
    ("shape", "indexer"),
    [("aggregated", False), ("two zones", False), ("aggregated", True)],
    ids=["aggregated", "two zones", "indexer served"],
)
def test_a_chat_is_predicted_from_nothing_but_its_text(shape: str, indexer: bool) -> None:
    plans = aggregated(3) if shape == "aggregated" else two_zones("required")
    flags = ("--serve-indexer",) if indexer else ()
    with DynamoFleet(plans, frontend_args=flags, speedup=0) as fleet:
        first = fleet.frontend.chat(PROMPT)
        assert first.ok
        result: dict[str, Any] = {}

        def cached() -> bool:
            result.update(route(fleet))
            hop = result["prefill"] or result["decode"]
            return any(row["overlap_blocks"] == result["blocks"] for row in hop["candidates"])

        fleet.wait_until(cached, "the served prompt to be seen in a cache")
        # `route` reads the workers' caches; the frontend may still have their events before it.
        fleet.wait_until(lambda: stored_events(fleet.frontend) > 0, "the frontend to see it")
        assert result["tokens"] == first.prompt_tokens
        first_hop = result["prefill"] or result["decode"]
        assert first_hop["winner"]["worker_id"] == first.placement.prefill
        then = fleet.frontend.chat(PROMPT).placement
        assert then.prefill == first_hop["winner"]["worker_id"]
        assert then.decode == result["winner"]["decode"]["worker_id"]
        known_from_indexer = any("indexer" in text for text in result["assumptions"])
        assert known_from_indexer is indexer, result["assumptions"]


def test_a_view_of_a_live_dynamo_repeats_offline(tmp_path) -> None:
    with DynamoFleet(aggregated(2), speedup=0) as fleet:
        assert fleet.frontend.chat(PROMPT).ok
        saved = tmp_path / "view.json"
        result = route(fleet, "--save-view", str(saved), "--frontend", fleet.frontend.url)
    again = subprocess.run(
        [sys.executable, "-m", "dynctl", "route", PROMPT, "-o", "json", "--view", str(saved)],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == result
