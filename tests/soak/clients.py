"""The clients of a soak run: requests at a steady rate, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any, Final

import aiohttp

from tests.soak.site import HANDED_OVER, WHOLE, Site

#: Requests that run at the same time; at this number the clients wait with the next one.
_MOST: Final = 2000
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120)
_SHARED: Final = "please be brief and exact " * 30
_LONG: Final = "and then the next page says more about it " * 400
_MOST_LOST: Final = 50
_MESSAGES: Final = 5
_BEHIND_S: Final = 1.0
#: aiohttp reuses the connection that was unused longest. With a longer limit it keeps all of the
#: connections of an earlier queue in use, and they count as descriptors of the frontend.
_UNUSED_S: Final = 2.0


class Clients:
    """Sends ``rate`` requests a second. ``kinds`` counts what was sent, ``outcomes`` what became
    of it; ``lost`` has what was neither an answer nor an error."""

    def __init__(self, site: Site, rate: float, seed: int) -> None:
        self.kinds: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []
        #: Outcome -> its first messages.
        self.errors: dict[str, list[str]] = {}
        self.slowest_s = 0.0
        #: Seconds in which requests were sent.
        self.sending_s = 0.0
        self._site = site
        self._rate = rate
        self._random = random.Random(seed)
        self._may_send = asyncio.Event()
        self._since = time.monotonic()
        self._running: set[asyncio.Task[None]] = set()
        self._client = aiohttp.ClientSession(
            timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_UNUSED_S)
        )

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._client.close()

    async def send(self) -> None:
        """Send until cancelled, between :meth:`resume` and :meth:`pause`."""
        due = time.monotonic()
        while True:
            await self._may_send.wait()
            now = time.monotonic()
            # Where this process is behind the rate is what it reaches, without a burst.
            due = max(due, now - _BEHIND_S) + self._random.expovariate(self._rate)
            await asyncio.sleep(due - now)
            if len(self._running) >= _MOST:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._request())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def pause(self) -> None:
        """Send no more, and wait until every request ended."""
        self._may_send.clear()
        self.sending_s += time.monotonic() - self._since
        while self._running:
            await asyncio.wait(self._running)

    def resume(self) -> None:
        self._since = time.monotonic()
        self._may_send.set()

    async def _request(self) -> None:
        draw = self._random.random
        model = HANDED_OVER if draw() < 0.5 else WHOLE
        stream, leaves = draw() < 0.8, draw() < 0.05
        frontend = self._random.choice(sorted(self._site.serving))
        headers = {}
        self.kinds["hand-off" if model == HANDED_OVER else "one engine"] += 1
        self.kinds["stream" if stream else "whole response"] += 1
        text = f"system prompt {self._random.randrange(40)} {_SHARED}{draw()} "
        if draw() < 0.02:
            self.kinds["long prompt"] += 1
            text += _LONG
        if draw() < 0.3:
            self.kinds["session"] += 1
            headers["x-session-id"] = f"session-{self._random.randrange(200)}"
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text + "word " * self._random.randrange(200)}],
            "stream": stream,
            "max_tokens": self._random.randrange(1, 40),
        }
        url = self._site.frontends[frontend].record["url"] + "/v1/chat/completions"
        began = time.monotonic()
        if leaves:
            self.kinds["client that leaves"] += 1
        outcome = await self._outcome(url, body, headers, leaves=leaves)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.outcomes[outcome] += 1

    async def _outcome(
        self, url: str, body: dict[str, Any], headers: dict[str, str], *, leaves: bool
    ) -> str:
        try:
            async with self._client.post(url, json=body, headers=headers) as response:
                if leaves:
                    await response.content.readany()
                    response.close()
                    return "left"
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._loss(f"{type(error).__name__}: {error}")
        if response.status != 200:
            message = _error_message(raw)
            if message is None:
                return self._loss(f"{response.status} without an error: {raw[:200]!r}")
            return self._error(f"error {response.status}", message)
        if b'"error"' in raw:
            return self._error("error event", raw[raw.index(b'"error"') :].decode(errors="replace"))
        if body["stream"] and not raw.rstrip().endswith(b"data: [DONE]"):
            return self._loss(f"stream without an end: {raw[-200:]!r}")
        return "answer"

    def _error(self, outcome: str, message: str) -> str:
        """Keep the first messages of an outcome."""
        messages = self.errors.setdefault(outcome, [])
        if len(messages) < _MESSAGES and message not in messages:
            messages.append(message[:300])
        return outcome

    def _loss(self, text: str) -> str:
        if len(self.lost) < _MOST_LOST:
            self.lost.append(text)
            print(f"lost: {text}", flush=True)
        return "lost"


def _error_message(raw: bytes) -> str | None:
    """The message of an error; None for another body."""
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) and message else None
