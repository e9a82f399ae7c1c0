"""KV events at a subscriber: vLLM's frames, sequences and replay."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from dynctl.simulation.engine.config import EngineConfig, EngineConfigError, Faults
from dynctl.simulation.engine.engine import Engine
from dynctl.simulation.engine.kv_publisher import ReplayBuffer
from dynctl.simulation.engine.prefix_cache import extend_hashes
from dynctl.tokenization import ModelTokenizer
from dynctl.wire.index_events import to_index_events
from dynctl.wire.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_message,
    decode_seq,
    encode_seq,
)
from router_core import (
    KvEvent,
    Router,
    RoutingRequest,
    Worker,
    WorkerUpserted,
    local_block_hashes,
    sequence_hashes,
)
from tests.dynctl.simulation.engine.conftest import StartEngine, cached_tokens, complete, get, post
from tests.waiting import patience

PROMPT = list(range(1, 41))  # two full blocks of 16 and a half


class Client:
    """Opens sockets and closes them all when the test ends."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self.subscribers: list[Subscriber] = []

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self) -> None:
        for subscriber in self.subscribers:
            subscriber.close()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def context() -> AsyncIterator[Client]:
    client = Client()
    yield client
    client.close()


class Subscriber:
    """A SUB socket that is known to be connected."""

    def __init__(self, context: Client, endpoint: str, topic: bytes = b"") -> None:
        context.subscribers.append(self)
        self._socket = context.socket(zmq.SUB)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    async def ready(self) -> "Subscriber":
        await asyncio.wait_for(self._monitor.recv_multipart(), patience(10))
        # The subscription travels right behind the handshake; after a reconnect it is only sent
        # once the socket is looked at.
        assert not await self._socket.poll(50)
        return self

    async def reconnected(self) -> None:
        """Wait for the connection that follows one that was lost."""
        await self.ready()

    async def next(self) -> tuple[bytes, int, EventBatch]:
        frames = await asyncio.wait_for(self._socket.recv_multipart(), patience(10))
        topic, seq, payload = decode_message(frames)
        return topic, seq, decode_batch(payload)

    async def nothing(self) -> bool:
        return not await self._socket.poll(100)


async def replay(context: Client, endpoint: str, start: int) -> list[tuple[int, EventBatch]]:
    """The batches of the replay socket from `start` on, requested as in vLLM's example client."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    await socket.send_multipart([b"", encode_seq(start)])
    batches: list[tuple[int, EventBatch]] = []
    while True:
        frames = await asyncio.wait_for(socket.recv_multipart(), patience(10))
        delimiter, topic, seq, payload = frames
        assert delimiter == b""
        if decode_seq(seq) == -1:
            assert (topic, payload) == (b"", b"")
            assert seq == b"\xff" * 8
            return batches
        batches.append((decode_seq(seq), decode_batch(payload)))


async def test_stored_blocks_are_published_when_computed(start: StartEngine, http, context) -> None:
    engine = await start(kv_events_topic="kv@a")
    events = (await get(http, engine, "/engine/info"))["kv_events"][0]
    subscriber = await Subscriber(context, events["endpoint"], b"kv@a").ready()
    await complete(http, engine, PROMPT, max_tokens=1)
    topic, seq, batch = await subscriber.next()
    assert (topic, seq, batch.data_parallel_rank) == (b"kv@a", 0, 0)
    hashes = extend_hashes([], PROMPT, 16)
    assert batch.events == (
        BlockStored(
            block_hashes=tuple(hashes),
            parent_block_hash=None,
            token_ids=tuple(PROMPT[:32]),
            block_size=16,
            medium="GPU",
            extra_keys=[None, None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
    )
    # The same prompt with a longer answer stores nothing but the block that the answer fills.
    await complete(http, engine, PROMPT, max_tokens=10)
    _, seq, batch = await subscriber.next()
    assert seq == 1
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == hashes[-1]
    assert stored.token_ids[:8] == tuple(PROMPT[32:])
    assert len(stored.token_ids) == 16


async def test_what_host_memory_gets_is_published_and_loaded_again(
    start: StartEngine, http, context
) -> None:
    """The device has 4 blocks: a second prompt evicts the first, which a router then finds in host
    memory, and the engine too."""
    engine = await start(total_blocks=4, host_blocks=8)
    events = (await get(http, engine, "/engine/info"))["kv_events"][0]
    salted = {"max_tokens": 1, "cache_salt": "s"}
    await complete(http, engine, PROMPT, **salted)
    await complete(http, engine, list(range(100, 160)), max_tokens=1)
    batches = await replay(context, events["replay"], 0)
    router = Router(exact_reuse=True)
    router.apply(WorkerUpserted(Worker(1, "a", "demo")), 0.0)
    for _, batch in batches:
        for event in to_index_events(batch, 16).events:
            assert router.apply(KvEvent(1, 0, event), 0.0).ok
    local = local_block_hashes(PROMPT, 16, cache_salt="s")
    request = RoutingRequest(
        "r", "demo", len(PROMPT), 16, sequence_hashes(local), local_hashes=local
    )
    inputs = router.plan(request).first.inputs
    assert inputs is not None
    assert (list(inputs.overlap_blocks), inputs.host_blocks) == ([0], [2])
    media = [getattr(event, "medium", None) for _, batch in batches for event in batch.events]
    assert media == ["GPU", "GPU", "GPU", "CPU", "GPU"]
    assert cached_tokens(await complete(http, engine, PROMPT, **salted)) == 32
    async with http.get(engine.url + "/metrics") as answer:
        text = await answer.text()
    assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="demo"} 32\n' in text


async def test_chunked_prefill_publishes_block_by_block(start: StartEngine, http, context) -> None:
    engine = await start(max_num_batched_tokens=20, lora=("adapter-a",))
    events = (await get(http, engine, "/engine/info"))["kv_events"][0]
    await complete(http, engine, PROMPT, max_tokens=1, model="adapter-a")
    batches = await replay(context, events["replay"], 0)
    stored = [event for _, batch in batches for event in batch.events]
    one, two = stored
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert two.parent_block_hash == one.block_hashes[0]
    assert len(one.block_hashes) == len(two.block_hashes) == 1
    assert one.lora_id == two.lora_id == 1
    assert one.lora_name == two.lora_name == "adapter-a"


async def test_eviction_and_reset_are_published(start: StartEngine, http, context) -> None:
    engine = await start(total_blocks=3, max_model_len=48)
    events = (await get(http, engine, "/engine/info"))["kv_events"][0]
    await complete(http, engine, PROMPT, max_tokens=1)
    other = [token + 100 for token in PROMPT]
    await complete(http, engine, other, max_tokens=1)
    assert (await post(http, engine, "/reset_prefix_cache", {}))[0] == 200
    batches = await replay(context, events["replay"], 0)
    kinds = [event for _, batch in batches for event in batch.events]
    first, second = extend_hashes([], PROMPT, 16), extend_hashes([], other, 16)
    assert isinstance(kinds[0], BlockStored)
    assert kinds[1:3] == [
        BlockRemoved(block_hashes=(gone,), medium="GPU", group_idx=0) for gone in reversed(first)
    ]
    assert isinstance(kinds[3], BlockStored)
    assert kinds[3].block_hashes == tuple(second)
    assert kinds[4] == AllBlocksCleared()
    assert [seq for seq, _ in batches] == list(range(len(batches)))


async def test_reset_is_refused_while_blocks_are_held(start: StartEngine, http) -> None:
    engine = await start(role="prefill")
    await complete(
        http, engine, PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
    )
    status, answer = await post(http, engine, "/reset_prefix_cache", {})
    assert status == 409
    assert "rank 0" in answer["error"]["message"]


async def test_replay_starts_at_the_requested_number_and_ignores_invalid_requests(
    start: StartEngine, http, context
) -> None:
    engine = await start()
    endpoint = (await get(http, engine, "/engine/info"))["kv_events"][0]["replay"]
    for number in range(4):
        await complete(http, engine, [number] * 16, max_tokens=1)
    nonsense = context.socket(zmq.DEALER)
    nonsense.connect(endpoint)
    for request in ([b""], [encode_seq(2)], [b"", b"short"], [b"", b"x" * 9], [b"a", b"b", b"c"]):
        await nonsense.send_multipart(request)
    assert [seq for seq, _ in await replay(context, endpoint, 2)] == [2, 3]
    assert await replay(context, endpoint, 99) == []
    # A REQ socket frames the delimiter itself; it can take one answer.
    asker = context.socket(zmq.REQ)
    asker.connect(endpoint)
    await asker.send(encode_seq(3))
    topic, seq, payload = await asyncio.wait_for(asker.recv_multipart(), patience(10))
    assert (topic, decode_seq(seq)) == (b"", 3)
    assert decode_batch(payload).data_parallel_rank == 0


async def test_rank_n_publishes_on_the_base_port_plus_n(start: StartEngine, http, context) -> None:
    engine = await start(data_parallel_size=3)
    events = (await get(http, engine, "/engine/info"))["kv_events"]
    for name in ("endpoint", "replay"):
        ports = [int(entry[name].rpartition(":")[2]) for entry in events]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
    await complete(http, engine, PROMPT, max_tokens=1, data_parallel_rank=2)
    assert await replay(context, events[1]["replay"], 0) == []
    ((_, batch),) = await replay(context, events[2]["replay"], 0)
    assert batch.data_parallel_rank == 2


async def test_without_kv_events_nothing_is_bound(start: StartEngine, http) -> None:
    engine = await start(kv_events="")
    assert (await get(http, engine, "/engine/info"))["kv_events"] == []
    assert engine.ready_record()["kv_events"] is None
    await complete(http, engine, PROMPT, max_tokens=1)


async def test_an_endpoint_in_use_is_a_named_error(
    start: StartEngine, http, tokenizer: ModelTokenizer
) -> None:
    engine = await start()
    taken = engine.ready_record()["kv_events"]
    with pytest.raises(EngineConfigError, match=f"--kv-events {taken}: the address is in use"):
        Engine(EngineConfig(kv_events=taken), tokenizer)


async def test_stop_publishing_keeps_numbering_and_replay(
    start: StartEngine, http, context
) -> None:
    engine = await start(faults=Faults(stop_publishing=True))
    events = (await get(http, engine, "/engine/info"))["kv_events"][0]
    subscriber = await Subscriber(context, events["endpoint"]).ready()
    await complete(http, engine, [1] * 16, max_tokens=1)
    assert await subscriber.nothing()
    await post(http, engine, "/engine/faults", {"stop_publishing": False})
    await complete(http, engine, [2] * 16, max_tokens=1)
    assert (await subscriber.next())[1] == 1
    assert [seq for seq, _ in await replay(context, events["replay"], 0)] == [0, 1]


async def test_drop_events_makes_a_gap_that_replay_fills(start: StartEngine, http, context) -> None:
    engine = await start()
    events = (await get(http, engine, "/engine/info"))["kv_events"][0]
    subscriber = await Subscriber(context, events["endpoint"]).ready()
    await post(http, engine, "/engine/faults", {"drop_events": 2})
    for number in range(3):
        await complete(http, engine, [number] * 16, max_tokens=1)
    assert (await subscriber.next())[1] == 2
    assert (await get(http, engine, "/engine/faults"))["drop_events"] == 0
    assert [seq for seq, _ in await replay(context, events["replay"], 0)] == [0, 1, 2]


async def test_a_silent_restart_starts_again_at_zero(start: StartEngine, http, context) -> None:
    engine = await start(data_parallel_size=2)
    before = await get(http, engine, "/engine/info")
    endpoint, replay_endpoint = (before["kv_events"][0][key] for key in ("endpoint", "replay"))
    subscriber = await Subscriber(context, endpoint).ready()
    await complete(http, engine, [1] * 32, max_tokens=1, data_parallel_rank=0)
    assert (await subscriber.next())[1] == 0
    status, _ = await post(http, engine, "/engine/faults", {"restart_silently": True})
    assert status == 200
    await subscriber.reconnected()
    after = await get(http, engine, "/engine/info")
    assert after["engine_id"] != before["engine_id"]
    assert after["kv_events"][0]["endpoint"] == endpoint
    assert await replay(context, replay_endpoint, 0) == []
    answer = await complete(http, engine, [1] * 32, max_tokens=1, data_parallel_rank=0)
    assert cached_tokens(answer) == 0
    # Nothing said that the cache was lost: the next message is the first block, numbered 0 again.
    _, seq, batch = await subscriber.next()
    assert seq == 0
    assert not any(isinstance(event, AllBlocksCleared) for event in batch.events)
    assert [seq for seq, _ in await replay(context, replay_endpoint, 0)] == [0]


def test_the_replay_buffer_is_bounded_in_batches_and_bytes() -> None:
    buffer = ReplayBuffer(3, max_bytes=100)
    for seq in range(5):
        buffer.append(seq, b"x")
    assert [seq for seq, _ in buffer.since(0)] == [2, 3, 4]
    buffer.append(5, b"x" * 99)
    assert [seq for seq, _ in buffer.since(0)] == [4, 5]
    buffer.append(6, b"x" * 101)
    assert len(buffer) == 0
