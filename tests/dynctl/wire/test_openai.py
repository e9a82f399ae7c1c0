"""OpenAI bodies: fields for routing, fields that pass through, errors."""

import contextlib
import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import RequestError
from dynctl.wire.json_body import decode_object
from dynctl.wire.nvext import KNOWN_KEYS, strip_for_engine
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    apply_headers,
    parse_chat_request,
    parse_completion_request,
    parse_embedding_request,
    reported_usage,
    without_reuse,
)

HELLO = {"role": "user", "content": "hello"}


def chat(**changes):
    return {"model": "m", "messages": [HELLO]} | changes


def completion(**changes):
    return {"model": "m", "prompt": "hello"} | changes


def read_chat(body):
    """A chat from its decoded body or its bytes, as a frontend reads it."""
    return parse_chat_request(decode_object(body, len(body)) if isinstance(body, bytes) else body)


def test_smallest_chat_request():
    body = chat()
    request = parse_chat_request(body)
    assert request == ChatRequest(body=body, model="m", messages=(HELLO,), template_args={})
    assert request.add_generation_prompt
    assert request.text_only
    assert (request.stream, request.n, request.max_tokens) == (False, 1, None)


def test_full_chat_request():
    tool = {"type": "function", "function": {"name": "f"}}
    body = chat(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            HELLO,
        ],
        tools=[tool],
        documents=[{"text": "d"}],
        chat_template_args={"a": 1, "b": 2},
        chat_template_kwargs={"b": 2, "enable_thinking": False},
        add_generation_prompt=False,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        max_completion_tokens=9,
        n=3,
        user="u",
        nvext={"annotations": ["query_instance_id:"]},
        novel={"kept": [1]},
    )
    request = parse_chat_request(body)
    assert request.body == body
    assert request.tools == (
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}},
    )
    assert request.documents == ({"text": "d"},)
    assert request.template_args == {"a": 1, "b": 2, "enable_thinking": False}
    assert not request.add_generation_prompt
    assert request.stream
    assert request.include_usage
    assert (request.max_tokens, request.n, request.user) == (9, 3, "u")
    assert request.text_only
    assert request.nvext.dry_run
    passed_on = strip_for_engine(request.body)
    assert passed_on["novel"] == {"kept": [1]}
    assert "nvext" not in passed_on


def test_null_fields_mean_not_given():
    names = ("tools", "documents", "chat_template_args", "chat_template_kwargs", "chat_template",
             "add_generation_prompt", "continue_final_message", "stream", "stream_options",
             "max_tokens", "max_completion_tokens", "n", "user", "nvext")  # fmt: skip
    body = chat(**dict.fromkeys(names))
    bare = parse_chat_request(chat())
    request = parse_chat_request(body)
    for name in ChatRequest.__dataclass_fields__.keys() - {"body"}:
        assert getattr(request, name) == getattr(bare, name), name


def test_images_are_detected():
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert not parse_chat_request(chat(messages=[{"role": "user", "content": parts}])).text_only


def test_continuing_a_message_needs_no_generation_prompt():
    request = parse_chat_request(chat(continue_final_message=True))
    assert request.continue_final_message
    assert not request.add_generation_prompt


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ("hello",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_prompt_forms(prompt, prompts):
    body = completion(prompt=prompt)
    request = parse_completion_request(body)
    assert request == CompletionRequest(body=body, model="m", prompts=prompts)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", "invalid_json", "the body is not JSON"),
        (b"{", "invalid_json", "the body is not JSON"),
        (
            b'{"top_p": 1e999}',
            "invalid_json",
            "the body has a number that is too large: expected at most 1.8e308",
        ),
        (
            b'{"n": 1' + b"0" * 5000 + b"}",
            "invalid_json",
            "the body has a number that is too large",
        ),
        (b"\xff\xfe", "invalid_json", "the body is not JSON"),
        (b'{"model": NaN}', "invalid_json", "the body is not JSON"),
        (b'"\\ud800"', "invalid_json", "the body is not JSON"),
        (b"[" * 100_000, "invalid_json", "the body is nested too deeply"),
        (b"[]", "wrong_type", "expected an object, got an array"),
        (b"null", "wrong_type", "expected an object, got null"),
        ({}, "missing_field", "messages: is required"),
        (chat(model=5), "wrong_type", "model: expected a string, got 5"),
        (chat(model=""), "out_of_range", "model: must not be empty"),
        (chat(model="m" * 513), "out_of_range", "model: expected at most 512 characters, got 513"),
        ({"model": "m"}, "missing_field", "messages: is required"),
        (chat(messages="hi"), "wrong_type", "messages: expected an array, got a string"),
        (chat(messages=[]), "out_of_range", "messages: must not be empty"),
        (chat(messages=["hi"]), "wrong_type", "messages[0]: expected an object, got a string"),
        (chat(messages=[HELLO, {}]), "missing_field", "messages[1].role: is required"),
        (
            chat(messages=[{"role": 1}]),
            "wrong_type",
            "messages[0].role: expected a string, got an integer",
        ),
        (
            chat(messages=[{"role": "user", "content": 5}]),
            "wrong_type",
            "messages[0].content: expected a string or an array of parts, got an integer",
        ),
        (
            chat(messages=[{"role": "user", "content": [5]}]),
            "wrong_type",
            "messages[0].content[0]: expected an object, got an integer",
        ),
        (
            chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]),
            "wrong_type",
            "messages[0].content[0].text: expected a string, got an integer",
        ),
        (chat(tools={}), "wrong_type", "tools: expected an array, got an object"),
        (chat(tools=[1]), "wrong_type", "tools[0]: expected an object, got an integer"),
        (
            chat(chat_template_kwargs=[]),
            "wrong_type",
            "chat_template_kwargs: expected an object, got an array",
        ),
        (
            chat(chat_template_args={"a": 1}, chat_template_kwargs={"a": 2}),
            "conflict",
            "chat_template_kwargs.a: has another value in chat_template_args",
        ),
        (
            chat(add_generation_prompt=True, continue_final_message=True),
            "conflict",
            "continue_final_message: cannot be true together with add_generation_prompt",
        ),
        (chat(chat_template=1), "wrong_type", "chat_template: expected a string, got 1"),
        (
            chat(add_generation_prompt="yes"),
            "wrong_type",
            "add_generation_prompt: expected true or false, got 'yes'",
        ),
        (chat(stream=1), "wrong_type", "stream: expected true or false, got 1"),
        (chat(stream_options=True), "wrong_type", "stream_options: expected an object, got true"),
        (
            chat(stream_options={"include_usage": 1}),
            "wrong_type",
            "stream_options.include_usage: expected true or false, got 1",
        ),
        (
            chat(max_tokens=-1),
            "out_of_range",
            "max_tokens: expected an integer from 0 to 4294967295, got -1",
        ),
        (
            chat(max_completion_tokens=1.5),
            "wrong_type",
            "max_completion_tokens: expected an integer, got 1.5",
        ),
        (chat(n=0), "out_of_range", "n: expected an integer from 1 to 16384, got 0"),
        (chat(user=[]), "wrong_type", "user: expected a string, got an array"),
        (chat(nvext=1), "wrong_type", "nvext: expected an object, got 1"),
    ],
)
def test_bad_chat_request(body, code, message):
    with pytest.raises(RequestError) as caught:
        read_chat(body)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: is required"),
        (5, "prompt: expected a string, token ids, or an array of either, got an integer"),
        ({}, "prompt: expected a string, token ids, or an array of either, got an object"),
        ([], "prompt: must not be empty"),
        ([[]], "prompt[0]: must not be empty"),
        ([1, "a"], "prompt[1]: expected a token id (an integer), got a string"),
        (["a", 1], "prompt[1]: expected an array, got an integer"),
        ([1.0], "prompt[0]: expected a token id (an integer), got a number"),
        ([True], "prompt[0]: expected a token id (an integer), got true"),
        ([[1], [-1]], "prompt[1][0]: expected a token id from 0 to 4294967295"),
    ],
)
def test_bad_prompt(prompt, message):
    with pytest.raises(RequestError) as caught:
        parse_completion_request(completion(prompt=prompt))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:,"}},
        {"type": "refusal", "refusal": "no"},
        {"type": "a type of later versions"},
        {"image_url": "https://example.com/a.png"},
        "a string, which vLLM takes too",
        {},
    ],
)
def test_parts_that_only_an_engine_reads_are_not_refused(part):
    request = parse_chat_request(chat(messages=[{"role": "user", "content": [part]}]))
    assert not request.text_only


EMBEDDED = "cache overlap not modelled: the prompt has embeddings"


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"prompt_embeds": "AAAA"}, ("",)),
        ({"prompt": None, "prompt_embeds": "AAAA"}, ("",)),
        ({"prompt": "", "prompt_embeds": ["AAAA"]}, ("",)),
        ({"prompt": [], "prompt_embeds": ["AAAA", "BBBB"]}, ("", "")),
        ({"prompt": "x", "prompt_embeds": "A" * 21_844}, ("", "x")),
        ({"prompt": [[1], [2]], "prompt_embeds": "AAAA"}, ("", (1,), (2,))),
    ],
)
def test_embeddings_of_a_prompt_are_not_modelled(fields, prompts):
    request = parse_completion_request({"model": "m", **fields})
    assert (request.prompts, request.not_modelled) == (prompts, EMBEDDED)
    assert request.unread_tokens == (2 if "x" in prompts else 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_embeds": 5}, "a base64 string or an array of base64 strings, got an integer"),
        ({"prompt_embeds": ["AAAA"] * 4097}, "prompt_embeds: expected at most 4096 entries"),
        ({"prompt_embeds": None}, "prompt: is required"),
    ],
)
def test_bad_embeddings_of_a_prompt(body, message):
    with pytest.raises(RequestError) as caught:
        parse_completion_request(body)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "prompts", "reason"),
    [
        ({"messages": [HELLO]}, (HELLO["content"],), "the engine renders the messages"),
        ({"input": [{"text": "x"}, {"image": "a"}]}, ("x", ""), "the input has more than text"),
    ],
)
def test_embeddings_of_what_only_an_engine_reads(body, prompts, reason):
    request = parse_embedding_request({"model": "m", "encoding_format": "bytes", **body})
    assert request.prompts == prompts
    assert request.not_modelled == f"cache overlap not modelled: {reason}"


NULLS = (
    *("stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "user", "stop"),
    *("tools", "nvext", "temperature", "chat_template_kwargs", "documents", "cache_salt"),
)


def test_null_is_not_given():
    for parse, body in ((parse_chat_request, chat()), (parse_completion_request, completion())):
        request = parse(body | dict.fromkeys(NULLS))
        assert request == replace(parse(body), body=request.body)
        options = {"include_usage": None, "continuous_usage_stats": None, "later": None}
        assert not parse(body | {"stream_options": options}).include_usage


def test_body_over_the_limit():
    body = json.dumps(chat()).encode()
    assert decode_object(body, len(body)) == chat()
    with pytest.raises(RequestError) as caught:
        decode_object(body, len(body) - 1)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
    assert str(len(body)) in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": "user", "content": {"secret": "sesame"}}]),
        chat(messages="sesame"),
        chat(messages=[{"role": "user", "content": [["sesame"]]}]),
        chat(tools=["sesame"]),
        b'{"messages": "sesame',
    ],
)
def test_errors_do_not_repeat_the_prompt(body):
    with pytest.raises(RequestError) as caught:
        read_chat(body)
    assert "sesame" not in str(caught.value)


def test_headers():
    request = apply_headers(
        parse_chat_request(chat()), {"X-Request-Id": "r1", "X-Worker-Instance-Id": "5"}
    )
    assert isinstance(request, ChatRequest)
    assert (request.request_id, request.nvext.decode_worker_id) == ("r1", 5)
    assert apply_headers(parse_completion_request(completion()), {}).request_id is None


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.just("query_instance_id:")
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
nvexts = st.dictionaries(
    st.sampled_from(KNOWN_KEYS),
    anything
    | st.dictionaries(
        st.sampled_from(["required_taints", "preferred_taints", "priority", "osl", "ttft_target"]),
        anything,
    ),
)
NAMES = ("model", "messages", "prompt", "tools", "documents", "chat_template_args", "n", "stream",
         "chat_template_kwargs", "stream_options", "max_tokens", "user", "nvext")  # fmt: skip
messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), anything), max_size=3
)
bodies = st.dictionaries(st.sampled_from(NAMES), anything | nvexts | messages)


@given(anything | bodies | bodies.map(lambda body: chat() | completion() | body))
def test_arbitrary_json_raises_only_request_errors(value):
    for parse in (parse_chat_request, parse_completion_request):
        with contextlib.suppress(RequestError):
            parse(decode_object(json.dumps(value).encode(), 1 << 20))
        if isinstance(value, dict):
            with contextlib.suppress(RequestError):
                parse(value)


@given(st.binary(max_size=40))
def test_arbitrary_bytes_raise_only_request_errors(body):
    with pytest.raises(RequestError):
        parse_chat_request(decode_object(body, len(body)))


@given(bodies.map(lambda body: chat() | body | {"n": 0}))
def test_error_body_is_json(body):
    with pytest.raises(RequestError) as caught:
        parse_chat_request(body)
    error = caught.value.body()["error"]
    assert json.loads(json.dumps(error)) == error
    assert error["message"]
    assert caught.value.status == 400


CACHED = b'"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": %b}}'


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (b"{" + CACHED % b"32" + b"}", (40, 32, None)),
        (b'data: {"usage":{"prompt_tokens":40}}\n\ndata: [DONE]\n\n', (40, None, None)),
        (CACHED % b"1" + b'} "usage":null', (None, None, None)),
        (b'"text":"\\"usage\\": \\"cached_tokens\\": 5"', (None, None, None)),
        (CACHED % b"9999999999", (40, None, None)),
        (CACHED % b"41", (40, None, None)),
        (CACHED % b"-1", (40, None, None)),
        (CACHED % b"NaN", (40, None, None)),
        (b'"usage":{"prompt_tokens":40,"prompt_tokens_details":null}', (40, None, None)),
        (b'{"usage":{"prompt_tokens":40,"completion_tokens":7}}', (40, None, 7)),
        (b"", (None, None, None)),
    ],
)
def test_the_last_usage_of_a_response_is_read(end: bytes, expected: tuple[int | None, ...]):
    assert reported_usage(end) == expected


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (
            {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
            {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {}}},
        ),
        (
            {
                "response": {
                    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}
                }
            },
            {"response": {"usage": {"input_tokens": 9, "input_tokens_details": {}}}},
        ),
        (
            {
                "message": {
                    "usage": {
                        "input_tokens": 1,
                        "cache_read_input_tokens": 8,
                        "cache_creation_input_tokens": 2,
                        "cache_creation": {"ephemeral_5m_input_tokens": 2},
                    }
                }
            },
            {"message": {"usage": {"input_tokens": 11}}},
        ),
        (
            {"usage": {"cached_tokens": 1}, "sglext": {"cached_tokens_details": {"device": 1}}},
            {"usage": {}, "sglext": {}},
        ),
    ],
)
def test_usage_without_what_was_reused(body, left):
    assert msgspec.json.decode(without_reuse(msgspec.json.encode(body))) == left


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"text":"\\"cached_tokens\\": 5"}],"usage":{"prompt_tokens":9}}',
        b'{"content":[{"type":"tool_use","input":{"cached_tokens":5}}]}',
        b'{"usage":null,"response":[],"message":"cached_tokens"}',
        b'["cached_tokens"]',
        b'"cached_tokens" is not JSON',
        b"[DONE]",
        b"",
    ],
)
def test_what_is_no_usage_stays(body):
    assert without_reuse(body) == body
