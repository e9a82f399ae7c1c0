"""A real vLLM behind a real Dynamo frontend, through `dynctl serve attach`."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dynamo.client import Answer
from tests.dynamo.fleet import DYNAMO_PYTHON, DynamoFleet
from tests.dynamo.processes import Process, ProcessGroup
from tests.vllm.stack import BLOCK, Engine, Stack
from tests.vllm.traffic import words
from tests.waiting import patience, until_now

START_S = 60.0


class Joined:
    """The engine, its sidecar and the frontend."""

    def __init__(self, group: ProcessGroup, fleet: DynamoFleet, engine: Engine, model: str) -> None:
        self.fleet, self.engine = fleet, engine
        self._group, self._model = group, model
        self.sidecar = self.attach()

    def attach(self) -> Process:
        keys = f"{self.engine.url},kv-events={self.engine.events},replay={self.engine.replay}"
        command = [sys.executable, "-m", "dynctl", "serve", "attach", "--engine", keys]
        command += ["--model-path", self._model, "--max-num-seqs", "8"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
        self.sidecar = self._group.start("sidecar", command, clean | self.fleet.reached_by)
        return self.sidecar

    def workers(self, count: int) -> None:
        """Wait until the frontend counts these, and accepts requests if there are any."""
        frontend = self.fleet.frontend

        def counted() -> bool:
            found = sum(frontend.worker_counts().values())
            return found == count and (frontend.accepts() or not count)

        until_now(counted, START_S)

    def ask(self, prompt: Any, tokens: int = 8, **fields: Any) -> Answer:
        nvext = {"extra_fields": ["worker_id", "timing"]}
        answer = self.fleet.frontend.complete(
            prompt, max_tokens=tokens, temperature=0, nvext=nvext, timeout=120, **fields
        )
        assert answer.ok, (answer.status, answer.body, self.sidecar.tail(), self.fleet.logs())
        return answer

    def hit_rate(self, prompt: str) -> float:
        """The part of a prompt that the frontend's index expects to be cached."""
        return float(self.ask(prompt, 1).timing["kv_hit_rate"])


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    if not DYNAMO_PYTHON:
        pytest.exit("DYNCTL_DYNAMO_PYTHON is not set; run `make test-vllm`", returncode=2)
    with Stack() as stack:
        engine = stack.engine("a")
        model = stack.directory / "models" / "llama"
        fleet = DynamoFleet([], model_dir=model, block_size=BLOCK)
        with fleet:
            stack.wait(engine)
            group = ProcessGroup(fleet.directory)
            try:
                made = Joined(group, fleet, engine, str(model))
                made.workers(1)
                yield made
            finally:
                group.close()


def test_a_dynamo_frontend_serves_the_tokens_of_vllm(joined: Joined) -> None:
    prompt = words(random.Random(1), 100)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    own = joined.engine.http.post("/v1/completions", json=body).json()
    answer = joined.ask(prompt, 24)
    assert answer.body["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]
    assert answer.body["choices"][0]["text"] == own["choices"][0]["text"]
    assert answer.body["choices"][0]["finish_reason"] == own["choices"][0]["finish_reason"]
    streamed = joined.ask(prompt, 24, stream=True)
    texts = [chunk["choices"][0]["text"] or "" for chunk in streamed.chunks if chunk["choices"]]
    assert "".join(texts) == own["choices"][0]["text"]


def test_cached_prefixes_are_known_to_the_frontend_and_reused(joined: Joined) -> None:
    prompt = words(random.Random(2), 100)
    assert joined.hit_rate(prompt) < 0.2
    until_now(lambda: joined.hit_rate(prompt) > 0.5)
    details = joined.ask(prompt).body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 4 * BLOCK


def test_a_killed_sidecar_comes_back_with_the_cache_of_the_engine(joined: Joined) -> None:
    prompt = words(random.Random(3), 100)
    joined.ask(prompt)
    until_now(lambda: joined.hit_rate(prompt) > 0.5)
    joined.sidecar.kill(signal.SIGKILL)
    joined.workers(0)
    joined.attach()
    joined.workers(1)
    # From the engine's replay socket, by the recovery endpoint: the engine has the blocks already
    # and does not publish them again. The frontend applies it a moment later.
    until_now(lambda: joined.hit_rate(prompt) > 0.5, 20)


def test_accepted_requests_end_whole_in_a_drain(joined: Joined) -> None:
    running = joined.fleet.frontend.begin(
        words(random.Random(4), 50), max_tokens=200, ignore_eos=True
    )
    running.wait_first()
    joined.sidecar.kill(signal.SIGTERM, wait=False)
    joined.workers(0)
    answer = running.result()
    assert answer.ok
    choices = [chunk["choices"][0] for chunk in answer.chunks if chunk.get("choices")]
    assert "length" in [choice.get("finish_reason") for choice in choices]
    assert joined.sidecar.popen.wait(patience(30)) == 0
