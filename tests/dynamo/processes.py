"""Child processes that are gone afterwards, whatever becomes of the test that started them.

Each child leads a process group of its own. A reaper process holds the read end of a pipe from us:
when we end without tidying up (even by SIGKILL), it kills every process group that it knows.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import patience

STOP_SECONDS = 5.0

_REAPER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Process:
    """One child, its log and, if asked for, pipes to it."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.popen = popen
        self.log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self, number: signal.Signals = signal.SIGKILL, *, wait: bool = True) -> None:
        """Signal the whole group. ``wait``: until it is gone, for the signals that end it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)
        if wait and number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            self.popen.wait(patience(STOP_SECONDS))

    def lines(self, since: int = 0) -> list[str]:
        """The log's lines, from line ``since`` on."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(errors="replace").splitlines()[since:]
        return []

    def tail(self, count: int = 25) -> str:
        state = "running" if self.alive else f"ended with {self.popen.returncode}"
        return "\n".join([f"--- {self.name} ({state}), {self.log.name}:", *self.lines()[-count:]])


class ProcessGroup:
    """Starts children and ends all of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: list[Process] = []
        self._reaper: subprocess.Popen[bytes] | None = None

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        pipes: bool = False,
    ) -> Process:
        """``pipes``: stdin and stdout are ours; otherwise stdout goes to the log with stderr."""
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env=dict(environment),
                cwd=self.directory,
                start_new_session=True,
            )
        self._tell_reaper("+", popen.pid)
        process = Process(name, popen, log)
        self.children.append(process)
        return process

    def close(self) -> None:
        """SIGTERM, a wait, SIGKILL; every group, also of children that ended by themselves."""
        # Last started first: a frontend would otherwise report each worker that goes.
        for process in reversed(self.children):
            if process.popen.stdin is not None:
                with contextlib.suppress(OSError):
                    process.popen.stdin.close()
            process.kill(signal.SIGTERM, wait=False)
            # A child that a test has stopped cannot hear SIGTERM.
            process.kill(signal.SIGCONT, wait=False)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.05, deadline - time.monotonic()))
            process.kill(signal.SIGKILL, wait=False)
            process.popen.wait()
            if process.popen.stdout is not None:
                process.popen.stdout.close()
            self._tell_reaper("-", process.pid)
        self.children.clear()
        if self._reaper is not None:
            if self._reaper.stdin is not None:
                self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None

    def _tell_reaper(self, sign: str, group: int) -> None:
        if self._reaper is None:
            self._reaper = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _REAPER],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        if self._reaper.stdin is not None:
            self._reaper.stdin.write(f"{sign}{group}\n".encode())
            self._reaper.stdin.flush()
