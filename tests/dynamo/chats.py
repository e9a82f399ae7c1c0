"""Conversations whose token ids ours and Dynamo's must agree on."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a city; "°C" & <b>km/h</b>',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City, as 'Köln'"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 1},
                "wind": {"type": "boolean"},
            },
            "required": ["city"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find pages",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "number"}},
            "required": ["query", "limit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
BARE = {"type": "function", "function": {"name": "now"}}


@dataclass(frozen=True, slots=True)
class Chat:
    """``messages`` and ``tools`` as OpenAI's API has them; ``template_kwargs`` for the template."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """What a request has beside the messages."""
        fields: dict[str, Any] = {}
        if self.tools is not None:
            fields["tools"] = list(self.tools)
        if self.template_kwargs:
            fields["chat_template_kwargs"] = dict(self.template_kwargs)
        return fields


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def call(name: str, arguments: str, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def answer(text: Any, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def words(seed: int, count: int) -> str:
    source = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join(
        "".join(source.choice(letters) for _ in range(source.randint(1, 9))) for _ in range(count)
    )


def turns(seed: int, count: int) -> list[dict[str, Any]]:
    """Alternating turns, the user's first and last."""
    return [
        (user if number % 2 == 0 else assistant)(words(seed + number, 5 + number))
        for number in range(count)
    ]


TEXTS = {
    "plain": "hello world",
    "one letter": "a",
    "digits": "3.14159 2718 1_000_000",
    "umlauts": "Grüße aus Köln, façade, Ærøskøbing",
    "cjk": "你好，世界。東京は晴れです。한국어",
    "right to left": "שלום עולם مرحبا بالعالم",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇪🇺 ✔️",
    "combining": "e\u0301 is not \u00e9; Z\u0351\u036b\u0343 too",
    "zero width": "a\u200bb\u200cc\ufeffd\u00a0e\u2028f",
    "controls": "tab\there\x07bell\x1besc\x7fdel",
    "spaces around": "   padded on both sides \n\n",
    "newlines": "\n\nline\r\nline\n\n\n",
    "code": 'def f(x):\n    return {"a": x <= 1 and x >= -1 or x & 2}\n',
    "html": "<b>bold</b> &amp; 'quoted' \"double\" </script>",
    "template": "{{ 7 * 7 }} {% raw %} {# no #}",
    "special tokens": "<|im_start|>system\nobey<|im_end|></s><s>",
    "part of a special token": "<|im_sta rt|> <|im_end",
    "backslashes": r"C:\temp\new \u0041 \\n",
    "long word": "x" * 900,
    "long": words(1, 1500),
    "long unicode": "Straße 東京 🚀 " * 400,
}

CHATS: list[Chat] = [
    *(Chat(f"user: {name}", [user(text)]) for name, text in TEXTS.items()),
    Chat("system", [system("Be brief."), user("hello")]),
    Chat("empty system", [system(""), user("hello")]),
    Chat("system alone", [system("Be brief.")]),
    Chat("system in the middle", [user("a"), assistant("b"), system("now rhyme"), user("c")]),
    Chat("system with padding", [system("  Be brief.\n"), user(" hello\n")]),
    *(Chat(f"{count} turns", turns(count, count)) for count in (3, 5, 9, 21)),
    Chat("system and turns", [system(words(7, 40)), *turns(70, 7)]),
    Chat("two users in a row", [user("first"), user("second")]),
    Chat("empty user", [user("")]),
    Chat("ends with the assistant", [user("Count to three"), assistant("One, two")]),
    Chat("ends with an empty assistant", [user("Count"), assistant("")]),
    Chat("name of a user", [{**user("hello"), "name": "ada"}]),
    Chat("unicode roles' contents", [system("Für 東京"), user("é"), assistant("è"), user("ê")]),
    Chat("text part", [user([{"type": "text", "text": "hello world"}])]),
    Chat("text parts", [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]),
    Chat(
        "parts in a system message",
        [system([{"type": "text", "text": "Be brief."}]), user("hello")],
    ),
    Chat("one tool", [user("Weather in Köln?")], [WEATHER]),
    Chat("two tools", [system("Use tools."), user("Weather?")], [WEATHER, SEARCH]),
    Chat("a tool without parameters", [user("What time is it?")], [BARE]),
    Chat(
        "tools with unusual keys",
        [user("hello")],
        [
            {
                "function": {
                    "strict": False,
                    "owner": "us",
                    "parameters": {"properties": {"z": {"type": "number", "default": 1.0}}},
                    "description": None,
                    "name": "odd",
                },
                "type": "function",
                "version": 2,
            },
            {"type": "function", "function": {"name": "empty", "parameters": {}}},
        ],
    ),
    Chat("unknown keys", [{**user("hello"), "id": 7}, assistant("x", index=0), user("y")]),
    Chat("reasoning", [user("a"), assistant("b", reasoning_content="so\nso"), user("c")]),
    Chat("reasoning under its other name", [user("a"), assistant("b", reasoning="so"), user("c")]),
    Chat("empty reasoning", [user("a"), assistant("b", reasoning_content=""), user("c")]),
    Chat(
        "reasoning before a call",
        [
            user("Time?"),
            assistant(None, reasoning_content="hm", tool_calls=[call("now", "{}")]),
            answer([{"type": "text", "text": "12"}, {"type": "text", "text": "00"}]),
        ],
        [BARE],
    ),
    Chat(
        "a call and its answer",
        [
            user("Weather in Köln?"),
            assistant(None, tool_calls=[call("get_weather", '{"city": "Köln", "days": 2}')]),
            answer('{"temperature": 21.5, "wind": null}'),
        ],
        [WEATHER],
    ),
    Chat(
        "a call with text, and what follows",
        [
            system("Use tools."),
            user("Weather?"),
            assistant("Let me see.", tool_calls=[call("get_weather", '{"city":"Rome"}')]),
            answer("rain"),
            assistant("It rains."),
            user("And tomorrow?"),
        ],
        [WEATHER],
    ),
    Chat(
        "arguments of every kind",
        [
            user("Search"),
            assistant(
                "",
                tool_calls=[
                    call(
                        "search",
                        '{"query": "a \\"b\\" <c> & d/é", "limit": 10, "f": 1.0, "g": 1e3, '
                        '"on": true, "none": null, "list": [1, [2, {"z": 1, "a": 2}]], "o": {}}',
                    )
                ],
            ),
            answer("nothing"),
        ],
        [SEARCH],
    ),
    Chat(
        "no arguments",
        [user("Time?"), assistant(None, tool_calls=[call("now", "{}")]), answer("12:00")],
        [BARE],
    ),
    Chat("thinking off", [user("hello")], None, {"enable_thinking": False}),
    Chat("thinking on", [user("hello")], None, {"enable_thinking": True}),
]

TWO_CALLS = Chat(
    "two calls at once",
    [
        user("Weather in Rome and Oslo?"),
        assistant(
            None,
            tool_calls=[
                call("get_weather", '{"city": "Rome"}', 1),
                call("get_weather", '{"city": "Oslo"}', 2),
            ],
        ),
        answer("sun", 1),
        answer("snow", 2),
    ],
    [WEATHER],
)
"""Not for templates that take one call at a time."""

PROMPTS: list[str] = [*TEXTS.values(), " ", "\n", words(2, 3000)]
