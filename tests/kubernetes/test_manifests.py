"""The manifests of docs/deploy, as the chart renders them: installed, updated and rolled back.

Pods run as the user that the manifests name, with their probes, their read-only file system and the
rights of their accounts. The image is that of the suite, with the programs of this machine, and the
requests for CPU fit a small one. The router's manifest needs DNS, which the suite does not have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.dynamo.client import FrontendClient
from tests.dynamo.kube_pods import MODEL
from tests.kube.objects import Json
from tests.kube.witness.conftest import Kubectl, kubectl_program
from tests.kubernetes.graph import NAMESPACE, Graph, mount_machine
from tests.kubernetes.manifests import apply_accounts
from tests.kubernetes.node import IMAGE
from tests.kubernetes.objects import create, path_of

ROOT: Final = Path(__file__).resolve().parents[2]
MANIFESTS: Final = ROOT / "docs" / "deploy" / "kubernetes"
USER: Final = 65532
FRONTEND: Final = "dynctl-frontend"


def deployed(name: str) -> Iterator[Json]:
    """The Services and Deployments of a manifest, for the namespace of the graph."""
    for body in yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()):
        if body["kind"] not in ("Service", "Deployment"):
            continue
        body["metadata"]["namespace"] = NAMESPACE
        if body["kind"] == "Deployment":
            body["spec"]["replicas"] = 1
            spec = body["spec"]["template"]["spec"]
            for container in spec["containers"]:
                words = [word if word != "dynctl" else NAMESPACE for word in container["args"]]
                container |= {"image": IMAGE, "args": words}
                container["command"] = [sys.executable, "-m", "dynctl"]
                container["workingDir"] = str(ROOT)
                container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
            mount_machine(spec, Path(sys.prefix), ROOT)
        yield body


@pytest.fixture(scope="module")
def kubectl(graph: Graph) -> Kubectl:
    return Kubectl(kubectl_program(), graph.plane.kubeconfig(namespace=NAMESPACE))


@pytest.fixture(scope="module")
def installed(graph: Graph, kubectl: Kubectl) -> Iterator[None]:
    with graph.plane.api() as api:
        apply_accounts(api, NAMESPACE)
        for body in (*deployed("frontend"), *deployed("indexer")):
            create(api, body)
    yield
    kubectl("delete", "deployment,service", "-l", "app.kubernetes.io/name=dynctl")


def ours(kubectl: Kubectl, component: str = "") -> list[Any]:
    """The pods of the manifests that are not being deleted."""
    selector = "app.kubernetes.io/name=dynctl"
    selector += f",app.kubernetes.io/component={component}" if component else ""
    pods = json.loads(kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def rolled_out(graph: Graph, kubectl: Kubectl, name: str) -> None:
    def is_done() -> bool:
        body = json.loads(kubectl("get", "deployment", name, "-o", "json"))
        status = body.get("status", {})
        current = status.get("observedGeneration") == body["metadata"]["generation"]
        counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas")]
        return current and counts == [1, 1, 1]

    try:
        graph.plane.wait(is_done, f"Deployment {name}", 180)
    except AssertionError as error:
        logs = kubectl.run("logs", f"deployment/{name}", "--tail", "30")
        raise AssertionError(f"{error}\n{logs.stdout}{logs.stderr}") from None


def answers(kubectl: Kubectl) -> int:
    """The status of a chat through the pod of the frontend that is Ready."""
    [pod] = [
        pod
        for pod in ours(kubectl, "frontend")
        if all(one["ready"] for one in pod["status"].get("containerStatuses", [{"ready": False}]))
    ]
    return FrontendClient(8000, MODEL, pod["status"]["podIP"]).chat("hello").status


@pytest.mark.usefixtures("installed")
def test_every_deployment_is_ready_as_its_user(graph: Graph, kubectl: Kubectl) -> None:
    names = kubectl("get", "deployments", "-l", "app.kubernetes.io/name=dynctl", "-o", "name")
    for name in names.split():
        rolled_out(graph, kubectl, name.rpartition("/")[2])
    pods = ours(kubectl)
    assert len(pods) == 2
    for pod in pods:
        (status,) = pod["status"]["containerStatuses"]
        assert int(kubectl("exec", pod["metadata"]["name"], "--", "id", "-u")) == USER
        assert status["restartCount"] == 0
    assert answers(kubectl) == 200


@pytest.mark.usefixtures("installed")
def test_an_update_that_does_not_start_cuts_nothing_and_is_rolled_back(
    graph: Graph, kubectl: Kubectl
) -> None:
    rolled_out(graph, kubectl, FRONTEND)
    [before] = ours(kubectl, "frontend")
    path = path_of("Deployment", NAMESPACE, FRONTEND)
    with graph.plane.api() as api:
        [container] = api.get(path)["spec"]["template"]["spec"]["containers"]
        wrong = {**container, "args": [*container["args"], "--no-such-option"]}
        api.patch(path, {"spec": {"template": {"spec": {"containers": [wrong]}}}})

    def is_crashing() -> bool:
        return any(
            status["restartCount"] > 0
            for pod in ours(kubectl, "frontend")
            for status in pod["status"].get("containerStatuses", ())
        )

    graph.plane.wait(is_crashing, "the new pod to end", 120)
    assert answers(kubectl) == 200
    kubectl("rollout", "undo", f"deployment/{FRONTEND}")
    rolled_out(graph, kubectl, FRONTEND)
    assert before["metadata"]["name"] in [pod["metadata"]["name"] for pod in ours(kubectl)]
    assert answers(kubectl) == 200
