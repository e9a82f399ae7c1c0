"""Ports of tests: free, below those of connections, never the same twice or in two processes."""

from __future__ import annotations

import socket

import pytest

from tests import ports
from tests.ports import free_port


def test_a_port_is_given_once():
    found = [free_port(20_000, 20_099) for _ in range(20)]
    assert len(set(found)) == 20
    assert all(20_000 <= one <= 20_099 for one in found)


def test_processes_of_a_run_take_different_ports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ports, "_PROCESSES", 3)
    monkeypatch.setattr(ports, "_NUMBER", 2)
    assert {(free_port(21_000, 21_999) - 21_000) % 3 for _ in range(20)} == {2}


def test_a_port_that_is_taken_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ports, "_PROCESSES", 1)
    monkeypatch.setattr(ports, "_NUMBER", 0)
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)):
        ports._given.discard(taken)
        with pytest.raises(AssertionError, match=f"no free port from {taken} to {taken}"):
            free_port(taken, taken)
