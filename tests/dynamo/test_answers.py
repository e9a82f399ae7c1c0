"""Our answers are those of Dynamo's frontend, for the same output of a worker.

300 requests, streamed and not: text in pieces of characters, stop strings across tokens, special
tokens, logprobs, several choices, token counts, errors of workers and wrong bodies.
"""

import json
from collections import Counter

import msgspec
import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from tests.dynamo.answers import ALLOWED, Case, Seen, cases, ours, parsed
from tests.dynamo.fleet import DynamoFleet, WorkerPlan

COUNT = 300
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


@pytest.fixture(scope="module")
def live():
    with DynamoFleet([WorkerPlan("scripted", kind="scripted")]) as fleet:
        yield Live(fleet)


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
    assert set(ALLOWED) == {"id", "created", "body of an error"}


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
