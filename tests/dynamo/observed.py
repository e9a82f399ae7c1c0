"""An observer of a fleet, and predictions out of it, for the tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dynctl.adapters.dynamo.planes import open_planes
from dynctl.base.options import GlobalOptions
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import SavedView
from dynctl.serving.dynamo.observer import Observer
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from router_core import Router
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import DynamoFleet
from tests.waiting import patience, slowdown

QUIET_SECONDS = 0.06
"""Events of a finished request have reached us, and Dynamo's own router, when none came so long,
while every process had time to run."""


class Observed:
    """A fleet's observer. ``changes`` counts what it applied."""

    def __init__(self, observer: Observer, fleet: DynamoFleet) -> None:
        self.observer = observer
        self.changes = 0
        self._fleet = fleet

    @property
    def router(self) -> Router:
        return self.observer.router

    def noted(self, _: Any) -> None:
        self.changes += 1

    async def quiet(self, seconds: float = QUIET_SECONDS) -> None:
        """Until nothing has changed for so long and everything is applied.

        Time counts only while the fleet's processes, and this one, were not held up: what a worker
        has not published yet is not quiet.
        """
        began = time.monotonic()
        while time.monotonic() - began < patience(30):
            await self.observer.settled()
            changes, start = self.changes, time.monotonic()
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self._fleet.all_respond)
            # One of them was held up longer than load alone does: what it has to publish may come.
            held_up = time.monotonic() - start > seconds * (1 + slowdown())
            await self.observer.settled()
            if self.changes == changes and not held_up:
                return
        raise TimeoutError("the fleet did not become quiet")

    def predict(self, tokens: Sequence[int], **settings: Any) -> RouteResult:
        """What ``route`` answers for this prompt now."""
        view = SavedView(self.router, time.monotonic(), "dynamo-1.6", source="test")
        assignments = tuple(f"{name}={value}" for name, value in settings.items())
        query = RouteQuery(token_ids=list(tokens), assignments=assignments)
        return ViewSource(view, "test").route(query)


@asynccontextmanager
async def observing(
    fleet: DynamoFleet, *, options: GlobalOptions | None = None, **more: Any
) -> AsyncIterator[Observed]:
    """Observe a fleet from now on, settled."""
    planes = open_planes(
        options
        or GlobalOptions(
            discovery="file",
            file_kv=fleet.file_kv,
            nats_server=fleet.environment.get("NATS_SERVER"),
        )
    )
    holder: list[Observed] = []
    observer = Observer(
        planes,
        on_change=lambda change: holder[0].noted(change),
        **more,
    )
    holder.append(Observed(observer, fleet))
    async with observer:
        await asyncio.wait_for(observer.settled(), patience(20))
        yield holder[0]


def stored_events(frontend: FrontendClient) -> int:
    """Stored events that a frontend's index has applied."""
    _, text = frontend.get("/metrics")
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in text.splitlines()
        if line.startswith("dynamo_component_kv_cache_events_applied") and '"stored"' in line
    )


def possible(result: RouteResult) -> set[tuple[int | None, int]]:
    """(prefill worker, decode worker) pairs that the prediction allows: exact ties are any of them.

    Aggregated: the same worker twice, as Dynamo reports it.
    """
    if result.prefill is None:
        decision = result.decode
        assert decision is not None
        assert decision.winner is not None
        tied = decision.tied or [decision.winner]
        return {(ref.worker_id, ref.worker_id) for ref in tied}
    pairs: set[tuple[int | None, int]] = set()
    for prefill_id, decision in _hops(result):
        assert decision.winner is not None, decision.outcome
        for ref in decision.tied or [decision.winner]:
            pairs.add((prefill_id, ref.worker_id))
    return pairs


def _hops(result: RouteResult) -> list[tuple[int, Any]]:
    if result.decode_by_prefill:
        return [(item.prefill.worker_id, item.decode) for item in result.decode_by_prefill]
    assert result.prefill is not None
    assert result.prefill.winner is not None
    return [(result.prefill.winner.worker_id, result.decode)]
