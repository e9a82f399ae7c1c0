"""The shadow router on memory planes: choices of others, predictions, and an API without writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiohttp import ClientSession

from dynctl.adapters.ports import Interrupted
from dynctl.base.errors import UsageProblem
from dynctl.documents.fleet_load import Traffic
from dynctl.documents.recording import Arrived, Decided
from dynctl.documents.route_result import RouteResult
from dynctl.health import conditions as codes
from dynctl.serving.dynamo.observer import Observer
from dynctl.serving.dynamo.shadow import LOG, NO_EVENTS, REFUSED, Finding, Reading
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.observe_server import Observed, ShadowPart, build_observer
from dynctl.wire.dynamo.active_sequences import (
    SequenceAdded,
    SequenceEvent,
    SequenceFreed,
    encode_sequences,
)
from dynctl.wire.dynamo.frontend_log import RefusedLine, SelectedLine
from router_core import Role
from tests.dynctl.serving.test_observer import PREFILL_HASH, Rig
from tests.waiting import patience, until

TOKEN = "operators"


class Beside:
    """What a test says about frontends."""

    workers_reachable = True
    frontends = ("http://dynamo:8000",)

    def __init__(self) -> None:
        self.take_line: Any = None
        self.findings: tuple[Finding, ...] = ()
        self.traffic: Traffic | None = None
        self.closed = False

    async def open(self, take_line: Any) -> None:
        self.take_line = take_line

    async def close(self) -> None:
        self.closed = True

    async def read(self, observer: Observer, title: str, *, findings: bool) -> Reading:
        found = self.findings if findings else None
        return Reading(title, "events", (), {"router_mode": "cards"}, found, self.traffic)

    async def route(self, observer: Observer, reading: Reading, body: Any) -> RouteResult:
        raise UsageProblem("no tokenizer", "give --model-path DIR")


class Watched:
    """A shadow router over the captured two-zone deployment, and its API."""

    def __init__(self, **config: Any) -> None:
        self.rig = Rig()
        self.beside = Beside()
        self.process = build_observer(
            FrontendConfig(port=0, **config),
            Observed(lambda: self.rig.planes, "dynamo", self.beside),
        )
        self.session = ClientSession()

    @property
    def observer(self) -> Observer:
        return self.process.part(ShadowPart).shadow.observer

    def workers(self, role: Role) -> list[int]:
        return [w.worker_id for w in self.process.service.router.registry if w.role is role]

    async def publish(self, *events: SequenceEvent) -> None:
        """Publish, and wait until all were applied."""
        added = sum(isinstance(one, SequenceAdded) for one in events)
        before = self.observer.load.added
        self.rig.publish(self.observer.deployment.sequences[0], encode_sequences(list(events)))
        await until(lambda: self.observer.load.added == before + added)

    async def get(self, path: str, status: int = 200) -> dict[str, Any]:
        return await self.send("GET", path, status)

    async def send(
        self, method: str, path: str, status: int = 200, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        async with self.session.request(method, self.process.url + path, json=body) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == status, found
            return found


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    made = Watched()
    await _with_a_publisher(made.rig)
    async with asyncio.timeout(patience(30)):
        await made.process.start()
        try:
            yield made
        finally:
            await made.session.close()
            await made.process.close()
            await made.rig.events.close()
    assert made.beside.closed


async def _with_a_publisher(rig: Rig) -> None:
    """The capture has no frontend with replica sync: add the channel of one."""
    import json

    scope = {"namespace": "dynamo", "component": "backend", "name": "generate"}
    value = {
        "type": "EventChannel",
        "scope": {"kind": "endpoint", "endpoint": scope},
        "topic": "active_sequences_events",
        "instance_id": 0xFE,
        "transport": {"kind": "Zmq", "config": {"endpoint": "tcp://127.0.0.1:1"}},
    }
    key = (
        "v1/event_channels/namespace/dynamo/component/backend/endpoint/generate/topic/"
        "active_sequences_events/fe"
    )
    rig.discovery.put(key, json.dumps(value).encode())


def added(name: str, worker: int, hashes: tuple[int, ...] | None, tokens: int = 0) -> SequenceAdded:
    return SequenceAdded(name, worker, 0, hashes, tokens, 0xFE, track_prefill_tokens=bool(tokens))


async def test_a_choice_is_kept_beside_its_prediction(watched: Watched) -> None:
    prefill, decode = watched.workers(Role.PREFILL)[0], watched.workers(Role.DECODE)
    await watched.publish(
        added("r1", prefill, None, 93), added("r1", decode[0], (PREFILL_HASH, 2, 3))
    )
    (row,) = (await watched.get("/v1/decisions"))["decisions"]
    observed = row["observed"]
    assert row["id"] == "r1"
    assert row["prefill"]["worker_id"] == prefill
    assert row["decode"]["worker_id"] == decode[0]
    assert observed["router"] == "fe"
    assert observed["decode"] == row["decode"]
    # Enforcement is required, so only the decode worker of the prefill worker's zone is right.
    zones = {w.worker_id: w.domains["zone"] for w in watched.process.service.router.registry}
    right = next(one for one in decode if zones[one] == zones[prefill])
    assert observed["predicted"]["worker_id"] == right
    assert observed["as_predicted"] is (decode[0] == right)

    past = await watched.get("/v1/decisions/r1")
    assert past["observed"] == observed
    assert past["winner"]["decode"]["worker_id"] == right
    assert [one["worker_id"] for one in past["decode"]["candidates"]] == [right]


async def test_a_recording_has_what_the_frontend_counted_as_cached_for_a_prefill_hop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = watched.workers(Role.PREFILL)[0], watched.workers(Role.DECODE)[0]
    shadow, records = watched.process.part(ShadowPart).shadow, list[Any]()
    monkeypatch.setattr(shadow._recordings, "add", lambda make: records.append(make(5.0)))
    # Of 3 blocks of 16 and 5 tokens, 21 tokens are computed: 2 blocks were cached.
    shadow._take_sequence(added("r1", prefill, None, 21))
    shadow._take_sequence(added("r1", decode, (7, 8, 9)))
    # Without tracked prefill tokens it is unknown.
    shadow._take_sequence(added("r2", prefill, None))
    shadow._take_sequence(added("r2", decode, (7, 8, 9)))
    lengths = [one.isl_tokens for one in records if isinstance(one, Arrived)]
    cached = [one.cached_blocks for one in records if isinstance(one, Decided)]
    assert (lengths, cached) == ([53, 48], [2.0, None])


async def test_choices_are_audited_and_counted(watched: Watched) -> None:
    prefill, decode = watched.workers(Role.PREFILL)[0], watched.workers(Role.DECODE)
    for number, one in enumerate(decode):
        name = f"r{number}"
        await watched.publish(added(name, prefill, None, 16), added(name, one, (7, 8)))
    fleet = await watched.get("/v1/fleet")
    assert fleet["compares"] == "choice"
    assert fleet["recorded"] == 2
    assert fleet["probe_s"] is None
    # One is the only worker of its zone: nothing to choose. The other is not a candidate.
    assert {row["causes"].get("candidates") for row in fleet["audit"]} == {1}
    assert fleet["skipped"]["one worker only: nothing to choose"] == 1
    crossed = {(one["local"], one["crossing"]) for one in fleet["transfers"]}
    assert crossed == {(1, 1)}
    text = watched.process.administration.metrics.render()
    for verdict in ("as_predicted", "differs"):
        labels = f'{{source="replica-sync events",verdict="{verdict}"}}'
        assert f"dynctl_observed_choices_total{labels} 1" in text


async def test_bookings_of_the_frontends_are_load_here(watched: Watched) -> None:
    decode = watched.workers(Role.DECODE)[0]
    await watched.publish(added("r1", decode, (7, 8, 9)))
    (row,) = [r for r in (await watched.get("/v1/workers"))["workers"] if r["worker_id"] == decode]
    assert row["source"] == "discovery"
    assert row["ranks"][0]["active_decode_blocks"] == 3
    shown = await watched.get(f"/v1/workers/{row['name']}")
    assert shown["ranks"][0]["active_requests"] == 1
    channel = watched.observer.deployment.sequences[0]
    watched.rig.publish(channel, encode_sequences([SequenceFreed("r1", decode, 0, 0xFE)]))
    slot = watched.process.service.router.registry.slot(decode, 0)
    assert slot is not None
    await until(lambda: not watched.process.service.router.load.requests[slot])


async def test_a_log_adds_refusals_only_where_events_have_the_choices(watched: Watched) -> None:
    prefill, decode = watched.workers(Role.PREFILL)[0], watched.workers(Role.DECODE)[0]
    await watched.publish(added("r0", decode, (1,)))
    watched.beside.take_line(SelectedLine("r1", decode, 0, "decode", 3.0, None, 1.0))
    assert [row["id"] for row in (await watched.get("/v1/decisions"))["decisions"]] == ["r0"]
    await watched.publish(added("r2", prefill, None, 16))
    watched.beside.take_line(RefusedLine("r2", "no endpoints available to route work", at=2.0))
    (row,) = (await watched.get("/v1/decisions?outcome=refused"))["decisions"]
    assert row["outcome"] == "no_eligible_worker"
    assert row["at"] == 2.0
    assert row["prefill"]["worker_id"] == prefill
    assert row["observed"]["unpredicted"] == REFUSED
    past = await watched.get("/v1/decisions/r2")
    assert past["observed"]["refused"] == "no endpoints available to route work"
    assert past["decode"] is None


async def test_without_events_the_log_has_the_choices() -> None:
    made = Watched()
    async with asyncio.timeout(patience(30)):
        await made.process.start()
        try:
            prefill, decode = made.workers(Role.PREFILL)[0], made.workers(Role.DECODE)[0]
            for worker, cost in ((prefill, 4.5), (decode, 3.0)):
                line = SelectedLine("r1", worker, 0, "decode", cost, None, 1.0)
                made.beside.take_line(line)
            (row,) = (await made.get("/v1/decisions"))["decisions"]
            assert (row["prefill"]["worker_id"], row["decode"]["worker_id"]) == (prefill, decode)
            assert row["observed"]["source"] == LOG
            assert row["observed"]["unpredicted"] == NO_EVENTS
            assert row["observed"]["cost"] == 4.5
            assert row["observed"]["as_predicted"] is None
        finally:
            await made.session.close()
            await made.process.close()
            await made.rig.events.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/busy_threshold"),
        ("POST", "/v1/workers"),
        ("DELETE", "/v1/workers/backend"),
        ("PUT", "/anything"),
    ],
)
async def test_what_is_no_read_is_refused_by_name(watched: Watched, method: str, path: str) -> None:
    error = (await watched.send(method, path, 501, {"model": "tiny"}))["error"]
    assert error["code"] == "observer"
    assert "http://dynamo:8000" in error["message"]


async def test_reads_answer_as_those_of_a_frontend(watched: Watched) -> None:
    assert (await watched.get("/health"))["status"] in ("healthy", "degraded")
    assert len((await watched.get("/health"))["instances"]) == 4
    assert [row["id"] for row in (await watched.get("/v1/models"))["data"]] == ["tiny"]
    settings = {row["name"]: row for row in (await watched.get("/v1/config"))["settings"]}
    assert settings["router_mode"]["source"] == "cards"
    assert not settings["router_temperature"]["known"]
    view = await watched.get("/v1/view")
    assert view["chats"] == "dynamo"
    error = (await watched.send("POST", "/v1/route", 400, {"prompt": "x"}))["error"]
    assert "--model-path" in error["message"]
    unknown = (await watched.get("/v1/workers/none", 404))["error"]["message"]
    assert "backend/" in unknown


async def test_operators_need_their_token() -> None:
    made = Watched(api_token=TOKEN)
    async with asyncio.timeout(patience(30)):
        await made.process.start()
        try:
            for path in ("/v1/decisions", "/v1/workers", "/v1/fleet", "/v1/view"):
                await made.get(path, 401)
            assert not (await made.get("/health"))["instances"]
        finally:
            await made.session.close()
            await made.process.close()
            await made.rig.events.close()


async def test_the_fleet_has_what_clients_of_the_frontends_got(watched: Watched) -> None:
    assert "traffic" not in await watched.get("/v1/fleet"), "no frontend counts requests"
    watched.beside.traffic = Traffic(40, 1, 2, prompt_tokens=900, cached_tokens=300)
    await until(lambda: watched.process.part(ShadowPart).shadow.reading.traffic is not None)
    found = (await watched.get("/v1/fleet"))["traffic"]
    assert (found["requests"], found["refused"], found["cached_tokens"]) == (40, 2, 300)


async def test_findings_and_a_lost_discovery_are_conditions(watched: Watched) -> None:
    shadow, conditions = watched.process.part(ShadowPart).shadow, watched.process.service.conditions
    watched.beside.findings = (Finding("DYR0203", "backend/x", "it is odd"),)
    shadow._judged_at = float("-inf")
    await shadow._read()
    assert conditions.get("DYR0203", "backend/x") is not None
    watched.beside.findings = ()
    shadow._judged_at = float("-inf")
    await shadow._read()
    assert conditions.get("DYR0203", "backend/x") is None

    watched.observer._take(Interrupted("no connection"))
    await shadow._read()
    lost = conditions.get(codes.DISCOVERY_INTERRUPTED, "memory")
    assert lost is not None
    assert "no connection" in lost.message
    assert len((await watched.get("/v1/workers"))["workers"]) == 4


async def test_days_of_requests_stay_within_bounds(watched: Watched) -> None:
    """Requests whose ends are lost, hops without a second one, and workers that come and go."""
    shadow, process = watched.process.part(ShadowPart).shadow, watched.process
    process.core.memory.max_bytes = 200_000
    prefill, decode = watched.workers(Role.PREFILL)[0], watched.workers(Role.DECODE)[0]
    for number in range(12_000):
        name = f"r{number}"
        shadow._take_sequence(added(name, prefill, None, 16))
        if number % 3:
            shadow._take_sequence(added(name, decode, (number, number + 1)))
    assert process.core.memory.size <= 200_000
    assert process.core.memory.recorded == 8_000
    assert len(shadow._open) <= 10_000
    load = watched.observer.load
    for number in range(30_000):
        load.routers.add(number)
        load.reported.add((number, 0))
    for _ in range(2):
        await watched.publish(added(f"last{_}", decode, (1,)))
    assert len(load.routers) < 20_000
    assert len(load.reported) < 20_000
