"""How fast a replay runs on one core, and how its memory grows with the trace.

    python -m tests.bench.bench_replay [--trace FILE] [--smoke]

Eight aggregated workers of 4,000 blocks of 512 tokens, mode kv. ``--trace``: Mooncake's
conversation trace. Requests a second are of CPU time, without reading the trace; best of three.
Memory is the peak of a process that replays 10,000 and then 100,000 requests from a stream.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import ReplayPolicy, SimulatedFleet, SimulatedWorker
from dynctl.simulation.replay.simulation import simulate
from dynctl.simulation.replay.workloads import generate, workload
from dynctl.wire.traces import TraceRequest, read_trace
from router_core import RouterConfig
from tests.bench.harness import Row, bench_parser, print_table, row

_BLOCK: Final = 512
_AIM: Final = "20,000"
_CHAT: Final = ("rate=20", "output_tokens=100")
#: Distinct blocks that the ceiling remembers while memory is measured.
_MOST_BLOCKS: Final = 50_000


def fleet() -> SimulatedFleet:
    engine = EngineConfig(block_size=_BLOCK, total_blocks=4000, max_num_batched_tokens=8192)
    return SimulatedFleet(tuple(SimulatedWorker(number) for number in range(1, 9)), engine)


def rate(trace: Sequence[TraceRequest], run: Callable[[Iterable[TraceRequest]], object]) -> float:
    """Requests a second of CPU time."""
    began = time.process_time()
    run(trace)
    return len(trace) / (time.process_time() - began)


def chat(requests: int) -> Iterable[TraceRequest]:
    return generate(workload("chat", (*_CHAT, f"requests={requests}")), 1, _BLOCK)


def rates(name: str, trace: Sequence[TraceRequest], rounds: int) -> list[Row]:
    rows = []
    blocks = sum(len(one.hash_ids) for one in trace) / len(trace)
    for mode in ("kv", "round-robin"):
        policy = ReplayPolicy(mode, RouterConfig(router_mode=mode))
        run = partial(simulate, fleet=fleet(), policy=policy)
        best = max(rate(trace, run) for _ in range(rounds))
        title = f"{name}, {blocks:.0f} blocks a prompt, {mode}"
        rows.append(row(title, "requests/s", best, None, _AIM, better="higher"))
    policy = ReplayPolicy("kv", RouterConfig())
    run = partial(simulate, fleet=fleet(), policy=policy, lean=False)
    rows.append(row(f"{name}, kv, by a whole Router", "requests/s", rate(trace, run)))
    return rows


def peak_mb(requests: int) -> float:
    """The peak memory of a process that replays so many requests."""
    argv = [sys.executable, "-m", "tests.bench.bench_replay", "--peak", str(requests)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def _high_water_mb() -> float:
    """The peak of this process. (`ru_maxrss` begins with that of the process that started it.)"""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status has no VmHWM; expected Linux")


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--peak", type=int, help="replay so many requests, print the peak in MB")
    arguments = parser.parse_args()
    if arguments.peak:
        policy = ReplayPolicy("kv", RouterConfig())
        simulate(chat(arguments.peak), fleet(), policy, most_blocks=_MOST_BLOCKS)
        print(_high_water_mb())
        return
    few, rounds = (300, 1) if arguments.smoke else (10_000, 3)
    rows = rates("chat", list(chat(few)), rounds)
    if arguments.trace is not None:
        conversation = list(islice(read_trace(arguments.trace), few if arguments.smoke else None))
        rows += rates("conversation trace", conversation, rounds)
    many = few * 10
    rows += [row(f"{count:,} requests: peak", "MB", peak_mb(count)) for count in (few, many)]
    print_table("replay", rows)


if __name__ == "__main__":
    main()
