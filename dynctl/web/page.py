"""The page as HTML: the documents, columns and texts of ``top``, in templates that escape all.

No text of a document is trusted: names of workers and models, messages and ids are data. Templates
are ours alone, and nothing of a request reaches them but as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from dynctl.base.quantities import percent
from dynctl.documents.route_result import RouteResult
from dynctl.documents.snapshot import (
    Alert,
    DecisionLine,
    DomainRow,
    DomainView,
    Snapshot,
    TopFrame,
)
from dynctl.documents.topology import NO_DOMAIN
from dynctl.documents.workers import WorkerRow
from dynctl.findings.report import CodePage
from dynctl.screens.canvas import Canvas
from dynctl.screens.checks import code_page
from dynctl.screens.columns import Column
from dynctl.screens.decisions import (
    clock,
    decision_columns,
    outcome_text,
    places,
    reason_text,
    refusal,
)
from dynctl.screens.numbers import age, plural
from dynctl.screens.route import ExplainScreen
from dynctl.screens.topology import topology_notes
from dynctl.screens.workers import sort_workers
from dynctl.top.columns import (
    alert_table,
    domain_table,
    generating,
    kv_share,
    why,
    worker_table,
)
from dynctl.top.header import currency, decisions_listed, facts, meter_line, numbers, rate_texts
from dynctl.top.history import History
from dynctl.top.marks import BLOCKS

#: Rows of one view: its cost does not grow with the fleet.
WORKERS: Final = 200
DECISIONS: Final = 60
ALERTS: Final = 100
DOMAINS: Final = 48
#: Characters of a filter, and of one cell.
FILTER: Final = 100
CELL: Final = 300
#: Colours of domains; a further one begins again, its name is beside it.
_COLORS: Final = 8
#: Width of the explain, in characters.
_EXPLAIN: Final = 96
#: Points of a trend, and the seconds of each.
_TREND: Final = 20
_TREND_S: Final = 15.0
_NARROW_RANK: Final = 2
_MIDDLE_RANK: Final = 5

_TEMPLATES: Final = Environment(
    loader=PackageLoader("dynctl.web", "files"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, slots=True)
class View:
    """What a viewer asks for. ``sort``: the key of a column of workers, empty for their order.

    ``text``: a filter of workers and decisions. ``place``: only those of this value of the domain,
    empty for all.
    """

    sort: str = ""
    descending: bool = False
    text: str = ""
    place: str = ""

    @classmethod
    def of(cls, query: Any) -> View:
        """Of a query; what it does not have is not read."""
        text, place = (
            "".join(c for c in query.get(name, "") if c.isprintable()).strip()
            for name in ("q", "domain")
        )
        sort, descending = query.get("sort", "")[:64], query.get("desc") == "1"
        return cls(sort, descending, text[:FILTER], place[:CELL])

    def link(self, **changes: Any) -> str:
        """The address of this view with changes."""
        view = replace(self, **changes)
        query = {
            "sort": view.sort,
            "desc": "1" if view.descending else "",
            "q": view.text,
            "domain": view.place,
        }
        given = {name: value for name, value in query.items() if value}
        return f"/ui?{urlencode(given)}" if given else "/ui"


@dataclass(frozen=True, slots=True)
class Cell:
    """``place``: number of the colour of a domain, None without one."""

    text: str
    right: bool = False
    hide: str = ""
    style: str = ""
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    right: bool
    hide: str
    key: str
    link: str
    sorted: str


@dataclass(frozen=True, slots=True)
class Card:
    """One domain. ``used`` and ``limit``: shares of the KV blocks, None where not known.

    ``link``: the page with its workers and decisions only, or with all if it is ``zoomed``.
    """

    title: str
    model: str
    place: int | None
    state: str
    good: bool
    facts: Sequence[tuple[str, str]]
    used: float | None
    limit: float | None
    bar_text: str
    link: str
    zoomed: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One decision. ``refused``: the reason of a refusal, instead of ``cells``."""

    id: str
    short: str
    link: str
    time: str
    cells: Sequence[tuple[str, str]]
    place: int | None
    refused: str


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    link: str
    level: str
    subject: str
    since: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A rate of the last seconds; ``points``: its last minutes, for a polyline in 100 x 20."""

    text: str
    points: str
    style: str = ""


def rate_tiles(history: History, at: float) -> list[Tile]:
    """The rates of the header of ``top``; empty before they are known."""
    now = history.rates(at)
    if now is None:
        return []
    trend = history.trend(_TREND, _TREND_S, at)
    tiles = []
    for name, text, top in rate_texts(now):
        values = [None if one is None else getattr(one, name) for one in trend]
        style = "warn" if name in ("refused", "errors") and getattr(now, name) else ""
        tiles.append(Tile(text, _points(values, top), style))
    return tiles


def _points(values: Sequence[float | None], top: float | None) -> str:
    """The known values as points; unknown ones are left out."""
    high = max([value for value in values if value is not None], default=0.0)
    high = max(high, top or 0.0) or 1.0
    step = 100 / max(1, len(values) - 1)
    return " ".join(
        f"{place * step:.1f},{19 - 18 * value / high:.1f}"
        for place, value in enumerate(values)
        if value is not None
    )


def page(
    frame: TopFrame, view: View, rates: Sequence[Tile] = (), *, signed_in: bool = False
) -> str:
    """The whole page."""
    snapshot, domains = frame.snapshot, frame.domains
    colors = _colors(domains)
    workers, found, headings = _workers(snapshot, domains.domain, view, colors)
    lines, matching = _decisions(snapshot, domains.domain, view, colors)
    unknown = snapshot.unknown("decisions")
    at = datetime.fromtimestamp(snapshot.at, tz=UTC)
    return _TEMPLATES.get_template("page.html").render(
        title=", ".join(snapshot.header.models[:2]) or "no model",
        facts=_facts(snapshot, domains),
        numbers=numbers(snapshot),
        rates=rates,
        old=currency(snapshot, snapshot.at),
        time=clock(snapshot.at, tenths=False),
        moment=at.isoformat(timespec="seconds"),
        version=snapshot.header.version or "",
        cards=[_card(row, snapshot, domains, view, colors) for row in domains.rows[:DOMAINS]],
        more_domains=max(0, len(domains.rows) - DOMAINS),
        domain=domains.domain,
        notes=[note[:CELL] for note in topology_notes(domains.shown)][:8],
        alerts=[_finding(one, snapshot.at) for one in frame.alerts[:ALERTS]],
        more_alerts=max(0, len(frame.alerts) - ALERTS),
        failing=sum(one.level == "fail" for one in frame.alerts),
        headings=headings,
        workers=workers,
        found=found,
        total=len(snapshot.workers),
        lines=lines,
        line_keys=[key for key, _ in next((one.cells for one in lines), ())],
        matching=matching,
        read=len(snapshot.decisions),
        listed=decisions_listed(snapshot),
        meters=[meter_line(one, BLOCKS, snapshot.at) for one in snapshot.meters[:8]],
        unknown=None if unknown is None else (unknown.unknown, unknown.provide),
        view=view,
        whole=view.link(place=""),
        signed_in=signed_in,
        plural=plural,
    )


def explain_page(result: RouteResult, *, show_all: bool) -> str:
    """A past decision, as ``why`` shows it."""
    text = ExplainScreen(show_all)(result, Canvas(_EXPLAIN, unicode=True))
    return _TEMPLATES.get_template("text.html").render(
        title=f"Decision {result.id}",
        text=text,
        hint=f"dynctl why {result.id}",
        more="" if show_all else f"/ui/decisions/{quote(result.id, safe='')}?all=1",
    )


def finding_page(shown: CodePage) -> str:
    """A code, as ``explain`` shows it."""
    return _TEMPLATES.get_template("text.html").render(
        title=f"{shown.code}: {shown.title}",
        text=code_page(shown, Canvas(_EXPLAIN)),
        hint=f"dynctl explain {shown.code}",
        more="",
    )


def problem_page(title: str, message: str, *, sign_in: bool = False) -> str:
    """Why the page is not shown; with the form for the token where that helps."""
    return _TEMPLATES.get_template("problem.html").render(
        title=title, message=message, sign_in=sign_in
    )


# -- parts -----------------------------------------------------------------------------------------


def _facts(snapshot: Snapshot, domains: DomainView) -> list[str]:
    """As in the header of ``top``, without source and models, which the title has."""
    return facts(snapshot, domains)[2 if snapshot.header.models else 1 :]


def _colors(domains: DomainView) -> dict[str, int]:
    values = sorted({row.value for row in domains.rows if row.value is not None})
    return {value: number % _COLORS for number, value in enumerate(values)}


#: Of the columns of `top`, those that the card shows in another way.
_OF_THE_CARD: Final = ("domain", "model", "kv_share", "state")
#: Names of columns where a card has more room than a table; others have their heading.
_LABELS: Final = {
    "ratio": "Prefill : decode",
    "kv_used": "KV blocks used",
    "prefill_tokens": "Prefill tokens",
    "waiting": "Waiting",
    "crossing": "Left the domain",
}


def _card(
    row: DomainRow, snapshot: Snapshot, domains: DomainView, view: View, colors: dict[str, int]
) -> Card:
    columns = domain_table(domains, snapshot, BLOCKS)
    texts = {column.key: column.cell(row) for column in columns}
    share = kv_share(row)
    limit = snapshot.thresholds.get(row.capacity.model, {}).get("active_decode_blocks_threshold")
    title = NO_DOMAIN if row.value is None else row.value
    several = any(other.capacity.model != row.capacity.model for other in domains.rows)
    zoomed = view.place == title
    shown = [
        column
        for column in columns
        if column.key not in _OF_THE_CARD and not column.wide and texts[column.key] != "-"
    ]
    return Card(
        title,
        row.capacity.model if several else "",
        None if row.value is None else colors.get(row.value),
        texts["state"],
        row.capacity.state == "ok",
        [(_LABELS.get(c.key, c.heading.capitalize()), texts[c.key]) for c in shown],
        share,
        None if limit is None else min(1.0, float(limit)),
        _bar_text(row, limit),
        "" if domains.domain is None else view.link(place="" if zoomed else title),
        zoomed,
    )


def _bar_text(row: DomainRow, limit: float | None) -> str:
    """What the bar of a card shows."""
    share = kv_share(row)
    if share is None:
        return "not reported" if generating(row).ranks else "no worker has KV blocks for answers"
    text = f"{percent(share)} of KV blocks used"
    return text if limit is None else f"{text}, busy above {percent(float(limit))}"


def _hide(column: Column[Any]) -> str:
    """From which width on a column is left out."""
    if column.wide or column.rank > _MIDDLE_RANK:
        return "wide"
    return "middle" if column.rank > _NARROW_RANK or column.key == "index" else ""


def _workers(
    snapshot: Snapshot, domain: str | None, view: View, colors: dict[str, int]
) -> tuple[list[list[Cell]], int, list[Heading]]:
    """The rows that are shown, the number that match, and the headings."""
    columns = worker_table(snapshot)
    rows = [
        row
        for row in sort_workers(snapshot.workers, domain)
        if (not view.place or _in(view.place, domain, row.domains))
        and (not view.text or view.text.lower() in _words(row))
    ]
    chosen = next((column for column in columns if column.key == view.sort), None)
    if chosen is not None:
        rows = _sorted(rows, chosen, descending=view.descending)
    every = snapshot.load_every_s
    shown = [
        [_worker_cell(column, row, every, colors) for column in columns] for row in rows[:WORKERS]
    ]
    return shown, len(rows), [_heading(column, view) for column in columns]


def _sorted(
    rows: Sequence[WorkerRow], column: Column[WorkerRow], *, descending: bool
) -> list[WorkerRow]:
    """Rows by the values of a column; those without a value come last."""
    known = [row for row in rows if column.value(row) is not None]
    known.sort(key=lambda row: _sortable(column.value(row)), reverse=descending)
    return [*known, *(row for row in rows if column.value(row) is None)]


def _heading(column: Column[WorkerRow], view: View) -> Heading:
    """A heading whose link sorts by the column; a second one reverses the order."""
    sorts = column.key == view.sort
    # Numbers are of interest from the highest on.
    descending = not view.descending if sorts else column.right
    order = "descending" if view.descending else "ascending"
    return Heading(
        column.heading.capitalize(),
        column.right,
        _hide(column),
        column.key,
        view.link(sort=column.key, descending=descending),
        order if sorts else "",
    )


def _in(place: str, domain: str | None, domains: Mapping[str, str]) -> bool:
    return domain is not None and domains.get(domain, NO_DOMAIN) == place


def _sortable(value: Any) -> tuple[int, Any]:
    """Values of one column may be of several types."""
    if isinstance(value, bool | int | float):
        return 0, value
    return 1, str(value)


def _words(row: WorkerRow) -> str:
    places = [f"{name}={value}" for name, value in row.domains.items()]
    busy = ["busy"] if row.busy else []
    return " ".join([row.name, row.model, row.role, row.status, *busy, *places]).lower()


def _worker_cell(
    column: Column[WorkerRow], row: WorkerRow, every_s: float | None, colors: dict[str, int]
) -> Cell:
    text = column.cell(row)[:CELL]
    style, place = "", None
    if column.key == "status":
        style = "bad" if row.status != "ready" else "warn" if row.busy else "good"
    elif column.key == "name":
        style = "name"
    elif column.key == "why" and why(row, every_s):
        style = "why"
    elif column.key.startswith("domain"):
        place = colors.get(text)
    return Cell(text, column.right, _hide(column), style, place)


def _decisions(
    snapshot: Snapshot, domain: str | None, view: View, colors: dict[str, int]
) -> tuple[list[Line], int]:
    """The newest that match, and the number of them."""
    lines: Sequence[DecisionLine] = snapshot.decisions
    if view.place:
        lines = [line for line in lines if _touches(view.place, domain, line)]
    if view.text:
        wanted = view.text.lower()
        lines = [line for line in lines if wanted in _decision_words(line)]
    shown = lines[:DECISIONS]
    columns = {column.key: column for column in decision_columns(shown, None)}
    return [_line(line, columns, domain, colors) for line in shown], len(lines)


def _touches(place: str, domain: str | None, line: DecisionLine) -> bool:
    """Whether a worker of the decision is in the place."""
    hops = ((line.prefill, line.prefill_domains), (line.decode, line.domains))
    return any(ref is not None and _in(place, domain, domains) for ref, domains in hops)


def _decision_words(line: DecisionLine) -> str:
    words = [line.id, line.model or "", refusal(line) if line.refused else "selected"]
    words += [ref.worker for ref in (line.prefill, line.decode) if ref is not None]
    words += [outcome_text(line), line.response.state]
    for domains in (line.prefill_domains, line.domains):
        words += [f"{name}={value}" for name, value in domains.items()]
    return " ".join(words).lower()


_CELLS: Final = ("prefill", "decode", "cached", "cost", "outcome")


def _line(
    line: DecisionLine,
    columns: dict[str, Column[DecisionLine]],
    domain: str | None,
    colors: dict[str, int],
) -> Line:
    cells = [(key, columns[key].cell(line)[:CELL]) for key in _CELLS]
    if domain is not None:
        cells.insert(0, ("domain", places(line, domain)[:CELL]))
    cells.append(("why", reason_text(line)[:CELL]))
    return Line(
        line.id,
        columns["id"].cell(line),
        f"/ui/decisions/{quote(line.id, safe='')}" if line.complete else "",
        columns["at"].cell(line),
        cells,
        None if domain is None else colors.get(line.domains.get(domain, "")),
        refusal(line)[:CELL] if line.refused else "",
    )


def _finding(alert: Alert, now: float) -> Finding:
    columns = {column.key: column for column in alert_table(now)}
    since = "" if alert.since is None else age(now - alert.since)
    return Finding(
        alert.code,
        f"/ui/codes/{quote(alert.code, safe='')}",
        alert.level,
        alert.subject[:CELL],
        since,
        columns["message"].cell(alert)[: 2 * CELL],
        alert.fix[: 2 * CELL],
    )
