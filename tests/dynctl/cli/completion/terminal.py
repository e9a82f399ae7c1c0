"""A shell at a terminal of its own, as a person has it: keys in, files out."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.waiting import patience

DEADLINE_S = 30


class Terminal:
    """``argv`` with a terminal for its standard streams; ends with :meth:`close`."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cwd, start_new_session=True
        )
        os.close(slave)
        self.shown = b""

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        """Until the terminal has shown ``text``."""
        for _ in self._looks():
            if text.encode() in self.shown:
                return
        raise AssertionError(f"{text!r} was not shown: {self.shown[-2000:]!r}")

    def wait_for_file(self, path: Path) -> str:
        """What is in a file, once it is there; it is removed."""
        for _ in self._looks():
            if path.exists():
                found = path.read_text()
                path.unlink()
                return found
        raise AssertionError(f"no {path.name}: {self.shown[-2000:]!r}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def _looks(self) -> Iterator[None]:
        """Again and again, while what the terminal shows is read."""
        end = time.monotonic() + patience(DEADLINE_S)
        while time.monotonic() < end:
            ready, _, _ = select.select([self._master], [], [], 0.01)
            if ready:
                with contextlib.suppress(OSError):
                    self.shown += os.read(self._master, 65536)
            yield
