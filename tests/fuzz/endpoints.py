"""Mutated bodies, paths and headers to every endpoint of a frontend before a simulated engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from tests.dynctl.serving.fleets import site
from tests.fuzz.decoders import targets
from tests.fuzz.mutator import Message, Mutator

ENDPOINTS: Final = "endpoints"
_TARGETS: Final = {one.name: one for one in targets()}
#: An answer that says "not now" is allowed: another mutant may have made the engine busy.
_EXPECTED_5XX: Final = frozenset({501, 502, 503, 504, 529})
_BOUNDED_S: Final = 60.0
_MOST_DEFECTS: Final = 10
#: Method, path, the decoder whose seeds its bodies come from.
_ROUTES: Final = (
    ("POST", "/v1/chat/completions", "chat"),
    ("POST", "/v1/completions", "completion"),
    ("POST", "/v1/embeddings", "embedding"),
    ("POST", "/v1/route", "chat"),
    ("POST", "/v1/select", "selection"),
    ("POST", "/v1/select_and_book", "selection"),
    ("POST", "/v1/overlap_scores", "selection"),
    ("POST", "/v1/bookings/x/decode", "selection"),
    ("POST", "/v1/bookings/x/first_token", "selection"),
    ("POST", "/v1/bookings/x/output_block", "selection"),
    ("DELETE", "/v1/bookings/x", "selection"),
    ("POST", "/busy_threshold", "busy-threshold"),
    ("POST", "/v1/workers", "worker-row"),
    ("GET", "/v1/workers/x", "worker-spec"),
    ("GET", "/v1/decisions?limit=3", "worker-spec"),
    ("GET", "/v1/decisions/x", "worker-spec"),
    ("GET", "/v1/models/demo", "worker-spec"),
    ("GET", "/v1/config", "worker-spec"),
    ("GET", "/v1/view", "worker-spec"),
)
_HEADERS: Final = ("x-request-id", "x-worker-instance-id", "x-prefill-instance-id", "x-session-id")


@dataclass
class Answers:
    """The statuses of all answers, and the requests that were not handled."""

    statuses: Counter[int] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)


async def fuzz_endpoints(requests: int, seed: int) -> Answers:
    """Send mutants to a frontend; afterwards a chat must be answered and no load be left."""
    answers = Answers()
    choose = random.Random(seed)
    bodies = {name: Mutator(_TARGETS[name].seeds(), seed) for _, _, name in _ROUTES}
    async with site([{"name": "w"}]) as frontend:
        await frontend.connected()
        for number in range(requests):
            method, path, name = choose.choice(_ROUTES)
            message = next(bodies[name])
            headers = {"content-type": "application/json"}
            if choose.random() < 0.2:
                headers[choose.choice(_HEADERS)] = _header(choose)
            if choose.random() < 0.1:
                path += "?limit=" + str(choose.choice((-1, 0, 2**70, "x", "%00", "1e9")))
            status, body = await _send(frontend, method, path, message, headers)
            answers.statuses[status] += 1
            if status >= 500 and status not in _EXPECTED_5XX:
                answers.defects.append(
                    f"request {number}: {method} {path}: {status} {body[:300]!r}"
                )
            if len(answers.defects) >= _MOST_DEFECTS:
                return answers
        status, _, _ = await frontend.chat()
        if status != 200:
            answers.defects.append(f"after all of them a chat is answered with {status}")
        await frontend.idle()
    return answers


async def _send(
    frontend: Any, method: str, path: str, message: Message, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Status and body; an answer within a minute is part of what is tested."""
    async with asyncio.timeout(_BOUNDED_S):
        async with frontend.client.request(
            method, frontend.url(path), data=message[0], headers=headers
        ) as answer:
            return answer.status, await answer.read()


def _header(choose: random.Random) -> str:
    return choose.choice(("", "-1", str(2**70), "x" * 5000, "\x80\xff", "1.5", "nan", "[]", "a b"))
