"""Processes of dynctl that start by a fork of one that has imported its modules: 0.1 s of CPU in
place of 0.6 (an engine) or 1.1 (a frontend).

For tests whose subject is not the start of a process. A run of the tests has one such server, from
the first use on. ``python -I tests/forks.py SOCKET ARGUMENTS`` runs `dynctl` so, for shells.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any, Final, Self

_ANSWER: Final = 4
"""Bytes of a pid and of an exit code."""


class Program:
    """A process of ``python -m``, with the attributes and methods of a Popen that tests use.

    ``words``: the module and its arguments. Streams: None, a file, PIPE, DEVNULL or STDOUT. Without
    ``text`` pipes are of bytes.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        text: bool = False,
    ) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        with contextlib.ExitStack() as closing:
            streams = [
                _Stream(number, kind, closing) for number, kind in enumerate((stdin, stdout))
            ]
            streams.append(
                _Stream(2, streams[1].theirs if stderr == subprocess.STDOUT else stderr, closing)
            )
            self.stdin, self.stdout, self.stderr = (stream.pipe(text) for stream in streams)
            environment = dict(os.environ if env is None else env)
            handles = [stream.theirs for stream in streams]
            self._line, self.pid = _asked(_server(), self.args, environment, cwd, handles)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutExpired."""
        if self.returncode is None:
            ready, _, _ = select.select([self._line], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = _number(self._line)
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Both outputs, of programs that write little into the second; then it has ended."""
        found = [pipe.read() if pipe else None for pipe in (self.stdout, self.stderr)]
        self.wait(timeout)
        self._close()
        return found[0], found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        self.wait()

    def _close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


class _Stream:
    """A standard stream of a program: ``theirs`` is its end, closed by ``closing``."""

    def __init__(self, number: int, kind: Any, closing: contextlib.ExitStack) -> None:
        self._number, self._ours = number, -1
        if kind == subprocess.PIPE:
            reading, writing = os.pipe()
            self.theirs, self._ours = (reading, writing) if number == 0 else (writing, reading)
            closing.callback(os.close, self.theirs)
        elif kind == subprocess.DEVNULL:
            self.theirs = os.open(os.devnull, os.O_RDWR)
            closing.callback(os.close, self.theirs)
        elif kind is None:
            self.theirs = number
        else:
            self.theirs = kind if isinstance(kind, int) else kind.fileno()

    def pipe(self, text: bool) -> IO[Any] | None:
        """Our end; None without a pipe."""
        if self._ours < 0:
            return None
        return os.fdopen(self._ours, ("w" if self._number == 0 else "r") + ("" if text else "b"))


def shell_command() -> str:
    """What a shell writes in place of `dynctl`."""
    return f"{sys.executable} -I -S {Path(__file__)} {_server()}"


def _start(command: Sequence[str], **more: Any) -> Program:
    assert list(command[:2]) == [sys.executable, "-m"], command
    return Program(command[2:], **more)


#: The module subprocess with a Popen that forks, for Python's own modules.
SUBPROCESS: Final = SimpleNamespace(**{**vars(subprocess), "Popen": _start})


@contextlib.contextmanager
def forked_demos() -> Iterator[None]:
    """Processes of a DemoFleet start by forks."""
    from unittest import mock  # not for shells, which start this file often

    with mock.patch("dynctl.simulation.demo.fleet.subprocess", SUBPROCESS):
        yield


# -- asking ----------------------------------------------------------------------------------------

_started: list[str] = []


def _server() -> str:
    """The address of the server of this run, which ends with this process."""
    if not _started:
        address = str(Path(tempfile.mkdtemp(prefix="dynctl-forks-")) / "socket")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", address],
            stdin=subprocess.PIPE,  # closed at the end of this process, which the server sees
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        assert process.stdout is not None
        assert process.stdout.read() == b"ready", "the server of forks did not start"
        process.stdout.close()
        atexit.register(_stop, process)
        _started.append(address)
    return _started[0]


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _asked(
    address: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    cwd: str | os.PathLike[str] | None,
    streams: Sequence[int],
) -> tuple[socket.socket, int]:
    """The connection on which the exit code comes, and the pid."""
    wanted = {"words": list(words), "env": dict(environment), "cwd": os.fspath(cwd or os.getcwd())}
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    sent = json.dumps(wanted).encode()
    socket.send_fds(line, [len(sent).to_bytes(_ANSWER)], list(streams))
    line.sendall(sent)
    return line, _number(line)


def _number(line: socket.socket) -> int:
    received = line.recv(_ANSWER, socket.MSG_WAITALL)
    if len(received) < _ANSWER:
        raise ConnectionError("the server of forks ended")
    return int.from_bytes(received, signed=True)


def _as_a_program(address: str, arguments: Sequence[str]) -> int:
    """Run dynctl with the streams of this process."""
    line, pid = _asked(address, ["dynctl", *arguments], os.environ, None, (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: os.kill(pid, got))
    code = _number(line)
    return code if code >= 0 else 128 - code


# -- the server ------------------------------------------------------------------------------------


def _serve(address: str) -> None:
    """Fork for each connection until stdin closes."""
    _import_all()
    _started.append(address)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready")
        os.dup2(2, 1)
        running: dict[int, tuple[int, socket.socket]] = {}
        while True:
            watched: list[Any] = [0, listener, *running]
            ready, _, _ = select.select(watched, [], [])
            if 0 in ready:
                break
            for handle in ready:
                if handle is listener:
                    line, _ = listener.accept()
                    pid = _fork(line, [listener, *(other for _, other in running.values())])
                    line.sendall(pid.to_bytes(_ANSWER, signed=True))
                    running[os.pidfd_open(pid)] = (pid, line)
                else:
                    _end(*running.pop(handle))
                    os.close(handle)
    os.unlink(address)
    os.rmdir(os.path.dirname(address))


def _end(pid: int, line: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError), line:  # who asked has ended
        line.sendall(code.to_bytes(_ANSWER, signed=True))


def _import_all() -> None:
    """Import what engines, frontends and short commands use; no thread may run at a fork."""
    import gc
    from importlib import import_module

    from dynctl.cli.app import program
    from dynctl.simulation.demo import fleet

    for name in ("serving.http.server", "simulation.engine.__main__", "tokenization.model"):
        import_module(f"dynctl.{name}")
    program(None)
    # A demo of such a process starts its engines so too.
    fleet.subprocess = SUBPROCESS  # type: ignore[attr-defined, assignment]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.collect()
    gc.freeze()


def _fork(line: socket.socket, others: Sequence[socket.socket]) -> int:
    """The pid of the new process, which runs what the line wants."""
    received, streams, _, _ = socket.recv_fds(line, _ANSWER, 3)
    size = int.from_bytes(received)
    wanted = json.loads(line.recv(size, socket.MSG_WAITALL))
    pid = os.fork()
    if pid:
        for number in streams:
            os.close(number)
        return pid
    code = 70
    try:
        for open_socket in (line, *others):
            open_socket.close()
        code = _run(wanted, streams)
    finally:
        os._exit(code)


def _run(wanted: Mapping[str, Any], streams: Sequence[int]) -> int:
    """Be the new process; the exit code. Ends as Python does: threads, atexit, streams."""
    import faulthandler
    import runpy
    import threading
    import traceback

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    faulthandler.enable(2)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)
    module, *arguments = wanted["words"]
    sys.argv[:] = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            output.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        sys.exit(_as_a_program(sys.argv[1], sys.argv[2:]))
