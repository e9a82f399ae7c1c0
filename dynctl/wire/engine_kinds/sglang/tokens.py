"""SGLang's own ``/generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from dynctl.wire.dynamo.engine_output import CachedTokens, EngineOutput, EngineUsage, TopLogprob
from dynctl.wire.dynamo.engine_request import ReceivedRequest
from dynctl.wire.engine_kinds.tokens import (
    EngineRefused,
    EngineTarget,
    InvalidOutput,
    NotSupported,
    TokenApi,
    UnexpectedAnswer,
    bootstrap_fields,
    constraints,
    finish_reason_of,
    max_tokens,
    model_or_adapter,
    salt_of,
    sampling_fields,
    stop_ids,
)
from router_core import Role


def _request_body(request: ReceivedRequest, target: EngineTarget) -> dict[str, Any]:
    _refuse_unsupported(request, target)
    meeting, output = request.bootstrap_info, request.output_options
    guided = request.sampling_options.guided_decoding
    constraint = constraints(guided) if guided else {}
    fields: dict[str, Any] = {
        "input_ids": request.token_ids,
        "stream": True,
        "sampling_params": _sampling_params(request, target, constraint),
    }
    if meeting is not None:
        fields |= bootstrap_fields(meeting)
    model = model_or_adapter(request, target)
    if model != target.model:
        fields["lora_path"] = model
    if (salt := salt_of(request)) is not None:
        # Older releases keep prompts apart by extra_key alone; 0.5.23 publishes cache_salt alone,
        # without which the blocks would be taken for those of unsalted prompts.
        fields |= {"extra_key": salt, "cache_salt": salt}
    if request.require_reasoning and constraint:
        fields["require_reasoning"] = True
    if output.logprobs is not None:
        fields |= {"return_logprob": True, "top_logprobs_num": output.logprobs}
    return fields


def _refuse_unsupported(request: ReceivedRequest, target: EngineTarget) -> None:
    meeting, sampling = request.bootstrap_info, request.sampling_options
    if target.role is Role.AGGREGATED and (meeting or request.prefill_result) is not None:
        raise NotSupported("the hand-off of a disaggregated fleet to an engine that does both")
    if target.role is not Role.AGGREGATED and meeting is None:
        raise NotSupported(
            f"a request without a bootstrap room; SGLang's {target.role.value} engines expect one, "
            "which frontends name for prefill workers with a bootstrap address"
        )
    if sampling.n not in (None, 1):
        raise NotSupported(f"n is {sampling.n}; expected 1 for SGLang")
    if request.stop_conditions.max_thinking_tokens is not None:
        raise NotSupported("max_thinking_tokens with SGLang")


def _sampling_params(
    request: ReceivedRequest, target: EngineTarget, constraint: Mapping[str, Any]
) -> dict[str, Any]:
    if constraint.keys() - {"json", "regex", "grammar"}:
        raise NotSupported(f"guided decoding by {', '.join(sorted(constraint))} with SGLang")
    stops, sampling = request.stop_conditions, request.sampling_options
    schema = constraint.get("json")
    if schema is not None and not isinstance(schema, str):
        schema = msgspec.json.encode(schema).decode()
    params = {
        "max_new_tokens": max_tokens(request, target),
        "min_new_tokens": stops.min_tokens,
        "ignore_eos": stops.ignore_eos,
        "stop_token_ids": stop_ids(request),
        **sampling_fields(sampling),
        "sampling_seed": sampling.seed,
        "json_schema": schema,
        "regex": constraint.get("regex"),
        "ebnf": constraint.get("grammar"),
    }
    return {name: value for name, value in params.items() if value is not None}


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


class SglangReader:
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
            raise InvalidOutput("protocol", f"invalid chunk of the engine: {error}") from None
        if piece.error is not None:
            raise EngineRefused(piece.error)
        meta = piece.meta_info
        ids = piece.output_ids
        if ids is None:
            raise UnexpectedAnswer(
                "the engine does not return output_ids; expected SGLang's /generate"
            )
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
                raise EngineRefused(reason)
            self._finish = finish_reason_of(kind)
            self._usage = EngineUsage(
                prompt_tokens=meta.prompt_tokens,
                completion_tokens=self._seen,
                total_tokens=meta.prompt_tokens + self._seen,
                prompt_tokens_details=CachedTokens(cached_tokens=meta.cached_tokens),
            )

    def end(self) -> Iterator[EngineOutput]:
        if self._finish is None:
            raise InvalidOutput("reset", "the engine ended its response without a finish")
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


API: Final = TokenApi("/generate", _request_body, lambda request, target: SglangReader(request))
