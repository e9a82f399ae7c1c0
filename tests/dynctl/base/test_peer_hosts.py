"""Which hosts count as silent; tests/planes cuts real links."""

import socket
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from dynctl.base.peer_hosts import connections_of_silent_hosts, is_host_silent, probe_host


@dataclass
class Reported:
    """A socket with these fields of Linux's tcp_info."""

    retransmits: int = 0
    probes: int = 0
    since_data_ms: int = 9000
    since_acknowledgement_ms: int = 9000
    looks: int = 0

    def getsockopt(self, *_: Any) -> bytes:
        self.looks += 1
        info = bytearray(104)
        info[2], info[3] = self.retransmits, self.probes
        info[52:56] = self.since_data_ms.to_bytes(4, sys.byteorder)
        info[56:60] = self.since_acknowledgement_ms.to_bytes(4, sys.byteorder)
        return bytes(info)


@pytest.mark.parametrize(
    ("reported", "silent"),
    [
        (Reported(retransmits=3), True),
        (Reported(probes=3), True),
        (Reported(), False),  # idle: nothing was sent that needs a response
        (Reported(retransmits=2, probes=2), False),  # lost packets
        (Reported(retransmits=3, since_acknowledgement_ms=1900), False),
        (Reported(probes=3, since_data_ms=100), False),
    ],
)
def test_a_host_is_silent_that_leaves_three_packets_unanswered(reported, silent):
    assert is_host_silent(reported) is silent


def test_no_connection_has_no_silent_host():
    assert not is_host_silent(None)


def test_the_system_reports_the_fields_where_they_are_read():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe_host(listener)
        with socket.create_connection(listener.getsockname()[:2]) as client:
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"
                assert not is_host_silent(client)
                assert not is_host_silent(accepted)


@dataclass(eq=False)
class Connection:
    host: str
    socket: Reported


def test_one_connection_of_a_host_that_responds_is_looked_at():
    well = [Connection("well", Reported()) for _ in range(50)]
    gone = [Connection("gone", Reported(probes=4)) for _ in range(3)]
    gone.append(Connection("gone", Reported(probes=4, since_data_ms=10)))
    assert connections_of_silent_hosts([*well, *gone]) == gone[:3]
    assert sum(each.socket.looks for each in well) == 1
