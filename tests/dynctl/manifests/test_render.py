"""A worker reads the output of `topology render` through a kubelet's volume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynctl.base.worker_environment import TopologyConfig, read_worker_environment
from dynctl.manifests.files import parse_manifests
from dynctl.manifests.lint.run import lint
from tests.dynctl.manifests.kubelet import DownwardApiVolume

ZONE = "topology.kubernetes.io/zone"


def _spec(patch: Any) -> dict[str, Any]:
    assert list(patch) == ["spec"]
    spec: dict[str, Any] = patch["spec"]["template"]["spec"]
    return spec


def _kubelet(spec: dict[str, Any], labels: dict[str, str]) -> DownwardApiVolume:
    """The volume of the rendered pod, mounted where the rendered container has it."""
    [volume] = spec["volumes"]
    [container] = spec["containers"]
    [mount] = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"] is True
    items = {}
    for item in volume["downwardAPI"]["items"]:
        field = item["fieldRef"]["fieldPath"]
        assert field.startswith("metadata.labels['")
        items[item["path"]] = field.removeprefix("metadata.labels['").removesuffix("']")
    mounted = DownwardApiVolume(Path(mount["mountPath"]), items)
    mounted.write(labels)
    return mounted


def _worker(spec: dict[str, Any]) -> TopologyConfig | None:
    [container] = spec["containers"]
    assert all(isinstance(one["value"], str) for one in container["env"])
    return read_worker_environment(
        {one["name"]: one["value"] for one in container["env"]},
        now=lambda: 0.0,
        sleep=lambda _: pytest.fail("the file is there, nothing to wait for"),
        log=lambda *_: None,
    )


def test_a_worker_reads_its_domain_from_what_was_rendered(dynctl, tmp_path: Path):
    ran = dynctl("topology", "render", "--domain", "zone", "--mount-path", tmp_path / "t")
    spec = _spec(yaml.safe_load(ran.out))
    _kubelet(spec, {ZONE: "us-east-1a", "other": "x"})
    assert _worker(spec) == TopologyConfig({"zone": "us-east-1a"}, "zone", "required", None)
    assert "initContainers" not in spec
    assert ran.err.startswith(f"note: the pod must have the label {ZONE}: Kubernetes 1.35 copies")


def test_several_domains_and_a_preference(dynctl, tmp_path: Path):
    ran = dynctl(
        "topology", "render", "pod", "--domain", "rack", "--label-key", "nvidia.com/rack",
        "--label-key", f"zone={ZONE}", "--enforcement", "preferred", "--weight", "0.85",
        "--mount-path", tmp_path / "t", "--container", "engine",
    )  # fmt: skip
    spec = _spec(yaml.safe_load(ran.out))
    _kubelet(spec, {ZONE: "a", "nvidia.com/rack": "r1"})
    assert _worker(spec) == TopologyConfig({"rack": "r1", "zone": "a"}, "rack", "preferred", 0.85)
    assert spec["containers"][0]["name"] == "engine"
    assert "Kubernetes does not copy nvidia.com/rack from the node" in ran.err


@pytest.mark.parametrize("weight", ["0", "1", "0.1", "0.00001"])
def test_weights_arrive_as_they_were_given(dynctl, tmp_path: Path, weight: str):
    arguments = ("--enforcement", "preferred", "--weight", weight, "--mount-path", tmp_path / "t")
    spec = _spec(yaml.safe_load(dynctl("topology", "render", *arguments).out))
    _kubelet(spec, {ZONE: "a"})
    config = _worker(spec)
    assert config is not None
    assert config.kv_transfer_preferred_weight == float(weight)


@pytest.mark.seed("dep-topology: pod labels: init container")
def test_the_init_container_waits_for_the_same_file(dynctl, tmp_path: Path):
    mount = tmp_path / "t"
    ran = dynctl(
        "topology", "render", "--mount-path", mount, "--init-wait", "--image", "example/dynctl:1",
        "--init-timeout", "50ms",
    )  # fmt: skip
    spec = _spec(yaml.safe_load(ran.out))
    [init] = spec["initContainers"]
    assert init["image"] == "example/dynctl:1"
    assert init["volumeMounts"] == spec["containers"][0]["volumeMounts"]
    program, *arguments = init["command"]
    assert program == "dynctl"
    volume = _kubelet(spec, {})
    assert dynctl(*arguments).code == 1
    volume.write({ZONE: "us-east-1b"})
    waited = dynctl(*arguments)
    assert (waited.code, waited.out) == (0, "us-east-1b\n")


def test_json_is_the_same_document(dynctl):
    shown = dynctl("topology", "render", "-o", "json").out
    assert json.loads(shown) == yaml.safe_load(dynctl("topology", "render", "-o", "yaml").out)
    assert dynctl("topology", "render", "-o", "yaml").out == dynctl("topology", "render").out


def test_the_default_is_as_an_operator_writes_it(dynctl):
    assert (
        dynctl("topology", "render").out
        == """\
spec:
  template:
    spec:
      containers:
      - name: main
        env:
        - name: DYN_TOPOLOGY_ENABLED
          value: 'true'
        - name: DYN_TOPOLOGY_MOUNT_PATH
          value: /etc/dynamo/topology
        - name: DYN_KV_TRANSFER_DOMAIN
          value: zone
        - name: DYN_KV_TRANSFER_ENFORCEMENT
          value: required
        volumeMounts:
        - name: topology-labels
          mountPath: /etc/dynamo/topology
          readOnly: true
      volumes:
      - name: topology-labels
        downwardAPI:
          items:
          - path: zone
            fieldRef:
              fieldPath: metadata.labels['topology.kubernetes.io/zone']
"""
    )


def test_a_cluster_topology_passes_lint(dynctl):
    ran = dynctl(
        "topology", "render", "cluster-topology", "--name", "lab", "--level", f"zone={ZONE}",
        "--level", "rack=nvidia.com/rack",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert yaml.safe_load(ran.out) == {
        "apiVersion": "grove.io/v1alpha1",
        "kind": "ClusterTopologyBinding",
        "metadata": {"name": "lab"},
        "spec": {
            "levels": [
                {"domain": "zone", "key": ZONE},
                {"domain": "rack", "key": "nvidia.com/rack"},
            ]
        },
    }
    report = lint(parse_manifests(ran.out.encode(), "f"))
    assert (report.summary.failed, report.summary.warnings) == (0, 0)


def test_levels_in_the_wrong_order_are_rendered_with_a_warning(dynctl):
    ran = dynctl(
        "topology", "render", "cluster-topology", "--kind", "ClusterTopology", "--level",
        "rack=nvidia.com/rack", "--level", f"zone={ZONE}",
    )  # fmt: skip
    assert ran.code == 0
    assert yaml.safe_load(ran.out)["kind"] == "ClusterTopology"
    assert ran.err == "warning: levels must go from broad to narrow; zone is after rack\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["deployment"], "deployment: expected pod, cluster-topology or controller"),
        (["controller"], "controller needs --image, an image with dynctl"),
        (["cluster-topology", "--controller"], "--controller and cluster-topology: give one"),
        (
            ["controller", "--image", "i", "--stale", "no"],
            "--stale no: expected report or starting",
        ),
        (["controller", "--image", "i", "--watch-namespace", "A"], "--watch-namespace A: expected"),
        (["-o", "jsonl"], "-o jsonl: topology render has no such format; expected one of"),
        (["--domain", "rack"], "--domain rack: its label is unknown"),
        (["--domain", "Zone", "--label-key", "a"], "--domain 'Zone': expected up to 63 lower-case"),
        (["--label-key", "a//b"], "--label-key 'a//b': invalid name of a label"),
        (["--label-key", "x']"], "invalid name of a label"),
        (["--label-key", "zone="], "expected DOMAIN=LABEL-KEY"),
        (["--label-key", "zone=a", "--label-key", "b"], "zone has a already"),
        (["--enforcement", "fail"], "expected required or preferred"),
        (["--enforcement", "preferred"], "needs --weight"),
        (["--weight", "0.5"], "required never leaves the domain"),
        (["--enforcement", "preferred", "--weight", "2"], "expected a number 0..1"),
        (["--enforcement", "preferred", "--weight", "nan"], "expected a number 0..1"),
        (["--mount-path", "topology"], "expected an absolute path"),
        (["--container", "a b"], "invalid name of a container"),
        (["--init-wait"], "--init-wait needs --image"),
        (["--init-timeout", "x"], "'x': expected a duration of"),
        (["--level", "a=b"], "--level is for cluster-topology"),
        (["cluster-topology", "--init-timeout", "x"], "'x': expected a duration of"),
        (["cluster-topology"], "no level"),
        (["cluster-topology", "--level", "zone"], "expected DOMAIN=LABEL-KEY"),
        (["cluster-topology", "--level", "Zone=a"], "Grove would refuse it"),
        (["cluster-topology", "--level", "a=x", "--level", "b=x"], "two levels have the key x"),
        (["cluster-topology", "--level", "a=x", "--name", "A"], "--name A: expected lower-case"),
        (["cluster-topology", "--level", "a=x", "--kind", "Pod"], "--kind Pod: expected"),
    ],
)
def test_wrong_words_are_usage_problems(dynctl, arguments: list[str], says: str):
    ran = dynctl("topology", "render", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
