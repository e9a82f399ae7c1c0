"""The fleet of a plan: workers per place, from flags, manifests or a live deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynctl.base.errors import UsageProblem
from dynctl.base.json_fields import mapping, sequence, text
from dynctl.documents.topology import TopologyShow
from dynctl.documents.workers import WorkerRow
from dynctl.manifests.draft_shapes import is_translated, translated_graphs
from dynctl.manifests.files import Manifest
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
        found = role_counts("--capacity", given, counts)
        cells[value] = Cell(FLAGS_POOL, value, found["prefill"], found["decode"])
    if len(cells) > MAX_PLACES:
        raise UsageProblem(f"--capacity: {len(cells):,} values; expected at most {MAX_PLACES:,}")
    return PlannedFleet("--capacity", domain or "zone", tuple(cells.values()))


def role_counts(flag: str, given: str, counts: str) -> dict[str, int]:
    """``prefill=30,decode=60``; a role that is left out has none. Raises UsageProblem."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in counts.split(","))):
        role, equals, number = part.partition("=")
        if role not in ("prefill", "decode") or not equals:
            raise UsageProblem(f"{flag} {given}: {part!r}; expected prefill=N or decode=N")
        if role in found:
            raise UsageProblem(f"{flag} {given}: {role} is given twice")
        if not (number.isascii() and number.isdigit() and len(number) <= 7):
            raise UsageProblem(
                f"{flag} {given}: {role}={number}; expected a whole number of workers"
            )
        found[role] = int(number)
        if found[role] > MAX_WORKERS:
            raise UsageProblem(f"{flag} {given}: {role} is more than {MAX_WORKERS:,}")
    return {"prefill": 0, "decode": 0, **found}


# -- a live deployment -----------------------------------------------------------------------------


def fleet_of_workers(shown: TopologyShow, workers: Iterable[WorkerRow]) -> PlannedFleet:
    """The fleet of the available workers that `topology show` counts, busy ones included."""
    rows = {row.name: row for row in workers if row.status == "ready"}
    cells, notes = [], []
    policies: dict[str, set[str]] = {}
    for one in shown.rows:
        members = [rows[name] for name in one.workers if name in rows]
        prefill = [row for row in members if row.role == "prefill"]
        total, used = one.decode.kv_total_blocks, one.decode.kv_used_blocks
        complete = total is not None and used is not None
        complete = complete and one.decode.kv_reporting == one.decode.ranks
        cells.append(
            Cell(
                one.model,
                one.value,
                one.prefill.ready + one.prefill.busy,
                one.decode.ready + one.decode.busy,
                (total or 0) - (used or 0) if complete else None,
                _batched_tokens_free(prefill),
                _nodes(members),
            )
        )
        policies.setdefault(one.model, set()).update(
            policy.enforcement or "none" if policy.domain == shown.domain else "none"
            for policy in one.policies
        )
        if one.aggregated.workers:
            notes.append(
                f"{one.value or '(none)'} has {one.aggregated.workers:,} aggregated workers: not "
                "counted"
            )
    gone = sum(row.prefill.unavailable + row.decode.unavailable for row in shown.rows)
    if gone:
        notes.append(f"{gone:,} unavailable, not counted: topology show")
    return PlannedFleet(
        shown.source,
        shown.domain or "zone",
        tuple(cells),
        in_force={
            model: next(iter(found)) if len(found) == 1 else "mixed"
            for model, found in policies.items()
            if found
        },
        notes=tuple(notes),
    )


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


def fleet_of_manifests(
    manifests: Sequence[Manifest], source: str, domain: str | None, over: Sequence[str] = ()
) -> PlannedFleet:
    """The worker replicas of every graph; each graph is a pool of its own.

    ``over``: all the values of the domain, where known; unpinned workers then land in no other.
    Raises UsageProblem for what cannot be counted, naming file and path.
    """
    graphs = translated_graphs(graphs_of(manifests))
    if not graphs:
        found = {f"{one.body.get('apiVersion', '(no apiVersion)')} {one.kind}" for one in manifests}
        kinds = ", ".join(sorted(found)[:5]) or "nothing"
        raise UsageProblem(f"--file {source}: no {GRAPH} ({GRAPH_GROUP}) in it; found {kinds}")
    domain = domain or _common_domain(graphs)
    topologies = topologies_of(manifests)
    count = _ManifestCount(domain, topologies, over)
    for graph in graphs:
        count.add(graph)
    for one in manifests:
        if not (one.kind == GRAPH and one.group == GRAPH_GROUP) and one.kind not in TOPOLOGY_KINDS:
            count.notes.append(f"{one.source}: {one.kind} {one.name} is not a {GRAPH}: skipped")
    for graph in graphs:
        if is_translated(graph):
            count.notes.append(
                f"{graph.name}: its policy is translated from a draft that no released operator "
                "reads: dynctl topology lint"
            )
    return PlannedFleet(
        source,
        domain,
        tuple(count.cells.values()),
        tuple(count.floating),
        closed=bool(over),
        in_force={graph.name: _in_force(graph, domain) for graph in graphs},
        homes=tuple(count.homes),
        notes=tuple(count.notes),
    )


def _in_force(graph: Graph, domain: str) -> str:
    policy = graph.policy
    if policy is None or text(policy.get("domain")) != domain:
        return "none"
    enforcement = policy.get("enforcement", "required")
    if enforcement not in ("required", "preferred"):
        raise UsageProblem(
            f"{graph.manifest.source}: {POLICY_PATH}.enforcement: {enforcement!r}; expected "
            "required or preferred"
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
        counted = [one for one in graph.workers if self._counts(graph, one)]
        for place in self.over:
            self._cell(graph.name, place)
        packed = self._packed_into(graph, counted)
        for one in counted:
            replicas = _replicas(source, one)
            allowed = self._allowed(graph, one)
            value = next(iter(allowed)) if allowed is not None and len(allowed) == 1 else packed
            role = str(one.role)
            if value is not None:
                cell = self._cell(graph.name, value)
                count = getattr(cell, role) + replicas
                self.cells[graph.name, value] = replace(cell, **{role: count})
                self.homes.append(Home(graph.name, value, role, graph, one))
                continue
            if allowed is not None and not allowed:
                self.notes.append(
                    f"{graph.name}: the selectors of {one.name} contradict each other: it cannot "
                    "run and is not counted"
                )
                continue
            for place in sorted(allowed or ()):
                self._cell(graph.name, place)
            self.floating.append(Floating(graph.name, role, replicas, allowed))
        if len(self.cells) > MAX_PLACES:
            raise UsageProblem(f"{source}: more than {MAX_PLACES:,} values of {self.domain}")

    def _cell(self, pool: str, value: str) -> Cell:
        return self.cells.setdefault((pool, value), Cell(pool, value))

    def _counts(self, graph: Graph, one: Component) -> bool:
        if one.role == "aggregated":
            self.notes.append(f"{graph.name}: {one.name} is aggregated: not counted")
        elif one.role is None:
            self.notes.append(
                f"{graph.name}: the role of {one.name} ({one.path}) is unknown: not counted; "
                "set type to prefill or decode"
            )
        elif one.role_source == "name":
            self.notes.append(
                f"{graph.name}: the role of {one.name}, {one.role}, is taken from its name"
            )
        return one.role in ("prefill", "decode")

    def _packed_into(self, graph: Graph, counted: Sequence[Component]) -> str | None:
        """The value that the whole graph is packed into; a placeholder where it is unknown."""
        spec = mapping(graph.manifest.body.get("spec"))
        pack = text(mapping(spec.get("topologyConstraint")).get("packDomain"))
        levels = [level.domain for one in self.topologies for level in one.levels] or _LEVELS
        narrower = pack in levels and self.domain in levels
        narrower = narrower and levels.index(pack) >= levels.index(self.domain)
        if not (pack and (pack == self.domain or narrower)):
            return None
        sets = [self._allowed(graph, one) for one in counted]
        pinned = {next(iter(one)) for one in sets if one is not None and len(one) == 1}
        return pinned.pop() if len(pinned) == 1 else f"(one {self.domain})"

    def _label_keys(self, graph: Graph) -> list[str]:
        """The node label of the domain, from the policy or a topology resource."""
        own = text((graph.policy or {}).get("domain")) == self.domain
        found = [policy_label_key(graph, self.topologies) if own else None]
        found += [topology.key_of(self.domain) for topology in self.topologies]
        return [key for key in found if key][:1]

    def _allowed(self, graph: Graph, one: Component) -> frozenset[str] | None:
        keys = self._label_keys(graph) or _keys_named(one.pod, self.domain)
        allowed: frozenset[str] | None = None
        for name in keys:
            values = one.domains(name)
            if values is not None:
                allowed = values if allowed is None else allowed & values
        if allowed is None and self.over:
            return frozenset(self.over)
        return allowed


def _replicas(source: str, one: Component) -> int:
    value = one.body.get("replicas")
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WORKERS
    ):
        raise UsageProblem(
            f"{source}: {one.path}.replicas: {value!r}; expected a whole number from 0 to "
            f"{MAX_WORKERS:,}"
        )
    return one.replicas


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
