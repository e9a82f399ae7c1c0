"""`serve indexer` and Dynamo's indexer: the same engines, the same answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from dynctl.wire.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    encode_message,
)
from router_core import local_block_hashes, to_signed
from tests.dynamo.processes import ProcessGroup
from tests.dynamo.services import Services, send
from tests.ports import free_port
from tests.waiting import until_now

BLOCK, MODEL = 4, "tiny"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Services]:
    directory = tmp_path / "indexers"
    directory.mkdir()
    with Services(["dynamo.indexer"], ["serve", "indexer", "--port", "{port}"], directory) as made:
        yield made


class Engine:
    """A publisher of KV events."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._sent = 0

    def publish(self, *events: Event, rank: int = 0) -> None:
        batch = EventBatch(float(self._sent), events, rank)
        self._socket.send_multipart(encode_message(b"", self._sent, batch))
        self._sent += 1


def registered(number: int, endpoint: str, **more: Any) -> dict[str, Any]:
    fields = {"instance_id": number, "endpoint": endpoint, "model_name": MODEL, "block_size": BLOCK}
    return fields | more


REFUSED: tuple[tuple[str, bytes], ...] = (
    ("/register", b"{}"),
    ("/register", b""),
    ("/register", b"[]"),
    ("/register", b'{"instance_id": -1}'),
    ("/register", b'{"instance_id": "1"}'),
    ("/register", b'{"instance_id": 1.5}'),
    ("/register", b'{"instance_id": {"a":1}}'),
    ("/register", b'{"instance_id": 18446744073709551616}'),
    ("/register", b'{"instance_id":1,"endpoint":"x","model_name":"m","block_size":4}'),
    ("/register", b'{"instance_id":1,"endpoint":"tcp://h","model_name":"m","block_size":4}'),
    ("/register", b'{"instance_id":1,"endpoint":"tcp://h:99999","model_name":"m","block_size":4}'),
    ("/register", b'{"instance_id":1,"endpoint":"http://h:1","model_name":"m","block_size":4}'),
    ("/register", b'{"instance_id":1,"endpoint":"tcp://h:1","model_name":"m",\n "block_size":-4}'),
    ("/unregister", b'{"instance_id": 77}'),
    ("/unregister", b'{"instance_id": 77, "model_name": "m"}'),
    ("/query", b'{"token_ids": "x"}'),
    ("/query", b'{"token_ids": [1, -1], "model_name": "m"}'),
    ("/query", b'{"token_ids": [4294967296], "model_name": "m"}'),
    ("/query", b'{"token_ids": [[1]]}'),
    ("/query", b'{"token_ids": [1], "model_name": "none"}'),
    ("/query", b'{"token_ids": [1],}'),
    ("/query", b"{x}"),
    ("/query_by_hash", b'{"block_hashes": [9223372036854775808], "model_name": "m"}'),
    ("/query_by_hash", b'{"block_hashes": [1], "model_name": "m", "cache_salt": "s"}'),
    ("/deregister_peer", b'{"url": "http://nowhere"}'),
)


def test_what_is_refused_has_the_status_and_the_text_of_dynamo(pair: Services) -> None:
    for path, raw in REFUSED:
        assert pair.same("POST", path, raw=raw).status >= 400
    for method, path in (("GET", "/query"), ("GET", "/nothing"), ("DELETE", "/workers")):
        pair.same(method, path)


def test_engines_are_registered_and_unregistered_as_at_dynamo(pair: Services) -> None:
    one, two = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))

    def rows(path: str) -> list[list[Any]]:
        replies = pair.both("GET", path)
        return [sorted(reply.body, key=lambda row: row["instance_id"]) for reply in replies]

    def workers(path: str = "/workers") -> list[Any]:
        # Dynamo's listener is pending until its task had a turn.
        until_now(lambda: all(row["status"] != "pending" for row in rows(path)[0]))
        theirs, ours = rows(path)
        assert theirs == ours
        return ours

    assert pair.same("POST", "/register", registered(30, one)).status == 201
    for body in (
        registered(30, one),
        registered(30, one, model_name="other"),
        registered(31, one, block_size=8),
        registered(30, two, dp_rank=2),
        registered(32, two, routing_group="g", replay_endpoint=one),
    ):
        pair.same("POST", "/register", body)
    assert [row["instance_id"] for row in workers()] == [30, 32]
    assert [row["instance_id"] for row in workers("/workers?routing_group=g")] == [32]
    for body in (
        {"instance_id": 30, "model_name": MODEL, "routing_group": "g"},
        {"instance_id": 30, "model_name": "other"},
        {"instance_id": 30, "model_name": MODEL, "routing_group": "default", "dp_rank": 7},
        {"instance_id": 30, "model_name": MODEL, "routing_group": "default", "dp_rank": 2},
        {"instance_id": 30, "model_name": MODEL},
        {"instance_id": 30, "model_name": MODEL},
        {"instance_id": 32, "model_name": MODEL},
    ):
        pair.same("POST", "/unregister", body)
    assert not workers()
    pair.same("POST", "/query", {"token_ids": [1], "model_name": MODEL})
    pair.same("POST", "/register_peer", {"url": "http://127.0.0.1:1"})
    assert pair.same("GET", "/peers").body == ["http://127.0.0.1:1"]
    pair.same("POST", "/deregister_peer", {"url": "http://127.0.0.1:1"})


def test_random_events_of_all_tiers_and_ranks_give_the_answers_of_dynamo(
    pair: Services, finding: Callable[[str], None]
) -> None:
    chance = random.Random(11)
    prompts = [tuple(chance.randrange(3, 300) for _ in range(BLOCK * 12)) for _ in range(3)]
    names = [tuple(range(100 * n + 1, 100 * n + 13)) for n in range(1, 4)]
    context: zmq.Context[Any] = zmq.Context()
    try:
        engines = {(1, 0): Engine(context), (1, 3): Engine(context), (2, 0): Engine(context)}
        for (number, rank), engine in engines.items():
            body = registered(number, engine.endpoint, dp_rank=rank)
            assert pair.same("POST", "/register", body).status == 201

        def answers(which: int) -> tuple[Any, Any]:
            theirs, ours = pair.both(
                "POST", "/query", {"token_ids": prompts[which], "model_name": MODEL}
            )
            return theirs.body, ours.body

        def agree() -> bool:
            return all(theirs == ours for theirs, ours in map(answers, range(len(prompts))))

        # A subscription reaches its publisher late: the first block is sent until both count it.
        for (number, rank), engine in engines.items():
            first = BlockStored(names[0][:1], None, prompts[0][:BLOCK], BLOCK, medium="GPU")

            def heard(
                ref: tuple[str, str] = (str(number), str(rank)),
                engine: Engine = engine,
                first: BlockStored = first,
            ) -> bool:
                engine.publish(first, rank=int(ref[1]))
                found = answers(0)
                return all(one["scores"].get(ref[0], {}).get(ref[1]) == BLOCK for one in found)

            try:
                until_now(heard, 3)
            except TimeoutError:
                raise AssertionError((number, rank, answers(0))) from None
        turns = held = tiered = 0
        for _ in range(40):
            for _ in range(3):
                ref = chance.choice(list(engines))
                which, medium = chance.randrange(3), chance.choice(["GPU", "GPU", "CPU", "DISK"])
                begin = chance.randrange(12)
                end = min(12, begin + chance.randrange(1, 7))
                event: Event
                if chance.random() < 0.05:
                    event = AllBlocksCleared()
                elif chance.random() < 0.3:
                    event = BlockRemoved(names[which][begin:end][::-1], medium=medium)
                else:
                    parent = names[which][begin - 1] if begin else None
                    tokens = prompts[which][BLOCK * begin : BLOCK * end]
                    event = BlockStored(
                        names[which][begin:end], parent, tokens, BLOCK, medium=medium
                    )
                # A batch may name a rank that was not registered under its address.
                engines[ref].publish(event, rank=chance.choice([ref[1], ref[1], 5]))
            try:
                until_now(agree, 5)
            except TimeoutError:
                assert [answers(n)[1] for n in range(3)] == [answers(n)[0] for n in range(3)]
            turns += 1
            rows = [row for n in range(3) for row in answers(n)[0]["instances"].values()]
            held += any(row["gpu"] for row in rows)
            tiered += any(row["disk"] > row["gpu"] for row in rows)
        hashes = [to_signed(one) for one in local_block_hashes(prompts[0], BLOCK)]
        pair.same("POST", "/query_by_hash", {"block_hashes": hashes, "model_name": MODEL})
        finding(f"indexer: {turns} of {turns} turns with equal answers, {tiered} with lower tiers")
        assert held > 20
        assert tiered > 10
        for number in (1, 2):
            pair.same("POST", "/unregister", {"instance_id": number, "model_name": MODEL})
    finally:
        context.destroy(0)


def test_each_begins_with_the_index_of_the_other(pair: Services, tmp_path: Path) -> None:
    """Ours reads Dynamo's dump, and Dynamo's indexer reads ours."""
    context: zmq.Context[Any] = zmq.Context()
    group = ProcessGroup(tmp_path)
    tokens = tuple(range(10, 10 + BLOCK * 5))
    asked = {"token_ids": tokens, "model_name": MODEL}
    try:
        engine = Engine(context)
        assert pair.same("POST", "/register", registered(9, engine.endpoint)).status == 201

        def heard() -> bool:
            engine.publish(BlockStored((1, 2, 3, 4, 5), None, tokens, BLOCK))
            return all(
                reply.body["scores"].get("9") == {"0": len(tokens)}
                for reply in pair.both("POST", "/query", asked)
            )

        until_now(heard)
        new = Services(
            ["dynamo.indexer", "--block-size", str(BLOCK), "--model-name", MODEL,
             "--workers", f"9={engine.endpoint}", "--peers", f"http://127.0.0.1:{pair.ours}"],
            ["serve", "indexer", "--port", "{port}", "--block-size", str(BLOCK),
             "--model-name", MODEL, "--workers", f"9={engine.endpoint}",
             "--peers", f"http://127.0.0.1:{pair.theirs}"],
            tmp_path,
        )  # fmt: skip
        with new as both:

            def complete() -> bool:
                replies = both.both("POST", "/query", asked)
                return all(
                    reply.status == 200 and reply.body["scores"] == {"9": {"0": len(tokens)}}
                    for reply in replies
                )

            try:
                until_now(complete)
            except TimeoutError:
                raise AssertionError(both.both("POST", "/query", asked)) from None
        pair.same("POST", "/unregister", {"instance_id": 9, "model_name": MODEL})
    finally:
        group.close()
        context.destroy(0)


def test_metrics_have_the_names_of_dynamo(pair: Services) -> None:
    theirs, ours = pair.both("GET", "/metrics")

    def families(text: str) -> set[str]:
        return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}

    of_the_indexer = {name for name in families(theirs.body) if "kvindexer" in name}
    assert of_the_indexer <= families(ours.body)


def test_dumps_are_read_alike(pair: Services) -> None:
    assert json.dumps(send(pair.ours, "GET", "/dump").body) == "{}"
