"""Checks of capacity by domain, as far as components are pinned to their domains.

``required`` never crosses a domain: what is prefilled where no decode worker stands is lost work.
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
"""Decode per prefill of two domains may differ by this factor."""


@dataclass(frozen=True, slots=True)
class DomainSplit:
    """Workers by value of ``domain``. ``subject``: the pool, as findings name it.

    ``ready``: what is said of workers of which there are none, where not all were counted.
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
    """Values with prefill and no decode: DYT0901, or DYT0906 where decode may be elsewhere."""
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
    """Values with prefill that one decode worker serves: DYT0902."""
    for value in one.values:
        if one.prefill.get(value) and one.decode.get(value) == 1:
            yield found(one.subject, domain=one.domain, value=value, ready=one.ready)


def without_prefill(one: DomainSplit) -> Iterator[Found]:
    """Values with decode and no prefill: DYT0907."""
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
    """The two values whose ratios of decode to prefill differ most, if too much: DYT0908."""
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
    """Replicas by domain value. ``loose``: components that may land in several, or anywhere;
    ``unknown``: those that may do either."""

    split: DomainSplit
    loose: tuple[str, ...]
    unknown: tuple[str, ...]


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
    split = DomainSplit(subject_of(graph), domain, counts["prefill"], counts["decode"])
    return Pinned(split, tuple(loose), tuple(unknown))


def _judged(
    facts: LintFacts,
    only: Callable[[Graph], bool],
    judge: Callable[[DomainSplit], Iterator[Found]],
    *,
    counted: bool = False,
) -> Outcome:
    """Judge the graphs whose every prefill and decode component is pinned; say why no other."""
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
    told = "; ".join(gaps[:2]) + (f"; and {len(gaps) - 2} more" if gaps[2:] else "")
    if not judged and not gaps:
        return Skipped("no disaggregated graph here has a policy of this enforcement")
    wrong = tuple(item for one in judged for item in judge(one))
    if wrong:
        return Wrong(wrong, f"not judged: {told}" if gaps else "")
    if gaps:
        return Skipped(told)
    named = len(judged) > 1
    told = "; ".join(f"{one.name}: {one.counted}" if named else one.counted for one in judged[:2])
    return Passed(told if counted else "")


def _gap(one: Pinned | None) -> str | None:
    """Why its capacity by domain cannot be told."""
    if one is None:
        return "its domain, or the label behind it, is not in these files"
    if one.unknown:
        return f"the role of {_some(one.unknown)} is not known (DYT0111)"
    if one.loose:
        return f"not pinned to one {one.split.domain}, so placement decides: {_some(one.loose)}"
    return None if one.split.prefill and one.split.decode else "it has no replicas of one role"


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
