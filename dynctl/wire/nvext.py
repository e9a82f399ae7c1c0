"""``nvext``: the routing controls that a client may put into an OpenAI request, as in Dynamo 1.6.

Keys and their nesting are those that a 1.6.1 frontend lists when it refuses another one. Dynamo
answers a wrong value with the deserializer's own text; here the path of the field is named.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from dynctl.base.decode_errors import RequestError
from dynctl.base.json_fields import (
    U32_MAX,
    U64_MAX,
    read_array,
    read_flag,
    read_integer,
    read_number,
    read_object,
    read_text,
    read_tokens,
    refuse_unknown,
)
from router_core import NO_CONSTRAINTS, RoutingConstraints, constraints

QUERY_INSTANCE_ID: Final = "query_instance_id:"
"""The annotation that asks for the routing only. The colon is part of it: without the colon Dynamo
runs the request for real, and so must we."""

WORKER_HEADER: Final = "x-worker-instance-id"
PREFILL_HEADER: Final = "x-prefill-instance-id"
REQUEST_ID_HEADER: Final = "x-request-id"

MAX_TOKENS_IN_REQUEST: Final = 4 * 1024 * 1024
_MAX_TAINTS: Final = 256
_MAX_LIST: Final = 256
_MAX_TEXT: Final = 1024
_MAX_REQUEST_ID: Final = 256
_I32: Final = 2**31


@dataclass(frozen=True, slots=True)
class AgentHints:
    """What the client knows about its own request.

    ``priority`` moves it in the queue, ``strict_priority`` puts it in a tier of its own, ``osl``
    is the expected output length in tokens, ``latency_sensitivity`` a weight.
    """

    priority: int | None = None
    strict_priority: int | None = None
    osl: int | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


@dataclass(frozen=True, slots=True)
class RouterTargets:
    """Latency targets, in the unit that the client's deployment uses (Dynamo passes them on)."""

    ttft_target: float | None = None
    itl_target: float | None = None


@dataclass(frozen=True, slots=True)
class NvExt:
    """The controls of one request; field names are the wire's. None means not given."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: tuple[str, ...] = ()
    backend_instance_id: int | None = None
    token_data: tuple[int, ...] | None = None
    max_thinking_tokens: int | None = None
    cache_salt: str | None = None
    extra_fields: tuple[str, ...] = ()
    metadata_upload: Any = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    agent_hints: AgentHints = AgentHints()
    request_timestamp_ms: float | None = None
    routing_constraints: RoutingConstraints = NO_CONSTRAINTS
    router: RouterTargets = RouterTargets()

    @property
    def dry_run(self) -> bool:
        """Whether only the routing is asked for; nothing is booked and no engine is called."""
        return any(text.startswith(QUERY_INSTANCE_ID) for text in self.annotations)

    def wants(self, extra_field: str) -> bool:
        """Whether the answer's ``nvext`` must hold ``worker_id``, ``timing``, ...; unknown names
        are legal and ignored, as in Dynamo."""
        return extra_field in self.extra_fields


NO_NVEXT: Final = NvExt()
KNOWN_KEYS: Final = tuple(field.name for field in fields(NvExt))
_HINT_KEYS: Final = tuple(field.name for field in fields(AgentHints))
_TARGET_KEYS: Final = tuple(field.name for field in fields(RouterTargets))
_CONSTRAINT_KEYS: Final = ("required_taints", "preferred_taints")


def parse_nvext(value: Any, path: str = "nvext") -> NvExt:
    """The controls in a request's ``nvext``, where null and absent mean none.

    Raises RequestError (400) naming the path of an unknown key or a wrong value.
    """
    if value is None:
        return NO_NVEXT
    found = read_object(value, path)
    refuse_unknown(found, path, KNOWN_KEYS)
    given: dict[str, Any] = {}
    for key, item in found.items():
        if item is not None:
            given[key] = _READERS[key](item, f"{path}.{key}")
    return NvExt(**given)


def apply_headers(nvext: NvExt, headers: Mapping[str, str]) -> NvExt:
    """``nvext`` with the pins that headers ask for; a header wins over the body, as in Dynamo.

    ``x-worker-instance-id`` pins the worker that answers (decode, or aggregated),
    ``x-prefill-instance-id`` the prefill worker.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    pinned: dict[str, Any] = {}
    worker = _instance_header(lowered, WORKER_HEADER)
    if worker is not None:
        pinned["backend_instance_id"] = pinned["decode_worker_id"] = worker
    prefill = _instance_header(lowered, PREFILL_HEADER)
    if prefill is not None:
        pinned["prefill_worker_id"] = prefill
    return replace(nvext, **pinned) if pinned else nvext


def request_id_of(headers: Mapping[str, str]) -> str | None:
    """The client's own id for its request, None when it gave none.

    It is echoed and logged, so it must be short and printable.
    """
    for name, value in headers.items():
        if name.lower() == REQUEST_ID_HEADER and value:
            if len(value) > _MAX_REQUEST_ID or not (value.isascii() and value.isprintable()):
                raise RequestError(
                    400,
                    "invalid_header",
                    REQUEST_ID_HEADER,
                    f"expected at most {_MAX_REQUEST_ID} printable ASCII characters",
                )
            return value
    return None


def strip_for_engine(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as a plain OpenAI-compatible engine may see it: everything except ``nvext``."""
    return {key: value for key, value in body.items() if key != "nvext"}


def _instance_header(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    text = text.strip()
    # isdecimal alone accepts other scripts' digits; more digits than a u64 has cost time to parse.
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= U64_MAX):
        raise RequestError(
            400, "invalid_header", name, f"expected a worker id from 0 to {U64_MAX} in decimal"
        )
    return int(text)


def _parse_constraints(value: Any, path: str) -> RoutingConstraints:
    found = read_object(value, path)
    refuse_unknown(found, path, _CONSTRAINT_KEYS)
    required: tuple[str, ...] = ()
    if found.get("required_taints") is not None:
        required = _texts(found["required_taints"], f"{path}.required_taints")
    preferred: dict[str, float] = {}
    if found.get("preferred_taints") is not None:
        where = f"{path}.preferred_taints"
        weights = read_object(found["preferred_taints"], where)
        if len(weights) > _MAX_TAINTS:
            raise RequestError(
                400,
                "out_of_range",
                where,
                f"expected at most {_MAX_TAINTS} taints, got {len(weights)}",
            )
        for taint, weight in weights.items():
            name = read_text(taint, where, longest=_MAX_TEXT)
            preferred[name] = read_number(weight, f"{where}[{name!r}]")
    return constraints(required, preferred)


def _parse_hints(value: Any, path: str) -> AgentHints:
    found = read_object(value, path)
    refuse_unknown(found, path, _HINT_KEYS)
    given: dict[str, Any] = {
        key: _HINT_READERS[key](item, f"{path}.{key}")
        for key, item in found.items()
        if item is not None
    }
    return AgentHints(**given)


def _parse_targets(value: Any, path: str) -> RouterTargets:
    found = read_object(value, path)
    refuse_unknown(found, path, _TARGET_KEYS)
    given = {
        key: read_number(item, f"{path}.{key}") for key, item in found.items() if item is not None
    }
    return RouterTargets(**given)


def _texts(value: Any, path: str) -> tuple[str, ...]:
    items = read_array(value, path, longest=_MAX_LIST)
    return tuple(read_text(item, f"{path}[{i}]", longest=_MAX_TEXT) for i, item in enumerate(items))


def _within(low: int, high: int) -> Callable[[Any, str], int]:
    return lambda value, path: read_integer(value, path, low, high)


def _as_is(value: Any, path: str) -> Any:
    return value


_worker: Final = _within(0, U64_MAX)
_count: Final = _within(0, U32_MAX)
_HINT_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "priority": _within(-_I32, _I32 - 1),
    "strict_priority": _within(0, U32_MAX),
    "osl": _count,
    "speculative_prefill": read_flag,
    "latency_sensitivity": read_number,
}
_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "greed_sampling": read_flag,
    "use_raw_prompt": read_flag,
    "annotations": _texts,
    "backend_instance_id": _worker,
    "token_data": lambda value, path: read_tokens(value, path, longest=MAX_TOKENS_IN_REQUEST),
    "max_thinking_tokens": _count,
    "cache_salt": lambda value, path: read_text(value, path, longest=_MAX_TEXT),
    "extra_fields": _texts,
    "metadata_upload": _as_is,
    "prefill_worker_id": _worker,
    "decode_worker_id": _worker,
    "dp_rank": _count,
    "prefill_dp_rank": _count,
    "agent_hints": _parse_hints,
    "request_timestamp_ms": read_number,
    "routing_constraints": _parse_constraints,
    "router": _parse_targets,
}
