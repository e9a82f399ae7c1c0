"""Bodies of the OpenAI Responses API: ``POST /v1/responses``.

A request is read as the chat that vLLM 0.32 makes of it, so that it has the same tokens. What only
the engine can decide (images, reasoning of earlier turns) is named in ``not_modelled``. Responses
are not kept, so a request that refers to an earlier one is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct, field

from dynctl.base.decode_errors import RequestError
from dynctl.wire.json_body import U32, convert, without_nulls
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

#: Fields whose effect needs a response that one engine keeps.
_STATEFUL: Final = {
    "previous_response_id": "send the whole conversation in input",
    "conversation": "send the whole conversation in input",
    "background": "wait for the response, or stream it",
}


class ResponsesItem(Struct, kw_only=True):
    """One item of an input; a message has no type, or ``message``."""

    type: str | None = None
    role: str | None = None
    content: Annotated[
        str | list[dict[str, Any]] | None, Meta(title="a string or an array of parts")
    ] = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: Any = None


class ResponsesTool(Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ResponsesReasoning(Struct, frozen=True):
    effort: str | None = None


class ResponsesFields(CommonFields, kw_only=True):
    input: Annotated[
        str | Annotated[list[ResponsesItem], Meta(min_length=1, max_length=65_536)],
        Meta(title="a string or an array of items"),
    ]
    instructions: str | None = None
    max_output_tokens: U32 | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=4096)] = field(default_factory=list)
    reasoning: ResponsesReasoning = ResponsesReasoning()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """``POST /v1/responses`` as a chat. ``body`` stays the client's own."""

    prompt_field: ClassVar = "input"


def parse_responses_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """A request of the Responses API; as `parse_chat_request`."""
    document = dict(body)
    _check_stateless(document)
    fields = convert(without_nulls(document), ResponsesFields)
    chat = _ResponsesChat()
    if fields.instructions:
        chat.messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        chat.messages.append({"role": "user", "content": fields.input})
    else:
        for item in fields.input:
            chat.take(item)
        if fields.input[-1].status in ("in_progress", "incomplete"):
            chat.doubt("a last message that is continued")
    if document.get("prompt") is not None:
        chat.doubt("a stored prompt")
    tools = [chat.tool(tool) for tool in fields.tools]
    values = common_values(document, fields)
    values["max_tokens"] = fields.max_output_tokens
    if document.get("truncation", "disabled") != "disabled":
        values["truncate_prompt_tokens"] = -1
    return ResponsesRequest(
        **values,
        messages=tuple(map(read_message, chat.messages)),
        tools=tuple(tools) or None,
        template_args=with_effort(fields.chat_template_kwargs, fields.reasoning.effort),
        not_modelled=chat.reason,
    )


def _check_stateless(document: Mapping[str, Any]) -> None:
    for name, instead in _STATEFUL.items():
        if document.get(name):
            problem = f"is not supported, since responses are not kept: {instead}"
            raise RequestError(400, "not_supported", name, problem)


class _ResponsesChat(TranslatedChat):
    def take(self, item: ResponsesItem) -> None:
        """Add an item. Calls and the text of the assistant that follow each other are one
        message."""
        kind = item.type or "message"
        if kind == "message" and item.role == "assistant":
            self._assistant(item)
        elif kind == "message":
            self.messages.append({"role": item.role or "user", "content": self._content(item)})
        elif kind == "function_call" and item.name and not item.namespace:
            self._call(item)
        elif kind == "function_call_output" and isinstance(item.output, str):
            self.messages.append(
                {"role": "tool", "content": item.output, "tool_call_id": item.call_id or ""}
            )
        else:
            self.doubt(f"an item of type {kind[:40]}")

    def _call(self, item: ResponsesItem) -> None:
        call = {
            "id": item.call_id or "",
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments or "{}"},
        }
        last = self._open_turn()
        if last is None:
            self.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)

    def tool(self, tool: ResponsesTool) -> dict[str, Any]:
        if tool.type != "function" or tool.name is None:
            self.doubt(f"a tool of type {tool.type[:40]}")
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
            "defer_loading": tool.defer_loading,
        }
        return function_tool({"type": "function", "function": function})

    def _open_turn(self) -> dict[str, Any] | None:
        """The last message, if it is the assistant's."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _assistant(self, item: ResponsesItem) -> None:
        text = item.content
        if isinstance(text, list):
            if len(text) != 1:
                self.doubt("a message of the assistant that has not exactly one part")
            text = str(text[0].get("text") or "") if text else ""
        last = self._open_turn()
        if last is not None and last.get("content") is None:
            last["content"] = text
        else:
            self.messages.append({"role": "assistant", "content": text})

    def _content(self, item: ResponsesItem) -> str | list[dict[str, Any]]:
        if not isinstance(item.content, list):
            return item.content or ""
        parts = []
        for part in item.content:
            text = part.get("text")
            if part.get("type") in ("input_text", "text") and isinstance(text, str):
                parts.append({"type": "text", "text": text})
            else:
                self.doubt("an input that has more than text")
        return parts
