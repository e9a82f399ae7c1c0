"""What `route` says before each request is what Dynamo's frontend then does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.dynamo.fleet import DynamoFleet, WorkerPlan, aggregated, two_zones
from tests.dynamo.observed import Observed, observing, possible

REQUESTS = 200


def prompts(count: int, seed: int) -> list[list[int]]:
    """Token lists that share beginnings, as conversations and system prompts do."""
    chance = random.Random(seed)
    stems = [[chance.randrange(3, 300) for _ in range(16 * n)] for n in (2, 5, 9, 14)]
    made: list[list[int]] = []
    for _ in range(count):
        kind = chance.random()
        if made and kind < 0.35:
            start = list(chance.choice(made))  # a conversation goes on
        elif kind < 0.85:
            start = list(chance.choice(stems))
        else:
            start = []
        more = chance.randrange(5, 90)
        made.append((start + [chance.randrange(3, 300) for _ in range(more)])[:900])
    return made


async def agreed(fleet: DynamoFleet, seen: Observed, asked: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(requests that went where the prediction allowed, predictions that allowed one place)."""
    hits = certain = 0
    for tokens in asked:
        await seen.quiet()
        expected = possible(seen.predict(tokens))
        answer = await asyncio.to_thread(fleet.frontend.complete, list(tokens))
        assert answer.ok, answer
        placement = answer.placement
        assert placement.decode is not None
        hits += (placement.prefill, placement.decode) in expected
        certain += len(expected) == 1
    return hits, certain


@pytest.mark.parametrize(
    ("plans", "name"),
    [
        (aggregated(4), "aggregated"),
        (two_zones("required", prefill=2), "two zones, required"),
        (two_zones("preferred", 0.85, prefill=2), "two zones, preferred 0.85"),
    ],
    ids=["aggregated", "required", "preferred"],
)
def test_sequential_requests_are_predicted(plans: list[WorkerPlan], name: str, capsys) -> None:
    async def run() -> tuple[int, int]:
        with DynamoFleet(plans, blocks=4096, speedup=0) as fleet:
            async with observing(fleet) as seen:
                return await agreed(fleet, seen, prompts(REQUESTS, seed=7))

    hits, certain = asyncio.run(run())
    with capsys.disabled():
        print(f"\n{name}: {hits} of {REQUESTS} predicted, {certain} of them without a tie")
    assert hits == REQUESTS
    assert certain > REQUESTS / 4, "the prompts must not leave everything to chance"


# -- in flight -------------------------------------------------------------------------------------


async def agreed_in_flight(
    fleet: DynamoFleet, seen: Observed, asked: Sequence[Sequence[int]], flying: int, gauges: bool
) -> tuple[int, int, int]:
    """As `agreed`, with ``flying`` requests held at workers all the time.

    The third number is of requests that went where prefill was predicted, whatever came after it.
    Every request is held before its first token or after it, so the load is exact while we look.
    """
    chance = random.Random(5)
    running: list[InFlight] = []
    hits = certain = 0
    for tokens in asked:
        if len(running) >= flying:
            await _let_one_go(fleet, running.pop(chance.randrange(len(running))))
        await seen.quiet()
        if gauges:
            metrics = await asyncio.to_thread(fleet.frontend.get, "/metrics")
            loads = add_loads([read_frontend_metrics(metrics[1].encode())])
            for change in gauge_changes(seen.router.registry, loads):
                seen.observer.apply(change)
        expected = possible(seen.predict(tokens))
        before = _held(fleet)
        flight = fleet.frontend.begin(list(tokens), max_tokens=2)
        where = await _arrived(fleet, before)
        running.append(flight)
        hits += (where, where) in expected
        certain += len(expected) == 1
    for worker in fleet.workers.values():
        worker.held.hold()
        worker.held.release()
    for flight in running:
        await asyncio.to_thread(flight.result)
    return hits, certain, len(asked)
