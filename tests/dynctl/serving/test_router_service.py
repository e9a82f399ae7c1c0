"""The standalone router over real sockets: selections, bookings, and what becomes of them."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from dynctl.base.tasks import SLICE, drained
from dynctl.serving.http import selection as selection_api
from dynctl.serving.http.errors import error_middleware
from dynctl.serving.http.selection import SelectionApi
from dynctl.serving.records.decision_memory import DecisionMemory
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.services.router_server import build_router
from router_core import (
    BlocksStored,
    KvEvent,
    LoadReported,
    RouterConfig,
    hash_prompt,
    to_signed,
)
from tests.dynctl.serving.routed import store, worker
from tests.ports import free_port
from tests.waiting import patience, until_now

TOKENS = list(range(34))
ZONE = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def routing(*workers, token=None, **settings):
    """(client, service, api, clock) of a selection API over a fleet that is not there."""
    clock = Clock()
    service = RoutingService(
        RouterConfig().with_values(settings), clock=clock, sample=lambda: 0.0, id_prefix="d"
    )
    for one in workers or (worker(1), worker(2)):
        assert service.membership.upsert(one).ok
    api = SelectionApi(service, token=token)
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(api.routes())
    async with TestClient(TestServer(app)) as client:
        yield client, service, api, clock


def zoned():
    return (
        worker(1, "prefill", zone="a", policy=ZONE),
        worker(2, "prefill", zone="b", policy=ZONE),
        worker(3, "decode", zone="a"),
        worker(4, "decode", zone="b"),
    )


async def loads(client):
    rows = (await (await client.get("/v1/loads")).json())["loads"]
    return {
        row["worker_id"]: (row["active_requests"], row["active_prefill_tokens"],
                           row["active_decode_blocks"])
        for row in rows
    }  # fmt: skip


# -- selecting ---------------------------------------------------------------------------------


async def test_speculative_workers_complete_a_block_with_the_token_behind_it():
    fast = worker(2)
    runtime = replace(fast.runtime_config, enable_eagle=True)
    async with routing(worker(1), replace(fast, runtime_config=runtime)) as (client, service, *_):
        hashed = hash_prompt(TOKENS, 16, is_eagle=True)
        stored = BlocksStored(None, hashed.sequence, hashed.local)
        assert service.router.apply(KvEvent(2, 0, stored), 0.0).ok
        for tokens, blocks in ((TOKENS, 2), (TOKENS[:32], 1)):
            body = {"token_ids": tokens, "request_id": f"r{blocks}"}
            found = await (await client.post("/v1/select_and_book", json=body)).json()
            assert found["decode"]["overlap_blocks"] == blocks
            service.free(f"r{blocks}")


def test_what_depends_on_all_workers_is_found_once_for_many_that_come(monkeypatch):
    service = RoutingService(RouterConfig(), clock=Clock(), sample=lambda: 0.0, id_prefix="d")
    updates = []
    update = service.served.update

    def counted(now: float) -> None:
        updates.append(now)
        update(now)

    monkeypatch.setattr(service.served, "update", counted)
    with service.changing_many_workers():
        for number in range(1, 50):
            assert service.membership.upsert(worker(number)).ok
        assert service.membership.upsert(replace(worker(50), block_size=64)).ok
    assert len(updates) == 1
    assert service.served.block_size(worker(1).model) == worker(1).block_size
    assert [c.subject for c in service.conditions if c.code == "BLOCK_SIZE_MISMATCH"] == [
        "aggregated-50"
    ]
    service.membership.remove(50)
    assert not [c for c in service.conditions if c.code == "BLOCK_SIZE_MISMATCH"]


async def test_selections_of_a_session_go_to_one_worker():
    async with routing(router_session_affinity_ttl_secs=60.0) as (client, service, _, clock):
        chosen = []
        for number in range(4):
            service.sample = lambda number=number: number / 4
            body = {"token_ids": [number] * 34, "session_id": "s", "request_id": f"r{number}"}
            answer = await client.post("/v1/select_and_book", json=body)
            assert answer.status in (200, 201), await answer.text()
            chosen.append((await answer.json())["decode"]["worker"])
        assert len(set(chosen)) == 1
        assert len(service.router.sessions) == 1
        clock.now += 100
        service.free("r0")
        body = {"token_ids": TOKENS, "session_id": "x" * 300}
        answer = await client.post("/v1/select", json=body)
        assert answer.status == 400
        assert "session_id" in await answer.text()


async def test_a_dry_selection_books_nothing():
    async with routing() as (client, service, api, _):
        store(service.router, 2, range(32))
        answer = await client.post("/v1/select", json={"token_ids": TOKENS})
        assert answer.status == 200
        got = await answer.json()
        assert got["decode"] == {
            "worker": "aggregated-2", "worker_id": 2, "dp_rank": 0, "stage": "aggregated",
            "endpoint": None, "domains": {}, "overlap_blocks": 2, "prefill_tokens": 2,
            "cost": 2.125, "margin": 2.0,
        }  # fmt: skip
        assert (got["prefill"], got["booked"]) == (None, [])
        assert (got["tokens"], got["block_size"], got["blocks"]) == (34, 16, 2)
        assert len(api) == 0
        assert await loads(client) == {1: (0, 0, 0), 2: (0, 0, 0)}


@pytest.mark.parametrize("name", ["token_ids", "block_hashes", "sequence_hashes", "signed"])
async def test_tokens_and_hashes_name_the_same_prompt(name):
    hashed = hash_prompt(TOKENS, 16)
    body = {
        "token_ids": {"token_ids": TOKENS},
        "block_hashes": {"block_hashes": hashed.local, "isl_tokens": 34},
        "sequence_hashes": {"sequence_hashes": hashed.sequence, "isl_tokens": 34},
        "signed": {"sequence_hashes": [to_signed(h) for h in hashed.sequence], "isl_tokens": 34},
    }[name]
    async with routing() as (client, service, _, _):
        store(service.router, 2, TOKENS)
        got = await (await client.post("/v1/select", json=body)).json()
        assert got["decode"]["worker_id"] == 2
        assert got["decode"]["overlap_blocks"] == 2


async def test_both_hops_and_what_prefill_implies():
    async with routing(*zoned()) as (client, service, _, _):
        store(service.router, 2, range(32))
        got = await (await client.post("/v1/select", json={"token_ids": TOKENS})).json()
        assert (got["prefill"]["worker"], got["decode"]["worker"]) == ("prefill-2", "decode-4")
        assert got["decode"]["prefill_tokens"] == 0
        assert got["implied"] == [
            {"taint": "dynamo.topology/zone=b", "kind": "required", "weight": None,
             "origin": "kv-transfer policy of worker prefill-2"},
        ]  # fmt: skip


async def test_pins_allowed_sets_and_constraints():
    async with routing(worker(1, zone="a"), worker(2, zone="b")) as (client, _, _, _):
        for body in (
            {"pins": {"decode": "aggregated-2"}},
            {"pins": {"decode": 2}},
            {"pins": {"decode": {"worker_id": 2, "dp_rank": 0}}},
            {"pinned_worker": {"worker_id": 2, "dp_rank": 0}},
            {"allowed_worker_ids": [2]},
            {"allowed_worker_ids": ["aggregated-2"]},
            {"constraints": {"required_taints": ["dynamo.topology/zone=b"]}},
            {"routing_constraints": {"preferred_taints": {"dynamo.topology/zone=b": 0.9}}},
        ):
            answer = await client.post("/v1/select", json={"token_ids": TOKENS, **body})
            assert (await answer.json())["decode"]["worker_id"] == 2, body


async def test_cache_salt_keeps_tenants_apart():
    async with routing() as (client, service, _, _):
        store(service.router, 2, TOKENS)
        body = {"token_ids": TOKENS, "cache_salt": "tenant"}
        got = await (await client.post("/v1/select", json=body)).json()
        assert got["decode"]["overlap_blocks"] == 0


async def test_a_long_prompt_is_hashed_beside_the_loop(monkeypatch):
    from dynctl.serving.http import selection_request

    threads = []

    def hashed(*given, **more):
        threads.append(threading.get_ident())
        return hash_prompt(*given, **more)

    monkeypatch.setattr(selection_request, "hash_prompt", hashed)
    async with routing() as (client, service, _, _):
        store(service.router, 2, TOKENS)
        for more in ([], [7] * 40_000):
            body = {"token_ids": [*TOKENS, *more]}
            got = await (await client.post("/v1/select", json=body)).json()
            assert got["decode"]["overlap_blocks"] == 2
    assert [one == threading.get_ident() for one in threads] == [True, False]


async def test_refusals_explain_themselves():
    async with routing() as (client, _, _, _):
        body = {"token_ids": TOKENS, "constraints": {"required_taints": ["gpu=b200"]}}
        answer = await client.post("/v1/select", json=body)
        assert answer.status == 503
        error = (await answer.json())["error"]
        assert "0/2 workers eligible: 2 missing taint gpu=b200" in error["message"]
        assert error["dynctl"]["filter"] == "taints"


async def test_all_busy_has_the_overload_status():
    fleet = (worker(1, total=100),)
    async with routing(*fleet, active_decode_blocks_threshold=0.5) as (client, service, api, _):
        service.apply(LoadReported(1, 0, active_decode_blocks=60))
        answer = await client.post("/v1/select_and_book", json={"token_ids": TOKENS})
        assert answer.status == 529
        assert len(api) == 0


# -- bookings ----------------------------------------------------------------------------------


@pytest.mark.seed("router-guide: modes: Standalone Router")
async def test_the_life_of_a_booking():
    async with routing() as (client, service, api, _):
        memory = DecisionMemory()
        metrics = Metrics(service, router_id=7, memory=memory)
        service.observers += [memory, metrics]
        body = {"token_ids": TOKENS, "request_id": "r1", "model": "tiny"}
        answer = await client.post("/v1/select_and_book", json=body)
        assert answer.status == 201
        got = await answer.json()
        assert (got["id"], got["booked"]) == ("r1", ["aggregated"])
        assert await loads(client) == {1: (1, 34, 2), 2: (0, 0, 0)}
        kept = memory.get("r1")
        assert kept is not None
        first = await (await client.post("/v1/bookings/r1/first_token")).json()
        assert first["active"] == [{"stage": "aggregated", "prefill_tokens": 0, "output_blocks": 0}]
        assert await loads(client) == {1: (1, 0, 2), 2: (0, 0, 0)}
        block = await client.post("/v1/bookings/r1/output_block")
        assert (await block.json())["active"][0]["output_blocks"] == 1
        assert (await loads(client))[1] == (1, 0, 3)
        ended = await client.delete("/v1/bookings/r1?output_tokens=16")
        assert await ended.json() == {"id": "r1", "active": []}
        assert await loads(client) == {1: (0, 0, 0), 2: (0, 0, 0)}
        assert len(api) == 0
        text = metrics.render()
        assert 'dynamo_frontend_output_tokens_total{model="tiny"} 16' in text
        assert 'request_type="unary",status="success",error_type=""} 1' in text
        gone = await client.delete("/v1/bookings/r1")
        assert gone.status == 404
        assert (await gone.json())["error"]["code"] == "unknown_booking"


async def test_the_next_selection_sees_the_booking():
    async with routing() as (client, _, _, _):
        winners = []
        for _ in range(4):
            got = await (
                await client.post("/v1/select_and_book", json={"token_ids": TOKENS})
            ).json()
            winners.append(got["decode"]["worker_id"])
        assert winners == [1, 2, 1, 2]


async def test_many_at_once_spread_as_one_after_another():
    import asyncio

    async with routing(*(worker(i) for i in range(1, 9))) as (client, _, api, _):
        body = {"token_ids": TOKENS}
        answers = await asyncio.gather(
            *(client.post("/v1/select_and_book", json=body) for _ in range(32))
        )
        assert {answer.status for answer in answers} == {201}
        assert {row[0] for row in (await loads(client)).values()} == {4}
        assert len(api) == 32


async def test_prefill_first_then_decode_from_the_fleet_as_it_is_then():
    async with routing(*zoned()) as (client, service, _, _):
        store(service.router, 1, range(32))
        body = {"token_ids": TOKENS, "request_id": "r1", "hops": "prefill"}
        got = await (await client.post("/v1/select_and_book", json=body)).json()
        assert got["booked"] == ["prefill"]
        assert got["decode"]["worker"] == "decode-3"
        assert (await loads(client))[3] == (0, 0, 0)
        assert service.membership.upsert(worker(5, "decode", zone="a")).ok
        service.membership.set_available(3, "refused connection")
        answer = await client.post("/v1/bookings/r1/decode")
        assert answer.status == 201
        assert (await answer.json())["decode"]["worker"] == "decode-5"
        held = await loads(client)
        assert held[1] == (0, 0, 0)
        assert held[5] == (1, 0, 2)
        again = await client.post("/v1/bookings/r1/decode")
        assert again.status == 409


@pytest.mark.seed("router-guide: modes: Standalone Router")
async def test_a_pool_of_prefill_workers_selects_books_and_names_what_decode_must_satisfy():
    pool = (
        worker(1, "prefill", zone="a", policy=ZONE),
        worker(2, "prefill", zone="b", policy=ZONE),
    )
    async with routing(*pool) as (client, service, api, _):
        store(service.router, 2, range(32))
        body = {"token_ids": TOKENS, "request_id": "r1", "hops": "prefill"}
        dry = await (await client.post("/v1/select", json=body)).json()
        assert (dry["prefill"]["worker"], dry["decode"], dry["booked"]) == ("prefill-2", None, [])
        answer = await client.post("/v1/select_and_book", json=body)
        assert answer.status == 201
        got = await answer.json()
        assert (got["prefill"]["worker"], got["decode"]) == ("prefill-2", None)
        assert (got["booked"], got["prefill"]["prefill_tokens"]) == (["prefill"], 2)
        assert [one["taint"] for one in got["implied"]] == ["dynamo.topology/zone=b"]
        assert (await loads(client))[2] == (1, 2, 0)
        assert (await client.post("/v1/bookings/r1/first_token")).status == 200
        assert (await loads(client))[2] == (1, 0, 0)
        assert (await client.post("/v1/bookings/r1/decode")).status == 503
        assert (await client.delete("/v1/bookings/r1")).status == 200
        assert (await loads(client))[2] == (0, 0, 0)
        assert len(api) == 0
        # The router of the decode pool takes the constraint as one of the request.
        taints = [one["taint"] for one in got["implied"]]
        decode = (worker(3, "decode", zone="a"), worker(4, "decode", zone="b"))
        async with routing(*decode) as (other, _, _, _):
            body = {"token_ids": TOKENS, "hops": "decode"}
            constraints = {"required_taints": taints}
            answer = await other.post(
                "/v1/select_and_book", json={**body, "constraints": constraints}
            )
            chosen = await answer.json()
            assert (chosen["decode"]["worker"], chosen["booked"]) == ("decode-4", ["decode"])
            assert (chosen["decode"]["stage"], chosen["prefill"]) == ("decode", None)
            assert (await loads(other))[4] == (1, 0, 2)


@pytest.mark.seed("router-guide: modes: Standalone Router")
async def test_a_decode_hop_follows_the_policy_of_the_prefill_worker_that_it_names():
    async with routing(*zoned()) as (client, _, _, _):
        body = {"token_ids": TOKENS, "hops": "decode"}
        for zone, prefill in (("a", "prefill-1"), ("b", "prefill-2")):
            got = await (
                await client.post("/v1/select", json={**body, "pins": {"prefill": prefill}})
            ).json()
            assert got["decode"]["domains"] == {"zone": zone}
            assert [one["taint"] for one in got["implied"]] == [f"dynamo.topology/zone={zone}"]
        free = await (await client.post("/v1/select", json=body)).json()
        assert (free["implied"], free["decode"]["stage"]) == ([], "decode")
        wrong = await client.post("/v1/select", json={**body, "pins": {"prefill": "decode-3"}})
        assert wrong.status == 400
        error = (await wrong.json())["error"]
        assert error["message"].startswith("pins.prefill: decode-3 is a decode worker; expected")


@pytest.mark.seed("router-guide: modes: Standalone Router")
@pytest.mark.parametrize(
    ("role", "hops", "says"),
    [
        ("prefill", "all", 'this router has prefill workers only: send "hops": "prefill"'),
        ("prefill", "decode", "no decode worker is registered for model 'tiny'"),
        ("decode", "decode", ""),
        ("decode", "all", ""),  # its decode workers can prefill
        ("aggregated", "decode", "no decode worker is registered for model 'tiny'"),
        ("aggregated", "prefill", ""),
    ],
)
async def test_what_a_pool_of_one_role_can_decide(role, hops, says):
    async with routing(worker(1, role), worker(2, role)) as (client, _, api, _):
        for path in ("/v1/select", "/v1/select_and_book"):
            answer = await client.post(path, json={"token_ids": TOKENS, "hops": hops})
            got = await answer.json()
            assert answer.status == (503 if says else 200 if path == "/v1/select" else 201)
            assert not says or says in got["error"]["message"]
        assert len(api) == (0 if says else 1)


@pytest.mark.seed("router-guide: modes: Standalone Router")
async def test_a_prefill_worker_whose_policy_cannot_be_applied_is_refused():
    service = RoutingService(RouterConfig(), id_prefix="d")
    card = worker(1, "prefill", zone="a")
    config = replace(
        card.runtime_config,
        validate=False,
        kv_transfer_domain="rack",
        kv_transfer_enforcement="required",
    )
    assert service.membership.upsert(replace(card, runtime_config=config)).ok
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(SelectionApi(service).routes())
    async with TestClient(TestServer(app)) as client:
        body = {"token_ids": TOKENS, "hops": "prefill"}
        answer = await client.post("/v1/select", json=body)
        assert answer.status == 503
        assert (await answer.json())["error"]["dynctl"]["outcome"] == "policy_underivable"


async def test_decode_that_went_away_between_the_hops_is_refused_and_can_be_ended():
    async with routing(*zoned()) as (client, service, api, _):
        body = {"token_ids": TOKENS, "request_id": "r1", "hops": "prefill"}
        await client.post("/v1/select_and_book", json=body)
        service.membership.set_available(3, "refused connection")
        answer = await client.post("/v1/bookings/r1/decode")
        assert answer.status == 503
        assert "missing taint" in (await answer.json())["error"]["message"]
        assert (await client.delete("/v1/bookings/r1?outcome=error")).status == 200
        assert len(api) == 0


async def test_an_aggregated_booking_has_no_decode_hop_to_come():
    async with routing() as (client, _, _, _):
        await client.post("/v1/select_and_book", json={"token_ids": TOKENS, "request_id": "r1"})
        answer = await client.post("/v1/bookings/r1/decode")
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "no_prefill_hop"


async def test_one_hop_can_be_ended_alone():
    async with routing(*zoned()) as (client, _, api, _):
        await client.post("/v1/select_and_book", json={"token_ids": TOKENS, "request_id": "r1"})
        answer = await client.delete("/v1/bookings/r1?stage=prefill")
        assert [hop["stage"] for hop in (await answer.json())["active"]] == ["decode"]
        assert len(api) == 1


async def test_an_id_can_be_booked_once_at_a_time():
    async with routing() as (client, _, _, _):
        body = {"token_ids": TOKENS, "request_id": "r1"}
        await client.post("/v1/select_and_book", json=body)
        answer = await client.post("/v1/select_and_book", json=body)
        assert answer.status == 409
        assert (await answer.json())["error"]["code"] == "duplicate_request"
        await client.delete("/v1/bookings/r1")
        assert (await client.post("/v1/select_and_book", json=body)).status == 201


async def test_bookings_are_bounded(monkeypatch):
    monkeypatch.setattr(selection_api, "MAX_BOOKINGS", 2)
    async with routing() as (client, _, _, _):
        for _ in range(2):
            answer = await client.post("/v1/select_and_book", json={"token_ids": TOKENS})
            assert answer.status == 201
        answer = await client.post("/v1/select_and_book", json={"token_ids": TOKENS})
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "too_many_bookings"


async def test_a_draining_router_takes_no_bookings():
    async with routing() as (client, service, _, _):
        service.drain()
        answer = await client.post("/v1/select_and_book", json={"token_ids": TOKENS})
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert (await client.post("/v1/select", json={"token_ids": TOKENS})).status == 200


async def test_a_booking_whose_client_died_expires():
    async with routing(active_request_expiry_secs=60.0) as (client, service, api, clock):
        metrics = Metrics(service, router_id=7)
        service.observers.append(metrics)
        for name in ("silent", "alive"):
            body = {"token_ids": TOKENS, "request_id": name}
            await client.post("/v1/select_and_book", json=body)
        clock.now += 50
        await client.post("/v1/bookings/alive/output_block")
        clock.now += 20
        service.expire()
        assert api.sweep() == 1
        assert (await client.post("/v1/bookings/silent/first_token")).status == 404
        assert (await client.post("/v1/bookings/alive/first_token")).status == 200
        assert sum(row[0] for row in (await loads(client)).values()) == 1
        assert "dynamo_frontend_disconnected_clients 1" in metrics.render()


async def test_bookings_of_open_streams_are_kept_in_steps():
    async with routing(active_request_expiry_secs=60.0) as (client, service, _, clock):
        names = [f"r{number}" for number in range(3 * SLICE)]
        for name in names:
            body = {"token_ids": TOKENS, "request_id": name}
            await client.post("/v1/select_and_book", json=body)
        service.held.update(names)
        noted: list[str] = []
        service.add_tap(lambda change, now, applied: noted.append(applied.code))
        clock.now += 70
        steps = service.expiring()
        next(steps)
        assert noted == ["ok"] * SLICE
        for name in names:
            service.held.discard(name)
            service.free(name)  # it ends meanwhile
        noted.clear()
        drained(steps)
        assert noted == ["ok"]


async def test_what_is_known_of_the_clients_of_other_programs():
    """Their programs report outcomes, not statuses; a booking that expires reports nothing."""
    async with routing(active_request_expiry_secs=60.0) as (client, service, api, clock):
        memory = DecisionMemory()
        service.observers.append(memory)
        ends = {
            "fine": "outcome=success&output_tokens=12",
            "before": "outcome=error",
            "after": "outcome=error",
            "left": "outcome=cancelled",
        }
        for name in (*ends, "silent"):
            body = {"token_ids": TOKENS, "request_id": name}
            await client.post("/v1/select_and_book", json=body)
        clock.now += 0.5
        for name in ("fine", "after"):
            await client.post(f"/v1/bookings/{name}/first_token")
        for name, end in ends.items():
            assert (await client.delete(f"/v1/bookings/{name}?{end}")).status == 200
        clock.now += 70
        service.expire()
        assert api.sweep() == 1
        found = {kept.id: memory.response(kept) for kept in memory.recent()}
        states = {name: one.state for name, one in found.items()}
        assert states == {
            "fine": "complete", "before": "failed", "after": "cut", "left": "cancelled",
            "silent": "unknown",
        }  # fmt: skip
        assert {one.status for one in found.values()} == {None}
        assert (found["fine"].ttft_s, found["fine"].output_tokens) == (0.5, 12)
        assert found["silent"].error == "no report from its frontend"


async def test_a_booking_outlives_its_worker_until_its_client_says_so():
    async with routing() as (client, service, api, _):
        await client.post("/v1/select_and_book", json={"token_ids": TOKENS, "request_id": "r1"})
        service.membership.remove(1)
        service.expire()
        assert api.sweep() == 0
        answer = await client.post("/v1/bookings/r1/output_block")
        assert answer.status == 409
        assert (await answer.json())["error"]["code"] == "not_active"
        assert (await client.delete("/v1/bookings/r1")).status == 200


# -- reading -----------------------------------------------------------------------------------


async def test_a_booking_without_stream_ends_its_prefill_by_the_events_of_the_worker():
    async with routing(worker(1)) as (client, service, _, _):
        body = {"token_ids": TOKENS, "stream": False, "request_id": "r"}
        assert (await client.post("/v1/select_and_book", json=body)).status == 201
        assert await loads(client) == {1: (1, 34, 2)}
        store(service.router, 1, TOKENS[:16])
        hashed = hash_prompt(TOKENS, 16)
        last = BlocksStored(hashed.sequence[0], hashed.sequence[1:], hashed.local[1:])
        assert service.apply(KvEvent(1, 0, last)).ok
        assert await loads(client) == {1: (1, 0, 2)}


@pytest.mark.parametrize(
    ("asked", "serving"),
    [
        ({"model": "other"}, {2}),
        ({"model": "law"}, {3}),
        ({"model": "tiny", "lora_name": "law"}, {3}),
        ({"model": "tiny", "lora_name": "unlisted"}, {1, 2, 3}),
        ({"model": "tiny"}, {1, 2, 3}),
    ],
)
async def test_a_name_is_that_of_the_workers_which_list_it(asked, serving):
    named = (
        worker(1),
        replace(worker(2), aliases=("other",)),
        replace(worker(3), adapters=("law",)),
    )
    async with routing(*named) as (client, _, _, _):
        chosen = set()
        for number in range(9):
            body = {"token_ids": TOKENS, "request_id": f"r{number}", **asked}
            answer = await client.post("/v1/select_and_book", json=body)
            assert answer.status == 201, await answer.text()
            chosen.add((await answer.json())["decode"]["worker_id"])
        assert chosen == serving


@pytest.mark.parametrize(
    ("ending", "first", "cached"),
    [
        ("?outcome=error", False, 0),
        ("?outcome=cancelled", False, 0),
        ("?outcome=error", True, 2),
        ("", False, 2),
    ],
)
async def test_a_request_that_its_engine_did_not_accept_earns_no_cache_credit(
    ending, first, cached
):
    async with routing(replace(worker(1), kv_events=False)) as (client, service, _, _):
        body = {"token_ids": TOKENS, "request_id": "r"}
        assert (await client.post("/v1/select_and_book", json=body)).status == 201
        if first:
            await client.post("/v1/bookings/r/first_token")
        assert (await client.delete(f"/v1/bookings/r{ending}")).status == 200
        assert service.router.cached_blocks(0) == cached


async def test_overlap_scores():
    async with routing() as (client, service, _, _):
        store(service.router, 2, range(16))
        got = await (await client.post("/v1/overlap_scores", json={"token_ids": TOKENS})).json()
        assert (got["block_size"], got["num_blocks"]) == (16, 2)
        assert [(row["worker_id"], row["device_blocks"]) for row in got["workers"]] == [
            (1, 0),
            (2, 1),
        ]


async def test_loads_of_one_model():
    async with routing(worker(1), worker(2, model="other")) as (client, _, _, _):
        got = await (await client.get("/v1/loads?model=other")).json()
        assert [row["worker_id"] for row in got["loads"]] == [2]
        assert got["loads"][0]["reported"]["kv_used_blocks"] is None


# -- what is wrong is named --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({}, 400, None, "expected exactly one of token_ids, block_hashes, sequence_hashes"),
        ({"token_ids": [1], "block_hashes": [1]}, 400, None, "got token_ids and block_hashes"),
        ({"token_ids": []}, 400, "token_ids", "at least one token id"),
        ({"token_ids": "abc"}, 400, "token_ids", "expected an array, got a string"),
        ({"token_ids": [1, -1]}, 400, "token_ids[1]", "expected a token id from 0 to 4294967295"),
        ({"token_ids": [1, True]}, 400, "token_ids[1]", "expected a token id (an integer)"),
        ({"token_ids": [1, 2.5]}, 400, "token_ids[1]", "got a number"),
        ({"token_ids": [1], "isl_tokens": 2}, 400, "isl_tokens", "expected 1, the number of"),
        ({"block_hashes": [1]}, 400, "isl_tokens", "needed beside block_hashes"),
        ({"block_hashes": [1, 2], "isl_tokens": 16}, 400, "isl_tokens", "have 1 blocks"),
        ({"block_hashes": ["x"], "isl_tokens": 16}, 400, "block_hashes[0]", "64-bit integer"),
        ({"sequence_hashes": [2**64], "isl_tokens": 16}, 400, "sequence_hashes[0]", "64-bit"),
        (
            {"token_ids": [1], "model": "nope"},
            404,
            "model",
            "'nope' is not served by this router; models: t",
        ),
        ({"token_ids": [1], "model": 5}, 400, "model", "expected a string, got 5"),
        ({"token_ids": [1], "model": "tiny", "model_name": "tiny"}, 400, "model_name", "two names"),
        ({"token_ids": [1], "pins": {"decod": 1}}, 400, "pins.decod", "expected one of prefill"),
        ({"token_ids": [1], "pins": {"decode": "ghost"}}, 400, "pins.decode", "no worker 'ghost'"),
        (
            {"token_ids": [1], "pins": {"decode": 9}},
            400,
            "pins.decode",
            "registered: aggregated-1 (1)",
        ),
        ({"token_ids": [1], "pins": {"decode": []}}, 400, "pins.decode", "a worker's name or id"),
        (
            {"token_ids": [1], "pins": {"decode": {"worker_id": 1, "dp_rank": 7}}},
            400,
            "pins.decode.dp_rank",
            "has no rank 7",
        ),
        ({"token_ids": [1], "allowed_worker_ids": [1, 9]}, 400, "allowed_worker_ids", "no worker"),
        (
            {"token_ids": [1], "constraints": {"preferred_taints": {"a": "b"}}},
            400,
            "constraints.preferred_taints['a']",
            "expected a number",
        ),
        ({"token_ids": [1], "request_id": "a/b"}, 400, "request_id", "without '/'"),
        ({"token_ids": [1], "request_id": "a\nb"}, 400, "request_id", "printable"),
        ({"token_ids": [1], "stream": 1}, 400, "stream", "expected true or false"),
        ({"token_ids": [1], "hops": "two"}, 400, "hops", "expected all, prefill or decode"),
        ({"token_ids": [1], "temperature": 1}, 400, "body.temperature", "unknown field"),
    ],
)
async def test_bad_bodies_name_the_field(body, status, param, says):
    async with routing() as (client, _, api, _):
        answer = await client.post("/v1/select_and_book", json=body)
        error = (await answer.json())["error"]
        assert (answer.status, error.get("param")) == (status, param)
        assert says in error["message"]
        assert len(api) == 0


async def test_token_ids_never_come_back_in_an_error():
    async with routing() as (client, _, _, _):
        answer = await client.post("/v1/select", json={"token_ids": [987654, "secret-word"]})
        text = await answer.text()
        assert "987654" not in text
        assert "secret-word" not in text


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stage=decod", "stage"),
        ("?output_tokens=-1", "output_tokens"),
        ("?outcome=meh", "outcome"),
        ("?tokens=1", "tokens"),
    ],
)
async def test_bad_endings_name_the_parameter(path, param):
    async with routing() as (client, _, api, _):
        await client.post("/v1/select_and_book", json={"token_ids": TOKENS, "request_id": "r1"})
        answer = await client.delete(f"/v1/bookings/r1{path}")
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
        assert len(api) == 1


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "x"])
async def test_bad_decay_fractions(fraction):
    async with routing() as (client, _, _, _):
        await client.post("/v1/select_and_book", json={"token_ids": TOKENS, "request_id": "r1"})
        answer = await client.post(
            "/v1/bookings/r1/output_block", json={"decay_fraction": fraction}
        )
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "decay_fraction"


async def test_two_models_want_a_name():
    async with routing(worker(1), worker(2, model="other")) as (client, _, _, _):
        answer = await client.post("/v1/select", json={"token_ids": TOKENS})
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "model: required, one of: other, tiny"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/select"),
        ("POST", "/v1/select_and_book"),
        ("POST", "/v1/bookings/x/decode"),
        ("POST", "/v1/bookings/x/first_token"),
        ("POST", "/v1/bookings/x/output_block"),
        ("DELETE", "/v1/bookings/x"),
        ("POST", "/v1/overlap_scores"),
        ("GET", "/v1/loads"),
    ],
)
async def test_the_token_guards_every_endpoint(method, path):
    async with routing(token="s3cret") as (client, _, _, _):
        assert (await client.request(method, path, json={})).status == 401
        headers = {"Authorization": "Bearer s3cret"}
        assert (await client.request(method, path, json={}, headers=headers)).status != 401


# -- the process -------------------------------------------------------------------------------


@pytest.mark.seed("router-guide: deployments: Standalone")
@pytest.mark.seed("smart-routing-guide-0.9: infrastructure: DYN_SYSTEM_PORT")
@pytest.mark.seed("router-guide: deployments: metrics of the standalone router")
async def test_the_process_has_no_inference_and_a_system_port():
    config = FrontendConfig(port=0, system_port=0, model_name="tiny")
    process = build_router(config)
    await process.start()
    try:
        assert process.service.membership.upsert(worker(1)).ok
        async with aiohttp.ClientSession(process.url) as client:
            assert (await client.post("/v1/chat/completions", json={})).status == 404
            answer = await client.post("/v1/select_and_book", json={"token_ids": TOKENS})
            assert answer.status == 201
            booked = (await answer.json())["id"]
            assert (await client.get(f"/v1/decisions/{booked}")).status == 200
            assert (await client.get("/busy_threshold")).status == 200
            assert (await client.get("/v1/workers")).status == 200
        system = f"http://127.0.0.1:{process.system_port}"
        async with aiohttp.ClientSession(system) as client:
            assert (await client.get("/health")).status == 200
            assert (await client.get("/ready")).status == 200
            text = await (await client.get("/metrics")).text()
            assert 'dynamo_frontend_inflight_requests{model="tiny"} 1' in text
            assert (await client.post("/v1/select", json={})).status == 404
        await process.drain()
        assert process.service.draining
    finally:
        await process.close()


def test_the_process_ends_on_sigterm_with_0():
    port = free_port()
    code = (
        "from dynctl.serving.routing.config import FrontendConfig\n"
        "from dynctl.serving.services.router_server import run_router\n"
        f"raise SystemExit(run_router(FrontendConfig(port={port})))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ}) as process:
        try:
            until_now(lambda: _is_live(port), 20)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=patience(20)) == 0
        finally:
            process.kill()


def _is_live(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200
    except httpx.HTTPError:
        return False
