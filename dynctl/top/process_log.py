"""The log of a worker's process: read where the cluster has it, else why it is not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions
from dynctl.documents.workers import WorkerRow
from dynctl.top.custody import names_cluster

ReadLog = Callable[[WorkerRow], Sequence[str]]
"""Reads the last lines of a worker's log, with the name of the place first; runs in a thread.
Raises DynctlError."""

_HINT: Final = (
    "on Kubernetes: dynctl top .. --kube-context NAME -n NAMESPACE reads the log of its pod; "
    "elsewhere read it on the worker's host"
)


def unread_log(worker: WorkerRow) -> Sequence[str]:
    """Without a cluster the log has no known place."""
    at = f" at {worker.endpoint}" if worker.endpoint else ""
    raise UsageProblem(
        f"not read: the router knows the worker{at}, not where its process writes its log", _HINT
    )


def log_reader(options: GlobalOptions) -> ReadLog:
    """The reader of logs that the options allow."""
    if not names_cluster(options):
        return unread_log

    def read(worker: WorkerRow) -> Sequence[str]:
        from dynctl.sources.dynamo.frontend_pods import pod_log

        return pod_log(options, worker.name)

    return read
