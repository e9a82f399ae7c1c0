"""Which checks and findings `--suppress` leaves out, and what is left of their check."""

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
title = "the label is there"
template = "none"
expected = "one"
cause = "nobody wrote it"
fix = "write it"

[DYT0404]
level = "fail"
title = "the labels agree"
template = "{value}"
expected = "the node's"
cause = "it moved"
fix = "delete {subject}"
"""


@pytest.fixture
def codes() -> Catalogue:
    return parse(CODES)


def ran(codes: Catalogue, *given: str, unread: tuple[str, ...] = ()) -> Report:
    """Three pods whose labels differ, with what ``--suppress`` was given."""
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
        # Kubernetes tells names apart by their case, and a pattern is about the whole subject.
        (("DYT0404=pod a.prod",), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
        (("DYT0404=a.prod",), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
        (("DYT0403=*",), ["Pod a.prod", "Pod a-2.prod", "Pod a.test"]),
    ],
)
def test_findings_are_left_out_by_their_subject(
    codes: Catalogue, given: tuple[str, ...], left: list[str]
):
    told = result(codes, *given)
    assert told.state is State.FAIL
    assert [one.subject for one in told.findings] == left
    assert told.message == (f"{3 - len(left)} suppressed" if len(left) < 3 else "")


def test_a_pattern_may_hold_an_equals_sign(codes: Catalogue):
    suppressed = Suppressions.parse(["DYT0404=Worker http://x?a=b"], codes)
    assert suppressed.subjects == {"DYT0404": ("Worker http://x?a=b",)}


@pytest.mark.parametrize("given", ["DYT0404", "dyt0404", "DYT0404=*"])
def test_a_check_of_which_nothing_is_left_is_skipped(codes: Catalogue, given: str):
    report = ran(codes, given)
    [told] = report.checks
    assert (told.state, told.message, told.findings) == (State.SKIP, "suppressed", [])
    assert (report.summary.failed, report.summary.skipped) == (0, 1)
    assert report.passes("warn")


def test_a_suppressed_check_is_not_judged(codes: Catalogue):
    def never(_: None) -> None:
        raise AssertionError

    check = Check("DYT0404", never)  # type: ignore[arg-type]
    suppressed = Suppressions.parse(["DYT0404"], codes)
    [told] = run([("worker pods", [check])], None, codes, suppressed=suppressed).checks
    assert told.state is State.SKIP


def test_what_could_not_be_read_is_still_a_warning(codes: Catalogue):
    whole = result(codes, "DYT0404=*", unread=("node n1: no permission",))
    assert (whole.state, whole.unread) == (State.SKIP, True)
    assert whole.message == "not told: node n1: no permission; suppressed"
    part = result(codes, "DYT0404=*.prod", unread=("node n1: no permission",))
    assert part.message == "not told: node n1: no permission; 2 suppressed"


@pytest.mark.parametrize(
    ("given", "problem", "hint"),
    [
        ("DYT0405", "--suppress DYT0405: no such code", "near it, DYT0403, DYT0404"),
        ("404=Pod a.prod", "--suppress 404=Pod a.prod: no such code", "near it: DYT0404"),
        ("", "--suppress : no such code", "dynctl explain lists all"),
        ("Pod a.prod", "no such code", "dynctl explain lists all"),
        ("DYT0404=", "--suppress DYT0404=: no subject", "for example"),
        ("DYT0404= ", "no subject, expected CODE or CODE=SUBJECT", "for example"),
    ],
)
def test_what_cannot_be_suppressed_is_named(codes: Catalogue, given: str, problem: str, hint: str):
    with pytest.raises(UsageProblem) as caught:
        Suppressions.parse([given], codes)
    assert problem in caught.value.message
    assert all(one in caught.value.hint for one in hint.split(", "))
