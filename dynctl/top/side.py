"""The right third of wide screens: KV flow between domains, reasons, queues, fullest workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from rich.style import Style

from dynctl.base.quantities import percent
from dynctl.documents.snapshot import DecisionLine, DomainView, Snapshot
from dynctl.documents.workers import WorkerRow
from dynctl.screens.cells import pad_cells
from dynctl.screens.numbers import count, middle, plural
from dynctl.top.header import queue
from dynctl.top.marks import BAD, BOLD, DIM, PLAIN, WARN, Line, Marks, role_style, zone_style

#: From this width on the screen has this part, a third of it.
FROM_WIDTH: Final = 160
_FLOWS: Final = 9
_REASONS: Final = 7
_NAME: Final = 18


def side_lines(
    snapshot: Snapshot,
    view: DomainView,
    decisions: Sequence[DecisionLine],
    workers: Sequence[WorkerRow],
    zones: Sequence[str],
    marks: Marks,
    size: tuple[int, int],
) -> list[Line]:
    """Lines of ``size`` (width, height). ``decisions`` and ``workers``: those that the filter
    keeps; ``zones``: the values whose colours are used."""
    width, height = size
    sections = [
        _flow(view, decisions, zones, marks, width),
        _reasons(decisions, marks, width),
        _queues(snapshot, view, zones, marks, width),
        _fullest(snapshot, workers, view.domain, zones, marks, width),
    ]
    lines: list[Line] = []
    for section in sections:
        lines += [*section, ((" ", PLAIN),)]
    return lines[:height]


def _titled(title: str, beside: str, width: int) -> Line:
    name = f" {title} "
    rest = f" {beside}" if beside else ""
    fill = "─" * max(0, width - len(name) - len(rest) - 2)
    return ((" ─", DIM), (name, BOLD), (fill, DIM), (rest, DIM))


def _bar(text: str, style: Style, share: float, beside: str, marks: Marks, width: int) -> Line:
    """A name, a bar of ``share`` (0..1) and a number."""
    room = max(4, width - _NAME - len(beside) - 5)
    filled = max(1, round(share * room)) if share > 0 else 0
    return (
        (f"  {pad_cells(middle(text, _NAME), _NAME)} ", style),
        (marks.full * filled, style),
        (" " * (room - filled), PLAIN),
        (f" {beside}", PLAIN),
    )


def _flow(
    view: DomainView,
    decisions: Sequence[DecisionLine],
    zones: Sequence[str],
    marks: Marks,
    width: int,
) -> Iterator[Line]:
    """How many of the shown decisions moved KV from one value of the domain to another."""
    pairs = _count_moves(view.domain or "", decisions)
    total = sum(pairs.values())
    crossing = sum(n for (first, last), n in pairs.items() if first != last)
    beside = f"{total:,} hand-offs, {crossing:,} crossed" if total else ""
    yield _titled(f"KV flow by {view.domain or 'domain'}", beside, width)
    if not total:
        yield (("  no hand-off from prefill to decode among the decisions", DIM),)
    most = max(pairs.values(), default=1)
    order = sorted(pairs, key=lambda pair: (pair[0] != pair[1], -pairs[pair]))
    for first, last in order[:_FLOWS]:
        number = pairs[first, last]
        style = zone_style(first, zones) if first == last else BAD
        text = f"{first} > {last}" if first != last else f"{first} stays"
        share = f"{number:,} {percent(number / total):>5}"
        yield _bar(text, style, number / most, share.rjust(11), marks, width)


def _count_moves(domain: str, decisions: Sequence[DecisionLine]) -> Counter[tuple[str, str]]:
    """Values of prefill and decode -> hand-offs."""
    pairs: Counter[tuple[str, str]] = Counter()
    for line in decisions:
        first, last = line.prefill_domains.get(domain), line.domains.get(domain)
        if line.prefill is not None and first and last and not line.refused:
            pairs[first, last] += 1
    return pairs


def _reasons(decisions: Sequence[DecisionLine], marks: Marks, width: int) -> Iterator[Line]:
    """What decided."""
    reasons = Counter("refused" if line.refused else line.why or "unknown" for line in decisions)
    moved = sum(bool(line.moved) for line in decisions)
    yield _titled("what decided", f"{moved:,} moved by topology" if moved else "", width)
    total = sum(reasons.values())
    for reason, number in reasons.most_common(_REASONS):
        style = BAD if reason == "refused" else PLAIN
        beside = f"{number:,} {percent(number / total):>5}".rjust(11)
        yield _bar(reason, style, number / total, beside, marks, width)
    if not total:
        yield (("  no decisions", DIM),)


def _queues(
    snapshot: Snapshot, view: DomainView, zones: Sequence[str], marks: Marks, width: int
) -> Iterator[Line]:
    """Requests that wait: in the router's queue, and at the engines of each domain."""
    length = snapshot.header.queue
    router = queue(snapshot)
    yield _titled("waiting", f"router queue {router}", width)
    if length:
        yield (("  ", PLAIN), (f"router   {plural(length, 'request')}", WARN))
    most = max((row.waiting or 0 for row in view.rows), default=0)
    for row in view.rows:
        name = row.value or "-"
        number = "?" if row.waiting is None else count(row.waiting)
        share = (row.waiting or 0) / most if most else 0.0
        yield _bar(name, zone_style(name, zones), share, number.rjust(6), marks, width)


def _fullest(
    snapshot: Snapshot,
    workers: Sequence[WorkerRow],
    domain: str | None,
    zones: Sequence[str],
    marks: Marks,
    width: int,
) -> Iterator[Line]:
    """Ready workers by the used share of their KV blocks; | is the busy threshold."""
    found = [(share, row) for row in workers if (share := kv_used(row)) is not None]
    found.sort(key=lambda one: (-one[0], one[1].name))
    yield _titled("fullest workers", "| busy threshold", width)
    if not found:
        yield (("  no worker reports its KV blocks", DIM),)
    room = max(4, width - _NAME - 15)
    for share, row in found:
        limit = snapshot.thresholds.get(row.model, {}).get("active_decode_blocks_threshold")
        value = row.domains.get(domain or "", "")
        yield (
            ("  ", PLAIN),
            (pad_cells(middle(row.name, _NAME), _NAME), role_style(row.role)),
            (" ", PLAIN),
            (marks.bar(share, room, limit), WARN if row.busy else zone_style(value, zones)),
            (f" {percent(share):>5}", PLAIN),
            (" busy" if row.busy else "", WARN),
        )


def kv_used(row: WorkerRow) -> float | None:
    """Used share of the KV blocks of a ready worker's ranks, 0..1; None if not reported."""
    size = row.runtime_config.get("total_kv_blocks")
    if row.status != "ready" or not isinstance(size, int) or not size:
        return None
    known = [r.reported.kv_used_blocks for r in row.ranks if r.reported.kv_used_blocks is not None]
    return sum(known) / (size * len(known)) if known else None
