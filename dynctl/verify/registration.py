"""Where workers register: EndpointSlices, metadata, cards; and why a registration is missing. Pure.

In Kubernetes two objects register a worker: its pod in a discovery EndpointSlice, and its
DynamoWorkerMetadata. In other backends the worker writes its own entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynctl.adapters.ports import AccessReview
from dynctl.base.json_fields import mapping
from dynctl.findings.runner import Found, Outcome, Skipped
from dynctl.health.facts import Unread
from dynctl.verify.chain import WorkerChain
from dynctl.verify.cluster_facts import ClusterFacts, PodKey, StartLog
from dynctl.verify.join import JoinedFacts
from dynctl.verify.needs import NO_CLUSTER, in_cluster, pod_of
from dynctl.verify.pod_spec import KUBERNETES, backend_of, why_not_in_kubernetes
from dynctl.verify.root_causes import log_of, stuck_at_start
from dynctl.verify.wording import CheckTally
from dynctl.wire.kubernetes.names import DISCOVERY_ENABLED_LABEL
from dynctl.wire.kubernetes.objects import Pod
from dynctl.wire.kubernetes.worker_metadata import PLURAL, WorkerMetadata, instance_id

_WRITING: Final = ("create", "patch")


def in_kubernetes(worker: WorkerChain) -> bool:
    """Whether the worker registers in Kubernetes."""
    return backend_of(pod_of(worker)) == KUBERNETES


# -- missing registrations -------------------------------------------------------------------------


def not_serving(joined: JoinedFacts, worker: WorkerChain) -> str:
    """The code that explains why a worker is not registered yet; else empty.

    It waits for its topology, or its engine does not run.
    """
    stuck = stuck_at_start(joined, worker)
    return stuck or ("" if worker.running else "DYT0410")


def registration_refused(joined: JoinedFacts, worker: WorkerChain) -> str:
    """The code that explains why a worker cannot write its metadata; else empty.

    Such a worker runs and never becomes Ready: its health is that of its endpoint, which it could
    not register.
    """
    if not in_kubernetes(worker):
        return ""
    refused = denied_permissions(joined).get(user_of(pod_of(worker)), ())
    if any(review.resource == PLURAL and review.verb in _WRITING for review in refused):
        return "DYT0703"
    log = log_of(joined, worker)
    return "DYT0704" if isinstance(log, StartLog) and log.not_persisted else ""


def user_of(pod: Pod) -> str:
    """The service account of a pod, as the API server names it."""
    return f"system:serviceaccount:{pod.namespace}:{pod.service_account or 'default'}"


def denied_permissions(joined: JoinedFacts) -> dict[str, list[AccessReview]]:
    """User -> missing permissions, of the workers' service accounts."""
    accounts = () if joined.cluster is None else joined.cluster.worker_accounts
    return {
        account.user: [review for review, allowed in account.allowed.items() if not allowed]
        for account in accounts
        if not isinstance(account.allowed, Unread)
    }


def registration_gap(joined: JoinedFacts, worker: WorkerChain) -> Skipped | None:
    """Why a worker has no registration that can be checked; None if it has one."""
    registry, cluster = joined.facts.registry, joined.cluster
    if registry is not None and isinstance(registry.deployment, Unread):
        return Skipped(f"{registry.title}: {registry.deployment.why}", unread=True)
    if worker.cards:
        return None
    if worker.unclaimed:
        return Skipped(worker.unclaimed)
    if cluster is None or worker.pod is None:
        return Skipped(NO_CLUSTER)
    if registry is None:
        if reason := why_not_in_kubernetes(worker.pod):
            return Skipped(reason)
        if isinstance(cluster.metadata, Unread):
            return Skipped(f"registered workers: {cluster.metadata.why}", unread=True)
    explained = not_serving(joined, worker) or registration_refused(joined, worker)
    return Skipped(explained or _missing_code(worker))


def _missing_code(worker: WorkerChain) -> str:
    if why_not_in_kubernetes(pod_of(worker)):
        return "DYT0707"
    if not pod_of(worker).ready:
        return "DYT0702"
    return "DYT0710" if any(map(has_no_model, worker.metadata)) else "DYT0704"


# -- cards that can be checked ---------------------------------------------------------------------


@dataclass(slots=True)
class Cards:
    """The workers whose own cards are known; the tally has the reasons for the others.

    Without further ranks of a replica and encoders, which have no card.
    """

    workers: list[WorkerChain] = field(default_factory=list)
    tally: CheckTally = field(default_factory=lambda: CheckTally("worker"))

    def outcome(self, wrong: Sequence[Found]) -> Outcome:
        self.tally.wrong += wrong
        return self.tally.outcome(len(self.workers))


def cards_of(joined: JoinedFacts, workers: Sequence[WorkerChain]) -> Cards:
    """Those of ``workers`` whose cards can be checked."""
    cards = Cards()
    uids = {} if joined.cluster is None else pod_uids(joined.cluster)
    for worker in workers:
        if worker.follower or worker.encoder:
            continue
        cards.tally.whole += 1
        gap = registration_gap(joined, worker)
        if gap is not None:
            (cards.tally.unread if gap.unread else cards.tally.explained).append(gap.reason)
        elif has_stale_cards(joined, worker, uids):
            cards.tally.explained.append("DYT0705")
        else:
            cards.workers.append(worker)
    return cards


def all_workers(joined: JoinedFacts) -> list[WorkerChain]:
    """The workers of all graphs, with or without a policy; without a cluster, of the registry.

    With a cluster, registered workers without a pod of its graphs are left out: they belong to
    another deployment.
    """
    if joined.cluster is None:
        return list(joined.loose)
    return [worker for graph in joined.graphs for worker in graph.workers]


def registrations_read(joined: JoinedFacts) -> Skipped | None:
    """The registered workers were read."""
    if joined.cluster is not None:
        return in_cluster(joined)
    registry = joined.facts.registry
    if registry is None:
        return Skipped("no cluster and no registry was read")
    if isinstance(registry.deployment, Unread):
        return Skipped(f"{registry.title}: {registry.deployment.why}", unread=True)
    return None if joined.loose else Skipped("no worker is registered")


# -- EndpointSlices --------------------------------------------------------------------------------


def not_listed(worker: WorkerChain) -> str:
    """The fault of its pod in the discovery EndpointSlices; empty if there is none or unknown."""
    pod = pod_of(worker)
    if worker.endpoints is None:
        return ""
    mine = [
        endpoint
        for endpoint in worker.endpoints
        if endpoint.labels.get(DISCOVERY_ENABLED_LABEL) == "true"
    ]
    if not mine:
        return f"in no EndpointSlice with label {DISCOVERY_ENABLED_LABEL}=true"
    own = [endpoint for endpoint in mine if endpoint.uid in ("", pod.uid)]
    if not own:
        return (
            f"EndpointSlice {mine[0].slice} has an earlier pod with this name (uid {mine[0].uid})"
        )
    if any(endpoint.ready for endpoint in own):
        return ""
    return f"not ready in EndpointSlice {own[0].slice}"


# -- metadata --------------------------------------------------------------------------------------


def pod_uids(cluster: ClusterFacts) -> dict[PodKey, str]:
    """The uid of every pod that was read."""
    pods = () if isinstance(cluster.pods, Unread) else cluster.pods
    return {(pod.namespace, pod.name): pod.uid for pod in pods}


def own_metadata(worker: WorkerChain, uids: Mapping[PodKey, str]) -> list[WorkerMetadata]:
    """The objects that belong to the worker by owner or by name.

    Without objects of another existing pod: an object of a container can have the name of a pod.
    """
    pod = pod_of(worker)

    def of_another(item: WorkerMetadata) -> bool:
        owner = (item.namespace, item.owner)
        return item.owner not in ("", pod.name) and uids.get(owner) == item.owner_uid

    return [item for item in worker.metadata if not of_another(item)]


def stale_metadata(worker: WorkerChain, uids: Mapping[PodKey, str]) -> list[WorkerMetadata]:
    """Those of its objects whose owner is a deleted pod."""
    uid = pod_of(worker).uid
    return [item for item in own_metadata(worker, uids) if item.owner_uid != uid]


def has_stale_cards(joined: JoinedFacts, worker: WorkerChain, uids: Mapping[PodKey, str]) -> bool:
    """Whether all registrations of a worker were written by a deleted pod."""
    if joined.facts.registry is not None or worker.pod is None:
        return False
    own = own_metadata(worker, uids)
    return bool(own) and len(stale_metadata(worker, uids)) == len(own)


def has_no_model(item: WorkerMetadata) -> bool:
    """Whether the worker has endpoints and no model card, as encoders do."""
    return bool(item.data.get("endpoints")) and not item.data.get("model_cards")


def wrong_ids(item: WorkerMetadata) -> list[str]:
    """The ids (hex) of an object's registrations that are not the hash of its name."""
    wanted = instance_id(item.name)
    ids = set()
    for bucket in ("endpoints", "model_cards"):
        for key, value in mapping(item.data.get(bucket)).items():
            written = mapping(value).get("instance_id")
            number = f"{written:x}" if isinstance(written, int) else str(written)
            ids |= {number, id_in(key).lower()}
    return sorted(ids - {f"{wanted:x}"})


def id_in(key: str) -> str:
    """The id in NAMESPACE/COMPONENT/ENDPOINT/ID; after it a card may have the adapter's name."""
    parts = key.split("/")
    return parts[3] if len(parts) > 3 else parts[-1]
