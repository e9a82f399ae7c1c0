"""What a reader of Dynamo's guides sees on the command line, item by item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynctl.manifests.files import parse_manifests
from dynctl.manifests.lint.run import lint
from dynctl.settings.router_settings import resolve
from tests.golden.fleets import TOKENS, stranded_zones, two_zones, view, worker

PREFILL = "prefill-a0"
GRAPH = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: g}
spec:
  experimental: {kvTransferPolicy: {labelKey: topology.kubernetes.io/zone, domain: zone}}
  components: [{name: p, type: prefill}, {name: d, type: decode}]
"""


def _saved(tmp_path: Path, source: Any) -> Path:
    path = tmp_path / "view.json"
    path.write_bytes(source.save())
    return path


@pytest.mark.seed("router-topology: runtime contract: topology_domains")
@pytest.mark.seed("router-topology: runtime contract: kv_transfer_domain")
@pytest.mark.seed("router-topology: runtime contract: kv_transfer_enforcement")
@pytest.mark.seed("router-topology: runtime contract: taints")
def test_what_a_worker_publishes_is_shown(dynctl: Any) -> None:
    shown = dynctl("workers", "show", PREFILL, "--demo").out
    assert "domains       zone=zone-a, rack=rack-a0" in shown
    assert "kv transfer   required zone" in shown
    published = dynctl("workers", "show", PREFILL, "--demo", "-o", "json").json["worker"]
    assert published["runtime_config"]["taints"] == [
        "dynamo.topology/rack=rack-a0",
        "dynamo.topology/zone=zone-a",
    ]
    domains = dynctl("topology", "show", "--demo", "--domain", "rack", "-o", "name").out
    assert domains.split() == ["rack-a0", "rack-b0"]


@pytest.mark.seed("router-topology: runtime contract: kv_transfer_preferred_weight")
def test_the_weight_of_a_preference_is_shown(dynctl: Any, tmp_path: Path) -> None:
    path = _saved(tmp_path, two_zones("preferred", 0.85))
    assert "preferred zone, weight 0.85" in dynctl("workers", "show", PREFILL, "--view", path).out


@pytest.mark.seed("router-topology: runtime contract: other domains are taints")
def test_another_domain_than_the_one_of_transfers_is_an_ordinary_taint(dynctl: Any) -> None:
    route = ("route", "--demo", "--require-taint", "dynamo.topology/rack=rack-b0", "-o", "json")
    winner = dynctl(*route, "a prompt").json["winner"]
    assert winner["prefill"]["worker"].startswith("prefill-b")
    assert winner["decode"]["worker"].startswith("decode-b")


@pytest.mark.seed("router-topology: troubleshooting: required returns no endpoint")
def test_a_required_policy_without_an_endpoint_is_explained(dynctl: Any, tmp_path: Path) -> None:
    fleet = [worker(PREFILL, "prefill", 1, zone="zone-a", enforcement="required")]
    fleet.append(worker("decode-b0", "decode", 2, zone="zone-b"))
    ran = dynctl("route", "--explain", "--view", _saved(tmp_path, view(fleet)), "a prompt")
    assert ran.code == 1
    assert "admits   an eligible decode worker in zone=zone-a" in ran.out


@pytest.mark.seed("router-topology: troubleshooting: preferred crosses")
def test_the_weight_that_would_keep_a_request_local_is_shown(dynctl: Any, tmp_path: Path) -> None:
    path = _saved(tmp_path, two_zones("preferred", 0.85))
    tokens = tmp_path / "tokens.json"
    tokens.write_text(str(TOKENS))
    ran = dynctl("route", "--explain", "--view", path, "--tokens", tokens)
    assert "Smallest weight that keeps it" in ran.out
    assert "local: 0.854." in ran.out


@pytest.mark.seed("router-topology: operational notes: decode capacity")
def test_a_domain_without_decode_workers_is_stranded(dynctl: Any, tmp_path: Path) -> None:
    ran = dynctl("topology", "show", "--view", _saved(tmp_path, stranded_zones()))
    assert "zone-c is STRANDED" in ran.out


@pytest.mark.seed("router-topology: operational notes: transport health")
@pytest.mark.seed("smart-routing-guide-0.9: verification: NIXL in worker logs")
def test_the_transfer_itself_is_named_as_not_covered() -> None:
    report = lint(parse_manifests(GRAPH.encode(), "f"))
    assert "the KV transfer itself (NIXL, RDMA)" in report.not_checked


@pytest.mark.seed("kubernetes-topology: pipeline: enforcement defaults to required")
def test_a_policy_without_enforcement_is_required() -> None:
    report = lint(parse_manifests(GRAPH.encode(), "f"))
    [check] = [check for check in report.checks if check.code == "DYT0102"]
    assert check.message == "g: zone, required"


@pytest.mark.seed("dep-topology: routing failures: the default is fail")
def test_a_level_without_a_mismatch_policy_is_required() -> None:
    config = resolve({"--router-kv-transfer-topology-level": "zone"}, {}).config
    assert config.kv_transfer_enforcement == "required"
    named = resolve({}, {"DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL": "zone"}).config
    assert named.kv_transfer_enforcement == "required"


@pytest.mark.seed("smart-routing-guide-0.9: verification: no downloads from a hub")
def test_the_name_of_a_model_on_a_hub_is_not_downloaded(dynctl: Any) -> None:
    ran = dynctl("serve", "frontend", "--model-path", "nvidia/Llama-3.1-8B-Instruct-FP8")
    assert ran.code == 2
    assert "nvidia/Llama-3.1-8B-Instruct-FP8" in ran.err
