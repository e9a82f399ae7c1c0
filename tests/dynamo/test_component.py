"""`serve router --endpoint` beside `python -m dynamo.router`, on the same real workers.

A client of Dynamo's runtime sends both the same requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from dynctl.adapters.dynamo.request_plane import TcpRequestPlane
from dynctl.wire.dynamo.discovery import parse_entry
from router_core import local_block_hashes
from tests.dynamo.fleet import DYNAMO_PYTHON, DynamoFleet, aggregated
from tests.dynamo.processes import ProcessGroup
from tests.waiting import patience, until_now

BLOCK = 16
ROUTER = "dynamo.router"
INDEXER = "kv_indexer_query"


class Client:
    """Dynamo's client in a process of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        script = Path(__file__).with_name("router_client.py")
        self._process = subprocess.Popen(
            [DYNAMO_PYTHON, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, endpoint: str, instance: int, request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([endpoint, instance, request]) + "\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Routers:
    """Both routers in front of the workers of a fleet."""

    def __init__(self, fleet: DynamoFleet) -> None:
        self.fleet = fleet
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
        self.environment = clean | fleet.environment
        self.group = ProcessGroup(fleet.directory)
        self.client = Client(self.environment)
        self.theirs = self.ours = 0

    def instances(self, component: str = "router", endpoint: str = "generate") -> set[int]:
        """The instances of an endpoint in file discovery."""
        start = f"dynamo/{component}/{endpoint}/"
        below = self.fleet.file_kv / "v1" / "instances"
        names = [unquote(path.name) for path in below.glob("*")]
        return {int(name.removeprefix(start), 16) for name in names if name.startswith(start)}

    def start_theirs(self, *options: str) -> None:
        before = self.instances()
        python = [DYNAMO_PYTHON, "-m", "dynamo.router", "--endpoint", "dynamo.backend.generate"]
        command = [*python, "--router-block-size", str(BLOCK), *options]
        self.group.start("dynamo-router", command, self.environment)
        self.theirs = self._new(before)

    def start_ours(self, *options: str) -> Any:
        before = self.instances()
        dynctl = [sys.executable, "-m", "dynctl", "serve", "router", "--http-port", "0"]
        planes = ["--discovery", "file", "--file-kv", str(self.fleet.file_kv)]
        command = [*dynctl, *planes, "--endpoint", "dynamo.backend.generate", *options]
        process = self.group.start("ours", command, self.environment)
        self.ours = self._new(before)
        return process

    def _new(self, before: set[int]) -> int:
        try:
            until_now(lambda: self.instances() - before, 30)
        except TimeoutError:
            raise AssertionError("\n".join(one.tail() for one in self.group.children)) from None
        (found,) = self.instances() - before
        return found

    def close(self) -> None:
        self.client.close()
        self.group.close()


@pytest.fixture(scope="module")
def routers() -> Iterator[Routers]:
    with DynamoFleet(aggregated(3), speedup=0, blocks=4096) as fleet:
        made = Routers(fleet)
        try:
            made.start_theirs()
            made.start_ours("--serve-indexer")
            yield made
        finally:
            made.close()


def asked(tokens: list[int], **more: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "token_ids": tokens,
        "stop_conditions": {"max_tokens": 2, "ignore_eos": True},
        "sampling_options": {},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
    }
    return body | more


def overlaps(answer: dict[str, Any]) -> dict[int, int]:
    (item,) = answer["items"]
    return {row["worker_id"]: row["device_blocks"] for row in item["workers"]}


def keys(value: Any) -> Any:
    """The shape of a value: its keys, without numbers."""
    if isinstance(value, dict):
        return {name: keys(one) for name, one in value.items()}
    return type(value).__name__ if not isinstance(value, list) else "list"


def test_overlaps_and_choices_are_those_of_dynamo(
    routers: Routers, finding: Callable[[str], None]
) -> None:
    """Prompts that share beginnings, sent through both in turn."""
    chance, client = random.Random(31), routers.client
    roots = [[chance.randrange(3, 300) for _ in range(BLOCK * n)] for n in (3, 5, 8)]
    steps = certain = cached = 0
    for step in range(40):
        root = chance.choice(roots)
        tokens = root + [chance.randrange(3, 300) for _ in range(chance.randrange(1, 30))]

        def agree(tokens: list[int] = tokens) -> bool:
            question = {"token_ids": tokens}
            answers = [
                client.ask(f"{ROUTER}.get_overlap_scores", one, question)
                for one in (routers.theirs, routers.ours)
            ]
            # A router is in discovery before it has workers; until then it answers with an error.
            if not all("items" in one for one in answers):
                return False
            theirs, ours = map(overlaps, answers)
            return theirs == ours and len(ours) == 3

        until_now(agree)
        held = overlaps(
            client.ask(f"{ROUTER}.get_overlap_scores", routers.ours, {"token_ids": tokens})
        )
        best = max(held.values())
        if list(held.values()).count(best) == 1 and best >= 3:
            for one in (routers.theirs, routers.ours):
                (chosen,) = client.ask(f"{ROUTER}.best_worker_id", one, tokens)["items"]
                assert held[chosen] == best, (step, held, chosen)
            certain += 1
        cached += best > 0
        through = routers.theirs if step % 2 else routers.ours
        items = client.ask(f"{ROUTER}.generate", through, asked(tokens))["items"]
        assert items[-1]["finish_reason"] == "length", items
        assert sum(len(item["token_ids"]) for item in items) == 2
        # Its blocks are known to both before anything is chosen by them.
        for one in (routers.theirs, routers.ours):
            until_now(lambda one=one: counted(routers, one, tokens)[-1:] == [len(tokens) // BLOCK])  # type: ignore[misc]  # noqa: B023
        steps += 1
    finding(f"router component: {steps} requests, {certain} choices without a tie, both alike")
    assert cached > steps / 2
    assert certain > 5


def test_answers_have_the_shape_of_dynamo(routers: Routers) -> None:
    client, tokens = routers.client, list(range(10, 60))
    ours: list[Any] = []
    for body in (asked(tokens), asked(tokens, annotations=["query_instance_id:"])):
        theirs, ours = (
            client.ask(f"{ROUTER}.generate", one, body)["items"]
            for one in (routers.theirs, routers.ours)
        )
        assert [keys(item.get("routing_data")) for item in ours] == [
            keys(item.get("routing_data")) for item in theirs
        ]
        assert [keys(item) for item in ours] == [keys(item) for item in theirs]
    # A dry run has the prompt's tokens and books nothing.
    (dry,) = ours
    assert dry["routing_data"]["token_ids"] == tokens
    for question in ({"token_ids": tokens}, {"token_ids": tokens, "cache_namespace": "tenant"}):
        theirs, ours = (
            client.ask(f"{ROUTER}.get_overlap_scores", one, question)["items"]
            for one in (routers.theirs, routers.ours)
        )
        assert keys(ours[0]) == keys(theirs[0])
        assert ours[0]["num_blocks"] == theirs[0]["num_blocks"] == 3


def test_what_cannot_be_routed_is_an_error_on_both(routers: Routers) -> None:
    client = routers.client
    nowhere = {"routing_constraints": {"required_taints": ["no=where"]}}
    for endpoint, body in (
        ("generate", asked([1, 2, 3], routing=nowhere)),
        ("best_worker_id", {"token_ids": [1]}),
        ("get_overlap_scores", {}),
        ("generate", {"model": "tiny"}),
    ):
        theirs, ours = (
            client.ask(f"{ROUTER}.{endpoint}", one, body) for one in (routers.theirs, routers.ours)
        )
        assert "error" in theirs, (endpoint, theirs)
        assert "error" in ours, (endpoint, ours)
        # Dynamo's client reads the error, and not another one about its form.
        assert "did not match" not in ours["error"], (endpoint, ours)


def test_routers_and_frontends_serve_their_index(routers: Routers) -> None:
    tokens = list(range(100, 100 + BLOCK * 4))
    routers.client.ask(f"{ROUTER}.generate", routers.ours, asked(tokens))
    hashes = list(local_block_hashes(tokens, BLOCK))
    (of_the_router,) = routers.instances("backend", INDEXER)
    frontend = [sys.executable, "-m", "dynctl", "serve", "frontend", "--http-port", "0"]
    process = routers.group.start("frontend", [*frontend, "--serve-indexer"], routers.environment)
    until_now(lambda: len(routers.instances("backend", INDEXER)) == 2, 30)
    for instance in routers.instances("backend", INDEXER):

        def scores(instance: int = instance) -> list[Any]:
            question = {"model_name": "tiny", "block_hashes": hashes}
            item = index_answer(routers, instance, question)
            # An index is in discovery before it has the model; until then it answers with an error.
            return list(item["TieredScores"]["device"]["scores"]) if "TieredScores" in item else []

        until_now(lambda scores=scores: [blocks for _, blocks in scores()] == [4])  # type: ignore[misc]
        item = index_answer(routers, instance, {"model_name": "no", "block_hashes": []})
        assert item == {"Error": "served indexer model no is not registered"}
    process.kill(signal.SIGTERM)
    assert routers.instances("backend", INDEXER) == {of_the_router}


def index_answer(routers: Routers, instance: int, question: dict[str, Any]) -> Any:
    """The answer of a served index; its items have no envelope for Dynamo's Python client."""
    key = f"v1/instances/dynamo/backend/{INDEXER}/{instance:x}"
    path = routers.fleet.file_kv / "v1" / "instances" / quoted(key.removeprefix("v1/instances/"))
    entry = parse_entry(key, path.read_bytes())

    async def ask() -> Any:
        plane = TcpRequestPlane()
        try:
            async for item in plane.ask(entry, question, timeout=patience(10), max_bytes=1 << 20):  # type: ignore[arg-type]
                return item
        finally:
            await plane.close()

    return asyncio.run(ask())


def quoted(key: str) -> str:
    """The name of a key's file."""
    return "".join(one if one.isalnum() else f"%{ord(one):02X}" for one in key)


def counted(routers: Routers, instance: int, tokens: list[int]) -> list[int]:
    """Cached blocks of the workers, in the view of one router."""
    found = routers.client.ask(f"{ROUTER}.get_overlap_scores", instance, {"token_ids": tokens})
    return sorted(overlaps(found).values()) if "items" in found else []


def test_dynamo_uses_the_index_that_ours_serves(routers: Routers) -> None:
    routers.start_theirs("--use-remote-indexer")
    tokens = [*range(200, 200 + BLOCK * 5), 7]
    routers.client.ask(f"{ROUTER}.generate", routers.ours, asked(tokens))
    until_now(lambda: counted(routers, routers.ours, tokens) == [0, 0, 5])
    best = routers.client.ask(f"{ROUTER}.best_worker_id", routers.ours, tokens)["items"]
    # A choice reads the served index; so do its overlaps, which no draw between workers hides.
    until_now(lambda: counted(routers, routers.theirs, tokens) == [0, 0, 5])
    theirs = routers.client.ask(f"{ROUTER}.best_worker_id", routers.theirs, tokens)["items"]
    assert theirs == best
    answer = routers.client.ask(f"{ROUTER}.generate", routers.theirs, asked(tokens))["items"]
    assert answer[-1]["routing_data"]["timing"]["kv_hit_rate"] > 0.8


def test_ours_uses_the_index_that_dynamo_serves(routers: Routers) -> None:
    """SIGTERM removes what ours registered at once; a new one asks Dynamo's index."""
    (process,) = [one for one in routers.group.children if one.name == "ours"]
    process.kill(signal.SIGTERM)
    until_now(lambda: routers.ours not in routers.instances(), 10)
    assert process.popen.returncode == 0
    assert not routers.instances("backend", INDEXER)
    routers.start_theirs("--serve-indexer")
    until_now(lambda: routers.instances("backend", INDEXER), 20)
    routers.start_ours("--use-remote-indexer")
    tokens = [*range(20, 20 + BLOCK * 6), 7]
    routers.client.ask(f"{ROUTER}.generate", routers.ours, asked(tokens))
    until_now(lambda: counted(routers, routers.theirs, tokens) == [0, 0, 6])
    until_now(lambda: counted(routers, routers.ours, tokens) == [0, 0, 6])

    def hit_rate() -> float:
        items = routers.client.ask(f"{ROUTER}.generate", routers.ours, asked(tokens))["items"]
        assert items[-1]["finish_reason"] == "length"
        return float(items[-1]["routing_data"]["timing"]["kv_hit_rate"])

    # A decision waits for half a second for the other index; without an answer it is made without.
    until_now(lambda: hit_rate() > 0.8)


def test_a_killed_worker_costs_no_request() -> None:
    """Its entries stay until their lease ends; requests go to the others meanwhile."""
    with DynamoFleet(aggregated(3), speedup=0) as fleet:
        made = Routers(fleet)
        try:
            made.start_ours()
            killed = fleet.workers["worker-0"].instance_id

            def answer(number: int, **more: Any) -> dict[str, Any]:
                prompt = list(range(number, number + 40))
                return made.client.ask(f"{ROUTER}.generate", made.ours, asked(prompt, **more))

            assert all("items" in answer(number) for number in range(10, 16))
            fleet.kill("worker-0")
            for number in range(100, 130):
                found = answer(number)
                assert "items" in found, found
                assert found["items"][0]["routing_data"]["worker_id"] != killed
            # The client can read why: no other worker may have this one.
            pinned = answer(200, routing={"backend_instance_id": killed})
            assert "did not match" not in pinned["error"]
            assert "Unavailable" in pinned["error"] or "CannotConnect" in pinned["error"]
        finally:
            made.close()
