"""Requests that the API server passes on to the kubelet of a pod's node: exec, log, port-forward.

A kubelet that does not respond is asked once: the other pods of its node stay unread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from dynctl.adapters.ports import Cluster, ClusterRefusal
from dynctl.base.errors import Unreachable
from dynctl.health.facts import Unread
from dynctl.sources.dynamo.frontend_pods import why_silent
from dynctl.verify.chain import WorkerChain
from dynctl.verify.cluster_facts import PodKey
from dynctl.verify.gather.permissions import unread
from dynctl.verify.wording import some

T = TypeVar("T")
_MOST_NAMES: Final = 8


class Kubelets:
    """Reads pods of ``workers``, several at a time.

    ``silent``: node -> how it is known that its kubelet does not respond.
    """

    def __init__(self, cluster: Cluster, pool: Executor, workers: Iterable[WorkerChain]) -> None:
        self._cluster = cluster
        self._pool = pool
        self.silent: dict[str, str] = {}
        self._workers: dict[str, dict[str, None]] = defaultdict(dict)
        for worker in workers:
            self._workers[_node_name(worker)][worker.name] = None

    def read(
        self,
        request: str,
        read_pod: Callable[[Cluster, WorkerChain], T | Unread],
        workers: Sequence[WorkerChain],
    ) -> dict[PodKey, T | Unread]:
        """Read each worker: first one of each node, then the others. ``request``: its name."""
        by_node = {_node_name(worker): worker for worker in reversed(workers)}
        first = [worker for worker in workers if by_node[_node_name(worker)] is worker]
        others = [worker for worker in workers if by_node[_node_name(worker)] is not worker]
        facts: dict[PodKey, T | Unread] = {}
        for batch in (first, others):
            answers = self._pool.map(lambda worker: self._ask(request, read_pod, worker), batch)
            facts |= zip(map(_key, batch), answers, strict=True)
        return facts

    def _ask(
        self,
        request: str,
        read_pod: Callable[[Cluster, WorkerChain], T | Unread],
        worker: WorkerChain,
    ) -> T | Unread:
        node = _node_name(worker)
        if node not in self.silent:
            try:
                return read_pod(self._cluster, worker)
            except (ClusterRefusal, Unreachable) as problem:
                silence = why_silent(self._cluster, node, request, problem)
                if not silence and isinstance(problem, ClusterRefusal):
                    return unread(problem)
                if not silence:
                    return Unread(str(problem))
                self.silent.setdefault(node, silence)
        names = some(self._workers[node], _MOST_NAMES)
        return Unread(f"{self.silent[node]}: {names} not read")


def _node_name(worker: WorkerChain) -> str:
    return "" if worker.pod is None else worker.pod.node


def _key(worker: WorkerChain) -> PodKey:
    return ("", "") if worker.pod is None else (worker.pod.namespace, worker.pod.name)
