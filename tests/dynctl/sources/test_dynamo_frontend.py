"""A Dynamo frontend over HTTP, against a server that answers what Dynamo 1.6.1 was seen to answer.

The server has only the captured exchanges: a request that was not captured fails.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynctl.base.errors import TimedOut, Unreachable, UsageProblem
from dynctl.documents.models import WorkerTypeReadiness
from dynctl.sources.dynamo.frontend import DynamoFrontend
from dynctl.wire.dynamo.discovery import EndpointId
from dynctl.wire.dynamo.frontend_metrics import RankLoad
from tests.http_servers import Exchange, HttpServer

CAPTURES = Path(__file__).parents[2] / "captures"
READY = json.loads((CAPTURES / "http-frontend-ready.json").read_text())
OFF = {
    "active_decode_blocks_threshold": None,
    "active_prefill_tokens_threshold": None,
    "active_prefill_tokens_threshold_frac": None,
}


class Server(HttpServer):
    """``answers``: ``(method, path, body)`` -> ``(status, body)``; a body is compared as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[tuple[str, str, str], tuple[int, bytes]] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.drip = False
        self.held = threading.Event()

    def answer(self, path: str, body: Any, status: int = 200, *, to: Any = None) -> None:
        method, sent = ("GET", "") if to is None else ("POST", json.dumps(to, sort_keys=True))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers[method, path, sent] = (status, data)

    def respond(self, exchange: Exchange) -> None:
        sent = exchange.body
        body = json.dumps(json.loads(sent), sort_keys=True) if sent else ""
        assert not sent or exchange.headers["content-type"] == "application/json"
        request = (exchange.command, exchange.path, body)
        self.requests.append(request)
        missing = f"Route not found: {exchange.command} {exchange.path}"
        default = json.dumps({"message": missing, "type": "Not Found", "code": 404}).encode()
        status, data = self.answers.get(request, (404, default))
        if not self.drip:
            exchange.reply(data, status)
            return
        exchange.send_response(status)
        exchange.send_header("content-length", str(len(data)))
        exchange.end_headers()
        for byte in data:
            exchange.wfile.write(bytes([byte]))
            if self.held.wait(0.05):
                return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.held.set()


@pytest.fixture
def dynamo(server: Server) -> Server:
    """The captured frontend, before any threshold was set."""
    lines = (CAPTURES / "http-frontend.txt").read_text().splitlines()
    for request, body, response in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        status = int(response.removeprefix("[HTTP ")[:3])
        path = "/" + request.split("http://127.0.0.1:18000/")[1].split(" ")[0]
        data = body.encode()
        if request.startswith("### http"):
            server.answers.setdefault(("GET", path, ""), (status, data))
        elif " -d {" in request and "content-type" in request:
            sent = json.dumps(json.loads(request.split(" -d ")[1]), sort_keys=True)
            server.answers.setdefault(("POST", path, sent), (status, data))
    ready = "/v1/models/{}/ready"
    server.answer(ready.format("tiny"), READY["aggregated"]["body"])
    server.answer(ready.format("nope"), READY["unknown model"]["body"], 404)
    server.answer(ready.format("a%2Fb"), READY["unknown model"]["body"], 404)
    server.answer("/metrics", (CAPTURES / "metrics-frontend-agg.txt").read_bytes())
    return server


@pytest.fixture
def frontend(dynamo) -> DynamoFrontend:
    return DynamoFrontend(dynamo.url, timeout=10)


# -- who is there ----------------------------------------------------------------------------------


def test_dynamo_is_known(frontend):
    assert frontend.identify() == "dynamo"
    assert frontend.openapi_version() == "1.6.1"


def test_dynamo_behind_a_gateway_that_answers_404_itself(frontend, dynamo):
    dynamo.answer("/v1/config", b"404 page not found", 404)
    assert frontend.identify() == "dynamo"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"version": "0.1.0", "settings": []}, "dynctl"),
        (401, {"error": {"message": "this dynctl frontend wants a token"}}, "dynctl"),
        (401, b"who are you", "other"),
        (200, {}, "other"),
        (404, b"<html>", "other"),
        (404, b"", "other"),
        (500, b"[1]", "other"),
    ],
)
def test_others_are_known(server, status, body, expected):
    server.answer("/v1/config", body, status)
    assert DynamoFrontend(server.url).identify() == expected


def test_openapi_of_another_server(server):
    server.answer("/v1/config", {"detail": "Not Found"}, 404)
    server.answer("/openapi.json", {"info": {"title": "FastAPI", "version": "1"}})
    assert DynamoFrontend(server.url).identify() == "other"


# -- what is served --------------------------------------------------------------------------------


def test_health_lists_the_instances(frontend):
    health = frontend.health()
    assert health.status == "healthy"
    assert "dyn://dynamo.backend.generate" in health.endpoints
    [one, *_] = health.instances
    assert one.endpoint == EndpointId("dynamo", "backend", "generate")
    assert (one.instance_id, one.transport, one.device_type) == (2324035517153284872, "tcp", "cuda")
    assert one.address == "127.0.0.1:33757/2040a1fd55501308/dynamo/backend/generate"
    assert len(health.instances) == 4
    assert health.malformed == ()


def test_an_odd_instance_hides_no_other(frontend, dynamo):
    document = json.loads(dynamo.answers["GET", "/health", ""][1])
    document["instances"][1] = {"component": "backend"}
    dynamo.answer("/health", document)
    health = frontend.health()
    assert len(health.instances) == 3
    assert "namespace" in health.malformed[0].problem


def test_models(frontend):
    assert frontend.models() == ["tiny"]


def test_ready(frontend):
    ready = frontend.ready("tiny")
    assert (ready.ready, ready.reason or "") == (True, "")
    assert ready.workers("dynamo", "aggregated") == 2
    assert list(ready.namespaces["dynamo"].worker_types) == ["aggregated"]
    assert ready.namespaces["dynamo"].missing_worker_types == []


def test_not_ready_is_an_answer(frontend, dynamo):
    captured = READY["prefill only"]
    assert captured["status"] == 503
    dynamo.answer("/v1/models/tiny/ready", captured["body"], 503)
    ready = frontend.ready("tiny")
    assert (ready.ready, ready.reason) == (
        False,
        "no namespace has all required worker types live",
    )
    space = ready.namespaces["dynamo"]
    assert space.worker_types == {"prefill": WorkerTypeReadiness(1, [["decode"]])}
    assert space.missing_worker_types == ready.missing == ["decode"]
    assert space.reason == "missing worker types: decode"


@pytest.mark.parametrize("model", ["nope", "a/b"])
def test_ready_of_an_unknown_model(frontend, model):
    with pytest.raises(UsageProblem, match=f"serves no model {model}") as caught:
        frontend.ready(model)
    assert caught.value.hint == "it serves tiny"


def test_a_dynamo_without_readiness(frontend, dynamo):
    del dynamo.answers["GET", "/v1/models/tiny/ready", ""]
    with pytest.raises(Unreachable, match="does not report readiness"):
        frontend.ready("tiny")


def test_metrics(frontend):
    metrics = frontend.metrics()
    assert metrics.kv_routing is True
    assert metrics.rank_loads == {(2324035517153284872, 0): RankLoad(0, 0, "decode")}


def test_metrics_of_something_else(frontend, dynamo):
    dynamo.answer("/metrics", b"<html>\n")
    with pytest.raises(Unreachable, match="not as a Dynamo frontend does: metrics line 1"):
        frontend.metrics()


# -- busy thresholds -------------------------------------------------------------------------------


def test_thresholds(frontend):
    assert frontend.thresholds() == {"tiny": OFF}


def test_set_sends_only_the_given_thresholds(frontend, dynamo):
    request = {"active_decode_blocks_threshold": 0.85, "active_prefill_tokens_threshold": 1000}
    assert frontend.set_thresholds("tiny", request) == {**OFF, **request}
    body = json.dumps({"model": "tiny", **request}, sort_keys=True)
    assert dynamo.requests[-1] == ("POST", "/busy_threshold", body)


@pytest.mark.parametrize(
    ("name", "value", "status", "text"),
    [
        ("active_decode_blocks_threshold", 1.5, 400, "must be between 0.0 and 1.0, got 1.5"),
        ("active_prefill_tokens_threshold", -5, 422, "invalid value: integer `-5`, expected u64"),
        ("active_prefill_tokens_threshold", 1.5, 422, "floating point `1.5`, expected u64"),
        ("active_prefill_tokens_threshold_frac", -2.5, 400, "must be a finite value"),
    ],
)
def test_a_value_that_dynamo_refuses(frontend, name, value, status, text):
    with pytest.raises(UsageProblem) as caught:
        frontend.set_thresholds("tiny", {name: value})
    assert f"/busy_threshold answered {status}: " in caught.value.message
    assert text in caught.value.message


def test_set_for_an_unknown_model(frontend, dynamo):
    with pytest.raises(UsageProblem, match="serves no model nope"):
        frontend.set_thresholds("nope", {"active_decode_blocks_threshold": 0.5})
    assert all(method == "GET" for method, _, _ in dynamo.requests)


def test_a_model_that_goes_between(frontend, dynamo):
    dynamo.answer(
        "/busy_threshold",
        {"error": "Model 'tiny' not found. Thresholds can only be set for discovered models."},
        404,
        to={"model": "tiny", "active_decode_blocks_threshold": 0.5},
    )
    with pytest.raises(UsageProblem, match="only be set for discovered models"):
        frontend.set_thresholds("tiny", {"active_decode_blocks_threshold": 0.5})


def test_switching_off_cannot_be_done(frontend, dynamo):
    row = {"model": "tiny", **OFF, "active_prefill_tokens_threshold": 1000}
    dynamo.answer("/busy_threshold", {"thresholds": [row]})
    with pytest.raises(UsageProblem) as caught:
        frontend.set_thresholds(
            "tiny",
            {"active_prefill_tokens_threshold": None, "active_decode_blocks_threshold": 0.5},
        )
    assert "active_prefill_tokens_threshold is 1000" in caught.value.message
    assert "cannot switch a threshold off while it runs" in caught.value.message
    assert "1000000000000\nor restart the frontend without it" in caught.value.hint
    assert all(method == "GET" for method, _, _ in dynamo.requests)


def test_switching_off_what_is_off(frontend, dynamo):
    assert frontend.set_thresholds("tiny", OFF) == OFF
    assert all(method == "GET" for method, _, _ in dynamo.requests)


def test_an_unknown_threshold_is_refused_here(frontend, dynamo):
    with pytest.raises(UsageProblem, match="bogus: no such threshold"):
        frontend.set_thresholds("tiny", {"bogus": 1})
    assert dynamo.requests == []


def test_a_setting_that_did_not_take(frontend, dynamo):
    request = {"model": "tiny", "active_decode_blocks_threshold": 0.5}
    dynamo.answer("/busy_threshold", {"model": "tiny", **OFF}, to=request)
    with pytest.raises(Unreachable, match=r"threshold is None after setting 0\.5"):
        frontend.set_thresholds("tiny", {"active_decode_blocks_threshold": 0.5})


# -- servers that are not there, slow or failing ---------------------------------------------------


def test_no_response():
    with pytest.raises(
        Unreachable, match=r"127\.0\.0\.1:1 does not answer: connection refused"
    ) as caught:
        DynamoFrontend("http://127.0.0.1:1").identify()
    assert "--frontend http://HOST:PORT, or set DYNCTL_FRONTEND" in caught.value.hint


def test_an_answer_that_drips_is_not_waited_for(frontend, dynamo):
    dynamo.drip = True
    slow = DynamoFrontend(dynamo.url, timeout=0.2)
    # Each byte comes in time; the whole answer would take more than an hour.
    with pytest.raises(TimedOut, match=r"/metrics did not answer within 0\.2 s") as caught:
        slow.metrics()
    assert "--timeout 0.6" in caught.value.hint


def test_an_answer_that_is_too_long(frontend, monkeypatch):
    monkeypatch.setattr(DynamoFrontend, "max_bytes", 1000)
    with pytest.raises(Unreachable, match="the response is over 1,000 bytes"):
        frontend.metrics()


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (200, b"[]", Unreachable, "not as a Dynamo frontend does"),
        (200, b"\xff", Unreachable, "not as a Dynamo frontend does"),
        (200, b'{"thresholds":[{"model":5}]}', Unreachable, "not as a Dynamo frontend does"),
        (404, b"", Unreachable, "answered 404"),
        (500, b"oh no", Unreachable, "answered 500: oh no"),
        (303, b"", Unreachable, "answered 303"),
        (403, b"no", UsageProblem, "answered 403: no"),
    ],
)
def test_strange_answers(frontend, dynamo, status, body, kind, expected):
    dynamo.answer("/busy_threshold", body, status)
    with pytest.raises(kind, match=expected):
        frontend.thresholds()


def test_an_address_that_is_none():
    with pytest.raises(UsageProblem, match="expected http://HOST:PORT"):
        DynamoFrontend("ftp://x")
