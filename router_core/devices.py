"""Device classes: how device-aware-weighted splits requests between CPU workers and accelerators.

::

    allowed_cpu = floor(accelerator_requests * cpu_workers / (ratio * accelerators))
    CPU workers are next while cpu_requests < allowed_cpu, else accelerators

``ratio`` is the throughput of an accelerator relative to a CPU worker. It is the comparison of the
loads per worker, each divided by its throughput, rounded down: so an idle fleet sends to an
accelerator, and CPU workers get nothing until the accelerators have enough requests. Source:
Dynamo 1.6.1, observed with ratio 2 and one CPU worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router_core.workers import Worker

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The workers and the running requests of both classes, over the candidates of a decision.

    Requests are those that this router counts. A worker of an unknown device is an accelerator.
    """

    ratio: float
    cpu_workers: int
    cpu_requests: int
    accelerators: int
    accelerator_requests: int

    @classmethod
    def of_candidates(
        cls, workers: Sequence[Worker], requests: Sequence[int], ratio: float
    ) -> DeviceBudget:
        """The budget of candidates, one for each data-parallel rank."""
        cpus: set[int] = set()
        others: set[int] = set()
        on_cpus = on_others = 0
        for worker, count in zip(workers, requests, strict=True):
            if worker.device == CPU:
                cpus.add(worker.worker_id)
                on_cpus += count
            else:
                others.add(worker.worker_id)
                on_others += count
        return cls(ratio, len(cpus), on_cpus, len(others), on_others)

    @property
    def has_both_classes(self) -> bool:
        """Whether there are workers of both classes; without that the budget decides nothing."""
        return bool(self.cpu_workers and self.accelerators)

    @property
    def allowed_cpu(self) -> int:
        """Running requests below which CPU workers are next; 0 where a class is missing."""
        if not self.has_both_classes:
            return 0
        share = self.accelerator_requests * self.cpu_workers
        return math.floor(share / (self.ratio * self.accelerators))

    @property
    def cpu_is_next(self) -> bool:
        """Whether the request goes to a CPU worker."""
        return not self.accelerators or self.cpu_requests < self.allowed_cpu

    def group(self, workers: Sequence[Worker]) -> list[int] | None:
        """The positions of the class that is next; None for all, where there is one class."""
        if not self.has_both_classes:
            return None
        cpu = self.cpu_is_next
        return [i for i, worker in enumerate(workers) if (worker.device == CPU) is cpu]
