"""Read a Dynamo frontend's ``GET /metrics``: load, model facts, the queue, the routing mode.

Names and behaviour as observed with Dynamo 1.6.1:

- a rank's load row appears with its first load and stays, at 0, until its worker has left
  discovery: after a SIGKILL that is the lease time. Ranks without a row are idle;
- each frontend counts its own requests, and those of every frontend that has replica sync, with
  or without replica sync of its own (a sum then counts twice: see :func:`add_loads`). The prefill
  tokens that a peer has finished stay in the gauge until the rank's next change, although its
  router no longer counts them;
- the rows of a model remain after the model has gone, except ``model_ready``;
- worker ids are decimal, and the workers of an aggregated fleet are called ``decode``.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dynctl.base.json_fields import U32_MAX, U64_MAX
from dynctl.wire.prometheus_text import read_samples

MAX_BYTES: Final = 64 * 1024 * 1024
MAX_PROBLEMS: Final = 20
"""Invalid rows that are named one by one; the last entry counts the others."""
_COUNT_MAX: Final = 2**53

Rank = tuple[int, int]
"""``(worker_id, dp_rank)``."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The requests in flight of a router on one rank, in blocks and prompt tokens."""

    active_decode_blocks: int = 0
    active_prefill_tokens: int = 0
    worker_type: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that a frontend exports about a model, in tokens and blocks; None if unknown.

    ``ready`` is None once the model has gone.
    """

    ready: bool | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class QueuePending:
    """The requests in a router's queue, and their prompt tokens."""

    model: str
    policy_class: str
    worker_type: str
    requests: int = 0
    isl_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FrontendMetrics:
    """One reading of one frontend.

    ``registered``: the ranks that a kv router may choose, idle ones too, with their worker type.
    ``rejections``: requests refused for overload since the frontend started, by model.
    ``kv_routing`` and ``kv_events``: whether the frontend routes by KV cache, and whether it
    receives KV events; None if that is unknown because it serves no model, and ``kv_events`` also
    before Dynamo 1.4. ``uses_caches``: False where its overlap_score_credit is 0, so that it reads
    no caches at all; None if unknown.
    ``load_sources``: routers and mock workers whose active requests it receives; None if unknown.
    ``event_source_mismatches``: workers whose KV events the router misses, by target endpoint.
    ``problems`` describes invalid rows.
    """

    rank_loads: Mapping[Rank, RankLoad] = field(default_factory=dict)
    registered: Mapping[Rank, str] = field(default_factory=dict)
    models: Mapping[str, ModelFacts] = field(default_factory=dict)
    queues: tuple[QueuePending, ...] = ()
    rejections: Mapping[str, int] = field(default_factory=dict)
    kv_routing: bool | None = None
    kv_events: bool | None = None
    event_source_mismatches: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    uses_caches: bool | None = None
    load_sources: int | None = None

    @property
    def pending_requests(self) -> int:
        return sum(queue.requests for queue in self.queues)


def add_loads(
    frontends: Iterable[FrontendMetrics], *, mirrored: bool = False
) -> dict[Rank, RankLoad]:
    """The load of every rank over several frontends.

    ``mirrored`` is for frontends with replica sync, each of which counts the load of all: the
    highest number of decode blocks (other frontends may lag), the lowest number of prefill tokens
    (a gauge keeps tokens that a peer has finished). Replica sync itself is not in the metrics.
    """
    loads: dict[Rank, RankLoad] = {}
    for frontend in frontends:
        for rank, load in frontend.rank_loads.items():
            known = loads.get(rank)
            if known is None:
                loads[rank] = load
            elif mirrored:
                loads[rank] = replace(
                    known,
                    active_decode_blocks=max(known.active_decode_blocks, load.active_decode_blocks),
                    active_prefill_tokens=min(
                        known.active_prefill_tokens, load.active_prefill_tokens
                    ),
                )
            else:
                loads[rank] = replace(
                    known,
                    active_decode_blocks=known.active_decode_blocks + load.active_decode_blocks,
                    active_prefill_tokens=known.active_prefill_tokens + load.active_prefill_tokens,
                )
    return loads


def read_frontend_metrics(body: bytes) -> FrontendMetrics:
    """Read a whole answer. Raises WireError if it is not in the Prometheus text format."""
    reading = _MetricsReading()
    for name, labels, value in read_samples(body, _WANTED, max_bytes=MAX_BYTES):
        reading.take(name, labels, value)
    return reading.result()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of the prompts and outputs of one model's requests; None: not exported."""

    requests: int
    input_tokens: float | None
    output_tokens: float | None


def read_lengths(bodies: Iterable[bytes]) -> dict[str, Lengths]:
    """The lengths of the requests of several frontends together, for each model with requests.
    Raises WireError."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_LENGTHS.values(), 0.0))
    for body in bodies:
        for name, labels, text in read_samples(body, frozenset(_LENGTHS), max_bytes=MAX_BYTES):
            try:
                value = float(text)
            except ValueError:
                continue
            if math.isfinite(value) and value >= 0 and labels.get("model"):
                sums[labels["model"]][_LENGTHS[name]] += value
    lengths = {}
    for model, row in sums.items():
        requests = int(max(row["input_count"], row["output_count"]))
        if row["input_count"] or row["output_count"]:
            lengths[model] = Lengths(requests, _mean(row, "input"), _mean(row, "output"))
    return lengths


def _mean(row: Mapping[str, float], kind: str) -> float | None:
    count = row[f"{kind}_count"]
    return row[f"{kind}_sum"] / count if count else None


@dataclass(slots=True)
class RequestTotals:
    """What one frontend counted since its start for the requests of one model.

    ``ended``: by ``error_type``, empty for a success. ``latencies``: ``ttft`` and ``itl`` ->
    upper edge of a bucket in seconds -> observations at most that long. ``tokens``: ``cached`` and
    ``input`` -> the sum over the requests that were routed.
    """

    ended: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    latencies: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    tokens: dict[str, float] = field(default_factory=dict)


def read_request_totals(body: bytes, model: str | None = None) -> RequestTotals:
    """Read what is counted of one model; None: of all together. Raises WireError."""
    totals = RequestTotals()
    for name, labels, text in read_samples(body, _TOTALS, max_bytes=MAX_BYTES):
        if model is not None and labels.get("model") != model:
            continue
        value = float(text)
        if not (math.isfinite(value) and value >= 0):
            continue
        if name == _REQUESTS:
            failed = "internal" if labels.get("status") == "error" else ""
            totals.ended[labels.get("error_type") or failed] += value
        elif name in _TOKEN_SUMS:
            totals.tokens[_TOKEN_SUMS[name]] = totals.tokens.get(_TOKEN_SUMS[name], 0.0) + value
        else:
            try:
                edge = float(labels.get("le", ""))
            except ValueError:
                continue
            row = totals.latencies[_BUCKETS[name]]
            row[edge] = row.get(edge, 0.0) + value
    return totals


def buckets(below: Mapping[float, float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Upper edge -> observations at most that long, as finite edges and the observations of each
    bucket and above all; both empty where the row of all observations is missing."""
    edges = sorted(below)
    if not edges or not math.isinf(edges[-1]):
        return (), ()
    counts = [below[edge] for edge in edges]
    return tuple(edges[:-1]), (
        counts[0],
        *(now - before for before, now in itertools.pairwise(counts)),
    )


# -- the rows that are read -----------------------------------------------------------------------

_LENGTHS: Final = {
    "dynamo_frontend_input_sequence_tokens_sum": "input_sum",
    "dynamo_frontend_input_sequence_tokens_count": "input_count",
    "dynamo_frontend_output_sequence_tokens_sum": "output_sum",
    "dynamo_frontend_output_sequence_tokens_count": "output_count",
}
_REQUESTS: Final = "dynamo_frontend_requests_total"
_TOKEN_SUMS: Final = {
    "dynamo_frontend_cached_tokens_sum": "cached",
    "dynamo_frontend_input_sequence_tokens_sum": "input",
}
_BUCKETS: Final = {
    "dynamo_frontend_time_to_first_token_seconds_bucket": "ttft",
    "dynamo_frontend_inter_token_latency_seconds_bucket": "itl",
}
_TOTALS: Final = frozenset({_REQUESTS, *_TOKEN_SUMS, *_BUCKETS})
_LOADS: Final = {
    f"dynamo_frontend_worker_{name}": name
    for name in ("active_decode_blocks", "active_prefill_tokens")
}
_FACTS: Final = {
    f"dynamo_frontend_model_{name}": name
    for name in (
        "kv_cache_block_size",
        "total_kv_blocks",
        "max_num_batched_tokens",
        "max_num_seqs",
        "context_length",
    )
}
_QUEUES: Final = {
    f"dynamo_frontend_router_queue_pending_{name}": name
    for name in ("requests", "isl_tokens", "cached_tokens")
}
_READY: Final = "dynamo_frontend_model_ready"
_REJECTIONS: Final = "dynamo_frontend_model_rejection_total"
#: Exported by kv routers only, from their first worker on.
_REGISTERED: Final = "dynamo_component_router_worker_registered"
#: Exported by kv routers that receive KV events; not with --no-router-kv-events.
_MISMATCHES: Final = "dynamo_component_router_kv_event_source_mismatch_workers"
#: 1 for the policy in force; `disabled` where the overlap_score_credit is 0.
_CACHE_POLICY: Final = "dynamo_component_router_approximate_cache_effective_policy"
#: Every kv router follows the active requests of the routers that publish them (replica sync).
_LOAD_SOURCES: Final = "dynamo_component_router_active_sequence_zmq_ingress_sources"
#: Exported from 1.4 on, the first version that reports its event sources; as is _CACHE_POLICY.
_STARTED: Final = "dynamo_component_router_requests_started_total"
_WANTED: Final = frozenset(
    {*_LOADS, *_FACTS, *_QUEUES, _READY, _REJECTIONS, _REGISTERED, _MISMATCHES}
    | {_CACHE_POLICY, _LOAD_SOURCES, _STARTED}
)


class _MetricsReading:
    """Groups samples by rank, model and queue."""

    def __init__(self) -> None:
        self.loads: dict[Rank, dict[str, int]] = {}
        self.types: dict[Rank, str] = {}
        self.registered: dict[Rank, str] = {}
        self.facts: dict[str, dict[str, int]] = defaultdict(dict)
        self.ready: dict[str, bool] = {}
        self.queues: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
        self.rejections: dict[str, int] = defaultdict(int)
        self.mismatches: dict[str, int] = {}
        self.cache_policies: dict[str, bool] = {}
        self.load_sources: int | None = None
        self.reports_sources = False
        self.problems: list[str] = []
        self.unnamed = 0

    def take(self, name: str, labels: Mapping[str, str], text: str) -> None:
        try:
            self._place(name, labels, _count(text))
        except ValueError as error:
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(f"{name}: {error}")
            else:
                self.unnamed += 1

    def _place(self, name: str, labels: Mapping[str, str], value: int) -> None:
        if name in _LOADS:
            rank = _rank(labels, "worker_id")
            row = self.loads.setdefault(rank, {})
            row[_LOADS[name]] = max(value, row.get(_LOADS[name], 0))
            self.types[rank] = labels.get("worker_type", "")
        elif name == _REGISTERED:
            # Here worker_id is the frontend's own id, in hex.
            rank = _rank(labels, "router_worker_id")
            if value:
                self.registered[rank] = labels.get("worker_type", "")
        elif name in _FACTS:
            self.facts[_label(labels, "model")][_FACTS[name]] = value
        elif name == _READY:
            self.ready[_label(labels, "model")] = value == 1
        elif name in _QUEUES:
            classes = labels.get("policy_class", ""), labels.get("worker_type", "")
            self.queues[_label(labels, "model"), *classes][_QUEUES[name]] = value
        elif name == _REJECTIONS:
            self.rejections[_label(labels, "model")] += value
        elif name == _CACHE_POLICY:
            self.reports_sources = True
            policy = _label(labels, "policy")
            self.cache_policies[policy] = value == 1 or self.cache_policies.get(policy, False)
        elif name == _STARTED:
            self.reports_sources = True
        elif name == _LOAD_SOURCES:
            self.load_sources = max(value, self.load_sources or 0)
        else:
            target = [_label(labels, f"target_{part}") for part in ("namespace", "component")]
            target.append(_label(labels, "target_endpoint"))
            self.mismatches[".".join(target)] = value

    def _uses_events(self) -> bool | None:
        if self.mismatches:
            return True
        return False if self.reports_sources else None

    def _model(self, model: str) -> ModelFacts:
        # Dynamo exports 0 for unknown.
        facts = {name: value or None for name, value in self.facts.get(model, {}).items()}
        return ModelFacts(ready=self.ready.get(model), **facts)

    def result(self) -> FrontendMetrics:
        if self.unnamed:
            self.problems.append(f"and {self.unnamed:,} more rows")
        models = {model: self._model(model) for model in sorted({*self.facts, *self.ready})}
        routing = bool(self.registered) or (False if any(self.ready.values()) else None)
        return FrontendMetrics(
            rank_loads={
                rank: RankLoad(**row, worker_type=self.types[rank])
                for rank, row in self.loads.items()
            },
            registered=self.registered,
            models=models,
            queues=tuple(
                QueuePending(model, policy, kind, **row)
                for (model, policy, kind), row in sorted(self.queues.items())
            ),
            rejections=dict(self.rejections),
            kv_routing=routing,
            kv_events=self._uses_events() if routing else routing,
            event_source_mismatches=self.mismatches,
            problems=tuple(self.problems),
            uses_caches=not self.cache_policies.get("disabled", False)
            if any(self.cache_policies.values())
            else None,
            load_sources=self.load_sources,
        )


def _rank(labels: Mapping[str, str], worker: str) -> Rank:
    return _integer(labels, worker, U64_MAX), _integer(labels, "dp_rank", U32_MAX)


def _integer(labels: Mapping[str, str], name: str, high: int) -> int:
    text = _label(labels, name)
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= high):
        raise ValueError(f"{name}: expected an integer up to {high}, got {text[:40]!r}")
    return int(text)


def _label(labels: Mapping[str, str], name: str) -> str:
    if name not in labels:
        raise ValueError(f"label {name} is missing")
    return labels[name]


def _count(text: str) -> int:
    """A count from a number as text: ``512``, ``5.12e+02``. Raises ValueError."""
    number = float(text)
    if not 0 <= number <= _COUNT_MAX or not number.is_integer():
        raise ValueError(f"expected a count, got {text[:40]}")
    return int(number)
