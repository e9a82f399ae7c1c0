"""What a recording costs a router: CPU at 500 requests a second.

One router with 8 workers, in this process. Each request has a prompt of 1,024 or 4,096 tokens (64
or 256 blocks of 16), of which the first half is one of 20 beginnings; it is planned, booked, freed,
and has 12 output blocks; its worker stores the new blocks in one KV event and removes as many in
another one, and reports its load. The requests come 500 a second in groups of 5, and as many to a
second router that is not recorded, in turns. The cost of a recording is the CPU of the recorded
requests less that of the others, and what its task and its threads take. Percent are of one core.
"""

import asyncio
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from dynctl.serving.http.start import settle_garbage_collector
from dynctl.serving.records.recorder import FileSink, Recordings
from dynctl.serving.routing.service import RoutingService
from dynctl.serving.telemetry.observers import RequestRecord
from router_core import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    LoadReported,
    ModelRuntimeConfig,
    Router,
    RoutingRequest,
    Worker,
)
from tests.bench.harness import Median, Options, Row, row

RATE = 500
GROUP = 5
WORKERS = 8
BLOCK = 16
OUTPUT_BLOCKS = 12
HELD = 400  # prompts that stay cached


class Traffic:
    """Requests with the events that follow them."""

    def __init__(self, blocks: int) -> None:
        self._random = random.Random(1)
        self._blocks = blocks
        half = blocks // 2
        self._beginnings = [[self._random.getrandbits(64) for _ in range(half)] for _ in range(20)]
        self._held: deque[tuple[int, list[int]]] = deque()
        self.count = 0
        self.service = RoutingService(router=Router(exact_reuse=True))
        for number in range(WORKERS):
            runtime = ModelRuntimeConfig(total_kv_blocks=1_000_000)
            self.service.membership.upsert(
                Worker(number + 1, f"w{number}", "m", runtime_config=runtime)
            )

    def request(self) -> None:
        """One request, from its arrival to its end."""
        service, rnd = self.service, self._random
        self.count += 1
        first = rnd.choice(self._beginnings)
        rest = [rnd.getrandbits(64) for _ in range(self._blocks - len(first))]
        hashes = first + rest
        request = RoutingRequest(
            service.new_id(), "m", self._blocks * BLOCK, BLOCK, hashes, arrived_at=service.clock()
        )
        record = RequestRecord(
            request.id, request.id, "chat", service.clock(), service.wall(), "m",
            isl_tokens=request.isl_tokens,
        )  # fmt: skip
        for observer in service.observers:
            observer.on_prepared(request, record, ())
        plan = service.plan(request)
        service.book(plan.final, request, record)
        service.decided(plan, request, record)
        ref = plan.final.require()
        service.apply(KvEvent(*ref, BlocksStored(None, hashes, hashes)))
        self._held.append((ref.worker_id, rest))
        if len(self._held) > HELD:
            worker_id, gone = self._held.popleft()
            service.apply(KvEvent(worker_id, 0, BlocksRemoved(gone)))
        service.prefill_done(request.id)
        for _ in range(OUTPUT_BLOCKS):
            service.output_block(request.id)
        service.apply(LoadReported(*ref, kv_used_blocks=self.count % 1000))
        service.free(request.id)
        record.first_token_at = record.finished_at = service.clock()
        record.outcome, record.status = "success", 200
        for observer in service.observers:
            observer.on_finished(record)


async def drive(services: Sequence[Traffic], seconds: float) -> list[float]:
    """CPU seconds of each traffic, and of everything else, over ``seconds`` at RATE requests a
    second each; they take turns, group by group."""
    began, cpu = time.monotonic(), time.process_time()
    taken = [0.0] * len(services)
    for number in range(int(seconds * RATE / GROUP)):
        for at, traffic in enumerate(services):
            turn = time.thread_time()
            for _ in range(GROUP):
                traffic.request()
            taken[at] += time.thread_time() - turn
        late = began + (number + 1) * GROUP / RATE - time.monotonic()
        await asyncio.sleep(max(0.0, late))
    return [*taken, time.process_time() - cpu - sum(taken)]


async def measured(blocks: int, seconds: float, rounds: int) -> list[Row]:
    """Rows of one length of prompts: what a recording takes, of a second and in the file."""
    plain, recorded = Traffic(blocks), Traffic(blocks)
    await drive((plain, recorded), min(2.0, seconds))
    settle_garbage_collector()  # as every server does
    _, _, idle = await drive((plain, recorded), seconds)
    with tempfile.TemporaryDirectory() as directory:
        sink = FileSink(Path(directory) / "recording")
        recordings = Recordings(recorded.service)
        task = asyncio.create_task(recordings.record(sink))
        # The first state is written: its cost has a bound of its own (recorder._STATE_SHARE).
        while not any(recorder.records > 1 for recorder in recordings.active):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        before = recorded.count
        shares = []
        for _ in range(rounds):
            without, noting, rest = await drive((plain, recorded), seconds)
            shares.append(100 * (noting - without + rest - idle) / seconds)
        await recordings.close()
        assert not (await task).lost
        sink.close()
        size = sink.path.stat().st_size / (recorded.count - before)
    name = f"{blocks * BLOCK:,} tokens, {RATE} requests a second"
    return [
        row(f"{name}: CPU of a recording", "% of a core", Median.of(shares), aim="< 3"),
        row(f"{name}: file", "bytes/req", size),
    ]


def rows(options: Options) -> Iterator[Row]:
    seconds, rounds = (0.5, 1) if options.smoke else (4.0, 5)
    for blocks in (64, 256):
        yield from asyncio.run(measured(blocks, seconds, rounds))
