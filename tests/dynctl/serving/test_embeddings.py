"""``/v1/embeddings``: routed like every inference request, and passed to the engine as it is."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.serving.dynamo.request_plane import PlaneDispatch
from dynctl.serving.routing.config import FrontendConfig
from dynctl.tokenization import DEMO_MODEL_DIR
from dynctl.wire.openai import parse_embedding_request
from router_core import Booked, RouterConfig
from tests.dynctl.serving.fleets import SLOW_HEALTH, WORDS, site
from tests.dynctl.serving.hostile import HostileEngine, answers, hostile, specs

TWO: list[dict[str, Any]] = [{"name": "cpu"}, {"name": "gpu"}]
PATH = "/v1/embeddings"


def embeddings_body(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": given, **fields}


def _over(engines: list[HostileEngine]) -> FrontendConfig:
    return FrontendConfig(
        port=0, workers=specs(engines), model_path=DEMO_MODEL_DIR, health=SLOW_HEALTH
    )


async def embed(fleet: Any, given: Any, **fields: Any) -> tuple[int, Any, Any]:
    found: tuple[int, Any, Any] = await fleet.post(PATH, embeddings_body(given, **fields))
    return found


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("one text", 1),
        (["one text", "another"], 2),
        ([1, 2, 3], 1),
        ([[1, 2, 3], [4, 5]], 2),
    ],
)
async def test_texts_tokens_and_batches_are_answered(given: Any, count: int) -> None:
    async with site(TWO) as fleet:
        status, body, headers = await embed(fleet, given)
        assert (status, body["object"], len(body["data"])) == (200, "list", count)
        assert [row["index"] for row in body["data"]] == list(range(count))
        assert headers["x-dynctl-decision"]
        # The same input has the same vector, from any engine.
        _, again, _ = await embed(fleet, given)
        assert [row["embedding"] for row in again["data"]] == [
            row["embedding"] for row in body["data"]
        ]
        assert body["usage"]["completion_tokens"] == 0
        await fleet.idle()
        _, metrics = await fleet.get("/metrics")
        assert b'endpoint="embeddings"' in metrics


async def test_format_and_dimensions_are_the_engines_business() -> None:
    async with site(TWO[:1]) as fleet:
        _, plain, _ = await embed(fleet, "text", dimensions=4)
        _, packed, _ = await embed(fleet, "text", dimensions=4, encoding_format="base64")
        vector = plain["data"][0]["embedding"]
        data = base64.b64decode(packed["data"][0]["embedding"])
        assert list(struct.unpack("<4f", data)) == pytest.approx(vector)
        assert sum(value * value for value in vector) == pytest.approx(1.0)


@pytest.mark.seed("router-guide: modes: Device-Aware Weighted")
@pytest.mark.seed("router-guide: modes: CPU encoders beside GPU encoders")
async def test_encoders_on_cpus_get_their_share() -> None:
    config = RouterConfig(router_mode="device-aware-weighted", encoder_cuda_to_cpu_ratio=2.0)
    async with site(TWO, specs={"cpu": ",device=cpu"}, router=config) as fleet:
        wants = {"extra_fields": ["worker_id"]}

        async def chosen() -> str:
            _, body, _ = await embed(fleet, "text", nvext=wants)
            found = body["nvext"]["worker_id"]["decode_worker_id"]
            worker = fleet.service.router.registry.get(found)
            assert worker is not None
            return str(worker.name)

        assert [await chosen() for _ in range(3)] == ["gpu"] * 3  # idle: the accelerator
        gpu = fleet.service.router.registry.by_name("gpu")
        assert gpu is not None
        for n in range(2):
            fleet.service.apply(Booked(f"other{n}", "aggregated", gpu.worker_id, 0))
        assert [await chosen() for _ in range(3)] == ["cpu"] * 3
        fleet.service.free("other0")
        assert await chosen() == "gpu"
        status, rows = await fleet.get("/v1/workers")
        assert status == 200
        devices = {row["name"]: row.get("device") for row in rows["workers"]}
        assert devices == {"cpu": "cpu", "gpu": None}
        fleet.service.free("other1")


async def test_pins_constraints_and_dry_runs_are_those_of_other_requests() -> None:
    async with site(TWO, router=RouterConfig(router_mode="direct")) as fleet:
        for name in ("gpu", "cpu"):
            worker = fleet.service.router.registry.by_name(name)
            assert worker is not None
            headers = {"x-worker-instance-id": str(worker.worker_id)}
            body = embeddings_body("text", nvext={"extra_fields": ["worker_id"]})
            status, found, _ = await fleet.post(PATH, body, headers=headers)
            assert status == 200
            assert found["nvext"]["worker_id"]["decode_worker_id"] == worker.worker_id
        status, found, _ = await embed(fleet, "text")
        assert (status, found["error"]["code"]) == (400, "worker_required")
    async with site(TWO) as fleet:
        dry = {"annotations": ["query_instance_id:"]}
        status, found, _ = await embed(fleet, "text", nvext=dry)
        assert (status, found["data"], set(found["nvext"])) == (
            200,
            [],
            {"worker_id", "token_ids"},
        )
        nope = {"routing_constraints": {"required_taints": ["nope"]}}
        status, found, _ = await embed(fleet, "text", nvext=nope)
        assert (status, found["error"]["dynctl"]["filter"]) == (503, "taints")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "demo"}, 400, "input: is required"),
        ({"model": "demo", "input": 3}, 400, "input: expected a string, token ids, or an array"),
        ({"model": "demo", "input": []}, 400, "input: must not be empty"),
        ({"model": "demo", "input": [["x"]]}, 400, "input[0][0]: expected"),
        ({"model": "demo", "input": ["x"] * 5_000}, 400, "input: expected at most 4096 entries"),
        ({"model": "demo", "input": "x", "dimensions": 0}, 400, "dimensions: expected"),
        ({"model": "demo", "input": "x", "encoding_format": "hex"}, 400, "encoding_format: "),
        ({"model": "nope", "input": "x"}, 404, "model 'nope' is not served"),
        ({"model": "demo", "input": [1] * 40_000}, 400, "input has 40000 tokens"),
    ],
)
async def test_what_is_wrong_is_named(body: Any, status: int, message: str) -> None:
    async with site(TWO[:1]) as fleet:
        found, answer, _ = await fleet.post(PATH, body)
        assert found == status
        assert message in answer["error"]["message"]


async def test_prefill_and_decode_workers_make_no_embeddings() -> None:
    engines: list[dict[str, Any]] = [
        {"name": "p0", "role": "prefill"},
        {"name": "d0", "role": "decode"},
    ]
    async with site(engines) as fleet:
        status, body, _ = await embed(fleet, WORDS)
        assert (status, body["error"]["code"]) == (400, "embeddings_not_supported")
        assert "aggregated" in body["error"]["message"]
        await fleet.idle()


async def test_an_answer_without_data_is_a_failure_of_the_engine() -> None:
    bad = answers(b'{"choices": []}', "application/json")
    async with hostile(bad) as engines, site([], config=_over(engines)) as fleet:
        status, body, _ = await embed(fleet, "text")
        assert status == 502
        assert "without a JSON object with data" in body["error"]["message"]


async def test_a_dry_run_of_the_route_endpoint_takes_embeddings() -> None:
    async with site(TWO) as fleet:
        status, found, _ = await fleet.post("/v1/route", embeddings_body(["a text", "another"]))
        assert (status, found["kind"]) == (200, "RouteResult")
        assert found["winner"]["decode"]["worker"] in ("cpu", "gpu")


def test_a_frontend_on_dynamos_planes_names_the_endpoint_that_it_refuses() -> None:
    dispatch = object.__new__(PlaneDispatch)  # what it reads depends on the request alone
    with pytest.raises(RequestError) as refused:
        dispatch.read(parse_embedding_request({"model": "demo", "input": "x"}))
    assert refused.value.status == 501
    assert str(refused.value) == (
        "/v1/embeddings is not supported for the workers of a Dynamo deployment"
    )
