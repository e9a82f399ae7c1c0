"""The operators' endpoints over real sockets; /busy_threshold against Dynamo's captured answers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from dynctl.base.errors import UsageProblem
from dynctl.documents.codec import decode
from dynctl.documents.decisions import DecisionList
from dynctl.documents.doubts import Varies
from dynctl.documents.route_of_plan import decision_result
from dynctl.documents.route_result import RouteResult
from dynctl.documents.view import decode_view
from dynctl.serving.http.admin import Admin
from dynctl.serving.http.errors import error_middleware
from dynctl.serving.records.decision_memory import DEFAULT_BYTES, DecisionMemory
from dynctl.serving.records.metrics import Metrics
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from dynctl.sources.client import FrontendClient
from router_core import LoadReported, RouterConfig, constraints
from tests.dynctl.serving.routed import request, store, worker

CAPTURE = Path(__file__).parents[2] / "captures" / "http-busy-threshold.txt"
NULLS = {
    "model": "tiny",
    "active_decode_blocks_threshold": None,
    "active_prefill_tokens_threshold": None,
    "active_prefill_tokens_threshold_frac": None,
}
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def serving(
    *workers, router=None, memory_bytes=DEFAULT_BYTES, **settings
) -> AsyncIterator[tuple[TestClient, RoutingService]]:
    service = RoutingService(router or RouterConfig(), sample=lambda: 0.0)
    for one in workers or (worker(1), worker(2)):
        assert service.membership.upsert(one).ok
    memory = DecisionMemory(memory_bytes, small_fleet=0)
    metrics = Metrics(service, router_id=7, memory=memory)
    service.observers += [memory, metrics]
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(Admin(service, memory, **{"preset": "dynamo-1.6", **settings}).routes())
    app.router.add_get("/metrics", metrics.handle)
    async with TestClient(TestServer(app)) as client:
        yield client, service


def decide(service, request_id="r1", wall=1_000.0, **fields):
    wanted = request(request_id=request_id, **fields)
    record = RequestRecord(request_id, "q", "chat_completions", 0.0, wall, model=wanted.model)
    plan = service.plan(wanted)
    service.decided(plan, wanted, record)
    return plan


# -- /busy_threshold ---------------------------------------------------------------------------


def exchanges():
    """(method, body or None, has content type, answer, status, content type) of the capture."""
    blocks = re.split(r"^### ", CAPTURE.read_text(), flags=re.M)[1:]
    for block in blocks:
        line, answer, status = block.strip("\n").split("\n")[:3]
        method = re.match(r"-X(\w+)", line)
        body = re.search(r" -d (.*)$", line)
        found = re.match(r"\[HTTP (\d+) ct=([^;\]]*)", status)
        assert found
        yield (
            method[1] if method else "GET",
            body[1] if body else None,
            "content-type" in line,
            answer,
            int(found[1]),
            found[2],
        )


#: Where we answer otherwise on purpose: body -> our status.
OURS = {'{"model":"nope"}': 404}


async def test_the_captured_conversation_is_repeated():
    async with serving() as (client, _):
        count = 0
        for method, body, typed, answer, status, kind in exchanges():
            headers = JSON if typed else {"content-type": "application/x-www-form-urlencoded"}
            got = await client.request(
                method, "/busy_threshold", data=body, headers=headers if body else {}
            )
            text = await got.text()
            count += 1
            assert got.status == OURS.get(body or "", status), (method, body, text)
            if status == 405 or body in OURS:
                continue
            assert got.content_type == kind
            if body == "notjson":
                assert text.startswith("Failed to parse the request body as JSON: ")
            elif kind == "application/json":
                assert json.loads(text) == json.loads(answer), (method, body)
            else:
                assert text == answer
        assert count == 20


async def test_an_unknown_model_is_404_when_read():
    async with serving() as (client, _):
        got = await client.post("/busy_threshold", json={"model": "nope"})
        assert got.status == 404
        assert await got.json() == {"error": "Model 'nope' not found. Discovered models: tiny"}


async def test_clear_unsets_and_leaves_the_others():
    async with serving() as (client, service):
        await client.post(
            "/busy_threshold",
            json={
                "model": "tiny",
                "active_decode_blocks_threshold": 0.5,
                "active_prefill_tokens_threshold": 10,
            },
        )
        got = await client.post(
            "/busy_threshold", json={"model": "tiny", "clear": ["active_decode_blocks_threshold"]}
        )
        assert await got.json() == {**NULLS, "active_prefill_tokens_threshold": 10}
        assert service.router.busy.thresholds("tiny").active_decode_blocks_threshold is None


async def test_a_change_takes_effect_at_once_in_both_directions():
    async with serving(worker(1, total=100)) as (client, service):
        service.apply(LoadReported(1, 0, active_decode_blocks=60))
        body = {"model": "tiny", "active_decode_blocks_threshold": 0.5}
        await client.post("/busy_threshold", json=body)
        assert service.plan(request()).final.outcome == "all_busy"
        await client.post("/busy_threshold", json={**body, "active_decode_blocks_threshold": 0.7})
        assert service.plan(request()).ok


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ('{"model":5}', 422, "model: invalid type: integer `5`, expected a string"),
        ("[1]", 422, "invalid type: sequence, expected an object"),
        (
            '{"model":"tiny","active_decode_blocks_threshold":"0.5"}',
            422,
            'active_decode_blocks_threshold: invalid type: string "0.5", expected f64'
            " at line 1 column 54",
        ),
        (
            '{"model":"tiny","active_prefill_tokens_threshold":true}',
            422,
            "active_prefill_tokens_threshold: invalid type: boolean `true`, expected u64"
            " at line 1 column 54",
        ),
        (
            '{"model":"tiny","active_prefill_tokens_threshold":18446744073709551616}',
            422,
            "active_prefill_tokens_threshold: invalid value: integer `18446744073709551616`,"
            " expected u64 at line 1 column 70",
        ),
        (
            '{"model":"tiny",\n"active_prefill_tokens_threshold": {}}',
            422,
            "active_prefill_tokens_threshold: invalid type: map, expected u64",
        ),
        ('{"model":"tiny","clear":"all"}', 422, "clear: expected an array of names of thresholds"),
    ],
)
async def test_bodies_that_cannot_be_read(body, status, error):
    async with serving() as (client, _):
        got = await client.post("/busy_threshold", data=body, headers=JSON)
        assert got.status == status
        prefix = "Failed to deserialize the JSON body into the target type: "
        assert await got.json() == {"error": prefix + error}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"clear": ["x"]}, "clear: no threshold 'x'; expected one of active_decode_blocks"),
        (
            {"clear": ["active_prefill_tokens_threshold"], "active_prefill_tokens_threshold": 5},
            "active_prefill_tokens_threshold is both set and in clear",
        ),
        ({"active_prefill_tokens_threshold_frac": 10**400}, "must be a finite value"),
    ],
)
async def test_values_that_make_no_sense(fields, error):
    async with serving() as (client, service):
        got = await client.post("/busy_threshold", json={"model": "tiny", **fields})
        assert got.status in (400, 422)
        assert error in (await got.text())
        assert not service.router.busy.overrides()


async def test_fields_that_nobody_reads_are_named_in_a_header():
    async with serving() as (client, _):
        body = {"model": "tiny", "active_decode_block_threshold": 0.5, "x\r\ny": 1}
        got = await client.post("/busy_threshold", json=body)
        assert got.status == 200
        assert await got.json() == NULLS
        assert got.headers["x-dynctl-ignored"] == "active_decode_block_threshold, x??y"


async def test_a_body_without_end_is_refused():
    async with serving() as (client, _):
        got = await client.post("/busy_threshold", data=b" " * 70_000, headers=JSON)
        assert got.status == 413

        async def endless():
            for _ in range(100):
                yield b" " * 1024

        got = await client.post("/busy_threshold", data=endless(), headers=JSON)
        assert got.status == 413


async def test_the_admin_api_can_be_switched_off():
    async with serving(enabled=False) as (client, _):
        assert (await client.get("/busy_threshold")).status == 404
        assert (await client.post("/busy_threshold", json={"model": "tiny"})).status == 404
        assert (await client.get("/v1/config")).status == 200


# -- decisions ---------------------------------------------------------------------------------


async def test_decisions_newest_first_and_filtered():
    async with serving(worker(1, zone="a"), worker(2, zone="b")) as (client, service):
        decide(service, "one")
        decide(service, "two", wall=2_000.0, allowed_worker_ids=frozenset({2}))
        decide(service, "no", constraints=constraints(["gpu=b200"]))
        listed = decode(await (await client.get("/v1/decisions")).read(), DecisionList)
        assert [row.id for row in listed.decisions] == ["no", "two", "one"]
        assert (listed.kept, listed.evicted) == (3, 0)
        assert listed.bytes <= listed.limit_bytes
        refused, two, one = listed.decisions
        assert refused.outcome == "no_eligible_worker"
        assert refused.message == "0/2 workers eligible: 2 missing taint gpu=b200"
        assert (two.at, two.domains, two.decode and two.decode.worker) == (
            2_000.0,
            {"zone": "b"},
            "aggregated-2",
        )
        assert one.whole
        assert not two.whole
        for query, ids in {
            "limit=1": ["no"],
            "outcome=refused": ["no"],
            "outcome=selected&limit=1": ["two"],
            "domain=zone=b": ["two"],
            "worker=aggregated-1": ["one"],
            "model=nope": [],
        }.items():
            got = decode(await (await client.get(f"/v1/decisions?{query}")).read(), DecisionList)
            assert [row.id for row in got.decisions] == ids, query


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "limit: expected 1 to 1000, got '0'"),
        ("limit=1001", "limit: expected 1 to 1000, got '1001'"),
        ("limit=ten", "limit: expected 1 to 1000, got 'ten'"),
        ("limit=" + "9" * 5000, "limit: expected 1 to 1000"),
        ("outcome=lost", "outcome: expected one of selected, no_workers"),
        ("zone=a", "zone: unknown parameter, expected one of limit, outcome, worker"),
    ],
)
async def test_bad_queries_name_the_parameter(query, message):
    async with serving() as (client, _):
        got = await client.get(f"/v1/decisions?{query}")
        assert got.status == 400
        error = (await got.json())["error"]
        assert message in error["message"]
        assert error["param"] == query.partition("=")[0]


async def test_a_past_decision_is_the_route_result_it_was():
    async with serving(preset="dynamo-0.9") as (client, service):
        store(service.router, 2, range(32))
        plan = decide(service)
        body = await (await client.get("/v1/decisions/r1")).read()
        result = decode(body, RouteResult)
        assert result.winner.decode is not None
        assert result.winner.decode.worker_id == 2
        assert result.preset == "dynamo-0.9"
        assert result.decode is not None
        assert result.decode.margin == plan.final.margin
        assert result.decode.flip is not None
        document = json.loads(body)
        assert (document["at"], document["whole"], document["attempts"]) == (1_000.0, True, 1)


async def test_a_decision_kept_in_brief_does_not_guess():
    async with serving(worker(1), worker(2), worker(3)) as (client, service):
        decide(service, "sampled")
        decide(service, "brief")
        body = await (await client.get("/v1/decisions/brief")).read()
        result = decode(body, RouteResult)
        assert result.decode is not None
        assert result.decode.flip is None
        assert len(result.decode.candidates) == 2
        assert result.assumptions == ["kept in brief: 2 of 3 scored candidates"]


async def test_attempts_are_listed():
    async with serving() as (client, service):
        decide(service)
        decide(service, wall=1_001.0, allowed_worker_ids=frozenset({2}))
        document = await (await client.get("/v1/decisions/r1")).json()
        assert (document["attempt"], document["attempts"], document["at"]) == (2, 2, 1_001.0)
        assert [row["decode"]["worker_id"] for row in document["earlier"]] == [1]


async def test_a_decision_that_is_gone_says_so():
    async with serving(memory_bytes=8_000) as (client, service):
        for i in range(20):
            decide(service, f"r{i}")
        got = await client.get("/v1/decisions/r0")
        assert got.status == 404
        message = (await got.json())["error"]["message"]
        assert re.match(r"no decision 'r0' is kept: \d+ are, \d+ were removed", message)


async def test_no_memory_says_how_to_have_one():
    async with serving(memory_bytes=0) as (client, service):
        decide(service)
        got = await client.get("/v1/decisions/r1")
        assert "--decision-memory" in (await got.json())["error"]["message"]


# -- settings and view -------------------------------------------------------------------------


async def test_config_tells_where_each_value_came_from():
    config = RouterConfig(router_temperature=0.5)
    sources = {"router_temperature": "flag --router-temperature"}
    async with serving(router=config, sources=sources) as (client, service):
        service.configure({"prefill_load_scale": 2.0})
        await client.post(
            "/busy_threshold", json={"model": "tiny", "active_prefill_tokens_threshold": 9}
        )
        document = await (await client.get("/v1/config")).json()
        rows = {row["name"]: row for row in document["settings"]}
        assert document["preset"] == "dynamo-1.6"
        assert rows["router_temperature"]["value"] == 0.5
        assert rows["router_temperature"]["source"] == "flag --router-temperature"
        assert rows["prefill_load_scale"]["source"] == "set while running"
        assert rows["router_mode"]["source"] == "default"
        assert set(rows) == set(RouterConfig.__dataclass_fields__)
        assert document["thresholds"]["tiny"]["active_prefill_tokens_threshold"] == 9
        assert document["version"]


async def test_a_view_decides_the_same_again():
    async with serving() as (client, service):
        store(service.router, 2, range(32))
        saved = decode_view(await (await client.get("/v1/view")).read())
        assert saved.preset == "dynamo-1.6"
        before, after = service.router.plan(request()), saved.router.plan(request())
        assert decision_result(after.final) == decision_result(before.final)


async def test_a_view_has_the_doubts_of_its_frontend():
    async with serving(worker(1), worker(2)) as (client, service):
        name = service.router.registry.worker(0).name
        service.set_condition("EVENTS_LOST", name, "3 batches are lost")
        saved = decode_view(await (await client.get("/v1/view")).read())
        [found] = saved.doubts
        assert (found.code, found.varies) == ("DYR0705", Varies(overlap=True, workers=[name]))
        assert found.what.endswith("EVENTS_LOST 3 batches are lost")


async def test_metrics_are_among_the_routes():
    async with serving() as (client, service):
        decide(service)
        text = await (await client.get("/metrics")).text()
        assert 'dynctl_decisions_total{stage="aggregated",outcome="selected"} 1' in text


# -- our own client ----------------------------------------------------------------------------


async def test_the_command_lines_client_reads_all_of_it():
    """The source behind `why`, `config show`, `thresholds` and `--save-view`."""
    async with serving(worker(1, zone="a"), worker(2, zone="b"), token="t0ken") as (
        client,
        service,
    ):
        decide(service)
        source = FrontendClient(str(client.make_url("/")), "t0ken")

        def ask() -> None:
            assert source.answers_as_ours(5.0)
            assert source.decision("r1").ok
            assert source.config().preset == "dynamo-1.6"
            after = source.set_thresholds("tiny", {"active_decode_blocks_threshold": 0.5})
            assert after["active_decode_blocks_threshold"] == 0.5
            after = source.set_thresholds("tiny", {"active_decode_blocks_threshold": None})
            assert source.thresholds() == {"tiny": after}
            assert after["active_decode_blocks_threshold"] is None
            assert len(decode_view(source.save()).router.registry) == 2
            assert source.decision("1").id == "r1"
            decide(service, "x1", wall=1_001.0)
            assert [row.id for row in source.recent_decisions(1)] == ["x1"]
            with pytest.raises(UsageProblem, match="'1' matches several decisions: x1, r1") as two:
                source.decision("1")
            assert two.value.hint == "give one of these IDs, or more of its last characters"
            with pytest.raises(UsageProblem, match="no decision 'r9' is kept") as none:
                source.decision("r9")
            assert none.value.hint == "dynctl why without an ID lists the last decisions"
            with pytest.raises(UsageProblem, match=r"must be between 0\.0 and 1\.0, got 2"):
                source.set_thresholds("tiny", {"active_decode_blocks_threshold": 2})
            with pytest.raises(UsageProblem) as missing:
                FrontendClient(source.url).save()
            assert missing.value.message == f"{source.url}/v1/view needs a token (401)"
            with pytest.raises(UsageProblem) as wrong:
                FrontendClient(source.url, "another").save()
            assert wrong.value.message == f"{source.url}/v1/view refuses the token (401)"
            assert "--admin-token of that dynctl serve" in wrong.value.hint

        await asyncio.to_thread(ask)
