"""DynamoGraphDeployments and Grove topologies of all versions, as far as topology needs them.

v1alpha1 has ``spec.services`` (a map), v1beta1 ``spec.components`` (a list); here both are
components in order. Invalid parts are left out; lint reports them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dynctl.base.json_fields import count, mapping, sequence, text
from dynctl.manifests.files import Manifest
from dynctl.manifests.pod_placement import allowed_values
from dynctl.wire.kubernetes.objects import command_words
from router_core import Role

# -- role of a component ---------------------------------------------------------------------------


RoleSource = Literal["type", "sub-type", "arguments", "name", "encoder", "nothing"]

DISAGGREGATED: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_MODES: Final = {
    **DISAGGREGATED,
    "agg": Role.AGGREGATED,
    "aggregated": Role.AGGREGATED,
    "prefill_and_decode": Role.AGGREGATED,
    "null": Role.AGGREGATED,
    "none": Role.AGGREGATED,
}


def role_of(
    name: str, kind: str, sub_type: str, words: Sequence[str]
) -> tuple[Role | None, RoleSource]:
    """The role of a worker component and its source; ``kind`` and ``sub_type`` in lower case.

    The name is the least reliable source. An encoder has none of the roles.
    """
    if kind in DISAGGREGATED:
        return DISAGGREGATED[kind], "type"
    if kind != "worker":
        return None, "nothing"
    if sub_type in DISAGGREGATED:
        return DISAGGREGATED[sub_type], "sub-type"
    if sub_type == "encode" or is_encoder_command(words):
        return None, "encoder"
    from_arguments = _from_words(words)
    if from_arguments is not None:
        return from_arguments, "arguments"
    lower = name.lower()
    if ("prefill" in lower) != ("decode" in lower):
        return (Role.PREFILL if "prefill" in lower else Role.DECODE), "name"
    return None, "nothing"


def is_encoder_command(words: Sequence[str]) -> bool:
    """Whether a command line starts a worker that encodes images for other workers."""
    mode = option(words, "--disaggregation-mode")
    return mode == "encode" or any(word.endswith("encode-worker") for word in words)


def option(words: Sequence[str], name: str) -> str | None:
    """The value of ``--name VALUE`` or ``--name=VALUE``; the last one is used."""
    value = None
    for place, word in enumerate(words):
        bare = word.strip("\"'\\;&")
        if bare == name and place + 1 < len(words):
            value = words[place + 1].strip("\"'\\;&")
        elif bare.startswith(name + "="):
            value = bare[len(name) + 1 :].strip("\"'")
    return value


def _from_words(words: Sequence[str]) -> Role | None:
    bare = {word.strip("\"'\\;&") for word in words}
    if "--is-prefill-worker" in bare:
        return Role.PREFILL
    if "--is-decode-worker" in bare:
        return Role.DECODE
    return _MODES.get((option(words, "--disaggregation-mode") or "").lower())


# -- graphs and topologies -------------------------------------------------------------------------


GRAPH: Final = "DynamoGraphDeployment"
GRAPH_GROUP: Final = "nvidia.com"
GRAPHS: Final = "dynamographdeployments"
GRAPHS_RESOURCE: Final = f"{GRAPHS}.{GRAPH_GROUP}"
GRAPH_VERSIONS: Final = ("v1alpha1", "v1beta1")
TOPOLOGY_KINDS: Final = ("ClusterTopology", "ClusterTopologyBinding")
WORKER_TYPES: Final = frozenset({"worker", "prefill", "decode"})
POLICY_PATH: Final = "spec.experimental.kvTransferPolicy"


@dataclass(frozen=True, slots=True)
class Component:
    """A component. ``path``: its place in the manifest. ``replicas``: not the number of pods.

    ``env``: name -> value, None for a value from a secret or field; ``env_hidden``: further
    variables come from a secret. ``words``: the command line of the engine container, split at
    blanks.
    """

    name: str
    path: str
    type: str
    role: Role | None
    role_source: RoleSource
    replicas: int
    env: Mapping[str, str | None]
    env_hidden: bool
    words: tuple[str, ...]
    pod: Mapping[str, Any]
    container: Mapping[str, Any]
    pod_labels: Mapping[str, Any]
    body: Mapping[str, Any]

    @property
    def pods(self) -> int:
        """The number of its pods: each replica has one on each of its nodes."""
        nodes = count(mapping(self.body.get("multinode")).get("nodeCount"))
        return self.replicas * max(1, nodes)

    @property
    def is_worker(self) -> bool:
        """Whether the operator writes the policy into its pods."""
        return self.type in WORKER_TYPES

    def domains(self, label_key: str) -> frozenset[str] | None:
        """The values of a node label that its pods allow; None if it is not pinned."""
        return allowed_values(self.pod, label_key)


@dataclass(frozen=True, slots=True)
class Graph:
    manifest: Manifest
    version: str
    components: tuple[Component, ...]
    policy: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """``namespace/name``, or the name alone."""
        namespace = self.manifest.namespace
        return f"{namespace}/{self.manifest.name}" if namespace else self.manifest.name

    @property
    def workers(self) -> tuple[Component, ...]:
        return tuple(component for component in self.components if component.is_worker)

    @property
    def worker_pods(self) -> int:
        """The number of worker pods in its spec."""
        return sum(component.pods for component in self.workers)

    @property
    def inference_workers(self) -> tuple[Component, ...]:
        """The workers without encoders."""
        return tuple(worker for worker in self.workers if worker.role_source != "encoder")

    def of_role(self, role: Role) -> tuple[Component, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a Grove topology. ``key``: its node label, or empty."""

    domain: str
    key: str


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    manifest: Manifest
    levels: tuple[Level, ...]

    @property
    def name(self) -> str:
        return self.manifest.name

    def key_of(self, domain: str) -> str | None:
        return next((level.key for level in self.levels if level.domain == domain), None)


def graphs_of(manifests: Iterable[Manifest]) -> tuple[Graph, ...]:
    """The graphs among the manifests."""
    return tuple(
        _graph(manifest)
        for manifest in manifests
        if manifest.kind == GRAPH and manifest.group == GRAPH_GROUP
    )


def topologies_of(manifests: Iterable[Manifest]) -> tuple[ClusterTopology, ...]:
    """The Grove topologies among the manifests, with the old and the new kind."""
    return tuple(
        ClusterTopology(manifest, tuple(_levels(manifest)))
        for manifest in manifests
        if manifest.kind in TOPOLOGY_KINDS and manifest.group == "grove.io"
    )


def policy_label_key(graph: Graph, topologies: Iterable[ClusterTopology]) -> str | None:
    """The node label of the policy's domain; None if it is unknown."""
    policy = graph.policy or {}
    if text(policy.get("labelKey")):
        return text(policy.get("labelKey"))
    wanted = text(policy.get("clusterTopologyName"))
    for topology in topologies:
        if topology.name == wanted:
            return topology.key_of(text(policy.get("domain"))) or None
    return None


def _levels(manifest: Manifest) -> Iterable[Level]:
    for entry in sequence(mapping(manifest.body.get("spec")).get("levels")):
        level = mapping(entry)
        yield Level(
            text(level.get("domain")), text(level.get("key")) or text(level.get("labelKey"))
        )


def _graph(manifest: Manifest) -> Graph:
    spec = mapping(manifest.body.get("spec"))
    shared = [*sequence(spec.get("envs")), *sequence(spec.get("env"))]
    components = [
        *(
            _component(name, f"spec.services.{name}", mapping(body), shared, alpha=True)
            for name, body in mapping(spec.get("services")).items()
        ),
        *(
            _component(
                text(mapping(body).get("name")) or f"(component {place})",
                f"spec.components[{place}]",
                mapping(body),
                shared,
                alpha=False,
            )
            for place, body in enumerate(sequence(spec.get("components")))
        ),
    ]
    policy = mapping(spec.get("experimental")).get("kvTransferPolicy")
    return Graph(
        manifest,
        manifest.version,
        tuple(components),
        policy if isinstance(policy, Mapping) else None,
    )


def _component(
    name: str, path: str, body: Mapping[str, Any], shared: list[Any], *, alpha: bool
) -> Component:
    if alpha:
        pod = mapping(body.get("extraPodSpec"))
        container = mapping(pod.get("mainContainer"))
        env = [*shared, *sequence(body.get("envs")), *sequence(container.get("env"))]
        kind, sub = text(body.get("componentType")), text(body.get("subComponentType"))
        labels = {
            **mapping(body.get("labels")),
            **mapping(mapping(body.get("extraPodMetadata")).get("labels")),
        }
        hidden = bool(text(body.get("envFromSecret")) or container.get("envFrom"))
    else:
        template = mapping(body.get("podTemplate"))
        pod = mapping(template.get("spec"))
        containers = [mapping(container) for container in sequence(pod.get("containers"))]
        container = next(
            (container for container in containers if container.get("name") == "main"), {}
        )
        env = [*shared, *sequence(container.get("env"))]
        kind, sub = text(body.get("type")), text(body.get("subComponentType"))
        labels = dict(mapping(mapping(template.get("metadata")).get("labels")))
        hidden = bool(container.get("envFrom"))
    words = command_words(container)
    role, source = role_of(name, kind.lower(), sub.lower(), words)
    return Component(
        name=name,
        path=path,
        type=kind.lower(),
        role=role,
        role_source=source,
        replicas=_replicas(body.get("replicas")),
        env=_env(env),
        env_hidden=hidden,
        words=words,
        pod=pod,
        container=container,
        pod_labels=labels,
        body=body,
    )


def _replicas(value: Any) -> int:
    """The number of replicas; Kubernetes' default is 1."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 1


def _env(entries: list[Any]) -> dict[str, str | None]:
    """Name -> value; later entries override earlier ones, as in a container."""
    values: dict[str, str | None] = {}
    for entry in entries:
        variable = mapping(entry)
        name = text(variable.get("name"))
        if name:
            values[name] = None if "valueFrom" in variable else text(variable.get("value"))
    return values
