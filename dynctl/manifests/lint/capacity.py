"""Checks of capacity by domain, for components that are pinned to their domains: DYT09.

The rules also apply to running workers (dynctl.verify.checks.capacity): only the counts differ.
``required`` never crosses a domain: prefill in a domain without decode workers is lost work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.findings.runner import Check, Found, Outcome, Passed, Skipped, Wrong, found
from dynctl.manifests.graphs import Graph
from dynctl.manifests.lint.facts import LintFacts, has_policy, short_name, subject_of
from router_core import Role

# -- workers of one pool by domain value -----------------------------------------------------------


_UNEVEN: Final = 1.25
"""The largest factor between the decode-to-prefill ratios of two domains."""


@dataclass(frozen=True, slots=True)
class DomainSplit:
    """Workers of a pool by value of ``domain``. ``subject``: the pool's name in findings.

    ``ready``: words for workers that are missing, if only ready ones were counted.
    """

    subject: str
    domain: str
    prefill: Mapping[str, int]
    decode: Mapping[str, int]
    ready: str = ""

    @property
    def name(self) -> str:
        """The subject without its kind."""
        return self.subject.partition(" ")[2]

    @property
    def values(self) -> list[str]:
        return sorted({*self.prefill, *self.decode})

    @property
    def counted(self) -> str:
        """``az-1 2 prefill 4 decode, az-2 2 prefill 0 decode``."""
        return ", ".join(
            f"{value} {self.prefill.get(value, 0)} prefill {self.decode.get(value, 0)} decode"
            for value in self.values
        )


def without_decode(one: DomainSplit) -> Iterator[Found]:
    """Values with prefill and without decode workers: DYT0901 (required), DYT0906 (preferred)."""
    for value in one.values:
        if one.prefill.get(value) and not one.decode.get(value):
            yield found(
                one.subject,
                domain=one.domain,
                value=value,
                prefill=one.prefill[value],
                ready=one.ready,
            )


def single_decode(one: DomainSplit) -> Iterator[Found]:
    """Values with prefill workers and one decode worker: DYT0902."""
    for value in one.values:
        if one.prefill.get(value) and one.decode.get(value) == 1:
            yield found(one.subject, domain=one.domain, value=value, ready=one.ready)


def without_prefill(one: DomainSplit) -> Iterator[Found]:
    """Values with decode and without prefill workers: DYT0907."""
    for value in one.values:
        if one.decode.get(value) and not one.prefill.get(value):
            yield found(
                one.subject,
                domain=one.domain,
                value=value,
                decode=one.decode[value],
                ready=one.ready,
            )


def uneven(one: DomainSplit) -> Iterator[Found]:
    """The two values with the most different ratios of decode to prefill, if too much: DYT0908."""
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
            one.subject,
            low=low,
            high=high,
            least=f"1:{both[low]:.3g}",
            most=f"1:{both[high]:.3g}",
        )


# -- replicas that manifests pin -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pinned:
    """Replicas by domain value.

    ``loose``: components that are not pinned to one value; ``unknown``: without a known role.
    """

    split: DomainSplit
    loose: tuple[str, ...]
    unknown: tuple[str, ...]


def pinned(facts: LintFacts, graph: Graph) -> Pinned | None:
    """The graph's replicas by domain; None if the label of the domain is unknown."""
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
    split = DomainSplit(subject_of(graph), domain, counts["prefill"], counts["decode"])
    return Pinned(split, tuple(loose), tuple(unknown))


def _judged(
    facts: LintFacts,
    only: Callable[[Graph], bool],
    judge: Callable[[DomainSplit], Iterator[Found]],
    *,
    counted: bool = False,
) -> Outcome:
    """Check the graphs whose prefill and decode components are all pinned."""
    judged: list[DomainSplit] = []
    gaps: list[str] = []
    for graph in facts.governed:
        if not only(graph) or not (graph.of_role(Role.PREFILL) and graph.of_role(Role.DECODE)):
            continue
        one = pinned(facts, graph)
        gap = _gap(one)
        if gap is not None or one is None:
            gaps.append(f"{short_name(graph)}: {gap}")
        else:
            judged.append(one.split)
    reasons = "; ".join(gaps[:2]) + (f"; and {len(gaps) - 2} more" if gaps[2:] else "")
    if not judged and not gaps:
        return Skipped("no disaggregated graph has a policy with this enforcement")
    wrong = tuple(item for one in judged for item in judge(one))
    if wrong:
        return Wrong(wrong, f"not checked: {reasons}" if gaps else "")
    if gaps:
        return Skipped(reasons)
    named = len(judged) > 1
    counts = "; ".join(f"{one.name}: {one.counted}" if named else one.counted for one in judged[:2])
    return Passed(counts if counted else "")


def _gap(one: Pinned | None) -> str | None:
    """Why the capacity by domain is unknown."""
    if one is None:
        return "its domain or the label of the domain is not in these files"
    if one.unknown:
        return f"the role of {_some(one.unknown)} is unknown (DYT0111)"
    if one.loose:
        return f"not pinned to one {one.split.domain}: {_some(one.loose)}"
    return (
        None
        if one.split.prefill and one.split.decode
        else "it has no replicas for prefill or decode"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", .." if names[3:] else "")


def _stranded(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.required, without_decode, counted=True)


def _single(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.required, single_decode)


def _crossing(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.preferred, without_decode, counted=True)


def _idle(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.required, without_prefill)


def _ratios(facts: LintFacts) -> Outcome:
    return _judged(facts, facts.required, uneven)


CAPACITY_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0901", _stranded, (has_policy,)),
    Check("DYT0902", _single, (has_policy,)),
    Check("DYT0906", _crossing, (has_policy,)),
    Check("DYT0907", _idle, (has_policy,)),
    Check("DYT0908", _ratios, (has_policy,)),
)
