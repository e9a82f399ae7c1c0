"""`route --explain`: columns that only some answers have."""

from __future__ import annotations

from dynctl.documents.view import SavedView
from dynctl.screens.canvas import Canvas
from dynctl.screens.route import ExplainScreen
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from router_core import KvEvent
from router_core.lower_tiers import DISK, HOST
from tests.router_core.fleet import prompt, router, worker
from tests.router_core.test_lower_tiers import store


def test_blocks_in_lower_tiers_have_columns_where_there_are_any() -> None:
    made = router(worker(1), worker(2))
    made.apply(KvEvent(2, 0, store(0, 2, "device")), 0.0)

    def lines() -> list[list[str]]:
        result = ViewSource(SavedView(made, 0.0), "x").route(RouteQuery(token_ids=prompt(128)))
        text = ExplainScreen(True)(result, Canvas(100))
        return [line.split() for line in text.splitlines()]

    assert not any("host" in line for line in lines())
    for event in (store(0, 1, "device"), store(1, 2, HOST), store(2, 4, DISK)):
        made.apply(KvEvent(1, 0, event), 0.0)
    drawn = lines()
    head = next(line for line in drawn if "worker" in line and "cost" in line)
    assert head[:6] == ["worker", "cached", "host", "disk", "prefill", "decode"]
    winner = next(line for line in drawn if line[:2] == [">", "w1"])
    assert winner[2:7] == ["1", "1", "2", "5.750", "8.000"]
