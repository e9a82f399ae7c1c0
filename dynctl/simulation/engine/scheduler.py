"""Continuous batching for one data-parallel rank in real time (the model: `engine.model`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dynctl.simulation.engine.cache_events import CacheEvent
from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.model import (
    Load,
    RankGeneration,
    RankModel,
    restore_seconds,
    step_seconds,
    transfer_seconds,
)
from dynctl.simulation.engine.output_plan import OutputPlan
from dynctl.simulation.engine.prefix_cache import BlockTable, extend_hashes

FinishReason = Literal["length", "stop"]
KvLoader = Callable[[int], Awaitable[None]]
"""Pulls that many KV blocks from another engine. Raises KvLost."""

# Shorter sleeps cost more than they last; the schedule adds them up.
_SHORTEST_SLEEP_S = 0.0005
# The most that the schedule may lag behind real time; more lag is dropped.
_LONGEST_DEBT_S = 0.05


class KvLost(Exception):
    """The other engine no longer has the KV blocks, or cannot be reached."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(RankGeneration):
    """One generation. ``tokens``: the prompt, followed by the produced tokens."""

    id: str
    tokens: list[int]
    finish_as: FinishReason
    plan: OutputPlan
    root: int = 0
    lora: str | None = None
    salt: str | None = None
    load_kv: KvLoader | None = None
    load_task: asyncio.Task[None] | None = None
    finish: FinishReason | None = None
    error: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.pulls = self.load_kv is not None

    def extend_hashes(self, block_size: int) -> None:
        extend_hashes(self.hashes, self.tokens, block_size, self.root)

    def contents(self) -> tuple[list[int], str | None, str | None]:
        return self.tokens, self.lora, self.salt

    def token_produced(self) -> None:
        self.tokens.append(self.plan.token(self.produced - 1))
        if self.ended:
            self.finish = self.finish_as
        self.notify()

    async def news(self) -> None:
        """Wait for a new token or the end of the request."""
        await self._news.wait()
        self._news.clear()

    def notify(self) -> None:
        self._news.set()


class StepTimer:
    """Durations in real seconds: simulated time / speed-up * slow factor."""

    def __init__(self, config: EngineConfig, faults: FaultState) -> None:
        self._config = config
        self._faults = faults

    def step(self, prefill_tokens: int, decodes: int) -> float:
        """The duration of a step (`model.step_seconds`)."""
        seconds = step_seconds(self._config, prefill_tokens, decodes)
        return seconds * self._faults.current.slow_factor

    def kv_transfer(self, blocks: int, puller_domains: Mapping[str, str]) -> float:
        """The duration of a transfer to an engine in `puller_domains` (domain -> value)."""
        config = self._config
        seconds = transfer_seconds(
            config, blocks, config.topology_domains, puller_domains, config.kv_transfer_domain
        )
        return seconds * self._faults.current.slow_factor

    def restore(self, host_blocks: int, disk_blocks: int) -> float:
        """The duration of loading blocks from the tiers below the device."""
        seconds = restore_seconds(self._config, host_blocks, disk_blocks)
        return seconds * self._faults.current.slow_factor


class RankScheduler(RankModel[ScheduledRequest]):
    """Runs the requests of one rank with its prefix cache. `publish` gets the events of a step."""

    def __init__(
        self,
        config: EngineConfig,
        timer: StepTimer,
        publish: Callable[[list[CacheEvent]], None],
    ) -> None:
        super().__init__(config)
        self._timer = timer
        self._publish = publish
        self._wake = asyncio.Event()
        #: When the last load from the tiers below ends, on the loop's clock.
        self._restored_at = 0.0

    def submit(self, request: ScheduledRequest) -> None:
        """Queue a request. Raises RankBusy if the queue is full."""
        super().submit(request)
        self._wake.set()

    def end(self, request: ScheduledRequest, error: Exception | None = None) -> None:
        """Stop a request now and free its blocks. No effect on a request that has ended."""
        if request.ended:
            return
        request.error = error
        if request.load_task is not None:
            request.load_task.cancel()
        super().end(request)
        request.notify()

    def end_all(self, error: Exception) -> None:
        for request in [*self.running, *self.waiting]:
            self.end(request, error)

    def release(self, table: BlockTable | None) -> None:
        """Free blocks, for instance those of a finished hand-off."""
        super().release(table)
        if table is not None:
            self._wake.set()

    def reset(self, error: Exception) -> None:
        """End all requests and empty the cache, as a restart does; no event is published."""
        self.end_all(error)
        self.forget()

    def clear_cache(self) -> bool:
        """Remove all cached blocks and publish it; False if requests hold blocks."""
        cleared = self.cache.clear()
        self._flush()
        return cleared

    async def run(self) -> None:
        """Run steps until cancelled."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            for load in self.admit():
                loading = self._restore(load) if load.request.restoring else self._load(load)
                load.request.load_task = asyncio.ensure_future(loading)
            batch = self.next_batch()
            if not batch.entries:
                self._flush()
                self._wake.clear()
                await self._wake.wait()
                due = clock()
                continue
            due = max(due, clock() - _LONGEST_DEBT_S)
            due += self._timer.step(batch.prefill_tokens, batch.decodes)
            ahead = due - clock()
            await asyncio.sleep(ahead if ahead > _SHORTEST_SLEEP_S else 0)
            self.complete(batch)
            self._flush()

    async def _restore(self, load: Load[ScheduledRequest]) -> None:
        clock = asyncio.get_running_loop().time
        seconds = self._timer.restore(load.host, load.disk)
        self._restored_at = ends = max(clock(), self._restored_at) + seconds
        await asyncio.sleep(ends - clock())
        self.take_restored(load.request)
        self._flush()
        self._wake.set()

    async def _load(self, load: Load[ScheduledRequest]) -> None:
        request, missing = load.request, load.missing
        load_kv, request.load_kv = request.load_kv, None
        try:
            if load_kv is not None:
                await load_kv(missing)
        except KvLost as error:
            request.loading = False
            if self._config.kv_load_failure_policy == "fail" or not self._config.can_prefill:
                self.end(request, error)
        except Exception as error:  # a bug in the pull fails the request
            request.loading = False
            self.end(request, error)
        else:
            self.take_pulled(request)
        self._wake.set()

    def _flush(self) -> None:
        events = self.cache.take_events()
        if events:
            self._publish(events)
