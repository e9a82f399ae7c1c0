"""Bodies of the Messages and the Responses API as the chats that vLLM 0.32 makes of them."""

from typing import Any

import pytest

from dynctl.base.decode_errors import RequestError
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.responses import parse_responses_request

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA},
}


def messages(**fields: Any) -> Any:
    return parse_messages_request({"model": "m", "max_tokens": 5, "messages": [USER], **fields})


def responses(**fields: Any) -> Any:
    return parse_responses_request({"model": "m", "input": "hi", **fields})


def test_a_text_is_one_message_of_the_user() -> None:
    assert messages().messages == responses().messages == (USER,)
    assert (messages().max_tokens, responses(max_output_tokens=7).max_tokens) == (5, 7)
    assert messages().not_modelled is responses().not_modelled is None


@pytest.mark.parametrize(
    "system",
    [
        "be brief",
        [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        # A text with a different hash in each request is no part of the prompt.
        [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "be brief"},
        ],
    ],
    ids=["text", "blocks", "billing"],
)
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    first = {"role": "system", "content": "be brief"}
    assert messages(system=system).messages == (first, USER)
    assert responses(instructions="be brief").messages == (first, USER)


def test_blocks_are_one_text_or_parts() -> None:
    one, two = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    assert messages(messages=[{"role": "user", "content": [one]}]).messages[0]["content"] == "a"
    both = messages(messages=[{"role": "user", "content": [one, two]}])
    assert both.messages[0]["content"] == [one, two]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    same = responses(input=[{"role": "user", "content": parts}])
    assert same.messages[0]["content"] == [one, two]


def test_calls_of_tools_and_their_results() -> None:
    asked = {"role": "assistant", "content": "let me see", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    found = messages(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "42"}],
            },
        ],
        tools=[{"name": "f", "description": "d", "input_schema": SCHEMA}],
    )
    assert found.messages == (USER, asked, result)
    assert found.tools == (FUNCTION,)
    same = responses(
        input=[
            USER,
            {"role": "assistant", "content": "let me see"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ],
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}],
    )
    assert same.messages == found.messages
    assert same.tools == found.tools
    assert found.not_modelled is same.not_modelled is None


def test_effort_goes_to_the_template() -> None:
    wanted = {"reasoning_effort": "low", "enable_thinking": True}
    assert messages(output_config={"effort": "low"}).template_args == wanted
    assert responses(reasoning={"effort": "low"}).template_args == wanted
    assert responses(reasoning={"effort": "none"}).template_args["enable_thinking"] is False


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [USER, {"role": "system", "content": "now"}]}, "system messages"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, USER]},
            "thinking",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "tool_use"),
    ],
)
def test_messages_that_only_an_engine_can_render_are_named(fields: Any, named: str) -> None:
    assert named in messages(**fields).not_modelled


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "more than text"),
        ({"input": [{"type": "reasoning", "summary": []}, USER]}, "reasoning"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"role": "assistant", "content": "and", "status": "incomplete"}]}, "continued"),
        ({"prompt": {"id": "p"}}, "stored prompt"),
    ],
)
def test_responses_that_only_an_engine_can_render_are_named(fields: Any, named: str) -> None:
    assert named in responses(**fields).not_modelled


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "background"])
def test_responses_are_not_kept(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        responses(**{field: "resp_1"})
    assert (caught.value.status, caught.value.field) == (400, field)


@pytest.mark.parametrize(
    ("parse", "body", "field"),
    [
        (parse_messages_request, {"messages": []}, "messages"),
        (parse_messages_request, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (parse_messages_request, {"messages": [{"role": "user", "content": 7}]}, "messages"),
        (parse_responses_request, {"input": 7}, "input"),
        (parse_responses_request, {}, "input"),
        (parse_responses_request, {"input": "x", "tools": "all"}, "tools"),
    ],
)
def test_a_wrong_body_names_its_field_and_never_its_text(
    parse: Any, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert str(caught.value.field).startswith(field)
