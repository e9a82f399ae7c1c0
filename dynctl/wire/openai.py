"""The OpenAI request bodies, as far as routing reads them.

Everything else of a body passes through to the engine untouched, so a field that only engines
understand needs no change here. What is read is checked, since a frontend that forwards a body it
could not tokenize routes blindly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.base.json_fields import (
    U32_MAX,
    read_array,
    read_flag,
    read_integer,
    read_object,
    read_text,
    read_tokens,
    wrong_type,
)
from dynctl.wire import nvext as controls
from dynctl.wire.nvext import NO_NVEXT, NvExt, parse_nvext, request_id_of

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
_MAX_MODEL: Final = 512
_MAX_MESSAGES: Final = 65_536
_MAX_TOOLS: Final = 4096
_MAX_PROMPTS: Final = 4096
_MAX_CHOICES: Final = 128

R = TypeVar("R", "ChatRequest", "CompletionRequest")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What both kinds of request share.

    ``body`` is the client's own object: pass it on through `nvext.strip_for_engine`, never change
    it. ``max_tokens`` bounds the output; ``max_completion_tokens``, which replaced it, wins where
    both are given. ``include_usage`` asks for a last chunk with token counts.
    """

    body: Mapping[str, Any]
    model: str
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    n: int = 1
    user: str | None = None
    nvext: NvExt = NO_NVEXT
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(_Common):
    """``POST /v1/chat/completions``. ``template_args`` go to the chat template by name.

    ``text_only`` is False when a message holds images, audio or other parts whose tokens only the
    engine knows. ``chat_template`` is a template that the request brings along.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    documents: tuple[Mapping[str, Any], ...] | None = None
    template_args: Mapping[str, Any]
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    text_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(_Common):
    """``POST /v1/completions``. Each prompt is text or token ids; there is at least one.

    An engine answers several prompts in one response, so the request goes to one worker; it is
    routed by the first prompt, the longest common prefix of a batch being its beginning.
    """

    prompts: tuple[str | tuple[int, ...], ...]


def parse_chat_request(
    body: bytes | Mapping[str, Any], *, max_bytes: int = MAX_BODY_BYTES
) -> ChatRequest:
    """A chat request from its bytes or an already decoded object.

    Raises RequestError: 413 over ``max_bytes``, 400 for anything that is not a chat request.
    """
    found = _decode(body, max_bytes)
    common = _common(found)
    messages, text_only = _messages(_required(found, "messages"))
    add_prompt = _flag(found, "add_generation_prompt", default=True)
    continues = _flag(found, "continue_final_message", default=False)
    if continues and found.get("add_generation_prompt") is None:
        add_prompt = False
    if continues and add_prompt:
        raise RequestError(
            400,
            "conflict",
            "continue_final_message",
            "cannot be true together with add_generation_prompt",
        )
    template = found.get("chat_template")
    return ChatRequest(
        **common,
        messages=messages,
        tools=_objects(found, "tools", _MAX_TOOLS),
        documents=_objects(found, "documents", _MAX_TOOLS),
        template_args=_template_args(found),
        chat_template=None
        if template is None
        else read_text(template, "chat_template", longest=max_bytes),
        add_generation_prompt=add_prompt,
        continue_final_message=continues,
        text_only=text_only,
    )


def parse_completion_request(
    body: bytes | Mapping[str, Any], *, max_bytes: int = MAX_BODY_BYTES
) -> CompletionRequest:
    """A completion request; as `parse_chat_request`."""
    found = _decode(body, max_bytes)
    common = _common(found)
    return CompletionRequest(**common, prompts=_prompts(_required(found, "prompt")))


def apply_headers(request: R, headers: Mapping[str, str]) -> R:
    """The request with the pins and the id that its headers carry; raises RequestError (400)."""
    return replace(
        request,
        nvext=controls.apply_headers(request.nvext, headers),
        request_id=request_id_of(headers),
    )


def _decode(body: bytes | Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    if isinstance(body, Mapping):
        return dict(body)
    if len(body) > max_bytes:
        raise RequestError(
            413, "body_too_large", None, f"the body has {len(body)} bytes, at most {max_bytes}"
        )
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(400, "invalid_json", None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(400, "invalid_json", None, "the body is nested too deeply") from None
    return read_object(found, None, private=True)


def _required(found: Mapping[str, Any], name: str) -> Any:
    value = found.get(name)
    if value is None:
        raise RequestError(400, "missing_field", name, "is required")
    return value


def _flag(found: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = found.get(name)
    return default if value is None else read_flag(value, name)


def _common(found: dict[str, Any]) -> dict[str, Any]:
    model = read_text(_required(found, "model"), "model", longest=_MAX_MODEL)
    if not model:
        raise RequestError(400, "out_of_range", "model", "expected a model's name, got ''")
    options = found.get("stream_options")
    include_usage = False
    if options is not None:
        given = read_object(options, "stream_options").get("include_usage")
        if given is not None:
            include_usage = read_flag(given, "stream_options.include_usage")
    limits = {
        name: read_integer(found[name], name, 0, U32_MAX)
        for name in ("max_tokens", "max_completion_tokens")
        if found.get(name) is not None
    }
    n, user = found.get("n"), found.get("user")
    return {
        "body": found,
        "model": model,
        "stream": _flag(found, "stream", default=False),
        "include_usage": include_usage,
        "max_tokens": limits.get("max_completion_tokens", limits.get("max_tokens")),
        "n": 1 if n is None else read_integer(n, "n", 1, _MAX_CHOICES),
        "user": None if user is None else read_text(user, "user", longest=_MAX_MODEL),
        "nvext": parse_nvext(found.get("nvext")),
    }


def _messages(value: Any) -> tuple[tuple[Mapping[str, Any], ...], bool]:
    """The messages, and whether text is all that they hold."""
    items = read_array(value, "messages", longest=_MAX_MESSAGES, private=True)
    if not items:
        raise RequestError(400, "out_of_range", "messages", "expected at least one message")
    text_only = True
    for i, item in enumerate(items):
        path = f"messages[{i}]"
        message = read_object(item, path, private=True)
        role = message.get("role")
        if role is None:
            raise RequestError(400, "missing_field", f"{path}.role", "is required")
        if not isinstance(role, str):
            raise wrong_type(f"{path}.role", "a string", role)
        content = message.get("content")
        if isinstance(content, list):
            text_only &= _only_text(content, f"{path}.content")
        elif content is not None and not isinstance(content, str):
            raise wrong_type(
                f"{path}.content", "a string or an array of parts", content, private=True
            )
    return tuple(items), text_only


def _only_text(parts: list[Any], path: str) -> bool:
    only_text = True
    for i, item in enumerate(parts):
        part = read_object(item, f"{path}[{i}]", private=True)
        kind = part.get("type")
        if not isinstance(kind, str):
            raise wrong_type(f"{path}[{i}].type", "a string", kind)
        if kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise wrong_type(f"{path}[{i}].text", "a string", text, private=True)
        else:
            only_text = False
    return only_text


def _objects(
    found: Mapping[str, Any], name: str, longest: int
) -> tuple[Mapping[str, Any], ...] | None:
    value = found.get(name)
    if value is None:
        return None
    items = read_array(value, name, longest=longest, private=True)
    return tuple(read_object(item, f"{name}[{i}]", private=True) for i, item in enumerate(items))


def _template_args(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM says ``chat_template_kwargs``, Dynamo ``chat_template_args``; both are accepted."""
    merged: dict[str, Any] = {}
    for name in ("chat_template_args", "chat_template_kwargs"):
        value = found.get(name)
        if value is None:
            continue
        for key, item in read_object(value, name).items():
            if key in merged and merged[key] != item:
                raise RequestError(
                    400,
                    "conflict",
                    f"{name}.{key[:40]}",
                    "has another value in chat_template_args",
                )
            merged[key] = item
    return merged


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """The four forms that OpenAI allows: text, token ids, and a batch of either."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type(
            "prompt", "a string, token ids, or an array of either", value, private=True
        )
    if not value:
        raise RequestError(400, "out_of_range", "prompt", "expected at least one prompt or token")
    if not isinstance(value[0], str | list):
        return (_prompt_tokens(value, "prompt"),)
    batch: list[str | tuple[int, ...]] = []
    for i, item in enumerate(read_array(value, "prompt", longest=_MAX_PROMPTS)):
        if isinstance(item, str):
            batch.append(item)
        else:
            batch.append(_prompt_tokens(item, f"prompt[{i}]"))
    return tuple(batch)


def _prompt_tokens(value: Any, path: str) -> tuple[int, ...]:
    return read_tokens(value, path, longest=controls.MAX_TOKENS_IN_REQUEST)
