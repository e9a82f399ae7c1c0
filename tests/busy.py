"""Run the tests on a machine with little time: ``python -m tests.busy [OPTION|ARG ...]``.

Burners use all CPU; ``--pauses`` stops one process of the run at a time, as a host does that gives
its CPU to another machine. The other arguments are pytest's. Burners end with this process, and
after ``--minutes`` in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.waiting import SLOWDOWN, cores

_BURN = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100_000):
        pass
"""
_RUNNABLE = "RSD"


def main() -> int:
    """Returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="tests.busy", description=__doc__)
    parser.add_argument("--burners", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pauses", type=float, default=0.0, help="the longest pause in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the pauses")
    arguments, rest = parser.parse_known_args()
    slowdown = str(max(1.0, (arguments.burners + cores()) / cores()))
    with ExitStack() as stack:
        for _ in range(arguments.burners):
            burner = subprocess.Popen(
                [sys.executable, "-c", _BURN, str(60 * arguments.minutes)], stdin=subprocess.DEVNULL
            )
            stack.callback(burner.wait)
            stack.callback(burner.kill)
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *rest], env=os.environ | {SLOWDOWN: slowdown}
        )
        over = threading.Event()
        if arguments.pauses > 0:
            pauses = threading.Thread(
                target=_pause, args=(run.pid, arguments.pauses, random.Random(arguments.seed), over)
            )
            pauses.start()
            stack.callback(pauses.join)
        stack.callback(over.set)
        return run.wait()


def _pause(root: int, longest: float, random_: random.Random, over: threading.Event) -> None:
    """Stop a process of the run, any one, again and again until it is over."""
    while not over.wait(random_.uniform(0.0, 2 * longest)):
        running = [pid for pid, state in _processes(root) if state in _RUNNABLE]
        if not running:
            continue
        pid = random_.choice(running)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            over.wait(random_.uniform(0.1, 1.0) * longest)
            os.kill(pid, signal.SIGCONT)


def _processes(root: int) -> Iterator[tuple[int, str]]:
    """``root`` and the processes below it, each with its state."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        parents[int(path.parent.name)] = int(fields[1]), fields[0]
    for pid, (parent, state) in parents.items():
        while parent in parents and root not in (pid, parent):
            parent = parents[parent][0]
        if root in (pid, parent):
            yield pid, state


if __name__ == "__main__":
    sys.exit(main())
