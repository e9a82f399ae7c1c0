"""A real SGLang behind a real Dynamo frontend, through `dynctl serve attach`."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sglang.stack import SglangStack
from tests.vllm import every_engine
from tests.vllm.joined import Joined, joined_engine
from tests.vllm.stack import BLOCK
from tests.vllm.traffic import words
from tests.waiting import until_now


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    with SglangStack() as stack, joined_engine(stack) as made:
        yield made


test_a_dynamo_frontend_serves_the_tokens_of_sglang = (
    every_engine.a_dynamo_frontend_serves_the_tokens_of_the_engine
)


def test_log_probabilities_are_the_engines(joined: Joined) -> None:
    prompt = words(random.Random(5), 20)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    own = joined.engine.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    found = joined.ask(prompt, 6, logprobs=2).body["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=0.05)


test_cached_prefixes_are_known_to_the_frontend_and_reused = (
    every_engine.cached_prefixes_are_known_to_the_frontend_and_reused
)


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


test_a_killed_sidecar_comes_back_with_the_cache_of_the_engine = (
    every_engine.a_killed_sidecar_comes_back_with_the_cache_of_the_engine
)


test_accepted_requests_end_whole_in_a_drain = every_engine.accepted_requests_end_whole_in_a_drain
