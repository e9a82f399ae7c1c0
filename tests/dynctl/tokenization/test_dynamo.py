"""Chats as Dynamo 1.6.1 passes them to a template, observed with one that prints them."""

import json
import shutil
from pathlib import Path

import pytest

from dynctl.tokenization import PromptError, as_dynamo_reads, encode_as_dynamo, load_tokenizer

MODEL = Path(__file__).parents[2] / "captures" / "tiny-model"
PRINTS = "{{ messages | tojson }}{{ tools | tojson }}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
CALL = {"function": {"arguments": '{"b": 1.0}', "name": "now"}, "id": "1", "type": "function"}


@pytest.fixture
def model(tmp_path):
    def make(template):
        directory = tmp_path / "model"
        shutil.copytree(MODEL, directory)
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        settings.pop("chat_template")
        if template is not None:
            settings["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_tokenizer(directory)

    return make


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        (
            {"content": "hi", "role": "user", "extra": 1, "name": "ada"},
            '{"role": "user", "content": "hi", "name": "ada"}',
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]},
            '{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", '
            '"function": {"name": "now", "arguments": {"b": 1.0}}}]}',
        ),
        (
            {"tool_call_id": "1", "role": "tool", "content": [{"type": "text", "text": "q"}] * 2},
            '{"role": "tool", "content": "q\\nq", "tool_call_id": "1"}',
        ),
        (
            {"role": "assistant", "content": "b", "refusal": "no", "reasoning_content": "why"},
            '{"role": "assistant", "content": "<think>why</think>b", "refusal": "no"}',
        ),
        (
            {"role": "assistant", "content": "b", "reasoning": "why"},
            '{"role": "assistant", "content": "<think>why</think>b"}',
        ),
        (
            {"role": "assistant", "content": "b", "reasoning_content": ["x", "y"]},
            '{"role": "assistant", "content": "<think>x</think><think>y</think>b"}',
        ),
        (
            {"role": "assistant", "content": "b", "reasoning_content": ""},
            '{"role": "assistant", "content": "b", "reasoning_content": ""}',
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": []},
            '{"role": "assistant", "content": "x", "tool_calls": []}',
        ),
    ],
)
def test_messages(model, message, seen):
    tokenizer = model(PRINTS)
    chat = as_dynamo_reads(tokenizer, [message])
    assert tokenizer.render_chat(chat.messages) == f"[{seen}]null"


def test_a_template_with_reasoning_gets_it(model):
    tokenizer = model(PRINTS + "{# reasoning_content #}")
    message = {"role": "assistant", "content": "b", "reasoning": "rr"}
    assert as_dynamo_reads(tokenizer, [message]).messages == [
        {"role": "assistant", "content": "b", "reasoning_content": "rr"}
    ]


def test_a_template_of_parts_alone_gets_parts(model):
    tokenizer = model(PARTS)
    messages = [
        user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]),
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        user("c"),
    ]
    chat = as_dynamo_reads(tokenizer, messages)
    assert tokenizer.render_chat(chat.messages) == "one|two|<think>why</think>|b|c|"


@pytest.mark.parametrize(
    ("tool", "seen"),
    [
        ({"function": {"name": "now"}}, '{"name": "now", "description": ""}'),
        (
            {"function": {"parameters": None, "name": "n", "description": None}},
            '{"name": "n", "description": ""}',
        ),
        (
            {"function": {"name": "m", "parameters": {}}},
            '{"name": "m", "parameters": {"type": "object", "properties": {}}, "description": ""}',
        ),
        (
            {"function": {"strict": False, "extra": 1, "parameters": {"z": 1}, "name": "x"}},
            '{"name": "x", "parameters": {"z": 1, "type": "object", "properties": {}}, '
            '"strict": false, "description": ""}',
        ),
        (
            {"function": {"description": "d", "parameters": {"properties": {}}, "name": "x"}},
            '{"name": "x", "description": "d", "parameters": {"properties": {}, "type": "object"}}',
        ),
    ],
)
def test_tools(model, tool, seen):
    tokenizer = model(PRINTS)
    given = {**tool, "type": "function", "more": 2}
    chat = as_dynamo_reads(tokenizer, [user("a")], [given])
    expected = f'[{{"role": "user", "content": "a"}}][{{"type": "function", "function": {seen}}}]'
    assert tokenizer.render_chat(chat.messages, tools=chat.tools) == expected


def test_tool_choice_none_hides_the_tools(model):
    tokenizer = model(PRINTS)
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert as_dynamo_reads(tokenizer, [user("a")], tools, tool_choice="none").tools is None
    assert as_dynamo_reads(tokenizer, [user("a")], tools, tool_choice="auto").tools is not None


def test_the_input_is_not_changed(model):
    tokenizer = model(PRINTS)
    message = {"role": "assistant", "reasoning": "r", "tool_calls": [dict(CALL)], "x": 1}
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    before = json.dumps([message, tool])
    as_dynamo_reads(tokenizer, [message], [tool])
    assert json.dumps([message, tool]) == before


def test_invalid_values_pass_through(model):
    tokenizer = model(PRINTS)
    message = {"role": "assistant", "content": 7, "reasoning": 5, "tool_calls": ["x", {}]}
    chat = as_dynamo_reads(tokenizer, [message], [{"type": "custom", "custom": {}}])
    assert chat.messages == [
        {"role": "assistant", "content": 7, "reasoning_content": 5, "tool_calls": ["x", {}]}
    ]
    assert chat.tools == [{"type": "custom", "custom": {}}]


def test_a_model_without_a_template_is_an_error(model):
    with pytest.raises(PromptError, match="no default chat template"):
        as_dynamo_reads(model(None), [user("a")])


# -- the fields of a body --------------------------------------------------------------------------

ARGS = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}|{{ add_generation_prompt }}"
    "|{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}|{{ x }}"
)


def rendered(tokenizer, *messages, **fields):
    chat = list(messages) or [user("hi")]
    return tokenizer.decode(encode_as_dynamo(tokenizer, chat, **fields), False)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "[hi]|True||||"),
        ({"add_generation_prompt": False}, "[hi]|False||||"),
        ({"template_args": {"x": 1}}, "[hi]|True||||1"),
        # What Dynamo sets itself is not replaced.
        ({"template_args": {"add_generation_prompt": False, "messages": []}}, "[hi]|True||||"),
        ({"template_args": {"enable_thinking": False}}, "[hi]|True||False|False|"),
        (
            {"template_args": {"thinking": False, "enable_thinking": True}},
            "[hi]|True||False|False|",
        ),
        ({"template_args": {"thinking": "yes"}}, "[hi]|True||True|True|"),
        ({"template_args": {"reasoning_effort": "none"}}, "[hi]|True|none|False|False|"),
        ({"reasoning_effort": "high"}, "[hi]|True|high|True|True|"),
        (
            {"reasoning_effort": "high", "template_args": {"reasoning_effort": "low"}},
            "[hi]|True|high|True|True|",
        ),
        (
            {"reasoning_effort": "high", "thinking": {"type": "disabled"}},
            "[hi]|True|high|False|False|",
        ),
        ({"thinking": {"type": "adaptive"}}, "[hi]|True||||"),
        ({"thinking": True}, "[hi]|True||True|True|"),
    ],
)
def test_arguments_of_the_template(model, fields, seen):
    assert rendered(model(ARGS), **fields) == seen


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("so I", "[hi][so I"),
        ("  so I ", "[hi][  so I "),
        ("hi", "[hi][hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "[hi][a\nb"),
    ],
)
def test_the_final_message_is_continued(model, content, seen):
    last = {"role": "assistant", "content": content}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(model(ARGS), user("hi"), last, **fields) == seen


def test_what_dynamo_refuses_is_an_error(model):
    tokenizer = model(ARGS)
    with pytest.raises(PromptError, match="unless add_generation_prompt is false"):
        rendered(tokenizer, continue_final_message=True)
    empty = {"role": "assistant", "content": " "}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(PromptError, match="not in the rendered prompt"):
        rendered(tokenizer, user("hi"), empty, **fields)
