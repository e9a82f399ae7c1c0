"""What a recording costs a router: CPU at 500 requests a second.

    python -m tests.bench.bench_recording [--smoke]

One router with 8 workers, in this process. Each request has a prompt of 1,024 or 4,096 tokens (64
or 256 blocks of 16), of which the first half is one of 20 beginnings; it is planned, booked, freed,
and has 12 output blocks; its worker stores the new blocks in one KV event and removes as many in
another one, and reports its load. The requests come 500 a second in groups of 5. CPU is user and
system time of the process with all its threads, with a recording to a file and without, in turns;
the difference is the cost of the recording. Percent are of one core.
"""

import asyncio
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median

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
from tests.bench.harness import Row, bench_parser, print_table, row

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
            self.service.upsert_worker(
                Worker(number + 1, f"w{number}", "m", runtime_config=runtime)
            )

    def one(self) -> None:
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
            observer.on_prepared(request, record)
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

    async def run(self, seconds: float) -> float:
        """CPU seconds of `seconds` at RATE requests a second."""
        began, cpu = time.monotonic(), time.process_time()
        groups = int(seconds * RATE / GROUP)
        for number in range(groups):
            for _ in range(GROUP):
                self.one()
            late = began + (number + 1) * GROUP / RATE - time.monotonic()
            await asyncio.sleep(max(0.0, late))
        return time.process_time() - cpu


async def measure(blocks: int, seconds: float, rounds: int) -> tuple[float, float, float, float]:
    """CPU seconds a second without and with a recording, bytes a request, records lost."""
    traffic = Traffic(blocks)
    await traffic.run(min(2.0, seconds))
    settle_garbage_collector()  # as every server does
    plain, recorded, sizes, lost = [], [], [], 0
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):
            plain.append(await traffic.run(seconds) / seconds)
            sink = FileSink(Path(directory) / f"{number}")
            recordings = Recordings(traffic.service)
            task = asyncio.create_task(recordings.record(sink))
            # The first state is written: its cost has a bound of its own (recorder._STATE_SHARE).
            while not any(one.records > 1 for one in recordings.active):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            before = traffic.count
            recorded.append(await traffic.run(seconds) / seconds)
            await recordings.close()
            done = await task
            sink.close()
            lost += done.lost
            sizes.append(sink.path.stat().st_size / (traffic.count - before))
    return median(plain), median(recorded), median(sizes), lost


def rows_of(seconds: float, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for blocks in (64, 256):
        plain, recorded, size, lost = asyncio.run(measure(blocks, seconds, rounds))
        name = f"{blocks * BLOCK:,} tokens, {RATE} requests a second"
        more = 100 * (recorded - plain)
        rows.append(row(f"{name}: CPU of a recording", "% of a core", more, aim="< 3"))
        rows.append(row(f"{name}: the same, a request", "us", 1e6 * (recorded - plain) / RATE))
        rows.append(row(f"{name}: file", "bytes/req", size))
        rows.append(row(f"{name}: records lost", "", lost))
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    seconds, rounds = (0.5, 1) if arguments.smoke else (arguments.seconds, arguments.rounds)
    print_table("what a recording costs", rows_of(seconds, rounds))


if __name__ == "__main__":
    main()
