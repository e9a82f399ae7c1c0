"""Policies side by side: metrics over seeds, regressions, loads, and a search of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, stdev
from typing import Any, Final

from dynctl.base.errors import UsageProblem
from dynctl.base.quantities import percent
from dynctl.documents.replay import (
    Estimate,
    LoadPoint,
    MetricChange,
    PolicyChange,
    PolicySummary,
    ReplayResult,
    SearchPoint,
)
from dynctl.simulation.replay.fleet import ReplayPolicy
from dynctl.simulation.replay.result import changed_settings
from router_core import RouterConfig

Run = Callable[[ReplayPolicy, int, float], ReplayResult]
"""Simulate a policy with a seed at a load (1: the trace's own rate)."""

MOST_TRIES: Final = 500


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a result. ``absolute``: a share, whose changes are differences.

    ``guarded``: `--max-regress` looks at it.
    """

    name: str
    title: str
    of: Callable[[ReplayResult], float | None]
    higher_is_better: bool = False
    absolute: bool = False
    guarded: bool = True


def _hit_rate(result: ReplayResult) -> float | None:
    unknown = result.cache.ceiling is None or not result.cache.prompt_tokens
    return None if unknown else result.cache.hit_rate


def _tier_rate(result: ReplayResult, tier: str) -> float | None:
    """Share of the prompt tokens that were loaded from a tier; a part of the hit rate."""
    if _hit_rate(result) is None:
        return None
    return float(getattr(result.cache, tier) / result.cache.prompt_tokens)


def _peers(name: str) -> Callable[[ReplayResult], float | None]:
    return lambda result: None if result.peers is None else getattr(result.peers, name)


#: What several routers know of each other.
_PEERS: Final = tuple(
    Metric(name, title, _peers(name), guarded=False)
    for name, title in (
        ("near_share", "share of choices near one of another router"),
        ("same_share", "of these, share with the same worker"),
        ("load_low_share", "share of the prefill load that routers do not count"),
        ("load_high_share", "share of the prefill load that routers count in excess"),
    )
)
METRICS: Final = (
    Metric("hit_rate", "hit rate", _hit_rate, higher_is_better=True),
    Metric("of_ceiling", "share of the ceiling", lambda r: r.cache.of_ceiling, True, guarded=False),
    Metric("host_hit_rate", "hit rate of host memory", lambda r: _tier_rate(r, "host_tokens"),
           True, guarded=False),
    Metric("disk_hit_rate", "hit rate of disk", lambda r: _tier_rate(r, "disk_tokens"), True,
           guarded=False),
    Metric("ttft_p50_s", "TTFT p50", lambda r: r.ttft_s.p50),
    Metric("ttft_p90_s", "TTFT p90", lambda r: r.ttft_s.p90, guarded=False),
    Metric("ttft_p99_s", "TTFT p99", lambda r: r.ttft_s.p99),
    Metric("itl_p50_s", "inter-token latency p50", lambda r: r.itl_s.p50),
    Metric("requests_per_s", "requests per second", lambda r: r.requests_per_s, True,
           guarded=False),
    Metric(
        "output_tokens_per_s", "output tokens per second", lambda r: r.output_tokens_per_s, True
    ),
    Metric("goodput_share", "goodput", lambda r: r.goodput.share, True, True, guarded=False),
    Metric("refused_share", "share refused", lambda r: r.refused_share, absolute=True),
    Metric(
        "failed_share", "share failed", lambda r: r.counts.failed / max(1, r.counts.requests),
        absolute=True,
    ),
    Metric("moves", "moves to another worker", lambda r: float(r.counts.moves), guarded=False),
    Metric("imbalance", "imbalance", lambda r: r.imbalance.busy_max, guarded=False),
    Metric("queued_share", "share queued", lambda r: r.counts.queued / max(1, r.counts.requests),
           absolute=True, guarded=False),
    Metric("queued_p90_s", "queueing p90", lambda r: r.queued_s.p90, guarded=False),
    *_PEERS,
    Metric("transfers", "transfers", lambda r: float(r.transfers.transfers), guarded=False),
    Metric("cross_domain_transfers", "cross-domain transfers",
           lambda r: float(r.transfers.cross_domain_transfers), guarded=False),
    Metric("cross_domain_bytes", "cross-domain bytes",
           lambda r: float(r.transfers.cross_domain_bytes), guarded=False),
)  # fmt: skip


def values(result: ReplayResult) -> dict[str, float | None]:
    """Every metric of one result."""
    return {metric.name: metric.of(result) for metric in METRICS}


def summaries(results: Sequence[ReplayResult]) -> list[PolicySummary]:
    """Each policy's metrics over its runs, in the order of the results."""
    runs: dict[str, list[ReplayResult]] = {}
    for result in results:
        runs.setdefault(result.policy, []).append(result)
    rows = []
    for name, own in runs.items():
        metrics: dict[str, Estimate | None] = {}
        for metric in METRICS:
            values = [metric.of(result) for result in own]
            known = [value for value in values if value is not None]
            metrics[metric.name] = _estimate(known) if len(known) == len(values) else None
        rows.append(PolicySummary(name, len(own), metrics))
    return rows


def changes(results: Sequence[ReplayResult], limit: float) -> list[PolicyChange]:
    """Every other policy against the first, seed by seed. ``limit``: worse by more regresses."""
    runs: dict[str, dict[int, ReplayResult]] = {}
    for result in results:
        runs.setdefault(result.policy, {})[result.seed] = result
    base_name, *others = runs
    rows = []
    for name in others:
        own = [
            change
            for metric in METRICS
            if metric.guarded
            and (change := _change(metric, runs[base_name], runs[name], limit)) is not None
        ]
        verdicts = {change.verdict for change in own}
        worst = next(word for word in ("regressed", "unknown", "ok") if word in verdicts | {"ok"})
        rows.append(PolicyChange(name, base_name, limit, worst, own))
    return rows


def _change(
    metric: Metric,
    base: Mapping[int, ReplayResult],
    other: Mapping[int, ReplayResult],
    limit: float,
) -> MetricChange | None:
    """How much worse ``other`` is; None where the metric is unknown."""
    worse: list[float] = []
    values: list[tuple[float, float]] = []
    for seed, result in base.items():
        before, after = metric.of(result), metric.of(other[seed])
        if before is None or after is None:
            return None
        values.append((before, after))
        worse.append(_worsening(metric, before, after))
    estimate = _estimate(worse)
    verdict = _verdict(estimate, limit)
    befores, afters = zip(*values, strict=True)
    return MetricChange(
        metric.name,
        fmean(befores),
        fmean(afters),
        estimate.mean,
        estimate.low,
        estimate.high,
        metric.absolute,
        verdict,
        _sentence(metric, estimate, verdict, limit),
    )


def _worsening(metric: Metric, before: float, after: float) -> float:
    """How much worse a value is than before: a difference, or a share of the value before."""
    difference = before - after if metric.higher_is_better else after - before
    if metric.absolute or not difference:
        return difference
    return difference / abs(before) if before else math.copysign(1.0, difference)


def _verdict(worse: Estimate, limit: float) -> str:
    low = worse.mean if worse.low is None else worse.low
    high = worse.mean if worse.high is None else worse.high
    if low > limit:
        return "regressed"
    return "ok" if high <= limit else "unknown"


def _sentence(metric: Metric, worse: Estimate, verdict: str, limit: float) -> str:
    def in_words(value: float) -> str:
        size = f"{100 * abs(value):.2f} points" if metric.absolute else percent(abs(value), 2)
        return f"{size} {'worse' if value > 0 else 'better'}"

    if worse.low is None or worse.high is None:
        if not worse.mean:
            return f"{metric.title} is unchanged"
        return f"{metric.title} is {in_words(worse.mean)}; one seed, so no interval"
    if not worse.mean and not worse.low:
        return f"{metric.title} is unchanged"
    text = f"{metric.title} is {in_words(worse.mean)}; 95 % interval {in_words(worse.low)} to "
    text += in_words(worse.high)
    if verdict == "unknown":
        return f"{text}, which includes the limit: use more seeds"
    return text if worse.low <= 0 <= worse.high else f"{text}, which excludes 0"


def loads(
    run: Run, policies: Sequence[ReplayPolicy], factors: Sequence[float], seed: int
) -> list[LoadPoint]:
    """Every policy at every load."""
    points = []
    for policy in policies:
        for factor in factors:
            result = run(policy, seed, factor)
            points.append(
                LoadPoint(
                    policy.name,
                    factor,
                    result.counts.requests / result.seconds if result.seconds else 0.0,
                    result.ttft_s.p50,
                    result.ttft_s.p90,
                    result.goodput.requests_per_s,
                    result.goodput.share,
                    result.refused_share,
                )
            )
    return points


# -- search ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tuned:
    """A setting that the search varies: from ``low`` to ``high``, by factors if ``log``.

    ``off``: the value that turns it off, which is tried as well.
    """

    name: str
    low: float
    high: float
    log: bool = False
    off: Any = ...

    def value_at(self, share: float) -> float:
        if self.log:
            return round(float(self.low * (self.high / self.low) ** share), 3)
        return round(self.low + (self.high - self.low) * share, 3)


TUNED: Final = (
    Tuned("prefill_load_scale", 0.25, 8.0, log=True),
    Tuned("overlap_score_credit", 0.25, 2.0, log=True),
    Tuned("overlap_score_credit_decay", 0.05, 2.0, log=True, off=0.0),
    Tuned("decode_active_request_weight", 0.5, 64.0, log=True, off=0.0),
    Tuned("router_temperature", 0.01, 1.0, log=True, off=0.0),
    Tuned("router_queue_threshold", 0.5, 16.0, log=True, off=None),
    Tuned("router_predicted_ttl_secs", 1.0, 60.0, log=True, off=None),
)


def candidates(base: RouterConfig, tries: int, seed: int) -> Iterator[RouterConfig]:
    """Settings to try: the base first, then each setting from a Latin hypercube.

    One third of the values of a setting that can be off are off.
    """
    if base.router_mode != "kv":
        raise UsageProblem(
            f"--search: router_mode {base.router_mode} has no settings to tune; expected kv"
        )
    yield base
    random = Random(f"search {seed}")
    count = tries - 1
    columns: dict[str, list[Any]] = {}
    for setting in _settings_to_tune(base):
        shares = [(index + random.random()) / count for index in range(count)]
        random.shuffle(shares)
        values: list[Any] = [setting.value_at(share) for share in shares]
        if setting.off is not ...:
            for index in random.sample(range(count), count // 3):
                values[index] = setting.off
        columns[setting.name] = values
    for index in range(count):
        yield replace(base, **{name: values[index] for name, values in columns.items()})


def _settings_to_tune(base: RouterConfig) -> list[Tuned]:
    """The settings that have an effect beside those of the base."""
    return [
        setting
        for setting in TUNED
        if (setting.name != "router_predicted_ttl_secs" or base.use_kv_events)
        and (setting.name != "router_queue_threshold" or base.router_policy_config is None)
    ]


def search(run: Run, base: ReplayPolicy, tries: int, seed: int) -> list[SearchPoint]:
    """The points that were tried, the front first; the first of the others is the base."""
    if not 2 <= tries <= MOST_TRIES:
        raise UsageProblem(f"--search {tries}: expected 2 to {MOST_TRIES} simulations")
    tried: list[tuple[RouterConfig, ReplayResult]] = []
    for config in candidates(base.config, tries, seed):
        tried.append((config, run(ReplayPolicy(base.name, config), seed, 1.0)))
    measures = [(_latency(result), -result.output_tokens_per_s) for _, result in tried]
    points = [
        SearchPoint(
            changed_settings(config, base.config),
            result.ttft_s.p90,
            result.output_tokens_per_s,
            _hit_rate(result),
            result.refused_share,
            not any(_dominates(other, own) for other in measures),
        )
        for (config, result), own in zip(tried, measures, strict=True)
    ]
    order = sorted(
        range(len(points)), key=lambda index: (not points[index].front, measures[index], index)
    )
    return [points[index] for index in order]


def _latency(result: ReplayResult) -> float:
    return math.inf if result.ttft_s.p90 is None else result.ttft_s.p90


def _dominates(point: tuple[float, float], other: tuple[float, float]) -> bool:
    return point != other and point[0] <= other[0] and point[1] <= other[1]


# -- intervals -------------------------------------------------------------------------------------

#: Two-sided 95 % quantiles of Student's t, for 1 to 30 degrees of freedom.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def _estimate(values: Sequence[float]) -> Estimate:
    """The mean with Student's 95 % interval; no interval for one value."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    half = _T[min(len(values) - 1, len(_T)) - 1] * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)
