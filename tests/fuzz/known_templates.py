"""Measure chat templates for the list of known ones (`dynctl.tokenization.known_templates`).

    python -m tests.fuzz.known_templates DIRECTORY

``DIRECTORY``: files ``*.jinja`` of published models. Each template renders chats of 10,000 and of
300,000 characters: 14 kinds of text, in the messages of all roles, in reasoning, in calls of tools,
in results and in descriptions of tools; then one chat of 256 messages. A template is proposed where
no render took more than `MOST_MS` of CPU, nor `MOST_GROWTH` times as much for each character of the
longer chat. The last column is the line for the list; without it the reason stands there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Final

from dynctl.tokenization import PromptError, TemplateError
from dynctl.tokenization.known_templates import digest
from dynctl.tokenization.template import ChatTemplate

#: Milliseconds of CPU of one render: what an event loop may stand still.
MOST_MS: Final = 25.0
MOST_GROWTH: Final = 4.0
SIZES: Final = (10_000, 300_000)
#: Renders below this are not compared: their time is that of fixed work.
_SMALL_MS: Final = 2.0
KINDS: Final = (
    "a", "7", " ", "\n", "\t \n", "word ", "<think>", "</think>", "<think></think>\n",
    "\"'\\", "{}[]", "\u6f22\u5b57", "\U0001f600", "<|im_start|>system\n",
)  # fmt: skip

SPECIAL: Final = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "</s>",
}


def chat(kind: str, chars: int) -> dict[str, Any]:
    """A chat of about so many characters of one kind, in all places that a client fills."""
    text = kind * (chars // (8 * len(kind)))
    call = {"name": "f", "arguments": {"x": text}}
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [{"id": "abcdef123", "type": "function", "function": call}],
            },
            {"role": "tool", "content": text, "tool_call_id": "abcdef123", "name": "f"},
            {"role": "user", "content": text},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": text,
                    "parameters": {
                        "type": "object",
                        "properties": {"x": {"type": "string", "description": "x"}},
                        "required": ["x"],
                    },
                },
            }
        ],
    }


def plain(kind: str, chars: int, messages: int = 3) -> dict[str, Any]:
    """A chat of users and assistants, which every template takes."""
    text = kind * (chars // (messages * len(kind)))
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i in range(messages)]}


def measured(template: ChatTemplate, given: dict[str, Any]) -> float | None:
    """Milliseconds of CPU of a render, the least of three; None where the messages are refused."""
    least = float("inf")
    for _ in range(3):
        began = time.thread_time()
        try:
            template.render(**given)
        except (PromptError, TemplateError) as error:
            if error.over_limit is not None:
                raise
            return None
        least = min(least, time.thread_time() - began)
    return least * 1000


def judged(source: str) -> tuple[float, float, str]:
    """(the slowest render in ms, the largest growth, why the template is not proposed)."""
    slowest = growth = 0.0
    rendered = 0
    try:
        template = ChatTemplate(source, variables=SPECIAL)
        for kind in KINDS:
            for made in (chat, plain):
                short, long = (measured(template, made(kind, size)) for size in SIZES)
                if short is None or long is None:
                    continue
                rendered += 1
                slowest = max(slowest, long)
                if long > _SMALL_MS:
                    growth = max(growth, long / short / (SIZES[1] / SIZES[0]))
        many = measured(template, plain("word ", 25_600, 255))
        slowest = max(slowest, many or 0.0)
    except (TemplateError, PromptError) as error:
        return slowest, growth, str(error)[:80]
    why = ""
    if not rendered:
        why = "refuses the chats"
    elif slowest > MOST_MS:
        why = f"more than {MOST_MS:g} ms"
    elif growth > MOST_GROWTH:
        why = f"grows {growth:.1f} times"
    return slowest, growth, why


def main() -> int:
    """Print a row for each template; returns 1 where one is not proposed."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.known_templates", description=__doc__)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    refused = 0
    for path in sorted(given.directory.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        slowest, growth, why = judged(source)
        refused += bool(why)
        line = why or f'"{digest(source)}",  # {path.stem}'
        print(f"{slowest:6.1f} ms  {growth:4.1f}  {path.stem}: {line}", flush=True)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
