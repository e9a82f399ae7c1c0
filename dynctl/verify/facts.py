"""What verify judges: facts of a cluster, of a registry and of a mount, gathered once.

``Unread`` stands where something was asked for and not told. Absent values are facts too: they
are None or empty, as each field says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from dynctl.adapters.ports import AccessQuestion
from dynctl.health.deployment import Deployment
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.wire.kubernetes.objects import Endpoint, Node, Pod, PodEvent, Workload
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata

T = TypeVar("T")
Listing: TypeAlias = tuple[T, ...] | Unread
PodKey: TypeAlias = tuple[str, str]
"""``(namespace, name)``."""

NOT_ASKED: Final = Unread("not asked for")


@dataclass(frozen=True, slots=True)
class TopologyFile:
    """A file below the topology mount. ``content`` None: there is no such file.

    ``strange``: why the content cannot be a domain's value (not UTF-8, too large, no line of
    text); it is empty then.
    """

    content: str | None
    strange: str = ""


@dataclass(frozen=True, slots=True)
class StartLog:
    """What the beginning of a worker's log says of topology.

    ``domains`` None: it has no line of its configuration. ``timed_out`` and ``not_persisted`` are
    the lines that say so, of this run or the one before it.
    """

    domains: Mapping[str, str] | None = None
    transfer_domain: str = ""
    enforcement: str = ""
    weight: float | None = None
    timed_out: str = ""
    not_persisted: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """What somebody else may do. ``user`` as RBAC names it: system:serviceaccount:NS:NAME."""

    user: str
    allowed: Mapping[AccessQuestion, bool] | Unread


@dataclass(frozen=True, slots=True)
class RouterView:
    """The workers that one frontend knows, by id. ``name``: its pod or URL.

    ``graph`` is ``namespace/name``, empty where it is not known.
    """

    name: str
    graph: str
    workers: frozenset[int] | Unread


@dataclass(frozen=True, slots=True)
class GraphSchema:
    """What the served resource definition knows of the policy, in one of its versions.

    ``fields``: of spec.experimental.kvTransferPolicy; empty where it has no such property.
    ``open``: unknown fields are kept there.
    """

    version: str
    fields: frozenset[str]
    open: bool = False


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster. ``now`` is its own clock, seconds since the epoch.

    ``namespaces``: what was looked at, empty for all. ``wanted``: the graphs that were named,
    empty for all of those namespaces. ``served``: ``plural.group`` -> versions. ``access``: what
    we ourselves may do. ``operators`` are Deployments of Dynamo's operator in any namespace,
    ``operator_accounts`` and ``worker_accounts`` what their service accounts may do.
    ``grove_sets``: names of the PodCliqueSets, as ``namespace/name``.
    ``files``, ``logs``: of the pods that were read; a pod that is not here was not asked.
    """

    title: str
    now: float
    version: str = ""
    namespaces: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    served: Mapping[str, tuple[str, ...]] | Unread = field(default_factory=dict)
    schemas: Listing[GraphSchema] = ()
    access: Mapping[AccessQuestion, bool | Unread] = field(default_factory=dict)
    graphs: Listing[Manifest] = ()
    topologies: Listing[Manifest] = ()
    nodes: Listing[Node] = ()
    pods: Listing[Pod] = ()
    events: Listing[PodEvent] = ()
    endpoints: Listing[Endpoint] = ()
    metadata: Listing[WorkerMetadata] = ()
    operators: Listing[Workload] = ()
    operator_accounts: tuple[Account, ...] = ()
    worker_accounts: tuple[Account, ...] = ()
    grove_sets: Listing[str] = ()
    files: Mapping[PodKey, Mapping[str, TopologyFile] | Unread] = field(default_factory=dict)
    logs: Mapping[PodKey, StartLog | Unread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Registry:
    """What a discovery backend other than Kubernetes tells."""

    title: str
    deployment: Deployment | Unread


@dataclass(frozen=True, slots=True)
class MountFacts:
    """The topology mount of one worker, read where we run. ``files``: name -> content.

    ``domain``: the transfer domain that the worker expects, empty where nobody said one.
    ``absent``: why there is no such directory, empty where there is.
    """

    path: str
    domain: str
    files: Mapping[str, TopologyFile] | Unread
    absent: str = ""


@dataclass(frozen=True, slots=True)
class VerifyFacts:
    """Everything that was gathered; what was not looked at is None or empty."""

    cluster: ClusterFacts | None = None
    registry: Registry | None = None
    mount: MountFacts | None = None
    routers: tuple[RouterView, ...] = ()
    probe: tuple[ProbeAnswer, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One live request. ``status`` is HTTP's; the ids are of the workers that served it."""

    router: str
    status: int
    message: str = ""
    prefill: int | None = None
    decode: int | None = None
