"""The result of a replay: a trace through a simulated fleet under one policy."""

from __future__ import annotations

from typing import Any

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """How a measurement is distributed. ``count``: measurements; 0 gives None for the others.

    Percentiles are at most 1 % off (:data:`dynctl.simulation.replay.metrics.RELATIVE_ERROR`).
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
    ``refusals``: refused requests by reason.
    """

    requests: int
    finished: int
    refused: int
    failed: int
    queued: int
    retried: int
    refusals: dict[str, int]


class ReplayCache(msgspec.Struct, frozen=True):
    """Reuse of prompt tokens. Rates are fractions of the prompt tokens of finished requests.

    ``expected_rate``: what the router believed when it chose. ``ceiling``: what one unlimited
    cache that all workers share would have reused; None where it is not known.
    ``ceiling_exact``: False where the memory for that bound was full, so that it is a lower bound.
    ``of_ceiling``: hit_rate / ceiling.
    """

    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    expected_rate: float
    ceiling: float | None
    ceiling_exact: bool
    of_ceiling: float | None


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

    ``peak_kv``: largest share of its KV blocks in use.
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


class ReplayImbalance(msgspec.Struct, frozen=True):
    """How unequal the ranks' work is: the largest over the mean (1: equal), worst role.

    ``requests_cv`` is the standard deviation of requests over their mean.
    """

    requests_max: float
    requests_cv: float
    busy_max: float


class ReplayResult(msgspec.Struct, frozen=True):
    """One policy on one trace. The same input and seed give the same document.

    ``seconds``: virtual time from the first arrival to the last end. ``settings``: the router
    settings that differ from their defaults. ``fleet`` and ``engine``: all parameters of the
    simulation. ``ttft_s`` (seconds from arrival to the first token), ``itl_s`` (mean time between
    tokens of a request), ``latency_s`` (arrival to the last token), ``queued_s`` (wait in the
    router's queue, of those that waited), ``engine_wait_s`` (wait for the engine's admission).
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
    kind: str = "ReplayResult"
    schema: int = 1
