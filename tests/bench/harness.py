"""The frame all benchmarks share: measure, run a peer beside ours, print rows.

A **row** is one measured quantity: ours, the peer's from the same run, their ratio and the aim.
Medians over rounds; ours and the peer's rounds alternate, so that a slow minute of the machine
hits both.
"""

import argparse
import gc
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    ``ratio``: how many times better ours is than the peer's. ``aim``: ``2x`` for a ratio of at
    least 2, ``< 5`` for a value below 5, ``100`` for a value of at least 100, or nothing.
    """

    name: str
    unit: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    aim: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without an aim, or where the aim needs a peer."""
        found = _AIM.fullmatch(self.aim)
        if found is None:
            if self.aim:
                raise ValueError(f"the aim {self.aim!r} of {self.name!r} is not 2x, < 5 or 100")
            return None
        limit = float(found["limit"].replace(",", ""))
        if found["times"]:
            return None if self.ratio is None else self.ratio >= limit
        return self.ours < limit if found["below"] else self.ours >= limit


_AIM: Final = re.compile(r"(?P<below>< )?(?P<limit>[0-9.,]+)(?P<times>x)?")


def row(
    name: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    aim: str = "",
    *,
    better: Better = "lower",
) -> Row:
    """A row with its ratio worked out; ``better`` says which direction is good."""
    ratio = None
    if peer is not None and ours and peer:
        ratio = peer / ours if better == "lower" else ours / peer
    return Row(name, unit, ours, peer, ratio, aim)


def measure(
    fn: Callable[[], object],
    rounds: int = 9,
    *,
    inner: int = 1,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Median nanoseconds of one call of ``fn`` over ``rounds`` rounds of ``inner`` calls.

    The first round warms up and is not counted; the garbage collector is off meanwhile.
    ``clock=time.process_time_ns`` counts CPU time only.
    """
    return median(samples(fn, rounds, inner=inner, clock=clock))


def cpu(fn: Callable[[], object], rounds: int = 9, *, inner: int = 1) -> float:
    """As `measure`, in CPU time of the process."""
    return measure(fn, rounds, inner=inner, clock=time.process_time_ns)


def samples(
    fn: Callable[[], object],
    rounds: int,
    *,
    inner: int = 1,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[float]:
    """Nanoseconds of one call of ``fn``, one value a round; as `measure`."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        taken: list[float] = []
        for _ in range(rounds + 1):
            start = clock()
            for _ in range(inner):
                fn()
            taken.append((clock() - start) / inner)
    finally:
        if was_on:
            gc.enable()
    return taken[1:]


def alternate(sides: Sequence[Callable[[], float]], turns: int) -> list[float]:
    """Medians of several sides, each of which measures once a turn, turn by turn."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, values in zip(sides, taken, strict=True):
            values.append(side())
    return [median(values) for values in taken]


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS line; memory is measured on Linux only")


class Peer:
    """A peer in a process and an environment of its own: a JSON line in, a JSON line out.

    ``script`` runs under ``python`` and calls `serve` (or does as it does). Use as a context
    manager; the process ends with it.
    """

    def __init__(self, python: str, script: Path) -> None:
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="a Python that has ai-dynamo-runtime installed")
    parser.add_argument(
        "--smoke", action="store_true", help="the smallest run that touches everything"
    )
    return parser


@contextmanager
def peer_or_none(python: str | None, script: str) -> Iterator[Peer | None]:
    """The peer that runs ``script`` (beside this file), or None when no Python was given."""
    if python is None:
        yield None
        return
    with Peer(python, Path(__file__).with_name(script)) as peer:
        yield peer


def print_table(title: str, rows: Sequence[Row]) -> None:
    """The rows as a table, then as one JSON line."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "unit", "ours", "peer", "ratio", "aim"):
        table.add_column(column, justify="left" if column in ("what", "unit", "aim") else "right")
    for item in rows:
        table.add_row(
            item.name,
            item.unit,
            number(item.ours),
            "-" if item.peer is None else number(item.peer),
            "-" if item.ratio is None else f"{item.ratio:.2f}x",
            item.aim,
        )
    Console(width=110).print(table)
    print(json.dumps({"benchmark": title, "rows": [asdict(item) for item in rows]}))


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
