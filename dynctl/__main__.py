"""Where the program starts, as `dynctl` and as `python -m dynctl`."""

import os
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run the command line of this process and end it."""
    if os.getpid() == 1:
        # The first process of a container ignores a signal without a handler: until a command has
        # its own, a pod that is deleted while it starts would run until it is killed.
        signal.signal(signal.SIGTERM, _end)
    _open_standard_streams()
    try:
        from dynctl.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported: commands handle it themselves
        sys.exit(130)


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _open_standard_streams() -> None:
    """Open the null device in place of standard streams that the caller closed (`>&-`).

    Python has None for them, and the next file or socket would get their number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        mode = os.O_RDONLY if number == 0 else os.O_WRONLY
        null = os.open(os.devnull, mode)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8"))


if __name__ == "__main__":
    main()
