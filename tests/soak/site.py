"""The fleet of a soak run: two frontends that share load, eight engines, and links that can be cut.

Model ``demo``: a prefill and a decode engine in each of two zones; model ``whole``: four engines
for whole requests. KV events of all engines, requests to two of them, and both ways of replica sync
go over relays.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce
from inspect import signature
from operator import xor
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from dynctl.documents.index_dump import RankDump
from dynctl.serving.engines.worker_spec import parse_worker_spec
from dynctl.serving.http.index_exchange import PATH, ranks_at
from router_core.prompt_hasher import PromptHasher
from tests.planes.relay import Relay
from tests.ports import free_port
from tests.soak.fleet import Fleet, Process, start_frontend

HANDED_OVER: Final = "demo"
WHOLE: Final = "whole"
#: Engine -> its model, role and zone.
ENGINES: Final[Mapping[str, tuple[str, str, str]]] = {
    **{
        f"{role}-{zone}": (HANDED_OVER, role, zone)
        for zone in ("a", "b")
        for role in ("prefill", "decode")
    },
    **{f"whole-{number}": (WHOLE, "aggregated", "ab"[number % 2]) for number in range(4)},
}
#: Engines whose requests go over a relay.
LINKED: Final = ("decode-a", "whole-0")
#: Of a prompt that fills memories; the demo model takes 8,192.
_FILLING_TOKENS: Final = 8000
_ROUTER: Final = {
    "router_session_affinity_ttl_secs": 60.0,
    "kv_transfer_domain": "zone",
    "kv_transfer_enforcement": "preferred",
    "kv_transfer_preferred_weight": 0.85,
}


class Cached(NamedTuple):
    """What a rank caches: the number of blocks, and the exclusive or of their names."""

    blocks: int
    digest: int


class Site(Fleet):
    """``frontends``: ``a``, which is never restarted, and ``b``. ``serving``: those that clients
    may choose. ``events``, ``requests`` and ``replicas``: the links by the name of their end."""

    def __init__(self) -> None:
        super().__init__()
        self.frontends: dict[str, Process] = {}
        self.serving: set[str] = set()
        self.events: dict[str, Relay] = {}
        self.requests: dict[str, Relay] = {}
        self.replicas: dict[str, Relay] = {}
        self._ports = {name: free_port() for name in ("a", "b")}
        self._relays = ExitStack()

    def engine_options(self, name: str) -> tuple[str, ...]:
        model, role, _ = ENGINES[name]
        return ("--model", model, "--role", role)

    async def start(self) -> None:
        for name in ENGINES:
            await self.start_engine(name)
            record = self.engines[name].record
            self.events[name] = self._relay(record["kv_events"])
            if name in LINKED:
                self.requests[name] = self._relay(record["url"])
        for name, port in self._ports.items():
            self.replicas[name] = self._relay(f"tcp://127.0.0.1:{port}")
        await asyncio.gather(*(self.begin_frontend(name) for name in self._ports))
        await self._fill_hashes("a")

    async def _fill_hashes(self, frontend: str) -> None:
        """Route prompts until a frontend remembers as many hashed blocks as it may: its memory
        would grow for half an hour."""
        url = self.frontends[frontend].record["url"] + "/v1/route"
        draw = random.Random(0).randrange
        most = signature(PromptHasher).parameters["max_blocks"].default
        blocks = 0
        async with aiohttp.ClientSession() as client:
            while blocks < most:
                prompt = [draw(3, 400) for _ in range(_FILLING_TOKENS)]
                async with client.post(url, json={"model": WHOLE, "prompt": prompt}) as response:
                    response.raise_for_status()
                    blocks += (await response.json())["blocks"]

    def _relay(self, address: str) -> Relay:
        return self._relays.enter_context(Relay(urlsplit(address).port or 0))

    async def begin_frontend(self, name: str) -> None:
        """Start a frontend, and let clients choose it. One that starts again has the index of the
        other: the engines keep too few batches for replay."""
        other = "b" if name == "a" else "a"
        again = name in self.frontends
        self.frontends[name] = await start_frontend(
            workers=[self.worker_spec(engine) for engine in ENGINES],
            replica=f"tcp://127.0.0.1:{self._ports[name]}",
            peer=f"tcp://127.0.0.1:{self.replicas[other].port}",
            router=_ROUTER,
            index_peers=[self.frontends[other].record["url"]] if again else [],
        )
        self.serving.add(name)

    def worker_spec(self, name: str) -> str:
        record = self.engines[name].record
        link = self.requests.get(name)
        url = record["url"] if link is None else f"http://127.0.0.1:{link.port}"
        _, role, zone = ENGINES[name]
        events = f"tcp://127.0.0.1:{self.events[name].port}"
        return (
            f"{url},name={name},role={role},zone={zone},kv-events={events},"
            f"replay={record['replay']}"
        )

    async def close(self) -> None:
        for frontend in self.frontends.values():
            await frontend.kill()
        await super().close()
        self._relays.close()

    # -- what must agree -------------------------------------------------------------------

    async def cached(self) -> dict[str, Cached]:
        """What each engine caches, as it reports itself."""
        reports = await asyncio.gather(*(engine.report() for engine in self.engines.values()))
        return {
            name: Cached(report["blocks"], report["digest"])
            for name, report in zip(self.engines, reports, strict=True)
        }

    async def indexed(self, frontend: str) -> dict[str, Cached]:
        """What each engine caches by the index of a frontend. A rank without events since the
        engine started is not in it: it has nothing."""
        ids = {parse_worker_spec(self.worker_spec(name)).worker_id: name for name in ENGINES}
        index = dict.fromkeys(ENGINES, Cached(0, 0))
        async for rank in ranks_at(self.frontends[frontend].record["url"] + PATH, None):
            index[ids[rank.worker_id]] = _cached(rank)
        return index

    async def active(self, frontend: str) -> int:
        """Requests that a frontend counts on all workers: its own, and those of the other."""
        url = self.frontends[frontend].record["url"] + "/v1/workers"
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            rows = (await response.json())["workers"]
        return sum(rank["active_requests"] for row in rows for rank in row["ranks"])


def _cached(rank: RankDump) -> Cached:
    names = array("Q")
    for chain in rank.chains:
        names.frombytes(chain.names)
    present = set(names) - set(rank.holes)
    return Cached(len(present), reduce(xor, present, 0))
