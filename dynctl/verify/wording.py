"""Words for messages of checks, and the tally of a check that can judge only some objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dynctl.findings.runner import Found, Outcome, Passed, Skipped, Wrong, outcome
from dynctl.wire.kubernetes.objects import Pod

_LONGEST_EXCERPT: Final = 200
_LOSES: Final = "one pod after the other: its running requests may fail, its KV cache is lost"


@dataclass(slots=True)
class CheckTally:
    """What a check found in ``whole`` objects.

    ``unread``: what could not be read. ``explained``: of the objects that were not judged, the code
    that explains it, or a reason in words.
    """

    noun: str
    whole: int = 0
    wrong: list[Found] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)

    def outcome(self, judged: int | None = None) -> Outcome:
        """``judged`` None: all but the explained ones.

        The check passes only if each object was judged or is explained by a code.
        """
        judged = self.whole - len(self.explained) if judged is None else judged
        codes, words = self._reasons()
        why = "; ".join([*words, f"see {', '.join(codes)}"] if codes else words)
        counted = self._count_text(judged, why)
        result = outcome(self.wrong, self.unread, counted)
        if isinstance(result, Passed) and (words or not judged):
            return Skipped(counted if why else f"no {self.noun} to check")
        if isinstance(result, Wrong) and words:
            return Wrong(result.found, "; ".join(filter(None, [result.note, f"checked {counted}"])))
        return result

    def _reasons(self) -> tuple[list[str], list[str]]:
        """The codes, such as ``DYT0403``, and the reasons in words, such as ``not read``."""
        reasons = sorted({*self.explained} - {""})
        codes = [reason for reason in reasons if reason.startswith("DYT")]
        return codes, [reason for reason in reasons if reason not in codes]

    def _count_text(self, judged: int, why: str) -> str:
        """``3 of 4 pods; the others: see DYT0410``."""
        counted = count_of(judged, self.whole, self.noun)
        if not why or judged >= self.whole:
            return counted
        return f"{counted}; the others: {why}" if judged else f"{counted}: {why}"


def count_of(part: int, whole: int, noun: str) -> str:
    """``18 of 18 worker pods``."""
    return f"{part:,} of {many(whole, noun)}"


def many(number: int, noun: str) -> str:
    """``1 pod``, ``2,048 pods``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def some(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    all_of = list(names)
    more = f" and {len(all_of) - most:,} more" if all_of[most:] else ""
    return ", ".join(all_of[:most]) + more


def by_graph(texts: Iterable[tuple[str, str]]) -> str:
    """``kubernetes``; with several graphs ``my-llm.prod: kubernetes, ..``."""
    each = list(texts)
    return each[0][1] if len(each) == 1 else some(f"{name}: {text}" for name, text in each)


def quote(value: str) -> str:
    """``us-east-1a``, and ``""`` for an empty value."""
    return value or '""'


def restart_fix(pod: Pod) -> str:
    """The command that creates a pod again; for a serving one, what it costs."""
    command = f"kubectl delete pod {pod.name} -n {pod.namespace}"
    return f"{command} ({_LOSES})" if pod.ready else command


def excerpt(text: str) -> str:
    """The start of a foreign text, on one line, cut between words."""
    flat = " ".join(text.split())
    if len(flat) <= _LONGEST_EXCERPT:
        return flat
    return flat[:_LONGEST_EXCERPT].rpartition(" ")[0] + " .."


def age(seconds: float) -> str:
    """``12 s``, ``5 min``, ``3 h``, ``2 days``; 0 s if the clocks disagree."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
