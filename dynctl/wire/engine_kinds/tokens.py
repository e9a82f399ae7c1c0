"""Tokens of an engine for a Dynamo frontend: what the translations of all kinds share.

Text is the frontend's work: stop strings are not passed on, and the engine's text is ignored. What
an engine cannot do as requested is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from dynctl.wire.dynamo.engine_output import EngineOutput
from dynctl.wire.dynamo.engine_request import (
    BootstrapInfo,
    OutputOptions,
    ReceivedRequest,
    SamplingOptions,
)
from router_core import Role

_SAMPLING: Final = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "min_p"),
)
_MAX_CHOICES: Final = 128
_FINISHES: Final = {"stop": "stop", "length": "length", "abort": "cancelled", "eos": "eos"}
_MEDIA: Final = ("multi_modal_data", "multi_modal_uuids", "prompt_embeds", "encoder_result")
#: What extra_args may have: for the frontend, or copies of what is elsewhere in the request.
_KNOWN_EXTRAS: Final = {"nvext", "messages", "formatted_prompt"}
#: Also these, where no guided decoding reads them.
_REASONING_EXTRAS: Final = {"reasoning_ended", "reasoning_parser_kwargs"}
_CONSTRAINTS: Final = {"json", "regex", "choice", "grammar", "whitespace_pattern", "structural_tag"}


class NotSupported(Exception):
    """The request needs something that the engine cannot do over HTTP."""


class EngineRefused(Exception):
    """The engine's answer is an error. ``error``: its own JSON."""

    def __init__(self, error: Any) -> None:
        super().__init__(error)
        self.error = error


class UnexpectedAnswer(Exception):
    """The engine's answer has no tokens, or the engine itself ended the output."""


class InvalidOutput(Exception):
    """The engine's answer cannot be read (``protocol``) or has no end (``reset``)."""

    def __init__(self, kind: Literal["protocol", "reset"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """The engine: ``model`` is its own name of the model, ``ranks`` its data-parallel ranks.

    ``context_length`` None: unknown.
    """

    url: str
    model: str
    api: TokenApi
    role: Role = Role.AGGREGATED
    ranks: int = 1
    context_length: int | None = None
    adapters: tuple[str, ...] = ()


class TokenReader(Protocol):
    """Reads one answer. Raises EngineRefused, UnexpectedAnswer or InvalidOutput."""

    def read(self, event: bytes) -> Iterator[EngineOutput]:
        """The outputs of the data of one event, or of a whole answer."""
        ...

    def end(self) -> Iterator[EngineOutput]:
        """The outputs after the last event."""
        ...


@dataclass(frozen=True, slots=True)
class TokenApi:
    """How a kind of engine takes and returns tokens. ``body`` raises NotSupported."""

    path: str
    body: Callable[[ReceivedRequest, EngineTarget], dict[str, Any]]
    reader: Callable[[ReceivedRequest, EngineTarget], TokenReader]


def engine_body(request: ReceivedRequest, target: EngineTarget) -> tuple[str, dict[str, Any]]:
    """URL and body of the engine's request. Raises NotSupported."""
    if not request.token_ids:
        raise NotSupported("the prompt has no tokens")
    refuse_other_input(request)
    refuse_options(request.sampling_options, request.output_options)
    return f"{target.url}{target.api.path}", target.api.body(request, target)


def bootstrap_fields(meeting: BootstrapInfo) -> dict[str, Any]:
    """Where a prefill and a decode engine meet, as SGLang and Dynamo name it."""
    return {
        "bootstrap_host": meeting.bootstrap_host,
        "bootstrap_port": meeting.bootstrap_port,
        "bootstrap_room": meeting.bootstrap_room,
    }


def refuse_other_input(request: ReceivedRequest) -> None:
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


def salt_of(request: ReceivedRequest) -> str | None:
    """The cache salt of a request."""
    return request.routing.cache_salt if request.routing is not None else None


def refuse_options(sampling: SamplingOptions, output: OutputOptions) -> None:
    """Refuse what no engine does over HTTP."""
    if sampling.use_beam_search:
        raise NotSupported("beam search is not supported")
    if sampling.best_of not in (None, 1, sampling.n):
        raise NotSupported(f"best_of is {sampling.best_of}; expected 1 or n")
    if sampling.n is not None and not 1 <= sampling.n <= _MAX_CHOICES:
        raise NotSupported(f"n is {sampling.n}; expected 1 to {_MAX_CHOICES}")
    if output.prompt_logprobs is not None:
        raise NotSupported("prompt_logprobs are not supported")


def model_or_adapter(request: ReceivedRequest, target: EngineTarget) -> str:
    """The engine's name of the model, or of the adapter that the request names."""
    adapter = request.routing.lora_name if request.routing is not None else None
    if adapter is None:
        return target.model
    if adapter not in target.adapters:
        raise NotSupported(f"the engine does not serve the adapter {adapter[:100]!r}")
    return adapter


def sampling_fields(sampling: SamplingOptions) -> dict[str, Any]:
    """The options of sampling that all engines call as Dynamo does."""
    return {name: getattr(sampling, name) for name in _SAMPLING}


def max_tokens(request: ReceivedRequest, target: EngineTarget) -> int | None:
    """The output tokens of a request; without a number what the context has left, None: unknown."""
    if request.stop_conditions.max_tokens is not None:
        return request.stop_conditions.max_tokens
    if target.context_length is None:
        return None
    return max(1, target.context_length - len(request.token_ids))


def stop_ids(request: ReceivedRequest) -> list[int] | None:
    """The ids that end the output; those that end a generation too unless it ignores them."""
    stops = request.stop_conditions
    hidden = [] if stops.ignore_eos else stops.stop_token_ids_hidden or []
    lists = (stops.stop_token_ids or [], stops.stop_token_ids_visible or [], hidden)
    return list(dict.fromkeys(token for ids in lists for token in ids)) or None


def constraints(guided: Mapping[str, Any]) -> dict[str, Any]:
    """The constraints of guided decoding that are set."""
    given = {name: value for name, value in guided.items() if value is not None}
    given.pop("backend", None)
    unknown = given.keys() - _CONSTRAINTS
    if unknown:
        raise NotSupported(f"guided decoding by {', '.join(sorted(unknown))[:200]}")
    return given


def finish_reason_of(reason: str) -> str:
    """Dynamo's word for an engine's reason to end."""
    if reason not in _FINISHES:
        raise UnexpectedAnswer(f"the engine ended the output: {reason[:100]}")
    return _FINISHES[reason]
