"""`workers list` and `workers show`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType

from dynctl.base.naming import in_numeric_order
from dynctl.documents.replicas import ReplicaRow
from dynctl.documents.workers import (
    UNREACHED,
    CordonChange,
    RankRow,
    WorkerChange,
    WorkerDetail,
    WorkerList,
    WorkerRow,
)
from dynctl.screens.canvas import Canvas
from dynctl.screens.columns import Column, number_column, or_dash, table
from dynctl.screens.numbers import age, amount, count, first_names, plural
from router_core import Role


def worker_columns(workers: Sequence[WorkerRow]) -> list[Column[WorkerRow]]:
    """The columns of `workers list` and of the dashboard's workers."""
    domains = _domains(workers)
    columns: list[Column[WorkerRow]] = [
        Column("name", "NAME", lambda w: w.name, name=True),
        Column("role", "ROLE", lambda w: w.role, form=or_dash),
    ]
    for index, domain in enumerate(domains):
        columns.append(_domain_column(domain, 1 if index == 0 else 9))
    return [
        *columns,
        Column("status", "STATUS", lambda w: w.status, text=_status),
        number_column("requests", "REQS", _sum_of("active_requests"), rank=5),
        number_column("prefill_tokens", "PREFILL", _sum_of("active_prefill_tokens"), rank=3),
        number_column("decode_blocks", "DECODE", _sum_of("active_decode_blocks"), rank=3),
        Column(
            "cached_blocks",
            "CACHED",
            _sum_of("cached_blocks"),
            text=_cached_text,
            right=True,
            rank=2,
        ),
        Column("index", "INDEX", _index_state, text=_index),
        Column("model", "MODEL", lambda w: w.model, rank=7, wide=True),
        Column("taints", "OTHER TAINTS", lambda w: w.taints, text=_taints, rank=10, wide=True),
        Column("load_age", "LOAD AGE", _load_age, form=age, right=True, rank=11, wide=True),
        Column("id", "ID", lambda w: w.worker_id, form=_hex_id, rank=12, wide=True),
        Column("endpoint", "ENDPOINT", lambda w: w.endpoint, form=or_dash, rank=13, wide=True),
    ]


def sort_workers(workers: Sequence[WorkerRow], domain: str | None = None) -> list[WorkerRow]:
    """The workers by model, ``domain``, role and name, whose numbers count as numbers; workers
    without the domain come last.

    ``domain``: None for the first domain column, which is zone where workers publish it.
    """
    roles = [role.value for role in Role]
    by = domain if domain is not None else next(iter(_domains(workers)), "")

    def place(row: WorkerRow) -> tuple[Any, ...]:
        value = row.domains.get(by)
        role = roles.index(row.role) if row.role in roles else len(roles)
        return (
            row.model,
            value is None,
            in_numeric_order(value or ""),
            role,
            in_numeric_order(row.name),
        )

    return sorted(workers, key=place)


def _domains(workers: Sequence[WorkerRow]) -> list[str]:
    """The domains that the workers publish, zone first."""
    names = {name for worker in workers for name in worker.domains}
    return sorted(names, key=lambda name: (name != "zone", name))


def worker_list(result: WorkerList, canvas: Canvas) -> str:
    if not result.workers:
        return f"no workers are registered ({result.source})\n"
    text = table(worker_columns(result.workers), result.workers, canvas)
    text += canvas.paragraphs(_worker_notes(result.workers), rest="")
    return text + canvas.paragraphs(_replica_notes(result.replicas))


def _replica_notes(replicas: Sequence[ReplicaRow] | UnsetType) -> Iterator[str]:
    for replica in () if isinstance(replicas, UnsetType) else replicas:
        text = f"router {replica.name}: {replica.state}"
        if replica.heard_age_s is not None:
            requests, lost = plural(replica.requests, "request"), plural(replica.lost, "message")
            text += f", heard {age(replica.heard_age_s)} ago, {requests} of it counted above"
            text += f", {lost} lost"
        yield text


def no_match(
    rows: Sequence[WorkerRow], *, model: str | None, selector: str | None, role: str | None = None
) -> Callable[[Any, Canvas], str]:
    """The screen for filters that keep none of ``rows``: the filters, and names that no row has."""
    from dynctl.sources.query import Selector, selector_keys

    filters = {"model": model, "role": role, "selector": selector}
    options = " ".join(
        f"-l {value}" if name == "selector" else f"--{name} {value}"
        for name, value in filters.items()
        if value is not None
    )
    lines = [f"0 of {plural(len(rows), 'worker')} match {options}"]
    models = sorted({row.model for row in rows})
    if model is not None and models and model not in models:
        lines.append(f"models: {', '.join(models)}")
    for key in Selector.parse(selector or "").unknown_keys(rows):
        lines.append(f"no worker has {key}; known: {', '.join(selector_keys(rows))}")
    return lambda result, canvas: canvas.paragraphs(lines)


def worker_rows_only(result: WorkerList, canvas: Canvas) -> str:
    """The rows alone, without heading and notes, for scripts."""
    return table(worker_columns(result.workers), result.workers, replace(canvas, headings=False))


def worker_detail(result: WorkerDetail, canvas: Canvas) -> str:
    """All fields of one worker."""
    worker = result.worker
    config = worker.runtime_config
    pairs = [
        ("name", worker.name),
        ("id", f"{worker.worker_id}  (hex {worker.worker_id:016x})"),
        ("model", worker.model),
        ("role", worker.role + ("" if worker.can_prefill else ", cannot prefill")),
        ("endpoint", worker.endpoint or "-"),
        ("status", worker_status(worker)),
        ("domains", ", ".join(f"{k}={v}" for k, v in worker.domains.items()) or "none"),
        ("kv transfer", _transfer_policy(config)),
        ("other taints", ", ".join(_own_taints(worker)) or "none"),
        ("block size", plural(worker.block_size, "token")),
        ("KV blocks", count(config.get("total_kv_blocks")) + " per rank"),
        ("batch budget", count(config.get("max_num_batched_tokens")) + " tokens"),
        ("routed by", _routed_by(worker)),
    ]
    if worker.device is not UNSET:
        pairs.insert(4, ("device", worker.device))
    if worker.other_names is not UNSET:
        pairs.insert(3, ("other names", ", ".join(worker.other_names)))
    lines = [f"{label:<13} {text}" for label, text in pairs]
    return "\n".join(lines) + "\n\n" + rank_loads(worker, canvas)


def _transfer_policy(config: Mapping[str, Any]) -> str:
    if not config.get("kv_transfer_domain"):
        return "none of its own"
    weight = config.get("kv_transfer_preferred_weight")
    policy = f"{config.get('kv_transfer_enforcement')} {config['kv_transfer_domain']}"
    return policy if weight is None else f"{policy}, weight {amount(weight)}"


def worker_status(worker: WorkerRow) -> str:
    """``ready``, ``busy``, ``cordoned``, or ``unavailable`` with the reason."""
    if worker.cordoned:
        return worker.reason or ""
    return _status(worker) + (f": {worker.reason}" if worker.reason else "")


def cordon_change(result: CordonChange, canvas: Canvas) -> str:
    """What changed for the worker, what still runs there, and what is left for new requests."""
    if not result.cordoned:
        return f"{result.worker} {_uncordoned_text(result)}\n"
    lines = [_cordoned_text(result), _others_take_requests(result)]
    text = canvas.paragraphs(lines, rest="")
    if result.applied:
        text += f"undo: dynctl workers uncordon {result.worker}\n"
    return text


def _uncordoned_text(result: CordonChange) -> str:
    if not result.before:
        return "was not cordoned"
    return "may be chosen again" if result.applied else "would be chosen again"


def _cordoned_text(result: CordonChange) -> str:
    if result.before:
        done = "is cordoned already"
    else:
        done = "is cordoned" if result.applied else "would be cordoned"
    text = f"{result.worker} {done}: no new requests"
    running = plural(result.running, "running request")
    if isinstance(result.drained, UnsetType):
        return f"{text}, {running}" if result.running else f"{text}, none is running"
    waited = age(result.waited_s or 0.0)
    return (
        f"{text}; drained after {waited}" if result.drained else f"{text}; {running} after {waited}"
    )


def _others_take_requests(result: CordonChange | WorkerChange) -> str:
    """What is left for new requests."""
    others = plural(result.same, f"other {result.role} worker" if result.role else "other worker")
    takes = "takes" if result.same == 1 else "take"
    return f"{others}{_place(result)} {takes} new requests"


def _place(result: CordonChange | WorkerChange) -> str:
    """`` with zone=zone-a``: the first domain; nothing without any."""
    return "".join(f" with {name}={value}" for name, value in list(result.domains.items())[:1])


def worker_change(result: WorkerChange, canvas: Canvas) -> str:
    """What changed for the worker, its state, and what is left for new requests."""
    text = f"{result.worker} {'is' if result.applied else 'would be'} {result.change}"
    if result.change == "removed":
        goes = "goes" if result.running == 1 else "go"
        running = f"{plural(result.running, 'running request')} {goes} on"
        text += f"; {running}" if result.running else "; no request is running there"
        return canvas.paragraphs([text, _others_take_requests(result)], rest="")
    if result.applied and result.status is not None:
        role = result.role or "role unknown"
        status = "state unknown" if result.status == "unknown" else result.status
        reason = f" ({result.reason})" if result.reason else ""
        text += f": {role}{_place(result)}, {status}{reason}"
    text = canvas.paragraphs([text], rest="")
    # Without the worker the one that it replaced would not be back.
    if result.applied and result.change == "added":
        text += f"undo: dynctl workers remove {result.worker}\n"
    return text


def rank_loads(worker: WorkerRow, canvas: Canvas) -> str:
    """Load and index of each rank, and why ranks are busy."""
    notes = [f"rank {r.dp_rank} busy: {why}" for r in worker.ranks for why in r.busy_reasons]
    text = table(_rank_columns(worker), worker.ranks, canvas)
    return text + "".join(note + "\n" for note in notes)


def _with_reported(own: float, reported: float | None) -> str:
    return count(own) + ("" if reported is None else f" ({count(reported)})")


def _rank_prefill(rank: RankRow) -> str:
    return _with_reported(rank.active_prefill_tokens, rank.reported.active_prefill_tokens)


def _rank_decode(rank: RankRow) -> str:
    return _with_reported(rank.active_decode_blocks, rank.reported.active_decode_blocks)


def _rank_columns(worker: WorkerRow) -> Sequence[Column[RankRow]]:
    return (
        Column("dp_rank", "RANK", lambda r: r.dp_rank, right=True),
        number_column("requests", "REQS", lambda r: r.active_requests, rank=1),
        Column("prefill", "PREFILL TOKENS", _rank_prefill, right=True),
        Column("decode", "DECODE BLOCKS", _rank_decode, right=True),
        number_column("cached", "CACHED", lambda r: r.cached_blocks, rank=1),
        Column("busy", "BUSY", lambda r: "yes" if r.busy else "no"),
        Column("index", "INDEX", lambda r: _rank_index(r, worker)),
        Column("load_age", "LOAD AGE", lambda r: r.load_age_s, form=age, right=True, rank=2),
    )


def _domain_column(domain: str, rank: int) -> Column[WorkerRow]:
    return Column(
        f"domain:{domain}",
        domain.upper(),
        lambda worker: worker.domains.get(domain),
        rank=rank,
    )


def _worker_notes(workers: Sequence[WorkerRow]) -> Iterator[str]:
    """Why workers are unavailable, busy, or without a cache that is known."""
    for worker in workers:
        if worker.reason:
            yield f"{worker.name} is {_unavailable(worker)}{worker.reason}"
        if worker.busy:
            yield from _busy_ranks(worker)
    # Decode is chosen by load, with or without KV events.
    silent = [worker for worker in workers if not worker.kv_events and worker.role != Role.DECODE]
    estimated = [worker.name for worker in silent if _index_state(worker) == "estimated"]
    by_load = [worker.name for worker in silent if _index_state(worker) != "estimated"]
    if estimated:
        names = first_names(estimated, 5)
        yield f"no KV events, cache estimated from requests sent there: {names}"
    if by_load:
        yield f"no KV events, routed by load only: {first_names(by_load, 5)}"


def _unavailable(worker: WorkerRow) -> str:
    if worker.cordoned:
        return ""
    return "not reachable yet: " if worker.status == UNREACHED else f"{worker.status}: "


def _busy_ranks(worker: WorkerRow) -> Iterator[str]:
    for rank in worker.ranks:
        where = f" rank {rank.dp_rank}" if len(worker.ranks) > 1 else ""
        for why in rank.busy_reasons[:1]:
            yield f"{worker.name}{where} is busy: {why}"


def _status(worker: WorkerRow) -> str:
    if worker.cordoned:
        return "cordoned"
    if worker.status != "ready":
        return worker.status
    busy = sum(rank.busy for rank in worker.ranks)
    if worker.busy:
        return "busy"
    return f"ready, {busy} of {len(worker.ranks)} ranks busy" if busy else "ready"


def _cached_text(worker: WorkerRow) -> str:
    """Cached blocks; ``-`` if the worker does not report them."""
    total = sum(rank.cached_blocks for rank in worker.ranks)
    state = _index_state(worker)
    known = state == "estimated" or (worker.kv_events and (total or state != "absent"))
    return count(total) if known else "-"


#: States of an index, the worst first.
_STATES = (
    *("disconnected", "over_limit", "gapped", "unlinked", "recovering"),
    *("absent", "estimated", "current"),
)


def _index_state(worker: WorkerRow) -> str:
    states = {rank.index for rank in worker.ranks}
    return next((state for state in _STATES if state in states), "absent")


def _lost_for(worker: WorkerRow) -> list[float]:
    """Seconds since each lost event stream was lost, where known."""
    return [
        rank.stream_for_s
        for rank in worker.ranks
        if rank.index == "disconnected" and rank.stream_for_s is not UNSET
    ]


def _index(worker: WorkerRow) -> str:
    state = _index_state(worker)
    if state == "estimated":
        return state
    if not worker.kv_events:
        return "load only"
    oldest = _oldest(worker, "index_age_s")
    if state == "disconnected":
        oldest = max(_lost_for(worker), default=oldest)
    if state == "gapped":
        return f"{plural(sum(rank.gaps for rank in worker.ranks), 'gap')}"
    if state == "absent":
        return "unknown"
    if state == "current" and _may_hang(worker):
        return _last_known(oldest)
    return state if oldest is None else f"{state}, {age(oldest)}"


def _may_hang(worker: WorkerRow) -> bool:
    """Whether no event may show what the engine caches now, because it does not answer."""
    return worker.status != "ready" and not worker.cordoned


def _last_known(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"as of {age(seconds)} ago"


def _rank_index(rank: RankRow, worker: WorkerRow) -> str:
    if rank.index == "absent":
        return "unknown"
    if rank.index == "current" and _may_hang(worker):
        return _last_known(rank.index_age_s)
    tail = "" if rank.index_age_s is None else f", {age(rank.index_age_s)}"
    return (f"{plural(rank.gaps, 'gap')}" if rank.index == "gapped" else rank.index) + tail


def _routed_by(worker: WorkerRow) -> str:
    return worker.routed_by if worker.kv_events else f"{worker.routed_by}, no KV events"


def _own_taints(worker: WorkerRow) -> list[str]:
    topology = {f"dynamo.topology/{k}={v}" for k, v in worker.domains.items()}
    return [taint for taint in worker.taints if taint not in topology]


def _taints(worker: WorkerRow) -> str:
    return ",".join(_own_taints(worker)) or "-"


def _hex_id(worker_id: int) -> str:
    return f"{worker_id:016x}"


def _load_age(worker: WorkerRow) -> float | None:
    return _oldest(worker, "load_age_s")


def _sum_of(name: str) -> Callable[[WorkerRow], float | None]:
    """The sum of a field over the ranks of a worker; None where none is known."""

    def total(worker: WorkerRow) -> float | None:
        values = [getattr(rank, name) for rank in worker.ranks]
        return float(sum(values)) if values else None

    return total


def _oldest(worker: WorkerRow, name: str) -> float | None:
    known = [getattr(rank, name) for rank in worker.ranks]
    return max((seconds for seconds in known if seconds is not None), default=None)
