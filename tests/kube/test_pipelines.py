"""docs/pipelines.md: its commands are of this program, and its account is enough and no more."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dynctl.verify.gather.permissions import SETS, verify_reviews
from tests.docs.pages import DOCS, Block, blocks
from tests.kube.actors import living
from tests.kube.command_line import Run
from tests.kube.objects import ZONE

PAGE = DOCS / "pipelines.md"
DOCUMENTS: list[Any] = [
    document
    for block in blocks(PAGE.read_text(encoding="utf-8"))
    if isinstance(block, Block) and block.language == "yaml"
    for document in yaml.safe_load_all("\n".join(block.lines))
]
OBJECTS = {document["kind"]: document for document in DOCUMENTS if "kind" in document}


def commands() -> Iterator[list[str]]:
    """The arguments of dynctl in the GitHub workflow and in the Job."""
    for document in DOCUMENTS:
        for step in document.get("jobs", {}).get("topology", {}).get("steps", []):
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["dynctl"]:
                yield words[1 : words.index(">")]
    yield from (c["args"] for c in OBJECTS["Job"]["spec"]["template"]["spec"]["containers"])


def test_the_page_has_a_workflow_and_a_job() -> None:
    assert len(list(commands())) == 2
    assert set(OBJECTS) == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_each_command_passes_on_a_healthy_cluster(
    arguments: list[str], dynctl: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living() as sim:
        kubeconfig = sim.viewer_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        ran = dynctl(*arguments)
        assert ran.code == 0, ran.out
        sim.edit("Pod", "my-llm-decode-a-0", {"metadata": {"labels": {ZONE: "elsewhere"}}})
        sim.settle()
        arguments[arguments.index("--wait") + 1] = "1s"
        assert dynctl(*arguments).code == 1


def test_the_account_may_what_verify_asks_and_no_more() -> None:
    rules = OBJECTS["ClusterRole"]["rules"]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    grove = (SETS, "clustertopologies", "clustertopologybindings")
    wanted = {(ask.group, ask.resource, ask.verb) for ask in verify_reviews("prod", grove)}
    assert granted == wanted
    bound = OBJECTS["ClusterRoleBinding"]
    assert bound["roleRef"]["name"] == OBJECTS["ClusterRole"]["metadata"]["name"]
    assert bound["subjects"][0]["name"] == OBJECTS["ServiceAccount"]["metadata"]["name"]
    assert (
        OBJECTS["Job"]["spec"]["template"]["spec"]["serviceAccountName"]
        == OBJECTS["ServiceAccount"]["metadata"]["name"]
    )
