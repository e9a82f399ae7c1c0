"""Dynamo's SelectionService as an oracle: every worker's potential load, and the choice itself."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from dynctl.wire.index_events import to_index_events
from dynctl.wire.vllm_events import BlockRemoved, BlockStored, EventBatch, encode_message
from router_core import (
    BlocksStored,
    Booked,
    Freed,
    KvEvent,
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
from tests.waiting import until_now

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


def test_blocks_in_host_memory_and_on_disk_are_counted_as_dynamo_does(
    oracle: Oracle, finding: Callable[[str], None]
) -> None:
    """Random events of three tiers: the same blocks by tier, the same tokens, the same choice."""
    rounds, chance, router = 40, random.Random(5), Router(preset("dynamo-1.6"))
    tokens = tuple(chance.randrange(3, 300) for _ in range(BLOCK * 12))
    names = tuple(range(1001, 1013))
    asked = {"model_name": MODEL, "token_ids": tokens}
    with contextlib.ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        publishers = [context.socket(zmq.PUB) for _ in range(WORKERS)]
        sent = [0] * WORKERS
        for number, socket in enumerate(publishers, 1):
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            worker = Worker(number, f"w{number}", MODEL, block_size=BLOCK)
            router.apply(WorkerUpserted(worker), 0.0)
            registered = {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://worker-{number}:1",
                "block_size": BLOCK,
                "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                "data_parallel_size": 1,
            }
            oracle.call("upsert_worker", registered)

        def publish(number: int, event: BlockStored | BlockRemoved) -> None:
            batch = EventBatch(0.0, (event,), 0)
            publishers[number].send_multipart(encode_message(b"", sent[number], batch))
            sent[number] += 1
            for one in to_index_events(batch, BLOCK).events:
                if isinstance(one, BlocksStored):
                    one = replace(one, counted=False)  # Dynamo does not count copies of a block
                router.apply(KvEvent(number + 1, 0, one), 0.0)

        def ours() -> dict[int, tuple[int, int, int]]:
            request = RoutingRequest.from_tokens("r", MODEL, tokens, BLOCK)
            rows = router.plan(request).final.rows()
            return {
                row.worker.worker_id: (row.overlap_blocks, row.host_blocks, row.disk_blocks)
                for row in rows
            }

        def theirs() -> dict[int, tuple[int, int, int]]:
            return {
                row["worker_id"]: (
                    row["device_blocks"],
                    row["host_pinned_extension_blocks"],
                    row["disk_extension_blocks"],
                )
                for row in oracle.call("overlap_scores", asked)["workers"]
            }

        # A subscription reaches its publisher late: the first block is sent until it is counted.
        for number in range(WORKERS):
            first = BlockStored(names[:1], None, tokens[:BLOCK], BLOCK, medium="GPU")

            def heard(number: int = number, first: BlockStored = first) -> bool:
                publish(number, first)
                return theirs()[number + 1][0] == 1

            until_now(heard)
        certain = tiered = 0
        for turn in range(rounds):
            for _ in range(3):
                number, medium = chance.randrange(WORKERS), chance.choice(["GPU", "CPU", "DISK"])
                begin = chance.randrange(12)
                end = min(12, begin + chance.randrange(1, 7))
                if chance.random() < 0.3:
                    publish(number, BlockRemoved(names[begin:end][::-1], medium=medium))
                else:
                    parent = names[begin - 1] if begin else None
                    held = tokens[BLOCK * begin : BLOCK * end]
                    publish(
                        number, BlockStored(names[begin:end], parent, held, BLOCK, medium=medium)
                    )
            with contextlib.suppress(TimeoutError):
                until_now(lambda: theirs() == ours())
            assert theirs() == ours(), turn
            decision = router.plan(RoutingRequest.from_tokens("r", MODEL, tokens, BLOCK)).final
            assert decision.winner is not None
            tied = {decision.refs[at].worker_id for at in decision.tied or (decision.winner,)}
            selected = oracle.call("select", {**asked, "selection_id": f"s{turn}"})
            assert selected["worker_id"] in tied, turn
            certain += len(tied) == 1
            tiered += any(host or disk for _, host, disk in ours().values())
            at = [ref.worker_id for ref in decision.refs].index(selected["worker_id"])
            assert decision.inputs is not None
            cached = decision.inputs.cached_tokens(at, decision.parameters)
            assert selected["effective_prefill_tokens"] == len(tokens) - cached, turn
    finding(f"cache tiers: {rounds} of {rounds} choices, {certain} without a tie")
    assert min(certain, tiered) > rounds / 2
