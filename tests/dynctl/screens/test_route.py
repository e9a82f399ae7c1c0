"""`route --explain`: columns that only some answers have."""

from __future__ import annotations

import msgspec

from dynctl.documents.route_result import PrefillPrediction
from dynctl.documents.view import SavedView
from dynctl.screens.canvas import Canvas
from dynctl.screens.route import ExplainScreen
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from router_core import Booked, KvEvent
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


def test_what_is_left_of_the_prefill_load_is_shown_with_its_model() -> None:
    made = router(*(worker(number) for number in range(1, 7)))
    for number in range(1, 6):
        predicted = Booked(f"r{number}", "aggregated", number, 0, 1000, predicted_s=10.0 * number)
        assert made.apply(predicted, 0.0).ok
    source = ViewSource(SavedView(made, 5.0), "x")
    result = source.route(RouteQuery(token_ids=prompt(128)))
    assert result.decode is not None
    rows = {row.worker: row for row in result.decode.candidates}
    assert (rows["w1"].active_prefill_tokens, rows["w1"].booked_prefill_tokens) == (500, 1000)
    assert (rows["w6"].active_prefill_tokens, rows["w6"].booked_prefill_tokens) == (0, 0)
    text = ExplainScreen(True)(result, Canvas(130))
    assert "500 of 1,000" in text
    words = " ".join(text.split())
    expected = "left of those booked: 500 of 1,000 on w1, 750 of 1,000 on w2, 834 of 1,000 on w3"
    assert f"{expected} and 2 more" in words
    # A frontend adds what it predicts for the request itself.
    load = PrefillPrediction("estimate for h200_sxm, tp 1", 128, 0, 0.0123)
    hop = msgspec.structs.replace(result.decode, prefill_load=load)
    text = ExplainScreen(True)(msgspec.structs.replace(result, decode=hop), Canvas(130))
    expected = "prefill of 128 tokens is predicted to take 12.3 ms (estimate for h200_sxm, tp 1)"
    assert expected in " ".join(text.split())
