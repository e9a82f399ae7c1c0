"""docs/screens: pictures of real screens, drawn by ``python -m tests.docs.screens`` (`make docs`).

They show what the commands print on a terminal, without the passed checks of `topology verify`.
The dashboard is that of `dynctl top --demo`, at one moment of its own time.
"""

from __future__ import annotations

import asyncio
import html
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from dynctl.base.options import GlobalOptions
from dynctl.screens.canvas import Canvas
from dynctl.screens.render import draw
from dynctl.screens.route import ExplainScreen
from dynctl.sources.demo.fleet import PROMPT, DemoSource
from dynctl.sources.demo.live import LiveDemo
from dynctl.sources.domains import DomainBoard
from dynctl.sources.query import RouteQuery
from dynctl.top.app import TopApp
from dynctl.verify.verification import VerifyOptions, run_verify
from tests.docs.pages import DOCS
from tests.docs.recording import recording
from tests.kube.actors import living
from tests.kube.objects import ZONE

HERE: Final = DOCS / "screens"
_WIDTH: Final = 92
_TOP_SIZE: Final = (120, 36)
#: Seconds of the demo fleet before the picture is taken.
_HISTORY_S: Final = 240
#: 21 November 2026, 12:04:31 UTC.
_NOW: Final = 1_795_262_671.0
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.S)


def route_explain() -> str:
    """A prompt's two hops on the embedded fleet."""
    result = DemoSource().route(RouteQuery(messages=[{"role": "user", "content": PROMPT}]))
    screen = ExplainScreen()(result, Canvas(_WIDTH, color=True))
    return _picture(f'dynctl route --demo --explain "{PROMPT}"', screen)


def topology_verify() -> str:
    """A cluster after one node was relabelled."""
    with living() as sim, tempfile.TemporaryDirectory() as directory:
        node = sim.pod("my-llm-decode-b-0")["spec"]["nodeName"]
        sim.edit("Node", node, {"metadata": {"labels": {ZONE: "us-east-1c"}}}, namespace="")
        sim.settle()
        kubeconfig = sim.viewer_kubeconfig(Path(directory, "kubeconfig"))
        everything = VerifyOptions(exec="all", logs="all")
        report = run_verify(GlobalOptions(kubeconfig=kubeconfig), everything)
    screen = draw(report, Canvas(_WIDTH, color=True))
    plain = Text.from_ansi(screen).plain.splitlines()
    lines = screen.splitlines()
    first = next(place for place, line in enumerate(plain) if line.startswith("FAIL"))
    last = next(
        place for place, line in enumerate(plain) if place > first and not line.startswith(" ")
    )
    chain = next(place for place, line in enumerate(plain) if line.startswith("chain of custody"))
    shown = ["...", *lines[first:last], "...", "", *lines[chain:]]
    return _picture("dynctl topology verify -n prod --exec all --logs all", "\n".join(shown))


def top() -> str:
    """The dashboard over the embedded fleet, after some minutes under load."""

    async def run() -> str:
        passed = [0.0]
        source = LiveDemo(clock=lambda: passed[0], wall=lambda: _NOW + passed[0])
        async with source:
            app = TopApp(source, wall=lambda: _NOW + passed[0], rate=3600.0)
            # Its own time: on a busy machine the board would keep numbers longer.
            app._board = DomainBoard(lambda: passed[0])
            async with app.run_test(size=_TOP_SIZE) as pilot:
                while app.snapshot is None:
                    await pilot.pause(0.01)
                app.rate = 1.0  # as it is shown; the readings are taken below
                for _ in range(_HISTORY_S // 2):
                    passed[0] += 2.0
                    app.take(await source.snapshot())
                await pilot.pause()
                return app.export_screenshot(title="dynctl top --demo")

    return _without_fonts(asyncio.run(run()))


SCREENS: Final[Mapping[str, Callable[[], str]]] = {
    "route-explain": route_explain,
    "topology-verify": topology_verify,
    "top": top,
    "demo": lambda: recording(_NOW),
}


def words(svg: str) -> list[str]:
    """The text of a picture, piece by piece."""
    pieces = re.findall(r"<text[^>]*>(.*?)</text>", svg, flags=re.S)
    found = (html.unescape(piece).replace("\xa0", " ").strip() for piece in pieces)
    return [piece for piece in found if piece]


def _picture(command: str, screen: str) -> str:
    console = Console(
        width=_WIDTH,
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    console.print(Text(f"$ {command}"), soft_wrap=True)
    console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=True)
    name = re.sub(r"\W+", "-", command)[:24]
    return _without_fonts(console.export_svg(title="dynctl", unique_id=name))


def _without_fonts(svg: str) -> str:
    """Pictures fetch nothing: the font is the reader's own."""
    return _FONT.sub("", svg).replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    HERE.mkdir(exist_ok=True)
    for name, picture in SCREENS.items():
        (HERE / f"{name}.svg").write_text(picture(), encoding="utf-8")
