"""What happens to the fleet of a soak run, one fault at a time, drawn with a seed."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp

from tests.soak.site import ENGINES, LINKED, Site
from tests.soak.verdict import RESTARTED

_SHORTEST_S, _LONGEST_S = 2.0, 8.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``at``: seconds since the start of the run; ``seconds`` that it lasted."""

    at: float
    kind: str
    of: str
    seconds: float


class Faults:
    """Breaks one part of the fleet at a time. ``log`` has what was done.

    At first each kind has its turn, for as long as any fault lasts: memory reaches its size with
    the requests that wait then, and what grows after that is not another such peak.
    """

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._random = random.Random(seed)
        self._began = time.monotonic()
        self.log: list[Fault] = []
        #: Held while a fault lasts.
        self.lasting = asyncio.Lock()
        self._kinds: Final[Mapping[str, Callable[[str, float], Awaitable[None]]]] = {
            "engine killed": self._kill_engine,
            "engine restarted": self._restart_engine,
            "engine stopped": self._stop_engine,
            "events of an engine cut": self._cut_events,
            "events of an engine lost": self._drop_events,
            "requests to an engine cut": self._cut_requests,
            "replica sync cut": self._cut_replicas,
            "frontend stopped": self._stop_frontend,
            RESTARTED: self._restart_frontend,
        }
        self._untried = self._random.sample(list(self._kinds), len(self._kinds))

    async def one(self) -> None:
        """Draw a fault and wait for its end."""
        if self._untried:
            kind, seconds = self._untried.pop(), _LONGEST_S
        else:
            kind = self._random.choice(list(self._kinds))
            seconds = self._random.uniform(_SHORTEST_S, _LONGEST_S)
        of = self._random.choice(_PARTS.get(kind, list(ENGINES)))
        began = time.monotonic()
        async with self.lasting:
            await self._kinds[kind](of, seconds)
        took = time.monotonic() - began
        fault = Fault(round(began - self._began, 1), kind, of, round(took, 1))
        self.log.append(fault)
        print(fault, flush=True)

    async def every(self, seconds: float) -> None:
        """A fault each ``seconds``, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await self.one()

    async def _kill_engine(self, name: str, seconds: float) -> None:
        await self._site.engines[name].kill()
        await asyncio.sleep(seconds)
        await self._site.start_engine(name)

    async def _restart_engine(self, name: str, seconds: float) -> None:
        await self._site.engines[name].end()
        await self._site.start_engine(name)

    async def _stop_engine(self, name: str, seconds: float) -> None:
        engine = self._site.engines[name]
        engine.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            engine.signal(signal.SIGCONT)

    async def _cut_events(self, name: str, seconds: float) -> None:
        with self._site.events[name].cut():
            await asyncio.sleep(seconds)

    async def _drop_events(self, name: str, seconds: float) -> None:
        url = f"{self._site.engines[name].record['url']}/engine/faults"
        async with aiohttp.ClientSession() as client:
            await client.post(url, json={"drop_events": 1 + int(seconds)})

    async def _cut_requests(self, name: str, seconds: float) -> None:
        with self._site.requests[name].cut():
            await asyncio.sleep(seconds)

    async def _cut_replicas(self, name: str, seconds: float) -> None:
        with self._site.replicas[name].cut():
            await asyncio.sleep(seconds)

    async def _stop_frontend(self, name: str, seconds: float) -> None:
        frontend = self._site.frontends[name]
        frontend.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            frontend.signal(signal.SIGCONT)

    async def _restart_frontend(self, name: str, seconds: float) -> None:
        # As behind a load balancer: no new request comes, then the process ends.
        self._site.serving.discard(name)
        await self._site.frontends[name].end()
        await self._site.begin_frontend(name)


_PARTS: Final = {
    "requests to an engine cut": list(LINKED),
    "replica sync cut": ["a", "b"],
    "frontend stopped": ["b"],
    RESTARTED: ["b"],
}


def as_rows(faults: list[Fault]) -> list[dict[str, Any]]:
    """The faults for the JSON file."""
    return [asdict(fault) for fault in faults]
