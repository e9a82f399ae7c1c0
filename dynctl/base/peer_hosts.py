"""Whether the host of a connection's peer still responds, as the system knows it.

A process that is stopped or busy has a host that responds: its system acknowledges what arrives.
"""

import contextlib
import socket
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, Final, Protocol, TypeVar

#: Seconds without a sign of a peer's host after which it may count as silent, and packets in a row
#: without a response.
SILENT_S: Final = 2.0
_UNANSWERED: Final = 3
#: Seconds between two looks at all connections.
LOOK_S: Final = 0.5
#: Seconds after the last sign until a probe, and between probes; the system ends a connection after
#: so many without a response. Nothing proves earlier that a host is gone for good: one that runs
#: without the process resets the connection.
_IDLE_S: Final = 2
_BETWEEN_S: Final = 1
_PROBES: Final = 18
#: Of Linux's struct tcp_info: its size, and where its fields are.
_TCP_INFO_BYTES: Final = 104
_RETRANSMITS: Final = 2
_UNANSWERED_PROBES: Final = 3
_SINCE_LAST_DATA_MS: Final = slice(52, 56)
_SINCE_LAST_ACKNOWLEDGEMENT_MS: Final = slice(56, 60)


class PeerConnection(Protocol):
    """``host``: equal for connections to one host. ``socket``: None without a connection."""

    @property
    def host(self) -> Hashable: ...

    @property
    def socket(self) -> Any: ...


_Connection = TypeVar("_Connection", bound=PeerConnection)


def probe_host(connection: Any, probes: int = _PROBES) -> None:
    """Let the system end a connection whose peer's host vanished, or each that a listening socket
    accepts: by default after 20 s without a sign. None is no connection."""
    if connection is None:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": _IDLE_S,
            "TCP_KEEPINTVL": _BETWEEN_S,
            "TCP_KEEPCNT": probes,
        }
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_host_silent(connection: Any) -> bool:
    """Whether the system sends or probes again and again, and gets no sign of the peer's host.

    False where the system does not report it (not Linux), and for None, no connection.
    """
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return False
    since_last_sign_ms = min(
        int.from_bytes(info[_SINCE_LAST_DATA_MS], sys.byteorder),
        int.from_bytes(info[_SINCE_LAST_ACKNOWLEDGEMENT_MS], sys.byteorder),
    )
    unanswered = max(info[_RETRANSMITS], info[_UNANSWERED_PROBES])
    return unanswered >= _UNANSWERED and since_last_sign_ms >= 1000 * SILENT_S


def connections_of_silent_hosts(connections: Iterable[_Connection]) -> list[_Connection]:
    """The connections whose peer's host is silent. One of each host is looked at, and the others
    only if that one is silent: a look takes 2 microseconds, and thousands may wait."""
    by_host: defaultdict[Hashable, list[_Connection]] = defaultdict(list)
    for connection in connections:
        by_host[connection.host].append(connection)
    silent: list[_Connection] = []
    for same_host in by_host.values():
        if is_host_silent(same_host[0].socket):
            silent += [each for each in same_host if is_host_silent(each.socket)]
    return silent
