"""Every golden screen by name: what is asked of which fleet, and how it is drawn.

``python -m tests.golden.screens`` writes the files; read the diff before you
commit it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dynctl.documents.doubts import Varies, doubt
from dynctl.documents.events import TailKind
from dynctl.documents.workers import WorkerDetail, WorkerList
from dynctl.planning.domain_capacity import topology_show
from dynctl.screens.canvas import Canvas
from dynctl.screens.events import EventLines
from dynctl.screens.render import draw
from dynctl.screens.route import ExplainScreen
from dynctl.simulation.demo.troubles import cluster_trouble, cluster_troubles
from dynctl.sources.dynamo.event_lines import event_line, load_line, remark
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from dynctl.wire.dynamo.events import KvMetrics, RouterEvent
from router_core import (
    BlocksRemoved,
    BlocksStored,
    Booked,
    Cleared,
    Link,
    Router,
    TransferTable,
    TransferTableSet,
)
from tests.dynctl.health.recorded_fleet import RecordedFleet
from tests.dynctl.health.test_hot import agents, hot
from tests.dynctl.health.test_parts import holding, parts_of
from tests.golden.fleets import (
    TOKENS,
    load,
    settings,
    stored,
    stranded_zones,
    two_zones,
    view,
    worker,
)

HERE = Path(__file__).parent
WIDTHS = (80, 200)


def encoders(busy: int = 3) -> ViewSource:
    """A worker on CPUs and two accelerators, with ``busy`` requests on one of these."""
    workers = [worker(f"encoder-{n}", "aggregated", n + 1) for n in range(3)]
    workers = [replace(one, device="cuda" if n else "cpu") for n, one in enumerate(workers)]
    running = [Booked(f"r{n}", "aggregated", workers[1].worker_id, 0) for n in range(busy)]
    return view(workers, running, {"router_mode": "device-aware-weighted"})


def explained(source: ViewSource, **query: Any) -> Callable[[int], str]:
    result = source.route(RouteQuery(token_ids=TOKENS, **query))
    return lambda width: ExplainScreen()(result, Canvas(width))


def doubtful() -> ViewSource:
    """A live Dynamo that shows little: settings, load and one index are unknown."""
    source = two_zones()
    modes: dict[str, list[Any]] = {
        "router_mode": ["round-robin"],
        "overlap_score_credit": [0.5, 0.0],
    }
    doubts = (
        doubt("DYR0711", varies=Varies(settings=modes), preset="dynamo-1.6"),
        doubt("DYR0712", varies=Varies(settings={"router_temperature": [0.5, 1.0]})),
        doubt("DYR0715", varies=Varies(load="shared")),
        doubt(
            "DYR0705",
            varies=Varies(overlap=True, workers=["prefill-b1"]),
            workers="prefill-b1",
            why="recovery is running",
        ),
        doubt("DYR0717", setting="shared_cache_type lmcache", effect="not built yet"),
    )
    return ViewSource(replace(source.view, doubts=doubts), source.title)


def big_fleet() -> ViewSource:
    """400 workers with names as deployments give them."""
    workers, changes = [], []
    for number in range(1, 401):
        role = "prefill" if number <= 200 else "decode"
        one = worker(
            f"my-llm-deployment-{role}-{number:05d}-{number * 7919 % 65536:04x}",
            role,
            number,
            zone=f"us-east-1{'abc'[number % 3]}",
            enforcement="required" if role == "prefill" else None,
            extra={"rack": f"r{number % 17}"},
        )
        workers.append(one)
        changes += load(one, prefill=number * 37 % 5003, decode=number * 53 % 499)
    return view(workers, changes)


def aggregated_ranks() -> ViewSource:
    first = worker("agg-0", "aggregated", 1, ranks=2)
    second = worker("agg-1", "aggregated", 2, ranks=2, kv_events=False)
    return view([first, second], [stored(first, 2, 1), *load(first, decode=3, rank=1)])


def tied() -> ViewSource:
    return view(
        [
            worker("prefill-a0", "prefill", 1, zone="zone-a", enforcement="required"),
            worker("prefill-b0", "prefill", 2, zone="zone-b", enforcement="required"),
            worker("decode-a0", "decode", 3, zone="zone-a"),
            worker("decode-b0", "decode", 4, zone="zone-b"),
        ]
    )


def linked(enforcement: str | None = None, **config: object) -> ViewSource:
    """Two zones with the weight of Dynamo's proposal, 50, and a slow link between them."""
    source = two_zones(
        enforcement,
        None,
        router_kv_transfer_weight=50.0,
        router_kv_transfer_qos="qos.yaml",
        **config,
    )
    table = TransferTable((("zone", Link(0.0005, 3.125e9)),), Link(0.03, 0.625e9), 131_072)
    applied = source.view.router.apply(TransferTableSet(table), 0.0)
    assert applied.ok, applied
    return source


def topology(source: ViewSource, domain: str | None = None) -> Callable[[int], str]:
    result = topology_show("test", source.workers(), settings(source), domain=domain)
    return lambda width: draw(result, Canvas(width))


def events(width: int) -> str:
    """A minute of `events tail`; a time of day depends on where one is, so it is left out."""
    canvas = Canvas(width)
    prefill, decode = (
        worker("prefill-a0", "prefill", 1, zone="zone-a"),
        worker("my-llm-decode-00007-1a2b", "decode", 2, zone="zone-b"),
    )
    rank = (prefill.worker_id, 0)
    hashes = tuple(range(0xABCDEF0123456789, 0xABCDEF0123456789 + 12))
    parted = {"missing": 3, "dp_rank": 0}
    lines = [
        event_line(prefill, RouterEvent(*rank, 7, BlocksStored(5, hashes, hashes)), 0, None),
        event_line(prefill, RouterEvent(*rank, 8, BlocksRemoved(hashes[:1])), 0, None),
        remark(TailKind.GAP, 0, "events 9 to 11 are missing (1 message lost)", prefill, **parted),
        event_line(prefill, RouterEvent(*rank, 8, Cleared()), 0, "again or late: after event 8"),
        remark(TailKind.RESTART, 0, "the publisher restarted: message 0 came after 41", prefill),
        remark(TailKind.DISCONNECT, 0, "lost tcp://10.0.0.7:5557; reconnecting", decode),
        load_line(decode, KvMetrics(decode.worker_id, 0, 13, None, 1_024), 0),
        load_line(None, KvMetrics(1, 0, 13), 0),
        remark(TailKind.SKIPPED, 0, "1,204 events not shown: the output is slower"),
    ]
    drawn = EventLines([prefill, decode], "zone", canvas)
    text = drawn.heading() + "".join(map(drawn.line, lines))
    return re.sub(r"\d\d:\d\d:\d\d\.000", "HH:MM:SS.000", text)


def prompt_part_rows(width: int) -> str:
    """A prompt whose tools changed, before turns that two workers have."""
    router = Router()
    holding(router, 1, [1, 2, 3, 4, 5, 6, 7], host=2)
    holding(router, 2, [1, 2, 3])
    return draw(parts_of(router, [1, 2, 90, 4, 5, 6, 7, 8]), Canvas(width))


def hot_prefixes(width: int) -> str:
    """A system prompt on all workers, and prompts of an agent behind it on some."""
    fleet = RecordedFleet(workers=4, state=True, config={"router_mode": "round-robin"})
    report = hot(fleet.records(agents()[:12] + agents("team-a")[:4]), bytes_per_token=131_072.0)
    return draw(msgspec.structs.replace(report, source="test.dynrec"), Canvas(width))


def screens() -> dict[str, Callable[[int], str]]:
    """File stem -> the screen at a width."""
    guarded = two_zones(active_decode_blocks_threshold=0.002)
    fleet = aggregated_ranks()
    workers = two_zones().workers()
    zone_a = ("dynamo.topology/zone=zone-a",)
    return {
        "required": explained(two_zones(prefill_load_scale=1.5)),
        "preferred": explained(two_zones("preferred", 0.85)),
        "temperature": explained(two_zones(None, router_temperature=0.5)),
        "tie": explained(tied()),
        "doubts": explained(doubtful()),
        "guard": explained(guarded),
        "refused-zone-lost": explained(guarded, required=zone_a),
        "refused-busy": explained(two_zones(), pin_prefill="prefill-b1"),
        "refused-no-decode": explained(view([worker("prefill-a0", "prefill", 1)])),
        "fallback": explained(
            view(
                [
                    worker("prefill-a0", "prefill", 1, zone="zone-a"),
                    worker("decode-b0", "decode", 2, zone="zone-b"),
                ],
                (),
                {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "fallback"},
            )
        ),
        "round-robin": explained(two_zones(router_mode="round-robin")),
        "least-loaded": explained(two_zones(router_mode="least-loaded")),
        "power-of-two": explained(two_zones(router_mode="power-of-two")),
        "devices": explained(encoders()),
        "devices-cpu": explained(encoders(busy=16)),
        "direct": explained(two_zones(router_mode="direct"), pin_prefill="prefill-a0"),
        "large": explained(big_fleet()),
        "ranks": explained(fleet),
        "what-if": explained(
            two_zones(), assignments=("load.prefill-a0.prefill_tokens=+17", "prefill_load_scale=2")
        ),
        "distance": explained(linked(router_own_domains="zone=zone-b")),
        "pairs": explained(linked("required", router_pair_selection="best")),
        "workers": lambda width: draw(WorkerList("test", workers), Canvas(width)),
        "workers-large": lambda width: draw(
            WorkerList("test", big_fleet().workers()[195:205]), Canvas(width)
        ),
        "workers-load-only": lambda width: draw(WorkerList("test", fleet.workers()), Canvas(width)),
        "events": events,
        "topology": topology(two_zones()),
        "topology-large": topology(big_fleet(), "rack"),
        "topology-stranded": topology(stranded_zones()),
        "troubles": lambda width: draw(cluster_troubles(), Canvas(width)),
        "trouble": lambda width: draw(cluster_trouble("crash-loop"), Canvas(width)),
        "parts": prompt_part_rows,
        "hot": hot_prefixes,
        "worker": lambda width: draw(WorkerDetail("test", workers[2]), Canvas(width)),
    }


def write() -> None:
    for name, screen in screens().items():
        for width in WIDTHS:
            (HERE / f"{name}-{width}.txt").write_text(screen(width))


if __name__ == "__main__":
    write()
