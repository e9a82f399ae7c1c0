"""Prompts with shared prefixes: conversations that grow, and documents with several questions."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

_WORDS = (
    "cache block engine router prefix token zone rack worker decode prefill request answer shared "
    "window adapter salt event replay index load cost weight budget river mountain harbour lantern"
).split()


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(count))


def mixed(count: int, seed: int = 1, model: str = "tiny") -> Iterator[dict[str, Any]]:
    """``count`` bodies: two thirds chats that continue one of a few conversations, one third
    completions that continue one of a few texts. Prompts have 40 to about 900 tokens.

    One in twelve repeats an earlier body, so that whole prompts are cached as well.
    """
    chance = random.Random(seed)
    systems = [words(chance, chance.randrange(8, 40)) for _ in range(4)]
    texts = [words(chance, chance.randrange(20, 90)) for _ in range(4)]
    chats: list[list[dict[str, str]]] = []
    sent: list[dict[str, Any]] = []
    for number in range(count):
        if sent and chance.random() < 1 / 12:
            body = chance.choice(sent)
        elif number % 3 == 2:
            text = chance.choice(texts)
            prompt = f"{text} {words(chance, chance.randrange(1, 20))}"
            if chance.random() < 0.5 and len(prompt) < 1200:
                texts[chance.randrange(len(texts))] = prompt
            body = {"model": model, "prompt": prompt}
        else:
            body = {"model": model, "messages": _next_turn(chance, chats, systems)}
        sent.append(body)
        yield body


def _next_turn(
    chance: random.Random, chats: list[list[dict[str, str]]], systems: Sequence[str]
) -> list[dict[str, str]]:
    growing = [chat for chat in chats if sum(len(turn["content"]) for turn in chat) < 1000]
    if growing and chance.random() < 0.7:
        chat = chance.choice(growing)
        chats.remove(chat)
        chat = [*chat, {"role": "assistant", "content": words(chance, chance.randrange(1, 25))}]
    else:
        chat = [{"role": "system", "content": chance.choice(systems)}]
    chat = [*chat, {"role": "user", "content": words(chance, chance.randrange(1, 25))}]
    chats.append(chat)
    return chat


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def tool_conversation(seed: int, model: str = "tiny") -> Iterator[dict[str, Any]]:
    """The bodies of one conversation with three tool calls, each longer than the one before."""
    chance = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(chance, 12)}]
    for number in range(3):
        yield {"model": model, "messages": list(messages), "tools": _TOOLS}
        arguments = f'{{"city": "{words(chance, 1)}", "days": {chance.randrange(1, 9)}}}'
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": words(chance, 6)},
        ]
    yield {"model": model, "messages": list(messages), "tools": _TOOLS}


def other_forms(number: int) -> list[tuple[str, dict[str, Any]]]:
    """One conversation in three forms. Its turns grow with ``number``."""
    chance = random.Random(4711 + number // 4)
    system, city, first = words(chance, 30), words(chance, 1), words(chance, 20)
    more = [words(random.Random(f"{number} {turn}"), 12) for turn in range(number % 4)]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    named = {"name": "weather", "description": "the weather"}
    call = {"name": "weather", "arguments": f'{{"city": "{city}"}}'}
    function = {**named, "parameters": schema}
    later = [{"role": "user", "content": one} for one in more]
    chat = {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": first},
            {
                "role": "assistant",
                "content": "let me see",
                "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            *later,
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 1,
    }
    messages = {
        "system": [{"type": "text", "text": system}],
        "messages": [
            {"role": "user", "content": first},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": city}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}],
            },
            *later,
        ],
        "tools": [{**named, "input_schema": schema}],
        "max_tokens": 1,
    }
    responses = {
        "instructions": system,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": first}]},
            {"role": "assistant", "content": "let me see"},
            {"type": "function_call", "call_id": "c1", **call},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            *later,
        ],
        "tools": [{"type": "function", **function}],
        "max_output_tokens": 4,  # SGLang takes two off
    }
    return [
        ("/v1/chat/completions", {"model": "tiny", **chat}),
        ("/v1/messages", {"model": "tiny", **messages}),
        ("/v1/responses", {"model": "tiny", **responses}),
    ]
