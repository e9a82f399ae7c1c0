"""Processes that share a router: under load the router is killed or stopped, or a frontend."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from dynctl.tokenization import DEMO_MODEL_DIR
from tests.dynctl.serving.fleets import WORDS, chat_body
from tests.soak.fleet import Fleet, Process
from tests.waiting import patience

pytestmark = pytest.mark.chaos
_CLIENTS = 8


class Shared(Fleet):
    """Engines, a router that keeps its port, and frontends that share a port."""

    def __init__(self) -> None:
        super().__init__()
        self.router: Process
        self.frontends: list[Process] = []
        self.answers: list[int | str] = []

    async def start_router(self, port: str = "0") -> None:
        workers = []
        for name, engine in self.engines.items():
            record = engine.record
            spec = f"{record['url']},name={name},kv-events={record['kv_events']}"
            workers += ["--worker", f"{spec},replay={record['replay']}"]
        self.router = await self._serve("router", "--http-port", port, *workers)

    async def restart_router(self) -> None:
        await self.router.kill()
        await self.start_router(self.router.record["url"].rpartition(":")[2])

    async def add_frontend(self) -> Process:
        port = "0" if not self.frontends else str(self.frontends[0].record["port"])
        found = await self._serve(
            "frontend", "--router", self.router.record["url"], "--share-port",
            "--http-port", port, "--model-path", str(DEMO_MODEL_DIR),
        )  # fmt: skip
        self.frontends.append(found)
        return found

    async def _serve(self, what: str, *arguments: str) -> Process:
        return await Process.start(
            "-m", "dynctl", "serve", what, "--announce", "--log-level", "error", *arguments
        )

    async def close(self) -> None:
        for process in (self.router, *self.frontends):
            await process.kill()
        await super().close()

    async def get(self, process: Process, path: str) -> Any:
        async with (
            aiohttp.ClientSession() as client,
            client.get(process.record["url"] + path) as answer,
        ):
            return await answer.json()

    async def lost(self) -> bool:
        """Whether a frontend misses its router. They share a port, so ask until all were asked."""
        url = self.frontends[0].record["url"] + "/health"
        for _ in range(8 * len(self.frontends)):
            async with aiohttp.ClientSession() as client, client.get(url) as answer:
                found = (await answer.json())["conditions"]
            if any(one["code"] == "ROUTER_LOST" for one in found):
                return True
        return False

    async def idle(self) -> bool:
        """Whether the router counts no running request."""
        rows = (await self.get(self.router, "/v1/loads"))["loads"]
        return not any(row["active_requests"] for row in rows)

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[None]:
        """Clients that send requests all the time; ``answers`` has a status or an error each."""
        stop = asyncio.Event()

        async def client(number: int) -> None:
            url = self.frontends[0].record["url"] + "/v1/chat/completions"
            count = 0
            while not stop.is_set():
                count += 1
                body = chat_body(f"{number} {count % 5} " + WORDS, max_tokens=4)
                body["stream"] = bool(count % 2)
                try:
                    # A connection for each request: connections of a killed process are gone.
                    async with (
                        aiohttp.ClientSession() as session,
                        session.post(url, json=body) as answer,
                    ):
                        raw = await answer.read()
                        self.answers.append("error" if b'"error"' in raw else answer.status)
                except aiohttp.ClientError as error:
                    self.answers.append(type(error).__name__)
                    await asyncio.sleep(0.01)

        running = [asyncio.create_task(client(number)) for number in range(_CLIENTS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*running)

    async def more_answers(self, count: int = 30) -> None:
        wanted = len(self.answers) + count
        await _until(lambda: _is(len(self.answers) >= wanted))


async def _is(value: bool) -> bool:
    return value


async def _until(true: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(patience(seconds)):
        while not await true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def shared() -> AsyncIterator[Shared]:
    fleet = Shared()
    try:
        await asyncio.gather(*(fleet.start_engine(f"engine-{number}") for number in range(3)))
        await fleet.start_router()
        for _ in range(2):
            await fleet.add_frontend()
        yield fleet
    finally:
        await fleet.close()


@pytest.mark.seed("dynamo-1.6: several frontends: loss of the router")
async def test_a_router_killed_under_load_and_started_again():
    async with shared() as fleet:
        async with fleet.clients():
            await fleet.more_answers()
            await fleet.router.kill()
            await _until(fleet.lost)
            await fleet.more_answers()
            await fleet.restart_router()

            async def healed() -> bool:
                return not await fleet.lost()

            await _until(healed)
            await fleet.more_answers()
        assert set(fleet.answers) == {200}

        await _until(fleet.idle)
        decided = await fleet.get(fleet.router, "/v1/decisions?limit=1")
        assert decided["cursor"] > 0


async def test_a_stopped_router_holds_no_request_back():
    async with shared() as fleet:
        async with fleet.clients():
            await fleet.more_answers()
            fleet.router.child.send_signal(signal.SIGSTOP)
            try:
                await _until(fleet.lost)
                await fleet.more_answers()
            finally:
                fleet.router.child.send_signal(signal.SIGCONT)

            async def healed() -> bool:
                return not await fleet.lost()

            await _until(healed)
            await fleet.more_answers()
        assert set(fleet.answers) == {200}


@pytest.mark.seed("dynamo-1.6: several frontends: loss of a frontend")
async def test_the_bookings_of_a_killed_frontend_end_and_the_other_one_serves():
    async with shared() as fleet:
        dead = fleet.frontends[1]
        async with fleet.clients():
            await fleet.more_answers()
            await dead.kill()
            fleet.frontends.remove(dead)
            # What it had is lost; all that came later is answered.
            await fleet.more_answers()
            lost = [one for one in fleet.answers if one != 200]
            assert len(lost) <= _CLIENTS + 1, lost

        async def one_left() -> bool:
            rows = (await fleet.get(fleet.router, "/v1/frontends"))["frontends"]
            return [row["bookings"] for row in rows] == [0]

        await _until(one_left, 30)
        await _until(fleet.idle)
