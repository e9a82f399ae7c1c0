"""The workers of an InferencePool: its pods, as the Kubernetes API reports them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from dynctl.adapters.kubernetes.following import Follower, Resource
from dynctl.adapters.kubernetes.from_options import namespaces_of, open_cluster
from dynctl.adapters.ports import Cluster, ClusterEvent
from dynctl.base.errors import UsageProblem
from dynctl.base.json_fields import mapping, text
from dynctl.health import conditions as codes
from dynctl.serving.engines.fleet import Fleet, FleetFull
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError, worker_spec
from dynctl.serving.routing.config import PoolConfig
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.kubernetes.inference_pool import (
    GROUP,
    PLURAL,
    VERSION,
    InferencePool,
    inference_pool,
)
from dynctl.wire.kubernetes.names import DISCOVERY_ENABLED_LABEL
from dynctl.wire.kubernetes.objects import Pod, pod
from dynctl.wire.kubernetes.worker_metadata import instance_id

_log = logging.getLogger(__name__)

SOURCE: Final = "pool"
#: Several pods often change at the same moment.
_DEBOUNCE_S: Final = 0.1
#: Seconds for which the start waits for the first reading.
_FIRST_S: Final = 10.0
_AGAIN_S: Final = 5.0
_ROLES: Final = ("prefill", "decode")


class _Objects:
    """The current objects of one kind, as read by ``read``. Thread-safe."""

    def __init__(self, read: Callable[[Mapping[str, Any]], Any]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._found: dict[str, Any] = {}

    def replace(self, resource: Resource, bodies: list[Mapping[str, Any]]) -> None:
        found = {_name(body): self._read(body) for body in bodies}
        with self._lock:
            self._found = found

    def apply(self, resource: Resource, event: ClusterEvent) -> None:
        name = _name(event.object)
        if resource.keeps is not None and not resource.keeps(event.object):
            return
        with self._lock:
            if event.kind == "DELETED":
                self._found.pop(name, None)
            else:
                self._found[name] = self._read(event.object)

    def all(self) -> list[Any]:
        with self._lock:
            return [self._found[name] for name in sorted(self._found)]


class _Following:
    """One followed kind: its objects and the thread that reads them."""

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        namespace: str,
        objects: _Objects,
        changed: Callable[[], None],
    ) -> None:
        self.resource = resource
        self.objects = objects
        self.stopped = threading.Event()
        self.follower = Follower(cluster, resource, namespace, objects, self.stopped, changed)
        name = f"dynctl-{resource.plural}"
        threading.Thread(target=self.follower.run, name=name, daemon=True).start()


class PoolFollower:
    """Keeps the fleet equal to the ready pods of an InferencePool. Raises UsageProblem."""

    def __init__(self, service: RoutingService, fleet: Fleet, config: PoolConfig) -> None:
        self._service = service
        self._fleet = fleet
        self._config = config
        self._cluster = open_cluster(config.cluster)
        namespace = namespaces_of(config.cluster, self._cluster)
        if namespace is None:
            raise UsageProblem("--pool: an InferencePool is in one namespace", "set -n NAMESPACE")
        self.namespace = namespace
        self.subject = f"InferencePool {namespace}/{config.name}"
        self._changed = asyncio.Event()
        self._read = asyncio.Event()
        self._pools: _Following | None = None
        self._pods: _Following | None = None
        self._pool: InferencePool | None = None

    async def start(self) -> None:
        """Begin to follow, and wait for the first reading, at most a few seconds."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            # The loop may have ended without a close.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._changed.set)

        self._notify = changed
        name = self._config.name
        pools = Resource(
            GROUP, VERSION, PLURAL, keeps=lambda body: _name(body) == f"{self.namespace}/{name}"
        )
        self._pools = self._follow(pools, inference_pool)
        self._service.tasks.start("inference pool", self._run)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._read.wait()

    async def close(self) -> None:
        for follower in (self._pools, self._pods):
            if follower is not None:
                follower.stopped.set()
        await asyncio.to_thread(self._cluster.close)

    # -- inside ----------------------------------------------------------------------------

    def _follow(self, resource: Resource, read: Callable[[Mapping[str, Any]], Any]) -> _Following:
        return _Following(self._cluster, resource, self.namespace, _Objects(read), self._notify)

    async def _run(self) -> None:
        while True:
            # A worker that was refused may be accepted later: another one has left.
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._changed.wait()
            self._changed.clear()
            await asyncio.sleep(_DEBOUNCE_S)
            problem = self._look_at_pool() or await self._take_pods()
            if problem:
                message = f"{problem}; the workers are those of the last reading"
                self._service.set_condition(codes.DISCOVERY_INTERRUPTED, self.subject, message)
            else:
                self._service.clear_condition(codes.DISCOVERY_INTERRUPTED, self.subject)

    def _look_at_pool(self) -> str:
        """Follow the pods that the pool selects; returns why that is not possible."""
        pools = self._pools
        if pools is None or not pools.follower.listed:
            return "" if pools is None else pools.follower.reason
        found: list[InferencePool] = pools.objects.all()
        if not found:
            return f"the cluster has no {self.subject}"
        pool = found[0]
        if pool.problem:
            return f"{self.subject}: {pool.problem}"
        if pool != self._pool:
            ports = ", ".join(map(str, pool.ports))
            _log.info(
                "%s: pods with %s, ports %s, %s%s", self.subject, pool.label_selector, ports,
                pool.failure_mode, f", picker {pool.picker}" if pool.picker else "",
            )  # fmt: skip
            self._pool = pool
        pods = self._pods
        if pods is None or pods.resource.selector != pool.label_selector:
            if pods is not None:
                pods.stopped.set()
            resource = Resource("", "v1", "pods", pool.label_selector)
            self._pods = self._follow(resource, pod)
        return ""

    async def _take_pods(self) -> str:
        pods, pool = self._pods, self._pool
        if pods is None or pool is None:
            return ""
        if not pods.follower.listed:
            return pods.follower.reason
        wanted: dict[str, WorkerSpec] = {}
        problem = ""
        for pool_pod in pods.objects.all():
            try:
                wanted |= {spec.name: spec for spec in pod_specs(pool_pod, pool, self._config)}
            except WorkerSpecError as error:
                problem = str(error)
        for member in self._fleet:
            if member.source == SOURCE and member.spec.name not in wanted:
                _log.info("worker %s left %s", member.spec.name, self.subject)
                await self._fleet.remove(member.spec.name)
        added = await asyncio.gather(
            *(self._fleet.add(spec, SOURCE) for spec in wanted.values()), return_exceptions=True
        )
        for result in added:
            if isinstance(result, (WorkerSpecError, FleetFull)):
                problem = str(result)
            elif isinstance(result, BaseException):
                raise result
        self._read.set()
        return problem


def pod_specs(pool_pod: Pod, pool: InferencePool, config: PoolConfig) -> Iterator[WorkerSpec]:
    """A worker for each port of a ready pod. Raises WorkerSpecError."""
    if not pool_pod.ready or pool_pod.deleting or not pool_pod.ip:
        return
    host = f"[{pool_pod.ip}]" if ":" in pool_pod.ip else pool_pod.ip
    role = pool_pod.labels.get(config.role_label, "")
    domains = {
        domain: pool_pod.labels[label]
        for domain, label in config.domains.items()
        if label in pool_pod.labels
    }
    for rank, port in enumerate(pool.ports):
        given: dict[str, Any] = {
            "url": f"http://{host}:{port}",
            "name": pool_pod.name if len(pool.ports) == 1 else f"{pool_pod.name}-rank-{rank}",
            "domains": domains,
        }
        if role in _ROLES:
            given["role"] = role
        for key, first in (("kv-events", config.events_port), ("replay", config.replay_port)):
            if first is not None:
                given[key] = f"tcp://{host}:{first + rank}"
        spec = worker_spec(given, where=f"pod {pool_pod.namespace}/{pool_pod.name}")
        if len(pool.ports) == 1 and DISCOVERY_ENABLED_LABEL in pool_pod.labels:
            # A worker of Dynamo: its sidecar knows it by the id of its registration.
            spec = replace(spec, instance_id=instance_id(pool_pod.name))
        yield spec


def _name(body: Mapping[str, Any]) -> str:
    about = mapping(body.get("metadata"))
    return f"{text(about.get('namespace'))}/{text(about.get('name'))}"
