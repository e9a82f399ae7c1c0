"""The catalogue of codes, its pages, and the runner of checks."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from dynctl.adapters.ports import StreamCode
from dynctl.findings.catalogue import (
    Catalogue,
    CatalogueError,
    all_codes,
    catalogue,
    conditions,
    doubts,
    parse,
)
from dynctl.findings.pages import code_list, markdown, page
from dynctl.findings.report import Report, State
from dynctl.findings.runner import Check, Passed, Skipped, found, outcome, run
from dynctl.health import conditions as codes_of_conditions
from dynctl.wire.index_events import DropCode

DOCS = Path(__file__).parents[3] / "docs" / "checks"

GOOD = """
[DYR0101]
level = "fail"
title = "it answers"
template = "{why}"
expected = "an answer within {seconds} s"
cause = "it is down"
fix = "start {subject}"
[DYR0101.example]
subject = "etcd"
why = "refused"
seconds = "5"
"""
PLACEHOLDER = re.compile(r"[<{][\w ]+[>}]")
EVERY = all_codes()
PROPER_NAMES = ("API", "Dynamo", "Grove", "KV")


def test_the_documentation_is_generated_from_the_codes():
    """`dynctl explain --markdown docs/checks` after a change of the codes."""
    assert {path.name: path.read_text() for path in DOCS.iterdir()} == markdown()


def test_titles_are_short_and_start_in_lower_case():
    for code, entry in EVERY.items():
        assert entry.title[0].islower() or entry.title.startswith(PROPER_NAMES), code
        assert not entry.title.endswith("."), code
        assert len(f"pass {code} {entry.title}") <= 80, code
    assert len({entry.title for entry in EVERY.values()}) == len(EVERY)


def test_every_code_has_a_concrete_example():
    for code, entry in EVERY.items():
        subject = set() if code in doubts() else {"subject"}
        assert set(entry.example) == {*subject, *entry.arguments}, code
        assert all(entry.example[name] for name in subject), code


def test_pages_show_no_placeholders():
    for entry in EVERY.values():
        shown = page(entry)
        texts = (shown.title, shown.found, shown.expected, shown.cause, shown.fix)
        assert all(texts), entry.code
        assert bool(shown.subject) != (entry.code in doubts()), entry.code
        assert not PLACEHOLDER.findall("\n".join(texts)), entry.code


def test_a_page_shows_the_example_of_its_code():
    shown = page(catalogue()["DYT0902"])
    assert shown.subject == "DynamoGraphDeployment my-llm.prod"
    assert shown.found == "zone us-east-1b has one decode worker ready"
    assert shown.fix == "add a decode replica in us-east-1b"


def test_the_codes_of_a_family_can_be_listed_alone():
    family = [one.code for one in code_list("DYT").codes]
    assert family == [code for code in catalogue() if code.startswith("DYT")]
    assert 0 < len(family) < len(code_list().codes) == len(EVERY)


def test_every_condition_of_a_frontend_is_explained():
    named = {value for name, value in vars(codes_of_conditions).items() if name == value}
    recoveries = {
        StreamCode.EVENTS_KEPT_UP,
        StreamCode.STREAM_CONNECTED,
        StreamCode.INDEX_CURRENT,
        StreamCode.REPLAY_AVAILABLE,
    }
    # What an engine publishes; no problem.
    recoveries |= {StreamCode.PAIRS_PUBLISHED, StreamCode.TOKENS_PUBLISHED}
    streams = {str(code) for code in (*StreamCode, *DropCode) if code not in recoveries}
    assert set(conditions()) == named | streams


DOUBT = """
[DYR0711]
title = "settings are known"
what = "{setting} is unknown"
effect = "another worker can win"
cause = "it is not published"
resolve = "set it"
[DYR0711.example]
setting = "temperature"
"""


def test_a_doubt_has_an_effect_and_a_way_to_resolve_it():
    entry = parse(DOUBT.encode(), doubts=True)["DYR0711"]
    assert entry.texts("", {"setting": "the queue"}) == (
        "the queue is unknown", "another worker can win", "set it",
    )  # fmt: skip
    assert page(entry).level == "doubt"
    assert [label for label, _ in page(entry).texts] == ["example", "effect", "why", "resolve"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('resolve = "set it"', "", "missing resolve"),
        ('resolve = "set it"', 'resolve = "set it"\nfix = "a"', "unknown fix"),
        ('setting = "temperature"', "", "example: expected values for ['setting'], got []"),
    ],
)
def test_an_invalid_doubt_is_rejected_with_the_code(old: str, new: str, problem: str):
    with pytest.raises(CatalogueError) as caught:
        parse(DOUBT.replace(old, new).encode(), doubts=True)
    assert "DYR0711" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('level = "fail"', 'level = "bad"', "level 'bad'"),
        ('fix = "start {subject}"', "", "missing fix"),
        ('fix = "start', 'colour = "red"\nfix = "start', "unknown colour"),
        ("[DYR0101]", "[ABC0101]", "expected DYE, DYR, DYT and four digits"),
        ('cause = "it is down"', 'cause = " "', "cause: expected a text"),
        ('"{why}"', '"{why"', "expected '}'"),
        ('"{why}"', '"{why.x}"', "expected {names} only"),
        ("[DYR0101]", "[DYR0101", "codes:"),
        ('level = "fail"', 'level = "fail"\nretired = 1', "retired"),
        ('why = "refused"', "", "example: expected values for ['seconds', 'subject', 'why']"),
        ('why = "refused"', 'why = "refused"\nport = "1"', "example: expected values for"),
        ('seconds = "5"', "seconds = 5", "example: expected a table of texts"),
    ],
)
def test_an_invalid_file_is_rejected_with_the_code(old: str, new: str, problem: str):
    with pytest.raises(CatalogueError) as caught:
        parse(GOOD.replace(old, new).encode())
    assert problem in str(caught.value)


def test_codes_must_be_in_ascending_order():
    with pytest.raises(CatalogueError, match="ascending"):
        parse((GOOD.replace("0101", "0102") + GOOD).encode())


@pytest.mark.parametrize(
    ("text", "expected"), [("303", "DYR0303"), ("dyr303", "DYR0303"), ("DYR03O3", "DYR0303")]
)
def test_similar_codes_are_found(text: str, expected: str):
    assert expected in catalogue().near(text)


def test_no_code_is_similar_to_another_word():
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


def test_a_finding_with_wrong_arguments_is_a_defect(codes: Catalogue):
    check: Check[int] = Check("DYR0101", lambda _: outcome([found("etcd", reason="refused")]))
    with pytest.raises(ValueError, match="DYR0101 takes"):
        ran(codes, check)


def test_a_missing_need_skips_the_check_before_it_runs(codes: Catalogue):
    def never(_: int) -> Passed:
        raise AssertionError

    check: Check[int] = Check("DYR0101", never, (lambda _: Skipped("no permission", unread=True),))
    report = ran(codes, check)
    assert report.summary.skipped == report.summary.unread == 1
    assert report.checks[0].message == "no permission"


def test_unread_facts_never_pass():
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


def test_a_fleet_without_workers_has_a_fix_with_discovery_and_without() -> None:
    fix = conditions()["NO_WORKERS"].fix
    assert "with discovery" in fix
    assert "--workers-file" in fix
