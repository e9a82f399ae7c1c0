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
from dynctl.simulation.engine.model import Batch, Generation, RankModel, step_seconds

NS = 1_000_000_000
#: Generated blocks have these names: no prompt has one of them (see `prompt_contents`).
_GENERATED = 1 << 63


@dataclass(slots=True, eq=False, kw_only=True)
class VirtualRequest(Generation):
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
            name = _GENERATED | (self.number << 20) + index & _GENERATED - 1
            self.hashes.append(name)
            self.local.append(name)

    def contents(self) -> tuple[Sequence[int], str | None, str | None]:
        return self.local, None, None


class VirtualRank(RankModel[VirtualRequest]):
    """The model with a virtual clock. The caller calls `finish_step` at ``due``.

    ``leaps``: take uneventful steps at once; the result is the same without. ``due``: when the
    steps that run end, in ns; -1 while the rank is idle.
    """

    def __init__(self, config: EngineConfig, *, leaps: bool = True, events: bool = True) -> None:
        super().__init__(config, block_tokens=1, events=events)
        self._leaps = leaps
        self._batch: Batch[VirtualRequest] | None = None
        # The steps that run: ``_count`` equal ones from ``_began`` on, each of ``_duration`` ns.
        self._began = self._duration = self._count = 0
        self.due = -1
        self.busy_ns = 0
        self.steps = 0
        self._decode_ns = round(step_seconds(config, 0, 1) * NS)

    def touched(self, now: int) -> None:
        """Something happened at ``now`` that the next step has to see: a leap ends there."""
        if self.due >= 0 and self._count > 1:
            passed = (now - self._began) // self._duration if self._duration else 0
            self._count = min(self._count, passed + 1)
            self.due = self._began + self._count * self._duration

    def start_step(self, now: int) -> list[tuple[VirtualRequest, int]]:
        """Admit and begin the next step at ``now``; returns what has to load KV blocks first."""
        pulls: list[tuple[VirtualRequest, int]] = []
        if self.waiting:
            before = len(self.running)
            pulls = self.admit()
            for request in self.running[before:]:
                if request.admitted_ns < 0:
                    request.admitted_ns = now
        preemptions = self.preemptions
        self._batch = batch = self.next_batch()
        if not batch.entries:
            self.due = -1
            return pulls
        self._began = now
        self._count = 1
        if batch.prefill_tokens:
            seconds = step_seconds(self._config, batch.prefill_tokens, batch.decodes)
            self._duration = round(seconds * NS)
        else:
            self._duration = self._decode_ns
            # After a preemption there is room that a waiting request may take in the next step.
            if self._leaps and self.preemptions == preemptions:
                self._count = self._uneventful(batch)
        self.due = now + self._count * self._duration
        return pulls

    def finish_step(self) -> None:
        """End the steps that run, at ``due``."""
        batch, count = self._batch, self._count
        if batch is None:
            return
        self._batch, self.due = None, -1
        self.busy_ns += count * self._duration
        self.steps += count
        self.complete(batch, count - 1)

    def stop(self, now: int) -> None:
        """The engine fails at ``now``: only the steps that ended before count."""
        if self.due >= 0 and self._duration:
            passed = min(self._count, (now - self._began) // self._duration)
            self.busy_ns += passed * self._duration
            self.steps += passed
        self._batch, self.due = None, -1

    def _uneventful(self, batch: Batch[VirtualRequest]) -> int:
        """How many steps like this one run before something else happens: at the end of the last
        one a request ends or fills a block, which is cached then, and after which it needs
        another."""
        parts, running = len(batch.entries), self.running
        # Those that load take part in no step; others were left out by the budget.
        if parts != len(running) and parts < sum(not one.loading for one in running):
            return 1
        least = size = self._block_size
        for request, _one in batch.entries:
            left = request.max_tokens - request.produced
            if left < least:
                least = left
            left = size - request.computed % size
            if left < least:
                least = left
        return least
