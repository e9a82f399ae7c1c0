"""Faults of worker pods: operator settings, topology files, missing pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynctl.wire.kubernetes.names import LABEL_KEY_ANNOTATION, MOUNT_PATH, TOPOLOGY_VOLUME
from tests.kube.actors import Simulation
from tests.kube.faults.fault import DECODE, Fault, main_of, relabel_node, relabel_pod, spoil_pod
from tests.kube.faults.fault import then_settle as settled
from tests.kube.objects import Component, Json
from tests.kube.objects.pods import POLICY_ENV

Spoil = Callable[[Json], Json]


def _spoiled(spoil: Spoil, pod: str = DECODE) -> Callable[[Simulation], object]:
    return settled(lambda sim: spoil_pod(sim, pod, spoil))


# -- injection -------------------------------------------------------------------------------------


def _older_than_policy(body: Json) -> Json:
    del body["metadata"]["annotations"]
    main = main_of(body)
    main["env"] = [one for one in main["env"] if one["name"] not in POLICY_ENV]
    return _without_mount(_without_volume(body))


def _without_volume(body: Json) -> Json:
    volumes = body["spec"]["volumes"]
    body["spec"]["volumes"] = [one for one in volumes if one["name"] != TOPOLOGY_VOLUME]
    return body


def _without_mount(body: Json) -> Json:
    main = main_of(body)
    main["volumeMounts"] = [one for one in main["volumeMounts"] if one["mountPath"] != MOUNT_PATH]
    return body


def _without_enforcement(body: Json) -> Json:
    main = main_of(body)
    main["env"] = [one for one in main["env"] if one["name"] != "DYN_KV_TRANSFER_ENFORCEMENT"]
    return body


def _without_domain(body: Json) -> Json:
    main = main_of(body)
    main["env"] = [one for one in main["env"] if one["name"] != "DYN_KV_TRANSFER_DOMAIN"]
    return body


def _preferred(body: Json) -> Json:
    for one in main_of(body)["env"]:
        if one["name"] == "DYN_KV_TRANSFER_ENFORCEMENT":
            one["value"] = "preferred"
    main_of(body)["env"].append({"name": "DYN_KV_TRANSFER_PREFERRED_WEIGHT", "value": "0.5"})
    return body


def _items(body: Json) -> list[Json]:
    [volume] = [one for one in body["spec"]["volumes"] if one["name"] == TOPOLOGY_VOLUME]
    found: list[Json] = volume["downwardAPI"]["items"]
    return found


def _other_path(body: Json) -> Json:
    _items(body)[0]["path"] = "zones"
    return body


def _other_field(body: Json) -> Json:
    _items(body)[0]["fieldRef"]["fieldPath"] = "metadata.labels['nvidia.com/selector']"
    return body


def _stray_file(body: Json) -> Json:
    field = {"apiVersion": "v1", "fieldPath": "metadata.labels['nvidia.com/selector']"}
    _items(body).append({"path": "rack", "fieldRef": field})
    return body


def _writable(body: Json) -> Json:
    for one in main_of(body)["volumeMounts"]:
        one.pop("readOnly", None)
    return body


def _no_annotation(sim: Simulation) -> None:
    sim.edit("Pod", DECODE, {"metadata": {"annotations": {LABEL_KEY_ANNOTATION: None}}})


def _other_annotation(sim: Simulation) -> None:
    sim.labels.on = False
    annotations = {LABEL_KEY_ANNOTATION: "example.com/zone"}
    sim.edit("Pod", DECODE, {"metadata": {"annotations": annotations}})


# -- labels and files ------------------------------------------------------------------------------


def _moved(sim: Simulation, lag: float | None) -> None:
    """The node is relabelled and the pod's label copied again; the file is as late as ``lag``."""
    sim.kubelet.lags[DECODE] = lag
    node = sim.pod(DECODE)["spec"]["nodeName"]
    for pod in [one for one in sim.pods() if sim.pod(one)["spec"]["nodeName"] == node]:
        sim.kubelet.lags.setdefault(pod, lag)
        relabel_pod(pod, None)(sim)
    relabel_node(node, "us-east-1c")(sim)


def _file_old(sim: Simulation) -> None:
    _moved(sim, None)
    sim.advance(600)


def _file_on_its_way(sim: Simulation) -> None:
    _moved(sim, 60.0)
    sim.advance(20)


def _late_label(sim: Simulation, after: float, lag: float | None, until: float) -> None:
    """A new pod whose label is copied ``after`` its start, and shown after ``lag``."""
    sim.labels.on = False
    sim.kubelet.lags[DECODE] = lag
    sim.recreate(DECODE)
    sim.advance(after)
    sim.labels.on = True
    sim.labels.restart()
    sim.advance(until - after)


def _label_missing_yet(sim: Simulation) -> None:
    sim.labels.on = False
    sim.recreate(DECODE)
    sim.advance(20)


# -- replicas --------------------------------------------------------------------------------------


def _unschedulable(sim: Simulation) -> None:
    for name in ("gpu-a-0", "gpu-a-1"):
        sim.edit("Node", name, {"spec": {"unschedulable": True}}, "")
    sim.recreate(DECODE)
    sim.settle()


def _incomplete(sim: Simulation) -> None:
    sim.operator.makes = lambda name: name != DECODE
    sim.recreate(DECODE)
    sim.settle()


def _no_workers(sim: Simulation) -> None:
    sim.operator.makes = lambda name: "frontend" in name
    sim.recreate(*(one for one in sim.pods() if "frontend" not in one))
    sim.settle()


def _rolling(sim: Simulation) -> None:
    sim.operator.may_replace = 3
    sim.regraph(lambda found: [replace(one, image="example/engine:2") for one in found])
    sim.settle()


def _multinode(found: list[Component]) -> list[Component]:
    return [*found, Component("big", "decode", nodes=2)]


def _apart(sim: Simulation) -> None:
    """Two ranks that only fit on one node of each zone."""
    for name in ("gpu-a-1", "gpu-b-1"):
        sim.edit("Node", name, {"spec": {"unschedulable": True}}, "")


_NOT_READY = ("DYT0113",)

POD_FAULTS = (
    Fault("annotation-removed", "DYT0402", settled(_no_annotation)),
    Fault("annotation-names-another-key", "DYT0402", settled(_other_annotation)),
    Fault(
        "pod-older-than-the-policy",
        "DYT0402",
        _spoiled(_older_than_policy),
        also=("DYT0903",),
    ),
    Fault("variable-missing", "DYT0501", _spoiled(_without_enforcement)),
    Fault("variable-differs", "DYT0501", _spoiled(_preferred)),
    Fault("domain-variable-missing", "DYT0501", _spoiled(_without_domain), also=_NOT_READY),
    Fault("file-of-another-name", "DYT0502", _spoiled(_other_path), also=("DYT0113", "DYT0505")),
    Fault(
        "file-of-another-label",
        "DYT0502",
        _spoiled(_other_field),
        also=("DYT0907",),
    ),
    Fault("volume-not-mounted", "DYT0502", _spoiled(_without_mount), also=_NOT_READY),
    Fault("mounted-writable", "DYT0502", _spoiled(_writable)),
    Fault("stray-file", "DYT0505", _spoiled(_stray_file)),
    Fault(
        "label-set-by-hand",
        "DYT0404",
        settled(relabel_pod(DECODE, "us-east-1b")),
        also=("DYT0802",),
    ),
    Fault("label-missing-yet", "DYT0411", _label_missing_yet, also=("DYT0113",)),
    Fault("file-older-than-label", "DYT0504", _file_old),
    Fault("file-on-its-way", "DYT0507", _file_on_its_way),
    Fault(
        "file-empty",
        "DYT0503",
        lambda sim: _late_label(sim, 5, None, 130),
        also=_NOT_READY,
    ),
    Fault(
        "worker-gave-up-and-waits",
        "DYT0601",
        lambda sim: _late_label(sim, 5, 65, 71),
        also=_NOT_READY,
    ),
    Fault("worker-gave-up-and-recovered", "DYT0603", lambda sim: _late_label(sim, 5, 35, 600)),
    Fault("pod-not-scheduled", "DYT0410", _unschedulable, also=_NOT_READY),
    Fault("fewer-pods-than-replicas", "DYT0409", _incomplete, also=_NOT_READY),
    Fault("no-worker-pods", "DYT0401", _no_workers, also=_NOT_READY),
    Fault("rolling-update", "DYT0408", _rolling),
    Fault(
        "replica-across-zones",
        "DYT0407",
        prepare=_apart,
        start={"parts": _multinode},
    ),
)
