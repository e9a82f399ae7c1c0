"""The workers of a live Dynamo and their load reports, received while a command runs.

Commands that read frontends over HTTP block, and reports arrive at any time. So a thread with its
own event loop follows the planes, and :meth:`WorkerReports.rows` returns what has arrived.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Final

from dynctl.adapters.dynamo.planes import Planes
from dynctl.base.errors import Unreachable
from dynctl.documents.workers import WorkerRow, worker_rows
from dynctl.serving.dynamo.observer import Observer

#: Reports are collected for this long before the first list of workers.
COLLECT_S: Final = 1.0


class WorkerReports:
    """A context manager; the first :meth:`rows` opens ``planes``.

    ``namespace``: Dynamo's, None for all. ``follow``: whether reports can be received from here.
    ``timeout``: seconds for reading the registered workers.
    """

    def __init__(
        self,
        planes: Callable[[], Planes],
        *,
        namespace: str | None,
        follow: bool = True,
        timeout: float = 10.0,
    ) -> None:
        self._planes = planes
        self._namespace = namespace
        self._follow = follow
        self._timeout = timeout
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started: concurrent.futures.Future[float] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._observer: Observer | None = None

    def __enter__(self) -> WorkerReports:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        concurrent.futures.wait([self._started])
        if self._loop is not None and self._ending is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    @property
    def no_report_reason(self) -> str:
        """Why the report of a worker may be unknown, for the user."""
        if not self._follow:
            return "load reports are not reachable from here: they need the cluster's own network"
        seconds = COLLECT_S
        if self._started.done() and self._started.exception() is None:
            seconds = time.monotonic() - self._started.result()
        return f"not reported in {seconds:.0f} s (workers report changes only)"

    def rows(self) -> list[WorkerRow]:
        """The workers with their last reports; their own loads are zero.

        Raises Unreachable or UsageProblem where discovery cannot be read.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="worker reports", daemon=True
                )
                self._thread.start()
        began = self._started.result()
        if self._follow:
            time.sleep(max(0.0, began + COLLECT_S - time.monotonic()))
        assert self._loop is not None
        rows = asyncio.run_coroutine_threadsafe(self._rows(), self._loop)
        try:
            return rows.result(self._timeout)
        except concurrent.futures.TimeoutError:
            raise Unreachable("the registered workers could not be read in time") from None

    async def _rows(self) -> list[WorkerRow]:
        assert self._observer is not None
        return worker_rows(self._observer.router, time.monotonic())

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        planes = self._planes()
        self._observer = Observer(
            planes,
            namespace=self._namespace,
            follow_index=False,
            follow_load=self._follow,
        )
        async with self._observer:
            self._started.set_result(time.monotonic())
            await self._ending.wait()
