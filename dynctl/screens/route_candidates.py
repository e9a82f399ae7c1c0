"""The table of a hop's candidates in the explain screen: scored ranks, then rejected ones.

All hops share columns and widths, so that zones and costs are aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from dynctl.base.quantities import percent
from dynctl.documents.route_result import (
    CandidateRow,
    DecisionResult,
    RejectedRow,
    RouteResult,
    Term,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.cells import padded
from dynctl.screens.columns import Column, Fitted, fit, number_column
from dynctl.screens.numbers import amount, blocks, count, middle, plural
from dynctl.screens.route_sentences import (
    credits_overlap,
    has_ranks,
    primary_domain,
    rank_name,
    short_taints,
)
from router_core import TERM_BY_NAME, TERMS

#: Filters whose rejections are not listed: the funnel line shows them sufficiently.
QUIET = ("model", "role")
_INDENT = "  "
_BAR_CELLS = 12
#: Characters of a bar for prefill, decode and other terms.
_BAR_ASCII = "#=+"
_BAR_BLOCKS = "█▒░"


@dataclass(frozen=True, slots=True)
class _Line:
    """A candidate, with the lowest and highest cost of its hop for comparison."""

    row: CandidateRow
    best: float | None = None
    worst: float = 0.0
    ranked: bool = False
    terms: tuple[Term, ...] = ()

    counted: bool = False
    modelled: bool = True

    @property
    def scored_cache(self) -> bool:
        """Whether cached blocks are part of the cost."""
        return self.counted or any(term.name == "prefill_blocks" for term in self.terms)


@dataclass(frozen=True, slots=True)
class HopTable:
    """The layout that all hops of one result share."""

    fitted: Fitted[_Line]
    canvas: Canvas
    domain: str | None
    limit: int | None
    blocks: int

    @classmethod
    def of(
        cls,
        result: RouteResult,
        hops: Sequence[DecisionResult],
        canvas: Canvas,
        limit: int | None,
    ) -> HopTable:
        lines = [line for hop in hops for line in _lines(hop, limit)]
        domain = primary_domain(result)
        columns = _columns(result, hops, canvas, domain)
        width = canvas.screen_width - len(_INDENT) - 2
        # Rejected workers use the same first columns, so their names count for the widths.
        rejected = [
            _as_line(row, has_ranks(hop))
            for hop in hops
            for row in _shown_rejections(hop, limit) or ()
        ]
        return cls(fit(columns, [*lines, *rejected], width), canvas, domain, limit, result.blocks)

    def lines(self, hop: DecisionResult) -> list[str]:
        """Heading, candidates and rejections of one hop."""
        drawn: list[str] = []
        rows = _lines(hop, self.limit)
        if rows:
            drawn.append(self.canvas.faint(f"{_INDENT}  {self.fitted.heading()}"))
        tied = {(ref.worker_id, ref.dp_rank) for ref in hop.tied}
        for line in rows:
            key = (line.row.worker_id, line.row.dp_rank)
            won = hop.winner is not None and key == (hop.winner.worker_id, hop.winner.dp_rank)
            mark = ">" if won else "=" if key in tied else " "
            text = f"{_INDENT}{mark} {self.fitted.line(line)}"
            drawn.append(self.canvas.bold(text) if won else text)
        left = len(hop.candidates) - len(rows)
        if left:
            costs = sorted(row.cost for row in hop.candidates)
            drawn.append(
                f"{_INDENT}  and {left:,} more up to cost {blocks(costs[-1])} (--all lists them)"
            )
        unkept = hop.funnel[-1].left - len(hop.candidates) if hop.funnel and rows else 0
        if unkept > 0:
            drawn.append(f"{_INDENT}  and {unkept:,} more, not recorded")
        return drawn + [self.canvas.faint(line) for line in self._rejections(hop)]

    def _rejections(self, hop: DecisionResult) -> list[str]:
        shown = _shown_rejections(hop, self.limit)
        room = self.canvas.screen_width
        if shown is None:
            return [_cut(f"{_INDENT}x {text}", room) for text in _grouped(hop)]
        lines = []
        for row in shown:
            cells = [rank_name(row, has_ranks(hop))]
            if self.domain is not None:
                cells.append(row.domains.get(self.domain, "-"))
            start = f"{_INDENT}x {self._padded(cells)}"
            lines.append(start + _squeezed(_reason(row), room - len(start)))
        return lines

    def _padded(self, cells: list[str]) -> str:
        parts = []
        for cell, width in zip(cells, self.fitted.widths, strict=False):
            parts.append(padded(middle(cell, width), width))
        return "  ".join(parts) + "  "


def _columns(
    result: RouteResult, hops: Sequence[DecisionResult], canvas: Canvas, domain: str | None
) -> list[Column[_Line]]:
    rows = [row for hop in hops for row in hop.candidates]
    roomy = canvas.wide or canvas.screen_width >= 110
    columns: list[Column[_Line]] = [
        Column(
            "worker",
            "worker",
            lambda line: line.row.worker,
            text=lambda line: rank_name(line.row, line.ranked),
            name=True,
        )
    ]
    domains = [domain] if domain is not None else []
    others = sorted({name for row in rows for name in row.domains} - set(domains))
    for name in [*domains, *others]:
        columns.append(_domain_column(name, 0 if name == domain else 9))
    if any(hop.devices is not UNSET for hop in hops):
        columns.append(
            Column(
                "device",
                "device",
                lambda line: None if line.row.device is UNSET else line.row.device,
                text=lambda line: "-" if line.row.device is UNSET else line.row.device,
                rank=1,
            )
        )
    columns += _term_columns(result, hops)
    preferred = any(row.multiplier != 1.0 for row in rows)
    if preferred:
        columns.append(
            Column(
                "multiplier",
                "x pref",
                lambda line: line.row.multiplier,
                text=lambda line: f"{line.row.multiplier:.3f}",
                right=True,
                rank=1,
            )
        )
    columns.append(Column("cost", "cost", lambda line: line.row.cost, form=blocks, right=True))
    columns.append(
        Column(
            "behind",
            "behind",
            lambda line: line.row.cost - (line.best or 0.0),
            text=_behind,
            right=True,
            rank=4,
        )
    )
    if any(hop.temperature > 0 or hop.drawn is not UNSET for hop in hops):
        columns.append(
            Column(
                "probability",
                "chance",
                lambda line: line.row.probability,
                text=lambda line: percent(line.row.probability, 1),
                right=True,
                rank=2,
            )
        )
    if result.mode == "kv":
        more = any(row.following is not UNSET or "transfer" in row.terms for row in rows)
        columns.append(_bar_column(_BAR_BLOCKS if canvas.unicode else _BAR_ASCII, more))
    if roomy:
        columns += _roomy_columns()
    return columns


def _term_columns(result: RouteResult, hops: Sequence[DecisionResult]) -> list[Column[_Line]]:
    names = list(dict.fromkeys(term.name for hop in hops for term in hop.terms))
    if result.mode != "kv":
        return [_term_column(name, 1) for name in names]
    columns: list[Column[_Line]] = [
        Column(
            "overlap_blocks",
            "cached",
            lambda line: line.row.overlap_blocks,
            text=_cached,
            right=True,
        ),
        *(
            _tier_column(name, heading)
            for name, heading, plain in (
                ("predicted_blocks", "predicted", None),
                ("indexed_blocks", "indexed", "overlap_blocks"),
                ("usable_blocks", "reused", "indexed_blocks"),
                ("host_blocks", "host", None),
                ("disk_blocks", "disk", None),
            )
            if any(
                (getattr(row, name) or 0) != ((getattr(row, plain) or 0) if plain else 0)
                for hop in hops
                for row in hop.candidates
            )
        ),
        *(_TRUST if any(row.index != "exact" for hop in hops for row in hop.candidates) else ()),
        *(_term_column(term.name, 0) for term in TERMS if term.ordered),
    ]
    for name in names:
        if name == "transfer":
            columns.append(_TRANSFER)
        elif name not in TERM_BY_NAME or not TERM_BY_NAME[name].ordered:
            columns.append(_term_column(name, 1))
    if any(row.following is not UNSET for hop in hops for row in hop.candidates):
        columns.append(_FOLLOWING)
    return columns


def _cached(line: _Line) -> str:
    if not line.scored_cache:
        return "-"
    cached = line.row.overlap_blocks
    return "?" if cached is None or not line.modelled else f"{cached:,}"


def _trust(line: _Line) -> str:
    return line.row.index if line.scored_cache else "-"


_TRUST: Final[tuple[Column[_Line], ...]] = (
    Column("index", "index", lambda line: line.row.index, text=_trust, rank=1),
)


def _transfer(line: _Line) -> str:
    """The class of the distance, and the time that it takes: ``zone 0.5 ms``."""
    value, level = line.row.terms.get("transfer"), line.row.transfer_level
    if value is None or level is UNSET:
        return "-"
    return f"{level} " + (f"{value:,.3f} s" if value >= 1 else f"{value * 1000:,.3g} ms")


def _following(line: _Line) -> str:
    return "-" if line.row.following is UNSET else blocks(line.row.following)


_TRANSFER: Final[Column[_Line]] = Column(
    "transfer",
    "transfer",
    lambda line: line.row.terms.get("transfer"),
    text=_transfer,
    right=True,
    rank=1,
)
_FOLLOWING: Final[Column[_Line]] = Column(
    "following",
    "next hop",
    lambda line: None if line.row.following is UNSET else line.row.following,
    text=_following,
    right=True,
    rank=1,
)


def _tier_column(name: str, heading: str) -> Column[_Line]:
    return Column(
        name,
        heading,
        lambda line: getattr(line.row, name) or 0,
        text=lambda line: f"{getattr(line.row, name) or 0:,}" if line.scored_cache else "-",
        right=True,
    )


def _term_column(name: str, rank: int) -> Column[_Line]:
    term = TERM_BY_NAME.get(name)
    in_blocks = term is not None and term.unit == "blocks"

    def text(line: _Line) -> str:
        value = line.row.terms.get(name)
        return "-" if value is None else blocks(value) if in_blocks else amount(value)

    heading = name.replace("_", " ") if term is None else term.heading
    return Column(
        name, heading, lambda line: line.row.terms.get(name), text=text, right=True, rank=rank
    )


def _roomy_columns() -> list[Column[_Line]]:
    return [
        Column(
            "active_prefill_tokens",
            "prefill tokens",
            lambda line: line.row.active_prefill_tokens,
            text=_prefill_tokens,
            right=True,
            rank=6,
        ),
        number_column("requests", "requests", lambda line: line.row.active_requests, rank=7),
        Column(
            "worker_id",
            "worker id",
            lambda line: line.row.worker_id,
            text=lambda line: f"{line.row.worker_id:016x}",
            rank=10,
        ),
    ]


def _prefill_tokens(line: _Line) -> str:
    left, booked = line.row.active_prefill_tokens, line.row.booked_prefill_tokens
    return count(left) if booked in (UNSET, left) else f"{count(left)} of {booked:,}"


def _domain_column(domain: str, rank: int) -> Column[_Line]:
    return Column(
        f"domain:{domain}",
        domain,
        lambda line: line.row.domains.get(domain),
        rank=rank,
        name=True,
    )


def _lines(hop: DecisionResult, limit: int | None) -> list[_Line]:
    winner = hop.winner
    best = min((row.cost for row in hop.candidates), default=None)

    def place(row: CandidateRow) -> tuple[bool, float, str, int]:
        won = winner is not None and (row.worker_id, row.dp_rank) == (
            winner.worker_id,
            winner.dp_rank,
        )
        return (not won, row.cost, row.worker, row.dp_rank)

    rows = sorted(hop.candidates, key=place)[:limit]
    worst = max((row.cost for row in rows), default=0.0)
    ranked = has_ranks(hop)
    counted = hop.mode == "kv" and hop.stage == "decode" and credits_overlap(hop)
    terms, modelled = tuple(hop.terms), hop.overlap_modelled
    return [_Line(row, best, worst, ranked, terms, counted, modelled) for row in rows]


def _as_line(row: RejectedRow, ranked: bool) -> _Line:
    """A rejected rank as a line with name and domains only."""
    empty = CandidateRow(
        worker=row.worker,
        worker_id=row.worker_id,
        cost=0.0,
        dp_rank=row.dp_rank,
        domains=row.domains,
    )
    return _Line(empty, ranked=ranked)


def _shown_rejections(hop: DecisionResult, limit: int | None) -> list[RejectedRow] | None:
    """The rejections to list one by one; None if there are too many."""
    rows = [row for step in hop.funnel if not _quiet(hop, step.filter) for row in step.rejected]
    return rows if limit is None or len(rows) <= limit else None


def _quiet(hop: DecisionResult, name: str) -> bool:
    if name not in QUIET:
        return False
    emptied = next((step for step in hop.funnel if step.entered and not step.left), None)
    return emptied is None or emptied.filter != name


def _grouped(hop: DecisionResult) -> Iterable[str]:
    groups: dict[tuple[str, str], list[RejectedRow]] = {}
    for step in hop.funnel:
        if _quiet(hop, step.filter):
            continue
        for row in step.rejected:
            groups.setdefault((row.code, str(row.limit)), []).append(row)
    for (code, _), rows in groups.items():
        first = rows[0]
        kind = plural(len(rows), "worker")
        if code == "missing_taint":
            has: dict[str, int] = {}
            for row in rows:
                has[str(row.value or "none")] = has.get(str(row.value or "none"), 0) + 1
            most = sorted(has.items(), key=lambda item: -item[1])[:3]
            tail = ", ".join(f"{number:,} in {value}" for value, number in most)
            yield f"{kind} lack {short_taints(str(first.limit))}: {tail}"
        else:
            yield f"{kind}: {_reason(first)}" + (" (for one)" if len(rows) > 1 else "")


def _reason(row: RejectedRow) -> str:
    return f"busy: {row.message}" if row.code == "busy" else row.message


def _squeezed(text: str, room: int) -> str:
    """A reason in ``room`` characters: with short taints and words, then cut."""
    if len(text) <= room:
        return text
    text = short_taints(text)
    for long, short in (
        (" of the KV blocks", " of KV"),
        ("active decode blocks", "decode blocks"),
        (" blocks booked here", " blocks"),
        ("which the router policy requires", "required"),
    ):
        if len(text) > room:
            text = text.replace(long, short)
    return _cut(text, room)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 2)] + ".."


def _behind(line: _Line) -> str:
    if line.best is None:
        return ""
    gap = line.row.cost - line.best
    return "" if gap == 0 else f"+{blocks(gap)}"


def _bar_column(marks: str, more: bool) -> Column[_Line]:
    heading = f"{marks[0]}pre {marks[1]}dec" + (f" {marks[2]}more" if more else "")
    return Column(
        "bar", heading, lambda line: line.row.terms, text=lambda line: _bar(line, marks), rank=5
    )


def _bar(line: _Line, marks: str) -> str:
    """The cost as a bar, each term with its own character; the highest cost is the longest."""
    if line.worst <= 0 or line.row.cost <= 0:
        return ""
    drawn = ""
    reached = 0.0
    shares = [
        (term.name, term.weight * line.row.terms.get(term.name, 0.0) * line.row.multiplier)
        for term in line.terms
    ]
    if line.row.following is not UNSET:
        shares.append(("following", line.row.following))
    for name, share in shares:
        reached += share
        cells = round(reached / line.worst * _BAR_CELLS) - len(drawn)
        mark = {"prefill_blocks": marks[0], "decode_blocks": marks[1]}.get(name, marks[2])
        drawn += mark * max(0, cells)
    return drawn or "."
