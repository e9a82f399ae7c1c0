"""`record`: what a recording has."""

from __future__ import annotations

import time

from dynctl.documents.recording import RecordingReport
from dynctl.screens.canvas import Canvas
from dynctl.screens.numbers import plural

#: Shown first, under these names; then the other kinds by their own.
_NAMES = {
    "Arrived": "requests",
    "Decided": "decisions",
    "Finished": "ends of requests",
    "KvEvent": "KV events",
    "LoadReported": "load reports",
    "Booked": "bookings",
}


def recording_report(result: RecordingReport, canvas: Canvas) -> str:
    """Range, source, counts, and what is missing."""
    if not result.last:
        return "".join(
            f"{line}\n"
            for note in result.notes
            for line in canvas.paragraph(f"{result.file}: {note}", first="", rest="  ")
        )
    length = result.last - result.first
    lines = [
        f"{result.file}: {length:,.1f} s, {result.bytes:,} bytes",
        f"from      {_at(result.first)} to {_at(result.last)}",
        f"source    {result.source} {result.router}, dynctl {result.version}",
        f"models    {', '.join(result.models) or 'none'}",
    ]
    shown = [f"{result.records.get(kind, 0):,} {name}" for kind, name in _NAMES.items()]
    others = sum(n for kind, n in result.records.items() if kind not in _NAMES)
    lines += canvas.paragraph(
        ", ".join([*shown, f"{others:,} others"]), first="records   ", rest="          "
    )
    states = plural(result.states, "moment")
    lines.append(f"states    a router can start at {states}")
    if result.missing:
        text = ", ".join(name.replace("_", " ") for name in result.missing)
        lines += canvas.paragraph(
            f"{text}: this source does not give them", first="missing   ", rest="          "
        )
    if result.conditions:
        text = ", ".join(f"{code} {n:,}" for code, n in sorted(result.conditions.items()))
        lines += canvas.paragraph(text, first="began     ", rest="          ")
    for note in result.notes:
        lines += canvas.paragraph(note, first="note      ", rest="          ")
    return "\n".join(lines) + "\n"


def _at(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 10)}Z"
