"""Every key, on the app itself."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from dynctl.base.errors import ExitCode, Unreachable, UsageProblem
from dynctl.documents.fleet_load import Traffic
from dynctl.documents.snapshot import Part
from dynctl.documents.workers import RankRow, WorkerRow
from dynctl.sources.query import RouteQuery
from dynctl.sources.view import open_view
from dynctl.top.app import NOTICE_S, TopApp
from dynctl.top.keys import KEYS
from dynctl.top.widgets import TextScreen
from tests.dynctl.top.conftest import TEXT, TYPED, Shown, settled
from tests.dynctl.top.fleet import NOW, StillSource, snapshot
from tests.dynctl.top.golden import screen_text
from tests.golden.fleets import TOKENS, two_zones
from tests.waiting import patience


def app_of(pilot: Pilot[int]) -> TopApp:
    assert isinstance(pilot.app, TopApp)
    return pilot.app


def focused(pilot: Pilot[int]) -> str:
    return str(app_of(pilot).focused_panel.id)


def on(panel: Any) -> tuple[int, str]:
    """Where the cursor is."""
    return panel.cursor, panel.current.name


async def test_number_keys_and_tab_go_to_panels(shown: Shown):
    async with shown() as pilot:
        assert focused(pilot) == "decisions"
        for key, panel in (("1", "domains"), ("2", "workers"), ("3", "decisions"), ("4", "alerts")):
            await pilot.press(key)
            assert focused(pilot) == panel
        await pilot.press("tab")
        assert focused(pilot) == "domains"
        await pilot.press("shift+tab", "shift+tab")
        assert focused(pilot) == "decisions"


async def test_the_same_number_again_zooms_and_escape_comes_back(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2", "2")
        await pilot.pause()
        heights = [panel.size.height for panel in app_of(pilot).panels]
        assert heights == [1, 17, 1, 1]
        await pilot.press("escape")
        await pilot.pause()
        assert app_of(pilot).panels[0].size.height == 4


async def test_the_cursor_moves_within_the_rows(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2")
        panel = app_of(pilot).workers_panel
        for key, place in (
            ("up", 0), ("down", 1), ("j", 2), ("k", 1), ("end", 5), ("down", 5), ("home", 0),
            ("G", 5), ("pageup", 0), ("pagedown", 5), ("home", 0), ("space", 5),
        ):  # fmt: skip
            await pilot.press(key)
            assert panel.cursor == place, key


async def test_the_cursor_stays_on_its_worker_when_others_come_and_go(shown: Shown):
    source = StillSource()
    async with shown(source) as pilot:
        await pilot.press("2", "down", "down", "down")
        panel = app_of(pilot).workers_panel
        assert on(panel) == (3, "prefill-b1")
        workers = source.shown.workers
        for left, expected in ((workers[1:3], (1, "prefill-b1")), (workers[:2], (1, "prefill-b0"))):
            app_of(pilot).take(msgspec.structs.replace(source.shown, workers=left))
            assert on(panel) == expected
        app_of(pilot).take(msgspec.structs.replace(source.shown, workers=()))
        assert panel.current is None
        await pilot.press("enter", "down", "d", "y", "i")


async def test_new_decisions_appear_on_top_and_the_cursor_stays_on_its_row(shown: Shown):
    source = StillSource()
    newer = msgspec.structs.replace(source.shown.decisions[0], id="newer", at=NOW)
    more = msgspec.structs.replace(source.shown, decisions=(newer, *source.shown.decisions))
    async with shown(source) as pilot:
        panel = app_of(pilot).decisions
        app_of(pilot).take(more)
        assert panel.current is not None
        assert panel.current.id == "newer"
        app_of(pilot).take(source.shown)
        await pilot.press("down")
        read = panel.current
        app_of(pilot).take(more)
        assert (panel.current, panel.cursor) == (read, 2)


async def test_workers_are_ordered_by_the_domain_then_role_then_name(shown: Shown):
    source = StillSource()
    racks = dict(zip((row.name for row in source.shown.workers), "cbbaab", strict=True))
    rows = tuple(
        msgspec.structs.replace(row, domains={**row.domains, "rack": racks[row.name]})
        for row in source.shown.workers
    )
    source.shown = msgspec.structs.replace(source.shown, workers=rows[::-1])
    async with shown(source) as pilot:
        panel = app_of(pilot).workers_panel
        assert [row.name for row in panel.rows] == [
            "prefill-a0", "decode-a0", "prefill-b0", "prefill-b1", "decode-b0", "decode-b1",
        ]  # fmt: skip
        await pilot.press("g")
        await pilot.pause()
        assert [row.name for row in panel.rows] == [
            "decode-a0", "decode-b0", "prefill-b0", "prefill-b1", "decode-b1", "prefill-a0",
        ]  # fmt: skip


async def test_sorting_goes_through_the_columns_and_can_be_reversed(shown: Shown):
    async with shown(size=(200, 60)) as pilot:
        await pilot.press("2")
        panel = app_of(pilot).workers_panel
        first = [row.name for row in panel.rows]
        await pilot.press("s")
        assert [row.name for row in panel.rows] == sorted(first)
        await pilot.press("S")
        assert [row.name for row in panel.rows] == sorted(first, reverse=True)
        while "by PREFILL" not in screen_text(pilot.app):
            await pilot.press("s")
        assert panel.rows[0].name == "prefill-b1"
        while "  by " in screen_text(pilot.app):
            await pilot.press("s")
        assert [row.name for row in panel.rows] == first


async def test_filter_is_applied_while_it_is_typed_and_dropped_by_escape(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2", "slash", *"zone-b", "space", *"DECODE")
        panel = app_of(pilot).workers_panel
        assert [row.name for row in panel.rows] == ["decode-b0", "decode-b1"]
        assert "/zone-b DECODE" in screen_text(pilot.app)
        await pilot.press("enter")
        assert focused(pilot) == "workers"
        await pilot.press("down")
        assert panel.cursor == 1
        await pilot.press("slash", "backspace")
        assert app_of(pilot)._prompt.value == "zone-b DECOD"
        await pilot.press("escape")
        assert len(panel.rows) == 6


async def test_the_filter_is_edited_at_the_cursor(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2", "slash", *"zone-x decode", "ctrl+w", *"prefill")
        assert app_of(pilot)._prompt.value == "zone-x prefill"
        await pilot.press(*["left"] * 8, "backspace", "b", "enter")
        assert app_of(pilot)._prompt.value == "zone-b prefill"
        names = [row.name for row in app_of(pilot).workers_panel.rows]
        assert names == ["prefill-b0", "prefill-b1"]


async def test_keys_of_the_panels_are_text_in_the_filter(shown: Shown):
    async with shown() as pilot:
        await pilot.press("slash", *TYPED)
        assert not isinstance(pilot.app.screen, TextScreen)
        assert app_of(pilot)._prompt.value == TEXT


async def test_exclamation_mark_excludes(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2", "exclamation_mark", *"busy", "enter")
        panel = app_of(pilot).workers_panel
        assert [row.name for row in panel.rows if row.busy] == []
        assert len(panel.rows) == 5
        await pilot.press("escape", "slash", "exclamation_mark", "space", *"busy", "enter")
        assert [row.name for row in panel.rows] != []


async def test_a_filter_without_a_match_is_reported(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2", "slash", *"xyz", "enter")
        assert "0 of 6 rows match /xyz" in screen_text(pilot.app)
        await pilot.press("enter")
        assert "there is no row to open" in screen_text(pilot.app)


async def test_grouping_goes_through_the_domains(shown: Shown):
    source = StillSource()
    rows = tuple(
        msgspec.structs.replace(row, domains={**row.domains, "host": f"h{place}"})
        for place, row in enumerate(source.shown.workers)
    )
    source.shown = msgspec.structs.replace(source.shown, workers=rows)
    async with shown(source) as pilot:
        assert "domains by zone" in screen_text(pilot.app)
        await pilot.press("g")
        await pilot.pause()
        assert "domains by host" in screen_text(pilot.app)
        assert [row.value for row in app_of(pilot).domains.rows] == [f"h{n}" for n in range(6)]
        assert {alert.subject for alert in app_of(pilot).alerts} == {"prefill-b0", "zone=zone-a"}
        await pilot.press("g")
        assert app_of(pilot).view is not None
        assert app_of(pilot).view.domain == "zone"  # type: ignore[union-attr]


async def test_workers_stay_visible_next_to_many_domain_rows(shown: Shown):
    source = StillSource()
    rows = tuple(
        msgspec.structs.replace(row, domains={**row.domains, "host": f"h{place}"})
        for place, row in enumerate(source.shown.workers)
    )
    source.shown = msgspec.structs.replace(source.shown, workers=rows)
    async with shown(source) as pilot:
        for panel in ("1", "3", "4"):
            await pilot.press(panel, "g")
            await pilot.pause()
            app = app_of(pilot)
            assert app.workers_panel.size.height >= 4
            assert "prefill-a0  prefill" in screen_text(app)


async def test_messages_leave_the_line_of_keys_visible(shown: Shown):
    async with shown() as pilot:
        app = app_of(pilot)
        keys = screen_text(app).splitlines()[-1]
        for text in ("saved", "saved the view to a very long path " * 5):
            app.show_message(text)
            await pilot.pause()
            lines = screen_text(app).splitlines()
            assert len(lines) == 24
            assert lines[-1] == keys
            assert " ".join(text.split()) in " ".join(" ".join(lines).split())
        app.wall = lambda: NOW + NOTICE_S + 1
        app._show_frame()
        await pilot.pause()
        assert "saved" not in screen_text(app)


async def test_with_one_domain_there_is_nothing_to_group_by(shown: Shown):
    async with shown() as pilot:
        await pilot.press("g")
        assert "no other domain to group by" in screen_text(pilot.app)


async def test_enter_on_a_domain_shows_its_workers(shown: Shown):
    async with shown() as pilot:
        await pilot.press("1", "down", "enter")
        assert focused(pilot) == "workers"
        names = [row.name for row in app_of(pilot).workers_panel.rows]
        assert names == ["prefill-b0", "prefill-b1", "decode-b0", "decode-b1"]
        await pilot.press("escape")
        assert len(app_of(pilot).workers_panel.rows) == 6


async def test_enter_on_a_worker_reads_its_chain(shown: Shown):
    read: list[str] = []

    def chain(worker: Any) -> Any:
        read.append(worker.name)
        raise Unreachable("the API server does not answer", "kubectl get --raw /healthz")

    async with shown(chain=chain) as pilot:
        await pilot.press("2", "enter")
        await settled(pilot)
        text = screen_text(pilot.app)
        assert read == ["prefill-a0"]
        assert "the API server does not answer\n  kubectl get --raw /healthz" in text


async def test_enter_on_a_plain_engine_shows_status_and_load_first(shown: Shown):
    row = WorkerRow(
        "engine-1", 1, "tiny", "aggregated", endpoint="http://127.0.0.1:9001",
        status="unavailable", reason="no response within 1 s",
        runtime_config={"total_kv_blocks": 4096},
        ranks=[RankRow(active_prefill_tokens=77)],
    )  # fmt: skip
    async with shown(StillSource(snapshot(workers=(row,)))) as pilot:
        domains = screen_text(pilot.app).split("[2] workers")[0]
        assert "AGGREGATED" in domains
        assert not any(word in domains for word in ("DECODE", "P:D", "CROSS", "cross:"))
        await pilot.press("2", "enter")
        await settled(pilot)
        lines = [line for line in screen_text(pilot.app).splitlines() if line]
    assert lines[1:4] == [
        "engine-1  aggregated  tiny",
        "status    unavailable: no response within 1 s",
        "endpoint  http://127.0.0.1:9001",
    ]
    assert lines[4].startswith("RANK")
    assert " 77 " in lines[5]
    assert lines[6] == "ModelRuntimeConfig"
    assert lines[-2] == "  the worker publishes no topology domain"


async def test_decision_ids_are_shown_by_their_end_and_whole_in_the_details(shown: Shown):
    async with shown(size=(80, 24)) as pilot:
        assert " 091f0a " in screen_text(pilot.app)
        for key in ("enter", "d"):
            await pilot.press(key)
            await settled(pilot)
            assert "decision 4b7d000091f0a" in " ".join(screen_text(pilot.app).split())
            await pilot.press("escape")
        await pilot.resize_terminal(64, 24)
        await pilot.pause()
        await pilot.press("d")
        await settled(pilot)
        assert "decision 4b7d000091f0a" in " ".join(screen_text(pilot.app).split())


@pytest.mark.seed("dynamo-1.6: skip the hop: bypass")
async def test_a_decision_without_its_prefill_hop_says_why(shown: Shown):
    source = StillSource()
    first, *more = source.shown.decisions
    lines = (msgspec.structs.replace(first, prefill=None, bypass="short_prefill"), *more)
    source.shown = msgspec.structs.replace(source.shown, decisions=lines)
    async with shown(source) as pilot:
        await pilot.press("d")
        await settled(pilot)
        text = " ".join(screen_text(pilot.app).split())
        assert "hop prefill hop left out: short_prefill" in text


async def test_ids_of_two_frontends_are_shown_by_different_ends(shown: Shown):
    source = StillSource()
    first, second, *more = source.shown.decisions
    lines = (
        msgspec.structs.replace(first, id="5c0ffee7a100000001"),
        msgspec.structs.replace(second, id="5c0ffee7b200000001"),
        *more,
    )
    source.shown = msgspec.structs.replace(source.shown, decisions=lines)
    async with shown(source) as pilot:
        text = screen_text(pilot.app)
        assert " 100000001 " in text
        assert " 200000001 " in text


@pytest.mark.parametrize("key", ["escape", "q"])
async def test_details_scroll_and_go_back(shown: Shown, key: str):
    async with shown() as pilot:
        await pilot.press("2", "y")
        await settled(pilot)
        assert "name: prefill-a0" in screen_text(pilot.app)
        await pilot.press("pagedown", "down", "up", "end", "home", "G", "k", "j", "space")
        await pilot.pause()
        assert "name: prefill-a0" not in screen_text(pilot.app)
        await pilot.press(key)
        await pilot.pause()
        assert not isinstance(pilot.app.screen, TextScreen)
        assert focused(pilot) == "workers"


async def test_a_decision_is_explained_as_route_explains_it(shown: Shown):
    source = StillSource()
    async with shown(source, size=(200, 60)) as pilot:
        await pilot.press("enter")
        await settled(pilot)
        assert ("decision", "4b7d000091f0a") in source.requests
        text = screen_text(pilot.app)
        assert "1 prefill   6 workers > 3 prefill" in text
        assert "would flip with" in text


async def test_the_reason_why_a_decision_cannot_be_read_is_shown(shown: Shown):
    source = StillSource()

    async def gone(line: Any) -> Any:
        raise UsageProblem("no decision is kept: 1,204 are, 3 had to leave", "look sooner")

    source.decision = gone  # type: ignore[method-assign]
    async with shown(source) as pilot:
        await pilot.press("enter")
        await settled(pilot)
        assert "no decision is kept: 1,204 are, 3 had to leave\n  look sooner" in screen_text(
            pilot.app
        )


async def test_a_winner_without_candidates_is_described_from_its_line(shown: Shown):
    source = StillSource()
    line = msgspec.structs.replace(source.shown.decisions[0], complete=False, cost=None)
    source.shown = msgspec.structs.replace(source.shown, decisions=(line,))
    async with shown(source) as pilot:
        await pilot.press("enter")
        await settled(pilot)
        assert "A live Dynamo reports the chosen workers only" in screen_text(pilot.app)
        assert source.requests == []


async def test_pause_keeps_the_snapshot(shown: Shown):
    source = StillSource()
    async with shown(source, rate=0.05) as pilot:
        await pilot.press("p")
        await pilot.pause()
        assert "PAUSED at 12:04:31" in screen_text(pilot.app)
        readings = source.readings
        await asyncio.sleep(0.3)
        assert source.readings <= readings + 1
        await pilot.press("p")
        async with asyncio.timeout(patience(5)):
            while source.readings <= readings + 1:
                await pilot.pause(0.01)
        assert "live" in screen_text(pilot.app)


async def test_a_snapshot_that_comes_while_the_app_ends_is_left(shown: Shown):
    async with shown() as pilot:
        app = app_of(pilot)
        snapshot = app.snapshot
        assert snapshot is not None
    assert not app.screen_stack
    app.on_top_app_source_read(app.SourceRead(snapshot))


async def test_r_goes_through_the_intervals(shown: Shown):
    async with shown(rate=1.0) as pilot:
        seen = []
        for _ in range(5):
            await pilot.press("r")
            seen.append(app_of(pilot).rate)
        assert seen == [2.0, 5.0, 10.0, 0.5, 1.0]
        assert "every 1 s" in screen_text(pilot.app)


async def test_an_exported_view_gives_the_same_decisions(shown: Shown, tmp_path):
    async with shown() as pilot:
        for number in range(2):
            await pilot.press("e")
            await settled(pilot)
            assert f"saved {tmp_path}"[:20] in screen_text(pilot.app), number
    first, second = sorted(tmp_path.iterdir())
    assert (first.name, second.name) == (
        "dynctl-view-20261121-120431-1.json",
        "dynctl-view-20261121-120431.json",
    )
    query = RouteQuery(token_ids=TOKENS)
    assert open_view(second).route(query).winner == two_zones().route(query).winner


async def test_the_reason_why_an_export_cannot_be_written_is_shown(shown: Shown, tmp_path):
    async with shown() as pilot:
        app_of(pilot).directory = tmp_path / "nowhere"
        await pilot.press("e")
        await settled(pilot)
        assert "not saved: " in screen_text(pilot.app)
        assert "its directory does not exist" in " ".join(screen_text(pilot.app).split())


async def test_caches_are_read_on_request(shown: Shown):
    source = StillSource()
    unread = {**source.shown.parts, "index": Part("etcd", unknown="caches were not read")}
    source.shown = msgspec.structs.replace(source.shown, parts=unread)
    async with shown(source) as pilot:
        assert "caches not read: i, I" in screen_text(pilot.app)
        await pilot.press("2", "down", "i")
        await settled(pilot)
        assert "reading" in screen_text(pilot.app)
        await pilot.press("I")
        await settled(pilot)
        assert source.requests == [("index", "decode-a0"), ("index", None)]


async def test_a_refused_reading_of_caches_is_shown(shown: Shown):
    async with shown() as pilot:
        await pilot.press("2", "i")
        await settled(pilot)
        assert "workers report their caches by themselves" in screen_text(pilot.app)


async def test_help_lists_every_key(shown: Shown):
    listed = " ".join(keys for keys, _ in KEYS).split()
    shown_as = {"slash": "/", "exclamation_mark": "!", "question_mark": "?", "escape": "Esc",
                "colon": ":",
                "ctrl+c": "Ctrl-C", "enter": "Enter", "tab": "Tab"}  # fmt: skip
    bound = {key for one in TopApp.BINDINGS for key in one.key.split(",")} - {"shift+tab"}  # type: ignore[union-attr]
    assert {shown_as.get(key, key) for key in bound} <= set(listed)
    async with shown() as pilot:
        await pilot.press("question_mark")
        await settled(pilot)
        assert "keys" in screen_text(pilot.app)


async def test_q_ends_with_0(shown: Shown):
    async with shown() as pilot:
        await pilot.press("q")
    assert pilot.app.return_value == 0


async def test_ctrl_c_ends_with_130_on_every_screen(shown: Shown):
    async with shown() as pilot:
        await pilot.press("t", "ctrl+c")
    assert pilot.app.return_value == ExitCode.INTERRUPTED


# -- what may go wrong -------------------------------------------------------------------------


async def test_an_unreachable_source_fades_the_panels_and_shows_why(shown: Shown):
    source = StillSource()
    async with shown(source) as pilot:
        app = app_of(pilot)
        app.take(msgspec.structs.replace(source.shown, problem="no answer within 5 s"))
        await pilot.pause()
        text = screen_text(pilot.app)
        assert "NOT CURRENT" in text
        assert "no answer within 5 s" in text
        assert all(panel.faded for panel in app.panels)
        app.take(source.shown)
        await pilot.pause()
        assert not any(panel.faded for panel in app.panels)


async def test_a_defect_ends_the_app_and_is_raised(shown: Shown):
    class Broken(StillSource):
        async def snapshot(self) -> Any:
            if self.readings:
                raise ZeroDivisionError("a defect")
            return await super().snapshot()

    app = TopApp(Broken(), rate=0.05, wall=lambda: NOW)
    with pytest.raises(Exception, match="a defect"):
        await _run_until_it_ends(app)
    assert isinstance(app.failure, ZeroDivisionError)


async def _run_until_it_ends(app: TopApp) -> None:
    async with app.run_test() as pilot, asyncio.timeout(patience(5)):
        while app.is_running:
            await pilot.pause(0.02)


# -- one filter, jumps, logs, the right third ---------------------------------------------------


async def test_a_filter_holds_in_every_panel_until_escape(shown: Shown):
    async with shown(size=(100, 40)) as pilot:
        app = app_of(pilot)
        await pilot.press("2", "slash", *"zone=zone-a", "enter")
        assert {row.value for row in app.domains.rows} == {"zone-a"}
        assert {row.name for row in app.workers_panel.rows} == {"prefill-a0", "decode-a0"}
        assert {line.id[-3:] for line in app.decisions.rows} == {"f0a", "f08", "f07"}
        assert {alert.subject for alert in app.alerts_panel.rows} == {"zone=zone-a"}
        await pilot.press("3")
        assert "/zone=zone-a" in screen_text(app)
        await pilot.press("escape")
        assert [len(panel.rows) for panel in app.panels] == [2, 6, 5, 2]


async def test_enter_on_a_domain_zooms_every_panel_on_it(shown: Shown):
    async with shown(size=(100, 40)) as pilot:
        app = app_of(pilot)
        await pilot.press("1", "down", "enter")
        assert app.focused_panel is app.workers_panel
        assert {row.value for row in app.domains.rows} == {"zone-b"}
        assert {row.domains["zone"] for row in app.workers_panel.rows} == {"zone-b"}
        assert [alert.subject for alert in app.alerts_panel.rows] == ["prefill-b0"]


@pytest.mark.parametrize(
    ("typed", "panel", "row"),
    [
        ("workers", "workers", None),
        ("4", "alerts", None),
        ("decode-b1", "workers", "decode-b1"),
        ("e-b1", "workers", "decode-b1"),
        ("91f07", "decisions", "4b7d000091f07"),
    ],
)
async def test_a_colon_goes_to_a_panel_a_worker_or_a_decision(
    shown: Shown, typed: str, panel: str, row: str | None
):
    async with shown() as pilot:
        app = app_of(pilot)
        await pilot.press("slash", *"zone-a", "enter", "colon", *typed, "enter")
        assert app.focused_panel.id == panel
        current = app.focused_panel.current
        assert row is None or row in (getattr(current, "name", None), getattr(current, "id", None))


async def test_a_colon_opens_the_page_of_a_code_and_reports_what_is_unknown(shown: Shown):
    async with shown() as pilot:
        app = app_of(pilot)
        await pilot.press("colon", *"dyt0901", "enter")
        await settled(pilot)
        assert "DYT0901" in screen_text(app)
        await pilot.press("escape", "colon", *"nothing-like-it", "enter")
        assert "no panel, worker, decision or code matches 'nothing-like-it'" in " ".join(
            screen_text(app).split()
        )
        assert screen_text(app).splitlines()[-1].strip().startswith("1-4 panels")
        await pilot.press("colon", *"wor", "escape")
        assert app.focused_panel is app.decisions


async def test_the_log_of_a_worker_has_its_decisions_and_findings(shown: Shown):
    async with shown(size=(120, 40)) as pilot:
        await pilot.press("colon", *"prefill-b0", "enter", "l")
        await settled(pilot)
        text = screen_text(pilot.app)
        assert "EVENTS_LOST prefill-b0: 3 batches were lost" in text
        assert "decisions (1 of the last 5)" in text
        assert "091f09" in text
        assert "091f0a" not in text


async def test_the_log_of_a_worker_ends_with_that_of_its_process(shown: Shown):
    def logs(worker: Any) -> Any:
        if worker.name == "prefill-b1":
            raise UsageProblem("not read: no pod prefill-b1 in namespace lab", "name another: -n X")
        return [
            f"pod {worker.name}, container main: the last 2 lines",
            "starting",
            "ready to serve",
        ]

    async with shown(size=(120, 40), logs=logs) as pilot:
        await pilot.press("colon", *"prefill-b0", "enter", "l")
        await settled(pilot)
        text = screen_text(pilot.app)
        assert "log of the process" in text
        assert "pod prefill-b0, container main: the last 2 lines\n  starting\n  ready" in text
        await pilot.press("escape", "colon", *"prefill-b1", "enter", "l")
        await settled(pilot)
        text = screen_text(pilot.app)
        assert "no pod prefill-b1 in namespace lab\n  name another: -n X" in text


async def test_a_worker_of_a_plain_frontend_has_no_known_log(shown: Shown):
    async with shown(size=(120, 40)) as pilot:
        await pilot.press("colon", *"prefill-b0", "enter", "l")
        await settled(pilot)
        assert "not read: the router knows the worker" in screen_text(pilot.app)


async def test_the_right_third_of_wide_screens_has_flow_reasons_and_queues(shown: Shown):
    async with shown(size=(200, 60)) as pilot:
        app = app_of(pilot)
        text = screen_text(app)
        for title in ("KV flow by zone", "what decided", "waiting", "fullest workers"):
            assert title in text
        assert "zone-a > zone-b" in text
        await pilot.press("slash", *"decode-b1", "enter")
        assert "zone-a > zone-b" not in screen_text(app)
        await pilot.press("2")
        assert "KV flow" in screen_text(app)
        await pilot.press("2")
        assert "KV flow" not in screen_text(app)
        await pilot.press("escape", "escape")
        assert "KV flow" in screen_text(app)
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert "KV flow" not in screen_text(app)


async def test_the_header_has_rates_where_requests_are_counted(shown: Shown):
    source = StillSource()
    edges = (0.1, 0.2, 1.0)

    def counted(seconds: int) -> Any:
        done = 50 * seconds
        traffic = Traffic(
            done, seconds, 2 * seconds, edges, (done, 0, 0, 0), 1000 * done, 400 * done
        )
        header = msgspec.structs.replace(source.shown.header, traffic=traffic)
        return msgspec.structs.replace(source.shown, header=header, at=NOW + seconds)

    async with shown(source, size=(100, 30)) as pilot:
        app = app_of(pilot)
        for second in range(12):
            app.take(counted(second))
        await pilot.pause()
        line = screen_text(app).splitlines()[1]
        assert line.startswith(" 50 req/s ")
        for text in ("TTFT p50 50 ms p99 99 ms", "hits 40 %", "refused 4.0 %"):
            assert text in line
        assert screen_text(app).splitlines()[-1].strip().startswith("1-4 panels")
