"""vLLM's ``/v1/completions`` with the prompt's token ids and ``return_token_ids``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from dynctl.wire.dynamo.engine_output import CachedTokens, EngineOutput, EngineUsage, TopLogprob
from dynctl.wire.dynamo.engine_request import ReceivedRequest
from dynctl.wire.engine_kinds.handoff import PULL
from dynctl.wire.engine_kinds.tokens import (
    EngineRefused,
    EngineTarget,
    InvalidOutput,
    NotSupported,
    TokenApi,
    UnexpectedAnswer,
    constraints,
    finish_reason_of,
    max_tokens,
    model_or_adapter,
    salt_of,
    sampling_fields,
    stop_ids,
)
from router_core import Role

_TOKEN_ID: Final = "token_id:"  # noqa: S105 - the prefix of a token's name


def _request_body(request: ReceivedRequest, target: EngineTarget) -> dict[str, Any]:
    stops, sampling, output = (
        request.stop_conditions,
        request.sampling_options,
        request.output_options,
    )
    if request.bootstrap_info is not None:
        raise NotSupported("bootstrap_info with vLLM")
    fields: dict[str, Any] = {
        "model": model_or_adapter(request, target),
        "prompt": request.token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": max_tokens(request, target),
        "n": sampling.n,
        **sampling_fields(sampling),
        "seed": sampling.seed,
        "min_tokens": stops.min_tokens,
        "ignore_eos": stops.ignore_eos,
        "stop_token_ids": stop_ids(request),
        "thinking_token_budget": stops.max_thinking_tokens,
        "skip_special_tokens": output.skip_special_tokens,
        "cache_salt": salt_of(request),
    }
    if output.logprobs is not None:
        fields["logprobs"] = output.logprobs
        fields["return_tokens_as_token_ids"] = True
    if sampling.guided_decoding:
        fields["structured_outputs"] = constraints(sampling.guided_decoding)
    if target.role is Role.PREFILL:
        # The hand-off is in the whole answer only.
        fields |= {"max_tokens": 1, "min_tokens": 1, "stream": False, "stream_options": None}
        fields["kv_transfer_params"] = PULL
    elif request.prefill_result is not None:
        params = request.prefill_result.disaggregated_params
        if isinstance(params, dict) and isinstance(params.get("kv_transfer_params"), dict):
            fields["kv_transfer_params"] = params["kv_transfer_params"]
    return {name: value for name, value in fields.items() if value is not None}


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


class _TokenChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_TokenChoice] = []
    usage: _Usage | None = None
    error: Any = None
    kv_transfer_params: dict[str, Any] | None = None


_chunks: Final = msgspec.json.Decoder(_Chunk)


class VllmReader:
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
            raise InvalidOutput("protocol", f"invalid chunk of the engine: {error}") from None
        if chunk.error is not None:
            raise EngineRefused(chunk.error)
        if chunk.usage is not None:
            self._usage = chunk.usage.engine()
        self._handoff = chunk.kv_transfer_params or self._handoff
        for choice in chunk.choices:
            if choice.token_ids is None and choice.finish_reason is None:
                raise UnexpectedAnswer(
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
                        finish_reason=finish_reason_of(choice.finish_reason),
                        stop_reason=choice.stop_reason,
                    )
                )

    def end(self) -> Iterator[EngineOutput]:
        if not self._ends:
            raise InvalidOutput("reset", "the engine ended its response without a finish")
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


def _logprobs(choice: _TokenChoice) -> tuple[list[float] | None, list[list[TopLogprob]] | None]:
    """One number for each token, and the likeliest tokens of each, best first."""
    logprobs, ids = choice.logprobs, choice.token_ids or []
    if logprobs is None or len(logprobs.token_logprobs) != len(ids):
        return None, None
    own = [0.0 if value is None else value for value in logprobs.token_logprobs]
    if logprobs.top_logprobs is None:
        return own, None
    tops = []
    for row in logprobs.top_logprobs:
        ranked = sorted((row or {}).items(), key=lambda pair: -pair[1])
        tops.append(
            [
                TopLogprob(rank=place, token_id=int(name[len(_TOKEN_ID) :]), logprob=value)
                for place, (name, value) in enumerate(ranked, 1)
                if name.startswith(_TOKEN_ID) and name[len(_TOKEN_ID) :].isdigit()
            ]
        )
    return own, tops


API: Final = TokenApi(
    "/v1/completions", _request_body, lambda request, target: VllmReader(target.role)
)
