"""Checks of the graph around the policy (DYT01) and of its pod templates (DYT0406, DYT0506)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dynctl.base.json_fields import mapping, sequence, text
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.manifests.graphs import GRAPH, GRAPH_GROUP, GRAPH_VERSIONS, Component, Graph, option
from dynctl.manifests.lint.facts import (
    LintFacts,
    has_graphs,
    has_policy,
    short_name,
    spec_of,
    subject_of,
)
from dynctl.manifests.transfer_policy import wrong_type

_MOST_COMPONENTS: Final = 25
_LARGEST_INT32: Final = 2**31 - 1
_SPLIT: Final = frozenset({"prefill", "decode"})
_TYPES: Final = ("frontend", "worker", "prefill", "decode", "planner", "epp")
_OPERATOR_ENV: Final = (
    "DYN_KV_TRANSFER_DOMAIN",
    "DYN_KV_TRANSFER_ENFORCEMENT",
    "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
    "DYN_TOPOLOGY_ENABLED",
    "DYN_TOPOLOGY_MOUNT_PATH",
)
_MOUNT: Final = "/etc/dynamo/topology"
_VOLUME: Final = "topology-labels"
_GROVE_LABEL: Final = "nvidia.com/dynamo-topology."


# -- the format of the graph -----------------------------------------------------------------------


def _format(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.graphs:
            for message, fix in _format_problems(graph):
                yield found(subject_of(graph), refuses=facts.refuses, message=message, fix=fix)

    return outcome(all_of())


def _format_problems(graph: Graph) -> Iterator[tuple[str, str]]:
    version = graph.version
    metadata = mapping(graph.manifest.body.get("metadata"))
    if not (text(metadata.get("name")) or text(metadata.get("generateName"))):
        yield (
            "metadata.name: Required value: name or generateName is required",
            "name the graph in metadata.name",
        )
    if version not in GRAPH_VERSIONS:
        yield (
            f'no matches for kind "{GRAPH}" in version "{GRAPH_GROUP}/{version}"',
            f"write apiVersion: {GRAPH_GROUP}/v1beta1",
        )
        return
    yield from _place_problems(graph)
    for component in graph.components:
        yield from _replica_problems(component)
    if version == "v1beta1":
        yield from _beta_components(graph)


def _place_problems(graph: Graph) -> Iterator[tuple[str, str]]:
    """Components at the place of the other version, of a wrong type, or too many."""
    version, spec = graph.version, spec_of(graph)
    beta = version == "v1beta1"
    own, other = ("components", "services") if beta else ("services", "components")
    if other in spec:
        yield (
            f'strict decoding error: unknown field "spec.{other}"',
            f"{version} has spec.{own}: move them, or change the apiVersion",
        )
    held = spec.get(own)
    if held is not None and not isinstance(held, list if beta else Mapping):
        wanted, fix = ("array", "write a list") if beta else ("object", "write keys and values")
        yield wrong_type(f"spec.{own}", wanted, held), fix
    elif held is not None and len(graph.components) > _MOST_COMPONENTS:
        yield (
            f"spec.{own}: Too many: {len(graph.components)}: must have at most "
            f"{_MOST_COMPONENTS} items",
            "split the graph",
        )


def _replica_problems(component: Component) -> Iterator[tuple[str, str]]:
    value, path = component.body.get("replicas"), f"{component.path}.replicas"
    fix = "write a whole number, without quotes"
    if value is None:  # the API server writes its default
        return
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        yield wrong_type(path, "integer", value), fix
    elif value < 0:
        yield f"{path}: Invalid value: {value}: should be greater than or equal to 0", fix
    elif value > _LARGEST_INT32:
        yield f"{path}: Invalid value: {value}: must be of type int32", fix


def _beta_components(graph: Graph) -> Iterator[tuple[str, str]]:
    for component in graph.components:
        if "name" not in component.body:
            yield f"{component.path}.name: Required value", "name the component"
        kind = component.body.get("type")
        if kind is not None and kind not in _TYPES:
            known = ", ".join(f'"{name}"' for name in _TYPES)
            yield (
                f'{component.path}.type: Unsupported value: "{kind}": supported values: {known}',
                "write one of them",
            )
    names = Counter(component.name.lower() for component in graph.components)
    for name, count in names.items():
        if count > 1:
            yield (
                f'spec.components: {count} have the name "{name}" (ignoring case)',
                "give every component its own name",
            )
    if sum(component.type == "epp" for component in graph.components) > 1:
        yield "spec.components: more than one component of type epp", "keep one"


def _engine_container(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.graphs:
            for worker in graph.workers if graph.version == "v1beta1" else ():
                names = [
                    text(mapping(c).get("name")) for c in sequence(worker.pod.get("containers"))
                ]
                if names and "main" not in names:
                    yield found(subject_of(graph), component=worker.name, names=", ".join(names))

    return outcome(all_of())


# -- prefill, decode and the router ----------------------------------------------------------------


def _both_roles(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in judged:
            roles = {worker.role for worker in graph.workers} & _SPLIT
            if len(roles) == 1:
                there = roles.pop()
                lacks = "decode" if there == "prefill" else "prefill"
                yield found(subject_of(graph), there=there, lacks=lacks)

    judged = [graph for graph in facts.governed if _is_split(graph)]
    without = [graph for graph in facts.governed if not _is_split(graph)]
    nothing = "" if judged else _not_split(without)
    return outcome(
        all_of(), summary=_counts(judged, named=len(facts.governed) > 1), nothing=nothing
    )


def _no_workers(facts: LintFacts) -> str:
    """That no graph with a policy has workers; empty where one has."""
    there = any(graph.workers for graph in facts.governed)
    return "" if there else "no graph with a policy has workers"


def _is_split(graph: Graph) -> bool:
    """Whether a graph has prefill or decode workers, and the role of each worker is known."""
    roles = {worker.role for worker in graph.inference_workers}
    return None not in roles and bool(roles & _SPLIT)


def _not_split(graphs: Sequence[Graph]) -> str:
    """Why no graph has prefill and decode workers to compare."""
    if not any(graph.workers for graph in graphs):
        return "no graph with a policy has workers"
    if any(worker.role in _SPLIT for graph in graphs for worker in graph.workers):
        return "the role of a worker is not specified (DYT0111)"
    return "no graph with a policy has prefill or decode workers (DYT0115)"


def _counts(graphs: Sequence[Graph], *, named: bool) -> str:
    counts = []
    for graph in graphs:
        prefill, decode = _replicas(graph, "prefill"), _replicas(graph, "decode")
        name = f"{short_name(graph)}: " if named else ""
        counts.append(f"{name}{prefill} prefill, {decode} decode")
    return "; ".join(counts[:3]) + (f"; and {len(counts) - 3} more" if counts[3:] else "")


def _replicas(graph: Graph, role: str) -> int:
    return sum(worker.replicas for worker in graph.workers if worker.role == role)


def _without_roles(facts: LintFacts) -> Outcome:
    return outcome(
        found(
            subject_of(graph), workers=", ".join(worker.name for worker in graph.workers) or "none"
        )
        for graph in facts.governed
        if not {worker.role for worker in graph.workers} & {"prefill", "decode"}
    )


def _roles_specified(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.governed:
            known = {worker.role for worker in graph.workers} & {"prefill", "decode"}
            for worker in graph.inference_workers:
                how = ""
                if worker.role_source == "name":
                    how = f"the role {worker.role} is only in its name"
                elif worker.role is None and known:
                    how = "its role, prefill or decode, is not specified"
                if how:
                    yield found(subject_of(graph), component=worker.name, how=how)

    return outcome(all_of(), nothing=_no_workers(facts))


def _router_mode(facts: LintFacts) -> Outcome:
    wrong: list[Found] = []
    unknown: list[str] = []
    modes: list[str] = []
    for graph in facts.governed:
        for component in graph.components:
            if component.type != "frontend":
                continue
            mode = _mode(component)
            name = f"{short_name(graph)}: {component.name}"
            if mode is None:
                unknown.append(f"{name}: its router mode is in a secret or a field")
            elif mode.lower() != "kv":
                mode = mode or "round-robin, the default"
                wrong.append(found(subject_of(graph), component=component.name, mode=mode))
            else:
                modes.append(name)
    if not (wrong or unknown or modes):
        return Skipped("no frontend component: another graph or a gateway routes")
    return outcome(wrong, unknown, summary=", ".join(modes))


def _mode(frontend: Component) -> str | None:
    """The router mode of a frontend; empty if not set, None if unknown."""
    mode = option(frontend.words, "--router-mode")
    if mode is not None:
        return mode
    if "DYN_ROUTER_MODE" in frontend.env:
        return frontend.env["DYN_ROUTER_MODE"]
    return None if frontend.env_hidden else ""


# -- pod templates ---------------------------------------------------------------------------------


def _no_topology_label(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.governed:
            policy = graph.policy or {}
            key = text(policy.get("labelKey")) or _GROVE_LABEL + text(policy.get("domain"))
            for worker in graph.workers:
                if key in worker.pod_labels:
                    value = worker.pod_labels[key]
                    yield found(subject_of(graph), key=key, label=f"{value} in {worker.name}")

    return outcome(all_of(), nothing=_no_workers(facts))


def _no_operator_settings(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.governed:
            for worker in graph.workers:
                taken = ", ".join(_operator_settings(worker))
                if taken:
                    yield found(subject_of(graph), taken=f"{taken} in {worker.name}")

    return outcome(all_of(), nothing=_no_workers(facts))


def _operator_settings(component: Component) -> Iterator[str]:
    yield from (name for name in _OPERATOR_ENV if name in component.env)
    for volume in _mappings(component.pod.get("volumes")):
        if volume.get("name") == _VOLUME:
            yield f"the volume {_VOLUME}"
    for mount in _mappings(component.container.get("volumeMounts")):
        if text(mount.get("mountPath")).rstrip("/") == _MOUNT:
            yield f"the mount {_MOUNT}"


def _mappings(entries: Any) -> list[Mapping[str, Any]]:
    return [mapping(entry) for entry in sequence(entries)]


GRAPH_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0118", _format, (has_graphs,)),
    Check("DYT0119", _engine_container, (has_graphs,)),
    Check("DYT0109", _both_roles, (has_policy,)),
    Check("DYT0115", _without_roles, (has_policy,)),
    Check("DYT0111", _roles_specified, (has_policy,)),
    Check("DYT0110", _router_mode, (has_policy,)),
)
POD_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0406", _no_topology_label, (has_policy,)),
    Check("DYT0506", _no_operator_settings, (has_policy,)),
)
