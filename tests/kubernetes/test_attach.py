"""Plain engines in pods that `serve attach` registers as workers of a Dynamo."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.dynamo.fleet import TINY_MODEL
from tests.dynamo.ours import OurFrontend, frontend_of, wait
from tests.kube.objects import Json
from tests.kubernetes.chats import Chats
from tests.kubernetes.control_plane import ADDRESS, ControlPlane
from tests.kubernetes.graph import install_definitions, mount_machine
from tests.kubernetes.manifests import account_token, apply_accounts
from tests.kubernetes.node import IMAGE, Node
from tests.kubernetes.objects import create, has_condition, namespace_of, path_of

ROOT: Final = Path(__file__).resolve().parents[2]
SPACE: Final = "engines"
MODEL: Final = "tiny"
PORT: Final = 8000
_LABELS: Final = {"app": "my-engine"}
"""As the manifest of `serve attach` selects its pods."""


def container(name: str, *words: str, **more: Any) -> Json:
    fields = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    fields |= {"POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}
    env: list[Json] = [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for key, path in fields.items()
    ]
    return {
        "name": name,
        "image": IMAGE,
        "command": [sys.executable, "-m", "dynctl", "serve", *words],
        "workingDir": str(ROOT),
        "env": [*env, {"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [],
        **more,
    }


def engines(name: str, replicas: int, *, attached: bool = False, namespace: str = SPACE) -> Json:
    """A Deployment of engines. ``attached``: a sidecar registers each as a worker."""
    labels = {**(_LABELS if attached else {}), "name": name}
    probe = {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 30}
    words = ("--host", "$(POD_IP)", "--port", str(PORT), "--model", MODEL)
    ready = {"readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, **probe}}
    path = ("--model-path", str(TINY_MODEL))
    containers = [container("engine", "engine", *words, *path, **ready)]
    if attached:
        registers = ("--discovery", "kubernetes", "--host", "$(POD_IP)", "--system-port", "9090")
        engine = ("--engine", f"http://$(POD_IP):{PORT}")
        ready = {"readinessProbe": {"httpGet": {"path": "/health", "port": 9090}, **probe}}
        containers.append(container("attach", "attach", *registers, *engine, *path, **ready))
    spec: Json = {"containers": containers, "volumes": [], "terminationGracePeriodSeconds": 20}
    if attached:
        spec["serviceAccountName"] = "dynctl-attach"
    mount_machine(spec, Path(sys.prefix), ROOT)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"name": name}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


class Engines:
    """A Deployment of engines in the cluster."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.plane, self.name = plane, name

    def pods(self) -> dict[str, Json]:
        with self.plane.api() as api:
            listed = api.list(path_of("Pod", SPACE), labelSelector=f"name={self.name}")
        return {
            pod["metadata"]["name"]: pod
            for pod in listed
            if "deletionTimestamp" not in pod["metadata"]
        }

    def wait_ready(self, number: int) -> None:
        def is_ready() -> bool:
            pods = self.pods().values()
            return len(pods) == number and all(has_condition(pod, "Ready") for pod in pods)

        try:
            self.plane.wait(is_ready, f"{number} engines", 180)
        except AssertionError as error:
            states = {name: pod["status"] for name, pod in self.pods().items()}
            raise AssertionError(f"{error}\n{json.dumps(states, indent=1)}") from None


@pytest.fixture(scope="module")
def space(control_plane: ControlPlane, nodes: dict[str, Node]) -> Iterator[ControlPlane]:
    install_definitions(control_plane)
    with control_plane.api() as api:
        create(api, namespace_of(SPACE))
        apply_accounts(api, SPACE)
        yield control_plane
        api.delete(path_of("Namespace", "", SPACE))


@pytest.fixture
def attached(space: ControlPlane) -> Iterator[Engines]:
    """Two engines with a sidecar, behind the Service of the manifest."""
    manifest = ROOT / "docs" / "deploy" / "kubernetes" / "attach.yaml"
    with space.api() as api:
        for body in yaml.safe_load_all(manifest.read_text()):
            if body["kind"] == "Service":
                body["metadata"]["namespace"] = SPACE
                create(api, body)
        create(api, engines("attached", 2, attached=True))
        found = Engines(space, "attached")
        found.wait_ready(2)
        yield found
        api.delete(path_of("Deployment", SPACE, "attached"))


@pytest.fixture
def ours(attached: Engines, tmp_path: Path) -> Iterator[OurFrontend]:
    plane = attached.plane
    with plane.api() as api:
        token = account_token(api, "dynctl-frontend", SPACE)
    variables = {
        "KUBECONFIG": str(plane.kubeconfig(token, SPACE)),
        "DYN_TCP_RESPONSE_STREAM_HOST": ADDRESS,
    }
    words = ("--discovery", "kubernetes", "--namespace", SPACE)
    with frontend_of(tmp_path, MODEL, worker_ids(attached), words, variables) as frontend:
        yield frontend


def worker_ids(engines: Engines) -> set[int]:
    return {instance_id(name) for name in engines.pods()}


def test_attached_engines_serve_and_leave_with_their_pods(
    attached: Engines, ours: OurFrontend
) -> None:
    plane, chats = attached.plane, Chats(ours)
    [first, _] = attached.pods()
    with chats, plane.api() as api:
        wait(ours, lambda: len(chats.statuses) > 5, "requests")
        api.delete(path_of("Pod", SPACE, first))
        attached.wait_ready(2)
        wait(ours, lambda: set(ours.ready()) == worker_ids(attached), "the new worker", 60)
        registered = {
            one["metadata"]["name"] for one in api.list(path_of("DynamoWorkerMetadata", SPACE))
        }
    assert registered == set(attached.pods())
    assert set(chats.statuses) == {200}
