"""Our frontend on Dynamo's planes beside Dynamo's own, on the same worker in one run.

    python -m tests.bench.bench_dynamo_frontend --peer-python PATH [--smoke]

A worker of Dynamo sends what the prompt contains: an answer of 32 tokens, one in each piece, to a
chat of about 600 tokens. 32 clients stream over kept-alive connections; windows of ours and of
Dynamo's alternate. Measured are requests a second, the CPU time of the whole frontend process for
each request, and the time to the first event. The worker, the clients and the frontend share the
machine, so requests a second are those of all of them; the CPU time is the frontend's alone.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median

import uvloop

from tests.bench.harness import Row, bench_parser, print_table, row
from tests.bench.load_generator import Measured, Prompts, load
from tests.dynamo.fleet import DynamoFleet, WorkerPlan
from tests.dynamo.ours import our_frontend
from tests.dynamo.versions import version_of

STREAMS, TOKENS, TURNS, WINDOW_S = 32, 32, 4, 4.0
#: A piece for each token, the finish, and [DONE] is counted by the generator.
EVENTS = TOKENS + 1
_TICKS = os.sysconf("SC_CLK_TCK")


class Scripts(Prompts):
    """Chats whose answer is in the prompt; every prompt begins with a number of its own."""

    def __init__(self) -> None:
        pieces: list[dict[str, object]] = [{"token_ids": [68 + n % 20]} for n in range(TOKENS)]
        pieces.append({"token_ids": [], "finish_reason": "length"})
        text = f"@@{json.dumps({'key': 0, 'chunks': pieces}, separators=(',', ':'))}@@"
        body = json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"0000000000 {text}"}],
                "stream": True,
                "max_tokens": TOKENS,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        before, _, after = (head + body).partition(b"0000000000")
        self._variants = [(before, after)] * 64
        self._count = 0


def cpu_of(pid: int) -> Callable[[], float]:
    """Reads the seconds of CPU that a process has used, all its threads."""
    stat = Path(f"/proc/{pid}/stat")

    def used() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    return used


async def windows(sides: list[tuple[int, int]], turns: int, seconds: float) -> list[list[Measured]]:
    """``sides``: port and process id of each frontend."""
    prompts = Scripts()
    taken: list[list[Measured]] = [[] for _ in sides]
    for _ in range(turns):
        for found, (port, pid) in zip(taken, sides, strict=True):
            found.append(
                await load(
                    port, prompts, STREAMS, seconds, warm_s=0.5, cpu=cpu_of(pid), chunks=EVENTS
                )
            )
    return taken


def rows_of(ours: list[Measured], theirs: list[Measured]) -> list[Row]:
    def both(read: Callable[[Measured], float]) -> tuple[float, float]:
        return median(map(read, ours)), median(map(read, theirs))

    return [
        row("CPU a request", "us", *both(lambda one: one.cpu_us), aim="at most 1.0x Dynamo's"),
        row("requests", "1/s", *both(lambda one: one.rate), better="higher"),
        row("first event, p50", "ms", *both(lambda one: one.quantile(0.5))),
        row("first event, p99", "ms", *both(lambda one: one.quantile(0.99))),
    ]


def main() -> None:
    parser: argparse.ArgumentParser = bench_parser(__doc__ or "")
    arguments = parser.parse_args()
    try:
        version = version_of(arguments.peer_python or "")
    except (OSError, subprocess.SubprocessError):
        print("bench_dynamo_frontend needs --peer-python with ai-dynamo (make test-dynamo has one)")
        return
    print(f"Dynamo {version}", flush=True)
    plans = [WorkerPlan("scripted", kind="scripted")]
    with (
        DynamoFleet(plans, python=arguments.peer_python) as fleet,
        our_frontend(fleet) as ours,
    ):
        sides = [(ours.port, ours.process.pid), (fleet.frontend.port, fleet.frontend.process.pid)]
        turns, seconds = (1, 1.0) if arguments.smoke else (TURNS, WINDOW_S)
        own, dynamos = uvloop.run(windows(sides, turns, seconds))
    print_table("our frontend and Dynamo's on one worker", rows_of(own, dynamos))


if __name__ == "__main__":
    main()
