"""docs/reliability.md: what becomes of requests while servers fail, from the recorded runs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.planes.traffic import SCORES, Score, Side
from tests.soak.plot import plot
from tests.soak.result import RESULT, series
from tests.soak.verdict import GROWTH, RIGHT_S

_HEAD: Final = """# When etcd and NATS fail

Three members of etcd and three NATS servers with JetStream, passwords and nkeys on loopback, two
mock workers of a real Dynamo 1.6.1 with its NATS request plane, our frontend, and Dynamo's own on
the same cluster. Rows about leases and lost data: one member, two attached engines. Rows about TLS
and credentials: three of each, with client certificates and credential files. Rows about hosts:
three network namespaces. Both frontends get requests at the same steady rate while the fault is
there. A request is lost when its client gets an error. Right after: seconds from the end of the
fault until our frontend has the right workers. A minus sign: only our frontend has the fault, or it
had the right workers all the time.

Of answers under way, the slowest is the longest wait for a token. They go on with another worker
(`--migration-limit 3`), and one that has no token for 30 s is lost. Over HTTP an engine's stream
that has begun cannot go on with another engine: it waits 20 s for its host. Of events, the slowest
is the time from the stream to the index.

Messages of replica sync are not stored. Routers that share load over `--router-replica-peer` or
`--router-replica-nats` send all bookings again after a loss. Dynamo's routers do not: here, a
request whose end was lost counts until its worker reports no used blocks, no use in the 30 s after
the loss, or until it expires after 300 s.

`make test-planes` holds that our frontend loses none. While no NATS server is there requests wait
for 8 s, then they get 503 with `retry-after`. `make test-planes ARGS=--record` writes the numbers,
and `make docs` this page.

| fault | ours: lost | slowest | right after | Dynamo's frontend: lost | slowest |
|---|---|---|---|---|---|
"""


_LOAD: Final = """
## Hours of load

Two frontends that share their load, a prefill and a decode engine in each of two zones, and four
engines for whole requests. Clients send chats at a steady rate. Once a minute something breaks,
drawn with a seed. Ten times in a run the clients pause: within {right:g} s no load may be left, and
both indexes must equal what the engines cache.

The run fails if a client gets neither an answer nor an error, if descriptors, tasks or threads
grow, or if after ten minutes memory grows by more than {growth:g} MB an hour. `make soak` takes an
hour and writes `build/soak.json`; copied to `tests/soak/result.json` it is the table and the
picture here (`make docs`).

| {minutes:g} minutes, {cores} cores | |
|---|---|
"""


def _cells(side: Side | None) -> str:
    if side is None:
        return "- | -"
    return f"{side['lost']:,} of {side['sent']:,} | {side['slowest_s']:g} s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:g} s"


def reliability_page() -> str:
    rows: list[Score] = json.loads(SCORES.read_text())
    lines = [
        f"| {row['fault']} | {_cells(row['ours'])} | {_seconds(row.get('right_s'))} | "
        f"{_cells(row['dynamo'])} |"
        for row in rows
    ]
    page = _HEAD + "\n".join(lines) + "\n"
    return page + load_part(_soak_result()) if RESULT.exists() else page


def soak_plot() -> str:
    """docs/soak.svg: what the soak run measured over its time."""
    result = _soak_result()
    return plot(series(result), result["minutes"])


def _soak_result() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(RESULT.read_text())
    return result


def load_part(result: Mapping[str, Any]) -> str:
    """The part of the page about a soak run."""
    head = _LOAD.format(
        right=RIGHT_S, growth=GROWTH / 1e6, minutes=result["minutes"], cores=result["cores"]
    )
    rows = [f"| {name} | {text} |" for name, text in _rows(result)]
    faults = _counted(Counter(fault["kind"] for fault in result["faults"]))
    text = textwrap.fill(f"Faults: {faults}.", 100)
    picture = "![Memory, tasks and requests over the run](soak.svg)"
    return head + "\n".join(rows) + f"\n\n{text}\n\n{picture}\n"


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rate = result["rate"]
    sent = sum(result["outcomes"].values())
    yield "requests", f"{sent:,}, {rate['reached']:g} a second ({rate['aimed']:g} aimed)"
    yield "of them", _counted(result["kinds"])
    yield "became", _counted({"lost": 0, **result["outcomes"]})
    yield "slowest", f"{result['slowest_s']:g} s"
    for name in ("loads", "index"):
        times = [check[f"{name}_s"] for check in result["quiet"]]
        known = [seconds for seconds in times if seconds is not None]
        wrong = len(times) - len(known)
        text = f"{sorted(known)[len(known) // 2]:.1f} s, at most {max(known):.1f} s"
        yield f"{name} right after", text + (f"; {wrong} times not" if wrong else "")
    growth = {name: value / 1e6 for name, value in result["memory_growth"].items()}
    text = "{bytes_an_hour:+.1f} MB an hour (standard error {error:.1f})"
    yield "memory of the frontend that is never restarted", text.format(**growth)
    problems = "; ".join(result["problems"])
    yield "verdict", f"**fails**: {problems}" if problems else "passes"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
