"""KvEventPublisher: one rank's KV events over ZMQ, in vLLM's format, with a replay socket.

A PUB socket sends `[topic, sequence, batch]`. A ROUTER socket answers requests for all batches from
sequence N on, from a bounded buffer of recent batches. A batch is numbered and kept before it is
sent, so that a subscriber can request missed batches that are still in the buffer.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from dynctl.base.decode_errors import WireError
from dynctl.base.errors import network_reason
from dynctl.simulation.engine.cache_events import CacheEvent, CacheRemoved, CacheStored
from dynctl.simulation.engine.config import EngineConfig, EngineConfigError, split_endpoint
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.lower_tiers import DISK, HOST
from dynctl.wire.vllm_events import (
    END_OF_REPLAY_FRAMES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_seq,
    encode_batch,
    encode_seq,
)
from router_core import DEVICE

MAX_BUFFER_BYTES = 16 * 1024 * 1024
_SEND_QUEUE = 100_000  # the most unsent messages for a slow subscriber, vLLM's default

#: vLLM's names of the tiers.
_MEDIUM = {DEVICE: "GPU", HOST: "CPU", DISK: "DISK"}
_BIND_ATTEMPTS = 20
_REBIND_ATTEMPTS = 250
_REBIND_PAUSE_S = 0.02

AnySocket = TypeVar("AnySocket", zmq.Socket[bytes], zmq.asyncio.Socket)


class ReplayBuffer:
    """The last `max_batches` published batches, with at most `max_bytes` of payload."""

    def __init__(self, max_batches: int, max_bytes: int = MAX_BUFFER_BYTES) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, seq: int, payload: bytes) -> None:
        self._batches.append((seq, payload))
        self._bytes += len(payload)
        while self._batches and (
            len(self._batches) > self._max_batches or self._bytes > self._max_bytes
        ):
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, seq: int) -> list[tuple[int, bytes]]:
        """The kept batches numbered `seq` or later, oldest first."""
        return [batch for batch in self._batches if batch[0] >= seq]

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = 0


@dataclass(frozen=True)
class RankEndpoints:
    """The endpoints of a rank's events; `replay` is empty without a replay socket."""

    dp_rank: int
    endpoint: str
    replay: str


class KvEventPublisher:
    """Publishes one rank's cache events. Bound by `bind_publishers`; close it when done."""

    def __init__(
        self,
        dp_rank: int,
        pub: BoundSocket[zmq.Socket[bytes]],
        replay: BoundSocket[zmq.asyncio.Socket] | None,
        config: EngineConfig,
        faults: FaultState,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.dp_rank = dp_rank
        self.endpoints = RankEndpoints(dp_rank, pub.endpoint, replay.endpoint if replay else "")
        self.next_seq = 0
        self.buffer = ReplayBuffer(config.kv_events_buffer_steps)
        self._pub = pub
        self._replay = replay
        self._topic = config.kv_events_topic.encode()
        self._block_size = config.block_size
        self._lora_ids = {name: number for number, name in enumerate(config.lora, start=1)}
        self._faults = faults
        self._wall_clock = wall_clock

    def publish(self, events: Iterable[CacheEvent]) -> None:
        """Send one batch; never blocks (a subscriber that is too slow loses messages)."""
        batch = EventBatch(
            ts=self._wall_clock(),
            events=tuple(chain.from_iterable(map(self._to_wire, events))),
            data_parallel_rank=self.dp_rank,
        )
        payload = encode_batch(batch)
        seq = self.next_seq
        self.next_seq += 1
        self.buffer.append(seq, payload)
        if self._faults.take_dropped_batch() or self._faults.current.stop_publishing:
            return
        self._pub.socket.send_multipart((self._topic, encode_seq(seq), payload), zmq.NOBLOCK)

    async def restart(self) -> None:
        """Start again at sequence 0 with an empty buffer, as a new process does.

        Subscribers lose their connections and reconnect. `serve_replay` must not be running.
        """
        self.close()
        self.next_seq = 0
        self.buffer.clear()
        await self._pub.bind_again()
        if self._replay is not None:
            await self._replay.bind_again()

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        replay = self._replay.socket
        while True:
            frames = await replay.recv_multipart()
            # vLLM answers only requests with the empty delimiter that a REQ socket sends.
            if len(frames) != 3:
                continue
            *envelope, request = frames
            try:
                start = decode_seq(request)
            except WireError:
                continue  # not a replay request: the protocol has no error answer
            for seq, payload in self.buffer.since(start):
                await replay.send_multipart([*envelope, self._topic, encode_seq(seq), payload])
            await replay.send_multipart([*envelope, b"", *END_OF_REPLAY_FRAMES])

    def close(self) -> None:
        self._pub.close()
        if self._replay is not None:
            self._replay.close()

    def _to_wire(self, event: CacheEvent) -> Iterable[Event]:
        """As vLLM 0.32 publishes them: one cache group, and an event for each removed block."""
        if isinstance(event, CacheStored):
            stored = BlockStored(
                block_hashes=event.hashes,
                parent_block_hash=event.parent,
                token_ids=event.tokens,
                block_size=self._block_size,
                lora_id=self._lora_ids.get(event.lora) if event.lora else None,
                medium=_MEDIUM[event.tier],
                lora_name=event.lora,
                extra_keys=_extra_keys(event),
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
            return (stored,)
        if isinstance(event, CacheRemoved):
            medium = _MEDIUM[event.tier]
            return [
                BlockRemoved((block_hash,), medium=medium, group_idx=0)
                for block_hash in event.hashes
            ]
        return (AllBlocksCleared(),)


def _extra_keys(event: CacheStored) -> list[list[str] | None]:
    """The inputs of the blocks' hashes beside their tokens, as vLLM publishes them."""
    keys = [event.lora] if event.lora else []
    first = [*keys, event.salt] if event.salt else keys
    return [first or None, *[keys or None] * (len(event.hashes) - 1)]


def bind_publishers(
    config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], faults: FaultState
) -> list[KvEventPublisher]:
    """One publisher for each rank; none if `kv_events` is empty. Raises EngineConfigError."""
    if not config.kv_events:
        return []

    def make_pub() -> zmq.Socket[bytes]:
        socket = context.socket(zmq.PUB)
        socket.set_hwm(_SEND_QUEUE)
        return socket

    def make_replay() -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Socket(context, zmq.ROUTER)
        # An answer is at most the whole buffer and its end marker: no message may be dropped.
        socket.set_hwm(2 * (config.kv_events_buffer_steps + 1))
        return socket

    pubs = bind_ranks(make_pub, config.kv_events, "kv-events", config)
    replays: list[BoundSocket[zmq.asyncio.Socket]] = []
    try:
        if config.replay:
            replays = bind_ranks(make_replay, config.replay, "replay", config)
    except EngineConfigError:
        for pub in pubs:
            pub.close()
        raise
    return [
        KvEventPublisher(rank, pub, replays[rank] if replays else None, config, faults)
        for rank, pub in enumerate(pubs)
    ]


# -- sockets ---------------------------------------------------------------------------------------


class BoundSocket(Generic[AnySocket]):
    """A socket with a fixed address. `endpoint`: the address for others."""

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
        """After `close`: bind a new socket to the same address, as a restarted process does.

        ZMQ closes the old listener in its own thread, so the address may be in use for a moment.
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
    """One socket for each rank; rank N gets the port of `endpoint` + N.

    With port 0 a base port is chosen with enough free ports after it, because subscribers compute
    the port of a rank in that way. Raises EngineConfigError with `flag` and the address.
    """
    host, port = split_endpoint(endpoint, flag=flag)
    attempts = _BIND_ATTEMPTS if port == 0 else 1
    while True:
        attempts -= 1
        bound: list[BoundSocket[AnySocket]] = []
        base = port
        for rank in range(config.data_parallel_size):
            try:
                socket = BoundSocket(make, f"tcp://{host}:{base + rank if base else '*'}")
            except zmq.ZMQError as error:
                for other in bound:
                    other.close()
                if attempts:
                    break
                raise EngineConfigError(
                    f"--{flag} tcp://{host}:{base + rank}: {network_reason(error)}; "
                    "choose a free address, or port 0 for any"
                ) from None
            base = base or socket.port
            socket.endpoint = f"tcp://{config.reachable(host)}:{socket.port}"
            bound.append(socket)
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
