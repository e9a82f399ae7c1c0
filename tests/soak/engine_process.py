"""``python -m tests.soak.engine_process``: a simulated engine that reports what it caches."""

from __future__ import annotations

import sys
from functools import reduce
from operator import xor
from typing import Any
from unittest import mock

from dynctl.simulation.engine import process
from dynctl.simulation.engine.__main__ import main
from dynctl.simulation.engine.engine import Engine
from tests.soak.reports import report_on_request


def run() -> int:
    """As ``python -m dynctl.simulation.engine``."""
    engines: list[Engine] = []
    start = process.start_engine

    async def start_and_keep(*arguments: Any) -> process.RunningEngine:
        running = await start(*arguments)
        engines.append(running.engine)
        return running

    def cached() -> dict[str, int]:
        # One step of the interpreter: the event loop changes the cache meanwhile.
        names = list(engines[0].ranks[0].scheduler.cache.blocks)
        return {"blocks": len(names), "digest": reduce(xor, names, 0)}

    report_on_request(cached)
    with mock.patch.object(process, "start_engine", start_and_keep):
        return main()


if __name__ == "__main__":
    sys.exit(run())
