"""rich's progress bar for work that takes long: on stderr, and only on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.base.terminal import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_Item = TypeVar("_Item")
#: Work that ends earlier shows no bar, in seconds.
_PATIENCE_S: Final = 0.5
#: A bar takes the count of each of so many items: an update costs more than a cheap item.
_EACH: Final = 64


class ProgressBar:
    """Where a long work is. It draws nothing if it was made without rich's bar."""

    def __init__(self, drawn: Progress | None) -> None:
        self._drawn = drawn
        self._task: TaskID | None = None
        self._unit = ""
        self._began = time.monotonic()

    def begin(self, about: str, total: float | None = None, unit: str = "") -> None:
        """Count from zero; ``total`` None: unknown. With a ``unit`` the bar shows the count."""
        if self._drawn is None:
            return
        if self._task is not None:
            self._drawn.remove_task(self._task)
        self._unit = unit
        self._task = self._drawn.add_task(printable(about), total=total, count="")

    def step(self, done: float, about: str | None = None) -> None:
        """What is done of the total, and ``about`` what comes next."""
        if self._drawn is None or self._task is None:
            return
        if time.monotonic() - self._began >= _PATIENCE_S:
            self._drawn.start()
        count = f"{done:,} {self._unit}" if self._unit else ""
        description = None if about is None else printable(about)
        self._drawn.update(self._task, completed=done, count=count, description=description)

    def following(
        self, items: Iterable[_Item], about: str, total: int | None, unit: str
    ) -> Iterator[_Item]:
        """The same items, counted."""
        if self._drawn is None:
            yield from items
            return
        self.begin(about, total, unit)
        for count, item in enumerate(items, 1):
            if count % _EACH == 0:
                self.step(count)
            yield item

    def pulse(self, about: str) -> None:
        """Show at once that something runs whose end is unknown, and for how long."""
        self.begin(about)
        if self._drawn is not None:
            self._drawn.start()


@contextmanager
def progress(options: GlobalOptions) -> Iterator[ProgressBar]:
    """A bar for the time of the block; it leaves no trace.

    Without a terminal on stderr, and where the answer is not a table, it draws nothing.
    """
    in_table = options.output in (OutputFormat.TABLE, OutputFormat.WIDE)
    if not (in_table and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        yield ProgressBar(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    drawn = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True, no_color=options.no_color or None),
        transient=True,
        redirect_stdout=False,
    )
    try:
        yield ProgressBar(drawn)
    finally:
        drawn.stop()
