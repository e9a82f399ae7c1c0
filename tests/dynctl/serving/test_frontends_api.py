"""The router's side of ``serve frontend --router``: leases, repeated and late messages, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.documents.frontends import MAX_PLACES, PROTOCOL, SentRequest, request_of, sent_request
from dynctl.serving.engines.fleet import Fleet
from dynctl.serving.engines.http_client import Upstream
from dynctl.serving.http import frontends as frontends_api
from dynctl.serving.http.errors import error_middleware
from dynctl.serving.http.frontends import FrontendsApi
from dynctl.serving.http.selection import SelectionApi
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.service import RoutingService
from router_core import (
    Pin,
    RouterConfig,
    RoutingConstraints,
    RoutingRequest,
    Session,
    TaintConstraint,
)
from tests.dynctl.serving.routed import request, worker
from tests.waiting import until


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A router without engines, and frontends that are only messages."""

    def __init__(self, client: TestClient[Any, Any], service: RoutingService) -> None:
        self.client = client
        self.service = service
        self.selection: SelectionApi
        self.api: FrontendsApi
        self.clock: Clock
        self.leases: dict[str, str] = {}

    async def send(self, name: str, action: str, **message: Any) -> tuple[int, Any]:
        url = path_of(name, action)
        body = {"lease": self.leases.get(name, ""), **message}
        raw = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        async with self.client.post(url, data=raw, headers=headers) as answer:
            return answer.status, await answer.json()

    async def join(self, name: str) -> Any:
        status, joined = await self.send(name, "join", protocol=PROTOCOL)
        assert status == 200, joined
        self.leases[name] = joined["lease"]
        return joined

    async def place(self, name: str, request_id: str = "r1", **more: Any) -> tuple[int, Any]:
        return await self.send(name, "place", request=sent(request_id=request_id), **more)

    async def report(self, name: str, number: int, *reports: dict[str, Any]) -> tuple[int, Any]:
        return await self.send(name, "exchange", number=number, reports=list(reports))

    async def place_all(self, name: str, places: list[dict[str, Any]]) -> tuple[int, Any]:
        """Place several requests in one message without reports."""
        status, answer = await self.send(name, "exchange", number=0, places=places)
        answer.pop("fleet", None)
        return status, answer

    def running(self) -> dict[int, int]:
        """Worker id -> requests booked there."""
        load, registry = self.service.router.load, self.service.router.registry
        return {
            one.worker_id: sum(load.requests[slot] for slot in registry.slots(one.worker_id))
            for one in registry
        }


@asynccontextmanager
async def rig(*workers: Any) -> AsyncIterator[Rig]:
    clock = Clock()
    service = RoutingService(RouterConfig(), clock=clock, sample=lambda: 0.0, id_prefix="d")
    for one in workers or (worker(1), worker(2)):
        assert service.membership.upsert(one).ok
    config = FrontendConfig()
    fleet = Fleet(service, Upstream(config.limits), config)
    selection = SelectionApi(service)
    api = FrontendsApi(service, fleet, selection)
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(api.routes())
    async with TestClient(TestServer(app)) as client:
        found = Rig(client, service)
        found.selection, found.api, found.clock = selection, api, clock
        yield found


def path_of(name: str, action: str) -> str:
    """The path of a message of a frontend."""
    return f"/v1/frontends/{action if action == 'exchange' else f'{name}/{action}'}"


def sent(**fields: Any) -> SentRequest:
    return sent_request(request(**fields))


def end(request_id: str = "r1", attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": "end", "id": request_id, "attempt": attempt, **more}


# -- one request -------------------------------------------------------------------------------


@pytest.mark.seed("dynamo-1.6: several frontends: select and book in one call")
async def test_a_placement_is_booked_once_however_often_it_is_sent():
    async with rig() as router:
        await router.join("f")
        first = await router.place("f")
        assert first[0] == 200
        assert first[1]["booked"] == ["aggregated"]
        assert await router.place("f") == first
        assert sum(router.running().values()) == 1
        assert len(router.selection) == 1


async def test_a_later_attempt_replaces_the_booking():
    async with rig() as router:
        await router.join("f")
        _, first = await router.place("f")
        failed = first["decode"]["worker_id"]
        other = next(one for one in (1, 2) if one != failed)
        again = sent(request_id="r1", allowed_worker_ids=frozenset({other}))
        status, second = await router.send("f", "place", request=again, attempt=1)
        assert (status, second["decode"]["worker_id"]) == (200, other)
        assert router.running() == {failed: 0, other: 1}
        # What the first attempt reports late changes nothing.
        await router.report("f", 1, end(attempt=0))
        assert router.running() == {failed: 0, other: 1}
        status, _ = await router.place("f", attempt=0)
        assert status == 409
        await router.report("f", 2, end(attempt=1))
        assert router.running() == {failed: 0, other: 0}
        assert len(router.selection) == 0


async def test_the_end_of_a_request_ends_what_an_earlier_attempt_booked():
    """Its client left before the placement of the later attempt was sent, or before it arrives."""
    async with rig() as router:
        await router.join("f")
        await router.place("f")
        await router.report("f", 1, end(attempt=1))
        assert sum(router.running().values()) == len(router.selection) == 0
        status, late = await router.place("f", attempt=1)
        assert (status, late["error"]["code"]) == (409, "ended")
        assert sum(router.running().values()) == 0


@pytest.mark.parametrize("how", ["lease", "request"])
async def test_a_request_that_ended_while_it_waited_is_not_booked_by_its_turn(how: str):
    async with rig(worker(1)) as router:
        router.service.configure({"router_queue_threshold": 0.0})
        await router.join("f")
        await router.join("g")
        assert (await router.place("g", "load"))[0] == 200
        waiting = asyncio.ensure_future(router.place("f"))
        await until(lambda: "r1" in router.service.router.queue)
        if how == "request":
            await router.report("f", 1, end())
        else:
            router.clock.now += frontends_api.LEASE_S - 1
            await router.report("g", 1)
            router.clock.now += 2
            assert router.api.sweep() == 1
        await router.report("g", 2, end("load"))
        status, answer = await waiting
        assert (status, answer["error"]["code"]) == (409, "ended")
        assert sum(router.running().values()) == len(router.selection) == 0


async def test_repeated_reports_count_once():
    async with rig() as router:
        await router.join("f")
        await router.place("f")
        block = {"type": "block", "id": "r1", "attempt": 0, "decay_fraction": None}
        for _ in range(3):
            status, _ = await router.report("f", 1, block)
            assert status == 200
        (one,) = router.service.router.load.bookings("r1")
        assert one.output_blocks == 1
        await router.report("f", 2, block)
        (one,) = router.service.router.load.bookings("r1")
        assert one.output_blocks == 2


async def test_the_first_output_ends_the_prefill_load():
    async with rig() as router:
        await router.join("f")
        await router.place("f")
        (one,) = router.service.router.load.bookings("r1")
        assert one.prefill_tokens == 34
        await router.report("f", 1, {"type": "first", "id": "r1", "attempt": 0})
        (one,) = router.service.router.load.bookings("r1")
        assert one.prefill_tokens == 0


async def test_a_placement_after_its_end_books_nothing(monkeypatch):
    """The client left: its connection is closed, and the report overtakes what it sent."""
    monkeypatch.setattr(frontends_api, "_MAX_ENDED", 2)
    async with rig() as router:
        await router.join("f")
        await router.report("f", 1, end("r1"))
        status, error = await router.place("f", "r1")
        assert (status, error["error"]["code"]) == (409, "ended")
        assert len(router.selection) == 0
        await router.report("f", 2, end("r2"), end("r3"))
        assert (await router.place("f", "r1"))[0] == 200


async def test_each_request_of_a_message_has_its_own_answer():
    async with rig() as router:
        await router.join("f")
        await router.join("g")
        await router.place("g", "theirs")
        await router.report("f", 1, end("gone"))
        requests = [
            sent(request_id="r1"),
            sent(request_id="theirs"),
            sent(request_id="r2", model="other"),
            sent(request_id="gone"),
            sent(request_id="r3", allowed_worker_ids=frozenset({9})),
            sent(request_id="r4"),
        ]
        places = [{"request": one} for one in requests]
        status, found = await router.place_all("f", places)
        assert status == 200
        answers = found["answers"]
        assert [(one.get("status"), one.get("code")) for one in answers] == [
            (None, None),
            (409, "duplicate"),
            (404, "unknown_model"),
            (409, "ended"),
            (None, None),
            (None, None),
        ]
        assert answers[4]["placement"]["decode"]["outcome"] == "no_eligible_worker"
        # One step each: the second one sees the load of the first.
        assert sorted(router.running().values()) == [1, 2]
        assert set(router.selection.bookings) == {"theirs", "r1", "r4"}
        # The same message again has the same answers, and books nothing again.
        assert (await router.place_all("f", places))[1]["answers"] == answers
        assert sum(router.running().values()) == 3


async def test_a_request_of_a_message_that_would_wait_is_not_placed():
    async with rig() as router:
        router.service.configure({"router_queue_threshold": 0.0})
        await router.join("f")
        for number in (1, 2):
            assert (await router.place("f", f"load-{number}"))[0] == 200
        running = router.running()
        places = [{"request": sent(request_id="r1")}, {"request": sent(request_id="r2")}]
        status, found = await router.place_all("f", places)
        assert (status, found) == (200, {"answers": [{"waits": True}, {"waits": True}]})
        assert set(router.selection.bookings) == {"load-1", "load-2"}
        assert len(router.service.router.queue) == 0
        assert router.running() == running


async def test_reports_of_a_message_count_for_its_requests():
    """A request that ended makes room for those that arrive with the report."""
    async with rig() as router:
        await router.join("f")
        _, first = await router.place("f", "r1")
        message = {"reports": [end("r1")], "places": [{"request": sent(request_id="r2")}]}
        status, found = await router.send("f", "exchange", number=1, **message)
        assert status == 200
        decode = found["answers"][0]["placement"]["decode"]
        assert decode.get("active_requests", 0) == first["decode"].get("active_requests", 0) == 0
        assert set(router.selection.bookings) == {"r2"}
        # The same message again: its reports change nothing, its requests have the same answers.
        assert (await router.send("f", "exchange", number=1, **message))[1] == found
        assert sum(router.running().values()) == 1


async def test_a_message_has_a_maximum_of_placements():
    async with rig() as router:
        await router.join("f")
        places = [{"request": sent(request_id=f"r{n}")} for n in range(MAX_PLACES + 1)]
        _, found = await router.place_all("f", places)
        assert len(found["answers"]) == len(router.selection) == MAX_PLACES


def test_a_request_arrives_as_it_was_sent():
    """A field that is added to a request has to be sent too."""
    whole = RoutingRequest(
        "r1", "m", 80, 16, (0, 2**64 - 1), RoutingConstraints((TaintConstraint("a", "required"),)),
        Pin(1, 0), Pin(2), frozenset({1, 2}), "set", True, False, ("note",), "lora", True, (3, 4),
        ((5,), (6, 7)), (32, 16, 32), "class", 1, 2, 5.0, Session("key", 5.0), True, "name", False,
        ((3, "failed"),),
    )  # fmt: skip
    plain = RoutingRequest("r2", "other", 0, 16)
    fields = RoutingRequest.__slots__
    same = [name for name in fields if getattr(whole, name) == getattr(plain, name)]
    assert same == ["block_size"]
    for one in (whole, plain):
        raw = msgspec.json.encode(sent_request(one))
        session = None if one.session is None else Session("key", 7.0)
        arrived = request_of(msgspec.json.decode(raw, type=SentRequest), 16, 7.0)
        assert arrived == replace(one, arrived_at=7.0, session=session)


async def test_times_are_those_of_the_router():
    async with rig() as router:
        await router.join("f")
        early = sent(request_id="r1", arrived_at=5.0, session=Session("key", 5.0))
        assert (await router.send("f", "place", request=early))[0] == 200
        booked = router.selection.bookings["r1"].request
        assert booked.session == Session("key", router.clock.now)
        assert booked.arrived_at == router.clock.now


async def test_a_dry_placement_books_nothing():
    async with rig() as router:
        await router.join("f")
        status, found = await router.place("f", dry=True)
        assert (status, found.get("booked", [])) == (200, [])
        assert found["decode"]["worker_id"] in (1, 2)
        assert sum(router.running().values()) == 0


async def test_a_refusal_books_nothing_and_has_its_reasons():
    async with rig() as router:
        await router.join("f")
        wanted = sent(request_id="r1", allowed_worker_ids=frozenset({9}))
        status, found = await router.send("f", "place", request=wanted)
        assert status == 200
        assert "worker_id" not in found["decode"]
        assert found["decode"]["outcome"] == "no_eligible_worker"
        rejected = found["decode"]["funnel"][-1]["rejected"]
        assert {row["reason"]["code"] for row in rejected} == {"not_allowed"}
        assert len(router.selection) == 0


async def test_decode_is_placed_when_prefill_is_done():
    async with rig(worker(1, "prefill"), worker(2, "decode"), worker(3, "decode")) as router:
        await router.join("f")
        _, found = await router.place("f")
        assert found["booked"] == ["prefill"]
        assert router.running() == {1: 1, 2: 0, 3: 0}
        status, placed = await router.send("f", "decode", id="r1", attempt=0)
        assert (status, placed["booked"]) == (200, ["decode"])
        first = placed["decode"]["worker_id"]
        # Another one after a failure: the first one is free again.
        other = 5 - first
        status, placed = await router.send("f", "decode", id="r1", attempt=0, allowed=[1, other])
        assert (status, placed["decode"]["worker_id"]) == (200, other)
        assert router.running() == {1: 0, first: 0, other: 1}
        status, error = await router.send("f", "decode", id="r2", attempt=0)
        assert (status, error["error"]["code"]) == (404, "unknown_booking")


# -- leases ------------------------------------------------------------------------------------


@pytest.mark.seed("dynamo-1.6: several frontends: loss of a frontend")
async def test_a_lease_ends_with_its_bookings_and_no_others():
    async with rig() as router:
        await router.join("dead")
        await router.join("alive")
        await router.place("dead", "r1")
        await router.place("alive", "r2")
        router.clock.now += frontends_api.LEASE_S - 1
        await router.report("alive", 1)
        router.clock.now += 2
        assert router.api.sweep() == 1
        assert list(router.selection.bookings) == ["r2"]
        assert sum(router.running().values()) == 1
        status, error = await router.place("dead", "r3")
        assert (status, error["error"]["code"]) == (410, "lease_ended")


async def test_joining_again_ends_what_was_booked_before():
    async with rig() as router:
        await router.join("f")
        await router.place("f")
        old = router.leases["f"]
        await router.join("f")
        assert sum(router.running().values()) == 0
        new, router.leases["f"] = router.leases["f"], old
        assert (await router.place("f"))[0] == 410
        router.leases["f"] = new
        assert (await router.place("f"))[0] == 200


async def test_running_requests_are_booked_under_a_new_lease():
    async with rig() as router:
        await router.join("f")
        _, placed = await router.place("f")
        hop = placed["decode"]
        await router.join("f")
        running = {
            "request": sent(request_id="r1"),
            "attempt": 3,
            "hops": [hop],
            "first_output": True,
        }
        gone = {**running, "request": sent(request_id="r2"), "hops": [{**hop, "worker_id": 9}]}
        # Twice: the answer was lost.
        for booked in (1, 0):
            answer = await router.send("f", "resume", running=[running, gone])
            assert answer == (200, {"booked": booked})
        (one,) = router.service.router.load.bookings("r1")
        assert (one.prefill_tokens, router.running()[hop["worker_id"]]) == (0, 1)
        await router.report("f", 1, end(attempt=3))
        assert sum(router.running().values()) == 0


async def test_a_running_request_of_a_model_that_left_keeps_no_other_from_its_booking():
    async with rig() as router:
        await router.join("f")
        _, placed = await router.place("f")
        hop = placed["decode"]
        await router.join("f")
        rest = {"attempt": 0, "hops": [hop], "first_output": False}
        running = [
            {"request": sent(request_id="r1", model="left"), **rest},
            {"request": sent(request_id="r2"), **rest},
        ]
        assert await router.send("f", "resume", running=running) == (200, {"booked": 1})
        assert not router.service.router.load.bookings("r1")
        assert len(router.service.router.load.bookings("r2")) == 1


async def test_a_frontend_touches_only_its_own_bookings():
    async with rig() as router:
        await router.join("f")
        await router.join("g")
        await router.place("f")
        await router.report("g", 1, end(), {"type": "alive", "ids": ["r1"]})
        assert len(router.selection) == 1
        assert (await router.place("g"))[0] == 409


async def test_requests_that_run_long_do_not_expire():
    async with rig() as router:
        await router.join("f")
        await router.place("f", "r1")
        await router.place("f", "r2")
        for number in range(1, 40):
            router.clock.now += 9
            await router.report("f", number, {"type": "alive", "ids": ["r1"]})
            router.service.expire()
            router.selection.sweep()
        assert list(router.selection.bookings) == ["r1"]
        assert sum(router.running().values()) == 1


async def test_the_fleet_has_a_new_version_when_it_changes():
    async with rig() as router:
        joined = await router.join("f")
        assert len(joined["fleet"]["cards"]) == 2
        _, same = await router.report("f", 1)
        assert same["fleet"] == joined["fleet"]["version"]
        router.service.membership.set_available(1, "no response for 3 s")
        router.clock.now += 1
        _, changed = await router.report("f", 2)
        assert changed["fleet"] != same["fleet"]
        _, fleet = await router.send("f", "fleet")
        assert [card["reason"] for card in fleet["cards"]] == ["no response for 3 s", None]


async def test_a_full_router_and_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(frontends_api, "MAX_FRONTENDS", 1)
    async with rig() as router:
        await router.join("f")
        status, error = await router.send("g", "join", protocol=PROTOCOL)
        assert (status, error["error"]["code"]) == (503, "too_many_frontends")
        for other in (PROTOCOL - 1, PROTOCOL + 1):
            status, error = await router.send("h", "join", protocol=other, version="9.9")
            assert (status, error["error"]["code"]) == (409, "other_protocol")
            assert "9.9" in error["error"]["message"]


# -- any order -----------------------------------------------------------------------------------

_IDS = st.sampled_from(["r1", "r2", "r3"])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["place", "places"]), _IDS, st.integers(0, 2)),
        st.tuples(st.just("decode"), _IDS, st.integers(0, 2)),
        st.tuples(st.just("first"), _IDS, st.integers(0, 2)),
        st.tuples(st.just("end"), _IDS, st.integers(0, 2)),
        st.tuples(st.just("end prefill"), _IDS, st.integers(0, 2)),
        st.tuples(st.sampled_from(["join", "again", "expire"]), _IDS, st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(_STEPS, st.booleans())
def test_whatever_arrives_each_booking_is_one_and_all_end(steps, disaggregated):
    """Messages in any order: a request is booked at most once on a hop, its load is that of its
    bookings, and nothing is left when its frontend is gone."""

    async def run() -> None:
        workers = [worker(1), worker(2)]
        if disaggregated:
            workers = [worker(1, "prefill"), worker(2, "decode"), worker(3, "decode")]
        async with rig(*workers) as router:
            await router.join("f")
            number = 0
            for action, request_id, attempt in steps:
                number += 1
                match action:
                    case "place":
                        status, _ = await router.place("f", request_id, attempt=attempt)
                        assert status in (200, 409)
                    case "places":
                        places = [
                            {"request": sent(request_id=one), "attempt": attempt}
                            for one in (request_id, "r3")
                        ]
                        status, _ = await router.place_all("f", places)
                        assert status == 200
                    case "decode":
                        await router.send("f", "decode", id=request_id, attempt=attempt)
                    case "first":
                        row = {"type": "first", "id": request_id, "attempt": attempt}
                        await router.report("f", number, row)
                    case "end":
                        await router.report("f", number, end(request_id, attempt))
                    case "end prefill":
                        row = end(request_id, attempt, stage="prefill")
                        await router.report("f", number, row)
                    case "join":
                        await router.join("f")
                        number = 0
                    case "again":  # the last message, repeated
                        await router.report("f", number, end(request_id, 0))
                    case "expire":
                        router.clock.now += 1.0
                        router.api.sweep()
                load = router.service.router.load
                booked = [hop for one in ("r1", "r2", "r3") for hop in load.bookings(one)]
                assert len(booked) == sum(router.running().values())
                for one in ("r1", "r2", "r3"):
                    stages = [hop.stage for hop in load.bookings(one)]
                    assert len(stages) == len(set(stages))
                    assert not stages or one in router.selection.bookings
            router.clock.now += frontends_api.LEASE_S + 1
            router.api.sweep()
            assert sum(router.running().values()) == 0
            assert len(router.selection) == 0

    asyncio.run(run())


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"isl_tokens": -1}, "isl_tokens"),
        ({"isl_tokens": 2**40}, "isl_tokens"),
        ({"isl_tokens": "many"}, "isl_tokens"),
        ({"block_size": 32}, "block_size"),
        ({"sequence_hashes": [1, 2]}, "sequence_hashes"),
        ({"sequence_hashes": "no base64"}, "sequence_hashes"),
        ({"sequence_hashes": bytes(15)}, "sequence_hashes"),
        ({"sequence_hashes": bytes(3 * 8)}, "sequence_hashes"),
        ({"local_hashes": bytes(8)}, "local_hashes"),
        ({"more_hashes": [bytes(9)]}, "more_hashes"),
        ({"id": ""}, "id"),
        ({"id": "x" * 300}, "id"),
        ({"id": "\x00"}, "id"),
        ({"model": "other"}, "model"),
        ({"pin_decode": {"worker_id": "a"}}, "pin_decode"),
        ({"constraints": {"items": [{"taint": "x", "kind": "loved"}]}}, "constraints"),
    ],
    ids=str,
)
async def test_an_invalid_request_is_named_and_books_nothing(changes, problem):
    async with rig() as router:
        await router.join("f")
        plain = msgspec.to_builtins(sent(request_id="r1"))
        status, error = await router.send("f", "place", request={**plain, **changes})
        assert status in (400, 404), error
        assert problem in error["error"]["message"]
        assert len(router.selection) == 0


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"lease": 1}', b"[" * 5000, b"\xff", b'{"lease":"x"}']
)
@pytest.mark.parametrize("action", ["join", "place", "exchange", "decode", "resume", "leave"])
async def test_a_message_that_is_none(action, body):
    async with rig() as router:
        url = path_of("f", action)
        headers = {"content-type": "application/json"}
        async with router.client.post(url, data=body, headers=headers) as answer:
            assert answer.status in (400, 410), await answer.text()
            assert (await answer.json())["error"]["message"]
