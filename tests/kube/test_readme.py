"""The README's two runs of verify on a cluster: what it shows is what the command prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.kube.actors import Simulation, living

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ZONE = "topology.kubernetes.io/zone"


def runs() -> list[tuple[str, list[str]]]:
    """Each console block: its command, and the lines that it shows."""
    blocks = re.findall(r"^```console\n\$ dynctl (.*?)\n(.*?)^```", README, flags=re.M | re.S)
    return [(command, shown.splitlines()) for command, shown in blocks]


def printed(command: str, kubeconfig: Path) -> list[str]:
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "COLUMNS": "80", "NO_COLOR": "1"}
    argv = [sys.executable, "-m", "dynctl", *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)
    return done.stdout.splitlines()


def relabel(sim: Simulation) -> None:
    node = sim.pod("my-llm-decode-b-0")["spec"]["nodeName"]
    sim.edit("Node", node, {"metadata": {"labels": {ZONE: "us-east-1c"}}}, namespace="")
    sim.settle()


def in_order(shown: list[str], lines: list[str]) -> None:
    left = iter(lines)
    for line in shown:
        assert line in left, f"not printed, or not in this order: {line!r}"


def test_both_runs_are_as_the_readme_shows_them(tmp_path: Path) -> None:
    (healthy, first), (broken, second) = runs()
    with living() as sim:
        kubeconfig = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
        in_order(first, printed(healthy, kubeconfig))
        relabel(sim)
        in_order(second, printed(broken, kubeconfig))
