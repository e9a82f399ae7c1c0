"""The file of codes, its pages, and the running of checks in general."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dynctl.findings.catalogue import Catalogue, CatalogueError, catalogue, parse
from dynctl.findings.pages import code_list, markdown, page
from dynctl.findings.report import Report, State
from dynctl.findings.runner import Check, Passed, Skipped, found, outcome, run

DOCS = Path(__file__).parents[3] / "docs" / "checks.md"

GOOD = """
[DYR0101]
level = "fail"
title = "it answers"
template = "{why}"
expected = "an answer within {seconds} s"
cause = "it is down"
fix = "start {subject}"
"""


def test_the_documentation_is_made_from_the_codes():
    """`dynctl explain --markdown > docs/checks.md` after a change of codes.toml."""
    assert DOCS.read_text() == markdown(catalogue()) + "\n"


def test_every_code_is_explained_in_full():
    for code, entry in catalogue().items():
        assert entry.title[0].islower() or entry.title.startswith("Dynamo"), code
        assert not entry.title.endswith("."), code
        assert len(f"pass {code} {entry.title}") <= 80, code
        assert entry.fix, code
        told = page(entry)
        assert "{" not in told.found + told.expected + told.fix


def test_the_codes_of_a_family_can_be_listed_alone():
    family = [one.code for one in code_list("DYT").codes]
    assert family == [code for code in catalogue() if code.startswith("DYT")]
    assert 0 < len(family) < len(code_list().codes) == len(catalogue())


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('level = "fail"', 'level = "bad"', "level 'bad'"),
        ('fix = "start {subject}"', "", "lacks fix"),
        ('fix = "start', 'colour = "red"\nfix = "start', "unknown colour"),
        ("[DYR0101]", "[ABC0101]", "expected DYR or DYT and four digits"),
        ('cause = "it is down"', 'cause = " "', "cause: expected a text"),
        ('"{why}"', '"{why"', "expected '}'"),
        ('"{why}"', '"{why.x}"', "expected {names} only"),
        ("[DYR0101]", "[DYR0101", "codes:"),
        ('level = "fail"', 'level = "fail"\nretired = 1', "retired"),
    ],
)
def test_a_file_that_is_not_as_it_must_be_is_named(old: str, new: str, problem: str):
    with pytest.raises(CatalogueError) as caught:
        parse(GOOD.replace(old, new).encode())
    assert problem in str(caught.value)


def test_codes_stand_in_order():
    with pytest.raises(CatalogueError, match="ascending"):
        parse((GOOD.replace("0101", "0102") + GOOD).encode())


@pytest.mark.parametrize(
    ("text", "expected"), [("303", "DYR0303"), ("dyr303", "DYR0303"), ("DYR03O3", "DYR0303")]
)
def test_near_codes_are_found(text: str, expected: str):
    assert expected in catalogue().near(text)


def test_nothing_is_near_to_nonsense():
    assert catalogue().near("hello") == []


# -- running ---------------------------------------------------------------------------------------


@pytest.fixture
def codes() -> Catalogue:
    return parse(GOOD.encode())


def ran(codes: Catalogue, *checks: Check[int], facts: int = 1) -> Report:
    return run([("planes", checks)], facts, codes)


def test_a_finding_fills_in_the_texts_of_its_code(codes: Catalogue):
    check: Check[int] = Check(
        "DYR0101", lambda facts: outcome([found("etcd", why="refused", seconds=facts)])
    )
    [result] = ran(codes, check).checks
    assert result.state is State.FAIL
    [finding] = result.findings
    assert (finding.value, finding.expected, finding.fix) == (
        "refused",
        "an answer within 1 s",
        "start etcd",
    )


def test_a_finding_with_other_arguments_is_a_defect(codes: Catalogue):
    check: Check[int] = Check("DYR0101", lambda _: outcome([found("etcd", reason="refused")]))
    with pytest.raises(ValueError, match="DYR0101 takes"):
        ran(codes, check)


def test_a_need_that_is_not_met_skips_before_the_judge_is_asked(codes: Catalogue):
    def never(_: int) -> Passed:
        raise AssertionError

    check: Check[int] = Check("DYR0101", never, (lambda _: Skipped("no permission", unread=True),))
    report = ran(codes, check)
    assert report.summary.skipped == report.summary.unread == 1
    assert report.checks[0].message == "no permission"


def test_what_could_not_be_read_is_never_a_pass():
    assert outcome((), ["a is silent"]) == Skipped("a is silent", unread=True)
    assert outcome((), (), "two") == Passed("two")


def test_the_report_is_a_contract(codes: Catalogue):
    check: Check[int] = Check(
        "DYR0101", lambda _: outcome([found("etcd", why="refused", seconds=5)])
    )
    plain = msgspec.to_builtins(ran(codes, check))
    assert plain == {
        "sources": [],
        "sections": [
            {
                "name": "planes",
                "checks": [
                    {
                        "code": "DYR0101",
                        "section": "planes",
                        "title": "it answers",
                        "state": "fail",
                        "message": "",
                        "unread": False,
                        "findings": [
                            {
                                "subject": "etcd",
                                "value": "refused",
                                "expected": "an answer within 5 s",
                                "fix": "start etcd",
                            }
                        ],
                    }
                ],
            }
        ],
        "summary": {"passed": 0, "warnings": 0, "failed": 1, "skipped": 0, "unread": 0},
        "not_checked": [],
        "kind": "CheckReport",
        "schema": 1,
    }
