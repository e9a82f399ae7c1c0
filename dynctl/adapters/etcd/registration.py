"""Registration in etcd: keys under a lease of 30 s that is kept alive.

The lease's id is the instance id, as in Dynamo. While no member is reachable the lease counts as
alive, because etcd keeps leases over its own restart; it is lost once a member reports so.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar, cast

from dynctl.adapters.etcd.address import EtcdAccess, EtcdEndpoint
from dynctl.adapters.etcd.discovery import (
    EtcdDiscovery,
    EtcdFailure,
    EtcdLeaseExists,
    EtcdNoLease,
    EtcdWriter,
    KeptAlive,
    unreachable_error,
)
from dynctl.base.errors import Unreachable
from dynctl.base.tasks import end_tasks
from dynctl.wire.dynamo.discovery import MAX_VALUE_BYTES

TTL_S: Final = 30
"""Dynamo's time to live."""
_CALL_S: Final = 3.0
"""For one request to one member."""
_CLOSE_S: Final = 3.0
#: An etcd that was wiped has the workers again after so many seconds.
_KEEP_S: Final = 3.0

_Result = TypeVar("_Result")


class EtcdRegistrar:
    """Makes leases through sessions that ``connect`` makes, at the first member that answers."""

    def __init__(
        self,
        access: EtcdAccess,
        connect: Callable[[EtcdEndpoint], EtcdWriter],
        title: str,
        *,
        ttl_s: int = TTL_S,
    ) -> None:
        self._access = access
        self._connect = connect
        self._title = title
        self._ttl_s = ttl_s
        self._leases: set[EtcdLease] = set()

    @property
    def title(self) -> str:
        return self._title

    async def grant(self, instance_id: int | None = None) -> "EtcdLease":
        members = _Members(self._access, self._connect)
        try:
            lease_id = await members.call(
                partial(_grant, instance_id or 0, self._ttl_s), "take a lease"
            )
        except BaseException:
            await members.close()
            raise
        lease = EtcdLease(lease_id, members, self._ttl_s, self._leases.discard)
        self._leases.add(lease)
        return lease

    async def close(self) -> None:
        await asyncio.gather(*(lease.close() for lease in self._leases))


def registrar_of(discovery: EtcdDiscovery, *, ttl_s: int = TTL_S) -> EtcdRegistrar:
    """Registers with the members, credentials and client of a reader."""
    # The client's sessions write too; readers are typed without it.
    connect = cast("Callable[[EtcdEndpoint], EtcdWriter]", discovery.connect)
    return EtcdRegistrar(discovery.access, connect, discovery.title, ttl_s=ttl_s)


class EtcdLease:
    """A lease with its keep-alive, every 3 s or every third of its time to live."""

    def __init__(
        self, id: int, members: "_Members", ttl_s: int, ended: "Callable[[EtcdLease], None]"
    ) -> None:
        self.id = id
        self.lost = asyncio.Event()
        self.trouble = ""
        self._members = members
        self._ttl_s = ttl_s
        self._ended = ended
        self._closed = False
        #: What is registered.
        self._entries: dict[str, bytes] = {}
        self._keeping = asyncio.create_task(self._keep(), name="etcd-lease")

    async def put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value):,} bytes are over {MAX_VALUE_BYTES:,}")
        try:
            await self._members.call(
                lambda session: session.put(key.encode(), value, self.id, _CALL_S), f"write {key}"
            )
        except _NoLease as error:
            self.lost.set()
            raise Unreachable(f"the lease {self.id:x} in etcd ended") from error
        self._entries[key] = value

    async def delete(self, key: str) -> None:
        self._entries.pop(key, None)
        await self._members.call(
            lambda session: session.delete(key.encode(), _CALL_S), f"delete {key}"
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await end_tasks([self._keeping])
        if not self.lost.is_set():
            with suppress(Unreachable, _NoLease, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._members.call(
                        lambda session: session.revoke(self.id, _CALL_S), "end its lease"
                    )
        await self._members.close()
        self._ended(self)

    async def _keep(self) -> None:
        call = partial(_keep_alive, self.id)
        known: KeptAlive | None = None
        while True:
            pause = min(1.0 if self.trouble else _KEEP_S, self._ttl_s / (10 if self.trouble else 3))
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))
            try:
                kept = await self._members.call(call, "keep its lease")
                if kept.seconds > 0 and _may_be_restored(known, kept):
                    for key in list(self._entries):
                        await self._members.call(partial(self._put_missing, key), f"write {key}")
            except Unreachable as error:
                self.trouble = error.message
                continue
            except _NoLease:
                kept = KeptAlive(0)
            known, self.trouble = kept, ""
            if kept.seconds <= 0:
                self.lost.set()
                return

    async def _put_missing(self, key: str, session: EtcdWriter) -> None:
        """Write an entry that etcd lacks: its data may have been restored from an older copy."""
        raw, value = key.encode(), self._entries.get(key)
        page = await session.page(raw, raw + b"\0", 1, 0, _CALL_S)
        if value is not None and [value] != [stored for _, stored in page.entries]:
            await session.put(raw, value, self.id, _CALL_S)


async def _grant(lease: int, ttl_s: int, session: EtcdWriter) -> int:
    try:
        return await session.grant(lease, ttl_s, _CALL_S)
    except EtcdLeaseExists:
        return await session.grant(0, ttl_s, _CALL_S)


def _may_be_restored(known: KeptAlive | None, kept: KeptAlive) -> bool:
    """Whether the data may be of an older copy: after an election, or if its revision is lower."""
    return known is None or kept.term != known.term or kept.revision < known.revision


async def _keep_alive(lease: int, session: EtcdWriter) -> KeptAlive:
    try:
        return await session.keep_alive(lease, _CALL_S)
    except EtcdNoLease:
        return KeptAlive(0)


class _NoLease(Exception):
    """A member reports that the lease does not exist."""


class _Members:
    """One open session, replaced after a failure; calls are made one after another."""

    def __init__(self, access: EtcdAccess, connect: Callable[[EtcdEndpoint], EtcdWriter]) -> None:
        self._access = access
        self._connect = connect
        self._session: EtcdWriter | None = None
        self._member = 0
        self._turn = asyncio.Lock()

    async def call(self, call: Callable[[EtcdWriter], Awaitable[_Result]], action: str) -> _Result:
        """The result of the first member that gives one; raises Unreachable with the ``action``,
        or _NoLease."""
        async with self._turn:
            said: list[str] = []
            while len(said) < len(self._access.endpoints):
                member = self._access.endpoints[self._member]
                reused = self._session is not None
                try:
                    async with asyncio.timeout(2 * _CALL_S):
                        return await call(await self._open_member(member))
                except EtcdNoLease as failure:
                    raise _NoLease from failure
                except EtcdFailure as failure:
                    problem = str(failure)
                except TimeoutError:
                    problem = f"no response in {2 * _CALL_S:g} s"
                except BaseException:
                    await self._drop()
                    raise
                await self._drop()
                if not reused:  # else an expired token or a closed connection: once again
                    said.append(f"{member}: {problem}")
                    self._member = (self._member + 1) % len(self._access.endpoints)
            raise unreachable_error(self._access, EtcdFailure("; ".join(said)), action)

    async def close(self) -> None:
        async with self._turn:
            await self._drop()

    async def _open_member(self, member: EtcdEndpoint) -> EtcdWriter:
        if self._session is None:
            self._session = self._connect(member)
            await self._session.open(_CALL_S)
        return self._session

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
