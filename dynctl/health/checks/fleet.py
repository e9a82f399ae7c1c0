"""Checks of a fleet of ours: one for each condition that a dynctl frontend can report.

They judge nothing: the frontend evaluated its fleet, and each check shows that evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynctl.findings.catalogue import all_codes, conditions
from dynctl.findings.runner import Check, Found, Outcome, Skipped, outcome
from dynctl.health.checks.frontends import FRONTEND_NEEDS, unanswered_frontends
from dynctl.health.evaluation import DERIVED_CODES, condition_texts
from dynctl.health.facts import CheckFacts, Unread

#: The conditions of domains that a transfer policy requires.
_OF_REQUIRED_DOMAINS: Final = frozenset({"DYT0901", "DYT0902"})


def _has_dynctl_frontend(facts: CheckFacts) -> Skipped | None:
    if any(frontend.kind == "dynctl" for frontend in facts.frontends):
        return None
    return Skipped("no dynctl frontend: this section is about fleets of dynctl frontends")


def _why_unread(url: str, unread: Unread) -> str:
    """Why a frontend's conditions are unknown, with its address, and what to try."""
    why = unread.why if unread.why.startswith(url) else f"{url}/v1/fleet: {unread.why}"
    return f"{why}; {unread.hint.splitlines()[0]}" if unread.hint else why


def _no_required_domain(facts: CheckFacts) -> str:
    """That no fleet has a domain to judge; empty where one has, or where it is unknown."""
    ours = [frontend for frontend in facts.frontends if frontend.kind == "dynctl"]
    judged = any(frontend.requires_domain is not False for frontend in ours)
    return "" if judged else "no prefill worker requires a domain"


def _check(code: str) -> Check[CheckFacts]:
    def judge(facts: CheckFacts) -> Outcome:
        findings: dict[tuple[str, str], Found] = {}
        unread = unanswered_frontends(facts)
        for frontend in facts.frontends:
            if frontend.kind != "dynctl":
                continue
            if isinstance(frontend.conditions, Unread):
                unread.append(_why_unread(frontend.url, frontend.conditions))
                continue
            for condition in frontend.conditions:
                if condition.code == code:
                    # Several frontends of one fleet report the same.
                    _, expected, fix = condition_texts(code)
                    texts = (condition.message, expected, fix)
                    key = (condition.subject, condition.message)
                    findings[key] = Found(condition.subject, texts=texts)
                elif condition.code not in all_codes():
                    unread.append(
                        f"{frontend.url} reports {condition.code} {condition.subject}: "
                        f"{condition.message} (this dynctl does not know the code)"
                    )
        ordered = [findings[key] for key in sorted(findings)]
        nothing = _no_required_domain(facts) if code in _OF_REQUIRED_DOMAINS else ""
        return outcome(ordered, unread, nothing=nothing)

    return Check(code, judge, (*FRONTEND_NEEDS, _has_dynctl_frontend))


FLEET_CHECKS: Final[Sequence[Check[CheckFacts]]] = tuple(
    map(_check, (*sorted(DERIVED_CODES - set(conditions())), *conditions()))
)
