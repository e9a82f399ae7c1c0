"""How fast a replay runs on one core, and how its memory grows with the trace.

Eight aggregated workers of 4,000 blocks of 512 tokens, mode kv, generated chats. Requests a second
are of CPU time, without making the trace; best of three. Memory is the peak of a process that
replays so many requests from a stream.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Final

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import ReplayPolicy, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.simulation import simulate
from dynctl.simulation.replay.workloads import generate, workload
from dynctl.wire.traces import TraceRequest
from router_core import RouterConfig
from tests.bench.harness import Options, Row, in_own_process, resident_bytes, row

_BLOCK: Final = 512
#: Distinct blocks that the ceiling remembers while memory is measured.
_MOST_BLOCKS: Final = 50_000


def fleet() -> SimulatedFleet:
    engine = EngineConfig(block_size=_BLOCK, total_blocks=4000, max_num_batched_tokens=8192)
    return SimulatedFleet(tuple(SimulatedWorker(number) for number in range(1, 9)), engine)


def chat(requests: int) -> Iterable[TraceRequest]:
    settings = ("rate=20", "output_tokens=100", f"requests={requests}")
    return generate(workload("chat", settings), 1, _BLOCK)


def rate(requests: int, mode: str, rounds: int, *, lean: bool = True) -> float:
    """Requests a second of CPU time."""
    trace, best = list(chat(requests)), 0.0
    for _ in range(rounds):
        policy = ReplayPolicy(mode, RouterConfig(router_mode=mode))
        began = time.process_time()
        simulate(trace, fleet(), policy, lean=lean)
        best = max(best, requests / (time.process_time() - began))
    return best


def highest_mb(requests: int) -> float:
    """The highest memory of a process that replays so many requests."""
    policy = ReplayPolicy("kv", RouterConfig())
    simulate(chat(requests), fleet(), policy, most_blocks=_MOST_BLOCKS)
    return resident_bytes(highest=True) / 1e6


def rows(options: Options) -> Iterator[Row]:
    few, rounds = (300, 1) if options.smoke else (10_000, 3)
    yield row("mode kv", "requests/s", rate(few, "kv", rounds), None, "20,000", better="higher")
    yield row("round-robin", "requests/s", rate(few, "round-robin", rounds))
    yield row("mode kv, by a whole Router", "requests/s", rate(few, "kv", 1, lean=False))
    peak = in_own_process(highest_mb, few * 10)
    yield row(f"{few * 10:,} requests: peak memory", "MB", peak)
