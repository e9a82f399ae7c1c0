"""Ask an engine's replay socket for the batches from a sequence number on."""

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Final

import zmq
import zmq.asyncio

from dynctl.base.decode_errors import WireError
from dynctl.wire.vllm_events import END_OF_REPLAY, decode_seq, encode_seq

# Messages; room for most whole answers, since an engine's ROUTER drops what its peer cannot take.
_QUEUE: Final = 100_000


class ReplayFailed(Exception):
    """A replay socket did not answer as it should; the message says how."""


class ReplaySilent(ReplayFailed):
    """Nothing came for too long: a dead socket, or one that dropped the rest of its answer."""


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
    """(sequence, undecoded batch) for everything that the engine kept from ``start`` on, oldest
    first, ended by the engine's own end marker.

    ``wait`` bounds the silence before each answer and ``total`` the whole (seconds), ``max_bytes``
    the sum of the batches. Raises ReplayFailed when a bound is passed or an answer makes no sense;
    what was yielded before is good. The caller must let the event loop run between batches, since
    those that have arrived already are given without awaiting.

    Every call has a socket of its own, so that the late answer to one that was given up never
    mixes into the next.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.set(zmq.MAXMSGSIZE, max_batch_bytes)
        socket.set(zmq.RCVHWM, _QUEUE)
        socket.set(zmq.IPV6, 1)
        socket.connect(endpoint)
        # The empty frame is what a REQ socket would send: vLLM's ROUTER expects it.
        await socket.send_multipart([b"", encode_seq(start)])
        # Read without awaiting while there is something: an awaited receive costs 20 us more.
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
                    raise ReplaySilent(f"no end after {total:g} s") from None
                if not await socket.poll(math.ceil(left * 1000)):
                    raise ReplaySilent(f"silent for {left:g} s") from None
                continue
            seq, payload = _pair(frames)
            if seq == END_OF_REPLAY or not payload:
                return
            received += len(payload)
            if received > max_bytes:
                raise ReplayFailed(f"the answer exceeds {max_bytes} bytes")
            yield seq, payload
    finally:
        socket.close(linger=0)


def _pair(frames: list[bytes]) -> tuple[int, bytes]:
    """(sequence, payload) of one answer, whose leading delimiter is optional."""
    if len(frames) == 3 and not frames[0]:
        frames = frames[1:]
    if len(frames) != 2:
        raise ReplayFailed(f"answered {len(frames)} frames, expected a sequence and a batch")
    try:
        return decode_seq(frames[0]), frames[1]
    except WireError as error:
        raise ReplayFailed(str(error)) from None
