"""A publishing engine for the contract tests, small enough to misbehave in every way."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from dynctl.adapters.ports import IndexUpdate, StreamCondition, StreamValue
from dynctl.wire.vllm_events import (
    END_OF_REPLAY_FRAMES,
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    decode_seq,
    encode_batch,
    encode_seq,
)
from tests.waiting import patience

Value = TypeVar("Value")
PATIENCE = 20.0  # seconds before a test gives up; no test passes by waiting for it


def stored(number: int, *, block_size: int = 2) -> BlockStored:
    """Block ``number`` of one long prompt."""
    return BlockStored(
        block_hashes=(1000 + number,),
        parent_block_hash=None if number == 0 else 999 + number,
        token_ids=(number,) * block_size,
        block_size=block_size,
    )


def batch(number: int, *events: Event, life: int = 0, dp_rank: int | None = None) -> EventBatch:
    """Batch ``number`` of the engine's ``life``-th process, whose clock runs on."""
    return EventBatch(1000.0 * life + number, events or (stored(number),), dp_rank)


CLEARED = AllBlocksCleared()


class ScriptedPublisher:
    """Binds like an engine; what it keeps and what it sends are two separate calls.

    XPUB rather than PUB so that a test can wait for the subscription to be there.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        replay: bool = False,
        silent: bool = False,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str = "tcp://127.0.0.1:*",
    ) -> None:
        self.pub = context.socket(zmq.XPUB)
        _bind(self.pub, endpoint)
        self.endpoint = self.pub.get_string(zmq.LAST_ENDPOINT)
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.silent = silent
        self.garbled = False
        self.capacity: int | None = None  # messages of an answer; the rest is dropped, as by vLLM
        self.topic_frames: tuple[bytes, ...] = ()  # (b"topic",) as vLLM 0.32; older: none
        self.holes: set[int] = set()  # batches that the next answers leave out, each once
        self.router: zmq.asyncio.Socket | None = None
        self.replay_endpoint: str | None = None
        self._server: asyncio.Task[None] | None = None
        if replay:
            self.router = context.socket(zmq.ROUTER)
            _bind(self.router, replay_endpoint)
            self.replay_endpoint = self.router.get_string(zmq.LAST_ENDPOINT)
            self._server = asyncio.create_task(self._serve())

    async def subscribed(self) -> None:
        async with asyncio.timeout(patience(PATIENCE)):
            while (await self.pub.recv())[:1] != b"\x01":
                pass

    def keep(self, seq: int, value: EventBatch | bytes) -> bytes:
        """For replay only: as if the live message had been lost."""
        payload = value if isinstance(value, bytes) else encode_batch(value)
        self.kept[seq] = payload
        return payload

    async def send(self, seq: int, value: EventBatch | bytes) -> None:
        await self.raw(b"", encode_seq(seq), self.keep(seq, value))

    async def raw(self, *frames: bytes) -> None:
        await self.pub.send_multipart(frames)

    async def _serve(self) -> None:
        assert self.router is not None
        while True:
            client, empty, request = await self.router.recv_multipart()
            start = decode_seq(request)
            self.asked.append(start)
            if self.silent:
                continue
            if self.garbled:
                await self.router.send_multipart([client, empty, b"what?", b"?"])
                continue
            answer = [
                (encode_seq(seq), self.kept[seq])
                for seq in sorted(self.kept)
                if seq >= start and seq not in self.holes
            ]
            self.holes -= {seq for seq in self.holes if seq >= start}
            for frames in [*answer, END_OF_REPLAY_FRAMES][: self.capacity]:
                await self.router.send_multipart([client, empty, *self.topic_frames, *frames])

    async def die(self) -> None:
        """As a killed process: the sockets go away at once."""
        if self._server is not None:
            self._server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._server
        if self.router is not None:
            self.router.close(linger=0)
        self.pub.close(linger=0)


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """ZMQ frees a closed socket's port a moment later, from its IO thread."""
    give_up = time.monotonic() + patience(PATIENCE)
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > give_up:
                socket.close(linger=0)
                raise
            time.sleep(0.002)
        else:
            return


class Collected(Generic[Value]):
    """Collects values and waits for what must come. ``shown``: what a failure shows of them."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._arrived = asyncio.Event()

    def __call__(self, value: Value) -> None:
        self.values.append(value)
        self._arrived.set()

    @property
    def shown(self) -> str:
        raise NotImplementedError

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(patience(PATIENCE)):
                while not reached():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"no {what}; got {self.shown}") from None


class Recorder(Collected[StreamValue]):
    """The values of a stream."""

    @property
    def shown(self) -> str:
        return f"{self.seqs} and {self.codes}"

    @property
    def seqs(self) -> list[int]:
        return [value.seq for value in self.values if isinstance(value, IndexUpdate)]

    @property
    def codes(self) -> list[str]:
        return [value.code for value in self.values if isinstance(value, StreamCondition)]

    def condition(self, code: str) -> StreamCondition:
        (found,) = (v for v in self.values if isinstance(v, StreamCondition) and v.code == code)
        return found

    async def until_seq(self, seq: int, times: int = 1) -> None:
        await self.until(lambda: self.seqs.count(seq) >= times, f"update {seq} x{times}")

    async def until_code(self, code: str, times: int = 1) -> None:
        await self.until(lambda: self.codes.count(code) >= times, f"condition {code} x{times}")


@contextlib.asynccontextmanager
async def running(task_of) -> AsyncIterator[None]:
    """Run a stream for the length of the block, then cancel it and wait for its end."""
    task = asyncio.create_task(task_of)
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(patience(PATIENCE)):
                await task
