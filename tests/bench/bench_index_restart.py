"""What a restarted indexer knows: hits of its first answers, with a snapshot, a peer, and neither.

Engines publish more batches than their replay sockets keep. One of two indexers is killed and
started again; prompts that the engines hold are asked of it from its first answer on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import zmq.asyncio

from dynctl.wire.vllm_events import BlockStored
from tests.contract.zmq_publisher import ScriptedPublisher, batch

BLOCK = 16


class Indexer:
    """A `serve indexer` process."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Seconds until it listens."""
        began = time.perf_counter()
        command = ["-m", "dynctl", "serve", "indexer", "--port", "0", "--announce"]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--log-level", "error", *self._options,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = json.loads(await self.process.stdout.readline())["url"]
        return time.perf_counter() - began

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()


async def hits(indexer: Indexer, prompts: list[list[int]], session: Any, count: int) -> float:
    """The part of the held tokens that the indexer finds."""
    chance, found = random.Random(1), 0.0
    for prompt in chance.choices(prompts, k=count):
        body = {"model_name": "m", "token_ids": prompt}
        async with session.post(indexer.url + "/query", json=body) as response:
            answer = await response.json() if response.status == 200 else {"instances": {}}
        matched = [row["gpu"] for row in answer["instances"].values()]
        found += max(matched, default=0) / len(prompt)
    return found / count


async def run(engines: int, batches: int, kept: int) -> list[dict[str, Any]]:
    rows = []
    context = zmq.asyncio.Context()
    publishers = [ScriptedPublisher(context, replay=True) for _ in range(engines)]
    workers = ",".join(f"{n}={one.endpoint}" for n, one in enumerate(publishers, 1))
    replays = ",".join(f"{n}={one.replay_endpoint}" for n, one in enumerate(publishers, 1))
    common = ("--block-size", str(BLOCK), "--model-name", "m",
              "--workers", workers, "--replays", replays)  # fmt: skip
    chance, prompts = random.Random(0), []
    with tempfile.TemporaryDirectory() as directory:
        other = Indexer(*common)
        await other.start()
        ways = {"neither": Indexer(*common)}
        snapshot = ("--snapshot", str(Path(directory)), "--snapshot-interval", "1")
        ways["snapshot"] = Indexer(*common, *snapshot)
        for indexer in ways.values():
            await indexer.start()
        for number in range(batches):
            for at, one in enumerate(publishers):
                tokens = [chance.randrange(30_000) for _ in range(BLOCK * 8)]
                names = tuple(10**9 * (at + 1) + 8 * number + n for n in range(8))
                stored = BlockStored(names, None, tuple(tokens), BLOCK)
                await one.send(number, batch(number, stored, dp_rank=0))
                one.kept.pop(number - kept, None)
                prompts.append(tokens)
        async with aiohttp.ClientSession() as session:
            while await hits(ways["snapshot"], prompts, session, 200) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            await asyncio.sleep(3)  # a snapshot with all of it
            ways["peer"] = Indexer(*common, "--peers", other.url)
            print(f"blocks: {engines * batches * 8:,}; replay keeps {kept / batches:.0%}")
            print(
                "| restarted with | listens after | hits of its first 500 answers |\n|---|---|---|"
            )
            for name, indexer in ways.items():
                if indexer.process is not None:
                    await indexer.kill()
                took = await indexer.start()
                found = await hits(indexer, prompts, session, 500)
                print(f"| {name} | {took:.1f} s | {found:.1%} |", flush=True)
                rows.append(
                    {"name": f"hits after a restart, {name}", "unit": "%", "ours": 100 * found,
                     "peer": None, "aim": ""}
                )  # fmt: skip
            print(f"| not restarted | | {await hits(other, prompts, session, 500):.1%} |")
        for indexer in (other, *ways.values()):
            await indexer.kill()
    for one in publishers:
        await one.die()
    context.destroy(0)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--batches", type=int, default=4000, help="of each engine, 8 blocks each")
    parser.add_argument("--kept", type=int, default=1000, help="batches that a replay socket keeps")
    parser.add_argument("--smoke", action="store_true", help="few batches: whether it runs at all")
    given, _ = parser.parse_known_args()
    batches, kept = (40, 10) if given.smoke else (given.batches, given.kept)
    rows = asyncio.run(run(given.engines, batches, kept))
    print(json.dumps({"benchmark": "index_restart", "rows": rows}))


if __name__ == "__main__":
    main()
