"""A soak run: ``python -m tests.soak [--minutes N] [--svg FILE]``; exits with 1 if state grows.

Clients send chats with shared and new prefixes. Every 20 s one engine is killed and started again
at its ports; every 7 s another loses KV events. Samples of each second become the plot.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import aiohttp

from dynctl.wire.prometheus_text import read_samples
from tests.soak.fleet import BLOCKS, ENGINES, Fleet
from tests.soak.plot import Series, plot
from tests.waiting import until

_RESTART_S: Final = 20.0
_GAP_S: Final = 7.0
_CLIENTS: Final = 12
_WANTED: Final = frozenset(
    {
        "dynctl_worker_cached_blocks",
        "dynctl_decision_memory_bytes",
        "dynctl_decision_memory_plans",
        "dynctl_condition",
        "dynctl_domain_active_requests",
    }
)
#: What may grow after the first quarter of the run: (share of the value, amount).
_SLACK: Final = {"memory": (0.05, 12e6), "descriptors": (0.0, 8.0), "conditions": (0.0, 8.0)}


class Run:
    """The clients, the faults and the samples."""

    def __init__(self, fleet: Fleet, rate: float, seed: int) -> None:
        self._fleet = fleet
        self._rate = rate
        self._random = random.Random(seed)
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        self.outcomes: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self._restarting = asyncio.Lock()

    async def close(self) -> None:
        await self._client.close()

    async def client(self) -> None:
        """Requests, one after the other, until cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(self._rate / _CLIENTS))
            await self.request()

    async def request(self) -> None:
        shared = f"system prompt {self._random.randrange(40)} " + "please be brief and exact " * 30
        text = f"{shared} {self._random.random()} " + "word " * self._random.randrange(200)
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "stream": self._random.random() < 0.8,
            "max_tokens": self._random.randrange(1, 40),
        }
        try:
            async with self._client.post(
                f"{self._fleet.url}/v1/chat/completions", json=body
            ) as answer:
                if self._random.random() < 0.05:  # some clients leave
                    self.outcomes["left"] += 1
                    return
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
            return
        failed = answer.status != 200 or b'"error"' in raw
        self.outcomes[f"error {answer.status}" if failed else "answered"] += 1

    async def restarts(self) -> None:
        while True:
            await asyncio.sleep(_RESTART_S)
            name = self._random.choice(list(self._fleet.engines))
            async with self._restarting:
                await self._fleet.engines[name].kill()
                await self._fleet.start_engine(name)

    async def gaps(self) -> None:
        while True:
            await asyncio.sleep(_GAP_S)
            engine = self._random.choice(list(self._fleet.engines.values()))
            change = {"drop_events": self._random.randrange(1, 5)}
            with contextlib.suppress(aiohttp.ClientError):
                await self._client.post(f"{engine.record['url']}/engine/faults", json=change)

    async def sampling(self) -> None:
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(1.0)

    async def sample(self) -> dict[str, float]:
        assert self._fleet.frontend is not None
        memory, descriptors = self._fleet.frontend.usage()
        async with self._client.get(f"{self._fleet.url}/metrics") as answer:
            body = await answer.read()
        found: defaultdict[str, float] = defaultdict(float)
        for one in read_samples(body, _WANTED, max_bytes=1 << 24):
            found[one.name] += float(one.value)
        return {
            "memory": memory,
            "descriptors": descriptors,
            "index": found["dynctl_worker_cached_blocks"],
            "decisions": found["dynctl_decision_memory_bytes"],
            "conditions": found["dynctl_condition"],
            "active": found["dynctl_domain_active_requests"],
        }


async def soak(minutes: float, rate: float, seed: int) -> tuple[Run, list[str]]:
    """Run for ``minutes``; returns the run and what did not stay flat."""
    fleet = Fleet()
    run = Run(fleet, rate, seed)
    try:
        await fleet.start()
        tasks = [asyncio.create_task(run.client()) for _ in range(_CLIENTS)]
        tasks += [asyncio.create_task(one()) for one in (run.restarts, run.gaps, run.sampling)]
        await asyncio.wait(tasks, timeout=60 * minutes, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and task.exception():
                raise RuntimeError("a part of the soak run failed") from task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        problems = judge(run.samples)
        try:
            await _until_idle(run)
        except TimeoutError:
            problems.append("requests are still counted as active after the last one ended")
        return run, problems
    finally:
        await run.close()
        await fleet.close()


async def _until_idle(run: Run) -> None:
    last: dict[str, float] = {"active": 1.0}

    async def read() -> None:
        while last["active"]:
            last.update(await run.sample())
            await asyncio.sleep(0.2)

    reading = asyncio.create_task(read())
    try:
        await until(reading.done, 30)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def judge(samples: list[dict[str, float]]) -> list[str]:
    """What grew: the last quarter of the samples against the second one, by their medians."""
    quarter = len(samples) // 4
    if quarter < 5:
        return [f"{len(samples)} samples are too few to judge; run for longer"]
    problems = []
    for name, (share, amount) in _SLACK.items():
        early = _median([one[name] for one in samples[quarter : 2 * quarter]])
        late = _median([one[name] for one in samples[-quarter:]])
        if late > early * (1 + share) + amount:
            problems.append(f"{name} grew from {early:,.0f} to {late:,.0f}")
    most = max(one["index"] for one in samples)
    # Between a restart of an engine and its detection the old blocks are still indexed.
    if most > ENGINES * BLOCKS * 1.5:
        problems.append(f"the index has {most:,.0f} blocks; all caches have {ENGINES * BLOCKS:,}")
    return problems


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> int:
    """Returns 1 if something grew or requests were lost."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="write the plot to this file")
    given = parser.parse_args()
    started = time.monotonic()
    run, problems = asyncio.run(soak(given.minutes, given.rate, given.seed))
    seconds = time.monotonic() - started
    requests = sum(run.outcomes.values())
    shown = ", ".join(f"{name} {count:,}" for name, count in run.outcomes.most_common())
    print(f"{requests:,} requests in {seconds / 60:.1f} minutes: {shown}")
    for name in run.samples[0]:
        values = [one[name] for one in run.samples]
        first, last, most = values[0], values[-1], max(values)
        print(f"  {name:12} first {first:>14,.0f}  last {last:>14,.0f}  most {most:>14,.0f}")
    if given.svg is not None:
        given.svg.parent.mkdir(parents=True, exist_ok=True)
        given.svg.write_text(plot(_series(run.samples), given.minutes))
    for problem in problems:
        print(f"FAIL  {problem}")
    return 1 if problems else 0


def _series(samples: list[dict[str, float]]) -> list[Series]:
    scales = {"memory": ("MB", 1e6), "decisions": ("MB", 1e6)}
    series = []
    for name in samples[0]:
        unit, scale = scales.get(name, ("", 1.0))
        series.append(Series(name, unit, [one[name] / scale for one in samples]))
    return series


if __name__ == "__main__":
    sys.exit(main())
