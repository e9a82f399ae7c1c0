"""The interfaces of adapters: their values, and the protocols that they implement.

Other rooms use these values and protocols and do not depend on the libraries of adapters.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from dynctl.base.options import GlobalOptions
from dynctl.wire.dynamo.discovery import EventChannel, Instance
from dynctl.wire.dynamo.events import Envelope
from dynctl.wire.dynamo.request_plane import RawItem
from router_core import (
    CacheEvent,
    Change,
    Cleared,
    IndexConnected,
    IndexMarked,
    KvEvent,
)


class StreamCode(StrEnum):
    """Problems and recoveries of a worker's event stream. Codes are stable.

    The codes of ``dynctl.wire.index_events.DropCode`` appear as conditions too.
    """

    ENGINE_RESTARTED = "ENGINE_RESTARTED"
    EVENTS_LOST = "EVENTS_LOST"
    EVENTS_KEPT_UP = "EVENTS_KEPT_UP"
    """Ends EVENTS_OVERFLOW: its messages are read as they arrive."""
    EVENTS_OVERFLOW = "EVENTS_OVERFLOW"
    INDEX_CURRENT = "INDEX_CURRENT"
    REPLAY_AVAILABLE = "REPLAY_AVAILABLE"
    REPLAY_UNAVAILABLE = "REPLAY_UNAVAILABLE"
    STREAM_CONNECTED = "STREAM_CONNECTED"
    STREAM_DISCONNECTED = "STREAM_DISCONNECTED"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MALFORMED_BATCH = "MALFORMED_BATCH"
    PAIRS_PUBLISHED = "PAIRS_PUBLISHED"
    """The engine publishes pairs of tokens (SGLang with EAGLE): its prompts are hashed so."""
    TOKENS_PUBLISHED = "TOKENS_PUBLISHED"
    """Ends PAIRS_PUBLISHED: the engine publishes single tokens."""
    UNKNOWN_EVENT = "UNKNOWN_EVENT"
    FOREIGN_PUBLISHER = "FOREIGN_PUBLISHER"
    """Messages of another publisher arrived on this worker's channel; they are skipped."""


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """One batch of a worker's rank, ready to apply. Updates of a stream come in sequence order.

    ``published_at`` is the engine's wall clock in seconds: only displayed, never compared with
    ours. ``replayed`` says that the batch came from the replay socket.
    """

    worker_id: int
    dp_rank: int
    seq: int
    events: tuple[CacheEvent, ...]
    published_at: float
    replayed: bool = False

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order."""
        for event in self.events:
            yield KvEvent(self.worker_id, self.dp_rank, event)


@dataclass(frozen=True, slots=True)
class StreamCondition:
    """A condition of a stream, for operators or the index.

    ``ranks`` are the data-parallel ranks concerned. ``clears``: the index of these ranks is
    invalid and must be cleared before the next update. ``missing`` (batches), if set, is how much
    of each rank's history is lost from now on; 0: its index is complete.
    """

    worker_id: int
    code: str
    message: str
    ranks: tuple[int, ...]
    details: Mapping[str, int | str] = field(default_factory=dict)
    clears: bool = False
    missing: int | None = None

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order; none for a condition that is only displayed."""
        for rank in self.ranks:
            if self.code in (StreamCode.STREAM_CONNECTED, StreamCode.STREAM_DISCONNECTED):
                connected = self.code == StreamCode.STREAM_CONNECTED
                yield IndexConnected(self.worker_id, rank, connected)
            if self.clears:
                yield KvEvent(self.worker_id, rank, Cleared())
            if self.missing is not None:
                state: Literal["current", "gapped"] = "gapped" if self.missing else "current"
                yield IndexMarked(self.worker_id, rank, state, self.missing)


@dataclass(frozen=True, slots=True)
class IndexRead:
    """Whether the connected stream has read all that these ranks cached before.

    After a connection it has not, until the replay socket answers or the next batch shows that
    nothing is missing.
    """

    worker_id: int
    ranks: tuple[int, ...]
    complete: bool

    def changes(self) -> Iterator[Change]:
        """The router's changes, in order."""
        for rank in self.ranks:
            yield IndexConnected(self.worker_id, rank, True, recovering=not self.complete)


StreamValue = IndexUpdate | StreamCondition | IndexRead


# -- discovery -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One key and its value, undecoded. Keys are Dynamo's logical ones in every backend.

    ``owner``: the name of the process that registered it (its pod), if the backend has it.
    """

    key: str
    value: bytes
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """All current entries; earlier entries that are missing here were removed."""

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
    """The plane is not reachable (``reason``); a Listed follows once it is. Known entries stay."""

    reason: str


DiscoveryChange = Listed | Put | Deleted | Interrupted


class Discovery(Protocol):
    """Reads the entries below a key prefix; never writes."""

    @property
    def title(self) -> str:
        """The backend and its address for display, without credentials."""
        ...

    async def list(self) -> Listed:
        """The current entries. Raises dynctl.base.errors.Unreachable."""
        ...

    def watch(self) -> AsyncGenerator[DiscoveryChange, None]:
        """A Listed, then changes in order, for as long as the caller reads; close it with aclose.

        Does not raise if the plane is not reachable: it yields Interrupted and retries.
        """
        ...

    async def close(self) -> None:
        """Leaves no connection, thread or task."""
        ...


# -- registration ----------------------------------------------------------------------------------


class Lease(Protocol):
    """Entries of this process that disappear when it does, or at :meth:`close`."""

    @property
    def id(self) -> int:
        """The instance id: part of the keys, below 2**63."""
        ...

    @property
    def lost(self) -> asyncio.Event:
        """Set once the plane has dropped the lease and its entries, not by :meth:`close`."""
        ...

    @property
    def trouble(self) -> str:
        """Why the lease is not being kept alive at the moment; empty if it is."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Register or replace an entry. Raises dynctl.base.errors.Unreachable."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an entry of this lease. Raises dynctl.base.errors.Unreachable."""
        ...

    async def close(self) -> None:
        """Remove all entries at once, within seconds; does not raise.

        If the plane is not reachable, they disappear when the lease ends.
        """
        ...


class Registrar(Protocol):
    """Writes to a discovery plane; everything is under a lease."""

    @property
    def title(self) -> str:
        """The backend and its address for display, without credentials."""
        ...

    async def grant(self, instance_id: int | None = None) -> Lease:
        """A new lease, kept alive until it is closed. Raises dynctl.base.errors.Unreachable.

        ``instance_id``: the id of a lease that was lost; the new one has it again, unless another
        lease has it by now.
        """
        ...

    async def close(self) -> None:
        """Close every lease; leaves no connection, thread or task."""
        ...


# -- events of the event plane ---------------------------------------------------------------------


class ChannelCode(StrEnum):
    """Events of one publisher's channel. Codes are stable."""

    CHANNEL_CONNECTED = "CHANNEL_CONNECTED"
    CHANNEL_DISCONNECTED = "CHANNEL_DISCONNECTED"
    EVENTS_DROPPED = "EVENTS_DROPPED"
    """Sequence numbers were skipped: ``count`` messages were lost."""
    PUBLISHER_RESTARTED = "PUBLISHER_RESTARTED"
    """The sequence went back to its start."""
    FOREIGN_PUBLISHER = "FOREIGN_PUBLISHER"
    """Messages of a publisher that is not registered for this channel; they are skipped."""
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message of a channel, in order. ``payload`` is undecoded msgpack.

    ``published_at_ms`` is the publisher's wall clock: only displayed, never compared with ours.
    """

    topic: str
    publisher_id: int
    sequence: int
    published_at_ms: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ChannelCondition:
    """A condition of a channel, for operators or the index. ``count``: messages."""

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
    """Makes followers of registered channels, with shared connections."""

    def follow(
        self, channel: EventChannel, emit: Callable[[ChannelValue], None]
    ) -> ChannelFollower:
        """``emit`` is called from the event loop and must not block."""
        ...

    async def close(self) -> None: ...


class ReplicaPlane(Protocol):
    """Carries messages between the routers of one fleet: what one publishes, the others receive.

    A message may be lost and may not be delivered twice; those of one publisher arrive in order.
    Nothing is stored: what is sent while a router is not connected never reaches it.
    """

    @property
    def title(self) -> str:
        """How it reaches the others, for display, without credentials."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """The other routers' addresses, where each has its own; empty where they share one."""
        ...

    @property
    def batched(self) -> bool:
        """Whether a message carries several events, as Dynamo's does over ZMQ."""
        ...

    def publish(self, envelope: Envelope) -> bool:
        """Send to all others; never blocks. False: the message was dropped."""
        ...

    async def run(self, emit: Callable[[str, ChannelValue], None]) -> None:
        """Receive until cancelled. ``emit`` gets the address and the value, in order; it is called
        from the event loop and must not block. The router's own messages may come back."""
        ...

    async def close(self) -> None:
        """Leaves no socket; what was published is on its way."""
        ...


# -- the request plane -----------------------------------------------------------------------------


class RequestPlane(Protocol):
    """Sends a request to an endpoint of a worker and streams its response."""

    def ask_raw(
        self, instance: Instance, body: Any, *, timeout: float, max_bytes: int
    ) -> AsyncGenerator[RawItem, None]:
        """The items of the response as they arrive, undecoded: one may be too large for one turn.

        ``timeout``: seconds that each next item may take; ``max_bytes`` bounds the whole response.
        A caller that stops early closes it (aclose), which cancels it at the worker. Raises
        RequestPlaneError with the instance and the problem.
        """
        ...

    async def close(self) -> None: ...


class RequestPlaneError(Exception):
    """A request to a worker failed; the message has the worker and the problem.

    ``kind``: ``refused`` (no process listens), ``connect``, ``vanished`` (the host does not respond
    any more), ``timeout``, ``reset`` (the connection ended), ``refusal`` (the worker's own words),
    ``plane`` (the server between us and all workers is not reachable), ``size`` (that server takes
    no request of this size) or ``protocol``.
    ``gone``: no other worker is reachable either, after a wait.
    """

    def __init__(self, message: str, kind: str = "protocol", *, gone: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.gone = gone


class PlaneInterrupted(RequestPlaneError):
    """What is between us and all workers was lost while the request was on its way: the worker may
    have it, and it can be sent again, since only one response to it is taken."""


class NotCalledBack(RequestPlaneError):
    """A worker accepted the request but did not connect back: the way back is blocked."""


# -- a Kubernetes cluster --------------------------------------------------------------------------


class ClusterRefusal(Exception):
    """The API server refused a request. ``status`` is HTTP's, ``reason`` Kubernetes' reason.

    Any status but success, redirects and 401, which is Unreachable: nothing can be read.
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
class AccessReview:
    """The parameters of an access review. ``resource`` may have a subresource: ``pods/exec``.

    ``namespace`` None: all namespaces (or a resource without one).
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

    It sends GETs, access reviews, exec of ``cat`` and ``ls``, and port-forwards; it changes
    nothing. Paths are those of the API (``/api/v1/nodes``), ``query`` its parameters. All methods
    raise ClusterRefusal if the API server refuses, and Unreachable if it does not respond, the TLS
    handshake fails or the credentials are not accepted.
    """

    @property
    def title(self) -> str:
        """The context's name and the server's address, for display."""
        ...

    @property
    def namespace(self) -> str:
        """The context's namespace, ``default`` if it has none."""
        ...

    @property
    def now(self) -> float:
        """The cluster's clock, seconds since the epoch: from its last response."""
        ...

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        """One object."""
        ...

    def pages(
        self, path: str, query: Mapping[str, str] | None = None, *, page: int = 500
    ) -> Iterator[Mapping[str, Any]]:
        """A list in pages of at most ``page`` items, each a whole ``...List`` object.

        If the continue token expires (410), the list restarts once; the caller then gets a page
        with ``metadata.dynctlRestarted`` true and drops the earlier pages.
        """
        ...

    def watch(
        self, path: str, resource_version: str, query: Mapping[str, str] | None = None
    ) -> Iterator[ClusterEvent]:
        """Changes after ``resource_version``, until the server ends the watch (then it returns).

        Raises ClusterRefusal with status 410 if that version is too old: list again.
        """
        ...

    def allowed(
        self, question: AccessReview, *, user: str | None = None, groups: tuple[str, ...] = ()
    ) -> bool:
        """Whether dynctl (``user`` None) or that user may do it, by an access review."""
        ...

    def read_file(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> bytes:
        """A file of a container, by exec of ``cat``.

        Raises FileNotFoundError with the path; ClusterRefusal if exec is refused or the container
        does not run; ValueError if it is larger than ``max_bytes``.
        """
        ...

    def file_names(
        self, namespace: str, pod: str, container: str, path: str, *, max_bytes: int
    ) -> tuple[str, ...]:
        """The visible files in a directory of a container, by exec of ``ls``.

        Raises as :meth:`read_file` does; ``max_bytes``: of all names together.
        """
        ...

    def log_lines(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        previous: bool = False,
        last: int | None = None,
        max_bytes: int = 1 << 20,
    ) -> Iterator[str]:
        """The first lines of a container's log, oldest first, at most ``max_bytes`` in all;
        ``last``: of its last lines, this many."""
        ...

    def forward(self, namespace: str, pod: str, port: int) -> AbstractContextManager[str]:
        """``HOST:PORT`` on this machine that leads to a port of the pod while it is open."""
        ...

    def close(self) -> None:
        """Leaves no connection or thread."""
        ...


class ClusterWriter(Protocol):
    """Changes a Kubernetes cluster; blocking, safe to call from several threads.

    A request may arrive twice, where a connection is cut: give objects a name, and replace with a
    ``resourceVersion``. All methods return the object as it is now, and raise as `Cluster` does;
    ClusterRefusal with status 409 for what exists, or was changed meanwhile.
    """

    def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create an object in the collection at ``path``."""
        ...

    def replace(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace the object at ``path``; ``body`` has its ``resourceVersion``."""
        ...

    def merge(self, path: str, patch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge ``patch`` (RFC 7386) into the object at ``path``."""
        ...

    def apply(self, path: str, body: Mapping[str, Any], *, manager: str) -> Mapping[str, Any]:
        """Create the object at ``path``, or make the fields of ``manager`` those of ``body``;
        fields of other managers that ``body`` has too are taken over."""
        ...

    def delete(self, path: str, *, uid: str) -> None:
        """Remove the object at ``path`` if it has this uid (empty: any); another or none stays."""
        ...


@dataclass(frozen=True, slots=True)
class BackendPort:
    """How a discovery backend of ``dynctl.base.backends`` is opened. Nothing connects yet.

    ``open`` and ``open_registrar`` raise UsageProblem for options that do not fit, or Unreachable;
    None: dynctl does not register workers there. ``expect_registrar`` raises UsageProblem where
    this process could not register. ``pods_only``: only pods register, each its own.
    """

    open: Callable[[GlobalOptions], Discovery]
    open_registrar: Callable[[GlobalOptions, Discovery], Registrar] | None = None
    expect_registrar: Callable[[], None] = lambda: None
    pods_only: bool = False
