"""One rank of a simulated engine in virtual time.

The steps are those of :class:`dynctl.simulation.engine.model.RankModel`. Times are whole
nanoseconds, so that the end of many equal steps is exactly their number times their duration:
steps in which nothing happens but one more token for each request are taken at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dynctl.simulation.engine.config import EngineConfig
from dynctl.simulation.engine.model import (
    Batch,
    Load,
    RankGeneration,
    RankModel,
    restore_seconds,
    step_seconds,
)

NS = 1_000_000_000
#: Generated blocks have these names: no prompt has one of them (see `prompt_contents`).
_GENERATED = 1 << 63


def generated_block(number: int, index: int) -> int:
    """The name of block ``index`` of a request, where its last token is one of its output."""
    return _GENERATED | ((number << 20) + index & _GENERATED - 1)


@dataclass(slots=True, eq=False, kw_only=True)
class VirtualRequest(RankGeneration):
    """One generation of a replay.

    ``hashes`` name the prompt's full blocks, ``local`` are their local hashes. ``number`` names the
    blocks that it fills with its output, which no other request has. ``owner`` is the caller's.
    """

    owner: Any = None
    number: int = 0
    local: list[int] = field(default_factory=list)
    submitted_ns: int = 0
    admitted_ns: int = -1
    every_token: ClassVar[bool] = False

    def extend_hashes(self, block_size: int) -> None:
        full = (self.prompt_tokens + self.produced) // block_size
        for index in range(len(self.hashes), full):
            name = generated_block(self.number, index)
            self.hashes.append(name)
            self.local.append(name)

    def contents(self) -> tuple[Sequence[int], str | None, str | None]:
        return self.local, None, None


_NOTHING: Batch[VirtualRequest] = Batch([], 0, 0)


class VirtualRank(RankModel[VirtualRequest]):
    """The model with a virtual clock. The caller calls `finish_step` at ``due``.

    ``leaps``: take uneventful steps at once; the result is the same without. ``due``: when the
    steps that run end, in ns; -1 while the rank is idle.
    """

    def __init__(self, config: EngineConfig, *, leaps: bool = True, events: bool = True) -> None:
        super().__init__(config, block_tokens=1, events=events)
        self._leaps = leaps
        self._batch = _NOTHING
        #: The requests of these steps, where they only decode.
        self._decoding: list[VirtualRequest] = []
        # The steps that run: ``_count`` equal ones from ``_began`` on, each of ``_duration`` ns.
        self._began = self._duration = self._count = 0
        self.due = -1
        self.busy_ns = 0
        self.steps = 0
        self._decode_ns = round(step_seconds(config, 0, 1) * NS)
        #: When the last load from the tiers below ends.
        self._restored_at = 0

    def touch(self, now: int, *, begun: bool = True) -> None:
        """Something happened at ``now`` that the next step has to see: a leap ends there.

        ``begun``: a step that begins at ``now`` has begun already, so that the one after it is the
        next.
        """
        if self.due >= 0 and self._count > 1:
            passed, rest = divmod(now - self._began, self._duration) if self._duration else (0, 1)
            self._count = min(self._count, passed + 1 if begun or rest or not passed else passed)
            self.due = self._began + self._count * self._duration

    def restore_ends(self, now: int, load: Load[VirtualRequest]) -> int:
        """When a load from the tiers below ends that is asked for at ``now``, in ns."""
        seconds = restore_seconds(self._config, load.host, load.disk)
        self._restored_at = max(now, self._restored_at) + round(seconds * NS)
        return self._restored_at

    def start_step(self, now: int) -> list[Load[VirtualRequest]]:
        """Admit and begin the next step at ``now``; returns what has to load KV blocks first."""
        loads: list[Load[VirtualRequest]] = []
        if self.waiting:
            before = len(self.running)
            loads = self.admit()
            for request in self.running[before:]:
                if request.admitted_ns < 0:
                    request.admitted_ns = now
        self._began = now
        self._decoding = self._decode_only() if self._leaps else []
        if self._decoding:
            self.due = now + self._count * self._decode_ns
            return loads
        self._batch = batch = self.next_batch()
        if not batch.entries:
            self.due = -1
            return loads
        self._count = 1
        seconds = step_seconds(self._config, batch.prefill_tokens, batch.decodes)
        self._duration = round(seconds * NS)
        self.due = now + self._duration
        return loads

    def finish_step(self) -> None:
        """End the steps that run, at ``due``."""
        batch, count = self._batch, self._count
        self._batch, self.due = _NOTHING, -1
        self.busy_ns += count * self._duration
        self.steps += count
        silent = count - 1
        if self._decoding:
            size, eventful = self._block_size, []
            for request in self._decoding:
                if request.ended:
                    continue
                produced = request.produced + count
                if produced < request.max_tokens and request.computed % size + count < size:
                    request.produced = produced
                    request.computed += count
                    self.generation_tokens += count
                else:
                    eventful.append((request, 1))
            batch = Batch(eventful, 0, len(eventful))
        self.complete(batch, silent)

    def stop(self, now: int) -> None:
        """The engine fails at ``now``: only the steps that ended before count."""
        if self.due >= 0 and self._duration:
            passed = min(self._count, (now - self._began) // self._duration)
            self.busy_ns += passed * self._duration
            self.steps += passed
            for request in self._decoding:
                if not request.ended:
                    request.produced += passed
        self._batch, self.due = _NOTHING, -1

    def _decode_only(self) -> list[VirtualRequest]:
        """The requests of the next step, if it only decodes, for all and without a preemption.

        Then ``_count`` such steps run: at the end of the last one a request ends, or fills a block,
        which is cached then, and after which it needs another. Those that load take no part.
        """
        running, size = self.running, self._block_size
        if not running or len(running) > self._config.max_num_batched_tokens:
            return []
        if not running[-1].produced and not running[-1].loading:
            return []  # the newest one: its prompt is computed
        least, grows, parts = size + 1, [], []
        for request in running:
            if request.loading:
                continue
            produced, computed, table = request.produced, request.computed, request.table
            if not produced or computed + 1 != request.prompt_tokens + produced or table is None:
                return []
            filled = computed % size
            if not filled and computed == len(table.blocks) * size:
                grows.append(table)
            parts.append(request)
            left = request.max_tokens - produced
            if left < least:
                least = left
            if size - filled < least:
                least = size - filled
        if least > size or len(grows) > self.cache.free_blocks:
            return []
        for table in grows:
            self.cache.grow(table)
        self._count, self._duration = least, self._decode_ns
        return parts
