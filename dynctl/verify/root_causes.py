"""The code of the earlier fault that explains why a worker lacks something later. Pure.

A worker without its topology never becomes Ready and registers nothing. This is reported once, at
the first fault: later checks skip the worker and name that code. In the order of the links:

=====================  =================================================  ======================
what it lacks          asked by                                           function
=====================  =================================================  ======================
topology, at its node  DYT04, DYT06: label, annotation, volume, file      held_up_by
a right file or card   DYT05, DYT08: settings in its pod                  wrong_pod_spec
its start              DYT05 to DYT07: held_up_by, or DYT0601             stuck_at_start
its registration       DYT07 to DYT09: the start, slices, permissions     registration.not_serving,
                                                                          registration_refused,
                                                                          registration_gap
=====================  =================================================  ======================

Each returns a code, a list of codes, or an empty text: nothing known explains it.
"""

from __future__ import annotations

from dynctl.health.facts import Unread
from dynctl.verify.chain import ChainLink, LinkName, WorkerChain
from dynctl.verify.cluster_facts import StartLog
from dynctl.verify.graph_policy import GraphPolicy
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
from dynctl.wire.kubernetes.objects import Pod


def log_of(joined: JoinedFacts, worker: WorkerChain) -> StartLog | Unread | None:
    """The start of its log; None if it was not read."""
    cluster = joined.cluster
    return None if cluster is None else cluster.logs.get(key_of(worker))


def has_started(joined: JoinedFacts, worker: WorkerChain) -> bool:
    """Whether its engine finished waiting for topology, as far as log, pod and cards show."""
    log = log_of(joined, worker)
    if isinstance(log, StartLog):
        if log.domains is not None:
            return True
        if log.timed_out:
            # Its cards can be those of an earlier run.
            return pod_of(worker).ready
    return pod_of(worker).ready or bool(worker.cards)


def held_up_by(worker: WorkerChain) -> str:
    """The code that explains why a worker that has not started has no topology.

    Empty if its topology is complete as far as it is known, or if the reason is unknown.
    """
    pod, policy = pod_of(worker), worker.policy
    if policy is None or worker.chain is None:
        return ""
    if worker.chain[LinkName.LABEL].value is None and pod.node:
        return _why_no_label(pod, policy, worker.chain[LinkName.NODE])
    main = engine(pod)
    if main is None:
        return "DYT0119"
    if main.env.get(ENABLED_ENV) != "true":
        return ""
    if not shows_domain(pod, main, policy):
        return "DYT0501, DYT0502"
    file = worker.chain[LinkName.FILE]
    return "DYT0503" if file.known and file.value is None else ""


def _why_no_label(pod: Pod, policy: GraphPolicy, node: ChainLink) -> str:
    if any(True for _ in annotation_differences(pod, policy)):
        return "DYT0402"
    return "DYT0205" if node.known and node.value is None else "DYT0403"


def wrong_pod_spec(worker: WorkerChain, *variables: str) -> str:
    """The code of a fault in its pod that explains wrong files or a wrong card; else empty.

    The operator's volume or mount is missing or wrong, or one of ``variables`` is.
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
    """The code of the fault that keeps a worker from starting; empty if it has started.

    Includes DYT0601: its log shows that it stopped waiting for its topology.
    """
    if has_started(joined, worker):
        return ""
    log = log_of(joined, worker)
    timed_out = isinstance(log, StartLog) and bool(log.timed_out)
    return held_up_by(worker) or ("DYT0601" if timed_out else "")
