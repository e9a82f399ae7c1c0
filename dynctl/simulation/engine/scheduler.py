"""Continuous batching for one data-parallel rank.

Each step divides a token budget among the running requests, as vLLM's scheduler does. A request has
tokens that are not computed yet (a whole prompt, or the last sampled token); the step computes as
many of them as the budget allows, and when all are computed, it produces the next token. Prefill,
chunked prefill, decode and recomputation after a preemption are thus one case.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.faults import FaultState
from dynctl.simulation.engine.output_plan import OutputPlan
from dynctl.simulation.engine.prefix_cache import BlockTable, CacheEvent, PrefixCache, extend_hashes

FinishReason = Literal["length", "stop"]
KvLoader = Callable[[int], Awaitable[None]]
"""Pulls that many KV blocks from another engine. Raises KvLost."""

# Shorter sleeps cost more than they last; the schedule adds them up.
_SHORTEST_SLEEP_S = 0.0005
# The most that the schedule may lag behind real time; more lag is dropped.
_LONGEST_DEBT_S = 0.05


class KvLost(Exception):
    """The other engine no longer has the KV blocks, or cannot be reached."""


class RankBusy(Exception):
    """The waiting queue of a rank is full."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One generation. `tokens`: the prompt, followed by the produced tokens."""

    id: str
    tokens: list[int]
    max_tokens: int
    finish_as: FinishReason
    plan: OutputPlan
    root: int = 0
    lora: str | None = None
    salt: str | None = None
    load_kv: KvLoader | None = None
    keep_kv: bool = False
    """Keep the blocks in `table` when finished: another engine will pull them."""

    prompt_tokens: int = 0
    produced: int = 0
    computed: int = 0
    cached_tokens: int | None = None
    hashes: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    loading: asyncio.Task[None] | None = None
    finish: FinishReason | None = None
    error: Exception | None = None
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def prefilling_tokens(self) -> int:
        """Prompt tokens that this engine still has to compute.

        0 after the first token, and 0 while KV blocks of another engine are loading.
        """
        if self.produced or self.load_kv is not None or self.loading is not None:
            return 0
        return max(0, self.prompt_tokens - self.computed)

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
        """The duration of a step with `prefill_tokens` and one token for `decodes` requests.

        Prefill is bound by compute, so it grows with the tokens; a decode step is bound by memory
        bandwidth, so it takes the same time for one request as for a batch.
        """
        seconds = prefill_tokens / self._config.prefill_tokens_per_s
        if decodes:
            seconds += self._config.decode_itl_ms / 1e3
        return self._scaled(seconds)

    def kv_transfer(self, blocks: int, puller_domains: Mapping[str, str]) -> float:
        """The duration of a transfer to an engine in `puller_domains` (domain -> value)."""
        config = self._config
        seconds = blocks * config.kv_transfer_ms_per_block / 1e3
        domain = config.kv_transfer_domain
        if domain and puller_domains.get(domain) != config.topology_domains.get(domain):
            seconds *= config.kv_transfer_cross_domain_factor
        return self._scaled(seconds)

    def _scaled(self, seconds: float) -> float:
        return seconds / self._config.speedup_ratio * self._faults.current.slow_factor


class RankScheduler:
    """Runs the requests of one rank with its prefix cache. `publish` gets the events of a step."""

    def __init__(
        self,
        config: EngineConfig,
        timer: StepTimer,
        publish: Callable[[list[CacheEvent]], None],
    ) -> None:
        self._config = config
        self._timer = timer
        self._publish = publish
        self.cache = PrefixCache(config.total_blocks, config.block_size)
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.queries = 0
        self.hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._wake = asyncio.Event()

    @property
    def active_prefill_tokens(self) -> int:
        """Prompt tokens accepted but not computed yet."""
        waiting = sum(request.prefilling_tokens for request in self.waiting)
        return waiting + sum(request.prefilling_tokens for request in self.running)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RankBusy if the queue is full."""
        if len(self.waiting) >= self._config.max_waiting:
            raise RankBusy(
                f"{len(self.waiting)} requests are waiting, the limit of --max-waiting; "
                "retry later or on another engine"
            )
        extend_hashes(request.hashes, request.tokens, self._config.block_size, request.root)
        self.waiting.append(request)
        self.prompt_tokens += request.prompt_tokens
        self._wake.set()

    def end(self, request: EngineRequest, error: Exception | None = None) -> None:
        """Stop a request now and free its blocks. No effect on a request that has ended."""
        if request.ended:
            return
        request.ended = True
        request.error = error
        if request.loading is not None:
            request.loading.cancel()
        with contextlib.suppress(ValueError):
            self.waiting.remove(request)
        with contextlib.suppress(ValueError):
            self.running.remove(request)
        self.release(request.table)
        request.table = None
        request.notify()

    def detach(self, request: EngineRequest) -> None:
        """Stop a request early (a stop string) without freeing its blocks."""
        with contextlib.suppress(ValueError):
            self.running.remove(request)
        request.ended = True

    def end_all(self, error: Exception) -> None:
        for request in [*self.running, *self.waiting]:
            self.end(request, error)

    def release(self, table: BlockTable | None) -> None:
        """Free blocks, for instance those of a finished hand-off."""
        if table is not None:
            self.cache.release(table)
            self._wake.set()

    def reset(self, error: Exception) -> None:
        """End all requests and empty the cache, as a restart does; no event is published."""
        self.end_all(error)
        self.cache = PrefixCache(self._config.total_blocks, self._config.block_size)

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
            self._admit()
            batch, prefill_tokens, decodes = self._next_batch()
            if not batch:
                self._flush()
                self._wake.clear()
                await self._wake.wait()
                due = clock()
                continue
            due = max(due, clock() - _LONGEST_DEBT_S)
            due += self._timer.step(prefill_tokens, decodes)
            ahead = due - clock()
            await asyncio.sleep(ahead if ahead > _SHORTEST_SLEEP_S else 0)
            for request, count in batch:
                if not request.ended and request.table is not None:
                    self._computed(request, request.table, count)
            self._flush()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            size = self._blocks_for(len(request.tokens))
            # The last token is always computed: the next token comes from its output.
            reusable = (len(request.tokens) - 1) // self._config.block_size
            table = self.cache.acquire(request.hashes[:reusable], size)
            if table is None:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.table = table
            request.computed = table.cached * self._config.block_size
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
                self.queries += request.prompt_tokens
                self.hits += request.computed
            if request.load_kv is not None:
                missing = self._blocks_for(request.prompt_tokens) - table.cached
                request.loading = asyncio.ensure_future(
                    self._load(request, request.load_kv, missing)
                )
                request.load_kv = None

    async def _load(self, request: EngineRequest, load_kv: KvLoader, missing: int) -> None:
        try:
            await load_kv(missing)
        except KvLost as error:
            request.loading = None
            if self._config.kv_load_failure_policy == "fail" or not self._config.can_prefill:
                self.end(request, error)
        except Exception as error:  # a bug in the pull fails the request
            request.loading = None
            self.end(request, error)
        else:
            request.loading = None
            if request.ended or request.table is None:
                return
            full = request.prompt_tokens // self._config.block_size
            self._commit(request, request.table, full)
            request.computed = request.prompt_tokens - 1
        self._wake.set()

    def _next_batch(self) -> tuple[list[tuple[EngineRequest, int]], int, int]:
        """(request, tokens to compute) for one step, its prefill tokens and decode requests."""
        budget = self._config.max_num_batched_tokens
        batch: list[tuple[EngineRequest, int]] = []
        prefill_tokens = decodes = 0
        for request in list(self.running):
            if budget <= 0:
                break
            if request.loading is not None or request.table is None:
                continue
            count = min(len(request.tokens) - request.computed, budget)
            if not self._ensure_blocks(request, request.computed + count):
                continue
            batch.append((request, count))
            budget -= count
            if request.produced and count == 1:
                decodes += 1
            else:
                prefill_tokens += count
        return [entry for entry in batch if entry[0].table is not None], prefill_tokens, decodes

    def _ensure_blocks(self, request: EngineRequest, tokens: int) -> bool:
        """Get blocks for `tokens` by preempting newer requests; False if itself preempted."""
        while request.table is not None:
            missing = self._blocks_for(tokens) - len(request.table.blocks)
            if missing <= 0 or self.cache.grow(request.table, missing):
                return True
            self._preempt(self._newest_victim(request))
        return False

    def _newest_victim(self, request: EngineRequest) -> EngineRequest:
        for candidate in reversed(self.running):
            if candidate is request or candidate.loading is None:
                return candidate
        return request

    def _preempt(self, request: EngineRequest) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.release(request.table)
        request.table = None
        request.computed = 0
        self.waiting.appendleft(request)

    def _commit(self, request: EngineRequest, table: BlockTable, full: int) -> None:
        self.cache.commit(table, request.hashes, request.tokens, full, request.lora, request.salt)

    def _computed(self, request: EngineRequest, table: BlockTable, count: int) -> None:
        request.computed += count
        full = request.computed // self._config.block_size
        if full > table.cached:
            extend_hashes(request.hashes, request.tokens, self._config.block_size, request.root)
            self._commit(request, table, full)
        if request.computed < len(request.tokens):
            return
        request.tokens.append(request.plan.token(request.produced))
        request.produced += 1
        self.generation_tokens += 1
        if request.produced == request.max_tokens:
            request.finish = request.finish_as
            self.running.remove(request)
            if not request.keep_kv:
                self.release(table)
                request.table = None
            request.ended = True
        request.notify()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    def _flush(self) -> None:
        events = self.cache.take_events()
        if events:
            self._publish(events)
