"""Dynamo's SelectionService as an oracle: every worker's potential load, and the choice itself."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router_core import (
    Booked,
    Freed,
    ModelRuntimeConfig,
    PrefillDone,
    Router,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    hash_prompt,
    preset,
)
from tests.dynamo.fleet import DYNAMO_PYTHON
from tests.dynamo.test_prediction import prompts

MODEL, BLOCK, WORKERS, STEPS = "tiny", 16, 5, 200


class Oracle:
    """A SelectionService in a process of its own."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("select_oracle.py")
        self.process = subprocess.Popen(
            [DYNAMO_PYTHON, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, (method, answer["error"])
        return answer["answer"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    made = Oracle()
    try:
        yield made
    finally:
        made.close()


def test_loads_and_choices_are_those_of_dynamos_selection_service(oracle: Oracle, finding) -> None:
    router = Router(preset("dynamo-1.6"))
    for number in range(1, WORKERS + 1):
        oracle.call(
            "upsert_worker",
            {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://worker-{number}:1",
                "block_size": BLOCK,
                # Nobody publishes there: this compares loads, not caches.
                "kv_events_endpoint": "tcp://127.0.0.1:9",
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 4096,
            },
        )
        card = ModelRuntimeConfig(total_kv_blocks=4096, max_num_batched_tokens=8192)
        worker = Worker(number, f"w{number}", MODEL, block_size=BLOCK, runtime_config=card)
        assert router.apply(WorkerUpserted(worker), 0.0).ok
    chance = random.Random(11)
    running: list[str] = []
    certain = 0
    for number, tokens in enumerate(prompts(STEPS, seed=11)):
        request = RoutingRequest(
            f"r{number}", MODEL, len(tokens), BLOCK, hash_prompt(tokens, BLOCK).sequence
        )
        ours = router.plan(request).final
        assert ours.inputs is not None
        asked = {"model_name": MODEL, "token_ids": tokens}
        rows = {row["worker_id"]: row for row in oracle.call("potential_loads", asked)}
        shared = ours.inputs.shared_blocks or [0] * len(ours.refs)
        for at, ref in enumerate(ours.refs):
            row = rows[ref.worker_id]
            prefill = ours.inputs.prefill_tokens[at] + len(tokens)
            decode = ours.inputs.active_blocks[at] + request.prompt_blocks - shared[at]
            assert row["potential_prefill_tokens"] == prefill
            assert row["potential_decode_blocks"] == decode
        assert ours.winner is not None
        tied = {ours.refs[at].worker_id for at in ours.tied or (ours.winner,)}
        selected = oracle.call("select_and_reserve", asked)
        assert selected["worker_id"] in tied
        certain += len(tied) == 1
        selection = selected["selection_id"]
        hashes = request.sequence_hashes
        booked = Booked(selection, "aggregated", selected["worker_id"], 0, len(tokens), hashes)
        assert router.apply(booked, 0.0).ok
        running.append(selection)
        for one in chance.sample(running, len(running) // 6):
            oracle.call("prefill_complete", one)
            router.apply(PrefillDone(one), 0.0)
        while len(running) > 25:
            done = running.pop(chance.randrange(len(running)))
            oracle.call("free_reservation", done)
            router.apply(Freed(done), 0.0)
    finding(f"SelectionService: {STEPS} of {STEPS} choices, {certain} without a tie")
    assert certain > STEPS / 2
