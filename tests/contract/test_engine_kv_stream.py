"""The simulated engine's own publisher, followed as any engine is.

Its PUB socket cannot say when a subscription has arrived, so these tests stand on replay.
"""

import asyncio

import pytest
import zmq
import zmq.asyncio

from dynctl.adapters.ports import IndexUpdate
from dynctl.adapters.zmq.kv_event_source import KvEventSource, StreamBounds
from dynctl.adapters.zmq.kv_events import ZmqKvEvents
from dynctl.base.tasks import end_tasks
from dynctl.simulation.engine.cache_events import (
    CacheRemoved,
    CacheStored,
)
from dynctl.simulation.engine.config import EngineConfig, Faults
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.kv_publisher import bind_publishers
from router_core import BlocksRemoved, BlocksStored, local_block_hashes
from tests.contract.zmq_publisher import Recorder, running

TOKENS = tuple(range(8))


def block(number: int) -> CacheStored:
    return CacheStored(None, (500 + number,), TOKENS, None)


class EngineBench:
    def __init__(self, publisher, faults):
        self.publisher = publisher
        self.faults = faults
        self.recorder = Recorder()
        self.follower = ZmqKvEvents(
            KvEventSource(
                worker_id=3,
                endpoint=publisher.endpoints.endpoint,
                replay=publisher.endpoints.replay,
                block_size=8,
            ),
            self.recorder,
            lambda: 0.0,
            bounds=StreamBounds(idle_check=0.05),
        )
        self.serving = asyncio.create_task(publisher.serve_replay())

    async def stop_serving(self):
        await end_tasks([self.serving])

    async def restart(self):
        await self.stop_serving()
        await self.publisher.restart()
        self.serving = asyncio.create_task(self.publisher.serve_replay())


@pytest.fixture
async def bench():
    context: zmq.Context = zmq.Context()
    faults = FaultState(Faults())
    any_port = "tcp://127.0.0.1:0"
    config = EngineConfig(kv_events=any_port, replay=any_port, block_size=8)
    publishers = bind_publishers(config, context, faults)
    bench = EngineBench(publishers[0], faults)
    yield bench
    await bench.stop_serving()
    for publisher in publishers:
        publisher.close()
    context.term()


async def test_stored_and_removed_reach_the_index(bench):
    async with running(bench.follower.run()):
        bench.publisher.publish([block(0), CacheRemoved((500,))])
        bench.publisher.publish([CacheStored(500, (501, 502), TOKENS + TOKENS, "adapter")])
        await bench.recorder.until_seq(1)
    updates = [value for value in bench.recorder.values if isinstance(value, IndexUpdate)]
    plain = local_block_hashes(TOKENS, 8)
    adapted = local_block_hashes(TOKENS + TOKENS, 8, lora_name="adapter")
    assert updates[0].events == (
        BlocksStored(None, (500,), plain, counted=True),
        BlocksRemoved((500,)),
    )
    assert updates[1].events == (BlocksStored(500, (501, 502), adapted, counted=True),)
    assert bench.follower.state().dropped == {}


async def test_dropped_batches_are_healed(bench):
    async with running(bench.follower.run()):
        bench.publisher.publish([block(0)])
        await bench.recorder.until_seq(0)
        bench.faults.update({"drop_events": 2})
        for number in range(1, 4):
            bench.publisher.publish([block(number)])
        await bench.recorder.until_seq(3)
    assert bench.recorder.seqs == [0, 1, 2, 3]
    assert bench.follower.state().lost == 0


async def test_engine_that_stopped_publishing_is_followed_by_its_replay(bench):
    async with running(bench.follower.run()):
        bench.faults.update({"stop_publishing": True})
        bench.publisher.publish([block(0)])
        bench.publisher.publish([block(1)])
        await bench.recorder.until_seq(1)
    assert bench.recorder.seqs == [0, 1]


async def test_silent_restart_is_noticed_before_the_engine_speaks_again(bench):
    async with running(bench.follower.run()):
        bench.publisher.publish([block(0)])
        bench.publisher.publish([block(1)])
        await bench.recorder.until_seq(1)
        await bench.restart()
        await bench.recorder.until_code("ENGINE_RESTARTED")
        bench.publisher.publish([block(9)])
        await bench.recorder.until_seq(0, times=2)
    assert bench.recorder.seqs == [0, 1, 0]
    assert bench.recorder.codes.count("ENGINE_RESTARTED") == 1
    assert bench.follower.state().missing == 0
