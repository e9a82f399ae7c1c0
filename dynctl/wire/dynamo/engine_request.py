"""The request that a Dynamo frontend sends to a worker: token ids and options, no text of a chat.

Dynamo calls it ``PreprocessedRequest``. Its field names, which of them are written as null and
which are left out, are as captured from a 1.6.1 frontend. Unknown fields of a received request are
ignored. It is the body of a message of the request plane (:mod:`.request_plane`), as msgpack or
JSON.
"""

from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from dynctl.base.json_fields import U32_MAX

U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]

MAX_TOKENS: Final = 4 * 1024 * 1024
"""The most token ids of one request; the longest contexts of models have a quarter of it."""


def _null() -> Any:
    """The default of a field that is written also when it is null.

    msgspec leaves out a field that has its default, but not one whose default is made by a
    function.
    """
    return None


def _empty() -> list[Any]:
    """As `_null`, for a list that is written also when it is empty."""
    return []


class StopConditions(Struct, frozen=True, kw_only=True):
    """What ends the output. ``max_tokens`` None: as long as the engine allows.

    ``stop_token_ids_hidden`` end it too and are not part of the text: the ids of the model that end
    a generation, and those of the request.
    """

    max_tokens: U32 | None = None
    stop: list[str] | None = None
    stop_token_ids: list[U32] | None = None
    stop_token_ids_visible: list[U32] | None = None
    stop_token_ids_hidden: list[U32] | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: U32 | None = None


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """How the engine chooses tokens; None everywhere: as the engine is configured."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: dict[str, Any] | None = None


class OutputOptions(Struct, frozen=True, kw_only=True):
    """What the engine reports beside tokens. ``logprobs``: alternatives per token."""

    logprobs: U32 | None = None
    prompt_logprobs: U32 | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class RoutingHints(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers that a router chose or that the client asked for.

    ``expected_output_tokens`` and the priorities are the client's; ``routing_constraints`` has
    ``required_taints`` and ``preferred_taints`` as in a request to a router.
    """

    backend_instance_id: int | None = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    expected_output_tokens: U32 | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    priority_jump: float | None = None
    strict_priority: U32 | None = None
    priority: int | None = None
    allowed_worker_ids: list[int] | None = None
    routing_constraints: dict[str, Any] | None = None


class PrefillResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a prefill worker hands over to the decode worker; engines alone read the parameters."""

    disaggregated_params: Any
    prompt_tokens_details: dict[str, Any] | None = None


class BootstrapInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a decode worker meets its prefill worker, for engines that transfer while it runs.

    ``handoff_id`` names the transfer, the same for both legs: 16 bytes in msgpack, text in JSON.
    Dynamo's mock workers refuse a request without it.
    """

    bootstrap_host: str
    bootstrap_port: Annotated[int, Meta(ge=0, le=65535)]
    bootstrap_room: Annotated[int, Meta(ge=0)]
    handoff_id: UUID | None = None


class EngineRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to a worker.

    ``mdc_sum`` is the checksum of the model card that the frontend used. ``annotations`` are the
    client's. ``router_config_override`` has the settings of a router that count for this request.
    ``extra_args`` is for engines alone.
    """

    model: str = msgspec.field(default_factory=str)
    token_ids: Annotated[list[U32], Meta(max_length=MAX_TOKENS)]
    stop_conditions: StopConditions = msgspec.field(default_factory=StopConditions)
    sampling_options: SamplingOptions = msgspec.field(default_factory=SamplingOptions)
    output_options: OutputOptions = msgspec.field(default_factory=OutputOptions)
    eos_token_ids: list[U32] = msgspec.field(default_factory=_empty)
    mdc_sum: str | None = msgspec.field(default_factory=_null)
    annotations: list[str] = msgspec.field(default_factory=_empty)
    routing: RoutingHints | None = None
    router_config_override: dict[str, Any] | None = msgspec.field(default_factory=_null)
    prefill_result: PrefillResult | None = None
    bootstrap_info: BootstrapInfo | None = None
    extra_args: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    request_timestamp_ms: float | None = None


class ReceivedRequest(EngineRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A request with what dynctl's frontends never send.

    Media: ``multi_modal_data`` with its uuids, embeddings of a prompt (``prompt_embeds``), and what
    an encoder made of them (``encoder_result``). ``require_reasoning``: guided decoding begins
    after the reasoning.
    """

    multi_modal_data: Any = None
    multi_modal_uuids: Any = None
    prompt_embeds: Any = None
    encoder_result: Any = None
    require_reasoning: bool | None = None
