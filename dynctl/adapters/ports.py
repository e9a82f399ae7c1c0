"""The seams: what a plane hands to the rest of dynctl, and what it must be able to do.

Adapters in ``dynctl.adapters`` produce these values; nobody else needs to know which library they
came through. A Protocol stands here once it has a reader.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from dynctl.documents.workers import StreamState
from dynctl.wire.dynamo.discovery import EventChannel, Instance
from dynctl.wire.dynamo.request_plane import RawItem
from router_core import BlocksRemoved, BlocksStored, Change, Cleared, IndexMarked, KvEvent


class StreamCode(StrEnum):
    """What can be wrong, or right again, with a worker's event stream. Codes are stable.

    The codes of ``dynctl.wire.index_events.DropCode`` appear as conditions too.
    """

    ENGINE_RESTARTED = "ENGINE_RESTARTED"
    EVENTS_LOST = "EVENTS_LOST"
    INDEX_CURRENT = "INDEX_CURRENT"
    REPLAY_UNAVAILABLE = "REPLAY_UNAVAILABLE"
    STREAM_CONNECTED = "STREAM_CONNECTED"
    STREAM_DISCONNECTED = "STREAM_DISCONNECTED"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MALFORMED_BATCH = "MALFORMED_BATCH"
    UNKNOWN_EVENT = "UNKNOWN_EVENT"
    FOREIGN_PUBLISHER = "FOREIGN_PUBLISHER"
    """Messages of somebody else came on this worker's channel; they are skipped."""


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """One batch of a worker's rank, ready to apply. Updates of a stream come in sequence order.

    ``published_at`` is the engine's wall clock in seconds: shown to people, never compared with
    ours. ``replayed`` says that the batch came from the replay socket.
    """

    worker_id: int
    dp_rank: int
    seq: int
    events: tuple[BlocksStored | BlocksRemoved | Cleared, ...]
    published_at: float
    replayed: bool = False

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order."""
        for event in self.events:
            yield KvEvent(self.worker_id, self.dp_rank, event)


@dataclass(frozen=True, slots=True)
class StreamCondition:
    """Something about a stream that an operator or the index must know.

    ``ranks`` are the data-parallel ranks concerned. ``clears`` means that everything known about
    them is void and must be forgotten before the next update. ``missing`` (batches), where set,
    is how much of each rank's history is lost from now on; 0 means that its index is whole.
    """

    worker_id: int
    code: str
    message: str
    ranks: tuple[int, ...]
    details: Mapping[str, int | str] = field(default_factory=dict)
    clears: bool = False
    missing: int | None = None

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order; none for a condition that only people care about."""
        for rank in self.ranks:
            if self.clears:
                yield KvEvent(self.worker_id, rank, Cleared())
            if self.missing is not None:
                state: Literal["current", "gapped"] = "gapped" if self.missing else "current"
                yield IndexMarked(self.worker_id, rank, state, self.missing)


StreamValue = IndexUpdate | StreamCondition


class KvEventStream(Protocol):
    """One worker's KV events. Values go to the callback given at construction, in order."""

    async def run(self) -> None:
        """Follow the stream until cancelled; leaves no socket behind."""
        ...

    def state(self) -> StreamState:
        """A snapshot of the counters."""
        ...


# -- discovery -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One key and its value, undecoded. Keys are Dynamo's logical ones in every backend.

    ``owner``: what people call who registered it (its pod), where the backend tells.
    """

    key: str
    value: bytes
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """Everything that is registered now; whatever was known before and is not here is gone."""

    entries: tuple[DiscoveryEntry, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """An entry is new or has another value."""

    entry: DiscoveryEntry


@dataclass(frozen=True, slots=True)
class Deleted:
    """An entry was removed, or its lease ended."""

    key: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The plane cannot be heard (``reason``); a Listed follows once it can. What is known stays."""

    reason: str


DiscoveryChange = Listed | Put | Deleted | Interrupted


class Discovery(Protocol):
    """Reads what is registered below a key prefix; never writes."""

    @property
    def title(self) -> str:
        """What people see: the backend and its address, without credentials."""
        ...

    async def list(self) -> Listed:
        """What is registered now. Raises dynctl.base.errors.Unreachable."""
        ...

    def watch(self) -> AsyncGenerator[DiscoveryChange, None]:
        """A Listed, then changes in order, for as long as the caller reads; close it with aclose.

        Does not raise when the plane is not there: that is an Interrupted, and it goes on trying.
        """
        ...

    async def close(self) -> None:
        """Leaves no connection, thread or task."""
        ...


# -- events of the event plane ---------------------------------------------------------------------


class ChannelCode(StrEnum):
    """What can happen to one publisher's channel. Codes are stable."""

    CHANNEL_CONNECTED = "CHANNEL_CONNECTED"
    CHANNEL_DISCONNECTED = "CHANNEL_DISCONNECTED"
    EVENTS_DROPPED = "EVENTS_DROPPED"
    """Sequence numbers were skipped: ``count`` messages were lost on the way."""
    PUBLISHER_RESTARTED = "PUBLISHER_RESTARTED"
    """The sequence went back to its start."""
    FOREIGN_PUBLISHER = "FOREIGN_PUBLISHER"
    """Messages of a publisher that discovery does not name for this channel; they are skipped."""
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message of a channel, in order. ``payload`` is undecoded msgpack.

    ``published_at_ms`` is the publisher's wall clock: shown to people, never compared with ours.
    """

    topic: str
    publisher_id: int
    sequence: int
    published_at_ms: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ChannelCondition:
    """Something about a channel that an operator or the index must know. ``count``: messages."""

    topic: str
    publisher_id: int
    code: ChannelCode
    message: str
    count: int = 0


@dataclass(slots=True)
class ChannelCounts:
    """Counters of one channel since it is followed, in messages."""

    received: int = 0
    dropped: int = 0
    duplicates: int = 0
    malformed: int = 0
    foreign: int = 0
    restarts: int = 0


ChannelValue = ChannelMessage | ChannelCondition


class ChannelFollower(Protocol):
    """Follows one publisher. Values go to the callback given at construction, in order."""

    counts: ChannelCounts

    @property
    def connected(self) -> bool: ...

    async def run(self) -> None:
        """Follow until cancelled; reconnects by itself; leaves no socket behind."""
        ...


class EventPlane(Protocol):
    """Makes followers of the channels that discovery names, and shares what they can share."""

    def follow(
        self, channel: EventChannel, emit: Callable[[ChannelValue], None]
    ) -> ChannelFollower:
        """``emit`` is called from the event loop and must not block."""
        ...

    async def close(self) -> None: ...


# -- the request plane -----------------------------------------------------------------------------


class RequestPlane(Protocol):
    """Asks an endpoint of a worker and streams its answer."""

    def ask_raw(
        self, instance: Instance, body: Any, *, timeout: float, max_bytes: int
    ) -> AsyncGenerator[RawItem, None]:
        """The items of the answer as they arrive, undecoded: one may be too large for one turn.

        ``timeout``: seconds that each next item may take; ``max_bytes`` bounds the whole answer.
        Who stops early closes it (aclose), which tells the worker. Raises RequestPlaneError naming
        the instance and what went wrong.
        """
        ...

    async def close(self) -> None: ...


class RequestPlaneError(Exception):
    """A worker did not answer as it should; the message says where and how."""


class NotCalledBack(RequestPlaneError):
    """A worker took the question and no connection of its own came: the way back is closed."""


# -- a Kubernetes cluster --------------------------------------------------------------------------


class ClusterRefusal(Exception):
    """The API server answered no. ``status`` is HTTP's, ``reason`` Kubernetes' own word.

    401 never comes as this (that is Unreachable: nothing can be read); 403, 404, 410 and 422 do.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def forbidden(self) -> bool:
        return self.status == 403

    @property
    def missing(self) -> bool:
        return self.status == 404


@dataclass(frozen=True, slots=True)
class AccessQuestion:
    """May somebody do this? ``resource`` may have a subresource: ``pods/exec``.

    ``namespace`` None asks for all namespaces (or for a resource that has none).
    """

    verb: str
    resource: str
    group: str = ""
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One event of a watch. ``kind`` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    object: Mapping[str, Any]


class Cluster(Protocol):
    """Reads a Kubernetes cluster; blocking, safe to call from several threads.

    It sends GETs, access reviews, exec of ``cat`` and port-forwards, nothing that changes anything.
    Paths are those of the API (``/api/v1/nodes``), ``query`` its parameters. Everything raises
    ClusterRefusal where the API server says no, and Unreachable where it does not answer, the TLS
    handshake fails or the credentials are not accepted.
    """

    @property
    def title(self) -> str:
        """What people see: the context's name and the server's address."""
        ...

    @property
    def namespace(self) -> str:
        """The context's namespace, ``default`` where it names none."""
        ...

    @property
    def now(self) -> float:
        """The cluster's clock, seconds since the epoch: told by its last answer."""
        ...

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        """One object."""
        ...

    def pages(
        self, path: str, query: Mapping[str, str] | None = None, *, page: int = 500
    ) -> Iterator[Mapping[str, Any]]:
        """A list in pages of at most ``page`` items, each a whole ``...List`` object.

        Where the continue token expires in between (410), the list is begun again once; the
        caller then gets a page with ``metadata.dynctlRestarted`` true and drops what it has.
        """
        ...

    def watch(
        self, path: str, resource_version: str, query: Mapping[str, str] | None = None
    ) -> Iterator[ClusterEvent]:
        """Changes after ``resource_version``, until the server ends the watch (then it returns).

        Raises ClusterRefusal with status 410 where that version is too old: list again.
        """
        ...

    def allowed(
        self, question: AccessQuestion, *, user: str | None = None, groups: tuple[str, ...] = ()
    ) -> bool:
        """Whether we may do it (``user`` None), or that user; an access review either way."""
        ...

    def read_file(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> bytes:
        """A file of a container, by exec of ``cat``.

        Raises FileNotFoundError naming the path; ClusterRefusal where exec is refused or the
        container does not run; ValueError where it is larger than ``max_bytes``.
        """
        ...

    def log_lines(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        previous: bool = False,
        max_bytes: int = 1 << 20,
    ) -> Iterator[str]:
        """The first lines of a container's log, oldest first, at most ``max_bytes`` in all."""
        ...

    def forward(self, namespace: str, pod: str, port: int) -> AbstractContextManager[str]:
        """``HOST:PORT`` on this machine that leads to a port of the pod while it is open."""
        ...

    def close(self) -> None:
        """Leaves no connection or thread."""
        ...
