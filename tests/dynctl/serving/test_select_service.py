"""`serve router` on the ports of Dynamo's selection service and slot tracker."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import pytest

from dynctl.base.tasks import Supervisor
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import DynamoServices, build_router
from dynctl.serving.services.select_api import ADDED, SELECT, TRACKED, WORKER
from dynctl.serving.services.select_service import PENDING_S, SelectService
from dynctl.serving.services.select_workers import SelectionError
from dynctl.serving.services.slot_tracker import SlotTracker, TrackerError
from dynctl.wire.dynamo.service_bodies import Shape
from router_core import BlocksStored, KvEvent, RouterConfig, hash_prompt
from tests.ports import free_port

BLOCK = 4


def filled(shape: Shape, **given: Any) -> dict[str, Any]:
    """A body of the shape, with its defaults."""
    return {name: given.get(name, field.default) for name, field in shape.fields.items()}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def service(clock: Clock, workers: int = 2, **settings: Any) -> SelectService:
    """A service with workers that publish no events."""
    config = RouterConfig(use_kv_events=False, **settings)
    made = SelectService(config, clock, Supervisor(), sample=lambda: 0.0)
    for number in range(1, workers + 1):
        card = {"worker_id": number, "endpoint": f"http://w{number}", "block_size": BLOCK}
        assert made.workers.upsert(filled(WORKER, **card))["lifecycle"] == "schedulable"
    return made


def asked(**given: Any) -> dict[str, Any]:
    return filled(SELECT, token_ids=list(range(10)), **given)


def test_a_reservation_counts_until_its_end() -> None:
    clock = Clock()
    made = service(clock, workers=1)
    shown = made.select_and_reserve(asked(selection_id="a"))
    assert (shown["worker_id"], shown["isl_tokens"], len(shown["sequence_hashes"])) == (1, 10, 2)

    def load() -> tuple[int, int, int]:
        (row,) = made.loads()[0]["loads"]
        return tuple(row.values())[2:]

    assert load() == (10, 2, 1)
    made.prefill_complete("a")
    made.output_block("a", None)
    assert load() == (0, 3, 1)
    made.free("a")
    assert load() == (0, 0, 0)
    with pytest.raises(SelectionError, match="reservation a not found"):
        made.free("a")


def test_a_selection_can_be_reserved_once_and_for_a_while() -> None:
    clock = Clock()
    made = service(clock)
    reservation = filled_reservation("a")
    made.select(asked(selection_id="a"))
    assert made.reserve(reservation)["selection_id"] == "a"
    with pytest.raises(SelectionError, match="no pending selection a"):
        made.reserve(reservation)
    made.select(asked(selection_id="b"))
    clock.now += PENDING_S + 1
    with pytest.raises(SelectionError, match="no pending selection b"):
        made.reserve(filled_reservation("b"))


def filled_reservation(selection_id: str) -> dict[str, Any]:
    place = {"model_name": "default", "routing_group": "default"}
    return {**place, "selection_id": selection_id, "worker_id": None}


async def test_a_worker_with_another_address_of_its_events_is_read_from_the_start() -> None:
    tasks = Supervisor()
    made = SelectService(RouterConfig(), Clock(), tasks, sample=lambda: 0.0)
    card = {"worker_id": 1, "endpoint": "http://w1", "block_size": BLOCK}
    at = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    made.workers.upsert(filled(WORKER, **card, kv_events_endpoint=at[0]))
    prompt = hash_prompt(range(10), BLOCK)
    event = KvEvent(1, 0, BlocksStored(None, prompt.sequence, prompt.local))

    def held() -> int:
        (row,) = made.overlap_scores(asked())["workers"]
        return int(row["device_blocks"])

    assert made.router.apply(event, 0.0).ok
    made.workers.upsert(filled(WORKER, **card, kv_events_endpoint=at[0], total_kv_blocks=9))
    assert held() == 2, "another card alone"
    made.workers.upsert(filled(WORKER, **card, kv_events_endpoint=at[1]))
    assert held() == 0
    await tasks.close()
    await made.runtime.close()


def test_a_worker_that_ends_takes_its_reservations() -> None:
    made = service(Clock(), workers=1)
    made.select_and_reserve(asked(selection_id="a"))
    made.workers.delete(1)
    with pytest.raises(SelectionError, match="not found"):
        made.prefill_complete("a")
    with pytest.raises(SelectionError, match="no schedulable workers are available"):
        made.select(asked())


def test_reservations_without_reports_expire() -> None:
    clock = Clock()
    made = service(clock, workers=1)
    made.select_and_reserve(asked(selection_id="a"))
    clock.now += made.router.config.active_request_expiry_secs + 1
    made.expire()
    with pytest.raises(SelectionError, match="reservation a not found"):
        made.free("a")


async def test_both_services_have_ports_of_their_own_and_changes_need_the_token() -> None:
    config = FrontendConfig(
        port=0, select_service_port=0, slot_tracker_port=0, api_token="secret-1"
    )
    process = build_router(config)
    await process.start()
    try:
        operator = {"authorization": "Bearer secret-1"}
        body = {"worker_id": 1, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        async with aiohttp.ClientSession() as session:
            for port, path in (
                (process.part(DynamoServices).select_service_port, "/workers"),
                (process.part(DynamoServices).slot_tracker_port, "/register"),
            ):
                url = f"http://127.0.0.1:{port}{path}"
                async with session.post(url, json=body) as refused:
                    assert refused.status == 401
                async with session.post(url, json=body, headers=operator) as taken:
                    assert taken.status == 201
                async with session.get(f"http://127.0.0.1:{port}/workers") as listed:
                    assert [row["worker_id"] for row in await listed.json()] == [1]
    finally:
        await process.close()


async def test_no_id_of_a_path_or_a_rank_is_a_failure_and_no_name_breaks_the_lists() -> None:
    process = build_router(FrontendConfig(port=0, select_service_port=0, slot_tracker_port=0))
    await process.start()
    headers = {"content-type": "application/json"}
    zeros = "0" * 30 + "9" * 4_400
    try:
        selection = f"http://127.0.0.1:{process.part(DynamoServices).select_service_port}"
        tracker = f"http://127.0.0.1:{process.part(DynamoServices).slot_tracker_port}"
        name = '"model_name": "\\ud800"'
        tracked = f'{{"worker_id": 1, "block_size": 4, "dp_start": 0, "dp_size": 1, {name}}}'
        ranks = f'{{"worker_id": 1, "kv_events_endpoints": {{"{zeros}": "tcp://127.0.0.1:1"}}}}'
        async with aiohttp.ClientSession(headers=headers) as session:
            for method, url, body, status in (
                ("DELETE", f"{selection}/workers/{zeros}", None, 400),
                ("DELETE", f"{selection}/workers/{2**64}", None, 400),
                ("POST", f"{selection}/workers", f'{{"worker_id": 1, {name}}}', 400),
                ("POST", f"{selection}/workers", ranks, 422),
                ("POST", f"{tracker}/register", tracked, 400),
                ("GET", f"{selection}/workers", None, 200),
                ("GET", f"{tracker}/loads", None, 200),
            ):
                async with session.request(method, url, data=body) as answer:
                    assert answer.status == status, (method, url[:60], await answer.text())
    finally:
        await process.close()


def test_the_hashes_of_reservations_have_a_bound_and_their_blocks_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynctl.serving.services.select_service.MOST_HASHES", 3)
    made = service(Clock(), workers=1)
    for name in "abc":  # two blocks each
        made.select_and_reserve(asked(selection_id=name, cache_salt=name))
    assert made.router.load.hashes == 2
    assert made.loads()[0]["loads"][0]["potential_decode_blocks"] == 6
    for name in "abc":
        made.free(name)
    assert made.router.load.hashes == 0
    assert made.loads()[0]["loads"][0]["potential_decode_blocks"] == 0


def test_the_hashes_of_selections_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made = service(Clock(), workers=1)
    made.select(asked(selection_id="a"))
    size = made._pending_hashes
    monkeypatch.setattr("dynctl.serving.services.select_service.MOST_HASHES", 2 * size)
    for name in "abc":
        made.select(asked(selection_id=name))
    assert made._pending_hashes == 2 * size
    with pytest.raises(SelectionError, match="no pending selection a"):
        made.reserve(filled_reservation("a"))
    for name in "bc":
        made.reserve(filled_reservation(name))
    assert made._pending_hashes == 0


def test_an_id_has_a_bound() -> None:
    made, long = service(Clock(), workers=1), "x" * 1_025
    for work in (made.select, made.select_and_reserve):
        with pytest.raises(SelectionError, match="longer than 1,024 characters"):
            work(asked(selection_id=long))


def test_a_tracked_worker_that_leaves_takes_its_load_and_its_place_is_used_again() -> None:
    made = SlotTracker(Clock(), 60.0)
    card = {"model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 2}
    place = {"model_name": "m", "dp_rank": 1, "new_isl_tokens": 5, "sequence_hashes": [1, 2]}
    for worker_id in (1, 2):
        made.register(filled(TRACKED, worker_id=worker_id, **card))
        made.add(filled(ADDED, worker_id=worker_id, request_id=f"of {worker_id}", **place))

    def load() -> list[tuple[int, int, int, int]]:
        return [
            (one["worker_id"], one["dp_rank"], one["active_prefill_tokens"], blocks)
            for one in made.loads()
            for blocks in [one["active_decode_blocks"]]
        ]

    assert load() == [(1, 0, 0, 0), (1, 1, 5, 2), (2, 0, 0, 0), (2, 1, 5, 2)]
    made.unregister({"model_name": "m", "routing_group": "default", "worker_id": 1})
    made.register(filled(TRACKED, worker_id=3, **card))
    assert load() == [(2, 0, 0, 0), (2, 1, 5, 2), (3, 0, 0, 0), (3, 1, 0, 0)]
    for worker_id in (2, 3):
        made.unregister({"model_name": "m", "routing_group": "default", "worker_id": worker_id})
    made.register(filled(TRACKED, worker_id=1, **{**card, "block_size": 8}))
    assert load() == [(1, 0, 0, 0), (1, 1, 0, 0)], "the last worker took its block size along"


def test_the_hashes_of_tracked_requests_have_a_bound_and_their_blocks_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dynctl.serving.services.slot_tracker.MOST_HASHES", 3)
    made = SlotTracker(Clock(), 60.0)
    card = {"worker_id": 1, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
    made.register(filled(TRACKED, **card))
    place = {"model_name": "m", "worker_id": 1, "dp_rank": 0, "new_isl_tokens": 1}
    for number, name in enumerate("abc"):
        hashes = [number * 2, number * 2 + 1]
        made.add(filled(ADDED, request_id=name, sequence_hashes=hashes, **place))
    assert made.loads()[0]["active_decode_blocks"] == 6
    assert sum(one.load.hashes for one in made._trackers.values()) == 2
    for name in "abc":
        made.free({"model_name": "m", "routing_group": "default", "request_id": name})
    assert made.loads()[0]["active_decode_blocks"] == 0
    with pytest.raises(TrackerError, match="longer than 1,024 characters"):
        made.add(filled(ADDED, request_id="x" * 1_025, sequence_hashes=[], **place))


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_a_clock_that_is_set_ends_no_reservation(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FrontendConfig(
        port=0,
        select_service_port=0,
        slot_tracker_port=0,
        router=RouterConfig(use_kv_events=False),
    )
    process = build_router(config)
    await process.start()
    try:
        made, tracker = (
            process.part(DynamoServices).select_service,
            process.part(DynamoServices).slot_tracker,
        )
        assert made is not None
        assert tracker is not None
        card = {"worker_id": 1, "endpoint": "http://w1", "block_size": BLOCK}
        made.workers.upsert(filled(WORKER, **card))
        made.select_and_reserve(asked(selection_id="a"))
        made.select(asked(selection_id="b"))
        place = {"worker_id": 1, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}
        tracker.register(filled(TRACKED, **place))
        request = {"model_name": "m", "worker_id": 1, "dp_rank": 0, "new_isl_tokens": 1}
        tracker.add(filled(ADDED, request_id="r", sequence_hashes=[1], **request))
        assert process.service.clock is time.monotonic
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + jump)
        monkeypatch.setattr(process.service, "wall", time.time)
        made.expire()
        tracker.expire()
        assert made.reserve(filled_reservation("b"))["worker_id"] == 1
        made.free("a")
        assert tracker.loads()[0]["active_prefill_tokens"] == 1
    finally:
        await process.close()
