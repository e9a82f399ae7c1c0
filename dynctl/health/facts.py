"""The input of the checks: frozen facts, gathered once.

``Unread`` replaces a fact that could not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from dynctl.documents.fleet_load import Condition
from dynctl.documents.models import ModelReadiness
from dynctl.documents.workers import StreamState
from dynctl.health.deployment import Deployment
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics

FrontendKind = Literal["dynamo", "dynctl", "other"]
Thresholds = Mapping[str, float | int | None]
"""Setting -> value; None is off."""


_NOTHING: Final = Deployment()


#: The address of channels over NATS: one server has all of them.
NATS: Final = "NATS"
UNNUMBERED: Final = -1
"""A worker of Dynamo 1.0 answers with its blocks, and without the number of its last event."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a fact could not be read, and what to try."""

    why: str
    hint: str = ""

    @property
    def fix(self) -> str:
        """What to try, as one line: the lines of the hint as sentences."""
        lines = [
            line if line.endswith(("?", ".")) else f"{line};" for line in self.hint.split("\n")
        ]
        return " ".join(lines).removesuffix(";")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The KV events of one rank, received and queried.

    ``channel``: the address of its events (:data:`NATS` for all over NATS), None without one;
    ``indexer``: the address for queries. ``newest``: its own count of events at the end of
    listening (UNNUMBERED: it answers without one); ``refusal``: why that is unknown.
    ``called_back`` is False where the worker accepted the query and never connected back, None
    where there was no query or no connection. ``own_names``: blocks whose hash differs from that of
    other workers. ``incomplete``, ``disconnected``, ``foreign`` and ``unreadable``: the last
    problem of that kind.
    """

    worker: str
    dp_rank: int
    channel: str | None
    indexer: str | None
    state: StreamState
    newest: int | None = None
    refusal: str | None = None
    called_back: bool | None = None
    current: bool = True
    incomplete: str = ""
    disconnected: str = ""
    foreign: str = ""
    unreadable: str = ""
    own_names: int = 0

    @property
    def name(self) -> str:
        """``worker``, or ``worker rank 1``."""
        return self.worker if not self.dp_rank else f"{self.worker} rank {self.dp_rank}"


@dataclass(frozen=True, slots=True)
class PlaneFacts:
    """A deployment as its planes show it. Where ``unreachable`` is set, all else is unknown.

    ``namespace`` None: all namespaces. ``waited_s``: the time limit for reading the caches;
    ``listened_s``: for how long events were received after that; ``query_timeout_s``: the time
    limit of a query to a worker. ``comparable``: at least two workers cache the same block.
    ``replica_sync_events``: routed requests that frontends published in that time.
    ``out_of_reach``: why workers are not reachable, empty where they are.
    """

    title: str
    namespace: str | None = None
    unreachable: Unread | None = None
    deployment: Deployment = _NOTHING
    ranks: tuple[RankFacts, ...] = ()
    waited_s: float = 0.0
    listened_s: float = 0.0
    query_timeout_s: float = 0.0
    comparable: bool = False
    replica_sync_events: int = 0
    out_of_reach: str = ""


@dataclass(frozen=True, slots=True)
class FrontendFacts:
    """One frontend. Where ``kind`` is Unread, all else is unknown.

    ``mode``: the router mode, None where the frontend does not report it. ``models``: the models
    that it serves. ``conditions``: those that a dynctl frontend reports. ``requires_domain``:
    whether a transfer policy requires a domain of a prefill worker, None where it is unknown.
    ``graph`` and ``space``: its graph and its Dynamo namespace, empty where they are unknown.
    """

    url: str
    kind: FrontendKind | Unread
    version: str | Unread | None = None
    mode: str | None = None
    models: tuple[str, ...] | Unread = ()
    metrics: FrontendMetrics | Unread = Unread("not read")
    ready: Mapping[str, ModelReadiness | Unread] = field(default_factory=dict)
    thresholds: Mapping[str, Thresholds] | Unread = Unread("not read")
    conditions: tuple[Condition, ...] | Unread = Unread("not read")
    requires_domain: bool | None = None
    graph: str = ""
    space: str = ""

    @property
    def is_dynamo(self) -> bool:
        return self.kind == "dynamo"

    @property
    def answers(self) -> bool:
        return self.kind in ("dynamo", "dynctl")


@dataclass(frozen=True, slots=True)
class CheckFacts:
    """All facts. ``planes`` None: no discovery backend was specified.

    ``frontends_unread``: why the frontends of a cluster are unknown, empty where they are known.
    """

    planes: PlaneFacts | None = None
    frontends: tuple[FrontendFacts, ...] = ()
    frontends_unread: str = ""

    @property
    def deployment(self) -> Deployment | None:
        """The registered deployment; None where it is unknown."""
        if self.planes is None or self.planes.unreachable is not None:
            return None
        return self.planes.deployment
