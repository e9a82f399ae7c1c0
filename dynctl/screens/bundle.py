"""`bundle`: the files of a bundle, and what is missing."""

from __future__ import annotations

from dynctl.documents.bundle import BundleMember, BundleReport
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, table
from dynctl.screens.numbers import plural

_COLUMNS: list[Column[BundleMember]] = [
    Column("file", "FILE", lambda row: row.file, name=True),
    number_column("bytes", "BYTES", lambda row: row.bytes),
    Column("what", "WHAT", lambda row: row.what, rank=1),
]


def bundle_report(result: BundleReport, canvas: Canvas) -> str:
    """The members, then what is missing and why."""
    text = table(_COLUMNS, result.members, canvas)
    if result.left_out:
        text += "\nunavailable:\n"
        missing = (f"{part.file}: {part.why}" for part in result.left_out)
        text += canvas.paragraphs(missing, first="  ", rest="    ")
    files = plural(len(result.members), "file")
    return text + f"\n{result.path}: {files}, {result.bytes:,} bytes\n"
