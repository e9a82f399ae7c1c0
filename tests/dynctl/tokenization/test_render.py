"""Messages rendered with a chat template."""

import json
from datetime import UTC, datetime

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynctl.tokenization import (
    DEMO_MODEL_DIR,
    ChatTemplate,
    PromptError,
    UnsupportedContentError,
    load_tokenizer,
)

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "<now> & 'here'", "parameters": {}},
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}


@pytest.fixture(scope="module", params=[False, True], ids=["metered", "trusted"])
def demo(request):
    return load_tokenizer(DEMO_MODEL_DIR, trust_template=request.param)


def user(content) -> dict:
    return {"role": "user", "content": content}


def test_one_turn(demo):
    assert (
        demo.render_chat([user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_several_turns_without_generation_prompt(demo):
    messages = [
        {"role": "system", "content": "Be brief."},
        user("hi"),
        {"role": "assistant", "content": "hello"},
        user("bye"),
    ]
    assert demo.render_chat(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n"
    )


def test_tools_calls_and_results(demo):
    messages = [
        user("weather?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
    ]
    assert demo.render_chat(messages, tools=[TOOL]) == (
        "<|im_start|>system\nTools, one JSON object a line:\n"
        '{"type": "function", "function": {"name": "weather", '
        '"description": "<now> & \'here\'", "parameters": {}}}<|im_end|>\n'
        "<|im_start|>user\nweather?<|im_end|>\n"
        '<|im_start|>assistant\n{"name": "weather", "arguments": {"city": "Köln"}}<|im_end|>\n'
        "<|im_start|>tool\n21 degrees<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_text_parts_become_lines(demo):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert demo.render_chat([user(parts)]) == demo.render_chat([user("one\ntwo")])


def test_an_image_is_refused_by_a_template_of_text(demo):
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedContentError, match="image_url") as caught:
        demo.render_chat([user("before"), user(parts)])
    assert caught.value.field == "messages[1].content[1]"


@pytest.mark.parametrize(
    ("content", "field"),
    [(7, "messages[0].content"), ([7], "messages[0].content[0]"), ([{"type": "text"}], "[0]")],
)
def test_invalid_content_names_the_field(demo, content, field):
    with pytest.raises(PromptError) as caught:
        demo.render_chat([user(content)])
    assert caught.value.field.endswith(field)


PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% set content = m.content %}{% if content is string %}{{ content }}"
    "{% else %}{% for p in content %}[{{ p.type }}]{% endfor %}{% endif %}{% endfor %}"
)


def test_a_template_of_parts_gets_parts():
    assert ChatTemplate(PARTS).render([user("hi")]) == "[text:hi]"
    assert ChatTemplate(PARTS).render([user([{"type": "image"}])]) == "[image:]"


def test_a_template_of_both_gets_the_content_unchanged():
    assert ChatTemplate(BOTH).render([user("hi")]) == "hi"
    assert ChatTemplate(BOTH).render([user([{"type": "image"}])]) == "[image]"


def test_template_arguments_cannot_replace_the_messages():
    template = ChatTemplate("{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")
    assert template.render([]) == ""
    assert template.render([], template_kwargs={"enable_thinking": False}) == "False"
    with pytest.raises(PromptError, match="cannot set messages") as caught:
        template.render([], template_kwargs={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


def test_the_template_may_refuse_the_messages():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="roles must alternate"):
        template.render([])


def test_the_template_gets_the_time():
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 1, 2, tzinfo=UTC)
    )
    assert template.render([]) == "02 Jan 2026"


def test_arguments_that_are_not_a_json_object_stay_text():
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}")
    for arguments in ("{broken", "[1]"):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert template.render([{"role": "assistant", "tool_calls": [call]}]) == arguments


FEATURES = [
    "{% for m in messages -%}\n  {{ loop.index0 }}{{ m.role | upper }}: {{ m.content | trim }}\n"
    "{%- endfor %}\n",
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index %}{% endif %}{% endfor %}{{ ns.last }}",
    "{% macro show(m, end='|') %}<{{ m['role'] }}>{{ caller() if caller else '' }}{{ end }}"
    "{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
    "{% call show(messages[0], end='') %}x{% endcall %}",
    "{{ messages[1:] | length }}{{ messages[-1]['content'][:3] }}{{ messages[::-1][0].role }}",
    "{% for m in messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ m.content }}{% endfor %}",
    "{% if messages[0].role == 'system' and 'b' in messages[0].content %}y{% else %}n{% endif %}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ 1 < 2 < 3 }}{{ 7 % 4 }}{{ 2 ** 3 }}",
    "{{ {'a': [1, 2], 'b': ('x',)} }}"
    "{% for k, v in {'a': 1}.items() %}{{ k ~ '=' ~ v }}{% endfor %}",
    "{{ 'a-b-c'.split('-')[-1] }}{{ ' x '.strip() }}{{ '%s:%d' | format('k', 3) }}"
    "{{ '{}/{}'.format(1, 'two') }}{{ messages[0].get('name', 'nobody') }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.length }}{{ loop.first }}{% else %}none"
    "{% endfor %}{% set x %}{{ messages[0].content }}!{% endset %}{{ x }}{{ none }}{{ true }}",
    "{%- for m in messages recursive %}{{ m.role }}{% endfor %}{{ [1, 2] + [3] }}{{ 'a' * 3 }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}"
    "{% with a = 1 %}{{ a + 1 }}{% endwith %}",
    "{{ messages[0].content | indent(2) }}"
    "{{ 'a\nb' | indent(2, true) }}{{ [3, 1] | sort | first }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_metering_does_not_change_the_output(source):
    messages = [{"role": "system", "content": "b\ne"}, user("hi there"), user("<&>")]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(messages=messages)
    assert ChatTemplate(source).render(messages) == expected
    assert ChatTemplate(source, trusted=True).render(messages) == expected


def test_extensions_of_hugging_face():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'é': '<b>'} | tojson }}{{ {'a': 1} | tojson(indent=2) }}"
    )
    assert ChatTemplate(source).render([user("a"), user("b")]) == (
        "a" + '{"é": "<b>"}' + json.dumps({"a": 1}, indent=2)
    )
