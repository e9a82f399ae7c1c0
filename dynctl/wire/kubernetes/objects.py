"""Read nodes, pods, endpoints, events and Deployments, as far as topology checks need them.

Times are seconds since the epoch by the cluster's clock. A missing value is None or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from dynctl.base.json_fields import count, mapping, mappings, moment, sequence, text, texts
from dynctl.wire.kubernetes.names import MAIN_CONTAINER

_PROJECTED: Final = "projected"
_DOWNWARD_API: Final = "downwardAPI"


@dataclass(frozen=True, slots=True)
class Node:
    """A node. ``schedulable`` False: cordoned. ``taints``: keys of NoSchedule, NoExecute taints.

    ``devices``: the extended resources that it offers, such as nvidia.com/gpu; None if unknown.
    """

    name: str
    labels: Mapping[str, str]
    schedulable: bool = True
    ready: bool = True
    taints: frozenset[str] = frozenset()
    devices: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Termination:
    """The end of a container. ``finished`` may be unknown."""

    exit_code: int
    reason: str = ""
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class DownwardItem:
    """A file of a Downward API volume: its path and the field that it contains."""

    path: str
    field: str


@dataclass(frozen=True, slots=True)
class Volume:
    """``kind`` is Kubernetes' name of the source: downwardAPI, projected, configMap, ...

    ``items``: its Downward API files; a projected volume can have them beside others.
    """

    name: str
    kind: str
    items: tuple[DownwardItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Mount:
    """``sub_path``: the part of the volume that is mounted; the kubelet never updates it."""

    volume: str
    path: str
    read_only: bool = False
    sub_path: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """A container. ``env``: name -> value, None for ``valueFrom``. ``env_from``: there is more.

    ``devices``: the extended resources that it needs.
    """

    name: str
    image: str = ""
    env: Mapping[str, str | None] = field(default_factory=dict)
    env_from: bool = False
    words: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    ready: bool = False
    running_since: float | None = None
    waiting: str = ""
    restarts: int = 0
    last_end: Termination | None = None
    """The end of the previous run, or of the current one if it has ended."""
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LabelWrite:
    """The labels that a manager wrote at a time."""

    manager: str
    keys: frozenset[str]
    at: float


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. ``node`` is empty until it is scheduled; ``deleting``: it is being deleted;
    ``host_network``: its address is that of its node."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node: str = ""
    phase: str = ""
    ip: str = ""
    ready: bool = False
    deleting: bool = False
    created: float | None = None
    scheduled: float | None = None
    service_account: str = ""
    containers: tuple[Container, ...] = ()
    volumes: tuple[Volume, ...] = ()
    label_writes: tuple[LabelWrite, ...] = ()
    owner: str = ""
    """``Kind/name`` of the controller."""
    host_network: bool = False

    @property
    def main(self) -> Container | None:
        """The container that the operator changes: main, or else the only container."""
        named = [container for container in self.containers if container.name == MAIN_CONTAINER]
        if named or len(self.containers) == 1:
            return (named or list(self.containers))[0]
        return None

    def labelled_at(self, key: str) -> float | None:
        """The time of the label's last change; None if managedFields do not have it."""
        times = [write.at for write in self.label_writes if key in write.keys]
        return max(times) if times else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of an EndpointSlice and the pod behind it. ``uid`` may be empty."""

    namespace: str
    slice: str
    pod: str
    uid: str
    ready: bool
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """An event about an object; ``uid`` is the object's, ``at`` the time of the last occurrence."""

    namespace: str
    name: str
    uid: str
    reason: str
    message: str
    count: int = 1
    at: float | None = None
    kind: str = "Pod"


@dataclass(frozen=True, slots=True)
class KubeDeployment:
    """A Deployment. ``images``: of its containers; ``selector``: labels of its pods."""

    namespace: str
    name: str
    service_account: str
    replicas: int
    ready: int
    images: tuple[str, ...]
    args: tuple[str, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)


def node(body: Mapping[str, Any]) -> Node:
    """Read a Node."""
    metadata, spec = mapping(body.get("metadata")), mapping(body.get("spec"))
    conditions = _conditions(body)
    taints = mappings(spec.get("taints"))
    return Node(
        text(metadata.get("name")),
        texts(metadata.get("labels")),
        schedulable=spec.get("unschedulable") is not True,
        ready=conditions.get("Ready", ("Unknown", None))[0] == "True",
        taints=frozenset(
            text(taint.get("key"))
            for taint in taints
            if taint.get("effect") in ("NoSchedule", "NoExecute")
        ),
        devices=_devices(mapping(body.get("status")).get("allocatable")),
    )


def pod(body: Mapping[str, Any]) -> Pod:
    """Read a Pod."""
    metadata, spec = mapping(body.get("metadata")), mapping(body.get("spec"))
    status, conditions = mapping(body.get("status")), _conditions(body)
    states = {text(state.get("name")): state for state in mappings(status.get("containerStatuses"))}
    controllers = mappings(metadata.get("ownerReferences"))
    owner = next(
        (reference for reference in controllers if reference.get("controller") is True), {}
    )
    return Pod(
        namespace=text(metadata.get("namespace")),
        name=text(metadata.get("name")),
        uid=text(metadata.get("uid")),
        labels=texts(metadata.get("labels")),
        annotations=texts(metadata.get("annotations")),
        node=text(spec.get("nodeName")),
        phase=text(status.get("phase")),
        ip=text(status.get("podIP")),
        ready=conditions.get("Ready", ("", None))[0] == "True",
        deleting="deletionTimestamp" in metadata,
        created=moment(metadata.get("creationTimestamp")),
        scheduled=conditions.get("PodScheduled", ("", None))[1],
        service_account=text(spec.get("serviceAccountName")),
        containers=tuple(
            _container(container, states.get(text(container.get("name")), {}))
            for container in mappings(spec.get("containers"))
        ),
        volumes=tuple(map(_volume, mappings(spec.get("volumes")))),
        label_writes=tuple(_label_writes(metadata)),
        owner=f"{text(owner.get('kind'))}/{text(owner.get('name'))}" if owner else "",
        host_network=spec.get("hostNetwork") is True,
    )


def endpoints(body: Mapping[str, Any]) -> Iterator[Endpoint]:
    """Read the pods of an EndpointSlice; a missing ``ready`` means ready, as documented."""
    metadata = mapping(body.get("metadata"))
    for entry in mappings(body.get("endpoints")):
        target = mapping(entry.get("targetRef"))
        if target.get("kind") == "Pod":
            yield Endpoint(
                text(target.get("namespace")) or text(metadata.get("namespace")),
                text(metadata.get("name")),
                text(target.get("name")),
                text(target.get("uid")),
                mapping(entry.get("conditions")).get("ready") is not False,
                texts(metadata.get("labels")),
            )


def object_event(body: Mapping[str, Any]) -> ObjectEvent:
    """Read an Event of core/v1."""
    about = mapping(body.get("involvedObject"))
    series = mapping(body.get("series"))
    times = (body.get("lastTimestamp"), series.get("lastObservedTime"), body.get("eventTime"))
    seen = [time for time in map(moment, (*times, body.get("firstTimestamp"))) if time is not None]
    return ObjectEvent(
        text(about.get("namespace")),
        text(about.get("name")),
        text(about.get("uid")),
        text(body.get("reason")),
        text(body.get("message")),
        count(body.get("count")) or count(series.get("count")) or 1,
        max(seen) if seen else None,
        text(about.get("kind")),
    )


def kube_deployment(body: Mapping[str, Any]) -> KubeDeployment:
    """Read a Deployment."""
    metadata, spec = mapping(body.get("metadata")), mapping(body.get("spec"))
    template = mapping(mapping(spec.get("template")).get("spec"))
    containers = mappings(template.get("containers"))
    args = (arg for container in containers for arg in sequence(container.get("args")))
    replicas = spec.get("replicas")
    return KubeDeployment(
        text(metadata.get("namespace")),
        text(metadata.get("name")),
        text(template.get("serviceAccountName")) or "default",
        1 if replicas is None else count(replicas),
        count(mapping(body.get("status")).get("readyReplicas")),
        tuple(text(container.get("image")) for container in containers),
        tuple(filter(None, map(text, args))),
        texts(mapping(spec.get("selector")).get("matchLabels")),
    )


def _conditions(body: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    """Type -> (status, time of the last change)."""
    conditions = {}
    for entry in mappings(mapping(body.get("status")).get("conditions")):
        conditions[text(entry.get("type"))] = (
            text(entry.get("status")),
            moment(entry.get("lastTransitionTime")),
        )
    return conditions


def command_words(container: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of command and args; an arg can be a shell script (``sh -c "python -m ..."``),
    whose comments are left out."""
    parts = [*sequence(container.get("command")), *sequence(container.get("args"))]
    script = "\n".join(part.replace("\\\n", " ") for part in parts if isinstance(part, str))
    return tuple(
        word
        for line in script.splitlines()
        for word in takewhile(lambda word: not word.startswith("#"), line.split())
    )


def _container(body: Mapping[str, Any], status: Mapping[str, Any]) -> Container:
    state, last = mapping(status.get("state")), mapping(status.get("lastState"))
    ended = mapping(state.get("terminated")) or mapping(last.get("terminated"))
    env = {
        text(entry.get("name")): None if "valueFrom" in entry else text(entry.get("value"))
        for entry in mappings(body.get("env"))
    }
    env.pop("", None)
    ports = mappings(body.get("ports"))
    return Container(
        name=text(body.get("name")),
        image=text(body.get("image")),
        env=env,
        env_from=bool(body.get("envFrom")),
        words=command_words(body),
        mounts=tuple(map(_mount, mappings(body.get("volumeMounts")))),
        ports={text(port.get("name")): count(port.get("containerPort")) for port in ports},
        ready=status.get("ready") is True,
        running_since=moment(mapping(state.get("running")).get("startedAt")),
        waiting=text(mapping(state.get("waiting")).get("reason")),
        restarts=count(status.get("restartCount")),
        last_end=_termination(ended) if ended else None,
        devices=_devices(mapping(body.get("resources")).get("limits")) or frozenset(),
    )


def _mount(body: Mapping[str, Any]) -> Mount:
    return Mount(
        text(body.get("name")),
        text(body.get("mountPath")).rstrip("/"),
        body.get("readOnly") is True,
        text(body.get("subPath")) or text(body.get("subPathExpr")),
    )


def _termination(body: Mapping[str, Any]) -> Termination:
    return Termination(
        count(body.get("exitCode")), text(body.get("reason")), moment(body.get("finishedAt"))
    )


def _volume(body: Mapping[str, Any]) -> Volume:
    kind = next((key for key in body if key != "name"), "")
    source = mapping(body.get(kind))
    files = [*sequence(source.get("items"))]
    if kind == _PROJECTED:
        for projected in mappings(source.get("sources")):
            files += sequence(mapping(projected.get(_DOWNWARD_API)).get("items"))
    return Volume(
        text(body.get("name")),
        kind,
        tuple(
            DownwardItem(
                text(item.get("path")), text(mapping(item.get("fieldRef")).get("fieldPath"))
            )
            for item in map(mapping, files)
        ),
    )


def _devices(quantities: Any) -> frozenset[str] | None:
    """The extended resources of which there is a quantity; None if none are listed."""
    listed = mapping(quantities)
    if not listed:
        return None
    domains = {name: name.partition("/")[0] for name in listed if "/" in name}
    return frozenset(
        name
        for name, domain in domains.items()
        if not domain.endswith("kubernetes.io") and text(str(listed[name])) not in ("", "0")
    )


def _label_writes(metadata: Mapping[str, Any]) -> Iterator[LabelWrite]:
    for entry in mappings(metadata.get("managedFields")):
        at = moment(entry.get("time"))
        labels = mapping(mapping(mapping(entry.get("fieldsV1")).get("f:metadata")).get("f:labels"))
        keys = frozenset(key[2:] for key in labels if key.startswith("f:"))
        if keys and at is not None:
            yield LabelWrite(text(entry.get("manager")), keys, at)
