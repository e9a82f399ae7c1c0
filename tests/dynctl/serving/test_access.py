"""Every endpoint of every listener: who may use it. Errors name no worker to others."""

import json
import socket
from typing import Any

import aiohttp
import pytest

from dynctl.serving.http.process import ServingProcess
from dynctl.serving.http.server import build_frontend
from dynctl.serving.routing.config import FrontendConfig
from dynctl.serving.services.router_server import build_router
from dynctl.tokenization import DEMO_MODEL_DIR
from dynctl.web.routes import page_routes
from tests.dynctl.serving.fleets import (
    SLOW_HEALTH,
    chat_body,
    events_of,
    frontend_with_page,
    site,
    zone,
)

#: Endpoint -> who may use it: every client, clients with a key, operators, holders of a token.
TABLE = {
    ("GET", "/live"): "every client",
    ("GET", "/ready"): "every client",
    ("GET", "/health"): "every client",
    ("GET", "/metrics"): "every client",
    ("GET", "/v1/config"): "every client",
    ("GET", "/busy_threshold"): "every client",
    ("POST", "/v1/chat/completions"): "key",
    ("POST", "/v1/completions"): "key",
    ("POST", "/v1/embeddings"): "key",
    ("POST", "/v1/responses"): "key",
    ("POST", "/v1/messages"): "key",
    ("POST", "/v1/messages/count_tokens"): "key",
    ("POST", "/tokenize"): "key",
    ("POST", "/detokenize"): "key",
    ("GET", "/version"): "key",
    ("GET", "/ping"): "every client",
    ("GET", "/openapi.json"): "every client",
    ("POST", "/ping"): "every client",
    ("GET", "/v1/models"): "key",
    ("GET", "/v1/models/{model}"): "key",
    ("GET", "/v1/models/{model}/ready"): "every client",
    ("POST", "/busy_threshold"): "operator",
    ("GET", "/v1/decisions"): "operator",
    ("GET", "/v1/decisions/{id}"): "operator",
    ("GET", "/v1/view"): "operator",
    ("GET", "/v1/recording"): "operator",
    ("GET", "/v1/index"): "operator",
    ("GET", "/v1/fleet"): "operator",
    ("POST", "/v1/test"): "operator",
    ("GET", "/v1/workers"): "operator",
    ("GET", "/v1/workers/{worker}"): "operator",
    ("DELETE", "/v1/workers/{worker}"): "operator",
    ("POST", "/v1/workers"): "operator",
    ("POST", "/v1/workers/{worker}/cordon"): "operator",
    ("POST", "/v1/workers/{worker}/uncordon"): "operator",
    ("POST", "/v1/route"): "operator",
    ("POST", "/v1/select"): "operator",
    ("POST", "/v1/select_and_book"): "operator",
    ("POST", "/v1/bookings/{id}/decode"): "operator",
    ("POST", "/v1/bookings/{id}/first_token"): "operator",
    ("POST", "/v1/bookings/{id}/output_block"): "operator",
    ("DELETE", "/v1/bookings/{id}"): "operator",
    ("POST", "/v1/overlap_scores"): "operator",
    ("GET", "/v1/loads"): "operator",
    ("GET", "/v1/frontends"): "operator",
    ("POST", "/v1/frontends/{name}/join"): "operator",
    ("POST", "/v1/frontends/{name}/fleet"): "operator",
    ("POST", "/v1/frontends/{name}/resume"): "operator",
    ("POST", "/v1/frontends/{name}/place"): "operator",
    ("POST", "/v1/frontends/exchange"): "operator",
    ("POST", "/v1/frontends/{name}/decode"): "operator",
    ("POST", "/v1/frontends/{name}/explain"): "operator",
    ("POST", "/v1/frontends/{name}/leave"): "operator",
    ("GET", "/ui"): "operator",
    ("GET", "/ui/decisions/{id}"): "operator",
    ("GET", "/ui/codes/{code}"): "operator",
    # A wrong or missing token has the status of an endpoint of operators.
    ("POST", "/ui/session"): "operator",
    ("POST", "/ui/leave"): "every client",
    ("GET", "/ui/files/{name}"): "every client",
}
#: Headers that show that a request on loopback is not from a program of this machine.
FOREIGN = [
    {"host": "dynctl.example.com"},
    {"host": "192.0.2.7:8000"},
    {"origin": "http://127.0.0.1:3000"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"x-forwarded-for": "192.0.2.7"},
    {"forwarded": "for=192.0.2.7"},
    {"via": "1.1 proxy"},
]
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "token_ids": [1]}


def endpoints(process: ServingProcess) -> set[tuple[str, str]]:
    found = set()
    for route in process.build_app().router.routes():
        assert route.resource is not None
        if route.method != "HEAD":
            found.add((route.method, route.resource.canonical.replace(":.+", "")))
    return found


def processes() -> list[ServingProcess]:
    config = FrontendConfig(port=0, model_path=DEMO_MODEL_DIR)
    page = (page_routes,)
    return [build_frontend(config, extra_routes=page), build_router(config, page)]


async def test_the_table_has_every_endpoint():
    found = set().union(*(endpoints(process) for process in processes()))
    assert found == set(TABLE)


async def statuses(url: str, headers: dict[str, str]) -> dict[tuple[str, str], tuple[int, str]]:
    """The status and the text of every endpoint for a client with these headers."""
    found = {}
    async with aiohttp.ClientSession() as client:
        for method, path in TABLE:
            filled = path.replace("{worker}", "a0").replace("{model}", "demo").replace("{id}", "x")
            filled += "?seconds=1" if path == "/v1/recording" else ""  # else it does not end
            body = BODY if method == "POST" else None
            async with client.request(
                method, url + filled, json=body, headers=headers, allow_redirects=False
            ) as answer:
                found[method, path] = answer.status, await answer.text(errors="replace")
    return found


def judge(found, *, operator: int | None, token: int | None, key: int | None) -> None:
    """Each endpoint answers with the status of its group; None: it is allowed."""
    expected = {"operator": operator, "token": token, "key": key, "every client": None}
    for endpoint, (status, text) in found.items():
        wanted = expected[TABLE[endpoint]]
        if status == 404 and "is not served" not in text and "no worker" not in text:
            continue  # the endpoint of the other process, or an id that does not exist
        if wanted is None:
            assert status not in (401, 403), (endpoint, status, text)
        else:
            assert status == wanted, (endpoint, status, text)


@pytest.mark.parametrize("router", [False, True], ids=["frontend", "router"])
@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_without_a_token_others_get_inference_only(headers, router):
    async with site([{"name": "a0"}], health=SLOW_HEALTH, kind=frontend_with_page) as fleet:
        process = await _other(fleet) if router else fleet.frontend
        try:
            found = await statuses(process.url, headers)
        finally:
            if router:
                await process.close()
        judge(found, operator=403, token=403, key=None)
        for endpoint, (status, text) in found.items():
            if status == 403:
                assert "--admin-token" in text, endpoint
        if not router:
            assert found["POST", "/v1/chat/completions"][0] == 200


async def test_a_web_page_sends_no_chat_without_permission():
    """A form or a text needs no permission of the server; JSON does, and none is given."""
    plain = {"content-type": "text/plain"}
    page = {"origin": "http://evil.example"}
    async with site([{"name": "a0"}], health=SLOW_HEALTH) as fleet:
        url = fleet.frontend.url + "/v1/chat/completions"
        for headers, status in (
            ({**plain, **page}, 415),
            ({**plain, "sec-fetch-site": "cross-site"}, 415),
            ({**page, "content-type": "application/json"}, 200),
            (plain, 415),
        ):
            body = json.dumps({**BODY, "max_tokens": 1})
            async with fleet.client.post(url, data=body, headers=headers) as answer:
                assert answer.status == status, (headers, await answer.text())
                assert "access-control-allow-origin" not in answer.headers
        async with fleet.client.options(url, headers=page) as answer:
            assert answer.status in (404, 405)


#: Endpoints that read no body, or that read a form.
OTHER_BODIES = {("POST", "/ping"), ("POST", "/ui/session"), ("POST", "/ui/leave")}


@pytest.mark.parametrize("router", [False, True], ids=["frontend", "router"])
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "text/json", "junk"]
)
async def test_a_body_that_is_not_json_is_415(router: bool, kind: str | None):
    """On every listener and from every client, as Dynamo, vLLM and SGLang refuse it."""
    headers = {} if kind is None else {"content-type": kind}
    values: dict[str, Any] = {"api_token": "t0ken"}
    async with (
        site([{"name": "a0"}], health=SLOW_HEALTH, kind=frontend_with_page, **values) as fleet,
        aiohttp.ClientSession(
            skip_auto_headers=["content-type"], headers={"authorization": "Bearer t0ken"}
        ) as client,
    ):
        process = await _other(fleet, **values) if router else fleet.frontend
        try:
            for method, path in endpoints(process) - OTHER_BODIES:
                if method != "POST":
                    continue
                url = process.url + path.replace("{worker}", "a0").replace("{", "").replace("}", "")
                async with client.post(url, data=json.dumps(BODY), headers=headers) as answer:
                    assert answer.status == 415, (path, answer.status, await answer.text())
        finally:
            if router:
                await process.close()


async def test_without_a_token_programs_of_this_machine_are_operators():
    async with site([{"name": "a0"}], health=SLOW_HEALTH, kind=frontend_with_page) as fleet:
        for headers in ({}, {"host": "localhost:1"}, {"host": "[::1]:1"}):
            judge(await statuses(fleet.frontend.url, headers), operator=None, token=403, key=None)


@pytest.mark.parametrize("router", [False, True], ids=["frontend", "router"])
async def test_with_a_token_and_keys(router):
    values: dict[str, Any] = {"api_token": "t0ken", "api_keys": ("sk-1",)}
    async with site(
        [{"name": "a0"}], health=SLOW_HEALTH, kind=frontend_with_page, **values
    ) as fleet:
        process = await _other(fleet, **values) if router else fleet.frontend
        try:
            for headers, operator, key in (
                ({}, 401, 401),
                ({"authorization": "Bearer sk-1"}, 401, None),
                ({"authorization": "Bearer t0ken"}, None, None),
                ({"authorization": "Bearer t0ken", "host": "example.com"}, None, None),
            ):
                found = await statuses(process.url, headers)
                judge(found, operator=operator, token=operator, key=key)
        finally:
            if router:
                await process.close()


async def test_from_another_address_than_loopback():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    async with site(
        [{"name": "a0"}], health=SLOW_HEALTH, kind=frontend_with_page, host="0.0.0.0"
    ) as fleet:
        url = f"http://{own}:{fleet.frontend.port}"
        # The Host of an attacker may say localhost.
        for headers in ({}, {"host": "localhost"}):
            judge(await statuses(url, headers), operator=403, token=403, key=None)


async def _other(fleet, **values):
    worker = f"{fleet.engines['a0'].url},name=a0"
    process = build_router(
        FrontendConfig(
            port=0, workers=(worker,), model_path=DEMO_MODEL_DIR, health=SLOW_HEALTH, **values
        ),
        (page_routes,),
    )
    await process.start()
    return process


# -- what errors name ----------------------------------------------------------------------------

OUTSIDE = {"x-forwarded-for": "192.0.2.7"}
ZONES = [
    {"name": "secret-prefill", "role": "prefill", **zone("zone-of-prefill")},
    {"name": "secret-decode", "role": "decode", **zone("zone-of-decode")},
]
NAMES = ("secret", "zone-of", "http://", "127.0.0.1", "/busy_threshold", "/v1/workers")


def clean(text: str) -> None:
    for name in NAMES:
        assert name not in text, (name, text)


async def test_refusals_name_no_worker_or_zone_to_clients():
    async with site(ZONES, health=SLOW_HEALTH, kind=frontend_with_page) as fleet:
        for more in (
            {},
            {"nvext": {"routing_constraints": {"required_taints": ["nowhere"]}}},
            {"nvext": {"decode_worker_id": 5}},
        ):
            body = chat_body("hello", **more)
            status, ours, _ = await fleet.post("/v1/chat/completions", body)
            assert status in (400, 503)
            assert "dynctl" in ours["error"] or "secret" in ours["error"]["message"]
            outside, theirs, headers = await fleet.post(
                "/v1/chat/completions", body, headers=OUTSIDE
            )
            assert outside == status
            clean(str(theirs))
            # The decision leads operators to the details.
            decision = headers["x-dynctl-decision"]
            if status == 503:
                assert theirs["error"]["dynctl"]["decision"] == decision
                found, row = await fleet.get(f"/v1/decisions/{decision}")
                assert found == 200
                assert "secret" in str(row)


async def test_failures_of_engines_name_no_engine_to_clients():
    engines = [{"name": "secret-a0"}]
    async with site(engines, health=SLOW_HEALTH, kind=frontend_with_page) as fleet:
        await fleet.engines["secret-a0"].close()
        _, ours, _ = await fleet.chat()
        assert "127.0.0.1" in str(ours)
        status, theirs, _ = await fleet.post(
            "/v1/chat/completions", chat_body("hi"), headers=OUTSIDE
        )
        assert status >= 500
        clean(str(theirs))


async def test_a_stream_that_breaks_names_no_engine_to_clients():
    engines = [{"name": "secret-a0", "speedup_ratio": 5.0}]
    async with site(engines, health=SLOW_HEALTH, kind=frontend_with_page) as fleet:
        body = chat_body("hi", stream=True, max_tokens=2000)
        for headers, named in ((OUTSIDE, False), ({}, True)):
            if named:
                break
            async with fleet.client.post(
                fleet.url("/v1/chat/completions"), json=body, headers=headers
            ) as answer:
                first = await answer.content.readany()
                await fleet.engines["secret-a0"].close()
                rest = first + await answer.read()
            last = [event for event in events_of(rest) if isinstance(event, dict)][-1]
            assert last["error"]["message"] == "the engine failed during its response"


async def test_health_shows_engines_to_operators_only():
    async with site([{"name": "secret-a0"}]) as fleet:
        assert "secret-a0" in str((await fleet.get("/health"))[1])
        status, body = await fleet.get("/health", headers=OUTSIDE)
        assert status == 200
        assert body["status"] == "healthy"
        clean(str(body))
