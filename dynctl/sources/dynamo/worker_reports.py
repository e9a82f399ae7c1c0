"""The workers of a live Dynamo and what they report of their load, followed beside a command.

Commands that ask frontends over HTTP block; reports come whenever they come. So the planes are
followed by an event loop in a thread of its own, and a question takes what is known by then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Final

from dynctl.base.errors import Unreachable
from dynctl.documents.workers import WorkerRow, worker_rows
from dynctl.sources.dynamo.observer import Observer, live_router
from dynctl.sources.dynamo.planes import Planes

#: Reports are listened to for this long before the first answer.
LISTEN_S: Final = 1.0


class WorkerReports:
    """``planes`` are opened when somebody asks first. A context manager.

    ``namespace``: Dynamo's, None for all. ``follow``: whether the workers' reports can be heard
    from here. ``timeout``: seconds that reading what is registered may take.
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
    def unheard(self) -> str:
        """Why a report may be unknown, for the person."""
        if not self._follow:
            return "reports are out of reach from here: they need the cluster's own network"
        seconds = LISTEN_S
        if self._started.done() and self._started.exception() is None:
            seconds = time.monotonic() - self._started.result()
        return f"not reported in {seconds:.0f} s; who keeps its value stays silent"

    def rows(self) -> list[WorkerRow]:
        """The workers with their last reports; their own loads are zero.

        Raises Unreachable or UsageProblem where discovery cannot be read.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="followed", daemon=True)
                self._thread.start()
        began = self._started.result()
        if self._follow:
            time.sleep(max(0.0, began + LISTEN_S - time.monotonic()))
        assert self._loop is not None
        asked = asyncio.run_coroutine_threadsafe(self._rows(), self._loop)
        try:
            return asked.result(self._timeout)
        except concurrent.futures.TimeoutError:
            raise Unreachable("what is registered could not be read in time") from None

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
            live_router(),
            planes.discovery,
            planes.plane_of,
            planes.requests,
            time.monotonic,
            namespace=self._namespace,
            follow_index=False,
            follow_load=self._follow,
            books=False,
        )
        try:
            async with self._observer:
                self._started.set_result(time.monotonic())
                await self._ending.wait()
        finally:
            await planes.close()
