"""The facts that lint judges: graphs and Grove topologies, of files or of a cluster. Pure.

The same checks judge both; a few words differ. A component that refuses a file would also refuse
the graph of a cluster, which was created with an older definition or without the webhook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynctl.base.errors import UsageProblem
from dynctl.base.json_fields import mapping, text
from dynctl.findings.runner import Skipped
from dynctl.manifests.draft_shapes import translated_graphs
from dynctl.manifests.files import Manifest
from dynctl.manifests.graphs import (
    GRAPH,
    GRAPH_GROUP,
    TOPOLOGY_KINDS,
    ClusterTopology,
    Graph,
    graphs_of,
    policy_label_key,
    topologies_of,
)
from dynctl.manifests.transfer_policy import is_domain


@dataclass(frozen=True, slots=True)
class LintFacts:
    """Graphs and topologies. ``live``: they are in a cluster, not in files."""

    graphs: tuple[Graph, ...]
    topologies: tuple[ClusterTopology, ...]
    live: bool = False

    @property
    def refuses(self) -> str:
        """The verb for a component that refuses the graph."""
        return "would refuse" if self.live else "refuses"

    @property
    def place(self) -> str:
        """The place of the graphs and topologies."""
        return "in the cluster" if self.live else "in these files"

    def remedy(self, fix: str) -> str:
        """The fix of a policy; a live policy cannot be edited."""
        again = "; a live policy cannot be edited: delete the graph, then apply it again"
        return fix + again if self.live else fix

    @property
    def governed(self) -> tuple[Graph, ...]:
        """The graphs with a readable policy."""
        return tuple(graph for graph in self.graphs if graph.policy)

    def required(self, graph: Graph) -> bool:
        """Whether the policy is required, which is the default."""
        return (graph.policy or {}).get("enforcement") in (None, "required")

    def preferred(self, graph: Graph) -> bool:
        """Whether the policy is preferred."""
        return (graph.policy or {}).get("enforcement") == "preferred"

    def label_key(self, graph: Graph) -> str | None:
        return policy_label_key(graph, self.topologies)

    def domain(self, graph: Graph) -> str | None:
        """The transfer domain; None if it is invalid."""
        domain = text((graph.policy or {}).get("domain"))
        return domain if is_domain(domain) else None


def gather(manifests: Sequence[Manifest]) -> LintFacts:
    """The facts of manifests. Raises UsageProblem if none is a graph or a Grove topology."""
    facts = LintFacts(translated_graphs(graphs_of(manifests)), topologies_of(manifests))
    if not facts.graphs and not facts.topologies:
        kinds = sorted(
            {
                f"{manifest.kind} ({manifest.body.get('apiVersion', 'no apiVersion')})"
                for manifest in manifests
            }
        )
        raise UsageProblem(
            f"nothing to check: expected a {GRAPH} of {GRAPH_GROUP} or a "
            f"{' or '.join(TOPOLOGY_KINDS)} of grove.io, found {', '.join(kinds[:5]) or 'nothing'}",
            "the operator creates DynamoComponentDeployments; check the graph instead"
            if any(manifest.kind == "DynamoComponentDeployment" for manifest in manifests)
            else "use the files of your graph: -f FILE",
        )
    return facts


def sources(facts: LintFacts) -> list[str]:
    """The sources, one line for each object."""
    graphs_and_topologies: Iterable[Graph | ClusterTopology] = (*facts.graphs, *facts.topologies)
    return [
        f"{subject_of(item)} ({item.manifest.version}) in {item.manifest.source}"
        for item in graphs_and_topologies
    ]


def subject_of(item: Graph | ClusterTopology) -> str:
    """Its name in findings: ``Kind name.namespace``, as istioctl writes it."""
    return f"{item.manifest.kind} {short_name(item)}"


def short_name(item: Graph | ClusterTopology) -> str:
    """``name.namespace``. Topologies are cluster-wide: their namespace is ignored."""
    namespace = item.manifest.namespace if isinstance(item, Graph) else ""
    return f"{item.manifest.name}.{namespace}" if namespace else item.manifest.name


def has_graphs(facts: LintFacts) -> Skipped | None:
    return None if facts.graphs else Skipped(f"no {GRAPH} {facts.place}")


def has_policy(facts: LintFacts) -> Skipped | None:
    if facts.governed:
        return None
    return has_graphs(facts) or Skipped("no graph has a kvTransferPolicy")


def has_topologies(facts: LintFacts) -> Skipped | None:
    if facts.topologies:
        return None
    return Skipped(
        "no graph has an existing Grove topology"
        if facts.live
        else "no Grove topology in these files"
    )


def spec_of(item: Graph | ClusterTopology) -> dict[str, object]:
    """The spec of the manifest."""
    return dict(mapping(item.manifest.body.get("spec")))
