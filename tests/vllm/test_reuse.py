"""Two engines with one model: what the frontend predicts is what the engines reuse."""

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import Judge
from tests.vllm.rates import ask_all, cached_whole, computed_meanwhile
from tests.vllm.stack import BLOCK, Engine, Frontend, Stack
from tests.vllm.traffic import mixed


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines(stack: Stack) -> list[Engine]:
    """``a`` hashes with sha256 and serves an adapter too; ``b`` hashes with sha256_cbor and
    publishes its hashes as bytes."""
    adapter = f"adapter={stack.directory}/models/adapter"
    a = stack.engine(
        "a",
        *("--prefix-caching-hash-algo", "sha256"),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    b = stack.engine(
        "b",
        *("--prefix-caching-hash-algo", "sha256_cbor"),
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )
    stack.wait(a, b)
    return [a, b]


@pytest.fixture(scope="module")
def frontend(stack: Stack, engines: list[Engine]) -> Frontend:
    return stack.frontend(*(engine.spec(block_size=BLOCK) for engine in engines))


def test_sequential_requests(frontend: Frontend, judged: Judge) -> None:
    outcomes = ask_all(frontend, mixed(200))
    judged("200 chats and completions, one after another", outcomes, cached_whole, least=0.98)


def test_concurrent_requests(frontend: Frontend, engines: list[Engine], judged: Judge) -> None:
    outcomes = ask_all(frontend, mixed(200, seed=2), at_once=8)
    judged(
        "200 chats and completions, 8 at once",
        outcomes,
        computed_meanwhile(outcomes, engines[0]),
        least=0.8,
    )
