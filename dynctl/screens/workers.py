"""`workers list` and `workers show`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType

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
from dynctl.screens.numbers import age, amount, count, plural
from router_core import Role


def worker_columns(workers: Sequence[WorkerRow]) -> list[Column[WorkerRow]]:
    """The columns of `workers list` and of the dashboard's workers."""
    domains = _domains(workers)
    columns: list[Column[WorkerRow]] = [
        Column("name", "NAME", lambda w: w.name, name=True),
        Column("role", "ROLE", lambda w: w.role),
    ]
    for index, domain in enumerate(domains):
        columns.append(_domain_column(domain, 1 if index == 0 else 9))
    columns += [
        Column("status", "STATUS", lambda w: w.status, text=_status),
        number_column("requests", "REQS", lambda w: _total(w, "active_requests"), rank=5),
        number_column(
            "prefill_tokens", "PREFILL", lambda w: _total(w, "active_prefill_tokens"), rank=3
        ),
        number_column(
            "decode_blocks", "DECODE", lambda w: _total(w, "active_decode_blocks"), rank=3
        ),
        Column(
            "cached_blocks",
            "CACHED",
            lambda w: _total(w, "cached_blocks"),
            text=_cached,
            right=True,
            rank=2,
        ),
        Column("index", "INDEX", _index_state, text=_index),
        Column("model", "MODEL", lambda w: w.model, rank=7, wide=True),
        Column(
            "taints",
            "OTHER TAINTS",
            lambda w: w.taints,
            text=lambda w: ",".join(_own_taints(w)) or "-",
            rank=10,
            wide=True,
        ),
        Column(
            "load_age",
            "LOAD AGE",
            lambda w: _oldest(w, "load_age_s"),
            form=age,
            right=True,
            rank=11,
            wide=True,
        ),
        Column(
            "id",
            "ID",
            lambda w: w.worker_id,
            text=lambda w: f"{w.worker_id:016x}",
            rank=12,
            wide=True,
        ),
        Column("endpoint", "ENDPOINT", lambda w: w.endpoint, form=or_dash, rank=13, wide=True),
    ]
    return columns


def ordered(workers: Sequence[WorkerRow], domain: str | None = None) -> list[WorkerRow]:
    """The workers by model, ``domain``, role and name; workers without the domain come last.

    ``domain``: None for the first domain column, which is zone where workers publish it.
    """
    roles = [role.value for role in Role]
    by = domain if domain is not None else next(iter(_domains(workers)), "")

    def place(row: WorkerRow) -> tuple[str, bool, str, int, str]:
        value = row.domains.get(by)
        role = roles.index(row.role) if row.role in roles else len(roles)
        return (row.model, value is None, value or "", role, row.name)

    return sorted(workers, key=place)


def _domains(workers: Sequence[WorkerRow]) -> list[str]:
    """The domains that the workers publish, zone first."""
    found = {name for worker in workers for name in worker.domains}
    return sorted(found, key=lambda name: (name != "zone", name))


def worker_list(result: WorkerList, canvas: Canvas) -> str:
    if not result.workers:
        return f"no workers are registered ({result.source})\n"
    text = table(worker_columns(result.workers), result.workers, canvas)
    notes = [*_worker_notes(result.workers, canvas), *_replica_notes(result.replicas, canvas)]
    return text + "".join(line + "\n" for line in notes)


def _replica_notes(replicas: Sequence[ReplicaRow] | UnsetType, canvas: Canvas) -> Iterator[str]:
    for one in () if isinstance(replicas, UnsetType) else replicas:
        text = f"router {one.name}: {one.state}"
        if one.heard_age_s is not None:
            text += f", heard {age(one.heard_age_s)} ago, {plural(one.requests, 'request')} of it"
            text += f" counted above, {plural(one.lost, 'message')} lost"
        yield from canvas.paragraph(text, first="", rest="  ")


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
    return lambda result, canvas: "".join(
        part + "\n" for line in lines for part in canvas.paragraph(line, first="", rest="  ")
    )


def worker_rows_only(result: WorkerList, canvas: Canvas) -> str:
    """The rows alone, without heading and notes, for scripts."""
    return table(worker_columns(result.workers), result.workers, replace(canvas, headings=False))


def worker_detail(result: WorkerDetail, canvas: Canvas) -> str:
    """All fields of one worker."""
    worker = result.worker
    config = worker.runtime_config
    policy = "none of its own"
    if config.get("kv_transfer_domain"):
        weight = config.get("kv_transfer_preferred_weight")
        policy = f"{config.get('kv_transfer_enforcement')} {config['kv_transfer_domain']}"
        policy += "" if weight is None else f", weight {amount(weight)}"
    pairs = [
        ("name", worker.name),
        ("id", f"{worker.worker_id}  (hex {worker.worker_id:016x})"),
        ("model", worker.model),
        ("role", worker.role + ("" if worker.can_prefill else ", cannot prefill")),
        ("endpoint", worker.endpoint or "-"),
        ("status", worker_status(worker)),
        ("domains", ", ".join(f"{k}={v}" for k, v in worker.domains.items()) or "none"),
        ("kv transfer", policy),
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


def worker_status(worker: WorkerRow) -> str:
    """``ready``, ``busy``, ``cordoned``, or ``unavailable`` with the reason."""
    if worker.cordoned:
        return worker.reason or ""
    return _status(worker) + (f": {worker.reason}" if worker.reason else "")


def cordon_change(result: CordonChange, canvas: Canvas) -> str:
    """What changed for the worker, what still runs there, and what is left for new requests."""
    running = plural(result.running, "running request")
    place = "".join(f" with {name}={value}" for name, value in list(result.domains.items())[:1])
    if not result.cordoned:
        done = "was not cordoned" if not result.before else "may be chosen again"
        done = done if result.applied or not result.before else "would be chosen again"
        lines = [f"{result.worker} {done}"]
    else:
        done = "is cordoned" if result.applied else "would be cordoned"
        done = "is cordoned already" if result.before else done
        text = f"{result.worker} {done}: no new requests"
        if isinstance(result.drained, UnsetType):
            text += f", {running}" if result.running else ", none is running"
        elif result.drained:
            text += f"; drained after {age(result.waited_s or 0.0)}"
        else:
            text += f"; {running} after {age(result.waited_s or 0.0)}"
        lines = canvas.paragraph(text, first="")
        kind = f"{result.role} worker" if result.role else "worker"
        others = plural(result.same, f"other {kind}")
        text = f"{others}{place} {'takes' if result.same == 1 else 'take'} new requests"
        lines += canvas.paragraph(text, first="")
        if result.applied:
            lines.append(f"undo: dynctl workers uncordon {result.worker}")
    return "".join(line + "\n" for line in lines)


def worker_change(result: WorkerChange, canvas: Canvas) -> str:
    """What changed for the worker, its state, and what is left for new requests."""
    done = f"{'is' if result.applied else 'would be'} {result.change}"
    place = "".join(f" with {name}={value}" for name, value in list(result.domains.items())[:1])
    text = f"{result.worker} {done}"
    if result.change == "removed":
        running = plural(result.running, "running request")
        goes = "goes" if result.running == 1 else "go"
        text += f"; {running} {goes} on" if result.running else "; no request is running there"
        lines = canvas.paragraph(text, first="")
        kind = f"{result.role} worker" if result.role else "worker"
        others = plural(result.same, f"other {kind}")
        takes = "takes" if result.same == 1 else "take"
        lines += canvas.paragraph(f"{others}{place} {takes} new requests", first="")
    else:
        if result.applied and result.status is not None:
            role = result.role or "role unknown"
            status = "state unknown" if result.status == "unknown" else result.status
            reason = f" ({result.reason})" if result.reason else ""
            text += f": {role}{place}, {status}{reason}"
        lines = canvas.paragraph(text, first="")
        # Without the worker the one that it replaced would not be back.
        if result.applied and result.change == "added":
            lines.append(f"undo: dynctl workers remove {result.worker}")
    return "".join(line + "\n" for line in lines)


def rank_loads(worker: WorkerRow, canvas: Canvas) -> str:
    """Load and index of each rank, and why ranks are busy."""
    notes = [f"rank {r.dp_rank} busy: {why}" for r in worker.ranks for why in r.busy_reasons]
    text = table(_rank_columns(), worker.ranks, canvas)
    return text + "".join(note + "\n" for note in notes)


def _rank_columns() -> list[Column[RankRow]]:
    def both(own: float, reported: float | None) -> str:
        return count(own) + ("" if reported is None else f" ({count(reported)})")

    return [
        Column("dp_rank", "RANK", lambda r: r.dp_rank, right=True),
        number_column("requests", "REQS", lambda r: r.active_requests, rank=1),
        Column(
            "prefill",
            "PREFILL TOKENS",
            lambda r: r.active_prefill_tokens,
            text=lambda r: both(r.active_prefill_tokens, r.reported.active_prefill_tokens),
            right=True,
        ),
        Column(
            "decode",
            "DECODE BLOCKS",
            lambda r: r.active_decode_blocks,
            text=lambda r: both(r.active_decode_blocks, r.reported.active_decode_blocks),
            right=True,
        ),
        number_column("cached", "CACHED", lambda r: r.cached_blocks, rank=1),
        Column("busy", "BUSY", lambda r: r.busy, text=lambda r: "yes" if r.busy else "no"),
        Column("index", "INDEX", lambda r: r.index, text=_rank_index),
        Column("load_age", "LOAD AGE", lambda r: r.load_age_s, form=age, right=True, rank=2),
    ]


def _domain_column(domain: str, rank: int) -> Column[WorkerRow]:
    return Column(
        f"domain:{domain}",
        domain.upper(),
        lambda worker: worker.domains.get(domain),
        rank=rank,
    )


def _worker_notes(workers: Sequence[WorkerRow], canvas: Canvas) -> Iterator[str]:
    """Why workers are unavailable, busy, or without a cache that is known."""
    for worker in workers:
        if worker.reason:
            state = "not reachable yet: " if worker.status == UNREACHED else "unavailable: "
            state = "" if worker.cordoned else state
            yield from canvas.paragraph(f"{worker.name} is {state}{worker.reason}", first="")
        for rank in worker.ranks if worker.busy else ():
            where = f" rank {rank.dp_rank}" if len(worker.ranks) > 1 else ""
            for why in rank.busy_reasons[:1]:
                yield from canvas.paragraph(f"{worker.name}{where} is busy: {why}", first="")
    # Decode is chosen by load, with or without KV events.
    silent = [w.name for w in workers if not w.kv_events and w.role != Role.DECODE]
    learned = {w.name for w in workers if _index_state(w) == "estimated"}
    for how, named in (
        ("cache estimated from requests sent there", [one for one in silent if one in learned]),
        ("routed by load only", [one for one in silent if one not in learned]),
    ):
        if named:
            names = ", ".join(named[:5]) + (f" and {len(named) - 5:,} more" if named[5:] else "")
            yield from canvas.paragraph(f"no KV events, {how}: {names}", first="")


def _status(worker: WorkerRow) -> str:
    if worker.cordoned:
        return "cordoned"
    if worker.status != "ready":
        return worker.status
    busy = sum(rank.busy for rank in worker.ranks)
    if worker.busy:
        return "busy"
    return f"ready, {busy} of {len(worker.ranks)} ranks busy" if busy else "ready"


def _cached(worker: WorkerRow) -> str:
    """Cached blocks; ``-`` if the worker does not report them."""
    total = _total(worker, "cached_blocks")
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
    return next(
        (state for state in _STATES if state in states),
        "absent",
    )


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
    return state if oldest is None else f"{state}, {age(oldest)}"


def _rank_index(rank: RankRow) -> str:
    if rank.index == "absent":
        return "unknown"
    tail = "" if rank.index_age_s is None else f", {age(rank.index_age_s)}"
    return (f"{plural(rank.gaps, 'gap')}" if rank.index == "gapped" else rank.index) + tail


def _routed_by(worker: WorkerRow) -> str:
    return worker.routed_by if worker.kv_events else f"{worker.routed_by}, no KV events"


def _own_taints(worker: WorkerRow) -> list[str]:
    topology = {f"dynamo.topology/{k}={v}" for k, v in worker.domains.items()}
    return [taint for taint in worker.taints if taint not in topology]


def _total(worker: WorkerRow, name: str) -> float:
    return float(sum(getattr(rank, name) for rank in worker.ranks))


def _oldest(worker: WorkerRow, name: str) -> float | None:
    known = [getattr(rank, name) for rank in worker.ranks]
    return max((one for one in known if one is not None), default=None)
