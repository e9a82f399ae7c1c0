"""Check OpenAI requests for the simulated engine, with the extra fields of vLLM and SGLang.

Unknown fields are ignored, as real engines do. Every refusal is an ApiError that names the field
and what was expected; prompt text never appears in it.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from dynctl.base.decode_errors import RequestError
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.handoff import RemoteKv
from dynctl.simulation.engine.named_events import not_simulated
from dynctl.simulation.engine.scheduler import FinishReason
from dynctl.tokenization import ModelTokenizer, PromptError, TemplateError
from dynctl.wire.anthropic import parse_messages_request
from dynctl.wire.json_body import U32, convert, decode_object, without_nulls
from dynctl.wire.nvext import strip_for_engine
from dynctl.wire.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EngineFields,
    KvTransferParams,
    parse_chat_request,
    parse_completion_request,
    parse_embedding_request,
)
from dynctl.wire.responses import parse_responses_request

Api = Literal["chat", "completions", "messages", "responses"]
"""The endpoint of a generation."""

#: Numbers of an embedding: without ``dimensions``, and at most.
DIMENSIONS = 16
MAX_DIMENSIONS = 4096

_INLINE_BODY_BYTES = 32 * 1024
_Parsed = TypeVar("_Parsed")
_Fields = TypeVar("_Fields")


class ApiError(Exception):
    """A refusal in OpenAI's shape: HTTP status, message, the field at fault, and a type."""

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
    """A checked generation request.

    `room` (SGLang) and `hold_for_pull` (vLLM) are the prefill sides of the two hand-offs,
    `remote_kv` is the decode side of both. `request_body`: for answers that repeat
    its fields.
    """

    api: Api
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
    return_token_ids: bool = False
    request_body: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def chat(self) -> bool:
        """Whether the prompt is a chat in the model's template."""
        return self.api != "completions"


class _More(msgspec.Struct):
    """Fields of a generation that engines alone read."""

    min_tokens: U32 = 0
    stop_sequences: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...],
        msgspec.Meta(max_length=16),
    ] = ()


async def off_loop_if_long(raw: bytes, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    """`parse(raw)`, in a thread for a long body, because tokenizing it would block all streams."""
    if len(raw) <= _INLINE_BODY_BYTES:
        return parse(raw)
    return await asyncio.to_thread(parse, raw)


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; aiohttp has checked its size. Raises ApiError 400."""
    with request_errors():
        return decode_object(raw, len(raw))


def read_fields(body: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    """The fields of a body that ``kind`` has; null means not given. Raises ApiError 400."""
    with request_errors():
        return convert(without_nulls(body), kind)


@contextmanager
def request_errors() -> Iterator[None]:
    """Turn a RequestError into an ApiError."""
    try:
        yield
    except RequestError as error:
        raise ApiError(error.status, str(error), param=error.field) from None


def wrong_field(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name}: {problem}", param=name)


def parse_generate(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    config: EngineConfig,
    tokenizer: ModelTokenizer,
    *,
    api: Api,
) -> Generate:
    """Check the body of a generation. Raises ApiError."""
    plain = strip_for_engine(body)
    with request_errors():
        request = _PARSE[api](plain)
    extra, more = read_fields(body, EngineFields), read_fields(body, _More)
    _check_simulated(body, request, api)
    lora = check_model(request.model, config)
    _check_options(body, request, extra)
    dp_rank = _dp_rank(extra, headers, config)
    remote_kv, hold_for_pull, room = _handoff(extra, config)
    prompt = _request_tokens(request, tokenizer, config)
    room_left = _room_for_output(request, prompt, config)
    if room is not None:
        # SGLang's prefill side ignores the length: it only fills the cache.
        dp_rank, requested = room % config.data_parallel_size, 1
    else:
        requested = request.max_tokens or (room_left if extra.ignore_eos else 0)
    by_default = max(config.default_output_tokens, more.min_tokens)
    stop = (extra.stop,) if isinstance(extra.stop, str) else extra.stop
    return Generate(
        api=api,
        model=lora or config.model,
        lora=lora,
        prompt=prompt,
        max_tokens=requested or min(by_default, room_left),
        finish_as="length" if requested else "stop",
        stream=request.stream,
        include_usage=request.include_usage,
        stop=more.stop_sequences if api == "messages" else stop,
        cache_salt=extra.cache_salt,
        dp_rank=dp_rank,
        remote_kv=remote_kv,
        hold_for_pull=hold_for_pull,
        room=room,
        return_token_ids=extra.return_token_ids,
        request_body=body if api == "responses" else {},
    )


def _check_simulated(
    body: Mapping[str, Any], request: ChatRequest | CompletionRequest, api: Api
) -> None:
    """Raise ApiError for what a real engine serves and this one does not."""
    refused = not_simulated(body, api)
    if refused is not None:
        raise wrong_field(refused, "is not simulated by this engine; leave it out")
    if isinstance(request, ChatRequest) and request.not_modelled is not None:
        what = request.not_modelled.rpartition("renders ")[2]
        raise wrong_field(request.prompt_field, f"this engine does not simulate {what}")
    if api == "messages" and request.max_tokens is None:
        raise wrong_field("max_tokens", "is required")


def _check_options(
    body: Mapping[str, Any], request: ChatRequest | CompletionRequest, extra: EngineFields
) -> None:
    for name, count in (("n", request.n), ("best_of", extra.best_of)):
        if count != 1:
            raise wrong_field(name, f"is {count}; this engine supports one choice")
    if body.get("stream_options") is not None and not request.stream:
        raise wrong_field("stream_options", "is only allowed with stream: true")
    if request.max_tokens == 0:
        raise wrong_field("max_tokens", "expected at least 1, got 0")


def _request_tokens(
    request: ChatRequest | CompletionRequest, tokenizer: ModelTokenizer, config: EngineConfig
) -> list[int]:
    """The tokens of the prompt, at least one."""
    if isinstance(request, ChatRequest):
        prompt = chat_tokens(request, tokenizer)
    else:
        prompt = _completion_tokens(request, tokenizer)
    prompt = _truncate(prompt, request, config)
    if not prompt:
        raise wrong_field(request.prompt_field, "has no tokens")
    return prompt


def _room_for_output(
    request: ChatRequest | CompletionRequest, prompt: list[int], config: EngineConfig
) -> int:
    """The tokens of the context that the prompt leaves; raises ApiError where they are too few."""
    room_left = config.context_length - len(prompt)
    least, field = request.max_tokens or 1, request.prompt_field
    if least > room_left:
        raise ApiError(
            400,
            f"This model's maximum context length is {config.context_length} tokens. However, you "
            f"requested {len(prompt) + least} tokens ({len(prompt)} in {field}, {least} in the "
            f"completion). Shorten {field} or lower max_tokens.",
            param=field if room_left < 1 else "max_tokens",
        )
    return room_left


_PARSE: dict[Api, Callable[[Mapping[str, Any]], ChatRequest | CompletionRequest]] = {
    "chat": parse_chat_request,
    "completions": parse_completion_request,
    "messages": parse_messages_request,
    "responses": parse_responses_request,
}


@dataclass(frozen=True)
class Embed:
    """A checked request for embeddings: one vector of ``dimensions`` numbers for each prompt.

    ``runs``: the prompts as requests of the engine; each ends when its prompt is computed.
    """

    model: str
    runs: tuple[Generate, ...]
    dimensions: int
    base64: bool
    dp_rank: int | None


def parse_embed(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    config: EngineConfig,
    tokenizer: ModelTokenizer,
) -> Embed:
    """Check a /v1/embeddings body. Raises ApiError."""
    plain = strip_for_engine(body)
    with request_errors():
        request = parse_embedding_request(plain)
    extra = read_fields(body, EngineFields)
    lora = check_model(request.model, config)
    if (request.dimensions or 1) > MAX_DIMENSIONS:
        raise wrong_field(
            "dimensions", f"expected at most {MAX_DIMENSIONS}, got {request.dimensions}"
        )
    encoding = request.encoding_format
    if encoding not in ("float", "base64"):
        raise wrong_field("encoding_format", f"expected float or base64, got {encoding[:40]!r}")
    if request.not_modelled is not None:
        raise wrong_field("input", "this engine simulates embeddings of texts and token ids only")
    dp_rank = _dp_rank(extra, headers, config)
    _handoff(extra, config)
    run = Generate(
        api="completions",
        model=lora or config.model,
        lora=lora,
        prompt=[],
        max_tokens=1,
        finish_as="length",
        stream=False,
        include_usage=False,
        stop=(),
        cache_salt=extra.cache_salt,
        dp_rank=dp_rank,
        remote_kv=None,
        hold_for_pull=False,
        room=None,
    )
    prompts = _embedding_tokens(request, tokenizer, config)
    runs = tuple(replace(run, prompt=prompt) for prompt in prompts)
    dimensions = request.dimensions or DIMENSIONS
    return Embed(run.model, runs, dimensions, encoding == "base64", dp_rank)


def _embedding_tokens(
    request: EmbeddingRequest, tokenizer: ModelTokenizer, config: EngineConfig
) -> Iterator[list[int]]:
    for i, item in enumerate(request.prompts):
        prompt = _truncate(_tokens_of(item, tokenizer), request, config)
        if not prompt:
            raise wrong_field("input", f"has no tokens in entry {i}")
        if len(prompt) > config.context_length:
            raise wrong_field(
                "input",
                f"entry {i} has {len(prompt)} tokens; this model's maximum context length is "
                f"{config.context_length} tokens",
            )
        yield prompt


def check_model(model: str, config: EngineConfig) -> str | None:
    """The LoRA adapter that `model` names, None for the base model. Raises ApiError 404."""
    if model in ("", config.model):
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


def chat_tokens(request: ChatRequest, tokenizer: ModelTokenizer) -> list[int]:
    """Tokens of `messages` in the model's chat template, with `tools` and template arguments."""
    try:
        return tokenizer.encode_chat(
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=request.add_generation_prompt,
            template_kwargs=request.template_args or None,
        )
    except PromptError as error:
        raise ApiError(400, str(error), param=error.field) from None
    except TemplateError as error:
        raise wrong_field("messages", f"the chat template failed: {error.reason}") from None


def prompt_tokens(text: str, tokenizer: ModelTokenizer) -> list[int]:
    """Tokens of a plain prompt."""
    try:
        return tokenizer.encode_prompt(text)
    except PromptError as error:
        raise ApiError(400, str(error), param="prompt") from None


def _completion_tokens(request: CompletionRequest, tokenizer: ModelTokenizer) -> list[int]:
    if len(request.prompts) != 1:
        raise wrong_field("prompt", f"has {len(request.prompts)} prompts; expected one")
    return _tokens_of(request.prompts[0], tokenizer)


def _tokens_of(prompt: str | Sequence[int], tokenizer: ModelTokenizer) -> list[int]:
    """The tokens of a prompt that is text, or tokens already."""
    return prompt_tokens(prompt, tokenizer) if isinstance(prompt, str) else list(prompt)


def _truncate(
    prompt: list[int], request: ChatRequest | CompletionRequest, config: EngineConfig
) -> list[int]:
    """The prompt after ``truncate_prompt_tokens``: the last tokens, or the first ones."""
    keep = request.truncate_prompt_tokens
    if keep == -1:
        keep = config.context_length - (1 if request.max_tokens else 0)
    if keep is None or keep >= len(prompt):
        return prompt
    return prompt[:keep] if request.truncation_side == "right" else prompt[len(prompt) - keep :]


def _dp_rank(extra: EngineFields, headers: Mapping[str, str], config: EngineConfig) -> int | None:
    last = config.data_parallel_size - 1
    header = headers.get("X-data-parallel-rank")  # vLLM's way; the fields are SGLang's
    if header is not None:
        if not (header.isascii() and header.isdigit() and int(header) <= last):
            raise ApiError(
                400,
                f"header X-data-parallel-rank: expected 0 to {last}, got {header[:20]!r}",
                param="X-data-parallel-rank",
            )
        return int(header)
    for name in ("routed_dp_rank", "data_parallel_rank"):
        rank: int | None = getattr(extra, name)
        if rank is not None:
            if rank > last:
                raise wrong_field(name, f"expected an integer from 0 to {last}, got {rank}")
            return rank
    return None


def _handoff(extra: EngineFields, config: EngineConfig) -> tuple[RemoteKv | None, bool, int | None]:
    """(what to pull, keep blocks for a puller, bootstrap room to serve)."""
    params = extra.kv_transfer_params
    if params is not None and extra.bootstrap_room is not None:
        raise ApiError(
            400,
            "kv_transfer_params and bootstrap_room are two kinds of hand-off; send one",
            param="bootstrap_room",
        )
    if extra.bootstrap_room is not None:
        return _bootstrap(extra, extra.bootstrap_room, config)
    params = params or KvTransferParams()
    hold = params.do_remote_decode or False
    remote = _remote_kv(params) if params.do_remote_prefill else None
    _check_role(config, hold=hold, pulls=remote is not None)
    return remote, hold, None


def _check_role(config: EngineConfig, *, hold: bool, pulls: bool) -> None:
    """Raise ApiError where an engine of this role has no such side of a hand-off."""
    if hold and config.role == "decode":
        raise _wrong_role(config, "kv_transfer_params.do_remote_decode", "prefill")
    if pulls and config.role == "prefill":
        raise _wrong_role(config, "kv_transfer_params.do_remote_prefill", "decode")
    if config.role == "decode" and not pulls and not config.can_prefill:
        raise ApiError(
            400,
            f"engine {config.name} is a decode engine that cannot prefill; expected "
            "kv_transfer_params with do_remote_prefill, or a bootstrap_room",
            param="kv_transfer_params",
        )


def _bootstrap(
    extra: EngineFields, room: int, config: EngineConfig
) -> tuple[RemoteKv | None, bool, int | None]:
    if config.role == "prefill":
        return None, False, room
    if config.role == "aggregated":
        raise _wrong_role(config, "bootstrap_room", "prefill or decode")
    host = extra.bootstrap_host
    if not host:
        raise wrong_field("bootstrap_host", "the prefill engine's host is required")
    if extra.bootstrap_port is None:
        raise wrong_field("bootstrap_port", "the prefill engine's port is required")
    return RemoteKv(host=host, port=extra.bootstrap_port, room=room), False, None


def _remote_kv(params: KvTransferParams) -> RemoteKv:
    for name in ("remote_host", "remote_port", "remote_engine_id", "remote_block_ids"):
        if getattr(params, name) in (None, ""):
            raise wrong_field(
                f"kv_transfer_params.{name}", "is required, with the prefill engine's value"
            )
    return RemoteKv(
        host=params.remote_host or "",
        port=params.remote_port or 0,
        engine_id=params.remote_engine_id,
        request_id=params.remote_request_id,
        block_ids=params.remote_block_ids or (),
    )


def _wrong_role(config: EngineConfig, where: str, expected: str) -> ApiError:
    return wrong_field(
        where,
        f"engine {config.name} has the role {config.role}; send this to a {expected} engine",
    )
