"""Calls of tools in formats with marks of their own are found, whole, in pieces and broken."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.tokenization.tool_calls import (
    TOOL_CALL_PARSERS,
    Part,
    ToolCall,
    ToolCallSplitter,
    call_format,
)
from dynctl.tokenization.tool_calls.calls import MAX_HELD, MAX_PARSED, Parsed
from dynctl.tokenization.tool_calls.deepseek_calls import DeepseekFormat
from dynctl.tokenization.tool_calls.json_values import read_value, write_value

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def deepseek_v3(name: str, arguments: str) -> str:
    body = f"function{SEPARATOR}{name}\n```json\n{arguments}\n```"
    return f"{BEGIN}{CALL_BEGIN}{body}{CALL_END}{END}"


def deepseek_v3_1(name: str, arguments: str) -> str:
    return f"{BEGIN}{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}{END}"


def qwen3_coder(name: str, arguments: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{each if isinstance(each, str) else json.dumps(each)}\n</parameter>\n"
        for key, each in json.loads(arguments).items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def kimi_k2(name: str, arguments: str) -> str:
    call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
    return f"<|tool_calls_section_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


def minimax_m2(name: str, arguments: str) -> str:
    text = qwen3_coder(name, arguments).replace("tool_call>", "minimax:tool_call>")
    text = text.replace("<function=", "<invoke name=").replace("</function>", "</invoke>")
    return text.replace("<parameter=", "<parameter name=")


WRITERS: dict[str, Callable[[str, str], str]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v3_1": deepseek_v3_1,
    "kimi_k2": kimi_k2,
    "minimax_m2": minimax_m2,
    "qwen3_coder": qwen3_coder,
}
KIMI = re.findall(r"<\|.*?\|>", kimi_k2("f", "{}"))
TAGS = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"]
FRAGMENTS = [
    *TAGS,
    ">",
    "'",
    BEGIN,
    END,
    CALL_BEGIN,
    CALL_END,
    SEPARATOR,
    "```json\n",
    "```",
    "f",
    "{}",
    "\n",
    " ",
]

TYPES = {bool: {"type": "boolean"}, int: {"anyOf": [{"type": "integer"}]}}

names = st.text(min_size=1, max_size=6, alphabet="abc_日")
arguments = st.dictionaries(
    names, st.none() | st.booleans() | st.integers() | st.text("ab<é \n", max_size=8), max_size=3
)
plain = st.text(alphabet="xyz \nü.", max_size=8)
cuts = st.lists(st.integers(1, 12), max_size=60)


def pieces(text: str, sizes: list[int]) -> list[str]:
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [*found, text]


def split(parser: str, *given: str, **properties: Any) -> list[Part]:
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    splitter = ToolCallSplitter(call_format(parser, [tool]))
    parts = [part for piece in given for part in splitter.feed(piece)]
    last = splitter.end()
    assert not splitter.holding
    return parts if last is None else [*parts, last]


@pytest.mark.parametrize("parser", sorted(WRITERS))
@given(before=plain, given=arguments, sizes=cuts)
def test_a_call_is_found_wherever_the_text_is_cut(parser, before, given, sizes):
    if parser in ("minimax_m2", "qwen3_coder"):  # texts there are without white space around them
        given = {key: f"a{each}b" if isinstance(each, str) else each for key, each in given.items()}
    name, types = "f", {key: TYPES.get(type(each), {}) for key, each in given.items()}
    text = before + WRITERS[parser](name, json.dumps(given, ensure_ascii=False))
    for cut in (pieces(text, sizes), [text]):
        parts = split(parser, *cut, **types)
        found = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
        assert found == [(name, given)]
        assert "".join(part.text or "" for part in parts) == before


@pytest.mark.parametrize("parser", sorted(WRITERS))
@given(text=plain, sizes=cuts)
def test_text_without_a_call_stays_as_it_is(parser, text, sizes):
    assert "".join(part.text or "" for part in split(parser, *pieces(text, sizes))) == text


@pytest.mark.parametrize("parser", sorted(WRITERS))
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14), cuts)
def test_any_text_is_read_without_an_error(parser, given, sizes):
    split(parser, *pieces("".join(given), sizes))


CALL = f"{CALL_BEGIN}f{SEPARATOR}{{}}{CALL_END}"
F = ToolCall("f", "{}")
X = "<function=f></function>"
INVOKE = "<invoke name=f></invoke>"
B = Part("b")
K = ToolCall("f", "{}", "functions.f:0")
KIMI_CALL = "".join([KIMI[1], "functions.f:0", KIMI[2], "{}", KIMI[3]])


@pytest.mark.parametrize(
    ("parser", "given", "expected"),
    [
        # Calls that are whole count without the mark after all of them; broken ones are lost.
        ("deepseek_v3_1", [BEGIN + CALL + CALL[:-1]], [Part("", (F,))]),
        ("deepseek_v3_1", [f"a{BEGIN} b"], [Part("a"), Part("")]),
        ("deepseek_v3_1", [f"{BEGIN}b{END} c"], [Part(""), Part(" c")]),
        # Without the outer marks a call is one where a piece has its whole mark.
        ("deepseek_v3_1", [f"a {CALL}{CALL}", " b"], [Part("a ", (F, F)), Part(" b")]),
        ("deepseek_v3_1", [f"a {CALL}"[:-30], f"a {CALL}"[-30:]], None),
        ("deepseek_v3_1", [f"a {CALL_BEGIN} b"], [Part("")]),
        # What may become a mark is held back, also before white space.
        ("deepseek_v3_1", ["a < ", "b"], [Part("a < b")]),
        # Texts may have ends of lines, which become spaces.
        (
            "deepseek_v3_1",
            [CALL.replace("{}", '"a\n  b"')],
            [Part("", (ToolCall("f", '"a b"'),))],
        ),
        ("deepseek_v3_1", [CALL.replace("{}", '"a\tb"')], [Part("")]),
        # The block of code is needed in one format; it ends at its first end, or with the call.
        ("deepseek_v3", [deepseek_v3("f", "{}").replace("```json", "")], [Part("")]),
        ("deepseek_v3", [deepseek_v3("f", "{}").replace("\n```<", "<")], [Part("", (F,))]),
        ("deepseek_v3", [deepseek_v3("f", '"```"')], [Part("")]),
        ("deepseek_v3", [deepseek_v3("a[", "{}")], [Part("")]),
        # Functions without the outer tags are calls at the end of the answer, or before an end tag.
        ("qwen3_coder", [f"a {X} b"], [Part("a "), Part("", (F,))]),
        ("qwen3_coder", [X, "</tool_call>", " b"], [Part("", (F,)), Part(" b")]),
        (
            "qwen3_coder",
            [f"{X} so </tool_call> b", "<tool_call>", "c"],
            [Part("", (F,)), Part(" b"), Part("<tool_call>c")],
        ),
        (
            "qwen3_coder",
            ["<function=f></tool_call>", "b"],
            [Part("<function=f></tool_call>"), B],
        ),
        # What the end of the answer cut off is lost with its function, or is text without any.
        ("qwen3_coder", [f"<tool_call>{X}<function=f><parameter=x>1"], [Part("", (F,))]),
        ("qwen3_coder", ["<tool_call><function=f><parameter=x>1"], [Part("")]),
        ("qwen3_coder", ["<tool_call><parameter=x"], [Part("")]),
        ("qwen3_coder", ["<function=f><parameter=x>1"], [Part("<function=f><parameter=x>1")]),
        ("qwen3_coder", ["<tool_call> hi"], [Part("<tool_call> hi")]),
        ("qwen3_coder", ["<tool_call>hi</tool_call> b"], [Part(""), Part(" b")]),
        # Kimi's calls begin with the section, or with the first of them; the text has the id.
        ("kimi_k2", [f"a {KIMI_CALL} b"], [Part("a "), Part("", (K,))]),
        ("kimi_k2", [KIMI_CALL, KIMI[4], " b"], [Part("", (K,)), Part(" b")]),
        ("kimi_k2", [f"{KIMI[0]} b"], [Part("")]),
        ("kimi_k2", [f"{KIMI[0]} b{KIMI[4]}", "c"], [Part(""), Part("c")]),
        ("kimi_k2", [f"{KIMI[0]}{KIMI_CALL}{KIMI_CALL[:-1]}"], [Part("", (K,))]),
        ("kimi_k2", [KIMI_CALL.replace(":0", "")], [Part("")]),
        (
            "kimi_k2",
            [KIMI_CALL.replace("{}", "{x}")],
            [Part("", (K._replace(arguments="{x}"),))],
        ),
        ("kimi_k2", [KIMI_CALL.replace("{}", "{} [1]")], [Part("", (K,))]),
        (
            "kimi_k2",
            [KIMI_CALL.replace("{}", "[1e400] x")],
            [Part("", (K._replace(arguments="[1e400]"),))],
        ),
        # MiniMax's functions and parameters need their end tags; what is broken is lost.
        ("minimax_m2", [f"a {INVOKE} b"], [Part("a "), Part("", (F,))]),
        ("minimax_m2", ["<minimax:tool_call> b"], [Part("")]),
        ("minimax_m2", ["<invoke name=f> b"], [Part("")]),
        ("minimax_m2", [f"{INVOKE}<invoke name=g>"], [Part("", (F,))]),
        (
            "minimax_m2",
            [f"<invoke name=f><parameter name=x>1{INVOKE[-9:]}"],
            [Part("", (F,))],
        ),
        ("minimax_m2", ["<minimax:tool_call>b</minimax:tool_call>", "b"], [Part(""), B]),
        # Names may be in quotes; one quote alone, which ends Dynamo's answer, is a name.
        ("qwen3_coder", ["<function= 'f' >"], [Part("", (F,))]),
        ("qwen3_coder", ['<function=">'], [Part("", (ToolCall('"', "{}"),))]),
        ("qwen3_coder", ["<function=>"], [Part("<function=>")]),
    ],
)
def test_unusual_texts_are_read_as_in_dynamo(parser, given, expected):
    found = split(parser, *given)
    if expected is None:
        assert "".join(part.text or "" for part in found) == "".join(given)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            '{"x": 1, "a": [true, null], "x": "\\u00e9\\/\\u0007"}',
            '{"x":"é/\\u0007","a":[true,null]}',
        ),
        (
            "[-0, 1.50, 1e5, 1e15, 1e16, 1E-5, -0.00002, 1e-7, 1e-400]",
            "[-0.0,1.5,100000.0,1000000000000000.0,1e+16,0.00001,-0.00002,1e-7,0.0]",
        ),
        (
            "[18446744073709551615, 18446744073709551616, -9223372036854775809]",
            "[18446744073709551615,1.8446744073709552e+19,-9.223372036854776e+18]",
        ),
        ("0.90142745761148357e-37", "9.014274576114836e-38"),
        ("[" * 127 + "]" * 127, "[" * 127 + "]" * 127),
    ],
)
def test_values_are_written_as_dynamo_writes_them(text, written):
    assert write_value(read_value(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "01",
        "1.",
        '"\\ud800"',
        '{"\\udc00": 1}',
        '"a\nb"',
        "1e309",
        "{} {}",
        "1e99999999999",
        "[" * 128 + "]" * 128,
        "[" * 100000,
    ],
)
@pytest.mark.usefixtures("no_collection")
def test_values_that_dynamo_does_not_read_are_errors(text):
    with pytest.raises(ValueError):
        read_value(text)


@pytest.mark.parametrize(
    ("schema", "given", "expected"),
    [
        ({"type": "string"}, [" a b\n", "NULL", "&lt;&amp;gt;", "1"], ["a b", None, "<&gt;", "1"]),
        ({"type": "integer"}, ["12", "+4", "007", "1.0", "x", "9" * 19], [12, 4, 7, "1.0", "x"]),
        ({"type": "number"}, ["1.50", "2.0", ".5", "5.", "x", "inf"], [1.5, 2, 0.5, 5, "x", "inf"]),
        ({"type": "number"}, ["1e5", "1e22", "+1e22", "-0.0"], [100000, 1e22, "+1e22", 0]),
        ({"type": "BOOL"}, ["True", "false", "yes", "null"], [True, False, False, None]),
        ({"type": "array"}, ["[1]", "['a']", "(1)", "1"], [[1], ["a"], "(1)", 1]),
        ({"anyOf": []}, ["{'a': None}", "True", "it's"], [{"a": None}, True, "it's"]),
        ({"type": ["integer", "null"]}, ["1"], ["1"]),
        ({"type": "special"}, ["1", "a"], [1, "a"]),
        (None, ["1"], ["1"]),
    ],
)
def test_arguments_have_the_types_of_their_schemas(schema, given, expected):
    arguments = "".join(f"<parameter=p{n}>{each}</parameter>" for n, each in enumerate(given))
    schemas = {} if schema is None else dict.fromkeys(map("p{}".format, range(len(given))), schema)
    (part,) = split("qwen3_coder", f"<function=f>{arguments}</function>", **schemas)
    found = list(json.loads(part.calls[0].arguments).values())
    assert found[: len(expected)] == expected
    assert [type(each) for each in found[: len(expected)]] == [type(each) for each in expected]
    assert found[len(expected) :] == given[len(expected) :]


def test_large_numbers_stay_as_they_were_written():
    text = "<function=f><parameter=x>1.50e22</parameter></function>"
    (part,) = split("qwen3_coder", text, x={"type": "number"})
    assert part.calls[0].arguments == '{"x":1.50e22}'


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<function=" * 26_000),
        ("qwen3_coder", "<tool_call>" * 23_000),
        ("qwen3_coder", "<function=f><parameter=" * 11_000),
        ("qwen3_coder", "<function=f></function>a" + "</tool_call>b" * 20_000),
        ("deepseek_v3_1", BEGIN + CALL_BEGIN * 13_000),
        ("kimi_k2", KIMI[1] * 13_000),
        ("kimi_k2", "".join([KIMI[1], "f:0", KIMI[2]]) * 4_500),
        ("kimi_k2", "".join([KIMI[1], "f" * 200_000])),
    ],
)
def test_long_broken_texts_take_time_as_they_grow(parser, text):
    """Each of these would take minutes if every mark were looked at up to the end of the text."""
    found = split(parser, *pieces(text, [50_000] * 5))
    assert sum(len(part.calls) for part in found) == text.count("</function>")


def test_text_is_not_read_again_with_each_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may make a model write such text, so its cost has to grow as the text does."""
    read: list[int] = []
    whole = DeepseekFormat.parse

    def parse(self: DeepseekFormat, text: str, *, final: bool) -> Parsed:
        read.append(len(text))
        return whole(self, text, final=final)

    monkeypatch.setattr(DeepseekFormat, "parse", parse)
    splitter = ToolCallSplitter(TOOL_CALL_PARSERS["deepseek_v3_1"])
    splitter.feed(CALL_BEGIN)
    for _ in range(4000):
        splitter.feed(CALL_END)
        splitter.feed(" no mark")
    assert sum(read) < MAX_PARSED + MAX_HELD
    assert len(read) <= 4000
