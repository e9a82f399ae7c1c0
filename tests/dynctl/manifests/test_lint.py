"""Every check of lint on a manifest that breaks it, and on one that does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.findings.catalogue import catalogue
from dynctl.findings.report import Report, State
from dynctl.manifests.files import parse_manifests, read_manifests
from dynctl.manifests.lint.run import LINT_SECTIONS, lint

MANIFESTS = Path(__file__).parents[2] / "fixtures" / "manifests"
FILES = sorted(path.stem for path in MANIFESTS.glob("*.yaml"))
CODES = [check.code for _, checks in LINT_SECTIONS for check in checks]


def _lint(stem: str) -> Report:
    return lint(read_manifests([str(MANIFESTS / f"{stem}.yaml")]))


def _wrong(report: Report) -> dict[str, list[str]]:
    """Code -> subjects of its findings."""
    return {c.code: [one.subject for one in c.findings] for c in report.checks if c.findings}


@pytest.mark.parametrize("stem", FILES)
@pytest.mark.seed("dep-topology: admission failures: level not in ClusterTopology")
@pytest.mark.seed("kubernetes-topology: pipeline: preferredWeight")
def test_exactly_the_codes_of_the_file_are_found(stem: str):
    lines = (MANIFESTS / f"{stem}.yaml").read_text().splitlines()
    [expected] = [line for line in lines[:3] if line.startswith("# finds:")]
    report = _lint(stem)
    wrong = _wrong(report)
    assert sorted(wrong) == expected.removeprefix("# finds:").split()
    subjects = [subject for found in wrong.values() for subject in found]
    assert all(re.fullmatch(r"[A-Z]\w+ bad[a-z-]*(\.prod)?", subject) for subject in subjects)
    for check in report.checks:
        assert check.code not in wrong or check.state == catalogue()[check.code].level
        for finding in check.findings:
            assert not re.search(r"\{[a-z_]+\}", finding.value + finding.expected + finding.fix)


def test_every_rule_has_a_file():
    assert {stem.partition("-")[0] for stem in FILES if stem.startswith("DYT")} == set(CODES)
    assert len(CODES) == len(set(CODES))


def test_rules_stand_in_the_section_of_their_code():
    for section, checks in LINT_SECTIONS:
        assert {catalogue()[check.code].section for check in checks} == {section}


def _says(stem: str, code: str) -> list[str]:
    [check] = [check for check in _lint(stem).checks if check.code == code]
    return [finding.value for finding in check.findings]


F = "spec.experimental.kvTransferPolicy"


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("DYT0104", f"(CEL) refuses it: {F}: Invalid value: exactly one of labelKey or "
         "clusterTopologyName is required"),
        ("DYT0104-grove-off", f"webhook refuses it: {F}.clusterTopologyName requires the Grove "
         'pathway; remove or unset the "nvidia.com/enable-grove" annotation (currently "false")'),
        ("DYT0105", f'{F}.labelKey: Invalid value: "zone=az-1": {F}.labelKey in body should match'),
        ("DYT0106", f'"Zone": {F}.domain in body should match \'^[a-z0-9]([a-z0-9-]*[a-z0-9])?$\''),
        ("DYT0106-missing", f"{F}.domain: Required value"),
        ("DYT0107", "preferredWeight is required when enforcement is preferred"),
        ("DYT0107-required", "preferredWeight may only be set when enforcement is preferred"),
        ("DYT0107-range", f"1.5: {F}.preferredWeight in body should be less than or equal to 1"),
        ("DYT0107-word", 'Unsupported value: "fail": supported values: "required", "preferred"'),
        ("DYT0114", f'strict decoding error: unknown field "{F}.fallback"'),
        ("DYT0114-type", f'{F} in body must be of type object: "string"'),
        ("DYT0118-version", 'no matches for kind "DynamoGraphDeployment" in version '
         '"nvidia.com/v1"'),
        ("DYT0202", f'{F}.domain "host" does not exist in ClusterTopology "my-topology"; available '
         "domains: [zone, rack]"),
    ],
)  # fmt: skip
def test_kubernetes_is_quoted_in_its_own_words(stem: str, words: str):
    [says] = _says(stem, stem.partition("-")[0])
    assert words in says


@pytest.mark.parametrize(
    ("stem", "shipped"),
    [
        ("DYT0103", "{clusterTopologyName: my-topology, domain: zone, enforcement: required}"),
        ("DYT0103-label", "{labelKey: nvidia.com/rack, domain: rack, enforcement: preferred, "
         "preferredWeight: 0.85}"),
        ("DYT0103-no-match-policy", "{labelKey: topology.kubernetes.io/zone, domain: zone, "
         "enforcement: preferred, preferredWeight: 0.85}"),
    ],
)  # fmt: skip
@pytest.mark.seed("dep-topology: names: kvCacheTransferTopology")
def test_drafts_are_translated_into_what_then_passes(stem: str, shipped: str):
    [check] = [check for check in _lint(stem).checks if check.code == "DYT0103"]
    [finding] = check.findings
    written, _, meaning = finding.fix.partition("; ")
    assert written == f"write {F}: {shipped}"
    # No released enforcement means fallback.
    assert meaning.startswith("this changes the meaning: fallback crosses") == (stem != "DYT0103")
    policy = f"""
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {{name: x}}
spec: {{experimental: {{kvTransferPolicy: {shipped}}}}}
"""
    assert _wrong(lint(parse_manifests(policy.encode(), "f"))).keys() <= {"DYT0115"}


def test_a_graph_that_needs_no_policy_shows_nothing_about_policies():
    graph = b"""
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: x}
spec: {components: [{name: Frontend, type: frontend, replicas: 1}]}
"""
    [check] = [c for c in lint(parse_manifests(graph, "f")).checks if c.code == "DYT0102"]
    assert (check.state, check.message) == ("skip", "no graph has workers or a policy")


_TOPOLOGY = """
apiVersion: grove.io/v1alpha1
kind: ClusterTopology
metadata: {name: my-cluster-topology}
spec: {levels: [{domain: zone, key: topology.kubernetes.io/zone}, {domain: rack, key: rack}]}
---
"""
_DRAFT = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: my-llm-disagg}
spec:
  topologyConstraint: {clusterTopologyName: my-cluster-topology}
  components:
    - name: frontend
      type: frontend
      kvCacheTransferTopology: {level: zone, mismatchPolicy: fail}
    - {name: prefill-worker, type: prefill, replicas: 8}
    - {name: decode-worker, type: decode, replicas: 8}
"""
_FRONTENDS = "spec.components[0].kvCacheTransferTopology"


def _findings(text: str) -> dict[str, list[tuple[str, str]]]:
    """Code -> what its findings say about the graph, each with its fix."""
    report = lint(parse_manifests((_TOPOLOGY + text).encode(), "f"))
    return {c.code: [(one.value, one.fix) for one in c.findings] for c in report.checks}


@pytest.mark.parametrize(
    ("old", "new", "code", "value", "fix"),
    [
        ("level: zone", "level: block", "DYT0202", "[zone, rack]", "use one of zone, rack"),
        ("level: zone", "level: Zone", "DYT0106", 'Invalid value: "Zone"', "domain: zone"),
        ("level: zone", "level: 3", "DYT0106", "must be of type string", "domain: zone"),
        ("level: zone, ", "", "DYT0103", f"{_FRONTENDS}.level: Required value", "level: zone"),
        ("level: zone", "levl: zone", "DYT0103", f'{_FRONTENDS}: unknown field "levl"',
         "write level"),
        ("level: zone", "level: zone, hops: 3", "DYT0103", 'unknown field "hops"', "remove it; "),
        ("level: zone", "level: zone, domain: rack", "DYT0103",
         "domain and level are names of one setting, and their values differ", "keep domain"),
        ("mismatchPolicy: fail", "mismatchPolicy: Fallback", "DYT0103",
         f'{_FRONTENDS}.mismatchPolicy: Unsupported value: "Fallback"', "mismatchPolicy: fallback"),
        ("mismatchPolicy: fail", "mismatchPolicy: required", "DYT0103",
         'supported values: "fail", "fallback"', "mismatchPolicy: fail or fallback"),
        ("mismatchPolicy: fail", "enforcement: always", "DYT0107",
         'Unsupported value: "always"', "required or preferred"),
        ("mismatchPolicy: fail", "enforcement: preferred", "DYT0107",
         "preferredWeight is required", "preferredWeight: 0.85"),
        ("mismatchPolicy: fail", "enforcement: preferred, preferredWeight: 7", "DYT0107",
         "should be less than or equal to 1", "0..1"),
        ("mismatchPolicy: fail", "kvTransferWeight: 50.0", "DYT0103",
         "kvCacheTransferTopology with kvTransferWeight is a draft format",
         "--router-kv-transfer-weight 50 with --router-kv-transfer-qos FILE"),
        ("mismatchPolicy: fail", "kvTransferWeight: -1", "DYT0103",
         f"{_FRONTENDS}.kvTransferWeight: Invalid value: -1", "a number of at least 0"),
        ("mismatchPolicy: fail", "kvTransferWeight: '50'", "DYT0103",
         'Invalid value: "50": expected a number', "a number of at least 0"),
        ("mismatchPolicy: fail", "kvTransferWeight: .nan", "DYT0103",
         "Invalid value: nan", "a number of at least 0"),
        ("{level: zone, mismatchPolicy: fail}", "zone", "DYT0103",
         f'{_FRONTENDS} in body must be of type object: "string"', "level and mismatchPolicy"),
        ("type: frontend", "type: decode", "DYT0103",
         "valid only on a component of type frontend, and frontend has the type decode",
         "remove it from frontend"),
        ("      type: frontend\n", "", "DYT0103", "and frontend has no type", "remove it from"),
        ("type: decode,", "type: decode, kvCacheTransferTopology: {level: rack},", "DYT0103",
         "the graph has 2 policies, which differ: spec.components[0]", "keep one of them"),
        ("kvCacheTransferTopology", "kvCacheTransferTopolgy", "DYT0103",
         'unknown field "kvCacheTransferTopolgy", near kvCacheTransferTopology', f"write {F}"),
        ("topologyConstraint: {clusterTopologyName: my-cluster-topology}", "x: 1", "DYT0103",
         "kvCacheTransferTopology is a draft", "{labelKey: topology.kubernetes.io/zone, domain"),
        ("topologyConstraint: {clusterTopologyName: my-cluster-topology}", "x: {level: zone}",
         "DYT0103", "kvCacheTransferTopology is a draft", "enforcement: required}"),
        ("level: zone", "level: rack, label: 'a b'", "DYT0105", 'Invalid value: "a b"',
         "labelKey: topology"),
    ],
)  # fmt: skip
@pytest.mark.seed("dep-topology: names: kvCacheTransferTopology")
@pytest.mark.seed("dep-topology: names: fields of kvCacheTransferTopology")
@pytest.mark.seed("dep-topology: admission failures: component type")
def test_a_translated_draft_is_validated(old: str, new: str, code: str, value: str, fix: str):
    assert old in _DRAFT
    findings = _findings(_DRAFT.replace(old, new))[code]
    assert [one for one in findings if value in one[0] and fix in one[1]], findings


@pytest.mark.parametrize("place", ["spec", "spec.experimental"])
def test_a_draft_in_another_place_is_validated_as_on_the_frontend(place: str):
    body = "{level: block, mismatchPolicy: fail, kvTransferWeight: true}"
    moved = f"kvCacheTransferTopology: {body}"
    where = moved if place == "spec" else f"experimental: {{{moved}}}"
    draft = _DRAFT.replace(
        "      kvCacheTransferTopology: {level: zone, mismatchPolicy: fail}\n", ""
    )
    draft = draft.replace("spec:\n", f"spec:\n  {where}\n")
    findings = _findings(draft)
    assert "[zone, rack]" in findings["DYT0202"][0][0]
    assert [one for one in findings["DYT0103"] if "Invalid value: true" in one[0]]


def test_words_of_drafts_in_the_released_place_are_validated():
    draft = _DRAFT.replace(
        "      kvCacheTransferTopology: {level: zone, mismatchPolicy: fail}\n", ""
    )
    policy = "{level: block, mismatchPolicy: always, kvTransferWeight: 2}"
    draft = draft.replace("spec:\n", f"spec:\n  experimental: {{kvTransferPolicy: {policy}}}\n")
    findings = _findings(draft)
    assert "[zone, rack]" in findings["DYT0202"][0][0]
    shown = " ".join(value + fix for value, fix in findings["DYT0103"])
    assert 'Unsupported value: "always"' in shown
    assert "--router-kv-transfer-weight 2" in shown


def test_an_absent_draft_is_no_draft():
    draft = _DRAFT.replace("{level: zone, mismatchPolicy: fail}", "null")
    assert not _findings(draft)["DYT0103"]


def test_a_level_without_a_label_and_without_a_topology_is_not_guessed():
    draft = _DRAFT.replace("topologyConstraint", "x").replace("level: zone", "level: rack")
    [shape, problem] = _findings(draft)["DYT0103"]
    assert "labelKey: LABEL-OF-YOUR-NODES, domain: rack" in shape[1]
    assert "no node label is known for rack" in problem[0]


@pytest.mark.seed("dep-topology: admission failures: explicit label")
def test_a_draft_with_a_label_needs_no_level_of_the_topology():
    draft = _DRAFT.replace("level: zone", "level: block, label: nvidia.com/block")
    assert not _findings(draft)["DYT0202"]
    assert _findings(draft.replace(", label: nvidia.com/block", ""))["DYT0202"]


def test_a_valid_draft_has_one_finding_and_no_other_check_fails_for_it():
    findings = _findings(_DRAFT)
    wrong = {code: found for code, found in findings.items() if found}
    assert sorted(wrong) == ["DYT0103", "DYT0110"]
    assert len(wrong["DYT0103"]) == 1


def test_the_weight_of_a_draft_is_kept():
    draft = _DRAFT.replace("mismatchPolicy: fail", "enforcement: preferred, preferredWeight: 0.3")
    [(_, fix)] = _findings(draft)["DYT0103"]
    assert "domain: zone, enforcement: preferred, preferredWeight: 0.3}" in fix


@pytest.mark.seed("dep-topology: future work: fields in manifests")
def test_the_network_of_a_level_names_the_file_that_replaces_it():
    [(_, fix)] = _findings(_DRAFT.replace("mismatchPolicy", "networkQoS: {}, mismatchPolicy"))[
        "DYT0103"
    ]
    assert "networkQoS has no field in it" in fix
    assert "--router-kv-transfer-qos FILE" in fix


def test_capacity_that_placement_decides_is_not_judged():
    data = (MANIFESTS / "DYT0901.yaml").read_text().replace("nodeSelector", "nodeselector")
    report = lint(parse_manifests(data.encode(), "f"))
    states = {c.code: (c.state, c.message) for c in report.checks if c.code.startswith("DYT09")}
    assert states["DYT0901"] == (
        State.SKIP,
        "bad: not pinned to one zone: prefill-a, decode-a, prefill-b; "
        "good: not pinned to one zone: prefill-a, decode-a, prefill-b, ..",
    )
    assert {state for state, _ in states.values()} == {State.SKIP}


def test_a_graph_that_cannot_be_judged_is_never_behind_a_pass():
    data = (MANIFESTS / "DYT0111.yaml").read_text()
    [check] = [c for c in lint(parse_manifests(data.encode(), "f")).checks if c.code == "DYT0901"]
    assert check.state is State.SKIP
    assert check.message == "bad: the role of workers is unknown (DYT0111)"
    stranded = (MANIFESTS / "DYT0901.yaml").read_text().replace("name: bad", "name: worse")
    report = lint(parse_manifests((data + "---\n" + stranded).encode(), "f"))
    [check] = [c for c in report.checks if c.code == "DYT0901"]
    assert [one.subject for one in check.findings] == ["DynamoGraphDeployment worse"]
    assert check.message == "not checked: bad: the role of workers is unknown (DYT0111)"


def test_a_graph_without_prefill_and_decode_does_not_pass_as_having_both():
    data = (MANIFESTS / "DYT0115.yaml").read_text()

    def both_roles(text: str) -> tuple[State, str]:
        report = lint(parse_manifests(text.encode(), "f"))
        [check] = [one for one in report.checks if one.code == "DYT0109"]
        return check.state, check.message

    assert both_roles(data) == (State.PASS, "good: 4 prefill, 8 decode")
    state, message = both_roles(data.partition("---\n")[0])
    assert (state, "DYT0115" in message) == (State.SKIP, True)


@pytest.mark.seed("dep-topology: admission failures: ClusterTopology not found")
def test_a_topology_that_is_not_in_the_files_is_never_behind_a_pass():
    data = (MANIFESTS / "DYT0202.yaml").read_text().replace("domain: host", "domain: zone")
    data = data.replace("clusterTopologyName: my-topology", "clusterTopologyName: other", 1)
    [check] = [c for c in lint(parse_manifests(data.encode(), "f")).checks if c.code == "DYT0202"]
    assert (check.state, check.message) == (State.SKIP, "other: not in these files")


def test_a_grove_level_gives_the_label_that_components_are_pinned_by():
    data = (MANIFESTS / "DYT0901.yaml").read_text()
    named = data.replace("labelKey: topology.kubernetes.io/zone", "clusterTopologyName: t")
    assert "DYT0901" not in _wrong(lint(parse_manifests(named.encode(), "f")))
    grove = """
---
apiVersion: grove.io/v1alpha1
kind: ClusterTopology
metadata: {name: t}
spec: {levels: [{domain: zone, key: topology.kubernetes.io/zone}]}
"""
    assert _wrong(lint(parse_manifests((named + grove).encode(), "f"))) == {
        "DYT0901": ["DynamoGraphDeployment bad"]
    }


@pytest.mark.parametrize("value", ["null", "[]", "1", "{}", "{labelKey: 1, domain: [x]}", "text"])
@pytest.mark.parametrize("place", ["kvTransferPolicy", "components", "spec", "metadata", "levels"])
def test_odd_shapes_are_findings_and_never_an_accident(place: str, value: str):
    policy = value if place == "kvTransferPolicy" else "{labelKey: a, domain: zone}"
    components = value if place == "components" else "[{name: a, type: worker}]"
    inner = f"{{experimental: {{kvTransferPolicy: {policy}}}, components: {components}}}"
    data = f"""
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {value if place == "metadata" else "{name: x}"}
spec: {value if place == "spec" else inner}
---
apiVersion: grove.io/v1alpha1
kind: ClusterTopology
spec: {{levels: {value if place == "levels" else "[]"}}}
"""
    assert lint(parse_manifests(data.encode(), "f")).summary.passed


def test_files_about_something_else_are_a_usage_problem():
    with pytest.raises(UsageProblem, match=r"nothing to check.*found Deployment \(apps/v1\)"):
        lint(parse_manifests(b"{apiVersion: apps/v1, kind: Deployment}", "f"))


@pytest.mark.parametrize(
    ("replicas", "refusal"),
    [
        ('"4"', 'in body must be of type integer: "string"'),
        ("4.5", 'in body must be of type integer: "number"'),
        ("true", 'in body must be of type integer: "boolean"'),
        (".inf", 'in body must be of type integer: "number"'),
        ("-4", "Invalid value: -4: should be greater than or equal to 0"),
        ("99999999999", "Invalid value: 99999999999: must be of type int32"),
        ("4", ""),
        ("4.0", ""),
        ("null", ""),
    ],
)
@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
def test_replicas_that_are_not_a_count_are_refused(version: str, replicas: str, refusal: str):
    parts = {
        "v1beta1": f"components: [{{name: d, type: decode, replicas: {replicas}}}]",
        "v1alpha1": f"services: {{d: {{componentType: worker, replicas: {replicas}}}}}",
    }
    head = f"{{apiVersion: nvidia.com/{version}, kind: DynamoGraphDeployment, metadata: {{name: g}}"
    report = lint(parse_manifests(f"{head}, spec: {{{parts[version]}}}}}".encode(), "f"))
    [check] = [check for check in report.checks if check.code == "DYT0118"]
    assert [refusal in finding.value for finding in check.findings] == [True] * bool(refusal)


@pytest.mark.parametrize("metadata", ["{}", "mine", "{namespace: prod}", "null"])
def test_a_graph_without_a_name_is_refused(metadata: str):
    data = f"{{apiVersion: nvidia.com/v1beta1, kind: DynamoGraphDeployment, metadata: {metadata}}}"
    report = lint(parse_manifests(data.encode(), "f"))
    [check] = [check for check in report.checks if check.code == "DYT0118"]
    assert "metadata.name: Required value" in check.findings[0].value


# -- the command -----------------------------------------------------------------------------------


def test_exit_codes(dynctl):
    healthy, warned, failed = (
        str(MANIFESTS / f"{stem}.yaml") for stem in ("healthy-v1beta1", "DYT0111", "DYT0110")
    )
    assert dynctl("topology", "lint", "-f", healthy).code == 0
    assert dynctl("topology", "lint", "-f", warned).code == 0
    assert dynctl("topology", "lint", "-f", warned, "--fail-on", "warn").code == 1
    assert dynctl("topology", "lint", "-f", failed).code == 1
    assert dynctl("topology", "lint", "-f", healthy, failed).code == 1
    assert dynctl("topology", "lint", "-f", failed, "--suppress", "dyt0110").code == 0


def test_json_names_codes_and_subjects(dynctl):
    ran = dynctl("topology", "lint", "-f", MANIFESTS / "DYT0110.yaml", "-o", "json")
    result = [c for s in ran.json["sections"] for c in s["checks"] if c["state"] == "fail"]
    assert [check["code"] for check in result] == ["DYT0110"]
    assert result[0]["findings"][0]["subject"] == "DynamoGraphDeployment bad"
    assert result[0]["findings"][0]["value"].startswith("component frontend: ")
    names = dynctl("topology", "lint", "-f", MANIFESTS / "DYT0902.yaml", "-o", "name").out
    assert names.split() == ["DYT0902", "DYT0908"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no manifest specified"),
        (["-f", "/nowhere.yaml"], "/nowhere.yaml: the file does not exist"),
        (["-f", "x", "--fail-on", "never"], "expected one of fail, skip, warn"),
        (["-f", "x", "--suppress", "DYT9999"], "unknown code"),
    ],
)
def test_wrong_words_are_usage_problems(dynctl, arguments: list[str], says: str):
    ran = dynctl("topology", "lint", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
