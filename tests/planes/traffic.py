"""Requests at a steady rate while something fails, and what became of each.

:class:`Scores` keeps what becomes of the requests to our frontend and, at the same time, to
Dynamo's: ``make test-planes ARGS=--record`` writes them, and docs/reliability.md is made of them.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict

from tests.dynamo.client import FrontendClient

SCORES: Final = Path(__file__).with_name("scores.json")

#: No prompt is sent twice: a worker that has it already would get it again, and no other worker.
_NUMBERS: Final = itertools.count(3)


class Side(TypedDict):
    """What one frontend did with its requests."""

    sent: int
    lost: int
    slowest_s: float


class Score(TypedDict):
    """One fault; ``dynamo`` is None where its frontend did not have it. ``right_s``: seconds after
    which our frontend had the right workers; None where it had them all the time."""

    fault: str
    ours: Side
    dynamo: Side | None
    right_s: float | None


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
    right_s: float | None = None

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
    """Send ``rate`` requests a second until the end of the block."""
    result, over = Traffic(), threading.Event()

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
            number = next(_NUMBERS)
            pool.submit(send, [3 + number % 300, 3 + number // 300, *range(3, 60)])

    with ThreadPoolExecutor(clients) as pool:
        sender = threading.Thread(target=keep_sending, args=(pool,))
        sender.start()
        try:
            yield result
        finally:
            over.set()
            sender.join()


class Scores:
    """The rows of docs/reliability.md."""

    def __init__(self) -> None:
        self._runs: list[tuple[str, Traffic, Traffic | None]] = []

    @contextmanager
    def traffic(
        self,
        fault: str,
        ours: FrontendClient,
        beside: FrontendClient | None = None,
        *,
        rate: float = 20,
        clients: int = 40,
    ) -> Iterator[Traffic]:
        """As :func:`traffic`, with a row for the page. ``beside``: Dynamo's frontend, which gets
        requests at the same time."""
        theirs = None
        with ExitStack() as stack:
            requests = stack.enter_context(traffic(ours, rate, clients))
            if beside is not None:
                theirs = stack.enter_context(traffic(beside, rate, clients))
            yield requests
        self.add(fault, requests, theirs)

    def add(self, fault: str, ours: Traffic, dynamo: Traffic | None = None) -> None:
        """A row for the page of requests that were not sent here."""
        self._runs.append((fault, ours, dynamo))

    def write(self) -> None:
        """Write one row for each fault; those of faults that did not run here stay."""
        own: dict[str, Score] = {}
        for fault, requests, theirs in self._runs:
            row = _score(fault, requests, theirs)
            known = own.setdefault(fault, row)
            if known is not row:
                _add(known["ours"], row["ours"])
                if known["dynamo"] is not None and row["dynamo"] is not None:
                    _add(known["dynamo"], row["dynamo"])
        with SCORES.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process of the run has its own
            rows = {row["fault"]: row for row in json.load(file)} | own
            file.seek(0)
            file.truncate()
            file.write(json.dumps(list(rows.values()), indent=1) + "\n")


def _score(fault: str, ours: Traffic, dynamo: Traffic | None) -> Score:
    return {
        "fault": fault,
        "ours": _side(ours),
        "dynamo": None if dynamo is None else _side(dynamo),
        "right_s": None if ours.right_s is None else round(ours.right_s, 1),
    }


def _side(requests: Traffic) -> Side:
    return {
        "sent": len(requests.outcomes),
        "lost": len(requests.lost),
        "slowest_s": round(requests.slowest, 1),
    }


def _add(side: Side, more: Side) -> None:
    side["sent"] += more["sent"]
    side["lost"] += more["lost"]
    side["slowest_s"] = max(side["slowest_s"], more["slowest_s"])
