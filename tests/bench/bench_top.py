"""CPU of the dashboard: `dynctl top` on a pseudo terminal of 200x60.

The fleet is a process of its own (`top_fleet`), which the dashboard follows over HTTP once a
second; only the dashboard's CPU is counted, from /proc. Scrolling is the cursor going down through
the workers panel, 20 keys a second, less what the dashboard takes without keys.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.bench.harness import Options, Row, cpu_seconds, row

SIZE = (60, 200)
KEYS_A_SECOND = 20
WARM_S = 4.0


@dataclass
class Top:
    """The running dashboard. ``master`` is its terminal."""

    pid: int
    master: int

    def watch(self, seconds: float, key: bytes = b"") -> float:
        """Take what it draws for a while, pressing ``key``; CPU seconds that it took meanwhile."""
        before, end = cpu_seconds(self.pid), time.monotonic() + seconds
        pressed = time.monotonic()
        while (now := time.monotonic()) < end:
            if key and now >= pressed:
                os.write(self.master, key)
                pressed += 1 / KEYS_A_SECOND
            if select.select([self.master], [], [], 0.02)[0]:
                with contextlib.suppress(OSError):  # it ended
                    os.read(self.master, 1 << 16)
        return cpu_seconds(self.pid) - before


@contextmanager
def fleet(workers: int) -> Iterator[str]:
    argv = [sys.executable, "-m", "tests.bench.top_fleet", str(workers)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def top(url: str) -> Iterator[Top]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
    argv = [sys.executable, "-m", "dynctl", "top", "--frontend", url]
    process = subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(slave)
    running = Top(process.pid, master)
    try:
        yield running
    finally:
        process.terminate()
        # A full terminal would hold it up.
        while process.poll() is None:
            running.watch(0.1)
        os.close(master)


def rows(options: Options) -> Iterator[Row]:
    seconds, warm = (0.5, 1.0) if options.smoke else (15.0, 4.0)
    for workers in (20,) if options.smoke else (200, 1_000):
        with fleet(workers) as url, top(url) as running:
            running.watch(warm)
            os.write(running.master, b"2")
            running.watch(min(1.0, seconds))
            still = running.watch(seconds)
            walking = running.watch(seconds, b"\x1b[B")
        name, keys = f"{workers:,} workers", seconds * KEYS_A_SECOND
        aim = "< 5" if workers == 200 else ""
        yield row(f"{name}: no keys", "% of a core", 100 * still / seconds, aim=aim)
        yield row(f"{name}: a key pressed", "ms", 1000 * max(0.0, walking - still) / keys)
