"""Bad requests and refusals: a status, a field, and what would help."""

import asyncio
import json
import shutil

import msgspec
import pytest

from dynctl.serving.http.auth import _is_loopback
from dynctl.serving.routing.config import HealthConfig, Limits
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import Booked, RouterConfig, preset
from tests.dynctl.serving.fleets import WORDS, chat_body, site, until
from tests.dynctl.serving.hostile import GOOD, answers, hangs, hostile, specs

ONE = [{"name": "a0"}]


@pytest.mark.parametrize(
    ("raw", "status", "param", "says"),
    [
        (b"{", 400, None, "not JSON"),
        (b"[1]", 400, None, "an object"),
        (b"{}", 400, "messages", "required"),
        (b'{"model": "demo"}', 400, "messages", "required"),
        (b'{"model": 3, "messages": []}', 400, "model", "a string"),
        (b'{"model": "demo", "messages": [{"content": "x"}]}', 400, "messages[0].role", "required"),
        (b'{"model": "nope", "messages": [{"role": "user"}]}', 404, "model", "models: demo"),
        (
            json.dumps(
                chat_body("x", nvext={"routing_constraints": {"required_taints": "zone-a"}})
            ).encode(),
            400,
            "nvext.routing_constraints.required_taints",
            "an array",
        ),
    ],
)
async def test_bad_requests_name_the_field(raw, status, param, says):
    async with site(ONE) as fleet:
        # A busy machine may not answer the first probe in time.
        await until(lambda: bool(fleet.service.models()))
        json_type = {"content-type": "application/json"}
        url = fleet.url("/v1/chat/completions")
        async with fleet.client.post(url, data=raw, headers=json_type) as answer:
            body = await answer.json()
            assert answer.status == status, body
            assert answer.headers["x-dynctl-decision"]
        assert body["error"].get("param") == param
        assert says in body["error"]["message"]


async def test_a_body_over_the_limit():
    async with site(ONE, limits=Limits(body_bytes=2000)) as fleet:
        status, body, _ = await fleet.chat("x" * 3000)
        assert status == 413
        assert "2000" in body["error"]["message"]


async def test_a_prompt_that_no_engine_can_hold():
    async with site([{"name": "a0", "max_model_len": 64}]) as fleet:
        status, body, _ = await fleet.chat(WORDS * 20)
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert "64" in body["error"]["message"]
        assert body["error"]["param"] == "messages"


@pytest.mark.parametrize(("name", "status"), [("dynamo-1.6", 529), ("dynamo-0.9", 503)])
async def test_all_busy(name, status):
    config = preset(name).with_values({"active_prefill_tokens_threshold": 100})
    async with site([{"name": "a0"}, {"name": "a1"}], router=config) as fleet:
        for worker, tokens in (("a0", 500), ("a1", 300)):
            found = fleet.service.router.registry.by_name(worker)
            fleet.service.apply(
                Booked(f"r-{worker}", "aggregated", found.worker_id, 0, prefill_tokens=tokens)
            )
        got, body, headers = await fleet.chat()
        assert got == status
        assert body["error"]["type"] == "overloaded"
        details = body["error"]["dynctl"]
        assert (details["outcome"], details["filter"]) == ("all_busy", "busy")
        assert details["nearest"]["worker"] == "a1"
        assert (details["nearest"]["value"], details["nearest"]["limit"]) == (300, 100)
        assert "/busy_threshold" in details["what_would_admit"]
        assert headers["retry-after"] == "1"
        assert headers["x-dynctl-decision"] == details["decision"]


async def test_no_worker_at_all():
    async with site([]) as fleet:
        status, body, _ = await fleet.chat()
        assert status == 404
        assert "none yet" in body["error"]["message"]
        assert (await fleet.get("/ready"))[0] == 503


async def test_a_model_is_not_denied_while_an_engine_was_not_read():
    """The first probe found no answer, so nothing is known about the models of this engine."""
    health = HealthConfig(interval_s=0.1, timeout_s=0.1)
    async with hostile(answers(GOOD)) as engines:
        engines[0].healthy = hangs
        async with site([], unread=True, workers=specs(engines), health=health) as fleet:
            status, body, headers = await fleet.chat()
            assert (status, headers["retry-after"]) == (503, "1")
            assert body["error"]["code"] == "model_not_known_yet"
            assert "e0: " in body["error"]["message"]
            assert (await fleet.get("/v1/models/demo"))[0] == 503
            assert (await fleet.post("/tokenize", {"prompt": "x"}))[0] == 503
            # This engine serves another one, by its worker spec.
            other = chat_body("x") | {"model": "other"}
            assert (await fleet.post("/v1/chat/completions", other))[0] == 404
            engines[0].healthy = answers(b"")
            await until(lambda: fleet.service.models())
            assert (await fleet.get("/v1/models/demo"))[0] == 200


async def test_unknown_routes_and_methods_are_json():
    async with site(ONE) as fleet:
        status, body = await fleet.get("/debug")
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        status, body = await fleet.get("/v1/chat/completions")
        assert status == 405
        assert body["error"]["code"] == 405


async def test_a_defect_is_a_500_with_an_id_and_no_traceback(monkeypatch):
    async with site(ONE) as fleet:

        def broken(*args, **kwargs):
            raise RuntimeError("the secret inside")

        monkeypatch.setattr(fleet.service.router, "plan", broken)
        status, body, headers = await fleet.chat()
        assert status == 500
        assert headers["x-dynctl-decision"] in body["error"]["message"]
        assert "secret" not in json.dumps(body)
        assert fleet.frontend.core.inference.in_flight == 0


async def test_too_many_requests_in_flight():
    async with site(ONE, limits=Limits(in_flight=0), router=RouterConfig()) as fleet:
        status, body, _ = await fleet.chat()
        assert status == 529
        assert body["error"]["code"] == "too_many_requests_in_flight"


async def test_a_token_guards_writes_and_routing_details():
    async with site(ONE, api_token="t0k") as fleet:
        for method, path in (
            ("POST", "/v1/route"),
            ("POST", "/v1/workers"),
            ("DELETE", "/v1/workers/a0"),
            ("GET", "/v1/decisions"),
        ):
            async with fleet.client.request(method, fleet.url(path), json={}) as answer:
                assert answer.status == 401, path
        headers = {"authorization": "Bearer t0k"}
        status, body, _ = await fleet.post("/v1/route", chat_body("x"), headers=headers)
        assert (status, body["kind"]) == (200, "RouteResult")
        assert (await fleet.chat())[0] == 200  # inference takes no token of ours
        assert (await fleet.get("/v1/workers"))[0] == 401  # addresses and domains of workers
        assert (await fleet.get("/v1/workers", headers=headers))[0] == 200


async def test_without_a_token_only_programs_on_this_machine_are_operators():
    async with site(ONE) as fleet:
        url, body = fleet.url("/v1/route"), msgspec.json.encode(chat_body("x"))
        json_type = {"content-type": "application/json"}
        async with fleet.client.post(url, data=body, headers={"content-type": "text/plain"}) as no:
            assert no.status == 415
        for headers, problem in (
            (json_type | {"origin": "http://evil.example"}, "web page"),
            (json_type | {"host": "evil.example:8000"}, "not a loopback address"),
            (json_type | {"x-forwarded-for": "10.0.0.9"}, "a proxy"),
            (json_type | {"forwarded": "for=10.0.0.9"}, "a proxy"),
        ):
            async with fleet.client.post(url, data=body, headers=headers) as answer:
                error = (await answer.json())["error"]
            assert answer.status == 403
            assert error["code"] == "not_the_operator"
            assert problem in error["message"]
            assert "--admin-token" in error["message"]
        async with fleet.client.post(url, data=body, headers=json_type) as answer:
            assert answer.status == 200
        rebound = {"host": "evil.example"}
        for path in ("/v1/decisions", "/v1/view"):
            assert (await fleet.get(path, headers=rebound))[0] == 403
            assert (await fleet.get(path))[0] == 200
        limits = {"model": "demo", "active_prefill_tokens_threshold": 5}
        status, _, _ = await fleet.post("/busy_threshold", limits, headers=rebound)
        assert status == 403
        added = {"url": "http://127.0.0.1:1", "name": "a9"}
        status, error, _ = await fleet.post("/v1/workers", added, headers=rebound)
        assert status == 403
        assert "--admin-token" in error["error"]["message"]
        assert (await fleet.post("/v1/workers", added))[0] == 201
        assert (await fleet.chat())[0] == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_loopback_hosts(host: str, loopback: bool):
    assert _is_loopback(host) is loopback


async def test_a_body_that_never_ends_is_not_waited_for():
    async with site(ONE, limits=Limits(body_s=0.05)) as fleet:
        host, port = "127.0.0.1", fleet.frontend.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()
        await until(lambda: fleet.frontend.core.inference.in_flight == 0)


async def test_bodies_in_flight_have_a_bound_together():
    slow = [{"name": "a0", "speedup_ratio": 1.0, "prefill_tokens_per_s": 5.0}]
    async with site(slow, limits=Limits(all_bodies_bytes=3000)) as fleet:
        first = asyncio.create_task(fleet.chat("x" * 2000))
        await until(lambda: fleet.engines["a0"].engine.active_requests == 1)
        status, body, _ = await fleet.chat("y" * 2000)
        assert status == 529
        assert "3000 bytes" in body["error"]["message"]
        first.cancel()
        await fleet.idle()


async def test_a_broken_template_shows_its_reason_and_not_its_path(tmp_path, caplog):
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    template = "{% for m in messages %}{{ m.name.upper() }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    async with site(ONE, model_path=model) as fleet:
        for headers in ({}, {"x-forwarded-for": "10.0.0.1"}):
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
                body = chat_body("hi", max_tokens=4) | {"input": "hi"}
                async with fleet.client.post(fleet.url(path), json=body, headers=headers) as answer:
                    text = await answer.text()
                assert answer.status == 400, text
                assert "the chat template of demo failed: " in text
                assert "has no attribute 'name'" in text
                assert str(tmp_path) not in text
    (line,) = [line for line in caplog.messages if str(model / "chat_template.jinja") in line]
    assert line.endswith("this chat template fails for some requests (400)")
