"""The measurements of a replay, and its result with the parameters on which it depends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from dynctl.documents.replay import (
    ReplayCache,
    ReplayCounts,
    ReplayGoodput,
    ReplayImbalance,
    ReplayPeers,
    ReplayResult,
    ReplayTransfers,
    ReplayWorker,
)
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.replay.fleet import Objective, ReplayPolicy, SimulatedFleet
from dynctl.simulation.replay.metrics import Ceiling, Distribution, imbalance
from dynctl.simulation.replay.rank import NS
from dynctl.simulation.replay.state import LiveRequest, ReplayRank
from dynctl.wire.traces import TraceRequest
from router_core import RouterConfig

_PAIRS: Final = (
    "pairs: the transfer begins when the prefill has ended, and a prefill does not wait for the "
    "decode worker; engines that send blocks while they compute, or reserve the decode worker's "
    "blocks first, have other times"
)


class Measures:
    """What is counted of all requests of a replay."""

    def __init__(self, objective: Objective, ceiling: Ceiling) -> None:
        self.objective = objective
        self.ceiling = ceiling
        self.requests = self.finished = self.failed = self.queued = self.retried = 0
        #: Of the failed requests, those that had output; how often others went on elsewhere.
        self.cut_off = self.moves = 0
        self.refusals: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.expected_tokens = 0
        self.host_tokens = self.disk_tokens = 0
        self.output_tokens = self.ceiling_tokens = self.trace_tokens = 0
        #: Of the ceiling, what is of requests that finished.
        self.reachable_tokens = 0
        self.hashed = 0
        self.ttft = Distribution()
        self.itl = Distribution()
        self.latency = Distribution()
        self.queue_wait = Distribution()
        self.engine_wait = Distribution()
        self.good = 0
        #: Requests that prefill and decode worker got at once.
        self.pairs = 0
        self.transfers = self.moved_blocks = self.crossing = self.crossing_blocks = 0

    def count_arrival(self, trace: TraceRequest, hashes: Sequence[int], block_size: int) -> int:
        """Count a request; returns the tokens that one cache without limit would have reused."""
        self.requests += 1
        tokens = trace.input_tokens
        self.trace_tokens += tokens
        if not trace.hash_ids:
            return 0
        self.hashed += 1
        reachable = self.ceiling.see(hashes, (tokens - 1) // block_size) * block_size
        self.ceiling_tokens += reachable
        return reachable

    def count_handoff(self, blocks: int, crosses: bool) -> None:
        """Count a hand-off, and whether it ``crosses`` to another domain."""
        self.transfers += 1
        self.moved_blocks += blocks
        if crosses:
            self.crossing += 1
            self.crossing_blocks += blocks

    def count_end(self, live: LiveRequest, now: int) -> tuple[float, float | None]:
        """Count a request that ended at ``now`` (ns); its TTFT and ITL in seconds."""
        trace = live.trace
        self.finished += 1
        cached = live.cached_tokens or 0
        self.prompt_tokens += trace.input_tokens
        self.cached_tokens += cached
        self.reachable_tokens += live.reachable
        self.host_tokens += live.host_tokens
        self.disk_tokens += live.disk_tokens
        self.expected_tokens += live.expected_tokens
        self.output_tokens += trace.output_tokens
        ttft = (live.first - live.arrived) / NS
        self.ttft.add(ttft)
        self.latency.add((now - live.arrived) / NS)
        itl = None
        if trace.output_tokens > 1:
            itl = (now - live.first) / NS / (trace.output_tokens - 1)
            self.itl.add(itl)
        limits = self.objective
        if (limits.ttft_s is None or ttft <= limits.ttft_s) and (
            limits.itl_s is None or itl is None or itl <= limits.itl_s
        ):
            self.good += 1
        return ttft, itl

    def result(
        self,
        *,
        policy: ReplayPolicy,
        fleet: SimulatedFleet,
        engine: EngineConfig,
        seed: int,
        routers: int,
        sync: str,
        seconds: float,
        ranks: Iterable[ReplayRank],
        peers: ReplayPeers | None = None,
    ) -> ReplayResult:
        """The document of a replay that took ``seconds`` of virtual time."""
        per_s = 1 / seconds if seconds else 0.0
        rows = [_row(rank, engine.total_blocks) for rank in ranks]
        hit_rate = _share(self.cached_tokens, self.prompt_tokens)
        ceiling = _share(self.ceiling_tokens, self.trace_tokens) if self.hashed else None
        reachable = _share(self.reachable_tokens, self.prompt_tokens)
        refused = self.refusals.total()
        size = fleet.block_bytes
        return ReplayResult(
            policy=policy.name,
            seed=seed,
            routers=routers,
            sync=sync,
            settings=changed_settings(policy.config),
            fleet=_fleet_parameters(fleet),
            engine=_engine_parameters(engine),
            seconds=seconds,
            counts=ReplayCounts(
                self.requests,
                self.finished,
                refused,
                self.failed,
                self.queued,
                self.retried,
                dict(sorted(self.refusals.items())),
                self.moves,
            ),
            cache=ReplayCache(
                self.prompt_tokens,
                self.cached_tokens,
                hit_rate,
                _share(self.expected_tokens, self.prompt_tokens),
                ceiling,
                self.ceiling.exact,
                hit_rate / reachable if reachable else None,
                self.host_tokens,
                self.disk_tokens,
            ),
            ttft_s=self.ttft.spread(),
            itl_s=self.itl.spread(),
            latency_s=self.latency.spread(),
            queued_s=self.queue_wait.spread(),
            engine_wait_s=self.engine_wait.spread(),
            requests_per_s=self.finished * per_s,
            input_tokens_per_s=self.prompt_tokens * per_s,
            output_tokens_per_s=self.output_tokens * per_s,
            refused_share=_share(refused, self.requests),
            goodput=ReplayGoodput(
                self.objective.ttft_s,
                self.objective.itl_s,
                self.good,
                _share(self.good, self.requests),
                self.good * per_s,
            ),
            imbalance=_imbalance(rows),
            transfers=ReplayTransfers(
                self.transfers,
                self.moved_blocks,
                self.moved_blocks * size,
                self.crossing,
                self.crossing_blocks,
                self.crossing_blocks * size,
            ),
            workers=rows,
            notes=list(self._notes(fleet)),
            peers=peers,
        )

    def _notes(self, fleet: SimulatedFleet) -> Iterator[str]:
        if 0 < self.hashed < self.requests:
            yield (
                f"{self.requests - self.hashed:,} of {self.requests:,} requests have no hash ids: "
                "their reuse is unknown and counts as none"
            )
        if self.pairs:
            yield _PAIRS
        if self.cut_off:
            why = "they moved as often as the migration limit allows, or no worker took them"
            if not fleet.migration_limit:
                why = "a frontend with a migration limit moves them (--migration-limit)"
            yield f"requests that had output when their worker was lost failed: {why}"


def _imbalance(rows: Sequence[ReplayWorker]) -> ReplayImbalance:
    """Of the role in which it is largest."""
    by_role: dict[str, list[ReplayWorker]] = {}
    for row in rows:
        by_role.setdefault(row.role, []).append(row)
    by_requests = [imbalance(row.requests for row in workers) for workers in by_role.values()]
    by_time = [imbalance(row.busy_s for row in workers) for workers in by_role.values()]
    return ReplayImbalance(
        max(most for most, _ in by_requests),
        max(spread for _, spread in by_requests),
        max(most for most, _ in by_time),
    )


def _row(rank: ReplayRank, total_blocks: int) -> ReplayWorker:
    engine = rank.engine
    return ReplayWorker(
        rank.worker.worker_id,
        rank.dp_rank,
        rank.worker.role.value,
        dict(rank.worker.domains),
        rank.requests,
        rank.prompt_tokens,
        rank.cached_tokens,
        rank.output_tokens,
        (rank.busy_ns + engine.busy_ns) / NS,
        rank.evicted + engine.cache.evictions,
        rank.preemptions + engine.preemptions,
        rank.lost_requests,
        rank.peak / total_blocks,
        rank.host_tokens,
        rank.disk_tokens,
    )


def changed_settings(config: RouterConfig, base: RouterConfig | None = None) -> dict[str, Any]:
    """The settings that differ from those of ``base``, by default from the defaults."""
    base = base or RouterConfig()
    return {
        name: getattr(config, name)
        for name in config.__dataclass_fields__
        if getattr(config, name) != getattr(base, name)
    }


def _engine_parameters(config: EngineConfig) -> dict[str, Any]:
    """What of an engine's configuration a replay depends on."""
    names = (
        *("block_size", "total_blocks", "max_model_len", "max_num_seqs", "max_waiting"),
        *("max_num_batched_tokens", "prefill_tokens_per_s", "decode_itl_ms", "speedup_ratio"),
        *("kv_transfer_ms_per_block", "kv_transfer_cross_domain_factor", "kv_transfer_domain"),
        *("kv_transfer_enforcement", "kv_transfer_preferred_weight", "kv_load_failure_policy"),
        *("kv_hold_timeout_s", "can_prefill"),
        *("host_blocks", "disk_blocks", "host_gb_per_s", "disk_gb_per_s", "kv_bytes_per_token"),
    )
    return {name: getattr(config, name) for name in names}


def _fleet_parameters(fleet: SimulatedFleet) -> dict[str, Any]:
    roles: Counter[str] = Counter(worker.role.value for worker in fleet.workers)
    return {
        "model": fleet.model,
        "workers": dict(sorted(roles.items())),
        "ranks": sum(worker.ranks for worker in fleet.workers),
        "bootstrap": sum(worker.bootstrap for worker in fleet.workers),
        "events_delay_s": fleet.events_delay_s,
        "events_loss": fleet.events_loss,
        "link_domain": fleet.link_domain,
        "block_bytes": fleet.block_bytes,
        "losses": [asdict(loss) for loss in fleet.losses],
        "migration_limit": fleet.migration_limit,
        "migration_max_tokens": fleet.migration_max_tokens,
        "changes": dict(sorted(Counter(change.what for change in fleet.changes).items())),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
