"""A fixed time zone, and the app over a fleet that does not change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from dynctl.top.app import TopApp
from dynctl.top.keys import BINDINGS
from tests.dynctl.top.fleet import NOW, StillSource
from tests.waiting import patience

Shown = Callable[..., AbstractAsyncContextManager[Pilot[int]]]

#: The printable keys that act on panels, and their text in a form.
TYPED = [
    key for one in BINDINGS for key in one.key.split(",")  # type: ignore[union-attr]
    if len(key) == 1 or key in ("slash", "exclamation_mark", "question_mark", "colon")
]  # fmt: skip
_MARKS = {"slash": "/", "exclamation_mark": "!", "question_mark": "?", "colon": ":"}
TEXT = "".join(_MARKS.get(k, k) for k in TYPED)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    """``async with shown(source, size=(80, 24)) as pilot``: the app with its first snapshot."""

    @asynccontextmanager
    async def run(
        source: Any = None, *, size: tuple[int, int] = (80, 24), **settings: Any
    ) -> AsyncIterator[Pilot[int]]:
        source = source or StillSource()
        settings.setdefault("rate", 60.0)
        app = TopApp(source, wall=lambda: NOW, directory=tmp_path, **settings)
        async with app.run_test(size=size) as pilot:
            async with asyncio.timeout(patience(10)):
                while app.snapshot is None:
                    await pilot.pause(0.01)
            await pilot.pause()
            yield pilot

    return run


async def settled(pilot: Pilot[int]) -> None:
    """Wait until the requests of the keys to the source are complete."""
    requests = [worker for worker in pilot.app.workers if worker.name != "look"]
    if requests:
        await pilot.app.workers.wait_for_complete(requests)
    await pilot.pause()
