"""Frontends with ``--router``: one router process decides and books for all of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.documents.frontends import MAX_PLACES
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.http.frontends import FrontendsApi
from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.remote import link as remote_module
from dynctl.serving.remote.placement import RemoteRequests
from dynctl.serving.routing.config import FrontendConfig, Limits
from dynctl.serving.services.router_server import BookingsPart, build_router
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import RunningEngine, start_engine
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import Applied, Booked, Change, Freed, RouterConfig
from tests.dynctl.serving.fleets import (
    QUICK_ENGINE,
    QUICK_HEALTH,
    SLOW_HEALTH,
    TOKENIZER,
    WORDS,
    Site,
    chat_body,
    text_of,
    zone,
)
from tests.dynctl.serving.routed import request
from tests.waiting import patience, until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test does is a loss, not a machine that is slow."""
    monkeypatch.setattr(remote_module, "SILENT_S", 120.0)


class Several:
    """A router, its engines, and frontends that share it; all in this process."""

    def __init__(self, stack: AsyncExitStack, client: aiohttp.ClientSession) -> None:
        self.engines: dict[str, RunningEngine] = {}
        self.frontends: list[Site] = []
        self.router: ServingProcess
        self._stack = stack
        self.client = client
        self._workers: tuple[str, ...] = ()
        self._values: dict[str, Any] = {}

    async def start_router(self, port: int = 0, **settings: Any) -> None:
        self._values = {**self._values, **settings}
        values = {"workers": self._workers, "health": QUICK_HEALTH, **self._values}
        self.router = build_router(FrontendConfig(port=port, **values))
        self.router.part(BookingsPart).frontends.lease_s = 120.0
        await self.router.start()
        self._stack.push_async_callback(self.router.close)

    async def add_frontend(self, **settings: Any) -> Site:
        values = {
            "port": 0,
            "model_path": DEMO_MODEL_DIR,
            "health": QUICK_HEALTH,
            "limits": Limits(drain_s=2.0),
            "router_url": self.router.url,
            **settings,
        }
        frontend = build_frontend(FrontendConfig(**values))
        await frontend.start()
        self._stack.push_async_callback(frontend.close)
        site = Site(frontend, self.client)
        site.engines = self.engines
        self.frontends.append(site)
        return site

    async def kill_router(self) -> None:
        """As after SIGKILL: connections are cut, nothing is said."""
        for connections in self.router.listeners.connections:
            await connections.close()
        await self.router.close()

    def booked(self) -> int:
        """Requests that the router has booked."""
        return len(self.router.part(BookingsPart).selection)

    def load(self) -> dict[str, tuple[int, int, int]]:
        return Site(self.router, self.client).load()


@asynccontextmanager
async def several(
    engines: Sequence[Mapping[str, Any]] = ({"name": "a0"}, {"name": "b0"}),
    frontends: int = 2,
    *,
    router: Mapping[str, Any] | None = None,
    specs: Mapping[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[Several]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        )
        found = Several(stack, client)
        for given in engines:
            engine = await start_engine(EngineConfig(**{**QUICK_ENGINE, **given}), TOKENIZER)
            stack.push_async_callback(engine.close)
            found.engines[given["name"]] = engine
        for name, one in found.engines.items():
            more = (specs or {}).get(name, "").replace("{address}", one.url.partition("//")[2])
            found._workers += (f"{one.url},name={name}{more}",)
        await found.start_router(**(router or {}))
        streams = found.router.fleet.index.all_states
        await until(lambda: all(state.connected for state in streams().values()))
        for _ in range(frontends):
            await found.add_frontend(**settings)
        yield found


def remote(site: Site) -> RemoteRequests:
    requests = site.frontend.core.routing.requests
    assert requests is not None
    return requests


def conditions(site: Site) -> set[str]:
    site.service.health()
    return {one.code for one in site.service.conditions}


def why_lost(site: Site) -> str:
    """The condition's text; another attempt to join may give it a new reason."""
    return "".join(one.message for one in site.service.conditions if one.code == "ROUTER_LOST")


def worker_of(answer: Any) -> int:
    """The id of the worker that answered."""
    return int(answer["nvext"]["worker_id"]["decode_worker_id"])


NVEXT = {"extra_fields": ["worker_id"]}


@pytest.mark.seed("dynamo-1.6: several frontends: select and book in one call")
async def test_frontends_share_the_index_and_the_load():
    async with several() as fleet:
        one, other = fleet.frontends
        status, first, _ = await one.chat(WORDS * 12, nvext=NVEXT)
        assert status == 200
        chosen = fleet.router.service.router.registry.get(worker_of(first))
        assert chosen is not None
        index = fleet.router.service.router
        slot = index.registry.slot(chosen.worker_id, 0)
        assert slot is not None
        await until(lambda: index.cached_blocks(slot) > 8)
        for site in (other, one, other):
            await until(lambda: fleet.booked() == 0)
            status, again, _ = await site.chat(WORDS * 12, nvext=NVEXT)
            assert status == 200
            assert worker_of(again) == chosen.worker_id, "the shared index did not count"
        await until(lambda: fleet.booked() == 0)
        assert all(row == (0, 0, 0) for row in fleet.load().values())


async def test_streams_and_their_bookings():
    async with several() as fleet:
        one, _ = fleet.frontends
        status, events, _ = await one.stream("hello there", max_tokens=8)
        assert status == 200
        assert text_of(events)
        assert events[-1] == "[DONE]"
        await until(lambda: fleet.booked() == 0)


async def test_a_running_request_counts_for_the_other_frontend():
    slow = {"speedup_ratio": 0.5}
    async with several(({"name": "a0", **slow}, {"name": "b0", **slow})) as fleet:
        one, other = fleet.frontends
        running = [
            asyncio.create_task(site.chat(f"{number} " + WORDS, max_tokens=4, nvext=NVEXT))
            for number, site in enumerate((one, other))
        ]
        answers = await asyncio.gather(*running)
        assert {status for status, _, _ in answers} == {200}
        workers = {worker_of(body) for _, body, _ in answers}
        assert len(workers) == 2, "both requests went to one engine"


@pytest.mark.seed("dynamo-1.6: several frontends: decisions")
async def test_a_decision_is_explained_by_both_processes():
    async with several() as fleet:
        one, other = fleet.frontends
        _, _, headers = await one.chat("explain me")
        decision = headers["x-dynctl-decision"]
        for site in (one, other):
            status, past = await site.get(f"/v1/decisions/{decision}")
            assert status == 200, past
            assert past["id"] == decision
            assert len(past["decode"]["candidates"]) == 2
        status, listed = await other.get("/v1/decisions?limit=5")
        assert status == 200
        assert [row["id"] for row in listed["decisions"]] == [decision]


async def test_a_dry_run_is_that_of_the_router():
    async with several() as fleet:
        site = fleet.frontends[0]
        await site.chat(WORDS * 12)
        index = fleet.router.service.router
        await until(lambda: sum(index.cached_blocks(slot) for slot in range(2)) > 8)
        await until(lambda: fleet.booked() == 0)
        body = {"model": "demo", "messages": [{"role": "user", "content": WORDS * 12}]}
        status, result, _ = await site.post("/v1/route", body)
        assert status == 200
        rows = result["decode"]["candidates"]
        assert max(row["overlap_blocks"] for row in rows) > 8
        assert fleet.booked() == 0


async def test_a_frontend_shows_the_fleet_of_its_router():
    async with several() as fleet:
        one, other = fleet.frontends
        await one.chat(WORDS * 12)
        await until(lambda: fleet.booked() == 0)
        slots = range(2)
        index = fleet.router.service.router
        await until(lambda: sum(index.cached_blocks(slot) for slot in slots) > 8)
        other.service.set_condition("TOKENIZER_DIFFERS", "demo", "of this process")
        at_router = Site(fleet.router, fleet.client)
        for path in ("/v1/workers", "/v1/config"):
            _, shown = await other.get(path)
            _, expected = await at_router.get(path)
            assert shown.keys() == expected.keys()
        _, shown = await other.get("/v1/workers")
        ranks = [rank for row in shown["workers"] for rank in row["ranks"]]
        assert sum(rank["cached_blocks"] for rank in ranks) > 8
        _, load = await other.get("/v1/fleet")
        assert load["recorded"] == fleet.router.core.memory.recorded
        assert "TOKENIZER_DIFFERS" in {row["code"] for row in load["conditions"]}
        status, _ = await other.get("/v1/view")
        assert status == 409
        port = fleet.router.port
        await fleet.kill_router()
        await until(lambda: "ROUTER_LOST" in conditions(other))
        status, load = await other.get("/v1/fleet")
        assert status == 200
        assert "ROUTER_LOST" in {row["code"] for row in load["conditions"]}
        status, shown = await other.get("/v1/workers")
        assert {row["name"] for row in shown["workers"]} == {"a0", "b0"}
        await fleet.start_router(port)


async def test_readings_of_the_router_are_bounded(monkeypatch):
    monkeypatch.setattr(remote_module, "_MAX_READING", 1)
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        reading = asyncio.create_task(site.get("/v1/decisions?wait=30"))
        await until(lambda: remote(site).link._reading == 1)
        status, shown = await site.get("/v1/workers")  # what this process knows
        assert status == 200
        assert {row["source"] for row in shown["workers"]} == {"router"}
        assert (await site.chat("x"))[0] == 200
        assert (await reading)[0] == 200
        assert remote(site).link._reading == 0


@pytest.mark.parametrize("with_model", [False, True])
async def test_a_router_alone_needs_no_tokenizer(caplog, with_model):
    """Its frontends tokenize; with --model-path it can for dry runs."""
    caplog.set_level("INFO")
    more = {"model_path": DEMO_MODEL_DIR} if with_model else {}
    async with several(frontends=0, router=more) as fleet:
        fleet.router.log_start()
        assert ("tokenizer" in caplog.text) is with_model


async def test_the_start_names_the_router_and_no_estimates(caplog):
    caplog.set_level("INFO")
    async with several(frontends=1, model_path=None) as fleet:
        caplog.clear()
        fleet.frontends[0].frontend.log_start()
        assert f"router: {fleet.router.url}" in caplog.text
        assert "the engines' /tokenize" in caplog.text
        assert "estimated" not in caplog.text
        assert "not modelled" not in caplog.text


@pytest.mark.seed("dynamo-1.6: several frontends: only hashes travel")
async def test_only_hashes_travel():
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        seen: list[bytes] = []
        link = remote(site).link
        exchange = link._exchange

        async def recorded(action: str, body: bytes, timeout_s: float | None) -> bytes:
            seen.append(body)
            return await exchange(action, body, timeout_s)

        link._exchange = recorded  # type: ignore[method-assign]
        await site.chat("a confidential sentence about platypuses " * 8, user="alice")
        await until(lambda: fleet.booked() == 0)
        sent = b"".join(seen)
        assert b"sequence_hashes" in sent
        assert b"platypus" not in sent
        assert b"alice" not in sent
        tokens = TOKENIZER.encode("a confidential sentence about platypuses")
        assert ",".join(map(str, tokens[2:6])).encode() not in sent
        # Packed as hashes are, they would be small numbers.
        requests = [
            one["request"] for body in seen for one in msgspec.json.decode(body).get("places", ())
        ]
        assert len(requests) == 1
        packed = base64.b64decode(requests[0]["sequence_hashes"])
        assert min(struct.unpack(f"<{len(packed) // 8}Q", packed)) > 2**32


async def test_messages_of_requests_do_not_go_through_aiohttp(monkeypatch):
    seen: list[str] = []
    exchange = FrontendsApi.exchange

    async def noted(api: FrontendsApi, http: Any) -> Any:
        seen.append(type(http).__name__)
        return await exchange(api, http)

    monkeypatch.setattr(FrontendsApi, "exchange", noted)
    async with several(frontends=1, router={"api_token": "t0ken"}, router_token="t0ken") as fleet:
        site = fleet.frontends[0]
        for _ in range(2):
            await site.get("/v1/workers")  # on a connection of aiohttp
            assert (await site.chat(WORDS))[0] == 200
        assert set(seen) == {"PlainRequest"}
        url = f"{fleet.router.url}/v1/frontends/exchange"
        async with fleet.client.post(url, json={"lease": "", "number": 1}) as answer:
            assert answer.status == 401
        headers = {"authorization": "Bearer t0ken"}
        async with fleet.client.post(url, json={"lease": "x", "number": 1}, headers=headers) as it:
            assert it.status == 410


async def test_requests_that_arrive_meanwhile_share_a_message():
    """While one message has no answer, requests are gathered for the next one."""
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        link = remote(site).link
        exchange = link._exchange
        sizes: list[int] = []
        held, go = asyncio.Event(), asyncio.Event()

        async def slow(action: str, body: bytes, timeout_s: float | None) -> bytes:
            places = msgspec.json.decode(body).get("places", ())
            if action == "exchange" and places:
                sizes.append(len(places))
                held.set()
                await go.wait()
            return await exchange(action, body, timeout_s)

        link._exchange = slow  # type: ignore[method-assign]
        first = asyncio.create_task(site.chat(WORDS))
        await held.wait()
        more = [asyncio.create_task(site.chat(f"{WORDS} {n}")) for n in range(MAX_PLACES + 2)]
        await until(lambda: len(link._placing) == len(more))
        # One client leaves before its request is sent.
        more[0].cancel()
        await asyncio.gather(more[0], return_exceptions=True)
        await until(lambda: any(answer.done() for _, answer in link._placing))
        go.set()
        answers = await asyncio.gather(first, *more[1:])
        assert {status for status, _, _ in answers} == {200}
        assert sizes == [1, MAX_PLACES, 1]
        await until(lambda: fleet.booked() == 0)
        assert not remote(site)._requests


async def test_a_message_with_many_requests_takes_several_turns():
    async with several(frontends=1) as fleet:
        turn, booked = 0, Counter[int]()

        async def count() -> None:
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        def note(change: Change, _now: float, _applied: Applied) -> None:
            booked[turn] += isinstance(change, Booked)

        link, counting = remote(fleet.frontends[0]).link, asyncio.create_task(count())
        fleet.router.service.add_tap(note)
        (model,) = fleet.router.service.models()
        wanted = [request(model=model, request_id=f"r{n}") for n in range(MAX_PLACES)]
        answers = await asyncio.gather(*(link.place(each, 0, dry=False) for each in wanted))
        counting.cancel()
    assert [answer.booked for answer in answers] == [["aggregated"]] * MAX_PLACES
    assert sum(booked.values()) == MAX_PLACES
    assert 1 < max(booked.values()) <= 4


async def test_a_message_that_the_router_refuses_loses_neither_requests_nor_reports():
    """The requests are placed alone, and the reports are sent again without them."""
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        link = remote(site).link
        exchange = link._exchange
        refused: list[int] = []

        async def refuse_mixed(action: str, body: bytes, timeout_s: float | None) -> bytes:
            message = msgspec.json.decode(body)
            if action == "exchange" and message.get("places"):
                refused.append(len(message.get("reports", ())))
                error = {"error": {"code": "invalid_message", "message": "refused"}}
                raise UpstreamFailure("status", "", status=400, body=msgspec.json.encode(error))
            return await exchange(action, body, timeout_s)

        link._exchange = refuse_mixed  # type: ignore[method-assign]
        assert (await site.chat(WORDS))[0] == 200
        await until(lambda: fleet.booked() == 0)
        # Its end waits for the message that brings the next request.
        link._gathering = asyncio.get_running_loop().call_later(3600, link._reports_are_due)
        running = asyncio.create_task(site.chat(f"{WORDS} 1"))
        assert (await running)[0] == 200
        assert fleet.booked() == 1
        assert (await site.chat(f"{WORDS} 2"))[0] == 200
        assert max(refused) > 0
        link._gathering.cancel()
        link._reports_are_due()
        await until(lambda: fleet.booked() == 0)


async def test_reports_go_with_the_next_request_and_an_idle_link_sends_only_heartbeats():
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        link = remote(site).link
        exchange = link._exchange
        messages: list[tuple[int, int]] = []

        async def recorded(action: str, body: bytes, timeout_s: float | None) -> bytes:
            message = msgspec.json.decode(body)
            messages.append((len(message.get("reports", ())), len(message.get("places", ()))))
            return await exchange(action, body, timeout_s)

        link._exchange = recorded  # type: ignore[method-assign]
        # Reports become due only with a heartbeat.
        link._gathering = asyncio.get_running_loop().call_later(3600, link._reports_are_due)
        for number in range(5):
            assert (await site.chat(f"{WORDS} {number}"))[0] == 200
        placed = [reports for reports, places in messages if places]
        assert len(placed) == 5
        assert sum(reports for reports, _ in messages) >= 4
        await until(lambda: fleet.booked() == 0)
        link._gathering.cancel()
        empty = messages.count((0, 0))
        link._reports_are_due()  # they went along
        assert not link._due
        assert messages.count((0, 0)) == empty


async def test_a_fault_while_requests_are_placed_leaves_none_of_them_waiting(monkeypatch):
    async with several(frontends=1) as fleet:
        link = remote(fleet.frontends[0]).link
        ask = link._ask
        faults: list[str] = []

        async def broken(action: str, *arguments: Any, **more: Any) -> Any:
            if action == "exchange" and arguments[0].places and not faults:
                faults.append(action)
                raise LookupError("a fault")
            return await ask(action, *arguments, **more)

        monkeypatch.setattr(link, "_ask", broken)
        async with asyncio.timeout(patience(20)):
            assert (await fleet.frontends[0].chat(WORDS))[0] == 200
        assert faults


async def test_keys_of_engines_and_the_token_stay_apart():
    async with several(frontends=0, router={"api_token": "t0ken"}) as fleet:
        added = {"url": fleet.engines["b0"].url, "name": "added"}
        headers = {"authorization": "Bearer t0ken"}
        await fleet.router.fleet.remove("b0")
        status, body, _ = await Site(fleet.router, fleet.client).post(
            "/v1/workers", added, headers=headers
        )
        assert status == 201, body
        site = await fleet.add_frontend(router_token="t0ken", engine_api_key="sk-engine")
        sent = site.frontend.core.upstream._credentials
        assert sent == {fleet.engines["a0"].url: "Bearer sk-engine"}
        # Nothing that the router sends has a key, and its token goes to no engine.
        status, cards = await site.get("/v1/workers")
        assert status == 200
        assert "sk-engine" not in str(cards)
        assert remote(site).link._upstream._credentials == {fleet.router.url: "Bearer t0ken"}


DISAGGREGATED = (
    {"name": "p0", "role": "prefill"},
    {"name": "d0", "role": "decode"},
    {"name": "d1", "role": "decode"},
)


async def test_prefill_then_decode():
    async with several(DISAGGREGATED, frontends=1) as fleet:
        site = fleet.frontends[0]
        status, body, headers = await site.chat(WORDS, nvext=NVEXT)
        assert status == 200, body
        ids = body["nvext"]["worker_id"]
        registry = fleet.router.service.router.registry
        chosen = {hop: registry.get(int(ids[f"{hop}_worker_id"])) for hop in ("prefill", "decode")}
        assert chosen["prefill"] == registry.by_name("p0")
        assert chosen["decode"] in (registry.by_name("d0"), registry.by_name("d1"))
        await until(lambda: fleet.booked() == 0)
        assert all(row == (0, 0, 0) for row in fleet.load().values())
        status, past = await site.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert past["prefill"]["winner"]["worker"] == "p0"


async def test_bootstrap_engines_get_both_halves_at_once():
    bootstrap = {"p0": ",bootstrap={address}"}
    engines = ({"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"})
    async with several(engines, frontends=1, specs=bootstrap) as fleet:
        site = fleet.frontends[0]
        booked: list[list[str]] = []
        place = remote(site).link.place

        async def recorded(*arguments: Any, **more: Any) -> Any:
            found = await place(*arguments, **more)
            booked.append(list(found.booked))
            return found

        remote(site).link.place = recorded  # type: ignore[method-assign]
        status, body, _ = await site.chat(WORDS, max_tokens=4)
        assert status == 200, body
        assert booked == [["prefill", "decode"]]
        await until(lambda: fleet.booked() == 0)
        assert all(row == (0, 0, 0) for row in fleet.load().values())


async def test_a_required_policy_holds_with_and_without_the_router():
    engines = tuple(
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    )
    async with several(engines, frontends=1) as fleet:
        site = fleet.frontends[0]
        port = fleet.router.port

        async def stays_in_its_zone() -> None:
            registry = site.service.router.registry
            for number in range(4):
                status, body, _ = await site.chat(f"{number} {WORDS}", max_tokens=4, nvext=NVEXT)
                assert status == 200, body
                ids = body["nvext"]["worker_id"]
                hops = [registry.get(int(ids[f"{hop}_worker_id"])) for hop in ("prefill", "decode")]
                zones = {one.domains["zone"] for one in hops if one is not None}
                assert len(zones) == 1

        await stays_in_its_zone()
        await fleet.kill_router()
        await until(lambda: "ROUTER_LOST" in conditions(site))
        await stays_in_its_zone()
        await fleet.start_router(port)
        await until(lambda: "ROUTER_LOST" not in conditions(site))
        await stays_in_its_zone()


async def test_an_adapter_is_known_to_every_frontend():
    async with several(({"name": "a0", "lora": ("tuned",)}, {"name": "b0"}), frontends=1) as fleet:
        site = fleet.frontends[0]
        _, models = await site.get("/v1/models")
        assert {row["id"] for row in models["data"]} == {"demo", "tuned"}
        for number in range(3):
            body = chat_body(f"{number} {WORDS}", nvext=NVEXT) | {"model": "tuned"}
            status, answer, _ = await site.post("/v1/chat/completions", body)
            assert status == 200, answer
            chosen = fleet.router.service.router.registry.get(worker_of(answer))
            assert chosen is not None
            assert chosen.name == "a0"


async def test_a_failed_engine_is_excluded_and_booked_once():
    # Requests find out, not probes.
    async with several(router={"health": SLOW_HEALTH}) as fleet:
        fleet.engines["a0"].engine.faults.update({"refuse": 500})
        registry = fleet.router.service.router.registry
        broken = registry.by_name("a0")
        assert broken is not None
        # The router learns of failures from both frontends and ejects the engine.
        number = 0
        async with asyncio.timeout(patience(20)):
            while registry.unavailable_reason(broken.worker_id) is None:
                for site in fleet.frontends:
                    number += 1
                    status, body, _ = await site.chat(f"{number} {WORDS}")
                    assert status == 200, body
        ejected = {one.code for one in fleet.router.service.conditions}
        assert "WORKER_EJECTED" in ejected
        copies = [site.service.router.registry for site in fleet.frontends]
        await until(lambda: all(one.unavailable_reason(broken.worker_id) for one in copies))
        await until(lambda: fleet.booked() == 0)
        assert all(row == (0, 0, 0) for row in fleet.load().values())


async def test_a_refusal_of_the_router_explains_itself():
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        taint = {"required_taints": ["nowhere"]}
        status, body, _ = await site.chat("x", nvext={"routing_constraints": taint})
        assert status == 503
        details = body["error"]["dynctl"]
        assert details["filter"] == "taints" or details["rejected"], details
        assert {row["worker"] for row in details["rejected"]} == {"a0", "b0"}
        assert fleet.booked() == 0


async def test_a_client_that_leaves_leaves_no_booking():
    slow = {"name": "a0", "speedup_ratio": 0.2}
    async with several((slow,), frontends=1) as fleet:
        site = fleet.frontends[0]
        request = asyncio.create_task(site.chat(WORDS * 8, max_tokens=64))
        await until(lambda: fleet.booked() == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: fleet.booked() == 0)


async def test_workers_that_come_and_go_are_those_of_the_router():
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        status, listed = await site.get("/v1/workers")
        assert {row["name"] for row in listed["workers"]} == {"a0", "b0"}
        await fleet.router.fleet.remove("b0")
        await until(lambda: len(site.frontend.fleet) == 1)
        _, models = await site.get("/v1/models")
        assert [row["id"] for row in models["data"]] == ["demo"]
        status, body, _ = await site.post("/busy_threshold", {"model": "demo"})
        assert status == 409
        assert fleet.router.url in body["error"]["message"]


# -- the router's queue --------------------------------------------------------------------------


def hold(fleet: Several) -> None:
    """Book prefill load on every worker, as another frontend would."""
    for one in list(fleet.router.service.router.registry):
        booked = Booked(f"load-{one.name}", "aggregated", one.worker_id, 0, prefill_tokens=500)
        assert fleet.router.service.apply(booked).ok


def queueing(**settings: Any) -> dict[str, Any]:
    return {"router": RouterConfig().with_values({"router_queue_threshold": 0.0, **settings})}


async def test_a_request_waits_in_the_queue_of_the_router():
    async with several(frontends=1, router=queueing()) as fleet:
        site = fleet.frontends[0]
        hold(fleet)
        task = asyncio.create_task(site.chat("hello", max_tokens=4))
        queue = fleet.router.service.router.queue
        await until(lambda: len(queue) == 1)
        assert not task.done()
        fleet.router.service.apply(Freed("load-a0"))
        status, _, headers = await task
        assert status == 200
        assert float(headers["x-dynctl-queue-wait-ms"]) >= 0
        await until(lambda: fleet.booked() == 0)


async def test_a_client_that_leaves_leaves_the_queue_of_the_router():
    async with several(frontends=1, router=queueing()) as fleet:
        site = fleet.frontends[0]
        hold(fleet)
        queue = fleet.router.service.router.queue
        task = asyncio.create_task(site.chat("hello", max_tokens=4))
        await until(lambda: len(queue) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(queue) == 0)
        assert fleet.booked() == 0
        assert not remote(site)._requests


async def test_a_full_queue_of_the_router_is_its_refusal():
    async with several(frontends=1, router=queueing(router_queue_max_requests=1)) as fleet:
        site = fleet.frontends[0]
        hold(fleet)
        queue = fleet.router.service.router.queue
        task = asyncio.create_task(site.chat("hello", max_tokens=4))
        await until(lambda: len(queue) == 1)
        status, body, _ = await site.chat("one too many", max_tokens=4)
        assert status == fleet.router.service.router.config.overload_status_code
        assert "queue" in body["error"]["message"]
        assert "ROUTER_LOST" not in conditions(site)
        fleet.router.service.apply(Freed("load-a0"))
        assert (await task)[0] == 200


async def test_requests_that_wait_when_the_router_is_lost_are_routed_by_load():
    async with several(frontends=1, router=queueing()) as fleet:
        site = fleet.frontends[0]
        hold(fleet)
        task = asyncio.create_task(site.chat("hello", max_tokens=4))
        await until(lambda: len(fleet.router.service.router.queue) == 1)
        port = fleet.router.port
        await fleet.kill_router()
        assert (await task)[0] == 200
        await fleet.start_router(port)
        await until(lambda: "ROUTER_LOST" not in conditions(site))


# -- loss --------------------------------------------------------------------------------------


@pytest.mark.seed("dynamo-1.6: several frontends: loss of the router")
async def test_without_the_router_requests_are_routed_by_load_and_it_heals():
    async with several() as fleet:
        for site in fleet.frontends:
            await site.chat(WORDS)
        port = fleet.router.port
        answers: list[int] = []
        stop = asyncio.Event()

        async def client(site: Site, number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                status, _, _ = await site.chat(f"{number} {count} " + WORDS, max_tokens=4)
                answers.append(status)

        clients = [
            asyncio.create_task(client(site, number))
            for number, site in enumerate(fleet.frontends * 3)
        ]
        await until(lambda: len(answers) > 20)
        await fleet.kill_router()
        await until(lambda: all("ROUTER_LOST" in conditions(one) for one in fleet.frontends))
        served = len(answers)
        await until(lambda: len(answers) > served + 20)
        site = fleet.frontends[0]
        status, result, _ = await site.post("/v1/route", chat_body("x"))
        assert status == 200
        assert "DYR0730" in {row["code"] for row in result["doubts"]}
        await fleet.start_router(port)
        await until(lambda: not any("ROUTER_LOST" in conditions(one) for one in fleet.frontends))
        served = len(answers)
        decided = fleet.router.core.memory.recorded
        await until(lambda: len(answers) > served + 20)
        assert fleet.router.core.memory.recorded > decided
        stop.set()
        await asyncio.gather(*clients)
        assert set(answers) == {200}
        await until(lambda: fleet.booked() == 0)
        assert all(row == (0, 0, 0) for row in fleet.load().values())


async def test_a_router_that_hangs_is_lost_and_requests_go_on(monkeypatch):
    monkeypatch.setattr(remote_module, "SILENT_S", 0.5)
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        await site.chat(WORDS)
        hanging = asyncio.Event()
        link = remote(site).link
        exchange = link._exchange

        async def stopped(action: str, body: bytes, timeout_s: float | None) -> bytes:
            """As a connection to a stopped process: it is open, and no byte comes."""
            if not hanging.is_set():
                return await exchange(action, body, timeout_s)
            waiting = link._waiting
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while waiting is link._waiting:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            raise UpstreamFailure("timeout", "the router did not respond in time")

        link._exchange = stopped  # type: ignore[method-assign]
        hanging.set()
        status, _, _ = await site.chat(WORDS)
        assert status == 200
        assert "ROUTER_LOST" in conditions(site)
        hanging.clear()
        await until(lambda: "ROUTER_LOST" not in conditions(site))


async def test_a_router_that_stops_in_order_leaves_the_requests_to_the_frontends():
    async with several(frontends=1) as fleet:
        site = fleet.frontends[0]
        port = fleet.router.port
        await fleet.router.drain()
        for _ in range(3):
            assert (await site.chat(WORDS))[0] == 200
        assert "ROUTER_LOST" in conditions(site)
        assert "shutting down" in why_lost(site)
        await fleet.kill_router()
        await fleet.start_router(port)
        await until(lambda: "ROUTER_LOST" not in conditions(site))
        assert (await site.chat(WORDS))[0] == 200


@pytest.mark.seed("dynamo-1.6: several frontends: loss of the router")
async def test_running_requests_are_booked_again_at_a_new_router():
    slow = {"speedup_ratio": 0.05}
    engines = ({"name": "a0", **slow}, {"name": "b0", **slow})
    async with several(engines, frontends=1) as fleet:
        site = fleet.frontends[0]
        running = [
            asyncio.create_task(site.stream(f"{n} " + WORDS, max_tokens=20)) for n in range(3)
        ]
        await until(lambda: fleet.booked() == 3)
        before = {name: row[0] for name, row in fleet.load().items()}
        port = fleet.router.port
        await fleet.kill_router()
        await until(lambda: "ROUTER_LOST" in conditions(site))
        await fleet.start_router(port)
        await until(lambda: "ROUTER_LOST" not in conditions(site))
        assert fleet.booked() == 3
        assert {name: row[0] for name, row in fleet.load().items()} == before
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
        await until(lambda: fleet.booked() == 0)


async def test_a_silent_frontend_loses_its_lease_and_its_bookings():
    slow = {"name": "a0", "speedup_ratio": 0.05}
    async with several((slow,), frontends=2) as fleet:
        dead, alive = fleet.frontends
        running = asyncio.create_task(dead.stream(WORDS, max_tokens=64))
        await until(lambda: fleet.booked() == 1)
        await dead.frontend.service.tasks.close()  # no heartbeats: as after SIGKILL
        remote(dead).link.up = False
        fleet.router.part(BookingsPart).frontends.lease_s = 0.5
        await until(lambda: fleet.booked() == 0)
        assert fleet.load()["a0"] == (0, 0, 0)
        status, _ = await Site(fleet.router, alive.client).get("/v1/frontends")
        assert status == 200
        # The other one joins again where its lease ended too.
        await until(lambda: remote(alive).link.up)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_frontend_that_stops_leaves():
    async with several() as fleet:
        assert len(fleet.router.part(BookingsPart).frontends) == 2
        await fleet.frontends[0].frontend.close()
        assert len(fleet.router.part(BookingsPart).frontends) == 1


async def test_a_frontend_starts_without_its_router(monkeypatch):
    monkeypatch.setattr(remote_module, "START_S", 0.2)
    async with several(frontends=0) as fleet:
        port = fleet.router.port
        url = fleet.router.url
        await fleet.kill_router()
        site = await fleet.add_frontend(router_url=url)
        assert "ROUTER_LOST" in conditions(site)
        status, _, _ = await site.chat("x")
        assert status == 404
        await fleet.start_router(port)
        await until(lambda: "ROUTER_LOST" not in conditions(site))
        status, _, _ = await site.chat("x")
        assert status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"lease":1}', b"\xff", b"<html>", b"[" * 5000], ids=repr
)
async def test_a_router_that_is_none(body, monkeypatch):
    monkeypatch.setattr(remote_module, "START_S", 0.2)

    async def answers(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers)
    async with TestServer(app) as server, several(frontends=0) as fleet:
        site = await fleet.add_frontend(router_url=f"http://127.0.0.1:{server.port}")
        await until(lambda: "not one of a router" in why_lost(site))
        assert (await site.chat("x"))[0] == 404


async def test_a_router_without_frontends_is_named(monkeypatch):
    """An engine, or a dynctl of another version."""
    monkeypatch.setattr(remote_module, "START_S", 0.2)
    async with several(frontends=0) as fleet:
        site = await fleet.add_frontend(router_url=fleet.engines["a0"].url)
        await until(lambda: "404" in why_lost(site))


async def test_a_wrong_token_is_named():
    async with several(frontends=0, router={"api_token": "t0ken"}) as fleet:
        site = await fleet.add_frontend(router_token="other")
        await until(lambda: "--router-token" in why_lost(site))
        assert "other" not in why_lost(site)
        right = await fleet.add_frontend(router_token="t0ken")
        assert "ROUTER_LOST" not in conditions(right)
        status, _, _ = await right.chat("x")
        assert status == 200


@pytest.mark.seed("dynamo-1.6: several frontends: a shared port")
async def test_frontends_share_a_port():
    async with several(frontends=1, share_port=True) as fleet:
        one = fleet.frontends[0]
        other = await fleet.add_frontend(port=one.frontend.port, share_port=True)
        assert other.frontend.port == one.frontend.port
        seen: set[str] = set()
        async with asyncio.timeout(patience(20)):
            while len(seen) < 2:
                async with aiohttp.ClientSession() as client:
                    url = one.url("/v1/chat/completions")
                    async with client.post(url, json=chat_body("x")) as answer:
                        assert answer.status == 200
                        seen.add(answer.headers["x-dynctl-decision"][:10])
