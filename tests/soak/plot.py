"""Series over time as one SVG: a panel each, with its range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_WIDTH: Final = 720
_PANEL: Final = 90
_LEFT: Final = 150
_POINTS: Final = 400


@dataclass(frozen=True)
class Series:
    """A name, its unit and values at equal distances in time."""

    name: str
    unit: str
    values: list[float]


def plot(series: list[Series], minutes: float) -> str:
    """The SVG; each panel starts at zero."""
    height = _PANEL * len(series) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, one in enumerate(series):
        lines += _panel(one, number * _PANEL)
    lines.append(f'<text x="{_LEFT}" y="{height - 10}">0</text>')
    lines.append(
        f'<text x="{_WIDTH - 10}" y="{height - 10}" text-anchor="end">{minutes:g} minutes</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def _panel(one: Series, top: int) -> list[str]:
    most = max(one.values, default=0.0) or 1.0
    step = max(1, len(one.values) // _POINTS)
    values = [max(one.values[at : at + step]) for at in range(0, len(one.values), step)]
    wide = (_WIDTH - _LEFT - 10) / max(1, len(values) - 1)
    tall = _PANEL - 20
    points = " ".join(
        f"{_LEFT + at * wide:.1f},{top + 10 + tall * (1 - value / most):.1f}"
        for at, value in enumerate(values)
    )
    unit = f" {one.unit}" if one.unit else ""
    return [
        f'<text x="10" y="{top + 30}">{one.name}</text>',
        f'<text x="10" y="{top + 48}" fill="#666">last {one.values[-1]:,.5g}{unit}</text>',
        f'<text x="10" y="{top + 66}" fill="#666">most {most:,.5g}{unit}</text>',
        f'<line x1="{_LEFT}" y1="{top + 10 + tall}" x2="{_WIDTH - 10}" y2="{top + 10 + tall}" '
        'stroke="#ccc"/>',
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="1.5"/>',
    ]
