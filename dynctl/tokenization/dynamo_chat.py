"""A chat as Dynamo 1.6's frontend hands it to the chat template.

Dynamo reads a request into types of its own and writes those out again for the template, so what
the template sees is not quite what the client sent: unknown keys are gone, a tool without a
description has an empty one. Engines' own servers do other things (see
:meth:`dynctl.tokenization.ChatTemplate.render`); this is for predicting Dynamo alone. Each rule
was seen on a running 1.6.1, by a template that prints its messages and tools.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dynctl.tokenization.model import ModelTokenizer
from dynctl.tokenization.template import ChatTemplate, Message

_MESSAGE_KEYS: Final = (
    "role",
    "content",
    "reasoning_content",
    "refusal",
    "name",
    "tool_calls",
    "tool_call_id",
)
_CALL_KEYS: Final = ("id", "type", "function")
_CALLED_KEYS: Final = ("name", "arguments")
_FUNCTION_KEYS: Final = ("name", "description", "parameters", "strict")


class DynamoChat(NamedTuple):
    """``messages`` and ``tools`` for :meth:`ModelTokenizer.encode_chat`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def as_dynamo_reads(
    tokenizer: ModelTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_choice: object = None,
) -> DynamoChat:
    """The chat with which our rendering gives the tokens of Dynamo's.

    ``tool_choice`` is the request's: ``"none"`` keeps the tools from the template, which is the
    default of a worker's card. Raises PromptError for a model without a chat template.
    """
    kept = [_tool(tool) for tool in tools or ()] if tool_choice != "none" else []
    template = tokenizer.template_for(with_tools=bool(kept))
    return DynamoChat([_message(message, template) for message in messages], kept or None)


def _message(message: Message, template: ChatTemplate) -> dict[str, Any]:
    told = dict(message)
    if told.get("reasoning_content") is None and told.get("reasoning") is not None:
        told["reasoning_content"] = told["reasoning"]
    content = told.get("content")
    if isinstance(content, list | tuple) and not template.wraps_strings and _all_text(content):
        told["content"] = "\n".join(part["text"] for part in content)
    if told.get("role") == "assistant" and "reasoning_content" not in template.source:
        _fold_reasoning(told, in_parts=template.wraps_strings)
    calls = told.get("tool_calls")
    if isinstance(calls, list | tuple):
        told["tool_calls"] = [_call(call) if isinstance(call, Mapping) else call for call in calls]
    return _picked(told, _MESSAGE_KEYS)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    told = _picked(call, _CALL_KEYS)
    if isinstance(told.get("function"), Mapping):
        told["function"] = _picked(told["function"], _CALLED_KEYS)
    return told


def _fold_reasoning(told: dict[str, Any], *, in_parts: bool) -> None:
    """A template that knows no reasoning gets it as text before the content.

    Dynamo hands a template of parts alone a bare string if there is no content, which such a
    template walks letter by letter; that is not imitated.
    """
    reasoning = told.get("reasoning_content")
    thoughts = [reasoning] if isinstance(reasoning, str) else reasoning
    if not thoughts or not isinstance(thoughts, list | tuple) or not any(thoughts):
        return
    folded = "".join(f"<think>{thought}</think>" for thought in thoughts)
    content = told.get("content")
    if content is not None and not isinstance(content, str):
        return
    if in_parts and content:
        told["content"] = [{"type": "text", "text": text} for text in (folded, content)]
    else:
        told["content"] = folded + (content or "")
    del told["reasoning_content"]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    told = _picked(function, _FUNCTION_KEYS)
    # What Dynamo adds comes last, where a template that prints the tool shows it.
    parameters = told.get("parameters")
    if isinstance(parameters, Mapping):
        told["parameters"] = {
            **parameters,
            **({} if "type" in parameters else {"type": "object"}),
            **({} if "properties" in parameters else {"properties": {}}),
        }
    told.setdefault("description", "")
    return {"type": tool.get("type", "function"), "function": told}


def _picked(value: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The known keys in Dynamo's order, without nulls."""
    return {key: value[key] for key in keys if value.get(key) is not None}


def _all_text(parts: Sequence[object]) -> bool:
    return bool(parts) and all(
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        for part in parts
    )
