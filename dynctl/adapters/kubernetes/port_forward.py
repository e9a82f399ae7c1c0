"""A port of a pod, forwarded to this machine.

A listening socket on loopback; each connection to it gets a stream and a thread, which copies both
ways. One thread does both because a TLS connection does not support two at once.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from dynctl.adapters.kubernetes.http import ApiServer
from dynctl.adapters.kubernetes.streams import PodStream, pod_path, pod_stream
from dynctl.adapters.ports import ClusterRefusal
from dynctl.base.errors import DynctlError

DATA, ERROR = 0, 1
_PIECE: Final = 1 << 16
_MOST_WAITING: Final = 1 << 20
"""Bytes that may wait for a slow local reader before the pod's side waits too."""


@contextmanager
def forwarded(server: ApiServer, namespace: str, pod: str, port: int) -> Iterator[str]:
    """``HOST:PORT`` on loopback. Raises ClusterRefusal or Unreachable if the API server
    refuses; a port without a listener in the pod closes the connection."""
    path, query = pod_path(namespace, pod, "portforward"), [("ports", str(port))]
    # Tried once before the first connection, to report a refusal.
    with pod_stream(server, path, query):
        pass
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        forwarder = _Forwarder(listener, lambda: PodStream(server, path, query), server.timeout)
        server.began(forwarder.wake)
        stack.callback(server.ended, forwarder.wake)
        stack.callback(forwarder.close)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


class _Forwarder:
    """Runs from its construction until :meth:`close`, which ends all threads."""

    def __init__(
        self, listener: socket.socket, opened: Callable[[], PodStream], timeout: float
    ) -> None:
        self._listener = listener
        self._opened = opened
        self._timeout = timeout
        # Its reading end becomes readable for all threads when the other end is closed.
        self._ending, self._end = socket.socketpair()
        self._connections: list[threading.Thread] = []
        self._accepting = self._start_thread(self._accept)

    def wake(self) -> None:
        """Make all threads end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.wake()
        self._accepting.join()
        for thread in self._connections:
            thread.join()
        self._ending.close()
        self._end.close()

    def _start_thread(
        self, function: Callable[..., None], *arguments: socket.socket
    ) -> threading.Thread:
        thread = threading.Thread(
            target=function, args=arguments, name="dynctl-port-forward", daemon=True
        )
        thread.start()
        return thread

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ending, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._ending in ready:
                    return
                with suppress(OSError):
                    local, _ = self._listener.accept()
                    self._connections = [
                        connection for connection in self._connections if connection.is_alive()
                    ]
                    self._connections.append(self._start_thread(self._serve, local))

    def _serve(self, local: socket.socket) -> None:
        with local, suppress(DynctlError, ClusterRefusal, OSError):
            stream = self._opened()
            try:
                self._copy(local, stream)
            finally:
                stream.close()

    def _copy(self, local: socket.socket, stream: PodStream) -> None:
        """Copy until one side ends. Data from the pod before its end is still written."""
        local.setblocking(False)
        pod = _PodData(stream, self._timeout)
        with selectors.DefaultSelector() as selector:
            selector.register(self._ending, selectors.EVENT_READ)
            while pod.open or pod.unwritten:
                _watch(selector, stream.socket, selectors.EVENT_READ if pod.wanted else 0)
                reads = selectors.EVENT_READ if pod.open else 0
                writes = selectors.EVENT_WRITE if pod.unwritten else 0
                _watch(selector, local, reads | writes)
                at_once = pod.wanted and stream.waiting
                ready = {key.fileobj: mask for key, mask in selector.select(0 if at_once else None)}
                if self._ending in ready:
                    return
                if ready.get(local, 0) & selectors.EVENT_WRITE:
                    del pod.unwritten[: local.send(pod.unwritten[:_PIECE])]
                if ready.get(local, 0) & selectors.EVENT_READ:
                    data = local.recv(_PIECE)
                    if not data:
                        return
                    stream.send(DATA, data, self._timeout)
                if (at_once or stream.socket in ready) and not pod.receive():
                    return


class _PodData:
    """What a pod sent and its client did not get yet."""

    def __init__(self, stream: PodStream, timeout: float) -> None:
        self._stream = stream
        self._timeout = timeout
        self._channels: set[int] = set()
        self.unwritten = bytearray()
        self.open = True

    @property
    def wanted(self) -> bool:
        """Whether more is to be received."""
        return self.open and len(self.unwritten) < _MOST_WAITING

    def receive(self) -> bool:
        """Take the next message; False where the pod reports an error."""
        message = self._stream.receive(self._timeout)
        if message is None:
            self.open = False
            return True
        channel, data = message
        if channel not in self._channels:
            # The first message of each channel is the number of the port.
            self._channels.add(channel)
        elif channel == ERROR and data:
            return False
        elif channel == DATA:
            self.unwritten += data
        return True


def _watch(selector: selectors.BaseSelector, held: socket.socket, events: int) -> None:
    """Register exactly these events of a socket."""
    known = held in selector.get_map()
    if known and events:
        selector.modify(held, events)
    elif known:
        selector.unregister(held)
    elif events:
        selector.register(held, events)
