"""A graph of a real Dynamo with mock workers, as its operator would run it on a cluster.

The operator is played: Deployments, Services and accounts are as it makes them. Scheduling, pods,
slices, labels, files and logs are Kubernetes' own, and what workers register is Dynamo's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dynctl.wire.kubernetes import names
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import DYNAMO_PYTHON, TINY_MODEL
from tests.dynamo.kube_pods import MODEL, ZONES, components
from tests.kube import crds, deployment, objects
from tests.kube.objects import Component, Json
from tests.kube.objects.accounts import OPERATOR_NAMESPACE, VIEWER_RULES, role
from tests.kube.objects.graphs import graph_status
from tests.kubernetes.control_plane import VIEWER, ControlPlane
from tests.kubernetes.node import Node, machine_mounts
from tests.kubernetes.objects import create, has_condition, namespace_of, path_of

NAMESPACE: Final = "prod"
GRAPH: Final = "my-llm"
_ENVIRONMENT: Final = {
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "HF_HUB_OFFLINE": "1",
    "DYN_SKIP_TELEMETRY": "1",
}


def install_definitions(plane: ControlPlane) -> None:
    """The definitions of Dynamo's objects. There is no webhook that converts graphs: what is
    stored has the fields of the newer version."""
    graphs = crds.graph_crd()
    for version in graphs["spec"]["versions"]:
        version["storage"] = version["name"] == "v1beta1"
    with plane.api() as api:
        for definition in (graphs, crds.worker_metadata_crd()):
            create(api, definition)
            path = path_of("CustomResourceDefinition", "", definition["metadata"]["name"])
            plane.wait(lambda path=path: has_condition(api.get(path), "Established"), path)


def install_operator(plane: ControlPlane) -> None:
    """The operator's Deployment, whose pod does nothing, its account, and the viewer's rights."""
    with plane.api() as api:
        create(api, namespace_of(OPERATOR_NAMESPACE))
        for body in objects.operator_objects():
            if body["kind"] == "Deployment":
                del body["status"]
                body["spec"]["template"]["spec"]["containers"][0]["command"] = ["/pause"]
            create(api, body)
        create(api, role("", VIEWER, VIEWER_RULES))
        create(api, objects.user_binding(VIEWER, "verifier"))


def copy_zones(plane: ControlPlane) -> None:
    """Before 1.35 Kubernetes does not copy the zone of a node to its pods: `topology sync` does."""
    with plane.api() as api:
        if int(api.get("/version")["minor"]) >= 35:
            return
    words = ["topology", "sync", "-n", NAMESPACE, "--system-port", "0", "--lease-namespace"]
    command = [sys.executable, "-m", "dynctl", *words, NAMESPACE]
    plane.start("sync", [*command, "--kubeconfig", plane.kubeconfig()])


class Graph:
    """The graph ``my-llm`` in namespace ``prod``, under a required policy by zones: a frontend, in
    the first zone a prefill and two decode workers, in the second one of each."""

    zones = ZONES

    def __init__(self, plane: ControlPlane, nodes: Mapping[str, Node]) -> None:
        self.plane, self.nodes = plane, nodes
        frontend, *workers = components(f"{NAMESPACE}-{GRAPH}")
        self.components = [replace(frontend, zone=ZONES[0]), *workers]

    # -- what the operator does --------------------------------------------------------------------

    def apply(self) -> None:
        """Create the graph and all that belongs to it; pods are not waited for."""
        body = objects.graph(NAMESPACE, GRAPH, self.components, policy=deployment.policy())
        with self.plane.api() as api:
            create(api, namespace_of(NAMESPACE))
            graph = create(api, body)
            for account in objects.worker_accounts(NAMESPACE, GRAPH):
                create(api, account)
            for component in self.components:
                create(api, service_of(component))
                create(api, deployment_of(graph, component))

    def report_ready(self) -> None:
        """As the operator does in the graph's status."""
        path = path_of("DynamoGraphDeployment", NAMESPACE, GRAPH)
        with self.plane.api() as api:
            status = graph_status(api.get(path), "successful")
            api.patch(f"{path}/status", {"status": status})

    # -- what is there -----------------------------------------------------------------------------

    def pods(self, component: str = "") -> dict[str, Json]:
        """Pods that are not being deleted, by name, of components whose name begins so."""
        with self.plane.api() as api:
            listed = api.list(
                path_of("Pod", NAMESPACE), labelSelector=f"{names.GRAPH_LABEL}={GRAPH}"
            )
        return {
            pod["metadata"]["name"]: pod
            for pod in listed
            if pod["metadata"]["labels"][names.COMPONENT_LABEL].startswith(component)
            and "deletionTimestamp" not in pod["metadata"]
        }

    def is_ready(self) -> bool:
        """Whether the pods of all components are there, Ready and of the newest template."""
        with self.plane.api() as api:
            deployments = api.list(path_of("Deployment", NAMESPACE))
        pods = self.pods().values()
        wanted = sum(component.replicas for component in self.components)
        return (
            all(map(is_rolled_out, deployments))
            and len(pods) == wanted
            and all(has_condition(pod, "Ready") for pod in pods)
        )

    @property
    def frontend(self) -> FrontendClient:
        """Of the frontend's pod, at its own address."""
        [pod] = self.pods("frontend").values()
        return FrontendClient(8000, MODEL, pod["status"]["podIP"])

    def serves(self) -> bool:
        """Whether its frontend counts all workers and accepts requests."""
        workers = sum(one.replicas for one in self.components if one.is_worker)
        frontend = self.frontend
        return sum(frontend.worker_counts().values()) == workers and frontend.accepts()

    def wait_ready(self) -> None:
        """Until its pods are Ready and its frontend serves all workers."""
        try:
            self.plane.wait(self.is_ready, "the graph's pods", 120)
            self.plane.wait(self.serves, "the graph's frontend", 60)
        except AssertionError as error:
            states = {name: pod["status"] for name, pod in self.pods().items()}
            raise AssertionError(f"{error}\n{json.dumps(states, indent=1)}") from None


def is_rolled_out(deployment: Json) -> bool:
    status = deployment["status"]
    seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return bool(seen and status.get("updatedReplicas") == deployment["spec"]["replicas"])


def deployment_of(graph: Json, component: Component) -> Json:
    """The Deployment of a component, with the programs of this machine."""
    pod = objects.pod(graph, component)
    about, spec = pod["metadata"], pod["spec"]
    labels, main = about["labels"], spec["containers"][0]
    environment = dict(_ENVIRONMENT)
    if component.is_worker:
        # Without the first a mock worker is never healthy.
        environment["DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"] = '["generate"]'
        environment["DYN_NAMESPACE_WORKER_SUFFIX"] = labels[names.WORKER_HASH_LABEL]
    else:
        environment["DYN_HTTP_PORT"] = str(main["ports"][0]["containerPort"])
    main["env"] += [{"name": key, "value": value} for key, value in environment.items()]
    main["readinessProbe"]["periodSeconds"] = 2
    mount_machine(spec, Path(DYNAMO_PYTHON).parents[1], TINY_MODEL)
    selector = "nvidia.com/selector"
    template = {key: about[key] for key in ("labels", "annotations") if key in about}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": labels[selector],
            "namespace": about["namespace"],
            "labels": labels,
            "ownerReferences": about["ownerReferences"],
        },
        "spec": {
            "replicas": component.replicas,
            "selector": {"matchLabels": {selector: labels[selector]}},
            "template": {"metadata": template, "spec": spec},
        },
    }


def service_of(component: Component) -> Json:
    """The Service whose slices say which of a component's pods are Ready."""
    name = f"{GRAPH}-{component.name}"
    labels = {
        names.DISCOVERY_BACKEND_LABEL: "kubernetes",
        names.DISCOVERY_ENABLED_LABEL: "true",
        names.GRAPH_LABEL: GRAPH,
        names.COMPONENT_LABEL: component.name,
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "selector": {"nvidia.com/selector": name},
            "ports": [{"name": "system", "port": 9090 if component.is_worker else 8000}],
        },
    }


def mount_machine(spec: Mapping[str, Any], *folders: Path) -> None:
    """Give the containers of a pod's spec the programs of this machine, and ``folders``."""
    for number, path in enumerate(machine_mounts(*folders)):
        name = f"machine-{number}"
        spec["volumes"].append({"name": name, "hostPath": {"path": str(path)}})
        for container in spec["containers"]:
            mount = {"name": name, "mountPath": str(path), "readOnly": True}
            container["volumeMounts"].append(mount)
