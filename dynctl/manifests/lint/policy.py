"""Checks of the kvTransferPolicy: DYT01. The graph around it is in graph.py."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from dynctl.base.json_fields import mapping, text
from dynctl.findings.runner import Check, Found, Outcome, found, outcome
from dynctl.manifests.draft_shapes import Draft, draft_levels, drafts_of, is_translated
from dynctl.manifests.graphs import POLICY_PATH, Graph
from dynctl.manifests.lint.facts import (
    LintFacts,
    has_graphs,
    has_policy,
    short_name,
    spec_of,
    subject_of,
)
from dynctl.manifests.transfer_policy import FIELDS, Objection, objections

#: Names of domains at the end of label keys; a policy with another name is misleading.
_DOMAIN_WORDS: Final = ("region", "zone", "datacenter", "block", "rack", "host", "numa")
_SAME: Final = {"hostname": "host", "node": "host", "dc": "datacenter", "az": "zone"}
_LONGEST_DOMAIN: Final = 63


def policy_exists(facts: LintFacts, spread: Callable[[Graph], str] = lambda graph: "") -> Outcome:
    """DYT0102. ``spread``: the zones of a graph's workers in words, if they are known."""
    without = [
        graph
        for graph in facts.graphs
        if raw_policy(graph) is None and graph.workers and not any(drafts_of(graph))
    ]
    return outcome(
        (
            found(
                subject_of(graph), path=POLICY_PATH, spread=spread(graph) and f"; {spread(graph)}"
            )
            for graph in without
        ),
        summary=_policies(facts),
        nothing=""
        if any(graph.workers or raw_policy(graph) is not None for graph in facts.graphs)
        else "no graph has workers or a policy",
    )


def _policies(facts: LintFacts) -> str:
    texts = []
    for graph in facts.governed:
        policy = graph.policy or {}
        how = "required" if facts.required(graph) else str(policy.get("enforcement"))
        if facts.preferred(graph):
            how += f" {policy.get('preferredWeight')}"
        if is_translated(graph):
            how += ", translated from its draft"
        texts.append(f"{short_name(graph)}: {policy.get('domain')}, {how}")
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if texts[3:] else "")


def _no_drafts(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.graphs:
            for draft in drafts_of(graph):
                yield drafted(facts, subject_of(graph), draft)
        for topology in facts.topologies:
            for draft in draft_levels(topology):
                yield drafted(facts, subject_of(topology), draft)

    return outcome(all_of())


def drafted(facts: LintFacts, subject: str, draft: Draft) -> Found:
    """The finding about a draft format."""
    changed = draft.shipped.startswith(("write", "move"))
    shipped = facts.remedy(draft.shipped) if changed else draft.shipped
    return found(subject, where=draft.where, message=draft.message, shipped=shipped)


def raw_policy(graph: Graph) -> Any:
    """The value of kvTransferPolicy, valid or not; for a draft its translation."""
    if is_translated(graph):
        return graph.policy
    spec = mapping(graph.manifest.body.get("spec"))
    return mapping(spec.get("experimental")).get("kvTransferPolicy")


def _has_no_objection(aspect: str, facts: LintFacts) -> Outcome:
    return outcome(objections_to(facts, aspect))


def objections_to(facts: LintFacts, aspect: str) -> Iterator[Found]:
    """The validation errors of one aspect of the policies."""
    for graph in facts.graphs:
        if raw_policy(graph) is None:
            continue
        # For live graphs DYT0203 checks the Grove annotation.
        annotations = {} if facts.live else graph.manifest.annotations
        for objection in objections(raw_policy(graph), annotations):
            if objection.aspect == aspect:
                yield _objection(facts, graph, objection)


def _objection(facts: LintFacts, graph: Graph, objection: Objection) -> Found:
    """The finding about a validation error of a policy."""
    fix = facts.remedy(objection.fix)
    origin = " (translated from its draft)" if is_translated(graph) else ""
    return found(
        subject_of(graph),
        validator=objection.validator,
        refuses=facts.refuses,
        message=objection.message + origin,
        fix=fix,
    )


def _has_policy_field(facts: LintFacts) -> Any:
    """At least one graph has a kvTransferPolicy, valid or not."""
    return (
        None if any(raw_policy(graph) is not None for graph in facts.graphs) else has_policy(facts)
    )


def _key_fits_domain(facts: LintFacts) -> Outcome:
    def all_of() -> Iterator[Found]:
        for graph in facts.governed:
            domain, key = facts.domain(graph), text((graph.policy or {}).get("labelKey"))
            if domain is None or not key:
                continue
            last = key.rpartition("/")[2].lower().replace("_", "-").replace(".", "-")
            named = _SAME.get(last, last)
            known = named in _DOMAIN_WORDS and _SAME.get(domain, domain) in _DOMAIN_WORDS
            if known and named != _SAME.get(domain, domain):
                yield found(subject_of(graph), domain=domain, key=key, named=named)

    return outcome(all_of())


def _weight_acts(facts: LintFacts) -> Outcome:
    return outcome(
        found(subject_of(graph))
        for graph in facts.governed
        if facts.preferred(graph) and (graph.policy or {}).get("preferredWeight") in (0, 0.0)
    )


def _domain_short(facts: LintFacts) -> Outcome:
    return outcome(
        found(subject_of(graph), domain=domain, length=len(domain))
        for graph in facts.governed
        if (domain := facts.domain(graph)) is not None and len(domain) > _LONGEST_DOMAIN
    )


# -- immutable fields: DYT0112 ---------------------------------------------------------------------


_CONSTRAINT: Final = "topologyConstraint"
_TOPOLOGY_NAMES: Final = ("clusterTopologyName", "topologyProfile")


def immutable_changes(live: Graph, file: Graph) -> Iterator[Found]:
    """Changes of the live graph by the file that the operator's webhook refuses (DYT0112).

    The webhook compares the transfer policy and the topology constraints (modelled from source) by
    meaning: a missing enforcement is ``required``, and both versions of a constraint name the same
    topology. Components that exist only on one side do not change a constraint.
    """
    subject = subject_of(live)
    delete = f"kubectl delete dynamographdeployment {live.manifest.name}"
    if live.manifest.namespace:
        delete += f" -n {live.manifest.namespace}"
    changes = [
        _change(POLICY_PATH, _policy(live), _policy(file)),
        _change(
            f"spec.{_CONSTRAINT}",
            _constraint(spec_of(live).get(_CONSTRAINT)),
            _constraint(spec_of(file).get(_CONSTRAINT)),
        ),
    ]
    there = {component.name.lower(): component for component in live.components}
    for component in file.components:
        before = there.get(component.name.lower())
        if before is not None:
            changes.append(
                _change(
                    f"{component.path}.{_CONSTRAINT}",
                    _constraint(before.body.get(_CONSTRAINT)),
                    _constraint(component.body.get(_CONSTRAINT)),
                )
            )
    for change in filter(None, changes):
        path, what = change
        yield found(subject, path=path, change=what, delete=delete)


def _change(
    path: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[str, str] | None:
    if before == after:
        return None
    if before is None or after is None:
        return path, f"the file {'adds' if before is None else 'removes'} it"
    names = [name for name in (*before, *after) if before.get(name) != after.get(name)]
    changes = [
        f"{name} from {_shown_value(before.get(name))} to {_shown_value(after.get(name))}"
        for name in dict.fromkeys(names)
    ]
    return path, f"the file changes {', '.join(changes)}"


def _shown_value(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _policy(graph: Graph) -> Mapping[str, Any] | None:
    """The policy as the webhook compares it; unknown fields, as of drafts, never reach it."""
    policy = mapping(spec_of(graph).get("experimental")).get("kvTransferPolicy")
    if not isinstance(policy, Mapping):
        return None
    given = {name: value for name in FIELDS if (value := policy.get(name)) is not None}
    given.setdefault("enforcement", "required")
    if "preferredWeight" in given:
        given["preferredWeight"] = _float32(given["preferredWeight"])
    return given


def _constraint(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    given = {name: field for name, field in mapping(value).items() if field is not None}
    for name in _TOPOLOGY_NAMES:
        if name in given:
            given["topology"] = given.pop(name)
    return given


def _float32(value: Any) -> Any:
    """The number as the resource stores it; an API server can return it with more digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        if not math.isfinite(value):
            return value
        [held] = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return value
    return round(held, 7)


POLICY_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0102", policy_exists, (has_graphs,)),
    Check("DYT0103", _no_drafts),
    Check("DYT0104", partial(_has_no_objection, "source"), (_has_policy_field,)),
    Check("DYT0105", partial(_has_no_objection, "label key"), (_has_policy_field,)),
    Check("DYT0106", partial(_has_no_objection, "domain"), (_has_policy_field,)),
    Check("DYT0107", partial(_has_no_objection, "weight"), (_has_policy_field,)),
    Check("DYT0108", _key_fits_domain, (has_policy,)),
    Check("DYT0114", partial(_has_no_objection, "field"), (_has_policy_field,)),
    Check("DYT0116", _weight_acts, (has_policy,)),
    Check("DYT0117", _domain_short, (has_policy,)),
)
