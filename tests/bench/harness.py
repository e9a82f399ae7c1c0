"""What all benchmarks share: rows, medians of rounds, peers, and processes of their own.

A benchmark is a module ``bench_NAME`` with a function ``rows(options)`` that yields the measured
rows. ``python -m tests.bench NAME`` runs it in a process of its own and prints the rows.
Ours and a peer take turns, so that a slow minute of the machine hits both.
"""

import gc
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeVar

#: In the order of the page.
NAMES = (
    "frontend",
    "processes",
    "dynamo_frontend",
    "gateway",
    "hashing",
    "decision",
    "index",
    "tokenizing",
    "pairs",
    "recording",
    "recovery",
    "replay",
    "scale",
    "turns",
    "startup",
    "top",
)

Better = Literal["lower", "higher"]

T = TypeVar("T")

_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Median:
    """The median of several rounds. ``spread``: (highest - lowest) / median, None for one round."""

    value: float
    spread: float | None = None

    @staticmethod
    def of(values: Sequence[float]) -> "Median":
        value = median(values)
        several = len(values) > 1 and value
        return Median(value, (max(values) - min(values)) / abs(value) if several else None)

    def __truediv__(self, divisor: float) -> "Median":
        return Median(self.value / divisor, self.spread)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    ``ratio``: how many times better ours is than the peer's. ``aim``: ``2x`` for a ratio of at
    least 2, ``< 5`` for a value below 5, ``100`` for a value of at least 100, or nothing.
    ``spread``: of the rounds of ours, see `Median`.
    """

    name: str
    unit: str
    value: float
    peer: float | None = None
    ratio: float | None = None
    spread: float | None = None
    aim: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without an aim, or where the aim needs a peer."""
        parts = _AIM.fullmatch(self.aim)
        if parts is None:
            if self.aim:
                raise ValueError(f"the aim {self.aim!r} of {self.name!r} is not 2x, < 5 or 100")
            return None
        limit = float(parts["limit"].replace(",", ""))
        if parts["times"]:
            return None if self.ratio is None else self.ratio >= limit
        return self.value < limit if parts["below"] else self.value >= limit


_AIM: Final = re.compile(r"(?P<below>< )?(?P<limit>[0-9.,]+)(?P<times>x)?")


def row(
    name: str,
    unit: str,
    ours: float | Median,
    peer: float | Median | None = None,
    aim: str = "",
    *,
    better: Better = "lower",
) -> Row:
    """A row with its ratio worked out; ``better`` is the good direction."""
    value, spread = (ours.value, ours.spread) if isinstance(ours, Median) else (ours, None)
    other = peer.value if isinstance(peer, Median) else peer
    ratio = None
    if other is not None and value and other:
        ratio = other / value if better == "lower" else value / other
    return Row(name, unit, value, other, ratio, spread, aim)


@dataclass(frozen=True, slots=True)
class Options:
    """``smoke``: the smallest run that touches everything. ``peers``: peer -> its program, which is
    a Python that has it, or the peer itself."""

    smoke: bool = False
    peers: Mapping[str, str] = field(default_factory=dict)


def rows_of(name: str, options: Options) -> tuple[Row, ...]:
    """The rows of one benchmark, measured in this process."""
    return tuple(importlib.import_module(f"tests.bench.bench_{name}").rows(options))


def measure(
    fn: Callable[[], object],
    rounds: int = 9,
    *,
    inner: int = 1,
    clock: Callable[[], int] = time.process_time_ns,
) -> Median:
    """Nanoseconds of one call of ``fn`` over ``rounds`` rounds of ``inner`` calls; CPU time unless
    another clock is given.

    The first round warms up and is not counted; the garbage collector is off meanwhile.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    taken: list[float] = []
    try:
        for _ in range(rounds + 1):
            start = clock()
            for _ in range(inner):
                fn()
            taken.append((clock() - start) / inner)
    finally:
        if was_on:
            gc.enable()
    return Median.of(taken[1:])


def alternate(sides: Sequence[Callable[[], float]], turns: int) -> list[Median]:
    """Medians of several sides, each of which measures once a turn, turn by turn."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, values in zip(sides, taken, strict=True):
            values.append(side())
    return [Median.of(values) for values in taken]


def resident_bytes(*, highest: bool = False) -> int:
    """Resident memory of this process, or the highest so far (Linux)."""
    kind = "VmHWM:" if highest else "VmRSS:"
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind} line; memory is measured on Linux only")


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used, all its threads; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """The result of a function of a module in a new process, whose memory holds nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class Peer:
    """A peer in a process and an environment of its own: a JSON line in, a JSON line out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, op: str, **arguments: object) -> Any:
        """The answer of the peer's operation ``op``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer process ended during {op!r}")
        return json.loads(line)


@contextmanager
def peer_or_none(options: Options, side: Literal["index", "select"]) -> Iterator[Peer | None]:
    """One side of `peer_dynamo`, None where Dynamo's binding is not installed."""
    python = options.peers.get("ai-dynamo-runtime")
    if python is None:
        yield None
        return
    argv = [python, str(Path(__file__).with_name("peer_dynamo.py")), side]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Peer(process)
        finally:
            process.terminate()
