"""`dynctl test` at healthy fleets that serve other clients meanwhile: no alarm, run after run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings

from dynctl.base.tasks import end_tasks
from dynctl.experiments.canary import Reply
from dynctl.experiments.groups.streams import STREAMS, StreamFacts
from dynctl.findings.report import State
from dynctl.findings.runner import Passed, Skipped, Wrong
from router_core import RouterConfig
from tests.dynctl.experiments.trials import ENGINE, result_of, states
from tests.dynctl.serving.fleets import Site, site

THOROUGH = settings().max_examples >= 300
RUNS = {"kv": 20 if THOROUGH else 1}
"""In a row; the others run in `make test-thorough` alone, four times each."""
CLIENTS = 4
LIMITED = {**ENGINE, "max_num_seqs": 8, "total_blocks": 1024}


@asynccontextmanager
async def traffic(fleet: Site, clients: int = CLIENTS) -> AsyncIterator[None]:
    """Other clients, which send one request after another: most begin as others did."""
    documents = ["".join(random.Random(seed).choices("abcdefgh ", k=1600)) for seed in range(8)]

    async def client(number: int) -> None:
        chance = random.Random(number)
        while True:
            text = f"{chance.choice(documents)} {chance.random()}"
            await fleet.stream(text, max_tokens=chance.randint(4, 48))
            await asyncio.sleep(chance.expovariate(8))

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield
    finally:
        await end_tasks(tasks)
    assert not [task for task in tasks if not task.cancelled() and task.exception()]


def aggregated(count: int = 3) -> list[dict[str, Any]]:
    return [{**LIMITED, "name": f"e{number}"} for number in range(count)]


FLEETS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "kv": (aggregated(), {}),
    "round robin": (aggregated(2), {"router": RouterConfig(router_mode="round-robin")}),
    "estimated": (aggregated(), {"router": RouterConfig(use_kv_events=False)}),
    "prefill and decode": (
        [
            {**LIMITED, "name": name, "role": role}
            for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"))
        ],
        {},
    ),
}


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", FLEETS if THOROUGH else ["kv"])
async def test_a_busy_fleet_is_not_blamed(name: str):
    engines, options = FLEETS[name]
    async with site(engines, **options) as fleet, traffic(fleet):
        runs = [await result_of(fleet.frontend.url) for _ in range(RUNS.get(name, 4))]
    blamed = [check for report in runs for check in report.checks if check.findings]
    assert not blamed
    if name == "kv":
        assert {states(report)["DYE0401"] for report in runs} == {State.PASS}


SHORT = Reply(200, events=(0.02,), seconds=0.02, done=True)
BY_TOKEN = tuple(0.02 + 0.01 * number for number in range(32))
TOGETHER = (0.33,) * 32


def stream(events: tuple[float, ...], pause: float = 0.0, before: int = 0) -> Reply:
    """A stream whose client was away for ``pause`` seconds before this event."""
    seen = [max(at, events[before] + pause) if n >= before else at for n, at in enumerate(events)]
    return Reply(200, events=tuple(seen), seconds=seen[-1], done=True)


@pytest.mark.parametrize(
    ("streams", "outcome"),
    [
        ([stream(BY_TOKEN)] * 3, Passed),
        ([stream(BY_TOKEN, 0.2, 0)] * 3, Passed),
        ([stream(BY_TOKEN, 0.2, 12)] * 3, Passed),
        ([stream(TOGETHER)] * 3, Wrong),
        ([stream(TOGETHER, 0.1, 20)] * 3, Wrong),
        ([stream(TOGETHER, 0.2, 20), *[stream(TOGETHER)] * 3], Wrong),
        ([stream(BY_TOKEN)] * 2 + [stream(TOGETHER)] * 3, Skipped),
        ([stream(BY_TOKEN)] * 4 + [stream(TOGETHER)], Skipped),
        ([stream((0.02, 0.17, 0.33))] * 3, Passed),
    ],
    ids=[
        *("by token", "late at the first", "late in the middle", "held back"),
        *("held back, and late in the middle", "one of four was late for long"),
        *("two of five come", "one of five is held back", "eight tokens an event"),
    ],
)
def test_a_client_that_is_late_changes_no_verdict_about_buffers(
    streams: list[Reply], outcome: type
) -> None:
    facts = StreamFacts("m", [SHORT] * len(streams), streams, Skipped("no stream"))
    check = next(check for check in STREAMS.checks if check.code == "DYE0301")
    assert isinstance(check.judge(facts), outcome)
