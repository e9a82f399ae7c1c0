"""The index of a router for another one that starts: the endpoint, and the reading of a peer's.

A frontend that starts alone reads the caches of all engines from their replay sockets, which keep a
bounded number of batches. From a peer it gets the whole index at once, and reads from each engine
only what came after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Final

import aiohttp
from aiohttp import web

from dynctl import version
from dynctl.base.decode_errors import WireError
from dynctl.documents.index_dump import (
    MAX_BYTES,
    MOST_COPIES,
    DumpReader,
    RankDump,
    chains_of,
    encode_dump,
)
from dynctl.serving.engines.failures import control_failure
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.http.auth import guarded
from dynctl.serving.routing.index_runtime import IndexSeed
from dynctl.serving.routing.refusal import HttpError
from dynctl.serving.routing.service import RoutingService
from router_core import Captured

_log = logging.getLogger(__name__)

PATH: Final = "/v1/index"
#: Seconds for one peer, and how long its index is kept for workers that are not reachable yet.
PEER_S: Final = 30.0
KEPT_S: Final = 60.0
#: Seconds to wait until all received events are applied.
_SETTLE_S: Final = 5.0
_READ_BYTES: Final = 1 << 20


class IndexExchange:
    """``GET /v1/index``, and ``take`` of another router's."""

    def __init__(self, service: RoutingService, fleet: Fleet, token: str | None) -> None:
        self._service = service
        self._fleet = fleet
        self._token = token
        self._sending = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.get(PATH, guarded(self.handle, self._token), allow_head=False)]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The index of all ranks whose event stream is connected and complete.

        A consistent copy: the event loop is blocked for it, 0.3 s for a million blocks.
        """
        if self._sending.locked():
            raise HttpError(
                409, "another index is being sent; try again", "conflict", "index_in_progress"
            )
        async with self._sending:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await self._fleet.index.drained()
            except TimeoutError:
                raise HttpError(
                    503, "events arrive faster than they are applied", "overloaded", "index_busy"
                ) from None
            ranks = self._ranks()  # nothing was applied since: no await in between
            response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
            await response.prepare(request)
            frames = encode_dump(version(), ranks)
            while frame := await asyncio.to_thread(next, frames, b""):
                for at in range(0, len(frame), _READ_BYTES):
                    await response.write(frame[at : at + _READ_BYTES])
            await response.write_eof()
            return response

    def _ranks(self) -> Iterator[RankDump]:
        """The ranks, as they are now; encoded when they are read."""
        router = self._service.router
        captured = router.capture()
        rows: list[tuple[int, RankDump]] = []
        for worker in router.registry:
            slots = router.registry.slots(worker.worker_id)
            for rank, slot in zip(worker.ranks, slots, strict=True):
                fresh = router.freshness[slot]
                position = self._fleet.index.position(worker.worker_id, rank)
                # Windows of several cache groups are left to the engine.
                if position is None or fresh.state != "current" or captured.index.has_groups(slot):
                    continue
                dump = RankDump(worker.worker_id, rank, worker.model, worker.block_size, *position)
                rows.append((slot, dump))
        return _encoded(rows, captured)

    async def take(self, urls: tuple[str, ...], token: str | None) -> None:
        """Begin the streams of the fleet with the index of the first peer that answers.

        What arrives within PEER_S counts; the other ranks are read from their engines.
        """
        seeds = self._fleet.index.seeds
        for url in urls:
            began, blocks, problem = self._service.clock(), 0, ""
            try:
                async with (
                    asyncio.timeout(PEER_S),
                    contextlib.aclosing(ranks_at(url.rstrip("/") + PATH, token)) as ranks,
                ):
                    async for rank in ranks:
                        seeds[rank.worker_id, rank.dp_rank] = IndexSeed(
                            rank.endpoint, rank.block_size, rank.sequence, rank.digest, rank.events
                        )
                        blocks += rank.blocks
            except TimeoutError:
                problem = f"not complete after {PEER_S:g} s"
            except (ValueError, WireError) as error:
                problem = str(error)
            except (aiohttp.ClientError, OSError) as error:
                problem = str(control_failure("its router", error))
            if problem:
                _log.warning("index of %s: %s; the engines are read for the rest", url, problem)
            if seeds:
                took = self._service.clock() - began
                text = "index of %s read in %.2f s: ranks: %d, blocks: %d"
                _log.info(text, url, took, len(seeds), blocks)
                asyncio.get_running_loop().call_later(KEPT_S, seeds.clear)
                return


def _encoded(rows: list[tuple[int, RankDump]], captured: Captured) -> Iterator[RankDump]:
    lower: dict[int, dict[str, list[tuple[int | None, int, int]]]] = {}
    for row in captured.tiers.dump():
        blocks = [(parent, block, name) for parent, block, name in row["blocks"]]
        lower.setdefault(row["slot"], {})[row["tier"]] = blocks
    for slot, dump in rows:
        try:
            chains = chains_of(captured.index, slot)
        except OverflowError:
            continue  # names that are no hashes: the engine has to be read
        yield RankDump(
            dump.worker_id,
            dump.dp_rank,
            dump.model,
            dump.block_size,
            dump.endpoint,
            dump.sequence,
            dump.digest,
            chains,
            [(name, min(count, MOST_COPIES)) for name, count in captured.index.copies(slot)],
            lower.get(slot, {}),
            captured.index.holes(slot),
        )


async def ranks_at(url: str, token: str | None) -> AsyncGenerator[RankDump, None]:
    """The ranks as they arrive; raises ValueError for another status or a dump that is cut."""
    headers = {"user-agent": "dynctl", "accept-encoding": "identity"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    reader, received = DumpReader(), 0
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.get(url, headers=headers, allow_redirects=False) as response,
    ):
        if response.status != 200:
            raise ValueError(f"status {response.status}; expected 200")
        async for piece in response.content.iter_chunked(_READ_BYTES):
            received += len(piece)
            if received > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES:,} bytes")
            for rank in await asyncio.to_thread(reader.feed, piece):
                yield rank
    if not reader.complete or reader.rest:
        raise ValueError("it ends in the middle")
