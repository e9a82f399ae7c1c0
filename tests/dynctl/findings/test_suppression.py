"""`--suppress`: which checks and findings it leaves out, and the result of their check."""

from __future__ import annotations

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.findings.catalogue import Catalogue, parse
from dynctl.findings.report import CheckResult, Report, State
from dynctl.findings.runner import Check, found, outcome, run
from dynctl.findings.suppression import Suppressions

CODES = b"""
[DYT0403]
level = "warn"
title = "pod has a label"
template = "none"
expected = "one"
cause = "not written"
fix = "write it"
example = { subject = "Pod a.prod" }

[DYT0404]
level = "fail"
title = "pod label matches the node label"
template = "{value}"
expected = "the node's"
cause = "the node label changed"
fix = "delete {subject}"
example = { subject = "Pod a.prod", value = "zone-b" }
"""


@pytest.fixture
def codes() -> Catalogue:
    return parse(CODES)


def ran(codes: Catalogue, *given: str, unread: tuple[str, ...] = ()) -> Report:
    """A check with findings about three pods, run with ``--suppress`` values."""
    subjects = ("Pod a.prod", "Pod a-2.prod", "Pod a.test")
    check: Check[None] = Check(
        "DYT0404", lambda _: outcome([found(one, value="zone-b") for one in subjects], unread)
    )
    suppressed = Suppressions.parse(given, codes)
    return run([("worker pods", [check])], None, codes, suppressed=suppressed)


def result(codes: Catalogue, *given: str, unread: tuple[str, ...] = ()) -> CheckResult:
    [check] = ran(codes, *given, unread=unread).checks
    return check


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ((), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
        (("DYT0404=Pod a.prod",), ["Pod a-2.prod", "Pod a.test"]),
        (("dyt0404=Pod a.prod",), ["Pod a-2.prod", "Pod a.test"]),
        ((" dyt0404 = Pod a.prod ",), ["Pod a-2.prod", "Pod a.test"]),
        (("DYT0404=Pod a*.prod",), ["Pod a.test"]),
        (("DYT0404=Pod a.????",), ["Pod a-2.prod"]),
        (("DYT0404=Pod a.prod", "DYT0404=*.test"), ["Pod a-2.prod"]),
        # Names are case-sensitive, and a pattern matches the whole subject.
        (("DYT0404=pod a.prod",), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
        (("DYT0404=a.prod",), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
        (("DYT0403=*",), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
    ],
)
def test_findings_are_suppressed_by_subject(
    codes: Catalogue, given: tuple[str, ...], left: list[str]
):
    check = result(codes, *given)
    assert check.state is State.FAIL
    assert [one.subject for one in check.findings] == left
    assert check.message == (f"{3 - len(left)} suppressed" if len(left) < 3 else "")


def test_a_pattern_may_contain_an_equals_sign(codes: Catalogue):
    suppressed = Suppressions.parse(["DYT0404=Worker http://x?a=b"], codes)
    assert suppressed.subjects == {"DYT0404": ("Worker http://x?a=b",)}


@pytest.mark.parametrize("given", ["DYT0404", "dyt0404", "DYT0404=*"])
def test_a_check_with_only_suppressed_findings_is_skipped(codes: Catalogue, given: str):
    report = ran(codes, given)
    [check] = report.checks
    assert (check.state, check.message, check.findings) == (State.SKIP, "suppressed", [])
    assert (report.summary.failed, report.summary.skipped) == (0, 1)
    assert report.passes("warn")


def test_a_suppressed_check_does_not_run(codes: Catalogue):
    def never(_: None) -> None:
        raise AssertionError

    unused = Check("DYT0404", never)  # type: ignore[arg-type]
    suppressed = Suppressions.parse(["DYT0404"], codes)
    [check] = run([("worker pods", [unused])], None, codes, suppressed=suppressed).checks
    assert check.state is State.SKIP


def test_unread_facts_are_still_a_warning(codes: Catalogue):
    whole = result(codes, "DYT0404=*", unread=("node n1: no permission",))
    assert (whole.state, whole.unread) == (State.SKIP, True)
    assert whole.message == "unavailable: node n1: no permission; suppressed"
    part = result(codes, "DYT0404=*.prod", unread=("node n1: no permission",))
    assert part.message == "unavailable: node n1: no permission; 2 suppressed"


@pytest.mark.parametrize(
    ("given", "problem", "hint"),
    [
        ("DYT0405", "--suppress DYT0405: unknown code", "similar codes, DYT0403, DYT0404"),
        ("404=Pod a.prod", "--suppress 404=Pod a.prod: unknown code", "similar codes: DYT0404"),
        ("", "--suppress : unknown code", "dynctl explain lists all codes"),
        ("Pod a.prod", "unknown code", "dynctl explain lists all codes"),
        ("DYT0404=", "--suppress DYT0404=: no subject", "for example"),
        ("DYT0404= ", "no subject, expected CODE or CODE=SUBJECT", "for example"),
    ],
)
def test_invalid_values_are_rejected(codes: Catalogue, given: str, problem: str, hint: str):
    with pytest.raises(UsageProblem) as caught:
        Suppressions.parse([given], codes)
    assert problem in caught.value.message
    assert all(one in caught.value.hint for one in hint.split(", "))
