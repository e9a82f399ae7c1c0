"""A router as a component of Dynamo, without a Dynamo: the ids of its requests."""

from __future__ import annotations

from typing import Any

from dynctl.serving.dynamo.component import RouterComponent, _WorkerPrompt
from dynctl.serving.http.selection import SelectionApi
from dynctl.serving.routing.config import Limits
from dynctl.serving.routing.service import RoutingService
from dynctl.wire.dynamo.discovery import EndpointId
from router_core import Enqueued, RouterConfig
from tests.dynctl.serving.routed import worker


async def test_a_request_whose_id_is_in_use_gets_another_one() -> None:
    """Ids are those of the clients of a frontend; one that waits in the router queue is in use."""
    service = RoutingService(RouterConfig(router_queue_threshold=0.0), id_prefix="d")
    assert service.membership.upsert(worker(1)).ok
    bookings, nothing = SelectionApi(service), _Nothing()
    endpoint = EndpointId("dynamo", "backend", "generate")
    component = RouterComponent(
        service, nothing, bookings, nothing, nothing, endpoint, "127.0.0.1", Limits()
    )
    prompt = _WorkerPrompt(token_ids=list(range(40)))
    booked, waiting = (component._request(prompt, name) for name in ("booked", "waiting"))
    assert (booked.id, waiting.id) == ("booked", "waiting")
    plan, _ = await bookings.place(booked, lambda _: False)
    assert plan.ok
    assert service.apply(Enqueued("waiting", waiting.model, "default", 40, 0, 0.0)).ok
    for name in ("booked", "waiting"):
        assert component._request(prompt, name).id != name
    assert component._request(prompt, "other").id == "other"


class _Nothing:
    """Stands for what this test does not reach."""

    title = "nothing"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)
