"""ZMQ sockets of an engine's ranks: bound to consecutive ports, and bound again after a restart."""

import asyncio
import errno
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from dynctl.simulation.engine.config import EngineConfig, EngineConfigError, split_endpoint

_BIND_ATTEMPTS = 20
_REBIND_ATTEMPTS = 250
_REBIND_PAUSE_S = 0.02

AnySocket = TypeVar("AnySocket", zmq.Socket[bytes], zmq.asyncio.Socket)


class BoundSocket(Generic[AnySocket]):
    """A socket at an address that it keeps. `endpoint` is what others connect to."""

    def __init__(self, make: Callable[[], AnySocket], address: str) -> None:
        self._make: Callable[[], AnySocket] = make
        self.socket: AnySocket = _bind(make, address)
        self.address: str = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.endpoint: str = self.address

    @property
    def port(self) -> int:
        return split_endpoint(self.address)[1]

    def close(self) -> None:
        self.socket.close(linger=0)

    async def bind_again(self) -> None:
        """After `close`: a new socket at the same address, as a restarted process has.

        The old listener goes away in ZMQ's own thread, so the address may need a moment.
        """
        for attempt in range(1, _REBIND_ATTEMPTS + 1):
            try:
                self.socket = _bind(self._make, self.address)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or attempt == _REBIND_ATTEMPTS:
                    raise
                await asyncio.sleep(_REBIND_PAUSE_S)
            else:
                return


def bind_ranks(
    make: Callable[[], AnySocket], endpoint: str, flag: str, config: EngineConfig
) -> list[BoundSocket[AnySocket]]:
    """One socket a rank; rank N gets the port of `endpoint` + N.

    With port 0 a base is chosen so that all ranks follow each other, because that is how
    subscribers compute a rank's port. Raises EngineConfigError naming `flag` and the address.
    """
    host, port = split_endpoint(endpoint, flag=flag)
    attempts = _BIND_ATTEMPTS if port == 0 else 1
    while True:
        attempts -= 1
        bound: list[BoundSocket[AnySocket]] = []
        base = port
        for rank in range(config.data_parallel_size):
            try:
                one = BoundSocket(make, f"tcp://{host}:{base + rank if base else '*'}")
            except zmq.ZMQError as error:
                for other in bound:
                    other.close()
                if attempts:
                    break
                raise EngineConfigError(
                    f"--{flag} tcp://{host}:{base + rank}: {error.strerror}; "
                    "choose a free address, or port 0 for any"
                ) from None
            base = base or one.port
            one.endpoint = f"tcp://{config.reachable(host)}:{one.port}"
            bound.append(one)
        else:
            return bound


def _bind(make: Callable[[], AnySocket], address: str) -> AnySocket:
    socket = make()
    try:
        if "[" in address:
            socket.set(zmq.IPV6, 1)
        socket.bind(address)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket
