"""What a Dynamo worker answers: pieces of output, each with new token ids.

Dynamo calls a piece ``LLMEngineOutput`` and sends it inside ``Annotated``: an object with ``data``,
or with ``event`` and ``comment`` or ``error``. Field names are as captured from 1.6.1 workers.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import WireError
from dynctl.base.json_fields import U32_MAX
from dynctl.wire.dynamo.request_plane import RawItem

_U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
_FINISHES: Final = frozenset(
    {"eos", "length", "stop", "cancelled", "abort", "content_filter", "error"}
)

ERROR_EVENT: Final = "error"
"""The event of an item that ends an answer with an error."""


#: The default of a field that is written also when it is null (msgspec keeps it). Made without a
#: call of Python's: an output of a worker has seven of them.
_null: Final[Callable[[], Any]] = type(None)
_text: Final = partial(str, "text")


class TopLogprob(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the likeliest tokens at a position; rank 1 is the likeliest."""

    rank: _U32
    token_id: _U32
    token: str | None = msgspec.field(default_factory=_null)
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None = None


class CachedTokens(Struct, frozen=True, kw_only=True):
    """``prompt_tokens_details`` of a usage."""

    audio_tokens: _U32 | None = None
    cached_tokens: _U32 | None = None


class EngineUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts as the engine has them; the last one that it sends counts."""

    prompt_tokens: _U32
    completion_tokens: _U32
    total_tokens: _U32
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: dict[str, Any] | None = None


class EngineOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One piece of output.

    ``token_ids`` are new ones, possibly none. ``text`` is set by engines that detokenize
    themselves, otherwise the frontend does it. ``finish_reason`` is ``eos``, ``length``, ``stop``,
    ``cancelled``, ``content_filter``, or an object ``{"error": MESSAGE}``. ``index`` is the choice,
    None for 0. ``log_probs`` has one number for each token id, ``top_logprobs`` one list.
    ``disaggregated_params`` go from a prefill worker to the decode worker.
    """

    token_ids: list[_U32]
    tokens: list[str | None] | None = msgspec.field(default_factory=_null)
    text: str | None = msgspec.field(default_factory=_null)
    output_type: str = msgspec.field(default_factory=_text)
    cum_log_probs: float | None = msgspec.field(default_factory=_null)
    log_probs: list[float] | None = msgspec.field(default_factory=_null)
    top_logprobs: list[list[TopLogprob]] | None = msgspec.field(default_factory=_null)
    finish_reason: str | dict[str, str] | None = msgspec.field(default_factory=_null)
    stop_reason: str | int | None = None
    index: _U32 | None = msgspec.field(default_factory=_null)
    disaggregated_params: Any = None
    extra_args: Any = None
    completion_usage: EngineUsage | None = None
    engine_data: Any = None
    routing_data: dict[str, Any] | None = None

    @property
    def error(self) -> str | None:
        """The message of a finish that is an error."""
        reason = self.finish_reason
        return reason.get("error") if isinstance(reason, dict) else None


class EngineItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of an answer: output, or an event with comments.

    ``event`` "error" ends the answer; ``error`` or ``comment`` have its reason.
    """

    data: EngineOutput | None = None
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None
    error: Any = None


_MSGPACK: Final = msgspec.msgpack.Decoder(EngineItem)
_JSON: Final = msgspec.json.Decoder(EngineItem)


def decode_engine_item(item: RawItem) -> EngineItem:
    """An item of a worker's answer.

    Raises WireError, which never quotes output, for anything that Dynamo does not accept: a finish
    reason that it does not know is one of them.
    """
    try:
        read = (_MSGPACK if item.codec == "msgpack" else _JSON).decode(item.document)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("item", str(error)) from None
    reason = read.data.finish_reason if read.data is not None else None
    if reason is None:
        return read
    if isinstance(reason, str):
        known = reason in _FINISHES and reason != "error"
    else:
        known = list(reason) == ["error"]
    if not known:
        raise WireError("item.data.finish_reason", "unknown finish reason")
    return read
