"""`dynctl top` on a cluster: its workers, and the chain of custody of one worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.documents.verify import CellState
from dynctl.documents.workers import WorkerRow
from dynctl.top.custody import chain_reader
from tests.kube.actors import living
from tests.kube.command_line import Run
from tests.kube.objects import ZONE

DECODE = "my-llm-decode-a-0"


def test_a_cluster_is_followed_and_a_worker_opened(
    dynctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living() as sim:
        monkeypatch.setenv("KUBECONFIG", str(sim.viewer_kubeconfig(tmp_path / "kubeconfig")))
        ran = dynctl("top", "--once", "--discovery", "kubernetes", "-n", "prod", "-o", "json")
        assert ran.code == 0
        workers = {row["name"]: row for row in ran.json["snapshot"]["workers"]}
        assert workers[DECODE]["domains"]["zone"] == "us-east-1a"
        values = {row["capacity"]["value"] for row in ran.json["domains"]["rows"]}
        assert values == {"us-east-1a", "us-east-1b"}
        sim.edit("Pod", DECODE, {"metadata": {"labels": {ZONE: "us-east-1z"}}})
        sim.settle()
        read = chain_reader(replace(GlobalOptions(), discovery="kubernetes", namespace="prod"))
        row = WorkerRow(DECODE, workers[DECODE]["worker_id"], "m", "decode")
        chain = read(row)
        assert (chain.node.value, chain.label.value) == ("us-east-1a", "us-east-1z")
        assert (chain.first_break, chain.label.state) == ("pod label", CellState.DIFFERS)
        assert chain.codes[0] == "DYT0404"
        stranger = read(WorkerRow("nobody", 1, "m", "decode"))
        assert stranger.node.why == "the cluster has no pod with this name"
