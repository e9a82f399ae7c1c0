"""A healthy deployment over zones as JSON: the same state that the actors create.

It scales to thousands of nodes and pods. Tests of pure checks start with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dynctl.wire.kubernetes import names
from tests.kube import objects
from tests.kube.objects import Component, Json
from tests.kube.objects import logs as logs_of
from tests.kube.objects.nodes import RACK

NOW: Final = 1_795_262_400.0
"""2026-11-21T12:00:00Z. Everything healthy is an hour old by then."""
_AGE_S: Final = 3600.0
LEVELS: Final = (("zone", objects.ZONE), ("rack", RACK))
"""Of the Grove topology, where there is one."""
TOPOLOGY_NAME: Final = "cluster-levels"


def policy(
    *, enforcement: str = "required", weight: float | None = None, grove: bool = False
) -> Json:
    """The policy of the healthy deployment: domain zone."""
    source = {"clusterTopologyName": TOPOLOGY_NAME} if grove else {"labelKey": objects.ZONE}
    found: Json = {**source, "domain": "zone", "enforcement": enforcement}
    if weight is not None:
        found["preferredWeight"] = weight
    return found


def short_names(zones: Sequence[str]) -> dict[str, str]:
    """Zone -> its suffix: ``a`` and ``b`` of us-east-1a and us-east-1b."""
    columns = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*zones, strict=False))
    shared = len([*columns]) if len(zones) > 1 else 0
    return {zone: (zone[shared:] or zone).strip("-").lower() for zone in zones}


def components(
    zones: Sequence[str],
    *,
    prefill: int = 2,
    decode: int = 4,
    frontends: int = 1,
    pinned: bool = True,
) -> list[Component]:
    """``prefill`` and ``decode`` workers in each zone; one component a zone where pinned."""
    found = [Component("frontend", "frontend", frontends, env={"DYN_ROUTER_MODE": "kv"})]
    short = short_names(zones)
    for role, replicas in (("prefill", prefill), ("decode", decode)):
        args = ("python3", "-m", "dynamo.vllm", "--disaggregation-mode", role)
        if pinned:
            found += [
                Component(f"{role}-{short[zone]}", role, replicas, zone=zone, args=args)
                for zone in zones
            ]
        else:
            found.append(Component(role, role, replicas * len(zones), args=args))
    return found


def nodes(zones: Sequence[str], each: int, *, created: float | None = None) -> list[Json]:
    """``each`` nodes a zone, two of them a rack, called ``gpu-a-0`` and so on."""
    short = short_names(zones)
    return [
        objects.node(
            f"gpu-{short[zone]}-{place}",
            {RACK: f"{zone}-r{place // 2}"},
            zone=zone,
            created=created,
        )
        for zone in zones
        for place in range(each)
    ]


def healthy(
    *,
    namespace: str = "prod",
    name: str = "my-llm",
    zones: Sequence[str] = ("us-east-1a", "us-east-1b"),
    prefill: int = 2,
    decode: int = 4,
    nodes_per_zone: int = 2,
    frontends: int = 1,
    enforcement: str = "required",
    weight: float | None = None,
    grove: bool = False,
    discovery: str = "kubernetes",
    pinned: bool = True,
    version: objects.Version = "v1beta1",
    now: float = NOW,
) -> list[Json]:
    """All objects of a healthy deployment. ``prefill`` and ``decode`` workers in each zone.

    ``weight`` None is 0.85 where the policy is preferred. ``discovery``: kubernetes or etcd; with
    etcd there are neither slices nor metadata.
    """
    start = now - _AGE_S
    if enforcement == "preferred" and weight is None:
        weight = 0.85
    parts = components(zones, prefill=prefill, decode=decode, frontends=frontends, pinned=pinned)
    body = objects.graph(
        namespace,
        name,
        parts,
        policy=policy(enforcement=enforcement, weight=weight, grove=grove),
        version=version,
        created=start - 10,
    )
    machines = nodes(zones, nodes_per_zone, created=start - 86_400)
    found = [
        *machines,
        *objects.operator_objects(created=start - 43_200),
        body,
        *objects.worker_accounts(namespace, name, created=start),
    ]
    if grove:
        found.append(objects.cluster_topology(LEVELS, name=TOPOLOGY_NAME, created=start - 43_200))
        found.append(objects.pod_clique_set(namespace, name, created=start))
    return found + _running(body, machines, grove, discovery, start)


def scaled(*, nodes: int = 2000, workers: int = 1000, now: float = NOW) -> list[Json]:
    """The same, large: two zones, a third of the workers prefill."""
    prefill = workers // 6
    return healthy(
        prefill=prefill,
        decode=workers // 2 - prefill,
        nodes_per_zone=nodes // 2,
        frontends=4,
        now=now,
    )


def _running(
    body: Json, machines: Sequence[Json], grove: bool, discovery: str, start: float
) -> list[Json]:
    levels = LEVELS if grove else ()
    result = objects.policy_of(body)
    sources = objects.label_sources(result, levels)
    by_zone: dict[str, list[Json]] = {}
    for machine in machines:
        by_zone.setdefault(machine["metadata"]["labels"][objects.ZONE], []).append(machine)
    pods: list[Json] = []
    slices: list[Json] = []
    metadata: list[Json] = []
    for component in objects.components_of(body):
        places = by_zone.get(component.zone) or _alternating(by_zone)
        mine: list[Json] = []
        for number in range(component.replicas):
            machine = places[number % len(places)]
            pod = objects.pod(
                body,
                component,
                number,
                levels=levels,
                discovery=discovery,
                created=start,
                grove=grove,
            )
            pod = objects.bound(pod, machine["metadata"]["name"], start + 1)
            if component.is_worker:
                labels = machine["metadata"]["labels"]
                values = {one.pod_key: labels[one.node_key] for one in sources}
                pod = objects.labelled(pod, values, start + 2)
            place = len(pods) + len(mine) + 10
            pod = objects.running(pod, f"10.0.{place // 250}.{place % 250 + 1}", start + 3)
            mine.append(pod)
            if component.is_worker and discovery == "kubernetes":
                metadata.append(registration(pod, created=start + 12))
        pods += mine
        if discovery == "kubernetes":
            slices += [
                objects.endpoint_slice(
                    body["metadata"]["namespace"],
                    body["metadata"]["name"],
                    component.name,
                    mine[begin : begin + 100],
                    number=begin // 100,
                    created=start,
                )
                for begin in range(0, len(mine), 100)
            ]
    return [*pods, *slices, *metadata]


def _alternating(by_zone: Mapping[str, Sequence[Json]]) -> list[Json]:
    """The nodes, one of each zone in turn."""
    return [machine for row in zip(*by_zone.values(), strict=True) for machine in row]


# -- what is not an object: files, logs, registrations ---------------------------------------------


def is_worker(pod: Mapping[str, Any]) -> bool:
    kind = pod["metadata"].get("labels", {}).get(names.COMPONENT_TYPE_LABEL)
    return kind in ("worker", "prefill", "decode")


def role_of(pod: Mapping[str, Any]) -> str:
    """prefill, decode or aggregated, by the pod's labels, else by its arguments."""
    labels = pod["metadata"]["labels"]
    kind = labels.get(names.SUB_COMPONENT_TYPE_LABEL) or labels[names.COMPONENT_TYPE_LABEL]
    args = [*pod["spec"]["containers"][0].get("args", ()), "", ""]
    mode = args[args.index("--disaggregation-mode") + 1] if "--disaggregation-mode" in args else ""
    return next((one for one in (kind, mode) if one in ("prefill", "decode")), "aggregated")


def env_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """The plain variables of the first container."""
    entries = pod["spec"]["containers"][0].get("env", ())
    return {one["name"]: one["value"] for one in entries if "value" in one}


def projected(pod: Mapping[str, Any]) -> dict[str, str]:
    """The topology files that the kubelet projects now; a label that is missing is an empty one."""
    labels = pod["metadata"].get("labels", {})
    found = {}
    for volume in pod["spec"].get("volumes", ()):
        if volume["name"] == names.TOPOLOGY_VOLUME:
            for item in volume.get("downwardAPI", {}).get("items", ()):
                key = item["fieldRef"]["fieldPath"].partition("['")[2].removesuffix("']")
                found[item["path"]] = labels.get(key, "")
    return found


def registration(pod: Mapping[str, Any], *, created: float | None = None) -> Json:
    """The metadata that a worker publishes which starts with the files as they are now."""
    env = env_of(pod)
    weight = env.get("DYN_KV_TRANSFER_PREFERRED_WEIGHT")
    on = env.get("DYN_TOPOLOGY_ENABLED") == "true"
    return objects.worker_metadata(
        pod,
        role_of(pod),
        domains={k: v for k, v in sorted(projected(pod).items()) if v} if on else None,
        transfer_domain=env.get("DYN_KV_TRANSFER_DOMAIN"),
        enforcement=env.get("DYN_KV_TRANSFER_ENFORCEMENT", "required"),
        weight=None if weight is None else float(weight),
        created=created,
    )


def files(found: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, str]]:
    """Pod -> file name -> content below the topology mount, of all worker pods that have one."""
    return {
        objects.key_of(one): projected(one)
        for one in found
        if one["kind"] == "Pod" and is_worker(one) and projected(one)
    }


def start_log(config: Mapping[str, Any], at: float) -> str:
    """The log of a worker until it serves; without the topology line if the card has none."""
    line = logs_of.configured(at, config) if config.get("topology_domains") else ""
    return logs_of.head(at) + line + logs_of.registered(at)


def card_config(metadata: Mapping[str, Any]) -> Json:
    """The runtime_config of a DynamoWorkerMetadata."""
    card = next(iter(metadata["spec"]["data"]["model_cards"].values()))
    found: Json = card["card_json"]["runtime_config"]
    return found


def logs(found: Iterable[Mapping[str, Any]], *, now: float = NOW) -> dict[tuple[str, str], str]:
    """Pod -> the beginning of its log, of all worker pods: as they registered, else as they are."""
    items = list(found)
    result = {
        objects.key_of(one): card_config(one)
        for one in items
        if one["kind"] == "DynamoWorkerMetadata"
    }
    return {
        objects.key_of(one): start_log(
            result.get(objects.key_of(one)) or card_config(registration(one)), now - _AGE_S + 5
        )
        for one in items
        if one["kind"] == "Pod" and is_worker(one) and one["status"].get("podIP")
    }
