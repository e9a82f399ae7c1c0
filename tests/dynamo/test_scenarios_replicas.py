"""Situations of whole fleets: replica sync, conditional disaggregation, settings in the cards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.sources.dynamo.source import DynamoSource
from tests.dynamo.fleet import DynamoFleet, WorkerPlan, aggregated
from tests.dynamo.observed import observing, possible
from tests.dynamo.test_scenarios_load import Score, cost, logit, prompt, route, routed

Finding = Callable[[str], None]


def test_one_of_two_frontends_with_replica_sync(finding: Finding) -> None:
    """The gauge of one keeps the prefill tokens that the other has finished."""
    once = Score("replica sync, one of two frontends, looking once", "DYR0741")
    followed = Score("replica sync, one of two frontends, followed", "")
    shared = Score("replica sync, prompt decoding elsewhere", "")
    chance, exact = random.Random(4), 0

    async def run() -> int:
        same = 0
        plans = aggregated(2, kind="held")
        flags = ("--router-replica-sync",)
        with DynamoFleet(plans, frontends=((), ()), frontend_args=flags) as fleet:
            first, second = fleet.frontends
            workers = list(fleet.workers.values())
            for worker in workers:
                worker.held.hold(prefill=True, decode=True)
            async with observing(fleet) as seen:
                for number in range(6):
                    busy, other = workers[number % 2], workers[1 - number % 2]
                    large, small = prompt(chance, 8), prompt(chance, 3)
                    running = []
                    for worker, tokens in ((busy, large), (other, small)):
                        pin = {"backend_instance_id": worker.instance_id}
                        before = len(worker.held.requests())
                        running.append(first.begin(tokens, max_tokens=2, nvext=pin))
                        worker.held.wait_for(before + 1)
                    busy.held.step()  # its first token: the prefill is finished
                    busy.held.wait_for(0, "prefill")
                    await seen.quiet(0.2)
                    # Another prompt, and the one that is decoding.
                    for tokens, score in ((prompt(chance, 4), followed), (large, shared)):
                        expected = await routed(seen, tokens, second)
                        alone = await asyncio.to_thread(route, fleet, tokens, second)
                        line = len(second.process.lines())
                        answer = await asyncio.to_thread(second.dry_run, tokens)
                        score.count(expected, answer)
                        once.count(alone, answer)
                        same += abs((logit(second, line) or 0) - cost(expected)) < 1e-3
                    for worker in workers:
                        worker.held.release()
                    assert all(one.result().ok for one in running)
                    await seen.quiet(0.2)
        return same

    exact = asyncio.run(run())
    for score in (followed, shared, once):
        score.report(finding)
    finding(f"replica sync: {exact} of 12 costs are Dynamo's")
    assert (followed.right, shared.right, exact) == (6, 6, 12)
    assert once.declared


def test_requests_that_began_before_are_waited_for(finding: Finding) -> None:
    chance = random.Random(8)
    flags = ("--router-replica-sync",)
    with DynamoFleet(aggregated(2, kind="held"), frontend_args=flags) as fleet:
        first = fleet.workers["worker-0"]
        first.held.hold(decode=True)
        tokens, pin = prompt(chance, 8), {"backend_instance_id": first.instance_id}
        old = fleet.frontend.begin(tokens, max_tokens=2, nvext=pin)
        first.held.wait_for(1)
        once = route(fleet, tokens, fleet.frontend)
        running = [old]
        with ThreadPoolExecutor() as pool:
            following = pool.submit(route, fleet, tokens, fleet.frontend, follow=60.0)
            while not following.done():
                # There is always one, and the one of before has ended.
                running.append(fleet.frontend.begin(tokens, max_tokens=2, nvext=pin))
                for one in first.held.wait_for(len(running))[:-1]:
                    first.held.release(one.id)
                assert running[-2].result().ok
            expected = following.result()
        first.held.release()
        assert running[-1].result().ok
    found = {one.code for one in once.doubts}, {one.code for one in expected.doubts}
    assert ("DYR0715" in found[0], "DYR0715" in found[1]) == (True, False)
    assert expected.decode is not None
    assert expected.decode.freshness is not None
    assert "replica-sync events" in expected.decode.freshness.load.source
    finding("requests that began before: followed until each running request is known")


@pytest.mark.seed("dynamo-1.6: skip the hop: dry run of a live Dynamo")
def test_conditional_disaggregation_with_a_warm_decode_worker(finding: Finding) -> None:
    score, chance, bypassed = Score("conditional disaggregation", "DYR0743"), random.Random(3), 0
    known = Score("conditional disaggregation, with --set", "")
    plans = [
        WorkerPlan("prefill-0", "prefill", "held"),
        WorkerPlan("decode-0", "decode", "held", args=("--publish",)),
        WorkerPlan("decode-1", "decode", "held", args=("--publish",)),
    ]
    flags = ("--router-conditional-disagg",)
    with DynamoFleet(plans, frontend_args=flags) as fleet:
        for _ in range(4):
            tokens = prompt(chance, 6)
            warm = fleet.workers["decode-1"]
            warm.held.store(tokens[: 16 * 4])

            def cached(tokens: list[int] = tokens) -> bool:
                line = len(fleet.frontend.process.lines())
                fleet.frontend.dry_run(tokens)
                return (logit(fleet.frontend, line) or 99) < 9

            fleet.wait_until(cached, "the cached blocks to be known")
            expected = route(fleet, tokens, fleet.frontend)
            given = ("conditional_disagg_enabled=true",)
            predicted = route(fleet, tokens, fleet.frontend, assignments=given)
            assert "DYR0743" not in {one.code for one in predicted.doubts}
            answer = fleet.frontend.complete(tokens)
            assert answer.ok, answer
            decode = answer.placement.decode
            right = decode is not None and (decode, decode) in possible(predicted)
            known.judge(predicted, right=right)
            bypassed += answer.placement.prefill in (None, answer.placement.decode)
            score.count(expected, answer)
    score.report(finding)
    known.report(finding)
    assert known.right == 4
    finding(f"conditional disaggregation: {bypassed} of 4 were prefilled by the decode worker")
    assert (score.named, bypassed) == (4, 4)


def test_cards_that_advertise_round_robin(finding: Finding) -> None:
    score, chance = Score("cards advertise round-robin", "DYR0716"), random.Random(6)
    plans = aggregated(2, args=("--router-mode", "round-robin"))
    with DynamoFleet(plans, speedup=0) as fleet:
        for _ in range(8):
            tokens = prompt(chance, 4)
            expected = route(fleet, tokens, fleet.frontend)
            score.count(expected, fleet.frontend.complete(tokens))
        options = GlobalOptions(discovery="file", file_kv=fleet.file_kv)
        settings = DynamoSource(options, (fleet.frontend.url,)).config().settings
    score.report(finding)
    assert score.named == 8
    assert next(row for row in settings if row.name == "router_mode").value == "round-robin"
    assert next(row for row in settings if row.name == "router_temperature").known
