"""Tool calls in our answers are those of Dynamo's frontend, for the same text of a worker.

Each parser of ``CARDS`` reads 40 texts, streamed and not: one call and several, text around them,
broken JSON, marks cut between pieces, unknown names, stop strings, several choices. The same for
calls that a request forces, whose JSON schema is that of Dynamo's frontend too.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial

import httpx
import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.serving.dynamo.answer import NO_PARSERS, parsers_of
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from tests.contract.etcd_server import EtcdServer
from tests.dynamo import forced_texts
from tests.dynamo.answers import Case, Seen, ours, parsed
from tests.dynamo.client import FrontendClient
from tests.dynamo.fleet import DynamoFleet, WorkerPlan
from tests.dynamo.tool_texts import CARDS, TOOLS, card_args, cases
from tests.waiting import patience

COUNT = 40
MODELS = {**CARDS, **forced_texts.CARDS}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoFleet]:
    """Workers of one model for each parser. File discovery would need a watch for each model."""
    etcd = EtcdServer(tmp_path_factory.mktemp("etcd"))
    etcd.start()
    args = ("--component", "tools", *card_args(MODELS))
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
    return all(frontend.get(f"/v1/models/{model}/ready")[0] == 200 for model in MODELS)


def _answer(url: str, case: Case) -> Seen:
    body = case.body()
    reply = httpx.post(url + case.path, json=body, timeout=patience(60))
    return parsed(reply.status_code, body.get("stream") is True, reply.text)


@pytest.mark.parametrize("model", sorted(CARDS))
def test_tool_calls_are_equal(fleet, finding, model):
    _compare(fleet, finding, model, cases(model, COUNT))


@pytest.mark.parametrize("model", sorted(forced_texts.CARDS))
def test_forced_calls_are_equal(fleet, finding, model):
    _compare(fleet, finding, model, forced_texts.cases(model, COUNT))


def _compare(fleet: DynamoFleet, finding, model: str, made: Sequence[Case]) -> None:
    theirs = [_answer(fleet.frontend.url, case) for case in made]
    rows = (fleet.directory / "tools.jsonl").read_text().splitlines()
    received = {row["key"]: row["body"] for row in map(json.loads, rows)}
    different, called = [], 0
    for case, their in zip(made, theirs, strict=True):
        options = read_engine_options(case.body())
        parsers = parsers_of(options, MODELS[model])
        request = received[case.name]
        found = ours(case, request["token_ids"], parsers)
        called += "tool_calls" in str(their)
        if found != their:
            different.append(f"{case}\nours   {found}\ntheirs {their}")
        sent = engine_request(options, request["token_ids"], eos_token_ids=[1])
        guided = request["sampling_options"]["guided_decoding"]
        assert sent.sampling_options.guided_decoding == guided, case
    equal = len(made) - len(different)
    finding(f"{model}: {equal} of {len(made)} answers equal, {called} with tool calls")
    assert not different, "\n\n".join(different[:3])
    assert called >= len(made) // 8


FORCED = {"tools": TOOLS, "tool_choice": "required"}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"parallel_tool_calls": False}, 200),
        ({"parallel_tool_calls": False, "tool_choice": forced_texts.NAMED}, 200),
        ({"response_format": {"type": "json_object"}}, 200),
        ({"guided_decoding_backend": "xgrammar", "guided_choice": []}, 200),
        ({"tools": forced_texts.DEFINITIONS}, 200),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]}, 200),
        ({"tools": forced_texts.CONFLICT}, 400),
        ({"tools": forced_texts.NO_DEFINITIONS}, 400),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": True}}]}, 400),
        ({"guided_regex": "a"}, 400),
        ({"guided_json": {"type": "object"}}, 400),
        ({"guided_choice": ["a"], "tool_choice": forced_texts.NAMED}, 400),
        ({"guided_grammar": "a"}, 400),
        ({"tool_choice": {"function": {"name": "f"}}}, 400),
    ],
    ids=lambda each: None if isinstance(each, int) else " ".join(each),
)
def test_what_engines_are_asked_for_is_equal(fleet, request, fields, status):
    chunks = [{"token_ids": [70], "finish_reason": "stop"}]
    case = Case(request.node.name, True, {**FORCED, **fields}, chunks, model="bare")
    assert _answer(fleet.frontend.url, case).status == status
    if status != 200:
        with pytest.raises(RequestError) as refused:
            read_engine_options(case.body())
        assert refused.value.status == status
        return
    rows = map(json.loads, (fleet.directory / "tools.jsonl").read_text().splitlines())
    received = next(row["body"] for row in rows if row["key"] == case.name)
    sent = engine_request(read_engine_options(case.body()), [70], eos_token_ids=[1])
    guided = received["sampling_options"]["guided_decoding"]
    assert sent.sampling_options.guided_decoding == guided


def test_a_card_without_a_parser_needs_none():
    options = read_engine_options(Case("plain", True, {"tools": TOOLS}).body())
    assert parsers_of(options, {}) == NO_PARSERS
