"""Details of one row as text: what Enter, ``d`` and ``y`` open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from dynctl.documents.snapshot import (
    Alert,
    DecisionLine,
    DomainRow,
    DomainView,
    Part,
    Snapshot,
    stale_reason,
)
from dynctl.documents.topology import NO_DOMAIN, RoleCapacity
from dynctl.documents.verify import CellState, ChainCell, CustodyRow
from dynctl.documents.workers import WorkerDetail, WorkerRow
from dynctl.findings.catalogue import catalogue
from dynctl.findings.pages import page as page_of
from dynctl.screens.canvas import Canvas
from dynctl.screens.checks import code_page
from dynctl.screens.columns import table
from dynctl.screens.decisions import cached_text, clock, outcome_text, places
from dynctl.screens.numbers import age, amount, count, plural
from dynctl.screens.topology import policy_text, topology_notes
from dynctl.screens.workers import rank_loads, worker_detail, worker_status
from dynctl.top.columns import worker_table

_LABEL: Final = 14
_CLUSTER: Final = "dynctl top .. --kube-context NAME -n NAMESPACE shows the links before the card"
_WINNER_ONLY: Final = (
    "A live Dynamo reports the chosen workers only, not the other candidates. To see all "
    'candidates before a request: dynctl route --explain "PROMPT" with the same options.'
)
#: The mark of each link state.
_STATES: Final = {
    CellState.SAME: "ok",
    CellState.DIFFERS: "!=",
    CellState.MISSING: "(none)",
    CellState.NONE: "(none)",
    CellState.UNKNOWN: "?",
}
#: The snapshot parts that a worker's numbers come from.
_PARTS: Final = ("workers", "load", "index", "waiting")

Draw = Callable[[Canvas], str]
"""Text for a canvas; called again when the width changes."""


async def read_page(code: str) -> Draw:
    """The page of a finding's code."""
    return lambda canvas: code_page(page_of(catalogue()[code]), canvas).rstrip("\n")


def card_text(worker: WorkerRow, chain: CustodyRow, canvas: Canvas) -> str:
    """Enter on a worker: status and load, then ModelRuntimeConfig, taints, chain of custody."""
    lines = [canvas.bold(f"{worker.name}  {worker.role}  {worker.model}")]
    lines += canvas.paragraph(worker_status(worker), first="status    ", rest=" " * 10)
    lines += [f"endpoint  {worker.endpoint}"] if worker.endpoint else []
    lines += ["", *rank_loads(worker, canvas).splitlines(), "", canvas.bold("ModelRuntimeConfig")]
    unset = []
    for name, value in worker.runtime_config.items():
        if value in (None, {}, [], ()):
            unset.append(name)
        elif name != "taints":  # listed below
            lines += canvas.paragraph(_value(value), first=f"  {name}: ", rest="    ")
    if unset:
        lines += canvas.paragraph(", ".join(unset), first="  not set: ", rest="    ")
    lines += ["", canvas.bold(f"taints ({len(worker.taints)})")]
    lines += [f"  {taint}" for taint in worker.taints] or ["  none"]
    lines += ["", *chain_lines(chain, canvas)]
    return "\n".join(lines)


def chain_lines(chain: CustodyRow, canvas: Canvas) -> Iterator[str]:
    """One line per link, from the node's label to the router."""
    domain = f": {chain.domain}" if chain.domain else ""
    yield canvas.bold(f"chain of custody{domain}")
    in_cluster = any(
        cell.state is not CellState.UNKNOWN for cell in (chain.node, chain.label, chain.file)
    )
    if chain.domain is None:
        yield "  the worker publishes no topology domain"
        if not in_cluster:
            return
    for name, cell in chain.cells.items():
        mark = "<- breaks here" if name == chain.first_break else ""
        yield f"  {name:<10} {_cell(cell)}  {mark}".rstrip()
    for code in chain.codes:
        yield f"  {code}: dynctl explain {code}"
    if not in_cluster:
        yield from canvas.paragraph(_CLUSTER, first="  ")


def worker_text(worker: WorkerRow, snapshot: Snapshot, now: float, canvas: Canvas) -> str:
    """``d`` on a worker: the screen of `workers show`, and the source and age of its data."""
    lines = worker_detail(WorkerDetail(snapshot.source, worker), canvas).rstrip("\n").split("\n")
    stale = stale_reason(worker, snapshot.load_every_s)
    if stale is not None:
        lines += ["", *canvas.paragraph(stale, first="stale: ", rest="  ")]
    lines += ["", canvas.bold("sources")]
    lines += source_lines(snapshot, _PARTS, now, canvas)
    lines += ["", canvas.bold("thresholds")]
    present = snapshot.thresholds.get(worker.model, {})
    for name, value in present.items():
        lines.append(f"  {name}: {'off' if value is None else amount(value)}")
    return "\n".join(lines)


def source_lines(
    snapshot: Snapshot, parts: Sequence[str], now: float, canvas: Canvas
) -> Iterator[str]:
    """Source and age of each part, or why it is unknown."""
    for part in parts:
        origin = snapshot.parts.get(part, Part(snapshot.source, unknown="not reported"))
        if origin.unknown:
            yield from canvas.paragraph(
                f"unknown: {origin.unknown}", first=f"  {part}".ljust(_LABEL), rest=" " * _LABEL
            )
            for way in origin.provide.splitlines():
                yield from canvas.paragraph(way, first=" " * _LABEL)
        else:
            old = "" if origin.at is None else f", {age(max(0.0, now - origin.at))} old"
            yield f"  {part}".ljust(_LABEL) + origin.source + old


def _entry(canvas: Canvas, label: str, text: str) -> list[str]:
    """A paragraph after its label."""
    return canvas.paragraph(text, first=label.ljust(_LABEL), rest=" " * _LABEL)


def domain_text(row: DomainRow, view: DomainView, snapshot: Snapshot, canvas: Canvas) -> str:
    """``d`` on a domain: capacity by role, policies, notes on stranded workers, its workers."""
    capacity = row.capacity
    name = capacity.value or NO_DOMAIN
    lines = [canvas.bold(f"{view.domain or 'domain'} {name}  {capacity.model}"), ""]
    for label in ("prefill", "decode", "aggregated"):
        role: RoleCapacity = getattr(capacity, label)
        if role.workers:
            lines += _entry(canvas, label, _role(role, row.stale.get(label, 0)))
    for policy in capacity.policies:
        text = f"{policy_text(policy, None)}: {plural(len(policy.workers), 'worker')}"
        lines.append("policy".ljust(_LABEL) + text)
    if row.local is not None:
        lines.append(
            "hand-offs".ljust(_LABEL)
            + f"{row.local:,} stayed, {row.crossing or 0:,} crossed to another {view.domain}"
        )
    waiting = "?" if row.waiting is None else count(row.waiting)
    lines.append("waiting".ljust(_LABEL) + f"{waiting} requests at the engines")
    notes = [note for note in topology_notes(view.shown) if note.startswith(name)]
    for note in notes:
        lines += ["", *canvas.paragraph(note, first="", rest="  ")]
    members = [worker for worker in snapshot.workers if worker.name in set(capacity.workers)]
    lines += ["", table(worker_table(snapshot), members, canvas).rstrip("\n")]
    return "\n".join(lines)


def decision_text(line: DecisionLine, domain: str | None, canvas: Canvas) -> str:
    """``d`` on a decision: the fields of its line."""
    pairs = [
        ("decision", line.id),
        ("made", clock(line.at)),
        ("selection", line.outcome),
        ("outcome", outcome_text(line)),
        ("model", line.model or "?"),
        ("prefill", "-" if line.prefill is None else line.prefill.worker),
        ("decode", "-" if line.decode is None else line.decode.worker),
        (domain or "domain", places(line, domain) if domain else "-"),
        ("cached", _cached(line)),
        ("cost", "?" if line.cost is None else f"{amount(line.cost)} blocks"),
        ("margin", "?" if line.margin is None else f"{amount(line.margin)} blocks"),
        *([("hop", line.hop_verdict)] if line.hop_verdict else []),
        ("source", line.source),
    ]
    lines = [f"{label:<{_LABEL}}{text}" for label, text in pairs]
    if line.message:
        lines += _entry(canvas, "why", line.message)
    if line.response.error:
        lines += _entry(canvas, "error", line.response.error)
    if not line.complete:
        lines += ["", *canvas.paragraph(_WINNER_ONLY, first="")]
    return "\n".join(lines)


def alert_text(alert: Alert, now: float, canvas: Canvas) -> str:
    """A finding, and the page of its code if it has one."""
    since = "?" if alert.since is None else f"{age(now - alert.since)} ago"
    lines = [canvas.bold(f"{alert.level.upper()} {alert.code}  {alert.subject}"), ""]
    for label, text in (("found", alert.message), ("fix", alert.fix), ("since", since)):
        if text:
            lines += canvas.paragraph(text, first=label.ljust(10), rest=" " * 10)
    entry = catalogue().get(alert.code)
    if entry is not None:
        lines += ["", code_page(page_of(entry), canvas).rstrip("\n")]
    return "\n".join(lines)


def _cell(cell: ChainCell) -> str:
    mark = _STATES[cell.state]
    if cell.state is CellState.UNKNOWN:
        return f"{mark}  {cell.why}"
    return f"{mark:<7}{cell.value or ''}".rstrip()


def _cached(line: DecisionLine) -> str:
    if line.tokens_estimated:
        return f"{cached_text(line)} blocks"
    if line.cached_blocks is None:
        return "?"
    return f"{line.cached_blocks:,} of {'?' if line.blocks is None else f'{line.blocks:,}'} blocks"


def _role(role: RoleCapacity, stale: int) -> str:
    parts = [plural(role.workers, "worker"), f"{role.ready:,} ready"]
    parts += [f"{role.busy:,} busy"] if role.busy else []
    parts += [f"{role.unavailable:,} unavailable"] if role.unavailable else []
    parts += [f"{stale:,} stale"] if stale else []
    if not role.ranks:
        return ", ".join(parts)
    parts.append(f"{count(role.kv_used_blocks)} of {count(role.kv_total_blocks)} KV blocks used")
    parts.append(f"{count(role.active_prefill_tokens)} active prefill tokens")
    parts.append(f"{count(role.active_decode_blocks)} active decode blocks")
    return ", ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={one}" for name, one in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value))
    return str(value)
