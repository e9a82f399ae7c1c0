"""Answers made from a worker's output: those of a real frontend, and the ends of an answer."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynctl.base.decode_errors import RequestError
from dynctl.serving.dynamo.answer import (
    AnswerError,
    EngineAnswer,
    Parsers,
    error_body,
    error_event,
    parsers_of,
)
from dynctl.wire.dynamo.engine_output import EngineOutput, TopLogprob
from dynctl.wire.dynamo.openai_options import (
    EngineOptions,
    engine_request,
    read_engine_options,
)
from tests.dynctl.serving.scripted import answered

CAPTURES = Path(__file__).parents[2] / "captures"
ROWS = [json.loads(line) for line in (CAPTURES / "dynamo-answers.jsonl").read_text().splitlines()]

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = [
    json.loads(line) for line in (CAPTURES / "dynamo-tool-calls.jsonl").read_text().splitlines()
]


@cache
def decoder() -> Any:
    tokenizer = Tokenizer.from_file(str(CAPTURES / "tiny-model" / "tokenizer.json"))

    class Decoder:
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text

    return Decoder()


def options(*, chat: bool = True, **fields: Any) -> EngineOptions:
    body = {"model": "tiny", **fields}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    return read_engine_options(body)


def answer(
    prompt: list[int] | None = None,
    *,
    chat: bool = True,
    card: dict[str, str] | None = None,
    **fields: Any,
) -> EngineAnswer:
    chosen = options(chat=chat, **fields)
    request = engine_request(chosen, prompt or [70], eos_token_ids=[1])
    parsers = parsers_of(chosen, card or {})
    return EngineAnswer(
        chosen,
        request,
        decoder(),
        request_id="7",
        created=3,
        parsers=parsers,
        new_call_id=lambda: "...",
    )


def output(*ids: int, **fields: Any) -> EngineOutput:
    return EngineOutput(token_ids=list(ids), **fields)


def fed(made: EngineAnswer, *outputs: EngineOutput) -> bytes:
    return b"".join(event for each in outputs for event in made.feed(each))


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
    streamed = row["fields"].get("stream", False)
    raises = row["raises"] is not None
    status, sent = answered(made, row["chunks"], streamed=streamed, raises=raises)
    assert status == row["status"]
    if streamed:
        assert [plain(each) for each in events(sent)] == row["events"]
    elif status == 200:
        assert plain(json.loads(sent)) == row["events"][0]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_tool_calls_are_those_of_a_real_frontend(number: int) -> None:
    row = CALLS[number]
    fields = {"model": row["model"], "tools": TOOLS, **row["fields"]}
    made = answer([70] * row["prompt_tokens"], card=row["card"], **fields)
    streamed = row["fields"].get("stream", False)
    status, sent = answered(made, row["chunks"], streamed=streamed)
    assert status == row["status"]
    found = events(sent) if streamed else [json.loads(sent)]
    assert [plain(each) for each in found] == row["events"]


@pytest.mark.parametrize("chat", [True, False])
def test_an_event_of_text_alone_has_the_bytes_of_any_other(chat: bool) -> None:
    outputs = [
        *(output(68 + number % 3) for number in range(6)),
        output(),
        output(70, text='"\u00e9\n'),
        output(70, text=""),
        output(71, finish_reason="length"),
    ]
    quick, slow = (answer(chat=chat, stream=True) for _ in range(2))
    assert quick._plain is not None
    slow._plain = None
    sent = [quick.feed(each) for each in outputs]
    assert sent == [slow.feed(each) for each in outputs]
    assert quick.end() == slow.end()
    assert quick.usage == slow.usage
    assert sum(map(len, sent)) > 6


def test_calls_get_ids_of_their_own() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>'
    chosen = options(tools=TOOLS)
    request = engine_request(chosen, [70], eos_token_ids=[1])
    parsers = Parsers(tool_calls="hermes")
    made = EngineAnswer(chosen, request, decoder(), request_id="7", created=3, parsers=parsers)
    made.feed(output(text=text, finish_reason="stop"))
    ids = [call["id"] for call in json.loads(made.body())["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("call-") for each in ids)


def test_a_last_call_that_the_length_of_the_answer_cut_off_does_not_count() -> None:
    call = "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for arguments, finish, count in (("{", "length", 1), ("{", "stop", 2), ("{}", "length", 2)):
        made = answer(card={"tool_call_parser": "kimi_k2"}, tools=TOOLS)
        text = call + call.replace("{}", arguments)
        fed(made, output(5, text=text, finish_reason=finish))
        (choice,) = json.loads(made.body())["choices"]
        assert len(choice["message"]["tool_calls"]) == count


def test_calls_beyond_the_bounds_end_the_answer() -> None:
    card = {"tool_call_parser": "hermes"}
    held = answer(tools=TOOLS, card=card, stream=True)
    held.feed(output(text="<tool_call>"))
    with pytest.raises(AnswerError, match=r"^wrote more than 262144 characters in one tool call$"):
        held.feed(output(text="a" * 262_144))
    many = answer(tools=TOOLS, card=card, stream=True)
    with pytest.raises(AnswerError, match=r"^made more than 512 tool calls$"):
        many.feed(output(text="<tool_call>[" + '{"name":"f"},' * 512 + '{"name":"f"}]</tool_call>'))


token_ids = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 320), max_size=4)
numbers = st.none() | st.lists(st.floats(), max_size=5)
tops = st.lists(
    st.lists(
        st.builds(
            TopLogprob,
            rank=st.integers(0, 9),
            token_id=st.integers(0, 400),
            token=st.none() | st.text(max_size=2),
            logprob=st.floats(),
        ),
        max_size=3,
    ),
    max_size=5,
)
outputs = st.builds(
    EngineOutput,
    token_ids=token_ids,
    tokens=st.none() | st.lists(st.none() | st.text(max_size=2), max_size=4),
    text=st.none() | st.text(max_size=3),
    log_probs=numbers,
    top_logprobs=st.none() | tops,
    finish_reason=st.none()
    | st.sampled_from(["stop", "eos", "length", "cancelled", "content_filter"])
    | st.just({"error": "x"}),
    index=st.none() | st.integers(0, 2),
)


@given(
    st.lists(outputs, max_size=6),
    st.booleans(),
    st.booleans(),
    st.sampled_from(
        [Parsers(), Parsers("qwen3"), Parsers("deepseek_r1", "hermes"), Parsers(None, "phi4")]
    ),
)
def test_any_output_makes_an_answer_or_a_named_error(
    sent: list[EngineOutput], chat: bool, stream: bool, parsers: Parsers
) -> None:
    chosen = options(chat=chat, stream=stream, n=2, stop=["a"], logprobs=True if chat else 2)
    request = engine_request(chosen, [70], eos_token_ids=[1])
    made = EngineAnswer(chosen, request, decoder(), request_id="7", created=3, parsers=parsers)
    try:
        found = b"".join(event for each in sent for event in made.feed(each))
        found = found + b"".join(made.end()) if stream else made.body()
    except AnswerError:
        return
    if stream:
        assert events(found)[-1] == "[DONE]"
    else:
        assert json.loads(found)["model"] == "tiny"


def test_ids_and_times_are_the_callers() -> None:
    [event] = events(fed(answer(stream=True), output(68)))
    assert (event["id"], event["created"]) == ("chatcmpl-7", 3)
    made = answer(chat=False)
    made.feed(output(68, finish_reason="stop"))
    assert json.loads(made.body())["id"] == "cmpl-7"


def test_after_a_stop_the_worker_can_stop_and_its_output_does_not_count() -> None:
    made = answer(stream=True, stop="b", stream_options={"include_usage": True})
    sent = fed(made, output(68), output(69))
    assert made.stopped
    sent += fed(made, output(70)) + b"".join(made.end())
    *_, finish, usage, done = events(sent)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert done == "[DONE]"
    assert made.token_ids == [68, 69]


def test_annotations_are_events_before_the_first_output() -> None:
    made = answer([5, 6], stream=True, nvext={"annotations": ["token_ids", "request_id", "x"]})
    *preamble, event = [each for each in fed(made, output(68)).decode().split("\n\n") if each]
    assert preamble == ['event: request_id\n: "7"', 'event: token_ids\n: "[5,6]"']
    assert event.startswith("data: ")
    assert b"event:" not in b"".join(made.end())
    assert b"event:" in b"".join(answer(stream=True, nvext={"annotations": ["token_ids"]}).end())


def test_errors_name_what_the_worker_did() -> None:
    with pytest.raises(AnswerError, match="sent choice 1, and 1 were requested"):
        answer().feed(output(68, index=1))
    with pytest.raises(AnswerError, match=r"^reported an error$"):
        answer().feed(output(finish_reason={"error": "no memory"}))


@pytest.mark.parametrize(
    ("fields", "runtime", "problem"),
    [
        (
            {"tools": TOOLS},
            {"tool_call_parser": "glm47"},
            "tool_call_parser glm47 of the model is not supported; supported: .*hermes",
        ),
        (
            {"tools": TOOLS, "logprobs": True},
            {"tool_call_parser": "hermes"},
            "logprobs with tool_call_parser hermes",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            {"tool_call_parser": "kimi_k2"},
            "a forced tool_choice with tool_call_parser kimi_k2",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            {"structural_tag_mode": "on"},
            "a forced tool_choice with structural_tag_mode on",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "logprobs": True},
            {},
            "logprobs with a forced tool_choice",
        ),
        ({}, {"reasoning_parser": "gpt_oss"}, "reasoning_parser gpt_oss"),
    ],
)
def test_parsers_that_are_not_supported_are_named(
    fields: dict[str, Any], runtime: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem) as error:
        parsers_of(options(**fields), runtime)
    assert error.value.status == 501


def test_parsers_count_only_where_they_would_read_the_answer() -> None:
    hermes = {"tool_call_parser": "hermes", "reasoning_parser": None}
    unknown = {"tool_call_parser": "unknown", "reasoning_parser": "gpt_oss"}
    assert parsers_of(options(tools=TOOLS, tool_choice="none"), hermes) == Parsers()
    assert parsers_of(options(), hermes) == Parsers()
    assert parsers_of(options(tools=TOOLS), {}) == Parsers()
    assert parsers_of(options(chat=False), unknown) == Parsers()
    assert parsers_of(options(), {"reasoning_parser": "qwen3"}) == Parsers("qwen3")
    both = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    assert parsers_of(options(tools=TOOLS), both) == Parsers("qwen3", "hermes")
    forced = options(tools=TOOLS, tool_choice="required")
    assert parsers_of(forced, {}) == Parsers(forced=True)
    assert parsers_of(forced, both) == Parsers("qwen3", "hermes", forced=True)


def test_reasoning_and_its_tokens_are_apart_from_the_answer() -> None:
    text = decoder()
    chosen, request = options(), engine_request(options(), [70], eos_token_ids=[1])
    made = EngineAnswer(
        chosen, request, text, request_id="7", created=3, parsers=Parsers("deepseek_r1")
    )
    made.feed(output(68, text="so</think>"))
    made.feed(output(69, text="yes", finish_reason="stop"))
    body = json.loads(made.body())
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "so")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_a_request_can_turn_some_parsers_off() -> None:
    off = options(chat_template_kwargs={"thinking": False})
    made = EngineAnswer(
        off,
        engine_request(off, [70], eos_token_ids=[1]),
        decoder(),
        request_id="7",
        created=3,
        parsers=Parsers("deepseek_r1"),
    )
    made.feed(output(69, text="yes", finish_reason="stop"))
    assert json.loads(made.body())["choices"][0]["message"]["content"] == "yes"


def test_an_invalid_request_is_told_from_a_failure() -> None:
    invalid = {"message": "Invalid request", "type": "invalid_request_error", "code": 400}
    assert json.loads(error_body(400)) == {"error": invalid}
    assert events(error_event(400)) == [{"error": invalid}]
    assert json.loads(error_body(503))["error"]["code"] == 500
    # What a worker has for the client is for invalid requests only.
    assert json.loads(error_body(400, "too long"))["error"] == invalid | {"message": "too long"}
    assert "too long" not in error_body(500, "too long").decode()


def test_a_stream_that_a_worker_ends_shows_no_reason() -> None:
    made = answer(stream=True)
    chunks = [{"token_ids": [68]}, {"token_ids": [], "finish_reason": {"error": "secret"}}]
    status, sent = answered(made, chunks, streamed=True)
    assert status == 200
    assert b"secret" not in sent
    assert events(sent)[1:] == [
        {
            "error": {
                "message": "Internal server error",
                "type": "internal_server_error",
                "code": 500,
            }
        },
        "[DONE]",
    ]


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
#: Cards, prompts and whole texts, with the answer, the reasoning and the number of calls.
BY_TEXT: list[tuple[dict[str, str], str, tuple[str | None, str | None, int]]] = [
    ({"reasoning_parser": "qwen3"}, "<think>so</think>yes", ("yes", "so", 0)),
    ({"reasoning_parser": "qwen3"}, "yes <thi", ("yes <thi", None, 0)),
    ({"reasoning_parser": "deepseek_r1"}, "<think>so</think>yes", ("yes", "so", 0)),
    ({"reasoning_parser": "step3"}, "so</thin", (None, "so</thin", 0)),
    (
        {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"},
        f"<think>maybe {CALL}</think>{CALL}\n",
        (None, f"maybe {CALL}", 1),
    ),
    (
        {"tool_call_parser": "hermes"},
        f"<think>maybe {CALL}</think>ok {CALL}\n {CALL}\n",
        (f"<think>maybe {CALL}</think>ok ", None, 2),
    ),
    ({"tool_call_parser": "hermes"}, f"{CALL}\n\nand more", ("\n\nand more", None, 1)),
]


def in_pieces(
    card: dict[str, str], pieces: list[str], *, stream: bool
) -> tuple[str | None, str | None, int, str]:
    """The content, the reasoning, the number of calls and the finish reason of an answer."""
    chosen = options(stream=stream, tools=TOOLS)
    request = engine_request(chosen, [70], eos_token_ids=[1])
    parsers = parsers_of(chosen, card, by_text=True)
    made = EngineAnswer(chosen, request, decoder(), request_id="7", created=3, parsers=parsers)
    outputs = [output(69, text=piece) for piece in pieces]
    sent = fed(made, *outputs, output(1, text="", finish_reason="stop"))
    if not stream:
        (choice,) = json.loads(made.body())["choices"]
        message, finish = choice["message"], choice["finish_reason"]
        calls = message.get("tool_calls", [])
        return message["content"], message.get("reasoning_content"), len(calls), finish
    choices = [each["choices"][0] for each in events(sent + b"".join(made.end())) if "id" in each]
    deltas = [each["delta"] for each in choices]
    content = "".join(each.get("content") or "" for each in deltas)
    reasoning = "".join(each.get("reasoning_content") or "" for each in deltas)
    calls = [call for each in deltas for call in each.get("tool_calls", [])]
    (finish,) = [each["finish_reason"] for each in choices if each["finish_reason"]]
    return content or None, reasoning or None, len(calls), finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("card", "text", "expected"), BY_TEXT)
@given(st.lists(st.integers(1, 9), max_size=40))
def test_an_answer_does_not_depend_on_its_cut_into_tokens(
    stream: bool,
    card: dict[str, str],
    text: str,
    expected: tuple[str | None, str | None, int],
    sizes: list[int],
) -> None:
    finish = "tool_calls" if expected[2] else "stop"
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    for cut in ([*pieces, rest], [text], list(text)):
        assert in_pieces(card, cut, stream=stream) == (*expected, finish)
