"""The pods of a real Dynamo on our API server: what a graph asks for, and a process for each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynctl.wire.kubernetes import names
from dynctl.wire.kubernetes.worker_metadata import instance_id
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import DYNAMO_PYTHON, TINY_MODEL
from tests.dynamo.processes import Process
from tests.dynctl.manifests.kubelet import DownwardApiVolume
from tests.kube import deployment, objects
from tests.kube.objects import Component, Json
from tests.ports import free_port

ZONES = ("us-east-1a", "us-east-1b")
MODEL = "tiny"


@dataclass(slots=True)
class KubePod:
    """A pod and the process that is its main container. ``port``: where it answers its probe.

    ``body`` is the pod as it was created, ``volume`` its topology files, ``ready`` its condition.
    """

    body: Json
    port: int
    process: Process
    volume: DownwardApiVolume | None
    ready: bool = False

    @property
    def namespace(self) -> str:
        return objects.key_of(self.body)[0]

    @property
    def name(self) -> str:
        return objects.key_of(self.body)[1]

    @property
    def worker_id(self) -> int:
        """As Dynamo takes it from the pod's name."""
        return instance_id(self.name)

    @property
    def zone(self) -> str:
        """Of the label that was copied to it; empty for a frontend."""
        return str(self.body["metadata"]["labels"].get(objects.ZONE, ""))

    @property
    def role(self) -> str:
        """prefill or decode; frontend."""
        return deployment.role_of(self.body)

    def healthy(self) -> bool:
        """What a readiness probe finds now."""
        with contextlib.suppress(OSError):
            return FrontendClient(self.port).get("/health", timeout=2)[0] == 200
        return False


def components(prefix: str) -> list[Component]:
    """A frontend; in zone a one prefill and two decode workers, in zone b one of each.

    ``prefix``: of the runtime namespaces whose workers the frontend serves.
    """
    frontend = Component(
        "frontend",
        "frontend",
        args=("python3", "-m", "dynamo.frontend"),
        env={"DYN_ROUTER_MODE": "kv", "DYN_NAMESPACE_PREFIX": prefix},
    )
    return [
        frontend,
        mockers("prefill-a", "prefill", ZONES[0]),
        mockers("prefill-b", "prefill", ZONES[1]),
        mockers("decode-a", "decode", ZONES[0], 2),
        mockers("decode-b", "decode", ZONES[1]),
    ]


def mockers(name: str, role: str, zone: str, replicas: int = 1) -> Component:
    """A component of mock workers, pinned to a zone."""
    words = ["python3", "-m", "dynamo.mocker", "--model-path", str(TINY_MODEL)]
    words += ["--model-name", MODEL, "--disaggregation-mode", role, "--block-size", "16"]
    words += ["--num-gpu-blocks-override", "512", "--speedup-ratio", "0"]
    return Component(name, role, replicas, zone=zone, args=tuple(words))


def command_of(body: Mapping[str, Any]) -> list[str]:
    """What its main container runs, with the interpreters of this machine."""
    program, *words = body["spec"]["containers"][0]["args"]
    if program == "dynctl":
        return [sys.executable, "-m", program, *words]
    return [DYNAMO_PYTHON, *words]


def take_ports(body: Json) -> int:
    """Give a pod ports of its own, since all pods have one address; the one that is probed."""
    container = body["spec"]["containers"][0]
    system = port = free_port()
    env = {"DYN_SYSTEM_PORT": str(system)}
    if deployment.is_worker(body):
        # Without the first a mock worker is never healthy.
        env["DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"] = '["generate"]'
        env["DYN_NAMESPACE_WORKER_SUFFIX"] = body["metadata"]["labels"][names.WORKER_HASH_LABEL]
    else:
        port = free_port()
        env["DYN_HTTP_PORT"] = str(port)
    kept = [one for one in container["env"] if one["name"] not in env]
    container["env"] = kept + [{"name": key, "value": value} for key, value in env.items()]
    container["ports"][0]["containerPort"] = port
    return port


def mounted(body: Mapping[str, Any], root: Path) -> DownwardApiVolume | None:
    """The topology files of a pod below its file system, with its labels of now."""
    for volume in body["spec"]["volumes"]:
        if volume["name"] == names.TOPOLOGY_VOLUME:
            items = {
                item["path"]: item["fieldRef"]["fieldPath"].partition("['")[2].removesuffix("']")
                for item in volume["downwardAPI"]["items"]
            }
            found = DownwardApiVolume(below(root, names.MOUNT_PATH), items)
            found.write(body["metadata"]["labels"])
            return found
    return None


def below(root: Path, path: str) -> Path:
    """Where a path of a container is on this machine."""
    return root / path.lstrip("/")
