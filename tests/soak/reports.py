"""What a process of a soak run reports about itself: a JSON line for each line on its stdin."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

_STDIN = 0


def report_on_request(read: Callable[[], Mapping[str, Any]]) -> None:
    """Report in a thread, with ``read``. The process ends when stdin does: with its parent."""

    def serve() -> None:
        try:
            # Without the lock of sys.stdin, which the end of the interpreter would wait for.
            while os.read(_STDIN, 1):
                sys.stdout.write(json.dumps(read()) + "\n")
                sys.stdout.flush()
        finally:  # also where the parent ends before it has read a report
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=serve, name="reports", daemon=True).start()
