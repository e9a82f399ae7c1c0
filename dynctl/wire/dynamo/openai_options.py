"""The options of an OpenAI body, as a Dynamo 1.6 frontend reads and checks them.

A field that Dynamo does not know is an error here too, and so is a value outside its range: status
codes are Dynamo's, the errors' texts are ours. Fields that Dynamo accepts and passes to no worker
(``logit_bias``, ``suffix``, ``echo``, ``user``, ...) are checked and have no effect, as there.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from dynctl.base.decode_errors import RequestError
from dynctl.base.json_fields import describe, mapping
from dynctl.wire.dynamo.engine_request import (
    EngineRequest,
    OutputOptions,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from dynctl.wire.dynamo.tool_choice import calls_schema, is_forced
from dynctl.wire.json_body import U32, TokenId, convert, without_nulls
from dynctl.wire.nvext import NvExt, Taints, parse_nvext

_MAX_STOPS: Final = 32
_MAX_SUFFIX: Final = 10_000
_FUNCTION: Final = re.compile(r"[A-Za-z0-9_-]{1,96}")
_FORMATTED_PROMPT: Final = "formatted_prompt"
_F32: Final = struct.Struct("<f")
_F32_MAX: Final = 3.4028234663852886e38

_I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Choices = Annotated[int, Meta(ge=1, le=128)]
_AtLeastOne = Annotated[int, Meta(ge=1, le=2**32 - 1)]
_String = Annotated[str, Meta(min_length=1)]
_StopStrings = Annotated[list[_String], Meta(min_length=1, max_length=_MAX_STOPS)]
_StopIds = Annotated[list[TokenId], Meta(min_length=1, max_length=_MAX_STOPS)]


class _StreamOptions(Struct):
    """Clients send null for what they leave out."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _CommonFields(Struct, kw_only=True):
    """The fields of both bodies."""

    model: str
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: _Choices | None = None
    max_tokens: _AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[Any] | None = None
    user: str | None = None
    metadata: Any = None
    logit_bias: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: U32 | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: U32 | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: str | None = None
    stop_token_ids: list[TokenId] | None = None
    detokenize: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words_token_ids: list[list[TokenId]] | None = None
    nvext: Any = None


class _Schema(Struct):
    name: _String
    schema: Any = UNSET
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class _Function(Struct):
    """A function in the form that ``tools`` replaced."""

    name: str
    parameters: Any


class _ChatBody(_CommonFields, kw_only=True):
    messages: Annotated[list[Any], Meta(min_length=1)]
    max_completion_tokens: _AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: _ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1536)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    prediction: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    function_call: Any = None
    functions: list[_Function] | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    prompt_cache_key: str | None = None
    thinking: Any = None
    chat_template_args: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    best_of: ClassVar[None] = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs or self.top_logprobs)

    @property
    def sent_logprobs(self) -> int | None:
        """The alternatives that a worker sends for each token; None: no log probabilities."""
        if not self.logprobs:
            return None
        return 1 if self.top_logprobs is None else self.top_logprobs


class _CompletionBody(_CommonFields, kw_only=True):
    prompt: str | list[Any] | None = None
    prompt_embeds: str | None = None
    suffix: Annotated[str, Meta(max_length=_MAX_SUFFIX)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def sent_logprobs(self) -> int | None:
        return self.logprobs


_KNOWN: Final = {kind: frozenset(kind.__struct_fields__) for kind in (_ChatBody, _CompletionBody)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What one body asks of a worker and of the answer.

    ``logprobs``: the answer has them. ``alternatives``: the likeliest tokens that a chat wants,
    with 0 none of them. ``token_names``: tokens are named ``token_id:N`` in place of their text.
    ``tools``: the functions that the model may call; ``tool_choice`` as in the body.
    """

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    choices: int
    logprobs: bool
    token_names: bool
    stop: StopConditions
    sampling: SamplingOptions
    output: OutputOptions
    nvext: NvExt
    cache_salt: str | None = None
    alternatives: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    mm_processor_kwargs: Any = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking: Any = None


def read_engine_options(body: Mapping[str, Any]) -> EngineOptions:
    """The options of a chat (with ``messages``) or completion body.

    Raises RequestError: 400 for what Dynamo 1.6 refuses with 400, 501 for what it or this program
    does not support.
    """
    chat = "messages" in body
    kind: type[_ChatBody] | type[_CompletionBody] = _ChatBody if chat else _CompletionBody
    unknown = [name for name in body if name not in _KNOWN[kind]]
    if unknown:
        shown = ", ".join(repr(name[:40]) for name in unknown[:8])
        raise RequestError(400, "unknown_field", unknown[0][:40], f"unsupported: {shown}")
    fields = without_nulls(body)
    read = convert(fields, kind)
    nvext = parse_nvext(body.get("nvext"))
    _check(read, nvext)
    if isinstance(read, _ChatBody):
        _check_chat(read)
    else:
        _check_completion(read)
    if read.stream and _FORMATTED_PROMPT in nvext.annotations:
        raise RequestError(
            501, "unsupported", "nvext.annotations", f"{_FORMATTED_PROMPT} is not supported"
        )
    strings, ids = _stops(read)
    usage = read.stream_options or _StreamOptions()
    stop = StopConditions(
        max_tokens=read.most_tokens,
        stop=strings,
        stop_token_ids=ids,
        min_tokens=read.min_tokens,
        ignore_eos=read.ignore_eos,
        max_thinking_tokens=nvext.max_thinking_tokens,
    )
    return EngineOptions(
        chat=chat,
        model=read.model,
        stream=read.stream,
        include_usage=bool(usage.include_usage) or not read.stream,
        continuous_usage=bool(usage.continuous_usage_stats),
        choices=read.n or 1,
        token_names=bool(read.return_tokens_as_token_ids),
        stop=stop,
        logprobs=read.wants_logprobs,
        sampling=_sampling(read),
        output=OutputOptions(
            logprobs=read.sent_logprobs,
            prompt_logprobs=read.prompt_logprobs,
            skip_special_tokens=read.skip_special_tokens,
            return_tokens_as_token_ids=read.return_tokens_as_token_ids,
        ),
        nvext=nvext,
        cache_salt=nvext.cache_salt or read.cache_salt,
        extra_args=_extra_args(read, nvext),
        **(_chat_options(read) if isinstance(read, _ChatBody) else {}),
    )


def _chat_options(read: _ChatBody) -> dict[str, Any]:
    return {
        "tools": tuple(read.tools or ()),
        "tool_choice": read.tool_choice,
        "mm_processor_kwargs": read.mm_processor_kwargs,
        "template_args": {**(read.chat_template_args or {}), **(read.chat_template_kwargs or {})},
        "reasoning_effort": read.reasoning_effort,
        "thinking": read.thinking,
        "alternatives": read.top_logprobs,
    }


def engine_request(
    options: EngineOptions,
    token_ids: Sequence[int],
    *,
    eos_token_ids: Sequence[int],
    lora_name: str | None = None,
) -> EngineRequest:
    """The request to a worker, before a router has chosen one: ``routing`` has the client's part.

    ``eos_token_ids``: the ids that end a generation of the model. They are not stops, and neither
    are the request's, where it has ``ignore_eos``.
    """
    ends = list(eos_token_ids)
    stop = options.stop
    if stop.ignore_eos:
        stop = msgspec.structs.replace(stop, stop=None, stop_token_ids=None)
    else:
        stop = msgspec.structs.replace(stop, stop_token_ids_hidden=ends)
    return EngineRequest(
        model=options.model,
        token_ids=list(token_ids),
        stop_conditions=stop,
        sampling_options=options.sampling,
        output_options=options.output,
        eos_token_ids=[] if stop.ignore_eos else ends,
        annotations=list(options.nvext.annotations),
        routing=_routing(options, lora_name),
        extra_args=dict(options.extra_args) if options.extra_args else None,
        mm_processor_kwargs=options.mm_processor_kwargs,
        request_timestamp_ms=options.nvext.request_timestamp_ms,
    )


def _check(read: _ChatBody | _CompletionBody, nvext: NvExt) -> None:
    if not read.model.strip():
        raise RequestError(400, "out_of_range", "model", "must not be empty")
    if read.user is not None and not read.user.strip():
        raise RequestError(400, "out_of_range", "user", "must not be empty")
    if read.stream_options is not None and not read.stream:
        problem = "is only allowed when stream is true"
        raise RequestError(400, "conflict", "stream_options", problem)
    if read.n is not None and read.n > 1:
        _check_several_choices(read, nvext)
    for token, bias in (read.logit_bias or {}).items():
        _check_bias(token, bias)


def _check_several_choices(read: _ChatBody | _CompletionBody, nvext: NvExt) -> None:
    if nvext.wants("completion_token_ids"):
        problem = "completion_token_ids are only supported with one choice"
        raise RequestError(400, "conflict", "nvext.extra_fields", problem)
    if read.temperature == 0:
        problem = "expected more than 0 with n above 1, got 0"
        raise RequestError(400, "conflict", "temperature", problem)


def _check_bias(token: str, bias: Any) -> None:
    known = token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) < 2**32
    if not known:
        problem = "expected token ids from 0 to 4294967295 as keys"
        raise RequestError(400, "out_of_range", "logit_bias", problem)
    number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not number or not -100 <= bias <= 100:
        problem = f"expected numbers from -100 to 100, got {describe(bias)}"
        raise RequestError(400, "out_of_range", "logit_bias", problem)


def _check_chat(read: _ChatBody) -> None:
    if read.functions is not None:
        raise RequestError(501, "unsupported", "functions", "is not supported; use tools")
    _check_tool_choice(read.tool_choice, _check_tools(read))
    form = read.response_format
    if form is not None and form.type == "json_schema":
        schema = None if form.json_schema is None else form.json_schema.schema
        if schema is UNSET or schema is None or schema is False:
            field = "response_format.json_schema.schema"
            raise RequestError(400, "out_of_range", field, "expected a schema that can be met")
    for arguments in (read.chat_template_args, read.chat_template_kwargs):
        if "chat_template" in (arguments or {}):
            field = "chat_template_args.chat_template"
            raise RequestError(400, "unknown_field", field, "is not supported")


def _check_tools(read: _ChatBody) -> list[str]:
    """The names of the functions."""
    names = []
    for number, tool in enumerate(read.tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not _FUNCTION.fullmatch(name):
            field = f"tools[{number}].function.name"
            problem = "expected 1 to 96 letters, digits, underscores and dashes"
            raise RequestError(400, "out_of_range", field, problem)
        if not isinstance(tool["function"].get("parameters"), dict | None):
            field = f"tools[{number}].function.parameters"
            raise RequestError(400, "wrong_type", field, "expected a JSON schema, as an object")
        names.append(name)
    return names


def _check_tool_choice(choice: str | dict[str, Any] | None, names: list[str]) -> None:
    if choice in (None, "none", "auto"):
        return
    if choice == "required":
        if not names:
            raise RequestError(400, "conflict", "tool_choice", "is required, and tools is empty")
        return
    function = mapping(choice).get("function")
    is_known = isinstance(function, dict) and function.get("name") in names
    if not is_known or mapping(choice).get("type") != "function":
        problem = "expected none, auto, required, or a function of tools"
        raise RequestError(400, "out_of_range", "tool_choice", problem)


def _check_completion(read: _CompletionBody) -> None:
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(read, name) is not None:
            problem = "is only supported on /v1/chat/completions"
            raise RequestError(400, "unknown_field", name, problem)
    if read.prompt_embeds is not None:
        raise RequestError(501, "unsupported", "prompt_embeds", "is not supported")
    if read.prompt is None:
        raise RequestError(400, "missing_field", "prompt", "is required")
    if _count_prompts(read.prompt) * (read.n or 1) > 128:
        raise RequestError(400, "out_of_range", "n", "expected at most 128 choices in total")
    if read.best_of is not None and read.n is not None and read.best_of < read.n:
        problem = f"expected at least n ({read.n}), got {read.best_of}"
        raise RequestError(400, "conflict", "best_of", problem)


def _count_prompts(prompt: str | list[Any]) -> int:
    """How many prompts a field has; raises RequestError for an empty one."""
    batch = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts = prompt if batch else [prompt]
    for number, each in enumerate(prompts):
        if isinstance(each, str | list) and not each:
            field = f"prompt[{number}]" if batch else "prompt"
            raise RequestError(400, "out_of_range", field, "must not be empty")
    return len(prompts)


def _stops(read: _ChatBody | _CompletionBody) -> tuple[list[str] | None, list[int] | None]:
    """Stop strings and stop token ids; ``stop`` may be either."""
    ids = read.stop_token_ids
    if read.stop is None:
        return None, ids
    if isinstance(read.stop, str):
        return [convert(read.stop, _String, "stop")], ids
    if read.stop and isinstance(read.stop[0], int):
        return None, [*(ids or ()), *convert(read.stop, _StopIds, "stop")]
    return convert(read.stop, _StopStrings, "stop"), ids


def _sampling(read: _ChatBody | _CompletionBody) -> SamplingOptions:
    return SamplingOptions(
        n=read.n,
        best_of=read.best_of,
        presence_penalty=_f32(read.presence_penalty),
        frequency_penalty=_f32(read.frequency_penalty),
        repetition_penalty=_f32(read.repetition_penalty),
        temperature=_f32(read.temperature),
        top_p=_f32(read.top_p),
        top_k=read.top_k,
        min_p=_f32(read.min_p),
        seed=read.seed,
        include_stop_str_in_output=read.include_stop_str_in_output,
        guided_decoding=_output_constraint(read),
    )


def _output_constraint(read: _ChatBody | _CompletionBody) -> dict[str, Any] | None:
    """The constraint of the output; ``response_format`` counts where no other is given."""
    fields = {
        "json": read.guided_json,
        "regex": read.guided_regex,
        "choice": read.guided_choice or None,
        "grammar": read.guided_grammar,
        "backend": read.guided_decoding_backend,
        "whitespace_pattern": read.guided_whitespace_pattern,
    }
    constraints = {name: value for name, value in fields.items() if value is not None}
    if isinstance(read, _ChatBody):
        if is_forced(read.tool_choice):
            return _forced_call_constraint(read, constraints)
        form = read.response_format
        if form is not None and form.type == "json_object":
            constraints.setdefault("json", {"type": "object"})
        elif form is not None and form.json_schema is not None:
            constraints.setdefault("json", form.json_schema.schema)
    return constraints or None


def _forced_call_constraint(read: _ChatBody, constraints: Mapping[str, Any]) -> dict[str, Any]:
    explicit = constraints.keys() & {"json", "regex", "choice", "grammar"}
    for name in sorted(explicit):
        problem = "expected none beside a forced tool_choice, whose calls are a constraint"
        raise RequestError(400, "conflict", f"guided_{name}", problem)
    parallel = read.parallel_tool_calls is not False
    return {"json": calls_schema(read.tools or (), read.tool_choice, parallel=parallel)}


def _extra_args(read: _ChatBody | _CompletionBody, nvext: NvExt) -> dict[str, Any] | None:
    """What Dynamo passes to engines unread."""
    extra: dict[str, Any] = {}
    salt = nvext.cache_salt or read.cache_salt
    passed = {
        "extra_fields": list(nvext.extra_fields) or None,
        "cache_salt": salt,
        "metadata_upload": nvext.metadata_upload,
        "token_in": True if nvext.token_data is not None else None,
    }
    sampled = {
        "detokenize": read.detokenize,
        "allowed_token_ids": read.allowed_token_ids,
        "bad_words_token_ids": read.bad_words_token_ids,
    }
    for name, values in (("nvext", passed), ("sampling_options", sampled)):
        kept = {key: value for key, value in values.items() if value is not None}
        if kept:
            extra[name] = kept
    return extra or None


def _routing(options: EngineOptions, lora_name: str | None) -> RoutingHints:
    nvext = options.nvext
    hints = nvext.agent_hints
    jump = hints.latency_sensitivity
    if hints.priority is not None:
        jump = float(max(hints.priority, 0))
    return RoutingHints(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        expected_output_tokens=hints.osl,
        lora_name=lora_name,
        cache_salt=options.cache_salt,
        priority_jump=jump,
        strict_priority=hints.strict_priority,
        priority=hints.priority,
        routing_constraints=_constraints(nvext.routing_constraints),
    )


def _constraints(taints: Taints) -> dict[str, Any] | None:
    hints: dict[str, Any] = {}
    if taints.required_taints:
        hints["required_taints"] = list(taints.required_taints)
    if taints.preferred_taints:
        hints["preferred_taints"] = {
            name: _f32(weight) for name, weight in taints.preferred_taints.items()
        }
    return hints or None


def _f32(value: float | None) -> float | None:
    """The number as Dynamo keeps it, in 32 bits; the nearest one if it is out of their range."""
    if value is None:
        return None
    try:
        rounded: float = _F32.unpack(_F32.pack(value))[0]
    except OverflowError:
        return math.copysign(_F32_MAX, value)
    return rounded
