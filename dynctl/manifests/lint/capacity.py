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


def without_decode(split: DomainSplit) -> Iterator[Found]:
    """Values with prefill and without decode workers: DYT0901 (required), DYT0906 (preferred)."""
    for value in split.values:
        if split.prefill.get(value) and not split.decode.get(value):
            yield found(
                split.subject,
                domain=split.domain,
                value=value,
                prefill=split.prefill[value],
                ready=split.ready,
            )


def single_decode(split: DomainSplit) -> Iterator[Found]:
    """Values with prefill workers and one decode worker: DYT0902."""
    for value in split.values:
        if split.prefill.get(value) and split.decode.get(value) == 1:
            yield found(split.subject, domain=split.domain, value=value, ready=split.ready)


def without_prefill(split: DomainSplit) -> Iterator[Found]:
    """Values with decode and without prefill workers: DYT0907."""
    for value in split.values:
        if split.decode.get(value) and not split.prefill.get(value):
            yield found(
                split.subject,
                domain=split.domain,
                value=value,
                decode=split.decode[value],
                ready=split.ready,
            )


def uneven(split: DomainSplit) -> Iterator[Found]:
    """The two values with the most different ratios of decode to prefill, if too much: DYT0908."""
    both = {
        value: split.decode[value] / split.prefill[value]
        for value in split.values
        if split.prefill.get(value) and split.decode.get(value)
    }
    if len(both) < 2:
        return
    low, high = min(both, key=lambda v: both[v]), max(both, key=lambda v: both[v])
    if both[high] > _UNEVEN * both[low]:
        yield found(
            split.subject,
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
    for worker in graph.inference_workers:
        if not worker.replicas or worker.role == "aggregated":
            continue
        if worker.role is None:
            unknown.append(worker.name)
            continue
        values = worker.domains(key)
        if values is None or len(values) != 1:
            loose.append(worker.name)
            continue
        [value] = values
        counts[worker.role][value] = counts[worker.role].get(value, 0) + worker.replicas
    split = DomainSplit(subject_of(graph), domain, counts["prefill"], counts["decode"])
    return Pinned(split, tuple(loose), tuple(unknown))


def _judge_graphs(
    facts: LintFacts,
    only: Callable[[Graph], bool],
    judge: Callable[[DomainSplit], Iterator[Found]],
    *,
    counted: bool = False,
) -> Outcome:
    """Check the graphs whose prefill and decode components are all pinned."""
    splits, gaps = _pinned_splits(facts, only)
    reasons = "; ".join(gaps[:2]) + (f"; and {len(gaps) - 2} more" if gaps[2:] else "")
    if not splits and not gaps:
        return Skipped("no disaggregated graph has a policy with this enforcement")
    wrong = tuple(finding for split in splits for finding in judge(split))
    if wrong:
        return Wrong(wrong, f"not checked: {reasons}" if gaps else "")
    if gaps:
        return Skipped(reasons)
    if not counted:
        return Passed()
    if len(splits) == 1:
        return Passed(splits[0].counted)
    return Passed("; ".join(f"{split.name}: {split.counted}" for split in splits[:2]))


def _pinned_splits(
    facts: LintFacts, only: Callable[[Graph], bool]
) -> tuple[list[DomainSplit], list[str]]:
    """The splits of the graphs that are all pinned, and why others cannot be counted."""
    splits: list[DomainSplit] = []
    gaps: list[str] = []
    for graph in facts.governed:
        if not only(graph) or not (graph.of_role(Role.PREFILL) and graph.of_role(Role.DECODE)):
            continue
        pool = pinned(facts, graph)
        gap = _gap(pool)
        if gap is not None or pool is None:
            gaps.append(f"{short_name(graph)}: {gap}")
        else:
            splits.append(pool.split)
    return splits, gaps


def _gap(pool: Pinned | None) -> str | None:
    """Why the capacity by domain is unknown."""
    if pool is None:
        return "its domain or the label of the domain is not in these files"
    if pool.unknown:
        return f"the role of {_first_names(pool.unknown)} is unknown (DYT0111)"
    if pool.loose:
        return f"not pinned to one {pool.split.domain}: {_first_names(pool.loose)}"
    if pool.split.prefill and pool.split.decode:
        return None
    return "it has no replicas for prefill or decode"


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", .." if names[3:] else "")


def _stranded(facts: LintFacts) -> Outcome:
    return _judge_graphs(facts, facts.required, without_decode, counted=True)


def _single(facts: LintFacts) -> Outcome:
    return _judge_graphs(facts, facts.required, single_decode)


def _crossing(facts: LintFacts) -> Outcome:
    return _judge_graphs(facts, facts.preferred, without_decode, counted=True)


def _idle(facts: LintFacts) -> Outcome:
    return _judge_graphs(facts, facts.required, without_prefill)


def _ratios(facts: LintFacts) -> Outcome:
    return _judge_graphs(facts, facts.required, uneven)


CAPACITY_CHECKS: Final[Sequence[Check[LintFacts]]] = (
    Check("DYT0901", _stranded, (has_policy,)),
    Check("DYT0902", _single, (has_policy,)),
    Check("DYT0906", _crossing, (has_policy,)),
    Check("DYT0907", _idle, (has_policy,)),
    Check("DYT0908", _ratios, (has_policy,)),
)
