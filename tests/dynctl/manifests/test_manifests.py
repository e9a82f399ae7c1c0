"""Reading manifests with size limits; both versions of a graph have the same components."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.manifests.files import parse_manifests, read_manifests
from dynctl.manifests.graphs import graphs_of, policy_label_key, role_of, topologies_of
from dynctl.manifests.pod_placement import allowed_values
from router_core import Role

ZONE = "topology.kubernetes.io/zone"

BETA = b"""
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: llm, namespace: prod}
spec:
  env: [{name: DYN_ROUTER_MODE, value: round-robin}]
  experimental:
    kvTransferPolicy: {labelKey: topology.kubernetes.io/zone, domain: zone}
  components:
    - name: frontend
      type: frontend
      podTemplate:
        spec:
          containers:
            - name: main
              env: [{name: DYN_ROUTER_MODE, value: kv}, {name: KEY, valueFrom: {}}]
    - name: p
      type: worker
      replicas: 30
      podTemplate:
        metadata: {labels: {team: a}}
        spec:
          nodeSelector: {topology.kubernetes.io/zone: az-1}
          containers:
            - {name: sidecar, args: [--disaggregation-mode, decode]}
            - {name: main, args: [--disaggregation-mode, prefill]}
"""

ALPHA = b"""
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: llm, namespace: prod}
spec:
  envs: [{name: DYN_ROUTER_MODE, value: round-robin}]
  experimental:
    kvTransferPolicy: {labelKey: topology.kubernetes.io/zone, domain: zone}
  services:
    frontend:
      componentType: frontend
      envs: [{name: DYN_ROUTER_MODE, value: kv}, {name: KEY, valueFrom: {}}]
    p:
      componentType: worker
      replicas: 30
      extraPodMetadata: {labels: {team: a}}
      extraPodSpec:
        nodeSelector: {topology.kubernetes.io/zone: az-1}
        mainContainer: {args: [--disaggregation-mode, prefill]}
"""


@pytest.mark.parametrize("data", [BETA, ALPHA])
def test_both_versions_are_the_same_components(data: bytes):
    [graph] = graphs_of(parse_manifests(data, "f.yaml"))
    assert graph.name == "prod/llm"
    frontend, prefill = graph.components
    assert frontend.env == {"DYN_ROUTER_MODE": "kv", "KEY": None}
    assert (prefill.role, prefill.role_source, prefill.replicas) == ("prefill", "arguments", 30)
    assert prefill.domains(ZONE) == frozenset({"az-1"})
    assert prefill.domains("other") is None
    assert prefill.pod_labels == {"team": "a"}
    assert graph.of_role(Role.PREFILL) == (prefill,)
    assert policy_label_key(graph, ()) == ZONE


@pytest.mark.parametrize(
    ("name", "kind", "sub", "words", "expected"),
    [
        ("x", "prefill", "", [], ("prefill", "type")),
        ("prefill", "frontend", "", [], (None, "nothing")),
        ("prefill", "worker", "decode", [], ("decode", "sub-type")),
        ("decode", "worker", "", ["--disaggregation-mode=prefill"], ("prefill", "arguments")),
        ("x", "worker", "", ["--is-decode-worker"], ("decode", "arguments")),
        ("x", "worker", "", ["--disaggregation-mode", "agg"], ("aggregated", "arguments")),
        ("VllmDecodeWorker", "worker", "", [], ("decode", "name")),
        ("prefill-decode", "worker", "", [], (None, "nothing")),
        ("x", "worker", "", ["--disaggregation-mode"], (None, "nothing")),
        ("x", "worker", "encode", [], (None, "encoder")),
        ("decode", "worker", "", ["--disaggregation-mode=encode"], (None, "encoder")),
        ("prefill", "worker", "", ["--multimodal-encode-worker"], (None, "encoder")),
    ],
)
def test_role_lookup_order(name, kind, sub, words, expected):
    assert role_of(name, kind, sub, words) == expected


@pytest.mark.parametrize(
    ("script", "role"),
    [
        ("exec worker \\\n  --disaggregation-mode \\\n  decode", "decode"),
        ("# not here: --is-prefill-worker\nexec worker --is-decode-worker # prefill", "decode"),
        ("exec worker \\\n  # --is-prefill-worker\n", None),
    ],
)
def test_a_script_is_read_as_a_shell_does(script: str, role: str | None):
    data = BETA.replace(b"[--disaggregation-mode, prefill]", json.dumps([script]).encode())
    [graph] = graphs_of(parse_manifests(data, "f.yaml"))
    assert graph.components[1].role == role


def _affinity(*terms):
    return {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": k, "operator": o, "values": v}]}
                        for k, o, v in terms
                    ]
                }
            }
        }
    }


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({}, None),
        ({"nodeSelector": {ZONE: "a"}}, {"a"}),
        (_affinity((ZONE, "In", ["a", "b"])), {"a", "b"}),
        (_affinity((ZONE, "In", ["a"]), (ZONE, "In", ["b"])), {"a", "b"}),
        (_affinity((ZONE, "In", ["a"]), ("gpu", "In", ["h100"])), None),
        (_affinity((ZONE, "NotIn", ["a"])), None),
        ({**_affinity((ZONE, "In", ["a", "b"])), "nodeSelector": {ZONE: "b"}}, {"b"}),
        ({**_affinity((ZONE, "In", ["a"])), "nodeSelector": {ZONE: "b"}}, set()),
    ],
)
def test_where_a_pod_may_land(pod, expected):
    assert allowed_values(pod, ZONE) == expected


def test_lists_json_and_several_documents():
    data = b'{"kind":"List","items":[{"kind":"A","metadata":{"name":"a"}}]}\n---\nkind: B\n---\n'
    found = parse_manifests(data, "f")
    assert [(one.source, one.kind, one.name) for one in found] == [
        ("f#1 items[0]", "A", "a"),
        ("f#2", "B", "(no name)"),
    ]


def test_a_topology_has_levels_under_either_spelling():
    data = b"""
apiVersion: grove.io/v1alpha1
kind: ClusterTopologyBinding
metadata: {name: t}
spec: {levels: [{domain: zone, key: z}, {domain: rack, labelKey: r}]}
"""
    [topology] = topologies_of(parse_manifests(data, "f"))
    assert [(one.domain, one.key) for one in topology.levels] == [("zone", "z"), ("rack", "r")]
    assert (topology.key_of("rack"), topology.key_of("host")) == ("r", None)


def test_dates_are_text_as_in_kubernetes():
    [manifest] = parse_manifests(b"kind: A\nmetadata: {name: 2026-13-45}", "f")
    assert manifest.name == "2026-13-45"


BOMB = b"kind: A\na: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 106)
)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a: b\nc: [1", "f, line "),
        (b"kind: {{ .Values.kind }}", "invalid YAML"),
        (b"kind: \xff", "invalid YAML"),
        (b"just text", "not a Kubernetes object"),
        (b"- kind: A", "not a Kubernetes object"),
        (b"kind: A\n1: b", "line 2, column 1: invalid YAML: the key 1 is not text"),
        (b"kind: A\nd: !!int x", "invalid YAML"),
        (b"kind: A\nd: {e: 1, e: 2}", "line 2, column 11: invalid YAML: the key 'e' occurs twice"),
        (b"kind: A\n" + b"a: {" * 150 + b"}" * 150, "nested more than 100 deep"),
        (b"[" * 20000, "f"),
        (BOMB, "more than 500,000 values"),
        (b"kind: A\nself: &x [*x]\n", "nested more than 100 deep"),
        (b"#" * ((8 << 20) + 1), "larger than 8 MiB"),
        (b"---\nkind: A\n" * 2001, "more than 2000 documents"),
    ],
)
def test_what_cannot_be_read_is_a_usage_problem(data: bytes, says: str):
    with pytest.raises(UsageProblem) as caught:
        parse_manifests(data, "f")
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"kind: {{ .Values.kind }}", "render a template"),
        (b"a: {b: ${REPLICAS}}", "render a template"),
        (b"kind: A\n\tb: c", "indent with spaces"),
        (b"kind: \xff", ""),
        (b"kind: A\nkind: B", ""),
    ],
)
def test_the_advice_is_about_the_fault(data: bytes, hint: str):
    with pytest.raises(UsageProblem) as caught:
        parse_manifests(data, "f")
    assert caught.value.hint.startswith(hint)
    assert bool(caught.value.hint) == bool(hint)


def test_files_are_named(tmp_path: Path):
    with pytest.raises(UsageProblem, match="the file does not exist"):
        read_manifests([str(tmp_path / "missing.yaml")])
    with pytest.raises(UsageProblem, match="is a directory"):
        read_manifests([str(tmp_path)])
    with pytest.raises(UsageProblem, match="expected the name of a file"):
        read_manifests(["a\0b"])


def test_merge_keys_do_not_double_without_end() -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60)]
    with pytest.raises(UsageProblem, match="merged keys"):
        parse_manifests("\n".join(lines).encode(), "bomb.yaml")


def test_a_file_that_is_specified_twice_is_refused_by_both_its_names(tmp_path: Path) -> None:
    file, other = tmp_path / "graph.yaml", tmp_path / "." / "same.yaml"
    file.write_bytes(BETA)
    other.symlink_to(file)
    with pytest.raises(UsageProblem) as found:
        read_manifests([str(file), str(file)])
    assert found.value.message == f"{file}: specified twice; expected each file once"
    with pytest.raises(UsageProblem) as found:
        read_manifests([str(file), str(other)])
    assert f"{other}: specified twice (also as {file})" in found.value.message
    with pytest.raises(UsageProblem, match="stdin: specified twice"):
        read_manifests(["-", "-"])
