"""Checks of capacity by domain, as far as components are pinned to their domains.

``required`` never crosses a domain: what is prefilled where no decode worker stands is lost work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.findings.running import Check, Found, Outcome, Passed, Skipped, Wrong, found
from dynctl.topology.graphs import Graph
from dynctl.topology.lint_facts import LintFacts, has_policy

_UNEVEN: Final = 1.25
"""Decode per prefill of two domains may differ by this factor."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Replicas by domain value. ``loose``: components that may land in several, or anywhere;
    ``unknown``: those that may do either."""

    graph: Graph
    domain: str
    prefill: dict[str, int]
    decode: dict[str, int]
    loose: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def values(self) -> list[str]:
        return sorted({*self.prefill, *self.decode})


def pinned(facts: LintFacts, graph: Graph) -> Pinned | None:
    """The graph's replicas by domain; None where the files do not name the domain's label."""
    domain, key = facts.domain(graph), facts.label_key(graph)
    if domain is None or key is None:
        return None
    counts: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}}
    loose, unknown = [], []
    for one in graph.workers:
        if not one.replicas or one.role == "aggregated":
            continue
        if one.role is None:
            unknown.append(one.name)
            continue
        values = one.domains(key)
        if values is None or len(values) != 1:
            loose.append(one.name)
            continue
        [value] = values
        counts[one.role][value] = counts[one.role].get(value, 0) + one.replicas
    return Pinned(graph, domain, counts["prefill"], counts["decode"], tuple(loose), tuple(unknown))


def _judged(
    facts: LintFacts,
    only: Callable[[Graph], bool],
    judge: Callable[[Pinned], Iterator[Found]],
    *,
    counted: bool = False,
) -> Outcome:
    """Judge the graphs whose every prefill and decode component is pinned; say why no other."""
    judged: list[Pinned] = []
    gaps: list[str] = []
    for graph in facts.governed:
        if not only(graph) or not (graph.of_role("prefill") and graph.of_role("decode")):
            continue
        one = pinned(facts, graph)
        gap = _gap(one)
        if gap is not None or one is None:
            gaps.append(f"{graph.name}: {gap}")
        else:
            judged.append(one)
    told = "; ".join(gaps[:2]) + (f"; and {len(gaps) - 2} more" if gaps[2:] else "")
    if not judged and not gaps:
        return Skipped("no disaggregated graph here has a policy of this enforcement")
    wrong = tuple(item for one in judged for item in judge(one))
    if wrong:
        return Wrong(wrong, f"not judged: {told}" if gaps else "")
    if gaps:
        return Skipped(told)
    return Passed("; ".join(_counted(one) for one in judged[:2]) if counted else "")


def _gap(one: Pinned | None) -> str | None:
    """Why its capacity by domain cannot be told."""
    if one is None:
        return "its domain, or the label behind it, is not in these files"
    if one.unknown:
        return f"the role of {_some(one.unknown)} is not known (DYT0111)"
    if one.loose:
        return f"not pinned to one {one.domain}, so placement decides: {_some(one.loose)}"
    return None if one.prefill and one.decode else "it has no replicas of one role"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", .." if names[3:] else "")


def _counted(one: Pinned) -> str:
    return f"{one.graph.name}: " + ", ".join(
        f"{value} {one.prefill.get(value, 0)} prefill {one.decode.get(value, 0)} decode"
        for value in one.values
    )


def _stranded(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.required, _without_decode, counted=True)


def _crossing(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.preferred, _without_decode, counted=True)


def _without_decode(one: Pinned) -> Iterator[Found]:
    for value in one.values:
        if one.prefill.get(value) and not one.decode.get(value):
            yield found(one.graph.name, domain=one.domain, value=value, prefill=one.prefill[value])


def _single(facts: LintFacts) -> Outcome:
    def judge(one: Pinned) -> Iterator[Found]:
        for value in one.values:
            if one.prefill.get(value) and one.decode.get(value) == 1:
                yield found(one.graph.name, domain=one.domain, value=value)

    return _judged(facts, facts.required, judge)


def _idle(facts: LintFacts) -> Outcome:
    def judge(one: Pinned) -> Iterator[Found]:
        for value in one.values:
            if one.decode.get(value) and not one.prefill.get(value):
                yield found(
                    one.graph.name, domain=one.domain, value=value, decode=one.decode[value]
                )

    return _judged(facts, facts.required, judge)


def _uneven(facts: LintFacts) -> Outcome:
    def judge(one: Pinned) -> Iterator[Found]:
        both = {
            value: one.decode[value] / one.prefill[value]
            for value in one.values
            if one.prefill.get(value) and one.decode.get(value)
        }
        if len(both) < 2:
            return
        low, high = min(both, key=lambda v: both[v]), max(both, key=lambda v: both[v])
        if both[high] > _UNEVEN * both[low]:
            yield found(
                one.graph.name,
                low=low,
                high=high,
                least=f"1:{both[low]:.3g}",
                most=f"1:{both[high]:.3g}",
            )

    return _judged(facts, facts.required, judge)


CAPACITY_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0901", _stranded, (has_policy,)),
    Check("DYT0902", _single, (has_policy,)),
    Check("DYT0906", _crossing, (has_policy,)),
    Check("DYT0907", _idle, (has_policy,)),
    Check("DYT0908", _uneven, (has_policy,)),
)
