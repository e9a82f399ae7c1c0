"""Registration in a Kubernetes cluster: the DynamoWorkerMetadata object of this process's pod.

As Dynamo's workers do it: one object has all entries and is applied with force, the pod owns it,
and the instance id follows from its name. Frontends read the object while the pod is ready, so that
what a killed process leaves counts no longer than the pod's readiness.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, Final, TypeVar

import msgspec

from dynctl.adapters.ports import Cluster, ClusterRefusal, ClusterWriter
from dynctl.base.decode_errors import WireError
from dynctl.base.errors import Unreachable, UsageProblem
from dynctl.base.json_fields import mapping, sequence, text
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import MAX_VALUE_BYTES
from dynctl.wire.dynamo.request_plane import parse_address
from dynctl.wire.kubernetes.worker_metadata import (
    OwnPod,
    bucket_of,
    instance_id,
    metadata_object,
    metadata_path,
    worker_metadata,
)

MANAGER: Final = "dynamo-worker"
"""The field manager of Dynamo's workers."""

_AGAIN_S: Final = 10.0
_RETRY_S: Final = 1.0
_CLOSE_S: Final = 3.0
_DIAL_S: Final = 1.0
_MODE: Final = "DYN_KUBE_DISCOVERY_MODE"

_Result = TypeVar("_Result")


def own_pod(environ: Mapping[str, str], namespace: str) -> OwnPod:
    """The pod of this process, from the variables that Dynamo's workers read.

    ``namespace``: where ``POD_NAMESPACE`` is not set. Raises UsageProblem outside a pod.
    """
    missing = [name for name in ("POD_NAME", "POD_UID") if not environ.get(name)]
    if missing:
        raise UsageProblem(
            f"--discovery kubernetes registers the pod of this process, and {' and '.join(missing)}"
            f" {'are' if len(missing) > 1 else 'is'} not set",
            "In a pod, set POD_NAME, POD_UID and POD_NAMESPACE from metadata.name, metadata.uid and"
            " metadata.namespace (fieldRef); outside a pod use --discovery etcd or file.",
        )
    mode = environ.get(_MODE) or "pod"
    container = ""
    if mode == "container":
        container = environ.get("CONTAINER_NAME", "")
        if not container:
            raise UsageProblem(
                f"{_MODE}=container, and CONTAINER_NAME is not set",
                "Set CONTAINER_NAME to the name of this container.",
            )
    elif mode != "pod":
        raise UsageProblem(f"{_MODE} {mode[:40]}: expected pod or container")
    return OwnPod(
        environ.get("POD_NAMESPACE") or namespace,
        environ["POD_NAME"],
        environ["POD_UID"],
        container,
    )


class KubernetesRegistrar:
    """Registers the pod. ``cluster`` is closed by the discovery that reads it."""

    def __init__(
        self, cluster: Cluster, writer: ClusterWriter, pod: OwnPod, *, again_s: float = _AGAIN_S
    ) -> None:
        self._cluster = cluster
        self._writer = writer
        self._pod = pod
        self._again_s = again_s
        self._leases: set[PodLease] = set()
        #: The addresses that this process has registered.
        self._own: set[str] = set()

    @property
    def title(self) -> str:
        return f"kubernetes {self._cluster.title}, pod {self._pod.namespace}/{self._pod.name}"

    async def grant(self, instance_id: int | None = None) -> PodLease:
        """Raises Unreachable also while another process of the pod holds the object.

        The name of the object has the id, so that each lease of a pod has the same one.
        """
        pod = self._pod
        there = await asyncio.to_thread(_calling(pod, self._read))
        for address in there:
            if address not in self._own and await asyncio.to_thread(_answers, address):
                raise Unreachable(
                    f"DynamoWorkerMetadata {pod.object_name} belongs to the process of this pod "
                    f"that listens at {address}",
                    f"One process of a pod registers, or with {_MODE}=container one of a container",
                )
        lease = PodLease(self._writer, pod, self._own, self._again_s, self._leases.discard)
        self._leases.add(lease)
        return lease

    async def close(self) -> None:
        await asyncio.gather(*(lease.close() for lease in list(self._leases)))

    def _read(self) -> set[str]:
        """The addresses in the object of this pod that is there already."""
        pod = self._pod
        query = {"fieldSelector": f"metadata.name={pod.object_name}"}
        found: set[str] = set()
        for page in self._cluster.pages(metadata_path(pod.namespace), query):
            for body in sequence(page.get("items")):
                read = worker_metadata(mapping(body))
                if read.owner_uid == pod.uid:
                    found |= set(_addresses(read.data))
        return found


class PodLease:
    """The entries of one registration. The object is applied again every ``again_s`` seconds, so
    that it comes back if another process removes it."""

    def __init__(
        self,
        writer: ClusterWriter,
        pod: OwnPod,
        own: set[str],
        again_s: float,
        ended: Callable[[PodLease], None],
    ) -> None:
        self.id = instance_id(pod.object_name)
        self.lost = asyncio.Event()
        self.trouble = ""
        self._writer = writer
        self._pod = pod
        self._own = own
        self._again_s = again_s
        self._ended = ended
        self._data: dict[str, dict[str, Any]] = {}
        self._uid = ""
        self._closed = False
        self._turn = asyncio.Lock()
        self._work: asyncio.Future[Any] | None = None
        self._keeping = asyncio.create_task(self._keep(), name="kubernetes-lease")

    async def put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value):,} bytes are over {MAX_VALUE_BYTES:,}")
        bucket, name = bucket_of(key)
        self._data.setdefault(bucket, {})[name] = msgspec.json.decode(value)
        self._own |= set(_addresses(self._data))
        await self._apply()

    async def delete(self, key: str) -> None:
        bucket, name = bucket_of(key)
        self._data.get(bucket, {}).pop(name, None)
        await self._apply()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await end_tasks([self._keeping])
        if self._uid or self._work is not None:
            path = f"{metadata_path(self._pod.namespace)}/{self._pod.object_name}"
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._call(lambda: self._writer.delete(path, uid=self._uid))
        self._ended(self)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_S if self.trouble else self._again_s)
            if not self._data:
                continue
            try:
                await self._apply()
            except Unreachable as error:
                self.trouble = error.message

    async def _apply(self) -> None:
        body = metadata_object(self._pod, self._data)
        path = f"{metadata_path(self._pod.namespace)}/{self._pod.object_name}"

        def apply() -> None:
            applied = self._writer.apply(path, body, manager=MANAGER)
            # Here, because the caller may be gone: a removal needs the uid of the last one.
            self._uid = text(mapping(applied.get("metadata")).get("uid"))

        await self._call(apply)
        self.trouble = ""

    async def _call(self, function: Callable[[], _Result]) -> _Result:
        """Call a blocking function after the one before it has ended, also if that was cancelled:
        an apply must not arrive behind a removal."""
        async with self._turn:
            if self._work is not None:
                await asyncio.wait([self._work])
            self._work = asyncio.ensure_future(asyncio.to_thread(_calling(self._pod, function)))
            return await asyncio.shield(self._work)


def _calling(pod: OwnPod, function: Callable[[], _Result]) -> Callable[[], _Result]:
    def call() -> _Result:
        try:
            return function()
        except ClusterRefusal as refusal:
            hint = "is the DynamoWorkerMetadata definition of Dynamo installed in this cluster?"
            if refusal.status == 403:
                hint = (
                    f"the pod's service account in {pod.namespace} needs list, create, patch and "
                    "delete of dynamoworkermetadatas and list of endpointslices: "
                    "docs/deploy/kubernetes/attach.yaml"
                )
            raise Unreachable(f"the API server refuses it: {refusal.message}", hint) from refusal

    return call


def _addresses(data: Mapping[str, Any]) -> Iterator[str]:
    """HOST:PORT of the endpoints that take requests over TCP."""
    for one in mapping(data.get("endpoints")).values():
        address = text(mapping(mapping(one).get("transport")).get("tcp"))
        if address:
            yield address.partition("/")[0]


def _answers(location: str) -> bool:
    """Whether a process listens there."""
    try:
        address = parse_address(f"{location}/-")
        with closing(socket.create_connection((address.host, address.port), _DIAL_S)):
            return True
    except (OSError, WireError):
        return False
