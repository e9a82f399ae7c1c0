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
from dynctl.wire.engine_kinds.table import KINDS

#: Fields of a body that several kinds of engines have, or Dynamo's frontend.
_COMMON: Final = {
    # It is refused, not removed: a client that sends it expects to be served earlier.
    "priority": "it moves the request before those of other clients in the engine's queue",
    "nvext.metadata_upload": "it chooses the address to which an engine writes",
}
DIRECTIONS: Final[Mapping[str, str]] = {
    field: effect
    for directions in (*(kind.directions for kind in KINDS), _COMMON)
    for field, effect in directions.items()
}
"""Field of a body -> what it does, as the second half of a sentence."""

#: Objects of a body that may have fields of `DIRECTIONS` as well.
_CARRIERS: Final = tuple(dict.fromkeys(path for kind in KINDS for path in kind.carriers))

DIRECTING: Final = frozenset(
    {*(name.partition(".")[0] for name in DIRECTIONS), *(path[0] for path in _CARRIERS)}
)
"""Top-level fields that a body has if :func:`check_directions` can refuse it."""

ENGINE_HEADERS: Final[Mapping[str, str]] = {
    header: field for kind in KINDS for header, field in kind.direction_headers.items()
}
"""Header of an engine -> the field of `DIRECTIONS` that it sets. A frontend passes
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
