"""A fleet that does not change, and a source that shows it and records the requests to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynctl.base.errors import UsageProblem
from dynctl.documents.decisions import RUNNING, ClientResponse
from dynctl.documents.fleet_load import Transfer
from dynctl.documents.route_result import PreferenceRow, Ref, RouteResult
from dynctl.documents.snapshot import DecisionLine, Header, Meter, Part, Snapshot
from dynctl.documents.workers import WorkerRow
from dynctl.sources.alerts import condition_alert
from dynctl.sources.query import RouteQuery
from dynctl.sources.source import LiveSource
from dynctl.sources.view import ViewSource
from tests.golden.fleets import TOKENS, settings, two_zones

#: 21 November 2026, 12:04:31 UTC.
NOW = 1_795_262_671.0
THRESHOLD = {
    "active_decode_blocks_threshold": None,
    "active_prefill_tokens_threshold": 10_000,
    "active_prefill_tokens_threshold_frac": None,
}


def ref(view: ViewSource, name: str) -> Ref:
    """A rank of a worker, which may have left since."""
    row = next((row for row in view.workers() if row.name == name), None)
    return Ref(name, 0 if row is None else row.worker_id, 0)


def decisions(view: ViewSource) -> tuple[DecisionLine, ...]:
    """A crossing that was cut, a refusal, and three plain ones; newest first."""
    zones = {"prefill-a0": "zone-a", "decode-a0": "zone-a"}
    plan: list[tuple[str, float, str, str | None, float | None]] = [
        ("91f0a", 0.4, "prefill-a0", "decode-a0", 4.0),
        ("91f09", 0.9, "prefill-b0", "decode-b0", 0.0),
        ("91f08", 1.3, "prefill-a0", None, None),
        ("91f07", 2.0, "prefill-a0", "decode-b0", 1.25),
        ("91f06", 65.0, "prefill-b1", "decode-b1", None),
    ]
    served = ClientResponse("complete", 200, ttft_s=0.12, duration_s=0.31, output_tokens=40)
    problem = "http://decode-b0:8000 closed the connection during its response"
    responses = {
        "91f0a": RUNNING,
        "91f08": ClientResponse("refused", 503, duration_s=0.002),
        "91f07": ClientResponse("cut", 200, problem, 0.12, 1.4, output_events=17),
    }
    lines = []
    for number, ago, prefill, decode, margin in plan:
        first, last = zones.get(prefill, "zone-b"), zones.get(decode or "", "zone-b")
        lines.append(
            DecisionLine(
                id=f"4b7d0000{number}",
                at=NOW - ago,
                source="http://127.0.0.1:8000",
                model="tiny",
                outcome="selected" if decode else "no_eligible_worker",
                stage="decode",
                prefill=ref(view, prefill) if decode else None,
                decode=ref(view, decode) if decode else None,
                prefill_domains={"zone": first},
                domains={"zone": last} if decode else {},
                blocks=27,
                cached_blocks=12 if decode else 0,
                margin=margin,
                cost=3.875,
                relaxed=number == "91f07",
                message=None
                if decode
                else "0/6 workers eligible: 3 role, 3 missing taint dynamo.topology/zone=zone-a",
                response=responses.get(number, served),
            )
        )
    return tuple(lines)


def meter(now: float | None = 1.3) -> Meter:
    taint = "dynamo.topology/zone=zone-a"
    preference = PreferenceRow(taint, 0.85, 1.9958488924, now, 0.27, "local wins")
    return Meter("zone", "zone-a", NOW - 3.0, "4b7d000091f0a", preference)


def snapshot(view: ViewSource | None = None, **changes: Any) -> Snapshot:
    """Six workers in two zones, one of them busy, as a dynctl frontend reports them."""
    view = view or two_zones()
    here = Part("http://127.0.0.1:8000", NOW)
    parts = ("workers", "load", "index", "waiting", "decisions", "transfers", "thresholds")
    origins = dict.fromkeys(parts, here)
    origins["queue"] = Part("http://127.0.0.1:8000", unknown="this router has no queue")
    rows = [_with_waiting(row, 3 if row.name == "prefill-b1" else 0) for row in view.workers()]
    made = Snapshot(
        at=NOW,
        source="http://127.0.0.1:8000",
        header=Header(("tiny",), "kv", "dynamo-1.6", "0.1.0", (1, 1), 7, None, 1204),
        workers=tuple(rows),
        decisions=decisions(view),
        meters=(),
        alerts=(condition_alert("EVENTS_LOST", "prefill-b0", "3 batches were lost", NOW - 75),),
        transfers=(Transfer("zone", "zone-a", 40, 8), Transfer("zone", "zone-b", 12, 0)),
        thresholds={"tiny": dict(THRESHOLD)},
        settings=settings(view),
        parts=origins,
        load_every_s=1.0,
    )
    return msgspec.structs.replace(made, **changes)


def _with_waiting(row: WorkerRow, waiting: int) -> WorkerRow:
    ranks = [
        msgspec.structs.replace(
            rank, reported=msgspec.structs.replace(rank.reported, waiting_requests=waiting)
        )
        for rank in row.ranks
    ]
    return msgspec.structs.replace(row, ranks=ranks)


class StillSource(LiveSource):
    """Shows the snapshot ``shown``. ``requests``: what the keys requested; ``readings``: how often
    the snapshot was read."""

    def __init__(self, shown: Snapshot | None = None, view: ViewSource | None = None) -> None:
        self.view = view or two_zones()
        self.shown = shown or snapshot(self.view)
        super().__init__(self.view, self.shown.source)
        self.requests: list[tuple[Any, ...]] = []
        self.readings = 0

    async def __aexit__(self, *_: object) -> None:
        self.requests.append(("closed",))

    async def snapshot(self) -> Snapshot:
        self.readings += 1
        return self.shown

    async def settle(self) -> None:
        self.requests.append(("settle",))

    async def decision(self, line: DecisionLine) -> RouteResult:
        self.requests.append(("decision", line.id))
        if line.refused:
            zone = ("dynamo.topology/zone=zone-a",)
            busy = two_zones(active_decode_blocks_threshold=0.002)
            return busy.route(RouteQuery(token_ids=TOKENS, required=zone))
        return self.view.route(RouteQuery(token_ids=TOKENS))

    async def judged(self, model: str, values: Mapping[str, float | int | None]) -> list[WorkerRow]:
        return self.view.judged(model, values)

    async def set_thresholds(
        self, model: str, values: Mapping[str, float | int | None]
    ) -> dict[str, float | int | None]:
        self.requests.append(("set", model, dict(values)))
        present = {**self.shown.thresholds[model], **values}
        self.shown = msgspec.structs.replace(self.shown, thresholds={model: present})
        return present

    async def save(self) -> bytes:
        return self.view.save()

    async def read_index(self, worker: WorkerRow | None) -> str:
        self.requests.append(("index", worker.name if worker else None))
        if self.shown.unknown("index") is None:
            raise UsageProblem("workers report their caches by themselves")
        return "reading"
