"""`topology plan`: capacity by domain, the effect of losses, workers to add and their commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dynctl.base.quantities import percent
from dynctl.documents.topology import NO_DOMAIN, DomainPlan, Loss, TopologyPlan
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, table
from dynctl.screens.numbers import amount, plural

_MOST_NOTES = 8
#: Losses shown per kind, the worst first; -o json has all.
_MOST_LOSSES = 4


def plan_columns(rows: Sequence[DomainPlan], domain: str) -> Iterator[Column[DomainPlan]]:
    """The columns of `topology plan`."""
    yield Column("domain", domain.upper(), lambda r: r.value, text=_value, name=True)
    if len({row.pool for row in rows}) > 1:
        yield Column("pool", "POOL", lambda r: r.pool, name=True)
    else:
        yield Column("pool", "POOL", lambda r: r.pool, rank=9, wide=True, name=True)
    yield Column("prefill", "PREFILL", _prefill_workers, right=True)
    yield Column("decode", "DECODE", _decode_workers, right=True)
    yield Column("ratio", "P:D", lambda r: r.decode_per_prefill, text=_ratio, right=True, rank=4)
    yield Column(
        "headroom",
        "DECODE HEADROOM",
        _spare_workers,
        form=_signed_number,
        right=True,
        rank=3,
        needed=_has_headroom,
    )
    yield replace(
        number_column("kv_blocks", "KV BLOCKS FREE", lambda r: r.headroom.kv_blocks, rank=6),
        needed=lambda r: r.headroom.kv_blocks is not None,
    )
    yield replace(
        number_column("batched_tokens", "BATCH TOKENS FREE", _free_tokens, rank=7),
        needed=lambda r: r.headroom.batched_tokens is not None,
    )
    yield Column(
        "add", "ADD", _additions, rank=2, needed=lambda r: bool(_has_headroom(r) or _adds(r))
    )
    yield Column("state", "STATE", lambda r: r.state, text=_state)


def topology_plan(result: TopologyPlan, canvas: Canvas) -> str:
    if not result.rows:
        nothing = f"no prefill or decode workers to plan for ({result.source})"
        return canvas.paragraphs([nothing, *result.notes[:_MOST_NOTES]])
    parts = [canvas.paragraphs([_headline(result)])]
    parts.append(table(plan_columns(result.rows, result.domain), result.rows, canvas))
    parts.append(canvas.paragraphs(f"WARNING: {warning}" for warning in result.warnings))
    losses = list(_worst(result.losses))
    if losses:
        several = len({row.pool for row in result.rows}) > 1
        parts.append("\n" + table(_loss_columns(result, several), losses, canvas))
        parts.append(canvas.paragraphs(_left_out(result.losses, losses)))
    if result.patches:
        commands = "".join(f"  {patch.command}\n" for patch in result.patches)
        parts.append(f"\nto add them:\n{commands}")
    notes = result.notes[:_MOST_NOTES]
    more = len(result.notes) - len(notes)
    if more:
        notes = [*notes, f"and {plural(more, 'more remark')}: -o json"]
    if notes:
        parts.append("\n" + canvas.paragraphs(notes))
    return "".join(parts)


def plan_rows_only(result: TopologyPlan, canvas: Canvas) -> str:
    """The rows alone, for scripts that cut columns."""
    columns = plan_columns(result.rows, result.domain)
    return table(columns, result.rows, replace(canvas, headings=False))


def _headline(result: TopologyPlan) -> str:
    target = f"target {result.ratio}" if result.ratio else "no target (set one: --ratio 1:2)"
    judged = f"policy {result.enforcement}"
    if result.enforcement == "mixed":
        judged = "each pool's own policy"
    elif result.in_force not in (None, result.enforcement):
        judged += f" (in force: {result.in_force})"
    return (
        f"{result.prefill:,} prefill and {result.decode:,} decode by {result.domain}, from "
        f"{result.source}; {target}; {judged}"
    )


# -- cells -----------------------------------------------------------------------------------------


def _value(row: DomainPlan) -> str:
    if row.value is not None:
        return row.value
    return "(not pinned)" if row.unpinned_prefill or row.unpinned_decode else NO_DOMAIN


def _prefill_workers(row: DomainPlan) -> str:
    return _workers(row.prefill, row.unpinned_prefill)


def _decode_workers(row: DomainPlan) -> str:
    return _workers(row.decode, row.unpinned_decode)


def _workers(certain: int, unpinned: int) -> str:
    return f"{certain:,}..{certain + unpinned:,}" if unpinned else f"{certain:,}"


def _spare_workers(row: DomainPlan) -> int | None:
    return row.headroom.decode_workers


def _has_headroom(row: DomainPlan) -> bool:
    return row.headroom.decode_workers is not None


def _free_tokens(row: DomainPlan) -> int | None:
    return row.headroom.batched_tokens


def _adds(row: DomainPlan) -> bool:
    return bool(row.add.prefill or row.add.decode)


def _ratio(row: DomainPlan) -> str:
    ratio = row.decode_per_prefill
    return "-" if ratio is None else f"1:{amount(round(ratio, 2))}"


def _signed_number(value: int | None) -> str:
    return "-" if value is None else f"{value:+,}" if value else "0"


def _additions(row: DomainPlan) -> str:
    parts = [("prefill", row.add.prefill), ("decode", row.add.decode)]
    return ", ".join(f"{change:+,} {role}" for role, change in parts if change) or "-"


def _state(row: DomainPlan) -> str:
    if row.state == "stranded":
        return f"STRANDED {row.stranded_prefill:,} prefill"
    if row.state == "idle":
        return f"idle {row.idle_decode:,} decode"
    if row.idle_decode:
        return f"{row.state}, idle {row.idle_decode:,} decode"
    return row.state


# -- losses ----------------------------------------------------------------------------------------


def _loss_columns(result: TopologyPlan, several: bool) -> Iterator[Column[Loss]]:
    words = {"prefill": "a prefill worker of", "decode": "a decode worker of"}

    def what(loss: Loss) -> str:
        if loss.what == "nothing":
            return "nothing"
        value = loss.value or f"(no {result.domain})"
        if loss.what == "node":
            return f"node {loss.node} in {value}"
        return f"{words.get(loss.what, result.domain)} {value}"

    def stranded_text(loss: Loss) -> str:
        if not loss.stranded_prefill:
            return "-"
        return f"{amount(round(loss.stranded_prefill, 2))} ({_percent(loss.stranded_share)})"

    yield Column("what", "LOSS OF", what, name=True)
    if several:
        yield Column("pool", "POOL", lambda r: r.pool, name=True)
    yield Column("left", "P:D LEFT", lambda r: f"{r.prefill_left:,}:{r.decode_left:,}", right=True)
    yield Column("stranded", "STRANDED PREFILL", stranded_text, right=True)
    yield Column("served", "STILL SERVED", lambda r: r.served_share, form=_percent, right=True)


def _percent(share: float) -> str:
    return percent(round(share, 3), None)


def _worst(losses: Sequence[Loss]) -> Iterator[Loss]:
    """The worst losses of each kind; for single workers only the worst one."""
    kinds: dict[str, list[Loss]] = defaultdict(list)
    for loss in losses:
        kinds[loss.what].append(loss)
    yield from kinds["nothing"][:_MOST_LOSSES]
    for what in ("prefill", "decode", "node", "domain"):
        ordered = sorted(kinds[what], key=lambda loss: (loss.served_share, -loss.stranded_prefill))
        yield from ordered[: 1 if what in ("prefill", "decode") else _MOST_LOSSES]


def _left_out(losses: Sequence[Loss], shown: Sequence[Loss]) -> list[str]:
    more = len(losses) - len(shown)
    return [f"only the worst of each kind; {plural(more, 'other')}: -o json"] if more else []
