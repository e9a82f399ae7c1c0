"""`record`: what a recording has."""

from __future__ import annotations

import time
from collections.abc import Iterator

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
        return canvas.paragraphs(f"{result.file}: {note}" for note in result.notes)
    length = result.last - result.first
    text = f"{result.file}: {length:,.1f} s, {result.bytes:,} bytes\n"
    for label, value in _record_lines(result):
        text += canvas.paragraphs([value], first=f"{label:<10}", rest=" " * 10)
    return text


def _record_lines(result: RecordingReport) -> Iterator[tuple[str, str]]:
    yield "from", f"{_time_text(result.first)} to {_time_text(result.last)}"
    yield "source", f"{result.source} {result.router}, dynctl {result.version}"
    yield "models", ", ".join(result.models) or "none"
    counts = [f"{result.records.get(kind, 0):,} {name}" for kind, name in _NAMES.items()]
    others = sum(number for kind, number in result.records.items() if kind not in _NAMES)
    yield "records", ", ".join([*counts, f"{others:,} others"])
    yield "states", f"a router can start at {plural(result.states, 'moment')}"
    if result.missing:
        missing = ", ".join(name.replace("_", " ") for name in result.missing)
        yield "missing", f"{missing}: the source does not give them, or not of every worker"
    if result.conditions:
        codes = (f"{code} {number:,}" for code, number in sorted(result.conditions.items()))
        yield "began", ", ".join(codes)
    yield from (("note", note) for note in result.notes)


def _time_text(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 10)}Z"
