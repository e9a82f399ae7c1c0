"""Plans of fleets from flags, manifests and workers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynctl.base.errors import UsageProblem
from dynctl.manifests.files import parse_manifests
from dynctl.planning.capacity import Ratio
from dynctl.planning.domain_capacity import topology_show
from dynctl.planning.plan import topology_plan
from dynctl.planning.planned_fleet import (
    PlannedFleet,
    fleet_of_flags,
    fleet_of_manifests,
    fleet_of_workers,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.plan import topology_plan as topology_plan_screen
from tests.golden.fleets import view, worker
from tests.kube.objects import small

FIXTURES = Path(__file__).parents[2] / "fixtures" / "plan"
HALF = Ratio(1, 2)


def graph(*components: dict[str, Any], policy: Any = None, **spec: Any) -> dict[str, Any]:
    policy = policy or {"labelKey": "topology.kubernetes.io/zone", "domain": "zone"}
    return small.graph("g", "", policy=policy, components=components, **spec)


def part(name: str, kind: str, replicas: Any, *zones: str, **more: Any) -> dict[str, Any]:
    """A component that may run in ``zones``; in any where none is named."""
    body: dict[str, Any] = {"name": name, "type": kind, "replicas": replicas, **more}
    if zones:
        expression = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": [*zones]}
        required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        body["podTemplate"] = {"spec": {"affinity": affinity}}
    return body


def fleet(
    *documents: dict[str, Any], domain: str | None = None, over: tuple[str, ...] = ()
) -> PlannedFleet:
    data = yaml.safe_dump_all(documents).encode()
    return fleet_of_manifests(parse_manifests(data, "g.yaml"), "g.yaml", domain, over)


def from_file(name: str) -> PlannedFleet:
    return fleet_of_manifests(parse_manifests((FIXTURES / name).read_bytes(), name), name, None)


def counted(found: PlannedFleet) -> dict[str | None, tuple[int, int]]:
    return {cell.value: (cell.prefill, cell.decode) for cell in found.cells}


def test_flags_and_manifest_give_the_same_plan():
    flags = fleet_of_flags(["az-1:prefill=30,decode=60", "az-2:prefill=30,decode=60"], None)
    manifest = from_file("zones.yaml")
    assert counted(flags) == counted(manifest) == {"az-1": (30, 60), "az-2": (30, 60)}
    for one in (flags, manifest):
        plan = topology_plan(one, ratio=HALF)
        assert (plan.prefill, plan.decode, plan.state) == (60, 120, "ok")
        assert [row.headroom.decode_workers for row in plan.rows] == [0, 0]
        assert [(row.add.prefill, row.add.decode) for row in plan.rows] == [(0, 0), (0, 0)]
        assert plan.patches == []
        zone = next(loss for loss in plan.losses if loss.what == "domain")
        assert (zone.prefill_left, zone.decode_left, zone.stranded_share) == (30, 60, 0)
        assert zone.served_share == 0.5
        decode = next(loss for loss in plan.losses if loss.what == "decode")
        assert (decode.stranded_prefill, decode.served_share) == (0.5, 0.991667)


def test_a_zone_that_lost_its_decode_strands_its_prefill_only_under_required():
    alpha = from_file("alpha.yaml")
    now = topology_plan(alpha)
    assert (now.enforcement, now.in_force, now.state, now.warnings) == (
        "preferred", "preferred", "ok", [],
    )  # fmt: skip
    then = topology_plan(alpha, enforcement="required")
    assert (then.state, [row.stranded_prefill for row in then.rows]) == ("stranded", [0, 2])
    [warning] = then.warnings
    assert "do not switch llm/mail from preferred to required yet" in warning
    assert "2 of 6 prefill workers (az-2)" in warning


@pytest.mark.seed("dep-topology: compatibility: one graph in several domains")
@pytest.mark.seed("kubernetes-topology: pipeline: components for each zone")
def test_the_patches_apply_the_plan():
    """Applied to the manifests, what is left to add is nothing."""
    document = graph(
        part("PrefillOne", "prefill", 30, "az-1"),
        part("DecodeOne", "decode", 50, "az-1"),
        part("PrefillTwo", "prefill", 25, "az-2"),
        part("DecodeTwo", "decode", 60, "az-2"),
    )
    plan = topology_plan(fleet(document), ratio=HALF)
    [patch] = plan.patches
    words = shlex.split(patch.command)
    assert words[:4] == ["kubectl", "patch", "dynamographdeployments.v1beta1.nvidia.com", "g"]
    assert json.loads(words[words.index("-p") + 1]) == patch.body
    for step in patch.body:
        _, spec, components, place, member = step["path"].split("/")
        target = document[spec][components][int(place)]
        if step["op"] == "test":
            assert target[member] == step["value"]
        else:
            target[member] = step["value"]
    again = topology_plan(fleet(document), ratio=HALF)
    assert counted(fleet(document)) == {"az-1": (30, 60), "az-2": (30, 60)}
    assert again.patches == []


def test_the_older_version_is_patched_by_name():
    [patch] = topology_plan(from_file("alpha.yaml"), enforcement="required", ratio=HALF).patches
    assert patch.type == "merge"
    services = patch.body["spec"]["services"]
    assert services == {"DecodeOne": {"replicas": 8}, "DecodeTwo": {"replicas": 4}}
    assert "-n llm" in patch.command


def test_changes_that_no_patch_can_make_are_noted():
    document = graph(
        part("P", "prefill", 2, "az-1"),
        part("D", "decode", 1, "az-1", scalingAdapter={}),
        part("P2", "prefill", 2, "az-2"),
    )
    plan = topology_plan(fleet(document), ratio=HALF)
    assert plan.patches == []
    assert any(
        "+3 decode in az-1: a scaling adapter sets the replicas of D" in n for n in plan.notes
    )
    assert any("+4 decode in az-2: no component of this role is pinned" in n for n in plan.notes)


def test_a_target_fleet_is_split_and_may_remove_workers():
    document = graph(
        part("P", "prefill", 40, "az-1"),
        part("D", "decode", 60, "az-1"),
        part("P2", "prefill", 20, "az-2"),
        part("D2", "decode", 20, "az-2"),
    )
    plan = topology_plan(fleet(document), target=(60, 120))
    assert plan.ratio == "1:2"
    assert [(row.add.prefill, row.add.decode) for row in plan.rows] == [(-10, 0), (10, 40)]
    [patch] = plan.patches
    assert [step["value"] for step in patch.body] == ["P", 30, "P2", 30, "D2", 60]


def test_unpinned_components_give_bounds():
    document = graph(part("P", "prefill", 6), part("D", "decode", 12))
    plan = topology_plan(fleet(document), ratio=HALF)
    [row] = plan.rows
    assert (row.value, row.prefill, row.unpinned_prefill, row.unpinned_decode) == (None, 0, 6, 12)
    assert (plan.state, plan.losses, plan.patches) == ("unknown", [], [])
    [bound] = plan.bounds
    assert (bound.at_least, bound.at_most) == (0, 6)
    assert "6 (at worst)" in plan.warnings[0]
    assert topology_plan(fleet(document), enforcement="preferred").bounds == []


def test_placement_strands_no_worker_where_decode_may_run_anywhere():
    document = graph(part("P", "prefill", 6, "az-1"), part("D", "decode", 12))
    for mode in ("preferred", "fallback", "none"):
        plan = topology_plan(fleet(document), enforcement=mode)
        assert (plan.state, plan.warnings, plan.bounds) == ("ok", [], [])
    lonely = graph(part("P", "prefill", 6, "az-1"), part("P2", "prefill", 1))
    plan = topology_plan(fleet(lonely), enforcement="preferred")
    assert (plan.state, [row.stranded_prefill for row in plan.rows]) == ("stranded", [6])


def test_missing_decode_is_noted_for_any_placement():
    document = graph(part("P", "prefill", 6), part("D", "decode", 8))
    plan = topology_plan(fleet(document, over=("az-1", "az-2")), target=(6, 12))
    assert [(row.add.prefill, row.add.decode) for row in plan.rows] == [(0, 0), (0, 0)]
    assert plan.notes == [
        "g: 4 decode workers are missing for 1:2, in any placement",
        "g: pin a component of each role to each value first, then az-1 3:6, az-2 3:6",
    ]


def test_a_component_that_may_run_in_two_zones_is_bounded_by_them():
    document = graph(part("P", "prefill", 6, "az-1"), part("D", "decode", 4, "az-1", "az-2"))
    plan = topology_plan(fleet(document))
    assert [(r.value, r.decode, r.unpinned_decode) for r in plan.rows] == [
        ("az-1", 0, 4), ("az-2", 0, 4),
    ]  # fmt: skip
    assert (plan.bounds[0].at_least, plan.bounds[0].at_most) == (0, 6)


def test_prefill_without_decode_in_any_placement_is_stranded():
    document = graph(part("P", "prefill", 6, "az-1"), part("D", "decode", 4, "az-2", "az-3"))
    plan = topology_plan(fleet(document))
    assert (plan.state, plan.bounds[0].at_least, plan.bounds[0].at_most) == ("stranded", 6, 6)


def test_a_graph_packed_into_one_zone_strands_no_worker():
    document = graph(
        part("P", "prefill", 6),
        part("D", "decode", 12),
        topologyConstraint={"clusterTopologyName": "t", "packDomain": "rack"},
    )
    plan = topology_plan(fleet(document), ratio=HALF)
    assert (plan.state, plan.bounds, plan.warnings) == ("ok", [], [])
    assert [(row.value, row.prefill, row.decode) for row in plan.rows] == [("(one zone)", 6, 12)]


def test_the_key_of_a_domain_comes_from_the_topology_resource():
    topology = {
        "apiVersion": "grove.io/v1alpha1",
        "kind": "ClusterTopologyBinding",
        "metadata": {"name": "t"},
        "spec": {"levels": [{"domain": "rack", "key": "example.com/place"}]},
    }
    body = part("P", "prefill", 2)
    body["podTemplate"] = {"spec": {"nodeSelector": {"example.com/place": "r1"}}}
    policy = {"clusterTopologyName": "t", "domain": "rack"}
    found = fleet(topology, graph(body, policy=policy))
    assert (found.domain, counted(found), found.notes) == ("rack", {"r1": (2, 0)}, ())


def test_a_policy_of_another_domain_does_not_bind_this_one():
    document = graph(part("P", "prefill", 2), part("D", "decode", 2))
    assert fleet(document).in_force == {"g": "required"}
    assert fleet(document, domain="rack").in_force == {"g": "none"}


def test_components_that_are_not_counted_are_noted():
    document = graph(
        part("Both", "worker", 3, "az-1"),
        part("MyDecode", "worker", 3, "az-1"),
        part("Nowhere", "decode", 3, "az-1"),
        part("Eyes", "worker", 1, subComponentType="encode"),
    )
    nowhere = document["spec"]["components"][2]["podTemplate"]["spec"]
    nowhere["nodeSelector"] = {"topology.kubernetes.io/zone": "az-2"}
    found = fleet(document, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}})
    assert counted(found) == {"az-1": (0, 3)}
    notes = "\n".join(found.notes)
    assert "the role of Both (spec.components[0]) is unknown: not counted" in notes
    assert "g: Eyes is an encoder: not counted" in notes
    assert "the role of MyDecode, decode, is taken from its name" in notes
    assert "selectors of Nowhere contradict each other" in notes
    assert "g.yaml#2: Service s is not a DynamoGraphDeployment: skipped" in notes


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (graph(part("P", "prefill", "many")), "g.yaml: spec.components[0].replicas: 'many'"),
        (graph(part("P", "prefill", -1)), "expected a whole number from 0"),
        (graph(part("P", "prefill", True)), "expected a whole number from 0"),
        (graph() | {"apiVersion": "nvidia.com/v9"}, "apiVersion nvidia.com/v9: expected"),
        (graph(policy={"domain": "zone", "enforcement": "maybe"}), "enforcement: 'maybe'"),
        (graph(policy="required"), "kvTransferPolicy: 'required'; expected keys and values"),
        (graph(policy={"domain": False}), "kvTransferPolicy.domain: False; expected a name"),
        (graph(policy={"labelKey": "zone"}), "kvTransferPolicy.domain: None; expected a name"),
        ({"apiVersion": "v1", "kind": "Pod"}, "no DynamoGraphDeployment (nvidia.com) in it"),
        ({"kind": "DynamoGraphDeployment"}, "found (no apiVersion) DynamoGraphDeployment"),
    ],
)
def test_invalid_replicas_are_refused_with_their_path(document: dict[str, Any], expected: str):
    with pytest.raises(UsageProblem) as caught:
        fleet(document)
    assert expected in str(caught.value)


def test_graphs_of_different_domains_require_the_domain_option():
    other = graph(policy={"labelKey": "x/rack", "domain": "rack"})
    other["metadata"] = {"name": "h"}
    with pytest.raises(UsageProblem, match="choose one with --domain"):
        fleet(graph(), other)
    with pytest.raises(UsageProblem, match="the graph g is defined twice"):
        fleet(graph(), graph())


@pytest.mark.parametrize(
    "given",
    ["", ":prefill=1", "a=prefill=1", "a:prefill", "a:prefill=x", "a:prefill=-1",
     "a:prefill=1,prefill=2",
     "a:aggregated=1", "a:prefill=99999999", "a:decode=1000001"],
)  # fmt: skip
def test_invalid_capacities_are_refused(given: str):
    with pytest.raises(UsageProblem, match="--capacity"):
        fleet_of_flags([given], None)


# -- live ------------------------------------------------------------------------------------------


def live(*workers: Any) -> PlannedFleet:
    rows = view([*workers]).workers()
    return fleet_of_workers(topology_show("test", rows, {}), rows)


def test_workers_are_counted_in_their_domain():
    found = live(
        worker("p0", "prefill", 1, zone="a", enforcement="required"),
        worker("d0", "decode", 2, zone="a"),
        worker("p1", "prefill", 3, zone="b", enforcement="required"),
        worker("d9", "decode", 4),
    )
    assert counted(found) == {"a": (1, 1), "b": (1, 0), None: (0, 1)}
    assert found.in_force == {"tiny": "required"}
    plan = topology_plan(found)
    assert [(row.value, row.state) for row in plan.rows] == [
        ("a", "ok"), ("b", "stranded"), (None, "idle"),
    ]  # fmt: skip
    assert plan.warnings == []


def test_domains_of_aggregated_workers_are_not_judged():
    mixed = topology_plan(
        live(
            worker("p", "prefill", 1, zone="a", enforcement="required"),
            worker("d", "decode", 2, zone="a"),
            worker("agg", "aggregated", 3, zone="b"),
        )
    )
    assert [(row.value, row.state) for row in mixed.rows] == [("a", "ok")]
    assert "b: 1 aggregated, not counted" in mixed.notes
    alone = topology_plan(live(worker("agg", "aggregated", 1, zone="b")))
    assert (alone.rows, alone.state) == ([], "unknown")
    assert topology_plan_screen(alone, Canvas(80)) == (
        "no prefill or decode workers to plan for (test)\nb: 1 aggregated, not counted\n"
    )


def test_nodes_come_from_a_published_domain():
    found = live(
        worker("p0", "prefill", 1, zone="a", enforcement="required", extra={"host": "n1"}),
        worker("d0", "decode", 2, zone="a", extra={"host": "n2"}),
        worker("d1", "decode", 3, zone="a", extra={"host": "n2"}),
    )
    nodes = {loss.node: loss for loss in topology_plan(found).losses if loss.what == "node"}
    assert (nodes["n2"].decode_left, nodes["n2"].stranded_share) == (0, 1.0)
    assert (nodes["n1"].prefill_left, nodes["n1"].served_share) == (0, 0.0)


@pytest.mark.seed("dep-topology: names: kvCacheTransferTopology")
def test_a_draft_policy_is_planned_with_and_noted():
    data = b"""
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: g}
spec:
  components:
    - {name: frontend, type: frontend, kvCacheTransferTopology: {level: rack, label: r}}
    - {name: p, type: prefill, replicas: 2}
    - {name: d, type: decode, replicas: 2}
"""
    fleet = fleet_of_manifests(parse_manifests(data, "g.yaml"), "g.yaml", None)
    assert fleet.domain == "rack"
    assert fleet.in_force == {"g": "required"}
    [note] = [note for note in fleet.notes if "draft" in note]
    assert note.startswith("g: its policy is translated from a draft that no released operator")
