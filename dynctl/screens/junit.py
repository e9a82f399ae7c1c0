"""A report of checks as JUnit XML, which CI systems show as tests.

JUnit has no warnings: a check that warns counts as passed, with the warning in its output.
"""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree

from dynctl.findings.report import CheckResult, Finding, Report, Section, State

_NO_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """One testsuite per section, one testcase per check; ends with a newline."""
    suites = [_suite(section) for section in report.sections]
    root = ElementTree.Element("testsuites", {"name": "dynctl"} | _counts(report.checks))
    root.extend(suites)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite(section: Section) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite", {"name": _plain(section.name)} | _counts(section.checks)
    )
    suite.extend(_case(section, check) for check in section.checks)
    return suite


def _case(section: Section, check: CheckResult) -> ElementTree.Element:
    name = _plain(f"{check.code} {check.title}")
    case = ElementTree.Element("testcase", classname=_plain(section.name), name=name)
    if check.state is State.SKIP:
        ElementTree.SubElement(case, "skipped", message=_plain(check.message))
    elif check.state is State.FAIL:
        for finding in check.findings:
            found = f"{finding.subject}: {finding.value}"
            element = ElementTree.SubElement(case, "failure", message=_plain(found))
            element.set("type", check.code)
            element.text = _plain(_finding_text(finding))
        if not check.findings:
            element = ElementTree.SubElement(case, "failure", message=_plain(check.message))
            element.set("type", check.code)
    elif check.state is State.WARN:
        lines = ["warning", *filter(None, [check.message]), *map(_finding_text, check.findings)]
        ElementTree.SubElement(case, "system-out").text = _plain("\n".join(lines))
    return case


def _finding_text(finding: Finding) -> str:
    fix = f"\n  fix: {finding.fix}" if finding.fix else ""
    return f"{finding.subject}: {finding.value}\n  expected: {finding.expected}{fix}"


def _counts(checks: list[CheckResult]) -> dict[str, str]:
    states = [check.state for check in checks]
    return {
        "tests": str(len(checks)),
        "failures": str(states.count(State.FAIL)),
        "errors": "0",
        "skipped": str(states.count(State.SKIP)),
    }


def _plain(text: str) -> str:
    """Without the characters that XML cannot hold at all."""
    return _NO_XML.sub("?", text)
