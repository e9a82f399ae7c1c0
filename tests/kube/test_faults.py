"""The fault matrix: each fault alone, in a living two-zone deployment, and some of them in pairs.

Every fault must be reported by its own code, and nothing else may be reported that is not written
down as its consequence; what is healthy reports nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.documents.verify import VerifyReport
from dynctl.findings.report import State
from dynctl.verify.verification import VerifyOptions, run_verify
from tests.kube.actors import Simulation, living
from tests.kube.faults import FAULTS, Fault, fault_of, injected

PAIRED = (
    "we-may-not-list-events",
    "node-relabelled-after-start",
    "operator-not-ready",
    "annotation-removed",
    "card-without-taints",
    "two-operators",
    "metadata-of-no-pod",
    "variable-differs",
    "router-misses-a-worker",
    "mounted-writable",
    "stray-file",
    "pod-in-no-slice",
    "card-with-another-enforcement",
    "rolling-update",
    "workers-may-not-register",
)
"""Faults of every link that need no cluster of their own, so that any two can meet."""
BY_HAND = "annotation-removed"
"""Faults of a running pod: they disappear when another fault creates the pod again."""
EVERYTHING = VerifyOptions(exec="all", logs="all")


def report_on(sim: Simulation, tmp_path: Path) -> VerifyReport:
    """Through the API server, with the rights of a viewer, every pod read."""
    kubeconfig = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
    return run_verify(GlobalOptions(kubeconfig=kubeconfig), EVERYTHING)


def reported(report: VerifyReport) -> set[str]:
    return {one.code for one in report.checks if one.state in (State.FAIL, State.WARN)}


def test_the_matrix_is_large_and_names_its_faults() -> None:
    names = [fault.name for fault in FAULTS]

    assert len(FAULTS) >= 40
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_reported_at_its_own_link(fault: Fault, tmp_path: Path) -> None:
    with injected(fault) as sim:
        found = reported(report_on(sim, tmp_path))

    assert found == {fault.code, *fault.also}


OTHERS = {"file-missing": "DYT0503", "file-differs": "DYT0504", "file-beside": "DYT0505"}


@pytest.fixture(scope="module")
def six() -> Iterator[Simulation]:
    """Six workers, so that a sample of one a component and zone leaves some out."""
    with living(prefill=2, decode=4) as sim:
        yield sim


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("pod", ["my-llm-decode-a-0", "my-llm-decode-b-1"])
def test_by_default_no_worker_of_six_is_left_out(
    six: Simulation, kind: str, pod: str, tmp_path: Path
) -> None:
    kubeconfig = six.viewer_kubeconfig(tmp_path / "kubeconfig")
    mount = six.sandbox(pod).root / "etc/dynamo/topology"
    zone, stray, content = mount / "zone", mount / "rack", (mount / "zone").readlink()
    if kind == "file-beside":
        stray.write_text("r1")
    else:
        zone.unlink()
    if kind == "file-differs":
        zone.write_text("us-east-1c")
    try:
        report = run_verify(GlobalOptions(kubeconfig=kubeconfig), VerifyOptions())
    finally:
        stray.unlink(missing_ok=True)
        zone.unlink(missing_ok=True)
        zone.symlink_to(content)

    [check] = [one for one in report.checks if one.code == OTHERS[kind]]
    assert [one.subject for one in check.findings] == [f"Pod {pod}.prod"]


def test_orphaned_metadata_is_found_beside_a_named_graph(tmp_path: Path) -> None:
    with injected(fault_of(FAULTS, "metadata-of-no-pod")) as sim:
        kubeconfig = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
        options = GlobalOptions(kubeconfig=kubeconfig)
        report = run_verify(options, VerifyOptions(graphs=("my-llm",)))

    assert reported(report) == {"DYT0709"}


@pytest.mark.parametrize("grove", [False, True], ids=["label key", "grove"])
@pytest.mark.parametrize("enforcement", ["required", "preferred"])
def test_what_is_healthy_reports_nothing(grove: bool, enforcement: str, tmp_path: Path) -> None:
    with living(grove=grove, enforcement=enforcement) as sim:
        report = report_on(sim, tmp_path)

    assert reported(report) == set()
    assert all(row.first_break is None for row in report.chain)
    assert report.passes("warn")


def pairs() -> list[tuple[Fault, Fault]]:
    """Each with its first and its fourth neighbour; most of them happen to one worker."""
    chosen = [fault_of(FAULTS, name) for name in PAIRED]
    found = [
        (one, chosen[(place + step) % len(chosen)])
        for step in (1, 4)
        for place, one in enumerate(chosen)
    ]
    return [(other, one) if one.name == BY_HAND else (one, other) for one, other in found]


@pytest.mark.parametrize(
    ("one", "other"), pairs(), ids=lambda fault: fault.name if isinstance(fault, Fault) else ""
)
def test_neither_of_two_faults_masks_the_other(one: Fault, other: Fault, tmp_path: Path) -> None:
    with injected(one) as sim:
        other.inject(sim)
        found = reported(report_on(sim, tmp_path))

    assert {one.code, other.code} <= found
