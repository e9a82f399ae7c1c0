"""Requests of a Dynamo frontend to a vLLM or SGLang server over HTTP, and its tokens back.

vLLM gets ``/v1/completions`` with the prompt's token ids and ``return_token_ids``; SGLang gets its
own ``/generate``. Text is the frontend's work: stop strings are not passed on, and the engine's
text is ignored. What an engine cannot do as requested is refused by name.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from dynctl.adapters.dynamo.request_server import AnswerLost, ErrorItem, PlaneRequest
from dynctl.serving.engines.apis import DONE_DATA, EVENTS_A_TURN, EventCut, event_data
from dynctl.serving.engines.failures import UpstreamFailure, engine_reason
from dynctl.serving.engines.response_stream import EngineStream
from dynctl.serving.engines.upstream import Upstream
from dynctl.wire.dynamo.engine_output import (
    CachedTokens,
    EngineItem,
    EngineOutput,
    EngineUsage,
    TopLogprob,
)
from dynctl.wire.dynamo.engine_request import (
    BootstrapInfo,
    OutputOptions,
    ReceivedRequest,
    SamplingOptions,
)
from router_core import Role

EngineKind = Literal["vllm", "sglang"]

_MAX_LINE: Final = 4 * 1024 * 1024
_MAX_CHOICES: Final = 128
_RANK_HEADER: Final = "X-data-parallel-rank"
_TOKEN_ID: Final = "token_id:"  # noqa: S105 - the prefix of a token's name
#: What vLLM's connectors need to keep the blocks of a prefill for another engine.
_PREFILL_PARAMS: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_FINISHES: Final = {"stop": "stop", "length": "length", "abort": "cancelled", "eos": "eos"}
_MEDIA: Final = ("multi_modal_data", "multi_modal_uuids", "prompt_embeds", "encoder_result")
#: What extra_args may have: for the frontend, or copies of what is elsewhere in the request.
_KNOWN_EXTRAS: Final = {"nvext", "messages", "formatted_prompt"}
#: Also these, where no guided decoding reads them.
_REASONING_EXTRAS: Final = {"reasoning_ended", "reasoning_parser_kwargs"}
_CONSTRAINTS: Final = {"json", "regex", "choice", "grammar", "whitespace_pattern", "structural_tag"}


_log = logging.getLogger(__name__)


class NotSupported(ErrorItem):
    """The request needs something that the engine cannot do over HTTP."""

    def __init__(self, what: str) -> None:
        super().__init__(f"dynctl serve attach: {what}", "InvalidArgument")


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """The engine: ``model`` is its own name of the model, ``ranks`` its data-parallel ranks.

    ``context_length`` None: unknown.
    """

    url: str
    model: str
    kind: EngineKind = "vllm"
    role: Role = Role.AGGREGATED
    ranks: int = 1
    context_length: int | None = None
    adapters: tuple[str, ...] = ()


class Generation:
    """Answers ``generate``. ``target`` gives the engine as it is now; ``failed`` hears of failures
    of the engine, so that it can be examined."""

    def __init__(
        self,
        upstream: Upstream,
        target: Callable[[], EngineTarget],
        failed: Callable[[UpstreamFailure], None] = lambda failure: None,
    ) -> None:
        self._upstream = upstream
        self._target = target
        self._failed = failed

    async def handle(self, request: PlaneRequest) -> AsyncIterator[EngineItem]:
        """The items of one answer."""
        target, body = self._target(), request.body
        try:
            url, fields = engine_body(body, target)
        except NotSupported as error:
            # The frontend shows clients no text of workers, so the reason has to be here.
            _log.warning("request %s is refused: %s", request.request_id, error)
            raise
        headers = {}
        rank = body.routing.dp_rank if body.routing is not None else None
        if target.ranks > 1 and rank is not None:
            headers[_RANK_HEADER] = str(rank)
        reader: _VllmReader | _SglangReader
        reader = _VllmReader(target.role) if target.kind == "vllm" else _SglangReader(body)
        stopped = _Stopped()
        try:
            stream = await self._upstream.open(url, msgspec.json.encode(fields), headers)
        except UpstreamFailure as failure:
            raise self._refusal(failure) from failure
        request.on_stop(lambda: stream.abandon(stopped.failure))
        try:
            if target.role is Role.PREFILL and body.bootstrap_info is not None:
                # A Dynamo frontend expects them first, though it made the room itself.
                room = _room(body.bootstrap_info)
                yield EngineItem(data=EngineOutput(token_ids=[], disaggregated_params=room))
            async for line in _events(stream):
                for output in reader.read(line):
                    yield EngineItem(data=output)
            for output in reader.end():
                yield EngineItem(data=output)
        except UpstreamFailure as failure:
            if failure is not stopped.failure:
                self._failed(failure)
                raise AnswerLost(str(failure)) from failure
            yield EngineItem(data=EngineOutput(token_ids=[], finish_reason="cancelled"))
        finally:
            stream.close()

    def _refusal(self, failure: UpstreamFailure) -> Exception:
        if failure.kind == "status" and failure.status in (400, 404, 413, 422):
            # The engine's message may have parts of the prompt.
            _log.warning(
                "the engine refused a request with HTTP %s; its own log may have the reason",
                failure.status,
            )
            return ErrorItem(_message_of(failure), "InvalidArgument")
        self._failed(failure)
        # Without an end, so that the frontend may send the request to another worker.
        return AnswerLost(str(failure))


@dataclass(frozen=True, slots=True)
class _Stopped:
    failure: UpstreamFailure = field(
        default_factory=lambda: UpstreamFailure("stopped", "the requester stopped the request")
    )


def engine_body(request: ReceivedRequest, target: EngineTarget) -> tuple[str, dict[str, Any]]:
    """URL and body of the engine's request. Raises NotSupported."""
    if not request.token_ids:
        raise NotSupported("the prompt has no tokens")
    _refuse_other_input(request)
    if target.kind == "sglang":
        return f"{target.url}/generate", _sglang_body(request, target)
    return f"{target.url}/v1/completions", _vllm_body(request, target)


def _vllm_body(request: ReceivedRequest, target: EngineTarget) -> dict[str, Any]:
    stops, sampling, output = (
        request.stop_conditions,
        request.sampling_options,
        request.output_options,
    )
    _refuse(sampling, output)
    if request.bootstrap_info is not None:
        raise NotSupported("bootstrap_info with vLLM")
    fields: dict[str, Any] = {
        "model": _served(request, target),
        "prompt": request.token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": _max_tokens(request, target),
        "n": sampling.n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "min_tokens": stops.min_tokens,
        "ignore_eos": stops.ignore_eos,
        "stop_token_ids": _stop_ids(request),
        "thinking_token_budget": stops.max_thinking_tokens,
        "skip_special_tokens": output.skip_special_tokens,
        "cache_salt": _salt(request),
    }
    if output.logprobs is not None:
        fields["logprobs"] = output.logprobs
        fields["return_tokens_as_token_ids"] = True
    if sampling.guided_decoding:
        fields["structured_outputs"] = _constraint(sampling.guided_decoding)
    if target.role is Role.PREFILL:
        # The hand-off is in the whole answer only.
        fields |= {"max_tokens": 1, "min_tokens": 1, "stream": False, "stream_options": None}
        fields["kv_transfer_params"] = _PREFILL_PARAMS
    elif request.prefill_result is not None:
        params = request.prefill_result.disaggregated_params
        if isinstance(params, dict) and isinstance(params.get("kv_transfer_params"), dict):
            fields["kv_transfer_params"] = params["kv_transfer_params"]
    return {name: value for name, value in fields.items() if value is not None}


def _sglang_body(request: ReceivedRequest, target: EngineTarget) -> dict[str, Any]:
    stops, sampling, output = (
        request.stop_conditions,
        request.sampling_options,
        request.output_options,
    )
    _refuse(sampling, output)
    meeting = request.bootstrap_info
    if target.role is Role.AGGREGATED and (meeting or request.prefill_result) is not None:
        raise NotSupported("the hand-off of a disaggregated fleet to an engine that does both")
    if target.role is not Role.AGGREGATED and meeting is None:
        raise NotSupported(
            f"a request without a bootstrap room; SGLang's {target.role.value} engines expect one, "
            "which frontends name for prefill workers with a bootstrap address"
        )
    if sampling.n not in (None, 1):
        raise NotSupported(f"n is {sampling.n}; expected 1 for SGLang")
    if stops.max_thinking_tokens is not None:
        raise NotSupported("max_thinking_tokens with SGLang")
    constraint = _constraint(sampling.guided_decoding) if sampling.guided_decoding else {}
    schema = constraint.get("json")
    params = {
        "max_new_tokens": _max_tokens(request, target),
        "min_new_tokens": stops.min_tokens,
        "ignore_eos": stops.ignore_eos,
        "stop_token_ids": _stop_ids(request),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "sampling_seed": sampling.seed,
        "json_schema": schema if schema is None or isinstance(schema, str) else _json(schema),
        "regex": constraint.get("regex"),
        "ebnf": constraint.get("grammar"),
    }
    if set(constraint) - {"json", "regex", "grammar"}:
        raise NotSupported(f"guided decoding by {', '.join(sorted(constraint))} with SGLang")
    fields: dict[str, Any] = {
        "input_ids": request.token_ids,
        "stream": True,
        "sampling_params": {name: value for name, value in params.items() if value is not None},
    }
    if meeting is not None:
        fields |= _room(meeting)
    model = _served(request, target)
    if model != target.model:
        fields["lora_path"] = model
    if (salt := _salt(request)) is not None:
        # Older releases keep prompts apart by extra_key alone; 0.5.23 publishes cache_salt alone,
        # without which the blocks would be taken for those of unsalted prompts.
        fields |= {"extra_key": salt, "cache_salt": salt}
    if request.require_reasoning and constraint:
        fields["require_reasoning"] = True
    if output.logprobs is not None:
        fields |= {"return_logprob": True, "top_logprobs_num": output.logprobs}
    return fields


def _room(meeting: BootstrapInfo) -> dict[str, Any]:
    return {
        "bootstrap_host": meeting.bootstrap_host,
        "bootstrap_port": meeting.bootstrap_port,
        "bootstrap_room": meeting.bootstrap_room,
    }


def _refuse_other_input(request: ReceivedRequest) -> None:
    """Refuse media and options that would change the answer and have no place over HTTP."""
    media = [name for name in _MEDIA if getattr(request, name)]
    if media:
        raise NotSupported(f"images and other media are not supported ({', '.join(media)})")
    guided = request.sampling_options.guided_decoding
    known = _KNOWN_EXTRAS if guided else _KNOWN_EXTRAS | _REASONING_EXTRAS
    extras = request.extra_args or {}
    unknown = sorted(name for name, value in extras.items() if value and name not in known)
    if unknown:
        raise NotSupported(f"extra_args {', '.join(unknown)[:200]} are not supported")


def _salt(request: ReceivedRequest) -> str | None:
    return request.routing.cache_salt if request.routing is not None else None


def _refuse(sampling: SamplingOptions, output: OutputOptions) -> None:
    if sampling.use_beam_search:
        raise NotSupported("beam search is not supported")
    if sampling.best_of not in (None, 1, sampling.n):
        raise NotSupported(f"best_of is {sampling.best_of}; expected 1 or n")
    if sampling.n is not None and not 1 <= sampling.n <= _MAX_CHOICES:
        raise NotSupported(f"n is {sampling.n}; expected 1 to {_MAX_CHOICES}")
    if output.prompt_logprobs is not None:
        raise NotSupported("prompt_logprobs are not supported")


def _served(request: ReceivedRequest, target: EngineTarget) -> str:
    """The engine's name of the model, or of the adapter that the request names."""
    adapter = request.routing.lora_name if request.routing is not None else None
    if adapter is None:
        return target.model
    if adapter not in target.adapters:
        raise NotSupported(f"the engine does not serve the adapter {adapter[:100]!r}")
    return adapter


def _max_tokens(request: ReceivedRequest, target: EngineTarget) -> int | None:
    if request.stop_conditions.max_tokens is not None:
        return request.stop_conditions.max_tokens
    if target.context_length is None:
        return None
    return max(1, target.context_length - len(request.token_ids))


def _stop_ids(request: ReceivedRequest) -> list[int] | None:
    """The ids that end the output; those that end a generation too unless it ignores them."""
    stops = request.stop_conditions
    hidden = [] if stops.ignore_eos else stops.stop_token_ids_hidden or []
    lists = (stops.stop_token_ids or [], stops.stop_token_ids_visible or [], hidden)
    return list(dict.fromkeys(token for ids in lists for token in ids)) or None


def _constraint(guided: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in guided.items() if value is not None}
    unknown = set(found) - _CONSTRAINTS - {"backend"}
    if unknown:
        raise NotSupported(f"guided decoding by {', '.join(sorted(unknown))[:200]}")
    found.pop("backend", None)
    return found


# -- the engine's answers --------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    def engine(self) -> EngineUsage:
        details = self.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        return EngineUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=None if cached is None else CachedTokens(cached_tokens=cached),
        )


class _Logprobs(msgspec.Struct):
    tokens: list[str | None] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    kv_transfer_params: dict[str, Any] | None = None


_chunks: Final = msgspec.json.Decoder(_Chunk)


class _VllmReader:
    """Chunks of ``/v1/completions``. The ends of the choices wait for the usage behind them."""

    def __init__(self, role: Role) -> None:
        self._ends: list[EngineOutput] = []
        self._usage: EngineUsage | None = None
        self._handoff: dict[str, Any] | None = None
        self._prefill = role is Role.PREFILL
        self._tokens: list[int] = []

    def read(self, event: bytes) -> Iterator[EngineOutput]:
        try:
            chunk = _chunks.decode(event)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UpstreamFailure("protocol", f"invalid chunk of the engine: {error}") from None
        if chunk.error is not None:
            raise ErrorItem(_error_text(chunk.error))
        if chunk.usage is not None:
            self._usage = chunk.usage.engine()
        self._handoff = chunk.kv_transfer_params or self._handoff
        for choice in chunk.choices:
            if choice.token_ids is None and choice.finish_reason is None:
                raise ErrorItem(
                    "the engine does not return token ids (return_token_ids); "
                    "dynctl serve attach needs vLLM 0.10.2 or later"
                )
            if choice.token_ids and self._prefill:
                self._tokens += choice.token_ids
            elif choice.token_ids:
                log_probs, top = _logprobs(choice)
                yield EngineOutput(
                    token_ids=choice.token_ids,
                    index=choice.index,
                    log_probs=log_probs,
                    top_logprobs=top,
                )
            if choice.finish_reason is not None:
                self._ends.append(
                    EngineOutput(
                        token_ids=[],
                        index=choice.index,
                        finish_reason=_finish(choice.finish_reason),
                        stop_reason=choice.stop_reason,
                    )
                )

    def end(self) -> Iterator[EngineOutput]:
        if not self._ends:
            raise UpstreamFailure("reset", "the engine ended its response without a finish")
        handoff = None
        *earlier, last = self._ends
        if self._prefill:
            handoff = {"kv_transfer_params": self._handoff}
            # Dynamo's frontend looks for the hand-off in the first item and reads no further.
            last = msgspec.structs.replace(last, token_ids=self._tokens)
        yield from earlier
        yield msgspec.structs.replace(
            last, completion_usage=self._usage, disaggregated_params=handoff
        )


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | str | None = None
    output_token_logprobs: list[list[Any]] | None = None
    output_top_logprobs: list[list[list[Any]] | None] | None = None


class _Piece(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


_pieces: Final = msgspec.json.Decoder(_Piece)


class _SglangReader:
    """Chunks of ``/generate``, as SGLang 0.5.23 sends them.

    ``output_ids`` are all ids so far, or the new ones where SGLang streams them incrementally.
    """

    def __init__(self, request: ReceivedRequest) -> None:
        self._seen = 0
        self._finish: str | None = None
        self._usage: EngineUsage | None = None
        self._logprobs = request.output_options.logprobs is not None

    def read(self, event: bytes) -> Iterator[EngineOutput]:
        try:
            piece = _pieces.decode(event)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UpstreamFailure("protocol", f"invalid chunk of the engine: {error}") from None
        if piece.error is not None:
            raise ErrorItem(_error_text(piece.error))
        meta = piece.meta_info
        ids = piece.output_ids
        if ids is None:
            raise ErrorItem("the engine does not return output_ids; expected SGLang's /generate")
        new = ids[self._seen :] if len(ids) == meta.completion_tokens else ids
        self._seen += len(new)
        if new:
            yield EngineOutput(
                token_ids=new,
                index=0,
                log_probs=self._log_probs(meta, len(new)),
                top_logprobs=self._top_logprobs(meta, len(new)),
            )
        reason = meta.finish_reason
        if reason is not None:
            kind = str(reason.get("type")) if isinstance(reason, dict) else reason
            if kind == "error" or (kind == "abort" and isinstance(reason, dict)):
                raise ErrorItem(_error_text(reason))
            self._finish = _finish(kind)
            self._usage = EngineUsage(
                prompt_tokens=meta.prompt_tokens,
                completion_tokens=self._seen,
                total_tokens=meta.prompt_tokens + self._seen,
                prompt_tokens_details=CachedTokens(cached_tokens=meta.cached_tokens),
            )

    def end(self) -> Iterator[EngineOutput]:
        if self._finish is None:
            raise UpstreamFailure("reset", "the engine ended its response without a finish")
        yield EngineOutput(
            token_ids=[], index=0, finish_reason=self._finish, completion_usage=self._usage
        )

    def _log_probs(self, meta: _Meta, new: int) -> list[float] | None:
        rows = meta.output_token_logprobs
        if not self._logprobs or rows is None or len(rows) < new:
            return None
        with suppress(TypeError, ValueError, IndexError):
            return [float(row[0]) for row in rows[-new:]]
        return None

    def _top_logprobs(self, meta: _Meta, new: int) -> list[list[TopLogprob]] | None:
        """Rows of [log probability, token id, text], best first."""
        rows = meta.output_top_logprobs
        if not self._logprobs or rows is None or len(rows) < new:
            return None
        with suppress(TypeError, ValueError, IndexError):
            return [
                [
                    TopLogprob(rank=place, token_id=int(top[1]), logprob=float(top[0]))
                    for place, top in enumerate(row or [], 1)
                ]
                for row in rows[-new:]
            ]
        return None


def _finish(reason: str) -> str:
    found = _FINISHES.get(reason)
    if found is None:
        raise ErrorItem(f"the engine ended the output: {reason[:100]}")
    return found


def _logprobs(choice: _Choice) -> tuple[list[float] | None, list[list[TopLogprob]] | None]:
    """One number for each token, and the likeliest tokens of each, best first."""
    found, ids = choice.logprobs, choice.token_ids or []
    if found is None or len(found.token_logprobs) != len(ids):
        return None, None
    own = [0.0 if value is None else value for value in found.token_logprobs]
    if found.top_logprobs is None:
        return own, None
    tops = []
    for row in found.top_logprobs:
        ranked = sorted((row or {}).items(), key=lambda pair: -pair[1])
        tops.append(
            [
                TopLogprob(rank=place, token_id=int(name[len(_TOKEN_ID) :]), logprob=value)
                for place, (name, value) in enumerate(ranked, 1)
                if name.startswith(_TOKEN_ID) and name[len(_TOKEN_ID) :].isdigit()
            ]
        )
    return own, tops


async def _events(stream: EngineStream) -> AsyncIterator[bytes]:
    """The data of each server-sent event until ``[DONE]``; a whole answer is one event."""
    if "event-stream" not in stream.headers.get("content-type", ""):
        yield await stream.read(_MAX_LINE)
        return
    cut = EventCut()
    while data := await stream.readany():
        for number, event in enumerate(cut.feed(data), 1):
            if number % EVENTS_A_TURN == 0:
                await stream.turn()
            found = event_data(event)
            if found == DONE_DATA:
                await _to_end(stream)
                return
            if found:
                yield found
        if len(cut.waiting) > _MAX_LINE:
            raise UpstreamFailure("protocol", f"an event has more than {_MAX_LINE:,} bytes")
    last = event_data(cut.last())
    if last and last != DONE_DATA:
        yield last


async def _to_end(stream: EngineStream) -> None:
    """Read the end, so that the connection can be used again."""
    with suppress(UpstreamFailure):
        while await stream.readany():
            pass


def _message_of(failure: UpstreamFailure) -> str:
    """The engine's own words about a request that it refused; they go to its requester only."""
    reason = engine_reason(failure.body)
    if reason is None:
        return f"the engine returned status {failure.status} without a reason"
    return reason.message


def _error_text(error: Any) -> str:
    """The engine's own words in an error of a stream."""
    reason = engine_reason(msgspec.json.encode(error))
    return "no reason reported" if reason is None else reason.message


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
