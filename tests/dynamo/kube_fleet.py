"""A real Dynamo on Kubernetes, but for the cluster: its own processes, and our API server.

The operator, the scheduler and the kubelet are played here: pods, slices and Downward API volumes
are as they would write them, and each process gets its command and its variables from its pod.
What workers register is their own: Dynamo's client of Kubernetes writes it, as the workers' service
account.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dynctl.wire.kubernetes import names
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import LOOPBACK, READY_SECONDS, hands_over
from tests.dynamo.kube_pods import (
    MODEL,
    ZONES,
    KubePod,
    below,
    command_of,
    components,
    mounted,
    take_ports,
)
from tests.dynamo.observed import QUIET_SECONDS, stored_events
from tests.dynamo.processes import ProcessGroup
from tests.kube import crds, deployment, objects
from tests.kube.api_server import ApiServer
from tests.kube.api_server.streams import Ran, run
from tests.kube.objects import Component, Json
from tests.kube.objects.accounts import VIEWER_RULES, Rule, role
from tests.waiting import patience, slowdown

NAMESPACE, GRAPH = "prod", "my-llm"
VIEWER = "viewer"
"""The token of a user who may do what verify asks for and nothing else."""
AGE_S = 3600.0
"""How long ago the objects were made; the processes are as young as they are."""

_ADDRESS = "127.0.0.1"
_FOREIGN = ("DYN", "ETCD", "NATS", "OTEL_", "PYTHON", "KUBE", "XDG_")


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class KubeFleet:
    """A cluster of two zones with RBAC, and in it one graph under a required policy.

    Ready on enter; on exit every process is ended. ``pods`` by name; ``executed``: every command
    that a client had executed in one.
    """

    def __init__(self) -> None:
        self.server = ApiServer(rbac=True)
        self.pods: dict[str, KubePod] = {}
        self.executed: list[list[str]] = []
        self.directory = Path()
        self._group = ProcessGroup(self.directory)
        self._open = contextlib.ExitStack()

    # -- coming and going --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="dynctl-kube-"))
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            stack.enter_context(self.server)
            self._group = ProcessGroup(self.directory)
            stack.callback(self._group.close)
            self._install()
            self.deploy(NAMESPACE, GRAPH, components(f"{NAMESPACE}-{GRAPH}"))
            self.wait_ready()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _install(self) -> None:
        """What is there before any graph."""
        created = time.time() - 2 * AGE_S
        crds.install(self.server)
        machines = deployment.nodes(ZONES, 2, created=created)
        for body in (*machines, *objects.operator_objects(created=created)):
            self.server.store.create(body)
        self.add_viewer(VIEWER, VIEWER_RULES)

    def add_viewer(self, name: str, rules: Sequence[Rule]) -> None:
        """A person, whose token is the name, and what that person may do in the whole cluster."""
        self.server.store.create(role("", name, rules))
        self.server.store.create(objects.user_binding(name, name))
        self.server.add_user(name, name)

    # -- what the operator, the scheduler and the kubelet do ---------------------------------------

    def deploy(
        self, namespace: str, name: str, parts: Sequence[Component], *, may_register: bool = True
    ) -> None:
        """A graph and its pods, started and not waited for. ``may_register``: workers have their
        Role."""
        created = time.time() - AGE_S
        graph = objects.graph(namespace, name, parts, policy=deployment.policy(), created=created)
        self.server.store.create(graph)
        for body in objects.worker_accounts(namespace, name, created=created):
            if may_register or body["kind"] == "ServiceAccount":
                self.server.store.create(body)
        account = f"{name}-k8s-service-discovery"
        self.server.add_service_account(f"{namespace}.{account}", namespace, account)
        placed: Counter[str] = Counter()
        for part in parts:
            zone = part.zone or ZONES[0]
            for number in range(part.replicas):
                node = f"gpu-{zone[-1]}-{placed[zone] % 2}"
                placed[zone] += 1
                self._start(objects.pod(graph, part, number, created=created), node, created)
        self.write_slices()

    def _start(self, body: Json, node: str, created: float) -> None:
        body = objects.bound(body, node, created + 1)
        worker = deployment.is_worker(body)
        if worker:
            zone = self.server.store.get("Node", node)["metadata"]["labels"][objects.ZONE]
            body = objects.labelled(body, {objects.ZONE: zone}, created + 2)
        port = take_ports(body)
        body = objects.running(body, _ADDRESS, created + 3, ready=False)
        body = self.server.store.create(body)
        key = objects.key_of(body)
        root = self.directory / "-".join(key)
        root.mkdir()
        volume = mounted(body, root)
        self.server.exec_files[(*key, "main")] = partial(self._execute, root)
        if not worker:
            self.server.forwards[(*key, port)] = (_ADDRESS, port)
        command = command_of(body)
        process = self._group.start("-".join(key), command, self._environment(body, root))
        self.pods[key[1]] = KubePod(body, port, process, volume)

    def _environment(self, body: Json, root: Path) -> dict[str, str]:
        """The pod's variables, and what only this machine knows."""
        about, env = body["metadata"], deployment.env_of(body)
        account = f"{about['namespace']}.{body['spec']['serviceAccountName']}"
        found = {
            **{k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)},
            **env,
            "POD_NAME": about["name"],
            "POD_NAMESPACE": about["namespace"],
            "POD_UID": about["uid"],
            "KUBECONFIG": str(self.kubeconfig(account, about["namespace"])),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "HF_HUB_OFFLINE": "1",
            "DYN_SKIP_TELEMETRY": "1",
            **dict.fromkeys((*LOOPBACK, "DYN_HTTP_HOST"), _ADDRESS),
        }
        if mount := env.get("DYN_TOPOLOGY_MOUNT_PATH"):
            found["DYN_TOPOLOGY_MOUNT_PATH"] = str(below(root, mount))
        return found

    def kubeconfig(self, token: str | None, namespace: str = NAMESPACE) -> Path:
        """The file of a user; None: the administrator."""
        path = self.directory / "kubeconfigs" / f"{token or 'admin'}-{namespace}"
        return self.server.kubeconfig(path, token=token, namespace=namespace)

    def _execute(self, root: Path, command: list[str]) -> Ran:
        self.executed.append(command)
        return run(root, command)

    def set_ready(self, name: str, ready: bool) -> None:
        """A pod's condition, and with it its endpoint."""
        pod = self.pods[name]
        pod.ready = ready
        began = time.time() - AGE_S + 3
        changed = objects.running(pod.body, _ADDRESS, began, ready=ready)["status"]
        changed["conditions"] = list({one["type"]: one for one in changed["conditions"]}.values())
        self.server.store.patch_merge("Pod", name, {"status": changed}, pod.namespace)
        self.write_slices()

    def write_slices(self, *, unready: Sequence[str] = ()) -> None:
        """A slice for each component. ``unready``: pods that it does not call ready whatever they
        say."""
        groups: dict[tuple[str, str, str], list[Json]] = defaultdict(list)
        for pod in self.server.store.list("Pod"):
            labels = pod["metadata"]["labels"]
            namespace = pod["metadata"]["namespace"]
            groups[namespace, labels[names.GRAPH_LABEL], labels[names.COMPONENT_LABEL]].append(pod)
        there = {objects.key_of(one) for one in self.server.store.list("EndpointSlice")}
        for key, pods in groups.items():
            body = objects.endpoint_slice(*key, pods)
            for endpoint in body["endpoints"]:
                if endpoint["targetRef"]["name"] in unready:
                    endpoint["conditions"] |= {"ready": False, "serving": False}
            if objects.key_of(body) not in there:
                self.server.store.create(body)
                continue
            change, name = {"endpoints": body["endpoints"]}, body["metadata"]["name"]
            self.server.store.patch_merge("EndpointSlice", name, change, key[0])

    # -- asking ------------------------------------------------------------------------------------

    @property
    def frontend(self) -> FrontendClient:
        return FrontendClient(self.pods[f"{GRAPH}-frontend-0"].port, MODEL)

    @property
    def workers(self) -> dict[str, KubePod]:
        """By name, those of the graph that is there from the beginning."""
        return {
            name: pod
            for name, pod in self.pods.items()
            if pod.namespace == NAMESPACE and deployment.is_worker(pod.body)
        }

    def metadata(self, namespace: str = NAMESPACE) -> dict[str, Json]:
        """What workers registered, by the objects' names."""
        found = self.server.store.list("DynamoWorkerMetadata", namespace)
        return {one["metadata"]["name"]: one for one in found}

    def dynctl(self, *words: str, token: str | None = None, namespace: str = NAMESPACE) -> Done:
        """Run it with a kubeconfig for the token; None is the administrator."""
        for pod in self.pods.values():
            log = pod.process.log.read_text(errors="replace")
            self.server.logs[(pod.namespace, pod.name, "main", False)] = log
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        # What a person has configured or cached on this machine must not matter.
        environment |= {f"XDG_{it}_HOME": str(self.directory / it) for it in ("CONFIG", "CACHE")}
        config = self.kubeconfig(token, namespace)
        done = subprocess.run(
            [sys.executable, "-m", "dynctl", *words, "--kubeconfig", str(config)],
            capture_output=True,
            text=True,
            timeout=patience(90),
            env=environment,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    # -- waiting -----------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Until the pods of the first graph are ready, and its frontend counts all workers."""
        self.wait_probed(NAMESPACE)
        self.wait_counted(Counter(pod.role for pod in self.workers.values()))

    def wait_probed(self, namespace: str) -> None:
        """Until the pods of a namespace are ready, as a kubelet finds it."""
        mine = [pod for pod in self.pods.values() if pod.namespace == namespace]

        def probed() -> bool:
            for pod in mine:
                if not pod.process.alive:
                    raise AssertionError(f"{pod.name} ended\n{pod.process.tail(60)}")
                if not pod.ready and pod.healthy():
                    self.set_ready(pod.name, True)
            return all(pod.ready for pod in mine)

        self.wait_until(probed, "all pods to be ready", seconds=READY_SECONDS)

    def wait_counted(self, counts: Mapping[str, int]) -> None:
        """Until the frontend counts just these, role -> workers, and accepts requests."""

        def counted() -> bool:
            found = self.frontend.worker_counts()
            same = {kind: count for kind, count in found.items() if count} == counts
            process = self.pods[f"{GRAPH}-frontend-0"].process
            return same and self.frontend.accepts() and hands_over(process)

        self.wait_until(counted, f"the frontend to count {dict(counts)}")

    def settled(self) -> None:
        """Until the frontend has applied no event for a while in which every process had its turn:
        then its index has what workers published before."""

        def quiet() -> bool:
            before, began = stored_events(self.frontend), time.monotonic()
            time.sleep(QUIET_SECONDS)
            for pod in self.pods.values():
                pod.healthy()
            held_up = time.monotonic() - began > QUIET_SECONDS * (1 + slowdown())
            return stored_events(self.frontend) == before and not held_up

        self.wait_until(quiet, "events to be applied")

    def wait_until(self, holds: Callable[[], Any], what: str, *, seconds: float = 20) -> None:
        """Poll; on the deadline fail with ``what`` and the logs' ends."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > patience(seconds):
                logs = "\n".join(pod.process.tail(8) for pod in self.pods.values())
                raise AssertionError(f"waited {seconds:g} s for {what}\n{logs}")
            time.sleep(0.05)
