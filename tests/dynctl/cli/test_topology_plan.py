"""`dynctl topology plan` as people run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.fleets import stranded_zones

FIXTURES = Path(__file__).parents[2] / "fixtures" / "plan"
GUIDE = ["--capacity", "az-1:prefill=30,decode=60", "--capacity", "az-2:prefill=30,decode=60"]


@pytest.mark.seed("kubernetes-topology: pipeline: capacity example")
def test_capacity_by_flags(dynctl):
    ran = dynctl("topology", "plan", *GUIDE, "--ratio", "1:2", "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    plan = ran.json
    assert (plan["kind"], plan["schema"], plan["state"]) == ("TopologyPlan", 1, "ok")
    assert (plan["ratio"], plan["enforcement"], plan["in_force"]) == ("1:2", "required", None)
    lines = dynctl("topology", "plan", *GUIDE, "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["value"] for line in lines] == ["az-1", "az-2"]
    assert dynctl("topology", "plan", *GUIDE, "-o", "name").out == "az-1\naz-2\n"
    rows = dynctl("topology", "plan", *GUIDE, "--no-headers").out.splitlines()
    assert [row.split()[:3] for row in rows] == [["az-1", "30", "60"], ["az-2", "30", "60"]]


def test_a_fleet_that_is_not_there_yet(dynctl):
    ran = dynctl(
        "topology", "plan", "--over", "az-1,az-2", "--target", "prefill=60,decode=120", "-o", "json"
    )
    assert ran.code == 0
    assert [row["add"] for row in ran.json["rows"]] == [{"prefill": 30, "decode": 60}] * 2


def test_the_demo_fleet(dynctl):
    ran = dynctl("topology", "plan", "--demo", "--ratio", "1:1")
    assert (ran.code, ran.err) == (0, "")
    assert "3 prefill and 3 decode by zone, from demo fleet; target 1:1" in ran.out
    assert "KV BLOCKS FREE" in ran.out


def test_a_saved_view_that_strands_is_no(dynctl, tmp_path):
    path = tmp_path / "view.json"
    path.write_bytes(stranded_zones().save())
    ran = dynctl("topology", "plan", "--view", path)
    assert ran.code == 1
    assert "STRANDED 2 prefill" in ran.out
    assert dynctl("topology", "plan", "--view", path, "--enforcement", "preferred").code == 0


def test_manifests_and_the_switch_to_required(dynctl):
    alpha = FIXTURES / "alpha.yaml"
    assert dynctl("topology", "plan", "-f", alpha).code == 0
    ran = dynctl("topology", "plan", "-f", alpha, "--enforcement", "required", "-o", "json")
    assert ran.code == 1
    assert ran.err.startswith("warning: do not switch llm/mail from preferred to required yet")
    ran = dynctl("topology", "plan", "-f", alpha, "-f", FIXTURES / "zones.yaml", "--ratio", "1:2")
    assert ran.code == 0
    assert "kubectl patch dynamographdeployments.v1alpha1.nvidia.com mail" in ran.out


def test_unpinned_workers_may_be_planned_for_given_zones(dynctl):
    ran = dynctl(
        "topology", "plan", "-f", FIXTURES / "unpinned.yaml", "--over", "az-1", "-o", "json"
    )
    assert ran.code == 0
    [row] = ran.json["rows"]
    assert (row["value"], row["prefill"], row["decode"], row["state"]) == ("az-1", 6, 12, "ok")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratio", "half", *GUIDE], "--ratio half: expected PREFILL:DECODE"),
        (["--enforcement", "strict", *GUIDE], "--enforcement strict: expected required, preferred"),
        (["--file-kv", "somewhere", *GUIDE], "are different sources; specify only one"),
        (["--demo", *GUIDE], "are different sources; specify only one"),
        (["--model", "m", *GUIDE], "--model m: pods, manifests and --capacity have no model"),
        (["--demo", "--over", "a"], "--over: a live deployment reports its values"),
        (["--demo", "--domain", "city"], "--domain city: no worker publishes it"),
        (["--target", "prefill=1", "-f", FIXTURES / "unpinned.yaml"], "specify them with --over"),
        (["--target", "many", *GUIDE], "--target many: 'many'; expected prefill=N or decode=N"),
        (
            ["--target", "prefill=1", "-f", FIXTURES / "alpha.yaml", "-f", FIXTURES / "zones.yaml"],
            "there are several pools",
        ),
        (["-f", "nowhere.yaml"], "nowhere.yaml: the file does not exist"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence_and_code_2(dynctl, arguments, said):
    ran = dynctl("topology", "plan", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_manifest_that_is_no_yaml_names_its_line(dynctl, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("kind: DynamoGraphDeployment\nspec: [1, 2\n")
    ran = dynctl("topology", "plan", "-f", path)
    assert ran.code == 2
    assert "bad.yaml, line 3" in ran.err
