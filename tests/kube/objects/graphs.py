"""DynamoGraphDeployments in both served versions, written and read back.

The product has a reader of its own; the actors use this one, so that the two check each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.kube.objects.meta import Json, metadata
from tests.kube.objects.nodes import ZONE

Version = Literal["v1alpha1", "v1beta1"]
IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1"


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a graph. ``zone`` pins it by nodeSelector; ``nodes`` > 1 is multinode.

    ``labels``: of the pod template. ``sub_type`` is said in v1alpha1 only.
    """

    name: str
    type: str
    replicas: int = 1
    zone: str = ""
    zone_key: str = ZONE
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    container: str = "main"
    image: str = IMAGE
    nodes: int = 1
    sub_type: str = ""

    @property
    def is_worker(self) -> bool:
        return self.type in ("worker", "prefill", "decode")


def graph(
    namespace: str,
    name: str,
    components: Sequence[Component],
    *,
    policy: Mapping[str, Any] | None = None,
    version: Version = "v1beta1",
    annotations: Mapping[str, str] | None = None,
    created: float | None = None,
    state: str = "successful",
) -> Json:
    """A graph. With ``created`` it has a uid and the status that the operator writes."""
    spec: Json = {"backendFramework": "vllm"}
    if version == "v1beta1":
        spec["components"] = [_beta(one) for one in components]
    else:
        spec["services"] = {one.name: _alpha(one) for one in components}
    if policy is not None:
        spec["experimental"] = {"kvTransferPolicy": dict(policy)}
    body: Json = {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata(
            "DynamoGraphDeployment", namespace, name, annotations=annotations, created=created
        ),
        "spec": spec,
    }
    if created is not None:
        body["metadata"]["generation"] = 1
        body["status"] = graph_status(body, state)
    return body


def graph_status(body: Mapping[str, Any], state: str) -> Json:
    """What the operator reports; ``state`` is initializing, pending, successful or failed."""
    ready = state == "successful"
    reason = "all_resources_are_ready" if ready else "some_resources_are_not_ready"
    generation = body["metadata"].get("generation", 1)
    return {
        "state": state,
        "observedGeneration": generation,
        "conditions": [
            {
                "type": "Ready",
                "status": "True" if ready else "False",
                "reason": reason,
                "message": "All resources are ready" if ready else "Some resources are not ready",
                "observedGeneration": generation,
                "lastTransitionTime": body["metadata"].get("creationTimestamp"),
            }
        ],
    }


def policy_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``spec.experimental.kvTransferPolicy``; None where there is none."""
    policy: Mapping[str, Any] | None = body["spec"].get("experimental", {}).get("kvTransferPolicy")
    return policy


def components_of(body: Mapping[str, Any]) -> list[Component]:
    """The components of a graph, as written by :func:`graph` in either version."""
    spec = body["spec"]
    if "components" in spec:
        return [_from_beta(one) for one in spec["components"]]
    return [_from_alpha(name, one) for name, one in spec.get("services", {}).items()]


def _container(one: Component) -> Json:
    body: Json = {"name": one.container, "image": one.image}
    if one.args:
        body["args"] = list(one.args)
    if one.env:
        body["env"] = [{"name": key, "value": value} for key, value in one.env.items()]
    return body


def _shared(one: Component) -> Json:
    body: Json = {"replicas": one.replicas}
    if one.nodes > 1:
        body["multinode"] = {"nodeCount": one.nodes}
    return body


def _beta(one: Component) -> Json:
    pod: Json = {"containers": [_container(one)]}
    if one.zone:
        pod["nodeSelector"] = {one.zone_key: one.zone}
    template: Json = {"spec": pod}
    if one.labels:
        template["metadata"] = {"labels": dict(one.labels)}
    return {"name": one.name, "type": one.type, **_shared(one), "podTemplate": template}


def _alpha(one: Component) -> Json:
    worker = one.type in ("prefill", "decode")
    body: Json = {"componentType": "worker" if worker else one.type, **_shared(one)}
    if worker or one.sub_type:
        body["subComponentType"] = one.sub_type or one.type
    container = {key: value for key, value in _container(one).items() if key != "name"}
    body["extraPodSpec"] = {"mainContainer": container}
    if one.zone:
        body["extraPodSpec"]["nodeSelector"] = {one.zone_key: one.zone}
    if one.labels:
        body["labels"] = dict(one.labels)
    return body


def _from_beta(body: Mapping[str, Any]) -> Component:
    template = body.get("podTemplate", {})
    return _read(
        body["name"],
        body,
        body["type"],
        "",
        template.get("spec", {}),
        template.get("spec", {}).get("containers", [{}])[0],
        template.get("metadata", {}).get("labels", {}),
    )


def _from_alpha(name: str, body: Mapping[str, Any]) -> Component:
    pod = body.get("extraPodSpec", {})
    return _read(
        name,
        body,
        body["componentType"],
        body.get("subComponentType", ""),
        pod,
        pod.get("mainContainer", {}),
        body.get("labels", {}),
    )


def _read(
    name: str,
    body: Mapping[str, Any],
    kind: str,
    sub_type: str,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    labels: Mapping[str, str],
) -> Component:
    selector = next(iter(pod.get("nodeSelector", {}).items()), (ZONE, ""))
    return Component(
        name,
        kind,
        body.get("replicas", 1),
        zone=selector[1],
        zone_key=selector[0],
        args=tuple(container.get("args", ())),
        env={one["name"]: one.get("value", "") for one in container.get("env", ())},
        labels=labels,
        container=container.get("name", "main"),
        image=container.get("image", IMAGE),
        nodes=body.get("multinode", {}).get("nodeCount", 1),
        sub_type=sub_type,
    )
