"""Checks of Grove topologies and of the levels that graphs use: DYT02."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from dynctl.base.json_fields import mapping, text
from dynctl.findings.runner import Check, Found, Outcome, Skipped, found, outcome
from dynctl.manifests.graphs import ClusterTopology, Graph
from dynctl.manifests.lint.facts import LintFacts, has_policy, has_topologies, spec_of, subject_of
from dynctl.manifests.transfer_policy import is_label_key

#: Grove's names from broad to narrow; another name can be at any position.
KNOWN_LEVELS: Final = ("region", "zone", "datacenter", "block", "rack", "host", "numa")
_LEVEL: Final = r"[a-z][a-z0-9-]*"
_LONGEST: Final = 63


def level_problems(levels: Any) -> Iterator[tuple[str, str]]:
    """Validation errors of ``spec.levels`` (any value): message and fix."""
    if not isinstance(levels, list) or not levels:
        yield (
            "spec.levels: must have at least 1 item",
            "name the levels from broad to narrow, each with domain and key",
        )
        return
    for place, entry in enumerate(levels):
        yield from _entry_problems(f"spec.levels[{place}]", mapping(entry))
    for field in ("domain", "key"):
        counts = Counter(text(mapping(entry).get(field)) for entry in levels)
        for value in (value for value, count in counts.items() if value and count > 1):
            yield f"spec.levels: two levels have the {field} {value}", "keep one of them"


def _entry_problems(where: str, level: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    domain, key = level.get("domain"), level.get("key")
    name = "use lower case letters, digits and -, for example zone"
    if not isinstance(domain, str):
        yield f"{where}.domain: Required value", name
    elif re.fullmatch(_LEVEL, domain) is None or len(domain) > _LONGEST:
        yield f"{where}.domain: Invalid value: {domain!r}: should match '^{_LEVEL}$'", name
    label = "name the label of the nodes, for example topology.kubernetes.io/zone"
    if not isinstance(key, str):
        yield f"{where}.key: Required value", label
    elif not is_label_key(key) or len(key) > _LONGEST:
        yield f"{where}.key: Invalid value: {key!r}: no label key of 1..63 characters", label


def misordered(domains: Sequence[str]) -> tuple[str, str] | None:
    """The first known level that comes after a narrower one, with that one."""
    known = [domain for domain in domains if domain in KNOWN_LEVELS]
    for before, after in pairwise(known):
        if KNOWN_LEVELS.index(before) > KNOWN_LEVELS.index(after):
            return after, before
    return None


def _levels(facts: LintFacts) -> Outcome:
    return outcome(
        found(subject_of(topology), refuses=facts.refuses, message=message, fix=fix)
        for topology in facts.topologies
        for message, fix in level_problems(spec_of(topology).get("levels"))
    )


def _ordered(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for topology in facts.topologies:
            pair = misordered([level.domain for level in topology.levels])
            if pair is not None:
                yield found(subject_of(topology), broad=pair[0], narrow=pair[1])

    return outcome(all_of())


def _level_exists(facts: LintFacts) -> Outcome:
    wrong: list[Found] = []
    existing: list[str] = []
    absent: list[str] = []
    for graph in facts.governed:
        policy = graph.policy or {}
        name, domain = text(policy.get("clusterTopologyName")), text(policy.get("domain"))
        if not name or not domain:
            continue
        topology = _topology_named(facts, name)
        levels = [] if topology is None else [level.domain for level in topology.levels]
        if topology is None:
            absent.append(name)
        elif domain in levels:
            existing.append(f"{name} has {domain}")
        else:
            names = {"domain": domain, "topology": name, "available": ", ".join(levels)}
            wrong.append(found(subject_of(graph), refuses=facts.refuses, **names))
    if not wrong and (absent or not existing):
        missing = "does not exist (DYT0201)" if facts.live else "not in these files"
        named = ", ".join(dict.fromkeys(absent))
        return Skipped(f"{named}: {missing}" if absent else "no graph has a Grove topology")
    return outcome(wrong, summary="; ".join(existing))


def _topology_named(facts: LintFacts, name: str) -> ClusterTopology | None:
    # Topologies are cluster-wide: a namespace in the manifest is ignored.
    return next((topology for topology in facts.topologies if topology.manifest.name == name), None)


def _pack_fits(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.governed:
            domain = text((graph.policy or {}).get("domain"))
            order = _order(facts, graph)
            if domain not in order:
                continue
            for where, pack in _packs(graph):
                if pack in order and pack != domain:
                    narrower = order.index(pack) > order.index(domain)
                    effect = (
                        f"all its pods share one {pack}, so {domain} has no effect"
                        if narrower
                        else f"its pods can land in several {domain} values of one {pack}"
                    )
                    yield found(
                        subject_of(graph), where=where, pack=pack, domain=domain, effect=effect
                    )

    return outcome(all_of())


def _order(facts: LintFacts, graph: Graph) -> Sequence[str]:
    constraint = mapping(spec_of(graph).get("topologyConstraint"))
    names = (
        text((graph.policy or {}).get("clusterTopologyName")),
        text(constraint.get("clusterTopologyName")),
        text(constraint.get("topologyProfile")),
    )
    for name in names:
        topology = _topology_named(facts, name)
        if topology is not None:
            return [level.domain for level in topology.levels]
    return KNOWN_LEVELS


def _packs(graph: Graph) -> Iterator[tuple[str, str]]:
    """The packDomain of the whole graph; a component's constraint packs only the component."""
    constraint: Mapping[str, Any] = mapping(spec_of(graph).get("topologyConstraint"))
    pack = text(constraint.get("packDomain"))
    if pack:
        yield "spec.topologyConstraint.packDomain", pack


LEVEL_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0202", _level_exists, (has_policy,)),
    Check("DYT0209", _levels, (has_topologies,)),
    Check("DYT0210", _ordered, (has_topologies,)),
    Check("DYT0211", _pack_fits, (has_policy,)),
)
