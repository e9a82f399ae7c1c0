"""The chart of docs/deploy under Helm, with the image of this checkout: installed, updated, rolled
back.

Pods run as the user that the chart or the image names, with their probes, their read-only file
system and the rights of their accounts. Only requests for CPU and memory fit a small machine. The
cluster has no DNS and no kube-proxy: requests go to the endpoints of a Service that are ready, and
the shared router is Ready without frontends.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
import yaml

from tests.dynamo.client import Answer, FrontendClient
from tests.dynamo.kube_pods import MODEL
from tests.kube.client import Api
from tests.kube.objects import Json
from tests.kube.test_inference_pool import pool
from tests.kube.witness.conftest import Kubectl, kubectl_program
from tests.kubernetes.chats import Chats
from tests.kubernetes.graph import NAMESPACE, Graph
from tests.kubernetes.image import ROOT, USER, checkout_image
from tests.kubernetes.objects import create, has_condition, path_of
from tests.kubernetes.test_attach import PORT, engines
from tests.kubernetes.test_inference_pool import install_pools
from tests.waiting import patience

HELM: Final = os.environ.get("DYNCTL_HELM", "")
"""Read when imported: the environment of tests is emptied."""
CHART: Final = ROOT / "docs" / "deploy" / "chart"
REPOSITORY, TAG = "dynctl.test/dynctl", "checkout"
SECRET: Final = "shared-token"
POOL: Final = "llama"
_SMALL: Final = {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}}
VALUES: Final[dict[str, Any]] = {
    "image": {"repository": REPOSITORY, "tag": TAG},
    "frontend": _SMALL,
    "indexer": {"enabled": True, **_SMALL},
    "epp": {"enabled": True, "pool": POOL, **_SMALL},
    "attach": {"enabled": True, "selector": {"app": "my-engine"}},
    "sync": {"enabled": True, "watchNamespace": NAMESPACE},
    "networkPolicy": {"enabled": True, "gateways": [{"podSelector": {}}]},
}
SHARED: Final[dict[str, Any]] = {
    "image": VALUES["image"],
    "frontend": {"enabled": False},
    "router": {"enabled": True, **_SMALL},
    "adminToken": {"secret": SECRET},
}
"""A release of its own: with a router beside it, a frontend needs DNS."""


class Helm:
    """The program, in the namespace of the graph."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._command = [HELM, "--kubeconfig", str(kubeconfig), "--namespace", NAMESPACE]
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}

    def __call__(self, *words: str, values: Json | None = None) -> str:
        """Its output. ``values``: of a chart."""
        given = ("--values", "-") if values else ()
        done = subprocess.run(
            [*self._command, *words, *given],
            input=json.dumps(values),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=patience(180),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Release:
    """Releases of the chart, of which ``dynctl`` has the frontend."""

    def __init__(self, graph: Graph, folder: Path) -> None:
        kubeconfig = graph.plane.kubeconfig(namespace=NAMESPACE)
        self.graph, self.helm = graph, Helm(kubeconfig, folder)
        self.kubectl = Kubectl(kubectl_program(), kubeconfig)

    def upgrade(self, name: str, values: Json, *words: str) -> None:
        # Other tests make the accounts of the manifests, with the same names.
        self.helm(
            *("upgrade", "--install", "--take-ownership", name, str(CHART), *words), values=values
        )

    def wait(self) -> tuple[str, ...]:
        """``--wait`` of Helm, for as long as this machine may need."""
        return ("--wait", "--timeout", f"{patience(120):.0f}s")

    def pods(self, component: str = "") -> list[Json]:
        """Of a component, or of all, that are not being deleted."""
        selector = "app.kubernetes.io/name in (dynctl,dynctl-topology-sync)"
        selector += f",app.kubernetes.io/component={component}" if component else ""
        listed = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        return [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]

    def pod_names(self, component: str) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.pods(component)}

    def logs(self) -> str:
        """Of pods that are not Ready, for messages."""
        texts = []
        for pod in self.pods():
            if not has_condition(pod, "Ready"):
                name = pod["metadata"]["name"]
                shown = self.kubectl.run("logs", name, "--tail", "20")
                texts.append(f"{name}: {pod['status']}\n{shown.stdout}{shown.stderr}")
        return "\n".join(texts)


class Service:
    """The Service of the frontend, as a cluster's network serves it: each request goes to an
    endpoint that is ready at that moment, in turn."""

    def __init__(self, api: Api) -> None:
        self._api, self._requests = api, 0

    def chat(self, text: str) -> Answer:
        selector = "kubernetes.io/service-name=dynctl-frontend"
        slices = self._api.list(path_of("EndpointSlice", NAMESPACE), labelSelector=selector)
        ready = [
            endpoint["addresses"][0]
            for item in slices
            for endpoint in item["endpoints"] or ()
            if endpoint["conditions"]["ready"]
        ]
        self._requests += 1
        address = ready[self._requests % len(ready)]
        return FrontendClient(8000, MODEL, address).chat(text)


def create_pool(graph: Graph, api: Api) -> None:
    """An InferencePool and its engine, of which the picker is ready."""
    install_pools(graph.plane)
    create(api, engines(POOL, 1, namespace=NAMESPACE))
    body = pool([PORT], {"name": POOL})
    body["metadata"]["namespace"] = NAMESPACE
    path = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
    api.create(path, body)


@pytest.fixture(scope="module")
def release(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    if not Path(HELM).is_file():
        pytest.skip("Helm could not be built: run make test-kube alone")
    folder = tmp_path_factory.mktemp("chart")
    image = checkout_image(folder / "dynctl.tar", f"{REPOSITORY}:{TAG}", folder)
    # Its files take long to unpack and to remove: one node has them.
    node, other = graph.nodes.values()
    node.add_image(image)
    image.unlink()
    made = Release(graph, folder)
    with other.cordoned(), graph.plane.api() as api:
        create_pool(graph, api)
        made.kubectl("create", "secret", "generic", SECRET, "--from-literal=token=t")
        try:
            made.upgrade("dynctl", VALUES)
            made.upgrade("shared", SHARED)
            try:
                made.upgrade("dynctl", VALUES, *made.wait())
                made.upgrade("shared", SHARED, *made.wait())
            except AssertionError as error:
                raise AssertionError(f"{error}\n{made.logs()}") from None
            yield made
        finally:
            made.helm("uninstall", "dynctl", "shared", "--ignore-not-found")
            made.kubectl(
                "delete", f"secret/{SECRET}", f"deployment/{POOL}", f"inferencepool/{POOL}"
            )


@pytest.fixture
def service(release: Release) -> Iterator[Service]:
    with release.graph.plane.api() as api:
        yield Service(api)


def rendered_deployments(release: Release) -> dict[str, Json]:
    """What Helm has installed, by name."""
    manifests = [release.helm("get", "manifest", name) for name in ("dynctl", "shared")]
    bodies = [body for text in manifests for body in yaml.safe_load_all(text) if body]
    return {body["metadata"]["name"]: body for body in bodies if body["kind"] == "Deployment"}


def test_every_deployment_is_ready_as_its_user(release: Release, service: Service) -> None:
    wanted = rendered_deployments(release)
    assert len(wanted) == 5
    pods = release.pods()
    assert len(pods) == sum(body["spec"]["replicas"] for body in wanted.values())
    for pod in pods:
        [status], [container] = pod["status"]["containerStatuses"], pod["spec"]["containers"]
        assert (status["ready"], status["restartCount"]) == (True, 0), release.logs()
        assert container["image"] == f"{REPOSITORY}:{TAG}"
        assert container["startupProbe"]
        script = "print(open('/proc/1/status').read())"
        shown = release.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", script)
        [user] = [line.split()[1:] for line in shown.splitlines() if line.startswith("Uid:")]
        assert set(user) == {str(USER)}
    assert service.chat("hello").status == 200


def test_an_update_that_does_not_start_loses_nothing_and_is_rolled_back(
    release: Release, service: Service
) -> None:
    before, chats = release.pod_names("frontend"), Chats(service)
    wrong = {**VALUES, "frontend": {**_SMALL, "args": ["--no-such-option"]}}

    def has_crashed() -> bool:
        return any(
            status["restartCount"] > 0
            for pod in release.pods("frontend")
            for status in pod["status"].get("containerStatuses", ())
        )

    with chats:
        release.upgrade("dynctl", wrong)
        release.graph.plane.wait(has_crashed, "the new pod to end", 60)
        assert before < release.pod_names("frontend")
        release.helm("rollback", "dynctl", *release.wait())
        release.graph.plane.wait(
            lambda: release.pod_names("frontend") == before, "the new pod to be gone"
        )
    assert len(chats.statuses) > 10
    assert set(chats.statuses) == {200}


def test_an_update_replaces_all_frontends_and_loses_nothing(
    release: Release, service: Service
) -> None:
    before, chats = release.pod_names("frontend"), Chats(service)
    variables = [{"name": "EXAMPLE", "value": uuid4().hex}]  # also where it is run again
    with chats:
        release.upgrade(
            "dynctl", {**VALUES, "frontend": {**_SMALL, "env": variables}}, *release.wait()
        )
        release.graph.plane.wait(
            lambda: not before & release.pod_names("frontend"), "the old pods to be gone"
        )
    assert len(chats.statuses) > 10
    assert set(chats.statuses) == {200}
