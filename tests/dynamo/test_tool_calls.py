"""Tool calls in our answers are those of Dynamo's frontend, for the same text of a worker.

Each parser of ``CARDS`` reads 40 texts, streamed and not: one call and several, text around them,
broken JSON, marks cut between pieces, unknown names, stop strings, several choices.
"""

import json
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from dynctl.serving.engines.answer import NO_PARSERS, parsers_of
from dynctl.wire.dynamo.openai_options import read_engine_options
from tests.contract.etcd_server import EtcdServer
from tests.dynamo.answers import Case, Seen, ours, parsed
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import DynamoFleet, WorkerPlan
from tests.dynamo.tool_texts import CARDS, TOOLS, card_args, cases
from tests.waiting import patience

COUNT = 40


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoFleet]:
    """Workers of one model for each parser. File discovery would need a watch for each model."""
    etcd = EtcdServer(tmp_path_factory.mktemp("etcd"))
    etcd.start()
    args = ("--component", "tools", *card_args())
    plans = [
        WorkerPlan("plain", kind="scripted"),
        WorkerPlan("tools", kind="scripted", args=args, system_server=False, late=True),
    ]
    try:
        with DynamoFleet(plans, discovery="etcd", etcd_endpoints=etcd.url) as made:
            made.start_worker("tools", wait=False)
            made.wait_until(partial(_accepted, made.frontend), "models", seconds=90)
            yield made
    finally:
        etcd.close()


def _accepted(frontend: FrontendClient) -> bool:
    """Whether the frontend accepts requests of every model; it lists a model before."""
    return all(frontend.get(f"/v1/models/{model}/ready")[0] == 200 for model in CARDS)


def _answer(url: str, case: Case) -> Seen:
    body = case.body()
    reply = httpx.post(url + case.path, json=body, timeout=patience(60))
    return parsed(reply.status_code, body.get("stream") is True, reply.text)


@pytest.mark.parametrize("model", sorted(CARDS))
def test_tool_calls_are_equal(fleet, finding, model):
    made = cases(model, COUNT)
    theirs = [_answer(fleet.frontend.url, case) for case in made]
    rows = (fleet.directory / "tools.jsonl").read_text().splitlines()
    received = {row["key"]: row["body"]["token_ids"] for row in map(json.loads, rows)}
    different, called = [], 0
    for case, their in zip(made, theirs, strict=True):
        options = read_engine_options(case.body())
        parsers = parsers_of(options, CARDS[model])
        found = ours(case, received[case.name], parsers)
        called += "tool_calls" in str(their)
        if found != their:
            different.append(f"{case}\nours   {found}\ntheirs {their}")
    finding(f"{model}: {COUNT - len(different)} of {COUNT} answers equal, {called} with tool calls")
    assert not different, "\n\n".join(different[:3])
    assert called >= COUNT // 8


def test_a_card_without_a_parser_needs_none():
    options = read_engine_options(Case("plain", True, {"tools": TOOLS}).body())
    assert parsers_of(options, {}) == NO_PARSERS
