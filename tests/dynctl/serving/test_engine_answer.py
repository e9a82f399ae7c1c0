"""Answers made from a worker's output: those of a real frontend, and the ends of an answer."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from dynctl.base.decode_errors import RequestError, WireError
from dynctl.serving.engines.answer import DONE, EngineAnswer
from dynctl.wire.dynamo.engine_output import EngineItem, EngineOutput, decode_engine_item
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from dynctl.wire.dynamo.request_plane import RawItem

CAPTURES = Path(__file__).parents[2] / "captures"
ROWS = [json.loads(line) for line in (CAPTURES / "dynamo-answers.jsonl").read_text().splitlines()]


@cache
def decoder() -> Any:
    tokenizer = Tokenizer.from_file(str(CAPTURES / "tiny-model" / "tokenizer.json"))

    class Decoder:
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text

    return Decoder()


def answer(prompt: list[int] | None = None, *, chat: bool = True, **fields: Any) -> EngineAnswer:
    body = {"model": "tiny", **fields}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    options = read_engine_options(body)
    request = engine_request(options, prompt or [70], eos_token_ids=[1])
    return EngineAnswer(options, request, decoder(), request_id="7", created=3)


def output(*ids: int, **fields: Any) -> EngineItem:
    return EngineItem(data=EngineOutput(token_ids=list(ids), **fields))


def events(sent: bytes) -> list[Any]:
    found = [each.removeprefix("data: ") for each in sent.decode().split("\n\n") if each]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


def plain(event: Any) -> Any:
    if isinstance(event, dict):
        event = {**event, **{name: "..." for name in ("id", "created") if name in event}}
    return event


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_the_answer_is_that_of_a_real_frontend(number: int) -> None:
    row = ROWS[number]
    prompt = [70] * (row["prompt_tokens"] - len(row["prompt_end"])) + row["prompt_end"]
    if row["status"] in (400, 501):
        with pytest.raises(RequestError) as refused:
            answer(prompt, chat=row["chat"], **row["fields"])
        assert refused.value.status == row["status"]
        return
    made = answer(prompt, chat=row["chat"], **row["fields"])
    sent = b""
    for chunk in row["chunks"]:
        try:
            item = decode_engine_item(RawItem(msgspec.json.encode({"data": chunk}), "json"))
        except WireError as error:
            sent += made.fail(str(error))
            break
        sent += made.feed(item)
    if row["raises"] is not None:
        sent += made.feed(EngineItem(event="error", comment=[row["raises"]]))
    sent += made.end()
    if not row["fields"].get("stream"):
        assert made.status == row["status"]
        if made.status == 200:
            assert plain(json.loads(sent)) == row["events"][0]
        return
    assert [plain(each) for each in events(sent)] == row["events"]


def test_ids_and_times_are_the_callers() -> None:
    made = answer(stream=True)
    [event] = events(made.feed(output(68)))
    assert (event["id"], event["created"]) == ("chatcmpl-7", 3)
    made = answer(chat=False)
    made.feed(output(68, finish_reason="stop"))
    assert json.loads(made.end())["id"] == "cmpl-7"


def test_a_lost_worker_ends_a_stream_with_an_error_and_shows_no_reason() -> None:
    made = answer(stream=True)
    sent = made.feed(output(68)) + made.fail("worker 7 at 10.0.0.1 is gone") + made.end()
    assert sent.endswith(DONE)
    assert b"10.0.0.1" not in sent
    assert made.failure == "worker 7 at 10.0.0.1 is gone"
    assert events(sent)[1] == {
        "error": {"message": "Internal server error", "type": "internal_server_error", "code": 500}
    }


def test_after_a_stop_the_worker_can_stop_and_its_output_does_not_count() -> None:
    made = answer(stream=True, stop="b", stream_options={"include_usage": True})
    sent = made.feed(output(68)) + made.feed(output(69))
    assert made.done
    sent += made.feed(output(70)) + made.end()
    *_, finish, usage, done = events(sent)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert done == "[DONE]"


def test_a_choice_that_was_not_requested_is_an_error() -> None:
    made = answer()
    made.feed(output(68, index=1))
    made.end()
    assert made.status == 500
    assert made.failure == "the worker sent choice 1 of 1"
