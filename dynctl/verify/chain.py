"""One worker's chain of custody: each link compared with the link before it. Pure.

Only neighbours are compared, so that one fault shows at one link: where the pod's label is gone,
the empty file behind it is not a second fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dynctl.health.deployment import ObservedWorker
from dynctl.health.facts import Unread
from dynctl.verify.policy import Policy
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
class Link:
    """What stands at one link. ``value`` None: nothing, and that is known.

    ``untold``: why it is not known (nothing may be concluded then). ``unread``: because something
    that was asked for was refused, which is worth a warning; otherwise it was not asked.
    """

    value: str | None = None
    untold: str = ""
    unread: bool = False

    @property
    def told(self) -> bool:
        return not self.untold

    @classmethod
    def of(cls, unread: Unread) -> Link:
        """A link that was asked for and not told."""
        return cls(None, unread.why, unread=True)


@dataclass(frozen=True, slots=True)
class Break:
    """A link that is not as the one before it. ``expected`` is None for a node without the label.

    ``before`` is the nearest earlier link that is known; the node has none.
    """

    link: LinkName
    value: str | None
    before: LinkName | None
    expected: str | None


@dataclass(frozen=True, slots=True)
class DomainChain:
    """The links of one domain of one worker, in the order of :data:`LINKS`."""

    domain: str
    links: Mapping[LinkName, Link]

    def __getitem__(self, name: LinkName) -> Link:
        return self.links[name]

    def breaks(self) -> Iterator[Break]:
        """Every link that differs from its nearest known predecessor.

        A predecessor without a value breaks nothing behind it: that is its own fault.
        """
        before: LinkName | None = None
        for name in LINKS:
            link = self.links[name]
            if not link.told:
                continue
            if before is None:
                if link.value is None and name is LinkName.NODE:
                    yield Break(name, None, None, None)
            else:
                expected = self.links[before].value
                if expected is not None and link.value != expected:
                    yield Break(name, link.value, before, expected)
            before = name

    @property
    def first_break(self) -> Break | None:
        return next(self.breaks(), None)


@dataclass(frozen=True, slots=True)
class WorkerChain:
    """One worker pod, or one registered worker where there is no Kubernetes.

    ``graph``: ``namespace/name``, empty without one. ``role_told_by`` names the witness (card,
    label, sub-label, type, sub-type, arguments, name, nothing). ``metadata``: the objects that
    are, or by their name should be, its own; ``cards``: what it registered. ``endpoints``: its
    pod's in discovery's slices, None where those could not be read. ``follower``: a further rank
    of a multinode replica, which registers nothing; ``replica`` tells which one.
    ``chains``: domain -> links; the transfer domain is among them where its labels are known.
    """

    graph: str
    component: str
    role: Role | None
    role_told_by: str
    policy: Policy | None
    pod: Pod | None = None
    node: Node | None = None
    metadata: tuple[WorkerMetadata, ...] = ()
    cards: tuple[ObservedWorker, ...] = ()
    endpoints: tuple[Endpoint, ...] | None = None
    follower: bool = False
    replica: str = ""
    chains: Mapping[str, DomainChain] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The pod's name, else the registered worker's."""
        if self.pod is not None:
            return self.pod.name
        return self.cards[0].worker.name if self.cards else "?"

    @property
    def subject(self) -> str:
        """How findings name it: ``Pod name.namespace``, as istioctl does."""
        if self.pod is not None:
            return f"Pod {self.pod.name}.{self.pod.namespace}"
        return f"Worker {self.name}"

    @property
    def chain(self) -> DomainChain | None:
        """Of the transfer domain."""
        return None if self.policy is None else self.chains.get(self.policy.domain)

    @property
    def running(self) -> bool:
        """Whether its engine container runs now; True where there is no pod to ask."""
        if self.pod is None:
            return True
        main = self.pod.main
        return main is not None and main.running_since is not None

    def value(self, link: LinkName) -> str | None:
        """The value of the transfer domain at a link; None where there is none or it is untold."""
        return None if self.chain is None else self.chain[link].value
