"""The handle of a worker that holds requests (:mod:`tests.dynamo.held_worker`)."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.dynamo.processes import Process
from tests.waiting import patience

State = Literal["prefill", "decode", "done", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request as the worker sees it. ``id`` is the frontend's request id, ``tokens`` its isl.

    ``prefill``: before its first token; ``decode``: after it.
    """

    id: str
    tokens: int
    state: State


class HeldControl:
    """Commands to one worker; each is done when the method returns. Thread-safe."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.Lock()

    def hold(self, *, prefill: bool = False, decode: bool = False) -> None:
        """Where requests that arrive from now on are held; both false: nowhere."""
        self._ask("hold", prefill=prefill, decode=decode)

    def requests(self, *states: State) -> list[HeldRequest]:
        """All that it has ever seen, in order of arrival, or those in ``states``."""
        received = [HeldRequest(**each) for each in self._ask("requests")]
        return [each for each in received if not states or each.state in states]

    def step(self, request_id: str | None = None) -> None:
        """End the present hold of one request, or of all: from prefill on to decode, or the end."""
        self._ask("step", id=request_id)

    def release(self, request_id: str | None = None) -> None:
        """Let one request, or all, run to the end."""
        self._ask("release", id=request_id)

    def store(
        self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None
    ) -> None:
        """Publish that the complete blocks of this prompt are cached, for an adapter or a salt."""
        self._ask("store", tokens=list(tokens), lora=lora, salt=salt)

    def store_in(self, medium: str, tokens: Sequence[int], first: int = 0) -> None:
        """Publish that blocks from ``first`` on are stored in a medium (GPU, CPU, DISK).

        For workers with ``--tiers`` alone, which publish nothing else.
        """
        self._ask("tier", medium=medium, tokens=list(tokens), first=first)

    def remove(self, tokens: Sequence[int]) -> None:
        """Publish that the complete blocks of this prompt are gone, leaf first."""
        self._ask("remove", tokens=list(tokens))

    def report_load(
        self, active_decode_blocks: int | None, kv_used_blocks: int | None, dp_rank: int = 0
    ) -> None:
        """Publish kv_metrics. Dynamo's publisher suppresses a repeat of the same values."""
        self._ask(
            "load",
            active_decode_blocks=active_decode_blocks,
            kv_used_blocks=kv_used_blocks,
            dp_rank=dp_rank,
        )

    def wait_for(self, count: int, *states: State, timeout: float = 15) -> list[HeldRequest]:
        """Wait until exactly ``count`` requests are in one of ``states``."""
        began = time.monotonic()
        while True:
            found = self.requests(*states)
            if len(found) == count:
                return found
            if time.monotonic() - began > patience(timeout):
                raise AssertionError(
                    f"{self._process.name}: {len(found)} requests in {states}, expected {count}: "
                    f"{self.requests()}"
                )
            time.sleep(0.01)

    def _ask(self, op: str, **arguments: Any) -> Any:
        popen = self._process.popen
        if popen.stdin is None or popen.stdout is None:
            raise AssertionError(f"{self._process.name} was not started with pipes")
        with self._lock:
            try:
                popen.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                popen.stdin.flush()
                line = popen.stdout.readline()
            except OSError as error:
                raise AssertionError(f"{self._process.tail()}\n{op}: {error}") from error
        if not line:
            raise AssertionError(f"{self._process.tail()}\n{op}: the worker has gone")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{self._process.name}: {op}: {answer['error']}")
        return answer["answer"]
