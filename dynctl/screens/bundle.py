"""`bundle`: the files of a bundle, and what is missing."""

from __future__ import annotations

from dynctl.documents.bundle import BundleMember, BundleReport
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, table
from dynctl.screens.numbers import plural

_COLUMNS: list[Column[BundleMember]] = [
    Column("file", "FILE", lambda one: one.file, name=True),
    number_column("bytes", "BYTES", lambda one: one.bytes),
    Column("what", "WHAT", lambda one: one.what, rank=1),
]


def bundle_report(result: BundleReport, canvas: Canvas) -> str:
    """The members, then what is missing and why."""
    text = table(_COLUMNS, result.members, canvas)
    if result.left_out:
        text += "\nunavailable:\n"
        for one in result.left_out:
            lines = canvas.paragraph(f"{one.file}: {one.why}", first="  ", rest="    ")
            text += "".join(f"{line}\n" for line in lines)
    files = plural(len(result.members), "file")
    return text + f"\n{result.path}: {files}, {result.bytes:,} bytes\n"
