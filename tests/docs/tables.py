"""The tables of a page, found by the comment that stands before them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def table(page: Path, name: str, kind: str = "numbers") -> list[list[str]]:
    """The rows, without heading, of the table under ``<!-- kind: name -->``; cells are stripped."""
    text = page.read_text(encoding="utf-8")
    marked = f"<!-- {kind}: {name} -->\n"
    assert text.count(marked) == 1, f"{page.name}: expected one {marked.strip()}"
    rows = []
    for line in text.split(marked)[1].splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
    return rows[2:]


def page_of(pages: Iterable[Path], name: str, kind: str = "numbers") -> Path:
    """The one page that has the table of that name."""
    (page,) = [page for page in pages if name in tables(page, kind)]
    return page


def tables(page: Path, kind: str = "numbers") -> set[str]:
    """The names of all tables of a page."""
    return set(re.findall(rf"^<!-- {kind}: (.+?) -->$", page.read_text(encoding="utf-8"), re.M))
