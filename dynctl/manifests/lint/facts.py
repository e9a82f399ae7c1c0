"""What lint judges: graphs and topologies, of files or as a cluster holds them.

The same checks judge both. What differs are a few words: whoever refuses a file would refuse the
graph of a cluster, which was let in when its definition was older or the webhook off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynctl.base.errors import UsageProblem
from dynctl.base.json_fields import mapping, text
from dynctl.findings.runner import Skipped
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
    """``live``: a cluster holds them already; otherwise they are files, yet to be applied."""

    graphs: tuple[Graph, ...]
    topologies: tuple[ClusterTopology, ...]
    live: bool = False

    @property
    def refuses(self) -> str:
        """What they do who have something against a graph."""
        return "would refuse" if self.live else "refuses"

    @property
    def place(self) -> str:
        """Where these graphs and topologies are."""
        return "here" if self.live else "in these files"

    def remedy(self, fix: str) -> str:
        """How to change a policy, which cannot be edited where it is live."""
        again = "; a live policy cannot be edited: delete the graph, then apply it again"
        return fix + again if self.live else fix

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
            "a DynamoComponentDeployment is made by the operator; check the graph it comes from"
            if any(one.kind == "DynamoComponentDeployment" for one in manifests)
            else "name the files of your graph: -f FILE",
        )
    return facts


def sources(facts: LintFacts) -> list[str]:
    """What was read, a line each."""
    found: Iterable[Graph | ClusterTopology] = (*facts.graphs, *facts.topologies)
    return [f"{subject_of(one)} ({one.manifest.version}) in {one.manifest.source}" for one in found]


def subject_of(one: Graph | ClusterTopology) -> str:
    """How findings name it: ``Kind name.namespace``, as istioctl does."""
    return f"{one.manifest.kind} {short_name(one)}"


def short_name(one: Graph | ClusterTopology) -> str:
    """``name.namespace``. Topologies belong to the cluster: a namespace there means nothing."""
    namespace = one.manifest.namespace if isinstance(one, Graph) else ""
    return f"{one.manifest.name}.{namespace}" if namespace else one.manifest.name


def has_graphs(facts: LintFacts) -> Skipped | None:
    return None if facts.graphs else Skipped(f"no {GRAPH} {facts.place}")


def has_policy(facts: LintFacts) -> Skipped | None:
    if facts.governed:
        return None
    return has_graphs(facts) or Skipped("no graph here has a kvTransferPolicy")


def has_topologies(facts: LintFacts) -> Skipped | None:
    if facts.topologies:
        return None
    return Skipped(
        "no graph names a Grove topology that is there"
        if facts.live
        else "no Grove topology in these files"
    )


def spec_of(one: Graph | ClusterTopology) -> dict[str, object]:
    """The spec as it was written."""
    return dict(mapping(one.manifest.body.get("spec")))
