"""Makes the document of the simulated clusters, `dynctl/adapters/kubernetes/demo_cluster.json`.

The living cluster of the tests is healthy, or has a trouble done to it; what follows from a trouble
follows by itself. ``python -m tests.kube.demo_cluster`` writes the file.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dynctl.adapters.kubernetes import demo_cluster
from dynctl.adapters.kubernetes.from_options import open_cluster
from dynctl.base.options import GlobalOptions
from dynctl.health.facts import Unread
from dynctl.manifests.graphs import GRAPH_GROUP, GRAPHS_RESOURCE
from dynctl.verify.gather.cluster import Wanted, gather
from dynctl.verify.gather.pods import Sampling
from dynctl.wire.kubernetes.names import RECREATE, STRATEGY_ANNOTATION
from tests.kube.actors import Simulation, living, nothing
from tests.kube.deployment import is_worker
from tests.kube.faults import FAULTS, fault_of
from tests.kube.faults.fault import main_of
from tests.kube.objects import Json, key_of, stamp, uid_of
from tests.kube.objects.discovery import MODEL
from tests.kube.objects.events import event
from tests.kube.objects.pods import condition

FILE: Final = Path(demo_cluster.__file__).with_name("demo_cluster.json")
_SIZE: Final[Mapping[str, Any]] = {"prefill": 1, "decode": 3}
"""Workers of each zone."""
_DECODE: Final = "my-llm-decode-a-0"
_ALL_DECODE: Final = tuple(f"my-llm-decode-a-{number}" for number in range(3))
_NODE: Final = "gpu-b-1"
_PLURALS: Final = {
    "Node": "nodes",
    "Deployment": "deployments",
    "DynamoGraphDeployment": "dynamographdeployments",
    "Pod": "pods",
    "Event": "events",
    "EndpointSlice": "endpointslices",
    "DynamoWorkerMetadata": "dynamoworkermetadatas",
}
_CRD: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{GRAPHS_RESOURCE}"
_PATHS: Final = (
    *("/version", _CRD),
    *(f"/apis/{GRAPH_GROUP}/{version}" for version in ("v1alpha1", "v1beta1")),
)
_ANSWERED: Final = (
    *("/health", "/live", "/metrics", "/openapi.json", "/busy_threshold", "/v1/models"),
    f"/v1/models/{MODEL.replace('/', '%2F')}/ready",
)
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NETWORK: Final = ("10.0.0.", "192.0.2.")
"""The addresses of pods, and those in their place: no host has them (RFC 5737)."""


# -- troubles --------------------------------------------------------------------------------------


def _stop(sim: Simulation, pod: str, reason: str, message: str, **container: Any) -> None:
    """The engine of a pod does not run, and its worker is not registered."""
    body, now = sim.pod(pod), sim.clock.now
    kept = [one for one in body["status"]["conditions"] if not one["type"].endswith("Ready")]
    ready = [condition(kind, "False", now - 300) for kind in ("ContainersReady", "Ready")]
    (before,) = body["status"]["containerStatuses"]
    stopped = {**before, "ready": False, "started": False, **container}
    status = {"conditions": [*kept, *ready], "containerStatuses": [stopped]}
    sim.edit("Pod", pod, {"status": status})
    with suppress(KeyError):
        sim.store.delete("DynamoWorkerMetadata", pod, "prod")
    sim.store.create(event(body, reason, message, at=now - 20, component="kubelet"))


def _crash(sim: Simulation) -> None:
    """A component is updated under Recreate to an engine that ends at once."""
    strategy = {STRATEGY_ANNOTATION: RECREATE}
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": stamp(sim.clock.now - 40)}
    for pod in _ALL_DECODE:
        sim.edit("Pod", pod, {"metadata": {"annotations": strategy}})
        _stop(
            sim,
            pod,
            "BackOff",
            f"Back-off restarting failed container main in pod {pod}",
            restartCount=9,
            state={"waiting": {"reason": "CrashLoopBackOff"}},
            lastState={"terminated": ended},
        )
    sim.settle()
    for pod in _ALL_DECODE:
        sim.server.logs["prod", pod, "main", False] = _CRASHED
        sim.server.logs["prod", pod, "main", True] = _CRASHED


_CRASHED: Final = "vllm serve: error: unrecognized arguments: --kv-transfer-confg\n"


def _miss_image(sim: Simulation) -> None:
    image = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.l"

    def pull(body: Json) -> Json:
        if body["metadata"]["name"] == _DECODE:
            main_of(body)["image"] = image
        return body

    sim.operator.mutate = pull
    sim.recreate(_DECODE)
    sim.settle()
    sim.advance(600)
    _stop(
        sim,
        _DECODE,
        "Failed",
        f'Failed to pull image "{image}": not found',
        restartCount=0,
        state={"waiting": {"reason": "ImagePullBackOff"}},
    )
    sim.edit("Pod", _DECODE, {"status": {"phase": "Pending", "podIP": None, "podIPs": None}})
    sim.settle()


def _lack_room(sim: Simulation) -> None:
    fault_of(FAULTS, "pod-not-scheduled").inject(sim)
    for node in ("gpu-a-0", "gpu-a-1"):
        sim.edit("Node", node, {"spec": {"unschedulable": None}}, "")
    sim.scheduler.on = False
    sim.advance(600)
    text = (
        "0/4 nodes are available: 2 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's "
        "node affinity/selector."
    )
    sim.store.create(
        event(sim.pod(_DECODE), "FailedScheduling", text, at=sim.clock.now - 20, component="sched")
    )


def _exceed_quota(sim: Simulation) -> None:
    sim.operator.makes = lambda name: name != _DECODE
    gone = sim.pod(_DECODE)
    sim.recreate(_DECODE)
    sim.settle()
    sim.advance(600)
    replica_set = "my-llm-decode-a-7c9f6d5b8"
    text = (
        f'Error creating: pods "{replica_set}-x2x7p" is forbidden: exceeded quota: gpus, '
        "requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=7, "
        "limited: requests.nvidia.com/gpu=7"
    )
    body = event(gone, "FailedCreate", text, at=sim.clock.now - 20, component="replicaset")
    uid = uid_of("ReplicaSet", "prod", replica_set)
    about = {"kind": "ReplicaSet", "name": replica_set, "uid": uid, "apiVersion": "apps/v1"}
    sim.store.create({**body, "involvedObject": {**body["involvedObject"], **about}})


def _stop_kubelet(sim: Simulation) -> None:
    """The node is unknown after 40 s; its pods are not ready, and stay for five minutes."""
    now = sim.clock.now
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    unknown["lastTransitionTime"] = stamp(now - 60)
    sim.edit("Node", _NODE, {"status": {"conditions": [unknown]}}, "")
    for pod in _pods_on(sim, _NODE):
        conditions = [
            condition("Ready", "False", now - 60) if one["type"] == "Ready" else one
            for one in sim.pod(pod)["status"]["conditions"]
        ]
        sim.edit("Pod", pod, {"status": {"conditions": conditions}})
    sim.settle()


def _pods_on(sim: Simulation, node: str) -> list[str]:
    return [pod for pod in sim.pods() if sim.pod(pod)["spec"].get("nodeName") == node]


def _delete_role(sim: Simulation) -> None:
    fault_of(FAULTS, "workers-may-not-register").inject(sim)


def _miss_service(sim: Simulation) -> None:
    sim.slices.on = False
    sim.store.delete("EndpointSlice", "my-llm-decode-a-0", "prod")
    sim.settle()
    sim.advance(600)


def _fault(name: str) -> Callable[[Simulation], object]:
    return fault_of(FAULTS, name).inject


TROUBLES: Final[Mapping[str, Callable[[Simulation], object]]] = {
    "relabelled-node": _fault("node-relabelled-after-start"),
    "missing-label": _fault("copied-label-removed-by-hand"),
    "wrong-field-path": _fault("file-of-another-label"),
    "crash-loop": _crash,
    "missing-image": _miss_image,
    "no-room": _lack_room,
    "quota": _exceed_quota,
    "stopped-kubelet": _stop_kubelet,
    "deleted-role": _delete_role,
    "missing-service": _miss_service,
}


# -- the document ----------------------------------------------------------------------------------


def document() -> Json:
    """The healthy cluster, and each trouble as a merge patch of it."""
    healthy = _state(nothing)
    troubles = {name: _difference(healthy, _state(inject)) for name, inject in TROUBLES.items()}
    return {"healthy": healthy, "troubles": troubles}


def _state(inject: Callable[[Simulation], object]) -> Json:
    with living(**_SIZE) as sim, tempfile.TemporaryDirectory() as directory:
        inject(sim)
        options = GlobalOptions(kubeconfig=sim.viewer_kubeconfig(Path(directory) / "kubeconfig"))
        cluster = open_cluster(options)
        try:
            paths = {path: cluster.get(path) for path in _PATHS}
            groups = [one for one in cluster.get("/apis")["groups"] if one["name"] == GRAPH_GROUP]
            paths["/apis"] = {"kind": "APIGroupList", "groups": groups}
            versions = paths[_CRD]["spec"]["versions"]
            paths[_CRD] = {"spec": {"versions": [_schema_of(one) for one in versions]}}
            facts = gather(cluster, Wanted("prod", (), Sampling.NONE, Sampling.NONE)).cluster
        finally:
            cluster.close()
        assert facts is not None
        silent = [_NODE] if inject is _stop_kubelet else []
        (view,) = sim.frontends.views.values()
        answers = {path: view.answer("GET", path) for path in _ANSWERED}
        state = {
            "now": sim.clock.now,
            "paths": paths,
            "plurals": [*_PLURALS.values()],
            "objects": dict(_objects(sim)),
            "files": {pod: files for (_, pod), files in sim.files().items()},
            "logs": {
                f"{pod}/previous" if previous else pod: text
                for (_, pod, _, previous), text in sim.server.logs.items()
            },
            "frontend": {
                path: json.loads(answer.body) if answer.kind == "application/json" else answer.body
                for path, answer in answers.items()
            },
            "denied": sorted(
                f"{account.user} {review.verb} {review.resource}"
                for account in (*facts.operator_accounts, *facts.worker_accounts)
                if not isinstance(account.allowed, Unread)
                for review, allowed in account.allowed.items()
                if not allowed
            ),
            "silent": silent,
        }
    found: Json = json.loads(json.dumps(_without_nulls(state)).replace(*_NETWORK))
    return found


def _schema_of(version: Json) -> Json:
    return {name: version[name] for name in ("name", "served", "schema")}


def _objects(sim: Simulation) -> Iterator[tuple[str, Json]]:
    for kind, plural in _PLURALS.items():
        for body in sim.hands().list(kind):
            namespace, name = key_of(body)
            yield f"{plural}/{namespace}/{name}", _pruned(body)


def _pruned(body: Json) -> Json:
    """Without what no reader needs, and without the address of a frontend: dynctl would try it."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
    labels = [
        entry
        for entry in metadata.pop("managedFields", ())
        if "f:labels" in entry["fieldsV1"].get("f:metadata", {})
    ]
    if labels and body["kind"] == "Pod":
        metadata["managedFields"] = [
            {**entry, "fieldsV1": {"f:metadata": {"f:labels": _labels_of(entry)}}}
            for entry in labels
        ]
    body = {**body, "metadata": metadata}
    if body["kind"] == "Pod" and not is_worker(body):
        body["status"] = {
            key: value for key, value in body["status"].items() if not key.startswith("podIP")
        }
    return body


def _labels_of(entry: Json) -> Json:
    labels: Json = entry["fieldsV1"]["f:metadata"]["f:labels"]
    return labels


def _without_nulls(value: Any) -> Any:
    """A merge patch cannot set null."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list | tuple) else value


def _difference(before: Json, after: Json) -> Json:
    """The merge patch (RFC 7386) that makes ``after`` of ``before``."""
    patch: Json = dict.fromkeys(before.keys() - after.keys())
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            if inner := _difference(before[key], value):
                patch[key] = inner
        elif key not in before or before[key] != value:
            patch[key] = value
    return dict(sorted(patch.items()))


def text() -> str:
    """The document as the file has it: an object of the cluster, or a trouble's part, a line.

    Uids are random; in the file they are numbered in their order.
    """
    written = _lines(document(), 3) + "\n"
    uids = dict.fromkeys(_UID.findall(written))
    numbers = {uid: f"00000000-0000-4000-8000-{at:012}" for at, uid in enumerate(uids)}
    return _UID.sub(lambda match: numbers[match[0]], written)


def _lines(value: Any, depth: int) -> str:
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value)
    rows = (f"{json.dumps(key)}: {_lines(part, depth - 1)}" for key, part in value.items())
    return "{\n" + ",\n".join(rows) + "\n}"


if __name__ == "__main__":
    FILE.write_text(text())
