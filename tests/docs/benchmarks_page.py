"""docs/benchmarks.md: the newest saved rows of each benchmark (`make bench SAVE=1`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.bench.__main__ import number
from tests.bench.contestants import BARE
from tests.bench.harness import NAMES, Row
from tests.bench.results import EARLIER, Run, saved_runs

_HEAD: Final = """\
# Benchmarks

    make bench PEERS=1 SAVE=1       all, beside the peers, which it installs; saves the rows
    make bench BENCH=index          one, beside the peers that are installed; `make bench` all
    make bench-guard                fails where a request got dearer beside a bare proxy

The page is generated from the rows in tests/bench/results. Ours and the peer take turns in a run;
a **ratio** above 1 is better than the peer. Times of a shared machine vary by a third, so read
the ratios. *Spread*: highest less lowest round, by the median. More: each `bench_NAME.py`.
"""
_BAR: Final = 24
#: Commits in the plot, the newest.
_POINTS: Final = 8


def benchmarks_page() -> str:
    runs = saved_runs()
    newest = {name: _newest(runs, name) for name in NAMES}
    known = {name: run for name, run in newest.items() if run is not None}
    lines = [_HEAD, *_runs(known), "", *_over_releases(runs), ""]
    lines += ["## Beside a peer", "", "| | ours | peer | ratio | spread | aim |"]
    lines += ["|---|---|---|---|---|---|", *_compared(known), ""]
    lines += ["## Without a peer", "", "| | ours | spread | aim |", "|---|---|---|---|"]
    return "\n".join([*lines, *_alone(known), ""])


def _newest(runs: Sequence[Run], name: str) -> Run | None:
    return next((run for run in reversed(runs) if name in run.benches), None)


def _runs(known: Mapping[str, Run]) -> Iterator[str]:
    """Where and when the rows of the page were measured."""
    yield "| commit | date | machine | load before | peers |"
    yield "|---|---|---|---|---|"
    for run in sorted({id(run): run for run in known.values()}.values(), key=lambda run: run.date):
        loads = [run.benches[name].load for name, measured in known.items() if measured is run]
        peers = ", ".join(f"{name} {version}" for name, version in run.peers.items()) or "none"
        load = f"{min(loads)} to {max(loads)}"
        yield f"| {run.commit} | {run.date[:10]} | {run.machine} | {load} | {peers} |"


def _over_releases(runs: Sequence[Run]) -> Iterator[str]:
    """The cost of a request beside that of the bare proxy, a bar for each commit."""
    earlier = json.loads(EARLIER.read_text(encoding="utf-8"))
    points = [
        (point["date"], point["commit"], point["free"], point["paced"])
        for point in earlier["points"]
    ]
    for run in runs:
        costs = _costs(run)
        if costs is not None:
            points.append((run.date[:10], run.commit.rstrip("+"), *costs))
    points = points[-_POINTS:]
    most = max(max(free, paced) for _, _, free, paced in points)
    yield "## CPU of a request over releases"
    yield ""
    last = earlier["points"][-1]["commit"]
    earlier_points = f"The points up to {last} were {earlier['source']}."
    yield f"Relative to the {BARE} of the same run; lower is better. {earlier_points}".replace(
        "\n", " "
    )
    yield ""
    for date, commit, free, paced in points:
        free_bar, paced_bar = ("#" * round(_BAR * ratio / most) for ratio in (free, paced))
        bars = f"free {free:.2f} {free_bar:{_BAR}} paced {paced:.2f} {paced_bar}"
        yield f"    {date} {commit:9} {bars}"


def _costs(run: Run) -> tuple[float, float] | None:
    """The CPU of a request free and paced, each relative to the bare proxy's."""
    frontend = run.benches.get("frontend")
    if frontend is None:
        return None
    ratios = {row.name: row.ratio for row in frontend.rows}
    free, paced = (ratios.get(f"{case}: CPU, beside {BARE}") for case in ("free", "paced"))
    return None if not free or not paced else (1 / free, 1 / paced)


def _compared(known: Mapping[str, Run]) -> Iterator[str]:
    for name, row in _rows(known):
        if row.peer is not None:
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
            value = f"{number(row.value)} {row.unit}".rstrip()
            yield f"| {name}: {row.name} | {value} | {number(row.peer)} | {ratio} | {_tail(row)} |"


def _alone(known: Mapping[str, Run]) -> Iterator[str]:
    for name, row in _rows(known):
        if row.peer is None:
            value = f"{number(row.value)} {row.unit}".rstrip()
            yield f"| {name}: {row.name} | {value} | {_tail(row)} |"


def _rows(known: Mapping[str, Run]) -> Iterator[tuple[str, Row]]:
    for name, run in known.items():
        for row in run.benches[name].rows:
            yield name, row


def _tail(row: Row) -> str:
    """The cells of the spread and of the aim."""
    spread = "" if row.spread is None else f"{row.spread:.0%}"
    met = {True: ", met", False: ", **missed**", None: ""}[row.met]
    return f"{spread} | {row.aim}{met}"
