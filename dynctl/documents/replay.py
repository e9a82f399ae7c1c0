"""The result of a replay: a trace through a simulated fleet under one policy."""

from __future__ import annotations

from typing import Any

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """How a measurement is distributed. ``count``: measurements; 0 gives None for the others.

    Percentiles are at most 0.05 % off (:data:`dynctl.simulation.replay.metrics.RELATIVE_ERROR`).
    """

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class ReplayCounts(msgspec.Struct, frozen=True):
    """Requests: of the trace, finished, refused, failed (their worker was lost).

    ``queued``: those that waited in the router's queue. ``retried``: attempts that were repeated.
    ``refusals``: refused requests by reason. ``moves``: how often a request that had output went on
    with another worker, after its own was lost.
    """

    requests: int
    finished: int
    refused: int
    failed: int
    queued: int
    retried: int
    refusals: dict[str, int]
    moves: int = 0


class ReplayCache(msgspec.Struct, frozen=True):
    """Reuse of prompt tokens. Rates are fractions of the prompt tokens of finished requests.

    ``expected_rate``: what the router believed when it chose. ``ceiling``: what one unlimited
    cache that all workers share would have reused; None where it is not known.
    ``ceiling_exact``: False where the memory for that bound was full, so that it is a lower bound.
    ``of_ceiling``: of the finished requests, reuse / what that cache would have reused of them; the
    ceiling is of all requests. ``expected_rate`` counts lower tiers by their weights.
    ``host_tokens`` and ``disk_tokens``: of ``cached_tokens``, those that were loaded from host
    memory and from disk.
    """

    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    expected_rate: float
    ceiling: float | None
    ceiling_exact: bool
    of_ceiling: float | None
    host_tokens: int = 0
    disk_tokens: int = 0


class ReplayTransfers(msgspec.Struct, frozen=True):
    """KV cache handed from prefill to decode workers. ``bytes`` 0: size of a block unknown."""

    transfers: int
    blocks: int
    bytes: int
    cross_domain_transfers: int
    cross_domain_blocks: int
    cross_domain_bytes: int


class ReplayGoodput(msgspec.Struct, frozen=True):
    """Requests that kept both limits. ``share``: of all requests of the trace."""

    ttft_limit_s: float | None
    itl_limit_s: float | None
    requests: int
    share: float
    requests_per_s: float


class ReplayWorker(msgspec.Struct, frozen=True):
    """The work of one rank. ``busy_s``: time in steps. ``lost_requests``: running when it failed.
    ``prompt_tokens`` of a request that moved have the output of the worker before.

    ``peak_kv``: largest share of its KV blocks in use. ``host_tokens`` and ``disk_tokens``: of
    ``cached_tokens``, those that were loaded from these tiers.
    """

    worker_id: int
    dp_rank: int
    role: str
    domains: dict[str, str]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    busy_s: float
    evicted_blocks: int
    preemptions: int
    lost_requests: int
    peak_kv: float
    host_tokens: int = 0
    disk_tokens: int = 0


class ReplayImbalance(msgspec.Struct, frozen=True):
    """How unequal the ranks' work is: the largest over the mean (1: equal), worst role.

    ``requests_cv`` is the standard deviation of requests over their mean.
    """

    requests_max: float
    requests_cv: float
    busy_max: float


class ReplayPeers(msgspec.Struct, frozen=True):
    """What several routers know of each other when they choose the worker of a prompt.

    ``window_s``: the delay of replica sync. ``near_share``: share of the ``choices`` for which
    another router had chosen a worker within that time; ``same_share``: of these, the share for
    which it had chosen the same rank. ``load_low_share`` and ``load_high_share``: prefill tokens
    that routers count too little and too much, of those that are booked, over all choices and
    ranks. None: nothing was near, or nothing was booked.
    """

    window_s: float
    choices: int
    near_share: float
    same_share: float | None
    load_low_share: float | None
    load_high_share: float | None


class ReplayResult(msgspec.Struct, frozen=True):
    """One policy on one trace. The same input and seed give the same document.

    ``seconds``: virtual time from the first arrival to the last end. ``settings``: the router
    settings that differ from their defaults. ``fleet`` and ``engine``: all parameters of the
    simulation. ``ttft_s`` (seconds from arrival to the first token), ``itl_s`` (mean time between
    tokens of a request), ``latency_s`` (arrival to the last token), ``queued_s`` (wait in the
    router's queue, of those that waited), ``engine_wait_s`` (wait for the engine's admission).
    ``peers``: of several routers.
    """

    policy: str
    seed: int
    routers: int
    sync: str
    settings: dict[str, Any]
    fleet: dict[str, Any]
    engine: dict[str, Any]
    seconds: float
    counts: ReplayCounts
    cache: ReplayCache
    ttft_s: Spread
    itl_s: Spread
    latency_s: Spread
    queued_s: Spread
    engine_wait_s: Spread
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    refused_share: float
    goodput: ReplayGoodput
    imbalance: ReplayImbalance
    transfers: ReplayTransfers
    workers: list[ReplayWorker]
    notes: list[str] = []
    peers: ReplayPeers | None = None
    kind: str = "ReplayResult"
    schema: int = 1


class ReplayTrace(msgspec.Struct, frozen=True):
    """What was replayed. ``format``: mooncake, bailian, azure, recording, or a kind of workload.

    ``parameters``: of a generated workload. ``hashes``: whether its first request has ids of
    blocks; without them hit rates are unknown. ``skipped``: bad lines that were left out.
    ``spread``: whether requests of one time were spread until the next time.
    """

    name: str
    format: str
    block_size: int
    hashes: bool
    speed: float
    limit: int | None
    parameters: dict[str, Any] = {}
    skipped: int = 0
    problems: list[str] = []
    spread: bool = False


class Estimate(msgspec.Struct, frozen=True):
    """A value over seeds. ``low`` and ``high``: its 95 % confidence interval, None for one seed."""

    mean: float
    low: float | None = None
    high: float | None = None


class PolicySummary(msgspec.Struct, frozen=True):
    """One policy over all seeds. A metric that is unknown is None."""

    policy: str
    runs: int
    metrics: dict[str, Estimate | None]


class RunMetrics(msgspec.Struct, frozen=True):
    """The metrics of one policy and seed; None: unknown."""

    policy: str
    seed: int
    metrics: dict[str, float | None]


class MetricChange(msgspec.Struct, frozen=True):
    """How a metric of a policy differs from the first policy's.

    ``change`` is positive where the metric got worse: a fraction of the base, or for ``absolute``
    the difference of shares. ``low`` and ``high``: its 95 % interval over seeds. ``verdict``:
    ``ok``, ``regressed``, or ``unknown`` where the interval includes the limit.
    """

    metric: str
    base: float
    value: float
    change: float
    low: float | None
    high: float | None
    absolute: bool
    verdict: str
    text: str


class PolicyChange(msgspec.Struct, frozen=True):
    """A policy against the first one. ``verdict``: the worst of its metrics."""

    policy: str
    base: str
    limit: float
    verdict: str
    changes: list[MetricChange]


class LoadPoint(msgspec.Struct, frozen=True):
    """One policy at a multiple of the trace's rate. Times are in seconds."""

    policy: str
    load: float
    requests_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    goodput_per_s: float
    goodput_share: float
    refused_share: float


class SearchPoint(msgspec.Struct, frozen=True):
    """Settings that the search tried. ``front``: no other one is better in both measures."""

    settings: dict[str, Any]
    ttft_p90_s: float | None
    output_tokens_per_s: float
    hit_rate: float | None
    refused_share: float
    front: bool


class ReplayReport(msgspec.Struct, frozen=True):
    """Policies side by side on one trace: a run for each policy and seed.

    ``metrics`` are those of each run, ``summaries`` over seeds. ``changes``: against the
    first policy, with ``--max-regress``. ``assumed``: parameters of the engines that a recorded or
    live fleet does not publish, with the values in their place.
    """

    trace: ReplayTrace
    fleet: str
    seeds: list[int]
    results: list[ReplayResult]
    summaries: list[PolicySummary]
    metrics: list[RunMetrics]
    changes: list[PolicyChange] = []
    loads: list[LoadPoint] = []
    search: list[SearchPoint] = []
    notes: list[str] = []
    assumed: dict[str, Any] = {}
    kind: str = "ReplayReport"
    schema: int = 1
