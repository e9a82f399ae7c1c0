"""The facts that verify judges: of a cluster, a registry, a mount and routers, gathered once.

``Unread`` replaces a fact that could not be read. A missing value is a fact too: it is None or
empty, as the field's description says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from dynctl.adapters.ports import AccessReview
from dynctl.health.deployment import Deployment
from dynctl.health.facts import Unread
from dynctl.manifests.files import Manifest
from dynctl.wire.kubernetes.objects import Endpoint, KubeDeployment, Node, ObjectEvent, Pod
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata

T = TypeVar("T")
Listing: TypeAlias = tuple[T, ...] | Unread
PodKey: TypeAlias = tuple[str, str]
"""``(namespace, name)``."""


@dataclass(frozen=True, slots=True)
class TopologyFile:
    """A file in the topology mount. ``content`` None: the file does not exist.

    ``invalid``: why the content is not a valid value of a domain (not UTF-8, too large, not one
    line of text); the content is empty then.
    """

    content: str | None
    invalid: str = ""


@dataclass(frozen=True, slots=True)
class StartLog:
    """The topology lines at the start of a worker's log.

    ``domains`` None: the log has no configuration line. ``timed_out`` and ``not_persisted`` are
    the log lines about these errors, of the current or the previous run.
    """

    domains: Mapping[str, str] | None = None
    transfer_domain: str = ""
    enforcement: str = ""
    weight: float | None = None
    timed_out: str = ""
    not_persisted: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """Permissions of a service account. ``user``: its RBAC name, system:serviceaccount:NS:NAME."""

    user: str
    allowed: Mapping[AccessReview, bool] | Unread


@dataclass(frozen=True, slots=True)
class RouterView:
    """The ids of the workers that one frontend routes to. ``name``: its pod or URL.

    ``graph`` is ``namespace/name``, or empty if unknown.
    """

    name: str
    graph: str
    workers: frozenset[int] | Unread


@dataclass(frozen=True, slots=True)
class GraphSchema:
    """The transfer policy in one served version of the graph's resource definition.

    ``fields``: of spec.experimental.kvTransferPolicy; empty without this property.
    ``open``: the API server preserves unknown fields there.
    """

    version: str
    fields: frozenset[str]
    open: bool = False


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster. ``now`` is the cluster's clock, seconds since the epoch.

    ``namespaces``: those that were read, empty for all. ``wanted``: names of graphs from the
    command line, empty for all. ``served``: ``plural.group`` -> versions. ``access``: the
    permissions of the user. ``operators``: Deployments of Dynamo's operator in any namespace;
    ``operator_accounts``, ``worker_accounts``: permissions of their service accounts.
    ``grove_sets``: names of the PodCliqueSets, as ``namespace/name``. ``other_pods``: existing pods
    that own metadata and are not among ``pods``, looked up only with ``wanted``. ``files``,
    ``logs``: only of the pods whose files and logs were read. ``silent_nodes``: node -> how it is
    known that its kubelet does not respond. ``warnings``: events about workers that do not run, and
    about pods that could not be created.
    """

    title: str
    now: float
    version: str = ""
    namespaces: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    served: Mapping[str, tuple[str, ...]] | Unread = field(default_factory=dict)
    schemas: Listing[GraphSchema] = ()
    access: Mapping[AccessReview, bool | Unread] = field(default_factory=dict)
    graphs: Listing[Manifest] = ()
    topologies: Listing[Manifest] = ()
    nodes: Listing[Node] = ()
    pods: Listing[Pod] = ()
    events: Listing[ObjectEvent] = ()
    endpoints: Listing[Endpoint] = ()
    metadata: Listing[WorkerMetadata] = ()
    operators: Listing[KubeDeployment] = ()
    operator_accounts: tuple[Account, ...] = ()
    worker_accounts: tuple[Account, ...] = ()
    grove_sets: Listing[str] = ()
    other_pods: Listing[PodKey] = ()
    files: Mapping[PodKey, Mapping[str, TopologyFile] | Unread] = field(default_factory=dict)
    logs: Mapping[PodKey, StartLog | Unread] = field(default_factory=dict)
    silent_nodes: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[ObjectEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Registry:
    """The workers in a discovery backend other than Kubernetes."""

    title: str
    deployment: Deployment | Unread


@dataclass(frozen=True, slots=True)
class MountFacts:
    """The topology mount of one worker, in the local file system. ``files``: name -> content.

    ``domain``: the transfer domain of the worker, empty if not specified. ``absent``: why the
    directory does not exist, empty if it does.
    """

    path: str
    domain: str
    files: Mapping[str, TopologyFile] | Unread
    absent: str = ""


@dataclass(frozen=True, slots=True)
class VerifyFacts:
    """All gathered facts; parts that were not read are None or empty."""

    cluster: ClusterFacts | None = None
    registry: Registry | None = None
    mount: MountFacts | None = None
    routers: tuple[RouterView, ...] = ()
    probe: tuple[ProbeAnswer, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The response to one live request: HTTP status, and the ids of the workers that served it."""

    router: str
    status: int
    message: str = ""
    prefill: int | None = None
    decode: int | None = None
