"""Read the batches from a sequence number on from an engine's replay socket."""

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Final

import zmq
import zmq.asyncio

from dynctl.base.decode_errors import WireError
from dynctl.wire.vllm_events import END_OF_REPLAY, decode_seq, encode_seq

# Messages; enough for most responses, since an engine's ROUTER drops messages that do not fit.
_QUEUE: Final = 100_000


class ReplayFailed(Exception):
    """An invalid or missing response of a replay socket; the message has the problem."""


class ReplaySilent(ReplayFailed):
    """No message in time: a dead socket, or one that dropped the rest of its response."""


async def replay(
    context: zmq.asyncio.Context,
    endpoint: str,
    start: int,
    *,
    wait: float,
    total: float,
    max_bytes: int,
    max_batch_bytes: int,
) -> AsyncGenerator[tuple[int, bytes], None]:
    """(sequence, undecoded batch) for all batches that the engine keeps from ``start`` on, oldest
    first, up to the engine's end marker.

    ``wait`` bounds the pause before each message and ``total`` the whole (seconds), ``max_bytes``
    the sum of the batches. Raises ReplayFailed if a bound is exceeded or a message is invalid;
    batches yielded before are valid. The caller must let the event loop run between batches, since
    those that have arrived already are yielded without awaiting.

    Every call has a separate socket, so that a late response to an aborted call never mixes
    into the next.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.set(zmq.MAXMSGSIZE, max_batch_bytes)
        socket.set(zmq.RCVHWM, _QUEUE)
        socket.set(zmq.IPV6, 1)
        socket.connect(endpoint)
        # A REQ socket sends the empty frame: vLLM's ROUTER expects it.
        await socket.send_multipart([b"", encode_seq(start)])
        # Read without awaiting while messages are there: an awaited receive costs 20 us more.
        ready: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + total
        received = 0
        while True:
            try:
                frames = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                left = min(wait, deadline - loop.time())
                if left <= 0:
                    raise ReplaySilent(f"not complete after {total:g} s") from None
                if not await socket.poll(math.ceil(left * 1000)):
                    raise ReplaySilent(f"no message for {left:g} s") from None
                continue
            seq, payload = _pair(frames)
            if seq == END_OF_REPLAY or not payload:
                return
            received += len(payload)
            if received > max_bytes:
                raise ReplayFailed(f"the response exceeds {max_bytes} bytes")
            yield seq, payload
    finally:
        socket.close(linger=0)


def _pair(frames: list[bytes]) -> tuple[int, bytes]:
    """(sequence, payload): the last two frames of one message.

    An empty delimiter may precede them, and after it a topic: vLLM 0.32 sends delimiter, topic,
    sequence, payload; older releases send no topic.
    """
    if not 2 <= len(frames) <= 4 or (len(frames) > 2 and frames[0]):
        raise ReplayFailed(f"message of {len(frames)} frames, expected a sequence and a batch")
    try:
        return decode_seq(frames[-2]), frames[-1]
    except WireError as error:
        raise ReplayFailed(str(error)) from None
