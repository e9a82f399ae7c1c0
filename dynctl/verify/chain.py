"""The chain of custody of a worker's topology: each link is compared with the one before it. Pure.

Only neighbours are compared, so that one fault shows at one link: if the pod label is missing, the
empty file behind it is not a second fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dynctl.documents.verify import CellState
from dynctl.health.deployment import RegisteredWorker
from dynctl.health.facts import Unread
from dynctl.verify.graph_policy import GraphPolicy
from dynctl.wire.kubernetes.objects import Endpoint, Node, Pod
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata
from router_core import Role


class LinkName(StrEnum):
    """The links in order."""

    NODE = "node"
    LABEL = "pod label"
    FILE = "file"
    CARD = "card"
    TAINT = "taint"
    ROUTER = "router"


LINKS: Final = tuple(LinkName)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """The value at one link. ``value`` None: the link is known to have no value.

    ``unknown``: why the value is not known; then no check may conclude anything from it.
    ``unread``: it is unknown because a request for it failed, which is worth a warning.
    """

    value: str | None = None
    unknown: str = ""
    unread: bool = False

    @property
    def known(self) -> bool:
        return not self.unknown

    @classmethod
    def of_unread(cls, unread: Unread) -> ChainLink:
        """A link whose value could not be read."""
        return cls(None, unread.why, unread=True)


@dataclass(frozen=True, slots=True)
class ComparedLink:
    """A link compared with the links before it.

    ``before``: the nearest earlier known link; None for the node. ``expected``: the value of that
    link. ``state``: against the nearest known link that has a value.
    """

    link: LinkName
    state: CellState
    value: str | None = None
    before: LinkName | None = None
    expected: str | None = None

    @property
    def is_break(self) -> bool:
        """Whether the chain breaks here, so that a check reports this link.

        A link behind one without a value may differ and is no break: the fault is before it.
        """
        if self.state is CellState.DIFFERS:
            return self.expected is not None
        return self.state is CellState.MISSING and (
            self.before is not None or self.link is LinkName.NODE
        )


@dataclass(frozen=True, slots=True)
class DomainChain:
    """The links of one domain of one worker, in the order of :data:`LINKS`."""

    domain: str
    links: Mapping[LinkName, ChainLink]

    def __getitem__(self, name: LinkName) -> ChainLink:
        return self.links[name]

    def compare_links(self) -> Iterator[ComparedLink]:
        """Every link, in order."""
        before: LinkName | None = None
        expected: str | None = None
        carried: str | None = None  # of the nearest known link that has a value
        for name, link in self.links.items():
            if not link.known:
                yield ComparedLink(name, CellState.UNKNOWN)
                continue
            if link.value is None:
                nothing = before is not None and expected is None
                state = CellState.NONE if nothing else CellState.MISSING
            else:
                same = carried in (None, link.value)
                state = CellState.SAME if same else CellState.DIFFERS
                carried = link.value
            yield ComparedLink(name, state, link.value, before, expected)
            before, expected = name, link.value

    def breaks(self) -> Iterator[ComparedLink]:
        """The links at which the chain breaks: each is one fault."""
        return (link for link in self.compare_links() if link.is_break)


@dataclass(frozen=True, slots=True)
class WorkerChain:
    """One worker pod, or one registered worker if Kubernetes was not read.

    ``graph``: ``namespace/name``, or empty. ``role_source``: where the role comes from (card,
    label, sub-label, type, sub-type, arguments, name, nothing). ``metadata``: the objects that
    belong to the worker by owner or by name; ``cards``: what it registered. ``endpoints``: its
    pod's endpoints in the discovery EndpointSlices, None if those could not be read.
    ``unclaimed``: why it is unknown which registrations are its own, else empty. ``follower``: a
    further rank of a multinode replica, which registers nothing; ``replica``: the name of that
    replica. ``encoder``: it encodes images and registers no model. ``chains``: domain
    -> links, with the transfer domain if its labels are known.
    """

    graph: str
    component: str
    role: Role | None
    role_source: str
    policy: GraphPolicy | None
    pod: Pod | None = None
    node: Node | None = None
    metadata: tuple[WorkerMetadata, ...] = ()
    cards: tuple[RegisteredWorker, ...] = ()
    endpoints: tuple[Endpoint, ...] | None = None
    unclaimed: str = ""
    follower: bool = False
    replica: str = ""
    encoder: bool = False
    chains: Mapping[str, DomainChain] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the pod, else of the registered worker."""
        if self.pod is not None:
            return self.pod.name
        return self.cards[0].worker.name if self.cards else "?"

    @property
    def subject(self) -> str:
        """Its name in findings: ``Pod name.namespace``, as istioctl writes it."""
        if self.pod is not None:
            return f"Pod {self.pod.name}.{self.pod.namespace}"
        return f"Worker {self.name}"

    @property
    def chain(self) -> DomainChain | None:
        """The chain of the transfer domain."""
        return None if self.policy is None else self.chains.get(self.policy.domain)

    @property
    def running(self) -> bool:
        """Whether its engine container runs now; True without a pod."""
        if self.pod is None:
            return True
        main = self.pod.main
        return main is not None and main.running_since is not None

    def value(self, link: LinkName) -> str | None:
        """The value of the transfer domain at a link; None if it has none or is unknown."""
        return None if self.chain is None else self.chain[link].value
