"""The simulator's prefix cache beside those of real engines: the same requests, the same hits.

The requests go one after another, in turn to each engine, so that nothing depends on timing. The
caches are small: most of what is reused is known only by knowing what was evicted.
"""

from __future__ import annotations

from collections.abc import Callable

from dynctl.documents.recording import Finished
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import ReplayPolicy, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.simulation import simulate
from dynctl.simulation.replay.workloads import generate, workload
from dynctl.wire.traces import TraceRequest
from router_core import RouterConfig
from tests.dynamo.client import tokens_of
from tests.vllm.stack import BLOCK, Stack

ENGINES = 2
#: One of vLLM's blocks is never used: its null block.
BLOCKS = 161
REQUESTS = 150


def trace() -> list[TraceRequest]:
    """Requests with shared prefixes, each long after the one in front of it."""
    wanted = [
        f"requests={REQUESTS}", "prompts=8", "prompt_tokens=480", "turns=3", "turn_tokens=96",
        "output_tokens=8", "longest_tokens=1600",
    ]  # fmt: skip
    found = generate(workload("chat", wanted), seed=3, block_size=BLOCK)
    return [
        TraceRequest(
            at=100.0 * number,
            id=one.id,
            input_tokens=one.input_tokens,
            output_tokens=8,
            hash_ids=one.hash_ids,
            block_size=BLOCK,
        )
        for number, one in enumerate(found)
    ]


def test_hits_of_real_engines_are_the_simulated_ones(finding: Callable[[str], None]) -> None:
    requests = trace()
    engine = EngineConfig(block_size=BLOCK, total_blocks=BLOCKS - 1)
    workers = tuple(SimulatedWorker(number) for number in range(1, ENGINES + 1))
    policy = ReplayPolicy("round-robin", RouterConfig(router_mode="round-robin"))
    cached: dict[str, int] = {}
    result = simulate(
        requests,
        SimulatedFleet(workers, engine),
        policy,
        records=lambda one: (
            cached.update({one.id: one.cached_tokens or 0}) if isinstance(one, Finished) else None
        ),
    )
    assert result.counts.finished == REQUESTS
    with Stack() as stack:
        engines = [stack.engine(f"e{number}", blocks=BLOCKS) for number in range(ENGINES)]
        stack.wait(*engines)
        real: dict[str, int] = {}
        for number, request in enumerate(requests):
            body = {
                "model": "tiny",
                "prompt": tokens_of(request),
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = engines[number % ENGINES].http.post("/v1/completions", json=body)
            answer.raise_for_status()
            details = answer.json()["usage"].get("prompt_tokens_details") or {}
            real[request.id] = details.get("cached_tokens") or 0
    total = sum(one.input_tokens for one in requests)
    reused, expected = sum(real.values()) / total, sum(cached.values()) / total
    equal = sum(cached[name] == tokens for name, tokens in real.items())
    finding(
        f"calibration, {REQUESTS} requests, caches of {BLOCKS - 1} blocks: hit rate {reused:.2%}, "
        f"simulated {expected:.2%} ({(expected - reused) * 100:+.2f} points); {equal} of "
        f"{REQUESTS} requests alike to the token"
    )
    assert reused > 0.2, "hardly anything was reused, so nothing was compared"
    assert abs(reused - expected) <= 0.01
