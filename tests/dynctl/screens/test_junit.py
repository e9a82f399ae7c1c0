"""Checks as JUnit, read back as a CI system would."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from dynctl.base.errors import UsageProblem
from dynctl.base.options import GlobalOptions, OutputFormat
from dynctl.findings.report import CheckResult, Finding, Report, Section, State, summarize
from dynctl.screens.junit import junit
from dynctl.screens.render import emit

FINDING = Finding("Pod lab/w-0", "zone=<b>\x1b", 'zone="a"', "delete the pod")


def check(code: str, state: State, *findings: Finding, message: str = "") -> CheckResult:
    return CheckResult(code, "Labels", f"{code} holds", state, message, False, list(findings))


def report(*checks: CheckResult) -> Report:
    sections = [Section("Labels", list(checks)), Section("Empty", [])]
    return Report(["lab"], sections, summarize(sections))


REPORT = report(
    check("DYT0001", State.PASS, message="all well"),
    check("DYT0002", State.WARN, FINDING, message="one pod is young"),
    check("DYT0003", State.FAIL, FINDING, FINDING),
    check("DYT0004", State.FAIL, message="nothing is there"),
    check("DYT0005", State.SKIP, message="pods may not be read"),
)


def cases() -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(junit(REPORT))
    return {case.attrib["name"].split()[0]: case for case in root.iter("testcase")}


def test_a_suite_a_section_with_its_counts():
    root = ElementTree.fromstring(junit(REPORT))
    assert [suite.attrib for suite in root] == [
        {"name": "Labels", "tests": "5", "failures": "2", "errors": "0", "skipped": "1"},
        {"name": "Empty", "tests": "0", "failures": "0", "errors": "0", "skipped": "0"},
    ]
    assert root.attrib["tests"] == "5"
    assert cases()["DYT0003"].attrib == {"classname": "Labels", "name": "DYT0003 DYT0003 holds"}


def test_a_passed_check_has_no_output():
    assert list(cases()["DYT0001"]) == []


def test_a_warning_passes_with_its_findings_as_output():
    (out,) = cases()["DYT0002"]
    assert out.tag == "system-out"
    assert out.text is not None
    assert "one pod is young" in out.text
    assert 'Pod lab/w-0: zone=<b>?\n  expected: zone="a"\n  fix: delete the pod' in out.text


def test_every_finding_of_a_failed_check_is_a_failure():
    failures = list(cases()["DYT0003"])
    assert [one.tag for one in failures] == ["failure", "failure"]
    assert failures[0].attrib == {"message": "Pod lab/w-0: zone=<b>?", "type": "DYT0003"}
    assert "fix: delete the pod" in (failures[0].text or "")


def test_a_failure_without_findings_is_one_all_the_same():
    (failure,) = cases()["DYT0004"]
    assert failure.attrib["message"] == "nothing is there"


def test_a_skipped_check_has_its_reason():
    (skipped,) = cases()["DYT0005"]
    assert (skipped.tag, skipped.attrib["message"]) == ("skipped", "pods may not be read")


def test_emit_writes_a_report(capsys: pytest.CaptureFixture[str]):
    emit(REPORT, GlobalOptions(output=OutputFormat.JUNIT))
    assert capsys.readouterr().out == junit(REPORT)


def test_only_reports_are_written():
    with pytest.raises(UsageProblem, match="-o junit: this command runs no checks"):
        emit([1, 2], GlobalOptions(output=OutputFormat.JUNIT))
