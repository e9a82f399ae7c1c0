"""Keeps the entries of this process in a discovery plane, under one lease at a time.

``Registration(registrar, entries, report)``: ``entries(instance_id)`` gives what is registered
(encode_entry makes the pairs). Call ``start()`` to register, ``update()`` when the entries changed,
``withdraw()`` to deregister at once. A lost lease is reported, and the entries are registered again
under the same instance id, so that others see one process that was away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

from dynctl.adapters.ports import Lease, Registrar
from dynctl.base.errors import Unreachable
from dynctl.base.tasks import end_tasks

MAX_ENTRIES: Final = 10_000
_CHECK_S: Final = 0.5
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 5.0

Entries = Callable[[int], Iterable[tuple[str, bytes]]]
Ready = Callable[[], Awaitable[None]]
Report = Callable[[str | None], None]
"""Gets the problem of the registration, None when it ended."""

_log = logging.getLogger(__name__)


async def _at_once() -> None:
    """Nothing has to be ready."""


class Registration:
    """Not registered before :meth:`start`. For one event loop.

    ``ready`` returns once what the entries name can be reached; it may raise Unreachable, and
    nothing is written then.
    """

    def __init__(
        self,
        registrar: Registrar,
        entries: Entries,
        report: Report = lambda problem: None,
        ready: Ready = _at_once,
    ) -> None:
        self._registrar = registrar
        self._entries = entries
        self._report = report
        self._ready = ready
        self._lease: Lease | None = None
        self._written: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._registered = False
        self._problem: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost_id: int | None = None
        #: Leases that were lost since the start.
        self.losses = 0

    @property
    def instance_id(self) -> int | None:
        """The id under which everything is registered now, None if it is not."""
        return self._lease.id if self._lease is not None and self._registered else None

    @property
    def problem(self) -> str | None:
        return self._problem

    async def start(self) -> int:
        """Register; returns the instance id. Raises Unreachable, and is not registered then."""
        try:
            lease_id = await self._register()
        except Unreachable:
            await self.withdraw()
            raise
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="registration")
        return lease_id

    def update(self) -> None:
        """Write what changed in the entries, soon."""
        self._changed.set()

    async def withdraw(self) -> None:
        """Remove all entries at once. :meth:`start` registers again."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        self._registered = False
        lease, self._lease, self._lost_id = self._lease, None, None
        self._written = {}
        self._say(None)
        if lease is not None:
            await lease.close()

    async def close(self) -> None:
        """Withdraw, and close the registrar."""
        await self.withdraw()
        await self._registrar.close()

    async def _register(self) -> int:
        if self._lease is None:
            self._lease = await self._registrar.grant(self._lost_id)
            self._written = {}
        await self._write(self._lease)
        self._registered = True
        return self._lease.id

    async def _write(self, lease: Lease) -> None:
        self._changed.clear()
        wanted = dict(self._entries(lease.id))
        if len(wanted) > MAX_ENTRIES:
            raise ValueError(f"{len(wanted):,} entries to register; expected {MAX_ENTRIES:,}")
        if self._written != wanted:
            await self._ready()
        for key in self._written.keys() - wanted.keys():
            await lease.delete(key)
            del self._written[key]
        for key, value in wanted.items():
            if self._written.get(key) != value:
                await lease.put(key, value)
                self._written[key] = value

    async def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            lease = self._lease
            if lease is not None and lease.lost.is_set():
                self.losses += 1
                self._registered = False
                self._lease, self._lost_id = None, lease.id
                self._say(f"the lease {lease.id:x} was lost; registering again")
                _log.warning("the lease %x in %s was lost", lease.id, self._registrar.title)
                await lease.close()
                continue
            try:
                if lease is None or self._changed.is_set() or not self._registered:
                    renewed = await self._register()
                    if lease is None:
                        _log.warning("registered again as instance %x", renewed)
                self._say((self._lease and self._lease.trouble) or None)
                pause = _FIRST_PAUSE_S
            except Unreachable as error:
                self._say(error.message)
                self._changed.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
                continue
            await self._wait(_CHECK_S)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _say(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._report(problem)
