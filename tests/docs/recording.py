"""docs/screens/demo.svg: two minutes of the demo as one animated picture, drawn by `make docs`.

The dashboard is that of `dynctl top --demo` with keys pressed, in its own time, so that the picture
is the same every time. Lines that several frames share are drawn once. The colours follow the
reader's light or dark scheme; no script, and nothing is fetched.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Sequence
from typing import Final

from rich.style import Style
from rich.text import Text

from dynctl.documents.demo import DemoEnd
from dynctl.documents.snapshot import DecisionReport
from dynctl.screens.canvas import Canvas
from dynctl.screens.decisions import decision_report
from dynctl.screens.demo import demo_end
from dynctl.screens.route import ExplainScreen
from dynctl.sources.demo.live import LiveDemo
from dynctl.sources.domains import DomainBoard
from dynctl.top.app import TopApp

_SIZE: Final = (100, 30)
#: Cells in pixels, and the margin around them.
_CELL: Final = (7.2, 15)
_MARGIN: Final = 12
#: Seconds of a frame of the dashboard, and demo seconds from frame to frame.
_FRAME_S: Final = 4.0
_STEP_S: Final = 6
_ENGINES: Final = ("decode-a0", "decode-a1", "decode-b0", "decode-b1", "prefill-a0", "prefill-b0")

Piece = tuple[str, str]
"""A text and the classes of its style."""
Frame = list[tuple[Piece, ...]]


def recording(now: float) -> str:
    """The animated picture. ``now``: seconds since the epoch at which its clock starts."""
    scenes = [
        (_typed("dynctl demo --keep --load", ""), 2.0),
        (_typed("dynctl demo --keep --load", _demo_screen()), 8.0),
        (_typed("dynctl top", ""), 1.5),
        *asyncio.run(_dashboard(now)),
    ]
    return _svg(scenes)


def _demo_screen() -> str:
    end = DemoEnd("http://127.0.0.1:8000", list(_ENGINES), 0, 5.2, True, True, True)
    return demo_end(end, Canvas(_SIZE[0], color=True))


async def _dashboard(now: float) -> list[tuple[Frame, float]]:
    """The dashboard over the demo fleet, then its decisions and one explained."""
    passed = [0.0]
    source = LiveDemo(clock=lambda: passed[0], wall=lambda: now + passed[0])
    scenes: list[tuple[Frame, float]] = []
    async with source:
        app = TopApp(source, wall=lambda: now + passed[0], rate=3600.0)
        # Its own time: on a busy machine the board would keep numbers longer.
        app._board = DomainBoard(lambda: passed[0])
        async with app.run_test(size=_SIZE) as pilot:
            while app.snapshot is None:
                await pilot.pause(0.01)
            app.rate = 1.0  # as it is shown; the readings are taken below

            async def step(turns: int, *keys: str, seconds: float = _FRAME_S) -> None:
                for key in keys:
                    await pilot.press(key)
                for _ in range(turns):
                    for _ in range(_STEP_S // 2):
                        passed[0] += 2.0
                        app.take(await source.snapshot())
                    await pilot.pause()
                    scenes.append((_frame(app), seconds))

            async def opened(*keys: str, seconds: float) -> None:
                await pilot.press(*keys)
                busy = [one for one in app.workers if one.name != "look"]
                if busy:
                    await app.workers.wait_for_complete(busy)
                await pilot.pause()
                scenes.append((_frame(app), seconds))

            for _ in range(30):
                passed[0] += 2.0
                app.take(await source.snapshot())
            await step(9)
            await step(4, "1", "down", "enter")
            await step(1, "escape", "3")
            await opened("enter", seconds=9.0)
            await pilot.press("escape")
            await step(2, "2")
            await opened("l", seconds=6.0)
            await pilot.press("escape")
            snapshot = await source.snapshot()
            moved = [one for one in snapshot.decisions if one.moved or one.refused][:18]
            report = DecisionReport(snapshot.source, moved)
            canvas = Canvas(_SIZE[0], color=True)
            scenes.append(
                (_typed("dynctl decisions --moved", decision_report(report, canvas)), 8.0)
            )
            line = next(one for one in snapshot.decisions if one.refused)
            shown = ExplainScreen()(await source.decision(line), canvas)
            scenes.append((_typed(f"dynctl why {line.id[-6:]}", shown), 12.0))
    return scenes


# -- frames ----------------------------------------------------------------------------------------


def _typed(command: str, screen: str) -> Frame:
    text = Text.from_ansi(screen.rstrip("\n"))
    lines: Frame = [(("$ ", "d"), (command, "b")), ()]
    for line in text.split(allow_blank=True)[: _SIZE[1] - 2]:
        pieces = [(part.plain, _classes(_style_of(part))) for part in line.divide(_edges(line))]
        lines.append(tuple(piece for piece in pieces if piece[0]))
    return lines


def _edges(line: Text) -> list[int]:
    return sorted({edge for span in line.spans for edge in (span.start, span.end)})


def _style_of(part: Text) -> Style:
    found = Style()
    for span in part.spans:
        found += span.style if isinstance(span.style, Style) else Style.parse(str(span.style))
    return found


def _frame(app: TopApp) -> Frame:
    strips = app.screen._compositor.render_strips()
    return [
        tuple((one.text, _classes(one.style or Style())) for one in strip if one.text)
        for strip in strips[: _SIZE[1]]
    ]


def _classes(style: Style) -> str:
    """``b`` bold, ``d`` faint, ``r`` reverse, ``c1`` to ``c15``: a colour of the terminal."""
    found = [name for name, on in (("b", style.bold), ("d", style.dim), ("r", style.reverse)) if on]
    number = None if style.color is None else style.color.number
    if number is not None and number < 16:
        found.append(f"c{number}")
    return " ".join(found)


# -- the picture -----------------------------------------------------------------------------------

#: Colours of the terminal by number: on a dark and on a light background.
_COLOURS: Final = {
    1: ("#ff7b72", "#b42318"), 2: ("#7ee787", "#116329"), 3: ("#e3b341", "#7d4e00"),
    4: ("#79c0ff", "#0550ae"), 5: ("#d2a8ff", "#8250df"), 6: ("#56d4dd", "#0b6a75"),
    9: ("#ffa198", "#a40e26"), 10: ("#56d364", "#1a7f37"), 11: ("#f2cc60", "#633c01"),
    12: ("#a5d6ff", "#0a3069"), 13: ("#e2c5ff", "#6639ba"), 14: ("#b3f0ff", "#1b7c83"),
}  # fmt: skip


def _svg(scenes: Sequence[tuple[Frame, float]]) -> str:
    total = sum(seconds for _, seconds in scenes)
    lines: dict[tuple[Piece, ...], str] = {}
    groups, rules, at = [], [], 0.0
    for number, (frame, seconds) in enumerate(scenes):
        uses = []
        for y, line in enumerate(frame):
            if not any(text.strip() for text, _ in line):
                continue
            name = lines.setdefault(line, f"l{len(lines)}")
            uses.append(f'<use href="#{name}" y="{y * _CELL[1]}"/>')
        groups.append(f'<g class="f f{number}">{"".join(uses)}</g>')
        rules.append(_visible(number, at / total, (at + seconds) / total))
        at += seconds
    width = round(_SIZE[0] * _CELL[0]) + 2 * _MARGIN
    height = _SIZE[1] * _CELL[1] + 2 * _MARGIN
    defs = "".join(_line(name, line) for line, name in lines.items())
    title = "Two minutes of dynctl demo --keep --load, dynctl top, dynctl decisions and dynctl why"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{title}</title>\n<style>{_style(total)}{''.join(rules)}</style>\n"
        f'<rect class="bg" width="{width}" height="{height}" rx="8"/>\n<defs>{defs}</defs>\n'
        f'<g transform="translate({_MARGIN} {_MARGIN + _CELL[1] - 4})">\n'
        + "\n".join(groups)
        + "\n</g>\n</svg>\n"
    )


def _visible(number: int, begin: float, end: float) -> str:
    """The rule that shows a frame for its share of the time."""
    first, last = f"{begin * 100:.3f}%", f"{end * 100:.3f}%"
    before = "" if begin == 0 else "0%{opacity:0}"
    after = "" if end >= 0.99999 else f"{last}{{opacity:0}}"
    return (
        f"@keyframes k{number}{{{before}{first}{{opacity:1}}{after}}}"
        f".f{number}{{animation-name:k{number}}}"
    )


def _style(total: float) -> str:
    dark = "".join(f".c{n}{{fill:{c[0]}}}" for n, c in _COLOURS.items())
    light = "".join(f".c{n}{{fill:{c[1]}}}" for n, c in _COLOURS.items())
    return (
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;"
        "fill:#e6edf3}.bg{fill:#0d1117}.b{font-weight:700}.d{opacity:.65}.r{text-decoration:"
        f"underline;font-weight:700}}.f{{opacity:0;animation:{total:g}s step-end infinite}}{dark}"
        "@media(prefers-color-scheme:light){.bg{fill:#f6f8fa}text{fill:#1f2328}" + light + "}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none}.f8{opacity:1}}"
    )


def _line(name: str, line: tuple[Piece, ...]) -> str:
    """A line as one text; its pieces have the exact place of their first cell."""
    spans, x = [], 0
    for text, classes in line:
        if text.strip():
            left = len(text) - len(text.lstrip())
            shown = html.escape(text.strip())
            length = len(text.strip())
            width = f' textLength="{length * _CELL[0]:.0f}"' if length > 12 else ""
            kind = f' class="{classes}"' if classes else ""
            spans.append(f'<tspan x="{(x + left) * _CELL[0]:.0f}"{width}{kind}>{shown}</tspan>')
        x += len(text)
    return f'<text id="{name}">{"".join(spans)}</text>'
