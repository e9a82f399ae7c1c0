"""Which pods are worth an exec and a look at their log: calls that cost one connection each."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.join import Custody


class Sampling(StrEnum):
    """``sample``: one worker per component and domain value, and every worker that looks odd."""

    ALL = "all"
    SAMPLE = "sample"
    NONE = "none"


def chosen(custody: Custody, sampling: Sampling) -> tuple[WorkerChain, ...]:
    """The workers with a running pod that should be read, in order."""
    return tuple(_chosen(custody, sampling))


def _chosen(custody: Custody, sampling: Sampling) -> Iterator[WorkerChain]:
    seen: set[tuple[str, str, str | None]] = set()
    for worker in custody.workers:
        if sampling is Sampling.NONE or worker.pod is None or worker.policy is None:
            continue
        kind = (worker.graph, worker.component, worker.value(LinkName.LABEL))
        if sampling is Sampling.ALL or kind not in seen or _odd(worker):
            seen.add(kind)
            yield worker


def _odd(worker: WorkerChain) -> bool:
    """Whether a later link differs, or its start did not go as it should."""
    pod, main = worker.pod, None if worker.pod is None else worker.pod.main
    restarted = main is not None and (main.restarts > 0 or main.last_end is not None)
    broken = any(True for chain in worker.chains.values() for _ in chain.breaks())
    return broken or restarted or pod is None or not pod.ready or _lacks_card(worker)


def _lacks_card(worker: WorkerChain) -> bool:
    """Whether it registered nothing, and that is known."""
    known = worker.chain is None or worker.chain[LinkName.CARD].told
    return known and not worker.cards
