"""`topology show`: a row per domain value, and notes on stranded workers and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dynctl.documents.topology import (
    NO_DOMAIN,
    CopiedLabel,
    DomainCapacity,
    RoleCapacity,
    TopologyShow,
    TopologySync,
    TopologyValue,
    TransferPolicy,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, or_dash, table
from dynctl.screens.numbers import amount, count, plural

_MOST_NAMED = 5
_MOST_NOTES = 8
_LEGEND = (
    "KV USED: as the engines report it; "
    "DECODE BLOCKS: of running requests, as the router counts them"
)


def domain_columns(
    rows: Sequence[DomainCapacity], domain: str | None
) -> list[Column[DomainCapacity]]:
    """The columns of `topology show` and of the dashboard's domains."""
    several = len({row.model for row in rows}) > 1
    aggregated = any(row.aggregated.workers for row in rows)
    decode = any(row.decode.workers for row in rows)
    # A fleet of aggregated workers alone has no prefill and decode columns.
    split = decode or not aggregated or any(row.prefill.workers for row in rows)
    columns: list[Column[DomainCapacity]] = [
        Column("domain", (domain or "domain").upper(), lambda r: r.value, text=_value, name=True),
        Column(
            "model",
            "MODEL",
            lambda r: r.model,
            rank=0 if several else 9,
            wide=not several,
            name=True,
        ),
    ]
    if split:
        columns.append(_role_column("prefill", "PREFILL", lambda r: r.prefill))
        columns.append(_role_column("decode", "DECODE", lambda r: r.decode))
    if aggregated:
        columns.append(_role_column("aggregated", "AGGREGATED", lambda r: r.aggregated))
    if split:
        columns.append(
            Column("ratio", "P:D", lambda r: r.decode_per_prefill, text=_ratio, right=True, rank=4)
        )
    columns += [
        Column(
            "kv_used",
            "DECODE KV USED" if decode else "KV USED",
            lambda r: _generating(r).kv_used_blocks,
            text=_kv,
            right=True,
            rank=5,
        ),
        number_column("prefill_tokens", "PREFILL TOKENS", _prefill_tokens, rank=6),
        Column("policy", "POLICY", lambda r: _policy(r, domain), rank=2),
        Column("state", "STATE", lambda r: r.state, text=_state),
        Column("origin", "POLICY OF", _origin, rank=8, wide=True),
        number_column("decode_blocks", "DECODE BLOCKS", _decode_blocks, rank=7, wide=True),
    ]
    return columns


def topology_show(result: TopologyShow, canvas: Canvas) -> str:
    if not result.rows:
        return f"no workers are registered ({result.source})\n"
    text = table(domain_columns(result.rows, result.domain), result.rows, canvas)
    if "DECODE BLOCKS" in text.partition("\n")[0]:
        text += "".join(f"{line}\n" for line in canvas.paragraph(_LEGEND, first="", rest="  "))
    notes = list(topology_notes(result))
    more = len(notes) - _MOST_NOTES
    if more > 0:
        notes[_MOST_NOTES:] = [f"and {plural(more, 'more remark')}: -o json"]
    lines = [line for note in notes for line in canvas.paragraph(note, first="", rest="  ")]
    return text + "".join(line + "\n" for line in lines)


def topology_rows_only(result: TopologyShow, canvas: Canvas) -> str:
    """The rows alone, for scripts that cut columns."""
    columns = domain_columns(result.rows, result.domain)
    return table(columns, result.rows, replace(canvas, headings=False))


# -- cells -----------------------------------------------------------------------------------------


def _role_column(
    key: str, heading: str, role: Callable[[DomainCapacity], RoleCapacity]
) -> Column[DomainCapacity]:
    return Column(key, heading, lambda r: role(r).workers, text=lambda r: _workers(role(r)))


def _workers(role: RoleCapacity) -> str:
    """``6``; ``4/6, 1 busy`` if two of six are unavailable."""
    alive = role.workers - role.unavailable
    text = f"{alive:,}/{role.workers:,}" if role.unavailable else f"{role.workers:,}"
    return text + (f", {role.busy:,} busy" if role.busy else "")


def _value(row: DomainCapacity) -> str:
    return NO_DOMAIN if row.value is None else row.value


def _generating(row: DomainCapacity) -> RoleCapacity:
    """The role that holds the KV blocks of answers: decode, else aggregated."""
    return row.decode if row.decode.workers or not row.aggregated.workers else row.aggregated


def _kv(row: DomainCapacity) -> str:
    role = _generating(row)
    if role.kv_used_blocks is None and role.kv_total_blocks is None:
        return "-"
    text = f"{count(role.kv_used_blocks)} of {count(role.kv_total_blocks)}"
    partly = 0 < role.kv_reporting < role.ranks
    return text + (f", {role.kv_reporting:,} of {role.ranks:,} ranks" if partly else "")


def _prefill_tokens(row: DomainCapacity) -> int:
    return row.prefill.active_prefill_tokens + row.aggregated.active_prefill_tokens


def _decode_blocks(row: DomainCapacity) -> float:
    return row.decode.active_decode_blocks + row.aggregated.active_decode_blocks


def _ratio(row: DomainCapacity) -> str:
    ratio = row.decode_per_prefill
    return "-" if ratio is None else f"1:{amount(round(ratio, 1 if ratio >= 0.1 else 3))}"


def _policy(row: DomainCapacity, domain: str | None) -> str:
    if not row.prefill.workers:
        return "-"
    texts = list(dict.fromkeys(policy_text(one, domain) for one in row.policies))
    return texts[0] if len(texts) == 1 else "mixed"


def policy_text(policy: TransferPolicy, domain: str | None) -> str:
    """``required``, ``preferred 0.85``; with its domain if that differs from ``domain``."""
    if policy.enforcement is None and policy.domain is None:
        return "none"
    text = policy.enforcement or "unclear"
    if policy.weight is not None:
        text += f" {amount(policy.weight)}"
    return text if policy.domain == domain else f"{text} {policy.domain}"


def _origin(row: DomainCapacity) -> str:
    names = {"card": "workers' cards", "router": "router"}
    origins = dict.fromkeys(names[one.origin] for one in row.policies if one.origin is not None)
    return " and ".join(origins) or "-"


def _state(row: DomainCapacity) -> str:
    stranded = sum(len(one.workers) for one in row.stranded)
    if not stranded:
        if row.unreached and len(row.unreached) == len(row.workers):
            return "not reached"
        return row.state if row.state == "ok" else row.state.upper()
    able = row.prefill.ready + row.prefill.busy
    return "STRANDED" if stranded == able else f"STRANDED {stranded:,} of {able:,}"


# -- notes -----------------------------------------------------------------------------------------


def topology_notes(result: TopologyShow) -> Iterator[str]:
    """Stranded workers with the reason, domains that are down, different policies, no domain."""
    several = len({row.model for row in result.rows}) > 1
    for row in result.rows:
        where = _where(row, several=several)
        for one in row.stranded:
            verb = "requires" if len(one.workers) == 1 else "require"
            need = f" {verb} {one.requires}" if one.requires else ""
            yield f"{where} is STRANDED: {_named(one.workers)}{need}: {one.reason}; {one.outcome}"
    for row in result.rows:
        where = _where(row, several=several)
        if row.state == "down":
            yield f"{where} is DOWN: {_down(row, result.domain)}"
        elif row.unreached:
            yield f"{where}: {_not_reached(row, result.domain)}"
        if row.state == "crosses":
            yield f"{where} CROSSES: {_crossing(row, result.domain)}"
    for row in result.rows:
        policies = list(dict.fromkeys(policy_text(one, result.domain) for one in row.policies))
        if len(policies) > 1:
            each = "; ".join(
                f"{policy_text(one, result.domain)}: {_named(one.workers)}" for one in row.policies
            )
            yield f"{_value(row)} has more than one policy: {each}"
    unplaced = [row for row in result.rows if row.value is None]
    lost = [name for row in unplaced for name in row.workers if name not in row.unreached]
    if result.domain is None:
        if lost:
            yield "no worker publishes a topology domain: their locations are unknown"
        return
    if lost:
        verb, them = ("publishes", "it") if len(lost) == 1 else ("publish", "them")
        modes = {policy.enforcement for row in result.rows for policy in row.policies}
        effect = (
            f"a preference for a {result.domain} has no effect on {them}"
            if "preferred" in modes and "required" not in modes
            else f"a required {result.domain} never reaches {them}"
        )
        yield f"{NO_DOMAIN}: {_named(lost)} {verb} no {result.domain}: {effect}"


def _down(row: DomainCapacity, domain: str | None) -> str:
    if len(row.unreached) == len(row.workers):
        return _not_reached(row, domain)
    return _all_unavailable(len(row.workers))


def _not_reached(row: DomainCapacity, domain: str | None) -> str:
    """Workers whose engines were never reached, and what is unknown of them for that reason."""
    verb, their = ("was", "its") if len(row.unreached) == 1 else ("were", "their")
    unknown = [] if row.value is not None else [domain or "topology domain"]
    unknown += [] if row.model else ["model"]
    text = f"{_named(row.unreached)} {verb} not reached"
    if not unknown:
        return text
    be = "is" if len(unknown) == 1 else "are"
    return f"{text}: {their} {' and '.join(unknown)} {be} unknown"


def _crossing(row: DomainCapacity, domain: str | None) -> str:
    """What the policies in force do in a domain without an available decode worker."""
    there = "it has no decode worker"
    if row.decode.workers:
        there = "no decode worker of it is available"
    elif row.unreached:
        there = f"no decode worker of it was reached ({_named(row.unreached)}: not reached)"
    policies = dict.fromkeys(policy_text(policy, domain) for policy in row.policies)
    return f"{there}; KV caches go to decode workers elsewhere, as {' and '.join(policies)} allows"


def _where(row: DomainCapacity, *, several: bool) -> str:
    """The value, with the model where the fleet has ``several``."""
    return f"{_value(row)} for {row.model or 'an unknown model'}" if several else _value(row)


def _all_unavailable(workers: int) -> str:
    return (
        "its worker is unavailable" if workers == 1 else f"all {workers:,} workers are unavailable"
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def topology_value(result: TopologyValue, canvas: Canvas) -> str:
    """The value alone, for scripts."""
    return result.value + "\n"


def topology_sync(result: TopologySync, canvas: Canvas) -> str:
    """A row per label, and a sentence about each that is wrong."""
    if not result.rows:
        return f"no pod names a topology label or a topology ({result.source})\n"
    text = table(_COPIES, result.rows, canvas)
    notes = [
        f"{row.pod}.{row.namespace}: {row.problem or row.message}"
        for row in result.rows
        if row.problem or (row.message and not row.written)
    ]
    if notes:
        more = len(notes) - _MOST_NOTES
        lines = [line for one in notes[:_MOST_NOTES] for line in canvas.paragraph(one, first="")]
        text += "\n" + "".join(f"{line}\n" for line in lines)
        if more > 0:
            text += f"{more} more: -o json\n"
    writable = [row for row in result.rows if row.state in ("missing", "repair")]
    if result.dry_run:
        many = plural(len(writable), "label")
        return text + f"\ndry run: nothing was written; {many} would be written\n"
    return text + f"\n{plural(sum(row.written for row in writable), 'label')} written\n"


def _copied(row: CopiedLabel) -> str:
    if row.problem:
        return "refused"
    if row.written:
        return "copied" if row.state == "missing" else "replaced"
    return row.state


_COPIES: list[Column[CopiedLabel]] = [
    Column("pod", "POD", lambda r: r.pod, name=True),
    Column("namespace", "NAMESPACE", lambda r: r.namespace, rank=3),
    Column("node", "NODE", lambda r: r.node, form=or_dash, rank=4),
    Column("label", "LABEL", lambda r: r.target, text=lambda r: r.target or r.source, rank=2),
    Column("has", "POD HAD", lambda r: r.has, form=or_dash, rank=1),
    Column("wants", "NODE HAS", lambda r: r.wants, form=or_dash, rank=1),
    Column("state", "STATE", _copied),
]
