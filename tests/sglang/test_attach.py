"""A real SGLang behind a real Dynamo frontend, through `dynctl serve attach`."""

import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sglang.stack import SglangStack
from tests.vllm.joined import Joined, joined_engine
from tests.vllm.stack import BLOCK
from tests.vllm.traffic import words
from tests.waiting import patience, until_now


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    with SglangStack() as stack, joined_engine(stack) as made:
        yield made


def test_a_dynamo_frontend_serves_the_tokens_of_sglang(joined: Joined) -> None:
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


def test_log_probabilities_are_the_engines(joined: Joined) -> None:
    prompt = words(random.Random(5), 20)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    own = joined.engine.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    found = joined.ask(prompt, 6, logprobs=2).body["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=0.05)


def test_cached_prefixes_are_known_to_the_frontend_and_reused(joined: Joined) -> None:
    prompt = words(random.Random(2), 100)
    assert joined.hit_rate(prompt) < 0.2
    until_now(lambda: joined.hit_rate(prompt) > 0.5)
    details = joined.ask(prompt).body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 4 * BLOCK


def test_tenants_with_salts_share_nothing(joined: Joined) -> None:
    prompt = words(random.Random(6), 100)

    def reused(salt: str) -> tuple[float, int]:
        nvext: dict[str, Any] = {"extra_fields": ["timing"], "cache_salt": salt}
        answer = joined.fleet.frontend.complete(prompt, max_tokens=1, nvext=nvext, timeout=120)
        assert answer.ok, (answer.body, joined.sidecar.tail())
        details = answer.body["usage"]["prompt_tokens_details"] or {}
        return float(answer.timing["kv_hit_rate"]), details.get("cached_tokens") or 0

    assert reused("one") == (0.0, 0)
    until_now(lambda: reused("one")[0] > 0.5)
    assert reused("one")[1] >= 4 * BLOCK
    assert reused("two") == (0.0, 0)


def test_several_choices_are_refused(joined: Joined) -> None:
    """By the sidecar with the reason, which Dynamo's frontend keeps to itself."""
    answer = joined.fleet.frontend.complete("a", max_tokens=1, n=2)
    assert answer.status == 400


def test_a_killed_sidecar_comes_back_with_the_cache_of_the_engine(joined: Joined) -> None:
    prompt = words(random.Random(3), 100)
    joined.ask(prompt)
    until_now(lambda: joined.hit_rate(prompt) > 0.5)
    joined.sidecar.kill(signal.SIGKILL)
    joined.workers(0)
    joined.attach()
    joined.workers(1)
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
