"""The shared ZMQ context of a process with its IO thread, and bounded reading of sockets."""

from typing import Final

import zmq
import zmq.asyncio

from dynctl.base.tasks import TURN_BYTES, TURN_MESSAGES

#: A followed engine takes three sockets, and ZMQ's default of 1,023 is then reached by 341 engines.
#: These are enough for the 4,096 workers that a frontend accepts.
MAX_SOCKETS: Final = 16_384


def new_context() -> zmq.asyncio.Context:
    """A context to share; the caller ends it with :func:`close_context`."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def close_context(context: zmq.asyncio.Context) -> None:
    """Close it and all its sockets, without waiting."""
    context.destroy(linger=0)


def drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """The messages that have arrived, at most those of one turn of the event loop."""
    received: list[list[bytes]] = []
    size = 0
    while len(received) < TURN_MESSAGES and size < TURN_BYTES:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        received.append(frames)
        size += sum(map(len, frames))
    return received
