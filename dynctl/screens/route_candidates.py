"""The table of a hop's candidates in the explain screen: scored ranks, then rejected ones.

All hops share columns and widths, so that zones and costs are aligned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from dynctl.base.quantities import percent
from dynctl.documents.route_result import (
    CandidateRow,
    DecisionResult,
    RejectedRow,
    RouteResult,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.cells import pad_cells
from dynctl.screens.columns import Column, Fitted, fit, needed_columns, number_column
from dynctl.screens.numbers import amount, blocks, count, middle, plural
from dynctl.screens.route_sentences import (
    credits_overlap,
    has_ranks,
    is_rank,
    primary_domain,
    rank_name,
    short_taints,
)
from router_core import TERM_BY_NAME, TERMS

#: From this width on the load of candidates is shown, too.
_ROOMY: Final = 110
#: Filters whose rejections are not listed: the funnel line shows them sufficiently.
QUIET = ("model", "role")
_INDENT = "  "
_BAR_CELLS = 12
#: Characters of a bar for prefill, decode and other terms.
_BAR_ASCII = "#=+"
_BAR_BLOCKS = "█▒░"


@dataclass(frozen=True, slots=True)
class CandidateLine:
    """A candidate of a hop, with the lowest and highest cost of the hop for comparison.

    ``ranked``: whether workers of the hop have several ranks.
    """

    row: CandidateRow
    hop: DecisionResult
    ranked: bool
    best: float = 0.0
    worst: float = 0.0

    @property
    def scored_cache(self) -> bool:
        """Whether cached blocks are part of the cost."""
        hop = self.hop
        if hop.mode == "kv" and hop.stage == "decode" and credits_overlap(hop):
            return True
        return any(term.name == "prefill_blocks" for term in hop.terms)


@dataclass(frozen=True, slots=True)
class HopTable:
    """The layout that all hops of one result share."""

    fitted: Fitted[CandidateLine]
    canvas: Canvas
    domain: str | None
    limit: int | None

    @classmethod
    def from_hops(
        cls,
        result: RouteResult,
        hops: Sequence[DecisionResult],
        canvas: Canvas,
        limit: int | None,
    ) -> HopTable:
        by_hop = [_candidate_lines(hop, limit) for hop in hops]
        every = [line for lines in by_hop for line in lines]
        shown = [line for lines in by_hop for line in lines[:limit]]
        domain = primary_domain(result)
        columns = needed_columns(_columns(result, every, canvas, domain), every)
        # Rejected workers use the same first columns, so their names count for the widths.
        rejected = [line for hop in hops for line in _rejected_lines(hop, limit)]
        width = canvas.screen_width - len(_INDENT) - 2
        return cls(fit(columns, [*shown, *rejected], width), canvas, domain, limit)

    def lines(self, hop: DecisionResult) -> Iterator[str]:
        """Heading, candidates and rejections of one hop."""
        lines = _candidate_lines(hop, self.limit)
        shown = lines[: self.limit]
        if shown:
            yield self.canvas.faint(f"{_INDENT}  {self.fitted.heading()}")
        tied = {(ref.worker_id, ref.dp_rank) for ref in hop.tied}
        for line in shown:
            text = f" {self.fitted.line(line)}"
            if is_rank(line.row, hop.winner):
                yield self.canvas.bold(f"{_INDENT}>{text}")
            else:
                is_tied = (line.row.worker_id, line.row.dp_rank) in tied
                yield f"{_INDENT}{'=' if is_tied else ' '}{text}"
        if len(shown) < len(lines):
            more, most = len(lines) - len(shown), max(row.cost for row in hop.candidates)
            yield f"{_INDENT}  and {more:,} more up to cost {blocks(most)} (--all lists them)"
        unkept = hop.funnel[-1].left - len(lines) if hop.funnel and shown else 0
        if unkept > 0:
            yield f"{_INDENT}  and {unkept:,} more, not recorded"
        yield from map(self.canvas.faint, self._rejections(hop))

    def _rejections(self, hop: DecisionResult) -> Iterator[str]:
        shown = _shown_rejections(hop, self.limit)
        room = self.canvas.screen_width
        if shown is None:
            for text in _grouped_rejections(hop):
                yield _cut_text(f"{_INDENT}x {text}", room)
            return
        ranked = has_ranks(hop)
        for row in shown:
            cells = [rank_name(row, ranked)]
            if self.domain is not None:
                cells.append(row.domains.get(self.domain, "-"))
            start = f"{_INDENT}x {self._pad_cells(cells)}"
            yield start + _shorten_reason(_reason(row), room - len(start))

    def _pad_cells(self, cells: Sequence[str]) -> str:
        widths = self.fitted.widths
        pairs = zip(cells, widths, strict=False)
        return "".join(pad_cells(middle(cell, width), width) + "  " for cell, width in pairs)


def _candidate_lines(hop: DecisionResult, limit: int | None) -> list[CandidateLine]:
    """All candidates: the winner, then by cost. Bars are relative to the first ``limit``."""
    rows = sorted(
        hop.candidates,
        key=lambda row: (not is_rank(row, hop.winner), row.cost, row.worker, row.dp_rank),
    )
    best = min((row.cost for row in rows), default=0.0)
    worst = max((row.cost for row in rows[:limit]), default=0.0)
    ranked = has_ranks(hop)
    return [CandidateLine(row, hop, ranked, best, worst) for row in rows]


def _rejected_lines(hop: DecisionResult, limit: int | None) -> Iterator[CandidateLine]:
    """The rejected ranks as lines with name and domains only."""
    ranked = has_ranks(hop)
    for row in _shown_rejections(hop, limit) or ():
        empty = CandidateRow(
            worker=row.worker,
            worker_id=row.worker_id,
            cost=0.0,
            dp_rank=row.dp_rank,
            domains=row.domains,
        )
        yield CandidateLine(empty, hop, ranked)


# -- columns ---------------------------------------------------------------------------------------


def _columns(
    result: RouteResult, lines: Sequence[CandidateLine], canvas: Canvas, domain: str | None
) -> Iterator[Column[CandidateLine]]:
    yield Column("worker", "worker", lambda line: rank_name(line.row, line.ranked), name=True)
    if domain is not None:
        yield _domain_column(domain, 0)
    for name in sorted({name for line in lines for name in line.row.domains} - {domain}):
        yield _domain_column(name, 9)
    yield _DEVICE
    names = dict.fromkeys(term.name for line in lines for term in line.hop.terms)
    kv = result.mode == "kv"
    yield from _kv_columns(names) if kv else (_term_column(name, 1) for name in names)
    yield from _COSTS
    if kv:
        yield _bar_column(_BAR_BLOCKS if canvas.unicode else _BAR_ASCII, lines)
    if canvas.wide or canvas.screen_width >= _ROOMY:
        yield from _ROOMY_COLUMNS


def _kv_columns(names: Iterable[str]) -> Iterator[Column[CandidateLine]]:
    """What is cached, and the terms: those of every decision, then those that count here."""
    yield Column("overlap_blocks", "cached", _cached_text, right=True)
    yield from _TIERS
    yield _TRUST
    yield from (_term_column(term.name, 0) for term in TERMS if term.ordered)
    for name in names:
        if name == "transfer":
            yield _TRANSFER
        elif name not in TERM_BY_NAME or not TERM_BY_NAME[name].ordered:
            yield _term_column(name, 1)
    yield _FOLLOWING


def _domain_column(domain: str, rank: int) -> Column[CandidateLine]:
    return Column(
        f"domain:{domain}", domain, lambda line: line.row.domains.get(domain), rank=rank, name=True
    )


def _cached_text(line: CandidateLine) -> str:
    if not line.scored_cache:
        return "-"
    cached = line.row.overlap_blocks
    return "?" if cached is None or not line.hop.overlap_modelled else f"{cached:,}"


def _tier_column(name: str, heading: str, usually: str | None = None) -> Column[CandidateLine]:
    """Cached blocks of one kind; left out where they are ``usually``, else 0, for every row."""

    def tier_blocks(line: CandidateLine) -> int:
        return getattr(line.row, name) or 0

    def differs(line: CandidateLine) -> bool:
        expected = getattr(line.row, usually) if usually else 0
        return tier_blocks(line) != (expected or 0)

    def text(line: CandidateLine) -> str:
        return f"{tier_blocks(line):,}" if line.scored_cache else "-"

    return Column(name, heading, text, right=True, needed=differs)


_TIERS: Final = (
    _tier_column("predicted_blocks", "predicted"),
    _tier_column("indexed_blocks", "indexed", usually="overlap_blocks"),
    _tier_column("usable_blocks", "reused", usually="indexed_blocks"),
    _tier_column("host_blocks", "host"),
    _tier_column("disk_blocks", "disk"),
)


def _term_column(name: str, rank: int) -> Column[CandidateLine]:
    term = TERM_BY_NAME.get(name)
    form = blocks if term is not None and term.unit == "blocks" else amount
    heading = name.replace("_", " ") if term is None else term.heading
    return Column(
        name, heading, lambda line: line.row.terms.get(name), form=form, right=True, rank=rank
    )


def _transfer(line: CandidateLine) -> str:
    """The class of the distance, and the time that it takes: ``zone 0.5 ms``."""
    value, level = line.row.terms.get("transfer"), line.row.transfer_level
    if value is None or level is UNSET:
        return "-"
    return f"{level} " + (f"{value:,.3f} s" if value >= 1 else f"{value * 1000:,.3g} ms")


def _has_following(line: CandidateLine) -> bool:
    return line.row.following is not UNSET


def _following(line: CandidateLine) -> str:
    return "-" if line.row.following is UNSET else blocks(line.row.following)


def _behind(line: CandidateLine) -> str:
    gap = line.row.cost - line.best
    return "" if gap == 0 else f"+{blocks(gap)}"


def _is_random(line: CandidateLine) -> bool:
    return line.hop.temperature > 0 or line.hop.drawn is not UNSET


def _prefill_tokens(line: CandidateLine) -> str:
    left, booked = line.row.active_prefill_tokens, line.row.booked_prefill_tokens
    return count(left) if booked in (UNSET, left) else f"{count(left)} of {booked:,}"


_DEVICE: Final[Column[CandidateLine]] = Column(
    "device",
    "device",
    lambda line: line.row.device,
    rank=1,
    needed=lambda line: line.hop.devices is not UNSET,
)
_TRUST: Final[Column[CandidateLine]] = Column(
    "index",
    "index",
    lambda line: line.row.index if line.scored_cache else "-",
    rank=1,
    needed=lambda line: line.row.index != "exact",
)
_TRANSFER: Final[Column[CandidateLine]] = Column(
    "transfer", "transfer", _transfer, right=True, rank=1
)
_FOLLOWING: Final[Column[CandidateLine]] = Column(
    "following", "next hop", _following, right=True, rank=1, needed=_has_following
)
_COSTS: Final[tuple[Column[CandidateLine], ...]] = (
    Column(
        "multiplier",
        "x pref",
        lambda line: f"{line.row.multiplier:.3f}",
        right=True,
        rank=1,
        needed=lambda line: line.row.multiplier != 1.0,
    ),
    Column("cost", "cost", lambda line: line.row.cost, form=blocks, right=True),
    Column("behind", "behind", _behind, right=True, rank=4),
    Column(
        "probability",
        "chance",
        lambda line: percent(line.row.probability, 1),
        right=True,
        rank=2,
        needed=_is_random,
    ),
)
_ROOMY_COLUMNS: Final[tuple[Column[CandidateLine], ...]] = (
    Column("active_prefill_tokens", "prefill tokens", _prefill_tokens, right=True, rank=6),
    number_column("requests", "requests", lambda line: line.row.active_requests, rank=7),
    Column("worker_id", "worker id", lambda line: f"{line.row.worker_id:016x}", rank=10),
)


def _bar_column(marks: str, lines: Iterable[CandidateLine]) -> Column[CandidateLine]:
    heading = f"{marks[0]}pre {marks[1]}dec"
    if any(_has_following(line) or "transfer" in line.row.terms for line in lines):
        heading += f" {marks[2]}more"
    return Column("bar", heading, lambda line: _bar(line, marks), rank=5)


def _bar(line: CandidateLine, marks: str) -> str:
    """The cost as a bar, each term with its own character; the highest cost is the longest."""
    row = line.row
    if line.worst <= 0 or row.cost <= 0:
        return ""
    shares = [
        (term.name, term.weight * row.terms.get(term.name, 0.0) * row.multiplier)
        for term in line.hop.terms
    ]
    if row.following is not UNSET:
        shares.append(("following", row.following))
    mark_of = {"prefill_blocks": marks[0], "decode_blocks": marks[1]}
    drawn, reached = "", 0.0
    for name, share in shares:
        reached += share
        cells = round(reached / line.worst * _BAR_CELLS) - len(drawn)
        drawn += mark_of.get(name, marks[2]) * max(0, cells)
    return drawn or "."


# -- rejections ------------------------------------------------------------------------------------


def _shown_rejections(hop: DecisionResult, limit: int | None) -> list[RejectedRow] | None:
    """The rejections to list one by one; None if there are too many."""
    rows = list(_rejections(hop))
    return rows if limit is None or len(rows) <= limit else None


def _rejections(hop: DecisionResult) -> Iterator[RejectedRow]:
    """All rejected ranks, but for those of a quiet filter that left some."""
    emptied = next((step.filter for step in hop.funnel if step.entered and not step.left), None)
    for step in hop.funnel:
        if step.filter not in QUIET or step.filter == emptied:
            yield from step.rejected


def _grouped_rejections(hop: DecisionResult) -> Iterator[str]:
    groups: dict[tuple[str, str], list[RejectedRow]] = defaultdict(list)
    for row in _rejections(hop):
        groups[row.code, str(row.limit)].append(row)
    for (code, _), rows in groups.items():
        first, workers = rows[0], plural(len(rows), "worker")
        if code == "missing_taint":
            values = Counter(str(row.value or "none") for row in rows).most_common(3)
            places = ", ".join(f"{number:,} in {value}" for value, number in values)
            yield f"{workers} lack {short_taints(str(first.limit))}: {places}"
        else:
            yield f"{workers}: {_reason(first)}" + (" (for one)" if len(rows) > 1 else "")


def _reason(row: RejectedRow) -> str:
    return f"busy: {row.message}" if row.code == "busy" else row.message


def _shorten_reason(text: str, room: int) -> str:
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
    return _cut_text(text, room)


def _cut_text(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 2)] + ".."
