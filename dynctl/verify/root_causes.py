"""Which workers are judged, and which earlier fault already explains what a worker lacks.

A worker whose topology does not arrive never becomes ready and registers nothing: that is said
once, where it breaks. Also what checks need before they judge at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynctl.findings.runner import Found, Outcome, Passed, Skipped, outcome
from dynctl.health.facts import Unread
from dynctl.verify.chain import LinkName, WorkerChain
from dynctl.verify.facts import ClusterFacts, PodKey, StartLog
from dynctl.verify.injection import (
    ENABLED_ENV,
    annotation_differences,
    content_differences,
    engine,
    env_differences,
    is_untouched,
    shows_domain,
)
from dynctl.verify.join import Custody, VerifiedGraph
from dynctl.wire.kubernetes.objects import Pod

_ENDED = ("Succeeded", "Failed")
_LONGEST_EXCERPT = 200
NO_CLUSTER = "Kubernetes was not asked"


# -- who is judged ---------------------------------------------------------------------------------


def cluster_of(custody: Custody) -> ClusterFacts:
    """The cluster, for checks that need it to be there."""
    assert custody.cluster is not None
    return custody.cluster


def pod_of(worker: WorkerChain) -> Pod:
    """The pod of a worker that has one."""
    assert worker.pod is not None
    return worker.pod


def key_of(worker: WorkerChain) -> PodKey:
    """By what files and logs are kept."""
    pod = pod_of(worker)
    return pod.namespace, pod.name


def live(graph: VerifiedGraph) -> list[WorkerChain]:
    """The graph's worker pods, without those that have ended (evicted ones stay for a while)."""
    return [one for one in graph.workers if one.pod and one.pod.phase not in _ENDED]


def live_workers(custody: Custody) -> list[WorkerChain]:
    """The live worker pods of all graphs with a policy."""
    return [one for graph in custody.governed for one in live(graph)]


# -- what checks need ------------------------------------------------------------------------------


def in_cluster(custody: Custody) -> Skipped | None:
    """The pods of a cluster are known."""
    cluster = custody.cluster
    if cluster is None:
        return Skipped(NO_CLUSTER)
    if isinstance(cluster.pods, Unread):
        return Skipped(f"pods: {cluster.pods.why}", unread=True)
    return None


def governed(custody: Custody) -> Skipped | None:
    """At least one graph has a policy that can be followed."""
    if custody.governed:
        return None
    cluster = custody.cluster
    if cluster is not None and isinstance(cluster.graphs, Unread):
        return Skipped(f"graphs: {cluster.graphs.why}; no pod tells of a policy", unread=True)
    return Skipped("no graph here has a policy that can be followed (DYT0102)")


def peopled(custody: Custody) -> Skipped | None:
    """At least one worker pod is there."""
    return None if live_workers(custody) else Skipped("there is no worker pod (DYT0401)")


def sourced(custody: Custody) -> Skipped | None:
    """Which labels hold the transfer domain is known of at least one graph."""
    if any(graph.policy is not None and graph.policy.source for graph in custody.governed):
        return None
    unread = unsourced(custody)
    told = "; ".join(unread[:2]) or "which label holds the domain is not known (DYT0201, DYT0202)"
    return Skipped(told, unread=bool(unread))


def unsourced(custody: Custody) -> list[str]:
    """The graphs whose labels are not known because their topology could not be read."""
    cluster = custody.cluster
    if cluster is None or not isinstance(cluster.topologies, Unread):
        return []
    return [
        f"{short(graph)}: the levels of {graph.policy.cluster_topology}: {cluster.topologies.why}"
        for graph in custody.governed
        if graph.policy is not None and graph.policy.source is None
    ]


def first_skip(
    custody: Custody, needs: Iterable[Callable[[Custody], Skipped | None]]
) -> Skipped | None:
    """The first of ``needs`` that is not met; None where all are."""
    return next((one for need in needs if (one := need(custody)) is not None), None)


# -- what an earlier fault explains ----------------------------------------------------------------


def log_of(custody: Custody, worker: WorkerChain) -> StartLog | Unread | None:
    """What the start of its log says; None where it was not asked."""
    cluster = custody.cluster
    return None if cluster is None else cluster.logs.get(key_of(worker))


def has_started(custody: Custody, worker: WorkerChain) -> bool:
    """Whether its engine got past its wait for topology, as far as anything tells."""
    log = log_of(custody, worker)
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


def stuck_at_start(custody: Custody, worker: WorkerChain) -> str:
    """The code of what keeps a worker from starting that has not started; empty where nothing does.

    What its log says counts as well: it gave up waiting for its topology (DYT0601).
    """
    if has_started(custody, worker):
        return ""
    log = log_of(custody, worker)
    timed_out = isinstance(log, StartLog) and bool(log.timed_out)
    return held_up_by(worker) or ("DYT0601" if timed_out else "")


# -- words -----------------------------------------------------------------------------------------


def tally(
    findings: Iterable[Found],
    unread: Iterable[str],
    judged: int,
    whole: int,
    noun: str,
    elsewhere: Iterable[str] = (),
) -> Outcome:
    """The outcome of a check that could judge ``judged`` of ``whole``.

    ``elsewhere``: codes, or words, that say why not all; nothing judged is no pass.
    """
    why = _pointing(elsewhere)
    says = of(judged, whole, noun)
    if why and judged < whole:
        says += f"; the rest: {why}" if judged else f": {why}"
    result = outcome(findings, unread, says)
    if isinstance(result, Passed) and not judged:
        return Skipped(says if why else f"no {noun} to judge")
    return result


def _pointing(elsewhere: Iterable[str]) -> str:
    """``not asked for (--exec all); see DYT0403, DYT0410``."""
    told = sorted({*elsewhere} - {""})
    codes = [one for one in told if one.startswith("DYT")]
    words = [one for one in told if one not in codes]
    return "; ".join([*words, *([f"see {', '.join(codes)}"] if codes else [])])


def of(part: int, whole: int, noun: str) -> str:
    """``18 of 18 worker pods``."""
    return f"{part:,} of {many(whole, noun)}"


def many(number: int, noun: str) -> str:
    """``1 pod``, ``2,048 pods``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def some(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    all_of = list(names)
    more = f" and {len(all_of) - most:,} more" if all_of[most:] else ""
    return ", ".join(all_of[:most]) + more


def by_graph(told: Iterable[tuple[str, str]]) -> str:
    """``kubernetes``; where several graphs are told of, ``my-llm.prod: kubernetes, ..``."""
    each = list(told)
    return each[0][1] if len(each) == 1 else some(f"{name}: {says}" for name, says in each)


def short(graph: VerifiedGraph) -> str:
    """Its subject without the kind: ``my-llm.prod``."""
    return graph.subject.partition(" ")[2]


def quoted(value: str) -> str:
    """``us-east-1a``, and ``""`` for a value that is empty."""
    return value or '""'


def excerpt(text: str) -> str:
    """The beginning of what somebody else wrote, on one line, cut between words."""
    flat = " ".join(text.split())
    if len(flat) <= _LONGEST_EXCERPT:
        return flat
    return flat[:_LONGEST_EXCERPT].rpartition(" ")[0] + " .."


def age(seconds: float) -> str:
    """``12 s``, ``5 min``, ``3 h``, ``2 days``; clocks that disagree give 0 s."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
