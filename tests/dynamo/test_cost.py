"""The cost of observing, printed at the end of the run."""

from __future__ import annotations

import asyncio
import time

from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.observed import observing
from tests.dynamo.test_prediction import prompts

IDLE_SECONDS = 5.0


def test_the_cost_of_observing(finding) -> None:
    async def run() -> tuple[float, int, int]:
        with DynamoFleet(aggregated(4), blocks=4096, speedup=0) as fleet:
            for tokens in prompts(60, seed=3):
                assert (await asyncio.to_thread(fleet.frontend.complete, tokens)).ok
            async with observing(fleet) as seen:
                await seen.quiet()
                asked = seen.observer.requested
                first = asked.recoveries, asked.recovery_bytes
                spent = time.process_time()
                await asyncio.sleep(IDLE_SECONDS)
                spent = time.process_time() - spent
                assert (asked.recoveries, asked.recovery_bytes) == first, (
                    "no worker is queried twice"
                )
        return spent / IDLE_SECONDS, *first

    core, calls, size = asyncio.run(run())
    finding(
        f"observing 4 idle workers takes {100 * core:.1f} % of a core; "
        f"one look asked {calls} workers and read {size:,} bytes of their caches"
    )
    assert calls == 4
    assert core < 0.25
