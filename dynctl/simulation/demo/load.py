"""Seeded traffic for the demo fleet: conversations with shared prefixes, and a zone under pressure.

The same seed sends the same requests in the same order; their times follow a clock of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Final

import httpx

MODEL: Final = "demo"
ZONE_TAINT: Final = "dynamo.topology/zone"
#: Settings of the engines and of the frontend under which the load shows queues and busy workers.
ENGINE_ARGS: Final = (
    *("--total-blocks", "1200", "--max-num-seqs", "16"),
    *("--prefill-tokens-per-s", "4000", "--decode-itl-ms", "25"),
)
FRONTEND_ARGS: Final = ("--active-decode-blocks-threshold", "0.75")
#: Every so many seconds one zone gets a burst: requests that require it, at a higher rate.
CYCLE_S: Final = 60.0
PRESSURE: Final = (25.0, 45.0)
_PRESSED: Final = "zone-a"
_ABSENT: Final = "zone-c"
_RATE: Final = 4.0
_BURST: Final = 2.5
#: Of the requests, the share that requires a zone without workers: they are refused.
_REFUSED: Final = 0.02
_REQUIRE: Final = 0.6
_PROMPTS: Final = 6
_CONVERSATIONS: Final = 24
_TURNS: Final = 6
#: Requests in flight; more are not sent.
MAX_IN_FLIGHT: Final = 64
_TIMEOUT_S: Final = 60.0
_WORDS: Final = (
    "cache block prefix router worker zone rack token prompt decode prefill queue load batch "
    "tensor kernel model layer head score weight budget latency stream event index shard replica"
).split()


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request: seconds after the start, and its body."""

    at: float
    body: dict[str, Any]


def requests(seed: int = 7) -> Iterator[DemoRequest]:
    """The traffic, without end."""
    random = Random(seed)
    systems = [" ".join(random.choices(_WORDS, k=260)) for _ in range(_PROMPTS)]
    talks: dict[int, list[dict[str, str]]] = {}
    at = 0.0
    while True:
        phase = at % CYCLE_S
        pressed = PRESSURE[0] <= phase < PRESSURE[1]
        at += random.expovariate(_RATE * (_BURST if pressed else 1.0))
        number = random.randrange(_CONVERSATIONS)
        talk = talks.get(number)
        if talk is None or len(talk) > 2 * _TURNS:
            talk = [{"role": "system", "content": systems[number % _PROMPTS]}]
        question = " ".join(random.choices(_WORDS, k=random.randrange(20, 90)))
        talk = [*talk, {"role": "user", "content": question}]
        answer = {"role": "assistant", "content": " ".join(random.choices(_WORDS, k=12))}
        talks[number] = [*talk, answer]
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": talk,
            "max_tokens": random.randrange(60, 200),
            "stream": True,
        }
        drawn = random.random()
        if drawn < _REFUSED:
            body["nvext"] = _only_in(_ABSENT)
        elif pressed and drawn < _REQUIRE:
            body["nvext"] = _only_in(_PRESSED)
        yield DemoRequest(at, body)


def _only_in(zone: str) -> dict[str, Any]:
    return {"routing_constraints": {"required_taints": [f"{ZONE_TAINT}={zone}"]}}


class DemoLoad:
    """Sends the traffic to a frontend from a thread, from entering to leaving the context.

    ``sent`` counts the requests, ``refused`` those that the frontend answered with an error.
    """

    def __init__(self, url: str, seed: int = 7) -> None:
        self._url = url
        self._seed = seed
        self._thread = threading.Thread(target=self._run, name="demo load", daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.sent = self.refused = 0

    def __enter__(self) -> DemoLoad:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._send_all())

    async def _send_all(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._started.set()
        began = self._loop.time()
        running: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=MAX_IN_FLIGHT)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=_TIMEOUT_S, limits=limits, trust_env=False
        ) as client:
            try:
                for request in requests(self._seed):
                    await asyncio.sleep(max(0.0, began + request.at - self._loop.time()))
                    if len(running) < MAX_IN_FLIGHT:
                        task = asyncio.create_task(self._send(client, request.body))
                        running.add(task)
                        task.add_done_callback(running.discard)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _send(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.sent += 1
        with suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                self.refused += response.status_code >= 400
                async for _ in response.aiter_raw():
                    pass
