"""Checks of discovery: backends, EndpointSlices, permissions, DynamoWorkerMetadata: DYT07."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from dynctl.adapters.ports import AccessReview
from dynctl.base.json_fields import mapping
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.health.facts import Unread
from dynctl.verify.chain import WorkerChain
from dynctl.verify.cluster_facts import ClusterFacts, StartLog
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.needs import (
    about_log,
    about_pod,
    cluster_of,
    has_policy,
    has_workers,
    in_cluster,
    live_workers,
    pod_of,
)
from dynctl.verify.pod_spec import BACKEND_ENV, backend_of
from dynctl.verify.registration import (
    denied_permissions,
    has_no_model,
    id_in,
    in_kubernetes,
    not_listed,
    not_serving,
    own_metadata,
    pod_uids,
    registration_refused,
    stale_metadata,
    user_of,
    wrong_ids,
)
from dynctl.verify.root_causes import log_of
from dynctl.verify.wording import CheckTally, age, by_graph, excerpt, many, some
from dynctl.wire.kubernetes.names import DISCOVERY_BACKEND_LABEL
from dynctl.wire.kubernetes.objects import Pod
from dynctl.wire.kubernetes.worker_metadata import GROUP, PLURAL, WorkerMetadata, instance_id

# -- backends --------------------------------------------------------------------------------------


def _pods(graph: VerifiedGraph) -> Iterator[tuple[str, Pod]]:
    """``(subject, pod)`` of a graph's frontends and workers."""
    for pod in graph.frontends:
        yield f"Pod {pod.name}.{pod.namespace}", pod
    for worker in graph.workers:
        yield worker.subject, pod_of(worker)


def _one_backend(joined: JoinedFacts) -> Outcome:
    """The frontends' backend is the expected one: they do not find workers in another."""
    wrong: list[Found] = []
    expected: list[tuple[str, str]] = []
    for graph in joined.governed:
        backends = {subject: backend_of(pod) for subject, pod in _pods(graph) if backend_of(pod)}
        if not backends:
            continue
        of_frontends = Counter(filter(None, map(backend_of, graph.frontends)))
        source = "the frontend" if of_frontends else "the majority of its graph"
        wanted, _ = (of_frontends or Counter(backends.values())).most_common(1)[0]
        expected.append((graph.short_name, wanted))
        for subject, backend in backends.items():
            if backend != wanted:
                wrong.append(found(subject, backend=backend, wanted=wanted, of=source))
    if not expected:
        return Skipped("no pod specifies its discovery backend (DYT0708)")
    return outcome(wrong, summary=by_graph(expected))


def _specifies_backend(joined: JoinedFacts) -> Outcome:
    wrong = [
        found(subject, variable=BACKEND_ENV, label=DISCOVERY_BACKEND_LABEL)
        for graph in joined.governed
        for subject, pod in _pods(graph)
        if not backend_of(pod)
    ]
    pods = any(True for graph in joined.governed for _ in _pods(graph))
    return outcome(wrong, nothing="" if pods else "no graph with a policy has pods (DYT0401)")


def _some_in_kubernetes(joined: JoinedFacts) -> Skipped | None:
    if any(in_kubernetes(worker) for worker in live_workers(joined)):
        return None
    backends = {backend_of(pod_of(worker)) for worker in live_workers(joined)} - {""}
    if not backends:
        return Skipped("no pod specifies its discovery backend (DYT0708)")
    return Skipped(f"workers register in {', '.join(sorted(backends))}, not in Kubernetes")


def _leaders(joined: JoinedFacts, *, kubernetes: bool = True) -> list[WorkerChain]:
    """The workers that register in Kubernetes, or in another backend, without further ranks."""
    return [
        worker
        for worker in live_workers(joined)
        if not worker.follower
        and backend_of(pod_of(worker))
        and in_kubernetes(worker) is kubernetes
    ]


# -- EndpointSlices --------------------------------------------------------------------------------


def _in_endpoint_slices(joined: JoinedFacts) -> Outcome:
    workers, cluster = _leaders(joined), cluster_of(joined)
    slices = cluster.endpoints
    unread = [f"EndpointSlices: {slices.why}"] if isinstance(slices, Unread) else []
    tally = CheckTally("pod", len(workers), unread=unread)
    for worker in workers:
        explained, pod = not_serving(joined, worker), pod_of(worker)
        if not explained and not pod.ready and not worker.metadata:
            explained = registration_refused(joined, worker)
        if explained:
            tally.explained.append(explained)
            continue
        problem = not_listed(worker)
        fix = (
            "check that a Service of the graph selects it: "
            f"kubectl get endpointslices -n {pod.namespace} -l kubernetes.io/service-name"
        )
        if not pod.ready:
            problem = "not Ready"
            fix = (
                f"find the reason: kubectl describe pod {pod.name} -n {pod.namespace}; a worker "
                "whose readinessProbe cannot succeed is never found"
            )
        if problem:
            tally.wrong.append(found(worker.subject, problem=problem, fix=fix))
    return tally.outcome()


# -- permissions -----------------------------------------------------------------------------------


def _may_register(joined: JoinedFacts) -> Outcome:
    users = {user_of(pod_of(leader)) for leader in _leaders(joined)}
    accounts = [account for account in cluster_of(joined).worker_accounts if account.user in users]
    if not accounts:
        return Skipped("the permissions of the workers' service accounts were not reviewed")
    refused, unread, wrong = denied_permissions(joined), [], []
    for account in sorted(accounts, key=lambda account: account.user):
        *_, namespace, name = account.user.split(":")
        subject = f"ServiceAccount {name}.{namespace}"
        if isinstance(account.allowed, Unread):
            unread.append(f"{subject}: {account.allowed.why}")
        elif refused[account.user]:
            permissions = ", ".join(_permission(review) for review in refused[account.user])
            wrong.append(found(subject, denied=permissions, namespace=namespace))
    names = some(sorted(user.rpartition(":")[2] for user in users))
    return outcome(wrong, unread, f"{many(len(users), 'account')} ({names})")


def _permission(review: AccessReview) -> str:
    group = f".{review.group}" if review.group else ""
    return f"{review.verb} {review.resource}{group}"


# -- metadata --------------------------------------------------------------------------------------


def _metadata_read(joined: JoinedFacts) -> Skipped | None:
    items = cluster_of(joined).metadata
    return Skipped(f"{PLURAL}: {items.why}", unread=True) if isinstance(items, Unread) else None


def _has_metadata(joined: JoinedFacts) -> Outcome:
    """A pod that is not Ready is still starting, unless its log shows a failed registration."""
    workers, uids = _leaders(joined), pod_uids(cluster_of(joined))
    tally = CheckTally("pod", len(workers))
    for worker in workers:
        own = own_metadata(worker, uids)
        if own and not _is_unreadable(joined, worker, own):
            continue
        explained = _why_no_metadata(joined, worker)
        if explained:
            tally.explained.append(explained)
            continue
        problem = _metadata_problem(joined, worker, own)
        tally.wrong.append(about_log(worker, problem=problem))
    return tally.outcome()


def _why_no_metadata(joined: JoinedFacts, worker: WorkerChain) -> str:
    """The code of another check that explains missing metadata; empty if none does."""
    explained, refused = not_serving(joined, worker), registration_refused(joined, worker)
    if explained or refused == "DYT0703":
        return explained or refused
    return "" if refused or pod_of(worker).ready else "DYT0702"


def _metadata_problem(
    joined: JoinedFacts, worker: WorkerChain, own: Sequence[WorkerMetadata]
) -> str:
    if own:
        return "its DynamoWorkerMetadata has no readable model card" + _card_problem(joined, own)
    problem = "no DynamoWorkerMetadata"
    served, log = cluster_of(joined).served, log_of(joined, worker)
    if not isinstance(served, Unread) and served and f"{PLURAL}.{GROUP}" not in served:
        return f"{problem}; the cluster does not serve this resource (DYT0005)"
    failed = log.not_persisted if isinstance(log, StartLog) else ""
    return f"{problem}; its log has: {excerpt(failed)}" if failed else problem


def _is_unreadable(joined: JoinedFacts, worker: WorkerChain, own: Sequence[WorkerMetadata]) -> bool:
    """Whether the worker has registrations that are not readable as a worker."""
    if worker.cards or joined.facts.registry is not None:
        return False
    uid = pod_of(worker).uid
    return all(metadata.owner_uid == uid for metadata in own) and not any(map(has_no_model, own))


def _has_card(joined: JoinedFacts) -> Outcome:
    """Workers with endpoints and without a model card, except encoders."""
    workers, uids = _leaders(joined), pod_uids(cluster_of(joined))
    tally = CheckTally("pod", len(workers))
    for worker in workers:
        own, pod = own_metadata(worker, uids), pod_of(worker)
        if not own:
            tally.explained.append("DYT0704")
        elif worker.encoder or not any(map(has_no_model, own)) or worker.cards:
            continue
        elif explained := not_serving(joined, worker) or ("" if pod.ready else "DYT0702"):
            tally.explained.append(explained)
        else:
            tally.wrong.append(about_log(worker))
    return tally.outcome()


def _card_problem(joined: JoinedFacts, own: Sequence[WorkerMetadata]) -> str:
    """The problem of its cards, as reported when they were parsed."""
    ids = [id_in(key) for item in own for key in mapping(item.data.get("model_cards"))]
    deployments = (joined.deployments.get(metadata.namespace) for metadata in own[:1])
    messages = (
        problem.message
        for deployment in deployments
        if deployment is not None
        for problem in deployment.problems
        # The subject is its key, or the worker's name, which ends with the end of its id.
        for number in ids
        if number and problem.subject.rpartition("/")[2] in (number, number[-4:])
    )
    why = next(messages, "")
    return f": {excerpt(why)}" if why else ""


def _metadata_is_own(joined: JoinedFacts) -> Outcome:
    """Without pods that have not started: Kubernetes collects what the pod before them left."""
    workers, uids = _leaders(joined), pod_uids(cluster_of(joined))
    tally, judged = CheckTally("pod", len(workers), explained=["DYT0704"]), 0
    for worker in workers:
        stale, pod = stale_metadata(worker, uids), pod_of(worker)
        if stale and not worker.running:
            tally.explained.append("DYT0410")
            continue
        judged += bool(own_metadata(worker, uids))
        for item in stale:
            owner = f"the pod with uid {item.owner_uid}" if item.owner_uid else "no pod"
            names = {"item": item.name, "namespace": pod.namespace}
            tally.wrong.append(about_pod(worker, owner=owner, uid=pod.uid, **names))
    return tally.outcome(judged)


def _metadata_has_pod(joined: JoinedFacts) -> Outcome:
    """Objects without a pod. With named graphs, those of these graphs."""
    cluster = cluster_of(joined)
    if isinstance(cluster.metadata, Unread):
        return Skipped(cluster.metadata.why, unread=True)
    if isinstance(cluster.endpoints, Unread):
        return Skipped(cluster.endpoints.why, unread=True)
    if isinstance(cluster.other_pods, Unread):
        return Skipped(f"pods of other graphs: {cluster.other_pods.why}", unread=True)
    # The list of pods has only pods of graphs; others have endpoints.
    listed = {(endpoint.namespace, endpoint.pod) for endpoint in cluster.endpoints}
    pods = pod_uids(cluster).keys() | listed | set(cluster.other_pods)
    wrong: list[Found] = []
    for item in sorted(cluster.metadata, key=lambda item: (item.namespace, item.name)):
        owner = item.owner or item.name
        if (item.namespace, owner) in pods or not _is_wanted(item, cluster):
            continue
        subject = f"DynamoWorkerMetadata {item.name}.{item.namespace}"
        since = "" if item.created is None else f", created {age(cluster.now - item.created)} ago"
        wrong.append(
            found(subject, owner=owner, item=item.name, namespace=item.namespace, since=since)
        )
    nothing = "" if cluster.metadata else "no worker has registered a DynamoWorkerMetadata"
    return outcome(wrong, summary=f"{len(cluster.metadata):,} objects", nothing=nothing)


def _is_wanted(item: WorkerMetadata, cluster: ClusterFacts) -> bool:
    """Whether an object is in the namespaces and of the graphs that were asked for."""
    if cluster.namespaces and item.namespace not in cluster.namespaces:
        return False
    return not cluster.wanted or _of_graphs(item, cluster.wanted)


def _of_graphs(item: WorkerMetadata, graphs: Sequence[str]) -> bool:
    """Whether an object can belong to one of these graphs: by Dynamo's namespace in its keys.

    The namespace is ``NAMESPACE-GRAPH``, with a suffix during a rolling update.
    """
    spaces = {key.split("/")[2] for key, _ in item.entries() if key.count("/") > 2}
    starts = [f"{item.namespace}-{name}" for name in graphs]
    return not spaces or any(
        space == start or space.startswith(f"{start}-") for space in spaces for start in starts
    )


def _ids_match(joined: JoinedFacts) -> Outcome:
    workers, uids = _leaders(joined), pod_uids(cluster_of(joined))
    tally, judged = CheckTally("pod", len(workers), explained=["DYT0704"]), 0
    for worker in workers:
        own = own_metadata(worker, uids)
        judged += bool(own)
        for item in own:
            ids = wrong_ids(item)
            if ids:
                wanted = f"{instance_id(item.name):x}"
                tally.wrong.append(
                    found(worker.subject, item=item.name, ids=some(ids), wanted=wanted)
                )
    return tally.outcome(judged)


# -- other backends --------------------------------------------------------------------------------


def _in_other_backend(joined: JoinedFacts) -> Outcome:
    workers, registry = _leaders(joined, kubernetes=False), joined.facts.registry
    if not workers:
        return Skipped("no worker registers outside Kubernetes")
    backends = sorted({backend_of(pod_of(worker)) for worker in workers})
    if registry is None:
        names = " and ".join(backends)
        return Skipped(f"workers register in {names} (use --discovery {backends[0]})")
    if isinstance(registry.deployment, Unread):
        return Skipped(f"{registry.title}: {registry.deployment.why}", unread=True)
    tally = CheckTally("pod", len(workers))
    for worker in workers:
        if worker.cards:
            continue
        explained = not_serving(joined, worker) or worker.unclaimed
        if explained:
            tally.explained.append(explained)
        else:
            tally.wrong.append(about_log(worker, registry=registry.title))
    return tally.outcome()


_PODS: Final = (in_cluster, has_policy, has_workers)
_KUBE: Final = (*_PODS, _some_in_kubernetes)

DISCOVERY_CHECKS: Final[Sequence[Check[JoinedFacts]]] = (
    Check("DYT0701", _one_backend, _PODS),
    Check("DYT0702", _in_endpoint_slices, _KUBE),
    Check("DYT0703", _may_register, _KUBE),
    Check("DYT0704", _has_metadata, (*_KUBE, _metadata_read)),
    Check("DYT0705", _metadata_is_own, (*_KUBE, _metadata_read)),
    Check("DYT0706", _ids_match, (*_KUBE, _metadata_read)),
    Check("DYT0707", _in_other_backend, _PODS),
    Check("DYT0708", _specifies_backend, _PODS),
    Check("DYT0709", _metadata_has_pod, (in_cluster,)),
    Check("DYT0710", _has_card, (*_KUBE, _metadata_read)),
)
