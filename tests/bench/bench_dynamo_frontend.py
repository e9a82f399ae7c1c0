"""Our frontend on Dynamo's planes beside Dynamo's own, on the same worker in one run.

    python -m tests.bench.bench_dynamo_frontend --peer-python PATH [--smoke]

A worker of Dynamo sends what the prompt contains: an answer of 32 tokens, one in each piece, to a
chat of about 600 tokens. 32 clients stream over kept-alive connections; windows of ours and of
Dynamo's alternate. Measured are requests a second, the CPU time of the whole frontend process for
each request, and the time to the first event. The worker, the clients and the frontend share the
machine, so requests a second are those of all of them; the CPU time is the frontend's alone.

Without a peer only the part that is done for each token is measured: from the bytes of a worker's
answer to the events of the client.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median

import uvloop

from dynctl.serving.dynamo.answer import EngineAnswer
from dynctl.tokenization import DEMO_MODEL_DIR, load_tokenizer
from dynctl.wire.dynamo.engine_output import EngineItem, EngineOutput, decode_engine_item
from dynctl.wire.dynamo.openai_options import engine_request, read_engine_options
from dynctl.wire.dynamo.request_plane import (
    AnswerDecoder,
    Completed,
    RawItem,
    encode_end,
    encode_item,
    encode_prologue,
)
from tests.bench.harness import Row, bench_parser, cpu, print_table, row
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


def answer_row(rounds: int) -> Row:
    """CPU time of one answer of ``TOKENS`` tokens, without sockets."""
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    options = read_engine_options(
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    )
    request = engine_request(options, list(range(100, 700)), eos_token_ids=[])
    outputs = [EngineOutput(token_ids=[68 + n % 20]) for n in range(TOKENS)]
    outputs.append(EngineOutput(token_ids=[], finish_reason="length"))
    items = [encode_item(EngineItem(data=one), "msgpack") for one in outputs]
    pieces = [encode_prologue(), *items, encode_end("msgpack")]

    def answered() -> None:
        answer = EngineAnswer(options, request, tokenizer, request_id="0", created=0)
        decoder, events = AnswerDecoder("msgpack", 1 << 20), 0
        for piece in pieces:
            decoder.feed(piece)
            while (step := decoder.next_step()) is not None:
                if isinstance(step, RawItem):
                    output = decode_engine_item(step).data
                    assert output is not None
                    events += len(answer.feed(output))
                elif isinstance(step, Completed):
                    answer.end()
        assert events == EVENTS

    return row(f"{TOKENS} pieces to events", "us", cpu(answered, rounds, inner=20) / 1e3)


def rows_of(ours: list[Measured], theirs: list[Measured]) -> list[Row]:
    def both(read: Callable[[Measured], float]) -> tuple[float, float]:
        return median(map(read, ours)), median(map(read, theirs))

    return [
        row("CPU a request", "us", *both(lambda one: one.cpu_us), aim="1x"),
        row("requests", "1/s", *both(lambda one: one.rate), better="higher"),
        row("first event, p50", "ms", *both(lambda one: one.quantile(0.5))),
        row("first event, p99", "ms", *both(lambda one: one.quantile(0.99))),
    ]


def main() -> None:
    parser: argparse.ArgumentParser = bench_parser(__doc__ or "")
    arguments = parser.parse_args()
    print_table("an answer on Dynamo's plane", [answer_row(3 if arguments.smoke else 9)])
    try:
        version = version_of(arguments.peer_python or "")
    except (OSError, subprocess.SubprocessError):
        print("beside Dynamo's: needs --peer-python with ai-dynamo (make test-dynamo has one)")
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
