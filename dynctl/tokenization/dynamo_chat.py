"""Change a chat in the way of Dynamo 1.6's frontend, before the chat template renders it.

Dynamo reads a request into its own types and writes those for the template, so the template gets
other values than the client sent: unknown keys are missing, a tool without a description has an
empty one. Servers of engines follow other rules (see
:meth:`dynctl.tokenization.ChatTemplate.render`); this module is only for predicting Dynamo. Each
rule was observed with Dynamo 1.6.1, with a template that prints its messages and tools.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dynctl.tokenization.errors import PromptError
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


_RESERVED: Final = frozenset(
    {"add_generation_prompt", "bos_token", "eos_token", "messages", "pad_token", "tools"}
)
"""Names that Dynamo sets for the template itself; template arguments do not replace them."""
_TRUE: Final = frozenset({"1", "on", "true", "yes"})


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


def encode_as_dynamo(
    tokenizer: ModelTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_choice: object = None,
    template_args: Mapping[str, Any] | None = None,
    reasoning_effort: object = None,
    thinking: object = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """The token ids of a chat in a request to Dynamo 1.6; the arguments are fields of its body.

    Raises PromptError where Dynamo refuses the request with 400, and as
    :meth:`ModelTokenizer.render_chat`.
    """
    prompted = True if add_generation_prompt is None else add_generation_prompt
    if continue_final_message and prompted:
        raise PromptError(
            "continue_final_message: Dynamo refuses it with 400 unless add_generation_prompt is "
            "false; set that too",
            field="continue_final_message",
        )
    read = as_dynamo_reads(tokenizer, messages, tools, tool_choice=tool_choice)
    args = _template_args(template_args or {}, reasoning_effort, thinking)
    documents = args.pop("documents", None)
    text = tokenizer.render_chat(
        read.messages,
        tools=read.tools,
        documents=documents if isinstance(documents, list) else None,
        add_generation_prompt=prompted,
        template_kwargs=args,
        join_results=False,
    )
    if continue_final_message:
        text = _until_final_message(text, read.messages)
    return tokenizer.encode(text, field="messages")


def _template_args(
    given: Mapping[str, Any], reasoning_effort: object, thinking: object
) -> dict[str, Any]:
    """The template's arguments, with ``thinking`` and ``enable_thinking`` as Dynamo sets them.

    The body's ``thinking`` wins over the arguments of that name, then over ``enable_thinking``,
    then over the effort.
    """
    args = {name: value for name, value in given.items() if name not in _RESERVED}
    if reasoning_effort is not None:
        args["reasoning_effort"] = reasoning_effort
    wanted = wants_thinking(args, thinking=thinking)
    if wanted is not None:
        args["thinking"] = args["enable_thinking"] = wanted
    return args


def wants_thinking(
    args: Mapping[str, Any], *, reasoning_effort: object = None, thinking: object = None
) -> bool | None:
    """Whether a request wants the model to think, None if it does not say so.

    ``args`` are the template's; the body's ``thinking`` and ``reasoning_effort`` stand beside them.
    """
    kind = thinking.get("type") if isinstance(thinking, Mapping) else thinking
    wanted = kind if isinstance(kind, bool) else {"enabled": True, "disabled": False}.get(str(kind))
    for name in ("thinking", "enable_thinking"):
        if wanted is None and args.get(name) is not None:
            wanted = _truth(args[name])
    effort = args.get("reasoning_effort") if reasoning_effort is None else reasoning_effort
    if wanted is None and effort is not None:
        wanted = effort != "none"
    return wanted


def _truth(value: object) -> bool:
    return value.strip().lower() in _TRUE if isinstance(value, str) else bool(value)


def _until_final_message(text: str, messages: Sequence[Message]) -> str:
    """The prompt up to the end of the last message's content, which the model continues."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list | tuple):
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        content = texts[-1] if texts else None
    final = content if isinstance(content, str) else ""
    start = text.rfind(final.strip()) if final.strip() else -1
    if start < 0:
        raise PromptError(
            "continue_final_message: the text of the last message is not in the rendered prompt; "
            "use a last message with text that the chat template keeps",
            field="continue_final_message",
        )
    # A template may strip the text: then its own end is where the model goes on.
    kept = final.lstrip()
    if not text.startswith(kept, start):
        kept = final.strip()
    return text[: start + len(kept)]


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
        changed["tool_calls"] = list(map(_call, calls))
    return _pick_keys(changed, _MESSAGE_KEYS)


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    picked = _pick_keys(call, _CALL_KEYS)
    if isinstance(picked.get("function"), Mapping):
        picked["function"] = _pick_keys(picked["function"], _CALLED_KEYS)
    return picked


def _fold_reasoning(message: dict[str, Any], *, in_parts: bool) -> None:
    """Put the reasoning as text before the content, for a template without reasoning.

    If there is no content, Dynamo passes a bare string to a template that expects parts, and such
    a template iterates over its letters; that is not imitated.
    """
    reasoning = message.get("reasoning_content")
    thoughts = [reasoning] if isinstance(reasoning, str) else reasoning
    content = message.get("content")
    if not isinstance(thoughts, list | tuple) or not any(thoughts):
        return
    if not isinstance(content, str | None):
        return
    folded = "".join(f"<think>{thought}</think>" for thought in thoughts)
    if in_parts and content:
        message["content"] = [{"type": "text", "text": text} for text in (folded, content)]
    else:
        message["content"] = folded + (content or "")
    del message["reasoning_content"]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    picked = _pick_keys(function, _FUNCTION_KEYS)
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


def _pick_keys(value: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The known keys in Dynamo's order, without nulls."""
    return {key: value[key] for key in keys if value.get(key) is not None}


def _all_text(parts: Sequence[object]) -> bool:
    return bool(parts) and all(
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        for part in parts
    )
