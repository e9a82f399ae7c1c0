"""Run the tests beside processes that use all CPU: ``python -m tests.busy [OPTION|ARG ...]``.

The arguments are pytest's. Burners end with this process, and after ``--minutes`` in any case.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack

from tests.waiting import SLOWDOWN, cores

_BURN = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100_000):
        pass
"""


def main() -> int:
    """Returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="tests.busy", description=__doc__)
    parser.add_argument("--burners", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments, rest = parser.parse_known_args()
    slowdown = str(max(1.0, (arguments.burners + cores()) / cores()))
    with ExitStack() as stack:
        for _ in range(arguments.burners):
            burner = subprocess.Popen(
                [sys.executable, "-c", _BURN, str(60 * arguments.minutes)], stdin=subprocess.DEVNULL
            )
            stack.callback(burner.wait)
            stack.callback(burner.kill)
        command = [sys.executable, "-m", "pytest", *rest]
        return subprocess.run(command, env=os.environ | {SLOWDOWN: slowdown}).returncode


if __name__ == "__main__":
    sys.exit(main())
