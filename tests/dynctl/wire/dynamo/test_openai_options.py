"""Options of a body: what is refused, and the request that a worker receives."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.base.decode_errors import RequestError
from dynctl.wire.dynamo import openai_options
from dynctl.wire.dynamo.engine_request import EngineRequest
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from dynctl.wire.dynamo.request_plane import decode_body, encode_body


def function(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


X = {"type": "object", "properties": {"x": {"type": "integer"}}}
SHARED = {"type": "object", "$defs": {"A": {"type": "string"}}}
OTHER = {"type": "object", "$defs": {"A": {"type": "number"}}}
FORCED: dict[str, Any] = {"tools": [function("f", X)], "tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "f"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "secret"}], **fields}


def request(**fields: Any) -> EngineRequest:
    return engine_request(read_engine_options(body(**fields)), [5, 6], eos_token_ids=[1, 2])


@pytest.mark.parametrize(
    ("fields", "field", "status"),
    [
        ({"temperature": 2.5}, "temperature", 400),
        ({"stop": ["a", ""]}, "stop[1]", 400),
        ({"stop": [5, "a"]}, "stop[1]", 400),
        ({"best_of": 2}, "best_of", 400),
        ({"stream_options": {}}, "stream_options", 400),
        ({"n": 2, "temperature": 0}, "temperature", 400),
        ({"n": 2, "nvext": {"extra_fields": ["completion_token_ids"]}}, "nvext.extra_fields", 400),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", 400),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_args.chat_template", 400),
        ({"functions": []}, "functions", 501),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", 400),
        ({"tool_choice": "required"}, "tool_choice", 400),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", 400),
        ({**FORCED, "tool_choice": {"function": {"name": "f"}}}, "tool_choice", 400),
        ({**FORCED, "guided_regex": "a"}, "guided_regex", 400),
        ({**FORCED, "guided_json": {}, "guided_choice": ["a"]}, "guided_choice", 400),
        ({"tools": [function("f", True)]}, "tools[0].function.parameters", 400),
        (
            {**FORCED, "tools": [function("f", {"$defs": [1]})]},
            "tools[0].function.parameters.$defs",
            400,
        ),
        (
            {**FORCED, "tools": [function("f", SHARED), function("g", OTHER)]},
            "tools[1].function.parameters.$defs",
            400,
        ),
        ({"model": " "}, "model", 400),
        ({"add_generation_promptt": True}, "add_generation_promptt", 400),
    ],
)
def test_what_a_frontend_refuses_is_refused_by_name(
    fields: dict[str, Any], field: str, status: int
) -> None:
    with pytest.raises(RequestError) as error:
        read_engine_options(body(**fields))
    assert (error.value.field, error.value.status) == (field, status)
    assert "secret" not in str(error.value)


names = st.sampled_from(
    sorted(
        {
            *openai_options._KNOWN[openai_options._ChatBody],
            *openai_options._KNOWN[openai_options._CompletionBody],
            "unknown",
        }
    )
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | st.sampled_from(["type", "function", "name", "5"]), inner)
    ),
    max_leaves=6,
)


@given(st.dictionaries(names, junk, max_size=4), st.booleans())
def test_any_body_is_read_or_refused(fields: dict[str, Any], chat: bool) -> None:
    plain = body() if chat else {"model": "m", "prompt": "secret"}
    try:
        options = read_engine_options(plain | fields)
    except RequestError as error:
        if error.status not in (400, 501):
            raise
        return
    built = engine_request(options, [5], eos_token_ids=[1])
    decode_body(encode_body(built, "msgpack"), "msgpack", EngineRequest)


def test_weights_beyond_32_bits_are_the_largest() -> None:
    taints = {"preferred_taints": {"a": 1e300, "b": -1e300}}
    constraints = request(nvext={"routing_constraints": taints}).routing
    assert constraints is not None
    assert constraints.routing_constraints == {
        "preferred_taints": {"a": 3.4028234663852886e38, "b": -3.4028234663852886e38}
    }


def test_prompts_that_are_empty_are_refused() -> None:
    prompts: tuple[Any, ...] = ("", [], [""], [[]], ["a", ""])
    for prompt in prompts:
        with pytest.raises(RequestError):
            read_engine_options({"model": "m", "prompt": prompt})


def test_ignoring_the_end_of_the_model_removes_all_stops() -> None:
    stop = request(ignore_eos=True, stop="x", stop_token_ids=[7]).stop_conditions
    assert (stop.stop, stop.stop_token_ids, stop.stop_token_ids_hidden) == (None, None, None)
    assert request(ignore_eos=True).eos_token_ids == []
    assert request(ignore_eos=False).stop_conditions.stop_token_ids_hidden == [1, 2]


def test_stop_may_be_token_ids() -> None:
    stop = request(stop=[7], stop_token_ids=[8]).stop_conditions
    assert (stop.stop, stop.stop_token_ids) == (None, [8, 7])


def test_numbers_have_the_precision_that_workers_receive() -> None:
    assert request(temperature=0.7).sampling_options.temperature == 0.699999988079071


def test_a_forced_call_constrains_the_output() -> None:
    def guided(**fields: Any) -> Any:
        return request(**{**FORCED, **fields}).sampling_options.guided_decoding

    def call(name: str, parameters: Any) -> dict[str, Any]:
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        return {"properties": properties, "required": ["name", "parameters"]}

    calls = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "anyOf": [call("f", X)]},
    }
    assert guided() == {"json": calls}
    assert guided(parallel_tool_calls=False) == {"json": {**calls, "maxItems": 1}}
    assert guided(tool_choice=NAMED, parallel_tool_calls=False) == {"json": X}
    assert guided(response_format={"type": "json_object"}) == {"json": calls}
    assert guided(guided_choice=[], guided_decoding_backend="any") == {"json": calls}
    assert guided(tool_choice="auto", guided_regex="a") == {"regex": "a"}
    found = guided(tools=[function("f", SHARED), function("g", {**SHARED, "x": 1})])
    assert found["json"]["$defs"] == SHARED["$defs"]
    assert found["json"]["items"]["anyOf"] == [
        call("f", {"type": "object"}),
        call("g", {"type": "object", "x": 1}),
    ]
    bare = {"type": "function", "function": {"name": "f"}}
    assert guided(tools=[bare], tool_choice=NAMED) == {"json": {"type": "object", "properties": {}}}


def test_a_response_format_constrains_the_output() -> None:
    def guided(**fields: Any) -> Any:
        return request(**fields).sampling_options.guided_decoding

    assert guided(response_format={"type": "json_object"}) == {"json": {"type": "object"}}
    assert guided(response_format={"type": "text"}) is None
    assert guided(guided_regex="a+", guided_choice=[]) == {"regex": "a+"}


def test_controls_of_nvext_reach_the_worker() -> None:
    built = request(
        nvext={
            "agent_hints": {"priority": -3, "osl": 7, "latency_sensitivity": 1.5},
            "routing_constraints": {"preferred_taints": {"a": 0.85}},
            "max_thinking_tokens": 5,
            "annotations": ["x"],
            "cache_salt": "s",
        },
        cache_salt="t",
    )
    assert msgspec.to_builtins(built.routing) == {
        "expected_output_tokens": 7,
        "cache_salt": "s",
        "priority_jump": 0.0,
        "priority": -3,
        "routing_constraints": {"preferred_taints": {"a": 0.8500000238418579}},
    }
    assert built.stop_conditions.max_thinking_tokens == 5
    assert built.annotations == ["x"]
    assert built.extra_args == {"nvext": {"cache_salt": "s"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: expected a number from 0 to 2, got 3"),
        ({"temperature": -0.5}, "temperature: expected a number from 0 to 2, got -0.5"),
        ({"top_p": 0}, "top_p: expected a number above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top_p: expected a number above 0 and at most 1, got 1.5"),
        ({"min_p": 2}, "min_p: expected a number from 0 to 1, got 2"),
        ({"presence_penalty": 5}, "presence_penalty: expected a number from -2 to 2, got 5"),
        ({"frequency_penalty": -3}, "frequency_penalty: expected a number from -2 to 2, got -3"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty: expected a number above 0 and at most 2, got 0",
        ),
        ({"top_k": -2}, "top_k: expected an integer from -1 to 2147483647, got -2"),
        ({"top_logprobs": 50}, "top_logprobs: expected an integer from 0 to 20, got 50"),
        ({"n": 0}, "n: expected an integer from 1 to 128, got 0"),
        ({"logit_bias": {"1": 101}}, "logit_bias: expected numbers from -100 to 100, got 101"),
    ],
)
def test_a_number_outside_its_range_names_the_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        read_engine_options(body(**fields))
    assert str(error.value) == message


def test_null_in_stream_options_is_not_given() -> None:
    null = {"include_usage": None, "continuous_usage_stats": None}
    options = read_engine_options(body(stream=True, stream_options=null))
    assert (options.include_usage, options.continuous_usage) == (False, False)
    options = read_engine_options(body(stream=True, stream_options={**null, "include_usage": True}))
    assert (options.include_usage, options.continuous_usage) == (True, False)
