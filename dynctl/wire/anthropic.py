"""Bodies of the Anthropic Messages API: ``POST /v1/messages`` and ``/v1/messages/count_tokens``.

A request is read as the chat that vLLM 0.32 makes of it, so that it has the same tokens. What only
the engine can decide (images, inline system messages that some templates refuse) is named in
``not_modelled``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct, field

from dynctl.base.decode_errors import RequestError
from dynctl.wire.json_body import convert, without_nulls
from dynctl.wire.openai import (
    ChatRequest,
    CommonFields,
    TranslatedChat,
    common_values,
    function_tool,
    read_message,
    with_effort,
)
from router_core import quick_init

_Objects = Annotated[list[dict[str, Any]], Meta(max_length=65_536)]
#: A text that a client adds to each request with a different hash; vLLM leaves it out.
_BILLING: Final = "x-anthropic-billing-header"


class AnthropicBlock(Struct, kw_only=True):
    """One block of a content; other kinds of blocks have more fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Annotated[str | _Objects | None, Meta(title="a string or an array of blocks")] = None


_Content = Annotated[str | list[AnthropicBlock], Meta(title="a string or an array of blocks")]


class AnthropicMessage(Struct):
    role: str
    content: _Content


class AnthropicTool(Struct):
    name: str
    input_schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class AnthropicThinking(Struct):
    type: str


class AnthropicOutput(Struct, frozen=True):
    effort: str | None = None


class MessagesFields(CommonFields, kw_only=True):
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=65_536)]
    system: _Content | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=4096)] | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutput = AnthropicOutput()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(ChatRequest):
    """``POST /v1/messages`` as a chat. ``body`` stays the client's own."""

    prompt_field: ClassVar = "messages"


def parse_messages_request(body: Mapping[str, Any]) -> MessagesRequest:
    """A request of the Messages API; as `parse_chat_request`."""
    document = dict(body)
    fields = convert(without_nulls(document), MessagesFields)
    chat = _MessagesChat()
    if fields.system is not None and (text := _system_text(fields.system)):
        chat.add("system", text)
    for message in fields.messages:
        chat.take(message)
    if fields.thinking is not None and fields.thinking.type == "disabled":
        chat.doubt("thinking that is disabled in a way that depends on its template")
    return MessagesRequest(
        **common_values(document, fields),
        messages=tuple(map(read_message, chat.messages)),
        tools=None if fields.tools is None else tuple(map(_tool, fields.tools)),
        template_args=with_effort(fields.chat_template_kwargs, fields.output_config.effort),
        not_modelled=chat.reason,
    )


class _MessagesChat(TranslatedChat):
    def add(self, role: str, content: Any, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})

    def take(self, message: AnthropicMessage) -> None:
        """Add a message, after the results of tools in it."""
        if message.role not in ("user", "assistant", "system"):
            raise RequestError(
                400, "out_of_range", "messages.role", "expected user, assistant or system"
            )
        if message.role == "system":
            self.doubt("system messages between others as its template allows")
            return
        if isinstance(message.content, str):
            self.add(message.role, message.content)
            return
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for block in message.content:
            self._block(block, message.role, parts, calls)
        more = {"tool_calls": calls} if calls else {}
        if parts or message.role == "assistant":
            content = parts[0]["text"] if len(parts) == 1 else parts or None
            self.add(message.role, content, **more)

    def _block(
        self,
        block: AnthropicBlock,
        role: str,
        parts: list[dict[str, Any]],
        calls: list[dict[str, Any]],
    ) -> None:
        if block.type == "text":
            if block.text:
                parts.append({"type": "text", "text": block.text})
        elif block.type == "tool_use":
            calls.append(self._call(block))
        elif block.type == "tool_result" and role == "user":
            self.add("tool", self._result(block), tool_call_id=block.tool_use_id or "")
        elif block.type not in ("redacted_thinking", "tool_reference"):
            self.doubt(f"a block of type {block.type[:40]}")

    def _call(self, block: AnthropicBlock) -> dict[str, Any]:
        if block.id is None:
            self.doubt("a tool_use block without id")
        function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
        return {"id": block.id or "", "type": "function", "function": function}

    def _result(self, block: AnthropicBlock) -> str:
        if not isinstance(block.content, list):
            return block.content or ""
        texts = []
        for item in block.content:
            if item.get("type") == "text" and isinstance(item.get("text"), str):
                texts.append(item["text"])
            else:
                self.doubt("the result of a tool that has more than text")
        return "\n".join(texts)


def _system_text(content: str | list[AnthropicBlock]) -> str:
    if isinstance(content, str):
        return content
    texts = [block.text for block in content if block.type == "text" and block.text]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    schema = tool.input_schema if "type" in tool.input_schema else None
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {**tool.input_schema, "type": "object"} if schema is None else schema,
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return function_tool({"type": "function", "function": function})
