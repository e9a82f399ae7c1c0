"""The timing and cache model of one data-parallel rank, without clock and IO.

Each step divides a token budget among the running requests, as vLLM's scheduler does. A request has
tokens that are not computed yet (a whole prompt, or the last sampled token); the step computes as
many of them as the budget allows, and when all are computed, it produces the next token. Prefill,
chunked prefill, decode and recomputation after a preemption are thus one case.

The real-time scheduler (:mod:`dynctl.simulation.engine.scheduler`) and the replay
(:mod:`dynctl.simulation.replay.rank`) run the same steps; each has its own clock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, NamedTuple, TypeVar

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.prefix_cache import BlockTable, PrefixCache


class RankBusy(Exception):
    """The waiting queue of a rank is full."""


@dataclass(slots=True, eq=False)
class RankGeneration:
    """What the model reads of one request. The prompt has ``prompt_tokens`` tokens.

    ``hashes``: of its full blocks, as far as `extend_hashes` made them. ``pulls``: KV blocks of
    another engine are loaded when it is admitted; ``loading``: that runs. ``keep_kv``: keep the
    blocks in ``table`` when finished, because another engine will pull them. ``every_token``: call
    `token_produced` for each token, else for the first and the last. ``restoring``: blocks that
    load from the tiers below this engine's device; ``computed`` has them already.
    ``cached_tokens``: prompt tokens that were not computed, of which ``host_tokens`` and
    ``disk_tokens`` were loaded from these tiers.
    """

    every_token: ClassVar[bool] = True

    max_tokens: int
    prompt_tokens: int = 0
    keep_kv: bool = False
    pulls: bool = False
    loading: bool = False
    produced: int = 0
    computed: int = 0
    cached_tokens: int | None = None
    host_tokens: int = 0
    disk_tokens: int = 0
    restoring: int = 0
    hashes: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    ended: bool = False

    @property
    def prefilling_tokens(self) -> int:
        """Prompt tokens that this engine still has to compute.

        0 after the first token, and 0 while KV blocks of another engine are loading.
        """
        if self.produced or self.pulls or (self.loading and not self.restoring):
            return 0
        return max(0, self.prompt_tokens - self.computed)

    def extend_hashes(self, block_size: int) -> None:
        """Append the hashes of blocks that are full now."""
        raise NotImplementedError

    def contents(self) -> tuple[Sequence[int], str | None, str | None]:
        """What cache events show of the blocks: tokens, adapter, cache salt."""
        raise NotImplementedError

    def token_produced(self) -> None:
        """One more token is ready; ``produced`` counts it already."""


AnyGeneration = TypeVar("AnyGeneration", bound=RankGeneration)


class Batch(NamedTuple, Generic[AnyGeneration]):
    """One step: tokens to compute for each request, tokens of prefill, requests that decode."""

    entries: list[tuple[AnyGeneration, int]]
    prefill_tokens: int
    decodes: int


class Load(NamedTuple, Generic[AnyGeneration]):
    """What a request has to load first: ``missing`` blocks of another engine, or blocks of the
    tiers below this one."""

    request: AnyGeneration
    missing: int
    host: int = 0
    disk: int = 0


def step_seconds(config: EngineConfig, prefill_tokens: int, decodes: int) -> float:
    """The duration of a step with ``prefill_tokens`` and one token for ``decodes`` requests.

    Prefill is bound by compute, so it grows with the tokens; a decode step is bound by memory
    bandwidth, so it takes the same time for one request as for a batch.
    """
    seconds = prefill_tokens / config.prefill_tokens_per_s
    if decodes:
        seconds += config.decode_itl_ms / 1e3
    return seconds / config.speedup_ratio


def transfer_seconds(
    config: EngineConfig,
    blocks: int,
    from_domains: Mapping[str, str],
    to_domains: Mapping[str, str],
    link_domain: str | None,
) -> float:
    """The duration of a transfer of ``blocks`` KV blocks between engines in these domains.

    Between different values of ``link_domain`` it takes longer by the cross-domain factor.
    """
    seconds = blocks * config.kv_transfer_ms_per_block / 1e3
    if link_domain and to_domains.get(link_domain) != from_domains.get(link_domain):
        seconds *= config.kv_transfer_cross_domain_factor
    return seconds / config.speedup_ratio


def restore_seconds(config: EngineConfig, host_blocks: int, disk_blocks: int) -> float:
    """The duration of loading so many blocks from host memory and from disk to the device.

    A rank loads one prefix after the other, while it computes other requests.
    """
    gigabytes = config.block_size * config.kv_bytes_per_token / 1e9
    seconds = host_blocks * gigabytes / config.host_gb_per_s
    seconds += disk_blocks * gigabytes / config.disk_gb_per_s
    return seconds / config.speedup_ratio


class RankModel(Generic[AnyGeneration]):
    """The requests of one rank and its prefix cache.

    A step is `admit`, then `next_batch`, then (after its duration) `complete`. ``block_tokens``:
    entries of a block in `RankGeneration.contents`, by default its tokens. ``events``: whether the
    cache queues its events.
    """

    def __init__(
        self, config: EngineConfig, block_tokens: int | None = None, *, events: bool = True
    ) -> None:
        self._config = config
        self._block_size = config.block_size
        self._block_tokens = block_tokens or config.block_size
        self._events = events
        self.cache = self._empty_cache()
        self.waiting: deque[AnyGeneration] = deque()
        self.running: list[AnyGeneration] = []
        self.queries = 0
        #: Prompt tokens found on the device, and in the tiers below it.
        self.hits = 0
        self.lower_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    @property
    def active_prefill_tokens(self) -> int:
        """Prompt tokens accepted but not computed yet."""
        waiting = sum(request.prefilling_tokens for request in self.waiting)
        return waiting + sum(request.prefilling_tokens for request in self.running)

    def submit(self, request: AnyGeneration) -> None:
        """Queue a request. Raises RankBusy if the queue is full."""
        if len(self.waiting) >= self._config.max_waiting:
            raise RankBusy(
                f"{len(self.waiting)} requests are waiting, the limit of --max-waiting; "
                "retry later or on another engine"
            )
        request.extend_hashes(self._block_size)
        self.waiting.append(request)
        self.prompt_tokens += request.prompt_tokens

    def end(self, request: AnyGeneration) -> None:
        """Stop a request now and free its blocks. No effect on a request that has ended."""
        if request.ended:
            return
        request.ended = True
        with contextlib.suppress(ValueError):
            self.waiting.remove(request)
        with contextlib.suppress(ValueError):
            self.running.remove(request)
        self.release(request.table)
        request.table = None

    def detach(self, request: AnyGeneration) -> None:
        """Stop a request early (a stop string) without freeing its blocks."""
        with contextlib.suppress(ValueError):
            self.running.remove(request)
        request.ended = True

    def release(self, table: BlockTable | None) -> None:
        """Free blocks, for instance those of a finished hand-off."""
        if table is not None:
            self.cache.release(table)

    def forget(self) -> None:
        """Empty the cache, as a restart does; no event is queued."""
        self.cache = self._empty_cache()

    def _empty_cache(self) -> PrefixCache:
        config = self._config
        return PrefixCache(
            config.total_blocks,
            self._block_tokens,
            events=self._events,
            host_blocks=config.host_blocks,
            disk_blocks=config.disk_blocks,
        )

    # -- a step ----------------------------------------------------------------------------

    def admit(self) -> list[Load[AnyGeneration]]:
        """Admit what waits; returns the requests that have to load KV blocks first.

        A request that pulls loads nothing from the tiers below this engine.
        """
        loads: list[Load[AnyGeneration]] = []
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            length = request.prompt_tokens + request.produced
            size = -(-length // self._block_size)
            # The last token is always computed: the next token comes from its output.
            reusable = (length - 1) // self._block_size
            table = self.cache.acquire(
                request.hashes[:reusable], size, lower=not request.pulls
            )  # fmt: skip
            if table is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.table = table
            request.computed = device = table.cached * self._block_size
            if table.lower != (0, 0):
                host, disk = table.lower
                request.restoring, request.loading = host + disk, True
                request.computed += request.restoring * self._block_size
                loads.append(Load(request, 0, host, disk))
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
                self.queries += request.prompt_tokens
                self.hits += device
                if request.restoring:
                    self.lower_hits += request.computed - device
                    request.host_tokens = table.lower[0] * self._block_size
                    request.disk_tokens = table.lower[1] * self._block_size
            if request.pulls:
                request.pulls, request.loading = False, True
                missing = self._blocks_for(request.prompt_tokens) - table.cached
                loads.append(Load(request, missing))
        return loads

    def take_pulled(self, request: AnyGeneration) -> None:
        """The KV blocks of another engine arrived: only the last prompt token is left."""
        request.loading = False
        if request.ended or request.table is None:
            return
        self._commit(request, request.table, request.prompt_tokens // self._block_size)
        request.computed = request.prompt_tokens - 1

    def take_restored(self, request: AnyGeneration) -> None:
        """The blocks of the tiers below arrived: they are on the device too."""
        blocks, request.restoring, request.loading = request.restoring, 0, False
        if not request.ended and request.table is not None:
            self._commit(request, request.table, request.table.cached + blocks)

    def next_batch(self) -> Batch[AnyGeneration]:
        """What the next step computes; without entries there is nothing to do."""
        budget = self._config.max_num_batched_tokens
        entries: list[tuple[AnyGeneration, int]] = []
        prefill_tokens = decodes = 0
        preempted = self.preemptions
        for request in list(self.running):
            if budget <= 0:
                break
            table = request.table
            if request.loading or table is None:
                continue
            computed = request.computed
            count = request.prompt_tokens + request.produced - computed
            if count > budget:
                count = budget
            short = computed + count > len(table.blocks) * self._block_size
            if short and not self._ensure_blocks(request, computed + count):
                continue
            entries.append((request, count))
            budget -= count
            if count == 1 and request.produced:
                decodes += 1
            else:
                prefill_tokens += count
        if self.preemptions != preempted:
            entries = [entry for entry in entries if entry[0].table is not None]
        return Batch(entries, prefill_tokens, decodes)

    def complete(self, batch: Batch[AnyGeneration], silent: int = 0) -> None:
        """End a step: its tokens are computed.

        With ``silent`` it is the last of that many steps more, in each of which every request of
        the batch produced one token and nothing else happened.
        """
        size = self._block_size
        for request, count in batch.entries:
            table = request.table
            if request.ended or table is None:
                continue
            produced = request.produced + silent
            request.computed = computed = request.computed + count + silent
            full = computed // size
            if full > table.cached:
                request.produced = produced
                request.extend_hashes(size)
                self._commit(request, table, full)
            if computed < request.prompt_tokens + produced:
                continue
            produced += 1
            request.produced = produced
            self.generation_tokens += 1 + silent
            if produced == request.max_tokens:
                self.running.remove(request)
                if not request.keep_kv:
                    self.release(table)
                    request.table = None
                request.ended = True
                request.token_produced()
            elif produced == 1 or request.every_token:
                request.token_produced()

    # -- inside ----------------------------------------------------------------------------

    def _ensure_blocks(self, request: AnyGeneration, tokens: int) -> bool:
        """Get blocks for ``tokens`` by preempting newer requests; False if itself preempted."""
        while request.table is not None:
            missing = self._blocks_for(tokens) - len(request.table.blocks)
            if missing <= 0 or self.cache.grow(request.table, missing):
                return True
            self._preempt(self._newest_victim(request))
        return False

    def _newest_victim(self, request: AnyGeneration) -> AnyGeneration:
        for candidate in reversed(self.running):
            if candidate is request or not candidate.loading:
                return candidate
        return request

    def _preempt(self, request: AnyGeneration) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.release(request.table)
        request.table = None
        request.computed = 0
        self.waiting.appendleft(request)

    def _commit(self, request: AnyGeneration, table: BlockTable, full: int) -> None:
        tokens, lora, salt = request.contents()
        self.cache.commit(table, request.hashes, tokens, full, lora, salt)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
