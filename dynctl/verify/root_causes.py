"""Which workers are judged, and which earlier fault already explains what a worker lacks.

A worker whose topology does not arrive never becomes ready and registers nothing: that is said
once, where it breaks. Also what checks need before they judge at all.
"""

from __future__ import annotations

from dynctl.health.facts import Unread
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.facts import StartLog
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import key_of, pod_of
from dynctl.verify.pod_spec import (
    ENABLED_ENV,
    annotation_differences,
    content_differences,
    engine,
    env_differences,
    is_untouched,
    shows_domain,
)


def log_of(joined: JoinedFacts, worker: WorkerChain) -> StartLog | Unread | None:
    """What the start of its log says; None where it was not asked."""
    cluster = joined.cluster
    return None if cluster is None else cluster.logs.get(key_of(worker))


def has_started(joined: JoinedFacts, worker: WorkerChain) -> bool:
    """Whether its engine got past its wait for topology, as far as anything tells."""
    log = log_of(joined, worker)
    if isinstance(log, StartLog):
        if log.domains is not None:
            return True
        if log.timed_out:
            # What it registered is of a run before this one.
            return pod_of(worker).ready
    return pod_of(worker).ready or bool(worker.cards)


def held_up_by(worker: WorkerChain) -> str:
    """The code that explains why a worker which has not started has no topology to start with.

    Empty where its topology is all there, as far as it is known, or where nothing can be said.
    """
    pod, policy = pod_of(worker), worker.policy
    if policy is None or worker.chain is None:
        return ""
    if worker.chain[LinkName.LABEL].value is None and pod.node:
        if any(True for _ in annotation_differences(pod, policy)):
            return "DYT0402"
        node = worker.chain[LinkName.NODE]
        return "DYT0205" if node.told and node.value is None else "DYT0403"
    main = engine(pod)
    if main is None:
        return "DYT0119"
    if main.env.get(ENABLED_ENV) != "true":
        return ""
    if not shows_domain(pod, main, policy):
        return "DYT0501, DYT0502"
    file = worker.chain[LinkName.FILE]
    return "DYT0503" if file.told and file.value is None else ""


def astray(worker: WorkerChain, *variables: str) -> str:
    """The code that explains why its files, or what is made of them, are not as they should be.

    The operator's volume or mount is not in the pod as it should be, or one of ``variables``.
    """
    pod, policy = pod_of(worker), worker.policy
    main = engine(pod)
    if main is None:
        return "DYT0119"
    if policy is None or policy.source is None:
        return "DYT0201, DYT0202"
    if is_untouched(pod):
        return "DYT0402"
    if any(True for _ in content_differences(pod, main, policy)):
        return "DYT0502"
    return "DYT0501" if env_differences(main, policy).keys() & {*variables} else ""


def stuck_at_start(joined: JoinedFacts, worker: WorkerChain) -> str:
    """The code of what keeps a worker from starting that has not started; empty where nothing does.

    What its log says counts as well: it gave up waiting for its topology (DYT0601).
    """
    if has_started(joined, worker):
        return ""
    log = log_of(joined, worker)
    timed_out = isinstance(log, StartLog) and bool(log.timed_out)
    return held_up_by(worker) or ("DYT0601" if timed_out else "")
