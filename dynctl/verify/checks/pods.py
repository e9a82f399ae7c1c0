"""Checks of worker pods and of the topology labels that the operator copies to them: DYT04."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final

from dynctl.findings.runner import Check, Outcome, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.manifests.lint import graph as lint_graph
from dynctl.verify.chain import DomainChain, LinkName, WorkerChain
from dynctl.verify.cluster_facts import ClusterFacts
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.live_graphs import judged_live
from dynctl.verify.needs import (
    cluster_of,
    differing,
    graphs_read,
    has_policy,
    has_workers,
    in_cluster,
    key_of,
    label_known,
    live_workers,
    pod_of,
    unlabelled_graphs,
)
from dynctl.verify.obstacles import creation_obstacle, start_obstacle
from dynctl.verify.pod_spec import annotation_differences, is_untouched, why_not_running
from dynctl.verify.root_causes import held_up_by, stuck_at_start
from dynctl.verify.wording import (
    CheckTally,
    age,
    by_graph,
    count_of,
    many,
    quote,
    restart_fix,
    some,
)
from dynctl.wire.kubernetes.names import LABEL_MISSING_REASON, WORKER_HASH_LABEL
from dynctl.wire.kubernetes.objects import ObjectEvent, Pod

_ONLY_WARNINGS: Final = "--field-selector type=Warning"
COPY_S: Final = 30.0
"""The longest time to copy a label, in seconds; a worker waits as long for its file."""


# -- existing pods --------------------------------------------------------------------------------


def _has_pods(joined: JoinedFacts) -> Outcome:
    counts = []
    wrong = []
    for graph in joined.governed:
        pods, wanted = len(graph.workers), _wanted_pods(graph)
        if not pods and wanted and not _is_deleted(graph):
            namespace, _, name = graph.name.rpartition("/")
            describe = f"kubectl describe dynamographdeployment {name} -n {namespace}"
            look = f"{describe}; then check that the operator runs (DYT0301)"
            noted, fix = creation_obstacle(cluster_of(joined), graph, "", look)
            wrong.append(found(graph.subject, wanted=wanted, noted=noted, fix=fix))
        of = "" if wanted is None else f" of {wanted:,}"
        counts.append((graph.short_name, f"{pods:,}{of}"))
    return outcome(wrong, summary=by_graph(counts))


def _is_deleted(graph: VerifiedGraph) -> bool:
    """Whether the graph is being deleted, and its pods with it (DYT0113)."""
    return graph.graph is not None and graph.graph.manifest.deleting


def _wanted_pods(graph: VerifiedGraph) -> int | None:
    """The number of worker pods in the graph's spec; None if it could not be read."""
    if graph.graph is None:
        return None
    return graph.graph.worker_pods


def _has_all_pods(joined: JoinedFacts) -> Outcome:
    wrong, judged = [], 0
    for graph in joined.governed:
        there = Counter(worker.component.lower() for worker in graph.workers)
        if graph.graph is None or not there or _is_deleted(graph):
            continue
        for component in graph.graph.workers:
            judged += 1
            pods, wanted = there[component.name.lower()], component.pods
            if pods < wanted:
                namespace, name = graph.name.rpartition("/")[0], component.name
                look = f"find the reason: kubectl get events -n {namespace} {_ONLY_WARNINGS}"
                noted, fix = creation_obstacle(cluster_of(joined), graph, name, look)
                counts = {"component": name, "pods": pods, "wanted": wanted}
                wrong.append(found(graph.subject, **counts, noted=noted, fix=fix))
    if not judged:
        return Skipped("no graph with worker pods and a readable spec (DYT0401)")
    return outcome(wrong, summary=many(judged, "component"))


def _engine_runs(joined: JoinedFacts) -> Outcome:
    """Without pods that wait for their topology: more exact codes report those."""
    workers = live_workers(joined)
    graphs = {graph.name: graph for graph in joined.governed}
    wrong = []
    for worker in workers:
        pod, why = pod_of(worker), why_not_running(pod_of(worker))
        if not why or (pod.node and stuck_at_start(joined, worker)):
            continue
        now = cluster_of(joined).now
        since = f" for {age(now - pod.created)}" if pod.created is not None else ""
        graph = graphs.get(worker.graph)
        noted, fix = start_obstacle(cluster_of(joined), graph, worker, why)
        phase = pod.phase or "(no phase)"
        wrong.append(found(worker.subject, phase=phase, since=since, why=why, noted=noted, fix=fix))
    return outcome(wrong, summary=count_of(len(workers), len(workers), "pod"))


# -- annotation and labels -----------------------------------------------------------------------


def _has_annotation(joined: JoinedFacts) -> Outcome:
    workers = live_workers(joined)
    wrong = []
    for worker in workers:
        pod, policy = pod_of(worker), worker.policy
        assert policy is not None
        differs = list(annotation_differences(pod, policy))
        if differs and is_untouched(pod):
            differs = ["the pod has no part of the policy: no annotation, no variables, no volume"]
        if differs:
            wrong.append(differing(worker, differs))
    return outcome(wrong, summary=count_of(len(workers), len(workers), "pod"))


def _missing_labels(worker: WorkerChain) -> list[str]:
    """The topology labels that are missing on a pod.

    Without labels that the node does not have (DYT0205), and none for a pod with a wrong
    annotation (DYT0402).
    """
    pod, policy = pod_of(worker), worker.policy
    if policy is None or not pod.node or any(True for _ in annotation_differences(pod, policy)):
        return []
    missing = []
    for domain, source in policy.sources.items():
        node, label = (worker.chains[domain][name] for name in (LinkName.NODE, LinkName.LABEL))
        if label.value is None and not (node.known and node.value is None):
            missing.append(source.pod_key)
    return missing


def _is_young(pod: Pod, now: float) -> bool:
    since = pod.scheduled if pod.scheduled is not None else pod.created
    # A time that clocks put into the future does not make a pod young for hours.
    return since is not None and abs(now - since) <= COPY_S


def _has_label(joined: JoinedFacts) -> Outcome:
    cluster, events = cluster_of(joined), _events(cluster_of(joined))
    workers = live_workers(joined)
    wrong = []
    for worker in workers:
        pod, missing = pod_of(worker), _missing_labels(worker)
        if not missing or _is_young(pod, cluster.now):
            continue
        noted, fix = "", restart_fix(pod)
        event = next(iter(events.get((*key_of(worker), pod.uid), ())), None)
        if event is None:
            fix = f"check that the operator runs and has its permissions (DYT03), then {fix}"
        else:
            noted = f"; event: {event.message}"
        wrong.append(
            found(
                worker.subject,
                keys=", ".join(missing),
                node=_node_and_value(worker),
                since=_since(pod, cluster.now),
                noted=noted,
                fix=fix,
            )
        )
    bare = [worker for worker in workers if not _has_labels(worker)]
    explained = [_explaining_code(worker) for worker in bare]
    return CheckTally("pod", len(workers), wrong, unlabelled_graphs(joined), explained).outcome()


def _since(pod: Pod, now: float) -> str:
    at = pod.scheduled
    return f" {age(now - at)} ago" if at is not None and at <= now else ""


def _explaining_code(worker: WorkerChain) -> str:
    """The code that explains why a pod without its label is not a finding of DYT0403."""
    if worker.chain is None:
        return "DYT0201, DYT0202"
    return held_up_by(worker).replace("DYT0403", "DYT0411") or "DYT0410"


def _node_and_value(worker: WorkerChain) -> str:
    node = None if worker.chain is None else worker.chain[LinkName.NODE]
    there = "" if node is None or node.value is None else f" ({quote(node.value)})"
    return f"{pod_of(worker).node}{there}"


def _has_labels(worker: WorkerChain) -> bool:
    chains = worker.chains.values()
    return bool(chains) and all(chain[LinkName.LABEL].value is not None for chain in chains)


def _labels_copied(joined: JoinedFacts) -> Outcome:
    now = cluster_of(joined).now
    wrong = [
        found(
            worker.subject,
            keys=", ".join(missing),
            node=_node_and_value(worker),
            limit=f"{COPY_S:.0f} s",
        )
        for worker in live_workers(joined)
        if (missing := _missing_labels(worker)) and _is_young(pod_of(worker), now)
    ]
    return outcome(wrong, unlabelled_graphs(joined))


def _label_matches_node(joined: JoinedFacts) -> Outcome:
    cluster, workers = cluster_of(joined), live_workers(joined)
    if isinstance(cluster.nodes, Unread):
        return Skipped(f"nodes: {cluster.nodes.why}", unread=True)
    templates, copied = _template_labels(joined), _copied_values(workers)
    tally = CheckTally("pod", len(workers), unread=unlabelled_graphs(joined))
    for worker in workers:
        if not any(map(_has_node_and_label, worker.chains.values())):
            tally.explained.append(_why_not_compared(worker))
        differences = list(_label_differences(worker))
        if differences:
            pod = pod_of(worker)
            fix = restart_fix(pod)
            template = templates.get((worker.graph, worker.component.lower()), set())
            if any(gap.key in template for gap in differences):
                fix = "remove the label from the pod template (DYT0406)"
            elif all(len(copied[gap.node, gap.key]) == 1 for gap in differences):
                labels = " ".join(f"{gap.node_key}={gap.value}" for gap in differences)
                command = f"kubectl label node {pod.node} --overwrite {labels}"
                fix += f"; or, if the node is wrong: {command}"
            texts = "; ".join(map(str, differences))
            tally.wrong.append(found(worker.subject, differs=texts, fix=fix))
    return tally.outcome()


def _copied_values(workers: Sequence[WorkerChain]) -> dict[tuple[str, str], set[str]]:
    """(node, pod label) -> the values that the worker pods of the node have."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for worker in workers:
        pod, policy = pod_of(worker), worker.policy
        for source in () if policy is None else policy.sources.values():
            if source.pod_key in pod.labels:
                values[pod.node, source.pod_key].add(pod.labels[source.pod_key])
    return values


def _template_labels(joined: JoinedFacts) -> dict[tuple[str, str], Set[str]]:
    """(graph, component) -> the labels of its pod template."""
    return {
        (graph.name, component.name.lower()): component.pod_labels.keys()
        for graph in joined.governed
        if graph.graph is not None
        for component in graph.graph.workers
    }


def _has_node_and_label(chain: DomainChain) -> bool:
    return chain[LinkName.NODE].value is not None and chain[LinkName.LABEL].value is not None


def _why_not_compared(worker: WorkerChain) -> str:
    """The code, or the reason in words, why a label is not compared with its node's."""
    if not pod_of(worker).node:
        return "DYT0410"
    nodes = (chain[LinkName.NODE] for chain in worker.chains.values())
    return next((node.unknown for node in nodes if not node.known), "DYT0205, DYT0403")


@dataclass(frozen=True, slots=True)
class _LabelGap:
    """A label of a pod, ``key``, that differs from the label of its node, ``node_key``."""

    key: str
    value: str
    node: str
    node_key: str
    expected: str

    def __str__(self) -> str:
        value, expected = quote(self.value), quote(self.expected)
        return f"{self.key} is {value}, its node {self.node} has {expected}"


def _label_differences(worker: WorkerChain) -> Iterator[_LabelGap]:
    """Each label that differs from the current label of the node."""
    policy = worker.policy
    for domain, chain in worker.chains.items():
        for gap in chain.breaks():
            if gap.link is LinkName.LABEL and gap.value is not None and policy is not None:
                source, node = policy.sources[domain], pod_of(worker).node
                expected = gap.expected or ""
                yield _LabelGap(source.pod_key, gap.value, node, source.node_key, expected)


# -- events ----------------------------------------------------------------------------------------


def _events(cluster: ClusterFacts) -> dict[tuple[str, str, str], list[ObjectEvent]]:
    """``(namespace, pod, uid)`` -> events about a missing label, the newest first."""
    by_pod: dict[tuple[str, str, str], list[ObjectEvent]] = defaultdict(list)
    for event in () if isinstance(cluster.events, Unread) else cluster.events:
        if event.reason == LABEL_MISSING_REASON:
            by_pod[event.namespace, event.name, event.uid].append(event)
    for events in by_pod.values():
        events.sort(key=lambda event: -(event.at or 0.0))
    return by_pod


def _old_events(joined: JoinedFacts) -> Outcome:
    """Without events about labels that are still missing (DYT0205, DYT0403)."""
    cluster = cluster_of(joined)
    if isinstance(cluster.events, Unread):
        return Skipped(f"events: {cluster.events.why}", unread=True)
    events, wrong = _events(cluster), []
    for worker in live_workers(joined):
        pod = pod_of(worker)
        for event in events.get((*key_of(worker), pod.uid), ()):
            if _is_over(worker, event):
                last = "" if event.at is None else f", last {age(cluster.now - event.at)} ago"
                times = many(event.count, "time")
                wrong.append(found(worker.subject, times=times, last=last, message=event.message))
                break
    return outcome(wrong)


def _is_over(worker: WorkerChain, event: ObjectEvent) -> bool:
    """Whether the labels in an event's message (all labels, if it has none) exist now."""
    policy = worker.policy
    sources = {} if policy is None else policy.sources
    named = [
        domain
        for domain, source in sources.items()
        if f'"{source.node_key}"' in event.message or f'"{source.pod_key}"' in event.message
    ]
    values = [worker.chains[domain][LinkName.LABEL].value for domain in named or sources]
    return bool(values) and None not in values


# -- replicas and generations ----------------------------------------------------------------------


def _ranks_in_one_domain(joined: JoinedFacts) -> Outcome:
    replicas: dict[tuple[str, str], list[WorkerChain]] = defaultdict(list)
    for worker in live_workers(joined):
        if worker.replica:
            replicas[worker.graph, worker.replica].append(worker)
    if not replicas:
        return Skipped("no replica runs on several nodes")
    wrong = []
    for (_, name), ranks in sorted(replicas.items()):
        values = {value for worker in ranks if (value := _place(worker)) is not None}
        if len(values) > 1:
            leader = next((rank for rank in ranks if not rank.follower), ranks[0])
            policy = leader.policy
            assert policy is not None
            wrong.append(
                found(
                    leader.subject,
                    replica=name,
                    values=", ".join(sorted(values)),
                    domain=policy.domain,
                )
            )
    return outcome(wrong, unlabelled_graphs(joined), f"{len(replicas):,} replicas on several nodes")


def _place(worker: WorkerChain) -> str | None:
    """The domain value of a worker: of its node, else of its label."""
    return worker.value(LinkName.NODE) or worker.value(LinkName.LABEL)


def _one_generation(joined: JoinedFacts) -> Outcome:
    wrong, marked = [], False
    for graph in joined.governed:
        pods = map(pod_of, graph.workers)
        hashes = Counter(pod.labels.get(WORKER_HASH_LABEL, "") for pod in pods)
        del hashes[""]
        marked = marked or bool(hashes)
        if len(hashes) > 1:
            counts = (f"{name} {many(number, 'pod')}" for name, number in hashes.most_common())
            wrong.append(found(graph.subject, many=len(hashes), generations=some(counts)))
    if not marked:
        return Skipped(f"no worker pod has the label {WORKER_HASH_LABEL}")
    return outcome(wrong)


_NEEDS: Final = (in_cluster, has_policy)
_PODS: Final = (in_cluster, has_policy, has_workers)
_LABELS: Final = (in_cluster, has_policy, has_workers, label_known)
_OF_LINT: Final = judged_live(lint_graph.POD_CHECKS, graphs_read)

POD_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0401", _has_pods, _NEEDS),
    Check("DYT0402", _has_annotation, _PODS),
    Check("DYT0403", _has_label, _LABELS),
    Check("DYT0404", _label_matches_node, _LABELS),
    Check("DYT0405", _old_events, _LABELS),
    _OF_LINT["DYT0406"],
    Check("DYT0407", _ranks_in_one_domain, _PODS),
    Check("DYT0408", _one_generation, _PODS),
    Check("DYT0409", _has_all_pods, _NEEDS),
    Check("DYT0410", _engine_runs, _PODS),
    Check("DYT0411", _labels_copied, _LABELS),
)
