"""The CustomResourceDefinitions of Dynamo and Grove, as far as dynctl reads them.

Modelled from the operators' sources: what is below a component or a PodCliqueSet is kept whole,
without a schema. The transfer policy is exact, its CEL rules included (of 1.2, the wording of the
rule that wants labelKey is not known).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tests.kube.api_server import ApiServer

Json = dict[str, Any]

GRAPHS = "dynamographdeployments.nvidia.com"

_ANYTHING: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_ANYTHINGS: Json = {"type": "array", "items": _ANYTHING}
_STRINGS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT: Json = {"type": "integer", "format": "int32", "minimum": 0}
LABEL_KEY = (
    r"^(([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*/)?"
    r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)$"
)
_GROVE_LABEL_KEY = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)$"
)


def _definition(
    group: str,
    kind: str,
    plural: str,
    versions: Sequence[Json],
    *,
    short_names: Sequence[str] = (),
    scope: Literal["Namespaced", "Cluster"] = "Namespaced",
) -> Json:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": list(short_names),
            },
            "scope": scope,
            "versions": copy.deepcopy(list(versions)),
        },
    }


def _version(
    name: str,
    spec: Json,
    *,
    storage: bool = True,
    status: bool = True,
) -> Json:
    properties: Json = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
    }
    version: Json = {"name": name, "served": True, "storage": storage}
    if status:
        properties["status"] = _ANYTHING
        version["subresources"] = {"status": {}}
    version["schema"] = {"openAPIV3Schema": {"type": "object", "properties": properties}}
    return version


def _policy(*, cluster_topology: bool) -> Json:
    """``spec.experimental.kvTransferPolicy``; without ``cluster_topology`` as 1.2 has it."""
    properties: Json = {
        "labelKey": {
            "type": "string",
            "minLength": 1,
            "maxLength": 317,
            "pattern": LABEL_KEY,
            "x-kubernetes-validations": [
                {
                    "rule": "!self.contains('/') || self.split('/')[0].size() <= 253",
                    "message": "labelKey prefix must be 253 characters or less",
                }
            ],
        },
        "domain": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
        "enforcement": {
            "type": "string",
            "enum": ["required", "preferred"],
            "default": "required",
        },
        "preferredWeight": {"type": "number", "format": "float", "minimum": 0, "maximum": 1},
    }
    source = {"rule": "has(self.labelKey)", "message": "labelKey is required"}
    if cluster_topology:
        properties["clusterTopologyName"] = {"type": "string", "minLength": 1}
        source = {
            "rule": "has(self.labelKey) != has(self.clusterTopologyName)",
            "message": "exactly one of labelKey or clusterTopologyName is required",
        }
    return {
        "type": "object",
        "required": ["domain"],
        "properties": properties,
        "x-kubernetes-validations": [
            source,
            {
                "rule": "self.enforcement != 'preferred' || has(self.preferredWeight)",
                "message": "preferredWeight is required when enforcement is preferred",
            },
            {
                "rule": "!has(self.preferredWeight) || self.enforcement == 'preferred'",
                "message": "preferredWeight may only be set when enforcement is preferred",
            },
        ],
    }


def _component(properties: Json, required: Sequence[str] = ()) -> Json:
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "required": list(required),
        "properties": {
            "replicas": _COUNT,
            "multinode": {"type": "object", "properties": {"nodeCount": _COUNT}},
            "topologyConstraint": _ANYTHING,
        }
        | properties,
    }


def _graph_spec(components: Json, environment: str, experimental: Json) -> Json:
    return {
        "type": "object",
        "properties": {
            "backendFramework": {"type": "string", "enum": ["sglang", "vllm", "trtllm"]},
            "annotations": _STRINGS,
            "labels": _STRINGS,
            environment: _ANYTHINGS,
            "pvcs": _ANYTHINGS,
            "restart": _ANYTHING,
            "topologyConstraint": _ANYTHING,
            "experimental": experimental,
        }
        | components,
    }


def graph_crd(policy: bool = True, *, cluster_topology: bool = True) -> Json:
    """DynamoGraphDeployment. Without ``policy``: older than the operator, so that the API server
    prunes ``spec.experimental.kvTransferPolicy`` without a word. Without ``cluster_topology``: as
    of 1.2, where only labelKey is known."""
    known = {"kvTransferPolicy": _policy(cluster_topology=cluster_topology)} if policy else {}
    experimental: Json = {"type": "object", "properties": known}
    alpha = _component(
        {"componentType": {"type": "string"}, "subComponentType": {"type": "string"}}
    )
    services = {"type": "object", "maxProperties": 25, "additionalProperties": alpha}
    kinds = ["frontend", "worker", "prefill", "decode", "planner", "epp"]
    beta = _component(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 63},
            "type": {"type": "string", "enum": kinds},
            "podTemplate": _ANYTHING,
        },
        ["name"],
    )
    components = {"type": "array", "maxItems": 25, "items": beta}
    return _definition(
        "nvidia.com",
        "DynamoGraphDeployment",
        "dynamographdeployments",
        [
            _version("v1alpha1", _graph_spec({"services": services}, "envs", experimental)),
            _version(
                "v1beta1",
                _graph_spec({"components": components}, "env", experimental),
                storage=False,
            ),
        ],
        short_names=["dgd"],
    )


def worker_metadata_crd() -> Json:
    """DynamoWorkerMetadata: ``spec.data`` is whatever the worker publishes; no status."""
    spec = {"type": "object", "required": ["data"], "properties": {"data": _ANYTHING}}
    return _definition(
        "nvidia.com",
        "DynamoWorkerMetadata",
        "dynamoworkermetadatas",
        [_version("v1alpha1", spec, status=False)],
        short_names=["dwm"],
    )


def cluster_topology_crd(
    kind: Literal["ClusterTopologyBinding", "ClusterTopology"] = "ClusterTopologyBinding",
) -> Json:
    """Grove's levels, under the name of since May 2026 or the one before."""
    level = {
        "type": "object",
        "required": ["domain", "key"],
        "properties": {
            "domain": {
                "type": "string",
                "minLength": 1,
                "maxLength": 63,
                "pattern": "^[a-z][a-z0-9-]*$",
            },
            "key": {"type": "string", "minLength": 1, "maxLength": 63, "pattern": _GROVE_LABEL_KEY},
        },
    }
    reference = {
        "type": "object",
        "required": ["schedulerName", "topologyReference"],
        "properties": {
            "schedulerName": {"type": "string"},
            "topologyReference": {"type": "string"},
        },
    }
    spec = {
        "type": "object",
        "required": ["levels"],
        "properties": {
            "levels": {"type": "array", "minItems": 1, "items": level},
            "schedulerTopologyBindings": {"type": "array", "items": reference},
        },
    }
    plural = {
        "ClusterTopologyBinding": "clustertopologybindings",
        "ClusterTopology": "clustertopologies",
    }[kind]
    return _definition(
        "grove.io",
        kind,
        plural,
        [_version("v1alpha1", spec)],
        short_names=["ct"],
        scope="Cluster",
    )


def pod_clique_set_crd() -> Json:
    """PodCliqueSet, without a schema."""
    return _definition(
        "grove.io",
        "PodCliqueSet",
        "podcliquesets",
        [_version("v1alpha1", _ANYTHING)],
        short_names=["pcs"],
    )


def install(server: ApiServer, *definitions: Json) -> None:
    """Create these definitions, or all four of above, and the graphs' conversion."""
    for definition in definitions or (
        graph_crd(),
        worker_metadata_crd(),
        cluster_topology_crd(),
        pod_clique_set_crd(),
    ):
        server.store.create(definition)
    server.convert[GRAPHS] = convert_graph


def convert_graph(body: Json, api_version: str) -> Json:
    """The operator's conversion webhook in small: services as a map and components as a list.

    For ``ApiServer.convert[GRAPHS]``. It keeps what dynctl reads; a real webhook keeps more.
    """
    spec = dict(body.get("spec") or {})
    if api_version.endswith("/v1alpha1") and "components" in spec:
        spec["services"] = {
            component["name"]: _service_of(component) for component in spec.pop("components")
        }
        _rename(spec, "env", "envs")
    elif api_version.endswith("/v1beta1") and "services" in spec:
        spec["components"] = [
            _component_of(name, service) for name, service in spec.pop("services").items()
        ]
        _rename(spec, "envs", "env")
    status = dict(body.get("status") or {})
    wanted = "services" if api_version.endswith("/v1alpha1") else "components"
    _rename(status, "components" if wanted == "services" else "services", wanted)
    converted = body | {"apiVersion": api_version, "spec": spec}
    return converted | ({"status": status} if "status" in body else {})


def _rename(body: Json, old: str, new: str) -> None:
    if old in body:
        body[new] = body.pop(old)


def _service_of(component: Mapping[str, Any]) -> Json:
    service = {k: v for k, v in component.items() if k not in ("name", "type", "podTemplate")}
    kind = component.get("type")
    if kind in ("prefill", "decode"):
        service |= {"componentType": "worker", "subComponentType": kind}
    elif kind is not None:
        service["componentType"] = kind
    template = dict(component.get("podTemplate") or {})
    pod = dict(template.pop("spec", None) or {})
    containers = pod.pop("containers", [])
    main = next((dict(c) for c in containers if c["name"] == "main"), None)
    others = [c for c in containers if c["name"] != "main"]
    if main is not None:
        main.pop("name")
        environment = main.pop("env", None)
        if environment:
            service["envs"] = environment
        pod["mainContainer"] = main
    if others:
        pod["containers"] = others
    if pod:
        service["extraPodSpec"] = pod
    metadata = template.get("metadata") or {}
    return service | {key: metadata[key] for key in ("labels", "annotations") if key in metadata}


def _component_of(name: str, service: Mapping[str, Any]) -> Json:
    moved = ("componentType", "subComponentType", "envs", "extraPodSpec", "labels", "annotations")
    component: Json = {"name": name} | {k: v for k, v in service.items() if k not in moved}
    kind = service.get("subComponentType") or service.get("componentType")
    if kind is not None:
        component["type"] = kind
    pod = dict(service.get("extraPodSpec") or {})
    main = dict(pod.pop("mainContainer", None) or {})
    if service.get("envs"):
        main["env"] = service["envs"]
    if main:
        pod["containers"] = [{"name": "main"} | main, *pod.get("containers", [])]
    template: Json = {"spec": pod} if pod else {}
    metadata = {key: service[key] for key in ("labels", "annotations") if key in service}
    if metadata:
        template["metadata"] = metadata
    return component | ({"podTemplate": template} if template else {})
