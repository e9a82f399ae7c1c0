"""The fleet: workers that join, change and leave; files; tokenizers; what is said about it all."""

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from typing import Any

import pytest

from dynctl.serving.engines import workers_file
from dynctl.serving.engines.failures import UpstreamFailure
from dynctl.serving.engines.tokenizer_check import TokenizerCheck
from dynctl.serving.engines.worker_spec import WorkerSpec, WorkerSpecError
from dynctl.serving.http.server import build_frontend
from dynctl.serving.http.start import StartError
from dynctl.serving.routing.config import FrontendConfig
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.process import start_engine
from dynctl.tokenization import DEMO_MODEL_DIR
from router_core import IndexBound, RouterConfig, RouterPolicy
from tests.dynctl.serving.fleets import (
    QUICK_ENGINE,
    TOKENIZER,
    WORDS,
    chat_body,
    site,
    until,
    zone,
)
from tests.ports import free_port
from tests.waiting import patience

IDS = {"extra_fields": ["worker_id"]}
NOTE = "cache overlap not modelled: no tokenizer"


def condition(fleet, code, subject):
    return fleet.service.conditions.get(code, subject)


async def test_workers_join_and_leave_over_http():
    async with site([{"name": "a0"}], api_token="t0k") as fleet:
        fleet.client.headers["authorization"] = "Bearer t0k"
        engine = await start_engine(EngineConfig(**QUICK_ENGINE, name="late"), TOKENIZER)
        try:
            body = {"url": engine.url, "name": "late", "zone": "zone-b"}
            status, row, _ = await fleet.post("/v1/workers", body)
            assert status == 201
            assert (row["name"], row["status"], row["domains"]) == (
                "late",
                "ready",
                {"zone": "zone-b"},
            )
            assert row["source"] == "api"
            async with fleet.client.delete(fleet.url("/v1/workers/a0")) as answer:
                assert await answer.json() == {"removed": "a0"}
            assert (await fleet.chat())[0] == 200
            assert [row["name"] for row in (await fleet.get("/v1/workers"))[1]["workers"]] == [
                "late"
            ]
            status, error = await fleet.get("/v1/workers/a0")
            assert status == 404
            assert "workers: late" in error["error"]["message"]
            status, error, _ = await fleet.post("/v1/workers", {"url": "nowhere"})
            assert status == 400
            assert "expected http://HOST:PORT" in error["error"]["message"]
        finally:
            await engine.close()


async def test_an_engine_that_is_not_up_yet_joins_when_it_answers():
    engine = await start_engine(EngineConfig(**QUICK_ENGINE, name="x"), TOKENIZER)
    port = engine.engine.port
    await engine.close()
    async with site([], unread=True, workers=(f"http://127.0.0.1:{port},name=x",)) as fleet:
        rows = (await fleet.get("/v1/workers"))[1]["workers"]
        assert (rows[0]["status"], rows[0]["name"]) == ("unknown", "x")
        assert "refused the connection" in rows[0]["reason"]
        assert condition(fleet, "WORKER_UNREACHABLE", "x")
        engine = await start_engine(EngineConfig(**QUICK_ENGINE, name="x", port=port), TOKENIZER)
        try:
            await until(lambda: fleet.service.models() == ("demo",))
            await until(lambda: condition(fleet, "WORKER_UNREACHABLE", "x") is None)
            assert (await fleet.chat())[0] == 200
        finally:
            await engine.close()


@pytest.mark.parametrize("answer", ["none", "error", "other"])
async def test_an_engine_that_is_removed_during_its_first_probe_leaves_nothing(monkeypatch, answer):
    """The probe of an engine that is being added is not cancelled by its removal."""
    async with site([{"name": "a0"}]) as fleet:
        frontend = fleet.frontend
        probed, answered = asyncio.Event(), asyncio.Event()
        get = frontend.core.upstream.get

        async def slow(url: str, timeout_s: float) -> tuple[int, bytes]:
            if "late" not in url:
                return await get(url, timeout_s)
            probed.set()
            await answered.wait()
            if answer == "none":
                raise UpstreamFailure("refused", "late refused the connection")
            return (500, b"") if answer == "error" else (200, b"not the facts of an engine")

        monkeypatch.setattr(frontend.core.upstream, "get", slow)
        adding = asyncio.ensure_future(frontend.fleet.add(WorkerSpec("http://late", "late"), "api"))
        async with asyncio.timeout(patience(5)):
            await probed.wait()
            assert await frontend.fleet.remove("late")
            answered.set()
            await adding
        assert [one.subject for one in fleet.service.conditions if one.subject == "late"] == []
        assert frontend.fleet.get("late") is None
        assert fleet.service.router.registry.by_name("late") is None


async def test_the_workers_file_is_read_again_and_a_bad_one_keeps_the_fleet(tmp_path):
    async with site([{"name": "a0"}, {"name": "a1"}]) as engines:
        one, two = (engines.engines[name].url for name in ("a0", "a1"))
        path = tmp_path / "workers.yaml"
        path.write_text(f"workers: [{{url: '{one}', name: f0}}]")
        async with site([], workers_file=path, workers_file_poll_s=0.02) as fleet:
            assert [m.spec.name for m in fleet.frontend.fleet] == ["f0"]
            path.write_text(f"workers: [{{url: '{two}', name: f1, zone: b}}]")
            await until(lambda: [m.spec.name for m in fleet.frontend.fleet] == ["f1"])
            path.write_text("workers: [{url: 7}]")
            await until(lambda: condition(fleet, "WORKERS_FILE_INVALID", str(path)) is not None)
            assert [m.spec.name for m in fleet.frontend.fleet] == ["f1"]
            assert (await fleet.chat())[0] == 200
            path.unlink()
            os.mkfifo(path)
            reason = "is a pipe; expected a file"
            await until(
                lambda: reason in condition(fleet, "WORKERS_FILE_INVALID", str(path)).message
            )
            path.unlink()
            path.write_text(f"workers: [{{url: '{two}', name: f1, zone: c}}]")
            await until(lambda: condition(fleet, "WORKERS_FILE_INVALID", str(path)) is None)
            worker = fleet.service.router.registry.by_name("f1")
            assert worker.domains == {"zone": "c"}


async def test_a_value_that_yaml_cannot_convert_keeps_the_fleet_until_the_file_is_mended(tmp_path):
    async with site([{"name": "a0"}]) as engines:
        url, path = engines.engines["a0"].url, tmp_path / "workers.yaml"
        path.write_text(f"workers: [{{url: '{url}', name: f0}}]")
        async with site([], workers_file=path, workers_file_poll_s=0.02) as fleet:
            path.write_text(f"workers: [{{url: '{url}', name: f1, block_size: !!int x}}]")
            await until(lambda: condition(fleet, "WORKERS_FILE_INVALID", str(path)) is not None)
            assert [m.spec.name for m in fleet.frontend.fleet] == ["f0"]
            path.write_text(f"workers: [{{url: '{url}', name: f1}}]")
            await until(lambda: condition(fleet, "WORKERS_FILE_INVALID", str(path)) is None)
            assert [m.spec.name for m in fleet.frontend.fleet] == ["f1"]


async def test_a_reload_that_fails_is_reported_counted_and_tried_again(tmp_path, monkeypatch):
    read, failures = workers_file.read_workers_file, 2

    def fails_twice(path):
        nonlocal failures
        if failures:
            failures -= 1
            raise KeyError("a defect")
        return read(path)

    async with site([{"name": "a0"}]) as engines:
        url, path = engines.engines["a0"].url, tmp_path / "workers.yaml"
        path.write_text(f"workers: [{{url: '{url}', name: f0}}]")
        async with site([], workers_file=path, workers_file_poll_s=0.02) as fleet:
            monkeypatch.setattr(workers_file, "read_workers_file", fails_twice)
            path.write_text(f"workers: [{{url: '{url}', name: f1}}]")
            failed = "workers file reload"
            await until(lambda: condition(fleet, "BACKGROUND_TASK_FAILED", failed) is not None)
            assert "a defect" in condition(fleet, "BACKGROUND_TASK_FAILED", failed).message
            await until(lambda: [m.spec.name for m in fleet.frontend.fleet] == ["f1"])
            line = 'dynctl_background_task_failures_total{task="workers file reload"} 2'
            assert line in (await fleet.get("/metrics"))[1].decode()
            await fleet.service.tasks.close()
            assert condition(fleet, "BACKGROUND_TASK_FAILED", failed) is None


@pytest.mark.parametrize(
    ("workers", "error"),
    [
        (("http://x:1,name=a", "http://x:2,name=a"), StartError),
        (("nothing",), WorkerSpecError),
    ],
)
def test_a_bad_command_line_is_an_error_at_once(workers, error):
    with pytest.raises(error):
        build_frontend(FrontendConfig(workers=workers))


async def test_a_port_in_use_is_named():
    async with site([]) as fleet:
        again = build_frontend(FrontendConfig(port=fleet.frontend.port))
        with pytest.raises(StartError, match=f":{fleet.frontend.port}: the address is in use"):
            await again.start()


@pytest.mark.parametrize("listeners", ["health", "two processes"])
async def test_an_address_that_is_taken_between_binding_and_listening_is_named(listeners: str):
    """Both sockets are bound before either accepts: the second one would serve nothing."""
    port = free_port()
    if listeners == "health":
        config = FrontendConfig(port=port, system_port=port)
        with pytest.raises(StartError, match=f":{port}: the address is in use"):
            await build_frontend(config).start()
        return
    made = [build_frontend(FrontendConfig(port=port)) for _ in range(2)]
    ends = await asyncio.gather(*(one.start() for one in made), return_exceptions=True)
    for one, end in zip(made, ends, strict=True):
        if end is None:
            await one.close()
    (problem,) = [one for one in ends if one is not None]
    assert isinstance(problem, StartError)
    assert f":{port}: the address is in use" in problem.message


async def test_without_a_tokenizer_the_engines_own_is_asked():
    async with site([{"name": "a0"}], model_path=None) as fleet:
        _, result, _ = await fleet.post("/v1/route", chat_body(WORDS))
        ours = len(TOKENIZER.encode_chat(chat_body(WORDS)["messages"]))
        assert result["tokens"] == ours
        assert result["decode"]["overlap_modelled"] is True
        assert result["assumptions"] == result["doubts"] == []


async def test_without_any_tokenizer_every_decision_says_so(plain_engine):
    workers = (f"{plain_engine},name=e,model=m",)
    async with site([], workers=workers, model_path=None) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}
        assert (await fleet.post("/v1/chat/completions", body))[0] == 200
        _, result, _ = await fleet.post("/v1/route", body)
        [doubted] = result["doubts"]
        assert (doubted["code"], doubted["what"]) == ("DYR0704", NOTE)
        assert result["decode"]["overlap_modelled"] is False
        assert NOTE in result["decode"]["notes"]
        assert result["tokens"] == 100  # four characters a token, for load alone
        assert result["tokens_estimated"] is True
        assert result["certain"] is False
        fleet.frontend.log_start()
        assert condition(fleet, "NO_TOKENIZER", "m")
        row = (await fleet.get("/v1/decisions"))[1]["decisions"][0]
        assert (row["cached_blocks"], row["tokens_estimated"]) == (None, True)
        _, past = await fleet.get(f"/v1/decisions/{row['id']}")
        assert [one["what"] for one in past["doubts"]] == [NOTE]
        assert past["tokens_estimated"] is True
        [worker] = (await fleet.get("/v1/workers"))[1]["workers"]
        assert (worker["routed_by"], worker["ranks"][0]["index"]) == ("load only", "absent")


async def test_an_engine_with_a_tokenizer_that_joins_others_without_is_asked(plain_engine):
    workers = (f"{plain_engine},name=e,model=m",)
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}
    async with (
        tokenize_engine((200, [1, 2, 3]), (200, [1])) as url,
        site([], workers=workers, model_path=None) as fleet,
    ):

        async def routed_tokens() -> int:
            _, result, _ = await fleet.post("/v1/route", body)
            tokens: int = result["tokens"]
            return tokens

        assert [await routed_tokens(), await routed_tokens()] == [100, 100]
        spec = {"url": url, "name": "t", "model": "m"}
        assert (await fleet.post("/v1/workers", spec))[0] == 201
        assert [await routed_tokens(), await routed_tokens()] == [3, 3]
        assert await fleet.frontend.fleet.remove("t")
        assert [await routed_tokens(), await routed_tokens()] == [100, 100]


async def test_no_tokenizer_is_a_warning_only_after_each_engine_was_tried(plain_engine, caplog):
    workers = (f"{plain_engine},name=e,model=m",)
    caplog.set_level(logging.INFO)
    async with site([], workers=workers, model_path=None) as fleet:
        await until(lambda: condition(fleet, "NO_TOKENIZER", "m") is not None)
        caplog.clear()
        fleet.frontend.log_start()
        levels = {one.levelname for one in caplog.records if "/tokenize" in one.getMessage()}
        assert levels == {"INFO"}
        fleet.service.preparation.tokenizers.set("m", TOKENIZER)
        await TokenizerCheck(fleet.service, fleet.frontend.fleet).run()
        assert "NO_TOKENIZER m: over" in caplog.messages


@pytest.mark.parametrize(
    ("chats", "texts", "expected"),
    [
        ((200, [1, 2]), (200, [1]), None),
        ((400, None), (200, [1]), None),
        ((200, []), (200, [1]), "returns no token ids of chats"),
        ((500, None), (200, [1]), "returns no token ids of chats"),
        ((200, [1, 2]), (500, None), "returns no token ids of texts"),
        ((400, None), (400, None), NOTE),
        ((401, None), (401, None), NOTE),
        ((404, None), (404, None), NOTE),
    ],
)
async def test_engines_that_tokenize_nothing_are_no_tokenizer(chats, texts, expected):
    async with (
        tokenize_engine(chats, texts) as url,
        site([], workers=(f"{url},name=e,model=m",), model_path=None) as fleet,
    ):
        await TokenizerCheck(fleet.service, fleet.frontend.fleet).run()
        held = condition(fleet, "NO_TOKENIZER", "m")
        assert (held is None) == (expected is None)
        if expected is not None:
            assert expected in held.message


async def test_prompts_with_images_are_routed_by_load_and_say_so():
    async with site([{"name": "a0"}]) as fleet:
        parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        body = {"model": "demo", "messages": [{"role": "user", "content": parts}]}
        _, result, _ = await fleet.post("/v1/route", body)
        assert result["decode"]["overlap_modelled"] is False
        assert [row["overlap_blocks"] for row in result["decode"]["candidates"]] == [None]
        [doubted] = result["doubts"]
        assert doubted["what"] == "cache overlap not modelled: the prompt has more than text"


async def test_tools_and_template_arguments_reach_the_template():
    async with site([{"name": "a0"}]) as fleet:
        function = {"name": "look_up", "description": "d", "parameters": {}}
        tools = [{"type": "function", "function": function}]
        body = chat_body(WORDS)
        messages = body["messages"]
        for more, count in (
            ({}, TOKENIZER.encode_chat(messages)),
            ({"tools": tools}, TOKENIZER.encode_chat(messages, tools=tools)),
            (
                {"add_generation_prompt": False},
                TOKENIZER.encode_chat(messages, add_generation_prompt=False),
            ),
        ):
            _, result, _ = await fleet.post("/v1/route", {**body, **more})
            assert result["tokens"] == len(count)


async def test_the_admin_api_can_be_switched_off():
    async with site([{"name": "a0"}], admin_api=False, api_token="t0k") as fleet:
        fleet.client.headers["authorization"] = "Bearer t0k"
        status, body, _ = await fleet.post("/v1/workers", {"url": "http://127.0.0.1:1"})
        assert status == 403
        assert "DYN_DISABLE_FRONTEND_ADMIN_API" in body["error"]["message"]
        assert (await fleet.get("/v1/workers"))[0] == 200


async def test_another_tokenizer_than_the_engines_is_a_named_warning(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in DEMO_MODEL_DIR.iterdir():
        text = file.read_text()
        if file.name == "chat_template.jinja":
            text = "changed " + text
        (other / file.name).write_text(text)
    async with site([{"name": "a0"}], model_path=other) as fleet:
        await until(lambda: condition(fleet, "TOKENIZER_DIFFERS", "demo") is not None)
        assert "messages" in condition(fleet, "TOKENIZER_DIFFERS", "demo").message
    async with site([{"name": "a0"}]) as fleet:
        await fleet.chat()
        assert condition(fleet, "TOKENIZER_DIFFERS", "demo") is None


async def test_both_policies_present_and_different_is_a_condition():
    router = RouterConfig(kv_transfer_domain="rack")
    engines = [{"name": "p0", "role": "prefill", **zone("zone-a")}]
    async with site(engines, router=router) as fleet:
        assert RouterPolicy.of_config(fleet.service.router.config) is not None
        found = condition(fleet, "POLICY_CONFLICT", "p0")
        assert "the worker's policy is used" in found.message
        _, health = await fleet.get("/health")
        codes = {c["code"] for c in health["conditions"]}
        assert codes == {"POLICY_CONFLICT", "MODEL_NOT_SERVED"}


async def test_block_sizes_that_differ_are_a_condition():
    async with site([{"name": "a0"}, {"name": "a1", "block_size": 32}]) as fleet:
        assert "32" in condition(fleet, "BLOCK_SIZE_MISMATCH", "a1").message
        await fleet.frontend.fleet.remove("a0")
        assert condition(fleet, "BLOCK_SIZE_MISMATCH", "a1") is None


async def test_the_cache_of_a_worker_without_events_is_estimated_and_called_so():
    async with site([{"name": "a0"}], specs={"a0": ",kv-events=off"}) as fleet:
        rows = (await fleet.get("/v1/workers"))[1]["workers"]
        assert rows[0]["kv_events"] is False
        assert rows[0]["routed_by"] == "estimated cache and load"
        assert rows[0]["ranks"][0]["index"] == "estimated"


@pytest.mark.parametrize(
    ("specs", "settings"),
    [({"a0": ",kv-events=off", "a1": ",kv-events=off"}, {}), ({}, {"use_kv_events": False})],
)
async def test_without_events_a_prompt_returns_to_the_engine_that_had_it(specs, settings):
    router = RouterConfig().with_values(settings)
    async with site([{"name": "a0"}, {"name": "a1"}], specs=specs, router=router) as fleet:
        fleet.service.sample = lambda: 0.0
        text = WORDS * 4
        status, _, _ = await fleet.chat(text)
        assert status == 200
        first = fleet.service.router.learned
        assert len(first) > 3
        await fleet.idle()
        fleet.service.sample = lambda: 0.9
        _, answer, _ = await fleet.post("/v1/route", chat_body(text))
        rows = {row["worker"]: row for row in answer["decode"]["candidates"]}
        assert {row["index"] for row in rows.values()} == {"estimated"}
        winner = answer["winner"]["decode"]["worker"]
        assert rows.pop(winner)["overlap_blocks"] > 3
        assert [row["overlap_blocks"] for row in rows.values()] == [0]
        freshness = answer["decode"]["freshness"]["index"]
        assert (freshness["estimated"], freshness["publishers"]) == (2, 0)
        assert [one["code"] for one in answer["doubts"] if one["matters"]] == ["DYR0762"]
        assert answer["certain"] is False
        _, again = await fleet.get("/v1/workers")
        cached = {w["name"]: w["ranks"][0]["cached_blocks"] for w in again["workers"]}
        assert cached[winner] == len(first)


async def test_the_policy_lru_names_workers_that_declare_no_blocks():
    router = RouterConfig(use_kv_events=False, router_approximate_cache_policy="lru")
    async with site([{"name": "a0"}], router=router) as fleet:
        assert condition(fleet, "CAPACITY_UNKNOWN", "a0") is None
        [worker] = fleet.service.router.registry
        unknown = replace(worker.runtime_config, total_kv_blocks=None)
        fleet.service.membership.upsert(replace(worker, runtime_config=unknown))
        assert "declares no KV blocks" in condition(fleet, "CAPACITY_UNKNOWN", "a0").message


async def test_a_request_that_never_reached_its_engine_is_not_learned(monkeypatch):
    async with site([{"name": "a0"}], specs={"a0": ",kv-events=off"}) as fleet:
        learned = fleet.service.router.learned

        async def refuses(*_arguments: object, **_more: object) -> Any:
            raise UpstreamFailure("connect", "a0 did not accept the connection")

        monkeypatch.setattr(fleet.frontend.core.upstream, "open", refuses)
        status, _, _ = await fleet.chat(WORDS * 4)
        assert status >= 500
        assert len(learned) == 0


async def test_facts_that_arrive_late_keep_the_estimate(monkeypatch):
    """A reading that timed out on a busy machine is no restart of the engine."""
    async with site([{"name": "a0"}], specs={"a0": ",kv-events=off"}) as fleet:
        member: Any = fleet.frontend.fleet.get("a0")
        router = fleet.service.router
        readings = 0
        read = fleet.frontend.fleet._engines.facts
        complete = await read(member.spec)

        async def facts(spec):
            nonlocal readings
            readings += 1
            return complete

        monkeypatch.setattr(fleet.frontend.fleet._engines, "facts", facts)
        partial = replace(complete, engine_id=None, total_blocks=None)
        member.facts = partial
        config = replace(member.worker.runtime_config, total_kv_blocks=None)
        member.worker = replace(member.worker, runtime_config=config)
        fleet.service.membership.upsert(member.worker)
        assert (await fleet.chat(WORDS * 4))[0] == 200
        held = router.learned.block_count(0)
        assert held > 3
        member.facts_at = 0.0
        member.probe_now.set()
        await until(lambda: member.worker.runtime_config.total_kv_blocks is not None)
        assert readings
        assert member.facts.engine_id == complete.engine_id
        assert router.learned.block_count(0) == held


async def test_an_engine_that_restarts_loses_its_estimate():
    async with site([{"name": "a0"}], specs={"a0": ",kv-events=off"}) as fleet:
        learned = fleet.service.router.learned
        async with asyncio.timeout(patience(10)):
            while not len(learned):  # a busy machine may refuse the first one
                status, _, _ = await fleet.chat(WORDS * 4)
                assert status in (200, 503)
        await fleet.engines["a0"].close()
        await until(lambda: not learned.block_count(0))


async def test_lost_events_show_and_a_silent_restart_empties_the_index():
    async with site([{"name": "a0", "replay": ""}]) as fleet:
        engine = fleet.engines["a0"].engine
        router = fleet.service.router
        slot = router.registry.slots(router.registry.by_name("a0").worker_id)[0]
        await fleet.connected()
        await fleet.chat("first " + WORDS * 4)
        await until(lambda: router.index.block_count(slot) > 0)
        engine.faults.update({"drop_events": 1})
        await fleet.chat("second " + WORDS * 4)
        await fleet.chat("third " + WORDS * 4)
        await until(lambda: router.freshness[slot].index_state == "gapped")
        assert condition(fleet, "EVENTS_LOST", "a0")
        await engine.restart_silently()
        # What it publishes before the subscription is back is lost; the next batch shows it.
        number = 0
        async with asyncio.timeout(patience(10)):
            while condition(fleet, "ENGINE_RESTARTED", "a0") is None:
                number += 1
                await fleet.chat(f"{number} " + WORDS * 4)
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def tokenize_engine(chats, texts):
    """An engine whose ``/tokenize`` answers chats and texts with these statuses and token ids."""
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    async def tokenize(request: web.Request) -> web.Response:
        status, tokens = chats if "messages" in await request.json() else texts
        return web.json_response({"tokens": tokens}, status=status)

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    server = TestServer(app)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest.fixture
async def plain_engine():
    """An OpenAI server with nothing but chat."""
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    async def chat(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "ok"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    server = TestServer(app)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


async def test_an_index_over_its_bound_is_dropped_and_read_again(monkeypatch):
    """An engine with more blocks than it declares costs its own index, never the process."""
    monkeypatch.setattr("dynctl.serving.engines.fleet._REREAD_S", (0.05,))
    async with site([{"name": "a0"}, {"name": "a1"}]) as fleet:
        await fleet.connected()
        service = fleet.service
        router = service.router
        [slot] = router.registry.slots(router.registry.by_name("a0").worker_id)
        normal = router.bound
        router.bound_index(IndexBound(slack=0.0, spare=2))
        pin = {"nvext": {"decode_worker_id": router.registry.by_name("a0").worker_id}}
        assert (await fleet.chat(WORDS * 8, **pin))[0] == 200
        await until(lambda: router.freshness[slot].index_state == "over_limit")
        await until(lambda: any(one.code == "INDEX_OVER_LIMIT" for one in service.health().derived))
        router.bound_index(normal)
        await until(lambda: router.freshness[slot].trust == "exact")
        await until(lambda: router.index.block_count(slot) > 4)
        assert not any(one.code == "INDEX_OVER_LIMIT" for one in service.health().derived)
        assert (await fleet.chat("hello"))[0] == 200
