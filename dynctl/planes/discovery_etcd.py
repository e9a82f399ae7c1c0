"""What both etcd clients have in common: failover, list-then-watch, and saying what went wrong."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Final, Protocol

from dynctl.errors import Unreachable
from dynctl.planes.etcd_address import EtcdAccess, EtcdEndpoint
from dynctl.ports import Deleted, DiscoveryChange, DiscoveryEntry, Interrupted, Listed, Put

MAX_ENTRIES: Final = 100_000
MAX_BYTES: Final = 256 * 1024 * 1024
"""Of all keys and values of one list."""
PAGE: Final = 500
"""Keys asked for at once, so that no answer comes near what a client takes in one message."""
REACH_S: Final = 4.0
"""What all endpoints together may take until one has given its first page."""
PAGE_S: Final = 10.0

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 2.0
_HINT: Final = "Is etcd up? --etcd-endpoints or ETCD_ENDPOINTS says where it is."
_AUTH_HINT: Final = "ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD say who asks."
_TLS_HINT: Final = (
    "ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY name the certificates."
)
_AUTH_WORDS: Final = ("user name", "authentication failed", "auth token", "permission denied")


class EtcdFailure(Exception):
    """What one member said, or that it said nothing; short, and without credentials."""


class EtcdCompacted(EtcdFailure):
    """The revision that was asked for is gone: list again."""


class EtcdSession(Protocol):
    """One connection to one member; used once and thrown away after the first failure."""

    async def list(self, reach_s: float) -> tuple[tuple[DiscoveryEntry, ...], int]:
        """All entries, and the revision they are of. Raises EtcdFailure.

        ``reach_s`` bounds everything until the first page is there, later ones have PAGE_S each.
        """
        ...

    def watch(self, revision: int) -> AsyncIterator[Put | Deleted]:
        """Changes from ``revision`` on; ends with an EtcdFailure only. Close it with aclose."""
        ...

    async def close(self) -> None: ...


class EtcdDiscovery:
    """Reads an etcd through sessions that ``connect`` makes. It holds no lease and writes nothing.

    A watch keeps to the member that answered. On any failure its session is closed and the next
    member is tried, with pauses of 0.2 to 2 s once all have failed.
    """

    def __init__(
        self, access: EtcdAccess, connect: Callable[[EtcdEndpoint], EtcdSession], title: str
    ) -> None:
        self._access = access
        self._connect = connect
        self._title = title
        self._first = 0
        self._sessions: set[EtcdSession] = set()
        self._closed = asyncio.Event()

    @property
    def title(self) -> str:
        return self._title

    async def list(self) -> Listed:
        """Raises Unreachable, within about 4 s, saying what every member said."""
        try:
            session, entries, _ = await self._reach()
        except EtcdFailure as failure:
            raise self._unreachable(failure) from failure
        await self._drop(session)
        return Listed(entries)

    async def watch(self) -> AsyncIterator[DiscoveryChange]:
        interrupted = False
        pause = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                session, entries, revision = await self._reach()
            except EtcdFailure as failure:
                if not interrupted and not self._closed.is_set():
                    interrupted = True
                    yield Interrupted(str(failure))
                await self._pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            interrupted, pause = False, _FIRST_PAUSE_S
            try:
                yield Listed(entries)
                async with aclosing(session.watch(revision + 1)) as changes:  # type: ignore[type-var]
                    async for change in changes:
                        yield change
            except EtcdCompacted:
                # Nothing is wrong; but a member that always says so must not keep us busy.
                await self._pause(pause)
            except EtcdFailure as failure:
                if not self._closed.is_set():
                    interrupted = True
                    at = self._access.endpoints[self._first]
                    self._first = (self._first + 1) % len(self._access.endpoints)
                    yield Interrupted(f"etcd at {at}: {failure}")
                    await self._pause(pause)
            finally:
                await self._drop(session)

    async def close(self) -> None:
        """Ends every list and watch that is under way."""
        self._closed.set()
        for session in list(self._sessions):
            await self._drop(session)

    async def _reach(self) -> tuple[EtcdSession, tuple[DiscoveryEntry, ...], int]:
        """A session with a member that has just listed everything; the caller drops it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REACH_S
        members = self._access.endpoints
        said: list[str] = []
        for tried in range(len(members)):
            if self._closed.is_set():
                raise EtcdFailure("this reader of etcd is closed")
            number = (self._first + tried) % len(members)
            left = max(0.1, (deadline - loop.time()) / (len(members) - tried))
            session = self._connect(members[number])
            self._sessions.add(session)
            try:
                entries, revision = await session.list(left)
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

    async def _drop(self, session: EtcdSession) -> None:
        self._sessions.discard(session)
        await session.close()

    async def _pause(self, seconds: float) -> None:
        """Spread, so that many readers do not come back to a restarted etcd in one moment."""
        try:
            await asyncio.wait_for(self._closed.wait(), seconds * random.uniform(0.75, 1.25))
        except TimeoutError:
            return

    def _unreachable(self, failure: EtcdFailure) -> Unreachable:
        said = str(failure)
        hint = _HINT
        if any(word in said for word in _AUTH_WORDS):
            hint = _AUTH_HINT
        elif any(member.tls for member in self._access.endpoints):
            hint = f"{_HINT} {_TLS_HINT}"
        return Unreachable(f"no answer from etcd at {said}", hint)


def key_of(raw: bytes) -> str:
    """Dynamo's keys are text; one that is not is still shown."""
    return raw.decode(errors="backslashreplace")


def range_end(prefix: bytes) -> bytes:
    """The first key behind all that begin with ``prefix``."""
    for length in range(len(prefix), 0, -1):
        if prefix[length - 1] < 0xFF:
            return prefix[: length - 1] + bytes([prefix[length - 1] + 1])
    return b"\0"


class Collected:
    """The pages of one list, within bounds."""

    def __init__(self) -> None:
        self._entries: list[DiscoveryEntry] = []
        self._bytes = 0

    def add(self, key: bytes, value: bytes) -> None:
        """Raises EtcdFailure when that is too much."""
        self._bytes += len(key) + len(value)
        if len(self._entries) >= MAX_ENTRIES:
            raise EtcdFailure(f"more than {MAX_ENTRIES:,} entries")
        if self._bytes > MAX_BYTES:
            raise EtcdFailure(f"more than {MAX_BYTES:,} bytes of entries")
        self._entries.append(DiscoveryEntry(key_of(key), value))

    def entries(self) -> tuple[DiscoveryEntry, ...]:
        return tuple(self._entries)


def one_line(text: str) -> str:
    """Of what a library says; bounded, and nothing that could move a terminal's cursor."""
    flat = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in flat)[:200]
