"""A frontend with its own settings: shown as assumptions, predicted once they are specified."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from dynctl.base.options import GlobalOptions
from dynctl.documents.doubts import Doubt
from dynctl.sources.dynamo.source import DynamoSource
from dynctl.sources.query import RouteQuery
from tests.dynamo.fleet import DynamoFleet, aggregated
from tests.dynamo.observed import observing

DRAWS = 1000
SETTINGS = {"router_temperature": 0.5, "prefill_load_scale": 1.5}
FLAGS = ("--router-temperature", "0.5", "--router-prefill-load-scale", "1.5")
#: Chi-square by degrees of freedom that a true prediction exceeds once in a million runs. The draws
#: are twice as many as with a limit of once in 1,000, so that a wrong one is found as surely.
CRITICAL = {2: 27.63}


def test_probabilities_are_told_and_hold() -> None:
    prompt = list(range(50, 50 + 96))

    async def run() -> tuple[dict[int, float], Counter[int], list[Doubt]]:
        with DynamoFleet(aggregated(3, kind="held"), frontend_args=FLAGS) as fleet:
            workers = list(fleet.workers.values())
            workers[0].held.store(prompt[:64])
            workers[1].held.store(prompt[:32])
            async with observing(fleet) as seen:
                await seen.quiet(0.3)
                predicted = seen.predict(prompt, **SETTINGS).decode
                assert predicted is not None
                expected = {row.worker_id: row.probability for row in predicted.candidates}
                drawn: Counter[int] = Counter()
                for _ in range(DRAWS):
                    answer = await asyncio.to_thread(fleet.frontend.dry_run, prompt)
                    assert answer.placement.decode is not None
                    drawn[answer.placement.decode] += 1
            options = GlobalOptions(discovery="file", file_kv=fleet.file_kv)
            untold = await asyncio.to_thread(
                DynamoSource(options).route, RouteQuery(token_ids=prompt)
            )
        return expected, drawn, untold.doubts

    expected, drawn, doubts = asyncio.run(run())
    assert math.isclose(sum(expected.values()), 1.0)
    assert 0.02 < min(expected.values()) < max(expected.values()) < 0.9
    statistic = sum(
        (drawn[worker] - DRAWS * chance) ** 2 / (DRAWS * chance)
        for worker, chance in expected.items()
    )
    assert statistic < CRITICAL[len(expected) - 1], (expected, drawn)
    assert any("no card advertises any" in one.what for one in doubts), doubts


def test_settings_in_a_card_are_followed() -> None:
    """A mocker that advertises them makes the frontend, and us, use them."""
    args = ("--router-mode", "kv", "--router-prefill-load-scale", "3.0")
    with DynamoFleet(aggregated(2, args=args), router_mode="round-robin") as fleet:
        options = GlobalOptions(discovery="file", file_kv=fleet.file_kv)
        predicted = DynamoSource(options).route(RouteQuery(token_ids=list(range(3, 43))))
        assert predicted.decode is not None
        assert predicted.decode.parameters["prefill_load_scale"] == 3.0
        assert any("cards advertise" in text for text in predicted.assumptions)
        asked = {"annotations": ["query_instance_id:"]}
        assert fleet.frontend.complete(list(range(3, 43)), nvext=asked).ok
        lines = fleet.frontend.log_lines("Selected worker")
        assert any(f"logit={predicted.decode.candidates[0].cost:g}" in line for line in lines), (
            lines
        )
