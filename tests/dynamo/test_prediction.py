"""What `route` says before each request is what Dynamo's frontend then does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from tests.dynamo.client import InFlight
from tests.dynamo.fleet import DynamoFleet, Worker, WorkerPlan, aggregated, two_zones
from tests.dynamo.observed import Observed, observing, possible
from tests.dynamo.test_scenarios_load import codes, routed

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


async def agreed(
    fleet: DynamoFleet, seen: Observed, asked: Sequence[Sequence[int]]
) -> tuple[int, int]:
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
def test_sequential_requests_are_predicted(plans: list[WorkerPlan], name: str, finding) -> None:
    async def run() -> tuple[int, int]:
        with DynamoFleet(plans, blocks=4096, speedup=0) as fleet:
            async with observing(fleet) as seen:
                return await agreed(fleet, seen, prompts(REQUESTS, seed=7))

    hits, certain = asyncio.run(run())
    finding(f"{name}: {hits} of {REQUESTS} predicted, {certain} of them without a tie")
    assert hits == REQUESTS
    assert certain > REQUESTS / 4, "the prompts must not leave everything to chance"


# -- in flight -------------------------------------------------------------------------------------


class HeldLoad:
    """Requests held at the workers of a fleet, some before and some after their first token.

    Nothing moves while we look, so that what is compared is the load and not the moment.
    """

    def __init__(self, fleet: DynamoFleet, seed: int) -> None:
        self.fleet = fleet
        self.running: list[tuple[InFlight, Worker, str]] = []
        self._chance = random.Random(seed)
        self._seen = {worker.name: 0 for worker in fleet.workers.values()}
        for worker in fleet.workers.values():
            worker.held.hold(prefill=True, decode=True)

    def begin(self, tokens: Sequence[int]) -> int:
        """Send a request; the instance id of the worker that it was routed to."""
        flight = self.fleet.frontend.begin(list(tokens), max_tokens=2)
        found: list[tuple[Worker, str]] = []

        def arrived() -> bool:
            for worker in self.fleet.workers.values():
                requests = worker.held.requests()
                if len(requests) > self._seen[worker.name]:
                    self._seen[worker.name] = len(requests)
                    found.append((worker, requests[-1].id))
            return bool(found)

        self.fleet.wait_until(arrived, "the request to arrive", every=0.005)
        [(worker, request_id)] = found
        self.running.append((flight, worker, request_id))
        return worker.instance_id

    def move(self) -> None:
        """Some get their first token."""
        for _, worker, request_id in self._chance.sample(self.running, len(self.running) // 8):
            if any(one.id == request_id for one in worker.held.requests("prefill")):
                worker.held.step(request_id)

    def end_one(self) -> None:
        flight, worker, request_id = self.running.pop(self._chance.randrange(len(self.running)))
        worker.held.release(request_id)
        assert flight.result().ok

    def end(self) -> None:
        while self.running:
            self.end_one()


@pytest.mark.parametrize("flying", [32, 64])
@pytest.mark.parametrize("source", ["replica sync", "metrics"])
def test_requests_under_load_are_predicted(flying: int, source: str, finding) -> None:
    mirrored = source == "replica sync"
    # Events do not show what began before; metrics do not show single requests.
    code = "DYR0708" if mirrored else "DYR0715"
    asked = prompts(flying + 40, seed=flying)

    async def run() -> tuple[int, int, int]:
        flags = ("--router-replica-sync",) if mirrored else ()
        hits = certain = declared = 0
        with DynamoFleet(aggregated(4, kind="held"), blocks=8192, frontend_args=flags) as fleet:
            async with observing(fleet, follow_load=mirrored) as seen:
                for number, worker in enumerate(fleet.workers.values()):
                    for tokens in asked[number::9]:
                        worker.held.store(tokens)
                load = HeldLoad(fleet, seed=flying)
                for number, tokens in enumerate(asked):
                    await seen.quiet()
                    result = await routed(seen, tokens, *([] if mirrored else [fleet.frontend]))
                    expected = possible(result)
                    where = await asyncio.to_thread(load.begin, tokens)
                    if number >= flying:
                        hits += (where, where) in expected
                        certain += len(expected) == 1
                        declared += (where, where) not in expected and code in codes(result)
                        await asyncio.to_thread(load.end_one)
                    await asyncio.to_thread(load.move)
                await asyncio.to_thread(load.end)
        return hits, certain, declared

    hits, certain, declared = asyncio.run(run())
    text = f"{flying} in flight, load from {source}: {hits} of 40, {certain} without a tie"
    finding(f"{text}, {declared} declared ({code}), {40 - hits - declared} silently wrong")
    assert certain > 20
    assert hits + declared == 40
    assert hits >= 0.95 * 40 or not mirrored


@pytest.mark.parametrize(("enforcement", "weight"), [("required", None), ("preferred", 0.85)])
def test_two_hops_under_load_are_predicted(
    enforcement: str, weight: float | None, finding: Callable[[str], None]
) -> None:
    """Decode is held, so its load stays; prefill goes through and leaves its cache behind."""
    plans = two_zones(enforcement, weight, prefill=2, decode=2, kind="held", args=("--cache",))
    asked = prompts(80, seed=3)

    async def run() -> tuple[int, int]:
        hits = certain = 0
        flags = ("--router-replica-sync",)
        with DynamoFleet(plans, blocks=8192, frontend_args=flags) as fleet:
            decoders = [w for w in fleet.workers.values() if w.plan.role == "decode"]
            for worker in decoders:
                worker.held.hold(decode=True)
            async with observing(fleet) as seen:
                running: list[tuple[InFlight, set[tuple[int | None, int]]]] = []
                for number, tokens in enumerate(asked):
                    await seen.quiet()
                    expected = possible(seen.predict(tokens))
                    certain += len(expected) == 1
                    flight = fleet.frontend.begin(tokens, max_tokens=2)
                    running.append((flight, expected))
                    await asyncio.to_thread(_arrived, fleet, decoders, number + 1)
                for worker in decoders:
                    worker.held.release()
                for flight, expected in running:
                    placed = (await asyncio.to_thread(flight.result)).placement
                    hits += (placed.prefill, placed.decode) in expected
        return hits, certain

    hits, certain = asyncio.run(run())
    finding(f"two hops under load, {enforcement}: {hits} of {len(asked)}, {certain} without a tie")
    assert hits >= 0.95 * len(asked)


def _arrived(fleet: DynamoFleet, workers: Sequence[Worker], count: int) -> None:
    fleet.wait_until(
        lambda: sum(len(worker.held.requests()) for worker in workers) == count,
        f"{count} requests to arrive",
    )
