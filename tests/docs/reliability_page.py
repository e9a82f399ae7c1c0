"""docs/reliability.md: what becomes of requests while servers fail, from the recorded run."""

from __future__ import annotations

import json
from typing import Final

from tests.planes.traffic import SCORES, Score, Side

_HEAD: Final = """# When etcd and NATS fail

Three members of etcd and three NATS servers with JetStream on loopback, two mock workers of a real
Dynamo 1.6.1 with its NATS request plane, our frontend, and Dynamo's own on the same cluster. Rows
about leases and lost data: one member, two attached engines. Rows about credentials: TLS, client
certificates and credential files. Both frontends get requests at the same steady rate while the
fault is there. A request is lost when its client gets an error. Right after: seconds from the end
of the fault until our frontend has the right workers. A minus sign: only our frontend has the
fault, or it had the right workers all the time.

`make test-planes` holds that our frontend loses none. While no NATS server is there requests wait
for 8 s, then they get 503 with `retry-after`. `make test-planes ARGS=--record` writes the numbers,
and `make docs` this page.

| fault | ours: lost | slowest | right after | Dynamo's frontend: lost | slowest |
|---|---|---|---|---|---|
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
    return _HEAD + "\n".join(lines) + "\n"
