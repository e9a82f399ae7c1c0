"""What a client asked for: OpenAI bodies checked field by field, plus vLLM's and SGLang's extras.

Unknown fields are ignored, as real engines do. Every refusal is an ApiError that names the field,
shows what kind of value came and says what was expected; prompt text never appears in it.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.handoff import RemoteKv
from dynctl.simulation.engine.scheduler import FinishReason
from dynctl.tokenization import ModelTokenizer, PromptError, TemplateError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
_INLINE_BODY_BYTES = 32 * 1024
_U32 = 0xFFFF_FFFF
_Parsed = TypeVar("_Parsed")
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=_U32)]]


class ApiError(Exception):
    """A refusal in OpenAI's shape: HTTP status, message, the field it is about, and a type."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, type: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.type = type or ("BadRequestError" if status < 500 else "ServiceUnavailableError")

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": str(self),
                    "type": self.type,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


@dataclass(frozen=True)
class Generate:
    """A checked generation request. `room` and `hold_for_pull` are the prefill sides of the two
    hand-offs, `remote_kv` is the decode side of either."""

    chat: bool
    model: str
    lora: str | None
    prompt: list[int]
    max_tokens: int
    finish_as: FinishReason
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    cache_salt: str | None
    dp_rank: int | None
    remote_kv: RemoteKv | None
    hold_for_pull: bool
    room: int | None


class Fields:
    """Typed access to a JSON object; ApiError names the full path of a wrong field."""

    def __init__(self, plain: Mapping[str, Any], path: str = "") -> None:
        self.plain = plain
        self.path = path

    def fail(self, name: str, expected: str) -> ApiError:
        value = self.plain.get(name)
        where = self.path + name
        return ApiError(400, f"{where} is {kind_of(value)}; expected {expected}", param=where)

    def text(self, name: str) -> str | None:
        value = self.plain.get(name)
        if value is not None and not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.plain.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return default if value is None else value

    def integer(self, name: str, minimum: int, maximum: int) -> int | None:
        value = self.plain.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(name, "a whole number")
        if not minimum <= value <= maximum:
            where = self.path + name
            raise ApiError(400, f"{where} is {value}; expected {minimum}..{maximum}", param=where)
        return value

    def mapping(self, name: str) -> "Fields | None":
        value = self.plain.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return Fields(value, f"{self.path}{name}.")

    def token_ids(self, name: str) -> list[int]:
        value = self.plain.get(name)
        tokens = _as_token_ids(value)
        if tokens is None:
            raise self.fail(name, "a list of token ids, whole numbers 0..4294967295")
        return tokens


async def off_loop_if_long(raw: bytes, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    """`parse(raw)`, in a thread for a long body: tokenizing it inline would stop every other
    stream for the milliseconds that it takes."""
    if len(raw) <= _INLINE_BODY_BYTES:
        return parse(raw)
    return await asyncio.to_thread(parse, raw)


def decode_body(raw: bytes) -> Fields:
    """The request's JSON object; ApiError 400 when it is not one."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {kind_of(body)}; expected a JSON object")
    return Fields(body)


def parse_generate(
    body: Fields,
    headers: Mapping[str, str],
    config: EngineConfig,
    tokenizer: ModelTokenizer,
    *,
    chat: bool,
) -> Generate:
    """Check a /v1/chat/completions (`chat`) or /v1/completions body; raises ApiError."""
    lora = check_model(body, config, required=True)
    _refuse_more_than_one(body)
    stop = _stop_strings(body)
    stream_options = body.mapping("stream_options")
    stream = body.boolean("stream")
    if stream_options is not None and not stream:
        raise ApiError(
            400, "stream_options is only allowed with stream: true", param="stream_options"
        )
    asked = body.integer("max_tokens", 1, _U32)
    if chat:
        asked = body.integer("max_completion_tokens", 1, _U32) or asked
    ignore_eos = body.boolean("ignore_eos")
    dp_rank = _dp_rank(body, headers, config)
    remote_kv, hold_for_pull, room = _handoff(body, config)
    if room is not None:
        dp_rank = room % config.data_parallel_size
    salt = body.text("cache_salt")

    prompt_field = "messages" if chat else "prompt"
    prompt = chat_tokens(body, tokenizer) if chat else _completion_tokens(body, tokenizer)
    if not prompt:
        raise ApiError(400, f"{prompt_field} holds no tokens", param=prompt_field)
    room_left = config.context_length - len(prompt)
    if room_left < 1 or (asked or 1) > room_left:
        total = len(prompt) + (asked or 1)
        raise ApiError(
            400,
            f"This model's maximum context length is {config.context_length} tokens. However, you "
            f"requested {total} tokens ({len(prompt)} in {prompt_field}, {asked or 1} in the "
            f"completion). Shorten {prompt_field} or lower max_tokens.",
            param=prompt_field if room_left < 1 else "max_tokens",
        )
    if room is not None:
        asked = 1  # SGLang's prefill side ignores the length: it only fills the cache
    if asked:
        max_tokens, finish_as = asked, "length"
    elif ignore_eos:
        max_tokens, finish_as = room_left, "length"
    else:
        max_tokens, finish_as = min(config.default_output_tokens, room_left), "stop"
    return Generate(
        chat=chat,
        model=lora or config.model,
        lora=lora,
        prompt=prompt,
        max_tokens=max_tokens,
        finish_as=finish_as,  # type: ignore[arg-type]
        stream=stream,
        include_usage=stream_options is not None and stream_options.boolean("include_usage"),
        stop=stop,
        cache_salt=salt,
        dp_rank=dp_rank,
        remote_kv=remote_kv,
        hold_for_pull=hold_for_pull,
        room=room,
    )


def check_model(body: Fields, config: EngineConfig, *, required: bool) -> str | None:
    """The LoRA adapter that `model` names, None for the base model; ApiError 404 for others."""
    model = body.text("model")
    if model is None:
        if required:
            raise ApiError(400, f"model is missing; expected {config.model!r}", param="model")
        return None
    if model == config.model:
        return None
    if model in config.lora:
        return model
    served = ", ".join((config.model, *config.lora))
    raise ApiError(
        404,
        f"The model `{model[:200]}` does not exist; this engine serves {served}",
        param="model",
        type="NotFoundError",
    )


def chat_tokens(body: Fields, tokenizer: ModelTokenizer) -> list[int]:
    """Tokens of `messages` in the model's chat template, with `tools` and template arguments."""
    raw = body.plain.get("messages")
    if not isinstance(raw, list) or not raw:
        raise body.fail("messages", "a non-empty list of messages")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(raw)]
    tools = body.plain.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise body.fail("tools", "a list of objects")
    arguments = body.mapping("chat_template_kwargs")
    try:
        return tokenizer.encode_chat(
            messages,
            tools=tools or None,
            add_generation_prompt=body.boolean("add_generation_prompt", True),
            template_kwargs=arguments.plain if arguments else None,
        )
    except PromptError as error:
        raise ApiError(400, str(error), param=error.field) from None
    except TemplateError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None


def prompt_tokens(text: str, tokenizer: ModelTokenizer) -> list[int]:
    """Tokens of a plain prompt."""
    try:
        return tokenizer.encode_prompt(text)
    except PromptError as error:
        raise ApiError(400, str(error), param="prompt") from None


def _message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ApiError(400, f"{where} is {kind_of(item)}; expected an object", param=where)
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(
            400, f"{where}.role is {kind_of(role)}; expected a role's name", param=f"{where}.role"
        )
    content = item.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ApiError(
            400,
            f"{where}.content is {kind_of(content)}; expected a string or a list of parts",
            param=f"{where}.content",
        )
    return item


def _completion_tokens(body: Fields, tokenizer: ModelTokenizer) -> list[int]:
    prompt = body.plain.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return prompt_tokens(prompt, tokenizer)
    tokens = _as_token_ids(prompt)
    if tokens is not None:
        return tokens
    if isinstance(prompt, list) and prompt and all(isinstance(p, str | list) for p in prompt):
        raise ApiError(
            400, f"prompt holds {len(prompt)} prompts; expected one a request", param="prompt"
        )
    raise body.fail("prompt", "a string or a list of token ids")


def _as_token_ids(value: object) -> list[int] | None:
    if not isinstance(value, list):
        return None
    try:
        return msgspec.convert(value, _TokenIds)  # a loop in C: prompts have thousands
    except msgspec.ValidationError:
        return None


def _refuse_more_than_one(body: Fields) -> None:
    for name in ("n", "best_of"):
        count = body.integer(name, 1, 128)
        if count is not None and count != 1:
            raise ApiError(400, f"{name} is {count}; this engine makes one choice", param=name)


def _stop_strings(body: Fields) -> tuple[str, ...]:
    stop = body.plain.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)):
        raise body.fail("stop", "a non-empty string or a list of them")
    if len(stops) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_CHARS for s in stops):
        raise ApiError(
            400,
            f"stop: expected at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters",
            param="stop",
        )
    return tuple(stops)


def _dp_rank(body: Fields, headers: Mapping[str, str], config: EngineConfig) -> int | None:
    last = config.data_parallel_size - 1
    header = headers.get("X-data-parallel-rank")  # vLLM's way; the fields are SGLang's
    if header is not None:
        if not (header.isascii() and header.isdigit() and int(header) <= last):
            raise ApiError(
                400,
                f"header X-data-parallel-rank is {header[:20]!r}; expected 0..{last}",
                param="X-data-parallel-rank",
            )
        return int(header)
    for name in ("routed_dp_rank", "data_parallel_rank"):
        rank = body.integer(name, 0, last)
        if rank is not None:
            return rank
    return None


def _handoff(body: Fields, config: EngineConfig) -> tuple[RemoteKv | None, bool, int | None]:
    """(what to pull, keep blocks for a puller, bootstrap room to serve)."""
    params = body.mapping("kv_transfer_params")
    bootstrap_room = body.integer("bootstrap_room", 0, 2**63 - 1)
    if params is not None and bootstrap_room is not None:
        raise ApiError(
            400,
            "kv_transfer_params and bootstrap_room are two kinds of hand-off; send one",
            param="bootstrap_room",
        )
    if bootstrap_room is not None:
        return _bootstrap(body, bootstrap_room, config)
    remote: RemoteKv | None = None
    hold = False
    if params is not None:
        hold = params.boolean("do_remote_decode")
        if params.boolean("do_remote_prefill"):
            remote = _remote_kv(params)
    if hold and config.role == "decode":
        raise _wrong_role(config, "kv_transfer_params.do_remote_decode", "prefill")
    if remote is not None and config.role == "prefill":
        raise _wrong_role(config, "kv_transfer_params.do_remote_prefill", "decode")
    if config.role == "decode" and remote is None and not config.can_prefill:
        raise ApiError(
            400,
            f"engine {config.name} is a decode engine that cannot prefill; expected "
            "kv_transfer_params with do_remote_prefill, or a bootstrap_room",
            param="kv_transfer_params",
        )
    return remote, hold, None


def _bootstrap(
    body: Fields, room: int, config: EngineConfig
) -> tuple[RemoteKv | None, bool, int | None]:
    host, port = body.text("bootstrap_host"), body.integer("bootstrap_port", 1, 65535)
    if config.role == "prefill":
        return None, False, room
    if config.role == "aggregated":
        raise _wrong_role(config, "bootstrap_room", "prefill or decode")
    if not host:
        raise body.fail("bootstrap_host", "the prefill engine's host, sent with bootstrap_room")
    if port is None:
        raise body.fail("bootstrap_port", "the prefill engine's port, sent with bootstrap_room")
    return RemoteKv(host=host, port=port, room=room), False, None


def _remote_kv(params: Fields) -> RemoteKv:
    host, port = params.text("remote_host"), params.integer("remote_port", 1, 65535)
    engine_id = params.text("remote_engine_id")
    if not host:
        raise params.fail("remote_host", "the prefill engine's host, as its answer gave it")
    if port is None:
        raise params.fail("remote_port", "the prefill engine's port, as its answer gave it")
    if not engine_id:
        raise params.fail("remote_engine_id", "the prefill engine's id, as its answer gave it")
    return RemoteKv(
        host=host,
        port=port,
        engine_id=engine_id,
        request_id=params.text("remote_request_id"),
        block_ids=tuple(params.token_ids("remote_block_ids")),
    )


def _wrong_role(config: EngineConfig, where: str, expected: str) -> ApiError:
    return ApiError(
        400,
        f"{where} went to engine {config.name}, whose role is {config.role}; expected a "
        f"{expected} engine",
        param=where,
    )


def kind_of(value: object) -> str:
    """A JSON value's kind, for messages: never the value itself, which may be a prompt."""
    if value is None:
        return "missing or null"
    kinds: dict[type, str] = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), "of another kind")
