"""Discovery inside one process: the backend ``mem``."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from dynctl.adapters.ports import (
    BackendPort,
    Deleted,
    DiscoveryChange,
    DiscoveryEntry,
    Listed,
    Put,
)

_PENDING: Final = 10_000
"""Maximum of unread changes of a slow reader; above it the reader gets a new list instead."""


class MemoryDiscovery:
    """Keeps the entries in memory. For the event loop's thread only."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._readers: set[_MemoryReader] = set()
        self._closed = asyncio.Event()

    @property
    def title(self) -> str:
        return "memory"

    def put(self, key: str, value: bytes) -> None:
        """Register or replace an entry; the same value is not a change."""
        if self._entries.get(key) == value:
            return
        self._entries[key] = value
        self._notify(Put(DiscoveryEntry(key, value)))

    def delete(self, key: str) -> None:
        """Remove an entry; an unknown one is not a change."""
        if self._entries.pop(key, None) is not None:
            self._notify(Deleted(key))

    async def list(self) -> Listed:
        return self._list_entries()

    async def watch(self) -> AsyncGenerator[DiscoveryChange, None]:
        if self._closed.is_set():
            return
        reader = _MemoryReader()
        self._readers.add(reader)
        try:
            yield self._list_entries()
            while True:
                await reader.wake.wait()
                reader.wake.clear()
                while True:
                    if reader.behind:
                        reader.behind = False
                        reader.changes.clear()
                        yield self._list_entries()
                    elif reader.changes:
                        yield reader.changes.popleft()
                    else:
                        break
                if self._closed.is_set():
                    return
        finally:
            self._readers.discard(reader)

    async def close(self) -> None:
        """Ends every watch."""
        self._closed.set()
        for reader in self._readers:
            reader.wake.set()

    def _list_entries(self) -> Listed:
        return Listed(tuple(DiscoveryEntry(*entry) for entry in self._entries.items()))

    def _notify(self, change: DiscoveryChange) -> None:
        for reader in self._readers:
            if len(reader.changes) < _PENDING:
                reader.changes.append(change)
            else:
                reader.behind = True
            reader.wake.set()


class _MemoryReader:
    """The unread changes of one watch."""

    def __init__(self) -> None:
        self.changes: deque[DiscoveryChange] = deque()
        self.behind = False
        self.wake = asyncio.Event()


BACKEND: Final = BackendPort(lambda options: MemoryDiscovery())
