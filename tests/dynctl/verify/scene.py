"""A healthy deployment as facts, with files, logs and routers; tests change one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from dynctl.adapters.ports import DiscoveryEntry, Listed
from dynctl.findings.report import CheckResult
from dynctl.findings.runner import Check
from dynctl.health.deployment import Deployment, Registrations
from dynctl.health.facts import Unread
from dynctl.verify.checks.capacity import CAPACITY_CHECKS
from dynctl.verify.checks.cards import CARD_CHECKS
from dynctl.verify.checks.discovery import DISCOVERY_CHECKS
from dynctl.verify.checks.files import FILE_CHECKS
from dynctl.verify.checks.pods import POD_CHECKS
from dynctl.verify.checks.starts import START_CHECKS
from dynctl.verify.cluster_facts import (
    Account,
    MountFacts,
    PodKey,
    ProbeAnswer,
    Registry,
    RouterView,
    StartLog,
    TopologyFile,
    VerifyFacts,
)
from dynctl.verify.gather.permissions import worker_reviews
from dynctl.verify.join import JoinedFacts, join
from dynctl.wire.kubernetes.objects import Container, Endpoint, Node, ObjectEvent, Pod
from dynctl.wire.kubernetes.worker_metadata import WorkerMetadata, instance_id
from tests.dynctl.verify.whole_cluster import Cluster, judged, wrong
from tests.kube import deployment

NOW: Final = deployment.NOW
SPACE: Final = "prod"
GRAPH: Final = "DynamoGraphDeployment my-llm.prod"
DECODE: Final = "my-llm-decode-a-0"
"""A decode worker of zone A; its neighbours end in 1 to 3."""
PREFILL: Final = "my-llm-prefill-a-0"
FRONTEND: Final = "my-llm-frontend-0"
NODE: Final = "gpu-a-0"
"""Where DECODE and PREFILL run."""
A, B = "us-east-1a", "us-east-1b"
ALL: Final = (
    *POD_CHECKS,
    *FILE_CHECKS,
    *START_CHECKS,
    *DISCOVERY_CHECKS,
    *CARD_CHECKS,
    *CAPACITY_CHECKS,
)
REFUSED: Final = Unread("forbidden")


def subject(pod: str) -> str:
    return f"Pod {pod}.{SPACE}"


class Scene:
    """``wanted``: what :func:`tests.kube.deployment.healthy` takes."""

    def __init__(self, **wanted: Any) -> None:
        made = Cluster(**wanted)
        self.facts = made.facts()
        self.pods: dict[str, Pod] = {one.name: one for one in _known(self.facts.pods)}
        self.nodes: dict[str, Node] = {one.name: one for one in _known(self.facts.nodes)}
        self.metadata: dict[str, WorkerMetadata] = {
            one.name: one for one in _known(self.facts.metadata)
        }
        self.endpoints: list[Endpoint] = list(_known(self.facts.endpoints))
        self.events: list[ObjectEvent] = []
        self.warnings: list[ObjectEvent] = []
        self.files: dict[PodKey, Any] = {
            key: {name: TopologyFile(content) for name, content in found.items()}
            for key, found in deployment.files(made.bodies).items()
        }
        self.logs: dict[PodKey, Any] = {
            (SPACE, name): _log(config(item)) for name, item in self.metadata.items()
        }
        self.routers = [
            RouterView(subject(FRONTEND), "prod/my-llm", frozenset(map(instance_id, self.metadata)))
        ]
        self.accounts = (
            Account(
                f"system:serviceaccount:{SPACE}:my-llm-k8s-service-discovery",
                dict.fromkeys(worker_reviews(SPACE), True),
            ),
        )
        self.registry: Registry | None = None
        self.probe: tuple[ProbeAnswer, ...] | None = None
        self.mount: MountFacts | None = None
        self.changes: dict[str, Any] = {}

    # -- changing it ---------------------------------------------------------------------------

    def pod(self, name: str, /, **changes: Any) -> None:
        self.pods[name] = replace(self.pods[name], **changes)

    def main(self, name: str, /, **changes: Any) -> None:
        """Change the container main of a pod."""
        one = self.container(name)
        others = tuple(c for c in self.pods[name].containers if c is not one)
        self.pod(name, containers=(replace(one, **changes), *others))

    def container(self, name: str) -> Container:
        return next(one for one in self.pods[name].containers if one.name == "main")

    def env(self, name: str, /, **values: str | None) -> None:
        """Set variables of main; None removes one."""
        result = {**self.container(name).env, **values}
        self.main(name, env={key: value for key, value in result.items() if value is not None})

    def label(self, name: str, key: str, value: str | None) -> None:
        self.pod(name, labels=_with(self.pods[name].labels, key, value))

    def annotate(self, name: str, key: str, value: str | None) -> None:
        self.pod(name, annotations=_with(self.pods[name].annotations, key, value))

    def node(self, name: str, key: str, value: str | None) -> None:
        """Label a node; None takes the label away."""
        one = self.nodes[name]
        self.nodes[name] = replace(one, labels=_with(one.labels, key, value))

    def file(self, name: str, content: str | None, domain: str = "zone", invalid: str = "") -> None:
        self.files[SPACE, name] = {
            **self.files[SPACE, name],
            domain: TopologyFile(content, invalid),
        }

    def log(self, name: str, /, **changes: Any) -> None:
        self.logs[SPACE, name] = replace(self.logs[SPACE, name], **changes)

    def card(self, name: str, /, **changes: Any) -> None:
        """Change fields of the card's runtime_config; None removes one."""
        result = {**config(self.metadata[name]), **changes}
        kept = {key: value for key, value in result.items() if value is not None}
        item = self.metadata[name]
        cards = {
            key: {**one, "card_json": {**one["card_json"], "runtime_config": kept}}
            for key, one in item.data["model_cards"].items()
        }
        self.metadata[name] = replace(item, data={**item.data, "model_cards": cards})

    def gone(self, name: str) -> None:
        """The worker is not registered and no router has it."""
        del self.metadata[name]
        self.unknown(name)

    def unknown(self, name: str) -> None:
        """The router does not have the worker."""
        one = self.routers[0]
        assert not isinstance(one.workers, Unread)
        self.routers[0] = replace(one, workers=one.workers - {instance_id(name)})

    def never_written(self, name: str) -> None:
        """The operator wrote nothing of the policy into the pod: it started without topology."""
        self.pod(name, annotations={}, volumes=())
        self.main(name, env={"DYN_DISCOVERY_BACKEND": "kubernetes"}, mounts=())
        self.files[SPACE, name] = {"zone": TopologyFile(None)}
        self.logs[SPACE, name] = StartLog()
        fields = ("topology_domains", "taints", "kv_transfer_domain", "kv_transfer_enforcement")
        self.card(name, **dict.fromkeys(fields))

    def not_started(self, name: str, *, running: bool = False) -> None:
        """The pod never became ready: it registered nothing, and serves nowhere."""
        since = NOW - 10 if running else None
        waiting = "" if running else "CrashLoopBackOff"
        self.pod(name, ready=False)
        self.main(name, ready=False, running_since=since, waiting=waiting, restarts=3)
        self.logs[SPACE, name] = StartLog()
        self.endpoints = [
            replace(one, ready=False) if one.pod == name else one for one in self.endpoints
        ]
        if not running:
            self.files[SPACE, name] = Unread("its container does not run")
        self.gone(name)

    # -- judging it ----------------------------------------------------------------------------

    def verify_facts(self) -> VerifyFacts:
        result = {
            "pods": tuple(self.pods.values()),
            "nodes": tuple(self.nodes.values()),
            "metadata": tuple(self.metadata.values()),
            "endpoints": tuple(self.endpoints),
            "events": tuple(self.events),
            "warnings": tuple(self.warnings),
            "files": self.files,
            "logs": self.logs,
            "worker_accounts": self.accounts,
            **self.changes,
        }
        return VerifyFacts(
            cluster=replace(self.facts, **result),
            registry=self.registry,
            routers=tuple(self.routers),
            probe=self.probe,
            mount=self.mount,
        )

    def joined(self) -> JoinedFacts:
        return join(self.verify_facts())

    def judge(self, checks: Sequence[Check[JoinedFacts]]) -> dict[str, CheckResult]:
        return judged(checks, self.joined())

    def found(self) -> dict[str, list[str]]:
        """Code -> subjects, of every check of worker pods and what follows from them."""
        return wrong(self.judge(ALL))

    def registered(self) -> Deployment:
        """What the metadata registers, as another backend would hold it."""
        return deployment_of(self.metadata.values())


def deployment_of(metadata: Iterable[WorkerMetadata]) -> Deployment:
    registrations = Registrations()
    entries = [DiscoveryEntry(key, value) for item in metadata for key, value in item.entries()]
    registrations.apply(Listed(tuple(entries)))
    return registrations.deployment()


def config(item: WorkerMetadata) -> dict[str, Any]:
    """The runtime_config of its only card."""
    [card] = item.data["model_cards"].values()
    found: dict[str, Any] = card["card_json"]["runtime_config"]
    return found


def values(result: CheckResult) -> list[str]:
    """What was found, as people read it."""
    return [one.value for one in result.findings]


def _log(result: dict[str, Any]) -> StartLog:
    return StartLog(
        dict(result["topology_domains"]),
        result["kv_transfer_domain"],
        result["kv_transfer_enforcement"],
        result.get("kv_transfer_preferred_weight"),
    )


def _with(result: Any, key: str, value: str | None) -> dict[str, str]:
    found = {**result}
    found.pop(key, None)
    return found if value is None else {**found, key: value}


def _known(listing: Any) -> Any:
    assert not isinstance(listing, Unread)
    return listing


def restart_fix(pod: str) -> str:
    """The fix that deletes a serving pod."""
    note = "one pod after the other: its running requests may fail, its KV cache is lost"
    return f"kubectl delete pod {pod} -n {SPACE} ({note})"
