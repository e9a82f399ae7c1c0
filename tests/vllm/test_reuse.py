"""Two engines with one model: what the frontend predicts is what the engines reuse.

The scenarios share the engines, in this order; each uses prompts of its own.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm import every_engine
from tests.vllm.conftest import Judge
from tests.vllm.rates import Outcome, ask, ask_all, asked_as, computed_meanwhile, on, pinned
from tests.vllm.stack import BLOCK, Engine, Frontend, Stack
from tests.vllm.traffic import mixed, other_forms, words
from tests.waiting import until_now

ADAPTER = "adapter"
HASH = "--prefix-caching-hash-algo"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
USAGE = {
    "/v1/chat/completions": ("prompt_tokens_details", "cached_tokens"),
    "/v1/completions": ("prompt_tokens_details", "cached_tokens"),
    "/v1/messages": ("cache_read_input_tokens",),
    "/v1/responses": ("input_tokens_details", "cached_tokens"),
}
"""Where an answer of each API has its reused tokens."""
AS_BYTES = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines(stack: Stack) -> dict[str, Engine]:
    """``a`` hashes with sha256 and serves an adapter too; ``b`` hashes with sha256_cbor and
    publishes its hashes as bytes."""
    adapter = f"{ADAPTER}={stack.directory}/models/adapter"
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter)
    a = stack.engine("a", HASH, "sha256", *TOOLS, *lora)
    b = stack.engine("b", HASH, "sha256_cbor", *TOOLS, environment=AS_BYTES)
    stack.wait(a, b)
    return {"a": a, "b": b}


@pytest.fixture(scope="module")
def frontend(stack: Stack, engines: dict[str, Engine]) -> Frontend:
    """Nothing is typed but addresses: block size, blocks and adapters are the engines' own."""
    return stack.frontend(*(engine.spec() for engine in engines.values()))


def test_sequential_requests(frontend: Frontend, judged: Judge) -> None:
    outcomes = ask_all(frontend, mixed(200))
    judged("200 chats and completions, one after another", outcomes)
    judged("  of them on the engine with sha256", on(outcomes, "a"))
    judged(
        "  of them on the engine with sha256_cbor, hashes as bytes",
        on(outcomes, "b"),
    )

    def audited() -> dict[str, Any]:
        return {row["worker"]: row for row in frontend.fleet()["audit"]}

    # A request is counted a moment after its answer.
    until_now(lambda: sum(row["requests"] for row in audited().values()) == len(outcomes))
    rows = audited()
    for name in ("a", "b"):
        mine, row = on(outcomes, name), rows[name]
        assert row["requests"] == len(mine)
        assert row["hits"] >= 0.99 * len(mine), row
        assert row["predicted_tokens"] == sum(one.predicted for one in mine)
        assert row["reported_tokens"] == sum(one.reported for one in mine)


def test_concurrent_requests(frontend: Frontend, engines: dict[str, Engine], judged: Judge) -> None:
    outcomes = ask_all(frontend, mixed(200, seed=2), at_once=8)
    judged(
        "200 chats and completions, 8 at once",
        outcomes,
        computed_meanwhile(outcomes, engines["a"]),
        least=0.5,
    )


def test_an_adapter_beside_its_base_model(frontend: Frontend, judged: Judge) -> None:
    """The same prompts for both: their blocks have equal tokens and are not shared."""
    chance = random.Random(3)
    bodies = [
        {**body, "model": model}
        for body in mixed(40, seed=3)
        for model in chance.sample(["tiny", ADAPTER], 2)
    ]
    outcomes = ask_all(frontend, bodies)
    judged("base model and LoRA adapter, the same prompts", outcomes)
    assert {outcome.worker for outcome in outcomes if outcome.body["model"] == ADAPTER} == {"a"}


test_cache_salts = every_engine.cache_salts


test_small_requests_prove_the_fleet = every_engine.small_requests_prove_the_fleet


test_a_faulty_frontend_is_named = every_engine.a_faulty_frontend_is_named


def test_a_router_that_takes_turns_is_named(engines: dict[str, Engine]) -> None:
    """Engine ``b`` does not serve the adapter of ``a``."""
    every_engine.a_router_that_takes_turns_is_named(engines, {"DYE0103", "DYE0402"})


def test_events_of_another_engine_are_named(stack: Stack, engines: dict[str, Engine]) -> None:
    a, b = engines["a"], engines["b"]
    of_a = {"kv_events": a.events, "replay": a.replay}
    of_b = {"kv_events": b.events, "replay": b.replay}
    crossed = stack.frontend(a.spec(**of_b), b.spec(**of_a))
    report = asyncio.run(every_engine.tested(str(crossed.http.base_url), "index"))
    stack.stop(crossed)
    assert every_engine.wrong(report).keys() == {"DYE0501"}, every_engine.wrong(report)


test_tool_calls_without_content = every_engine.tool_calls_without_content


test_engines_tokenize_without_a_model_path = every_engine.engines_tokenize_without_a_model_path


test_a_body_without_a_model = every_engine.a_body_without_a_model


def test_batches_of_prompts(frontend: Frontend, engines: dict[str, Engine], judged: Judge) -> None:
    """All prompts of a batch count. The engine's answer reports the reuse of the last one only, so
    its metrics are compared."""
    chance = random.Random(7)
    texts = [words(chance, 60) for _ in range(3)]
    bodies: list[dict[str, Any]] = [{"model": "tiny", "prompt": text} for text in texts]
    for _ in range(15):
        batch = [f"{text} {words(chance, 5)}" for text in chance.sample(texts, 2)]
        bodies.append({"model": "tiny", "prompt": batch})

    def reused() -> int:
        return sum(engine.hit_tokens() for engine in engines.values())

    outcomes = [ask(frontend, body, reused=reused) for body in bodies]
    judged("batches of prompts", outcomes)


test_a_frontend_that_joins_late = every_engine.a_frontend_that_joins_late


def test_reset_of_the_prefix_cache(
    frontend: Frontend, engines: dict[str, Engine], judged: Judge
) -> None:
    """The engine reports a reset with its next step, so the next request of an engine is predicted
    from what was cached before."""
    for engine in engines.values():
        assert engine.http.post("/reset_prefix_cache").status_code == 200
    outcomes = ask_all(frontend, mixed(60))
    first = {outcome.worker: outcome for outcome in reversed(outcomes)}.values()

    def explain(outcome: Outcome) -> str | None:
        if outcome in first and outcome.reported == 0:
            return "first request after the reset"
        return None

    judged("after reset_prefix_cache", outcomes, explain, least=0.95)


def test_an_engine_is_killed_and_restarted(
    stack: Stack, frontend: Frontend, engines: dict[str, Engine], judged: Judge
) -> None:
    """The new process has the old one's address, an empty cache and another hash (xxhash)."""
    old = engines["b"]
    old.process.kill()
    until_now(lambda: not frontend.ready(), 30)
    judged("one of two engines is dead", ask_all(frontend, mixed(20)))
    # So few blocks that it evicts: three of the longest prompts.
    new = stack.engine("b", HASH, "xxhash", *TOOLS, port=old.port, blocks=160)
    stack.wait(new)
    until_now(frontend.ready, 60)
    until_now(lambda: frontend.cached_blocks()[("b", 0)] == 0, 30)
    judged("after kill -9 and restart with xxhash", ask_all(frontend, pinned(frontend, "b", 60)))


def test_evictions(frontend: Frontend, judged: Judge) -> None:
    """The engine holds the last block of a prompt that it reused entirely twice; one of the two is
    evicted first."""
    outcomes = ask_all(frontend, pinned(frontend, "b", 150, seed=8))
    assert frontend.index_events("removed") > 0
    judged("an engine that evicts", outcomes)


def test_other_apis_render_the_same_prompts(frontend: Frontend, judged: Judge) -> None:
    """A conversation with tools as a chat, as messages and as responses: the frontend finds the
    blocks of each in the others'."""
    outcomes = []
    for number in range(12):
        for path, body in other_forms(number):
            outcomes.append(asked_as(frontend, path, body))
    judged("36 requests of /v1/chat/completions, /v1/messages and /v1/responses", outcomes)
    tokens = [one.prompt_tokens for one in outcomes]
    assert tokens[0::3] == tokens[1::3] == tokens[2::3]


def test_isolated_keys_share_nothing(stack: Stack, engines: dict[str, Engine]) -> None:
    """The second key reads of a prompt that the first one sent what it reads of a new one."""
    first, second = "sk-first-0123456789", "sk-second-0123456789"
    keys = ["--api-key", first, "--api-key", second]
    isolated = stack.frontend(engines["b"].spec(), arguments=[*keys, "--isolate-keys"])
    shared = stack.frontend(engines["b"].spec(), arguments=keys)
    chance, least = random.Random(8), 3 * BLOCK

    def reused(frontend: Frontend, key: str, path: str, text: str) -> int:
        chat = [{"role": "user", "content": text}]
        fields: dict[str, Any] = {
            "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
            "/v1/completions": {"prompt": text, "max_tokens": 1},
            "/v1/messages": {"messages": chat, "max_tokens": 1},
            "/v1/responses": {"input": text, "max_output_tokens": 1},
        }[path]
        headers = {"authorization": f"Bearer {key}"}
        answer = frontend.http.post(path, json={"model": "tiny", **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        found: Any = answer.json()["usage"]
        for name in USAGE[path]:
            found = found.get(name) if found else None
        return found or 0

    for path in USAGE:
        text = words(chance, 200)
        assert reused(isolated, first, path, text) == 0, path
        assert reused(isolated, second, path, text) == 0, path
        assert reused(isolated, first, path, text) >= least, path
        assert reused(isolated, second, path, text) >= least, path
        # Without isolation the second key learns that the first one sent the prompt.
        assert reused(shared, first, path, text) == 0, path
        assert reused(shared, second, path, text) >= least, path
    stack.stop(isolated)
    stack.stop(shared)
