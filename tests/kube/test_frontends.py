"""The simulated frontends respond like Dynamo 1.6.1, request by request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynctl.wire.dynamo.frontend_metrics import read_frontend_metrics
from tests.kube.actors.frontend_view import JSON, Known, View

CAPTURES = Path(__file__).parents[1] / "captures"
#: Requests that our clients do not make, or with another format: health lists registrations.
ELSEWHERE = ("/health", "/openapi.json", "/docs")


class Asked(NamedTuple):
    method: str
    path: str
    kind: str
    body: str
    answer: str
    status: int


def captured(name: str) -> list[Asked]:
    """The requests of a capture in their order."""
    text = (CAPTURES / name).read_text()
    found = []
    for block in re.split(r"^### ", text, flags=re.M)[1:]:
        line, _, rest = block.partition("\n")
        answer, _, last = rest.rpartition("[HTTP ")
        method = line.split()[0].removeprefix("-X") if line.startswith("-X") else "GET"
        path = re.sub(r"^.*?http://[^/]+", "", line).split()[0]
        kind = JSON if "content-type: application/json" in line else "application/x-www-form"
        body = line.partition(" -d ")[2]
        found.append(Asked(method, path, kind, body, answer.strip(), int(last.split()[0])))
    return found


def aggregated() -> View:
    workers = tuple(
        Known(number, "aggregated", frozenset(), "", required=False) for number in (1, 2)
    )
    return View(workers, model="tiny")


def test_thresholds_and_paths_are_answered_as_captured() -> None:
    view, requests = aggregated(), captured("http-frontend.txt")
    judged = 0

    for one in requests:
        if one.path in ELSEWHERE or not one.path:
            continue
        result = view.answer(one.method, one.path, one.body.encode(), one.kind)
        judged += 1
        assert result.status == one.status, one
        if one.path == "/metrics" or not one.answer:
            continue
        if result.kind != JSON or one.status == 422:
            # The message about an invalid body comes from another parser.
            assert result.body[:40] == one.answer[:40], one
        else:
            assert shape(json.loads(result.body)) == shape(json.loads(one.answer)), one
    assert judged > 20


def shape(document: Any) -> Any:
    """Without the time at which a model came."""
    for row in document.get("data", ()):
        row["created"] = 0
    return document


@pytest.mark.parametrize("name", ["aggregated", "prefill only", "unknown model"])
def test_readiness_is_as_captured(name: str) -> None:
    wanted = json.loads((CAPTURES / "http-frontend-ready.json").read_text())[name]
    view, model = aggregated(), "tiny"
    if name == "prefill only":
        view.workers = (Known(1, "prefill", frozenset(), "", required=False),)
    elif name == "unknown model":
        model = "nope"
    result = view.answer("GET", f"/v1/models/{model}/ready")

    assert result.status == wanted["status"]
    assert json.loads(result.body) == wanted["body"]


def test_metrics_are_read_as_those_of_a_real_one() -> None:
    real = read_frontend_metrics((CAPTURES / "metrics-frontend-disagg.txt").read_bytes())
    roles = ("prefill", "decode", "prefill")
    known = tuple(
        Known(number, role, frozenset(), "", required=False) for number, role in enumerate(roles, 1)
    )
    ours = read_frontend_metrics(View(known, model="tiny").metrics().encode())

    assert sorted(ours.registered.values()) == sorted(real.registered.values())
    assert ours.models.keys() == real.models.keys()
    assert ours.models["tiny"].kv_cache_block_size == real.models["tiny"].kv_cache_block_size
    assert (ours.kv_routing, ours.kv_events) == (real.kv_routing, real.kv_events) == (True, True)
    assert ours.event_source_mismatches == real.event_source_mismatches
    assert ours.problems == real.problems == ()


def test_a_router_of_another_mode_names_no_workers() -> None:
    real = read_frontend_metrics((CAPTURES / "metrics-frontend-round-robin.txt").read_bytes())
    view = aggregated()
    view.kv = False
    ours = read_frontend_metrics(view.metrics().encode())

    assert ours.kv_routing is real.kv_routing is False
    assert ours.registered == real.registered == {}
