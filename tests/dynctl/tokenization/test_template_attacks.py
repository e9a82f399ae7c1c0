"""Untrusted templates: attacks and limits."""

import itertools
import shutil
import threading
from datetime import UTC, datetime

import pytest
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynctl.tokenization import (
    DEMO_MODEL_DIR,
    ChatTemplate,
    PromptError,
    RenderLimits,
    TemplateError,
    load_tokenizer,
)
from dynctl.tokenization.budget import BudgetHolder
from dynctl.tokenization.sandbox import ChatEnvironment, QuietNamespace

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str, **options) -> str:
    return ChatTemplate(source, origin="evil.jinja", **options).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (1).to_bytes(4, 'big') }}",
        "{{ 'x'.encode() }}",
        "{{ 'x'.translate({120: 'y'}) }}",
        "{{ messages[0].content.format_map.__self__ }}{{ ''.__class__.__base__() }}",
    ],
)
def test_access_to_python_is_refused(source):
    with pytest.raises(TemplateError, match=r"evil\.jinja"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0]['update'](role='system') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].content.format_map.__self__ }}{{ ''.__class__.__base__() }}",
        "{{ range(10 ** 9) }}",
        "{% include 'x' %}",
        "{{ messages|pprint }}",
    ],
)
def test_a_trusted_template_stays_in_the_sandbox(source):
    with pytest.raises(TemplateError, match=r"evil\.jinja"):
        render(source, trusted=True)


def test_only_the_length_of_the_prompt_of_a_trusted_template_is_bounded():
    limits = RenderLimits(output_chars=1000, operations=50, created_chars=50)
    work = "{% for i in range(200) %}{{ i }}{% endfor %}"
    with pytest.raises(TemplateError, match="stopped"):
        render(work, limits=limits)
    assert len(render(work, limits=limits, trusted=True)) == 490
    with pytest.raises(PromptError, match="1000"):
        render("{% for i in range(2000) %}{{ i }}{% endfor %}", limits=limits, trusted=True)


def test_a_trusted_template_that_takes_long_is_rendered_in_a_thread_from_then_on():
    seconds = itertools.count()
    template = ChatTemplate("{{ 1 }}", clock=lambda: float(next(seconds)), trusted=True)
    assert not template.heavy
    template.render(MESSAGES)
    assert template.heavy


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages|map(attribute='__class__')|join }}",
        "{{ range.__self__ }}{{ cycler.__init__ }}{{ self.__init__ }}{{ joiner }}",
    ],
)
def test_hidden_attributes_are_undefined(source):
    assert render(source) == ""
    assert render(source, trusted=True) == ""


@pytest.mark.parametrize("name", ["attr", "pprint", "batch", "xmlattr", "urlize"])
def test_a_filter_off_the_list_is_refused_by_name(name):
    with pytest.raises(TemplateError, match=f"No filter named '{name}'"):
        render("{{ 'x'|" + name + " }}")


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "oper"),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(60) }}",
            "operations",
        ),
        ("{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "deeply|operations"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "deeply"),
        (
            "{% set ns = namespace(s='aa') %}"
            "{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "string longer",
        ),
        (
            "{% set ns = namespace(s='aa') %}"
            "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "string longer",
        ),
        (
            "{% set s = 'aaaaaaaa' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40,
            "string longer",
        ),
        (
            "{% set ns = namespace(s=[1]) %}"
            "{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}",
            "nodes",
        ),
        (
            "{% set ns = namespace(s=[1]) %}"
            "{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}",
            "nodes",
        ),
        (
            "{% set ns = namespace(s=[1]) %}"
            "{% for i in range(60) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}",
            "nodes",
        ),
        (
            "{% set ns = namespace(s=[1]) %}"
            "{% for i in range(60) %}{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}",
            "nodes",
        ),
        (
            "{% set ns = namespace(s=[1]) %}"
            "{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "nodes",
        ),
        ("{{ 'a' * 10 ** 9 }}", "string longer"),
        ("{{ 10 ** 9 * 'a' }}", "string longer"),
        ("{{ [1] * 10 ** 9 }}", "nodes"),
        ("{{ 'x' * 8000000 ~ 'x' * 8000000 }}", "string longer"),
        ("{{ 7 ** (7 ** 9) }}", "bits"),
        ("{{ 'a'.center(10 ** 9) }}", "width"),
        ("{{ 'a'.zfill(10 ** 9) }}", "width"),
        ("{{ 'a' | center(10 ** 9) }}", "width"),
        ("{{ 'a' | indent(10 ** 9) }}", "width"),
        (
            "{{ 'a' | indent('x' * 10000) }}" * 2 + "{{ ('\n' * 9000) | indent('x' * 9000) }}",
            "longer",
        ),
        ("{{ messages | tojson(indent=10 ** 9) }}", "width"),
        ("{{ 1.5 | round(10 ** 9) }}", "width"),
        ("{{ '%1000000000d' | format(1) }}", "width"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '{:1000000000}'.format(1) }}", "width"),
        ("{{ strftime_now('%1000000000d') }}", "width"),
        ("{{ ('\t' * 9000).expandtabs(9000) }}", "string longer"),
        ("{{ ('x' * 100000) | replace('x', 'y' * 100000) }}", "string longer"),
        ("{{ ('x' * 100000) | replace(new='y' * 100000, old='x') }}", "string longer"),
        ("{{ range(90000) | join(attribute='real', d='x' * 10000) }}", "string longer"),
        ("{{ '%(a(b)c)1000000000s' % {'a(b)c': 1} }}", "width"),
        ("{{ ('ab' * 1000000) | replace('', 'x' * 100) }}", "string longer"),
        ("{{ ('x' * 100000).replace('x', 'y' * 100000) }}", "string longer"),
        ("{{ ('x' * 10000).join('y' * 10000) }}", "string longer"),
        ("{{ range(90000) | join('x' * 10000) }}", "string longer"),
        (
            "{% set s %}{% for i in range(90000) %}" + "x" * 90000 + "{% endfor %}{% endset %}",
            "characters created",
        ),
        (
            "{% set s = 'x' * 4000000 %}" + "{% if s[1:] == 'y' %}{% endif %}" * 100,
            "characters created",
        ),
        ("{{ ('f' * 1000000) | int(0, 16) // ('e' * 500000) | int(0, 16) }}", "4096 characters"),
        ("{{ ('9' * 5000) | int }}", "4096 characters"),
        (
            "{% set ns = namespace(n=1) %}{% for i in range(5000) %}"
            "{% set ns.n = ns.n + ns.n %}{% endfor %}",
            "4096 bits",
        ),
        (
            "{% set n = 2 ** 2000 * 2 ** 2000 %}{{ [n, n, n, n, n, n, n, n] | sum * n }}",
            "4096 bits",
        ),
        *(
            ("{{ ('ab ' * 2600000) | " + one + " }}", "operations")
            for one in (
                "sort",
                "groupby('x')",
                "unique | list",
                "select | list",
                "reject | list",
                "map('upper') | list",
                "list",
                "min",
                "max",
                "join('')",
                "title",
                "wordcount",
                "select | map('upper') | join",
                "indent",
            )
        ),
        ("{{ ('a' * 8000000).split('a') | length }}", "operations"),
        ("{{ ('a ' * 4000000).split() | length }}", "operations"),
        ("{{ ('\n' * 8000000).splitlines() | length }}", "operations"),
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_a_bomb_is_stopped_by_count(source, limit):
    # The clock stands still: it is the counters that stop these, the same way on every machine.
    with pytest.raises(TemplateError, match=limit):
        render(source, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ (text.split('</think>')[-1]).lstrip('\n') | length }}", 999_999),
        ("{% for i in range(3) %}{{ text | trim | length }},{% endfor %}", 1_000_009),
        ("{{ text | length }}", 1_000_009),
        ("{{ '007' | int + 'ff' | int(0, 16) + ([3, 4] | sum) }}", 269),
    ],
)
def test_long_chats_of_usual_templates_stay_within_the_limits(source, expected):
    messages = [{"role": "user", "content": "a</think>\n" + "x y" * 333_333}]
    source = "{% set text = messages[0].content %}" + source
    found = ChatTemplate(source, origin="usual.jinja").render(messages)
    assert set(found.split(",")) - {""} == {str(expected)}


def test_the_deadline_stops_slow_work():
    seconds = itertools.count()
    with pytest.raises(TemplateError, match=r"more than 2\.0 s"):
        render("{% for i in range(100) %}{{ i }}{% endfor %}", clock=lambda: float(next(seconds)))


def test_a_namespace_does_not_print_its_values():
    chain = "{% set a = namespace(x=1) %}" + "{% set a = namespace(x=a, y=a) %}" * 60
    assert render(chain + "{{ a }}") == "<Namespace>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ (((",
        "{% for %}",
        "{{" + "(" * 5000 + ")" * 5000 + "}}",
        "{% for i in x %}" * 30 + "{% endfor %}" * 30,
        "{{ messages | nosuchfilter }}",
        "x" * (256 * 1024 + 1),
    ],
    ids=["open", "no-target", "deep", "nested", "filter", "size"],
)
@pytest.mark.usefixtures("no_collection")
def test_an_invalid_template_is_an_error_at_load(source):
    with pytest.raises(TemplateError, match=r"evil\.jinja"):
        ChatTemplate(source, origin="evil.jinja")


def test_other_templates_cannot_be_included():
    with pytest.raises(TemplateError):
        render("{% include '/etc/passwd' %}")


def test_output_is_bounded():
    limits = RenderLimits(output_chars=100)
    with pytest.raises(PromptError, match="the limit is 100"):
        render("{% for i in range(90) %}ab{% endfor %}", limits=limits)


def test_errors_do_not_quote_the_prompt():
    template = ChatTemplate("{{ messages[0].content + 1 }}")
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "user", "content": "my secret"}])
    assert "secret" not in str(caught.value)


def test_each_render_has_its_own_budget():
    template = ChatTemplate(
        "{% for i in range(50) %}{{ i }}{% endfor %}", limits=RenderLimits(operations=170)
    )
    first = template.render(MESSAGES)
    assert [template.render(MESSAGES) for _ in range(5)] == [first] * 5


async def test_a_heavy_template_leaves_the_event_loop(tmp_path, monkeypatch):
    shutil.copytree(DEMO_MODEL_DIR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for i in range(30000) %}{% set x = i %}{% endfor %}done"
    )
    monkeypatch.setattr("dynctl.tokenization.model.is_known", lambda source: True)
    tokenizer = load_tokenizer(tmp_path)
    rendered_on: list[int] = []
    program = tokenizer.template_for(with_tools=False).program
    run = program.run

    def observed(variables):
        rendered_on.append(threading.get_ident())
        return run(variables)

    monkeypatch.setattr(program, "run", observed)
    first = await tokenizer.encode_chat_async(MESSAGES)
    assert await tokenizer.encode_chat_async(MESSAGES) == first
    here = threading.get_ident()
    assert [ident == here for ident in rendered_on] == [True, False]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '1234567: %s' % 'x' }}", "1234567: x"),
        ("{{ '1234567: %05d' | format(7) }}", "1234567: 00007"),
        ("{{ '1234567: {:>3}{{}}'.format(7) }}", "1234567:   7{}"),
    ],
)
def test_a_number_that_is_not_a_width_is_text(source, text):
    assert render(source) == text


_OBJECTS: tuple[object, ...] = (
    {"role": "user", "items": 1, "__class__": 2, "format": 3, "": 4},
    {},
    "text",
    QuietNamespace(role="x", items=2),
    QuietNamespace(),
    LoopContext([1, 2, 3], Undefined),
    [1],
    ("a",),
    1,
    None,
)
_ATTRIBUTES = (
    *("role", "items", "get", "update", "pop", "__class__", "__init__", "_x", "", "format"),
    *("format_map", "startswith", "encode", "mro", "index0", "last", "cycle", "_iterator", "call"),
    *("append", "count", "real", "__len__", "_Namespace__attrs", "gi_frame"),
)


@pytest.mark.parametrize("attribute", _ATTRIBUTES)
@pytest.mark.parametrize("number", range(len(_OBJECTS)))
def test_short_ways_to_an_attribute_give_what_the_sandbox_gives(number: int, attribute: str):
    owner = _OBJECTS[number]
    environment = ChatEnvironment(BudgetHolder(), lambda: datetime.now(UTC))
    found = environment.getattr(owner, attribute)
    expected = ImmutableSandboxedEnvironment.getattr(environment, owner, attribute)
    assert type(found) is type(expected)
    if isinstance(found, Undefined):
        assert found._undefined_exception is expected._undefined_exception
        assert found._undefined_message == expected._undefined_message
    elif callable(found):
        assert getattr(found, "__name__", found) == getattr(expected, "__name__", expected)
    else:
        assert found == expected


def test_branches_are_counted_by_the_loop_that_they_are_in():
    source = "{% for a in range(999) %}{% for b in range(999) %}{% if b %}{% endif %}{% endfor %}"
    with pytest.raises(TemplateError, match="stopped, more than"):
        render(source + "{% endfor %}")
