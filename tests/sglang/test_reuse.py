"""Engines of SGLang with one model: what the frontend predicts is what the engines reuse.

The scenarios share the engines, in this order; each uses prompts of its own. Engine ``a`` has two
data-parallel ranks, each with a cache of its own, so that the frontend chooses among three.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.sglang.stack import SglangStack
from tests.vllm import every_engine
from tests.vllm.conftest import Judge
from tests.vllm.models import write_weights
from tests.vllm.rates import Outcome, ask_all, asked_as, computed_meanwhile, on, pinned
from tests.vllm.stack import Engine, Frontend
from tests.vllm.traffic import mixed, other_forms, words
from tests.waiting import until_now

ADAPTER = "adapter"


@pytest.fixture(scope="module")
def stack() -> Iterator[SglangStack]:
    with SglangStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines(stack: SglangStack) -> dict[str, Engine]:
    models = stack.directory / "models"
    write_weights(models / "llama")  # weights that SGLang makes up have no adapters
    lora = "--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "2"
    b = stack.engine("b", *lora, "--lora-paths", f"{ADAPTER}={models}/adapter")
    made = {"a": stack.engine("a", ranks=2), "b": b}
    stack.wait(*made.values())
    return made


@pytest.fixture(scope="module")
def frontend(stack: SglangStack, engines: dict[str, Engine]) -> Frontend:
    """Nothing is typed but addresses: block size, blocks and ranks are the engines' own."""
    return stack.frontend(*(engine.spec() for engine in engines.values()))


def test_sequential_requests(frontend: Frontend, judged: Judge) -> None:
    outcomes = ask_all(frontend, mixed(150))
    judged("150 chats and completions, one after another", outcomes)
    judged("  of them on the engine with two ranks", on(outcomes, "a"))
    judged("  of them on the engine with one", on(outcomes, "b"))


def test_concurrent_requests(frontend: Frontend, engines: dict[str, Engine], judged: Judge) -> None:
    outcomes = ask_all(frontend, mixed(150, seed=2), at_once=8)
    judged(
        "150 chats and completions, 8 at once",
        outcomes,
        computed_meanwhile(outcomes, engines["b"]),
        least=0.5,
    )
    assert {outcome.rank for outcome in on(outcomes, "a")} == {0, 1}


test_cache_salts = every_engine.cache_salts


def test_small_requests_prove_the_fleet(frontend: Frontend, engines: dict[str, Engine]) -> None:
    """SGLang answers the plain name of an adapter, which it lists, with the base model."""
    every_engine.small_requests_prove_the_fleet(frontend, engines, {"DYE0603"})


test_a_faulty_frontend_is_named = every_engine.a_faulty_frontend_is_named


test_a_router_that_takes_turns_is_named = every_engine.a_router_that_takes_turns_is_named


def test_isolated_keys_share_nothing(stack: SglangStack, engines: dict[str, Engine]) -> None:
    """The second key reads of a prompt that the first one sent what it reads of a new one."""
    first, second = "sk-first-0123456789", "sk-second-0123456789"
    keys = ["--api-key", first, "--api-key", second]
    isolated = stack.frontend(engines["b"].spec(), arguments=[*keys, "--isolate-keys"])
    shared = stack.frontend(engines["b"].spec(), arguments=keys)
    chance = random.Random(8)

    def answer(frontend: Frontend, key: str, path: str, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return frontend.http.post(path, json={"model": "tiny", **fields}, headers=headers)

    def reused(frontend: Frontend, key: str, path: str, text: str) -> int:
        fields: dict[str, Any] = {"input": text}
        if path == "/v1/chat/completions":
            fields = {"messages": [{"role": "user", "content": text}]}
        elif path == "/v1/completions":
            fields = {"prompt": text}
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        got = answer(frontend, key, path, **fields, **{most: 16})
        assert got.status_code == 200, got.text
        usage = got.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        text = words(chance, 200)
        # A template gives all chats the same first tokens, which each key caches once.
        few = 32
        assert reused(isolated, first, path, text) <= few, path
        assert reused(isolated, second, path, text) <= few, path
        assert reused(isolated, first, path, text) > few, path
        assert reused(isolated, second, path, text) > few, path
        assert reused(shared, first, path, text) <= few, path
        assert reused(shared, second, path, text) > few, path
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert answer(isolated, first, "/v1/messages", **message).status_code == 501
    assert answer(shared, first, "/v1/messages", **message).status_code == 200
    stack.stop(isolated)
    stack.stop(shared)


def test_adapters(frontend: Frontend, engines: dict[str, Engine], judged: Judge) -> None:
    """Prompts of base model and adapter share nothing, and the adapter answers."""
    bodies = [{**body, "model": name} for body in mixed(40, seed=3) for name in ("tiny", ADAPTER)]
    judged("a LoRA adapter and its base model, the same prompts", ask_all(frontend, bodies))
    prompt = words(random.Random(5), 60)
    body = {"model": ADAPTER, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    own = engines["b"].http.post("/v1/completions", json={**body, "lora_path": ADAPTER}).json()
    base = engines["b"].http.post("/v1/completions", json={**body, "model": "tiny"}).json()
    answer = frontend.send(body).json()
    assert answer["model"] == ADAPTER
    assert answer["choices"][0]["text"] == own["choices"][0]["text"]
    assert answer["choices"][0]["text"] != base["choices"][0]["text"]
    message = {"model": ADAPTER, "max_tokens": 8, "messages": [{"role": "user", "content": prompt}]}
    twice = [asked_as(frontend, "/v1/messages", message) for _ in range(2)]
    judged("an adapter in /v1/messages", twice)
    refused = frontend.http.post("/v1/responses", json={"model": ADAPTER, "input": prompt})
    assert refused.status_code == 501, refused.text


test_tool_calls_without_content = every_engine.tool_calls_without_content


test_engines_tokenize_without_a_model_path = every_engine.engines_tokenize_without_a_model_path


test_a_body_without_a_model = every_engine.a_body_without_a_model


def test_other_apis_render_the_same_prompts(frontend: Frontend, judged: Judge) -> None:
    outcomes = [
        asked_as(frontend, path, body) for number in range(8) for path, body in other_forms(number)
    ]
    judged("24 requests of /v1/chat/completions, /v1/messages and /v1/responses", outcomes)


test_a_frontend_that_joins_late = every_engine.a_frontend_that_joins_late


def test_reset_of_the_prefix_cache(
    frontend: Frontend, engines: dict[str, Engine], judged: Judge
) -> None:

    def flushed(engine: Engine) -> bool:
        return engine.http.post("/flush_cache").status_code == 200

    for engine in engines.values():
        # SGLang answers 400 while a request runs: it may still end one that has been answered.
        until_now(partial(flushed, engine), 30)
    outcomes = ask_all(frontend, mixed(40))
    first = {(one.worker, one.rank): one for one in reversed(outcomes)}.values()

    def explain(outcome: Outcome) -> str | None:
        if outcome in first and outcome.reported == 0:
            return "first request after the reset"
        return None

    judged("after flush_cache", outcomes, explain, least=0.9)


def test_an_engine_is_killed_and_restarted(
    stack: SglangStack, frontend: Frontend, engines: dict[str, Engine], judged: Judge
) -> None:
    """The new process has the old one's addresses, an empty cache and few blocks, so it evicts."""
    old = engines["b"]
    old.process.kill()
    until_now(lambda: not frontend.ready(), 30)
    judged("one of two engines is dead", ask_all(frontend, mixed(20)))
    new = stack.engine("b", port=old.port, blocks=96, again=old)
    stack.wait(new)
    until_now(frontend.ready, 60)
    until_now(lambda: frontend.cached_blocks()[("b", 0)] == 0, 30)
    judged("after kill -9 and restart", ask_all(frontend, pinned(frontend, "b", 40)))


def test_evictions(frontend: Frontend, judged: Judge) -> None:
    outcomes = ask_all(frontend, pinned(frontend, "b", 100, seed=8))
    assert frontend.index_events("removed") > 0
    judged("an engine that evicts", outcomes)
