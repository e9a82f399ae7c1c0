"""Facts that engines report about themselves: they need not be typed, and win over typed ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from dynctl.serving.engines import fleet as fleet_module
from dynctl.serving.engines.facts import (
    build_worker,
    contradictions,
)
from dynctl.serving.engines.worker_spec import parse_worker_spec
from dynctl.serving.routing.config import HealthConfig
from dynctl.wire.engine_kinds.facts import EngineFacts, facts_from_gauges, facts_from_models
from dynctl.wire.engine_kinds.load import load_report
from dynctl.wire.engine_kinds.sglang.kind import facts_from_server_info
from dynctl.wire.engine_metrics import EngineGauges
from router_core import Role
from tests.dynctl.serving.fleets import Site, chat_body, site, until
from tests.waiting import patience

QUICK = HealthConfig(interval_s=0.05, timeout_s=patience(1.0))
LORA = {"id": "tuned", "parent": "demo"}


class Engine:
    """A server with vLLM's or SGLang's endpoints. ``served``: names of the answered requests."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "demo", "max_model_len": 2048}]
        self.metrics: str | None = None
        self.server_info: dict[str, Any] | None = None
        self.server_info_path = "/server_info"
        self.served: list[str] = []
        self.refuses = False
        self.url = ""

    def vllm(self, *, block_size: int = 32, blocks: int = 500, ranks: int = 1) -> None:
        self.metrics = "".join(
            f'vllm:cache_config_info{{block_size="{block_size}",engine="{rank}",'
            f'num_gpu_blocks="{blocks}"}} 1.0\nvllm:kv_cache_usage_perc{{engine="{rank}"}} 0.5\n'
            for rank in range(ranks)
        )

    def app(self) -> web.Application:
        async def handle(request: web.Request) -> web.StreamResponse:
            path = request.path
            if path == "/health":
                return web.Response()
            if path == "/v1/models" and self.models:
                return web.json_response({"object": "list", "data": self.models})
            if path == "/metrics" and self.metrics is not None:
                return web.Response(text=self.metrics)
            if path == self.server_info_path and self.server_info is not None:
                return web.json_response(self.server_info)
            if path == "/v1/chat/completions":
                if self.refuses:
                    raise web.HTTPNotFound
                self.served.append((await request.json())["model"])
                return web.json_response({"choices": []})
            raise web.HTTPNotFound

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        return app


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    """Two engines."""
    made = [Engine(), Engine()]
    async with TestServer(made[0].app()) as one, TestServer(made[1].app()) as other:
        for engine, server in zip(made, (one, other), strict=True):
            engine.url = str(server.make_url("")).rstrip("/")
        yield made


def worker(fleet: Site, name: str = "v") -> Any:
    return fleet.service.router.registry.by_name(name)


def condition(fleet: Site, name: str = "v") -> str | None:
    found = fleet.service.conditions.get("SPEC_DIFFERS_FROM_ENGINE", name)
    return None if found is None else found.message


@pytest.mark.seed("smart-routing-guide-0.9: engines: vLLM events")
async def test_a_vllm_engine_needs_no_typed_values(engines: list[Engine]):
    engines[0].vllm(block_size=32, blocks=500, ranks=2)
    async with site([], workers=(f"{engines[0].url},name=v",), health=QUICK) as fleet:
        found = worker(fleet)
        assert (found.model, found.block_size) == ("demo", 32)
        config = found.runtime_config
        assert (config.data_parallel_size, config.total_kv_blocks) == (2, 500)
        assert config.context_length == 2048
        assert condition(fleet) is None


@pytest.mark.seed("smart-routing-guide-0.9: engines: SGLang events")
async def test_an_sglang_engine_needs_no_typed_values(engines: list[Engine]):
    for path in ("/server_info", "/get_server_info"):
        engines[0].server_info_path = path
        engines[0].server_info = {"page_size": 64, "max_total_num_tokens": 6410, "dp_size": 2}
        async with site([], workers=(f"{engines[0].url},name=v",), health=QUICK) as fleet:
            found = worker(fleet)
            assert found.block_size == 64
            assert found.runtime_config.total_kv_blocks == 100
            assert found.runtime_config.data_parallel_size == 2


@pytest.mark.seed("router-guide: arguments: --kv-cache-block-size")
@pytest.mark.seed("smart-routing-guide-0.9: engines: block size")
async def test_typed_values_that_differ_lose_and_the_condition_ends_with_them(
    engines: list[Engine],
):
    engines[0].vllm(block_size=32, blocks=500)
    spec = f"{engines[0].url},name=v,block-size=16,dp=4,total-blocks=500,model=mine"
    async with site([], workers=(spec,), health=QUICK) as fleet:
        assert worker(fleet).block_size == 32
        assert worker(fleet).runtime_config.data_parallel_size == 1
        assert worker(fleet).model == "mine"
        assert condition(fleet) == (
            "block-size=16 is set and the engine reports 32, dp=4 is set and the engine "
            "reports 1: the engine's value is used; model=mine is set and the engine serves "
            "demo: requests for mine go to the engine under that name"
        )
        await fleet.frontend.fleet.remove("v")
        assert condition(fleet) is None


async def test_adapters_are_listed_with_their_parent_and_routed_to_workers_that_have_them(
    engines: list[Engine],
):
    with_adapter, without = engines
    with_adapter.models.append(LORA)
    specs = (f"{with_adapter.url},name=v", f"{without.url},name=w")
    async with site([], workers=specs, health=QUICK) as fleet:
        _, listed = await fleet.get("/v1/models")
        rows = {row["id"]: row for row in listed["data"]}
        assert rows["tuned"]["parent"] == "demo"
        assert "parent" not in rows["demo"]
        assert {row["max_model_len"] for row in rows.values()} == {2048}
        for _ in range(6):
            status, _, _ = await fleet.post(
                "/v1/chat/completions", chat_body("hi") | {"model": "tuned"}
            )
            assert status == 200
        assert with_adapter.served == ["tuned"] * 6
        assert without.served == []
        await fleet.frontend.fleet.remove("v")
        status, _, _ = await fleet.post(
            "/v1/chat/completions", {**chat_body("x"), "model": "tuned"}
        )
        assert status == 404


async def test_a_model_is_requested_by_each_of_its_names(engines: list[Engine]):
    engines[0].models = [{"id": "demo", "max_model_len": 2048}, {"id": "short"}, LORA]
    async with site([], workers=(f"{engines[0].url},name=v",), health=QUICK) as fleet:
        assert fleet.service.models() == ("demo",)
        _, listed = await fleet.get("/v1/models")
        rows = {row["id"]: row for row in listed["data"]}
        assert rows.keys() == {"demo", "short", "tuned"}
        assert "parent" not in rows["short"]
        assert rows["short"]["max_model_len"] == 2048
        for name in ("demo", "short", "tuned"):
            status, _, _ = await fleet.post(
                "/v1/chat/completions", {**chat_body("x"), "model": name}
            )
            assert status == 200
        assert engines[0].served == ["demo", "short", "tuned"]
        assert condition(fleet) is None


async def test_adapters_that_come_and_go_are_noticed_and_a_failed_reading_changes_nothing(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fleet_module, "_FACTS_S", 0.0)
    engine = engines[0]
    engine.vllm()
    async with site([], workers=(f"{engine.url},name=v",), health=QUICK) as fleet:
        first = worker(fleet)
        engine.models.append(LORA)
        await until(lambda: fleet.service.served.base_model("tuned") == "demo")
        kept, engine.models, engine.metrics = engine.models, [], None
        member = fleet.frontend.fleet.get("v")
        assert member is not None
        at = member.facts_at
        await until(lambda: member.facts_at > at)
        assert fleet.service.served.base_model("tuned") == "demo"
        assert worker(fleet) == replace(first, adapters=("tuned",))
        engine.models = kept[:1]
        await until(lambda: fleet.service.served.base_model("tuned") is None)
        assert worker(fleet) == first


@pytest.mark.parametrize("name", ["short", "tuned"])
async def test_a_name_of_one_engine_is_routed_to_that_engine_alone(
    engines: list[Engine], name: str
):
    """An alias and an adapter are names of the engines that list them, not of their model."""
    having, other = engines
    having.models += [{"id": "short"}, LORA]
    specs = (f"{having.url},name=v", f"{other.url},name=w")
    async with site([], workers=specs, health=QUICK) as fleet:
        for number in range(6):
            body = {**chat_body(f"prompt {number}"), "model": name}
            status, _, _ = await fleet.post("/v1/chat/completions", body)
            assert status == 200
        assert (having.served, other.served) == ([name] * 6, [])
        _, listed = await fleet.get("/v1/workers")
        names = {row["name"]: row.get("other_names") for row in listed["workers"]}
        assert names == {"v": ["short", "tuned"], "w": None}
        status, answer, _ = await fleet.post(
            "/busy_threshold", {"model": name, "active_prefill_tokens_threshold": 5}
        )
        assert status == 404
        assert "another name of 'demo'" in answer["error"]
        _, answer, _ = await fleet.post("/v1/route", {**chat_body("x"), "model": name})
        hop = answer["decode"]
        assert [row["worker"] for row in hop["candidates"]] == ["v"]
        step = next(step for step in hop["funnel"] if step["filter"] == "served_name")
        assert (step["entered"], step["left"]) == (2, 1)
        assert [(row["worker"], row["message"]) for row in step["rejected"]] == [
            ("w", f"does not serve the name {name}")
        ]
        _, answer, _ = await fleet.post("/v1/route", {**chat_body("x"), "model": "demo"})
        assert len(answer["decode"]["candidates"]) == 2
        fleet.service.membership.cordon("v", cordoned=True)
        status, answer, _ = await fleet.post(
            "/v1/chat/completions", {**chat_body("x"), "model": name}
        )
        assert status == 503
        assert "cordoned" in str(answer)


async def test_an_engine_with_other_names_is_read_again_at_its_first_404(
    engines: list[Engine],
):
    """Between two readings of its facts an engine may lose a name: a restart that was not seen."""
    having, other = engines
    having.models.append({"id": "short"})
    specs = (f"{having.url},name=v", f"{other.url},name=w")
    async with site([], workers=specs, health=QUICK) as fleet:
        having.models.pop()
        other.models.append({"id": "short"})
        for name in ("v", "w"):
            member = fleet.frontend.fleet.get(name)
            assert member is not None
            member.facts_at = fleet.service.clock() + 3600
        having.refuses = True
        status, _, _ = await fleet.post(
            "/v1/chat/completions", {**chat_body("x"), "model": "short"}
        )
        assert status == 404
        await until(lambda: fleet.service.served.base_model("short") is None)
        assert worker(fleet).aliases == ()


@pytest.mark.parametrize("number", [10**30, 2**64, -1, 1.5, True, "7"])
def test_numbers_out_of_bounds_are_not_reported(number):
    row = {"dp_rank": 0, "kv_used_blocks": number, "active_decode_blocks": 5}
    report = load_report(1, row)
    assert report is not None
    assert (report.kv_used_blocks, report.active_decode_blocks) == (None, 5)
    facts = facts_from_server_info({"page_size": 16, "max_prefill_tokens": number}, "127.0.0.1")
    assert (facts.block_size, facts.max_num_batched_tokens) == (16, None)


def test_rows_of_v1_models():
    rows = [
        {"id": "base", "max_model_len": 100, "parent": None},
        {"id": "alias", "max_model_len": 100},
        {"id": "a", "parent": "base"},
        {"id": "b", "parent": "a/path/of/base"},
        "not a row",
    ]
    facts = facts_from_models({"data": rows})
    assert (facts.model, facts.models) == ("base", ("base", "alias"))
    assert facts.adapters == ("a", "b")
    assert facts.context_length == 100
    assert facts_from_models({"data": "x"}) == EngineFacts()


def test_ranks_count_only_where_labels_name_them_without_a_gap():
    def ranks(*numbers: int, labelled: bool = True) -> EngineFacts:
        gauge = EngineGauges(total_blocks=7, block_size=16, labelled=labelled)
        return facts_from_gauges(dict.fromkeys(numbers, gauge))

    assert (ranks(0, 1).dp, ranks(0, 1).start_rank) == (2, 0)
    assert (ranks(3).dp, ranks(3).start_rank) == (1, 3)
    assert ranks(0, 2).dp is None
    assert ranks(0, labelled=False).dp is None
    assert ranks(0, 2).total_blocks == 7


def test_the_facts_of_an_sglang_prefill_engine():
    info = {
        "page_size": 1,
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 8998,
        "kv_events_config": '{"publisher":"zmq","topic":"kv","endpoint":"tcp://*:5557"}',
    }
    facts = facts_from_server_info(info, "10.0.0.1")
    assert (facts.role, facts.kv_events, facts.topic) == ("prefill", "tcp://*:5557", "kv")
    assert facts.bootstrap == "*:8998"
    assert (
        build_worker(
            parse_worker_spec("http://10.0.0.1:1,model=m"), facts, model=None, block_size=16
        ).role
        is Role.PREFILL
    )


def test_decode_engines_of_sglang_cannot_prefill():
    facts = facts_from_server_info({"disaggregation_mode": "decode"}, "10.0.0.1")
    assert (facts.role, facts.can_prefill) == ("decode", False)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "page_size",
                "max_total_num_tokens",
                "dp_size",
                "kv_events_config",
                "disaggregation_mode",
                "disaggregation_bootstrap_port",
                "max_prefill_tokens",
            ]
        ),
        st.none()
        | st.integers(-(2**70), 2**70)
        | st.text(max_size=20)
        | st.booleans()
        | st.lists(st.integers(), max_size=2),
    )
)
def test_any_server_info_gives_facts(info: dict[str, Any]):
    facts_from_server_info(info, "h")


@given(typed=st.none() | st.integers(1, 4096), reported=st.none() | st.integers(1, 4096))
def test_the_reported_value_is_used_and_a_difference_is_never_silent(
    typed: int | None, reported: int | None
):
    text = "" if typed is None else f",block-size={typed}"
    spec = parse_worker_spec(f"http://x:1,model=m{text}")
    facts = EngineFacts(block_size=reported)
    built = build_worker(spec, facts, model=None, block_size=16)
    assert built.block_size == (reported or typed or 16)
    differs = typed is not None and reported is not None and typed != reported
    assert (contradictions(spec, facts) is not None) == differs


@pytest.mark.seed("router-guide: arguments: --kv-cache-block-size")
@pytest.mark.seed("smart-routing-guide-0.9: core parameters: DYN_KV_CACHE_BLOCK_SIZE")
@pytest.mark.seed("smart-routing-guide-0.9: engines: block size")
@pytest.mark.parametrize(("given", "reported"), [(64, 16), (16, 32), (32, 32), (None, 32)])
async def test_a_block_size_that_the_engine_does_not_have_is_a_condition(
    engines: list[Engine], given: int | None, reported: int
) -> None:
    engines[0].vllm(block_size=reported, blocks=500, ranks=1)
    workers = (f"{engines[0].url},name=v",)
    async with site([], workers=workers, health=QUICK, block_size=given) as fleet:
        assert worker(fleet).block_size == reported
        expected = (
            f"--kv-cache-block-size {given} is set and the engine reports {reported}: "
            "the engine's value is used"
        )
        differs = given is not None and given != reported
        assert condition(fleet) == (expected if differs else None)
        _, document = await fleet.get("/v1/config")
        rows = {row["name"]: row for row in document["serving"]}
        source = "default" if given is None else "set at the start"
        row = rows["kv_cache_block_size"]
        assert (row["value"], row["source"]) == (given, source)


async def test_a_model_name_that_the_engine_does_not_serve_is_a_condition(
    engines: list[Engine],
) -> None:
    engines[0].vllm(block_size=16, blocks=500, ranks=1)
    workers = (f"{engines[0].url},name=v",)
    async with site([], workers=workers, health=QUICK, model_name="other") as fleet:
        assert worker(fleet).model == "demo"
        assert condition(fleet) == (
            "--model-name other is set and the engine reports demo: the engine's value is used"
        )
