"""CPU of the dashboard: `dynctl top` on a pseudo terminal of 200x60.

    python -m tests.bench.bench_top [--seconds N] [--smoke]

The fleet is a process of its own (`top_fleet`), which the dashboard follows over HTTP once a
second; only the dashboard's CPU is counted, from /proc. Scrolling is the cursor going down through
the workers panel, 20 keys a second, less what the dashboard takes without keys.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness import Row, bench_parser, print_table, row

SIZE = (60, 200)
KEYS_A_SECOND = 20
WARM_S = 4.0


@dataclass
class Top:
    """The running dashboard. ``master`` is its terminal; ``drawn`` counts bytes written there."""

    pid: int
    master: int
    drawn: int = 0

    def watch(self, seconds: float, key: bytes = b"") -> float:
        """Take what it draws for a while, pressing ``key``; CPU seconds that it took meanwhile."""
        before, end = self._cpu(), time.monotonic() + seconds
        pressed = time.monotonic()
        while (now := time.monotonic()) < end:
            if key and now >= pressed:
                os.write(self.master, key)
                pressed += 1 / KEYS_A_SECOND
            if select.select([self.master], [], [], 0.02)[0]:
                self.drawn += len(os.read(self.master, 1 << 16))
        return self._cpu() - before

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def fleet(workers: int, rate: float) -> Iterator[str]:
    argv = [sys.executable, "-m", "tests.bench.top_fleet", "--workers", str(workers)]
    process = subprocess.Popen([*argv, "--rate", str(rate)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


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
        os.write(master, b"q")
        try:
            running_until_gone(process, running)
        finally:
            process.kill()
            process.wait()
            os.close(master)


def running_until_gone(process: subprocess.Popen[bytes], running: Top) -> None:
    """Read the terminal until the process ends: a full one would hold it up."""
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([running.master], [], [], 0.05)[0]:
            try:
                os.read(running.master, 1 << 16)
            except OSError:
                return


def measured(workers: int, seconds: float, warm: float) -> list[Row]:
    """Rows of one size of fleet. ``warm``: seconds until measuring starts."""
    with fleet(workers, rate=10.0) as url, top(url) as running:
        running.watch(warm)
        os.write(running.master, b"2")
        running.watch(min(1.0, seconds))
        before = running.drawn
        still = running.watch(seconds)
        drawn = running.drawn - before
        walking = running.watch(seconds, b"\x1b[B")
    aim = "< 5" if workers == 200 else ""
    name = f"{workers:,} workers"
    keys = seconds * KEYS_A_SECOND
    return [
        row(f"{name}: idle, one snapshot a second", "% of a core", 100 * still / seconds, aim=aim),
        row(f"{name}: drawn", "kB/s", drawn / seconds / 1000),
        row(f"{name}: a key pressed", "ms CPU", 1000 * max(0.0, walking - still) / keys),
    ]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    sizes = (20,) if arguments.smoke else (200, 1_000)
    seconds = 0.5 if arguments.smoke else arguments.seconds
    warm = 1.0 if arguments.smoke else WARM_S
    rows = [item for size in sizes for item in measured(size, seconds, warm)]
    print_table("the dashboard", rows)


if __name__ == "__main__":
    main()
