"""The OpenAI request bodies, as far as routing reads them.

Everything else of a body passes through to the engine untouched, so a field that only engines
understand needs no change here. What is read is checked, since a frontend that forwards a body it
could not tokenize routes blindly.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import RequestError
from dynctl.base.json_fields import describe
from dynctl.wire import nvext as controls
from dynctl.wire.json_body import U32, convert, without_nulls
from dynctl.wire.nvext import NO_NVEXT, NvExt, TokenIds, parse_nvext, read_token_ids, request_id_of
from router_core import quick_init

_MAX_PROMPTS: Final = 4096
#: Choices that vLLM makes of one request.
_MAX_CHOICES: Final = 16_384
#: Bytes of embeddings for a token in an estimate: 4,096 numbers of 16 bits, as base64.
_EMBEDDED_TOKEN: Final = 8192 * 4 // 3
#: Fields of a function that vLLM leaves out where they are not set.
_OPTIONAL: Final = ("strict", "defer_loading")

_Name = Annotated[str, Meta(max_length=512)]
_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Room = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Objects = Annotated[tuple[dict[str, Any], ...], Meta(max_length=4096)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class CommonFields(Struct, kw_only=True):
    """The fields that all bodies share."""

    model: Annotated[_Name, Meta(min_length=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: U32 | None = None
    max_completion_tokens: U32 | None = None
    n: Annotated[int, Meta(ge=1, le=_MAX_CHOICES)] = 1
    user: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None


_Content = Annotated[str | list[Any] | None, Meta(title="a string or an array of parts")]


class ChatMessage(Struct):
    role: str
    content: _Content = None


class ChatFields(CommonFields, kw_only=True):
    """``chat_template_args`` are Dynamo's, ``chat_template_kwargs`` vLLM's; both are accepted."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65_536)]
    tools: _Objects | None = None
    documents: _Objects | None = None
    chat_template_args: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None


_Prompts = Annotated[
    str | list[Any] | None, Meta(title="a string, token ids, or an array of either")
]
_Embeddings = Annotated[
    str | list[str] | None, Meta(title="a base64 string or an array of base64 strings")
]


class CompletionFields(CommonFields, kw_only=True):
    """``prompt_embeds`` are embeddings as base64: prompts before those of ``prompt``."""

    prompt: _Prompts = None
    prompt_embeds: _Embeddings = None


class EmbeddingFields(CommonFields, kw_only=True):
    """``messages``: vLLM renders a chat in place of ``input``."""

    input: _Prompts = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65_536)] | None = None
    encoding_format: str = "float"
    dimensions: Annotated[int, Meta(ge=1, le=65_536)] | None = None


class KvTransferParams(Struct):
    """vLLM's hand-off: what the prefill engine holds, and where a decode engine pulls it."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: str | None = None
    remote_port: Port | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: tuple[U32, ...] | None = None


class EngineFields(Struct):
    """Fields of vLLM and SGLang that only engines read; a frontend passes them through."""

    best_of: Annotated[int, Meta(ge=1, le=128)] = 1
    ignore_eos: bool = False
    return_token_ids: bool = False
    stop: _StopString | Annotated[tuple[_StopString, ...], Meta(max_length=16)] = ()
    cache_salt: str | None = None
    routed_dp_rank: U32 | None = None
    data_parallel_rank: U32 | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: str | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: Room | None = None


R = TypeVar("R", "ChatRequest", "CompletionRequest")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What both kinds of request share.

    ``body`` is the client's own object: pass it on through `nvext.strip_for_engine`, never change
    it. ``model`` is empty where the client named none. ``cache_salt`` is a secret of the client's
    tenant: it goes to engines and into hashes, never into logs or answers. ``max_tokens`` bounds
    the output; ``max_completion_tokens``, which replaced it, wins where both are given.
    ``include_usage`` asks for a last chunk with token counts. ``truncate_prompt_tokens`` (vLLM)
    keeps that many tokens of the prompt, -1 as many as the model takes; ``truncation_side`` is the
    side that is cut.
    """

    body: Mapping[str, Any]
    model: str
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    n: int = 1
    user: str | None = None
    cache_salt: str | None = field(default=None, repr=False)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    nvext: NvExt = NO_NVEXT
    request_id: str | None = None


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(_Common):
    """``POST /v1/chat/completions``. ``template_args`` go to the chat template by name.

    ``messages`` and ``tools`` are as vLLM reads them.

    ``text_only`` is False when a message holds images, audio or other parts whose tokens only the
    engine knows. ``chat_template`` is a template that the request brings along. ``not_modelled``:
    why only the engine can render the request as a chat, None where it can be rendered here.
    """

    prompt_field: ClassVar = "messages"
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    documents: tuple[Mapping[str, Any], ...] | None = None
    template_args: Mapping[str, Any]
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    text_only: bool = True
    not_modelled: str | None = None


class TranslatedChat:
    """The messages of a request of another API as those of a chat. ``reason``: why the engine may
    render other ones, if so."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.reason: str | None = None

    def doubt(self, what: str) -> None:
        """The engine renders ``what``; the first reason counts."""
        self.reason = self.reason or f"cache overlap not modelled: the engine renders {what}"


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(_Common):
    """``POST /v1/completions``. Each prompt is text or token ids; there is at least one.

    An engine answers several prompts in one response, so the request goes to one worker: the tokens
    and the cached blocks of all prompts count together.

    ``not_modelled``: why only the engine can read its prompts; those are then the texts in it, or
    empty. ``unread_tokens``: an estimate of what is not text.
    """

    prompt_field: ClassVar = "prompt"
    prompts: tuple[str | Sequence[int], ...]
    not_modelled: str | None = None
    unread_tokens: int = 0


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(CompletionRequest):
    """``POST /v1/embeddings``. Its inputs are the ``prompts``; it has no output tokens.

    ``dimensions`` None: as many as the model has.
    """

    prompt_field: ClassVar = "input"
    encoding_format: str = "float"
    dimensions: int | None = None


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """A chat request from its decoded body. Raises RequestError (400)."""
    document = dict(body)
    fields = convert(without_nulls(document), ChatFields)
    with_args = fields.chat_template_args or fields.chat_template_kwargs or fields.reasoning_effort
    add_prompt = fields.add_generation_prompt
    if add_prompt is None:
        add_prompt = not fields.continue_final_message
    if fields.continue_final_message and add_prompt:
        raise RequestError(
            400,
            "conflict",
            "continue_final_message",
            "cannot be true together with add_generation_prompt",
        )
    return ChatRequest(
        **common_values(document, fields),
        messages=tuple(map(read_message, document["messages"])),
        tools=None if fields.tools is None else tuple(map(function_tool, fields.tools)),
        documents=fields.documents,
        template_args=_template_args(fields) if with_args else {},
        chat_template=fields.chat_template,
        add_generation_prompt=add_prompt,
        continue_final_message=fields.continue_final_message,
        text_only=_text_only(fields.messages),
    )


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """A completion request; as `parse_chat_request`."""
    document = dict(body)
    fields = convert(_with_first_prompt(document, "prompt"), CompletionFields)
    values = common_values(document, fields)
    if fields.prompt_embeds is None:
        if fields.prompt is None:
            raise RequestError(400, "missing_field", "prompt", "is required")
        return CompletionRequest(**values, prompts=_prompts(document["prompt"]))
    embeds = fields.prompt_embeds
    if isinstance(embeds, str):
        embeds = [embeds]
    _check_prompts(embeds, "prompt_embeds")
    prompts = _prompts(document["prompt"]) if fields.prompt else ()
    return CompletionRequest(
        **values,
        prompts=(*("" for _ in embeds), *prompts) or ("",),
        not_modelled="cache overlap not modelled: the prompt has embeddings",
        unread_tokens=sum(map(len, embeds)) // _EMBEDDED_TOKEN,
    )


def parse_embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """A request for embeddings; as `parse_chat_request`. It is never streamed."""
    document = dict(body)
    fields = convert(_with_first_prompt(document, "input"), EmbeddingFields)
    prompts, not_modelled = _embedding_prompts(fields, document.get("input"))
    return EmbeddingRequest(
        **{**common_values(document, fields), "stream": False, "max_tokens": None},
        prompts=prompts,
        not_modelled=not_modelled,
        encoding_format=fields.encoding_format,
        dimensions=fields.dimensions,
    )


def parse_any_request(body: Mapping[str, Any]) -> ChatRequest | CompletionRequest:
    """The request of a body whose endpoint is not known: a chat has ``messages``, a request for
    embeddings ``input``, a completion ``prompt``. A body of another API, with the same fields, is
    read as one of these. Raises RequestError."""
    if "messages" in body:
        return parse_chat_request(body)
    if "input" in body and "prompt" not in body:
        return parse_embedding_request(body)
    return parse_completion_request(body)


def apply_headers(request: R, headers: Mapping[str, str]) -> R:
    """The request with the pins and the id that its headers carry; raises RequestError (400)."""
    return replace(
        request,
        nvext=controls.apply_headers(request.nvext, headers),
        request_id=request_id_of(headers),
    )


def common_values(document: dict[str, Any], fields: CommonFields) -> dict[str, Any]:
    """The values of a request that come from the shared fields of its body."""
    most = fields.max_completion_tokens
    nvext = NO_NVEXT if document.get("nvext") is None else parse_nvext(document["nvext"])
    return {
        "body": document,
        "model": fields.model or "",
        "stream": fields.stream,
        "include_usage": fields.stream_options.include_usage or False,
        "max_tokens": fields.max_tokens if most is None else most,
        "n": fields.n,
        "user": fields.user,
        "add_special_tokens": fields.add_special_tokens,
        "truncate_prompt_tokens": fields.truncate_prompt_tokens,
        "truncation_side": fields.truncation_side,
        # Engines receive the same: the body's own salt wins over Dynamo's control.
        "cache_salt": fields.cache_salt or nvext.cache_salt or None,
        "nvext": nvext,
    }


def _text_only(messages: list[ChatMessage]) -> bool:
    """Whether all content is text. Raises RequestError for a part that no engine accepts: a text
    part without text, or something else than an object or a string."""
    text_only = True
    for i, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for j, part in enumerate(message.content):
            if not isinstance(part, dict):
                text_only = False
                if not isinstance(part, str):
                    raise _wrong_type(f"messages[{i}].content[{j}]", "an object", part)
            elif part.get("type") != "text":
                text_only = False
            elif not isinstance(part.get("text"), str):
                raise _wrong_type(f"messages[{i}].content[{j}].text", "a string", part.get("text"))
    return text_only


def _wrong_type(field: str, expected: str, value: Any) -> RequestError:
    problem = f"expected {expected}, got {describe(value, private=True)}"
    return RequestError(400, "wrong_type", field, problem)


def _template_args(fields: ChatFields) -> Mapping[str, Any]:
    both = {**fields.chat_template_args, **fields.chat_template_kwargs}
    for key, value in fields.chat_template_args.items():
        if both[key] != value:
            raise RequestError(
                400,
                "conflict",
                f"chat_template_kwargs.{key[:40]}",
                "has another value in chat_template_args",
            )
    return with_effort(both, fields.reasoning_effort)


def with_effort(arguments: Mapping[str, Any], effort: str | None) -> Mapping[str, Any]:
    """Template arguments with the effort of reasoning, as in vLLM: the field replaces an argument
    of that name and decides on thinking."""
    if effort is None or effort == "auto":
        return arguments
    return {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}


def read_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without content has null, and one with an empty list of tool calls has none."""
    if "content" in message and message.get("tool_calls") != []:
        return message
    read = {"role": message["role"], "content": None, **message}
    if read.get("tool_calls") == []:
        del read["tool_calls"]
    return read


def function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields and the order in which vLLM writes it for the template; other fields
    are dropped, and two are null where missing. Anything else than a function is unchanged."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    kept = {key: function.get(key) for key in ("name", "description", "parameters")}
    kept |= {key: function[key] for key in _OPTIONAL if function.get(key) is not None}
    read = {"type": tool.get("type", "function"), "function": kept}
    if tool.get("defer_loading") is not None:
        kept.setdefault("defer_loading", tool["defer_loading"])
        read["defer_loading"] = tool["defer_loading"]
    return read


def _with_first_prompt(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields that are given, with the first prompt alone: a list of any values needs no check,
    and a copy of millions takes time."""
    fields = without_nulls(document)
    prompts = fields.get(name)
    if isinstance(prompts, list):
        fields[name] = prompts[:1]
    return fields


def _prompts(value: str | list[Any], name: str = "prompt") -> tuple[str | Sequence[int], ...]:
    """The four forms that OpenAI allows: text, token ids, and a batch of either."""
    if isinstance(value, str):
        return (value,)
    if not value or not isinstance(value[0], str | list):
        return (read_token_ids(value, name),)
    _check_prompts(value, name)
    return tuple(
        item if isinstance(item, str) else _tokens(item, f"{name}[{i}]")
        for i, item in enumerate(value)
    )


def _tokens(item: Any, path: str) -> Sequence[int]:
    """The token ids of one prompt of several."""
    return read_token_ids(item, path) if isinstance(item, list) else convert(item, TokenIds, path)


def _check_prompts(prompts: list[Any], name: str) -> None:
    """Raise RequestError for more prompts than the maximum."""
    if len(prompts) > _MAX_PROMPTS:
        problem = f"expected at most {_MAX_PROMPTS} entries, got {len(prompts)}"
        raise RequestError(400, "out_of_range", name, problem)


def _text_of_messages(messages: list[ChatMessage] | None) -> str:
    if messages is None:
        raise RequestError(400, "missing_field", "input", "is required")
    _text_only(messages)
    contents = (message.content for message in messages)
    return "".join(content for content in contents if isinstance(content, str))


def _embedding_prompts(
    fields: EmbeddingFields, value: str | list[Any] | None
) -> tuple[tuple[str | Sequence[int], ...], str | None]:
    """The inputs of a request for embeddings, and why only the engine can read them, if so."""
    if value is None:
        text = _text_of_messages(fields.messages)
        return (text,), "cache overlap not modelled: the engine renders the messages"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        # SGLang: objects with a text, an image or both.
        _check_prompts(value, "input")
        several = tuple(str(item.get("text") or "") for item in value if isinstance(item, dict))
        return several, "cache overlap not modelled: the input has more than text"
    return _prompts(value, "input"), None


_USAGE: Final = b'"usage"'
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})(?!\d)')
_CACHED_TOKENS: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})(?!\d)')
_OUTPUT_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})(?!\d)')
#: Anthropic's input tokens are without these.
_READ_TOKENS: Final = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,9})(?!\d)')
_CREATED_TOKENS: Final = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,9})(?!\d)')


def reported_usage(end: bytes) -> tuple[int | None, int | None, int | None]:
    """(prompt tokens, reused prompt tokens, output tokens) of the last ``usage`` in the end of a
    response.

    For a body and for a stream, whose last event before ``[DONE]`` has it; None where it is not
    reported, or cannot be: more reused tokens than the prompt has. Generated text cannot look like
    it: its quotes are escaped.
    """
    begin = end.rfind(_USAGE)
    if begin < 0:
        return None, None, None
    forms = (_PROMPT_TOKENS, _CACHED_TOKENS, _OUTPUT_TOKENS, _READ_TOKENS, _CREATED_TOKENS)
    matches = (form.search(end, begin) for form in forms)
    prompt, cached, output, read, created = (
        None if match is None else int(match[1]) for match in matches
    )
    if read is not None and prompt is not None and cached is None:
        return prompt + read + (created or 0), read, output
    if cached is not None and prompt is not None and cached > prompt:
        cached = None
    return prompt, cached, output


#: What the bytes of a response have that reports reused tokens.
_REUSE: Final = re.compile(rb'"(?:cached_tokens|cache_read_|cache_creation_)')
#: Objects of a response that may have its usage: itself, and what an event of a stream carries.
_CARRIERS: Final = ("response", "message")
#: Anthropic's numbers of reused and stored tokens, which its ``input_tokens`` are without.
_BESIDE_INPUT: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")


def without_reuse(body: bytes) -> bytes:
    """A response, or the data of one event of a stream, without numbers of reused tokens; bytes
    that have none, and bytes that are not a JSON object, stay as they are."""
    return body if _REUSE.search(body) is None else with_reuse(body, None)


def with_reuse(body: bytes, cached: int | None) -> bytes:
    """A response, or the data of one event of a stream, whose prompt has ``cached`` reused tokens,
    whatever it reports; None: it reports no number. Bytes that are not a JSON object stay as they
    are."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if not isinstance(document, dict):
        return body
    for holder in (document, *map(document.get, _CARRIERS)):
        if isinstance(holder, dict):
            usage = holder.get("usage")
            _drop_reuse(usage)
            _drop_reuse(holder.get("sglext"))
            if isinstance(usage, dict) and cached is not None:
                _set_reuse(usage, cached)
    return msgspec.json.encode(document)


def _set_reuse(usage: dict[str, Any], cached: int) -> None:
    """Add the number of reused tokens to a usage of OpenAI's or Anthropic's form that has none."""
    name = "prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"
    tokens = usage.get("input_tokens")
    if isinstance(tokens, int) and "total_tokens" not in usage:  # Anthropic's
        usage |= {"input_tokens": max(0, tokens - cached), "cache_read_input_tokens": cached}
    elif "prompt_tokens" in usage or tokens is not None:
        usage[name] = {**(usage.get(name) or {}), "cached_tokens": cached}


def _drop_reuse(usage: Any) -> None:
    """Remove the numbers of reused tokens from a usage of OpenAI's or Anthropic's form, or from
    SGLang's extension of a response."""
    if not isinstance(usage, dict):
        return
    beside = [usage.pop(name, None) for name in _BESIDE_INPUT]
    more = sum(number for number in beside if isinstance(number, int))
    if more and isinstance(usage.get("input_tokens"), int):
        usage["input_tokens"] += more
    usage.pop("cache_creation", None)
    usage.pop("cached_tokens_details", None)
    for details in [usage, *usage.values()]:
        if isinstance(details, dict):
            details.pop("cached_tokens", None)
            details.pop("cached_tokens_details", None)
