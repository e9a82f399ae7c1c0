"""``nvext``: the routing controls that a client may put into an OpenAI request, as in Dynamo 1.6.

Keys and their nesting are those that a 1.6.1 frontend lists when it refuses another one. Dynamo
answers a wrong value with the deserializer's own text; here the path of the field is named.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dynctl.base.decode_errors import RequestError
from dynctl.base.json_fields import U64_MAX, describe
from dynctl.wire.json_body import U32, U64, TokenId, check_u64, convert, without_nulls
from router_core import NO_CONSTRAINTS, Pin, RoutingConstraints, constraints

QUERY_INSTANCE_ID: Final = "query_instance_id:"
"""The annotation that asks for the routing only. The colon is part of it: without the colon Dynamo
runs the request for real, and so must we."""

WORKER_HEADER: Final = "x-worker-instance-id"
PREFILL_HEADER: Final = "x-prefill-instance-id"
REQUEST_ID_HEADER: Final = "x-request-id"
#: Fields of nvext -> the headers that set them. Of two that are given, the first counts.
_PINS: Final[tuple[tuple[tuple[str, ...], tuple[str, str]], ...]] = (
    (
        ("backend_instance_id", "decode_worker_id"),
        ("x-dynamo-worker-instance-id", WORKER_HEADER),
    ),
    (("prefill_worker_id",), ("x-dynamo-prefill-instance-id", PREFILL_HEADER)),
)
SESSION_HEADERS: Final = ("x-dynamo-session-id", "x-session-id")
"""The headers with the session of a request. Of two that are given, the first counts."""
_MAX_SESSION_ID: Final = 256
PIN_HEADERS: Final = tuple(name for _, names in _PINS for name in names)
"""The headers that name workers: those of Dynamo 1.6, and the prefixed ones of later versions."""
POLICY_CLASS_HEADER: Final = "x-dynamo-meta-policy-class"
READ_HEADERS: Final = frozenset(
    (*PIN_HEADERS, *SESSION_HEADERS, REQUEST_ID_HEADER, POLICY_CLASS_HEADER)
)
"""All headers that this module reads. A value with more than 256 bytes has no effect or is an
error."""

MAX_TOKENS_IN_REQUEST: Final = 4 * 1024 * 1024
_MAX_REQUEST_ID: Final = 256
_MAX_POLICY_CLASS: Final = 128
_I32: Final = 2**31

_Text = Annotated[str, Meta(max_length=1024)]
_Texts = Annotated[tuple[_Text, ...], Meta(max_length=256)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_TOKENS_IN_REQUEST)]


#: Token ids that are read in one step.
_SLICE: Final = 64 * 1024


class AgentHints(Struct, frozen=True, forbid_unknown_fields=True):
    """What the client reports about its own request.

    ``priority`` moves it in the queue, ``strict_priority`` puts it in a tier of its own, ``osl``
    is the expected output length in tokens, ``latency_sensitivity`` a weight.
    """

    priority: Annotated[int, Meta(ge=-_I32, le=_I32 - 1)] | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class RouterTargets(Struct, frozen=True, forbid_unknown_fields=True):
    """Latency targets, in the unit that the client's deployment uses (Dynamo passes them on)."""

    ttft_target: float | None = None
    itl_target: float | None = None


class Taints(Struct, frozen=True, forbid_unknown_fields=True):
    """The taints that a worker must have, and those that it should have, with their weights."""

    required_taints: _Texts | None = None
    preferred_taints: Annotated[dict[_Text, float], Meta(max_length=256)] | None = None


_NO_TAINTS: Final = Taints()


class NvExt(Struct, frozen=True, forbid_unknown_fields=True):
    """The routing controls of one request. None means not given."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: _Texts = ()
    backend_instance_id: U64 | None = None
    token_data: TokenIds | None = None
    max_thinking_tokens: U32 | None = None
    cache_salt: _Text | None = None
    extra_fields: _Texts = ()
    metadata_upload: Any = None
    prefill_worker_id: U64 | None = None
    decode_worker_id: U64 | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    agent_hints: AgentHints = AgentHints()
    request_timestamp_ms: float | None = None
    routing_constraints: Taints = _NO_TAINTS
    router: RouterTargets = RouterTargets()

    @property
    def constraints(self) -> RoutingConstraints:
        """``routing_constraints`` as the router takes them."""
        taints = self.routing_constraints
        if taints is _NO_TAINTS:
            return NO_CONSTRAINTS
        return constraints(taints.required_taints or (), taints.preferred_taints)

    @property
    def pin_prefill(self) -> Pin | None:
        """The prefill worker that the client chose."""
        return _pin(self.prefill_worker_id, self.prefill_dp_rank)

    @property
    def pin_decode(self) -> Pin | None:
        """The worker that the client chose to answer: decode, or aggregated."""
        chosen = self.decode_worker_id
        return _pin(self.backend_instance_id if chosen is None else chosen, self.dp_rank)

    @property
    def dry_run(self) -> bool:
        """Whether the client wants the routing only: no booking, no call of an engine."""
        return any(text.startswith(QUERY_INSTANCE_ID) for text in self.annotations)

    def wants(self, extra_field: str) -> bool:
        """Whether the answer's ``nvext`` must hold ``worker_id``, ``timing``, ...; unknown names
        are legal and ignored, as in Dynamo."""
        return extra_field in self.extra_fields


def _pin(worker_id: int | None, dp_rank: int | None) -> Pin | None:
    return None if worker_id is None else Pin(worker_id, dp_rank)


NO_NVEXT: Final = NvExt()
KNOWN_KEYS: Final = NvExt.__struct_fields__
_WORKER_IDS: Final = ("backend_instance_id", "prefill_worker_id", "decode_worker_id")


def parse_nvext(value: Any, path: str = "nvext") -> NvExt:
    """The controls in a request's ``nvext``, where null and absent mean none.

    Raises RequestError (400) naming the path of an unknown key or a wrong value.
    """
    if value is None:
        return NO_NVEXT
    tokens = value.get("token_data") if isinstance(value, dict) else None
    if isinstance(tokens, list) and len(tokens) > _SLICE:
        ids = read_token_ids(tokens, f"{path}.token_data")
        controls = parse_nvext({**value, "token_data": tokens[:1]}, path)
        return msgspec.structs.replace(controls, token_data=ids)
    controls = convert(without_nulls(value) if isinstance(value, dict) else value, NvExt, path)
    for name in _WORKER_IDS:
        check_u64(getattr(controls, name), f"{path}.{name}")
    for taint, weight in (controls.routing_constraints.preferred_taints or {}).items():
        if not math.isfinite(weight):
            raise RequestError(
                400,
                "out_of_range",
                f"{path}.routing_constraints.preferred_taints[{taint!r}]",
                f"expected a finite number, got {describe(weight)}",
            )
    return controls


def read_token_ids(value: list[Any], path: str) -> Sequence[int]:
    """Token ids as a tuple, or as an ``array("I")`` where they are many. Raises RequestError (400).

    Many are read in slices: each call of msgspec holds the interpreter until it ends.
    """
    if not _SLICE < len(value) <= MAX_TOKENS_IN_REQUEST:
        return convert(value, TokenIds, path)
    tokens = array("I")
    for start in range(0, len(value), _SLICE):
        piece = value[start : start + _SLICE]
        try:
            tokens.extend(convert(piece, TokenIds, path))
        except RequestError as error:
            at = (error.field or "").removeprefix(f"{path}[").removesuffix("]")
            field = f"{path}[{start + int(at)}]" if at.isdecimal() else path
            raise RequestError(error.status, error.code, field, error.problem) from None
    return tokens


def apply_headers(nvext: NvExt, headers: Mapping[str, str]) -> NvExt:
    """``nvext`` with the pins that headers ask for; a header wins over the body, as in Dynamo.

    ``x-worker-instance-id`` pins the worker that answers (decode, or aggregated),
    ``x-prefill-instance-id`` the prefill worker; both also with the prefix ``x-dynamo-``.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    pinned: dict[str, Any] = {}
    for fields, names in _PINS:
        for name in names:
            worker = _instance_header(lowered, name)
            if worker is not None:
                pinned |= dict.fromkeys(fields, worker)
                break
    return msgspec.structs.replace(nvext, **pinned) if pinned else nvext


def session_of(headers: Mapping[str, str]) -> str | None:
    """The client's session, None without one; raises RequestError (400). It is never repeated."""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        if value:
            if len(value.encode("utf-8", "surrogateescape")) > _MAX_SESSION_ID:
                problem = f"expected at most {_MAX_SESSION_ID} bytes"
                raise RequestError(400, "invalid_header", name, problem)
            return value
    return None


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


def policy_class_of(headers: Mapping[str, str]) -> str | None:
    """The family or policy class that the client names for the router queue, None without one.

    Names that no class can have are ignored, as unknown ones are.
    """
    name = headers.get(POLICY_CLASS_HEADER)
    return name if name and len(name) <= _MAX_POLICY_CLASS else None


def strip_for_engine(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as a plain OpenAI-compatible engine may see it: everything except ``nvext``."""
    return {key: value for key, value in body.items() if key != "nvext"}


def with_cache_salt(body: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """The body with the cache salt ``salt`` in place of its own, which ``nvext`` may have too."""
    changed = {**body, "cache_salt": salt}
    nvext = body.get("nvext")
    if isinstance(nvext, Mapping) and "cache_salt" in nvext:
        changed["nvext"] = {key: value for key, value in nvext.items() if key != "cache_salt"}
    return changed


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
