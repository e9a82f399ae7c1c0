"""Whole screens, character for character, and some with their colours."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import textual
from msgspec.structs import replace
from rich.style import Style
from textual.color import Color
from textual.pilot import Pilot

from dynctl.documents.snapshot import Part
from dynctl.sources.view import StillView
from tests.dynctl.top.conftest import Shown, settled
from tests.dynctl.top.fleet import NOW, StillSource, meter, snapshot
from tests.dynctl.top.golden import HERE, as_committed, screen_svg, screen_text
from tests.golden.fleets import stranded_zones, two_zones
from tests.waiting import patience

SMALL, LARGE = (80, 24), (200, 60)

#: File stem -> the keys that lead there from the first screen.
SCREENS = {
    "first": "",
    "domains": "1",
    "workers": "2",
    "alerts": "4",
    "zoomed": "22",
    "sorted": "2,s,s,s,S",
    "filtered": "2,slash,d,e,c,space,exclamation_mark,a,0,enter",
    "card": "2,enter",
    "worker": "2,down,down,down,d",
    "worker-yaml": "2,y",
    "domain": "1,d",
    "explained": "3,enter",
    "refused": "3,down,down,enter",
    "decision": "3,d",
    "finding": "4,down,enter",
    "thresholds": "t",
    "thresholds-tried": "t,down,1,0,enter",
    "help": "question_mark",
}


def keys(text: str) -> list[str]:
    return text.split(",") if "," in text else list(text) if text.isdigit() else [text] * bool(text)


#: Those that a larger screen shows otherwise, and not only wider.
LARGE_TOO = ("first", "domains", "workers", "card", "explained", "thresholds-tried")
GOLDEN = [(name, SMALL) for name in SCREENS] + [(name, LARGE) for name in LARGE_TOO]


@pytest.mark.parametrize(("name", "size"), GOLDEN)
async def test_screen_is_as_committed(shown: Shown, name: str, size: tuple[int, int]):
    async with shown(size=size) as pilot:
        await pilot.press(*keys(SCREENS[name]))
        await settled(pilot)
        as_committed(f"{name}-{size[0]}x{size[1]}.txt", screen_text(pilot.app))


STILL = snapshot()
UNKNOWN = Part(
    "etcd",
    unknown="a live Dynamo keeps no decisions, and no source reports the winners",
    provide="--frontend-log FILE\nor start the frontends with --router-replica-sync",
)
#: File stem -> what is shown.
STATES = {
    "stranded": lambda: snapshot(stranded_zones()),
    "preferred": lambda: msgspec.structs.replace(STILL, meters=(meter(), meter(None))),
    "spilling": lambda: msgspec.structs.replace(STILL, meters=(meter(2.1),)),
    "no-decisions": lambda: msgspec.structs.replace(
        STILL, decisions=(), parts={**STILL.parts, "decisions": UNKNOWN}
    ),
    "winners-only": lambda: msgspec.structs.replace(
        STILL,
        decisions=tuple(
            msgspec.structs.replace(
                line, complete=False, margin=None, cost=None, cached_blocks=None, blocks=None
            )
            for line in STILL.decisions
        ),
    ),
    "lost": lambda: msgspec.structs.replace(
        STILL, problem="http://127.0.0.1:8000: connection refused"
    ),
    "unavailable": lambda: snapshot(
        workers=tuple(
            msgspec.structs.replace(row, status="unavailable", reason="no response within 1 s")
            if row.name in ("decode-a0", "decode-b0", "decode-b1")
            else row
            for row in STILL.workers
        )
    ),
    "empty": lambda: msgspec.structs.replace(STILL, workers=(), decisions=(), alerts=()),
    "load-unknown": lambda: msgspec.structs.replace(
        STILL,
        parts={
            **STILL.parts,
            **dict.fromkeys(
                ("load", "requests", "transfers", "queue"), Part("", unknown="not reported")
            ),
        },
    ),
}


@pytest.mark.parametrize("name", STATES)
async def test_state_is_as_committed(shown: Shown, name: str):
    view = stranded_zones() if name == "stranded" else two_zones()
    source = StillSource(STATES[name](), view)
    async with shown(source, size=SMALL) as pilot:
        if name == "lost":
            pilot.app.wall = lambda: NOW + 12  # type: ignore[attr-defined]
            pilot.app._show_frame()  # type: ignore[attr-defined]
            await pilot.pause()
        as_committed(f"{name}-80x24.txt", screen_text(pilot.app))


async def test_a_saved_view_is_not_called_live(shown: Shown):
    async with shown(StillView(two_zones()), size=SMALL) as pilot:
        text = screen_text(pilot.app)
        assert "○ saved view, not live" in text
        assert "every" not in text


@pytest.mark.skipif(
    not textual.__version__.startswith("8."), reason="each version of Textual draws SVG differently"
)
@pytest.mark.parametrize("size", [(100, 30)])
async def test_colours_are_as_committed(shown: Shown, size: tuple[int, int]):
    async with shown(size=size) as pilot:
        as_committed("first-100x30.svg", screen_svg(pilot.app))
    source = StillSource(snapshot(stranded_zones(), meters=(meter(2.1),)), stranded_zones())
    async with shown(source, size=size) as pilot:
        as_committed("stranded-100x30.svg", screen_svg(pilot.app))


async def test_only_the_terminals_own_sixteen_colours_are_used(shown: Shown):
    source = StillSource(snapshot(stranded_zones(), meters=(meter(2.1),)), stranded_zones())
    async with shown(source, size=LARGE) as pilot:
        numbers = colours(pilot)
        assert numbers <= set(range(16))
        assert numbers, "nothing is coloured at all"


async def test_without_colour_every_word_is_there(shown: Shown, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with shown(size=SMALL) as pilot:
        assert colours(pilot) == set()
        as_committed("first-80x24.txt", screen_text(pilot.app))


def colours(pilot: Pilot[int]) -> set[int | None]:
    """The numbers of all colours on the screen that are not the terminal's default."""
    found = set()
    for line in pilot.app.screen._compositor.render_strips():
        for segment in (pilot.app._filters and _filtered(pilot, line)) or line:
            style = segment.style or Style()
            found |= {one for one in (style.color, style.bgcolor) if one is not None}
    return {color.number for color in found if not color.is_default}


def _filtered(pilot: Pilot[int], line: Any) -> Any:
    for one in pilot.app._filters:
        if one.enabled:
            line = line.apply_filter(one, Color(0, 0, 0))
    return line


@pytest.mark.parametrize("size", [(40, 12), (64, 20), (120, 40)])
@pytest.mark.parametrize("name", ["first", "workers", "explained", "thresholds-tried"])
async def test_every_size_is_filled_and_no_line_is_too_long(
    shown: Shown, name: str, size: tuple[int, int]
):
    async with shown(size=size) as pilot:
        await pilot.press(*keys(SCREENS[name]))
        await settled(pilot)
        lines = screen_text(pilot.app).rstrip("\n").split("\n")
        assert len(lines) == size[1]
        assert all(len(line) <= size[0] for line in lines)


async def test_a_resized_screen_is_drawn_again(shown: Shown):
    async with shown(size=SMALL) as pilot:
        for width, height in (LARGE, SMALL):
            expected = (HERE / f"first-{width}x{height}.txt").read_text()
            await pilot.resize_terminal(width, height)
            async with asyncio.timeout(patience(5)):
                while screen_text(pilot.app) != expected:
                    await pilot.pause(0.02)


def test_no_golden_file_is_left_over():
    expected = {f"{name}-{width}x{height}.txt" for name, (width, height) in GOLDEN}
    expected |= {f"{name}-80x24.txt" for name in STATES}
    expected |= {"first-100x30.svg", "stranded-100x30.svg"}
    assert {path.name for path in HERE.iterdir()} == expected


def headings(pilot: Pilot[int]) -> dict[str, str]:
    """Panel -> the line of its columns."""
    lines = screen_text(pilot.app).splitlines()
    starts = ("[1]", "[2]", "[3]")
    found = {}
    for number, line in enumerate(lines):
        for start in starts:
            if start in line:
                found[start] = " ".join(lines[number + 1].partition(" ─ ")[0].split())
    return found


@pytest.mark.parametrize("size", [SMALL, (200, 50)])
async def test_columns_stay_while_workers_fall_ill_and_recover(
    shown: Shown, size: tuple[int, int]
) -> None:
    async with shown(size=size) as pilot:
        await pilot.press("2")
        before = headings(pilot)["[2]"]
        app: Any = pilot.app
        well = app.snapshot
        ill = replace(
            well,
            workers=tuple(
                replace(row, status="unavailable", reason="no response") for row in well.workers[:3]
            ),
        )
        for snapshot_now in (ill, replace(well, workers=well.workers[:1]), well):
            app.on_top_app_source_read(app.SourceRead(snapshot_now))
            await pilot.pause()
            assert headings(pilot)["[2]"] == before


async def test_sick_workers_are_the_first_lines_of_a_small_screen(shown: Shown) -> None:
    async with shown(size=SMALL) as pilot:
        app: Any = pilot.app
        last = app.workers_panel.rows[-1].name
        ill = replace(
            app.snapshot,
            workers=tuple(
                replace(row, status="unavailable") if row.name == last else row
                for row in app.snapshot.workers
            ),
        )
        app.on_top_app_source_read(app.SourceRead(ill))
        await pilot.pause()
        assert app.workers_panel.rows[0].name == last
        text = screen_text(pilot.app)
        assert "[2] workers (5/6)" in text
        assert last in text.partition("[2]")[2].partition("[3]")[0].splitlines()[2]


async def test_engines_without_a_prefill_hop_have_one_column_of_workers(shown: Shown) -> None:
    async with shown(size=SMALL) as pilot:
        app: Any = pilot.app
        plain = replace(
            app.snapshot,
            workers=tuple(replace(row, role="aggregated") for row in app.snapshot.workers),
            decisions=tuple(replace(line, prefill=None) for line in app.snapshot.decisions),
        )
        app.decisions.content.picture = type(app.decisions.picture)()
        app.on_top_app_source_read(app.SourceRead(plain))
        await pilot.pause()
        words = headings(pilot)["[3]"].split()
        assert "WORKER" in words
        assert not {"PREFILL", "DECODE"} & set(words)
