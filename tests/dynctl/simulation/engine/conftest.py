"""Real engines on free ports, closed after each test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import RunningEngine, start_engine
from dynctl.tokenization import DEMO_MODEL_DIR, ModelTokenizer, load_tokenizer
from tests.waiting import patience

FAST = 1e6

StartEngine = Callable[..., Awaitable[RunningEngine]]


@pytest.fixture(scope="session")
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(DEMO_MODEL_DIR)


@pytest.fixture
async def start(tokenizer: ModelTokenizer) -> AsyncIterator[StartEngine]:
    """`await start(**settings)` starts an engine that takes (almost) no simulated time."""
    running: list[RunningEngine] = []

    async def start_one(**settings: Any) -> RunningEngine:
        engine = await start_engine(EngineConfig(**{"speedup_ratio": FAST, **settings}), tokenizer)
        running.append(engine)
        return engine

    yield start_one
    for engine in running:
        await engine.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def complete(
    http: aiohttp.ClientSession, engine: RunningEngine, prompt: Any, **fields: Any
) -> dict[str, Any]:
    """A unary completion that must succeed."""
    status, body = await post(
        http, engine, "/v1/completions", {"model": "demo", "prompt": prompt, **fields}
    )
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def cached_tokens(answer: dict[str, Any]) -> int:
    """Prompt tokens that the engine found in its own cache."""
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return cached


async def post(
    http: aiohttp.ClientSession, engine: RunningEngine, path: str, body: Any
) -> tuple[int, Any]:
    async with http.post(engine.url + path, json=body) as answer:
        return answer.status, await answer.json()


async def get(http: aiohttp.ClientSession, engine: RunningEngine, path: str) -> Any:
    async with http.get(engine.url + path) as answer:
        assert answer.status == 200
        return await answer.json()


async def eventually(holds: Callable[[], Awaitable[object]]) -> None:
    """Wait until `holds` is true; a bound of ten seconds, far above what it takes."""
    async with asyncio.timeout(patience(10)):
        while not await holds():  # noqa: ASYNC110  another process' state has no event
            await asyncio.sleep(0.01)


async def load_of(
    http: aiohttp.ClientSession, engine: RunningEngine, *names: str
) -> tuple[int, ...]:
    """Numbers of /load by name."""
    load = await get(http, engine, "/load")
    return tuple(load[name] for name in names)


async def idle(http: aiohttp.ClientSession, engine: RunningEngine) -> None:
    """Wait until nothing runs, waits or holds blocks."""
    names = ("running", "waiting", "kv_used_blocks", "active_prefill_tokens", "held_handoffs")

    async def all_zero() -> bool:
        return not any(await load_of(http, engine, *names))

    await eventually(all_zero)
