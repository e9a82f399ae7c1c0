"""`dynctl decisions compare` beside traffic of a real Dynamo frontend: choices are predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

from tests.dynamo.fleet import DynamoFleet, aggregated

_FOLLOWED_S = 12


def test_choices_are_predicted_before_they_count(finding: Callable[[str], None]) -> None:
    """Prompts with shared beginnings, one after the other; the frontend's log adds what it had."""
    flags = ("--router-replica-sync",)
    with DynamoFleet(aggregated(3), frontend_args=flags, speedup=0) as fleet:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
        assert fleet.frontend.chat("The first request registers the events.").ok
        audit = subprocess.Popen(
            [sys.executable, "-m", "dynctl", "decisions", "compare", "-o", "json",
             "--min-rate", "0.9", "--duration", str(_FOLLOWED_S),
             "--frontend-log", str(fleet.frontend.process.log)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean | {"DYN_FILE_KV": str(fleet.file_kv)},
        )  # fmt: skip
        number = 0
        while audit.poll() is None:
            topic = f"Topic {number % 4}: " + "the same beginning of many words again. " * 6
            assert fleet.frontend.chat(f"{topic} Question {number}?", max_tokens=2).ok
            number += 1
        out, err = audit.communicate()
    assert audit.returncode == 0, (out, err)
    report = json.loads(out)
    finding(f"audit: {report['hits']} of {report['requests']} choices as predicted")
    assert report["requests"] > 10
    assert report["compares"] == "choice"
    tokens = sum(row["predicted_tokens"] for row in report["workers"])
    assert tokens > 0
    assert sum(row["reported_tokens"] for row in report["workers"]) >= 0.9 * tokens
    costs = sum(row["costs"] for row in report["workers"])
    assert costs > 10
    assert sum(row["same_costs"] for row in report["workers"]) >= 0.9 * costs
