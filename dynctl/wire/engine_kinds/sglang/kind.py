"""SGLang, as 0.5.23 describes itself and reads requests.

The names of metrics are those of 0.4 and 0.5 (older ones than 0.5.23 from their documentation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynctl.wire.engine_kinds.facts import EngineFacts, own_endpoint, positive_count, text_or_none
from dynctl.wire.engine_kinds.kind import Description, EngineKind
from dynctl.wire.engine_metrics import MetricNames

if TYPE_CHECKING:
    from dynctl.wire.engine_kinds.tokens import TokenApi
    from dynctl.wire.openai import ChatRequest

_NAME: Final = "sglang"
_MOST_PORT: Final = 65535
#: Algorithms of speculative decoding with which SGLang caches pairs of tokens.
_EAGLE: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
_ADDRESS: Final = "it chooses the address from which an engine fetches KV blocks"
_ROOM: Final = "it chooses the hand-off from which an engine fetches KV blocks"
_RANK: Final = "it chooses the rank of the engine, which the router does"


def facts_from_server_info(info: Mapping[str, Any], host: str) -> EngineFacts:
    """The facts in SGLang's ``GET /server_info`` (older releases: ``/get_server_info``).

    ``page_size`` is its block size. With EAGLE it caches pairs of tokens. Endpoints count only on
    ``host``, the worker's own.
    """
    algorithm = text_or_none(info.get("speculative_algorithm")) or ""
    page, tokens = (
        positive_count(info.get("page_size")),
        positive_count(info.get("max_total_num_tokens")),
    )
    events = _event_settings(info.get("kv_events_config"))
    mode = info.get("disaggregation_mode")
    role = mode if mode in ("prefill", "decode") else None
    port = positive_count(info.get("disaggregation_bootstrap_port"))
    bootstrap = f"*:{port}" if port and port <= _MOST_PORT and role == "prefill" else None
    return EngineFacts(
        role=role,
        # Its decode engines refuse a request that has no prefill engine.
        can_prefill=False if role == "decode" else None,
        block_size=page,
        dp=positive_count(info.get("dp_size")),
        total_blocks=tokens // page or None if page and tokens else None,
        max_num_batched_tokens=positive_count(info.get("max_prefill_tokens")),
        runtime_config={"enable_eagle": True} if algorithm.upper() in _EAGLE else {},
        kv_events=own_endpoint(events.get("endpoint"), host),
        replay=own_endpoint(events.get("replay_endpoint"), host),
        topic=text_or_none(events.get("topic")) or "",
        bootstrap=bootstrap,
        kind=_NAME if page else None,
    )


def _event_settings(settings: object) -> Mapping[str, Any]:
    """The settings of its KV events over ZMQ: an object, or one as JSON text; else empty."""
    if isinstance(settings, str):
        try:
            settings = msgspec.json.decode(settings)
        except (msgspec.DecodeError, RecursionError):
            return {}
    if isinstance(settings, dict) and settings.get("publisher") == "zmq":
        return settings
    return {}


def _own_tools(request: ChatRequest) -> list[Mapping[str, Any]] | None:
    """The tools of the Messages and Responses APIs as SGLang 0.5.23 gives them to the template: it
    fills in ``strict``, which it leaves out of a chat where the client did."""
    from dynctl.wire.anthropic import MessagesRequest
    from dynctl.wire.responses import ResponsesRequest

    if not request.tools or not isinstance(request, MessagesRequest | ResponsesRequest):
        return None
    missing: dict[str, Any] = {"strict": False}
    if isinstance(request, MessagesRequest):
        missing["description"] = ""
    filled: list[Mapping[str, Any]] = []
    for tool in request.tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            tool = {**tool, "function": _fill_in(function, missing)}
        filled.append(tool)
    return filled


def _fill_in(function: Mapping[str, Any], missing: Mapping[str, Any]) -> dict[str, Any]:
    """The function with the missing fields, in SGLang's order."""
    names = ("name", "description", "parameters", "strict", *function)
    return {
        name: missing.get(name) if function.get(name) is None else function[name]
        for name in dict.fromkeys(names)
    }


def _adapter_body(body: bytes, path: str, model: str, adapter: str) -> bytes:
    """The request for a LoRA adapter of ``model``, the engine's own name of it.

    SGLang 0.5.23 lists an adapter as a model, and answers a request for that name with the base
    model. ``lora_path`` is a field of all endpoints but ``/v1/messages``, which reads the adapter
    from ``model``.
    """
    if path == "/v1/messages":
        more = {"model": f"{model}:{adapter}"}
    else:
        more = {"lora_path": adapter}
    return msgspec.json.encode({**msgspec.json.decode(body), **more})


def _token_api() -> TokenApi:
    from dynctl.wire.engine_kinds.sglang.tokens import API

    return API


SGLANG: Final = EngineKind(
    name=_NAME,
    label="SGLang",
    description=Description(("/server_info", "/get_server_info"), facts_from_server_info),
    metrics=MetricNames(waiting=("sglang:num_queue_reqs",), usage=("sglang:token_usage",)),
    chat_reading="SGLang",
    own_tools=_own_tools,
    # With these a client chooses an adapter, or keeps caches apart, by itself.
    cache_keys=("lora_path", "extra_key"),
    without_salt=frozenset({"/v1/messages", "/v1/embeddings"}),
    directions={
        "bootstrap_host": _ADDRESS,
        "bootstrap_port": _ADDRESS,
        "bootstrap_room": _ROOM,
        "data_parallel_rank": _RANK,
        "routed_dp_rank": _RANK,
        "disagg_prefill_dp_rank": _ROOM,
        "session_params": "it continues the context of another request",
        "custom_logit_processor": "it is code that the engine runs",
    },
    direction_headers={
        "x-override-bootstrap-host": "bootstrap_host",
        "x-override-bootstrap-port": "bootstrap_port",
        "x-override-bootstrap-room": "bootstrap_room",
        "x-override-routed-dp-rank": "routed_dp_rank",
        "x-override-disagg-prefill-dp-rank": "disagg_prefill_dp_rank",
        "x-override-priority": "priority",
    },
    # It would answer with the base model.
    without_adapters=frozenset({"/v1/responses"}),
    adapter_body=_adapter_body,
    token_api=_token_api,
)
