"""The hand-off from prefill to decode, in the two formats that engines have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

#: What connectors need to keep the blocks of a prefill for another engine.
PULL: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Fields that request more than the one token of a prefill hop.
_DROPPED: Final = ("stream_options", "min_tokens", "best_of", "n")


#: The endpoints whose output tokens have another bound.
_BOUNDS: Final = {"/v1/responses": ("max_output_tokens",), "/v1/messages": ("max_tokens",)}


def prefill_body(body: Mapping[str, Any], path: str = "") -> bytes:
    """vLLM's prefill request: one token, no stream, blocks kept for the decode engine. ``path``:
    that of the endpoint."""
    plain = {key: value for key, value in body.items() if key not in _DROPPED}
    plain["stream"] = False
    for name in _BOUNDS.get(path, ("max_tokens", "max_completion_tokens")):
        plain[name] = 1
    plain["kv_transfer_params"] = PULL
    return msgspec.json.encode(plain)


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None) -> bytes:
    """vLLM's decode request: the client's request, and the location of its blocks."""
    if kv_transfer_params is None:
        return msgspec.json.encode(body)
    return msgspec.json.encode({**body, "kv_transfer_params": kv_transfer_params})


def kv_transfer_params(answer: bytes) -> Mapping[str, Any] | None:
    """The transfer parameters in a prefill engine's response; None if it has none.

    Raises ValueError for a response that is not a JSON object.
    """
    try:
        response = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("the prefill response is not JSON") from None
    if not isinstance(response, dict):
        raise ValueError("the prefill response is not a JSON object")
    params = response.get("kv_transfer_params")
    return params if isinstance(params, dict) else None


def bootstrap_room(sample: float, dp_size: int, dp_rank: int) -> int:
    """A room number below 2^53 (JSON-safe) that encodes the prefill rank: ``room % dp_size``.

    ``sample``: a random number in [0, 1).
    """
    room = int(sample * (2**53 - dp_size))
    return room - room % dp_size + dp_rank


def bootstrap_body(body: Mapping[str, Any], address: tuple[str, int], room: int) -> bytes:
    """SGLang's request, the same for both engines."""
    host, port = address
    return msgspec.json.encode(
        {**body, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    )


@dataclass(frozen=True, slots=True)
class HandoffRules:
    """How one kind of engine hands a request over.

    Engines without a bootstrap address: ``prefill`` makes the body of the first hop, of a body and
    the endpoint's path; ``handed_over`` reads its answer, and raises ValueError; ``decode`` makes
    the body of the second. Engines with one get the body of ``pair`` at once, and meet.
    """

    prefill: Callable[[Mapping[str, Any], str], bytes] = prefill_body
    handed_over: Callable[[bytes], Any] = kv_transfer_params
    decode: Callable[[Mapping[str, Any], Any], bytes] = decode_body
    pair: Callable[[Mapping[str, Any], tuple[str, int], int], bytes] = bootstrap_body
