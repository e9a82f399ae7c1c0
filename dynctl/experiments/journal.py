"""What a test changes at a frontend, written down before each change, so that it is put back even
if the test is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

import msgspec

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file, write_private_file

_LARGEST: Final = 1 << 20
Values = dict[str, bool | float | int | None]


class FleetChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of a frontend: of the worker or model ``name``, from ``before`` to ``after``.

    ``at``: wall-clock seconds. ``process``: of the frontend, which forgets it when it restarts.
    """

    kind: Literal["cordon", "thresholds"]
    name: str
    before: Values
    after: Values
    at: float
    process: str

    def __str__(self) -> str:
        if self.kind == "cordon":
            return f"cordon of worker {self.name}"
        return f"{', '.join(self.after)} of model {self.name}"


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    server: str
    changes: list[FleetChange]


def state_directory() -> Path:
    """``$XDG_STATE_HOME/dynctl``, else ``~/.local/state/dynctl``; it may not exist, and is not
    absolute where the user has no home."""
    # The XDG specification ignores relative paths.
    base = os.environ.get("XDG_STATE_HOME", "")
    return Path(base if base.startswith("/") else os.path.expanduser("~/.local/state"), "dynctl")


class ChangeJournal:
    """The changes of one server that are not put back yet. ``url``: of the server."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self._url = url
        folder = state_directory() if folder is None else folder
        self.path = folder / f"test-{sha256(url.encode()).hexdigest()[:16]}.json"
        self._lock_file = self.path.with_suffix(".lock")
        self._lock: int | None = None

    def in_use(self) -> bool:
        """Whether another test may change the server now."""
        try:
            lock = os.open(self._lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _take(lock)
        finally:
            os.close(lock)

    def open(self) -> None:
        """Make the folder, and keep other tests of the server from changing it. Raises
        UsageProblem where another test runs, or the folder cannot be written."""
        if not self.path.is_absolute():
            raise UsageProblem(
                "--allow-changes: changes are written down first, and this user has no home",
                "set XDG_STATE_HOME to a directory",
            )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageProblem(
                f"--allow-changes: {self.path.parent} cannot be written: "
                f"{file_problem(error, writing=True)}",
                "changes are written down there first; set XDG_STATE_HOME to another directory",
            ) from None
        if not _take(lock):
            os.close(lock)
            raise UsageProblem(
                f"--allow-changes: another test changes {self._url} now", "wait for its end"
            )
        self._lock = lock

    def close(self) -> None:
        """Let other tests change the server."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def left(self) -> Sequence[FleetChange]:
        """The changes that no test put back. Raises UsageProblem for a file that is not ours."""
        try:
            data = read_file(self.path, _LARGEST, pipe=False)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise UsageProblem(f"{self.path} cannot be read: {file_problem(error)}") from None
        try:
            return msgspec.json.decode(data, type=_Form).changes
        except msgspec.MsgspecError as error:
            raise UsageProblem(
                f"{self.path}: not a list of changes by dynctl test: {error}",
                "dynctl workers list shows cordoned workers; remove the file when all is well",
            ) from None

    def add(self, change: FleetChange) -> None:
        """Write a change down, before it is made. Raises UsageProblem."""
        self._write([*self.left(), change])

    def remove(self, change: FleetChange) -> None:
        """Forget a change that is put back. Raises UsageProblem."""
        self._write([kept for kept in self.left() if kept != change])

    def _write(self, changes: list[FleetChange]) -> None:
        try:
            if changes:
                write_private_file(self.path, msgspec.json.encode(_Form(self._url, changes)))
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.path.unlink()
        except OSError as error:
            raise UsageProblem(
                f"{self.path} cannot be written: {file_problem(error, writing=True)}"
            ) from None


def _take(lock: int) -> bool:
    """Take the lock of an open file, if no other process has it. The kernel releases it when a
    process ends."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
