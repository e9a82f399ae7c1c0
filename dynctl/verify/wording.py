"""Words for messages of checks, and the outcome of a check that could run only in part. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dynctl.findings.runner import Found, Outcome, Passed, Skipped, Wrong, outcome

_LONGEST_EXCERPT: Final = 200


def tally(
    findings: Iterable[Found],
    unread: Iterable[str],
    judged: int,
    whole: int,
    noun: str,
    elsewhere: Iterable[str] = (),
) -> Outcome:
    """The outcome of a check that could check ``judged`` of ``whole`` objects.

    ``elsewhere``: codes or reasons for the others. The check passes only if each object was checked
    or is explained by a code; else it is skipped.
    """
    codes, words = _reasons(elsewhere)
    why = "; ".join([*words, *([f"see {', '.join(codes)}"] if codes else [])])
    counted = count_of(judged, whole, noun)
    if why and judged < whole:
        counted += f"; the others: {why}" if judged else f": {why}"
    result = outcome(findings, unread, counted)
    if isinstance(result, Passed) and (words or not judged):
        return Skipped(counted if why else f"no {noun} to check")
    if isinstance(result, Wrong) and words:
        return Wrong(result.found, "; ".join(filter(None, [result.note, f"checked {counted}"])))
    return result


def _reasons(elsewhere: Iterable[str]) -> tuple[list[str], list[str]]:
    """The codes, such as ``DYT0403``, and the reasons in words, such as ``not read``."""
    each = sorted({*elsewhere} - {""})
    codes = [reason for reason in each if reason.startswith("DYT")]
    return codes, [reason for reason in each if reason not in codes]


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
