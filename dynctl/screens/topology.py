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
    is_weakened,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, or_dash, table
from dynctl.screens.numbers import amount, count, first_names, plural

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
    return list(_domain_columns(rows, domain))


def _domain_columns(
    rows: Sequence[DomainCapacity], domain: str | None
) -> Iterator[Column[DomainCapacity]]:
    several = len({row.model for row in rows}) > 1
    aggregated = any(row.aggregated.workers for row in rows)
    decode = any(row.decode.workers for row in rows)
    # A fleet of aggregated workers alone has no prefill and decode columns.
    split = decode or not aggregated or any(row.prefill.workers for row in rows)
    yield Column("domain", (domain or "domain").upper(), lambda r: r.value, text=_value, name=True)
    if several:
        yield Column("model", "MODEL", lambda r: r.model, name=True)
    else:
        yield Column("model", "MODEL", lambda r: r.model, rank=9, wide=True, name=True)
    if split:
        yield _role_column("prefill", lambda r: r.prefill)
        yield _role_column("decode", lambda r: r.decode)
    if aggregated:
        yield _role_column("aggregated", lambda r: r.aggregated)
    if split:
        yield Column(
            "ratio", "P:D", lambda r: r.decode_per_prefill, text=_ratio, right=True, rank=4
        )
    used = "DECODE KV USED" if decode else "KV USED"
    yield Column(
        "kv_used", used, lambda r: generating(r).kv_used_blocks, text=_kv, right=True, rank=5
    )
    yield number_column("prefill_tokens", "PREFILL TOKENS", _prefill_tokens, rank=6)
    yield Column("policy", "POLICY", lambda r: _policy(r, domain), rank=2)
    yield Column("state", "STATE", lambda r: r.state, text=_state)
    yield Column("origin", "POLICY OF", _origin, rank=8, wide=True)
    yield number_column("decode_blocks", "DECODE BLOCKS", _decode_blocks, rank=7, wide=True)


def topology_show(result: TopologyShow, canvas: Canvas) -> str:
    if not result.rows:
        return f"no workers are registered ({result.source})\n"
    text = table(domain_columns(result.rows, result.domain), result.rows, canvas)
    if "DECODE BLOCKS" in text.partition("\n")[0]:
        text += canvas.paragraphs([_LEGEND])
    notes = list(topology_notes(result))
    more = len(notes) - _MOST_NOTES
    if more > 0:
        notes[_MOST_NOTES:] = [f"and {plural(more, 'more remark')}: -o json"]
    return text + canvas.paragraphs(notes)


def topology_rows_only(result: TopologyShow, canvas: Canvas) -> str:
    """The rows alone, for scripts that cut columns."""
    columns = domain_columns(result.rows, result.domain)
    return table(columns, result.rows, replace(canvas, headings=False))


# -- cells -----------------------------------------------------------------------------------------


def _role_column(
    key: str, role: Callable[[DomainCapacity], RoleCapacity]
) -> Column[DomainCapacity]:
    return Column(key, key.upper(), lambda r: role(r).workers, text=lambda r: _workers(role(r)))


def _workers(role: RoleCapacity) -> str:
    """``6``; ``4/6, 1 busy`` if two of six are unavailable."""
    alive = role.workers - role.unavailable
    text = f"{alive:,}/{role.workers:,}" if role.unavailable else f"{role.workers:,}"
    return text + (f", {role.busy:,} busy" if role.busy else "")


def _value(row: DomainCapacity) -> str:
    return NO_DOMAIN if row.value is None else row.value


def generating(row: DomainCapacity) -> RoleCapacity:
    """The role that holds the KV blocks of answers: decode, else aggregated."""
    return row.decode if row.decode.workers or not row.aggregated.workers else row.aggregated


def _kv(row: DomainCapacity) -> str:
    role = generating(row)
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
    texts = list(dict.fromkeys(policy_text(policy, domain) for policy in row.policies))
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
    origins = dict.fromkeys(names[policy.origin] for policy in row.policies if policy.origin)
    return " and ".join(origins) or "-"


def _state(row: DomainCapacity) -> str:
    stranded = sum(len(group.workers) for group in row.stranded)
    if not stranded:
        if row.unreached and len(row.unreached) == len(row.workers):
            return "not reached"
        return row.state if row.state == "ok" else row.state.upper()
    able = row.prefill.ready + row.prefill.busy
    return "STRANDED" if stranded == able else f"STRANDED {stranded:,} of {able:,}"


# -- notes -----------------------------------------------------------------------------------------


def topology_notes(result: TopologyShow) -> Iterator[str]:
    """Stranded workers with the reason, domains that are down, different policies, no domain."""
    for notes in (_stranded_notes, _state_notes, _policy_notes):
        for row in result.rows:
            yield from notes(row, result)
    yield from _unplaced_notes(result)


def _stranded_notes(row: DomainCapacity, result: TopologyShow) -> Iterator[str]:
    for group in row.stranded:
        verb = "requires" if len(group.workers) == 1 else "require"
        need = f" {verb} {group.requires}" if group.requires else ""
        workers = f"{first_names(group.workers, _MOST_NAMED)}{need}"
        yield f"{_where(row, result)} is STRANDED: {workers}: {group.reason}; {group.outcome}"


def _state_notes(row: DomainCapacity, result: TopologyShow) -> Iterator[str]:
    where = _where(row, result)
    if row.state == "down":
        yield f"{where} is DOWN: {_down(row, result.domain)}"
    elif row.unreached:
        yield f"{where}: {_not_reached(row, result.domain)}"
    if row.state == "crosses":
        yield f"{where} CROSSES: {_crossing(row, result.domain)}"
    if row.state == "degraded":
        yield f"{where} is DEGRADED: {_weakened_roles(row)}"


def _policy_notes(row: DomainCapacity, result: TopologyShow) -> Iterator[str]:
    texts = [policy_text(policy, result.domain) for policy in row.policies]
    if len(set(texts)) > 1:
        pairs = zip(texts, row.policies, strict=True)
        each = (f"{text}: {first_names(policy.workers, _MOST_NAMED)}" for text, policy in pairs)
        yield f"{_value(row)} has more than one policy: {'; '.join(each)}"


def _unplaced_notes(result: TopologyShow) -> Iterator[str]:
    """Workers that were reached, and publish no value of the domain."""
    unplaced = [row for row in result.rows if row.value is None]
    lost = [name for row in unplaced for name in row.workers if name not in row.unreached]
    if not lost:
        return
    domain = result.domain
    if domain is None:
        yield "no worker publishes a topology domain: their locations are unknown"
        return
    verb, them = ("publishes", "it") if len(lost) == 1 else ("publish", "them")
    modes = {policy.enforcement for row in result.rows for policy in row.policies}
    if "preferred" in modes and "required" not in modes:
        effect = f"a preference for a {domain} has no effect on {them}"
    else:
        effect = f"a required {domain} never reaches {them}"
    yield f"{NO_DOMAIN}: {first_names(lost, _MOST_NAMED)} {verb} no {domain}: {effect}"


def _down(row: DomainCapacity, domain: str | None) -> str:
    workers = len(row.workers)
    if len(row.unreached) == workers:
        return _not_reached(row, domain)
    return (
        "its worker is unavailable" if workers == 1 else f"all {workers:,} workers are unavailable"
    )


def _not_reached(row: DomainCapacity, domain: str | None) -> str:
    """Workers whose engines were never reached, and what is unknown of them for that reason."""
    verb, their = ("was", "its") if len(row.unreached) == 1 else ("were", "their")
    unknown = [] if row.value is not None else [domain or "topology domain"]
    unknown += [] if row.model else ["model"]
    text = f"{first_names(row.unreached, _MOST_NAMED)} {verb} not reached"
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
        workers = first_names(row.unreached, _MOST_NAMED)
        there = f"no decode worker of it was reached ({workers}: not reached)"
    policies = dict.fromkeys(policy_text(policy, domain) for policy in row.policies)
    return f"{there}; KV caches go to decode workers elsewhere, as {' and '.join(policies)} allows"


def _weakened_roles(row: DomainCapacity) -> str:
    """The roles of which half of the workers, or more, take no requests."""
    roles = {"prefill": row.prefill, "decode": row.decode, "aggregated": row.aggregated}
    texts = []
    for name, role in roles.items():
        if is_weakened(role):
            of = "its" if role.workers == 1 else f"{role.unavailable:,} of {role.workers:,}"
            workers, verb = ("worker", "is") if role.workers == 1 else ("workers", "are")
            texts.append(f"{of} {name} {workers} {verb} unavailable")
    return "; ".join(texts)


def _where(row: DomainCapacity, result: TopologyShow) -> str:
    """The value, with the model where the fleet has several."""
    several = len({row.model for row in result.rows}) > 1
    return f"{_value(row)} for {row.model or 'an unknown model'}" if several else _value(row)


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
        text += "\n" + canvas.paragraphs(notes[:_MOST_NOTES], rest="")
        more = len(notes) - _MOST_NOTES
        text += f"{more} more: -o json\n" if more > 0 else ""
    writable = [row for row in result.rows if row.state in ("missing", "repair")]
    if result.dry_run:
        labels = plural(len(writable), "label")
        return text + f"\ndry run: nothing was written; {labels} would be written\n"
    return text + f"\n{plural(sum(row.written for row in writable), 'label')} written\n"


def _copy_state(row: CopiedLabel) -> str:
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
    Column("state", "STATE", _copy_state),
]
