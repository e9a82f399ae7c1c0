"""Fields of a client's body, and headers, that direct an engine past the router.

An engine that honours them fetches KV blocks from an address, reads or continues the work of
another request, or runs code, as the sender chose. The router writes the first of them itself for a
hand-off, so they are refused from clients that are not granted them. What the router itself reads
and checks (``nvext`` with its pins, hints and constraints), what keeps caches apart
(``cache_salt``, ``extra_key``), and names that choose nothing but an adapter of the engine
(``lora_path``) or the request's own id (``rid``, ``request_id``) are no directions.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

from dynctl.base.decode_errors import RequestError

_ADDRESS: Final = "it chooses the address from which an engine fetches KV blocks"
_ROOM: Final = "it chooses the hand-off from which an engine fetches KV blocks"
_RANK: Final = "it chooses the rank of the engine, which the router does"
DIRECTIONS: Final[Mapping[str, str]] = {
    # vLLM
    "kv_transfer_params": _ADDRESS,
    "ec_transfer_params": "it chooses the address from which an engine fetches embeddings",
    # SGLang
    "bootstrap_host": _ADDRESS,
    "bootstrap_port": _ADDRESS,
    "bootstrap_room": _ROOM,
    "data_parallel_rank": _RANK,
    "routed_dp_rank": _RANK,
    "disagg_prefill_dp_rank": _ROOM,
    "session_params": "it continues the context of another request",
    "custom_logit_processor": "it is code that the engine runs",
    # Both. It is refused, not removed: a client that sends it expects to be served earlier.
    "priority": "it moves the request before those of other clients in the engine's queue",
    # Dynamo
    "nvext.metadata_upload": "it chooses the address to which an engine writes",
}
"""Field of a body -> what it does, as the second half of a sentence."""

#: Objects of a body that may have fields of `DIRECTIONS` as well: vLLM keeps ``kv_transfer_params``
#: among its ``vllm_xargs``; ``sampling_params`` are of its API for token ids.
_CARRIERS: Final = (("vllm_xargs",), ("sampling_params", "extra_args"))

DIRECTING: Final = frozenset(
    {*(name.partition(".")[0] for name in DIRECTIONS), *(path[0] for path in _CARRIERS)}
)
"""Top-level fields that a body has if :func:`check_directions` can refuse it."""

ENGINE_HEADERS: Final[Mapping[str, str]] = {
    "x-data-parallel-rank": "data_parallel_rank",
    "x-vllm-priority": "priority",
    "x-override-bootstrap-host": "bootstrap_host",
    "x-override-bootstrap-port": "bootstrap_port",
    "x-override-bootstrap-room": "bootstrap_room",
    "x-override-routed-dp-rank": "routed_dp_rank",
    "x-override-disagg-prefill-dp-rank": "disagg_prefill_dp_rank",
    "x-override-priority": "priority",
}
"""Header of vLLM 0.32 or SGLang 0.5.23 -> the field of `DIRECTIONS` that it sets. A frontend passes
on no header that it does not name; a gateway passes on all that are not removed."""


def check_directions(body: Mapping[str, Any], allowed: Set[str]) -> None:
    """Raise RequestError (400) for a field of `DIRECTIONS` that is not among ``allowed``.

    A field that is null directs nothing.
    """
    for path, name in _directions(body):
        if name not in allowed:
            raise RequestError(
                400,
                "field_not_allowed",
                path,
                f"not accepted from this client, because {DIRECTIONS[name]}; leave it out, or "
                f"let the operator set --client-fields {name}",
            )


def _directions(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a body has fields of `DIRECTIONS`: path and name of each."""
    for name in DIRECTIONS:
        if _value_at(body, name.split(".")) is not None:
            yield name, name
    for path in _CARRIERS:
        carried = _value_at(body, path)
        if isinstance(carried, Mapping):
            for name in DIRECTIONS:
                if carried.get(name) is not None:
                    yield ".".join((*path, name)), name


def _value_at(body: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The value at a path of objects; None where there is none."""
    value: Any = body
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value
