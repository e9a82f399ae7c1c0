"""Run the dashboard on a terminal and restore the terminal afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from dynctl.base.errors import ExitCode, UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.sources.source import LiveSource
from dynctl.top.custody import chain_reader
from dynctl.top.process_log import log_reader

_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
#: Seconds between two looks whether the terminal is still there.
_LOOKS_EVERY_S = 1.0
#: Seconds for an orderly end after the terminal is gone.
_ENDS_WITHIN_S = 5.0


def run_dashboard(
    source: LiveSource,
    options: GlobalOptions,
    *,
    rate: float = 1.0,
    domain: str | None = None,
    readonly: bool = False,
    reads_stdin: bool = False,
) -> int:
    """Show ``source`` until the user quits; return the exit code. ``reads_stdin``: the source
    reads standard input, so keys come from the terminal. Raises as the source, UsageProblem
    without a terminal, and a failure of the dashboard once the terminal is restored."""
    if reads_stdin:
        _keys_from_terminal()
    ours = sys.stdout.isatty() and sys.stderr.isatty() and os.isatty(0)
    if not ours or os.environ.get("TERM") == "dumb":
        raise UsageProblem(
            "top needs a terminal that supports cursor movement",
            "dynctl top --once prints one frame; -o json prints it for programs",
        )
    if options.no_color:
        os.environ["NO_COLOR"] = "1"  # which Textual reads when the app is made
    return asyncio.run(_run(source, options, rate=rate, domain=domain, readonly=readonly))


async def _run(
    source: LiveSource,
    options: GlobalOptions,
    *,
    rate: float,
    domain: str | None,
    readonly: bool,
) -> int:
    from dynctl.top.app import TopApp

    with silent_logs():
        async with source:
            app = TopApp(
                source,
                rate=rate,
                domain=domain,
                readonly=readonly,
                chain=chain_reader(options),
                logs=log_reader(options),
                clock=time.monotonic,
            )
            loop = asyncio.get_running_loop()
            code = ExitCode.YES

            def end(number: int) -> None:
                nonlocal code
                code = ExitCode.INTERRUPTED
                app.exit(int(code))

            for number in _ENDS:
                loop.add_signal_handler(number, end, number)
            shown = threading.Event()
            shown.set()
            gone = partial(loop.call_soon_threadsafe, end, signal.SIGHUP)
            threading.Thread(target=_watch_terminal, args=(shown, gone), daemon=True).start()
            try:
                left = await app.run_async(mouse=False)
            finally:
                shown.clear()
                for number in _ENDS:
                    loop.remove_signal_handler(number)
    if app.failure is not None:
        raise app.failure
    return int(left) if left is not None else int(code)


def _watch_terminal(shown: threading.Event, gone: Callable[[], object]) -> None:
    """Call ``gone`` once the terminal is closed, and end the process if that does not.

    The kernel sends SIGHUP for it to the first process of the terminal only, and a shell that
    ignores it leaves the dashboard without a screen. The event loop can wait then without end for
    room to write, so this runs in a thread of its own.
    """
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    # A hangup has no event that could be awaited: the dashboard reads the terminal itself.
    while not any(found & (select.POLLHUP | select.POLLERR) for _, found in poll.poll(0)):
        time.sleep(_LOOKS_EVERY_S)
        if not shown.is_set():
            return
    with contextlib.suppress(RuntimeError):  # the loop is closed
        gone()
    time.sleep(_ENDS_WITHIN_S)
    if shown.is_set():
        os._exit(int(ExitCode.INTERRUPTED))


def _keys_from_terminal() -> None:
    """Replace standard input, which is a log, by the terminal, as pagers do."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        return  # the caller reports the missing terminal
    os.dup2(terminal, 0)
    os.close(terminal)


@contextlib.contextmanager
def silent_logs() -> Iterator[None]:
    """Keep log lines off the screen."""
    handler = logging.NullHandler()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
