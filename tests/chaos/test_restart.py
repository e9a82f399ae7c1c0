"""kill -9 of a frontend under load: the next one has the index again by replay, and serves."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from dynctl.wire.prometheus_text import read_samples
from tests.dynctl.serving.fleets import WORDS, chat_body
from tests.soak.fleet import Fleet
from tests.waiting import patience, until

pytestmark = pytest.mark.chaos

_PROMPTS = 24
_BLOCKS = frozenset({"dynctl_worker_cached_blocks"})


async def indexed(client: aiohttp.ClientSession, url: str) -> int:
    """Blocks in the index of all workers."""
    async with client.get(f"{url}/metrics") as answer:
        body = await answer.read()
    return int(sum(float(one.value) for one in read_samples(body, _BLOCKS, max_bytes=1 << 24)))


async def chat(client: aiohttp.ClientSession, url: str, number: int) -> int:
    body = chat_body(f"{number} " + WORDS * 8, max_tokens=4)
    async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def test_the_index_is_back_after_a_frontend_was_killed(record_property):
    fleet = Fleet()
    try:
        await fleet.start()
        async with aiohttp.ClientSession() as client:
            for number in range(_PROMPTS):
                assert await chat(client, fleet.url, number) == 200
            before = 0
            async with asyncio.timeout(patience(20)):
                while before < _PROMPTS or await indexed(client, fleet.url) != before:
                    before = await indexed(client, fleet.url)
                    await asyncio.sleep(0.1)

            ongoing = [asyncio.create_task(chat(client, fleet.url, 0)) for _ in range(20)]
            await asyncio.sleep(0)
            await fleet.restart_frontend()
            await asyncio.gather(*ongoing, return_exceptions=True)
            ready = time.monotonic()
            found = [0]

            async def read() -> None:
                while found[0] < before:
                    found[0] = await indexed(client, fleet.url)
                    await asyncio.sleep(0.05)

            reading = asyncio.create_task(read())
            await until(reading.done, 20)
            await reading
            record_property("seconds", time.monotonic() - ready)
            # The prompts are cached, and the new frontend knows where.
            body = chat_body("3 " + WORDS * 8, max_tokens=4)
            overlap = 0
            async with asyncio.timeout(patience(20)):
                while not overlap:  # its engine may be the last one to be read
                    async with client.post(f"{fleet.url}/v1/route", json=body) as answer:
                        hop = (await answer.json())["decode"]
                    overlap = max(row["overlap_blocks"] for row in hop["candidates"])
            assert await chat(client, fleet.url, 3) == 200
    finally:
        await fleet.close()
