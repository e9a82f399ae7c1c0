"""Our frontend on Dynamo's planes beside Dynamo's own, on the same worker in one run.

A worker of Dynamo sends what the prompt contains: an answer of 32 tokens, one in each piece, to a
chat of about 600 tokens. 32 clients stream over kept-alive connections; windows of ours and of
Dynamo's alternate. Measured are requests a second, the CPU time of the whole frontend process for
each request, and the time to the first event. The worker, the clients and the frontend share the
machine, so requests a second are those of all of them; the CPU time is the frontend's alone.

Without a peer only the part that is done for each token is measured: from the bytes of a worker's
answer to the events of the client.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial

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
from tests.bench.harness import Median, Options, Row, cpu_seconds, measure, row
from tests.bench.load_generator import Measured, Prompts, load
from tests.dynamo.fleet import DynamoFleet, WorkerPlan
from tests.dynamo.ours import our_frontend

STREAMS, TOKENS, TURNS, WINDOW_S = 32, 32, 4, 4.0
#: A piece for each token, the finish, and [DONE] is counted by the generator.
EVENTS = TOKENS + 1


def script() -> Prompts:
    """Chats whose answer is in the prompt."""
    pieces: list[dict[str, object]] = [{"token_ids": [68 + n % 20]} for n in range(TOKENS)]
    pieces.append({"token_ids": [], "finish_reason": "length"})
    content = json.dumps({"key": 0, "chunks": pieces}, separators=(",", ":"))
    return Prompts(texts=[f"@@{content}@@"], model="tiny")


async def windows(sides: list[tuple[int, int]], turns: int, seconds: float) -> list[list[Measured]]:
    """``sides``: port and process id of each frontend."""
    prompts = script()
    taken: list[list[Measured]] = [[] for _ in sides]
    for _ in range(turns):
        for measured, (port, pid) in zip(taken, sides, strict=True):
            measured.append(
                await load(
                    port,
                    prompts,
                    STREAMS,
                    seconds,
                    warm_s=0.5,
                    cpu=partial(cpu_seconds, pid),
                    chunks=EVENTS,
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
    items = [encode_item(EngineItem(data=output), "msgpack") for output in outputs]
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

    return row(f"{TOKENS} pieces to events", "us", measure(answered, rounds, inner=20) / 1e3)


def rows(options: Options) -> Iterator[Row]:
    yield answer_row(3 if options.smoke else 9)
    python = options.peers.get("ai-dynamo")
    if python is None:
        return
    plans = [WorkerPlan("scripted", kind="scripted")]
    with DynamoFleet(plans, python=python) as fleet, our_frontend(fleet) as ours:
        sides = [(ours.port, ours.process.pid), (fleet.frontend.port, fleet.frontend.process.pid)]
        turns, seconds = (1, 1.0) if options.smoke else (TURNS, WINDOW_S)
        own, dynamos = uvloop.run(windows(sides, turns, seconds))

    def both(read: Callable[[Measured], float]) -> tuple[Median, Median]:
        return Median.of([*map(read, own)]), Median.of([*map(read, dynamos)])

    yield row("CPU a request", "us", *both(lambda window: window.cpu_us), aim="1.3x")
    yield row("requests", "1/s", *both(lambda window: window.rate), "1.3x", better="higher")
    yield row("first event, p50", "ms", *both(lambda window: window.quantile(0.5)))
    yield row("first event, p99", "ms", *both(lambda window: window.quantile(0.99)))
