"""Dynamo's SelectionService as an oracle: every worker's potential load, and the choice itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
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
    Pin,
    PrefillDone,
    Router,
    RouterConfig,
    RoutingRequest,
    Session,
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

    def __init__(self, **environment: str) -> None:
        script = Path(__file__).with_name("select_oracle.py")
        self.process = subprocess.Popen(
            [DYNAMO_PYTHON, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
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


@pytest.mark.seed("dynamo-1.6: tiers: host and disk weights")
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


def learning(oracle: Oracle, **settings: Any) -> Router:
    """A router that learns from bookings, with the workers of the oracle."""
    router = Router(RouterConfig().with_values(settings), learns=True)
    for number in range(1, WORKERS + 1):
        registered = {
            "worker_id": number,
            "model_name": MODEL,
            "endpoint": f"http://worker-{number}:1",
            "block_size": BLOCK,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "max_num_batched_tokens": 8192,
            "total_kv_blocks": 4096,
            "kv_events_endpoint": "tcp://127.0.0.1:9",
        }
        oracle.call("upsert_worker", registered)
        card = ModelRuntimeConfig(total_kv_blocks=4096, max_num_batched_tokens=8192)
        worker = Worker(
            number,
            f"w{number}",
            MODEL,
            block_size=BLOCK,
            runtime_config=card,
            kv_events=router.config.use_kv_events,
        )
        assert router.apply(WorkerUpserted(worker), 0.0).ok
    return router


def device_blocks(oracle: Oracle, asked: Mapping[str, Any]) -> dict[int, int]:
    """The cached blocks of every worker."""
    rows = oracle.call("overlap_scores", asked)["workers"]
    found = {row["worker_id"]: row["device_blocks"] for row in rows}
    return {number: found.get(number, 0) for number in range(1, WORKERS + 1)}


@pytest.mark.seed("dynamo-1.6: approximate mode: learned from booked decisions, TTL")
@pytest.mark.seed("dynamo-1.6: approximate mode: predict-on-route beside real events")
@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        (
            {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_TTL_SECS": "3600"},
            {"use_kv_events": False, "router_ttl_secs": 3600.0},
        ),
        (
            {"DYN_ROUTER_PREDICTED_TTL_SECS": "3600"},
            {"router_predicted_ttl_secs": 3600.0},
        ),
    ],
    ids=["approximate", "predicted"],
)
def test_what_is_learned_from_bookings_is_what_dynamo_learns(
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
    finding: Callable[[str], None],
) -> None:
    """Random prompts with shared beginnings: the same cached blocks, the same choices."""
    steps, chance = 240, random.Random(7)
    oracle = Oracle(**environment)
    try:
        router = learning(oracle, **settings)
        roots = [[chance.randrange(3, 30_000) for _ in range(BLOCK * 8)] for _ in range(6)]
        running: list[str] = []
        certain = cached = 0
        for number in range(steps):
            root = chance.choice(roots)
            tail = [chance.randrange(3, 30_000) for _ in range(chance.randrange(0, 40))]
            tokens = root[: chance.randrange(1, len(root))] + tail
            request = RoutingRequest.from_tokens(f"r{number}", MODEL, tokens, BLOCK)
            asked = {"model_name": MODEL, "token_ids": tokens}
            ours = router.plan(request).final
            overlaps = {ref.worker_id: ours.overlap_blocks(at) for at, ref in enumerate(ours.refs)}

            # Its index takes what was booked a moment later.
            with contextlib.suppress(TimeoutError):
                until_now(lambda: device_blocks(oracle, asked) == overlaps)  # noqa: B023
            assert device_blocks(oracle, asked) == overlaps, number
            # A choice without a booking teaches neither of them.
            oracle.call("select", asked)
            assert ours.winner is not None
            tied = {ours.refs[at].worker_id for at in ours.tied or (ours.winner,)}
            selected = oracle.call("select_and_reserve", asked)
            assert selected["worker_id"] in tied, number
            certain += len(tied) == 1
            cached += any(overlaps.values())
            at = [ref.worker_id for ref in ours.refs].index(selected["worker_id"])
            booking = router.booking(replace(ours, winner=at), request)
            selection = selected["selection_id"]
            assert router.apply(replace(booking, request_id=selection), float(number)).ok
            running.append(selection)
            for one in chance.sample(running, len(running) // 6):
                oracle.call("prefill_complete", one)
                router.apply(PrefillDone(one), float(number))
            while len(running) > 12:
                done = running.pop(chance.randrange(len(running)))
                oracle.call("free_reservation", done)
                router.apply(Freed(done), float(number))
        finding(f"SelectionService: {steps} of {steps} choices by learned blocks, {cached} cached")
        assert cached > steps / 2
        assert certain > steps / 2
    finally:
        oracle.close()


def test_what_is_learned_is_forgotten_with_the_time_of_dynamo() -> None:
    oracle = Oracle(DYN_ROUTER_USE_KV_EVENTS="false", DYN_ROUTER_TTL_SECS="2")
    try:
        learning(oracle, use_kv_events=False)
        tokens = list(range(3, 3 + BLOCK * 4))
        asked = {"model_name": MODEL, "token_ids": tokens}

        def held() -> int:
            return max(device_blocks(oracle, asked).values())

        began = time.monotonic()
        selected = oracle.call("select_and_reserve", asked)
        until_now(lambda: held() == 4 or time.monotonic() - began >= 2)
        # The end of the request changes nothing.
        oracle.call("free_reservation", selected["selection_id"])
        until_now(lambda: held() == 0)
        assert time.monotonic() - began >= 2
    finally:
        oracle.close()


@pytest.mark.seed("dynamo-1.6: session affinity: hard")
@pytest.mark.seed("dynamo-1.6: session affinity: pins")
def test_sessions_stay_where_dynamo_keeps_them(finding: Callable[[str], None]) -> None:
    """Random sessions, loads and pins: the same choices."""
    steps, chance = 200, random.Random(3)
    oracle = Oracle(ORACLE_SESSION_TTL="3600")
    try:
        router = learning(oracle, router_session_affinity_ttl_secs=3600.0)
        kept = pinned = 0
        running: list[str] = []
        for number in range(steps):
            tokens = [chance.randrange(3, 30_000) for _ in range(chance.randrange(20, 400))]
            name = chance.choice(["a", "b", "c", "d", "e", "f", None])
            asked: dict[str, Any] = {"model_name": MODEL, "token_ids": tokens}
            request = RoutingRequest.from_tokens(f"r{number}", MODEL, tokens, BLOCK)
            if name is not None:
                asked["session_id"] = name
                request = replace(request, session=Session(name, float(number)))
            if chance.random() < 0.15:
                pin = chance.randrange(1, WORKERS + 1)
                asked["pinned_worker"] = {"worker_id": pin, "dp_rank": 0}
                request = replace(request, pin_decode=Pin(pin, 0))
                pinned += 1
            ours = router.plan(request).final
            kept += ours.session_kept
            assert ours.winner is not None
            tied = {ours.refs[at].worker_id for at in ours.tied or (ours.winner,)}
            selected = oracle.call("select_and_reserve", asked)
            assert selected["worker_id"] in tied, number
            at = [ref.worker_id for ref in ours.refs].index(selected["worker_id"])
            booking = router.booking(replace(ours, winner=at), request)
            selection = selected["selection_id"]
            assert router.apply(replace(booking, request_id=selection), float(number)).ok
            running.append(selection)
            while len(running) > 12:
                done = running.pop(chance.randrange(len(running)))
                oracle.call("free_reservation", done)
                router.apply(Freed(done), float(number))
        finding(f"SelectionService: {steps} of {steps} choices, {kept} kept their session's worker")
        assert kept > steps / 2
        assert pinned > steps / 20
    finally:
        oracle.close()
