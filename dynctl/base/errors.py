"""The errors of the command line, and the exit code of each.

::

    DynctlError               the problem, and what to do
    ├── UsageProblem          an option, argument, file or setting that is invalid       exit 2
    └── Unreachable           a component that the command needs is not reachable        exit 3
        ├── AccessDenied      the component refuses the credentials                      exit 3
        └── TimedOut          an operation did not finish within --timeout or --wait     exit 4

A negative result (no eligible worker, a failed check) is not an error: the command prints it and
returns `ExitCode.NO`. Other rooms raise their own errors; :func:`exit_code_of` has
their exit codes.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, BinaryIO, Final


class ExitCode(IntEnum):
    """The exit codes of the command line."""

    YES = 0
    NO = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMEOUT = 4
    #: A defect of dynctl itself (sysexits' EX_SOFTWARE); different from all results.
    DEFECT = 70
    INTERRUPTED = 130


class DynctlError(Exception):
    """``message`` has the object, its value and what was expected; ``hint`` what to do."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageProblem(DynctlError):
    """An option, an argument, a file or a setting that is invalid."""


class Unreachable(DynctlError):
    """A component that the command needs is not reachable."""

    exit_code = ExitCode.UNREACHABLE


class AccessDenied(Unreachable):
    """The component refuses the credentials: it is of no use to wait."""


class TimedOut(Unreachable):
    """An operation did not finish in time."""

    exit_code = ExitCode.TIMEOUT


class ReaderLeft(Exception):
    """The reader of stdout ended (``dynctl ... | head``): not an error, no more output."""


def single_line(text: str, most: int = 400) -> str:
    """A foreign text as one printable line of at most ``most`` characters, for error messages."""
    # Help pages import this module and print no foreign text.
    from dynctl.base.terminal import printable

    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= most else plain[: most - 3] + "..."


_CREDENTIALS: Final = re.compile(r"(?<=//)[^/\s]*@")


def without_credentials(url: str) -> str:
    """A URL as errors show it: without user and password."""
    return _CREDENTIALS.sub("***@", url)


#: How the reason begins where TLS refused a certificate (ssl.SSLCertVerificationError).
UNTRUSTED: Final = "its certificate is not trusted"


#: The reason where no process listens.
CONNECTION_REFUSED: Final = "connection refused"
#: How the reason begins where the name of a host has no address.
UNKNOWN_HOST: Final = "unknown host name"
NO_RESPONSE: Final = "no response in time"


def network_reason(error: BaseException) -> str:
    """Why a connection, a request or listening failed, in words that go after an address.

    Words of our own for the usual problems (``connection refused``), so that they are the same for
    every library and system. HTTP libraries hide the operating system's error behind texts of their
    own ("All connection attempts failed"); it is found in the chain of causes. asyncio hides it
    behind the address ("Connect call failed"), and several in one text; all are named.
    """
    chain = list(_causes(error))
    for cause in chain:
        reason = _known_reason(cause)
        if reason is not None:
            return reason
    late = any(isinstance(cause, TimeoutError) for cause in chain)
    return single_line(str(error)) or (NO_RESPONSE if late else "the connection failed")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, at most eight; of a group the first."""
    inner: BaseException | None = error
    for _ in range(8):
        if inner is None:
            return
        yield inner
        if isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        else:
            inner = inner.__cause__ or inner.__context__


def _known_reason(error: BaseException) -> str | None:
    """The reason that the error itself has; None if only its causes can have one."""
    if (problem := getattr(error, "verify_message", None)) is not None:
        return f"{UNTRUSTED}: {single_line(problem)}"
    if type(error).__name__ == "gaierror":
        return _name_problem(error)
    # ZMQ's errors have the system's numbers, too.
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return _numbered_reason(error, number)
    if isinstance(error, OSError) and (numbers := _NUMBER.findall(str(error))):
        return ", ".join(dict.fromkeys(_problem_of_number(int(number)) for number in numbers))
    return None


def _numbered_reason(error: BaseException, number: int) -> str:
    # TLS has separate numbers.
    tls = type(error).__module__ == "ssl"
    if tls and (name := getattr(error, "reason", None)):
        return f"TLS: {single_line(name.lower().replace('_', ' '))}"
    known = number in errno.errorcode and not tls
    text = _problem_of_number(number) if known else getattr(error, "strerror", None)
    return single_line(text or str(error))


_NUMBER: Final = re.compile(r"\[Errno (\d+)\]")
_NETWORK_PROBLEMS: Final = {
    errno.ECONNREFUSED: CONNECTION_REFUSED,
    errno.EHOSTUNREACH: "no route to the host",
    errno.EHOSTDOWN: "the host is down",
    errno.ENETUNREACH: "the network is not reachable",
    errno.ENETDOWN: "the network is down",
    errno.ETIMEDOUT: NO_RESPONSE,
    errno.ECONNRESET: "the other side closed the connection",
    errno.ECONNABORTED: "the other side closed the connection",
    errno.EPIPE: "the other side closed the connection",
    errno.EACCES: "no permission to use the address",
    errno.EPERM: "no permission to use the address",
    errno.EADDRINUSE: "the address is in use",
    errno.EADDRNOTAVAIL: "the address is not available on this machine",
    errno.ENOENT: "its file or directory does not exist",
    errno.ENODEV: "the address is not available on this machine",
}


def known_network_reason(text: str) -> str:
    """The usual problem that a library's text about a connection contains; else empty."""
    reasons = (
        reason for number, reason in _NETWORK_PROBLEMS.items() if os.strerror(number) in text
    )
    return next(reasons, "")


def _problem_of_number(number: int) -> str:
    """The problem of a socket for an error number of the system."""
    known = _NETWORK_PROBLEMS.get(number) or _FILE_PROBLEMS.get(number)
    return known or os.strerror(number)


def _name_problem(error: Any) -> str:
    """Why the name of a host has no address."""
    import socket

    if error.errno == socket.EAI_AGAIN:
        return f"{UNKNOWN_HOST} (the name server does not respond)"
    return UNKNOWN_HOST


def exit_code_of(error: BaseException) -> ExitCode | None:
    """The exit code of an error; None for an unexpected one (a defect)."""
    if isinstance(error, DynctlError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    # By name, so that printing an error imports only the room that raised it. All of these mean
    # invalid input.
    expected = {
        "router_core.errors.RouterCoreError",
        "dynctl.base.decode_errors.WireError",
        "dynctl.tokenization.errors.TokenizationError",
        "dynctl.simulation.engine.config.EngineConfigError",
        "dynctl.serving.engines.worker_spec.WorkerSpecError",
    }
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if names & expected:
        return ExitCode.USAGE
    if "dynctl.adapters.ports.ClusterRefusal" in names:
        return ExitCode.UNREACHABLE
    if isinstance(error, OSError) and error.filename is not None:
        return ExitCode.USAGE
    return None


class NotARegularFile(OSError):
    """A path names a pipe, a socket or a device, which may block or never end."""


class SilentPipe(OSError):
    """A pipe that did not end in time; nothing writes to it, or its writer is slow."""


class LinkedFile(OSError):
    """A symbolic link where a file is written that its owner alone may read."""


def file_error(kind: type[OSError], number: int, path: str | os.PathLike[str]) -> OSError:
    """An error of the system about a file."""
    return kind(number, os.strerror(number), str(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError; NotARegularFile for what may never end."""
    # Not blocking: a pipe without a writer would wait for one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise file_error(IsADirectoryError, errno.EISDIR, path)
    raise file_error(NotARegularFile, errno.EINVAL, path)


def file_problem(error: OSError, what: str = "file", *, writing: bool = False) -> str:
    """Why a file cannot be read or written, in words that go after its name.

    ``what``: the kind of file that was expected, ``file`` or ``directory``.
    """
    if isinstance(error, FileNotFoundError):
        if writing:
            return "its directory does not exist"
        if error.filename == "-":
            return "standard input is not supported here; expected a file"
        return f"the {what} does not exist"
    if isinstance(error, PermissionError):
        return f"no permission to {'write' if writing else 'read'} it"
    for kind, problem in _FILE_ERRORS.items():
        if isinstance(error, kind):
            return problem
    return _FILE_PROBLEMS.get(error.errno or 0) or error.strerror or str(error)


_FILE_ERRORS: Final = {
    NotARegularFile: "is a pipe or a device; expected a file",
    SilentPipe: "is a pipe that did not end in time; expected a file",
    IsADirectoryError: "is a directory; expected a file",
    NotADirectoryError: "a part of the path is not a directory",
    FileExistsError: "the file exists already",
    LinkedFile: "is a symbolic link; expected a file",
}


@contextlib.contextmanager
def named_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError the name of the file: that of a write (a full disk) has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


#: What only a write fails with.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FILE_PROBLEMS: Final = {
    errno.ENXIO: "is a socket or a device; expected a file",
    errno.ENOSPC: "no space is left on its device",
    errno.EDQUOT: "the quota of this user on its device is used up",
    errno.EFBIG: "it would be larger than this process may write (ulimit -f)",
    errno.EROFS: "its file system is read-only",
    errno.ELOOP: "its symbolic links form a loop",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EMFILE: "this process has too many open files; raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many open files",
}
