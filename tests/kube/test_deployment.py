"""The handwritten deployment equals that of the actors and that of real workers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dynctl.adapters.kubernetes.cluster import open_cluster
from dynctl.findings.catalogue import catalogue
from dynctl.verify.gather.cluster import Wanted, gather
from dynctl.verify.gather.pods import Sampling
from dynctl.verify.join import join
from dynctl.wire.kubernetes.objects import Pod, pod
from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.kube import deployment
from tests.kube.actors import living
from tests.kube.deployment import card_config, healthy
from tests.kube.facts import facts_of, router_views
from tests.kube.faults import FAULTS
from tests.kube.objects import key_of

CAPTURE = Path(__file__).parents[1] / "captures" / "kube-dwm-disagg-required.json"


@pytest.mark.parametrize("grove", [False, True])
@pytest.mark.parametrize("enforcement", ["required", "preferred"])
def test_actors_bring_about_what_is_written_by_hand(grove: bool, enforcement: str):
    with living(grove=grove, enforcement=enforcement) as sim:
        lived = {key_of(one): one for one in sim.objects() if one["kind"] == "Pod"}
        files, published = sim.files(), {key_of(m): m for m in sim.store.list("dwm")}
        [view] = sim.frontends.views.values()
        known = frozenset(one.number for one in view.workers)
    written = healthy(grove=grove, enforcement=enforcement)
    by_hand = {key_of(one): one for one in written if one["kind"] == "Pod"}
    assert lived.keys() == by_hand.keys()
    for key, body in by_hand.items():
        assert timeless(pod(lived[key])) == timeless(pod(body))
    assert files == deployment.files(written)
    for body in written:
        if body["kind"] == "DynamoWorkerMetadata":
            assert card_config(published.pop(key_of(body))) == card_config(body)
    assert not published
    assert router_views(written)[0].workers == known


def timeless(found: Pod) -> Pod:
    """Without what differs between two lives: uid, times, addresses, and which node of a zone."""
    return dataclasses.replace(
        found,
        uid="",
        ip="",
        node=found.node.rpartition("-")[0],
        created=None,
        scheduled=None,
        containers=tuple(dataclasses.replace(one, running_since=None) for one in found.containers),
        label_writes=tuple(dataclasses.replace(one, at=0.0) for one in found.label_writes),
    )


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
def test_facts_of_what_is_written_by_hand_have_no_break(version: Any):
    written = healthy(version=version)
    found = join(facts_of(written, routers=router_views(written)))
    assert len(found.workers) == 12
    assert not [b for worker in found.workers for c in worker.chains.values() for b in c.breaks()]
    assert found.deployments.keys() == {"prod"}
    assert not found.deployments["prod"].problems


@pytest.mark.parametrize("grove", [False, True])
def test_facts_of_json_are_those_that_are_gathered(grove: bool, tmp_path: Path):
    with living(prefill=1, decode=1, grove=grove) as sim:
        cluster = open_cluster(
            kubeconfig=sim.viewer_kubeconfig(tmp_path / "kubeconfig"), context=None, timeout=10
        )
        try:
            wanted = Wanted("prod", exec=Sampling.ALL, logs=Sampling.ALL)
            gathered = gather(cluster, wanted).cluster
        finally:
            cluster.close()
        result = facts_of(
            sim.objects(),
            files=sim.files(),
            logs=sim.logs(),
            now=sim.clock.now,
            namespace="prod",
        ).cluster
    assert gathered is not None
    assert result is not None
    # What is served is known to a server only, and so is who may read it.
    served = {"title", "served", "version", "graphs", "topologies", "access", "operator_accounts"}
    for one in dataclasses.fields(result):
        if one.name not in served:
            assert getattr(result, one.name) == getattr(gathered, one.name), one.name
    accounts = (*gathered.operator_accounts, *result.operator_accounts)
    allowed = [one.allowed for one in accounts] + [gathered.access, result.access]
    assert all(isinstance(one, dict) and set(one.values()) == {True} for one in allowed)


def test_simulated_workers_publish_what_real_ones_do():
    real = {
        card["card_json"]["worker_type"]: (body, card)
        for body in json.loads(CAPTURE.read_text())
        for card in body["spec"]["data"]["model_cards"].values()
    }
    for body in healthy():
        if body["kind"] == "DynamoWorkerMetadata":
            [(key, card)] = body["spec"]["data"]["model_cards"].items()
            there, real_card = real[card["card_json"]["worker_type"]]
            assert shape(card) == shape(real_card)
            assert body["metadata"]["ownerReferences"][0].keys() == (
                there["metadata"]["ownerReferences"][0].keys()
            )
            assert key.endswith(f"/{instance_id(body['metadata']['name']):x}")
            data, real_data = body["spec"]["data"], there["spec"]["data"]
            assert data.keys() == real_data.keys()
            for bucket in ("endpoints", "event_sources"):
                for entry in data[bucket].values():
                    assert shape(entry) in [shape(one) for one in real_data[bucket].values()]


def shape(value: Any) -> Any:
    """The keys of nested objects; files of the model are left out, they may be missing."""
    if not isinstance(value, dict):
        return None
    free = ("model_info", "tokenizer", "prompt_formatter", "gen_config", "topology_domains")
    return {key: None if key in free else shape(one) for key, one in value.items()}


def test_faults_are_called_once_and_named_by_codes_that_exist():
    names = [one.name for one in FAULTS]
    assert len(names) == len(set(names))
    assert {code for one in FAULTS for code in (one.code, *one.also)} <= set(catalogue())
