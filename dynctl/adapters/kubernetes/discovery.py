"""Discovery in a Kubernetes cluster: the DynamoWorkerMetadata objects of workers.

The objects are followed in threads (see workers.py). Changes are collected for half a second before
they are reported, as in Dynamo: one start writes several objects, several times.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from dynctl.adapters.kubernetes.following import Follower, Resource, read_all
from dynctl.adapters.kubernetes.workers import RESOURCES, WorkerRegister, changes
from dynctl.adapters.ports import (
    Cluster,
    DiscoveryChange,
    DiscoveryEntry,
    Interrupted,
    Listed,
)
from dynctl.base.errors import Unreachable

DEBOUNCE_S: Final = 0.5
_JOIN_S: Final = 2.0
_JOIN_STEP_S: Final = 0.005


class KubernetesDiscovery:
    """Workers of ``namespace`` (None: all) of a cluster, which is closed with it.

    All readers share two threads, which follow the cluster from the first watch until
    :meth:`close`. A thread that is connecting then ends after the cluster's timeout.
    """

    def __init__(
        self, cluster: Cluster, namespace: str | None, *, debounce_s: float = DEBOUNCE_S
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._debounce_s = debounce_s
        self._register = WorkerRegister()
        self._stopped = threading.Event()
        self._closed = asyncio.Event()
        self._readers: set[asyncio.Event] = set()
        self._followers: list[Follower] = []
        self._threads: set[threading.Thread] = set()

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    @property
    def title(self) -> str:
        where = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        return f"kubernetes {self._cluster.title}, {where}"

    async def list(self) -> Listed:
        register = WorkerRegister()

        def read(resource: Resource) -> None:
            bodies, _ = read_all(self._cluster, resource, self._namespace)
            register.replace(resource, bodies)

        await asyncio.gather(*(self._in_thread(partial(read, one)) for one in RESOURCES))
        if ambiguous := register.ambiguous():
            raise Unreachable(ambiguous)
        return _list_of(register.entries())

    async def watch(self) -> AsyncGenerator[DiscoveryChange, None]:
        reader = asyncio.Event()
        # Changes before this reader joined are not reported again.
        reader.set()
        self._readers.add(reader)
        self._follow()
        known: dict[str, DiscoveryEntry] | None = None
        interrupted = False
        try:
            while True:
                await reader.wait()
                reader.clear()
                if self._closed.is_set():
                    return
                reason = next(
                    (follower.reason for follower in self._followers if follower.reason), ""
                )
                if not reason and self._namespace is None:
                    reason = self._register.ambiguous()
                if reason:
                    known = None
                    if not interrupted:
                        interrupted = True
                        yield Interrupted(reason)
                elif all(follower.listed for follower in self._followers):
                    if known is None:
                        known, interrupted = self._register.entries(), False
                        yield _list_of(known)
                        continue
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), self._debounce_s)
                    before, known = known, self._register.entries()
                    for change in changes(before, known):
                        yield change
        finally:
            self._readers.discard(reader)

    async def close(self) -> None:
        self._closed.set()
        self._stopped.set()
        self._wake()
        self._cluster.close()
        for _ in range(int(_JOIN_S / _JOIN_STEP_S)):
            if not any(thread.is_alive() for thread in self._threads):
                return
            await asyncio.sleep(_JOIN_STEP_S)

    def _follow(self) -> None:
        if self._followers or self._closed.is_set():
            return
        loop = asyncio.get_running_loop()

        def changed() -> None:
            # The loop may have ended without a close.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

        self._followers = [
            Follower(self._cluster, one, self._namespace, self._register, self._stopped, changed)
            for one in RESOURCES
        ]
        for follower in self._followers:
            self._start(follower.run)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()

    async def _in_thread(self, function: Callable[[], None]) -> None:
        """Call a blocking function in a separate thread that ends with it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(failure: Exception | None) -> None:
            if done.done():
                return
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

        def run() -> None:
            failure: Exception | None = None
            try:
                function()
            except Exception as error:
                failure = error
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, failure)

        self._start(run)
        await done

    def _start(self, function: Callable[[], None]) -> None:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=function, name="dynctl-kubernetes", daemon=True)
        self._threads.add(thread)
        thread.start()


def _list_of(entries: Mapping[str, DiscoveryEntry]) -> Listed:
    return Listed(tuple(entries[key] for key in sorted(entries)))
