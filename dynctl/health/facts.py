"""What checks judge: frozen facts, gathered once.

``Unread`` stands where something was asked for and not told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from dynctl.documents.workers import StreamState
from dynctl.health.deployment import Deployment
from dynctl.wire.dynamo.frontend_metrics import FrontendMetrics

FrontendKind = Literal["dynamo", "dynctl", "other"]
Thresholds = Mapping[str, float | int | None]
"""Setting -> value; None is off."""


_NOTHING: Final = Deployment()


@dataclass(frozen=True, slots=True)
class Unread:
    """Why something could not be read, and what to try."""

    why: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The events of one rank, heard and asked for.

    ``channel`` is where it says that it is heard, None if nowhere; ``indexer`` where it says that
    it can be asked. ``newest`` is its own count of events, told at the end of listening;
    ``refusal`` is why it did not tell. ``called_back`` is False where the worker took the question
    and never connected back, None where it was not asked or took no connection. ``own_names``:
    blocks that it names otherwise than others do.
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
    strange: str = ""
    own_names: int = 0

    @property
    def name(self) -> str:
        """``worker``, or ``worker rank 1``."""
        return self.worker if not self.dp_rank else f"{self.worker} rank {self.dp_rank}"


@dataclass(frozen=True, slots=True)
class PlaneFacts:
    """A deployment through its planes. Where ``unreachable`` is set, nothing else is known.

    ``namespace`` None: all of them. ``waited_s`` is how long the caches might take to be read,
    ``listened_s`` how long events were listened to after that. ``asked_s``: how long a worker had
    to answer. ``comparable``: two workers hold a block in common. ``routers_heard``: requests
    whose routing frontends told each other while we listened.
    """

    title: str
    namespace: str | None = None
    unreachable: Unread | None = None
    deployment: Deployment = _NOTHING
    ranks: tuple[RankFacts, ...] = ()
    waited_s: float = 0.0
    listened_s: float = 0.0
    asked_s: float = 0.0
    comparable: bool = False
    routers_heard: int = 0
    out_of_reach: str = ""


@dataclass(frozen=True, slots=True)
class ModelReady:
    """Whether a frontend can serve a model. ``workers``: namespace -> worker type -> how many."""

    ready: bool
    reason: str = ""
    workers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontendFacts:
    """One frontend. Where ``kind`` is Unread, nothing else is known.

    ``mode`` is the router mode where the frontend tells it by name. ``models``: what it serves.
    """

    url: str
    kind: FrontendKind | Unread
    version: str | Unread | None = None
    mode: str | None = None
    models: tuple[str, ...] | Unread = ()
    metrics: FrontendMetrics | Unread = Unread("not asked")
    ready: Mapping[str, ModelReady | Unread] = field(default_factory=dict)
    thresholds: Mapping[str, Thresholds] | Unread = Unread("not asked")

    @property
    def is_dynamo(self) -> bool:
        return self.kind == "dynamo"

    @property
    def answers(self) -> bool:
        return self.kind in ("dynamo", "dynctl")


@dataclass(frozen=True, slots=True)
class CheckFacts:
    """All that was gathered. ``planes`` None: no discovery backend was named.

    ``frontends_unread``: why those of a cluster are not known, empty where they are.
    """

    planes: PlaneFacts | None = None
    frontends: tuple[FrontendFacts, ...] = ()
    frontends_unread: str = ""

    @property
    def deployment(self) -> Deployment | None:
        """What is registered; None where that is not known."""
        if self.planes is None or self.planes.unreachable is not None:
            return None
        return self.planes.deployment
