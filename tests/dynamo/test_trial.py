"""`dynctl test` of a real Dynamo: load, and hand-offs between domains."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.documents.trial import TrialReport
from dynctl.experiments.changes import RestartCommand
from dynctl.experiments.trial import TrialOptions, run_trial
from dynctl.findings.report import State
from dynctl.sources.connect import connect
from tests.dynamo.fleet import DynamoFleet, WorkerPlan, aggregated
from tests.dynamo.ours import our_frontend, wait
from tests.dynamo.plans import two_zones
from tests.dynctl.experiments.trials import wrong
from tests.waiting import patience, until_now


def result_of(fleet: DynamoFleet, group: str, **options: Any) -> TrialReport:
    url = f"http://{fleet.frontend.host}:{fleet.frontend.port}"
    wanted = TrialOptions(
        url,
        timeout=patience(30),
        duration=600,
        settle=patience(0.1),
        only=tuple(group.split()),
        **options,
    )
    return asyncio.run(run_trial(wanted))


WITHOUT_A_CACHE = ("--no-enable-prefix-caching",)


@pytest.mark.parametrize(
    ("mode", "workers", "codes"),
    [
        ("kv", aggregated(3), set()),
        ("round-robin", aggregated(3), {"DYE0401", "DYE0801"}),
        ("kv", aggregated(2, args=WITHOUT_A_CACHE), {"DYE0401"}),
    ],
    ids=("healthy", "turns", "without a cache"),
)
def test_a_fault_is_named_by_its_codes_alone(
    mode: str, workers: list[WorkerPlan], codes: set[str]
) -> None:
    """Without `isolation`: with mock workers, prompts of different salts share blocks (DYE0601)."""
    with DynamoFleet(workers, router_mode=mode, speedup=1.0) as fleet:
        report = result_of(fleet, "names tokens streams reuse load limits")
    assert wrong(report) == codes, [check for check in report.checks if check.findings]
    load = next(check for check in report.checks if check.code == "DYE0801")
    assert load.state is (State.WARN if "DYE0801" in codes else State.PASS), load


def test_required_hand_offs_stay_in_their_domain() -> None:
    with DynamoFleet(two_zones()) as fleet:
        options = GlobalOptions(discovery="file", file_kv=fleet.file_kv)
        unknown = result_of(fleet, "topology")
        report = result_of(fleet, "topology", workers=lambda: connect(options).workers(index=False))
    assert "--discovery" in unknown.checks[0].message
    assert report.checks[0].state is State.PASS, report.checks[0]
    assert "zone-a to zone-a" in report.checks[0].message


def test_load_of_others_is_read_from_the_frontends_gauge() -> None:
    with DynamoFleet(aggregated(3), router_mode="round-robin", speedup=1.0) as fleet:
        other = fleet.frontend.begin("a request of another client", max_tokens=4000)
        other.wait_first()
        report = result_of(fleet, "load")
        other.disconnect()
    assert report.checks[0].state is State.SKIP
    assert "other requests" in report.checks[0].message


def test_a_restarted_worker_returns_under_another_id(tmp_path: Path) -> None:
    """The instance of a Dynamo worker has a new id after a restart."""
    asked, done = tmp_path / "asked", tmp_path / "done"
    words = ("sh", "-c", 'echo "$1" > "$0/asked"; until test -e "$0/done"; do sleep 0.1; done')
    with DynamoFleet(aggregated(2), speedup=1.0) as fleet, our_frontend(fleet) as ours:
        wait(ours, lambda: len(ours.ready()) == 2 and ours.idle(), "both workers")
        ids = {name: number for number, name in ours.ready().items()}
        names = {worker.instance_id: name for name, worker in fleet.workers.items()}

        def restart() -> None:
            until_now(asked.exists, 60)
            name = names[ids[asked.read_text().strip()]]
            plan = fleet.workers[name].plan
            fleet.kill(name, signal.SIGTERM)
            fleet.start_worker(plan)
            done.touch()

        with ThreadPoolExecutor(1) as pool:
            restarted = pool.submit(restart)
            wanted = TrialOptions(
                f"http://{ours.host}:{ours.port}",
                timeout=patience(30),
                duration=patience(60),
                only=("restart",),
                changes=True,
                restart=RestartCommand((*words, str(tmp_path), "{worker}")),
                state=tmp_path,
            )
            report = asyncio.run(run_trial(wanted))
            restarted.result()
    assert {check.state for check in report.checks} == {State.PASS}, report.checks
