"""Conditional disaggregation of a real Dynamo: which prompts it prefills on a decode worker.

Each prompt is predicted with the settings that the frontend has, then sent. Beside the workers the
frontend's debug line is compared: what it took as cached, and its verdict.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dynctl.documents.route_result import BypassRow, RouteResult
from dynctl.documents.view import SavedView
from dynctl.sources.dynamo.router_state import take_load
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.frontend_metrics import read_frontend_metrics
from tests.dynamo.client import Answer
from tests.dynamo.fleet import DynamoFleet, Frontend, WorkerPlan
from tests.dynamo.observed import Observed, observing, possible, stored_events
from tests.dynamo.test_scenarios_load import Score, gauges, prompt

Finding = Callable[[str], None]

PLANS = [
    WorkerPlan("prefill-0", "prefill", "held"),
    WorkerPlan("prefill-1", "prefill", "held"),
    *(WorkerPlan(f"decode-{n}", "decode", "held", args=("--publish",)) for n in range(3)),
]
#: The settings of each frontend, in Dynamo's words.
ISL: dict[str, Any] = {}
TIGHT = {"eff_isl_threshold": 60, "eff_isl_ratio_threshold": 0.5}
LOAD = {"policy": "prefill_load", "prefill_busy_threshold": 0.01}
EITHER = {"policy": "isl_or_load", "prefill_busy_threshold": 0.01, "eff_isl_threshold": 40}
GATE = {"decode_busy_threshold": 0.015}  # of 400 blocks
FRONTENDS = (ISL, TIGHT, LOAD, EITHER, GATE)


def flags(settings: dict[str, Any]) -> tuple[str, ...]:
    if not settings:
        return ("--router-conditional-disagg",)
    return (
        "--router-conditional-disagg",
        "--router-conditional-disagg-config",
        json.dumps(settings),
    )


def assignments(settings: dict[str, Any]) -> tuple[str, ...]:
    given = (f"conditional_disagg_{name}={value}" for name, value in settings.items())
    return ("conditional_disagg_enabled=true", *given)


async def predicted(
    seen: Observed, frontend: Frontend, settings: dict[str, Any], tokens: Sequence[int]
) -> RouteResult:
    await seen.quiet()
    _, page = await asyncio.to_thread(frontend.get, "/metrics")
    take_load(seen.observer, [read_frontend_metrics(page.encode())])
    view = SavedView(seen.router, time.monotonic(), "dynamo-1.6")
    query = RouteQuery(token_ids=list(tokens), assignments=assignments(settings))
    return ViewSource(view, "test").route(query)


def verdict(frontend: Frontend, since: int) -> tuple[bool, int]:
    """Whether the frontend left out the hop, and the tokens that it took as cached."""
    (line,) = frontend.log_lines("Conditional disagg decision", since)
    found = dict(re.findall(r"(\w+)=(\S+)", line))
    return found["bypass"] == "true", int(found["cached_tokens"])


class Compared:
    """Predictions beside what the frontends did."""

    def __init__(self) -> None:
        self.score = Score("conditional disaggregation, settings given", "")
        self.verdicts = self.bypassed = self.total = 0
        self.reasons: set[str] = set()

    async def one(
        self, seen: Observed, frontend: Frontend, settings: dict[str, Any], tokens: Sequence[int]
    ) -> None:
        expected = await predicted(seen, frontend, settings, tokens)
        line = len(frontend.process.lines())
        answer: Answer = await asyncio.to_thread(frontend.complete, tokens)
        assert answer.ok, answer
        placed = (answer.placement.prefill or answer.placement.decode, answer.placement.decode)
        self.score.judge(expected, right=expected.ok and placed in possible(expected))
        assert isinstance(expected.bypass, BypassRow)
        self.total += 1
        self.bypassed += expected.bypass.bypassed
        self.reasons.add(expected.bypass.reason)
        real = verdict(frontend, line)
        self.verdicts += real == (expected.bypass.bypassed, expected.bypass.cached_tokens)


async def _cached(fleet: DynamoFleet, seen: Observed, chance: random.Random) -> list[list[int]]:
    """Prompts whose beginnings decode workers (and prefill workers) have cached."""
    prompts, stored = [], 0
    workers = list(fleet.workers.values())
    for number in range(24):
        tokens = prompt(chance, chance.randint(3, 9))[: -chance.randint(1, 15)]
        prompts.append(tokens)
        for worker in chance.sample(workers, 2):
            depth = chance.randint(0, len(tokens) // 16)
            if depth and number % 4:
                worker.held.store(tokens[: 16 * depth])
                stored += 1
    for frontend in fleet.frontends:
        fleet.wait_until(
            lambda frontend=frontend: stored_events(frontend) >= stored,  # type: ignore[misc]
            f"{stored} stored events",
        )
    await seen.quiet(0.3)
    return prompts


@pytest.mark.seed("dynamo-1.6: skip the hop: dry run of a live Dynamo")
@pytest.mark.seed("dynamo-1.6: skip the hop: isl_bounding")
@pytest.mark.seed("dynamo-1.6: skip the hop: isl_or_load")
@pytest.mark.seed("dynamo-1.6: skip the hop: decode gate")
def test_predictions_with_the_settings_of_the_frontend(finding: Finding) -> None:
    compared, chance = Compared(), random.Random(17)

    async def run() -> None:
        frontends = tuple(flags(one) for one in FRONTENDS)
        with DynamoFleet(PLANS, frontends=frontends, blocks=400) as fleet:
            isl, tight, load, either, gate = fleet.frontends
            async with observing(fleet) as seen:
                prompts = await _cached(fleet, seen, chance)
                for tokens in prompts:
                    await compared.one(seen, isl, ISL, tokens)
                    await compared.one(seen, tight, TIGHT, tokens)
                for tokens in prompts[:10]:
                    await compared.one(seen, load, LOAD, tokens)
                    await compared.one(seen, gate, GATE, tokens)
                # Both prefill workers busy with a held prompt, in the eyes of two frontends.
                running = []
                for frontend in (load, either):
                    for name in ("prefill-0", "prefill-1"):
                        worker = fleet.workers[name]
                        worker.held.hold(prefill=True)
                        count = len(worker.held.requests("prefill"))
                        pin = {"prefill_worker_id": worker.instance_id}
                        running.append(frontend.begin(prompt(chance, 8), nvext=pin))
                        worker.held.wait_for(count + 1, "prefill")
                        worker.held.hold()
                    fleet.wait_until(
                        lambda frontend=frontend: sum(map(bool, gauges(frontend))) == 2,  # type: ignore[misc]
                        "the load of two prefill workers",
                    )
                for tokens in prompts[:12]:
                    await compared.one(seen, load, LOAD, tokens)
                    await compared.one(seen, either, EITHER, tokens)
                # A decode worker with active blocks, in the eyes of the one with a gate.
                worker = fleet.workers["decode-1"]
                worker.held.hold(decode=True)
                pin = {"decode_worker_id": worker.instance_id}
                running.append(gate.begin(prompt(chance, 8), max_tokens=4, nvext=pin))
                worker.held.wait_for(1, "decode")
                worker.held.hold()
                for tokens in prompts[:12]:
                    await compared.one(seen, gate, GATE, tokens)
                # A decode worker prefills a prompt by itself, in the eyes of the first frontend.
                warm, worker = prompt(chance, 9), fleet.workers["decode-2"]
                applied = stored_events(isl)
                worker.held.store(warm[: 16 * 8])
                fleet.wait_until(lambda: stored_events(isl) > applied, "a stored event")
                worker.held.hold(prefill=True)
                running.append(isl.begin(warm, max_tokens=2))
                worker.held.wait_for(1, "prefill")
                worker.held.hold()
                fleet.wait_until(lambda: any(gauges(isl)), "the load of a decode worker")
                for tokens in prompts[:12]:
                    await compared.one(seen, isl, ISL, tokens)
                for worker in fleet.workers.values():
                    worker.held.release()
                assert all(one.result().ok for one in running)

    asyncio.run(run())
    compared.score.report(finding)
    finding(
        f"conditional disaggregation: {compared.verdicts} of {compared.total} verdicts and cached "
        f"tokens are Dynamo's; {compared.bypassed} left out the hop"
    )
    assert compared.score.right == compared.verdicts == compared.total >= 40
    assert compared.reasons >= {
        "short_prefill", "prefill_busy", "long_prefill", "little_cached", "prefill_calm",
        "decode_busy",
    }  # fmt: skip
