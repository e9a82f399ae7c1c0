"""`dynctl topology sync` as a process: signals, its lease, and its rendered permissions."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.test_sync import HOME, NAME, POD, kubeconfig, label, unlabelled
from tests.waiting import patience, until_now


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_it_copies_labels_and_ends_with_its_lease_released(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with unlabelled() as sim:
        command = [sys.executable, "-m", "dynctl", "topology", "sync", "-n", "prod"]
        command += ["--lease-namespace", HOME, "--system-port", "0"]
        command += ["--kubeconfig", str(kubeconfig(sim, tmp_path))]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                until_now(lambda: label(sim) == "us-east-1a", 30)
                holder = sim.store.get("Lease", NAME, HOME)["spec"]["holderIdentity"]
                process.send_signal(number)
                said = process.communicate(timeout=patience(30))[1]
            finally:
                process.kill()
        released = sim.store.get("Lease", NAME, HOME)["spec"]["holderIdentity"]
    assert process.returncode == code
    assert (holder != "", released) == (True, "")
    assert f"prod/{POD}: topology.kubernetes.io/zone=us-east-1a copied from node" in said
    assert "health and metrics: http://127.0.0.1:" in said
    assert "Traceback" not in said
