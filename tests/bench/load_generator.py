"""Many streams of chat requests over kept-alive connections, each as cheap as asyncio allows.

A stream sends its next request when the answer to the last has ended. No two prompts are equal,
not even in their first token: every text starts with a number of its own.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from tests.bench.sse_upstream import CHUNKS, MODEL

_END = b"0\r\n\r\n"
_MARK = "0000000000"
_TOKENS_A_WORD = 1.19
_WORDS = (
    "the network of a large city carries many trains and each train waits for its signal while "
    "people read write and think about what the next station may bring to their long day"
).split()


class Prompts:
    """Streamed chats with one of ``texts`` after a number of their own; `next` is the bytes of a
    request. Without texts: 64 of about ``tokens`` tokens (of the demo's tokenizer)."""

    def __init__(self, tokens: int = 0, texts: Sequence[str] = (), model: str = MODEL) -> None:
        source = random.Random(tokens)
        words = round((tokens - 12) / _TOKENS_A_WORD)
        self._variants = []
        for text in texts or [" ".join(source.choices(_WORDS, k=words)) for _ in range(64)]:
            message = {"role": "user", "content": f"{_MARK} {text}"}
            chat = {"model": model, "messages": [message], "stream": True, "max_tokens": CHUNKS}
            body = json.dumps(chat).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            ).encode()
            before, _, after = (head + body).partition(_MARK.encode())
            self._variants.append((before, after))
        self._count = 0

    def next(self) -> bytes:
        self._count += 1
        before, after = self._variants[self._count % len(self._variants)]
        # The number is spread over all its digits, so that texts differ from the first token on.
        return b"%b%010d%b" % (before, self._count * 7_368_787 % 10_000_000_000, after)


@dataclass
class Measured:
    """One window of load. Times in seconds; ``first`` are times to the first event."""

    elapsed: float = 0.0
    finished: int = 0
    first: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.finished / self.elapsed

    @property
    def cpu_us(self) -> float:
        """CPU microseconds a request of the process that was watched."""
        return self.cpu_s * 1e6 / self.finished if self.finished else 0.0

    def quantile(self, q: float) -> float:
        """Milliseconds to the first event."""
        ordered = sorted(self.first)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3 if ordered else 0.0


class _Run:
    def __init__(self, prompts: Prompts, streams: int, chunks: int) -> None:
        self.prompts = prompts
        self.events = chunks + 1
        self.unanswered = streams
        self.all_answered = asyncio.Event()
        self.counting = False
        self.stopping = False
        self.measured = Measured()


class _Stream(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parts: list[bytes] = []
        self._sent = 0.0
        self._first = 0.0
        self._answered = False
        self._transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._parts.clear()
        self._first = 0.0
        self._sent = time.perf_counter()
        self._transport.write(self._run.prompts.next())

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if not self._first and b"data:" in data:
            self._first = time.perf_counter()
        if not data.endswith(_END):
            return
        answer = b"".join(self._parts)
        run, measured = self._run, self._run.measured
        if not answer.startswith(b"HTTP/1.1 200") or answer.count(b"data: ") != run.events:
            measured.errors.append(answer[:300].decode(errors="replace"))
        if not self._answered:
            self._answered = True
            run.unanswered -= 1
            if not run.unanswered:
                run.all_answered.set()
        if run.counting:
            measured.finished += 1
            measured.first.append(self._first - self._sent)
        assert self._transport is not None
        if run.stopping or measured.errors:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._run.stopping and not self._run.measured.errors:
            self._run.measured.errors.append(f"connection lost: {exc}")
        if not self.done.done():
            self.done.set_result(None)


async def load(
    port: int,
    prompts: Prompts,
    streams: int,
    seconds: float,
    *,
    warm_s: float = 0.1,
    cpu: Callable[[], float] = lambda: 0.0,
    chunks: int = CHUNKS,
) -> Measured:
    """Keep ``streams`` streams busy, and measure for ``seconds``.

    Counting starts when every stream has had an answer and ``warm_s`` have passed: connecting is
    not part of it. ``cpu`` reads the seconds of CPU that the frontend has used so far; ``chunks``
    are those of an answer. Raises RuntimeError on an answer that is not whole.
    """
    loop = asyncio.get_running_loop()
    run = _Run(prompts, streams, chunks)
    made = [
        await loop.create_connection(lambda: _Stream(run), "127.0.0.1", port)
        for _ in range(streams)
    ]
    answered = asyncio.create_task(run.all_answered.wait())
    lost = [stream.done for _, stream in made]
    await asyncio.wait([answered, *lost], timeout=30, return_when=asyncio.FIRST_COMPLETED)
    answered.cancel()
    await asyncio.sleep(warm_s)
    measured = run.measured
    run.counting = True
    used, started = cpu(), time.perf_counter()
    await asyncio.sleep(seconds)
    run.counting = False
    measured.elapsed = time.perf_counter() - started
    measured.cpu_s = cpu() - used
    run.stopping = True
    async with asyncio.timeout(30):
        await asyncio.gather(*(stream.done for _, stream in made))
    if measured.errors:
        raise RuntimeError(f"{len(measured.errors)} bad answers, the first: {measured.errors[0]}")
    return measured
