"""Run the controller of `topology sync` as a process: election, status server, signals."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Final

from dynctl.adapters.ports import Cluster, ClusterWriter
from dynctl.base.terminal import say
from dynctl.serving.topology_sync.controller import Controller
from dynctl.serving.topology_sync.election import LeaderElection
from dynctl.serving.topology_sync.status import status_server
from dynctl.serving.topology_sync.writing import PodSync

LEASE: Final = "dynctl-topology-sync"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where health and metrics are served."""

    host: str
    port: int


def run_controller(
    cluster: Cluster,
    writer: ClusterWriter,
    namespace: str | None,
    sync: PodSync,
    *,
    lease: str | None,
    listening: Listening | None,
) -> int:
    """Until SIGTERM (exit code 0) or SIGINT (130). ``lease``: its namespace; None: no election."""
    election = None
    if lease is not None:
        identity = f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"
        election = LeaderElection(
            cluster, writer, lease, LEASE, identity, monotonic=time.monotonic, now=time.time
        )
        sync.write_while(lambda: election.leads)
    controller = Controller(cluster, namespace, sync, election, say)
    code = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal code
        code = 130 if number == signal.SIGINT else 0
        controller.stop()

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, end))
        if listening is not None:
            port = stack.enter_context(status_server(controller, listening.host, listening.port))
            say(f"health and metrics: http://{listening.host}:{port}/metrics")
        where = "all namespaces" if namespace is None else f"namespace {namespace}"
        say(f"following pods of {where} of {cluster.title}")
        controller.run()
    return code
