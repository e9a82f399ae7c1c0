"""What operators see of real requests: the parts of this room put together in a frontend."""

import io
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynctl.serving.telemetry.log_format import JsonFormatter, TextFormatter
from router_core import preset
from tests.dynctl.serving.fleets import WORDS, site, zone

SECRET = "mellifluous"


def two_zones():
    return [
        {"name": f"{role}-{z}0", "role": role, **zone(f"zone-{z}")}
        for z in "ab"
        for role in ("prefill", "decode")
    ]


async def scrape(fleet):
    status, raw = await fleet.get("/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(raw.decode())
        for sample in family.samples
    }


@pytest.fixture
def log_lines():
    """Reads what the decision logger wrote, in either format."""
    logger = logging.getLogger("dynctl.decisions")
    before = logger.level
    streams = {}
    handlers = []
    for formatter in (TextFormatter(), JsonFormatter()):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        handlers.append(handler)
        streams[type(formatter)] = stream
    logger.setLevel(logging.INFO)
    yield lambda kind: streams[kind].getvalue().splitlines()
    logger.setLevel(before)
    for handler in handlers:
        logger.removeHandler(handler)


async def test_metrics_of_a_disaggregated_request():
    async with site(two_zones()) as fleet:
        status, _, headers = await fleet.chat(f"{SECRET} {WORDS * 4}", max_tokens=5)
        assert status == 200
        await fleet.idle()
        got = await scrape(fleet)

        def value(name, **labels):
            return got[name, tuple(sorted(labels.items()))]

        kind = {"endpoint": "chat_completions", "model": "demo", "request_type": "unary"}
        done = value("dynamo_frontend_requests_total", **kind, status="success", error_type="")
        assert done == 1
        assert value("dynamo_frontend_requests_started_total", **kind) == 1
        assert value("dynamo_frontend_input_sequence_tokens_count", model="demo") == 1
        assert value("dynamo_frontend_inflight_requests", model="demo") == 0
        assert value("dynamo_frontend_model_ready", model="demo") == 1
        assert value("dynctl_decisions_total", stage="decode", outcome="selected") == 1
        local = sum(
            v for (n, labels), v in got.items()
            if n == "dynctl_domain_transfers_total" and ("transfer", "local") in labels
        )  # fmt: skip
        assert local == 1
        for name in ("zone-a", "zone-b"):
            where = {"domain": "zone", "value": name, "role": "decode"}
            assert value("dynctl_domain_workers_ready", **where) == 1
        assert headers["x-dynctl-decision"]


async def test_a_refusal_reaches_memory_metrics_and_log(log_lines):
    async with site(two_zones()) as fleet:
        bound = {"routing_constraints": {"required_taints": ["dynamo.topology/zone=zone-c"]}}
        status, _, headers = await fleet.chat(SECRET, nvext=bound)
        assert status == 503
        decision = headers["x-dynctl-decision"]
        status, document = await fleet.get(f"/v1/decisions/{decision}")
        assert status == 200
        assert document["prefill"]["outcome"] == "no_eligible_worker"
        status, listed = await fleet.get("/v1/decisions?outcome=refused&domain=zone-c")
        assert [row["id"] for row in listed["decisions"]] == [decision]
        got = await scrape(fleet)
        key = ("outcome", "no_eligible_worker"), ("stage", "prefill")
        assert got["dynctl_decisions_total", key] == 1
        (line,) = [line for line in log_lines(TextFormatter) if decision in line]
        assert " WARN dynctl.decisions{decision=" in line
        assert "missing taint dynamo.topology/zone=zone-c" in line


async def test_every_hop_is_logged_as_0_9_did_and_never_the_prompt(log_lines):
    old = preset("dynamo-0.9").with_values({"router_mode": "kv"})  # as the guide sets it
    async with site(two_zones(), router=old, preset="dynamo-0.9", log_decisions="all") as fleet:
        status, _, headers = await fleet.chat(f"{SECRET} {WORDS * 4}", max_tokens=3)
        assert status == 200
        await fleet.idle()
    decision = headers["x-dynctl-decision"]
    messages = [json.loads(line) for line in log_lines(JsonFormatter)]
    mine = [m["message"] for m in messages if m["decision"] == decision]
    # Two prefill candidates, one decode candidate in the zone, a winner of each.
    *mine, end = mine
    assert end.startswith("Finished request_id=")
    assert [m.split(" for ")[0].split(":")[0] for m in mine] == [
        "Formula",
        "Formula",
        "Selected worker",
        "Formula",
        "Selected worker",
    ]
    assert " = 0.0 * prefill_blocks + decode_blocks = 0.0 * " in mine[3]
    assert SECRET not in "".join(log_lines(TextFormatter) + log_lines(JsonFormatter))


async def test_a_client_chosen_model_name_makes_no_series():
    async with site([{"name": "e0"}]) as fleet:
        body = {"model": "made-up-name", "messages": [{"role": "user", "content": "x"}]}
        status, _, _ = await fleet.post("/v1/chat/completions", body)
        assert status == 404
        _, raw = await fleet.get("/metrics")
        assert b"made-up-name" not in raw
        assert b'model="unknown_model"' in raw


async def test_a_view_of_a_frontend_decides_the_same_offline():
    from dynctl.documents.view import decode_view

    async with site(two_zones()) as fleet:
        await fleet.chat(WORDS * 4, max_tokens=3)
        await fleet.idle()
        async with fleet.client.get(fleet.url("/v1/view")) as answer:
            saved = decode_view(await answer.read())
        assert set(saved.model_paths) == {"demo"}
        assert {w.name for w in saved.router.registry} == set(fleet.engines)
