"""One rank of a simulated engine in virtual time.

The steps are those of :class:`dynctl.simulation.engine.model.RankModel`. Times are whole
nanoseconds, so that the end of many equal steps is exactly their number times their duration:
steps in which nothing happens but one more token for each request are taken at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

    def extend_hashes(self, block_size: int) -> None:
        full = (self.prompt_tokens + self.produced) // block_size
        for index in range(len(self.hashes), full):
            name = _GENERATED | (self.number << 20) + index & _GENERATED - 1
            self.hashes.append(name)
            self.local.append(name)

    def contents(self) -> tuple[Sequence[int], str | None, str | None]:
        return self.local, None, None


@dataclass(slots=True)
class _Step:
    """A step that runs, or ``count`` equal ones: each takes ``duration`` ns from ``began`` on."""

    batch: Batch[VirtualRequest]
    began: int
    duration: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.began + self.count * self.duration


class VirtualRank(RankModel[VirtualRequest]):
    """The model with a virtual clock. The caller calls `finish_step` at ``due``.

    ``leaps``: take uneventful steps at once; the result is the same without.
    ``stop_each_block``: an event is also a request that fills a block with its output.
    """

    def __init__(self, config: EngineConfig, *, leaps: bool = True) -> None:
        super().__init__(config, block_tokens=1)
        self._leaps = leaps
        self._step: _Step | None = None
        self.busy_ns = 0
        self.steps = 0
        self.decode_ns = round(step_seconds(config, 0, 1) * NS)

    @property
    def due(self) -> int | None:
        """When the running steps end, in ns; None while the rank is idle."""
        return None if self._step is None else self._step.end

    @property
    def idle(self) -> bool:
        return self._step is None

    def touched(self, now: int) -> None:
        """Something happened at ``now`` that the next step has to see: a leap ends there."""
        step = self._step
        if step is not None and step.count > 1:
            passed = (now - step.began) // step.duration if step.duration else 0
            step.count = min(step.count, passed + 1)

    def start_step(self, now: int) -> list[tuple[VirtualRequest, int]]:
        """Admit and begin the next step at ``now``; returns what has to load KV blocks first."""
        waiting = len(self.waiting)
        pulls = []
        if waiting:
            before = len(self.running)
            pulls = self.admit()
            for request in self.running[before:]:
                if request.admitted_ns < 0:
                    request.admitted_ns = now
        batch = self.next_batch()
        if not batch.entries:
            self._step = None
            return pulls
        if batch.prefill_tokens:
            seconds = step_seconds(self._config, batch.prefill_tokens, batch.decodes)
            self._step = _Step(batch, now, round(seconds * NS))
        else:
            self._step = _Step(batch, now, self.decode_ns, self._uneventful(batch))
        return pulls

    def finish_step(self) -> None:
        """End the steps that run, at ``due``."""
        step = self._step
        if step is None:
            return
        self._step = None
        self.busy_ns += step.count * step.duration
        self.steps += step.count
        silent = step.count - 1
        if silent:
            for request, _one in step.batch.entries:
                if not request.ended:
                    request.computed += silent
                    request.produced += silent
                    self.generation_tokens += silent
        self.complete(step.batch)

    def stop(self, now: int) -> None:
        """The engine fails at ``now``: only the steps that ended before count."""
        step = self._step
        if step is not None and step.duration:
            passed = min(step.count, (now - step.began) // step.duration)
            self.busy_ns += passed * step.duration
            self.steps += passed
        self._step = None

    def _uneventful(self, batch: Batch[VirtualRequest]) -> int:
        """How many steps like this one run before something else happens: at the end of the last
        one a request ends or fills a block, which is cached then, and after which it needs
        another."""
        if not self._leaps or len(batch.entries) < sum(not r.loading for r in self.running):
            return 1
        size = self._block_size
        least = size
        for request, _one in batch.entries:
            left = request.max_tokens - request.produced
            if left < least:
                least = left
            left = size - request.computed % size
            if left < least:
                least = left
        return least
