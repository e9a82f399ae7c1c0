"""Distances and pairs in documents: dry runs, view files, and what the decision memory keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from dynctl.base.errors import UsageProblem
from dynctl.documents.codec import decode, encode
from dynctl.documents.decisions import past_decision
from dynctl.documents.route_result import Ref, RouteResult
from dynctl.documents.view import SavedView, decode_view, encode_view
from dynctl.serving.records.decision_storage import brief, pack
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import ViewSource
from router_core import Router
from tests.router_core.fleet import active, apply_all, prompt, request, router
from tests.router_core.test_pairs import BEST, TABLE, WEIGHT, place, with_table

FILE = """\
levels:
  - {level: rack, latency: 1ms, bandwidth: 1.024MB/s}
  - {level: zone, latency: 10ms, bandwidth: 102.4kB/s}
beyond: {latency: 100ms, bandwidth: 10.24kB/s}
bytes_per_token: 1024
"""


def fleet(**settings: Any) -> Router:
    made = router(
        place(1, "prefill-a", "prefill", "a", "1"),
        place(2, "prefill-b", "prefill", "b", "2"),
        place(3, "decode-b", "decode", "b", "2"),
        **settings,
    )
    apply_all(made, active(2, "x", stage="prefill", prefill_tokens=32))
    return made


def routed(made: Router, *assignments: str) -> RouteResult:
    source = ViewSource(SavedView(made, 0.0), "test")
    return source.route(RouteQuery(token_ids=prompt(160), assignments=assignments))


def test_the_answer_has_the_chosen_pair_and_the_greedy_one() -> None:
    result = routed(with_table(fleet(**WEIGHT, **BEST)))
    assert result.pairs is not UNSET
    best, greedy = result.pairs.best, result.pairs.greedy
    assert (best.prefill.worker, best.decode and best.decode.worker) == ("prefill-b", "decode-b")
    assert (greedy.prefill, greedy.decode) == (Ref("prefill-a", 1), Ref("decode-b", 3))
    assert [best.cost, greedy.cost] == pytest.approx([30.05, 825.0])
    assert result.prefill is not None
    rows = {row.worker: row for row in result.prefill.candidates}
    assert rows["prefill-b"].following == pytest.approx(18.05)
    assert rows["prefill-b"].cost == best.cost
    assert result.decode is not None
    assert [row.transfer_level for row in result.decode.candidates] == ["rack"]
    assert decode(encode(result), RouteResult) == result


def test_without_both_the_answer_has_no_new_fields() -> None:
    text = encode(routed(fleet())).decode()
    for name in ("pairs", "transfer_level", "following", "kv_transfer_weight"):
        assert name not in text


def test_above_temperature_0_pairs_are_drawn_and_not_compared() -> None:
    result = routed(with_table(fleet(**WEIGHT, **BEST)), "router_temperature=0.5")
    assert result.pairs is UNSET
    assert result.prefill is not None
    assert {row.worker for row in result.prefill.candidates if row.probability > 0.1} == {
        "prefill-a",
        "prefill-b",
    }


def test_a_dry_run_reads_the_file_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text(FILE)
    made = fleet()
    words = (f"kv_transfer_qos={path}", "kv_transfer_weight=50", "pair_selection=best")
    assert routed(made, *words).pairs == routed(with_table(fleet(**WEIGHT, **BEST))).pairs
    assert made.transfer is None
    path.write_text("levels: 7\n")
    with pytest.raises(UsageProblem, match="line 1: beyond is missing"):
        routed(made, *words)


def test_a_view_file_keeps_the_table() -> None:
    made = with_table(fleet(**WEIGHT, **BEST))
    again = decode_view(encode_view(made.capture(), now=0.0)).router
    assert again.transfer == TABLE
    assert routed(again) == routed(made)


@pytest.mark.parametrize("wrong", [{"levels": [["zone", -1.0, 1.0]]}, {"beyond": [1.0]}])
def test_a_view_file_with_a_wrong_table_is_refused(wrong: dict[str, Any]) -> None:
    made = with_table(fleet(**WEIGHT))
    plain = made.capture()
    plain.parts["transfer"] |= wrong
    with pytest.raises(ValueError, match="view file"):
        decode_view(encode_view(plain, now=0.0))


def test_a_past_decision_keeps_distances_and_pairs() -> None:
    made = with_table(fleet(**WEIGHT, **BEST, router_own_domains="zone=a"))
    plan = made.plan(request(160))
    for hop in (plan.prefill, plan.decode):
        assert hop is not None
        assert pack(hop).expand() == hop
        assert pack(hop).expand().replay() == hop
        kept = brief(hop).expand()
        assert min(kept.costs) == hop.costs[hop.winner or 0]
        assert kept.replay().costs == list(kept.costs)
    past = past_decision(plan, at=0.0, whole=True)
    assert past.pairs is not UNSET
    assert past.pairs.greedy.decode is None
    assert past.pairs.greedy.cost - past.pairs.best.cost > 0
    assert past_decision(plan, at=0.0, whole=False).pairs is UNSET
