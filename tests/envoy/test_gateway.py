"""Requests of clients through a real Envoy that asks `serve epp`, to simulated engines."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web

from dynctl.serving.routing.config import PickerConfig
from dynctl.wire.envoy import ext_proc
from dynctl.wire.envoy.health import Serving
from router_core import RouterConfig, ThresholdsSet
from tests.dynamo.processes import ProcessGroup
from tests.dynctl.serving.fleets import WORDS, chat_body, events_of, zone
from tests.dynctl.serving.gateways import Gateway as Picker
from tests.dynctl.serving.gateways import gateway as picker_site
from tests.envoy.gateway import Gateway, configuration, start_gateway
from tests.http_servers import served
from tests.ports import free_port
from tests.waiting import patience, until

TWO = ({"name": "a"}, {"name": "b"})
CHAT = chat_body(WORDS * 20, max_tokens=8)
FULL = "FULL_DUPLEX_STREAMED"
#: Modes of request and response bodies, whether bodies come early, whether the prompt is read.
MODES = (
    (FULL, FULL, False, True),
    ("BUFFERED", "BUFFERED", False, True),
    ("BUFFERED", "STREAMED", False, True),
    ("BUFFERED", "NONE", False, True),
    (FULL, "NONE", False, True),
    ("STREAMED", "STREAMED", True, True),
    ("STREAMED", "STREAMED", False, False),
    ("NONE", "NONE", False, False),
)


@asynccontextmanager
async def behind_envoy(
    group: ProcessGroup, engines: Any = TWO, envoy: dict[str, Any] | None = None, **given: Any
) -> AsyncIterator[tuple[Picker, Gateway]]:
    """Engines, a picker with TLS, and an Envoy that asks it."""
    given = {"picker": PickerConfig(port=0, health_port=0), **given}
    async with picker_site(engines, **given) as site:
        await site.connected()
        port = site.part.picker_port
        gateway = await asyncio.to_thread(
            lambda: start_gateway(group, group.directory, port, **(envoy or {}))
        )
        try:
            yield site, gateway
        finally:
            gateway.http.close()


async def ask(
    site: Picker,
    gateway: Gateway,
    body: Any = CHAT,
    path: str = "/v1/chat/completions",
    **given: Any,
) -> tuple[int, bytes, Any]:
    async with site.client.post(gateway.url + path, json=body, **given) as answer:
        return answer.status, await answer.read(), answer.headers


@pytest.mark.parametrize(("request_body", "response_body", "eager", "reads"), MODES)
async def test_body_modes(
    request_body: str, response_body: str, eager: bool, reads: bool, group: ProcessGroup
) -> None:
    modes = {"request_body": request_body, "response_body": response_body, "eager": eager}
    async with behind_envoy(group, envoy=modes) as (site, gateway):
        router = site.service.router
        reused = []
        for number in range(4):
            stream = bool(number % 2)
            body = {**CHAT, "stream": stream, "stream_options": {"include_usage": True}}
            status, raw, headers = await ask(
                site, gateway, body if stream else CHAT, headers={"x-prefiller-host-port": "x:1"}
            )
            assert status == 200, raw
            assert headers["x-dynctl-decision"]
            usage = (events_of(raw)[-2] if stream else msgspec.json.decode(raw))["usage"]
            reused.append(usage["prompt_tokens_details"]["cached_tokens"])
            await site.idle()
            # The engine reports its blocks a moment after its answer.
            slots = [s for w in router.registry for s in router.registry.slots(w.worker_id)]
            await until(lambda: any(router.cached_blocks(s) for s in slots))  # noqa: B023
        if reads:
            # All but the first find the blocks of the first: the prompt decided.
            assert reused == [0, *[464] * 3]
        _, found = await site.get("/v1/decisions")
        assert len(found["decisions"]) == 4
        async with site.client.get(gateway.url + "/v1/models") as answer:
            assert answer.status == 200
        await until(lambda: not site.frontend.core.inference.in_flight)


async def test_a_long_body_arrives_whole(group: ProcessGroup) -> None:
    async with behind_envoy(group) as (site, gateway):
        body = {**CHAT, "metadata": {"pad": "z" * 700_000}}
        status, raw, _ = await ask(site, gateway, body)
        assert (status, msgspec.json.decode(raw)["object"]) == (200, "chat.completion")


async def test_headers_of_the_picker_reach_the_engine_and_those_of_clients_do_not(
    group: ProcessGroup,
) -> None:
    seen: list[dict[str, str]] = []

    async def engine(http: web.Request) -> web.Response:
        if http.path == "/v1/chat/completions":
            seen.append({name.lower(): value for name, value in http.headers.items()})
            assert await http.json() == CHAT
        return web.json_response({"data": [{"id": "demo"}], "choices": [], "usage": {}})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine)
    async with served(app) as url:
        worker, address = (f"{url},name=w",), url.removeprefix("http://")
        async with behind_envoy(
            group, [], workers=worker, picker=PickerConfig(port=0, health_port=0)
        ) as (site, gateway):
            evil = dict.fromkeys(ext_proc.OWN_HEADERS, "1")
            status, raw, _ = await ask(site, gateway, headers=evil)
            assert status == 200, raw
            assert seen[0][ext_proc.DESTINATION] == address
            own = {name: seen[0][name] for name in ext_proc.OWN_HEADERS if name in seen[0]}
            worker_id = site.service.router.registry.by_name("w").worker_id
            assert own == {
                ext_proc.DESTINATION: address,
                ext_proc.WORKER_ID: str(worker_id),
                ext_proc.DP_RANK: "0",
                ext_proc.ROUTING_MODE: "aggregated",
            }


async def test_a_subset_is_honoured(group: ProcessGroup) -> None:
    async with picker_site(TWO, picker=PickerConfig(port=0, health_port=0)) as site:
        at = site.engines["b"].url.removeprefix("http://")
        nothing = ["10.9.9.9:1"]
        for subset in ([at], f"10.9.9.9:1,{at}", nothing):
            start = partial(start_gateway, subset=subset)
            gateway = await asyncio.to_thread(start, group, group.directory, site.part.picker_port)
            for _ in range(3):
                status, raw, _ = await ask(site, gateway)
                if subset == nothing:
                    code = msgspec.json.decode(raw)["error"]["code"]
                    assert (status, code) == (503, "no_endpoint_in_subset")
                else:
                    assert status == 200, raw
            gateway.http.close()
        _, found = await site.get("/v1/decisions")
        assert {row["decode"]["worker"] for row in found["decisions"]} == {"b"}


async def test_refusals_are_the_pickers(group: ProcessGroup) -> None:
    config = RouterConfig().with_values({"overload_status_code": 429})
    slow = [{**one, "prefill_tokens_per_s": 20.0, "speedup_ratio": 1.0} for one in TWO]
    async with behind_envoy(group, slow, router=config) as (site, gateway):
        status, raw, headers = await ask(site, gateway, {**CHAT, "model": "no"})
        assert (status, headers["content-type"]) == (404, "application/json")
        assert msgspec.json.decode(raw)["error"]["code"] == "model_not_found"
        site.service.apply(ThresholdsSet("demo", {"active_prefill_tokens_threshold": 100}))
        running = [asyncio.create_task(ask(site, gateway)) for _ in range(2)]
        await until(lambda: all(row[0] for row in site.load().values()))
        status, raw, headers = await ask(site, gateway)
        assert (status, headers["retry-after"]) == (429, "1")
        assert msgspec.json.decode(raw)["error"]["type"] == "overloaded"
        for task in running:
            task.cancel()
        await site.idle()
        for engine in site.engines.values():
            await engine.close()
        registry = site.service.router.registry
        await until(lambda: all(registry.unavailable_reason(w.worker_id) for w in registry))
        status, raw, _ = await ask(site, gateway)
        assert (status, msgspec.json.decode(raw)["error"]["type"]) == (503, "service_unavailable")


@pytest.mark.parametrize("response_body", [FULL, "NONE"])
async def test_a_client_that_leaves_frees_its_booking(
    response_body: str, group: ProcessGroup
) -> None:
    slow = [{"name": "a", "speedup_ratio": 1.0, "decode_itl_ms": 200.0}]
    async with behind_envoy(group, slow, envoy={"response_body": response_body}) as (site, gateway):
        body = {**CHAT, "stream": True, "max_tokens": 2000}
        async with site.client.post(gateway.url + "/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
            assert site.load()["a"][:2] == (1, 0)
        await site.idle()
        await until(lambda: not site.frontend.core.inference.in_flight)


async def test_prefill_and_decode(group: ProcessGroup) -> None:
    engines = [
        {"name": "p", "role": "prefill", **zone("zone-a")},
        {"name": "d", "role": "decode", **zone("zone-a")},
    ]
    async with behind_envoy(group, engines) as (site, gateway):
        status, raw, headers = await ask(site, gateway)
        assert status == 200, raw
        _, why = await site.get(f"/v1/decisions/{headers['x-dynctl-decision']}")
        assert why["prefill"]["winner"]["worker"] == "p"
        assert why["decode"]["winner"]["worker"] == "d"
        await site.idle()


async def test_many_requests_at_once(group: ProcessGroup) -> None:
    async with behind_envoy(group, envoy={"threads": 2}) as (site, gateway):
        bodies = [
            {**CHAT, **chat_body(WORDS * (number % 7 + 1), stream=True)} for number in range(200)
        ]
        answers = await asyncio.gather(*(ask(site, gateway, body) for body in bodies))
        assert {status for status, _, _ in answers} == {200}
        assert all(raw.endswith(b"data: [DONE]\n\n") for _, raw, _ in answers)
        await site.idle()
        assert await site.health("readiness") == Serving.SERVING


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_is_killed(fail_open: bool, group: ProcessGroup) -> None:
    async with picker_site(TWO) as site:
        worker = ",".join([site.engines["a"].url, "name=a"])
        port, health, http = free_port(), free_port(), free_port()
        command = [sys.executable, "-m", "dynctl", "serve", "epp", "--worker", worker]
        command += ["--port", str(port), "--health-port", str(health), "--http-port", str(http)]
        picker = group.start("picker", command, {"PATH": "/usr/bin:/bin"})

        async def ready() -> bool:
            try:
                async with site.client.get(f"http://127.0.0.1:{http}/ready") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                assert picker.alive, picker.tail()
                return False

        async with asyncio.timeout(patience(60)):
            while not await ready():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        gateway = await asyncio.to_thread(
            lambda: start_gateway(group, group.directory, port, fail_open=fail_open)
        )
        body = {**CHAT, "max_tokens": 20_000 // 4, "stream": True}
        assert (await ask(site, gateway))[0] == 200
        async with site.client.post(gateway.url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            picker.kill()
            # In full duplex the stream is cut with the picker.
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        status, _, _ = await ask(site, gateway)
        # FailOpen: the gateway has no endpoint of its own in this cluster.
        assert status in (500, 502, 503, 504)
        gateway.http.close()
        assert (await site.post("/v1/route", CHAT))[0] == 200


async def test_the_configuration_of_the_page(group: ProcessGroup) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (text,) = [one for one in blocks if one.startswith("static_resources")]
    async with picker_site(TWO) as site:
        port = free_port()
        text = text.replace("9002", str(site.part.picker_port)).replace("8000", str(port))
        shown = yaml.safe_load(text)
        admin = configuration(port, free_port(), 1)["admin"]
        gateway = await asyncio.to_thread(
            lambda: start_gateway(group, group.directory, 0, shown={"admin": admin, **shown})
        )
        status, raw, _ = await ask(site, Gateway(port, gateway.admin, gateway.process))
        assert status == 200, raw
        gateway.http.close()
