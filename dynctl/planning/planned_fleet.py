"""The fleet of a plan: workers per place, from flags, manifests or a live deployment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynctl.base.errors import UsageProblem
from dynctl.base.json_fields import mapping, sequence, text
from dynctl.documents.topology import DomainCapacity, TopologyShow
from dynctl.documents.workers import WorkerRow
from dynctl.manifests.draft_shapes import is_translated, translated_graphs
from dynctl.manifests.files import Manifest, read_manifests
from dynctl.manifests.graphs import (
    GRAPH,
    GRAPH_GROUP,
    GRAPH_VERSIONS,
    POLICY_PATH,
    TOPOLOGY_KINDS,
    ClusterTopology,
    Component,
    Graph,
    graphs_of,
    policy_label_key,
    topologies_of,
)
from dynctl.planning.capacity import MAX_WORKERS, Cell, Floating, NodeWorkers

MAX_PLACES = 1_000
#: From broad to narrow; a graph packed into one level is packed into all broader levels.
_LEVELS = ("region", "zone", "datacenter", "block", "rack", "host", "numa")


@dataclass(frozen=True, slots=True)
class Home:
    """A component of a graph whose replicas are workers of ``pool`` at ``value``."""

    pool: str
    value: str
    role: str
    graph: Graph
    component: Component


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """A fleet to plan.

    ``in_force``: the enforcement of each pool for this domain, ``mixed`` where its workers differ;
    that of other pools is unknown.

    ``closed``: floating workers run only in the values of the cells.
    """

    source: str
    domain: str
    cells: tuple[Cell, ...]
    floating: tuple[Floating, ...] = ()
    closed: bool = True
    in_force: Mapping[str, str] = field(default_factory=dict)
    homes: tuple[Home, ...] = ()
    notes: tuple[str, ...] = ()


def _mode_in_force(modes: set[str]) -> str:
    return next(iter(modes)) if len(modes) == 1 else "mixed"


# -- flags -----------------------------------------------------------------------------------------

FLAGS_POOL = "fleet"


def fleet_of_flags(capacities: Sequence[str], domain: str | None) -> PlannedFleet:
    """``zone-a:prefill=30,decode=60`` each; raises UsageProblem."""
    cells: dict[str, Cell] = {}
    for given in capacities:
        value, _, counts = given.partition(":")
        value = value.strip()
        if not value or "=" in value:
            raise UsageProblem(f"--capacity {given}: expected VALUE:prefill=N,decode=N")
        if value in cells:
            raise UsageProblem(f"--capacity {given}: {value} is given twice")
        workers = role_counts("--capacity", given, counts)
        cells[value] = Cell(FLAGS_POOL, value, workers["prefill"], workers["decode"])
    if len(cells) > MAX_PLACES:
        raise UsageProblem(f"--capacity: {len(cells):,} values; expected at most {MAX_PLACES:,}")
    return PlannedFleet("--capacity", domain or "zone", tuple(cells.values()))


def role_counts(flag: str, given: str, counts: str) -> dict[str, int]:
    """``prefill=30,decode=60``; a role that is left out has none. Raises UsageProblem."""
    workers: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in counts.split(","))):
        role, equals, number = part.partition("=")
        if role not in ("prefill", "decode") or not equals:
            raise UsageProblem(f"{flag} {given}: {part!r}; expected prefill=N or decode=N")
        if role in workers:
            raise UsageProblem(f"{flag} {given}: {role} is given twice")
        if not (number.isascii() and number.isdigit() and len(number) <= 7):
            raise UsageProblem(
                f"{flag} {given}: {role}={number}; expected a whole number of workers"
            )
        workers[role] = int(number)
        if workers[role] > MAX_WORKERS:
            raise UsageProblem(f"{flag} {given}: {role} is more than {MAX_WORKERS:,}")
    return {"prefill": 0, "decode": 0, **workers}


# -- a live deployment -----------------------------------------------------------------------------


def fleet_of_workers(shown: TopologyShow, workers: Iterable[WorkerRow]) -> PlannedFleet:
    """The fleet of the available workers that `topology show` counts, busy ones included."""
    ready = {row.name: row for row in workers if row.status == "ready"}
    cells, notes = [], []
    policies: dict[str, set[str]] = defaultdict(set)
    for row in shown.rows:
        if row.aggregated.workers:
            name = row.value or "(none)"
            notes.append(f"{name}: {row.aggregated.workers:,} aggregated, not counted")
        if not row.prefill.workers + row.decode.workers:
            continue  # a domain without hand-offs has nothing to judge
        cells.append(_cell_of_capacity(row, [ready[name] for name in row.workers if name in ready]))
        policies[row.model] |= _enforcements(row, shown.domain)
    gone = sum(row.prefill.unavailable + row.decode.unavailable for row in shown.rows)
    if gone:
        notes.append(f"{gone:,} unavailable, not counted: topology show")
    return PlannedFleet(
        shown.source,
        shown.domain or "zone",
        tuple(cells),
        in_force={model: _mode_in_force(modes) for model, modes in policies.items() if modes},
        notes=tuple(notes),
    )


def _cell_of_capacity(row: DomainCapacity, members: Sequence[WorkerRow]) -> Cell:
    """The cell of a row of `topology show`; ``members``: its available workers."""
    prefill, decode = row.prefill, row.decode
    total, used = decode.kv_total_blocks, decode.kv_used_blocks
    kv_blocks_free = None
    if total is not None and used is not None and decode.kv_reporting == decode.ranks:
        kv_blocks_free = total - used
    return Cell(
        row.model,
        row.value,
        prefill.ready + prefill.busy,
        decode.ready + decode.busy,
        kv_blocks_free,
        _batched_tokens_free([member for member in members if member.role == "prefill"]),
        _nodes(members),
    )


def _enforcements(row: DomainCapacity, domain: str | None) -> set[str]:
    """The enforcements of the policies of a row for ``domain``; none for other domains."""
    of_domain = [policy for policy in row.policies if policy.domain == domain]
    modes = {policy.enforcement or "none" for policy in of_domain}
    return modes | {"none"} if len(of_domain) < len(row.policies) else modes


def _batched_tokens_free(prefill: Sequence[WorkerRow]) -> int | None:
    """Free batched tokens; None unless every card has max_num_batched_tokens (per rank)."""
    free = 0
    for row in prefill:
        limit = row.runtime_config.get("max_num_batched_tokens")
        if not isinstance(limit, int):
            return None
        free += sum(max(0, limit - rank.active_prefill_tokens) for rank in row.ranks)
    return free if prefill else None


def _nodes(members: Sequence[WorkerRow]) -> tuple[NodeWorkers, ...]:
    """The workers per node, where workers publish their node as a domain."""
    nodes: dict[str, NodeWorkers] = {}
    for row in members:
        name = row.domains.get("host") or row.domains.get("node")
        if name is not None and row.role in ("prefill", "decode"):
            node = nodes.get(name, NodeWorkers(name))
            nodes[name] = replace(node, **{row.role: getattr(node, row.role) + 1})
    return tuple(nodes[name] for name in sorted(nodes))


# -- manifests -------------------------------------------------------------------------------------


def fleet_of_files(
    files: Sequence[str], domain: str | None, over: Sequence[str] = ()
) -> PlannedFleet:
    """The worker replicas of manifest files, as :func:`fleet_of_manifests`."""
    source = ", ".join(files[:3]) + (" and more" if len(files) > 3 else "")
    return fleet_of_manifests(read_manifests(files), source, domain, over)


def fleet_of_manifests(
    manifests: Sequence[Manifest], source: str, domain: str | None, over: Sequence[str] = ()
) -> PlannedFleet:
    """The worker replicas of every graph; each graph is a pool of its own.

    ``over``: all the values of the domain, where known; unpinned workers then land in no other.
    Raises UsageProblem for what cannot be counted, naming file and path.
    """
    graphs = translated_graphs(graphs_of(manifests))
    if not graphs:
        met = {
            f"{item.body.get('apiVersion', '(no apiVersion)')} {item.kind}" for item in manifests
        }
        kinds = ", ".join(sorted(met)[:5]) or "nothing"
        raise UsageProblem(f"--file {source}: no {GRAPH} ({GRAPH_GROUP}) in it; found {kinds}")
    domain = domain or _common_domain(graphs)
    count = _ManifestCount(domain, topologies_of(manifests), over)
    for graph in graphs:
        count.add(graph)
    return PlannedFleet(
        source,
        domain,
        tuple(count.cells.values()),
        tuple(count.floating),
        closed=bool(over),
        in_force={graph.name: _in_force(graph, domain) for graph in graphs},
        homes=tuple(count.homes),
        notes=(*count.notes, *_notes_on_files(manifests, graphs)),
    )


def _notes_on_files(manifests: Sequence[Manifest], graphs: Sequence[Graph]) -> Iterator[str]:
    for item in manifests:
        is_graph = item.kind == GRAPH and item.group == GRAPH_GROUP
        if not is_graph and item.kind not in TOPOLOGY_KINDS:
            yield f"{item.source}: {item.kind} {item.name} is not a {GRAPH}: skipped"
    for graph in graphs:
        if is_translated(graph):
            yield (
                f"{graph.name}: its policy is translated from a draft that no released operator "
                "reads: dynctl topology lint"
            )


def _in_force(graph: Graph, domain: str) -> str:
    policy, source = graph.policy, graph.manifest.source
    spec = mapping(graph.manifest.body.get("spec"))
    written = mapping(spec.get("experimental")).get("kvTransferPolicy")
    if policy is None and written is not None:
        raise UsageProblem(f"{source}: {POLICY_PATH}: {written!r}; expected keys and values")
    if policy is not None and not is_translated(graph) and not text(policy.get("domain")):
        raise UsageProblem(
            f"{source}: {POLICY_PATH}.domain: {policy.get('domain')!r}; expected a name, for "
            "example zone"
        )
    if policy is None or text(policy.get("domain")) != domain:
        return "none"
    enforcement = policy.get("enforcement", "required")
    if enforcement not in ("required", "preferred"):
        raise UsageProblem(
            f"{source}: {POLICY_PATH}.enforcement: {enforcement!r}; expected required or preferred"
        )
    return str(enforcement)


def _common_domain(graphs: Sequence[Graph]) -> str:
    domains = {text((graph.policy or {}).get("domain")) for graph in graphs} - {""}
    if len(domains) > 1:
        raise UsageProblem(
            f"the graphs transfer within different domains ({', '.join(sorted(domains))}); "
            "choose one with --domain"
        )
    return domains.pop() if domains else "zone"


class _ManifestCount:
    """Cells and floating workers, graph by graph."""

    def __init__(
        self, domain: str, topologies: Sequence[ClusterTopology], over: Sequence[str]
    ) -> None:
        self.domain = domain
        self.topologies = topologies
        self.over = over
        self.cells: dict[tuple[str, str], Cell] = {}
        self.floating: list[Floating] = []
        self.homes: list[Home] = []
        self.notes: list[str] = []
        self._titles: set[str] = set()

    def add(self, graph: Graph) -> None:
        source = graph.manifest.source
        if graph.version not in GRAPH_VERSIONS:
            raise UsageProblem(
                f"{source}: apiVersion {graph.manifest.body.get('apiVersion')}: expected "
                + " or ".join(f"{GRAPH_GROUP}/{version}" for version in GRAPH_VERSIONS)
            )
        if graph.name in self._titles:
            raise UsageProblem(f"{source}: the graph {graph.name} is defined twice")
        self._titles.add(graph.name)
        counted = [component for component in graph.workers if self._counts(graph, component)]
        for place in self.over:
            self._cell(graph.name, place)
        packed = self._packed_into(graph, counted)
        for component in counted:
            self._add_component(graph, component, packed)
        if len(self.cells) > MAX_PLACES:
            raise UsageProblem(f"{source}: more than {MAX_PLACES:,} values of {self.domain}")

    def _add_component(self, graph: Graph, component: Component, packed: str | None) -> None:
        """``packed``: the value that the whole graph is packed into, if any."""
        replicas = _replicas(graph.manifest.source, component)
        allowed = self._allowed_values(graph, component)
        role = str(component.role)
        value = _only_value(allowed)
        if value is None:
            value = packed
        if value is not None:
            cell = self._cell(graph.name, value)
            count = getattr(cell, role) + replicas
            self.cells[graph.name, value] = replace(cell, **{role: count})
            self.homes.append(Home(graph.name, value, role, graph, component))
        elif allowed is not None and not allowed:
            self.notes.append(
                f"{graph.name}: the selectors of {component.name} contradict each other: it cannot "
                "run and is not counted"
            )
        else:
            for place in sorted(allowed or ()):
                self._cell(graph.name, place)
            self.floating.append(Floating(graph.name, role, replicas, allowed))

    def _cell(self, pool: str, value: str) -> Cell:
        return self.cells.setdefault((pool, value), Cell(pool, value))

    def _counts(self, graph: Graph, component: Component) -> bool:
        name, role = component.name, component.role
        if role == "aggregated":
            self.notes.append(f"{graph.name}: {name} is aggregated: not counted")
        elif component.role_source == "encoder":
            self.notes.append(f"{graph.name}: {name} is an encoder: not counted")
        elif role is None:
            self.notes.append(
                f"{graph.name}: the role of {name} ({component.path}) is unknown: not counted; "
                "set type to prefill or decode"
            )
        elif component.role_source == "name":
            self.notes.append(f"{graph.name}: the role of {name}, {role}, is taken from its name")
        return role in ("prefill", "decode")

    def _packed_into(self, graph: Graph, counted: Sequence[Component]) -> str | None:
        """The value that the whole graph is packed into; a placeholder where it is unknown."""
        spec = mapping(graph.manifest.body.get("spec"))
        pack = text(mapping(spec.get("topologyConstraint")).get("packDomain"))
        if not pack or not self._is_within_domain(pack):
            return None
        pinned = {_only_value(self._allowed_values(graph, component)) for component in counted} - {
            None
        }
        return pinned.pop() if len(pinned) == 1 else f"(one {self.domain})"

    def _is_within_domain(self, pack: str) -> bool:
        """Whether nodes of one value of the level ``pack`` have one value of the domain."""
        if pack == self.domain:
            return True
        declared = [level.domain for topology in self.topologies for level in topology.levels]
        levels = declared or _LEVELS
        if pack not in levels or self.domain not in levels:
            return False
        return levels.index(pack) >= levels.index(self.domain)

    def _label_keys(self, graph: Graph) -> list[str]:
        """The node label of the domain, from the policy or a topology resource."""
        own = text((graph.policy or {}).get("domain")) == self.domain
        keys = [policy_label_key(graph, self.topologies) if own else None]
        keys += [topology.key_of(self.domain) for topology in self.topologies]
        return [key for key in keys if key][:1]

    def _allowed_values(self, graph: Graph, component: Component) -> frozenset[str] | None:
        keys = self._label_keys(graph) or _keys_named(component.pod, self.domain)
        allowed: frozenset[str] | None = None
        for name in keys:
            values = component.domains(name)
            if values is not None:
                allowed = values if allowed is None else allowed & values
        if allowed is None and self.over:
            return frozenset(self.over)
        return allowed


def _only_value(allowed: frozenset[str] | None) -> str | None:
    """The value of a component that may run in one value only."""
    return next(iter(allowed)) if allowed is not None and len(allowed) == 1 else None


def _replicas(source: str, component: Component) -> int:
    value = component.body.get("replicas")
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WORKERS
    ):
        raise UsageProblem(
            f"{source}: {component.path}.replicas: {value!r}; expected a whole number from 0 to "
            f"{MAX_WORKERS:,}"
        )
    return component.replicas


def _keys_named(pod: Mapping[str, Any], domain: str) -> list[str]:
    """Label keys of the pod's selectors that end in the domain: topology.kubernetes.io/zone."""
    keys = list(mapping(pod.get("nodeSelector")))
    affinity = mapping(mapping(pod.get("affinity")).get("nodeAffinity"))
    required = mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    for term in sequence(required.get("nodeSelectorTerms")):
        keys += [
            text(mapping(e).get("key")) for e in sequence(mapping(term).get("matchExpressions"))
        ]
    return [key for key in dict.fromkeys(keys) if key.rpartition("/")[2] == domain]
