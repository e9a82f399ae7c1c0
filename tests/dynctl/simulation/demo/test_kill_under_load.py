"""Engines that die under load: every client gets an answer or an error event, load returns to 0."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp

from dynctl.simulation.demo.fleet import DemoFleet
from tests.forks import forked_demos
from tests.waiting import patience

STREAMS = 64


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> str:
    """How one streamed request ended: ``done``, ``error event``, ``http STATUS`` or ``cut``."""
    body = {
        "model": "demo",
        "stream": True,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": f"question {number} about prefix caches " * 12}],
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        text = (await response.read()).decode()
    if response.status != 200:
        return f"http {response.status}"
    if "data: [DONE]" in text:
        return "done"
    return "error event" if '"error"' in text else "cut"


async def workers(session: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    async with session.get(f"{url}/v1/workers") as response:
        return {row["name"]: row for row in (await response.json())["workers"]}


def active(rows: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    names = ("active_requests", "active_prefill_tokens", "active_decode_blocks")
    return {
        name: [rank[field] for rank in row["ranks"] for field in names]
        for name, row in rows.items()
    }


async def test_killed_engines_cost_their_own_streams_at_most() -> None:
    with forked_demos(), DemoFleet() as fleet:
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            requests = [asyncio.create_task(stream(session, fleet.url, n)) for n in range(STREAMS)]
            async with asyncio.timeout(patience(20)):
                while not any(map(any, active(await workers(session, fleet.url)).values())):
                    pass  # each look is a request of its own
            for name in ("decode-a0", "prefill-b0"):
                await asyncio.sleep(0.2)
                fleet.engines[name].process.kill()
            ended = Counter(await asyncio.gather(*requests))
            async with asyncio.timeout(patience(20)):
                while True:
                    rows = await workers(session, fleet.url)
                    lost = {name for name, row in rows.items() if row["status"] != "ready"}
                    busy = any(map(any, active(rows).values()))
                    if lost == {"decode-a0", "prefill-b0"} and not busy:
                        break
    assert ended["cut"] == 0, ended
    assert ended["done"] >= 1, ended
    assert ended.total() == STREAMS
