"""Findings that say the same of many subjects, gathered so that one cause is read once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynctl.findings.report import Finding

_KINDS_OF_KINDS: Final = ("Resource",)
"""Their names are what a fix is about, not to whom it is done."""
_FEWEST: Final = 3
"""So many findings are gathered; two are read as fast one by one."""


@dataclass(frozen=True, slots=True)
class Alike:
    """``first`` stands for ``count`` findings, itself among them.

    ``one_fix``: they all have the fix of the first one, to the letter.
    """

    first: Finding
    count: int = 1
    one_fix: bool = True

    @property
    def text(self) -> str:
        """Of whom, and what."""
        subject, value, more = self.first.subject, self.first.value, self.count - 1
        # Reasons of others often name their subject themselves.
        if subject in value:
            return f"{value} (and {more:,} more like it)" if more else value
        return f"{subject} and {more:,} more: {value}" if more else f"{subject}: {value}"

    @property
    def fix(self) -> str:
        """What to do about all of them."""
        if self.one_fix:
            return self.first.fix
        return f"{self.first.fix}\nlikewise for {self.count - 1:,} more (-o wide shows all)"


def fixes(shown: Sequence[Alike]) -> list[str]:
    """What to do about all that is shown; what is done alike to each of many is said once."""
    groups: dict[str, list[Alike]] = defaultdict(list)
    for one in shown:
        groups[_pattern(one.first)[2]].append(one)
    told = []
    for group in groups.values():
        if len(group) < _FEWEST:
            told += [one.fix for one in group]
        else:
            same = all(one.one_fix and one.fix == group[0].fix for one in group)
            told.append(Alike(group[0].first, sum(one.count for one in group), same).fix)
    return list(dict.fromkeys(told))


def alike(findings: Sequence[Finding]) -> list[Alike]:
    """Three or more that differ in their subject only become one, where the first of them stood."""
    groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for one in findings:
        groups[_pattern(one)].append(one)
    told: list[Alike] = []
    for one in findings:
        group = groups[_pattern(one)]
        if len(group) < _FEWEST:
            told.append(Alike(one))
        elif one is group[0]:
            told.append(Alike(one, len(group), len({other.fix for other in group}) == 1))
    return told


def one_by_one(findings: Sequence[Finding]) -> list[Alike]:
    """Every finding for itself."""
    return [Alike(one) for one in findings]


def _pattern(finding: Finding) -> tuple[str, str, str]:
    """The texts without what names the subject.

    Commands name it without its kind and namespace; values are left alone there, since a name may
    be that of a domain's value.
    """
    value, expected, fix = (
        text.replace(finding.subject, "\0")
        for text in (finding.value, finding.expected, finding.fix)
    )
    kind, _, named = finding.subject.partition(" ")
    name = named.rpartition(".")[0] or named
    if kind.isalpha() and name and kind not in _KINDS_OF_KINDS:
        fix = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "\0", fix)
    return value, expected, fix
