"""Checks of live graphs and their policies: DYT01. Those of lint, and those that need a cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dynctl.base.json_fields import count, mapping, sequence, text
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.manifests.draft_shapes import Draft, draft_levels, drafts_of
from dynctl.manifests.graphs import GRAPH, POLICY_PATH, Graph
from dynctl.manifests.lint import graph as lint_graph
from dynctl.manifests.lint import policy as lint_policy
from dynctl.manifests.lint.facts import short_name, subject_of
from dynctl.manifests.transfer_policy import DRAFT_FIELDS, FIELDS
from dynctl.verify.join import JoinedFacts, VerifiedGraph
from dynctl.verify.live_graphs import applied_pairs, judged_live, last_applied, lint_facts
from dynctl.verify.needs import cluster_of, graphs_read
from dynctl.verify.wording import excerpt, some
from dynctl.wire.kubernetes.names import (
    DRAFT_LABEL_PREFIX,
    DRAFT_MOUNT_PATH,
    GRAPH_LABEL,
    MOUNT_PATH,
    ZONE_LABEL,
)
from dynctl.wire.kubernetes.objects import Pod

_STATES: Final = ("", "successful")
#: Condition of a graph: whether the scheduler has the levels of its packDomain.
_LEVELS_CONDITION: Final = "TopologyLevelsAvailable"

_LINT: Final = judged_live((*lint_policy.POLICY_CHECKS, *lint_graph.GRAPH_CHECKS), graphs_read)


# -- the graph -------------------------------------------------------------------------------------


def _graph_exists(joined: JoinedFacts) -> Outcome:
    cluster = cluster_of(joined)
    wrong = []
    names = {graph.name.rpartition("/")[2] for graph in joined.graphs}
    where = some(cluster.namespaces) or "any namespace"
    for name in sorted(set(cluster.wanted) - names):
        look = f"kubectl get dynamographdeployments{_in(cluster.namespaces)}"
        wrong.append(found(f"{GRAPH} {name}", what=f"does not exist in {where}", fix=look))
    for graph in joined.graphs:
        if graph.graph is None:
            namespace, _, name = graph.name.rpartition("/")
            delete = f"kubectl delete pods -n {namespace} -l {GRAPH_LABEL}={name}"
            what = f"does not exist, but has {len(graph.pods):,} pods"
            fix = f"apply the graph again, or delete its pods: {delete}"
            wrong.append(found(graph.subject, what=what, fix=fix))
    existing = [short_name(graph.graph) for graph in joined.graphs if graph.graph is not None]
    return outcome(wrong, summary=some(existing))


def _in(namespaces: tuple[str, ...]) -> str:
    return f" -n {namespaces[0]}" if len(namespaces) == 1 else " -A"


def _is_deployed(joined: JoinedFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in joined.graphs:
            if graph.graph is not None:
                for what in _state_problems(graph.graph):
                    yield found(
                        graph.subject, what=what, describe=_kubectl("describe", graph.graph)
                    )

    states = [
        text(mapping(graph.graph.manifest.body.get("status")).get("state"))
        for graph in joined.graphs
        if graph.graph is not None
    ]
    return outcome(all_of(), summary=some(sorted(set(states) - {""})))


def _state_problems(graph: Graph) -> Iterator[str]:
    body = graph.manifest.body
    status = mapping(body.get("status"))
    if graph.manifest.deleting:
        yield "is being deleted, and its pods with it"
        return
    if not status:
        yield "has no status: no operator has processed it"
        return
    wanted = count(mapping(body.get("metadata")).get("generation"))
    seen = status.get("observedGeneration")
    if isinstance(seen, int) and seen < wanted:
        yield f"generation {wanted} is not processed yet, only {seen}"
    conditions = {
        text(mapping(condition).get("type")): mapping(condition)
        for condition in _conditions(status)
    }
    ready, state = conditions.get("Ready", {}), text(status.get("state"))
    if state not in _STATES:
        yield f"state {state}{_why(ready)}"
    elif not state and ready.get("status") == "False":
        yield f"is not Ready{_why(ready)}"
    levels = conditions.get(_LEVELS_CONDITION, {})
    if levels.get("status") == "False":
        yield f"{_LEVELS_CONDITION} is False{_why(levels)}"


def _conditions(status: Mapping[str, Any]) -> Any:
    return sequence(status.get("conditions"))


def _why(condition: Mapping[str, Any]) -> str:
    reason = ", ".join(
        filter(None, (text(condition.get("reason")), text(condition.get("message"))))
    )
    return f": {excerpt(reason)}" if reason else ""


def _kubectl(verb: str, graph: Graph) -> str:
    return (
        f"kubectl {verb} dynamographdeployment {graph.manifest.name} -n {graph.manifest.namespace}"
    )


# -- the policy ------------------------------------------------------------------------------------


def _has_policy(joined: JoinedFacts) -> Outcome:
    """Without graphs whose missing policy DYT0103 or DYT0120 explains."""
    facts = lint_facts(joined)
    explained = {
        graph.name
        for graph, applied in applied_pairs(joined)
        if lint_policy.raw_policy(applied) is not None or any(drafts_of(applied))
    }
    left = tuple(graph for graph in facts.graphs if graph.policy or graph.name not in explained)
    if facts.graphs and not left:
        return Skipped("the applied policies are missing (DYT0103, DYT0120)")
    return lint_policy.policy_exists(
        replace(facts, graphs=left), partial(_zones_of_workers, joined)
    )


def _zones_of_workers(joined: JoinedFacts, graph: Graph) -> str:
    """The zones of the workers of a graph without a policy, by their nodes.

    Empty if the nodes have no zone label or could not be read.
    """
    [verified] = [
        candidate for candidate in joined.graphs if candidate.graph and candidate.name == graph.name
    ]
    zones: dict[str, Counter[str]] = defaultdict(Counter)
    for worker in verified.workers:
        zone = None if worker.node is None else worker.node.labels.get(ZONE_LABEL)
        if zone:
            zones[zone][worker.role or "unknown"] += 1
    if len(zones) == 1:
        return f"all its workers run in {next(iter(zones))}, so no KV cache crosses zones now"
    counts = (
        f"{zone} ({', '.join(f'{many:,} {role}' for role, many in sorted(roles.items()))})"
        for zone, roles in sorted(zones.items())
    )
    return f"its workers run in {some(counts)}: KV cache can cross zones" if zones else ""


def _applied_policy_exists(joined: JoinedFacts) -> Outcome:
    """Policies that kubectl applied and the API server removed as an unknown field."""

    def is_dropped(graph: Graph, applied: Graph) -> bool:
        return lint_policy.raw_policy(graph) is None and bool(applied.policy)

    wrong = [
        found(
            subject_of(graph),
            path=POLICY_PATH,
            domain=text((applied.policy or {}).get("domain")) or "(none)",
            delete=_kubectl("delete", graph),
        )
        for graph, applied in applied_pairs(joined)
        if is_dropped(graph, applied)
    ]
    applied = [applied for _, applied in applied_pairs(joined) if applied.policy]
    if not applied:
        return Skipped("kubectl applied no graph with a policy")
    return outcome(wrong)


def _known_fields(joined: JoinedFacts) -> Outcome:
    """The findings of lint, and fields that kubectl applied and the API server removed."""
    facts = lint_facts(joined)
    wrong = list(lint_policy.objections_to(facts, "field"))
    wrong += [
        found(
            subject_of(graph),
            validator="the API server",
            refuses="removed a part of",
            message=f'unknown field "{POLICY_PATH}.{name}", last applied',
            fix=facts.remedy(f"remove it; a policy has {', '.join(FIELDS)}"),
        )
        for graph, applied in applied_pairs(joined)
        for name in _removed_fields(graph, applied)
    ]
    if not wrong and all(lint_policy.raw_policy(graph) is None for graph in facts.graphs):
        return Skipped("no graph has a kvTransferPolicy")
    return outcome(wrong)


def _removed_fields(graph: Graph, applied: Graph) -> list[str]:
    """The unknown fields of an applied policy that a graph with a policy does not have."""
    if not graph.policy:
        return []
    known = {*graph.policy, *FIELDS, *DRAFT_FIELDS}
    return [name for name in applied.policy or {} if name not in known]


# -- draft formats ------------------------------------------------------------------------------


def _no_drafts(joined: JoinedFacts) -> Outcome:
    facts = lint_facts(joined)

    def all_of() -> Iterator[Found]:
        for verified in joined.graphs:
            seen: set[str] = set()
            for draft in _drafts_of(verified.graph):
                seen.add(draft.what)
                yield lint_policy.drafted(facts, verified.subject, draft)
            for pod, draft in _drafts_in_pods(verified):
                if draft.what not in seen:
                    yield lint_policy.drafted(facts, f"Pod {pod.name}.{pod.namespace}", draft)
        for topology in facts.topologies:
            for draft in draft_levels(topology):
                yield lint_policy.drafted(facts, subject_of(topology), draft)

    return outcome(all_of())


def _drafts_of(graph: Graph | None) -> Iterator[Draft]:
    """Draft formats of a graph, and of its last applied form: the API server removes the fields."""
    if graph is None:
        return
    there = list(drafts_of(graph))
    yield from there
    applied = last_applied(graph)
    for draft in () if applied is None else drafts_of(applied):
        if draft.what not in {other.what for other in there}:
            yield replace(draft, where=f"last applied {draft.where}")


def _drafts_in_pods(verified: VerifiedGraph) -> Iterator[tuple[Pod, Draft]]:
    """Draft formats of pods, each with the first pod that has it."""
    pods_by_format: dict[tuple[str, str, str], list[Pod]] = defaultdict(list)
    for pod in sorted(verified.pods, key=lambda pod: pod.name):
        for item in _draft_formats(pod):
            pods_by_format[item].append(pod)
    for (where, what, shipped), pods in pods_by_format.items():
        more = f", in this and {len(pods) - 1:,} more pods" if pods[1:] else ""
        yield pods[0], Draft(where + more, what, shipped)


def _draft_formats(pod: Pod) -> set[tuple[str, str, str]]:
    formats = {
        (
            "metadata.labels",
            f"the label {key}",
            "remove the component that writes it; the operator copies the label of the policy",
        )
        for key in pod.labels
        if key.startswith(DRAFT_LABEL_PREFIX)
    }
    mounts = [mount.path for container in pod.containers for mount in container.mounts]
    if any(path.startswith(DRAFT_MOUNT_PATH) for path in mounts):
        shipped = f"remove it; the operator mounts {MOUNT_PATH}"
        formats.add(("spec.containers", f"the mount {DRAFT_MOUNT_PATH}", shipped))
    items = [item for volume in pod.volumes for item in volume.items]
    if any(DRAFT_LABEL_PREFIX in item.field for item in items):
        shipped = "remove it; no component writes that label, the operator projects its own"
        formats.add(("spec.volumes", f"the label {DRAFT_LABEL_PREFIX}* in a volume", shipped))
    return formats


def graphs_exist(joined: JoinedFacts) -> Skipped | None:
    """At least one graph exists; other graphs only have leftover pods."""
    exists = any(graph.graph is not None for graph in joined.graphs)
    return None if exists else Skipped(f"no {GRAPH}")


_GRAPHS_EXIST: Final = (graphs_read, graphs_exist)
_OWN: Final = (
    Check("DYT0101", _graph_exists, (graphs_read,)),
    Check("DYT0102", _has_policy, _GRAPHS_EXIST),
    Check("DYT0103", _no_drafts, (graphs_read,)),
    Check("DYT0113", _is_deployed, _GRAPHS_EXIST),
    Check("DYT0114", _known_fields, _GRAPHS_EXIST),
    Check("DYT0120", _applied_policy_exists, _GRAPHS_EXIST),
)
LIVE_GRAPH_CHECKS: Final[tuple[Check[JoinedFacts], ...]] = tuple(
    check for _, check in sorted({**_LINT, **{own.code: own for own in _OWN}}.items())
)
