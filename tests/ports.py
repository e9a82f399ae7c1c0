"""Ports for servers that a test starts, and for addresses at which nothing listens."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

_chance = random.SystemRandom()  # not seeded alike in two runs at once
_given: set[int] = set()

# Processes of one run take different ports: each has those of its remainder.
_PROCESSES: Final = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_NUMBER: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def free_port(first: int = 10_000, last: int = 32_767) -> int:
    """A port that nothing listens on now, never the same twice.

    Below the range that the system gives to connections and to servers that ask for any port, so
    that none of those takes it meanwhile; Dynamo reads its system port as a signed 16-bit number,
    which fits.
    """
    for _ in range(1000):
        port = _chance.randrange(first + _NUMBER, last + 1, _PROCESSES)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise AssertionError(f"no free port from {first} to {last}")
