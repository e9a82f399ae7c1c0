"""A soak run: ``python -m tests.soak [--minutes N] [--rate N] [--json FILE] [--svg FILE]``.

Clients send chats at a steady rate to two frontends, and once a minute something of the fleet
breaks (:mod:`tests.soak.faults`). Ten times in a run the clients pause: loads must be zero and the
indexes equal to what the engines cache. Exits with 1 if a client lost a request, or a state grows.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from tests.soak.clients import Clients
from tests.soak.faults import Faults, as_rows
from tests.soak.plot import plot
from tests.soak.result import SAMPLE_S, series, write_result
from tests.soak.site import Site
from tests.soak.verdict import RIGHT_S, fit, problems, warmed
from tests.waiting import cores

_QUIET_LIMIT_S: Final = 30.0
_AFTER_FAULT_S: Final = 3.0
_PAUSES: Final = 10


class Run:
    """The parts of a run, and what was measured."""

    def __init__(self, site: Site, rate: float, seed: int) -> None:
        self._site = site
        self._began = time.monotonic()
        self.clients = Clients(site, rate, seed)
        self.faults = Faults(site, seed)
        self.samples: defaultdict[str, list[float]] = defaultdict(list)
        self.quiet: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    async def until(self, minutes: float) -> None:
        """Run all parts for so long, with the pauses."""
        parts = (self.clients.send(), self.sample(), self.faults.every(60.0))
        tasks = self._tasks = [asyncio.create_task(part) for part in parts]
        self.clients.resume()
        for _ in range(_PAUSES):
            limit = 60 * minutes / _PAUSES
            done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                raise RuntimeError("a part of the soak run failed") from task.exception()
            await self.pause()

    async def close(self) -> None:
        """End all parts, and the requests that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.clients.close()

    async def sample(self) -> None:
        """Read both frontends every few seconds, until cancelled."""
        sent = 0
        while True:
            await asyncio.sleep(SAMPLE_S)
            row: dict[str, float] = {}
            for name, frontend in self._site.frontends.items():
                try:
                    readings = {**frontend.usage(), **await frontend.report()}
                except (OSError, ValueError):  # it is restarted
                    break
                row |= {f"{kind} {name}": value for kind, value in readings.items()}
            else:
                now, before = sum(self.clients.kinds.values()), sent
                sent = now
                row["requests"] = now - before
                row["minutes"] = self._minutes
                for name, value in row.items():
                    self.samples[name].append(value)

    async def pause(self) -> None:
        """Stop the clients, and measure how long loads and index take to be right."""
        async with self.faults.lasting:
            await asyncio.sleep(_AFTER_FAULT_S)  # a fault that ended now is no quiet yet
            await self.clients.pause()
            began, wrong = time.monotonic(), ""
            right: dict[str, float | None] = {"loads": None, "index": None}
            while None in right.values() and time.monotonic() - began < _QUIET_LIMIT_S:
                loads = [await self._site.active(name) for name in self._site.frontends]
                if right["loads"] is None and not any(loads):
                    right["loads"] = time.monotonic() - began
                try:
                    different = await self._different()
                except ValueError as error:  # events arrive faster than they are applied
                    different = [f"index not read: {error}"]
                if right["index"] is None and not different:
                    right["index"] = time.monotonic() - began
                wrong = ", ".join([f"active {loads}", *different])
                if time.monotonic() - began > RIGHT_S:
                    print(f"  after {time.monotonic() - began:.1f} s: {wrong}", flush=True)
                await asyncio.sleep(0.1)
            check = {
                "minute": round(self._minutes, 1),
                **{f"{name}_s": seconds and round(seconds, 2) for name, seconds in right.items()},
                "wrong": wrong if None in right.values() else "",
            }
            self.quiet.append(check)
            print(f"pause: {check}, {dict(self.clients.outcomes)}", flush=True)
            self.clients.resume()

    async def _different(self) -> list[str]:
        """The engines whose cache is not what a frontend has in its index."""
        cached = await self._site.cached()
        different = []
        for name in self._site.frontends:
            indexed = await self._site.indexed(name)
            for engine, truth in cached.items():
                if indexed[engine] != truth:
                    blocks = f"{indexed[engine].blocks} of {truth.blocks} blocks"
                    different.append(f"{engine} in {name}: {blocks}")
        return different


async def soak(minutes: float, rate: float, seed: int, right_s: float) -> dict[str, Any]:
    """Run for ``minutes``; the result as JSON has it."""
    site = Site()
    run = None
    try:
        await site.start()
        run = Run(site, rate, seed)
        await run.until(minutes)
        result = {"minutes": minutes, "seed": seed, "right_s": right_s, **_measured(run, rate)}
        return {**result, "problems": problems(result)}
    finally:
        if run is not None:
            await run.close()
        await site.close()


def _measured(run: Run, rate: float) -> dict[str, Any]:
    clients = run.clients
    sent = sum(clients.outcomes.values())
    samples = dict(run.samples)
    slope = fit(*warmed(samples["minutes"], samples["memory a"]))
    return {
        "cores": cores(),
        "python": platform.python_version(),
        "rate": {"aimed": rate, "reached": round(sent / clients.sending_s, 1)},
        "kinds": dict(clients.kinds.most_common()),
        "outcomes": dict(clients.outcomes.most_common()),
        "slowest_s": round(clients.slowest_s, 1),
        "memory_growth": {
            "bytes_an_hour": round(slope.an_hour),
            "error": round(slope.error),
        },
        "quiet": run.quiet,
        "faults": as_rows(run.faults.log),
        "errors": clients.errors,
        "lost": clients.lost,
        "samples": samples,
    }


def _print(result: dict[str, Any]) -> None:
    rate, outcomes = result["rate"], result["outcomes"]
    shown = ", ".join(f"{name} {count:,}" for name, count in outcomes.items())
    print(f"{sum(outcomes.values()):,} requests, {rate['reached']:g} a second: {shown}")
    for name, values in result["samples"].items():
        print(
            f"  {name:14} first {values[0]:>12,.0f}  last {values[-1]:>12,.0f}"
            f"  most {max(values):>12,.0f}"
        )
    growth = {name: value / 1e6 for name, value in result["memory_growth"].items()}
    print("  memory: {bytes_an_hour:+.2f} MB an hour (error {error:.2f})".format(**growth))
    for problem in result["problems"]:
        print(f"FAIL  {problem}")


def main() -> int:
    """Returns 1 if the run does not pass."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--right-s", type=float, default=RIGHT_S, help="longer on a machine that has other work"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--svg", type=Path, help="write the plot to this file")
    given = parser.parse_args()
    result = asyncio.run(soak(given.minutes, given.rate, given.seed, given.right_s))
    _print(result)
    if given.json is not None:
        write_result(given.json, result)
    if given.svg is not None:
        given.svg.parent.mkdir(parents=True, exist_ok=True)
        given.svg.write_text(plot(series(result), given.minutes))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
