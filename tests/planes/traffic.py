"""Requests at a steady rate while something fails, and what became of each."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.dynamo.client import FrontendClient


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` 0: no response. ``at`` and ``seconds``: when it was sent, and how long it took."""

    status: int
    at: float
    seconds: float
    message: str = ""


@dataclass(slots=True)
class Traffic:
    """The outcomes so far; complete after the end of :func:`traffic`."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(outcome.status for outcome in self.outcomes)

    @property
    def lost(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status != 200]

    @property
    def slowest(self) -> float:
        return max((outcome.seconds for outcome in self.outcomes), default=0.0)


@contextmanager
def traffic(frontend: FrontendClient, rate: float = 20, clients: int = 40) -> Iterator[Traffic]:
    """Send ``rate`` requests a second with different prompts until the end of the block."""
    result, over = Traffic(), threading.Event()
    numbers = itertools.count(3)

    def send(prompt: list[int]) -> None:
        began = time.monotonic()
        try:
            answer = frontend.complete(prompt, timeout=60)
            status, error = answer.status, answer.body.get("error") or {}
            message = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        except OSError as problem:
            status, message = 0, str(problem)
        took = time.monotonic() - began
        result.outcomes.append(Outcome(status, began, took, message))

    def keep_sending(pool: ThreadPoolExecutor) -> None:
        while not over.wait(1 / rate):
            number = next(numbers)
            pool.submit(send, [3 + number % 300, 3 + number // 300, *range(3, 60)])

    with ThreadPoolExecutor(clients) as pool:
        sender = threading.Thread(target=keep_sending, args=(pool,))
        sender.start()
        try:
            yield result
        finally:
            over.set()
            sender.join()
