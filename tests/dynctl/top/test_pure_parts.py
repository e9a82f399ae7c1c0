"""What the dashboard works out of a snapshot: domains, history, alerts, filters, layout, marks."""

from __future__ import annotations

import re
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dynctl.documents.fleet_load import Traffic, Transfer, quantile
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.snapshot import Alert, DecisionLine, Header, Part, Snapshot, stale_reason
from dynctl.documents.verify import CellState
from dynctl.documents.workers import RankRow, ReportedLoad, WorkerRow, worker_rows
from dynctl.planning.domain_capacity import topology_show
from dynctl.screens.cells import beginning, cells, ending
from dynctl.screens.columns import Column, fit
from dynctl.screens.numbers import middle
from dynctl.sources.alerts import AlertBoard, capacity_alerts
from dynctl.sources.domains import DomainBoard
from dynctl.sources.dynamo.snapshot import RowCache
from dynctl.sources.view import StillView
from dynctl.top.columns import alert_table, kv_share
from dynctl.top.custody import registered_chain
from dynctl.top.filter import RowFilter, worker_words
from dynctl.top.header import (
    State,
    currency_mark,
    decisions_listed,
    header,
    meter_line,
    numbers,
    rates_line,
)
from dynctl.top.history import BUCKET_S, BUCKETS, History
from dynctl.top.layout import Wish, heights
from dynctl.top.marks import ASCII, BAD, BLOCKS, GOOD, WARN, role_style, zone_style
from dynctl.top.panels.alerts import AlertContent
from dynctl.top.panels.content import Scene
from router_core import LoadReported, Router, WorkerUpserted
from tests.dynctl.top.fleet import NOW, meter, snapshot
from tests.golden.fleets import settings, stranded_zones, two_zones, worker


def with_rank(row: WorkerRow, **changes) -> WorkerRow:
    return msgspec.structs.replace(
        row, ranks=[msgspec.structs.replace(rank, **changes) for rank in row.ranks]
    )


def one_worker(**rank) -> WorkerRow:
    return WorkerRow("w", 1, "m", "decode", ranks=[RankRow(**rank)])


# -- stale -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "every", "stale"),
    [
        (4.9, 1.0, False),
        (5.1, 1.0, True),
        (9.0, 2.0, False),
        (10.1, 2.0, True),
        (0.4, 0.01, False),
        (600.0, None, False),
        (None, 1.0, False),
    ],
)
def test_a_worker_with_an_overdue_load_report_is_stale(age, every, stale):
    assert (stale_reason(one_worker(load_age_s=age), every) is not None) is stale


def test_workers_with_lost_events_or_without_a_response_are_stale():
    assert stale_reason(one_worker(index="gapped", gaps=3), None) is not None
    gone = msgspec.structs.replace(one_worker(), status="unavailable")
    assert stale_reason(gone, None) == "no response"


# -- domains -----------------------------------------------------------------------------------


def view_of(shown: Snapshot, **arguments):
    return DomainBoard().view(shown, **arguments)


def test_waiting_hand_offs_and_stale_are_counted_by_domain():
    shown = snapshot()
    old = [
        with_rank(row, load_age_s=60.0) if row.name in ("decode-b0", "prefill-b1") else row
        for row in shown.workers
    ]
    a, b = view_of(msgspec.structs.replace(shown, workers=tuple(old))).rows
    assert (a.value, a.waiting, a.waiting_ranks, a.stale) == ("zone-a", 0, 2, {})
    assert (b.value, b.waiting, b.stale) == ("zone-b", 3, {"decode": 1, "prefill": 1})
    assert (a.local, a.crossing, round(a.crossing_share or 0, 3)) == (40, 8, 0.167)


def test_an_unavailable_worker_is_not_stale_as_well():
    shown = snapshot()
    gone = [msgspec.structs.replace(row, status="unavailable") for row in shown.workers]
    rows = view_of(msgspec.structs.replace(shown, workers=tuple(gone))).rows
    assert [row.stale for row in rows] == [{}, {}]


def test_bars_and_counts_of_a_domain_are_those_of_its_available_workers():
    shown = snapshot()
    full = ReportedLoad(kv_used_blocks=4096, waiting_requests=5)
    rows = tuple(
        msgspec.structs.replace(with_rank(row, reported=full), status="unavailable")
        if row.name in ("decode-a0", "decode-b1")
        else row
        for row in shown.workers
    )
    dead = msgspec.structs.replace(shown, workers=rows)
    a, b = view_of(dead).rows
    assert (a.capacity.decode.workers, a.capacity.decode.unavailable) == (1, 1)
    assert kv_share(a) is None
    assert kv_share(b) is not None
    assert kv_share(b) < 0.1  # type: ignore[operator]
    assert (b.capacity.decode.ranks, b.capacity.decode.kv_total_blocks) == (1, 4096)
    assert b.waiting == 3
    history = History()
    history.add(dead)
    assert history.kv_share(("tiny", "zone", "zone-a"), 1, 1, NOW) == [None]


def test_values_that_are_not_reported_are_unknown_and_not_zero():
    shown = snapshot()
    silent = tuple(with_rank(row, reported=ReportedLoad()) for row in shown.workers)
    parts = {**shown.parts, "transfers": Part("", unknown="not counted")}
    row = view_of(msgspec.structs.replace(shown, workers=silent, parts=parts)).rows[0]
    assert (row.waiting, row.local, row.crossing, row.crossing_share) == (None, None, None, None)


def test_capacity_equals_that_of_topology_show():
    source = stranded_zones()
    shown = snapshot(source)
    board = DomainBoard()
    expected = topology_show(shown.source, shown.workers, settings(source))
    assert board.view(shown).shown == expected
    assert board.view(shown, "nowhere").domain == "zone"


def test_capacity_is_computed_again_when_a_worker_becomes_busy_but_not_for_every_number():
    time = [0.0]

    def clock() -> float:
        time[0] += 0.01  # so that work seems to take a while
        return time[0]

    board = DomainBoard(clock)
    shown = snapshot()
    first = board.view(shown).shown
    numbers = tuple(with_rank(row, active_prefill_tokens=77) for row in shown.workers)
    assert board.view(msgspec.structs.replace(shown, workers=numbers)).shown is first
    busy = tuple(msgspec.structs.replace(row, busy=True) for row in shown.workers)
    again = board.view(msgspec.structs.replace(shown, workers=busy)).shown
    assert again is not first
    assert again.rows[0].decode.busy == 1
    time[0] += 10
    later = board.view(msgspec.structs.replace(shown, workers=numbers)).shown
    assert later.rows[1].prefill.active_prefill_tokens == 2 * 77


def test_rows_of_a_router_keep_the_card_and_renew_the_load():
    router, maker = Router(), RowCache()
    router.apply(WorkerUpserted(worker("decode-a0", "decode", 1, zone="zone-a")), 0.0)
    router.apply(WorkerUpserted(worker("decode-b0", "decode", 2, zone="zone-b")), 0.0)
    first = maker.rows(router, 1.0)
    router.apply(LoadReported(first[0].worker_id, 0, kv_used_blocks=9), 1.0)
    second = maker.rows(router, 1.0, {first[1].worker_id: {0: 4}})
    assert second[0].runtime_config is first[0].runtime_config
    assert [row.ranks[0].reported.kv_used_blocks for row in second] == [9, None]
    assert [row.ranks[0].reported.waiting_requests for row in second] == [None, 4]
    plain = [
        with_rank(
            row, reported=msgspec.structs.replace(row.ranks[0].reported, waiting_requests=None)
        )
        for row in second
    ]
    assert plain == worker_rows(router, 1.0)
    router.apply(WorkerUpserted(worker("decode-a0", "decode", 1, zone="zone-c")), 0.0)
    assert maker.rows(router, 1.0)[0].domains == {"zone": "zone-c"}


# -- history -----------------------------------------------------------------------------------


def at(shown: Snapshot, seconds: float, used: int | None = None, **changes) -> Snapshot:
    rows = shown.workers
    if used is not None:
        rows = tuple(with_rank(row, reported=ReportedLoad(kv_used_blocks=used)) for row in rows)
    return msgspec.structs.replace(shown, at=NOW + seconds, workers=rows, **changes)


def test_history_is_by_bucket_and_bounded():
    shown, history = snapshot(), History()
    for second in range(int(BUCKET_S * BUCKETS) + 100):
        history.add(at(shown, second, used=second))
    end = NOW + second
    key = ("tiny", "zone", "zone-a")
    shares = history.kv_share(key, BUCKETS + 5, 1, end)
    assert shares[:5] == [None] * 5
    assert shares[-1] == second / 4096
    assert [value for value in shares if value is not None] == sorted(shares[5:])  # type: ignore[type-var]
    assert len(history.kv_share(key, 8, 3, end)) == 8
    assert history.kv_share(("tiny", "zone", "gone"), 3, 1, end) == [None] * 3
    assert history.prefill_tokens(("tiny", "zone", "zone-b"), 1, 1, end) == [10_240]
    assert history.watched(end) == BUCKET_S * BUCKETS


def test_a_time_without_reports_stays_empty():
    shown, history = snapshot(), History()
    history.add(at(shown, 0, used=1))
    history.add(at(shown, 10, used=2, problem="away"))
    history.add(at(shown, 20, used=3))
    shares = history.kv_share(("tiny", "zone", "zone-a"), 5, 1, NOW + 20)
    assert [value is not None for value in shares] == [True, False, False, False, True]


def test_recent_hand_offs_are_counted_from_the_first_snapshot_and_again_after_a_restart():
    shown, history = snapshot(), History()
    for second, crossing in ((0, 8), (30, 10), (60, 11)):
        history.add(at(shown, second, transfers=(Transfer("zone", "zone-a", 40, crossing),)))
    now = at(shown, 60, transfers=(Transfer("zone", "zone-a", 40, 11),))
    assert history.recent_transfers(now) == {("zone", "zone-a"): (0, 3)}
    restarted = at(shown, 61, transfers=(Transfer("zone", "zone-a", 2, 1),))
    assert history.recent_transfers(restarted) == {("zone", "zone-a"): (2, 1)}


# -- alerts ------------------------------------------------------------------------------------


def test_stranded_domains_and_single_decode_workers_have_codes():
    source = stranded_zones()
    shown = topology_show("x", source.workers(), settings(source))
    found = {(one.code, one.subject): one for one in capacity_alerts(shown)}
    assert set(found) == {
        ("DYT0902", "zone=zone-a"),
        ("DYT0901", "zone=zone-b"),
        ("DYT0901", "zone=zone-c"),
        ("DYT0901", "zone=zone-d"),
    }
    message = found["DYT0901", "zone=zone-c"].message
    # Narrow lists cut the end: the reason is first, and the names are last.
    assert message.startswith("no decode worker of tiny has it")
    assert message.endswith("(prefill-c0, prefill-c1)")


def test_an_alert_names_three_workers_and_counts_the_others():
    shown = topology_show("x", stranded_zones().workers(), settings(stranded_zones()))
    names = [f"p{number}" for number in range(1003)]
    rows = [
        msgspec.structs.replace(
            row, stranded=[msgspec.structs.replace(one, workers=names) for one in row.stranded]
        )
        for row in shown.rows
    ]
    found = [
        one.message
        for one in capacity_alerts(msgspec.structs.replace(shown, rows=rows))
        if one.code == "DYT0901"
    ]
    assert found
    assert all(message.endswith("(p0, p1, p2 and 1,000 more)") for message in found)


def test_the_panel_of_alerts_leaves_its_lines_to_others_while_there_are_none():
    content, shown = AlertContent(), snapshot(two_zones())
    view = DomainBoard().view(shown)
    content.picture = content.take(Scene(shown, view, (), NOW))
    assert content.wish(content.picture.rows).natural == 1
    content.picture = content.take(Scene(shown, view, (Alert("C", "warn", "s", "m"),), NOW))
    assert content.wish(content.picture.rows).natural > 1


def test_alerts_are_sorted_by_level_and_keep_their_start():
    source = stranded_zones()
    shown, board = snapshot(source), AlertBoard()
    capacity = topology_show("x", source.workers(), settings(source))
    healthy = topology_show("x", two_zones().workers(), settings(two_zones()))
    first = board.alerts(shown, healthy)
    assert {one.since for one in first if one.code == "DYT0902"} == {None}
    second = board.alerts(msgspec.structs.replace(shown, at=NOW + 5), capacity)
    assert [one.level for one in second] == ["fail"] * 3 + ["warn"] * 2
    assert {one.since for one in second if one.level == "fail"} == {NOW + 5}
    third = board.alerts(msgspec.structs.replace(shown, at=NOW + 9), capacity)
    assert third == second


def test_an_alert_shows_its_subject_once_and_keeps_the_beginning_of_its_message():
    url = "http://127.0.0.1:8080"
    lost = Alert("ROUTER_LOST", "warn", url, f"{url} refused the connection; requests go on")
    fitted = fit(alert_table(NOW), [lost], 70)
    assert fitted.line(lost).count("127") == 1
    assert re.search(r"  refused the .*\.\.$", fitted.line(lost))


# -- filters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", "all"),
        ("zone-a", "prefill-a0 decode-a0"),
        ("ZONE=zone-a decode", "decode-a0"),
        ("decode !b", "decode-a0"),
        ("! zone-a", "prefill-b0 prefill-b1 decode-b0 decode-b1"),
        ("!zone-a,prefill", "prefill-b0 prefill-b1"),
        ("busy", "prefill-b1"),
        ("!", "all"),
        ("10,240 active", "prefill-b1"),
        ("9de9204", "decode-a0"),
        ("nothing", ""),
    ],
)
def test_filter(text: str, kept: str):
    rows = two_zones().workers()
    found = RowFilter.parse(text).rows(rows, worker_words)
    expected = [row.name for row in rows] if kept == "all" else kept.split()
    assert [row.name for row in found] == expected


# -- layout ------------------------------------------------------------------------------------

WISHES = [Wish(6, 8, 0), Wish(1000, 12, 3), Wish(500, 12, 2), Wish(3, 6, 1)]


@pytest.mark.parametrize("total", range(3, 70))
@pytest.mark.parametrize("focused", range(4))
@pytest.mark.parametrize("zoomed", [True, False])
def test_heights_fill_the_screen(total: int, focused: int, zoomed: bool):
    given = heights(total, WISHES, focused, zoomed=zoomed)
    assert min(given) >= 1
    assert sum(given) == max(total, 4)
    if total >= 16 and WISHES[focused].natural > 20:
        assert given[focused] == max(given)
    if zoomed and total > 4:
        assert given[focused] == total - 3


def test_a_panel_too_low_for_rows_leaves_its_lines_to_others():
    given = heights(20, WISHES, 2)
    assert all(height == 1 or height >= 3 for height in given)


def test_each_panel_shows_two_rows_on_80x24():
    many = [Wish(1000, 8, 0), Wish(1000, 12, 3), Wish(500, 12, 2), Wish(100, 6, 1)]
    for focused in range(4):
        assert min(heights(20, many, focused)) == 4


# -- marks -------------------------------------------------------------------------------------


def test_a_bar_is_full_only_at_1_and_empty_only_at_0():
    assert BLOCKS.bar(0.0, 10) == "░" * 10
    assert BLOCKS.bar(0.001, 10) == "█" + "░" * 9
    assert BLOCKS.bar(0.999, 10) == "█" * 9 + "░"
    assert BLOCKS.bar(1.0, 10) == BLOCKS.bar(7.5, 10) == "█" * 10
    assert ASCII.bar(0.5, 4) == "##--"
    assert BLOCKS.bar(None, 3) == "   "


def test_a_sparkline_has_one_mark_per_value():
    assert BLOCKS.sparkline([0, 0.5, 1, None], 1.0) == "▁▅█ "
    assert BLOCKS.sparkline([0, 0]) == "▁▁"
    assert BLOCKS.sparkline([3, 6]) == "▅█"
    assert BLOCKS.sparkline([]) == ""


def test_the_meter_shows_ratio_and_crossover():
    line = meter_line(meter(1.3), ASCII, NOW)
    assert line == (
        "prefers zone-a 0.85  #######--- local 1.30x the best other, spills at 2.00x (3.0 s ago)"
    )
    assert "SPILLS 2.10x" in meter_line(meter(2.1), ASCII, NOW)
    assert meter_line(meter(None), ASCII, NOW) == "prefers zone-a 0.85: local wins (3.0 s ago)"
    assert len(meter_line(meter(1.3), ASCII, NOW, 50)) <= 50


# -- custody -----------------------------------------------------------------------------------


def test_the_chain_of_a_card_begins_at_the_card():
    row = next(row for row in two_zones().workers() if row.name == "prefill-b0")
    chain = registered_chain(row)
    assert (chain.domain, chain.first_break) == ("zone", None)
    assert [cell.state for cell in chain.cells.values()] == [CellState.UNKNOWN] * 3 + [
        CellState.SAME
    ] * 3
    assert {cell.value for cell in (chain.card, chain.taint, chain.router)} == {"zone-b"}


def test_a_policy_without_its_domain_breaks_at_the_card():
    config = {"kv_transfer_domain": "zone", "taints": []}
    row = WorkerRow("w", 1, "m", "prefill", runtime_config=config)
    assert registered_chain(row).first_break == "card"
    other = {"kv_transfer_domain": "zone", "taints": ["dynamo.topology/zone=b"]}
    row = msgspec.structs.replace(row, runtime_config=other, domains={"zone": "a"})
    chain = registered_chain(row)
    assert (chain.first_break, chain.taint.value) == ("taint", "b")


def test_a_worker_without_topology_has_no_chain():
    row = WorkerRow("w", 1, "m", "aggregated", runtime_config={})
    assert registered_chain(row).domain is None


def test_header_and_list_count_the_same_decisions() -> None:
    line = DecisionLine(id="a", at=1.0, source="f", outcome="selected")

    def shown(recorded: int | None, lines: int, missed: int = 0) -> tuple[str, str]:
        found = Snapshot(
            1.0, "f", Header(recorded=recorded), decisions=(line,) * lines, missed=missed
        )
        return numbers(found)[-1], decisions_listed(found)

    assert shown(577, 500) == ("577 decisions", "last 500 of 577 since start")
    assert shown(1, 1) == ("1 decision", "1")
    # The list was read later than the count.
    assert shown(4, 5) == ("5 decisions", "5")
    # A source that does not count them.
    assert shown(None, 5)[1] == "5"
    assert shown(None, 5, 77)[1] == "last 5 of 82 since start"
    assert shown(9, 0)[1] == "0 of 9 since start"


def test_the_header_counts_other_routers_and_names_what_is_out_of_date():
    shown = snapshot()
    assert not any("other router" in part for part in numbers(shown))
    routers = [ReplicaRow("a", state="in step"), ReplicaRow("b", state="silent")]
    for known, expected in ((routers, "2 other routers, 1 silent"), ([], "0 other routers")):
        header = msgspec.structs.replace(shown.header, routers=known)
        assert expected in numbers(msgspec.structs.replace(shown, header=header))


# -- rates of requests --------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.001, 60), min_size=1, max_size=8, unique=True).map(sorted),
    st.data(),
    st.floats(0.01, 1.0),
)
def test_a_quantile_is_in_the_bucket_that_has_its_observation(edges, data, share):
    counts = data.draw(
        st.lists(st.integers(0, 50), min_size=len(edges) + 1, max_size=len(edges) + 1)
    )
    found = quantile(edges, counts, share)
    if not sum(counts):
        assert found is None
        return
    wanted = share * sum(counts)
    sums = list(accumulate(counts))
    place = next(i for i, count in enumerate(counts) if count and sums[i] >= wanted)
    low = edges[place - 1] if place else 0.0
    high = edges[place] if place < len(edges) else edges[-1]
    assert found is not None
    assert min(low, high) <= found <= high + 1e-9


def counted(second: float, requests: int) -> Snapshot:
    traffic = Traffic(requests, 0, requests // 10, (1.0,), (requests, 0), 100 * requests, 0)
    shown = snapshot(workers=())
    header = msgspec.structs.replace(shown.header, traffic=traffic)
    return msgspec.structs.replace(shown, header=header, at=NOW + second)


def test_rates_cover_the_last_seconds_and_a_restart_starts_again_without_negative_numbers():
    history = History()
    history.add(counted(0, 1000))
    assert history.rates(NOW) is None
    for second in range(1, 40):
        history.add(counted(second, 1000 + 5 * second))
    now = history.rates(NOW + 39)
    assert now is not None
    assert now.per_second == pytest.approx(5.0)
    assert now.refused == pytest.approx(0.1, abs=0.03)
    assert (now.hits, now.errors) == (0.0, 0.0)
    trend = history.trend(6, 10.0, NOW + 39)
    assert [None if one is None else round(one.per_second) for one in trend][-3:] == [5, 5, 5]
    assert trend[0] is None
    history.add(counted(40, 3))
    assert history.rates(NOW + 40) is None
    history.add(counted(41, 5))
    after = history.rates(NOW + 41)
    assert after is not None
    assert after.per_second == pytest.approx(2.0)


def rates_text(refused: int, errors: int, width: int) -> str:
    """The line of rates of a fleet that had so many refusals and errors in 1,000 requests."""
    history = History()
    for second, done in ((0, 0), (60, 1000)):
        shown = counted(second, 0)
        traffic = Traffic(
            done, done and errors, done and refused, (1.0,), (done, 0), 100 * done, 80 * done
        )
        head = msgspec.structs.replace(shown.header, traffic=traffic)
        history.add(msgspec.structs.replace(shown, header=head))
    return "".join(text for text, _ in rates_line(history, NOW + 60, BLOCKS, width))


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize(("refused", "errors"), [(0, 0), (100, 0), (0, 3), (100, 3)])
def test_refusals_and_errors_that_there_are_fit_on_every_screen(refused, errors, width):
    line = rates_text(refused, errors, width)
    assert len(line.rstrip()) <= width
    for word in ("req/s", "TTFT p50", "hits 80 %"):
        assert word in line
    assert ("refused 10 %" in line) or not refused
    assert ("errors 0.3 %" in line) or not errors
    if width == 200:
        assert "refused" in line
        assert "errors" in line
    if not errors or width > 80:
        # Each has its sparkline: marks follow the last text too.
        assert line.rstrip()[-1] in BLOCKS.steps


# -- what is not the present, and wide characters ----------------------------------------------


def test_a_source_of_the_past_is_not_called_live():
    shown = snapshot()
    for past in ("saved view", "recording, 10x"):
        word, _ = currency_mark(shown, State(1.0, past=past), NOW + 86_400)
        assert word == f"○ {past}, not live"
    assert "live, every 1 s" in currency_mark(shown, State(1.0), NOW)[0]
    assert StillView(two_zones()).past == "saved view"


def test_columns_stay_aligned_beside_characters_of_two_cells():
    names = ["模型-千问", "tiny", "e\u0301te\u0301"]
    columns = [
        Column("name", "NAME", str, name=True),
        Column("size", "SIZE", lambda name: 1, text=lambda name: "1", right=True),
    ]
    lines = [fit(columns, names, None).line(name) for name in names]
    assert len({cell_len(line) for line in lines}) == 1
    narrow = fit(columns, ["大" * 30], 20)
    assert cell_len(narrow.line("大" * 30)) <= 20


@given(st.text("a大é\u0301ー", max_size=30), st.integers(0, 20))
def test_shortened_text_has_the_cells_that_it_may_have(text: str, width: int):
    assert cells(text) == cell_len(text)
    for shorter in (middle(text, width), beginning(text, width), ending(text, width)):
        assert cells(shorter) <= width
    if cells(text) <= width:
        assert middle(text, width) == beginning(text, width) == ending(text, width) == text


def test_the_clock_is_whole_beside_a_model_with_wide_characters():
    shown = snapshot()
    head = msgspec.structs.replace(shown.header, models=("模型-千问",))
    shown = msgspec.structs.replace(shown, header=head)
    first, *_ = header(shown, None, "x", State(1.0), 80, NOW)
    text = "".join(piece for piece, _ in first)
    assert re.search(r" \d\d:\d\d:\d\d$", text)
    assert cell_len(text) <= 80


def test_readings_of_requests_are_bounded():
    history = History()
    for second in range(2000):
        history.add(counted(second / 4, second))
    assert len(history._times) <= 2 * BUCKET_S * BUCKETS
    now = history.rates(NOW + 499.75)
    assert now is not None
    assert now.per_second == pytest.approx(4.0, rel=0.1)


def test_two_frontends_are_added_and_different_edges_keep_the_first():
    one = Traffic(4, 1, 1, (1.0, 2.0), (1, 2, 0), 10, 5)
    assert one + one == Traffic(8, 2, 2, (1.0, 2.0), (2, 4, 0), 20, 10)
    assert (one + Traffic(1, ttft_edges=(3.0,), ttft=(1, 0))).ttft == one.ttft


def test_a_bar_marks_the_busy_threshold():
    assert BLOCKS.bar(0.5, 10, 0.85) == "█████░░░|░"
    assert BLOCKS.bar(0.95, 10, 0.5) == "█████|███░"
    assert BLOCKS.bar(0.5, 10, None) == BLOCKS.bar(0.5, 10)


def test_colours_of_zones_are_their_own_and_not_those_of_states():
    zones = tuple(f"zone-{letter}" for letter in "abcdef")
    styles = [zone_style(zone, zones) for zone in zones]
    assert len(set(styles)) == len(zones)
    states = {style.color for style in (GOOD, WARN, BAD)}
    assert not states & {style.color for style in styles}
    assert not states & {role_style(role).color for role in ("prefill", "decode", "aggregated")}
    assert zone_style("elsewhere", zones) == zone_style(None, zones)


@pytest.mark.parametrize("jump", [-3600.0, -10.0, 10.0, 3600.0])
def test_a_clock_that_is_set_leaves_no_wrong_rates(jump: float) -> None:
    history = History()
    for second in range(20):
        history.add(counted(second, 5 * second), float(second))
    assert history.rates(NOW + 19) is not None
    # The wall clock is set; the next readings are one second apart as before.
    history.add(counted(20 + jump, 100), 20.0)
    assert history.rates(NOW + 20 + jump) is None
    assert history.watched(NOW + 20 + jump) == 0
    for second in range(21, 40):
        history.add(counted(second + jump, 5 * second), float(second))
        now = history.rates(NOW + second + jump)
        assert now is not None
        assert now.per_second == pytest.approx(5.0)


def test_a_clock_that_is_adjusted_by_little_keeps_the_history() -> None:
    history = History()
    for second in range(20):
        history.add(counted(second * 1.01, 5 * second), float(second))
    assert history.watched(NOW + 19) == pytest.approx(19)
