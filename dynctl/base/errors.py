"""What the command line raises on purpose, and the exit code that each means.

::

    DynctlError               what is wrong, and what to try next
    ├── UsageProblem          an option, argument, file or setting that cannot be used   exit 2
    ├── Unreachable           what the command needs does not answer                     exit 3
    └── TimedOut              a started operation ran past --timeout or --wait           exit 4

An answer that is "no" (no eligible worker, a failed check) is not an error: the command prints it
and returns `ExitCode.NO`. Other rooms raise their own errors; :func:`exit_code_of` is the one
table that says what those mean to a shell.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees."""

    YES = 0
    NO = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMEOUT = 4
    #: A defect of dynctl itself (sysexits' EX_SOFTWARE); never confused with an answer.
    DEFECT = 70
    INTERRUPTED = 130


class DynctlError(Exception):
    """``message`` names the thing, the value and what was expected; ``hint`` what to try next."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageProblem(DynctlError):
    """An option, an argument, a file or a setting that cannot be used."""


class Unreachable(DynctlError):
    """Something that the command needs does not answer."""

    exit_code = ExitCode.UNREACHABLE


class TimedOut(DynctlError):
    """Something answered and did not finish in time."""

    exit_code = ExitCode.TIMEOUT


class ReaderLeft(Exception):
    """Who reads stdout has left (``dynctl ... | head``): nothing is wrong, nothing more is said."""


def single_line(text: str, most: int = 400) -> str:
    """A foreign text as one printable line of at most ``most`` characters, for error messages."""
    flat = " ".join(text.split())
    plain = "".join(character if character.isprintable() else "?" for character in flat)
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def exit_code_of(error: BaseException) -> ExitCode | None:
    """What an error means to the shell; None for one that nobody expects (a defect)."""
    if isinstance(error, DynctlError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    # By name, so that printing an error imports no room that did not raise it. All of these say
    # that some input cannot be used.
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
