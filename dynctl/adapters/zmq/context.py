"""The shared ZMQ context of a process with its IO thread, and bounded reading of sockets."""

import zmq
import zmq.asyncio

from dynctl.base.tasks import TURN_BYTES, TURN_MESSAGES


def new_context() -> zmq.asyncio.Context:
    """A context to share; the caller ends it with :func:`close_context`."""
    return zmq.asyncio.Context()


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
