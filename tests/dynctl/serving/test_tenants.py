"""What one client may direct, reach or learn: fields that direct engines, and caches of keys."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynctl.serving.http.keys import ApiKeys, ClientRights
from dynctl.wire.directions import DIRECTIONS
from router_core import RouterConfig
from tests.dynctl.serving.fleets import WORDS, Site, chat_body, events_of, site, until

ONE: list[dict[str, Any]] = [{"name": "a0"}]
FIRST, SECOND, GUEST = "sk-first-0123456789", "sk-second-012345678", "sk-guest-0123456789"
PROMPT = WORDS * 8
PARAMS = {"do_remote_prefill": True, "remote_host": "10.9.9.9", "remote_port": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(PROMPT, max_tokens=2),
    "/v1/completions": {"model": "demo", "prompt": PROMPT, "max_tokens": 2},
    "/v1/embeddings": {"model": "demo", "input": PROMPT},
    "/v1/responses": {"model": "demo", "input": PROMPT, "max_output_tokens": 2},
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": PROMPT}],
    },
}
GENERATING = [path for path in BODIES if path != "/v1/embeddings"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def salts(*keys: str, rights: ClientRights | None = None, own: str | None = None) -> list[str]:
    valid = ApiKeys(keys, rights=rights, clock=lambda: 0.0)
    found = [valid.find(key.encode()) for key in keys]
    return [key.cache_salt(own) for key in found if key is not None]


async def ask(fleet: Site, key: str, path: str = GENERATING[0], **fields: Any) -> Any:
    status, answer, _ = await fleet.post(path, {**BODIES[path], **fields}, headers=bearer(key))
    assert status == 200, answer
    return answer


def reused(answer: Any) -> int:
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


# -- fields that direct engines --------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_no_api_passes_a_direction_of_a_client_on(path: str) -> None:
    async with site(ONE) as fleet:
        engine = fleet.engines["a0"].engine
        for name in DIRECTIONS:
            outer, _, inner = name.partition(".")
            body = {**BODIES[path], outer: {inner: PARAMS} if inner else PARAMS}
            status, answer, _ = await fleet.post(path, body)
            error = answer["error"]
            assert status == 400, name
            assert name in error["message"]
            assert "--client-fields" in error["message"]
            assert "10.9.9.9" not in str(answer)
        hidden = {"vllm_xargs": {"kv_transfer_params": "x"}}
        status, answer, _ = await fleet.post(path, {**BODIES[path], **hidden})
        assert status == 400
        assert engine.active_requests == 0
        _, metrics = await fleet.get("/metrics")
        assert b'outcome="success"' not in metrics


async def test_a_direction_is_found_however_its_name_is_written() -> None:
    seen: list[bytes] = []

    async def chat(request: web.Request) -> web.Response:
        seen.append(await request.read())
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        await _written(str(server.make_url("")).rstrip("/"), seen)


async def _written(url: str, seen: list[bytes]) -> None:
    async with site([], workers=(f"{url},name=e,model=m",)) as fleet:
        plain = b'{"model":"m","messages":[{"role":"user","content":"x"}],%b}'
        json = {"content-type": "application/json"}

        async def sent(more: bytes) -> int:
            path = fleet.url("/v1/chat/completions")
            async with fleet.client.post(path, data=plain % more, headers=json) as answer:
                return answer.status

        assert await sent(rb'"bootstrap\u005fhost":"h"') == 400
        assert await sent(b'"bootstrap_host":null,"bootstrap_host":"h"') == 400
        assert not seen
        # The last of two counts here; an engine that takes the first must not see another one.
        assert await sent(b'"bootstrap_host":"h","bootstrap_host":null') == 200
        assert seen[-1].count(b"bootstrap_host") == 1
        assert msgspec.json.decode(seen[-1])["bootstrap_host"] is None


async def test_directions_that_are_allowed_reach_the_engine(engine_log, tmp_path) -> None:
    seen, url = engine_log
    spec = f"{url},name=e,model=m"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "priority": 3}
    async with site([], workers=(spec,), client_fields=frozenset({"priority"})) as fleet:
        assert (await fleet.post("/v1/chat/completions", body))[0] == 200
        assert seen[-1][0]["priority"] == 3
        status, answer, _ = await fleet.post(
            "/v1/chat/completions", {**body, "kv_transfer_params": PARAMS}
        )
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
    keys = tmp_path / "keys"
    keys.write_text(
        f"{FIRST} client-fields=kv_transfer_params,bootstrap_host\n{SECOND} client-fields=\n"
    )
    settings = {"api_key_file": keys, "client_fields": frozenset({"priority"})}
    async with site([], workers=(spec,), **settings) as fleet:
        directed = {**body, "kv_transfer_params": PARAMS}
        del directed["priority"]
        for key, sent, status in (
            (FIRST, directed, 200),
            (FIRST, body, 400),
            (SECOND, directed, 400),
            (SECOND, body, 400),
        ):
            got = await fleet.post("/v1/chat/completions", sent, headers=bearer(key))
            assert got[0] == status, (key, sent)
        assert seen[-1][0]["kv_transfer_params"] == PARAMS


async def test_headers_that_direct_engines_do_not_pass(engine_log) -> None:
    seen, url = engine_log
    async with site([], workers=(f"{url},name=e,model=m",)) as fleet:
        names = ["x-data-parallel-rank", "x-override-bootstrap-host", "x-vllm-priority"]
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        got = await fleet.post("/v1/chat/completions", body, headers=dict.fromkeys(names, "1"))
        assert got[0] == 200
        assert not set(names) & seen[-1][1].keys()


# -- caches of keys --------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATING)
async def test_an_isolated_key_learns_nothing_of_what_others_sent(path: str) -> None:
    async with site(ONE, api_keys=(FIRST, SECOND), isolate_keys=True) as fleet:
        await fleet.connected()
        index = fleet.service.router.index
        assert reused(await ask(fleet, FIRST, path)) == 0
        await until(lambda: index.entry_count > 3)
        timing = {"nvext": {"extra_fields": ["timing"]}}
        second = await ask(fleet, SECOND, path, **timing)
        assert reused(second) == 0
        assert second["nvext"]["timing"]["kv_hit_rate"] == 0
        first = await ask(fleet, FIRST, path, **timing)
        assert reused(first) > 3 * 16
        # The router's own hashes have the salt too.
        assert first["nvext"]["timing"]["kv_hit_rate"] > 0.5


async def test_keys_that_are_not_isolated_share_what_is_cached(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with site(ONE, api_keys=(FIRST, SECOND)) as fleet:
        fleet.frontend.log_start()
        assert "2 API keys share cached prefixes" in caplog.text
        await ask(fleet, FIRST)
        assert reused(await ask(fleet, SECOND)) > 0


async def test_the_start_says_what_isolation_needs(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with site(ONE, api_keys=(FIRST, SECOND), isolate_keys=True) as fleet:
        fleet.frontend.log_start()
        assert "isolated API keys: 2" in caplog.text
        assert "cache_salt" in caplog.text
        assert "share cached prefixes" not in caplog.text


async def test_salts_of_clients_count_inside_their_key(engine_log) -> None:
    seen, url = engine_log
    settings: dict[str, Any] = {"api_keys": (FIRST, SECOND), "isolate_keys": True}
    async with site([], workers=(f"{url},name=e,model=m",), **settings) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

        async def salt(key: str, **fields: Any) -> str:
            sent = {**body, **fields}
            assert (await fleet.post("/v1/chat/completions", sent, headers=bearer(key)))[0] == 200
            got = seen[-1][0]
            assert "nvext" not in got
            assert {name: got[name] for name in body} == body
            return str(got["cache_salt"])

        own = await salt(FIRST)
        # What vLLM accepts: at most 128 characters, without @, / and \.
        assert len(own) <= 128
        assert own.isalnum()
        found = [
            own,
            await salt(SECOND),
            await salt(FIRST, cache_salt="mine"),
            await salt(SECOND, cache_salt="mine"),
            await salt(FIRST, cache_salt="mine", nvext={"cache_salt": "other"}),
            await salt(SECOND, cache_salt=own),  # no way into the cache of another key
        ]
        assert len(set(found)) == 5
        assert found[2] == found[4]  # engines prefer the body's own
        assert await salt(FIRST, nvext={"cache_salt": "mine"}) == found[2]
        assert own == salts(FIRST)[0]


def test_salts_are_the_same_in_every_process_and_show_no_key() -> None:
    assert salts(FIRST, SECOND) == salts(FIRST, SECOND)
    assert len({*salts(FIRST, SECOND), *salts(FIRST, SECOND, own="x")}) == 4
    key = ApiKeys((FIRST,), clock=lambda: 0.0).find(FIRST.encode())
    assert key is not None
    assert repr(key.secret) not in repr(key)
    assert FIRST not in repr(key)
    key.cache_salt("\ud800")  # a lone half of a pair is a salt like others


async def test_isolation_of_a_key_changes_with_its_file(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{FIRST}\n{SECOND}\n{GUEST} isolate=yes\n")
    async with site(ONE, api_key_file=keys) as fleet:
        await ask(fleet, FIRST)
        assert reused(await ask(fleet, SECOND)) > 0
        assert reused(await ask(fleet, GUEST)) == 0
        assert reused(await ask(fleet, GUEST)) > 0
        keys.write_text(f"{FIRST}\n{SECOND} isolate=yes\n{GUEST} isolate=no\n")
        await until(
            lambda: fleet.frontend.core.keys.load() or fleet.frontend.core.keys.isolated == 1
        )
        guest, second = (fleet.frontend.core.keys.find(key.encode()) for key in (GUEST, SECOND))
        assert guest is not None
        assert second is not None
        assert (guest.rights.isolated, second.rights.isolated) == (False, True)
        assert reused(await ask(fleet, SECOND)) == 0


# -- what answers show -----------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATING)
async def test_without_details_answers_show_nothing_of_the_cache(path: str, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{FIRST}\n{GUEST} details=no\n")
    async with site(ONE, api_key_file=keys) as fleet:
        whole = await ask(fleet, FIRST, path)
        again = await ask(fleet, FIRST, path)
        assert reused(again) > 0
        details = {"nvext": {"extra_fields": ["timing", "worker_id"]}}
        hidden = await ask(fleet, GUEST, path, **details)
        assert "cache" not in str(hidden["usage"])
        assert "nvext" not in hidden
        total = "input_tokens" if path in ("/v1/messages", "/v1/responses") else "prompt_tokens"
        # Anthropic's input is without what was reused: of a first request that is nothing.
        assert hidden["usage"][total] == whole["usage"][total]
        body = {**BODIES[path], "stream": True}
        if path in ("/v1/chat/completions", "/v1/completions"):
            body["stream_options"] = {"include_usage": True}
        texts = {}
        for key in (FIRST, GUEST):
            async with fleet.client.post(fleet.url(path), json=body, headers=bearer(key)) as answer:
                texts[key] = await answer.read()
        assert b'"cache' in texts[FIRST]
        assert b'"cache' not in texts[GUEST]
        assert b'"usage"' in texts[GUEST]
        assert texts[GUEST].count(b"data:") == texts[FIRST].count(b"data:")
        if path == "/v1/chat/completions":
            assert events_of(texts[GUEST])[-1] == "[DONE]"


async def test_without_details_no_dry_run_and_no_header_shows_where_a_request_goes(
    tmp_path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{FIRST} details=yes\n{GUEST}\n")
    pair = [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}]
    settings: dict[str, Any] = {"api_key_file": keys, "key_details": False}
    router = RouterConfig(conditional_disagg_enabled=True)
    async with site(pair, router=router, **settings) as fleet:
        dry = {"nvext": {"annotations": ["query_instance_id:"]}}

        async def chat(key: str, **fields: Any) -> tuple[int, Any, set[str]]:
            status, answer, headers = await fleet.post(
                "/v1/chat/completions", chat_body(PROMPT, **fields), headers=bearer(key)
            )
            own = {name.lower() for name in headers if name.lower().startswith("x-dynctl")}
            return status, answer, own

        assert (await chat(FIRST, **dry))[0] == 200
        status, answer, _ = await chat(GUEST, **dry)
        assert (status, answer["error"]["code"]) == (403, "details_not_allowed")
        await fleet.connected()

        router, decode = fleet.service.router, "d0"
        (slot,) = router.registry.slots(router.registry.by_name(decode).worker_id)
        assert (await chat(FIRST))[0] == 200
        await until(lambda: router.index.block_count(slot) >= 8)
        await fleet.idle()
        assert "x-dynctl-prefill-skipped" in (await chat(FIRST))[2]
        assert await chat(GUEST) == (200, ANY, {"x-dynctl-decision"})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("isolate=maybe", "isolate: expected yes or no"),
        ("details=", "details: expected yes or no"),
        ("client-fields=messages", "client-fields: expected names with commas"),
    ],
)
def test_errors_of_rights_name_the_line(tmp_path, line: str, problem: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{FIRST} {line}\n")
    with pytest.raises(ValueError, match=problem) as caught:
        ApiKeys((), file, clock=lambda: 0.0).load()
    assert "line 1" in str(caught.value)
    assert FIRST not in str(caught.value)
