"""Our answers are those of Dynamo's frontend, for the same output of a worker.

300 requests, streamed and not: text in pieces of characters, stop strings across tokens, special
tokens, logprobs, several choices, token counts, errors of workers and wrong bodies.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial

import httpx
import msgspec
import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from tests.dynamo import forced_texts, tool_texts
from tests.dynamo.answers import ALLOWED, Case, Seen, cases, ours, parsed, tokenizer
from tests.dynamo.fleet import DynamoFleet, WorkerPlan
from tests.dynamo.tool_texts import CARDS
from tests.waiting import patience, until_now

COUNT = 300
THOUGHTS = [
    ("<think>hm ok</think>answer", 3, {}),
    ("<think>\nhm ok\n</think>\n\nanswer", 2, {}),
    ("<think>one</think>a<think>two</think>b</think>c", 50, {}),
    ("no thoughts <thin", 4, {}),
    ("<think>unfinished", 1, {}),
    ("<think>hm</think>stop here", 3, {"stop": "here"}),
    ("<think>off</think>x", 4, {"chat_template_kwargs": {"enable_thinking": False}}),
]
_PLACED = ("dp_rank", "prefill_dp_rank", "prefill_worker_id", "decode_worker_id")
"""Fields that a router fills in after the request was made."""


class Live:
    """A fleet with a scripted worker, and the answers of its frontend, each sent once."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.record = fleet.directory / "scripted.jsonl"

    def answer(self, case: Case) -> Seen:
        body = case.body()
        status, text = self.fleet.frontend._raw("POST", case.path, body, 30)
        return parsed(status, body.get("stream") is True, text)

    def received(self) -> dict[str, dict]:
        """What the worker received, by the name of the case."""
        rows = [json.loads(line) for line in self.record.read_text().splitlines()]
        return {row["key"]: row["body"] for row in rows}


def scripted(name: str, card: str) -> WorkerPlan:
    """A worker of a model of its own, with these fields in its card."""
    args = ("--component", name, "--model", f"{name}={card}")
    return WorkerPlan(name, kind="scripted", args=args, system_server=False, late=True)


@pytest.fixture(scope="module")
def live():
    plans = [
        WorkerPlan("scripted", kind="scripted"),
        scripted("think", json.dumps(CARDS["think"])),
        scripted("tools", '{"tool_call_parser": "glm47"}'),
        scripted("harmony", '{"reasoning_parser": "gpt_oss"}'),
        scripted("kimi", '{"tool_call_parser": "kimi_k2"}'),
    ]
    with DynamoFleet(plans) as fleet:
        models = ("think", "tools", "harmony", "kimi")
        for model in models:
            fleet.start_worker(model, wait=False)
        for model in models:
            fleet.wait_until(partial(listed, fleet.frontend.url, model), model, seconds=60)
        yield Live(fleet)


def listed(url: str, model: str) -> bool:
    models = httpx.get(f"{url}/v1/models", timeout=patience(10)).json()["data"]
    return model in [each["id"] for each in models]


@pytest.fixture(scope="module")
def served(live):
    """The address of our frontend, on the same workers."""
    command = [sys.executable, "-m", "dynctl", "--discovery", "file", "--dyn-namespace", "dynamo"]
    command += ["serve", "frontend", "--http-port", "0", "--announce"]
    command += ["--answer-parsing", "dynamo-1.6"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN", "ETCD", "NATS"))}
    log = (live.fleet.directory / "ours.log").open("wb")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, env=clean | live.fleet.reached_by
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.wait(5)
        url = json.loads(line)["url"]
        for model in ("tiny", "think", "tools", "harmony", "kimi"):
            until_now(partial(listed, url, model), 60.0)
        yield url
        process.terminate()
        assert process.wait(patience(15)) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


def send(url: str, path: str, body: dict) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=patience(30))


@pytest.fixture(scope="module")
def compared(live):
    """Each case, Dynamo's answer, and what its worker received."""
    answers = [(case, live.answer(case)) for case in cases(COUNT)]
    received = live.received()
    return [(case, answer, received.get(case.name)) for case, answer in answers]


def test_answers_are_equal(compared, finding):
    different = []
    for case, theirs, received in compared:
        found = ours(case, received["token_ids"] if received else [5])
        if found != theirs:
            different.append(f"{case}\nours   {found}\ntheirs {theirs}")
    statuses = Counter(theirs.status for _, theirs, _ in compared)
    finding(f"{COUNT - len(different)} of {COUNT} answers equal; statuses {dict(statuses)}")
    assert not different, "\n\n".join(different[:3])
    assert set(statuses) == {200, 400, 500, 501}
    assert len(ALLOWED) == 5


def test_our_frontend_on_the_same_worker_gives_the_same_answers(compared, served, finding):
    different, errors = [], []
    for case, theirs, _ in compared:
        body = case.body()
        reply = send(served, case.path, body)
        found = parsed(reply.status_code, body.get("stream") is True, reply.text)
        if found != theirs:
            different.append(f"{case}\nours   {found}\ntheirs {theirs}\n{reply.text[:500]}")
        if reply.status_code != 200:
            errors.append(reply.json()["error"])
    finding(f"{COUNT - len(different)} of {COUNT} answers of serve frontend equal")
    assert not different, "\n\n".join(different[:3])
    assert all(error["message"] and error["code"] and error["type"] for error in errors)
    assert not any("Traceback" in error["message"] for error in errors)


@pytest.mark.parametrize("kind", ["RuntimeError", "TypeError", "ValueError", "KeyError"])
def test_exceptions_of_a_worker_have_equal_status_and_are_not_shown(live, served, kind):
    one = [{"token_ids": [70]}]
    status = 400 if kind in ("TypeError", "ValueError") else 500
    for fields in ({}, {"stream": True}):
        case = Case(f"raises {kind}", False, fields, one, raises="the secret", kind=kind)
        reply = send(served, case.path, case.body())
        assert parsed(reply.status_code, bool(fields), reply.text) == live.answer(case)
        assert "secret" not in reply.text
        if not fields:
            assert reply.status_code == status
    at_once = Case(f"{kind} at once", False, {"stream": True}, raises="the secret", kind=kind)
    reply = send(served, at_once.path, at_once.body())
    assert (reply.status_code, "secret" in reply.text) == (status, False)


def test_what_a_worker_has_for_the_client_of_an_invalid_request_is_shown(live, served):
    """Dynamo's InvalidArgument has a public text, as an engine's reason for a refusal."""
    text = "temperature: expected a number below 3"
    for chunks in ([], [{"token_ids": [70]}]):
        for fields in ({}, {"stream": True}):
            case = Case("invalid", False, fields, chunks, raises=text, kind="InvalidArgument")
            theirs = live.fleet.frontend._raw("POST", case.path, case.body(), 30)
            ours = send(served, case.path, case.body())
            assert text in theirs[1]
            assert text in ours.text
            if not fields:
                assert (ours.status_code, theirs[0]) == (400, 400)
                assert ours.json()["error"]["message"] == json.loads(theirs[1])["message"]
            else:
                assert ours.status_code == (200 if chunks else 400)


@pytest.mark.parametrize("number", range(len(THOUGHTS)))
def test_reasoning_is_separated_equally(live, served, number):
    text, size, fields = THOUGHTS[number]
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    pieces = [{"token_ids": ids[at : at + size]} for at in range(0, len(ids), size)]
    chunks = [*pieces, {"token_ids": [], "finish_reason": "stop"}]
    for streamed in (True, False):
        more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        case = Case(f"thought {number}", True, {**fields, **more}, chunks, model="think")
        reply = send(served, case.path, case.body())
        assert parsed(reply.status_code, streamed, reply.text) == live.answer(case)


def test_tool_calls_are_found_equally(live, served):
    made = tool_texts.cases("think", 20) + forced_texts.cases("think", 20)
    for case in made:
        body = case.body()
        reply = send(served, case.path, body)
        found = parsed(reply.status_code, body.get("stream") is True, reply.text)
        assert found == live.answer(case), case


def test_what_cards_and_bodies_ask_for_and_we_do_not_support_is_named(served):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    asked = {
        "tool_call_parser glm47": Case("a", True, {"tools": tools}, model="tools"),
        "a forced tool_choice with tool_call_parser kimi_k2": Case(
            "b", True, {"tools": tools, "tool_choice": "required"}, model="kimi"
        ),
        "logprobs with tool_call_parser": Case(
            "f", True, {"tools": tools, "logprobs": True}, model="think"
        ),
        "reasoning_parser gpt_oss": Case("c", True, {}, model="harmony"),
        "a batch is not supported": Case("d", False, {"prompt": ["a", "b"]}),
    }
    for what, case in asked.items():
        reply = send(served, case.path, case.body())
        assert (reply.status_code, what in reply.json()["error"]["message"]) == (501, True), what
    plain = Case("e", True, {}, [{"token_ids": [70], "finish_reason": "stop"}], model="tools")
    assert send(served, plain.path, plain.body()).status_code == 200


def test_requests_to_workers_are_equal(compared):
    checked = 0
    for case, _, received in compared:
        if received is None:
            continue
        options = read_engine_options(case.body())
        built = engine_request(options, received["token_ids"], eos_token_ids=[1])
        assert _request(msgspec.to_builtins(built)) == _request(received), case
        checked += 1
    assert checked > COUNT // 2


def test_what_dynamo_refuses_is_refused_with_the_same_status(compared):
    for case, theirs, received in compared:
        if theirs.status in (400, 501):
            assert received is None
            with pytest.raises(RequestError) as error:
                read_engine_options(case.body())
            assert error.value.status == theirs.status, case


def _request(body: dict) -> dict:
    """A request without the card's checksum and the router's choice."""
    routing = body.get("routing") or {}
    plain = {**body, "routing": {n: v for n, v in routing.items() if n not in _PLACED}}
    return {name: value for name, value in plain.items() if name != "mdc_sum"}
