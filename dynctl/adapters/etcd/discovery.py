"""Discovery in etcd without its messages: failover, list-then-watch, and error texts."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Protocol

from dynctl.adapters.etcd.address import EtcdAccess, EtcdEndpoint
from dynctl.adapters.ports import Deleted, DiscoveryChange, DiscoveryEntry, Interrupted, Listed, Put
from dynctl.base.errors import AccessDenied, TimedOut, Unreachable
from dynctl.base.terminal import printable

MAX_ENTRIES: Final = 100_000
MAX_BYTES: Final = 256 * 1024 * 1024
"""The sum of all keys and values of one list."""
PAGE: Final = 500
"""Keys per request, so that a response stays far below a client's message limit."""
REACH_S: Final = 4.0
"""The most seconds for all endpoints together until the first page."""
PAGE_S: Final = 10.0
RETURN_S: Final = 6.0
"""How long processes have to register again in an etcd that lost its data: ours keep their lease
every 3 s."""

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 2.0
_HINT: Final = "Is etcd up? Its address: --etcd-endpoints or ETCD_ENDPOINTS."
_AUTH_HINT: Final = "Set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD."
CERTIFICATE_REFUSED: Final = (
    "it does not accept the client certificate: none, expired, or of another authority"
)
_AUTH_WORDS: Final = ("user name", "authentication failed", "auth token")
_FORBIDDEN: Final = "permission denied"


class EtcdFailure(Exception):
    """A failed request to one member; short, and without credentials."""


class EtcdCompacted(EtcdFailure):
    """The requested revision is compacted: list again."""


class EtcdNoLease(EtcdFailure):
    """The lease does not exist, or no longer."""


class EtcdLeaseExists(EtcdFailure):
    """A lease with the requested id exists."""


class EtcdTooLarge(EtcdFailure):
    """A response exceeds the message limit: request fewer keys."""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list: undecoded keys and values in key order, and whether more follow."""

    entries: Sequence[tuple[bytes, bytes]]
    revision: int
    more: bool


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """The response to a keep-alive: the seconds that the lease lives from now on (0: it does not
    exist), and the term and revision of the member."""

    seconds: int
    term: int = 0
    revision: int = 0


class EtcdSession(Protocol):
    """One connection to one member; closed after the first failure."""

    async def open(self, timeout: float) -> None:
        """Connect and authenticate. Raises EtcdFailure."""
        ...

    async def page(self, key: bytes, end: bytes, limit: int, revision: int, timeout: float) -> Page:
        """At most ``limit`` entries from ``key`` on and before ``end``, as of ``revision``; 0:
        the current one. Raises EtcdFailure, EtcdTooLarge for a response above the limit."""
        ...

    def watch(self, key: bytes, end: bytes, revision: int) -> AsyncGenerator[Put | Deleted, None]:
        """Changes from ``revision`` on; ends with an EtcdFailure only. Close it with aclose."""
        ...

    async def close(self) -> None: ...


class EtcdWriter(EtcdSession, Protocol):
    """A session that writes too, under leases."""

    async def grant(self, lease: int, ttl_s: int, timeout: float) -> int:
        """The id of a new lease: ``lease``, or of etcd's choice if it is 0. Raises EtcdFailure,
        EtcdLeaseExists if another lease has this id."""
        ...

    async def keep_alive(self, lease: int, timeout: float) -> KeptAlive:
        """Raises EtcdFailure."""
        ...

    async def revoke(self, lease: int, timeout: float) -> None:
        """End a lease and delete its keys. Raises EtcdFailure."""
        ...

    async def put(self, key: bytes, value: bytes, lease: int, timeout: float) -> None:
        """Raises EtcdFailure, EtcdNoLease if the lease does not exist."""
        ...

    async def delete(self, key: bytes, timeout: float) -> None:
        """Raises EtcdFailure."""
        ...


class EtcdDiscovery:
    """Reads the keys with ``prefix``, through sessions that ``connect`` makes.

    It holds no lease and writes nothing.
    A watch stays with the member that responded. On any failure its session is closed and the next
    member is tried, with pauses of 0.2 to 2 s once all have failed.
    """

    def __init__(
        self,
        access: EtcdAccess,
        connect: Callable[[EtcdEndpoint], EtcdSession],
        prefix: bytes,
        title: str,
    ) -> None:
        self.access = access
        self._prefix = prefix
        self._end = range_end(prefix)
        self._action = f"read {key_of(prefix)}"
        self.connect = connect
        self._title = title
        #: Seconds for all endpoints together until the first page; a caller may lower it.
        self.reach_s = REACH_S
        self._first = 0
        self._sessions: set[EtcdSession] = set()
        self._closed = asyncio.Event()

    @property
    def title(self) -> str:
        return self._title

    async def list(self) -> Listed:
        """Raises Unreachable, within about 4 s, with the failure of every member.

        TimedOut if they did not respond within a lower ``reach_s``.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            session, entries, _ = await self._reach()
        except EtcdFailure as failure:
            unreachable = unreachable_error(self.access, failure, self._action)
            # The client's own timeout ends a little earlier than ours.
            if self.reach_s < REACH_S and loop.time() - started >= 0.8 * self.reach_s:
                raise TimedOut(unreachable.message, unreachable.hint) from failure
            raise unreachable from failure
        await self._drop(session)
        return Listed(entries)

    async def watch(self) -> AsyncGenerator[DiscoveryChange, None]:
        interrupted = False
        pause = _FIRST_PAUSE_S
        view = _View()
        while not self._closed.is_set():
            try:
                session, entries, revision = await self._reach()
            except EtcdFailure as failure:
                if not interrupted and not self._closed.is_set():
                    interrupted = True
                    forbidden = _FORBIDDEN in str(failure)
                    problem = unreachable_error(self.access, failure, self._action).message
                    yield Interrupted(problem if forbidden else str(failure))
                await self._pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            interrupted, pause = False, _FIRST_PAUSE_S
            try:
                watch = session.watch(self._prefix, self._end, revision + 1)
                async with aclosing(watch) as changes:
                    if view.lost_keys(entries, revision):
                        at = self.access.endpoints[self._first]
                        yield Interrupted(
                            f"etcd at {at} has older data than before, or none; waiting up to "
                            f"{RETURN_S:g} s for processes to register again"
                        )
                        entries, more = await view.with_returned(entries, changes)
                        revision += more
                    yield Listed(entries)
                    view.take_list(entries, revision)
                    async for change in changes:
                        view.take(change)
                        yield change
            except EtcdCompacted:
                # Not an error; but a member that always does this must not cause a busy loop.
                await self._pause(pause)
            except EtcdFailure as failure:
                if not self._closed.is_set():
                    interrupted = True
                    at = self.access.endpoints[self._first]
                    self._first = (self._first + 1) % len(self.access.endpoints)
                    yield Interrupted(f"etcd at {at}: {failure}")
                    await self._pause(pause)
            finally:
                await self._drop(session)

    async def close(self) -> None:
        """Ends every running list and watch."""
        self._closed.set()
        for session in list(self._sessions):
            await self._drop(session)

    async def _reach(self) -> tuple[EtcdSession, tuple[DiscoveryEntry, ...], int]:
        """A session with a member that has just listed everything; the caller drops it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.reach_s
        members = self.access.endpoints
        said: list[str] = []
        for tried in range(len(members)):
            if self._closed.is_set():
                raise EtcdFailure("the reader of etcd is closed")
            number = (self._first + tried) % len(members)
            left = max(0.1, (deadline - loop.time()) / (len(members) - tried))
            session = self.connect(members[number])
            self._sessions.add(session)
            try:
                entries, revision = await self._list(session, left)
            except EtcdFailure as failure:
                await self._drop(session)
                said.append(f"{members[number]}: {failure}")
            except BaseException:
                await self._drop(session)
                raise
            else:
                self._first = number
                return session, entries, revision
        raise EtcdFailure("; ".join(said))

    async def _list(
        self, session: EtcdSession, reach_s: float
    ) -> tuple[tuple[DiscoveryEntry, ...], int]:
        """All entries, and the revision they are of. Raises EtcdFailure.

        ``reach_s`` bounds everything until the first page; later pages have PAGE_S each.
        """
        try:
            async with asyncio.timeout(reach_s):
                # A little less time for the client, because its error is more specific; our own
                # timeout is for what it does not bound.
                await session.open(0.9 * reach_s)
                page, limit = await self._page(session, self._prefix, 0, PAGE, 0.9 * reach_s)
        except TimeoutError as error:
            raise EtcdFailure(f"no response in {reach_s:.1f} s") from error
        entries: list[DiscoveryEntry] = []
        size, revision = 0, page.revision
        while True:
            for key, value in page.entries:
                size += len(key) + len(value)
                if len(entries) >= MAX_ENTRIES:
                    raise EtcdFailure(f"more than {MAX_ENTRIES:,} entries")
                if size > MAX_BYTES:
                    raise EtcdFailure(f"more than {MAX_BYTES:,} bytes of entries")
                entries.append(DiscoveryEntry(key_of(key), value))
            if not page.more or not page.entries:
                return tuple(entries), revision
            after = page.entries[-1][0] + b"\0"
            page, limit = await self._page(session, after, revision, limit, PAGE_S)

    async def _page(
        self, session: EtcdSession, key: bytes, revision: int, limit: int, timeout: float
    ) -> tuple[Page, int]:
        """The page, and the number of entries to request next."""
        while True:
            try:
                return await session.page(key, self._end, limit, revision, timeout), limit
            except EtcdTooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // 16)

    async def _drop(self, session: EtcdSession) -> None:
        self._sessions.discard(session)
        await session.close()

    async def _pause(self, seconds: float) -> None:
        """A random pause, so that many readers do not reconnect to a restarted etcd at once."""
        try:
            await asyncio.wait_for(self._closed.wait(), seconds * random.uniform(0.75, 1.25))
        except TimeoutError:
            return


class _View:
    """The keys that a watch has given, and a revision that etcd had then."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._revision = 0

    def take_list(self, entries: Sequence[DiscoveryEntry], revision: int) -> None:
        self._keys = {entry.key for entry in entries}
        self._revision = revision

    def take(self, change: Put | Deleted) -> None:
        self._revision += 1
        if isinstance(change, Put):
            self._keys.add(change.entry.key)
        else:
            self._keys.discard(change.key)

    def lost_keys(self, entries: Sequence[DiscoveryEntry], revision: int) -> bool:
        """Whether etcd went back, and lacks keys by that: it was wiped, or an older copy of it was
        restored. The processes of these keys may run as before."""
        return revision < self._revision and bool(self._missing(entries))

    async def with_returned(
        self, entries: Sequence[DiscoveryEntry], changes: AsyncGenerator[Put | Deleted, None]
    ) -> tuple[tuple[DiscoveryEntry, ...], int]:
        """The entries with the changes until none is missing, for RETURN_S at most; and the number
        of changes."""
        current = {entry.key: entry for entry in entries}
        missing = self._missing(entries)
        count = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                while missing:
                    change = await anext(changes)
                    count += 1
                    if isinstance(change, Put):
                        current[change.entry.key] = change.entry
                        missing.discard(change.entry.key)
                    else:
                        current.pop(change.key, None)
        return tuple(current.values()), count

    def _missing(self, entries: Sequence[DiscoveryEntry]) -> set[str]:
        return self._keys - {entry.key for entry in entries}


def unreachable_error(access: EtcdAccess, failure: EtcdFailure, action: str) -> Unreachable:
    """The error for users when no member answers as expected. ``action``: ``read PREFIX``."""
    said = str(failure)
    hint = _HINT
    if _FORBIDDEN in said:
        return AccessDenied(
            f"the user of ETCD_AUTH_USERNAME must not {action}: {said}",
            f"Let a role of this user {action} (etcdctl role grant-permission --prefix), or set "
            "ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD to another user.",
        )
    if any(word in said for word in _AUTH_WORDS):
        return AccessDenied(f"etcd is not reachable at {said}", _AUTH_HINT)
    if any(member.tls for member in access.endpoints):
        hint = f"{_HINT} The certificates: {access.certificate_files()}."
    return Unreachable(f"etcd is not reachable at {said}", hint)


def key_of(raw: bytes) -> str:
    """A key as text; other bytes are escaped."""
    return raw.decode(errors="backslashreplace")


def range_end(prefix: bytes) -> bytes:
    """The first key after all with ``prefix``."""
    for length in range(len(prefix), 0, -1):
        if prefix[length - 1] < 0xFF:
            return prefix[: length - 1] + bytes([prefix[length - 1] + 1])
    return b"\0"


def one_line(text: str) -> str:
    """A library's message as one bounded line without control characters."""
    return printable(" ".join(text.split()))[:200]
