"""The steps of the demo: four requests and the routing decision of each.

Every step sends a real request to the frontend and reads its decision.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx

from dynctl.documents.codec import decode
from dynctl.documents.demo import DemoStep
from dynctl.documents.route_result import RouteResult
from dynctl.simulation.demo.fleet import DemoError, DemoFleet

MODEL = "demo"
QUESTION = (
    "Explain how a router decides which worker should serve a request when the prompt's prefix is "
    "already in a worker's KV cache, and what changes when prefill and decode run on different "
    "machines in different zones."
)
FOLLOW_UP = QUESTION + " Then say it again for a reader who has never operated a cluster."
#: On a busy machine nine processes share two cores.
_SETTLE_SECONDS = 20.0


def run_steps(fleet: DemoFleet, timeout: float = 20.0) -> Iterator[DemoStep]:
    """Run the steps with a running fleet. Raises DemoError if a step fails."""
    with httpx.Client(base_url=fleet.url, timeout=timeout) as client:
        _await_workers(client, ready=len(fleet.engines))
        first = _request(
            client,
            1,
            "A request in two hops",
            "Prefill is chosen by cache and load; its zone then binds decode (policy: required).",
            QUESTION,
        )
        yield first
        served = first.route.winner.prefill
        if served is None:
            raise DemoError(f"the first request was not served: {first.answer}")
        _await_cached(client, served.worker)
        yield _request(
            client,
            2,
            "The same beginning again",
            f"{served.worker} now has the prefix in its KV cache and published KV events.",
            FOLLOW_UP,
        )
        zone = _zone_of(first)
        lost = [n for n in fleet.engines if n.startswith("decode-") and n[-2] == zone[-1]]
        for name in lost:
            fleet.stop(name)
        _await_workers(client, ready=len(fleet.engines) - len(lost))
        yield _request(
            client,
            3,
            f"{zone} loses its decode workers",
            f"Killed {' and '.join(lost)}. The cache is still in {zone}, but no worker there can "
            "decode: the decode-capacity guard moves the request.",
            FOLLOW_UP,
        )
        yield _request(
            client,
            4,
            f"A request bound to {zone}",
            f"It requires dynamo.topology/zone={zone}: refused before any work is dispatched.",
            FOLLOW_UP,
            required=[f"dynamo.topology/zone={zone}"],
        )


def _request(
    client: httpx.Client,
    number: int,
    title: str,
    doing: str,
    text: str,
    required: list[str] | None = None,
) -> DemoStep:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
    }
    if required:
        body["nvext"] = {"routing_constraints": {"required_taints": required}}
    started = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - started
    document = response.json()
    if response.status_code == 200:
        answer = str(document["choices"][0]["message"]["content"])
    else:
        answer = str(document["error"]["message"])
    decision = response.headers.get("x-dynctl-decision")
    if decision is None:
        raise DemoError(f"{title}: the frontend answered without a decision: {answer}")
    explained = client.get(f"/v1/decisions/{decision}")
    if explained.status_code != 200:
        raise DemoError(f"{title}: decision {decision} is not available: {explained.text[:200]}")
    route = decode(explained.content, RouteResult)
    return DemoStep(number, title, doing, response.status_code, answer, route, seconds)


def _zone_of(step: DemoStep) -> str:
    hop = step.route.decode
    winner = step.route.winner.decode
    if hop is None or winner is None:
        raise DemoError(f"{step.title}: no decode worker was chosen")
    row = next(row for row in hop.candidates if row.worker == winner.worker)
    return row.domains["zone"]


def _await_workers(client: httpx.Client, ready: int) -> None:
    """Wait until the frontend has exactly ``ready`` ready workers."""
    seen = 0

    def is_ready() -> bool:
        nonlocal seen
        rows = client.get("/v1/workers").json()["workers"]
        seen = sum(row["status"] == "ready" for row in rows)
        return seen == ready

    _until(is_ready, lambda: f"expected {ready} ready workers, the frontend has {seen}")


def _await_cached(client: httpx.Client, name: str) -> None:
    """Wait until the KV events of a worker arrive: then its index is not empty."""

    def has_cached_blocks() -> bool:
        rows = client.get("/v1/workers").json()["workers"]
        row = next(row for row in rows if row["name"] == name)
        return any(rank["cached_blocks"] for rank in row["ranks"])

    _until(has_cached_blocks, lambda: f"no KV event of {name} arrived")


def _until(done: Any, what: Any) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise DemoError(f"{what()} after {_SETTLE_SECONDS:g} s")
        time.sleep(0.05)
