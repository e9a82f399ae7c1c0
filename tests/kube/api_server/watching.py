"""Watches: the events of one list from a revision on, as long as a client reads them."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

from tests.kube.api_server.listing import chosen
from tests.kube.api_server.parameters import Query, flag, number
from tests.kube.api_server.resources import Resource
from tests.kube.api_server.selectors import Predicate
from tests.kube.api_server.status import bad_request, expired
from tests.kube.api_server.storage import Change, Compacted, Storage

Json = dict[str, Any]

BOOKMARK_PERIOD_S = 5.0
_INITIAL_END = "k8s.io/initial-events-end"


class Bell:
    """Wakes the watches of the server's loop after a write in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, storage: Storage) -> None:
        self._loop = loop
        self._rung = asyncio.Event()
        self._awaited = False
        storage.listen(self.ring_from_any_thread)

    def ring_from_any_thread(self) -> None:
        if self._awaited and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.ring)

    def ring(self) -> None:
        self._awaited = False
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    @property
    def next(self) -> asyncio.Event:
        """Is set at the next ring; take it before looking, wait for it after."""
        self._awaited = True
        return self._rung


def events(
    storage: Storage,
    resource: Resource,
    version: str,
    namespace: str,
    query: Query,
    bell: Bell,
    stopped: Callable[[], bool],
    *,
    expire: bool,
) -> AsyncGenerator[tuple[str, Json]]:
    """(type, object as stored) until ``timeoutSeconds``, an ERROR, or ``stopped``.

    An ERROR's object is a Status, a BOOKMARK's has nothing but a kind and a revision. ``expire``:
    a test wants the starting revision to be too old. Raises 400 at once, not in the generator.
    """
    holds = chosen(resource, namespace, query)
    newest = query.get("resourceVersionMatch") == "NotOlderThan"
    if flag(query, "sendInitialEvents") and not newest:
        raise bad_request("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
    start, seconds = number(query, "resourceVersion"), number(query, "timeoutSeconds")

    def bookmark(revision: int, annotations: Json | None = None) -> Json:
        metadata: Json = {"resourceVersion": str(revision), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        kind, api_version = resource.kind, resource.api_version(version)
        return {"kind": kind, "apiVersion": api_version, "metadata": metadata}

    return _follow(
        storage, resource, start, seconds, query, holds, bookmark, bell, stopped, expire=expire
    )


async def _follow(
    storage: Storage,
    resource: Resource,
    at: int,
    seconds: int,
    query: Query,
    holds: Predicate,
    bookmark: Callable[..., Json],
    bell: Bell,
    stopped: Callable[[], bool],
    *,
    expire: bool,
) -> AsyncGenerator[tuple[str, Json]]:
    bookmarks = flag(query, "allowWatchBookmarks")
    initial = flag(query, "sendInitialEvents")
    loop = asyncio.get_running_loop()
    # The real server chooses between 30 and 60 minutes where the client names no timeout.
    deadline = loop.time() + (seconds or random.uniform(1800, 3600))
    if at == 0 or initial:
        at, bodies = storage.snapshot(resource.key)
        for body in bodies:
            if holds(body):
                yield "ADDED", body
    if initial and bookmarks:
        yield "BOOKMARK", bookmark(at, {_INITIAL_END: "true"})
    bookmark_due = loop.time() + BOOKMARK_PERIOD_S
    running = False
    while not stopped():
        rung = bell.next
        try:
            if expire:
                raise Compacted(storage.revision)
            revision, changes = storage.changes(resource.key, at, running=running)
        except Compacted as gone:
            yield "ERROR", expired(f"too old resource version: {at} ({gone.oldest})").body
            return
        running, at = True, revision
        for change in changes:
            event = _seen_through(change, holds)
            if event is not None:
                yield event
        now = loop.time()
        if bookmarks and now >= min(bookmark_due, deadline):
            yield "BOOKMARK", bookmark(at)
            bookmark_due = now + BOOKMARK_PERIOD_S
        if now >= deadline:
            return
        wake = min(deadline, bookmark_due) if bookmarks else deadline
        try:
            async with asyncio.timeout_at(wake):
                await rung.wait()
        except TimeoutError:
            continue


def _seen_through(change: Change, holds: Callable[[Json], bool]) -> tuple[str, Json] | None:
    """The event as it looks through the selectors: who stops matching is DELETED."""
    before = change.previous is not None and holds(change.previous)
    after = change.kind != "DELETED" and holds(change.object)
    if after:
        return ("MODIFIED" if before else "ADDED"), change.object
    if not before or change.previous is None:
        return None
    if change.kind == "DELETED":
        return "DELETED", change.object
    metadata = change.previous["metadata"] | {"resourceVersion": str(change.revision)}
    return "DELETED", change.previous | {"metadata": metadata}
