"""The source of an engine's KV events: its endpoints, and the bounds of following them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dynctl.wire.index_events import NO_ADAPTERS
from dynctl.wire.vllm_events import DEFAULT_LIMITS, BatchLimits

_ANY_HOST: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - dialled, never bound


class EndpointError(ValueError):
    """An invalid KV-event endpoint; the message has what was expected."""


def dialable_endpoint(endpoint: str, host: str = "127.0.0.1", dp_rank: int = 0) -> str:
    """The address to connect to for ``endpoint``.

    Engines are configured with the address that they bind: a wildcard host (``tcp://*:5557``)
    becomes ``host``, the worker's. Rank N of a data-parallel engine binds the port + N.
    """
    scheme, found, address = endpoint.partition("://")
    if found and scheme in ("ipc", "inproc") and address:
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    name, colon, port = address.rpartition(":")
    if scheme != "tcp" or not colon or not name:
        raise EndpointError(f"{endpoint!r} is not a ZMQ endpoint; expected tcp://HOST:PORT")
    if not port.isdecimal() or not 1 <= int(port) + dp_rank <= 65535:
        raise EndpointError(f"{endpoint!r}: port {port!r}; expected 1 to {65535 - dp_rank}")
    if name in _ANY_HOST:
        name = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{name}:{int(port) + dp_rank}"


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """The stream to follow and how to read it.

    ``endpoint`` and ``replay`` may have a wildcard host, which means ``host``. ``dp_rank`` is
    for batches without a rank. ``block_size`` is the router's, in tokens. ``salt_each_block``: the
    index mixes the salt of a prompt into each of its blocks, as Dynamo's. ``expects_pairs``: the
    engine is known to publish pairs of tokens (see `dynctl.wire.vllm_events.PairsStored`).
    """

    worker_id: int
    endpoint: str
    block_size: int
    dp_rank: int = 0
    replay: str | None = None
    host: str = "127.0.0.1"
    topic: bytes = b""
    adapter_names: Mapping[int, str] = field(default_factory=lambda: NO_ADAPTERS)
    cache_namespace: str | None = None
    is_eagle: bool = False
    salt_each_block: bool = False
    expects_pairs: bool = False


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """Bounds of one stream; times in seconds, sizes in the unit of their names.

    ``queue_messages``: messages that wait for us; ZMQ drops further ones, which is a gap.
    ``queue_bytes``: their bytes; above it the connection is closed and opened again.
    ``ranks``: data parallel ranks of one stream; batches of further ones are skipped.
    ``replay_wait`` is the longest pause and ``replay_total`` the longest whole response of a replay
    socket; after a failure it is not used for ``replay_pause``. ``idle_check``: how often a silent
    stream is compared with the replay socket, since a lost last batch leaves no gap.
    """

    queue_messages: int = 100_000
    queue_bytes: int = 128 * 1024 * 1024
    ranks: int = 1024
    replay_wait: float = 2.0
    replay_total: float = 60.0
    replay_pause: float = 30.0
    replay_bytes: int = 1024 * 1024 * 1024
    idle_check: float = 30.0
    batch: BatchLimits = DEFAULT_LIMITS


DEFAULT_BOUNDS: Final = StreamBounds()
