"""Change a chat in the way of Dynamo 1.6's frontend, before the chat template renders it.

Dynamo reads a request into its own types and writes those for the template, so the template gets
other values than the client sent: unknown keys are missing, a tool without a description has an
empty one. Servers of engines follow other rules (see
:meth:`dynctl.tokenization.ChatTemplate.render`); this module is only for predicting Dynamo. Each
rule was observed with Dynamo 1.6.1, with a template that prints its messages and tools.
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
    """The chat that renders to the same tokens as in Dynamo.

    ``tool_choice`` of the request: with ``"none"`` the template gets no tools, which is the default
    of a worker's card. Raises PromptError for a model without a chat template.
    """
    kept = [_tool(tool) for tool in tools or ()] if tool_choice != "none" else []
    template = tokenizer.template_for(with_tools=bool(kept))
    return DynamoChat([_message(message, template) for message in messages], kept or None)


def _message(message: Message, template: ChatTemplate) -> dict[str, Any]:
    changed = dict(message)
    if changed.get("reasoning_content") is None and changed.get("reasoning") is not None:
        changed["reasoning_content"] = changed["reasoning"]
    content = changed.get("content")
    if isinstance(content, list | tuple) and not template.wraps_strings and _all_text(content):
        changed["content"] = "\n".join(part["text"] for part in content)
    if changed.get("role") == "assistant" and "reasoning_content" not in template.source:
        _fold_reasoning(changed, in_parts=template.wraps_strings)
    calls = changed.get("tool_calls")
    if isinstance(calls, list | tuple):
        changed["tool_calls"] = [
            _call(call) if isinstance(call, Mapping) else call for call in calls
        ]
    return _picked(changed, _MESSAGE_KEYS)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    picked = _picked(call, _CALL_KEYS)
    if isinstance(picked.get("function"), Mapping):
        picked["function"] = _picked(picked["function"], _CALLED_KEYS)
    return picked


def _fold_reasoning(message: dict[str, Any], *, in_parts: bool) -> None:
    """Put the reasoning as text before the content, for a template without reasoning.

    If there is no content, Dynamo passes a bare string to a template that expects parts, and such
    a template iterates over its letters; that is not imitated.
    """
    reasoning = message.get("reasoning_content")
    thoughts = [reasoning] if isinstance(reasoning, str) else reasoning
    if not thoughts or not isinstance(thoughts, list | tuple) or not any(thoughts):
        return
    folded = "".join(f"<think>{thought}</think>" for thought in thoughts)
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        return
    if in_parts and content:
        message["content"] = [{"type": "text", "text": text} for text in (folded, content)]
    else:
        message["content"] = folded + (content or "")
    del message["reasoning_content"]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    picked = _picked(function, _FUNCTION_KEYS)
    # Dynamo adds its fields at the end: a template may print the tool in this order.
    parameters = picked.get("parameters")
    if isinstance(parameters, Mapping):
        picked["parameters"] = {
            **parameters,
            **({} if "type" in parameters else {"type": "object"}),
            **({} if "properties" in parameters else {"properties": {}}),
        }
    picked.setdefault("description", "")
    return {"type": tool.get("type", "function"), "function": picked}


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
