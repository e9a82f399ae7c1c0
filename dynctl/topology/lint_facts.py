"""What lint judges: the graphs and topologies of some files, and nothing of any cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynctl.errors import UsageProblem
from dynctl.findings.running import Skipped
from dynctl.topology.graphs import (
    GRAPH,
    GRAPH_GROUP,
    TOPOLOGY_KINDS,
    ClusterTopology,
    Graph,
    graphs_of,
    policy_label_key,
    topologies_of,
)
from dynctl.topology.manifests import Manifest
from dynctl.topology.transfer_policy import is_domain
from dynctl.wire.kubernetes.fields import mapping, text


@dataclass(frozen=True, slots=True)
class LintFacts:
    graphs: tuple[Graph, ...]
    topologies: tuple[ClusterTopology, ...]

    @property
    def governed(self) -> tuple[Graph, ...]:
        """The graphs that have a policy which can be read."""
        return tuple(graph for graph in self.graphs if graph.policy)

    def required(self, graph: Graph) -> bool:
        """Whether decode must stay in the domain; required is the default."""
        return (graph.policy or {}).get("enforcement") in (None, "required")

    def preferred(self, graph: Graph) -> bool:
        """Whether decode only should stay in the domain."""
        return (graph.policy or {}).get("enforcement") == "preferred"

    def label_key(self, graph: Graph) -> str | None:
        return policy_label_key(graph, self.topologies)

    def domain(self, graph: Graph) -> str | None:
        """The transfer domain, where it is one."""
        domain = text((graph.policy or {}).get("domain"))
        return domain if is_domain(domain) else None


def gather(manifests: Sequence[Manifest]) -> LintFacts:
    """The facts of some manifests. Raises UsageProblem where none of them can be judged."""
    facts = LintFacts(graphs_of(manifests), topologies_of(manifests))
    if not facts.graphs and not facts.topologies:
        kinds = sorted({f"{one.kind} ({one.body.get('apiVersion')})" for one in manifests})
        raise UsageProblem(
            f"nothing to check: expected a {GRAPH} of {GRAPH_GROUP} or a "
            f"{' or '.join(TOPOLOGY_KINDS)} of grove.io, found {', '.join(kinds[:5]) or 'nothing'}",
            "a DynamoComponentDeployment is made by the operator; check the graph it comes from",
        )
    return facts


def sources(facts: LintFacts) -> list[str]:
    """What was read, a line each."""
    found: Iterable[Graph | ClusterTopology] = (*facts.graphs, *facts.topologies)
    return [
        f"{one.manifest.kind} {one.name} ({one.manifest.version}) in {one.manifest.source}"
        for one in found
    ]


def has_graphs(facts: LintFacts) -> Skipped | None:
    return None if facts.graphs else Skipped(f"no {GRAPH} in these files")


def has_policy(facts: LintFacts) -> Skipped | None:
    if facts.governed:
        return None
    return has_graphs(facts) or Skipped("no graph here has a kvTransferPolicy")


def has_topologies(facts: LintFacts) -> Skipped | None:
    return None if facts.topologies else Skipped("no Grove topology in these files")


def spec_of(one: Graph | ClusterTopology) -> dict[str, object]:
    """The spec as it was written."""
    return dict(mapping(one.manifest.body.get("spec")))
