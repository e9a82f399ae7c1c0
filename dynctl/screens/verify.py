"""`topology verify`: the checks, and each worker's chain of custody with its first break.

Workers with the same chain share a line, so that a different one stands out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from dynctl.documents.verify import (
    CellState,
    ChainCell,
    CustodyRow,
    PlannedRequest,
    VerifyPlan,
    VerifyReport,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.checks import join_lines, report_sections, section_heading, sums
from dynctl.screens.columns import GAP, Column, Fitted, fit, table, visible
from dynctl.screens.numbers import middle, plural

_OK: Final = "ok"
_DIFFERS: Final = "!="
_MISSING: Final = "(none)"
_FOLLOWS: Final = "."
_UNKNOWN: Final = "?"
_EMPTY: Final = '""'
_LEGEND: Final = {
    _OK: "same as the link before",
    _DIFFERS: "different value",
    _MISSING: "no value",
    _FOLLOWS: "no further difference",
}
_HEADINGS: Final = ("NODE", "LABEL", "FILE", "CARD", "TAINT", "ROUTER")
_DIFFERENCE: Final = re.compile(r"(?<=\s)(!=\S+|\(none\))")
_NARROWEST: Final = 6
_NARROWEST_NAME: Final = 7
_CODE: Final = len("DYT0404 +1")
#: Minimum width of links and codes with their gaps: values are shortened before names.
_CELLS_TAKE: Final = 6 * (_NARROWEST + GAP) + _CODE
_NAMED_ALIKE: Final = 3
_MOST_LINES: Final = 40
_MOST_REASONS: Final = 4
_VALUES_SHOWN: Final = 2


class LinkText(Enum):
    """The text of a link that has the same value as the link before it.

    ``VALUES``: its value. ``FIRST``: the value for the first link, then ok. ``BROKEN``: as FIRST in
    broken chains, otherwise ok for every link.
    """

    VALUES = auto()
    FIRST = auto()
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class ChainLine:
    """One line of the table: ``count`` workers with the same chain.

    ``cells``: a text per link, in order. ``quiet``: workers without a break or finding.
    """

    worker: str
    graph: str
    component: str
    role: str
    value: str
    cells: tuple[str, ...]
    codes: str
    count: int = 1
    quiet: bool = False


def verify_report(report: VerifyReport, canvas: Canvas) -> str:
    """All checks, the table of workers, then the totals."""
    lines = [
        *report_sections(report, canvas),
        *_chain(report.chain, canvas),
        "",
        *sums(report, canvas),
    ]
    return join_lines(lines)


def verify_plan(plan: VerifyPlan, canvas: Canvas) -> str:
    """What verify would ask, a line for each kind of request, and the options that leave it out."""
    columns: list[Column[PlannedRequest]] = [
        Column("request", "REQUEST", lambda row: row.request),
        Column("what", "OF", lambda row: row.what),
        Column("namespace", "NAMESPACE", lambda row: row.namespace or "-", name=True),
        Column("count", "NUMBER", lambda row: f"{row.count:,}", right=True),
        Column("pods", "PODS", lambda row: f"{row.pods:,}" if row.pods else "-", right=True),
        Column("names", "NAMES", _first_of_names, wide=True, sentence=True),
    ]
    lines = [
        f"{plan.cluster}: the lists were read, no pod was entered",
        "",
        *table(columns, plan.requests, canvas).splitlines(),
        "",
        *canvas.paragraph(_PLAN_NOTE, first="", rest=""),
    ]
    return join_lines(lines)


def _first_of_names(row: PlannedRequest) -> str:
    more = f" and {row.pods - len(row.names):,} more" if row.pods > len(row.names) else ""
    return ", ".join(row.names) + more or "-"


_PLAN_NOTE: Final = (
    "No exec: --exec none, or of a few pods: --exec sample. No logs: --logs none. No port-forward: "
    "--frontend URL. A frontend that responds at its pod's address gets no port-forward either. "
    "Directories with more files than domains get more execs of cat. -o wide names the pods."
)


def _chain(rows: Sequence[CustodyRow], canvas: Canvas) -> Iterator[str]:
    if not rows:
        return
    domains = {row.domain for row in rows if row.domain}
    domain = domains.pop() if len(domains) == 1 else ""
    title = f"chain of custody: {domain}" if domain else "chain of custody"
    yield from section_heading(middle(title, canvas.screen_width), canvas)
    shown, fitted = _drawing(rows, domain, canvas)
    if canvas.headings:
        yield canvas.faint(fitted.heading())
    for line in shown:
        text = fitted.line(line)
        yield canvas.faint(text) if line.quiet else _mark_difference(text, canvas)
    hidden = len(rows) - sum(line.count for line in shown)
    if hidden:
        yield f"and {plural(hidden, 'more worker')} with a difference (-o wide shows all)"
    yield from _legend(rows, shown, canvas)


def _mark_difference(text: str, canvas: Canvas) -> str:
    """A line with its first difference in bold."""
    return _DIFFERENCE.sub(lambda match: canvas.bold(match[0]), text, count=1)


def _drawing(
    rows: Sequence[CustodyRow], domain: str, canvas: Canvas
) -> tuple[Sequence[ChainLine], Fitted[ChainLine]]:
    """The most detailed lines that fit, else the shortest ones, cut."""
    shown: Sequence[ChainLine] = ()
    fitted: Fitted[ChainLine] = Fitted((), ())
    for shown in _ways(rows, domain, canvas.wide):
        columns = list(_columns(shown, domain, canvas))
        fitted = fit(visible(columns, wide=canvas.wide, width=canvas.width), shown, canvas.width)
        if not _is_cut(fitted, shown):
            break
    return shown, fitted


def _ways(rows: Sequence[CustodyRow], domain: str, wide: bool) -> Iterator[Sequence[ChainLine]]:
    """Candidates from detailed to short: values with ``-o wide``, else marks; each with full names
    and with the graph's name left out."""
    for links in (LinkText.VALUES, LinkText.FIRST) if wide else (LinkText.BROKEN,):
        lines = _lines(rows, domain, links)
        shown = lines if wide else _limit_lines(lines)
        yield shown
        yield _without_graph(rows, shown)


def _is_cut(fitted: Fitted[ChainLine], lines: Sequence[ChainLine]) -> bool:
    cells = {heading.lower() for heading in _HEADINGS} | {"worker"}
    return any(
        len(column.cell(line)) > width
        for column, width in zip(fitted.columns, fitted.widths, strict=True)
        if column.key in cells
        for line in lines
    )


def _columns(
    lines: Sequence[ChainLine], domain: str, canvas: Canvas
) -> Iterator[Column[ChainLine]]:
    """The columns; cells may be shortened, since the findings above have the full values."""
    longest = max((len(line.worker) for line in lines), default=0)
    yield Column(
        "worker",
        "WORKER",
        lambda r: r.worker,
        name=True,
        shortest=max(_NARROWEST_NAME, min(longest, canvas.screen_width - _CELLS_TAKE)),
    )
    if len({line.graph for line in lines if line.graph}) > 1:
        yield Column("graph", "GRAPH", lambda r: r.graph, rank=4, wide=True, name=True)
    yield Column("component", "COMPONENT", lambda r: r.component, rank=3, wide=True, name=True)
    yield Column("role", "ROLE", lambda r: r.role, rank=2, wide=True)
    if not canvas.wide:
        yield Column("value", (domain or "domain").upper(), lambda r: r.value, rank=1, wide=True)
    for place, heading in enumerate(_HEADINGS):
        yield _cell_column(place, heading)
    yield Column("codes", "CODE", lambda r: r.codes, name=True, shortest=_CODE)


def _cell_column(place: int, heading: str) -> Column[ChainLine]:
    def text(line: ChainLine) -> str:
        return line.cells[place]

    return Column(heading.lower(), heading, text, name=True, shortest=_NARROWEST)


# -- lines -----------------------------------------------------------------------------------------


def _lines(rows: Sequence[CustodyRow], domain: str, links: LinkText) -> list[ChainLine]:
    """Workers with a broken chain, then those with a finding, then the others; grouped unless
    values are shown."""
    several = len({row.namespace for row in rows}) > 1
    if links is not LinkText.BROKEN:
        return [_line([row], _name(row, several), domain, links) for row in rows]
    groups: dict[tuple[tuple[str, ...], str], list[CustodyRow]] = defaultdict(list)
    for row in rows:
        groups[_marks(row, links), _codes(row, links)].append(row)
    lines: list[ChainLine] = []
    for alike in sorted(groups.values(), key=lambda group: _trouble(group[0])):
        named = 0 if _is_sound(alike[0]) else _NAMED_ALIKE
        if len(alike) <= named + 1:
            named = len(alike)
        lines += [_line([row], _name(row, several), domain, links) for row in alike[:named]]
        rest = alike[named:]
        if rest:
            text = f"{len(rest):,} more" if lines else plural(len(rest), "worker")
            lines.append(_line(rest, text, domain, links))
    return lines


def _limit_lines(lines: Sequence[ChainLine]) -> list[ChainLine]:
    """At most _MOST_LINES lines of workers with a break or finding, and all other lines."""
    troubled = [line for line in lines if not line.quiet]
    return [*troubled[:_MOST_LINES], *(line for line in lines if line.quiet)]


def _without_graph(rows: Sequence[CustodyRow], lines: Sequence[ChainLine]) -> list[ChainLine]:
    """Names without the graph's name if all workers belong to graphs of that name."""
    graphs = {row.graph.rpartition("/")[2] for row in rows}
    start = f"{graphs.pop()}-" if len(graphs) == 1 else "-"
    if start == "-" or not all(row.worker.startswith(start) for row in rows):
        return list(lines)
    return [replace(line, worker=_shorter(line.worker, start)) for line in lines]


def _shorter(name: str, start: str) -> str:
    return f"..{name.removeprefix(start)}" if name.startswith(start) else name


def _trouble(row: CustodyRow) -> int:
    """0: broken chain, 1: a finding, 2: neither."""
    return 0 if row.first_break is not None else 1 if row.codes else 2


def _is_sound(row: CustodyRow) -> bool:
    return _trouble(row) == 2


def _name(row: CustodyRow, several: bool) -> str:
    return f"{row.worker}.{row.namespace}" if several and row.namespace else row.worker


def _line(rows: Sequence[CustodyRow], name: str, domain: str, links: LinkText) -> ChainLine:
    values = (_value(row, domain) for row in rows)
    return ChainLine(
        name,
        _few((row.graph for row in rows), "graph"),
        _few((row.component for row in rows), "component"),
        _few((row.role or "?" for row in rows), "role"),
        _few(values, "value"),
        _marks(rows[0], links),
        _codes(rows[0], links),
        len(rows),
        _is_sound(rows[0]),
    )


def _few(values: Iterable[str], noun: str) -> str:
    """One or two values, or their number."""
    distinct = sorted({value for value in values if value})
    if len(distinct) > _VALUES_SHOWN:
        return plural(len(distinct), noun)
    return ", ".join(distinct) or "-"


def _value(row: CustodyRow, domain: str) -> str:
    """The domain value of the first link that has one."""
    value = next((cell.value for cell in row.cells.values() if cell.value is not None), None)
    if value is None:
        return ""
    shown = value or _EMPTY
    return shown if domain or not row.domain else f"{row.domain}={shown}"


def _codes(row: CustodyRow, links: LinkText) -> str:
    if not row.codes:
        return "" if row.first_break is None else "-"
    if links is LinkText.VALUES:
        return " ".join(row.codes)
    more = len(row.codes) - 1
    return f"{row.codes[0]} +{more}" if more else row.codes[0]


def _marks(row: CustodyRow, links: LinkText) -> tuple[str, ...]:
    """The text of each link."""
    first = next((name for name, cell in row.cells.items() if cell.value is not None), None)
    shows_first = links is LinkText.FIRST or row.first_break is not None
    broken = False
    marks = []
    for name, cell in row.cells.items():
        broken = broken or name == row.first_break
        shows_value = links is LinkText.VALUES or (shows_first and name == first)
        marks.append(_mark(cell, shows_value=shows_value, broken=broken))
    return tuple(marks)


def _mark(cell: ChainCell, *, shows_value: bool, broken: bool) -> str:
    """The text of a link. ``broken``: whether the chain breaks there or before."""
    if cell.state is CellState.UNKNOWN:
        return _UNKNOWN
    if cell.value is None:
        return _MISSING if cell.state is CellState.MISSING else _FOLLOWS
    if cell.state is CellState.DIFFERS:
        return _DIFFERS + (cell.value or _EMPTY)
    if shows_value:
        return cell.value or _EMPTY
    return _FOLLOWS if broken else _OK


# -- legend ----------------------------------------------------------------------------------------


def _legend(
    rows: Sequence[CustodyRow], shown: Sequence[ChainLine], canvas: Canvas
) -> Iterator[str]:
    """The meaning of the marks in use, if any chain is broken, and why links are unknown."""
    used = {_DIFFERS if _is_difference(mark) else mark for line in shown for mark in line.cells}
    if used - {_OK, _UNKNOWN} and not all(map(_is_sound, rows)):
        marks = (f"{mark}: {means}" for mark, means in _LEGEND.items() if mark in used)
        yield from canvas.paragraph("; ".join(marks), first="", rest="  ")
    reasons = list(_reasons(rows))
    if reasons:
        more = len(reasons) - _MOST_REASONS
        text = "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
        yield from canvas.paragraph(f"{_UNKNOWN}: unknown: {text}", first="", rest="  ")


def _is_difference(mark: str) -> bool:
    return mark.startswith(_DIFFERS)


def _reasons(rows: Sequence[CustodyRow]) -> Iterator[str]:
    """Why links are unknown, the most frequent reason first."""
    counted = Counter(
        (cell.why, name)
        for row in rows
        for name, cell in row.cells.items()
        if cell.state is CellState.UNKNOWN
    )
    links: dict[tuple[str, int], list[str]] = defaultdict(list)
    for (why, name), count in counted.items():
        links[why, count].append(name)
    for (why, count), named in sorted(links.items(), key=lambda item: -item[0][1]):
        of = "" if count == len(rows) else f" of {plural(count, 'worker')}"
        what = "all links" if len(named) == len(_HEADINGS) else ", ".join(named)
        yield f"{what}{of} ({why})"
