"""Whether a pod template can run on a node, by labels and taints, as in the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from dynctl.manifests.pod_placement import may_run, tolerates

NODE = {"zone": "az-1", "gpus": "8", "pool": "gpu"}


def affinity(*terms: Any) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


def term(*expressions: Any) -> dict[str, Any]:
    return {"matchExpressions": list(expressions)}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, True),
        ({"pool": "gpu"}, True),
        ({"pool": "gpu", "zone": "az-1"}, True),
        ({"pool": "gpu", "zone": "az-2"}, False),
        ({"disk": "ssd"}, False),
    ],
)
def test_every_entry_of_a_node_selector_must_hold(selector: dict[str, str], expected: bool):
    assert may_run({"nodeSelector": selector}, NODE) is expected


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (expression("zone", "In", "az-2", "az-1"), True),
        (expression("zone", "In", "az-2"), False),
        (expression("absent", "In", "az-1"), False),
        (expression("zone", "NotIn", "az-2"), True),
        (expression("zone", "NotIn", "az-1"), False),
        (expression("absent", "NotIn", "az-1"), True),
        (expression("zone", "Exists"), True),
        (expression("absent", "Exists"), False),
        (expression("zone", "DoesNotExist"), False),
        (expression("absent", "DoesNotExist"), True),
        (expression("gpus", "Gt", "7"), True),
        (expression("gpus", "Gt", "8"), False),
        (expression("gpus", "Lt", "9"), True),
        (expression("gpus", "Lt", "8"), False),
        (expression("zone", "Gt", "1"), False),
        (expression("absent", "Lt", "1"), False),
        (expression("gpus", "Gt"), False),
        (expression("gpus", "Near", "8"), False),
    ],
)
def test_operators_of_affinity(one: dict[str, Any], expected: bool):
    assert may_run(affinity(term(one)), NODE) is expected


def test_terms_are_alternatives_whose_expressions_must_all_hold():
    here, there = expression("zone", "In", "az-1"), expression("zone", "In", "az-2")
    big, small = expression("gpus", "Gt", "4"), expression("gpus", "Lt", "4")
    assert may_run(affinity(term(there), term(here)), NODE)
    assert may_run(affinity(term(here, big)), NODE)
    assert not may_run(affinity(term(here, small), term(there, big)), NODE)


def test_a_selector_and_an_affinity_must_both_hold():
    pod = {"nodeSelector": {"pool": "cpu"}, **affinity(term(expression("zone", "Exists")))}
    assert not may_run(pod, NODE)
    assert may_run(pod, {**NODE, "pool": "cpu"})


def test_an_empty_term_matches_no_node_and_fields_are_not_looked_at():
    assert not may_run(affinity({}), NODE)
    assert may_run(affinity({"matchFields": [expression("metadata.name", "In", "x")]}), NODE)
    assert may_run(affinity(), NODE)


@pytest.mark.parametrize("odd", [None, 1, "text", [1], {"nodeAffinity": [1]}])
def test_odd_shapes_forbid_nothing(odd: Any):
    assert may_run({"affinity": odd, "nodeSelector": None, "tolerations": odd}, NODE)
    assert not tolerates({"tolerations": odd}, ["gpu"])


def test_tolerations_are_compared_by_their_keys():
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists"}
    assert tolerates({}, [])
    assert not tolerates({}, ["nvidia.com/gpu"])
    assert tolerates({"tolerations": [gpu]}, ["nvidia.com/gpu"])
    assert not tolerates({"tolerations": [gpu]}, ["nvidia.com/gpu", "dedicated"])
    assert tolerates({"tolerations": [{"operator": "Exists"}]}, ["nvidia.com/gpu", "dedicated"])
